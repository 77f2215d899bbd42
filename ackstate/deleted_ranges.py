"""The individually deleted ranges: acked entries above the mark-delete position.

One roaring bitmap per ledger. The number of ranges and the size of their persisted form, for which Pulsar walks over
all ranges, are two counters here: adding one entry updates them from its two neighbours, a bulk add by bitmap
operations on the new entries.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import index
from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.entry_bitmap import bitmap_of, firsts, lasts, run_end
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position, check_position
from ackstate.range_store import NO_ENTRIES, RangeStore
from ackstate.record_size import (
    MINUS_ONE_BYTES,
    VARINT_BYTES,
    firsts_bytes,
    lasts_bytes,
    range_bytes,
    range_first_bytes,
    range_fixed_bytes,
    range_last_bytes,
    ranges_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ackstate.ledger_map import LedgerMap


@final
class DeletedRanges(RangeStore):
    """The individually deleted ranges of a cursor, exact at every moment.

    >>> ranges = DeletedRanges()
    >>> ranges.add(Position(3, 7)), ranges.add_run(3, 9, 12), ranges.add(Position(3, 8))
    (1, 3, 1)
    >>> str(ranges), ranges.range_count, len(ranges)
    ('[(3:6..3:11]]', 1, 5)

    Runs never join across ledgers. Entry ids are 0 to 2**32 - 1, ledger ids 0 to 2**63 - 1; a call with anything else
    raises `ValueError` or `TypeError` and changes nothing. Not safe for concurrent mutation.
    """

    @classmethod
    def from_bitmaps(cls, bitmaps: Iterable[tuple[int, BitMap]]) -> DeletedRanges:
        """Return the ranges of ledgers, in order and each once, given their acked entries.

        Args:
            bitmaps: Ownership passes to the ranges: the caller must not use them again. Empty bitmaps are ignored.

        Raises:
            ValueError: A ledger id is out of range or does not rise.
            TypeError: A ledger id is not an integer.
        """
        ranges = cls()
        for ledger_id, bitmap in bitmaps:
            _check_entry(ledger_id, 0)
            if ranges._ledger_ids and ledger_id <= ranges._ledger_ids[-1]:
                raise ValueError(f"ledger ids must rise, got {ledger_id} after {ranges._ledger_ids[-1]}")
            if bitmap:
                ranges._hold(ledger_id, bitmap)
        return ranges

    def add(self, position: Position) -> int:
        """Ack one entry and return 1, or 0 if it was already acked.

        Raises:
            ValueError: An id is out of range.
            TypeError: An id is not an integer.

        Complexity: O(1) in the ledger of the previous call, O(log ledgers) in another, for any acks.
        """
        ledger_id, entry_id = position
        if type(ledger_id) is not int or type(entry_id) is not int:
            ledger_id, entry_id = index(ledger_id), index(entry_id)  # Truncating a fraction would invent an ack.
        if ledger_id != self._recent_id or not 0 <= entry_id <= ENTRY_ID_MAX:
            _check_entry(ledger_id, entry_id)
            if not self._recall(ledger_id):
                self._hold_none_yet(ledger_id, range_fixed_bytes(ledger_id))
        return self._add_recent(entry_id)

    def add_with(self, part: DeletedRanges, position: Position) -> int:
        """Ack one entry in this set and in a subset of it, as `add`, and return 1, or 0 if it was already acked.

        Args:
            part: A subset of this set.
            position: A result of `check_position`: it is not checked again.

        Complexity: as `add`.
        """
        ledger_id, entry_id = position
        if ledger_id != self._recent_id and not self._recall(ledger_id):
            return self.add(position) and part.add(position)
        bitmap = self._recent
        if entry_id in bitmap:
            return 0
        if ledger_id != part._recent_id and not part._recall(ledger_id):
            part._hold_none_yet(ledger_id, self._recent_fixed)
        if not 0 < entry_id < ENTRY_ID_MAX or entry_id - 1 in bitmap or entry_id + 1 in bitmap:
            self._add_recent(entry_id)
            return part._add_recent(entry_id)
        # An entry that is isolated in the whole set is isolated in the subset.
        record_bytes = (
            self._recent_fixed + VARINT_BYTES[(entry_id - 1).bit_length()] + VARINT_BYTES[entry_id.bit_length()]
        )
        bitmap.add(entry_id)
        self._entry_count += 1
        self._range_count += 1
        self._record_bytes += record_bytes
        part._recent.add(entry_id)
        part._entry_count += 1
        part._range_count += 1
        part._record_bytes += record_bytes
        return 1

    def add_run(self, ledger_id: int, first: int, end: int) -> int:
        """Ack the entries from `first` (inclusive) to `end` (exclusive) and return the number of new ones.

        Raises:
            ValueError: An id is out of range, or `end` is below `first`.
        """
        if end < first:
            raise ValueError(f"the end of run {first}..{end} of ledger {ledger_id} must not be below its first entry")
        if end == first:
            return 0
        _check_entry(ledger_id, first)
        _check_entry(ledger_id, end - 1)
        return self._add_bitmap(ledger_id, BitMap(range(first, end)))

    def add_entries(self, ledger_id: int, entry_ids: Iterable[int]) -> int:
        """Ack many entries of one ledger and return the number of new ones.

        Args:
            ledger_id: The ledger of all of them.
            entry_ids: In any order, repeated or not; a `BitMap` and an ``array('I')`` are fastest.

        Raises:
            ValueError: An id is out of range.
            TypeError: Something is not an integer.

        Complexity: bitmap operations over the new entries and their neighbours.
        """
        _check_entry(ledger_id, 0)
        return self._add_bitmap(ledger_id, bitmap_of(entry_ids))

    def add_entries_with(self, part: DeletedRanges, ledger_id: int, new: BitMap) -> None:
        """Ack entries of one ledger, all new to this set, in this set and in a subset of it.

        Args:
            part: A subset of this set.
            ledger_id: A valid ledger id; it is not checked again.
            new: The entries; copied, not changed.

        Complexity: as `add_entries`, with one accounting for both sets if no range is joined.
        """
        if not new:
            return
        held, right_of_new = self._recall(ledger_id), new.shift(1)
        if right_of_new.isdisjoint(held) and new.shift(-1).isdisjoint(held):
            new_firsts = new - right_of_new
            counts = len(new), len(new_firsts), ranges_bytes(ledger_id, new, new_firsts)
            self._put(ledger_id, new, counts)
            part._put(ledger_id, new, counts)
        else:
            self._add_bitmap(ledger_id, new)
            part._add_bitmap(ledger_id, new)

    def add_open_closed(self, lower: Position, upper: Position) -> int:
        """Ack ``(lower, upper]`` by Pulsar's rule and return the number of new entries.

        In one ledger, it acks every entry above `lower` up to `upper`. Across two ledgers it acks every entry up to
        `upper` in the upper ledger, and in the lower ledger the entries above `lower` up to the last one already acked,
        if any: entries that might not exist are never acked. Ledgers in between are not changed.

        Raises:
            ValueError: An id is out of range, or `upper` lies below `lower`.

        Source: ``PositionRangeSet.addOpenClosed`` of Apache Pulsar.
        """
        if upper < lower:
            raise ValueError(
                f"the upper end of range ({Position(*lower)}..{Position(*upper)}] must not be below its lower end"
            )
        for ledger_id, entry_id in (lower, upper):
            _check_entry(ledger_id, max(entry_id, 0))
        if lower[0] == upper[0]:
            return self.add_run(lower[0], max(lower[1], -1) + 1, max(upper[1], -1) + 1)
        known = self.entries(lower[0])
        filled = 0
        if known and known.max() > lower[1]:
            filled = self.add_run(lower[0], max(lower[1], -1) + 1, known.max() + 1)
        return filled + self.add_run(upper[0], 0, max(upper[1], -1) + 1)

    def update(self, other: DeletedRanges) -> int:
        """Ack all entries of `other` and return the number of new ones."""
        return sum(self._add_bitmap(ledger_id, bitmap) for ledger_id, bitmap in other.bitmaps())

    def difference_update(self, other: DeletedRanges) -> int:
        """Remove all entries of `other` and return the number of removed ones.

        Complexity: bitmap operations over the ledgers in both sets.
        """
        removed = 0
        for ledger_id, forgotten in list(other.bitmaps()):  # A copy, because `other` may be this set.
            held = self.entries(ledger_id)
            rest = held - forgotten
            if len(rest) == len(held):
                continue
            removed += self._drop(ledger_id, held) - len(rest)
            at = bisect_left(self._ledger_ids, ledger_id)
            del self._ledger_ids[at], self._bitmaps[at]
            self._recent_id = None
            if rest:
                self._hold(ledger_id, rest)
        return removed

    def discard_missing(self, ledgers: LedgerMap) -> None:
        """Remove the entries that a message log does not have. Complexity: O(ledgers, and containers of those)."""
        lost = DeletedRanges()
        for ledger_id, bitmap in self.bitmaps():
            if bitmap.max() >= (entry_count := ledgers.entry_count(ledger_id)):
                gone = bitmap.copy()
                gone.remove_range(0, entry_count)
                lost.add_entries(ledger_id, gone)
        if lost:
            self.difference_update(lost)

    def remove_at_most(self, position: Position) -> int:
        """Remove every entry at or below a position and return their number.

        Args:
            position: Acked or not; entry -1 removes only the ledgers below.

        Raises:
            ValueError: An id is out of range.
            TypeError: An id is not an integer.

        Complexity: bitmap operations over the removed entries.
        """
        ledger_id, entry_id = check_position(position)
        held_before = self._entry_count
        if self._ledger_ids and self._ledger_ids[0] < ledger_id:
            self._drop_below(ledger_id)
        if self._ledger_ids and self._ledger_ids[0] == ledger_id and entry_id >= 0:
            self._drop_up_to(entry_id)
        return held_before - self._entry_count

    def remove_lowest_with(self, part: DeletedRanges, ledger_id: int, first: int) -> int:
        """Remove the lowest run, here and in a subset of this set, if it starts at an entry; return its end.

        Args:
            part: A subset of this set.
            ledger_id: The ledger of the entry.
            first: The entry; no entry below it is acked.

        Returns:
            The end of the run (exclusive): `first` if the entry is not acked.

        Complexity: O(log run length) range queries.
        """
        bitmap = self._recent if ledger_id == self._recent_id else self._recall(ledger_id)
        if first > ENTRY_ID_MAX or first not in bitmap:
            return first
        end = run_end(bitmap, first)
        record_bytes = self._recent_fixed + range_first_bytes(first) + range_last_bytes(end - 1)
        self._remove_lowest(first, end, record_bytes)
        if end - first > 1:
            if part._ledger_ids:
                part.remove_at_most(Position(ledger_id, end - 1))
        elif first in part.entries(ledger_id):
            part._remove_lowest(first, end, record_bytes)
        return end

    def take_at_most(self, position: Position) -> DeletedRanges:
        """Remove every entry at or below a position and return them as a separate set.

        Raises:
            As `remove_at_most`.

        Complexity: bitmap operations over the removed entries.
        """
        check_position(position)
        ledger_id, entry_id = position
        below = bisect_left(self._ledger_ids, ledger_id)
        part = self.entries(ledger_id) & BitMap(range(entry_id + 1)) if entry_id >= 0 else NO_ENTRIES
        whole = zip(self._ledger_ids[:below], self._bitmaps[:below], strict=True)
        taken = DeletedRanges.from_bitmaps([*whole, (ledger_id, part)])
        self.remove_at_most(position)
        return taken

    def copy(self) -> DeletedRanges:
        """Return an independent copy. Complexity: O(bytes held)."""
        twin = DeletedRanges()
        twin._ledger_ids = self._ledger_ids[:]
        twin._bitmaps = [bitmap.copy() for bitmap in self._bitmaps]
        twin._count(self._entry_count, self._range_count, self._record_bytes)
        return twin

    def _add_recent(self, entry_id: int) -> int:
        bitmap = self._recent
        if entry_id in bitmap:
            return 0
        # `low` is the size of a lower end here and of an upper end one entry below; `high` likewise above.
        low = VARINT_BYTES[(entry_id - 1).bit_length()] if entry_id else MINUS_ONE_BYTES
        high = VARINT_BYTES[entry_id.bit_length()]
        ends_before = entry_id > 0 and entry_id - 1 in bitmap
        begins_after = entry_id < ENTRY_ID_MAX and entry_id + 1 in bitmap
        bitmap.add(entry_id)
        self._entry_count += 1
        if ends_before is not begins_after:
            self._record_bytes += high - low if ends_before else low - high
        elif ends_before:
            self._range_count -= 1
            self._record_bytes -= self._recent_fixed + low + high
        else:
            self._range_count += 1
            self._record_bytes += self._recent_fixed + low + high
        return 1

    def _remove_lowest(self, first: int, end: int, record_bytes: int) -> None:
        """Remove the lowest range, given its bounds and size."""
        bitmap = self._bitmaps[0]
        bitmap.remove_range(first, end)
        self._entry_count -= end - first
        self._range_count -= 1
        self._record_bytes -= record_bytes
        if not bitmap:
            self._forget_ledgers(1)

    def _add_bitmap(self, ledger_id: int, candidates: BitMap) -> int:
        held = self.entries(ledger_id)
        if not held:
            if candidates:
                self._hold(ledger_id, candidates.copy())
            return len(candidates)
        new = candidates - held
        if not new:
            return 0
        right_of_new = new.shift(1) & held  # first entries of existing ranges that a new entry joins
        left_of_new = new.shift(-1) & held  # last entries of existing ranges that a new entry joins
        new_firsts = firsts(new) - left_of_new.shift(1)
        new_lasts = lasts(new) - right_of_new.shift(-1)
        gained = len(new_firsts) - len(right_of_new)
        record_bytes = (
            gained * range_fixed_bytes(ledger_id)
            + firsts_bytes(new_firsts)
            - firsts_bytes(right_of_new)
            + lasts_bytes(new_lasts)
            - lasts_bytes(left_of_new)
        )
        held |= new
        self._count(len(new), gained, record_bytes)
        return len(new)

    def _drop_below(self, ledger_id: int) -> None:
        below = bisect_left(self._ledger_ids, ledger_id)
        for forgotten in zip(self._ledger_ids[:below], self._bitmaps[:below], strict=True):
            self._drop(*forgotten)
        self._forget_ledgers(below)

    def _drop_up_to(self, last: int) -> None:
        """Remove the entries of the first ledger up to one, inclusive."""
        ledger_id, bitmap = self._ledger_ids[0], self._bitmaps[0]
        first = bitmap.min()
        if last < first:
            return
        if bitmap.contains_range(first, last + 1):
            # A single range, as after every ack of a consumer that acks in order.
            self._count(first - last - 1, -1, -range_bytes(ledger_id, first, last))
        else:
            self._drop(ledger_id, bitmap & BitMap(range(first, last + 1)))
        if last < ENTRY_ID_MAX and last in bitmap and last + 1 in bitmap:
            # The cut split a range: the rest has a new lower end, and the removed part had no upper end there.
            rest_bytes = range_fixed_bytes(ledger_id) + range_first_bytes(last + 1)
            self._count(0, 1, rest_bytes + range_last_bytes(last))
        bitmap.remove_range(first, last + 1)
        if not bitmap:
            self._forget_ledgers(1)


def _check_entry(ledger_id: int, entry_id: int) -> None:
    if not 0 <= index(ledger_id) <= LEDGER_ID_MAX:
        raise ValueError(f"ledger id must be in 0..{LEDGER_ID_MAX}, got {ledger_id}")
    if not 0 <= index(entry_id) <= ENTRY_ID_MAX:
        raise ValueError(f"entry id of ledger {ledger_id} must be in 0..{ENTRY_ID_MAX}, got {entry_id}")
