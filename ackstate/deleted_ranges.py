"""The individually deleted ranges: acked entries above the mark-delete position.

One roaring bitmap per ledger. The number of ranges and the size of their persisted form, for which Pulsar walks over
all ranges, are two counters here. A bulk add updates them by bitmap operations on the new entries and their neighbours.
Entries that are added one by one are only noted: whoever reads a counter adds them in, and a change of another kind
counts them first. A read changes nothing, so that any thread may read while another adds.

Size. A range ``(lower, upper]`` is one element of a protobuf ``repeated MessageRange``: two nested positions, each a
ledger id and an entry id as varints. With ``v(n)`` the length of a varint, one framed element takes ::

    tag, length            2
    2 x (tag, length)      4      lower and upper endpoint
    2 x (tag, ledger id)   2 + 2 v(ledger)
    tag, entry id          1 + v(first - 1)     the lower end is open; -1 takes ten bytes
    tag, entry id          1 + v(last)

and every length prefix is one byte, since no element reaches 128. So the size splits into a part that each range of a
ledger pays, a part that only its first entry decides, and a part that only its last entry decides.

Source: ``MLDataFormats.proto`` of Apache Pulsar, messages ``MessageRange`` and ``NestedPositionInfo``.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from itertools import chain
from operator import index
from typing import TYPE_CHECKING, NamedTuple, final

from pyroaring import BitMap

from ackstate.entry_bitmap import bitmap_of, firsts, lasts, run_around, run_end
from ackstate.errors import corrupt
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position, check_position, positions_of
from ackstate.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ackstate.ledger_map import LedgerMap

_NO_ENTRIES = BitMap()  # of a ledger without any; it is never changed

# As many entries are counted faster one by one.
_FEW_MAX = 8
MINUS_ONE_BYTES = 10
# The length of a varint by the number's count of binary digits, 0 to 64: each ack looks up two of them.
VARINT_BYTES = tuple(max(1, (digits + 6) // 7) for digits in range(65))
# At each of these numbers a varint becomes one byte longer.
_LONGER_FROM = tuple(2**digits for digits in (7, 14, 21, 28))

LEDGER_BLOCK = struct.Struct("<QI")
"""What precedes the portable bitmap of a ledger: its id, and the number of bytes of the bitmap."""
_HEADER = struct.Struct("<4sB3xI")  # magic, version, reserved, blocks
_MAGIC = b"ACKD"
_VERSION = 1


class Run(NamedTuple):
    """Entries acked without a gap in one ledger: `first` is inclusive, `end` exclusive."""

    ledger_id: int
    first: int
    end: int


@final
class DeletedRanges:
    """The individually deleted ranges of a cursor, exact at every moment.

    >>> ranges = DeletedRanges()
    >>> ranges.add(Position(3, 7)), ranges.add_run(3, 9, 12), ranges.add(Position(3, 8))
    (1, 3, 1)
    >>> str(ranges), ranges.range_count, len(ranges)
    ('[(3:6..3:11]]', 1, 5)
    >>> DeletedRanges.from_bytes(ranges.to_bytes()) == DeletedRanges([Run(3, 7, 11), Position(3, 11)])
    True

    Iteration yields the positions in order. Runs never join across ledgers. Entry ids are 0 to 2**32 - 1, ledger ids 0
    to 2**63 - 1; a call with anything else raises `ValueError` or `TypeError` and changes nothing. Not safe for
    concurrent mutation.

    Args:
        acked: A `Position` or a `Run` each, in any order, overlapping or not.

    Attributes:
        range_count: The number of ranges. Complexity: O(entries added one by one since `settle`).
        record_bytes: The exact size of the ranges as a protobuf ``MessageRange`` list, in bytes; as `range_count`.
    """

    __slots__ = (
        "_bitmaps",
        "_entry_count",
        "_ledger_ids",
        "_new",
        "_range_count",
        "_recent",
        "_recent_id",
        "_record_bytes",
    )
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, acked: Iterable[Position | Run] = ()) -> None:
        # Invariant: ids rise; _bitmaps[i] belongs to _ledger_ids[i] and is not empty. A dict would be faster with
        # thousands of ledgers, but would take six times the memory besides the bitmaps.
        self._ledger_ids = array("q")
        self._bitmaps: list[BitMap] = []
        # Acks come in bursts of one ledger. Invariant: None, or a stored ledger and its bitmap.
        self._recent_id: int | None = None
        self._recent = _NO_ENTRIES
        self._new = _NO_ENTRIES  # entries of the recent ledger that the counters lack
        self._entry_count = self._range_count = self._record_bytes = 0
        for each in acked:
            if isinstance(each, Run):
                self.add_run(*each)
            else:
                self.add(check_position(each))

    @classmethod
    def from_bitmaps(cls, bitmaps: Iterable[tuple[int, BitMap]]) -> DeletedRanges:
        """Return the ranges of ledgers, in order and each once, given their acked entries, none or some.

        Ownership of the bitmaps passes to the ranges: the caller must not use them again.

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

    @classmethod
    def from_bytes(cls, data: bytes) -> DeletedRanges:
        """Return the ranges that `to_bytes` wrote.

        Raises:
            CorruptStateError: The bytes are damaged, or something else.
            UnsupportedVersionError: Another version wrote them.
        """
        (count,), reader = unseal(data, _HEADER, _MAGIC, _VERSION, what="ranges")
        bitmaps, reader.offset = decode_blocks(data, reader.offset, reader.end, count, what="ranges")
        reader.finish()
        return cls.from_bitmaps(bitmaps)

    def to_bytes(self) -> bytes:
        """Return the ranges as bytes, each ledger as in a native record, with a checksum. O(bytes held)."""
        header = _HEADER.pack(_MAGIC, _VERSION, len(self._bitmaps))
        return seal(header, *map(encode_block, self._ledger_ids, self._bitmaps))

    @property
    def range_count(self) -> int:
        """How many ranges there are. Complexity: bitmap operations over the entries added since `settle`."""
        return self._range_count + (self._noted()[0] if self._new else 0)

    @property
    def record_bytes(self) -> int:
        """Their size as Pulsar writes them. Complexity: bitmap operations over the entries added since `settle`."""
        return self._record_bytes + (self._noted()[1] if self._new else 0)

    def settle(self) -> DeletedRanges:
        """Count the entries that were added one by one, so that reading the counters is O(1); return this set."""
        new = self._new
        if new:
            assert self._recent_id is not None
            self._new = BitMap()
            self._count(len(new), *self._gained(self._recent_id, self._recent, new))
        return self

    def __len__(self) -> int:
        return self._entry_count + len(self._new)

    def __iter__(self) -> Iterator[Position]:
        return chain.from_iterable(map(positions_of, self._ledger_ids, self._bitmaps))

    def __contains__(self, position: object) -> bool:
        if not isinstance(position, tuple):
            return False
        ledger_id, entry_id = position
        return 0 <= entry_id <= ENTRY_ID_MAX and index(entry_id) in self.entries(ledger_id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeletedRanges):
            return NotImplemented
        return self._ledger_ids == other._ledger_ids and self._bitmaps == other._bitmaps

    def __repr__(self) -> str:
        return f"<DeletedRanges of {len(self)} entries in {self.range_count} ranges>"

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
            return _NO_ENTRIES
        return self._bitmaps[at]

    def runs(self) -> Iterator[Run]:
        """Yield every run, in order of position."""
        for ledger_id, bitmap in self.bitmaps():
            for first, last in zip(firsts(bitmap), lasts(bitmap), strict=True):
                yield Run(ledger_id, first, last + 1)

    def run_containing(self, position: Position) -> Run | None:
        """Return the run that contains a position, or None if it is not acked. O(log run length) range queries."""
        ledger_id, entry_id = position
        bitmap = self.entries(ledger_id)
        if not 0 <= entry_id <= ENTRY_ID_MAX or index(entry_id) not in bitmap:
            return None
        return Run(ledger_id, *run_around(bitmap, entry_id))

    def reach(self, position: Position, ledgers: LedgerMap) -> Position:
        """Return the last entry of those acked without a gap after a position, across the ends of ledgers."""
        while self._ledger_ids and (run := self.run_containing(ledgers.next_valid(position))) is not None:
            position = Position(run.ledger_id, run.end - 1)
        return position

    def range_containing(self, position: Position) -> tuple[Position, Position] | None:
        """Return the first and the last position, both inclusive, of the range that contains a position, or None."""
        run = self.run_containing(position)
        return run and (Position(run.ledger_id, run.first), Position(run.ledger_id, run.end - 1))

    def first_range(self) -> tuple[Position, Position] | None:
        """Return the lowest range as ``(lower, upper]``, or None."""
        if not self._ledger_ids:
            return None
        ledger_id, first = self._ledger_ids[0], self._bitmaps[0].min()
        return Position(ledger_id, first - 1), Position(ledger_id, run_end(self._bitmaps[0], first) - 1)

    def last_range(self) -> tuple[Position, Position] | None:
        """Return the highest range as ``(lower, upper]``, or None."""
        if not self._ledger_ids:
            return None
        ledger_id, last = self._ledger_ids[-1], self._bitmaps[-1].max()
        return Position(ledger_id, run_around(self._bitmaps[-1], last)[0] - 1), Position(ledger_id, last)

    def span(self) -> tuple[Position, Position] | None:
        """Return the lower end of the first range and the upper end of the last, or None."""
        if not self._ledger_ids:
            return None
        first, last = self._bitmaps[0].min(), self._bitmaps[-1].max()
        return Position(self._ledger_ids[0], first - 1), Position(self._ledger_ids[-1], last)

    def cardinality(self, first: Position, last: Position) -> int:
        """Return the number of acked entries between two positions, both inclusive. O(1) for each ledger between."""
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
            self._turn_to(ledger_id)
        # As `add_valid`, without a call.
        bitmap = self._recent
        if entry_id in bitmap:
            return 0
        bitmap.add(entry_id)
        self._new.add(entry_id)
        return 1

    def add_valid(self, ledger_id: int, entry_id: int) -> int:
        """Ack one entry as `add`, given plain integers within their bounds: they are not checked again."""
        if ledger_id != self._recent_id:
            self._turn_to(ledger_id)
        bitmap = self._recent
        if entry_id in bitmap:
            return 0
        bitmap.add(entry_id)
        self._new.add(entry_id)
        return 1

    def add_missing(self, ledger_id: int, new: BitMap) -> None:
        """Ack entries of a ledger, at least one and none of them acked; counted as those of `add_valid`."""
        if ledger_id != self._recent_id:
            self._turn_to(ledger_id)
        self._recent |= new
        self._new |= new

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
        """Ack many entries of one ledger, in any order, repeated or not, and return the number of new ones.

        A `BitMap` and an ``array('I')`` are fastest: bitmap operations over the new entries and their neighbours.

        Raises:
            ValueError: An id is out of range.
            TypeError: Something is not an integer.
        """
        _check_entry(ledger_id, 0)
        return self._add_bitmap(ledger_id, bitmap_of(entry_ids))

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
        """Remove all entries of `other` and return the number of removed ones."""
        if self._new:
            self.settle()
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
        for ledger_id, bitmap in list(self.bitmaps()):
            if bitmap.max() >= (entry_count := ledgers.entry_count(ledger_id)):
                gone = bitmap.copy()
                gone.remove_range(0, entry_count)
                self.difference_update(DeletedRanges.from_bitmaps([(ledger_id, gone)]))

    def remove_at_most(self, position: Position) -> int:
        """Remove every entry at or below a position and return their number; entry -1 removes only the ledgers below.

        Raises:
            ValueError: An id is out of range.
            TypeError: An id is not an integer.

        Complexity: bitmap operations over the removed entries.
        """
        ledger_id, entry_id = check_position(position)
        if self._new:
            self.settle()
        held_before = self._entry_count
        if self._ledger_ids and self._ledger_ids[0] < ledger_id:
            below = bisect_left(self._ledger_ids, ledger_id)
            for forgotten in zip(self._ledger_ids[:below], self._bitmaps[:below], strict=True):
                self._drop(*forgotten)
            self._forget_ledgers(below)
        if self._ledger_ids and self._ledger_ids[0] == ledger_id and entry_id >= 0:
            self._drop_up_to(entry_id)
        return held_before - self._entry_count

    def remove_lowest(self, ledger_id: int, first: int) -> int:
        """Remove the lowest run if it starts at an entry, below which none is acked; return its end, else `first`."""
        bitmap = self.entries(ledger_id)
        if first > ENTRY_ID_MAX or first not in bitmap:
            return first
        if self._new:
            self.settle()
        end = run_end(bitmap, first)
        bitmap.remove_range(first, end)
        self._count(first - end, -1, -range_bytes(ledger_id, first, end - 1))
        if not bitmap:
            self._forget_ledgers(1)
        return end

    def take_at_most(self, position: Position) -> DeletedRanges:
        """Remove every entry at or below a position and return them as a separate set; as `remove_at_most`."""
        ledger_id, entry_id = check_position(position)
        below = bisect_left(self._ledger_ids, ledger_id)
        part = self.entries(ledger_id) & BitMap(range(entry_id + 1)) if entry_id >= 0 else _NO_ENTRIES
        whole = zip(self._ledger_ids[:below], self._bitmaps[:below], strict=True)
        taken = DeletedRanges.from_bitmaps([*whole, (ledger_id, part)])
        self.remove_at_most(position)
        return taken

    def copy(self) -> DeletedRanges:
        """Return an independent copy. Complexity: O(bytes held)."""
        twin = DeletedRanges()
        twin._ledger_ids = self._ledger_ids[:]
        twin._bitmaps = [bitmap.copy() for bitmap in self._bitmaps]
        twin._count(len(self), self.range_count, self.record_bytes)
        return twin

    def _turn_to(self, ledger_id: int) -> None:
        """Make a ledger the recent one, and add it if it is missing: an entry of it is about to be added."""
        if self._new:
            self.settle()
        bitmap = self.entries(ledger_id)
        if not bitmap:
            bitmap = BitMap()
            self._insert(ledger_id, bitmap)
        self._recent_id, self._recent, self._new = ledger_id, bitmap, BitMap()

    def _add_bitmap(self, ledger_id: int, candidates: BitMap) -> int:
        if self._new:
            self.settle()
        held = self.entries(ledger_id)
        if not held:
            if candidates:
                self._hold(ledger_id, candidates.copy())
            return len(candidates)
        new = candidates - held
        if new:
            held |= new
            self._count(len(new), *self._gained(ledger_id, held, new))
        return len(new)

    def _hold(self, ledger_id: int, bitmap: BitMap) -> None:
        """Add a new ledger."""
        self._count(*_accounting(ledger_id, bitmap))
        self._insert(ledger_id, bitmap)

    def _insert(self, ledger_id: int, bitmap: BitMap) -> None:
        at = bisect_left(self._ledger_ids, ledger_id)
        self._ledger_ids.insert(at, ledger_id)
        self._bitmaps.insert(at, bitmap)

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
            self._count(0, 1, rest_bytes + varint_bytes(last))
        bitmap.remove_range(first, last + 1)
        if not bitmap:
            self._forget_ledgers(1)

    def _forget_ledgers(self, count: int) -> None:
        del self._ledger_ids[:count], self._bitmaps[:count]
        self._recent_id = None

    def _drop(self, ledger_id: int, forgotten: BitMap) -> int:
        entries, ranges, record_bytes = _accounting(ledger_id, forgotten)
        self._count(-entries, -ranges, -record_bytes)
        return entries

    def _count(self, entries: int, ranges: int, record_bytes: int) -> None:
        self._entry_count += entries
        self._range_count += ranges
        self._record_bytes += record_bytes

    def _noted(self) -> tuple[int, int]:
        """Return how many ranges and record bytes the counters lack."""
        # Of a copy: if another thread reads, its owner may add to the entries meanwhile, or count them.
        ledger_id, held, new = self._recent_id, self._recent, self._new.copy()
        return (0, 0) if ledger_id is None else self._gained(ledger_id, held, new)

    @staticmethod
    def _gained(ledger_id: int, held: BitMap, new: BitMap) -> tuple[int, int]:
        """Return how many ranges and record bytes a ledger has more than without some of its entries."""
        fixed, ranges, record_bytes = range_fixed_bytes(ledger_id), 0, 0
        if len(new) <= _FEW_MAX:
            for entry_id in new:
                # As if they were added in order: those below are there, those above are not yet.
                ends_before = entry_id > 0 and entry_id - 1 in held
                begins_after = entry_id < ENTRY_ID_MAX and entry_id + 1 in held and entry_id + 1 not in new
                # `low` is the size of a lower end here and of an upper end one entry below; `high` likewise above.
                low = VARINT_BYTES[(entry_id - 1).bit_length()] if entry_id else MINUS_ONE_BYTES
                high = VARINT_BYTES[entry_id.bit_length()]
                if ends_before is not begins_after:
                    record_bytes += high - low if ends_before else low - high
                else:
                    ranges += -1 if ends_before else 1
                    record_bytes += -(fixed + low + high) if ends_before else fixed + low + high
            return ranges, record_bytes
        right_of_new = (new.shift(1) & held) - new  # first entries of other ranges that a new entry joins
        left_of_new = (new.shift(-1) & held) - new  # last entries of other ranges that a new entry joins
        new_firsts = firsts(new) - left_of_new.shift(1)
        new_lasts = lasts(new) - right_of_new.shift(-1)
        ranges = len(new_firsts) - len(right_of_new)
        record_bytes = firsts_bytes(new_firsts) - firsts_bytes(right_of_new) + lasts_bytes(new_lasts)
        return ranges, ranges * fixed + record_bytes - lasts_bytes(left_of_new)

    def _check(self) -> None:
        """Assert that the counters equal a complete recount. Complexity: O(ranges)."""
        assert list(self._ledger_ids) == sorted(set(self._ledger_ids))
        assert len(self._ledger_ids) == len(self._bitmaps)
        assert all(self._bitmaps)
        assert self._recent_id is None or self._bitmaps[self._ledger_ids.index(self._recent_id)] is self._recent
        assert not self._new or (self._recent_id is not None and self._new <= self._recent)
        runs = list(self.runs())
        assert len(self) == sum(end - first for _, first, end in runs)
        assert self.range_count == len(runs)
        assert self.record_bytes == sum(range_bytes(ledger, first, end - 1) for ledger, first, end in runs)


