"""A subscription's cursor: acks in memory, a journal on a store, recovery that never guesses."""

from cursor.config import CursorConfig
from cursor.managed import ManagedCursor, persist_all
from cursor.message_log import Message, MessageLog
from cursor.outcome import CursorStats, PersistResult, Receipt, ReceiptStatus, RecoveryReport, Route, Source
from cursor.store import (
    LedgerFencedError,
    LedgerNotFoundError,
    LedgerStore,
    MetadataStore,
    Store,
    StoreError,
    StoreFullError,
    StoreLockedError,
    VersionMismatchError,
)
from cursor.stores.memory import MemoryStore
from cursor.stores.sqlite import SqliteStore
from cursor.subscription import Delivery, Subscription

__all__ = [
    "CursorConfig",
    "CursorStats",
    "Delivery",
    "LedgerFencedError",
    "LedgerNotFoundError",
    "LedgerStore",
    "ManagedCursor",
    "MemoryStore",
    "Message",
    "MessageLog",
    "MetadataStore",
    "PersistResult",
    "Receipt",
    "ReceiptStatus",
    "RecoveryReport",
    "Route",
    "Source",
    "SqliteStore",
    "Store",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "Subscription",
    "VersionMismatchError",
    "persist_all",
]
