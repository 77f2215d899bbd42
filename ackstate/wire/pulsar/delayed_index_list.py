"""Encodes and decodes delayed messages as a list of protobuf ``DelayedIndex``, a column at a time.

One element ::

    0x0a, length
    0x08, timestamp
    0x10, ledger
    0x18, entry

The numbers are varints and all else is one byte below 0x80: a list is a sequence of varints, eight per element.

Source: ``DelayedMessageIndexBucketSegment.proto`` of Apache Pulsar, messages ``SnapshotSegment`` and ``DelayedIndex``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX
from ackstate.properties import LONG_MAX
from ackstate.record_size import varint_bytes
from ackstate.wire.pulsar.strict_fields import Schema, Wire, check_required, fields_of, numbers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

Int64s = NDArray[np.int64]
_Bytes = NDArray[np.uint8]
_Bools = NDArray[np.bool_]

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

# A block of this many rows stays in the cache while its columns are processed.
_STRETCH_ROWS = 8_192
_STRETCH_BYTES = 2**17
_INDEX_TAG, _NUMBER_TAGS = 0x0A, (0x08, 0x10, 0x18)
_VARINTS = 8
_NUMBERS = (3, 5, 7)  # the indexes of the numbers among an element's varints
_FIXED_BYTES = 5
# The last bytes of an element's varints, the first varint lowest: the values and places of the tags.
_LAYOUT = np.uint64(0x00_18_00_10_00_08_00_0A)
_LAYOUT_MASK = np.uint64(0x00_FF_00_FF_00_FF_00_FF)
_NUMBER_BYTES_MAX = 9  # of a number below 2**63


class DelayedIndexes(NamedTuple):
    """Delayed messages as parallel arrays of one length.

    Attributes:
        deliver_at_ms: Due time of each, ms since 1970, 0 to 2**63 - 1.
        ledger_ids: Message ledger of each, 0 to 2**63 - 1.
        entry_ids: Entry in that ledger, 0 to 2**32 - 1.
    """

    deliver_at_ms: Int64s
    ledger_ids: Int64s
    entry_ids: Int64s


class _VarintSizes(NamedTuple):
    """The sizes of numbers as varints: the size of each number, the least and the most."""

    each: Int64s
    least: int
    most: int


def encode_index_list(indexes: DelayedIndexes) -> bytes:
    """Encode delayed messages in the given order; their numbers must be in range.

    Complexity: O(messages), about 100 ns for each.
    """
    cuts = range(0, len(indexes.entry_ids), _STRETCH_ROWS)
    stretches = [DelayedIndexes(*(column[cut : cut + _STRETCH_ROWS] for column in indexes)) for cut in cuts]
    return b"".join(map(_encode_stretch, stretches))


def decode_index_list(data: bytes, *, what: str) -> DelayedIndexes:
    """Decode delayed messages; their numbers are in range, their order is not checked.

    Raises:
        CorruptStateError: The bytes are not such a list.
        UnsupportedVersionError: An element has an unknown field, or requests another operation than a delay.

    Complexity: O(len(data)), about 100 ns a message for the layout of `encode_index_list`, microseconds for other
    layouts.
    """
    indexes = _decode_plain(data)
    if indexes is None:
        rows = (numbers for _, numbers in _walk(data, what))
        indexes = DelayedIndexes(*np.fromiter(rows, np.dtype((np.int64, 3))).T)
    return indexes


def offset_of(data: bytes, row: int, *, what: str) -> int:
    """Return the offset of an element in a valid list; elements count from 0."""
    return next(offset for number, (offset, _) in enumerate(_walk(data, what)) if number == row)


def _encode_stretch(indexes: DelayedIndexes) -> bytes:
    sizes = [*map(_sizes, indexes)]
    matrix = np.empty((len(indexes.entry_ids), _FIXED_BYTES + sum(size.most for size in sizes)), np.uint8)
    kept = np.ones(matrix.shape, np.bool_)
    matrix[:, 0] = _INDEX_TAG
    matrix[:, 1] = sum(size.each for size in sizes) + (_FIXED_BYTES - 2)
    at = 2
    for tag, numbers, size in zip(_NUMBER_TAGS, indexes, sizes, strict=True):
        matrix[:, at] = tag
        _put_varints(matrix.T[at + 1 : at + 1 + size.most], kept.T[at + 1 :], numbers, size)
        at += 1 + size.most
    is_even = all(size.least == size.most for size in sizes)
    return matrix.tobytes() if is_even else matrix[kept].tobytes()


def _sizes(numbers: Int64s) -> _VarintSizes:
    least, most = varint_bytes(int(numbers.min())), varint_bytes(int(numbers.max()))
    each = np.full(len(numbers), least)
    for size in range(least, most):
        each += numbers >= 1 << 7 * size
    return _VarintSizes(each, least, most)


def _put_varints(columns: _Bytes, kept: _Bools, numbers: Int64s, sizes: _VarintSizes) -> None:
    """Write numbers into columns, one per byte, and mark in `kept` the bytes that a number does not have."""
    for index, column in enumerate(columns):
        digits = (numbers >> 7 * index).astype(np.uint8) & 0x7F
        if index + 1 < sizes.least:
            digits |= 0x80
        elif index + 1 < sizes.most:
            digits |= (sizes.each > index + 1).view(np.uint8) << 7
        column[:] = digits
        if index >= sizes.least:
            kept[index] = sizes.each > index


def _decode_plain(data: bytes) -> DelayedIndexes | None:
    """Decode a list with the layout of `encode_index_list`; return None for any other."""
    buffer = np.frombuffer(data, np.uint8)
    parts: list[list[Int64s]] = [[np.empty(0, np.int64)] * 3]
    at = 0
    while at < len(buffer):
        columns, size = _decode_stretch(buffer[at : at + _STRETCH_BYTES])
        if not size:
            return None
        parts.append(columns)
        at += size
    return DelayedIndexes(*map(np.concatenate, zip(*parts, strict=True)))


def _decode_stretch(buffer: _Bytes) -> tuple[list[Int64s], int]:
    """Decode all elements that end in a block of a list; return their columns, and their size in bytes.

    The size is 0 if an element does not have the layout of `encode_index_list`, or an entry id is out of range.
    """
    ends = np.flatnonzero(buffer < 0x80)
    count = len(ends) // _VARINTS
    if not count:
        return [], 0
    ends = ends[: count * _VARINTS]
    lasts = buffer.take(ends)
    rows = np.ascontiguousarray(ends.reshape(-1, _VARINTS).T)
    sizes = [rows[number] - rows[number - 1] for number in _NUMBERS]
    row_sizes = np.diff(rows[-1], prepend=-1)
    # Each of the five other varints takes at least one byte, so a total of five means one byte each.
    is_plain = (row_sizes - sum(sizes) == _FIXED_BYTES) & (lasts[1::_VARINTS] + np.int64(2) == row_sizes)
    is_plain &= lasts.view("<u8") & _LAYOUT_MASK == _LAYOUT
    if not is_plain.all() or max(map(np.max, sizes)) > _NUMBER_BYTES_MAX:
        return [], 0
    columns = [_take_varints(buffer, rows[at - 1] + 1, size) for at, size in zip(_NUMBERS, sizes, strict=True)]
    return (columns, int(rows[-1, -1]) + 1) if columns[-1].max() <= ENTRY_ID_MAX else ([], 0)


def _take_varints(buffer: _Bytes, begins: Int64s, sizes: Int64s) -> Int64s:
    least, most = int(sizes.min()), int(sizes.max())
    numbers = np.zeros(len(begins), np.int64)
    for index in range(most):
        digits = buffer.take(begins + index, mode="clip") & 0x7F
        if index >= least:
            digits *= sizes > index
        numbers |= digits.astype(np.int64) << 7 * index
    return numbers


def _walk(data: bytes, what: str) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield the offset of each element, and its three numbers."""
    for element in fields_of(data, _SEGMENT, 0, len(data), what=what):
        found = numbers_of(data, _INDEX, element, what=what)
        check_required(found, tuple(_MOST), element, what=what)
        operation = found.pop("delayed_operation_type", _DELAY)
        if operation != _DELAY:
            raise UnsupportedVersionError(f"{what}: operation {operation} at byte {element.offset} is unknown")
        for name, most in _MOST.items():
            if found[name] > most:
                expected = f"{name} of at most {most}"
                raise CorruptStateError(what, offset=element.offset, expected=expected, found=found[name])
        yield element.offset, (found["timestamp"], found["ledger_id"], found["entry_id"])
