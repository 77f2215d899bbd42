"""What goes from one step of the estimates to the next: parts of curves and of results, as rows of Arrow."""

from __future__ import annotations

from itertools import chain, groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackstate.analysis.estimate.slices import CRASHES, CURVE, RESULT, Slices, sum_slices
from ackstate.analysis.replay.curve_sum import CAUSES, SERIES, Histogram, quantile, weight_of
from ackstate.analysis.replay.subscription_replay import Costs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.replay.acked import Int64s

SCOPES = ("subscription", "topic", "namespace", "total")
RESULT_KEY = ("policy", "scope", "namespace", "topic", "subscription")
PART = pa.schema([
    ("policy", pa.int32()), ("slice", pa.int32()), ("scope", pa.string()), ("namespace", pa.string()),
    ("topic", pa.string()), ("subscription", pa.string()), ("begin", pa.list_(pa.int64())),
    ("first", pa.list_(pa.int64())), ("second", pa.list_(pa.int64())), ("sums", pa.list_(pa.int64())),
])  # fmt: skip
RUN = pa.schema([*PART, ("state", pa.string())])
"""Of a replay that can be gone on with: parts, and the state of each subscription, whose slice is `STATE`."""
STATE = -4
CRASHES_MAX = 200
"""An estimate of all together names so many crashes."""
CURVE_COUNT_MAX = 6
"""So many subscriptions have a curve of their own: those of which most comes back under the first policy."""
_COUNTS = ("p50", "p90", "p99", "max", "max_ts_ms")
_COSTS = Costs._fields
_CAUSES = slice(2, 2 + len(CAUSES))
_LOW_BITS = 62
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
# A batch takes up to some 10 MB.
_BATCH_VALUES = 500_000
_BATCH_PARTS = 10_000


class Part(NamedTuple):
    """A row between two steps.

    Attributes:
        policy: Index in the grid.
        slice: Of which slice of time these are the changes of a curve; else `RESULT`, `CURVE`, `CRASHES` or `STATE`.
        scope: One of `SCOPES`; what follows names it, empty beyond it.
        namespace: The first two parts of the topic's name.
        topic: The same.
        subscription: The same.
        begin: Of changes, the numbers at the slice's begin; else empty.
        first: Of changes, when, as of a curve and of crashes; of a result, values, each once.
        second: Of changes, by how much, a row of them after the other, for as many as `begin` has; of a result, for how
            long each value held; of a curve, its numbers, row by row; of crashes as recorded, three numbers each.
        sums: As `narrow_sums` returns them; None in all parts of a result but one.
        state: Of a subscription, in `RUN` alone.
    """

    policy: int
    slice: int
    scope: str
    namespace: str
    topic: str
    subscription: str
    begin: Int64s
    first: Int64s
    second: Int64s
    sums: Sequence[int | None] | None
    state: str | None = None


def narrow_sums(sums: Sequence[int | None]) -> list[int | None]:
    """Return sums as a part has them, each in 64 bits.

    Args:
        sums: Peak, when, `CAUSES` in messages times ms, and `Costs`.

    Returns:
        The same, but if one of the causes takes more than 62 bits: then these bits of each, and the others at the end.
    """
    causes = [each or 0 for each in sums[_CAUSES]]
    highs = [each >> _LOW_BITS for each in causes]
    if not any(highs):
        return list(sums)
    lows = [each & (1 << _LOW_BITS) - 1 for each in causes]
    return [*sums[: _CAUSES.start], *lows, *sums[_CAUSES.stop :], *highs]


def whole_sums(sums: Sequence[int | None]) -> list[int | None]:
    """Return what `narrow_sums` was given."""
    end = _CAUSES.stop + len(_COSTS)
    highs = sums[end:] or [0] * len(CAUSES)
    causes = [((high or 0) << _LOW_BITS) + (low or 0) for low, high in zip(sums[_CAUSES], highs, strict=True)]
    return [*sums[: _CAUSES.start], *causes, *sums[_CAUSES.stop : end]]


def parts_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Part]:
    """Return the parts of some batches, whose columns are those of `PART`; the lists share their memory."""
    for batch in batches:
        columns = [_slices(batch[name]) if name in _LISTS else batch[name].to_pylist() for name in PART.names]
        yield from (Part(*row) for row in zip(*columns, strict=True))


def _slices(column: pa.Array) -> Iterator[Int64s]:
    """Return the rows of a list column, which share its memory."""
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return (values[begin:end] for begin, end in pairwise(offsets.tolist()))


