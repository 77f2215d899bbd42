"""The list of a topic's stored subscriptions, which opens none of them."""

from collections import Counter

import pytest

from ackstate import (
    CursorConfig,
    Format,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    Repair,
    SubscriptionType,
    UnreadableCursorError,
)
from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.errors import UnsupportedVersionError
from ackstate.stores.base import Versioned
from ackstate.topic import MessageLog
from ackstate.topic.subscriptions import TYPE_PROPERTY, StoredSubscription, stored_subscriptions
from wrapped_store import before_each_call

TOPIC = "persistent://a/b/orders"
PATH = cursor_path(TOPIC, "s")


def opened(store, name="s", *, topic=TOPIC, acked=0, ledgers=None, config=None):
    """Open a cursor, ack the first entries of ledger 1 and persist that twice, so that it has a journal."""
    cursor = ManagedCursor.open(
        store, topic=topic, subscription=name, ledgers=ledgers or log_of(10), config=config, now_ms=0
    )
    for entry_id in range(acked):
        cursor.ack(Position(1, entry_id), now_ms=0)
        cursor.persist(now_ms=0)
    return cursor


def log_of(count):
    return LedgerMap.from_counts({1: count})


def listed(store, topic=TOPIC, **options):
    """List them, and see that nothing was written."""
    before = store.mutation_count
    found = stored_subscriptions(store, topic, **options)
    assert store.mutation_count == before
    return found


@pytest.mark.parametrize("form", Format)
def test_each_has_its_type_its_durable_mark_delete_position_and_its_properties(form):
    store, config = MemoryStore(), CursorConfig(format=form)
    log = MessageLog.open(store, topic=TOPIC)
    log.publish([Message(b"")] * 10)
    billing = opened(store, "billing/eu", acked=3, ledgers=log.ledgers, config=config)
    billing.set_cursor_properties({"team": "money"})
    billing.put_internal_property(TYPE_PROPERTY, "Key_Shared")
    opened(store, "a new one", ledgers=log.ledgers, config=config)
    ManagedCursor.open(store, topic="another", subscription="x", ledgers=log.ledgers, config=config, now_ms=0)
    billing.ack(Position(1, 3), now_ms=0)  # which is not durable
    assert listed(store) == [
        StoredSubscription("a new one", None, Position(1, -1), {}, None),
        StoredSubscription(
            "billing/eu",
            SubscriptionType.KEY_SHARED,
            Position(1, 2),
            {"team": "money", TYPE_PROPERTY: "Key_Shared"},
            None,
        ),
    ]
    assert billing.persist(now_ms=0).messages_covered == 1  # the list fenced nothing
    assert [each.mark_delete for each in listed(store)] == [Position(1, -1), Position(1, 3)]


def damage_record(disk):
    disk.values[PATH] = Versioned(b"ACKP" + b"\xff" * 3, disk.values[PATH].version)


def lose_record(disk):
    del disk.values[PATH]


def lose_journal(disk):
    del disk.ledgers[journal_id(disk)]


def damage_journal(disk):
    entries = disk.ledgers[journal_id(disk)].entries
    entries[0] = b"\xff" + entries[0][1:]


def journal_id(disk):
    (ledger_id,) = MemoryStore(disk).ledgers.owned_by(cursor_owner(PATH))
    return ledger_id


DAMAGE = {
    damage_record: Repair.USE_ORPHAN_JOURNAL,
    lose_record: Repair.USE_ORPHAN_JOURNAL,
    lose_journal: Repair.USE_METADATA_SNAPSHOT,
    damage_journal: Repair.USE_METADATA_SNAPSHOT,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_that_cannot_be_read_is_listed_with_its_problem(damage):
    store = MemoryStore()
    log = MessageLog.open(store, topic=TOPIC)
    log.publish([Message(b"")] * 10)
    opened(store, acked=3, ledgers=log.ledgers)
    opened(store, "t", acked=3, ledgers=log.ledgers)
    damage(store.disk)
    for options in ({}, {"ledgers": log.ledgers}):
        first, other = listed(store, **options)
        assert first[:4] == ("s", None, None, {})
        assert isinstance(first.problem, UnreadableCursorError)
        assert DAMAGE[damage] in first.problem.repairs
        assert other[:3] == ("t", None, Position(1, 2))
        assert other.problem is None


def test_of_a_sound_one_no_ledger_is_listed():
    calls = Counter()
    store = before_each_call(MemoryStore(), lambda name: calls.update([name]))
    log = MessageLog.open(store, topic=TOPIC)
    for name in "st":
        opened(store, name, ledgers=log.ledgers)
    for options, expected in (({"ledgers": log.ledgers}, 0), ({}, 1)):  # those of the log
        calls.clear()
        assert len(stored_subscriptions(store, TOPIC, **options)) == 2
        assert calls["owned_by"] == expected


def test_a_newer_release_wrote_it():
    store = MemoryStore()
    log = MessageLog.open(store, topic=TOPIC)
    cursor = opened(store, ledgers=log.ledgers)
    cursor.put_internal_property(TYPE_PROPERTY, "Telepathic")
    (found,) = listed(store)
    assert (found.kind, found.mark_delete) == (None, Position(1, -1))
    assert isinstance(found.problem, UnsupportedVersionError)
    assert "'Telepathic'" in str(found.problem)

    value = store.disk.values[PATH]
    store.disk.values[PATH] = Versioned(value.data[:4] + b"\x7f" + value.data[5:], value.version)
    (found,) = listed(store)
    assert found.mark_delete is None
    assert isinstance(found.problem, UnsupportedVersionError)
