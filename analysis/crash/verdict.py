"""Compares what a subject was asked and what it said with what it holds after a crash: sets against sets.

A gauge is judged from both sides. Too low is one that said less than a crash brought back. Too high is one that counted
entries that cannot come back by the subject's own receipts: at most those that had been asked when it was read, without
those that were known at the start or had a receipt before. Receipts that came while the operation that the gauge was
said with was under way do not count against it, because another thread may have read the gauge before them. A crash
alone proves no gauge too high: bytes that were written and not synced survive SIGKILL, and often a power cut.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash.layer import BrokenPromise
from ackstate.analysis.crash.promises import Promise
from ackstate.analysis.crash.subject import OperationKind
from ackstate.analysis.trace.entry_set import EntrySet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ackstate.analysis.crash.subject import EntryRun, Operation, Report

_LISTED_MAX = 8


class Verdict(NamedTuple):
    """What a recovery showed.

    Attributes:
        lost_durable: Entries whose ack had a durable receipt, or was known at the start of the life, and is not known.
        invented: Entries that are known as acked and that nobody had asked to ack.
        redelivered: Entries whose ack had been accepted and is not known: they come again.
        redelivery_max: The most that may come again by the subject's own gauge; None if it told none.
        overstated: The gauge that was too high by most, and how many could come again at most; None if none was.
    """

    lost_durable: EntrySet
    invented: EntrySet
    redelivered: EntrySet
    redelivery_max: int | None
    overstated: tuple[int, int] | None = None

    @property
    def is_gauge_wrong(self) -> bool:
        """Whether the gauge was too low or too high."""
        return self.is_gauge_passed or self.overstated is not None

    @property
    def is_gauge_passed(self) -> bool:
        """Whether more comes again than the gauge said."""
        return self.redelivery_max is not None and len(self.redelivered) > self.redelivery_max

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost or invented, and the gauge held."""
        return not (len(self.lost_durable) or len(self.invented) or self.is_gauge_wrong)

    def broken(self, story: tuple[str, ...] = ()) -> tuple[BrokenPromise, ...]:
        """Return the promises that this shows broken, each with the same story."""
        found = []
        if len(self.invented):
            found.append((Promise.I1, f"acked, and nobody had asked: {listed(self.invented)}"))
        if len(self.lost_durable):
            found.append((Promise.I2, f"lost: {listed(self.lost_durable)}"))
        if self.is_gauge_passed:
            again = f"{len(self.redelivered)} come again: {listed(self.redelivered)}"
            found.append((Promise.I3, f"at most {self.redelivery_max} by the gauge, {again}"))
        if self.overstated is not None:
            gauge, possible = self.overstated
            found.append((Promise.I3, f"{gauge} by the gauge, and at most {possible} without a receipt"))
        return tuple(BrokenPromise(promise, what, story) for promise, what in found)


