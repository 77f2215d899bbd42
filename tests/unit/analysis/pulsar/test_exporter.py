"""`ackstate pulsar exporter` against a server that answers as a broker does; its queries select exported metrics."""

import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from importlib.resources import files
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ackstate.analysis.admin_client import AdminServer, PulsarAdmin
from ackstate.analysis.pulsar import exporter
from ackstate.analysis.pulsar.exporter import Collection, Collector, ExporterCollector
from ackstate.analysis.pulsar.sources import LiveBroker
from command_line import ENTRY, run
from promql import check_query, samples_of, texts_of
from pulsar_admin import PATH, TOPIC, Durable, serving, state, topic_answers

SHIPPED = files("ackstate.analysis.pulsar")
DASHBOARD = json.loads(SHIPPED.joinpath("dashboard.json").read_text())
ALERTS = SHIPPED.joinpath("alerts.yml").read_text()
OTHER, OTHER_PATH = f"{TOPIC}-2", f"{PATH}-2"


@pytest.fixture
def exported():
    """A function that collects from a broker several times, and returns the samples after each collection."""

    def exported(url, *, times=1, between=lambda _number: None, reader=None, **only):
        with PulsarAdmin(AdminServer(url, timeout_s=5)) as admin:
            collector = Collector(LiveBroker(admin), lambda _found: (reader, "" if reader else "unknown"), **only)
            registry = CollectorRegistry()
            registry.register(ExporterCollector({"one": collector}))
            found = []
            for number in range(times):
                collector.collect()
                found.append(samples_of(generate_latest(registry).decode()))
                between(number)
            return found

    return exported


def value(samples, name, **labels):
    (found,) = [number for each, its, number in samples if each == name and labels.items() <= its.items()]
    return found


# --- Exported metrics


@pytest.mark.parametrize(
    ("reader", "expected", "is_exact"), [(None, 30, 0), (Durable(state([1, 3], place=(4, 1))), 28, 1)]
)
def test_the_number_of_a_look_is_that_of_the_snapshot(exported, reader, expected, is_exact):
    with serving() as broker:
        (samples,) = exported(broker.url, reader=reader)
    names = {"namespace": "public/default", "topic": TOPIC, "subscription": "sub", "broker": "127.0.0.1:8080"}
    assert value(samples, "ackstate_pulsar_redelivery_if_crashed", **names) == expected
    assert value(samples, "ackstate_pulsar_redelivery_is_exact", **names) == is_exact
    assert value(samples, "ackstate_pulsar_redelivery_if_unloaded", **names) == 0
    assert value(samples, "ackstate_pulsar_acked_entries", **names) == 30
    assert value(samples, "ackstate_pulsar_topics_unread", broker="127.0.0.1:8080") == 0
    assert value(samples, "ackstate_pulsar_up") == value(samples, "ackstate_pulsar_topics") == 1
    ranges = "managedLedgerMaxUnackedRangesToPersist"
    assert value(samples, "ackstate_pulsar_limit_used_ratio", setting=ranges) == pytest.approx(30 / 10_000)


def test_a_metadata_store_that_cannot_be_opened_is_tried_again_with_the_settings(monkeypatch):
    """Each look says why what is durable is unknown."""
    opened = [(None, "no route"), (Durable(state(place=(4, 1))), "")]
    with serving() as broker, PulsarAdmin(AdminServer(broker.url, timeout_s=5)) as admin:
        collector = Collector(LiveBroker(admin), lambda _found: opened.pop(0))
        for _ in range(2):
            (found,) = collector.collect().judgements
            assert "no route" in found.comes_back.why
        assert collector.unread == "no route"
        monkeypatch.setattr(exporter, "READER_S", 0)
        for _ in range(2):
            (found,) = collector.collect().judgements
            assert found.comes_back.is_exact
    assert collector.unread == ""


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


def test_everything_that_is_exported_is_shown(scrape):
    used = {name for text, _ in texts_of(DASHBOARD) for name in re.findall(r"\back\w+", text)}
    assert {name for name, _, _ in scrape if not name.endswith("_created")} == used


