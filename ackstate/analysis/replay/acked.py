"""Finds the entries that each event of a chunk acks first. Only this step needs sets; all policies share its result."""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING, NamedTuple, Self, final

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from ackstate.analysis.trace.events import EventKind
from ackstate.entry_bitmap import bitmap_of_runs, runs_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence


Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# A longer run is worth a bitmap operation of its own; shorter runs are expanded entry by entry.
_SHORT_RUN_MAX = 64


class EventChunk(NamedTuple):
    """Consecutive events of one subscription as parallel arrays, columns as in the trace."""

    ts_ms: Int64s
    kind: Int64s
    ledger_id: Int64s
    first_entry: Int64s
    last_entry: Int64s

    @classmethod
    def in_order(cls, chunks: Sequence[EventChunk]) -> EventChunk:
        """Return the events of several chunks in order of time; at least one chunk."""
        together = [np.concatenate(columns) for columns in zip(*chunks, strict=True)]
        order = np.argsort(together[0], kind="stable")
        return cls(*(column[order] for column in together))

    def part(self, begin: int, end: int) -> EventChunk:
        """Return the events from `begin` (inclusive) to `end` (exclusive)."""
        return EventChunk(*(column[begin:end] for column in self))

    def is_any_of(self, kinds: Sequence[EventKind]) -> Bools:
        """Return for each event whether it has one of some kinds; `np.isin` takes ten times as long."""
        is_wanted = np.zeros(len(self.kind), np.bool_)
        for each in kinds:
            is_wanted |= self.kind == int(each)  # An enum's member would be compared as 64 bits, in ten times as long.
        return is_wanted


class NewlyAckedRuns(NamedTuple):
    """Entries that were not acked before, as runs in parallel arrays; no two share an entry."""

    # Index of the event that acked the run; rising, except in a `CompactChunk`, whose runs are sorted by position.
    event: Int64s
    ledger_id: Int64s  # Its ledger
    first: Int64s  # Its first entry
    end: Int64s  # The entry after its last

    def counts(self, event_count: int) -> Int64s:
        """Return the number of entries that each event of the chunk acks first."""
        if not len(self.event):
            return np.zeros(event_count, np.int64)
        # Doubles represent these counts exactly.
        return np.bincount(self.event, weights=self.end - self.first, minlength=event_count).astype(np.int64)

    def part(self, begin: int, end: int) -> NewlyAckedRuns:
        """Return the runs of the events from `begin` (inclusive) to `end` (exclusive); event indexes restart at 0."""
        low, high = np.searchsorted(self.event, (begin, end))
        return NewlyAckedRuns(
            self.event[low:high] - begin, self.ledger_id[low:high], self.first[low:high], self.end[low:high]
        )

    def bitmaps(self) -> dict[int, BitMap]:
        """Return the entries by ledger."""
        runs = by_position(self)
        return {
            ledger_id: bitmap_of_runs(runs.first[begin:end], runs.end[begin:end] - 1, is_optimized=False)
            for ledger_id, begin, end in _ledgers_of(runs.ledger_id)
        }


class CompactChunk(EventChunk):
    """A chunk in which the events between two persist events within a millisecond are merged into the last one.

    Its acks are in `news` instead, in order of position: the entries that each event acks first, counted from an empty
    state. So a chunk can be compacted without the chunks before it; `AckAccumulator` removes entries acked earlier.
    """

    news: NewlyAckedRuns  # These runs
    acked: Mapping[int, BitMap]  # Their entries by ledger, so that replaying chunks one after another builds no sets


