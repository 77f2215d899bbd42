"""`ackstate pulsar record` against a server that answers as a broker does: its trace, failures, and restarts."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from ackstate.analysis.admin_client import AdminServer, PulsarAdmin
from ackstate.analysis.pulsar import recorder as cluster_recorder
from ackstate.analysis.pulsar import trace_directory
from ackstate.analysis.pulsar.durable import CursorGoneError
from ackstate.analysis.pulsar.recorder import ClusterRecorder, PollQueue, TopicFollower, matches
from ackstate.analysis.pulsar.sources import LiveBroker, TopicInternals, TopicStats, read_object
from ackstate.analysis.pulsar.trace_directory import TraceDirectory
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.chunks import events_of as columns_of
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.parquet import check_trace, listed_names
from ackstate.stores.base import StoreError
from command_line import assert_one_line, run
from pulsar_admin import (
    CONFIGURATION,
    INTERNALS,
    PATH,
    RUNTIME,
    STATS,
    TOPIC,
    Durable,
    serving,
    state,
    topic_answers,
)  # fmt: skip

T0 = 1_700_000_000_000
NAMES = "/admin/v2/persistent/public/default"
OTHER, OTHER_PATH = f"{TOPIC}-2", f"{PATH}-2"


def acked(entries, *, ledger=None, counter=60):
    """Return internal stats whose cursor has acked some entries of ledger 3."""
    internals = copy.deepcopy(INTERNALS)
    cursor = internals["cursors"]["sub"]
    cursor["individuallyDeletedMessages"] = f"[{','.join(f'(3:{entry - 1}..3:{entry}]' for entry in entries)}]"
    cursor["cursorLedger"] = cursor["cursorLedger"] if ledger is None else ledger
    internals["entriesAddedCounter"] = counter
    return internals


class StopError(Exception):
    """Ends a recording."""


def record(url, path, *, polls=0, between=lambda number: None, until=None, glob="", durable=None):
    """Record until there were some polls, of which each is followed by `between`, or until `until` says so."""
    with PulsarAdmin(AdminServer(url, timeout_s=5)) as admin, TraceDirectory(path) as trace:
        recorder = ClusterRecorder(LiveBroker(admin), durable or Durable(), trace, every_s=0.0, glob=glob)
        seen, calls = [0], iter(range(2_000))

        def show(state):
            assert next(calls, None) is not None, "the recording does not end"
            for number in range(seen[0], state.polls):
                between(number + 1)
            seen[0] = state.polls
            if until(state) if until else state.polls >= polls:
                raise StopError

        with pytest.raises(StopError):
            recorder.run(None, show)
        return recorder.progress(), trace.resumed


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """Without pauses between polls, and after failures."""
    monkeypatch.setattr(cluster_recorder, "_PAUSE_S_MAX", 0.0)


def events_of(path):
    """Return the events of each (topic, subscription) of a trace."""
    found = {}
    for file in sorted(path.glob("*.parquet")):
        for batch in pq.read_table(file).to_batches():
            offsets, columns = columns_of(batch, Event._fields)
            keys = zip(batch["topic"].to_pylist(), batch["subscription"].to_pylist(), strict=True)
            for row, key in enumerate(keys):
                rows = zip(*(each[offsets[row] : offsets[row + 1]].tolist() for each in columns), strict=True)
                found.setdefault(key, []).extend(Event(*each) for each in rows)
    return found


def kinds(events):
    return [EventKind(event.kind).name for event in events]


# --- Recorded events


def test_acks_records_and_ledgers_of_a_topic(tmp_path):
    looks = [acked([1]), acked([1, 3]), acked([1, 3]), acked([1, 3])]
    durable = Durable(state(), state(), state([1], 2), state([1, 3], 3))
    with serving({f"{PATH}/internalStats": looks}) as broker:
        found, resumed = record(broker.url, tmp_path / "trace", polls=4, durable=durable)
    assert resumed.until_ms == -1
    assert (found.topics, found.cursors, found.unread) == (1, 1, 0)
    assert check_events(tmp_path / "trace").events == found.events
    events = events_of(tmp_path / "trace")
    assert kinds(events[TOPIC, ""]) == ["PUBLISH"]
    assert events[TOPIC, ""][0][2:5] == (3, 0, 59)
    assert kinds(events[TOPIC, "sub"]) == [
        "ACK", "ACK", "PERSIST_BEGUN", "CUT_OFF", "PERSIST_ENDED", "PERSIST_BEGUN", "PERSIST_ENDED",
    ]  # fmt: skip
    assert [event.first_entry for event in events[TOPIC, "sub"] if event.kind == EventKind.ACK] == [1, 3]
    assert [event.number for event in events[TOPIC, "sub"][2:]] == [1, -1, 1, 2, 2]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("public/default/orders", True), ("persistent://public/default/orders", True), ("public/*/or*s", True),
        ("*", True), ("orders", False), ("public/default/order", False), ("public/default/orders-partition-3", True),
        ("public/default/orders-partition-4", False), ("PUBLIC/*", False),
    ],
)  # fmt: skip
def test_globs(glob, expected):
    assert matches("persistent://public/default/orders-partition-3", glob) is expected


def test_only_matching_topics_are_polled(tmp_path):
    changes = {NAMES: [TOPIC, OTHER]} | topic_answers(OTHER_PATH)
    with serving(changes) as broker:
        found, _ = record(broker.url, tmp_path / "trace", polls=2, glob="*smoke-2")
        assert f"{PATH}/internalStats" not in broker.asked
    assert found.topics == 1


# --- Brokers that do not answer


@pytest.mark.parametrize("answer", [(404, b'{"reason": "Topic not found"}', {}), (503, b"", {}), (200, b"{}", {})])
def test_a_topic_that_is_not_answered_is_polled_again_and_the_others_go_on(tmp_path, answer):
    changes = {NAMES: [TOPIC, OTHER]} | topic_answers(OTHER_PATH)
    good = topic_answers(OTHER_PATH)[f"{OTHER_PATH}/internalStats"]
    unread = []

    def until(state):
        unread.append(state.unread)
        if state.polls > 6:
            broker.answers[f"{OTHER_PATH}/internalStats"] = good
        return state.polls > 6 and not state.unread

    with serving(changes | {f"{OTHER_PATH}/internalStats": answer}) as broker:
        record(broker.url, tmp_path / "t", until=until)
    assert 1 in unread
    assert {topic for topic, _ in events_of(tmp_path / "t")} == {TOPIC, OTHER}


def test_a_cursor_whose_durable_state_cannot_be_read_is_polled_again_and_the_others_go_on(tmp_path):
    class Torn(Durable):
        def read(self, cursors):
            failed = StoreError("bookie down") if polls[0] < 4 else state([1])
            return {name: failed if name[1] == "sub" else CursorGoneError("gone") for name in cursors}

    unread, polls = [], [0]

    def until(found):
        polls[0] = broker.asked.count(f"{PATH}/internalStats")
        unread.append((found.unread, found.last_failure))
        return found.polls > 1 and not found.unread

    with_another = acked([1, 3])
    with_another["cursors"]["other"] = with_another["cursors"]["sub"]
    with serving({f"{PATH}/internalStats": with_another}) as broker:
        record(broker.url, tmp_path / "t", until=until, durable=Torn())
    assert (1, "bookie down") in unread
    assert kinds(events_of(tmp_path / "t")[TOPIC, "sub"]) == ["RECOVER", "ACK"]
    assert (TOPIC, "other") not in events_of(tmp_path / "t")


def test_a_deleted_subscription_and_a_deleted_topic_redeliver_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_recorder, "LISTING_S", 0.0)
    without = copy.deepcopy(INTERNALS)
    without["cursors"] = {}
    changes = {NAMES: [TOPIC, OTHER]} | topic_answers(OTHER_PATH)
    with serving(changes | {f"{PATH}/internalStats": [INTERNALS, INTERNALS, without]}) as broker:

        def between(number):
            if number == 8:
                broker.answers[NAMES] = [TOPIC]

        record(broker.url, tmp_path / "trace", polls=40, between=between)
    events = events_of(tmp_path / "trace")
    for topic in (TOPIC, OTHER):
        assert {*kinds(events[topic, "sub"])[-30:]} == {"REDELIVER"}
        assert kinds(events[topic, "sub"])[-31] == "RESET"
        assert "CRASH" not in kinds(events[topic, "sub"])


TENANTS, NAMESPACES = "/admin/v2/tenants", "/admin/v2/namespaces/public"


@pytest.mark.parametrize("answer", [(403, b"", {}), (404, b"", {}), (500, b"", {}), {"a": 1}])
@pytest.mark.parametrize("path", [NAMES, NAMESPACES])
def test_topics_that_cannot_be_listed_any_more_go_on(tmp_path, monkeypatch, path, answer):
    """They were not deleted: nothing is recorded as redelivered, and their acks are."""
    monkeypatch.setattr(cluster_recorder, "LISTING_S", 0.0)
    changes = {
        TENANTS: ["demo", "public"],
        "/admin/v2/namespaces/demo": ["demo/x"],
        "/admin/v2/persistent/demo/x": ["persistent://demo/x/t"],
        f"{PATH}/internalStats": [acked([entry]) for entry in range(1, 40, 2)],
    }
    unlisted = set()

    def until(state):
        unlisted.update(state.unlisted)
        broker.answers[path] = answer if 4 <= state.polls < 30 else whole
        return state.polls > 60 and unlisted and not state.unlisted

    with serving(changes | topic_answers("/admin/v2/persistent/demo/x/t")) as broker:
        whole = broker.answers[path]
        record(broker.url, tmp_path / "t", until=until)
    assert len(unlisted) == 1
    events = events_of(tmp_path / "t")
    assert not {"REDELIVER", "RESET", "CRASH"} & {*kinds(events["persistent://demo/x/t", "sub"])}
    assert {event.first_entry for event in events[TOPIC, "sub"] if event.kind == EventKind.ACK} >= {1, 3, 5, 37}


# --- Hours, ends and restarts


def publish(trace, count, *, begin_ms=T0):
    """Record some events, one each call."""
    for number in range(count):
        trace.record(TOPIC, "sub", [Event(begin_ms + number, EventKind.ACK, 3, number, number)])


def test_each_hour_is_a_file_and_the_trace_is_whole_after_each(tmp_path):
    with TraceDirectory(tmp_path / "trace") as trace:
        for hour in range(3):
            publish(trace, 5, begin_ms=T0 + hour * 3_600_000)
            assert trace.finish_hour() == 5
            assert check_events(tmp_path / "trace").events == 5 * (hour + 1)
        assert trace.finish_hour() == 0, "an hour without events is no file"
    assert listed_names(tmp_path / "trace") == {f"part-0000{number}.parquet" for number in range(3)}
    assert check_trace(tmp_path / "trace").chunk_count == 3


def abandoned(path, count):
    """Leave the remains of a killed process: a lock that the kernel has released, and an unfinished hour."""
    trace = TraceDirectory(path)
    publish(trace, count)
    trace._recorder.close()
    trace._lock.close()
    (segment,) = (path / ".recording" / "00000").iterdir()
    return segment


def test_a_kill_loses_at_most_the_torn_poll(tmp_path):
    """At every byte of the last frame."""
    segment = abandoned(tmp_path / "trace", 5)
    whole = segment.read_bytes()
    frame = (len(whole) - 12) // 5
    for lost in range(0, frame, 5):
        path = tmp_path / f"trace-{lost}"
        again = abandoned(path, 5)
        again.write_bytes(whole[: len(whole) - lost])
        with TraceDirectory(path) as trace:
            assert trace.resumed.recovered_events == (5 if not lost else 4)
            assert trace.resumed.lost_bytes == (frame - lost if lost else 0)
            assert set(trace.resumed.recorded[TOPIC, "sub"][3]) == set(range(trace.resumed.recovered_events))
            publish(trace, 2, begin_ms=trace.resumed.until_ms)
        assert check_events(path).events == trace.resumed.recovered_events + 2


@pytest.mark.parametrize("step", ["before the file", "before the manifest", "before the recording is deleted"])
def test_finishing_an_hour_can_be_repeated_after_a_crash_at_each_step(tmp_path, monkeypatch, step):
    class Died(BaseException):
        """The process ends here."""

    def die(*_arguments, **_options):
        raise Died

    path = tmp_path / "trace"
    trace = TraceDirectory(path)
    publish(trace, 5)
    with monkeypatch.context() as patch:
        name = {"before the file": "write_chunks", "before the manifest": "write_manifest"}.get(step)
        patch.setattr(*(trace_directory, name) if name else (trace_directory.shutil, "rmtree"), die)
        with pytest.raises(Died):
            trace.finish_hour()
    trace._lock.close()
    with TraceDirectory(path) as again:
        publish(again, 2, begin_ms=T0 + 1_000)
    assert check_events(path).events == 7
    assert [event.first_entry for event in events_of(path)[TOPIC, "sub"]] == [0, 1, 2, 3, 4, 0, 1]


def test_subscriptions_and_topics_that_are_deleted_between_recordings_redeliver_nothing(tmp_path):
    without = copy.deepcopy(INTERNALS)
    without["cursors"] = {}
    with serving({NAMES: [TOPIC, OTHER]} | topic_answers(OTHER_PATH)) as broker:
        record(broker.url, tmp_path / "trace", polls=2)
        broker.answers |= {NAMES: [TOPIC], f"{PATH}/internalStats": without}
        record(broker.url, tmp_path / "trace", polls=1, glob="*smoke")
        assert "RESET" not in kinds(events_of(tmp_path / "trace")[OTHER, "sub"]), "it was not asked for"
        for _ in range(2):
            record(broker.url, tmp_path / "trace", polls=1)
    events = events_of(tmp_path / "trace")
    for topic in (TOPIC, OTHER):
        assert kinds(events[topic, "sub"]).count("RESET") == 1
    assert check_events(tmp_path / "trace").subscriptions == 2


def test_a_subscription_that_is_created_again_is_a_new_one():
    without = copy.deepcopy(INTERNALS)
    without["cursors"] = {}
    events, clock = {}, iter(range(T0, T0 + 1_000))
    follower = TopicFollower(TOPIC, {}, lambda name, found: events.setdefault(name, []).extend(found))
    for internals in (acked([1, 3]), without, acked([5])):
        answers = SimpleNamespace(
            stats=lambda _: read_object(TopicStats, STATS, what="stats"),
            internals=lambda _, answer=internals: read_object(TopicInternals, answer, what="internalStats"),
        )  # fmt: skip
        follower.poll(answers, Durable(), clock.__next__)
    found = events["sub"]
    assert "CRASH" not in kinds(found)
    (again,) = (each for each in found if each.kind == EventKind.ACK and each.first_entry == 5)
    assert again.ts_ms == found[-1].ts_ms
    assert sum(each.kind == EventKind.REDELIVER for each in found) == 2, "nothing is acked in between"


def test_two_processes_cannot_record_into_one_trace(tmp_path):
    with TraceDirectory(tmp_path / "trace"), pytest.raises(TraceError, match="another process records there"):
        TraceDirectory(tmp_path / "trace")


def test_a_full_disk_ends_the_recording_and_keeps_it(tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    path = tmp_path / "trace"

    def until(state):
        if state.polls:
            monkeypatch.setattr(trace_directory.Recorder, "record", full)
            broker.answers[f"{PATH}/internalStats"] = acked([1, 3, 7, 59])

    with serving() as broker, pytest.raises(OSError, match="No space left"):
        record(broker.url, path, until=until)
    assert check_events(path).events > 0


# --- The command

METADATA = ("--metadata", "pulsar+zk://127.0.0.1:2181")


@pytest.fixture
def answered(monkeypatch):
    """The metadata store of every URL answers."""
    monkeypatch.setattr("ackstate.analysis.pulsar.durable.DurableReader", lambda _: Durable())


@pytest.mark.usefixtures("answered")
def test_the_command_records_for_a_time(capsys, tmp_path):
    path = tmp_path / "trace"
    with serving() as broker:
        outcome = run(capsys, "pulsar", "record", broker.url, path, "--for", "1s", *METADATA)
    assert (outcome.status, outcome.err) == (0, "")
    assert re.fullmatch(rf"{path}: \d+ events in \d polls? of 1 topic, 1 cursor\n", outcome.out)


def test_without_access_to_the_metadata_nothing_is_recorded(capsys, tmp_path):
    with serving() as broker:
        outcome = run(capsys, "pulsar", "record", broker.url, tmp_path / "trace")
        assert_one_line(outcome, "names no ZooKeeper", "(--metadata)", "record with the broker's interceptor")
        outcome = run(capsys, "pulsar", "record", broker.url, tmp_path / "trace", "--metadata", "etcd:http://a:1")
        assert_one_line(outcome, "etcd", "not supported")
    assert not (tmp_path / "trace").exists()


@pytest.mark.usefixtures("answered")
def test_a_broker_that_embeds_ackstate_is_not_recorded_by_polls(capsys, tmp_path):
    with serving({"/admin/v2/brokers/version": (200, b"4.2.0 (ackstate 1)", {})}) as broker:
        outcome = run(capsys, "pulsar", "record", broker.url, tmp_path / "trace", *METADATA)
    assert_one_line(outcome, "ackstate.analysis.trace.recording.Recording")


def test_redelivery_is_that_of_the_polls_and_not_of_the_first_or_of_the_events_between(capsys, tmp_path):
    """Forty are durable at the first poll; then ten are acked and written at once, and two are not written."""
    path = tmp_path / "trace"
    looks = [acked(range(40)), acked(range(50)), acked([*range(50), 52, 54])]
    durable = Durable(state(range(40)), state(range(50), 2))
    with serving({f"{PATH}/internalStats": looks}) as broker:
        record(broker.url, path, polls=4, durable=durable)
    (found,) = json.loads(run(capsys, "redelivery", path, "--engine", "local", "--json").out)["subscriptions"]
    assert (found["max"], found["crashes"]) == (2, [])
    outcome = run(capsys, "redelivery", path, "--engine", "local")
    assert "Recorded by polls: times are known to one poll of 0." in outcome.out
    assert "│   2 │" in outcome.out
    report = tmp_path / "report.html"
    words = ("--engine", "local", "--set", "flush_interval_ms=1ms,60s", "--current-policy", "default")
    outcome = run(capsys, "sweep", path, *words, "--report", report)
    assert "flush_interval_ms=1: times are known to one poll of" in outcome.out
    assert outcome.out.count("Recorded by polls") == report.read_text().count("Recorded by polls") == 1
    outcome = run(capsys, "sweep", path, *words[:-1], "flush_interval_ms=1")
    assert_one_line(outcome, "current policy: times are known to one poll of")


RUNTIME_SETTINGS = CONFIGURATION | {
    "managedLedgerDefaultMarkDeleteRateLimit": "0.5", "managedLedgerCursorPositionFlushSeconds": "30",
    "brokerClientAuthenticationParameters": "secret",
}  # fmt: skip


def test_the_policy_in_force_is_that_of_the_recorded_broker(capsys, tmp_path):
    """And it is compared with policies of Pulsar alone."""
    path = tmp_path / "trace"
    with serving({RUNTIME: RUNTIME_SETTINGS, f"{PATH}/internalStats": [acked([1, 3]), acked([1, 3, 5, 7])]}) as broker:
        record(broker.url, path, polls=2)
    assert "secret" not in (path / "_broker.json").read_text()
    assert check_events(path).subscriptions == 1
    found = json.loads(run(capsys, "sweep", path, "--engine", "local", "--json").out)
    assert found["baseline"].startswith("format=PULSAR flush_interval_ms=30000 mark_delete_rate_limit=0.5")
    assert found["baseline_source"] == "read from the broker while it was recorded"
    labels = [each["label"] for each in found["policies"][1:]]
    assert [label for label in labels if "format=PULSAR" not in label] == ["flush_interval_ms=2000"], "native, beside"
    grid = ["--set", "mark_delete_rate_limit=2", "--json"]
    found = json.loads(run(capsys, "sweep", path, "--engine", "local", *grid).out)
    assert {each["policy"]["format"] for each in found["policies"][1:]} == {"PULSAR"}
    found = json.loads(run(capsys, "sweep", path, "--engine", "local", "--current-policy", "default", *grid).out)
    assert found["baseline"] == "default", "the operator knows better"


PROGRAM = """
from ackstate import BatchIndexes, Position
from ackstate.analysis.pulsar import durable
from ackstate.deleted_ranges import DeletedRanges

