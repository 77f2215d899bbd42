"""Writes a trace as Parquet files, and checks the files of a trace, or of one for each day, before they are read.

Each file states whether it is the only one; a manifest lists those of several: ``_manifest.json`` is an object with
`magic`, `version` and `files`: name -> `bytes`, the size of the file, and `footer_sha256`, the SHA-256 of its Parquet
footer, which lists the size and place of every page. Spark ignores the manifest because of its name. In a store, which
cannot rename files, the manifest is written last and commits them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import defaultdict
from contextlib import contextmanager, suppress
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap

from ackstate.analysis.location import StorePath, write_atomically
from ackstate.analysis.trace.chunks import (
    RULE,
    TRACE_SCHEMA,
    WALL_CLOCK_MS,
    ChunkWriter,
    EventOrder,
    Events,
    Gatherer,
    TraceClock,
)
from ackstate.analysis.trace.events import (
    CHUNK_EVENTS,
    DROPPED_KEY,
    FILES_KEY,
    ONLY,
    POLL_MS_KEY,
    POLLED_UNTIL_KEY,
    SEVERAL,
    TRACE_VERSION,
    VERSION_KEY,
    TraceError,
)
from ackstate.entry_bitmap import run_end
from ackstate.errors import UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.chunks import Int64s
    from ackstate.analysis.trace.recording import Frame


MANIFEST = "_manifest.json"
_MAGIC = "ackstate trace"
_VERSION = 1
_BYTES_MAX = 256 << 20
_FOOTER_END = 8  # The length of a Parquet file's footer, and its magic.
_AGAIN = "copy the whole trace again, or create it again"


def footer(file: Location) -> tuple[int, bytes]:
    """Return the size of a Parquet file, and its footer, unchecked."""
    with file.open("rb") as source:
        size = source.seek(0, 2)
        source.seek(max(0, size - _FOOTER_END))
        length = int.from_bytes(source.read(4), "little")
        source.seek(max(0, size - _FOOTER_END - length))
        return size, source.read()


def write_manifest(directory: Location, names: Iterable[str] | None = None) -> None:
    """List the Parquet files of a trace that is complete."""
    if names is None:
        names = [file.name for file in directory.glob("*.parquet")]
    files = {name: _entry(directory / name) for name in sorted(names)}
    write_atomically(directory / MANIFEST, json.dumps({"magic": _MAGIC, "version": _VERSION, "files": files}, indent=1))


def listed_names(directory: Location) -> frozenset[str] | None:
    """Return the files that a manifest lists; None without one."""
    manifest = directory / MANIFEST
    return frozenset(_read(manifest)) if manifest.exists() else None


def check_names(path: Location, files: Sequence[Location]) -> Mapping[str, Mapping[str, Any]] | None:
    """Check that a trace has the files that its manifest lists, and return the manifest; None without one."""
    if not path.is_dir() or not (path / MANIFEST).exists():
        return None
    listed = _read(path / MANIFEST)
    names = [file.name for file in files]
    if missing := sorted(listed.keys() - set(names)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise TraceError(f"{path}: {missing[0]}{more} of its {len(listed)} files is missing: {_AGAIN}")
    if strangers := sorted(set(names) - listed.keys()):
        raise TraceError(f"{path}: {strangers[0]} is not a file of this trace, {MANIFEST} does not list it: remove it")
    return listed


def check_files(
    path: Location, stated: Mapping[Location, bytes | None], listed: Mapping[str, Mapping[str, Any]] | None
) -> None:
    """Check that a trace is complete, and that its files were written together."""
    if listed is not None:
        for file in stated:
            if listed[file.name] != _entry(file):
                raise TraceError(f"{file}: the file differs from the one that {MANIFEST} lists: {_AGAIN}")
        return
    for file, said in stated.items():
        if said not in (ONLY, SEVERAL):
            raise TraceError(f"{file}: not a trace, it does not state whether it is one of several files")
    several = next((file for file, said in stated.items() if said == SEVERAL), None)
    if several is not None:
        where = f"{MANIFEST}, which lists them, is missing" if path.is_dir() else "give the directory with all of them"
        raise TraceError(f"{several}: it is one of several files of a trace: {where}")
    if len(stated) > 1:
        only = next(iter(stated))
        raise TraceError(f"{path}: {only.name} is a whole trace, and there are {len(stated)} files: keep them apart")


def _entry(file: Location) -> dict[str, Any]:
    size, end = footer(file)
    return {"bytes": size, "footer_sha256": hashlib.sha256(end).hexdigest()}


def _read(file: Location) -> Mapping[str, Mapping[str, Any]]:
    try:
        with file.open("rb") as source:
            text: bytes = source.read(_BYTES_MAX + 1)
        if len(text) > _BYTES_MAX:
            raise ValueError(f"it has more than {_BYTES_MAX} bytes")
        said = json.loads(text)
        if said["magic"] != _MAGIC or type(said["version"]) is not int:
            raise ValueError("it is not the manifest of a trace")
        if said["version"] > _VERSION:
            raise UnsupportedVersionError(
                f"{file}: manifest has version {said['version']}; this release reads up to {_VERSION}"
            )
        files = said["files"]
        if not isinstance(files, dict) or not all(isinstance(each, dict) for each in files.values()):
            raise ValueError("its files must be objects")
    except OSError as error:
        raise TraceError(f"{file}: the manifest cannot be read, {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"{file}: the manifest is damaged, {error}: {_AGAIN}") from error
    return files


_OF_A_RUN = re.compile(r"part-\d+-[0-9a-f]{32}\.parquet")


class NewFiles(NamedTuple):
    """The destination of the files of a new trace."""

    directory: Location  # A new local directory; in a store, the directory of the trace
    run: str = ""  # In a store, a unique part of their names; else empty

    def file(self, number: int = 0) -> Location:
        """Return the file of a number; readers read files in order of their numbers."""
        return self.directory / f"part-{number:05}{self.run and '-'}{self.run}.parquet"


@contextmanager
def committed_in_store(directory: StorePath) -> Iterator[NewFiles]:
    """Yield the destination of the files of a trace; its manifest, written last, commits them.

    The files of the previous manifest are then deleted. After an error the new files are deleted instead.
    """
    files = NewFiles(directory, uuid4().hex)
    try:
        # A trace without a manifest gets one first, so that readers do not see the new files beside it.
        if listed_names(directory) is None and (before := present_names(directory)):
            write_manifest(directory, before)
        yield files
        before = present_names(directory)
    except BaseException as error:
        _delete_all(directory, files.run)
        if isinstance(error, OSError):
            # Arrow's message lacks the path.
            raise directory.named(error) from error
        raise
    write_manifest(directory, [each.name for each in _files_of(directory, files.run)])
    # Leftovers that cannot be deleted only take space.
    with suppress(OSError):
        for name in before:
            (directory / name).unlink(missing_ok=True)


def present_names(directory: StorePath) -> frozenset[str]:
    """Return the files of the trace in a directory, ignoring those of unfinished writers."""
    listed = listed_names(directory)
    if listed is not None:
        return listed
    names = (each.name for each in directory.glob("*.parquet"))
    return frozenset(name for name in names if not _OF_A_RUN.fullmatch(name))


def _files_of(directory: StorePath, run: str) -> Iterator[StorePath]:
    return directory.glob(f"part-*-{run}.parquet")


def _delete_all(directory: StorePath, run: str) -> None:
    with suppress(OSError):
        for each in _files_of(directory, run):
            each.unlink(missing_ok=True)


_CHUNK = ("topic", "subscription", "chunk")
_TIMES = ("first_ts_ms", "last_ts_ms")
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
    """
    with new_trace(path) as files:
        with ChunkWriter(files.file()) as writer:
            write_chunks(frames, writer)
        if not writer.events:
            raise TraceError(f"{path}: there is no event, so there is no trace to write")
    return writer.events


