"""A trace with a file missing, too many, or of another trace is refused."""

from __future__ import annotations

import json
import shutil

import pyarrow.parquet as pq
import pytest

from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.chunks import SEVERAL_FILES_SCHEMA
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.parquet import MANIFEST, check_trace, new_trace, write_manifest, write_trace
from ackstate.analysis.trace.recorder import Frame
from ackstate.errors import UnsupportedVersionError
from trace_files import read_rows, write_rows


def one_file(path, name="s", *, entry=0):
    write_trace([Frame("t", name, [Event(5, EventKind.ACK, 3, entry, entry)])], path)
    return path / parquet.FIRST_FILE


def several(path, names=("a", "b", "c"), *, entry=0):
    """Write a trace with a file for each subscription, as the generator does."""
    with new_trace(path) as files:
        for number, name in enumerate(names):
            file = one_file(path.with_name("part"), name, entry=entry)
            table = pq.read_table(file).cast(SEVERAL_FILES_SCHEMA)
            pq.write_table(table, files.file(number))
        write_manifest(files.directory)
    shutil.rmtree(path.with_name("part"))
    return path


def readers():
    return [check_trace, check_events]


@pytest.mark.parametrize("read", readers())
def test_a_whole_trace_is_read_without_a_warning(tmp_path, caplog, read):
    read(several(tmp_path / "trace"))
    file = one_file(tmp_path / "one")
    read(tmp_path / "one")
    # A file that is a whole trace may be taken elsewhere.
    read(file)
    assert not caplog.records


@pytest.mark.parametrize("read", readers())
@pytest.mark.parametrize("gone", [["part-00000.parquet"], ["part-00001.parquet", "part-00002.parquet"]])
def test_a_missing_file_is_named(tmp_path, read, gone):
    trace = several(tmp_path / "trace")
    for name in gone:
        (trace / name).unlink()
    with pytest.raises(TraceError, match=rf"{gone[0]}.* of its 3 files is missing"):
        read(trace)
    with pytest.raises(TraceError, match="is missing"):
        write_trace([], trace)


@pytest.mark.parametrize("read", readers())
def test_a_file_too_many_is_named(tmp_path, read):
    trace = several(tmp_path / "trace")
    shutil.copy(one_file(tmp_path / "other", "new"), trace / "part-00009.parquet")
    with pytest.raises(TraceError, match=r"part-00009\.parquet is not a file of this trace"):
        read(trace)


@pytest.mark.parametrize("read", readers())
def test_a_file_of_another_trace_under_the_same_name_is_named(tmp_path, read):
    trace, other = several(tmp_path / "trace"), several(tmp_path / "other", entry=1)
    shutil.copy(other / "part-00001.parquet", trace / "part-00001.parquet")
    with pytest.raises(TraceError, match=r"part-00001\.parquet: the file differs from the one that"):
        read(trace)


@pytest.mark.parametrize("read", readers())
def test_one_of_several_files_is_no_trace_by_itself(tmp_path, read):
    trace = several(tmp_path / "trace")
    with pytest.raises(TraceError, match="one of several files of a trace: give the directory"):
        read(trace / "part-00000.parquet")
    (trace / MANIFEST).unlink()
    with pytest.raises(TraceError, match=rf"one of several files of a trace: {MANIFEST}, .* is missing"):
        read(trace)


def test_two_whole_traces_in_a_directory_are_refused(tmp_path):
    one_file(tmp_path / "a", "a").rename(tmp_path / "a.parquet")
    (tmp_path / "both").mkdir()
    (tmp_path / "a.parquet").rename(tmp_path / "both" / "a.parquet")
    shutil.copy(one_file(tmp_path / "b", "b"), tmp_path / "both")
    with pytest.raises(TraceError, match=r"a\.parquet is a whole trace, and there are 2 files"):
        check_trace(tmp_path / "both")


@pytest.mark.parametrize("read", readers())
def test_a_file_that_does_not_say_how_many_there_are_is_refused(tmp_path, read):
    file = one_file(tmp_path / "trace")
    write_rows(read_rows(file), file, files=b"")
    with pytest.raises(TraceError, match=rf"{file.name}: not a trace, it does not state whether it is one of several"):
        read(tmp_path / "trace")


@pytest.mark.parametrize("text", [
    "", "[]", "7", "{}", '{"magic": "x", "version": 1, "files": {}}', "[" * 100_000, '{"magic": ' + "9" * 9_999 + "}",
    '{"magic": "ackstate trace", "version": 1, "files": {"part-00000.parquet": 7}}', "\udcff",
    '{"magic": "ackstate trace", "version": true, "files": {}}',
])  # fmt: skip
def test_a_damaged_manifest_is_refused(tmp_path, text):
    several(tmp_path / "trace")
    (tmp_path / "trace" / MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(TraceError, match="the manifest is damaged"):
        check_trace(tmp_path / "trace")


def test_a_manifest_of_a_newer_release_is_refused(tmp_path):
    several(tmp_path / "trace")
    said = json.loads((tmp_path / "trace" / MANIFEST).read_text()) | {"version": 2}
    (tmp_path / "trace" / MANIFEST).write_text(json.dumps(said))
    with pytest.raises(UnsupportedVersionError, match="manifest has version 2"):
        check_trace(tmp_path / "trace")


def test_a_trace_without_its_manifest_can_be_listed_again(tmp_path):
    trace = several(tmp_path / "trace")
    (trace / MANIFEST).unlink()
    write_manifest(trace)
    assert check_trace(trace).chunk_count == 3
