"""Tracks the acks that no durable record holds, why it does not, and the size of their ranges."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, final

from ackstate.deleted_ranges import DeletedRanges, range_first_bytes, ranges_bytes
from ackstate.entry_bitmap import firsts
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position

if TYPE_CHECKING:
    from pyroaring import BitMap

    from ackstate.cursor.state.persist_limits import PersistLimits

EVERYTHING = Position(LEDGER_ID_MAX, ENTRY_ID_MAX)
"""Above every position: nothing is too young to be persisted."""


@final
class UnpersistedAcks:
    """Acks above the mark-delete position that are not durable; bitmap operations over them, no I/O, no lock.

    Each is in exactly one of four sets. Only `in_flight` may hold entries at or below the mark-delete position. The
    owner adds new acks to `fresh` and then calls `added` or `added_one`.
    """

    def __init__(self) -> None:
        self.nothing_held_back = True
        """Whether no persist has excluded one of them or failed to write it, so that an ack changes `fresh` only."""
        self.fresh = DeletedRanges()
        """Acked since the last persist began, or part of a write that failed."""
        self.in_flight = DeletedRanges()
        """Being written."""
        self.held = DeletedRanges()
        """Held back as young."""
        self.cut = DeletedRanges()
        """Cut off by a limit on ranges."""
        self.displaced = DeletedRanges()
        """The part of `cut` that was durable until the persist under way, or the last one, preferred other ranges."""
        # Acks that a persist excluded and that the mark-delete position has covered since. They wait until that
        # position is durable. Invariant: all of them are at or below it and above the persisted one.
        self.covered = DeletedRanges()
        self._has_failed = False  # whether `fresh` holds acks of a write that failed
        # The union of the four sets, so that adjacent ranges count as one; stored while something is excluded.
        self._as_one: DeletedRanges | None = None
        # While a persist is under way, the other sets that the union may become: the union without the acks that are
        # being written or, until they are written, without those that they displace. An ack that joins ranges in one
        # may stand alone in others.
        self._outcomes: tuple[DeletedRanges, ...] = ()

    @property
    def held_count(self) -> int:
        """How many the persist under way, or the last one, holds back. Complexity: O(1)."""
        return 0 if self.nothing_held_back else len(self.held)

    @property
    def cut_count(self) -> int:
        """How many it cuts off. Complexity: O(1)."""
        return 0 if self.nothing_held_back else len(self.cut)

    @property
    def displaced_count(self) -> int:
        """How many of these were durable before. Complexity: O(1)."""
        return 0 if self.nothing_held_back else len(self.displaced)

    @property
    def record_bytes(self) -> int:
        """Size of their ranges. Complexity: O(1).

        While a persist is under way, it is the maximum of the sizes before and after it; never more than single acks
        have added.
        """
        if self._as_one is not None:
            return max(ranges.record_bytes for ranges in self._alternatives())
        return self.fresh.record_bytes + self.in_flight.record_bytes

    def sets(self) -> tuple[DeletedRanges, ...]:
        """Return the four sets: to be read, not changed."""
        return self.fresh, self.in_flight, self.held, self.cut

    def joined_by(self) -> tuple[DeletedRanges, ...]:
        """Return the sets whose ranges the next ack may join; each may turn out to be the one that counts."""
        return (self.fresh,) if self._as_one is None else self._alternatives()

    def as_one(self) -> DeletedRanges:
        """Return all of them as one set: to be read, not changed."""
        if self._as_one is not None:
            return self._as_one
        if not self.in_flight:
            return self.fresh
        both = self.fresh.copy()
        both.update(self.in_flight)
        return both

    def excludes(self, position: Position) -> bool:
        """Return whether the persist under way, or the last one, excludes an entry."""
        return position in self.held or position in self.cut

    def added(self, ledger_id: int, entry_ids: BitMap) -> None:
        """Note entries that were added to `fresh`."""
        if self._as_one is not None:
            for ranges in self._alternatives():
                ranges.add_entries(ledger_id, entry_ids)

    def added_one(self, position: Position) -> None:
        """Note one entry that was added to `fresh`."""
        if self._as_one is not None:
            for ranges in self._alternatives():
                ranges.add(position)

    def cover(self, mark_delete: Position) -> None:
        """Forget the acks that the mark-delete position covers."""
        # Those that an earlier persist excluded are remembered until the mark-delete is durable, for their receipts.
        for excluded in (self.held, self.cut, self.fresh if self._has_failed else None):
            if excluded:
                self.covered.update(excluded.take_at_most(mark_delete))
        self.fresh.remove_at_most(mark_delete)
        if self._as_one is not None:
            for ranges in self._alternatives():
                ranges.remove_at_most(mark_delete)

    def can_promote(self, up_to: Position) -> bool:
        """Return whether an ack at or below a position is fresh, or was held back."""
        lowest = (ranges.first_range() for ranges in (self.fresh, self.held) if ranges)
        return any(each is not None and each[0] < up_to for each in lowest)

    def begin_write(
        self, deleted: DeletedRanges, *, up_to: Position, limit: PersistLimits, record_bytes_max: int | None
    ) -> None:
        """Move the acks to be written to `in_flight`.

        Args:
            deleted: All acks above the mark-delete position.
            up_to: Acks above it are held back.
            limit: Ranges beyond it are cut off.
            record_bytes_max: The most that `record_bytes` may grow to.
        """
        ready = self.fresh
        self.fresh = DeletedRanges()
        if self.nothing_held_back and up_to == EVERYTHING and limit.range_count_max is None:
            self.in_flight = ready
            return
        self._has_failed = False
        if self.held or up_to != EVERYTHING:
            if self._as_one is None:
                self._as_one = ready.copy()
            up_to = self._grown(up_to, record_bytes_max)
            # Acks that were cut off may be young. A range may only be split at `up_to`, where it may grow.
            for ranges in (ready, self.cut):
                self.held.update(ranges)
            self.cut = DeletedRanges()
            ready = self.held.take_at_most(up_to)
        if self.cut:
            ready.update(self.cut)
            self.cut = DeletedRanges()
        if self.displaced:
            self.displaced = DeletedRanges()
        if limit.range_count_max is not None:
            ready = self._cut_to_limit(ready, deleted, limit, record_bytes_max)
        self.in_flight = ready
        self.nothing_held_back = not self.held and not self.cut
        if self.nothing_held_back:
            self._as_one = None
            return
        assert self._as_one is not None
        left = self._as_one.copy()
        left.difference_update(ready)
        self._outcomes = (*self._outcomes, left)

    def end_write(self, mark_delete: Position) -> None:
        """Forget the acks in flight, which were written, and those that the written mark-delete position covers."""
        if self.covered:
            self.covered.remove_at_most(mark_delete)
        if self._as_one is not None:
            self._as_one.difference_update(self.in_flight)
            self._outcomes = ()
        self.in_flight = DeletedRanges()

    def abandon_write(self, mark_delete: Position) -> None:
        """Return the acks in flight to `fresh`; those that they were to displace may be gone."""
        self.covered.update(self.in_flight.take_at_most(mark_delete))
        self.fresh.update(self.in_flight)
        self._has_failed, self.nothing_held_back = True, False
        self.in_flight, self._outcomes = DeletedRanges(), ()

    def withdraw_displacement(self) -> None:
        """Note that the ranges to be displaced are still durable."""
        self.cut.difference_update(self.displaced)
        if self._as_one is not None:
            self._as_one.difference_update(self.displaced)

    def promotable_up_to(self, record_bytes_max: int) -> Position | None:
        """Return the lowest end of a range such that the ranges above it take at most `record_bytes_max` bytes.

        Complexity: O(log ranges) bitmap operations over one ledger's.
        """
        room = record_bytes_max
        for ledger_id, bitmap in reversed(list(self.as_one().bitmaps())):
            begins = firsts(bitmap)
            size = ranges_bytes(ledger_id, bitmap, begins)
            if size > room:
                left_count = bisect_right(range(len(begins) + 1), room, key=partial(_highest_bytes, ledger_id, bitmap))
                given = len(begins) - (left_count - 1)
                entry_count = len(bitmap) if given == len(begins) else bitmap.rank(begins[given]) - 1
                return Position(ledger_id, bitmap[entry_count - 1])
            room -= size
        return None

    def count_between(self, lower: Position, upper: Position) -> int:
        """Count those above one position and at or below another. Complexity: O(ledgers)."""
        if upper <= lower:
            return 0
        return self.as_one().cardinality(Position(lower.ledger_id, lower.entry_id + 1), upper)

    def _alternatives(self) -> tuple[DeletedRanges, ...]:
        assert self._as_one is not None
        return (self._as_one, *self._outcomes)

    def _grown(self, up_to: Position, record_bytes_max: int | None) -> Position:
        """Return the position, raised to the end of its range if a split would exceed `record_bytes_max`."""
        assert self._as_one is not None
        ledger_id, entry_id = up_to
        run = self._as_one.run_containing(up_to) if 0 <= entry_id < ENTRY_ID_MAX else None
        if run is None or run.end == entry_id + 1:
            return up_to
        growth = range_first_bytes(entry_id + 1) - range_first_bytes(run.first)
        if growth <= 0:
            return up_to
        if record_bytes_max is not None and self._as_one.record_bytes + growth > record_bytes_max:
            return Position(ledger_id, run.end - 1)
        return up_to

    def _cut_to_limit(
        self, ready: DeletedRanges, deleted: DeletedRanges, limit: PersistLimits, record_bytes_max: int | None
    ) -> DeletedRanges:
        """Return the ready acks that the durable state has room for, and cut off the rest.

        Displaced ranges count as not durable from now on, because a failed write may still have happened.
        """
        assert limit.range_count_max is not None
        if not self.held and limit.has_room_for(deleted):
            return ready
        wanted = deleted.copy()
        wanted.difference_update(self.held)
        durable = wanted.copy()
        durable.difference_update(ready)
        unpersisted = ready.copy() if self._as_one is None else self._as_one
        always = None if limit.displaces else durable
        kept = limit.select(wanted, always=always)
        displaced = durable.copy()
        displaced.difference_update(kept)
        if displaced:
            grown = unpersisted.copy()
            grown.update(displaced)
            left = grown.copy()
            left.difference_update(kept)
            if record_bytes_max is not None and max(grown.record_bytes, left.record_bytes) > record_bytes_max:
                return self._cut_to_limit(ready, deleted, limit._replace(displaces=False), record_bytes_max)
            self._outcomes = (unpersisted,)
            unpersisted = grown
        self._as_one = unpersisted
        wanted.difference_update(kept)
        kept.difference_update(durable)
        self.cut, self.displaced = wanted, displaced
        return kept

    def _check(self, deleted: DeletedRanges, mark_delete: Position, *, persisted_mark_delete: Position) -> None:
        """Assert every invariant. Complexity: O(state)."""
        for ranges in (self.covered, *self.sets()):
            ranges._check()
        every = DeletedRanges()
        assert sum(map(every.update, self.sets())) == sum(map(len, self.sets()))
        waiting = every.copy()
        waiting.difference_update(self.in_flight)
        assert deleted.copy().update(waiting) == 0
        assert self._as_one is not None or not (self.held or self.cut)
        assert self.nothing_held_back == (self._as_one is None and not self._has_failed)
        if self._as_one is not None:
            every.remove_at_most(mark_delete)
            assert self._as_one == every
            assert not self._outcomes or self._outcomes[-1] == waiting
        assert self.covered.cardinality(Position(0, 0), persisted_mark_delete) == 0
        assert self.covered.cardinality(Position(0, 0), mark_delete) == len(self.covered)


def _highest_bytes(ledger_id: int, bitmap: BitMap, count: int) -> int:
    """Return the size of the highest `count` ranges of a ledger."""
    begins = firsts(bitmap)
    if not count:
        return 0
    highest = bitmap.copy()
    highest.remove_range(0, begins[len(begins) - count])
    return ranges_bytes(ledger_id, highest, firsts(highest))
