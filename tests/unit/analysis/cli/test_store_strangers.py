"""`ackstate fsck`, `inspect` and `explain` on a foreign store: they follow no link in it and do not fill the disk."""

from __future__ import annotations

import tempfile
from contextlib import closing

import pytest

from ackstate import SqliteStore
from command_line import assert_one_line, run
from sample_store import fill
from store_directories import contents_of

COMMANDS = ("fsck", "inspect", "explain")


@pytest.fixture
def store(tmp_path):
    with closing(SqliteStore(tmp_path / "parent" / "store")) as opened:
        fill(opened)
    return tmp_path / "parent" / "store"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where copies go."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.mark.parametrize("name", ["MADE", "LOCK", *(f"ackstate.sqlite3{end}" for end in ("", "-wal", "-shm"))])
def test_a_link_in_the_place_of_a_file_is_one_line_with_its_path(store, name, temporary, capsys):
    (store / name).unlink(missing_ok=True)
    (store.parent / "file").write_bytes(b"mine")
    (store / name).symlink_to(store.parent / "file")
    before = contents_of(store)
    for command in COMMANDS:
        assert_one_line(run(capsys, command, store), f"{store / name} must be a plain file, got a symbolic link;")
    assert contents_of(store) == before
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_store_above_copy_bytes_max_is_refused_in_one_line(store, temporary, capsys, command):
    refused = run(capsys, command, store, "--copy-bytes-max", 1_000)
    assert_one_line(refused, f"{store}: copy_bytes_max (--copy-bytes-max) must be at least", "got 1000")
    assert not list(temporary.iterdir())
    size = sum(path.stat().st_size for path in store.iterdir())
    assert run(capsys, command, store, "--copy-bytes-max", size).status == 0
    assert_one_line(run(capsys, command, store, "--copy-bytes-max", 0), "got 0")
    assert run(capsys, command, store, "--copy-bytes-max", -1).status == 2


@pytest.mark.parametrize("name", ["ackstate.sqlite3", "ackstate.sqlite3-wal"])
def test_a_sparse_file_of_50_gb_is_refused_in_one_line(store, name, temporary, capsys):
    with (store / name).open("ab") as file:
        file.truncate(50 << 30)
    for command in COMMANDS:
        assert_one_line(run(capsys, command, store), f"{store}: copy_bytes_max", f"got {4 << 30}")
    assert not list(temporary.iterdir())
