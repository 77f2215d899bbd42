"""`FileStore.open_copy`: a look at a store that changes no byte of it."""

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import tracemalloc
from contextlib import closing
from pathlib import Path

import google_crc32c
import pytest

from ackstate.cursor import FileStore, SqliteStore
from ackstate.cursor.store import ABSENT, StoreError, StoreFullError, StoreLockedError
from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.stores import file_generation, temporary_copy
from fake_directory import LOG, end_of, history_of_calls, state_of
from store_directories import assert_works, hold, start


@pytest.fixture
def directory(tmp_path):
    """A store that was closed, with something of everything in it."""
    with closing(FileStore(tmp_path / "store")):
        pass
    for name, content in history_of_calls()[-1][0].items():
        (tmp_path / "store" / name).write_bytes(content)
    return tmp_path / "store"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where copies lie."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def snapshot(directory):
    """Everything in a directory that a look could change, but for the times of reading."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in directory.iterdir()}


def mark(version):
    """A mark as a later release would make it."""
    head = b"ACKM" + version.to_bytes(4, "little")
    return head + google_crc32c.value(head).to_bytes(4, "little")


STATES = ["closed", "torn", "unmarked", "unfinished"]


def leave(directory, state):
    """Put a store in a state, and return its contents there."""
    if state == "torn":
        content = (directory / LOG).read_bytes()
        (directory / LOG).write_bytes(content[: end_of(content) - 7])
        return history_of_calls()[-2][1]
    if state == "unmarked":
        (directory / file_generation.MADE).rename(directory / "MADE.new")
    elif state == "unfinished":
        (directory / f"{file_generation.log_name(2)}.new").write_bytes(b"unfinished")
    return history_of_calls()[-1][1]


def check_look(directory, state):
    """A copy shows the store, and changes nothing in it while it is open and in use, nor afterwards."""
    held = leave(directory, state)
    before = snapshot(directory)
    with closing(FileStore.open_copy(directory)) as copy:
        assert state_of(copy) == held
        assert (copy.discarded is not None) == (state == "torn")
        assert snapshot(directory) == before, "opening the copy changed the store"
        # Anything written to the copy goes with it.
        copy.ledgers.append(copy.ledgers.create("tried"), b"tried")
        copy.metadata.put("/tried", b"", expected_version=ABSENT)
        assert snapshot(directory) == before, "writing to the copy changed the store"
    copy.close()
    assert snapshot(directory) == before
    with closing(FileStore(directory)) as store:
        assert state_of(store) == held


@pytest.mark.parametrize("state", STATES)
def test_a_copy_shows_the_store_and_changes_nothing_in_it(directory, temporary, state):
    check_look(directory, state)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("state", STATES)
def test_the_check_catches_a_look_at_the_store_itself(directory, monkeypatch, state):
    monkeypatch.setattr(FileStore, "open_copy", FileStore)
    with pytest.raises(AssertionError, match="changed the store"):
        check_look(directory, state)


def test_hard_links_in_the_place_of_copies_are_not_written_to(directory, monkeypatch):
    monkeypatch.setattr(temporary_copy, "copy_file", os.link)
    with pytest.raises(StoreError, match="must be a file with one name, got one with 2"):
        check_look(directory, "closed")


def test_a_copy_is_made_of_a_store_without_a_lock_file_or_that_may_not_be_written(directory):
    (directory / "LOCK").unlink()
    before = snapshot(directory)
    directory.chmod(0o555)
    for path in directory.iterdir():
        path.chmod(0o444)
    try:
        with closing(FileStore.open_copy(directory)) as copy:
            assert state_of(copy) == history_of_calls()[-1][1]
            copy.ledgers.create("tried")
    finally:
        directory.chmod(0o755)
    assert snapshot(directory) == before


@pytest.mark.slow
def test_an_open_store_is_not_copied(tmp_path):
    with hold(tmp_path, FileStore) as holder:
        with pytest.raises(StoreLockedError, match=f"{tmp_path} is open in process {holder.pid}"):
            FileStore.open_copy(tmp_path)
        holder.kill()
    before = snapshot(tmp_path)
    FileStore.open_copy(tmp_path).close()
    assert snapshot(tmp_path) == before
    with closing(FileStore(tmp_path)) as store:
        with pytest.raises(StoreLockedError, match=f"{tmp_path} is open in process {os.getpid()}"):
            FileStore.open_copy(tmp_path)
        store.ledgers.create("goes on")


def before_the_first_copy(monkeypatch, do):
    """Do something in between, once."""
    copyfile, done = temporary_copy.copy_file, []

    def do_and_copy(*paths):
        if not done:
            done.append(True)
            do()
        return copyfile(*paths)

    monkeypatch.setattr(temporary_copy, "copy_file", do_and_copy)
    return done


def test_a_store_cannot_be_opened_but_copied_while_it_is_copied(directory, monkeypatch):
    def open_and_copy():
        with pytest.raises(StoreLockedError, match=str(directory)):
            FileStore(directory)
        FileStore.open_copy(directory).close()

    done = before_the_first_copy(monkeypatch, open_and_copy)
    with closing(FileStore.open_copy(directory)):
        assert done
        # The copy is one's own: the store is free again.
        assert_works(directory, FileStore)


def test_nor_can_a_store_without_a_lock_file(directory, monkeypatch):
    def open_it():
        with pytest.raises(StoreLockedError, match="is being copied"):
            FileStore(directory)
        assert not (directory / "LOCK").exists()  # It came no further than the directory.

    (directory / "LOCK").unlink()
    done = before_the_first_copy(monkeypatch, open_it)
    FileStore.open_copy(directory).close()
    assert done
    assert_works(directory, FileStore)


@pytest.mark.parametrize("content", [None, {}, {"notes.txt": b"mine"}, {"LOCK": b"", f"{LOG}.new": b"x"}])
def test_what_is_no_store_is_not_copied_and_left_alone(tmp_path, temporary, content):
    directory = tmp_path / "store"
    if content is not None:
        directory.mkdir()
        for name, data in content.items():
            (directory / name).write_bytes(data)
    with pytest.raises(StoreError, match=f"{directory} is not an ackstate store"):
        FileStore.open_copy(directory)
    assert directory.exists() == (content is not None)
    assert content is None or {path.name: path.read_bytes() for path in directory.iterdir()} == content
    assert not list(temporary.iterdir())


def test_a_store_of_the_other_kind_and_a_file_are_no_store(tmp_path):
    SqliteStore(tmp_path / "store").close()
    (tmp_path / "file").write_bytes(b"mine")
    for name in ("store", "file"):
        with pytest.raises(StoreError, match=f"{tmp_path / name} is not an ackstate store"):
            FileStore.open_copy(tmp_path / name)


def test_damage_met_in_copying_names_the_store_and_leaves_no_copy(directory, temporary):
    log = (directory / LOG).read_bytes()
    newer = mark(version=9)
    for name, content, error in (
        (LOG, log[:90] + b"\xff" + log[91:], CorruptStateError),
        (LOG, b"", CorruptStateError),
        (LOG, None, CorruptStateError),
        (file_generation.MADE, b"other", CorruptStateError),
        (file_generation.MADE, newer, UnsupportedVersionError),
    ):
        kept = (directory / name).read_bytes()
        (directory / name).unlink()
        if content is not None:
            (directory / name).write_bytes(content)
        before = snapshot(directory)
        with pytest.raises(error, match=str(directory)) as caught:
            FileStore.open_copy(directory)
        assert str(temporary) not in str(caught.value)
        assert snapshot(directory) == before
        assert not list(temporary.iterdir())
        (directory / name).write_bytes(kept)


def test_an_entry_damaged_in_an_open_copy_names_the_store(directory):
    with closing(FileStore.open_copy(directory)) as copy:
        (log,) = Path(copy._copy.name).glob("log-*")
        content = log.read_bytes()
        at = content.index(b"first entry")
        log.write_bytes(content[:at] + b"F" + content[at + 1 :])
        with pytest.raises(CorruptStateError) as caught:
            copy.ledgers.read(1, 0, 1)
        assert (caught.value.what, caught.value.offset) == (str(directory / LOG), at)


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, StoreFullError), (errno.EACCES, StoreError)])
def test_a_copy_that_cannot_be_made_is_refused_and_removed(directory, temporary, monkeypatch, number, error):
    def fail(_, copy):
        Path(copy).write_bytes(b"a part")
        raise OSError(number, os.strerror(number), str(copy))

    before = snapshot(directory)
    monkeypatch.setattr(temporary_copy, "copy_file", fail)
    with pytest.raises(StoreError, match=str(directory)) as caught:
        FileStore.open_copy(directory)
    assert type(caught.value) is error
    assert not list(temporary.iterdir())
    assert snapshot(directory) == before
    monkeypatch.undo()
    assert_works(directory, FileStore)


KINDS = (FileStore, SqliteStore)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_with_more_bytes_than_the_limit_is_not_copied(tmp_path, temporary, kind):
    with closing(kind(tmp_path / "store")) as store:
        store.metadata.put("/one", bytes(10_000), expected_version=ABSENT)
    size = sum(path.stat().st_size for path in (tmp_path / "store").iterdir() if path.name not in {"LOCK", "MADE"})
    size += len((tmp_path / "store" / "MADE").read_bytes()) if kind is FileStore else 0
    with pytest.raises(StoreError, match=rf"copy_bytes_max .* at least the {size} bytes .* got {size - 1}"):
        kind.open_copy(tmp_path / "store", copy_bytes_max=size - 1)
    assert not list(temporary.iterdir())
    kind.open_copy(tmp_path / "store", copy_bytes_max=size).close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log", [False, True])
def test_a_sparse_file_of_50_gb_is_refused_and_copied_nowhere(tmp_path, temporary, kind, log):
    kind(tmp_path / "store").close()
    name = {FileStore: (file_generation.log_name(2), LOG), SqliteStore: ("ackstate.sqlite3-wal", "ackstate.sqlite3")}
    with (tmp_path / "store" / name[kind][not log]).open("ab") as file:
        file.truncate(50 << 30)
    with pytest.raises(StoreError, match="copy_bytes_max"):
        kind.open_copy(tmp_path / "store")
    assert not list(temporary.iterdir())


def test_zeros_behind_a_log_take_no_memory(directory):
    with (directory / LOG).open("ab") as file:
        file.truncate(256 << 20)
    tracemalloc.start()
    try:
        with closing(FileStore.open_copy(directory)) as copy:
            assert state_of(copy) == history_of_calls()[-1][1]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


LIMITED = """
import resource, sys
from ackstate.cursor import FileStore
from ackstate.cursor.store import StoreError
resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))
try:
    FileStore.open_copy(sys.argv[1], copy_bytes_max=1 << 40)
