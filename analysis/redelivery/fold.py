"""Replay one subscription's trace, a chunk at a time: how many acked messages would a crash bring back, at each event?

At an instant it is *acked so far* minus *covered by the last completed persist*. Both are running counts, so a chunk is
a few array operations; only what is newly acked needs sets, and those are bitmaps.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from analysis.trace.events import EventKind

Int64s = npt.NDArray[np.int64]

# A run longer than this is worth a bitmap operation of its own; shorter ones are spelled out entry by entry.
_SHORT_RUN_MAX = 64
_UNKNOWN = np.iinfo(np.int64).min


class Chunk(NamedTuple):
    """A chunk's events as parallel arrays, columns as in the trace."""

    ts_ms: Int64s
    kind: Int64s
    ledger_id: Int64s
    first_entry: Int64s
    last_entry: Int64s


class Folded(NamedTuple):
    """What the events of a chunk lead to, in parallel arrays; each value holds just after its event.

    Attributes:
        redelivery: Acked messages that a crash would bring back.
        if_written: The same, had the persist that is under way been written; equals `redelivery` without one.
        persisting: True from the beginning of a persist until its end; a failed one ends with the next that does not.
        alive: False from a crash until the recovery.
    """

    redelivery: Int64s
    if_written: Int64s
    persisting: npt.NDArray[np.bool_]
    alive: npt.NDArray[np.bool_]


@final
class RedeliveryFold:
    """Carries one subscription's state from chunk to chunk.

    Memory: a bitmap of what was ever acked, and a few arrays of a chunk's length.
    """

    def __init__(self) -> None:
        self._acked: dict[int, BitMap] = {}
        self._acked_count = 0
        # Counts of acked messages: what the last completed persist covered, and what the last begun one covers.
        self._durable_count = 0
        self._begun_count = 0
        self._persisting = False
        self._alive = True

    def fold(self, chunk: Chunk) -> Folded:
        """Replay the next chunk.

        Complexity: O(events log events + short entries), and one bitmap operation for each long run.
        """
        kind = chunk.kind
        acked = self._acked_count + np.cumsum(self._newly_acked(chunk))
        begun = _latest(np.where(kind == EventKind.PERSIST_BEGUN, acked, _UNKNOWN), self._begun_count)
        # A recovery starts from what is durable: nothing that is acked then would be lost by another crash.
        settled = np.where(kind == EventKind.RECOVER, acked, _UNKNOWN)
        settled = np.where(kind == EventKind.PERSIST_ENDED, begun, settled)
        durable = _latest(settled, self._durable_count)
        persisting = _latest_flag(
            kind == EventKind.PERSIST_BEGUN,
            np.isin(kind, (EventKind.PERSIST_ENDED, EventKind.RECOVER)),
            before=self._persisting,
        )
        alive = _latest_flag(kind == EventKind.RECOVER, kind == EventKind.CRASH, before=self._alive)
        if len(kind):
            self._acked_count, self._begun_count = int(acked[-1]), int(begun[-1])
            self._durable_count = int(durable[-1])
            self._persisting, self._alive = bool(persisting[-1]), bool(alive[-1])
        return Folded(acked - durable, acked - np.where(persisting, begun, durable), persisting, alive)

    def _newly_acked(self, chunk: Chunk) -> Int64s:
        """Count, for each event, the entries that it acks and nothing before it did."""
        is_ack = np.isin(chunk.kind, (EventKind.ACK, EventKind.MARK_DELETE))
        length = chunk.last_entry - chunk.first_entry + 1
        apart = (is_ack & (length > _SHORT_RUN_MAX)) | (chunk.kind == EventKind.REDELIVER)
        new = np.zeros(len(chunk.kind), np.int64)
        begin = 0
        for index in [*np.flatnonzero(apart).tolist(), len(chunk.kind)]:
            short = begin + np.flatnonzero(is_ack[begin:index])
            self._ack_short_runs(chunk, short, new)
            if index < len(chunk.kind):
                new[index] = self._apply_run(chunk, index)
            begin = index + 1
        return new

    def _apply_run(self, chunk: Chunk, index: int) -> int:
        """Ack one long run and return how much of it was new, or take back a redelivered one."""
        held = self._acked.setdefault(int(chunk.ledger_id[index]), BitMap())
        first, end = int(chunk.first_entry[index]), int(chunk.last_entry[index]) + 1
        if chunk.kind[index] == EventKind.REDELIVER:
            held.remove_range(first, end)
            return 0
        known = held.range_cardinality(first, end)
        held.add_range(first, end)
        return end - first - known

    def _ack_short_runs(self, chunk: Chunk, indexes: Int64s, new: Int64s) -> None:
        """Ack the events at `indexes`, in order, and write into `new` how many entries each acked first."""
        ledger_ids = chunk.ledger_id[indexes]
        for ledger_id in np.unique(ledger_ids).tolist():
            of_ledger = indexes[ledger_ids == ledger_id]
            entries, owners = _spell_out(chunk.first_entry[of_ledger], chunk.last_entry[of_ledger])
            # `unique` names the first event of each entry; what was acked in an earlier chunk is no event's.
            entries, first_at = np.unique(entries, return_index=True)
            mentioned = _bitmap(entries)
            held = self._acked.setdefault(ledger_id, BitMap())
            fresh = ~np.isin(entries, _entries(mentioned & held))
            held |= mentioned
            new += np.bincount(of_ledger[owners[first_at[fresh]]], minlength=len(new))


def _spell_out(first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
    """Return every entry of the runs, and for each the index of its run."""
    length = last - first + 1
    owners = np.repeat(np.arange(len(first)), length)
    offsets = np.arange(len(owners)) - np.repeat(np.cumsum(length) - length, length)
    return np.repeat(first, length) + offsets, owners


def _latest(values: Int64s, before: int) -> Int64s:
    """Carry each known value forward over the unknown ones that follow, beginning with `before`."""
    known = np.where(values != _UNKNOWN, np.arange(len(values)), -1)
    at = np.maximum.accumulate(known) if len(known) else known
    return np.where(at >= 0, values[at], before)


def _latest_flag(begins: npt.NDArray[np.bool_], ends: npt.NDArray[np.bool_], *, before: bool) -> npt.NDArray[np.bool_]:
    """Return, at each event, whether the latest beginning is later than the latest end."""
    marks = np.where(begins, 1, np.where(ends, 0, _UNKNOWN))
    return _latest(marks, int(before)).astype(np.bool_)


def _bitmap(entries: Int64s) -> BitMap:
    packed = array("I")
    packed.frombytes(entries.astype(np.uint32).tobytes())
    return BitMap(packed)


def _entries(bitmap: BitMap) -> Int64s:
    return np.asarray(bitmap.to_array(), dtype=np.int64)
