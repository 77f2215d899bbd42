"""Files of others become the same trace, in every format; an error in them is named and refused."""

from __future__ import annotations

import gzip
import io
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackstate.analysis.trace import convert as conversion
from ackstate.analysis.trace import rows as rows_module
from ackstate.analysis.trace.check import BadRowsMax, Wrong
from ackstate.analysis.trace.convert import convert
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recorder import Recorder
from ackstate.analysis.trace.rows import STANDARD_INPUT
from trace_files import lines_of, read_back, write

ANY = BadRowsMax.parse("100%")


def ack(entry, ts_ms=1_000, *, subscription="s", topic="t", **more):
    return {
        "topic": topic, "subscription": subscription, "ts_ms": ts_ms, "kind": "ack", "ledger_id": 3,
        "first_entry": entry, **more,
    }  # fmt: skip


def refused(tmp_path, rows, *, name="events.jsonl", allow="0"):
    """Return the line that refuses some rows, and make sure that nothing is left behind."""
    source = write(tmp_path / name, rows)
    with pytest.raises(TraceError) as caught:
        convert([source], tmp_path / "trace", bad_rows_max=BadRowsMax.parse(allow))
    assert [path.name for path in tmp_path.iterdir()] == [name]
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
            Event(2, EventKind.DELIVER, 3, 0, 4, 7),
            Event(3, EventKind.MARK_DELETE, 3, 0, 1),
            Event(3, EventKind.ACK, 3, 3, 3, 7),
            Event(4, EventKind.PERSIST_BEGUN, number=1),
            Event(5, EventKind.PERSIST_ENDED, number=1),
            Event(6, EventKind.CRASH),
            Event(7, EventKind.RECOVER),
            Event(7, EventKind.REDELIVER, 3, 3, 3),
        ],
    }


