"""Reads a cursor: its unacked entries in order, its gauges, its holes, and the effect that an ack would have."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.ack_hole import ack_effect, hole_at, holes, stretch_effect
from ackstate.cursor.results import CursorStats
from ackstate.deleted_ranges import Run
from ackstate.entry_bitmap import bitmaps_of
from ackstate.position import ENTRY_ID_MAX, Position, positions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ackstate.ack_hole import AckEffect, AckHole
    from ackstate.batch_indexes import BatchIndexes
    from ackstate.cursor.persist import Persister
    from ackstate.cursor.results import Receipt
    from ackstate.cursor.state import CursorAckState
    from ackstate.deleted_ranges import DeletedRanges
    from ackstate.wire.native import DeliveryCounts


@final
class EntryReader:
    """A cursor's read position, and the entries from there on. Safe for any number of threads."""

    def __init__(self, state: CursorAckState, *, lock: threading.RLock, check_open: Callable[[], None]) -> None:
        self._state = state
        self._ledgers = state.ledgers
        self._lock = lock
        self._check_open = check_open
        self._position = state.ledgers.next_valid(state.mark_delete)

    @property
    def position(self) -> Position:
        """Where `read` goes on, above the mark-delete; at a ledger's end maybe the entry that would follow."""
        with self._lock:
            if self._position <= self._state.mark_delete:
                self._position = self._ledgers.next_valid(self._state.mark_delete)
            return self._position

    @property
    def has_unread(self) -> bool:
        """Whether the log has entries at or above the position, acked or not."""
        return self._ledgers.last_confirmed >= self.position

    @property
    def next_unread(self) -> Position:
        """The entry that `read` would return first, or that will be written next; O(acked runs in between)."""
        with self._lock:
            ledger_id, entry_id = self.position
            position = self._ledgers.next_valid(Position(ledger_id, entry_id - 1))
            while (run := self._state.deleted.run_containing(position)) is not None:
                position = self._ledgers.next_valid(Position(run.ledger_id, run.end - 1))
            return position

    def read(self, count_max: int) -> list[Position]:
        """Return up to `count_max` entries from the position on that are not acked, and move past them."""
        with self._lock:
            self._check_open()
            positions: list[Position] = []
            # The log may have rolled since: then the expected next entry was never written.
            ledger_id, entry_id = self.position
            position = self._ledgers.next_valid(Position(ledger_id, entry_id - 1))
            last = self._ledgers.last_confirmed
            while len(positions) < count_max and position <= last:
                run = self._state.deleted.run_containing(position)
                if run is None:
                    ledger_id, first = position
                    end = min(first + count_max - len(positions), self._ledgers.entry_count(ledger_id))
                    acked, entries = self._state.deleted.entries(ledger_id), range(first, end)
                    is_free = not acked.range_cardinality(first, end)
                    positions += positions_of(ledger_id, entries if is_free else BitMap(entries) - acked)
                else:
                    ledger_id, end = run.ledger_id, run.end
                self._position = Position(ledger_id, end)
                position = self._ledgers.next_valid(Position(ledger_id, end - 1))
            return positions

    def rewind(self, position: Position | None = None) -> None:
        """Read again from a position, or from the first entry that the mark-delete does not cover."""
        with self._lock:
            first = self._ledgers.next_valid(self._state.mark_delete)
            self._position = first if position is None else max(first, Position(*position))

    def reset(self, position: Position) -> None:
        """Read from a position next, wherever the mark-delete position is."""
        self._position = position


