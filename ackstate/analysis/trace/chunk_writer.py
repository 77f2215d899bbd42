"""Writes chunks of events into one Parquet file of a trace."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Self, final

import pyarrow as pa
import pyarrow.parquet as pq

from ackstate.analysis.trace.chunk_rows import TRACE_SCHEMA, WRITE_OPTIONS, ChunkRow, table_of
from ackstate.analysis.trace.events import DROPPED_KEY, POLLED_UNTIL_KEY
from ackstate.analysis.trace.manifest import FILES_KEY, ONLY, SEVERAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.rows import Events, PolledEvents

_EVENTS_PER_ROW_GROUP = 1 << 20
_CHUNKS_PER_ROW_GROUP = 4_096


@final
class ChunkWriter:
    """Writes a Parquet file of a trace. Memory: a row group.

    Args:
        file: The file to write; the caller moves it into the trace when it is closed.
        polled_until_ms: The time of the last poll of a trace of polls; -1 if unknown.
        written: For a further file of a trace, the number of chunks and of events of each (topic, subscription) in the
            files before it; None if the file is a whole trace.

    Attributes:
        events: Number of events so far.
        dropped_events: Events that the source lacks because its recorder dropped them; may be set until the end.

    Raises:
        OSError: The disk is full or failed; any call may raise it.
    """

    def __init__(
        self,
        file: Location,
        *,
        written: Mapping[tuple[str, str], tuple[int, int]] | None = None,
        polled_until_ms: int = -1,
    ) -> None:
        self.events = self.dropped_events = 0
        self._notes = {FILES_KEY: ONLY if written is None else SEVERAL}
        if polled_until_ms >= 0:
            self._notes[POLLED_UNTIL_KEY] = str(polled_until_ms).encode()
        self._sink = file.open("wb")
        self._writer: pq.ParquetWriter | None = None  # opened with the first rows, whose columns it has
        self._begun: dict[tuple[str, str], tuple[int, int]] = dict(written or {})
        self._rows: list[ChunkRow] = []
        self._waiting = 0

    @property
    def written(self) -> dict[tuple[str, str], tuple[int, int]]:
        """The number of chunks and of events of each (topic, subscription) so far, with those of earlier files."""
        return dict(self._begun)

    def write(self, key: tuple[str, str], events: Events | PolledEvents) -> None:
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
            writer = self._opened(TRACE_SCHEMA)
            if self.dropped_events:
                writer.add_key_value_metadata({DROPPED_KEY: str(self.dropped_events).encode()})
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is None:
            self.close()
            return
        # After a failure the file is discarded: another error while closing it would hide the first.
        with suppress(pa.ArrowException, OSError, ValueError):
            if self._writer is not None:
                self._writer.close()
        with suppress(OSError):
            self._sink.close()

    def _write_row_group(self) -> None:
        table = table_of(self._rows)
        writer = self._opened(table.schema)
        writer.write_table(table.replace_schema_metadata(writer.schema.metadata))
        self._rows.clear()
        self._waiting = 0

    def _opened(self, schema: pa.Schema) -> pq.ParquetWriter:
        if self._writer is None:
            schema = schema.with_metadata({**schema.metadata, **self._notes})
            self._writer = pq.ParquetWriter(self._sink, schema, **WRITE_OPTIONS)
        return self._writer
