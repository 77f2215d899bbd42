"""Turns the chunks of a trace into the rows that a replay reads: compacted, grouped by subscription and sorted.

Any worker can compact a chunk, in any order. Little work then remains to be done chunk by chunk, so a subscription with
most of a trace keeps all cores busy. The events were checked when the trace was written.
"""

from __future__ import annotations

import struct
from functools import partial
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from ackstate.analysis.replay.acked import AckAccumulator, CompactChunk, EventChunk, NewlyAckedRuns, by_position
from ackstate.analysis.trace.chunks import damaged, events_of, ledgers_told, pack, packed_columns, pieces, unpack
from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.estimate.engine import Rows, TraceSource
    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.policy import Policy

    Key = tuple[str, str]
    _Row = tuple[pa.RecordBatch, int]


_MARKS = (EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED, EventKind.PERSIST_FAILED)
_PLAIN = (EventKind.PUBLISH, EventKind.DELIVER, EventKind.ACK, EventKind.MARK_DELETE)
_HEADER = struct.Struct("<qqq")  # events, runs, ledgers; without runs -1
_PLAIN_FORM = -1
_NOTHING = np.zeros(1, np.int64)
_FIELDS = EventChunk._fields
_KINDS = np.array(EventKind)


def compact(chunk: EventChunk) -> EventChunk:
    """Return a chunk as a `CompactChunk`; a chunk with events other than acks and persists is returned unchanged.

    Both have the same curves, as recorded and under policies that ignore deliveries.
    """
    is_mark = chunk.is_any_of(_MARKS)
    if not (is_mark | chunk.is_any_of(_PLAIN)).all():
        return chunk
    is_last = np.append((chunk.ts_ms[1:] != chunk.ts_ms[:-1]) | is_mark[1:] | is_mark[:-1], True)
    lasts = np.flatnonzero(is_last)
    none = np.full(len(lasts), -1)
    small = CompactChunk(chunk.ts_ms[lasts], chunk.kind[lasts], none, none, none)
    acks = AckAccumulator()
    news = by_position(acks.take(chunk))
    small.acked = acks.acked
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
        columns = (*chunk[:-1], chunk.last_entry - chunk.first_entry)
        return b"".join((_HEADER.pack(len(chunk.kind), _PLAIN_FORM, 0), *map(pack, columns)))
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
        return EventChunk(ts_ms, kind, ledger_id, first, first + further)
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


LOG = pa.list_(pa.struct([("ledger_id", pa.int64()), ("entry_count", pa.int64())]))
"""A message log, rising."""
PACKED = pa.schema([
    ("topic", pa.string()), ("subscription", pa.string()), ("first_seq", pa.int64()), ("events", pa.binary()),
    ("log", LOG),
])  # fmt: skip
LEDGERS = pa.schema([
    ("topic", pa.string()), ("subscription", pa.string()), ("ledger_id", pa.int64()), ("entry_count", pa.int64()),
])  # fmt: skip
_PLACE = ("topic", "subscription", "first_seq")
# At most this many events of a subscription are compacted together: for more, sorting costs more than it saves.
_EVENTS_THINNED = 2**16
_LEDGERS_AT_ONCE = 10_000


def packed_chunks(batches: Iterable[pa.RecordBatch], *, is_compact: bool) -> Iterator[pa.RecordBatch]:
    """Yield the chunks of subscriptions as bytes, in rows of `PACKED` without a log."""
    of_subscriptions = (batch.filter(pc.not_equal(batch["subscription"], "")) for batch in batches)
    for batch in chain.from_iterable(map(pieces, of_subscriptions)):
        starts, columns = events_of(batch, EventChunk._fields)
        at = _FIELDS.index("kind")
        is_known = np.isin(columns[at], _KINDS)
        if not is_known.all():
            damaged(batch, int(np.searchsorted(starts, is_known.argmin(), "right")) - 1, "an event is of no kind")
        columns[at] = columns[at].astype(np.uint8)  # Each later step passes over it, in an eighth of the time.
        offsets = starts.tolist()
        runs = _runs(batch, offsets, events_max=_EVENTS_THINNED if is_compact else 0)
        rows: list[bytes] = []
        for run in runs:
            chunk = EventChunk(*(_values(values, [offsets[row : row + 2] for row in run]) for values in columns))
            rows.append(encode(compact(chunk) if is_compact else chunk))
        begins = batch.select(_PLACE).take(pa.array([run[0] for run in runs], pa.int64()))
        arrays = [*(begins[name].cast(PACKED.field(name).type) for name in _PLACE), pa.array(rows, pa.binary())]
        yield pa.RecordBatch.from_arrays([*arrays, pa.nulls(len(runs), LOG)], schema=PACKED)


