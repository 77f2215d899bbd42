"""Does each exhibit still make its mistake, also when the code has moved that it replaces?

A tiny story of each mistake of a store goes well, goes wrong while it is planted, and well. The others have a story of
the broker's model (tests/model/analysis/crash/test_schedule_stories.py).
"""

import sqlite3
import tempfile
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from ackstate.errors import CorruptStateError
from ackstate.stores import sqlite_database
from ackstate.stores.base import ABSENT
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


@contextmanager
def sqlite_store_with_a_value():
    with tempfile.TemporaryDirectory() as directory:
        with closing(SqliteStore(directory)) as store:
            store.metadata.put("/a", b"value", expected_version=ABSENT)
        yield Path(directory)


def is_refused(call):
    try:
        call()
    except CorruptStateError:
        return True
    return False


def a_flipped_bit_in_a_row_of_sqlite():
    with sqlite_store_with_a_value() as directory:
        database = directory / sqlite_database.DATABASE
        database.write_bytes(database.read_bytes().replace(b"value", b"valuf"))
        with closing(SqliteStore(directory)) as store:
            return is_refused(lambda: store.metadata.get("/a"))


def a_database_of_no_bytes():
    with sqlite_store_with_a_value() as directory:
        (directory / sqlite_database.DATABASE).write_bytes(b"")
        return is_refused(lambda: SqliteStore(directory).close())


STORIES = {
    "M1-sqlite": a_store_in_sqlite_that_is_opened,
    "M3-sqlite": a_flipped_bit_in_a_row_of_sqlite,
    "M4-sqlite": a_database_of_no_bytes,
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
    # The two others are caught by layer 2 (museum.matrix).
    assert {name for name in names if "-" in name} == STORIES.keys() | {"M2-sqlite", "M11-sqlite"}
