"""A run of events during which dispatch is sure not to stop, so that all of them can be replayed at once.

The usage of a gate only rises when a message is sent, by the most that its ack may add: acks and complete persists
reduce it. So a gate with room for all messages of a run has room for each of them, in any order of acks.

"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pyroaring import BitMap

from ackstate.analysis.replay.acked import AckAccumulator, EventChunk, NewlyAckedRuns
from ackstate.analysis.replay.in_flight_set import worst_case
from ackstate.analysis.trace.events import EventKind
from ackstate.entry_bitmap import bitmap_of
from ackstate.record_size import MINUS_ONE_BYTES, range_fixed_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.in_flight_set import InFlightSet
    from ackstate.cursor.managed import ManagedCursor

_ACKS = (EventKind.ACK, EventKind.MARK_DELETE)
_NONE = BitMap()
# At each of these numbers a varint becomes one byte longer.
_LONGER_FROM = np.array([2**digits for digits in range(7, 63, 7)])
_FIXED_BUT_LEDGER_BYTES = range_fixed_bytes(0) - 2


class OpenRun(NamedTuple):
    """Consecutive events, and their effects if no delivery is blocked.

    Attributes:
        events: The events.
        sent: By ledger, the messages that they send: at the first mention, unless the message is in flight or acked.
        acked: By ledger, the entries that they ack, possibly not for the first time.
    """

    events: EventChunk
    sent: Mapping[int, BitMap]
    acked: Mapping[int, BitMap]

    @classmethod
    def of(cls, events: EventChunk, cursor: ManagedCursor, on_their_way: InFlightSet) -> OpenRun:
        """Return the effects of some events on a cursor."""
        acked = dict(_entries(events, np.isin(events.kind, _ACKS)))
        sent = dict(_entries(events, events.kind == EventKind.DELIVER))
        for ledger_id, entries in acked.items():
            sent[ledger_id] = sent.get(ledger_id, _NONE) | entries
        for ledger_id, entries in sent.items():
            entries -= on_their_way.entries(ledger_id)  # noqa: PLW2901 - in place
            cursor.view.discard_acked(ledger_id, entries)
        return cls(events, sent, acked)

    @property
    def record_bytes(self) -> int:
        """The most that the acks of the sent messages can add to the ranges' size."""
        return sum(worst_case(*each) for each in self.sent.items())

    def news(self, cursor: ManagedCursor) -> NewlyAckedRuns:
        """Return the entries that each event acks first."""
        return _fold(cursor, self.acked).take(self.events)

    def one_by_one(self, cursor: ManagedCursor, on_their_way: InFlightSet) -> tuple[EventChunk, NewlyAckedRuns]:
        """Return the effective deliveries and acks as separate events, with the entries that they ack first."""
        events = self.events
        mentions = np.isin(events.kind, (*_ACKS, EventKind.DELIVER))
        fold = _fold(cursor, {**self.acked, **self.sent})
        for ledger_id, entries in fold.acked.items():
            entries |= on_their_way.entries(ledger_id)  # noqa: PLW2901 - in place
        sent = fold.take(events._replace(kind=np.where(mentions, int(EventKind.ACK), int(EventKind.PUBLISH))))
        acked = self.news(cursor)
        # A message that is acked before it is delivered is delivered at that instant.
        order = np.argsort(np.concatenate((2 * sent.event, 2 * acked.event + 1)), kind="stable")
        both = NewlyAckedRuns(*(np.concatenate(columns)[order] for columns in zip(sent, acked, strict=True)))
        is_ack = order >= len(sent.event)
        kind = np.where(is_ack, int(EventKind.ACK), int(EventKind.DELIVER))
        apart = EventChunk(events.ts_ms[both.event], kind, both.ledger_id, both.first, both.end - 1)
        return apart, acked._replace(event=np.flatnonzero(is_ack))


def delivery_costs(events: EventChunk) -> Int64s:
    """Return for each event an upper bound of `OpenRun.record_bytes` of its deliveries."""
    last = events.last_entry
    of_one = _FIXED_BUT_LEDGER_BYTES + 2 * (_varint_bytes(events.ledger_id) + _varint_bytes(last))
    # The lower end of a range that starts at entry 0 is -1.
    costs = (last - events.first_entry + 1) * of_one + (MINUS_ONE_BYTES - 1) * (events.first_entry == 0)
    return np.where(events.kind == EventKind.DELIVER, costs, 0)


def _varint_bytes(numbers: Int64s) -> Int64s:
    """Return `ackstate.record_size.varint_bytes` of some numbers."""
    return np.searchsorted(_LONGER_FROM, numbers, "right") + 1


def _fold(cursor: ManagedCursor, ledgers: Mapping[int, BitMap]) -> AckAccumulator:
    """Return the acks of a cursor in some ledgers."""
    marked_ledger_id, marked_entry_id = cursor.mark_delete_position
    acked = {each: cursor.deleted.entries(each).copy() for each in ledgers if each >= marked_ledger_id}
    if marked_ledger_id in acked:
        acked[marked_ledger_id].add_range(0, marked_entry_id + 1)
    if len(acked) < len(ledgers):
        counts = cursor.ledgers.counts()
        acked |= {each: BitMap(range(counts[each])) for each in ledgers if each < marked_ledger_id}
    return AckAccumulator(acked)


def _entries(events: EventChunk, is_meant: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Iterator[tuple[int, BitMap]]:
    """Yield each ledger with the entries named by the selected events."""
    meant = np.flatnonzero(is_meant)
    ledger_ids = events.ledger_id[meant]
    for ledger_id in np.unique(ledger_ids).tolist():
        of_ledger = meant[ledger_ids == ledger_id]
        first, last = events.first_entry[of_ledger], events.last_entry[of_ledger]
        is_single = first == last
        entries = bitmap_of(first[is_single].astype(np.uint32))
        for run in zip(first[~is_single].tolist(), (last[~is_single] + 1).tolist(), strict=True):
            entries.add_range(*run)
        yield ledger_id, entries
