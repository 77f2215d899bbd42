"""`AgeChooser` against exact shares of the raw list of acks, and of that list faded as its docstring says."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ackstate.cursor.state.auto_age
from ackstate.cursor.state.auto_age import AUTO, AgeChooser, AutoAge

FADING = 8_192
# And how many acks are enough for each.
POLICIES = {AUTO: 100, AutoAge(0.07, 2, 40): 15, AutoAge(0.5, 3, 3): 2, AutoAge(0.001, 1, 86_400): 1_000}

latencies = st.one_of(
    st.integers(-5, 400_000),
    st.sampled_from([0, 999, 1_000, 1_001, 1_999, 2_000, 3_000, 40_000, 299_999, 300_000, 10**15]),
    st.builds(lambda power: int(1.3**power), st.integers(20, 55)),
)
policies = st.sampled_from([*POLICIES])


def late_share(acks, age_ms):
    """The share of (latency, weight) at or above an age."""
    return Fraction(sum(weight for latency, weight in acks if latency >= age_ms)) / sum(weight for _, weight in acks)


def assert_is_the_choice(choice, acks, *, slack=0):
    """It leaves at most the share late, an age more than a twentieth lower would not, within the slack of a share."""
    policy = choice.policy
    share_max = Fraction(str(policy.late_share_max))
    lowest, highest = 1000 * policy.seconds_min, 1000 * policy.seconds_max
    assert lowest <= choice.age_ms <= highest, "out of bounds"
    if choice.age_ms < highest:
        assert late_share(acks, choice.age_ms) <= share_max + slack, "too low"
    if choice.age_ms > lowest:
        lower = max(math.ceil(Fraction(choice.age_ms, 21) * 20) - 1, lowest)
        assert late_share(acks, lower) > share_max - slack, "too high"
    assert abs(Fraction(choice.late_share) - late_share(acks, choice.age_ms)) <= slack + Fraction(1, 2**50), (
        "the share is wrong"
    )


@given(policy=policies, acks=st.lists(st.tuples(latencies, st.integers(1, 40)), min_size=1, max_size=150))
def test_the_choice_is_right_for_the_raw_list(policy, acks):
    chooser = AgeChooser(policy)
    for latency, count in acks:
        chooser.observe(latency, count)
    choice, count = chooser.choice, sum(count for _, count in acks)
    assert choice.sample_count == count
    if count < POLICIES[policy]:
        assert choice.age_ms == 1000 * policy.seconds_min
        assert choice.late_share == float(late_share(acks, choice.age_ms))
    else:
        assert_is_the_choice(choice, acks)


@pytest.mark.slow
@given(policy=policies, runs=st.lists(st.tuples(latencies, st.integers(0, 3 * FADING)), max_size=4))
def test_many_at_once_are_as_many_one_by_one(policy, runs):
    at_once, one_by_one = AgeChooser(policy), AgeChooser(policy)
    for latency, count in runs:
        at_once.observe(latency, count)
        for _ in range(count):
            one_by_one.observe(latency)
    assert at_once.choice == one_by_one.choice
    assert at_once._weights == one_by_one._weights


class AgeChooserMachine(RuleBasedStateMachine):
    @initialize(policy=policies)
    def begin(self, policy):
        self.policy = policy
        self.chooser = AgeChooser(policy)
        self.runs = []  # (number of the first ack, of the one after the last, latency)
        self.count = 0

    @rule(latency=latencies, count=st.integers(0, 200))
    def some_acks(self, latency, count):
        self.chooser.observe(latency, count)
        self.runs.append((self.count, self.count + count, latency))
        self.count += count

    @rule(latency=latencies, count=st.sampled_from([FADING - 1, FADING, FADING + 1, 5_000, 40_000]))
    def many_acks(self, latency, count):
        self.some_acks(latency, count)

    @rule(latency=latencies, percent=st.integers(0, 5))
    def acks_of_which_some_are_late(self, latency, percent):
        self.some_acks(5, 100 * (100 - percent))
        self.some_acks(latency, 100 * percent)

    def faded(self):
        """The remaining weight of each ack: a half for each 8,192nd since, itself included."""
        weights = {}
        for first, end, latency in self.runs:
            for block in range(first // FADING, -(-end // FADING)):
                in_block = min(end, (block + 1) * FADING) - max(first, block * FADING)
                halvings = self.count // FADING - block
                weights[latency] = weights.get(latency, 0) + Fraction(in_block, 2**halvings)
        return list(weights.items())

    @invariant()
    def the_choice_is_right(self):
        self.chooser._check()
        choice, acks = self.chooser.choice, self.faded()
        assert choice is self.chooser.choice, "chosen again"
        weight = sum(weight for _, weight in acks)
        assert abs(choice.sample_count - weight) <= 1, "the count is wrong"
        if self.count < POLICIES[self.policy]:
            assert choice.age_ms == 1000 * self.policy.seconds_min, "not low before enough was seen"
        else:
            # Of every bound's weight a fading may lose half a unit, of which an ack has 2**15.
            assert_is_the_choice(choice, acks, slack=Fraction(300, 2**15) / weight)


TestAgeChooserModel = pytest.mark.slow(AgeChooserMachine.TestCase)


def test_until_enough_was_seen_the_age_is_the_least():
    chooser = AgeChooser(AUTO)
    assert (chooser.choice.age_ms, chooser.choice.late_share, chooser.choice.sample_count) == (1_000, 0.0, 0)
    chooser.observe(50_000, 99)
    assert (chooser.choice.age_ms, chooser.choice.late_share, chooser.choice.sample_count) == (1_000, 1.0, 99)
    chooser.observe(50_000)
    assert 50_000 < chooser.choice.age_ms <= 52_500


@pytest.mark.parametrize(
    ("share", "count"), [(0.01, 100), (0.5, 2), (0.999, 2), (0.001, 1_000), (0.0001, 2_048), (5e-324, 2_048)]
)
def test_how_many_are_enough(share, count):
    policy = AutoAge(late_share_max=share)
    assert policy.sample_count_min == count
    chooser = AgeChooser(policy)
    chooser.observe(1_000_000, FADING)
    assert chooser.choice.sample_count == FADING // 2
    assert chooser.choice.age_ms == 300_000


def test_an_ack_at_the_age_exactly_is_late():
    """Its message is old then, as for the ruler."""
    chooser = AgeChooser(AUTO)
    chooser.observe(999, 1_000)
    assert (chooser.choice.age_ms, chooser.choice.late_share) == (1_000, 0.0)
    chooser.observe(1_000, 1_000)
    assert (chooser.choice.age_ms, chooser.choice.late_share) == (1_050, 0.0)


def test_the_share_is_the_decimal_that_was_written():
    """29 % of 100 acks are 29, although 0.29 * 100 is 28.999999999999996 in doubles."""
    chooser = AgeChooser(AutoAge(late_share_max=0.29))
    chooser.observe(10, 71)
    chooser.observe(5_000, 29)
    assert chooser.choice.age_ms == 1_000
    chooser.observe(5_000)
    assert chooser.choice.age_ms > 5_000


def choice_of(*observed, policy=AUTO):
    chooser = AgeChooser(policy)
    for latency, count in observed:
        chooser.observe(latency, count)
    return chooser.choice


def test_the_reason_is_a_sentence_with_its_numbers():
    assert choice_of().reason == "no ack seen yet: held at seconds_min"
    assert choice_of((9, 57)).reason == "only 57 of 100 acks seen yet: held at seconds_min"
    assert choice_of((2_200, 4_960), (60_000, 40)).reason == "99.2 % of 5,000 acks came in under 2.28 s"
    assert choice_of((9, 999), (60_000, 1)).reason == "held at seconds_min: 99.9 % of 1,000 acks came in under 1 s"
    assert choice_of((9, 3_000)).reason == "held at seconds_min: 100 % of 3,000 acks came in under 1 s"
    assert choice_of((9, 920), (10**6, 80)).reason == (
        "held at seconds_max: only 92 % of 1,000 acks came in under 300 s"
    )
    days = AutoAge(seconds_min=2_000_000, seconds_max=2_000_000)
    assert choice_of((9, 7_999), (10**12, 1), policy=days).reason == (
        "held at seconds_min: 99.99 % of 8,000 acks came in under 2,000,000 s"
    )
    assert choice_of((9, 8_100), (10**12, 1), policy=AutoAge(0.001)).reason.startswith("held at seconds_min: 99.99 %")


def test_faster_consumers_lower_the_age_and_slower_ones_raise_it_sooner():
    chooser = AgeChooser(AUTO)
    chooser.observe(100_000, 20 * FADING)
    assert chooser.choice.age_ms > 100_000
    chooser.observe(10, 8 * FADING)
    assert chooser.choice.age_ms == 1_000
    chooser.observe(10, 20 * FADING)
    chooser.observe(100_000, 165)  # A hundredth of 16,384, and one more.
    assert chooser.choice.age_ms > 100_000


@pytest.mark.parametrize("before", [1, 5_000, FADING, 2 * FADING - 1, 50 * FADING + 7])
def test_what_came_before_fades_as_promised(before):
    for fadings in range(1, 20):
        chooser = AgeChooser(AutoAge(late_share_max=0.5))
        chooser.observe(10**6, before)
        chooser.observe(0, fadings * FADING)
        assert chooser.choice.late_share <= 2 ** (1 - fadings)


def test_the_bounds_are_a_twentieth_apart_and_few():
    chooser = AgeChooser(AUTO)
    assert len(chooser._weights) <= 125
    assert chooser._bounds_ms[0] == 1_000
    assert chooser._bounds_ms[-1] == 300_000
    for seconds_max in (1, 2, 10**9):
        bounds = AgeChooser(AutoAge(seconds_max=seconds_max))._bounds_ms
        assert all(20 * before < 20 * after <= 21 * before for before, after in pairwise(bounds))


def test_values_are_frozen():
    with pytest.raises(FrozenInstanceError):
        AUTO.seconds_min = 3
    with pytest.raises(FrozenInstanceError):
        AgeChooser(AUTO).choice.age_ms = 3


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"late_share_max": 0}, ValueError, "0"),
        ({"late_share_max": 1.0}, ValueError, "1.0"),
        ({"late_share_max": math.nan}, ValueError, "nan"),
        ({"late_share_max": "0.1"}, TypeError, "'0.1'"),
        ({"seconds_min": 0}, ValueError, "0"),
        ({"seconds_min": 1.5}, TypeError, "1.5"),
        ({"seconds_min": 9, "seconds_max": 8}, ValueError, "at least 9, got 8"),
        ({"seconds_max": None}, TypeError, "None"),
    ],
)
def test_a_bad_policy_is_refused(arguments, error, text):
    with pytest.raises(error, match=f"{[*arguments][-1]}.*{re.escape(text)}"):
        AutoAge(**arguments)


def test_a_refused_observation_changes_nothing():
    chooser = AgeChooser(AUTO)
    chooser.observe(5_000, 200)
    choice = chooser.choice
    for refused, error, text in [
        (lambda: chooser.observe(5, -1), ValueError, "-1"),
        (lambda: chooser.observe(5, 1.5), TypeError, "1.5"),
        (lambda: chooser.observe(0.5), TypeError, "0.5"),
        (lambda: chooser.observe(None), TypeError, "None"),
    ]:
        with pytest.raises(error, match=text):
            refused()
    assert chooser.choice is choice
    assert chooser._choose() == choice


def caught(saying):
    return pytest.raises(AssertionError, match=saying)


def story():
    machine = AgeChooserMachine()
    machine.begin(policy=AUTO)
    for latency, count in [(5, 90), (7_000, 30), (5, 4_000), (90_000, 40), (5, 40_000), (20_000, FADING), (5, 9_000)]:
        machine.some_acks(latency, count)
        machine.the_choice_is_right()


def test_the_story_is_true_without_a_bug():
    story()


def test_model_catches_weights_that_never_fade(monkeypatch):
    monkeypatch.setattr(AgeChooser, "_fade", lambda self: setattr(self, "_until_fading", FADING))
    monkeypatch.setattr(AgeChooser, "_check", lambda self: None)
    with caught("the count is wrong"):
        story()


def test_model_catches_a_fading_that_forgets_all(monkeypatch):
    fade = AgeChooser._fade

    def forget(self):
        fade(self)
        self._weights = [0] * len(self._weights)

    monkeypatch.setattr(AgeChooser, "_fade", forget)
    with caught("the count is wrong"):
        story()


def test_model_catches_a_choice_that_is_not_renewed(monkeypatch):
    monkeypatch.setattr(AgeChooser, "choice", cached_property(AgeChooser._choose))
    AgeChooser.choice.__set_name__(AgeChooser, "choice")
    with caught("the count is wrong"):
        story()


def test_model_catches_bounds_twice_as_wide(monkeypatch):
    monkeypatch.setattr(ackstate.cursor.state.auto_age, "_BOUND_PARTS", 10)
    with caught("too high"):
        story()


@pytest.mark.parametrize(("bound_shift", "saying"), [(-1, "too low"), (1, "not low before enough was seen")])
def test_model_catches_a_bound_that_is_one_off(monkeypatch, bound_shift, saying):
    choose = AgeChooser._choose

    def shifted(self):
        choice = choose(self)
        at = self._bounds_ms.index(choice.age_ms) + bound_shift
        age_ms = self._bounds_ms[min(max(at, 0), len(self._bounds_ms) - 1)]
        return replace(choice, age_ms=age_ms)

    monkeypatch.setattr(AgeChooser, "_choose", shifted)
    with caught(saying):
        story()


def test_model_catches_a_late_share_of_the_acks_that_are_not_late(monkeypatch):
    choose = AgeChooser._choose
    monkeypatch.setattr(
        AgeChooser, "_choose", lambda self: replace(choose(self), late_share=1 - choose(self).late_share)
    )
    with caught("the share is wrong"):
        story()


def test_model_catches_a_latency_that_belongs_to_the_bound_below(monkeypatch):
    bisect_right = ackstate.cursor.state.auto_age.bisect_right
    monkeypatch.setattr(
        ackstate.cursor.state.auto_age, "bisect_right", lambda row, number: bisect_right(row, number - 1)
    )
    machine = AgeChooserMachine()
    machine.begin(policy=AUTO)
    machine.some_acks(1_000, 1_000)
    with caught("too low"):
        machine.the_choice_is_right()


def test_model_catches_a_choice_made_too_soon(monkeypatch):
    monkeypatch.setattr(AutoAge, "sample_count_min", 1)
    machine = AgeChooserMachine()
    machine.begin(policy=AUTO)
    machine.some_acks(5_000, 2)
    with caught("not low before enough was seen"):
        machine.the_choice_is_right()


def test_model_catches_a_choice_that_is_made_at_every_reading(monkeypatch):
    monkeypatch.setattr(AgeChooser, "choice", property(AgeChooser._choose))
    with caught("chosen again"):
        story()
