"""The frames between `BookKeeperClient` and its child process: a length, and a marshalled value.

A request is ``(number, operation, arguments)``. Replies come as a list, because many appends end at the same time; each
is ``(number, True, result)`` or ``(number, False, failure)`` with the parts of a `Failure`. Both processes run the same
Python, so marshal's format is the same; it is faster than pickle, and has no classes. The sockets are private to both
processes.
"""

from __future__ import annotations

import marshal
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import socket

_LENGTH = struct.Struct("<Q")
_RECEIVED_BYTES = 1 << 18


class Failure(NamedTuple):
    """Why BookKeeper refused a call.

    Attributes:
        code: BookKeeper's number of the error (``BKException.Code``), or `UNKNOWN_CODE`.
        message: One line.
    """

    code: int
    message: str


UNKNOWN_CODE = -1_000
"""The error is not BookKeeper's own."""


def frame(content: Any) -> bytes:
    """Return the bytes of a frame."""
    data = marshal.dumps(content)
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Reads frames from a socket.

    Args:
        source: A blocking stream socket.
    """

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._received = bytearray()

    def read(self) -> Any:
        """Wait for the next frame and return its content; None at the end of the stream."""
        if not self._receive(_LENGTH.size):
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + length
        if not self._receive(end):
            return None
        # The other process is our own child or parent.
        with memoryview(self._received) as received:
            content = marshal.loads(received[_LENGTH.size : end])  # noqa: S302
        del self._received[:end]
        return content

    def _receive(self, byte_count: int) -> bool:
        """Wait for a number of bytes; False if the stream ends before."""
        while len(self._received) < byte_count:
            try:
                data = self._source.recv(_RECEIVED_BYTES)
            except OSError:
                return False
            if not data:
                return False
            self._received += data
        return True