@final
class AckAccumulator:
    """Accumulates the acked entries of one subscription, chunk by chunk.

    Memory: a bitmap of these entries.
    """

    def __init__(self, acked: Mapping[int, BitMap] | None = None) -> None:  # takes the bitmaps over
        self.acked: dict[int, BitMap] = dict(acked or {})

    def copy(self) -> Self:
        """Return an independent copy."""
        return type(self)({ledger_id: bitmap.copy() for ledger_id, bitmap in self.acked.items()})

    def take(self, chunk: EventChunk) -> NewlyAckedRuns:
        """Add the next chunk, and return the entries that its events ack first."""
        if isinstance(chunk, CompactChunk):
            return self._take_runs(chunk)
        is_ack = (chunk.kind == EventKind.ACK) | (chunk.kind == EventKind.MARK_DELETE)
        # These events may name entries that are acked although no ACK event names them.
        is_ack |= chunk.is_any_of((EventKind.RECOVER, EventKind.RESET)) & (chunk.first_entry >= 0)
        length = chunk.last_entry - chunk.first_entry + 1
        apart = (is_ack & (length > _SHORT_RUN_MAX)) | (chunk.kind == EventKind.REDELIVER)
        found: list[NewlyAckedRuns] = []
        begin = 0
        for index in [*np.flatnonzero(apart).tolist(), len(chunk.kind)]:
            short = begin + np.flatnonzero(is_ack[begin:index])
            if len(short):
                found.append(self._ack_short_runs(chunk, short))
            if index < len(chunk.kind):
                found += self._apply_run(chunk, index)
            begin = index + 1
        return _joined(found)

    def _take_runs(self, chunk: CompactChunk) -> NewlyAckedRuns:
        """Add the acks of a compact chunk, and return the new ones: all, unless earlier chunks acked some of them."""
        known = {ledger_id for ledger_id, entries in chunk.acked.items() if not self._is_new(ledger_id, entries)}
        runs = _joined(list(self._kept_runs(chunk, known))) if known else chunk.news
        for ledger_id, entries in chunk.acked.items():
            self.acked.setdefault(ledger_id, BitMap()).update(entries)
        return runs

    def _is_new(self, ledger_id: int, entries: BitMap) -> bool:
        return ledger_id not in self.acked or entries.isdisjoint(self.acked[ledger_id])

    def _kept_runs(self, chunk: CompactChunk, known: Collection[int]) -> Iterator[NewlyAckedRuns]:
        """Yield the runs of each ledger, minus earlier acks in the `known` ledgers."""
        runs = chunk.news
        for ledger_id, begin, end in _ledgers_of(runs.ledger_id):
            part = NewlyAckedRuns(*(column[begin:end] for column in runs))
            yield _kept(part, chunk.acked[ledger_id] - self.acked[ledger_id]) if ledger_id in known else part

    def _apply_run(self, chunk: EventChunk, index: int) -> Sequence[NewlyAckedRuns]:
        """Ack one long run and return its new entries, or remove the acks of a redelivered run."""
        ledger_id = int(chunk.ledger_id[index])
        held = self.acked.setdefault(ledger_id, BitMap())
        first, end = int(chunk.first_entry[index]), int(chunk.last_entry[index]) + 1
        if chunk.kind[index] == EventKind.REDELIVER:
            held.remove_range(first, end)
            return ()
        known = held.range_cardinality(first, end)
        if known == end - first:
            return ()
        if not known:
            firsts, ends = np.array([first]), np.array([end])
        else:
            # The bitmap of a run is one container of runs, however long it is.
            firsts, lasts = (bounds.astype(np.int64) for bounds in runs_of(BitMap(range(first, end)) - held))
            ends = lasts + 1
        held.add_range(first, end)
        return (NewlyAckedRuns(np.full(len(firsts), index), np.full(len(firsts), ledger_id), firsts, ends),)

    def _ack_short_runs(self, chunk: EventChunk, indexes: Int64s) -> NewlyAckedRuns:
        """Ack the events at `indexes`, in order, and return the entries that each acked first, one by one."""
        ledger_ids = chunk.ledger_id[indexes]
        if (ledger_ids == ledger_ids[0]).all():
            return self._ack_in_ledger(chunk, indexes, int(ledger_ids[0]))
        parts = [
            self._ack_in_ledger(chunk, indexes[ledger_ids == ledger_id], ledger_id)
            for ledger_id in np.unique(ledger_ids).tolist()
        ]
        return by_event(_joined(parts))

    def _ack_in_ledger(self, chunk: EventChunk, indexes: Int64s, ledger_id: int) -> NewlyAckedRuns:
        entries, owners = _spelled_out(chunk.first_entry[indexes], chunk.last_entry[indexes])
        mentioned = _bitmap(entries)
        held = self.acked.setdefault(ledger_id, BitMap())
        if len(mentioned) == len(entries) and mentioned.isdisjoint(held):
            first_at = np.arange(len(entries))
        else:
            # `unique` returns the first event of each entry; entries acked in an earlier chunk are removed.
            distinct, first_at = np.unique(entries, return_index=True)
            first_at = np.sort(first_at[~np.isin(distinct, _entries(mentioned & held))])
        held |= mentioned
        new = entries[first_at]
        return NewlyAckedRuns(indexes[owners[first_at]], np.full(len(new), ledger_id), new, new + 1)


