"""Recordings become chunks: nothing lost, nothing reordered, whatever the sizes."""

from __future__ import annotations

import os

import pyarrow.parquet as pq
import pytest

from analysis.trace import parquet
from analysis.trace.events import Event, EventKind, TraceError
from analysis.trace.recorder import Frame


def acks(begin, end):
    return [Event(1_000 + number, EventKind.ACK, 3, number, number, number % 8) for number in range(begin, end)]


def read_back(path):
    rows = pq.read_table(path).to_pylist()
    events = {}
    for row in sorted(rows, key=lambda row: (row["topic"], row["subscription"], row["first_seq"])):
        columns = [row[name] for name in Event._fields]
        chunk = [Event(ts, EventKind(kind), *rest) for ts, kind, *rest in zip(*columns, strict=True)]
        key = (row["topic"], row["subscription"])
        assert row["first_seq"] == len(events.setdefault(key, []))
        assert (row["first_ts_ms"], row["last_ts_ms"]) == (chunk[0].ts_ms, chunk[-1].ts_ms)
        events[key] += chunk
    return rows, events


@pytest.mark.parametrize("count", [1, 9, 10, 11, 20, 35])
@pytest.mark.parametrize("frame_size", [1, 7, 40])
def test_events_come_back_in_order_and_chunks_are_full_but_the_last(tmp_path, monkeypatch, count, frame_size):
    monkeypatch.setattr(parquet, "CHUNK_EVENTS", 10)
    frames = []
    for begin in range(0, count, frame_size):
        frames.append(Frame("t", "a", acks(begin, min(begin + frame_size, count))))
        frames.append(Frame("t", "b", acks(begin, begin + 1)))
    written = parquet.write_trace(frames, tmp_path / "trace")
    rows, events = read_back(tmp_path / "trace")
    assert written == sum(map(len, events.values())) == sum(len(frame.events) for frame in frames)
    assert events["t", "a"] == acks(0, count)
    sizes = [len(row["kind"]) for row in rows if row["subscription"] == "a"]
    assert sizes[:-1] == [10] * (len(sizes) - 1)
    assert sorted(row["chunk"] for row in rows if row["subscription"] == "a") == list(range(len(sizes)))


def test_the_trace_has_the_schema_that_is_written_down(tmp_path):
    parquet.write_trace([Frame("t", "s", acks(0, 3))], tmp_path / "trace")
    found = pq.read_schema(next((tmp_path / "trace").glob("*.parquet")))
    assert found.names == [*parquet.SCALAR_COLUMNS, *parquet.LIST_COLUMNS]
    assert found.metadata[b"ackstate.trace.version"] == b"2"


def test_a_trace_replaces_the_one_that_was_there(tmp_path):
    for count in (3, 5):
        parquet.write_trace([Frame("t", "s", acks(0, count))], tmp_path / "trace")
    assert read_back(tmp_path / "trace")[1]["t", "s"] == acks(0, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_a_file_whose_name_is_no_text_is_refused_by_a_name_that_is(tmp_path):
    parquet.write_trace([Frame("t", "s", acks(0, 3))], tmp_path / "trace")
    (file,) = (tmp_path / "trace").iterdir()
    odd = file.rename(file.with_name(os.fsdecode(b"day-\xff.parquet")))
    for path in (tmp_path / "trace", odd):
        with pytest.raises(TraceError, match=r"/trace/day-\\xff.parquet: not UTF-8, rename it$"):
            parquet.trace_files(path)
