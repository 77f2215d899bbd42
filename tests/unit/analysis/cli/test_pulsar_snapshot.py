"""`ackstate pulsar snapshot` against a server that answers as a Pulsar broker does, and against files."""

from __future__ import annotations

import copy
import json
import shutil
import time
from contextlib import ExitStack

import pytest

from ackstate.analysis.cli import pulsar as pulsar_snapshot
from ackstate.analysis.pulsar.sources import REASONS
from command_line import assert_one_line, run
from pulsar_admin import (
    CONFIGURATION,
    INTERNALS,
    NAMESPACE,
    PATH,
    RUNTIME,
    STATS,
    TOPIC,
    VECTORS,
    serving,
    topic_answers,
)


@pytest.fixture
def make_broker():
    with ExitStack() as stack:
        yield lambda changes=None: stack.enter_context(serving(changes))


def snapshot(capsys, *arguments):
    return run(capsys, "pulsar", "snapshot", *arguments)


def told(capsys, *arguments, status=0):
    outcome = snapshot(capsys, *arguments, "--json")
    assert (outcome.status, outcome.err) == (status, "")
    return json.loads(outcome.out)


# --- A broker


def test_all_of_a_cluster_in_json_and_in_a_table(capsys, make_broker):
    broker = make_broker()
    answer = told(capsys, broker.url)
    (found,) = answer["subscriptions"]
    assert (found["topic"], found["subscription"], found["acked_above_mark_delete"]) == (TOPIC, "sub", 30)
    assert (found["comes_back"]["low"]["entries"], found["comes_back"]["high"]["entries"]) == (27, 30)
    assert answer["brokers"] == [{
        "owner": "127.0.0.1:8080", "subscriptions": 1, "low": 27, "high": 30,
        "is_lower_bound": False, "partly_acked_messages": 0,
    }]  # fmt: skip
    assert found["settings_assumed"] == ""
    assert not any("pulsar/" in path for path in broker.asked), "the tenant of Pulsar itself is left out"
    said = snapshot(capsys, broker.url).out
    assert "at least 27: the last record held ranges of 6 bytes, and no more fit in" in said
    assert "if broker 127.0.0.1:8080 dies now: 27 to 30 acked entries of 1 cursor" in said


def test_ranges_over_ledgers_larger_than_usual_are_read(capsys, make_broker):
    """Of 100 ledgers with five million entries, one entry is not acked."""
    cursor = {"markDeletePosition": "1:-1", "state": "Open", "individuallyDeletedMessages": "[(1:0..100:4999999]]"}
    ledgers = [{"ledgerId": number, "entries": 5_000_000} for number in range(1, 101)]
    internals = {"ledgers": ledgers, "cursors": {"s": cursor}}
    (found,) = told(capsys, make_broker({f"{PATH}/internalStats": internals}).url)["subscriptions"]
    assert (found["acked_above_mark_delete"], found["ranges"]) == (499_999_999, 100)


def test_the_json_has_the_keys_that_scripts_read(capsys, make_broker):
    answer = told(capsys, make_broker({"/admin/v2/tenants": ["demo", "public"]}).url, status=1)
    assert set(answer) == {"subscriptions", "subscriptions_not_shown", "brokers", "missing"}
    ((found,), (missing,)) = answer["subscriptions"], answer["missing"]
    assert set(missing) == {"kind", "topic", "reason", "why"}
    assert set(found) == {
        "topic", "subscription", "owner", "state", "mark_delete", "acked_above_mark_delete", "ranges", "comes_back",
        "is_lower_bound", "partly_acked_messages", "messages_estimate", "cut_if_written_now", "comes_back_if_unloaded",
        "messages_per_entry", "limits", "remarks", "settings_assumed",
    }  # fmt: skip
    assert [set(found["comes_back"][end]) for end in ("low", "high")] == [{"entries", "why"}] * 2
    assert set(found["limits"][0]) == {"setting", "unit", "used", "limit", "percent", "holes_left", "advice"}


def test_a_partitioned_topic_is_its_partitions(capsys, make_broker):
    broker = make_broker(
        topic_answers(f"{PATH}-partition-0")
        | topic_answers(f"{PATH}-partition-1")
        | {f"{PATH}/partitions": {"partitions": 2}, f"{PATH}/maxUnackedMessagesOnConsumer": 60}
    )
    answer = told(capsys, broker.url, "--topic", "smoke")
    assert [each["topic"] for each in answer["subscriptions"]] == [f"{TOPIC}-partition-0", f"{TOPIC}-partition-1"]
    assert answer["brokers"][0]["low"] == 54
    assert broker.asked.count(f"{PATH}/maxUnackedMessagesOnConsumer") == 1, "policies are of the whole topic"
    assert limits(answer)["maxUnackedMessagesPerConsumer"] == (30, 60)


