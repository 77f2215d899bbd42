"""The snapshot of a bucket of delayed messages, as Pulsar's bucket tracker writes it (PIP-195).

A snapshot is a ledger: entry 0 is its metadata, entries 1 to n are segments in the order of their times. Checksums are
in fields of ours that Pulsar ignores; snapshots written by Pulsar have none. `docs/wire-format.md` has the fields.

A segment is a list of ``DelayedIndex``, which is encoded and decoded a column at a time. One element ::

    0x0a, length
    0x08, timestamp
    0x10, ledger
    0x18, entry

Source: ``DelayedMessageIndexBucketMetadata.proto`` and ``DelayedMessageIndexBucketSegment.proto`` of Apache Pulsar.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c
import numpy as np
from pyroaring import BitMap

from ackstate.checks import LONG_MAX
from ackstate.deleted_ranges import decode_bitmap
from ackstate.errors import CorruptStateError, UnsupportedVersionError, corrupt
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX
from ackstate.wire.pulsar.fields import (
    Field,
    Int64s,
    RowLayout,
    Schema,
    Wire,
    check_required,
    decode_rows,
    encode_rows,
    fields_of,
    known_fields,
    read_varint,
    varint,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

_CHECKSUM = ("ackstate_checksum", Wire.FIXED32)
_CHECKSUM_NUMBER = 100448  # far above Pulsar's numbers, as for a cursor's term
_SNAPSHOT = Schema("SnapshotMetadata", {1: ("metadata_list", Wire.BYTES), _CHECKSUM_NUMBER: _CHECKSUM})
_METADATA = Schema(
    "SnapshotSegmentMetadata",
    {
        1: ("delayed_index_bit_map", Wire.BYTES),
        2: ("max_schedule_timestamp", Wire.VARINT),
        3: ("min_schedule_timestamp", Wire.VARINT),
        _CHECKSUM_NUMBER: _CHECKSUM,
    },
)
_LEDGER = Schema("delayed_index_bit_map", {1: ("key", Wire.VARINT), 2: ("value", Wire.BYTES)})
_SEGMENT = Schema("SnapshotSegment", {1: ("indexes", Wire.BYTES)})
_INDEX = Schema(
    "DelayedIndex",
    {
        1: ("timestamp", Wire.VARINT),
        2: ("ledger_id", Wire.VARINT),
        3: ("entry_id", Wire.VARINT),
        4: ("delayed_operation_type", Wire.VARINT),
    },
)
_MOST = {"timestamp": LONG_MAX, "ledger_id": LEDGER_ID_MAX, "entry_id": ENTRY_ID_MAX}
_DELAY = 0  # the default operation of an element; no release of Pulsar has another
_INDEX_ROW = RowLayout((0x0A, None, 0x08, None, 0x10, None, 0x18, None), ((1, 6),), (3, 5, 7), bytes_max=9)
_CHECKSUM_TAG = varint(_CHECKSUM_NUMBER << 3 | Wire.FIXED32)
_SEAL_BYTES = len(_CHECKSUM_TAG) + 4
_CHECKSUM_END = 2**32


class DelayedIndexes(NamedTuple):
    """Delayed messages as parallel arrays of one length."""

    deliver_at_ms: Int64s  # ms since 1970, 0 to 2**63 - 1
    ledger_ids: Int64s  # 0 to 2**63 - 1
    entry_ids: Int64s  # 0 to 2**32 - 1


@dataclass(frozen=True, slots=True)
class SegmentMetadata:
    """The metadata of one segment in a snapshot; `ValueError` if no segment can have it."""

    bitmaps: Mapping[int, BitMap]  # by ledger id; at least one, none empty; must not be changed
    min_deliver_at_ms: int  # ms since 1970
    max_deliver_at_ms: int  # inclusive
    checksum: int | None = None  # CRC-32C of the encoded segment; None if Pulsar wrote the snapshot

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
    """Encode at least one message, times never falling, as Pulsar; `ValueError` or `TypeError` for anything else."""
    return b"".join(encode_rows(_checked(indexes), _INDEX_ROW))


def segment_metadata(indexes: DelayedIndexes, encoded: bytes) -> SegmentMetadata:
    """Return the metadata of a segment; `ValueError` if a position is repeated, else errors as `encode_segment`."""
    indexes = _checked(indexes)
    bitmaps = {ledger_id: BitMap(array("I", entries.tobytes())) for ledger_id, entries in _by_ledger(indexes)}
    if sum(map(len, bitmaps.values())) != len(indexes.entry_ids):
        raise ValueError(
            f"positions of delayed messages must be distinct, got a repeated one among {len(indexes.entry_ids)}"
        )
    times = indexes.deliver_at_ms
    return SegmentMetadata(bitmaps, int(times[0]), int(times[-1]), google_crc32c.value(encoded))


def decode_segment(data: bytes, *, what: str, metadata: SegmentMetadata | None = None) -> DelayedIndexes:
    """Decode a segment; `CorruptStateError`, also if it does not match the metadata, or `UnsupportedVersionError`."""
    if metadata is not None and metadata.checksum is not None:
        _check_sum(metadata.checksum, data, what, covers=0)
    indexes = _decode_indexes(data, what)
    times = indexes.deliver_at_ms
    if not len(times):
        corrupt(what, 0, "a delayed message", "the end")
    falls = np.flatnonzero(times[1:] < times[:-1])
    if len(falls):
        row = int(falls[0]) + 1
        corrupt(what, _offset_of(data, row, what=what), f"a time from {times[row - 1]} on", int(times[row]))
    if metadata is not None:
        _check_against(metadata, indexes, data, what)
    return indexes


def encode_metadata(segments: Sequence[SegmentMetadata]) -> bytes:
    """Encode the metadata of a snapshot, with our checksums or like Pulsar; `ValueError` if only some have one."""
    record = b"".join(_framed(b"\x0a", b"".join(_segment_fields(segment))) for segment in segments)
    sealed = {segment.checksum is not None for segment in segments}
    if len(sealed) > 1:
        raise ValueError("some segments have a checksum and others do not")
    return record if sealed == {False} else _checksum_field(google_crc32c.value(record)) + record


def decode_metadata(data: bytes, *, what: str) -> tuple[SegmentMetadata, ...]:
    """Decode the metadata of each segment: all have a checksum, or none; errors as `decode_segment`."""
    begin = 0
    is_sealed = data.startswith(_CHECKSUM_TAG) and len(data) >= _SEAL_BYTES
    if is_sealed:
        begin = _SEAL_BYTES
        _check_sum(int.from_bytes(data[len(_CHECKSUM_TAG) : begin], "little"), data, what, covers=begin)
    segments = []
    for name, field in known_fields(data, _SNAPSHOT, begin, len(data), what=what):
        if name != "metadata_list":
            corrupt(what, field.offset, "a segment", "the checksum, which must be first")
        segments.append(_decode_segment_metadata(data, field, what))
        if (segments[-1].checksum is not None) != is_sealed:
            corrupt(what, field.offset, "all checksums or none", "only some of them")
    # Pulsar writes no snapshot without segments, so this is the rest of a longer record.
    if not data:
        corrupt(what, 0, "a segment", "the end")
    return tuple(segments)


def split_metadata(data: bytes) -> list[bytes]:
    """Return the part of each segment in valid metadata of a snapshot."""
    begin = _SEAL_BYTES if data.startswith(_CHECKSUM_TAG) else 0
    return [data[each.begin : each.end] for each in fields_of(data, begin, len(data), what=_SNAPSHOT.name)]


def decode_part(part: bytes, *, what: str) -> SegmentMetadata:
    """Decode a part that `split_metadata` returned."""
    return _decode_segment_metadata(part, Field(1, Wire.BYTES, 0, 0, len(part), 0), what)


def _decode_indexes(data: bytes, what: str) -> DelayedIndexes:
    """Decode delayed messages; their numbers are in range, their order is not checked."""
    columns, end = decode_rows(data, 0, _INDEX_ROW)
    if end < len(data) or (end and columns[2].max() > ENTRY_ID_MAX):
        # Another layout, or an error: element by element.
        rows = (numbers for _, numbers in _walk(data, what))
        columns = [*np.fromiter(rows, np.dtype((np.int64, 3))).T]
    return DelayedIndexes(*columns)


def _offset_of(data: bytes, row: int, *, what: str) -> int:
    """Return the offset of an element in a valid list; elements count from 0."""
    return next(offset for number, (offset, _) in enumerate(_walk(data, what)) if number == row)


def _walk(data: bytes, what: str) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield the offset of each element, and its three numbers."""
    for _, element in known_fields(data, _SEGMENT, 0, len(data), what=what):
        numbers = known_fields(data, _INDEX, element.begin, element.end, what=what)
        found = {name: field.value for name, field in numbers}  # If a number is repeated, the last one counts.
        check_required(found, tuple(_MOST), "indexes", element.end, what=what)
        operation = found.pop("delayed_operation_type", _DELAY)
        if operation != _DELAY:  # It could mean that the message is not delayed at all.
            raise UnsupportedVersionError(f"{what}: operation {operation} at byte {element.offset} is unknown")
        for name, most in _MOST.items():
            if found[name] > most:
                corrupt(what, element.offset, f"{name} of at most {most}", found[name])
        yield element.offset, (found["timestamp"], found["ledger_id"], found["entry_id"])


