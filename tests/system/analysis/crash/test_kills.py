"""SIGKILL: it finds lying subjects and none that never syncs. What subjects do wrong is told, and holds nothing up."""

import json
import os
import re
import subprocess
import sys
import textwrap
from functools import partial

import pytest

from ackstate.analysis.crash import process as subject_process
from ackstate.analysis.crash import runs as process_runs
from ackstate.analysis.crash.campaign import Budget, Totals, run_layer
from ackstate.analysis.crash.conversation import Accepted, ReportRequest, SubjectError
from ackstate.analysis.crash.kills import kills
from ackstate.analysis.crash.oracle import Promise
from ackstate.analysis.crash.process import SubjectProcess
from ackstate.analysis.crash.runs import CrashTiming, ProcessRuns, RunSize, Sigkill
from ackstate.analysis.crash.subject import Operation, OperationKind, Report
from ackstate.analysis.crash.subjects import NaiveSubject, Ours, OursLimited
from command_line import ENTRY, assert_one_line, run
from crash import first_runs
from waiting import wait_until

SMALL = RunSize(4, 60)


def outcomes_of(make_subject, count=3, *, size=SMALL, shrink_tries=0, **options):
    """The outcomes of the first runs, up to one that broke a promise."""
    return first_runs(kills(1, subject=make_subject, size=size, shrink_tries=shrink_tries, **options), count)


def python(program):
    return SubjectProcess.spawn([sys.executable, "-S", "-c", textwrap.dedent(program)])


class Lying(NaiveSubject):
    """Says durable, and saves later: at every third persist."""

    persists = 0

    def _save(self):
        Lying.persists += 1
        if Lying.persists % 3:
            self._saved, self._unsaved = self._saved + self._unsaved, []
        else:
            super()._save()


class Generous(NaiveSubject):
    """Finds an ack without a request when it recovers some."""

    def report(self):
        runs = super().report().acked
        return Report([run._replace(end=run.end + 500) for run in runs])


class Gauged(NaiveSubject):
    """Its gauge is exact: the entries that a persist did not save yet."""

    def start(self, directory, ledgers):
        super().start(directory, ledgers)
        self.on_disk = self.at_start = self.count

    def apply(self, operation):
        super().apply(operation)
        if operation.kind is OperationKind.PERSIST:
            self.on_disk = self.count

    @property
    def count(self):
        return sum(map(len, self._acked.values()))

    @property
    def redelivery_if_crashed(self):
        return self.count - self.on_disk


def gauge(read):
    return type("Misread", (Gauged,), {"redelivery_if_crashed": property(read)})


class Late(Gauged):
    """Has a gauge that notices a persist only with the one after it."""

    def apply(self, operation):
        before = self.on_disk
        super().apply(operation)
        if operation.kind is OperationKind.PERSIST:
            self.on_disk, self._saved_count = getattr(self, "_saved_count", before), self.on_disk


class Torn(NaiveSubject):
    """Writes its file in place, in pieces: a kill between them leaves half of it."""

    def _save(self):
        self._path.write_bytes(b"")
        super()._save()
        text = self._path.read_text()
        with self._path.open("w") as file:
            for letter in text:
                file.write(letter)
                file.flush()


class Dying(NaiveSubject):
    """Ends at its seventh operation."""

    def apply(self, operation):
        if operation.number == 7:
            raise RuntimeError("seven is too many")
        super().apply(operation)


def test_an_exact_gauge_is_never_wrong():
    assert [outcome.broken for outcome in outcomes_of(Gauged, 6)] == [()] * 6


class OneReceipt(NaiveSubject):
    """Honest about the first ack of each life that a persist saves, and silent about all others."""

    is_told = False

    def receipts(self):
        numbers = [] if self.is_told else super().receipts()[:1]
        self.is_told = self.is_told or bool(numbers)
        return numbers


@pytest.mark.parametrize(("make_subject", "is_tested"), [(NaiveSubject, True), (OneReceipt, False)])
def test_receipts_are_counted_as_a_share_of_the_acks_that_a_persist_was_to_save(make_subject, is_tested):
    totals = Totals(1)
    layer = partial(kills, subject=make_subject, size=SMALL, shrink_tries=0)
    seen = run_layer(layer, totals, Budget(3_600, run_count_max=4))
    assert not seen.has_failed
    assert seen.counts["receipts_due"] > 50
    assert (seen.untested() == "") == is_tested


