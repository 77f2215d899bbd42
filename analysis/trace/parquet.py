"""Turn a recording into a Parquet trace, and look at a Parquet trace before Spark does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from ackstate.errors import UnsupportedVersionError
from analysis.trace.events import (
    CHUNK_EVENTS,
    LIST_COLUMNS,
    SCALAR_COLUMNS,
    TRACE_VERSION,
    VERSION_KEY,
    Event,
    TraceError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from analysis.trace.recorder import Frame

TRACE_SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.type_for_alias(kind), nullable=False) for name, kind in SCALAR_COLUMNS.items()),
        *(pa.field(name, pa.list_(pa.type_for_alias(kind))) for name, kind in LIST_COLUMNS.items()),
    ],
    metadata={VERSION_KEY: str(TRACE_VERSION).encode()},
)
_CHUNKS_PER_ROW_GROUP = 64


def write_trace(frames: Iterable[Frame], path: Path) -> int:
    """Write a Parquet trace and return how many events it has.

    The trace appears at `path` when it is whole: a directory with one Parquet file, renamed into place. One that stands
    there already is replaced.

    Raises:
        TraceError: There is no event, or what stands at `path` is no trace.
        OSError: The disk is full or failed; nothing is left at `path`.
    """
    if path.exists():
        check_trace(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        events = _write_chunks(frames, unfinished / "part-00000.parquet")
        if not events:
            raise TraceError(f"{path}: nothing was recorded, so there is no trace to write")
        shutil.rmtree(path, ignore_errors=True)
        os.replace(unfinished, path)  # noqa: PTH105 - the destination may be an empty directory
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return events


def check_trace(path: Path) -> int:
    """Read the footers of a Parquet trace, a file or a directory, and return how many chunks it has.

    Raises:
        TraceError: It is missing, empty, cut short, or has other columns.
        UnsupportedVersionError: A newer release wrote it.
    """
    if not path.exists():
        raise TraceError(f"{path}: no such trace")
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: no trace here, expected Parquet files")
    chunks = sum(_check_file(file) for file in files)
    if not chunks:
        raise TraceError(f"{path}: the trace is empty")
    return chunks


def _check_file(file: Path) -> int:
    try:
        metadata = pq.read_metadata(file)
        found = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{file}: not a readable Parquet file, {_first_line(error)}") from error
    version = (metadata.metadata or {}).get(VERSION_KEY)
    if version is not None and version.isdigit() and int(version) > TRACE_VERSION:
        raise UnsupportedVersionError(
            f"{file}: trace of version {int(version)}; this release reads up to {TRACE_VERSION}"
        )
    for field in TRACE_SCHEMA:
        index = found.get_field_index(field.name)
        if index < 0:
            raise TraceError(f"{file}: not a trace, column {field.name!r} is missing")
        if _shape(found.field(index).type) != _shape(field.type):
            raise TraceError(
                f"{file}: not a trace, column {field.name!r} is {found.field(index).type}, expected {field.type}"
            )
    return int(metadata.num_rows)


def _shape(kind: pa.DataType) -> tuple[bool, pa.DataType]:
    """A list's element may be named in several ways; what counts is its type."""
    return (True, kind.value_type) if pa.types.is_list(kind) else (False, kind)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _write_chunks(frames: Iterable[Frame], file: Path) -> int:
    events = 0
    with pq.ParquetWriter(file, TRACE_SCHEMA, compression="zstd") as writer:
        rows: list[dict[str, object]] = []
        for row, count in _chunks(frames):
            events += count
            rows.append(row)
            if len(rows) == _CHUNKS_PER_ROW_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, TRACE_SCHEMA))
                rows.clear()
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, TRACE_SCHEMA))
    return events


def _chunks(frames: Iterable[Frame]) -> Iterator[tuple[dict[str, object], int]]:
    """Cut each subscription's events into chunks, in order; yield each row with its number of events."""
    open_chunks: dict[tuple[str, str], list[Event]] = {}
    begun: dict[tuple[str, str], int] = {}
    for topic, subscription, events in frames:
        key = (topic, subscription)
        pending = open_chunks.setdefault(key, [])
        pending += events
        while len(pending) >= CHUNK_EVENTS:
            full, open_chunks[key] = pending[:CHUNK_EVENTS], pending[CHUNK_EVENTS:]
            pending = open_chunks[key]
            yield _row(key, begun.get(key, 0), full), len(full)
            begun[key] = begun.get(key, 0) + 1
    for key, rest in open_chunks.items():
        if rest:
            yield _row(key, begun.get(key, 0), rest), len(rest)


def _row(key: tuple[str, str], chunk: int, events: list[Event]) -> dict[str, object]:
    columns = dict(zip(Event._fields, zip(*events, strict=True), strict=True))
    return {
        "topic": key[0],
        "subscription": key[1],
        "chunk": chunk,
        "first_seq": chunk * CHUNK_EVENTS,
        "first_ts_ms": events[0].ts_ms,
        "last_ts_ms": events[-1].ts_ms,
        **columns,
    }
