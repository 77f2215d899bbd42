"""The native journal record: a set of acked entries to OR in, plus a mark-delete position.

`docs/wire-format.md` draws every byte. A SNAPSHOT starts from nothing; a DELTA adds to what the records before it say.
Each record carries the checksum of the one before, so a record that is missing, repeated or from another journal is
found out.
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
from ackstate.errors import UnsupportedVersionError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position, check_position
from ackstate.wire.native_reader import CHECKSUM, Reader, corrupt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

VERSION = 3
"""The newest that this release reads: a snapshot that refers to delay buckets, see `ackstate.wire.native_shared`."""
PLAIN_VERSION = 2
"""Of all other records."""
MAGIC = b"ACKR"

# magic, version, kind, reserved, length, epoch, sequence, chain, mark-delete ledger and entry, ledgers, properties
_HEADER = struct.Struct("<4sBBHIQQIqqII")
_BATCH_COUNT = struct.Struct("<I")  # from version 2 on, after the header
_COUNTS = {1: struct.Struct("<"), PLAIN_VERSION: _BATCH_COUNT}  # what follows the header, by version
LEDGER_BLOCK = struct.Struct("<QI")
_PROPERTY = struct.Struct("<Hq")
_BATCH = struct.Struct("<QIH")
_WORD_BYTES = 8
PROPERTY_NAME_BYTES_MAX = 0xFFFF
_SIZE_MIN = _HEADER.size + CHECKSUM.size
_LENGTH_MAX = 2**32 - 1
_INT64 = range(-(2**63), 2**63)
# The CRC-32C of anything that ends with its own CRC-32C, low byte first: no copy without the last four is needed.
SEALED = 0x48674BC7


class RecordKind(IntEnum):
    """What a record starts from."""

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


class RecordFields(NamedTuple):
    """What a record says, checked as `decode` does, but not put together: for joining many.

    Attributes:
        kind: As in `Record`, and so the others that are not named here.
        epoch: The same.
        sequence: The same.
        chain: The same.
        mark_delete: The same.
        bitmaps: Acked entries by ledger, in order of ledgers; none is empty. The caller's to change.
        properties: The same.
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
    """Return the CRC-32C that an encoded record ends with: what the next record chains to."""
    return int(CHECKSUM.unpack_from(encoded, len(encoded) - CHECKSUM.size)[0])


def check_properties(properties: Mapping[str, int]) -> None:
    """Raise `ValueError` or `TypeError` for a name or a number that no record can hold."""
    for name, number in properties.items():
        if not isinstance(name, str) or not isinstance(number, int):
            raise TypeError(f"a property has a text for its name and a whole number, found {name!r}: {number!r}")
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


def encode_parts(
    parts: RecordFields, *, version: int = PLAIN_VERSION, counts: bytes = b"", tail: Iterable[bytes] = ()
) -> bytes:
    """Write what a record says.

    Args:
        parts: As `decode_parts` gives them.
        version: Of the record.
        counts: What this version has after the count of batches.
        tail: What it has after the batch blocks.

    Raises:
        As `encode`.
    """
    check_position(parts.mark_delete)
    blocks = [encode_ledger(ledger_id, bitmap) for ledger_id, bitmap in parts.bitmaps]
    ledger_count = len(blocks)
    if parts.properties:
        blocks += _encode_properties(parts.properties)
    batch_count = -len(blocks)
    blocks += _encode_batch(parts.batch)
    batch_count += len(blocks)
    blocks += tail
    length = _SIZE_MIN + _BATCH_COUNT.size + len(counts) + sum(map(len, blocks))
    if length > _LENGTH_MAX:
        raise ValueError(f"a record of {length} bytes is over the limit of {_LENGTH_MAX}")
    header = _HEADER.pack(
        MAGIC, version, parts.kind, 0, length, parts.epoch, parts.sequence, parts.chain,
        *parts.mark_delete, ledger_count, len(parts.properties),
    )  # fmt: skip
    covered = b"".join((header, _BATCH_COUNT.pack(batch_count), counts, *blocks))
    return covered + CHECKSUM.pack(google_crc32c.value(covered))


