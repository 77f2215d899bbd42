"""Where the chunks of a replay come from: a DataFrame, or the files of a trace, which workers then read themselves.

Spark takes lists apart and puts them together again, value by value, on the way to a Python worker: that takes several
times as long as the replay. What leaves a worker here are chunks as bytes, made small where the policies allow it.
"""

from __future__ import annotations

import gc
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from ackstate.analysis.redelivery.acked import Chunk
from ackstate.analysis.redelivery.thinning import packed, thinned
from ackstate.analysis.trace.events import NAMES_ENTRIES, EventKind, TraceError
from ackstate.analysis.trace.parquet import Span, check_trace, trace_files
from ackstate.position import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ackstate.analysis.redelivery.acked import Bools, Int64s

    _Step = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

_LISTS = Chunk._fields
_KEYS = ("topic", "subscription", "first_seq", "chunk", "first_ts_ms", "last_ts_ms")
_PACKED_SCHEMA = "topic string, subscription string, first_seq bigint, events binary"
_PACKED = pa.schema([
    ("topic", pa.string()), ("subscription", pa.string()), ("first_seq", pa.int64()), ("events", pa.binary()),
])  # fmt: skip
_LEDGER_SCHEMA = "topic string, subscription string, ledger_id bigint, entry_count bigint"
_NAMING = tuple(NAMES_ENTRIES)
# A worker holds so many chunks of a file at once.
_CHUNKS_AT_ONCE = 64
# So many events of a subscription are made small together: of more, sorting them takes longer than it saves.
_EVENTS_THINNED = 2**16
_TASKS_PER_CORE = 4
_LEDGERS_AT_ONCE = 10_000
_NAMED = ("topic", "subscription", "chunk", "ledger_id", "last_entry")
_DATED = ("chunk", "ts_ms", "kind")
_DEATH_SCHEMA = "ts_ms bigint"
_TOLD = ("topic", "chunk", "kind", "ledger_id", "last_entry")
_REACHED_SCHEMA = "topic string, ledger_id bigint, published bigint, acked bigint"
_LEDGER_NAMES = ["topic", "subscription", "ledger_id", "entry_count"]


class TraceSource(Protocol):
    """A trace that can be replayed."""

    def span(self) -> Span:
        """Return what it covers; without chunks the times are 0."""
        ...

    def packed(self, *, is_counted: bool) -> DataFrame:
        """Return ``topic, subscription, first_seq, events`` of each chunk of a subscription, in any order.

        Args:
            is_counted: Whether all policies only count, so that chunks are made small; see `thinned`.
        """
        ...

    def crashes(self) -> DataFrame:
        """Return ``ts_ms``: when processes died, once for each subscription, in any order."""
        ...

    def reached(self) -> DataFrame:
        """Return ``topic, ledger_id, published, acked``, in several rows: one above the highest entry, 0 for none."""
        ...

    def ledgers(self) -> DataFrame:
        """Return ``topic, subscription, ledger_id, entry_count``, maybe in several rows: one above the highest entry.

        A subscription, or a topic, whose chunks name no ledger has a row with ledger -1.
        """
        ...


class FrameSource(NamedTuple):
    """A trace as a DataFrame with columns as in `ackstate.analysis.trace.events`."""

    trace: DataFrame

    def span(self) -> Span:
        """See `TraceSource`."""
        begin, end = F.min("first_ts_ms").alias("begin_ms"), F.max("last_ts_ms").alias("end_ms")
        row = self.trace.agg(begin, end, F.count("*").alias("chunks")).collect()[0]
        return Span(row["begin_ms"] or 0, row["end_ms"] or 0, row["chunks"])

    def packed(self, *, is_counted: bool) -> DataFrame:
        """See `TraceSource`."""
        chunks = self.trace.select(*_KEYS, *_LISTS)
        return chunks.mapInArrow(partial(_packed_batches, is_counted=is_counted), _PACKED_SCHEMA)

    def ledgers(self) -> DataFrame:
        """See `TraceSource`."""
        return self.trace.select(*_NAMED).mapInArrow(_highest, _LEDGER_SCHEMA)

    def crashes(self) -> DataFrame:
        """See `TraceSource`."""
        return self.trace.select(*_DATED).mapInArrow(_deaths, _DEATH_SCHEMA)

    def reached(self) -> DataFrame:
        """See `TraceSource`."""
        return self.trace.select(*_TOLD).mapInArrow(_reached, _REACHED_SCHEMA)