@contextmanager
def new_trace(path: Location) -> Iterator[NewFiles]:
    """Yield the destination of a trace's Parquet files, which become the trace if the block ends without an error.

    If there are several files, the block adds a manifest: `ackstate.analysis.trace.parquet.write_manifest`. In a store
    each trace has one, which is written when the block has ended.
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
    """Check that replacing `path` would destroy only a trace, or an empty directory."""
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
    """A checked trace: its files and its extent. Of several days, path and files are those of the last."""

    begin_ms: int  # Its first millisecond
    end_ms: int  # Its last millisecond: that of the last event, or of a later poll
    chunk_count: int  # Number of its chunks
    path: Location
    files: tuple[Location, ...]
    row_groups_max: int = 1  # Number of row groups in the file that has most
    size_bytes: int = 0  # Uncompressed size of its columns
    poll_ms: int = 0  # The longest time between two polls, if it was recorded by polls; else 0
    dropped_events: int = 0  # Events that it lacks because a recorder dropped them
    days: tuple[str, ...] = ()  # The names of the days, if it is a directory of daily traces


def check_trace(path: Location, *, is_timed: bool = True) -> Span:
    """Check the footers and the chunk numbers of a Parquet trace, and return its extent."""
    # One bit per chunk: memory stays small even for a trace of billions of events.
    found: dict[tuple[str, str], BitMap] = defaultdict(BitMap)
    begins: list[int] = []
    ends: list[int] = []
    clock = TraceClock()
    row_groups_max = size_bytes = poll_ms = dropped = 0
    files = trace_files(path)
    listed = check_names(path, files)
    stated: dict[Location, bytes | None] = {}
    for file in files:
        rows, row_groups, size, notes = _scalars(file)
        stated[file] = notes.get(FILES_KEY)
        ends.append(_noted(file, notes, POLLED_UNTIL_KEY, digits_max=_MS_DIGITS_MAX))
        dropped += _noted(file, notes, DROPPED_KEY, digits_max=_COUNT_DIGITS_MAX)
        poll_ms = max(poll_ms, _noted(file, notes, POLL_MS_KEY, digits_max=_MS_DIGITS_MAX))
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
    check_files(path, stated, listed)
    for (topic, subscription), chunks in found.items():
        missing = run_end(chunks, 0) if 0 in chunks else 0
        if missing < len(chunks):
            where = f"subscription {subscription!r} of {topic}" if subscription else topic
            raise TraceError(f"{path}: chunk {missing} of {where} is missing")
    count = sum(map(len, found.values()))
    return Span(min(begins), max(ends), count, path, tuple(files), row_groups_max, size_bytes, poll_ms, dropped)


def _noted(file: Location, notes: Mapping[bytes, bytes], key: bytes, *, digits_max: int) -> int:
    """Return a number in the metadata of a file; 0 if it is missing."""
    text = notes.get(key, b"0")
    if not text.isdigit() or len(text) > digits_max:
        raise TraceError(f"{file}: {key.decode()} must be a number, got {text[:40]!r}")
    return int(text)


def _scalars(file: Location) -> tuple[pa.Table, int, int, Mapping[bytes, bytes]]:
    """Check a file; return its chunks with times, number and size of its row groups, and its metadata."""
    if not file.is_file():
        raise TraceError(f"{file}: not a file")
    with opened_parquet(file) as parquet:
        _check_schema(file, parquet)
        rows = parquet.read([*_CHUNK, "first_seq", *_TIMES, "event_count"])
        for name in rows.column_names:
            if rows[name].null_count:
                raise TraceError(f"{file}: not a trace, a row has no {name!r}")
        counts = rows["event_count"].to_numpy()
        for row in np.flatnonzero((counts < 1) | (counts > _ROW_EVENTS_MAX))[:1].tolist():
            raise TraceError(f"{file}: row {row + 1} has {counts[row]} events; a row must have 1 to {_ROW_EVENTS_MAX}")
        groups = range(parquet.num_row_groups)
        size = sum(parquet.metadata.row_group(number).total_byte_size for number in groups)
        return rows, len(groups), size, parquet.metadata.metadata or {}


@contextmanager
def opened_parquet(file: Location) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; a failure to read it in the block raises `TraceError` with its name."""
    try:
        # Opened here, because Arrow rejects names that are not valid text. A damaged page may decompress: check the
        # sums.
        with file.open("rb") as source, pq.ParquetFile(source, page_checksum_verification=True) as parquet:
            yield parquet
    # Arrow reports damage with many types of errors.
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise TraceError(f"{file}: not a readable Parquet file, {said}") from error


