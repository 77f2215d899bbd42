"""What a subject was asked and what it said, and whether what it holds after a crash agrees: sets against sets."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, final

from analysis.crash.layer import BrokenPromise
from analysis.crash.subject import OperationKind
from analysis.trace.entry_set import EntrySet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from analysis.crash.subject import EntryRun, Operation, Report

INVENTED = "I1: an unacked entry is never treated as acked"
LOST = "I2: a durable receipt survives any crash"
DIFFERING = "I5: two recoveries of what a crash left hold the same"
GAUGE = "I3: no more comes again than the gauge said"
_LISTED_MAX = 8


class Verdict(NamedTuple):
    """What a recovery showed.

    Attributes:
        lost_durable: Entries whose ack had a durable receipt, or was known at the start of the life, and is not known.
        invented: Entries that are known as acked and that nobody had asked to ack.
        redelivered: Entries whose ack had been accepted and is not known: they come again.
        redelivery_max: The most that may come again by the subject's own gauge; None if it told none.
    """

    lost_durable: EntrySet
    invented: EntrySet
    redelivered: EntrySet
    redelivery_max: int | None

    @property
    def is_gauge_passed(self) -> bool:
        """Whether more comes again than the gauge said."""
        return self.redelivery_max is not None and len(self.redelivered) > self.redelivery_max

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost or invented, and the gauge held."""
        return not (len(self.lost_durable) or len(self.invented) or self.is_gauge_passed)

    def broken(self, story: tuple[str, ...] = ()) -> tuple[BrokenPromise, ...]:
        """Return the promises that this shows broken, each with the same story."""
        found = []
        if len(self.invented):
            found.append((INVENTED, f"acked, and nobody had asked: {listed(self.invented)}"))
        if len(self.lost_durable):
            found.append((LOST, f"lost: {listed(self.lost_durable)}"))
        if self.is_gauge_passed:
            again = f"{len(self.redelivered)} come again: {listed(self.redelivered)}"
            found.append((GAUGE, f"at most {self.redelivery_max} by the gauge, {again}"))
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
        self._asked, self._accepted, self._durable = known.copy(), known.copy(), known.copy()
        self._gauge: int | None = None
        self._accepted_since_gauge = 0

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What it was asked, in order."""
        return tuple(self._operations)

    def asked(self, operation: Operation) -> None:
        """Note a request; before it is sent."""
        assert operation.number == len(self._operations)
        self._operations.append(operation)
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
        for operation in [self.operation(number) for number in numbers]:
            add_operation(self._durable, operation, self._ledgers)

    def gauged(self, redelivery_if_crashed: int) -> None:
        """Note what the subject's gauge said; what is accepted later may come on top of it."""
        self._gauge = redelivery_if_crashed
        self._accepted_since_gauge = 0

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
