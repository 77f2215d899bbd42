"""The storages that come with the library; each passes `ackstate.testing.check_store`."""

from ackstate.stores.base import (
    LedgerFencedError,
    LedgerNotFoundError,
    LedgerStore,
    MetadataStore,
    PayloadTooLargeError,
    Store,
    StoreError,
    StoreFullError,
    StoreLockedError,
    VersionMismatchError,
)
from ackstate.stores.memory import (
    MemoryStore,
)
from ackstate.stores.sqlite import (
    SqliteStore,
)

__all__ = [
    "LedgerFencedError",
    "LedgerNotFoundError",
    "LedgerStore",
    "MemoryStore",
    "MetadataStore",
    "PayloadTooLargeError",
    "SqliteStore",
    "Store",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "VersionMismatchError",
]
