"""Recordings become chunks: nothing lost, nothing reordered, whatever the sizes."""

from __future__ import annotations

import os

import pyarrow.parquet as pq
import pytest

from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.chunks import TRACE_SCHEMA
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recorder import Frame
from trace_files import read_back, read_rows


def acks(begin, end):
    return [Event(1_000 + number, EventKind.ACK, 3, number, number, number % 8) for number in range(begin, end)]


@pytest.mark.parametrize("count", [1, 9, 10, 11, 20, 35])
@pytest.mark.parametrize("frame_size", [1, 7, 40])
def test_events_come_back_in_order_and_chunks_are_full_but_the_last(tmp_path, monkeypatch, count, frame_size):
    monkeypatch.setattr(parquet, "CHUNK_EVENTS", 10)
    frames = []
    for begin in range(0, count, frame_size):
        frames.append(Frame("t", "a", acks(begin, min(begin + frame_size, count))))
        frames.append(Frame("t", "b", acks(begin, begin + 1)))
    written = parquet.write_trace(frames, tmp_path / "trace")
    rows, events = read_rows(tmp_path / "trace"), read_back(tmp_path / "trace")
    assert written == sum(map(len, events.values())) == sum(len(frame.events) for frame in frames)
    assert events["t", "a"] == acks(0, count)
    sizes = [len(row["kind"]) for row in rows if row["subscription"] == "a"]
    assert sizes[:-1] == [10] * (len(sizes) - 1)
    assert sorted(row["chunk"] for row in rows if row["subscription"] == "a") == list(range(len(sizes)))


def test_the_trace_has_the_schema_that_is_written_down(tmp_path):
    parquet.write_trace([Frame("t", "s", acks(0, 3))], tmp_path / "trace")
    found = pq.read_schema(next((tmp_path / "trace").glob("*.parquet")))
    assert found.equals(TRACE_SCHEMA)
    assert found.metadata[b"ackstate.trace.version"] == b"3"


def test_a_trace_replaces_the_one_that_was_there(tmp_path):
    for count in (3, 5):
        parquet.write_trace([Frame("t", "s", acks(0, count))], tmp_path / "trace")
    assert read_back(tmp_path / "trace")["t", "s"] == acks(0, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def trace_at(path, count=3):
    parquet.write_trace([Frame("t", "s", acks(0, count))], path)
    return path


@pytest.mark.parametrize("name", ["photos.crc", ".photos.crc", "_photos.parquet", "photos.parquet", "_SUCCESS"])
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_directory_or_link_with_the_name_of_a_part_is_not_removed_with_a_trace(tmp_path, name, kind):
    trace_at(tmp_path / "trace")
    photos = tmp_path / "trace" / name if kind == "directory" else tmp_path / "photos"
    photos.mkdir()
    (photos / "one.jpeg").write_bytes(b"keep me")
    if kind == "link":
        (tmp_path / "trace" / name).symlink_to(photos)
    with pytest.raises(TraceError, match=f"/trace: not a trace that can be replaced, it contains '{name}'"):
        trace_at(tmp_path / "trace", 5)
    assert (photos / "one.jpeg").read_bytes() == b"keep me"
    assert (tmp_path / "trace" / name).exists()
    assert len(pq.read_table(next((tmp_path / "trace").glob("part-*")))) == 1


@pytest.mark.parametrize("name", ["notes.crc", "_notes.parquet", ".notes.parquet"])
def test_a_file_that_no_writer_of_traces_makes_is_not_removed_with_a_trace(tmp_path, name):
    (trace_at(tmp_path / "trace") / name).write_text("keep me")
    with pytest.raises(TraceError, match=f"it contains '{name}'"):
        trace_at(tmp_path / "trace", 5)
    assert (tmp_path / "trace" / name).read_text() == "keep me"


@pytest.mark.parametrize("begin", ["a trace", "nothing"])
@pytest.mark.parametrize(
    "what", ["a link to a trace", "a link to nothing", "a directory with something else", "a file"]
)
def test_what_appears_where_a_trace_goes_while_it_is_written_is_left_alone(tmp_path, begin, what):
    target, other = tmp_path / "trace", tmp_path / "other"
    if begin == "a trace":
        trace_at(target)
    if what == "a link to a trace":
        trace_at(other)

    def appear():
        if begin == "a trace":
            target.rename(tmp_path / "moved")
        if what.startswith("a link"):
            target.symlink_to(other)
        elif what == "a file":
            target.write_text("keep me")
        else:
            target.mkdir()
            (target / "one.jpeg").write_bytes(b"keep me")
        return sorted(each for each in tmp_path.rglob("*") if ".unfinished" not in str(each))

    before = []
    with pytest.raises(TraceError, match="/trace: "), parquet.new_trace(target):
        before += appear()
    assert sorted(tmp_path.rglob("*")) == before
    assert target.is_symlink() == what.startswith("a link")


def test_a_file_whose_name_is_no_text_is_refused_by_a_name_that_is(tmp_path):
    parquet.write_trace([Frame("t", "s", acks(0, 3))], tmp_path / "trace")
    (file,) = (tmp_path / "trace").iterdir()
    odd = file.rename(file.with_name(os.fsdecode(b"day-\xff.parquet")))
    for path in (tmp_path / "trace", odd):
        with pytest.raises(TraceError, match=r"/trace/day-\\xff.parquet: not UTF-8, rename it$"):
            parquet.trace_files(path)
