"""Whatever is wrong outside: one clear line that names the thing, status 2, no traceback, nothing destroyed."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackstate import SqliteStore
from ackstate.analysis.demo.directory import MARKER, DemoDirectory
from ackstate.analysis.trace.chunks import TRACE_SCHEMA
from ackstate.analysis.trace.events import FILES_KEY, ONLY, VERSION_KEY
from ackstate.analysis.trace.parquet import write_trace
from ackstate.errors import AckStateError
from command_line import assert_one_line, run, tree

DATABASE = "ackstate.sqlite3"


# --- options and arguments


@pytest.mark.parametrize(
    ("arguments", "naming"),
    [
        (["--nope"], "--nope"),
        (["frobnicate"], "frobnicate"),
        (["recovr"], "recovr"),
        (["demo", "--nope"], "--nope"),
        (["demo", "extra"], "extra"),
        (["demo", "--repeat", "0"], "--repeat"),
        (["demo", "--repeat", "x"], "--repeat"),
        (["demo", "--repeat", "1.5"], "--repeat"),
        (["demo", "--repeat"], "--repeat"),
        (["demo", "--seed", "one"], "--seed"),
        (["demo", "--seed", ""], "--seed"),
        (["demo", "--seconds", "-1"], "--seconds"),
        (["demo", "--seconds", "nan"], "--seconds"),
        (["demo", "--seconds", "inf"], "--seconds"),
        (["demo", "--seconds", "1e99"], "--seconds"),
        (["demo", "--flush-interval-ms", "-1"], "--flush-interval-ms"),
        (["demo", "--flush-interval-ms", "9" * 30], "--flush-interval-ms"),
        (["demo", "--out", ""], "--out"),
        (["demo", "--json=yes"], "--json"),
        (["redelivery"], "TRACE"),
        (["redelivery", "one", "two"], "two"),
        (["trace", "recording"], "FILE"),
        (["trace", "convert", "one", "two", "--bad-rows-max", "many"], "--bad-rows-max"),
        (["trace", "check"], "TRACE"),
        (["trace", "check", "one", "two"], "two"),
        (["recover"], "DIR"),
        (["recover", ""], "DIR"),
        (["broker"], "DIR"),
        (["broker", "new", "--seconds", "inf"], "--seconds"),
        (["broker", "new", "--messages-per-second", "0"], "--messages-per-second"),
        (["broker", "new", "--entries-per-ledger-max", "0"], "--entries-per-ledger-max"),
        (["broker", "new", "--delayed-share", "1.1"], "--delayed-share"),
        (["broker", "new", "--delayed-share", "nan"], "--delayed-share"),
        (["broker", "new", "--delay-ms-max", "9" * 30], "--delay-ms-max"),
        (["broker", "new", "--max-unpersisted-ack-record-bytes", "5"], "--max-unpersisted-ack-record-bytes"),
        (["broker", "new", "--max-unacked-messages", "-1"], "--max-unacked-messages"),
    ],
)
def test_a_nonsense_option_is_named_and_nothing_is_made(tmp_path, monkeypatch, capsys, arguments, naming):
    monkeypatch.chdir(tmp_path)
    assert_one_line(run(capsys, *arguments), naming)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", ["-5", "9" * 40])
def test_any_whole_number_is_a_seed(tmp_path, capsys, seed):
    outcome = run(capsys, "broker", tmp_path / "new", "--seconds=0", f"--seed={seed}")
    assert outcome == (0, "ready\n", "")


# --- traces


def rewritten(good_trace, *, without=(), schema=None, metadata=None, change=lambda rows: rows):
    """Return the bytes of a sound trace after a change to its rows, columns or notes."""
    rows = change(pq.read_table(good_trace).to_pylist())
    fields = [field for field in schema or TRACE_SCHEMA if field.name not in without]
    notes = {**TRACE_SCHEMA.metadata, FILES_KEY: ONLY} if metadata is None else metadata
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(fields, metadata=notes)), sink)
    return sink.getvalue().to_pybytes()


def with_type(name, kind):
    return [pa.field(name, kind) if field.name == name else field for field in TRACE_SCHEMA]


def lose_first_chunk(rows):
    """Renumber one subscription's only chunk, as if one before it had been left out."""
    return [{**row, "chunk": row["chunk"] + (row["subscription"] == "in-order")} for row in rows]


