"""The entries of a message log: published messages are read again, and damage is named."""

from __future__ import annotations

import copy
import pickle
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import CorruptStateError, MemoryStore, Message, Position
from ackstate.topic import MessageLog

PLAIN = Message(b"hello", publish_time_ms=1_000)
KEYED = Message(b"hello", key=b"order-7", deliver_at_ms=2_000, publish_time_ms=1_000, message_count=3)
PROPERTIED = Message(b"hello", key=b"order-7", properties={"b": "two", "a": "one"}, message_count=3)
PROPERTIED_BYTES = (
    b"ackmsg3\xff"
    + bytes.fromhex("0000000000000000ffffffffffffffff0300000007000000")
    + b"order-7"
    + bytes.fromhex("02000000010003000000")
    + b"aone"
    + bytes.fromhex("010003000000")
    + b"btwohello"
)
PLAIN_BYTES = bytes.fromhex("e803000000000000ffffffffffffffff") + b"hello"
KEYED_BYTES = b"ackmsg2\xff" + bytes.fromhex("e803000000000000d0070000000000000300000007000000") + b"order-7hello"

messages = st.builds(
    Message,
    publish_time_ms=st.integers(0, 2**63 - 1),
    deliver_at_ms=st.integers(-(2**63), 2**63 - 1),
    payload=st.binary(max_size=40),
    key=st.none() | st.binary(max_size=10),
    message_count=st.integers(1, 2**32 - 1),
    properties=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)


def opened():
    store = MemoryStore()
    return store, MessageLog.open(store, topic="t")


@given(st.lists(messages, max_size=5))
def test_what_was_published_is_read_again(published):
    _, log = opened()
    positions = log.publish(published)
    assert list(log.read(positions)) == published


@pytest.mark.parametrize(
    ("message", "expected"), [(PLAIN, PLAIN_BYTES), (KEYED, KEYED_BYTES), (PROPERTIED, PROPERTIED_BYTES)]
)
def test_the_bytes_of_an_entry_stay_what_they_are(message, expected):
    store, log = opened()
    ((ledger_id, entry_id),) = log.publish([message])
    assert store.ledgers.read(ledger_id, entry_id, entry_id + 1) == [expected]


@pytest.mark.parametrize("entry", [PLAIN_BYTES, KEYED_BYTES, PROPERTIED_BYTES])
def test_a_cut_entry_is_corrupt_or_has_less_payload(entry):
    store, log = opened()
    ledger_id = log.ledgers.current_ledger_id
    for size in range(len(entry)):
        entry_id = store.ledgers.append(ledger_id, [entry[:size]])
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
    entry_id = store.ledgers.append(ledger_id, [entry])
    with pytest.raises(CorruptStateError, match=f"message of ledger {ledger_id}"):
        list(log.read([Position(ledger_id, entry_id)]))


@pytest.mark.parametrize(
    "refused",
    [
        Message(b"", publish_time_ms=-1),
        Message(b"", publish_time_ms=2**63),
        Message(b"", deliver_at_ms=2**63),
        Message(b"", deliver_at_ms=-(2**63) - 1),
        Message(b"", message_count=0),
        Message(b"", message_count=2**32),
    ],
)
def test_one_message_out_of_range_stores_none(refused):
    _, log = opened()
    with pytest.raises(ValueError, match=r"_ms must be in |message_count must be in "):
        log.publish([PLAIN, refused])
    assert log.ledgers.count_between(Position(0, -1), log.ledgers.last_confirmed) == 0


A_BUFFER = memoryview(array("I", [1, 2, 3, 4]))[::2]


@pytest.mark.parametrize(
    ("messages", "saying"),
    [
        (PLAIN, r"messages must be a list of Message, got a single one: write publish\(\[message\]\)"),
        (b"hello", "messages must be a list of Message, got b'hello'"),
        ([PLAIN, b"hello"], r"messages\[1\] must be a Message, got b'hello'"),
        ([tuple(PLAIN)], r"messages\[0\] must be a Message, got \(b'hello', None, "),
        ([PLAIN._replace(payload="hello")], "payload must be bytes, got 'hello'; encode the text first"),
        ([PLAIN._replace(payload="x" * 500)], "payload must be bytes, got 'x{59}[.]{3}; encode the text first"),
        ([PLAIN._replace(key="k")], "key must be bytes, got 'k'; encode the text first"),
        ([PLAIN._replace(publish_time_ms=1.0)], "publish_time_ms must be a whole number of milliseconds, got 1.0"),
        ([PLAIN._replace(publish_time_ms=True)], "publish_time_ms must be a whole number of milliseconds, got True"),
        (
            [PLAIN._replace(deliver_at_ms=None)],
            "deliver_at_ms must be a whole number of milliseconds, -1 for no delay, got None",
        ),
        ([PLAIN._replace(deliver_at_ms=False)], "deliver_at_ms must be a whole number .* got False"),
        ([PLAIN._replace(message_count=1.5)], "message_count must be a whole number of messages, got 1.5"),
    ],
)
def test_what_is_no_list_of_messages_stores_none(messages, saying):
    store, log = opened()
    before = store.mutation_count
    with pytest.raises(TypeError, match=f"^{saying}"):
        log.publish(messages)
    assert store.mutation_count == before


