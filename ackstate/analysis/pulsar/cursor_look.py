"""A cursor in a broker's memory at one moment, from the broker's answer: its acks, and the state of its ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyroaring import BitMap

from ackstate.analysis.pulsar.internal_stats import acked, read_position
from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ackstate.analysis.pulsar.internal_stats import CursorInternals, RedeliveryReported, SubscriptionStats
    from ackstate.position import Position

_OPEN, _NO_LEDGER = "Open", "NoLedger"  # an open cursor writes to its ledger
Entries = dict[int, BitMap]
"""Entries by ledger."""


@dataclass(frozen=True, slots=True)
class CursorLook:
    """A cursor at one moment between `asked_ms` and `answered_ms`, on a clock of the caller."""

    counts: Mapping[int, int]  # entries of each existing ledger of the topic
    mark_delete: Position  # every entry up to it, inclusive, is acked
    deleted: DeletedRanges = field(default_factory=DeletedRanges)  # acked above it; must not be changed
    state: str = _OPEN  # Pulsar's name
    cursor_ledger: int = -1  # that it writes to; -1 if it has not written since it was loaded
    last_entry: int = -1  # the last one there that was certainly written
    laid_out_bytes: int | None = None  # of the ranges in the record laid out last; None: unknown
    is_mark_delete_loaded: bool = False  # the mark-delete certainly has not moved since the topic was loaded
    properties: Mapping[str, int] = field(default_factory=dict)  # of the mark-delete
    read_position: Position | None = None  # None if unknown
    reported: RedeliveryReported | None = None  # by a broker that embeds this library
    asked_ms: int = 0
    answered_ms: int = 0
    load: tuple[str, int] | None = None  # differs after the topic is loaded again; None if unknown
    is_after_failure: bool = False  # the attempt to look before this one failed

    @property
    def has_written(self) -> bool:
        """Whether the last record was written to the cursor ledger, under the current settings."""
        return self.state == _OPEN and self.last_entry >= 0

    @property
    def below_count(self) -> int:
        """Entries up to the mark-delete that may be redelivered: not trimmed, and not durable since before the load."""
        return 0 if self.is_mark_delete_loaded else self.count_up_to(self.mark_delete)

    def advanced_since(self, earlier: CursorLook) -> int:
        """Existing entries above the earlier mark-delete and up to this one."""
        return self.count_up_to(self.mark_delete) - self.count_up_to(earlier.mark_delete)

    def count_up_to(self, position: Position) -> int:
        """Return the number of existing entries at or below a position."""
        whole = sum(count for ledger_id, count in self.counts.items() if ledger_id < position.ledger_id)
        return whole + min(position.entry_id + 1, self.counts.get(position.ledger_id, 0))

    @property
    def is_unwritten(self) -> bool:
        """Whether no record was written to a cursor ledger since the topic was loaded."""
        return self.state == _NO_LEDGER and self.cursor_ledger < 0

    @property
    def is_all_durable(self) -> bool:
        """Whether the broker itself reports that all acks are durable; one of Pulsar does not."""
        return self.reported is not None and not self.reported.entries and not self.reported.batches

    def acked_entries(self) -> Entries:
        """Return all acked entries of the existing ledgers."""
        found: Entries = {}
        for ledger_id, count in self.counts.items():
            if ledger_id <= self.mark_delete.ledger_id:
                last = count if ledger_id < self.mark_delete.ledger_id else min(self.mark_delete.entry_id + 1, count)
                found[ledger_id] = BitMap(range(last))
        for ledger_id, bitmap in self.deleted.bitmaps():
            if ledger_id in self.counts:
                found[ledger_id] = found.get(ledger_id, BitMap()) | bitmap
        return {ledger_id: bitmap for ledger_id, bitmap in found.items() if bitmap}

    def deleted_entries(self) -> Entries:
        """Return the acked entries above the mark-delete in existing ledgers."""
        return {ledger_id: bitmap.copy() for ledger_id, bitmap in self.deleted.bitmaps() if ledger_id in self.counts}


def look_of(
    cursor: CursorInternals,
    counts: Mapping[int, int],
    stats: SubscriptionStats | None,
    *,
    what: str,
    is_fresh: bool = True,
    **moment: Any,
) -> CursorLook:
    """Return a look from a broker's answer; `is_fresh` tells whether the stats are of the same moment or later."""
    mark_delete, deleted = acked(cursor, counts, what=what)
    return CursorLook(
        counts,
        mark_delete,
        deleted,
        state=cursor.state,
        cursor_ledger=cursor.cursor_ledger,
        last_entry=cursor.cursor_ledger_last_entry,
        laid_out_bytes=stats.non_contiguous_deleted_messages_ranges_serialized_size if stats else None,
        is_mark_delete_loaded=is_fresh and stats is not None and stats.last_mark_delete_advanced_timestamp == 0,
        properties=cursor.properties,
        read_position=read_position(cursor, what=what),
        reported=cursor.redelivery_if_crashed,
        **moment,
    )


def minus(these: Mapping[int, BitMap], those: Mapping[int, BitMap]) -> Entries:
    """Return the entries of one set that another one lacks."""
    left = {ledger_id: bitmap - those.get(ledger_id, BitMap()) for ledger_id, bitmap in these.items()}
    return {ledger_id: bitmap for ledger_id, bitmap in left.items() if bitmap}


def runs(entries: Mapping[int, BitMap]) -> Iterator[tuple[int, int, int]]:
    """Yield ledger, first and last entry of each run, in order."""
    for ledger_id in sorted(entries):
        firsts, lasts = runs_of(entries[ledger_id])
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            yield ledger_id, first, last
