"""The ack state of one subscription in memory: what is acked, what of it is durable, what a persist takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import bitmap_of
from ackstate.errors import InvalidPositionError
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyroaring import BitMap

    from ackstate.ledger_map import LedgerMap


@dataclass(frozen=True, slots=True)
class Unpersisted:
    """What one persist is to make durable, all of one instant.

    Attributes:
        mark_delete: The mark-delete position.
        new: Acks above it that no durable record holds. Not to be changed.
        properties: What the latest mark-delete carried.
        acked_count: How many messages are durable once this is.
    """

    mark_delete: Position
    new: DeletedRanges
    properties: Mapping[str, int]
    acked_count: int


@final
class AckState:
    """Acks and their accounting; one call at a time, no I/O, no lock.

    A persist goes in two steps: `begin_persist`, then `end_persist` or `abandon_persist`. Acks may arrive between.

    Args:
        ledgers: The message log's ledgers, which grow by themselves.
    """

    def __init__(self, ledgers: LedgerMap) -> None:
        self._ledgers = ledgers
        # Invariant: persisted_mark_delete <= mark_delete, and no entry of _deleted is at or below mark_delete.
        self.mark_delete = self.persisted_mark_delete = ledgers.previous(Position(ledgers.first_ledger_id, 0))
        self.deleted = DeletedRanges()
        self.properties: Mapping[str, int] = {}
        # Invariant: the acks above the mark-delete that are not durable are those in _pending (accepted since the last
        # persist began) and those in _in_flight (being written). Neither shares an entry with the other or with the
        # disk. They stay apart, so that each only ever grows until it is dropped whole, and their size with it.
        self._pending = DeletedRanges()
        self._in_flight = DeletedRanges()
        # Messages acked since the state was made or restored. Invariant: durable <= acked.
        self._acked_count = self._durable_count = 0

    @property
    def redelivery_if_crashed(self) -> int:
        """Acked messages that no durable record covers. Complexity: O(1)."""
        return self._acked_count - self._durable_count

    @property
    def unpersisted_record_bytes(self) -> int:
        """Size of the ranges acked and not durable, as Pulsar would write them. Complexity: O(1)."""
        return self._pending.record_bytes + self._in_flight.record_bytes

    @property
    def backlog(self) -> int:
        """Entries of the log that are not acked. Complexity: O(log ledgers + trimmed ledgers with acks)."""
        trimmed = self.deleted.cardinality(self.mark_delete, self._ledgers.first_position)
        acked_one_by_one = len(self.deleted) - trimmed
        return self._ledgers.count_between(self.mark_delete, self._ledgers.last_confirmed) - acked_one_by_one

    def is_acked(self, position: Position) -> bool:
        """Tell whether an entry is acked, by itself or by the mark-delete."""
        return position <= self.mark_delete or position in self.deleted

    def ack(self, position: Position) -> int:
        """Ack one entry and return 1, or 0 if it was acked already.

        Raises:
            InvalidPositionError: The log does not have the entry.
        """
        if self.is_acked(position):
            return 0
        self._ledgers.check_written(position)
        self.deleted.add(position)
        self._pending.add(position)
        return self._accept(1)

    def ack_bitmaps(self, candidates: Mapping[int, BitMap]) -> int:
        """Ack entries of many ledgers, all or none, and return how many were new.

        Raises:
            InvalidPositionError: The log does not have one of the entries.
        """
        new = {ledger_id: self._not_acked(ledger_id, bitmap) for ledger_id, bitmap in candidates.items()}
        for ledger_id, bitmap in new.items():
            if bitmap:
                self._ledgers.check_written(Position(ledger_id, bitmap.max()))
        for ledger_id, bitmap in new.items():
            self.deleted.add_entries(ledger_id, bitmap)
            self._pending.add_entries(ledger_id, bitmap)
        return self._accept(sum(map(len, new.values())))

    def ack_up_to(self, position: Position) -> int:
        """Ack every entry up to a position, included, and return how many were new.

        Raises:
            InvalidPositionError: The log does not have the position, or it is below the mark-delete position.
        """
        if position < self.mark_delete:
            raise InvalidPositionError(
                f"mark-delete to {position} would go back from {self.mark_delete}; only a reset may"
            )
        if position.entry_id >= 0 and position != self.mark_delete:
            self._ledgers.check_written(position)
        elif not self._ledgers.has_ledger(position.ledger_id):
            raise InvalidPositionError(f"ledger {position.ledger_id} is not in the message log")
        covered = self._ledgers.count_between(self.mark_delete, position)
        return self._accept(covered - self._move_mark_delete(position))

    def restore(self, mark_delete: Position, deleted: DeletedRanges, *, properties: Mapping[str, int]) -> None:
        """Begin from what a disk held.

        Raises:
            InvalidPositionError: It reaches beyond the end of the message log.
        """
        highest = max(mark_delete, (deleted.last_range() or (mark_delete, mark_delete))[1])
        last = self._ledgers.last_confirmed
        if highest > last and highest.entry_id >= 0:
            raise InvalidPositionError(f"the durable state reaches {highest}, the message log ends at {last}")
        self.mark_delete = self.persisted_mark_delete = mark_delete
        self.deleted = deleted
        self.properties = properties
        self._advance_mark_delete()

    def begin_persist(self) -> Unpersisted:
        """Take everything that is not durable, as of now."""
        self._in_flight, self._pending = self._pending, DeletedRanges()
        return Unpersisted(self.mark_delete, self._in_flight, self.properties, self._acked_count)

    def end_persist(self, written: Unpersisted) -> int:
        """Count what was taken as durable and return how many messages that is."""
        covered = written.acked_count - self._durable_count
        self._in_flight = DeletedRanges()
        self._durable_count = written.acked_count
        self.persisted_mark_delete = written.mark_delete
        return covered

    def abandon_persist(self) -> None:
        """Put back what was taken: it could not be written."""
        self._pending.update(self._in_flight)
        self._pending.remove_at_most(self.mark_delete)
        self._in_flight = DeletedRanges()

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
        self._pending.remove_at_most(position)
        return self.deleted.remove_at_most(position)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(state)."""
        for ranges in (self.deleted, self._pending, self._in_flight):
            ranges._check()
        lowest = next(self.deleted.runs(), None)
        assert lowest is None or Position(lowest.ledger_id, lowest.first) > self.mark_delete
        assert not self.is_acked(self._ledgers.next_valid(self.mark_delete))
        assert self.persisted_mark_delete <= self.mark_delete
        assert self._durable_count <= self._acked_count
        beyond = self.deleted.copy()
        assert beyond.update(self._pending) == 0
