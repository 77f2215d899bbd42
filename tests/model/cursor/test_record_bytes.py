"""Acks that are not durable have a size, and no persist may make it exceed a limit: not while it runs, nor after.

The range of entries `first` to `last` of a ledger below 128 takes 12 bytes, one to three for each of `first - 1` and
`last`, and ten for the former if `first` is 0. So a range that is cut in two where a number gets longer may leave more
than it was.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import CursorConfig, DeletedRanges, Format, LedgerMap, ManagedCursor, MemoryStore, Position, StoreError
from ackstate.cursor import PersistTarget
from ackstate.cursor.config import PersistLimits
from ackstate.cursor.listener import CursorListener
from ackstate.cursor.state import CursorAckState
from ackstate.cursor.view import AckView
from ackstate.deleted_ranges import isolated_range_bytes, range_bytes
from ackstate.selection import Keep
from ackstate.stores.memory import MemoryDisk

LEDGER = 5
DISPLACING = PersistLimits(range_count_max=1, displaces=True)


def state_with(first, end):
    """Entries of the second ledger are acked, from `first` to `end` (excluded); of the first none is."""
    state = CursorAckState(LedgerMap.from_counts({3: 10, LEDGER: 100_000}))
    acked = DeletedRanges()
    acked.add_run(LEDGER, first, end)
    state.ack_bitmaps({LEDGER: acked.entries(LEDGER).copy()})
    return state


CUT_OVER_A_BOUNDARY = [
    # first, end, frontier; the size before, while the rest is left out, and after that
    pytest.param(100, 201, 150, (15, 16, 16), id="two bytes instead of one"),
    pytest.param(5, 30_001, 20_000, (16, 18, 18), id="three bytes instead of one"),
    pytest.param(5, 30_001, 200, (16, 17, 17), id="two bytes of three"),
    pytest.param(0, 11, 4, (23, 23, 14), id="entry 0, whose end takes ten"),
    pytest.param(0, 30_001, 20_000, (25, 25, 18), id="entry 0 and a long number"),
    pytest.param(10, 101, 50, (14, 14, 14), id="no boundary"),
]


@pytest.mark.parametrize(("first", "end", "frontier", "sizes"), CUT_OVER_A_BOUNDARY)
@pytest.mark.parametrize("room", [None, 0])
def test_a_range_that_is_cut_may_grow_if_there_is_room(first, end, frontier, sizes, room):
    before, during, after = sizes
    state = state_with(first, end)
    assert AckView(state).unpersisted_record_bytes == before
    record_bytes_max = None if room is None else during + room
    taken = state.begin_persist(up_to=Position(LEDGER, frontier), record_bytes_max=record_bytes_max)
    assert (len(taken.new), AckView(state).unpersisted_record_bytes) == (frontier + 1 - first, during)
    state._check()
    state.end_persist(taken)
    assert (AckView(state).unpersisted_record_bytes, AckView(state).held_back_count) == (after, end - frontier - 1)
    state._check()


@pytest.mark.parametrize(("first", "end", "frontier", "sizes"), CUT_OVER_A_BOUNDARY)
def test_a_cut_that_fails_leaves_what_there_was(first, end, frontier, sizes):
    before, during, _ = sizes
    state = state_with(first, end)
    state.begin_persist(up_to=Position(LEDGER, frontier), record_bytes_max=during)
    state.abandon_persist()
    assert (AckView(state).unpersisted_record_bytes, AckView(state).redelivery_if_crashed) == (before, end - first)
    state._check()


@pytest.mark.parametrize(
    ("first", "end", "frontier", "before", "during"), [(100, 201, 150, 15, 16), (5, 30_001, 20_000, 16, 18)]
)
def test_without_room_for_the_longer_number_the_whole_range_goes(first, end, frontier, before, during):
    state = state_with(first, end)
    taken = state.begin_persist(up_to=Position(LEDGER, frontier), record_bytes_max=during - 1)
    assert (len(taken.new), AckView(state).unpersisted_record_bytes, AckView(state).held_back_count) == (
        end - first,
        before,
        0,
    )
    state.end_persist(taken)
    assert AckView(state).unpersisted_record_bytes == 0
    state._check()


def test_a_limit_that_is_passed_already_lets_nothing_grow_and_nothing_durable_go():
    state = state_with(100, 201)
    taken = state.begin_persist(up_to=Position(LEDGER, 150), record_bytes_max=3)
    assert (len(taken.new), AckView(state).unpersisted_record_bytes) == (101, 15)


def test_a_frontier_at_the_end_of_a_range_or_between_two_cuts_none():
    for frontier in (50, 99, 200, 250):
        state = state_with(100, 201)
        state.begin_persist(up_to=Position(LEDGER, frontier), record_bytes_max=15)
        assert AckView(state).held_back_count == (101 if frontier < 100 else 0)
        assert AckView(state).unpersisted_record_bytes == 15


def test_only_one_range_is_cut_and_those_above_stay_young():
    state = state_with(100, 201)
    state.ack(Position(LEDGER, 300))
    assert AckView(state).unpersisted_record_bytes == 15 + 16
    state.begin_persist(up_to=Position(LEDGER, 150), record_bytes_max=31)
    assert (AckView(state).held_back_count, AckView(state).unpersisted_record_bytes) == (1, 31)


def displaced_or_not(record_bytes_max):
    """10 is durable, and 2, which the limit of one range prefers, is acked: 14 bytes each."""
    state = state_with(10, 11)
    state.end_persist(state.begin_persist(limits=DISPLACING))
    assert (AckView(state).unpersisted_record_bytes, state.durable_count) == (0, 1)
    state.ack(Position(LEDGER, 2))
    assert AckView(state).unpersisted_record_bytes == 14
    return state, state.begin_persist(limits=DISPLACING, record_bytes_max=record_bytes_max)


@pytest.mark.parametrize("record_bytes_max", [None, 28, 1_000])
def test_what_is_durable_gives_way_if_there_is_room(record_bytes_max):
    state, taken = displaced_or_not(record_bytes_max)
    # Until it is known which of them is durable, neither counts as such.
    assert ([*taken.new.runs()], AckView(state).unpersisted_record_bytes, state.durable_count) == (
        [(LEDGER, 2, 3)],
        28,
        0,
    )
    assert state.end_persist(taken) == 0
    assert (AckView(state).unpersisted_record_bytes, AckView(state).cut_count, state.durable_count) == (14, 1, 1)
    state._check()


def test_what_gave_way_in_vain_is_not_durable_for_sure():
    state, _ = displaced_or_not(28)
    state.abandon_persist()
    assert (AckView(state).unpersisted_record_bytes, state.durable_count) == (28, 0)
    state._check()


@pytest.mark.parametrize("record_bytes_max", [0, 14, 27])
def test_without_room_what_is_durable_stays(record_bytes_max):
    state, taken = displaced_or_not(record_bytes_max)
    assert (len(taken.new), AckView(state).unpersisted_record_bytes, state.durable_count) == (0, 14, 1)
    state.end_persist(taken)
    assert (AckView(state).unpersisted_record_bytes, AckView(state).cut_count, state.durable_count) == (14, 1, 1)
    state._check()


# The acks of a promotion.


def brute_frontier(ranges, record_bytes_max, mark_delete):
    """Give away the lowest ranges, one after another, until the rest is small enough: the obvious way."""
    sizes = [range_bytes(ledger_id, first, last) for ledger_id, first, last in ranges]
    for given_count in range(len(ranges) + 1):
        if sum(sizes[given_count:]) <= record_bytes_max:
            break
    if not given_count:
        return mark_delete
    ledger_id, _, last = ranges[given_count - 1]
    return Position(ledger_id, last)


BOUNDARIES = [0, 1, 2, 126, 127, 128, 129, 130, 16_383, 16_384, 16_385, 16_386]
ENTRIES = st.one_of(st.sampled_from(BOUNDARIES), st.integers(0, 300))
LENGTHS = st.sampled_from([1, 1, 1, 2, 127, 200])


def check_frontier_leaving(stretches, record_bytes_max):
    state = CursorAckState(LedgerMap.from_counts({3: 10, 5: 20_000, 200: 20_000}))
    for ledger_id, first, length in stretches:
        acked = DeletedRanges()
        acked.add_run(ledger_id, first, first + length)
        state.ack_bitmaps({ledger_id: acked.entries(ledger_id).copy()})
    ranges = [(run.ledger_id, run.first, run.end - 1) for run in state.deleted.runs()]
    found = state.unpersisted.promotable_up_to(record_bytes_max) or state.mark_delete
    assert found == brute_frontier(ranges, record_bytes_max, state.mark_delete)
    taken = state.begin_persist(up_to=found)
    assert AckView(state).unpersisted_record_bytes <= max(record_bytes_max, sum(range_bytes(*each) for each in ranges))
    state.end_persist(taken)
    assert AckView(state).unpersisted_record_bytes <= record_bytes_max


@given(
    stretches=st.lists(st.tuples(st.sampled_from([5, 200]), ENTRIES, LENGTHS), max_size=12),
    record_bytes_max=st.integers(0, 250),
)
def test_the_frontier_that_leaves_so_many_bytes_is_that_of_the_obvious_way(stretches, record_bytes_max):
    check_frontier_leaving(stretches, record_bytes_max)


@pytest.mark.parametrize(
    ("record_bytes_max", "frontier"),
    [
        (1_000, Position(3, -1)),
        (42, Position(3, -1)),
        (41, Position(5, 2)),
        (28, Position(5, 2)),
        (27, Position(5, 4)),
        (0, Position(5, 6)),
    ],
)
def test_the_frontier_is_the_lowest_end_of_a_range_that_is_enough(record_bytes_max, frontier):
    state = CursorAckState(LedgerMap.from_counts({3: 10, 5: 20}))
    for entry in (2, 4, 6):
        state.ack(Position(5, entry))
    assert (state.unpersisted.promotable_up_to(record_bytes_max) or state.mark_delete) == frontier


# A cursor and its disk, in any order of acks, times, persists and failures.

LIMIT = 63  # a range from 100 to 200, of 15 bytes, and three of 16


class HookedStore(MemoryStore):
    """Looks before and after each write to a ledger, and fails it before or after it happens if told so."""

    def __init__(self, disk, look):
        super().__init__(disk)
        self.look, self.fails = look, ""
        real = self.ledgers._append_many

        def append_many(appends):
            self.look()
            if self.fails == "before":
                raise StoreError("it did not happen")
            lasts = real(appends)
            self.look()
            if self.fails == "after":
                raise StoreError("it happened")
            return lasts

        self.ledgers._append_many = append_many


def copy_of(disk):
    copied = MemoryDisk()
    for ledger_id, ledger in disk.ledgers.items():
        copied.ledgers[ledger_id] = type(ledger)(ledger.owner, 0, [*ledger.entries])
    copied.values.update(disk.values)
    copied.next_ledger_id, copied.first_version = disk.next_ledger_id, disk.first_version
    return copied


class RecordBytesMachine(RuleBasedStateMachine, CursorListener):
    """The cursor's number of un-persisted bytes against the bytes that a crash right now would leave on the disk."""

    @initialize(
        format_=st.sampled_from(Format),
        young_s=st.sampled_from([0, 1]),
        range_count_max=st.sampled_from([None, 1, 2]),
        keep=st.sampled_from(Keep),
    )
    def begin(self, format_=Format.NATIVE, young_s=1, range_count_max=None, keep=Keep.LOWEST):
        self.config = CursorConfig(
            format=format_, become_old_ack_record_seconds=young_s, range_count_max=range_count_max, keep=keep,
            metadata_bytes_max=1, ledger_retry_ms=0,
        )  # fmt: skip
        self.disk, self.log, self.now_ms = MemoryDisk(), LedgerMap.from_counts({3: 10, LEDGER: 20_000}), 0
        self.cursor, self.is_certain = None, True
        self.store = HookedStore(self.disk, self.look)
        self.cursor = self.open(self.store)
        self.cursor.add_listener(self)

    def open(self, store):
        return ManagedCursor.open(
            store, topic="t", subscription="s", ledgers=self.log, config=self.config, now_ms=self.now_ms
        )

    def record_bytes_max(self):
        return LIMIT

    def persisted(self, outcome):
        if isinstance(outcome, Exception):
            self.is_certain = False
        elif outcome.route is not PersistTarget.NOTHING:
            self.is_certain = True

    def recount(self):
        """Return the size of the acks that are not on the disk, as another cursor finds it there."""
        durable = self.open(MemoryStore(copy_of(self.disk)))
        left = self.cursor.deleted.copy()
        left.difference_update(durable.deleted)
        left.remove_at_most(max(self.cursor.mark_delete_position, durable.mark_delete_position))
        return left.record_bytes

    def look(self):
        if self.cursor is not None:
            assert self.cursor.view.unpersisted_record_bytes <= LIMIT
            assert not self.is_certain or self.recount() <= self.cursor.view.unpersisted_record_bytes

    @rule(entry=st.one_of(st.sampled_from(BOUNDARIES), st.integers(95, 205)))
    def ack(self, entry):
        position = Position(LEDGER, entry)
        # As the gate has it: one range of its own must fit, or the ack adds nothing.
        cost = min(isolated_range_bytes(*position), self.cursor.view.unpersisted_bytes_added(position))
        if cost <= 0 or self.cursor.view.unpersisted_record_bytes + isolated_range_bytes(*position) <= LIMIT:
            self.cursor.ack(position, now_ms=self.now_ms)

    @rule(first=st.sampled_from([5, 100, 120]), length=st.sampled_from([20, 120]))
    def ack_run(self, first, length):
        if self.cursor.view.unpersisted_record_bytes + 16 <= LIMIT:
            for entry in range(first, first + length):
                self.ack(entry)

    @rule(entry=st.one_of(st.sampled_from(BOUNDARIES), st.integers(95, 205)))
    def deliver(self, entry):
        self.cursor.delivered(Position(LEDGER, entry), now_ms=self.now_ms)

    @rule(step_ms=st.sampled_from([1, 500, 1_500]))
    def wait(self, step_ms):
        self.now_ms += step_ms

    @rule(fails=st.sampled_from(["", "", "", "before", "after"]))
    def persist(self, fails=""):
        self.try_to(lambda: self.cursor.persist(now_ms=self.now_ms), fails)

    @rule(left=st.integers(0, LIMIT), fails=st.sampled_from(["", "", "before", "after"]))
    def promote(self, left, fails=""):
        self.try_to(lambda: self.cursor.promote(left, now_ms=self.now_ms), fails)

    def try_to(self, write, fails):
        self.store.fails = fails
        try:
            write()
        except StoreError:
            assert fails
        self.store.fails = ""

    @invariant()
    def it_is_what_a_crash_would_leave_out_and_within_the_limit(self):
        if self.cursor is None:
            return
        self.cursor._check()
        found = self.cursor.view.unpersisted_record_bytes
        assert found <= LIMIT
        assert not self.is_certain or found == self.recount()


