"""Groups calls from many threads into one connection and one sync.

A mutating call joins the open group. The first call of a group to get the group's lock is its leader: it waits for the
connection, closes the group, and executes all of its calls in one transaction, with a savepoint for each, so that a
refused call undoes only its own changes. Calls that arrive meanwhile form the next group. So a single call never waits
for others, and concurrent calls share a sync. The other calls of a group return their own outcomes without waiting for
the connection.

Locks are taken in this order: the group's, the connection's, the one for joining. An interrupted leader
(`KeyboardInterrupt`) releases all of them; unless the group is over by then, its next call becomes the leader.

For a savepoint, SQLite copies each page that the call changes, beyond 64 KiB into the directory for temporary files;
no room there counts as a full disk.

On a full disk the log could grow to the last byte, and could then never be copied to the database, which has no room
to grow. So before each commit the database file is given the room of all its pages: the log can be emptied at any time.
A transaction that finds no room empties the log, which keeps the part of its room that a delete needs, and each of its
calls is tried once more, alone.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, final
from weakref import WeakValueDictionary

from ackstate.errors import AckStateError, CorruptStateError
from ackstate.stores.base import StoreError, StoreFullError, StoreLockedError
from ackstate.stores.sqlite_database import DATABASE, FORMAT_VERSION, FULL, LOG_BYTES_KEPT, open_database, unlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_Result = TypeVar("_Result")

# The errors that our fixed statements can meet only in a damaged file.
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

# The error message for a damaged file may be invalid UTF-8, which Python reports as a UnicodeDecodeError.
_ERRORS = (sqlite3.Error, UnicodeDecodeError)

_NAME_OF_TYPE: dict[type, str] = {int: "a number belongs", bytes: "bytes belong", str: "text belongs"}

_MAKE_ROOM = (
    "PRAGMA wal_checkpoint",
    f"PRAGMA journal_size_limit = {LOG_BYTES_KEPT}",
    # A log is cut to its limit by the first commit after it was emptied: one that changes nothing.
    f"PRAGMA user_version = {FORMAT_VERSION}",
)

_OPENED: WeakValueDictionary[str, SqliteConnection] = WeakValueDictionary()


def opened_here(directory: Path) -> SqliteConnection | None:
    """Return the connection that this process has to a store, or that another thread is opening."""
    found = _OPENED.get(os.path.realpath(directory))
    return found if found is not None and found.is_of_this_process else None


@final
class _Call:
    """One caller's change, and its outcome: the result, or the error, of which each call has its own instance."""

    __slots__ = ("change", "error", "is_withdrawn", "result")

    def __init__(self, change: Callable[[sqlite3.Connection], Any]) -> None:
        self.change = change  # Runs in any thread, and again if that thread is interrupted.
        self.result: Any = None
        self.error: Exception | None = None
        # Not to be executed, or not again: it was committed, or its caller was interrupted and has returned.
        self.is_withdrawn = False


