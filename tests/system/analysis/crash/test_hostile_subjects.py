"""Subjects that say too much, too little or too late: each is told in words, and none holds the harness up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from contextlib import closing
from itertools import islice

import pytest

from ackstate.analysis.crash import process as subject_process
from ackstate.analysis.crash import runs as process_runs
from ackstate.analysis.crash.conversation import (
    Accepted,
    AnswersDue,
    Durable,
    OutOfTurnError,
    Ready,
    ReportRequest,
    StartRequest,
    SubjectError,
    printable,
)
from ackstate.analysis.crash.kills import kills_of
from ackstate.analysis.crash.layer import RunSize
from ackstate.analysis.crash.oracle import Promise
from ackstate.analysis.crash.process import SubjectProcess
from ackstate.analysis.crash.runs import CrashTiming, ProcessRuns, Sigkill
from ackstate.analysis.crash.subject import Operation, OperationKind, Report
from ackstate.analysis.crash.subjects.naive import NaiveSubject
from command_line import ENTRY, assert_one_line, run
from waiting import wait_until

LOG = {1: 100}
PERSIST = Operation(1, OperationKind.PERSIST)


def outcomes_of(make_subject, count=1, **options):
    options = {"size": RunSize(4, 300), "shrink_tries": 0, **options}
    with closing(kills_of(lambda: SubjectProcess.fork(make_subject), **options)(1)) as outcomes:
        return list(islice(outcomes, count))


def python(program):
    return SubjectProcess.spawn([sys.executable, "-S", "-c", textwrap.dedent(program)])


@pytest.mark.parametrize(
    ("requests", "answers"),
    [
        ((), (Ready(),)),
        ((), (Report([]),)),
        ((ReportRequest(),), (Report([]), Report([]))),
        ((StartRequest("/d", {}), PERSIST), (Accepted(1),)),
        ((StartRequest("/d", {}), PERSIST), (Ready(), Ready())),
        ((PERSIST,), (Accepted(1), Accepted(1))),
        ((PERSIST,), (Durable((1,)), Durable((1,)))),
        ((PERSIST,), (Durable((1, 1)),)),
        ((PERSIST,), (Accepted(0),)),
    ],
)
def test_an_answer_that_is_not_due_is_refused(requests, answers):
    turns = AnswersDue()
    for request in requests:
        turns.note_request(request)
    for answer in answers[:-1]:
        turns.note_answer(answer)
    for _ in range(2):
        with pytest.raises(OutOfTurnError):
            turns.note_answer(answers[-1])


@pytest.mark.parametrize("said", ['{"ready":true}\\n', '{"durable":[]}\\n', "x"])
def test_a_flood_ends_with_the_patience_or_before(said, tmp_path, monkeypatch):
    monkeypatch.setattr(subject_process, "LINE_BYTES_MAX", 1 << 22)
    program = f"""
        import os
        input()
        while True: os.write(1, b'{said}' * 3000)
    """
    with python(program) as process:
        process.send(ReportRequest())
        with pytest.raises(SubjectError, match=r"silent for 0\.5 s|without a start request|no answer"):
            process.wait_for(Report, patience_s=0.5)


def test_receipts_for_nothing_do_not_hide_that_it_is_silent():
    class Talking(NaiveSubject):
        answers = None

        def apply(self, operation):
            while operation.number == 3:
                os.write(self.answers, b'{"durable":[]}\n' * 100)
            super().apply(operation)

    original = subject_process.serve

    def serve(subject, lines, answers):
        subject.answers = answers
        original(subject, lines, answers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject_process, "serve", serve)
        found = outcomes_of(Talking, 6, size=RunSize(1, 30), patience_s=0.3)
    broken = [each for outcome in found for each in outcome.broken]
    assert broken
    assert all(each.promise == Promise.CONVERSATION and "silent" in each.found for each in broken)


def test_a_subject_may_hold_its_answers_back_until_a_persist(tmp_path):
    """A hundred at once are more than it is asked ahead."""
    program = """
        import json, os, sys
        say = lambda answer: os.write(1, json.dumps(answer).encode() + b"\\n")
        held = []
        for line in sys.stdin:
            asked = json.loads(line)
            match asked["op"]:
                case "start": say({"ready": True})
                case "report" | "recover": say({"acked": []})
                case "persist":
                    for number in [*held, asked["number"]]: say({"accepted": number})
                    held = []
                case _: held.append(asked["number"])
    """
    lives = ProcessRuns(lambda: python(program), tmp_path, 7, Sigkill(), CrashTiming(patience_s=10))
    with pytest.MonkeyPatch.context() as patch:
        acks = [Operation(number, OperationKind.ACK, 1, number % 50) for number in range(199)]
        patch.setattr(ProcessRuns, "_operations", lambda *_: [*acks, Operation(199, OperationKind.PERSIST)])
        lives.live_once(200)
    assert lives.broken == ()
    assert sum(isinstance(step, Accepted) for step in lives._story) == 200


def test_two_recoveries_that_differ_are_no_lost_receipts(monkeypatch):
    # Where one is crashed after it forgot, and before it could report its state, that is lost.
    monkeypatch.setattr(process_runs, "_CRASHED_RECOVERY_SHARE", 0)
    monkeypatch.setattr(process_runs, "_EARLY_SHARE", 0)

    class Forgetting(NaiveSubject):
        def recover(self, directory, ledgers):
            report = super().recover(directory, ledgers)
            self._path.unlink(missing_ok=True)
            return report

    found = [outcome for outcome in outcomes_of(Forgetting, 6) if outcome.broken]
    assert found
    assert {each.promise for outcome in found for each in outcome.broken} == {Promise.I5}
    assert sum(outcome.lost_durable + outcome.invented for outcome in found) == 0


def test_the_gauge_of_a_report_is_held_against_it():
    class Hopeful(NaiveSubject):
        def report(self):
            return Report(super().report().acked, 0)

        def _save(self):
            if self._acked:
                self._saved, self._unsaved = [], []

    assert {each.promise for outcome in outcomes_of(Hopeful, 3) for each in outcome.broken} <= {Promise.I3, Promise.I5}


def test_a_gauge_with_a_fraction_and_a_subject_that_is_not_complete_are_refused():
    class Fraction(NaiveSubject):
        redelivery_if_crashed = 1.5

    class Half:
        start = apply = report = None

    with pytest.raises(SubjectError, match="TypeError: 'float'"):
        outcomes_of(Fraction)
    with pytest.raises(SubjectError, match=r"has no persists_in_background, receipts, recover$"):
        outcomes_of(Half)


def test_what_was_said_before_the_crash_stands_before_it():
    class Denying(NaiveSubject):
        def recover(self, directory, ledgers):
            raise OSError("no")

    (broken,) = next(outcome.broken for outcome in outcomes_of(Denying, 6) if outcome.broken)
    after = broken.story[broken.story.index("SIGKILL") :]
    assert after[-1] == "the subject cannot continue: OSError: no"
    assert not [line for line in after if line.startswith(("asked", "it accepted", "durable"))]


def test_text_of_a_subject_is_one_line_that_a_terminal_shows():
    assert printable("a\x1b[2J\nL4: b\ud800") == "a\\x1b[2J\\nL4: b\\ud800"
    assert len(printable("x" * 10**6)) < 1_100
    program = """print('{"error":"\\\\u001b[2J\\\\nL4"}', flush=True); input()"""
    with python(program) as process, pytest.raises(SubjectError, match=r"cannot continue: \\x1b\[2J\\nL4$"):
        process.wait_for(Ready)


TRACING = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "start":
        os.write(1, b'{"ready":true}\\n')
    elif asked["op"] in ("report", "recover"):
        os.write(1, b'{"acked":[]}\\n')
    elif asked.get("number") == WHEN:
        sys.stderr.write("".join(f"\\tat frame {number} \\x1b[2J\\n" for number in range(30)))
        sys.exit(4)
    else:
        os.write(1, b'{"accepted":%d}\\n' % asked["number"])
"""


