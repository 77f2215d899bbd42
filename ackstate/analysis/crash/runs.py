"""The runs of a subject's process in one directory: each is started, crashed, and judged by the next one.

A layer is an endless sequence of such runs, determined by a seed, with one kind of crash: SIGKILL, or a power cut. It
has no access to budgets, progress or totals: the caller stops the iteration (`ackstate.analysis.crash.campaign`). The
directory is removed at the end; that of a killed harness is removed by a later run.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from ackstate.analysis.crash import oracle
from ackstate.analysis.crash.conversation import (
    Accepted,
    CrashedError,
    Durable,
    OutOfTurnError,
    Ready,
    Recover,
    ReportRequest,
    StartRequest,
    SubjectError,
)
from ackstate.analysis.crash.oracle import BrokenPromise, Numbering, Oracle, Promise, RunOutcome, State, gravest, listed
from ackstate.analysis.crash.process import PATIENCE_S
from ackstate.analysis.crash.subject import Operation, OperationKind, Report
from ackstate.analysis.workloads.traffic import WORKLOADS, Traffic
from ackstate.errors import AckStateError
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ackstate.analysis.crash.conversation import Answer
    from ackstate.analysis.crash.oracle import AckedSet, Broken, Expected
    from ackstate.analysis.crash.process import Launch, SubjectProcess

    Runs = Iterable[tuple[int, int, int]]


UNSEEN = "not seen: "
"""Begins the names of the counts of writes that a crash cannot affect."""
_AGAIN_SHARE = 0.03
_MARK_DELETE_SHARES = (0.0, 0.02, 0.1)
_PERSIST_SHARES = (0.02, 0.1, 0.3)
_EARLY_SHARE = 0.15
_AFTER_DURABLE_SHARE = 0.4
_CRASHED_RECOVERY_SHARE = 0.3
_CRASHED_AFTERWARDS_SHARE = 0.5
_QUIET_REPORT_SHARE = 0.3
# Operations in progress widen the bounds of a gauge; a run that sends one operation at a time keeps them exact.
_ONE_AT_A_TIME_SHARE = 0.2
# Limited, so that requests are about entries that it can have seen. A subject may delay answers until a persist: after
# this time without an answer, it receives more requests.
_SENT_AHEAD = 64
_PAUSE_S = 0.02


class Crash:
    """A way to end a process; its text describes the last crash: lines of a story."""

    unseen: Iterable[str] = ()
    """The writes that the crash cannot affect, so that they are not tested."""

    def prepare(self) -> None:
        """Prepare the crash of a process that starts now; it may then be ended at any time (`CrashedError`)."""

    def __call__(self, process: SubjectProcess) -> Sequence[Answer]:
        """End a process; return its unread answers that count."""
        raise NotImplementedError

    @property
    def states_left(self) -> int:
        """The number of other states that the last crash may have left in the directory."""
        return 0

    def next_state(self) -> None:
        """Replace the directory by the next of them."""
        raise NotImplementedError


@final
class Sigkill(Crash):
    """The crash of a process only: the kernel continues and keeps all written data."""

    def __call__(self, process: SubjectProcess) -> Sequence[Answer]:
        """See `Crash`; all answers count, because nothing is lost."""
        return process.kill()

    def __str__(self) -> str:
        return "SIGKILL"


@dataclass(frozen=True, slots=True)
class CrashTiming:
    """The times of the crashes."""

    # While it starts or recovers: up to this time after the request. None for a crash that the `Crash` itself triggers:
    # then a process runs to its end, unless it is crashed earlier.
    early_s: float | None = 0.004
    delay_mean_s: float = 0.0003  # Otherwise after a number of answers, and then this much later on average, or at once
    patience_s: float = PATIENCE_S  # The maximum time of a subject for an answer that is due


class _CrashMoment(NamedTuple):
    """The moment of a crash: after a number of answers, then possibly a durable one, and then a little later.

    A subject that reports durability too early loses most right after such a report.
    """

    answers: int
    is_after_durable: bool
    delay_s: float


@final
class ProcessRuns:
    """The process runs of one subscription in one directory, one after the other, determined by a seed.

    The next process that opens the directory judges a run: one that only recovers, or the next run.
    """

    def __init__(self, launch: Launch, directory: Path, seed: int, crash: Crash, settings: CrashTiming) -> None:
        self._launch, self._directory, self._seed = launch, directory, seed
        self._crash, self._settings = crash, settings
        self._log = ledgers(_chance("log", seed))
        self._number = self._crashes = 0
        self._is_open = self._has_receipts = False
        self._life = ProcessRun(self._log)
        # Over all runs.
        self._ever_requested: AckedSet = self._life.expected.requested
        # The requests and answers of the run that was not judged yet, with the crashes between.
        self._story: list[Operation | Answer | str] = []
        self._broken: tuple[Broken, ...] = ()
        self._counts = dict.fromkeys(
            (
                *("accepted_persists", "crashed_early", "crashed_recoveries", "durable_receipts", "recoveries"),
                *("receipts_due", "receipts_given", "crashes_after_receipt"),
            ),
            0,
        )
        self.broken: tuple[BrokenPromise, ...] = ()

    def outcome(self) -> RunOutcome:
        """Return the result of all runs."""
        counts = oracle.counts(self._broken)
        seen = self._counts | {f"{UNSEEN}{what}": 1 for what in self._crash.unseen}
        return RunOutcome(self._seed, self._crashes, **counts, broken=self.broken, counts=seen)

    def live_once(self, length: int) -> None:
        """Start a process, judge the previous run, send up to `length` operations, and crash it."""
        chance = _chance("moment", self._seed, self._number)
        self._crash.prepare()
        with self._blamed() as process:
            process.send(StartRequest(self._directory, self._log), ReportRequest())
            if self._settings.early_s is not None and chance.random() < _EARLY_SHARE:
                self._crash_early(process, chance, "while it starts")
                return
            try:
                self._live(process, chance, length)
            except CrashedError:
                self._counts["crashed_early"] += not self._is_open
                self._crashed(process, "" if self._is_open else "while it starts")
        if self._is_open:
            due, given = self._life.receipts_due()
            self._counts["receipts_due"] += due
            self._counts["receipts_given"] += given
        self._recover_from_others()
        self._number += 1

    def _recover_from_others(self) -> None:
        """Judge a recovery from each state that the crash may have left, but the last: the next process has that."""
        while self._crash.states_left and not self.broken:
            with self._blamed() as process:
                process.send(Recover(self._directory, self._log))
                _, report = process.wait_for(Report, patience_s=self._settings.patience_s)
                self._judge(report, f"recovered: acked {self._life.state(report).acked}")
            if not self.broken:
                before = str(self._crash)
                self._crash.next_state()
                self._crashes += 1
                self._counts["crashes_after_receipt"] += self._has_receipts
                self._story[-1] = str(self._story[-1]).replace(before, str(self._crash))

    def _live(self, process: SubjectProcess, chance: Random, length: int) -> None:
        _, report = process.wait_for(Report, patience_s=self._settings.patience_s)
        self._opened(report)
        if self.broken:
            return
        moment = _moment(chance, length, delay_mean_s=self._settings.delay_mean_s)
        if self._settings.early_s is None:
            moment = _CrashMoment(sys.maxsize, is_after_durable=False, delay_s=0.0)
        ahead = 1 if chance.random() < _ONE_AT_A_TIME_SHARE else _SENT_AHEAD
        is_quiet = self._talk(process, self._operations(length), moment, ahead=ahead)
        if is_quiet and chance.random() < _QUIET_REPORT_SHARE:
            self._report_quietly(process)
        time.sleep(moment.delay_s)
        self._crashed(process)

    def recover(self) -> None:
        """Recover in a separate process, sometimes after another was crashed doing so; judge the previous run."""
        chance = _chance("recovery", self._seed, self._number)
        if chance.random() < _CRASHED_RECOVERY_SHARE:
            self._crash.prepare()
            with self._blamed() as process:
                process.send(Recover(self._directory, self._log))
                self._counts["crashed_recoveries"] += 1
                self._crash_early(process, chance, "while it recovers")
        if not self.broken:
            with self._blamed() as process:
                process.send(Recover(self._directory, self._log))
                _, report = process.wait_for(Report, patience_s=self._settings.patience_s)
                self._opened(report)
                if chance.random() < _CRASHED_AFTERWARDS_SHARE:
                    self._crashed(process)

    @contextmanager
    def _blamed(self) -> Iterator[SubjectProcess]:
        """Start the subject, end it with the block, and count its errors as broken promises."""
        self._is_open = False
        try:
            with self._launch() as process:
                yield process
        except SubjectError as error:
            promise = Promise.CONVERSATION if self._is_open or isinstance(error, OutOfTurnError) else Promise.I5
            self.broken = (BrokenPromise(promise, str(error), self._told(*_complaint(error), str(error))),)

    def _crashed(self, process: SubjectProcess, when: str = "") -> Sequence[Answer]:
        self._crashes += 1
        try:
            answers = self._crash(process)
            self._note_answers(answers)
            self._counts["crashes_after_receipt"] += self._has_receipts
        finally:
            self._story.append(f"{when}: {self._crash}" if when else str(self._crash))
        return answers

    def _crash_early(self, process: SubjectProcess, chance: Random, when: str) -> None:
        self._counts["crashed_early"] += 1
        answers: Sequence[Answer] = ()
        if self._settings.early_s is None:
            with suppress(CrashedError):
                answers = [process.wait_for(Report, patience_s=self._settings.patience_s)[1]]
        else:
            time.sleep(chance.uniform(0, self._settings.early_s))
        for answer in (*answers, *self._crashed(process, when)):
            if isinstance(answer, Report):
                self._opened(answer)
                self._story.append(f"{when}: {self._crash}")
        self._number += 1

    def _opened(self, report: Report) -> None:
        """Judge the previous run, and start another with the recovered state."""
        self._is_open = True
        self._counts["recoveries"] += 1
        acked = self._life.state(report).acked
        holds = f"recovered: acked {acked}"
        self._judge(report, holds)
        self._life, self._story, self._has_receipts = ProcessRun(self._log, acked), [holds], False
        if report.redelivery_if_crashed is not None:
            self._life.gauged(report.redelivery_if_crashed)

    def _judge(self, report: Report, holds: str) -> None:
        expected, found = self._life.expected, self._life.state(report)
        self._ever_requested |= expected.requested
        if self._counts["recoveries"] > 1 and not self._life.operations:
            # Entries requested in an earlier run are not invented.
            known = State(expected.durable, found.marked)
            excused = expected._replace(requested=self._ever_requested, durable=found.acked)
            broken = oracle.differing(known, found) + oracle.judge(found, [excused])
        else:
            broken = self._life.judge(report)
        self._broken += broken
        self.broken += oracle.with_story(broken, self._told(holds)) if broken else ()

    def _operations(self, length: int) -> list[Operation]:
        """Return the operations of a run; the last is a persist, so that even the shortest run can lose something."""
        chance = _chance("life", self._seed, self._number)
        known = self._life.expected.durable.runs()
        found = operations(chance, self._log, length=length - 1, known=known)
        return [*found, Operation(length - 1, OperationKind.PERSIST)]

    def _talk(
        self, process: SubjectProcess, operations: Sequence[Operation], moment: _CrashMoment, *, ahead: int
    ) -> bool:
        """Send operations until the moment of the crash, or until all are answered; return whether all are."""
        sent = heard = accepted = 0
        patience_s = self._settings.patience_s
        until = time.monotonic() + patience_s
        answers: Sequence[Answer] = ()
        while True:
            sent += self._request(process, operations[sent : max(accepted + ahead, sent)])
            waits_for_durable = moment.is_after_durable and not any(isinstance(answer, Durable) for answer in answers)
            if accepted == len(operations) or (heard >= moment.answers and not waits_for_durable):
                return accepted == len(operations)
            timeout_s = until - time.monotonic() if sent == len(operations) else _PAUSE_S
            # Empty receipts could continue without end.
            answers = [answer for answer in process.events(timeout_s) if answer != Durable(())]
            self._note_answers(answers)
            heard += len(answers)
            accepted += sum(isinstance(answer, Accepted) for answer in answers)
            if answers:
                until = time.monotonic() + patience_s
            elif sent < len(operations):
                ahead += _SENT_AHEAD
            elif time.monotonic() >= until:
                raise process.silence(patience_s)

    def _report_quietly(self, process: SubjectProcess) -> None:
        """Request a report while nothing is in progress: its gauge must not count entries that have a receipt."""
        process.send(ReportRequest())
        answers, report = process.wait_for(Report, patience_s=self._settings.patience_s)
        self._story.append(_step_line(report))
        if report.redelivery_if_crashed is not None:
            self._life.gauged(report.redelivery_if_crashed)
        self._note_answers(answers)

    def _request(self, process: SubjectProcess, asked: Sequence[Operation]) -> int:
        self._story += asked
        for operation in asked:
            self._life.requested(operation)
        process.send(*asked)
        return len(asked)

    def _note_answers(self, answers: Sequence[Answer]) -> None:
        self._story += answers
        for answer in answers:
            match answer:
                case Durable(numbers):
                    self._life.durable(numbers)
                    # The receipt of a persist promises nothing.
                    acks = [number for number in numbers if not self._is_persist(number)]
                    self._counts["durable_receipts"] += len(acks)
                    self._has_receipts |= bool(acks)
                case Accepted(number, gauge):
                    self._life.accepted(number)
                    if gauge is not None:
                        self._life.gauged(gauge, number=number)
                    self._counts["accepted_persists"] += self._is_persist(number)

    def _is_persist(self, number: int) -> bool:
        return self._life.operations[number].kind is OperationKind.PERSIST

    def _told(self, *end: str) -> tuple[str, ...]:
        steps = [line for step in self._story for line in _step_line(step).splitlines()]
        return (f"life {self._number} on a log of {_ledgers(self._log)}", *steps, *end)


def check_beginning(launch: Launch, directory: Path, *, patience_s: float = PATIENCE_S) -> None:
    """Start a subject in an empty directory; it reports, acks and persists once, without a crash.

    Later failures are then caused by a crash.
    """
    with launch() as process:
        process.send(StartRequest(directory, {1: 10}), ReportRequest())
        process.wait_for(Report, patience_s=patience_s)
        process.send(Operation(0, OperationKind.ACK, 1, 0), Operation(1, OperationKind.PERSIST))
        for _ in range(2):
            process.wait_for(Accepted, patience_s=patience_s)


def _step_line(step: Operation | Answer | str) -> str:  # noqa: PLR0911 - one for each
    """Return one step of a process run as a line of its story."""
    match step:
        case str():
            return step
        case Operation(number, OperationKind.PERSIST):
            return f"asked {number}: persist"
        case Operation(number, kind, ledger_id, entry_id):
            return f"asked {number}: {kind.value} {ledger_id}:{entry_id}"
        case Ready():
            return "it is ready"
        case Accepted(number, None):
            return f"it accepted {number}"
        case Accepted(number, gauge):
            return f"it accepted {number}; a crash would bring back {gauge}"
        case Durable(numbers):
            return f"durable: {' '.join(map(str, numbers))}"
        case Report(acked, gauge):
            said = "" if gauge is None else f"; a crash would bring back {gauge}"
            return f"reported: acked {listed(sorted(acked))}{said}"
    raise AssertionError(step)


def _complaint(error: SubjectError) -> tuple[str, ...]:
    """Return the end of the subject's standard error, unless the error quotes all of it."""
    if len(error.complaint) == 1 and str(error).endswith(f": {error.complaint[0]!r}"):
        return ()
    return ("the end of its standard error:", *(f"| {line}" for line in error.complaint)) if error.complaint else ()


