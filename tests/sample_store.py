"""A store with two cursors, one of each format, and ways to damage it; and what `ackstate fsck` answers."""

import json
import sqlite3
import struct
from contextlib import closing

import google_crc32c

from ackstate import CursorConfig, Format, ManagedCursor, Message, Position, SqliteStore
from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.stores.sqlite import SEAL_BYTES
from ackstate.topic import MessageLog
from command_line import run, tree

TOPIC = "persistent://a/b/orders"
NAMES = ("audit", "billing")
FORMATS = {"audit": Format.PULSAR, "billing": Format.NATIVE}
DATABASE = "ackstate.sqlite3"
RECORD = "UPDATE metadata SET data = ? WHERE path = ?"
ENTRY = "UPDATE entries SET data = ? WHERE ledger_id = ? AND last_id = ?"


def fill(store):
    """Publish, and let a cursor of each format persist five times."""
    log = MessageLog.open(store, topic=TOPIC)
    log.publish([Message(b"")] * 100)
    for name in NAMES:
        cursor = opened(store, name)
        for number in range(5):
            cursor.ack_entries(log.ledgers.current_ledger_id, [10 * number + 2, 10 * number + 4], now_ms=0)
            cursor.persist(now_ms=0)
        cursor.mark_delete(Position(log.ledgers.current_ledger_id, 2), now_ms=0, properties={"step": 9})
        cursor.persist(now_ms=0)


def filled(path):
    """Make the store in a directory, and close it."""
    with closing(SqliteStore(path)) as store:
        fill(store)
    return path


def opened(store, name, **options):
    return ManagedCursor.open(
        store,
        topic=TOPIC,
        subscription=name,
        ledgers=MessageLog.open(store, topic=TOPIC).ledgers,
        config=CursorConfig(format=FORMATS[name]),
        now_ms=0,
        **options,
    )


class StoreDamage:
    """Changes a closed store behind its back."""

    def __init__(self, path):
        self.path = path

    def do(self, statement, *values):
        with closing(sqlite3.connect(self.path / DATABASE)) as connection, connection:
            return connection.execute(statement, values).fetchall()

    def journal(self, name="billing"):
        """The ledger's id and its entries."""
        owner = cursor_owner(cursor_path(TOPIC, name))
        ((ledger_id,),) = self.do("SELECT id FROM ledgers WHERE owner = ?", owner)
        rows = self.do("SELECT data FROM entries WHERE ledger_id = ? ORDER BY last_id", ledger_id)
        return ledger_id, [row[8:-SEAL_BYTES] for (row,) in rows]

    def write_entry(self, ledger_id, sequence, data):
        """As the store would have written it: the cursor has to find the damage."""
        key = struct.pack("<cqq", b"E", ledger_id, sequence)
        self.do(ENTRY, self.sealed(key, struct.pack("<II", 1, len(data)) + data), ledger_id, sequence)

    def sealed(self, key, data):
        ((salt,),) = self.do("SELECT salt FROM identity")
        return data + google_crc32c.value(salt + key + data).to_bytes(SEAL_BYTES, "little")

    def flip(self, sequence, *, name="billing", byte=40):
        ledger_id, entries = self.journal(name)
        self.write_entry(ledger_id, sequence, flipped(entries[sequence], byte))

    def flip_row(self, sequence):
        """Behind the back of the store, too."""
        ledger_id, entries = self.journal()
        self.do(ENTRY, bytes(8) + flipped(entries[sequence], 40) + b"seal", ledger_id, sequence)

    def flip_record_row(self):
        ((row,),) = self.do("SELECT data FROM metadata WHERE path = ?", cursor_path(TOPIC, "billing"))
        self.do(RECORD, flipped(row, 9), cursor_path(TOPIC, "billing"))

    def tear(self):
        ledger_id, entries = self.journal()
        self.write_entry(ledger_id, len(entries) - 1, entries[-1][:-9])

    def flip_record(self, name="billing"):
        path = cursor_path(TOPIC, name)
        ((row, version),) = self.do("SELECT data, version FROM metadata WHERE path = ?", path)
        self.do(
            RECORD, self.sealed(struct.pack("<cq", b"V", version) + path.encode(), flipped(row[:-SEAL_BYTES], 9)), path
        )

    def delete_record(self, name="billing"):
        self.do("DELETE FROM metadata WHERE path = ?", cursor_path(TOPIC, name))

    def delete_journal(self, name="billing"):
        ledger_id, _ = self.journal(name)
        self.do("DELETE FROM entries WHERE ledger_id = ?", ledger_id)
        self.do("DELETE FROM ledgers WHERE id = ?", ledger_id)

    def lose_an_entry(self):
        ledger_id, _ = self.journal()
        self.do("DELETE FROM entries WHERE ledger_id = ? AND last_id = 2", ledger_id)


def flipped(data, byte):
    changed = bytearray(data)
    changed[byte % len(data)] ^= 0x21
    return bytes(changed)


def fsck(capsys, path):
    """Check a store, see that it was not touched, and return the status and, by subscription, the findings."""
    before = tree(path)
    outcome = run(capsys, "fsck", path, "--json")
    assert tree(path) == before
    assert outcome.err == ""
    answer = json.loads(outcome.out)
    assert answer["store"] == str(path)
    assert answer["problems"] == sum(len(cursor["problems"]) for cursor in answer["cursors"])
    return outcome.status, {cursor["subscription"]: cursor for cursor in answer["cursors"]}
