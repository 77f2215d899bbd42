"""Records events while they happen, so that the recording can be read after the writer was killed.

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

import os
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Self, final

import google_crc32c
import numpy as np

from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.errors import UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

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


def check_segment(path: Path) -> None:
    """Check that a file is a segment in the present version; its frames are not checked."""
    _check_file(path)
    with path.open("rb") as file:
        _check_header(path, file.read(_HEADER.size))


def _check_file(path: Path) -> None:
    # Opening a named pipe would block.
    if not path.is_file():
        raise TraceError(f"{path}: not a file")


def _read_segment(path: Path) -> Iterator[Frame]:
    _check_file(path)
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
