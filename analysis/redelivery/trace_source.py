"""Where the chunks of a replay come from: a DataFrame, or the files of a trace, which workers then read themselves.

Spark takes lists apart and puts them together again, value by value, on the way to a Python worker: that takes several
times as long as the replay. What leaves a worker here are chunks as bytes, made small where the policies allow it.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F

from analysis.redelivery.acked import Chunk
from analysis.redelivery.thinning import packed, thinned
from analysis.trace.events import EventKind, TraceError
from analysis.trace.parquet import check_trace, trace_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from analysis.redelivery.acked import Int64s

_LISTS = Chunk._fields
_KEYS = ("topic", "subscription", "first_seq", "chunk")
_PACKED_SCHEMA = "topic string, subscription string, first_seq bigint, events binary"
_PACKED = pa.schema([
    ("topic", pa.string()), ("subscription", pa.string()), ("first_seq", pa.int64()), ("events", pa.binary()),
])  # fmt: skip
_GROUP_SCHEMA = "file int, row_group int, chunks bigint, begin_ms bigint, end_ms bigint"
_LEDGER_SCHEMA = "topic string, ledger_id bigint, entry_count bigint"
# A worker holds so many chunks of a file at once.
_CHUNKS_AT_ONCE = 64
_TASKS_PER_CORE = 4


class Span(NamedTuple):
    """What a trace covers: its first and its last millisecond, and how many chunks it has."""

    begin_ms: int
    end_ms: int
    chunk_count: int


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

    def ledgers(self) -> DataFrame:
        """Return ``topic, ledger_id, entry_count``: by one above the highest entry named, maybe in several rows."""
        ...


class FrameSource(NamedTuple):
    """A trace as a DataFrame with columns as in `analysis.trace.events`."""

    trace: DataFrame

    def span(self) -> Span:
        """See `TraceSource`."""
        begin, end = F.min("first_ts_ms").alias("begin_ms"), F.max("last_ts_ms").alias("end_ms")
        return _span(self.trace.agg(begin, end, F.count("*").alias("chunks")))

    def packed(self, *, is_counted: bool) -> DataFrame:
        """See `TraceSource`."""
        chunks = self.trace.select(*_KEYS, *_LISTS)
        return chunks.mapInArrow(partial(_packed_batches, is_counted=is_counted), _PACKED_SCHEMA)

    def ledgers(self) -> DataFrame:
        """See `TraceSource`."""
        return self.trace.select("topic", "chunk", "ledger_id", "last_entry").mapInArrow(_highest, _LEDGER_SCHEMA)


class FileSource(NamedTuple):
    """A trace whose files every worker sees by their paths, and reads a row group at a time."""

    spark: SparkSession
    files: tuple[str, ...]

    @classmethod
    def of(cls, spark: SparkSession, path: Path) -> Self:
        """Find the files of a trace, a file or a directory, and check what they tell.

        Raises:
            TraceError: It is no trace, as `analysis.trace.parquet.check_trace`.
            UnsupportedVersionError: A newer release wrote it.
        """
        check_trace(path)
        return cls(spark, tuple(str(file.absolute()) for file in trace_files(path)))

    def span(self) -> Span:
        """See `TraceSource`."""
        groups = self._groups()
        return _span(groups.agg(*(
            combined(name).alias(name) for name, combined in (("begin_ms", F.min), ("end_ms", F.max), ("chunks", F.sum))
        )))  # fmt: skip

    def packed(self, *, is_counted: bool) -> DataFrame:
        """See `TraceSource`."""
        columns = (*_KEYS, *_LISTS)
        read = partial(_read, files=self.files, columns=columns)
        return self._spread().mapInArrow(
            lambda batches: _packed_batches(read(batches), is_counted=is_counted), _PACKED_SCHEMA
        )

    def ledgers(self) -> DataFrame:
        """See `TraceSource`."""
        read = partial(_read, files=self.files, columns=("topic", "chunk", "ledger_id", "last_entry"))
        return self._spread().mapInArrow(lambda batches: _highest(read(batches)), _LEDGER_SCHEMA)

    def _groups(self) -> DataFrame:
        tasks = min(len(self.files), self._tasks)
        numbers = self.spark.range(0, len(self.files), numPartitions=tasks)
        return numbers.mapInArrow(partial(_row_groups, files=self.files), _GROUP_SCHEMA)

    def _spread(self) -> DataFrame:
        return self._groups().select("file", "row_group").repartition(self._tasks)

    @property
    def _tasks(self) -> int:
        return _TASKS_PER_CORE * self.spark.sparkContext.defaultParallelism


def _span(found: DataFrame) -> Span:
    row = found.collect()[0]
    return Span(row["begin_ms"] or 0, row["end_ms"] or 0, row["chunks"] or 0)


def _row_groups(batches: Iterable[pa.RecordBatch], *, files: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield a row for each row group of some files, given by number."""
    names = [field.split()[0] for field in _GROUP_SCHEMA.split(", ")]
    for batch in batches:
        for number in batch.column(0).to_pylist():
            with _opened(files[number]) as parquet:
                for group in range(parquet.num_row_groups):
                    times = parquet.read_row_group(group, ["first_ts_ms", "last_ts_ms"])
                    if times.num_rows:
                        first, last = (column.to_numpy() for column in times.columns)
                        row = (number, group, times.num_rows, int(first.min()), int(last.max()))
                        yield pa.RecordBatch.from_pylist(
                            [dict(zip(names, row, strict=True))],
                            pa.schema([(name, pa.int32() if name in names[:2] else pa.int64()) for name in names]),
                        )


