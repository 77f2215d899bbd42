"""`DeliveryRuler` against the list of everything that was ever recorded: never too young, never back, hardly late."""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import Position
from ackstate.delivery_ruler import DeliveryRuler

AGES_MS = [0, 1, 2, 3, 7, 8, 20, 49, 50, 64, 100, 500, 1_000, 4_095, 4_096, 30_000, 1_000_000]


def exact_frontier(records, age_ms, *, now_ms):
    sent = bisect_right(records, now_ms - age_ms, key=itemgetter(0))
    return records[sent - 1][1] if sent else None


def at_or_above(position, other):
    return other is None or (position is not None and position >= other)


class DeliveryRulerMachine(RuleBasedStateMachine):
    @initialize(
        marks_max=st.sampled_from([128, 150, 192, 256]), start=st.sampled_from([0, -(10**6), 2**63 - 10**6, 12_345])
    )
    def begin(self, marks_max, start):
        self.marks_max = marks_max
        self.ruler = DeliveryRuler(marks_max=marks_max)
        self.records = []  # (time, position), rising in both
        self.times = set()
        self.now_ms = start
        self.next_position = Position(3, 0)
        self.answers = {}

    def record(self, position):
        self.ruler.record(position, self.now_ms)
        if self.records and position <= self.records[-1][1]:
            return
        time = max(self.now_ms, self.records[-1][0]) if self.records else self.now_ms
        self.records.append((time, position))
        self.times.add(time)

    @rule(count=st.integers(1, 150), step_ms=st.sampled_from([0, 1, 1, 1, 2, 3, 8, 100]))
    def dispatch(self, count, step_ms):
        for _ in range(count):
            self.now_ms += step_ms
            self.record(self.next_position)
            ledger_id, entry_id = self.next_position
            self.next_position = Position(ledger_id, entry_id + 1)

    @rule()
    def roll_the_ledger(self):
        self.next_position = Position(self.next_position.ledger_id + 2, 0)

    @rule(data=st.data())
    def redeliver(self, data):
        if self.records:
            self.record(data.draw(st.sampled_from(self.records))[1])

    @rule(ms=st.sampled_from([1, 7, 100, 5_000, 10**6]))
    def wait(self, ms):
        self.now_ms += ms

    @rule(ms=st.sampled_from([1, 40, 1_000]))
    def set_the_clock_back(self, ms):
        self.now_ms -= ms
        self.answers.clear()

    @rule(ms=st.sampled_from([0, 2**30, 2**40]))
    def set_the_clock_and_the_ruler_back(self, ms):
        """By whole cells, so that thinning goes on as it would have."""
        self.ruler.set_back(ms)
        self.now_ms -= ms
        self.records = [(time - ms, position) for time, position in self.records]
        self.times = {time - ms for time in self.times}

    @rule()
    def seek(self):
        self.ruler.clear()
        self.records.clear()
        self.times.clear()
        self.answers.clear()
        self.next_position = Position(3, 0)

    @rule(age_ms=st.sampled_from(AGES_MS))
    def ask_with_an_earlier_clock(self, age_ms):
        now_ms = self.now_ms - 50
        old_up_to = self.ruler.old_up_to(age_ms, now_ms)
        assert old_up_to is None or (old_up_to in [p for time, p in self.records if time <= now_ms - age_ms])

    @invariant()
    def answers_are_never_too_young_never_back_and_hardly_late(self):
        clock_is_behind = bool(self.records) and self.now_ms < self.records[-1][0]
        cells = self.marks_max // 64
        for age_ms in AGES_MS:
            old_up_to = self.ruler.old_up_to(age_ms, self.now_ms)
            exact = exact_frontier(self.records, age_ms, now_ms=self.now_ms)
            assert at_or_above(exact, old_up_to), "too young"
            assert at_or_above(old_up_to, self.answers.get(age_ms)), "went back"
            self.answers[age_ms] = old_up_to
            if len(self.times) <= self.marks_max:
                assert old_up_to == exact, "not exact, although nothing was dropped"
            if not clock_is_behind:
                late = exact_frontier(self.records, age_ms * cells // (cells - 1) + 1, now_ms=self.now_ms)
                assert at_or_above(old_up_to, late), "late"

    @invariant()
    def is_bounded_and_in_order(self):
        assert self.ruler.mark_count <= self.marks_max
        self.ruler._check()


TestDeliveryRulerModel = pytest.mark.slow(DeliveryRulerMachine.TestCase)


@pytest.mark.parametrize(("marks_max", "ages_end"), [(128, 2**37), (256, 2**46)])
def test_ages_within_the_range_are_hardly_late_when_the_oldest_marks_are_dropped(marks_max, ages_end):
    """Marks thicker the newer they are, so that every cell has some, back to far beyond the range."""
    ruler = DeliveryRuler(marks_max=marks_max)
    records, cells = [], marks_max // 64
    newest = 2**63 - 12_345
    for entry, age in enumerate(sorted({int(1.05**power) for power in range(1_000)}, reverse=True)):
        records.append((newest - age, Position(3, entry)))
        ruler.record(records[-1][1], records[-1][0])
    assert ruler.old_up_to(2**66, newest) is None  # There were such marks.
    for age_ms in (int(1.3**power) for power in range(200)):
        late_ms = age_ms * cells // (cells - 1) + 1
        if late_ms < ages_end:
            assert at_or_above(ruler.old_up_to(age_ms, newest), exact_frontier(records, late_ms, now_ms=newest))


def tell(*story, marks_max=128, start=0):
    """Execute a story on a machine, with every invariant after each step."""
    machine = DeliveryRulerMachine()
    machine.begin(marks_max, start)
    for act, *arguments in story:
        act(machine, *arguments)
        machine.answers_are_never_too_young_never_back_and_hardly_late()
        machine.is_bounded_and_in_order()


dispatch, wait = DeliveryRulerMachine.dispatch, DeliveryRulerMachine.wait
clock_back, seek = DeliveryRulerMachine.set_the_clock_back, DeliveryRulerMachine.seek
LONG_STORY = [
    (dispatch, count, step_ms)
    for count, step_ms in [
        (50, 3),
        (130, 100),
        *[(130, 2), (130, 1)] * 2,
        (150, 1),
        (130, 1),
        (50, 1),
        (1, 8),
        (150, 3),
    ]
]
SHORT_STORY = [
    (dispatch, count, step_ms) for count, step_ms in [(130, 1), (50, 2), (50, 1), (7, 100), (1, 3), (1, 100)]
]


# Up and down, with pauses, until a cell that is twice as wide hides a mark at the one place where it shows.
WINDING_STORY = [
    (wait, step) if isinstance(step, int) else (dispatch, *step)
    for step in [
        (150, 100), 8, (1, 8), (50, 100), (150, 100), (7, 100), (50, 2), (130, 2), 7, (150, 2), (7, 1), (50, 100),
        (50, 1), (150, 8), (50, 2), (150, 3), (7, 100), 1, (7, 100), (150, 3), 7, (130, 100), (130, 1),
        (1, 3), (7, 8), (130, 8), (7, 1), (7, 8), (1, 1), (130, 100), (1, 2), (7, 100), 5_000, (150, 1),
    ]
]  # fmt: skip


def redeliver_the(machine, number):
    machine.record(machine.records[number][1])


def test_the_stories_are_without_fault():
    tell(*LONG_STORY)
    tell(*SHORT_STORY)
    tell(*WINDING_STORY, marks_max=192, start=12_345)
    tell((dispatch, 100, 3), (clock_back, 1_000), (dispatch, 100, 1), (redeliver_the, 51), (clock_back, 40), (seek,))
