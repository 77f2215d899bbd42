"""Writes as values, so that a store can execute many independent ones with few syncs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ackstate.errors import AckStateError
from ackstate.stores.base import LedgerStore, MetadataStore, Store, check_owner, check_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class StoreParts(Protocol):
    """The parts of a store that are written to."""

    @property
    def ledgers(self) -> LedgerStore:
        """The logs."""
        ...

    @property
    def metadata(self) -> MetadataStore:
        """The small values."""
        ...


class SeparateParts(NamedTuple):
    """The parts of a store without the store."""

    ledgers: LedgerStore
    metadata: MetadataStore


class CreateLedger(NamedTuple):
    """`LedgerStore.create`; the result is the id."""

    owner: str

    def execute(self, store: StoreParts) -> int:
        """Call the store, and return the result."""
        return store.ledgers.create(self.owner)

    def check(self) -> None:
        """Raise `ValueError` or `TypeError` for an invalid argument."""
        check_owner(self.owner)


class AppendEntry(NamedTuple):
    """`LedgerStore.append`; the result is the entry id."""

    ledger_id: int
    entry: bytes

    def execute(self, store: StoreParts) -> int:
        """Call the store, and return the result."""
        return store.ledgers.append(self.ledger_id, self.entry)

    def check(self) -> None:
        """Raise `ValueError` or `TypeError` for an invalid argument."""
        memoryview(self.entry)


class FenceLedger(NamedTuple):
    """`LedgerStore.fence`; the result is the id of the last entry."""

    ledger_id: int

    def execute(self, store: StoreParts) -> int:
        """Call the store, and return the result."""
        return store.ledgers.fence(self.ledger_id)

    def check(self) -> None:
        """Do nothing: every id is valid."""


class DeleteLedger(NamedTuple):
    """`LedgerStore.delete`; the result is 0."""

    ledger_id: int

    def execute(self, store: StoreParts) -> int:
        """Call the store, and return the result."""
        store.ledgers.delete(self.ledger_id)
        return 0

    def check(self) -> None:
        """Do nothing: every id is valid."""


class PutValue(NamedTuple):
    """`MetadataStore.put`; the result is the new version."""

    path: str
    data: bytes
    expected_version: int

    def execute(self, store: StoreParts) -> int:
        """Call the store, and return the result."""
        return store.metadata.put(self.path, self.data, expected_version=self.expected_version)

    def check(self) -> None:
        """Raise `ValueError` or `TypeError` for an invalid argument."""
        check_path(self.path)
        memoryview(self.data)


class DeleteValue(NamedTuple):
    """`MetadataStore.delete`; the result is 0."""

    path: str
    expected_version: int

    def execute(self, store: StoreParts) -> int:
        """Call the store, and return the result."""
        store.metadata.delete(self.path, expected_version=self.expected_version)
        return 0

    def check(self) -> None:
        """Raise `ValueError` for an invalid path."""
        check_path(self.path)


Write = CreateLedger | AppendEntry | FenceLedger | DeleteLedger | PutValue | DeleteValue
"""One mutating call of a store."""


class GroupStore(Store, Protocol):
    """A store that can execute many writes together. A `Store` need not: its writes are executed one by one then."""

    def write_all(self, writes: Sequence[Write]) -> list[int | AckStateError]:
        """Execute writes that do not depend on each other, each as its own call would, with as few syncs as possible.

        When this returns, every write that has a result is synced. If a crash comes before, any of the writes may have
        happened and any not, but none by half.

        Args:
            writes: No two of them concern the same ledger or value, and no result is needed for another one.

        Returns:
            For each, in order, the result, or the error that its own call would have raised; no error comes twice.

        Raises:
            TypeError, ValueError: An argument of a write is invalid; nothing was written.
        """
        ...


def write_all(store: Store, writes: Sequence[Write]) -> list[int | AckStateError]:
    """Execute writes as `GroupStore.write_all`, or one by one if the class of the store has no such method."""
    # Looked up in the class: an object that forwards unknown names to a store, such as one that counts calls, must see
    # each call.
    together: Callable[[Store, Sequence[Write]], list[int | AckStateError]] | None
    together = getattr(type(store), "write_all", None)
    return write_each(store, writes) if together is None else together(store, writes)


def write_each(store: Store, writes: Sequence[Write]) -> list[int | AckStateError]:
    """Execute writes one by one, each with a sync of its own; otherwise as `GroupStore.write_all`."""
    check_writes(writes)
    return [_outcome(store, write) for write in writes]


def check_writes(writes: Sequence[Write]) -> None:
    """Raise `TypeError` or `ValueError` if an argument of a write is invalid."""
    for write in writes:
        write.check()


def _outcome(store: Store, write: Write) -> int | AckStateError:
    try:
        return write.execute(store)
    except AckStateError as error:
        return error