def many_rows(count=500):
    chance = np.random.default_rng(4)
    rows, seqs = [], {}
    for number in range(count):
        subscription = f"s{chance.integers(4)}"
        seq = seqs[subscription] = seqs.get(subscription, -1) + 1
        rows.append(ack(number * 7 % 499, 1_000 + number // 3, subscription=subscription, topic="tü", seq=seq))
    return rows


@pytest.fixture
def expected(tmp_path):
    convert([write(tmp_path / "plain.jsonl", many_rows())], tmp_path / "plain")
    return read_back(tmp_path / "plain")


WAYS = ["gzip", "standard input", "small blocks", "line by line", "two files", "parquet", "kinds"]


@pytest.mark.parametrize(
    ("way", "sizes"),
    [*((way, (64, 1 << 22)) for way in WAYS), ("small blocks", (7, 1 << 22)), ("small blocks", (64, 50))],
)
def test_every_way_leads_to_the_same_events(tmp_path, monkeypatch, expected, way, sizes):
    monkeypatch.setattr(conversion, "CHUNK_EVENTS", sizes[0])
    monkeypatch.setattr(conversion, "WAITING_MAX", sizes[1])
    rows, sources = many_rows(), [tmp_path / "events"]
    table = pa.Table.from_pylist(rows)
    match way:
        case "gzip":
            write(sources[0], gzip.compress(lines_of(rows)))
        case "standard input":
            sources = [jsonl_path := tmp_path.__class__("-")]
            assert str(jsonl_path) == STANDARD_INPUT
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
    assert read_back(tmp_path / "trace") == expected
    assert (converted.events, converted.bad_rows.rows, converted.bad_rows.count) == (500, 500, 0)


BAD = {
    Wrong.NOT_JSON: ['{"topic": "t", ', "[1]", "5", "nonsense"],
    Wrong.MISSING: [
        {"subscription": "s", "ts_ms": 1, "kind": "crash"},
        {"topic": "t", "ts_ms": 1, "kind": "crash"},
        {"topic": "t", "subscription": "s", "kind": "crash"},
        {"topic": "t", "subscription": "s", "ts_ms": 1},
        {"topic": "t", "subscription": "s", "ts_ms": 1, "kind": "ack", "ledger_id": 3},
        {"topic": "", "subscription": "s", "ts_ms": 1, "kind": "crash"},
        {"topic": "t", "subscription": None, "ts_ms": 1, "kind": "crash"},
    ],
    Wrong.WRONG_TYPE: [
        ack(1) | {"ts_ms": "1"},
        ack(1) | {"ts_ms": 1.5},
        ack(1) | {"ledger_id": True},
        ack(1) | {"topic": 7},
        ack(1) | {"kind": 3},
        ack(1, seq=[]),
    ],
    Wrong.UNKNOWN_KIND: [ack(1) | {"kind": "nack"}, ack(1) | {"kind": "ACK"}, ack(1) | {"kind": ""}],
    Wrong.NEGATIVE: [
        ack(-1), ack(1, ts_ms=-5), ack(1) | {"ledger_id": -1}, ack(1, seq=-2), ack(1, number=-2),
        ack(1) | {"ledger_id": -(2**70)},
    ],
    Wrong.BEYOND: [ack(2**32), ack(1, last_entry=2**32), ack(1) | {"ledger_id": 2**63}, ack(1, ts_ms=2**64)],
    Wrong.BACKWARDS: [ack(5, last_entry=4)],
    Wrong.SEQ_AGAIN: [ack(1, seq=4)],
    Wrong.SEQ_GAP: [ack(1, seq=6)],
    Wrong.TIME_BACK: [ack(1, ts_ms=999)],
    Wrong.TWO_CURSORS: [
        [ack(1) | {"kind": "crash"}, ack(2)],
        [ack(1) | {"kind": "crash"}, ack(1) | {"kind": "persist_begun"}],
        [ack(1), ack(1) | {"kind": "recover"}],
        [ack(1) | {"kind": "persist_begun"}] * 2,
        [ack(1, number=1) | {"kind": "persist_begun"}, ack(1, number=2) | {"kind": "persist_ended"}],
    ],
    Wrong.NEVER_PUBLISHED: [
        [{"topic": "t", "ts_ms": 0, "kind": "publish", "ledger_id": 3, "first_entry": 0, "last_entry": 8}, ack(9)],
    ],
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "bad"), [(wrong, bad) for wrong, rows in BAD.items() for bad in rows])
def test_a_bad_row_is_named_by_its_line_and_refuses_the_whole(tmp_path, wrong, bad):
    bad = bad if isinstance(bad, list) else [bad]
    rows = [ack(0, 1_000, seq=4), *bad, ack(0, 1_000, subscription="other")]
    said = refused(tmp_path, rows)
    assert wrong.value in said
    assert "events.jsonl: 1 bad of" in said
    assert f"line {1 + len(bad)} (" in said or wrong is Wrong.NEVER_PUBLISHED
    converted = convert([tmp_path / "events.jsonl"], tmp_path / "trace", bad_rows_max=BadRowsMax.parse("1"))
    assert converted.bad_rows.counts == {wrong: 1}
    kept = converted.bad_rows.rows - (wrong not in {Wrong.SEQ_GAP, Wrong.NEVER_PUBLISHED})
    assert converted.events == sum(map(len, read_back(tmp_path / "trace").values())) == kept


def test_text_that_is_not_utf8_is_named(tmp_path):
    data = lines_of([ack(0), ack(1), ack(2)]).replace(b'"t"', b'"t\xff"', 2).replace(b'"t\xff"', b'"t"', 1)
    assert "not UTF-8: 1, at line 2 " in refused(tmp_path, data)


def test_parquet_that_is_not_utf8_is_refused(tmp_path):
    table = pa.Table.from_pylist([ack(0), ack(1)])
    topic = pa.array([b"t", b"t\xff"], pa.binary()).view(pa.string())
    pq.write_table(table.set_column(0, "topic", topic), tmp_path / "rows")
    with pytest.raises(TraceError, match=r"not a readable Parquet file, .*UTF8"):
        convert([tmp_path / "rows"], tmp_path / "trace")


def test_the_first_five_of_each_are_named_and_all_are_counted(tmp_path):
    rows = [ack(number) if number % 10 else {"kind": "ack"} for number in range(200)]
    said = refused(tmp_path, rows)
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


@pytest.mark.parametrize("text", ["", "-1", "101%", "1e3", "x", "0.1 %", "%"])
def test_a_threshold_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="must be a number such as 12 or a share"):
        BadRowsMax.parse(text)


