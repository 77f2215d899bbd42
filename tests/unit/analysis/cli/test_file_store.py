"""`ackstate fsck`, `inspect` and `explain` on a `FileStore`: they tell it by its files and change no byte of it."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from ackstate.cursor import FileStore, SqliteStore
from ackstate.cursor.journal.journal import cursor_owner, cursor_path
from ackstate.stores.file_records import APPEND_SIZE
from command_line import assert_one_line, run, tree
from sample_store import NAMES, TOPIC, fill, fsck


@pytest.fixture
def path(tmp_path):
    with closing(FileStore(tmp_path / "files")) as store:
        fill(store)
    return tmp_path / "files"


def log_in(path):
    (log,) = path.glob("log-*")
    return log


def looked_at(capsys, command, path, *options):
    """The output of a command for programs, without the name of the store."""
    before = tree(path)
    outcome = run(capsys, command, path, "--json", *options)
    assert (outcome.status, outcome.err, tree(path)) == (0, "", before)
    return {key: value for key, value in json.loads(outcome.out).items() if key != "store"}


@pytest.mark.slow
def test_a_file_store_and_an_sqlite_store_look_the_same(path, tmp_path, capsys):
    with closing(SqliteStore(tmp_path / "sqlite")) as store:
        fill(store)
    for command, *options in ("fsck",), ("inspect",), ("explain", "--now-ms=9000"):
        found = looked_at(capsys, command, path, *options)
        assert [cursor["subscription"] for cursor in found["cursors"]] == list(NAMES)
        assert found == looked_at(capsys, command, tmp_path / "sqlite", *options)


def test_a_torn_end_of_the_log_is_told_and_is_no_problem(path, capsys):
    content = log_in(path).read_bytes().rstrip(b"\0")
    with closing(FileStore(path)) as store:
        (ledger_id,) = store.ledgers.owned_by(cursor_owner(cursor_path(TOPIC, "billing")))
        store.ledgers.append(ledger_id, bytes(range(1, 200)))
    torn = log_in(path).read_bytes().rstrip(b"\0")[:-50]
    log_in(path).write_bytes(torn)
    size = len(torn) - len(content)
    (note,) = looked_at(capsys, "fsck", path)["notes"]
    assert (note["offset"], note["size_bytes"]) == (len(content), size)
    status, out, err = run(capsys, "fsck", path)
    assert (status, err) == (0, "")
    line = f"files: note: torn end of the log, which the next open discards: cut after {size} of {size + 50} bytes"
    assert f"{line} ({size:,} bytes at byte {len(content):,})" in out.replace("\n", " ")
    with closing(FileStore(path)) as store:
        assert (store.discarded.offset, store.discarded.byte_count) == (len(content), size)
    assert looked_at(capsys, "fsck", path)["notes"] == []


def test_a_cursor_that_does_not_open_is_a_problem_with_its_repairs(path, capsys):
    with closing(FileStore(path)) as store:
        (ledger_id,) = store.ledgers.owned_by(cursor_owner(cursor_path(TOPIC, "billing")))
        store.ledgers.append(ledger_id, b"not a record, and a good one follows it")
        store.ledgers.append(ledger_id, store.ledgers.read(ledger_id, 0, 1)[0])
    status, cursors = fsck(capsys, path)
    (problem,) = cursors["billing"]["problems"]
    assert (status, cursors["audit"]["status"]) == (1, "ok")
    assert problem["repairs"][0]["repair"] == "DISCARD_DAMAGED_RECORDS"


def flip(path, offset):
    content = bytearray(log_in(path).read_bytes())
    content[offset] ^= 1
    log_in(path).write_bytes(content)


@pytest.mark.parametrize("command", ["fsck", "inspect", "explain"])
def test_what_cannot_be_looked_at_is_one_line_that_names_the_store(path, capsys, command):
    with closing(FileStore(path)):
        assert_one_line(run(capsys, command, path), path, "is open in process")
    log = log_in(path)
    content = log.read_bytes()
    flip(path, content.index(TOPIC.encode()[-6:]) - APPEND_SIZE)
    before = tree(path)
    assert_one_line(run(capsys, command, path), log, "expected")
    assert tree(path) == before
    log.unlink()
    assert_one_line(run(capsys, command, path), path, "expected the log of a store that was made here, found none")


def test_a_directory_with_both_stores_or_neither_is_one_line(path, tmp_path, capsys):
    SqliteStore(tmp_path / "both").close()
    assert looked_at(capsys, "fsck", tmp_path / "both")["cursors"] == []
    log_in(path).rename(tmp_path / "both" / log_in(path).name)
    (path / "MADE").unlink()
    (tmp_path / "file").write_text("")
    before = tree(tmp_path)
    assert_one_line(run(capsys, "fsck", tmp_path / "both"), tmp_path / "both", "holds two stores, ackstate.sqlite3 and")
    for place, why in (
        (path, "it holds neither ackstate.sqlite3 nor a log"),
        (tmp_path / "file", "Not a directory"),
        (tmp_path / "missing", "No such file or directory"),
    ):
        assert_one_line(run(capsys, "fsck", place), f"{place} is not an ackstate store: {why}")
    assert tree(tmp_path) == before