def _ledgers(log: Mapping[int, int]) -> str:
    """Return the ledgers of a message log as text."""
    return ", ".join(f"ledger {ledger_id} with {entry_count} entries" for ledger_id, entry_count in log.items())


def _moment(chance: Random, length: int, *, delay_mean_s: float) -> _CrashMoment:
    is_after_durable = chance.random() < _AFTER_DURABLE_SHARE
    return _CrashMoment(
        chance.randint(1, length), is_after_durable, chance.choice((0.0, chance.expovariate(1 / delay_mean_s)))
    )


def _chance(*what: str | int) -> Random:
    return Random(" ".join(map(str, what)))  # noqa: S311 - a workload, not a secret


def ledgers(chance: Random) -> dict[int, int]:
    """Return the entry counts of a log's ledgers, by id in order: one to five, rarely an empty one among them."""
    ledger_id, counts = 0, {}
    for _ in range(chance.randint(1, 5)):
        ledger_id += chance.randint(1, 4)
        counts[ledger_id] = 0 if chance.random() < 0.1 else chance.randint(1, 120)
    return counts if any(counts.values()) else {**counts, ledger_id + 1: 1}


def operations(
    chance: Random, log: Mapping[int, int], *, length: int, known: Runs = (), shape: Traffic | None = None
) -> list[Operation]:
    """Return acks, mark-deletes and persists of one cursor.

    No mark-delete is below an earlier one, nor below the position that acks moved it to; some acks repeat.
    """
    consumers = _Consumers(chance, log, known=known, shape=shape or chance.choice(list(WORKLOADS.values())))
    mark_delete_share, persist_share = chance.choice(_MARK_DELETE_SHARES), chance.choice(_PERSIST_SHARES)
    found = []
    for number in range(length):
        toss = chance.random()
        if toss < persist_share:
            found.append(Operation(number, OperationKind.PERSIST))
        elif toss < persist_share + mark_delete_share:
            found.append(Operation(number, OperationKind.MARK_DELETE, *consumers.mark_delete()))
        else:
            found.append(Operation(number, OperationKind.ACK, *consumers.ack()))
    return found


