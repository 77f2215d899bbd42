"""Publishing: under delivery-delay policies, and to many topics with one sync."""

import random

import pytest

from ackstate import CorruptStateError, MemoryStore, Message, SqliteStore
from ackstate.limits import DeliveryDelayExceededError, EffectiveDelayedDelivery
from ackstate.message import NO_DELAY
from ackstate.topic import CounterSample, MessageLog, PublishCounters, TopicPublisher, publish_all
from topics import NumberedTopic

ORDERS = "persistent://public/default/orders"
REJECTED = "pulsar.broker.topic.messages.delayed.rejected"
OVERRIDDEN = "pulsar.broker.topic.messages.fixed.delay.overridden"

FREE = EffectiveDelayedDelivery()
FIXED = EffectiveDelayedDelivery(fixed_delivery_delay_ms=5_000)
MAXIMUM = EffectiveDelayedDelivery(max_delivery_delay_ms=60)
INACTIVE = EffectiveDelayedDelivery(active=False, max_delivery_delay_ms=60, fixed_delivery_delay_ms=5_000)


class PublishedTopic:
    """A topic with one publisher, whose policies can be changed."""

    def __init__(self, policies=FREE, *, name=ORDERS, counters=None, log=None):
        self.policies = policies
        self.log = log or MessageLog.open(MemoryStore(), topic=name)
        self.counters = counters or PublishCounters(cluster="here")
        self.publisher = TopicPublisher(self.log, topic=name, policies=lambda: self.policies, counters=self.counters)

    def publish(self, *times, message_count=1):
        return self.publisher.publish(asking(*times, message_count=message_count))

    def stored(self):
        """The (publish, deliver_at) times of every message in the log."""
        last = self.log.ledgers.last_confirmed
        positions = [last._replace(entry_id=entry) for entry in range(last.entry_id + 1)]
        return [(message.publish_time_ms, message.deliver_at_ms) for message in self.log.read(positions)]

    def counted(self):
        values = {sample.name: sample.value for sample in self.counters.samples()}
        return values[REJECTED], values[OVERRIDDEN]


def asking(*times, message_count=1):
    return [
        Message(b"x", key=b"k", deliver_at_ms=asked, publish_time_ms=publish, message_count=message_count)
        for publish, asked in times
    ]


@pytest.mark.parametrize(
    ("policies", "stored", "overridden"),
    [
        (FREE, [NO_DELAY, 0, 62, 7], 0),
        (MAXIMUM, [NO_DELAY, 0, 62, 7], 0),
        (FIXED, [5_000, 5_001, 5_002, 5_003], 3),
        (INACTIVE, [NO_DELAY] * 4, 0),
    ],
)
def test_the_policies_say_when_a_message_is_delivered(policies, stored, overridden):
    topic, asked = PublishedTopic(policies), asking((0, NO_DELAY), (1, 0), (2, 62), (3, 7))
    positions = topic.publisher.publish(asked)
    assert list(topic.log.read(positions)) == [
        each._replace(deliver_at_ms=at) for each, at in zip(asked, stored, strict=True)
    ]
    assert topic.counted() == (0, overridden)


def test_one_rejected_message_keeps_all_out_before_anything_is_stored():
    topic = PublishedTopic(MAXIMUM)
    before = topic.log.store.mutation_count
    with pytest.raises(DeliveryDelayExceededError) as caught:
        topic.publish((0, NO_DELAY), (0, 60), (0, 61), (0, 10), (5, 66))
    assert str(caught.value) == "Exceeds max allowed delivery delay of 60 milliseconds"
    assert topic.counted() == (2, 0)
    for wrong, error in ((asking((0, 61), (-1, 0)), ValueError), ([*asking((0, 61)), None], TypeError)):
        with pytest.raises(error):
            topic.publisher.publish(wrong)
    assert (topic.log.store.mutation_count, topic.counted()) == (before, (2, 0))


