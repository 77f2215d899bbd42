"""A trace as Parquet files: nothing lost or reordered, packed numbers, and what is not one whole trace is refused."""

import errno
import json
import os
import shutil
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.chunks import TRACE_SCHEMA, ChunkWriter, pack, unpack
from ackstate.analysis.trace.events import (
    FILES_KEY,
    POLL_MS_KEY,
    POLLED_UNTIL_KEY,
    SEVERAL,
    Event,
    EventKind,
    TraceError,
)
from ackstate.analysis.trace.parquet import MANIFEST, check_trace, new_trace, trace_files, write_manifest, write_trace
from ackstate.analysis.trace.recording import Frame
from ackstate.errors import UnsupportedVersionError
from trace_files import read_rows, write_rows


def acks(begin, end):
    return [Event(1_000 + number, EventKind.ACK, 3, number, number, number % 8) for number in range(begin, end)]


def trace_at(path, count=3, name="s"):
    write_trace([Frame("t", name, acks(0, count))], path)
    return path


def test_the_trace_has_the_schema_that_is_written_down(tmp_path):
    found = pq.read_schema(trace_at(tmp_path / "trace") / parquet.FIRST_FILE)
    assert found.equals(TRACE_SCHEMA)
    assert found.metadata[b"ackstate.trace.version"] == b"3"


# --- Numbers in bytes


def test_the_bytes_are_those_that_are_written_down():
    assert pack(np.array([5, 4, 260])) == b"\x02" + struct.pack("<q3H", 4, 1, 0, 256)
    assert pack(np.array([1_000, 1_001, 1_257])) == b"\x11" + struct.pack("<qq2B", 1_000, 1, 0, 255)


@given(st.binary(max_size=40), st.integers(0, 20))
def test_any_bytes_are_numbers_or_refused(data, count):
    try:
        found, end = unpack(memoryview(data), count)
    except ValueError as error:
        assert "packed numbers" in str(error)  # noqa: PT017 - both outcomes are fine
    else:
        assert (len(found), end <= len(data)) == (count, True)


# --- What a new trace replaces


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
    with pytest.raises(TraceError, match="/trace: "), new_trace(target):
        before += appear()
    assert sorted(tmp_path.rglob("*")) == before
    assert target.is_symlink() == what.startswith("a link")


def test_a_file_whose_name_is_no_text_is_refused_by_a_name_that_is(tmp_path):
    (file,) = trace_at(tmp_path / "trace").iterdir()
    odd = file.rename(file.with_name(os.fsdecode(b"day-\xff.parquet")))
    for path in (tmp_path / "trace", odd):
        with pytest.raises(TraceError, match=r"/trace/day-\\xff.parquet: not UTF-8, rename it$"):
            trace_files(path)


# --- Several files


def several(path, names=("a", "b", "c"), *, count=1):
    """Write a trace with a file for each subscription, as the generator does."""
    with new_trace(path) as files:
        for number, name in enumerate(names):
            table = pq.read_table(trace_at(path.with_name("part"), count, name)).replace_schema_metadata(
                {**TRACE_SCHEMA.metadata, FILES_KEY: SEVERAL}
            )
            pq.write_table(table, files.file(number))
        write_manifest(files.directory)
    shutil.rmtree(path.with_name("part"))
    return path


def _take_out(trace, *names):
    for name in names:
        (trace / name).unlink()


def _put_in(trace, name, *, count=1):
    several(trace.with_name("other"), count=count)
    shutil.copy(trace.with_name("other") / "part-00001.parquet", trace / name)


def _only_whole_traces(trace):
    shutil.rmtree(trace)
    trace.mkdir()
    for number in range(2):
        one = trace_at(trace.with_name("one"), name=str(number)) / parquet.FIRST_FILE
        shutil.copy(one, trace / f"{number}.parquet")


def _silent_file(trace):
    shutil.rmtree(trace)
    write_rows(read_rows(trace_at(trace)), trace / parquet.FIRST_FILE, files=b"")


# What is done to a trace of three files, the file of it that is read, and a part of the reason.
INCOMPLETE = [
    (lambda trace: _take_out(trace, "part-00000.parquet"), "", "part-00000.parquet of its 3 files is missing"),
    (lambda trace: _take_out(trace, "part-00001.parquet", "part-00002.parquet"), "",
     "part-00001.parquet and 1 more of its 3 files is missing"),
    (lambda trace: _put_in(trace, "part-00009.parquet"), "", "part-00009.parquet is not a file of this trace"),
    (lambda trace: _put_in(trace, "part-00001.parquet", count=2), "",
     "part-00001.parquet: the file differs from the one that"),
    (lambda _: None, "part-00000.parquet", "one of several files of a trace: give the directory"),
    (lambda trace: _take_out(trace, MANIFEST), "", f"one of several files of a trace: {MANIFEST}, "),
    (_only_whole_traces, "", "0.parquet is a whole trace, and there are 2 files"),
    (_silent_file, "", f"{parquet.FIRST_FILE}: not a trace, it does not state whether it is one of several"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "read", "said"), INCOMPLETE)
