"""Groups calls from many threads into one log and one sync.

Concurrent calls form a group (`ackstate.stores.group_commit`), whose records share one write and one sync.

After a failed write or sync the log refuses every call: the bytes that the kernel returns may differ from those on the
disk, and a later successful sync proves nothing. A full disk is the exception, if the written part of the group can be
cut off again. If a leader is interrupted (`KeyboardInterrupt`) before a byte of the group is written, it undoes the
group, and the next call of the group leads. If it is interrupted later, the bytes on the disk are unknown, and that is
a failure.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar, final

from ackstate.cursor.store import LedgerNotFoundError, StoreError, StoreFullError
from ackstate.errors import AckStateError
from ackstate.stores.directory_lock import leave_to_parent_at_fork
from ackstate.stores.file_draft import Draft
from ackstate.stores.file_generation import (
    Generation,
    NotCopiedError,
    log_name,
    open_generation,
    read_entries,
    write_generation,
)
from ackstate.stores.file_log import CHANGES, encode_group, laid_out_size
from ackstate.stores.group_commit import GroupCommit, fail
from ackstate.stores.kernel_directory import KernelDirectory
from ackstate.stores.system_errors import FULL, system_errors_in_our_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ackstate.stores.file_log import DiscardedTail
    from ackstate.stores.file_records import Index
    from ackstate.stores.group_commit import Call, SyncGroup
    from ackstate.stores.store_directory import StoreDirectory, StoreFile

_Result = TypeVar("_Result")

_DEAD_MIN = 1 << 12  # Bytes; a file system allocates blocks of this size.
_ROOM_MIN = 1 << 16  # Bytes reserved for the next group, in addition to the room for a new log.
_ROOM_STEP = _ROOM_MIN // 4  # Bytes written until the free room is read again: that takes as long as a group.

IDENTITY_SIZE = 8
"""The bytes of a store's identity."""


