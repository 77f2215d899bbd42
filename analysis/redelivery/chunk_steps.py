"""First steps of a replay: they check the chunks of a trace and turn them into the rows that a replay takes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ackstate.analysis.redelivery.acked import Chunk
from ackstate.analysis.redelivery.thinning import packed, thinned
from ackstate.analysis.trace.events import NAMES_ENTRIES, EventKind, TraceError
from ackstate.position import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.redelivery.acked import Bools, Int64s

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
CHUNK_COLUMNS = (*_BOUNDS, *Chunk._fields)
BOUND_COLUMNS = (*_BOUNDS, "kind")
LEDGER_COLUMNS = ("topic", "subscription", "chunk", "kind", "ledger_id", "last_entry")
DEATH_COLUMNS = ("chunk", "ts_ms", "kind")
DEATHS = pa.schema([("ts_ms", pa.int64())])
_NAMING = tuple(NAMES_ENTRIES)
# So many events of a subscription are made small together: of more, sorting them takes longer than it saves.
_EVENTS_THINNED = 2**16
_LEDGERS_AT_ONCE = 10_000


def packed_chunks(batches: Iterable[pa.RecordBatch], *, is_counted: bool) -> Iterator[pa.RecordBatch]:
    """Yield the chunks of subscriptions as bytes, in rows of `PACKED` without a log; those of topics without events.

    Args:
        batches: Chunks, with `CHUNK_COLUMNS`.
        is_counted: Whether all policies only count, so that chunks are made small; see `thinned`.

    Raises:
        TraceError: A chunk is damaged.
    """
    for batch in batches:
        offsets, lists = _sound_lists(batch, Chunk._fields)
        _check_events(batch, offsets, Chunk(*lists))
        runs = _runs(batch, offsets, events_max=_EVENTS_THINNED if is_counted else 0)
        subscriptions = batch["subscription"].to_pylist()
        rows: list[bytes | None] = []
        for run in runs:
            if not subscriptions[run[0]]:
                rows.append(None)
                continue
            chunk = Chunk(*(_values(values, [offsets[row : row + 2] for row in run]) for values in lists))
            rows.append(packed(thinned(chunk) if is_counted else chunk))
        yield _packed_batch(batch, offsets, runs, rows)


def chunk_bounds(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield where the chunks begin and end, in rows of `PACKED` without events.

    Args:
        batches: Chunks, with `BOUND_COLUMNS`.

    Raises:
        TraceError: A chunk is damaged.
    """
    for batch in batches:
        offsets, _ = _sound_lists(batch, ("kind",))
        yield _packed_batch(batch, offsets, [[row] for row in range(batch.num_rows)], [None] * batch.num_rows)


def _packed_batch(
    batch: pa.RecordBatch, offsets: Sequence[int], runs: Sequence[Sequence[int]], events: Sequence[bytes | None]
) -> pa.RecordBatch:
    firsts, lasts = (pa.array([run[at] for run in runs], pa.int64()) for at in (0, -1))
    counts = np.array([sum(offsets[row + 1] - offsets[row] for row in run) for run in runs], np.int64)
    bounds = batch.select(list(_BOUNDS))
    begin, end = bounds.take(firsts), bounds.take(lasts)
    columns = {
        **{name: begin[name] for name in ("topic", "subscription", "first_seq", "chunk", "first_ts_ms")},
        "end_seq": pa.array(begin["first_seq"].to_numpy() + counts),
        "last_ts_ms": end["last_ts_ms"],
        "events": pa.array(events, pa.binary()),
        "log": pa.nulls(len(runs), LOG),
    }
    return pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in PACKED], schema=PACKED)


def _runs(batch: pa.RecordBatch, offsets: Sequence[int], *, events_max: int) -> list[list[int]]:
    """Return the rows, those together of which one goes on where the other ends.

    What is done with a chunk on one core, after it was made small, takes as long for few events as for many.

    Args:
        batch: Some chunks, in any order.
        offsets: Where the events of each begin.
        events_max: What is put together has no more.
    """
    topics, subscriptions, seqs, begins, ends = (
        batch[name].to_pylist() for name in ("topic", "subscription", "first_seq", "first_ts_ms", "last_ts_ms")
    )
    runs: list[list[int]] = []
    following, last_ms = None, 0  # What would go on where the last of them ends, and when it ends.
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
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int64, copy=False)