def _check_sum(checksum: int, data: bytes, what: str, *, covers: int) -> None:
    """Refuse bytes whose checksum, computed from an offset on, differs."""
    computed = google_crc32c.value(data[covers:])
    if computed != checksum:
        corrupt(what, covers, f"bytes of checksum {checksum:#010x}", f"{computed:#010x}")


def _checked(indexes: DelayedIndexes) -> DelayedIndexes:
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
    times, last = indexes.deliver_at_ms, len(indexes.deliver_at_ms) - 1
    if times[0] != metadata.min_deliver_at_ms:
        corrupt(what, 0, f"the first time {metadata.min_deliver_at_ms}", int(times[0]))
    if times[-1] != metadata.max_deliver_at_ms:
        corrupt(what, _offset_of(data, last, what=what), f"the last time {metadata.max_deliver_at_ms}", int(times[-1]))
    # A bitmap of few bytes can have billions of entries: they are counted before they are expanded.
    counts = {ledger_id: len(bitmap) for ledger_id, bitmap in metadata.bitmaps.items()}
    found = list(_by_ledger(indexes))
    if counts != {ledger_id: len(entries) for ledger_id, entries in found} or not all(
        (np.frombuffer(metadata.bitmaps[ledger_id].to_array(), np.uint32) == entries).all()
        for ledger_id, entries in found
    ):
        corrupt(what, 0, f"the positions of the metadata, {sum(counts.values())}, each once", f"{len(times)}")


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
    for name, field in known_fields(data, _METADATA, within.begin, within.end, what=what):
        if name != "delayed_index_bit_map":
            numbers[name] = field.value
            continue
        ledger_id, bitmap = _decode_ledger(data, field, what)
        if ledger_id in bitmaps:
            corrupt(what, field.offset, "each ledger once", f"ledger {ledger_id} again")
        bitmaps[ledger_id] = bitmap
    times = "max_schedule_timestamp", "min_schedule_timestamp"
    check_required(numbers, times, "metadata_list", within.end, what=what)
    last, first = (numbers[name] for name in times)
    try:
        return SegmentMetadata(bitmaps, first, last, numbers.get(_CHECKSUM[0]))
    except ValueError as error:
        corrupt(what, within.offset, "metadata of a segment", error)


def _usual_ledger(data: bytes, within: Field, what: str) -> tuple[int, int, int] | None:
    """Return a ledger and the bounds of its bitmap, if the fields have the layout of every known writer; else None.

    A snapshot may have a hundred thousand, and decoding one field by field takes twice as long.
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
    found = dict(known_fields(data, _LEDGER, within.begin, within.end, what=what))
    check_required(found, ("key", "value"), "delayed_index_bit_map", within.end, what=what)
    return found["key"].value, found["value"].begin, found["value"].end


def _decode_ledger(data: bytes, within: Field, what: str) -> tuple[int, BitMap]:
    ledger_id, begin, end = _usual_ledger(data, within, what) or _any_ledger(data, within, what)
    try:
        return ledger_id, decode_bitmap(data[begin:end], begin)
    except CorruptStateError as fault:
        corrupt(what, fault.offset, fault.expected, fault.found)
