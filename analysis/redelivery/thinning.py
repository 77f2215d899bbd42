"""Make a chunk small before it is brought together with the others of its subscription: any worker can, in any order.

What is left to do one chunk after another is little, so that a subscription with most of a trace keeps all cores busy.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from ackstate.analysis.redelivery.acked import AckedFold, Chunk, NewRuns, Thinned, by_position
from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from ackstate.analysis.redelivery.acked import Int64s

_MARKS = (EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED, EventKind.PERSIST_FAILED)
_PLAIN = (EventKind.PUBLISH, EventKind.DELIVER, EventKind.ACK, EventKind.MARK_DELETE)
_HEADER = struct.Struct("<qqq")  # events, runs, ledgers; without runs -1
# Of what numbers are packed as, the first that holds all of a column, told by its place here.
_KINDS: tuple[type[np.integer], ...] = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.int64)
_NOTHING = np.zeros(1, np.int64)


def thinned(chunk: Chunk) -> Chunk:
    """Return a chunk as a `Thinned`; one that says more than what was acked and persisted stays as it is.

    The curves as recorded and under policies that are plain are the same of both.

    Complexity: O(events log events).
    """
    is_mark = chunk.is_any_of(_MARKS)
    if not (is_mark | chunk.is_any_of(_PLAIN)).all():
        return chunk
    is_last = np.append((chunk.ts_ms[1:] != chunk.ts_ms[:-1]) | is_mark[1:] | is_mark[:-1], True)
    lasts = np.flatnonzero(is_last)
    none = np.full(len(lasts), -1)
    small = Thinned(chunk.ts_ms[lasts], chunk.kind[lasts], none, none, none)
    news = by_position(AckedFold().take(chunk))
    # Of all events up to one, those that end a thinned one before it.
    small.news = _welded(news._replace(event=(np.cumsum(is_last) - is_last)[news.event]))
    return small


def _welded(runs: NewRuns) -> NewRuns:
    """Return runs in order of position with neighbours of one event made one."""
    follows = (runs.event[1:] == runs.event[:-1]) & (runs.ledger_id[1:] == runs.ledger_id[:-1])
    follows &= runs.first[1:] == runs.end[:-1]
    if not follows.any():
        return runs
    begins = np.flatnonzero(np.append(True, ~follows))
    return NewRuns(
        runs.event[begins], runs.ledger_id[begins], runs.first[begins], runs.end[np.append(begins[1:], 0) - 1]
    )


def packed(chunk: Chunk) -> bytes:
    """Return a chunk, thinned or not, as bytes, which a cluster moves faster than arrays."""
    kind = chunk.kind.astype(np.int8).tobytes()
    if not isinstance(chunk, Thinned):
        columns = (*_steps(chunk.ts_ms), chunk.ledger_id, *_steps(chunk.first_entry), *_steps(chunk.last_entry))
        return b"".join((_HEADER.pack(len(kind), -1, 0), *map(_narrow, columns), kind))
    news = chunk.news
    begins = np.flatnonzero(np.diff(news.ledger_id, prepend=-1))
    # How far each run begins behind the one before it in its ledger.
    gaps = news.first - np.concatenate((_NOTHING, news.end))[: len(news.end)]
    gaps[begins] = 0
    header = _HEADER.pack(len(kind), len(news.event), len(begins))
    in_ledgers = (begins, news.ledger_id[begins], news.first[begins])
    runs = (news.event, gaps, news.end - news.first - 1)
    return b"".join((header, *map(_narrow, (*_steps(chunk.ts_ms), *in_ledgers, *runs)), kind))


def unpacked(data: memoryview) -> Chunk:
    """Return the chunk that was packed."""
    events, runs, ledgers = _HEADER.unpack_from(data)
    at = _HEADER.size

    def column(count: int) -> Int64s:
        nonlocal at
        found = np.frombuffer(data, _KINDS[data[at]], count, at + 1)
        at += 1 + found.nbytes
        return found.astype(np.int64)

    def stepped(count: int) -> Int64s:
        begin = column(1)
        return begin + np.cumsum(column(count))

    def kinds() -> Int64s:
        return np.frombuffer(data, np.int8, events, at).astype(np.int64)

    if runs < 0:
        ts_ms, ledger_id, first, last = stepped(events), column(events), stepped(events), stepped(events)
        return Chunk(ts_ms, kinds(), ledger_id, first, last)
    ts_ms = stepped(events)
    begins, ledger_ids, starts = (column(ledgers) for _ in range(3))
    event, gaps, further = (column(runs) for _ in range(3))
    none = np.full(events, -1)
    small = Thinned(ts_ms, kinds(), none, none, none)
    counts = np.diff(np.append(begins, runs))
    ends = np.cumsum(gaps + further + 1)
    ends += np.repeat(starts - np.concatenate((_NOTHING, ends))[begins], counts)
    small.news = NewRuns(event, np.repeat(ledger_ids, counts), ends - further - 1, ends)
    return small


def _steps(column: Int64s) -> tuple[Int64s, Int64s]:
    """Return where a column begins, and how far each value is from the one before it."""
    return column[:1], np.diff(column, prepend=column[:1])


def _narrow(column: Int64s) -> bytes:
    """Return numbers as bytes, all as narrow as the widest needs it, after one that says how narrow."""
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    number = next(at for at, kind in enumerate(_KINDS) if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return bytes((number,)) + column.astype(_KINDS[number]).tobytes()
