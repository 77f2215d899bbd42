"""The native format: the records of a journal, and the pointer to it.

A record is a set of acked entries to OR in, plus a mark-delete position. A SNAPSHOT starts from nothing; a DELTA adds
to the records before it. Each record has the checksum of the previous one, so a missing, repeated or foreign record is
detected. A pointer is the value of a cursor in the metadata store: it names the ledger of the journal or, if there is
none, contains the whole state. `docs/wire-format.md` draws every byte.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c
import numpy as np
from pyroaring import BitMap

from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges, decode_blocks, encode_block
from ackstate.entry_bitmap import bitmap_of, bitmaps_of
from ackstate.errors import CorruptStateError, check_version, corrupt
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position, check_position, positions_of
from ackstate.sealed import CHECKSUM, SEALED, Reader, seal, unseal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

VERSION = 2
MAGIC = b"ACKR"
_WHAT = "native record"

# magic, version, kind, what follows, length, epoch, sequence, chain, mark-delete ledger and entry, ledgers, properties
_HEADER = struct.Struct("<4sBBHIQQIqqII")
_BATCH_COUNT = struct.Struct("<I")  # after the header
_PROPERTY = struct.Struct("<Hq")
_BATCH = struct.Struct("<QIH")
# What follows the batches: nothing, delivery counts, or also the times until which the counted messages wait.
_COUNTS, _TIMED_COUNTS = 1, 2
_COUNT_MAX = 2**32 - 1
_WORD_BYTES = 8
PROPERTY_NAME_BYTES_MAX = 0xFFFF
_SIZE_MIN = _HEADER.size + CHECKSUM.size
_LENGTH_MAX = 2**32 - 1
_INT64 = range(-(2**63), 2**63)


DeliveryCounts = Mapping[Position, tuple[int, int]]
"""How often messages were sent, and until when each waits before it is sent again, 0 for no time."""

NO_COUNTS: DeliveryCounts = {}


class RecordKind(IntEnum):
    """The base of a record."""

    SNAPSHOT = 1
    DELTA = 2


_KINDS = {int(kind): kind for kind in RecordKind}


@dataclass(frozen=True, slots=True)
class Record:
    """One journal record; its sets must not be changed."""

    kind: RecordKind  # SNAPSHOT replaces all before it; DELTA adds to it
    epoch: int  # rises with every reset of the cursor; records of an older epoch do not count
    sequence: int  # in its cursor ledger: 0 for the snapshot, then without gaps
    chain: int  # `checksum` of the record before, 0 for the first of a journal
    mark_delete: Position  # every entry up to it, inclusive, is acked
    deleted: DeletedRanges  # acked entries above the mark-delete: all of them, or the new ones
    properties: Mapping[str, int] = field(default_factory=dict)  # of the latest mark-delete; signed 64-bit numbers
    batch: BatchIndexes = field(default_factory=BatchIndexes)  # partly acked: all, or the changed ones
    counts: DeliveryCounts = field(default_factory=dict)  # likewise; a message of a delta whose count is 0 has none


class RecordFields(NamedTuple):
    """The fields of a `Record`, acks as bitmaps by ledger, batches in order: cheaper, since no ranges are counted."""

    kind: RecordKind
    epoch: int
    sequence: int
    chain: int
    mark_delete: Position
    bitmaps: Iterable[tuple[int, BitMap]]  # none empty; the caller may change them
    properties: Mapping[str, int]
    batch: Iterable[tuple[Position, tuple[int, ...]]]
    counts: DeliveryCounts = NO_COUNTS


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
    """Encode a record; `ValueError` if a property, a batch, or the whole record, is too large for its field."""
    return encode_parts(
        RecordFields(
            record.kind, record.epoch, record.sequence, record.chain, record.mark_delete,
            record.deleted.bitmaps(), record.properties, record.batch.items(), record.counts,
        )
    )  # fmt: skip


def encode_parts(parts: RecordFields) -> bytes:
    """Encode the fields of a record; errors as `encode`."""
    check_position(parts.mark_delete)
    blocks = [encode_block(ledger_id, bitmap) for ledger_id, bitmap in parts.bitmaps]
    ledger_count = len(blocks)
    if parts.properties:
        check_properties(parts.properties)
        for name, number in sorted(parts.properties.items()):
            blocks.append(_PROPERTY.pack(len(name.encode()), number) + name.encode())
    batches = [*parts.batch]
    for position, unacked_words in batches:
        if len(unacked_words) > 0xFFFF:
            raise ValueError(f"batch {position} of {len(unacked_words)} words is over the limit of 65535")
        blocks.append(_BATCH.pack(*position, len(unacked_words)))
        blocks.append(struct.pack(f"<{len(unacked_words)}q", *unacked_words))
    follows = _encode_counts(parts.counts, blocks) if parts.counts else 0
    body = b"".join((_BATCH_COUNT.pack(len(batches)), *blocks))
    length = _SIZE_MIN + len(body)
    if length > _LENGTH_MAX:
        raise ValueError(f"a record of {length} bytes is over the limit of {_LENGTH_MAX}")
    header = _HEADER.pack(
        MAGIC, VERSION, parts.kind, follows, length, parts.epoch, parts.sequence, parts.chain,
        *parts.mark_delete, ledger_count, len(parts.properties),
    )  # fmt: skip
    covered = header + body
    return covered + CHECKSUM.pack(google_crc32c.value(covered))  # without a call: each persist comes here


def _encode_counts(counts: DeliveryCounts, blocks: list[bytes]) -> int:
    ordered = sorted(counts)
    bitmaps = bitmaps_of(ordered)
    blocks.append(_BATCH_COUNT.pack(len(bitmaps)))
    blocks += [encode_block(*each) for each in bitmaps.items()]
    numbers, times = zip(*map(counts.__getitem__, ordered), strict=True)
    blocks.append(np.minimum(numbers, _COUNT_MAX).astype("<u4").tobytes())
    if not any(times):
        return _COUNTS
    blocks.append(np.array(times, "<i8").tobytes())
    return _TIMED_COUNTS


def decode(data: bytes) -> Record:
    """Decode one whole record; `UnsupportedVersionError` for another version, `CorruptStateError` for anything else."""
    parts = decode_parts(data)
    batch = BatchIndexes()
    for position, unacked_words in parts.batch:
        batch.ack(position, unacked_words)
    return Record(*parts[:5], DeletedRanges.from_bitmaps(parts.bitmaps), parts.properties, batch, parts.counts)


def decode_parts(data: bytes) -> RecordFields:
    """Decode and check the fields of a record as `decode`, much faster: no ranges are counted."""
    if len(data) < _SIZE_MIN:
        corrupt(_WHAT, 0, f"at least {_SIZE_MIN} bytes", f"{len(data)} bytes")
    magic, version, kind, follows, length, epoch, sequence, chain, ledger_id, entry_id, ledgers, properties = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        corrupt(_WHAT, 0, MAGIC, magic)
    if version != VERSION:
        check_version(version, VERSION, what=_WHAT)
    if length != len(data):
        corrupt(_WHAT, 8, f"length {len(data)}", length)
    if google_crc32c.value(data) != SEALED:
        computed = google_crc32c.value(data[: -CHECKSUM.size])
        corrupt(_WHAT, length - CHECKSUM.size, f"checksum {computed:#010x}", f"{checksum(data):#010x}")
    # These checks hold for every record that `encode` wrote; a checksum may match by chance.
    if not version or follows > _TIMED_COUNTS or kind not in _KINDS:
        corrupt(_WHAT, 4, f"version {VERSION}, kind 1 or 2, counts 0 to 2", (version, kind, follows))
    if not (0 <= ledger_id <= LEDGER_ID_MAX and -1 <= entry_id <= ENTRY_ID_MAX):
        corrupt(_WHAT, 32, "a mark-delete position", f"{ledger_id}:{entry_id}")
    offset, end = _HEADER.size + _BATCH_COUNT.size, length - CHECKSUM.size
    if offset > end:
        corrupt(_WHAT, _HEADER.size, f"{_BATCH_COUNT.size} bytes of counts", f"{end - _HEADER.size} bytes")
    (batches,) = _BATCH_COUNT.unpack_from(data, _HEADER.size)
    bitmaps, offset = decode_blocks(data, offset, end, ledgers)
    named: dict[str, int] = {}
    batch: list[tuple[Position, tuple[int, ...]]] = []
    counts = NO_COUNTS
    if properties or batches or offset != end or follows:
        reader = Reader(data, offset, end, _WHAT)
        named.update(reader.named(properties, _PROPERTY))
        batch = _decode_batch(reader, batches)
        counts = _decode_counts(reader, has_times=follows == _TIMED_COUNTS) if follows else counts
        reader.finish()
    mark_delete = Position(ledger_id, entry_id)
    return RecordFields(_KINDS[kind], epoch, sequence, chain, mark_delete, bitmaps, named, batch, counts)


def _decode_batch(reader: Reader, count: int) -> list[tuple[Position, tuple[int, ...]]]:
    batch = []
    previous = Position(-1, -1)
    for _ in range(count):
        at = reader.offset
        ledger_id, entry_id, size = _BATCH.unpack(reader.take(_BATCH.size, "batch header"))
        position = Position(ledger_id, entry_id)
        if not previous < position or ledger_id > LEDGER_ID_MAX:
            corrupt(_WHAT, at, f"a position above {previous}", position)
        previous = position
        at = reader.offset
        unacked_words = struct.unpack(f"<{size}q", reader.take(size * _WORD_BYTES, "batch words"))
        if not unacked_words or not unacked_words[-1]:
            corrupt(_WHAT, at, "words of unacked indexes, the last of them not 0", f"{size} words")
        batch.append((position, unacked_words))
    return batch


def _decode_counts(reader: Reader, *, has_times: bool) -> DeliveryCounts:
    (ledgers,) = _BATCH_COUNT.unpack(reader.take(_BATCH_COUNT.size, "count of ledgers"))
    bitmaps, reader.offset = decode_blocks(reader.data, reader.offset, reader.end, ledgers)
    if not bitmaps:
        corrupt(_WHAT, reader.offset, "delivery counts", "none")
    # Their bytes before their positions: a bitmap of a few bytes may name four billion.
    count = sum(len(bitmap) for _, bitmap in bitmaps)
    numbers = np.frombuffer(reader.take(4 * count, "delivery counts"), "<u4").tolist()
    at = reader.offset
    times = np.frombuffer(reader.take(8 * count, "times"), "<i8").tolist() if has_times else [0] * count
    positions = [each for ledger_id, bitmap in bitmaps for each in positions_of(ledger_id, bitmap)]
    if 0 in numbers or (has_times and (min(times) < 0 or not any(times))):
        corrupt(_WHAT, at, "counts from 1 on, times from 0 on, not all of them 0", f"{min(times)} to {max(times)}")
    return dict(zip(positions, zip(numbers, times, strict=True), strict=True))


# Properties, name -> text: sorted by name, each with the lengths of both.
_LENGTHS = struct.Struct("<HI")  # of the name and of the text, in bytes
_TEXT_BYTES_MAX = 2**20


def check_text_properties(properties: Mapping[str, str], *, called: str = "cursor property") -> None:
    """Raise `TypeError` unless names and texts are text, `ValueError` if one is too long or not UTF-8."""
    for name, text in properties.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"a {called} must be a name and a text, got {name!r}: {text!r}")
        if len(name.encode()) > PROPERTY_NAME_BYTES_MAX or len(text.encode()) > _TEXT_BYTES_MAX:
            raise ValueError(f"{called} {name[:40]!r} is too long")


def encode_text_properties(properties: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the bytes of each property, by name."""
    for name, text in sorted(properties.items()):
        encoded_name, encoded_text = name.encode(), text.encode()
        yield _LENGTHS.pack(len(encoded_name), len(encoded_text)) + encoded_name + encoded_text


