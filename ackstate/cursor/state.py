"""Holds one subscription's acks in memory, the durable ones among them, and the receipts that these cover.

`CursorAckState` owns every number of a cursor; `UnpersistedAcks` and `UnpersistedBatches` are the part of it that no
durable record holds. One call at a time, no I/O, no lock.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, final

from pyroaring import BitMap

from ackstate.batch_indexes import NO_BATCHES, BatchIndexes
from ackstate.cursor.config import UNLIMITED
from ackstate.cursor.formats import check_within_log
from ackstate.deleted_ranges import DeletedRanges, range_first_bytes, ranges_bytes
from ackstate.entry_bitmap import bitmap_of, firsts
from ackstate.errors import InvalidPositionError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position, check_position
from ackstate.wire.native import NO_COUNTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Set

    from ackstate.cursor.config import PersistLimits
    from ackstate.cursor.formats import CursorState
    from ackstate.cursor.results import Receipt
    from ackstate.ledger_map import LedgerMap
    from ackstate.wire.native import DeliveryCounts

EVERYTHING = Position(LEDGER_ID_MAX, ENTRY_ID_MAX)
"""Above every position: nothing is too young to be persisted."""


@final
class UnpersistedAcks:
    """Acks above the mark-delete position that are not durable; bitmap operations over them, no I/O, no lock."""

    # Each is in exactly one of four sets. Only `in_flight` may hold entries at or below the mark-delete position. The
    # owner reports each ack by `add_entries`, or adds its entry to `new`.

    def __init__(self) -> None:
        self.nothing_held_back = True
        """Whether no persist has excluded one of them or failed to write it, so that an ack changes `fresh` only."""
        self.new = BitMap()
        """Entries of `new_ledger_id` that are to be added to `fresh`: nearly each ack adds one, few calls read it."""
        self.new_ledger_id = -1
        self.passed: Position | None = None  # the mark-delete position, if `fresh` may hold entries that it covers
        self._fresh = DeletedRanges()
        self.in_flight = DeletedRanges()  # being written
        self.held = DeletedRanges()  # held back as young
        self.cut = DeletedRanges()  # cut off by a limit on ranges
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
    def fresh(self) -> DeletedRanges:
        """Acked since the last persist began, or part of a write that failed."""
        if self.new:
            new, self.new = self.new, BitMap()
            self._fresh.add_missing(self.new_ledger_id, new)
        if self.passed is not None:
            self._fresh.remove_at_most(self.passed)
            self.passed = None
        return self._fresh

    @property
    def record_bytes(self) -> int:
        """Size of their ranges; O(1)."""
        # While a persist is under way, it is the maximum of the sizes before and after it; never more than single acks
        # have added.
        if self._as_one is not None:
            return max(ranges.record_bytes for ranges in self._alternatives())
        return self.fresh.settle().record_bytes + self.in_flight.record_bytes

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

    def move_to(self, ledger_id: int) -> None:
        """Make `new` hold entries of a ledger."""
        if self.new:
            self.fresh  # noqa: B018 - it takes in those of the ledger before
        self.new_ledger_id = ledger_id

    def add_entries(self, ledger_id: int, entry_ids: BitMap) -> None:
        """Note entries, all of them new, that were acked."""
        if ledger_id != self.new_ledger_id:
            self.move_to(ledger_id)
        self.new |= entry_ids
        self.added(ledger_id, entry_ids)

    def added(self, ledger_id: int, entry_ids: Iterable[int]) -> None:
        """Note entries that were added to `new`, unless `nothing_held_back`."""
        if self._as_one is not None:
            for ranges in self._alternatives():
                ranges.add_entries(ledger_id, entry_ids)

    def cover(self, mark_delete: Position) -> None:
        """Forget the acks that the mark-delete position covers."""
        # Those that an earlier persist excluded are remembered until the mark-delete is durable, for their receipts.
        for excluded in (self.held, self.cut, self.fresh if self._has_failed else None):
            if excluded:
                self.covered.update(excluded.take_at_most(mark_delete))
        self.passed = mark_delete
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
        """Move the acks to be written to `in_flight`, but for those above `up_to` or beyond `limit`."""
        # `deleted` are all acks above the mark-delete position; `record_bytes` grows to at most `record_bytes_max`.
        ready = self.fresh
        self._fresh = DeletedRanges()
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
        """Return the lowest end of a range such that the ranges above it take at most `record_bytes_max` bytes."""
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
        """Return the ready acks that the durable state has room for, and cut off the rest."""
        # Displaced ranges count as not durable from now on, because a failed write may still have happened.
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


@final
class UnpersistedBatches:
    """Acks of messages whose batches are partly acked, or were until their entry was acked as a whole."""

    # A persist goes in two steps, `begin_write`, then `end_write`, `abandon_write` or `withdraw_write`. Each comes
    # right after the same step of the entries.

    def __init__(self, partly: BatchIndexes, entries: UnpersistedAcks) -> None:
        self._partly = partly  # the batches that are partly acked. Its owner forgets those that the mark-delete passes.
        self._entries = entries
        # Batches with acks that no record holds; those that are no longer partly acked may still be named.
        self._changed: set[Position] = set()
        self._in_flight: set[Position] = set()
        # Batches that the last persist excluded because of the limit, also those that were acked as a whole since.
        self.cut: set[Position] = set()
        # Batches that this persist or an earlier one cut, until a record that holds or covers them was written.
        self._unwritten: set[Position] = set()
        # The unacked indexes of a batch before its last ack, until its entry is durable: a persist that excludes the
        # entry writes the acks before the last one, durable before or not.
        self._completed = BatchIndexes()
        # `_changed`, `cut` and `_unwritten`, to be restored if the persist is withdrawn; None if there was nothing.
        self._before: tuple[set[Position], set[Position], set[Position]] | None = None

    @property
    def cut_count(self) -> int:
        """Those in `cut` that are partly acked now. Complexity: O(them)."""
        return sum(position in self._partly for position in self.cut)

    @property
    def changed_count(self) -> int:
        """Partly acked batches whose last acks are not durable. Complexity: O(them)."""
        return sum(position in self._partly for position in self._changed | self._in_flight | self.cut)

    def is_excluded(self, position: Position) -> bool:
        """Return whether a persist excluded a batch, and no later one has written it."""
        if position in self._unwritten:
            return True
        if position in self._partly or position in self._completed:
            return False
        return any(position in ranges for ranges in (*self._entries.sets(), self._entries.covered))

    def ack(self, position: Position, unacked_words: Iterable[int]) -> tuple[bool, bool]:
        """Ack messages of a batch; return whether these were the last, which acks its entry, and whether it changed."""
        before = self._partly.get(position)
        if self._partly.ack(position, unacked_words):
            if before is not None:
                self._completed.ack(position, before)
            return True, True
        is_changed = self._partly.get(position) != before
        if is_changed:
            self._changed.add(position)
        return False, is_changed

    def complete(self, position: Position) -> None:
        """Note that an entry is acked as a whole: if it is a partly acked batch, it no longer is."""
        unacked_words = self._partly.get(position)
        if unacked_words is not None:
            self._completed.ack(position, unacked_words)
            self._partly.discard(position)

    def begin_write(self, batch_count_max: int | None) -> BatchIndexes:
        """Return the changed batches that are to be written."""
        # Every persist comes here; most subscriptions have no batch.
        if not (self._partly.by_ledger or self._completed.by_ledger or self._changed or self.cut or self._unwritten):
            self._before = None
            return NO_BATCHES
        self._before = self._changed, self.cut, self._unwritten.copy()
        self._in_flight, self._changed, self.cut = self._changed | self.cut, set(), set()
        if batch_count_max is not None:
            self.cut.update(islice(sorted((*self._partly, *self._excluded())), batch_count_max, None))
        self._unwritten |= self.cut
        return self._taken()

    def whole(self) -> BatchIndexes:
        """Return all batches that are durable after the write; to be called right after `begin_write`."""
        batch = self._partly.copy()
        for position in self._excluded():
            batch.ack(position, self._completed[position])
        for position in self.cut:
            batch.discard(position)
        return batch

    def end_write(self) -> None:
        """Note that the batches were written."""
        if self._in_flight:
            self._in_flight = set()
        if self._unwritten:
            self._unwritten = set(self.cut)
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
            self._changed, self.cut, self._unwritten = self._before
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
        assert self.cut <= self._unwritten


@final
class CountedDeliveries:
    """How often unacked messages were sent, but for first deliveries, and until when each waits."""

    def __init__(self) -> None:
        # Also of some messages whose ack is durable, up to the next whole state; the journal has bytes for each.
        self.known: dict[Position, tuple[int, int]] = {}
        self._changed: set[Position] = set()  # since a write was begun
        # Of the write under way: those that changed before it, and those of messages whose acks it has.
        self._in_flight: set[Position] = set()
        self._acked: list[Position] = []
        self._are_left_out = False  # whether the last write had no room for them; then the next is a whole state

    def note(self, counts: DeliveryCounts) -> None:
        """Keep counts of unacked messages."""
        self.known.update(counts)
        self._changed.update(counts)

    def is_durable(self, position: Position) -> bool:
        """Return whether no crash changes the count of a message, or the last write had no room for it."""
        return self._are_left_out or not (position in self._changed or position in self._in_flight)

    def begin_write(self, is_written: Callable[[Position], bool]) -> DeliveryCounts:
        """Return what a delta adds, given whether it has the ack of a message."""
        self._in_flight, self._changed = self._changed, set()
        return self._without_acked(self._in_flight, is_written)

    def whole(self, is_written: Callable[[Position], bool]) -> DeliveryCounts:
        """Return those of a whole state; right after `begin_write`."""
        return self._without_acked(self.known.keys(), is_written)

    def _without_acked(self, counted: Set[Position], is_written: Callable[[Position], bool]) -> DeliveryCounts:
        self._acked = [each for each in counted if is_written(each)]
        return {each: self.known[each] for each in counted - set(self._acked)}

    def end_write(self, *, are_left_out: bool) -> None:
        """Note that it was written."""
        for position in self._acked:
            del self.known[position]
            self._changed.discard(position)
        self._in_flight, self._acked, self._are_left_out = set(), [], are_left_out

    def abandon_write(self) -> None:
        """Note that it failed, or is not made."""
        self._changed |= self._in_flight
        self._in_flight, self._acked = set(), []

    def clear(self) -> None:
        """Forget everything."""
        self.known.clear()
        self._changed.clear()
        self._are_left_out = False


class Unpersisted(NamedTuple):
    """The acks that one persist is to make durable, all of one instant."""

    mark_delete: Position
    new: DeletedRanges  # acks above it that no durable record holds and that may be written; not to be changed
    properties: Mapping[str, int]  # the properties of the latest mark-delete
    batch: BatchIndexes  # partly acked batches that changed; not to be changed
    acked_count: int  # how many messages are durable once this is
    number: int  # the receipt number up to which receipts are durable once this is, but for excluded acks
    durable_count: int  # how many were before
    held_count: int  # how many acked messages are excluded as young
    cut_count: int  # how many acked messages the range limit excludes
    batch_cut_count: int  # how many partly acked batches the limit on batches excludes
    counts: DeliveryCounts  # the delivery counts that changed


@final
class CursorAckState:
    """Acks, and the receipt numbers given for them; one call at a time, no I/O, no lock."""

    # A persist takes two steps: `begin_persist`, then `end_persist` or `abandon_persist`. Acks may arrive in between.
    # So does a reset: `begin_reset`, then `apply_reset`. A reset that is not applied has failed, and may have happened:
    # until the next persist ends, the gauges of `AckView` assume the outcome that loses more.

    def __init__(self, ledgers: LedgerMap) -> None:
        self.ledgers = ledgers
        # Invariant: persisted_mark_delete <= mark_delete, and no entry of deleted is at or below mark_delete.
        self.mark_delete = self.persisted_mark_delete = ledgers.previous(Position(ledgers.first_ledger_id, 0))
        self.deleted = DeletedRanges()
        self.batch = BatchIndexes()
        self.properties: Mapping[str, int] = {}
        self.unpersisted = UnpersistedAcks()
        self.unpersisted_batches = UnpersistedBatches(self.batch, self.unpersisted)
        self.counts = CountedDeliveries()
        # Invariant: durable <= acked.
        self.durable_count = 0
        # Rises with every acked message, and with every other change. Invariant: void, durable <= accepted. Receipts
        # with a number up to `durable_number` are durable, but for acks that a persist excluded; those up to
        # `void_number` never again.
        self.accepted_number = self.durable_number = self._other_change_count = 0
        self.void_number = -1
        # Mark-delete positions that the durable state may have instead, with nothing acked above: those of resets that
        # were begun and not applied since the last persist. `durable_count` and the like ignore them.
        self.resets_begun: set[Position] = set()

    @property
    def acked_count(self) -> int:
        """Messages acked since the state was made or restored."""
        return self.accepted_number - self._other_change_count

    @property
    def is_dirty(self) -> bool:
        """Whether something was accepted that no persist has looked at."""
        return self.accepted_number > self.durable_number

    def is_durable(self, receipt: Receipt) -> bool:
        """Return whether all acks of a receipt are durable."""
        if not self.void_number < receipt.number <= self.durable_number:
            return False
        # One may wait for a persist, such as one that an earlier persist excluded.
        if receipt.entries and any(
            not bitmap.isdisjoint(ranges.entries(ledger_id))
            for ranges in (*self.unpersisted.sets(), self.unpersisted.covered)
            for ledger_id, bitmap in receipt.entries.items()
        ):
            return False
        return receipt.batch is None or not self.unpersisted_batches.is_excluded(receipt.batch)

    def is_acked(self, position: Position) -> bool:
        """Return whether an entry is acked, by itself or by the mark-delete."""
        return position <= self.mark_delete or position in self.deleted

    def ack(self, position: Position) -> int:
        """Ack one entry and return 1, or 0 if it was acked already; O(log ledgers), unless the mark-delete moves."""
        # Every ack comes here, so what it needs is written out: each call, and each tuple that is unpacked, would show.
        if type(position) is not Position:
            position = check_position(position, entry_id_min=0)
        ledger_id, entry_id = position[0], position[1]
        if type(ledger_id) is not int or type(entry_id) is not int:
            ledger_id, entry_id = position = check_position(position, entry_id_min=0)
        log, marked = self.ledgers.current, self.mark_delete
        marked_ledger_id, next_entry_id = marked[0], marked[1] + 1
        entry_count = log.open_count if ledger_id == log.open_id else self.ledgers.entry_count(ledger_id)
        # Accepted are an acked entry of a ledger that was trimmed since, and one that was written meanwhile.
        if not 0 <= entry_id < entry_count and not self.is_acked(check_position(position, entry_id_min=0)):
            self.ledgers.check_written(position)
        if ledger_id == marked_ledger_id and entry_id <= next_entry_id:
            if entry_id != next_entry_id:
                return 0
            # The mark-delete moves by one entry, which is in no set, and over the acked ones after it.
            self.mark_delete = position
            if self.deleted._ledger_ids:  # whether it has any, without a call
                self._pass_acked()
        elif ledger_id < marked_ledger_id or not self.deleted.add_valid(ledger_id, entry_id):
            return 0
        else:
            unpersisted = self.unpersisted
            if ledger_id != unpersisted.new_ledger_id:
                unpersisted.move_to(ledger_id)
            unpersisted.new.add(entry_id)
            if not unpersisted.nothing_held_back:
                unpersisted.added(ledger_id, (entry_id,))
            # Only the first entry of a ledger follows the last one of another, unless those between were trimmed.
            if ledger_id != marked_ledger_id and (entry_id == 0 or self.ledgers.first_ledger_id > marked_ledger_id):
                self._advance_mark_delete()
        if self.batch.by_ledger:
            self.unpersisted_batches.complete(position)
        self.accepted_number += 1
        return 1

    def ack_bitmaps(self, candidates: Mapping[int, BitMap]) -> tuple[Mapping[int, BitMap], int]:
        """Ack entries of many ledgers, all or none, and return those that were new, and their number."""
        new = {ledger_id: self._not_acked(ledger_id, bitmap) for ledger_id, bitmap in candidates.items()}
        for ledger_id, bitmap in new.items():
            if bitmap and bitmap.max() >= self.ledgers.entry_count(ledger_id):
                self.ledgers.check_written(Position(ledger_id, bitmap.max()))
        for ledger_id, bitmap in new.items():
            if bitmap:
                self.deleted.add_missing(ledger_id, bitmap)
                self.unpersisted.add_entries(ledger_id, bitmap)
            if self.batch.by_ledger:
                for position in self.batch.among(ledger_id, bitmap):
                    self.unpersisted_batches.complete(position)
        return new, self._accept(sum(map(len, new.values())))

    def ack_batch(self, position: Position, unacked_words: Iterable[int]) -> tuple[int, bool]:
        """Ack messages of a batch; return the number of newly acked entries, 1 or 0, and whether the batch changed."""
        if self.is_acked(position):
            return 0, False
        self.ledgers.check_written(position)
        was_last, changed = self.unpersisted_batches.ack(position, unacked_words)
        if was_last:
            return self.ack(position), changed
        self.changed(changed)
        return 0, changed

    def ack_up_to(self, position: Position) -> int:
        """Ack every entry up to a position, included, and return how many were new."""
        if position < self.mark_delete:
            raise InvalidPositionError(
                f"mark-delete to {position} would go back from {self.mark_delete}; only a reset may"
            )
        # The mark-delete position and the end of the log may be in a ledger that was trimmed since.
        if position not in (self.mark_delete, self.ledgers.last_confirmed):
            if position.entry_id >= 0:
                self.ledgers.check_written(position)
            elif not self.ledgers.has_ledger(position.ledger_id):
                raise InvalidPositionError(f"ledger {position.ledger_id} is not in the message log")
        before, trimmed_before = self.mark_delete, self.trimmed_count(self.deleted)
        acked_before = self._move_mark_delete(position) - (trimmed_before - self.trimmed_count(self.deleted))
        newly_acked = self.ledgers.count_between(before, position) - acked_before
        assert newly_acked >= 0, "acked entries that the log does not have"
        self._accept(newly_acked)
        self.changed(not newly_acked and self.mark_delete != before)
        return newly_acked

    def ack_up_to_batch(self, position: Position, unacked_words: Iterable[int], *, counts: bool) -> tuple[int, bool]:
        """Ack every entry below a batch and its first messages; return as `ack_batch`."""
        if position <= self.mark_delete:
            raise InvalidPositionError(
                f"mark-delete into batch {position} would go back from {self.mark_delete}; only a reset may"
            )
        self.ledgers.check_written(position)
        BatchIndexes().ack(position, unacked_words)  # Tried out: a refused call changes nothing.
        newly_acked = self.ack_up_to(max(self.ledgers.previous(position), self.mark_delete))
        if not counts or self.is_acked(position):
            return newly_acked, False
        of_batch, changed = self.ack_batch(position, unacked_words)
        return newly_acked + of_batch, changed

    def count(self, counts: DeliveryCounts) -> None:
        """Keep how often unacked messages were sent, and until when they wait; the next persist writes it."""
        self.counts.note({each: count for each, count in counts.items() if not self.is_acked(each)})
        self.changed()

    def restore(self, content: CursorState) -> None:
        """Start, before any ack, from a durable state, whose sets are given away, without entries lost by the log."""
        # No number may count these. A state beyond the end of the log raises `InvalidPositionError`.
        check_within_log(content, self.ledgers)
        mark_delete, deleted, batch, properties, counts = content
        deleted.discard_missing(self.ledgers)
        for position in [position for position in batch if position not in self.ledgers]:
            batch.discard(position)
        self.mark_delete = self.persisted_mark_delete = mark_delete
        self.deleted, self.batch, self.properties = deleted, batch, properties
        self.unpersisted_batches = UnpersistedBatches(batch, self.unpersisted)
        self.counts.known |= counts and {each: count for each, count in counts.items() if each in self.ledgers}
        self._advance_mark_delete()

    def begin_reset(self, mark_delete: Position) -> None:
        """Note that a reset is about to be written: from here on it may happen, even if the write fails."""
        # Until the next persist, which writes the state even if nothing is new, no receipt is durable.
        self.persisted_mark_delete = min(self.persisted_mark_delete, mark_delete)
        self.resets_begun.add(mark_delete)
        self.changed()
        self.durable_number = self.void_number

    def apply_reset(self, mark_delete: Position) -> None:
        """Restart at a position, with nothing acked above it, all of it durable. Receipts from before become void."""
        self.mark_delete = self.persisted_mark_delete = mark_delete
        self.resets_begun.clear()
        self.properties = {}
        self.deleted, self.batch = DeletedRanges(), BatchIndexes()
        self.unpersisted = UnpersistedAcks()
        self.unpersisted_batches = UnpersistedBatches(self.batch, self.unpersisted)
        self.counts.clear()
        self.durable_count = self.acked_count
        self.void_number = self.accepted_number
        self.changed()
        self.durable_number = self.accepted_number

    def begin_persist(
        self,
        *,
        up_to: Position = EVERYTHING,
        limits: PersistLimits = UNLIMITED,
        record_bytes_max: int | None = None,
    ) -> Unpersisted:
        """Take all acks that are not durable, as of now, but for those above `up_to` or beyond a limit."""
        # The mark-delete position is never held back. To keep `unpersisted_record_bytes` within `record_bytes_max`,
        # `up_to` moves up to the end of the range that it would split, if the rest of the range took more bytes than
        # the whole; and nothing durable is displaced.
        unpersisted = self.unpersisted
        unpersisted.begin_write(self.deleted, up_to=up_to, limit=limits, record_bytes_max=record_bytes_max)
        durable_count, held_count, cut_count = self.durable_count, 0, 0
        if not unpersisted.nothing_held_back:
            held_count, cut_count = len(unpersisted.held), len(unpersisted.cut)
            self.durable_count -= len(unpersisted.displaced)
        batch = self.unpersisted_batches.begin_write(limits.batch_count_max)
        return Unpersisted(
            self.mark_delete, unpersisted.in_flight, self.properties, batch,
            acked_count=self.acked_count - cut_count - held_count, number=self.accepted_number,
            durable_count=durable_count, held_count=held_count, cut_count=cut_count,
            batch_cut_count=len(self.unpersisted_batches.cut),
            counts=self.counts.begin_write(self._is_written) if self.counts.known else NO_COUNTS,
        )  # fmt: skip

    def whole(self) -> tuple[DeletedRanges, BatchIndexes, DeliveryCounts]:
        """Return all acks, also in batches, and counts that are durable after the persist; after `begin_persist`."""
        content = self.deleted.copy()
        for ranges in (self.unpersisted.held, self.unpersisted.cut):
            content.difference_update(ranges)
        counts = self.counts.whole(self._is_written) if self.counts.known else NO_COUNTS
        return content, self.unpersisted_batches.whole(), counts

    def _is_written(self, position: Position) -> bool:
        """Return whether the persist under way makes an entry durably acked."""
        is_excluded = not self.unpersisted.nothing_held_back and self.unpersisted.excludes(position)
        return position <= self.mark_delete or (position in self.deleted and not is_excluded)

    def end_persist(self, written: Unpersisted, *, are_counts_left_out: bool = False) -> int:
        """Count the acks of `begin_persist` as durable; return the change, negative if more were displaced."""
        self.durable_count = written.acked_count
        self.durable_number = written.number
        self.persisted_mark_delete = written.mark_delete
        self.resets_begun.clear()
        self.unpersisted.end_write(written.mark_delete)
        self.unpersisted_batches.end_write()
        if self.counts.known:
            self.counts.end_write(are_left_out=are_counts_left_out)
        return written.acked_count - written.durable_count

    def abandon_persist(self) -> None:
        """Note that the write failed: the acks wait again, and those that they were to displace may be gone."""
        self.unpersisted.abandon_write(self.mark_delete)
        self.unpersisted_batches.abandon_write()
        self.counts.abandon_write()

    def withdraw_persist(self) -> None:
        """Undo `begin_persist`, right after it or `whole`: nothing will be written, so durable acks stay durable."""
        self.unpersisted.abandon_write(self.mark_delete)
        self.unpersisted.withdraw_displacement()
        self.unpersisted_batches.withdraw_write()
        self.counts.abandon_write()
        self.durable_count += len(self.unpersisted.displaced)

    def trimmed_count(self, acked: DeletedRanges) -> int:
        """Return how many of some acks above the mark-delete are in ledgers that were trimmed; O(these ledgers)."""
        has_trimmed = self.mark_delete.ledger_id < self.ledgers.first_ledger_id  # each mark-delete compares this twice
        return acked.cardinality(self.mark_delete, self.ledgers.first_position) if has_trimmed else 0

    def unwritten_count(self) -> int:
        """Return how many acked entries of the log no durable record covers."""
        count, ledgers = self.acked_count - self.durable_count, self.ledgers
        if count and self.persisted_mark_delete.ledger_id < ledgers.first_ledger_id:
            # Some may be of ledgers that were trimmed since. Those that are left are among these.
            above = self.unpersisted.count_between(max(self.mark_delete, ledgers.first_position), EVERYTHING)
            count = min(count, ledgers.count_between(self.persisted_mark_delete, self.mark_delete) + above)
        return count

    def changed(self, count: int = 1) -> None:
        """Count changes that ack no message: they make the state dirty, to be stored again."""
        self.accepted_number += count
        self._other_change_count += count

    def _accept(self, newly_acked: int) -> int:
        self.accepted_number += newly_acked
        self._advance_mark_delete()
        return newly_acked

    def _not_acked(self, ledger_id: int, candidates: BitMap) -> BitMap:
        if ledger_id < self.mark_delete.ledger_id:
            return bitmap_of(())
        new = candidates - self.deleted.entries(ledger_id)
        if ledger_id == self.mark_delete.ledger_id:
            new.remove_range(0, self.mark_delete.entry_id + 1)
        return new

    def _pass_acked(self) -> None:
        """Move the mark-delete, which has moved by one entry, over the acked entries after it."""
        if not self.unpersisted.nothing_held_back:
            self._advance_mark_delete()
            return
        ledger_id, entry_id = self.mark_delete
        end = self.deleted.remove_lowest(ledger_id, entry_id + 1)
        if end > entry_id + 1:
            self.mark_delete = self.unpersisted.passed = Position(ledger_id, end - 1)
        if end == self.ledgers.entry_count(ledger_id):
            self._advance_mark_delete()

    def _advance_mark_delete(self) -> None:
        """Move the mark-delete over every acked entry that follows it, across the ends of ledgers."""
        # Source: ``ManagedCursorImpl.setAcknowledgedPosition`` of Apache Pulsar.
        reached = self.deleted.reach(self.mark_delete, self.ledgers)
        if reached != self.mark_delete:
            self._move_mark_delete(reached)

    def _move_mark_delete(self, position: Position) -> int:
        """Set the mark-delete position and return how many entries up to it were acked one by one before."""
        self.mark_delete = position
        self.unpersisted.cover(position)
        self.batch.remove_at_most(position)
        return self.deleted.remove_at_most(position)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(state)."""
        self.deleted._check()
        self.unpersisted._check(self.deleted, self.mark_delete, persisted_mark_delete=self.persisted_mark_delete)
        self.unpersisted_batches._check()
        lowest = next(self.deleted.runs(), None)
        assert lowest is None or Position(lowest.ledger_id, lowest.first) > self.mark_delete
        assert not self.is_acked(self.ledgers.next_valid(self.mark_delete))
        assert self.persisted_mark_delete <= self.mark_delete
        assert self.durable_count <= self.acked_count
        assert not any(position in self.deleted for position, _ in self.batch.items())