class AckView:
    """A read-only view of an ack state. Safe for any number of threads; each answer is of one instant."""

    # After a reset that failed, and until the next persist, a recovery may find the cursor reset or not. The gauges
    # then assume the outcome that loses more, at a cost of O(containers of the bitmaps) instead of O(1).

    def __init__(self, state: CursorAckState, lock: threading.RLock | None = None) -> None:
        self._state = state
        self._ledgers = state.ledgers
        self._lock = lock or threading.RLock()  # held for several answers of one instant
        self.delivery_counts: DeliveryCounts = state.counts.known
        """How often messages were sent, also some that are acked: to be read, not changed."""

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
    def is_dirty(self) -> bool:
        """Whether something was accepted that no persist has looked at."""
        return self._state.is_dirty

    @property
    def redelivery_if_crashed(self) -> int:
        """Acked messages of the log that no durable record covers. Complexity: see the class."""
        with self._lock:
            state = self._state
            unwritten_count = state.unwritten_count()
            if not state.resets_begun:
                return unwritten_count
            lowest = min(state.resets_begun)
            covered_count = state.ledgers.count_between(lowest, state.mark_delete)
            return max(unwritten_count, covered_count + self._count_in_log(self._voidable(lowest)))

    @property
    def unpersisted_record_bytes(self) -> int:
        """Size of the ranges acked and not durable, as Pulsar would write them; never more than single acks added."""
        with self._lock:
            state = self._state
            if not state.resets_begun:
                return state.unpersisted.record_bytes
            # A lower reset voids more, but a higher one may void it in larger ranges.
            voidable_bytes = (self._voidable(each).record_bytes for each in state.resets_begun)
            return max(state.unpersisted.record_bytes, *voidable_bytes)

    def unpersisted_bytes_added(self, position: Position) -> int:
        """Return at most how much acking an entry adds to `unpersisted_record_bytes`; below 0 it frees some."""
        with self._lock:
            state = self._state
            if state.is_acked(position):
                return 0
            effects = (ack_effect(position, joined, state.ledgers, state.mark_delete) for joined in self._joined_by())
            return max(effect.record_bytes for effect in effects)

    def effect_of_all(self, entries: Mapping[int, BitMap]) -> tuple[int, int, int]:
        """Return at most how many un-persisted bytes, ranges and entries above the mark-delete acking entries adds."""
        # Entries that the log does not have are ignored. O(bytes of the bitmaps of all acks).
        with self._lock:
            state = self._state
            new = {ledger_id: entries[ledger_id].copy() for ledger_id in entries}
            for ledger_id, bitmap in new.items():
                self.discard_acked(ledger_id, bitmap)
            after = self._with(state.deleted, new)
            reached = after.reach(state.mark_delete, self._ledgers)
            grown = [(joined, self._with(joined, new)) for joined in self._joined_by()]
            for ranges in (after, *(each for _, each in grown)):
                ranges.remove_at_most(reached)
            return (
                max(each.record_bytes - joined.record_bytes for joined, each in grown),
                after.range_count - state.deleted.range_count,
                len(after) - len(state.deleted),
            )

    def unpersisted_bytes_freed(self, hole: AckHole) -> int:
        """Return at least how much acking a whole hole now takes off `unpersisted_record_bytes`; below 0 it adds."""
        stretch = Run(hole.ledger_id, hole.first, hole.end)
        with self._lock:
            mark_delete = self._state.mark_delete
            effects = (stretch_effect(stretch, joined, self._ledgers, mark_delete) for joined in self._joined_by())
            return -max(effect.record_bytes for effect in effects)

    @property
    def backlog(self) -> int:
        """Entries of the log that are not acked. Complexity: O(log ledgers + trimmed ledgers with acks)."""
        with self._lock:
            state, ledgers = self._state, self._ledgers
            acked_one_by_one = self._count_in_log(state.deleted)
            return ledgers.count_between(state.mark_delete, ledgers.last_confirmed) - acked_one_by_one

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        """Remove the acked entries of a ledger from a bitmap. Complexity: O(containers of the bitmaps)."""
        with self._lock:
            mark_delete = self._state.mark_delete
            if ledger_id < mark_delete.ledger_id:
                entries.clear()
            elif ledger_id == mark_delete.ledger_id:
                entries.remove_range(0, mark_delete.entry_id + 1)
            entries -= self._state.deleted.entries(ledger_id)

    def lowest_unacked(self, count_max: int) -> list[Position]:
        """Return up to `count_max` of the lowest entries that are not acked; O(them, and the acked runs between)."""
        return EntryReader(self._state, lock=self._lock, check_open=lambda: None).read(count_max)

    def acked_among(self, positions: Sequence[Position]) -> list[Position]:
        """Return those of some entries that are acked. Complexity: bitmap operations, and O(them)."""
        entries = bitmaps_of(positions)
        with self._lock:
            for ledger_id, bitmap in entries.items():
                self.discard_acked(ledger_id, bitmap)
        if sum(map(len, entries.values())) == len(positions):
            return []
        return [position for position in positions if position[1] not in entries[position[0]]]

    def unacked_among(self, positions: Sequence[Position]) -> list[Position]:
        """Return those of some positions at which the log has entries that are not acked; as `acked_among`."""
        entries = bitmaps_of(positions)
        with self._lock:
            for ledger_id, bitmap in entries.items():
                bitmap.remove_range(self._ledgers.entry_count(ledger_id), ENTRY_ID_MAX + 1)
                self.discard_acked(ledger_id, bitmap)
        return [position for position in positions if position[1] in entries[position[0]]]

    def unacked_between(self, first: Position, end: Position) -> list[tuple[int, BitMap]]:
        """Return the entries of the log that are not acked from `first` (included) to `end` (excluded), by ledger."""
        with self._lock:
            above = max(first, self._state.mark_delete)
            lower, upper = (Position(each.ledger_id, each.entry_id - 1) for each in (above, end))
            found = []
            for ledger_id, low, high in self._ledgers.runs_between(lower, upper):
                entries = BitMap(range(low, high + 1))
                self.discard_acked(ledger_id, entries)
                if entries:
                    found.append((ledger_id, entries))
            return found

    def acked_runs(self) -> list[tuple[int, int, int]]:
        """Return every entry of the log that is acked, as (ledger id, first, last), `last` included, in order."""
        with self._lock:
            before_all = self._ledgers.previous(self._ledgers.first_position)
            runs = self._ledgers.runs_between(before_all, self._state.mark_delete)
            return [*runs, *((ledger_id, first, end - 1) for ledger_id, first, end in self._state.deleted.runs())]

    def position_after(self, count: int, *, counts_acked: bool) -> Position:
        """Return the position `count` entries after the mark-delete, or the last one; acked entries counted or not."""
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
        """Return the effect of acking an entry now; see `ackstate.ack_hole.ack_effect`."""
        with self._lock:
            return ack_effect(position, self._state.deleted, self._ledgers, self._state.mark_delete)

    def _count_in_log(self, acked: DeletedRanges) -> int:
        return len(acked) - self._state.trimmed_count(acked)

    @staticmethod
    def _with(ranges: DeletedRanges, entries: Mapping[int, BitMap]) -> DeletedRanges:
        """Return a copy with more entries, ledger id -> entries."""
        grown = ranges.copy()
        for each in entries.items():
            grown.add_entries(*each)
        return grown

    def _voidable(self, reset: Position) -> DeletedRanges:
        """Return the acks above the mark-delete position that a reset may have voided: to be read, not changed."""
        if reset <= self._state.mark_delete:
            return self._state.deleted
        voidable = self._state.deleted.copy()
        voidable.remove_at_most(reset)
        return voidable

    def _joined_by(self) -> tuple[DeletedRanges, ...]:
        """Return the sets whose ranges the next ack may join; each may turn out to be the one that is not durable."""
        return (*self._state.unpersisted.joined_by(), *map(self._voidable, self._state.resets_begun))


