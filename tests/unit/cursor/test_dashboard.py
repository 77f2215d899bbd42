"""Each query of the dashboard is PromQL, and selects samples of a real scrape by labels that they have."""

import json
import re
from functools import cache
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from ackstate import CursorConfig, DeadLetterPolicy, ManagedCursor, MemoryStore, Message, Subscription
from ackstate.delay import TopicDelayIndex
from ackstate.dispatch import SubscriptionOptions
from ackstate.limits import DispatchGate, GateLimits
from ackstate.metrics import BacklogCollector, CursorCollector
from ackstate.topic import MessageLog, Retention, backlog_report
from promql import check_query, samples_of, texts_of

ORDERS = "persistent://public/default/orders"
DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana-dashboard.json"
NOT_SHOWN = {
    # Two of Pulsar repeat a number of ours, one a number of another of Pulsar's.
    "pulsar_ml_cursor_nonContiguousDeletedMessagesRange",
    "pulsar_ml_cursor_writeLedgerLogicalSize",
    "pulsar_subscription_blocked_on_unacked_messages",
}


@cache
def scrape():
    """Return (name, labels) of each sample of a subscription that is blocked, and has messages of every kind."""
    registry = CollectorRegistry()
    collector = CursorCollector()
    registry.register(collector)
    log = MessageLog.open(MemoryStore(), topic=ORDERS)

    def open_cursor():
        return ManagedCursor.open(
            log.store, topic=ORDERS, subscription="billing", ledgers=log.ledgers, config=CursorConfig(), now_ms=1_000
        )

    open_cursor().close(now_ms=1_000)
    cursor = open_cursor()
    subscription = Subscription(
        log,
        cursor,
        gate=DispatchGate(GateLimits(max_unacked_messages=6)),
        delays=TopicDelayIndex(tick_time_ms=10).open_view(cursor.is_acked),
        options=SubscriptionOptions(dead_letters=DeadLetterPolicy(1, lambda _: None)),
    )
    collector.add(subscription, topic=ORDERS, subscription="billing")
    delayed = Message(b"later", deliver_at_ms=10**6, publish_time_ms=1_000)
    log.publish([Message(b"now", publish_time_ms=1_000), delayed, *[Message(b"now", publish_time_ms=1_000)] * 9])
    first, *_ = (each.position for each in subscription.dispatch("ann", 2, now_ms=1_000))
    for now_ms in (1_001, 1_002):  # sent again, and handed over
        subscription.nack(first, now_ms=now_ms)
        subscription.dispatch("ann", 1, now_ms=now_ms)
    *_, lower, last = (each.position for each in subscription.dispatch("ann", 10, now_ms=1_003))
    subscription.nack(lower, delay_ms=60_000, now_ms=1_004)
    subscription.ack(last, now_ms=1_004)
    cursor.persist(now_ms=2_000)
    backlog, retention = BacklogCollector(), Retention(backlog_bytes_max=10)
    backlog.add(ORDERS, lambda: backlog_report(log, retention, {"billing": cursor}))
    registry.register(backlog)
    text = generate_latest(registry).decode()
    return samples_of(text)


def queries():
    """Return each text of the dashboard that selects samples, with the labels that its legend names."""
    return texts_of(json.loads(DASHBOARD.read_text()))


def test_each_query_selects_samples_by_labels_that_they_have():
    checked = list(queries())
    assert len(checked) > 30
    for text, legend in checked:
        check_query(text, legend, scrape())


def test_everything_that_is_exported_is_shown():
    used = {name for text, _ in queries() for name in re.findall(r"\b(?:ackstate|pulsar)_\w+", text)}
    exported = {name for name, _, _ in scrape()}
    # A histogram is shown by its buckets.
    assert {name for name in exported - used if not re.search("_(sum|count|created)$", name)} == NOT_SHOWN


def test_the_dashboard_can_be_imported():
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert dashboard["schemaVersion"] >= 39
    assert dashboard["id"] is None
    assert len({panel["id"] for panel in panels}) == len(panels) > 5
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"datasource", "namespace", "ledger", "cursor"} <= variables
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard))) - {"__rate_interval", "__all"}
    assert used == variables
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["description"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
