"""A read-only view of a cursor: its acks, its statistics, and whether a persist is due."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, final

from ackstate.cursor.persist import PersistCounters
from ackstate.cursor.results import CursorStats
from ackstate.cursor.state.view import AckView

if TYPE_CHECKING:
    from ackstate.cursor.persist import Persister
    from ackstate.cursor.results import Receipt
    from ackstate.position import Position

_COUNTERS = tuple(field.name for field in fields(PersistCounters))  # `asdict` would copy each number


@final
class CursorView(AckView):
    """A read-only view of a cursor; see `AckView`."""

    def __init__(self, persister: Persister) -> None:
        super().__init__(persister.state, persister.lock)
        self._persister = persister

    def stats(self) -> CursorStats:
        """Return the cursor's numbers, all of one instant."""
        with self._lock:
            persister, deleted = self._persister, self._state.deleted
            redelivery, young, cut = self.redelivery_if_crashed, self.held_back_count, self.cut_count
            return CursorStats(
                redelivery_if_crashed=redelivery,
                redelivery_unwritten=redelivery - young - cut,
                redelivery_young=young,
                redelivery_cut=cut,
                batches_unwritten=self.changed_batch_count,
                unpersisted_record_bytes=self.unpersisted_record_bytes,
                range_count=deleted.range_count,
                record_bytes=deleted.record_bytes,
                backlog=self.backlog,
                journal_bytes=persister.journal.snapshot_bytes + persister.journal.delta_bytes,
                batches_cut=self.batch_cut_count,
                young_age_ms=persister.young_age.age_ms,
                **{name: getattr(persister.counters, name) for name in _COUNTERS},
            )

    def is_void(self, receipt: Receipt) -> bool:
        """Return whether a reset came after the ack of a receipt of this cursor: it can never be durable."""
        with self._lock:
            return receipt.number <= self._state.void_number

    @property
    def is_closed(self) -> bool:
        """Whether the cursor is closed."""
        return self._persister.closed

    @property
    def next_tick_ms(self) -> int | None:
        """When to call `ManagedCursor.tick` next; None if nothing becomes due before something is accepted.

        A persist that fails is due again after a flush interval.
        """
        return self._persister.next_tick_ms()

    @property
    def last_journal_entry(self) -> Position | None:
        """The cursor ledger and the last entry known to be in it; None if none was written since the cursor was opened.

        None, too, if the state is in the metadata store, or while a new ledger is started.
        """
        return self._persister.journal.last_entry

    def is_persist_due(self, *, now_ms: int) -> bool:
        """Return whether `ManagedCursor.tick` would persist now: acks wait for it, or young acks became old."""
        return self._persister.is_due(now_ms=now_ms)

    @property
    def holds_back_young(self) -> bool:
        """Whether the cursor is configured to hold back young acks."""
        return self._persister.young_age.is_on

    def has_young(self, *, now_ms: int) -> bool:
        """Return whether `ManagedCursor.promote` could make acks durable that `persist` would hold back."""
        return self._persister.has_young(now_ms=now_ms)

    @property
    def counts_entries_to_persist(self) -> bool:
        """Whether `CursorConfig.range_limit_rule` counts acked entries instead of ranges.

        As long as there are at most `range_count_max` of them, each rule persists all.
        """
        return self._persister.planner.counts_entries

    @property
    def range_count_to_persist(self) -> int:
        """How many ranges a persist of everything would hold.

        If `counts_entries_to_persist`, it is the number of acked entries above the mark-delete position. Complexity:
        O(1).
        """
        deleted = self._state.deleted
        # The rule itself counts more: an ack in a later ledger may add all entries of an earlier one to its count.
        return len(deleted) if self.counts_entries_to_persist else deleted.range_count
