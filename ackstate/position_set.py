"""A set of positions, dense or sparse, that answers in position order."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.position import Position, positions_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator, Mapping

_ENTRY_ID_END = 2**32

# The memory of a bitmap and of each of its containers beside their entries, with the slot in a dict, and of a set takes
# that is empty: measured as growth of the process on 64-bit Linux (pyroaring 1.2).
_BITMAP_BYTES = 200
_CONTAINER_BYTES = 90
_SET_BYTES = 350
_NOTHING = BitMap()


@final
class PositionSet:
    """A set of positions whose ids are valid, one roaring bitmap a ledger; not safe for concurrent use."""

    __slots__ = ("_bitmaps", "_count")

    def __init__(self) -> None:
        # Invariant: no bitmap is empty; _count is the sum of their lengths.
        self._bitmaps: dict[int, BitMap] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, position: Position) -> bool:
        ledger_id, entry_id = position
        bitmap = self._bitmaps.get(ledger_id)
        return bitmap is not None and entry_id in bitmap

    def __iter__(self) -> Iterator[Position]:
        """Yield the positions in order."""
        return chain.from_iterable(positions_of(each, self._bitmaps[each]) for each in sorted(self._bitmaps))

    def ledger_ids(self) -> list[int]:
        """Return the ledgers of the positions, in order."""
        return sorted(self._bitmaps)

    def at_least(self, first: Position) -> Iterator[Position]:
        """Yield the positions from `first` (included) on, in order."""
        for ledger_id in sorted(each for each in self._bitmaps if each >= first.ledger_id):
            bitmap = self._bitmaps[ledger_id]
            low = first.entry_id if ledger_id == first.ledger_id else 0
            for entry_id in bitmap.iter_equal_or_larger(low):
                yield Position(ledger_id, entry_id)

    def add(self, position: Position) -> None:
        """Put in a position that is not in."""
        ledger_id, entry_id = position
        bitmap = self._bitmaps.get(ledger_id)
        if bitmap is None:
            self._bitmaps[ledger_id] = BitMap((entry_id,))
        else:
            bitmap.add(entry_id)
        self._count += 1

    def include(self, ledger_id: int, entry_id: int) -> bool:
        """Put in a position that may be in; return whether it was not."""
        bitmap = self._bitmaps.get(ledger_id)
        if bitmap is None:
            self._bitmaps[ledger_id] = BitMap((entry_id,))
        else:
            try:
                bitmap.add_checked(entry_id)
            except KeyError:
                return False
        self._count += 1
        return True

    def discard(self, position: Position) -> None:
        """Take a position out, if it is in."""
        ledger_id, entry_id = position
        bitmap = self._bitmaps.get(ledger_id)
        if bitmap is not None and entry_id in bitmap:
            bitmap.remove(entry_id)
            self._count -= 1
            if not bitmap:
                del self._bitmaps[ledger_id]

    def lowest_in(self, ledger_id: int, first: int, end: int) -> Position | None:
        """Return the lowest position of a ledger from one entry (included) to another (excluded); None without one."""
        bitmap = self._bitmaps.get(ledger_id)
        if bitmap is None:
            return None
        # One at or above `first`: as many as are below it come before.
        below = bitmap.rank(first - 1) if first else 0
        if below == len(bitmap) or bitmap[below] >= end:
            return None
        return Position(ledger_id, bitmap[below])

    def highest_in(self, ledger_id: int, first: int, end: int) -> Position | None:
        """Return the highest position of a ledger from one entry (included) to another (excluded); None without one."""
        bitmap = self._bitmaps.get(ledger_id)
        if bitmap is None or end <= 0:
            return None
        below = bitmap.rank(end - 1)
        if not below or bitmap[below - 1] < first:
            return None
        return Position(ledger_id, bitmap[below - 1])

    def entries_of(self, ledger_id: int) -> BitMap | None:
        """Return the entries of a ledger, to be read and not changed; None if there is none."""
        return self._bitmaps.get(ledger_id)

    def has_any(self, entries: Mapping[int, BitMap]) -> bool:
        """Return whether one of some entries, ledger id -> entries, is in."""
        for ledger_id, bitmap in entries.items():
            held = self._bitmaps.get(ledger_id)
            if held is not None and not held.isdisjoint(bitmap):
                return True
        return False

    def update_entries(self, ledger_id: int, entry_ids: array[int] | list[int] | BitMap) -> int:
        """Put in entries of a ledger, and return how many were not in."""
        held = self._bitmaps.get(ledger_id)
        if held is None:
            bitmap = BitMap(entry_ids)  # a copy of a bitmap, which belongs to the caller
            added = len(bitmap)
            if added:
                self._bitmaps[ledger_id] = bitmap
        else:
            added = -len(held)
            held |= entry_ids if isinstance(entry_ids, BitMap) else BitMap(entry_ids)
            added += len(held)
        self._count += added
        return added

    def discard_entries(self, ledger_id: int, entry_ids: BitMap) -> None:
        """Take out entries of a ledger, those that are in."""
        held = self._bitmaps.get(ledger_id)
        if held is not None:
            self._count -= len(held)
            held -= entry_ids
            self._count += len(held)
            if not held:
                del self._bitmaps[ledger_id]

    def take_lowest(self, count: int) -> list[tuple[int, BitMap]]:
        """Take out up to `count` of the lowest positions, and return their entries by ledger, in order."""
        if count >= self._count:
            taken = sorted(self._bitmaps.items())
            self.clear()
            return taken
        taken = []
        for ledger_id in sorted(self._bitmaps):
            if not count:
                break
            bitmap = self._bitmaps[ledger_id]
            size = len(bitmap)
            if size <= count:
                del self._bitmaps[ledger_id]
            else:
                size, rest, end = count, bitmap, bitmap[count]
                bitmap = rest.copy()
                bitmap.remove_range(end, _ENTRY_ID_END)
                rest.remove_range(0, end)
            taken.append((ledger_id, bitmap))
            self._count -= size
            count -= size
        return taken

    def apply(self, discard: Callable[[int, BitMap], None]) -> None:
        """Call a function that removes entries from each ledger's bitmap."""
        for ledger_id, bitmap in list(self._bitmaps.items()):
            self._count -= len(bitmap)
            discard(ledger_id, bitmap)
            self._count += len(bitmap)
            if not bitmap:
                del self._bitmaps[ledger_id]

    def update(self, other: PositionSet) -> None:
        """Put in all positions of another set."""
        for ledger_id, bitmap in other._bitmaps.items():
            self.update_entries(ledger_id, bitmap)

    def update_between(self, other: PositionSet, *, first: Position, end: Position, is_given_up: bool = False) -> None:
        """Put in the positions of another set, which may be given up, from `first` (included) to `end` (excluded)."""
        (first_id, low), (end_id, high) = first, end
        for ledger_id, bitmap in other._bitmaps.items():
            if first_id < ledger_id < end_id:
                if is_given_up and ledger_id not in self._bitmaps:
                    self._bitmaps[ledger_id] = bitmap
                    self._count += len(bitmap)
                else:
                    self.update_entries(ledger_id, bitmap)
            elif first_id <= ledger_id <= end_id:
                part = bitmap.copy()
                if ledger_id == first_id:
                    part.remove_range(0, low)
                if ledger_id == end_id:
                    part.remove_range(high, _ENTRY_ID_END)
                self.update_entries(ledger_id, part)

    def difference_update(self, other: PositionSet) -> None:
        """Take out all positions of another set."""
        for ledger_id, bitmap in other._bitmaps.items():
            self.discard_entries(ledger_id, bitmap)

    def intersection_update(self, other: PositionSet) -> None:
        """Take out all positions that another set does not have."""
        self.apply(lambda ledger_id, bitmap: bitmap.intersection_update(other._bitmaps.get(ledger_id, _NOTHING)))

    def remove_below(self, end: Position) -> None:
        """Take out all positions below `end`."""
        for ledger_id in [ledger_id for ledger_id in self._bitmaps if ledger_id <= end.ledger_id]:
            bitmap = self._bitmaps[ledger_id]
            self._count -= len(bitmap)
            if ledger_id == end.ledger_id:
                bitmap.remove_range(0, end.entry_id)
                self._count += len(bitmap)
            if ledger_id < end.ledger_id or not bitmap:
                del self._bitmaps[ledger_id]

    def clear(self) -> None:
        """Take out everything."""
        self._bitmaps.clear()
        self._count = 0

    def count_between(self, first: Position, end: Position) -> int:
        """Count the positions from `first` (included) to `end` (excluded)."""
        total = 0
        for ledger_id in self._bitmaps if first.ledger_id != end.ledger_id else self._bitmaps.keys() & {end.ledger_id}:
            if first.ledger_id <= ledger_id <= end.ledger_id:
                low = max(first.entry_id, 0) if ledger_id == first.ledger_id else 0
                high = end.entry_id if ledger_id == end.ledger_id else _ENTRY_ID_END
                total += self._bitmaps[ledger_id].range_cardinality(low, high) if low < high else 0
        return total

    @property
    def memory_bytes_max(self) -> int:
        """How much memory the set takes at most, roughly. Complexity: O(1)."""
        return _SET_BYTES + (_BITMAP_BYTES + _CONTAINER_BYTES) * len(self._bitmaps) + _CONTAINER_BYTES * self._count

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(ledgers)."""
        assert all(self._bitmaps.values())
        assert self._count == sum(map(len, self._bitmaps.values()))
