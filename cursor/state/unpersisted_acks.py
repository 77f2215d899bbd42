"""Which acks are in no durable record, why, and how large are their ranges?"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import firsts
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from ackstate.record_size import range_first_bytes, ranges_bytes
from ackstate.selection import Keep, select
from ackstate.wire.pulsar.limits import LimitRule, Limits, RangeForm, limit_ranges

if TYPE_CHECKING:
    from pyroaring import BitMap

EVERYTHING = Position(LEDGER_ID_MAX, ENTRY_ID_MAX)
"""A frontier above every position: nothing is too young to be persisted."""


class RangeLimit(NamedTuple):
    """How many ranges the durable state may hold.

    Attributes:
        range_count_max: So many; None for any number.
        keep: Which go first.
        displaces: Whether what goes first may take the place of what is durable already.
        rule: What `range_count_max` counts: ranges, or what a Pulsar release counts in the words form.
    """

    range_count_max: int | None
    keep: Keep
    displaces: bool
    rule: LimitRule = LimitRule.EXACT

    def has_room_for(self, ranges: DeletedRanges) -> bool:
        """Tell whether all of them are within the limit. Complexity: O(1), or O(ledgers) by a rule of Pulsar's."""
        if self.range_count_max is None:
            return True
        return self.usage(ranges) <= self.range_count_max

    def usage(self, ranges: DeletedRanges) -> int:
        """Return how much of the limit ranges take: they are within it if it is not less. Complexity: as above."""
        if self.rule is LimitRule.EXACT:
            return ranges.range_count
        counts = [len(bitmap) for _, bitmap in ranges.bitmaps()]
        if self.rule is not LimitRule.PULSAR_5_0:
            return sum(counts[:-1])
        is_list = bool(counts) and self.range_count_max is not None and counts[0] > self.range_count_max
        return ranges.range_count if is_list else sum(counts)

    def select(self, ranges: DeletedRanges, *, always: DeletedRanges | None) -> DeletedRanges:
        """Return a copy of the ranges that are within the limit, and of those of `always`, even if they are not."""
        assert self.range_count_max is not None
        if self.rule is LimitRule.EXACT:
            return select(ranges, range_count_max=self.range_count_max, keep=self.keep, always=always).kept
        limits = Limits(self.range_count_max, rule=self.rule)
        kept = limit_ranges(ranges, form=RangeForm.WORDS, limits=limits).kept
        if always is not None:
            kept.update(always)
        return kept


