"""How many statements a call of the SQLite store takes, and that those which do without a read check as much."""

from contextlib import closing, contextmanager

import pytest

from ackstate import SqliteStore
from ackstate.errors import CorruptStateError


@pytest.fixture
def store(tmp_path):
    with closing(SqliteStore(tmp_path)) as opened:
        yield opened


@contextmanager
def statements_of(store):
    """Collect the first word of each statement that is executed; the pragma asks for the size of the database."""
    found = []
    connection = store._database._connection
    connection.set_trace_callback(lambda statement: found.append(statement.split()[0]))
    try:
        yield found
    finally:
        connection.set_trace_callback(None)


@pytest.mark.parametrize("count", [1, 100])
def test_an_append_is_one_row_and_a_transaction_of_two_statements(store, count):
    ledger_id = store.ledgers.create("billing")
    entries = [b"entry %d" % number for number in range(count)]
    for number in range(2):
        with statements_of(store) as found:
            assert store.ledgers.append(ledger_id, entries) == (number + 1) * count - 1
        assert found == ["BEGIN", "UPDATE", "INSERT", "PRAGMA", "COMMIT"]
    with statements_of(store) as found:
        assert store.ledgers.read(ledger_id, 0, 2 * count) == entries * 2
    assert found == ["SELECT", "SELECT"]
    with store._database.reading() as connection:
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (2,)


def test_appends_to_many_ledgers_are_one_transaction(store):
    ledger_ids = [store.ledgers.create("billing") for _ in range(3)]
    with statements_of(store) as found:
        assert store.ledgers.append_many([(each, [b"a", b"b"]) for each in ledger_ids]) == [1] * 3
    assert (found.count("BEGIN"), found.count("COMMIT"), found.count("INSERT")) == (1, 1, 3)


def test_any_part_of_rows_of_many_entries_is_read(store):
    ledger_id = store.ledgers.create("billing")
    entries = [b"%d" % number * (number % 5) for number in range(20)]
    for first, end in ((0, 7), (7, 8), (8, 20)):
        store.ledgers.append(ledger_id, entries[first:end])
    for first in range(21):
        for end in range(first, 21):
            assert store.ledgers.read(ledger_id, first, end) == entries[first:end]


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("DELETE FROM entries WHERE last_id = 4", "5 entries, the last one 3"),
        ("UPDATE entries SET last_id = 7 WHERE last_id = 4", "5 entries, the last one 7"),
        ("UPDATE entries SET last_id = 'x' WHERE last_id = 4", "5 entries, the last one 'x'"),
        ("UPDATE entries SET last_id = x'34' WHERE last_id = 4", "5 entries, the last one b'4'"),
        ("UPDATE ledgers SET entry_count = 6", "6 entries, the last one 4"),
        ("UPDATE ledgers SET entry_count = x'35'", "b'5' entries, the last one 4"),
        ("UPDATE ledgers SET fenced = 2", "5 entries, the last one 4"),
    ],
)
def test_damage_that_comes_after_an_append_is_noticed_by_the_next(store, damage, found):
    ledger_id = store.ledgers.create("billing")
    for number in range(5):
        assert store.ledgers.append(ledger_id, [b"entry"]) == number
    store._database._connection.execute(damage)
    for entries in ([b"a"], [b"a", b"b"]):
        with pytest.raises(CorruptStateError, match=f"ledger {ledger_id} with {found}"):
            store.ledgers.append(ledger_id, entries)
