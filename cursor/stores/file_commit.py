"""How do calls from many threads share one log, and one sync?

A mutating call joins the group that is open. The first of a group to get the group's lock leads it: it waits for the
log, closes the group, and writes the records of all its calls with one append and one sync. Calls that come meanwhile
make the next group. So a lone call waits for nobody, and calls that would wait for each other's syncs share one.

After a failed append or sync the log refuses everything: what the kernel shows may not be what is on the disk, and a
sync that succeeds later proves nothing. Only a full disk is no failure if what was written of the group can be cut off
again. Locks are taken in this order: a group's, the log's, the one for joining.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final

from ackstate.errors import AckStateError
from cursor.store import LedgerNotFoundError, StoreError, StoreFullError
from cursor.stores.file_draft import Draft
from cursor.stores.file_generation import (
    FULL,
    NoRoomForCopyError,
    log_name,
    open_generation,
    read_entries,
    write_generation,
)
from cursor.stores.file_log import CHANGES, encode_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cursor.stores.file_log import DiscardedTail
    from cursor.stores.file_records import Index
    from cursor.stores.store_directory import StoreDirectory

_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Call:
    """What one caller wants done, and what became of it."""

    change: Callable[[Draft], Any]
    result: Any = None
    error: Exception | None = None
    is_withdrawn: bool = False  # Its caller was interrupted: not to be done any more behind its back.


@final
class _Group:
    """Calls that share a sync."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # Held by whoever leads the group.
        self.calls: list[_Call] = []  # In the order in which they are carried out.
        self.is_over = False  # Each call has its outcome, and nobody is to lead the group any more.


@final
class FileLog:
    """The log of a store, and whether it may still be used; thread-safe.

    Args:
        directory: Where it is; closed with the log.
        compaction_size_min: See `cursor.stores.file.FileStore`.

    Attributes:
        discarded: What opening cut off the log.
    """

    def __init__(self, directory: StoreDirectory, *, compaction_size_min: int) -> None:
        self._directory = directory
        self._compaction_size_min = compaction_size_min
        self._lock = threading.Lock()  # Held by whoever uses the log.
        self._joining = threading.Lock()  # Held for an instant, to join the open group or to close it.
        self._open_group = _Group()
        self._refusal = ""  # Why nothing may be done any more; empty while all is well.
        self._is_closed = False
        self._size_without_room = 0  # What the log had when there was no room to write it anew.
        self.discarded: DiscardedTail | None
        try:
            with system_errors_in_our_words(directory):
                self._generation, self.discarded = open_generation(directory)
        except BaseException:
            directory.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[Index]:
        """Hold the log for some questions to its index, which see one state."""
        with self._lock:
            if self._refusal:
                raise StoreError(self._refusal)
            yield self._generation.index

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
        call = _Call(change)
        try:
            with self._joining:
                group = self._open_group
                group.calls.append(call)
            with group.lock:
                if not group.is_over:
                    self._lead(group)
        except BaseException:
            call.is_withdrawn = True
            raise
        if call.error is not None:
            raise call.error
        result: _Result = call.result
        return result

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

    def _lead(self, group: _Group) -> None:
        """Close a group and give each of its calls an outcome. The group's lock is held."""
        with self._lock:
            with self._joining:
                if self._open_group is group:
                    self._open_group = _Group()
            calls = [call for call in group.calls if not call.is_withdrawn]
            error = StoreError(self._refusal) if self._refusal else self._commit(calls)
            if error is not None:
                # One for each, because raising an error changes it.
                for call in calls:
                    call.error = call.error or type(error)(*error.args)
            group.is_over = True
            self._compact_if_due()

    def _commit(self, calls: list[_Call]) -> StoreError | None:
        """Carry out calls with one sync; return what met all that were not refused."""
        generation = self._generation
        draft = Draft(generation.index, generation.file.size)
        try:
            for call in calls:
                _carry_out(call, draft)
            body = draft.body
            return self._append(body, draft) if body else None
        except BaseException as error:
            # This thread was interrupted, or worse.
            self._distrust(error)
            raise

    def _append(self, body: bytes, draft: Draft) -> StoreError | None:
        generation = self._generation
        file = generation.file
        begin = file.size
        data, place = encode_group(CHANGES, generation.place, body, offset=begin)
        try:
            file.append(data)
        except OSError as error:
            return self._take_back(error, begin, draft)
        try:
            file.sync()
        except OSError as error:
            return self._distrust(error)
        generation.place = place
        return None

    def _take_back(self, error: OSError, begin: int, draft: Draft) -> StoreError:
        """Cut off what a full disk took of a group."""
        if error.errno not in FULL:
            return self._distrust(error)
        try:
            self._generation.file.truncate(begin)
            # Or a power cut could leave a part of it below the group that comes next.
            self._generation.file.sync()
        except OSError as second:
            return self._distrust(second)
        draft.keep(0)
        return StoreFullError(f"{self._directory}: the disk is full; nothing was written")

    def _compact_if_due(self) -> None:
        """Write the state anew once most of the log is dead. It costs less than writing the dead bytes did."""
        old = self._generation
        size, live_size = old.file.size, old.index.live_size
        size_min = max(self._compaction_size_min, 2 * self._size_without_room)
        if self._refusal or size < size_min or size <= 2 * live_size:
            return
        try:
            self._generation = write_generation(self._directory, old.number + 1, old)
            old.file.close()
            self._directory.remove(log_name(old.number))
            self._size_without_room = 0
        except NoRoomForCopyError:
            # The old log goes on; tried again when it has doubled.
            self._size_without_room = size
        except (OSError, AckStateError) as error:
            # The calls are done; what this leaves is for the next opening to find out.
            self._distrust(error)
        except BaseException as error:
            self._distrust(error)
            raise

    def _distrust(self, error: BaseException) -> StoreError:
        self._refusal = f"{self._directory}: a write failed ({error}); close the store and open it again"
        return StoreError(self._refusal)


@contextmanager
def system_errors_in_our_words(directory: object) -> Iterator[None]:
    """Turn what the operating system says into `StoreError`."""
    try:
        yield
    except OSError as error:
        refusal = StoreFullError if error.errno in FULL else StoreError
        raise refusal(f"{directory}: {error.strerror or error}") from error


def _carry_out(call: _Call, draft: Draft) -> None:
    """Do what one call wants, or note why it is refused."""
    count = len(draft)
    try:
        call.result = call.change(draft)
    except Exception as error:
        draft.keep(count)
        call.error = error