def test_each_alert_selects_samples_and_names_labels_that_its_result_has(scrape):
    alerts = re.findall(r"- alert: (\w+)\n\s+expr: ([^\n]*)\n(.*?)(?=- alert:|\Z)", ALERTS, re.DOTALL)
    assert len(alerts) == ALERTS.count("alert:") == 7
    for _name, expression, rest in alerts:
        check_query(expression, re.findall(r"\$labels\.(\w+)", rest), scrape)
        assert "severity: " in rest
        assert "summary: " in rest


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ({"topics": ".*-2"}, {(OTHER, "sub")}),
        ({"topics": "smoke"}, set()),  # the whole name
        ({"subscriptions": "s.b"}, {(TOPIC, "sub"), (OTHER, "sub")}),
        ({"topics": ".*e", "subscriptions": "su"}, set()),
    ],
)
def test_only_names_that_match_are_looked_at(exported, only, expected):
    answers = {"/admin/v2/persistent/public/default": [TOPIC, OTHER]} | topic_answers(OTHER_PATH)
    with serving(answers) as broker:
        (samples,) = exported(broker.url, **{name: re.compile(regex) for name, regex in only.items()})
        asked = {path.removesuffix("/internalStats") for path in broker.asked if path.endswith("/internalStats")}
    found = {(its["topic"], its["subscription"]) for name, its, _ in samples if name == "ackstate_pulsar_acked_entries"}
    assert found == expected
    paths = {TOPIC: PATH, OTHER: OTHER_PATH}
    assert asked == {path for topic, path in paths.items() if re.fullmatch(only.get("topics", ".*"), topic)}


@pytest.mark.slow
def test_it_serves_clusters_until_a_signal():
    with serving() as broker, serving() as other:
        other.answers["/admin/v2/tenants"] = (503, b"", {})
        command = [
            *ENTRY, "pulsar", "exporter", f"east={broker.url}", other.url, "--port", "0", "--every", "1h",
            "--metadata", "none",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"ackstate exporter on (http://127\.0\.0\.1:\d+)/metrics\n", line)
            assert found, process.stderr.read()

            def get(path):
                try:
                    with urllib.request.urlopen(found[1] + path, timeout=30) as answer:
                        return answer.status, answer.read().decode()
                except urllib.error.HTTPError as error:
                    return error.code, error.read().decode()

            asked = len(broker.asked)
            for _ in range(2):
                samples = samples_of(get("/metrics")[1])
            assert len(broker.asked) == asked, "a scrape sends no request"
            assert value(samples, "ackstate_pulsar_redelivery_if_crashed", topic=TOPIC, cluster="east") == 30
            west = other.url.removeprefix("http://")
            ups = [value(samples, "ackstate_pulsar_up", cluster=name) for name in ("east", west)]
            assert ups == [1, 0]
            assert get("/health") == (200, "ok\n")
            assert get("/ready") == (503, f"not listed: {west}\n")
        finally:
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "")
        assert "ackstate: east: the metadata store is not read\n" in err


def unlooked():
    return Collector(SimpleNamespace(request_count=1), lambda _found: (None, "unknown"))


def test_it_is_ready_once_the_topics_of_each_cluster_were_listed():
    first, second = unlooked(), unlooked()
    metrics = ExporterCollector({"a": first, "b": second})
    assert metrics.unready == ["a", "b"]
    first.latest, second.latest = Collection(), Collection(failure="no")
    assert metrics.unready == ["b"]
    second.latest = Collection()
    assert metrics.unready == []


@pytest.mark.parametrize("what", ["alerts", "dashboard"])
def test_the_rules_and_the_dashboard_are_printed(capsys, what):
    expected = ALERTS if what == "alerts" else SHIPPED.joinpath("dashboard.json").read_text()
    assert run(capsys, "pulsar", "exporter", "--print", what) == (0, expected, "")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "give the URL of a broker"),
        (["a=http://h", "a=http://i"], "each cluster must have a name of its own, got 'a=http://i'"),
        (["http://h:1", "http://h:1/"], "each cluster must have a name of its own"),
        (["http://h", "--topic-regex", "("], "--topic-regex: "),
        (["a=http://h", "http://i", "--token-file", "a=/x", "--token-file", "/y"], "--token-file is given twice for"),
    ],
)
def test_clusters_and_patterns_that_cannot_be_are_refused(capsys, words, why):
    status, _, err = run(capsys, "pulsar", "exporter", *words)
    assert status == 2
    assert why in err


def test_before_the_first_look_only_counters_are_exported():
    registry = CollectorRegistry()
    cluster = unlooked()
    registry.register(ExporterCollector({"one": cluster}))
    names = {name for name, _, _ in samples_of(generate_latest(registry).decode())}
    assert names == {
        "ackstate_pulsar_requests_total",
        "ackstate_pulsar_collections_total",
        "ackstate_pulsar_collections_failed_total",
    }
    cluster.latest = Collection(failure="no")
    assert "ackstate_pulsar_up" in {name for name, _, _ in samples_of(generate_latest(registry).decode())}
