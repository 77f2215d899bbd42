"""Generates a trace in parallel: Spark distributes pieces, workers write files. The driver's memory is constant."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext

from ackstate.analysis.trace.chunk_rows import SEVERAL_FILES_SCHEMA, WRITE_OPTIONS, ChunkRow, table_of
from ackstate.analysis.trace.events import CHUNK_EVENTS
from ackstate.analysis.trace.generate.plan import PIECE_CHUNKS, PIECE_EVENTS, TracePlan
from ackstate.analysis.trace.generate.series import TopicSeries
from ackstate.analysis.trace.manifest import write_manifest
from ackstate.analysis.trace.parquet import new_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.generate.outages import Outage
    from ackstate.analysis.trace.generate.plan import RowGroupPlan
    from ackstate.analysis.trace.generate.series import SubscriptionSeries
    from ackstate.analysis.trace.new_files import NewFiles
    from ackstate.analysis.trace.rows import Events

# A piece takes 2 to 5 MB.
_PIECES_PER_FILE = 64
_FILES_PER_CORE = 4


class GeneratedFile(NamedTuple):
    """The size of generated files.

    Attributes:
        events: Events of subscriptions.
        published: Events of topics.
        files: Number of files.
        size_bytes: Size of the files.
    """

    events: int
    published: int
    files: int
    size_bytes: int


_MADE_SCHEMA = ", ".join(f"{name} bigint" for name in GeneratedFile._fields)


class _Chunks(NamedTuple):
    """Consecutive chunks of one key.

    Attributes:
        first: The number of the first chunk.
        events: The events of each chunk.
    """

    topic: str
    subscription: str
    first: int
    events: Sequence[Events]


def make_trace(spark: SparkSession, plan: TracePlan, out: Location) -> GeneratedFile:
    """Generate a trace at `out`, which appears there when it is complete; an existing trace is replaced.

    `out` is a directory that every worker sees by that path. The same plan gives the same rows on any number of cores;
    their distribution over files may differ.

    Raises:
        ValueError: The crashes do not fit into the trace.
        TraceError, UnsupportedVersionError, OSError: As `ackstate.analysis.trace.parquet.write_trace`.
        PySparkException: A worker failed, for example on a full disk.
    """
    outages = plan.outages()
    with new_trace(out) as written:
        files = min(plan.piece_count, max(plan.piece_count // _PIECES_PER_FILE, _FILES_PER_CORE * _cores(spark)))
        pieces = spark.range(0, plan.piece_count, numPartitions=files)
        work = partial(_make, plan=plan, outages=outages, written=written)
        try:
            (total,) = pieces.mapInArrow(work, _MADE_SCHEMA).groupBy().sum(*GeneratedFile._fields).collect()
        except BaseException:
            # Tasks that still run would write into the directory that is being removed.
            spark.sparkContext.cancelAllJobs()
            raise
        if isinstance(written.directory, Path):
            write_manifest(written.directory)
    return GeneratedFile(*total)


def _cores(spark: SparkSession) -> int:
    return spark.sparkContext.defaultParallelism


def _make(
    batches: Iterable[pa.RecordBatch], *, plan: TracePlan, outages: list[Outage], written: NewFiles
) -> Iterator[pa.RecordBatch]:
    """Write the file of one partition, and yield its size."""
    pieces = (plan.piece(index) for batch in batches for index in batch.column(0).to_pylist())
    context = TaskContext.get()
    assert context is not None
    file = written.file(context.partitionId())
    # A second attempt at a task may start while the first still writes.
    if isinstance(file, Path):
        unfinished = file.with_name(f".{file.name}.{context.taskAttemptId()}")
        made = write_pieces(plan, outages, pieces, unfinished)
        if made.files:
            unfinished.rename(file)
    else:
        made = write_pieces(plan, outages, pieces, file)
    yield pa.RecordBatch.from_pydict({name: [count] for name, count in made._asdict().items()})


def write_pieces(
    plan: TracePlan, outages: list[Outage], pieces: Iterable[RowGroupPlan], file: Location
) -> GeneratedFile:
    """Write consecutive pieces into one Parquet file, a row group for each and one for the PUBLISH events of its topic.

    Memory: a piece, for any number of them.
    """
    writer: pq.ParquetWriter | None = None
    events = published = 0
    with ExitStack() as opened:
        for subscription, group in groupby(pieces, key=lambda piece: piece.subscription):
            series = plan.series_of(subscription, outages)
            for piece in group:
                if writer is None:
                    sink = opened.enter_context(file.open("wb"))
                    writer = opened.enter_context(pq.ParquetWriter(sink, SEVERAL_FILES_SCHEMA, **WRITE_OPTIONS))
                for chunks in (_own_chunks(plan, series, piece), *_topic_chunks(plan, series, piece)):
                    count = sum(len(each.kind) for each in chunks.events)
                    events += count if chunks.subscription else 0
                    published += 0 if chunks.subscription else count
                    writer.write_table(_table(chunks))
    return GeneratedFile(events, published, 1, file.stat().st_size) if writer else GeneratedFile(0, 0, 0, 0)


def _own_chunks(plan: TracePlan, series: SubscriptionSeries, piece: RowGroupPlan) -> _Chunks:
    end = min((piece.number + 1) * PIECE_EVENTS, plan.events_of(piece.subscription))
    topic = _topic_name(plan.topic_of(piece.subscription))
    events = series.cut_into(_bounds(piece.number * PIECE_EVENTS, end))
    return _Chunks(topic, f"subscription-{piece.subscription:05}", piece.number * PIECE_CHUNKS, events)


def _topic_chunks(plan: TracePlan, series: SubscriptionSeries, piece: RowGroupPlan) -> Iterator[_Chunks]:
    """Yield this piece's part of the topic's PUBLISH events, if it belongs to the topic's first subscription."""
    topic = plan.topic_of(piece.subscription)
    if piece.subscription != topic:
        return
    total, share = plan.topic_events(topic, series), plan.pieces_of(topic)
    chunks = -(-total // CHUNK_EVENTS)
    first, end = (chunks * number // share for number in (piece.number, piece.number + 1))
    if first < end:
        events = TopicSeries(series).cut_into(_bounds(first * CHUNK_EVENTS, min(end * CHUNK_EVENTS, total)))
        yield _Chunks(_topic_name(topic), "", first, events)


def _topic_name(number: int) -> str:
    return f"persistent://public/default/topic-{number:05}"


def _bounds(begin: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.append(np.arange(begin, end, CHUNK_EVENTS), end)


def _table(chunks: _Chunks) -> pa.Table:
    key = (chunks.topic, chunks.subscription)
    numbers = range(chunks.first, chunks.first + len(chunks.events))
    return table_of([
        ChunkRow(key, number, number * CHUNK_EVENTS, events)
        for number, events in zip(numbers, chunks.events, strict=True)
    ])  # fmt: skip
