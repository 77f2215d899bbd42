"""How are groups of records framed in a log, and what of its end did a crash leave behind?

A log is a sequence of groups. A group was appended with one call and synced before the next one was, so a power cut can
tear the last one only: cut it short, or leave sectors of it as zeros, because they never reached the disk. Such a tail
is discarded. Everything else that does not check out is damage, and refused: a group that is whole but has changed, a
bad group before a good one, a group of another log, bytes after the end.

A header says how many sectors of zeros the caller's own bytes make, so that a changed group of many zeros is not taken
for a torn one. For the same reason header, body and trailer each begin with a byte that is not zero, and the trailer
ends with one: no sector but those within the body is all zeros. Only a sector with a single bit set cannot be told from
a lost one when that bit is flipped.

A header also says in which store it stands, and where. So bytes of another log, or of this one, that a caller has put
into an entry are no groups, whatever a crash left around them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, final

import google_crc32c

from ackstate.errors import CorruptStateError, UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.errors import AckStateError
    from cursor.stores.store_directory import StoreFile

MAGIC = b"ACKL"
VERSION = 1
"""The version of the format, in every group."""
BASE = 1
"""A group of the state that a log begins with; more follow."""
BASE_END = 2
"""The last group of the state that a log begins with; from here on the log counts."""
CHANGES = 3
"""A group of changes."""
SECTOR = 512
"""The least that a disk writes, and aligned to that, in bytes."""

# Magic, version, kind, reserved, address, sequence, chain: all known before a group is read.
_KNOWN = struct.Struct("<4sBBHQQI")
# The known ones, length of the body, sectors of zeros in it, and the checksum of all that.
HEADER = struct.Struct("<4sBBHQQIQII")
# The checksum of header (without its checksum) and body, between two bytes in which no flipped bit makes a zero.
TRAILER = struct.Struct("<BIB")
_END = 0xA5
_ADDRESS_MAX = (1 << 64) - 1
_HEADER_SIZE, _TRAILER_SIZE = HEADER.size, TRAILER.size
_HEADER_CHECKED = HEADER.size - 4
_ZEROS = bytes(SECTOR)
_WINDOW = 1 << 20  # Read at once, in bytes.


class Place(NamedTuple):
    """What the next group of a log says of its place.

    Attributes:
        identity: Of the store, a random number below 2**64.
        sequence: Its number, one more than that of the group before, over all generations of the log.
        chain: The checksum of the group before.
    """

    identity: int
    sequence: int
    chain: int


class DiscardedTail(NamedTuple):
    """What a crash left at the end of a log, and opening discarded.

    Attributes:
        offset: Where it began in the log.
        byte_count: Its bytes.
        reason: Why it counts as torn, in words.
    """

    offset: int
    byte_count: int
    reason: str


def encode_group(kind: int, place: Place, body: bytes, *, offset: int) -> tuple[bytes, Place]:
    """Return the bytes of a group that is to be written at `offset`, and the place after it."""
    zero_sectors = _zero_sectors(body, offset + HEADER.size)
    identity, sequence, chain = place
    address = _address(identity, offset)
    header = HEADER.pack(MAGIC, VERSION, kind, 0, address, sequence, chain, len(body), zero_sectors, 0)
    header = header[:_HEADER_CHECKED]
    header_checksum = google_crc32c.value(header)
    # Not of the header with its checksum, which makes the same of every header.
    checksum = google_crc32c.extend(header_checksum, body)
    parts = (header, header_checksum.to_bytes(4, "little"), body, TRAILER.pack(_END, checksum, _END))
    return b"".join(parts), Place(identity, sequence + 1, checksum)


@final
class LogReader:
    """Reads a log from front to back, once.

    Args:
        file: The log.
        name: What to call it in errors.
        identity: Of the store that it belongs to; None for whichever the log says.

    Attributes:
        end: Where the last group that was read ends; where the log ends once all were.
        torn: What lies beyond `end`, once all groups were read.
    """

    def __init__(self, file: StoreFile, name: str, identity: int | None = None) -> None:
        self._file = file
        self._name = name
        self._kinds: tuple[int, ...] = (BASE, BASE_END)  # That may come next: the state that a log begins with first.
        self._identity = -1 if identity is None else identity  # -1 before the first group.
        self._sequence = self._chain = -1  # Of the next group; -1 before the first, which may begin anywhere.
        self.end = 0
        self.torn: DiscardedTail | None = None

    @property
    def place(self) -> Place:
        """Where the next group belongs, once one was read."""
        assert self._sequence >= 0
        return Place(self._identity, self._sequence, self._chain)

    def groups(self) -> Iterator[tuple[int, bytes]]:
        """Return of each group that checks out, in order, where its body begins in the log, and the body.

        Raises:
            CorruptStateError: Something does not check out and is no torn tail.
            UnsupportedVersionError: A newer release wrote it.
        """
        size, read = self._file.size, self._file.read
        base, buffer = 0, read(0, min(size, _WINDOW))
        while self.end < size:
            at = self.end - base
            if base + len(buffer) < size and _size_at(buffer, at) > len(buffer) - at:
                # A header first, which then says how much more; a damaged one says nothing that is believed.
                wanted = max(_WINDOW, _size_at(read(self.end, HEADER.size), 0))
                base, buffer, at = self.end, read(self.end, min(size - self.end, wanted)), 0
            group = self._group_at(buffer, at)
            if group is None:
                self._end_torn()
                break
            yield group
        if self._kinds != (CHANGES,):
            raise self._damage("a whole log", f"{size} bytes")

    def _group_at(self, buffer: bytes, at: int) -> tuple[int, bytes] | None:
        """Return the group at a place in the buffer and step over it, or None if it does not check out."""
        begin, size = at + _HEADER_SIZE, len(buffer)
        if begin > size:
            return None
        magic, version, kind, reserved, address, sequence, chain, length, _, expected = HEADER.unpack_from(buffer, at)
        header_checksum = google_crc32c.value(buffer[at : at + _HEADER_CHECKED])
        if header_checksum != expected or magic != MAGIC:
            return None
        if version != VERSION or reserved or kind not in self._kinds or sequence >> 63:
            raise self._foreign(version, kind, reserved)
        if self._identity < 0:
            self._identity = address  # The first group stands at 0.
        if self._sequence >= 0 and (self._sequence != sequence or self._chain != chain):
            raise self._damage(self.place, Place((address - self.end) & _ADDRESS_MAX, sequence, chain))
        if address != (self._identity + self.end) & _ADDRESS_MAX:
            raise self._misplaced(address)
        end = begin + length
        if end + _TRAILER_SIZE > size:
            return None
        body = buffer[begin:end]
        checksum = google_crc32c.extend(header_checksum, body)
        if TRAILER.unpack_from(buffer, end) != (_END, checksum, _END):
            return None
        offset = self.end + _HEADER_SIZE
        self.end = offset + length + _TRAILER_SIZE
        self._sequence, self._chain = sequence + 1, checksum
        if kind == BASE_END:
            self._kinds = (CHANGES,)
        return offset, body

    def _foreign(self, version: int, kind: int, reserved: int) -> AckStateError:
        """Return the error for a sound header that does not belong here."""
        if version > VERSION:
            return UnsupportedVersionError(
                f"{self._name} has format version {version}; this release reads up to version {VERSION}"
            )
        return self._damage("a group that belongs here", f"version {version}, kind {kind}, reserved {reserved}")

    def _misplaced(self, address: int) -> AckStateError:
        """Return the error for a group that was not written here."""
        expected, found = (f"{number & _ADDRESS_MAX:016x}" for number in (self._identity, address - self.end))
        return self._damage(f"a group of store {expected}", f"one of store {found}, or of another place")

    def _end_torn(self) -> None:
        """Say why what follows is torn; raise if it is not."""
        tail = self._file.read(self.end, self._file.size - self.end)
        reason = ""
        if self._kinds == (CHANGES,):
            reason = torn_reason(tail, self.place, offset=self.end)
        if not reason:
            raise self._damage("a sound group", tail[: HEADER.size].hex(" ", 4))
        self.torn = DiscardedTail(self.end, len(tail), reason)

    def _damage(self, expected: object, found: object) -> CorruptStateError:
        return CorruptStateError(self._name, offset=self.end, expected=expected, found=found)


def torn_reason(tail: bytes, place: Place, *, offset: int) -> str:
    """Say why the tail of a log, whose first group does not check out, is what a power cut left; empty if it is not.

    Args:
        tail: All from the end of the last good group to the end of the log.
        place: Where the group belongs that the tail begins with.
        offset: Where the tail begins in the log.
    """
    zeros = [begin for begin, piece in _pieces(tail, offset) if not piece.strip(b"\0")]
    if not _is_header(tail):
        if not _may_begin(tail, place, offset=offset) or _has_group_from(tail, place, offset=offset):
            return ""
        if len(tail) < HEADER.size:
            return "cut in the header"
        return _lost(zeros, offset) if zeros and zeros[0] < HEADER.size else ""
    size = _size_at(tail, 0)
    if size > len(tail):
        return f"cut after {len(tail)} of {size} bytes"
    zero_sectors = HEADER.unpack_from(tail)[8]
    if size == len(tail) and len(zeros) > zero_sectors:
        return _lost(zeros, offset)
    return ""


def _lost(zeros: list[int], offset: int) -> str:
    return f"from byte {offset + zeros[0]} on a sector that never reached the disk"


def _may_begin(tail: bytes, place: Place, *, offset: int) -> bool:
    """Say whether each sector is either zeros or as a group at this place must begin, as far as that is known."""
    identity, sequence, chain = place
    known = _KNOWN.pack(MAGIC, VERSION, CHANGES, 0, _address(identity, offset), sequence, chain)
    return all(
        not piece.strip(b"\0") or piece[: max(0, len(known) - begin)] == known[begin : begin + len(piece)]
        for begin, piece in _pieces(tail, offset)
        if begin < len(known)
    )


def _has_group_from(tail: bytes, place: Place, *, offset: int) -> bool:
    """Say whether a group of this store, with the number of a place or a higher one, stands anywhere in a tail."""
    at = tail.find(MAGIC)
    while at >= 0:
        if _is_header(tail[at : at + HEADER.size]):
            *_, address, sequence, _, _, _, _ = HEADER.unpack_from(tail, at)
            if address == _address(place.identity, offset + at) and sequence >= place.sequence:
                return True
        at = tail.find(MAGIC, at + 1)
    return False


def _address(identity: int, offset: int) -> int:
    """Return what a group of a store has in its header if it stands at `offset`, and no group elsewhere."""
    return (identity + offset) & _ADDRESS_MAX


def _is_header(data: bytes) -> bool:
    if len(data) < HEADER.size:
        return False
    return bool(google_crc32c.value(data[:_HEADER_CHECKED]) == HEADER.unpack_from(data)[-1])


def _size_at(data: bytes, at: int) -> int:
    """Return the size of a group by its header; that of a header where none can be read."""
    if not _is_header(data[at : at + HEADER.size]):
        return HEADER.size
    length: int = HEADER.unpack_from(data, at)[7]
    return HEADER.size + length + TRAILER.size


def _pieces(data: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """Cut data that stands at `offset` where sectors end; each piece with where it begins in the data."""
    begin, end = 0, SECTOR - offset % SECTOR
    while begin < len(data):
        yield begin, data[begin:end]
        begin, end = end, end + SECTOR


def _zero_sectors(body: bytes, offset: int) -> int:
    """Count the whole sectors of zeros in a body that stands at `offset`."""
    if len(body) < SECTOR or _ZEROS not in body:
        return 0
    return sum(piece == _ZEROS for _, piece in _pieces(body, offset))
