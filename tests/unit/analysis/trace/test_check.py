"""`ackstate trace check`: the contents of a trace, and its errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from ackstate.analysis import cli
from ackstate.analysis.trace import chunks as trace_chunks
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.check import Wrong, check_events, trace_hash
from ackstate.analysis.trace.chunks import TraceClock
from ackstate.analysis.trace.events import SEVERAL, Event, EventKind, TraceError
from ackstate.analysis.trace.parquet import write_manifest, write_trace
from ackstate.analysis.trace.recording import Frame
from command_line import assert_one_line, run
from trace_files import read_rows, write_rows

ACK, CRASH, DELIVER, RECOVER = EventKind.ACK, EventKind.CRASH, EventKind.DELIVER, EventKind.RECOVER
PERSIST_BEGUN = EventKind.PERSIST_BEGUN

T0 = 1_700_000_000_000


def acks(begin, end, ts_ms=1_000):
    return [Event(ts_ms + entry, ACK, 3, entry, entry) for entry in range(begin, end)]


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_chunks, "CHUNK_EVENTS", 4)
    frames = [
        Frame("t", "", [Event(900, EventKind.PUBLISH, 3, 0, 99)]),
        Frame("t", "a", acks(0, 10)),
        Frame("t", "b", [*acks(0, 5), Event(2_000, CRASH), Event(2_001, RECOVER)]),
        Frame("u", "a", acks(0, 1)),
    ]
    write_trace(frames, tmp_path / "trace")
    return tmp_path / "trace"


def rewrite(trace, rows):
    """Write a trace's rows again, a file for each, in the order given."""
    for file in trace.iterdir():
        file.unlink()
    for number, row in enumerate(rows):
        write_rows([row], trace / f"part-{number:05}.parquet", files=SEVERAL)
    write_manifest(trace)


DAMAGED = "damaged chunk 0 of b of t: 'ledgers' are not"
LEDGERS = [{"ledger_id": 3, "entry_count": 4, "published": 0, "acked": 5}]
# Which chunk of which subscription, what is changed in it, the event of it that is named if any, and the reason.
WRONG = [
    *((("a", 0), {name: {index: value}}, index, wrong.value) for wrong, index, name, value in (
        (Wrong.UNKNOWN_KIND, 1, "kind", 99), (Wrong.UNKNOWN_KIND, 1, "kind", 0), (Wrong.NEGATIVE, 2, "first_entry", -1),
        (Wrong.NEGATIVE, 2, "ledger_id", -3), (Wrong.NEGATIVE, 2, "number", -9), (Wrong.BACKWARDS, 2, "last_entry", 1),
        (Wrong.TIME_BACK, 2, "ts_ms", 5), (Wrong.WRONG_BOUNDS, 0, "ts_ms", 7),
        (Wrong.TIME_OUTSIDE, 3, "ts_ms", 1_700_000_000),
    )),
    (("a", 0), {"first_entry": {2: 2**32}, "last_entry": {2: 2**32}}, 2, Wrong.BEYOND.value),
    (("a", 0), {"kind": {1: CRASH}}, None, Wrong.TWO_CURSORS.value),
    (("a", 0), {"kind": {1: RECOVER}}, None, Wrong.TWO_CURSORS.value),
    (("a", 0), {"last_entry": {2: 500}}, None, Wrong.NEVER_PUBLISHED.value),
    (("a", 1), {"first_seq": 5}, None, Wrong.SEQ_GAP.value),
    (("a", 1), {"first_seq": 3}, None, Wrong.SEQ_AGAIN.value),
    (("b", 0), {"event_count": 3}, None, DAMAGED),
    (("b", 0), {"event_count": 5}, None, DAMAGED),
    (("b", 0), {"ledgers": []}, None, DAMAGED),
    (("b", 0), {"ledgers": LEDGERS}, None, DAMAGED),
]  # fmt: skip


