"""One run of a subject's process for the oracle: requests and answers by the numbers of its operations."""

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
    """One run of a subject's process, from its start to its crash, as seen from outside.

    Args:
        ledgers: The message log: the number of entries of each ledger, by id in order.
        known: The acked entries at its start, which must survive.
    """

    def __init__(self, ledgers: Mapping[int, int], known: AckedSet | None = None) -> None:
        self._numbering = Numbering(ledgers)
        self._known = self._numbering.nothing if known is None else known
        self._oracle = Oracle(State(self._known, self._numbering.nothing))
        self._operations: list[Operation] = []
        # For each operation, the durable entries at its request.
        self._durable_before: list[AckedSet] = []
        self._last_persist = -1

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The requested operations, in order."""
        return tuple(self._operations)

    @property
    def expected(self) -> Expected:
        """The states that a recovery may find."""
        return self._oracle.expected

    def requested(self, operation: Operation) -> None:
        """Record a request, before it is sent."""
        assert operation.number == len(self._operations)
        self._operations.append(operation)
        self._durable_before.append(self.expected.durable)
        self._oracle.requested(self._entries(operation))

    def operation(self, number: int) -> Operation:
        """Return the operation with a number.

        Raises:
            IndexError: There is none.
        """
        if not 0 <= number < len(self._operations):
            raise IndexError(f"there was no operation {number}: {len(self._operations)} were requested")
        return self._operations[number]

    def accepted(self, number: int) -> None:
        """Record that an operation was accepted.

        Raises:
            IndexError: It was never requested.
        """
        operation = self.operation(number)
        if operation.kind is OperationKind.PERSIST:
            self._last_persist = max(self._last_persist, number)
        self._oracle.accepted(self._entries(operation))

    def durable(self, numbers: Iterable[int]) -> None:
        """Record that the subject reported operations as durable.

        Raises:
            IndexError: One was never requested.
        """
        for operation in [self.operation(number) for number in numbers]:
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
        for operation in self._operations[: self._last_persist + 1]:
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
