"""Reads protobuf messages field by field, each with its place, and reads and writes rows of numbers many at a time.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ackstate.deleted_ranges import varint_bytes
from ackstate.errors import UnsupportedVersionError, corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


Int64s = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_VARINT_BYTES_MAX = 10
_TAG_BYTES_MAX = 5
_UINT32_BYTES_MIN = 5  # shorter varints have less than 32 bits
_FIELD_NUMBERS = range(1, 2**29)


class Wire(IntEnum):
    """The framing of a field's content; groups (3 and 4) are not read, since no message of Pulsar has one."""

    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    FIXED32 = 5


_WIRES = frozenset(Wire)


class Field(NamedTuple):
    """One field in some bytes."""

    number: int  # in the schema
    wire: int  # its framing
    offset: int  # start of its tag
    begin: int  # start of its content, after the tag and the length
    end: int  # of its content, exclusive
    value: int  # of a varint or of 32 bits, unsigned, of up to 70 bits; else 0

    @property
    def signed(self) -> int:
        """The value as a signed 64-bit number."""
        return ((self.value & 2**64 - 1) ^ 2**63) - 2**63


def varint(number: int) -> bytes:
    """Encode a non-negative number as a varint."""
    size = varint_bytes(number)
    return bytes((number >> 7 * index) & 0x7F | (0x80 if index < size - 1 else 0) for index in range(size))


