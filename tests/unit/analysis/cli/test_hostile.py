"""Hostile names and answers, from stores, traces, brokers, files and words: names are escaped, answers one line."""

import contextlib
import io
import json
import os
import resource
import subprocess
import time
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from ackstate import LedgerMap, ManagedCursor, Position, SqliteStore
from ackstate.analysis.cli import console
from ackstate.analysis.pulsar.recorder import TopicFollower
from ackstate.analysis.pulsar.sources import BrokerSettings, SnapshotError, TopicInternals, TopicStats, read_object
from ackstate.analysis.pulsar.trace_directory import TraceDirectory
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.parquet import write_trace
from ackstate.analysis.trace.recording import Frame
from command_line import ENTRY, assert_one_line, run
from pulsar_admin import INTERNALS, PATH, RUNTIME, STATS, Durable, serving, topic_answers
from pulsar_admin import TOPIC as SMOKE

# Colour, title, bell, C1, end of line, back to its start, right to left, isolate, invisible, line and page separators.
CODES = "\x1b[31m\x1b]0;T\x07\x9b2J\n\rackstate:\x85\u202e\u2066\u200b\u2028\u2029\x00\x7f"
TOPIC = f"persistent://public/default/o{CODES}"
SUBSCRIPTION = f"s{CODES}<script>alert(1)</script>"
ESCAPED = r"\x1b[31m\x1b]0;T\x07\x9b2J\n\rackstate:\x85\u202e\u2066\u200b\u2028\u2029\x00\x7f"
LISTED = "/admin/v2/persistent/public/default"


def assert_harmless(*texts, lines_of_codes=0):
    """Every character is printable, or ends a line of ours."""
    for text in texts:
        assert "".join(text.split("\n")).isprintable(), repr(text)
        assert not [line for line in text.splitlines() if line.startswith("ackstate:")][lines_of_codes:], repr(text)


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    with contextlib.closing(SqliteStore(path)) as store:
        cursor = ManagedCursor.open(
            store, topic=TOPIC, subscription=SUBSCRIPTION, ledgers=LedgerMap.from_counts({3: 10}),
            properties={f"p{CODES}": CODES}, now_ms=0,
        )  # fmt: skip
        cursor.mark_delete(Position(3, 1), properties={CODES: 1}, now_ms=0)
        cursor.ack(Position(3, 4), now_ms=0)
        cursor.persist(now_ms=0)
    return path


@pytest.mark.parametrize("command", ["fsck", "inspect", "explain"])
def test_names_of_a_store(capsys, store, command):
    outcome = run(capsys, command, store)
    assert (outcome.status, outcome.err) == (0, "")
    assert ESCAPED in outcome.out
    assert_harmless(outcome.out)
    as_json = run(capsys, command, store, "--json").out
    assert_harmless(as_json)
    assert json.loads(as_json)["cursors"][0]["topic"] == TOPIC


def test_a_name_that_is_asked_for_and_a_store_that_is_none(capsys, store):
    for words in (["inspect", store, "--topic", CODES], ["fsck", f"{store}{CODES.replace(chr(0), '')}"], [CODES]):
        outcome = run(capsys, *words)
        assert (outcome.status, outcome.out) == (2, "")
        assert_harmless(outcome.err, lines_of_codes=1)
    outcome = run(capsys, "namespaces", "get-delayed-delivery", CODES)
    assert outcome.status == 1
    assert_harmless(outcome.err)


def test_names_of_a_trace(capsys, tmp_path):
    events = [Event(number, EventKind.ACK, 3, number, number) for number in range(0, 200, 2)]
    trace, report = (tmp_path / f"{name}{CODES.replace(chr(0), '')}" for name in ("t", "r.html"))
    write_trace([Frame(TOPIC, SUBSCRIPTION, events), Frame(TOPIC, f"=1+1{CODES}", events)], trace)
    for words in (["redelivery", trace, "--report", report], ["sweep", trace]):
        outcome = run(capsys, *words, "--engine", "local")
        assert outcome.status == 0, outcome.err
        assert_harmless(outcome.out, outcome.err)
    page = report.read_text()
    assert_harmless(page)
    assert "<script>alert" not in page
    assert r"\x1b[31m" in page
    answer = run(capsys, "redelivery", trace, "--engine", "local", "--json").out
    assert_harmless(answer)
    assert {SUBSCRIPTION, f"=1+1{CODES}"} <= {
        each["subscription"] for policy in json.loads(answer)["policies"] for each in policy["estimates"]
    }
    outcome = run(capsys, "trace", "check", trace)
    assert (outcome.status, outcome.err) == (0, "")
    assert_harmless(outcome.out)


