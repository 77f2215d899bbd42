"""Properties that an application or the broker attaches to a cursor, or an application to a mark-delete."""

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
from ackstate.stores.memory import Fault, FaultKind

LOG = LedgerMap.from_counts({3: 20})
KEY, OTHER_KEY = "#pulsar.internal.delayed.bucket_3_7", "#pulsar.internal.delayed.bucket_9_12"
PUTS = {
    "application": lambda cursor, text: cursor.set_cursor_properties({"a": text}),
    "broker": lambda cursor, text: cursor.put_internal_property(KEY, text),
}
either = pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)


def open_cursor(store, form=Format.NATIVE, subscription="s"):
    config = CursorConfig(format=form)
    return ManagedCursor.open(store, topic="t", subscription=subscription, ledgers=LOG, config=config, now_ms=0)


@pytest.mark.parametrize("form", Format)
def test_cursor_properties_are_durable_at_once_and_leave_the_acks_and_each_other_alone(form):
    store = MemoryStore()
    cursor = open_cursor(store, form)
    cursor.put_internal_property(KEY, "17")
    cursor.put_internal_property(OTHER_KEY, "18")
    for persists in (False, True):
        cursor.put_internal_property(KEY, f"{persists}")
        cursor.set_cursor_properties({"owner": "billing", "persisted": str(persists)})
        expected = {KEY: f"{persists}", OTHER_KEY: "18", "owner": "billing", "persisted": str(persists)}
        again = open_cursor(MemoryStore(store.disk), form)
        assert dict(again.cursor_properties) == expected
        assert str(again.deleted) == ("[(3:3..3:4]]" if persists else "[]")
        cursor = open_cursor(store, form)
        cursor.ack(Position(3, 4), now_ms=1)
        cursor.persist(now_ms=1)
    cursor.close(now_ms=2)
    assert dict(open_cursor(store, form).cursor_properties) == expected
    with pytest.raises(CursorClosedError):
        cursor.put_internal_property(KEY, "19")


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("set_cursor_properties", [{"#pulsar.internal.other": "2"}], ValueError),
        ("set_cursor_properties", [{"n": 1}], TypeError),
        ("set_cursor_properties", [{1: "n"}], TypeError),
        ("put_internal_property", ["owner", "1"], ValueError),
        ("put_internal_property", [KEY, 1], TypeError),
        ("put_internal_property", [3, "1"], TypeError),
    ],
)
def test_only_texts_and_names_of_ones_own_are_taken(method, arguments, error):
    cursor = open_cursor(MemoryStore())
    with pytest.raises(error):
        getattr(cursor, method)(*arguments)
    assert dict(cursor.cursor_properties) == {}


@either
def test_a_write_that_fails_leaves_them_as_they_were_and_no_change_is_no_write(put):
    store = MemoryStore()
    cursor = open_cursor(store)
    store.inject(Fault(store.mutation_count, FaultKind.FAIL_BEFORE))
    with pytest.raises(StoreError):
        put(cursor, "b")
    assert dict(cursor.cursor_properties) == {}
    put(cursor, "c")
    assert [*open_cursor(store).cursor_properties.values()] == ["c"]
    cursor, written = open_cursor(store), store.mutation_count
    cursor.put_internal_property(KEY, "17")
    cursor.put_internal_property(KEY, "17")
    assert store.mutation_count == written + 1


@pytest.mark.parametrize("form", Format)
@either
def test_an_older_owner_cannot_write_them(form, put):
    store = MemoryStore()
    older = open_cursor(store, form)
    put(open_cursor(store, form), "b")
    with pytest.raises(CursorFencedError):
        put(older, "c")
    assert [*open_cursor(store, form).cursor_properties.values()] == ["b"]


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
