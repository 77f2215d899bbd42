"""The rows passed between the steps of the estimates: parts of curves and of results, in Arrow."""

from __future__ import annotations

from itertools import chain, groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from ackstate.analysis.estimate.slices import CRASHES, CURVE, RESULT, Slices, sum_slices
from ackstate.analysis.replay.curves import CAUSES, SERIES, Costs, Histogram, quantile, weight_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from decimal import Decimal

    from ackstate.analysis.replay.acked import Int64s

SCOPES = ("subscription", "topic", "namespace", "total")
RESULT_KEY = ("policy", "scope", "namespace", "topic", "subscription")
PART = pa.schema([
    ("policy", pa.int32()), ("slice", pa.int32()), ("scope", pa.string()), ("namespace", pa.string()),
    ("topic", pa.string()), ("subscription", pa.string()), ("begin", pa.list_(pa.int64())),
    ("first", pa.list_(pa.int64())), ("second", pa.list_(pa.int64())), ("sums", pa.list_(pa.decimal128(38))),
])  # fmt: skip
CRASHES_MAX = 200
"""An estimate of all subscriptions together lists at most this many crashes."""
CURVE_COUNT_MAX = 6
"""This many subscriptions have a curve of their own: those with most redelivery under the first policy."""
_COUNTS = ("p50", "p90", "p99", "max", "max_ts_ms")
_COSTS = Costs._fields
ESTIMATE = pa.schema([
    *(PART.field(name) for name in RESULT_KEY), ("expected", pa.float64()),
    *((name, pa.int64()) for name in _COUNTS),
    *((name, pa.float64()) for name in ("not_flushed", *CAUSES)),
    *((name, pa.int64()) for name in (*_COSTS, "duration_ms")),
    ("duplicates_per_day", pa.float64()),
    *((name, pa.list_(pa.int64())) for name in ("curve_ms", "curve", "crash_ms", "crashes")),
    ("crash_count", pa.int64()),
])  # fmt: skip
_LISTS = frozenset(("begin", "first", "second"))
# A batch takes up to about 10 MB.
_BATCH_VALUES = 500_000
_BATCH_PARTS = 10_000


class Part(NamedTuple):
    """A row between two steps."""

    policy: int  # Index in the grid
    slice: int  # Number of the slice of time whose changes these are; else `RESULT`, `CURVE` or `CRASHES`
    scope: str  # One of `SCOPES`; the next three name it, empty beyond the scope
    namespace: str  # The first two parts of the topic's name
    topic: str
    subscription: str
    begin: Int64s  # For changes, the values at the start of the slice; else empty
    first: Int64s  # For changes, a curve and crashes, the times; for a result, the values, each once
    # For changes, the differences, row after row, as many rows as `begin` has; for a result, the duration of each
    # value; for a curve, its values, row by row; for crashes as recorded, three numbers each.
    second: Int64s
    # The peak, its time, the sums by cause, maybe beyond 64 bits, and the costs; None in all but one part of a result
    sums: Sequence[int | Decimal | None] | None


def parts_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Part]:
    """Return the parts in batches with the columns of `PART`; the lists share the batches' memory."""
    for batch in batches:
        columns = [_slices(batch[name]) if name in _LISTS else batch[name].to_pylist() for name in PART.names]
        yield from (Part(*row) for row in zip(*columns, strict=True))


def _slices(column: pa.Array) -> Iterator[Int64s]:
    """Return the rows of a list column; they share its memory."""
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return (values[begin:end] for begin, end in pairwise(offsets.tolist()))


def batches_of(parts: Iterable[Part]) -> Iterator[pa.RecordBatch]:
    """Yield batches of many parts, up to a bounded size."""
    waiting: list[Part] = []
    value_count = 0
    for part in parts:
        waiting.append(part)
        value_count += len(part.second)
        if value_count > _BATCH_VALUES or len(waiting) == _BATCH_PARTS:
            yield _batch(waiting)
            waiting, value_count = [], 0
    if waiting:
        yield _batch(waiting)


def _batch(parts: Sequence[Part]) -> pa.RecordBatch:
    columns = [
        _lists_of(values) if field.name in _LISTS else pa.array(values, field.type)
        for field, values in zip(PART, zip(*parts, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PART)


def _lists_of(arrays: Sequence[Int64s]) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays).astype(np.int64, copy=False)))


def add_slices(
    batches: Iterable[pa.RecordBatch], *, slices: Slices, scopes: Sequence[str] = SCOPES
) -> Iterator[pa.RecordBatch]:
    """Add up the curves of each slice; pass results through, and count their costs for all scopes."""
    yield from batches_of(part for part in sum_slices(parts_of(batches), slices) if part.scope in scopes)