@final
class _Consumers:
    """Chooses the next entry; entries are numbered across the log."""

    def __init__(self, chance: Random, log: Mapping[int, int], *, known: Runs, shape: Traffic) -> None:
        self._chance = chance
        self._entries = [Position(ledger_id, entry_id) for ledger_id, count in log.items() for entry_id in range(count)]
        index_of: dict[tuple[int, int], int] = {entry: index for index, entry in enumerate(self._entries)}
        self._acked = {
            index_of[ledger_id, entry_id]
            for ledger_id, first, end in known
            for entry_id in range(first, end)
            if (ledger_id, entry_id) in index_of
        }
        # Invariant: every entry before it is acked.
        self._first_unacked = 0
        order = shape.ack_order(len(self._entries), chance)
        self._to_come = (index for index in order if index not in self._acked)

    def ack(self) -> Position:
        """Return the entry to ack next: sometimes one acked before, otherwise the next of the shape's order."""
        is_again = self._chance.random() < _AGAIN_SHARE
        index = self._any() if is_again else next(self._to_come, self._any())
        self._acked.add(index)
        return self._entries[index]

    def mark_delete(self) -> Position:
        """Return an entry at or above the first unacked one, which the mark-delete position cannot have reached."""
        index = min(self._first() + int(self._chance.expovariate(0.2)), len(self._entries) - 1)
        self._acked.update(range(self._first_unacked, index + 1))
        return self._entries[index]

    def _first(self) -> int:
        while self._first_unacked in self._acked:
            self._first_unacked += 1
        return self._first_unacked

    def _any(self) -> int:
        return self._chance.randrange(len(self._entries))


