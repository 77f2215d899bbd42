"""Frames groups of records in a log, and recognises a tail that a crash has torn.

A log is a sequence of groups, followed by zeros up to the end of the file. The zeros are allocated in advance, because
the sync of a file that has grown takes two disk writes, and the sync of overwritten zeros takes one (`laid_out_size`).

Each group is written with one call and synced before the next one, so a crash can tear the last group only. Its
missing parts are cut off, if the file had to grow, or read as the zeros that were there: its end, if the process was
killed during the call, and any of its sectors, if the power was cut. Such a tail is discarded. Every other failed
check is damage, and the log is refused: a complete group that has changed, a bad group before a good one, a group of
another log, bytes after the end.

A changed group must not be mistaken for a torn one. So no group ends with a zero, and each header contains the number
of all-zero sectors in the body. Header, body and trailer each begin with a byte that is not zero, so only sectors
within the body can be all zeros. One ambiguity remains: a sector with a single bit set looks lost once that bit is
flipped.

A header also contains the identity of its store and its offset. So a copy of a group that a caller has put into an
entry, from this log or another, is never accepted as a group, with any bytes that a crash left around it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, final

import google_crc32c

from ackstate.errors import CorruptStateError, UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.errors import AckStateError
    from ackstate.stores.store_directory import StoreFile

MAGIC = b"ACKL"
VERSION = 1
"""The version of the format, in every group."""
BASE = 1
"""A group of the state that a log begins with, but not the last such group."""
BASE_END = 2
"""The last group of the state that a log begins with; the log is valid once it has this group."""
CHANGES = 3
"""A group of changes."""
SECTOR = 512
"""The smallest aligned unit that a disk writes, in bytes."""
_BLOCK = 1 << 12  # The allocation unit of a file system, in bytes.
_AHEAD_MAX = 1 << 18
_LARGE = 1 << 16

# Magic, version, kind, reserved, address, sequence, chain: all known before a group is read.
_KNOWN = struct.Struct("<4sBBHQQI")
# The fields of `_KNOWN`, length of the body, number of all-zero sectors in it, checksum of all these.
HEADER = struct.Struct("<4sBBHQQIQII")
# The same header in fewer fields: the constant fields of a change group as one number, and no all-zero sectors.
_CHANGES_HEADER = struct.Struct("<QQQIQ4xI")
_CHANGES_BEGIN = int.from_bytes(struct.pack("<4sBBH", MAGIC, VERSION, CHANGES, 0), "little")
# The checksum of header (without its checksum) and body, between two bytes that no single flipped bit makes zero.
TRAILER = struct.Struct("<BIB")
_END = 0xA5
_ADDRESS_MAX = (1 << 64) - 1
_HEADER_SIZE, _TRAILER_SIZE = HEADER.size, TRAILER.size
_HEADER_CHECKED = HEADER.size - 4
_ZERO = b"\0"
_ZEROS = bytes(SECTOR)
_WINDOW = 1 << 17  # Read with one call, in bytes.


class LogOffset(NamedTuple):
    """The place of the next group in a log, as its header states it.

    Attributes:
        identity: The identity of the store, a random number below 2**64.
        sequence: Number of the group: one more than that of the previous group, over all generations of the log.
        chain: The checksum of the previous group.
    """

    identity: int
    sequence: int
    chain: int


class DiscardedTail(NamedTuple):
    """The torn end of a log, which opening discarded.

    Attributes:
        offset: Its beginning in the log.
        byte_count: Its size, up to the last byte that is not zero.
        reason: Why it counts as torn, as text.
    """

    offset: int
    byte_count: int
    reason: str


def encode_group(kind: int, place: LogOffset, body: bytes, *, offset: int) -> tuple[bytes, LogOffset]:
    """Return the bytes of a group that will be written at `offset`, and the place after it."""
    zero_sectors = _zero_sectors(body, offset + HEADER.size)
    identity, sequence, chain = place
    address = _address(identity, offset)
    header = HEADER.pack(MAGIC, VERSION, kind, 0, address, sequence, chain, len(body), zero_sectors, 0)
    header = header[:_HEADER_CHECKED]
    header_checksum = google_crc32c.value(header)
    # The header's own checksum is excluded: a CRC over data and its CRC is the same for every header.
    checksum = google_crc32c.extend(header_checksum, body)
    parts = (header, header_checksum.to_bytes(4, "little"), body, TRAILER.pack(_END, checksum, _END))
    return b"".join(parts), LogOffset(identity, sequence + 1, checksum)


def laid_out_size(begin: int, end: int) -> int:
    """Return the new size of a log's file, in bytes, when it grows to hold a group from `begin` to `end`.

    It is twice `end`, or `end` and 256 KiB if that is less, rounded up to a block, or to a sector in a log that is
    smaller than a block. So n bytes in small groups grow the file O(log n) times, and then once per 256 KiB. A large
    group gains less than the cost of writing as many zeros.
    """
    if end - begin >= _LARGE:
        return end
    unit = _BLOCK if end >= _BLOCK else SECTOR
    return -(-(end + min(end, _AHEAD_MAX)) // unit) * unit


@final
class LogReader:
    """Reads a log from front to back, once.

    Args:
        file: The log.
        name: The name of the log in errors.
        identity: The identity of its store; None accepts any.

    Attributes:
        end: The end of the last group that was read; the end of the log once all groups were read.
        torn: The torn tail beyond `end`, once all groups were read.
    """

    def __init__(self, file: StoreFile, name: str, identity: int | None = None) -> None:
        self._file = file
        self._name = name
        self._kinds: tuple[int, ...] = (BASE, BASE_END)  # The kinds that may come next.
        self._identity = -1 if identity is None else identity  # -1 before the first group.
        self._sequence = self._chain = -1  # Of the next group; -1 accepts any, before the first group.
        self.end = 0
        self.torn: DiscardedTail | None = None

    @property
    def place(self) -> LogOffset:
        """The place of the next group, once a group was read."""
        assert self._sequence >= 0
        return LogOffset(self._identity, self._sequence, self._chain)

    def groups(self) -> Iterator[list[tuple[int, bytes]]]:
        """Yield the sound groups in order, several at once: for each the offset of its body in the log, and the body.

        Raises:
            CorruptStateError: A group is damaged, and is not a torn tail.
            UnsupportedVersionError: A newer release wrote the log.
        """
        size, read = self._file.size, self._file.read
        base, buffer = 0, read(0, min(size, _WINDOW))
        while self.end < size:
            at = self.end - base
            groups = self._changes_at(buffer, at)
            if not groups:
                if at < len(buffer) and not buffer[at]:
                    # No group begins with a zero.
                    self._end_log()
                    break
                if base + len(buffer) < size and _size_at(buffer, at) > len(buffer) - at:
                    # Read a header first, which states the group's size; the size in a damaged header is ignored.
                    wanted = max(_WINDOW, _size_at(read(self.end, HEADER.size), 0))
                    base, buffer, at = self.end, read(self.end, min(size - self.end, wanted)), 0
                group = self._group_at(buffer, at)
                if group is None:
                    self._end_log()
                    break
                groups.append(group)
            yield groups
        if self._kinds != (CHANGES,):
            raise self._damage("a whole log", f"{size} bytes")

    def _changes_at(self, buffer: bytes, at: int) -> list[tuple[int, bytes]]:
        """Return consecutive sound change groups from an offset in the buffer on, and step over them.

        Does the same as `_group_at` in a third of the time, but without the error for the next group. A log may have as
        many groups as entries.
        """
        groups: list[tuple[int, bytes]] = []
        sequence, chain = self._sequence, self._chain
        if self._kinds != (CHANGES,) or (sequence + len(buffer)) >> 63:
            return groups
        value, extend, header, trailer = (
            google_crc32c.value,
            google_crc32c.extend,
            _CHANGES_HEADER.unpack_from,
            TRAILER.unpack_from,
        )
        base, end_max = self.end - at, len(buffer) - _TRAILER_SIZE
        address = _address(self._identity, self.end)
        while (begin := at + _HEADER_SIZE) <= end_max:
            constant, found_address, found_sequence, found_chain, length, header_checksum = header(buffer, at)
            end = begin + length
            if (
                end > end_max
                or constant != _CHANGES_BEGIN
                or found_sequence != sequence
                or found_chain != chain
                or found_address != address
                or value(buffer[at : begin - 4]) != header_checksum
            ):
                break
            body = buffer[begin:end]
            checksum = extend(header_checksum, body)
            if trailer(buffer, end) != (_END, checksum, _END):
                break
            groups.append((base + begin, body))
            end += _TRAILER_SIZE
            address = (address + end - at) & _ADDRESS_MAX
            sequence += 1
            chain, at = checksum, end
        self.end, self._sequence, self._chain = base + at, sequence, chain
        return groups

    def _group_at(self, buffer: bytes, at: int) -> tuple[int, bytes] | None:
        """Return the group at an offset in the buffer and step over it, or None if it fails a check."""
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
            self._identity = address  # The first group is at offset 0.
        if self._sequence >= 0 and (self._sequence != sequence or self._chain != chain):
            raise self._damage(self.place, LogOffset((address - self.end) & _ADDRESS_MAX, sequence, chain))
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
        """Return the error for a sound header that is not valid here."""
        if version > VERSION:
            return UnsupportedVersionError(
                f"{self._name} has format version {version}; this release reads up to version {VERSION}"
            )
        return self._damage("a group that belongs here", f"version {version}, kind {kind}, reserved {reserved}")

    def _misplaced(self, address: int) -> AckStateError:
        """Return the error for a group that was written to another place."""
        expected, found = (f"{number & _ADDRESS_MAX:016x}" for number in (self._identity, address - self.end))
        return self._damage(f"a group of store {expected}", f"one of store {found}, or of another place")

    def _end_log(self) -> None:
        """End the log at `end`: set `torn` unless only zeros follow; raise if the tail is damaged."""
        reason, tail = "", b""
        if self._kinds == (CHANGES,):
            if self._ends_in_zeros():
                return
            tail = self._file.read(self.end, self._file.size - self.end)
            reason = torn_reason(tail, self.place, offset=self.end)
        if not reason:
            raise self._damage("a sound group", self._file.read(self.end, HEADER.size).hex(" ", 4))
        self.torn = DiscardedTail(self.end, len(tail.rstrip(_ZERO)), reason)

    def _ends_in_zeros(self) -> bool:
        """Return whether only zeros follow. Reads in windows: a sparse file may be larger than the memory."""
        size = self._file.size
        return all(_is_zeros(self._file.read(at, min(_WINDOW, size - at))) for at in range(self.end, size, _WINDOW))

    def _damage(self, expected: object, found: object) -> CorruptStateError:
        return CorruptStateError(self._name, offset=self.end, expected=expected, found=found)


def torn_reason(tail: bytes, place: LogOffset, *, offset: int) -> str:
    """Return why the tail of a log, whose first group fails a check, counts as torn by a crash; empty if it does not.

    Args:
        tail: All bytes from the end of the last sound group to the end of the file; not only zeros.
        place: The expected place of the group at the beginning of the tail.
        offset: The offset of the tail in the log.
    """
    if not _is_header(tail):
        return _torn_header_reason(tail, place, offset)
    size, zero_sectors = _size_at(tail, 0), HEADER.unpack_from(tail)[8]
    if size > len(tail):
        return f"cut after {len(tail)} of {size} bytes"
    group, behind = tail[:size], tail[size:]
    if not _is_zeros(behind):
        return ""
    zeros = _zero_pieces(group, offset, size)
    if len(zeros) > zero_sectors:
        return _lost(zeros, offset)
    return "" if group[-1] else f"cut after {len(group.rstrip(_ZERO))} of {size} bytes"


def _torn_header_reason(tail: bytes, place: LogOffset, offset: int) -> str:
    if not _may_begin(tail, place, offset=offset) or _has_group_from(tail, place, offset=offset):
        return ""
    if _is_zeros(tail[HEADER.size :]):
        return "cut in the header"
    return _lost(_zero_pieces(tail[: HEADER.size + SECTOR], offset, HEADER.size), offset)


def _lost(zeros: list[int], offset: int) -> str:
    return f"from byte {offset + zeros[0]} on a sector that never reached the disk" if zeros else ""


def _may_begin(tail: bytes, place: LogOffset, *, offset: int) -> bool:
    """Return whether each sector, up to its trailing zeros, has the expected bytes of a header here."""
    identity, sequence, chain = place
    known = _KNOWN.pack(MAGIC, VERSION, CHANGES, 0, _address(identity, offset), sequence, chain)
    for begin, piece in _pieces(tail[: len(known) + SECTOR], offset):
        expected = known[begin : begin + len(piece)]
        if not piece.startswith(expected) and not expected.startswith(piece.rstrip(_ZERO)):
            return False
    return True


def _has_group_from(tail: bytes, place: LogOffset, *, offset: int) -> bool:
    """Return whether a tail contains a group of this store at its own offset, with the number of `place` or higher."""
    at = tail.find(MAGIC)
    while at >= 0:
        if _is_header(tail[at : at + HEADER.size]):
            *_, address, sequence, _, _, _, _ = HEADER.unpack_from(tail, at)
            if address == _address(place.identity, offset + at) and sequence >= place.sequence:
                return True
        at = tail.find(MAGIC, at + 1)
    return False


def _address(identity: int, offset: int) -> int:
    """Return the address in the header of a store's group at `offset`; a group at another offset has another."""
    return (identity + offset) & _ADDRESS_MAX


