"""A trace as rows in Spark, whose workers read the files themselves.

Spark takes lists apart and puts them together again, value by value, on the way to a Python worker: that takes several
times as long as the replay. What leaves a worker here are chunks as bytes, made small where the policies allow it.
"""

from __future__ import annotations

import gc
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, Self

from pyspark.sql import functions as F

from ackstate.analysis.redelivery.spark_rows import SparkRows
from ackstate.analysis.redelivery.trace_source import names_of_files, row_groups
from ackstate.analysis.trace.parquet import Span, check_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from ackstate.analysis.redelivery.rows import Step

_TASKS_PER_CORE = 4


class FrameSource(NamedTuple):
    """A trace as a DataFrame with columns as in `ackstate.analysis.trace.events`."""

    trace: DataFrame

    def span(self) -> Span:
        """See `TraceSource`."""
        begin, end = F.min("first_ts_ms").alias("begin_ms"), F.max("last_ts_ms").alias("end_ms")
        row = self.trace.agg(begin, end, F.count("*").alias("chunks")).collect()[0]
        return Span(row["begin_ms"] or 0, row["end_ms"] or 0, row["chunks"])

    def read(self, columns: Sequence[str], step: Step, schema: pa.Schema) -> SparkRows:
        """See `TraceSource`."""
        return SparkRows(self.trace.select(*columns)).through(step, schema)

    def made_by(self) -> tuple[tuple[str, str], ...]:
        """See `TraceSource`."""
        return made_by(self.trace.sparkSession)


class SparkSource(NamedTuple):
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
        return cls(spark, names_of_files(path), check_trace(path) if covered is None else covered)

    def span(self) -> Span:
        """See `TraceSource`."""
        return self.covered

    def read(self, columns: Sequence[str], step: Step, schema: pa.Schema) -> SparkRows:
        """See `TraceSource`; the row groups of all files are read on all cores, also those of a single file."""
        tasks = _TASKS_PER_CORE * self.spark.sparkContext.defaultParallelism
        shares = min(-(-tasks // len(self.files)), self.covered.row_groups_max)
        read = partial(row_groups, files=self.files, shares=shares, columns=columns)
        numbers = self.spark.range(0, len(self.files) * shares, numPartitions=min(tasks, len(self.files) * shares))

        def of_shares(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            _settle()
            return step(read(batches))

        return SparkRows(numbers).through(of_shares, schema)

    def made_by(self) -> tuple[tuple[str, str], ...]:
        """See `TraceSource`."""
        return made_by(self.spark)


@cache
def _settle() -> None:
    """Take the imports of a worker out of the garbage collection, of 40 ms, that Spark has it do after each task."""
    gc.freeze()


def made_by(spark: SparkSession) -> tuple[tuple[str, str], ...]:
    """Return the versions of Spark and Java."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    return (("Spark", spark.version), ("Java", str(jvm.java.lang.System.getProperty("java.version"))))