@pytest.mark.slow
class TestRecordBytes(RecordBytesMachine.TestCase):
    pass


def a_cut_at_a_full_limit(machine):
    machine.begin(young_s=1)
    machine.ack_run(100, 101)
    for entry in (300, 302, 304):
        machine.ack(entry)
    assert machine.cursor.view.unpersisted_record_bytes == LIMIT
    return deliver_up_to_150_and_persist(machine)


def a_cut_below_what_stays(machine):
    machine.begin(young_s=1)
    machine.ack_run(100, 101)
    machine.ack(300)
    machine.ack(302)
    return deliver_up_to_150_and_persist(machine)


def deliver_up_to_150_and_persist(machine):
    machine.deliver(150)
    machine.wait(1_500)
    machine.persist()
    machine.it_is_what_a_crash_would_leave_out_and_within_the_limit()
    return machine.cursor.view.unpersisted_record_bytes, machine.cursor.stats().redelivery_young


def a_displacement_at_a_full_limit(machine):
    machine.begin(format_=Format.PULSAR, young_s=0, range_count_max=1)
    machine.ack(150)
    machine.persist()
    for entry in (10, 12, 14, 16):
        machine.ack(entry)
    machine.persist()
    machine.it_is_what_a_crash_would_leave_out_and_within_the_limit()
    return machine.cursor.view.unpersisted_record_bytes, machine.cursor.stats().redelivery_cut


STORIES = [
    # 151 to 200 would take a byte more than 100 to 200, for which there is none: all of it goes.
    (a_cut_at_a_full_limit, (3 * 16, 3)),
    # Here there is room: 151 to 200, 300 and 302 stay, and take more than before.
    (a_cut_below_what_stays, (3 * 16, 52)),
    # 10 would take the place of 150, which then would be 16 bytes beside 56: it stays, the others are cut off.
    (a_displacement_at_a_full_limit, (4 * 14, 4)),
]


@pytest.mark.parametrize(("story", "outcome"), STORIES)
def test_a_story_at_a_full_limit(story, outcome):
    assert story(RecordBytesMachine()) == outcome