@pytest.mark.slow
@pytest.mark.parametrize("make_subject", [Ours, OursLimited])
def test_ours_survives_every_kill(make_subject):
    outcomes = outcomes_of(make_subject, size=RunSize(6, 100))
    assert [outcome.broken for outcome in outcomes] == [()] * 3
    assert sum(outcome.counts["durable_receipts"] for outcome in outcomes) > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_subject", "promise", "counted"),
    [
        (Lying, Promise.I2, "lost_durable"),
        (Generous, Promise.I1, "invented"),
        (gauge(lambda subject: min(subject.count - subject.on_disk, 1)), Promise.I3, "gauge_mismatch"),
        (gauge(lambda _: 10**9), Promise.I3, "gauge_mismatch"),
        (gauge(lambda subject: subject.count - subject.at_start), Promise.I3, "gauge_mismatch"),
        (Late, Promise.I3, "gauge_mismatch"),
        (gauge(lambda subject: 2 * (subject.count - subject.on_disk)), Promise.I3, "gauge_mismatch"),
        (Torn, Promise.I5, ""),
        (Dying, Promise.CONVERSATION, ""),
    ],
)
def test_a_subject_that_breaks_a_promise_is_found(make_subject, promise, counted):
    last = outcomes_of(make_subject, 100)[-1]
    assert promise in {broken.promise for broken in last.broken}
    assert all(broken.story for broken in last.broken)
    if counted:
        assert getattr(last, counted) > 0


def test_two_recoveries_that_differ_are_no_lost_receipts(monkeypatch):
    # Where one is crashed after it forgot, and before it could report its state, that is lost.
    monkeypatch.setattr(process_runs, "_CRASHED_RECOVERY_SHARE", 0)
    monkeypatch.setattr(process_runs, "_EARLY_SHARE", 0)

    class Forgetting(NaiveSubject):
        def recover(self, directory, ledgers):
            report = super().recover(directory, ledgers)
            self._path.unlink(missing_ok=True)
            return report

    found = [outcome for outcome in outcomes_of(Forgetting, 12) if outcome.broken]
    assert found
    assert {each.promise for outcome in found for each in outcome.broken} == {Promise.I5}
    assert sum(outcome.lost_durable + outcome.invented for outcome in found) == 0


@pytest.mark.slow
def test_a_story_is_short_and_tells_what_was_asked_and_said():
    broken = outcomes_of(Dying, 30, size=RunSize(8, 100), shrink_tries=12)[-1].broken[0]
    assert broken.found == "the subject cannot continue: RuntimeError: seven is too many"
    first, *steps, last = broken.story
    assert re.fullmatch(r"life \d on a log of (ledger \d+ with \d+ entries(, )?)+", first)
    assert "it accepted 6" in steps
    assert sum(step.startswith("asked ") for step in steps) < 20
    assert last == "the subject cannot continue: RuntimeError: seven is too many"


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


def test_the_last_ten_lines_of_standard_error_are_in_the_story(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subject.py").write_text(TRACING.replace("WHEN", "2"))
    command = f"{sys.executable} -S {tmp_path / 'subject.py'}"
    status, out, _ = run(capsys, "crash", "--layer", "L3", "--subject", command, "--runs", "2")
    assert (status, out.count("L3, seed")) == (1, 1), "equal failures are one"
    lines = [line.removeprefix("  ") for line in out.splitlines()]
    first = lines.index("the end of its standard error:")
    assert lines[first + 1 : first + 11] == frames()
    assert lines[first + 11].startswith("the subject ended by itself with status 4: ")
    assert len(lines) - lines.index(next(line for line in lines if line.startswith("L3, seed"))) <= 24
    (tmp_path / "subject.py").write_text(TRACING.replace("WHEN", "0"))
    status, out, err = run(capsys, "crash", "--layer", "L3", "--subject", command, "--runs", "3")
    *lines, last = err.splitlines()
    assert (status, out, lines) == (2, "", frames()), "it cannot begin"
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


@pytest.mark.slow
def test_sigterm_is_an_interruption_and_nothing_is_left(tmp_path):
    command = [*ENTRY, "crash", "--layer", "L3", "--subject", "naive", "--budget", "1h", "--totals", "t"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as harness:
        wait_until(lambda: (tmp_path / "t").exists() or harness.poll() is not None)
        harness.terminate()
        assert harness.communicate(timeout=60)[1] == "ackstate: interrupted\n"
    assert harness.returncode == 130


@pytest.mark.slow
def test_closed_descriptors_do_no_harm(tmp_path):
    command = " ".join(ENTRY) + " crash --layer L3 --subject naive --runs 1 --json <&- 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["failed_runs"]) == (0, 0)
