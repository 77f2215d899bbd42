"""The ack state of one subscription in memory: what is acked, what of it is durable, what a persist takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.ack_hole import ack_effect, stretch_effect
from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.state.unpersisted_acks import EVERYTHING, RangeLimit, UnpersistedAcks
from ackstate.cursor.state.unpersisted_batches import UnpersistedBatches
from ackstate.deleted_ranges import DeletedRanges, Run
from ackstate.entry_bitmap import bitmap_of
from ackstate.errors import InvalidPositionError
from ackstate.position import Position, check_position
from ackstate.selection import Keep
from ackstate.wire.pulsar.limits import LimitRule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyroaring import BitMap

    from ackstate.ack_hole import AckHole
    from ackstate.ledger_map import LedgerMap


class Unpersisted(NamedTuple):
    """What one persist is to make durable, all of one instant.

    Attributes:
        mark_delete: The mark-delete position.
        new: Acks above it that no durable record holds and that may be written. Not to be changed.
        batch: Partly acked batches that changed. Not to be changed.
        properties: What the latest mark-delete carried.
        acked_count: How many messages are durable once this is.
        cut_count: How many acked messages the range limit left out of it.
        batch_cut_count: How many partly acked batches the limit on them left out of it.
    """

    mark_delete: Position
    new: DeletedRanges
    properties: Mapping[str, int]
    acked_count: int
    batch: BatchIndexes
    cut_count: int
    batch_cut_count: int


class PersistLimits(NamedTuple):
    """How much the durable state may hold.

    Attributes:
        range_count_max: How many ranges; None for any number.
        batch_count_max: How many partly acked batches, the lowest first; None for any number.
        displaces: Whether what goes first may take the place of what is durable already. Else that stays, even beyond
            a limit that was lowered.
        rule: What `range_count_max` counts: ranges, or what a Pulsar release counts in the words form.
    """

    range_count_max: int | None = None
    batch_count_max: int | None = None
    displaces: bool = False
    rule: LimitRule = LimitRule.EXACT


UNLIMITED = PersistLimits()


@final
class AckState:
    """Acks and their accounting; one call at a time, no I/O, no lock.

    A persist goes in two steps: `begin_persist`, then `end_persist` or `abandon_persist`. Acks may arrive between. So
    does a reset: `begin_reset`, then `reset`. One that is not ended has failed, and may have happened: until the end of
    the next persist, what is not durable is told of the outcome that leaves out more.

    Args:
        ledgers: The message log's ledgers, which grow by themselves.
        keep: Which ranges are persisted first when there are more than a limit.
    """

    def __init__(self, ledgers: LedgerMap, *, keep: Keep = Keep.LOWEST) -> None:
        self._ledgers = ledgers
        self._keep = keep
        # Invariant: persisted_mark_delete <= mark_delete, and no entry of deleted is at or below mark_delete.
        self.mark_delete = self.persisted_mark_delete = ledgers.previous(Position(ledgers.first_ledger_id, 0))
        self.deleted = DeletedRanges()
        self.batch = BatchIndexes()
        self.properties: Mapping[str, int] = {}
        self._undurable = UnpersistedAcks()
        self._undurable_batches = UnpersistedBatches(self.batch, self._undurable)
        # Messages acked since the state was made or restored. Invariant: durable <= acked.
        self._acked_count = self._durable_count = 0
        # Mark-delete positions that the durable state may have instead, with nothing acked above: of resets that were
        # begun and not ended, since the last persist. What is durable is told as without them.
        self._resets_begun: set[Position] = set()

    @property
    def acked_count(self) -> int:
        """Messages acked since the state was made or restored. Complexity: O(1)."""
        return self._acked_count

    @property
    def durable_count(self) -> int:
        """Messages acked since the state was made or restored that are durable. Complexity: O(1)."""
        return self._durable_count

    @property
    def redelivery_if_crashed(self) -> int:
        """Acked messages that no durable record covers.

        Complexity: O(1); O(containers of the bitmaps) after a reset that failed.
        """
        unwritten_count = self._acked_count - self._durable_count
        if not self._resets_begun:
            return unwritten_count
        lowest = min(self._resets_begun)
        covered_count = self._ledgers.count_between(lowest, self.mark_delete)
        return max(unwritten_count, covered_count + len(self._voidable(lowest)))

    @property
    def held_back(self) -> int:
        """Those of them that the last persist held back, as young. Complexity: O(1)."""
        return len(self._undurable.held)

    @property
    def cut_off(self) -> int:
        """Those of them that the range limit left out of the last persist. Complexity: O(1)."""
        return len(self._undurable.cut)

    @property
    def left_out(self) -> tuple[DeletedRanges, DeletedRanges, DeletedRanges]:
        """What the persist under way, or the last one, left out: young, over a limit, and what of that was durable.

        To be read, not changed.
        """
        return self._undurable.held, self._undurable.cut, self._undurable.displaced

    @property
    def batch_cut_count(self) -> int:
        """Partly acked batches that the limit on them left out of the last persist. Complexity: O(them)."""
        return self._undurable_batches.cut_count

    @property
    def changed_batch_count(self) -> int:
        """Partly acked batches whose last acks are not durable. Complexity: O(them)."""
        changed_count = self._undurable_batches.changed_count
        if not self._resets_begun:
            return changed_count
        lowest = min(self._resets_begun)
        return max(changed_count, sum(position > lowest for position in self.batch))

    @property
    def undurable(self) -> DeletedRanges:
        """The ranges acked and not durable, whatever becomes of a reset that failed: to be read, not changed."""
        return self._undurable.as_one()

    @property
    def unpersisted_record_bytes(self) -> int:
        """Size of the ranges acked and not durable, as Pulsar would write them.

        While a persist is under way, it is the largest of what they are and what they will be after it; never more
        than what acks one by one have added.

        Complexity: O(1); O(containers of the bitmaps) after a reset that failed.
        """
        if not self._resets_begun:
            return self._undurable.record_bytes
        # A lower one voids more, and may void it in larger ranges.
        return max(self._undurable.record_bytes, *(self._voidable(each).record_bytes for each in self._resets_begun))

    def unpersisted_bytes_added(self, position: Position) -> int:
        """Return at most how much acking an entry now would add to `unpersisted_record_bytes`.

        Raises:
            As `ackstate.ack_hole.ack_effect`.
        """
        if self.is_acked(position):
            return 0
        effects = (ack_effect(position, joined, self._ledgers, self.mark_delete) for joined in self._joined_by())
        return max(effect.record_bytes for effect in effects)

    def unpersisted_bytes_freed(self, hole: AckHole) -> int:
        """Return at least how much acking a whole hole now would take off `unpersisted_record_bytes`."""
        stretch = Run(hole.ledger_id, hole.first, hole.end)
        effects = (stretch_effect(stretch, joined, self._ledgers, self.mark_delete) for joined in self._joined_by())
        return -max(effect.record_bytes for effect in effects)

    @property
    def backlog(self) -> int:
        """Entries of the log that are not acked. Complexity: O(log ledgers + trimmed ledgers with acks)."""
        acked_one_by_one = len(self.deleted) - self._trimmed_count()
        return self._ledgers.count_between(self.mark_delete, self._ledgers.last_confirmed) - acked_one_by_one

    def is_acked(self, position: Position) -> bool:
        """Tell whether an entry is acked, by itself or by the mark-delete."""
        return position <= self.mark_delete or position in self.deleted

    def is_batch_cut(self, position: Position) -> bool:
        """Tell whether a persist left a partly acked batch out, and none that has been written since did not."""
        return self._undurable_batches.is_passed_by(position)

    def is_undurable(self, candidates: Mapping[int, BitMap]) -> bool:
        """Tell whether one of some acked entries waits for a persist although an earlier one has passed it by."""
        return any(
            not bitmap.isdisjoint(ranges.entries(ledger_id))
            for ranges in (*self._undurable.sets(), self._undurable.covered)
            for ledger_id, bitmap in candidates.items()
        )

    def ack(self, position: Position) -> int:
        """Ack one entry and return 1, or 0 if it was acked already.

        Raises:
            InvalidPositionError: The log does not have the entry.
            ValueError: An id is out of range.
            TypeError: An id is not an integer.

        Complexity: O(log ledgers); O(log run length) range queries more if the mark-delete moves over a run.
        """
        try:
            position = self._ledgers.check_written(position)
        except InvalidPositionError:
            position = check_position(position, entry_id_min=0)
            if self.is_acked(position):  # in a ledger that was trimmed since
                return 0
            raise
        mark_delete = self.mark_delete
        if position <= mark_delete:
            return 0
        ledger_id, entry_id = position
        marked_ledger_id, marked_entry_id = mark_delete
        if ledger_id == marked_ledger_id and entry_id == marked_entry_id + 1:
            self._ack_following(position)
        elif not self.deleted.add_with(self._undurable.fresh, position):
            return 0
        else:
            if not self._undurable.is_plain:
                self._undurable.added_one(position)
            # Only the first entry of a ledger follows the last one of another, unless those between were trimmed.
            if ledger_id != marked_ledger_id and (entry_id == 0 or self._ledgers.first_ledger_id > marked_ledger_id):
                self._advance_mark_delete()
        if self.batch:
            self._undurable_batches.complete(position)
        self._acked_count += 1
        return 1

    def ack_bitmaps(self, candidates: Mapping[int, BitMap]) -> Mapping[int, BitMap]:
        """Ack entries of many ledgers, all or none, and return those that were new.

        Raises:
            InvalidPositionError: The log does not have one of the entries.
        """
        new = {ledger_id: self._not_acked(ledger_id, bitmap) for ledger_id, bitmap in candidates.items()}
        for ledger_id, bitmap in new.items():
            if bitmap:
                self._ledgers.check_written(Position(ledger_id, bitmap.max()))
        for ledger_id, bitmap in new.items():
            self.deleted.add_entries_with(self._undurable.fresh, ledger_id, bitmap)
            self._undurable.added(ledger_id, bitmap)
            for position in self.batch.among(ledger_id, bitmap):
                self._undurable_batches.complete(position)
        self._accept(sum(map(len, new.values())))
        return new

    def ack_batch(self, position: Position, unacked_words: Iterable[int]) -> tuple[int, bool]:
        """Ack messages of a batch; return how many entries that acked, 1 with its last message, and if it changed.

        Raises:
            InvalidPositionError: The log does not have the entry.
            ValueError: A word does not fit 64 bits.
            TypeError: A word is not an integer.
        """
        if self.is_acked(position):
            return 0, False
        self._ledgers.check_written(position)
        was_last, changed = self._undurable_batches.ack(position, unacked_words)
        return self.ack(position) if was_last else 0, changed

    def ack_up_to(self, position: Position) -> int:
        """Ack every entry up to a position, included, and return how many were new.

        Raises:
            InvalidPositionError: The log does not have the position, or it is below the mark-delete position.
        """
        if position < self.mark_delete:
            raise InvalidPositionError(
                f"mark-delete to {position} would go back from {self.mark_delete}; only a reset may"
            )
        # Where it stands, and the end of the log, may be in a ledger that was trimmed since.
        if position not in {self.mark_delete, self._ledgers.last_confirmed}:
            if position.entry_id >= 0:
                self._ledgers.check_written(position)
            elif not self._ledgers.has_ledger(position.ledger_id):
                raise InvalidPositionError(f"ledger {position.ledger_id} is not in the message log")
        covered, trimmed_before = self._ledgers.count_between(self.mark_delete, position), self._trimmed_count()
        acked_before = self._move_mark_delete(position) - (trimmed_before - self._trimmed_count())
        return self._accept(covered - acked_before)

    def ack_up_to_batch(self, position: Position, unacked_words: Iterable[int], *, counts: bool) -> tuple[int, bool]:
        """Ack every entry below a batch and its first messages; return how many entries were new, and if it changed.

        Args:
            position: The batch.
            unacked_words: The messages of it that this leaves unacked; earlier ones of them stay acked.
            counts: Whether the acks of single messages count.

        Raises:
            As `ack_up_to`; ValueError: A word does not fit 64 bits. TypeError: A word is not an integer.
        """
        if position <= self.mark_delete:
            raise InvalidPositionError(
                f"mark-delete into batch {position} would go back from {self.mark_delete}; only a reset may"
            )
        self._ledgers.check_written(position)
        BatchIndexes().ack(position, unacked_words)  # Tried out: a refused call changes nothing.
        newly_acked = self.ack_up_to(max(self._ledgers.previous(position), self.mark_delete))
        if not counts or self.is_acked(position):
            return newly_acked, False
        was_last, changed = self._undurable_batches.ack_cumulative(position, unacked_words)
        return newly_acked + (self.ack(position) if was_last else 0), changed

    def position_after(self, count: int, *, counts_acked: bool) -> Position:
        """Return the position so many entries after the mark-delete, or the last one; acked ones counted or not."""
        position, last = self.mark_delete, self._ledgers.last_confirmed
        while count and position < last:
            first = self._ledgers.next_valid(position)
            run = None if counts_acked else self.deleted.run_containing(first)
            if run is not None:
                position = Position(run.ledger_id, run.end - 1)
                continue
            end = self._ledgers.entry_count(first.ledger_id)
            if not counts_acked:
                above = self.deleted.entries(first.ledger_id)
                below = above.rank(first.entry_id)
                end = min(end, above[below]) if below < len(above) else end
            taken = min(count, end - first.entry_id)
            position, count = Position(first.ledger_id, first.entry_id + taken - 1), count - taken
        return position

    def restore(
        self, mark_delete: Position, deleted: DeletedRanges, *, batch: BatchIndexes, properties: Mapping[str, int]
    ) -> None:
        """Begin from what a disk held.

        Raises:
            InvalidPositionError: It reaches beyond the end of the message log.
        """
        highest = max(mark_delete, (deleted.last_range() or (mark_delete, mark_delete))[1])
        last = self._ledgers.last_confirmed
        if highest > last and highest.entry_id >= 0:
            raise InvalidPositionError(f"the durable state reaches {highest}, the message log ends at {last}")
        self.reset(mark_delete)
        self.deleted = deleted
        self._begin_batches(batch)
        self.properties = properties
        self._advance_mark_delete()

    def begin_reset(self, mark_delete: Position) -> None:
        """Note that a reset to a position is about to be written: from here on it may happen, even if that fails."""
        self.persisted_mark_delete = min(self.persisted_mark_delete, mark_delete)
        self._resets_begun.add(mark_delete)

    def reset(self, mark_delete: Position) -> None:
        """Begin anew at a position, with nothing acked above it, all of it durable."""
        self.mark_delete = self.persisted_mark_delete = mark_delete
        self._resets_begun.clear()
        self.properties = {}
        self.deleted = DeletedRanges()
        self._undurable = UnpersistedAcks()
        self._begin_batches(BatchIndexes())
        self._durable_count = self._acked_count

    def _begin_batches(self, batch: BatchIndexes) -> None:
        self.batch = batch
        self._undurable_batches = UnpersistedBatches(batch, self._undurable)

    def can_promote(self, frontier: Position) -> bool:
        """Tell whether an ack that was held back is at or below a frontier, or one was promoted in vain."""
        return self._undurable.can_promote(frontier)

    def begin_persist(
        self,
        *,
        frontier: Position = EVERYTHING,
        limits: PersistLimits = UNLIMITED,
        record_bytes_max: int | None = None,
    ) -> Unpersisted:
        """Take everything that is not durable, as of now, but for what must be held back or is over a limit.

        Args:
            frontier: Acks above it are young and are held back; the mark-delete position never is.
            limits: How much the durable state may hold.
            record_bytes_max: What `unpersisted_record_bytes` may be after this if it is not more already. For that the
                frontier moves up to the end of the range that it would cut, if what is left of the range took more
                bytes than the whole; and nothing durable is displaced.

        Complexity: bitmap operations over what is not durable; beyond a range limit also over what is.
        """
        undurable = self._undurable
        undurable.begin_write(
            self.deleted,
            frontier=frontier,
            limit=RangeLimit(limits.range_count_max, self._keep, limits.displaces, limits.rule),
            record_bytes_max=record_bytes_max,
        )
        self._durable_count -= len(undurable.displaced)
        batch = self._undurable_batches.begin_write(limits.batch_count_max)
        return Unpersisted(
            self.mark_delete, undurable.in_flight, self.properties, self._acked_count - undurable.not_taken_count,
            batch=batch, cut_count=len(undurable.cut), batch_cut_count=self._undurable_batches.left_out_count,
        )  # fmt: skip

    def whole(self) -> tuple[DeletedRanges, BatchIndexes]:
        """Return all acks above the mark-delete position, and in batches, that are durable once what was taken is.

        To be called right after `begin_persist`.
        """
        content = self.deleted.copy()
        for ranges in (self._undurable.held, self._undurable.cut):
            content.difference_update(ranges)
        return content, self._undurable_batches.whole()

    def end_persist(self, written: Unpersisted) -> int:
        """Count what was taken as durable and return how many messages that is."""
        covered = written.acked_count - self._durable_count - len(self._undurable.displaced)
        self._durable_count = written.acked_count
        self.persisted_mark_delete = written.mark_delete
        self._resets_begun.clear()
        self._undurable.end_write(written.mark_delete)
        self._undurable_batches.end_write()
        return covered

    def abandon_persist(self) -> None:
        """Put back what was taken: it could not be written, and what it was to displace may be gone."""
        self._undurable.abandon_write(self.mark_delete)
        self._undurable_batches.abandon_write()

    def withdraw_persist(self) -> None:
        """Put back what was just taken: it will not be tried, so what is durable stays so.

        To be called right after `begin_persist`, or `whole`.
        """
        self._undurable.abandon_write(self.mark_delete)
        self._undurable.withdraw_displacement()
        self._undurable_batches.withdraw_write()
        self._durable_count += len(self._undurable.displaced)

    def frontier_leaving(self, record_bytes_max: int) -> Position:
        """Return the lowest end of a range such that those above it, of what is not durable, take no more bytes.

        Returns:
            The mark-delete position if they all do.

        Complexity: O(log ranges) bitmap operations over one ledger's.
        """
        frontier = self._undurable.frontier_leaving(record_bytes_max)
        return self.mark_delete if frontier is None else frontier

    def undurable_count(self, lower: Position, upper: Position) -> int:
        """Return how many acks above one position and up to another are not durable. Complexity: O(ledgers)."""
        return self._undurable.count_between(lower, upper)

    def _voidable(self, reset: Position) -> DeletedRanges:
        """Return what is acked above the mark-delete position that a reset may have voided: to be read, not changed."""
        if reset <= self.mark_delete:
            return self.deleted
        voidable = self.deleted.copy()
        voidable.remove_at_most(reset)
        return voidable

    def _joined_by(self) -> tuple[DeletedRanges, ...]:
        """Return the ranges that the next ack may join, of which each may be those that are not durable."""
        joined = self._undurable.joined_by()
        return (*joined, *map(self._voidable, self._resets_begun))

    def _trimmed_count(self) -> int:
        """Return how many entries are acked one by one in ledgers that were trimmed. Complexity: O(these ledgers)."""
        first = self._ledgers.first_position
        return self.deleted.cardinality(self.mark_delete, first) if self.mark_delete < first else 0

    def _accept(self, newly_acked: int) -> int:
        self._acked_count += newly_acked
        self._advance_mark_delete()
        return newly_acked

    def _not_acked(self, ledger_id: int, candidates: BitMap) -> BitMap:
        if ledger_id < self.mark_delete.ledger_id:
            return bitmap_of(())
        new = candidates - self.deleted.entries(ledger_id)
        if ledger_id == self.mark_delete.ledger_id:
            new.remove_range(0, self.mark_delete.entry_id + 1)
        return new

    def _ack_following(self, position: Position) -> None:
        """Move the mark-delete by one entry, which no set holds, and over what was acked after it."""
        self.mark_delete = position
        if not self.deleted:
            return
        if not self._undurable.is_plain:
            self._advance_mark_delete()
            return
        ledger_id, entry_id = position
        end = self.deleted.remove_lowest_with(self._undurable.fresh, ledger_id, entry_id + 1)
        if end > entry_id + 1:
            self.mark_delete = tuple.__new__(Position, (ledger_id, end - 1))  # in half the time
        if end == self._ledgers.entry_count(ledger_id):
            self._advance_mark_delete()

    def _advance_mark_delete(self) -> None:
        """Move the mark-delete over every acked entry that follows it, across the ends of ledgers.

        Source: ``ManagedCursorImpl.setAcknowledgedPosition`` of Apache Pulsar.
        """
        reached = self.mark_delete
        while (run := self.deleted.run_containing(self._ledgers.next_valid(reached))) is not None:
            reached = Position(run.ledger_id, run.end - 1)
        if reached != self.mark_delete:
            self._move_mark_delete(reached)

    def _move_mark_delete(self, position: Position) -> int:
        """Set the mark-delete position and return how many entries up to it were acked one by one before."""
        self.mark_delete = position
        self._undurable.cover(position)
        self.batch.remove_at_most(position)
        return self.deleted.remove_at_most(position)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(state)."""
        self.deleted._check()
        self._undurable._check(self.deleted, self.mark_delete, persisted_mark_delete=self.persisted_mark_delete)
        self._undurable_batches._check()
        lowest = next(self.deleted.runs(), None)
        assert lowest is None or Position(lowest.ledger_id, lowest.first) > self.mark_delete
        assert not self.is_acked(self._ledgers.next_valid(self.mark_delete))
        assert self.persisted_mark_delete <= self.mark_delete
        assert self._durable_count <= self._acked_count
        assert not any(position in self.deleted for position, _ in self.batch.items())
