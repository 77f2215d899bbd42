"""Opens an SQLite database so that it is locked, undamaged, and on the disk.

The directory holds ``ackstate.sqlite3``, its write-ahead log while it is open or after a crash (never move one without
the other), ``LOCK`` with the id of the process that has it open, for people only, and ``MADE``, which is there as soon
as the database has its name: a directory with it and without a database is a store that lost its database, not a new
one. It is 12 bytes: ``ACKQ``, the version of the mark (1, little-endian), and the CRC-32C of these eight.

SQLite's own locks belong to the process, and are released when it closes any descriptor of the file. So the directory
itself is locked too, before the database is first opened; the kernel releases that lock whenever the process ends.

Before SQLite sees the log, the log is synced, read from the disk, and checked (`ackstate.stores.sqlite_log`): the
kernel's cache may differ from the disk after a failed sync. Opening copies the whole log into the database and syncs
it, so that a killed process's unsynced writes are on the disk before a caller can read them.

Opening checks the header, the schema and, by default, every page, by ``PRAGMA integrity_check``: a row written next to
a damaged key might never be found again. Bytes that changed within a row are noticed when it is read, as is a damaged
page without that check. It takes 0.1 s (entries of 20 kB) to 0.4 s (of 150 bytes) for 100 MB, 0.1 s more if none of it
is in the kernel's cache, because the file is read from front to back first; else 1.3 to 2.3 s.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import sqlite3
import struct
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.sealed import seal, unseal
from ackstate.stores.base import StoreError, StoreFullError, StoreLockedError
from ackstate.stores.sqlite_log import check_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The numbers of the system errors for a lack of room."""
LOCK = "LOCK"
MADE = "MADE"
_UNFINISHED_MARK = "MADE.new"
_MARK_MAGIC = b"ACKQ"
_MARK_VERSION = 1
_MARK = struct.Struct("<4sB3x")
_MARK_BYTES_MAX = 1024  # A newer one may be longer.

DATABASE = "ackstate.sqlite3"
"""The name of the database in a store's directory."""
_UNFINISHED = "ackstate.sqlite3.new"
# The files, in addition to LOCK, that a crash during the creation of a store can leave behind.
_LEFTOVERS = frozenset({_UNFINISHED, f"{_UNFINISHED}-journal", f"{_UNFINISHED}-wal", f"{_UNFINISHED}-shm"})
# Files that opening a store reads or writes in place; all its other files are removed or replaced.
_OPENED = frozenset({LOCK, MADE, *(f"{DATABASE}{suffix}" for suffix in ("", "-journal", "-wal", "-shm"))})
STORE_FILES = _OPENED | _LEFTOVERS | {_UNFINISHED_MARK}
"""Every name that a store's directory may hold."""

# The header of an SQLite file: https://www.sqlite.org/fileformat2.html section 1.3
_HEADER_SIZE = 100
_MAGIC = b"SQLite format 3\0"
_FORMAT_VERSION_OFFSET = 60
_APPLICATION_ID_OFFSET = 68
_APPLICATION_ID = int.from_bytes(b"acks", "big")
FORMAT_VERSION = 3
LOG_BYTES_KEPT = 256 << 10
"""The room of the log that a full disk leaves to it, so that ledgers can be deleted."""
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE, of linux/falloc.h
_libc = ctypes.CDLL(None)

_PRAGMAS = (
    # First: a foreign schema must have no effect before the schema is checked.
    "trusted_schema = OFF",
    "cell_size_check = ON",
    # Exclusive also avoids a shared file for the index of the log, which a full disk could truncate.
    "locking_mode = EXCLUSIVE",
    "journal_mode = WAL",
    "synchronous = FULL",
    # Some distributions overwrite deleted pages with zeros, which doubles the cost of a delete.
    "secure_delete = OFF",
    # A log that one huge transaction has enlarged is truncated to this many bytes.
    f"journal_size_limit = {8 << 20}",
    "wal_checkpoint(TRUNCATE)",
)

# SQLite stores these texts unchanged.
_SCHEMA = (
    # AUTOINCREMENT: the id of a deleted ledger is never used again.
    "CREATE TABLE ledgers (id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL,"
    " fenced INTEGER NOT NULL, entry_count INTEGER NOT NULL)",
    "CREATE INDEX ledgers_by_owner ON ledgers (owner)",
    # A row is what one append added to a ledger, under the id of its last entry.
    "CREATE TABLE entries (ledger_id INTEGER NOT NULL, last_id INTEGER NOT NULL, data BLOB NOT NULL,"
    " PRIMARY KEY (ledger_id, last_id))",
    "CREATE TABLE metadata (path TEXT NOT NULL PRIMARY KEY, data BLOB NOT NULL, version INTEGER NOT NULL)",
    # One row, above every version of every deleted value: a value that is created again never matches an old version.
    "CREATE TABLE first_version (version INTEGER NOT NULL)",
    # One row.
    "CREATE TABLE identity (salt BLOB NOT NULL)",
)
_ALL_OBJECTS = "SELECT type, name, tbl_name, sql FROM main.sqlite_master"

