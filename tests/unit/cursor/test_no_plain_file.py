"""Whatever is no plain file in the place of a store's file is refused at once, by its name, and left as it is.

Files that a store creates are readable by their owner only.
"""

import os
import socket
import stat
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from ackstate.cursor.store import ABSENT, StoreError
from ackstate.stores import plain_files, sqlite_database
from ackstate.stores.file import FileStore
from ackstate.stores.plain_files import open_file
from ackstate.stores.sqlite import SqliteStore
from store_directories import assert_works

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


def a_link_to(name, kind):
    """A link to something beside the store's directory."""

    def link(path):
        target = path.parent.parent / name
        kind(target)
        path.symlink_to(target)

    return link


STRANGERS = {
    "a named pipe": os.mkfifo,
    "a socket": a_socket,
    "a directory": os.mkdir,
    "a symbolic link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a symbolic link to a named pipe": a_link_to("pipe", os.mkfifo),
    "a symbolic link to a file": a_link_to("file", lambda path: path.write_bytes(b"mine")),
    "a symbolic link to nothing": lambda path: path.symlink_to(path.parent.parent / "nothing"),
}
if os.geteuid() == 0:
    STRANGERS["a device"] = lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


def outcome_of(opening, directory, *, hangs_after_s=10):
    """The error of an opening, or a hang."""
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
    assert f"{directory / name} must be a plain file, got {stranger.split(' to ')[0]};" in str(error)
    assert sorted((path.name, os.lstat(path).st_mode) for path in directory.iterdir()) == before


def test_an_opening_that_does_not_look_first_is_seen_to_hang(tmp_path, monkeypatch):
    SqliteStore(tmp_path).close()
    (tmp_path / "ackstate.sqlite3").unlink()
    os.mkfifo(tmp_path / "ackstate.sqlite3")
    monkeypatch.setattr(sqlite_database, "check_files_to_write", lambda paths: None)
    monkeypatch.setattr(sqlite_database, "read_start", lambda path, size: path.read_bytes()[:size])
    with pytest.raises(pytest.fail.Exception, match="SqliteStore hangs"):
        outcome_of(SqliteStore, tmp_path, hangs_after_s=0.1)


def stale_names(kind):
    """The names under which a crash can leave something unfinished that the next opening replaces."""
    if kind is FileStore:
        return ["MADE.new", "log-0000000000000001.new"]
    return ["MADE.new", *(f"ackstate.sqlite3.new{suffix}" for suffix in ("", "-journal", "-wal", "-shm"))]


def half_made(kind, directory, name):
    """A store that a crash left before it had its mark; without a log or database too if a copy of it is stale."""
    kind(directory).close()
    (directory / "MADE").unlink()
    if name != "MADE.new":
        for path in directory.glob("log-*" if kind is FileStore else "ackstate.sqlite3*"):
            path.unlink()


LINKS = {"symbolic": os.symlink, "hard": os.link}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in (FileStore, SqliteStore) for name in stale_names(kind)]
)
def test_an_unfinished_file_is_replaced_and_what_it_links_to_is_left_alone(tmp_path, kind, name, link):
    directory, victim = tmp_path / "store", tmp_path / "victim"
    victim.write_bytes(b"keep me")
    half_made(kind, directory, name)
    LINKS[link](victim, directory / name)
    kind(directory).close()
    assert not os.path.lexists(directory / name)
    assert victim.read_bytes() == b"keep me"
    assert_works(directory, kind)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("kind", [FileStore, SqliteStore])
def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(tmp_path, kind, link):
    directory, victim = tmp_path / "store", tmp_path / "victim"
    directory.mkdir()
    victim.write_bytes(b"keep me")
    LINKS[link](victim, directory / "LOCK")
    with pytest.raises(StoreError, match=f"{directory / 'LOCK'} must be a (plain )?file"):
        kind(directory)
    assert victim.read_bytes() == b"keep me"
    assert [path.name for path in directory.iterdir()] == ["LOCK"]


@pytest.mark.parametrize(("kind", "name"), [(FileStore, "log-0000000000000001"), (SqliteStore, "ackstate.sqlite3")])
def test_a_file_with_a_second_name_is_copied_but_not_written(tmp_path, kind, name):
    directory = tmp_path / "store"
    with closing(kind(directory)) as store:
        store.metadata.put("/one", b"1", expected_version=ABSENT)
    os.link(directory / name, tmp_path / "backup")
    before = (tmp_path / "backup").read_bytes()
    with pytest.raises(StoreError, match=f"{directory / name} must be a file with one name, got one with 2"):
        kind(directory)
    with closing(kind.open_copy(directory)) as copy:
        copy.metadata.put("/two", b"2", expected_version=ABSENT)
        assert copy.metadata.children("/") == ["one", "two"]
    assert (tmp_path / "backup").read_bytes() == before


def test_a_link_that_appears_after_the_look_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep me")
    (tmp_path / "link").symlink_to(victim)
    monkeypatch.setattr(plain_files, "check_plain_files", lambda paths: None)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_file(tmp_path / "link", os.O_RDWR | os.O_TRUNC)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="got a named pipe"):
        open_file(tmp_path / "pipe", os.O_RDONLY)
    assert victim.read_bytes() == b"keep me"


@pytest.fixture(params=[0, 0o022, 0o277])
def umask(request):
    """Of this process, the last of which takes away even the owner's right to write."""
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("kind", [FileStore, SqliteStore])
def test_only_the_owner_may_read_what_a_store_creates(tmp_path, kind):
    directory = tmp_path / "store"
    with closing(kind(directory)) as store:
        version = store.metadata.put("/one", bytes(2_000_000), expected_version=ABSENT)
        store.metadata.put("/one", bytes(2_000_000), expected_version=version)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in directory.iterdir()}
        assert modes == dict.fromkeys(modes, "0o600")
        assert len(modes) > 2
    with closing(kind.open_copy(directory)) as copy:
        lies_in = Path(copy._copy.name)
        assert stat.S_IMODE(lies_in.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in lies_in.iterdir()} == {0o600}


@pytest.mark.parametrize("kind", [FileStore, SqliteStore])
def test_the_modes_of_what_is_there_are_left_alone(tmp_path, kind):
    directory = tmp_path / "store"
    kind(directory).close()
    directory.chmod(0o750)
    for path in directory.iterdir():
        path.chmod(0o640)
    assert_works(directory, kind)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o640}
