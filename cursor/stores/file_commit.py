"""How do calls from many threads share one log, and one sync?

Calls that come together make a group (`ackstate.cursor.stores.group_commit`), whose records are one write and one sync.

After a failed write or sync the log refuses everything: what the kernel shows may not be what is on the disk, and a
sync that succeeds later proves nothing. Only a full disk is no failure if what was written of the group can be cut off
again. A leader that is interrupted (`KeyboardInterrupt`) before a byte of the group is written undoes the group, and
the next of it leads; one that is interrupted later leaves it unknown what is on the disk, which is a failure.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, TypeVar, final

from ackstate.cursor.store import LedgerNotFoundError, StoreError, StoreFullError
from ackstate.cursor.stores.directory_lock import leave_to_parent_at_fork
from ackstate.cursor.stores.file_draft import Draft
from ackstate.cursor.stores.file_generation import (
    Generation,
    NotCopiedError,
    log_name,
    open_generation,
    read_entries,
    write_generation,
)
from ackstate.cursor.stores.file_log import CHANGES, encode_group, laid_out_size
from ackstate.cursor.stores.group_commit import GroupCommit, fail
from ackstate.cursor.stores.kernel_directory import KernelDirectory
from ackstate.cursor.stores.system_errors import FULL, system_errors_in_our_words
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ackstate.cursor.stores.file_log import DiscardedTail
    from ackstate.cursor.stores.file_records import Index
    from ackstate.cursor.stores.group_commit import Call, Group
    from ackstate.cursor.stores.store_directory import StoreDirectory, StoreFile

_Result = TypeVar("_Result")

_DEAD_MIN = 1 << 12  # Bytes; a file system gives room in such blocks.
_ROOM_MIN = 1 << 16  # Bytes that the next group may take, besides what a new log needs.

IDENTITY_SIZE = 8
"""The bytes of a store's identity."""


