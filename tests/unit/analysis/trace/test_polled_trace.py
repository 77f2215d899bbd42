"""A trace of polls: golden files, round trips, refusals, and its reading by older readers and as another trace."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.chunks import POLLED_SCHEMA, TRACE_SCHEMA, ChunkRow, PolledEvents, table_of
from ackstate.analysis.trace.events import FILES_KEY, ONLY, VERSION_KEY, Event, EventKind, PolledEvent, TraceError
from ackstate.analysis.trace.parquet import check_trace, write_manifest, write_trace
from ackstate.analysis.trace.recorder import (
    Frame,
    Recorder,
    check_segment,
    polled_frames,
    read_recording,
    segments,
    torn_bytes,
)
from ackstate.analysis.trace.recording import Recording
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
    """Return the events of a trace of one subscription, by a recording written from its rows."""
    from ackstate.analysis.trace.chunks import events_of

    (batch,) = pq.read_table(trace).to_batches()
    names = PolledEvent._fields
    _, columns = events_of(batch, names)
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


def test_exact_traces_keep_version_3(tmp_path):
    """Older releases go on reading them."""
    trace = write_acks(tmp_path / "trace", ("t", "s"), range(5))
    (file,) = trace.glob("*.parquet")
    assert pq.read_metadata(file).metadata[VERSION_KEY] == b"3"
    assert pq.read_schema(file).names == TRACE_SCHEMA.names
    assert not check_trace(trace).has_intervals


def test_a_torn_frame_is_counted(tmp_path):
    with Recorder(tmp_path, has_intervals=True) as recorder:
        recorder.record(TOPIC, NAME, EVENTS[:1])
        recorder.record(TOPIC, NAME, EVENTS[1:2])
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    assert torn_bytes(path) == 0
    frame = (len(whole) - 12) // 2
    for lost in range(1, frame):
        path.write_bytes(whole[:-lost])
        assert torn_bytes(path) == frame - lost
        assert len(list(polled_frames(tmp_path))) == 1
    path.write_bytes(whole[:7])
    assert torn_bytes(path) == 0
    assert not list(polled_frames(tmp_path))


def test_a_flipped_bit_of_a_recording_is_damage(tmp_path):
    with Recorder(tmp_path, has_intervals=True) as recorder:
        recorder.record(TOPIC, NAME, EVENTS)
    whole = recorder.path.read_bytes()
    for at in range(12, len(whole), 7):
        recorder.path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(TraceError, match="frame at byte 12"):
            list(polled_frames(tmp_path))


def test_a_recording_of_exact_events_is_not_one_of_polls(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.record(TOPIC, NAME, [Event(1, EventKind.ACK, 3, 0, 0)])
    with pytest.raises(TraceError, match="not a recording of polls"):
        list(polled_frames(tmp_path))
    with Recorder(tmp_path) as recorder:
        recorder.record(TOPIC, NAME, [Event(1, EventKind.PERSIST_SEEN)])
    with pytest.raises(TraceError, match="only a recording of polls has"):
        list(read_recording(tmp_path))
    check_segment(recorder.path)


def test_a_cursor_cannot_continue_a_recording_of_polls(tmp_path):
    with Recorder(tmp_path, has_intervals=True) as recorder:
        recorder.record(TOPIC, NAME, EVENTS)
    with pytest.raises(TraceError, match="which only ackstate pulsar record continues"):
        Recording(tmp_path)
    with Recorder(tmp_path) as recorder:
        recorder.record(TOPIC, NAME, [Event(T0 + 1, EventKind.ACK, 3, 0, 0)])
    with pytest.raises(TraceError, match="exact events and polls are in one recording"):
        list(read_recording(tmp_path))


# --- Refusals


def write_chunk(path, **changes):
    """Write a trace of polls with other values of some columns."""
    events = PolledEvents(*(pa.array(column).to_numpy().copy() for column in zip(*EVENTS, strict=True)))
    row = ChunkRow((TOPIC, NAME), 0, 0, events._replace(**changes))
    table = table_of([row])
    path.mkdir()
    metadata = {**table.schema.metadata, FILES_KEY: ONLY}
    pq.write_table(table.replace_schema_metadata(metadata), path / "part-00000.parquet")
    return path


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
    values = [getattr(event, column) for event in EVENTS]
    values[0] = value
    trace = write_chunk(tmp_path / "trace", **{column: pa.array([int(each) for each in values]).to_numpy()})
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


def test_the_columns_are_those_of_exact_traces_and_one_more():
    assert POLLED_SCHEMA.names == [*TRACE_SCHEMA.names, "until_ms"]


def test_without_an_event_of_a_subscription_there_is_no_estimate(tmp_path):
    path = tmp_path / "trace"
    write_trace([Frame(TOPIC, "", [PolledEvent(T0, EventKind.PUBLISH, 3, 0, 9, until_ms=T0)])], path)
    assert estimates(LocalSource.of(path), [None]).collect() == []