def limits(answer):
    return {use["setting"]: (use["used"], use["limit"]) for use in answer["subscriptions"][0]["limits"]}


def test_policies_override_the_configuration(capsys, make_broker):
    broker = make_broker({NAMESPACE: {"max_unacked_messages_per_subscription": 40}})
    found = limits(told(capsys, broker.url, "--namespace", "public/default"))
    assert found["maxUnackedMessagesPerSubscription"] == (30, 40)
    assert found["maxUnackedMessagesPerConsumer"] == (30, 50_000)
    assert found["managedLedgerMaxUnackedRangesToPersist"] == (30, 10_000)
    # Position 3:-1, two words of which one has ten bytes, one nine.
    assert found["maxMessageSize"] == (13 + 2 + 2 + 10 + 2, 5 * 1024 * 1024 + 10 * 1024)
    broker.answers[f"{PATH}/maxUnackedMessagesOnSubscription"] = 0
    assert "maxUnackedMessagesPerSubscription" not in limits(told(capsys, broker.url, "--tenant", "public"))


def test_a_configuration_that_may_not_be_read_is_assumed_and_said(capsys, make_broker):
    broker = make_broker({RUNTIME: (403, b'{"reason": "not superuser"}', {})})
    assert "the defaults of Pulsar 4.2.4" in told(capsys, broker.url)["subscriptions"][0]["settings_assumed"]
    assert "settings: the configuration may not be read" in snapshot(capsys, broker.url).out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("laid_out_bytes", "expected", "why"),
    [(14, (0, 0), "3 records were written since"), (None, (0, 30), "contradict each other")],
)
def test_a_second_look_narrows_or_contradicts(capsys, make_broker, monkeypatch, laid_out_bytes, expected, why):  # noqa: PLR0917
    """Three records later the acks of the first look are durable; a last record too small for them cannot be."""
    monkeypatch.setattr(pulsar_snapshot, "_CHECK_S", 0.01)
    later, stats = copy.deepcopy(INTERNALS), copy.deepcopy(STATS)
    later["cursors"]["sub"]["cursorLedgerLastEntry"] = 4
    if laid_out_bytes:
        stats["subscriptions"]["sub"]["nonContiguousDeletedMessagesRangesSerializedSize"] = laid_out_bytes
    looks = {f"{PATH}/internalStats": [INTERNALS, later, later], f"{PATH}/stats": [STATS, stats, stats]}
    began_s = time.monotonic()
    (found,) = told(capsys, make_broker(looks).url, "--again", "1s")["subscriptions"]
    assert time.monotonic() - began_s >= 1
    back = found["comes_back"]
    assert (back["low"]["entries"], back["high"]["entries"]) == expected
    assert why in back["low"]["why"] + back["high"]["why"]


TENANTS, DEMO = "/admin/v2/tenants", "/admin/v2/namespaces/demo"
DEMO_X = "/admin/v2/persistent/demo/x"
NOT_LISTED = {
    "a tenant that may not be listed": ({DEMO: (403, b'{"reason": "no right"}', {})}, "tenant demo", "forbidden"),
    "a tenant without a token": ({DEMO: (401, b"", {})}, "tenant demo", "forbidden"),
    "a tenant deleted meanwhile": ({DEMO: (404, b"", {})}, "tenant demo", "gone"),
    "a tenant that fails": ({DEMO: (500, b"<html>", {})}, "tenant demo", "failing"),
    "a tenant that is no JSON": ({DEMO: (200, b"<html>", {})}, "tenant demo", "failing"),
    "a tenant that is no list": ({DEMO: {"demo/x": 1}}, "tenant demo", "failing"),
    "a tenant redirected in a circle": ({DEMO: (307, b"", {"Location": DEMO})}, "tenant demo", "failing"),
    "a tenant with a strange name": ({TENANTS: ["public", "de/mo"]}, "tenant de/mo", "unsupported"),
    "a namespace of Pulsar 1": ({DEMO: ["demo/standalone/ns1"]}, "namespace demo/standalone/ns1", "unsupported"),
    "a namespace that is not text": ({DEMO: ["demo/\ud800"]}, "namespace demo/\ud800", "unsupported"),
    "a namespace deleted meanwhile": ({DEMO: ["demo/x"]}, "namespace demo/x", "gone"),
    "a namespace that may not be listed": (
        {DEMO: ["demo/x"], DEMO_X: (403, b"", {})}, "namespace demo/x", "forbidden",
    ),
    "a namespace that fails": ({DEMO: ["demo/x"], DEMO_X: (503, b"", {})}, "namespace demo/x", "failing"),
    "a namespace that is no list": ({DEMO: ["demo/x"], DEMO_X: [1]}, "namespace demo/x", "failing"),
    "a topic of Pulsar 1": (
        {DEMO: ["demo/x"], DEMO_X: ["persistent://demo/standalone/x/t"]},
        "topic persistent://demo/standalone/x/t", "unsupported",
    ),
    "a topic without its settings": (
        {DEMO: ["demo/x"], DEMO_X: ["persistent://demo/x/t"], f"{NAMESPACE[:20]}/demo/x": (500, b"", {})}
        | topic_answers(f"{DEMO_X}/t"),
        "topic persistent://demo/x/t", "failing",
    ),
    "a topic that may not be read": (
        {DEMO: ["demo/x"], DEMO_X: ["persistent://demo/x/t"], f"{DEMO_X}/t/internalStats": (403, b"", {})},
        "topic persistent://demo/x/t", "forbidden",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "name", "reason"), NOT_LISTED.values(), ids=NOT_LISTED)
