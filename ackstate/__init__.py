"""The ack state of a subscription with out-of-order acknowledgement: exact, within limits, safe in a crash.

The names here are those that most programs need; a package has the others of its subject.
"""

from typing import TYPE_CHECKING, Any

from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor import CursorConfig, Format, ManagedCursor, Receipt, Repair, UnreadableCursorError
from ackstate.deleted_ranges import DeletedRanges, Run
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
    from ackstate.aio import AsyncTopics
    from ackstate.stores.bookkeeper import BookKeeperStore

    __version__: str

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
    "DispatchGate",
    "Format",
    "GateLimits",
    "InvalidPositionError",
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
]


def __getattr__(name: str) -> Any:
    """Return what is imported when it is used: what is slow, and the store that needs the extra `bookkeeper`."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - slow

        return version("ackstate")
    if name == "AsyncTopics":
        from ackstate.aio import AsyncTopics  # noqa: PLC0415 - asyncio takes a quarter of the rest

        return AsyncTopics
    if name != "BookKeeperStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from ackstate.stores.bookkeeper import BookKeeperStore  # noqa: PLC0415 - its libraries may not be installed
    except ImportError as error:
        raise ImportError(f"BookKeeperStore needs an extra: pip install 'ackstate[bookkeeper]' ({error})") from error
    return BookKeeperStore