class Durable(durable.DurableReader):
    def __init__(self, url): pass
    def close(self): pass
    def read(self, cursors):
        state = durable.DurableState(Position(3, -1), DeletedRanges(), BatchIndexes(), (1, -1, -1))
        return dict.fromkeys(cursors, state)

durable.DurableReader = Durable
from ackstate.analysis.cli.main import main
main()
"""


@pytest.mark.slow
def test_a_killed_process_is_continued_by_the_next(tmp_path):
    path = tmp_path / "trace"
    with serving({f"{PATH}/internalStats": [acked([entry]) for entry in range(1, 40)]}) as broker:
        command = [sys.executable, "-c", PROGRAM, "pulsar", "record", broker.url, str(path), "--every", "1s", *METADATA]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        done = threading.Event()
        for _ in range(3_000):
            if broker.asked.count(f"{PATH}/internalStats") >= 2 or done.wait(0.1):
                break
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        assert not list(path.glob("*.parquet")), "the hour is not over"
        command += ["--for", "2s"]
        again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert again.returncode == 0, again.stderr
    assert re.match(
        rf"continuing {re.escape(str(path))}: 1 subscription, with \d+ events of an unfinished hour\n", again.stdout
    )
    assert check_events(path).subscriptions == 1
    assert len(listed_names(path)) == 2


# --- The order of polls


def filled(topics, *, at_once=8):
    queue = PollQueue(at_once, lambda topic: topic.partition("/")[0])
    for due_s, topic in enumerate(topics):
        queue.put(topic, float(due_s))
    return queue


def names(taken):
    return [topic for topic, _ in taken]


def test_a_broker_that_does_not_answer_delays_no_other():
    queue = filled([*(f"dead/{number}" for number in range(500)), "a/1", "b/1"])
    assert names(queue.take(999.0)) == ["dead/0", "dead/1", "a/1", "b/1"]
    for number in range(50):
        queue.done("a")
        queue.put(f"a/{number}", 1_000.0 + number)
        assert names(queue.take(1_000.0 + number)) == [f"a/{number}"]
    queue.done("dead")
    assert names(queue.take(2_000.0)) == ["dead/2"]