def ledgers(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows of `LEDGERS`: the highest entries of each ledger that chunks name, possibly in several rows.

    ``entry_count`` is one above the highest entry that any event names, ``published`` that a PUBLISH names, and
    ``acked`` that an ACK or MARK_DELETE names; 0 if there is none. Each subscription also has a row with ledger -1.

    Args:
        batches: Chunks, with `LEDGER_COLUMNS`.

    Raises:
        TraceError: A chunk is damaged.
    """
    found: dict[tuple[str, str, int], list[int]] = {}
    for batch in batches:
        offsets, (kind, ledger_id, last) = _sound_lists(batch, ("kind", "ledger_id", "last_entry"))
        published = kind == EventKind.PUBLISH
        acked = (kind == EventKind.ACK) | (kind == EventKind.MARK_DELETE)
        keys = zip(batch["topic"].to_pylist(), batch["subscription"].to_pylist(), pairwise(offsets), strict=True)
        for topic, subscription, (begin, end) in keys:
            found.setdefault((topic, subscription, -1), [0, 0, 0])
            for at, chosen in enumerate((None, published, acked)):
                mine = slice(begin, end) if chosen is None else begin + np.flatnonzero(chosen[begin:end])
                for each, count in _counts(ledger_id[mine], last[mine]).items():
                    highest = found.setdefault((topic, subscription, each), [0, 0, 0])
                    highest[at] = max(highest[at], count)
        if len(found) > _LEDGERS_AT_ONCE:
            yield _ledger_batch(found)
            found.clear()
    if found:
        yield _ledger_batch(found)


def _counts(ledger_id: Int64s, last: Int64s) -> dict[int, int]:
    """Return by ledger one above the highest entry; what names no ledger is left out."""
    found: dict[int, int] = {}
    runs = np.flatnonzero(np.append(True, ledger_id[1:] != ledger_id[:-1])[: len(ledger_id)])
    counts = np.maximum.reduceat(last, runs) + 1 if len(runs) else runs
    for each, count in set(zip(ledger_id[runs].tolist(), counts.tolist(), strict=True)):
        if each >= 0:
            found[each] = max(found.get(each, 0), count)
    return found


def deaths(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield, in rows of `DEATHS`, when processes died, once for each subscription.

    Args:
        batches: Chunks, with `DEATH_COLUMNS`.

    Raises:
        TraceError: A chunk is damaged.
    """
    for batch in batches:
        _, (ts_ms, kind) = _sound_lists(batch, ("ts_ms", "kind"))
        yield pa.RecordBatch.from_arrays([pa.array(ts_ms[kind == EventKind.CRASH], pa.int64())], schema=DEATHS)


def _ledger_batch(found: Mapping[tuple[str, str, int], Sequence[int]]) -> pa.RecordBatch:
    columns = zip(*((*key, *counts) for key, counts in found.items()), strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, LEDGERS, strict=True)], schema=LEDGERS
    )


def _sound_lists(batch: pa.RecordBatch, names: Sequence[str]) -> tuple[list[int], list[Int64s]]:
    """Return where each row's lists begin, and all rows' values.

    Raises:
        TraceError: A row's lists do not belong together: not equally long, empty, with nulls or of an unknown kind.
    """
    columns = [batch[name] for name in names]
    offsets = columns[0].offsets.to_numpy() - columns[0].offsets[0].as_py()
    sound = np.append(np.diff(offsets) > 0, True)
    for column in columns:
        if column.flatten().null_count:
            _mark(sound, offsets, column.flatten().is_null().to_numpy(zero_copy_only=False))
        if column.null_count:
            sound[:-1] &= column.is_valid().to_numpy(zero_copy_only=False)
        theirs = column.offsets.to_numpy() - column.offsets[0].as_py()
        sound[:-1] &= np.diff(theirs) == np.diff(offsets)
    if sound.all() and "kind" in names:
        kinds = batch["kind"].flatten().to_numpy()
        _mark(sound, offsets, (kinds < min(EventKind)) | (kinds > max(EventKind)))
    _check_sound(batch, sound)
    return offsets.tolist(), [column.flatten().to_numpy() for column in columns]


def _check_events(batch: pa.RecordBatch, offsets: Sequence[int], events: Chunk) -> None:
    """Raise `TraceError` if a row says another time than its events, or one of them names no entries that it must."""
    begins, ends = np.array(offsets[:-1], np.int64), np.array(offsets[1:], np.int64) - 1
    sound = np.ones(len(offsets), np.bool_)
    sound[:-1] &= batch["first_ts_ms"].to_numpy() == events.ts_ms[begins]
    sound[:-1] &= batch["last_ts_ms"].to_numpy() == events.ts_ms[ends]
    is_naming = events.is_any_of(_NAMING)
    is_wrong = (events.ledger_id < 0) | (events.first_entry < 0) | (events.last_entry > ENTRY_ID_MAX)
    _mark(sound, offsets, (is_naming & is_wrong) | (events.last_entry < events.first_entry))
    _check_sound(batch, sound)


def _mark(sound: Bools, offsets: Sequence[int] | Int64s, is_wrong: Bools) -> None:
    """Note that the rows are damaged in which some values are wrong."""
    sound[np.searchsorted(offsets, np.flatnonzero(is_wrong), "right") - 1] = False


def _check_sound(batch: pa.RecordBatch, sound: Bools) -> None:
    if not sound.all():
        row = int(np.argmin(sound))
        keys = [batch[name][row].as_py() for name in ("chunk", "subscription", "topic") if name in batch.schema.names]
        raise TraceError(f"not a trace, damaged chunk {' of '.join(str(each) for each in keys if each != '')}")