@final
class FileLog:
    """The log of a store, and whether it may still be used; thread-safe.

    Args:
        directory: Where it is; closed with the log.
        compaction_size_min: See `ackstate.cursor.stores.file.FileStore`.
        identity: See `ackstate.cursor.stores.file.FileStore.over`.

    Attributes:
        discarded: What opening cut off the log.
    """

    def __init__(self, directory: StoreDirectory, *, compaction_size_min: int, identity: bytes | None = None) -> None:
        self._directory = directory
        self._compaction_size_min = compaction_size_min
        self._lock = threading.Lock()  # Held by whoever uses the log.
        self._groups: GroupCommit[Draft] = GroupCommit()
        self._refusal = ""  # Why nothing may be done any more; empty while all is well.
        self._is_closed = False
        self._is_cutting = False  # The log was not yet synced since it was cut.
        self._is_short = False  # The disk had no room to lay out the log.
        self._copy_again_size = 0  # After a failed compaction the log is not compacted again before it has this size.
        self.discarded: DiscardedTail | None
        try:
            with system_errors_in_our_words(directory):
                self._generation, self.discarded = open_generation(directory, lambda: _drawn(identity))
        except BaseException:
            directory.close()
            raise
        if isinstance(directory, KernelDirectory):
            # Of a directory in memory a child has a copy.
            leave_to_parent_at_fork(self)

    @contextmanager
    def reading(self) -> Iterator[Index]:
        """Hold the log for some questions to its index, which see one state."""
        with self._lock:
            yield self.index()

    @property
    def lock(self) -> threading.Lock:
        """What to hold for a single question to the `index`: a `with` of it takes half as long as one of `reading`."""
        return self._lock

    def index(self) -> Index:
        """Return what the log has made; the caller holds the lock."""
        if self._refusal:
            raise StoreError(self._refusal)
        return self._generation.index

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """See `LedgerStore.read`."""
        if not 0 <= first <= end:
            raise ValueError(f"no range of entries: {first} to {end}")
        with self.reading() as index, system_errors_in_our_words(self._directory):
            ledger = index.ledger(ledger_id)
            if first < end and end > len(ledger.sizes):
                raise LedgerNotFoundError(f"ledger {ledger_id} ends before entry {end - 1}")
            name = f"{self._directory}/{log_name(self._generation.number)}"
            return read_entries(self._generation.file, ledger, first, end, name=name)

    def write(self, change: Callable[[Draft], _Result]) -> _Result:
        """Carry out a change, sync, and return what it returned; nothing of it is left if it is refused."""
        return self._groups.write(change, self._lead)

    def close(self) -> None:
        """Let go of the log first and of the directory last; closing twice does nothing."""
        with self._lock, suppress(OSError):
            if self._is_closed:
                return
            self._is_closed = True
            self._refusal = self._refusal or f"{self._directory}: the store is closed"
            try:
                self._generation.file.close()
            finally:
                self._directory.close()

    def leave_to_parent(self) -> None:
        """See `ackstate.cursor.stores.directory_lock.OpenedFile`; the directory leaves its own."""
        self._lock, self._groups = threading.Lock(), GroupCommit()
        if not self._is_closed:
            self._refusal = (
                f"{self._directory}: the process that opened the store has forked this one; open it anew here"
            )
        self._is_closed = True
        with suppress(OSError):
            self._generation.file.close()

    def _lead(self, group: Group[Draft]) -> None:
        """Close a group and give each of its calls an outcome. The group's lock is held."""
        with self._lock:
            calls = self._groups.closed(group)
            if self._refusal:
                fail(calls, lambda: StoreError(self._refusal))
                group.is_over = True
            else:
                full = self._commit(group, calls)
                if full is not None and self._make_room():
                    full = self._commit(group, self._groups.closed(group))
                if full is not None:
                    fail(calls, lambda: StoreFullError(*full.args))
                    group.is_over = True
                self._compact_if_due()

    def _commit(self, group: Group[Draft], calls: list[Call[Draft]]) -> StoreFullError | None:
        """Carry out calls with one sync, and give each its outcome; only if the disk is full return the error."""
        generation = self._generation
        begin = generation.end
        draft = Draft(generation.index, begin)
        # Until it is known what is on the disk, so that no second interrupt can leave it open.
        self._refusal = f"{self._directory}: a write was interrupted; close the store and open it again"
        try:
            for call in calls:
                _carry_out(call, draft)
            error = self._append(draft)
            if not isinstance(error, StoreFullError):
                if error is not None:
                    fail(calls, lambda: type(error)(*error.args))
                group.is_over = True
            self._refusal = str(error) if error is not None and group.is_over else ""
        except BaseException:
            # This thread was interrupted, or worse.
            if not self._is_cutting and _is_unwritten(generation.file, begin):
                draft.keep(0)
                self._refusal = ""
            raise
        return error if isinstance(error, StoreFullError) else None

    def _append(self, draft: Draft) -> StoreError | None:
        generation, body = self._generation, draft.body
        if not body:
            return None
        data, place = encode_group(CHANGES, generation.place, body, offset=generation.end)
        try:
            self._write_group(data)
        except OSError as error:
            return self._take_back(error, draft)
        try:
            generation.file.sync()
        except OSError as error:
            return self._failed(error)
        generation.place, generation.end = place, generation.end + len(data)
        self._is_cutting = False
        return None

    def _write_group(self, data: bytes) -> None:
        """Write a group over what is laid out; where that is too small, lay out more with the same write."""
        file, begin = self._generation.file, self._generation.end
        end = begin + len(data)
        if end <= file.size:
            file.write(begin, data)
            return
        try:
            file.write(begin, data + bytes(laid_out_size(begin, end) - end))
        except OSError as error:
            if error.errno not in FULL:
                raise
            # There may be room for the group alone.
            self._is_cutting = self._is_short = True
            file.truncate(begin)
            file.write(begin, data)

    def _take_back(self, error: OSError, draft: Draft) -> StoreError:
        """Cut off what a full disk took of a group."""
        if error.errno not in FULL:
            return self._failed(error)
        self._is_cutting = True
        try:
            self._generation.file.truncate(self._generation.end)
            # Or a power cut could leave a part of it below the group that comes next.
            self._generation.file.sync()
        except OSError as second:
            return self._failed(second)
        draft.keep(0)
        self._is_cutting = False
        return StoreFullError(f"{self._directory}: the disk is full; nothing was written")

    def _compact_if_due(self) -> None:
        """Write the state anew once most of the log is dead. It costs less than writing the dead bytes did."""
        size, live_size = self._generation.end, self._generation.index.live_size
        is_due = size > 2 * live_size and size >= self._compaction_size_min
        if size < self._copy_again_size or not (is_due or self._may_be_worth_it()):
            return
        room = self._room()
        if is_due:
            if room >= live_size:
                self._compact()
        elif (self._is_short and size > 2 * live_size) or room < _ROOM_MIN + live_size * 9 // 8:
            # While there is some room: what is left may be too little once it is used up.
            self._make_room()

    def _may_be_worth_it(self) -> bool:
        """Say whether writing the state anew would free a block and an eighth of what it writes at least."""
        live_size = self._generation.index.live_size
        return not self._refusal and self._generation.end - live_size >= _DEAD_MIN + live_size // 8

    def _room(self) -> float:
        """Return the bytes that a new log may take: those free on the disk and those laid out behind the old log."""
        try:
            return self._directory.free_size + self._generation.file.size - self._generation.end
        except OSError:
            return inf

    def _make_room(self) -> bool:
        """Compact the log for want of room, at any size of the log, and return whether that was done.

        Without room for it nothing is tried, because a failed try would put off the next one.
        """
        generation = self._generation
        if self._may_be_worth_it() and self._room() >= generation.index.live_size:
            self._compact()
        return self._generation is not generation and not self._refusal

    def _compact(self) -> None:
        old = self._generation
        if self._refusal:
            return
        try:
            self._generation = self._copied(old)
            old.file.close()
            self._directory.remove(log_name(old.number))
            self._copy_again_size, self._is_short = 0, False
        except NotCopiedError:
            # The old log goes on. Tried again when as much was written as the try cost: others may have made room.
            self._copy_again_size = old.end + old.index.live_size + _DEAD_MIN
        except (OSError, AckStateError) as error:
            # The calls are done; what this leaves is for the next opening to find out.
            self._refusal = str(self._failed(error))
        except BaseException as error:
            self._refusal = str(self._failed(error))
            raise

    def _copied(self, old: Generation) -> Generation:
        """Write the next generation; if there is no room for it, give it what is laid out behind the log."""
        try:
            return write_generation(self._directory, old.number + 1, old)
        except NotCopiedError as error:
            if error.errno not in FULL or old.file.size <= old.end:
                raise
        old.file.truncate(old.end)
        old.file.sync()
        return write_generation(self._directory, old.number + 1, old)

    def _failed(self, error: BaseException) -> StoreError:
        what = str(error) or repr(error)
        return StoreError(f"{self._directory}: a write failed ({what}); close the store and open it again")


def _is_unwritten(file: StoreFile, begin: int) -> bool:
    """Say whether not a byte of a group is in the file, which begins with one that is not zero."""
    try:
        return file.read(begin, 1) in {b"", b"\0"}
    except OSError:
        return False


def _carry_out(call: Call[Draft], draft: Draft) -> None:
    """Do what one call wants, or note why it is refused."""
    count = len(draft)
    try:
        call.result = call.change(draft)
    except Exception as error:
        draft.keep(count)
        call.error = error


def _drawn(identity: bytes | None) -> int:
    return int.from_bytes(os.urandom(IDENTITY_SIZE) if identity is None else identity, "little")
