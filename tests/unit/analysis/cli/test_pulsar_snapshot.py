"""`ackstate pulsar snapshot` against a server that answers as a Pulsar broker does, and against files."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import time
from contextlib import ExitStack

import pytest

from ackstate.analysis.cli import pulsar as pulsar_snapshot
from ackstate.analysis.pulsar.sources import REASONS
from command_line import assert_one_line, run, write_token
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


def test_all_of_a_cluster_in_a_table(capsys, make_broker):
    outcome = snapshot(capsys, make_broker().url)
    assert (outcome.status, outcome.err) == (0, "")
    assert "27 to 30" in outcome.out
    assert "at least 27: the last record held ranges of 6 bytes, and no more fit in" in outcome.out
    assert "if broker 127.0.0.1:8080 dies now: 27 to 30 acked entries of 1 cursor" in outcome.out


def test_all_of_a_cluster_in_json(capsys, make_broker):
    broker = make_broker()
    answer = told(capsys, broker.url)
    (found,) = answer["subscriptions"]
    assert (found["topic"], found["subscription"], found["acked_above_mark_delete"]) == (TOPIC, "sub", 30)
    assert (found["comes_back"]["low"]["entries"], found["comes_back"]["high"]["entries"]) == (27, 30)
    (total,) = answer["brokers"]
    assert total == {
        "owner": "127.0.0.1:8080", "subscriptions": 1, "low": 27, "high": 30,
        "is_lower_bound": False, "partly_acked_messages": 0,
    }  # fmt: skip
    assert found["settings_assumed"] == ""
    assert not any("pulsar/" in path for path in broker.asked), "the tenant of Pulsar itself is left out"


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


def test_the_list_form_says_how_many_holes_fit(capsys, make_broker):
    settings = CONFIGURATION | {"managedLedgerPersistIndividualAckAsLongArray": "false"}
    answer = told(capsys, make_broker({RUNTIME: settings | {"managedLedgerMaxUnackedRangesToPersist": "19"}}).url)
    found = answer["subscriptions"][0]
    closest = found["limits"][0]
    assert (closest["used"], closest["limit"], closest["holes_left"], closest["percent"]) == (30, 20, 0, 150.0)
    assert found["cut_if_written_now"] == 10


def test_a_topic_of_another_broker_is_read_there(capsys, make_broker):
    owner = make_broker({f"{PATH}/internalStats?authoritative=true": INTERNALS})
    to_owner = {f"{PATH}/{each}": (307, b"", {"Location": f"{owner.url}{PATH}/{each}"}) for each in ("stats",)}
    to_owner[f"{PATH}/internalStats"] = (307, b"", {"Location": f"{owner.url}{PATH}/internalStats?authoritative=true"})
    assert told(capsys, make_broker(to_owner).url)["brokers"][0]["low"] == 27
    assert owner.asked == [f"{PATH}/internalStats?authoritative=true", f"{PATH}/stats"]


def test_a_configuration_that_may_not_be_read_is_assumed_and_said(capsys, make_broker):
    broker = make_broker({RUNTIME: (403, b'{"reason": "not superuser"}', {})})
    assert "the defaults of Pulsar 4.2.4" in told(capsys, broker.url)["subscriptions"][0]["settings_assumed"]
    assert "settings: the configuration may not be read" in snapshot(capsys, broker.url).out


@pytest.mark.slow
def test_a_second_look_narrows(capsys, make_broker, monkeypatch):
    """Three records later the acks of the first look are durable, and there were none since."""
    monkeypatch.setattr(pulsar_snapshot, "_CHECK_S", 0.01)
    later = json.loads(json.dumps(INTERNALS))
    later["cursors"]["sub"]["cursorLedgerLastEntry"] = 4
    stats = json.loads(json.dumps(STATS))
    stats["subscriptions"]["sub"]["nonContiguousDeletedMessagesRangesSerializedSize"] = 14
    changes = {f"{PATH}/internalStats": [INTERNALS, later, later], f"{PATH}/stats": [STATS, stats, stats]}
    began_s = time.monotonic()
    answer = told(capsys, make_broker(changes).url, "--again", "1s")
    assert time.monotonic() - began_s >= 1
    back = answer["subscriptions"][0]["comes_back"]
    assert (back["low"]["entries"], back["high"]["entries"]) == (0, 0)
    assert "3 records were written since" in back["high"]["why"]


def test_a_topic_that_is_gone_meanwhile_is_told_among_the_others(capsys, make_broker):
    gone = "persistent://public/default/gone"
    broker = make_broker({"/admin/v2/persistent/public/default": [TOPIC, gone]})
    answer = told(capsys, broker.url, status=1)
    assert len(answer["subscriptions"]) == 1
    assert [each["topic"] for each in answer["missing"]] == [gone]
    assert "404" in answer["missing"][0]["why"]
    outcome = snapshot(capsys, broker.url)
    assert outcome.status == 1
    assert "not read" in outcome.out


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


@pytest.mark.slow
def test_a_namespace_that_times_out_hides_nothing_else(capsys):
    """Its listing and its settings are each asked once, not once for each topic."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = {"Location": f"http://127.0.0.1:{silent.getsockname()[1]}/"}
        names = [f"persistent://demo/x/{number}" for number in range(20)]
        late = {DEMO: ["demo/x", "demo/y"], DEMO_X: names, "/admin/v2/persistent/demo/y": (307, b"", there)}
        late["/admin/v2/namespaces/demo/x"] = (307, b"", there)
        for number in range(20):
            late |= topic_answers(f"{DEMO_X}/{number}")
        begun_s = time.monotonic()
        with serving({TENANTS: ["demo", "public"]} | late) as broker:
            answer = told(capsys, broker.url, "--request-timeout", "1s", status=1)
        assert time.monotonic() - begun_s < 10
    assert [each["topic"] for each in answer["subscriptions"]] == [TOPIC]
    assert {each["topic"] for each in answer["missing"]} == {"demo/y", *names}
    assert {each["reason"] for each in answer["missing"]} == {"failing"}


