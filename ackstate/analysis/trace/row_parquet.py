"""Reads Parquet files with one row an event, as other tools write them, batch by batch into tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ackstate.analysis.trace.bad_rows import BadRows, Wrong
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.rows import ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ackstate.analysis.trace.rows import Int64s

_NEEDED = ("topic", "subscription", "ts_ms", "kind", "ledger_id", "first_entry")
_NAMES = ("topic", "subscription")
_BATCH_ROWS = 1 << 17


def tables(file: Path, *, bad_rows: BadRows, place: Callable[[int], str]) -> Iterator[tuple[pa.Table, Int64s, float]]:
    """Yield tables with columns as `ROW_SCHEMA`, the number of each row from 1, and the share of the file that is read.

    Raises:
        TraceError: The file is cut short or damaged, or a column is missing or of another type.
    """
    try:
        with file.open("rb") as source, pq.ParquetFile(source, page_checksum_verification=True) as parquet:
            columns = _columns(file, parquet.schema_arrow)
            row_count, first = parquet.metadata.num_rows, 1
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                table, numbers = _readable(pa.Table.from_batches([batch]), first, bad_rows=bad_rows, place=place)
                first += batch.num_rows
                yield table, numbers, (first - 1) / row_count
    except (pa.ArrowException, OSError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise TraceError(f"{file}: not a readable Parquet file, {said}") from error


def _columns(file: Path, schema: pa.Schema) -> list[str]:
    """Return the columns to read; check their types."""
    if schema.get_field_index("first_seq") >= 0 and schema.get_field_index("chunk") >= 0:
        raise TraceError(f"{file}: this is already a trace, whose rows are chunks of events")
    for name in ROW_SCHEMA.names:
        indexes = schema.get_all_field_indices(name)
        if len(indexes) > 1:
            raise TraceError(f"{file}: column {name!r} occurs several times")
        if indexes:
            _check_type(file, schema.field(indexes[0]))
        elif name in _NEEDED:
            raise TraceError(f"{file}: column {name!r} is missing; it needs {', '.join(_NEEDED)}")
    return [name for name in ROW_SCHEMA.names if schema.get_field_index(name) >= 0]


def _check_type(file: Path, field: pa.Field) -> None:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    fits = is_text if field.name in _NAMES else pa.types.is_integer(field.type)
    if not (fits or (field.name == "kind" and is_text)):
        wanted = ROW_SCHEMA.field(field.name).type
        raise TraceError(f"{file}: column {field.name!r} must be {wanted}, got {field.type}; cast it")


def _readable(
    table: pa.Table, first: int, *, bad_rows: BadRows, place: Callable[[int], str]
) -> tuple[pa.Table, Int64s]:
    """Remove rows whose text is not UTF-8 or whose numbers exceed a signed 64-bit integer."""
    numbers = np.arange(first, first + table.num_rows)
    wrong = {name: _not_utf8(table[name]) for name in table.column_names if not pa.types.is_integer(table[name].type)}
    wrong |= {name: _beyond(table[name]) for name in table.column_names if table[name].type == pa.uint64()}
    bad = np.zeros(table.num_rows, np.bool_)
    for name, mask in wrong.items():
        fresh = np.flatnonzero(mask & ~bad)
        problem = Wrong.BEYOND if table[name].type == pa.uint64() else Wrong.NOT_UTF8
        if len(fresh):
            bad_rows.add(problem, len(fresh), (f"{place(int(numbers[row]))} ({name})" for row in fresh))
        bad |= mask
    if not bad.any():
        return table, numbers
    bad_rows.rows += int(bad.sum())
    good = ~bad
    return table.filter(pa.array(good)), numbers[good]


def _not_utf8(column: pa.ChunkedArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which values of a text column are not UTF-8: Parquet requires it, but readers do not check it."""
    try:
        column.validate(full=True)
        return np.zeros(len(column), np.bool_)
    except pa.ArrowInvalid:
        texts = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        binary = texts.cast(pa.large_binary() if texts.type == pa.large_string() else pa.binary()).to_pylist()
        return np.array([value is not None and not _is_utf8(value) for value in binary])


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _beyond(column: pa.ChunkedArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.asarray(column.fill_null(0).to_numpy() > np.uint64(2**63 - 1))