def test_what_cannot_be_read_hides_nothing_else_and_is_told(capsys, make_broker, changes, name, reason):
    broker = make_broker({TENANTS: ["demo", "public"]} | changes)
    kind, _, name = name.partition(" ")
    answer = told(capsys, broker.url, status=1)
    assert [each["topic"] for each in answer["subscriptions"]] == [TOPIC]
    (missing,) = answer["missing"]
    assert (missing["topic"], missing["kind"], missing["reason"]) == (name, kind, reason)
    assert missing["why"]
    outcome = snapshot(capsys, broker.url)
    assert (outcome.status, outcome.err) == (1, "")
    assert "27 to 30 acked entries of 1 cursor" in outcome.out
    said = [line for line in outcome.out.splitlines() if name.replace("\ud800", "\\ud800") in line]
    assert "not read" in said[0]
    assert REASONS[reason] in said[1]


def test_a_broker_that_refuses_its_settings_is_asked_once(capsys, make_broker):
    broker = make_broker({RUNTIME: (401, b"", {}), "/admin/v2/persistent/public/default": [TOPIC] * 9})
    assert_one_line(snapshot(capsys, broker.url), "HTTP 401")
    assert broker.asked == ["/admin/v2/brokers/version", RUNTIME]


# --- Partly acked batches, order, and names


def batched(acked="[]", *, unacked=246, kind="Shared", entries=60, mean=10, **more):
    """Answers of a broker whose consumers got batches. Of a recorded one with these numbers 312 came back."""
    internals, stats = copy.deepcopy(INTERNALS), copy.deepcopy(STATS)
    internals["currentLedgerEntries"] = entries
    cursor = {
        "individuallyDeletedMessages": acked,
        "readPosition": f"3:{entries}",
        "cursorLedger": -1,
        "state": "NoLedger",
    }
    internals["cursors"]["sub"] |= cursor | {"cursorLedgerLastEntry": -1}
    subscription = stats["subscriptions"]["sub"]
    subscription |= {"unackedMessages": unacked, "type": kind} | more
    subscription["consumers"][0] |= {"avgMessagesPerEntry": mean, "unackedMessages": unacked}
    return internals, stats


def changes(internals, stats, path=PATH):
    return {f"{path}/internalStats": internals, f"{path}/stats": stats}


def test_acks_in_batches_are_estimated_where_no_entry_is_acked(capsys, make_broker):
    broker = make_broker(changes(*batched()))
    outcome = snapshot(capsys, broker.url)
    said = " ".join(outcome.out.split())
    assert " 0+ " in said
    assert "about 10 messages an entry; up to about 354 acked messages of partly acked batches" in said
    assert "dies now: 0+ acked entries of 1 cursor, and up to about 354 messages of partly acked batches" in said
    answer = told(capsys, broker.url)
    (found,), (total,) = answer["subscriptions"], answer["brokers"]
    assert (found["is_lower_bound"], found["partly_acked_messages"]) == (True, 354)
    assert found["messages_estimate"] == {"low": 0, "high": 354}
    assert (total["is_lower_bound"], total["partly_acked_messages"]) == (True, 354)


