"""A topic whose messages are delayed, on a store that a crash leaves as it is: any tracker, in few words."""

from __future__ import annotations

from functools import partial

from ackstate import ManagedCursor, MemoryStore, Message, Subscription
from ackstate.delay import (
    BucketedDelayIndex,
    BucketRegistry,
    DelayConfig,
    InMemoryDelayTracker,
    SnapshotStorage,
    TopicDelayIndex,
)
from ackstate.dispatch import SubscriptionType
from ackstate.limits import DispatchGate, GateLimits
from ackstate.message import NO_DELAY
from ackstate.topic import MessageLog

TICK_MS = 10
FAR_MS = 10**9


class InMemory:
    def __init__(self, *, strict=True):
        self.config = DelayConfig(tick_time_ms=TICK_MS, is_deliver_at_time_strict=strict)
        self.early_ms = 0 if strict else TICK_MS

    def start(self, topic, now_ms):
        pass

    def open(self, topic, name, *, now_ms):
        return InMemoryDelayTracker.from_config(self.config)


class Views:
    early_ms = 0

    def start(self, topic, now_ms):
        self.index = TopicDelayIndex(tick_time_ms=TICK_MS)

    def open(self, topic, name, *, now_ms):
        return self.index.open_view(topic.cursors[name].is_acked)


class Bucketed:
    """Snapshots in the store of the topic, an index and a registry for each subscription."""

    def __init__(self, *, strict=True, **settings):
        few = {"min_index_count_per_bucket": 2, "max_indexes_per_segment": 2}
        self.config = DelayConfig(tick_time_ms=TICK_MS, is_deliver_at_time_strict=strict, **few | settings)
        self.early_ms = 0 if strict else TICK_MS
        self.reports = []

    def start(self, topic, now_ms):
        pass

    def storage(self, topic, name):
        registry = BucketRegistry(topic.store.metadata, f"/delayed-buckets/{name}")
        return SnapshotStorage(topic.store.ledgers, registry, f"delayed {name}")

    def open(self, topic, name, *, now_ms):
        index, report = BucketedDelayIndex.recover(self.config, storage=self.storage(topic, name), now_ms=now_ms)
        self.reports.append(report)
        return index


class BucketedViews(Bucketed):
    """One such index for all subscriptions."""

    def storage(self, topic, name):
        return super().storage(topic, "t")

    def start(self, topic, now_ms):
        self.index = super().open(topic, "t", now_ms=now_ms)

    def open(self, topic, name, *, now_ms):
        return self.index.open_view(topic.cursors[name].is_acked)


class DelayedTopic:
    """Messages are known by their number, in order of publishing."""

    def __init__(self, trackers, *, kind=SubscriptionType.SHARED):
        self.trackers, self.store, self.kind = trackers, MemoryStore(), kind
        self.positions, self.deliver_at_ms, self.tracker = [], [], {}
        self.start(0)

    def start(self, now_ms):
        self.seen_ms = now_ms
        self.log = MessageLog.open(self.store, topic="t", entries_per_ledger_max=5)
        self.trackers.start(self, now_ms)
        self.cursors, self.subscriptions = {}, {}
        self.open("s", now_ms=now_ms)

    def open(self, name, *, now_ms):
        cursor = self.cursors[name] = ManagedCursor.open(
            self.store, topic="t", subscription=name, ledgers=self.log.ledgers, now_ms=now_ms
        )
        if not self.kind.is_single_active:
            self.tracker[name] = self.trackers.open(self, name, now_ms=now_ms)
        self.subscriptions[name] = Subscription(
            self.log, cursor, delays=self.tracker.get(name), kind=self.kind,
            gate=None if self.kind.is_single_active else DispatchGate(GateLimits()),
        )  # fmt: skip

    def crash(self, now_ms):
        """Nothing is left but the store."""
        self.store = MemoryStore(self.store.disk)
        self.start(now_ms)

    def publish(self, *deliver_at_ms, key=None):
        for each in deliver_at_ms:
            self.positions += self.log.publish([Message(b"", key=key, deliver_at_ms=each)])
            self.deliver_at_ms.append(each)

    def dispatch(self, *, now_ms, name="s", consumer="a", count=100):
        """Return the numbers of a consumer's messages; none may be early."""
        sent = self.subscriptions[name].dispatch(consumer, count, now_ms=now_ms)
        numbers = [self.positions.index(each.position) for each in sent]
        self.seen_ms = max(self.seen_ms, now_ms)
        for number in numbers:
            assert self.deliver_at_ms[number] <= self.seen_ms + self.trackers.early_ms, f"{number} came at {now_ms} ms"
        self.subscriptions[name].check_invariants()
        return numbers

    def ack(self, *numbers, now_ms=0, name="s"):
        for number in numbers:
            self.subscriptions[name].ack(self.positions[number], now_ms=now_ms)

    def nack(self, *numbers, now_ms, name="s"):
        return [self.subscriptions[name].nack(self.positions[number], now_ms=now_ms) for number in numbers]

    def unacked(self, name="s"):
        return [n for n, position in enumerate(self.positions) if not self.cursors[name].is_acked(position)]

    def drain(self, *, now_ms, name="s"):
        """Dispatch whenever the subscription requests it, ack all, and return the times of the messages, by number."""
        came, waits = {}, 0
        while now_ms < FAR_MS:
            numbers = self.dispatch(now_ms=now_ms, name=name, count=7)
            assert not came.keys() & set(numbers), "twice"
            came.update(dict.fromkeys(numbers, now_ms))
            self.ack(*numbers, now_ms=now_ms, name=name)
            if not numbers:
                wake_ms = self.subscriptions[name].next_wake_ms
                if wake_ms is None:
                    break
                waits += 1
                assert waits < 10 * len(self.positions), f"woken in vain, at {now_ms} ms for {wake_ms} ms"
                now_ms = max(now_ms, wake_ms)
        assert self.unacked(name) == [], "lost"
        return came


TRACKERS = {
    "in memory": InMemory,
    "in memory, not strict": partial(InMemory, strict=False),
    "view": Views,
    "bucketed": Bucketed,
    "bucketed, not strict": partial(Bucketed, strict=False),
    "view of buckets": BucketedViews,
}
NONE = NO_DELAY
