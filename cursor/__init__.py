"""A subscription's cursor: acks in memory, a journal on a store, recovery that never guesses."""

from cursor.auto_age import AUTO, AutoAge
from cursor.config import CursorConfig
from cursor.journal_format import Format, Repair
from cursor.managed import ManagedCursor, persist_all
from cursor.message_log import Message, MessageLog
from cursor.outcome import CursorStats, PersistResult, Receipt, ReceiptStatus, RecoveryReport, Route, Source
from cursor.recovery import UnreadableCursorError
from cursor.store import (
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
from cursor.stores.memory import MemoryStore
from cursor.stores.sqlite import SqliteStore
from cursor.subscription import Delivery, Subscription

__all__ = [
    "AUTO",
    "AutoAge",
    "CursorConfig",
    "CursorStats",
    "Delivery",
    "Format",
    "LedgerFencedError",
    "LedgerNotFoundError",
    "LedgerStore",
    "ManagedCursor",
    "MemoryStore",
    "Message",
    "MessageLog",
    "MetadataStore",
    "PayloadTooLargeError",
    "PersistResult",
    "Receipt",
    "ReceiptStatus",
    "RecoveryReport",
    "Repair",
    "Route",
    "Source",
    "SqliteStore",
    "Store",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "Subscription",
    "UnreadableCursorError",
    "VersionMismatchError",
    "persist_all",
]
