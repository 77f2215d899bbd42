"""Reads the fields of a protobuf message one by one; the caller skips those that it does not know.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ackstate.errors import CorruptStateError
from ackstate.wire.pulsar.strict_fields import Wire, read_varint

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIXED_BYTES = {Wire.FIXED64: 8, Wire.FIXED32: 4}


class LooseField(NamedTuple):
    """One field in some bytes.

    Attributes:
        number: Its number in the schema.
        begin: Start of its content, after the tag and the length.
        end: End of its content (exclusive).
        value: Its value as a signed 64-bit number; 0 if it is not a varint.
    """

    number: int
    begin: int
    end: int
    value: int


def loose_fields(data: bytes, begin: int, end: int, *, what: str) -> Iterator[LooseField]:
    """Yield the fields of a message, from `begin` (inclusive) to `end` (exclusive), in order.

    Args:
        data: The bytes that contain the message.
        begin: Start of the message.
        end: End of the message; at most the length of `data`.
        what: The name of the record, for errors.

    Raises:
        CorruptStateError: The bytes are not a message, or hold a group; the fields before the error were yielded.
    """
    at = begin
    while at < end:
        offset = at
        tag, at = read_varint(data, at, end, what)
        number, wire = tag >> 3, tag & 7
        value, content = 0, at
        if wire == Wire.VARINT:
            value, at = read_varint(data, at, end, what)
            value -= (value >> 63) << 64
        elif wire == Wire.BYTES:
            size, content = read_varint(data, at, end, what)
            at = content + size
        elif wire in _FIXED_BYTES:
            at += _FIXED_BYTES[Wire(wire)]
        else:
            raise CorruptStateError(what, offset=offset, expected="a field", found=f"wire type {wire}")
        if number == 0 or at > end:
            raise CorruptStateError(
                what, offset=offset, expected=f"a field that ends by byte {end}", found=f"field {number} to {at}"
            )
        yield LooseField(number, content, at, value)