def decode_text_properties(reader: Reader, count: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each property; `CorruptStateError` unless the bytes are those of `count`."""
    return ((name, reader.text(size, "property text")) for name, size in reader.named(count, _LENGTHS))


# Pointers.
POINTER_MAGIC = b"ACKP"
POINTER_VERSION = 2

_POINTER = struct.Struct("<4sB3xQQQ")  # magic, version, reserved, cursor ledger, epoch, term
_POINTER_TAIL = struct.Struct("<qqII")  # mark-delete ledger and entry, cursor properties, snapshot bytes
_NO_LEDGER = 2**64 - 1
_NO_POSITION = (-1, -1)
_POINTER_NAME = "cursor pointer"


@dataclass(frozen=True, slots=True)
class Pointer:
    """The location of a cursor's state, with its mark-delete position, in case the ledger is lost."""

    cursor_ledger_id: int | None  # of the journal; None if the state is in `snapshot`
    epoch: int  # of the journal's records, or of the snapshot
    term: int  # rises whenever the cursor is opened: a pointer with another term belongs to another owner
    mark_delete: Position | None = None  # at the time of writing; None if it was unknown
    cursor_properties: Mapping[str, str] = field(default_factory=dict)  # set by the application, name -> text
    snapshot: Record | None = None  # the whole state, only without a ledger

    def __post_init__(self) -> None:
        if (self.cursor_ledger_id is None) != (self.snapshot is not None):
            raise ValueError("a pointer must have either a ledger or a snapshot")


def encode_pointer(pointer: Pointer) -> bytes:
    """Encode a pointer; `ValueError` if a cursor property, or the snapshot, is too large."""
    check_text_properties(pointer.cursor_properties)
    ledger_id = _NO_LEDGER if pointer.cursor_ledger_id is None else pointer.cursor_ledger_id
    snapshot = b"" if pointer.snapshot is None else encode(pointer.snapshot)
    return seal(
        _POINTER.pack(POINTER_MAGIC, POINTER_VERSION, ledger_id, pointer.epoch, pointer.term),
        _POINTER_TAIL.pack(*(pointer.mark_delete or _NO_POSITION), len(pointer.cursor_properties), len(snapshot)),
        *encode_text_properties(pointer.cursor_properties),
        snapshot,
    )


def decode_pointer(data: bytes) -> Pointer:
    """Decode a pointer that `encode_pointer` wrote; errors as `decode`."""
    (ledger_id, epoch, term), reader = unseal(data, _POINTER, POINTER_MAGIC, POINTER_VERSION, what=_POINTER_NAME)
    cursor_ledger_id = None if ledger_id == _NO_LEDGER else ledger_id
    at = reader.offset
    tail = reader.take(_POINTER_TAIL.size, "mark-delete and counts")
    *ids, property_count, snapshot_bytes = _POINTER_TAIL.unpack(tail)
    mark_delete = None if tuple(ids) == _NO_POSITION else Position(*ids)
    if mark_delete is not None and not (0 <= ids[0] <= LEDGER_ID_MAX and -1 <= ids[1] <= ENTRY_ID_MAX):
        corrupt(_POINTER_NAME, at, "a mark-delete position", mark_delete)
    properties = dict(decode_text_properties(reader, property_count))
    at = reader.offset
    if (cursor_ledger_id is None) != (snapshot_bytes > 0):
        found = f"ledger {cursor_ledger_id}, {snapshot_bytes} bytes"
        corrupt(_POINTER_NAME, at, "a cursor ledger or a snapshot", found)
    snapshot = _decode_snapshot(reader.take(snapshot_bytes, "snapshot"), at, epoch) if snapshot_bytes else None
    reader.finish()
    return Pointer(cursor_ledger_id, epoch, term, mark_delete, properties, snapshot)


def _decode_snapshot(data: bytes, offset: int, epoch: int) -> Record:
    try:
        snapshot = decode(data)
    except CorruptStateError as error:
        corrupt(_POINTER_NAME, offset + error.offset, error.expected, error.found)
    if (snapshot.kind, snapshot.epoch) != (RecordKind.SNAPSHOT, epoch):
        found = f"kind {snapshot.kind}, epoch {snapshot.epoch}"
        corrupt(_POINTER_NAME, offset, f"a snapshot of epoch {epoch}", found)
    return snapshot


# Many deltas at once.
_DELTA = np.dtype(
    {
        "names": ["follows", "length", "epoch", "sequence", "chain", "mark_delete", "ledgers", "properties", "batches"],
        "formats": ["<u2", "<u4", "<u8", "<u8", "<u4", ("<i8", 2), "<u4", "<u4", "<u4"],
        "offsets": [6, 8, 12, 20, 28, 32, 48, 52, 56],
        "itemsize": 60,
    }
)
_LENGTH_MIN = _DELTA.itemsize + CHECKSUM.size
# The layout of a delta with one acked entry, as most are: the bitmap has one container with one value.
_SINGLE = np.dtype(
    {
        "names": ["counts", "ledger_id", "size_and_cookie", "containers", "high", "others", "values_at", "low"],
        "formats": ["V12", "<i8", "<u8", "<u4", "<u2", "<u2", "<u4", "<u2"],
        "offsets": [48, 60, 68, 76, 80, 82, 84, 88],
        "itemsize": 94,
    }
)
_FIXED = ("counts", "size_and_cookie", "containers", "others", "values_at")
_SAMPLE = encode(Record(RecordKind.DELTA, 0, 0, 0, Position(0, -1), DeletedRanges.from_bitmaps([(0, BitMap([0]))])))


class JournalOffset(NamedTuple):
    """What a record at this place of a journal must have; its mark-delete must be at least `mark_delete`."""

    epoch: int
    sequence: int
    chain: int
    mark_delete: Position


class Deltas(NamedTuple):
    """The contents of many deltas."""

    mark_delete: Position  # of the last delta
    properties: Mapping[str, int]  # of the last delta
    bitmaps: dict[int, BitMap]  # acked entries by ledger, of all deltas with a single one and nothing else
    others: list[RecordFields]


def decode_deltas(entries: Sequence[bytes], place: JournalOffset) -> Deltas | None:
    """Read consecutive deltas of a journal, at least one, the first at a place; their common fields as columns.

    None if one is damaged, does not belong there, or has another version: `decode_parts` finds the reason.
    """
    lengths = np.fromiter(map(len, entries), np.uint32, len(entries))
    if lengths.min() < _LENGTH_MIN or {*map(google_crc32c.value, entries)} != {SEALED}:
        return None
    joined = b"".join([encoded[: _DELTA.itemsize] for encoded in entries])
    headers = np.frombuffer(joined, _DELTA)
    checksums = np.frombuffer(b"".join([encoded[-CHECKSUM.size :] for encoded in entries]), "<u4")
    if joined != _expected(headers, lengths, checksums, place) or not _is_rising(headers, place):
        return None
    is_single = (lengths == _SINGLE.itemsize) & (headers["follows"] == 0)
    rows = np.frombuffer(b"".join(compress(entries, is_single.tolist())), _SINGLE)
    fixed = np.frombuffer(_SAMPLE, _SINGLE)
    is_as_sample = np.logical_and.reduce([rows[name] == fixed[name] for name in _FIXED]) & (rows["ledger_id"] >= 0)
    is_single[is_single] = is_as_sample
    try:
        parts = list(map(decode_parts, compress(entries, (~is_single).tolist())))
    except CorruptStateError:
        return None
    properties = {} if is_single[-1] else parts[-1].properties
    return Deltas(Position(*headers["mark_delete"][-1].tolist()), properties, _acked(rows[is_as_sample]), parts)


def join(bitmaps: dict[int, BitMap], ledger_id: int, acked: BitMap) -> None:
    """OR the acked entries of a ledger into those of all ledgers; ownership of the bitmap passes to `bitmaps`."""
    held = bitmaps.get(ledger_id)
    if held is None:
        bitmaps[ledger_id] = acked
    else:
        held |= acked


def _expected(
    headers: npt.NDArray[np.void],
    lengths: npt.NDArray[np.uint32],
    checksums: npt.NDArray[np.uint32],
    place: JournalOffset,
) -> bytes:
    """Return the required headers, byte for byte, with their free fields filled in."""
    encoded = np.tile(np.frombuffer(_SAMPLE, np.uint8, _DELTA.itemsize), len(headers))
    expected = encoded.view(_DELTA)
    expected["length"] = lengths
    expected["epoch"] = place.epoch
    expected["sequence"] = np.arange(place.sequence, place.sequence + len(headers))
    expected["chain"] = np.concatenate((np.array([place.chain], np.uint32), checksums[:-1]))
    for free in ("follows", "mark_delete", "ledgers", "properties", "batches"):
        expected[free] = headers[free]
    return encoded.tobytes()


def _is_rising(headers: npt.NDArray[np.void], place: JournalOffset) -> bool:
    """Return whether all mark-deletes are positions, each at or above the previous one."""
    ledger_ids, entry_ids = np.concatenate((np.array([place.mark_delete], np.int64), headers["mark_delete"])).T
    is_same_ledger = ledger_ids[1:] == ledger_ids[:-1]
    is_rising = (ledger_ids[1:] > ledger_ids[:-1]) | is_same_ledger & (entry_ids[1:] >= entry_ids[:-1])
    return bool(is_rising.all() and entry_ids.min() >= -1 and entry_ids.max() <= ENTRY_ID_MAX)


def _acked(singles: npt.NDArray[np.void]) -> dict[int, BitMap]:
    if not len(singles):
        return {}
    entry_ids = singles["high"].astype(np.uint32) << 16 | singles["low"]
    order = np.argsort(singles["ledger_id"], kind="stable")
    ledger_ids, begins = np.unique(singles["ledger_id"][order], return_index=True)
    of_ledgers = np.split(entry_ids[order], begins[1:])
    return dict(zip(ledger_ids.tolist(), map(bitmap_of, of_ledgers), strict=True))
