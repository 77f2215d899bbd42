"""The statements that write, read and delete entries in SQLite: as few as possible for each call."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

INSERT = "INSERT INTO entries (ledger_id, entry_id, data) VALUES (?, ?, ?)"
"""Adds the row of an entry."""
_ROWS_AT_ONCE = 20  # A row takes 0.6 times as long as in a statement of its own; in a longer one, little less.
_INSERT_MANY = INSERT + ", (?, ?, ?)" * (_ROWS_AT_ONCE - 1)
# The rows are found through the index, but named by their own columns: so a damaged index cannot confuse two entries.
READ = (
    "SELECT found.ledger_id, found.entry_id, found.data"
    " FROM entries AS sought CROSS JOIN entries AS found ON found.rowid = sought.rowid"
    " WHERE sought.ledger_id = ? AND sought.entry_id >= ? AND sought.entry_id < ? ORDER BY sought.entry_id"
)
"""Reads the rows of a ledger's entries, from one (included) to another (excluded)."""
# The same precaution: a damaged index may lead to a row of another ledger.
DELETE = (
    "DELETE FROM entries WHERE rowid IN (SELECT found.rowid"
    " FROM entries AS sought CROSS JOIN entries AS found ON found.rowid = sought.rowid"
    " WHERE sought.ledger_id = ? AND found.ledger_id = ? LIMIT ?)"
)
"""Deletes rows of a ledger's entries, at most so many; the ledger comes twice."""
# No arithmetic on the greatest entry id: text, which damage can make of a number, would become a number again.
_COUNT = (
    "UPDATE ledgers SET entry_count = ? WHERE id = ? AND fenced = 0 AND entry_count = ?"
    " AND ? = (SELECT coalesce(max(entry_id), -1) FROM entries WHERE ledger_id = ?)"
)


def has_counted(connection: sqlite3.Connection, ledger_id: int, first: int, added: int) -> bool:
    """Count new entries, the first of which has an id, and return True; False if the ledger refuses them.

    It does if it is fenced, if it does not end before that entry, or if its two counts are not the same.
    """
    return connection.execute(_COUNT, (first + added, ledger_id, first, first - 1, ledger_id)).rowcount == 1


def insert(connection: sqlite3.Connection, rows: Sequence[tuple[int, int, bytes]]) -> None:
    """Add rows of entries, in order. Complexity: a statement for 20 rows, and one for each of the last up to 19."""
    whole = len(rows) - len(rows) % _ROWS_AT_ONCE
    for begin in range(0, whole, _ROWS_AT_ONCE):
        connection.execute(_INSERT_MANY, tuple(chain.from_iterable(rows[begin : begin + _ROWS_AT_ONCE])))
    connection.executemany(INSERT, rows[whole:])
