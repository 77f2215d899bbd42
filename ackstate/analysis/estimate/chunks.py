"""Turns the chunks of a trace into the rows that a replay reads: compacted, grouped by subscription and sorted.

Any worker can compact a chunk, in any order. Little work then remains to be done chunk by chunk, so a subscription with
most of a trace keeps all cores busy. Traces that a replay would get wrong are refused; only `ackstate trace check`
compares single events within chunks.
"""

from __future__ import annotations

import struct
from functools import partial
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, final

import numpy as np
import pyarrow as pa
from pyroaring import BitMap

from ackstate.analysis.replay.acked import AckAccumulator, CompactChunk, EventChunk, NewlyAckedRuns, by_position
from ackstate.analysis.trace.check import ALIVE, LIVES, PERSIST_ENDS, PERSISTS
from ackstate.analysis.trace.chunks import (
    check_ledgers,
    damaged,
    events_of,
    ledgers_told,
    pack,
    packed_columns,
    pieces,
    unpack,
)
from ackstate.analysis.trace.events import EventKind, TraceError
from ackstate.analysis.trace.parquet import DAY_SEQ

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
    ("topic", pa.string()), ("subscription", pa.string()), ("first_seq", pa.int64()), ("chunk", pa.int32()),
    ("end_seq", pa.int64()), ("first_ts_ms", pa.int64()), ("last_ts_ms", pa.int64()), ("events", pa.binary()),
    ("log", LOG),
])  # fmt: skip
LEDGERS = pa.schema([
    ("topic", pa.string()), ("subscription", pa.string()), ("ledger_id", pa.int64()), ("entry_count", pa.int64()),
    ("published", pa.int64()), ("acked", pa.int64()),
])  # fmt: skip
_BOUNDS = ("topic", "subscription", "chunk", "first_seq", "first_ts_ms", "last_ts_ms")
_NAMES = ("topic", "subscription", "chunk")
LEDGER_COLUMNS = (*_NAMES, "event_count", "ledgers")
"""The columns that `ledgers` reads from a trace."""
_UNUSED_KIND = 15  # The only number between those of kinds that is of none
# At most this many events of a subscription are compacted together: for more, sorting costs more than it saves.
_EVENTS_THINNED = 2**16
_LEDGERS_AT_ONCE = 10_000


def packed_chunks(batches: Iterable[pa.RecordBatch], *, is_compact: bool) -> Iterator[pa.RecordBatch]:
    """Yield the chunks of subscriptions as bytes, in rows of `PACKED` without a log; those of topics without events."""
    for batch in chain.from_iterable(map(pieces, batches)):
        starts, columns = _sound_events(batch, EventChunk._fields)
        check_ledgers(batch, starts, EventChunk._fields, columns)
        offsets = starts.tolist()
        runs = _runs(batch, offsets, events_max=_EVENTS_THINNED if is_compact else 0)
        subscriptions = batch["subscription"].to_pylist()
        rows: list[bytes | None] = []
        for run in runs:
            if not subscriptions[run[0]]:
                rows.append(None)
                continue
            chunk = EventChunk(*(_values(values, [offsets[row : row + 2] for row in run]) for values in columns))
            rows.append(encode(compact(chunk) if is_compact else chunk))
        yield _packed_batch(batch, offsets, runs, rows)


def _packed_batch(
    batch: pa.RecordBatch,
    offsets: Sequence[int],
    runs: Sequence[Sequence[int]],
    events: Sequence[bytes | None],
) -> pa.RecordBatch:
    firsts, lasts = (pa.array([run[at] for run in runs], pa.int64()) for at in (0, -1))
    counts = np.array([sum(offsets[row + 1] - offsets[row] for row in run) for run in runs], np.int64)
    bounds = batch.select(list(_BOUNDS))
    begin, end = bounds.take(firsts), bounds.take(lasts)
    first_seq = begin["first_seq"].to_numpy()
    columns = {
        **{name: begin[name] for name in ("topic", "subscription", "chunk", "first_ts_ms")},
        "first_seq": begin["first_seq"], "end_seq": pa.array(first_seq + counts),
        "last_ts_ms": end["last_ts_ms"], "events": pa.array(events, pa.binary()), "log": pa.nulls(len(runs), LOG),
    }  # fmt: skip
    arrays = [columns[field.name].cast(field.type) for field in PACKED]
    return pa.RecordBatch.from_arrays(arrays, schema=PACKED)


def _runs(batch: pa.RecordBatch, offsets: Sequence[int], *, events_max: int) -> list[list[int]]:
    """Return the rows in groups, in each of which every chunk continues the one before it.

    The remaining work per chunk, on one core, costs as much for few events as for many.
    """
    topics, subscriptions, seqs, begins, ends = (
        batch[name].to_pylist() for name in ("topic", "subscription", "first_seq", "first_ts_ms", "last_ts_ms")
    )
    runs: list[list[int]] = []
    following, last_ms = None, 0  # The key and seq that would continue the last row, and its end.
    for row in sorted(range(len(seqs)), key=lambda row: (topics[row], subscriptions[row], seqs[row])):
        key, seq, end = (topics[row], subscriptions[row]), seqs[row], seqs[row] + offsets[row + 1] - offsets[row]
        goes_on = (*key, seq) == following and begins[row] >= last_ms
        if subscriptions[row] and goes_on and end - seqs[runs[-1][0]] <= events_max:
            runs[-1].append(row)
        else:
            runs.append([row])
        following, last_ms = (*key, end), ends[row]
    return runs