class FileSource(NamedTuple):
    """A trace whose files every worker sees by their paths, and reads a row group at a time."""

    spark: SparkSession
    files: tuple[str, ...]
    covered: Span

    @classmethod
    def of(cls, spark: SparkSession, path: Path, covered: Span | None = None) -> Self:
        """Find the files of a trace, a file or a directory.

        Args:
            spark: The session.
            path: Where the trace is.
            covered: What `ackstate.analysis.trace.parquet.check_trace` returned of it; None to have it called here.

        Raises:
            TraceError: It is no trace, as `check_trace`.
            UnsupportedVersionError: A newer release wrote it.
        """
        files = tuple(str(file.absolute()) for file in trace_files(path))
        return cls(spark, files, check_trace(path) if covered is None else covered)

    def span(self) -> Span:
        """See `TraceSource`."""
        return self.covered

    def packed(self, *, is_counted: bool) -> DataFrame:
        """See `TraceSource`."""
        return self._read((*_KEYS, *_LISTS), partial(_packed_batches, is_counted=is_counted), _PACKED_SCHEMA)

    def ledgers(self) -> DataFrame:
        """See `TraceSource`."""
        return self._read(_NAMED, _highest, _LEDGER_SCHEMA)

    def crashes(self) -> DataFrame:
        """See `TraceSource`."""
        return self._read(_DATED, _deaths, _DEATH_SCHEMA)

    def reached(self) -> DataFrame:
        """See `TraceSource`."""
        return self._read(_TOLD, _reached, _REACHED_SCHEMA)

    def _read(self, columns: Sequence[str], follow: _Step, schema: str) -> DataFrame:
        """Read the row groups of all files on all cores, also those of a single file."""
        tasks = _TASKS_PER_CORE * self.spark.sparkContext.defaultParallelism
        shares = min(-(-tasks // len(self.files)), self.covered.row_groups_max)
        read = partial(_row_groups, files=self.files, shares=shares, columns=columns)
        numbers = self.spark.range(0, len(self.files) * shares, numPartitions=min(tasks, len(self.files) * shares))
        return numbers.mapInArrow(lambda batches: follow(read(batches)), schema)


def source_of(trace: DataFrame | TraceSource) -> TraceSource:
    """Return a trace as a source, whatever it comes as."""
    return FrameSource(trace) if isinstance(trace, DataFrame) else trace


def _row_groups(
    batches: Iterable[pa.RecordBatch], *, files: Sequence[str], shares: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield, a few chunks at a time, some columns of shares of files: share ``n % shares`` of file ``n // shares``."""
    _settle()
    for batch in batches:
        for number in batch.column(0).to_pylist():
            file = files[number // shares]
            try:
                with _opened(file) as parquet:
                    mine = range(number % shares, parquet.num_row_groups, shares)
                    if mine:
                        yield from parquet.iter_batches(_CHUNKS_AT_ONCE, row_groups=list(mine), columns=list(columns))
            except (pa.ArrowException, OSError) as error:
                raise TraceError(f"{file}: not a readable Parquet file, {error}") from error


@cache
def _settle() -> None:
    """Take what a worker has imported out of the garbage collection that Spark has it do after each task, in 40 ms."""
    gc.freeze()


def _opened(file: str) -> pq.ParquetFile:
    # Damage inside a page may decompress to other numbers.
    return pq.ParquetFile(file, page_checksum_verification=True)


def _packed_batches(batches: Iterable[pa.RecordBatch], *, is_counted: bool) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        offsets, lists = _sound_lists(batch, _LISTS)
        _check_events(batch, offsets, Chunk(*lists))
        runs = _runs(batch, offsets, events_max=_EVENTS_THINNED if is_counted else 0)
        rows = []
        for run in runs:
            chunk = Chunk(*(_values(values, [offsets[row : row + 2] for row in run]) for values in lists))
            rows.append(packed(thinned(chunk) if is_counted else chunk))
        firsts = pa.array([run[0] for run in runs], pa.int64())
        keys = batch.select(["topic", "subscription", "first_seq"]).take(firsts)
        columns = [column.cast(field.type) for column, field in zip(keys.columns, _PACKED, strict=False)]
        yield pa.RecordBatch.from_arrays([*columns, pa.array(rows, pa.binary())], schema=_PACKED)


def _runs(batch: pa.RecordBatch, offsets: Sequence[int], *, events_max: int) -> list[list[int]]:
    """Return the rows of subscriptions, those together of which one goes on where the other ends.

    What is done with a chunk on one core, after it was made small, takes as long for few events as for many.

    Args:
        batch: Some chunks, in any order.
        offsets: Where the events of each begin.
        events_max: What is put together has no more.
    """
    topics, subscriptions, seqs = (batch[name].to_pylist() for name in ("topic", "subscription", "first_seq"))
    runs: list[list[int]] = []
    following = None  # What would go on where the last of them ends.
    for row in sorted(range(len(seqs)), key=lambda row: (topics[row], subscriptions[row], seqs[row])):
        key, seq, end = (topics[row], subscriptions[row]), seqs[row], seqs[row] + offsets[row + 1] - offsets[row]
        if not subscriptions[row]:
            continue
        if (*key, seq) == following and end - seqs[runs[-1][0]] <= events_max:
            runs[-1].append(row)
        else:
            runs.append([row])
        following = (*key, end)
    return runs


def _values(values: Int64s, bounds: Sequence[Sequence[int]]) -> Int64s:
    parts = [values[begin:end] for begin, end in bounds]
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int64, copy=False)


def _highest(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield how far each ledger goes that a chunk names."""
    found: dict[tuple[str, str, int], int] = {}
    for batch in batches:
        offsets, (ledger_ids, lasts) = _sound_lists(batch, ("ledger_id", "last_entry"))
        keys = zip(batch["topic"].to_pylist(), batch["subscription"].to_pylist(), pairwise(offsets), strict=True)
        for topic, subscription, (begin, end) in keys:
            found.setdefault((topic, subscription, -1), 0)
            for each, count in _counts(ledger_ids[begin:end], lasts[begin:end]).items():
                key = (topic, subscription, each)
                found[key] = max(found.get(key, 0), count)
        if len(found) > _LEDGERS_AT_ONCE:
            yield _ledger_batch(found)
            found.clear()
    if found:
        yield _ledger_batch(found)


def _reached(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        offsets, (kind, ledger_ids, lasts) = _sound_lists(batch, ("kind", "ledger_id", "last_entry"))
        rows = []
        for topic, (begin, end) in zip(batch["topic"].to_pylist(), pairwise(offsets), strict=True):
            mine, ledger_id, last = kind[begin:end], ledger_ids[begin:end], lasts[begin:end]
            published, acked = (mine == EventKind.PUBLISH), (mine == EventKind.ACK) | (mine == EventKind.MARK_DELETE)
            rows += [(topic, each, count, 0) for each, count in _counts(ledger_id[published], last[published]).items()]
            rows += [(topic, each, 0, count) for each, count in _counts(ledger_id[acked], last[acked]).items()]
        if rows:
            columns = [pa.array(each) for each in zip(*rows, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names=[name.split()[0] for name in _REACHED_SCHEMA.split(", ")])


def _counts(ledger_id: Int64s, last: Int64s) -> dict[int, int]:
    """Return by ledger one above the highest entry; what names no ledger is left out."""
    found: dict[int, int] = {}
    runs = np.flatnonzero(np.append(True, ledger_id[1:] != ledger_id[:-1])[: len(ledger_id)])
    counts = np.maximum.reduceat(last, runs) + 1 if len(runs) else runs
    for each, count in set(zip(ledger_id[runs].tolist(), counts.tolist(), strict=True)):
        if each >= 0:
            found[each] = max(found.get(each, 0), count)
    return found


def _deaths(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        _, (ts_ms, kind) = _sound_lists(batch, ("ts_ms", "kind"))
        yield pa.RecordBatch.from_arrays([pa.array(ts_ms[kind == EventKind.CRASH])], names=["ts_ms"])


def _ledger_batch(found: Mapping[tuple[str, str, int], int]) -> pa.RecordBatch:
    rows = zip(*((*key, count) for key, count in found.items()), strict=True)
    return pa.RecordBatch.from_arrays([pa.array(each) for each in rows], names=_LEDGER_NAMES)


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