def test_a_partition_that_is_missing_is_told_among_the_others(capsys, make_broker):
    broker = make_broker(
        topic_answers(f"{PATH}-partition-1") | {f"{PATH}/partitions": {"partitions": 2}, f"{PATH}-2/partitions": [7]}
    )
    answer = told(capsys, broker.url, "--topic", "smoke", "--topic", "smoke-2", status=1)
    assert [each["topic"] for each in answer["subscriptions"]] == [f"{TOPIC}-partition-1"]
    missing = {each["topic"]: each["reason"] for each in answer["missing"]}
    assert missing == {f"{TOPIC}-partition-0": "gone", "smoke-2": "failing"}


@pytest.mark.parametrize("count", [-1, True, 1.0, "2", 100_001, 10**9, 10**18])
def test_a_number_of_partitions_that_no_topic_has_is_one_line(capsys, make_broker, count):
    broker = make_broker({f"{PATH}/partitions": {"partitions": count}})
    assert_one_line(snapshot(capsys, broker.url, "--topic", "smoke"), f"{PATH}/partitions", "100,000")


LAST = 2**32 - 2
OPEN = {"markDeletePosition": "1:-1", "state": "Open"}


def with_ranges(text, ledgers=(), *, cursors=1):
    names = [f"s{number}" for number in range(cursors)]
    return {
        "ledgers": [{"ledgerId": ledger_id, "entries": count} for ledger_id, count in ledgers],
        "cursors": {name: OPEN | {"individuallyDeletedMessages": text} for name in names},
    }