@final
class ProcessRun:
    """One run of a subject's process, from its start to its crash, as seen from outside."""

    def __init__(self, ledgers: Mapping[int, int], known: AckedSet | None = None) -> None:
        self._numbering = Numbering(ledgers)
        self._known = self._numbering.nothing if known is None else known
        self._oracle = Oracle(State(self._known, self._numbering.nothing))
        self.operations: list[Operation] = []  # requested, in order
        # For each operation, the durable entries at its request.
        self._durable_before: list[AckedSet] = []
        self._last_persist = -1

    @property
    def expected(self) -> Expected:
        """The states that a recovery may find."""
        return self._oracle.expected

    def requested(self, operation: Operation) -> None:
        """Record a request, before it is sent."""
        assert operation.number == len(self.operations)
        self.operations.append(operation)
        self._durable_before.append(self.expected.durable)
        self._oracle.requested(self._entries(operation))

    def accepted(self, number: int) -> None:
        """Record that an operation was accepted."""
        operation = self.operations[number]
        if operation.kind is OperationKind.PERSIST:
            self._last_persist = max(self._last_persist, number)
        self._oracle.accepted(self._entries(operation))

    def durable(self, numbers: Iterable[int]) -> None:
        """Record that the subject reported operations as durable."""
        for operation in [self.operations[number] for number in numbers]:
            self._oracle.durable(self._entries(operation))

    def gauged(self, redelivery_if_crashed: int, *, number: int | None = None) -> None:
        """Record a reading of the subject's gauge; operations accepted later may be redelivered in addition.

        Receipts do not count against the gauge if they came while its operation was in progress, because another thread
        may have read the gauge before them.
        """
        durable = None if number is None else self._durable_before[number]
        self._oracle.gauged(redelivery_if_crashed, durable=durable)

    def receipts_due(self) -> tuple[int, int]:
        """Return the numbers of acks that were to be persisted, and of those that are durable by the receipts.

        An ack counts if it covers an entry that no earlier ack covered and that was not acked at the start, and if it
        was requested before an accepted persist.
        """
        covered, due, given = self._known, 0, 0
        for operation in self.operations[: self._last_persist + 1]:
            own = self._entries(operation)
            if not own <= covered:
                covered |= own
                due += 1
                given += own <= self.expected.durable
        return due, given

    def state(self, recovered: Report) -> State:
        """Return the state of a recovery after the crash."""
        return State(self._numbering.runs(recovered.acked), self._numbering.nothing)

    def judge(self, recovered: Report) -> tuple[Broken, ...]:
        """Return the promises that a recovery after the crash broke."""
        return self._oracle.judge(self.state(recovered))

    def _entries(self, operation: Operation) -> AckedSet:
        ledger_id, entry_id = operation.ledger_id, operation.entry_id
        match operation.kind:
            case OperationKind.ACK:
                return self._numbering.run(ledger_id, entry_id, entry_id + 1)
            case OperationKind.MARK_DELETE:
                return self._numbering.up_to(ledger_id, entry_id)
        return self._numbering.nothing