except StoreError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_log_beyond_the_memory_is_refused_in_our_words(directory):
    with (directory / LOG).open("ab") as file:
        file.write(b"x")
        file.truncate(8 << 30)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, directory], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{directory}: no memory for 85")


def test_holes_take_no_room_in_a_copy(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    with source.open("wb") as file:
        file.write(b"begin")
        file.seek(64 << 20)
        file.write(b"middle" * 300_000)
        file.truncate(200 << 20)
    temporary_copy.copy_file(source, copy)
    assert copy.stat().st_size == 200 << 20
    assert copy.stat().st_blocks * 512 < 4 << 20
    with source.open("rb") as one, copy.open("rb") as other:
        assert hashlib.file_digest(one, "sha256").digest() == hashlib.file_digest(other, "sha256").digest()


COPIER = """
import sys
from ackstate.cursor import FileStore
copy = FileStore.open_copy(sys.argv[1])
print(copy._copy.name, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_else(directory, temporary, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(temporary))
    (temporary / "ackstate-copies").mkdir()
    (temporary / "ackstate-copy-file").write_bytes(b"mine")
    (directory.parent / "elsewhere").mkdir()
    (directory.parent / "elsewhere" / "kept").write_bytes(b"mine")
    (temporary / "ackstate-copy-link").symlink_to(directory.parent / "elsewhere")
    others = sorted(path.name for path in temporary.iterdir())
    with start(COPIER, directory) as killed, start(COPIER, directory) as alive:
        assert len(list(temporary.iterdir())) == len(others) + 2
        killed.kill()
        killed.wait()
        with closing(FileStore.open_copy(directory)) as copy:
            there = {path.name for path in temporary.iterdir()} - set(others)
            assert Path(copy._copy.name).parent.name in there
            assert len(there) == 2, "of the killed one nothing is left, and the other one still works"
        alive.stdin.close()
        assert alive.wait() == 0
    assert sorted(path.name for path in temporary.iterdir()) == others
    assert (directory.parent / "elsewhere" / "kept").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_copy_of_another_user_is_left_alone(directory, temporary):
    theirs = temporary / "ackstate-copy-theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    FileStore.open_copy(directory).close()
    assert list(temporary.iterdir()) == [theirs]