def _check_entry(ledger_id: int, entry_id: int) -> None:
    if not 0 <= index(ledger_id) <= LEDGER_ID_MAX:
        raise ValueError(f"ledger id must be in 0..{LEDGER_ID_MAX}, got {ledger_id}")
    if not 0 <= index(entry_id) <= ENTRY_ID_MAX:
        raise ValueError(f"entry id of ledger {ledger_id} must be in 0..{ENTRY_ID_MAX}, got {entry_id}")


def _accounting(ledger_id: int, bitmap: BitMap) -> tuple[int, int, int]:
    """Count the entries, the ranges and the record bytes of one ledger from scratch."""
    range_firsts = firsts(bitmap)
    return len(bitmap), len(range_firsts), ranges_bytes(ledger_id, bitmap, range_firsts)


def encode_block(ledger_id: int, bitmap: BitMap) -> bytes:
    """Encode the ledger block of a bitmap, which is not changed."""
    compact = bitmap.copy()
    compact.run_optimize()
    portable = compact.serialize()
    return LEDGER_BLOCK.pack(ledger_id, len(portable)) + portable


def decode_blocks(
    data: bytes, offset: int, end: int, count: int, *, what: str = "native record"
) -> tuple[list[tuple[int, BitMap]], int]:
    """Decode ledger blocks and return them with the offset after the last one."""
    bitmaps = []
    previous = -1
    for _ in range(count):
        if (left := end - offset) < LEDGER_BLOCK.size:
            corrupt(what, offset, f"{LEDGER_BLOCK.size} bytes of ledger header", f"{left} bytes")
        ledger_id, size = LEDGER_BLOCK.unpack_from(data, offset)
        if not previous < ledger_id <= LEDGER_ID_MAX:
            corrupt(what, offset, f"a ledger id above {previous}", ledger_id)
        previous = ledger_id
        offset += LEDGER_BLOCK.size
        if (left := end - offset) < size:
            corrupt(what, offset, f"{size} bytes of bitmap", f"{left} bytes")
        bitmaps.append((ledger_id, decode_bitmap(data[offset : offset + size], offset, what=what)))
        offset += size
    return bitmaps, offset


