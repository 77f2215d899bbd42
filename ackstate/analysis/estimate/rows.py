"""Rows of Arrow data that steps transform, in this process or in Spark's workers (`spark_rows`).

A pipeline is written once, against `Rows`. A step is a function from record batches to record batches. After
`together`, a step sees rows with equal keys next to each other.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, final

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Step = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

# Sorted rows are copied in pieces of this many.
_ROWS_AT_ONCE = 10_000


class Rows(Protocol):
    """Rows, computed when they are collected."""

    def through(self, step: Step, schema: pa.Schema) -> Self:
        """Return the rows that a step yields; the step may be called several times, each time for some of the rows.

        Args:
            step: A function from batches to batches.
            schema: The schema of the rows that it yields.
        """
        ...

    def together(self, keys: Sequence[str], order: Sequence[str] = ()) -> Self:
        """Group rows with equal keys, sorted by the keys and then by `order`; text sorts by its UTF-8 bytes.

        One call of the next step sees all rows with the same keys; without keys, all rows.
        """
        ...

    def plus(self, others: Self) -> Self:
        """Return these rows and others of the same schema, from the same engine."""
        ...

    def collect(self) -> list[dict[str, Any]]:
        """Compute the rows and return each as a mapping from column to value."""
        ...


_AnyRows = TypeVar("_AnyRows", bound=Rows)


def joined(rows: Sequence[_AnyRows]) -> _AnyRows:
    """Return the union of some rows."""
    return reduce(lambda some, others: some.plus(others), rows)


@final
class LocalRows:
    """Rows in this process; grouped rows are held in memory.

    Args:
        batches: Returns the rows; called once for each collection.
        schema: The schema of the rows.
    """

    def __init__(self, batches: Callable[[], Iterable[pa.RecordBatch]], schema: pa.Schema) -> None:
        self._batches = batches
        self._schema = schema

    def through(self, step: Step, schema: pa.Schema) -> LocalRows:
        return LocalRows(lambda: step(self._batches()), schema)

    def together(self, keys: Sequence[str], order: Sequence[str] = ()) -> LocalRows:
        """See `Rows`.

        Complexity: O(n log n) for n rows, all of which are in memory.
        """
        columns = [*keys, *order]
        return LocalRows(lambda: self._sorted(columns), self._schema) if columns else self

    def plus(self, others: LocalRows) -> LocalRows:
        def both() -> Iterator[pa.RecordBatch]:
            yield from self._batches()
            yield from others._batches()

        return LocalRows(both, self._schema)

    def collect(self) -> list[dict[str, Any]]:
        return [row for batch in self._batches() for row in batch.to_pylist()]

    def _sorted(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        table = pa.Table.from_batches(map(_with_large_binary, self._batches()), _large(self._schema))
        at = pc.sort_indices(table.select(columns), [(name, "ascending") for name in columns])
        for begin in range(0, len(at), _ROWS_AT_ONCE):
            yield from table.take(at[begin : begin + _ROWS_AT_ONCE]).combine_chunks().to_batches()


def _large(schema: pa.Schema) -> pa.Schema:
    """Return a schema in which the bytes of a column may exceed 2 GiB in total."""
    return pa.schema([
        field.with_type(pa.large_binary()) if pa.types.is_binary(field.type) else field for field in schema
    ])  # fmt: skip


def _with_large_binary(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.cast(_large(batch.schema))


if TYPE_CHECKING:
    _: type[Rows] = LocalRows
