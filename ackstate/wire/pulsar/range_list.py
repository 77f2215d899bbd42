"""Encodes and decodes ranges as a list of protobuf ``MessageRange``, a column at a time.

One element ::

    tag, length                     field 3 or 4 of the record
    0x0a, length                    lower endpoint, open
    0x08, ledger
    0x10, first - 1                 ten bytes for -1
    0x12, length                    upper endpoint, closed
    0x08, ledger
    0x10, last

The numbers are varints, all else is one byte each. Elements whose numbers have the same lengths are rows of a byte
matrix that differ in few columns. Positions rise, so a list consists of only a few blocks of such rows.

Source: ``MLDataFormats.proto`` of Apache Pulsar, messages ``MessageRange`` and ``NestedPositionInfo``.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ackstate.entry_bitmap import runs_of
from ackstate.record_size import varint_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ackstate.deleted_ranges import DeletedRanges

Int64s = NDArray[np.int64]
_UInt32s = NDArray[np.uint32]
_Bytes = NDArray[np.uint8]

_LEDGER_SIZE_MAX = 9
_ENTRY_SIZES = range(1, 6)
_MINUS_ONE = b"\xff" * 9 + b"\x01"
_MINUS_ONE_UNSIGNED = 2**32 - 1  # the result of 0 - 1 in unsigned arithmetic; never a valid entry before another
_LONGER_FROM = np.array([2**digits for digits in (7, 14, 21, 28)], np.uint32)
# A block is processed in steps: a short block costs little to find, and the tables stay in the cache.
_ROWS_MIN, _ROWS_MAX = 32, 4_096
# Up to this many ranges of a ledger are written one by one.
_FEW = 8


class RangeRows(NamedTuple):
    """Ranges as columns: ``(lower_ledger:lower_entry .. upper_ledger:upper_entry]``, in the order of the record."""

    lower_ledger: Int64s
    lower_entry: Int64s
    upper_ledger: Int64s
    upper_entry: Int64s

    @classmethod
    def joined(cls, parts: Iterable[RangeRows]) -> RangeRows:
        """Return the concatenated rows of the parts."""
        joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return cls(*(joined or [np.empty(0, np.int64)] * 4))


class _ElementSizes(NamedTuple):
    """The sizes of the numbers of an element, in bytes."""

    ledger: int
    lower: int
    upper: int


class _ElementLayout(NamedTuple):
    """The common layout of all elements whose numbers have the same sizes.

    Attributes:
        row: The element, with all digits 0.
        mask: The bits of the element that are not digits.
        ledgers: The places of the two ledger ids.
        lower: The place of the entry id of the lower end.
        upper: The place of the entry id of the upper end.
    """

    row: bytes
    mask: bytes
    ledgers: tuple[slice, slice]
    lower: slice
    upper: slice


def varint(number: int) -> bytes:
    """Encode a non-negative number as a varint."""
    size = varint_bytes(number)
    return bytes((number >> 7 * index) & 0x7F | (0x80 if index < size - 1 else 0) for index in range(size))


def encode_range_list(deleted: DeletedRanges, *, tag: int) -> list[bytes | bytearray]:
    """Encode every range as an element of a repeated field.

    Args:
        deleted: The ranges, which take `record_bytes` bytes.
        tag: The field's one-byte tag.

    Returns:
        The bytes in pieces, to be joined with those of the record's other fields.

    Complexity: O(ranges); less than 50 ns for each, and a few us for each ledger and each change of a varint's length.
    """
    parts: list[bytes | bytearray] = []
    for ledger_id, bitmap in deleted.bitmaps():
        begins, ends = runs_of(bitmap)
        if len(begins) <= _FEW:
            ledger = varint(ledger_id)
            parts.extend(_element(tag, ledger, *each) for each in zip(begins.tolist(), ends.tolist(), strict=True))
            continue
        lowers = begins - np.uint32(1)
        for begin, end in pairwise(_cuts(begins, lowers, ends)):
            parts.append(_encode_stretch(tag, ledger_id, lowers[begin:end], ends[begin:end]))
    return parts


def decode_range_list(data: bytes, begin: int, *, tag: int) -> tuple[RangeRows, int]:
    """Decode the elements from `begin` on, as long as they have the layout of `encode_range_list`.

    Complexity: O(ranges); less than 50 ns for each, and a few us for each change of a varint's length.
    """
    parts = []
    while (sizes := _sizes_at(data, begin)) is not None:
        rows, size = _decode_stretch(data, begin, tag, sizes)
        if not size:
            break
        parts.extend(rows)
        begin += size
    return RangeRows.joined(parts), begin


@lru_cache(maxsize=512)
def _layout(tag: int, sizes: _ElementSizes) -> _ElementLayout:
    ledger, lower, upper = sizes
    size = 10 + 2 * ledger + lower + upper
    begin = bytes([tag, size - 2, 0x0A, 2 + ledger + lower, 0x08])
    middle = bytes([0x12, 2 + ledger + upper, 0x08])
    is_minus_one = lower == len(_MINUS_ONE)
    row = [begin, _zero(ledger), b"\x10", _MINUS_ONE if is_minus_one else _zero(lower)]
    row += [middle, _zero(ledger), b"\x10", _zero(upper)]
    mask = [b"\xff" * 5, b"\x80" * ledger, b"\xff", (b"\xff" if is_minus_one else b"\x80") * lower]
    mask += [b"\xff" * 3, b"\x80" * ledger, b"\xff", b"\x80" * upper]
    ledgers = slice(5, 5 + ledger), slice(size - 1 - upper - ledger, size - 1 - upper)
    lower_at = 6 + ledger
    return _ElementLayout(
        b"".join(row), b"".join(mask), ledgers, slice(lower_at, lower_at + lower), slice(size - upper, size)
    )


def _zero(size: int) -> bytes:
    """Return 0 as a varint padded to a size: each byte except the last has the continuation bit."""
    return b"\x80" * (size - 1) + b"\0"


def _element(tag: int, ledger: bytes, first: int, last: int) -> bytes:
    """Encode one range with inclusive ends, given its ledger id as a varint."""
    lower = b"\x08" + ledger + b"\x10" + (varint(first - 1) if first else _MINUS_ONE)
    upper = b"\x08" + ledger + b"\x10" + varint(last)
    size = 4 + len(lower) + len(upper)
    return bytes((tag, size, 0x0A, len(lower))) + lower + bytes((0x12, len(upper))) + upper


def _cuts(begins: _UInt32s, lowers: _UInt32s, uppers: _UInt32s) -> list[int]:
    """Return the starts of blocks of ranges whose numbers have the same sizes, and the end of the last block."""
    count, from_zero = len(begins), int(begins[0] == 0)  # The lower end of a range from 0 on is -1.
    cuts = {0, from_zero, count, *range(_ROWS_MAX, count, _ROWS_MAX)}
    cuts.update((np.searchsorted(lowers[from_zero:], _LONGER_FROM) + from_zero).tolist())
    cuts.update(np.searchsorted(uppers, _LONGER_FROM).tolist())
    return sorted(cuts)


def _encode_stretch(tag: int, ledger_id: int, lowers: _UInt32s, uppers: _UInt32s) -> bytearray:
    """Encode ranges of one ledger whose numbers all have the same sizes."""
    lower = int(lowers[0])
    lower_size = len(_MINUS_ONE) if lower == _MINUS_ONE_UNSIGNED else varint_bytes(lower)
    layout = _layout(tag, _ElementSizes(varint_bytes(ledger_id), lower_size, varint_bytes(int(uppers[0]))))
    row = bytearray(layout.row)
    row[layout.ledgers[0]] = row[layout.ledgers[1]] = varint(ledger_id)
    record = row * len(lowers)
    columns = np.frombuffer(record, np.uint8).reshape(len(lowers), -1).T
    if lower != _MINUS_ONE_UNSIGNED:
        _put_varints(columns[layout.lower], lowers)
    _put_varints(columns[layout.upper], uppers)
    return record


def _put_varints(columns: _Bytes, numbers: _UInt32s) -> None:
    for index, column in enumerate(columns):
        digits = (numbers >> numbers.dtype.type(7 * index)).astype(np.uint8)
        column[:] = digits if index == len(columns) - 1 else digits | 0x80


def _sizes_at(data: bytes, at: int) -> _ElementSizes | None:
    """Return the sizes of the element at `at`, or None if there is no element."""
    if len(data) - at < 14:
        return None
    ledger = 1
    while ledger < _LEDGER_SIZE_MAX and at + 4 + ledger < len(data) and data[at + 4 + ledger] >= 0x80:
        ledger += 1
    lower = data[at + 3] - 2 - ledger
    upper = data[at + 1] + 2 - (10 + 2 * ledger + lower)
    usual = (lower in _ENTRY_SIZES or lower == len(_MINUS_ONE)) and upper in _ENTRY_SIZES
    return _ElementSizes(ledger, lower, upper) if usual else None


def _decode_stretch(data: bytes, begin: int, tag: int, sizes: _ElementSizes) -> tuple[list[RangeRows], int]:
    """Decode the elements from `begin` on that have the same layout; return them and their size in bytes."""
    layout = _layout(tag, sizes)
    size = len(layout.row)
    parts, at, step = [], begin, _ROWS_MIN
    while count := min(step, (len(data) - at) // size):
        piece = np.frombuffer(data, np.uint8, count * size, at)
        alike = _count_alike(piece, layout, count)
        if alike:
            parts.append(_take_rows(piece[: alike * size].reshape(alike, size).T, layout, sizes))
            at += alike * size
        if alike < count:
            break
        step = min(8 * step, _ROWS_MAX)
    return parts, at - begin


def _count_alike(piece: _Bytes, layout: _ElementLayout, count: int) -> int:
    fixed = piece & np.frombuffer(layout.mask * count, np.uint8)
    differs = fixed != np.frombuffer(layout.row * count, np.uint8)
    first = int(differs.argmax())
    return first // len(layout.row) if differs[first] else count


def _take_rows(columns: _Bytes, layout: _ElementLayout, sizes: _ElementSizes) -> RangeRows:
    lower_ledger, upper_ledger = (_take_varints(columns[ledger]) for ledger in layout.ledgers)
    if sizes.lower == len(_MINUS_ONE):
        lower_entry = np.full(columns.shape[1], -1, np.int64)
    else:
        lower_entry = _take_varints(columns[layout.lower])
    return RangeRows(lower_ledger, lower_entry, upper_ledger, _take_varints(columns[layout.upper]))


def _take_varints(columns: _Bytes) -> Int64s:
    numbers = np.zeros(columns.shape[1], np.int64)
    for index, column in enumerate(columns):
        numbers |= (column & 0x7F).astype(np.int64) << 7 * index
    return numbers
