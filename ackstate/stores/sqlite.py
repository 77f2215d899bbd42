"""The embedded default store: one SQLite database in its own directory, open in one process at a time.

Each mutating call is one transaction and one sync (WAL, ``synchronous=FULL``); calls of other threads that arrive
meanwhile share the next transaction (`ackstate.stores.sqlite_connection`).
`ackstate.stores.sqlite_database` describes the files of the directory and the checks of an opening.

An append is one row, under the id of its last entry: the number of its entries and their lengths, 4 bytes each, then
their bytes, and a seal. Rows are in a rowid table. Measured against ``WITHOUT ROWID`` with pages of 4 KiB: 1 KB entries
take 1.4 times their size instead of 4.6 times, and appending 100 KB takes 0.37 ms instead of 0.58 ms. Each ledger also
counts its entries, so that a row lost through damage is noticed.

SQLite stores no checksums. So each row ends with a seal: the CRC-32C of a random number of the store, the row's key and
its data. A flipped bit is noticed when the row is read, and so is a row of another place or another store.

A copy of an open store. A checkpoint copies pages from the log to the database at any time, but the next transaction
begins the log anew only after all of them are in the database: it then has another header. So while the header stays
the same, a copy of the database and, after it, of the log is the store at the end of the copy: whatever a checkpoint
changed in the database meanwhile is in the log too. If it has changed, both are copied again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import tempfile
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, final

import google_crc32c

from ackstate.errors import AckStateError, CorruptStateError
from ackstate.sealed import SEALED
from ackstate.stores.base import (
    ABSENT,
    METADATA_VALUE_BYTES_MAX,
    DamagedValueError,
    LedgerStore,
    MetadataStore,
    StoreError,
    StoreFullError,
    StoreLockedError,
    Versioned,
    children_prefix,
    fenced,
    no_ledger,
    other_version,
)
from ackstate.stores.sqlite_connection import SqliteConnection, opened_here
from ackstate.stores.sqlite_database import (
    DATABASE,
    check_no_links,
    check_not_lost,
    lock_directory,
    system_errors,
    unlock,
)
from ackstate.stores.sqlite_log import check_log

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

COPY_BYTES_MAX = 4 << 30
"""The default limit for the total size of a store's files that are copied, in bytes."""
SEAL_BYTES = 4
"""The size of a seal in bytes."""

_ENTRIES_KEY = struct.Struct("<cqq")  # row kind, ledger id, id of the last entry
_VALUE_KEY = struct.Struct("<cq")  # row kind, version; then the path
_ONE_ENTRY = struct.Struct("<II")  # the number of entries and the length of the only one
_WORD_BYTES = 4

_INSERT = "INSERT INTO entries (ledger_id, last_id, data) VALUES (?, ?, ?)"
# The rows are found through the index, but named by their own columns: so a damaged index cannot confuse two rows.
_READ = (
    "SELECT found.ledger_id, found.last_id, found.data"
    " FROM entries AS sought CROSS JOIN entries AS found ON found.rowid = sought.rowid"
    " WHERE sought.ledger_id = ? AND sought.last_id >= ? AND sought.last_id <= coalesce("
    "(SELECT min(last_id) FROM entries WHERE ledger_id = ? AND last_id >= ?), ?) ORDER BY sought.last_id"
)
# The same precaution: a damaged index may lead to a row of another ledger.
_DELETE = (
    "DELETE FROM entries WHERE rowid IN (SELECT found.rowid"
    " FROM entries AS sought CROSS JOIN entries AS found ON found.rowid = sought.rowid"
    " WHERE sought.ledger_id = ? AND found.ledger_id = ? LIMIT ?)"
)
# No arithmetic on the greatest entry id: text, which damage can make of a number, would become a number again.
_COUNT = (
    "UPDATE ledgers SET entry_count = ? WHERE id = ? AND fenced = 0 AND entry_count = ?"
    " AND ? = (SELECT coalesce(max(last_id), -1) FROM entries WHERE ledger_id = ?)"
)
_FIND = (
    "SELECT entry_count, fenced, (SELECT coalesce(max(last_id), -1) FROM entries WHERE ledger_id = id)"
    " FROM ledgers WHERE id = ?"
)
# Of a ledger that was deleted on a full disk, and whose rows did not all find room in the log at once.
_DELETED_COUNT = -1
_DELETED_AT_ONCE = 4096  # Rows; fewer where even these find no room.
# A damaged index may lead to a row of another owner, and callers delete some of the returned ledgers. A missing row has
# no owner.
_OWNED = (
    "SELECT found.owner, sought.id FROM ledgers AS sought LEFT JOIN ledgers AS found ON found.id = sought.id"
    " WHERE sought.owner = ? AND found.entry_count IS NOT -1 ORDER BY sought.id"
)
# Data above the limit is not even read.
_GET = "SELECT CASE WHEN length(data) <= ? THEN data END, version, length(data) FROM metadata WHERE path = ?"