def decode(data: bytes) -> Record:
    """Read back what `encode` wrote.

    Args:
        data: One whole record; nothing may follow.

    Raises:
        UnsupportedVersionError: The record was written by a newer release, or is a snapshot that refers to delay
            buckets: its acks are not in it.
        CorruptStateError: Anything else is wrong, with the offset, what was expected and what was found. No other
            exception can escape.

    Complexity: O(len(data)).
    """
    return record_of(decode_parts(data))


def record_of(parts: RecordFields) -> Record:
    """Put together what a record says; the bitmaps are given away."""
    batch = BatchIndexes()
    for position, unacked_words in parts.batch:
        batch.ack(position, unacked_words)
    return Record(*parts[:5], DeletedRanges.from_bitmaps(parts.bitmaps), parts.properties, batch)


def decode_parts(data: bytes) -> RecordFields:
    """Read and check what `encode` wrote, and put nothing together.

    Raises:
        As `decode`, at the same offsets.

    Complexity: O(len(data)), and far less than `decode`, which counts ranges.
    """
    parts, _, reader = read_parts(data, _COUNTS)
    reader.finish("the checksum")
    return parts


def read_parts(data: bytes, counts: Mapping[int, struct.Struct]) -> tuple[RecordFields, tuple[int, ...], Reader]:
    """Read and check a record up to its batch blocks.

    Args:
        data: One whole record.
        counts: What follows the header, for each version that is read: the count of batches first, if there is one.

    Returns:
        What it says, the counts after that of batches, and what reads on behind the batch blocks.

    Raises:
        As `decode`.
    """
    if len(data) < _SIZE_MIN:
        corrupt(0, f"at least {_SIZE_MIN} bytes", f"{len(data)} bytes")
    magic, version, kind, reserved, length, epoch, sequence, chain, ledger_id, entry_id, ledgers, properties = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        corrupt(0, MAGIC, magic)
    if version > max(counts):
        raise UnsupportedVersionError(f"native record of version {version}; what reads it knows up to {max(counts)}")
    if length != len(data):
        corrupt(8, f"length {len(data)}", length)
    if google_crc32c.value(data) != SEALED:
        computed = google_crc32c.value(data[: -CHECKSUM.size])
        corrupt(length - CHECKSUM.size, f"checksum {computed:#010x}", f"{checksum(data):#010x}")
    # What follows holds for every record that `encode` wrote; a checksum that fits by chance is no reason to trust.
    if version not in counts or reserved or kind not in _KINDS:
        versions = f"version {min(counts)} to {max(counts)}"
        corrupt(4, f"{versions}, kind 1 or 2, reserved 0", (version, kind, reserved))
    if not (0 <= ledger_id <= LEDGER_ID_MAX and -1 <= entry_id <= ENTRY_ID_MAX):
        corrupt(32, "a mark-delete position", f"{ledger_id}:{entry_id}")
    reader = Reader(data, _HEADER.size, length - CHECKSUM.size)
    batches, *further = counts[version].unpack(reader.take(counts[version].size, "counts")) or (0,)
    bitmaps = _decode_ledgers(reader, ledgers)
    named = _decode_properties(reader, properties) if properties else {}
    batch = _decode_batch(reader, batches) if batches else []
    parts = RecordFields(_KINDS[kind], epoch, sequence, chain, Position(ledger_id, entry_id), bitmaps, named, batch)
    return parts, tuple(further), reader


def encode_ledger(ledger_id: int, bitmap: BitMap) -> bytes:
    """Write the ledger block of a bitmap, which is not changed."""
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
    """Read the bitmap of a ledger block, which begins at an offset in its record.

    Raises:
        CorruptStateError: It is none, or is empty, or something follows it.
    """
    try:
        bitmap = BitMap.deserialize(portable)
    except (ValueError, IndexError) as error:
        corrupt(offset, "a roaring bitmap", str(error))
    # The reader of the bitmap format takes what it needs and stays silent about bytes that follow.
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