def decode_bitmap(portable: bytes, offset: int, *, what: str = "native record") -> BitMap:
    """Decode the bitmap of a ledger block, which starts at an offset in its record."""
    try:
        bitmap = BitMap.deserialize(portable)
    except (ValueError, IndexError) as error:
        corrupt(what, offset, "a roaring bitmap", str(error))
    # The bitmap library silently ignores bytes after the bitmap.
    if not bitmap or len(bitmap.serialize()) != len(portable):
        corrupt(what, offset, "a non-empty roaring bitmap and nothing after it", f"{len(portable)} bytes")
    return bitmap


def varint_bytes(number: int) -> int:
    """Return the length of a non-negative number as a protobuf varint, in bytes."""
    return VARINT_BYTES[number.bit_length()]


def range_fixed_bytes(ledger_id: int) -> int:
    """Return the size of any range of this ledger, without its two entry ids."""
    return 10 + 2 * VARINT_BYTES[ledger_id.bit_length()]


def range_first_bytes(first: int) -> int:
    """Return the size of a range's lower end, given its first acked entry."""
    return VARINT_BYTES[(first - 1).bit_length()] if first else MINUS_ONE_BYTES


def range_bytes(ledger_id: int, first: int, last: int) -> int:
    """Return the size of one range, from its first to its last acked entry, both inclusive."""
    # The parts above, written out: each dispatch asks for this, and two more calls would show.
    lower = VARINT_BYTES[(first - 1).bit_length()] if first else MINUS_ONE_BYTES
    return 10 + 2 * VARINT_BYTES[ledger_id.bit_length()] + lower + VARINT_BYTES[last.bit_length()]


