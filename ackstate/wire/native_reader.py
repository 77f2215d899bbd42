"""Reads pieces of the bytes of a native record or pointer, never beyond their end."""

from __future__ import annotations

import struct
from typing import NoReturn, final

from ackstate.errors import CorruptStateError, UnsupportedVersionError

CHECKSUM = struct.Struct("<I")


def corrupt(offset: int, expected: object, found: object, *, what: str = "native record") -> NoReturn:
    """Raise `CorruptStateError`."""
    raise CorruptStateError(what, offset=offset, expected=expected, found=found)


def check_version(version: int, supported: int, *, what: str) -> None:
    """Raise `UnsupportedVersionError` for another version; 0 is none, so such bytes are damaged."""
    if version not in (0, supported):
        raise UnsupportedVersionError(f"{what} has version {version}; this release reads version {supported}")


@final
class Reader:
    """Reads pieces of some bytes, from an offset to an end."""

    def __init__(self, data: bytes, offset: int, end: int, *, what: str = "native record") -> None:
        self.data = data
        self.offset = offset
        self.end = end
        self.what = what

    def take(self, size: int, piece_name: str) -> bytes:
        """Return the next `size` bytes, or refuse bytes that are too short."""
        left = self.end - self.offset
        if size > left:
            corrupt(self.offset, f"{size} bytes of {piece_name}", f"{left} bytes", what=self.what)
        piece = self.data[self.offset : self.offset + size]
        self.offset += size
        return piece

    def finish(self, what_follows: str) -> None:
        """Refuse bytes that were not read."""
        if self.offset != self.end:
            corrupt(self.offset, what_follows, f"{self.end - self.offset} bytes more", what=self.what)
