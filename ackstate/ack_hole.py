"""Finds the ack holes of a subscription, and computes the effect of acking them.

An *ack hole* is a maximal run of unacked entries of one ledger, above the mark-delete position and below an entry of
any ledger that is acked individually. Unacked entries above the highest acked entry are not a hole: they divide
nothing.

Filling a hole joins the ranges on its two sides, which removes one range. Filling the lowest hole does more: the
mark-delete position moves over it and all acked entries after it, and the ranges below need no record any more. A hole
may cost nothing, and acking it may still add to the record: at the end of a ledger a range grows, in a ledger without
acks a range is created, and at entry 0 a lower end of -1 takes ten bytes.

The caller must not change the sets while one of these functions runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from pyroaring import BitMap

from ackstate.deleted_ranges import (
    Run,
    range_bytes,
    range_first_bytes,
    range_fixed_bytes,
    ranges_bytes,
    varint_bytes,
)
from ackstate.entry_bitmap import firsts, lasts
from ackstate.position import ENTRY_ID_MAX, Position, check_position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.deleted_ranges import DeletedRanges
    from ackstate.ledger_map import LedgerMap


class AckEffect(NamedTuple):
    """The effect of an ack."""

    record_bytes: int  # change of ``DeletedRanges.record_bytes``; negative if it shrinks
    range_count: int  # change of ``DeletedRanges.range_count``; negative if it shrinks
    mark_delete_advance: int  # entries over which the mark-delete position moves, those already acked included


class AckHole(NamedTuple):
    """A hole, and the effect of acking all of it."""

    ledger_id: int
    first: int  # inclusive
    end: int  # exclusive
    freed_bytes: int  # decrease of ``DeletedRanges.record_bytes``; negative if it grows
    freed_ranges: int  # decrease of ``DeletedRanges.range_count``; negative if it grows
    mark_delete_advance: int  # entries over which it moves, those already acked included

    @property
    def first_position(self) -> Position:
        """The first unacked entry."""
        return Position(self.ledger_id, self.first)

    @property
    def last_position(self) -> Position:
        """The last unacked entry."""
        return Position(self.ledger_id, self.end - 1)

    @property
    def entry_count(self) -> int:
        """The number of entries."""
        return self.end - self.first

    @property
    def cost_bytes(self) -> int:
        """The bytes of the record that exist because of the hole; 0 if acking it would add bytes."""
        return max(0, self.freed_bytes)


def hole_at(position: Position, deleted: DeletedRanges, ledgers: LedgerMap, mark_delete: Position) -> AckHole | None:
    """Return the hole that contains an entry; None if it is acked, not in the log, or above the highest acked entry."""
    ledger_id, entry_id = position = check_position(position)
    bitmap = deleted.entries(ledger_id)
    if position <= mark_delete or position not in ledgers or entry_id in bitmap:
        return None
    below = bitmap.rank(entry_id)
    first = bitmap[below - 1] + 1 if below else 0
    if ledger_id == mark_delete[0]:
        first = max(first, mark_delete[1] + 1)
    end = ledgers.entry_count(ledger_id)
    if below < len(bitmap):
        end = min(end, bitmap[below])
    elif (highest := deleted.last_range()) is None or highest[1].ledger_id <= ledger_id:
        return None
    return _Ackable(deleted, ledgers, mark_delete).hole(Run(ledger_id, first, end))


def holes(deleted: DeletedRanges, ledgers: LedgerMap, mark_delete: Position) -> Iterator[AckHole]:
    """Yield every hole, in order of position."""
    ackable = _Ackable(deleted, ledgers, mark_delete)
    for ledger_id, unacked in unacked_in_holes(deleted, ledgers, mark_delete):
        for begin, last in zip(firsts(unacked), lasts(unacked), strict=True):
            yield ackable.hole(Run(ledger_id, begin, last + 1))


def unacked_in_holes(deleted: DeletedRanges, ledgers: LedgerMap, mark_delete: Position) -> Iterator[tuple[int, BitMap]]:
    """Yield each ledger with holes, in order, with the unacked entries in them."""
    highest = deleted.last_range()
    if highest is None:
        return
    for ledger_id in ledgers.ledgers_between(mark_delete[0] - 1, highest[1].ledger_id + 1):
        first = mark_delete[1] + 1 if ledger_id == mark_delete[0] else 0
        end = ledgers.entry_count(ledger_id)
        if ledger_id == highest[1].ledger_id:
            end = min(end, highest[1].entry_id)
        if first < end and (unacked := BitMap(range(first, end)) - deleted.entries(ledger_id)):
            yield ledger_id, unacked


def ack_effect(position: Position, deleted: DeletedRanges, ledgers: LedgerMap, mark_delete: Position) -> AckEffect:
    """Return the effect of acking one entry now; zero if it is acked, `InvalidPositionError` if the log lacks it."""
    position = check_position(position, entry_id_min=0)
    if position <= mark_delete or position in deleted:
        return AckEffect(0, 0, 0)
    ledger_id, entry_id = ledgers.check_written(position)
    return _Ackable(deleted, ledgers, mark_delete).effect(Run(ledger_id, entry_id, entry_id + 1))


def stretch_effect(stretch: Run, deleted: DeletedRanges, ledgers: LedgerMap, mark_delete: Position) -> AckEffect:
    """Return the effect of acking a run of unacked entries of the log now."""
    return _Ackable(deleted, ledgers, mark_delete).effect(stretch)


@final
class _Ackable:
    """Computes the effects of acking runs of unacked entries of one ack state."""

    def __init__(self, deleted: DeletedRanges, ledgers: LedgerMap, mark_delete: Position) -> None:
        self._deleted = deleted
        self._ledgers = ledgers
        self._mark_delete = mark_delete
        # Differs from the mark-delete position only if ledgers were trimmed since its last move; the next ack moves it.
        reached = deleted.reach(mark_delete, ledgers)
        self._next = ledgers.next_valid(reached)
        self._no_advance = self._passing(reached)

    def hole(self, stretch: Run) -> AckHole:
        effect = self.effect(stretch)
        return AckHole(*stretch, -effect.record_bytes, -effect.range_count, effect.mark_delete_advance)

    def effect(self, stretch: Run) -> AckEffect:
        ledger_id, first, end = stretch
        if (ledger_id, first) == self._next:
            return self._passing(self._deleted.reach(Position(ledger_id, end - 1), self._ledgers))
        record_bytes, range_count = _growth(stretch, self._deleted.entries(ledger_id))
        freed = self._no_advance
        return AckEffect(freed.record_bytes + record_bytes, freed.range_count + range_count, freed.mark_delete_advance)

    def _passing(self, reached: Position) -> AckEffect:
        """Return the effect of moving the mark-delete position: every range at or below it is removed."""
        if reached == self._mark_delete:
            return AckEffect(0, 0, 0)
        record_bytes = range_count = 0
        for ledger_id, bitmap in self._deleted.bitmaps():
            if ledger_id > reached.ledger_id:
                break
            passed = bitmap & BitMap(range(reached.entry_id + 1)) if ledger_id == reached.ledger_id else bitmap
            range_firsts = firsts(passed)
            record_bytes += ranges_bytes(ledger_id, passed, range_firsts)
            range_count += len(range_firsts)
        return AckEffect(-record_bytes, -range_count, self._ledgers.count_between(self._mark_delete, reached))


def _growth(stretch: Run, acked: BitMap) -> tuple[int, int]:
    """Return the growth of the record and of the number of ranges if a run is acked and no mark-delete moves."""
    ledger_id, first, end = stretch
    joins_below = first > 0 and first - 1 in acked
    joins_above = end <= ENTRY_ID_MAX and end in acked
    if joins_below and joins_above:
        return -range_fixed_bytes(ledger_id) - range_first_bytes(end) - varint_bytes(first - 1), -1
    if joins_below:
        return varint_bytes(end - 1) - varint_bytes(first - 1), 0
    if joins_above:
        return range_first_bytes(first) - range_first_bytes(end), 0
    return range_bytes(ledger_id, first, end - 1), 1
