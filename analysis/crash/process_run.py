"""One life of a subject for the oracle: what it was asked and what it said, by the numbers of its operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.acked_set import Numbering
from ackstate.analysis.crash.oracle import Oracle, State
from ackstate.analysis.crash.subject import OperationKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ackstate.analysis.crash.acked_set import AckedSet
    from ackstate.analysis.crash.oracle import Broken, Expected
    from ackstate.analysis.crash.subject import Operation, Report


@final
class ProcessRun:
    """One life of a subject, from its start to its crash, as seen from outside.

    Args:
        ledgers: The message log: the number of entries of each ledger, by id in order.
        known: What it held as acked when it started; that must survive.
    """

    def __init__(self, ledgers: Mapping[int, int], known: AckedSet | None = None) -> None:
        self._numbering = Numbering(ledgers)
        self._known = self._numbering.nothing if known is None else known
        self._oracle = Oracle(State(self._known, self._numbering.nothing))
        self._operations: list[Operation] = []
        # For each operation, what was durable when it was asked.
        self._durable_before: list[AckedSet] = []
        self._last_persist = -1

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What it was asked, in order."""
        return tuple(self._operations)

    @property
    def expected(self) -> Expected:
        """What a recovery may find."""
        return self._oracle.expected

    def asked(self, operation: Operation) -> None:
        """Note a request; before it is sent."""
        assert operation.number == len(self._operations)
        self._operations.append(operation)
        self._durable_before.append(self.expected.durable)
        self._oracle.asked(self._entries(operation))

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
        self._oracle.accepted(self._entries(operation))

    def durable(self, numbers: Iterable[int]) -> None:
        """Note that operations are durable, as the subject said.

        Raises:
            IndexError: One was never asked for.
        """
        for operation in [self.operation(number) for number in numbers]:
            self._oracle.durable(self._entries(operation))

    def gauged(self, redelivery_if_crashed: int, *, number: int | None = None) -> None:
        """Note what the subject's gauge said; what is accepted later may come on top of it.

        Receipts that came while the operation was under way that the gauge was said with do not count against it:
        another thread may have read the gauge before them.

        Args:
            redelivery_if_crashed: The gauge.
            number: The operation that it was said with; None for a report that was requested when no operation was
                under way.
        """
        durable = None if number is None else self._durable_before[number]
        self._oracle.gauged(redelivery_if_crashed, durable=durable)

    def receipts_due(self) -> tuple[int, int]:
        """Return how many acks were to be persisted, and how many of them are durable by the receipts.

        An ack counts that covers an entry which none before it covered and which was not known at the start, if it was
        asked before a persist that was accepted.
        """
        covered, due, given = self._known, 0, 0
        for operation in self._operations[: self._last_persist + 1]:
            own = self._entries(operation)
            if not own <= covered:
                covered |= own
                due += 1
                given += own <= self.expected.durable
        return due, given

    def state(self, recovered: Report) -> State:
        """Return what a recovery after the crash holds."""
        return State(self._numbering.runs(recovered.acked), self._numbering.nothing)

    def judge(self, recovered: Report) -> tuple[Broken, ...]:
        """Return the promises that a recovery after the crash broke."""
        return self._oracle.judge(self.state(recovered))

    def _entries(self, operation: Operation) -> AckedSet:
        return entries_of(operation, self._numbering)


def entries_of(operation: Operation, numbering: Numbering) -> AckedSet:
    """Return the entries that an operation acks."""
    ledger_id, entry_id = operation.ledger_id, operation.entry_id
    match operation.kind:
        case OperationKind.ACK:
            return numbering.run(ledger_id, entry_id, entry_id + 1)
        case OperationKind.MARK_DELETE:
            return numbering.up_to(ledger_id, entry_id)
    return numbering.nothing
