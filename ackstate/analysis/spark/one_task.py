"""Replays a trace in a single Spark task: a small trace is done before more tasks would have started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

from ackstate.analysis.spark.source import versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from ackstate.analysis.estimate.engine import LocalRows, LocalSource, Rows, Step, TraceSource
    from ackstate.analysis.trace.parquet import Span


class OneTaskSource(NamedTuple):
    """A trace whose files one worker reads."""

    spark: SparkSession  # The session
    local: LocalSource  # The trace

    @property
    def span(self) -> Span:
        return self.local.span

    def made_by(self) -> tuple[tuple[str, str], ...]:
        return versions(self.spark)

    def read(self, columns: Sequence[str], step: Step, schema: pa.Schema) -> OneTaskRows:
        return OneTaskRows(self.spark, self.local.read(columns, step, schema))


@final
class OneTaskRows:
    """Rows that one task computes."""

    def __init__(self, spark: SparkSession, rows: LocalRows) -> None:
        self._spark = spark
        self._rows = rows

    def through(self, step: Step, schema: pa.Schema) -> OneTaskRows:
        return OneTaskRows(self._spark, self._rows.through(step, schema))

    def together(self, keys: Sequence[str], order: Sequence[str] = ()) -> OneTaskRows:
        return OneTaskRows(self._spark, self._rows.together(keys, order))

    def plus(self, others: OneTaskRows) -> OneTaskRows:
        return OneTaskRows(self._spark, self._rows.plus(others._rows))

    def collect(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._in_worker(self._rows.collect)
        return found

    def _in_worker(self, work: Callable[[], list[Any]]) -> list[Any]:
        def computed(begun: Iterable[int]) -> list[Any]:
            # Spark reuses a worker only if it has read all of its input.
            for _ in begun:
                pass
            return work()

        return self._spark.sparkContext.parallelize([0], 1).mapPartitions(computed).collect()


if TYPE_CHECKING:
    _: type[Rows] = OneTaskRows
    __: type[TraceSource] = OneTaskSource
