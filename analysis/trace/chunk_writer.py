"""Writes chunks of events into one Parquet file of a trace."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Self, final

import pyarrow as pa
import pyarrow.parquet as pq

from ackstate.analysis.trace.chunk_rows import ONLY_FILE_SCHEMA, WRITE_OPTIONS, ChunkRow, table_of

if TYPE_CHECKING:
    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.rows import Events

_EVENTS_PER_ROW_GROUP = 1 << 20
_CHUNKS_PER_ROW_GROUP = 4_096


@final
class ChunkWriter:
    """Writes the only Parquet file of a trace. Memory: a row group.

    Args:
        file: The file to write; the caller moves it into the trace when it is closed.

    Raises:
        OSError: The disk is full or failed; any call may raise it.
    """

    def __init__(self, file: Location) -> None:
        self.events = 0
        self._sink = file.open("wb")
        self._writer = pq.ParquetWriter(self._sink, ONLY_FILE_SCHEMA, **WRITE_OPTIONS)
        self._begun: dict[tuple[str, str], tuple[int, int]] = {}
        self._rows: list[ChunkRow] = []
        self._waiting = 0

    def write(self, key: tuple[str, str], events: Events) -> None:
        """Write the next chunk of a (topic, subscription); no-op without events."""
        count = len(events.kind)
        if not count:
            return
        chunk, first_seq = self._begun.get(key, (0, 0))
        self._begun[key] = chunk + 1, first_seq + count
        self._rows.append(ChunkRow(key, chunk, first_seq, events))
        self.events += count
        self._waiting += count
        if self._waiting >= _EVENTS_PER_ROW_GROUP or len(self._rows) >= _CHUNKS_PER_ROW_GROUP:
            self._write_row_group()

    def close(self) -> None:
        """Write the pending rows and the footer."""
        with self._sink:
            if self._rows:
                self._write_row_group()
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is None:
            self.close()
            return
        # After a failure the file is discarded: another error while closing it would hide the first.
        with suppress(pa.ArrowException, OSError, ValueError):
            self._writer.close()
        with suppress(OSError):
            self._sink.close()

    def _write_row_group(self) -> None:
        self._writer.write_table(table_of(self._rows))
        self._rows.clear()
        self._waiting = 0
