"""Hostile subjects, silent ones, large ones: the harness reports the error and never hangs."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ackstate.analysis.crash.conversation import (
    Accepted,
    Durable,
    Ready,
    Recover,
    ReportRequest,
    StartRequest,
    SubjectError,
    printable,
)
from ackstate.analysis.crash.process import SubjectProcess, subject_launch
from ackstate.analysis.crash.subject import EntryRun, Operation, OperationKind, Report
from ackstate.analysis.crash.subjects import NaiveSubject
from waiting import wait_until

LOG = {1: 1_000}


def acks(count):
    return [Operation(number, OperationKind.ACK, 1, number) for number in range(count)]


def python(program):
    """A subject without any of our code."""
    return SubjectProcess.spawn([sys.executable, "-S", "-c", textwrap.dedent(program)])


def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


class Talkative(NaiveSubject):
    """Its output must not get between the answers."""

    def apply(self, operation):
        os.write(1, b"applied\n")
        super().apply(operation)


def test_a_forked_subject_talks_and_says_everything_before_it_dies(tmp_path):
    with SubjectProcess.fork(Talkative) as process:
        process.send(StartRequest(tmp_path, LOG), *acks(3), Operation(3, OperationKind.PERSIST), ReportRequest())
        before, report = process.wait_for(Report)
        assert before == [Ready(), *map(Accepted, range(4)), Durable((0, 1, 2))]
        assert report == Report([EntryRun(1, 0, 3)])
        process.send(*[Operation(number, OperationKind.ACK, 1, number) for number in (4, 5)])
        said = process.events(60)
        while len(said) < 2:
            said += process.events(60)
        assert process.kill() == []
    assert said == [Accepted(4), Accepted(5)]
    with SubjectProcess.fork(NaiveSubject) as process:
        process.send(Recover(tmp_path, LOG))
        assert process.wait_for(Report) == ([], report)


def test_neither_side_waits_for_the_other_when_both_pipes_are_full(tmp_path):
    """Ten thousand requests fill one pipe, their answers the other."""
    with SubjectProcess.fork(NaiveSubject) as process:
        process.send(StartRequest(tmp_path, {1: 10_000}), *acks(10_000), ReportRequest())
        time.sleep(0.1)
        before, report = process.wait_for(Report)
    assert before == [Ready(), *map(Accepted, range(10_000))]
    assert report.acked == [EntryRun(1, 0, 10_000)]


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("print('hello')", "no answer: 'hello' is no JSON object"),
        ("import sys; sys.exit('no such disk')", "ended by itself with status 1: 'no such disk'"),
        ("raise ValueError('of mine')", "ended by itself with status 1: 'ValueError: of mine'"),
        ("import os; os.abort()", "died of SIGABRT"),
        (r"""print('{"error":"\\u001b[2J\\nL4"}', flush=True); input()""", r"cannot continue: \\x1b\[2J\\nL4$"),
        ("import sys; print(end='{', flush=True); sys.stdin.read()", "silent for 0.3 s"),
        ("import os; os.close(1); input()", "closed its answers"),
        ("import sys; sys.stdout.write('x' * 3000); print()", r"x\.\.\. \(3000 bytes\) is no JSON"),
    ],
)
def test_what_a_subject_does_wrong_is_named(program, error):
    with python(program) as process, pytest.raises(SubjectError, match=error):
        process.wait_for(Ready, patience_s=0.3 if "silent" in error else 60)
    assert not is_alive(process.pid)


def test_complaints_without_end_do_not_hold_it_up(tmp_path):
    program = """
        import sys
        input()
        for number in range(100_000):
            print("complaint", number, file=sys.stderr)
        print('{"ready":true}', flush=True)
        raise SystemExit("the last one")
    """
    with python(program) as process:
        process.send(StartRequest(tmp_path, LOG))
        assert process.wait_for(Ready) == ([], Ready())
        with pytest.raises(SubjectError, match="status 1: 'the last one'"):
            process.wait_for(Ready)


def test_what_it_said_before_a_wrong_line_is_told_first(tmp_path):
    program = """input(); print('{"ready":true}\\n{"accepted":0}\\nthen garbage', flush=True); input(); input()"""
    with python(program) as process:
        process.send(StartRequest(tmp_path, LOG), *acks(1))
        answers = process.events(60)
        while len(answers) < 2:
            answers += process.events(60)
        assert answers == [Ready(), Accepted(0)]
        for _ in range(2):
            with pytest.raises(SubjectError, match="then garbage"):
                process.events(60)


def test_what_was_not_said_to_the_end_of_the_line_was_not_said(tmp_path):
    program = """input(); print('{"ready":true}\\n{"durable":[0', end='', flush=True); input()"""
    with python(program) as process:
        process.send(StartRequest(tmp_path, LOG))
        assert process.events(60) == [Ready()]
        assert process.kill() == []


def test_a_subject_that_had_ended_was_not_killed(tmp_path):
    with python("""input(); print('{"ready":true}')""") as process:
        process.send(StartRequest(tmp_path, LOG))
        process.wait_for(Ready)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        answers, error = process.last_words()
    assert (answers, str(error)) == ([], "the subject ended by itself with status 0")


def test_a_stopped_subject_stands_still_and_can_be_killed(tmp_path):
    with SubjectProcess.fork(NaiveSubject) as process:
        process.send(StartRequest(tmp_path, LOG))
        process.wait_for(Ready)
        process.stop()
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        process.send(*acks(1))
        assert process.events(0.05) == []
        assert process.kill() == []
    with SubjectProcess.fork(NaiveSubject) as process:
        process.send(StartRequest(tmp_path, LOG))
        process.wait_for(Ready)
        os.kill(process.pid, signal.SIGTERM)
        with pytest.raises(SubjectError, match="died of SIGTERM"):
            process.wait_for(Ready)
        with pytest.raises(SubjectError, match="died of SIGTERM"):
            process.stop()


def test_what_a_command_starts_dies_with_it():
    """A wrapper that goes on living beside the real subject would leave that alive."""
    with SubjectProcess.spawn(["sh", "-c", "sleep 600 & echo '{\"acked\":[['$!',0,0]]}'; wait"]) as process:
        process.send(ReportRequest())
        ((started, _, _),) = process.wait_for(Report)[1].acked
        assert is_alive(started)
        process.kill()
    wait_until(lambda: not is_alive(started))  # it was killed, too, but is no child of this process


@pytest.mark.slow
def test_a_subject_dies_with_its_harness(tmp_path):
    program = f"""
        import sys, time
        from pathlib import Path
        from ackstate.analysis.crash.conversation import Ready, StartRequest
        from ackstate.analysis.crash.process import subject_launch
        with subject_launch("naive")() as forked, subject_launch("perl -e 'sleep 600'")() as spawned:
            forked.send(StartRequest(Path({str(tmp_path)!r}), {{1: 10}}))
            forked.wait_for(Ready)
            print(forked.pid, spawned.pid, flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as harness:
        pids = [int(pid) for pid in harness.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        harness.kill()
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s=10)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "neither one of ours, ours-limited, naive, nor module:Class, nor the command of a program"),
        ("no-such-program --fast", "subject 'no-such-program --fast': neither"),
        ("no_such_module:Subject", "No module named 'no_such_module'"),
        ("json:Subject", "module json has no Subject"),
        ("sys:path", "is not callable"),
        ("perl 'unclosed", 'subject "perl \'unclosed": No closing quotation'),
    ],
)
def test_a_subject_that_is_not_there(text, error):
    with pytest.raises(ValueError, match=error):
        subject_launch(text)


def test_text_of_a_subject_is_one_line_that_a_terminal_shows():
    assert printable("a\x1b[2J\nL4: b\ud800") == "a\\x1b[2J\\nL4: b\\ud800"
    assert len(printable("x" * 10**6)) < 1_100