def _read(
    batches: Iterable[pa.RecordBatch], *, files: Sequence[str], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield some columns of row groups, given by file and number, a few chunks at a time."""
    for batch in batches:
        for number, group in zip(batch["file"].to_pylist(), batch["row_group"].to_pylist(), strict=True):
            try:
                with _opened(files[number]) as parquet:
                    yield from parquet.iter_batches(_CHUNKS_AT_ONCE, row_groups=[group], columns=list(columns))
            except (pa.ArrowException, OSError) as error:
                raise TraceError(f"{files[number]}: not a readable Parquet file, {error}") from error


def _opened(file: str) -> pq.ParquetFile:
    # Damage inside a page may decompress to other numbers.
    return pq.ParquetFile(file, page_checksum_verification=True)


def _packed_batches(batches: Iterable[pa.RecordBatch], *, is_counted: bool) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        mine = [index for index, name in enumerate(batch["subscription"].to_pylist()) if name]
        offsets, lists = _sound_lists(batch, _LISTS)
        rows = []
        for begin, end in (offsets[index : index + 2] for index in mine):
            chunk = Chunk(*(values[begin:end].astype(np.int64, copy=False) for values in lists))
            rows.append(packed(thinned(chunk) if is_counted else chunk))
        keys = batch.select(["topic", "subscription", "first_seq"]).take(pa.array(mine, pa.int64()))
        columns = [column.cast(field.type) for column, field in zip(keys.columns, _PACKED, strict=False)]
        yield pa.RecordBatch.from_arrays([*columns, pa.array(rows, pa.binary())], schema=_PACKED)


def _highest(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield how far each ledger goes that a chunk names."""
    for batch in batches:
        offsets, (ledger_ids, lasts) = _sound_lists(batch, ("ledger_id", "last_entry"))
        topics: list[str] = []
        found: list[tuple[int, int]] = []
        for topic, (begin, end) in zip(batch["topic"].to_pylist(), pairwise(offsets), strict=True):
            ledger_id, last = ledger_ids[begin:end], lasts[begin:end]
            known = [
                (each, int(last[ledger_id == each].max()) + 1) for each in np.unique(ledger_id).tolist() if each >= 0
            ]
            topics += [topic] * len(known)
            found += known
        numbers = np.array(found, np.int64).reshape(-1, 2)
        columns = [pa.array(topics, pa.string()), pa.array(numbers[:, 0]), pa.array(numbers[:, 1])]
        yield pa.RecordBatch.from_arrays(columns, names=["topic", "ledger_id", "entry_count"])


def _sound_lists(batch: pa.RecordBatch, names: Sequence[str]) -> tuple[list[int], list[Int64s]]:
    """Return where each row's lists begin, and all rows' values.

    Raises:
        TraceError: A row's lists do not belong together: not equally long, empty, with nulls or of an unknown kind.
    """
    columns = [batch[name] for name in names]
    offsets = columns[0].offsets.to_numpy() - columns[0].offsets[0].as_py()
    sound = np.append(np.diff(offsets) > 0, True)
    for column in columns:
        if column.null_count or column.flatten().null_count:
            sound[:] &= False
        theirs = column.offsets.to_numpy() - column.offsets[0].as_py()
        sound[:-1] &= np.diff(theirs) == np.diff(offsets)
    if sound.all() and "kind" in names:
        kinds = batch["kind"].flatten().to_numpy()
        strange = np.flatnonzero((kinds < min(EventKind)) | (kinds > max(EventKind)))
        sound[np.searchsorted(offsets, strange, "right") - 1] = False
    if not sound.all():
        raise TraceError(f"not a trace, damaged chunk {batch['chunk'][int(np.argmin(sound))].as_py()}")
    return offsets.tolist(), [column.flatten().to_numpy() for column in columns]
