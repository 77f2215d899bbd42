"""What a cursor needs of a storage: two small protocols, with their durability contract in prose.

A `LedgerStore` keeps logs of opaque entries, a `MetadataStore` small values that are swung by compare-and-set. A
`Store` has one of each. `ackstate.cursor.testing.check_store` is the contract as code: every backend passes it.

Durability. A mutating call that returns has been synced: it survives a crash of the process, of the machine, and a
power cut. A mutating call that raises `StoreError` may or may not have happened, but never by half; whoever needs to
know reads back. A store whose sync has failed refuses every later call until it is opened anew, because the pages that
it would read may not be those on the disk. A connection that was lost is not a failed sync and may come back.

Damage. Any call may find that the stored bytes are not what was written: `CorruptStateError`.

Owners. A store on a disk is open once at a time: a second opener, in another process or the same, gets
`StoreLockedError`; one in a cluster may be open many times. In any store a ledger is taken over by `fence`: whoever
held it before gets `LedgerFencedError` at its next append.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ackstate.errors import AckStateError, CorruptStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

ABSENT = -1
"""The expected version of a metadata value that must not exist yet."""


METADATA_VALUE_BYTES_MAX = 64 << 20
"""How many bytes a metadata value may have, unless the one who opens a store names another limit."""


class StoreError(AckStateError):
    """The storage refused or failed; whether a mutating call happened is unknown unless a subclass says so."""


class StoreLockedError(StoreError):
    """The store is open already, in another process or in this one; nothing was touched."""


class StoreFullError(StoreError):
    """The disk is full; the call did not happen, and may be tried again when there is room."""


class PayloadTooLargeError(StoreError):
    """A value to be written or read exceeds the store's limit; nothing was sent or changed."""


class LedgerFencedError(StoreError):
    """The ledger was taken over by a newer owner; the append did not happen."""


class LedgerNotFoundError(StoreError):
    """There is no such ledger, or no such entry in it; nothing was touched."""


class VersionMismatchError(StoreError):
    """The metadata value is not at the expected version; nothing was touched."""


class DamagedValueError(CorruptStateError):
    """A metadata value is not what was written; it may be replaced or deleted, at the version that it has.

    Args:
        error: What is wrong.
        version: Its version.
    """

    def __init__(self, error: CorruptStateError, version: int) -> None:
        super().__init__(error.what, offset=error.offset, expected=error.expected, found=error.found)
        self.version = version


class Versioned(NamedTuple):
    """A metadata value and the version that the next `put` must expect."""

    data: bytes
    version: int


class LedgerStore(Protocol):
    """Logs of opaque entries. Ids of ledgers rise and are never used again; entry ids of a ledger are 0, 1, 2, ..."""

    def create(self, owner: str) -> int:
        """Make an empty ledger and return its id, above every id returned before.

        Args:
            owner: Whom it belongs to, so that a ledger orphaned by a crash can be found by `owned_by`. Any text that
                has a form in UTF-8, taken as it is.

        Raises:
            ValueError: The owner holds a lone surrogate.
        """
        ...

    def append(self, ledger_id: int, entry: bytes) -> int:
        """Append one entry, sync, and return its entry id.

        Raises:
            LedgerNotFoundError: There is no such ledger.
            LedgerFencedError: The ledger was fenced.
        """
        ...

    def append_all(self, entries: Sequence[tuple[int, bytes]]) -> list[int]:
        """Append entries to any ledgers with one sync, all or nothing, and return their entry ids in order.

        Raises:
            LedgerNotFoundError: One of the ledgers does not exist.
            LedgerFencedError: One of the ledgers was fenced.
        """
        ...

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """Return the entries from `first` (included) to `end` (excluded); an empty range is ``[]`` wherever it lies.

        Raises:
            LedgerNotFoundError: There is no such ledger, or one of the entries does not exist.
            ValueError: `first` is negative or `end` is below it.
        """
        ...

    def last(self, ledger_id: int) -> int:
        """Return the id of the last entry, -1 for an empty ledger.

        Raises:
            LedgerNotFoundError: There is no such ledger.
        """
        ...

    def delete(self, ledger_id: int) -> None:
        """Delete a ledger and its entries; one that does not exist is deleted already."""
        ...

    def fence(self, ledger_id: int) -> int:
        """Refuse every append from now on, also after a reopen, and return the id of the last entry.

        Raises:
            LedgerNotFoundError: There is no such ledger.
        """
        ...

    def owned_by(self, owner: str) -> list[int]:
        """Return the ids of an owner's ledgers, fenced ones too, lowest first.

        Raises:
            ValueError: The owner holds a lone surrogate.
        """
        ...

    def owners(self) -> list[str]:
        """Return every owner that has a ledger, once, sorted by code points.

        It may be O(ledgers): it is for a check of the whole store.
        """
        ...


