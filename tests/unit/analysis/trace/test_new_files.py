"""A trace in a store: its manifest is written last, and readers see the files that it lists and no others."""

from __future__ import annotations

import errno
import shutil

import pytest

from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.check import check_events, trace_hash
from ackstate.analysis.trace.chunks import ChunkWriter
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.parquet import MANIFEST, check_trace, new_trace, trace_files, write_trace
from ackstate.analysis.trace.recorder import Frame

LEFT_OVER = f"part-00000-{'a' * 32}.parquet"


def frames(count):
    return [Frame("t", "s", [Event(5 + entry, EventKind.ACK, 3, entry, entry)]) for entry in range(count)]


def write_file(events, file):
    with ChunkWriter(file) as writer:
        parquet._write_chunks(events, writer)


def names(directory):
    return {each.name for each in directory.iterdir()}


@pytest.fixture
def trace(store, tmp_path):
    """Return an empty directory behind a URL."""
    (tmp_path / "store" / "trace").mkdir()
    return store / "trace"


@pytest.fixture
def local(tmp_path):
    """Return a trace of this machine."""
    write_trace(frames(3), tmp_path / "local")
    return tmp_path / "local"


def test_a_trace_in_a_store_is_read_as_the_same_one_here(trace, local):
    assert write_trace(frames(3), trace) == 3
    assert check_trace(trace)[:3] == check_trace(local)[:3]
    assert trace_hash(trace) == trace_hash(local)
    assert check_events(trace).kinds == {"ack": 3}
    (file,) = trace_files(trace)
    assert names(trace) == {file.name, MANIFEST}
    # As a trace by itself, too.
    assert check_trace(file)[:3] == check_trace(local)[:3]


def test_what_it_replaces_is_seen_until_then_and_deleted_after_it(trace):
    write_trace(frames(3), trace)
    before = trace_files(trace)
    with new_trace(trace) as files:
        write_file(frames(7), files.file())
        assert trace_files(trace) == before
    assert check_trace(trace).end_ms == 11
    assert len(names(trace)) == 2
    assert not before[0].exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LookupError("x"), OSError(errno.EIO, "torn")])
def test_after_an_error_it_is_as_it_was(trace, error):
    write_trace(frames(3), trace)
    before = names(trace)

    def write():
        with new_trace(trace) as files:
            write_file(frames(7), files.file())
            raise error

    with pytest.raises(type(error)) as raised:
        write()
    assert names(trace) == before
    assert not isinstance(error, OSError) or raised.value.filename == "s3a://bucket/trace"


def test_what_a_killed_writer_left_is_no_file_of_the_trace(trace, local, tmp_path):
    whole = (local / parquet.FIRST_FILE).read_bytes()
    (tmp_path / "store" / "trace" / LEFT_OVER).write_bytes(whole[: len(whole) // 2])
    write_trace(frames(7), trace)
    assert check_trace(trace).end_ms == 11
    # Its writer may be alive.
    assert names(trace) > {LEFT_OVER, MANIFEST}
    write_trace(frames(3), trace)
    assert len(names(trace)) == 3


def test_a_trace_that_was_copied_there_is_seen_while_it_is_replaced(trace, local, tmp_path):
    shutil.copytree(local, tmp_path / "store" / "trace", dirs_exist_ok=True)
    with new_trace(trace) as files:
        write_file(frames(7), files.file())
        assert [file.name for file in trace_files(trace)] == [parquet.FIRST_FILE]
        check_trace(trace)
    assert check_trace(trace).end_ms == 11
    assert parquet.FIRST_FILE not in names(trace)


def test_a_directory_with_something_else_in_it_is_not_replaced(trace, tmp_path):
    (tmp_path / "store" / "trace" / "notes.txt").write_text("keep me")
    with pytest.raises(
        TraceError, match=r"s3a://bucket/trace: not a trace that can be replaced, it contains 'notes.txt'"
    ):
        write_trace(frames(3), trace)
    assert names(trace) == {"notes.txt"}


def test_a_file_that_is_missing_or_another_one_is_named(trace, local):
    with new_trace(trace) as files:
        for number in range(2):
            write_file([Frame("t", f"s{number}", frames(3)[0].events)], files.file(number))
    first, second = trace_files(trace)
    second.put(local / parquet.FIRST_FILE)
    with pytest.raises(TraceError, match=f"{second}: the file differs from the one that"):
        check_trace(trace)
    second.unlink()
    with pytest.raises(TraceError, match=rf"{second.name} of its 2 files is missing"):
        check_trace(trace)
    first.unlink()
    with pytest.raises(TraceError, match="no trace here"):
        check_trace(trace)
