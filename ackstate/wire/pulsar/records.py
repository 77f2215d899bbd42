"""The two records in which Pulsar stores a cursor's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.position import LEDGER_ID_MAX, Position, check_position

if TYPE_CHECKING:
    from collections.abc import Mapping

NO_LEDGER = -1
"""The `cursors_ledger_id` of a cursor whose whole state is in its metadata record."""


@dataclass(frozen=True, slots=True)
class PositionInfo:
    """An entry of a cursor ledger: the whole state of the cursor at one moment.

    Attributes:
        position: The mark-delete position: every entry up to it, inclusive, is acked.
        deleted: Individually acked entries; Pulsar may write some at or below the position. Must not be changed.
        batch: Unacked indexes of partly acked batches. Must not be changed.
        properties: Properties of the latest mark-delete, name -> signed 64-bit number.
        unknown: Unknown fields, unchanged; written back behind all others.
        idle_since_ms: Since when no consumer used the cursor, in milliseconds since 1970; None if the entry lacks it.
            Pulsar 5.0.1 writes it, takes None and 0 as the moment at which it reads the entry, and deletes a
            subscription that is idle for longer than its namespace allows.
    """

    position: Position
    deleted: DeletedRanges = field(default_factory=DeletedRanges)
    batch: BatchIndexes = field(default_factory=BatchIndexes)
    properties: Mapping[str, int] = field(default_factory=dict)
    unknown: bytes = b""
    idle_since_ms: int | None = None

    def __post_init__(self) -> None:
        check_position(self.position)


@dataclass(frozen=True, slots=True)
class CursorInfo:
    """A cursor's record in the metadata store.

    Attributes:
        cursors_ledger_id: The cursor ledger with the state; `NO_LEDGER` (-1) if the state is in this record.
        mark_delete: Every entry up to it, inclusive, was acked when this was written; None if the record lacks it.
        deleted: As in `PositionInfo`.
        batch: As in `PositionInfo`.
        properties: As in `PositionInfo`.
        last_active_ms: When the cursor was last used, in milliseconds since 1970; None if the record lacks it.
        cursor_properties: Properties set by the application, name -> text.
        unknown: As in `PositionInfo`.
        term: Number of the cursor's owner, in a field of ours that Pulsar ignores; None in records written by Pulsar.
        idle_since_ms: As in `PositionInfo`.
    """

    cursors_ledger_id: int
    mark_delete: Position | None = None
    deleted: DeletedRanges = field(default_factory=DeletedRanges)
    batch: BatchIndexes = field(default_factory=BatchIndexes)
    properties: Mapping[str, int] = field(default_factory=dict)
    last_active_ms: int | None = None
    cursor_properties: Mapping[str, str] = field(default_factory=dict)
    unknown: bytes = b""
    term: int | None = None
    idle_since_ms: int | None = None

    def __post_init__(self) -> None:
        if not NO_LEDGER <= self.cursors_ledger_id <= LEDGER_ID_MAX:
            raise ValueError(f"cursor ledger must be in {NO_LEDGER}..{LEDGER_ID_MAX}, got {self.cursors_ledger_id}")
        if self.mark_delete is not None:
            check_position(self.mark_delete)