@final
class Life:
    """One life of a subject, from its start to its crash, as seen from outside.

    Args:
        ledgers: The message log: the number of entries of each ledger, by id.
        known: What it held as acked when it started; that must survive.
    """

    def __init__(self, ledgers: Mapping[int, int], known: EntrySet | None = None) -> None:
        self._ledgers = ledgers
        known = EntrySet() if known is None else known
        self._operations: list[Operation] = []
        self._known, self._asked, self._accepted = known, known.copy(), known.copy()
        # Replaced and never changed, because operations refer to it.
        self._durable = known
        # For each operation, what was durable when it was asked.
        self._durable_before: list[EntrySet] = []
        self._last_persist = -1
        self._gauge: int | None = None
        self._overstated: tuple[int, int] | None = None
        self._accepted_since_gauge = 0

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What it was asked, in order."""
        return tuple(self._operations)

    def asked(self, operation: Operation) -> None:
        """Note a request; before it is sent."""
        assert operation.number == len(self._operations)
        self._operations.append(operation)
        self._durable_before.append(self._durable)
        add_operation(self._asked, operation, self._ledgers)

    def operation(self, number: int) -> Operation:
        """Return what it was asked under a number.

        Raises:
            IndexError: Nothing.
        """
        if not 0 <= number < len(self._operations):
            raise IndexError(f"there was no operation {number}: {len(self._operations)} were asked for")
        return self._operations[number]

    def accepted(self, number: int) -> None:
        """Note that an operation was accepted.

        Raises:
            IndexError: It was never asked for.
        """
        operation = self.operation(number)
        if operation.kind is OperationKind.PERSIST:
            self._last_persist = max(self._last_persist, number)
        covered = EntrySet()
        add_operation(covered, operation, self._ledgers)
        # What had been accepted before was in that gauge, or was durable.
        self._accepted_since_gauge += len(covered - self._accepted)
        add_operation(self._accepted, operation, self._ledgers)

    def durable(self, numbers: Iterable[int]) -> None:
        """Note that operations are durable, as the subject said.

        Raises:
            IndexError: One was never asked for.
        """
        durable = self._durable.copy()
        for operation in [self.operation(number) for number in numbers]:
            add_operation(durable, operation, self._ledgers)
        self._durable = durable

    def gauged(self, redelivery_if_crashed: int, *, number: int | None = None) -> None:
        """Note what the subject's gauge said; what is accepted later may come on top of it.

        Args:
            redelivery_if_crashed: The gauge.
            number: The operation that it was said with; None for a report that was requested when no operation was
                under way.
        """
        durable = self._durable if number is None else self._durable_before[number]
        possible = len(self._asked - durable)
        excess = redelivery_if_crashed - possible
        if excess > 0 and (self._overstated is None or excess > self._overstated[0] - self._overstated[1]):
            self._overstated = (redelivery_if_crashed, possible)
        self._gauge = redelivery_if_crashed
        self._accepted_since_gauge = 0

    def receipts_due(self) -> tuple[int, int]:
        """Return how many acks were to be persisted, and how many of them are durable by the receipts.

        An ack counts that covers an entry which none before it covered and which was not known at the start, if it was
        asked before a persist that was accepted.
        """
        covered, due, given = self._known.copy(), 0, 0
        for operation in self._operations[: self._last_persist + 1]:
            own = EntrySet()
            add_operation(own, operation, self._ledgers)
            if len(own - covered):
                add_operation(covered, operation, self._ledgers)
                due += 1
                given += not len(own - self._durable)
        return due, given

    def judge(self, recovered: Report) -> Verdict:
        """Compare with what a recovery after the crash holds."""
        return self.judge_entries(entries(recovered.acked))

    def judge_entries(self, acked: EntrySet) -> Verdict:
        """As `judge`, of the entries that are acked."""
        gauge = self._gauge
        return Verdict(
            lost_durable=self._durable - acked,
            invented=acked - self._asked,
            redelivered=self._accepted - acked,
            redelivery_max=None if gauge is None else gauge + self._accepted_since_gauge,
            overstated=self._overstated,
        )


def add_operation(some: EntrySet, operation: Operation, ledgers: Mapping[int, int]) -> None:
    """Add the entries that an operation acks to some; `ledgers` as of `Life`."""
    ledger_id, entry_id = operation.ledger_id, operation.entry_id
    match operation.kind:
        case OperationKind.ACK:
            some.add_run(ledger_id, entry_id, entry_id + 1)
        case OperationKind.MARK_DELETE:
            for lower_id, count in ledgers.items():
                if lower_id < ledger_id:
                    some.add_run(lower_id, 0, count)
            some.add_run(ledger_id, 0, entry_id + 1)


def entries(runs: Iterable[EntryRun]) -> EntrySet:
    """Return the entries of some runs."""
    found = EntrySet()
    for run in runs:
        found.add_run(*run)
    return found


def listed(some: EntrySet) -> str:
    """Return entries as text, as half-open runs ``ledger:[first, end)``; the first few of many."""
    runs = [f"{ledger_id}:[{first}, {end})" for ledger_id, first, end in islice(some.runs(), _LISTED_MAX + 1)]
    return " ".join(runs[:_LISTED_MAX] + ["..."] * (len(runs) > _LISTED_MAX)) or "nothing"
