"""Whatever is wrong outside: one clear line that names the thing, status 2, no traceback, nothing destroyed."""

import os
import re
import shutil
import sqlite3
import struct
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackstate import SqliteStore
from ackstate.analysis.demo.broker import MARKER
from ackstate.analysis.trace.chunks import TRACE_SCHEMA
from ackstate.analysis.trace.events import FILES_KEY, ONLY, VERSION_KEY
from ackstate.analysis.trace.parquet import write_trace
from ackstate.errors import AckStateError
from command_line import assert_one_line, run, tree

DATABASE = "ackstate.sqlite3"


# --- traces


def rewritten(good_trace, *, without=(), schema=None, metadata=None, change=lambda rows: rows):
    """Return the bytes of a sound trace after a change to its rows, columns or notes."""
    rows = change(pq.read_table(good_trace).to_pylist())
    fields = [field for field in schema or TRACE_SCHEMA if field.name not in without]
    notes = {**TRACE_SCHEMA.metadata, FILES_KEY: ONLY} if metadata is None else metadata
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(fields, metadata=notes)), sink)
    return sink.getvalue().to_pybytes()


def with_column(good_trace, name, kind, value):
    schema = [pa.field(name, kind) if field.name == name else field for field in TRACE_SCHEMA]
    return rewritten(good_trace, schema=schema, change=lambda rows: [{**row, name: value} for row in rows])