_MEMORY = Path("/dev/shm")  # noqa: S108 - only the parent of private directories
_RECOVERED_TWICE_SHARE = 0.3


class LayerSkippedError(AckStateError):
    """This layer cannot run here; the message names the missing requirement."""


Layer: TypeAlias = "Callable[[int], Generator[RunOutcome]]"
"""Yields the runs of a seed and the following ones for ever; closing it removes everything that it set up."""


class RunSize(NamedTuple):
    """The length of a run: the number of process runs, and of the operations of each unless it is crashed earlier."""

    lives: int
    operations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayer:
    """A layer whose runs are process runs, one after the other in one directory."""

    name: str  # seeds the randomness of a run
    launches: Sequence[Launch]  # of the subjects, which are crashed in turn by seed
    # Provides an empty directory, and the crash of the processes that work in it.
    stage: Callable[[Random], AbstractContextManager[tuple[Path, Crash]]]
    size: RunSize
    shares: tuple[int, ...] = ()  # the operations of each process are divided by one of these
    timing: CrashTiming = field(default_factory=CrashTiming)
    shrink_tries: int = 24  # most repeats of a run that broke a promise, to find a shorter story
    shrink_seconds: float = 5.0

    def __call__(self, first_seed: int) -> Generator[RunOutcome]:
        """See `Layer`; first checks that every subject works without a crash."""
        for launch in self.launches:
            with self.stage(Random("beginning")) as (directory, _):  # noqa: S311 - no secret
                check_beginning(launch, directory, patience_s=self.timing.patience_s)
        for seed in count(first_seed):
            outcome = self._lived(seed, self.size).outcome()
            yield replace(outcome, broken=self._shortened(outcome)) if outcome.broken else outcome

    def _lived(self, seed: int, size: RunSize) -> ProcessRuns:
        """Execute the run of a seed: its process runs, or fewer if a promise is broken.

        The last of them is judged by a process that only recovers; so are others, chosen at random.
        """
        chance = Random(f"{self.name} {seed}")  # noqa: S311 - a workload, not a secret
        with self.stage(chance) as (directory, crash):
            lives = ProcessRuns(self.launches[seed % len(self.launches)], directory, seed, crash, self.timing)
            for number in range(size.lives):
                lives.live_once(max(size.operations // (chance.choice(self.shares) if self.shares else 1), 1))
                if not lives.broken and (number + 1 == size.lives or chance.random() < _RECOVERED_TWICE_SHARE):
                    lives.recover()
                if lives.broken:
                    break
            return lives

    def _shortened(self, outcome: RunOutcome) -> tuple[BrokenPromise, ...]:
        return shorter_run(
            outcome.broken,
            self.size,
            lambda size: self._lived(outcome.seed, size).broken,
            tries=self.shrink_tries,
            seconds=self.shrink_seconds,
        )


def shorter_run(
    broken: tuple[BrokenPromise, ...],
    size: RunSize,
    repeat: Callable[[RunSize], tuple[BrokenPromise, ...]],
    *,
    tries: int,
    seconds: float,
) -> tuple[BrokenPromise, ...]:
    """Repeat a run with fewer processes, then fewer operations, while it breaks its gravest promise.

    Return what the last such run broke: crashes of real processes are not repeatable.
    """
    promise, until = gravest(each.promise for each in broken), time.monotonic() + seconds
    for name in RunSize._fields:
        step = getattr(size, name) // 2
        while step and tries and time.monotonic() < until:
            smaller = size._replace(**{name: getattr(size, name) - step})
            again = repeat(smaller) if all(smaller) else ()
            tries -= 1
            if any(each.promise is promise for each in again):
                size, broken = smaller, again
            else:
                step //= 2
    return broken


@contextmanager
def scratch_directory(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a directory ``ackstate-PURPOSE-PID-*``, in memory unless told otherwise; remove it with its content.

    First, those of the same purpose whose process has ended are removed.
    """
    parent = parent or fast_parent()
    for left in leftovers(purpose, parent):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(purpose, os.getpid()), dir=parent) as directory:
        yield Path(directory).resolve()


def fast_parent() -> Path:
    """Return a directory in memory if the system has one, otherwise the one for temporary files."""
    is_usable = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
    return _MEMORY if is_usable else Path(tempfile.gettempdir())


def scratch_prefix(purpose: str, pid: int) -> str:
    """Return the prefix of the names of a process's directories for a purpose."""
    return f"ackstate-{purpose}-{pid}-"


def leftovers(purpose: str, parent: Path) -> Iterator[Path]:
    """Yield the directories of a purpose, named by `scratch_prefix`, whose process has ended."""
    for left in parent.glob(f"ackstate-{purpose}-*-*"):
        pid = left.name.removeprefix(f"ackstate-{purpose}-").partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            yield left
