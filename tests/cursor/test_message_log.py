"""The entries of a message log: what was published is read again, and damage is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import CorruptStateError, Position
from cursor import MemoryStore, Message, MessageLog
from cursor.message_log import NO_DELAY

PLAIN = Message(1_000, NO_DELAY, b"hello")
KEYED = Message(1_000, 2_000, b"hello", b"order-7", 3)
PLAIN_BYTES = bytes.fromhex("e803000000000000ffffffffffffffff") + b"hello"
KEYED_BYTES = b"ackmsg2\xff" + bytes.fromhex("e803000000000000d0070000000000000300000007000000") + b"order-7hello"

messages = st.builds(
    Message,
    publish_time_ms=st.integers(0, 2**63 - 1),
    deliver_at_ms=st.integers(-(2**63), 2**63 - 1),
    payload=st.binary(max_size=40),
    key=st.none() | st.binary(max_size=10),
    message_count=st.integers(1, 2**32 - 1),
)


def opened():
    store = MemoryStore()
    return store, MessageLog.open(store, topic="t")


@given(st.lists(messages, max_size=5))
def test_what_was_published_is_read_again(published):
    _, log = opened()
    positions = log.publish(published)
    assert list(log.read(positions)) == published


@pytest.mark.parametrize(("message", "expected"), [(PLAIN, PLAIN_BYTES), (KEYED, KEYED_BYTES)])
def test_the_bytes_of_an_entry_stay_what_they_are(message, expected):
    store, log = opened()
    ((ledger_id, entry_id),) = log.publish([message])
    assert store.ledgers.read(ledger_id, entry_id, entry_id + 1) == [expected]


def test_an_empty_key_is_a_key():
    _, log = opened()
    (position,) = log.publish([Message(0, NO_DELAY, b"", b"")])
    assert next(log.read([position])).key == b""


@pytest.mark.parametrize("entry", [PLAIN_BYTES, KEYED_BYTES])
def test_a_cut_entry_is_corrupt_or_has_less_payload(entry):
    store, log = opened()
    ledger_id = log.ledgers.current_ledger_id
    for size in range(len(entry)):
        entry_id = store.ledgers.append(ledger_id, entry[:size])
        try:
            (read,) = log.read([Position(ledger_id, entry_id)])
        except CorruptStateError as error:
            assert f"ledger {ledger_id}" in str(error)  # noqa: PT017 - some cuts are not damage
        else:
            assert b"hello".startswith(read.payload)
            assert size >= len(entry) - len(b"hello")


@pytest.mark.parametrize(
    ("offset", "damage"), [(24, bytes(4)), (28, b"\xfe\xff\xff\xff"), (28, b"\xff\xff\xff\x7f"), (28, b"\x0d\0\0\0")]
)
def test_a_damaged_header_is_named(offset, damage):
    store, log = opened()
    ledger_id = log.ledgers.current_ledger_id
    entry = KEYED_BYTES[:offset] + damage + KEYED_BYTES[offset + len(damage) :]
    entry_id = store.ledgers.append(ledger_id, entry)
    with pytest.raises(CorruptStateError, match=f"message of ledger {ledger_id}"):
        list(log.read([Position(ledger_id, entry_id)]))


@pytest.mark.parametrize(
    "refused",
    [
        Message(-1, NO_DELAY, b""),
        Message(2**63, NO_DELAY, b""),
        Message(0, 2**63, b""),
        Message(0, -(2**63) - 1, b""),
        Message(0, NO_DELAY, b"", None, 0),
        Message(0, NO_DELAY, b"", None, 2**32),
    ],
)
def test_one_message_out_of_range_stores_none(refused):
    _, log = opened()
    with pytest.raises(ValueError, match=r"_ms must be in |message_count must be in "):
        log.publish([PLAIN, refused])
    assert log.ledgers.count_between(Position(0, -1), log.ledgers.last_confirmed) == 0
