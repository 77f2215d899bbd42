"""Compacts a chunk before it is shuffled to the other chunks of its subscription. Any worker can do it, in any order.

Little work remains to be done chunk by chunk, so a subscription with most of a trace keeps all cores busy.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap

from ackstate.analysis.replay.acked import CompactChunk, EventChunk, NewlyAckedRuns, acks_alone
from ackstate.analysis.replay.polled import PolledChunk
from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.packed_numbers import pack, unpack

if TYPE_CHECKING:
    from ackstate.analysis.replay.acked import Int64s

_MARKS = (EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED, EventKind.PERSIST_FAILED)
_PLAIN = (EventKind.PUBLISH, EventKind.DELIVER, EventKind.ACK, EventKind.MARK_DELETE)
_HEADER = struct.Struct("<qqq")  # events, runs, ledgers; without runs -1, of a trace of polls -2
_PLAIN_FORM, _POLLED_FORM = -1, -2
_NOTHING = np.zeros(1, np.int64)


def compact(chunk: EventChunk) -> EventChunk:
    """Return a chunk as a `CompactChunk`; a chunk with events other than acks and persists is returned unchanged.

    Both have the same curves, as recorded and under policies that ignore deliveries.

    Complexity: O(events log events).
    """
    is_mark = chunk.is_any_of(_MARKS)
    if not (is_mark | chunk.is_any_of(_PLAIN)).all():
        return chunk
    is_last = np.append((chunk.ts_ms[1:] != chunk.ts_ms[:-1]) | is_mark[1:] | is_mark[:-1], True)
    lasts = np.flatnonzero(is_last)
    none = np.full(len(lasts), -1)
    small = CompactChunk(chunk.ts_ms[lasts], chunk.kind[lasts], none, none, none)
    small.acked, news = acks_alone(chunk)
    # For each event, the number of compact events that end before it.
    small.news = _welded(news._replace(event=(np.cumsum(is_last) - is_last)[news.event]))
    return small


def _welded(runs: NewlyAckedRuns) -> NewlyAckedRuns:
    """Return runs in order of position, with adjacent runs of one event merged."""
    follows = (runs.event[1:] == runs.event[:-1]) & (runs.ledger_id[1:] == runs.ledger_id[:-1])
    follows &= runs.first[1:] == runs.end[:-1]
    if not follows.any():
        return runs
    begins = np.flatnonzero(np.append(True, ~follows))
    return NewlyAckedRuns(
        runs.event[begins], runs.ledger_id[begins], runs.first[begins], runs.end[np.append(begins[1:], 0) - 1]
    )


def encode(chunk: EventChunk) -> bytes:
    """Encode a chunk, compact or not, as bytes, which a cluster moves faster than arrays."""
    if not isinstance(chunk, CompactChunk):
        columns = [*chunk[:-1], chunk.last_entry - chunk.first_entry]
        form = _PLAIN_FORM
        if isinstance(chunk, PolledChunk):
            form = _POLLED_FORM
            columns += [chunk.until_ms - chunk.ts_ms, chunk.number]
        return b"".join((_HEADER.pack(len(chunk.kind), form, 0), *map(pack, columns)))
    news = chunk.news
    begins = np.flatnonzero(np.diff(news.ledger_id, prepend=-1))
    # The distance of each run from the run before it in its ledger.
    gaps = news.first - np.concatenate((_NOTHING, news.end))[: len(news.end)]
    gaps[begins] = 0
    header = _HEADER.pack(len(chunk.kind), len(news.event), len(begins))
    in_ledgers = (begins, news.ledger_id[begins], news.first[begins])
    runs = (news.event, gaps, news.end - news.first - 1)
    bitmaps = [chunk.acked[ledger_id].serialize() for ledger_id in in_ledgers[1].tolist()]
    lengths = np.array(list(map(len, bitmaps)), np.int64)
    return b"".join((header, *map(pack, (chunk.ts_ms, chunk.kind, *in_ledgers, *runs, lengths)), *bitmaps))


def decode(data: memoryview) -> EventChunk:
    """Decode a chunk."""
    events, runs, ledgers = _HEADER.unpack_from(data)
    at = _HEADER.size

    def column(count: int) -> Int64s:
        nonlocal at
        found, at = unpack(data, count, at)
        return found

    if runs < 0:
        ts_ms, kind, ledger_id, first, further = (column(events) for _ in EventChunk._fields)
        exact = EventChunk(ts_ms, kind, ledger_id, first, first + further)
        if runs == _PLAIN_FORM:
            return exact
        interval_ms, number = column(events), column(events)
        return PolledChunk.of(exact, until_ms=ts_ms + interval_ms, number=number)
    ts_ms, kind = column(events), column(events)
    begins, ledger_ids, starts = (column(ledgers) for _ in range(3))
    event, gaps, further = (column(runs) for _ in range(3))
    lengths = column(ledgers)
    none = np.full(events, -1)
    small = CompactChunk(ts_ms, kind, none, none, none)
    bounds = (at + np.cumsum(np.append(0, lengths))).tolist()
    small.acked = {
        ledger_id: BitMap.deserialize(bytes(data[begin:end]))
        for ledger_id, (begin, end) in zip(ledger_ids.tolist(), pairwise(bounds), strict=True)
    }
    counts = np.diff(np.append(begins, runs))
    ends = np.cumsum(gaps + further + 1)
    ends += np.repeat(starts - np.concatenate((_NOTHING, ends))[begins], counts)
    small.news = NewlyAckedRuns(event, np.repeat(ledger_ids, counts), ends - further - 1, ends)
    return small