def test_publishers_of_a_topic_count_together_and_a_topic_that_is_removed_is_forgotten():
    counters = PublishCounters(cluster="here")
    topics = [PublishedTopic(FIXED, name=name, counters=counters) for name in (ORDERS, "b", ORDERS)]
    for topic in topics:
        topic.publish((0, 7))

    def sample(name, value, topic=ORDERS, namespace="public/default"):
        attributes = {"pulsar.cluster": "here", "pulsar.namespace": namespace, "pulsar.topic": topic}
        return CounterSample(name, attributes, value)

    of_b = [sample(REJECTED, 0, "b", ""), sample(OVERRIDDEN, 1, "b", "")]
    assert counters.samples() == [sample(REJECTED, 0), sample(OVERRIDDEN, 2), *of_b]
    for _ in range(2):
        counters.remove_topic(ORDERS)
    assert len(topics[0].publish((0, 7))) == 1  # stored, and not counted
    assert counters.samples() == of_b
    counters.add_topic(ORDERS)
    assert counters.samples() == [*of_b, sample(REJECTED, 0), sample(OVERRIDDEN, 0)]


@pytest.mark.parametrize(("policies", "is_one_range"), [(FIXED, True), (FREE, False)])
def test_messages_of_a_fixed_delay_leave_at_most_one_ack_range(policies, is_one_range):
    """One message a ms, of mixed delays, each acked as it comes; the ranges are looked at after every ack."""
    chance, count, ranges = random.Random(437), 2_000, []
    topic = NumberedTopic(tick_time_ms=50, max_unpersisted_ack_record_bytes=0, max_unacked_messages=0)
    published = PublishedTopic(policies, log=topic.log)
    for now_ms in range(100, count + 30_000, 100):
        if now_ms <= count:
            published.publish(*[(at, at + chance.randrange(20_000)) for at in range(now_ms - 100, now_ms)])
        for sent in topic.subscription.dispatch("c", count, now_ms=now_ms):
            assert sent.message.deliver_at_ms <= now_ms
            topic.subscription.ack(sent.position, now_ms=now_ms)
            ranges.append(topic.cursor.deleted.range_count)
    assert (len(ranges), topic.cursor.backlog) == (count, 0)
    assert max(ranges) <= 1 if is_one_range else max(ranges) > 400


# `publish_all`


def batch(*payloads):
    return [Message(payload) for payload in payloads]


def payloads(log):
    positions = [
        (ledger_id, entry_id) for ledger_id, count in log.ledgers.counts().items() for entry_id in range(count)
    ]
    return [message.payload for message in log.read(positions)]


@pytest.fixture(params=[MemoryStore, SqliteStore])
def store(request, tmp_path):
    made = MemoryStore() if request.param is MemoryStore else SqliteStore(tmp_path / "store")
    yield made
    made.close()


def logs_of(store, *topics):
    return [MessageLog.open(store, topic=topic, entries_per_ledger_max=3) for topic in topics]


def test_logs_of_two_stores_and_one_log_twice_are_refused(store):
    one, two = logs_of(store, "one", "two")
    (other,) = logs_of(MemoryStore(), "other")
    for batches in ([(one, batch(b"a")), (other, batch(b"b"))], [(one, batch(b"a")), (one, batch(b"b"))]):
        with pytest.raises(ValueError, match="must share a store, and each must come once"):
            publish_all(batches)
    with pytest.raises(TypeError, match=r"messages\[0\] must be a Message"):
        publish_all([(one, batch(b"a")), (two, [b"b"])])
    assert payloads(one) == payloads(two) == []


def test_a_damaged_store_answers_each_topic_with_its_own_error(monkeypatch):
    def fail(*_):
        raise damage

    store, damage = MemoryStore(), CorruptStateError("log", offset=7, expected="a record", found="zeros")
    logs = logs_of(store, "a", "b")
    monkeypatch.setattr(type(store.ledgers), "_append_many", fail)
    first, second = publish_all([(log, batch(b"x")) for log in logs])
    assert str(first) == str(second) == str(damage)
    assert first is not second
    assert (first.offset, first.expected) == (7, "a record")
