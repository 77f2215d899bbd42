"""The storage of a cursor: two small base classes, with their durability contract in prose.

A `LedgerStore` stores logs of opaque entries, a `MetadataStore` small values that are changed by compare-and-set. A
`Store` has one of each. `ackstate.testing.check_store` is the contract as code: every store passes it.

A storage derives from both classes. Their public methods validate and copy arguments and word the errors that every
storage has; below them a storage implements a few primitives, whose names begin with an underscore. A primitive gets
valid arguments only, and bytes that nobody changes; it may be called in any thread.

Durability. When a mutating call returns, its change is synced: it survives a crash of the process or the machine, and
a power cut. A mutating call that raises `StoreError` happens entirely or not at all, but perhaps later, as its request
may still be on its way. So the writer of a ledger whose append has failed does not use the ledger again: it fences it,
or begins another one. A store whose sync has failed refuses every later call until it is opened again, because the
cached pages may differ from those on the disk. A lost connection is not a failed sync, and may be restored.

Damage. Any call may find that the stored bytes have changed: `CorruptStateError`.

Writers. Only the opening of a store that created a ledger appends to it; to any later one it is fenced. A store on a
disk is open once at a time: a second opener, in this process or another one, gets `StoreLockedError`; a store in a
cluster may be open many times. In any store a ledger is taken over by `fence`: its writer gets `LedgerFencedError` at
its next append, even if it was paused meanwhile, and can change nothing that was read since.

Threads. Any thread may call at any time. A store on a disk shares a sync among the calls that wait for one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, TypeVarTuple

from ackstate.errors import AckStateError, CorruptStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Args = TypeVarTuple("_Args")

ABSENT = -1
"""The expected version of a metadata value that must not exist yet."""


METADATA_VALUE_BYTES_MAX = 64 << 20
"""The largest metadata value in bytes, unless the caller that opens a store sets another limit."""


class StoreError(AckStateError):
    """The storage refused or failed; whether a mutating call happened is unknown unless a subclass defines it."""


class StoreLockedError(StoreError):
    """The store is open already, in this process or another one; nothing was changed."""


class StoreFullError(StoreError):
    """The disk is full; the call did not happen, and may be retried when there is room."""


class PayloadTooLargeError(StoreError):
    """A value to be written or read exceeds the store's limit; nothing was sent or changed."""


class LedgerFencedError(StoreError):
    """The ledger was taken over by a newer owner; the append did not happen."""


class LedgerNotFoundError(StoreError):
    """There is no such ledger, or no such entry in it; nothing was changed."""


class VersionMismatchError(StoreError):
    """The metadata value is not at the expected version; nothing was changed."""


class DamagedValueError(CorruptStateError):
    """A metadata value is damaged; it can be replaced or deleted at its `version`."""

    def __init__(self, error: CorruptStateError, version: int) -> None:
        super().__init__(error.what, offset=error.offset, expected=error.expected, found=error.found)
        self.version = version


class Versioned(NamedTuple):
    """A metadata value and the version that the next `put` must expect."""

    data: bytes
    version: int


