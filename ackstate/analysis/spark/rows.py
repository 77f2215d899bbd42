"""Rows in Spark: steps run in its Python workers, and its shuffle groups rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from pyspark.sql.pandas.types import from_arrow_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from ackstate.analysis.estimate.rows import Rows, Step


@final
class SparkRows:
    """A DataFrame as `Rows`.

    Attributes:
        frame: The DataFrame.
    """

    def __init__(self, frame: DataFrame) -> None:
        self.frame = frame

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
