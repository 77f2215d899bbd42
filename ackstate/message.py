"""A message as a producer publishes it, and the bytes of its entry in the message log."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import partial
from operator import index as operator_index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, cast, final

from ackstate.checks import check_within
from ackstate.errors import corrupt
from ackstate.sealed import Reader
from ackstate.wire.native import check_text_properties, decode_text_properties, encode_text_properties

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NO_DELAY = -1

_PLAIN = struct.Struct("<qq")  # publish time, deliver at
_KEYED = struct.Struct("<8sqqIi")  # magic, publish time, deliver at, messages, bytes of the key
_PROPERTY_COUNT = struct.Struct("<I")
# Read as a publish time they would be negative, which none is.
_KEYED_MAGIC = b"ackmsg2\xff"
_PROPERTIES_MAGIC = b"ackmsg3\xff"
_LONG = (_KEYED_MAGIC, _PROPERTIES_MAGIC)
_NO_KEY = -1
_NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})
_TIME_MS_END = 2**63
_COUNT_END = 2**32
_KEY_BYTES_END = 2**31
_SHOWN_LENGTH = 60


class _Fields(NamedTuple):
    payload: bytes
    key: bytes | None
    deliver_at_ms: int
    publish_time_ms: int
    message_count: int
    properties: Mapping[str, str]


@final
class Message(_Fields):
    """One entry of the log, as a producer published it; it may be a batch of messages.

    >>> Message(b"two apples", key=b"fruit")
    Message(b'two apples', key=b'fruit')

    The fields are checked when the message is published.

    Attributes:
        payload: Opaque bytes.
        key: Messages of one key go to one consumer of a Key_Shared subscription, in order; None for no key.
        deliver_at_ms: The earliest time of delivery; `NO_DELAY` for at once.
        publish_time_ms: When it was published; 0 or more.
        message_count: How many messages the entry holds.
        properties: Name -> text, for the consumers: to be read, not changed.
    """

    __slots__ = ()

    def __new__(  # noqa: PLR0913 - its fields
        cls,
        payload: bytes,
        *,
        key: bytes | None = None,
        deliver_at_ms: int = NO_DELAY,
        publish_time_ms: int = 0,
        message_count: int = 1,
        properties: Mapping[str, str] = _NO_PROPERTIES,
    ) -> Message:
        """Return a message; any other argument than the payload is named."""
        if properties is not _NO_PROPERTIES:
            properties = MappingProxyType(dict(properties)) if properties else _NO_PROPERTIES
        return tuple.__new__(cls, (payload, key, deliver_at_ms, publish_time_ms, message_count, properties))

    def __repr__(self) -> str:
        fields = zip(self._fields[1:], self[1:], (None, NO_DELAY, 0, 1, _NO_PROPERTIES), strict=True)
        named = [f"{name}={_plain(value)!r}" for name, value, default in fields if value != default]
        return f"Message({', '.join([repr(self.payload), *named])})"

    def __hash__(self) -> int:
        return hash(self[:5])  # The properties are equal if they are to be equal, and cannot be hashed.

    def __reduce__(self) -> tuple[Any, ...]:
        named: dict[str, Any] = {name: _plain(value) for name, value in zip(self._fields[1:], self[1:], strict=True)}
        return partial(Message, **named), (self.payload,)


def _plain(value: object) -> object:
    """Return a value that can be pickled and shown."""
    return dict(value) if isinstance(value, Mapping) else value


@final
class CheckedMessages(tuple[Message, ...]):
    """Messages that can be stored. `checked_messages` makes them; any other caller has checked every field."""

    __slots__ = ()


def checked_messages(messages: Sequence[Message]) -> CheckedMessages:
    """Return messages that can be stored: a list of `Message`, each field of its type and in its range."""
    if type(messages) is CheckedMessages:
        return messages
    if isinstance(messages, Message):
        raise TypeError("messages must be a list of Message, got a single one: write publish([message])")
    if isinstance(messages, str | bytes | bytearray | memoryview) or not isinstance(messages, Iterable):
        raise TypeError(f"messages must be a list of Message, got {_shown(messages)}")
    checked = CheckedMessages(messages)
    for number, message in enumerate(checked):
        if not isinstance(message, Message):
            raise TypeError(f"messages[{number}] must be a Message, got {_shown(message)}")
        payload, key, deliver_at_ms, publish_time_ms, message_count, properties = message
        # Each publish comes through here, so the usual message costs no call.
        if not (
            type(publish_time_ms) is type(deliver_at_ms) is type(message_count) is int
            and type(payload) is bytes
            and (key is None or (type(key) is bytes and len(key) < _KEY_BYTES_END))
            and 0 <= publish_time_ms < _TIME_MS_END
            and -_TIME_MS_END <= deliver_at_ms < _TIME_MS_END
            and 1 <= message_count < _COUNT_END
            and properties is _NO_PROPERTIES
        ):
            _check_fields(message)
    return checked


def _check_fields(message: Message) -> None:
    payload, key, deliver_at_ms, publish_time_ms, message_count, properties = message
    for name, number, unit, least, end in (
        ("publish_time_ms", publish_time_ms, "milliseconds", 0, _TIME_MS_END),
        ("deliver_at_ms", deliver_at_ms, f"milliseconds, {NO_DELAY} for no delay", -_TIME_MS_END, _TIME_MS_END),
        ("message_count", message_count, "messages", 1, _COUNT_END),
    ):
        is_whole = isinstance(number, SupportsIndex) and not isinstance(number, bool)  # numpy's are
        check_within(name, operator_index(number) if is_whole else number, least=least, most=end - 1, unit=unit)
    _check_bytes("payload", payload)
    if key is not None:
        _check_bytes("key", key)
        if len(key) >= _KEY_BYTES_END:
            raise ValueError(f"key must have fewer than {_KEY_BYTES_END} bytes, got {len(key)}")
    if not isinstance(properties, Mapping):
        raise TypeError(f"properties must be a mapping of text to text, got {_shown(properties)}")
    check_text_properties(properties, called="message property")


def _check_bytes(name: str, value: object) -> None:
    if type(value) is not bytes:
        try:
            memoryview(cast("bytes", value))
        except TypeError:
            hint = "; encode the text first" if isinstance(value, str) else ""
            raise TypeError(f"{name} must be bytes, got {_shown(value)}{hint}") from None


def _shown(value: object) -> str:
    """Return a value as text, and not at length."""
    text = repr(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."


def encode_message(message: Message) -> bytes:
    """Return the entry of a message that was checked: with a longer header for a key, a batch or properties."""
    payload, key, deliver_at_ms, publish_time_ms, message_count, properties = message
    if key is None and message_count == 1 and not properties:
        return _PLAIN.pack(publish_time_ms, deliver_at_ms) + bytes(payload)
    key = None if key is None else bytes(key)  # A buffer may count its items otherwise.
    magic = _PROPERTIES_MAGIC if properties else _KEYED_MAGIC
    key_bytes = _NO_KEY if key is None else len(key)
    header = _KEYED.pack(magic, publish_time_ms, deliver_at_ms, message_count, key_bytes) + (key or b"")
    if properties:
        header += b"".join((_PROPERTY_COUNT.pack(len(properties)), *encode_text_properties(properties)))
    return header + bytes(payload)


def decode_messages(runs: Iterable[tuple[int, Iterable[bytes]]]) -> Iterator[Message]:
    """Yield the messages of entries; `CorruptStateError` for one that is no message."""
    new, unpack, plain_size = tuple.__new__, _PLAIN.unpack_from, _PLAIN.size
    unpack_keyed, keyed_size = _KEYED.unpack_from, _KEYED.size
    for ledger_id, entries in runs:
        for entry in entries:
            # Most are plain or have a key, and without a call and the constructor they take half the time.
            if not entry.startswith(_LONG) and len(entry) >= plain_size:
                publish_time_ms, deliver_at_ms = unpack(entry)
                payload = bytes(entry[plain_size:])
                yield new(Message, (payload, None, deliver_at_ms, publish_time_ms, 1, _NO_PROPERTIES))
                continue
            if entry.startswith(_KEYED_MAGIC) and len(entry) >= keyed_size:
                _, publish_time_ms, deliver_at_ms, message_count, key_bytes = unpack_keyed(entry)
                end = keyed_size + key_bytes
                if message_count and keyed_size <= end <= len(entry):
                    key, payload = bytes(entry[keyed_size:end]), bytes(entry[end:])
                    yield new(Message, (payload, key, deliver_at_ms, publish_time_ms, message_count, _NO_PROPERTIES))
                    continue
            yield _decode_long(entry, ledger_id)


def _decode_long(entry: bytes, ledger_id: int) -> Message:
    """Return the message of an entry with a longer header, or refuse one that is too short."""
    if len(entry) < _KEYED.size:
        _check_size(entry, _KEYED.size if entry.startswith(_LONG) else _PLAIN.size, ledger_id)
    magic, publish_time_ms, deliver_at_ms, message_count, key_bytes = _KEYED.unpack_from(entry)
    if key_bytes < _NO_KEY or not message_count:
        expected, found = "a number of messages above 0, and of bytes of the key", f"{message_count} and {key_bytes}"
        corrupt(f"message of ledger {ledger_id}", _PLAIN.size + len(_KEYED_MAGIC), expected, found)
    end = _KEYED.size + (key_bytes if key_bytes > 0 else 0)  # without a call
    if len(entry) < end:
        _check_size(entry, end, ledger_id)
    key = None if key_bytes == _NO_KEY else bytes(entry[_KEYED.size : end])
    properties = _NO_PROPERTIES
    if magic == _PROPERTIES_MAGIC:
        reader = Reader(entry, end, len(entry), f"message of ledger {ledger_id}")
        (count,) = _PROPERTY_COUNT.unpack(reader.take(_PROPERTY_COUNT.size, "the number of properties"))
        properties = MappingProxyType(dict(decode_text_properties(reader, count)))
        end = reader.offset
    payload = bytes(entry[end:])
    return tuple.__new__(Message, (payload, key, deliver_at_ms, publish_time_ms, message_count, properties))


def _check_size(entry: bytes, size: int, ledger_id: int) -> None:
    if len(entry) < size:
        corrupt(f"message of ledger {ledger_id}", len(entry), f"at least {size} bytes", f"{len(entry)} bytes")