def batches_of(parts: Iterable[Part], schema: pa.Schema = PART) -> Iterator[pa.RecordBatch]:
    """Put many parts into each batch, as long as they are small together.

    Args:
        parts: Any number.
        schema: `PART`, or `RUN` with states.
    """
    waiting: list[Part] = []
    value_count = 0
    for part in parts:
        waiting.append(part)
        value_count += len(part.second) + len(part.state or "") // 8
        if value_count > _BATCH_VALUES or len(waiting) == _BATCH_PARTS:
            yield _batch(waiting, schema)
            waiting, value_count = [], 0
    if waiting:
        yield _batch(waiting, schema)


def _batch(parts: Sequence[Part], schema: pa.Schema) -> pa.RecordBatch:
    columns = [
        _lists_of(values) if field.name in _LISTS else pa.array(values, field.type)
        for field, values in zip(schema, zip(*parts, strict=True), strict=False)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _lists_of(arrays: Sequence[Int64s]) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays).astype(np.int64, copy=False)))


def add_slices(
    batches: Iterable[pa.RecordBatch], *, slices: Slices, scopes: Sequence[str] = SCOPES
) -> Iterator[pa.RecordBatch]:
    """Add up the curves of each slice; what is a result already passes, and its costs count for all scopes.

    Args:
        batches: The parts, sorted by policy, slice, namespace and topic.
        slices: What the curves are cut into.
        scopes: Which results to return.
    """
    yield from batches_of(part for part in sum_slices(parts_of(batches), slices) if part.scope in scopes)


def chosen(
    batches: Iterable[pa.RecordBatch], *, slices: Sequence[int], is_any_other: bool = False
) -> Iterator[pa.RecordBatch]:
    """Pass the rows whose slice is one of some, or is none of them."""
    for batch in batches:
        is_one = pc.is_in(batch["slice"], pa.array(slices, pa.int32()))
        yield batch.filter(pc.invert(is_one) if is_any_other else is_one)


def merge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Put the parts of each result together into one, and pass those of curves and crashes; sorted by `RESULT_KEY`."""
    yield from batches_of(chain.from_iterable(result.parts() for result in _results(batches)))


def put_together(
    batches: Iterable[pa.RecordBatch], *, duration_ms: int, crashes_per_day: float = 1
) -> Iterator[pa.RecordBatch]:
    """Make an estimate of the parts of each result, which are sorted by `RESULT_KEY`; the columns: `ESTIMATE`.

    Of the subscriptions that a call sees, `CURVE_COUNT_MAX` keep their curve.

    Args:
        batches: The parts.
        duration_ms: Of the whole trace.
        crashes_per_day: The rate for which duplicates are counted.
    """
    rows = [result.row(duration_ms, crashes_per_day) for result in _results(batches)]
    own = [row for row in rows if row["scope"] == SCOPES[0] and row["curve"] is not None]
    for row in sorted(own, key=badness)[CURVE_COUNT_MAX:]:
        row |= {"curve_ms": None, "curve": None}
    if rows:
        yield pa.RecordBatch.from_pylist(rows, ESTIMATE)


def badness(row: Mapping[str, Any]) -> tuple[float, int, str, str]:
    """Return what subscriptions are sorted by, the one of which most comes back first."""
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
        """Take a part in."""
        if part.slice != RESULT:
            self._others.append(part)
            return
        self._histogram.add(part.first, part.second)
        if part.sums is not None:
            peak, peak_ts_ms, *sums = whole_sums(part.sums)
            longest_ms = max(self._sums[-1], sums[-1] or 0)
            self._sums = [before + (more or 0) for before, more in zip(self._sums, sums, strict=True)]
            # Subscriptions wait at the same time, so their waits do not add up.
            self._sums[-1] = longest_ms
            # Where nothing ever comes back there is no time at which most does.
            if peak and peak_ts_ms is not None and (self._peak is None or (-peak, peak_ts_ms) < self._peak):
                self._peak = (-peak, peak_ts_ms)

    def parts(self) -> Iterator[Part]:
        """Yield what was found so far as one part, to which more can be added; its curve and crashes as they came."""
        peak, peak_ts_ms = self._peak or (0, None)
        first, second = self._histogram.columns()
        sums = narrow_sums([-peak, peak_ts_ms, *self._sums])
        yield self._part._replace(slice=RESULT, begin=first[:0], first=first, second=second, sums=sums)
        yield from self._others

    def row(self, duration_ms: int, crashes_per_day: float) -> dict[str, Any]:
        """Return it."""
        values, durations = self._histogram.columns()
        # When nothing of it was there, nothing could come back.
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
        """Return the points of the curve in order, if any part has some."""
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
            # A subscription is replayed in one go.
            (part,) = found
            return {"crash_ms": part.first, "crashes": part.second, "crash_count": len(part.first)}
        times = np.unique(np.concatenate([part.first for part in found]))
        return {"crash_ms": times[:CRASHES_MAX], "crashes": None, "crash_count": len(times)}