# The finding of the check for a page that cannot be read, which is no damage.
_UNREAD = re.compile(r"unable to get the page\. error code=(\d+)")


def open_database(directory: Path, *, check_pages: bool) -> tuple[int, int, sqlite3.Connection]:
    """Lock a directory, create its database if there is none, check it, and connect."""
    # The first descriptor that is returned holds the lock; the second one is of the database. The caller translates
    # `sqlite3.Error`.
    with system_errors(f"{directory}: cannot open the store"):
        _prepare(directory)
        database = directory / DATABASE
        lock = lock_directory(directory, fcntl.LOCK_EX)
        try:
            # Before LOCK is created: a foreign directory is left unchanged.
            if database.exists():
                _check_header(database)
            _sign(directory)
            return lock, *_open_claimed(directory, check_pages=check_pages)
        except BaseException:
            unlock(lock)
            raise


def _open_claimed(directory: Path, *, check_pages: bool) -> tuple[int, sqlite3.Connection]:
    """Connect, after creating the database if there is none; the header of an existing one was checked."""
    database, log = directory / DATABASE, directory / f"{DATABASE}-wal"
    if database.exists():
        _settle(log)
        check_log(log, database)
    else:
        check_not_lost(directory)
        _create(directory)
    # Each time, because the process that created the database may have died between the rename and this.
    sync_path(directory)
    if not _is_marked(directory):
        _make_mark(directory)
    if check_pages:
        # Into the kernel's cache in one sweep: the check reads the pages in the order of the trees.
        with database.open("rb") as file:
            while file.read(1 << 20):
                pass
    descriptor = os.open(database, os.O_RDWR | os.O_CLOEXEC)
    try:
        connection = _connect(database, check_pages=check_pages)
        _keep_room(log)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, connection


