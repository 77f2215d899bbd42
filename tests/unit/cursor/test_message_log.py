"""The entries of a message log: published messages are read again, and damage is named."""

import copy
import pickle

import pytest
from hypothesis import strategies as st

from ackstate import LogFencedError, MemoryStore, Message, Position
from ackstate.topic import MessageLog
from ackstate.topic.log import log_path

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


@pytest.mark.parametrize(
    ("message", "expected"), [(PLAIN, PLAIN_BYTES), (KEYED, KEYED_BYTES), (PROPERTIED, PROPERTIED_BYTES)]
)
def test_the_bytes_of_an_entry_stay_what_they_are(message, expected):
    store, log = opened()
    ((ledger_id, entry_id),) = log.publish([message])
    assert store.ledgers.read(ledger_id, entry_id, entry_id + 1) == [expected]


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
    ("name", "end"), [("publish_time_ms", 2**63), ("deliver_at_ms", 2**63), ("message_count", 2**32)]
)
def test_a_number_that_its_field_cannot_hold_is_refused(name, end):
    _, log = opened()
    assert log.publish([PLAIN._replace(**{name: end - 1})])
    with pytest.raises(ValueError, match=f"{name} must be in .* got {end}"):
        log.publish([PLAIN._replace(**{name: end})])


def test_a_single_position_is_no_list_of_positions():
    _, log = opened()
    (position,) = log.publish([PLAIN])
    with pytest.raises(TypeError, match="positions must be a list of Position, got a single one, 1:0"):
        list(log.read(position))


def test_who_loses_the_record_of_the_log_while_a_ledger_begins_deletes_no_message(monkeypatch):
    store = MemoryStore()
    log = MessageLog.open(store, topic="t", entries_per_ledger_max=1)
    (position,) = log.publish([PLAIN])

    def lost_meanwhile(owner, create=store.ledgers.create):
        store.metadata.delete(log_path("t"), expected_version=store.metadata.get(log_path("t")).version)
        return create(owner)

    with monkeypatch.context() as patched:
        patched.setattr(store.ledgers, "create", lost_meanwhile)
        with pytest.raises(LogFencedError):
            log.publish([KEYED])
    assert list(MessageLog.open(store, topic="t").read([position])) == [PLAIN]


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
