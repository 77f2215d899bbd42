"""Properties that an application or the broker attaches to a cursor, or an application to a mark-delete."""

import pytest

from ackstate import CursorClosedError, CursorConfig, Format, LedgerMap, ManagedCursor, MemoryStore, Position

LOG = LedgerMap.from_counts({3: 20})
KEY, OTHER_KEY = "#pulsar.internal.delayed.bucket_3_7", "#pulsar.internal.delayed.bucket_9_12"


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
