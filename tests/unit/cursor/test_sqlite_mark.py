"""A store that lost its database is no new store."""

from contextlib import closing

import pytest

from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.stores import sqlite_database
from ackstate.stores.sqlite import SqliteStore
from store_directories import assert_works, contents_of, names_in

DATABASE = "ackstate.sqlite3"
GOLDEN = b"ACKQ\x01\0\0\0\xfa\x30\x3f\x1a"


@pytest.fixture
def lost(tmp_path):
    """The remains of a store whose database is gone."""
    assert_works(tmp_path / "store")
    (tmp_path / "store" / DATABASE).unlink()
    return tmp_path / "store"


@pytest.mark.parametrize("opening", [SqliteStore, SqliteStore.open_copy])
@pytest.mark.parametrize("others", [[], [f"{DATABASE}-wal"], [sqlite_database._UNFINISHED]])
def test_a_lost_database_is_no_new_store(lost, opening, others):
    for name in others:
        (lost / name).write_bytes(b"what a crash left")
    before = contents_of(lost)
    with pytest.raises(CorruptStateError, match=f"{lost / DATABASE}: .*expected the database of a store that was made"):
        opening(lost)
    (lost / "LOCK").unlink()
    with pytest.raises(CorruptStateError, match="of a store that was made"):
        opening(lost)
    assert contents_of(lost) == {name: content for name, content in before.items() if name != "LOCK"}


def test_without_the_mark_a_lost_database_would_be_a_new_store(lost):
    (lost / "MADE").unlink()
    with closing(SqliteStore(lost)) as store:
        assert store.ledgers.owners() == []


def test_a_store_of_before_is_marked_when_it_is_opened(tmp_path):
    assert_works(tmp_path)
    (tmp_path / "MADE").unlink()
    assert_works(tmp_path)
    assert (tmp_path / "MADE").read_bytes() == GOLDEN
    assert names_in(tmp_path) == ["LOCK", "MADE", DATABASE]


def test_a_damaged_or_newer_mark_is_refused_by_name(tmp_path):
    assert_works(tmp_path)
    mark = tmp_path / "MADE"
    for bit in range(8 * len(GOLDEN)):
        content = bytearray(GOLDEN)
        content[bit // 8] ^= 1 << bit % 8
        for damaged in (content, GOLDEN[: bit // 8], GOLDEN + b"x"):
            mark.write_bytes(damaged)
            with pytest.raises(CorruptStateError, match=str(mark)):
                sqlite_database._is_marked(tmp_path)
    mark.write_bytes(sqlite_database._mark(0))
    with pytest.raises(CorruptStateError, match=str(mark)):
        SqliteStore(tmp_path)
    mark.write_bytes(sqlite_database._mark(2))
    with pytest.raises(UnsupportedVersionError, match=f"{mark} has version 2; this release reads up to version 1"):
        SqliteStore(tmp_path)