def put_together(
    batches: Iterable[pa.RecordBatch], *, duration_ms: int, crashes_per_day: float = 1
) -> Iterator[pa.RecordBatch]:
    """Build an estimate from the parts of each result, sorted by `RESULT_KEY`; the columns are `ESTIMATE`.

    Only `CURVE_COUNT_MAX` of the subscriptions of one call keep their curve.
    """
    rows = [result.row(duration_ms, crashes_per_day) for result in _results(batches)]
    own = [row for row in rows if row["scope"] == SCOPES[0] and row["curve"] is not None]
    for row in sorted(own, key=badness)[CURVE_COUNT_MAX:]:
        row |= {"curve_ms": None, "curve": None}
    if rows:
        yield pa.RecordBatch.from_pylist(rows, ESTIMATE)


def badness(row: Mapping[str, Any]) -> tuple[float, int, str, str]:
    """Return the sort key of subscriptions, most redelivery first."""
    return -(row["expected"] or 0), -row["max"], row["topic"], row["subscription"]


def _results(batches: Iterable[pa.RecordBatch]) -> Iterator[_Result]:
    for _, parts in groupby(parts_of(batches), key=attrgetter(*RESULT_KEY)):
        first = next(parts)
        result = _Result(first)
        for part in chain((first,), parts):
            result.add(part)
        yield result


class _Result:
    """One estimate, from its parts."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._histogram = Histogram()
        self._peak: tuple[int, int] | None = None
        self._sums = [0] * (len(CAUSES) + len(_COSTS))
        self._others: list[Part] = []

    def add(self, part: Part) -> None:
        """Add a part."""
        if part.slice != RESULT:
            self._others.append(part)
            return
        self._histogram.add(part.first, part.second)
        if part.sums is not None:
            peak, peak_ts_ms, *sums = (None if each is None else int(each) for each in part.sums)
            longest_ms = max(self._sums[-1], sums[-1] or 0)
            self._sums = [before + (more or 0) for before, more in zip(self._sums, sums, strict=True)]
            # Subscriptions are blocked at the same time, so their times do not add up.
            self._sums[-1] = longest_ms
            # Without any redelivery there is no time of the peak.
            if peak and peak_ts_ms is not None and (self._peak is None or (-peak, peak_ts_ms) < self._peak):
                self._peak = (-peak, peak_ts_ms)

    def row(self, duration_ms: int, crashes_per_day: float) -> dict[str, Any]:
        """Return the estimate as a row."""
        values, durations = self._histogram.columns()
        # Before the first event nothing could be redelivered.
        self._histogram.add(np.zeros(1, np.int64), np.array([duration_ms - int(durations.sum())]))
        values, durations = self._histogram.columns()
        weight = weight_of(values, durations)
        causes = self._sums[: len(CAUSES)]
        by_cause = dict(zip(("not_flushed", *CAUSES), (weight - sum(causes), *causes), strict=True))
        means = {name: number / duration_ms if duration_ms else None for name, number in by_cause.items()}
        shares = {name: quantile(values, durations, int(name[1:]) / 100) for name in ("p50", "p90", "p99")}
        peak, peak_ts_ms = self._peak or (0, None)
        names = {name: getattr(self._part, name) for name in RESULT_KEY}
        costs = dict(zip(_COSTS, self._sums[len(CAUSES) :], strict=True))
        expected = weight / duration_ms if duration_ms else None
        return {
            **names, "expected": expected, **shares, "max": -peak, "max_ts_ms": peak_ts_ms,
            **means, **costs, "duration_ms": duration_ms,
            "duplicates_per_day": None if expected is None else expected * crashes_per_day,
            **self._curve(), **self._crashes(),
        }  # fmt: skip

    def _curve(self) -> dict[str, Any]:
        """Return the points of the curve in order, if any part has a curve."""
        found = sorted((part for part in self._others if part.slice == CURVE), key=lambda part: int(part.first[0]))
        if not found:
            return {"curve_ms": None, "curve": None}
        values = np.concatenate([part.second.reshape(SERIES, -1) for part in found], axis=1)
        return {"curve_ms": np.concatenate([part.first for part in found]), "curve": values.ravel()}

    def _crashes(self) -> dict[str, Any]:
        found = [part for part in self._others if part.slice == CRASHES]
        if not found:
            return {"crash_ms": None, "crashes": None, "crash_count": 0}
        if self._part.scope == SCOPES[0]:
            # A subscription is replayed in one piece.
            (part,) = found
            return {"crash_ms": part.first, "crashes": part.second, "crash_count": len(part.first)}
        times = np.unique(np.concatenate([part.first for part in found]))
        return {"crash_ms": times[:CRASHES_MAX], "crashes": None, "crash_count": len(times)}
