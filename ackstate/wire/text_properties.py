"""Properties, name -> text, as the native formats hold them: sorted by name, each with the lengths of both."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ackstate.wire.native_reader import corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ackstate.wire.native_reader import Reader

_LENGTHS = struct.Struct("<HI")  # of the name and of the text, in bytes
_NAME_BYTES_MAX = 0xFFFF
_TEXT_BYTES_MAX = 2**20


def check_properties_fit(properties: Mapping[str, str], *, called: str) -> None:
    """Refuse properties that cannot be stored.

    Raises:
        TypeError: A name or a text is not text.
        ValueError: One is too long, or not UTF-8.
    """
    for name, text in properties.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"a {called} must be a name and a text, got {name!r}: {text!r}")
        if len(name.encode()) > _NAME_BYTES_MAX or len(text.encode()) > _TEXT_BYTES_MAX:
            raise ValueError(f"{called} {name[:40]!r} is too long")


def encode_text_properties(properties: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the bytes of each property, by name."""
    for name, text in sorted(properties.items()):
        encoded_name, encoded_text = name.encode(), text.encode()
        yield _LENGTHS.pack(len(encoded_name), len(encoded_text)) + encoded_name + encoded_text


def decode_text_properties(reader: Reader, count: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each property.

    Raises:
        CorruptStateError: The bytes are not those of as many properties.
    """
    previous = None
    for _ in range(count):
        at = reader.offset
        name_bytes, text_bytes = _LENGTHS.unpack(reader.take(_LENGTHS.size, "property header"))
        encoded = reader.take(name_bytes, "property name"), reader.take(text_bytes, "property text")
        try:
            name, text = (piece.decode() for piece in encoded)
        except UnicodeDecodeError as error:
            corrupt(at, "a property in UTF-8", str(error), what=reader.what)
        if previous is not None and name <= previous:
            corrupt(at, f"a property name above {previous!r}", repr(name), what=reader.what)
        previous = name
        yield name, text
