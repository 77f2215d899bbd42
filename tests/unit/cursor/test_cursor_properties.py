"""Properties that an application attaches to a cursor, and to a mark-delete."""

from __future__ import annotations

import pytest

from ackstate import (
    CursorClosedError,
    CursorConfig,
    CursorFencedError,
    Format,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Position,
    StoreError,
)
from ackstate.cursor import persist_all
from ackstate.cursor.journal import cursor_path
from ackstate.stores.memory import Fault, FaultKind

LOG = LedgerMap.from_counts({3: 20})
FORMATS = pytest.mark.parametrize("form", list(Format))


def open_cursor(store, form=Format.NATIVE, subscription="s"):
    config = CursorConfig(format=form)
    return ManagedCursor.open(store, topic="t", subscription=subscription, ledgers=LOG, config=config, now_ms=0)


@FORMATS
def test_cursor_properties_are_durable_at_once_and_leave_the_acks_alone(form):
    store = MemoryStore()
    cursor = open_cursor(store, form)
    for persists in (False, True):
        cursor.set_cursor_properties({"owner": "billing", "persisted": str(persists)})
        again = open_cursor(MemoryStore(store.disk), form)
        assert dict(again.cursor_properties) == {"owner": "billing", "persisted": str(persists)}
        assert str(again.deleted) == ("[(3:3..3:4]]" if persists else "[]")
        cursor = open_cursor(store, form)
        cursor.ack(Position(3, 4), now_ms=1)
        cursor.persist(now_ms=1)
    cursor.close(now_ms=2)
    assert dict(open_cursor(store, form).cursor_properties) == {"owner": "billing", "persisted": "True"}


def test_names_of_the_broker_are_refused_and_its_own_stay():
    store = MemoryStore()
    cursor = open_cursor(store)
    cursor._persister.journal.write_cursor_properties({"#pulsar.internal.bucket": "1", "old": "x"})
    with pytest.raises(ValueError, match="internal"):
        cursor.set_cursor_properties({"#pulsar.internal.other": "2"})
    cursor.set_cursor_properties({"new": "y"})
    assert dict(open_cursor(store).cursor_properties) == {"#pulsar.internal.bucket": "1", "new": "y"}


@pytest.mark.parametrize("properties", [{"n": 1}, {1: "n"}])
def test_cursor_properties_are_texts(properties):
    with pytest.raises(TypeError, match="cursor property"):
        open_cursor(MemoryStore()).set_cursor_properties(properties)


def test_a_write_that_fails_leaves_them_as_they_were():
    store = MemoryStore()
    cursor = open_cursor(store)
    store.inject(Fault(store.mutation_count, FaultKind.FAIL_BEFORE))
    with pytest.raises(StoreError):
        cursor.set_cursor_properties({"a": "b"})
    assert dict(cursor.cursor_properties) == {}
    cursor.set_cursor_properties({"a": "c"})
    assert dict(open_cursor(store).cursor_properties) == {"a": "c"}


@FORMATS
def test_an_older_owner_cannot_write_them(form):
    store = MemoryStore()
    older = open_cursor(store, form)
    open_cursor(store, form).set_cursor_properties({"a": "b"})
    with pytest.raises(CursorFencedError):
        older.set_cursor_properties({"a": "c"})
    assert dict(open_cursor(store, form).cursor_properties) == {"a": "b"}


def test_a_closed_cursor_takes_none():
    cursor = open_cursor(MemoryStore())
    cursor.close(now_ms=0)
    with pytest.raises(CursorClosedError):
        cursor.set_cursor_properties({})


@pytest.mark.parametrize(
    ("properties", "error"),
    [({"n" * 65_536: 1}, ValueError), ({"n": 2**63}, ValueError), ({"n": "1"}, TypeError), ({1: 1}, TypeError)],
)
def test_properties_that_no_record_holds_are_refused_by_the_mark_delete(properties, error):
    store = MemoryStore()
    cursors = [open_cursor(store, subscription=name) for name in "ab"]
    with pytest.raises(error):
        cursors[0].mark_delete(Position(3, 4), properties=properties, now_ms=1)
    assert cursors[0].mark_delete_position == Position(3, -1)
    cursors[1].ack(Position(3, 0), now_ms=1)
    assert [result.messages_covered for result in persist_all(cursors, now_ms=1)] == [0, 1]


def test_clear_backlog_and_skip_ack_what_they_say():
    cursor = open_cursor(MemoryStore())
    cursor.ack_many([Position(3, 1), Position(3, 4)], now_ms=0)
    assert cursor.skip(3, now_ms=0).newly_acked == 3  # 0, 2 and 3; 1 was acked, and so the mark-delete goes on over 4
    assert cursor.mark_delete_position == Position(3, 4)
    assert cursor.skip(2, now_ms=0, counts_acked=True).newly_acked == 2
    assert cursor.clear_backlog(now_ms=0).newly_acked == 13
    assert cursor.backlog == 0
    assert cursor.skip(5, now_ms=0).newly_acked == cursor.clear_backlog(now_ms=0).newly_acked == 0
    with pytest.raises(ValueError, match="count must be at least 0"):
        cursor.skip(-1, now_ms=0)


def test_a_record_is_where_the_metadata_store_has_it():
    store = MemoryStore()
    open_cursor(store)
    assert store.metadata.get(cursor_path("t", "s")).data[:4] == b"ACKP"
