"""`ackstate pulsar exporter` against a server that answers as a broker does; its queries select exported metrics."""

from __future__ import annotations

import copy
import json
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ackstate.analysis.admin_client import AdminServer, PulsarAdmin
from ackstate.analysis.pulsar.broker_settings import BrokerSettings
from ackstate.analysis.pulsar.exporter import Collection, Collector, ExporterCollector
from ackstate.analysis.pulsar.internal_stats import TopicInternals, TopicStats
from ackstate.analysis.pulsar.sources import Listing, LiveBroker, TopicAnswers
from command_line import ENTRY
from promql import check_query, samples_of, texts_of
from pulsar_admin import INTERNALS, PATH, STATS, TOPIC, serving, topic_answers

EXAMPLES = Path(__file__).parents[4] / "examples"
DASHBOARD = json.loads((EXAMPLES / "grafana-pulsar-dashboard.json").read_text())
ALERTS = (EXAMPLES / "pulsar-alerts.yml").read_text()
OTHER, OTHER_PATH = f"{TOPIC}-2", f"{PATH}-2"


@pytest.fixture
def exported():
    """A function that collects from a broker several times, and returns the samples after each collection."""

    def exported(url, *, times=1, between=lambda _number: None):
        with PulsarAdmin(AdminServer(url, timeout_s=5)) as admin:
            collector, metrics = Collector(lambda: LiveBroker(admin)), ExporterCollector(lambda: admin.request_count)
            registry = CollectorRegistry()
            registry.register(metrics)
            found = []
            for number in range(times):
                metrics.show(collector.collect())
                found.append(samples_of(generate_latest(registry).decode()))
                between(number)
            return found

    return exported


def value(samples, name, **labels):
    (found,) = [number for each, its, number in samples if each == name and labels.items() <= its.items()]
    return found


def grown(internals, *, by=3, acked="[(3:0..3:1]]"):
    changed = copy.deepcopy(internals)
    changed["cursors"]["sub"]["cursorLedgerLastEntry"] += by
    changed["cursors"]["sub"]["individuallyDeletedMessages"] = acked
    return changed


# --- Exported metrics


def test_the_bounds_of_a_look_are_those_of_the_snapshot(exported):
    with serving() as broker:
        (samples,) = exported(broker.url)
    names = {"namespace": "public/default", "topic": TOPIC, "subscription": "sub", "broker": "127.0.0.1:8080"}
    assert value(samples, "ackstate_pulsar_redelivery_if_crashed_low", **names) == 27
    assert value(samples, "ackstate_pulsar_redelivery_if_crashed_high", **names) == 30
    assert value(samples, "ackstate_pulsar_redelivery_if_unloaded", **names) == 0
    assert value(samples, "ackstate_pulsar_acked_entries", **names) == 30
    assert value(samples, "ackstate_pulsar_topics_unread", broker="127.0.0.1:8080") == 0
    assert value(samples, "ackstate_pulsar_up") == value(samples, "ackstate_pulsar_topics") == 1
    ranges = "managedLedgerMaxUnackedRangesToPersist"
    assert value(samples, "ackstate_pulsar_limit_used_ratio", setting=ranges) == pytest.approx(30 / 10_000)


def test_an_earlier_look_narrows_the_bounds(exported):
    """Three records later, the acks of the first look are durable."""
    stats = copy.deepcopy(STATS)
    stats["subscriptions"]["sub"].pop("nonContiguousDeletedMessagesRangesSerializedSize")
    later = copy.deepcopy(INTERNALS)
    later["cursors"]["sub"]["cursorLedgerLastEntry"] += 3
    later["cursors"]["sub"]["individuallyDeletedMessages"] = INTERNALS["cursors"]["sub"][
        "individuallyDeletedMessages"
    ].replace("]]", "],(3:60..3:62]]")
    with serving(topic_answers(internals=[INTERNALS, later, later], stats=stats)) as broker:
        first, second = exported(broker.url, times=2)
    high = "ackstate_pulsar_redelivery_if_crashed_high"
    assert (value(first, high), value(second, high)) == (30, 2)
    assert value(second, "ackstate_pulsar_redelivery_if_crashed_low") == 0


def test_a_topic_that_is_not_read_is_counted_for_its_broker_and_the_others_are_exported(exported):
    """The broker of one topic dies after the first look."""
    answers = {"/admin/v2/persistent/public/default": [TOPIC, OTHER]} | topic_answers(OTHER_PATH)
    with serving(answers) as broker:

        def die(number):
            broker.answers[f"{OTHER_PATH}/internalStats"] = (503, b"", {})

        before, after = exported(broker.url, times=2, between=die)
    unread = "ackstate_pulsar_topics_unread"
    assert (value(before, unread), value(after, unread)) == (0, 1)
    topics = {labels["topic"] for name, labels, _ in after if name == "ackstate_pulsar_acked_entries"}
    assert topics == {TOPIC}
    assert value(after, "ackstate_pulsar_up") == 1


