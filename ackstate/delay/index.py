"""The delay index in memory: the messages of a topic that are not yet due, in the order in which they fall due.

A message is delayed for all subscriptions of a topic alike, so it is held once: in a calendar by its due time, rounded
up to the tick, and in one bitmap for each ledger, the set of held messages. When a message falls due it leaves the
index for the due log. The calendar is a priority queue of times and positions in eight bytes a message.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ackstate.checks import check_within
from ackstate.delay.view import (
    DUE_LOG_BYTES_MAX,
    TIME_MS_MAX,
    SharedDelayIndex,
    check_time,
)
from ackstate.position import Position
from ackstate.position_set import PositionSet
from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from ackstate.delay.config import DelayConfig

# A page is 65,536 entries of one ledger. A page and the lower half of an entry make the *place* of a position, which
# takes 40 bits where the position takes 95.
ENTRY_BITS, PAGE_BITS = 16, 24
ENTRY_MASK = (1 << ENTRY_BITS) - 1


@final
class EntryPages:
    """A number below 2**24 for each page in use; a free number is used again. Not safe for concurrent use."""

    __slots__ = ("_free", "_highs", "_ledger_ids", "_numbers")

    def __init__(self) -> None:
        # Invariant: page number n is that of the key _ledger_ids[n] << 16 | _highs[n], unless it is free.
        self._numbers: dict[int, int] = {}
        self._ledger_ids = array("q")
        self._highs = array("H")
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, ledger_id: int, high: int) -> int:
        """Return the page of a ledger's entries with this upper half; `OverflowError` if it is new and none is free."""
        key = ledger_id << ENTRY_BITS | high
        page = self._numbers.get(key)
        if page is not None:
            return page
        if self._free:
            page = self._free.pop()
            self._ledger_ids[page], self._highs[page] = ledger_id, high
        else:
            page = len(self._highs)
            if page >> PAGE_BITS:
                raise OverflowError(f"messages on {page} pages of {1 << ENTRY_BITS} entries wait; no more can")
            self._ledger_ids.append(ledger_id)
            self._highs.append(high)
        self._numbers[key] = page
        return page

    def places(self, ledger_ids: NDArray[np.int64], entry_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of positions; errors as for `number`."""
        highs = entry_ids >> ENTRY_BITS
        first, last = int(highs.min()), int(highs.max())
        numbers: NDArray[np.int64]
        if last - first < len(highs) and ledger_ids.min() == ledger_ids.max():
            # Of one ledger and close together, as a reader meets them: no need to sort.
            numbers, ledger_id = highs - first, int(ledger_ids[0])
            counts = np.bincount(numbers).tolist()
            found = [self.number(ledger_id, first + at) if count else 0 for at, count in enumerate(counts)]
        else:
            ledgers, ledger_numbers = np.unique(ledger_ids, return_inverse=True)
            keys, numbers = np.unique(ledger_numbers << ENTRY_BITS | highs, return_inverse=True)
            used = zip(ledgers[keys >> ENTRY_BITS].tolist(), (keys & ENTRY_MASK).tolist(), strict=True)
            found = [self.number(ledger_id, high) for ledger_id, high in used]
        return np.array(found, dtype=np.int64)[numbers] << ENTRY_BITS | entry_ids & ENTRY_MASK

    def positions(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        pages = places >> ENTRY_BITS
        ledger_ids = np.frombuffer(self._ledger_ids, dtype=np.int64)[pages]
        highs = np.frombuffer(self._highs, dtype=np.uint16)[pages].astype(np.int64)
        return ledger_ids, highs << ENTRY_BITS | places & ENTRY_MASK

    def by_page(self, places: NDArray[np.int64]) -> Iterator[tuple[int, array[int]]]:
        """Sort places, at least one, and yield for each page its ledger and the entries."""
        places.sort()
        pages = places >> ENTRY_BITS
        highs = np.frombuffer(self._highs, dtype=np.uint16)[pages].astype(np.uint32)
        entry_ids = array("I", (highs << np.uint32(ENTRY_BITS) | places.astype(np.uint16)).tobytes())
        lasts = (pages[1:] != pages[:-1]).nonzero()[0]  # the last on each page but the last page
        start = 0
        for page, last in zip(pages[lasts].tolist(), lasts.tolist(), strict=True):
            yield self._ledger_ids[page], entry_ids[start : last + 1]
            start = last + 1
        yield self._ledger_ids[int(pages[-1])], entry_ids[start:]

    def few_by_page(self, places: Iterable[int]) -> Iterable[tuple[int, list[int]]]:
        """Do as `by_page`; faster for few places."""
        found: dict[int, tuple[int, list[int]]] = {}
        for place in places:
            page = place >> ENTRY_BITS
            if page not in found:
                found[page] = self._ledger_ids[page], []
            found[page][1].append(self._highs[page] << ENTRY_BITS | place & ENTRY_MASK)
        return found.values()

    def keep_only(self, used: AbstractSet[int]) -> None:
        """Free the numbers of all pages but some."""
        unused = [key for key, page in self._numbers.items() if page not in used]
        self._free += [self._numbers.pop(key) for key in unused]

    def _check(self) -> None:
        for key, page in self._numbers.items():
            assert key == self._ledger_ids[page] << ENTRY_BITS | self._highs[page]
        assert sorted([*self._numbers.values(), *self._free]) == list(range(len(self._highs)))


# Keys sort by time. The low 64 bits of a key are the *leaf* part: 24 bits of the time (4 h 40 min), then the place. The
# bits above them, the *era*, are stored once for many keys.
TIME_BITS = 24
POSITION_BITS = ENTRY_BITS + PAGE_BITS
PAGE_MASK = (1 << PAGE_BITS) - 1
PLACE_MASK = (1 << POSITION_BITS) - 1
TIME_MASK = (1 << TIME_BITS) - 1
ERA_BITS = POSITION_BITS + TIME_BITS
LEAF_MASK = (1 << ERA_BITS) - 1


class EraKeys(NamedTuple):
    """The keys of a leaf, sorted, and the era that they omit."""

    era: int
    keys: array[int] | memoryview


def _times_of(chunk: EraKeys) -> NDArray[np.int64]:
    times = np.frombuffer(chunk.keys, dtype=np.uint64) >> np.uint64(POSITION_BITS)
    return times.astype(np.int64) | chunk.era << TIME_BITS


def _places_of(chunks: list[EraKeys]) -> NDArray[np.int64]:
    return np.frombuffer(b"".join([chunk.keys for chunk in chunks]), dtype=np.int64) & PLACE_MASK


def in_order(
    deliver_at_ms: NDArray[np.int64], ledger_ids: NDArray[np.int64], entry_ids: NDArray[np.int64]
) -> DelayedIndexes:
    """Sort messages by time, then by position."""
    order = np.lexsort((entry_ids, ledger_ids, deliver_at_ms))
    return DelayedIndexes(deliver_at_ms[order], ledger_ids[order], entry_ids[order])


def by_ledger(indexes: DelayedIndexes) -> Iterator[tuple[int, DelayedIndexes]]:
    """Yield the messages of each ledger, in the order they have."""
    order = np.argsort(indexes.ledger_ids, kind="stable")
    times, ledger_ids, entry_ids = (column[order] for column in indexes)
    ends = np.flatnonzero(np.diff(ledger_ids, append=-1)) + 1
    for first, end in pairwise((0, *ends.tolist())):
        yield int(ledger_ids[first]), DelayedIndexes(times[first:end], ledger_ids[first:end], entry_ids[first:end])


_LEAF_COUNT_MAX = 32_768
_FRONT_COUNT_MAX = 2_048
_FRONT_COUNT = 1_024
# How many messages are gathered before they go into the leaves, at least, and for each leaf: no leaf is changed for one
# or two messages.
_FRESH_COUNT = 4_096
_FRESH_COUNT_PER_LEAF = 64
_NEVER_MS = 1 << 63
_SWEEP_COUNT_MIN = 1_024
_BULK_COUNT_MIN = 64  # Fewer are put into a leaf faster one by one.
_FEW = 48  # Fewer are put into a bitmap faster one by one.
NOTHING = DelayedIndexes(*(np.zeros(0, dtype=np.int64) for _ in range(3)))


class _Fresh(NamedTuple):
    """Messages as they were added: columns of one length."""

    due_ms: array[int]
    ledger_ids: array[int]
    entry_ids: array[int]


@final
class Calendar:
    """A priority queue of messages by due time, with no object per message; not safe for concurrent use."""

    # Leaves cover the time to come, each an unsorted array of keys that is divided when it is full. Only the front, a
    # thousand keys or two, is sorted. Messages added in small numbers are gathered first, and go into the leaves
    # together. So the work of a call is bounded, however many messages wait. A message may be in it more than once.

    __slots__ = (
        "_count", "_fresh", "_fresh_count_max", "_fresh_first_ms", "_front", "_front_era", "_leaves", "_lows", "_pages",
        "_sweep_at_count",
    )  # fmt: skip

    def __init__(self) -> None:
        # The messages that were added one by one since the last flush, and their earliest time.
        self._fresh = _Fresh(array("q"), array("q"), array("q"))
        self._fresh_first_ms = _NEVER_MS
        self._fresh_count_max = _FRESH_COUNT
        # Invariants: _front has the low bits of keys of one era, is sorted, not empty unless all leaves are, and below
        # _lows[0]. _lows is sorted; _leaves[i] has the low bits of keys of the era of _lows[i], from that up to
        # _lows[i + 1], and is not empty.
        self._front = array("Q")
        self._front_era = 0
        self._lows: list[int] = []
        self._leaves: list[array[int]] = []
        self._count = 0  # without the fresh messages
        self._pages = EntryPages()
        self._sweep_at_count = _SWEEP_COUNT_MIN

    def __len__(self) -> int:
        """Return how many messages are in it; one that was added twice counts twice."""
        return self._count + len(self._fresh.due_ms)

    @property
    def first_due_ms(self) -> int | None:
        first_ms = self._fresh_first_ms
        if self._front:
            first_ms = min(first_ms, self._front_era << TIME_BITS | self._front[0] >> POSITION_BITS)
        return None if first_ms == _NEVER_MS else first_ms

    def add(self, position: Position, due_ms: int) -> None:
        """Put in a message, unchecked. O(1); each 4,096th call O(leaves)."""
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
        """Put in messages of one ledger, unchecked."""
        self.add_all(due_ms, np.full(len(entry_ids), ledger_id), entry_ids)

    def add_all(self, due_ms: NDArray[np.int64], ledger_ids: NDArray[np.int64], entry_ids: NDArray[np.int64]) -> None:
        """Put in messages of any ledgers, three arrays as in `DelayedIndexes`, in any order."""
        if not len(due_ms):
            return
        if len(due_ms) >= self._fresh_count_max:
            self._free_unused_pages()
            self._put_many(due_ms, ledger_ids, entry_ids)
            return
        for gathered, column in zip(self._fresh, (due_ms, ledger_ids, entry_ids), strict=True):
            gathered.frombytes(column.astype(np.int64, copy=False).tobytes())
        self._fresh_first_ms = min(self._fresh_first_ms, int(due_ms.min()))
        if len(self._fresh.due_ms) >= self._fresh_count_max:
            self._flush()

    def take_until(self, now_ms: int, max_count: int | None = None) -> DelayedIndexes:
        """Remove and return the messages due at a time or before, the first `max_count` of them, in order."""
        chunks = self._take(now_ms, len(self) + 1 if max_count is None else max_count)
        if not chunks:
            return NOTHING
        due = in_order(np.concatenate([*map(_times_of, chunks)]), *self._pages.positions(_places_of(chunks)))
        self._forget_pages_if_empty()
        if max_count is None or len(due.entry_ids) <= max_count:
            return due
        # Pages are numbered as they come, so the first positions are known only among all messages due at one time.
        for due_ms, *position in zip(*(column[max_count:].tolist() for column in due), strict=True):
            self.add(Position(*position), due_ms)
        return DelayedIndexes(*(column[:max_count] for column in due))

    def take_into(self, positions: PositionSet, now_ms: int) -> None:
        """Remove the messages that are due at a time or before, and put their positions into a set."""
        before = len(self)
        chunks = self._take(now_ms, before + 1)
        if before - len(self) >= _FEW:
            parts: Iterable[tuple[int, array[int] | list[int]]] = self._pages.by_page(_places_of(chunks))
        else:
            places = (key & PLACE_MASK for chunk in chunks for key in chunk.keys.tolist())
            parts = self._pages.few_by_page(places)
        for ledger_id, entry_ids in parts:
            positions.update_entries(ledger_id, entry_ids)
        self._forget_pages_if_empty()

    def keep_only(self, positions: PositionSet) -> None:
        """Remove the messages that are not in a set, once half of all are to go: O(1) until then."""
        if len(self) <= 2 * len(positions) + _FRESH_COUNT:
            return
        for ledger_id, part in by_ledger(self.take_until(_NEVER_MS - 1)):
            if (kept := positions.entries_of(ledger_id)) is None:
                continue
            # In order of time: if a message is in it twice, the first time counts.
            entry_ids, first_at = np.unique(part.entry_ids, return_index=True)
            is_kept = np.isin(entry_ids, np.array(kept.to_array(), dtype=np.int64), assume_unique=True)
            self.add_many(ledger_id, entry_ids[is_kept], part.deliver_at_ms[first_at[is_kept]])

    def clear(self) -> None:
        Calendar.__init__(self)

    def _take(self, now_ms: int, wanted: int) -> list[EraKeys]:
        """Remove due messages, at least `wanted` if there are, with all that are due at the time of the last."""
        if self._fresh_first_ms <= now_ms:
            self._flush()
        end = (now_ms + 1) << POSITION_BITS
        chunks: list[EraKeys] = []
        taken = 0
        while self._front and wanted > 0:
            era_end = end - (self._front_era << ERA_BITS)
            at = bisect_left(self._front, era_end)
            if taken < wanted <= taken + at:
                era_end = (self._front[wanted - taken - 1] >> POSITION_BITS) + 1 << POSITION_BITS
                end = era_end + (self._front_era << ERA_BITS)
                at = bisect_left(self._front, era_end)
            if not at:
                break
            chunks.append(EraKeys(self._front_era, self._front[:at]))
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
                self._front, self._front_era = array("Q", keys[:_FRONT_COUNT].tobytes()), era
                self._insert_leaves(0, era, keys[_FRONT_COUNT:], size=_FRONT_COUNT)
                break
            chunks.append(EraKeys(era, keys.data))
            self._count -= len(keys)
        return chunks

    def _flush(self) -> None:
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
        era = key >> ERA_BITS
        at = bisect_right(self._lows, key) - 1
        if at < 0 and self._claim_front(era):
            insort(self._front, key & LEAF_MASK)
            if len(self._front) > _FRONT_COUNT_MAX:
                self._set_front(np.frombuffer(self._front, dtype=np.uint64))
            return
        if at < 0 or self._lows[at] >> ERA_BITS != era:
            at += 1
            self._lows.insert(at, era << ERA_BITS)
            self._leaves.insert(at, array("Q"))
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
        self._count += len(keys)
        first, end = bisect_left(self._lows, era << ERA_BITS), bisect_left(self._lows, era + 1 << ERA_BITS)
        lows = np.array([low & LEAF_MASK for low in self._lows[first:end]], dtype=np.uint64)
        starts = [*np.searchsorted(keys, lows).tolist(), len(keys)]
        raw, size = keys.data.cast("B"), keys.itemsize
        # The last leaf first: one that is divided moves those behind it.
        for at in range(end - 1, first - 1, -1):
            start, stop = starts[at - first : at - first + 2]
            if start < stop:
                leaf = self._leaves[at]
                leaf.frombytes(raw[size * start : size * stop])
                if len(leaf) > _LEAF_COUNT_MAX:
                    self._divide(at)
        below = keys[: starts[0]]
        if not first and len(below) and self._claim_front(era):
            # Two sorted runs: a stable sort merges them.
            self._set_front(np.sort(np.concatenate((self._front, below)), kind="stable"))
        else:
            self._insert_leaves(first, era, below, size=_LEAF_COUNT_MAX // 2)

    def _claim_front(self, era: int) -> bool:
        """Return whether keys of an era, below all leaves, go into the front; one of a later era is made a leaf."""
        if not self._front or era < self._front_era:
            later = np.frombuffer(self._front, dtype=np.uint64)
            self._insert_leaves(0, self._front_era, later, size=_FRONT_COUNT_MAX)
            self._front, self._front_era = array("Q"), era
        return era == self._front_era

    def _set_front(self, keys: NDArray[np.uint64]) -> None:
        """Make sorted keys the front or, if they are too many, the first of them and leaves of the others."""
        count = len(keys) if len(keys) <= _FRONT_COUNT_MAX else _FRONT_COUNT
        self._front = array("Q", keys[:count].tobytes())
        self._insert_leaves(0, self._front_era, keys[count:], size=_LEAF_COUNT_MAX // 2)

    def _divide(self, at: int) -> None:
        keys, low, size = np.frombuffer(self._leaves.pop(at), dtype=np.uint64), self._lows.pop(at), _LEAF_COUNT_MAX // 2
        # In a fifth of the time of a sort: the first key of each leaf is its lowest, but for the first leaf.
        keys = np.partition(keys, range(size, len(keys), size))
        self._insert_leaves(at, low >> ERA_BITS, keys, size=size)
        self._lows[at] = low

    def _insert_leaves(self, at: int, era: int, keys: NDArray[np.uint64], *, size: int) -> None:
        """Put in keys of one era as leaves of at most `size` keys, the first of which is the lowest of each."""
        for number, first in enumerate(range(0, len(keys), size), at):
            piece = keys[first : first + size]
            self._lows.insert(number, era << ERA_BITS | int(piece[0]))
            self._leaves.insert(number, array("Q", piece.tobytes()))

    def _free_unused_pages(self) -> None:
        """Free the pages that no key is on, whenever there are twice the pages: O(messages)."""
        if len(self._pages) < self._sweep_at_count:
            return
        used: set[int] = set()
        for keys in (self._front, *self._leaves):
            pages = np.frombuffer(keys, dtype=np.uint64) >> np.uint64(ENTRY_BITS) & np.uint64(PAGE_MASK)
            used.update(np.unique(pages).tolist())
        self._pages.keep_only(used)
        self._sweep_at_count = max(_SWEEP_COUNT_MIN, 2 * len(self._pages))

    def _forget_pages_if_empty(self) -> None:
        if not len(self):
            self.clear()

    def _check(self) -> None:
        assert list(self._front) == sorted(self._front)
        assert bool(self._front) == bool(self._count)
        assert len(self._fresh.due_ms) < self._fresh_count_max
        assert self._fresh_first_ms == min(self._fresh.due_ms, default=_NEVER_MS)
        assert len(self._lows) == len(self._leaves)
        assert self._lows == sorted(self._lows)
        assert self._count == len(self._front) + sum(map(len, self._leaves))
        assert not self._lows or self._front_era << ERA_BITS | self._front[-1] <= self._lows[0]
        bounds = [*self._lows, 1 << 200][1:]
        for low, end, leaf in zip(self._lows, bounds, self._leaves, strict=True):
            assert 0 < len(leaf) <= _LEAF_COUNT_MAX
            era = low >> ERA_BITS << ERA_BITS
            assert low <= era | min(leaf)
            assert era | max(leaf) <= end
        self._pages._check()


@final
class TopicDelayIndex(SharedDelayIndex):
    """The messages of one topic that are not yet due.

    >>> index = TopicDelayIndex(tick_time_ms=100)
    >>> view = index.open_view(is_acked=set().__contains__)
    >>> view.add_message(Position(3, 7), deliver_at_ms=1_050, now_ms=1_000)
    True
    >>> index.next_due_ms, view.scheduled_messages(10, now_ms=1_099)
    (1100, [])
    >>> view.scheduled_messages(10, now_ms=1_100)
    [Position(ledger_id=3, entry_id=7)]

    A message is never due early, and late by less than a tick. It takes 8 to 11 bytes while it waits, however many
    subscriptions there are. Safe for any number of threads, and so are its views, each used by one thread at a time.

    Args:
        tick_time_ms: Due times are rounded up to a multiple of this; at least 1.
        due_log_bytes_max: About how much memory the due log may take before subscriptions that lag are cut off from it.

    Raises:
        ValueError: The tick is below 1 ms, or the bound negative.
        TypeError: One of them is not an integer.
    """

    def __init__(self, *, tick_time_ms: int, due_log_bytes_max: int = DUE_LOG_BYTES_MAX) -> None:
        check_within("due_log_bytes_max", due_log_bytes_max, least=0, most=TIME_MS_MAX, unit="bytes")
        super().__init__(due_log_bytes_max=due_log_bytes_max)
        # Invariant: each held message is in the calendar, which may also have messages that were overdue and are not
        # held.
        self._calendar = Calendar()
        self._tick_time_ms = check_time(tick_time_ms, name="tick_time_ms")
        if self._tick_time_ms < 1:
            raise ValueError(f"tick_time_ms must be at least 1, got {tick_time_ms}")

    @classmethod
    def from_config(cls, config: DelayConfig) -> TopicDelayIndex:
        """Return an index with the tick of some settings; it is always strict, and never pauses deliveries."""
        return cls(tick_time_ms=config.tick_time_ms)

    @property
    def next_due_ms(self) -> int | None:
        """When the next message falls due, or None. Complexity: O(1)."""
        return self._calendar.first_due_ms

    def hold(self, position: Position, deliver_at_ms: int) -> bool:
        if deliver_at_ms > self.now_ms:
            ledger_id, entry_id = position
            if self.held.include(ledger_id, entry_id):
                due_ms = deliver_at_ms + -deliver_at_ms % self._tick_time_ms
                # Not past the end of time, where it would never fall due.
                self._calendar.add(position, due_ms if due_ms < TIME_MS_MAX else TIME_MS_MAX)
            return True
        if position not in self.held:
            return False
        if deliver_at_ms + self._tick_time_ms > self.now_ms:
            return True
        # It falls due for the views that have passed it. The one that meets it only now delivers it now.
        due = PositionSet()
        due.add(position)
        self._fall_due(due)
        return False

    def move_due(self, now_ms: int) -> None:
        if now_ms <= self.now_ms:
            return
        self.now_ms = now_ms
        first_due_ms = self._calendar.first_due_ms
        if first_due_ms is None or first_due_ms > now_ms:
            return
        due = PositionSet()
        self._calendar.take_into(due, now_ms)
        if len(self._calendar) + len(due) != len(self.held):
            due.intersection_update(self.held)
        if self.moved:
            self.keep_moved(due, now_ms)
        self._fall_due(due)

    def drop_before(self, ledger_id: int) -> None:
        self.held.remove_below(Position(ledger_id, 0))
        self._calendar.keep_only(self.held)

    def _fall_due(self, due: PositionSet) -> None:
        if len(due):
            self.held.difference_update(due)
            self.due_log.append(due)

    def _check(self) -> None:
        self._calendar._check()
        self.held._check()
        assert len(self._calendar) >= len(self.held)
        assert self.next_due_ms is None or self.next_due_ms > self.now_ms
        assert self.due_log.end.next is None
        assert len(self.due_log.end.positions) == 0
