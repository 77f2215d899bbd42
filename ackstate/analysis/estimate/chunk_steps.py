"""First steps of a replay: check the chunks of a trace and convert them into the rows that a replay reads."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ackstate.analysis.estimate.chunk_codec import compact, encode
from ackstate.analysis.replay.acked import EventChunk
from ackstate.analysis.replay.polled import PolledChunk
from ackstate.analysis.trace.chunk_rows import (
    check_ledgers,
    damaged,
    events_of,
    has_intervals,
    ledgers_told,
    packed_columns,
    pieces,
    refuse,
)
from ackstate.analysis.trace.events import NAMES_ENTRIES, POLLED_KINDS, POLLED_ONLY, EventKind
from ackstate.position import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.replay.acked import Int64s

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
_NAMING = tuple(NAMES_ENTRIES)
_POLLED = np.array(sorted(POLLED_KINDS))
_OF_POLLS = ("until_ms", "number")
# At most this many events of a subscription are compacted together: for more, sorting costs more than it saves.
_EVENTS_THINNED = 2**16
_LEDGERS_AT_ONCE = 10_000


def chunk_columns(*, has_intervals: bool = False) -> tuple[str, ...]:
    """Return the columns that `packed_chunks` reads from a trace, maybe of polls."""
    names = (*EventChunk._fields, *(_OF_POLLS if has_intervals else ()))
    return (*_BOUNDS, *packed_columns(names), "ledgers")


def packed_chunks(batches: Iterable[pa.RecordBatch], *, is_compact: bool) -> Iterator[pa.RecordBatch]:
    """Yield the chunks of subscriptions as bytes, in rows of `PACKED` without a log; those of topics without events.

    Raises:
        TraceError: A chunk is damaged.
    """
    for batch in chain.from_iterable(map(pieces, batches)):
        is_polled = has_intervals(batch.schema)
        starts, columns = _sound_events(batch, (*EventChunk._fields, *(_OF_POLLS if is_polled else ())))
        _check_events(batch, starts, EventChunk(*columns[: len(EventChunk._fields)]))
        offsets = starts.tolist()
        runs = _runs(batch, offsets, events_max=_EVENTS_THINNED if is_compact else 0)
        subscriptions = batch["subscription"].to_pylist()
        rows: list[bytes | None] = []
        for run in runs:
            if not subscriptions[run[0]]:
                rows.append(None)
                continue
            mine = [_values(values, [offsets[row : row + 2] for row in run]) for values in columns]
            if is_polled:
                *exact, until_ms, number = mine
                rows.append(encode(PolledChunk.of(exact, until_ms=until_ms, number=number)))
                continue
            chunk = EventChunk(*mine)
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

    Args:
        batches: Chunks, with `LEDGER_COLUMNS`.

    Raises:
        TraceError: A chunk is damaged.
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
    if has_intervals(batch.schema):
        is_unknown = ~np.isin(kind, _POLLED)
    else:
        is_unknown = (kind < min(EventKind)) | (kind > max(EventKind))
        for each in POLLED_ONLY:
            is_unknown |= kind == each
    refuse(batch, offsets, is_unknown, "an event is of an unknown kind")
    columns[names.index("kind")] = kind.astype(np.uint8)  # Each later step passes over it, in an eighth of the time.
    return offsets, columns


def _check_events(batch: pa.RecordBatch, offsets: Int64s, events: EventChunk) -> None:
    """Raise `TraceError` if a row disagrees with its events on times or ledgers, or an event lacks its entries."""
    for name, ends in (("first_ts_ms", offsets[:-1]), ("last_ts_ms", offsets[1:] - 1)):
        for row in np.flatnonzero(batch[name].to_numpy() != events.ts_ms[ends])[:1].tolist():
            damaged(batch, row, f"{name!r} is not the time of its event")
    is_naming = events.is_any_of(_NAMING)
    is_wrong = (events.ledger_id < 0) | (events.first_entry < 0) | (events.last_entry > ENTRY_ID_MAX)
    refuse(
        batch, offsets, (is_naming & is_wrong) | (events.last_entry < events.first_entry), "an event names no entries"
    )
    check_ledgers(batch, offsets, events.kind, events.ledger_id, events.last_entry)