def frames():
    return [f"|     at frame {number} \\x1b[2J" for number in range(20, 30)]


def test_the_last_ten_lines_of_standard_error_are_in_the_story(tmp_path, capsys):
    (tmp_path / "subject.py").write_text(TRACING.replace("WHEN", "2"))
    command = f"{sys.executable} -S {tmp_path / 'subject.py'}"
    status, out, _ = run(capsys, "crash", "--layer", "L3", "--subject", command, "--runs", "2")
    assert (status, out.count("L3, seed")) == (1, 1), "equal failures are one"
    lines = [line.removeprefix("  ") for line in out.splitlines()]
    first = lines.index("the end of its standard error:")
    assert lines[first + 1 : first + 11] == frames()
    assert lines[first + 11].startswith("the subject ended by itself with status 4: ")
    assert len(lines) - lines.index(next(line for line in lines if line.startswith("L3, seed"))) <= 24


def test_the_last_ten_lines_are_printed_where_a_subject_cannot_begin(tmp_path, capsys):
    (tmp_path / "subject.py").write_text(TRACING.replace("WHEN", "0"))
    command = f"{sys.executable} -S {tmp_path / 'subject.py'}"
    status, out, err = run(capsys, "crash", "--layer", "L3", "--subject", command, "--runs", "3")
    *lines, last = err.splitlines()
    assert (status, out, lines) == (2, "", frames())
    assert last.startswith("ackstate: the subject ended by itself with status 4: ")