@pytest.mark.parametrize("chunk", [2, 100])
def test_seqs_that_come_again_or_late_are_left_out(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(conversion, "CHUNK_EVENTS", chunk)
    seqs = [7, 8, 11, 9, 9, 12, 8, 10, 13]
    rows = [ack(seq, seq=seq) for seq in seqs]
    converted = convert([write(tmp_path / "e", rows)], tmp_path / "trace", bad_rows_max=ANY)
    assert converted.bad_rows.counts == {Wrong.SEQ_GAP: 1, Wrong.SEQ_AGAIN: 4}
    assert [event.first_entry for event in read_back(tmp_path / "trace")["t", "s"]] == [7, 8, 11, 12, 13]


def test_subscriptions_may_come_in_any_order_and_publishes_late(tmp_path):
    publish = {"topic": "t", "ts_ms": 5, "kind": "publish", "ledger_id": 3, "first_entry": 2, "last_entry": 99}
    rows = [ack(7, 50), ack(8, 10, subscription="b"), ack(1, 11, subscription="b"), publish]
    # Entry 1 is older than the trace.
    assert convert([write(tmp_path / "e", rows)], tmp_path / "trace").events == 4
    rows += [ack(100, 60), ack(200, 60) | {"ledger_id": 4}]
    said = refused(tmp_path / "n", rows) if (tmp_path / "n").mkdir() is None else ""
    assert "entries that were never published: 2, first 3:100 of t" in said


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
    ],
)
def test_a_file_that_is_none_of_these_is_refused(tmp_path, data, said):
    assert said in refused(tmp_path, data)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(rows_module, "_LINE_BYTES_MAX", 1_000)
    assert "line 2 is longer" in refused(tmp_path, lines_of([ack(0)]) + b"x" * 5_000)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("ts_ms", None, "column 'ts_ms' is missing"),
        ("topic", None, "column 'topic' is missing"),
        ("ts_ms", pa.array([1.0, 2.0]), "column 'ts_ms' must be int64, got double"),
        ("subscription", pa.array([1, 2]), "column 'subscription' must be string, got int64"),
        ("kind", pa.array([[1], [2]]), "column 'kind' must be string, got list<"),
        (
            "ledger_id",
            pa.array([1, 2**64 - 1], pa.uint64()),
            "not a readable Parquet file, Integer value",
        ),
        ("kind", pa.array([3, 99], pa.int32()), "an unknown kind: 1, at row 2 (99)"),
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


@pytest.mark.parametrize("size", [3, 100, -1])
def test_a_parquet_file_cut_short_is_refused(tmp_path, size):
    pq.write_table(pa.Table.from_pylist([ack(0), ack(1)]), tmp_path / "rows.parquet")
    whole = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(whole[:size])
    with pytest.raises(TraceError, match=r"rows\.parquet: not a readable Parquet file"):
        convert([tmp_path / "rows.parquet"], tmp_path / "trace")


def test_a_trace_is_not_converted_again(tmp_path):
    convert([write(tmp_path / "e", [ack(0)])], tmp_path / "trace")
    with pytest.raises(TraceError, match="already a trace"):
        convert([tmp_path / "trace"], tmp_path / "again")


def test_a_recording_is_converted_alone(tmp_path):
    with Recorder(tmp_path / "recording") as recorder:
        recorder.record("t", "s", [Event(1, EventKind.ACK, 3, 0, 0)])
    converted = convert([tmp_path / "recording"], tmp_path / "trace")
    assert converted.to_json() == {"events": 1}
    with pytest.raises(TraceError, match="alone"):
        convert([tmp_path / "recording", write(tmp_path / "e", [ack(0)])], tmp_path / "trace")


def test_a_failure_leaves_the_trace_that_was_there(tmp_path):
    convert([write(tmp_path / "e", [ack(0)])], tmp_path / "trace")
    write(tmp_path / "e", [ack(0)] * 3 + ["{"])
    with pytest.raises(TraceError):
        convert([tmp_path / "e"], tmp_path / "trace")
    assert read_back(tmp_path / "trace") == {("t", "s"): [Event(1_000, EventKind.ACK, 3, 0, 0)]}
    assert {path.name for path in tmp_path.iterdir()} == {"e", "trace"}


def test_progress_is_that_of_the_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", 4_000)
    sources = [write(tmp_path / name, many_rows(100)) for name in "ab"]
    sizes = [source.stat().st_size for source in sources]
    said = []
    convert(sources, tmp_path / "trace", bad_rows_max=ANY, progress=lambda *shown: said.append(shown))
    assert {total for _, total in said} == {sum(sizes)}
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    assert said[-1][0] == sum(sizes)
    assert len(said) > 4
