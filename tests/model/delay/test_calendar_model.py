"""The calendar against a heap of tuples, with leaves, front and tables so small that all of it is at work."""

from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import Position
from ackstate.delay import index
from ackstate.delay.index import Calendar
from ackstate.position_set import PositionSet

LIMITS = {
    "_LEAF_COUNT_MAX": 8,
    "_FRONT_COUNT_MAX": 8,
    "_FRONT_COUNT": 4,
    "_FRESH_COUNT": 6,
    "_FRESH_COUNT_PER_LEAF": 1,
    "_BULK_COUNT_MIN": 5,
    "_FEW": 5,
    "_SWEEP_COUNT_MIN": 4,
}

LEDGER_IDS = [1, 5, 2**63 - 1]
ENTRY_IDS = [0, 1, 2**16 - 1, 2**16, 2**32 - 1]
ERA_MS = 2**24

positions = st.builds(Position, st.sampled_from(LEDGER_IDS), st.sampled_from(ENTRY_IDS) | st.integers(0, 9))
# Many at the same time, on both sides of where an era ends, and years ahead.
delays = st.integers(0, 3) | st.sampled_from([9, ERA_MS - 1, ERA_MS, ERA_MS + 1, 2**40, 2**62])
max_counts = st.none() | st.integers(0, 10)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    for name, limit in LIMITS.items():
        monkeypatch.setattr(index, name, limit)


class CalendarMachine(RuleBasedStateMachine):
    @initialize(now_ms=st.sampled_from([0, ERA_MS - 2, 2**41 - 1]))
    def open(self, now_ms):
        self.calendar = Calendar()
        self.expected = []
        self.now_ms = now_ms

    @rule(position=positions, delay=delays)
    def add(self, position, delay):
        self.calendar.add(position, self.now_ms + delay)
        heappush(self.expected, (self.now_ms + delay, *position))

    @rule(ledger_id=st.integers(1, 9), messages=st.lists(st.tuples(st.sampled_from(ENTRY_IDS), delays), max_size=30))
    def add_many(self, ledger_id, messages):
        entry_ids = [entry_id for entry_id, _ in messages]
        times = [self.now_ms + delay for _, delay in messages]
        self.calendar.add_many(ledger_id, np.array(entry_ids, dtype=np.int64), np.array(times, dtype=np.int64))
        for due_ms, entry_id in zip(times, entry_ids, strict=True):
            heappush(self.expected, (due_ms, ledger_id, entry_id))

    @rule(first=st.integers(1, 50), count=st.integers(1, 12), delay=delays)
    def add_to_many_ledgers(self, first, count, delay):
        for ledger_id in range(first, first + count):
            self.add(Position(ledger_id, 7), delay)

    @rule(forward_ms=st.integers(0, 3) | st.sampled_from([ERA_MS, 2**40]), max_count=max_counts)
    def take_until(self, forward_ms, max_count):
        self.now_ms = min(self.now_ms + forward_ms, 2**62)
        due = self.calendar.take_until(self.now_ms, max_count)
        assert [column.dtype for column in due] == [np.int64] * 3
        taken = list(zip(*(column.tolist() for column in due), strict=True))
        assert taken == self.take(max_count)

    @rule(forward_ms=st.integers(0, 3) | st.sampled_from([ERA_MS, 2**40]))
    def take_into(self, forward_ms):
        self.now_ms = min(self.now_ms + forward_ms, 2**62)
        due = PositionSet()
        self.calendar.take_into(due, self.now_ms)
        due._check()
        assert list(due) == sorted({Position(*position) for _, *position in self.take(None)})

    @rule()
    def clear(self):
        self.calendar.clear()
        self.expected.clear()

    def take(self, max_count):
        taken = []
        while self.expected and self.expected[0][0] <= self.now_ms and (max_count is None or len(taken) < max_count):
            taken.append(heappop(self.expected))
        return taken

    @invariant()
    def holds_the_same(self):
        self.calendar._check()
        assert len(self.calendar) == len(self.expected)
        assert self.calendar.first_due_ms == (self.expected[0][0] if self.expected else None)

    def teardown(self):
        if hasattr(self, "calendar"):
            self.now_ms = 2**63 - 1
            self.take_all()

    def take_all(self):
        due = self.calendar.take_until(self.now_ms)
        assert list(zip(*(column.tolist() for column in due), strict=True)) == self.take(None)
        assert len(self.calendar) == 0


TestCalendar = CalendarMachine.TestCase


# Stories: the rules of the machine, in order, with their arguments.
STORIES = {
    "two eras": [("add", Position(1, 0), delay) for delay in (*range(10), ERA_MS, ERA_MS)],
    "an earlier era": [("add", Position(1, 0), delay) for delay in (ERA_MS, 1) for _ in range(6)],
    "a full leaf": [("add_many", 1, [(entry_id, 9) for entry_id in range(first, 30)]) for first in (0, 10, 10)],
    "many ledgers": [*(("add_to_many_ledgers", first, 10, 3) for first in (1, 11, 21)), ("take_until", 3, None)],
    "ties": [("add", Position(1, 0), 3), ("add", Position(5, 0), 3), ("take_until", 3, 1)],
    "one message": [("add", Position(1, 0), 1), ("take_until", 1, None)],
    "a leaf that is half due": [("add_many", 1, [(0, delay) for delay in range(30)]), ("take_until", 10, None)],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_each_story_is_one_of_a_sound_calendar(story):
    machine = CalendarMachine()
    machine.open(0)
    for step, *arguments in story:
        getattr(machine, step)(*arguments)
        machine.holds_the_same()
    machine.teardown()
