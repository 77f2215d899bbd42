"""Which acks of single messages in batches are in no durable record?"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.batch_indexes import BatchIndexes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ackstate.cursor.state.unpersisted_acks import UnpersistedAcks
    from ackstate.position import Position


class _Before(NamedTuple):
    """What was known before a persist; see `UnpersistedBatches`."""

    changed: set[Position]
    cut: set[Position]
    passed_by: set[Position]
    completed: BatchIndexes


@final
class UnpersistedBatches:
    """Acks of messages whose batches are partly acked, or were until their entry was acked as a whole.

    A persist goes in two steps, `begin_write`, then `end_write`, `abandon_write` or `withdraw_write`. Each comes right
    after the same step of the entries.

    Args:
        partly: The batches that are partly acked. Its owner forgets those that the mark-delete passes.
        entries: The acked entries that are not durable.
    """

    def __init__(self, partly: BatchIndexes, entries: UnpersistedAcks) -> None:
        self._partly = partly
        self._entries = entries
        # Batches with acks that no record holds; those that are no longer partly acked may still be named.
        self._changed: set[Position] = set()
        self._in_flight: set[Position] = set()
        # Batches that the last persist left out.
        self._cut: set[Position] = set()
        # Those of them, and of failed ones before, until one that holds or covers them has been written.
        self._passed_by: set[Position] = set()
        # The unacked indexes of a batch before its last ack, until its entry is durable: a persist that excludes the
        # entry writes the acks before the last one, durable before or not.
        self._completed = BatchIndexes()
        # What a persist that is withdrawn gives back.
        self._before = _Before(set(), set(), set(), BatchIndexes())

    @property
    def left_out_count(self) -> int:
        """Batches that the last persist left out, with those that were acked as a whole. Complexity: O(1)."""
        return len(self._cut)

    @property
    def cut_count(self) -> int:
        """Those of them that are partly acked now. Complexity: O(them)."""
        return sum(position in self._partly for position in self._cut)

    @property
    def changed_count(self) -> int:
        """Partly acked batches whose last acks are not durable. Complexity: O(them)."""
        return sum(position in self._partly for position in self._changed | self._in_flight | self._cut)

    def is_passed_by(self, position: Position) -> bool:
        """Tell whether a persist left a batch out, and none that has been written since did not."""
        if position in self._passed_by:
            return True
        if position in self._partly or position in self._completed:
            return False
        return any(position in ranges for ranges in (*self._entries.sets(), self._entries.covered))

    def ack(self, position: Position, unacked_words: Iterable[int]) -> tuple[bool, bool]:
        """Ack messages of a batch; return whether these were the last, so that its entry is to be acked, and a change.

        Raises:
            ValueError: A word does not fit 64 bits.
            TypeError: A word is not an integer.
        """
        before = self._partly.get(position)
        if not self._partly.ack(position, unacked_words):
            return False, self._noted(position, before)
        if before is not None:
            self._completed.ack(position, before)
        return True, True

    def ack_cumulative(self, position: Position, unacked_words: Iterable[int]) -> tuple[bool, bool]:
        """Do as `ack` for the first messages of the batch behind the mark-delete position."""
        before = self._partly.get(position)
        if not self._partly.ack_cumulative(position, unacked_words):
            return False, self._noted(position, before)
        # The mark-delete moves over it, so no persist can leave it out.
        return True, True

    def _noted(self, position: Position, before: tuple[int, ...] | None) -> bool:
        is_changed = self._partly.get(position) != before
        if is_changed:
            self._changed.add(position)
        return is_changed

    def complete(self, position: Position) -> None:
        """Forget the batch that an entry is, if it is one that was partly acked: it is acked as a whole."""
        unacked_words = self._partly.get(position)
        if unacked_words is not None:
            self._completed.ack(position, unacked_words)
            self._partly.discard(position)

    def begin_write(self, batch_count_max: int | None) -> BatchIndexes:
        """Return what changed and is to be written.

        Args:
            batch_count_max: How many batches the durable state may hold, the lowest; None for any number.
        """
        self._before = _Before(self._changed, self._cut, self._passed_by.copy(), self._completed)
        self._in_flight, self._changed, self._cut = self._changed | self._cut, set(), set()
        if batch_count_max is not None:
            self._cut.update(islice(sorted((*self._partly, *self._left_out())), batch_count_max, None))
        self._passed_by |= self._cut
        return self._taken()

    def whole(self) -> BatchIndexes:
        """Return all that is durable once what was taken is; to be called right after `begin_write`."""
        batch = self._partly.copy()
        for position in self._left_out():
            batch.ack(position, self._completed[position])
        for position in self._cut:
            batch.discard(position)
        return batch

    def end_write(self) -> None:
        """Note that what was taken was written."""
        if self._in_flight:
            self._in_flight = set()
        if self._passed_by:
            self._passed_by = set(self._cut)
        if self._completed:
            for position in set(self._completed).difference(self._left_out()):
                if position not in self._entries.fresh:
                    self._completed.discard(position)

    def abandon_write(self) -> None:
        """Put back what was taken: it could not be written."""
        self._changed |= self._in_flight
        self._in_flight = set()

    def withdraw_write(self) -> None:
        """Be as before `begin_write`, right after which this is called, or after `whole`."""
        self._changed, self._cut, self._passed_by, self._completed = self._before
        self._in_flight = set()

    def _left_out(self) -> list[Position]:
        """Return the batches whose last ack the persist under way, or the last one, leaves out."""
        return [position for position in self._completed if self._entries.left_out(position)]

    def _taken(self) -> BatchIndexes:
        taken, left_out = BatchIndexes(), self._left_out() if self._completed else ()
        for position in self._in_flight:
            unacked_words = (self._completed if position in left_out else self._partly).get(position)
            if unacked_words is not None:
                taken.ack(position, unacked_words)
        return taken

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(batches)."""
        self._partly._check()
        self._completed._check()
        assert self._cut <= self._passed_by
