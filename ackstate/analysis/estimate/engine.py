"""Rows of Arrow data that steps transform, and the traces that they come from, in this process or in Spark.

A pipeline is written once, against `Rows`. A step is a function from record batches to record batches. After
`together`, a step sees rows with equal keys next to each other.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackstate.analysis.trace.chunks import ROWS_AT_ONCE
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.parquet import DAY_SEQ, Span, check_trace, opened_parquet, span_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ackstate.analysis.location import Location


if TYPE_CHECKING:
    Step = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

# Sorted rows are copied in pieces of this many.
_ROWS_AT_ONCE = 10_000


class Rows(Protocol):
    """Rows, computed when they are collected."""

    def through(self, step: Step, schema: pa.Schema) -> Self:
        """Return the rows that a step yields; the step may be called several times, each time for some of the rows."""
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


def _here(work: Callable[[], list[Any]]) -> list[Any]:
    return work()


class LocalRows(NamedTuple):
    """Rows in one process; grouped rows are held in memory."""

    batches: Callable[[], Iterable[pa.RecordBatch]]
    schema: pa.Schema
    run: Callable[[Callable[[], list[Any]]], list[Any]] = _here  # Runs what computes the rows, maybe elsewhere

    def through(self, step: Step, schema: pa.Schema) -> Self:
        return self._replace(batches=partial(_stepped, step, self.batches), schema=schema)

    def together(self, keys: Sequence[str], order: Sequence[str] = ()) -> Self:
        """See `Rows`."""
        columns = [*keys, *order]
        return self._replace(batches=partial(_sorted, self.batches, self.schema, columns)) if columns else self

    def plus(self, others: Self) -> Self:
        return self._replace(batches=partial(_both, self.batches, others.batches))

    def collect(self) -> list[dict[str, Any]]:
        return self.run(partial(_collected, self.batches))


# Functions of a module, so that another process receives what it needs, and not what runs it there.


def _stepped(step: Step, batches: Callable[[], Iterable[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    return step(batches())


def _both(*every: Callable[[], Iterable[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    return chain.from_iterable(batches() for batches in every)


def _collected(batches: Callable[[], Iterable[pa.RecordBatch]]) -> list[dict[str, Any]]:
    return [row for batch in batches() for row in batch.to_pylist()]


def _sorted(
    batches: Callable[[], Iterable[pa.RecordBatch]], schema: pa.Schema, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    large = _large(schema)
    table = pa.Table.from_batches((batch.cast(large) for batch in batches()), large)
    at = pc.sort_indices(table.select(columns), [(name, "ascending") for name in columns])
    for begin in range(0, len(at), _ROWS_AT_ONCE):
        yield from table.take(at[begin : begin + _ROWS_AT_ONCE]).combine_chunks().to_batches()


def _large(schema: pa.Schema) -> pa.Schema:
    """Return a schema in which the bytes of a column may exceed 2 GiB in total."""
    return pa.schema([
        field.with_type(pa.large_binary()) if pa.types.is_binary(field.type) else field for field in schema
    ])  # fmt: skip


if TYPE_CHECKING:
    _: type[Rows] = LocalRows


_SHARES_PER_CORE = 4


class TraceSource(Protocol):
    """A trace that can be replayed."""

    @property
    def span(self) -> Span:
        """The extent of the trace."""
        ...

    def read(self, columns: Sequence[str], step: Step, schema: pa.Schema) -> Rows:
        """Return the rows that a step computes from some columns of the chunks, in any order."""
        ...

    def made_by(self) -> tuple[tuple[str, str], ...]:
        """Return name and version of each program that replays the trace beside Python."""
        ...


def trace_of(engine: Callable[[Span], TraceSource], days: Sequence[Span]) -> TraceSource:
    """Return a trace, or those of several days as one."""
    sources = tuple(map(engine, days))
    return sources[0] if len(sources) == 1 else DailyTrace(sources, span_of(days))


class DailyTrace(NamedTuple):
    """The traces of successive days as one, in which `seq` goes on from day to day."""

    days: tuple[TraceSource, ...]
    span: Span

    def made_by(self) -> tuple[tuple[str, str], ...]:
        return self.days[0].made_by()

    def read(self, columns: Sequence[str], step: Step, schema: pa.Schema) -> Rows:
        """See `TraceSource`."""
        return joined(
            [
                day.read(columns, partial(_of_day, step=step, number=number, name=self.span.days[number]), schema)
                for number, day in enumerate(self.days)
            ]
        )


def _of_day(batches: Iterable[pa.RecordBatch], *, step: Step, number: int, name: str) -> Iterator[pa.RecordBatch]:
    try:
        yield from step(_later(batch, number * DAY_SEQ) for batch in batches)
    except TraceError as error:
        raise TraceError(str(error) if name in str(error) else f"{name}: {error}") from None


def _later(batch: pa.RecordBatch, seq: int) -> pa.RecordBatch:
    """Return chunks whose events come after those of earlier days."""
    if "first_seq" not in batch.schema.names:
        return batch
    at = batch.schema.get_field_index("first_seq")
    return batch.set_column(at, "first_seq", pa.array(batch["first_seq"].to_numpy() + np.int64(seq)))


class LocalSource(NamedTuple):
    """A trace whose files one process reads: this one, or the one in which `run` runs what computes the rows."""

    span: Span
    run: Callable[[Callable[[], list[Any]]], list[Any]] = _here
    programs: tuple[tuple[str, str], ...] = ()  # See `TraceSource.made_by`

    @classmethod
    def of(cls, path: Location) -> Self:
        """Check the files of a trace, a file or a directory; errors as `check_trace`."""
        return cls(check_trace(path))

    def made_by(self) -> tuple[tuple[str, str], ...]:
        return self.programs

    def read(self, columns: Sequence[str], step: Step, schema: pa.Schema) -> LocalRows:
        return LocalRows(partial(_read, self.span, columns, step), schema, self.run)


def _read(span: Span, columns: Sequence[str], step: Step) -> Iterator[pa.RecordBatch]:
    """Yield the rows that a step computes; threads read shares of the files, mostly outside of Python's global lock."""
    files, cores = span.files, os.cpu_count() or 1
    shares = min(-(-_SHARES_PER_CORE * cores // len(files)), span.row_groups_max)

    def of_share(number: int) -> list[pa.RecordBatch]:
        file, share = divmod(number, shares)
        return list(step(_row_groups(files[file], columns, share, shares)))

    with ThreadPoolExecutor(cores) as pool:
        for found in pool.map(of_share, range(len(files) * shares)):
            yield from found


def _row_groups(file: Location, columns: Sequence[str], share: int, shares: int) -> Iterator[pa.RecordBatch]:
    """Yield, a few chunks at a time, some columns of each row group ``n`` of a file with ``n % shares == share``."""
    with opened_parquet(file) as parquet:
        mine = list(range(share, parquet.num_row_groups, shares))
        if mine:
            yield from parquet.iter_batches(ROWS_AT_ONCE, row_groups=mine, columns=list(columns))