@pytest.mark.parametrize(
    ("published", "stored"),
    [
        (PLAIN._replace(payload=bytearray(b"hello")), PLAIN),
        (PLAIN._replace(payload=memoryview(b"hello")), PLAIN),
        (PLAIN._replace(payload=A_BUFFER, key=A_BUFFER), PLAIN._replace(payload=bytes(A_BUFFER), key=bytes(A_BUFFER))),
        (KEYED._replace(key=bytearray(b"order-7")), KEYED),
        (KEYED._replace(publish_time_ms=np.int64(1_000), message_count=np.uint8(3)), KEYED),
    ],
)
def test_buffers_and_numbers_of_numpy_are_stored_as_bytes_and_numbers(published, stored):
    _, log = opened()
    assert list(log.read(log.publish(iter([published])))) == [stored]


@pytest.mark.parametrize(
    ("named", "error", "saying"),
    [
        ({"topic": b"t"}, TypeError, "topic must be a str, got b't'"),
        ({"topic": ""}, ValueError, "topic must not be empty"),
        ({"topic": "a\ud800"}, ValueError, r"topic must be text that UTF-8 can encode, got .* U\+D800 at index 1"),
        ({"topic": "t", "entries_per_ledger_max": 0}, ValueError, "entries_per_ledger_max must be in 1"),
        ({"topic": "t", "entries_per_ledger_max": 1.5}, TypeError, "entries_per_ledger_max"),
    ],
)
def test_an_open_that_is_refused_takes_nothing_over(named, error, saying):
    store, log = opened()
    with pytest.raises(error, match=saying):
        MessageLog.open(store, **named)
    assert log.publish([PLAIN])


def test_a_single_position_is_no_list_of_positions():
    _, log = opened()
    (position,) = log.publish([PLAIN])
    with pytest.raises(TypeError, match="positions must be a list of Position, got a single one, 1:0"):
        list(log.read(position))


def test_properties_are_stored_by_name_and_cannot_be_changed():
    store, log = opened()
    given = {"origin": "orchard", "größe": "XL"}
    message = Message(b"apples", key=b"", properties=given)
    given.clear()
    ((ledger_id, entry_id),) = log.publish([message])
    (entry,) = store.ledgers.read(ledger_id, entry_id, entry_id + 1)
    assert entry.startswith(b"ackmsg3\xff")
    (read,) = log.read([Position(ledger_id, entry_id)])
    assert read == message
    assert dict(read.properties) == {"größe": "XL", "origin": "orchard"}
    with pytest.raises(TypeError):
        read.properties["origin"] = "shop"


@pytest.mark.parametrize("message", [PLAIN, KEYED, PROPERTIED])
def test_a_message_can_be_copied_pickled_hashed_and_shown(message):
    for duplicate in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert duplicate == message
        assert hash(duplicate) == hash(message)
        assert type(duplicate) is Message
    assert eval(repr(message)) == message


@pytest.mark.parametrize(
    ("properties", "error", "saying"),
    [
        ({"a": 1}, TypeError, "a message property must be a name and a text, got 'a': 1"),
        ({1: "a"}, TypeError, "a message property must be a name and a text, got 1: 'a'"),
        ({"a" * 70_000: ""}, ValueError, "message property 'aaaa.*' is too long"),
        ({"a": "\ud800"}, ValueError, "surrogates not allowed"),
    ],
)
def test_properties_that_cannot_be_stored_are_refused(properties, error, saying):
    _, log = opened()
    with pytest.raises(error, match=saying):
        log.publish([PLAIN, Message(b"", properties=properties)])
    assert log.ledgers.count_between(Position(0, -1), log.ledgers.last_confirmed) == 0
