"""A subscription's cursor: acks in memory, a journal on a store, recovery that never guesses."""

from ackstate.cursor.config import CursorConfig as CursorConfig, RangeForm as RangeForm
from ackstate.cursor.cursor import CursorOpening as CursorOpening, ManagedCursor as ManagedCursor, open_cursors
from ackstate.cursor.formats import Format as Format, Repair as Repair
from ackstate.cursor.journal import delete_subscription as delete_subscription
from ackstate.cursor.persist import persist_all
from ackstate.cursor.recovery import UnreadableCursorError as UnreadableCursorError
from ackstate.cursor.results import (
    Change as Change,
    CursorListener,
    CursorStats as CursorStats,
    PersistResult as PersistResult,
    PersistTarget as PersistTarget,
    Receipt as Receipt,
    ReceiptStatus as ReceiptStatus,
    RecoveryReport as RecoveryReport,
    RecoverySource as RecoverySource,
)

__all__ = ["CursorListener", "open_cursors", "persist_all"]

if __name__ == "cursor":
    raise ImportError("cursor is a link to a folder of ackstate: import ackstate.cursor")
