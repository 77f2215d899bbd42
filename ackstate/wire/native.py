"""The native journal record: a set of acked entries to OR in, plus a mark-delete position.

`docs/wire-format.md` draws every byte. A SNAPSHOT starts from nothing; a DELTA adds to what the records before it say.
Each record carries the checksum of the one before, so a record that is missing, repeated or from another journal is
found out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

import google_crc32c
from pyroaring import BitMap

from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position, check_position

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VERSION = 2
MAGIC = b"ACKR"

# magic, version, kind, reserved, length, epoch, sequence, chain, mark-delete ledger and entry, ledgers, properties
_HEADER = struct.Struct("<4sBBHIQQIqqII")
_BATCH_COUNT = struct.Struct("<I")  # from version 2 on, after the header
_LEDGER = struct.Struct("<QI")
_PROPERTY = struct.Struct("<Hq")
_BATCH = struct.Struct("<QIH")
_WORD_BYTES = 8
_CHECKSUM = struct.Struct("<I")
_SIZE_MIN = _HEADER.size + _CHECKSUM.size
_LENGTH_MAX = 2**32 - 1
_POINTER = struct.Struct("<4sB3xQQQ")
POINTER_MAGIC = b"ACKP"
POINTER_VERSION = 1
_INT64 = range(-(2**63), 2**63)


class RecordKind(IntEnum):
    """What a record starts from."""

    SNAPSHOT = 1
    DELTA = 2


@dataclass(frozen=True, slots=True)
class Record:
    """One journal record.

    Attributes:
        kind: SNAPSHOT replaces all before it; DELTA adds to it.
        epoch: Rises with every reset of the cursor; records of an older epoch do not count.
        sequence: Number of the record in its cursor ledger: 0 for the snapshot, then without gaps.
        chain: `checksum` of the record before, 0 for the first of a journal.
        mark_delete: Every entry up to it, included, is acked.
        deleted: Acked entries above the mark-delete: all of them, or those that are new. Not to be changed.
        properties: What the latest mark-delete carried, name -> signed 64-bit number.
        batch: Partly acked batches: all of them, or those that changed. Not to be changed.
    """

    kind: RecordKind
    epoch: int
    sequence: int
    chain: int
    mark_delete: Position
    deleted: DeletedRanges
    properties: Mapping[str, int] = field(default_factory=dict)
    batch: BatchIndexes = field(default_factory=BatchIndexes)


@dataclass(frozen=True, slots=True)
class Pointer:
    """Which ledger holds a cursor's journal.

    Attributes:
        cursor_ledger_id: The ledger.
        epoch: The epoch of its records.
        term: Rises whenever the cursor is opened: a pointer of another term is another owner's.
    """

    cursor_ledger_id: int
    epoch: int
    term: int


def checksum(encoded: bytes) -> int:
    """Return the CRC-32C that an encoded record ends with: what the next record chains to."""
    return int(_CHECKSUM.unpack_from(encoded, len(encoded) - _CHECKSUM.size)[0])


def encode(record: Record) -> bytes:
    """Write a record.

    Raises:
        ValueError: A property's name or number, a batch, or the whole record, is too large for its field.
    """
    check_position(record.mark_delete)
    blocks = [*_encode_ledgers(record.deleted), *_encode_properties(record.properties), *_encode_batch(record.batch)]
    body = _BATCH_COUNT.pack(len(record.batch)) + b"".join(blocks)
    length = _SIZE_MIN + len(body)
    if length > _LENGTH_MAX:
        raise ValueError(f"a record of {length} bytes is over the limit of {_LENGTH_MAX}")
    header = _HEADER.pack(
        MAGIC, VERSION, record.kind, 0, length, record.epoch, record.sequence, record.chain,
        *record.mark_delete, sum(1 for _ in record.deleted.bitmaps()), len(record.properties),
    )  # fmt: skip
    covered = header + body
    return covered + _CHECKSUM.pack(google_crc32c.value(covered))


def decode(data: bytes) -> Record:
    """Read back what `encode` wrote.

    Args:
        data: One whole record; nothing may follow.

    Raises:
        UnsupportedVersionError: The record was written by a newer release.
        CorruptStateError: Anything else is wrong, with the offset, what was expected and what was found. No other
            exception can escape.

    Complexity: O(len(data)).
    """
    if len(data) < _SIZE_MIN:
        _corrupt(0, f"at least {_SIZE_MIN} bytes", f"{len(data)} bytes")
    magic, version, kind, reserved, length, epoch, sequence, chain, ledger_id, entry_id, ledgers, properties = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        _corrupt(0, MAGIC, magic)
    if version > VERSION:
        raise UnsupportedVersionError(f"native record of version {version}; this release reads up to {VERSION}")
    if length != len(data):
        _corrupt(8, f"length {len(data)}", length)
    computed = google_crc32c.value(data[: -_CHECKSUM.size])
    if checksum(data) != computed:
        _corrupt(length - _CHECKSUM.size, f"checksum {computed:#010x}", f"{checksum(data):#010x}")
    # What follows holds for every record that `encode` wrote; a checksum that fits by chance is no reason to trust.
    if version < 1 or reserved or kind not in tuple(RecordKind):
        _corrupt(4, f"version 1 to {VERSION}, kind 1 or 2, reserved 0", (version, kind, reserved))
    if not (0 <= ledger_id <= LEDGER_ID_MAX and -1 <= entry_id <= ENTRY_ID_MAX):
        _corrupt(32, "a mark-delete position", f"{ledger_id}:{entry_id}")
    reader = _Reader(data, _HEADER.size, length - _CHECKSUM.size)
    batches = _BATCH_COUNT.unpack(reader.take(_BATCH_COUNT.size, "batch count"))[0] if version > 1 else 0
    deleted = DeletedRanges.from_bitmaps(_decode_ledgers(reader, ledgers))
    named = _decode_properties(reader, properties)
    batch = _decode_batch(reader, batches)
    if reader.offset != reader.end:
        _corrupt(reader.offset, "the checksum", f"{reader.end - reader.offset} bytes more")
    return Record(RecordKind(kind), epoch, sequence, chain, Position(ledger_id, entry_id), deleted, named, batch)


def encode_pointer(pointer: Pointer) -> bytes:
    """Write a pointer."""
    covered = _POINTER.pack(POINTER_MAGIC, POINTER_VERSION, pointer.cursor_ledger_id, pointer.epoch, pointer.term)
    return covered + _CHECKSUM.pack(google_crc32c.value(covered))


def decode_pointer(data: bytes) -> Pointer:
    """Read back what `encode_pointer` wrote.

    Raises:
        UnsupportedVersionError: The pointer was written by a newer release.
        CorruptStateError: Anything else is wrong. No other exception can escape.
    """
    size = _POINTER.size + _CHECKSUM.size
    if len(data) != size:
        _corrupt(0, f"{size} bytes", f"{len(data)} bytes", what="cursor pointer")
    magic, version, ledger_id, epoch, term = _POINTER.unpack_from(data)
    if magic != POINTER_MAGIC:
        _corrupt(0, POINTER_MAGIC, magic, what="cursor pointer")
    if version > POINTER_VERSION:
        raise UnsupportedVersionError(
            f"cursor pointer of version {version}; this release reads up to {POINTER_VERSION}"
        )
    computed = google_crc32c.value(data[: _POINTER.size])
    if checksum(data) != computed:
        _corrupt(_POINTER.size, f"checksum {computed:#010x}", f"{checksum(data):#010x}", what="cursor pointer")
    if version < 1 or any(data[5:8]):
        _corrupt(4, "version 1, then three zero bytes", data[4:8].hex(), what="cursor pointer")
    return Pointer(ledger_id, epoch, term)


def _encode_ledgers(deleted: DeletedRanges) -> Iterator[bytes]:
    for ledger_id, bitmap in deleted.bitmaps():
        compact = bitmap.copy()
        compact.run_optimize()
        portable = compact.serialize()
        yield _LEDGER.pack(ledger_id, len(portable)) + portable


def _encode_properties(properties: Mapping[str, int]) -> Iterator[bytes]:
    for name, number in sorted(properties.items()):
        text = name.encode()
        if len(text) > 0xFFFF:
            raise ValueError(f"property name of {len(text)} bytes is over the limit of 65535: {name[:40]!r}...")
        if number not in _INT64:
            raise ValueError(f"property {name!r}: {number} does not fit 64 bits")
        yield _PROPERTY.pack(len(text), number) + text


def _encode_batch(batch: BatchIndexes) -> Iterator[bytes]:
    for position, unacked_words in batch.items():
        if len(unacked_words) > 0xFFFF:
            raise ValueError(f"batch {position} of {len(unacked_words)} words is over the limit of 65535")
        yield _BATCH.pack(*position, len(unacked_words)) + struct.pack(f"<{len(unacked_words)}q", *unacked_words)


class _Reader:
    """Takes pieces off a record's body and never beyond its end."""

    def __init__(self, data: bytes, offset: int, end: int) -> None:
        self.data = data
        self.offset = offset
        self.end = end

    def take(self, size: int, what: str) -> bytes:
        """Return the next `size` bytes, or refuse a record that ends before."""
        if size > self.end - self.offset:
            _corrupt(self.offset, f"{size} bytes of {what}", f"{self.end - self.offset} bytes")
        piece = self.data[self.offset : self.offset + size]
        self.offset += size
        return piece