class LedgerStore(ABC):
    """Logs of opaque entries. Ids of ledgers rise and are never used again; entry ids of a ledger are 0, 1, 2, ..."""

    def create(self, owner: str) -> int:
        """Create an empty ledger and return its id, above every id returned before.

        Args:
            owner: The owner, by which `owned_by` finds a ledger orphaned by a crash. Any text that can be encoded in
                UTF-8; it is not interpreted.

        Raises:
            ValueError: The owner holds a lone surrogate.
        """
        check_owner(owner)
        return self._create(owner)

    def append(self, ledger_id: int, entries: Sequence[bytes]) -> int:
        """Append entries, all or none of them, sync, and return the id of the last entry of the ledger.

        Args:
            ledger_id: A ledger that this opening of the store created.
            entries: Any number; of none, the call only checks the ledger.

        Raises:
            LedgerNotFoundError: There is no such ledger.
            LedgerFencedError: The ledger was fenced, or created by another opening of the store.
            StoreError: Whether they were appended is unknown.
        """
        if not 0 <= ledger_id <= _ID_MAX:  # Not in a call, which would show in an append.
            raise no_ledger(ledger_id)
        # Copied before anything happens: a caller's buffer may change. Through a memoryview: bytes(5) is five zeros.
        copies = [each if type(each) is bytes else bytes(memoryview(each)) for each in entries]
        (outcome,) = self._append_many([(ledger_id, copies)])
        if isinstance(outcome, int):
            return outcome
        raise outcome

    def append_many(self, appends: Sequence[tuple[int, Sequence[bytes]]]) -> list[int | AckStateError]:
        """Append to many ledgers, with one sync where the store can; each append succeeds or fails by itself.

        Args:
            appends: Ledgers, each once, and their entries.

        Returns:
            For each, in order, what `append` would have returned, or the error that it would have raised; no error
            comes twice.

        Raises:
            ValueError: A ledger comes twice; nothing was appended.
        """
        copies = [
            (ledger_id, [each if type(each) is bytes else bytes(memoryview(each)) for each in entries])
            for ledger_id, entries in appends
        ]
        ledger_ids = dict(copies)
        if len(ledger_ids) < len(copies):
            raise ValueError("a ledger must come once in appends, got one twice")
        outcomes = iter(self._append_many([each for each in copies if _is_ledger_id(each[0])]))
        return [next(outcomes) if _is_ledger_id(ledger_id) else no_ledger(ledger_id) for ledger_id, _ in copies]

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """Return the entries from `first` (included) to `end` (excluded); an empty range is ``[]`` wherever it lies.

        Raises:
            LedgerNotFoundError: There is no such ledger, or one of the entries does not exist.
            ValueError: `first` is negative or `end` is below it.
        """
        if not 0 <= first <= end:
            raise ValueError(f"first and end must be 0 <= first <= end, got {first} and {end}")
        _check_ledger_id(ledger_id)
        found = self._read(ledger_id, min(first, _ID_MAX), min(end, _ID_MAX))
        if len(found) < end - first:
            raise LedgerNotFoundError(f"ledger {ledger_id} ends before entry {end - 1}")
        return found

    def last(self, ledger_id: int) -> int:
        """Return the id of the last entry, -1 for an empty ledger.

        Raises:
            LedgerNotFoundError: There is no such ledger.
        """
        _check_ledger_id(ledger_id)
        return self._last(ledger_id)

    def delete(self, ledger_id: int) -> None:
        """Delete a ledger and its entries; no-op if it does not exist."""
        if _is_ledger_id(ledger_id):
            self._delete(ledger_id)

    def fence(self, ledger_id: int) -> int:
        """Refuse every append from now on, also after a reopen, and return the id of the last entry.

        Raises:
            LedgerNotFoundError: There is no such ledger.
        """
        _check_ledger_id(ledger_id)
        return self._fence(ledger_id)

    def owned_by(self, owner: str) -> list[int]:
        """Return the ids of an owner's ledgers, fenced ones too, lowest first.

        Raises:
            ValueError: The owner holds a lone surrogate.
        """
        check_owner(owner)
        return sorted(self._owned_by(owner))

    def owners(self) -> list[str]:
        """Return every owner that has a ledger, once, sorted by code points.

        It may be O(ledgers): it is meant for a check of the whole store.
        """
        return sorted(set(self._owners()))

    @abstractmethod
    def _create(self, owner: str) -> int: ...

    @abstractmethod
    def _append_many(self, appends: list[tuple[int, list[bytes]]]) -> list[int | AckStateError]:
        """Append to ledgers, perhaps to none; raise only what is true of all of them, such as that it is closed."""

    @abstractmethod
    def _read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """Return the entries of the range that exist: fewer, or none, where the ledger ends before."""

    @abstractmethod
    def _last(self, ledger_id: int) -> int: ...

    @abstractmethod
    def _delete(self, ledger_id: int) -> None: ...

    @abstractmethod
    def _fence(self, ledger_id: int) -> int: ...

    @abstractmethod
    def _owned_by(self, owner: str) -> Iterable[int]: ...

    @abstractmethod
    def _owners(self) -> Iterable[str]: ...


class MetadataStore(ABC):
    """Small values under slash-separated paths such as ``/managed-ledgers/orders/billing``.

    A path begins with a slash, does not end with one, has no empty name in it, and can be encoded in UTF-8 (a lone
    surrogate cannot); any other path raises `ValueError`. Children are sorted by code points. The versions of a path
    never repeat, even if its value is deleted and created again, so that an old expectation never matches a new value.

    Args:
        value_bytes_max: The largest value that can be written or read, in bytes.
    """

    def __init__(self, *, value_bytes_max: int = METADATA_VALUE_BYTES_MAX) -> None:
        self._value_bytes_max = value_bytes_max

    def get(self, path: str) -> Versioned | None:
        """Return the value and its version, or None where there is none.

        Raises:
            PayloadTooLargeError: It was written under a larger limit than the present one. It can be replaced or
                deleted.
        """
        check_path(path)
        value = self._get(path)
        if value is not None:
            self._check_size(path, len(value.data))
        return value

    def put(self, path: str, data: bytes, *, expected_version: int) -> int:
        """Replace a value if it is still at the expected version, sync, and return the new version.

        Args:
            path: The whole path.
            data: The new value.
            expected_version: The version that `get` returned, or `ABSENT` to create the value.

        Raises:
            VersionMismatchError: The value is at another version, exists, or does not exist.
            PayloadTooLargeError: The value exceeds the store's limit.
        """
        check_path(path)
        copy = data if type(data) is bytes else bytes(memoryview(data))
        self._check_size(path, len(copy))
        if not ABSENT <= expected_version <= _ID_MAX:
            raise VersionMismatchError(f"{path} is never at version {expected_version}")
        return self._put(path, copy, expected_version)

    def delete(self, path: str, *, expected_version: int) -> None:
        """Delete a value if it is still at the expected version.

        Raises:
            VersionMismatchError: The value is at another version, or does not exist.
        """
        check_path(path)
        if not 0 <= expected_version <= _ID_MAX:
            raise VersionMismatchError(f"{path} holds no value at version {expected_version} to delete")
        self._delete(path, expected_version)

    def children(self, path: str) -> list[str]:
        """Return the names one level below a path or ``/`` that have a value or are part of a longer path, sorted."""
        if path != "/":
            check_path(path)
        return sorted(set(self._children(path)))

    def _check_size(self, path: str, byte_count: int) -> None:
        """Raise `PayloadTooLargeError` for a value above the limit; a storage may call it before it reads the value."""
        if byte_count > self._value_bytes_max:
            raise PayloadTooLargeError(
                f"{path}: a value must have at most {self._value_bytes_max} bytes (metadata_value_bytes_max),"
                f" got {byte_count}"
            )

    @abstractmethod
    def _get(self, path: str) -> Versioned | None: ...

    @abstractmethod
    def _put(self, path: str, data: bytes, expected_version: int) -> int:
        """Create a value if `ABSENT` is expected, otherwise replace it; raise `other_version` if that cannot be."""

    @abstractmethod
    def _delete(self, path: str, expected_version: int) -> None:
        """Delete a value at a version, which is not `ABSENT`; raise `other_version` if that cannot be."""

    @abstractmethod
    def _children(self, path: str) -> Iterable[str]:
        """Return the names below a path or ``/``; in any order, and each as often as you like."""