HOLE = {
    "first": CODES, "last": CODES, "entry_count": 5, "age_ms": None, "why": CODES, "detail": CODES,
    "consumers": ["ann"], "deliver_at_ms": None, "delivery_count": 1, "cost_bytes": 14, "freed_bytes": 14,
    "freed_ranges": 1, "mark_delete_advance": 5,
}  # fmt: skip
BLOCK = {"rule": CODES, "consumer": CODES, "used": 1, "limit": 1, "released_at": 0, "since_ms": None, "detail": CODES}
EXPLAINED = {
    "subscription": CODES, "type": CODES, "mark_delete": CODES, "backlog": 5, "range_count": 1,
    "record_bytes": 14, "redelivery_if_crashed": 3, "hole_count": 2, "holes": [HOLE], "blocked": [BLOCK],
}  # fmt: skip


def test_names_of_a_broker(monkeypatch, capsys, tmp_path):
    """Of topics, subscriptions, owners, states and remarks; and its reasons for a refusal."""
    path = f"{LISTED}/"
    internals = json.loads(json.dumps(INTERNALS))
    internals["cursors"][SUBSCRIPTION] = internals["cursors"].pop("sub") | {"state": CODES}
    stats = json.loads(json.dumps(STATS)) | {"ownerBroker": CODES}
    changes = {
        "/admin/v2/tenants": ["public", f"demo{CODES}"],
        "/admin/v2/namespaces/public": ["public/default", f"public/x{CODES}"],
        LISTED: ["persistent://public/default/o", f"persistent://public/default{CODES}/o"],
        f"{path}o/partitions": (409, json.dumps({"reason": CODES}).encode(), {}),
    }
    with serving(topic_answers(f"{path}o", internals, stats) | changes) as broker:
        outcome = run(capsys, "pulsar", "snapshot", broker.url)
        assert (outcome.status, outcome.err) == (1, "")
        assert outcome.out.count(ESCAPED) > 8
        assert_harmless(outcome.out)
        assert SUBSCRIPTION in {
            each["subscription"]
            for each in json.loads(run(capsys, "pulsar", "snapshot", broker.url, "--json").out)["subscriptions"]
        }
        monkeypatch.setattr("ackstate.analysis.pulsar.durable.DurableReader", lambda _: Durable())
        words = ["--metadata", "pulsar+zk://127.0.0.1:1", "--for", "1s"]
        outcome = run(capsys, "pulsar", "record", broker.url, tmp_path / f"t{CODES[:-2]}", *words)
        assert outcome.status == 1
        assert_harmless(outcome.out)
        assert_harmless(outcome.err, lines_of_codes=2)
        for words in (["explain", broker.url], ["pulsar", "snapshot", broker.url, "--topic", "o"]):
            outcome = run(capsys, *words)
            assert (outcome.status, outcome.out) == (2, "")
            assert_harmless(outcome.err, lines_of_codes=1)
        broker.answers[f"{path}o/explain"] = {"topic": TOPIC, "now_ms": 7, "subscriptions": [EXPLAINED]}
        outcome = run(capsys, "explain", broker.url)
        assert outcome.out.count(ESCAPED) >= 7
        assert_harmless(outcome.out)


def test_a_progress_that_is_shown(monkeypatch):
    """Not markup of Rich either."""
    screen = io.StringIO()
    monkeypatch.setattr(
        console, "Console", lambda **options: Console(file=screen, force_terminal=True, color_system=None, width=200)
    )
    with console.progress(auto_refresh=False) as shown:
        assert isinstance(shown, Progress)
        shown.add_task(f"[bold]{CODES}", total=1)
        shown.refresh()
    assert rf"[bold]{ESCAPED}" in screen.getvalue()
    assert "\x1b]0;" not in screen.getvalue()


