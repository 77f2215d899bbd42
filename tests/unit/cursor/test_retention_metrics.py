"""The backlog of topics as Prometheus scrapes it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from ackstate import Position
from ackstate.metrics import BacklogCollector
from ackstate.topic import BacklogReport

ORDERS = "persistent://public/default/orders"
LABELS = {"namespace": "public/default", "topic": ORDERS}
NAMES = ["pulsar_storage_size", "pulsar_storage_backlog_size", "pulsar_storage_backlog_quota_limit"]


def registered():
    registry, collector = CollectorRegistry(), BacklogCollector()
    registry.register(collector)
    return registry, collector


def test_a_topic_is_exported_with_its_limit_and_the_subscription_that_holds_it():
    registry, collector = registered()
    collector.add(ORDERS, lambda: BacklogReport(7, 700, 9, 900, "slow", Position(1, 2), ("x",), 600))
    collector.add("refunds", lambda: BacklogReport(0, 0, 9, 90, None, None, (), None, retained_ledger_id=17))
    collector.add("damaged", lambda: 1 // 0)
    value = registry.get_sample_value
    assert [value(name, LABELS) for name in NAMES] == [900, 700, 600]
    assert value("ackstate_topic_backlog_exceeded", LABELS) == 1
    assert value("ackstate_topic_unreadable_subscriptions", LABELS) == 1
    assert value("ackstate_topic_backlog_entries", {**LABELS, "subscription": "slow"}) == 7
    labels = {"namespace": "", "topic": "refunds"}
    assert [value(name, labels) for name in NAMES] == [90, 0, -1]
    assert value("ackstate_topic_backlog_exceeded", labels) == 0
    assert value("ackstate_topic_retained_ledger", labels) == 17
    assert value("ackstate_topic_retained_ledger", LABELS) is None
    collector.remove("refunds")
    collector.remove("unknown")
    assert {sample.labels["topic"] for family in registry.collect() for sample in family.samples} == {ORDERS}