class Store(Protocol):
    """A ledger store and a metadata store that belong together."""

    @property
    def ledgers(self) -> LedgerStore:
        """The logs."""

    @property
    def metadata(self) -> MetadataStore:
        """The small values."""

    def close(self) -> None:
        """Release the storage so that another process may open it, and refuse every later call with `StoreError`.

        No-op if closed.
        """


def no_ledger(ledger_id: int) -> LedgerNotFoundError:
    """Return the error for a ledger that does not exist."""
    return LedgerNotFoundError(f"there is no ledger {ledger_id}")


def fenced(ledger_id: int) -> LedgerFencedError:
    """Return the error for an append to a ledger that takes none from this opening of the store."""
    return LedgerFencedError(f"ledger {ledger_id} was fenced, or created by another opening of the store")


def other_version(path: str, found: int, expected: int) -> VersionMismatchError:
    """Return the error for a value at another version than the expected one; each may be `ABSENT`."""
    return VersionMismatchError(f"{path} is at version {found}, not {expected}")


def children_prefix(path: str) -> str:
    """Return the prefix of the paths below a path; ``/`` itself is the top."""
    return path if path == "/" else f"{path}/"


THREADS_MAX = 64
"""How many threads write at once for the caller of many writes that do not depend on each other."""


def outcome_of(call: Callable[[*_Args], _Result], *args: *_Args) -> _Result | AckStateError:
    """Return the result of a call, or the `AckStateError` that it raised."""
    try:
        return call(*args)
    except AckStateError as error:
        return error


def call_each(
    call: Callable[[_Item], _Result], items: Sequence[_Item], executor: Executor | None = None
) -> list[_Result | AckStateError]:
    """Call a function with each item, in threads, so that writes share syncs; return results or errors in order."""
    # Without an executor, in a pool that lives for this call. An error that is no `AckStateError` is raised once all
    # calls are over.
    if len(items) <= 1:
        return [outcome_of(call, item) for item in items]
    if executor is None:
        with ThreadPoolExecutor(min(THREADS_MAX, len(items)), thread_name_prefix="ackstate-writer") as pool:
            return call_each(call, items, pool)
    futures = [executor.submit(outcome_of, call, item) for item in items]
    try:
        wait(futures)
    except BaseException:
        for future in futures:
            future.cancel()
        wait(futures)
        raise
    return [future.result() for future in futures]


_ID_MAX = (1 << 63) - 1  # Of ledgers, entries and versions: the largest integer of SQLite, Java and ZooKeeper.


def _is_ledger_id(number: int) -> bool:
    return 0 <= number <= _ID_MAX


def _check_ledger_id(ledger_id: int) -> None:
    if not 0 <= ledger_id <= _ID_MAX:
        raise no_ledger(ledger_id)


def check_owner(owner: str) -> None:
    """Raise `ValueError` unless an owner can be encoded in UTF-8."""
    if not _has_utf8(owner):
        raise ValueError(f"owner must be text that can be encoded in UTF-8, got {owner!r}")


def check_path(path: str) -> None:
    """Raise `ValueError` unless a path begins with a slash, ends without one, has no empty name, and is UTF-8."""
    first, *names = path.split("/")
    if first or not names or not all(names) or not _has_utf8(path):
        raise ValueError(f"path must be a metadata path such as /a/b, got {path!r}")


def _has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
