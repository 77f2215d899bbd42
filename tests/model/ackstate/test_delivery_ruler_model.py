"""`DeliveryRuler` against the list of everything that was ever recorded: never too young, never back, hardly late."""

from bisect import bisect_right
from operator import itemgetter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import Position
from ackstate.delivery_ruler import MARKS_MAX, DeliveryRuler


def at_or_above(position, other):
    return other is None or (position is not None and position >= other)


class DeliveryRulerMachine(RuleBasedStateMachine):
    @initialize(
        age_ms=st.sampled_from([0, 1, 7, 127, 128, 255, 256, 1_000, 5_000, 30_001, 10**6]),
        start=st.sampled_from([0, -(10**6), 2**63 - 10**6, 12_345]),
    )
    def begin(self, age_ms, start):
        self.age_ms = age_ms
        self.ruler = DeliveryRuler(age_ms)
        self.now_ms = start
        self.next_position = Position(3, 0)
        self.seek()

    def record(self, position):
        self.ruler.record(position, self.now_ms)
        if self.records and position <= self.records[-1][1]:
            return
        time = max(self.now_ms, self.records[-1][0]) if self.records else self.now_ms
        self.records.append((time, position))
        self.times.add(time)

    def exact(self, age_ms):
        sent = bisect_right(self.records, self.now_ms - age_ms, key=itemgetter(0))
        return self.records[sent - 1][1] if sent else None

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
        self.answer = None

    @rule(cells=st.sampled_from([0, 1, 2**20]))
    def set_the_clock_and_the_ruler_back(self, cells):
        """By whole cells, so that thinning goes on as it would have."""
        ms = cells * max(-(-self.age_ms // 128), 1)
        self.ruler.set_back(ms)
        self.now_ms -= ms
        self.records = [(time - ms, position) for time, position in self.records]
        self.times = {time - ms for time in self.times}

    @rule()
    def seek(self):
        self.ruler.clear()
        self.records = []  # (time, position), rising in both
        self.times = set()
        self.answer = None
        self.next_position = Position(3, 0)

    @invariant()
    def answers_are_never_too_young_never_back_and_hardly_late(self):
        found, exact = self.ruler.old_up_to(self.now_ms), self.exact(self.age_ms)
        assert at_or_above(exact, found), "too young"
        assert at_or_above(found, self.answer), "went back"
        if len(self.times) <= MARKS_MAX:
            assert at_or_above(found, exact), "not exact, although nothing was dropped"
        if not self.records or self.now_ms >= self.records[-1][0]:
            assert at_or_above(found, self.exact(self.age_ms + max(-(-self.age_ms // 128), 1))), "late"
        self.answer = found

    @invariant()
    def is_bounded_and_in_order(self):
        self.ruler._check()


TestDeliveryRulerModel = pytest.mark.slow(DeliveryRulerMachine.TestCase)

dispatch, wait = DeliveryRulerMachine.dispatch, DeliveryRulerMachine.wait
clock_back, seek = DeliveryRulerMachine.set_the_clock_back, DeliveryRulerMachine.seek


def redeliver_the(machine, number):
    machine.record(machine.records[number][1])


@pytest.mark.parametrize("age_ms", [0, 1, 100, 255, 256, 1_000, 30_001])
def test_the_stories_are_without_fault(age_ms):
    for start, story in (
        (0, [(dispatch, count, step) for count, step in [(50, 3), (130, 100), (130, 2), (130, 1), (150, 1), (150, 3)]]),
        (12_345, [(dispatch, 130, 1), (wait, 8), (dispatch, 150, 8), (wait, 5_000), (dispatch, 130, 2), (wait, 7)]),
        (0, [(dispatch, 100, 3), (clock_back, 1_000), (dispatch, 100, 1), (redeliver_the, 51), (clock_back, 40)]),
        (-500, [(dispatch, 150, 1), (seek,), (dispatch, 140, 2), (dispatch, 140, 1)]),
    ):
        machine = DeliveryRulerMachine()
        machine.begin(age_ms, start)
        for act, *arguments in story:
            act(machine, *arguments)
            machine.answers_are_never_too_young_never_back_and_hardly_late()
            machine.is_bounded_and_in_order()
