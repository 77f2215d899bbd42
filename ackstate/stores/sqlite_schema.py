"""The tables of a store in SQLite, and the check that a database has these and nothing else."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

from ackstate.errors import CorruptStateError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# SQLite stores these texts unchanged.
NEW_IDENTITY = "INSERT INTO identity VALUES (randomblob(8))"
SCHEMA = (
    # AUTOINCREMENT: the id of a deleted ledger is never used again.
    "CREATE TABLE ledgers (id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL,"
    " fenced INTEGER NOT NULL, entry_count INTEGER NOT NULL)",
    "CREATE INDEX ledgers_by_owner ON ledgers (owner)",
    "CREATE TABLE entries (ledger_id INTEGER NOT NULL, entry_id INTEGER NOT NULL, data BLOB NOT NULL,"
    " PRIMARY KEY (ledger_id, entry_id))",
    "CREATE TABLE metadata (path TEXT NOT NULL PRIMARY KEY, data BLOB NOT NULL, version INTEGER NOT NULL)",
    # One row, above every version of every deleted value: a value that is created again never matches an old version.
    "CREATE TABLE first_version (version INTEGER NOT NULL)",
    # One row.
    "CREATE TABLE identity (salt BLOB NOT NULL)",
)
"""The schema of a store."""
_ALL_OBJECTS = "SELECT type, name, tbl_name, sql FROM main.sqlite_master"
_FOUND_CHARACTERS_MAX = 200


def check_schema(database: Path, connection: sqlite3.Connection, statements: Sequence[str]) -> None:
    """Refuse a database whose schema is not exactly the one that some statements create.

    A foreign trigger or view of any name could change the data that is written or read.
    """
    with closing(sqlite3.connect(":memory:")) as pattern:
        for statement in statements:
            pattern.execute(statement)
        expected = Counter(pattern.execute(_ALL_OBJECTS))
    found = Counter(connection.execute(_ALL_OBJECTS))
    roots = [root for (root,) in connection.execute("SELECT rootpage FROM main.sqlite_master")]
    if found == expected and len(set(roots)) == len(roots):
        return
    others = [f"{kind} {name!r} of {table!r}" for kind, name, table, _ in found - expected]
    what = f"also {others[0]}" if others else "not all of them, or two with the same pages"
    raise CorruptStateError(str(database), offset=0, expected="our tables", found=what[:_FOUND_CHARACTERS_MAX])
