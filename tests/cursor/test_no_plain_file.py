"""What is no file in the place of a store's file is refused at once, by its name, and left as it is."""

import os
import socket
import stat
import threading
from contextlib import closing, suppress

import pytest

from cursor.store import ABSENT, StoreError
from cursor.stores import sqlite_database
from cursor.stores.file import FileStore
from cursor.stores.sqlite import SqliteStore

OPENINGS = {each.__qualname__: each for each in (FileStore, FileStore.open_copy, SqliteStore, SqliteStore.open_copy)}
FILES = {"FileStore": ["log-0000000000000001", "MADE", "LOCK"]}
FILES["SqliteStore"] = [f"ackstate.sqlite3{suffix}" for suffix in ("", "-wal", "-journal")] + ["MADE", "LOCK"]


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as listening:
        # Its path may be too long for a socket's name.
        here = os.open(path.parent, os.O_RDONLY)
        try:
            listening.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def a_link_to_a_device(path):
    path.symlink_to("/dev/zero")


def a_link_to_a_pipe(path):
    pipe = path.parent.parent / "pipe"
    os.mkfifo(pipe)
    path.symlink_to(pipe)


STRANGERS = {
    "a named pipe": os.mkfifo,
    "a socket": a_socket,
    "a directory": os.mkdir,
    "a device": a_link_to_a_device,
    "a named pipe at the end of a link": a_link_to_a_pipe,
}


def outcome_of(opening, directory, *, hangs_after_s=10):
    """What an opening raises, or a hang."""
    raised = []

    def try_it():
        try:
            opening(directory).close()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(hangs_after_s)
    if thread.is_alive():
        let_go(directory)
        thread.join()
        pytest.fail(f"{opening.__qualname__} hangs")
    return raised


def let_go(directory):
    """Open the other end of every pipe, so that a thread that waits for it ends."""
    for path in directory.iterdir():
        with suppress(OSError):
            if stat.S_ISFIFO(path.stat().st_mode):
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize(("opening", "name"), [(each, name) for each in OPENINGS for name in FILES[each.split(".")[0]]])
def test_no_file_in_the_place_of_a_file_is_refused_by_name(tmp_path, opening, name, stranger):
    directory = tmp_path / "store"
    with closing({"F": FileStore, "S": SqliteStore}[opening[0]](directory)) as store:
        store.metadata.put("/one", b"1", expected_version=ABSENT)
    (directory / name).unlink(missing_ok=True)
    STRANGERS[stranger](directory / name)
    before = sorted((path.name, os.lstat(path).st_mode) for path in directory.iterdir())
    (error,) = outcome_of(OPENINGS[opening], directory)
    assert isinstance(error, StoreError)
    assert f"{directory / name}: {stranger.split(' at ')[0]} stands where a store has a file" in str(error)
    assert sorted((path.name, os.lstat(path).st_mode) for path in directory.iterdir()) == before


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
@pytest.mark.parametrize("opening", [SqliteStore, SqliteStore.open_copy], ids=lambda each: each.__qualname__)
def test_a_pipe_beside_the_database_that_a_link_leads_to_is_refused(tmp_path, opening, suffix):
    directory, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    SqliteStore(directory).close()
    elsewhere.mkdir()
    (directory / "ackstate.sqlite3").rename(elsewhere / "data")
    (directory / "ackstate.sqlite3").symlink_to(elsewhere / "data")
    SqliteStore(directory).close()
    os.mkfifo(elsewhere / f"data{suffix}")
    (error,) = outcome_of(opening, directory)
    assert isinstance(error, StoreError)
    assert f"data{suffix}: a named pipe stands" in str(error)


def test_an_opening_that_does_not_look_first_is_seen_to_hang(tmp_path, monkeypatch):
    SqliteStore(tmp_path).close()
    (tmp_path / "ackstate.sqlite3").unlink()
    os.mkfifo(tmp_path / "ackstate.sqlite3")
    monkeypatch.setattr(sqlite_database, "check_plain_files", lambda paths: None)
    with pytest.raises(pytest.fail.Exception, match="SqliteStore hangs"):
        outcome_of(SqliteStore, tmp_path, hangs_after_s=0.1)