@pytest.mark.parametrize(("where", "change", "seq", "reason"), WRONG)
def test_an_event_that_cannot_be_right_is_named(trace, where, change, seq, reason):
    rows = read_rows(trace)
    (row,) = [row for row in rows if (row["topic"], row["subscription"], row["chunk"]) == ("t", *where)]
    for name, found in change.items():
        row[name] = [found.get(at, each) for at, each in enumerate(row[name])] if isinstance(found, dict) else found
    rewrite(trace, rows)
    with pytest.raises(TraceError) as caught:
        check_events(trace)
    assert str(caught.value).startswith(str(trace))
    assert reason in str(caught.value)
    assert seq is None or f"seq {seq} of a of t (" in str(caught.value)


WALL_MS = 1_700_000_000_000


@pytest.mark.parametrize(("ts_ms", "hint"), [
    (WALL_MS // 1_000, "seconds"), (4_102_444_800_000, "write ms since 1970"), (5, "another clock"),
])  # fmt: skip
def test_a_time_of_another_unit_is_neither_written_nor_read(tmp_path, monkeypatch, ts_ms, hint):
    frames = [Frame("t", "s", [Event(WALL_MS, ACK, 3, 0, 0), Event(ts_ms, ACK, 3, 1, 1)])]
    with pytest.raises(TraceError, match=f"s of t: ts_ms {ts_ms}, .*{hint}"):
        write_trace(frames, tmp_path / "trace")
    with monkeypatch.context() as without:
        without.setattr(TraceClock, "judge", lambda _, times: np.zeros(len(times), np.bool_))
        write_trace(frames, tmp_path / "trace")
    with pytest.raises(TraceError, match=f"row 1, chunk 0 of subscription 's' of t: ts_ms {ts_ms}, .*{hint}"):
        parquet.check_trace(tmp_path / "trace")


def test_the_hash_is_that_of_the_bytes_wherever_they_lie(trace, tmp_path):
    before = trace_hash(trace)
    (file,) = trace.iterdir()
    assert trace_hash(file) == before
    assert trace_hash(trace.rename(tmp_path / "elsewhere")) == before
    data = bytearray((tmp_path / "elsewhere" / file.name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "elsewhere" / file.name).write_bytes(data)
    assert trace_hash(tmp_path / "elsewhere") != before


def test_progress_counts_chunks(trace):
    said = []
    check_events(trace, progress=lambda *shown: said.append(shown))
    assert said == [(done, 7) for done in range(1, 8)]


def test_the_command_says_it_in_text_and_in_json(trace, capsys):
    found = check_events(trace)
    for arguments, said in (([], "\n".join(found.lines()) + "\n"), (["--json"], None)):
        with pytest.raises(SystemExit) as ended:
            cli.main(["trace", "check", str(trace), *arguments])
        assert ended.value.code == 0
        out, err = capsys.readouterr()
        assert not err
        assert out == said if said else json.loads(out) == found.to_json()


def test_a_damaged_statistic_that_ends_the_process_in_arrow_is_refused(tmp_path):
    """`ColumnChunkMetaData` of Arrow 26 ends the process if a histogram of levels has another length."""
    file = tmp_path / "trace.parquet"
    file.write_bytes((Path(__file__).parents[3] / "golden" / "parquet-histogram.parquet").read_bytes())
    with pytest.raises(TraceError, match="not a readable Parquet file"):
        check_events(file)


@pytest.mark.parametrize("kind", [0, 15, max(EventKind) + 1])
def test_an_event_of_no_kind_is_refused(tmp_path, capsys, kind):
    write_trace([Frame("t", "s", [Event(T0, EventKind.ACK, 1, 0, 9), Event(T0, kind)])], tmp_path / "trace")
    assert_one_line(run(capsys, "trace", "check", tmp_path / "trace"), "unknown kind")


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("kinds", [(CRASH, ACK), (ACK, RECOVER), (PERSIST_BEGUN, ACK, PERSIST_BEGUN)])
def test_two_cursors_under_one_name_make_no_trace(tmp_path, monkeypatch, chunk, kinds):
    monkeypatch.setattr(trace_chunks, "CHUNK_EVENTS", chunk)
    events = [Event(T0 + at, kind, 1, at, at) for at, kind in enumerate((DELIVER, *kinds))]
    with pytest.raises(TraceError, match=f"two cursors under one name, seen at {events[-1].ts_ms} ms: s of t: .* own"):
        write_trace([Frame("t", "s", events)], tmp_path / "trace")
    assert not (tmp_path / "trace").exists()
