"""`ackstate fsck`, `inspect` and `explain` on a foreign store: no file in it keeps them waiting or fills the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from contextlib import closing

import pytest

from ackstate.cursor import FileStore, SqliteStore
from ackstate.stores import file_copy
from command_line import CommandOutcome, assert_one_line, run, run_apart
from sample_store import fill
from tests.unit.cursor.test_no_plain_file import STRANGERS, let_go, stale_names

COMMANDS = ("fsck", "inspect", "explain")
WAITING = [
    each for each in STRANGERS if each in {"a named pipe", "a socket", "a device", "a symbolic link to a device"}
]
KINDS = {"FileStore": FileStore, "SqliteStore": SqliteStore}
READ = {
    "FileStore": ("MADE", "LOCK", "log-0000000000000001", "log-0000000000000002"),
    "SqliteStore": ("MADE", "LOCK", *(f"ackstate.sqlite3{suffix}" for suffix in ("", "-wal", "-shm", "-journal"))),
}
LARGE = 50 << 30


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A directory with a filled store of each kind."""
    directory = tmp_path_factory.mktemp("filled")
    for name, kind in KINDS.items():
        with closing(kind(directory / name)) as opened:
            fill(opened)
    return directory


@pytest.fixture
def store(request, filled, tmp_path):
    """A filled store, which lies in a directory of its own so that links can lead out of it."""
    return shutil.copytree(filled / request.param, tmp_path / "parent" / "store")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where copies go."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def run_watched(capsys, command, directory, *, hangs_after_s=30):
    """Run a command in this process, and fail if it does not end."""
    outcomes: list[CommandOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run(capsys, command, directory)), daemon=True)
    thread.start()
    thread.join(hangs_after_s)
    if thread.is_alive():
        let_go(directory)
        thread.join()
        pytest.fail(f"{command} hangs")
    return outcomes[0]


def put_stranger(directory, name, stranger):
    (directory / name).unlink(missing_ok=True)
    STRANGERS[stranger](directory / name)
    return sorted((path.name, os.lstat(path).st_mode) for path in directory.iterdir())


@pytest.mark.parametrize("stranger", WAITING)
@pytest.mark.parametrize(
    ("store", "name"), [(kind, name) for kind in KINDS for name in READ[kind]], indirect=["store"]
)  # fmt: skip
def test_what_is_no_plain_file_is_one_line_with_its_path(store, name, stranger, temporary, capsys):
    before = put_stranger(store, name, stranger)
    for command in COMMANDS:
        outcome = run_watched(capsys, command, store)
        assert_one_line(outcome, f"{store / name} must be a plain file, got {stranger.split(' to ')[0]};")
    assert sorted((path.name, os.lstat(path).st_mode) for path in store.iterdir()) == before
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("stranger", WAITING)
@pytest.mark.parametrize(
    ("store", "name"),
    [(kind, name) for kind in KINDS for name in stale_names(KINDS[kind])],
    indirect=["store"],
)
def test_what_has_the_name_of_an_unfinished_file_is_neither_opened_nor_changed(store, name, stranger, capsys):
    before = put_stranger(store, name, stranger)
    for command in COMMANDS:
        assert run_watched(capsys, command, store).status == 0
    assert sorted((path.name, os.lstat(path).st_mode) for path in store.iterdir()) == before


@pytest.mark.parametrize("store", ["FileStore"], indirect=True)
def test_a_command_that_opens_a_pipe_is_seen_to_hang(store, monkeypatch, capsys):
    put_stranger(store, "log-0000000000000002", "a named pipe")
    monkeypatch.setattr(
        file_copy, "check_plain_files", lambda paths: [path.read_bytes() for path in paths if path.is_fifo()]
    )
    with pytest.raises(pytest.fail.Exception, match="fsck hangs"):
        run_watched(capsys, "fsck", store, hangs_after_s=0.5)


@pytest.mark.parametrize("store", ["SqliteStore"], indirect=True)
def test_a_process_of_its_own_does_not_wait_for_a_pipe_either(store):
    put_stranger(store, "ackstate.sqlite3-wal", "a named pipe")
    assert_one_line(run_apart("fsck", store), f"{store / 'ackstate.sqlite3-wal'} must be a plain file")


def bytes_copied(store):
    """How many bytes the files that a command copies have together."""
    return sum(path.stat().st_size for path in store.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_a_store_above_copy_bytes_max_is_refused_in_one_line(store, temporary, capsys, command):
    refused = run(capsys, command, store, "--copy-bytes-max", 1_000)
    assert_one_line(refused, f"{store}: copy_bytes_max (--copy-bytes-max) must be at least", "got 1000")
    assert not list(temporary.iterdir())
    assert run(capsys, command, store, "--copy-bytes-max", bytes_copied(store)).status == 0
    assert_one_line(run(capsys, command, store, "--copy-bytes-max", 0), "got 0")
    assert run(capsys, command, store, "--copy-bytes-max", -1).status == 2


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("store", "name"),
    [
        ("FileStore", "log-0000000000000001"),
        ("FileStore", "log-0000000000000002"),
        ("SqliteStore", "ackstate.sqlite3"),
        ("SqliteStore", "ackstate.sqlite3-wal"),
    ],
    indirect=["store"],
)
def test_a_sparse_file_of_50_gb_is_refused_in_one_line(store, name, temporary, capsys, command):
    with (store / name).open("ab") as file:
        file.truncate(LARGE)
    assert_one_line(run_watched(capsys, command, store), f"{store}: copy_bytes_max", f"got {4 << 30}")
    assert not list(temporary.iterdir())