@pytest.mark.parametrize(
    ("recorded", "is_lower_bound", "partly"),
    [
        (batched(unacked=600), True, 0),
        (batched(unacked=0), True, 600),
        (batched(unacked=-10), True, 600),
        (batched("[(3:0..3:9]]", unacked=510), True, 0),
        (batched("[(3:0..3:9]]", unacked=500), True, 10),
        (batched(unacked=300, msgDelayed=20), True, 100),
        (batched(unacked=300, msgInReplay=70), True, 0),
        (batched(unacked=0, kind="Exclusive"), True, None),
        (batched(mean=1), False, 0),
    ],
)
def test_an_estimate_is_of_what_was_delivered_and_not_acked(capsys, make_broker, recorded, is_lower_bound, partly):
    (found,) = told(capsys, make_broker(changes(*recorded)).url)["subscriptions"]
    assert (found["is_lower_bound"], found["partly_acked_messages"]) == (is_lower_bound, partly)


def test_without_a_consumer_the_topic_says_how_large_batches_are(capsys, make_broker):
    internals, stats = batched()
    stats["subscriptions"]["sub"]["consumers"] = []
    stats["msgInCounter"], internals["entriesAddedCounter"] = 600, 60
    assert told(capsys, make_broker(changes(internals, stats)).url)["subscriptions"][0]["partly_acked_messages"] == 354
    stats["msgInCounter"] = internals["entriesAddedCounter"] = 0
    outcome = snapshot(capsys, make_broker(changes(internals, stats)).url)
    assert "messages per entry are unknown" in outcome.out
    assert "0+" in outcome.out


def test_the_most_redelivered_come_first_and_then_names_as_people_sort_them(capsys, make_broker):
    paths = [f"{PATH}-partition-{number}" for number in range(12)]
    answers = {f"{PATH}/partitions": {"partitions": 12}}
    for number, path in enumerate(paths):
        answers |= changes(*batched(unacked={7: 100, 3: 550}.get(number, 600)), path)
    broker = make_broker(answers)
    answer = told(capsys, broker.url, "--topic", "smoke")
    order = [int(each["topic"].rpartition("-")[2]) for each in answer["subscriptions"]]
    assert order == [7, 3, 0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    first = told(capsys, broker.url, "--topic", "smoke", "--top", "2")
    assert first["subscriptions"] == answer["subscriptions"][:2]
    assert (first["subscriptions_not_shown"], first["brokers"]) == (10, answer["brokers"])
    outcome = snapshot(capsys, broker.url, "--topic", "smoke", "--top", "2")
    assert "not shown: 10 cursors" in outcome.out
    assert "partition-0 " not in outcome.out
    assert "0+ acked entries of 12 cursors" in outcome.out


@pytest.mark.parametrize(
    ("metadata", "is_zookeeper"),
    [
        ({"metadataStoreUrl": "zk:zk-1:2181,zk-2:2181/pulsar"}, True),
        ({"metadataStoreUrl": "zk-1:2181,zk-2:2181/pulsar"}, True),
        ({"metadataStoreUrl": "", "zookeeperServers": "zk-1:2181"}, True),
        ({"metadataStoreUrl": "null", "zookeeperServers": "null"}, False),
        ({"metadataStoreUrl": "rocksdb:///data/metadata", "zookeeperServers": ""}, False),
        ({"metadataStoreUrl": "oxia://oxia:6648/default", "zookeeperServers": "zk-1:2181"}, False),
        ({"metadataStoreUrl": "etcd:http://etcd:2379"}, False),
        ({}, False),
    ],
)
def test_zookeeper_is_named_only_where_it_is(capsys, make_broker, metadata, is_zookeeper):
    assert (
        "jute.maxbuffer" in limits(told(capsys, make_broker({RUNTIME: CONFIGURATION | metadata}).url))
    ) is is_zookeeper


# --- Files


def test_the_recorded_answers_just_work(capsys):
    answer = told(capsys, "--from", VECTORS)
    assert {each["topic"]: each["comes_back"]["low"]["entries"] for each in answer["subscriptions"]} == {
        "after-restart-flush60-alternate-small": 0,
        "after-restart-graceful-alternate-small": 0,
        "after-restart-smoke-alternate": 0,
        "flush60-alternate-small": 0,
        "graceful-alternate-small": 3,
        "smoke-alternate": 27,
    }


def test_files_of_the_broker_are_read_too(capsys, tmp_path):
    shutil.copy(VECTORS / "internalStats-smoke-alternate.json", tmp_path)
    (tmp_path / "version.txt").write_text("5.0.1\n")
    (tmp_path / "configuration.json").write_text(json.dumps({"managedLedgerMaxUnackedRangesToPersist": "12"}))
    found = told(capsys, "--from", tmp_path)["subscriptions"][0]
    # Of one ledger over the limit this version writes a list, up to the limit.
    assert found["cut_if_written_now"] == found["comes_back"]["low"]["entries"] == 18
    assert found["settings_assumed"] == ""
