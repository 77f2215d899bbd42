"""Files of others become the same trace, in every format; an error in them is named and refused."""

import gzip
import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackstate.analysis.trace import chunks
from ackstate.analysis.trace import convert as conversion
from ackstate.analysis.trace import rows as rows_module
from ackstate.analysis.trace.check import BadRowsMax, Wrong, check_events
from ackstate.analysis.trace.chunks import OWN_CLOCK_MS, WALL_CLOCK_MS
from ackstate.analysis.trace.convert import convert
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.parquet import check_trace
from ackstate.analysis.trace.recording import Recorder
from trace_files import lines_of, read_back, write

ANY = BadRowsMax.parse("100%")
NOW_MS = 1_700_000_000_000


def ack(entry, ts_ms=1_000, *, subscription="s", topic="t", **more):
    return {
        "topic": topic, "subscription": subscription, "ts_ms": ts_ms, "kind": "ack", "ledger_id": 3,
        "first_entry": entry, **more,
    }  # fmt: skip


def refused(tmp_path, rows, *, allow="0", **options):
    """Return the line that refuses some rows, and make sure that nothing is left behind."""
    source = write(tmp_path / "events.jsonl", rows)
    with pytest.raises(TraceError) as caught:
        convert([source], tmp_path / "trace", bad_rows_max=BadRowsMax.parse(allow), **options)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]
    return str(caught.value)


def test_each_kind_of_event_comes_through(tmp_path):
    rows = [
        {"topic": "t", "ts_ms": 1, "kind": "publish", "ledger_id": 3, "first_entry": 0, "last_entry": 9, "number": -1},
        {**ack(0, 2), "kind": "deliver", "last_entry": 4, "number": 7},
        {**ack(0, 3), "kind": "mark_delete", "last_entry": 1},
        ack(3, 3, number=7),
        {"topic": "t", "subscription": "s", "ts_ms": 4, "kind": "persist_begun", "number": 1, "other": {"x": [1]}},
        {"topic": "t", "subscription": "s", "ts_ms": 5, "kind": "persist_ended", "number": 1},
        {"topic": "t", "subscription": "s", "ts_ms": 6, "kind": "crash"},
        {"topic": "t", "subscription": "s", "ts_ms": 7, "kind": "recover"},
        {**ack(3, 7), "kind": "redeliver"},
    ]
    assert convert([write(tmp_path / "a.jsonl", rows)], tmp_path / "trace").events == len(rows)
    assert read_back(tmp_path / "trace") == {
        ("t", ""): [Event(1, EventKind.PUBLISH, 3, 0, 9)],
        ("t", "s"): [
            Event(2, EventKind.DELIVER, 3, 0, 4, 7), Event(3, EventKind.MARK_DELETE, 3, 0, 1),
            Event(3, EventKind.ACK, 3, 3, 3, 7), Event(4, EventKind.PERSIST_BEGUN, number=1),
            Event(5, EventKind.PERSIST_ENDED, number=1), Event(6, EventKind.CRASH), Event(7, EventKind.RECOVER),
            Event(7, EventKind.REDELIVER, 3, 3, 3),
        ],
    }  # fmt: skip


