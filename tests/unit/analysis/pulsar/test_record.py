"""`ackstate pulsar record` against a server that answers as a broker does: its trace, failures, and restarts."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ackstate.analysis.admin_client import AdminServer, PulsarAdmin
from ackstate.analysis.pulsar import recorder as cluster_recorder
from ackstate.analysis.pulsar import trace_directory
from ackstate.analysis.pulsar.broker_settings import BrokerSettings
from ackstate.analysis.pulsar.internal_stats import SnapshotError, TopicInternals, TopicStats, read_object
from ackstate.analysis.pulsar.recorder import ClusterRecorder, TopicFollower, matches
from ackstate.analysis.pulsar.sources import LiveBroker
from ackstate.analysis.pulsar.trace_directory import TraceDirectory
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.events import EventKind, PolledEvent, TraceError
from ackstate.analysis.trace.parquet import check_trace, listed_names, write_trace
from ackstate.analysis.trace.recorder import Frame
from command_line import ENTRY, assert_one_line, run, tree, write_token
from pulsar_admin import CONFIGURATION, INTERNALS, PATH, RUNTIME, STATS, TOPIC, serving, topic_answers
from trace_files import write_acks

T0 = 1_700_000_000_000
NAMES = "/admin/v2/persistent/public/default"
OTHER, OTHER_PATH = f"{TOPIC}-2", f"{PATH}-2"


def acked(entries, *, last=4, ledger=None, counter=60):
    """Return internal stats whose cursor has acked some entries of ledger 3."""
    internals = copy.deepcopy(INTERNALS)
    cursor = internals["cursors"]["sub"]
    cursor["individuallyDeletedMessages"] = f"[{','.join(f'(3:{entry - 1}..3:{entry}]' for entry in entries)}]"
    cursor["cursorLedgerLastEntry"] = last
    cursor["cursorLedger"] = cursor["cursorLedger"] if ledger is None else ledger
    internals["entriesAddedCounter"] = counter
    return internals


class Answers:
    """Answers about one topic, without a server."""

    def __init__(self, internals):
        self._internals = internals

    def settings(self, _topic):
        return BrokerSettings()

    def internals(self, _topic):
        return read_object(TopicInternals, self._internals, what="internalStats")

    def stats(self, _topic):
        return read_object(TopicStats, STATS, what="stats")


class StopError(Exception):
    """Ends a recording."""


class Watchdog:
    """Fails if a recording does not end."""

    calls = 0

    def __call__(self):
        self.calls += 1
        assert self.calls < 2_000


def record(url, path, *, polls, between=lambda number: None, glob="", every_s=0.0):
    """Record until there were some polls; `between` is called after each of them."""
    with PulsarAdmin(AdminServer(url, timeout_s=5)) as admin, TraceDirectory(path) as trace:
        recorder = ClusterRecorder(LiveBroker(admin), trace, every_s=every_s, glob=glob)
        seen, watchdog = [0], Watchdog()

        def show(state):
            watchdog()
            for number in range(seen[0], state.polls):
                between(number + 1)
            seen[0] = state.polls
            if state.polls >= polls:
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
    from ackstate.analysis.trace.chunks import events_of as columns_of

    found = {}
    for file in sorted(path.glob("*.parquet")):
        for batch in pq.read_table(file).to_batches():
            offsets, columns = columns_of(batch, PolledEvent._fields)
            keys = zip(batch["topic"].to_pylist(), batch["subscription"].to_pylist(), strict=True)
            for row, key in enumerate(keys):
                rows = zip(*(each[offsets[row] : offsets[row + 1]].tolist() for each in columns), strict=True)
                found.setdefault(key, []).extend(PolledEvent(*each) for each in rows)
    return found


def kinds(events):
    return [EventKind(event.kind).name for event in events]


# --- Recorded events


def test_acks_records_and_ledgers_of_a_topic(tmp_path):
    looks = [acked([1]), acked([1, 3]), acked([1, 3], last=9), acked([1, 3], last=9)]
    with serving({f"{PATH}/internalStats": looks}) as broker:
        found, resumed = record(broker.url, tmp_path / "trace", polls=4)
    assert resumed.until_ms == -1
    assert (found.topics, found.cursors, found.unread) == (1, 1, 0)
    assert check_events(tmp_path / "trace").events == found.events
    events = events_of(tmp_path / "trace")
    assert kinds(events[TOPIC, ""]) == ["PUBLISH"]
    assert events[TOPIC, ""][0][2:5] == (3, 0, 59)
    assert kinds(events[TOPIC, "sub"]) == [
        "ACK", "PERSIST_SEEN", "CUT_OFF", "ACK", "PERSIST_SEEN", "PERSIST_SEEN",
    ]  # fmt: skip
    assert [event.first_entry for event in events[TOPIC, "sub"] if event.kind == EventKind.ACK] == [1, 3]
    assert events[TOPIC, "sub"][-1].number >= 0, "five records later, the acks are durable"


def test_stats_are_requested_once_and_when_a_ledger_is_new(tmp_path):
    looks = [acked([1]), acked([1]), acked([1]), acked([1], ledger=99), acked([1], ledger=99)]
    with serving({f"{PATH}/internalStats": looks}) as broker:
        record(broker.url, tmp_path / "trace", polls=5)
        assert broker.asked.count(f"{PATH}/stats") == 2


def test_a_cursor_that_is_not_durable_is_not_recorded(tmp_path):
    stats = copy.deepcopy(STATS)
    stats["subscriptions"]["sub"]["isDurable"] = False
    with serving({f"{PATH}/stats": stats}) as broker:
        found, _ = record(broker.url, tmp_path / "trace", polls=2)
    assert found.cursors == 0
    assert set(events_of(tmp_path / "trace")) == {(TOPIC, "")}


def test_the_trace_lasts_until_the_last_poll(tmp_path):
    """Polls without an event are part of it."""
    times = []
    with serving({f"{PATH}/internalStats": [acked([1])]}) as broker:
        record(broker.url, tmp_path / "trace", polls=8, between=times.append)
    span = check_trace(tmp_path / "trace")
    last_ms = max(event.until_ms for events in events_of(tmp_path / "trace").values() for event in events)
    assert span.begin_ms < last_ms < span.end_ms


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


@pytest.mark.parametrize(
    "answer",
    [
        (404, b'{"reason": "Topic not found"}', {}),
        (503, b"", {}),
        (500, b"x", {}),
        (200, b"no JSON", {}),
        (200, b"{}", {}),
    ],
)
def test_a_topic_that_is_not_answered_is_polled_again_and_the_others_go_on(tmp_path, answer):
    changes = {NAMES: [TOPIC, OTHER]} | topic_answers(OTHER_PATH)
    good = topic_answers(OTHER_PATH)[f"{OTHER_PATH}/internalStats"]
    unread = []
    with serving(changes | {f"{OTHER_PATH}/internalStats": answer}) as broker:

        def between(number):
            if number == 6:
                broker.answers[f"{OTHER_PATH}/internalStats"] = good

        with PulsarAdmin(AdminServer(broker.url, timeout_s=5)) as admin, TraceDirectory(tmp_path / "t") as trace:
            recorder, watchdog = ClusterRecorder(LiveBroker(admin), trace, every_s=0.0), Watchdog()

            def show(state):
                watchdog()
                unread.append(state.unread)
                if state.polls > 6:
                    broker.answers[f"{OTHER_PATH}/internalStats"] = good
                if state.polls > 6 and not state.unread:
                    raise StopError

            with pytest.raises(StopError):
                recorder.run(None, show)
    assert 1 in unread
    assert {topic for topic, _ in events_of(tmp_path / "t")} == {TOPIC, OTHER}


def test_a_redirection_leads_to_the_owner(tmp_path):
    with serving() as owner:
        places = {
            f"{PATH}/{each}": (307, b"", {"Location": f"{owner.url}{PATH}/{each}"})
            for each in ("internalStats", "stats")
        }
        with serving(places) as broker:
            found, _ = record(broker.url, tmp_path / "trace", polls=2)
    assert (found.cursors, found.unread) == (1, 0)


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
    with serving(changes | topic_answers("/admin/v2/persistent/demo/x/t")) as broker:
        whole, unlisted, watchdog = broker.answers[path], set(), Watchdog()

        def show(state):
            watchdog()
            unlisted.update(state.unlisted)
            broker.answers[path] = answer if 4 <= state.polls < 30 else whole
            if state.polls > 60 and unlisted and not state.unlisted:
                raise StopError

        with PulsarAdmin(AdminServer(broker.url, timeout_s=5)) as admin, TraceDirectory(tmp_path / "t") as trace:
            recorder = ClusterRecorder(LiveBroker(admin), trace, every_s=0.0)
            with pytest.raises(StopError):
                recorder.run(None, show)
    assert len(unlisted) == 1
    events = events_of(tmp_path / "t")
    assert not {"REDELIVER", "RESET", "CRASH"} & {*kinds(events["persistent://demo/x/t", "sub"])}
    assert {event.first_entry for event in events[TOPIC, "sub"] if event.kind == EventKind.ACK} >= {1, 3, 5, 37}


def test_a_continued_recording_goes_on_with_topics_that_cannot_be_listed(tmp_path):
    path, changes = tmp_path / "trace", {TENANTS: ["demo", "public"]} | topic_answers("/admin/v2/persistent/demo/x/t")
    listed = {"/admin/v2/namespaces/demo": ["demo/x"], "/admin/v2/persistent/demo/x": ["persistent://demo/x/t"]}
    with serving(changes | listed) as broker:
        record(broker.url, path, polls=6)
    with serving(changes) as broker:
        found, _ = record(broker.url, path, polls=8)
    assert (found.topics, found.unread, len(found.unlisted)) == (2, 0, 1)
    assert not {"REDELIVER", "RESET", "CRASH"} & {*kinds(events_of(path)["persistent://demo/x/t", "sub"])}


def test_what_cannot_be_listed_is_told_at_once_and_in_the_end(capsys, tmp_path):
    with serving({TENANTS: ["demo", "public"], "/admin/v2/namespaces/demo": ["demo/standalone/ns1"]}) as broker:
        outcome = run(capsys, "pulsar", "record", broker.url, tmp_path / "trace", "--for", "1s")
    assert outcome.status == 1
    for text in (outcome.out, outcome.err):
        assert text.count("namespace demo/standalone/ns1 has a name that cannot be requested") == 1
    assert check_events(tmp_path / "trace").subscriptions == 1


@pytest.mark.parametrize(
    ("glob", "status"), [("public/*", 0), ("persistent://public/default/smoke", 0), ("*/smoke", 1)]
)
def test_what_has_no_matching_topic_need_not_be_listed(capsys, tmp_path, glob, status):
    with serving({TENANTS: ["demo", "public"], "/admin/v2/namespaces/demo": (403, b"", {})}) as broker:
        outcome = run(capsys, "pulsar", "record", broker.url, tmp_path / "trace", "--for", "1s", "--topics", glob)
    assert (outcome.status, bool(outcome.err)) == (status, status == 1)


def test_a_broker_that_dies_at_the_start_is_one_line(capsys, tmp_path):
    with serving() as broker:
        url = broker.url
    assert_one_line(run(capsys, "pulsar", "record", url, tmp_path / "trace"), "Error connecting to", url)


def hostile_answers():
    """Internal stats that JSON allows and Pulsar never writes."""
    for name in ("x" * 70_000, "\ud800"):
        yield INTERNALS | {"cursors": {name: INTERNALS["cursors"]["sub"]}}
    for number in (-1, 2**63, 10**30):
        yield INTERNALS | {"ledgers": [{"ledgerId": number, "entries": 5}]}
    for number in (2**40, 2**63, 10**30):
        yield INTERNALS | {"ledgers": [{"ledgerId": 3, "entries": number}, {"ledgerId": 4, "entries": 0}]}
        yield INTERNALS | {"currentLedgerEntries": number}


def test_an_impossible_answer_is_refused_as_a_whole(tmp_path):
    """It is an error of the topic, and leaves no event that the trace cannot hold."""
    with TraceDirectory(tmp_path / "trace") as trace:
        for internals in hostile_answers():
            follower = TopicFollower(TOPIC, {})
            with pytest.raises(SnapshotError) as refused:
                follower.poll(Answers(internals), lambda: T0, partial(trace.record, TOPIC))
            assert len(str(refused.value)) < 500
    assert not list((tmp_path / "trace").glob("*.parquet"))


def test_topics_are_polled_before_the_settings_of_all_are_known(tmp_path):
    """With thousands of topics, their settings take minutes."""
    names = [f"{TOPIC}-{number}" for number in range(60)]
    paths = [f"{PATH}-{number}" for number in range(60)]
    with serving(
        {NAMES: names} | {path: each for name in paths for path, each in topic_answers(name).items()}
    ) as broker:
        record(broker.url, tmp_path / "trace", polls=1)
        asked = list(broker.asked)
    assert sum(path.endswith("/persistence") for path in asked) < 60


# --- Hours, ends and restarts


def publish(trace, count, *, begin_ms=T0):
    """Record some events, one each call."""
    for number in range(count):
        event = PolledEvent(begin_ms + number, EventKind.ACK, 3, number, number, until_ms=begin_ms + number + 1)
        trace.record(TOPIC, "sub", [event])


def test_each_hour_is_a_file_and_the_trace_is_whole_after_each(tmp_path):
    with TraceDirectory(tmp_path / "trace") as trace:
        for hour in range(3):
            publish(trace, 5, begin_ms=T0 + hour * 3_600_000)
            assert trace.finish_hour() == 5
            assert check_events(tmp_path / "trace").events == 5 * (hour + 1)
        assert trace.finish_hour() == 0, "an hour without events is no file"
    assert listed_names(tmp_path / "trace") == {f"part-0000{number}.parquet" for number in range(3)}
    assert check_trace(tmp_path / "trace").chunk_count == 3


def test_full_chunks_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_directory, "CHUNK_EVENTS", 10)
    with TraceDirectory(tmp_path / "trace") as trace:
        publish(trace, 35)
        trace.finish_hour()
        publish(trace, 7, begin_ms=T0 + 100)
    assert check_events(tmp_path / "trace").chunks == 5


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
            assert set(trace.resumed.recorded[TOPIC, "sub"].acked[3]) == set(range(trace.resumed.recovered_events))
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
        name = {"before the file": "_write_chunks", "before the manifest": "write_manifest"}.get(step)
        patch.setattr(*(trace_directory, name) if name else (trace_directory.shutil, "rmtree"), die)
        with pytest.raises(Died):
            trace.finish_hour()
    trace._lock.close()
    with TraceDirectory(path) as again:
        publish(again, 2, begin_ms=T0 + 1_000)
    assert check_events(path).events == 7
    assert [event.first_entry for event in events_of(path)[TOPIC, "sub"]] == [0, 1, 2, 3, 4, 0, 1]


def test_a_continued_recording_knows_what_was_acked(tmp_path):
    looks = [acked([1, 3, 5])]
    with serving({f"{PATH}/internalStats": looks}) as broker:
        record(broker.url, tmp_path / "trace", polls=1)
        broker.answers[f"{PATH}/internalStats"] = [acked([1, 7])]
        _, resumed = record(broker.url, tmp_path / "trace", polls=1)
    assert sorted(resumed.recorded[TOPIC, "sub"].acked[3]) == [1, 3, 5]
    events = events_of(tmp_path / "trace")[TOPIC, "sub"]
    later = events[kinds(events).index("CRASH") :]
    assert [(each.first_entry, each.last_entry) for each in later if each.kind == EventKind.REDELIVER] == [
        (3, 3),
        (5, 5),
    ]
    assert [each.first_entry for each in later if each.kind == EventKind.ACK] == [7]
    assert kinds(events_of(tmp_path / "trace")[TOPIC, ""]) == ["PUBLISH"]
    assert check_events(tmp_path / "trace").subscriptions == 1


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


def test_a_subscription_that_is_created_again_is_a_new_one(tmp_path):
    """And may have acked from the poll on at which it did not exist."""
    without = copy.deepcopy(INTERNALS)
    without["cursors"] = {}
    follower, events, clock = TopicFollower(TOPIC, {}), {}, iter(range(T0, T0 + 1_000))
    for internals in (acked([1, 3]), without, acked([5])):
        follower.poll(Answers(internals), clock.__next__, lambda name, found: events.setdefault(name, []).extend(found))
    found = events["sub"]
    assert "CRASH" not in kinds(found)
    (again,) = (each for each in found if each.kind == EventKind.ACK and each.first_entry == 5)
    assert (again.ts_ms, again.until_ms) == (T0 + 2, T0 + 5)
    assert sum(each.kind == EventKind.REDELIVER for each in found) == 2, "nothing is acked in between"


def test_two_processes_cannot_record_into_one_trace(tmp_path):
    with TraceDirectory(tmp_path / "trace"), pytest.raises(TraceError, match="another process records there"):
        TraceDirectory(tmp_path / "trace")


def test_a_full_disk_ends_the_recording_and_keeps_it(tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    path, watchdog = tmp_path / "trace", Watchdog()
    with (
        serving() as broker,
        PulsarAdmin(AdminServer(broker.url, timeout_s=5)) as admin,
        TraceDirectory(path) as trace,
    ):
        recorder = ClusterRecorder(LiveBroker(admin), trace, every_s=0.0)

        def show(state):
            watchdog()
            if state.polls:
                monkeypatch.setattr(trace_directory.Recorder, "record", full)
                broker.answers[f"{PATH}/internalStats"] = acked([1, 3, 7, 59])

        with pytest.raises(OSError, match="No space left"):
            recorder.run(None, show)
    assert check_events(path).events > 0


def test_another_place_is_refused_and_unchanged(tmp_path, capsys):
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "file").write_text("mine")
    before = tree(tmp_path)
    outcome = run(capsys, "pulsar", "record", "http://127.0.0.1:1", strange)
    assert_one_line(outcome, strange, "not a trace that ackstate pulsar record wrote: give a new directory")
    exact = write_acks(tmp_path / "exact", ("t", "s"), range(5))
    assert_one_line(run(capsys, "pulsar", "record", "http://127.0.0.1:1", exact), "not a trace that")
    (tmp_path / "afile").write_text("")
    assert_one_line(run(capsys, "pulsar", "record", "http://127.0.0.1:1", tmp_path / "afile"), "not a directory")
    assert {name: data for name, data in tree(tmp_path).items() if name.startswith("strange")} == before


def test_an_exact_trace_in_a_directory_of_polls_is_refused(tmp_path):
    path = tmp_path / "trace"
    write_trace([Frame(TOPIC, "sub", [PolledEvent(T0, EventKind.ACK, 3, 0, 0, until_ms=T0)])], path)
    with pytest.raises(TraceError, match="give a new directory"):
        TraceDirectory(path)


def test_a_damaged_hour_is_refused(tmp_path):
    with TraceDirectory(tmp_path / "trace") as trace:
        publish(trace, 5)
    (file,) = (tmp_path / "trace").glob("*.parquet")
    data = bytearray(file.read_bytes())
    data[40] ^= 255
    file.write_bytes(data)
    with pytest.raises(TraceError):
        TraceDirectory(tmp_path / "trace")


# --- The command


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["ftp://host", "T"], "the URL of the server"),
        (["http://me:secret@host", "T"], "has a user or password"),
        (["http://host", ""], "must not be empty"),
        (["http://host", "T", "--every", "500ms"], "must be from 1s to 1h"),
        (["http://host", "T", "--for", "0s"], "must be at least 1s"),
        (["http://host", "T", "--requests-per-second", "0"], "--requests-per-second"),
        (["http://host", "T", "--namespace", "a"], "Invalid namespace format"),
        (["http://host", "T", "--token-host", "http://other"], "--token-host must be HOST"),
    ],
)
def test_wrong_options_are_one_line_and_create_nothing(capsys, tmp_path, monkeypatch, words, names):
    monkeypatch.chdir(tmp_path)
    outcome = run(capsys, "pulsar", "record", *words)
    assert_one_line(outcome, names)
    assert "secret" not in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_token_is_sent_and_never_shown(capsys, tmp_path):
    token = write_token(tmp_path / "token", "header.payload.signature")
    with serving() as broker:
        outcome = run(
            capsys, "pulsar", "record", broker.url, tmp_path / "trace", "--for", "1s", "--token-file", token
        )  # fmt: skip
        assert broker.tokens == {"Bearer header.payload.signature"}
    assert outcome.status == 0
    assert "payload" not in outcome.out + outcome.err


def test_the_command_records_for_a_time(capsys, tmp_path):
    path = tmp_path / "trace"
    with serving() as broker:
        outcome = run(capsys, "pulsar", "record", broker.url, path, "--for", "1s")
    assert (outcome.status, outcome.err) == (0, "")
    assert re.fullmatch(rf"{path}: \d+ events in \d polls? of 1 topic, 1 cursor\n", outcome.out)


def test_the_intervals_in_tables_and_json(capsys, tmp_path):
    path = tmp_path / "trace"
    with serving({f"{PATH}/internalStats": [acked([1, 3]), acked([1, 3, 5, 7])]}) as broker:
        record(broker.url, path, polls=3)
    (found,) = json.loads(run(capsys, "redelivery", path, "--engine", "local", "--json").out)["subscriptions"]
    assert (found["low"]["max"], found["max"]) == (2, 4), "two were acked, and nothing was written since"
    text = run(capsys, "redelivery", path, "--engine", "local").out
    assert "2 to 4" in text
    text = run(capsys, "sweep", path, "--engine", "local", "--set", "flush_interval_ms=1s,60s").out
    assert re.search(r"\brecorded\s+│\s+\S+ to \S+ │", text)
    policies = json.loads(
        run(capsys, "sweep", path, "--engine", "local", "--set", "flush_interval_ms=1s", "--json").out
    )
    for policy in policies["policies"]:
        for estimate in policy["estimates"]:
            assert estimate["low"]["max"] <= estimate["max"]
            assert estimate["low"]["expected"] <= estimate["expected"]
    table = tmp_path / "out.csv"
    assert run(capsys, "redelivery", path, "--engine", "local", "--format", "csv", "--out", table).status == 0
    assert "low_expected" in table.read_text().partition("\n")[0]


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


def test_the_settings_of_a_broker_may_be_unknown(capsys, tmp_path):
    with serving({RUNTIME: (403, b"", {})}) as broker:
        record(broker.url, tmp_path / "refused", polls=2)
        broker.answers["/admin/v2/brokers/version"] = (200, b"5.0.0-M1 (ackstate 1.0)", {})
        record(broker.url, tmp_path / "ours", polls=2)
    found = json.loads(run(capsys, "sweep", tmp_path / "refused", "--engine", "local", "--json").out)
    assert found["baseline_source"] == "the defaults of Pulsar 4.2"
    assert "could not be read" in found["warnings"][0]
    assert not (tmp_path / "ours" / "_broker.json").exists(), "it is no Pulsar broker"
    (tmp_path / "refused" / "_broker.json").write_text('{"managedLedgerDefaultMarkDeleteRateLimit": "x"}')
    assert_one_line(run(capsys, "sweep", tmp_path / "refused", "--engine", "local"), "_broker.json", "must be a number")


def test_a_report_of_a_trace_of_polls_can_be_made(capsys, tmp_path):
    path = tmp_path / "trace"
    with serving({f"{PATH}/internalStats": [acked([1, 3]), acked([1, 3, 5, 7])]}) as broker:
        record(broker.url, path, polls=3)
    outcome = run(capsys, "redelivery", path, "--engine", "local", "--report", tmp_path / "report.html")
    assert (outcome.status, outcome.err) == (0, "")


def test_without_any_poll_the_status_says_so(capsys, tmp_path):
    with serving({f"{PATH}/internalStats": (503, b"", {})}) as broker:
        outcome = run(capsys, "pulsar", "record", broker.url, tmp_path / "trace", "--for", "1s")
    assert outcome.status == 1
    assert "1 topic not read: " in outcome.out
    assert "HTTP 503" in outcome.out


@pytest.mark.slow
def test_a_killed_process_is_continued_by_the_next(tmp_path):
    path = tmp_path / "trace"
    with serving({f"{PATH}/internalStats": [acked([entry]) for entry in range(1, 40)]}) as broker:
        command = [*ENTRY, "pulsar", "record", broker.url, str(path), "--every", "1s"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        done = threading.Event()
        for _ in range(600):
            if broker.asked.count(f"{PATH}/internalStats") >= 3 or done.wait(0.1):
                break
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        assert not list(path.glob("*.parquet")), "the hour is not over"
        command += ["--for", "2s"]
        again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert again.returncode == 0, again.stderr
    assert re.match(
        rf"continuing {re.escape(str(path))}: 1 subscription, with \d+ events of an unfinished hour\n", again.stdout
    )
    assert check_events(path).subscriptions == 1
    assert len(listed_names(path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_hour(tmp_path, number):
    path = tmp_path / "trace"
    with serving() as broker:
        command = [*ENTRY, "pulsar", "record", broker.url, str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        waiting = threading.Event()
        for _ in range(600):
            if broker.asked.count(f"{PATH}/internalStats") >= 2 or waiting.wait(0.1):
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith(f"{path}: ")
    assert check_events(Path(path)).events > 0
