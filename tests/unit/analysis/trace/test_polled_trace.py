"""A trace of polls: golden files, round trips, refusals, and its reading by older readers and as another trace."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.chunks import events_of
from ackstate.analysis.trace.events import VERSION_KEY, Event, EventKind, PolledEvent, TraceError
from ackstate.analysis.trace.parquet import check_trace, write_manifest, write_trace
from ackstate.analysis.trace.recorder import (
    Frame,
    Recorder,
    polled_frames,
    read_recording,
)
from command_line import assert_one_line, run
from trace_files import write_acks

GOLDEN = Path(__file__).parents[3] / "golden"
T0 = 1_700_000_000_000
TOPIC, NAME = "persistent://public/default/orders", "billing"
EVENTS = [
    PolledEvent(T0, EventKind.ACK, 3, 0, 9, until_ms=T0 + 20),
    PolledEvent(T0, EventKind.PERSIST_SEEN, number=T0 + 20, until_ms=T0 + 20),
    PolledEvent(T0, EventKind.CUT_OFF, 3, 8, 9, until_ms=T0 + 20),
    PolledEvent(T0 + 1_000, EventKind.ACK, 3, 12, 14, until_ms=T0 + 2_010),
    PolledEvent(T0 + 1_000, EventKind.PERSIST_SEEN, until_ms=T0 + 2_010),
    PolledEvent(T0 + 2_000, EventKind.PERSIST_SEEN, number=T0 + 2_010, until_ms=T0 + 5_015),
    PolledEvent(T0 + 6_000, EventKind.CRASH, until_ms=T0 + 9_000),
    PolledEvent(T0 + 6_000, EventKind.RECOVER, until_ms=T0 + 9_000),
    PolledEvent(T0 + 6_000, EventKind.REDELIVER, 3, 14, 14, until_ms=T0 + 9_000),
]


def write_polled(path, events=EVENTS):
    write_trace([Frame(TOPIC, NAME, events)], path)
    return path


def events_read(trace):
    """Return the events of a trace of one subscription."""
    (batch,) = pq.read_table(trace).to_batches()
    _, columns = events_of(batch, PolledEvent._fields)
    return [PolledEvent(*row)._replace(kind=EventKind(row[1])) for row in zip(*(each.tolist() for each in columns))]  # noqa: B905


def text_of(events):
    """Describe events as the golden file does."""
    return "".join(
        f"{event.ts_ms - T0} to {event.until_ms - T0}  {event.kind.name}"
        + (f"  {event.ledger_id}:{event.first_entry}..{event.last_entry}" if event.ledger_id >= 0 else "")
        + (f"  number {event.number - T0}" if event.number >= 0 else "")
        + "\n"
        for event in events
    )


# --- The format


def test_the_golden_trace_is_read(capsys):
    path = GOLDEN / "polled-trace-v4.parquet"
    assert events_read(path) == EVENTS
    assert text_of(EVENTS) in (GOLDEN / "polled-trace-v4.txt").read_text()
    assert pq.read_metadata(path).metadata[VERSION_KEY] == b"4"
    assert check_trace(path).has_intervals
    assert check_events(path).kinds == {
        "ack": 2, "persist_seen": 3, "cut_off": 1, "crash": 1, "recover": 1, "redeliver": 1,
    }  # fmt: skip


def test_the_golden_recording_is_read(tmp_path):
    segment = tmp_path / "000001.events"
    segment.write_bytes((GOLDEN / "polled-recording-v3.events").read_bytes())
    assert list(read_recording(tmp_path)) == [Frame(TOPIC, NAME, EVENTS)]
    ((topic, subscription, events),) = polled_frames(tmp_path)
    assert (topic, subscription) == (TOPIC, NAME)
    assert [PolledEvent(*row) for row in events.tolist()] == EVENTS
    with Recorder(tmp_path / "again", has_intervals=True) as recorder:
        recorder.record(TOPIC, NAME, EVENTS)
    assert recorder.path.read_bytes() == segment.read_bytes()


def test_a_trace_is_the_same_from_events_and_from_a_recording(tmp_path, capsys):
    with Recorder(tmp_path / "recording", has_intervals=True) as recorder:
        for begin in range(0, len(EVENTS), 2):
            recorder.record(TOPIC, NAME, EVENTS[begin : begin + 2])
    assert run(capsys, "trace", "convert", tmp_path / "recording", tmp_path / "trace").status == 0
    assert events_read(tmp_path / "trace") == EVENTS == events_read(write_polled(tmp_path / "direct"))


# --- Refusals


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("until_ms", T0 - 1, "'until_ms' is before 'ts_ms'"),
        ("kind", EventKind.DELIVER, "unknown kind"),
        ("kind", EventKind.PERSIST_BEGUN, "unknown kind"),
        ("kind", 16, "unknown kind"),
    ],
)
def test_damage_is_refused_by_the_check_and_the_replay(tmp_path, capsys, column, value, words):
    trace = write_polled(tmp_path / "trace", [EVENTS[0]._replace(**{column: value}), *EVENTS[1:]])
    assert_one_line(run(capsys, "redelivery", trace, "--engine", "local"), words)
    assert_one_line(run(capsys, "trace", "check", trace), words)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([EVENTS[2]], "CUT_OFF event must follow a PERSIST_SEEN event with a number"),
        ([EVENTS[4], EVENTS[2]._replace(ts_ms=T0 + 2_000, until_ms=T0 + 2_010)], "CUT_OFF event must follow"),
        ([EVENTS[3], EVENTS[0]._replace(ts_ms=T0 + 1_000, until_ms=T0 + 1_001)], "ack's interval ends before"),
        ([EVENTS[5], EVENTS[5]._replace(until_ms=T0 + 2_100)], "persist's interval ends before"),
        ([EVENTS[5], EVENTS[5]._replace(number=T0)], "number of a PERSIST_SEEN event falls"),
    ],
)
def test_events_that_contradict_each_other_are_refused(tmp_path, capsys, events, words):
    trace = write_polled(tmp_path / "trace", events)
    assert_one_line(run(capsys, "redelivery", trace, "--engine", "local"), words, NAME)


def test_persist_seen_is_no_kind_of_an_exact_trace(tmp_path, capsys):
    write_trace([Frame(TOPIC, NAME, [Event(T0, EventKind.PERSIST_SEEN)])], tmp_path / "trace")
    assert_one_line(run(capsys, "redelivery", tmp_path / "trace", "--engine", "local"), "unknown kind")
    assert_one_line(run(capsys, "trace", "check", tmp_path / "trace"), "unknown kind")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"topic": "t", "subscription": "s", "ts_ms": 1, "kind": "persist_seen"}\n')
    assert_one_line(run(capsys, "trace", "convert", lines, tmp_path / "out"), "an unknown kind")


def test_a_polled_trace_and_an_exact_one_are_not_one_trace(tmp_path):
    exact, polled = tmp_path / "exact", write_polled(tmp_path / "polled")
    write_acks(exact, ("t", "s"), range(5), begin_ms=T0)
    (exact / "part-00000.parquet").rename(polled / "part-00001.parquet")
    write_manifest(polled)
    with pytest.raises(TraceError, match="a file of a trace of polls, unlike part-00001"):
        check_trace(polled)


def test_a_policy_that_limits_dispatch_is_refused(tmp_path, capsys):
    trace = write_polled(tmp_path / "trace")
    outcome = run(capsys, "redelivery", trace, "--engine", "local", "--policy", "max_unpersisted_ack_record_bytes=5000")
    assert_one_line(outcome, "cannot be replayed on a trace of polls, which has no deliveries")


def test_without_an_event_of_a_subscription_there_is_no_estimate(tmp_path):
    path = tmp_path / "trace"
    write_trace([Frame(TOPIC, "", [PolledEvent(T0, EventKind.PUBLISH, 3, 0, 9, until_ms=T0)])], path)
    assert estimates(LocalSource.of(path), [None]).collect() == []
