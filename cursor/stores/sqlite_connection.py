"""How do calls from many threads share one connection, and one sync?

Calls that come together make a group (`ackstate.cursor.stores.group_commit`), which is one transaction with a savepoint
for each call, so that a call that is refused undoes itself only.

For a savepoint SQLite keeps a copy of each page that the call changes, beyond 64 KiB in the directory for temporary
files; no room there counts as a full disk.
"""

from __future__ import annotations

import ctypes
import sqlite3
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar, final

from ackstate.cursor.store import StoreError, StoreFullError, StoreLockedError
from ackstate.cursor.stores.directory_lock import leave_to_parent_at_fork
from ackstate.cursor.stores.group_commit import GroupCommit, fail
from ackstate.cursor.stores.sqlite_database import DATABASE, open_database
from ackstate.cursor.stores.sqlite_seal import RowSeal
from ackstate.errors import AckStateError, CorruptStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ackstate.cursor.stores.group_commit import Call, Group

_Result = TypeVar("_Result")

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

# On a damaged file SQLite may complain in a text that is no UTF-8, and Python then about that.
_ERRORS = (sqlite3.Error, UnicodeDecodeError)

_INHERITED: set[Path] = set()  # Directories of stores that were open when this process was forked.


@final
class SqliteConnection:
    """The only connection to a store's database, and whether it may still be used; thread-safe.

    Attributes:
        seal: Of the rows of this store.
    """

    def __init__(self, directory: Path, *, check_pages: bool) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # Held by whoever uses the connection.
        self._groups: GroupCommit[sqlite3.Connection] = GroupCommit()
        self._is_ours = True  # Not in a forked child.
        self._is_closed = False  # And nothing is left that a forked child could harm.
        self._refusal = ""  # Why nothing may be done any more; empty while all is well.
        try:
            self._claim, self._connection = open_database(directory, check_pages=check_pages)
        except _ERRORS as error:
            raise self._in_our_words(error) from error
        leave_to_parent_at_fork(self)
        try:
            self.seal = RowSeal(self._salt())
        except BaseException:
            self.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection for some queries, which see one state."""
        with self._lock:
            self._roll_back()
            if self._refusal:
                raise StoreError(self._refusal)
            try:
                yield self._connection
            except _ERRORS as error:
                raise self._in_our_words(error) from error

    def write(self, change: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Carry out a change, sync, and return what it returned; nothing of it is left if it raises.

        Args:
            change: Is called in any thread, and anew if that one is interrupted.
        """
        return self._groups.write(change, self._lead)

    def close(self) -> None:
        """Let go of the connection first and of the lock last."""
        with self._lock:
            self._refusal = self._refusal or f"{self._directory}: the store is closed"
            if self._is_ours:
                # What does not fit on a full disk stays in the log for the next opening.
                with suppress(sqlite3.Error):
                    self._connection.close()
            self._is_closed = True
            self._claim.let_go()

    def leave_to_parent(self) -> None:
        """See `ackstate.cursor.stores.directory_lock.OpenedFile`."""
        self._lock, self._groups = threading.Lock(), GroupCommit()
        self._claim.leave_to_parent()
        if self._is_closed:
            return
        # SQLite would close the connection with the interpreter, and then copy the log to the database and remove it,
        # while the parent goes on writing to it. An object with one reference too many is never closed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
        self._is_ours = False
        self._refusal = f"{self._directory}: the store was open when this process was forked; its parent has it"
        _INHERITED.add(self._directory.absolute())

    def damage(self, found: str) -> CorruptStateError:
        """Return the error for a database that says what it cannot say."""
        database = str(self._directory / DATABASE)
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

    def _salt(self) -> bytes:
        with self.reading() as connection:
            row = connection.execute("SELECT salt FROM identity").fetchone()
            return self.blob(row and row[0])

    def _lead(self, group: Group[sqlite3.Connection]) -> None:
        """Close a group and give each of its calls an outcome. The group's lock is held."""
        with self._lock:
            calls = self._groups.closed(group)
            self._roll_back()
            if self._refusal:
                fail(calls, lambda: StoreError(self._refusal))
            else:
                self._commit(group, calls)
            group.is_over = True

    def _commit(self, group: Group[sqlite3.Connection], calls: list[Call[sqlite3.Connection]]) -> None:
        """Carry out calls in one transaction."""
        is_committing = False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for call in calls:
                self._carry_out(call, is_alone=len(calls) == 1)
            is_committing = True
            if self._connection.in_transaction:
                self._connection.execute("COMMIT")
            group.is_over = True
        except sqlite3.Error as error:
            self._undo(calls, error, is_committing=is_committing)
        except BaseException:
            # This thread was interrupted. If all is committed, the others go; otherwise the next of them starts over.
            group.is_over = is_committing and not self._connection.in_transaction
            raise

    def _carry_out(self, call: Call[sqlite3.Connection], *, is_alone: bool) -> None:
        """Do what one call wants, or undo it and note why it is refused."""
        if is_alone:
            # A savepoint would cost a copy of each page that is changed: to delete a ledger, half of its size.
            self._try(call, undo="ROLLBACK")
        else:
            self._connection.execute("SAVEPOINT call")
            self._try(call, undo="ROLLBACK TO call")
            self._connection.execute("RELEASE call")

    def _try(self, call: Call[sqlite3.Connection], *, undo: str) -> None:
        try:
            call.result = call.change(self._connection)
        except Exception as error:
            call.error = self._in_our_words(error) if isinstance(error, _ERRORS) else error
            if self._ends_group(error):
                raise
            self._connection.execute(undo)

    def _ends_group(self, error: Exception) -> bool:
        # Short of memory, SQLite may have rolled back everything.
        if not self._connection.in_transaction:
            return True
        # A call that meets a damaged page is undone by itself: one cursor's damage is not the others'.
        survived = sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_CORRUPT
        return isinstance(error, sqlite3.Error) and _primary_code(error) not in survived

    def _undo(self, calls: list[Call[sqlite3.Connection]], error: sqlite3.Error, *, is_committing: bool) -> None:
        """Undo a group, and tell the calls that do not know it yet.

        What was met in one call, such as damage, is told to that one; the others learn that the store is not to be
        used any more. A full disk and a failed commit are everybody's.
        """
        is_full = _primary_code(error) == sqlite3.SQLITE_FULL
        if is_full:
            self._roll_back()
        else:
            self._distrust(error)
        if is_full or is_committing:
            fail(calls, lambda: self._in_our_words(error))
        else:
            fail(calls, lambda: StoreError(self._refusal))

    def _roll_back(self) -> None:
        """Undo the transaction that was begun last, by this thread or by one that was interrupted."""
        try:
            if not self._refusal and self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._distrust(error)

    def _distrust(self, error: sqlite3.Error) -> None:
        # The cached pages may differ from those on the disk now; opening anew reads and syncs them again.
        self._refusal = f"{self._directory}: a write failed ({error}); close the store and open it again"

    def _in_our_words(self, error: sqlite3.Error | UnicodeDecodeError) -> AckStateError:
        code = _primary_code(error)
        if code in _DAMAGE:
            return self.damage(str(error))
        if code == sqlite3.SQLITE_FULL:
            return StoreFullError(f"{self._directory}: the disk is full; nothing was written")
        if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            if self._directory.absolute() in _INHERITED:
                reason = "it was open when this process was forked, and SQLite takes the parent's locks for ours: exec"
                return StoreLockedError(f"{self._directory}: {reason}")
            return StoreLockedError(f"{self._directory}: another program reads the database")
        return StoreError(f"{self._directory}: {error}")


def _primary_code(error: sqlite3.Error | UnicodeDecodeError) -> int:
    # Without a code it is not SQLite that complains but Python, about a text that is no UTF-8.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF
