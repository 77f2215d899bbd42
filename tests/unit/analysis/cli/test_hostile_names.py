"""Names that would control a terminal, from stores, traces, brokers, files and words: what is printed escapes them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import time

import pytest
from rich.console import Console
from rich.progress import Progress

from ackstate import LedgerMap, ManagedCursor, Position, SqliteStore
from ackstate.analysis.cli import console
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.parquet import write_trace
from ackstate.analysis.trace.recorder import Frame
from command_line import ENTRY, run
from pulsar_admin import INTERNALS, STATS, serving, topic_answers

# Colour, title, bell, C1, end of line, back to its start, right to left, isolate, invisible, line and page separators.
CODES = "\x1b[31m\x1b]0;T\x07\x9b2J\n\rackstate:\x85\u202e\u2066\u200b\u2028\u2029\x00\x7f"
TOPIC = f"persistent://public/default/o{CODES}"
SUBSCRIPTION = f"s{CODES}<script>alert(1)</script>"
ESCAPED = r"\x1b[31m\x1b]0;T\x07\x9b2J\n\rackstate:\x85\u202e\u2066\u200b\u2028\u2029\x00\x7f"


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


@pytest.fixture
def trace(tmp_path):
    events = [Event(number, EventKind.ACK, 3, number, number) for number in range(0, 200, 2)]
    path = tmp_path / f"t{CODES.replace(chr(0), '')}"
    write_trace([Frame(TOPIC, SUBSCRIPTION, events), Frame(TOPIC, f"=1+1{CODES}", events)], path)
    return path


def test_names_of_a_trace(capsys, trace, tmp_path):
    report = tmp_path / f"r{CODES.replace(chr(0), '')}.html"
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


def test_names_of_a_broker(capsys, tmp_path):
    """Of topics, subscriptions, owners, states and remarks; and its reasons for a refusal."""
    path = "/admin/v2/persistent/public/default/"
    internals = json.loads(json.dumps(INTERNALS))
    internals["cursors"][SUBSCRIPTION] = internals["cursors"].pop("sub") | {"state": CODES}
    stats = json.loads(json.dumps(STATS)) | {"ownerBroker": CODES}
    changes = {
        "/admin/v2/tenants": ["public", f"demo{CODES}"],
        "/admin/v2/namespaces/public": ["public/default", f"public/x{CODES}"],
        path[:-1]: ["persistent://public/default/o", f"persistent://public/default{CODES}/o"],
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
        outcome = run(capsys, "pulsar", "record", broker.url, tmp_path / f"t{CODES[:-2]}", "--for", "1s")
        assert outcome.status == 1
        assert_harmless(outcome.out)
        assert_harmless(outcome.err, lines_of_codes=2)
        for words in (["explain", broker.url], ["pulsar", "snapshot", broker.url, "--topic", "o"]):
            outcome = run(capsys, *words)
            assert (outcome.status, outcome.out) == (2, "")
            assert_harmless(outcome.err, lines_of_codes=1)


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