@final
class UnpersistedAcks:
    """Acks above the mark-delete position that are not durable; bitmap operations over them, no I/O, no lock.

    They are in one of four sets, which share no entry, and of which only what is being written may hold entries at or
    below the mark-delete position. What is `fresh` its owner adds to, and tells of it by `added`.
    """

    def __init__(self) -> None:
        self.is_plain = True
        """Whether no persist has passed one of them by, so that an ack concerns what is fresh and nothing else."""
        self.fresh = DeletedRanges()
        """Acked since the last persist began, or written in vain."""
        self.in_flight = DeletedRanges()
        """Being written."""
        self.held = DeletedRanges()
        """Held back as young."""
        self.cut = DeletedRanges()
        """Cut off by a limit on ranges."""
        self.displaced = DeletedRanges()
        """Of what is cut off, what was durable until the persist under way, or the last one, chose others."""
        # Acks that a persist has passed by and that the mark-delete position covers since; they wait for it to be
        # durable. Invariant: all of them are at or below it and above the persisted one.
        self.covered = DeletedRanges()
        self._has_failed = False  # whether some of the fresh ones were passed by in that way
        # The four sets as one, so that ranges which touch count as one: kept while something is held back or cut off.
        self._as_one: DeletedRanges | None = None
        # What they may be instead, while a persist is under way: less what is being written or, until it is written,
        # less what it displaces. An ack that joins ranges here may stand alone there.
        self._outcomes: tuple[DeletedRanges, ...] = ()

    @property
    def not_taken_count(self) -> int:
        """How many the persist under way, or the last one, left out. Complexity: O(1)."""
        return len(self.held) + len(self.cut)

    @property
    def record_bytes(self) -> int:
        """Size of their ranges. Complexity: O(1).

        While a persist is under way, it is the largest of what they are and what they will be after it; never more
        than what acks one by one have added.
        """
        if self._as_one is not None:
            return max(ranges.record_bytes for ranges in self._alternatives())
        return self.fresh.record_bytes + self.in_flight.record_bytes

    def sets(self) -> tuple[DeletedRanges, ...]:
        """Return the four sets: to be read, not changed."""
        return self.fresh, self.in_flight, self.held, self.cut

    def joined_by(self) -> tuple[DeletedRanges, ...]:
        """Return the sets whose ranges the next ack may join, of which each may be the one that counts."""
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

    def left_out(self, position: Position) -> bool:
        """Tell whether the persist under way, or the last one, left an entry out."""
        return position in self.held or position in self.cut

    def added(self, ledger_id: int, entry_ids: BitMap) -> None:
        """Note what was put into `fresh`."""
        if self._as_one is not None:
            for ranges in self._alternatives():
                ranges.add_entries(ledger_id, entry_ids)

    def added_one(self, position: Position) -> None:
        """Note one entry that was put into `fresh`."""
        if self._as_one is not None:
            for ranges in self._alternatives():
                ranges.add(position)

    def cover(self, mark_delete: Position) -> None:
        """Forget what the mark-delete position covers."""
        # What an earlier persist passed by stays known until the mark-delete is durable: a receipt may ask for it.
        for passed_by in (self.held, self.cut, self.fresh if self._has_failed else None):
            if passed_by:
                self.covered.update(passed_by.take_at_most(mark_delete))
        self.fresh.remove_at_most(mark_delete)
        if self._as_one is not None:
            for ranges in self._alternatives():
                ranges.remove_at_most(mark_delete)

    def can_promote(self, frontier: Position) -> bool:
        """Tell whether something is fresh, or was held back and is at or below a frontier."""
        lowest = self.held.first_range()
        return bool(self.fresh) or (lowest is not None and lowest[0] < frontier)

    def begin_write(
        self, deleted: DeletedRanges, *, frontier: Position, limit: RangeLimit, record_bytes_max: int | None
    ) -> None:
        """Take what is to be written: it is in flight.

        Args:
            deleted: All acks above the mark-delete position.
            frontier: Those above it are held back.
            limit: What goes beyond it is cut off.
            record_bytes_max: What `record_bytes` may be after this if it is not more already.
        """
        ready = self.fresh
        self.fresh, self._has_failed = DeletedRanges(), False
        if self.held or frontier != EVERYTHING:
            if self._as_one is None:
                self._as_one = ready.copy()
            frontier = self._grown(frontier, record_bytes_max)
            # What was cut off may be young: only at the frontier may a range be parted, which is where it may grow.
            for ranges in (ready, self.cut):
                self.held.update(ranges)
            self.cut = DeletedRanges()
            ready = self.held.take_at_most(frontier)
        if self.cut:
            ready.update(self.cut)
            self.cut = DeletedRanges()
        if self.displaced:
            self.displaced = DeletedRanges()
        if limit.range_count_max is not None:
            ready = self._cut_to_limit(ready, deleted, limit, record_bytes_max)
        self.in_flight = ready
        self.is_plain = not self.held and not self.cut
        if self.is_plain:
            self._as_one = None
            return
        assert self._as_one is not None
        left = self._as_one.copy()
        left.difference_update(ready)
        self._outcomes = (*self._outcomes, left)

    def end_write(self, mark_delete: Position) -> None:
        """Forget what was in flight, and what a mark-delete position covers that is durable now: it was written."""
        self.covered.remove_at_most(mark_delete)
        if self._as_one is not None:
            self._as_one.difference_update(self.in_flight)
            self._outcomes = ()
        self.in_flight = DeletedRanges()

    def abandon_write(self, mark_delete: Position) -> None:
        """Put back what was in flight; what it was to displace may be gone."""
        self.covered.update(self.in_flight.take_at_most(mark_delete))
        self.fresh.update(self.in_flight)
        self._has_failed, self.is_plain = True, False
        self.in_flight, self._outcomes = DeletedRanges(), ()

    def withdraw_displacement(self) -> None:
        """Note that what was to be displaced is durable still."""
        self.cut.difference_update(self.displaced)
        if self._as_one is not None:
            self._as_one.difference_update(self.displaced)

    def frontier_leaving(self, record_bytes_max: int) -> Position | None:
        """Return the lowest end of a range such that those above it take no more bytes; None if all of them do not.

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
        """Return how many are above one position and at or below another. Complexity: O(ledgers)."""
        if upper <= lower:
            return 0
        return self.as_one().cardinality(Position(lower.ledger_id, lower.entry_id + 1), upper)

    def _alternatives(self) -> tuple[DeletedRanges, ...]:
        assert self._as_one is not None
        return (self._as_one, *self._outcomes)

    def _grown(self, frontier: Position, record_bytes_max: int | None) -> Position:
        """Return a frontier that makes the ranges no larger than they may be."""
        assert self._as_one is not None
        ledger_id, entry_id = frontier
        run = self._as_one.run_containing(frontier) if 0 <= entry_id < ENTRY_ID_MAX else None
        if run is None or run.end == entry_id + 1:
            return frontier
        growth = range_first_bytes(entry_id + 1) - range_first_bytes(run.first)
        if growth <= 0:
            return frontier
        if record_bytes_max is not None and self._as_one.record_bytes + growth > record_bytes_max:
            return Position(ledger_id, run.end - 1)
        return frontier

    def _cut_to_limit(
        self, ready: DeletedRanges, deleted: DeletedRanges, limit: RangeLimit, record_bytes_max: int | None
    ) -> DeletedRanges:
        """Return what of the acks that are ready the durable state has room for; the rest is cut off.

        What is durable and gives way counts as not durable from now on: the write may happen although it fails.
        """
        assert limit.range_count_max is not None
        if not self.held and limit.has_room_for(deleted):
            return ready
        wanted = deleted.copy()
        wanted.difference_update(self.held)
        durable = wanted.copy()
        durable.difference_update(ready)
        undurable = ready.copy() if self._as_one is None else self._as_one
        always = None if limit.displaces else durable
        kept = limit.select(wanted, always=always)
        displaced = durable.copy()
        displaced.difference_update(kept)
        if displaced:
            grown = undurable.copy()
            grown.update(displaced)
            left = grown.copy()
            left.difference_update(kept)
            if record_bytes_max is not None and max(grown.record_bytes, left.record_bytes) > record_bytes_max:
                return self._cut_to_limit(ready, deleted, limit._replace(displaces=False), record_bytes_max)
            self._outcomes = (undurable,)
            undurable = grown
        self._as_one = undurable
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
        assert self.is_plain == (self._as_one is None and not self._has_failed)
        if self._as_one is not None:
            every.remove_at_most(mark_delete)
            assert self._as_one == every
            assert not self._outcomes or self._outcomes[-1] == waiting
        assert self.covered.cardinality(Position(0, 0), persisted_mark_delete) == 0
        assert self.covered.cardinality(Position(0, 0), mark_delete) == len(self.covered)


def _highest_bytes(ledger_id: int, bitmap: BitMap, count: int) -> int:
    """Return what the highest so many ranges of a ledger take."""
    begins = firsts(bitmap)
    if not count:
        return 0
    highest = bitmap.copy()
    highest.remove_range(0, begins[len(begins) - count])
    return ranges_bytes(ledger_id, highest, firsts(highest))
