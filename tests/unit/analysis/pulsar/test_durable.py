"""What is durable of a cluster's cursors, read from its nodes and cursor ledgers in memory."""

import pytest

from ackstate import CorruptStateError, CursorConfig, Format, ManagedCursor, Position
from ackstate.analysis.pulsar import durable
from ackstate.analysis.pulsar.durable import CursorGoneError, DurableReader
from ackstate.errors import AckStateError
from ackstate.ledger_map import LedgerMap
from ackstate.stores.base import StoreError
from ackstate.wire.pulsar import CursorInfo, encode_cursor_info
from pulsar_nodes import CURSOR_RECORD, NODE, TOPIC, layout_of, new_nodes

LOG = {0: 50, 7: 50}
LOG_RECORD = b"\n\x04\x08\x00 \x32\n\x04\x08\x07 \x00"  # its two ledgers, of which the second is open


@pytest.fixture
def nodes():
    found = new_nodes()
    found.set(NODE, LOG_RECORD)
    return found


@pytest.fixture
def reader(nodes):
    with DurableReader("", open_store=lambda: layout_of(nodes)) as opened:
        yield opened


def opened(nodes, name="s", **settings):
    """Return a cursor of a topic, as its owner has it."""
    return ManagedCursor.open(
        layout_of(nodes), topic=TOPIC, subscription=name, ledgers=LedgerMap.from_counts(LOG), now_ms=0,
        config=CursorConfig(format=Format.PULSAR, **settings),
    )  # fmt: skip


def acked(cursor, *entries, ledger_id=0):
    cursor.ack_many([Position(ledger_id, each) for each in entries], now_ms=1)
    cursor.persist(now_ms=1)
    return cursor


def read(reader, name="s"):
    return reader.read([(TOPIC, name)])[TOPIC, name]


def is_that_of(cursor, state):
    return (state.mark_delete, str(state.deleted)) == (cursor.mark_delete_position, str(cursor.deleted))


def test_an_owner_that_continues_in_another_ledger_meanwhile_is_read_there(nodes, reader):
    old = acked(opened(nodes), 1)
    assert is_that_of(old, read(reader))
    get_many, others = nodes.get_many, []

    def overtaken(paths):
        found = get_many(paths)
        if not others:
            others.append(acked(opened(nodes), 5))
        return found

    nodes.get_many = overtaken
    state = read(reader)
    assert is_that_of(others[0], state)


def test_a_record_that_never_stands_still_is_an_error(nodes, reader):
    get_many = nodes.get_many

    def changed(paths):
        nodes.set(f"{NODE}/s", CURSOR_RECORD)
        return get_many(paths)

    nodes.get_many = changed
    with pytest.raises(StoreError, match=r"cursor 's' of .*t1: its record kept changing"):
        raise read(reader)


def test_what_cannot_be_read_is_an_error_of_that_cursor_alone(nodes, reader):
    cursor = acked(opened(nodes), 1, 3)
    nodes.set(f"{NODE}/lost", encode_cursor_info(CursorInfo(2**40, Position(0, -1))))
    nodes.set(f"{NODE}/damaged", b"\xff")
    empty, garbage = (nodes.store.ledgers.create("x") for _ in range(2))
    nodes.store.ledgers.append(garbage, [b"\xff"])
    nodes.set(f"{NODE}/empty", encode_cursor_info(CursorInfo(empty)))
    nodes.set(f"{NODE}/garbage", encode_cursor_info(CursorInfo(garbage)))
    names = [(TOPIC, name) for name in ("s", "lost", "damaged", "empty", "garbage", "none")]
    for _ in range(2):  # a reader takes nothing for read that it could not decode
        found = reader.read([*names, (f"{TOPIC}-none", "s")])
        assert is_that_of(cursor, found.pop((TOPIC, "s")))
        kinds = {name: type(error) for (_, name), error in found.items()}
        assert kinds == dict.fromkeys(("lost", "damaged", "empty", "garbage"), CorruptStateError) | dict.fromkeys(
            ("none", "s"), CursorGoneError
        )
    assert f"entry 0 of ledger {garbage}" in str(found[TOPIC, "garbage"])
    nodes.set(NODE, b"\xff")
    assert all(isinstance(each, AckStateError) for each in reader.read(names).values())


def test_a_log_of_acks_in_transactions_is_noticed(nodes, reader):
    acked(opened(nodes), 1)
    acked(opened(nodes, "a/b"), 1)
    nodes.set(f"{NODE}-a%2Fb__transaction_pending_ack", b"")
    assert [read(reader, name).has_transactions for name in ("s", "a/b")] == [False, True]


def test_a_deleted_cursor_that_comes_again_is_a_new_one(nodes, reader):
    acked(opened(nodes), 1, 3)
    assert len(read(reader).deleted) == 2
    nodes.delete(f"{NODE}/s", expected_version=nodes.get(f"{NODE}/s").version)
    assert isinstance(read(reader), CursorGoneError)
    nodes.set(f"{NODE}/s", encode_cursor_info(CursorInfo(-1, Position(0, 7))))
    state = read(reader)
    assert (state.mark_delete, len(state.deleted)) == (Position(0, 7), 0)


def test_a_lost_connection_is_opened_again(nodes):
    acked(opened(nodes), 1)
    lost = []

    def open_store():
        lost.append(False)
        return layout_of(nodes)

    def check_usable():
        if lost[-1]:
            raise StoreError("lost")

    nodes.check_usable, nodes.close = check_usable, lambda: None
    with DurableReader("", open_store=open_store) as reader:
        first = read(reader)
        lost[-1] = True
        assert read(reader) == first
        assert len(lost) == 2


def test_a_store_that_did_not_answer_is_not_waited_for_again_at_once(nodes, reader):
    """A thousand topics would each wait as long for it."""
    acked(opened(nodes), 1)
    waits = []

    def silent(_paths):
        waits.append(1)
        raise StoreError("no connection for 30 s")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "get_many", silent)
        patch.setattr(nodes, "is_connected", False)
        for expected in ("no connection for 30 s", "did not answer a moment ago", "did not answer a moment ago"):
            with pytest.raises(StoreError, match=expected):
                read(reader)
        assert len(waits) == 1
        patch.setattr(durable, "_TRIED_AGAIN_S", 0)
        with pytest.raises(StoreError, match="no connection for 30 s"):
            read(reader)
    assert len(read(reader).deleted) == 1
