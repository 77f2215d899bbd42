"""Does each exhibit still make its mistake? A tiny story of each goes well, goes wrong while it is planted, and well.

So an exhibit cannot stay behind unseen when the code moves that it replaces.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from ackstate import CursorConfig, Format, ManagedCursor, MemoryStore, Message, Subscription
from ackstate.cursor.recovery import UnreadableCursorError
from ackstate.errors import CorruptStateError
from ackstate.limits import DispatchGate, GateLimits
from ackstate.stores import sqlite_database
from ackstate.stores.base import ABSENT, StoreError
from ackstate.stores.memory import Fault, FaultKind
from ackstate.stores.sqlite import SqliteStore
from ackstate.topic import MessageLog
from delayed_topic import Bucketed, DelayedTopic
from museum.exhibits import EXHIBITS


class Busy:
    """A store in which something else happens, once, while a ledger is written."""

    def __init__(self, disk=None):
        self.inner = MemoryStore(disk)
        self.metadata, self.ledgers, self.close = self.inner.metadata, self, self.inner.close
        self.meanwhile = {}

    def __getattr__(self, name):
        call = getattr(self.inner.ledgers, name)
        meanwhile = self.meanwhile.pop(name, None)
        if meanwhile is not None:
            meanwhile()
        return call


class TwelveMessages:
    """Twelve messages in ledger 1 and a cursor on them."""

    def __init__(self, **config):
        self.store = Busy()
        self.log = MessageLog.open(MemoryStore(), topic="t")
        self.positions = self.log.publish([Message(b"")] * 12)
        self.open(**config)

    def open(self, **config):
        """A crash, if it is not the first time; only the disk is left."""
        self.store = Busy(self.store.inner.disk)
        self.cursor = ManagedCursor.open(
            self.store,
            topic="t",
            subscription="s",
            ledgers=self.log.ledgers,
            config=CursorConfig(**config),
            now_ms=0,
        )

    def ack(self, *numbers):
        return [self.cursor.ack(self.positions[number], now_ms=0) for number in numbers][-1]

    def persist(self):
        self.cursor.persist(now_ms=0)

    def subscribe(self, **limits):
        return Subscription(self.log, self.cursor, gate=DispatchGate(GateLimits(**limits)))


def synced_at_checkpoint_and_after():
    """How much SQLite syncs while a store is opened: a number of `PRAGMA synchronous` each; FULL is 2."""
    found = []

    class Watched(sqlite3.Connection):
        def execute(self, statement, *more):
            if statement.startswith("PRAGMA wal_checkpoint"):
                found.extend(super().execute("PRAGMA synchronous").fetchone())
            return super().execute(statement, *more)

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as watched:
        watched.setattr(sqlite_database.sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
        with closing(SqliteStore(directory)) as store:
            found.extend(store._database._connection.execute("PRAGMA synchronous").fetchone())
    return found


def a_store_in_sqlite_that_is_opened():
    return synced_at_checkpoint_and_after() == [2, 2]


def names_of_a_new_store_in_sqlite():
    """All of them are synced: those in the directory, and its own."""
    synced, sync = set(), os.fsync

    def note(descriptor):
        synced.add(Path(f"/proc/self/fd/{descriptor}").resolve())
        sync(descriptor)

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as watched:
        watched.setattr(os, "fsync", note)
        place = Path(directory, "store").resolve()
        SqliteStore(place).close()
    return {place, place.parent} <= synced


@contextmanager
def sqlite_store_with_a_value():
    with tempfile.TemporaryDirectory() as directory:
        with closing(SqliteStore(directory)) as store:
            store.metadata.put("/a", b"value", expected_version=ABSENT)
        yield Path(directory)


def a_flipped_bit_in_a_row_of_sqlite():
    with sqlite_store_with_a_value() as directory:
        database = directory / sqlite_database.DATABASE
        database.write_bytes(database.read_bytes().replace(b"value", b"valuf"))
        with closing(SqliteStore(directory)) as store:
            try:
                store.metadata.get("/a")
            except CorruptStateError:
                return True
    return False


def a_database_of_no_bytes():
    with sqlite_store_with_a_value() as directory:
        (directory / sqlite_database.DATABASE).write_bytes(b"")
        try:
            SqliteStore(directory).close()
        except CorruptStateError:
            return True
    return False


class CommitsNot:
    """A connection to SQLite whose commits fail."""

    def __init__(self, connection):
        self.connection = connection

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def execute(self, statement, *more):
        if statement == "COMMIT":
            self.connection.execute("ROLLBACK")
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return self.connection.execute(statement, *more)


def a_commit_that_fails():
    with sqlite_store_with_a_value() as directory, closing(SqliteStore(directory)) as store:
        store._database._connection = CommitsNot(store._database._connection)
        try:
            store.metadata.put("/b", b"", expected_version=ABSENT)
        except StoreError:
            return True
    return False


def an_ack_while_older_ones_are_written():
    topic = TwelveMessages()
    topic.ack(2)
    receipts = []
    topic.store.meanwhile["append"] = lambda: receipts.append(topic.ack(4))
    topic.persist()
    topic.ack(6)
    topic.persist()
    was_durable = topic.cursor.durable(receipts[0])
    topic.open()
    return topic.cursor.is_acked(topic.positions[4]) and was_durable


def a_persist_that_fails():
    topic = TwelveMessages()
    store = topic.store.inner
    receipt = topic.ack(2)
    for mutation in range(store.mutation_count, store.mutation_count + 4):
        store.inject(Fault(mutation, FaultKind.FAIL_BEFORE))
    try:
        topic.persist()
    except StoreError:
        return not topic.cursor.durable(receipt)
    return False


def a_tick_that_the_rate_limit_refuses():
    topic = TwelveMessages(mark_delete_rate_limit=1, flush_interval_ms=10_000)
    topic.ack(2)
    topic.cursor.tick(now_ms=0)
    receipt = topic.ack(4)
    topic.cursor.tick(now_ms=1)
    return not topic.cursor.durable(receipt)


def a_persist_beyond_the_limit_on_ranges():
    topic = TwelveMessages(range_count_max=2)
    topic.ack(2, 4, 6, 8)
    topic.persist()
    topic.open(range_count_max=2)
    return topic.cursor.deleted.range_count == 2


def acks_of_every_other_message_up_to_the_limit():
    """As many as are sent."""
    topic = TwelveMessages()
    topic.log.publish([Message(b"")] * 300)
    subscription = topic.subscribe(max_unpersisted_ack_record_bytes=1_024)
    while sent := subscription.dispatch("a", 40, now_ms=0):
        for delivery in sent[::2]:
            subscription.ack(delivery.position, now_ms=0)
    usage = subscription.usage()
    assert usage.unpersisted_record_bytes > 400
    return usage.unpersisted_record_bytes + usage.reserved_bytes <= 1_024


def a_mark_delete_that_moves_before_a_snapshot_is_written():
    topic = TwelveMessages(ledger_entry_count_max=1)
    receipt = topic.ack(1)
    topic.store.meanwhile["create"] = lambda: topic.ack(0)
    topic.persist()
    assert topic.cursor.durable(receipt)
    topic.open()
    return topic.cursor.is_acked(topic.positions[1])


def a_journal_that_cannot_be_read():
    topic = TwelveMessages()
    topic.ack(0, 1, 5)
    topic.persist()
    (ledger,) = topic.store.inner.disk.ledgers.values()
    ledger.entries[0] = ledger.entries[0][:-1] + b"!"
    try:
        topic.open()
    except UnreadableCursorError:
        return True
    return topic.cursor.recovery_report.discarded_reason != ""


def a_restart_above_the_limit_on_ranges():
    topic = TwelveMessages()
    topic.ack(1, 3, 5, 7, 9)
    topic.persist()
    topic.open()
    return bool(topic.subscribe(max_unacked_ranges=2).dispatch("a", 1, now_ms=0))


def a_switch_of_the_format_with_holes():
    topic = TwelveMessages()
    topic.ack(0, 2, 4)
    topic.persist()
    topic.open(format=Format.PULSAR)
    return topic.cursor.is_acked(topic.positions[4])


def a_restart_after_delayed_messages_fell_due():
    topic = DelayedTopic(Bucketed())
    topic.publish(100, 200, 300, 400, 500, 600)
    assert topic.subscriptions["s"].dispatch("a", 9, now_ms=0) == []
    topic.crash(now_ms=250)
    assert topic.trackers.reports[-1].segments_skipped == 1
    sent = [delivery.position for delivery in topic.subscriptions["s"].dispatch("a", 9, now_ms=250)]
    return sent == topic.positions[:2]


STORIES = {
    "M1-sqlite": a_store_in_sqlite_that_is_opened,
    "M2-sqlite": names_of_a_new_store_in_sqlite,
    "M3-sqlite": a_flipped_bit_in_a_row_of_sqlite,
    "M4-sqlite": a_database_of_no_bytes,
    "M11-sqlite": a_commit_that_fails,
    "M14-sqlite": a_store_in_sqlite_that_is_opened,
    "M5": an_ack_while_older_ones_are_written,
    "M6": a_persist_that_fails,
    "M7": a_tick_that_the_rate_limit_refuses,
    "M8": a_persist_beyond_the_limit_on_ranges,
    "M9": acks_of_every_other_message_up_to_the_limit,
    "M10": a_mark_delete_that_moves_before_a_snapshot_is_written,
    "M12": a_journal_that_cannot_be_read,
    "M13": a_restart_above_the_limit_on_ranges,
    "M15": a_switch_of_the_format_with_holes,
    "M16": a_restart_after_delayed_messages_fell_due,
}


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_an_exhibit_differs_from_the_product_and_leaves_nothing_behind(exhibit):
    story, places = STORIES[exhibit.name], [(each.owner, each.name) for each in exhibit.replacements()]
    before = [vars(owner)[name] for owner, name in places]
    assert story(), "the story goes wrong without the exhibit"
    with exhibit.plant():
        assert not story(), "the exhibit does not make its mistake any more"
    assert [vars(owner)[name] for owner, name in places] == before
    assert story()


def test_the_museum_has_every_bug_once():
    names = [exhibit.name.removesuffix("-sqlite") for exhibit in EXHIBITS]
    assert names == [f"M{number}" for number in range(1, 17)]
