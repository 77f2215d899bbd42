"""How many statements a call of the SQLite store takes, and that those which do without a read check as much."""

from contextlib import closing, contextmanager

import pytest

from ackstate import SqliteStore
from ackstate.errors import CorruptStateError
from ackstate.stores.base import LedgerFencedError


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


def test_one_entry_is_a_transaction_of_two_statements_and_the_first_one_reads_the_end(store):
    ledger_id = store.ledgers.create("billing")
    with statements_of(store) as found:
        store.ledgers.append(ledger_id, [b"first"])
    assert found == ["BEGIN", "SELECT", "UPDATE", "INSERT", "PRAGMA", "COMMIT"]
    for append in (
        lambda: store.ledgers.append(ledger_id, [b"entry"]),
        lambda: store.ledgers.append_all([(ledger_id, b"entry")]),
    ):
        with statements_of(store) as found:
            append()
        assert found == ["BEGIN", "UPDATE", "INSERT", "PRAGMA", "COMMIT"]


def test_a_hundred_entries_are_five_inserts_and_one_query(store):
    ledger_id = store.ledgers.create("billing")
    entries = [b"entry %d" % number for number in range(117)]
    store.ledgers.append_all([(ledger_id, entry) for entry in entries[:17]])
    with statements_of(store) as found:
        ids = store.ledgers.append_all([(ledger_id, entry) for entry in entries[17:]])
    assert found == ["BEGIN", "UPDATE", *["INSERT"] * 5, "PRAGMA", "COMMIT"]
    assert ids == list(range(17, 117))
    with statements_of(store) as found:
        assert store.ledgers.read(ledger_id, 0, 117) == entries
    assert found == ["SELECT", "SELECT"]


def test_entries_of_several_ledgers_in_any_order_have_the_ids_that_follow(store):
    ledger_ids = [store.ledgers.create("billing") for _ in range(3)]
    batch = [(ledger_ids[number * number % 3], b"%d" % number) for number in range(50)]
    ids = store.ledgers.append_all(batch) + store.ledgers.append_all(batch)
    stored = {
        ledger_id: store.ledgers.read(ledger_id, 0, store.ledgers.last(ledger_id) + 1) for ledger_id in ledger_ids
    }
    assert [stored[ledger_id][entry_id] for (ledger_id, _), entry_id in zip(batch * 2, ids, strict=True)] == [
        entry for _, entry in batch * 2
    ]
    assert sum(map(len, stored.values())) == 100


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("DELETE FROM entries WHERE entry_id = 4", "5 entries, the last one 3"),
        ("UPDATE entries SET entry_id = 7 WHERE entry_id = 4", "5 entries, the last one 7"),
        ("UPDATE entries SET entry_id = 'x' WHERE entry_id = 4", "5 entries, the last one 'x'"),
        ("UPDATE entries SET entry_id = x'34' WHERE entry_id = 4", "5 entries, the last one b'4'"),
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
            store.ledgers.append_all([(ledger_id, entry) for entry in entries])


def test_after_a_call_that_was_undone_the_next_entry_has_the_id_that_the_undone_one_had(store):
    ledger_id, fenced = store.ledgers.create("billing"), store.ledgers.create("billing")
    store.ledgers.append_all([(ledger_id, b"kept"), (fenced, b"kept")])
    store.ledgers.fence(fenced)
    for _ in range(2):
        with pytest.raises(LedgerFencedError):
            store.ledgers.append_all([(ledger_id, b"undone"), (fenced, b"refused")])
    assert store.ledgers.append(ledger_id, [b"next"]) == 1
    assert store.ledgers.read(ledger_id, 0, 2) == [b"kept", b"next"]
