"""An embedded store with one append-only log in its own directory, open in one process at a time.

Each mutating call costs one write and one sync; calls of other threads that arrive meanwhile share the next write and
sync (`ackstate.stores.file_commit`). `ackstate.stores.file_generation` describes the files of the
directory, `ackstate.stores.file_log` the frames of the log and the parts of it that a crash can tear, and
`ackstate.stores.file_records` its records.
"""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, final

from ackstate.cursor.store import (
    METADATA_VALUE_BYTES_MAX,
    PayloadTooLargeError,
    Versioned,
    check_owner,
    check_path,
    check_value_size,
    children_prefix,
)
from ackstate.stores.directory_lock import LOCK
from ackstate.stores.file_commit import IDENTITY_SIZE, FileLog
from ackstate.stores.file_copy import copy_files
from ackstate.stores.file_generation import check_names, is_read_by_opening
from ackstate.stores.group_commit import write_together
from ackstate.stores.kernel_directory import KernelDirectory
from ackstate.stores.plain_files import check_files_to_write
from ackstate.stores.system_errors import system_errors_in_our_words
from ackstate.stores.temporary_copy import COPY_BYTES_MAX

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from ackstate.cursor.writes import GroupStore, Write
    from ackstate.errors import AckStateError
    from ackstate.stores.file_log import DiscardedTail
    from ackstate.stores.store_directory import StoreDirectory
    from ackstate.stores.temporary_copy import TemporaryCopy

_BEHIND_SLASH = chr(ord("/") + 1)
_COMPACTION_SIZE_MIN = 1 << 20
_SIZE_END = 1 << 32  # The size of every entry, path and value is below this many bytes.


