"""Acks that are not durable have a size, and no persist may make it exceed a limit: not while it runs, nor after.

The range of entries `first` to `last` of a ledger below 128 takes 12 bytes, one to three for each of `first - 1` and
`last`, and ten for the former if `first` is 0. So a range that is cut in two where a number gets longer may leave more
than it was.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import CursorConfig, DeletedRanges, Format, LedgerMap, ManagedCursor, MemoryStore, Position, StoreError
from ackstate.cursor import PersistTarget
from ackstate.cursor.results import CursorListener
from ackstate.cursor.state import CursorAckState
from ackstate.cursor.view import AckView
from ackstate.deleted_ranges import isolated_range_bytes, range_bytes
from ackstate.selection import Keep
from ackstate.stores.memory import MemoryDisk
from wrapped_store import copied

LEDGER = 5
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
        durable = self.open(MemoryStore(copied(self.disk)))
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


def a_displacement_at_a_full_limit(machine, entries=(10, 12, 14, 16)):
    machine.begin(format_=Format.PULSAR, young_s=0, range_count_max=1)
    machine.ack(150)
    machine.persist()
    for entry in entries:
        machine.ack(entry)
    machine.persist()
    machine.it_is_what_a_crash_would_leave_out_and_within_the_limit()
    return machine.cursor.view.unpersisted_record_bytes, machine.cursor.stats().redelivery_cut


def a_displacement_that_just_fits(machine):
    return a_displacement_at_a_full_limit(machine, (127, 128, 130, 132))


STORIES = [
    # 151 to 200 would take a byte more than 100 to 200, for which there is none: all of it goes.
    (a_cut_at_a_full_limit, (3 * 16, 3)),
    # Here there is room: 151 to 200, 300 and 302 stay, and take more than before.
    (a_cut_below_what_stays, (3 * 16, 52)),
    # 10 would take the place of 150, which then would be 16 bytes beside 56: it stays, the others are cut off.
    (a_displacement_at_a_full_limit, (4 * 14, 4)),
    # 127 and 128, of 15 bytes, take the place of 150: 16 bytes each for that, 130 and 132 beside them are the limit.
    (a_displacement_that_just_fits, (3 * 16, 3)),
]


@pytest.mark.parametrize(("story", "outcome"), STORIES)
def test_a_story_at_a_full_limit(story, outcome):
    assert story(RecordBytesMachine()) == outcome
