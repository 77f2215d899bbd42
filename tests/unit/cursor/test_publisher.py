"""Publishing: under delivery-delay policies, and to many topics with one sync."""

from __future__ import annotations

import random

import pytest

from ackstate import (
    CorruptStateError,
    LedgerFencedError,
    LogFencedError,
    MemoryStore,
    Message,
    SqliteStore,
    StoreError,
)
from ackstate.limits import DeliveryDelayExceededError, EffectiveDelayedDelivery
from ackstate.message import NO_DELAY
from ackstate.stores.memory import Fault, FaultKind
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


def test_the_policies_are_asked_for_at_each_publish_and_a_batch_counts_its_messages():
    topic = PublishedTopic(FREE)
    topic.publish((0, 100))
    topic.policies = FIXED
    topic.publish((0, 7), (0, NO_DELAY), message_count=10)
    assert (topic.stored(), topic.counted()) == ([(0, 100), (0, 5_000), (0, 5_000)], (0, 10))
    topic.policies = MAXIMUM
    with pytest.raises(DeliveryDelayExceededError):
        topic.publish((0, 61), (0, 60), message_count=4)
    assert (len(topic.stored()), topic.counted()) == (3, (4, 10))


def test_a_publish_that_is_not_stored_overrides_nothing():
    topic = PublishedTopic(FIXED)
    topic.log.store.inject(Fault(topic.log.store.mutation_count, FaultKind.FAIL_BEFORE))
    with pytest.raises(StoreError):
        topic.publish((0, 7))
    assert topic.counted() == (0, 0)
    topic.publish((0, 7))
    newer = MessageLog.open(topic.log.store, topic=ORDERS)
    with pytest.raises(LogFencedError):
        topic.publish((0, 7))
    assert topic.counted() == (0, 1)
    assert newer.ledgers.counts() == MessageLog.find(topic.log.store, topic=ORDERS).ledgers.counts()


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


def test_topics_share_one_append(store, monkeypatch):
    appended, append_many = [], type(store.ledgers)._append_many
    monkeypatch.setattr(
        type(store.ledgers), "_append_many", lambda *args: appended.append(len(args[1])) or append_many(*args)
    )
    one, two, three = logs_of(store, "one", "two", "three")
    outcomes = publish_all([(one, batch(b"a", b"b")), (two, batch(b"c")), (three, [])])
    assert appended == [2]
    assert [len(each) for each in outcomes] == [2, 1, 0]
    assert [payloads(each) for each in (one, two, three)] == [[b"a", b"b"], [b"c"], []]
    assert [log.ledgers.last_confirmed for log in (one, two)] == [outcomes[0][-1], outcomes[1][-1]]
    # The next batches begin a ledger where they do not fit.
    outcomes = publish_all([(two, batch(b"d")), (one, batch(b"e", b"f"))])
    assert [payloads(each) for each in (one, two)] == [[b"a", b"b", b"e", b"f"], [b"c", b"d"]]
    assert outcomes[1][0].ledger_id > outcomes[0][0].ledger_id
    for log in (one, two):
        assert MessageLog.find(store, topic=log.topic).ledgers.counts() == log.ledgers.counts()


def test_a_log_that_refuses_does_not_keep_the_others_back(store):
    one, two, three = logs_of(store, "one", "two", "three")
    MessageLog.open(store, topic="one")
    limited = PublishedTopic(MAXIMUM, log=three).publisher
    batches = [(one, batch(b"a")), (two, batch(b"b")), (limited, asking((0, 61)))]
    fenced, stored, refused = publish_all(batches)
    assert isinstance(fenced, LogFencedError)
    assert isinstance(fenced.__cause__, LedgerFencedError)
    assert isinstance(refused, DeliveryDelayExceededError)
    assert [payloads(two), payloads(three)] == [[b"b"], []]
    assert [position.ledger_id for position in stored] == [two.ledgers.current_ledger_id]


def test_logs_of_two_stores_and_one_log_twice_are_refused(store):
    one, two = logs_of(store, "one", "two")
    (other,) = logs_of(MemoryStore(), "other")
    for batches in ([(one, batch(b"a")), (other, batch(b"b"))], [(one, batch(b"a")), (one, batch(b"b"))]):
        with pytest.raises(ValueError, match="must share a store, and each must come once"):
            publish_all(batches)
    with pytest.raises(TypeError, match=r"messages\[0\] must be a Message"):
        publish_all([(one, batch(b"a")), (two, [b"b"])])
    assert payloads(one) == payloads(two) == []


def test_a_failed_append_is_the_error_of_each_and_counts_nothing():
    store = MemoryStore()
    one, two = logs_of(store, "one", "two")
    for mutation in range(2):
        store.inject(Fault(store.mutation_count + mutation, FaultKind.FULL))
    errors = publish_all([(one, batch(b"a")), (two, batch(b"b"))])
    assert [isinstance(error, StoreError) for error in errors] == [True, True]
    assert errors[0] is not errors[1]
    assert [log.ledgers.counts() for log in (one, two)] == [{1: 0}, {2: 0}]
    publish_all([(one, batch(b"c")), (two, batch(b"d"))])
    assert [payloads(each) for each in (one, two)] == [[b"c"], [b"d"]]


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