def test_a_cluster_that_does_not_answer_is_a_metric(exported):
    with serving() as broker:

        def die(number):
            broker.answers["/admin/v2/tenants"] = (503, b"", {})

        before, after = exported(broker.url, times=2, between=die)
    assert (value(before, "ackstate_pulsar_up"), value(after, "ackstate_pulsar_up")) == (1, 0)
    assert value(after, "ackstate_pulsar_collections_failed_total") == 1
    stamp = "ackstate_pulsar_collection_timestamp_seconds"
    assert value(after, stamp) == value(before, stamp), "of the latest look that listed the topics"


def test_old_looks_are_kept_for_quiet_cursors():
    """With a look every 30 s, one of the kept ones is always older than a flush and two writes."""
    settings, clock, stats = BrokerSettings(), [1_000.0], copy.deepcopy(STATS)
    stats["subscriptions"]["sub"].pop("nonContiguousDeletedMessagesRangesSerializedSize")

    class Fixed:
        def listing(self):
            return Listing([TOPIC])

        def settings(self, topic):
            return settings

        def read(self, topic):
            answers = (TopicInternals.model_validate(INTERNALS), TopicStats.model_validate(stats))
            return TopicAnswers(*answers, 1_000 * clock[0], 1_000 * clock[0])

    collector = Collector(Fixed)
    for _number in range(20):
        collection = collector.collect()
        clock[0] += 30
    (found,) = collection.judgements
    assert found.comes_back.low.entries == found.comes_back.high.entries == 0
    assert "nothing was acked" in found.comes_back.high.why


# --- Its requests


def test_requests_are_spaced():
    """Ten requests at 50 a second cannot all be sent in less than 0.18 s, whatever the machine."""
    with serving() as broker, PulsarAdmin(AdminServer(broker.url), requests_per_second=50) as admin:
        begun_s = time.monotonic()
        for _ in range(10):
            admin.get_text("/admin/v2/brokers/version")
        assert time.monotonic() - begun_s >= 9 / 50
        assert admin.request_count == 10


# --- Alerts and dashboard


@pytest.fixture
def scrape(exported):
    with serving() as broker:
        return exported(broker.url)[0]


def test_each_query_of_the_dashboard_selects_samples(scrape):
    checked = list(texts_of(DASHBOARD))
    assert len(checked) > 15
    for text, legend in checked:
        check_query(text, legend, scrape)


def test_everything_that_is_exported_is_shown(scrape):
    used = {name for text, _ in texts_of(DASHBOARD) for name in re.findall(r"\back\w+", text)}
    assert {name for name, _, _ in scrape if not name.endswith("_created")} == used


def test_each_alert_selects_samples_and_names_labels_that_its_result_has(scrape):
    alerts = re.findall(r"- alert: (\w+)\n\s+expr: ([^\n]*)\n(.*?)(?=- alert:|\Z)", ALERTS, re.DOTALL)
    assert len(alerts) == ALERTS.count("alert:") == 8
    for _name, expression, rest in alerts:
        check_query(expression, re.findall(r"\$labels\.(\w+)", rest), scrape)
        assert "severity: " in rest
        assert "summary: " in rest


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(number):
    with serving() as broker:
        command = [*ENTRY, "pulsar", "exporter", broker.url, "--port", "0", "--every", "1h"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"ackstate exporter on (http://127\.0\.0\.1:\d+/metrics)\n", line)
            assert found, process.stderr.read()
            with urllib.request.urlopen(found[1], timeout=30) as answer:
                text = answer.read().decode()
            asked = len(broker.asked)
            assert value(samples_of(text), "ackstate_pulsar_redelivery_if_crashed_high", topic=TOPIC) == 30
            urllib.request.urlopen(found[1], timeout=30).close()
            assert len(broker.asked) == asked, "a scrape sends no request"
        finally:
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "", "")


def test_before_the_first_look_only_counters_are_exported():
    registry = CollectorRegistry()
    metrics = ExporterCollector(lambda: 1)
    registry.register(metrics)
    names = {name for name, _, _ in samples_of(generate_latest(registry).decode())}
    assert names == {
        "ackstate_pulsar_requests_total",
        "ackstate_pulsar_collections_total",
        "ackstate_pulsar_collections_failed_total",
    }
    metrics.show(Collection(failure="no"))
    assert "ackstate_pulsar_up" in {name for name, _, _ in samples_of(generate_latest(registry).decode())}