def _check_times(file: Location, rows: pa.Table, clock: TraceClock) -> None:
    """Refuse invalid times; within a chunk they rise from the first to the last."""
    ends = [rows[name].to_numpy() for name in _TIMES]
    wrong = [clock.judge(each) for each in ends]
    for row in np.flatnonzero(wrong[0] | wrong[1])[:1].tolist():
        ts_ms = int(ends[0 if wrong[0][row] else 1][row])
        topic, subscription, chunk = (rows[name][row].as_py() for name in _CHUNK)
        where = f"chunk {chunk} of " + (f"subscription {subscription!r} of {topic}" if subscription else topic)
        raise TraceError(f"{file}: row {row + 1}, {where}: {clock.wrong(ts_ms)}")


def _check_schema(file: Location, parquet: pq.ParquetFile) -> None:
    """Check the version and the columns of a file."""
    version = (parquet.metadata.metadata or {}).get(VERSION_KEY, b"0")
    if not version.isdigit() or not int(version):
        raise TraceError(f"{file}: not a trace, its version is {version!r}")
    if int(version) != TRACE_VERSION:
        raise UnsupportedVersionError(
            f"{file}: trace has version {int(version)}; this release reads version {TRACE_VERSION}"
        )
    found = parquet.schema_arrow
    for field in TRACE_SCHEMA:
        matching = found.get_all_field_indices(field.name)
        if len(matching) != 1:
            many = "present several times" if matching else "missing"
            raise TraceError(f"{file}: not a trace, column {field.name!r} is {many}")
        kind = found.field(matching[0]).type
        if not _is_alike(kind, field.type):
            raise TraceError(f"{file}: not a trace, column {field.name!r} is {kind}, expected {field.type}")


