"""The native journal record: a set of acked entries to OR in, plus a mark-delete position.

`docs/wire-format.md` draws every byte. A SNAPSHOT starts from nothing; a DELTA adds to the records before it. Each
record has the checksum of the previous one, so a missing, repeated or foreign record is detected.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c
from pyroaring import BitMap

from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position, check_position
from ackstate.wire.native_reader import CHECKSUM, Reader, check_version, corrupt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

VERSION = 2
MAGIC = b"ACKR"

# magic, version, kind, reserved, length, epoch, sequence, chain, mark-delete ledger and entry, ledgers, properties
_HEADER = struct.Struct("<4sBBHIQQIqqII")
_BATCH_COUNT = struct.Struct("<I")  # after the header
LEDGER_BLOCK = struct.Struct("<QI")
_PROPERTY = struct.Struct("<Hq")
_BATCH = struct.Struct("<QIH")
_WORD_BYTES = 8
PROPERTY_NAME_BYTES_MAX = 0xFFFF
_SIZE_MIN = _HEADER.size + CHECKSUM.size
_LENGTH_MAX = 2**32 - 1
_INT64 = range(-(2**63), 2**63)
# The CRC-32C of any bytes that end with their own CRC-32C, low byte first: so no copy without the last four is needed.
SEALED = 0x48674BC7


class RecordKind(IntEnum):
    """The base of a record."""

    SNAPSHOT = 1
    DELTA = 2


_KINDS = {int(kind): kind for kind in RecordKind}


@dataclass(frozen=True, slots=True)
class Record:
    """One journal record.

    Attributes:
        kind: SNAPSHOT replaces all before it; DELTA adds to it.
        epoch: Rises with every reset of the cursor; records of an older epoch do not count.
        sequence: Number of the record in its cursor ledger: 0 for the snapshot, then without gaps.
        chain: `checksum` of the record before, 0 for the first of a journal.
        mark_delete: Every entry up to it, inclusive, is acked.
        deleted: Acked entries above the mark-delete: all of them, or the new ones. Must not be changed.
        properties: Properties of the latest mark-delete, name -> signed 64-bit number.
        batch: Partly acked batches: all of them, or the changed ones. Must not be changed.
    """

    kind: RecordKind
    epoch: int
    sequence: int
    chain: int
    mark_delete: Position
    deleted: DeletedRanges
    properties: Mapping[str, int] = field(default_factory=dict)
    batch: BatchIndexes = field(default_factory=BatchIndexes)


class RecordFields(NamedTuple):
    """The checked fields of a record, before they are assembled: for joining many records.

    Attributes:
        kind: As in `Record`, like all fields that are not described here.
        epoch: As in `Record`.
        sequence: As in `Record`.
        chain: As in `Record`.
        mark_delete: As in `Record`.
        bitmaps: Acked entries by ledger, in order of ledgers; none is empty. The caller may change them.
        properties: As in `Record`.
        batch: Partly acked batches, in order of position, with the words of their unacked indexes.
    """

    kind: RecordKind
    epoch: int
    sequence: int
    chain: int
    mark_delete: Position
    bitmaps: Iterable[tuple[int, BitMap]]
    properties: Mapping[str, int]
    batch: Iterable[tuple[Position, tuple[int, ...]]]


def checksum(encoded: bytes) -> int:
    """Return the CRC-32C at the end of an encoded record, to which the next record is chained."""
    return int.from_bytes(encoded[-CHECKSUM.size :], "little")


def check_properties(properties: Mapping[str, int]) -> None:
    """Raise `ValueError` or `TypeError` for a name or a number that no record can hold."""
    for name, number in properties.items():
        if not isinstance(name, str) or not isinstance(number, int):
            raise TypeError(f"a property must have a text as its name and a whole number, got {name!r}: {number!r}")
        if (size := len(name.encode())) > PROPERTY_NAME_BYTES_MAX:
            raise ValueError(
                f"property name of {size} bytes is over the limit of {PROPERTY_NAME_BYTES_MAX}: {name[:40]!r}..."
            )
        if number not in _INT64:
            raise ValueError(f"property {name!r}: {number} does not fit 64 bits")


def encode(record: Record) -> bytes:
    """Write a record.

    Raises:
        ValueError: A property's name or number, a batch, or the whole record, is too large for its field.
    """
    return encode_parts(
        RecordFields(
            record.kind, record.epoch, record.sequence, record.chain, record.mark_delete,
            record.deleted.bitmaps(), record.properties, record.batch.items(),
        )
    )  # fmt: skip


def encode_parts(parts: RecordFields) -> bytes:
    """Encode the fields of a record.

    Raises:
        As `encode`.
    """
    check_position(parts.mark_delete)
    blocks = [_encode_ledger(ledger_id, bitmap) for ledger_id, bitmap in parts.bitmaps]
    ledger_count = len(blocks)
    if parts.properties:
        blocks += _encode_properties(parts.properties)
    batch_count = -len(blocks)
    if parts.batch:
        blocks += _encode_batch(parts.batch)
    batch_count += len(blocks)
    body = b"".join((_BATCH_COUNT.pack(batch_count), *blocks))
    length = _SIZE_MIN + len(body)
    if length > _LENGTH_MAX:
        raise ValueError(f"a record of {length} bytes is over the limit of {_LENGTH_MAX}")
    header = _HEADER.pack(
        MAGIC, VERSION, parts.kind, 0, length, parts.epoch, parts.sequence, parts.chain,
        *parts.mark_delete, ledger_count, len(parts.properties),
    )  # fmt: skip
    covered = header + body
    return covered + CHECKSUM.pack(google_crc32c.value(covered))


def decode(data: bytes) -> Record:
    """Decode a record that `encode` wrote.

    Args:
        data: One whole record; nothing may follow.

    Raises:
        UnsupportedVersionError: The record has another version.
        CorruptStateError: Anything else is wrong, with the offset, the expected and the actual content. No other
            exception can escape.

    Complexity: O(len(data)).
    """
    return record_of(decode_parts(data))


def record_of(parts: RecordFields) -> Record:
    """Assemble a record from its fields; ownership of the bitmaps passes to it."""
    batch = BatchIndexes()
    for position, unacked_words in parts.batch:
        batch.ack(position, unacked_words)
    return Record(*parts[:5], DeletedRanges.from_bitmaps(parts.bitmaps), parts.properties, batch)


def decode_parts(data: bytes) -> RecordFields:
    """Decode and check the fields of a record that `encode` wrote, without assembling it.

    Raises:
        As `decode`, at the same offsets.

    Complexity: O(len(data)), and much faster than `decode`, which counts ranges.
    """
    if len(data) < _SIZE_MIN:
        corrupt(0, f"at least {_SIZE_MIN} bytes", f"{len(data)} bytes")
    magic, version, kind, reserved, length, epoch, sequence, chain, ledger_id, entry_id, ledgers, properties = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        corrupt(0, MAGIC, magic)
    check_version(version, VERSION, what="native record")
    if length != len(data):
        corrupt(8, f"length {len(data)}", length)
    if google_crc32c.value(data) != SEALED:
        computed = google_crc32c.value(data[: -CHECKSUM.size])
        corrupt(length - CHECKSUM.size, f"checksum {computed:#010x}", f"{checksum(data):#010x}")
    # These checks hold for every record that `encode` wrote; a checksum may match by chance.
    if not version or reserved or kind not in _KINDS:
        corrupt(4, f"version {VERSION}, kind 1 or 2, reserved 0", (version, kind, reserved))
    if not (0 <= ledger_id <= LEDGER_ID_MAX and -1 <= entry_id <= ENTRY_ID_MAX):
        corrupt(32, "a mark-delete position", f"{ledger_id}:{entry_id}")
    reader = Reader(data, _HEADER.size, length - CHECKSUM.size)
    (batches,) = _BATCH_COUNT.unpack(reader.take(_BATCH_COUNT.size, "counts"))
    bitmaps = _decode_ledgers(reader, ledgers)
    named = _decode_properties(reader, properties) if properties else {}
    batch = _decode_batch(reader, batches) if batches else []
    reader.finish("the checksum")
    return RecordFields(_KINDS[kind], epoch, sequence, chain, Position(ledger_id, entry_id), bitmaps, named, batch)


def _encode_ledger(ledger_id: int, bitmap: BitMap) -> bytes:
    """Encode the ledger block of a bitmap, which is not changed."""
    compact = bitmap.copy()
    compact.run_optimize()
    portable = compact.serialize()
    return LEDGER_BLOCK.pack(ledger_id, len(portable)) + portable


def _encode_properties(properties: Mapping[str, int]) -> Iterator[bytes]:
    check_properties(properties)
    for name, number in sorted(properties.items()):
        text = name.encode()
        yield _PROPERTY.pack(len(text), number) + text


def _encode_batch(batch: Iterable[tuple[Position, tuple[int, ...]]]) -> Iterator[bytes]:
    for position, unacked_words in batch:
        if len(unacked_words) > 0xFFFF:
            raise ValueError(f"batch {position} of {len(unacked_words)} words is over the limit of 65535")
        yield _BATCH.pack(*position, len(unacked_words)) + struct.pack(f"<{len(unacked_words)}q", *unacked_words)


def _decode_ledgers(reader: Reader, count: int) -> list[tuple[int, BitMap]]:
    bitmaps = []
    previous = -1
    for _ in range(count):
        at = reader.offset
        ledger_id, size = LEDGER_BLOCK.unpack(reader.take(LEDGER_BLOCK.size, "ledger header"))
        if not previous < ledger_id <= LEDGER_ID_MAX:
            corrupt(at, f"a ledger id above {previous}", ledger_id)
        previous = ledger_id
        at = reader.offset
        bitmaps.append((ledger_id, decode_bitmap(reader.take(size, "bitmap"), at)))
    return bitmaps


def decode_bitmap(portable: bytes, offset: int) -> BitMap:
    """Decode the bitmap of a ledger block, which starts at an offset in its record.

    Raises:
        CorruptStateError: It is not a bitmap, or is empty, or bytes follow it.
    """
    try:
        bitmap = BitMap.deserialize(portable)
    except (ValueError, IndexError) as error:
        corrupt(offset, "a roaring bitmap", str(error))
    # The bitmap library silently ignores bytes after the bitmap.
    if not bitmap or len(bitmap.serialize()) != len(portable):
        corrupt(offset, "a non-empty roaring bitmap and nothing after it", f"{len(portable)} bytes")
    return bitmap


def _decode_properties(reader: Reader, count: int) -> dict[str, int]:
    properties: dict[str, int] = {}
    previous = None
    for _ in range(count):
        at = reader.offset
        size, number = _PROPERTY.unpack(reader.take(_PROPERTY.size, "property header"))
        text = reader.take(size, "property name")
        try:
            name = text.decode()
        except UnicodeDecodeError as error:
            corrupt(at, "a property name in UTF-8", str(error))
        if previous is not None and name <= previous:
            corrupt(at, f"a property name above {previous!r}", repr(name))
        previous = name
        properties[name] = number
    return properties


def _decode_batch(reader: Reader, count: int) -> list[tuple[Position, tuple[int, ...]]]:
    batch = []
    previous = Position(-1, -1)
    for _ in range(count):
        at = reader.offset
        ledger_id, entry_id, size = _BATCH.unpack(reader.take(_BATCH.size, "batch header"))
        position = Position(ledger_id, entry_id)
        if not previous < position or ledger_id > LEDGER_ID_MAX:
            corrupt(at, f"a position above {previous}", position)
        previous = position
        at = reader.offset
        unacked_words = struct.unpack(f"<{size}q", reader.take(size * _WORD_BYTES, "batch words"))
        if not unacked_words or not unacked_words[-1]:
            corrupt(at, "words of unacked indexes, the last of them not 0", f"{size} words")
        batch.append((position, unacked_words))
    return batch
