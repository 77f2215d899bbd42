"""What events say of single messages: which they name first, and which they ack."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ackstate.analysis.redelivery.waiting_line import Times, entries_by_ledger
from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from pyroaring import BitMap

    from ackstate.analysis.redelivery.acked import Bools, Chunk, Int64s
    from ackstate.cursor.managed import ManagedCursor

NAMING = (EventKind.DELIVER, EventKind.ACK, EventKind.MARK_DELETE)
"""What names messages."""


class Messages(Protocol):
    """Some messages."""

    def entries(self, ledger_id: int) -> BitMap:
        """Return those of a ledger."""
        ...


class Mentions(NamedTuple):
    """The messages that events name, one by one and as parallel arrays; those that were acked before may be left out.

    Attributes:
        event: By which event; rising.
        ts_ms: When.
        ledger_id: Of the message.
        entry_id: The same.
        is_ack: Whether it is acked, else it is delivered.
        new_at: Which mention of these was the first of all that name it; -1 if it was named before.
        acked_at: Which mention of these acked it last before; -1 if none did.
    """

    event: Int64s
    ts_ms: Int64s
    ledger_id: Int64s
    entry_id: Int64s
    is_ack: Bools
    new_at: Int64s
    acked_at: Int64s

    @classmethod
    def of(cls, events: Chunk, cursor: ManagedCursor, *known: Messages) -> Mentions:
        """Return what events mention that have not happened.

        Args:
            events: They.
            cursor: What was acked before.
            known: What was delivered and is not acked, and what was to be.
        """
        naming = np.flatnonzero(events.is_any_of(NAMING))
        lengths = name_counts(events, cursor)[naming]
        event = np.repeat(naming, lengths)
        back = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(event))
        ledger_id, entry_id = events.ledger_id[event], events.last_entry[event] + 1 - back
        is_ack = events.kind[event] != EventKind.DELIVER
        first_at, acked_at = earlier(ledger_id, entry_id, is_ack)
        is_known = are_acked(cursor, ledger_id, entry_id)
        for messages in known:
            is_known |= are_among(messages, ledger_id, entry_id)
        return cls(event, events.ts_ms[event], ledger_id, entry_id, is_ack, np.where(is_known, -1, first_at), acked_at)

    def times(self, which: Int64s) -> Times:
        """Return what some of them are of, and when."""
        return Times(self.ts_ms[which], self.ledger_id[which], self.entry_id[which])

    def new(self, begin: int, end: int) -> Int64s:
        """Return which mentions from one (included) to another (excluded) are the first of their message."""
        return begin + np.flatnonzero(self.new_at[begin:end] == np.arange(begin, end))

    def end_of_event(self, at: int) -> int:
        """Return the first mention from one on that is not of the same event as that before it."""
        if not 0 < at < len(self.event) or self.event[at] != self.event[at - 1]:
            return at
        return int(np.searchsorted(self.event, self.event[at], "right"))


def name_counts(events: Chunk, cursor: ManagedCursor) -> Int64s:
    """Return how many messages each event names that are above the mark-delete position; of a cumulative ack, few."""
    marked_ledger_id, marked_entry_id = cursor.mark_delete_position
    first = np.where(
        events.ledger_id == marked_ledger_id, np.maximum(events.first_entry, marked_entry_id + 1), events.first_entry
    )
    counts = np.maximum(events.last_entry + 1 - first, 0)
    return np.where(events.is_any_of(NAMING) & (events.ledger_id >= marked_ledger_id), counts, 0)


def earlier(ledger_ids: Int64s, entry_ids: Int64s, is_ack: Bools) -> tuple[Int64s, Int64s]:
    """Return for each mention of a message which one names it first, and which one acks it last before; -1 for none."""
    is_one_ledger = len(ledger_ids) > 0 and (ledger_ids == ledger_ids[0]).all()
    by_message = np.argsort(entry_ids, kind="stable") if is_one_ledger else np.lexsort((entry_ids, ledger_ids))
    ledger_ids, entry_ids = ledger_ids[by_message], entry_ids[by_message]
    is_other = (ledger_ids[1:] != ledger_ids[:-1]) | (entry_ids[1:] != entry_ids[:-1])
    if is_other.all():
        return np.arange(len(by_message)), np.full_like(by_message, -1)
    message = np.append(0, np.cumsum(is_other))
    first_at, acked_at = np.empty_like(by_message), np.full_like(by_message, -1)
    first_at[by_message] = by_message[np.searchsorted(message, message)]
    acks = np.flatnonzero(is_ack[by_message])
    again = np.flatnonzero(message[acks[1:]] == message[acks[:-1]])
    acked_at[by_message[acks[again + 1]]] = by_message[acks[again]]
    return first_at, acked_at


def are_among(messages: Messages, ledger_ids: Int64s, entry_ids: Int64s) -> Bools:
    """Return of each message whether it is one of some."""
    found = np.ones(len(entry_ids), np.bool_)
    for ledger_id, named in entries_by_ledger(ledger_ids, entry_ids).items():
        found &= (ledger_ids != ledger_id) | ~_are_entries(named - messages.entries(ledger_id), entry_ids)
    return found


def are_acked(cursor: ManagedCursor, ledger_ids: Int64s, entry_ids: Int64s) -> Bools:
    """Return of each message whether it is."""
    found = np.ones(len(entry_ids), np.bool_)
    for ledger_id, named in entries_by_ledger(ledger_ids, entry_ids).items():
        cursor.discard_acked(ledger_id, named)
        found &= (ledger_ids != ledger_id) | ~_are_entries(named, entry_ids)
    return found


def _are_entries(entries: BitMap, entry_ids: Int64s) -> Bools:
    if not entries:
        return np.zeros(1, np.bool_)
    among = np.frombuffer(entries.to_array(), np.uint32)
    is_one: Bools = among[np.searchsorted(among[:-1], entry_ids)] == entry_ids
    return is_one
