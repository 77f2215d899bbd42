"""A curve of bounded size that grows with time: for each slice of time it keeps the peak and the end, both exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.curve_sum import Series
    from ackstate.analysis.replay.state_fields import Fields

SLICES_MAX = 500
"""A report plots at most two points in each of this many slices of time."""
OWN_SLICES_MAX = 250
"""Slices in the curve of a single subscription, for any number of days."""
_WIDTH_MS_MAX = 2**60


@final
class ThinnedCurve:
    """Extends a curve, in slices that double in width whenever there are too many.

    The result depends on the curve and the width alone, not on how the curve was cut when it was added.

    Args:
        begin_ms: When the first slice begins; no point is earlier.
        slices_max: Most slices; each keeps at most two points.
    """

    def __init__(self, begin_ms: int, *, slices_max: int) -> None:
        self._begin_ms = begin_ms
        self._slices_max = slices_max
        self._width_ms = 1
        # All points are thinned except the last, which a later point at the same time may replace.
        self._ts_ms: Int64s = np.empty(0, np.int64)
        self._values: Series | None = None

    @property
    def width_ms(self) -> int:
        """The width of a slice: a power of two."""
        return self._width_ms

    def latest(self, series_count: int) -> Series:
        """Return the values after the last point, as a column; 0 if there is no point."""
        return np.zeros((series_count, 1), np.int64) if self._values is None else self._values[:, -1:]

    def widen_until(self, end_ms: int) -> None:
        """Widen the slices until they reach a time, inclusive."""
        while (end_ms - self._begin_ms) // self._width_ms >= self._slices_max:
            self._width_ms *= 2

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
        self._keep(ts_ms[at][changes], values[:, at][:, changes])

    def add_thinned(self, ts_ms: Int64s, values: Series) -> None:
        """Add later points that were already thinned, in slices that divide these."""
        if len(ts_ms):
            before = self._values
            self._keep(
                np.concatenate((self._ts_ms, ts_ms)),
                values if before is None else np.concatenate((before, values), axis=1),
            )

    def _keep(self, ts_ms: Int64s, values: Series) -> None:
        self._ts_ms, self._values = ts_ms, values if len(ts_ms) else None
        if len(ts_ms):
            self.widen_until(int(ts_ms[-1]))
            kept = np.append(self._kept(ts_ms[:-1], values[:, :-1]), len(ts_ms) - 1)
            self._ts_ms, self._values = ts_ms[kept], values[:, kept]

    @classmethod
    def until(cls, begin_ms: int, end_ms: int, *, slices_max: int) -> ThinnedCurve:
        """Return a curve without points whose slices reach a time, inclusive."""
        curve = cls(begin_ms, slices_max=slices_max)
        curve.widen_until(end_ms)
        return curve

    def points(self, series_count: int) -> tuple[Int64s, Series]:
        """Return the points in order: times, and the values from then on; none if it never rose."""
        if self._values is None:
            return self._ts_ms, np.empty((series_count, 0), np.int64)
        kept = self._kept(self._ts_ms, self._values)
        return self._ts_ms[kept], self._values[:, kept]

    def to_record(self) -> dict[str, Any]:
        """Return the curve's fields as a state stores them."""
        return {
            "begin_ms": self._begin_ms, "width_ms": self._width_ms, "ts_ms": self._ts_ms.tolist(),
            "values": [] if self._values is None else self._values.ravel().tolist(),
        }  # fmt: skip

    @classmethod
    def of(cls, fields: Fields, *, slices_max: int, series_count: int) -> ThinnedCurve:
        """Return the curve of the fields that `to_record` returned."""
        curve = cls(fields.signed("begin_ms"), slices_max=slices_max)
        curve._width_ms = fields.integer("width_ms", least=1, most=_WIDTH_MS_MAX)
        if curve._width_ms & (curve._width_ms - 1):
            fields.refuse("width_ms", "a power of two", curve._width_ms)
        curve._ts_ms = fields.array("ts_ms")
        if (curve._ts_ms[1:] < curve._ts_ms[:-1]).any():
            fields.refuse("ts_ms", "times that never fall", curve._ts_ms.tolist())
        values = fields.array("values", count=series_count * len(curve._ts_ms))
        curve._values = values.reshape(series_count, -1) if len(values) else None
        return curve

    def _kept(self, ts_ms: Int64s, values: Series) -> Int64s:
        """Return the points that are the first peak or the end of their slice."""
        slices = (ts_ms - self._begin_ms) // self._width_ms
        begins = np.flatnonzero(np.diff(slices, prepend=-1))
        ends = np.append(begins[1:], len(slices))[: len(begins)] - 1
        return np.union1d(np.lexsort((-values[0], slices))[begins], ends)
