"""Limits how often a cursor writes its mark-delete position."""

from __future__ import annotations

from fractions import Fraction
from typing import final

from ackstate.integers import integer

_SECOND_MS = 1000


@final
class MarkDeleteRateLimiter:
    """Grants a number of permits a second, saves up those of one idle second, and gives one on credit.

    A permit is granted at once or not at all. It is paid for afterwards: the first of a new limiter costs no waiting,
    and after an idle second at a rate of 1 there are two at once, one saved and one on credit.

    >>> limiter = MarkDeleteRateLimiter(1, now_ms=0)
    >>> [limiter.try_acquire(now_ms) for now_ms in (0, 999, 1000, 5000, 5000, 5000)]
    [True, False, True, True, True, False]

    In a window of w ms it grants at most rate * (w / 1000 + 1) + 1 permits.

    **Clock.** Milliseconds of any clock, negative or not. If it goes back by up to a second, nothing extra is granted.
    A debt of a permit and more than a second is from a clock that went back further: it is forgiven, one permit is
    granted at once, and the count begins again from there.

    **Exact.** A rate is the decimal that it is written as (0.1 is a tenth), and no time is ever rounded. Guava counts
    in doubles and rounds each wait down to a microsecond, so that it may grant a permit up to 1 us earlier for each one
    before it. Where a permit takes whole milliseconds, as at 0.1, 1, 10 or 1000 a second, the two decide alike, until
    Guava's roundings add up to a millisecond.

    Source: ``RateLimiter.create(permitsPerSecond)`` and ``tryAcquire()`` of Guava (``SmoothBursty`` with
    ``maxBurstSeconds`` 1), by which Pulsar's ``ManagedCursorImpl`` limits writes. Its two fields
    ``nextFreeTicketMicros`` and ``storedPermits`` say the same as the one here: as long as permits are stored, the next
    ticket is free at once.

    Args:
        permits_per_second: Above 0 and finite; Pulsar's ``managedLedgerDefaultMarkDeleteRateLimit``, for which 0 or
            less means no limiter.
        now_ms: The present; nothing is saved up yet.

    Raises:
        ValueError: The rate is not above 0 and finite.
        TypeError: The rate is not a number, or the time not an integer.
    """

    def __init__(self, permits_per_second: float, *, now_ms: int) -> None:
        rate = _exact_rate(permits_per_second)
        # The unit of time in which everything is whole: this many make a millisecond, and a permit takes _period.
        self._units_per_ms = rate.numerator
        self._period = rate.denominator * _SECOND_MS
        self._saved_max = self._units_per_ms * _SECOND_MS
        # When all that was granted is paid for. The time since then, up to a second, is saved.
        self._paid_at = integer("now_ms", now_ms) * self._units_per_ms

    def can_acquire(self, now_ms: int) -> bool:
        """Return whether `try_acquire` would grant a permit now; it changes nothing.

        Raises:
            TypeError: The time is not an integer.
        """
        return not self._refuses(integer("now_ms", now_ms) * self._units_per_ms)

    def try_acquire(self, now_ms: int) -> bool:
        """Take a permit if there is one now, and return whether there was one; a refusal costs nothing.

        Raises:
            TypeError: The time is not an integer.
        """
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
