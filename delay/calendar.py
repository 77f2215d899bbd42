"""A priority queue of times and positions in eight bytes a message, the earliest first."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from itertools import groupby, pairwise
from sys import getsizeof
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ackstate.delay.calendar_keys import (
    ERA_BITS,
    LEAF_MASK,
    PAGE_MASK,
    PLACE_MASK,
    POSITION_BITS,
    TIME_BITS,
    TIME_MASK,
    Due,
    EraKeys,
    era_of,
    first_of_each,
    places_of,
    times_of,
)
from ackstate.delay.entry_pages import ENTRY_BITS, ENTRY_MASK, PAGE_BITS, EntryPages
from ackstate.position import Position

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ackstate.delay.position_set import PositionSet

_LEAF_COUNT_MAX = 32_768
_FRONT_COUNT_MAX = 1_024
_FRONT_COUNT = 512
# How many messages are gathered before they go into the leaves, at least, and for each leaf: none is to be touched for
# one or two.
_FRESH_COUNT = 4_096
_FRESH_COUNT_PER_LEAF = 64
_BULK_COUNT_PER_LEAF = 8
# What a leaf takes beside its array (its bound, two list slots): measured.
_LEAF_BYTES = 60
_FRONT_KEY_BYTES = 48
_NEVER_MS = 1 << 63
_SWEEP_COUNT_MIN = 1_024
_BULK_COUNT_MIN = 64  # Fewer are put into a bitmap or a leaf faster one by one.


class _Fresh(NamedTuple):
    """Messages as they were added: columns of one length."""

    due_ms: array[int]
    ledger_ids: array[int]
    entry_ids: array[int]


@final
class Calendar:
    """A priority queue of messages by due time, with no object per message; not safe for concurrent use.

    Leaves cover the time to come, each an unsorted array of at most 32,768 keys that is divided when it is full. Only
    the front, some hundred keys, is sorted. What is added one by one is gathered first, up to some thousand, and then
    goes into the leaves together. So what a call does is bounded, however many messages wait. A message may be in it
    more than once.

    >>> calendar = Calendar()
    >>> calendar.add(Position(3, 7), 1_500)
    >>> calendar.first_due_ms, len(calendar.take_until(1_499))
    (1500, 0)
    >>> calendar.take_until(1_500).entry_ids.tolist()
    [7]
    """

    __slots__ = (
        "_count", "_fresh", "_fresh_count_max", "_fresh_first_ms", "_front", "_leaves", "_lows", "_pages",
        "_sweep_at_count",
    )  # fmt: skip

    def __init__(self) -> None:
        # What was added one by one since the last flush, and the earliest time of that.
        self._fresh = _Fresh(array("q"), array("q"), array("q"))
        self._fresh_first_ms = _NEVER_MS
        self._fresh_count_max = _FRESH_COUNT
        # Invariants: _front is sorted, not empty unless all leaves are, and below _lows[0]. _lows is sorted; _leaves[i]
        # has the low bits of keys of the era of _lows[i], from that up to _lows[i + 1], and is not empty.
        self._front: list[int] = []
        self._lows: list[int] = []
        self._leaves: list[array[int]] = []
        self._count = 0  # without what is fresh
        self._pages = EntryPages()
        self._sweep_at_count = _SWEEP_COUNT_MIN

    def __len__(self) -> int:
        """Return how many messages are in, those that are in twice counted twice. Complexity: O(1)."""
        return self._count + len(self._fresh.due_ms)

    @property
    def first_due_ms(self) -> int | None:
        """When the next message is due, or None. Complexity: O(1)."""
        first_ms = self._front[0] >> POSITION_BITS if self._front else _NEVER_MS
        first_ms = min(first_ms, self._fresh_first_ms)
        return None if first_ms == _NEVER_MS else first_ms

    @property
    def memory_bytes(self) -> int:
        """About how much memory it takes. Complexity: O(leaves), some hundreds at 10 million messages."""
        leaves = sum(map(getsizeof, self._leaves)) + _LEAF_BYTES * len(self._leaves)
        fresh = sum(map(getsizeof, self._fresh))
        return leaves + fresh + self._pages.memory_bytes + _FRONT_KEY_BYTES * len(self._front)

    def add(self, position: Position, due_ms: int) -> None:
        """Put in a message; neither its ids nor the time are checked.

        Complexity: O(1); each 4,096th call O(leaves).
        """
        ledger_id, entry_id = position
        times, ledger_ids, entry_ids = self._fresh
        times.append(due_ms)
        ledger_ids.append(ledger_id)
        entry_ids.append(entry_id)
        if due_ms < self._fresh_first_ms:  # noqa: PLR1730 - faster than `min`
            self._fresh_first_ms = due_ms
        if len(times) >= self._fresh_count_max:
            self._flush()

    def add_many(self, ledger_id: int, entry_ids: NDArray[np.int64], due_ms: NDArray[np.int64]) -> None:
        """Put in messages of one ledger, not checked either.

        Complexity: O(messages log messages), and O(1) for each leaf that one falls into.
        """
        self.add_all(due_ms, np.full(len(entry_ids), ledger_id), entry_ids)

    def add_all(self, due_ms: NDArray[np.int64], ledger_ids: NDArray[np.int64], entry_ids: NDArray[np.int64]) -> None:
        """Put in messages of any ledgers, three arrays as in `Due` but in any order; complexity as for `add_many`."""
        if not len(due_ms):
            return
        if len(due_ms) >= max(_BULK_COUNT_MIN, _BULK_COUNT_PER_LEAF * len(self._leaves)):
            self._free_unused_pages()
            self._put_many(due_ms, ledger_ids, entry_ids)
            return
        for gathered, column in zip(self._fresh, (due_ms, ledger_ids, entry_ids), strict=True):
            gathered.frombytes(column.astype(np.int64, copy=False).tobytes())
        self._fresh_first_ms = min(self._fresh_first_ms, int(due_ms.min()))
        if len(self._fresh.due_ms) >= self._fresh_count_max:
            self._flush()

    def take_until(self, now_ms: int, max_count: int | None = None) -> Due:
        """Remove and return the messages that are due at a time or before, the first of them, in order.

        Args:
            now_ms: The time; any integer.
            max_count: The most messages to return; None for all.

        Complexity: O(n log n) for n messages returned, and O(1) for each that is due at the time of the last.
        """
        due = self._in_order(self._take(now_ms, len(self) + 1 if max_count is None else max_count))
        self._forget_pages_if_empty()
        if max_count is None or len(due) <= max_count:
            return due
        # Pages are numbered as they come: only among all that are due at one time can the first be told.
        for due_ms, *position in zip(*(column[max_count:].tolist() for column in due), strict=True):
            self.add(Position(*position), due_ms)
        return Due(*(column[:max_count] for column in due))

    def take_into(self, positions: PositionSet, now_ms: int) -> None:
        """Remove the messages that are due at a time or before, and put their positions into a set.

        Complexity: O(n log n) for n messages, and O(1) for each page of a ledger.
        """
        for chunk in self._take(now_ms, len(self) + 1):
            if isinstance(chunk, list) and len(chunk) < _BULK_COUNT_MIN:
                for key in chunk:
                    positions.include(*self._pages.position(key & PLACE_MASK))
                continue
            places = np.sort(places_of(chunk))
            pages = places >> ENTRY_BITS
            starts = [0, *(np.flatnonzero(np.diff(pages)) + 1).tolist(), len(places)]
            for first, end in pairwise(starts):
                ledger_id, first_id = self._pages.position(int(pages[first]) << ENTRY_BITS)
                entry_ids = places[first:end] & ENTRY_MASK | first_id
                positions.update_entries(ledger_id, array("I", entry_ids.astype(np.uint32).tobytes()))
        self._forget_pages_if_empty()

    def keep_only(self, positions: PositionSet) -> None:
        """Remove the messages that are not in a set, once they are more than those that may be.

        Complexity: O(1), and O(messages log messages) each time that half of them are to go.
        """
        if len(self) <= 2 * len(positions) + _FRESH_COUNT:
            return
        everything = self.take_until(_NEVER_MS - 1)
        for ledger_id in np.unique(everything.ledger_ids).tolist():
            kept = positions.entries_of(ledger_id)
            if kept is None:
                continue
            is_of_it = everything.ledger_ids == ledger_id
            # In order of time: of one that is in twice the first counts.
            self.add_many(ledger_id, *first_of_each(everything.entry_ids[is_of_it], everything.due_ms[is_of_it], kept))

    def clear(self) -> None:
        """Remove everything."""
        Calendar.__init__(self)

    def _take(self, now_ms: int, wanted: int) -> list[list[int] | EraKeys]:
        """Remove due messages, at least `wanted` if there are, with all that are due at the time of the last."""
        if self._fresh_first_ms <= now_ms:
            self._flush()
        end = (now_ms + 1) << POSITION_BITS
        chunks: list[list[int] | EraKeys] = []
        taken = 0
        while self._front and wanted > 0:
            at = bisect_left(self._front, end)
            if taken < wanted <= taken + at:
                end = (self._front[wanted - taken - 1] >> POSITION_BITS) + 1 << POSITION_BITS
                at = bisect_left(self._front, end)
            if not at:
                break
            chunks.append(self._front[:at])
            del self._front[:at]
            self._count -= at
            taken += at
            if not self._front:
                chunks += self._refill(end if wanted > taken + self._count else 0)
        return chunks

    def _refill(self, end: int) -> list[EraKeys]:
        """Make the next leaf the front; those that lie below `end` as a whole are removed and returned instead."""
        chunks = []
        while self._leaves:
            era = self._lows.pop(0) >> ERA_BITS
            keys = np.sort(np.frombuffer(self._leaves.pop(0), dtype=np.uint64))
            if (era << ERA_BITS | int(keys[-1])) >= end:
                self._front = [era << ERA_BITS | key for key in keys[:_FRONT_COUNT].tolist()]
                self._insert_leaves(0, era, keys[_FRONT_COUNT:], size=_FRONT_COUNT)
                break
            chunks.append(EraKeys(era, keys))
            self._count -= len(keys)
        return chunks

    def _in_order(self, chunks: list[list[int] | EraKeys]) -> Due:
        if not chunks:
            return Due(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
        times, places = np.concatenate([*map(times_of, chunks)]), np.concatenate([*map(places_of, chunks)])
        ledger_ids, entry_ids = self._pages.positions(places)
        order = np.lexsort((entry_ids, ledger_ids, times))
        return Due(times[order], ledger_ids[order], entry_ids[order])

    def _flush(self) -> None:
        """Put into the front and the leaves what is fresh."""
        self._free_unused_pages()
        fresh, self._fresh, self._fresh_first_ms = self._fresh, _Fresh(array("q"), array("q"), array("q")), _NEVER_MS
        if len(fresh.due_ms) >= _BULK_COUNT_MIN:
            self._put_many(*(np.frombuffer(column, dtype=np.int64) for column in fresh))
            self._fresh_count_max = max(_FRESH_COUNT, _FRESH_COUNT_PER_LEAF * len(self._leaves))
            return
        for due_ms, ledger_id, entry_id in zip(*fresh, strict=True):
            page = self._pages.number(ledger_id, entry_id >> ENTRY_BITS)
            self._put((due_ms << PAGE_BITS | page) << ENTRY_BITS | entry_id & ENTRY_MASK)

    def _put(self, key: int) -> None:
        self._count += 1
        at = bisect_right(self._lows, key) - 1
        if at < 0:
            insort(self._front, key)
            if len(self._front) > _FRONT_COUNT_MAX:
                self._cut_front()
            return
        if self._lows[at] >> ERA_BITS != key >> ERA_BITS:
            at = self._begin_era(at + 1, key >> ERA_BITS)
        self._leaves[at].append(key & LEAF_MASK)
        if len(self._leaves[at]) > _LEAF_COUNT_MAX:
            self._divide(at)

    def _put_many(self, due_ms: NDArray[np.int64], ledger_ids: NDArray[np.int64], entry_ids: NDArray[np.int64]) -> None:
        eras = due_ms >> TIME_BITS
        times = (due_ms & TIME_MASK).astype(np.uint64) << np.uint64(POSITION_BITS)
        keys = times | self._pages.places(ledger_ids, entry_ids).astype(np.uint64)
        if eras.min() == eras.max():
            self._put_sorted(int(eras[0]), np.sort(keys))
            return
        order = np.lexsort((keys, eras))
        eras, keys = eras[order], keys[order]
        starts = [0, *(np.flatnonzero(np.diff(eras)) + 1).tolist(), len(keys)]
        for first, end in pairwise(starts):
            era = int(eras[first])
            if end - first >= _BULK_COUNT_MIN:
                self._put_sorted(era, keys[first:end])
                continue
            for key in keys[first:end].tolist():
                self._put(era << ERA_BITS | key)

    def _put_sorted(self, era: int, keys: NDArray[np.uint64]) -> None:
        """Put in keys of one era, which are sorted."""
        self._count += len(keys)
        first_leaf_era = self._lows[0] >> ERA_BITS if self._lows else era + 1
        in_front = len(keys) if first_leaf_era > era else 0
        if first_leaf_era == era:
            in_front = int(np.searchsorted(keys, np.uint64(self._lows[0] & LEAF_MASK)))
        self._put_in_front(era, keys[:in_front])
        while in_front < len(keys):
            keys = keys[in_front:]
            at = bisect_right(self._lows, era << ERA_BITS | int(keys[0])) - 1
            if self._lows[at] >> ERA_BITS != era:
                at = self._begin_era(at + 1, era)
            in_front = len(keys)
            if at + 1 < len(self._lows) and self._lows[at + 1] >> ERA_BITS == era:
                in_front = int(np.searchsorted(keys, np.uint64(self._lows[at + 1] & LEAF_MASK)))
            self._leaves[at].frombytes(keys[:in_front].tobytes())
            if len(self._leaves[at]) > _LEAF_COUNT_MAX:
                self._divide(at)

    def _put_in_front(self, era: int, keys: NDArray[np.uint64]) -> None:
        """Put sorted keys of one era into the front: of many, the first; and what is then above it into leaves."""
        self._front += [era << ERA_BITS | key for key in keys[:_FRONT_COUNT].tolist()]
        self._front.sort()
        if len(keys) > _FRONT_COUNT:
            at = bisect_right(self._front, era << ERA_BITS | int(keys[_FRONT_COUNT]))
            above = self._front[at:]
            del self._front[at:]
            self._insert_leaves(0, era, keys[_FRONT_COUNT:], size=_LEAF_COUNT_MAX // 2)
            self._count -= len(above)
            for each_era, keys_above in groupby(above, key=era_of):
                self._put_sorted(each_era, np.array([key & LEAF_MASK for key in keys_above], dtype=np.uint64))
        elif len(self._front) > _FRONT_COUNT_MAX:
            self._cut_front()

    def _cut_front(self) -> None:
        """Make leaves of the later part of the front, one for each era."""
        later = self._front[_FRONT_COUNT:]
        del self._front[_FRONT_COUNT:]
        at = 0
        for era, keys in groupby(later, key=era_of):
            low_bits = np.array([key & LEAF_MASK for key in keys], dtype=np.uint64)
            at += self._insert_leaves(at, era, low_bits, size=_FRONT_COUNT_MAX)

    def _divide(self, at: int) -> None:
        """Make two leaves of one, or more after many were put in."""
        keys = np.sort(np.frombuffer(self._leaves.pop(at), dtype=np.uint64))
        self._insert_leaves(at, self._lows.pop(at) >> ERA_BITS, keys, size=_LEAF_COUNT_MAX // 2)

    def _begin_era(self, at: int, era: int) -> int:
        """Put in an empty leaf, to be filled at once, and return where."""
        self._lows.insert(at, era << ERA_BITS)
        self._leaves.insert(at, array("Q"))
        return at

    def _insert_leaves(self, at: int, era: int, keys: NDArray[np.uint64], *, size: int) -> int:
        """Put in sorted keys of one era as leaves of at most `size` keys, and return how many leaves."""
        pieces = [keys[first : first + size] for first in range(0, len(keys), size)]
        self._lows[at:at] = [era << ERA_BITS | int(piece[0]) for piece in pieces]
        self._leaves[at:at] = [array("Q", piece.tobytes()) for piece in pieces]
        return len(pieces)

    def _free_unused_pages(self) -> None:
        """Free the pages that no key is on. Complexity: O(messages), whenever there are twice the pages."""
        if len(self._pages) < self._sweep_at_count:
            return
        used = {key >> ENTRY_BITS & PAGE_MASK for key in self._front}
        for leaf in self._leaves:
            pages = np.frombuffer(leaf, dtype=np.uint64) >> np.uint64(ENTRY_BITS) & np.uint64(PAGE_MASK)
            used.update(np.unique(pages).tolist())
        self._pages.keep_only(used)
        self._sweep_at_count = max(_SWEEP_COUNT_MIN, 2 * len(self._pages))

    def _forget_pages_if_empty(self) -> None:
        if not len(self):
            self.clear()

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(messages)."""
        assert self._front == sorted(self._front)
        assert bool(self._front) == bool(self._count)
        assert len(self._fresh.due_ms) < self._fresh_count_max
        assert self._fresh_first_ms == min(self._fresh.due_ms, default=_NEVER_MS)
        assert len(self._lows) == len(self._leaves)
        assert self._lows == sorted(self._lows)
        assert self._count == len(self._front) + sum(map(len, self._leaves))
        assert not self._lows or self._front[-1] <= self._lows[0]
        bounds = [*self._lows, 1 << 200][1:]
        for low, end, leaf in zip(self._lows, bounds, self._leaves, strict=True):
            assert 0 < len(leaf) <= _LEAF_COUNT_MAX
            era = low >> ERA_BITS << ERA_BITS
            assert low <= era | min(leaf)
            assert era | max(leaf) <= end
        self._pages._check()
