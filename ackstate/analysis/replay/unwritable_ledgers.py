"""A store of a broker that cannot write cursor ledgers: every persist falls back to the metadata store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, final

from ackstate.stores.base import StoreError

if TYPE_CHECKING:
    from ackstate.stores.base import LedgerStore, MetadataStore, Store


@final
class StoreWithoutLedgers:
    """A store that creates no ledgers; it delegates all else to another store.

    Args:
        store: The other store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def ledgers(self) -> LedgerStore:
        return cast("LedgerStore", self)

    @property
    def metadata(self) -> MetadataStore:
        return self._store.metadata

    def close(self) -> None:
        self._store.close()

    def create(self, owner: str) -> int:
        """Refuse to create a ledger.

        Raises:
            StoreError: Always.
        """
        raise StoreError(f"no ledger can be written for {owner}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store.ledgers, name)
