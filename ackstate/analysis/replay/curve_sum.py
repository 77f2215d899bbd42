"""Sums up a curve of redelivery if crashed: mean over time, quantiles, maximum, causes; exact, in arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

if TYPE_CHECKING:
    from ackstate.analysis.replay.acked import Int64s

CAUSES = ("young", "cut_by_ranges", "cut_by_bytes", "cut_by_route")
"""Reasons for acks excluded from a persist; all other acks are not yet flushed."""

SERIES = 1 + len(CAUSES)
"""The number of rows: the total, and its causes."""
Series = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
"""A row for each series, a column for each time."""

_DISTINCT_MAX = 65_536
_INT64_MAX = 2**63 - 1
_PART_MASK = 2**21 - 1
_PART_SHIFTS = (0, 21, 42)


class Points(NamedTuple):
    """A curve in parallel arrays: each value holds from its time on.

    Attributes:
        ts_ms: The times; never falling. The last of several points at one time counts.
        value: Messages that a crash would redeliver.
        is_alive: Whether there is a process that could crash, from this point to the next.
        causes: For each of `CAUSES`, the number of messages due to it; None if all are not yet flushed.
    """

    ts_ms: Int64s
    value: Int64s
    is_alive: np.ndarray[tuple[int], np.dtype[np.bool_]]
    causes: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None = None


class SeriesPoints(NamedTuple):
    """Points of a curve and of its causes.

    Attributes:
        ts_ms: The times; rising.
        values: A row for each of `SERIES`, a column for each time.
    """

    ts_ms: Int64s
    values: Series


def series_of(points: Points, series_count: int = SERIES) -> SeriesPoints:
    """Return points with their causes, at most one per millisecond; 0 while no process is alive.

    Args:
        points: In order.
        series_count: `SERIES`, or 1 for points without causes.
    """
    lasts = np.append(points.ts_ms[1:] != points.ts_ms[:-1], True)[: len(points.ts_ms)]
    values = np.zeros((series_count, len(points.ts_ms)), np.int64)
    values[0] = points.value
    if points.causes is not None and series_count > 1:
        values[1:] = points.causes
    return SeriesPoints(points.ts_ms[lasts], np.where(points.is_alive, values, 0)[:, lasts])


@final
class Histogram:
    """The total duration of each value."""

    def __init__(self) -> None:
        self._parts: list[tuple[Int64s, Int64s]] = []
        self._pending_count = 0

    def add(self, value: Int64s, duration_ms: Int64s) -> None:
        """Add values weighted by duration; zero durations are ignored."""
        lasting = duration_ms > 0
        if lasting.any():
            part = combined(value[lasting], duration_ms[lasting])
            self._parts.append(part)
            self._pending_count += len(part[0])
        if self._pending_count > _DISTINCT_MAX:
            self._parts = [self.columns()]
            # If most values are distinct, combining again at once would gain nothing.
            self._pending_count = 0

    @property
    def is_large(self) -> bool:
        """Whether it should be written out and restarted."""
        return bool(self._parts) and len(self._parts[0][0]) > _DISTINCT_MAX

    def columns(self) -> tuple[Int64s, Int64s]:
        """Return each value once, rising, and its duration in ms."""
        if len(self._parts) == 1:
            return self._parts[0]
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return combined(*(np.concatenate(columns) for columns in zip(*self._parts, strict=True)))


@final
class CurveSum:
    """The sums of one curve, whose points come in order."""

    def __init__(self) -> None:
        self.histogram = Histogram()
        self.peak = 0
        self.peak_ts_ms: int | None = None
        self.cause_sums = [0] * len(CAUSES)
        self._last: Points | None = None

    @property
    def latest(self) -> int:
        """The value after the last point; 0 without a point, or without a live process."""
        return int(self._last.value[0]) if self._last is not None and self._last.is_alive[0] else 0

    def add(self, points: Points) -> None:
        """Add the next points."""
        if not len(points.ts_ms):
            return
        joined = points if self._last is None else _joined(self._last, points)
        self._weigh(joined)
        self._last = Points(
            points.ts_ms[-1:], points.value[-1:], points.is_alive[-1:],
            None if points.causes is None else points.causes[:, -1:],
        )  # fmt: skip

    def end(self, ts_ms: int) -> None:
        """Extend the last point to a time."""
        if self._last is not None:
            last = self._last
            self.add(last._replace(ts_ms=np.array([max(ts_ms, int(last.ts_ms[0]))])))

    def note_peak(self, values: Int64s, ts_ms: Int64s) -> None:
        """Update the peak from values that may hold for less than a millisecond."""
        if len(values):
            at = int(np.argmax(values))
            if self.peak_ts_ms is None or values[at] > self.peak:
                self.peak, self.peak_ts_ms = int(values[at]), int(ts_ms[at])

    def _weigh(self, points: Points) -> None:
        duration_ms = np.where(points.is_alive[:-1], np.diff(points.ts_ms), 0)
        self.histogram.add(points.value[:-1], duration_ms)
        if points.causes is not None:
            sums = [weight_of(cause, duration_ms) for cause in points.causes[:, :-1]]
            self.cause_sums = [int(before) + more for before, more in zip(self.cause_sums, sums, strict=True)]


def combined(value: Int64s, duration_ms: Int64s) -> tuple[Int64s, Int64s]:
    """Return each value once, rising, with the sum of its durations."""
    if not len(value):
        return value, duration_ms
    low, high = int(value.min()), int(value.max())
    if high - low <= 4 * len(value) + 1024:
        # Most curves stay in a narrow band, where counting is much faster than sorting; doubles hold sums of ms
        # exactly.
        sums = np.bincount(value - low, weights=duration_ms, minlength=high - low + 1).astype(np.int64)
        held = np.flatnonzero(sums)
        return held + low, sums[held]
    order = np.argsort(value, kind="stable")
    ordered = value[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    return ordered[begins], np.add.reduceat(duration_ms[order], begins)


def weight_of(value: Int64s, duration_ms: Int64s) -> int:
    """Return the sum of values, none negative, times their durations, which may exceed 64 bits."""
    if int(value.max(initial=0)) * int(duration_ms.sum()) <= _INT64_MAX:
        return int(value @ duration_ms)
    # Each part of 21 bits times a duration of up to a century takes less than 63 bits, as does the sum of them all.
    parts = (((value >> shift) & _PART_MASK) @ duration_ms for shift in _PART_SHIFTS)
    return sum(int(part) << shift for part, shift in zip(parts, _PART_SHIFTS, strict=True))


def quantile(value: Int64s, duration_ms: Int64s, share: float) -> int | None:
    """Return the least of some rising values that is not exceeded for a share of the time; None if no time passed."""
    if not len(value):
        return None
    passed = np.cumsum(duration_ms)
    # In whole numbers, because a double cannot represent a share of a long time exactly.
    needed = -(-int(passed[-1]) * round(share * 1000) // 1000)
    return int(value[int(np.searchsorted(passed, max(needed, 1)))])


def _joined(last: Points, points: Points) -> Points:
    causes = None
    if points.causes is not None or last.causes is not None:
        none = np.zeros((len(CAUSES), 1), np.int64)
        before = none if last.causes is None else last.causes
        after = np.repeat(none, len(points.ts_ms), axis=1) if points.causes is None else points.causes
        causes = np.concatenate((before, after), axis=1)
    return Points(
        np.concatenate((last.ts_ms, points.ts_ms)),
        np.concatenate((last.value, points.value)),
        np.concatenate((last.is_alive, points.is_alive)),
        causes,
    )
