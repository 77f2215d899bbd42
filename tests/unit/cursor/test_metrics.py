"""Prometheus reads of every open cursor, subscription and topic what `stats` says, and none hides another."""

import gc
from dataclasses import fields, replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ackstate import (
    CursorClosedError,
    CursorConfig,
    GateLimits,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    Start,
    Topics,
    TopicSettings,
)
from ackstate.cursor import CursorStats
from ackstate.dispatch import RuleStats
from ackstate.limits import Rule
from ackstate.metrics import BacklogCollector, CursorCollector, PublishCollector
from ackstate.topic import BacklogReport, PublishCounters
from topics import NumberedTopic

ORDERS = "persistent://public/default/orders"
CURSOR = {"namespace": "public/default", "ledger_name": "public/default/persistent/orders", "cursor_name": "billing"}
SUBSCRIPTION = {**CURSOR, "topic": ORDERS, "subscription": "billing"}
OF_CURSOR = {
    "pulsar_ml_cursor_nonContiguousDeletedMessagesRange": "range_count",
    "pulsar_ml_cursor_persistLedgerSucceed": "ledger_write_count",
    "pulsar_ml_cursor_persistLedgerErrors": "ledger_error_count",
    "pulsar_ml_cursor_persistZookeeperSucceed": "metadata_write_count",
    "pulsar_ml_cursor_persistZookeeperErrors": "metadata_error_count",
    "pulsar_ml_cursor_writeLedgerLogicalSize": "ledger_bytes_written",
    "ackstate_cursor_batches_cut": "batches_cut",
    "ackstate_cursor_young_age_ms": "young_age_ms",
    "ackstate_cursor_promotions_total": "promotion_count",
    "ackstate_cursor_promoted_messages_total": "promoted_message_count",
    "ackstate_cursor_ranges": "range_count",
    "ackstate_cursor_record_bytes": "record_bytes",
    "ackstate_cursor_unpersisted_record_bytes": "unpersisted_record_bytes",
    "ackstate_cursor_batches_unwritten": "batches_unwritten",
    "ackstate_cursor_truncations_total": "truncation_count",
    "ackstate_cursor_journal_bytes": "journal_bytes",
    "ackstate_cursor_snapshots_total": "snapshot_count",
    "ackstate_cursor_persists_total": "persist_count",
    "ackstate_cursor_persisted_bytes_total": "bytes_persisted",
}
OF_SUBSCRIPTION = {
    "pulsar_subscription_delayed": "delayed_entries",
    "pulsar_subscription_in_replay": "replay_entries",
    "pulsar_subscription_unacked_messages": "unacked_messages",
    "pulsar_subscription_consumers_count": "consumer_count",
    "pulsar_out_messages_total": "sent_messages",
    "ackstate_subscription_redelivered_messages_total": "redelivered_messages",
    "ackstate_subscription_dead_lettered_messages_total": "dead_lettered_messages",
}
UNACKED, SINCE = "pulsar_subscription_unacked_messages", "ackstate_subscription_blocked_since_timestamp_seconds"
BLOCKED, BLOCKED_AS_PULSAR = "ackstate_subscription_blocked", "pulsar_subscription_blocked_on_unacked_messages"
OLDEST = "ackstate_subscription_oldest_unacked_timestamp_seconds"
AT_RISK = "ackstate_cursor_redelivery_if_crashed"


class Scraped(CursorCollector):
    """A collector with a registry, and perhaps the subscription `billing` of `ORDERS`."""

    def __init__(self, subscription=None):
        super().__init__()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        if subscription is not None:
            self.add(subscription, topic=ORDERS, subscription="billing")

    def samples(self):
        """Every sample of a scrape, (name, labels) -> value; fails if one is there twice."""
        samples = {}
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in samples
                samples[key] = sample.value
        return samples

    def value(self, name, rule=None):
        """A number of the subscription."""
        labels = SUBSCRIPTION if rule is None else {**SUBSCRIPTION, "rule": rule.value}
        return self.samples().get((name, frozenset(labels.items())))

    def of_all(self, name, *labels):
        """The values of all samples of a name, by labels."""
        return {tuple(dict(key)[label] for label in labels): value for (each, key), value in self.samples().items()
                if each == name}  # fmt: skip


