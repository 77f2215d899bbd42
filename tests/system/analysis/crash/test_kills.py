"""SIGKILL: bugs that it finds in lying subjects, a bug that it cannot find in one that never syncs, and the trace of it
all."""

from __future__ import annotations

import re
import time
from itertools import islice

import pytest

from ackstate.analysis.crash import runs as process_runs
from ackstate.analysis.crash.campaign import Budget, Totals, run_layer
from ackstate.analysis.crash.conversation import SubjectError
from ackstate.analysis.crash.kills import kills, kills_of
from ackstate.analysis.crash.layer import RunSize
from ackstate.analysis.crash.oracle import Promise
from ackstate.analysis.crash.process import SubjectProcess, subject_launch
from ackstate.analysis.crash.subject import OperationKind, Report
from ackstate.analysis.crash.subjects.naive import NaiveSubject
from ackstate.analysis.crash.subjects.ours import Ours, OursLimited

SMALL = RunSize(4, 60)


def outcomes_of(make_subject, count=3, *, size=SMALL, shrink_tries=0, **options):
    """The outcomes of the first runs, up to one that broke a promise."""
    layer = kills_of(lambda: SubjectProcess.fork(make_subject), size=size, shrink_tries=shrink_tries, **options)(1)
    found = []
    for outcome in islice(layer, count):
        found.append(outcome)
        if outcome.broken:
            break
    layer.close()
    return found


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
        self._on_disk = self._count()

    def apply(self, operation):
        super().apply(operation)
        if operation.kind is OperationKind.PERSIST:
            self._on_disk = self._count()

    def _count(self):
        return sum(map(len, self._acked.values()))

    @property
    def redelivery_if_crashed(self):
        return self._count() - self._on_disk


class Optimistic(Gauged):
    """Believes that at most one entry comes back."""

    @property
    def redelivery_if_crashed(self):
        return min(super().redelivery_if_crashed, 1)


class Huge(Gauged):
    """Has a gauge that is never too low."""

    redelivery_if_crashed = 10**9


class Growing(Gauged):
    """Has a gauge that counts every entry of this life, saved or not."""

    def start(self, directory, ledgers):
        super().start(directory, ledgers)
        self._at_start = self._on_disk

    @property
    def redelivery_if_crashed(self):
        return self._count() - self._at_start


class Doubled(Gauged):
    """Has a gauge that counts each entry twice."""

    @property
    def redelivery_if_crashed(self):
        return 2 * super().redelivery_if_crashed


class Late(Gauged):
    """Has a gauge that notices a persist only with the one after it."""

    def apply(self, operation):
        before = self._on_disk
        super().apply(operation)
        if operation.kind is OperationKind.PERSIST:
            self._on_disk, self._saved_count = getattr(self, "_saved_count", before), self._on_disk


class Forgetful(NaiveSubject):
    """Removes its file when it recovers."""

    def recover(self, directory, ledgers):
        report = super().recover(directory, ledgers)
        self._path.unlink(missing_ok=True)
        return report


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


class Boasting(NaiveSubject):
    """Has receipts for acks that were never requested."""

    def receipts(self):
        return [number + 1_000 for number in super().receipts()]


def test_a_naive_subject_survives_every_kill():
    """Which is why SIGKILL is not enough: it never syncs."""
    outcomes = outcomes_of(NaiveSubject)
    assert [outcome.broken for outcome in outcomes] == [()] * 3
    assert sum(outcome.cycles for outcome in outcomes) >= 12
    assert sum(outcome.counts["durable_receipts"] for outcome in outcomes) > 50


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
    layer = kills_of(lambda: SubjectProcess.fork(make_subject), size=SMALL, shrink_tries=0)
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
        (Optimistic, Promise.I3, "gauge_mismatch"),
        (Huge, Promise.I3, "gauge_mismatch"),
        (Growing, Promise.I3, "gauge_mismatch"),
        (Late, Promise.I3, "gauge_mismatch"),
        (Doubled, Promise.I3, "gauge_mismatch"),
        (Torn, Promise.I5, ""),
        (Dying, Promise.CONVERSATION, ""),
        (Boasting, Promise.CONVERSATION, ""),
    ],
)
def test_a_subject_that_breaks_a_promise_is_found(make_subject, promise, counted):
    last = outcomes_of(make_subject, 100)[-1]
    assert promise in {broken.promise for broken in last.broken}
    assert all(broken.story for broken in last.broken)
    if counted:
        assert getattr(last, counted) > 0


@pytest.mark.slow
def test_a_subject_whose_recoveries_differ_is_found(monkeypatch):
    # Where one is crashed after it forgot, and before it could report its state, that counts as lost.
    monkeypatch.setattr(process_runs, "_CRASHED_RECOVERY_SHARE", 0)
    monkeypatch.setattr(process_runs, "_EARLY_SHARE", 0)
    (broken,) = outcomes_of(Forgetful, 100)[-1].broken
    assert broken.promise == Promise.I5
    assert broken.story


@pytest.mark.slow
def test_a_story_is_short_and_tells_what_was_asked_and_said():
    broken = outcomes_of(Dying, 30, size=RunSize(8, 100), shrink_tries=12)[-1].broken[0]
    assert broken.found == "the subject cannot continue: RuntimeError: seven is too many"
    first, *steps, last = broken.story
    assert re.fullmatch(r"life \d on a log of (ledger \d+ with \d+ entries(, )?)+", first)
    assert "it accepted 6" in steps
    assert sum(step.startswith("asked ") for step in steps) < 20
    assert last == "the subject cannot continue: RuntimeError: seven is too many"


def test_a_subject_that_cannot_begin_is_an_error_and_no_finding():
    class Unable(NaiveSubject):
        def start(self, directory, ledgers):
            raise OSError("no licence")

    with pytest.raises(SubjectError, match="no licence"):
        outcomes_of(Unable)


@pytest.mark.slow
def test_a_subject_that_falls_silent_is_found():
    class Silent(NaiveSubject):
        def apply(self, operation):
            if operation.number == 3:
                time.sleep(600)
            super().apply(operation)

    (outcome,) = outcomes_of(Silent, 30, patience_s=1, size=RunSize(1, 30))[-1:]
    assert [broken.promise for broken in outcome.broken] == [Promise.CONVERSATION]
    assert "silent" in outcome.broken[0].found


def test_the_layer_by_the_name_of_its_subject():
    layer = kills(5, subject="naive")
    assert next(layer).seed == 5
    layer.close()
    with pytest.raises(ValueError, match="absent"):
        kills(1, subject="absent")


def test_subjects_are_found_by_name():
    for name in ("ours", "ours-limited", "naive", "ackstate.analysis.crash.subjects.naive:NaiveSubject"):
        assert callable(subject_launch(name))
