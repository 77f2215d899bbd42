"""Checks the times of a trace, and guesses the unit of a time outside the bounds.

Times are ms since 1970, from 2000 to 2100; or all times of a trace are ms on its own clock that starts at 0. That clock
ends before any number of seconds from 2000 on, so that seconds, microseconds and nanoseconds are never accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
    from ackstate.analysis.trace.chunks import Int64s, Mask

_SECOND_MS = 1_000
_YEAR_2000_S, _YEAR_2100_S = 946_684_800, 4_102_444_800
WALL_CLOCK_MS = range(_YEAR_2000_S * _SECOND_MS, _YEAR_2100_S * _SECOND_MS)
"""From the start of 2000 to the start of 2100."""
OWN_CLOCK_MS = range(_YEAR_2000_S)
"""The trace's own clock: almost eleven days."""
RULE = "ms since 1970, from 2000 to 2100, or below 946684800 for all events of a trace"


@final
class TraceClock:
    """The clock of one trace, chosen by its first valid time."""

    def __init__(self) -> None:
        self._clock: range | None = None

    def judge(self, ts_ms: Int64s) -> Mask:
        """Return which of the next times are outside this clock."""
        on_wall, on_own = (_within(ts_ms, clock) for clock in (WALL_CLOCK_MS, OWN_CLOCK_MS))
        known = np.flatnonzero(on_wall | on_own)
        if self._clock is None and len(known):
            self._clock = WALL_CLOCK_MS if on_wall[known[0]] else OWN_CLOCK_MS
        right = on_own if self._clock is OWN_CLOCK_MS else on_wall
        return np.asarray(~right, np.bool_)

    def wrong(self, ts_ms: int) -> str:
        """Describe a time that `judge` refused, and its probable unit."""
        return f"ts_ms {ts_ms}, {_hint(ts_ms)}"


def _within(ts_ms: Int64s, clock: range) -> Mask:
    return np.asarray((ts_ms >= clock.start) & (ts_ms < clock.stop), np.bool_)


def _hint(ts_ms: int) -> str:
    units = (("seconds", 1, _SECOND_MS), ("microseconds", 1_000, 1), ("nanoseconds", 1_000_000, 1))
    for unit, divisor, factor in units:
        if ts_ms * factor // divisor in WALL_CLOCK_MS:
            return f"which looks like {unit}: write {RULE}"
    if ts_ms in WALL_CLOCK_MS or ts_ms in OWN_CLOCK_MS:
        return f"which has another clock than the first event: write {RULE}"
    return f"write {RULE}"
