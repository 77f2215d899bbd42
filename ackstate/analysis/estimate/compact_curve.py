"""A curve of bounded size: for each slice of time it keeps the peak and the end, both exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.curve_sum import Series

SLICES_MAX = 500
"""A report plots at most two points in each of this many slices of time."""
OWN_SLICES_MAX = 250
"""Slices in the curve of a single subscription."""


@final
class ThinnedCurve:
    """Thins a curve out as it grows, in slices whose width is a power of two.

    The result depends on the curve and the width alone, not on how the curve was cut when it was added.

    Args:
        begin_ms: When the first slice begins; no point is earlier.
        end_ms: No point is later.
        slices_max: Most slices; each keeps at most two points.
    """

    def __init__(self, begin_ms: int, end_ms: int, *, slices_max: int) -> None:
        self._begin_ms = begin_ms
        self._width_ms = 1
        while (end_ms - begin_ms) // self._width_ms >= slices_max:
            self._width_ms *= 2
        # All points are thinned except the last, which a later point at the same time may replace.
        self._ts_ms: Int64s = np.empty(0, np.int64)
        self._values: Series | None = None

    @property
    def width_ms(self) -> int:
        """The width of a slice: a power of two."""
        return self._width_ms

    def add(self, ts_ms: Int64s, values: Series) -> None:
        """Add the next points.

        Args:
            ts_ms: Their times; never falling. The last of several points at one time counts, even across calls.
            values: A row for each series, the first of which defines the peak, and a column for each time.
        """
        if not len(ts_ms):
            return
        known = len(self._ts_ms) - int(len(self._ts_ms) > 0 and self._ts_ms[-1] == ts_ms[0])
        if self._values is not None:
            ts_ms, values = np.concatenate((self._ts_ms, ts_ms)), np.concatenate((self._values, values), axis=1)
        at = np.append(ts_ms[1:] != ts_ms[:-1], True)
        changes = np.any(np.diff(values[:, at], prepend=0, axis=1) != 0, axis=0)
        # Thinned points may repeat values, and are kept.
        changes = changes | (np.arange(len(changes)) < known)
        ts_ms, values = ts_ms[at][changes], values[:, at][:, changes]
        if len(ts_ms):
            kept = np.append(self._kept(ts_ms[:-1], values[:, :-1]), len(ts_ms) - 1)
            self._ts_ms, self._values = ts_ms[kept], values[:, kept]

    def points(self, series_count: int) -> tuple[Int64s, Series]:
        """Return the points in order: times, and the values from then on; none if it never rose."""
        if self._values is None:
            return self._ts_ms, np.empty((series_count, 0), np.int64)
        kept = self._kept(self._ts_ms, self._values)
        return self._ts_ms[kept], self._values[:, kept]

    def _kept(self, ts_ms: Int64s, values: Series) -> Int64s:
        """Return the points that are the first peak or the end of their slice."""
        slices = (ts_ms - self._begin_ms) // self._width_ms
        begins = np.flatnonzero(np.diff(slices, prepend=-1))
        ends = np.append(begins[1:], len(slices))[: len(begins)] - 1
        return np.union1d(np.lexsort((-values[0], slices))[begins], ends)
