"""Does each exhibit still make its mistake, also when the code has moved that it replaces?

A tiny story of each mistake of a store goes well, goes wrong while it is planted, and well. The others have a story of
the broker's model (tests/model/analysis/crash/test_schedule_stories.py).
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from ackstate.errors import CorruptStateError
from ackstate.stores import sqlite_database
from ackstate.stores.base import ABSENT, StoreError
from ackstate.stores.sqlite import SqliteStore
from museum.exhibits import EXHIBITS


def a_store_in_sqlite_that_is_opened():
    """SQLite syncs all, number 2 of `PRAGMA synchronous`, at the checkpoint and afterwards."""
    found = []

    class Watched(sqlite3.Connection):
        def execute(self, statement, *more):
            if statement.startswith("PRAGMA wal_checkpoint"):
                found.extend(super().execute("PRAGMA synchronous").fetchone())
            return super().execute(statement, *more)

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as watched:
        watched.setattr(sqlite_database.sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
        with closing(SqliteStore(directory)) as store:
            found.extend(store._database._connection.execute("PRAGMA synchronous").fetchone())
    return found == [2, 2]


def names_of_a_new_store_in_sqlite():
    """All of them are synced: those in the directory, and its own."""
    synced, sync = set(), os.fsync

    def note(descriptor):
        synced.add(Path(f"/proc/self/fd/{descriptor}").resolve())
        sync(descriptor)

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as watched:
        watched.setattr(os, "fsync", note)
        place = Path(directory, "store").resolve()
        SqliteStore(place).close()
    return {place, place.parent} <= synced


@contextmanager
def sqlite_store_with_a_value():
    with tempfile.TemporaryDirectory() as directory:
        with closing(SqliteStore(directory)) as store:
            store.metadata.put("/a", b"value", expected_version=ABSENT)
        yield Path(directory)


def a_flipped_bit_in_a_row_of_sqlite():
    with sqlite_store_with_a_value() as directory:
        database = directory / sqlite_database.DATABASE
        database.write_bytes(database.read_bytes().replace(b"value", b"valuf"))
        with closing(SqliteStore(directory)) as store:
            try:
                store.metadata.get("/a")
            except CorruptStateError:
                return True
    return False


def a_database_of_no_bytes():
    with sqlite_store_with_a_value() as directory:
        (directory / sqlite_database.DATABASE).write_bytes(b"")
        try:
            SqliteStore(directory).close()
        except CorruptStateError:
            return True
    return False


class CommitsNot:
    """A connection to SQLite whose commits fail."""

    def __init__(self, connection):
        self.connection = connection

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def execute(self, statement, *more):
        if statement == "COMMIT":
            self.connection.execute("ROLLBACK")
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return self.connection.execute(statement, *more)


def a_commit_that_fails():
    with sqlite_store_with_a_value() as directory, closing(SqliteStore(directory)) as store:
        store._database._connection = CommitsNot(store._database._connection)
        try:
            store.metadata.put("/b", b"", expected_version=ABSENT)
        except StoreError:
            return True
    return False


STORIES = {
    "M1-sqlite": a_store_in_sqlite_that_is_opened,
    "M2-sqlite": names_of_a_new_store_in_sqlite,
    "M3-sqlite": a_flipped_bit_in_a_row_of_sqlite,
    "M4-sqlite": a_database_of_no_bytes,
    "M11-sqlite": a_commit_that_fails,
    "M14-sqlite": a_store_in_sqlite_that_is_opened,
}


@pytest.mark.parametrize("name", STORIES)
def test_an_exhibit_of_a_store_differs_from_the_product_and_leaves_nothing_behind(name):
    story, (exhibit,) = STORIES[name], [each for each in EXHIBITS if each.name == name]
    places = [(each.owner, each.name) for each in exhibit.replacements()]
    before = [vars(owner)[name] for owner, name in places]
    assert story(), "the story goes wrong without the exhibit"
    with exhibit.plant():
        assert not story(), "the exhibit does not make its mistake any more"
    assert [vars(owner)[name] for owner, name in places] == before
    assert story()


def test_the_museum_has_every_bug_once():
    names = [exhibit.name for exhibit in EXHIBITS]
    assert [name.removesuffix("-sqlite") for name in names] == [f"M{number}" for number in range(1, 17)]
    assert {name for name in names if "-" in name} == STORIES.keys()
