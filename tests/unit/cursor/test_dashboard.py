"""Each query of the dashboard is PromQL, and selects samples of a real scrape by labels that they have."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import promql_parser
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ackstate.cursor import (
    CursorConfig,
    DeadLetterPolicy,
    ManagedCursor,
    MemoryStore,
    Message,
    MessageLog,
    Retention,
    Subscription,
    SubscriptionOptions,
    backlog_report,
)
from ackstate.cursor.metrics import CursorCollector, PersistTimer
from ackstate.cursor.topic.retention_metrics import BacklogCollector
from ackstate.delay import TopicDelayIndex
from ackstate.limits import DispatchGate, GateLimits

ORDERS = "persistent://public/default/orders"
DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana-dashboard.json"
OF_PROMETHEUS = {"instance", "job"}
"""Labels that a scraper adds."""
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
    collector, timer = CursorCollector(), PersistTimer(lambda: 0.0, registry=registry)
    registry.register(collector)
    log = MessageLog.open(MemoryStore(), topic=ORDERS)

    def open_cursor():
        return ManagedCursor.open(
            log.store, topic=ORDERS, subscription="billing", ledgers=log.ledgers, config=CursorConfig(), now_ms=1_000
        )

    open_cursor().close(now_ms=1_000)
    cursor = timer.recovery(open_cursor)
    subscription = Subscription(
        log,
        cursor,
        gate=DispatchGate(GateLimits(max_unacked_messages=6)),
        delays=TopicDelayIndex(tick_time_ms=10).open_view(cursor.is_acked),
        options=SubscriptionOptions(dead_letters=DeadLetterPolicy(1, lambda _: None)),
    )
    collector.add_subscription(subscription, topic=ORDERS, name="billing")
    delayed = Message(b"later", deliver_at_ms=10**6, publish_time_ms=1_000)
    log.publish([Message(b"now", publish_time_ms=1_000), delayed, *[Message(b"now", publish_time_ms=1_000)] * 9])
    first, *_ = (each.position for each in subscription.dispatch("ann", 2, now_ms=1_000))
    for now_ms in (1_001, 1_002):  # sent again, and handed over
        subscription.nack(first, now_ms=now_ms)
        subscription.dispatch("ann", 1, now_ms=now_ms)
    *_, lower, last = (each.position for each in subscription.dispatch("ann", 10, now_ms=1_003))
    subscription.nack(lower, delay_ms=60_000, now_ms=1_004)
    subscription.ack(last, now_ms=1_004)
    timer.persist(lambda: cursor.persist(now_ms=2_000))
    backlog, retention = BacklogCollector(), Retention(backlog_bytes_max=10)
    backlog.add(ORDERS, lambda: backlog_report(log, retention, {"billing": cursor}))
    registry.register(backlog)
    text = generate_latest(registry).decode()
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def queries():
    """Yield each text of the dashboard that selects samples, with the labels that its legend names."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"], re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            expression, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
            yield expression, [label]


def matches(matcher, value):
    is_pattern = matcher.op in (promql_parser.MatchOp.Re, promql_parser.MatchOp.NotRe)
    is_equal = bool(re.fullmatch(matcher.value, value)) if is_pattern else value == matcher.value
    return is_equal == (matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.Re))


def selected_by(selector, samples):
    """Return the labels of the samples of a selector, which has no `or`."""
    assert not selector.matchers.or_matchers
    matchers = selector.matchers.matchers
    found = []
    for name, labels, _ in samples:
        if name == selector.name:
            assert {each.name for each in matchers} <= set(labels), f"{selector.prettify()}: no such label of {name}"
            if all(matches(each, labels[each.name]) for each in matchers):
                found.append(set(labels))
    assert found, f"nothing is selected by {selector.prettify()}"
    return set.intersection(*found)


def labels_of(expression, samples):
    """Return the labels of the results of an expression, and check all labels that it names."""
    match expression:
        case promql_parser.VectorSelector():
            return selected_by(expression, samples)
        case promql_parser.AggregateExpr():
            inner, modifier = labels_of(expression.expr, samples), expression.modifier
            kept = set() if modifier is None else set(modifier.labels)
            assert modifier is None or modifier.type == promql_parser.AggModifierType.By
            assert kept <= inner, f"{expression.prettify()}: there are the labels {inner}"
            return kept
        case promql_parser.MatrixSelector():
            parts = [expression.vector_selector]
        case promql_parser.Call():
            parts = expression.args
        case promql_parser.BinaryExpr():
            assert expression.modifier is None
            parts = [expression.lhs, expression.rhs]
        case promql_parser.NumberLiteral():
            parts = []
        case _:
            raise AssertionError(f"{expression.prettify()} cannot be checked")
    # Two vectors are joined by all their labels; a number has none.
    found = [labels for labels in (labels_of(part, samples) for part in parts) if labels]
    assert all(labels == found[0] for labels in found), expression.prettify()
    return found[0] if found else set()


def check_query(text, legend, samples):
    """Fail unless a query is PromQL that selects samples, by labels that they have, and so does its legend."""
    text = re.sub(r"\$(namespace|ledger|cursor)\b", ".*", text).replace("$__rate_interval", "5m")
    labels = labels_of(promql_parser.parse(text), samples)
    assert set(legend) <= labels | OF_PROMETHEUS, f"{text}: no such label as in {legend}"


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


def test_the_example_has_something_of_everything():
    """Else a query could select samples that are always 0."""
    zero = {name for name, _, value in scrape() if not value}
    positive = {name for name, _, value in scrape() if value}
    subscriptions = {
        name for name in zero | positive if "_subscription_" in name or name == "pulsar_out_messages_total"
    }
    assert len(subscriptions) == 14
    assert subscriptions <= positive


PANEL = 'sum by (rule) (increase(ackstate_subscription_blocks_total{cursor_name=~"$cursor"}[$__rate_interval]))'


@pytest.mark.parametrize(
    ("text", "legend"),
    [
        (PANEL.replace("blocks_total", "block_total"), "rule"),
        (PANEL.replace("cursor_name", "cursor"), "rule"),
        (PANEL.replace("(rule)", "(rules)"), "rule"),
        (PANEL.replace("=~", "="), "rule"),
        (PANEL.replace("[$__rate_interval]", ""), "rule"),
        (PANEL.replace("increase", "increases"), "rule"),
        (PANEL[:-1], "rule"),
        (PANEL, "subscription"),
        (f"{PANEL} / pulsar_subscription_back_log", "rule"),
    ],
)
def test_a_misspelt_query_is_found(text, legend):
    check_query(PANEL, ["rule"], scrape())
    with pytest.raises((AssertionError, ValueError)):
        check_query(text, [legend], scrape())


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
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