HUGE = {
    "a range over a ledger that is unknown": with_ranges(f"[(3:-1..3:{LAST}]]"),
    "ranges over many of them": with_ranges(f"[{','.join(f'({each}:-1..{each}:{LAST}]' for each in range(1, 5_000))}]"),
    "ranges that join them": with_ranges(f"[(1:-1..{2**62}:{LAST}]]"),
    "a range over ledgers that are as large as none": with_ranges(
        f"[(1:-1..{2**62}:5]]", [(number, LAST) for number in range(1, 300)]
    ),
    "many cursors over them": with_ranges(
        "[(1:-1..900:5]]", [(number, 50_000) for number in range(1, 2_000)], cursors=9_000
    ),
    "nothing but their mark-delete": with_ranges("[]", [(number, LAST) for number in range(1, 300)]),
    "a record of words that is as long as none": with_ranges(f"[(3:{LAST - 1}..3:{LAST}]]", [(3, LAST + 1), (4, 0)]),
    "a ledger that no ledger is": with_ranges(f"[({10**19 - 1}:-1..{10**19 - 1}:3]]"),
    "an entry that no entry is": with_ranges("[(3:-1..3:9999999999]]"),
    "a number that is none of 64 bits": INTERNALS | {"entriesAddedCounter": 10**400},
}


