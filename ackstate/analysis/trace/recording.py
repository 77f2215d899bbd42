"""Records the events of cursors, in three lines of an embedding program.

    recording = Recording(directory)
    recording.follow(cursor, topic=topic, subscription=name, now_ms=now_ms)   # for a Subscription, its .cursor
    ...                                                                       # ack, persist, dispatch as usual
    recording.close()

``ackstate trace DIRECTORY TRACE`` converts it into a trace, whether the process ended or was killed. If you continue
with the same directory after a restart, follow each cursor again before its first ack: the crash and the recovery are
then recorded. The process died at an unknown time after its last event, and with the same acks in memory at all of
these times: the crash is dated at the latest of them, when the next process followed its first cursor.

A recording is a directory of segments, one for each process that wrote, named ``000001.events`` and so on. A segment
is a header and then frames; a frame is one `write` of one or more events that belong together. The operating system
keeps written data when the process dies, so only the last frame may be torn; a torn last frame is skipped.

``header``  ``ACKTRACE``, version u32
``frame``   length u32 of the payload, CRC-32C u32 of those four bytes, CRC-32C u32 of the payload; the payload is
            topic length u16, subscription length u16, both names in UTF-8, then events of
            ts_ms i64, kind u8, ledger_id i64, first_entry i64, last_entry i64, number i64

All numbers are little-endian.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Self, final

import google_crc32c
import numpy as np
from pyroaring import BitMap

from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.cursor.results import Change, CursorListener
from ackstate.errors import UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ackstate.cursor.cursor import ManagedCursor


@final
class EntrySet:
    """A set of (ledger, entry), stored as one bitmap per ledger; the judge of cursors shares no code with them."""

    def __init__(self) -> None:
        self._bitmaps: dict[int, BitMap] = {}

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, int]]) -> Self:
        """Return the entries of runs ``(ledger_id, first, end)``, `end` excluded."""
        found = cls()
        for run in runs:
            found.add_run(*run)
        return found

    def __len__(self) -> int:
        return sum(map(len, self._bitmaps.values()))

    def add(self, ledger_id: int, entries: BitMap) -> None:
        """Add entries of a ledger."""
        self._bitmaps.setdefault(ledger_id, BitMap()).update(entries)

    def add_run(self, ledger_id: int, first: int, end: int) -> None:
        """Add entries from `first` (included) to `end` (excluded)."""
        if first < end:
            self._bitmaps.setdefault(ledger_id, BitMap()).add_range(first, end)

    def remove_run(self, ledger_id: int, first: int, end: int) -> None:
        """Remove entries from `first` (included) to `end` (excluded)."""
        if ledger_id in self._bitmaps and first < end:
            self._bitmaps[ledger_id].remove_range(first, end)

    def remove_before(self, ledger_id: int, entry_id: int) -> None:
        """Remove the entries before one, those of lower ledgers too."""
        self._bitmaps = {each: bitmap for each, bitmap in self._bitmaps.items() if each >= ledger_id}
        self.remove_run(ledger_id, 0, entry_id)

    def copy(self) -> EntrySet:
        """Return an independent copy."""
        twin = EntrySet()
        twin._bitmaps = {ledger_id: bitmap.copy() for ledger_id, bitmap in self._bitmaps.items()}
        return twin

    def __sub__(self, other: EntrySet) -> EntrySet:
        left = EntrySet()
        for ledger_id, bitmap in self._bitmaps.items():
            left._bitmaps[ledger_id] = bitmap - other._bitmaps.get(ledger_id, BitMap())
        return left

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(ledger_id, first, end)`` in order, `end` excluded."""
        for ledger_id in sorted(self._bitmaps):
            bitmap = self._bitmaps[ledger_id]
            lasts = bitmap - bitmap.shift(-1)
            for first, last in zip(bitmap - bitmap.shift(1), lasts, strict=True):
                yield ledger_id, first, last + 1


