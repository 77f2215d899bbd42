"""A trace as rows in Spark, which reads the files itself, in any location."""

from __future__ import annotations

import gc
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from ackstate.analysis.spark.session import parquet_frame
from ackstate.analysis.trace.chunks import POLLED_SCHEMA, TRACE_SCHEMA, has_intervals
from ackstate.analysis.trace.parquet import Span, check_trace, trace_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from ackstate.analysis.estimate.engine import Rows, Step
    from ackstate.analysis.location import Location


@final
class SparkRows:
    """A DataFrame as `Rows`."""

    def __init__(self, frame: DataFrame) -> None:
        self.frame = frame  # The DataFrame

    def through(self, step: Step, schema: pa.Schema) -> SparkRows:
        return SparkRows(self.frame.mapInArrow(step, from_arrow_schema(schema)))

    def together(self, keys: Sequence[str], order: Sequence[str] = ()) -> SparkRows:
        frame = self.frame.repartition(*keys) if keys else self.frame.repartition(1)
        columns = (*keys, *order)
        return SparkRows(frame.sortWithinPartitions(*columns) if columns else frame)

    def plus(self, others: SparkRows) -> SparkRows:
        return SparkRows(self.frame.unionByName(others.frame))

    def collect(self) -> list[dict[str, Any]]:
        return [row.asDict(recursive=True) for row in self.frame.collect()]


if TYPE_CHECKING:
    _: type[Rows] = SparkRows


class SparkSource(NamedTuple):
    """A trace as a DataFrame with columns as in `ackstate.analysis.trace.events`."""

    trace: DataFrame  # The DataFrame
    covered: Span | None = None  # The result of `check_trace`; None if Spark is to compute it

    @classmethod
    def of(cls, spark: SparkSession, path: Location, covered: Span | None = None) -> Self:
        """Find the files of a trace, a file or a directory; the checks that need only the files run at once."""
        covered = check_trace(path) if covered is None else covered
        columns = POLLED_SCHEMA if covered.has_intervals else TRACE_SCHEMA
        return cls(parquet_frame(spark, from_arrow_schema(columns), *trace_files(path)), covered)

    @property
    def has_intervals(self) -> bool:
        return has_intervals(self.trace.schema)

    def span(self) -> Span:
        if self.covered is not None:
            return self.covered
        begin, end = F.min("first_ts_ms").alias("begin_ms"), F.max("last_ts_ms").alias("end_ms")
        row = self.trace.agg(begin, end, F.count("*").alias("chunks")).collect()[0]
        return Span(row["begin_ms"] or 0, row["end_ms"] or 0, row["chunks"], has_intervals=self.has_intervals)

    def read(self, columns: Sequence[str], step: Step, schema: pa.Schema) -> SparkRows:
        def settled(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            _settle()
            return step(batches)

        return SparkRows(self.trace.select(*columns)).through(settled, schema)


@cache
def _settle() -> None:
    """Exclude a worker's imports from the garbage collection that Spark runs after each task; it would take 40 ms."""
    gc.freeze()


class SparkEngine(NamedTuple):
    """Spark."""

    spark: SparkSession

    def trace(self, path: Location, covered: Span | None = None) -> SparkSource:
        return SparkSource.of(self.spark, path, covered)

    def made_by(self) -> tuple[tuple[str, str], ...]:
        jvm = self.spark.sparkContext._jvm
        assert jvm is not None
        return (("Spark", self.spark.version), ("Java", str(jvm.java.lang.System.getProperty("java.version"))))
