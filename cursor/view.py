"""Answers questions about a cursor and changes nothing: its holes, what acks would change, whether a persist is due."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.ack_hole import ack_effect, hole_at, holes
from ackstate.cursor.listener import covered_runs
from ackstate.cursor.results import CursorStats
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.ack_hole import AckEffect, AckHole
    from ackstate.batch_indexes import BatchIndexes
    from ackstate.cursor.persist.persister import Persister


@final
class CursorView:
    """A read-only view of a cursor. Safe for any number of threads; each answer is of one instant.

    Hold `ManagedCursor.lock` for several answers of one instant.
    """

    def __init__(self, persister: Persister) -> None:
        self._persister = persister
        self._state = persister.state
        self._gauges = persister.gauges
        self._ledgers = persister.state.ledgers
        self._lock = persister.lock

    def stats(self) -> CursorStats:
        """Return the cursor's numbers, all of one instant."""
        with self._lock:
            gauges, persister, deleted = self._gauges, self._persister, self._state.deleted
            redelivery, young, cut = gauges.redelivery_if_crashed, gauges.held_back_count, gauges.cut_count
            return CursorStats(
                redelivery_if_crashed=redelivery,
                redelivery_unwritten=redelivery - young - cut,
                redelivery_young=young,
                redelivery_cut=cut,
                batches_unwritten=gauges.changed_batch_count,
                unpersisted_record_bytes=gauges.unpersisted_record_bytes,
                range_count=deleted.range_count,
                record_bytes=deleted.record_bytes,
                backlog=gauges.backlog,
                journal_bytes=persister.journal.snapshot_bytes + persister.journal.delta_bytes,
                batches_cut=gauges.batch_cut_count,
                young_age_ms=persister.young_age.age_ms,
                young_age_reason=persister.young_age.reason,
                **asdict(persister.counters),
            )

    @property
    def batch(self) -> BatchIndexes:
        """The partly acked batches: to be read, not changed."""
        return self._state.batch

    @property
    def properties(self) -> Mapping[str, int]:
        """The properties of the latest mark-delete: to be read, not changed."""
        return self._state.properties

    @property
    def acked_count(self) -> int:
        """How many entries were acked since the cursor was opened; never falls. Complexity: O(1)."""
        return self._state.acked_count

    @property
    def unpersisted_record_bytes(self) -> int:
        """Size of the ranges acked in memory and not durable, as Pulsar would write them.

        Complexity: O(1); O(containers of the bitmaps) between a reset that failed and the next persist.
        """
        return self._gauges.unpersisted_record_bytes

    @property
    def is_dirty(self) -> bool:
        """Whether something was accepted that no persist has looked at."""
        return self._state.is_dirty

    def is_persist_due(self, *, now_ms: int) -> bool:
        """Tell whether `ManagedCursor.tick` would persist now: something waits, or young acks became old."""
        return self._persister.is_due(now_ms=now_ms)

    @property
    def holds_back_young(self) -> bool:
        """Whether the cursor is configured to hold back young acks."""
        return self._persister.young_age.is_on

    def has_young(self, *, now_ms: int) -> bool:
        """Tell whether `ManagedCursor.promote` could make something durable that `persist` would hold back."""
        return self._persister.has_young(now_ms=now_ms)

    @property
    def counts_entries_to_persist(self) -> bool:
        """Whether `CursorConfig.range_limit_rule` counts acked entries instead of ranges.

        As long as there are at most `range_count_max` of them, each rule persists all.
        """
        return self._persister.planner.counts_entries

    def range_count_to_persist(self, range_count_max: int) -> int:
        """Return how many ranges a persist of everything would hold; ranges that only shared holes part count as one.

        Exact without shared holes; with them it may be too high, see `FilledCount.at_most`. If
        `counts_entries_to_persist`, it is the number of acked entries above the mark-delete position.

        Args:
            range_count_max: The limit that it is for.

        Complexity: O(1) without shared holes, else as there.
        """
        with self._lock:
            return self._persister.planner.range_count_to_persist(range_count_max)

    def is_unacked(self, position: Position) -> bool:
        """Tell whether the log has an entry that is not acked."""
        with self._lock:
            return position in self._ledgers and not self._state.is_acked(position)

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        """Remove the acked entries of a ledger from a bitmap. Complexity: O(containers of the bitmaps)."""
        with self._lock:
            mark_delete = self._state.mark_delete
            if ledger_id < mark_delete.ledger_id:
                entries.clear()
            elif ledger_id == mark_delete.ledger_id:
                entries.remove_range(0, mark_delete.entry_id + 1)
            entries -= self._state.deleted.entries(ledger_id)

    def unacked_between(self, first: Position, end: Position) -> list[tuple[int, BitMap]]:
        """Return the entries of the log that are not acked from `first` (included) to `end` (excluded), by ledger.

        Complexity: O(ledgers, and containers of their bitmaps).
        """
        with self._lock:
            first = max(first, self._state.mark_delete)
            found = []
            for ledger_id in self._ledgers.ledgers_between(first.ledger_id - 1, end.ledger_id + 1):
                entry_count = self._ledgers.entry_count(ledger_id)
                low = max(first.entry_id, 0) if ledger_id == first.ledger_id else 0
                high = min(end.entry_id, entry_count) if ledger_id == end.ledger_id else entry_count
                entries = BitMap(range(low, max(low, high)))
                self.discard_acked(ledger_id, entries)
                if entries:
                    found.append((ledger_id, entries))
            return found

    def acked_runs(self) -> list[tuple[int, int, int]]:
        """Return every entry of the log that is acked, as (ledger id, first, last), `last` included, in order.

        Complexity: O(ledgers + ranges).
        """
        with self._lock:
            before_all = self._ledgers.previous(self._ledgers.first_position)
            runs = covered_runs(self._ledgers, before_all, self._state.mark_delete)
            return [*runs, *((ledger_id, first, end - 1) for ledger_id, first, end in self._state.deleted.runs())]

    def position_after(self, count: int, *, counts_acked: bool) -> Position:
        """Return the position `count` entries after the mark-delete, or the last one; acked entries counted or not.

        Complexity: O(ledgers), with acked ones not counted O(runs that are passed).
        """
        with self._lock:
            state, ledgers = self._state, self._ledgers
            position, last = state.mark_delete, ledgers.last_confirmed
            while count and position < last:
                first = ledgers.next_valid(position)
                run = None if counts_acked else state.deleted.run_containing(first)
                if run is not None:
                    position = Position(run.ledger_id, run.end - 1)
                    continue
                end = ledgers.entry_count(first.ledger_id)
                if not counts_acked:
                    above = state.deleted.entries(first.ledger_id)
                    below = above.rank(first.entry_id)
                    end = min(end, above[below]) if below < len(above) else end
                taken = min(count, end - first.entry_id)
                position, count = Position(first.ledger_id, first.entry_id + taken - 1), count - taken
            return position

    def hole_at(self, position: Position) -> AckHole | None:
        """Return the ack hole that an entry lies in; see `ackstate.ack_hole.hole_at`."""
        with self._lock:
            return hole_at(position, self._state.deleted, self._ledgers, self._state.mark_delete)

    def holes(self) -> list[AckHole]:
        """Return every ack hole, in order of position. Complexity: O(holes)."""
        with self._lock:
            return list(holes(self._state.deleted, self._ledgers, self._state.mark_delete))

    def ack_effect(self, position: Position) -> AckEffect:
        """Return what acking an entry now would change; see `ackstate.ack_hole.ack_effect`."""
        with self._lock:
            return ack_effect(position, self._state.deleted, self._ledgers, self._state.mark_delete)

    def unpersisted_bytes_added(self, position: Position) -> int:
        """Return at most how much acking an entry now would add to `unpersisted_record_bytes`; below 0 it frees some.

        Raises:
            InvalidPositionError: The log does not have the entry, and it is not acked.
            ValueError: An id is out of range.
        """
        with self._lock:
            return self._gauges.unpersisted_bytes_added(position)

    def unpersisted_bytes_freed(self, hole: AckHole) -> int:
        """Return at least how much acking a whole hole now takes off `unpersisted_record_bytes`; below 0 it adds."""
        with self._lock:
            return self._gauges.unpersisted_bytes_freed(hole)
