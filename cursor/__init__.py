"""A subscription's cursor: acks in memory, a journal on a store, recovery that never guesses."""

from cursor.auto_age import AUTO, AutoAge
from cursor.bucket_registry import CursorBucketRegistry, MetadataBucketRegistry
from cursor.config import CursorConfig
from cursor.journal_format import Format, Repair
from cursor.listener import Change, CursorListener
from cursor.managed import ManagedCursor, persist_all
from cursor.message_log import Message, MessageLog
from cursor.outcome import CursorStats, PersistResult, Receipt, ReceiptStatus, RecoveryReport, Route, Source
from cursor.policy_store import Policies, PolicyOwner, PolicyStore
from cursor.publisher import CounterSample, PublishCounters, PublishTransaction, TopicPublisher
from cursor.recovery import UnreadableCursorError
from cursor.shared_holes import BucketReferences, SharedHoles
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
from cursor.stores.file import FileStore
from cursor.stores.memory import MemoryStore
from cursor.stores.sqlite import SqliteStore
from cursor.subscription import (
    AckRefusedError,
    BlockReason,
    ConsumerBusyError,
    ConsumerClosedError,
    DeadLetterPolicy,
    Delivery,
    Subscription,
    SubscriptionOptions,
    SubscriptionType,
)

__all__ = [
    "AUTO",
    "AckRefusedError",
    "AutoAge",
    "BlockReason",
    "BucketReferences",
    "Change",
    "ConsumerBusyError",
    "ConsumerClosedError",
    "CounterSample",
    "CursorBucketRegistry",
    "CursorConfig",
    "CursorListener",
    "CursorStats",
    "DeadLetterPolicy",
    "Delivery",
    "FileStore",
    "Format",
    "LedgerFencedError",
    "LedgerNotFoundError",
    "LedgerStore",
    "ManagedCursor",
    "MemoryStore",
    "Message",
    "MessageLog",
    "MetadataBucketRegistry",
    "MetadataStore",
    "PayloadTooLargeError",
    "PersistResult",
    "Policies",
    "PolicyOwner",
    "PolicyStore",
    "PublishCounters",
    "PublishTransaction",
    "Receipt",
    "ReceiptStatus",
    "RecoveryReport",
    "Repair",
    "Route",
    "SharedHoles",
    "Source",
    "SqliteStore",
    "Store",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "Subscription",
    "SubscriptionOptions",
    "SubscriptionType",
    "TopicPublisher",
    "UnreadableCursorError",
    "VersionMismatchError",
    "persist_all",
]