def test_standard_error_of_a_subject_that_talks_nonsense_is_in_the_story():
    class Nonsense(NaiveSubject):
        def receipts(self):
            if self._saved:
                os.write(2, b"first\nsecond\n")
            return [number + 10**6 for number in super().receipts()]

    broken = [each for outcome in outcomes_of(Nonsense, 8) for each in outcome.broken]
    assert {each.promise for each in broken} == {Promise.CONVERSATION}
    stories = [each.story for each in broken if "| first" in each.story]
    assert stories
    assert all(story[-3:-1] == ("| first", "| second") for story in stories)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("raise SystemExit(0)", "raises SystemExit: 0"),
        ("x = (", "raises SyntaxError"),
        ("1 / 0", "raises ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(source, complaint, tmp_path, monkeypatch, capsys):
    (tmp_path / "hostile_module.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    outcome = run(capsys, "crash", "--layer", "L3", "--subject", "hostile_module:Subject", "--runs", "1")
    assert_one_line(outcome, complaint)


SILENT = """
print("printed by the import")
from ackstate.analysis.crash.subjects.naive import NaiveSubject
class Subject(NaiveSubject):
    def receipts(self): return None
"""


def test_a_subject_without_receipts_was_not_tested(tmp_path, monkeypatch, capsys):
    (tmp_path / "silent_module.py").write_text(SILENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = ("crash", "--layer", "L3", "--subject", "silent_module:Subject", "--runs", "1", "--json")
    status, out, _ = run(capsys, *command)
    found = json.loads(out)
    assert (status, found["failed_runs"]) == (2, 0)
    assert "I2 was not tested" in found["layers"][0]["untested"]
    assert "L3: the subject never reported that an ack is durable: I2 was not tested" in run(capsys, *command[:-1])[1]


@pytest.mark.slow
def test_sigterm_is_an_interruption_and_nothing_is_left(tmp_path):
    command = [*ENTRY, "crash", "--layer", "L3", "--subject", "naive", "--budget", "1h", "--totals", "t"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as harness:
        wait_until(lambda: (tmp_path / "t").exists() or harness.poll() is not None)
        harness.terminate()
        assert harness.communicate(timeout=60)[1] == "ackstate: interrupted\n"
    assert harness.returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_closed_descriptors_do_no_harm(closed, tmp_path):
    command = " ".join(ENTRY) + f" crash --layer L3 --subject naive --runs 1 --json {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["failed_runs"]) == (0, 0)
