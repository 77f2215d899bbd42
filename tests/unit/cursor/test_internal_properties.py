"""Internal properties of a cursor."""

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
    StoreError,
)
from ackstate.stores.memory import Fault, FaultKind

LOG = LedgerMap.from_counts({3: 20})
KEY = "#pulsar.internal.delayed.bucket_3_7"
OTHER_KEY = "#pulsar.internal.delayed.bucket_9_12"


def open_cursor(store, form=Format.NATIVE):
    config = CursorConfig(format=form)
    return ManagedCursor.open(store, topic="t", subscription="s", ledgers=LOG, config=config, now_ms=0)


@pytest.mark.parametrize("form", list(Format))
def test_a_cursor_keeps_internal_properties_beside_what_the_application_attached(form):
    store = MemoryStore()
    cursor = open_cursor(store, form)
    cursor.set_cursor_properties({"owner": "billing"})
    cursor.put_internal_property(KEY, "17")
    cursor.put_internal_property(OTHER_KEY, "18")
    cursor.put_internal_property(KEY, "19")
    cursor = open_cursor(MemoryStore(store.disk), form)
    assert dict(cursor.cursor_properties) == {KEY: "19", OTHER_KEY: "18", "owner": "billing"}


def test_what_changes_nothing_is_not_written():
    store = MemoryStore()
    cursor = open_cursor(store)
    cursor.put_internal_property(KEY, "17")
    written = store.mutation_count
    cursor.put_internal_property(KEY, "17")
    assert store.mutation_count == written


@pytest.mark.parametrize(
    ("name", "text", "error"), [("owner", "1", ValueError), (KEY, 1, TypeError), (3, "1", TypeError)]
)
def test_only_internal_names_and_texts_are_taken(name, text, error):
    cursor = open_cursor(MemoryStore())
    with pytest.raises(error):
        cursor.put_internal_property(name, text)
    assert dict(cursor.cursor_properties) == {}


def test_a_property_that_cannot_be_written_is_not_there():
    store = MemoryStore()
    cursor = open_cursor(store)
    store.inject(Fault(store.mutation_count, FaultKind.FAIL_BEFORE))
    with pytest.raises(StoreError):
        cursor.put_internal_property(KEY, "17")
    assert dict(cursor.cursor_properties) == {}


def test_an_older_owner_and_a_closed_cursor_write_none():
    store = MemoryStore()
    older = open_cursor(store)
    newer = open_cursor(store)
    with pytest.raises(CursorFencedError):
        older.put_internal_property(KEY, "17")
    newer.close(now_ms=0)
    with pytest.raises(CursorClosedError):
        newer.put_internal_property(KEY, "17")