def _decode_ledgers(reader: _Reader, count: int) -> Iterator[tuple[int, BitMap]]:
    previous = -1
    for _ in range(count):
        at = reader.offset
        ledger_id, size = _LEDGER.unpack(reader.take(_LEDGER.size, "ledger header"))
        if not previous < ledger_id <= LEDGER_ID_MAX:
            _corrupt(at, f"a ledger id above {previous}", ledger_id)
        previous = ledger_id
        at = reader.offset
        yield ledger_id, _decode_bitmap(reader.take(size, "bitmap"), at)


def _decode_bitmap(portable: bytes, offset: int) -> BitMap:
    try:
        bitmap = BitMap.deserialize(portable)
    except (ValueError, IndexError) as error:
        _corrupt(offset, "a roaring bitmap", str(error))
    # The reader of the bitmap format takes what it needs and stays silent about bytes that follow.
    if not bitmap or len(bitmap.serialize()) != len(portable):
        _corrupt(offset, "a non-empty roaring bitmap and nothing after it", f"{len(portable)} bytes")
    return bitmap


def _decode_properties(reader: _Reader, count: int) -> dict[str, int]:
    properties: dict[str, int] = {}
    previous = None
    for _ in range(count):
        at = reader.offset
        size, number = _PROPERTY.unpack(reader.take(_PROPERTY.size, "property header"))
        text = reader.take(size, "property name")
        try:
            name = text.decode()
        except UnicodeDecodeError as error:
            _corrupt(at, "a property name in UTF-8", str(error))
        if previous is not None and name <= previous:
            _corrupt(at, f"a property name above {previous!r}", repr(name))
        previous = name
        properties[name] = number
    return properties


def _decode_batch(reader: _Reader, count: int) -> BatchIndexes:
    batch = BatchIndexes()
    previous = Position(-1, -1)
    for _ in range(count):
        at = reader.offset
        ledger_id, entry_id, size = _BATCH.unpack(reader.take(_BATCH.size, "batch header"))
        position = Position(ledger_id, entry_id)
        if not previous < position or ledger_id > LEDGER_ID_MAX:
            _corrupt(at, f"a position above {previous}", position)
        previous = position
        at = reader.offset
        unacked_words = struct.unpack(f"<{size}q", reader.take(size * _WORD_BYTES, "batch words"))
        if not unacked_words or not unacked_words[-1]:
            _corrupt(at, "words of unacked indexes, the last of them not 0", f"{size} words")
        batch.ack(position, unacked_words)
    return batch


def _corrupt(offset: int, expected: object, found: object, *, what: str = "native record") -> NoReturn:
    raise CorruptStateError(what, offset=offset, expected=expected, found=found)