def isolated_range_bytes(ledger_id: int, entry_id: int) -> int:
    """Return the most that acking one entry can add to the ranges' size: a separate range."""
    # Joining an existing range costs less: it changes one end of it, by at most nine bytes.
    return range_bytes(ledger_id, entry_id, entry_id)


def isolated_ranges_bytes(positions: Sequence[tuple[int, int]]) -> list[int]:
    """Return `isolated_range_bytes` of each of some valid positions, at least one, in rising order."""
    # If the first and the last are of one ledger and take the same, all between them do.
    first, last = positions[0], positions[-1]
    lowest = isolated_range_bytes(*first)
    if first is last or (first[0] == last[0] and lowest == isolated_range_bytes(*last)):
        return [lowest] * len(positions)
    sizes: list[int] = []
    recent_id, fixed = -1, 0
    for ledger_id, entry_id in positions:
        if ledger_id != recent_id:
            recent_id, fixed = ledger_id, range_fixed_bytes(ledger_id)
        lower = VARINT_BYTES[(entry_id - 1).bit_length()] if entry_id else MINUS_ONE_BYTES
        sizes.append(fixed + lower + VARINT_BYTES[entry_id.bit_length()])
    return sizes


def firsts_bytes(firsts: BitMap) -> int:
    """Sum `range_first_bytes` over a bitmap of first entries."""
    return _varints_bytes(firsts, 1) + (MINUS_ONE_BYTES - 1) * (0 in firsts)


