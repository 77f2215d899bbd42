"""A subscription's cursor: acks in memory, a journal on a store, recovery that never guesses."""

from ackstate.checkout import alias
from ackstate.cursor.auto_age import AUTO, AutoAge
from ackstate.cursor.bucket_registry import CursorBucketRegistry, MetadataBucketRegistry
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.journal_format import Format, Repair
from ackstate.cursor.listener import Change, CursorListener
from ackstate.cursor.managed import ManagedCursor, persist_all
from ackstate.cursor.message_log import Message, MessageLog
from ackstate.cursor.outcome import CursorStats, PersistResult, Receipt, ReceiptStatus, RecoveryReport, Route, Source
from ackstate.cursor.policy_store import Policies, PolicyOwner, PolicyStore
from ackstate.cursor.publisher import CounterSample, PublishCounters, PublishTransaction, TopicPublisher
from ackstate.cursor.recovery import UnreadableCursorError
from ackstate.cursor.shared_holes import BucketReferences, SharedHoles
from ackstate.cursor.store import (
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
from ackstate.cursor.stores.file import FileStore
from ackstate.cursor.stores.memory import MemoryStore
from ackstate.cursor.stores.sqlite import SqliteStore
from ackstate.cursor.subscription import (
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

if __name__ == "cursor":
    alias(__name__)
