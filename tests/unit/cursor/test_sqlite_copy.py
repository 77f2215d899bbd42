"""`SqliteStore.open_copy`: a look at a store, or its backup, that changes no byte of it, whoever has it open."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest

from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.stores import sqlite
from ackstate.stores.base import StoreError, StoreFullError, StoreLockedError
from ackstate.stores.sqlite import SqliteStore
from store_directories import assert_works, contents_of, hold, names_in, start
from tests.unit.cursor.test_sqlite import DATABASE, LOG, UNFINISHED, WHOLE, damaged, overwrite, pages_of

__all__ = ["damaged"]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where copies lie."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.mark.parametrize("state", ["closed", "open"])
def test_a_copy_shows_the_store_and_changes_nothing_in_it(damaged, temporary, state):
    directory = damaged(state)
    (directory / "LOCK").unlink()
    assert (LOG in names_in(directory)) == (state == "open")
    before = contents_of(directory)
    modes = {path: path.stat().st_mode for path in (directory, *directory.iterdir())}
    for path in modes:
        path.chmod(0o555)
    try:
        with closing(SqliteStore.open_copy(directory)) as copy:
            assert copy.ledgers.owned_by("owner-0") == [1]
            assert copy.ledgers.last(1) == 20
            # Anything written to the copy goes with it.
            copy.ledgers.append(copy.ledgers.create("tried"), [b"tried"])
        copy.close()
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert contents_of(directory) == before
    assert not list(temporary.iterdir())
    with closing(SqliteStore(directory)) as store:
        assert store.ledgers.last(1) == 20
        assert store.metadata.children("/") == ["values"]


def test_a_store_cannot_be_opened_but_copied_while_it_is_copied(damaged, monkeypatch):
    directory = damaged()
    (directory / "LOCK").unlink()
    copy_files, inside = sqlite._copy_files, []

    def open_and_copy(*args):
        if not inside:
            inside.append(True)
            with pytest.raises(StoreLockedError, match="is being copied"):
                SqliteStore(directory)
            assert names_in(directory) == ["MADE", DATABASE]
            SqliteStore.open_copy(directory).close()
        return copy_files(*args)

    monkeypatch.setattr(sqlite, "_copy_files", open_and_copy)
    with closing(SqliteStore.open_copy(directory)):
        assert inside == [True]
        # The copy is one's own: the store is free again.
        assert_works(directory)


@pytest.mark.parametrize("content", [None, {}, {"notes.txt": b"mine"}, {"LOCK": b"", UNFINISHED: b"x"}])
def test_what_is_no_store_is_not_copied_and_left_alone(tmp_path, content):
    directory = tmp_path / "store"
    if content is not None:
        directory.mkdir()
        for name, data in content.items():
            (directory / name).write_bytes(data)
    with pytest.raises(StoreError, match=f"{directory} is not an ackstate store"):
        SqliteStore.open_copy(directory)
    assert (contents_of(directory) if directory.exists() else None) == content


def test_damage_met_in_copying_is_ours_and_leaves_no_copy(damaged, temporary):
    directory = damaged()
    content = (directory / DATABASE).read_bytes()
    page = pages_of(directory)["entries"][-1]
    for offset, data, error in (
        (0, b"no database", CorruptStateError),
        (60, (7).to_bytes(4, "big"), UnsupportedVersionError),
        ((page - 1) * 4096 + 1, b"\xff" * 16, CorruptStateError),
    ):
        (directory / DATABASE).write_bytes(content)
        overwrite(directory / DATABASE, offset, data)
        before = contents_of(directory)
        with pytest.raises(error, match=directory.name):
            SqliteStore.open_copy(directory)
        assert contents_of(directory) == before
        assert not list(temporary.iterdir())


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, StoreFullError), (errno.EACCES, StoreError)])
def test_a_copy_that_cannot_be_made_is_refused_and_removed(damaged, temporary, monkeypatch, number, error):
    def fail(path):
        path.write_bytes(b"a part")
        raise OSError(number, os.strerror(number), str(path))

    directory = damaged("open")
    before = contents_of(directory)
    monkeypatch.setattr(sqlite, "_created", fail)
    for to in (None, directory.parent / "backup"):
        with pytest.raises(StoreError, match=str(directory)) as caught:
            SqliteStore.open_copy(directory, to=to)
        assert type(caught.value) is error
    assert not list(temporary.iterdir())
    assert not (directory.parent / "backup").exists()
    assert contents_of(directory) == before


def test_a_store_with_more_bytes_than_the_limit_is_not_copied(damaged, temporary):
    directory = damaged("open")
    size = sum((directory / name).stat().st_size for name in (DATABASE, LOG))
    with pytest.raises(StoreError, match=rf"copy_bytes_max .* at least the {size} bytes .* got {size - 1}"):
        SqliteStore.open_copy(directory, copy_bytes_max=size - 1)
    SqliteStore.open_copy(directory, copy_bytes_max=size).close()
    for name in (DATABASE, LOG):
        with (directory / name).open("ab") as file:
            file.truncate(50 << 30)
        with pytest.raises(StoreError, match="copy_bytes_max"):
            SqliteStore.open_copy(directory)
    assert not list(temporary.iterdir())


COPIER = """
import sys
from ackstate import SqliteStore
copy = SqliteStore.open_copy(sys.argv[1])
print(copy._path, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_copy_is_removed_when_its_process_ends(damaged, temporary, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(temporary))
    with start(COPIER, damaged()) as copier:
        assert len(names_in(temporary)) == 1
        copier.stdin.close()
        assert copier.wait() == 0
    assert names_in(temporary) == []


# Of a store in use

COUNTER = """
import sys
from ackstate import SqliteStore
from ackstate.stores.base import ABSENT

def count_up(store, is_over=lambda: False):
    ledger_id, version, number = store.ledgers.create("billing"), ABSENT, 0
    while not is_over():
        store.ledgers.append(ledger_id, [b"%d" % number + bytes(3_000)])
        version = store.metadata.put("/count", b"%d" % number, expected_version=version)
        print(number, flush=True)
        number += 1

if __name__ == "__main__":
    count_up(SqliteStore(sys.argv[1]))
"""


def check_copy(directory, durable):
    """A copy has what was durable before it was made, and of later changes the first ones."""
    with closing(SqliteStore.open_copy(directory)) as copy:
        (ledger_id,) = copy.ledgers.owned_by("billing")
        count = copy.ledgers.last(ledger_id) + 1
        assert count > durable
        entries = copy.ledgers.read(ledger_id, 0, count)
        assert [int(entry.rstrip(b"\0")) for entry in entries] == list(range(count))
        value = copy.metadata.get("/count")
        assert value is None or int(value.data) in {count - 1, count - 2}


FOREIGN_READER = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('SELECT * FROM ledgers')"


@pytest.mark.slow
def test_a_copy_of_a_store_that_this_process_has_open_leaves_it_locked_and_in_use(tmp_path):
    counter, is_over = {}, threading.Event()
    exec(COUNTER, counter)
    with closing(SqliteStore(tmp_path)) as store:
        writer = threading.Thread(target=counter["count_up"], args=(store, is_over.is_set))
        writer.start()
        while not store.ledgers.owners() or store.ledgers.last(1) < 0:
            pass
        for _ in range(5):
            check_copy(tmp_path, store.ledgers.last(1))
        is_over.set()
        writer.join()
        # To close a descriptor of the database would have released SQLite's own locks.
        reader = [sys.executable, "-c", FOREIGN_READER, str(tmp_path / DATABASE)]
        assert "database is locked" in subprocess.run(reader, capture_output=True, text=True, check=False).stderr
        with pytest.raises(StoreLockedError):
            SqliteStore(tmp_path)


@pytest.mark.slow
def test_a_copy_of_a_store_that_another_process_writes_has_all_that_was_durable(tmp_path):
    """It writes some 4 MB meanwhile, so that its log is copied to the database and begun anew."""
    with start(COUNTER, tmp_path) as counter:
        printed = [0]
        reader = threading.Thread(target=lambda: printed.extend(int(line) for line in counter.stdout), daemon=True)
        reader.start()
        while printed[-1] < 800:
            check_copy(tmp_path, printed[-1])
        counter.kill()
        reader.join()


@pytest.mark.slow
def test_a_copy_is_made_again_where_the_log_was_begun_anew_meanwhile(tmp_path, monkeypatch):
    """Without that, pages of the database would be of one time and the log of another."""
    copy_files, copies = sqlite._copy_files, []

    def copy_and_begin_anew(directory, *args):
        copy_files(directory, *args)
        if len(copies) < tries:
            with (directory / LOG).open("r+b") as log:
                log.write(b"another header %d" % len(copies))
        copies.append(True)

    monkeypatch.setattr(sqlite, "_copy_files", copy_and_begin_anew)
    with hold(tmp_path / "store") as holder:
        (tmp_path / "store" / LOG).write_bytes(bytes(32))
        tries = 3
        SqliteStore.open_copy(tmp_path / "store").close()
        assert len(copies) == 4
        tries = 1_000
        with pytest.raises(StoreError, match="written too fast"):
            SqliteStore.open_copy(tmp_path / "store")
        holder.kill()


def test_a_backup_stays_and_is_a_store(damaged, temporary):
    directory, backup = damaged("open"), damaged("open").parent / "backups" / "one"
    with closing(SqliteStore.open_copy(directory, to=backup)) as copy:
        assert copy.ledgers.last(1) == 20
    assert names_in(backup) == WHOLE
    assert not list(temporary.iterdir())
    before = contents_of(backup)
    with pytest.raises(StoreError, match=f"{backup} must be an empty directory"):
        SqliteStore.open_copy(directory, to=backup)
    assert contents_of(backup) == before
    with closing(SqliteStore(backup)) as store:
        assert store.ledgers.owned_by("owner-1") == [2, 4]


def test_a_backup_of_which_a_part_is_missing_is_no_store(damaged, monkeypatch):
    def die(_self, _target):
        raise KeyboardInterrupt

    directory = damaged("open")
    monkeypatch.setattr(Path, "rename", die)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        SqliteStore.open_copy(directory, to=directory.parent / "backup")
    monkeypatch.undo()
    with pytest.raises(StoreError, match="is not an ackstate store"):
        SqliteStore(directory.parent / "backup")
