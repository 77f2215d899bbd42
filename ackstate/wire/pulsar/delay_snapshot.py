"""The snapshot of a bucket of delayed messages, as Pulsar's bucket tracker writes it (PIP-195).

A snapshot is a ledger: entry 0 is its metadata, entries 1 to n are segments in the order of their times. Checksums are
in fields of ours that Pulsar ignores; snapshots written by Pulsar have none. `docs/wire-format.md` has the fields.

Source: ``DelayedMessageIndexBucketMetadata.proto`` and ``DelayedMessageIndexBucketSegment.proto`` of Apache Pulsar.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import google_crc32c
import numpy as np
from pyroaring import BitMap

from ackstate.errors import CorruptStateError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from ackstate.properties import LONG_MAX
from ackstate.wire.native import decode_bitmap
from ackstate.wire.pulsar.delayed_index_list import DelayedIndexes, decode_index_list, encode_index_list, offset_of
from ackstate.wire.pulsar.range_list import varint
from ackstate.wire.pulsar.strict_fields import Schema, Wire, check_required, fields_of, read_varint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from ackstate.wire.pulsar.strict_fields import Field

__all__ = [
    "DelayedIndexes",
    "SegmentMetadata",
    "decode_metadata",
    "decode_segment",
    "encode_metadata",
    "encode_segment",
    "segment_metadata",
    "split_metadata",
]

_CHECKSUM = ("ackstate_checksum", Wire.FIXED32)
_CHECKSUM_NUMBER = 100448  # far above Pulsar's numbers, as for a cursor's term
_SNAPSHOT = Schema("SnapshotMetadata", {1: ("metadata_list", Wire.BYTES), _CHECKSUM_NUMBER: _CHECKSUM})
_SEGMENT = Schema(
    "SnapshotSegmentMetadata",
    {
        1: ("delayed_index_bit_map", Wire.BYTES),
        2: ("max_schedule_timestamp", Wire.VARINT),
        3: ("min_schedule_timestamp", Wire.VARINT),
        _CHECKSUM_NUMBER: _CHECKSUM,
    },
)
_LEDGER = Schema("delayed_index_bit_map", {1: ("key", Wire.VARINT), 2: ("value", Wire.BYTES)})
_CHECKSUM_TAG = varint(_CHECKSUM_NUMBER << 3 | Wire.FIXED32)
_SEAL_BYTES = len(_CHECKSUM_TAG) + 4
_CHECKSUM_END = 2**32


@dataclass(frozen=True, slots=True)
class SegmentMetadata:
    """The metadata of one segment in a snapshot.

    Attributes:
        bitmaps: The entries delayed in this segment, by ledger id; at least one, and none is empty. Must not be
            changed.
        min_deliver_at_ms: The first time in the segment, ms since 1970.
        max_deliver_at_ms: The last time (inclusive).
        checksum: CRC-32C of the encoded segment; None if Pulsar wrote the snapshot.

    Raises:
        ValueError: No segment can have this metadata.
    """

    bitmaps: Mapping[int, BitMap]
    min_deliver_at_ms: int
    max_deliver_at_ms: int
    checksum: int | None = None

    def __post_init__(self) -> None:
        first, last = self.min_deliver_at_ms, self.max_deliver_at_ms
        if not 0 <= first <= last <= LONG_MAX:
            raise ValueError(f"times must be in order within 0..{LONG_MAX}, got {first} to {last}")
        if not self.bitmaps or not all(self.bitmaps.values()):
            raise ValueError("a segment and the bitmap of each ledger must have an entry")
        if not 0 <= min(self.bitmaps) <= max(self.bitmaps) <= LEDGER_ID_MAX:
            raise ValueError(
                f"ledger ids must be in 0..{LEDGER_ID_MAX}, got {min(self.bitmaps)} to {max(self.bitmaps)}"
            )
        if self.checksum is not None and not 0 <= self.checksum < _CHECKSUM_END:
            raise ValueError(f"checksum must be in 0..{_CHECKSUM_END - 1}, got {self.checksum}")


def encode_segment(indexes: DelayedIndexes) -> bytes:
    """Encode a segment, byte for byte as Pulsar.

    Args:
        indexes: At least one, times never falling. Pulsar orders equal times by position.

    Raises:
        ValueError: There are none, the arrays differ in length, times fall, or a number is out of range.
        TypeError: The numbers are not integers.

    Complexity: O(messages), about 100 ns and 13 to 17 bytes for each.
    """
    return encode_index_list(_checked(indexes))


def segment_metadata(indexes: DelayedIndexes, encoded: bytes) -> SegmentMetadata:
    """Return the metadata of a segment.

    Raises:
        ValueError: A position is repeated, or see `encode_segment`.
        TypeError: See `encode_segment`.

    Complexity: O(messages log messages), about 70 ns for each.
    """
    indexes = _checked(indexes)
    bitmaps = {ledger_id: BitMap(array("I", entries.tobytes())) for ledger_id, entries in _by_ledger(indexes)}
    if sum(map(len, bitmaps.values())) != len(indexes.entry_ids):
        raise ValueError(
            f"positions of delayed messages must be distinct, got a repeated one among {len(indexes.entry_ids)}"
        )
    times = indexes.deliver_at_ms
    return SegmentMetadata(bitmaps, int(times[0]), int(times[-1]), google_crc32c.value(encoded))


def decode_segment(data: bytes, *, what: str, metadata: SegmentMetadata | None = None) -> DelayedIndexes:
    """Decode a segment.

    Returns:
        At least one delayed message, times never falling.

    Raises:
        CorruptStateError: The bytes are not a segment, or do not match the metadata.
        UnsupportedVersionError: A delayed message has an unknown field or operation, which could mean that it is not
        delayed at all. No other exception can escape.

    Complexity: O(messages log messages), about 150 ns for each if laid out as by Pulsar.
    """
    if metadata is not None and metadata.checksum is not None:
        _check_sum(metadata.checksum, data, what, covers=0)
    indexes = decode_index_list(data, what=what)
    times = indexes.deliver_at_ms
    if not len(times):
        _corrupt(what, 0, "a delayed message", "the end")
    falls = np.flatnonzero(times[1:] < times[:-1])
    if len(falls):
        row = int(falls[0]) + 1
        _corrupt(what, offset_of(data, row, what=what), f"a time from {times[row - 1]} on", int(times[row]))
    if metadata is not None:
        _check_against(metadata, indexes, data, what)
    return indexes


def encode_metadata(segments: Sequence[SegmentMetadata]) -> bytes:
    """Encode the metadata of a snapshot: with our checksums, or like Pulsar if the segments have none.

    Raises:
        ValueError: Some have a checksum and others do not.

    Complexity: O(bitmaps), about 5 us for each.
    """
    record = b"".join(_framed(b"\x0a", b"".join(_segment_fields(segment))) for segment in segments)
    sealed = {segment.checksum is not None for segment in segments}
    if len(sealed) > 1:
        raise ValueError("some segments have a checksum and others do not")
    return record if sealed == {False} else _checksum_field(google_crc32c.value(record)) + record


def split_metadata(data: bytes, *, what: str) -> tuple[bytes, ...]:
    """Return the encoded metadata of each segment, as `encode_metadata` of that segment alone.

    Complexity: O(len(data)), plus a small constant per segment.
    """
    begin = _SEAL_BYTES if data.startswith(_CHECKSUM_TAG) else 0
    segments = [data[each.offset : each.end] for each in fields_of(data, _SNAPSHOT, begin, len(data), what=what)]
    return tuple(_checksum_field(google_crc32c.value(each)) + each if begin else each for each in segments)


def decode_metadata(data: bytes, *, what: str) -> tuple[SegmentMetadata, ...]:
    """Decode the metadata of a snapshot.

    Returns:
        One for each segment, in the order of their entries. Either all have a checksum, or none.

    Raises:
        CorruptStateError: The bytes are not such metadata.
        UnsupportedVersionError: It has an unknown field.
        No other exception can escape.

    Complexity: O(len(data)), about 10 us a bitmap.
    """
    begin = 0
    is_sealed = data.startswith(_CHECKSUM_TAG) and len(data) >= _SEAL_BYTES
    if is_sealed:
        begin = _SEAL_BYTES
        _check_sum(int.from_bytes(data[len(_CHECKSUM_TAG) : begin], "little"), data, what, covers=begin)
    segments = []
    for field in fields_of(data, _SNAPSHOT, begin, len(data), what=what):
        if field.name != "metadata_list":
            _corrupt(what, field.offset, "a segment", "the checksum, which must be first")
        segments.append(_decode_segment_metadata(data, field, what))
        if (segments[-1].checksum is not None) != is_sealed:
            _corrupt(what, field.offset, "all checksums or none", "only some of them")
    # Pulsar writes no snapshot without segments, so this is the rest of a longer record.
    if not data:
        _corrupt(what, 0, "a segment", "the end")
    return tuple(segments)


def _corrupt(what: str, offset: int, expected: object, found: object) -> NoReturn:
    raise CorruptStateError(what, offset=offset, expected=expected, found=found)


def _check_sum(checksum: int, data: bytes, what: str, *, covers: int) -> None:
    """Refuse bytes whose checksum, computed from an offset on, differs."""
    computed = google_crc32c.value(data[covers:])
    if computed != checksum:
        _corrupt(what, covers, f"bytes of checksum {checksum:#010x}", f"{computed:#010x}")


def _checked(indexes: DelayedIndexes) -> DelayedIndexes:
    """Return checked delayed messages."""
    columns = [np.asarray(column) for column in indexes]
    shapes = {column.shape for column in columns}
    if len(shapes) > 1 or len(columns[0].shape) != 1:
        raise ValueError(f"delayed messages must be arrays of equal length, got {[column.shape for column in columns]}")
    if not len(columns[0]):
        raise ValueError("a segment must have at least one delayed message, got none")
    for name, column, most in zip(
        DelayedIndexes._fields, columns, (LONG_MAX, LEDGER_ID_MAX, ENTRY_ID_MAX), strict=True
    ):
        if column.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers, got {column.dtype}")
        if column.min() < 0 or column.max() > most:
            raise ValueError(f"{name} must be in 0..{most}, got {column.min()} to {column.max()}")
    times = columns[0]
    if (times[1:] < times[:-1]).any():
        raise ValueError("the times of a segment must not fall, got one that does")
    return DelayedIndexes(*(column.astype(np.int64, copy=False) for column in columns))


def _by_ledger(indexes: DelayedIndexes) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
    """Yield each ledger id and its entry ids, both rising; repeated entries stay repeated."""
    lowest = int(indexes.ledger_ids.min())
    if lowest == indexes.ledger_ids.max():
        return iter([(lowest, np.sort(indexes.entry_ids.astype(np.uint32)))])
    ledger_ids = np.unique(indexes.ledger_ids)
    # The ledger's rank replaces its id: rank and entry id fit one number, so they are sorted together.
    keys = np.sort(np.searchsorted(ledger_ids, indexes.ledger_ids) << 32 | indexes.entry_ids)
    begins = np.searchsorted(keys, np.arange(1, len(ledger_ids)) << 32)
    return zip(ledger_ids.tolist(), np.split(keys.astype(np.uint32), begins), strict=True)


def _check_against(metadata: SegmentMetadata, indexes: DelayedIndexes, data: bytes, what: str) -> None:
    """Refuse a segment that does not match its metadata."""
    times, last = indexes.deliver_at_ms, len(indexes.deliver_at_ms) - 1
    if times[0] != metadata.min_deliver_at_ms:
        _corrupt(what, 0, f"the first time {metadata.min_deliver_at_ms}", int(times[0]))
    if times[-1] != metadata.max_deliver_at_ms:
        _corrupt(what, offset_of(data, last, what=what), f"the last time {metadata.max_deliver_at_ms}", int(times[-1]))
    # A bitmap of few bytes can have billions of entries: they are counted before they are expanded.
    count = sum(map(len, metadata.bitmaps.values()))
    if count != len(times):
        _corrupt(what, len(data), f"{count} delayed messages", len(times))
    if not all(_is_bitmap(metadata.bitmaps.get(ledger_id), entries) for ledger_id, entries in _by_ledger(indexes)):
        row, position = _first_stray(metadata, indexes)
        _corrupt(what, offset_of(data, row, what=what), "positions of the metadata, each once", position)


def _is_bitmap(bitmap: BitMap | None, entries: npt.NDArray[np.uint32]) -> bool:
    if bitmap is None or len(bitmap) != len(entries):
        return False
    return bool((np.frombuffer(bitmap.to_array(), np.uint32) == entries).all())


def _first_stray(metadata: SegmentMetadata, indexes: DelayedIndexes) -> tuple[int, Position]:
    """Return the first position that is not in the metadata, or is repeated, and its row."""
    seen = set()
    for row, position in enumerate(zip(indexes.ledger_ids.tolist(), indexes.entry_ids.tolist(), strict=True)):
        ledger_id, entry_id = position
        if position in seen or entry_id not in metadata.bitmaps.get(ledger_id, ()):
            return row, Position(*position)
        seen.add(position)
    raise AssertionError("as many positions as the metadata names, each once and named there, are those of it")


def _framed(tag: bytes, content: bytes) -> bytes:
    return tag + varint(len(content)) + content


def _segment_fields(segment: SegmentMetadata) -> Iterable[bytes]:
    for ledger_id, bitmap in sorted(segment.bitmaps.items()):
        yield _framed(b"\x0a", b"\x08" + varint(ledger_id) + _framed(b"\x12", bitmap.serialize()))
    yield b"\x10" + varint(segment.max_deliver_at_ms)
    yield b"\x18" + varint(segment.min_deliver_at_ms)
    if segment.checksum is not None:
        yield _checksum_field(segment.checksum)


def _checksum_field(checksum: int) -> bytes:
    return _CHECKSUM_TAG + checksum.to_bytes(4, "little")


def _decode_segment_metadata(data: bytes, within: Field, what: str) -> SegmentMetadata:
    bitmaps: dict[int, BitMap] = {}
    numbers: dict[str, int] = {}
    for field in fields_of(data, _SEGMENT, within.begin, within.end, what=what):
        if field.name != "delayed_index_bit_map":
            numbers[field.name] = field.number
            continue
        ledger_id, bitmap = _decode_ledger(data, field, what)
        if ledger_id in bitmaps:
            _corrupt(what, field.offset, "each ledger once", f"ledger {ledger_id} again")
        bitmaps[ledger_id] = bitmap
    check_required(numbers, ("max_schedule_timestamp", "min_schedule_timestamp"), within, what=what)
    first, last = numbers["min_schedule_timestamp"], numbers["max_schedule_timestamp"]
    try:
        return SegmentMetadata(bitmaps, first, last, numbers.get(_CHECKSUM[0]))
    except ValueError as error:
        _corrupt(what, within.offset, "metadata of a segment", error)


def _usual_ledger(data: bytes, within: Field, what: str) -> tuple[int, int, int] | None:
    """Return a ledger and the bounds of its bitmap, if the fields have the layout of every known writer; else None.

    A snapshot may have a hundred thousand, and decoding one field by field takes three times as long.
    """
    at = within.begin
    if data[at : at + 1] != b"\x08":
        return None
    ledger_id, at = read_varint(data, at + 1, within.end, what)
    if at == within.end or data[at] != 0x12:
        return None
    size, begin = read_varint(data, at + 1, within.end, what)
    return (ledger_id, begin, within.end) if begin + size == within.end else None


def _any_ledger(data: bytes, within: Field, what: str) -> tuple[int, int, int]:
    found = {field.name: field for field in fields_of(data, _LEDGER, within.begin, within.end, what=what)}
    check_required(found, ("key", "value"), within, what=what)
    return found["key"].number, found["value"].begin, found["value"].end


def _decode_ledger(data: bytes, within: Field, what: str) -> tuple[int, BitMap]:
    ledger_id, begin, end = _usual_ledger(data, within, what) or _any_ledger(data, within, what)
    try:
        return ledger_id, decode_bitmap(data[begin:end], begin)
    except CorruptStateError as fault:
        _corrupt(what, fault.offset, fault.expected, fault.found)