@final
class SubscriptionHistory:
    """The acks of one subscription in a recording: the accepted ones, and those with a completed persist."""

    def __init__(self) -> None:
        self.accepted = EntrySet()
        self.promised = EntrySet()
        self._begun = EntrySet()
        self.last_ts_ms = 0
        self.last_kind: EventKind | None = None

    def follow(self, frame: Frame) -> None:
        """Add the next events."""
        for event in frame.events:
            run = (event.ledger_id, event.first_entry, event.last_entry + 1)
            match event.kind:
                case EventKind.ACK | EventKind.MARK_DELETE:
                    self.accepted.add_run(*run)
                case EventKind.PERSIST_BEGUN:
                    self._begun = self.accepted.copy()
                case EventKind.HELD_BACK | EventKind.CUT_OFF:
                    self._begun.remove_run(*run)
                case EventKind.DISPLACED:
                    self._begun.remove_run(*run)
                    self.promised.remove_run(*run)
                case EventKind.PERSIST_ENDED:
                    self.promised = self._begun.copy()
                case EventKind.RECOVER | EventKind.RESET:
                    if event.ledger_id >= 0:
                        self.accepted.add_run(*run)
                    self.promised = self.accepted.copy()
                case EventKind.REDELIVER:
                    self.accepted.remove_run(*run)
                    self.promised.remove_run(*run)
            self.last_ts_ms, self.last_kind = event.ts_ms, event.kind


def histories(frames: Iterable[Frame]) -> dict[tuple[str, str], SubscriptionHistory]:
    """Read a whole recording and return the history of each (topic, subscription)."""
    found: dict[tuple[str, str], SubscriptionHistory] = {}
    for frame in frames:
        if frame.subscription:
            found.setdefault((frame.topic, frame.subscription), SubscriptionHistory()).follow(frame)
    return found


RECORDING_VERSION = 2
_MAGIC = b"ACKTRACE"
_HEADER = struct.Struct("<8sI")
_FRAME = struct.Struct("<III")
_NAMES = struct.Struct("<HH")
_EVENT = struct.Struct("<qBqqqq")
_FIELDS = np.dtype([(name, "<u1" if name == "kind" else "<i8") for name in Event._fields])
_SUFFIX = ".events"


@final
class Recorder:
    """Appends events to a new segment of a recording; a call returns after the operating system has received the frame.

    Safe for any number of threads.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.stem) for path in segments(directory)), default=0)
        self.path = directory / f"{number:06}{_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._descriptor = os.open(self.path, flags, 0o644)
        self._names: dict[tuple[str, str], bytes] = {}
        self._lock = threading.Lock()
        self._size = 0
        try:
            self._write(_HEADER.pack(_MAGIC, RECORDING_VERSION))
        except BaseException:
            self.close()
            self.path.unlink()
            raise

    def record(self, topic: str, subscription: str, events: Sequence[Event]) -> None:
        """Append events that belong together, as one frame."""
        if not events:
            return
        names = self._names.get((topic, subscription))
        if names is None:
            texts = (topic.encode(), subscription.encode())
            names = _NAMES.pack(*map(len, texts)) + b"".join(texts)
            self._names[topic, subscription] = names
        payload = names + b"".join([_EVENT.pack(*event) for event in events])
        header = _FRAME.pack(len(payload), _length_checksum(len(payload)), google_crc32c.value(payload))
        self._write(header + payload)

    def close(self) -> None:
        """Close the segment; a second call is a no-op."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        with self._lock:
            try:
                written = os.write(self._descriptor, data)
                while written < len(data):
                    written += os.write(self._descriptor, data[written:])
            except OSError as error:
                # An incomplete frame would hide all frames after it.
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            self._size += len(data)


class Frame(NamedTuple):
    """Events that were recorded together."""

    topic: str
    subscription: str
    events: list[Event]


def segments(directory: Path) -> list[Path]:
    """Return a recording's segments in the order of their creation."""
    return sorted(path for path in directory.glob(f"*{_SUFFIX}") if path.stem.isdecimal())


def read_recording(directory: Path) -> Iterator[Frame]:
    """Yield every frame of a recording, in the order of writing; a torn last frame of a segment is skipped."""
    paths = segments(directory)
    if not paths:
        raise TraceError(f"{directory}: no recording here, expected files such as 000001{_SUFFIX}")
    for number, path in enumerate(paths, start=1):
        if int(path.stem) != number:
            raise TraceError(f"{directory}: segment {number:06}{_SUFFIX} is missing")
        yield from _read_segment(path)


def torn_bytes(path: Path) -> int:
    """Return the bytes of a segment's torn last frame, 0 if it is complete. Raises as `read_recording`."""
    data = path.read_bytes()
    end = min(len(data), _HEADER.size)
    if end == _HEADER.size:
        _check_header(path, data[:end])
    for offset, payload in _payloads(path, data):
        end = offset + _FRAME.size + len(payload)
    return len(data) - end


