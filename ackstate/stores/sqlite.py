"""The embedded default store: one SQLite database in its own directory, open in one process at a time.

Each mutating call is one transaction and one sync (WAL, ``synchronous=FULL``); calls of other threads that arrive
meanwhile share the next transaction (`ackstate.stores.sqlite_connection`).
`ackstate.stores.sqlite_database` describes the files of the directory and the checks of an opening.

Entries are in a rowid table. Measured against ``WITHOUT ROWID`` with pages of 4 KiB: 1 KB entries take 1.4 times
their size instead of 4.6 times, and appending 100 KB takes 0.37 ms instead of 0.58 ms. Each ledger also counts its
entries, so that an entry lost through damage is noticed.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, final

from ackstate.errors import AckStateError
from ackstate.stores.base import (
    ABSENT,
    METADATA_VALUE_BYTES_MAX,
    DamagedValueError,
    LedgerStore,
    MetadataStore,
    StoreFullError,
    Versioned,
    children_prefix,
    fenced,
    no_ledger,
    other_version,
)
from ackstate.stores.sqlite_connection import SqliteConnection
from ackstate.stores.sqlite_copy import COPY_BYTES_MAX, TemporaryCopy, copy_store
from ackstate.stores.sqlite_seal import SEAL_BYTES

if TYPE_CHECKING:
    import os
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


# Of a ledger that was deleted on a full disk, and whose entries did not all find room in the log at once.
_DELETED_COUNT = -1
_DELETED_AT_ONCE = 4096  # Entries; fewer where even these find no room.
# A damaged index may lead to a row of another owner, and callers delete some of the returned ledgers. A missing row has
# no owner.
_OWNED = (
    "SELECT found.owner, sought.id FROM ledgers AS sought LEFT JOIN ledgers AS found ON found.id = sought.id"
    " WHERE sought.owner = ? AND found.entry_count IS NOT -1 ORDER BY sought.id"
)
# Data above the limit is not even read.
_GET = "SELECT CASE WHEN length(data) <= ? THEN data END, version, length(data) FROM metadata WHERE path = ?"


@final
class SqliteStore:
    """A store in a directory on a local disk; thread-safe, but not usable across a fork.

    Appending is O(size of the entries) and O(log n) in the size of the store. The space of deleted ledgers is reused,
    not returned to the file system.

    A change that finds the disk full raises `StoreFullError` and has no effect; the store works on when there is room.
    Its log never grows beyond what can be copied to the database. Ledgers can be deleted on a full disk if it had
    256 KiB of room when the store was opened.

    A child that is forked while a store is open cannot use it: every call but `close`, which does nothing, is refused
    there. The child can never open that store again either, since SQLite mistakes the locks of the parent for its own.
    If the parent dies, the store stays locked until the child ends or replaces its program.

    Args:
        path: The directory. A missing one is created, an empty one becomes a store.
        check_pages: Whether to check all pages for damage now, which reads the whole database: 0.1 to 0.4 s for 100 MB,
            0.1 s more if none of it is in the kernel's cache. Without the check, a damaged page is reported when it is
            read; data that any cursor wrote next to the damage in the meantime can be unreadable.
        metadata_value_bytes_max: The largest metadata value that can be written or read, in bytes; 64 MiB by default.

    Raises:
        StoreLockedError: The store is open already, in this process or another one.
        StoreFullError: The disk has no room to create the store, or to recover it; retry when it has.
        StoreError: The path is a file, holds something else, or is not writable; nothing in it was changed.
        CorruptStateError: The store holds damaged bytes or a foreign database, or has lost its database.
        UnsupportedVersionError: The store has another version; nothing was changed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        check_pages: bool = True,
        metadata_value_bytes_max: int = METADATA_VALUE_BYTES_MAX,
    ) -> None:
        self._copy: TemporaryCopy | None = None
        self._database = SqliteConnection(Path(path), check_pages=check_pages)
        self._ledgers = _SqliteLedgers(self._database)
        self._metadata = _SqliteMetadata(self._database, metadata_value_bytes_max)
        with suppress(AckStateError):  # Damage is found when it is read.
            self._ledgers.finish_deletes()

    @classmethod
    def open_copy(
        cls,
        path: str | os.PathLike[str],
        *,
        to: str | os.PathLike[str] | None = None,
        check_pages: bool = True,
        copy_bytes_max: int = COPY_BYTES_MAX,
    ) -> SqliteStore:
        """Copy a store, which may be open in any process, and open the copy: for an inspection, or as a backup.

        No byte of the store changes. The copy has all that was durable when this was called, the bytes that a crash
        left in the log included, and maybe later changes, each whole or not at all. It is writable: you can try a
        repair on it. Errors in the copied files name the copy; a damaged backup stays where it is.

        The calls of a store that this process has open wait for the copy. Another process goes on writing; if it writes
        faster than the store is copied, ten times, the copy fails.

        Args:
            path: The store's directory; it need not be writable.
            to: A missing or empty directory for the copy, which stays there as a backup. By default it lies in the
                directory for temporary files, and is removed when it is closed.
            check_pages: See the constructor.
            copy_bytes_max: The largest total size of the store's files, in bytes; 4 GiB by default.

        Raises:
            StoreFullError: There is no room for the copy.
            StoreError: There is no store at the path, it is not readable, its files are too large, it is written too
                fast, or the directory of the copy is not empty.
            CorruptStateError: The store holds damaged bytes or a foreign database, or has lost its database.
            UnsupportedVersionError: The store has another version.
        """
        if to is not None:
            copy_store(Path(path), Path(to), bytes_max=copy_bytes_max)
            return cls(to, check_pages=check_pages)
        copy = TemporaryCopy(Path(path))
        try:
            copy_store(Path(path), copy.path, bytes_max=copy_bytes_max)
            store = cls(copy.path, check_pages=check_pages)
        except BaseException:
            copy.cleanup()
            raise
        store._copy = copy
        return store

    @property
    def ledgers(self) -> _SqliteLedgers:
        """The logs."""
        return self._ledgers

    @property
    def metadata(self) -> _SqliteMetadata:
        """The small values."""
        return self._metadata

    def close(self) -> None:
        """Copy the log to the database as far as there is room, and unlock; no-op if closed."""
        self._database.close()
        if self._copy is not None:
            self._copy.cleanup()


