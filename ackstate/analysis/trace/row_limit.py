"""Limits the number of events in the rows of a Parquet trace: a few KB of Parquet may unpack to gigabytes.

A reader holds up to `ROWS_AT_ONCE` rows, so a row group must not have more events than as many rows may have.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from ackstate.analysis.trace.events import EVENT_COLUMNS, TraceError
from ackstate.analysis.trace.manifest import footer
from ackstate.analysis.trace.parquet_footer import column_sizes

if TYPE_CHECKING:
    import pyarrow as pa

    from ackstate.analysis.location import Location

ROWS_AT_ONCE = 64
OPTION = "ACKSTATE_TRACE_ROW_EVENTS_MAX"
"""The environment variable that sets the limit."""
_DEFAULT = 65_536  # Four times the rows that we write.
_ROW_BYTES = 64  # Overhead of a packed column: its length and the width of its numbers.


def row_events_max() -> int:
    """Return the most events of a row.

    Raises:
        TraceError: The environment variable is not a number above 0.
    """
    text = os.environ.get(OPTION, str(_DEFAULT))
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text)):
        raise TraceError(f"{OPTION} must be a number from 1 to {10**18 - 1}, got {text!r}")
    return int(text)


def check_row_groups(file: Location) -> None:
    """Refuse row groups that would take too much memory, from their footer alone.

    Raises:
        TraceError: A row group has more events than its rows may have.
        ValueError: The footer is damaged.
        OSError: The file cannot be read.
    """
    most = row_events_max()
    for column in column_sizes(footer(file)[1]):
        if column.name not in EVENT_COLUMNS:
            continue
        allowed = most * min(max(column.row_count, 1), ROWS_AT_ONCE)
        # Packed events are one value a row, of up to 8 bytes an event.
        is_large = column.uncompressed_bytes > 8 * allowed + _ROW_BYTES * column.row_count
        if column.value_count > allowed or (column.value_count == column.row_count and is_large):
            raise TraceError(
                f"{file}: row group {column.row_group} has {column.value_count} values of {column.uncompressed_bytes} "
                f"bytes in {column.row_count} rows; a row must have at most {most} events, or set {OPTION}"
            )


def check_rows(file: Location, rows: pa.Table) -> None:
    """Refuse rows whose event count is too large, or 0.

    Args:
        file: The file of the rows.
        rows: Rows of a trace.

    Raises:
        TraceError: A row has too many events, or none.
    """
    most = row_events_max()
    counts = rows["event_count"].to_numpy()
    for row in np.flatnonzero((counts < 1) | (counts > most))[:1].tolist():
        raise TraceError(
            f"{file}: row {row + 1} has {counts[row]} events; a row must have 1 to {most}, or set {OPTION}"
        )