@final
class FileStore:
    """A store in a directory on a local disk; thread-safe.

    Appending is O(size of the entries), amortised: when more than half of the log is dead, a call writes the live
    records to a new log. Room for the log's file is allocated in advance and stays allocated after a close: the file
    is at most twice as large as the log, and at most 260 KiB larger. The new log needs as much free room as the live
    bytes take, while the old log still exists; on a disk without that room the store fills up. Opening reads the log
    once. Memory usage: 16 bytes per entry, some 500 bytes per ledger, 200 more for an owner with a single ledger, and
    each value with some 200 bytes of overhead.

    A forked child cannot use the store: every call is refused there, and the parent's store is unaffected.

    Args:
        path: The directory. A missing one is created, an empty one becomes a store.
        compaction_size_min: A log smaller than this many bytes is not compacted.
        metadata_value_bytes_max: The largest metadata value that can be written or read, in bytes; 64 MiB by default.

    Raises:
        StoreLockedError: The store is open already, in this process or another one.
        StoreFullError: The disk has no room to create the store or to complete its recovery; retry when it has.
        StoreError: The path is a file, holds something else, or is not writable; nothing in it was changed.
        CorruptStateError: The store holds damaged bytes, or has lost its log.
        UnsupportedVersionError: A newer release wrote the store; nothing was changed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        compaction_size_min: int = _COMPACTION_SIZE_MIN,
        metadata_value_bytes_max: int = METADATA_VALUE_BYTES_MAX,
    ) -> None:
        place = Path(path).absolute()
        with system_errors_in_our_words(place):
            if place.exists():
                names = sorted({path.name for path in place.iterdir()} - {LOCK})
                check_names(names, directory=place)
                check_files_to_write(place / name for name in (LOCK, *filter(is_read_by_opening, names)))
            directory = KernelDirectory(place)
        self._begin(directory, compaction_size_min)
        self._metadata = _FileMetadata(self._log, metadata_value_bytes_max)

    @classmethod
    def over(
        cls,
        directory: StoreDirectory,
        *,
        compaction_size_min: int = _COMPACTION_SIZE_MIN,
        identity: bytes | None = None,
    ) -> FileStore:
        """Open a store in any `StoreDirectory`, which is closed with the store, or if this call raises.

        Args:
            directory: The directory of the store.
            compaction_size_min: A log smaller than this many bytes is not compacted.
            identity: Eight bytes that distinguish the log of a new store from the logs of other stores; random by
                default. An existing store keeps its identity.
        """
        if identity is not None and len(identity) != IDENTITY_SIZE:
            raise ValueError(f"identity must be {IDENTITY_SIZE} bytes, got {identity!r}")
        store = cls.__new__(cls)
        store._begin(directory, compaction_size_min, identity)
        return store

    @classmethod
    def open_copy(cls, path: str | os.PathLike[str], *, copy_bytes_max: int = COPY_BYTES_MAX) -> FileStore:
        """Copy a closed store and open the copy: an inspection that changes no byte of the store.

        The copy is complete, including the bytes that a crash left in the log, and is writable: you can try a repair on
        it. It lies in the directory for temporary files, which needs room for it, and is removed when it is closed.
        Once this returns, the store itself may be opened again. Errors in the copy name the store, not the copy.

        Args:
            path: The store's directory; it need not be writable.
            copy_bytes_max: The largest total size of the store's files, in bytes; 4 GiB by default.

        Raises:
            StoreLockedError: The store is open, in this process or another one.
            StoreFullError: There is no room for the copy.
            StoreError: There is no store at the path, it is not readable, or its files are too large.
            CorruptStateError: The store holds damaged bytes, or has lost its log.
            UnsupportedVersionError: A newer release wrote the store.
        """
        place = Path(path)
        copy = copy_files(place, bytes_max=copy_bytes_max)
        try:
            with system_errors_in_our_words(place):
                directory = KernelDirectory(copy.name, called=str(place))
            store = cls.over(directory)
        except BaseException:
            copy.cleanup()
            raise
        store._copy = copy
        return store

    def _begin(self, directory: StoreDirectory, compaction_size_min: int, identity: bytes | None = None) -> None:
        self._copy: TemporaryCopy | None = None
        self._log = FileLog(directory, compaction_size_min=compaction_size_min, identity=identity)
        self._ledgers = _FileLedgers(self._log)
        self._metadata = _FileMetadata(self._log, METADATA_VALUE_BYTES_MAX)

    @property
    def discarded(self) -> DiscardedTail | None:
        """The torn end of the log that opening discarded; None if the log was not torn."""
        return self._log.discarded

    @property
    def ledgers(self) -> _FileLedgers:
        """The logs."""
        return self._ledgers

    @property
    def metadata(self) -> _FileMetadata:
        """The small values."""
        return self._metadata

    def write_all(self, writes: Sequence[Write]) -> list[int | AckStateError]:
        """See `GroupStore.write_all`; it is one write and one sync."""
        return write_together(writes, self._ledgers, self._metadata, self._log.write_all)

    def close(self) -> None:
        """Close the log, and unlock; no-op if closed."""
        self._log.close()
        if self._copy is not None:
            self._copy.cleanup()


@final
class _FileLedgers:
    def __init__(self, log: FileLog) -> None:
        self._log = log
        self._execute = log.write

    def create(self, owner: str) -> int:
        """See `LedgerStore.create`."""
        check_owner(owner)
        return self._execute(lambda draft: draft.create(owner))

    def append(self, ledger_id: int, entry: bytes) -> int:
        """See `LedgerStore.append`."""
        copy = _copied(entry)
        return self._execute(lambda draft: draft.append(ledger_id, copy))

    def append_all(self, entries: Sequence[tuple[int, bytes]]) -> list[int]:
        """See `LedgerStore.append_all`."""
        if len(entries) == 1:
            return [self.append(*entries[0])]
        batch = [(ledger_id, _copied(entry)) for ledger_id, entry in entries]
        return self._execute(lambda draft: draft.append_all(batch))

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """See `LedgerStore.read`."""
        return self._log.read(ledger_id, first, end)

    def last(self, ledger_id: int) -> int:
        """See `LedgerStore.last`."""
        with self._log.lock:
            return len(self._log.index().ledger(ledger_id).sizes) - 1

    def delete(self, ledger_id: int) -> None:
        """See `LedgerStore.delete`."""
        self._execute(lambda draft: draft.delete(ledger_id))

    def fence(self, ledger_id: int) -> int:
        """See `LedgerStore.fence`."""
        return self._execute(lambda draft: draft.fence(ledger_id))

    def owned_by(self, owner: str) -> list[int]:
        """See `LedgerStore.owned_by`."""
        check_owner(owner)
        with self._log.lock:
            return sorted(self._log.index().ids_of.get(owner, ()))

    def owners(self) -> list[str]:
        """See `LedgerStore.owners`."""
        with self._log.reading() as index:
            return sorted(index.ids_of)


@final
class _FileMetadata:
    def __init__(self, log: FileLog, value_bytes_max: int) -> None:
        self._log, self._value_bytes_max = log, value_bytes_max
        self._execute = log.write

    def get(self, path: str) -> Versioned | None:
        """See `MetadataStore.get`."""
        check_path(path)
        with self._log.lock:
            value = self._log.index().values.get(path)
        if value is not None:
            check_value_size(path, len(value.data), bytes_max=self._value_bytes_max)
        return value

    def put(self, path: str, data: bytes, *, expected_version: int) -> int:
        """See `MetadataStore.put`."""
        check_path(path)
        copy = _copied(data)
        check_value_size(path, len(copy), bytes_max=self._value_bytes_max)
        return self._execute(lambda draft: draft.put(path, copy, expected_version=expected_version))

    def delete(self, path: str, *, expected_version: int) -> None:
        """See `MetadataStore.delete`."""
        check_path(path)
        self._execute(lambda draft: draft.remove(path, expected_version=expected_version))

    def children(self, path: str) -> list[str]:
        """See `MetadataStore.children`; O(names * log(values)), but the first call after an opening sorts all paths."""
        prefix = children_prefix(path)
        names = set()
        with self._log.reading() as index:
            paths = index.paths()
            at = bisect_left(paths, prefix)
            while at < len(paths) and paths[at].startswith(prefix):
                name, slash, _ = paths[at][len(prefix) :].partition("/")
                names.add(name)
                # Skip all paths below a name, too.
                at = bisect_left(paths, f"{prefix}{name}{_BEHIND_SLASH}", at + 1) if slash else at + 1
        return sorted(names)


def _copied(data: bytes) -> bytes:
    """Copy a buffer, which its owner may change; refuse an object that is no buffer, or is too large."""
    copy = data if type(data) is bytes else bytes(memoryview(data))
    if len(copy) >= _SIZE_END:
        raise PayloadTooLargeError(f"data must be smaller than {_SIZE_END} bytes, got {len(copy)} bytes")
    return copy


if TYPE_CHECKING:
    _: type[GroupStore] = FileStore
