"""A subscription's cursor: acks in memory, a journal on a store, recovery that never guesses."""

from ackstate.cursor.config import (
    CursorConfig,
    RangeForm,
)
from ackstate.cursor.journal.deletion import (
    delete_subscription,
)
from ackstate.cursor.journal.format import (
    Format,
    Repair,
)
from ackstate.cursor.journal.recovery import (
    UnreadableCursorError,
)
from ackstate.cursor.listener import (
    Change,
    CursorListener,
)
from ackstate.cursor.managed import (
    ManagedCursor,
)
from ackstate.cursor.persist.open_cursors import (
    open_cursors,
)
from ackstate.cursor.persist.opening import (
    CursorOpening,
)
from ackstate.cursor.persist.persist_all import (
    persist_all,
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
