"""The ack state of a subscription with out-of-order acknowledgement: exact, within limits, safe in a crash.

The names here are those that most programs need; a package has the others of its subject.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ackstate.aio import AsyncTopics
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
    from ackstate.stores.bookkeeper import BookKeeperStore
    from ackstate.topic import (
        BacklogQuotaExceededError,
        SubscriptionTypeError,
        Topic,
        Topics,
        TopicSettings,
    )

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

# By module, its names above. Each is imported when it is used: to import all takes longer than most programs need.
_NAMES = {
    "aio": "AsyncTopics",
    "batch_indexes": "BatchIndexes",
    "cursor": "CursorConfig Format ManagedCursor Receipt Repair UnreadableCursorError",
    "deleted_ranges": "DeletedRanges Run",
    "dispatch": (
        "AckRefusedError ConsumerBusyError ConsumerClosedError DeadLetterPolicy Delivery Start StartTime "
        "Subscription SubscriptionType"
    ),
    "errors": (
        "AckStateError CorruptStateError CursorClosedError CursorFencedError InvalidPositionError "
        "LogFencedError TopicClosedError UnsupportedVersionError"
    ),
    "ledger_map": "LedgerMap",
    "limits": "BrokerLimit DispatchGate GateLimits",
    "message": "NO_DELAY Message",
    "position": "Position",
    "stores": (
        "LedgerFencedError LedgerNotFoundError MemoryStore PayloadTooLargeError SqliteStore StoreError "
        "StoreFullError StoreLockedError VersionMismatchError"
    ),
    "stores.bookkeeper": "BookKeeperStore",
    "topic": "BacklogQuotaExceededError SubscriptionTypeError Topic Topics TopicSettings",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Return a name or a package of this one, or the version."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - slow

        return version("ackstate")
    if name in _NAMES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ImportError as error:
        if name != "BookKeeperStore":
            raise
        raise ImportError(f"{name} needs an extra: pip install 'ackstate[bookkeeper]' ({error})") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
