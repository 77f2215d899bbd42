"""`MarkDeleteRateLimiter` against Guava's own two fields in fractions, against Guava in doubles, and by its promise."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ackstate.cursor.persist import MarkDeleteRateLimiter

RATES = [0.1, 0.3, 1, 3, 7.5, 10, 1000, 12_345.678]
WAITS_MS = [0, 1, 1, 99, 100, 133, 134, 333, 334, 999, 1_000, 1_001, 3_333, 10_000, 10**9]


class GuavaInFractions:
    """`SmoothBursty` line by line, in seconds, without rounding; its stopwatch never goes back."""

    def __init__(self, rate, *, now_ms):
        self.interval = 1 / Fraction(str(rate))
        self.max_permits = 1 / self.interval
        self.stored_permits = Fraction(0)
        self.next_free = Fraction(now_ms, 1000)

    def try_acquire(self, now_ms):
        now = Fraction(now_ms, 1000)
        if self.next_free > now:
            return False
        self.stored_permits = min(self.max_permits, self.stored_permits + (now - self.next_free) / self.interval)
        spent = min(Fraction(1), self.stored_permits)
        self.next_free = now + (1 - spent) * self.interval
        self.stored_permits -= spent
        return True


def decisions(limiter, times):
    return [limiter.try_acquire(now_ms) for now_ms in times]


def assert_few_in_every_window(granted_at_ms, rate):
    """Assert the promise for every window that begins and ends with a grant."""
    in_order = sorted(granted_at_ms)
    for first, begin in enumerate(in_order):
        for last in range(first, len(in_order)):
            count, width_ms = last - first + 1, in_order[last] - begin
            assert count <= Fraction(str(rate)) * (Fraction(width_ms, 1000) + 1) + 1, "too many in a window"


class LimiterMachine(RuleBasedStateMachine):
    @initialize(rate=st.sampled_from(RATES), start_ms=st.sampled_from([0, -1_234, 1_759_000_000_123]))
    def begin(self, rate, start_ms):
        self.rate, self.now_ms = rate, start_ms
        self.limiter = MarkDeleteRateLimiter(rate, now_ms=start_ms)
        self.guava = GuavaInFractions(rate, now_ms=start_ms)
        self.granted_at_ms = []

    @rule(passed_ms=st.sampled_from(WAITS_MS), attempts=st.integers(1, 4))
    def wait_and_try(self, passed_ms, attempts):
        self.now_ms += passed_ms
        for _ in range(attempts):
            self.try_once()

    @rule(step_ms=st.integers(1, 40), attempts=st.integers(1, 40))
    def ask_again_and_again(self, step_ms, attempts):
        for _ in range(attempts):
            self.now_ms += step_ms
            self.try_once()

    def try_once(self):
        would = self.limiter.can_acquire(self.now_ms)
        assert would == self.limiter.can_acquire(self.now_ms), "asking changed the answer"
        granted = self.limiter.try_acquire(self.now_ms)
        assert granted == would, "asked and tried differ"
        assert granted == self.guava.try_acquire(self.now_ms), "not as Guava"
        if granted:
            self.granted_at_ms.append(self.now_ms)

    def teardown(self):
        assert_few_in_every_window(getattr(self, "granted_at_ms", [])[-60:], getattr(self, "rate", 1))


TestLimiterModel = pytest.mark.slow(LimiterMachine.TestCase)


@given(rate=st.sampled_from(RATES), times=st.lists(st.integers(-3_000, 3_000), max_size=60))
def test_a_clock_that_goes_back_grants_little_extra_and_soon_recovers(rate, times):
    try_with_a_clock_that_goes_back(rate, times)


def try_with_a_clock_that_goes_back(rate, times):
    limiter = MarkDeleteRateLimiter(rate, now_ms=0)
    recovery_ms, latest_ms, granted_at_ms = math.ceil(1000 / rate) + 1_000, 0, []
    for now_ms in times:
        if now_ms < latest_ms - 1_000:  # That may forgive a debt: later permits are counted from there.
            assert_few_in_every_window(granted_at_ms, rate)
            latest_ms, granted_at_ms = now_ms, []
        if limiter.try_acquire(now_ms):
            granted_at_ms.append(now_ms)
        latest_ms = max(latest_ms, now_ms)
        assert limiter.can_acquire(now_ms + recovery_ms), "a clock that went back broke it"
    assert_few_in_every_window(granted_at_ms, rate)


@pytest.mark.parametrize("rate", [0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf])
def test_a_rate_that_grants_nothing_or_everything_is_refused(rate):
    with pytest.raises(ValueError, match=str(rate)):
        MarkDeleteRateLimiter(rate, now_ms=0)


@pytest.mark.parametrize("rate", [5e-324, 1e-9, 1e300])
def test_the_ends_of_the_doubles_are_rates(rate):
    limiter = MarkDeleteRateLimiter(rate, now_ms=0)
    assert limiter.try_acquire(0)
    assert limiter.can_acquire(1) == (rate > 1)


def test_a_refused_call_changes_nothing():
    limiter = MarkDeleteRateLimiter(1, now_ms=0)
    for refused, text in [
        (lambda: limiter.try_acquire(0.5), "0.5"),
        (lambda: limiter.can_acquire(None), "None"),
        (lambda: MarkDeleteRateLimiter("1", now_ms=0), "'1'"),
        (lambda: MarkDeleteRateLimiter(1, now_ms=1.5), "1.5"),
    ]:
        with pytest.raises(TypeError, match=text):
            refused()
    assert decisions(limiter, [0, 0]) == [True, False]