def test_what_is_not_one_whole_trace_is_named(tmp_path, change, read, said):
    trace = several(tmp_path / "trace")
    change(trace)
    for check in (check_trace, check_events):
        with pytest.raises(TraceError) as caught:
            check(trace / read)
        assert said in str(caught.value)


@pytest.mark.parametrize("text", [
    "", "[]", "7", "{}", '{"magic": "x", "version": 1, "files": {}}', "[" * 100_000, '{"magic": ' + "9" * 9_999 + "}",
    '{"magic": "ackstate trace", "version": 1, "files": {"part-00000.parquet": 7}}', "\udcff",
    '{"magic": "ackstate trace", "version": true, "files": {}}',
])  # fmt: skip
def test_a_damaged_manifest_is_refused(tmp_path, text):
    manifest = several(tmp_path / "trace") / MANIFEST
    said = json.loads(manifest.read_text()) | {"version": 2}
    manifest.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(TraceError, match="the manifest is damaged"):
        check_trace(tmp_path / "trace")
    manifest.write_text(json.dumps(said))
    with pytest.raises(UnsupportedVersionError, match="manifest has version 2"):
        check_trace(tmp_path / "trace")


@pytest.mark.parametrize("count", [0, -1, 65_537, 2**31 - 1])
def test_a_row_with_another_number_of_events_than_it_may_have_is_refused(tmp_path, count):
    """Columns of equal numbers take a few bytes, however many they say they are."""
    file = trace_at(tmp_path / "trace") / parquet.FIRST_FILE
    table = pq.read_table(file)
    at = table.column_names.index("event_count")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array([count], table.schema.field(at).type)), file)
    for read in (check_trace, check_events):
        with pytest.raises(TraceError, match=f"row 1 has {count} events; a row must have 1 to 65536"):
            read(file)


# --- In a store, where the manifest is written last


def names(directory):
    return {each.name for each in directory.iterdir()}


@pytest.fixture
def place(url_store, tmp_path):
    """Return an empty directory behind a URL."""
    (tmp_path / "store" / "trace").mkdir()
    return url_store / "trace"


def put(files, count, number=0, name="s"):
    """Write one of the files of a new trace."""
    frames = [Frame("t", name, acks(0, count))]
    with parquet.ChunkWriter(files.file(number)) as writer:
        parquet.write_chunks(frames, writer)


@pytest.mark.parametrize("begin", ["written", "copied"])
def test_what_it_replaces_is_seen_until_then_and_deleted_after_it(place, tmp_path, begin):
    if begin == "written":
        trace_at(place)
    else:
        shutil.copytree(trace_at(tmp_path / "local"), tmp_path / "store" / "trace", dirs_exist_ok=True)
    before = trace_files(place)
    with new_trace(place) as files:
        put(files, 7)
        assert trace_files(place) == before
        check_trace(place)
    assert check_trace(place).end_ms == 1_006
    assert len(names(place)) == 2
    assert not before[0].exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LookupError("x"), OSError(errno.EIO, "torn")])
def test_after_an_error_it_is_as_it_was(place, error):
    before = names(trace_at(place))

    def write():
        with new_trace(place) as files:
            put(files, 7)
            raise error

    with pytest.raises(type(error)) as raised:
        write()
    assert names(place) == before
    assert not isinstance(error, OSError) or raised.value.filename == "s3a://bucket/trace"


def test_what_a_killed_writer_left_is_no_file_of_the_trace(place, tmp_path):
    left_over = f"part-00000-{'a' * 32}.parquet"
    whole = (trace_at(tmp_path / "local") / parquet.FIRST_FILE).read_bytes()
    (tmp_path / "store" / "trace" / left_over).write_bytes(whole[: len(whole) // 2])
    trace_at(place, 7)
    assert check_trace(place).end_ms == 1_006
    # Its writer may be alive.
    assert names(place) > {left_over, MANIFEST}
    assert len(names(trace_at(place))) == 3


def rewritten(file, metadata):
    """Replace key-value metadata of a Parquet file."""
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **metadata}), file)


def test_a_trace_recorded_by_polls_says_how_often_and_until_when(tmp_path):
    trace = tmp_path / "trace.parquet"
    with ChunkWriter(trace, notes={POLL_MS_KEY: 1_500, POLLED_UNTIL_KEY: 9_000}) as writer:
        parquet.write_chunks([Frame("t", "s", acks(0, 3))], writer)
    found = check_trace(trace)
    assert (found.begin_ms, found.end_ms, found.poll_ms) == (1_000, 9_000, 1_500)
    assert check_trace(trace_at(tmp_path / "exact")).poll_ms == 0
    for key in (POLL_MS_KEY, POLLED_UNTIL_KEY):
        for text in (b"", b"-1", b"x", b"9" * 14):
            rewritten(trace, {key: text})
            with pytest.raises(TraceError, match=f"{key.decode()} must be a number, got "):
                check_trace(trace)
        rewritten(trace, {key: b"7"})
