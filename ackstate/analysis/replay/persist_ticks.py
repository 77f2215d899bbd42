"""Computes when a policy persists, as `PersistTrigger` decides, without trying every tick."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.cursor.persist.rate_limiter import MarkDeleteRateLimiter

if TYPE_CHECKING:
    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.policy import Policy

# The longest time to a permit, at the lowest rate that a decimal of 17 digits can express.
_PERMIT_MS_MAX = 2**62


@final
class PersistTicks:
    """The relevant ticks of one open cursor: those at which something may be persisted.

    A tick comes after all events of its millisecond. Times passed to the methods never fall.

    Args:
        policy: Its flush interval, rate limit and ticks.
        opened_ms: When the cursor was opened: its interval and its limiter start then.
    """

    def __init__(self, policy: Policy, *, opened_ms: int) -> None:
        config = policy.cursor
        self.tick_ms = policy.tick_ms
        self._flush_ms = config.flush_interval_ms
        self._limiter: MarkDeleteRateLimiter | None = None
        if config.mark_delete_rate_limit > 0:
            self._limiter = MarkDeleteRateLimiter(config.mark_delete_rate_limit, now_ms=opened_ms)
        self._flush_at = self.tick_at(opened_ms + self._flush_ms)
        self._permit_at = opened_ms  # or later than the last persist
        # The first ticks after new acks, rising; the first of them may be over. Invariant: all acks before the first
        # tick are persisted. Acks between it and the others were refused by the limiter, failed to be written, or wait
        # for the flush.
        self._waiting: list[int] = []

    @property
    def flush_at(self) -> int:
        """The next tick at which the flush interval is over."""
        return self._flush_at

    def tick_at(self, ts_ms: int) -> int:
        """Return the first tick at or after a time."""
        return -(-ts_ms // self.tick_ms) * self.tick_ms

    def acked(self, ts_ms: Int64s) -> None:
        """Record the times of new acks; rising, not below earlier ones."""
        if not len(ts_ms):
            return
        ticks = -(-ts_ms // self.tick_ms) * self.tick_ms
        ticks = ticks[np.flatnonzero(np.diff(ticks, prepend=ticks[0] - 1))]
        begin = int(bool(self._waiting) and self._waiting[-1] == ticks[0])
        self._waiting += ticks[begin:].tolist()

    def acked_at(self, ts_ms: int) -> None:
        """Record the time of one new ack, as `acked` does."""
        tick = self.tick_at(ts_ms)
        if not self._waiting or self._waiting[-1] != tick:
            self._waiting.append(tick)

    @property
    def quiet_until(self) -> int:
        """The last tick before which nothing will be due, for any acks."""
        if self._limiter is None:
            return self._flush_at
        return min(self._flush_at, self.tick_at(self._permit_at))

    def next_due(self) -> int | None:
        """Return the next tick at which the cursor persists the acks so far; None if none is pending."""
        if not self._waiting:
            return None
        due = max(self._waiting[0], self._flush_at)
        if self._limiter is not None:
            at = bisect_left(self._waiting, self._permit_at)
            if at < len(self._waiting):
                due = min(due, self._waiting[at])
        return due

    def persisted(self, at_ms: int) -> None:
        """Record a persist at a tick: it considered all acks until then."""
        del self._waiting[: bisect_right(self._waiting, at_ms)]
        self._flush_at = self.tick_at(max(at_ms + self._flush_ms, at_ms + 1))
        self._take_permit(at_ms)

    def settled(self, at_ms: int) -> None:
        """Record that all acks so far were considered, or dropped, between ticks."""
        self._waiting.clear()
        self._flush_at = self.tick_at(at_ms + self._flush_ms)

    def failed(self, at_ms: int) -> None:
        """Record a persist that could not be written: its acks wait for the flush, or for later acks.

        The limiter grants nothing twice: it is consulted again when there are more acks.
        """
        tried = bisect_right(self._waiting, at_ms)
        self._waiting[:tried] = [at_ms][:tried]
        self._flush_at = max(self._flush_at, at_ms + self.tick_ms)
        self._take_permit(at_ms)

    def _take_permit(self, at_ms: int) -> None:
        if self._limiter is not None:
            self._limiter.try_acquire(at_ms)
            times = range(at_ms + 1, _PERMIT_MS_MAX)
            self._permit_at = times[bisect_left(times, True, key=self._limiter.can_acquire)]
