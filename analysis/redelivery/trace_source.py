"""Reads the files of a trace for a replay, in this process or in Spark's workers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import pyarrow as pa
import pyarrow.parquet as pq

from ackstate.analysis.redelivery.rows import LocalRows
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.parquet import Span, check_trace, trace_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ackstate.analysis.redelivery.rows import Rows, Step

# A worker holds so many chunks of a file at once.
_CHUNKS_AT_ONCE = 64
_SHARES_PER_CORE = 4


class TraceSource(Protocol):
    """A trace that can be replayed."""

    def span(self) -> Span:
        """Return what it covers; without chunks the times are 0."""
        ...

    def read(self, columns: Sequence[str], step: Step, schema: pa.Schema) -> Rows:
        """Return the rows that a step makes of some columns of the chunks, in any order.

        Args:
            columns: Of `ackstate.analysis.trace.events`.
            step: Takes batches of a few chunks.
            schema: The schema of the rows that it yields.
        """
        ...

    def made_by(self) -> tuple[tuple[str, str], ...]:
        """Return name and version of each program that replays it beside Python."""
        ...


class LocalSource(NamedTuple):
    """A trace whose files this process reads."""

    files: tuple[str, ...]
    covered: Span

    @classmethod
    def of(cls, path: Path, covered: Span | None = None) -> Self:
        """Find the files of a trace, a file or a directory; arguments and errors as of `SparkSource.of`."""
        return cls(names_of_files(path), check_trace(path) if covered is None else covered)

    def span(self) -> Span:
        """See `TraceSource`."""
        return self.covered

    def read(self, columns: Sequence[str], step: Step, schema: pa.Schema) -> LocalRows:
        """See `TraceSource`; threads read shares of the files, mostly outside of Python's global lock."""
        cores = os.cpu_count() or 1
        shares = min(-(-_SHARES_PER_CORE * cores // len(self.files)), self.covered.row_groups_max)

        def of_share(number: int) -> list[pa.RecordBatch]:
            numbers = pa.RecordBatch.from_arrays([pa.array([number])], names=["number"])
            return list(step(row_groups([numbers], files=self.files, shares=shares, columns=columns)))

        def batches() -> Iterator[pa.RecordBatch]:
            with ThreadPoolExecutor(cores) as pool:
                for found in pool.map(of_share, range(len(self.files) * shares)):
                    yield from found

        return LocalRows(batches, schema)

    def made_by(self) -> tuple[tuple[str, str], ...]:
        """See `TraceSource`."""
        return ()


def names_of_files(path: Path) -> tuple[str, ...]:
    """Return the files of a trace by their absolute paths."""
    return tuple(str(file.absolute()) for file in trace_files(path))


def row_groups(
    batches: Iterable[pa.RecordBatch], *, files: Sequence[str], shares: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield, a few chunks at a time, some columns of shares of files: share ``n % shares`` of file ``n // shares``."""
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


def _opened(file: str) -> pq.ParquetFile:
    # Damage inside a page may decompress to other numbers.
    return pq.ParquetFile(file, page_checksum_verification=True)
