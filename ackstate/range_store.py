"""Stores the individually deleted ranges, and reads them: membership, runs, and ranges as Pulsar reports them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from operator import index
from typing import TYPE_CHECKING, NamedTuple

from pyroaring import BitMap

from ackstate.entry_bitmap import firsts, lasts, run_around
from ackstate.position import ENTRY_ID_MAX, Position
from ackstate.record_size import range_bytes, range_fixed_bytes, ranges_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


NO_ENTRIES = BitMap()
"""The acked entries of a ledger without any; must not be changed."""


class Run(NamedTuple):
    """Entries acked without a gap in one ledger: `first` is inclusive, `end` exclusive."""

    ledger_id: int
    first: int
    end: int


class RangeStore:
    """The storage of `DeletedRanges`: one roaring bitmap per ledger, and the counters over all of them."""

    def __init__(self) -> None:
        # Invariant: ids rise; _bitmaps[i] belongs to _ledger_ids[i] and is not empty. A dict would be faster with
        # thousands of ledgers, but would take six times the memory besides the bitmaps.
        self._ledger_ids = array("q")
        self._bitmaps: list[BitMap] = []
        # Acks come in bursts of one ledger. Invariant: None, or a stored ledger, its bitmap and its fixed bytes.
        self._recent_id: int | None = None
        self._recent = NO_ENTRIES
        self._recent_fixed = 0
        self._entry_count = 0
        self._range_count = 0
        self._record_bytes = 0

    @property
    def range_count(self) -> int:
        """The number of ranges. Complexity: O(1)."""
        return self._range_count

    @property
    def record_bytes(self) -> int:
        """The exact size of the ranges as a protobuf ``MessageRange`` list, in bytes. Complexity: O(1)."""
        return self._record_bytes

    def __len__(self) -> int:
        return self._entry_count

    def __contains__(self, position: object) -> bool:
        if not isinstance(position, tuple):
            return False
        ledger_id, entry_id = position
        return 0 <= entry_id <= ENTRY_ID_MAX and index(entry_id) in self.entries(ledger_id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RangeStore):
            return NotImplemented
        return self._ledger_ids == other._ledger_ids and self._bitmaps == other._bitmaps

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._entry_count} entries in {self._range_count} ranges>"

    def __str__(self) -> str:
        ranges = (f"({ledger}:{first - 1}..{ledger}:{end - 1}]" for ledger, first, end in self.runs())
        return f"[{','.join(ranges)}]"

    def bitmaps(self) -> Iterator[tuple[int, BitMap]]:
        """Yield each ledger, in order, with its bitmap of acked entries, which the caller must not change."""
        return zip(self._ledger_ids, self._bitmaps, strict=True)

    def entries(self, ledger_id: int) -> BitMap:
        """Return one ledger's acked entries, possibly none; the caller must not change them. O(log ledgers)."""
        if ledger_id == self._recent_id:
            return self._recent
        at = bisect_left(self._ledger_ids, ledger_id)
        if at == len(self._ledger_ids) or self._ledger_ids[at] != ledger_id:
            return NO_ENTRIES
        return self._bitmaps[at]

    def runs(self) -> Iterator[Run]:
        """Yield every run, in order of position."""
        for ledger_id, bitmap in self.bitmaps():
            for first, last in zip(firsts(bitmap), lasts(bitmap), strict=True):
                yield Run(ledger_id, first, last + 1)

    def run_containing(self, position: Position) -> Run | None:
        """Return the run that contains a position, or None if it is not acked.

        Complexity: O(log run length) range queries.
        """
        ledger_id, entry_id = position
        bitmap = self.entries(ledger_id)
        if not 0 <= entry_id <= ENTRY_ID_MAX or index(entry_id) not in bitmap:
            return None
        return Run(ledger_id, *run_around(bitmap, entry_id))

    def range_containing(self, position: Position) -> tuple[Position, Position] | None:
        """Return the first and the last position, both inclusive, of the range that contains a position, or None."""
        run = self.run_containing(position)
        return run and (Position(run.ledger_id, run.first), Position(run.ledger_id, run.end - 1))

    def first_range(self) -> tuple[Position, Position] | None:
        """Return the lowest range as ``(lower, upper]``, or None."""
        if not self._ledger_ids:
            return None
        return self._open_closed(Position(self._ledger_ids[0], self._bitmaps[0].min()))

    def last_range(self) -> tuple[Position, Position] | None:
        """Return the highest range as ``(lower, upper]``, or None."""
        if not self._ledger_ids:
            return None
        return self._open_closed(Position(self._ledger_ids[-1], self._bitmaps[-1].max()))

    def span(self) -> tuple[Position, Position] | None:
        """Return the lower end of the first range and the upper end of the last, or None."""
        first, last = self.first_range(), self.last_range()
        return first and last and (first[0], last[1])

    def cardinality(self, first: Position, last: Position) -> int:
        """Return the number of acked entries between two positions, both inclusive.

        Complexity: O(1) for each ledger between.
        """
        if last < first:
            return 0
        low = bisect_left(self._ledger_ids, first[0])
        high = bisect_right(self._ledger_ids, last[0])
        total = 0
        for ledger_id, bitmap in zip(self._ledger_ids[low:high], self._bitmaps[low:high], strict=True):
            start = max(first[1], 0) if ledger_id == first[0] else 0
            end = min(last[1], ENTRY_ID_MAX) + 1 if ledger_id == last[0] else ENTRY_ID_MAX + 1
            total += bitmap.range_cardinality(start, end) if start < end else 0
        return total

    def _open_closed(self, position: Position) -> tuple[Position, Position]:
        run = self.run_containing(position)
        assert run is not None
        return Position(run.ledger_id, run.first - 1), Position(run.ledger_id, run.end - 1)

    def _recall(self, ledger_id: int) -> BitMap:
        """Return a ledger's entries, and cache them unless they are empty."""
        if ledger_id == self._recent_id:
            return self._recent
        bitmap = self.entries(ledger_id)
        if bitmap:
            self._recent_id, self._recent, self._recent_fixed = ledger_id, bitmap, range_fixed_bytes(ledger_id)
        return bitmap

    def _put(self, ledger_id: int, new: BitMap, counts: tuple[int, int, int]) -> None:
        """Add new entries, at least one, that are already counted and join no range."""
        held = self.entries(ledger_id)
        if held:
            held |= new
        else:
            self._hold_counted(ledger_id, new.copy())
        self._count(*counts)

    def _hold(self, ledger_id: int, bitmap: BitMap) -> None:
        """Add a new ledger."""
        self._count(*accounting(ledger_id, bitmap))
        self._hold_counted(ledger_id, bitmap)

    def _hold_counted(self, ledger_id: int, bitmap: BitMap) -> None:
        at = bisect_left(self._ledger_ids, ledger_id)
        self._ledger_ids.insert(at, ledger_id)
        self._bitmaps.insert(at, bitmap)

    def _hold_none_yet(self, ledger_id: int, fixed_bytes: int) -> None:
        """Add a new ledger without entries, given its fixed bytes; the caller adds an entry at once."""
        bitmap = BitMap()
        self._hold_counted(ledger_id, bitmap)
        self._recent_id, self._recent, self._recent_fixed = ledger_id, bitmap, fixed_bytes

    def _forget_ledgers(self, count: int) -> None:
        del self._ledger_ids[:count], self._bitmaps[:count]
        self._recent_id = None

    def _drop(self, ledger_id: int, forgotten: BitMap) -> int:
        entries, ranges, record_bytes = accounting(ledger_id, forgotten)
        self._count(-entries, -ranges, -record_bytes)
        return entries

    def _count(self, entries: int, ranges: int, record_bytes: int) -> None:
        self._entry_count += entries
        self._range_count += ranges
        self._record_bytes += record_bytes

    def _check(self) -> None:
        """Assert that the counters equal a complete recount. Complexity: O(ranges)."""
        assert list(self._ledger_ids) == sorted(set(self._ledger_ids))
        assert len(self._ledger_ids) == len(self._bitmaps)
        assert all(self._bitmaps)
        assert self._recent_id is None or self.entries(self._recent_id) is self._recent
        runs = list(self.runs())
        assert self._entry_count == sum(end - first for _, first, end in runs)
        assert self._range_count == len(runs)
        assert self._record_bytes == sum(range_bytes(ledger, first, end - 1) for ledger, first, end in runs)


def accounting(ledger_id: int, bitmap: BitMap) -> tuple[int, int, int]:
    """Count the entries, the ranges and the record bytes of one ledger from scratch."""
    range_firsts = firsts(bitmap)
    return len(bitmap), len(range_firsts), ranges_bytes(ledger_id, bitmap, range_firsts)