def _keep_room(log: Path) -> None:
    """Give the log room beyond its end, so that a delete needs none; a disk without this room is no reason to fail."""
    descriptor = os.open(log, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Not `os.posix_fallocate`, which would also enlarge the file.
        _libc.fallocate(descriptor, _KEEP_SIZE, ctypes.c_longlong(0), ctypes.c_longlong(LOG_BYTES_KEPT))
    finally:
        os.close(descriptor)


def check_not_lost(directory: Path) -> None:
    """Refuse a directory in which a store was created and whose database is missing."""
    if _is_marked(directory):
        database = str(directory / DATABASE)
        raise CorruptStateError(database, offset=0, expected="the database of a store that was made", found="none")


def _settle(log: Path) -> None:
    """Settle the log, if there is one, so that it is read as it is on the disk."""
    # Otherwise SQLite could copy a transaction to the database that is not in the log on the disk, and a power cut
    # during the copy would leave a permanent part of it there.
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fdatasync(descriptor)
        # After a failed sync the pages are clean, so that a later sync skips them, but they can still be read. The
        # kernel drops clean pages when advised that they are not needed, and then reads the bytes of the disk.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def check_no_links(directory: Path) -> None:
    """Refuse a store with a symbolic link in the place of a file: it could lead anywhere."""
    for name in sorted(_OPENED):
        if (directory / name).is_symlink():
            raise StoreError(f"{directory / name} must be a plain file, got a symbolic link; nothing was changed")


def _prepare(directory: Path) -> None:
    """Create a missing directory, and refuse one with foreign files before anything in it is touched."""
    if not directory.exists():
        directory.mkdir(0o700, parents=True, exist_ok=True)
    check_no_links(directory)
    names = {path.name for path in directory.iterdir()}
    if DATABASE in names:
        # Its header is checked under the lock: closing the file here would release the locks that SQLite holds on it
        # elsewhere in this process.
        return
    if MADE in names and (names <= STORE_FILES or (directory / MADE).read_bytes().startswith(_MARK_MAGIC)):
        check_not_lost(directory)
    elif names and not (LOCK in names and names <= _LEFTOVERS | {LOCK}):
        foreign = min(names - _LEFTOVERS - {LOCK} or names)
        raise StoreError(f"{directory} is not an ackstate store: it holds {foreign} and no {DATABASE}")


def _check_header(database: Path) -> None:
    """Refuse a file that is foreign, or of another version, before SQLite touches it."""
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
    if not version:
        expected = f"format version {FORMAT_VERSION}"
        raise CorruptStateError(name, offset=_FORMAT_VERSION_OFFSET, expected=expected, found=version)
    if version != FORMAT_VERSION:
        raise UnsupportedVersionError(
            f"{name} has format version {version}; this release reads version {FORMAT_VERSION}"
        )


def _create(directory: Path) -> None:
    """Create an empty database under a temporary name and rename it, so that a crash leaves all of it or none."""
    # LOCK first: the files that a crash leaves are recognised as ours only if LOCK is there.
    sync_path(directory)
    sync_names_above(directory)
    for name in _LEFTOVERS:
        (directory / name).unlink(missing_ok=True)
    unfinished = directory / _UNFINISHED
    # SQLite gives its logs the mode of the database.
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(sqlite3.connect(unfinished, isolation_level=None)) as connection:
        # Synced as a whole below. Created with a rollback journal, so that the ids are in the file's header.
        for statement in (
            "PRAGMA synchronous = OFF",
            "BEGIN",
            f"PRAGMA application_id = {_APPLICATION_ID}",
            f"PRAGMA user_version = {FORMAT_VERSION}",
            *_SCHEMA,
            "INSERT INTO first_version VALUES (0)",
            "INSERT INTO identity VALUES (randomblob(8))",
            "COMMIT",
            "PRAGMA journal_mode = WAL",
        ):
            connection.execute(statement)
    sync_path(unfinished)
    unfinished.rename(directory / DATABASE)


def _connect(database: Path, *, check_pages: bool) -> sqlite3.Connection:
    """Open a database whose header was checked; do not create it if it was removed in the meantime."""
    uri = f"{database.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").fetchall()
        _check_whole(database, connection)
        if check_pages:
            _check_pages(database, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_whole(database: Path, connection: sqlite3.Connection) -> None:
    """Refuse a database that was truncated or has other tables."""
    # Its log is empty, so the file must have the size that its header states.
    ((page_count,),) = connection.execute("PRAGMA page_count")
    ((page_size,),) = connection.execute("PRAGMA page_size")
    expected, found = page_count * page_size, database.stat().st_size
    if found < expected:
        raise CorruptStateError(str(database), offset=found, expected=f"{expected} bytes", found=f"{found} bytes")
    # A flipped bit in the name of a column would make cursors unreadable in a way that no repair mends.
    with closing(sqlite3.connect(":memory:")) as pattern:
        for statement in _SCHEMA:
            pattern.execute(statement)
        is_ours = sorted(connection.execute(_ALL_OBJECTS), key=repr) == sorted(pattern.execute(_ALL_OBJECTS), key=repr)
    roots = [root for (root,) in connection.execute("SELECT rootpage FROM main.sqlite_master")]
    if not is_ours or len(set(roots)) < len(roots):
        raise CorruptStateError(
            str(database), offset=0, expected="our tables, each with pages of its own", found="others"
        )


def _check_pages(database: Path, connection: sqlite3.Connection) -> None:
    """Refuse a database with damaged pages."""
    (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        unread = _UNREAD.search(str(found))
        if unread and int(unread[1]) & 0xFF == sqlite3.SQLITE_IOERR:
            raise StoreError(f"{database} cannot be read: {found}")
        raise CorruptStateError(str(database), offset=0, expected="sound pages", found=found)


def _is_marked(directory: Path) -> bool:
    """Return whether a store was created in a directory; `CorruptStateError` if its mark is damaged."""
    try:
        with (directory / MADE).open("rb") as file:
            found = file.read(_MARK_BYTES_MAX)
    except FileNotFoundError:
        return False
    _, reader = unseal(found, _MARK, _MARK_MAGIC, _MARK_VERSION, what=str(directory / MADE))
    reader.finish()
    return True


def _make_mark(directory: Path) -> None:
    """Record, all or nothing, that a store was created here; the name of its database was synced before."""
    unfinished = directory / _UNFINISHED_MARK
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(seal(_MARK.pack(_MARK_MAGIC, _MARK_VERSION)))
    sync_path(unfinished)
    unfinished.rename(directory / MADE)
    sync_path(directory)


def _sign(directory: Path) -> None:
    """Write the id of this process to ``LOCK``."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # A disk without room for it must not keep the store closed.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
    finally:
        os.close(descriptor)


def lock_directory(directory: Path, kind: int) -> int:
    """Lock a directory and return its descriptor, which holds the lock; `StoreLockedError` if it is open or copied."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise StoreLockedError(f"{directory} is open in process {_holder(directory)}, or is being copied") from None
        raise
    return descriptor


def _holder(directory: Path) -> str:
    try:
        return (directory / LOCK).read_text(encoding="ascii", errors="replace")[:20].strip() or "unknown"
    except OSError:
        return "unknown"


def unlock(descriptor: int) -> None:
    """Unlock a directory. Closing is not enough: it would stay locked while a forked child has it open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names_above(directory: Path) -> None:
    """Sync the names of all directories above one: the process that created them may have died before its sync."""
    for path in directory.resolve().parents:
        # A directory that this process is not allowed to read was created and synced by another user.
        with suppress(PermissionError):
            sync_path(path)
        if path.is_mount():
            break


@contextmanager
def system_errors(what: object) -> Iterator[None]:
    """Turn an error of the operating system into a `StoreError`, and a full disk into a `StoreFullError`."""
    try:
        yield
    except OSError as error:
        refusal = StoreFullError if error.errno in FULL else StoreError
        raise refusal(f"{what}: {error.strerror or error}") from error