def _is_alike(kind: pa.DataType, expected: pa.DataType) -> bool:
    """Compare types, ignoring the names of list elements and the nullability of numbers."""
    if pa.types.is_list(kind) and pa.types.is_list(expected):
        return _is_alike(kind.value_type, expected.value_type)
    if pa.types.is_struct(kind) and pa.types.is_struct(expected):
        return [(each.name, each.type) for each in kind] == [(each.name, each.type) for each in expected]
    return bool(kind == expected)


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


def write_chunks(frames: Iterable[Frame], writer: ChunkWriter) -> None:
    """Cut each subscription's events into chunks, in order; refuse what a single cursor cannot have done."""
    clock = TraceClock()
    orders: dict[tuple[str, str], EventOrder] = defaultdict(EventOrder)

    def settle(key: tuple[str, str], rows: Int64s) -> None:
        events = Events.of_rows(rows)
        for ts_ms in events.ts_ms[orders[key].judge_lives(events)][:1].tolist():
            raise TraceError(
                f"two cursors under one name, seen at {ts_ms} ms: {_whose(key)}: record each under a name of its own"
            )
        writer.write(key, events)

    gathered = Gatherer(settle)
    for topic, subscription, events in frames:
        rows = np.array(events, np.int64).reshape(len(events), len(Events._fields))
        for ts_ms in rows[clock.judge(rows[:, 0]), 0][:1].tolist():
            raise TraceError(f"an event of {_whose((topic, subscription))}: {clock.wrong(ts_ms)}")
        gathered.add((topic, subscription), rows)
    gathered.flush()


def _whose(key: tuple[str, str]) -> str:
    return " of ".join(filter(None, reversed(key)))


DAY_SEQ = 2**44
"""`seq` of a day is less than this, so that the chunks of successive days can be concatenated."""
_DATE = re.compile(r"(?<!\d)(\d{4}-\d\d-\d\d)(?!\d)")


def days_of(path: Location) -> list[Location]:
    """Return the traces at a path: the path itself, or each day of a directory of daily traces, by name.

    A day is a directory such as ``day=2026-11-20``, or a Parquet file with a date in its name. If nothing happened, its
    directory may be empty, and is left out. If the names are dates, none may be missing.
    """
    if not path.is_dir() or (path / MANIFEST).exists():
        return [path]
    visible: list[Location] = sorted(each for each in path.iterdir() if each.name[0] not in "._")
    directories = [each for each in visible if each.is_dir()]
    files = [each for each in visible if each not in directories and each.name.endswith(".parquet")]
    strangers = [file for file in files if not _DATE.search(file.name)]
    if strangers:
        if day := next((each for each in directories if _DATE.search(each.name)), None):
            raise TraceError(f"{path}: {strangers[0].name} is no day, unlike {day.name}: keep the traces apart")
        return [path]
    days = sorted([*directories, *files])
    for before, after in pairwise(days):
        _check_follows(before.name, after.name, path)
    if days and not (found := [day for day in days if day.is_file() or any(day.iterdir())]):
        raise TraceError(f"{path}: no day has a trace")
    return found if days else [path]


def check_days(path: Location) -> list[Span]:
    """Check the trace at a path, or those of all days: `check_trace` of each, and that each begins after the last."""
    days = list(map(check_trace, days_of(path)))
    for before, after in pairwise(days):
        if after.begin_ms <= before.end_ms:
            raise TraceError(
                f"{after.path}: it begins at {after.begin_ms} ms, and {before.path.name} ends at {before.end_ms} ms: a "
                "day must begin after the previous one; split them where there is no event"
            )
        if (after.begin_ms in WALL_CLOCK_MS) != (before.end_ms in WALL_CLOCK_MS):
            raise TraceError(
                f"{after.path}: all days must have times of the same clock, got {after.begin_ms} ms after "
                f"{before.path.name} ended at {before.end_ms} ms: write {RULE}"
            )
    return days


def span_of(days: Sequence[Span]) -> Span:
    """Return the extent of successive days, or of the only trace."""
    if len(days) == 1:
        return days[0]
    return days[-1]._replace(
        begin_ms=days[0].begin_ms,
        chunk_count=sum(each.chunk_count for each in days),
        row_groups_max=max(each.row_groups_max for each in days),
        size_bytes=sum(each.size_bytes for each in days),
        poll_ms=max(each.poll_ms for each in days),
        dropped_events=sum(each.dropped_events for each in days),
        days=tuple(day.path.name for day in days),
    )


def _check_follows(before: str, after: str, directory: Location) -> None:
    dates = [_DATE.search(name) for name in (before, after)]
    try:
        first, second = (date.fromisoformat(found[1]) for found in dates if found)
    except ValueError:
        # Without dates in the names only their order can be checked.
        return
    if second > first + timedelta(days=1):
        raise TraceError(
            f"{directory}: the day {first + timedelta(days=1)} is missing between {before} and {after}; add it, as an "
            "empty directory if nothing happened"
        )
