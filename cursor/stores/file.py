"""An embedded store with one append-only log in a directory of its own, open in one process at a time.

A mutating call is one write and one sync; calls of other threads that come while it lasts share the next
(`ackstate.cursor.stores.file_commit`). What the directory holds stands in `ackstate.cursor.stores.file_generation`, how
the log is framed and what of it a crash may tear in `ackstate.cursor.stores.file_log`, its records in
`ackstate.cursor.stores.file_records`.
"""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, final

from ackstate.cursor.store import (
    METADATA_VALUE_BYTES_MAX,
    PayloadTooLargeError,
    Store,
    Versioned,
    check_owner,
    check_path,
    check_value_size,
    children_prefix,
)
from ackstate.cursor.stores.directory_lock import LOCK
from ackstate.cursor.stores.file_commit import IDENTITY_SIZE, FileLog
from ackstate.cursor.stores.file_copy import copy_files
from ackstate.cursor.stores.file_generation import check_names, is_read_by_opening
from ackstate.cursor.stores.kernel_directory import KernelDirectory
from ackstate.cursor.stores.plain_files import check_files_to_write
from ackstate.cursor.stores.system_errors import system_errors_in_our_words
from ackstate.cursor.stores.temporary_copy import COPY_BYTES_MAX

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from ackstate.cursor.stores.file_log import DiscardedTail
    from ackstate.cursor.stores.store_directory import StoreDirectory
    from ackstate.cursor.stores.temporary_copy import TemporaryCopy

_BEHIND_SLASH = chr(ord("/") + 1)
_COMPACTION_SIZE_MIN = 1 << 20
_SIZE_END = 1 << 32  # No entry, path or value has so many bytes.


@final
class FileStore:
    """A store in a directory on a local disk; thread-safe.

    Appending is O(size of the entries), amortised: when more than half of the log is dead, a call writes what is alive
    to a new one. The log's file is laid out in advance, and stays so when it is closed: it may be twice as large as the
    log, by 260 KiB at most. The new log needs as much free room as the live bytes take, while the old one is still
    there; on a disk that never has it the store fills up. Opening reads the log once. In memory are 16 bytes an entry,
    some 500 bytes a ledger and 200 more for an owner of its own, and the values with some 200 bytes each.

    A forked child has no part in it: there every call is refused, and the parent's store stays as it is.

    Args:
        path: The directory. One that is missing is made, an empty one becomes a store.
        compaction_size_min: A log below this many bytes is not compacted.
        metadata_value_bytes_max: How many bytes a metadata value may have to be written or read; 64 MiB by default.

    Raises:
        StoreLockedError: It is open already, in another process or in this one.
        StoreFullError: There is no room to make it or to finish what a crash left; try again when there is.
        StoreError: It is a file, holds something else, or may not be written; nothing in it was changed.
        CorruptStateError: It holds damaged bytes, or has lost its log.
        UnsupportedVersionError: A newer release wrote it; nothing was changed.
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
        """Open a store in any `StoreDirectory`, which is closed with the store, or if this raises.

        Args:
            directory: Where it is.
            compaction_size_min: A log below this many bytes is not compacted.
            identity: What a store that is made will tell its log from another store's by: eight bytes, at random
                unless given. A store that is there keeps its own.
        """
        if identity is not None and len(identity) != IDENTITY_SIZE:
            raise ValueError(f"not an identity of {IDENTITY_SIZE} bytes: {identity!r}")
        store = cls.__new__(cls)
        store._begin(directory, compaction_size_min, identity)
        return store

    @classmethod
    def open_copy(cls, path: str | os.PathLike[str], *, copy_bytes_max: int = COPY_BYTES_MAX) -> FileStore:
        """Copy a store that nobody has open, and open the copy: a look at the store that changes no byte of it.

        The copy is complete, with what a crash left in the log, and may be written: a repair can be tried on it. It
        lies in the directory for temporary files, which needs room for it, and is removed when it is closed. Once this
        returns, the store itself may be opened again. Errors call the copy by the name of the store.

        Args:
            path: The store's directory; it need not be writable.
            copy_bytes_max: How many bytes its files may have together; 4 GiB by default.

        Raises:
            StoreLockedError: It is open, in another process or in this one.
            StoreFullError: There is no room for the copy.
            StoreError: There is no store at the path, it may not be read, or its files have too many bytes.
            CorruptStateError: It holds damaged bytes, or has lost its log.
            UnsupportedVersionError: A newer release wrote it.
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
        """The end of the log that a crash had torn and opening discarded; None if nothing was."""
        return self._log.discarded

    @property
    def ledgers(self) -> _FileLedgers:
        """The logs."""
        return self._ledgers

    @property
    def metadata(self) -> _FileMetadata:
        """The small values."""
        return self._metadata

    def close(self) -> None:
        """Let go of the log, and unlock; closing twice does nothing."""
        self._log.close()
        if self._copy is not None:
            self._copy.cleanup()


@final
class _FileLedgers:
    def __init__(self, log: FileLog) -> None:
        self._log = log

    def create(self, owner: str) -> int:
        """See `LedgerStore.create`."""
        check_owner(owner)
        return self._log.write(lambda draft: draft.create(owner))

    def append(self, ledger_id: int, entry: bytes) -> int:
        """See `LedgerStore.append`."""
        return self.append_all([(ledger_id, entry)])[0]

    def append_all(self, entries: Sequence[tuple[int, bytes]]) -> list[int]:
        """See `LedgerStore.append_all`."""
        batch = [(ledger_id, _copied(entry)) for ledger_id, entry in entries]
        return self._log.write(lambda draft: draft.append_all(batch))

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """See `LedgerStore.read`."""
        return self._log.read(ledger_id, first, end)

    def last(self, ledger_id: int) -> int:
        """See `LedgerStore.last`."""
        with self._log.lock:
            return len(self._log.index().ledger(ledger_id).sizes) - 1

    def delete(self, ledger_id: int) -> None:
        """See `LedgerStore.delete`."""
        self._log.write(lambda draft: draft.delete(ledger_id))

    def fence(self, ledger_id: int) -> int:
        """See `LedgerStore.fence`."""
        return self._log.write(lambda draft: draft.fence(ledger_id))

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
        return self._log.write(lambda draft: draft.put(path, copy, expected_version=expected_version))

    def delete(self, path: str, *, expected_version: int) -> None:
        """See `MetadataStore.delete`."""
        check_path(path)
        self._log.write(lambda draft: draft.remove(path, expected_version=expected_version))

    def children(self, path: str) -> list[str]:
        """See `MetadataStore.children`; O(names log values), but the first call after an opening sorts all paths."""
        prefix = children_prefix(path)
        names = set()
        with self._log.reading() as index:
            paths = index.paths()
            at = bisect_left(paths, prefix)
            while at < len(paths) and paths[at].startswith(prefix):
                name, slash, _ = paths[at][len(prefix) :].partition("/")
                names.add(name)
                # Over all that is below a name, too.
                at = bisect_left(paths, f"{prefix}{name}{_BEHIND_SLASH}", at + 1) if slash else at + 1
        return sorted(names)


def _copied(data: bytes) -> bytes:
    """Copy a buffer, which its owner may change; refuse what is none, or too large."""
    copy = bytes(memoryview(data))
    if len(copy) >= _SIZE_END:
        raise PayloadTooLargeError(f"{len(copy)} bytes are too many: below {_SIZE_END} fit")
    return copy


if TYPE_CHECKING:
    _: type[Store] = FileStore
