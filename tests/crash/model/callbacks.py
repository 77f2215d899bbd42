"""Objects that the product calls back in a simulation: waiters for a gate, and the source of a delay view."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyroaring import BitMap

    from ackstate.delay.position_set import PositionSet
    from ackstate.delay.tracker import AckedAndSent
    from ackstate.position import Position
    from crash.model.simulation import BrokerSimulation


class Waiter:
    """Waits for a gate, and counts its calls."""

    def __init__(self, consumer: str) -> None:
        self.consumer, self.calls = consumer, 0

    def __call__(self) -> None:
        """Count the call."""
        self.calls += 1


class CountedRequests:
    """Passes a delay view's requests to its subscription, and counts the requests for missed messages."""

    def __init__(self, subscription: AckedAndSent, simulation: BrokerSimulation) -> None:
        self._subscription, self._simulation = subscription, simulation

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        """See `AckedAndSent`."""
        self._subscription.discard_acked(ledger_id, entries)

    def not_sent_between(self, first: Position, end: Position) -> PositionSet:
        """See `AckedAndSent`."""
        missed = self._subscription.not_sent_between(first, end)
        self._simulation.counts["derived"] += len(missed) > 0
        return missed
