"""An SQLite store and bytes that the disk does not have, or that cannot be read."""

import os
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from ackstate.errors import CorruptStateError
from ackstate.stores import sqlite_database
from ackstate.stores.base import StoreError
from ackstate.stores.sqlite import SqliteStore


def die_after_appending(directory, entries):
    """Let a process append and die, which leaves its log."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            store = SqliteStore(directory)
            ledger_id = store.ledgers.create("orders")
            for entry in entries:
                store.ledgers.append(ledger_id, [entry])
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def entries_once_the_log_is_dropped_from_the_cache(directory, monkeypatch):
    """Open a store whose log is 40 bytes shorter on the disk than in the cache; return its entries."""
    log = directory / f"{sqlite_database.DATABASE}-wal"

    def advised(descriptor, offset, size, advice):
        if advice == os.POSIX_FADV_DONTNEED:
            assert Path(f"/proc/self/fd/{descriptor}").readlink().name == log.name
            assert (offset, size) == (0, 0)
            os.truncate(log, log.stat().st_size - 40)

    monkeypatch.setattr(os, "posix_fadvise", advised)
    with closing(SqliteStore(directory)) as store:
        return store.ledgers.read(1, 0, store.ledgers.last(1) + 1)


def test_opening_takes_what_the_disk_has_of_the_log_and_not_what_the_cache_has(tmp_path, monkeypatch):
    die_after_appending(tmp_path, [b"kept", b"lost by a failed sync"])
    assert entries_once_the_log_is_dropped_from_the_cache(tmp_path, monkeypatch) == [b"kept"]


def test_an_opening_that_takes_what_the_cache_has_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_database, "_settle", lambda _log: None)
    die_after_appending(tmp_path, [b"kept", b"lost by a failed sync"])
    found = entries_once_the_log_is_dropped_from_the_cache(tmp_path, monkeypatch)
    assert found == [b"kept", b"lost by a failed sync"]


class Says:
    """A connection whose checks say one thing."""

    def __init__(self, found):
        self.found = found

    def execute(self, _check):
        return self

    def fetchone(self):
        return (self.found,)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (sqlite3.SQLITE_IOERR_CORRUPTFS, StoreError),  # EIO
        (sqlite3.SQLITE_IOERR_READ, StoreError),
        (sqlite3.SQLITE_CORRUPT, CorruptStateError),
    ],
)
def test_a_page_that_cannot_be_read_is_no_damage(code, error):
    with pytest.raises(error, match="error code"):
        sqlite_database._check_pages(Path("x"), Says(f"Tree 3 page 3: unable to get the page. error code={code}"))


def changed(store, old, new):
    """Change bytes of a closed store's database, which holds them once."""
    database = store / sqlite_database.DATABASE
    data = database.read_bytes()
    assert data.count(old) == 1
    database.write_bytes(data.replace(old, new))


def test_a_complaint_that_quotes_damaged_bytes_is_damage(tmp_path):
    """SQLite says which table it cannot make sense of, and Python cannot read the name."""
    SqliteStore(tmp_path).close()
    changed(tmp_path, b"tableidentityidentity", b"tableiden\xf4ityidentity")
    with pytest.raises(CorruptStateError, match="sound pages"):
        SqliteStore(tmp_path)


def test_a_ledger_is_deleted_without_a_row_of_another_that_a_damaged_index_names(tmp_path):
    with closing(SqliteStore(tmp_path)) as store:
        one, other = [store.ledgers.create("owner") for _ in range(6)][-2:]
        for ledger_id in (one, other):
            for number in range(4):
                store.ledgers.append(ledger_id, [b"entry %d" % number])
    # An entry of the index: four bytes of header, ledger id, entry id, row id.
    changed(tmp_path, bytes([4, 1, 1, 1, one, 2, 3]), bytes([4, 1, 1, 1, one, 2, 7]))
    with closing(SqliteStore(tmp_path, check_pages=False)) as store:
        store.ledgers.delete(one)
        assert store.ledgers.read(other, 0, 4) == [b"entry %d" % number for number in range(4)]


def test_a_damaged_index_is_refused_before_anything_is_written_beside_it(tmp_path):
    """An entry appended there was synced, and could not be read once the ledger of the damaged key was deleted."""
    with closing(SqliteStore(tmp_path)) as store:
        one, other = store.ledgers.create("owner"), store.ledgers.create("owner")
        for number in (0, 1):
            for ledger_id in (one, other):
                store.ledgers.append(ledger_id, [b"entry %d" % number])
    changed(tmp_path, bytes([4, 1, 9, 1, other, 4]), bytes([4 ^ 8, 1, 9, 1, other, 4]))
    shutil.copytree(tmp_path, tmp_path / "as it was")
    with closing(SqliteStore(tmp_path, check_pages=False)) as store:
        following = store.ledgers.create("owner")
        store.ledgers.append(following, [b"entry"])
        store.ledgers.delete(other)
        with pytest.raises(CorruptStateError, match="malformed"):
            store.ledgers.read(following, 0, 1)
    with pytest.raises(CorruptStateError, match=r"sound pages.*sqlite_autoindex_entries_1"):
        SqliteStore(tmp_path / "as it was")
