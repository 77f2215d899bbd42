"""Measures what a crash would lose of an ack state: how many acked messages, in which ranges, for which cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.ack_hole import ack_effect, stretch_effect
from ackstate.deleted_ranges import DeletedRanges, Run

if TYPE_CHECKING:
    from ackstate.ack_hole import AckHole
    from ackstate.cursor.state.ack_state import AckState
    from ackstate.position import Position


@final
class AckGauges:
    """Numbers of an ack state; reads it and changes nothing. No lock.

    After a reset that failed, and until the next persist, a recovery may find the cursor reset or not. The gauges then
    assume the outcome that loses more, at a cost of O(containers of the bitmaps) instead of O(1).
    """

    def __init__(self, state: AckState) -> None:
        self._state = state

    @property
    def redelivery_if_crashed(self) -> int:
        """Acked messages that no durable record covers. Complexity: see the class."""
        state = self._state
        unwritten_count = state.acked_count - state.durable_count
        if not state.resets_begun:
            return unwritten_count
        lowest = min(state.resets_begun)
        covered_count = state.ledgers.count_between(lowest, state.mark_delete)
        return max(unwritten_count, covered_count + len(self._voidable(lowest)))

    @property
    def held_back_count(self) -> int:
        """The part of them that the last persist held back as young. Complexity: O(1)."""
        return len(self._state.unpersisted.held)

    @property
    def cut_count(self) -> int:
        """The part of them that the range limit excluded from the last persist. Complexity: O(1)."""
        return len(self._state.unpersisted.cut)

    @property
    def batch_cut_count(self) -> int:
        """Partly acked batches that the limit on batches excluded from the last persist. Complexity: O(them)."""
        return self._state.unpersisted_batches.cut_count

    @property
    def changed_batch_count(self) -> int:
        """Partly acked batches whose last acks are not durable. Complexity: O(them)."""
        state = self._state
        changed_count = state.unpersisted_batches.changed_count
        if not state.resets_begun:
            return changed_count
        lowest = min(state.resets_begun)
        return max(changed_count, sum(position > lowest for position in state.batch))

    @property
    def unpersisted_record_bytes(self) -> int:
        """Size of the ranges acked and not durable, as Pulsar would write them. Complexity: see the class.

        While a persist is under way, it is the maximum of the sizes before and after it; never more than single acks
        have added.
        """
        state = self._state
        if not state.resets_begun:
            return state.unpersisted.record_bytes
        # A lower reset voids more, but a higher one may void it in larger ranges.
        voidable_bytes = (self._voidable(each).record_bytes for each in state.resets_begun)
        return max(state.unpersisted.record_bytes, *voidable_bytes)

    def unpersisted_bytes_added(self, position: Position) -> int:
        """Return at most how much acking an entry now would add to `unpersisted_record_bytes`; below 0 it frees some.

        Raises:
            As `ackstate.ack_hole.ack_effect`.
        """
        state = self._state
        if state.is_acked(position):
            return 0
        effects = (ack_effect(position, joined, state.ledgers, state.mark_delete) for joined in self._joined_by())
        return max(effect.record_bytes for effect in effects)

    def unpersisted_bytes_freed(self, hole: AckHole) -> int:
        """Return at least how much acking a whole hole now takes off `unpersisted_record_bytes`; below 0 it adds."""
        state = self._state
        stretch = Run(hole.ledger_id, hole.first, hole.end)
        effects = (stretch_effect(stretch, joined, state.ledgers, state.mark_delete) for joined in self._joined_by())
        return -max(effect.record_bytes for effect in effects)

    @property
    def backlog(self) -> int:
        """Entries of the log that are not acked. Complexity: O(log ledgers + trimmed ledgers with acks)."""
        state = self._state
        acked_one_by_one = len(state.deleted) - state.trimmed_count()
        return state.ledgers.count_between(state.mark_delete, state.ledgers.last_confirmed) - acked_one_by_one

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
