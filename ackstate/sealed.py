"""Bytes under a seal: a magic, a version and three zero bytes, then anything, and the CRC-32C of all before it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, final

import google_crc32c

from ackstate.errors import check_version, corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHECKSUM = struct.Struct("<I")
# The CRC-32C of any bytes that end with their own CRC-32C, low byte first: so no copy without the last four is needed.
SEALED = 0x48674BC7


@final
class Reader:
    """Reads pieces of some bytes, from an offset to an end."""

    def __init__(self, data: bytes, offset: int, end: int, what: str) -> None:
        self.data = data
        self.offset = offset
        self.end = end
        self.what = what

    def take(self, size: int, piece_name: str) -> bytes:
        """Return the next `size` bytes, or refuse bytes that are too short."""
        left = self.end - self.offset
        if size > left:
            corrupt(self.what, self.offset, f"{size} bytes of {piece_name}", f"{left} bytes")
        piece = self.data[self.offset : self.offset + size]
        self.offset += size
        return piece

    def named(self, count: int, header: struct.Struct) -> Iterator[tuple[str, int]]:
        """Yield names that rise, each with the number behind its length in a header; the caller takes what follows."""
        previous = None
        for _ in range(count):
            at = self.offset
            size, number = header.unpack(self.take(header.size, "property header"))
            name = self.text(size, "property name")
            if previous is not None and name <= previous:
                corrupt(self.what, at, f"a property name above {previous!r}", repr(name))
            previous = name
            yield name, number

    def text(self, size: int, piece_name: str) -> str:
        """Return the next `size` bytes as text."""
        at = self.offset
        try:
            return self.take(size, piece_name).decode()
        except UnicodeDecodeError as error:
            corrupt(self.what, at, f"a {piece_name} in UTF-8", str(error))

    def finish(self) -> None:
        """Refuse bytes that were not read."""
        if self.offset != self.end:
            corrupt(self.what, self.offset, "the checksum", f"{self.end - self.offset} bytes more")


def seal(*parts: bytes) -> bytes:
    """Return the parts with their checksum behind them."""
    covered = b"".join(parts)
    return covered + CHECKSUM.pack(google_crc32c.value(covered))


def unseal(
    data: bytes, header: struct.Struct, magic: bytes, version: int, *, what: str
) -> tuple[Sequence[int], Reader]:
    """Check sealed bytes that begin with a magic, a version and three zero bytes; return the numbers that follow."""
    end = len(data) - CHECKSUM.size
    if end < header.size:
        corrupt(what, 0, f"at least {header.size + CHECKSUM.size} bytes", f"{len(data)} bytes")
    found, found_version, *numbers = header.unpack_from(data)
    if found != magic:
        corrupt(what, 0, magic, found)
    if found_version != version:
        check_version(found_version, version, what=what)
    computed, stored = google_crc32c.value(data[:end]), int.from_bytes(data[end:], "little")
    if computed != stored:
        corrupt(what, end, f"checksum {computed:#010x}", f"{stored:#010x}")
    if not found_version or any(data[5:8]):
        corrupt(what, 4, f"version {version}, then three zero bytes", data[4:8].hex())
    return numbers, Reader(data, header.size, end, what=what)
