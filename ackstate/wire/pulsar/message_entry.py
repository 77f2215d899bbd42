"""Reads when a message of a Pulsar topic was published, and when it is due, from its entry in the message log.

::

    [0x0e 0x02 | size, 4 bytes | broker's metadata]  [0x0e 0x01 | CRC-32C, 4 bytes]  size, 4 bytes | metadata | payload

Numbers are big-endian; the parts in brackets may be missing. The checksum is verified if the entry has it.

Source: ``Commands.parseMessageMetadata``, ``PulsarApi.proto`` of Apache Pulsar.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import google_crc32c

from ackstate.errors import corrupt
from ackstate.wire.pulsar.fields import fields_of

WHAT = "message entry"
_BROKER_METADATA, _CHECKSUM = b"\x0e\x02", b"\x0e\x01"
_NUMBER = struct.Struct(">I")
_PUBLISH_TIME, _BATCH_SIZE, _DELIVER_AT = 3, 11, 19


class MessageTimes(NamedTuple):
    """Fields of an entry's metadata."""

    publish_time_ms: int  # in milliseconds since 1970
    deliver_at_ms: int  # the earliest time of its delivery; 0 for at once
    message_count: int


def decode_message_times(entry: bytes) -> MessageTimes:
    """Decode the metadata of an entry; `CorruptStateError` if it is none, or does not match its checksum."""
    at = 0
    if entry.startswith(_BROKER_METADATA):
        at += len(_BROKER_METADATA)
        at += _NUMBER.size + _number(entry, at)
    if entry.startswith(_CHECKSUM, at):
        at += len(_CHECKSUM)
        expected = _number(entry, at)
        at += _NUMBER.size
        found = google_crc32c.value(entry[at:])
        if found != expected:
            corrupt(WHAT, at, f"bytes with the checksum {expected:#010x}", hex(found))
    size = _number(entry, at)
    at += _NUMBER.size
    if size > len(entry) - at:
        corrupt(WHAT, at, f"{size} bytes of metadata", f"{len(entry) - at}")
    numbers = {field.number: field.signed for field in fields_of(entry, at, at + size, what=WHAT)}
    return MessageTimes(
        max(0, numbers.get(_PUBLISH_TIME, 0)), max(0, numbers.get(_DELIVER_AT, 0)), max(1, numbers.get(_BATCH_SIZE, 1))
    )


def _number(entry: bytes, at: int) -> int:
    if at + _NUMBER.size > len(entry):
        corrupt(WHAT, len(entry), "a number of 4 bytes", "the end")
    return int(_NUMBER.unpack_from(entry, at)[0])
