"""Locates the first error in a record by a strict walk over protobuf's wire format, byte by byte.

The protobuf runtime reports that bytes are corrupt, but not where. This walk finds the offset, and runs only after a
refusal, because it costs about a microsecond a field. It stores only single numbers of the fields that it visits.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ackstate.errors import CorruptStateError
from ackstate.wire.pulsar.strict_fields import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DEPTH_MAX = 100
_VARINT_BYTES_MAX = 10
_TAG_BYTES_MAX = 5


class FieldKind(Enum):
    """The content of a field that is not a message."""

    INT = "int"
    INTS = "ints"
    TEXT = "text"


class FieldSchema(NamedTuple):
    """One field of a message in the schema."""

    name: str
    kind: FieldKind | MessageSchema
    required: bool = True


class MessageSchema(NamedTuple):
    """A message: field number -> field."""

    name: str
    fields: Mapping[int, FieldSchema]


def _schema(name: str, *fields: FieldSchema) -> MessageSchema:
    """Number the fields from 1."""
    return MessageSchema(name, dict(enumerate(fields, 1)))


_POSITION = _schema("position", FieldSchema("ledger_id", FieldKind.INT), FieldSchema("entry_id", FieldKind.INT))
_RANGE = _schema("range", FieldSchema("lower_endpoint", _POSITION), FieldSchema("upper_endpoint", _POSITION))
_RANGES = FieldSchema("individual_deleted_messages", _RANGE, required=False)
_LONG_PROPERTY = _schema("property", FieldSchema("name", FieldKind.TEXT), FieldSchema("value", FieldKind.INT))
_PROPERTIES = FieldSchema("properties", _LONG_PROPERTY, required=False)
_STRING_PROPERTY = _schema("cursor property", FieldSchema("name", FieldKind.TEXT), FieldSchema("value", FieldKind.TEXT))
_BATCH_INDEXES = _schema(
    "batch index", FieldSchema("position", _POSITION), FieldSchema("delete_set", FieldKind.INTS, required=False)
)
_BATCH = FieldSchema("batched_entry_deletion_index_info", _BATCH_INDEXES, required=False)
_IDLE_SINCE = FieldSchema("idle_since", FieldKind.INT, required=False)
_WORDS = _schema("words", FieldSchema("key", FieldKind.INT), FieldSchema("values", FieldKind.INTS, required=False))

POSITION_INFO = _schema(
    "position info",
    FieldSchema("ledger_id", FieldKind.INT),
    FieldSchema("entry_id", FieldKind.INT),
    _RANGES,
    _PROPERTIES,
    _BATCH,
    FieldSchema("individual_deleted_message_ranges", _WORDS, required=False),
    _IDLE_SINCE,
)
CURSOR_INFO = _schema(
    "cursor info",
    FieldSchema("cursors_ledger_id", FieldKind.INT),
    FieldSchema("mark_delete_ledger_id", FieldKind.INT, required=False),
    FieldSchema("mark_delete_entry_id", FieldKind.INT, required=False),
    _RANGES,
    _PROPERTIES,
    FieldSchema("last_active", FieldKind.INT, required=False),
    _BATCH,
    FieldSchema("cursor_properties", _STRING_PROPERTY, required=False),
    _IDLE_SINCE,
)
COMPRESSION_METADATA = _schema(
    "compression metadata",
    FieldSchema("compression_type", FieldKind.INT),
    FieldSchema("uncompressed_size", FieldKind.INT),
)


class InvalidRecordError(Exception):
    """Internal to this package: a record has an impossible value.

    Args:
        field: Name of the field of the record; None if the bytes are not a record at all.
        index: Index of the element of the field, counted from 0.
        expected: The expected content.
        found: The actual content.
    """

    def __init__(self, field: str | None, index: int = 0, *, expected: object = None, found: object = None) -> None:
        super().__init__(field, index, expected, found)
        self.field = field
        self.index = index
        self.expected = expected
        self.found = found


class Found(NamedTuple):
    """The single fields of one message: name -> offset and value. If a field is repeated, the last one counts."""

    values: dict[str, tuple[int, int | Found]]

    def number(self, name: str) -> int:
        """Return a required number."""
        value = self.values[name][1]
        assert isinstance(value, int)
        return value

    def offset(self, name: str) -> int:
        """Return the offset of a required field."""
        return self.values[name][0]


class _Token(NamedTuple):
    number: int
    wire: int
    offset: int
    begin: int  # of the content, after the tag and the length
    end: int


def locate(data: bytes, schema: MessageSchema, refused: InvalidRecordError) -> CorruptStateError:
    """Convert a refusal into an error with the offset.

    Complexity: O(len(data)), in Python.
    """
    scanner = Scanner(data, schema.name)
    offset, expected, found = 0, refused.expected, refused.found
    try:
        if refused.field is None:
            scanner.message(schema, 0, len(data))
        else:
            offset = scanner.element_offset(schema, refused.field, refused.index)
    except CorruptStateError as fault:
        return fault
    return CorruptStateError(schema.name, offset=offset, expected=expected, found=found)


class Scanner:
    """Walks over a record's bytes and raises `CorruptStateError` at the first invalid one."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data = data
        self.what = what

    def message(self, schema: MessageSchema, begin: int, end: int) -> Found:
        """Walk over one message, from `begin` up to and without `end`, and return its single fields."""
        found = Found({})
        self._read(schema, begin, end, found)
        self._check_required(schema, found, end)
        return found

    def element_offset(self, schema: MessageSchema, name: str, index: int) -> int:
        """Return the offset of the index-th element of a field, or of its last element if it has fewer."""
        offset = 0
        for token in self._tokens(0, len(self.data)):
            field = schema.fields.get(token.number)
            if field is not None and field.name == name and _fits(field.kind, token.wire):
                offset = token.offset
                if index == 0:
                    break
                index -= 1
        return offset

    def _read(self, schema: MessageSchema, begin: int, end: int, found: Found) -> None:
        for token in self._tokens(begin, end):
            field = schema.fields.get(token.number)
            if field is None or not _fits(field.kind, token.wire):
                continue
            if isinstance(field.kind, MessageSchema):
                self._read_message(field, field.kind, token, found)
            elif field.kind is FieldKind.INT:
                found.values[field.name] = (token.offset, self._int(token))
            elif field.kind is FieldKind.TEXT:
                self._check_text(field, token)
                found.values[field.name] = (token.offset, 0)
            elif token.wire == Wire.BYTES:
                self._check_packed(token)

    def _read_message(self, field: FieldSchema, schema: MessageSchema, token: _Token, found: Found) -> None:
        if not field.required:
            self.message(schema, token.begin, token.end)
            return
        # A repeated single message is merged: fields missing in the second come from the first.
        _, merged = found.values.setdefault(field.name, (token.offset, Found({})))
        assert isinstance(merged, Found)
        self._read(schema, token.begin, token.end, merged)

    def _check_required(self, schema: MessageSchema, found: Found, end: int) -> None:
        for number, field in schema.fields.items():
            if field.required and field.name not in found.values:
                self._refuse(end, f"field {number} ({field.name}) of a {schema.name}", "the end of it")
            if field.required and isinstance(field.kind, MessageSchema):
                _, inner = found.values[field.name]
                assert isinstance(inner, Found)
                self._check_required(field.kind, inner, end)

    def _check_text(self, field: FieldSchema, token: _Token) -> None:
        text = self.data[token.begin : token.end]
        try:
            text.decode()
        except UnicodeDecodeError as error:
            self._refuse(token.begin + error.start, f"{field.name} in UTF-8", f"{text[error.start]:#04x}")

    def _check_packed(self, token: _Token) -> None:
        at = token.begin
        while at < token.end:
            _, at = self._varint(at, token.end)

    def _int(self, token: _Token) -> int:
        number, _ = self._varint(token.begin, token.end)
        number &= 2**64 - 1
        return number - 2**64 if number >> 63 else number

    def _tokens(self, begin: int, end: int) -> Iterator[_Token]:
        """Yield every field of one message."""
        at = begin
        while at < end:
            offset = at
            number, wire, at = self._tag(at, end)
            if wire == Wire.GROUP:
                start, at = at, self._group_end(number, at, end)
            elif wire == Wire.GROUP_END:
                self._refuse(offset, "a field", "the end of a group that did not begin")
            else:
                start, at = self._extent(wire, at, end)
            yield _Token(number, wire, offset, start, at)

    def _tag(self, at: int, end: int) -> tuple[int, int, int]:
        tag, after = self._varint(at, end, size_max=_TAG_BYTES_MAX)
        number, wire = tag >> 3, tag & 7
        if not 1 <= number < 2**29 or wire > Wire.FIXED32:
            self._refuse(at, "a field", f"number {number} of wire type {wire}")
        return number, wire, after

    def _extent(self, wire: int, at: int, end: int) -> tuple[int, int]:
        """Return the begin and end of a field's content, given the end of its tag."""
        if wire == Wire.VARINT:
            return at, self._varint(at, end)[1]
        size, start = (8 if wire == Wire.FIXED64 else 4), at
        if wire == Wire.BYTES:
            size, start = self._varint(at, end, size_max=_TAG_BYTES_MAX)
        if size > end - start:
            self._refuse(at, f"at most {end - start} bytes", size)
        return start, start + size

    def _group_end(self, number: int, at: int, end: int) -> int:
        """Return the end of a group, including nested groups, given the end of its first tag."""
        opened = [number]
        while opened:
            offset = at
            number, wire, at = self._tag(at, end)
            if wire == Wire.GROUP:
                opened.append(number)
                if len(opened) > _DEPTH_MAX:
                    self._refuse(offset, f"at most {_DEPTH_MAX} groups within another", "one more")
            elif wire == Wire.GROUP_END:
                if opened.pop() != number:
                    self._refuse(offset, "the end of the group that began last", f"the end of group {number}")
            else:
                _, at = self._extent(wire, at, end)
        return at

    def _varint(self, at: int, end: int, *, size_max: int = _VARINT_BYTES_MAX) -> tuple[int, int]:
        number = 0
        for index, byte in enumerate(self.data[at : min(at + size_max, end)]):
            number |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                return number, at + index + 1
        expected = f"a varint of at most {size_max} bytes"
        return self._refuse(at, expected, "the end" if end - at < size_max else "a longer one")

    def _refuse(self, offset: int, expected: object, found: object) -> NoReturn:
        raise CorruptStateError(self.what, offset=offset, expected=expected, found=found)


def _fits(kind: FieldKind | MessageSchema, wire: int) -> bool:
    """Return whether a field of a kind can have a wire type; if not, it counts as unknown."""
    if kind is FieldKind.INT:
        return wire == Wire.VARINT
    return wire == Wire.BYTES or (kind is FieldKind.INTS and wire == Wire.VARINT)