class MetadataStore(Protocol):
    """Small values under slash-separated paths such as ``/managed-ledgers/orders/billing``.

    A path begins with a slash, ends without one, has no empty name in it and has a form in UTF-8, as a text with a
    lone surrogate has not; another is a `ValueError`. Children are sorted by code points. The
    versions of a path never repeat, also when its value is deleted and made again, so that an old expectation
    never matches a new value.
    """

    def get(self, path: str) -> Versioned | None:
        """Return the value and its version, or None where there is none.

        Raises:
            PayloadTooLargeError: It was written under a larger limit than this store has. It may be replaced or
                deleted.
        """
        ...

    def put(self, path: str, data: bytes, *, expected_version: int) -> int:
        """Replace a value if it is still at the expected version, sync, and return the new version.

        Args:
            path: The whole path.
            data: The new value.
            expected_version: What `get` returned, or `ABSENT` to create the value.

        Raises:
            VersionMismatchError: The value is at another version, exists, or does not exist.
            PayloadTooLargeError: The value has more bytes than the store takes.
        """
        ...

    def delete(self, path: str, *, expected_version: int) -> None:
        """Delete a value if it is still at the expected version.

        Raises:
            VersionMismatchError: The value is at another version, or does not exist.
        """
        ...

    def children(self, path: str) -> list[str]:
        """Return the names one level below a path or ``/`` that hold a value or lead to one, sorted."""
        ...


class Store(Protocol):
    """A ledger store and a metadata store that belong together."""

    @property
    def ledgers(self) -> LedgerStore:
        """The logs."""
        ...

    @property
    def metadata(self) -> MetadataStore:
        """The small values."""
        ...

    def close(self) -> None:
        """Let go of the storage so that another may open it, and refuse every later call with `StoreError`.

        Closing twice does nothing.
        """
        ...


def check_owner(owner: str) -> None:
    """Raise `ValueError` unless an owner has a form in UTF-8."""
    if not _has_utf8(owner):
        raise ValueError(f"not an owner, since it has no form in UTF-8: {owner!r}")


def _has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_value_size(path: str, byte_count: int, *, bytes_max: int) -> None:
    """Raise `PayloadTooLargeError` if a metadata value has more than `bytes_max` bytes."""
    if byte_count > bytes_max:
        raise PayloadTooLargeError(
            f"{path}: a value must have at most {bytes_max} bytes (metadata_value_bytes_max), got {byte_count}"
        )


def check_path(path: str) -> None:
    """Raise `ValueError` unless a path begins with a slash, ends without one, has no empty name, and is UTF-8."""
    first, *names = path.split("/")
    if first or not names or not all(names) or not _has_utf8(path):
        raise ValueError(f"not a metadata path: {path!r}")


def children_prefix(path: str) -> str:
    """Return what the paths below a path begin with; ``/`` itself is the top."""
    if path == "/":
        return path
    check_path(path)
    return f"{path}/"
