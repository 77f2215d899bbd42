"""Directories of a run, and the remains of killed runs."""

import os

from ackstate.analysis.crash.runs import scratch_directory


def ended_pid():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_a_directory_is_there_for_as_long_as_it_is_used(tmp_path):
    with scratch_directory("calls", tmp_path) as directory:
        (directory / "below").mkdir()
        assert directory.name.startswith(f"ackstate-calls-{os.getpid()}-")
    assert list(tmp_path.iterdir()) == []


def test_only_what_processes_that_have_ended_left_of_this_purpose_is_removed(tmp_path):
    pid = ended_pid()
    left = tmp_path / f"ackstate-calls-{pid}-x"
    (left / "below").mkdir(parents=True)
    kept = [f"ackstate-calls-{os.getpid()}-x", f"ackstate-damage-{pid}-x", "ackstate-calls-other", f"calls-{pid}-x"]
    for name in kept:
        (tmp_path / name).mkdir()
    with scratch_directory("calls", tmp_path) as directory:
        assert {path.name for path in tmp_path.iterdir()} == {*kept, directory.name}
