"""Reads and writes the frames of Pulsar's binary protocol, and the entries that they carry.

frame   total size u32, command size u32, command (`BaseCommand`); then, of SEND and MESSAGE, an entry
entry   [magic 0x0e01, CRC-32C u32 of the rest,] metadata size u32, metadata (`MessageMetadata`), payload

All numbers are big-endian; a size does not count itself. The broker stores an entry as it came and sends it as it is
stored, so that a client checks the checksum of another client, and batches and compression are the clients' own matter.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import google_crc32c
from google.protobuf.message import DecodeError

from ackstate import NO_DELAY, Message
from examples.broker.errors import ChecksumError, ProtocolError
from examples.broker.pulsar_api_pb2 import BaseCommand, MessageMetadata

if TYPE_CHECKING:
    import asyncio

    from google.protobuf.message import Message as ProtobufMessage

MESSAGE_BYTES_MAX = 5 * 1024 * 1024
_FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + 64 * 1024  # A command and the metadata are not counted as the message.
_SIZE_BYTES = 4
_CHECKSUM_MAGIC = b"\x0e\x01"
_CHECKSUMMED_FROM = len(_CHECKSUM_MAGIC) + _SIZE_BYTES

_Decoded = TypeVar("_Decoded", bound="ProtobufMessage")


class CommandFrame(NamedTuple):
    """A command and its entry.

    Attributes:
        name: The name of the command's field in `BaseCommand`; empty for a command that is not in `pulsar_api.proto`.
        command: The command itself.
        entry: The bytes after the command.
    """

    name: str
    command: Any
    entry: bytes


async def read_frame(reader: asyncio.StreamReader) -> CommandFrame:
    """Read the next frame.

    Raises:
        ProtocolError: It is too large, or is not a frame.
        IncompleteReadError, ConnectionError: The connection has ended.
    """
    size = int.from_bytes(await reader.readexactly(_SIZE_BYTES))
    if size > _FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame must have at most {_FRAME_BYTES_MAX} bytes, got {size}")
    return decode_frame(await reader.readexactly(size))


def decode_frame(data: bytes) -> CommandFrame:
    """Decode a frame, given without its total size.

    Raises:
        ProtocolError: It is not a frame.
    """
    data, entry = _split(data)
    command = _decode(BaseCommand, data)
    name = command.WhichOneof("body") or ""
    return CommandFrame(name, getattr(command, name) if name else command, entry)


def encode_frame(name: str, entry: bytes = b"", **fields: object) -> bytes:
    """Return the frame of a command: its name in `BaseCommand`, and its fields."""
    number = BaseCommand.DESCRIPTOR.fields_by_name[name].number
    command = BaseCommand(type=number, **{name: fields}).SerializeToString()
    sizes = (_SIZE_BYTES + len(command) + len(entry), len(command))
    return b"".join([*(size.to_bytes(_SIZE_BYTES) for size in sizes), command, entry])


def decode_metadata(entry: bytes) -> MessageMetadata:
    """Check an entry against its checksum, if it has one, and return its metadata.

    Raises:
        ChecksumError: The entry was damaged on its way.
        ProtocolError: It is not an entry.
    """
    start = 0
    if entry.startswith(_CHECKSUM_MAGIC):
        start = _CHECKSUMMED_FROM
        if google_crc32c.value(entry[start:]) != int.from_bytes(entry[len(_CHECKSUM_MAGIC) : start]):
            raise ChecksumError("the entry does not match its checksum")
    return _decode(MessageMetadata, _split(entry[start:])[0])


def message_of(entry: bytes, metadata: MessageMetadata) -> Message:
    """Return the message to be stored: the whole entry is its payload.

    Raises:
        ProtocolError: A field of the metadata is out of range.
    """
    if metadata.num_messages_in_batch < 1 or metadata.publish_time >= 2**63:
        raise ProtocolError("the metadata of an entry have a field out of range")
    return Message(
        payload=entry,
        key=_key(metadata),
        deliver_at_ms=metadata.deliver_at_time if metadata.deliver_at_time > 0 else NO_DELAY,
        publish_time_ms=metadata.publish_time,
        message_count=metadata.num_messages_in_batch,
    )


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Return the bytes whose number comes first, and those that follow them."""
    end = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES])
    if end > len(data):
        raise ProtocolError(f"{end} bytes are announced, and {len(data)} came")
    return data[_SIZE_BYTES:end], data[end:]


def _decode(kind: type[_Decoded], data: bytes) -> _Decoded:
    try:
        decoded = kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"a {kind.DESCRIPTOR.name} cannot be decoded: {error}") from error
    if not decoded.IsInitialized():
        raise ProtocolError(f"a {kind.DESCRIPTOR.name} lacks {', '.join(decoded.FindInitializationErrors())}")
    _check_text(decoded)
    return decoded


def _check_text(message: ProtobufMessage) -> None:
    """Refuse text that is not UTF-8: the runtime returns it as bytes."""
    for field, value in message.ListFields():
        for each in value if field.is_repeated else (value,):
            if field.type == field.TYPE_MESSAGE:
                _check_text(each)
            elif field.type == field.TYPE_STRING and not isinstance(each, str):
                raise ProtocolError(f"{field.full_name} must be UTF-8, got {each!r}")


def _key(metadata: MessageMetadata) -> bytes | None:
    """Return the key that Key_Shared goes by; a batch has that of its messages if the producer batches by key."""
    if metadata.HasField("ordering_key"):
        return metadata.ordering_key
    if not metadata.HasField("partition_key"):
        return None
    key = metadata.partition_key.encode()
    if metadata.partition_key_b64_encoded:
        try:
            return base64.b64decode(key, validate=True)
        except binascii.Error as error:
            raise ProtocolError(f"the key of a message is not base64: {error}") from error
    return key