@pytest.mark.slow
def test_at_a_terminal_only_our_own_style_is_left(store):
    ours, theirs = os.openpty()
    command = [*ENTRY, "inspect", str(store)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    shown, until_s = b"", time.monotonic() + 60
    with contextlib.suppress(OSError):  # the end, once the process has closed the terminal
        while time.monotonic() < until_s and (part := os.read(ours, 65_536)):
            shown += part
    os.close(ours)
    assert process.wait(60) == 0
    text = shown.decode()
    assert r"\x1b]0;T\x07" in text.replace("\r\n", "")
    for code in ("\x1b]", "\x07", "\x9b", "\u202e", "\u2066", "\u2028", "\x85", "\x1b[31m"):
        assert code not in text, repr(code)


# --- answers

LAST = 2**32 - 2
OPEN = {"markDeletePosition": "1:-1", "state": "Open"}
CURSOR = INTERNALS["cursors"]["sub"]


def with_ranges(text, ledgers=(), *, cursors=1):
    names = [f"s{number}" for number in range(cursors)]
    return {
        "ledgers": [{"ledgerId": ledger_id, "entries": count} for ledger_id, count in ledgers],
        "cursors": {name: OPEN | {"individuallyDeletedMessages": text} for name in names},
    }


def with_ledger(ledger_id, entries=5):
    ledgers = [{"ledgerId": ledger_id, "entries": entries}, {"ledgerId": 4, "entries": 0}]
    return INTERNALS | {"ledgers": ledgers}


LONG_RECORD, LONG_NUMBER = "a record of words that is as long as none", "a number that is none of 64 bits"
IMPOSSIBLE = {
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
    LONG_RECORD: with_ranges(f"[(3:{LAST - 1}..3:{LAST}]]", [(3, LAST + 1), (4, 0)]),
    "a ledger that no ledger is": with_ranges(f"[({10**19 - 1}:-1..{10**19 - 1}:3]]"),
    "an entry that no entry is": with_ranges("[(3:-1..3:9999999999]]"),
    "a position that is none": INTERNALS | {"cursors": {"sub": CURSOR | {"markDeletePosition": "[(3:4..3:2]]"}}},
    "ranges that are none": INTERNALS | {"cursors": {"sub": CURSOR | {"individuallyDeletedMessages": "[(3:4..3:2]]"}}},
    **{f"a name, {name[:3]!r}": INTERNALS | {"cursors": {name: CURSOR}} for name in ("x" * 70_000, "\ud800")},
    **{f"a ledger, {number}": with_ledger(number) for number in (-1, 2**63, 10**30)},
    **{f"entries of a ledger, {number}": with_ledger(3, number) for number in (2**40, 2**63, 10**30)},
    **{f"entries, {number}": INTERNALS | {"currentLedgerEntries": number} for number in (2**40, 2**63, 10**30, "60")},
    LONG_NUMBER: INTERNALS | {"entriesAddedCounter": 10**400},
    "no cursors": {"ledgers": []},
}


@pytest.mark.parametrize("internals", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_answer_is_refused_as_a_whole_and_the_other_topics_are_judged(capsys, tmp_path, internals):
    """Without the memory that its numbers would take, and with no event that a trace cannot hold."""
    other = "persistent://public/default/other"
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with serving(topic_answers(f"{LISTED}/other", internals) | {LISTED: [SMOKE, other]}) as broker:
        outcome = run(capsys, "pulsar", "snapshot", broker.url, "--json")
    answer = json.loads(outcome.out)
    assert [each["topic"] for each in answer["subscriptions"]] == [SMOKE]
    (missing,) = answer["missing"]
    assert (outcome.status, missing["topic"], missing["reason"]) == (1, other, "failing")
    assert other.rpartition("/")[2] in missing["why"]
    source = SimpleNamespace(
        settings=lambda _: BrokerSettings(), stats=lambda _: read_object(TopicStats, STATS, what="stats"),
        internals=lambda _: read_object(TopicInternals, internals, what="internalStats"),
    )  # fmt: skip
    with TraceDirectory(tmp_path / "trace") as trace:
        # Of the others the client's JSON is the guard, and a trace has no record of words.
        if internals not in (IMPOSSIBLE[LONG_RECORD], IMPOSSIBLE[LONG_NUMBER]):
            with pytest.raises(SnapshotError) as refused:
                TopicFollower(SMOKE, {}, partial(trace.record, SMOKE)).poll(
                    source, Durable(), lambda: 1_700_000_000_000
                )
            assert len(str(refused.value)) < 500
    assert not list((tmp_path / "trace").glob("*.parquet"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 300_000


WRONG = [
    (f"{PATH}/internalStats", (401, b"", {}), ["HTTP 401", "--token-file"]),
    (f"{PATH}/internalStats", (403, b'{"reason": "no right"}', {}), ["HTTP 403", "no right"]),
    (f"{PATH}/internalStats", (404, b'{"reason": "Topic not found"}', {}), ["HTTP 404", "Topic not found"]),
    *((f"{PATH}/internalStats", (status, b"", {}), [f"HTTP {status}"]) for status in (300, 302, 304, 399)),
    (f"{PATH}/stats", (500, b"<html>", {}), ["HTTP 500", "/stats"]),
    (f"{PATH}/stats", (200, b"<html>", {}), ["not JSON"]),
    (f"{PATH}/stats", ["a"], ["stats"]),
    (f"{PATH}/internalStats", {"ledgers": []}, ["cursors", "required"]),
    (f"{PATH}/internalStats", INTERNALS | {"currentLedgerEntries": "60"}, ["currentLedgerEntries", "integer"]),
    (RUNTIME, (500, b"", {}), ["HTTP 500", "configuration"]),
    (RUNTIME, ["a"], ["configuration of the broker"]),
    (RUNTIME, {"maxMessageSize": "many"}, ["maxMessageSize", "many"]),
    (RUNTIME, {"managedLedgerMaxUnackedRangesToPersist": "9" * 30}, ["managedLedgerMaxUnackedRangesToPersist"]),
    (f"{PATH}/stats", (200, b'{"msgInCounter": 1' + b"0" * 400 + b"}", {}), ["more than 64 bits"]),
    ("/admin/v2/brokers/version", (200, b"new", {}), ["got 'new'"]),
    (LISTED, {"a": 1}, ["must be a list of names"]),
    *(
        (path, (status, b"", {}), [path, f"HTTP {status}"])
        for path in ("/admin/v2/tenants", "/admin/v2/namespaces/public", LISTED)
        for status in (401, 404, 500)
    ),
]


@pytest.mark.parametrize(("path", "answer", "naming"), WRONG)
def test_what_a_broker_should_not_say_is_one_line(capsys, path, answer, naming):
    with serving({path: answer}) as broker:
        assert_one_line(run(capsys, "pulsar", "snapshot", broker.url), *naming)


@pytest.mark.parametrize("count", [-1, True, 1.0, "2", 100_001, 10**18])
def test_a_number_of_partitions_that_no_topic_has_is_one_line(capsys, count):
    with serving({f"{PATH}/partitions": {"partitions": count}}) as broker:
        outcome = run(capsys, "pulsar", "snapshot", broker.url, "--topic", "smoke")
    assert_one_line(outcome, f"{PATH}/partitions", "100,000")


@pytest.mark.parametrize(
    "change",
    [
        {"subscriptions": "none"},
        {"subscriptions": [EXPLAINED | {"backlog": "5"}]},
        {"subscriptions": [EXPLAINED | {"holes": [HOLE | {"age_ms": 1.5}]}]},
        {"now_ms": None},
    ],
)
def test_a_malformed_explanation_is_refused(capsys, change):
    explained = {"topic": SMOKE, "now_ms": 7, "subscriptions": [EXPLAINED]}
    with serving({f"{PATH}/explain": explained | change}) as broker:
        assert_one_line(run(capsys, "explain", broker.url), f"{SMOKE}: explain: ")
