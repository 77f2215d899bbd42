"""A trace that grows while it is recorded: a Parquet file for each hour, and a recording of the unfinished hour.

``TRACE/part-00000.parquet``   the first hour, and so on; `_manifest.json` lists the finished ones
``TRACE/_broker.json``         the broker's settings of cursors, as the policy in force; see `read_broker_policy`
``TRACE/.recording/00007``     the recording of the hour that becomes ``part-00007.parquet``
``TRACE/.recording/LOCK``      locked while a process records

An hour is finished in three steps, each of which can be repeated after a crash: write the Parquet file under another
name and rename it, list it in the manifest, delete its recording. A Parquet file that the manifest does not list is
unfinished, a recording whose file is listed is finished.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from typing import TYPE_CHECKING, NamedTuple, Self, final

import numpy as np
import pyarrow.parquet as pq

from ackstate.analysis.estimate.current_policy import BROKER_SETTINGS
from ackstate.analysis.location import atomic_write, open_lock, write_atomically
from ackstate.analysis.replay.acked import AckAccumulator, EventChunk
from ackstate.analysis.trace.check import read_chunks
from ackstate.analysis.trace.chunks import ChunkWriter
from ackstate.analysis.trace.events import POLL_MS_KEY, POLLED_UNTIL_KEY, EventKind, TraceError
from ackstate.analysis.trace.parquet import (
    MANIFEST,
    check_trace,
    listed_names,
    trace_files,
    write_chunks,
    write_manifest,
)
from ackstate.analysis.trace.recording import Recorder, read_recording, segments, torn_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ackstate.analysis.pulsar.recorder import Entries
    from ackstate.analysis.trace.events import Event

_HIDDEN = ".recording"
_LOCK = "LOCK"
_Key = tuple[str, str]


class Resumed(NamedTuple):
    """The end of an earlier recording."""

    # For each (topic, subscription) of the trace, the entries that are acked at its end. The subscription is empty for
    # the topic, with its published entries.
    recorded: dict[_Key, Entries]
    until_ms: int = -1  # The latest time in it; -1 if it is new
    recovered_events: int = 0  # Events of an unfinished hour that a killed process left, now in a file of their own
    lost_bytes: int = 0  # Bytes of a torn frame at its end, which are lost


@final
class TraceDirectory:
    """The trace of one recorder. `record` may be called by any number of threads, the others by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hidden = path / _HIDDEN
        check_place(path)
        self._hidden.mkdir(parents=True, exist_ok=True)
        self._lock = open_lock(self._hidden / _LOCK)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise TraceError(f"{path}: another process records there") from None
        try:
            self._written: dict[_Key, tuple[int, int]] = {}
            self._recorder: Recorder | None = None
            self._number = 0
            self._broker: Mapping[str, str] | None = None
            self._notes = {POLL_MS_KEY: 1, POLLED_UNTIL_KEY: 0}
            self.resumed = self._resume()
        except BaseException:
            self._lock.close()
            raise

    @property
    def recording_bytes(self) -> int:
        """The bytes of the unfinished hour."""
        return 0 if self._recorder is None else self._recorder.path.stat().st_size

    def note_broker(self, properties: Mapping[str, str] | None) -> None:
        """Store the broker's settings of cursors; None, for a broker of another kind than Pulsar, stores nothing."""
        if properties is not None and properties != self._broker:
            write_atomically(self.path / BROKER_SETTINGS, json.dumps(properties, indent=1))
            self._broker = properties

    def note_polls(self, *, poll_ms: int, until_ms: int) -> None:
        """Note for the file of this hour the time between two polls, at least 1, and that of the last poll."""
        self._notes = {POLL_MS_KEY: poll_ms, POLLED_UNTIL_KEY: until_ms}

    def record(self, topic: str, subscription: str, events: Sequence[Event]) -> None:
        """Append events as one frame; it is complete or absent after a crash of this process."""
        assert self._recorder is not None
        self._recorder.record(topic, subscription, events)

    def finish_hour(self) -> int:
        """Move the recorded events into a Parquet file, begin another recording, and return their number.

        No other thread may call `record` meanwhile.
        """
        self._close_recorder()
        count = self._finish(self._number)
        self._begin()
        return count

    def close(self) -> int:
        """Finish the hour, and return its number of events; raises as `finish_hour`. May be called again."""
        if self._lock.closed:
            return 0
        try:
            self._close_recorder()
            return self._finish(self._number)
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # --- Resuming

    def _resume(self) -> Resumed:
        listed = listed_names(self.path) or frozenset()
        for file in self.path.glob("*.parquet"):
            if file.name not in listed:
                file.unlink()  # its recording is still there
        recovered = lost = 0
        self._number = len(listed)
        if listed:
            span = check_trace(self.path)
            if not span.poll_ms:
                raise TraceError(f"{self.path}: not a trace that ackstate pulsar record wrote")
            self.note_polls(poll_ms=span.poll_ms, until_ms=span.end_ms)
            self._read_written()
        for directory in sorted(self._hidden.iterdir()):
            if not directory.name.isdecimal():
                continue
            if int(directory.name) < self._number:
                shutil.rmtree(directory)
                continue
            lost += sum(map(torn_bytes, segments(directory)))
            recovered += self._finish(int(directory.name))
        self._begin()
        if not self._number:
            return Resumed({}, lost_bytes=lost)
        return Resumed(_read_ends(self.path), check_trace(self.path).end_ms, recovered, lost)

    def _read_written(self) -> None:
        for file in trace_files(self.path):
            rows = pq.read_table(file, columns=["topic", "subscription", "event_count"]).to_pylist()
            for row in rows:
                key = row["topic"], row["subscription"]
                chunks, events = self._written.get(key, (0, 0))
                self._written[key] = chunks + 1, events + row["event_count"]

    def _begin(self) -> None:
        self._recorder = Recorder(self._hidden / f"{self._number:05}")

    def _close_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    # --- Finishing an hour

    def _finish(self, number: int) -> int:
        """Move a recording into the file of its number; return the number of events, 0 without any."""
        directory = self._hidden / f"{number:05}"
        if not segments(directory) or not any(True for _ in read_recording(directory)):
            shutil.rmtree(directory, ignore_errors=True)
            return 0
        file = self.path / f"part-{number:05}.parquet"
        with (
            atomic_write(file) as unfinished,
            ChunkWriter(unfinished, written=self._written, notes=self._notes) as writer,
        ):
            write_chunks(read_recording(directory), writer)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        write_manifest(self.path, sorted({*(listed_names(self.path) or ()), file.name}))
        shutil.rmtree(directory)
        self._written, self._number = writer.written, number + 1
        return writer.events


def check_place(path: Path) -> None:
    """Refuse a place that has anything but a trace of polls."""
    hidden = path / _HIDDEN
    if path.exists() and not path.is_dir():
        raise TraceError(f"{path}: not a directory")
    if path.is_dir() and not hidden.is_dir() and any(path.iterdir()):
        raise TraceError(f"{path}: not a trace that ackstate pulsar record wrote: give a new directory")
    if hidden.is_dir() and (path / MANIFEST).is_dir():
        raise TraceError(f"{path / MANIFEST}: not a file")


def _read_ends(path: Path) -> dict[_Key, Entries]:
    """Return the acked entries at the end of each subscription of a trace, and the published ones of each topic."""
    folds: dict[_Key, AckAccumulator] = {}
    for each in read_chunks(path):
        chunk = EventChunk(*each.events[: len(EventChunk._fields)])
        if not each.key[1]:
            chunk = chunk._replace(kind=np.full(len(chunk.kind), EventKind.ACK))
        folds.setdefault(each.key, AckAccumulator()).take(chunk)
    return {key: {each: bitmap for each, bitmap in fold.acked.items() if bitmap} for key, fold in folds.items()}
