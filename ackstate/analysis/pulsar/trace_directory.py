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
from pyroaring import BitMap

from ackstate.analysis.atomic_write import atomic_write, open_lock, write_atomically
from ackstate.analysis.estimate.current_policy import BROKER_SETTINGS
from ackstate.analysis.replay.acked import AckAccumulator
from ackstate.analysis.replay.polled import PolledChunk
from ackstate.analysis.trace.chunks import ChunkWriter, PolledEvents, events_of, pieces
from ackstate.analysis.trace.events import CHUNK_EVENTS, EVENT_COLUMNS, PolledEvent, TraceError
from ackstate.analysis.trace.parquet import MANIFEST, check_trace, listed_names, trace_files, write_manifest
from ackstate.analysis.trace.recorder import Recorder, polled_frames, segments, torn_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ackstate.analysis.replay.acked import Int64s

_HIDDEN = ".recording"
_LOCK = "LOCK"
_COLUMNS = (*EVENT_COLUMNS, "until_ms")
_Key = tuple[str, str]


class Recorded(NamedTuple):
    """The end of a subscription, or of a topic, in a trace."""

    acked: dict[int, BitMap]  # The entries acked at its end, by ledger; for a topic, the published ones
    last_ms: int  # The time of its last event


class Resumed(NamedTuple):
    """The end of an earlier recording."""

    # For each (topic, subscription) of the trace, its end; the subscription is empty for the topic.
    recorded: dict[_Key, Recorded]
    until_ms: int = -1  # The latest time in it; -1 if it is new
    recovered_events: int = 0  # Events of an unfinished hour that a killed process left, now in a file of their own
    lost_bytes: int = 0  # Bytes of a torn frame at its end, which are lost


@final
class TraceDirectory:
    """The trace of one recorder. `record` may be called by any number of threads, the others by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hidden = path / _HIDDEN
        _check_place(path, self._hidden)
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
            self.polled_until_ms = -1
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

    def record(self, topic: str, subscription: str, events: Sequence[PolledEvent]) -> None:
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
            if not check_trace(self.path).has_intervals:
                raise TraceError(f"{self.path}: not a trace that ackstate pulsar record wrote")
            self._read_written()
        for directory in sorted(self._hidden.iterdir()):
            if not directory.name.isdecimal():
                continue
            if int(directory.name) < self._number:
                shutil.rmtree(directory)
                continue
            lost += sum(map(torn_bytes, segments(directory)))
            recovered += self._finish(int(directory.name))
        recorded, until_ms = _read_ends(self.path) if self._number else ({}, -1)
        self._begin()
        return Resumed(recorded, until_ms, recovered, lost)

    def _read_written(self) -> None:
        for file in trace_files(self.path):
            rows = pq.read_table(file, columns=["topic", "subscription", "event_count"]).to_pylist()
            for row in rows:
                key = row["topic"], row["subscription"]
                chunks, events = self._written.get(key, (0, 0))
                self._written[key] = chunks + 1, events + row["event_count"]

    def _begin(self) -> None:
        self._recorder = Recorder(self._hidden / f"{self._number:05}", has_intervals=True)

    def _close_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    # --- Finishing an hour

    def _finish(self, number: int) -> int:
        """Move a recording into the file of its number; return the number of events, 0 without any."""
        directory = self._hidden / f"{number:05}"
        if not any(True for _ in polled_frames(directory)):
            shutil.rmtree(directory, ignore_errors=True)
            return 0
        file = self.path / f"part-{number:05}.parquet"
        with (
            atomic_write(file) as unfinished,
            ChunkWriter(unfinished, written=self._written, polled_until_ms=self.polled_until_ms) as writer,
        ):
            _write_chunks(directory, writer)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        write_manifest(self.path, sorted({*(listed_names(self.path) or ()), file.name}))
        shutil.rmtree(directory)
        self._written, self._number = writer.written, number + 1
        return writer.events


def _check_place(path: Path, hidden: Path) -> None:
    """Refuse a place that has anything but a trace of polls."""
    if path.exists() and not path.is_dir():
        raise TraceError(f"{path}: not a directory")
    if path.is_dir() and not hidden.is_dir() and any(path.iterdir()):
        raise TraceError(f"{path}: not a trace that ackstate pulsar record wrote: give a new directory")
    if path.is_dir() and any(path.glob("*.parquet")) and not hidden.is_dir():
        raise TraceError(f"{path}: not a trace that ackstate pulsar record wrote")
    if hidden.is_dir() and (path / MANIFEST).is_dir():
        raise TraceError(f"{path / MANIFEST}: not a file")


def _write_chunks(directory: Path, writer: ChunkWriter) -> None:
    """Write a recording as chunks. Memory: less than a chunk for each subscription."""
    waiting: dict[_Key, list[np.ndarray]] = {}
    counts: dict[_Key, int] = {}
    for topic, subscription, events in polled_frames(directory):
        key = topic, subscription
        waiting.setdefault(key, []).append(events)
        counts[key] = counts.get(key, 0) + len(events)
        if counts[key] >= CHUNK_EVENTS:
            joined = np.concatenate(waiting.pop(key))
            whole = len(joined) // CHUNK_EVENTS * CHUNK_EVENTS
            for begin in range(0, whole, CHUNK_EVENTS):
                writer.write(key, _columns(joined[begin : begin + CHUNK_EVENTS]))
            waiting[key], counts[key] = [joined[whole:].copy()], len(joined) - whole
    for key, parts in waiting.items():
        writer.write(key, _columns(np.concatenate(parts)))


def _columns(events: np.ndarray) -> PolledEvents:
    return PolledEvents(*(events[name].astype(np.int64) for name in PolledEvents._fields))


def _read_ends(path: Path) -> tuple[dict[_Key, Recorded], int]:
    """Return the acks at the end of each subscription of a trace, and its latest time."""
    folds: dict[_Key, AckAccumulator] = {}
    last: dict[_Key, int] = {}
    until_ms = -1
    for file in trace_files(path):
        with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            for batch in parquet.iter_batches(batch_size=64):
                for piece in pieces(batch):
                    offsets, columns = events_of(piece, _COLUMNS)
                    keys = zip(piece["topic"].to_pylist(), piece["subscription"].to_pylist(), strict=True)
                    for row, key in enumerate(keys):
                        chunk = _chunk([each[offsets[row] : offsets[row + 1]] for each in columns])
                        _fold(folds.setdefault(key, AckAccumulator()), chunk, is_topic=not key[1])
                        last[key] = int(chunk.ts_ms[-1])
                        until_ms = max(until_ms, int(chunk.until_ms.max()))
    recorded = {
        key: Recorded({each: bitmap for each, bitmap in fold.acked.items() if bitmap}, last[key])
        for key, fold in folds.items()
    }
    return recorded, until_ms


def _chunk(columns: Sequence[Int64s]) -> PolledChunk:
    ts_ms, kind, ledger_id, first, last, number, until_ms = columns
    return PolledChunk.of([ts_ms, kind, ledger_id, first, last], until_ms=until_ms, number=number)


def _fold(fold: AckAccumulator, chunk: PolledChunk, *, is_topic: bool) -> None:
    if not is_topic:
        fold.take(chunk)
        return
    for ledger_id, first, last in zip(
        chunk.ledger_id.tolist(), chunk.first_entry.tolist(), chunk.last_entry.tolist(), strict=True
    ):
        fold.acked.setdefault(ledger_id, BitMap()).add_range(first, last + 1)