def open_cursor(subscription="billing", *, store=None):
    return ManagedCursor.open(
        store or MemoryStore(), topic=ORDERS, subscription=subscription, ledgers=LedgerMap.from_counts({3: 1_000}),
        config=CursorConfig(flush_interval_ms=0), now_ms=0,
    )  # fmt: skip


def test_each_number_is_the_one_of_stats():
    topic = NumberedTopic()
    # No two alike, so that none can stand for another.
    of_cursor = CursorStats(**{field.name: number for number, field in enumerate(fields(CursorStats), start=1)})
    of_cursor = replace(of_cursor, backlog=1_000)
    stats = replace(
        topic.subscription.stats(),
        **{field: number for number, field in enumerate(OF_SUBSCRIPTION.values(), start=101)},
        rules=tuple(RuleStats(rule, False, None, number) for number, rule in enumerate(Rule, start=200)),
        cursor=of_cursor,
    )
    topic.subscription.stats = lambda: stats
    expected = {(name, frozenset(CURSOR.items())): getattr(of_cursor, field) for name, field in OF_CURSOR.items()}
    for cause in ("unwritten", "young", "cut"):
        expected[AT_RISK, frozenset({**CURSOR, "cause": cause}.items())] = getattr(of_cursor, f"redelivery_{cause}")
    of_subscription = {name: getattr(stats, field) for name, field in OF_SUBSCRIPTION.items()}
    of_subscription["pulsar_subscription_back_log"] = of_cursor.backlog
    of_subscription["pulsar_subscription_back_log_no_delayed"] = of_cursor.backlog - 101
    of_subscription[BLOCKED_AS_PULSAR] = 0
    expected |= {(name, frozenset(SUBSCRIPTION.items())): value for name, value in of_subscription.items()}
    for number, rule in enumerate(Rule, start=200):
        labels = frozenset({**SUBSCRIPTION, "rule": rule.value}.items())
        expected |= {("ackstate_subscription_blocks_total", labels): number, (BLOCKED, labels): 0}
    # And nothing of Pulsar's that is not counted here.
    assert Scraped(topic.subscription).samples() == {**expected, ("ackstate_cursors_unreadable", frozenset()): 0}


def test_names_are_written_as_pulsar_writes_them():
    scraped, cursors = Scraped(), [open_cursor() for _ in range(4)]
    labels = [
        ("acme/a b", "acme/a b/persistent/a+b%2Fc%7Ed", "x+y%2Fz*", "persistent://acme/a b/a b/c~d", "x y/z*"),
        ("acme/shop", "acme/shop/non-persistent/t", "s", "non-persistent://acme/shop/t", "s"),
        ("", 'any "text"\n', "%5C", 'any "text"\n', "\\"),
        ("", "persistent://acme/shop", "s", "persistent://acme/shop", "s"),
    ]
    for cursor, (*_, topic, subscription) in zip(cursors, labels, strict=True):
        scraped.add(cursor, topic=topic, subscription=subscription)
    found = scraped.of_all(
        "pulsar_subscription_back_log", "namespace", "ledger_name", "cursor_name", "topic", "subscription"
    )
    assert found.keys() == set(labels)