BAD_FILES = {
    "zero bytes": (lambda good: b"", "not a readable Parquet file"),
    "text": (lambda good: b"subscription,acked\nbilling,17\n", "not a readable Parquet file"),
    "json": (lambda good: b'{"subscriptions": []}', "not a readable Parquet file"),
    "cut in the footer": (lambda good: good.read_bytes()[:-9], "not a readable Parquet file"),
    "cut by half": (lambda good: good.read_bytes()[: good.stat().st_size // 2], "not a readable Parquet file"),
    "only its magic": (lambda good: b"PAR1", "not a readable Parquet file"),
    "a footer that is noise": (lambda good: good.read_bytes()[:-400] + b"\x5a" * 392 + b"PAR1", "Parquet"),
    "no rows": (lambda good: rewritten(good, change=lambda rows: []), "empty"),
    "a column missing": (lambda good: rewritten(good, without=["kind"]), "'kind'"),
    "text for numbers": (
        lambda good: rewritten(
            good,
            schema=with_type("topic", pa.int64()),
            change=lambda rows: [{**row, "topic": 1} for row in rows],
        ),
        "'topic'",
    ),
    "lists for bytes": (
        lambda good: rewritten(
            good,
            schema=with_type("kind", pa.list_(pa.int8())),
            change=lambda rows: [{**row, "kind": [3]} for row in rows],
        ),
        "'kind'",
    ),
    "numbers for bytes": (
        lambda good: rewritten(
            good, schema=with_type("ts_ms", pa.int64()), change=lambda rows: [{**row, "ts_ms": 1} for row in rows]
        ),
        "'ts_ms'",
    ),
    "other columns": (lambda good: parquet_of(pa.table({"name": ["a"], "size": [1]})), "not a trace"),
    "a column twice": (lambda good: parquet_of(twice(pq.read_table(good))), "several times"),
    "a newer version": (lambda good: rewritten(good, metadata={VERSION_KEY: b"5"}), "version 5"),
    "a version that is no number": (lambda good: rewritten(good, metadata={VERSION_KEY: b"two"}), "two"),
    "a newer version with other columns": (
        lambda good: rewritten(good, without=["kind"], metadata={VERSION_KEY: b"17"}),
        "version 17",
    ),
    "a chunk missing": (lambda good: rewritten(good, change=lose_first_chunk), "chunk 0"),
    "a chunk twice": (lambda good: rewritten(good, change=lambda rows: [*rows, rows[0]]), "several times"),
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


def missing(path, good):
    pass


def empty_directory(path, good):
    path.mkdir()


def hidden_files(path, good):
    path.mkdir()
    (path / "_SUCCESS").touch()
    shutil.copy(good, path / ".part-00000.parquet")
    shutil.copy(good, path / "_part-00000.parquet")


def other_files(path, good):
    path.mkdir()
    (path / "notes.txt").write_text("remember the milk")


def directory_named_as_a_file(path, good):
    (path / "part-00000.parquet").mkdir(parents=True)


def a_pipe(path, good):
    os.mkfifo(path)


@pytest.mark.parametrize(
    "make", [missing, empty_directory, hidden_files, other_files, directory_named_as_a_file, a_pipe]
)
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


def first_segment(recording):
    return recording / "000001.events"


def damage_a_frame(recording):
    data = bytearray(first_segment(recording).read_bytes())
    data[len(data) // 2] ^= 1
    first_segment(recording).write_bytes(data)


def set_version(recording):
    data = first_segment(recording).read_bytes()
    first_segment(recording).write_bytes(data[:8] + struct.pack("<I", 4) + data[12:])


def replace_by_text(recording):
    first_segment(recording).write_text("hello")


def lose_first_segment(recording):
    first_segment(recording).rename(recording / "000002.events")


def make_a_directory_of_it(recording):
    (recording / "000002.events").mkdir()


def remove_it(recording):
    shutil.rmtree(recording)


def empty_it(recording):
    remove_it(recording)
    recording.mkdir()


BAD_RECORDINGS = {
    damage_a_frame: "000001.events",
    set_version: "version 4",
    replace_by_text: "000001.events",
    lose_first_segment: "000001.events",
    make_a_directory_of_it: "000002.events",
    remove_it: "recording",
    empty_it: "recording",
}


@pytest.mark.parametrize("damage", BAD_RECORDINGS)
@pytest.mark.parametrize("command", ["recover", "broker", "trace"])
def test_a_bad_recording_is_refused_before_anything_is_touched(broker, tmp_path, capsys, damage, command):
    damage(broker / "recording")
    before = tree(tmp_path)
    arguments = [broker / "recording", tmp_path / "trace"] if command == "trace" else [broker]
    assert_one_line(run(capsys, command, *arguments), BAD_RECORDINGS[damage] if damage is not remove_it else broker)
    after = tree(tmp_path)
    if command == "broker" and damage in {remove_it, empty_it}:
        # The store had to be opened to learn that it is not a new one; that folds its log and writes its lock.
        after = {name: found for name, found in after.items() if not name.startswith("broker/store/")}
        before = {name: found for name, found in before.items() if not name.startswith("broker/store/")}
    assert after == before


def test_what_a_stranger_put_beside_the_segments_is_no_part_of_the_recording(broker, tmp_path, capsys):
    (broker / "recording" / "notes.txt").write_text("remember the milk")
    (broker / "recording" / "².events").write_text("no number")
    assert run(capsys, "trace", broker / "recording", tmp_path / "trace").status == 0


# --- stores and directories


def foreign_store(broker):
    for file in (broker / "store").iterdir():
        file.unlink()
    (broker / "store" / "notes.txt").write_text("remember the milk")


def text_for_a_store(broker):
    (broker / "store" / DATABASE).write_text("no database at all" * 20)


def a_database_of_others(broker):
    foreign_store(broker)
    (broker / "store" / "notes.txt").unlink()
    with sqlite3.connect(broker / "store" / DATABASE) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()


def a_newer_store(broker):
    patch_header(broker, offset=60, value=4)


def a_cut_store(broker):
    database = broker / "store" / DATABASE
    os.truncate(database, database.stat().st_size // 2)


def an_empty_store_file(broker):
    os.truncate(broker / "store" / DATABASE, 0)


def a_file_for_a_store(broker):
    shutil.rmtree(broker / "store")
    (broker / "store").write_text("no directory")


def patch_header(broker, *, offset, value):
    with (broker / "store" / DATABASE).open("r+b") as database:
        database.seek(offset)
        database.write(struct.pack(">I", value))


BAD_STORES = {
    foreign_store: "notes.txt",
    text_for_a_store: DATABASE,
    a_database_of_others: DATABASE,
    a_newer_store: "version 3",
    a_cut_store: DATABASE,
    an_empty_store_file: DATABASE,
    a_file_for_a_store: "store",
}


def without_lock(found):
    """`LOCK` names the last process; that it is there says nothing."""
    return {name: content for name, content in found.items() if not name.endswith("LOCK")}


@pytest.mark.parametrize("damage", BAD_STORES)
@pytest.mark.parametrize("command", ["recover", "broker", "demo"])
def test_a_bad_store_is_refused_and_kept(killed, tmp_path, capsys, damage, command):
    broker = shutil.copytree(killed, tmp_path / "broker")
    damage(broker)
    (tmp_path / MARKER).touch()
    before = tree(tmp_path)
    outcome = run(capsys, "demo", "--out", tmp_path) if command == "demo" else run(capsys, command, broker)
    assert_one_line(outcome, broker, BAD_STORES[damage])
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


@pytest.mark.parametrize("command", ["recover", "broker"])
def test_a_directory_that_no_broker_had_is_refused(tmp_path, capsys, command):
    (tmp_path / "notes.txt").write_text("remember the milk")
    before = tree(tmp_path)
    assert_one_line(run(capsys, command, tmp_path), tmp_path)
    assert_one_line(run(capsys, command, tmp_path / "notes.txt"), tmp_path / "notes.txt")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("place", ["missing", "empty", "empty store"])
def test_recovering_where_no_broker_was_makes_nothing(tmp_path, capsys, place):
    if place != "missing":
        (tmp_path / "dir" / ("store" if place == "empty store" else "")).mkdir(parents=True)
    before = tree(tmp_path)
    assert_one_line(run(capsys, "recover", tmp_path / "dir"), tmp_path / "dir")
    assert tree(tmp_path) == before


def test_a_recording_without_its_store_is_refused(broker, tmp_path, capsys):
    shutil.rmtree(broker / "store")
    before = tree(tmp_path)
    assert_one_line(run(capsys, "recover", broker), broker / "store")
    assert_one_line(run(capsys, "broker", broker), broker / "store")
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


def test_a_demo_replaces_the_results_of_an_earlier_one(tmp_path):
    for _ in range(2):
        with DemoDirectory(tmp_path / "out").claimed():
            (tmp_path / "out" / "summary.json").write_text("{}")


@pytest.mark.parametrize("below", ["", "below/it"])
def test_results_in_a_file_are_refused(tmp_path, capsys, below):
    (tmp_path / "file").write_text("remember the milk")
    outcome = run(capsys, "demo", "--out", tmp_path / "file" / below)
    assert_one_line(outcome, tmp_path / "file")
    assert tree(tmp_path) == {"file": b"remember the milk"}


def test_a_second_demo_in_the_same_directory_is_refused(tmp_path, capsys):
    with DemoDirectory(tmp_path / "out").claimed():
        before = tree(tmp_path)
        assert_one_line(run(capsys, "demo", "--out", tmp_path / "out"), tmp_path / "out", "another demo")
        assert tree(tmp_path) == before


# --- permissions, full disks


# --- Java, and the parts of the extra `spark`
