"""Make a chunk small before it is brought together with the others of its subscription: any worker can, in any order.

What is left to do one chunk after another is little, so that a subscription with most of a trace keeps all cores busy.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from analysis.redelivery.acked import AckedFold, Chunk, NewRuns, Thinned, by_position
from analysis.trace.events import EventKind

if TYPE_CHECKING:
    from analysis.redelivery.acked import Int64s

_MARKS = (EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED, EventKind.PERSIST_FAILED)
_PLAIN = (EventKind.PUBLISH, EventKind.DELIVER, EventKind.ACK, EventKind.MARK_DELETE)
_HEADER = struct.Struct("<qqq")  # events, runs, ledgers; without runs -1


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
    kind = chunk.kind.astype(np.int8)
    if not isinstance(chunk, Thinned):
        columns = (chunk.ts_ms, chunk.ledger_id, chunk.first_entry, chunk.last_entry)
        return b"".join((_HEADER.pack(len(kind), -1, 0), *(column.tobytes() for column in columns), kind.tobytes()))
    news = chunk.news
    begins = np.flatnonzero(np.diff(news.ledger_id, prepend=-1))
    header = _HEADER.pack(len(kind), len(news.event), len(begins))
    # An entry id is less than 2**32, a bitmap holds no other.
    runs = [column.astype(np.uint32).tobytes() for column in (news.event, news.first, news.end - 1)]
    ledgers = (begins.tobytes(), news.ledger_id[begins].tobytes())
    return b"".join((header, chunk.ts_ms.tobytes(), *ledgers, *runs, kind.tobytes()))


def unpacked(data: memoryview) -> Chunk:
    """Return the chunk that was packed."""
    events, runs, ledgers = _HEADER.unpack_from(data)
    at = _HEADER.size

    def column(count: int, kind: type[np.integer]) -> Int64s:
        nonlocal at
        found = np.frombuffer(data, kind, count, at)
        at += found.nbytes
        return found.astype(np.int64, copy=False)

    if runs < 0:
        ts_ms, ledger_id, first, last = (column(events, np.int64) for _ in range(4))
        return Chunk(ts_ms, column(events, np.int8), ledger_id, first, last)
    ts_ms, begins, ledger_ids = column(events, np.int64), column(ledgers, np.int64), column(ledgers, np.int64)
    event, first, last = (column(runs, np.uint32) for _ in range(3))
    none = np.full(events, -1)
    small = Thinned(ts_ms, column(events, np.int8), none, none, none)
    small.news = NewRuns(event, np.repeat(ledger_ids, np.diff(np.append(begins, runs))), first, last + 1)
    return small
