"""Chooses the age at which a message becomes old, so that few acks come later than that."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, final

from ackstate.integers import check_count, integer

if TYPE_CHECKING:
    from collections.abc import Sequence

# Weights are whole numbers: an ack weighs this much at first, and half as much with every fading until it is forgotten.
_WEIGHT_OF_AN_ACK = 2**15
_FADING_COUNT = 8_192
# Of seconds_min and seconds_max, and of everything between, each bound is at most a twentieth above the one before.
_BOUND_PARTS = 20


@dataclass(frozen=True, slots=True)
class AutoAge:
    """Choose the age from observed acks: ``become_old_ack_record_seconds=AUTO``.

    Attributes:
        late_share_max: At most this share of the acks may come when their message is old already; above 0, below 1.
        seconds_min: The least age, and the one chosen before enough acks have come; at least 1.
        seconds_max: The greatest age, for which the share may be passed; at least `seconds_min`.

    Raises:
        ValueError: A number is out of range.
        TypeError: The share is not a number, or the seconds are not whole.
    """

    late_share_max: float = 0.01
    seconds_min: int = 1
    seconds_max: int = 300

    def __post_init__(self) -> None:
        if not isinstance(self.late_share_max, int | float):
            raise TypeError(f"late_share_max must be a number, got {self.late_share_max!r}")
        if not 0 < self.late_share_max < 1:
            raise ValueError(f"late_share_max must be above 0 and below 1, got {self.late_share_max!r}")
        check_count("seconds_min", self.seconds_min, least=1)
        check_count("seconds_max", self.seconds_max, least=self.seconds_min)

    @property
    def sample_count_min(self) -> int:
        """How many acks are enough to choose from: so that one may be late, but at most 2,048."""
        return ceil(min(1 / self.late_share_max, _FADING_COUNT // 4))


AUTO = AutoAge()


@dataclass(frozen=True, slots=True)
class AgeChoice:
    """An age and the observations that it rests on.

    Attributes:
        age_ms: A message is old when it was sent at least this long ago.
        late_share: Share of the observed acks that came at this age or later, when their message was old.
        sample_count: Number of these acks; each counts with its remaining weight.
        policy: The settings of the choice.
    """

    age_ms: int
    late_share: float
    sample_count: int
    policy: AutoAge

    @property
    def reason(self) -> str:
        """Why this age: one sentence with its numbers, for an operator."""
        policy = self.policy
        if not self.sample_count:
            return "no ack seen yet: held at seconds_min"
        if self.sample_count < policy.sample_count_min:
            return f"only {self.sample_count:,} of {policy.sample_count_min:,} acks seen yet: held at seconds_min"
        # 100 % means all of them.
        percent = min(round(100 * (1 - self.late_share), 2), 99.99 if self.late_share else 100)
        seconds = f"{self.age_ms / 1000:,.3f}".rstrip("0").rstrip(".")
        observed = f"{percent:g} % of {self.sample_count:,} acks came in under {seconds} s"
        if self.late_share > policy.late_share_max:
            return f"held at seconds_max: only {observed}"
        if self.age_ms == policy.seconds_min * 1000:
            return f"held at seconds_min: {observed}"
        return observed


@final
class AgeChooser:
    """Chooses the age from how long after its delivery each ack comes.

    >>> chooser = AgeChooser(AutoAge(late_share_max=0.01))
    >>> chooser.observe(1_500, count=990)
    >>> chooser.observe(60_000, count=10)
    >>> chooser.choice.age_ms, chooser.choice.reason
    (1546, '99 % of 1,000 acks came in under 1.546 s')

    The choice is the lowest of some bounds such that the share of acks that came then or later is at most
    `late_share_max`. The lowest bound is `seconds_min`, the highest `seconds_max`, each between at most 5 % above the
    one before; so the age is at most 5 % above the lowest that would do. If none will do it is `seconds_max`.

    **Begins low.** The age decides which acks are held back from being persisted. Too high, it costs redelivery after a
    crash; too low, only bytes. So it is `seconds_min` until `AutoAge.sample_count_min` acks have come.

    **Errs low.** An ack that has not come yet is not in the sample. While consumers become slower, or one is stuck, the
    share of late acks is understated by those that they still hold, and the age is too low until those come: on the
    safe side, at the price of records that are written although a later ack would have made them smaller.

    **Follows.** After every 8,192 acks everything weighs half. Acks before the last n * 8,192 have at most 2**(1 - n)
    of all weight: 0.8 % after 65,536 acks. Slower consumers raise the age much sooner: as soon as their acks are
    `late_share_max` of the weight, which is never that of more than 16,384 acks. There is no clock in
    it: while no ack comes, the age stays.

    About 120 numbers for the default bounds, 14 more for each doubling between them. Not safe for concurrent mutation.

    Args:
        policy: The share and the bounds.
    """

    def __init__(self, policy: AutoAge) -> None:
        self._policy = policy
        self._late_share_max = Fraction(str(policy.late_share_max))
        self._bounds_ms = _bounds(policy.seconds_min * 1000, policy.seconds_max * 1000)
        # Invariant: _weights[i] is of latencies below _bounds_ms[i], but not of the one before; the last, of the rest.
        self._weights = [0] * (len(self._bounds_ms) + 1)
        self._until_fading = _FADING_COUNT
        # None when something was observed since.
        self._choice: AgeChoice | None = None

    @property
    def bounds_ms(self) -> Sequence[int]:
        """The ages that may be chosen, rising; latencies that no bound parts weigh as one."""
        return self._bounds_ms

    @property
    def until_fading(self) -> int:
        """After how many more acks everything weighs half; until then their order does not count."""
        return self._until_fading

    def observe(self, latency_ms: int, count: int = 1) -> None:
        """Note how long after its message was sent an ack came.

        Args:
            latency_ms: By the clock of the ages; negative, after a clock went back, counts as 0.
            count: How many such acks came.

        Raises:
            ValueError: The count is negative.
            TypeError: The latency or the count is not an integer.

        Complexity: O(log bounds), and O(bounds) for every 8,192 acks.
        """
        latency_ms, count = integer("latency_ms", latency_ms), integer("count", count)
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        at = bisect_right(self._bounds_ms, latency_ms)
        self._choice = None
        while count >= self._until_fading:
            self._weights[at] += self._until_fading * _WEIGHT_OF_AN_ACK
            count -= self._until_fading
            self._fade()
        self._weights[at] += count * _WEIGHT_OF_AN_ACK
        self._until_fading -= count

    @property
    def choice(self) -> AgeChoice:
        """The age by the acks observed so far. Complexity: O(1), or O(bounds) after an observation."""
        if self._choice is None:
            self._choice = self._choose()
        return self._choice

    def _choose(self) -> AgeChoice:
        # The weights at or above each bound, the highest bound first; then the weight of all.
        late = list(accumulate(reversed(self._weights)))
        weight = late.pop()
        sample_count = (weight + _WEIGHT_OF_AN_ACK // 2) // _WEIGHT_OF_AN_ACK
        # How many of the bounds, counted from the highest, are above enough of the acks.
        doing = len(late)
        if sample_count >= self._policy.sample_count_min:
            share = self._late_share_max
            doing = max(bisect_right(late, weight * share.numerator // share.denominator), 1)
        late_share = late[doing - 1] / weight if weight else 0.0
        return AgeChoice(self._bounds_ms[-doing], late_share, sample_count, self._policy)

    def _fade(self) -> None:
        self._weights = [weight // 2 for weight in self._weights]
        self._until_fading = _FADING_COUNT

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(bounds)."""
        assert len(self._weights) == len(self._bounds_ms) + 1
        assert min(self._weights) >= 0
        assert sum(self._weights) < 2 * _FADING_COUNT * _WEIGHT_OF_AN_ACK
        assert 0 < self._until_fading <= _FADING_COUNT


def _bounds(lowest_ms: int, highest_ms: int) -> list[int]:
    bounds = [lowest_ms]
    while bounds[-1] < highest_ms:
        bounds.append(min(bounds[-1] + bounds[-1] // _BOUND_PARTS, highest_ms))
    return bounds
