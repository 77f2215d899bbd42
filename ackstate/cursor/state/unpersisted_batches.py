"""Tracks the acks of single messages in batches that no durable record holds."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.batch_indexes import NO_BATCHES, BatchIndexes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ackstate.cursor.state.unpersisted_acks import UnpersistedAcks
    from ackstate.position import Position


class _Before(NamedTuple):
    """The sets before a persist; see `UnpersistedBatches`."""

    changed: set[Position]
    cut: set[Position]
    unwritten: set[Position]
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
        # Batches that the last persist excluded because of the limit.
        self._cut: set[Position] = set()
        # Batches that this persist or an earlier one cut, until a record that holds or covers them was written.
        self._unwritten: set[Position] = set()
        # The unacked indexes of a batch before its last ack, until its entry is durable: a persist that excludes the
        # entry writes the acks before the last one, durable before or not.
        self._completed = BatchIndexes()
        # The sets to restore if the persist is withdrawn.
        self._before: _Before | None = None  # None if there was nothing to be written

    @property
    def excluded_count(self) -> int:
        """Batches that the last persist cut, also those that were acked as a whole since. Complexity: O(1)."""
        return len(self._cut)

    @property
    def cut_count(self) -> int:
        """Those of them that are partly acked now. Complexity: O(them)."""
        return sum(position in self._partly for position in self._cut)

    @property
    def changed_count(self) -> int:
        """Partly acked batches whose last acks are not durable. Complexity: O(them)."""
        return sum(position in self._partly for position in self._changed | self._in_flight | self._cut)

    def is_excluded(self, position: Position) -> bool:
        """Return whether a persist excluded a batch, and no later one has written it."""
        if position in self._unwritten:
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
        """Ack the first messages of the batch that follows the mark-delete position; returns as `ack`."""
        before = self._partly.get(position)
        if not self._partly.ack_cumulative(position, unacked_words):
            return False, self._noted(position, before)
        # The mark-delete moves over it, so no persist can exclude it.
        return True, True

    def _noted(self, position: Position, before: tuple[int, ...] | None) -> bool:
        is_changed = self._partly.get(position) != before
        if is_changed:
            self._changed.add(position)
        return is_changed

    def complete(self, position: Position) -> None:
        """Note that an entry is acked as a whole: if it is a partly acked batch, it no longer is."""
        unacked_words = self._partly.get(position)
        if unacked_words is not None:
            self._completed.ack(position, unacked_words)
            self._partly.discard(position)

    def begin_write(self, batch_count_max: int | None) -> BatchIndexes:
        """Return the changed batches that are to be written."""
        # Every persist comes here; most subscriptions have no batch.
        if not (self._partly.by_ledger or self._completed.by_ledger or self._changed or self._cut or self._unwritten):
            self._before = None
            return NO_BATCHES
        self._before = _Before(self._changed, self._cut, self._unwritten.copy(), self._completed)
        self._in_flight, self._changed, self._cut = self._changed | self._cut, set(), set()
        if batch_count_max is not None:
            self._cut.update(islice(sorted((*self._partly, *self._excluded())), batch_count_max, None))
        self._unwritten |= self._cut
        return self._taken()

    def whole(self) -> BatchIndexes:
        """Return all batches that are durable after the write; to be called right after `begin_write`."""
        batch = self._partly.copy()
        for position in self._excluded():
            batch.ack(position, self._completed[position])
        for position in self._cut:
            batch.discard(position)
        return batch

    def end_write(self) -> None:
        """Note that the batches were written."""
        if self._in_flight:
            self._in_flight = set()
        if self._unwritten:
            self._unwritten = set(self._cut)
        if self._completed.by_ledger:
            for position in set(self._completed).difference(self._excluded()):
                if position not in self._entries.fresh:
                    self._completed.discard(position)

    def abandon_write(self) -> None:
        """Note that the batches could not be written."""
        self._changed |= self._in_flight
        self._in_flight = set()

    def withdraw_write(self) -> None:
        """Undo `begin_write`; to be called right after it, or after `whole`."""
        if self._before is not None:
            self._changed, self._cut, self._unwritten, self._completed = self._before
            self._in_flight = set()

    def _excluded(self) -> list[Position]:
        """Return the batches whose last ack the persist under way, or the last one, excludes."""
        return [position for position in self._completed if self._entries.excludes(position)]

    def _taken(self) -> BatchIndexes:
        taken, excluded = BatchIndexes(), self._excluded() if self._completed else ()
        for position in self._in_flight:
            unacked_words = (self._completed if position in excluded else self._partly).get(position)
            if unacked_words is not None:
                taken.ack(position, unacked_words)
        return taken

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(batches)."""
        self._partly._check()
        self._completed._check()
        assert self._cut <= self._unwritten
