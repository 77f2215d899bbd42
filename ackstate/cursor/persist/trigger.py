"""Decides when a cursor's `tick` persists."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.cursor.persist.rate_limiter import MarkDeleteRateLimiter

if TYPE_CHECKING:
    from ackstate.cursor.config import CursorConfig
    from ackstate.cursor.state.ack_state import CursorAckState


_PAUSE_MS = 10


@final
class PersistTrigger:
    """The flush interval and the rate limit of one cursor. Only `ticked` and `persisted` have side effects.

    Args:
        state: Has the numbers of the accepted and of the durable changes.
        config: The interval and the rate.
        now_ms: The present.
    """

    def __init__(self, state: CursorAckState, config: CursorConfig, *, now_ms: int) -> None:
        self._state = state
        self._flush_interval_ms = config.flush_interval_ms
        self._limiter: MarkDeleteRateLimiter | None = None
        if config.mark_delete_rate_limit > 0:
            self._limiter = MarkDeleteRateLimiter(config.mark_delete_rate_limit, now_ms=now_ms)
        # The number that the limiter decided on last: the next decision waits until more was accepted.
        self._decided_number = 0
        self._last_persist_ms = self._last_tick_ms = now_ms

    def is_interval_over(self, *, now_ms: int) -> bool:
        """Return whether the last persist is at least a flush interval ago."""
        # A clock that went back may have gone back by hours: then the interval counts as over.
        return not 0 <= now_ms - self._last_persist_ms < self._flush_interval_ms

    def has_permit(self, *, now_ms: int) -> bool:
        """Return whether something was accepted since the last tick, and the rate limit allows to persist it now."""
        return self._limiter is not None and self._is_new() and self._limiter.can_acquire(now_ms)

    def ticked(self, *, is_due: bool, now_ms: int) -> None:
        """Take a permit, if there is one, for a persist that is due or for changes accepted since the last tick."""
        self._last_tick_ms = now_ms
        if self._limiter is not None and (is_due or self._is_new()):
            self._decided_number = self._state.accepted_number
            self._limiter.try_acquire(now_ms)

    def next_tick_ms(self) -> int:
        """Return when a persist may be due next, if no other reads the clock.

        Not before the interval is over since the last tick either, so that a persist that failed, or that had only
        young acks, is not tried again at once. Without an interval, that is 10 ms.
        """
        interval_ms = self._flush_interval_ms
        next_ms = max(self._last_persist_ms + interval_ms, self._last_tick_ms + max(interval_ms, _PAUSE_MS))
        if self._limiter is not None and self._is_new():
            return min(next_ms, self._limiter.next_permit_ms)
        return next_ms

    def persisted(self, *, now_ms: int) -> None:
        """Restart the flush interval."""
        self._last_persist_ms = now_ms

    def _is_new(self) -> bool:
        return self._state.accepted_number > max(self._decided_number, self._state.durable_number)