@final
class _Group:
    """Calls that share a sync, in order of execution."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # Held by the leader.
        self.calls: list[_Call] = []
        self.is_over = False  # Each call has its outcome.


@final
class SqliteConnection:
    """The only connection to a store's database, which refuses calls after a failure; thread-safe."""

    def __init__(self, directory: Path, *, check_pages: bool) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # Held during each use of the connection.
        self._joining = threading.Lock()  # Held briefly, to join the open group or to close it.
        self._open_group = _Group()
        self._process = os.getpid()
        self._refusal = f"{directory}: the store is not open"  # Why every call is refused; empty while it is usable.
        self._is_open = False
        self._place = os.path.realpath(directory)
        if opened_here(directory) is None:
            _OPENED[self._place] = self
        with self._lock:
            try:
                self._claim, self.descriptor, self._connection = open_database(directory, check_pages=check_pages)
            except BaseException as error:
                self._forget()
                if isinstance(error, _ERRORS):
                    raise self._in_our_words(error) from error
                raise
            # Only `close` closes the connection: a forked child that dropped it would copy the log to the database and
            # remove it, while the parent still writes to it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
            self._is_open, self._refusal = True, ""
        try:
            with self.reading() as connection:
                row = connection.execute("SELECT salt FROM identity").fetchone()
            self.salt = self.typed(bytes, row and row[0])  # a random number of the store, of 8 bytes
            ((self._page_size,),) = self._connection.execute("PRAGMA page_size")
        except BaseException:
            self.close()
            raise

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process opened the store, and no process of which it is a forked child."""
        return self._process == os.getpid()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection for some queries, which all see one state."""
        if self._process != os.getpid():
            raise self._forked()
        with self._lock:
            if not self._refusal and self._connection.in_transaction:
                self._roll_back()
            if self._refusal:
                raise StoreError(self._refusal)
            try:
                yield self._connection
            except _ERRORS as error:
                raise self._in_our_words(error) from error

    def write(self, change: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Execute a change, sync, and return its result; a change that raises leaves no trace."""
        # It is called in any thread, and again if that thread is interrupted.
        (outcome,) = self.write_all((change,))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def write_all(self, changes: Sequence[Callable[[sqlite3.Connection], _Result]]) -> list[_Result | Exception]:
        """Execute changes in one transaction, each by itself, and return the result of each, or its error."""
        if self._process != os.getpid():
            raise self._forked()
        if self._refusal:
            raise StoreError(self._refusal)
        calls = list(map(_Call, changes))
        try:
            with self._joining:
                group = self._open_group
                group.calls += calls
            with group.lock:
                if not group.is_over:
                    self._lead(group)
        except BaseException:
            for call in calls:
                call.is_withdrawn = True
            raise
        return [call.result if call.error is None else call.error for call in calls]

    def close(self) -> None:
        """Close the connection first, and the lock last; no-op if closed, or in a forked child."""
        if not self.is_of_this_process:
            return
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._forget()
            self._refusal = self._refusal or f"{self._directory}: the store is closed"
            # On a full disk, the rest of the log is left for the next opening.
            with suppress(sqlite3.Error):
                self._connection.close()
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._connection))
            # Not earlier: closing any descriptor of the database releases SQLite's locks on it.
            os.close(self.descriptor)
            unlock(self._claim)

    def __del__(self) -> None:
        self.close()

    def _forget(self) -> None:
        if _OPENED.get(self._place) is self:
            del _OPENED[self._place]

    def damage(self, found: str) -> CorruptStateError:
        """Return the error for a database with impossible contents."""
        database = str(self._directory / DATABASE)
        return CorruptStateError(database, offset=0, expected="sound pages", found=found)

    def typed(self, kind: type[_Result], value: object) -> _Result:
        """Return the value of a column if it is of a type; damage can change it."""
        if not isinstance(value, kind):
            raise self.damage(f"{value!r} where {_NAME_OF_TYPE[kind]}")
        return value

    def _forked(self) -> StoreError:
        # Raised before a lock is taken, which another thread may have held when this process was forked.
        forked = f"{self._directory}: the store was open when this process was forked; its parent has it"
        return StoreError(self._refusal or forked)

    def _lead(self, group: _Group) -> None:
        """Close a group and give each of its calls an outcome. The caller holds the group's lock."""
        with self._lock:
            with self._joining:
                if self._open_group is group:
                    self._open_group = _Group()
            calls = []
            for call in group.calls:
                if not call.is_withdrawn:
                    call.error = None  # That under an interrupted leader.
                    calls.append(call)
            if not self._refusal and self._connection.in_transaction:
                self._roll_back()
            if self._refusal:
                _fail(calls, lambda: StoreError(self._refusal))
            elif not self._has_committed(calls):
                for call in calls:
                    if self._has_made_room():
                        call.error = None
                        self._has_committed([call])
            group.is_over = True

    def _has_committed(self, calls: list[_Call]) -> bool:
        """Execute calls in one transaction and give each its outcome; return False if the disk is full."""
        is_committing = False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for call in calls:
                self._execute(call, is_alone=len(calls) == 1)
            is_committing = True
            if self._connection.in_transaction:
                # The room of all pages, those that only the log has so far included.
                ((page_count,),) = self._connection.execute("PRAGMA page_count")
                size, enough = os.fstat(self.descriptor).st_size, page_count * self._page_size
                if enough > size:
                    os.posix_fallocate(self.descriptor, size, enough - size)
                self._connection.execute("COMMIT")
            for call in calls:
                call.is_withdrawn = True
        except (sqlite3.Error, OSError) as error:
            return self._undo(calls, error, is_committing=is_committing)
        except BaseException:
            # This thread was interrupted. Unless the transaction was committed, the group's next call leads.
            if is_committing and not self._connection.in_transaction:
                for call in calls:
                    call.is_withdrawn = True
            raise
        return True

    def _has_made_room(self) -> bool:
        """Empty the log, and give back what it does not need; return False if that fails."""
        try:
            if not self._refusal:
                for statement in _MAKE_ROOM:
                    self._connection.execute(statement).fetchall()
        except sqlite3.Error as error:
            if not _is_full(error):
                self._distrust(error)
            return False
        return not self._refusal

    def _execute(self, call: _Call, *, is_alone: bool) -> None:
        """Execute one call, or undo it and record why it is refused."""
        # A savepoint would copy each page that is changed: half of a ledger's size, to delete it.
        if not is_alone:
            self._connection.execute("SAVEPOINT call")
        try:
            call.result = call.change(self._connection)
        except Exception as error:
            call.error = self._in_our_words(error) if isinstance(error, _ERRORS) else error
            if self._ends_group(error):
                raise
            self._connection.execute("ROLLBACK" if is_alone else "ROLLBACK TO call")
        if not is_alone:
            self._connection.execute("RELEASE call")

    def _ends_group(self, error: Exception) -> bool:
        # When memory is short, SQLite may have rolled back the whole transaction.
        if not self._connection.in_transaction:
            return True
        # A call that meets a damaged page is undone alone: the damage concerns one cursor, not the others.
        survived = sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_CORRUPT
        return isinstance(error, sqlite3.Error) and _primary_code(error) not in survived

    def _undo(self, calls: list[_Call], error: sqlite3.Error | OSError, *, is_committing: bool) -> bool:
        """Undo a group, and give an error to each call that has no outcome yet; return False if the disk is full."""
        # An error that only one call met, such as damage, is that call's outcome; for the other calls the store has
        # become unusable. A full disk or a failed commit is the outcome of every call.
        is_full = _is_full(error)
        if is_full:
            self._roll_back(is_full=True)
        else:
            self._distrust(error)
        if is_full or is_committing:
            _fail(calls, lambda: self._in_our_words(error))
        else:
            _fail(calls, lambda: StoreError(self._refusal))
        return not is_full

    def _roll_back(self, *, is_full: bool = False) -> None:
        """Roll back the open transaction, which this thread began or an interrupted one."""
        try:
            if not self._refusal and self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if is_full:
                ((page_count,),) = self._connection.execute("PRAGMA page_count")
                os.ftruncate(self.descriptor, page_count * self._page_size)
        except (sqlite3.Error, OSError) as error:
            self._distrust(error)

    def _distrust(self, error: sqlite3.Error | OSError) -> None:
        # The cached pages may now differ from those on the disk; a new opening reads and syncs them.
        self._refusal = f"{self._directory}: a write failed ({error}); close the store and open it again"

    def _in_our_words(self, error: sqlite3.Error | UnicodeDecodeError | OSError) -> AckStateError:
        code = _primary_code(error)
        if code in _DAMAGE:
            return self.damage(str(error))
        if _is_full(error):
            return StoreFullError(f"{self._directory}: the disk is full; nothing was written")
        if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            # SQLite takes the locks that a parent had at a fork for those of the child.
            reason = "another program reads the database, or it was open when this process was forked"
            return StoreLockedError(f"{self._directory}: {reason}")
        return StoreError(f"{self._directory}: {error}")


def _is_full(error: sqlite3.Error | UnicodeDecodeError | OSError) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    return _primary_code(error) == sqlite3.SQLITE_FULL


def _primary_code(error: sqlite3.Error | UnicodeDecodeError | OSError) -> int:
    if isinstance(error, OSError):
        return sqlite3.SQLITE_IOERR
    # An error without a code is not SQLite's but Python's, about text that is invalid UTF-8.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF


def _fail(calls: list[_Call], make_error: Callable[[], Exception]) -> None:
    """Give each call without an error its own error instance, because raising an error changes it."""
    for call in calls:
        call.error = call.error or make_error()
