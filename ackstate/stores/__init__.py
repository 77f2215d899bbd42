"""The storages that come with the library; each passes `ackstate.testing.check_store`."""

from ackstate.stores.base import (
    LedgerFencedError as LedgerFencedError,
    LedgerNotFoundError as LedgerNotFoundError,
    LedgerStore,
    MetadataStore,
    PayloadTooLargeError as PayloadTooLargeError,
    Store,
    StoreError as StoreError,
    StoreFullError as StoreFullError,
    StoreLockedError as StoreLockedError,
    VersionMismatchError as VersionMismatchError,
)
from ackstate.stores.memory import (
    MemoryStore as MemoryStore,
)
from ackstate.stores.sqlite import (
    SqliteStore as SqliteStore,
)

__all__ = ["LedgerStore", "MetadataStore", "Store"]