@final
class FileLog:
    """The log of a store, which refuses calls after a failure; thread-safe.

    Args:
        directory: The directory of the log; closed with the log.
        compaction_size_min: See `ackstate.stores.file.FileStore`.
        identity: See `ackstate.stores.file.FileStore.over`.

    Attributes:
        discarded: The torn end of the log that opening cut off.
    """

    def __init__(self, directory: StoreDirectory, *, compaction_size_min: int, identity: bytes | None = None) -> None:
        self._directory = directory
        self._compaction_size_min = compaction_size_min
        self._lock = threading.Lock()  # Held during each use of the log.
        self._groups: GroupCommit[Draft] = GroupCommit()
        self._refusal = ""  # Why every call is refused; empty while the log is usable.
        self._interrupted = f"{directory}: a write was interrupted; close the store and open it again"
        self._is_closed = False
        self._is_cutting = False  # The log was cut and has not been synced since.
        self._is_short = False  # The disk had no room to allocate the log in advance.
        self._copy_again_size = 0  # After a failed compaction, the log is not compacted again below this size.
        self._ask_again_size = 0  # While the log is smaller, the room that was found is still large enough.
        self.discarded: DiscardedTail | None
        try:
            with system_errors_in_our_words(directory):
                self._generation, self.discarded = open_generation(directory, lambda: _drawn(identity))
        except BaseException:
            directory.close()
            raise
        if isinstance(directory, KernelDirectory):
            # A directory in memory needs no such care: a forked child has its own copy.
            leave_to_parent_at_fork(self)

    @contextmanager
    def reading(self) -> Iterator[Index]:
        """Hold the log for several queries of its index, which all see one state."""
        with self._lock:
            yield self.index()

    @property
    def lock(self) -> threading.Lock:
        """The lock for a single query of the `index`: `with` on it takes half as long as `reading`."""
        return self._lock

    def index(self) -> Index:
        """Return the index of the log; the caller holds the lock."""
        if self._refusal:
            raise StoreError(self._refusal)
        return self._generation.index

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """See `LedgerStore.read`."""
        if not 0 <= first <= end:
            raise ValueError(f"first and end must be 0 <= first <= end, got {first} and {end}")
        with self.reading() as index, system_errors_in_our_words(self._directory):
            ledger = index.ledger(ledger_id)
            if first < end and end > len(ledger.sizes):
                raise LedgerNotFoundError(f"ledger {ledger_id} ends before entry {end - 1}")
            name = f"{self._directory}/{log_name(self._generation.number)}"
            return read_entries(self._generation.file, ledger, first, end, name=name)

    def write(self, change: Callable[[Draft], _Result]) -> _Result:
        """Execute a change, sync, and return its result; a refused change leaves no trace."""
        return self._groups.write(change, self._lead)

    def write_all(self, changes: Sequence[Callable[[Draft], object]]) -> list[Any]:
        """Execute changes with one sync, and return the result of each, or its error."""
        return self._groups.write_all(changes, self._lead)

    def close(self) -> None:
        """Close the log first and the directory last; no-op if closed."""
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
        """See `ackstate.stores.directory_lock.OpenedFile`; the directory has its own such method."""
        self._lock, self._groups = threading.Lock(), GroupCommit()
        if not self._is_closed:
            self._refusal = (
                f"{self._directory}: the process that opened the store forked this one; open the store again here"
            )
        self._is_closed = True
        with suppress(OSError):
            self._generation.file.close()

    def _lead(self, group: SyncGroup[Draft]) -> None:
        """Close a group and give each of its calls an outcome. The caller holds the group's lock."""
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

    def _commit(self, group: SyncGroup[Draft], calls: list[Call[Draft]]) -> StoreFullError | None:
        """Execute calls with one sync and give each its outcome. Return the error only if the disk is full."""
        generation = self._generation
        begin = generation.end
        draft = Draft(generation.index, begin)
        # Set until the bytes on the disk are known, so that a second interrupt cannot leave the log usable.
        self._refusal = self._interrupted
        try:
            for call in calls:
                _execute(call, draft)
            error = self._append(draft)
            if not isinstance(error, StoreFullError):
                if error is not None:
                    fail(calls, lambda: type(error)(*error.args))
                group.is_over = True
            self._refusal = str(error) if error is not None and group.is_over else ""
        except BaseException:
            # This thread was interrupted, or failed in a worse way.
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
        """Write a group over allocated zeros; if there are too few of them, allocate more with the same write."""
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
            # There may be room for the group without the zeros after it.
            self._is_cutting = self._is_short = True
            self._ask_again_size = 0
            file.truncate(begin)
            file.write(begin, data)

    def _take_back(self, error: OSError, draft: Draft) -> StoreError:
        """Cut off the part of a group that was written before the disk was full."""
        if error.errno not in FULL:
            return self._failed(error)
        self._is_cutting = True
        try:
            self._generation.file.truncate(self._generation.end)
            # Otherwise a power cut could leave a part of this group below the next one.
            self._generation.file.sync()
        except OSError as second:
            return self._failed(second)
        draft.keep(0)
        self._is_cutting = False
        return StoreFullError(f"{self._directory}: the disk is full; nothing was written")

    def _compact_if_due(self) -> None:
        """Copy the live state to a new log once most of the log is dead. Costs less than writing the dead bytes did."""
        size, live_size = self._generation.end, self._generation.index.live_size
        is_due = size > 2 * live_size and size >= self._compaction_size_min
        if size < self._copy_again_size or not (is_due or (size >= self._ask_again_size and self._may_be_worth_it())):
            return
        room = self._room()
        if is_due:
            if room >= live_size:
                self._compact()
        elif (self._is_short and size > 2 * live_size) or room < _ROOM_MIN + live_size * 9 // 8:
            # Compact while there is some room: later the rest could be too small.
            self._make_room()
        else:
            self._ask_again_size = size + _ROOM_STEP

    def _may_be_worth_it(self) -> bool:
        """Return whether a new log would free at least one block and an eighth of the bytes that it writes."""
        live_size = self._generation.index.live_size
        return not self._refusal and self._generation.end - live_size >= _DEAD_MIN + live_size // 8

    def _room(self) -> float:
        """Return the bytes available to a new log: those free on the disk and those allocated behind the old log."""
        try:
            return self._directory.free_size + self._generation.file.size - self._generation.end
        except OSError:
            return inf

    def _make_room(self) -> bool:
        """Compact the log of any size because room is short, and return whether that was done.

        Without room for it nothing is tried, because a failed attempt would postpone the next one.
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
            self._copy_again_size, self._ask_again_size, self._is_short = 0, 0, False
        except NotCopiedError:
            # The old log stays in use. Retry after as many written bytes as the attempt cost: room may have been freed.
            self._copy_again_size = old.end + old.index.live_size + _DEAD_MIN
        except (OSError, AckStateError) as error:
            # The calls are complete; the next opening resolves the state of the files.
            self._refusal = str(self._failed(error))
        except BaseException as error:
            self._refusal = str(self._failed(error))
            raise

    def _copied(self, old: Generation) -> Generation:
        """Write the next generation; if it lacks room, free the bytes allocated behind the old log and retry."""
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
    """Return whether no byte of a group is in the file. The first byte of a group is never zero."""
    try:
        return file.read(begin, 1) in {b"", b"\0"}
    except OSError:
        return False


def _execute(call: Call[Draft], draft: Draft) -> None:
    """Execute one call, or record why it is refused."""
    count = len(draft)
    try:
        call.result = call.change(draft)
    except Exception as error:
        draft.keep(count)
        call.error = error


def _drawn(identity: bytes | None) -> int:
    return int.from_bytes(os.urandom(IDENTITY_SIZE) if identity is None else identity, "little")
