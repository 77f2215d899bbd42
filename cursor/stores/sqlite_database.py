"""How is an SQLite database opened so that it is ours alone, whole, and on the disk?

The directory holds ``ackstate.sqlite3``, its write-ahead log while it is open or after a crash (never move
one without the other), and ``LOCK``, which names the process that has it open. ``LOCK`` stays; the kernel
lets go of the lock on it when the process ends, however it ends.

Opening copies the whole log into the database and syncs it. So what a killed process wrote and never synced,
or what a failed sync left in the kernel's cache, is on the disk before a caller can read it. The price: a
store that was not closed does not open on a full disk.

Opening checks the header, the schema and nothing that grows with the store: ``PRAGMA quick_check`` would cost
0.4 ms for each MiB, with all of it in the cache. Damaged pages are found when they are read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import struct
import threading
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, final

from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from cursor.store import StoreError, StoreFullError, StoreLockedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

_DATABASE = "ackstate.sqlite3"
_LOCK = "LOCK"
_UNFINISHED = "ackstate.sqlite3.new"
# What a crash while a store is made can leave behind, beside LOCK.
_LEFTOVERS = frozenset({_UNFINISHED, f"{_UNFINISHED}-journal", f"{_UNFINISHED}-wal", f"{_UNFINISHED}-shm"})
STORE_FILES = _LEFTOVERS | {_LOCK, _DATABASE, f"{_DATABASE}-journal", f"{_DATABASE}-wal", f"{_DATABASE}-shm"}
"""Every name that a store's directory may hold."""

# The header of an SQLite file: https://www.sqlite.org/fileformat2.html section 1.3
_HEADER_SIZE = 100
_MAGIC = b"SQLite format 3\0"
_FORMAT_VERSION_OFFSET = 60
_APPLICATION_ID_OFFSET = 68
_APPLICATION_ID = int.from_bytes(b"acks", "big")
_FORMAT_VERSION = 1

# SQLite keeps these texts as they stand here, and opening compares them.
_SCHEMA = (
    # AUTOINCREMENT: the id of a deleted ledger never comes back.
    "CREATE TABLE ledgers (id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL,"
    " fenced INTEGER NOT NULL, entry_count INTEGER NOT NULL)",
    "CREATE INDEX ledgers_by_owner ON ledgers (owner)",
    "CREATE TABLE entries (ledger_id INTEGER NOT NULL, entry_id INTEGER NOT NULL, data BLOB NOT NULL,"
    " PRIMARY KEY (ledger_id, entry_id))",
    "CREATE TABLE metadata (path TEXT NOT NULL PRIMARY KEY, data BLOB NOT NULL, version INTEGER NOT NULL)",
    # One row, above every version of every deleted value: one that comes back never matches an old version.
    "CREATE TABLE first_version (version INTEGER NOT NULL)",
)
_PRAGMAS = (
    # Exclusive also keeps the index of the log out of a shared file, which a full disk could tear away.
    "locking_mode = EXCLUSIVE",
    "journal_mode = WAL",
    "synchronous = FULL",
    "cell_size_check = ON",
    # Some distributions overwrite deleted pages with zeros, which doubles the price of a delete.
    "secure_delete = OFF",
    # A log blown up by one huge transaction is cut back to this many bytes.
    f"journal_size_limit = {8 << 20}",
    "wal_checkpoint(TRUNCATE)",
)
# The codes that our fixed statements meet on a damaged file only.
_DAMAGE = frozenset(
    {
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
    }
)