def many_rows(count=500):
    chance = np.random.default_rng(4)
    rows, seqs = [], {}
    for number in range(count):
        subscription = f"s{chance.integers(4)}"
        seq = seqs[subscription] = seqs.get(subscription, -1) + 1
        rows.append(ack(number * 7 % 499, 1_000 + number // 3, subscription=subscription, topic="tü", seq=seq))
    return rows


WAYS = ["gzip", "standard input", "small blocks", "line by line", "two files", "parquet", "kinds"]


@pytest.mark.parametrize(
    ("way", "sizes"),
    [*((way, (64, 1 << 22)) for way in WAYS), ("small blocks", (7, 1 << 22)), ("small blocks", (64, 50))],
)
def test_every_way_leads_to_the_same_events(tmp_path, monkeypatch, way, sizes):
    rows, sources = many_rows(), [tmp_path / "events"]
    convert([write(tmp_path / "plain.jsonl", rows)], tmp_path / "plain")
    monkeypatch.setattr(chunks, "CHUNK_EVENTS", sizes[0])
    monkeypatch.setattr(conversion, "WAITING_MAX", sizes[1])
    table = pa.Table.from_pylist(rows)
    match way:
        case "gzip":
            write(sources[0], gzip.compress(lines_of(rows)))
        case "standard input":
            sources = [Path("-")]
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(lines_of(rows)))))
        case "small blocks":
            monkeypatch.setattr(rows_module, "_BLOCK_BYTES", 3_000)
            write(sources[0], lines_of(rows).rstrip(b"\n"))
        case "line by line":
            write(sources[0], lines_of(rows).replace(b"\n", b"\n\n"))
        case "two files":
            sources = [write(tmp_path / "a", rows[:200]), write(tmp_path / "b", rows[200:])]
        case "parquet":
            pq.write_table(table, sources[0], row_group_size=90)
        case "kinds":
            kinds = pa.array([int(EventKind.ACK)] * len(rows), pa.int8())
            table = table.set_column(table.schema.get_field_index("kind"), "kind", kinds)
            sources[0].mkdir()
            pq.write_table(table, sources[0] / "part-0.parquet")
    converted = convert(sources, tmp_path / "trace")
    assert read_back(tmp_path / "trace") == read_back(tmp_path / "plain")
    assert (converted.events, converted.bad_rows.rows, converted.bad_rows.count) == (500, 500, 0)


@pytest.mark.parametrize("clock", [WALL_CLOCK_MS, OWN_CLOCK_MS])
def test_the_bounds_of_a_clock_are_part_of_a_trace(tmp_path, clock):
    rows = [ack(0, clock.start), ack(1, clock.stop - 1)]
    assert convert([write(tmp_path / "rows.jsonl", rows)], tmp_path / "trace").events == 2
    assert check_events(tmp_path / "trace").last_ts_ms == clock.stop - 1
    assert check_trace(tmp_path / "trace").end_ms == clock.stop - 1


