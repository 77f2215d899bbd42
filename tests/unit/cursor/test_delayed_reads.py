"""A delayed message is read from the store once by each subscription, to send it, and never before it is due."""

import threading
from collections import Counter

import pytest

from ackstate import ManagedCursor, MemoryStore, Message, StoreError, Subscription, SubscriptionType
from ackstate.delay import BucketedDelayIndex, BucketRegistry, DelayConfig, SnapshotStorage, TopicDelayIndex
from ackstate.message import encode_message
from ackstate.topic import MessageLog

DUE_MS = 5_000
every_kind = pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])


def in_memory_index(store):
    return TopicDelayIndex(tick_time_ms=10)


def bucketed_index(store):
    """Pulsar's settings, with which a tracker of one subscription hands messages out a second early."""
    storage = SnapshotStorage(store.ledgers, BucketRegistry(store.metadata, "/buckets"), "delayed")
    return BucketedDelayIndex.recover(DelayConfig(), storage=storage, now_ms=0)[0]


every_index = pytest.mark.parametrize("make_index", [in_memory_index, bucketed_index])


class CountedTopic:
    """A topic with many subscriptions, and how often each of its entries was read from the store."""

    def __init__(self, monkeypatch, make_index, kind, *, count, disk=None):
        self.store = MemoryStore(disk)
        self.make_index, self.kind, self.count = make_index, kind, count
        self.reads, self._lock = Counter(), threading.Lock()
        self.log = MessageLog.open(self.store, topic="t")
        ledgers, topic = type(self.store.ledgers), self
        read = ledgers.read

        def counting(self, ledger_id, first, end):
            entries = list(read(self, ledger_id, first, end))
            if ledger_id in topic.log.ledgers.counts():
                with topic._lock:
                    topic.reads.update((ledger_id, first + at) for at in range(len(entries)))
            return entries

        monkeypatch.setattr(ledgers, "read", counting)

    def subscribe(self, make_tracker=None):
        index = self.make_index(self.store)
        self.subscriptions = []
        for number in range(self.count):
            cursor = ManagedCursor.open(
                self.store, topic="t", subscription=f"s{number}", ledgers=self.log.ledgers, now_ms=0
            )
            tracker = index.open_view(cursor.is_acked) if make_tracker is None else make_tracker()
            self.subscriptions.append(Subscription(self.log, cursor, delays=tracker, kind=self.kind))

    def publish(self, *deliver_at_ms):
        messages = [Message(b"", key=b"k%d" % number, deliver_at_ms=each) for number, each in enumerate(deliver_at_ms)]
        return self.log.publish(messages)

    def dispatch(self, *, now_ms, consumers=("a",), count=10):
        """Dispatch once with each subscription, and return the sent positions of each."""
        return [
            [sent.position for consumer in consumers for sent in each.dispatch(consumer, count, now_ms=now_ms)]
            for each in self.subscriptions
        ]


@every_kind
@every_index
def test_two_hundred_subscriptions_read_a_delayed_message_once_each(monkeypatch, make_index, kind):
    topic = CountedTopic(monkeypatch, make_index, kind, count=200)
    topic.subscribe()
    (position,) = topic.publish(DUE_MS)
    for now_ms in (0, DUE_MS - 500, DUE_MS - 1):
        assert topic.dispatch(now_ms=now_ms) == [[]] * 200
    assert topic.reads[position] == 0, "read before it was due"
    assert topic.dispatch(now_ms=DUE_MS) == [[position]] * 200
    assert topic.reads[position] == 200


@every_kind
@every_index
def test_after_a_restart_the_index_is_rebuilt_by_one_read_of_each_message(monkeypatch, make_index, kind):
    before = CountedTopic(monkeypatch, make_index, kind, count=0)
    positions = [*before.publish(*[DUE_MS] * 20), *before.publish(*[DUE_MS] * 20)]
    topic = CountedTopic(monkeypatch, make_index, kind, count=100, disk=before.store.disk)
    topic.subscribe()
    assert topic.dispatch(now_ms=0, count=7) == [[]] * 100
    assert topic.reads == dict.fromkeys(positions, 1)
    assert topic.dispatch(now_ms=DUE_MS, count=100) == [positions] * 100
    assert topic.reads == dict.fromkeys(positions, 101)


@every_kind
@every_index
def test_what_is_acked_before_it_is_due_is_never_read(monkeypatch, make_index, kind):
    topic = CountedTopic(monkeypatch, make_index, kind, count=3)
    topic.subscribe()
    (position,) = topic.publish(DUE_MS)
    topic.dispatch(now_ms=0)
    for each in topic.subscriptions:
        each.ack(position, now_ms=1)
    assert topic.dispatch(now_ms=DUE_MS) == [[]] * 3
    assert topic.reads[position] == 0


def test_a_message_of_an_append_whose_outcome_was_unknown_is_offered_by_its_first_reader(monkeypatch):
    topic = CountedTopic(monkeypatch, in_memory_index, SubscriptionType.SHARED, count=3)
    topic.subscribe()
    (before,) = topic.publish(DUE_MS)
    ledger_id = before.ledger_id
    unknown = Message(b"stored although the append seemed to fail", deliver_at_ms=DUE_MS)
    topic.store.ledgers.append(ledger_id, [encode_message(unknown)])
    topic.log._append_failed(StoreError("unknown"))
    (after,) = topic.publish(DUE_MS)
    assert after.ledger_id > ledger_id
    assert topic.log.ledgers.entry_count(ledger_id) == before.entry_id + 2
    between = before._replace(entry_id=before.entry_id + 1)
    assert topic.dispatch(now_ms=0) == [[]] * 3
    assert topic.reads == {between: 1}
    assert topic.dispatch(now_ms=DUE_MS) == [[before, between, after]] * 3
