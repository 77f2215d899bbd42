"""The ack state of a subscription with out-of-order acknowledgement: exact, within limits, safe in a crash.

The names here are those that most programs need; a package has the others of its subject.
"""

from typing import TYPE_CHECKING, Any

from ackstate.aio import AsyncTopics
from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor import CursorConfig, Format, ManagedCursor, Receipt, Repair, UnreadableCursorError
from ackstate.deleted_ranges import DeletedRanges, Run
from ackstate.delivery_ruler import DeliveryRuler
from ackstate.dispatch import (
    AckRefusedError,
    ConsumerBusyError,
    ConsumerClosedError,
    DeadLetterPolicy,
    Delivery,
    Start,
    StartTime,
    Subscription,
    SubscriptionType,
)
from ackstate.errors import (
    AckStateError,
    CorruptStateError,
    CursorClosedError,
    CursorFencedError,
    InvalidPositionError,
    LogFencedError,
    TopicClosedError,
    UnsupportedVersionError,
)
from ackstate.ledger_map import LedgerMap
from ackstate.limits import BrokerLimit, DispatchGate, GateLimits
from ackstate.message import NO_DELAY, Message
from ackstate.position import Position
from ackstate.selection import Keep, Selection, select
from ackstate.stores import (
    LedgerFencedError,
    LedgerNotFoundError,
    MemoryStore,
    PayloadTooLargeError,
    SqliteStore,
    StoreError,
    StoreFullError,
    StoreLockedError,
    VersionMismatchError,
)
from ackstate.topic import (
    BacklogQuotaExceededError,
    SubscriptionTypeError,
    Topic,
    Topics,
    TopicSettings,
)

if TYPE_CHECKING:
    from ackstate.stores.bookkeeper import BookKeeperStore

__all__ = [
    "NO_DELAY",
    "AckRefusedError",
    "AckStateError",
    "AsyncTopics",
    "BacklogQuotaExceededError",
    "BatchIndexes",
    "BookKeeperStore",
    "BrokerLimit",
    "ConsumerBusyError",
    "ConsumerClosedError",
    "CorruptStateError",
    "CursorClosedError",
    "CursorConfig",
    "CursorFencedError",
    "DeadLetterPolicy",
    "DeletedRanges",
    "Delivery",
    "DeliveryRuler",
    "DispatchGate",
    "Format",
    "GateLimits",
    "InvalidPositionError",
    "Keep",
    "LedgerFencedError",
    "LedgerMap",
    "LedgerNotFoundError",
    "LogFencedError",
    "ManagedCursor",
    "MemoryStore",
    "Message",
    "PayloadTooLargeError",
    "Position",
    "Receipt",
    "Repair",
    "Run",
    "Selection",
    "SqliteStore",
    "Start",
    "StartTime",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "Subscription",
    "SubscriptionType",
    "SubscriptionTypeError",
    "Topic",
    "TopicClosedError",
    "TopicSettings",
    "Topics",
    "UnreadableCursorError",
    "UnsupportedVersionError",
    "VersionMismatchError",
    "select",
]


def __getattr__(name: str) -> Any:
    """Return the store that needs the extra `bookkeeper`, which is imported when it is used."""
    if name != "BookKeeperStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ackstate.stores.bookkeeper import BookKeeperStore  # noqa: PLC0415 - its libraries may not be installed

    return BookKeeperStore