def test_what_is_closed_dropped_or_opened_again_leaves_and_what_cannot_be_read_hides_no_other():
    def fail():
        raise RuntimeError("the numbers are gone")

    scraped, store = Scraped(), MemoryStore()
    cursors = {name: open_cursor(name, store=store) for name in ("closed", "dropped", "open", "broken", "again")}
    topic, names = NumberedTopic(), list(cursors)
    for name in names:
        scraped.add(cursors[name], topic=ORDERS, subscription=name)
    scraped.add(topic.subscription, topic=ORDERS, subscription="billing")
    scraped.add(NumberedTopic().subscription, topic=ORDERS, subscription="dropped too")
    cursors["closed"].close(now_ms=0)
    topic.subscription.close(now_ms=0)
    with pytest.raises(CursorClosedError):
        topic.subscription.stats()
    cursors["broken"].stats = fail
    cursors["again"].ack_entries(3, [1, 3], now_ms=0)
    cursors["again"] = open_cursor("again", store=store)
    scraped.add(cursors["again"], topic=ORDERS, subscription="again")
    del cursors["dropped"]
    gc.collect()
    assert scraped.of_all("ackstate_cursor_ranges", "cursor_name") == {("open",): 0, ("again",): 0}
    assert scraped.of_all("ackstate_cursors_unreadable") == {(): 1}
    assert {labels.subscription for labels in scraped._added} == {"open", "again", "broken"}


# Limits


def test_a_limit_that_blocks_is_named_with_the_time_it_closed():
    topic, rule = NumberedTopic(max_unacked_messages=4), Rule.UNACKED_MESSAGES
    scraped = Scraped(topic.subscription)
    topic.publish(9)
    assert len(topic.dispatch(now_ms=5_000)) == 4
    topic.dispatch(now_ms=7_500)
    assert [scraped.value(BLOCKED, rule), scraped.value(SINCE, rule), scraped.value(BLOCKED_AS_PULSAR)] == [1, 5, 1]
    topic.ack(0, 1, 2, now_ms=8_000)
    assert [scraped.value(BLOCKED, rule), scraped.value(SINCE, rule), scraped.value(BLOCKED_AS_PULSAR)] == [0, None, 0]
    assert scraped.value("ackstate_subscription_blocks_total", rule) == 1


def test_a_restart_above_a_limit_closes_it_when_the_cursor_is_opened():
    store, settings = MemoryStore(), TopicSettings(limits=GateLimits(max_unacked_ranges=2))
    with Topics(store) as topics:
        topic = topics.open("t", now_ms=0)
        subscription = topic.subscribe("s", now_ms=0)
        positions = topic.publish([Message(b"")] * 9, now_ms=1)
        subscription.ack_many(positions[1::2], now_ms=1)
    restarted = Topics(store, settings=settings).open("t", now_ms=6_000).subscribe("s", now_ms=7_000)
    assert [reason.since_ms for reason in restarted.why_blocked()] == [7_000]
    scraped = Scraped(restarted)
    assert (scraped.value(BLOCKED, Rule.UNACKED_RANGES), scraped.value(SINCE, Rule.UNACKED_RANGES)) == (1, 7)


# The oldest message, and all topics


def test_the_oldest_unacked_message_is_read_once_and_one_that_cannot_be_read_hides_no_number():
    topic, reads = NumberedTopic(), []
    scraped, read = Scraped(topic.subscription), topic.log.read
    assert scraped.value(OLDEST) is None
    topic.positions = topic.log.publish([Message(b"", publish_time_ms=time_ms) for time_ms in (1_500, 2_500, 0)])
    topic.dispatch()
    topic.log.read = lambda _: read([Position(99, 0)])
    assert (scraped.value(OLDEST), scraped.value("pulsar_subscription_back_log")) == (None, 3)
    assert scraped.of_all("ackstate_cursors_unreadable") == {(): 0}
    topic.log.read = lambda positions: reads.append(positions) or read(positions)
    assert (scraped.value(OLDEST), scraped.value(OLDEST), len(reads)) == (1.5, 1.5, 1)
    topic.ack(1)
    assert (scraped.value(OLDEST), len(reads)) == (1.5, 1)
    topic.ack(0)
    assert scraped.value(OLDEST) is None  # its producer gave no time
    topic.ack(2)
    assert (scraped.value(OLDEST), scraped.value("pulsar_subscription_back_log"), len(reads)) == (None, 0, 2)