@final
class CursorView(AckView):
    """A read-only view of a cursor; see `AckView`."""

    def __init__(self, persister: Persister) -> None:
        super().__init__(persister.state, persister.lock)
        self._persister = persister

    def stats(self) -> CursorStats:
        """Return the cursor's numbers, all of one instant."""
        with self._lock:
            persister, state, deleted = self._persister, self._state, self._state.deleted.settle()
            redelivery, unpersisted, batches = self.redelivery_if_crashed, state.unpersisted, state.unpersisted_batches
            young, cut = self._count_in_log(unpersisted.held), self._count_in_log(unpersisted.cut)
            unwritten_batches = batches.changed_count
            if state.resets_begun:
                lowest = min(state.resets_begun)
                unwritten_batches = max(unwritten_batches, sum(position > lowest for position in state.batch))
            return CursorStats(
                redelivery_if_crashed=redelivery,
                redelivery_unwritten=redelivery - young - cut,
                redelivery_young=young,
                redelivery_cut=cut,
                batches_unwritten=unwritten_batches,
                unpersisted_record_bytes=self.unpersisted_record_bytes,
                range_count=deleted.range_count,
                record_bytes=deleted.record_bytes,
                backlog=self.backlog,
                journal_bytes=persister.journal.snapshot_bytes + persister.journal.delta_bytes,
                batches_cut=batches.cut_count,
                young_age_ms=persister.ruler.age_ms,
                **persister.counters,
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
        """When to call `ManagedCursor.tick` next; None if nothing becomes due before something is accepted."""
        return self._persister.next_tick_ms()

    @property
    def last_journal_entry(self) -> Position | None:
        """The cursor ledger and the last entry known to be in it; None if there is none; see `Journal.last_entry`."""
        return self._persister.journal.last_entry

    def is_persist_due(self, *, now_ms: int) -> bool:
        """Return whether `ManagedCursor.tick` would persist now: acks wait for it, or young acks became old."""
        return self._persister.is_due(now_ms=now_ms)

    def has_young(self, *, now_ms: int) -> bool:
        """Return whether `ManagedCursor.promote` could make acks durable that `persist` would hold back."""
        return self._persister.has_young(now_ms=now_ms)

    @property
    def counts_entries_to_persist(self) -> bool:
        """Whether `range_limit_rule` counts acked entries; up to `range_count_max` of them each rule persists all."""
        return self._persister.ledger_limits.counts_entries

    @property
    def range_count_to_persist(self) -> int:
        """How many ranges a persist of everything would hold, or entries if `counts_entries_to_persist`; O(1)."""
        # The rule itself counts more: an ack in a later ledger may add all entries of an earlier one to its count.
        return len(self._state.deleted) if self.counts_entries_to_persist else self.range_count

    @property
    def range_count(self) -> int:
        """How many ranges are acked above the mark-delete position; O(acks since it was last counted)."""
        with self._lock:
            return self._state.deleted.settle().range_count
