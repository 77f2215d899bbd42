"""The gate's limit on ranges and the holes that all subscriptions of a topic share."""

import pytest

from ackstate.cursor import ManagedCursor, MemoryStore, Message, MessageLog, Subscription
from ackstate.cursor.journal.filled_ranges import FilledCount
from ackstate.cursor.journal.hole_pins import BucketReferences
from ackstate.cursor.journal.shared_holes import SharedHoles
from ackstate.delay import BucketedDelayIndex, DelayConfig, SnapshotStorage
from ackstate.limits import DispatchGate, GateLimits
from ackstate.topic.bucket_registry import MetadataBucketRegistry
from ackstate.topic.message_log import NO_DELAY

RANGES_MAX = 60
FAR_MS = 1_000_000


class HalfDelayedTopic:
    """Every other message of ledgers of 20 is delayed; sealed into a bucket for each ledger."""

    def __init__(self, *, is_shared: bool) -> None:
        self.store = store = MemoryStore()
        self.log = MessageLog.open(store, topic="orders", entries_per_ledger_max=20)
        registry = MetadataBucketRegistry(store.metadata, "/delayed-buckets/orders")
        is_needed = BucketReferences(store).is_needed
        storage = SnapshotStorage(store.ledgers, registry, owner="delayed orders", is_referenced=is_needed)
        config = DelayConfig(min_index_count_per_bucket=1)
        self.buckets, _ = BucketedDelayIndex.recover(config, storage=storage, now_ms=0)
        holes = SharedHoles(store, lambda: self.buckets.live_buckets) if is_shared else None
        self.cursor = ManagedCursor.open(
            store, topic="orders", subscription="s", ledgers=self.log.ledgers, shared_holes=holes, now_ms=0
        )
        self.subscription = Subscription(
            self.log,
            self.cursor,
            gate=DispatchGate(GateLimits(max_unacked_ranges=RANGES_MAX)),
            delays=self.buckets.open_view(self.cursor.is_acked),
        )

    def publish(self, ledger_count: int) -> None:
        for _ in range(ledger_count):
            self.log.publish(
                [Message(b"", deliver_at_ms=FAR_MS if number % 2 == 0 else NO_DELAY) for number in range(20)]
            )

    def consume(self, *, now_ms: int) -> int:
        """Dispatch one at a time, ack and persist at once, and return how many came."""
        count = 0
        while deliveries := self.subscription.dispatch("c", 1, now_ms=now_ms):
            for delivery in deliveries:
                self.subscription.ack(delivery.position, now_ms=now_ms)
                count += 1
            self.cursor.persist(now_ms=now_ms)
        return count


def test_holes_of_its_own_close_the_gate():
    topic = HalfDelayedTopic(is_shared=False)
    topic.publish(30)
    assert topic.consume(now_ms=1) == RANGES_MAX
    assert topic.cursor.deleted.range_count == RANGES_MAX


def test_shared_holes_do_not():
    topic = HalfDelayedTopic(is_shared=True)
    topic.publish(30)
    assert topic.consume(now_ms=1) == 300
    # Of 29 sealed ledgers each is one range; only the holes of the last one are the subscription's own.
    assert (topic.cursor.view.range_count_to_persist(1), topic.cursor.deleted.range_count) == (39, 300)
    assert topic.consume(now_ms=FAR_MS) == 300
    assert topic.subscription.why_blocked() == ()


def test_what_is_due_and_not_acked_is_its_own_hole_again():
    topic = HalfDelayedTopic(is_shared=True)
    topic.publish(30)
    assert topic.consume(now_ms=1) == 300
    sent = topic.subscription.dispatch("c", 1_000, now_ms=FAR_MS)
    topic.cursor.persist(now_ms=FAR_MS)
    assert (len(sent), topic.buckets.live_buckets) == (300, ())
    topic.publish(1)
    assert topic.subscription.dispatch("c", 1_000, now_ms=FAR_MS) == []
    assert [reason.rule.name for reason in topic.subscription.why_blocked()] == ["UNACKED_RANGES"]
    for delivery in sent:
        topic.subscription.ack(delivery.position, now_ms=FAR_MS)
    assert topic.consume(now_ms=FAR_MS) == 20
    assert topic.cursor.backlog == 0


def test_the_bound_is_never_too_low_and_not_much_too_high():
    topic = HalfDelayedTopic(is_shared=True)
    topic.publish(30)
    bound = FilledCount()
    while deliveries := topic.subscription.dispatch("c", 1, now_ms=1):
        topic.subscription.ack(deliveries[0].position, now_ms=1)
        topic.cursor.persist(now_ms=1)
        state = topic.cursor._persister.state
        given = (state.deleted, topic.cursor._persister.journal.holes._shared.known)
        exact = FilledCount()
        exact.fits(*given, range_count_max=0, acked_count=state.acked_count)
        truth = exact._at_most(state.acked_count)
        told = bound.at_most(*given, range_count_max=RANGES_MAX, acked_count=state.acked_count)
        assert truth <= told
        assert told < RANGES_MAX or told <= truth + RANGES_MAX // 64


def test_a_bound_that_is_not_counted_again_is_found(monkeypatch):
    monkeypatch.setattr(FilledCount, "_at_most", lambda self, acked_count: self._count_max)
    with pytest.raises(AssertionError):
        test_the_bound_is_never_too_low_and_not_much_too_high()