def test_all_subscriptions_of_topics_are_exported_also_later_ones():
    topics, scraped = Topics(MemoryStore()), Scraped()

    def unacked():
        return scraped.of_all(UNACKED, "topic", "subscription")

    for _ in range(2):
        scraped.add_topics(topics)
    assert unacked() == {}
    orders = topics.open(ORDERS, now_ms=0)
    billing = orders.subscribe("billing", start=Start.EARLIEST, now_ms=0)
    orders.publish([Message(b"x", publish_time_ms=5_000)] * 2, now_ms=0)
    billing.dispatch("ann", 1, now_ms=0)
    topics.open("t", now_ms=0).subscribe("s", now_ms=0)
    assert unacked() == {(ORDERS, "billing"): 1, ("t", "s"): 0}
    assert scraped.value(OLDEST) == 5
    orders.log.read, read = None, orders.log.read  # The oldest message is not read at every scrape.
    assert (unacked(), scraped.value(OLDEST)) == ({(ORDERS, "billing"): 1, ("t", "s"): 0}, 5)
    orders.log.read = read
    billing.close(now_ms=0)
    assert unacked() == {("t", "s"): 0}
    orders.subscribe("billing", now_ms=0)
    assert unacked() == {(ORDERS, "billing"): 0, ("t", "s"): 0}
    alone = NumberedTopic()  # Another subscription under the names of one of those.
    alone.publish(7)
    alone.dispatch()
    scraped.add(alone.subscription, topic="t", subscription="s")
    assert unacked() == {(ORDERS, "billing"): 0, ("t", "s"): 7}
    del topics, orders, billing
    gc.collect()
    assert unacked() == {("t", "s"): 7}


# Publishes and backlogs


def test_the_counters_of_publishes_are_named_as_opentelemetry_would_export_them():
    registry, counters = CollectorRegistry(), PublishCounters(cluster="here")
    registry.register(PublishCollector(counters))
    counters.add_topic(ORDERS)
    counters.count("pulsar.broker.topic.messages.fixed.delay.overridden", topic=ORDERS, message_count=5)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert {family.type for family in families} == {"counter"}
    labels = {"pulsar_cluster": "here", "pulsar_namespace": "public/default", "pulsar_topic": ORDERS}
    assert {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples} == {
        "pulsar_broker_topic_messages_delayed_rejected_total": (labels, 0),
        "pulsar_broker_topic_messages_fixed_delay_overridden_total": (labels, 5),
    }


def test_a_topic_is_exported_with_its_limit_and_the_subscription_that_holds_it():
    registry, collector = CollectorRegistry(), BacklogCollector()
    registry.register(collector)
    collector.add(ORDERS, lambda: BacklogReport(7, 700, 9, 900, "slow", Position(1, 2), ("x",), 600))
    collector.add("refunds", lambda: BacklogReport(0, 0, 9, 90, None, None, (), None, retained_ledger_id=17))
    collector.add("damaged", lambda: 1 // 0)
    names = ["pulsar_storage_size", "pulsar_storage_backlog_size", "pulsar_storage_backlog_quota_limit",
             "ackstate_topic_backlog_exceeded", "ackstate_topic_unreadable_subscriptions",
             "ackstate_topic_retained_ledger"]  # fmt: skip
    orders, refunds = {"namespace": "public/default", "topic": ORDERS}, {"namespace": "", "topic": "refunds"}
    value = registry.get_sample_value
    assert [value(name, orders) for name in names] == [900, 700, 600, 1, 1, None]
    assert [value(name, refunds) for name in names] == [90, 0, -1, 0, 0, 17]
    assert value("ackstate_topic_backlog_entries", {**orders, "subscription": "slow"}) == 7
    collector.remove("refunds")
    collector.remove("unknown")
    assert {sample.labels["topic"] for family in registry.collect() for sample in family.samples} == {ORDERS}
