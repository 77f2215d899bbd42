"""`DeliveryRuler` against the list of everything that was ever recorded: never too young, never back, hardly late."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
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


def cell(self, time):
    """Return the width of the cell of a mark, in bits, and its number among those of that width."""
    width_bits = max(((self._times[-1] - time) // self._cells_per_doubling).bit_length() - 1, 0)
    return width_bits, time >> width_bits


def thin_by(cell_of, keep):
    """Return a thinning that keeps one mark of each cell, as `cell_of` tells them apart."""

    def thin(self):
        cells = [cell_of(self, time) for time in self._times]
        borders = [i + 1 for i, (one, other) in enumerate(pairwise(cells)) if one != other]
        kept = [keep(part) for part in pairwise([0, *borders, len(cells)])][-(self._marks_max * 7 // 8) :]
        self._times = [self._times[i] for i in kept]
        self._positions = [self._positions[i] for i in kept]

    return thin


def last_of(part):
    return part[1] - 1


def first_of(part):
    return part[0]


def anchored_at_the_newest(self, time):
    width_bits = max(((self._times[-1] - time) // self._cells_per_doubling).bit_length() - 1, 0)
    return width_bits, (self._times[-1] - time) >> width_bits


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


def assert_caught_by(*story, saying=None, **begin):
    with pytest.raises(AssertionError, match=saying):
        tell(*story, **begin)


def test_the_planted_thinnings_differ_from_the_real_one_by_their_bug_only():
    ruler, other = DeliveryRuler(), DeliveryRuler()
    other._thin = thin_by(cell, last_of).__get__(other)
    for entry in range(3_000):
        for each in (ruler, other):
            each.record(Position(3, entry), entry**2)
    assert ruler._times == other._times


def test_the_stories_are_without_fault():
    tell(*LONG_STORY)
    tell(*SHORT_STORY)
    tell(*WINDING_STORY, marks_max=192, start=12_345)
    tell((dispatch, 100, 3), (clock_back, 1_000), (dispatch, 100, 1), (redeliver_the, 51), (clock_back, 40), (seek,))


def test_model_catches_cells_counted_back_from_the_newest_mark(monkeypatch):
    monkeypatch.setattr(DeliveryRuler, "_thin", thin_by(anchored_at_the_newest, last_of))
    assert_caught_by(*LONG_STORY, saying="late")


def test_model_catches_an_older_mark_that_stays_for_its_cell(monkeypatch):
    monkeypatch.setattr(DeliveryRuler, "_thin", thin_by(cell, first_of))
    assert_caught_by(*SHORT_STORY, saying="late")


def test_model_catches_cells_twice_as_wide(monkeypatch):
    thin = thin_by(lambda self, time: twice_as_wide(cell(self, time), time), last_of)
    monkeypatch.setattr(DeliveryRuler, "_thin", thin)
    assert_caught_by(*WINDING_STORY, marks_max=192, start=12_345, saying="late")


def twice_as_wide(cell, time):
    return cell[0] + 1, time >> (cell[0] + 1)


def test_model_catches_a_thinning_that_drops_the_oldest_only(monkeypatch):
    monkeypatch.setattr(DeliveryRuler, "_thin", thin_by(lambda self, time: time, last_of))
    assert_caught_by((dispatch, 150, 100), (dispatch, 150, 8), saying="late")


def test_model_catches_marks_without_a_bound(monkeypatch):
    monkeypatch.setattr(DeliveryRuler, "_thin", lambda self: None)
    assert_caught_by((dispatch, 150, 2))


def test_model_catches_a_clock_that_takes_the_marks_back(monkeypatch):
    record = DeliveryRuler.record

    def record_as_told(self, position, now_ms):
        if self._times and now_ms < self._times[-1] and position > self._positions[-1]:
            self._times[-1] = max(now_ms, *self._times[-2:-1], now_ms)
        record(self, position, now_ms)

    monkeypatch.setattr(DeliveryRuler, "record", record_as_told)
    assert_caught_by((dispatch, 100, 8), (clock_back, 1_000), (dispatch, 100, 1))


def test_model_catches_a_redelivery_that_makes_a_mark_younger(monkeypatch):
    record = DeliveryRuler.record

    def record_all(self, position, now_ms):
        if self._times and position <= self._positions[-1]:
            self._times[-1] = max(now_ms, self._times[-1])
        record(self, position, now_ms)

    monkeypatch.setattr(DeliveryRuler, "record", record_all)
    assert_caught_by((dispatch, 20, 3), (wait, 100), (redeliver_the, 11), (clock_back, 40), saying="not exact")


def test_model_catches_answers_that_are_forgotten(monkeypatch):
    monkeypatch.setattr(DeliveryRuler, "_keep_answer", lambda self, age_ms, instant, position: None)
    assert_caught_by((dispatch, 20, 2), (dispatch, 100, 100), (dispatch, 20, 1), saying="went back")


@pytest.mark.parametrize(("off_by_ms", "saying"), [(-1, "not exact"), (1, "too young")])
def test_model_catches_an_age_that_is_off_by_one(monkeypatch, off_by_ms, saying):
    old_up_to = DeliveryRuler.old_up_to
    monkeypatch.setattr(
        DeliveryRuler, "old_up_to", lambda self, age_ms, now_ms: old_up_to(self, age_ms, now_ms + off_by_ms)
    )
    assert_caught_by((dispatch, 100, 3), saying=saying)


def test_model_catches_a_seek_that_remembers(monkeypatch):
    monkeypatch.setattr(DeliveryRuler, "clear", lambda self: None)
    assert_caught_by((dispatch, 1, 2), (seek,), saying="too young")
