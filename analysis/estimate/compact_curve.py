"""A curve of bounded size that is gone on with: of each slice of time its peak and its end, both exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.curve_sum import Series
    from ackstate.analysis.replay.state_fields import Fields

SLICES_MAX = 500
"""A report plots at most two points in each of so many slices of time."""
OWN_SLICES_MAX = 250
"""Of the curve of a single subscription, whatever the number of days."""
_WIDTH_MS_MAX = 2**60


@final
class ThinnedCurve:
    """Goes on with a curve, in slices that become twice as wide whenever there are too many.

    What is left depends on the curve and the width alone, not on how it was cut when it was added.

    Args:
        begin_ms: When the first slice begins; nothing comes before.
        slices_max: How many slices there may be; in each are at most two points.
    """

    def __init__(self, begin_ms: int, *, slices_max: int) -> None:
        self._begin_ms = begin_ms
        self._slices_max = slices_max
        self._width_ms = 1
        # Thinned but for the last, which may not hold: another may come at its time.
        self._ts_ms: Int64s = np.empty(0, np.int64)
        self._values: Series | None = None

    @property
    def width_ms(self) -> int:
        """How wide a slice is: a power of two."""
        return self._width_ms

    def standing(self, series_count: int) -> Series:
        """Return the numbers that hold after the last point, as a column; 0 before the first."""
        return np.zeros((series_count, 1), np.int64) if self._values is None else self._values[:, -1:]

    def widen_until(self, end_ms: int) -> None:
        """Make the slices as wide as they must be to reach up to a time, included."""
        while (end_ms - self._begin_ms) // self._width_ms >= self._slices_max:
            self._width_ms *= 2

    def add(self, ts_ms: Int64s, values: Series) -> None:
        """Go on with the next points.

        Args:
            ts_ms: When; never falls. Of points at one time the last holds, also over calls.
            values: A row for each number, of which the first counts for the peak, and a column for each time.
        """
        if not len(ts_ms):
            return
        known = len(self._ts_ms) - int(len(self._ts_ms) > 0 and self._ts_ms[-1] == ts_ms[0])
        if self._values is not None:
            ts_ms, values = np.concatenate((self._ts_ms, ts_ms)), np.concatenate((self._values, values), axis=1)
        at = np.append(ts_ms[1:] != ts_ms[:-1], True)
        changes = np.any(np.diff(values[:, at], prepend=0, axis=1) != 0, axis=0)
        # Thinned points may look alike, and stay.
        changes = changes | (np.arange(len(changes)) < known)
        self._keep(ts_ms[at][changes], values[:, at][:, changes])

    def add_thinned(self, ts_ms: Int64s, values: Series) -> None:
        """Go on with points that were thinned in slices which make up these, after all that were added before."""
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
        """Return a curve without points whose slices reach up to a time, included."""
        curve = cls(begin_ms, slices_max=slices_max)
        curve.widen_until(end_ms)
        return curve

    def points(self, series_count: int) -> tuple[Int64s, Series]:
        """Return the curve as points in order: times, and the numbers from then on; none if it never rose."""
        if self._values is None:
            return self._ts_ms, np.empty((series_count, 0), np.int64)
        kept = self._kept(self._ts_ms, self._values)
        return self._ts_ms[kept], self._values[:, kept]

    def to_record(self) -> dict[str, Any]:
        """Return its fields as a state has them."""
        return {
            "begin_ms": self._begin_ms, "width_ms": self._width_ms, "ts_ms": self._ts_ms.tolist(),
            "values": [] if self._values is None else self._values.ravel().tolist(),
        }  # fmt: skip

    @classmethod
    def of(cls, fields: Fields, *, slices_max: int, series_count: int) -> ThinnedCurve:
        """Build from fields that `to_record` returned."""
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
