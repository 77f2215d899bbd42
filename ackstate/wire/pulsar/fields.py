"""Reads protobuf messages field by field, each with its place, and lists of numbers many at a time.

The protobuf runtime reports that a record is corrupt, but not where: `locate` walks over it once more, only then, since
that costs about a microsecond a field.
Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ackstate.deleted_ranges import varint_bytes
from ackstate.errors import CorruptStateError, UnsupportedVersionError, corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


Int64s = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_DEPTH_MAX = 100
_VARINT_BYTES_MAX = 10
_TAG_BYTES_MAX = 5
_FIELD_NUMBERS = range(1, 2**29)


class Wire(IntEnum):
    """The framing of a field's content."""

    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    GROUP = 3
    GROUP_END = 4
    FIXED32 = 5


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
    """Yield the fields from `begin` to `end` (exclusive), a group as one, up to an error: `CorruptStateError`."""
    at = begin
    while at < end:
        offset = at
        number, wire, at = _read_tag(data, at, end, what)
        value, start = 0, at
        if wire == Wire.VARINT:
            value, at = read_varint(data, at, end, what)
        elif wire == Wire.GROUP:
            at = _group_end(data, number, at, end, what)
        elif wire == Wire.GROUP_END:
            corrupt(what, offset, "a field", "the end of a group that did not begin")
        else:
            start, at = _extent(data, wire, at, end, what)
            value = int.from_bytes(data[start:at], "little") if wire == Wire.FIXED32 else 0
        yield Field(number, wire, offset, start, at, value)


def _read_tag(data: bytes, at: int, end: int, what: str) -> tuple[int, int, int]:
    tag, after = read_varint(data, at, end, what, _TAG_BYTES_MAX)
    number, wire = tag >> 3, tag & 7
    if number not in _FIELD_NUMBERS or wire > Wire.FIXED32:
        corrupt(what, at, "a field", f"number {number} of wire type {wire}")
    return number, wire, after


def _extent(data: bytes, wire: int, at: int, end: int, what: str) -> tuple[int, int]:
    """Return the begin and end of content that is not a varint, given the end of its tag."""
    size, start = (8 if wire == Wire.FIXED64 else 4), at
    if wire == Wire.BYTES:
        size, start = read_varint(data, at, end, what, _TAG_BYTES_MAX)
    if size > end - start:
        corrupt(what, at, f"at most {end - start} bytes", size)
    return start, start + size


def _group_end(data: bytes, number: int, at: int, end: int, what: str) -> int:
    """Return the end of a group, including nested groups, given the end of its first tag."""
    opened = [number]
    while opened:
        offset = at
        number, wire, at = _read_tag(data, at, end, what)
        if wire == Wire.GROUP:
            opened.append(number)
            if len(opened) > _DEPTH_MAX:
                corrupt(what, offset, f"at most {_DEPTH_MAX} groups within another", "one more")
        elif wire == Wire.GROUP_END:
            if opened.pop() != number:
                corrupt(what, offset, "the end of the group that began last", f"the end of group {number}")
        elif wire == Wire.VARINT:
            _, at = read_varint(data, at, end, what)
        else:
            _, at = _extent(data, wire, at, end, what)
    return at


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


class InvalidRecordError(Exception):
    """Element `index` of a record's field has an impossible value; the whole record if `field` is None. Internal."""

    def __init__(self, field: str | None, index: int = 0, *, expected: object = None, found: object = None) -> None:
        super().__init__(field, index, expected, found)
        self.field = field
        self.index = index
        self.expected = expected
        self.found = found


def locate(data: bytes, schema: Any, refused: InvalidRecordError, *, what: str) -> CorruptStateError:
    """Convert a refusal into an error with the offset, given the record's protobuf descriptor."""
    offset = 0
    try:
        if refused.field is None:
            _check_message(data, schema, [(0, len(data))], what)
        else:
            offset = _element_offset(data, schema, refused.field, refused.index, what)
    except CorruptStateError as fault:
        return fault
    return CorruptStateError(what, offset=offset, expected=refused.expected, found=refused.found)


def _element_offset(data: bytes, schema: Any, name: str, index: int, what: str) -> int:
    """Return the offset of the index-th element of a field, or of its last element if it has fewer."""
    offset = 0
    for field in fields_of(data, 0, len(data), what=what):
        known = schema.fields_by_number.get(field.number)
        if known is not None and known.name == name and _fits(known, field.wire):
            offset = field.offset
            if index == 0:
                break
            index -= 1
    return offset


def _check_message(data: bytes, schema: Any, spans: Sequence[tuple[int, int]], what: str) -> None:
    """Refuse a message; a message that is not repeated, but comes several times, is the concatenation of its parts."""
    found: dict[int, list[tuple[int, int]]] = {}
    for begin, end in spans:
        for field in fields_of(data, begin, end, what=what):
            known = schema.fields_by_number.get(field.number)
            if known is None or not _fits(known, field.wire):
                continue
            if known.is_required:
                found.setdefault(field.number, [])
            if known.type == known.TYPE_STRING:
                _check_text(data, known.name, field, what)
            elif known.message_type is None:
                at = field.begin
                while field.wire == Wire.BYTES and at < field.end:  # packed
                    _, at = read_varint(data, at, field.end, what)
            elif known.is_required:
                found[field.number].append((field.begin, field.end))
            else:
                _check_message(data, known.message_type, [(field.begin, field.end)], what)
    end = spans[-1][1]
    for known in schema.fields:
        if known.is_required and known.number not in found:
            corrupt(what, end, f"field {known.number} ({known.name}) of a {schema.name}", "the end of it")
        if known.is_required and known.message_type is not None:
            _check_message(data, known.message_type, found[known.number], what)


def _check_text(data: bytes, name: str, field: Field, what: str) -> None:
    text = data[field.begin : field.end]
    try:
        text.decode()
    except UnicodeDecodeError as error:
        corrupt(what, field.begin + error.start, f"{name} in UTF-8", f"{text[error.start]:#04x}")


def _fits(known: Any, wire: int) -> bool:
    """Return whether a field can have a wire type; if not, it counts as unknown."""
    if known.type != known.TYPE_INT64:
        return wire == Wire.BYTES
    return wire == Wire.VARINT or (wire == Wire.BYTES and bool(known.is_repeated))


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