@pytest.mark.parametrize("internals", HUGE.values(), ids=HUGE)
def test_an_answer_whose_numbers_would_take_all_memory_is_refused(capsys, make_broker, internals):
    """The other topics are judged."""
    other = "persistent://public/default/other"
    changes = topic_answers(f"{PATH[:-5]}other", internals) | {"/admin/v2/persistent/public/default": [TOPIC, other]}
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = told(capsys, make_broker(changes).url, status=1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 300_000
    assert [each["topic"] for each in answer["subscriptions"]] == [TOPIC]
    (missing,) = answer["missing"]
    assert (missing["topic"], missing["reason"]) == (other, "failing")
    assert "other" in missing["why"]


def test_ranges_over_ledgers_larger_than_usual_are_read(capsys, make_broker):
    """Of 100 ledgers with five million entries, one entry is not acked."""
    internals = with_ranges("[(1:0..100:4999999]]", [(number, 5_000_000) for number in range(1, 101)])
    (found,) = told(capsys, make_broker({f"{PATH}/internalStats": internals}).url)["subscriptions"]
    assert (found["acked_above_mark_delete"], found["ranges"]) == (499_999_999, 100)


@pytest.mark.parametrize("status", [401, 403, 404, 500])
@pytest.mark.parametrize("path", [TENANTS, "/admin/v2/namespaces/public", "/admin/v2/persistent/public/default"])
def test_a_cluster_of_which_nothing_can_be_listed_is_an_error(capsys, make_broker, path, status):
    assert_one_line(snapshot(capsys, make_broker({path: (status, b"", {})}).url), path, f"HTTP {status}")


def test_an_empty_tenant_beside_one_that_cannot_be_listed_is_no_error(capsys, make_broker):
    broker = make_broker({TENANTS: ["demo", "public"], "/admin/v2/namespaces/public": [], DEMO: (403, b"", {})})
    answer = told(capsys, broker.url, status=1)
    assert (answer["subscriptions"], [each["topic"] for each in answer["missing"]]) == ([], ["demo"])


@pytest.mark.slow
def test_two_looks_that_do_not_fit_together_say_so(capsys, make_broker, monkeypatch):
    """The last record is too small to hold the acks that three records since the first look must hold."""
    monkeypatch.setattr(pulsar_snapshot, "_CHECK_S", 0.01)
    later = json.loads(json.dumps(INTERNALS))
    later["cursors"]["sub"]["cursorLedgerLastEntry"] = 4
    broker = make_broker({f"{PATH}/internalStats": [INTERNALS, later]})
    back = told(capsys, broker.url, "--again", "1s")["subscriptions"][0]["comes_back"]
    assert (back["low"]["entries"], back["high"]["entries"]) == (0, 30)
    assert "contradict each other" in back["low"]["why"]


def test_a_broker_that_refuses_its_settings_is_asked_once(capsys, make_broker):
    broker = make_broker({RUNTIME: (401, b"", {}), "/admin/v2/persistent/public/default": [TOPIC] * 9})
    assert_one_line(snapshot(capsys, broker.url), "HTTP 401")
    assert broker.asked == ["/admin/v2/brokers/version", RUNTIME]


def test_no_topics_are_a_clear_answer(capsys, make_broker):
    broker = make_broker({"/admin/v2/persistent/public/default": []})
    assert snapshot(capsys, broker.url).out == "there are no topics\n"


@pytest.mark.parametrize(
    ("path", "answer", "naming"),
    [
        (f"{PATH}/internalStats", (401, b"", {}), ["HTTP 401", "--token-file"]),
        (f"{PATH}/internalStats", (403, b'{"reason": "no right"}', {}), ["HTTP 403", "no right"]),
        (f"{PATH}/internalStats", (404, b'{"reason": "Topic not found"}', {}), ["HTTP 404", "Topic not found"]),
        (f"{PATH}/stats", (500, b"<html>", {}), ["HTTP 500", "/stats"]),
        (f"{PATH}/stats", (200, b"<html>", {}), ["not JSON"]),
        (f"{PATH}/stats", ["a"], ["stats"]),
        (f"{PATH}/internalStats", {"ledgers": []}, ["cursors", "required"]),
        (f"{PATH}/internalStats", INTERNALS | {"currentLedgerEntries": "60"}, ["currentLedgerEntries", "integer"]),
        (f"{PATH}/internalStats", (307, b"", {"Location": f"{PATH}/internalStats"}), ["more than 5 redirections"]),
        (f"{PATH}/internalStats", (307, b"", {"Location": "ftp://127.0.0.1/x"}), ["ftp://127.0.0.1"]),
        (f"{PATH}/internalStats", (307, b"", {"Location": "http://127.0.0.1:1/x"}), ["http://127.0.0.1:1"]),
        (RUNTIME, (500, b"", {}), ["HTTP 500", "configuration"]),
        (RUNTIME, ["a"], ["configuration of the broker"]),
        (RUNTIME, {"maxMessageSize": "many"}, ["maxMessageSize", "many"]),
        (RUNTIME, {"managedLedgerMaxUnackedRangesToPersist": "9" * 30}, ["managedLedgerMaxUnackedRangesToPersist"]),
        (NAMESPACE, (200, b'{"max_unacked_messages_per_consumer": 1' + b"0" * 400 + b"}", {}), ["more than 64 bits"]),
        ("/admin/v2/brokers/version", (200, b"new", {}), ["got 'new'"]),
        ("/admin/v2/persistent/public/default", {"a": 1}, ["must be a list of names"]),
        (NAMESPACE, {"max_unacked_messages_per_consumer": "9"}, ["policies", "'9'"]),
    ],
)  # fmt: skip
def test_what_a_broker_should_not_say_is_one_line(capsys, make_broker, path, answer, naming):
    assert_one_line(snapshot(capsys, make_broker({path: answer}).url), *naming)


@pytest.mark.parametrize("field", ["markDeletePosition", "individuallyDeletedMessages"])
def test_a_position_that_is_none_is_one_line(capsys, make_broker, field):
    internals = json.loads(json.dumps(INTERNALS))
    internals["cursors"]["sub"][field] = "[(3:4..3:2]]"
    assert_one_line(snapshot(capsys, make_broker({f"{PATH}/internalStats": internals}).url), "sub", field)


@pytest.mark.slow
def test_a_broker_that_does_not_answer_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert_one_line(snapshot(capsys, url, "--request-timeout", 1), url, "timed out")


def test_a_url_of_tls_to_a_port_without_it_is_one_line(capsys, make_broker):
    assert_one_line(snapshot(capsys, make_broker().url.replace("http", "https")), "SSL")


def test_nobody_at_the_url_is_one_line(capsys):
    assert_one_line(snapshot(capsys, "http://127.0.0.1:1"), "http://127.0.0.1:1", "refused")


@pytest.mark.parametrize(
    ("arguments", "naming"),
    [
        ([], ["the URL of a broker or --from"]),
        (["http://127.0.0.1:1", "--from", "x"], ["the URL of a broker or --from"]),
        (["--from", VECTORS, "--again", "5s"], ["one look"]),
        (["http://127.0.0.1:1", "--again", "0"], ["'0'"]),
        (["http://127.0.0.1:1", "--again", "soon"], ["soon"]),
        (["http://127.0.0.1:1", "--topic", "a/b"], ["a/b"]),
        (["http://127.0.0.1:1", "--namespace", "a"], ["tenant/namespace"]),
        (["ftp://127.0.0.1"], ["ftp://127.0.0.1"]),
        (["http://127.0.0.1:1", "--token-file", "/nowhere/token"], ["/nowhere/token"]),
    ],
)
def test_what_a_user_should_not_say_is_one_line(capsys, arguments, naming):
    assert_one_line(snapshot(capsys, *arguments), *naming)


def test_a_file_that_holds_no_token_is_not_shown(capsys, tmp_path):
    token_file = write_token(tmp_path / "token", "my secret")
    outcome = snapshot(capsys, "http://127.0.0.1:1", "--token-file", token_file)
    assert_one_line(outcome, "expected a token")
    assert "secret" not in outcome.err


# --- Partly acked batches, order, and names


def batched(acked="[]", *, unacked=246, kind="Shared", entries=60, mean=10, **more):
    """Answers of a broker whose consumers got batches. Of a recorded one with these numbers 312 came back."""
    internals, stats = json.loads(json.dumps(INTERNALS)), json.loads(json.dumps(STATS))
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
    ("recorded", "partly"),
    [
        (batched(unacked=600), 0),
        (batched(unacked=0), 600),
        (batched(unacked=-10), 600),
        (batched("[(3:0..3:9]]", unacked=510), 0),
        (batched("[(3:0..3:9]]", unacked=500), 10),
        (batched(unacked=300, msgDelayed=20), 100),
        (batched(unacked=300, msgInReplay=70), 0),
        (batched(unacked=0, kind="Exclusive"), None),
    ],
)
def test_an_estimate_is_of_what_was_delivered_and_not_acked(capsys, make_broker, recorded, partly):
    (found,) = told(capsys, make_broker(changes(*recorded)).url)["subscriptions"]
    assert (found["is_lower_bound"], found["partly_acked_messages"]) == (True, partly)


