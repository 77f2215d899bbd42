"""A repair that is offered works, also where it is the store's own tables that are damaged."""

import sqlite3
from contextlib import closing

import pytest

from ackstate import CursorConfig, LedgerMap, ManagedCursor, Position, SqliteStore
from ackstate.cursor.formats import Format, Repair
from ackstate.cursor.recovery import UnreadableCursorError
from ackstate.stores.base import StoreError
from ackstate.stores.sqlite_database import DATABASE

LOG = {3: 30}
ACKED = Position(3, 5)


def open_cursor(store, *, repair=Repair.NONE, subscription="billing", **config):
    return ManagedCursor.open(
        store, topic="orders", subscription=subscription, ledgers=LedgerMap.from_counts(LOG), repair=repair,
        config=CursorConfig(**config), now_ms=0,
    )  # fmt: skip


def write_cursor(place, **config):
    with closing(SqliteStore(place)) as store:
        cursor = open_cursor(store, **config)
        cursor.mark_delete(Position(3, 2), now_ms=0)
        cursor.persist(now_ms=0)
        for entry_id in (5, 7, 9):
            cursor.ack(Position(3, entry_id), now_ms=0)
            cursor.persist(now_ms=0)


def lose_the_count(connection, place):
    connection.execute("UPDATE ledgers SET entry_count = 70")


def lose_the_count_and_leave_entries_of_the_next_ledger(connection, place):
    lose_the_count(connection, place)
    connection.execute("INSERT INTO entries SELECT 1 + (SELECT max(id) FROM ledgers), last_id, data FROM entries")


def write_another_page_over_the_index_of_entries(connection, place):
    roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()
    database = place / DATABASE
    content = database.read_bytes()
    pages = {name: content[(root - 1) * 4096 : root * 4096] for name, root in roots.items() if root}
    at = (roots["sqlite_autoindex_entries_1"] - 1) * 4096
    database.write_bytes(content[:at] + pages["ledgers"] + content[at + 4096 :])


DAMAGES = (
    lose_the_count,
    lose_the_count_and_leave_entries_of_the_next_ledger,
    write_another_page_over_the_index_of_entries,
)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("repair", [Repair.USE_METADATA_SNAPSHOT, Repair.START_ANEW])
@pytest.mark.parametrize("format_", list(Format))
def test_a_cursor_whose_ledger_the_store_finds_damaged_is_repaired_written_and_opened_again(
    tmp_path, damage, repair, format_
):
    """Each of these was offered and then refused: the damaged ledger could not be fenced, or no new one written."""
    place = tmp_path / "store"
    write_cursor(place, format=format_, ledger_retry_ms=1)
    with closing(sqlite3.connect(place / DATABASE, isolation_level=None)) as connection:
        damage(connection, place)
    with closing(SqliteStore(place, check_pages=False)) as store, pytest.raises(UnreadableCursorError) as refused:
        open_cursor(store, format=format_)
    assert repair in refused.value.repairs
    with closing(SqliteStore(place, check_pages=False)) as store:
        cursor = open_cursor(store, repair=repair, format=format_)
        assert not cursor.is_acked(ACKED)
        repaired_at = cursor.mark_delete_position
        receipt = cursor.ack(ACKED, now_ms=1)
        cursor.persist(now_ms=1)
        assert cursor.durable(receipt)
    with closing(SqliteStore(place, check_pages=False)) as store:
        again = open_cursor(store, format=format_)
        assert (again.mark_delete_position, again.is_acked(ACKED)) == (repaired_at, True)


def test_a_damaged_record_counts_as_one_that_cannot_be_written(tmp_path):
    with closing(SqliteStore(tmp_path / "store")) as store:
        cursor = open_cursor(store, subscription="damaged")
        with store._database.reading() as connection:
            connection.execute("UPDATE metadata SET version = 'x'")
            connection.execute("UPDATE ledgers SET entry_count = 70")
        cursor.ack(Position(3, 5), now_ms=1)
        with pytest.raises(StoreError, match="the cursor ledger cannot be written") as caught:
            cursor.persist(now_ms=1)
        assert "the record cannot be written" in caught.value.__notes__[0]
        assert (cursor.stats().ledger_error_count, cursor.stats().metadata_error_count) == (1, 1)
