"""Feeds the delivery times of many events at once into a cursor's `DeliveryRuler`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.analysis.trace.events import EventKind
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.replay.acked import EventChunk
    from ackstate.delivery_ruler import DeliveryRuler

_ENTRY_BITS = 33


@final
class AgeFeed:
    """Feeds the deliveries of some events into a ruler that has all earlier ones.

    Args:
        ruler: Receives the deliveries.
        events: In order of time.

    Attributes:
        stops: The relevant events: the last delivery of each millisecond that is above all earlier ones.
    """

    def __init__(self, ruler: DeliveryRuler, events: EventChunk) -> None:
        self._ruler = ruler
        self._events = events
        self._taken = 0
        _, marks = ruler.marks()
        deliveries = np.flatnonzero(events.kind == EventKind.DELIVER)
        before = np.array([marks[-1] if marks else (0, -1)], np.int64)
        told = np.column_stack((events.ledger_id[deliveries], events.last_entry[deliveries]))
        ledger_ids, entry_ids = np.concatenate((before, told)).T
        # Numbers in the order of the positions.
        _, ledger_numbers = np.unique(ledger_ids, return_inverse=True)
        highest = np.maximum.accumulate((ledger_numbers << _ENTRY_BITS) + entry_ids + 1)
        rises = deliveries[highest[1:] > highest[:-1]]
        rise_ms = events.ts_ms[rises]
        self.stops = rises[np.append(rise_ms[1:] > rise_ms[:-1], np.ones(min(len(rise_ms), 1), np.bool_))]

    def take(self, end: int) -> Sequence[int]:
        """Feed the events from the end of the last call up to an event, and return the times at which marks moved.

        Args:
            end: The first event that is not fed; its millisecond differs from that of the event before.
        """
        begin, until = np.searchsorted(self.stops, (self._taken, end))
        taken = self.stops[begin:until]
        self._taken = end
        times_ms: list[int] = self._events.ts_ms[taken].tolist()
        entries = zip(self._events.ledger_id[taken].tolist(), self._events.last_entry[taken].tolist(), strict=True)
        self._ruler.record_many([Position(*each) for each in entries], times_ms)
        return times_ms
