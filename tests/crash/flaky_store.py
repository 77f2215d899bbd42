"""A store whose ledgers cannot be appended to for a while, so that a cursor falls back to the metadata store."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from ackstate.cursor.store import StoreError
from ackstate.cursor.writes import write_all, write_each

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ackstate.cursor.store import LedgerStore, MetadataStore, Store
    from ackstate.cursor.writes import Write
    from ackstate.errors import AckStateError


@final
class FlakyStore:
    """Forwards every call to a store, except appends while these are refused.

    Args:
        store: The store; it is closed with this one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ledgers: Any = _FlakyLedgers(store.ledgers)
        self.metadata: MetadataStore = store.metadata

    @contextmanager
    def refusing_appends(self) -> Iterator[None]:
        """Refuse every append meanwhile, with `StoreError`."""
        self.ledgers.is_broken = True
        try:
            yield
        finally:
            self.ledgers.is_broken = False

    def write_all(self, writes: Sequence[Write]) -> list[int | AckStateError]:
        """Execute writes together, or one by one while appends are refused."""
        return write_each(self, writes) if self.ledgers.is_broken else write_all(self._store, writes)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


@final
class _FlakyLedgers:
    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self.is_broken = False

    def append(self, ledger_id: int, entry: bytes) -> int:
        self._check()
        return self._ledgers.append(ledger_id, entry)

    def append_all(self, entries: Sequence[tuple[int, bytes]]) -> list[int]:
        self._check()
        return self._ledgers.append_all(entries)

    def _check(self) -> None:
        if self.is_broken:
            raise StoreError("the ledgers are out of order")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledgers, name)
