"""The ack state of one subscription: values, sets and codecs. Pure: no clock, file, lock or log."""

from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.delivery_ruler import DeliveryRuler
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
from ackstate.position import Position
from ackstate.range_store import Run
from ackstate.selection import Keep, Selection, select

__all__ = [
    "AckStateError",
    "BatchIndexes",
    "CorruptStateError",
    "CursorClosedError",
    "CursorFencedError",
    "DeletedRanges",
    "DeliveryRuler",
    "InvalidPositionError",
    "Keep",
    "LedgerMap",
    "LogFencedError",
    "Position",
    "Run",
    "Selection",
    "TopicClosedError",
    "UnsupportedVersionError",
    "select",
]