def _values(values: Int64s, bounds: Sequence[Sequence[int]]) -> Int64s:
    parts = [values[begin:end] for begin, end in bounds]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def ledgers(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows of `LEDGERS`: the highest entries that chunks name in each ledger, possibly in several rows.

    ``entry_count`` is one above the highest entry that any event names, ``published`` above that of a PUBLISH, and
    ``acked`` above that of an ACK or MARK_DELETE; 0 if there is none. Each subscription, and each topic with events of
    its own, also has a row with ledger -1.
    """
    found: dict[tuple[str, str, int], list[int]] = {}
    for batch in batches:
        told, named = ledgers_told(batch)
        offsets = told.tolist()
        keys = zip(batch["topic"].to_pylist(), batch["subscription"].to_pylist(), pairwise(offsets), strict=True)
        for topic, subscription, (begin, end) in keys:
            found.setdefault((topic, subscription, -1), [0, 0, 0])
            for each, *counts in named[:, begin:end].T.tolist():
                highest = found.setdefault((topic, subscription, each), [0, 0, 0])
                highest[:] = map(max, highest, counts)
        if len(found) > _LEDGERS_AT_ONCE:
            yield _ledger_batch(found)
            found.clear()
    if found:
        yield _ledger_batch(found)


def _ledger_batch(found: Mapping[tuple[str, str, int], Sequence[int]]) -> pa.RecordBatch:
    columns = zip(*((*key, *counts) for key, counts in found.items()), strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, LEDGERS, strict=True)], schema=LEDGERS
    )


def _sound_events(batch: pa.RecordBatch, names: Sequence[str]) -> tuple[Int64s, list[Int64s]]:
    """Return the result of `events_of`, refusing events of an unknown kind; `names` must include ``kind``."""
    offsets, columns = events_of(batch, names)
    kind = columns[names.index("kind")]
    is_unknown = (kind < min(EventKind)) | (kind > max(EventKind)) | (kind == _UNUSED_KIND)
    if is_unknown.any():
        row = int(np.searchsorted(offsets, is_unknown.argmax(), "right")) - 1
        damaged(batch, row, "an event is of an unknown kind")
    columns[names.index("kind")] = kind.astype(np.uint8)  # Each later step passes over it, in an eighth of the time.
    return offsets, columns


# A sequence of these events is reduced to one.
_MANY = tuple(kind for kind in ALIVE if kind not in (*PERSISTS, EventKind.RESET))


@final
class InterleavingCheck:
    """Follows the chunks of a subscription, and refuses an action after its crash or a persist begun within another.

    `ackstate.analysis.trace.check.EventOrder` checks more, event by event: which persist ends, and recoveries of a
    process whose death was not recorded. A recorder within the process alone cannot record when it died.
    """

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key
        self._is_dead = False
        self._is_persisting = False

    def check(self, chunk: EventChunk) -> None:
        """Check the next chunk, compact or not."""
        few = np.flatnonzero(~chunk.is_any_of(_MANY))
        following = 0
        for at, kind in zip(few.tolist(), chunk.kind[few].tolist(), strict=True):
            self._refuse_if(self._is_dead and at > following, chunk, following)
            self._refuse_if(self._is_dead and kind in ALIVE, chunk, at)
            self._refuse_if(self._is_persisting and kind == EventKind.PERSIST_BEGUN, chunk, at)
            if kind in LIVES:
                self._is_dead = kind == EventKind.CRASH
            if kind in LIVES or kind in PERSIST_ENDS:
                self._is_persisting = False
            elif kind == EventKind.PERSIST_BEGUN:
                self._is_persisting = True
            following = at + 1
        self._refuse_if(self._is_dead and following < len(chunk.kind), chunk, following)

    def _refuse_if(self, is_wrong: bool, chunk: EventChunk, at: int) -> None:
        if is_wrong:
            topic, subscription = self._key
            raise TraceError(
                f"two cursors under one name, seen at {chunk.ts_ms[at]} ms: subscription {subscription!r} of {topic}: "
                "run ackstate trace check for details; record each cursor under a name of its own"
            )


_KEY = ("topic", "subscription")
# `seq` of the row that precedes the first chunk.
_HEAD_SEQ = -1


def sorted_chunks(trace: TraceSource, policies: Sequence[Policy | None]) -> Rows:
    """Return the chunks of subscriptions as bytes, sorted, and compacted if the policies allow it.

    Compaction runs before the chunks of a subscription are grouped, on all cores for any share of the trace.
    """
    is_small = all(map(takes_compact, policies))
    columns = (*_BOUNDS, *packed_columns(EventChunk._fields), "ledgers")
    chunks = trace.read(columns, partial(packed_chunks, is_compact=is_small), PACKED)
    named = trace.read(LEDGER_COLUMNS, ledgers, LEDGERS).together(("topic",))
    is_log_needed = any(policy is not None for policy in policies)
    return chunks.plus(named.through(partial(_heads, is_log_needed=is_log_needed), PACKED)).together(
        _KEY, ("first_seq",)
    )


def by_subscription(
    batches: Iterable[pa.RecordBatch], days: Sequence[str] = ()
) -> Iterator[tuple[Key, dict[int, int], Iterator[EventChunk]]]:
    """Yield each subscription of some `sorted_chunks`: its key, its topic's message log, and its chunks in order.

    The caller must read the chunks before it takes the next subscription. The log maps ledger id to entry count,
    rising; it is empty if no policy needs it.
    """
    rows = ((batch, index) for batch in batches for index in range(batch.num_rows))
    for key, mine in groupby(rows, key=_key):
        in_order = _in_order(mine, days)
        if not key[1]:
            # Chunks of the topic itself, with its PUBLISH events.
            for _ in in_order:
                pass
            continue
        log: dict[int, int] = {}
        first: list[_Row] = []
        for batch, index in in_order:
            if batch["first_seq"][index].as_py() >= 0:
                first = [(batch, index)]
                break
            log = {each["ledger_id"]: each["entry_count"] for each in batch["log"][index].as_py()}
        yield key, log, _chunks(key, chain(first, in_order))


def takes_compact(policy: Policy | None) -> bool:
    """Return whether chunks may be compacted for a policy."""
    return policy is None or policy.ignores_deliveries


def _heads(batches: Iterable[pa.RecordBatch], *, is_log_needed: bool) -> Iterator[pa.RecordBatch]:
    """Check that no ack is beyond the published entries of its topic, and yield the logs, if they are needed.

    Ledgers are not checked in a topic without PUBLISH events, nor before the first ledger that has some.
    `ackstate trace check` finds missing entries in between.
    """
    rows = (row for batch in batches for row in zip(*(batch[name].to_pylist() for name in LEDGERS.names), strict=True))
    for topic, mine in groupby(rows, key=itemgetter(0)):
        subscriptions: set[str] = set()
        found: dict[int, tuple[int, ...]] = {}
        for _, subscription, ledger_id, *counts in mine:
            subscriptions.add(subscription)
            if ledger_id >= 0:
                found[ledger_id] = tuple(map(max, found.get(ledger_id, (0, 0, 0)), counts))
        _check_published(topic, found)
        if is_log_needed:
            log = [{"ledger_id": each, "entry_count": found[each][0]} for each in sorted(found)]
            head = dict.fromkeys(PACKED.names) | {"topic": topic, "first_seq": _HEAD_SEQ, "log": log}
            heads = [head | {"subscription": each} for each in sorted(subscriptions) if each]
            yield pa.RecordBatch.from_pylist(heads, PACKED)


def _check_published(topic: str, found: dict[int, tuple[int, ...]]) -> None:
    first = min((each for each, (_, published, _) in found.items() if published), default=None)
    if first is None:
        return
    for ledger_id in sorted(found):
        _, published, acked = found[ledger_id]
        if ledger_id >= first and acked > published:
            until = f"up to entry {published - 1}" if published else "not at all"
            raise TraceError(
                f"{ledger_id}:{acked - 1} of {topic} is acked, but the ledger was published {until}: run ackstate "
                "trace check for details; record the trace again, or remove its PUBLISH events"
            )


def _key(row: _Row) -> Key:
    batch, index = row
    return batch["topic"][index].as_py(), batch["subscription"][index].as_py()


def _in_order(rows: Iterable[_Row], days: Sequence[str]) -> Iterator[_Row]:
    """Pass on the rows of a subscription; check that each chunk continues the previous one, in `seq` and in time."""
    seq, last_ms = 0, None
    for batch, index in rows:
        first_seq = batch["first_seq"][index].as_py()
        if first_seq >= 0:
            if days:
                # Every day starts from 0.
                seq = max(seq, first_seq // DAY_SEQ * DAY_SEQ)
            first_ms = batch["first_ts_ms"][index].as_py()
            problem = (
                "repeats a seq" if first_seq < seq
                else "comes after a gap in seq" if first_seq > seq
                else "begins before the previous chunk ended" if last_ms is not None and first_ms < last_ms
                else ""
            )  # fmt: skip
            if problem:
                when = f"{days[first_seq // DAY_SEQ]}: " if days else ""
                of_whom = " of ".join(filter(None, reversed(_key((batch, index)))))
                raise TraceError(
                    f"{when}chunk {batch['chunk'][index].as_py()} of {of_whom} {problem}: run ackstate trace check for "
                    "details; convert the trace again"
                )
            seq, last_ms = batch["end_seq"][index].as_py(), batch["last_ts_ms"][index].as_py()
        yield batch, index


def _chunks(key: Key, rows: Iterable[_Row]) -> Iterator[EventChunk]:
    one_cursor = InterleavingCheck(key)
    for batch, index in rows:
        chunk = decode(memoryview(batch["events"][index].as_buffer()))
        one_cursor.check(chunk)
        yield chunk
