"""How curves change, cut into slices of time, added up and strung together to a few points: of each slice two.

What comes back is one number, its causes are others: all go the same way, and the first says where a peak is.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import pyarrow as pa

from ackstate.analysis.redelivery.arrow_rows import array_at, lists_of
from ackstate.analysis.redelivery.curve_sum import CAUSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ackstate.analysis.redelivery.acked import Int64s
    from ackstate.analysis.redelivery.curve_sum import Points
    from ackstate.analysis.redelivery.slices import Slices

    Key = tuple[str, str]
    # The numbers' series, row by row.
    Series = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

SERIES = 1 + len(CAUSES)
"""The number itself, and its parts."""
SLICES_MAX = 500
"""A report plots at most two points in each of so many slices of time."""
CRASHES_MAX = 200
"""It marks so many crashes."""
TOTAL = ("", "")
"""The key of all subscriptions together."""
CHANGES = pa.schema([
    ("policy", pa.int32()), ("slice", pa.int32()), ("topic", pa.string()), ("subscription", pa.string()),
    ("ts_ms", pa.list_(pa.int64())), ("delta", pa.list_(pa.int64())),
])  # fmt: skip


class SeriesPoints(NamedTuple):
    """Points of a curve and of its causes.

    Attributes:
        ts_ms: When; rising.
        values: A row for each of `SERIES`, a column for each time.
    """

    ts_ms: Int64s
    values: Series


def series_of(points: Points) -> SeriesPoints:
    """Return points with their causes, at most one a millisecond; where no process is alive nothing comes back."""
    lasts = np.append(points.ts_ms[1:] != points.ts_ms[:-1], True)[: len(points.ts_ms)]
    values = np.zeros((SERIES, len(points.ts_ms)), np.int64)
    values[0] = points.value
    if points.causes is not None:
        values[1:] = points.causes
    return SeriesPoints(points.ts_ms[lasts], np.where(points.is_alive, values, 0)[:, lasts])


@final
class ChangeWriter:
    """Cuts one curve into the changes of slices.

    Args:
        slices: Which.
        standing: The numbers that stand already, as a column.
    """

    def __init__(self, slices: Slices, standing: Series) -> None:
        self._slices = slices
        self._before = standing

    def changes(self, points: SeriesPoints) -> Iterator[tuple[int, Int64s, Series]]:
        """Yield the slice, when the numbers change in it, and each of them by how much."""
        if not len(points.ts_ms):
            return
        delta = np.diff(points.values, prepend=self._before, axis=1)
        self._before = points.values[:, -1:]
        at = delta.any(axis=0)
        ts_ms, delta = points.ts_ms[at], delta[:, at]
        numbers = (ts_ms - self._slices.begin_ms) // self._slices.width_ms
        bounds = [*np.flatnonzero(np.diff(numbers, prepend=-1)).tolist(), len(numbers)]
        for low, high in pairwise(bounds):
            yield int(numbers[low]), ts_ms[low:high], delta[:, low:high]


def sum_changes(batches: Iterable[pa.RecordBatch], *, wanted: frozenset[Key]) -> Iterator[pa.RecordBatch]:
    """Add up the changes of each slice: of all, and of each wanted subscription. A row has its peak and its end."""
    for (policy, number), of_slice in groupby(_rows(batches), key=lambda row: row[:2]):
        everything: list[tuple[Int64s, Series]] = []
        for key, of_one in groupby(of_slice, key=lambda row: row[2:4]):
            changes = [(row[4], row[5].reshape(SERIES, -1)) for row in of_one]
            everything += changes
            if key in wanted:
                yield batch_of([(policy, number, *key, *points) for points in _peak_and_end(changes)])
        yield batch_of([(policy, number, *TOTAL, *points) for points in _peak_and_end(everything)])


def _peak_and_end(changes: Sequence[tuple[Int64s, Series]]) -> Iterator[tuple[Int64s, Series]]:
    """Yield, if anything changes, when the first of the numbers is highest and when the last change is, and how much.

    Both numbers are what has changed until then.
    """
    ts_ms = np.concatenate([times for times, _ in changes])
    delta = np.concatenate([each for _, each in changes], axis=1)
    times, at = np.unique(ts_ms, return_inverse=True)
    sums = np.zeros((SERIES, len(times)), np.int64)
    for series in range(SERIES):
        np.add.at(sums[series], at, delta[series])
    # What one subscription loses and another gains changes nothing.
    changed = sums.any(axis=0)
    if changed.any():
        times, level = times[changed], sums[:, changed].cumsum(axis=1)
        peak = int(np.argmax(level[0]))
        yield times[[peak, -1]], level[:, [peak, -1]]


def string_together(batches: Iterable[pa.RecordBatch], *, per_point: int) -> Iterator[pa.RecordBatch]:
    """Turn what has changed since the begin of each slice into the numbers themselves; of many slices make one."""
    for key, of_line in groupby(_rows(batches), key=lambda row: (row[0], *row[2:4])):
        level = np.zeros((SERIES, 1), np.int64)
        for point, of_point in groupby(of_line, key=lambda row: row[1] // per_point):
            times, values = np.empty(0, np.int64), np.empty((SERIES, 0), np.int64)
            for row in of_point:
                reached = level + row[5].reshape(SERIES, 2)
                times, values = np.append(times, row[4]), np.concatenate((values, reached), axis=1)
                peak = int(np.argmax(values[0]))
                times, values = times[[peak, -1]], values[:, [peak, -1]]
                level = reached[:, 1:]
            yield batch_of([(key[0], point, *key[1:], times, values)])


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, int, str, str, Int64s, Int64s]]:
    for batch in batches:
        for index in range(batch.num_rows):
            plain = [batch[name][index].as_py() for name in ("policy", "slice", "topic", "subscription")]
            yield (*plain, array_at(batch["ts_ms"], index), array_at(batch["delta"], index))


def batch_of(rows: Sequence[tuple[int, int, str, str, Int64s, Int64s]]) -> pa.RecordBatch:
    """Return changes as a batch of `CHANGES`."""
    *plain, ts_ms, delta = zip(*rows, strict=True) if rows else ((),) * len(CHANGES)
    columns = [pa.array(column, field.type) for column, field in zip(plain, CHANGES, strict=False)]
    return pa.RecordBatch.from_arrays([*columns, lists_of(ts_ms), lists_of(delta)], schema=CHANGES)
