"""Publishing under delivery-delay policies: on real logs, cursors and delay views, on a store in memory."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ackstate import CursorConfig, LogFencedError, ManagedCursor, MemoryStore, Message, StoreError, Subscription
from ackstate.delay import TopicDelayIndex
from ackstate.limits import DeliveryDelayExceededError, DispatchGate, EffectiveDelayedDelivery, GateLimits
from ackstate.message import NO_DELAY
from ackstate.metrics import PublishCollector
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import CounterSample, MessageLog, PublishCounters, TopicPublisher

ORDERS = "persistent://public/default/orders"
REJECTED = "pulsar.broker.topic.messages.delayed.rejected"
OVERRIDDEN = "pulsar.broker.topic.messages.fixed.delay.overridden"

FREE = EffectiveDelayedDelivery()
FIXED = EffectiveDelayedDelivery(fixed_delivery_delay_ms=5_000)
MAXIMUM = EffectiveDelayedDelivery(max_delivery_delay_ms=60)
INACTIVE = EffectiveDelayedDelivery(active=False, max_delivery_delay_ms=60, fixed_delivery_delay_ms=5_000)


class PublishedTopic:
    """A topic with one publisher, whose policies can be changed."""

    def __init__(self, policies=FREE, *, name=ORDERS, counters=None):
        self.policies = policies
        self.store = MemoryStore()
        self.log = MessageLog.open(self.store, topic=name)
        self.counters = counters or PublishCounters(cluster="here")
        self.publisher = TopicPublisher(self.log, topic=name, policies=lambda: self.policies, counters=self.counters)

    def stored(self):
        """The (publish, deliver_at) times of every message in the log."""
        last = self.log.ledgers.last_confirmed
        positions = [last._replace(entry_id=entry) for entry in range(last.entry_id + 1)]
        return [(message.publish_time_ms, message.deliver_at_ms) for message in self.log.read(positions)]

    def counted(self):
        values = {sample.name: sample.value for sample in self.counters.samples()}
        return {"rejected": values[REJECTED], "overridden": values[OVERRIDDEN]}


def asking(*times, message_count=1):
    return [
        Message(b"x", deliver_at_ms=asked, publish_time_ms=publish, message_count=message_count)
        for publish, asked in times
    ]


@pytest.mark.parametrize(
    ("policies", "stored", "overridden"),
    [
        (FREE, [(0, NO_DELAY), (1, 0), (2, 62), (3, 7)], 0),
        (MAXIMUM, [(0, NO_DELAY), (1, 0), (2, 62), (3, 7)], 0),
        (FIXED, [(0, 5_000), (1, 5_001), (2, 5_002), (3, 5_003)], 3),
        (INACTIVE, [(0, NO_DELAY), (1, NO_DELAY), (2, NO_DELAY), (3, NO_DELAY)], 0),
    ],
)
def test_the_policies_say_when_a_message_is_delivered(policies, stored, overridden):
    topic = PublishedTopic(policies)
    positions = topic.publisher.publish(asking((0, NO_DELAY), (1, 0), (2, 62), (3, 7)))
    assert [position.entry_id for position in positions] == [0, 1, 2, 3]
    assert topic.stored() == stored
    assert topic.counted() == {"rejected": 0, "overridden": overridden}


def test_one_rejected_message_keeps_all_out():
    topic = PublishedTopic(MAXIMUM)
    with pytest.raises(DeliveryDelayExceededError) as caught:
        topic.publisher.publish(asking((0, NO_DELAY), (0, 60), (0, 61), (0, 10), (5, 66)))
    assert str(caught.value) == "Exceeds max allowed delivery delay of 60 milliseconds"
    assert topic.log.ledgers.last_confirmed.entry_id == -1
    assert topic.counted() == {"rejected": 2, "overridden": 0}


def test_a_batch_is_one_entry_and_counts_its_messages():
    topic = PublishedTopic(FIXED)
    topic.publisher.publish(asking((0, 7), (0, NO_DELAY), message_count=10))
    assert topic.stored() == [(0, 5_000), (0, 5_000)]
    assert topic.counted() == {"rejected": 0, "overridden": 10}
    topic.policies = MAXIMUM
    with pytest.raises(DeliveryDelayExceededError):
        topic.publisher.publish(asking((0, 61), (0, 60), message_count=4))
    assert topic.counted() == {"rejected": 4, "overridden": 10}


def test_the_policies_are_asked_for_at_each_publish():
    topic = PublishedTopic(FREE)
    topic.publisher.publish(asking((0, 100)))
    topic.policies = FIXED
    topic.publisher.publish(asking((0, 100)))
    topic.policies = MAXIMUM
    with pytest.raises(DeliveryDelayExceededError):
        topic.publisher.publish(asking((0, 100)))
    assert topic.stored() == [(0, 100), (0, 5_000)]


def test_a_publish_of_an_earlier_owner_is_not_counted():
    topic = PublishedTopic(FIXED)
    newer = MessageLog.open(topic.store, topic=topic.log.topic)
    with pytest.raises(LogFencedError):
        topic.publisher.publish(asking((0, 7)))
    assert topic.counted() == {"rejected": 0, "overridden": 0}
    assert newer.ledgers.counts() == MessageLog.find(topic.store, topic=topic.log.topic).ledgers.counts()


def test_a_publish_that_the_store_fails_overrides_nothing():
    topic = PublishedTopic(FIXED)
    topic.store.inject(Fault(topic.store.mutation_count, FaultKind.FAIL_BEFORE))
    with pytest.raises(StoreError):
        topic.publisher.publish(asking((0, 7)))
    assert topic.counted() == {"rejected": 0, "overridden": 0}
    topic.publisher.publish(asking((0, 7)))
    assert topic.counted() == {"rejected": 0, "overridden": 1}


def test_publishers_of_a_topic_count_together_and_topics_apart():
    counters = PublishCounters(cluster="here")
    for name in ("a", "b", "a"):
        PublishedTopic(FIXED, name=name, counters=counters).publisher.publish(asking((0, 7)))
    overridden = [sample for sample in counters.samples() if sample.name == OVERRIDDEN]
    assert [(sample.attributes["pulsar.topic"], sample.value) for sample in overridden] == [("a", 2), ("b", 1)]


def test_prometheus_sees_them_as_opentelemetry_would_export_them():
    registry = CollectorRegistry()
    topic = PublishedTopic(FIXED)
    registry.register(PublishCollector(topic.counters))
    topic.publisher.publish(asking((0, 7), (0, NO_DELAY), message_count=5))
    topic.policies = MAXIMUM
    with pytest.raises(DeliveryDelayExceededError):
        topic.publisher.publish(asking((0, 61)))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert {family.type for family in families} == {"counter"}
    labels = {"pulsar_cluster": "here", "pulsar_namespace": "public/default", "pulsar_topic": ORDERS}
    assert {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples} == {
        "pulsar_broker_topic_messages_delayed_rejected_total": (labels, 1.0),
        "pulsar_broker_topic_messages_fixed_delay_overridden_total": (labels, 5.0),
    }


def most_ranges_while_delivering(policies, *, count):
    """Publish one message a ms, of mixed delays, ack each as it comes; return the most ack ranges and the overridden.

    The ranges are looked at after every ack.
    """
    chance = random.Random(437)
    topic = PublishedTopic(policies)
    cursor = ManagedCursor.open(
        topic.store, topic=ORDERS, subscription="s", ledgers=topic.log.ledgers, config=CursorConfig(), now_ms=0
    )
    gate = DispatchGate(GateLimits(max_unpersisted_ack_record_bytes=0, max_unacked_messages=0))
    delays = TopicDelayIndex(tick_time_ms=50).open_view(cursor.is_acked)
    subscription = Subscription(topic.log, cursor, gate=gate, delays=delays)
    most = acked = 0
    for now_ms in range(100, count + 30_000, 100):
        if now_ms <= count:
            published = range(now_ms - 100, now_ms)
            topic.publisher.publish(asking(*[(at, at + chance.randrange(20_000)) for at in published]))
        for sent in subscription.dispatch("c", count, now_ms=now_ms):
            assert sent.message.deliver_at_ms <= now_ms
            subscription.ack(sent.position, now_ms=now_ms)
            most = max(most, cursor.deleted.range_count)
            acked += 1
    assert (acked, cursor.backlog, cursor.deleted.range_count) == (count, 0, 0)
    return most, topic.counted()["overridden"]


@pytest.mark.slow
def test_ten_thousand_messages_of_a_fixed_delay_leave_at_most_one_ack_range():
    ranges, overridden = most_ranges_while_delivering(FIXED, count=10_000)
    assert ranges <= 1
    assert overridden == 10_000
    ranges, overridden = most_ranges_while_delivering(FREE, count=10_000)
    assert ranges > 2_000
    assert overridden == 0


def test_a_topic_that_is_removed_is_forgotten_and_may_come_again():
    topic = PublishedTopic(FIXED)
    topic.publisher.publish(asking((0, 7)))
    topic.counters.add_topic("other")
    topic.counters.remove_topic(ORDERS)
    topic.counters.remove_topic(ORDERS)
    assert {sample.attributes["pulsar.topic"] for sample in topic.counters.samples()} == {"other"}
    assert len(topic.publisher.publish(asking((0, 7)))) == 1  # stored, and not counted
    assert {sample.attributes["pulsar.topic"] for sample in topic.counters.samples()} == {"other"}
    topic.counters.add_topic(ORDERS)
    assert [sample.value for sample in topic.counters.samples()] == [0, 0, 0, 0]
