"""The frames of the example broker are read as they were written; test_hostile_bytes.py has other bytes."""

import asyncio
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import NO_DELAY, Message
from examples.broker.errors import ProtocolError
from examples.broker.framing import (
    MESSAGE_BYTES_MAX,
    decode_frame,
    decode_metadata,
    encode_frame,
    message_of,
    read_frame,
)
from examples.broker.pulsar_api_pb2 import MessageMetadata

ROOT = Path(__file__).parents[3]


def entry_of(payload=b"payload", *, has_checksum=True, **fields):
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=7, **fields).SerializeToString()
    content = len(metadata).to_bytes(4) + metadata + payload
    checksum = b"\x0e\x01" + google_crc32c.value(content).to_bytes(4)
    return checksum * has_checksum + content


def test_the_bytes_of_a_frame():
    frame = encode_frame("send", b"entry", producer_id=1, sequence_id=2)
    assert frame == bytes.fromhex("00000011 00000008 0806 3204 0801 1002") + b"entry"
    assert encode_frame("pong") == bytes.fromhex("00000009 00000005 0813 9a0100")


@given(st.binary(max_size=20), st.lists(st.integers(-1, 2**63 - 1)), st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_a_frame_comes_back(entry, ids, words):
    message_ids = [{"ledger_id": number, "entry_id": number, "ack_set": words} for number in ids]
    frame = decode_frame(encode_frame("ack", entry, consumer_id=2**64 - 1, type=0, message_id=message_ids)[4:])
    assert (frame.name, frame.entry, frame.command.consumer_id) == ("ack", entry, 2**64 - 1)
    assert [(each.ledger_id, list(each.ack_set)) for each in frame.command.message_id] == [(id_, words) for id_ in ids]


def test_an_unknown_command_and_a_known_one_with_fields_that_this_broker_lacks():
    assert decode_frame(bytes.fromhex("00000005 0844 a20400")).name == ""
    assert decode_frame(bytes.fromhex("0000000a 080b 5a06 0801 1002 1803")).command.permits == 2
    with pytest.raises(ProtocolError, match=r"lacks flow\.permits"):
        decode_frame(bytes.fromhex("00000006 080b 5a02 0801"))


def test_a_frame_that_is_too_large_is_not_read():
    async def read(data):
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader)

    assert asyncio.run(read(encode_frame("ping"))).name == "ping"
    with pytest.raises(ProtocolError, match="at most"):
        asyncio.run(read(b"\x16\x03\x01\x02 as TLS begins"))
    with pytest.raises(asyncio.IncompleteReadError):
        asyncio.run(read((MESSAGE_BYTES_MAX + 100).to_bytes(4) + b"cut short"))


def test_the_message_of_an_entry():
    for fields, expected in (
        ({}, {}),
        ({"num_messages_in_batch": 3}, {"message_count": 3}),
        ({"partition_key": "ä"}, {"key": "ä".encode()}),
        ({"partition_key": "/w==", "partition_key_b64_encoded": True}, {"key": b"\xff"}),
        ({"partition_key": "a", "ordering_key": b"\xff"}, {"key": b"\xff"}),
        ({"deliver_at_time": 12}, {"deliver_at_ms": 12}),
        ({"deliver_at_time": -3}, {"deliver_at_ms": NO_DELAY}),
    ):
        for has_checksum in (True, False):
            entry = entry_of(has_checksum=has_checksum, **fields)
            assert message_of(entry, decode_metadata(entry)) == Message(entry, publish_time_ms=7, **expected)
    for wrong in ({"num_messages_in_batch": 0}, {"partition_key": "a", "partition_key_b64_encoded": True}):
        with pytest.raises(ProtocolError):
            message_of(b"", decode_metadata(entry_of(**wrong)))
