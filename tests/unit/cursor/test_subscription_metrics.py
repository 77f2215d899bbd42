"""The metrics of subscriptions: each is a number of `stats`, times are timestamps, and none hides another."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ackstate import (
    CursorClosedError,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    Start,
    Subscription,
    SubscriptionType,
    Topics,
    TopicSettings,
)
from ackstate.dispatch import RuleStats
from ackstate.limits import BrokerLimit, DispatchGate, GateLimits, Rule
from ackstate.metrics import CursorCollector
from ackstate.topic import MessageLog
from topics import NumberedTopic

ORDERS = "persistent://public/default/orders"
LABELS = {
    "namespace": "public/default",
    "ledger_name": "public/default/persistent/orders",
    "topic": ORDERS,
    "cursor_name": "billing",
    "subscription": "billing",
}
NUMBERS = {
    "pulsar_subscription_delayed": "delayed_entries",
    "pulsar_subscription_in_replay": "replay_entries",
    "pulsar_subscription_unacked_messages": "unacked_messages",
    "pulsar_subscription_consumers_count": "consumer_count",
    "pulsar_out_messages_total": "sent_messages",
    "ackstate_subscription_redelivered_messages_total": "redelivered_messages",
    "ackstate_subscription_dead_lettered_messages_total": "dead_lettered_messages",
}
SINCE = "ackstate_subscription_blocked_since_timestamp_seconds"
OLDEST = "ackstate_subscription_oldest_unacked_timestamp_seconds"


class Scraped:
    """A collector, and the samples of the subscription `billing` of `ORDERS`."""

    def __init__(self, subscription=None):
        self.collector, self.registry = CursorCollector(), CollectorRegistry()
        self.registry.register(self.collector)
        if subscription is not None:
            self.collector.add_subscription(subscription, topic=ORDERS, name="billing")

    def samples(self):
        found = {}
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                labels = dict(sample.labels)
                rule = labels.pop("rule", None)
                if labels == LABELS:
                    assert (sample.name, rule) not in found
                    found[sample.name, rule] = sample.value
        return found

    def value(self, name, rule=None):
        return self.samples().get((name, rule and rule.value))

    @property
    def unreadable(self):
        return self.registry.get_sample_value("ackstate_cursors_unreadable")


def test_each_number_is_the_one_of_stats():
    topic = NumberedTopic()
    # No two alike, so that none can stand for another.
    stats = replace(
        topic.subscription.stats(),
        **{field: number for number, field in enumerate(NUMBERS.values(), start=3)},
        rules=tuple(RuleStats(rule, False, None, number) for number, rule in enumerate(Rule, start=20)),
    )
    stats = replace(stats, cursor=replace(stats.cursor, backlog=100))
    topic.subscription.stats = lambda: stats
    scraped = Scraped(topic.subscription)
    for name, field in NUMBERS.items():
        assert scraped.value(name) == getattr(stats, field), name
    for number, rule in enumerate(Rule, start=20):
        assert scraped.value("ackstate_subscription_blocks_total", rule) == number
        assert scraped.value("ackstate_subscription_blocked", rule) == 0
    assert scraped.value("pulsar_subscription_back_log") == 100
    assert scraped.value("pulsar_subscription_back_log_no_delayed") == 97
    names = {name for name, _ in scraped.samples()}
    assert len(names) == len(NUMBERS) + 2 + 3


def test_a_limit_that_blocks_is_named_with_the_time_it_closed():
    topic = NumberedTopic(max_unacked_messages=4)
    scraped = Scraped(topic.subscription)
    topic.publish(9)
    assert len(topic.dispatch(now_ms=5_000)) == 4
    topic.dispatch(now_ms=7_500)
    rule = Rule.UNACKED_MESSAGES
    assert scraped.value("ackstate_subscription_blocked", rule) == 1
    assert scraped.value(SINCE, rule) == 5
    assert scraped.value("pulsar_subscription_blocked_on_unacked_messages") == 1
    topic.ack(0, 1, 2, now_ms=8_000)
    assert scraped.value("ackstate_subscription_blocked", rule) == 0
    assert scraped.value(SINCE, rule) is None
    assert scraped.value("ackstate_subscription_blocks_total", rule) == 1
    assert scraped.value("pulsar_subscription_blocked_on_unacked_messages") == 0


def test_of_the_consumers_at_their_limit_the_one_closed_longest_is_reported():
    topic = NumberedTopic(max_unacked_messages_per_consumer=2)
    scraped = Scraped(topic.subscription)
    topic.publish(9)
    rule = Rule.CONSUMER_UNACKED_MESSAGES
    for consumer, now_ms in (("a", 3_000), ("b", 4_000)):
        topic.dispatch(consumer, now_ms=now_ms)
    assert scraped.value(SINCE, rule) == 3
    assert scraped.value("pulsar_subscription_blocked_on_unacked_messages") == 0  # as in Pulsar
    topic.subscription.consumer_closed("a")
    assert scraped.value(SINCE, rule) == 4
    topic.subscription.consumer_closed("b")
    assert scraped.value("ackstate_subscription_blocked", rule) == 0
    assert scraped.value("ackstate_subscription_blocks_total", rule) == 2


def test_the_limit_of_the_broker_blocks():
    log = MessageLog.open(MemoryStore(), topic="t")
    cursor = ManagedCursor.open(log.store, topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
    gate = DispatchGate(GateLimits(), broker=BrokerLimit(2, blocked_share=0.5))
    subscription = Subscription(log, cursor, gate=gate)
    scraped = Scraped(subscription)
    log.publish([Message(b"")] * 9)
    for now_ms in (1_000, 2_000):
        subscription.dispatch("a", 9, now_ms=now_ms)
    assert scraped.value(SINCE, Rule.BROKER_UNACKED_MESSAGES) == 1
    assert scraped.value("pulsar_subscription_blocked_on_unacked_messages") == 1


def test_a_restart_above_a_limit_closes_it_when_the_cursor_is_opened():
    store, settings = MemoryStore(), TopicSettings(limits=GateLimits(max_unacked_ranges=2))
    with Topics(store) as topics:
        topic = topics.open("t", now_ms=0)
        subscription = topic.subscribe("s", now_ms=0)
        positions = topic.publish([Message(b"")] * 9, now_ms=1)
        subscription.dispatch("a", 9, now_ms=1)
        subscription.ack_many(positions[1::2], now_ms=1)
    restarted = Topics(store, settings=settings).open("t", now_ms=6_000).subscribe("s", now_ms=7_000)
    assert [reason.since_ms for reason in restarted.why_blocked()] == [7_000]
    scraped = Scraped(restarted)
    assert scraped.value("ackstate_subscription_blocked", Rule.UNACKED_RANGES) == 1
    assert scraped.value(SINCE, Rule.UNACKED_RANGES) == 7


def test_a_subscription_without_limits_has_no_rules():
    topic = NumberedTopic(SubscriptionType.EXCLUSIVE)
    scraped = Scraped(topic.subscription)
    assert scraped.value("ackstate_subscription_blocked", Rule.UNACKED_MESSAGES) is None
    assert scraped.value("pulsar_subscription_unacked_messages") == 0


class CountingLog:
    """The messages of a log, and how often one was read."""

    def __init__(self, topic):
        self.read_count, self._read = 0, topic.log.read
        topic.log.read = self.read

    def read(self, positions):
        self.read_count += 1
        return self._read(positions)


def published_at(topic, *times_ms):
    topic.positions += topic.log.publish([Message(b"", publish_time_ms=time_ms) for time_ms in times_ms])


def test_the_oldest_unacked_message_is_read_once():
    topic = NumberedTopic()
    scraped = Scraped(topic.subscription)
    assert scraped.value(OLDEST) is None
    published_at(topic, 1_500, 2_500, 0)
    topic.dispatch()
    counting = CountingLog(topic)
    assert (scraped.value(OLDEST), scraped.value(OLDEST), counting.read_count) == (1.5, 1.5, 1)
    topic.ack(1)
    assert (scraped.value(OLDEST), counting.read_count) == (1.5, 1)
    topic.ack(0)
    assert scraped.value(OLDEST) is None  # its producer gave no time
    assert scraped.value("pulsar_subscription_back_log") == 1
    topic.ack(2)
    assert scraped.value(OLDEST) is None
    assert scraped.value("pulsar_subscription_back_log") == 0
    assert counting.read_count == 2


def test_a_subscription_that_cannot_be_read_is_counted_and_the_others_stay():
    topic, other = NumberedTopic(), NumberedTopic()
    scraped = Scraped(topic.subscription)
    scraped.collector.add_subscription(other.subscription, topic="t", name="other")

    def fail():
        raise RuntimeError("the numbers are gone")

    other.subscription.stats = fail
    assert (scraped.value("pulsar_subscription_unacked_messages"), scraped.unreadable) == (0, 1)


def test_a_closed_or_dropped_subscription_leaves():
    topic = NumberedTopic()
    scraped = Scraped(topic.subscription)
    scraped.collector.add_subscription(NumberedTopic().subscription, topic="t", name="dropped")
    assert scraped.samples()
    topic.subscription.close(now_ms=0)
    with pytest.raises(CursorClosedError):
        topic.subscription.stats()
    gc.collect()
    assert not scraped.samples()
    assert not scraped.collector._exported
    assert scraped.unreadable == 0


def test_all_subscriptions_of_topics_are_exported_also_later_ones():
    topics, scraped = Topics(MemoryStore()), Scraped()

    def unacked():
        found = {}
        for family in text_string_to_metric_families(generate_latest(scraped.registry).decode()):
            for sample in family.samples:
                if sample.name == "pulsar_subscription_unacked_messages":
                    found[sample.labels["topic"], sample.labels["subscription"]] = sample.value
        return found

    for _ in range(2):
        scraped.collector.add_topics(topics)
    assert unacked() == {}
    orders = topics.open(ORDERS, now_ms=0)
    billing = orders.subscribe("billing", start=Start.EARLIEST, now_ms=0)
    orders.publish([Message(b"x", publish_time_ms=5_000)] * 2, now_ms=0)
    billing.dispatch("ann", 1, now_ms=0)
    topics.open("t", now_ms=0).subscribe("s", now_ms=0)
    assert unacked() == {(ORDERS, "billing"): 1, ("t", "s"): 0}
    assert scraped.value(OLDEST) == 5
    exported = dict(scraped.collector._of_topics)
    assert unacked() == {(ORDERS, "billing"): 1, ("t", "s"): 0}
    assert scraped.collector._of_topics == exported  # So that the oldest message is not read at every scrape.
    billing.close(now_ms=0)
    assert (unacked(), scraped.unreadable) == ({("t", "s"): 0}, 0)
    orders.subscribe("billing", now_ms=0)
    assert unacked() == {(ORDERS, "billing"): 0, ("t", "s"): 0}
    alone = NumberedTopic()  # Another subscription under the names of one of those.
    stats = replace(alone.subscription.stats(), unacked_messages=7)
    alone.subscription.stats = lambda: stats
    scraped.collector.add_subscription(alone.subscription, topic="t", name="s")
    assert unacked() == {(ORDERS, "billing"): 0, ("t", "s"): 7}
    del topics, orders, billing
    gc.collect()
    assert unacked() == {("t", "s"): 7}