_COPY_PREFIX = "ackstate-copy-"
_LOG = f"{DATABASE}-wal"
_CHUNK_BYTES = 1 << 20
_LOG_HEADER_BYTES = 32
_COPY_TRIES = 10


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
        self._remove_copy: Callable[[], object] = lambda: None  # once: when the store is closed, or the process ends
        self._path = Path(path)
        self._database = SqliteConnection(self._path, check_pages=check_pages)
        salted: int = google_crc32c.value(self._database.salt)
        self.ledgers = _SqliteLedgers(self._database, salted)
        """The logs."""
        self.metadata = _SqliteMetadata(self._database, salted, metadata_value_bytes_max)
        """The small values."""
        with suppress(AckStateError):  # Damage is found when it is read.
            self.ledgers.finish_deletes()

    def __repr__(self) -> str:
        return f"<SqliteStore {self._path}>"

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
            _copy_store(Path(path), Path(to), bytes_max=copy_bytes_max)
            return cls(to, check_pages=check_pages)
        place = Path(tempfile.mkdtemp(prefix=_COPY_PREFIX))
        copy = place / f"copy-of-{Path(path).absolute().name[:40]}"
        try:
            _copy_store(Path(path), copy, bytes_max=copy_bytes_max)
            store = cls(copy, check_pages=check_pages)
        except BaseException:
            _remove(place, os.getpid())
            raise
        store._remove_copy = weakref.finalize(store, _remove, place, os.getpid())
        return store

    def close(self) -> None:
        """Copy the log to the database as far as there is room, and unlock; no-op if closed."""
        self._database.close()
        self._remove_copy()


