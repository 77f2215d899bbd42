"""A subscription's cursor: acks in memory, a journal on a store, recovery that never guesses."""

from ackstate.cursor.config import (
    CursorConfig,
    RangeForm,
)
from ackstate.cursor.cursor import (
    CursorOpening,
    ManagedCursor,
    open_cursors,
)
from ackstate.cursor.formats import (
    Format,
    Repair,
)
from ackstate.cursor.journal import (
    delete_subscription,
)
from ackstate.cursor.listener import (
    Change,
    CursorListener,
)
from ackstate.cursor.persist import (
    persist_all,
)
from ackstate.cursor.recovery import (
    UnreadableCursorError,
)
from ackstate.cursor.results import (
    CursorStats,
    PersistResult,
    PersistTarget,
    Receipt,
    ReceiptStatus,
    RecoveryReport,
    RecoverySource,
)

__all__ = [
    "Change",
    "CursorConfig",
    "CursorListener",
    "CursorOpening",
    "CursorStats",
    "Format",
    "ManagedCursor",
    "PersistResult",
    "PersistTarget",
    "RangeForm",
    "Receipt",
    "ReceiptStatus",
    "RecoveryReport",
    "RecoverySource",
    "Repair",
    "UnreadableCursorError",
    "delete_subscription",
    "open_cursors",
    "persist_all",
]

if __name__ == "cursor":
    raise ImportError("cursor is a link to a folder of ackstate: import ackstate.cursor")
