"""What goes from one step of the estimates to the next: parts of curves and of results, as rows of Arrow."""

from __future__ import annotations

from itertools import chain, groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from ackstate.analysis.redelivery.arrow_rows import lists_of
from ackstate.analysis.redelivery.curve_sum import CAUSES, Histogram, quantile, weight_of
from ackstate.analysis.redelivery.slices import Slices, sum_slices
from ackstate.analysis.redelivery.subscription_replay import Costs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ackstate.analysis.redelivery.acked import Int64s

SCOPES = ("subscription", "topic", "namespace", "total")
RESULT_KEY = ("policy", "scope", "namespace", "topic", "subscription")
PART = pa.schema([
    ("policy", pa.int32()), ("slice", pa.int32()), ("scope", pa.string()), ("namespace", pa.string()),
    ("topic", pa.string()), ("subscription", pa.string()), ("begin", pa.int64()),
    ("first", pa.list_(pa.int64())), ("second", pa.list_(pa.int64())), ("sums", pa.list_(pa.int64())),
])  # fmt: skip
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
])  # fmt: skip
# A batch takes up to some 10 MB.
_BATCH_VALUES = 500_000
_BATCH_PARTS = 10_000


class Part(NamedTuple):
    """A row between two steps.

    Attributes:
        policy: Index in the grid.
        slice: Of which slice of time these are the changes of a curve; -1 for a part of a result.
        scope: One of `SCOPES`; what follows names it, empty beyond it.
        namespace: The first two parts of the topic's name.
        topic: The same.
        subscription: The same.
        begin: Of changes, the number at the slice's begin; of a result, nothing.
        first: Of changes, when; of a result, values, each once.
        second: Of changes, by how much; of a result, for how long each value held.
        sums: As `narrow_sums` returns them; None in all parts of a result but one.
    """

    policy: int
    slice: int
    scope: str
    namespace: str
    topic: str
    subscription: str
    begin: int
    first: Int64s
    second: Int64s
    sums: Sequence[int | None] | None


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
        columns = [
            _slices(batch[name]) if name in {"first", "second"} else batch[name].to_pylist() for name in Part._fields
        ]
        yield from map(Part._make, zip(*columns, strict=True))


def _slices(column: pa.Array) -> Iterator[Int64s]:
    """Return the rows of a list column, which share its memory."""
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return (values[begin:end] for begin, end in pairwise(offsets.tolist()))


def batches_of(parts: Iterable[Part]) -> Iterator[pa.RecordBatch]:
    """Put many parts into each batch, as long as they are small together."""
    waiting: list[Part] = []
    value_count = 0
    for part in parts:
        waiting.append(part)
        value_count += len(part.first)
        if value_count > _BATCH_VALUES or len(waiting) == _BATCH_PARTS:
            yield _batch(waiting)
            waiting, value_count = [], 0
    if waiting:
        yield _batch(waiting)


def _batch(parts: Sequence[Part]) -> pa.RecordBatch:
    columns = [
        lists_of(values) if field.name in {"first", "second"} else pa.array(values, field.type)
        for field, values in zip(PART, zip(*parts, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PART)


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


def merge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Put the parts of each result together into one; they are sorted by `RESULT_KEY`."""
    yield from batches_of(result.part() for result in _results(batches))


def put_together(
    batches: Iterable[pa.RecordBatch], *, duration_ms: int, crashes_per_day: float = 1
) -> Iterator[pa.RecordBatch]:
    """Make an estimate of the parts of each result, which are sorted by `RESULT_KEY`; the columns: `ESTIMATE`.

    Args:
        batches: The parts.
        duration_ms: Of the whole trace.
        crashes_per_day: The rate for which duplicates are counted.
    """
    rows = [result.row(duration_ms, crashes_per_day) for result in _results(batches)]
    if rows:
        yield pa.RecordBatch.from_pylist(rows, ESTIMATE)


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

    def add(self, part: Part) -> None:
        """Take a part in."""
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

    def part(self) -> Part:
        """Return what was found so far as one part, to which more can be added."""
        peak, peak_ts_ms = self._peak or (0, None)
        first, second = self._histogram.columns()
        return self._part._replace(
            begin=0, first=first, second=second, sums=narrow_sums([-peak, peak_ts_ms, *self._sums])
        )

    def row(self, duration_ms: int, crashes_per_day: float) -> dict[str, object]:
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
        }  # fmt: skip