@final
class SqliteDatabase:
    """The only connection, and whether it may still be used."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._refusal = ""  # Why nothing may be done any more; empty while all is well.
        try:
            self._lock_file, self._connection = _open(directory)
        except OSError as error:
            full = error.errno == errno.ENOSPC
            refusal = StoreFullError if full else StoreError
            raise refusal(f"{directory}: cannot open the store: {error.strerror}") from error
        except sqlite3.Error as error:
            raise self._in_our_words(error) from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection for some queries, which see one state."""
        with self._lock:
            self._check_usable()
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise self._in_our_words(error) from error

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection for a transaction, synced at the end or rolled back at an exception."""
        with self._lock:
            self._check_usable()
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                if _primary_code(error) not in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG}:
                    self._distrust(error)
                raise self._in_our_words(error) from error
            except BaseException:
                self._roll_back()
                raise

    def close(self) -> None:
        """Let go of the connection first and of the lock last."""
        with self._lock:
            self._refusal = self._refusal or f"{self._directory}: the store is closed"
            # What does not fit on a full disk stays in the log for the next opening.
            with suppress(sqlite3.Error):
                self._connection.close()
            self._lock_file.close()

    def damage(self, found: str) -> CorruptStateError:
        """Return the error for a database that says what it cannot say."""
        database = str(self._directory / _DATABASE)
        return CorruptStateError(database, offset=0, expected="sound pages", found=found)

    def integer(self, value: object) -> int:
        """Return what a column holds if it is an integer; damage can make it anything."""
        if not isinstance(value, int):
            raise self.damage(f"{value!r} where a number belongs")
        return value

    def blob(self, value: object) -> bytes:
        """Return what a column holds if it is bytes."""
        if not isinstance(value, bytes):
            raise self.damage(f"{value!r} where bytes belong")
        return value

    def text(self, value: object) -> str:
        """Return what a column holds if it is text."""
        if not isinstance(value, str):
            raise self.damage(f"{value!r} where text belongs")
        return value

    def _check_usable(self) -> None:
        if self._refusal:
            raise StoreError(self._refusal)

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._distrust(error)

    def _distrust(self, error: sqlite3.Error) -> None:
        # The cached pages may differ from those on the disk now; opening anew reads and syncs them again.
        self._refusal = f"{self._directory}: a write failed ({error}); close the store and open it again"

    def _in_our_words(self, error: sqlite3.Error) -> AckStateError:
        code = _primary_code(error)
        if code in _DAMAGE:
            return self.damage(str(error))
        if code == sqlite3.SQLITE_FULL:
            return StoreFullError(f"{self._directory}: the disk is full; nothing was written")
        if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            return StoreLockedError(f"{self._directory}: another program reads the database")
        return StoreError(f"{self._directory}: {error}")


def _primary_code(error: sqlite3.Error) -> int:
    # Without a code it is not SQLite that complains but Python, about a text that is no UTF-8.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF


def _open(directory: Path) -> tuple[BinaryIO, sqlite3.Connection]:
    """Lock a directory, make its database if there is none, and connect."""
    _prepare(directory)
    lock = _claim(directory)
    try:
        database = directory / _DATABASE
        # A link that leads nowhere exists too: only an absent name is a new store.
        if os.path.lexists(database):
            _check_header(database)
        else:
            _create(directory)
        # Each time, because whoever made the database may have died between the rename and this.
        _sync(directory)
        return lock, _connect(database)
    except BaseException:
        lock.close()
        raise


def _prepare(directory: Path) -> None:
    """Make a missing directory, and refuse one that holds something else before anything in it is touched."""
    if not directory.exists():
        directory.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in directory.iterdir()}
    if _DATABASE in names:
        # Without LOCK nobody has it open, so its header may be read. Otherwise that waits for the lock:
        # closing the file would drop the locks that SQLite holds on it elsewhere in this process.
        if _LOCK not in names:
            _check_header(directory / _DATABASE)
    elif names and not (_LOCK in names and names <= _LEFTOVERS | {_LOCK}):
        foreign = min(names - _LEFTOVERS - {_LOCK} or names)
        raise StoreError(f"{directory} is not an ackstate store: it holds {foreign} and no {_DATABASE}")


def _claim(directory: Path) -> BinaryIO:
    """Take the lock for as long as the returned file is open."""
    lock = (directory / _LOCK).open("a+b", buffering=0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read(20).decode("ascii", "replace").strip()
        lock.close()
        raise StoreLockedError(f"{directory} is open in process {holder or 'unknown'}") from None
    except BaseException:
        lock.close()
        raise
    # The number is for people: a disk too full to take it must not keep the store shut.
    with suppress(OSError):
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n".encode())
    return lock


def _check_header(database: Path) -> None:
    """Refuse a file that is not ours, or newer, before SQLite touches it."""
    with database.open("rb") as file:
        header = file.read(_HEADER_SIZE)
    name = str(database)
    if len(header) < _HEADER_SIZE:
        size = len(header)
        raise CorruptStateError(name, offset=size, expected=f"a header of {_HEADER_SIZE} bytes", found=f"{size} bytes")
    if not header.startswith(_MAGIC):
        raise CorruptStateError(name, offset=0, expected=_MAGIC, found=header[: len(_MAGIC)])
    (application_id,) = struct.unpack_from(">I", header, _APPLICATION_ID_OFFSET)
    if application_id != _APPLICATION_ID:
        raise CorruptStateError(
            name,
            offset=_APPLICATION_ID_OFFSET,
            expected=f"application id {_APPLICATION_ID:#x} (an ackstate store)",
            found=f"{application_id:#x}",
        )
    (version,) = struct.unpack_from(">I", header, _FORMAT_VERSION_OFFSET)
    if version > _FORMAT_VERSION:
        raise UnsupportedVersionError(
            f"{name} has format version {version}; this release reads up to version {_FORMAT_VERSION}"
        )
    if version < _FORMAT_VERSION:
        raise CorruptStateError(
            name, offset=_FORMAT_VERSION_OFFSET, expected=f"format version {_FORMAT_VERSION}", found=version
        )


def _create(directory: Path) -> None:
    """Build an empty database under another name and rename it, so that a crash leaves all of it or none."""
    # LOCK first: what a crash leaves counts as ours only beside it.
    _sync(directory)
    _sync_names_above(directory)
    for name in _LEFTOVERS:
        (directory / name).unlink(missing_ok=True)
    unfinished = directory / _UNFINISHED
    with closing(sqlite3.connect(unfinished, isolation_level=None)) as connection:
        # Synced as a whole below. Built with a rollback journal, so that the ids are in the file's header.
        for statement in (
            "PRAGMA synchronous = OFF",
            "BEGIN",
            f"PRAGMA application_id = {_APPLICATION_ID}",
            f"PRAGMA user_version = {_FORMAT_VERSION}",
            *_SCHEMA,
            "INSERT INTO first_version VALUES (0)",
            "COMMIT",
            "PRAGMA journal_mode = WAL",
        ):
            connection.execute(statement)
    _sync(unfinished)
    unfinished.rename(directory / _DATABASE)


def _connect(database: Path) -> sqlite3.Connection:
    """Open a database whose header was found good; it is not made anew if it has gone meanwhile."""
    uri = f"{database.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").fetchall()
        _check_whole(database, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_whole(database: Path, connection: sqlite3.Connection) -> None:
    """Refuse a database that was cut or has other tables. Its log is empty, so its size is what it says."""
    ((page_count,),) = connection.execute("PRAGMA page_count")
    ((page_size,),) = connection.execute("PRAGMA page_size")
    expected, found = page_count * page_size, database.stat().st_size
    if found < expected:
        raise CorruptStateError(str(database), offset=found, expected=f"{expected} bytes", found=f"{found} bytes")
    rows = connection.execute("SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
    if {sql for (sql,) in rows} != set(_SCHEMA):
        raise CorruptStateError(str(database), offset=0, expected="our tables", found="others")


def _sync(path: Path) -> None:
    """Sync a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_names_above(directory: Path) -> None:
    """Sync the names on the way down to a directory: whoever made them may have died before they were."""
    for path in directory.resolve().parents:
        # A directory that we may not read was made and synced by somebody else.
        with suppress(PermissionError):
            _sync(path)
        if path.is_mount():
            break