def test_a_number_is_no_lower_bound_without_batches(capsys, make_broker):
    broker = make_broker(changes(*batched(mean=1)))
    assert "+" not in snapshot(capsys, broker.url).out
    assert not told(capsys, broker.url)["subscriptions"][0]["is_lower_bound"]


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
    assert_one_line(snapshot(capsys, broker.url, "--top", "0"), "--top")


def test_every_remark_is_printed(capsys, make_broker):
    """Of cursors that redeliver nothing, and of more than are explained."""
    answers = {f"{PATH}/partitions": {"partitions": 30}}
    for number in range(30):
        answers |= changes(*batched(unacked=600), f"{PATH}-partition-{number}")
    said = " ".join(snapshot(capsys, make_broker(answers).url, "--topic", "smoke").out.split())
    assert said.count("messages an entry") == said.count("state NoLedger") == 30


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


def test_the_help_states_how_long_a_second_look_must_wait(capsys):
    said = " ".join(run(capsys, "pulsar", "snapshot", "--help").out.split())
    assert "Look again after TIME: 4s under traffic, 65s when quiet" in said
    assert "about 4s under traffic, at one write per second" in said


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


@pytest.mark.parametrize(
    ("name", "content", "naming"),
    [
        ("internalStats-a.json", "{", ["internalStats-a.json", "not JSON"]),
        ("internalStats-a.json", "[]", ["internalStats-a.json"]),
        ("notes.json", "{}", ["notes.json", "expected a file named"]),
        ("stats-a.json", "{}", ["no file internalStats-NAME.json"]),
        ("internalStats-a.json", None, ["internalStats-a.json", "No such file"]),
    ],
)
def test_a_bad_file_is_one_line(capsys, tmp_path, name, content, naming):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert_one_line(snapshot(capsys, "--from", tmp_path / name), *naming)