def _runs(batch: pa.RecordBatch, offsets: Sequence[int], *, events_max: int) -> list[list[int]]:
    """Return the rows in groups, in each of which every chunk continues the one before it.

    The remaining work per chunk, on one core, costs as much for few events as for many.
    """
    places = list(zip(*(batch[name].to_pylist() for name in _PLACE), strict=True))
    runs: list[list[int]] = []
    following = None  # The place that would continue the last row.
    for row in sorted(range(len(places)), key=places.__getitem__):
        *key, seq = places[row]
        end = seq + offsets[row + 1] - offsets[row]
        if places[row] == following and end - places[runs[-1][0]][-1] <= events_max:
            runs[-1].append(row)
        else:
            runs.append([row])
        following = (*key, end)
    return runs


def _values(values: Int64s, bounds: Sequence[Sequence[int]]) -> Int64s:
    parts = [values[begin:end] for begin, end in bounds]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def ledgers(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows of `LEDGERS`: for each ledger that chunks name, possibly in several rows, one above the highest entry.

    Each subscription also has a row with ledger -1.
    """
    found: dict[tuple[str, str, int], int] = {}
    for batch in batches:
        told, named = ledgers_told(batch)
        keys = zip(batch["topic"].to_pylist(), batch["subscription"].to_pylist(), pairwise(told.tolist()), strict=True)
        for topic, subscription, (begin, end) in keys:
            found[topic, subscription, -1] = 0
            for ledger_id, count in named[:2, begin:end].T.tolist():
                key = topic, subscription, ledger_id
                found[key] = max(found.get(key, 0), count)
        if len(found) > _LEDGERS_AT_ONCE:
            yield _ledger_batch(found)
            found.clear()
    if found:
        yield _ledger_batch(found)


def _ledger_batch(found: Mapping[tuple[str, str, int], int]) -> pa.RecordBatch:
    columns = zip(*((*key, count) for key, count in found.items()), strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, LEDGERS, strict=True)], schema=LEDGERS
    )


_KEY = ("topic", "subscription")
# `seq` of the row that precedes the first chunk.
_HEAD_SEQ = -1


def sorted_chunks(trace: TraceSource, policies: Sequence[Policy | None]) -> Rows:
    """Return the chunks of subscriptions as bytes, sorted, and compacted if the policies allow it.

    Compaction runs before the chunks of a subscription are grouped, on all cores for any share of the trace.
    """
    is_small = all(map(takes_compact, policies))
    columns = (*_PLACE, "chunk", *packed_columns(_FIELDS))
    chunks = trace.read(columns, partial(packed_chunks, is_compact=is_small), PACKED)
    if any(policy is not None for policy in policies):
        named = trace.read((*_KEY, "chunk", "ledgers"), ledgers, LEDGERS).together(("topic",))
        chunks = chunks.plus(named.through(_heads, PACKED))
    return chunks.together(_KEY, ("first_seq",))


def by_subscription(
    batches: Iterable[pa.RecordBatch],
) -> Iterator[tuple[Key, dict[int, int], Iterator[EventChunk]]]:
    """Yield each subscription of some `sorted_chunks`: its key, its topic's message log, and its chunks in order.

    The caller must read the chunks before it takes the next subscription. The log maps ledger id to entry count,
    rising; it is empty if no policy needs it.
    """
    rows = ((batch, index) for batch in batches for index in range(batch.num_rows))
    for key, mine in groupby(rows, key=_key):
        yield key, *_log_and_chunks(mine)


def _log_and_chunks(rows: Iterator[_Row]) -> tuple[dict[int, int], Iterator[EventChunk]]:
    batch, index = next(rows)
    log = {each["ledger_id"]: each["entry_count"] for each in batch["log"][index].as_py() or ()}
    first = [(batch, index)] if batch["first_seq"][index].as_py() != _HEAD_SEQ else []
    return log, (decode(memoryview(batch["events"][index].as_buffer())) for batch, index in chain(first, rows))


def takes_compact(policy: Policy | None) -> bool:
    """Return whether chunks may be compacted for a policy."""
    return policy is None or policy.ignores_deliveries


def _heads(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield, for each subscription, its topic's message log."""
    rows = (row for batch in batches for row in zip(*(batch[name].to_pylist() for name in LEDGERS.names), strict=True))
    for topic, mine in groupby(rows, key=itemgetter(0)):
        subscriptions: set[str] = set()
        counts: dict[int, int] = {}
        for _, subscription, ledger_id, count in mine:
            subscriptions.add(subscription)
            if ledger_id >= 0:
                counts[ledger_id] = max(counts.get(ledger_id, 0), count)
        log = [{"ledger_id": each, "entry_count": count} for each, count in sorted(counts.items())]
        head = dict.fromkeys(PACKED.names) | {"topic": topic, "first_seq": _HEAD_SEQ, "log": log}
        yield pa.RecordBatch.from_pylist(
            [head | {"subscription": each} for each in sorted(subscriptions) if each], PACKED
        )


def _key(row: _Row) -> Key:
    batch, index = row
    return batch["topic"][index].as_py(), batch["subscription"][index].as_py()
