"""Cursors and a real delay index on one store: sealed, fallen due, acked, retired, and recovered after a crash."""

from __future__ import annotations

import random

from ackstate import LedgerMap, Position
from ackstate.cursor import ManagedCursor, MemoryStore, PersistTarget
from ackstate.cursor.journal.hole_pins import ROOT, BucketReferences
from ackstate.cursor.journal.journal import cursor_path
from ackstate.cursor.journal.shared_holes import SharedHoles
from ackstate.delay import BucketedDelayIndex, DelayConfig, SnapshotStorage
from ackstate.topic.bucket_registry import MetadataBucketRegistry
from ackstate.wire.native_shared import is_shared

ENTRIES = 2_000
LOG = LedgerMap.from_counts({1: ENTRIES, 2: ENTRIES, 3: 10})
CONFIG = DelayConfig(
    tick_time_ms=1,
    is_deliver_at_time_strict=True,
    min_index_count_per_bucket=200,
    max_time_step_per_segment_ms=1_000,
    max_indexes_per_segment=100,
)
HOUR_MS = 3_600_000
CHOOSE = random.Random(5)
DELAYED = {
    Position(ledger, entry): CHOOSE.randrange(100, 5_000)
    for ledger in (1, 2)
    for entry in sorted(CHOOSE.sample(range(ENTRIES - 1), 400))
}


class IndexedTopic:
    def __init__(self, store, *, now_ms=0):
        self.store = store
        registry = MetadataBucketRegistry(store.metadata, "/delay/t")
        references = BucketReferences(store)
        storage = SnapshotStorage(store.ledgers, registry, "delay buckets of t", references.is_needed)
        self.index, self.report = BucketedDelayIndex.recover(CONFIG, storage=storage, now_ms=now_ms)
        self.shared = SharedHoles(store, self.live)
        self.cursors = [self.open(name) for name in ("a", "b")]

    def live(self):
        return [(bucket.bucket_id, bucket.current) for bucket in self.index._messages._sealed if bucket.is_registered]

    def open(self, name):
        return ManagedCursor.open(
            self.store, topic="t", subscription=name, ledgers=LOG, shared_holes=self.shared, now_ms=0
        )

    def publish(self):
        """Delay some messages, deliver and ack the others."""
        for position, deliver_at_ms in sorted(DELAYED.items()):
            self.index.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=0)
        self.index.add_message(Position(3, 1), deliver_at_ms=HOUR_MS, now_ms=0)
        for cursor in self.cursors:
            for ledger in (1, 2):
                entries = [entry for entry in range(ENTRIES) if Position(ledger, entry) not in DELAYED]
                cursor.ack_entries(ledger, entries, now_ms=0)

    def deliver(self, *, now_ms):
        """Deliver the due messages, and have the first cursor ack them, the second most of them."""
        due = []
        while positions := self.index.scheduled_messages(100, now_ms=now_ms):
            due += positions
        self.cursors[0].ack_many(due, now_ms=0)
        self.cursors[1].ack_many(due[: len(due) // 20 * 19], now_ms=0)
        return due

    def snapshots(self):
        """Have every cursor write its whole state."""
        for cursor in self.cursors:
            cursor._persister.journal._open_ledger = None
            cursor._state.require_persist()
            assert cursor.persist(now_ms=0).route is PersistTarget.SNAPSHOT

    def sizes(self):
        owners = [f"cursor {cursor_path('t', name)}" for name in ("a", "b")]
        entries = [self.store.ledgers.read(self.store.ledgers.owned_by(owner)[0], 0, 1)[0] for owner in owners]
        return [(is_shared(entry), len(entry)) for entry in entries]

    def states(self):
        return [(str(cursor.deleted), cursor.mark_delete_position) for cursor in self.cursors]

    def buckets(self):
        return self.store.ledgers.owned_by("delay buckets of t")


def restarted(broker, *, now_ms):
    return IndexedTopic(MemoryStore(broker.store.disk), now_ms=now_ms)


def test_cursors_refer_to_what_an_index_has_sealed_until_it_is_acked():
    broker = IndexedTopic(MemoryStore())
    broker.publish()
    assert len(broker.live()) == len(broker.buckets()) == 2
    broker.snapshots()
    assert all(shared and size < 250 for shared, size in broker.sizes())
    states = broker.states()
    broker = restarted(broker, now_ms=50)
    assert broker.states() == states

    # Some segments are due and acked, by one of the cursors not all; the records refer to those that follow.
    delivered = broker.deliver(now_ms=1_500)
    assert sorted(delivered) == [position for position in sorted(DELAYED) if DELAYED[position] <= 1_500]
    assert min(first for _, first in broker.live()) > 1
    broker.snapshots()
    assert all(shared for shared, _ in broker.sizes())
    states = broker.states()
    broker = restarted(broker, now_ms=1_500)
    assert broker.states() == states

    # All are due: the index drops both buckets, which stay as long as a record refers to them.
    buckets = broker.buckets()
    broker.deliver(now_ms=6_000)
    assert broker.live() == []
    assert broker.buckets() == buckets != []
    broker = restarted(broker, now_ms=6_000)
    assert broker.states() == states
    assert broker.buckets() == buckets

    # Those that were not persisted as acked come again, from the log; then nothing refers to the buckets.
    for cursor in broker.cursors:
        cursor.ack_many(sorted(DELAYED), now_ms=0)
    broker.snapshots()
    assert [shared for shared, _ in broker.sizes()] == [False, False]
    broker = restarted(broker, now_ms=6_000)
    assert broker.buckets() == []
    assert not any(broker.store.metadata.children(f"{ROOT}/{bucket}") for bucket in buckets)
