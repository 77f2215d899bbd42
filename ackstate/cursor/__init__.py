"""A subscription's cursor: acks in memory, a journal on a store, recovery that never guesses."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ackstate.cursor.config import CursorConfig, RangeForm
    from ackstate.cursor.journal.deletion import delete_subscription
    from ackstate.cursor.journal.format import Format, Repair
    from ackstate.cursor.journal.recovery import UnreadableCursorError
    from ackstate.cursor.listener import Change, CursorListener
    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.persist.open_cursors import open_cursors
    from ackstate.cursor.persist.opening import CursorOpening
    from ackstate.cursor.persist.persist_all import persist_all
    from ackstate.cursor.results import (
        CursorStats,
        PersistResult,
        PersistTarget,
        Receipt,
        ReceiptStatus,
        RecoveryReport,
        RecoverySource,
    )
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
    from ackstate.cursor.subscription import (
        AckRefusedError,
        BlockReason,
        ConsumerBusyError,
        ConsumerClosedError,
        DeadLetterPolicy,
        Delivery,
        DispatchRound,
        Subscription,
        SubscriptionOptions,
        SubscriptionType,
    )
    from ackstate.dispatch.stats import ConsumerUse, DispatchStats, RuleStats
    from ackstate.inspect.hole_report import HoleReport
    from ackstate.inspect.stored_subscriptions import StoredSubscription, stored_subscriptions
    from ackstate.stores.memory import MemoryStore
    from ackstate.stores.sqlite import SqliteStore
    from ackstate.topic.bucket_registry import MetadataBucketRegistry
    from ackstate.topic.deletion import delete_topic
    from ackstate.topic.message import NO_DELAY, Message
    from ackstate.topic.message_log import MessageLog
    from ackstate.topic.policy_store import Policies, PolicyOwner, PolicyStore
    from ackstate.topic.publish_all import publish_all
    from ackstate.topic.publisher import CounterSample, PublishCounters, TopicPublisher
    from ackstate.topic.retention import (
        BacklogPolicy,
        BacklogQuotaExceededError,
        BacklogReport,
        Retention,
        backlog_report,
        trim_log,
    )
    from ackstate.topic.settings import TopicSettings
    from ackstate.topic.start import Start, StartTime
    from ackstate.topic.subscribing import SubscriptionRequest
    from ackstate.topic.subscription_type import SubscriptionTypeError
    from ackstate.topic.topic import Topic
    from ackstate.topic.topics import Topics

__all__ = [
    "NO_DELAY",
    "AckRefusedError",
    "BacklogPolicy",
    "BacklogQuotaExceededError",
    "BacklogReport",
    "BlockReason",
    "Change",
    "ConsumerBusyError",
    "ConsumerClosedError",
    "ConsumerUse",
    "CounterSample",
    "CursorConfig",
    "CursorListener",
    "CursorOpening",
    "CursorStats",
    "DeadLetterPolicy",
    "Delivery",
    "DispatchRound",
    "DispatchStats",
    "Format",
    "HoleReport",
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
    "PersistTarget",
    "Policies",
    "PolicyOwner",
    "PolicyStore",
    "PublishCounters",
    "RangeForm",
    "Receipt",
    "ReceiptStatus",
    "RecoveryReport",
    "RecoverySource",
    "Repair",
    "Retention",
    "RuleStats",
    "SqliteStore",
    "Start",
    "StartTime",
    "Store",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "StoredSubscription",
    "Subscription",
    "SubscriptionOptions",
    "SubscriptionRequest",
    "SubscriptionType",
    "SubscriptionTypeError",
    "Topic",
    "TopicPublisher",
    "TopicSettings",
    "Topics",
    "UnreadableCursorError",
    "VersionMismatchError",
    "backlog_report",
    "delete_subscription",
    "delete_topic",
    "open_cursors",
    "persist_all",
    "publish_all",
    "stored_subscriptions",
    "trim_log",
]

# A module is imported when one of its names is first used: most programs need few, and all of them take 0.2 s.
_NAMES = {
    "ackstate.topic.bucket_registry": ("MetadataBucketRegistry",),
    "ackstate.cursor.config": ("CursorConfig", "RangeForm"),
    "ackstate.dispatch.stats": ("ConsumerUse", "DispatchStats", "RuleStats"),
    "ackstate.cursor.journal.format": ("Format", "Repair"),
    "ackstate.inspect.hole_report": ("HoleReport",),
    "ackstate.inspect.stored_subscriptions": ("StoredSubscription", "stored_subscriptions"),
    "ackstate.cursor.listener": ("Change", "CursorListener"),
    "ackstate.cursor.managed": ("ManagedCursor",),
    "ackstate.cursor.persist.open_cursors": ("open_cursors",),
    "ackstate.cursor.persist.opening": ("CursorOpening",),
    "ackstate.cursor.persist.persist_all": ("persist_all",),
    "ackstate.topic.message": ("NO_DELAY", "Message"),
    "ackstate.topic.message_log": ("MessageLog",),
    "ackstate.cursor.results": (
        "CursorStats",
        "PersistResult",
        "Receipt",
        "ReceiptStatus",
        "RecoveryReport",
        "PersistTarget",
        "RecoverySource",
    ),
    "ackstate.topic.policy_store": ("Policies", "PolicyOwner", "PolicyStore"),
    "ackstate.topic.deletion": ("delete_topic",),
    "ackstate.topic.publish_all": ("publish_all",),
    "ackstate.topic.publisher": ("CounterSample", "PublishCounters", "TopicPublisher"),
    "ackstate.topic.retention": (
        "BacklogPolicy",
        "BacklogQuotaExceededError",
        "BacklogReport",
        "Retention",
        "backlog_report",
        "trim_log",
    ),
    "ackstate.topic.settings": ("TopicSettings",),
    "ackstate.topic.start": ("Start", "StartTime"),
    "ackstate.topic.subscribing": ("SubscriptionRequest",),
    "ackstate.topic.subscription_type": ("SubscriptionTypeError",),
    "ackstate.topic.topic": ("Topic",),
    "ackstate.topic.topics": ("Topics",),
    "ackstate.cursor.journal.deletion": ("delete_subscription",),
    "ackstate.cursor.journal.recovery": ("UnreadableCursorError",),
    "ackstate.cursor.store": (
        "LedgerFencedError",
        "LedgerNotFoundError",
        "LedgerStore",
        "MetadataStore",
        "PayloadTooLargeError",
        "Store",
        "StoreError",
        "StoreFullError",
        "StoreLockedError",
        "VersionMismatchError",
    ),
    "ackstate.stores.memory": ("MemoryStore",),
    "ackstate.stores.sqlite": ("SqliteStore",),
    "ackstate.cursor.subscription": (
        "AckRefusedError",
        "BlockReason",
        "ConsumerBusyError",
        "ConsumerClosedError",
        "DeadLetterPolicy",
        "Delivery",
        "DispatchRound",
        "Subscription",
        "SubscriptionOptions",
        "SubscriptionType",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # Else every name would be one.

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if __name__ == "cursor":
    raise ImportError("cursor is a link to a folder of ackstate: import ackstate.cursor")
