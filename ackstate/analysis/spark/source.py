"""A trace as rows in Spark, which reads the files itself, in any location."""

from __future__ import annotations

import gc
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

from pyspark.sql.pandas.types import from_arrow_schema

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.spark.session import parquet_frame
from ackstate.analysis.trace.chunks import TRACE_SCHEMA
from ackstate.analysis.trace.parquet import Span, check_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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

    frame: DataFrame
    span: Span

    @classmethod
    def of(cls, spark: SparkSession, path: Location) -> Self:
        """Check the files of a trace, a file or a directory; errors as `check_trace`."""
        return cls.checked(spark, check_trace(path))

    @classmethod
    def checked(cls, spark: SparkSession, span: Span) -> Self:
        return cls(parquet_frame(spark, from_arrow_schema(TRACE_SCHEMA), *span.files), span)

    def made_by(self) -> tuple[tuple[str, str], ...]:
        return versions(self.frame.sparkSession)

    def read(self, columns: Sequence[str], step: Step, schema: pa.Schema) -> SparkRows:
        def settled(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            _settle()
            return step(batches)

        return SparkRows(self.frame.select(*columns)).through(settled, schema)


def one_task_source(spark: SparkSession, span: Span) -> LocalSource:
    """Return a trace that a single task replays: a small trace is done before more tasks would have started."""

    def run(work: Callable[[], list[Any]]) -> list[Any]:
        def computed(begun: Iterable[int]) -> list[Any]:
            # Spark reuses a worker only if it has read all of its input.
            for _ in begun:
                pass
            return work()

        return spark.sparkContext.parallelize([0], 1).mapPartitions(computed).collect()

    return LocalSource(span, run, versions(spark))


def versions(spark: SparkSession) -> tuple[tuple[str, str], ...]:
    """Return those of Spark and Java."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    return (("Spark", spark.version), ("Java", str(jvm.java.lang.System.getProperty("java.version"))))


@cache
def _settle() -> None:
    """Exclude a worker's imports from the garbage collection that Spark runs after each task; it would take 40 ms."""
    gc.freeze()