def _is_header(data: bytes) -> bool:
    if len(data) < HEADER.size:
        return False
    return bool(google_crc32c.value(data[:_HEADER_CHECKED]) == HEADER.unpack_from(data)[-1])


def _size_at(data: bytes, at: int) -> int:
    """Return the size of a group from its header, or the size of a header if none can be read."""
    if not _is_header(data[at : at + HEADER.size]):
        return HEADER.size
    length: int = HEADER.unpack_from(data, at)[7]
    return HEADER.size + length + TRAILER.size


def _pieces(data: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """Split data, which begins at `offset`, at the ends of sectors; yield each piece with its beginning in the data."""
    begin, end = 0, SECTOR - offset % SECTOR
    while begin < len(data):
        yield begin, data[begin:end]
        begin, end = end, end + SECTOR


def _zero_pieces(data: bytes, offset: int, end: int) -> list[int]:
    """Return the beginnings of the all-zero pieces of data at `offset`, for pieces that begin below `end`."""
    return [begin for begin, piece in _pieces(data, offset) if begin < end and _is_zeros(piece)]


def _is_zeros(data: bytes) -> bool:
    return data == bytes(len(data))


def _zero_sectors(body: bytes, offset: int) -> int:
    """Count the whole all-zero sectors of a body at `offset`."""
    if len(body) < SECTOR or _ZEROS not in body:
        return 0
    return sum(piece == _ZEROS for _, piece in _pieces(body, offset))
