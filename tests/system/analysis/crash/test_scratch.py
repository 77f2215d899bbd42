"""Directories of a run, the remains of killed runs, and what power cuts need."""

import os
from pathlib import Path

import pytest

from ackstate.analysis.crash import power_cuts
from ackstate.analysis.crash.runs import LayerSkippedError, scratch_directory


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


@pytest.mark.parametrize(
    ("planted", "why"),
    [({}, "need root"), ({"_mkfs": lambda: None}, r"mkfs\.ext4"), ({"_LOOP_CONTROL": Path("/nowhere")}, "no /nowhere")],
)
def test_it_says_what_is_missing(monkeypatch, planted, why):
    monkeypatch.setattr(os, "geteuid", lambda: 0 if planted else 1000)
    for name, value in planted.items():
        monkeypatch.setattr(power_cuts, name, value)
    with pytest.raises(LayerSkippedError, match=why):
        power_cuts.LoopDisk()