BAD_FILES = {
    "zero bytes": (lambda good: b"", "not a readable Parquet file"),
    "text": (lambda good: b"subscription,acked\nbilling,17\n", "not a readable Parquet file"),
    "cut by half": (lambda good: good.read_bytes()[: good.stat().st_size // 2], "not a readable Parquet file"),
    "only its magic": (lambda good: b"PAR1", "not a readable Parquet file"),
    "a footer that is noise": (lambda good: good.read_bytes()[:-400] + b"\x5a" * 392 + b"PAR1", "Parquet"),
    "no rows": (lambda good: rewritten(good, change=lambda rows: []), "empty"),
    "a column missing": (lambda good: rewritten(good, without=["kind"]), "'kind'"),
    "text for numbers": (lambda good: with_column(good, "topic", pa.int64(), 1), "'topic'"),
    "lists for bytes": (lambda good: with_column(good, "kind", pa.list_(pa.int8()), [3]), "'kind'"),
    "numbers for bytes": (lambda good: with_column(good, "ts_ms", pa.int64(), 1), "'ts_ms'"),
    "other columns": (lambda good: parquet_of(pa.table({"name": ["a"], "size": [1]})), "not a trace"),
    "a column twice": (lambda good: parquet_of(twice(pq.read_table(good))), "several times"),
    "a newer version": (lambda good: rewritten(good, metadata={VERSION_KEY: b"5"}), "version 5"),
    "a version that is no number": (lambda good: rewritten(good, metadata={VERSION_KEY: b"two"}), "two"),
    "a newer version with other columns": (
        lambda good: rewritten(good, without=["kind"], metadata={VERSION_KEY: b"17"}),
        "version 17",
    ),
}


def parquet_of(table):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def twice(table):
    columns = pa.Table.from_arrays([*table.columns, table["kind"]], names=[*table.column_names, "kind"])
    return columns.replace_schema_metadata(table.schema.metadata)


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize("name", ["trace.parquet", "trace/part-00000.parquet"])
def test_a_trace_that_is_none_is_refused_and_not_replaced(good_trace, tmp_path, capsys, case, name):
    make, naming = BAD_FILES[case]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(make(good_trace))
    trace = tmp_path / name.partition("/")[0]
    before = tree(tmp_path)
    assert_one_line(run(capsys, "redelivery", trace), trace, naming)
    with pytest.raises(AckStateError, match=re.escape(naming)):
        write_trace([], trace)
    assert tree(tmp_path) == before


def hidden_files(path, good):
    path.mkdir()
    (path / "_SUCCESS").touch()
    shutil.copy(good, path / ".part-00000.parquet")
    shutil.copy(good, path / "_part-00000.parquet")


NO_TRACES = {
    "missing": lambda path, good: None,
    "an empty directory": lambda path, good: path.mkdir(),
    "hidden files": hidden_files,
    "a directory named as a file": lambda path, good: (path / "part-00000.parquet").mkdir(parents=True),
    "a pipe": lambda path, good: os.mkfifo(path),
}


@pytest.mark.parametrize("make", NO_TRACES.values(), ids=NO_TRACES)
def test_a_place_without_a_trace_is_named(good_trace, tmp_path, capsys, make):
    path = tmp_path / "the-trace"
    make(path, good_trace)
    before = sorted(tmp_path.rglob("*"))
    assert_one_line(run(capsys, "redelivery", path), path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_trace_with_a_stranger_in_it_is_not_replaced(good_trace, killed, tmp_path, capsys):
    (tmp_path / "trace").mkdir()
    shutil.copy(good_trace, tmp_path / "trace")
    (tmp_path / "trace" / "notes.txt").write_text("remember the milk")
    before = tree(tmp_path)
    assert_one_line(run(capsys, "trace", killed / "recording", tmp_path / "trace"), tmp_path / "trace", "notes.txt")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["directory", "file", "link", "empty directory"])
def test_a_trace_replaces_a_trace(good_trace, killed, tmp_path, capsys, kind):
    trace = tmp_path / "trace"
    if kind == "file":
        shutil.copy(good_trace, trace)
    elif kind == "link":
        shutil.copytree(good_trace.parent, tmp_path / "elsewhere")
        trace.symlink_to("elsewhere")
    elif kind == "directory":
        shutil.copytree(good_trace.parent, trace)
    else:
        trace.mkdir()
    assert run(capsys, "trace", killed / "recording", trace).status == 0
    assert (trace / "part-00000.parquet").read_bytes() == good_trace.read_bytes()
    assert trace.is_symlink() == (kind == "link")
    assert {path.name for path in tmp_path.iterdir()} == {"trace"} | ({"elsewhere"} if kind == "link" else set())


# --- recordings

SEGMENT = "000001.events"


def changed(path, change):
    path.write_bytes(change(path.read_bytes()))


BAD_RECORDINGS = {
    "a damaged frame": (
        lambda path: changed(path / SEGMENT, lambda data: data[:999] + bytes([data[999] ^ 1]) + data[1_000:]), SEGMENT,
    ),
    "another version": (
        lambda path: changed(path / SEGMENT, lambda data: data[:8] + struct.pack("<I", 4) + data[12:]), "version 4",
    ),
    "text": (lambda path: (path / SEGMENT).write_text("hello"), SEGMENT),
    "a lost segment": (lambda path: (path / SEGMENT).rename(path / "000002.events"), SEGMENT),
    "a directory for a segment": (lambda path: (path / "000002.events").mkdir(), "000002.events"),
    "a pipe for a segment": (lambda path: os.mkfifo(path / "000002.events"), "000002.events: not a file"),
    "none": (shutil.rmtree, "broker"),
    "an empty one": (lambda path: (shutil.rmtree(path), path.mkdir()), "recording"),
}  # fmt: skip


@pytest.mark.parametrize("damage", BAD_RECORDINGS)
@pytest.mark.parametrize("command", ["recover", "broker", "trace"])
def test_a_bad_recording_is_refused_before_anything_is_touched(broker, tmp_path, capsys, damage, command):
    make, naming = BAD_RECORDINGS[damage]
    make(broker / "recording")
    before = tree(tmp_path)
    arguments = [broker / "recording", tmp_path / "trace"] if command == "trace" else [broker]
    assert_one_line(run(capsys, command, *arguments), naming)
    after = tree(tmp_path)
    if command == "broker" and damage in {"none", "an empty one"}:
        # The store had to be opened to learn that it is not a new one; that folds its log and writes its lock.
        after = {name: found for name, found in after.items() if not name.startswith("broker/store/")}
        before = {name: found for name, found in before.items() if not name.startswith("broker/store/")}
    assert after == before


# --- stores and directories


def of_others(store):
    shutil.rmtree(store)
    store.mkdir()
    with closing(sqlite3.connect(store / DATABASE)) as connection, connection:
        connection.execute("CREATE TABLE t (x)")


def foreign_file(store):
    shutil.rmtree(store)
    store.mkdir()
    (store / "notes.txt").write_text("remember the milk")


BAD_STORES = {
    "foreign files": (foreign_file, "notes.txt"),
    "text": (lambda store: (store / DATABASE).write_text("no database at all" * 20), DATABASE),
    "a database of others": (of_others, DATABASE),
    "a newer one": (
        lambda store: changed(store / DATABASE, lambda data: data[:60] + struct.pack(">I", 4) + data[64:]), "version 3",
    ),
    "a cut one": (lambda store: changed(store / DATABASE, lambda data: data[: len(data) // 2]), DATABASE),
    "an empty file": (lambda store: os.truncate(store / DATABASE, 0), DATABASE),
    "a file for it": (lambda store: (shutil.rmtree(store), store.write_text("no directory")), "store"),
}  # fmt: skip


def without_lock(found):
    """`LOCK` names the last process; that it is there says nothing."""
    return {name: content for name, content in found.items() if not name.endswith("LOCK")}


@pytest.mark.parametrize("damage", BAD_STORES)
@pytest.mark.parametrize("command", ["recover", "broker", "demo"])
def test_a_bad_store_is_refused_and_kept(killed, tmp_path, capsys, damage, command):
    broker = shutil.copytree(killed, tmp_path / "broker")
    make, naming = BAD_STORES[damage]
    make(broker / "store")
    (tmp_path / MARKER).touch()
    before = tree(tmp_path)
    outcome = run(capsys, "demo", "--out", tmp_path) if command == "demo" else run(capsys, command, broker)
    assert_one_line(outcome, broker, naming)
    assert without_lock(tree(tmp_path)) == without_lock(before)


@pytest.mark.parametrize("command", ["recover", "broker", "demo"])
def test_a_store_that_is_open_elsewhere_is_refused(broker, tmp_path, capsys, command):
    store = SqliteStore(broker / "store")
    (tmp_path / MARKER).touch()
    before = tree(tmp_path)
    outcome = run(capsys, "demo", "--out", tmp_path) if command == "demo" else run(capsys, command, broker)
    assert_one_line(outcome, broker, "open in process")
    assert tree(tmp_path) == before
    store.close()
    if command != "demo":
        arguments = ["--seconds=0"] if command == "broker" else []
        assert run(capsys, command, broker, *arguments).status == 0


# What is at the place of a broker, and the commands that refuse it.
NO_BROKERS = {
    "missing": (lambda path: None, ["recover"]),
    "empty": (lambda path: path.mkdir(), ["recover"]),
    "an empty store": (lambda path: (path / "store").mkdir(parents=True), ["recover"]),
    "something else": (lambda path: (path.mkdir(), (path / "notes.txt").write_text("milk")), ["recover", "broker"]),
    "a file": (lambda path: path.write_text("milk"), ["recover", "broker"]),
}


@pytest.mark.parametrize(("make", "commands"), NO_BROKERS.values(), ids=NO_BROKERS)
def test_a_place_that_no_broker_had_is_refused(tmp_path, capsys, make, commands):
    make(tmp_path / "broker")
    before = tree(tmp_path)
    for command in commands:
        assert_one_line(run(capsys, command, tmp_path / "broker"), tmp_path / "broker")
    assert tree(tmp_path) == before


def test_a_recording_without_its_store_is_refused(broker, tmp_path, capsys):
    shutil.rmtree(broker / "store")
    before = tree(tmp_path)
    for command in ("recover", "broker"):
        assert_one_line(run(capsys, command, broker), broker / "store")
    assert tree(tmp_path) == before


# --- the demo's directory


@pytest.mark.parametrize("what", ["notes.txt", "summary.json", "trace.parquet/notes.txt", "broker/notes.txt"])
def test_a_demo_replaces_nothing_but_a_demo(tmp_path, capsys, what):
    target = tmp_path / "out" / what
    target.parent.mkdir(parents=True)
    target.write_text("remember the milk")
    before = tree(tmp_path)
    assert_one_line(run(capsys, "demo", "--out", tmp_path / "out"), tmp_path / "out", "not empty")
    assert tree(tmp_path) == before