def read_varint(data: bytes, at: int, end: int, what: str, size_max: int = _VARINT_BYTES_MAX) -> tuple[int, int]:
    """Return the varint at an offset, and its end; `CorruptStateError` if it does not end before `end`."""
    if at < end and data[at] < 0x80:
        return data[at], at + 1
    number = 0
    for index, byte in enumerate(data[at : min(at + size_max, end)]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, at + index + 1
    found = "the end" if end - at < size_max else "a longer one"
    return corrupt(what, at, f"a varint of at most {size_max} bytes", found)


def fields_of(data: bytes, begin: int, end: int, *, what: str) -> Iterator[Field]:
    """Yield the fields from `begin` to `end` (exclusive), up to an error: `CorruptStateError`."""
    at = begin
    while at < end:
        offset = at
        tag, at = read_varint(data, at, end, what, _TAG_BYTES_MAX)
        number, wire = tag >> 3, tag & 7
        if number not in _FIELD_NUMBERS or wire not in _WIRES:
            corrupt(what, offset, "a field", f"number {number} of wire type {wire}")
        value, start = 0, at
        if wire == Wire.VARINT:
            value, at = read_varint(data, at, end, what)
        else:
            size = 8 if wire == Wire.FIXED64 else 4
            if wire == Wire.BYTES:
                size, start = read_varint(data, at, end, what, _TAG_BYTES_MAX)
            if size > end - start:
                corrupt(what, at, f"at most {end - start} bytes", size)
            at = start + size
            value = int.from_bytes(data[start:at], "little") if wire == Wire.FIXED32 else 0
        yield Field(number, wire, offset, start, at, value)


class Schema(NamedTuple):
    """A message whose unknown fields could change the meaning of others: the names and framing of its fields."""

    name: str
    fields: Mapping[int, tuple[str, Wire]]


def known_fields(data: bytes, schema: Schema, begin: int, end: int, *, what: str) -> Iterator[tuple[str, Field]]:
    """Yield the fields as `fields_of`, with their names; `UnsupportedVersionError` for one not in the schema."""
    for field in fields_of(data, begin, end, what=what):
        if field.number not in schema.fields:
            raise UnsupportedVersionError(
                f"{what}: field {field.number} of {schema.name} at byte {field.offset} is unknown"
            )
        name, wire = schema.fields[field.number]
        if field.wire != wire:
            corrupt(what, field.offset, f"{name} as wire type {wire}", field.wire)
        yield name, field


def check_required(found: Mapping[str, object], names: Sequence[str], within: str, end: int, *, what: str) -> None:
    """Raise `CorruptStateError` if a name is missing among the fields of a message, which ends at an offset."""
    for name in names:
        if name not in found:
            corrupt(what, end, name, f"the end of {within}")


@final
class RowLayout:
    """Elements of a repeated message whose varints come in a fixed order: tags, lengths and numbers."""

    def __init__(
        self,
        tags: Sequence[int | None],  # at each place; None for a length or a number
        lengths: Sequence[tuple[int, int]],  # the place of each, and how many varints behind it it covers
        numbers: Sequence[int],  # their places; all else takes one byte
        *,
        bytes_max: int,  # of the longest number: 9 for one below 2**63, 10 for any of 64 bits
    ) -> None:
        self.bits = bytes(tag or 0 for tag in tags)
        self.mask = bytes(0 if tag is None else 0xFF for tag in tags)
        self.lengths = lengths
        self.numbers = numbers
        self.bytes_max = bytes_max


# A block of this many bytes stays in the cache while its columns are processed.
_BLOCK_BYTES = 2**17


def decode_rows(data: bytes, begin: int, layout: RowLayout) -> tuple[list[Int64s], int]:
    """Decode the elements from an offset on that have a layout, as columns of numbers; return them and the end."""
    buffer = np.frombuffer(data, np.uint8)
    parts: list[list[Int64s]] = [[np.empty(0, np.int64)] * len(layout.numbers)]
    at, is_whole = begin, True
    while is_whole and at < len(buffer):
        columns, size, is_whole = _decode_block(buffer[at : at + _BLOCK_BYTES], layout)
        parts.append(columns)
        at += size
        is_whole = is_whole and size > 0
    return [np.concatenate(column) for column in zip(*parts, strict=True)], at


def _decode_block(block: Bytes, layout: RowLayout) -> tuple[list[Int64s], int, bool]:
    """Decode the elements that end in a block; return their columns, their size, and whether all have the layout."""
    per_row = len(layout.bits)
    ends = np.flatnonzero(block < 0x80)
    count = len(ends) // per_row
    ends = ends[: count * per_row]
    lasts = block.take(ends)
    # One comparison of contiguous bytes; the row of the first that differs.
    differs = lasts & np.frombuffer(layout.mask * count, np.uint8) != np.frombuffer(layout.bits * count, np.uint8)
    alike = int(differs.argmax()) // per_row if differs.any() else count
    rows = np.ascontiguousarray(ends.reshape(count, per_row).T)
    sizes = [rows[place] - rows[place - 1] for place in layout.numbers]
    # Each of the other varints takes at least one byte, so a total of as many bytes as there are means one byte each.
    is_odd = np.diff(rows[-1], prepend=-1) - sum(sizes) != per_row - len(sizes)
    for place, covered in layout.lengths:
        is_odd |= lasts[place::per_row] != rows[place + covered] - rows[place]
    for size in sizes:
        is_odd |= size > layout.bytes_max
    alike = min(alike, int(is_odd.argmax())) if is_odd.any() else alike
    is_whole, count = alike == count, alike
    if not count:
        return [np.empty(0, np.int64)] * len(sizes), 0, is_whole
    columns = [
        _take_varints(block, rows[place - 1, :count] + 1, size[:count])
        for place, size in zip(layout.numbers, sizes, strict=True)
    ]
    return columns, int(rows[-1, count - 1]) + 1, is_whole


def _take_varints(block: Bytes, begins: Int64s, sizes: Int64s) -> Int64s:
    least, most = int(sizes.min()), int(sizes.max())
    numbers = (block.take(begins) & 0x7F).astype(np.int64)
    for index in range(1, most):
        if index < least:
            numbers |= (block.take(begins + index) & 0x7F).astype(np.int64) << 7 * index
        else:
            longer = np.flatnonzero(sizes > index)
            numbers[longer] |= (block.take(begins[longer] + index) & 0x7F).astype(np.int64) << 7 * index
    return numbers


# As many rows of a matrix stay in the cache.
_STRETCH_ROWS = 4_096
# Stretches of fewer rows take longer than a mask over long ones.
_EVEN_ROWS_MIN = 64


def encode_rows(columns: Sequence[Int64s | int], layout: RowLayout) -> list[bytes | bytearray]:
    """Return the pieces of elements, at least one, as `decode_rows` reads them.

    There is a column for each number of an element, at least one; instead of some, the number that all rows have.
    """
    of_place = dict(zip(layout.numbers, columns, strict=True))
    fixed = {place: varint(number) for place, number in of_place.items() if isinstance(number, int)}
    numbers = {place: column for place, column in of_place.items() if not isinstance(column, int)}
    sizes = np.array([*map(_sizes, numbers.values())])
    count = sizes.shape[1]
    cuts = {*range(0, count, _STRETCH_ROWS), count}
    changes = np.flatnonzero((sizes[:, 1:] != sizes[:, :-1]).any(axis=0)) + 1
    if len(changes) * _EVEN_ROWS_MIN <= count:
        cuts.update(changes.tolist())
    return [
        _encode_stretch(
            {place: column[begin:end] for place, column in numbers.items()}, sizes[:, begin:end], fixed, layout
        )
        for begin, end in pairwise(sorted(cuts))
    ]


def _encode_stretch(
    numbers: dict[int, Int64s], sizes: Bytes, fixed: dict[int, bytes], layout: RowLayout
) -> bytes | bytearray:
    """Encode rows as a matrix: each number takes as many columns as the longest of its place, less what is left out."""
    least, most = sizes.min(axis=1).tolist(), sizes.max(axis=1).tolist()
    at = {place: index for index, place in enumerate(numbers)}
    covered = dict(layout.lengths)
    row = bytearray()  # the first one, but for the columns that differ
    columns: dict[int, Bytes] = {}
    kept: dict[int, NDArray[np.bool_]] = {}  # the rows of a column that are not left out
    for place, bits in enumerate(layout.bits):
        if place in covered:
            behind = range(place + 1, place + 1 + covered[place])
            among = [at[each] for each in behind if each in at]
            rest = sum(len(fixed.get(each, b"1")) for each in behind if each not in at)
            if least != most:
                columns[len(row)] = sizes[among].sum(axis=0, dtype=np.uint8) + np.uint8(rest)
            row.append(sum(most[each] for each in among) + rest)
        elif place not in at:
            row += fixed.get(place, bytes((bits,)))
        else:
            size, shortest, longest = sizes[at[place]], least[at[place]], most[at[place]]
            column = numbers[place].view(np.uint64)
            column = column.astype(np.uint32) if longest < _UINT32_BYTES_MIN else column
            for index in range(longest):
                digits = (column >> column.dtype.type(7 * index)).astype(np.uint8)
                if index + 1 < shortest:
                    digits |= 0x80
                elif shortest < longest:
                    digits = digits & 0x7F | (size > index + 1).astype(np.uint8) << 7
                if index >= shortest:
                    kept[len(row)] = size > index
                columns[len(row)] = digits
                row.append(0)
    encoded: bytearray = row * len(sizes[0])
    matrix: Bytes = np.frombuffer(encoded, np.uint8).reshape(-1, len(row))
    for index, content in columns.items():
        matrix[:, index] = content
    if not kept:
        return encoded
    mask = np.ones(matrix.shape, np.bool_)
    for index, is_kept in kept.items():
        mask[:, index] = is_kept
    left: bytes = matrix[mask].tobytes()
    return left


def _sizes(numbers: Int64s) -> Bytes:
    """Return the size of each number as a varint."""
    lowest, highest = int(numbers.min()), int(numbers.max())
    least = varint_bytes(max(lowest, 0))
    each = np.full(len(numbers), least, np.uint8)
    for size in range(least, varint_bytes(max(highest, 0))):
        each += numbers >= 1 << 7 * size
    if lowest < 0:
        each[numbers < 0] = _VARINT_BYTES_MAX
    return each
