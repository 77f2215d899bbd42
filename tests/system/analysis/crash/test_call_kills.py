"""L2 for any subject finds at once each bug that a kill between two system calls shows, in any language."""

import faulthandler
import os
import re
import shutil
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest

from ackstate.analysis.crash import kills as call_tracer
from ackstate.analysis.crash.campaign import Budget, Totals, run_layer
from ackstate.analysis.crash.kills import NEVER, CallTracer, call_kills
from ackstate.analysis.crash.oracle import Promise
from ackstate.analysis.crash.runs import LayerSkippedError
from ackstate.analysis.crash.subjects import NaiveSubject
from command_line import run
from crash import first_runs

SUBJECTS = Path(__file__).parent / "subjects"


@pytest.fixture
def tracer():
    try:
        return CallTracer()
    except LayerSkippedError as error:
        pytest.skip(str(error))


def ended(tracer, program, kill_at=NEVER):
    """How a traced program ended: its status, or the number of a signal below 0."""
    tracer.begin(kill_at)
    pid = os.fork()
    if pid == 0:
        try:
            tracer.run(program)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcomes_of(subject, count=6):
    return first_runs(call_kills(1, subject=subject, shrink_tries=0), count)


def write_all(directory, names):
    for name in names:
        (directory / name).mkdir()


def test_a_program_dies_before_its_nth_call_and_not_before(tracer, tmp_path):
    for kill_at in range(1, 4):
        directory = tmp_path / str(kill_at)
        directory.mkdir()
        assert ended(tracer, partial(write_all, directory, "abc"), kill_at) == -signal.SIGKILL
        assert (tracer.count, tracer.met) == (kill_at, "mkdir")
        assert len(list(directory.iterdir())) == kill_at - 1
    assert ended(tracer, lambda: write_all(tmp_path, "abc"), 4) == 0
    assert (tracer.count, tracer.met) == (3, None)


def open_for(flags):
    return lambda path: os.close(os.open(path, flags, 0o600))


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (open_for(os.O_RDONLY), 0),
        (open_for(os.O_WRONLY), 0),
        (open_for(os.O_WRONLY | os.O_CREAT), 1),
        (open_for(os.O_WRONLY | os.O_TRUNC), 1),
        (lambda path: path.rename(path.with_suffix(".new")), 1),
        (lambda path: path.unlink(), 1),
        (lambda path: os.truncate(path, 0), 1),
        (lambda path: path.read_bytes(), 0),
        (lambda _: os.sync(), 1),
        (lambda path: os.link(path, path.with_suffix(".new")), 1),
        (lambda path: path.with_suffix(".new").symlink_to(path), 1),
    ],
)
def test_calls_that_change_nothing_are_not_counted(tracer, tmp_path, call, count):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    assert ended(tracer, lambda: call(path)) == 0
    assert tracer.count == count


def abort():
    faulthandler.disable()
    os.abort()


@pytest.mark.parametrize(
    ("end", "status"),
    [(lambda: os._exit(3), 3), (abort, -signal.SIGABRT), (lambda: os.kill(os.getpid(), signal.SIGTERM), -15)],
)
def test_a_program_that_ends_by_itself_ends_so_for_the_harness(tracer, end, status):
    assert (ended(tracer, end), tracer.met) == (status, None)


def test_calls_of_threads_and_children_count_and_all_die(tracer, tmp_path):
    def work():
        threads = [threading.Thread(target=write_all, args=(tmp_path, [f"thread {number}"])) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        subprocess.run(["sh", "-c", f"mkdir '{tmp_path}/child'; (mkdir '{tmp_path}/grandchild')"], check=True)

    assert ended(tracer, work) == 0
    assert len(list(tmp_path.iterdir())) == 6
    all_calls = tracer.count
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    assert ended(tracer, work, all_calls) == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir())[:1] == ["child"]
    assert not (tmp_path / "grandchild").exists()


def test_a_signal_that_a_program_handles_reaches_it(tracer):
    def handle():
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
        os.kill(os.getpid(), signal.SIGUSR1)

    assert ended(tracer, handle) == 7


def test_a_killed_tracer_takes_its_program_along(tracer, tmp_path):
    pipe = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        tracer.run(lambda: (os.write(pipe[1], f"{os.getpid()} ".encode()), signal.pause()), unneeded=[pipe[1]])
    os.close(pipe[1])
    program = int(os.read(pipe[0], 20))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    # It held the other end, and does no more.
    assert os.read(pipe[0], 1) == b""
    assert program != pid
    os.close(pipe[0])


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        ((call_tracer.platform, "machine", lambda: "riscv64"), "need Linux on x86_64 or aarch64"),
        ((call_tracer, "_PR_SET_SECCOMP", 12345), r"cannot be traced here \(ptrace or seccomp\): Invalid argument"),
        ((call_tracer, "_PTRACE_SEIZE", 12345), r"cannot be traced here \(ptrace or seccomp\): "),
    ],
)
def test_the_layer_is_skipped_where_it_cannot_trace_and_says_why(monkeypatch, capsys, planted, why):
    monkeypatch.setattr(*planted)
    outcome = run(capsys, "crash", "--layer", "L2", "--subject", "naive", "--runs", "1")
    assert outcome.status == 2
    assert re.search(f"L2 was skipped: .*{why}", outcome.out)


class InPlace(NaiveSubject):
    """Empties its file, and writes it again."""

    def _save(self):
        temporary = self._path
        self._path = temporary.with_name("other")
        super()._save()
        text = self._path.read_text()
        self._path.unlink()
        self._path = temporary
        temporary.write_text(text)


def test_a_subject_that_keeps_its_promises_survives_a_kill_at_every_call(tracer):
    totals = Totals(1)
    layer = partial(call_kills, subject=NaiveSubject, shrink_tries=0)
    seen = run_layer(layer, totals, Budget(3_600, run_count_max=4))
    assert not seen.has_failed
    assert totals.cycles >= 4 * 16
    assert seen.untested() == ""
    assert seen.counts["crashed_early"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours", pytest.param("ours-limited", marks=pytest.mark.soak)])
def test_ours_survives_a_kill_at_every_call(tracer, name):
    outcomes = outcomes_of(name, 2)
    assert [outcome.broken for outcome in outcomes] == [()] * 2


def test_a_file_that_is_written_in_place_is_found(tracer):
    (broken,) = outcomes_of(InPlace, 20)[-1].broken
    assert broken.promise == Promise.I5
    assert any(re.fullmatch(r"SIGKILL before its call \d+, write", line) for line in broken.story)


@pytest.fixture
def compiled(tmp_path):
    """Compile the subject in C."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")

    def build(*options):
        program = tmp_path / f"subject{len(list(tmp_path.iterdir()))}"
        command = [compiler, "-O1", *options, "-o", program, SUBJECTS / "receipts_first.c"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"a program cannot be linked here with {options}")
        return str(program)

    return build


def is_found(outcome):
    return {broken.promise for broken in outcome.broken} == {Promise.I2}


@pytest.mark.parametrize(
    "options", [pytest.param((), id="dynamic"), pytest.param(("-static",), id="static", marks=pytest.mark.soak)]
)
def test_receipts_before_writes_are_found_in_c(tracer, compiled, options):
    assert is_found(outcomes_of(compiled(*options))[-1])
    assert not outcomes_of(compiled(*options, "-DWRITES_FIRST"), 3)[-1].broken
