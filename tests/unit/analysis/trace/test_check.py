"""`ackstate trace check`: the contents of a trace, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ackstate.analysis import cli
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.check import Wrong, check_events, trace_hash
from ackstate.analysis.trace.events import SEVERAL, Event, EventKind, TraceError
from ackstate.analysis.trace.parquet import write_manifest, write_trace
from ackstate.analysis.trace.recorder import Frame
from trace_files import read_rows, write_rows

ACK, CRASH, RECOVER = EventKind.ACK, EventKind.CRASH, EventKind.RECOVER


def acks(begin, end, ts_ms=1_000):
    return [Event(ts_ms + entry, ACK, 3, entry, entry) for entry in range(begin, end)]


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "CHUNK_EVENTS", 4)
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


def test_a_trace_says_what_it_holds(trace):
    found = check_events(trace)
    assert found.to_json() == {
        "trace": str(trace), "sha256": trace_hash(trace), "events": 19, "chunks": 7, "topics": 2, "subscriptions": 3,
        "first_ts_ms": 900, "last_ts_ms": 2_001, "kinds": {"publish": 1, "ack": 16, "crash": 1, "recover": 1},
        "dropped_events": 0,
    }  # fmt: skip
    assert found.lines() == [
        f"{trace}: 19 events of 3 subscriptions and 2 topics",
        "from 1970-01-01T00:00:00.900+00:00 to 1970-01-01T00:00:02.001+00:00, in 7 chunks",
        "1 publish, 16 ack, 1 crash, 1 recover",
        f"sha256 {trace_hash(trace)}",
    ]


def test_chunks_may_lie_in_any_order(trace):
    before = check_events(trace)
    rewrite(trace, reversed(read_rows(trace)))
    found = check_events(trace)
    assert found.to_json() | {"sha256": ""} == before.to_json() | {"sha256": ""}


def with_columns(row, index, **values):
    """Return a row with one event of it changed."""
    return row | {name: [*row[name][:index], value, *row[name][index + 1 :]] for name, value in values.items()}


@pytest.mark.parametrize(
    ("wrong", "index", "values"),
    [
        (Wrong.UNKNOWN_KIND, 1, {"kind": 99}),
        (Wrong.UNKNOWN_KIND, 1, {"kind": 0}),
        (Wrong.BEYOND, 2, {"first_entry": 2**32, "last_entry": 2**32}),
        (Wrong.NEGATIVE, 2, {"first_entry": -1}),
        (Wrong.NEGATIVE, 2, {"ledger_id": -3}),
        (Wrong.NEGATIVE, 2, {"number": -9}),
        (Wrong.BACKWARDS, 2, {"last_entry": 1}),
        (Wrong.TIME_BACK, 2, {"ts_ms": 5}),
        (Wrong.TWO_CURSORS, 1, {"kind": CRASH}),
        (Wrong.TWO_CURSORS, 1, {"kind": RECOVER}),
        (Wrong.WRONG_BOUNDS, 0, {"ts_ms": 7}),
        (Wrong.NEVER_PUBLISHED, 2, {"last_entry": 500}),
    ],
)
def test_an_event_that_cannot_be_right_is_named(trace, wrong, index, values):
    rows = read_rows(trace)
    (at,) = [at for at, row in enumerate(rows) if (row["topic"], row["subscription"], row["chunk"]) == ("t", "a", 0)]
    rewrite(trace, [*rows[:at], with_columns(rows[at], index, **values), *rows[at + 1 :]])
    with pytest.raises(TraceError) as caught:
        check_events(trace)
    assert f"{wrong.value}: " in str(caught.value)
    assert str(caught.value).startswith(f"{trace}: ")
    if wrong not in {Wrong.NEVER_PUBLISHED, Wrong.TWO_CURSORS}:
        assert f"seq {index} of a of t (" in str(caught.value)


@pytest.mark.parametrize(("first_seq", "wrong"), [(5, Wrong.SEQ_GAP), (3, Wrong.SEQ_AGAIN)])
def test_seqs_that_do_not_follow_are_named(trace, first_seq, wrong):
    rows = [row | {"first_seq": first_seq} if row["first_seq"] == 4 else row for row in read_rows(trace)]
    rewrite(trace, rows)
    with pytest.raises(TraceError, match=wrong.value):
        check_events(trace)


@pytest.mark.parametrize(("change", "said"), [
    ({"event_count": 0}, "0 events; a row must have 1"),
    ({"event_count": 3}, "damaged chunk 0 of b of t: 'ledgers' are not"),
    ({"event_count": 5}, "damaged chunk 0 of b of t: 'ledgers' are not"),
    ({"event_count": 2**31 - 1}, "has 2147483647 events; a row must have 1 to 65536"),
    ({"ledgers": []}, "'ledgers' are not those of its events"),
    ({"ledgers": [{"ledger_id": 3, "entry_count": 4, "published": 0, "acked": 5}]}, "'ledgers' are not those"),
])  # fmt: skip
def test_a_damaged_chunk_is_named(trace, change, said):
    rows = [row | change if (row["subscription"], row["chunk"]) == ("b", 0) else row for row in read_rows(trace)]
    rewrite(trace, rows)
    with pytest.raises(TraceError, match=said):
        check_events(trace)


def test_the_hash_is_that_of_the_bytes_wherever_they_lie(trace, tmp_path):
    before = trace_hash(trace)
    (file,) = trace.iterdir()
    assert trace_hash(file) == before
    assert trace_hash(trace.rename(tmp_path / "elsewhere")) == before
    data = bytearray((tmp_path / "elsewhere" / file.name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "elsewhere" / file.name).write_bytes(data)
    assert trace_hash(tmp_path / "elsewhere") != before


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_file_cut_short_is_named(trace, share):
    (file,) = trace.iterdir()
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TraceError, match=r"part-00000.parquet: not a readable Parquet file"):
        check_events(trace)


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


def test_the_command_refuses_in_one_line(trace, capsys):
    rows = read_rows(trace)
    rewrite(trace, [with_columns(row, 0, kind=77) for row in rows])
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", "check", str(trace)])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"ackstate: {trace}: 7 bad of 19 rows, more than 0: an unknown kind: 7, first seq 0 of")
    assert err.count("\n") == 1


def test_a_damaged_statistic_that_ends_the_process_in_arrow_is_refused(tmp_path):
    """`ColumnChunkMetaData` of Arrow 26 ends the process if a histogram of levels has another length."""
    file = tmp_path / "trace.parquet"
    file.write_bytes((Path(__file__).parents[3] / "golden" / "parquet-histogram.parquet").read_bytes())
    with pytest.raises(TraceError, match="not a readable Parquet file"):
        check_events(file)