def by_position(runs: NewlyAckedRuns) -> NewlyAckedRuns:
    """Return disjoint runs in order of position."""
    rises = runs.ledger_id[1:] > runs.ledger_id[:-1]
    rises |= (runs.ledger_id[1:] == runs.ledger_id[:-1]) & (runs.first[1:] > runs.first[:-1])
    if rises.all():
        return runs
    if len(runs.ledger_id) and (runs.ledger_id == runs.ledger_id[0]).all():
        order = np.argsort(runs.first, kind="stable")
    else:
        order = np.lexsort((runs.first, runs.ledger_id))
    return NewlyAckedRuns(*(column[order] for column in runs))


def _kept(runs: NewlyAckedRuns, entries: BitMap) -> NewlyAckedRuns:
    """Return the intersection of some runs of one ledger, in order of position, with some entries."""
    firsts, lasts = (bounds.astype(np.int64) for bounds in runs_of(entries))
    begins = np.union1d(runs.first, firsts)
    of_run, of_kept = (np.searchsorted(each, begins, "right") - 1 for each in (runs.first, firsts))
    both = (of_run >= 0) & (of_kept >= 0)
    begins, of_run, of_kept = begins[both], of_run[both], of_kept[both]
    ends = np.minimum(runs.end[of_run], lasts[of_kept] + 1)
    held = begins < ends
    return NewlyAckedRuns(runs.event[of_run[held]], runs.ledger_id[of_run[held]], begins[held], ends[held])


def _ledgers_of(ledger_ids: Int64s) -> Iterator[tuple[int, int, int]]:
    """Yield each ledger of a rising column, with the first index (inclusive) and the last one (exclusive) of it."""
    begins = np.flatnonzero(np.diff(ledger_ids, prepend=-1)).tolist()
    for begin, end in itertools.pairwise([*begins, len(ledger_ids)]):
        yield int(ledger_ids[begin]), begin, end


def _joined(parts: Sequence[NewlyAckedRuns]) -> NewlyAckedRuns:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NewlyAckedRuns(*(np.empty(0, np.int64) for _ in NewlyAckedRuns._fields))
    return NewlyAckedRuns(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def by_event(runs: NewlyAckedRuns) -> NewlyAckedRuns:
    """Return runs in order of their events."""
    if (runs.event[1:] >= runs.event[:-1]).all():
        return runs
    order = np.argsort(runs.event, kind="stable")
    return NewlyAckedRuns(*(column[order] for column in runs))


def _spelled_out(first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
    """Return every entry of the runs, and for each the index of its run."""
    if (first == last).all():
        return first, np.arange(len(first))
    length = last - first + 1
    owners = np.repeat(np.arange(len(first)), length)
    offsets = np.arange(len(owners)) - np.repeat(np.cumsum(length) - length, length)
    return np.repeat(first, length) + offsets, owners


def _bitmap(entries: Int64s) -> BitMap:
    numbers = entries.astype(np.uint32)
    # A bitmap accepts sorted ids six times as fast, and sorting in numpy costs less than the difference.
    if (numbers[1:] < numbers[:-1]).any():
        numbers = np.sort(numbers)
    return BitMap(array("I", numbers.tobytes()))


def _entries(bitmap: BitMap) -> Int64s:
    return np.asarray(bitmap.to_array(), dtype=np.int64)
