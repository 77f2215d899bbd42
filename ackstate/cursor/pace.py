"""Limits how often a cursor persists, and says which of its acks are too young for it."""

from __future__ import annotations

from fractions import Fraction
from typing import final

from ackstate.checks import integer
from ackstate.cursor.state import EVERYTHING
from ackstate.delivery_ruler import DeliveryRuler
from ackstate.position import Position

_SECOND_MS = 1000


@final
class MarkDeleteRateLimiter:
    """Grants permits at a rate, at once or not at all; saves up those of one idle second, and gives one on credit.

    In a window of w ms it grants at most rate * (w / 1000 + 1) + 1.

    >>> limiter = MarkDeleteRateLimiter(1, now_ms=0)
    >>> [limiter.try_acquire(now_ms) for now_ms in (0, 999, 1000, 5000, 5000, 5000)]
    [True, False, True, True, True, False]
    """

    # If the clock goes back by up to a second, nothing extra is granted. A debt of a permit and more than a second is
    # from a clock that went back further: it is forgiven, and the count begins again from there.
    # A rate is the decimal that it is written as, and no time is ever rounded; Guava rounds each wait down to a
    # microsecond. Where a permit takes whole milliseconds the two decide alike, until Guava's roundings add up to a
    # millisecond.
    # Source: ``RateLimiter`` of Guava (``SmoothBursty`` with ``maxBurstSeconds`` 1), by which Pulsar's
    # ``ManagedCursorImpl`` limits writes. Its two fields are the one here: as long as permits are stored, the next
    # ticket is free at once.

    def __init__(self, permits_per_second: float, *, now_ms: int) -> None:
        rate = _exact_rate(permits_per_second)
        # The unit of time in which everything is whole: this many make a millisecond, and a permit takes _period.
        self._units_per_ms = rate.numerator
        self._period = rate.denominator * _SECOND_MS
        self._saved_max = self._units_per_ms * _SECOND_MS
        # When all that was granted is paid for. The time since then, up to a second, is saved.
        self._paid_at = integer("now_ms", now_ms) * self._units_per_ms

    def can_acquire(self, now_ms: int) -> bool:
        """Return whether `try_acquire` would grant a permit now; it changes nothing."""
        return not self._refuses(integer("now_ms", now_ms) * self._units_per_ms)

    def try_acquire(self, now_ms: int) -> bool:
        """Take a permit if there is one now, and return whether there was one; a refusal costs nothing."""
        now = integer("now_ms", now_ms) * self._units_per_ms
        if self._refuses(now):
            return False
        # At most now: a greater debt is from a clock that went back.
        self._paid_at = min(max(self._paid_at, now - self._saved_max), now) + self._period
        return True

    @property
    def next_permit_ms(self) -> int:
        """The first time at which there is a permit, by a clock that does not go back."""
        return -(-self._paid_at // self._units_per_ms)

    def _refuses(self, now: int) -> bool:
        return 0 < self._paid_at - now <= self._period + self._saved_max


def _exact_rate(permits_per_second: float) -> Fraction:
    if not isinstance(permits_per_second, int | float):
        raise TypeError(f"permits_per_second must be a number, got {permits_per_second!r}")
    if not 0 < permits_per_second < float("inf"):
        raise ValueError(f"permits_per_second must be above 0 and finite, got {permits_per_second!r}")
    return Fraction(str(permits_per_second))


_NOTHING_DELIVERED = Position(0, -1)


@final
class YoungAge:
    """Separates young acks from old ones, by the time since their messages were certainly delivered."""

    def __init__(self, seconds: int) -> None:
        self.age_ms = seconds * 1000
        self.is_on = seconds > 0
        self.ruler = DeliveryRuler()  # the times of deliveries

    def delivered(self, position: Position, *, now_ms: int) -> None:
        """Note that everything up to a position was sent by now."""
        if self.is_on:
            self._follow_clock(now_ms)
            self.ruler.record(position, now_ms)

    def persistable_up_to(self, *, now_ms: int) -> Position:
        """Return the position up to which acks are old enough to be persisted."""
        if not self.is_on:
            return EVERYTHING
        self._follow_clock(now_ms)
        return self.ruler.old_up_to(self.age_ms, now_ms) or _NOTHING_DELIVERED

    def clear(self) -> None:
        """Forget all deliveries, as after a reset of the cursor."""
        self.ruler.clear()

    def _follow_clock(self, now_ms: int) -> None:
        """Set the ruler back if the clock went back by more than the age."""
        # Messages sent so far are then old after an age; else they would be young until the clock is where it was.
        times, _ = self.ruler.marks()
        if times and times[-1] - now_ms > self.age_ms:
            self.ruler.set_back(times[-1] - now_ms)