CRASH, BEGUN = ack(1) | {"kind": "crash"}, ack(1) | {"kind": "persist_begun"}
PUBLISH = {"topic": "t", "ts_ms": 0, "kind": "publish", "ledger_id": 3, "first_entry": 0, "last_entry": 8}
# What is wrong, rows of which the last one is, and a part of the reason.
BAD = [
    *((Wrong.NOT_JSON, [text], "") for text in ('{"topic": "t", ', "[1]", "5", "nonsense")),
    *((Wrong.MISSING, [{key: value for key, value in ack(1).items() if key != name}], f"no {name}")
      for name in ("topic", "subscription", "ts_ms", "kind", "first_entry")),
    (Wrong.MISSING, [ack(1, topic="")], "no topic"),
    (Wrong.MISSING, [ack(1, subscription=None)], "no subscription"),
    *((Wrong.WRONG_TYPE, [ack(1) | change], f"{next(iter(change))} ") for change in (
        {"ts_ms": "1"}, {"ts_ms": 1.5}, {"ledger_id": True}, {"topic": 7}, {"kind": 3}, {"seq": []},
    )),
    *((Wrong.UNKNOWN_KIND, [ack(1) | {"kind": kind}], repr(kind)) for kind in ("nack", "ACK", "")),
    *((Wrong.NEGATIVE, [ack(1) | change], "-") for change in (
        {"first_entry": -1}, {"ts_ms": -5}, {"ledger_id": -1}, {"seq": -2}, {"number": -2}, {"ledger_id": -(2**70)},
    )),
    *((Wrong.BEYOND, [ack(1) | change], f"{next(iter(change))} ") for change in (
        {"first_entry": 2**32}, {"last_entry": 2**32}, {"ledger_id": 2**63}, {"ts_ms": 2**64},
    )),
    *((Wrong.TIME_OUTSIDE, [ack(1, ts_ms)], f"ts_ms {ts_ms}, {hint}") for ts_ms, hint in (
        (NOW_MS // 1_000, "which looks like seconds"), (NOW_MS * 1_000, "which looks like microseconds"),
        (NOW_MS * 1_000_000, "which looks like nanoseconds"), (WALL_CLOCK_MS.start - 1, "write ms since 1970"),
        (WALL_CLOCK_MS.stop, "write ms since 1970"), (2**63 - 1, "write ms since 1970"),
        (NOW_MS, "which has another clock"),
    )),
    (Wrong.BACKWARDS, [ack(5, last_entry=4)], ""),
    (Wrong.SEQ_AGAIN, [ack(1, seq=4)], "seq 4"),
    (Wrong.SEQ_GAP, [ack(1, seq=6)], "seq 6"),
    (Wrong.TIME_BACK, [ack(1, ts_ms=999)], "ack, s of t"),
    *((Wrong.TWO_CURSORS, rows, "") for rows in (
        [CRASH, ack(2)], [CRASH, BEGUN], [ack(1), ack(1) | {"kind": "recover"}], [BEGUN] * 2,
        [BEGUN | {"number": 1}, ack(1, number=2) | {"kind": "persist_ended"}],
    )),
    (Wrong.NEVER_PUBLISHED, [PUBLISH, ack(9)], "3:9 of t"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "bad", "reason"), BAD)
def test_a_bad_row_is_named_by_its_line_and_refuses_the_whole(tmp_path, wrong, bad, reason):
    said = refused(tmp_path, [ack(0, 1_000, seq=4), *bad, ack(0, 1_000, subscription="other")])
    assert f"{wrong.value}: 1, at " in said
    assert reason in said
    assert "events.jsonl: 1 bad of" in said
    assert f"line {1 + len(bad)} (" in said or wrong is Wrong.NEVER_PUBLISHED
    converted = convert([tmp_path / "events.jsonl"], tmp_path / "trace", bad_rows_max=BadRowsMax.parse("1"))
    assert converted.bad_rows.counts == {wrong: 1}
    kept = converted.bad_rows.rows - (wrong not in {Wrong.SEQ_GAP, Wrong.NEVER_PUBLISHED})
    assert converted.events == sum(map(len, read_back(tmp_path / "trace").values())) == kept


def test_the_first_five_of_each_are_named_and_all_are_counted(tmp_path):
    said = refused(tmp_path, [ack(number) if number % 10 else {"kind": "ack"} for number in range(200)])
    assert "20 bad of 200 rows so far, more than 0: something is missing: 20, first line 1 (" in said
    assert "line 41 (" in said
    assert "line 51 (" not in said


@pytest.mark.parametrize(("allowed", "is_refused"), [("19", True), ("20", False), ("9.9%", True), ("10%", False)])
def test_the_threshold_is_a_number_or_a_share(tmp_path, allowed, is_refused):
    rows = [ack(number) if number % 10 else ack(number) | {"kind": "?"} for number in range(200)]
    if is_refused:
        assert f"more than {allowed}: an unknown kind: 20" in refused(tmp_path, rows, allow=allowed)
        return
    source = write(tmp_path / "events", rows)
    converted = convert([source], tmp_path / "trace", bad_rows_max=BadRowsMax.parse(allowed))
    assert (converted.events, converted.bad_rows.counts) == (180, {Wrong.UNKNOWN_KIND: 20})
    assert [event.first_entry for event in read_back(tmp_path / "trace")["t", "s"]] == [n for n in range(200) if n % 10]


@pytest.mark.parametrize("chunk", [2, 100])
def test_seqs_that_come_again_or_late_are_left_out(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(chunks, "CHUNK_EVENTS", chunk)
    rows = [ack(seq, seq=seq) for seq in (7, 8, 11, 9, 9, 12, 8, 10, 13)]
    converted = convert([write(tmp_path / "e", rows)], tmp_path / "trace", bad_rows_max=ANY)
    assert converted.bad_rows.counts == {Wrong.SEQ_GAP: 1, Wrong.SEQ_AGAIN: 4}
    assert [event.first_entry for event in read_back(tmp_path / "trace")["t", "s"]] == [7, 8, 11, 12, 13]


SMALL = gzip.compress(b'{"kind": 1}\n' + b" \n" * 100_000, mtime=0)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no events, so"),
        (b"\n \n", "no events, so"),
        (gzip.compress(b"", mtime=0), "no events, so"),
        (gzip.compress(lines_of([ack(0)] * 9_000), mtime=0)[:-20], "cut short"),
        (gzip.compress(lines_of([ack(0)]), mtime=0)[:-4] + b"abcd", "cut short or damaged"),
        (b"PAR1" + b"x" * 40, "not a readable Parquet file"),
        (b"\x00\x01\x02" * 30 + b"\n", "not a JSON object"),
        (lines_of([ack(0), ack(1, topic="X")]).replace(b"X", b"t\xff"), "not UTF-8: 1, at line 2 "),
        (lines_of([ack(0)]) + b"x" * 5_000, "line 2 is longer"),
        (SMALL, "more than 100000 bytes of text; --text-bytes-max allows more"),
    ],
)
def test_a_file_that_is_none_of_these_is_refused(tmp_path, monkeypatch, data, said):
    monkeypatch.setattr(rows_module, "_LINE_BYTES_MAX", 1_000)
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", 100 if said == "line 2 is longer" else 1 << 20)
    bound = {"text_bytes_max": 100_000} if "text-bytes-max" in said else {}
    assert said in refused(tmp_path, data, **bound)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("ts_ms", None, "column 'ts_ms' is missing"),
        ("topic", None, "column 'topic' is missing"),
        ("ts_ms", pa.array([1.0, 2.0]), "column 'ts_ms' must be int64, got double"),
        ("subscription", pa.array([1, 2]), "column 'subscription' must be string, got int64"),
        ("kind", pa.array([[1], [2]]), "column 'kind' must be string, got list<"),
        ("ledger_id", pa.array([1, 2**64 - 1], pa.uint64()), "not a readable Parquet file, Integer value"),
        ("kind", pa.array([3, 99], pa.int32()), "an unknown kind: 1, at row 2 (99)"),
        ("ts_ms", pa.array([NOW_MS, NOW_MS // 1_000]), "at row 2 (ts_ms 1700000000, which looks like seconds"),
        ("topic", pa.array([b"t", b"t\xff"], pa.binary()).view(pa.string()), "not a readable Parquet file, "),
    ],
)
def test_columns_of_others_are_checked(tmp_path, column, values, said):
    table = pa.Table.from_pylist([ack(0), ack(1)])
    index = table.schema.get_field_index(column)
    table = table.remove_column(index) if values is None else table.set_column(index, column, values)
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(TraceError) as caught:
        convert([tmp_path / "rows.parquet"], tmp_path / "trace")
    assert said in str(caught.value)
    assert not (tmp_path / "trace").exists()


def test_a_recording_is_converted_alone_and_a_trace_not_again(tmp_path):
    with Recorder(tmp_path / "recording") as recorder:
        recorder.record("t", "s", [Event(1, EventKind.ACK, 3, 0, 0)])
    assert convert([tmp_path / "recording"], tmp_path / "trace").to_json() == {"events": 1}
    with pytest.raises(TraceError, match="alone"):
        convert([tmp_path / "recording", write(tmp_path / "e", [ack(0)])], tmp_path / "trace")
    with pytest.raises(TraceError, match="already a trace"):
        convert([tmp_path / "trace"], tmp_path / "again")


def test_progress_is_that_of_the_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", 4_000)
    sources = [write(tmp_path / name, many_rows(100)) for name in "ab"]
    size = sum(source.stat().st_size for source in sources)
    said = []
    convert(sources, tmp_path / "trace", bad_rows_max=ANY, progress=lambda *shown: said.append(shown))
    assert {total for _, total in said} == {size}
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    assert (said[-1][0], len(said) > 4) == (size, True)