@final
class _SqliteLedgers(LedgerStore):
    def __init__(self, database: SqliteConnection, salted: int) -> None:
        self._database = database
        self._salted = salted  # The checksum of the store's random number.
        # Where the ledgers of this opening probably end, which spares reading it: the statement that counts new entries
        # checks it. Wrong after a call that was undone.
        self._ends: dict[int, int] = {}

    def _create(self, owner: str) -> int:
        def change(connection: sqlite3.Connection) -> int:
            insert = "INSERT INTO ledgers (owner, fenced, entry_count) VALUES (?, 0, 0)"
            ledger_id = connection.execute(insert, (owner,)).lastrowid
            assert ledger_id is not None
            self._ends[ledger_id] = 0
            return ledger_id

        return self._database.write(change)

    def _append_many(self, appends: list[tuple[int, list[bytes]]]) -> list[int | AckStateError]:
        outcomes: list[int | AckStateError] = []
        for outcome in self._database.write_all([partial(self._append, *each) for each in appends]):
            if isinstance(outcome, Exception) and not isinstance(outcome, AckStateError):
                raise outcome  # An error of ours.
            outcomes.append(outcome)
        return outcomes

    def _append(self, ledger_id: int, entries: list[bytes], connection: sqlite3.Connection) -> int:
        first, count = self._ends.get(ledger_id), len(entries)
        if first is None or not count:
            found, is_fenced = self._count_and_fence(connection, ledger_id)
            if first is None or is_fenced:
                raise fenced(ledger_id)
            return found - 1
        if connection.execute(_COUNT, (first + count, ledger_id, first, first - 1, ledger_id)).rowcount != 1:
            first, is_fenced = self._count_and_fence(connection, ledger_id)
            if is_fenced:
                raise fenced(ledger_id)
            if connection.execute(_COUNT, (first + count, ledger_id, first, first - 1, ledger_id)).rowcount != 1:
                raise self._database.damage(f"ledger {ledger_id}, whose {first} entries cannot be counted")
        last = first + count - 1
        if count == 1:
            data = _ONE_ENTRY.pack(1, len(entries[0])) + entries[0]
        else:
            data = b"".join([struct.pack(f"<{count + 1}I", count, *map(len, entries)), *entries])
        key = google_crc32c.extend(self._salted, _ENTRIES_KEY.pack(b"E", ledger_id, last))
        connection.execute(_INSERT, (ledger_id, last, data + google_crc32c.extend(key, data).to_bytes(4, "little")))
        self._ends[ledger_id] = last + 1
        return last

    def _read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        with self._database.reading() as connection:
            end = min(end, self._count_and_fence(connection, ledger_id)[0])
            if first >= end:
                return []
            rows = connection.execute(_READ, (ledger_id, first, ledger_id, end - 1, end - 1)).fetchall()
        entries: list[bytes] = []
        begin = following = None  # The first entry of the rows, and the one after the last so far.
        for found_id, last, row in rows:
            key = _ENTRIES_KEY.pack(b"E", ledger_id, last) if isinstance(last, int) else b""
            salted = google_crc32c.extend(self._salted, key)
            if found_id != ledger_id or not isinstance(row, bytes) or google_crc32c.extend(salted, row) != SEALED:
                what = f"entry {last} of ledger {ledger_id}, which is not as it was written"
                raise self._database.damage(what)
            (count,) = struct.unpack_from("<I", row)
            if following not in {None, last + 1 - count}:
                break
            begin = last + 1 - count if begin is None else begin
            following = last + 1
            at = _WORD_BYTES * (1 + count)
            for length in struct.unpack_from(f"<{count}I", row, _WORD_BYTES):
                entries.append(row[at : at + length])
                at += length
        if begin is None or following is None or begin > first or following < end:
            raise self._database.damage(f"entries missing in ledger {ledger_id}")
        return entries[first - begin : end - begin]

    def _last(self, ledger_id: int) -> int:
        with self._database.reading() as connection:
            return self._count_and_fence(connection, ledger_id)[0] - 1

    def _delete(self, ledger_id: int) -> None:
        def mark(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE ledgers SET entry_count = ? WHERE id = ?", (_DELETED_COUNT, ledger_id))

        try:
            self._database.write(partial(self._drop, ledger_id, -1))
        except StoreFullError:
            # The log holds each page from which a row is deleted.
            self._database.write(mark)
            self.finish_deletes()
        self._ends.pop(ledger_id, None)

    def finish_deletes(self) -> None:
        """Delete what is left of ledgers that were deleted on a full disk, as far as there is room."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT id FROM ledgers WHERE entry_count = ?", (_DELETED_COUNT,)).fetchall()
        for (ledger_id,) in rows:
            at_once, is_over = _DELETED_AT_ONCE, False
            while at_once and not is_over:
                try:
                    is_over = self._database.write(partial(self._drop, ledger_id, at_once))
                except StoreFullError:
                    at_once //= 8

    def _drop(self, ledger_id: int, at_most: int, connection: sqlite3.Connection) -> bool:
        """Delete rows of a ledger, and return whether none is left; then the ledger itself is deleted too."""
        if connection.execute(_DELETE, (ledger_id, ledger_id, at_most)).rowcount == at_most:
            return False
        connection.execute("DELETE FROM ledgers WHERE id = ?", (ledger_id,))
        return True

    def _fence(self, ledger_id: int) -> int:
        def change(connection: sqlite3.Connection) -> int:
            count, _ = self._count_and_fence(connection, ledger_id)
            connection.execute("UPDATE ledgers SET fenced = 1 WHERE id = ?", (ledger_id,))
            return count - 1

        return self._database.write(change)

    def _owned_by(self, owner: str) -> list[int]:
        with self._database.reading() as connection:
            rows = connection.execute(_OWNED, (owner,)).fetchall()
            for found, ledger_id in rows:
                if found != owner:
                    raise self._database.damage(f"ledger {ledger_id!r} of {found!r} where one of {owner} belongs")
            return [self._database.typed(int, ledger_id) for _, ledger_id in rows]

    def _owners(self) -> list[str]:
        with self._database.reading() as connection:
            # All rows: an open query keeps the log from being emptied, and an error would keep the query open.
            query = "SELECT DISTINCT owner FROM ledgers WHERE entry_count IS NOT ?"
            rows = connection.execute(query, (_DELETED_COUNT,)).fetchall()
            return [self._database.typed(str, owner) for (owner,) in rows]

    def _count_and_fence(self, connection: sqlite3.Connection, ledger_id: int) -> tuple[int, int]:
        """Return the number of entries of a ledger, and whether it is fenced (1 or 0)."""
        row = connection.execute(_FIND, (ledger_id,)).fetchone()
        if row is None or row[0] == _DELETED_COUNT:
            raise no_ledger(ledger_id)
        count, is_fenced, last = row
        # The count is stored twice, so that a lost or extra row is noticed. Damage can also turn a number into text.
        if not isinstance(last, int) or count != last + 1 or is_fenced not in {0, 1}:
            raise self._database.damage(f"ledger {ledger_id} with {count!r} entries, the last one {last!r}")
        return count, is_fenced


@final
class _SqliteMetadata(MetadataStore):
    def __init__(self, database: SqliteConnection, salted: int, value_bytes_max: int) -> None:
        super().__init__(value_bytes_max=value_bytes_max)
        self._database = database
        self._salted = salted

    def _get(self, path: str) -> Versioned | None:
        with self._database.reading() as connection:
            row = connection.execute(_GET, (self._value_bytes_max + SEAL_BYTES, path)).fetchone()
        if row is None:
            return None
        if row[0] is None and isinstance(row[2], int):
            self._check_size(path, row[2] - SEAL_BYTES)
        version = self._database.typed(int, row[1])
        sealed = self._database.typed(bytes, row[0])
        data = sealed[:-SEAL_BYTES]
        if google_crc32c.extend(self._salted_key(path, version), sealed) != SEALED:
            error = self._database.damage(f"the value of {path}, which is not as it was written")
            raise DamagedValueError(error, version)
        return Versioned(data, version)

    def _put(self, path: str, data: bytes, expected_version: int) -> int:
        def change(connection: sqlite3.Connection) -> int:
            self._expect(connection, path, expected_version)
            version = self._first_version(connection) if expected_version == ABSENT else expected_version + 1
            seal = google_crc32c.extend(self._salted_key(path, version), data).to_bytes(SEAL_BYTES, "little")
            connection.execute(
                "INSERT INTO metadata (path, data, version) VALUES (?, ?, ?)"
                " ON CONFLICT (path) DO UPDATE SET data = excluded.data, version = excluded.version",
                (path, data + seal, version),
            )
            return version

        return self._database.write(change)

    def _delete(self, path: str, expected_version: int) -> None:
        def change(connection: sqlite3.Connection) -> None:
            self._expect(connection, path, expected_version)
            first_version = max(self._first_version(connection), expected_version + 1)
            connection.execute("UPDATE first_version SET version = ?", (first_version,))
            connection.execute("DELETE FROM metadata WHERE path = ?", (path,))

        self._database.write(change)

    def _children(self, path: str) -> list[str]:
        prefix = children_prefix(path)
        with self._database.reading() as connection:
            # The character after the slash is a zero: the range holds exactly the paths that begin with the prefix.
            query = "SELECT path FROM metadata WHERE path > ? AND path < ?"
            rows = connection.execute(query, (prefix, f"{prefix[:-1]}0")).fetchall()
            paths = [self._database.typed(str, value_path) for (value_path,) in rows]
            return [value_path[len(prefix) :].partition("/")[0] for value_path in paths]

    def _salted_key(self, path: str, version: int) -> int:
        checksum: int = google_crc32c.extend(self._salted, _VALUE_KEY.pack(b"V", version) + path.encode())
        return checksum

    def _expect(self, connection: sqlite3.Connection, path: str, version: int) -> None:
        """Refuse a value that is at another version, or exists if `ABSENT` is expected; its data may be damaged."""
        row = connection.execute("SELECT version FROM metadata WHERE path = ?", (path,)).fetchone()
        found = ABSENT if row is None else self._database.typed(int, row[0])
        if found != version:
            raise other_version(path, found, version)

    def _first_version(self, connection: sqlite3.Connection) -> int:
        row = connection.execute("SELECT version FROM first_version").fetchone()
        return self._database.typed(int, row and row[0])


def _copy_store(directory: Path, place: Path, *, bytes_max: int) -> None:
    """Copy the files of a store to a new directory; nothing is left of it if this raises."""
    with system_errors(f"{directory}: cannot copy the store"):
        if not (directory / DATABASE).exists():
            check_no_links(directory)
            check_not_lost(directory)
            raise StoreError(f"{directory} is not an ackstate store: it holds no {DATABASE}")
        check_no_links(directory)
        place.mkdir(0o700, parents=True, exist_ok=True)
        if any(place.iterdir()):
            raise StoreError(f"{place} must be an empty directory, to copy {directory} there")
        try:
            _copy(directory, place, bytes_max)
            # With this name last: a copy of which a part is missing is no store.
            for name in (f"{DATABASE}.new", _LOG):
                with suppress(FileNotFoundError), (place / name).open("rb") as made:
                    os.fsync(made.fileno())
            (place / f"{DATABASE}.new").rename(place / DATABASE)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise


def _copy(directory: Path, place: Path, bytes_max: int) -> None:
    here = opened_here(directory)
    if here is not None:
        # Through its descriptor: to close another one would release the locks that SQLite has in this process.
        with here.reading():
            _copy_files(directory, place, bytes_max, here.descriptor)
        return
    try:
        lock = lock_directory(directory, fcntl.LOCK_SH)  # It cannot be opened, but be copied by others, too.
    except StoreLockedError:
        _copy_while_it_is_written(directory, place, bytes_max)
        return
    try:
        _copy_files(directory, place, bytes_max)
    finally:
        unlock(lock)


def _copy_while_it_is_written(directory: Path, place: Path, bytes_max: int) -> None:
    for tries_left in reversed(range(_COPY_TRIES)):
        before = _generation(directory)
        _copy_files(directory, place, bytes_max)
        if _generation(directory) == before:
            try:
                # Frames that are being written may be copied in part, and be followed by whole ones.
                check_log(place / _LOG, place / f"{DATABASE}.new")
            except CorruptStateError:
                if not tries_left:
                    raise
            else:
                return
    raise StoreError(f"{directory} is written too fast to be copied while it is open; try again, or close it")


def _generation(directory: Path) -> tuple[object, ...]:
    """Return what changes before a checkpoint can change a page of the database that the present log has not."""
    database = (directory / DATABASE).stat()
    try:
        with (directory / _LOG).open("rb") as log:
            header, file = log.read(_LOG_HEADER_BYTES), os.fstat(log.fileno()).st_ino
    except FileNotFoundError:
        header, file = b"", 0
    return database.st_ino, file, header, None if header else (database.st_mtime_ns, database.st_size)


def _copy_files(directory: Path, place: Path, bytes_max: int, descriptor: int = -1) -> None:
    """Copy the database, of which there may be a descriptor, and then its log."""
    files = [directory / name for name in (DATABASE, _LOG)]
    size = sum(file.stat().st_size for file in files if file.exists())
    if size > bytes_max:
        raise StoreError(
            f"{directory}: copy_bytes_max (--copy-bytes-max) must be at least the {size} bytes that the files of the"
            f" store have, got {bytes_max}; nothing was copied"
        )
    with _created(place / f"{DATABASE}.new") as made:
        if descriptor >= 0:
            offset = 0
            while data := os.pread(descriptor, _CHUNK_BYTES, offset):
                made.write(data)
                offset += len(data)
        else:
            with (directory / DATABASE).open("rb") as found:
                shutil.copyfileobj(found, made, _CHUNK_BYTES)
    with suppress(FileNotFoundError), (directory / _LOG).open("rb") as found, _created(place / _LOG) as made:
        shutil.copyfileobj(found, made, _CHUNK_BYTES)


def _created(path: Path) -> BinaryIO:
    """Create a file that only its owner may read, in the place of an earlier try."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def _remove(place: Path, process: int) -> None:
    if process == os.getpid():  # not in a forked child
        shutil.rmtree(place, ignore_errors=True)
