"""Writes a recording as a Parquet trace, and checks a Parquet trace before Spark reads it."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap

from ackstate.analysis.location import StorePath
from ackstate.analysis.trace.chunk_rows import POLLED_SCHEMA, TRACE_SCHEMA, has_intervals
from ackstate.analysis.trace.chunk_writer import ChunkWriter
from ackstate.analysis.trace.events import (
    CHUNK_EVENTS,
    DROPPED_KEY,
    INTERVAL_VERSION,
    POLLED_UNTIL_KEY,
    TRACE_VERSION,
    VERSION_KEY,
    Event,
    PolledEvent,
    TraceError,
)
from ackstate.analysis.trace.manifest import FILES_KEY, MANIFEST, check_files, check_names, listed_names
from ackstate.analysis.trace.new_files import NewFiles, committed_in_store, present_names
from ackstate.analysis.trace.rows import Events, PolledEvents
from ackstate.analysis.trace.times import TraceClock
from ackstate.entry_bitmap import run_end
from ackstate.errors import UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.recorder import Frame

_CHUNK = ("topic", "subscription", "chunk")
_TIMES = ("first_ts_ms", "last_ts_ms")
_SCHEMAS = {TRACE_VERSION: TRACE_SCHEMA, INTERVAL_VERSION: POLLED_SCHEMA}
_SUFFIX = ".parquet"
_MS_DIGITS_MAX = 13  # until the year 2286
_COUNT_DIGITS_MAX = 18
# Four times the rows that we write: few bytes may say that they hold any number of equal events.
_ROW_EVENTS_MAX = 4 * CHUNK_EVENTS
FIRST_FILE = f"part-00000{_SUFFIX}"
# Spark ignores files whose names start with these characters.
_HIDDEN = ("_", ".")
_NOTES = frozenset(("_SUCCESS", MANIFEST))


def write_trace(frames: Iterable[Frame], path: Location) -> int:
    """Write a Parquet trace and return its number of events.

    The trace appears at `path` when it is complete: a directory with one Parquet file, renamed into place. An existing
    trace is replaced.

    Raises:
        TraceError: There is no event, or `path` exists and is not a trace.
        UnsupportedVersionError: The trace at `path` has another version.
        OSError: The disk is full or failed; `path` is unchanged.
    """
    with new_trace(path) as files:
        with ChunkWriter(files.file()) as writer:
            _write_chunks(frames, writer)
        if not writer.events:
            raise TraceError(f"{path}: there is no event, so there is no trace to write")
    return writer.events


@contextmanager
def new_trace(path: Location) -> Iterator[NewFiles]:
    """Yield the destination of a trace's Parquet files, which become the trace if the block ends without an error.

    If there are several files, the block adds a manifest: `ackstate.analysis.trace.manifest.write_manifest`. In a store
    each trace has one, which is written when the block has ended.

    Raises:
        As `write_trace`; an error of the block is raised again, and `path` is unchanged.
    """
    check_replaceable(path)
    if isinstance(path, StorePath):
        with committed_in_store(path) as files:
            yield files
        return
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield NewFiles(unfinished)
        _put_in_place(unfinished, target)
    except OSError as error:
        # Arrow's message lacks the path.
        raise error if error.filename else OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_replaceable(path: Location) -> None:
    """Check that replacing `path` would destroy only a trace, or an empty directory.

    Raises:
        TraceError: There is something else, or a trace with other files in it.
        UnsupportedVersionError: It has another version.
        OSError: The directory cannot be read.
    """
    if path.is_dir():
        entries: list[Location] = list(path.iterdir())
        for stranger in sorted(each.name for each in entries if not _is_of_trace(each)):
            raise TraceError(f"{path}: not a trace that can be replaced, it contains {stranger!r}")
        if not entries:
            return
        if isinstance(path, StorePath) and not present_names(path):
            return
    if path.exists() if isinstance(path, StorePath) else os.path.lexists(path):
        check_trace(path)


def _is_of_trace(entry: Location) -> bool:
    """Return whether an entry of a directory belongs to a trace, so that it may be removed with it."""
    name = entry.name
    is_checksum = name.startswith(".") and name.endswith(".crc")
    has_our_name = name in _NOTES or is_checksum or (name.endswith(_SUFFIX) and not name.startswith(_HIDDEN))
    return has_our_name and entry.is_file() and not entry.is_symlink()


def trace_files(path: Location) -> list[Location]:
    """Return the Parquet files of a trace, a file or a directory, in order of their names.

    In a store, which may have files of unfinished writers, these are the files that the manifest lists.

    Raises:
        TraceError: There are none, or one has a name that is not UTF-8; or as `listed_names`.
        OSError: The directory cannot be read.
    """
    _check_name(path)
    if not path.exists():
        raise TraceError(f"{path}: no such trace")
    if not path.is_dir():
        if path.name.startswith(_HIDDEN):
            raise TraceError(f"{path}: Spark ignores files whose name starts with {path.name[0]!r}")
        return [path]
    files: list[Location] = [
        file for file in path.iterdir() if file.name.endswith(_SUFFIX) and not file.name.startswith(_HIDDEN)
    ]
    listed = listed_names(path) if isinstance(path, StorePath) else None
    if listed is not None:
        files = [file for file in files if file.name in listed]
    if not files:
        raise TraceError(f"{path}: no trace here, expected Parquet files")
    for file in files:
        _check_name(file)
    return sorted(files)


def _check_name(path: Location) -> None:
    """Refuse a name that cannot be passed to another process."""
    name = os.fsencode(str(path.absolute()))
    try:
        name.decode()
    except UnicodeDecodeError:
        raise TraceError(f"{name.decode(errors='backslashreplace')}: not UTF-8, rename it") from None


class Span(NamedTuple):
    """The extent of a trace.

    Attributes:
        begin_ms: Its first millisecond.
        end_ms: Its last millisecond: that of the last event, or of a later poll.
        chunk_count: Number of its chunks.
        row_groups_max: Number of row groups in the file that has most.
        size_bytes: Uncompressed size of its columns.
        has_intervals: Whether it is a trace of polls, whose events have intervals instead of times.
        dropped_events: Events that it lacks because a recorder dropped them.
        days: The names of the days, if it is a directory of daily traces.
    """

    begin_ms: int
    end_ms: int
    chunk_count: int
    row_groups_max: int = 1
    size_bytes: int = 0
    has_intervals: bool = False
    dropped_events: int = 0
    days: tuple[str, ...] = ()


def check_trace(path: Location, *, is_timed: bool = True) -> Span:
    """Check the footers and the chunk numbers of a Parquet trace, and return its extent.

    Args:
        path: A file or a directory.
        is_timed: Whether to refuse invalid times; `check_events` names the event.

    Raises:
        TraceError: It is missing, empty or cut short, or has wrong columns, or lacks or repeats a chunk or a file.
        UnsupportedVersionError: It has another version.
        OSError: The directory cannot be read.
    """
    # One bit per chunk: memory stays small even for a trace of billions of events.
    found: dict[tuple[str, str], BitMap] = defaultdict(BitMap)
    begins: list[int] = []
    ends: list[int] = []
    clock = TraceClock()
    row_groups_max = size_bytes = dropped = 0
    files = trace_files(path)
    listed = check_names(path, files)
    stated: dict[Location, bytes | None] = {}
    polled: dict[bool, Location] = {}
    for file in files:
        rows, row_groups, size, notes, is_polled = _scalars(file)
        stated[file] = notes.get(FILES_KEY)
        ends.append(_noted(file, notes, POLLED_UNTIL_KEY, digits_max=_MS_DIGITS_MAX))
        dropped += _noted(file, notes, DROPPED_KEY, digits_max=_COUNT_DIGITS_MAX)
        polled[is_polled] = file
        size_bytes += size
        row_groups_max = max(row_groups_max, row_groups)
        if is_timed:
            _check_times(file, rows, clock)
        if rows.num_rows:
            begins.append(pc.min(rows["first_ts_ms"]).as_py())
            ends.append(pc.max(rows["last_ts_ms"]).as_py())
        for topic, subscription, chunk in zip(*(rows[name].to_pylist() for name in _CHUNK), strict=True):
            where = f"subscription {subscription!r} of {topic}" if subscription else topic
            chunks = found[topic, subscription]
            if chunk < 0:
                raise TraceError(f"{path}: chunk {chunk} of {where} is invalid")
            if chunk in chunks:
                raise TraceError(f"{path}: chunk {chunk} of {where} occurs several times")
            chunks.add(chunk)
    if not found:
        raise TraceError(f"{path}: the trace is empty")
    if len(polled) > 1:
        raise TraceError(
            f"{polled[True]}: it is a file of a trace of polls, unlike {polled[False].name}: keep the traces apart"
        )
    check_files(path, stated, listed)
    for (topic, subscription), chunks in found.items():
        missing = run_end(chunks, 0) if 0 in chunks else 0
        if missing < len(chunks):
            where = f"subscription {subscription!r} of {topic}" if subscription else topic
            raise TraceError(f"{path}: chunk {missing} of {where} is missing")
    count = sum(map(len, found.values()))
    return Span(min(begins), max(ends), count, row_groups_max, size_bytes, True in polled, dropped)


def _noted(file: Location, notes: Mapping[bytes, bytes], key: bytes, *, digits_max: int) -> int:
    """Return a number in the metadata of a file; 0 if it is missing."""
    text = notes.get(key, b"0")
    if not text.isdigit() or len(text) > digits_max:
        raise TraceError(f"{file}: {key.decode()} must be a number, got {text[:40]!r}")
    return int(text)


def _scalars(file: Location) -> tuple[pa.Table, int, int, Mapping[bytes, bytes], bool]:
    """Check a file; return its chunks with times, number and size of its row groups, metadata, `has_intervals`."""
    if not file.is_file():
        raise TraceError(f"{file}: not a file")
    try:
        # Opened here, because Arrow rejects names that are not valid text.
        with file.open("rb") as source, pq.ParquetFile(source, page_checksum_verification=True) as parquet:
            schema = _check_schema(file, parquet)
            rows = parquet.read([*_CHUNK, "first_seq", *_TIMES, "event_count"])
        for name in rows.column_names:
            if rows[name].null_count:
                raise TraceError(f"{file}: not a trace, a row has no {name!r}")
        counts = rows["event_count"].to_numpy()
        for row in np.flatnonzero((counts < 1) | (counts > _ROW_EVENTS_MAX))[:1].tolist():
            raise TraceError(f"{file}: row {row + 1} has {counts[row]} events; a row must have 1 to {_ROW_EVENTS_MAX}")
        groups = range(parquet.num_row_groups)
        size = sum(parquet.metadata.row_group(number).total_byte_size for number in groups)
        return rows, len(groups), size, parquet.metadata.metadata or {}, has_intervals(schema)
    # Arrow reports damage with many types of errors.
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise TraceError(f"{file}: not a readable Parquet file, {_first_line(error)}") from error


def _check_times(file: Location, rows: pa.Table, clock: TraceClock) -> None:
    """Refuse invalid times; within a chunk they rise from the first to the last."""
    ends = [rows[name].to_numpy() for name in _TIMES]
    wrong = [clock.judge(each) for each in ends]
    for row in np.flatnonzero(wrong[0] | wrong[1])[:1].tolist():
        ts_ms = int(ends[0 if wrong[0][row] else 1][row])
        topic, subscription, chunk = (rows[name][row].as_py() for name in _CHUNK)
        where = f"chunk {chunk} of " + (f"subscription {subscription!r} of {topic}" if subscription else topic)
        raise TraceError(f"{file}: row {row + 1}, {where}: {clock.wrong(ts_ms)}")


def _check_schema(file: Location, parquet: pq.ParquetFile) -> pa.Schema:
    """Return the columns of a file; check that they match its version."""
    version = (parquet.metadata.metadata or {}).get(VERSION_KEY, b"0")
    if not version.isdigit() or not int(version):
        raise TraceError(f"{file}: not a trace, its version is {version!r}")
    if int(version) not in _SCHEMAS:
        raise UnsupportedVersionError(
            f"{file}: trace has version {int(version)}; this release reads versions {TRACE_VERSION} and"
            f" {INTERVAL_VERSION}"
        )
    found, expected = parquet.schema_arrow, _SCHEMAS[int(version)]
    for field in expected:
        matching = found.get_all_field_indices(field.name)
        if len(matching) != 1:
            many = "present several times" if matching else "missing"
            raise TraceError(f"{file}: not a trace, column {field.name!r} is {many}")
        kind = found.field(matching[0]).type
        if not _is_alike(kind, field.type):
            raise TraceError(f"{file}: not a trace, column {field.name!r} is {kind}, expected {field.type}")
    return expected


def _is_alike(kind: pa.DataType, expected: pa.DataType) -> bool:
    """Compare types, ignoring the names of list elements and the nullability of numbers."""
    if pa.types.is_list(kind) and pa.types.is_list(expected):
        return _is_alike(kind.value_type, expected.value_type)
    if pa.types.is_struct(kind) and pa.types.is_struct(expected):
        return [(each.name, each.type) for each in kind] == [(each.name, each.type) for each in expected]
    return bool(kind == expected)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _put_in_place(unfinished: Path, target: Path) -> None:
    """Rename a new trace into place; an old one, which may be a file, is moved aside first.

    The target is checked again, because another process may have created it while the trace was written.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}.replaced")
    if target.is_symlink():
        raise TraceError(f"{target}: became a symbolic link while the trace was written; nothing was replaced")
    check_replaceable(target)
    if not target.exists():
        unfinished.rename(target)
        return
    target.rename(aside)
    try:
        unfinished.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        aside.unlink()


def _write_chunks(frames: Iterable[Frame], writer: ChunkWriter) -> None:
    """Cut each subscription's events into chunks, in order."""
    open_chunks: dict[tuple[str, str], list[Event | PolledEvent]] = defaultdict(list)
    clock = TraceClock()
    for topic, subscription, events in frames:
        key = (topic, subscription)
        ts_ms = np.array([event.ts_ms for event in events], np.int64)
        for at in np.flatnonzero(clock.judge(ts_ms))[:1].tolist():
            raise TraceError(f"an event of {' of '.join(filter(None, reversed(key)))}: {clock.wrong(int(ts_ms[at]))}")
        open_chunks[key] += events
        while len(open_chunks[key]) >= CHUNK_EVENTS:
            writer.write(key, _arrays(open_chunks[key][:CHUNK_EVENTS]))
            del open_chunks[key][:CHUNK_EVENTS]
    for key, rest in open_chunks.items():
        writer.write(key, _arrays(rest))


def _arrays(events: Sequence[Event | PolledEvent]) -> Events | PolledEvents:
    kind = PolledEvents if events and isinstance(events[0], PolledEvent) else Events
    return kind(*np.array(events, np.int64).reshape(len(events), len(kind._fields)).T)
