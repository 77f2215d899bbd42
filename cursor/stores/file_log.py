"""How are groups of records framed in a log, and what of its end did a crash leave behind?

A log is a sequence of groups, and zeros from their end to that of the file: it is laid out in advance, because to sync
a file that has grown takes the disk two writes, and to sync what was written over zeros one (`laid_out_size`).

A group was written with one call and synced before the next one was, so a crash can tear the last one only. What is
missing of it is cut off, where the file had to grow, or reads as the zeros that were there: its end, if the process was
killed in the middle of the call, and any of its sectors, if the power was cut. Such a tail is discarded. Everything
else that does not check out is damage, and refused: a group that is whole but has changed, a bad group before a good
one, a group of another log, bytes after the end.

So that a changed group is not taken for a torn one, no group ends with a zero, and a header says how many sectors of
zeros the caller's own bytes make: header, body and trailer each begin with a byte that is not zero, so that no sector
but those within the body is all zeros. Only a sector with a single bit set cannot be told from a lost one when that bit
is flipped.

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

    from ackstate.cursor.stores.store_directory import StoreFile
    from ackstate.errors import AckStateError

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
_BLOCK = 1 << 12  # What a file system gives to a file, in bytes.
_AHEAD_MAX = 1 << 18
_LARGE = 1 << 16

# Magic, version, kind, reserved, address, sequence, chain: all known before a group is read.
_KNOWN = struct.Struct("<4sBBHQQI")
# The known ones, length of the body, sectors of zeros in it, and the checksum of all that.
HEADER = struct.Struct("<4sBBHQQIQII")
# The same in fewer parts: what is the same in all groups of changes, as one number, and no sectors of zeros.
_CHANGES_HEADER = struct.Struct("<QQQIQ4xI")
_CHANGES_BEGIN = int.from_bytes(struct.pack("<4sBBH", MAGIC, VERSION, CHANGES, 0), "little")
# The checksum of header (without its checksum) and body, between two bytes in which no flipped bit makes a zero.
TRAILER = struct.Struct("<BIB")
_END = 0xA5
_ADDRESS_MAX = (1 << 64) - 1
_HEADER_SIZE, _TRAILER_SIZE = HEADER.size, TRAILER.size
_HEADER_CHECKED = HEADER.size - 4
_ZERO = b"\0"
_ZEROS = bytes(SECTOR)
_WINDOW = 1 << 17  # Read at once, in bytes.


class LogOffset(NamedTuple):
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
        byte_count: Its bytes, up to the last that is not zero.
        reason: Why it counts as torn, in words.
    """

    offset: int
    byte_count: int
    reason: str


def encode_group(kind: int, place: LogOffset, body: bytes, *, offset: int) -> tuple[bytes, LogOffset]:
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
    return b"".join(parts), LogOffset(identity, sequence + 1, checksum)


def laid_out_size(begin: int, end: int) -> int:
    """Return the size that a log's file is to have when it grows to hold a group from `begin` to `end`, in bytes.

    It is twice `end`, or 256 KiB more where that is less, and ends with a block, or with a sector in a log that is
    smaller than that. So of n bytes in small groups O(log n), and then one group in 256 KiB, make the file grow. A
    large group gains less than it costs to write as many zeros.
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
    def place(self) -> LogOffset:
        """Where the next group belongs, once one was read."""
        assert self._sequence >= 0
        return LogOffset(self._identity, self._sequence, self._chain)

    def groups(self) -> Iterator[list[tuple[int, bytes]]]:
        """Return of each group that checks out, in order, where its body begins in the log, and the body; some at once.

        Raises:
            CorruptStateError: Something does not check out and is no torn tail.
            UnsupportedVersionError: A newer release wrote it.
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
                    # A header first, which then says how much more; a damaged one says nothing that is believed.
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
        """Return the groups of changes from a place in the buffer on that check out one after another; step over them.

        As `_group_at` does, which says what is wrong with the next one, in a third of the time: a log may have as many
        groups as entries.
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

    def _end_log(self) -> None:
        """Say why what follows is torn if it is not what was laid out; raise if it is neither."""
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
        """Say whether nothing but zeros follows: of a sparse file there may be more than the memory holds."""
        size = self._file.size
        return all(_is_zeros(self._file.read(at, min(_WINDOW, size - at))) for at in range(self.end, size, _WINDOW))

    def _damage(self, expected: object, found: object) -> CorruptStateError:
        return CorruptStateError(self._name, offset=self.end, expected=expected, found=found)


def torn_reason(tail: bytes, place: LogOffset, *, offset: int) -> str:
    """Say why the tail of a log, whose first group does not check out, is what a crash left; empty if it is not.

    Args:
        tail: All from the end of the last good group to the end of the file; not zeros alone.
        place: Where the group belongs that the tail begins with.
        offset: Where the tail begins in the log.
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
    """Say whether each sector, up to where it turns to zeros, is as a group here must begin, as far as known."""
    identity, sequence, chain = place
    known = _KNOWN.pack(MAGIC, VERSION, CHANGES, 0, _address(identity, offset), sequence, chain)
    for begin, piece in _pieces(tail[: len(known) + SECTOR], offset):
        expected = known[begin : begin + len(piece)]
        if not piece.startswith(expected) and not expected.startswith(piece.rstrip(_ZERO)):
            return False
    return True


def _has_group_from(tail: bytes, place: LogOffset, *, offset: int) -> bool:
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


def _zero_pieces(data: bytes, offset: int, end: int) -> list[int]:
    """Return where those begin of the pieces of data that stands at `offset` which begin below `end` and are zeros."""
    return [begin for begin, piece in _pieces(data, offset) if begin < end and _is_zeros(piece)]


def _is_zeros(data: bytes) -> bool:
    return data == bytes(len(data))


def _zero_sectors(body: bytes, offset: int) -> int:
    """Count the whole sectors of zeros in a body that stands at `offset`."""
    if len(body) < SECTOR or _ZEROS not in body:
        return 0
    return sum(piece == _ZEROS for _, piece in _pieces(body, offset))
