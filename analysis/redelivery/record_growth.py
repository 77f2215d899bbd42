"""By how much does each of many acks change the size of what is acked and not durable? All of them at once.

An ack begins a range, makes one longer, or joins two: that takes the entries beside it, and which of them were acked
before. With the ack that fills the hole after the mark-delete position that moves on, over all ranges that follow: so
an entry counts from its own ack until the last of those below it is acked, and one that is the last never does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ackstate.analysis.redelivery.record_bytes import first_bytes, varint_bytes
from ackstate.entry_bitmap import bitmap_of, run_end
from ackstate.position import Position
from ackstate.record_size import range_fixed_bytes

if TYPE_CHECKING:
    from pyroaring import BitMap

    from ackstate.analysis.redelivery.acked import Int64s
    from ackstate.cursor.managed import ManagedCursor


def record_growth(cursor: ManagedCursor, ledger_ids: Int64s, entry_ids: Int64s) -> Int64s:
    """Return by how much some acks, one after another, would change a cursor's `unpersisted_record_bytes`.

    Args:
        cursor: No persist of it is under way, and nothing was read from it.
        ledger_ids: Of the entries, each named once; none of them is acked.
        entry_ids: The same.

    Returns:
        A number for each ack up to the first, excluded, with which the mark-delete position leaves its ledger.

    Complexity: O(acks log acks), and bitmap operations over what is acked of their ledgers; where the mark-delete
    position moves, O(entries that it moves over).
    """
    growth = np.zeros(len(entry_ids), np.int64)
    known = len(growth)
    undurable = cursor.undurable
    hole = cursor.next_unread
    for ledger_id in np.unique(ledger_ids).tolist():
        at = np.flatnonzero(ledger_ids == ledger_id)
        at = at[np.argsort(entry_ids[at])]
        acks = _Acks(ledger_id, at, entry_ids[at], bitmap_of(entry_ids[at].astype(np.uint32)))
        held = undurable.entries(ledger_id)
        growth[at] = _joining(acks, held)
        if ledger_id == hole.ledger_id and hole.entry_id in acks.bitmap:
            end = run_end(cursor.deleted.entries(ledger_id) | acks.bitmap, hole.entry_id)
            last_at = _cover(growth, acks, held, covered=range(hole.entry_id, end))
            if not cursor.is_unacked(Position(ledger_id, end)):
                known = last_at
    return growth[:known]


class _Acks(NamedTuple):
    """The acks of one ledger, by entry: which they are of all, and what they ack."""

    ledger_id: int
    at: Int64s
    entries: Int64s
    bitmap: BitMap


def _joining(acks: _Acks, held: BitMap) -> Int64s:
    """Return what each ack adds where nothing is covered."""
    entries = acks.entries
    is_beside = entries[1:] == entries[:-1] + 1
    is_later = acks.at[1:] > acks.at[:-1]
    follows, precedes = np.zeros((2, len(entries)), np.bool_)
    follows[1:], precedes[:-1] = is_beside & is_later, is_beside & ~is_later
    follows[np.searchsorted(entries, _numbers(acks.bitmap & held.shift(1)))] = True
    precedes[np.searchsorted(entries, _numbers(acks.bitmap & held.shift(-1)))] = True
    low, high = first_bytes(entries), varint_bytes(entries)
    of_range = range_fixed_bytes(acks.ledger_id) + low + high
    moved_end = np.where(follows, high - low, low - high)
    joining: Int64s = np.where(follows == precedes, np.where(follows, -of_range, of_range), moved_end)
    return joining


def _cover(growth: Int64s, acks: _Acks, held: BitMap, *, covered: range) -> int:
    """Take off what the mark-delete position covers as it moves over some entries; return with which ack it is over.

    Args:
        growth: What all acks add where nothing is covered; it is corrected.
        acks: Those of the ledger.
        held: What of it is acked and not durable.
        covered: The entries.
    """
    within = acks.entries < covered.stop
    acked_at = np.full(len(covered), -1)
    acked_at[acks.entries[within] - covered.start] = acks.at[within]
    covered_at = np.maximum.accumulate(acked_at)
    growth[acked_at[acked_at == covered_at]] = 0
    counts = np.zeros(len(covered), np.bool_)
    counts[_numbers((held | acks.bitmap) & bitmap_of(covered)) - covered.start] = True
    counts &= acked_at < covered_at
    first = np.flatnonzero(counts & ~np.append(False, counts[:-1]))
    last = np.flatnonzero(counts & ~np.append(counts[1:], False))
    sizes = range_fixed_bytes(acks.ledger_id) + first_bytes(first + covered.start) + varint_bytes(last + covered.start)
    np.subtract.at(growth, covered_at[first], sizes)
    return int(covered_at[-1])


def _numbers(bitmap: BitMap) -> Int64s:
    return np.asarray(bitmap.to_array(), np.int64)