def lasts_bytes(lasts: BitMap) -> int:
    """Sum `varint_bytes` over a bitmap of last entries. Complexity: as `firsts_bytes`."""
    return _varints_bytes(lasts, 0)


def _varints_bytes(entry_ids: BitMap, less: int) -> int:
    """Return the size of the varints of all entry ids minus a number; -1 counts as one byte."""
    total = count = len(entry_ids)
    if not count:
        return 0
    lowest, highest = entry_ids.min(), entry_ids.max()
    for longer in _LONGER_FROM:
        begin = longer + less
        if begin > highest:
            break
        total += count if begin <= lowest else entry_ids.range_cardinality(begin, ENTRY_ID_MAX + 1)
    return total


def ranges_bytes(ledger_id: int, bitmap: BitMap, firsts: BitMap) -> int:
    """Return the size of all ranges of a ledger, given its acked entries and the first entry of each run."""
    if not firsts:
        return 0
    lowest, entry_bytes = bitmap.min(), VARINT_BYTES[bitmap.max().bit_length()]
    if lowest and VARINT_BYTES[(lowest - 1).bit_length()] == entry_bytes:
        return len(firsts) * (range_fixed_bytes(ledger_id) + 2 * entry_bytes)
    # At or above any entry, the runs that end are as many as those that begin, plus one if a run spans it.
    passing = sum(longer - 1 in bitmap and longer in bitmap for longer in _LONGER_FROM)
    return len(firsts) * range_fixed_bytes(ledger_id) + firsts_bytes(firsts) + lasts_bytes(firsts) + passing