@final
class _SqliteLedgers(LedgerStore):
    def __init__(self, database: SqliteConnection) -> None:
        self._database = database
        self._execute = database.write
        # Where ledgers probably end, which spares reading it: the statement that counts new entries checks it. Wrong
        # after a call that was undone. Used by changes only, of which one is executed at a time.
        self._ends: dict[int, int] = {}
        self._own: set[int] = set()

    def _create(self, owner: str) -> int:
        def _change(connection: sqlite3.Connection) -> int:
            insert = "INSERT INTO ledgers (owner, fenced, entry_count) VALUES (?, 0, 0)"
            ledger_id = connection.execute(insert, (owner,)).lastrowid
            assert ledger_id is not None
            self._own.add(ledger_id)
            return ledger_id

        return self._execute(_change)

    def _append_many(self, appends: list[tuple[int, list[bytes]]]) -> list[int | AckStateError]:
        with self._database.reading():  # Only to find out whether it is open.
            pass
        return self._database.write_all([partial(self._append, ledger_id=each[0], entries=each[1]) for each in appends])

    def _append(self, connection: sqlite3.Connection, ledger_id: int, entries: list[bytes]) -> int:
        if ledger_id not in self._own or not entries:
            end = self._open_end(connection, ledger_id)
            if ledger_id not in self._own:
                raise fenced(ledger_id)
            return end - 1
        first = self._add_to_count(connection, ledger_id, len(entries))
        rows = self._database.seal.entries([(ledger_id, first + at, entry) for at, entry in enumerate(entries)])
        insert(connection, rows)
        return first + len(entries) - 1

    def _read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        with self._database.reading() as connection:
            count, _ = self._count_and_fence(connection, ledger_id)
            end = min(end, count)
            if first >= end:
                return []
            rows = connection.execute(READ, (ledger_id, first, end)).fetchall()
            columns = tuple(zip(*rows, strict=True))
            if columns[:2] != ((ledger_id,) * (end - first), tuple(range(first, end))):
                raise self._database.damage(f"entries missing in ledger {ledger_id}")
            data = self._database.seal.data_of_entries(ledger_id, first, columns[2])
            if len(data) < len(rows):
                what = f"entry {first + len(data)} of ledger {ledger_id}, which is not as it was written"
                raise self._database.damage(what)
            return data

    def _last(self, ledger_id: int) -> int:
        with self._database.reading() as connection:
            return self._count_and_fence(connection, ledger_id)[0] - 1

    def _delete(self, ledger_id: int) -> None:
        def _mark(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE ledgers SET entry_count = ? WHERE id = ?", (_DELETED_COUNT, ledger_id))
            self._ends.pop(ledger_id, None)

        def _change(connection: sqlite3.Connection) -> None:
            self._drop(connection, ledger_id, -1)

        try:
            self._execute(_change)
        except StoreFullError:
            # The log holds each page from which an entry is deleted.
            self._execute(_mark)
            self.finish_deletes()

    def finish_deletes(self) -> None:
        """Delete what is left of ledgers that were deleted on a full disk, as far as there is room."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT id FROM ledgers WHERE entry_count = ?", (_DELETED_COUNT,)).fetchall()
        for (ledger_id,) in rows:
            at_once, is_over = _DELETED_AT_ONCE, False
            while at_once and not is_over:
                try:
                    is_over = self._execute(partial(self._drop, ledger_id=ledger_id, at_most=at_once))
                except StoreFullError:
                    at_once //= 8

    def _drop(self, connection: sqlite3.Connection, ledger_id: int, at_most: int) -> bool:
        """Delete entries of a ledger, and return whether none is left; then the ledger itself is deleted too."""
        if connection.execute(DELETE, (ledger_id, ledger_id, at_most)).rowcount == at_most:
            return False
        connection.execute("DELETE FROM ledgers WHERE id = ?", (ledger_id,))
        self._ends.pop(ledger_id, None)
        return True

    def _fence(self, ledger_id: int) -> int:
        def _change(connection: sqlite3.Connection) -> int:
            count, _ = self._count_and_fence(connection, ledger_id)
            connection.execute("UPDATE ledgers SET fenced = 1 WHERE id = ?", (ledger_id,))
            return count - 1

        return self._execute(_change)

    def _owned_by(self, owner: str) -> list[int]:
        with self._database.reading() as connection:
            rows = connection.execute(_OWNED, (owner,)).fetchall()
            for found, ledger_id in rows:
                if found != owner:
                    raise self._database.damage(f"ledger {ledger_id!r} of {found!r} where one of {owner} belongs")
            return [self._database.integer(ledger_id) for _, ledger_id in rows]

    def _owners(self) -> list[str]:
        with self._database.reading() as connection:
            # All rows: an open query keeps the log from being emptied, and an error would keep the query open.
            query = "SELECT DISTINCT owner FROM ledgers WHERE entry_count IS NOT ? ORDER BY owner"
            rows = connection.execute(query, (_DELETED_COUNT,)).fetchall()
            return [self._database.text(owner) for (owner,) in rows]

    def _add_to_count(self, connection: sqlite3.Connection, ledger_id: int, added: int) -> int:
        """Count new entries of a ledger that accepts appends, and return the id of the first."""
        first = self._ends.get(ledger_id, -1)
        if first < 0 or not has_counted(connection, ledger_id, first, added):
            first = self._open_end(connection, ledger_id)
            if not has_counted(connection, ledger_id, first, added):
                raise self._database.damage(f"ledger {ledger_id}, whose {first} entries cannot be counted")
        self._ends[ledger_id] = first + added
        return first

    def _open_end(self, connection: sqlite3.Connection, ledger_id: int) -> int:
        """Return the next entry id of a ledger that accepts appends."""
        count, is_fenced = self._count_and_fence(connection, ledger_id)
        if is_fenced:
            raise fenced(ledger_id)
        return count

    def _count_and_fence(self, connection: sqlite3.Connection, ledger_id: int) -> tuple[int, int]:
        """Return the number of entries of a ledger, and whether it is fenced (1 or 0)."""
        row = connection.execute(
            "SELECT entry_count, fenced,"
            " (SELECT coalesce(max(entry_id), -1) FROM entries WHERE ledger_id = id)"
            " FROM ledgers WHERE id = ?",
            (ledger_id,),
        ).fetchone()
        if row is None or row[0] == _DELETED_COUNT:
            raise no_ledger(ledger_id)
        count, is_fenced, last = row
        # The count is stored twice, so that a lost or extra entry is noticed. Damage can also turn a number into text.
        if not isinstance(last, int) or count != last + 1 or is_fenced not in {0, 1}:
            raise self._database.damage(f"ledger {ledger_id} with {count!r} entries, the last one {last!r}")
        return count, is_fenced


@final
class _SqliteMetadata(MetadataStore):
    def __init__(self, database: SqliteConnection, value_bytes_max: int) -> None:
        super().__init__(value_bytes_max=value_bytes_max)
        self._database = database
        self._execute = database.write

    def _get(self, path: str) -> Versioned | None:
        with self._database.reading() as connection:
            return self._find(connection, path)

    def _put(self, path: str, data: bytes, expected_version: int) -> int:
        def _change(connection: sqlite3.Connection) -> int:
            self._expect(connection, path, expected_version)
            version = self._first_version(connection) if expected_version == ABSENT else expected_version + 1
            connection.execute(
                "INSERT INTO metadata (path, data, version) VALUES (?, ?, ?)"
                " ON CONFLICT (path) DO UPDATE SET data = excluded.data, version = excluded.version",
                (path, self._database.seal.value(path, version, data), version),
            )
            return version

        return self._execute(_change)

    def _delete(self, path: str, expected_version: int) -> None:
        def _change(connection: sqlite3.Connection) -> None:
            self._expect(connection, path, expected_version)
            first_version = max(self._first_version(connection), expected_version + 1)
            connection.execute("UPDATE first_version SET version = ?", (first_version,))
            connection.execute("DELETE FROM metadata WHERE path = ?", (path,))

        self._execute(_change)

    def _children(self, path: str) -> list[str]:
        prefix = children_prefix(path)
        with self._database.reading() as connection:
            # The character after the slash is a zero: the range holds exactly the paths that begin with the prefix.
            query = "SELECT path FROM metadata WHERE path > ? AND path < ?"
            rows = connection.execute(query, (prefix, f"{prefix[:-1]}0")).fetchall()
            paths = [self._database.text(value_path) for (value_path,) in rows]
            return [value_path[len(prefix) :].partition("/")[0] for value_path in paths]

    def _find(self, connection: sqlite3.Connection, path: str) -> Versioned | None:
        row = connection.execute(_GET, (self._value_bytes_max + SEAL_BYTES, path)).fetchone()
        if row is None:
            return None
        if isinstance(row[2], int):
            self._check_size(path, row[2] - SEAL_BYTES)
        version = self._database.integer(row[1])
        data = self._database.seal.data_of_value(path, version, self._database.blob(row[0]))
        if data is None:
            error = self._database.damage(f"the value of {path}, which is not as it was written")
            raise DamagedValueError(error, version)
        return Versioned(data, version)

    def _expect(self, connection: sqlite3.Connection, path: str, version: int) -> None:
        """Refuse a value that is at another version, or exists if `ABSENT` is expected; its data may be damaged."""
        row = connection.execute("SELECT version FROM metadata WHERE path = ?", (path,)).fetchone()
        found = ABSENT if row is None else self._database.integer(row[0])
        if found != version:
            raise other_version(path, found, version)

    def _first_version(self, connection: sqlite3.Connection) -> int:
        row = connection.execute("SELECT version FROM first_version").fetchone()
        return self._database.integer(row and row[0])