def _read_segment(path: Path) -> Iterator[Frame]:
    # Opening a named pipe would block.
    if not path.is_file():
        raise TraceError(f"{path}: not a file")
    data = path.read_bytes()
    # A writer that died before its header was complete recorded nothing.
    for offset, payload in _payloads(path, data) if _check_header(path, data[: _HEADER.size]) else ():
        try:
            topic_size, subscription_size = _NAMES.unpack_from(payload)
            topic_end = _NAMES.size + topic_size
            names_end = topic_end + subscription_size
            names = payload[_NAMES.size : topic_end].decode(), payload[topic_end:names_end].decode()
            rows = np.frombuffer(payload, _FIELDS, offset=names_end).tolist()
            events = [Event(ts_ms, EventKind(kind), *rest) for ts_ms, kind, *rest in rows]
        except (struct.error, ValueError) as error:
            raise TraceError(f"{path}: the frame at byte {offset} is invalid: {error}") from error
        yield Frame(*names, events)


def _payloads(path: Path, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the payload of each complete frame."""
    offset = _HEADER.size
    while len(data) - offset >= _FRAME.size:
        length, length_checksum, checksum = _FRAME.unpack_from(data, offset)
        payload = data[offset + _FRAME.size : offset + _FRAME.size + length]
        # Only a valid length distinguishes a frame that was cut short from a damaged one.
        intact = length_checksum == _length_checksum(length)
        if intact and len(payload) < length:
            return
        if not intact or google_crc32c.value(payload) != checksum:
            raise TraceError(f"{path}: the frame at byte {offset} does not match its checksum")
        yield offset, payload
        offset += _FRAME.size + length


def _check_header(path: Path, header: bytes) -> int:
    """Return the version of a segment; 0 if its header is incomplete."""
    if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
        raise TraceError(f"{path}: not a recording, it starts with {header[: len(_MAGIC)]!r}")
    if len(header) < _HEADER.size:
        return 0
    _, version = _HEADER.unpack(header)
    if version < 1:
        raise TraceError(f"{path}: not a recording, its version is {version}")
    if version != RECORDING_VERSION:
        raise UnsupportedVersionError(
            f"{path}: recording has version {version}; this release reads version {RECORDING_VERSION}"
        )
    return int(version)


def _length_checksum(length: int) -> int:
    return int(google_crc32c.value(length.to_bytes(4, "little")))


_LOG = logging.getLogger(__name__)
_KINDS = {
    Change.ACKED: EventKind.ACK,
    Change.MARK_DELETED: EventKind.MARK_DELETE,
    Change.PERSIST_BEGUN: EventKind.PERSIST_BEGUN,
    Change.HELD_BACK: EventKind.HELD_BACK,
    Change.CUT_OFF: EventKind.CUT_OFF,
    Change.DISPLACED: EventKind.DISPLACED,
    Change.PERSIST_ENDED: EventKind.PERSIST_ENDED,
    Change.PERSIST_FAILED: EventKind.PERSIST_FAILED,
    Change.RESET: EventKind.RESET,
    Change.UNACKED: EventKind.REDELIVER,
}
_PERSISTS = frozenset((Change.PERSIST_BEGUN, Change.PERSIST_ENDED, Change.PERSIST_FAILED))
_SETTLED = frozenset((
    EventKind.PERSIST_ENDED, EventKind.CRASH, EventKind.RECOVER, EventKind.REDELIVER, EventKind.RESET, None,
))  # fmt: skip


@final
class Recording:
    """Records any number of cursors while they work. Thread-safe.

    The operating system receives each change before the call that caused it returns, so a killed process loses none; a
    power cut may lose the last ones. If the recording cannot be written, the cursors continue to work: the recording
    ends there, `failure` has the reason, and `close` raises it.

    Args:
        directory: Created if missing; else the recording in it is read and continued.

    Raises:
        TraceError: The recording in it is damaged, or one of polls.
        UnsupportedVersionError: It has another version.
        OSError: It cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self._histories = histories(read_recording(directory)) if segments(directory) else {}
        self._recorder = Recorder(directory)
        self._started_ms: int | None = None  # When the first cursor was followed: earlier processes were dead by then.
        self.failure: OSError | None = None

    def follow(self, cursor: ManagedCursor, *, topic: str, subscription: str, now_ms: int) -> None:
        """Record a cursor's state after its opening, then its changes; a closed name may be followed again.

        Raises:
            ValueError: The cursor already has a listener, or the name of the subscription is empty.
        """
        if not subscription:
            raise ValueError("the name of a subscription must not be empty: the empty name is the topic itself")
        history = self._histories.pop((topic, subscription), SubscriptionHistory())
        with cursor.lock:
            if self._started_ms is None:
                self._started_ms = now_ms
            follower = _Follower(self, topic, subscription, max(now_ms, history.last_ts_ms))
            cursor.add_listener(follower)
            follower.begin(history, cursor.view.acked_runs(), self._started_ms)

    def published(
        self, topic: str, runs: Sequence[tuple[int, int, int]], *, now_ms: int, deliver_at_ms: int = -1
    ) -> None:
        """Record entries, (ledger id, first, last), that were appended to a topic's log.

        Args:
            topic: The topic.
            runs: The entries.
            now_ms: The current time; never falls from one call for a topic to the next.
            deliver_at_ms: When they are due, -1 for at once.
        """
        self.record(topic, "", [Event(now_ms, EventKind.PUBLISH, *run, deliver_at_ms) for run in runs])

    def record(self, topic: str, subscription: str, events: Sequence[Event]) -> None:
        """Record events of one subscription, or of the topic, as one frame."""
        if self.failure is None:
            try:
                self._recorder.record(topic, subscription, events)
            except OSError as error:
                self.failure = error
                _LOG.exception("the recording ends here: %s", self._recorder.path)

    def close(self) -> None:
        """End the recording; later changes of its cursors are ignored.

        Raises:
            OSError: It had ended before, because it could not be written.
        """
        self._recorder.close()
        if self.failure is not None:
            raise self.failure
        self.failure = OSError("the recording is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self._recorder.close()


@final
class _Follower(CursorListener):
    """Listens to one cursor; called with the cursor's lock held."""

    def __init__(self, recording: Recording, topic: str, subscription: str, now_ms: int) -> None:
        self._recording = recording
        self._topic = topic
        self._subscription = subscription
        # Callers pass their own times, and threads in any order, but a trace's time must not fall.
        self._last_ms = now_ms
        self._persist_count = 0
        self._consumers: dict[str, int] = {}

    def begin(self, history: SubscriptionHistory, found: Sequence[tuple[int, int, int]], started_ms: int) -> None:
        """Record the state found by the opening, after any earlier recording."""
        acked = EntrySet.of((ledger_id, first, last + 1) for ledger_id, first, last in found)
        if history.last_kind is None and not found:
            return
        events = []
        is_settled = history.last_kind in _SETTLED and not len(history.accepted - history.promised)
        if not is_settled and history.last_kind is not EventKind.CRASH:
            # Not after the opening, nor before the last event, whatever the clock says.
            events += [Event(min(self._last_ms, max(started_ms, history.last_ts_ms)), EventKind.CRASH)]
        unknown = [(*run, EventKind.RECOVER) for run in (acked - history.accepted).runs()]
        again = [(*run, EventKind.REDELIVER) for run in (history.accepted - acked).runs()]
        events += [] if unknown else [Event(self._last_ms, EventKind.RECOVER)]
        events += [Event(self._last_ms, kind, ledger, first, end - 1) for ledger, first, end, kind in unknown + again]
        self._recording.record(self._topic, self._subscription, events)

    def changed(self, change: Change, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        self._last_ms = ts_ms = max(now_ms, self._last_ms)
        kind = _KINDS[change]
        if change in _PERSISTS:
            self._persist_count += change is Change.PERSIST_BEGUN
            events = [Event(ts_ms, kind, number=self._persist_count)]
        else:
            events = [Event(ts_ms, kind, *run) for run in runs] or [Event(ts_ms, kind)]
        self._recording.record(self._topic, self._subscription, events)

    def delivered(self, consumer: str, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        self._last_ms = ts_ms = max(now_ms, self._last_ms)
        number = self._consumers.setdefault(consumer, len(self._consumers))
        events: list[Event] = []
        for ledger_id, first, last in runs:
            if events and (events[-1].ledger_id, events[-1].last_entry + 1) == (ledger_id, first):
                events[-1] = events[-1]._replace(last_entry=last)
            else:
                events.append(Event(ts_ms, EventKind.DELIVER, ledger_id, first, last, number))
        self._recording.record(self._topic, self._subscription, events)
