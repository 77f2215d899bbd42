"""How many events the rows of a Parquet trace may have: a few KB of Parquet may unpack to gigabytes.

A reader holds up to `ROWS_AT_ONCE` rows, so a row group must not have more events than as many rows may have.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ackstate.analysis.trace.events import LIST_COLUMNS, TraceError

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow.parquet as pq

ROWS_AT_ONCE = 64
OPTION = "ACKSTATE_TRACE_ROW_EVENTS_MAX"
"""The environment variable that sets the limit."""
_DEFAULT = 65_536  # Four times what we write.


def row_events_max() -> int:
    """Return how many events a row may have.

    Raises:
        TraceError: The environment variable is no number above 0.
    """
    text = os.environ.get(OPTION, str(_DEFAULT))
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text)):
        raise TraceError(f"{OPTION} must be a number from 1 to {10**18 - 1}, got {text!r}")
    return int(text)


def check_row_groups(file: Path, parquet: pq.ParquetFile) -> None:
    """Refuse row groups that would take too much memory, from their footer alone.

    Raises:
        TraceError: One has more events than its rows may have.
    """
    most = row_events_max()
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        allowed = most * min(max(group.num_rows, 1), ROWS_AT_ONCE)
        for index in range(group.num_columns):
            column = group.column(index)
            if column.path_in_schema.split(".")[0] in LIST_COLUMNS and column.num_values > allowed:
                raise TraceError(
                    f"{file}: row group {number} has {column.num_values} events in {group.num_rows} rows; a row must "
                    f"have at most {most}, or set {OPTION}"
                )
