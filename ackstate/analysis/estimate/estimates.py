"""Redelivery if crashed under every policy of a grid: exact for every instant, for each subscription and their sums.

Four steps. Each chunk is compacted where it is read; every subscription is replayed under all policies at once; the
curves are added up for topics, namespaces and all, one slice of time after the other; the results of each scope are
merged. The driver only holds a row for each estimate.

A worker reads sorted rows. It holds 64 chunks of them, one subscription's acks as bitmaps for each recovery on which
policies differ, and up to 130,000 values of each curve, for any length of the trace; for a slice it holds the curves of
all subscriptions.

A subscription with most of the trace is read and compacted on all cores; the remaining work per chunk is a small part.
Policies for which deliveries matter (a young age, a gate) read whole chunks, and replay one subscription on one core.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import numpy as np
import pyarrow as pa

from ackstate.analysis.estimate.chunks import by_subscription, sorted_chunks, takes_compact
from ackstate.analysis.estimate.engine import LocalRows, joined
from ackstate.analysis.replay.curves import (
    CAUSES,
    SERIES,
    Costs,
    Histogram,
    Points,
    RecordedCurve,
    combined,
    quantile,
    series_of,
    weight_of,
)
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.trace.events import EventKind, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from decimal import Decimal

    from ackstate.analysis.estimate.engine import Rows, TraceSource
    from ackstate.analysis.replay.acked import EventChunk, Int64s
    from ackstate.analysis.replay.curves import Series, SeriesPoints
    from ackstate.analysis.replay.policy import Policy


_NAMESPACE = re.compile(r"(?:persistent|non-persistent)://([^/]+/[^/]+)/.")
_NOTHING = np.empty(0, np.int64)
RESULT, CURVE, CRASHES = -1, -2, -3
"""The slice numbers of parts that are a result, a result's curve, or its crashes."""


def namespace_of(topic: str) -> str:
    """Return a topic's namespace, empty if its name has none.

    >>> namespace_of("persistent://public/default/orders"), namespace_of("orders")
    ('public/default', '')
    """
    found = _NAMESPACE.match(topic)
    return found[1] if found else ""


class Slices(NamedTuple):
    """Time in slices of equal width, a power of two; the last slice contains the last millisecond."""

    begin_ms: int  # When the first slice begins
    end_ms: int  # Time of the last event
    width_ms: int  # Width of a slice
    slice_count: int  # Number of slices; 0 if none are needed

    @classmethod
    def of(cls, begin_ms: int, end_ms: int, count: int, *, width_ms_max: int = 2**62) -> Self:
        """Cut time into slices."""
        span_ms = end_ms - begin_ms + 1
        width_ms = min(1 << max(span_ms // max(count, 1), 1).bit_length() - 1, width_ms_max)
        return cls(begin_ms, end_ms, width_ms, -(-span_ms // width_ms) if count else 0)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the begin and end of a slice; the last one ends with the last event."""
        begin_ms = self.begin_ms + number * self.width_ms
        return begin_ms, min(begin_ms + self.width_ms, self.end_ms)


class SliceChange(NamedTuple):
    """How a curve changes within a slice."""

    number: int  # Number of the slice
    # The numbers at its start, as many as `delta` has rows; 0 if another `SliceChange` of the slice has them.
    begin: Int64s
    ts_ms: Int64s  # The times of the changes; rising
    delta: Series  # The changes, a column for each time; one row for redelivery alone, or a row for each of `SERIES`


@final
class SliceWriter:
    """Cuts one curve into slices."""

    def __init__(self, slices: Slices, series_count: int) -> None:
        self._slices = slices
        self._values: Series = np.zeros((series_count, 1), np.int64)
        self._number = -1  # the slice that was started last

    def changes(self, points: SeriesPoints) -> Iterator[SliceChange]:
        """Yield the changes of the next points."""
        if not self._slices.slice_count or not len(points.ts_ms):
            return
        delta = np.diff(points.values, prepend=self._values, axis=1)
        at = delta.any(axis=0)
        ts_ms, delta = points.ts_ms[at], delta[:, at]
        numbers = (ts_ms - self._slices.begin_ms) // self._slices.width_ms
        bounds = [*np.flatnonzero(np.diff(numbers, prepend=-1)).tolist(), len(numbers)]
        for low, high in pairwise(bounds):
            number = int(numbers[low])
            yield from self._unchanged(number)
            begin = self._values if number > self._number else np.zeros_like(self._values)
            yield SliceChange(number, begin[:, 0], ts_ms[low:high], delta[:, low:high])
            self._number = number
            self._values = self._values + delta[:, low:high].sum(axis=1, keepdims=True)

    def end(self) -> Iterator[SliceChange]:
        """Yield the remaining slices, in which the last values hold."""
        yield from self._unchanged(self._slices.slice_count)

    def _unchanged(self, until_number: int) -> Iterator[SliceChange]:
        """Yield the slices without changes."""
        if self._values.any():
            for number in range(self._number + 1, until_number):
                yield SliceChange(number, self._values[:, 0], _NOTHING, np.empty((len(self._values), 0), np.int64))


def sum_slices(parts: Iterable[Part], slices: Slices) -> Iterator[Part]:
    """Add up curves of topics, namespaces and all, slice by slice."""
    for (_, number), of_slice in groupby(parts, key=lambda part: (part.policy, part.slice)):
        if number < 0:
            for part in of_slice:
                yield from _for_all_scopes(part)
            continue
        everything = _Sum()
        for namespace, of_namespace in groupby(of_slice, key=lambda part: part.namespace):
            in_namespace = _Sum()
            for topic, of_topic in groupby(of_namespace, key=lambda part: part.topic):
                in_topic, last = _Sum(), None
                for part in of_topic:
                    in_topic.add(SliceChange(number, part.begin, part.first, part.second.reshape(len(part.begin), -1)))
                    last = part
                assert last is not None
                in_namespace.add(in_topic.total(number))
                yield in_topic.result(last, ("topic", namespace, topic), slices.bounds(number))
            everything.add(in_namespace.total(number))
            yield in_namespace.result(last, ("namespace", namespace, ""), slices.bounds(number))
        yield everything.result(last, ("total", "", ""), slices.bounds(number))
        yield from everything.points(last)


def _for_all_scopes(part: Part) -> Iterator[Part]:
    yield part
    if part.slice == CRASHES:
        yield part._replace(scope="total", namespace="", topic="", subscription="", second=_NOTHING)
    if part.sums is None:
        return
    costs = part._replace(sums=[0, None, *part.sums[2:]], first=_NOTHING, second=_NOTHING, subscription="")
    yield costs._replace(scope="topic")
    yield costs._replace(scope="namespace", topic="")
    yield costs._replace(scope="total", topic="", namespace="")


@final
class _Sum:
    """Changes of several curves in one slice."""

    def __init__(self) -> None:
        self._begin: Int64s | int = 0
        self._changes: list[tuple[Int64s, Series]] = []

    def add(self, change: SliceChange) -> None:
        self._begin = self._begin + change.begin
        self._changes.append((change.ts_ms, change.delta))

    def total(self, number: int) -> SliceChange:
        """Return the changes merged, with at most one per millisecond."""
        if len(self._changes) > 1:
            times, at = np.unique(np.concatenate([ts_ms for ts_ms, _ in self._changes]), return_inverse=True)
            deltas = np.concatenate([delta for _, delta in self._changes], axis=1)
            sums = np.zeros((len(deltas), len(times)), np.int64)
            for row, delta in zip(sums, deltas, strict=True):
                np.add.at(row, at, delta)
            self._changes = [(times, sums)]
        return SliceChange(number, np.asarray(self._begin), *self._changes[0])

    def result(self, of: Part | None, names: tuple[str, str, str], bounds: tuple[int, int]) -> Part:
        """Return the duration of each value, and the peak."""
        assert of is not None
        _, begin, ts_ms, delta = self.total(of.slice)
        times = np.concatenate(([bounds[0]], ts_ms))
        values = begin[0] + np.concatenate(([0], np.cumsum(delta[0])))
        # A slice's first value has no duration if it changes in the first millisecond.
        held = np.append(times[1:] != times[:-1], True)
        times, values = times[held], values[held]
        durations = np.diff(np.append(times, max(bounds[1], int(times[-1]))))
        at = int(np.argmax(values))
        first, second = combined(values, durations)
        scope, namespace, topic = names
        sums = [int(values[at]), int(times[at]), *[0] * (len(CAUSES) + 5)]
        return of._replace(
            slice=RESULT, scope=scope, namespace=namespace, topic=topic, subscription="", begin=_NOTHING,
            first=first, second=second, sums=sums,
        )  # fmt: skip

    def points(self, of: Part | None) -> Iterator[Part]:
        """Yield the first peak and the last change of the total curve, if it has causes and any change."""
        assert of is not None
        _, begin, ts_ms, delta = self.total(of.slice)
        # Changes of several subscriptions may cancel out.
        changed = delta.any(axis=0)
        if len(begin) == 1 or not changed.any():
            return
        times, level = ts_ms[changed], begin[:, np.newaxis] + delta[:, changed].cumsum(axis=1)
        at = [int(np.argmax(level[0])), -1]
        yield of._replace(
            slice=CURVE, scope="total", namespace="", topic="", subscription="", begin=_NOTHING,
            first=times[at], second=level[:, at].ravel(), sums=None,
        )  # fmt: skip


SLICES_MAX = 500
"""A report plots at most two points in each of this many slices of time."""
OWN_SLICES_MAX = 250
"""Slices in the curve of a single subscription."""


@final
class ThinnedCurve:
    """Thins a curve out as it grows, in slices whose width is a power of two.

    The result depends on the curve and the width alone, not on how the curve was cut when it was added.
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
        """Add points at times that never fall; the last of one time counts, the first row of `values` has the peak."""
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


CHUNKS_PER_SLICE = 64
"""A worker adds up this many chunks of events in a slice at once."""


def estimates(  # noqa: PLR0913 - each is needed once
    source: TraceSource,
    policies: Sequence[Policy | None],
    *,
    scopes: Sequence[str] = SCOPES,
    crashes_per_day: float = 1,
    is_plotted: bool = False,
    drawn: int = 0,
    told: Callable[[], object] | None = None,
) -> Rows:
    """Estimate redelivery after a crash at any instant of a trace, under each policy of a grid.

    All numbers are over the whole trace, from its first event to its last, so that those of subscriptions add up to
    those of their topic. Before its first event, and while its process is dead, a subscription redelivers nothing;
    after its last event the broker continues to tick.

    ``policy``: index in the grid; ``scope, namespace, topic, subscription``: names, empty beyond the scope;
    ``expected``: mean over time, null if no time passed, as are ``p50, p90, p99``: the least number that is not
    exceeded for that share of the time; ``max, max_ts_ms``: the peak and its first time, null if it is 0: of a
    subscription at any event, of others at the end of any millisecond; ``not_flushed, young, cut_by_ranges,
    cut_by_bytes, cut_by_route``: ``expected`` by cause, which add up to it; as recorded they come from the trace;
    ``write_count, bytes_written, bytes_kept, bytes_kept_max``: as `Costs`, summed up; ``blocked_ms``: the longest
    time that dispatch of a subscription was blocked; ``duration_ms``: of the trace; ``duplicates_per_day``.

    ``curve_ms, curve``: the times of the peak and of the last change in each of about 500 slices of time, and then
    row by row the values of `SERIES`; for all together under each policy, and under the drawn one also for at least
    the `CURVE_COUNT_MAX` subscriptions with most redelivery, if there are as many; null for others.
    ``crash_ms, crash_count``: when processes died, of subscriptions and, at most `CRASHES_MAX` times, of all
    together, and the number of these times, under the first policy. ``crashes``: of a subscription as recorded,
    three numbers for each crash: redelivery, redelivery if the persist in progress had been written, and whether
    a persist was in progress.
    """
    span = source.span
    if not span.chunk_count:
        return LocalRows(lambda: (), ESTIMATE)
    count = -(-span.chunk_count // CHUNKS_PER_SLICE) if is_plotted or set(scopes) != {"subscription"} else 0
    curve = ThinnedCurve(span.begin_ms, span.end_ms, slices_max=SLICES_MAX)
    widest = {"width_ms_max": curve.width_ms} if is_plotted else {}
    slices = Slices.of(span.begin_ms, span.end_ms, count, **widest)
    replays: list[Rows] = []
    alike: dict[bool, list[int]] = {True: [], False: []}
    for number, policy in enumerate(policies):
        alike[takes_compact(policy)].append(number)
    for numbers in filter(None, alike.values()):
        mine = [policies[number] for number in numbers]
        wanted = RequestedParts(
            mine, numbers, span.begin_ms, slices, is_plotted=is_plotted, drawn=drawn,
            is_polled=span.poll_ms > 0,
        )  # fmt: skip
        replays.append(sorted_chunks(source, mine).through(partial(replay, wanted=wanted, told=told), PART))
    parts = joined(replays)
    if count:
        by_slice = parts.together(("policy", "slice"), ("namespace", "topic"))
        parts = by_slice.through(partial(add_slices, slices=slices, scopes=tuple(scopes)), PART)
    make = partial(put_together, duration_ms=slices.end_ms - slices.begin_ms, crashes_per_day=crashes_per_day)
    return parts.together(RESULT_KEY).through(make, ESTIMATE)


_NONE = np.empty(0, np.int64)


class RequestedParts(NamedTuple):
    """The requested output of a replay."""

    policies: Sequence[Policy | None]  # The policies under which to replay
    numbers: Sequence[int]  # The index of each of them in the grid
    begin_ms: int  # Start of the trace
    slices: Slices  # For sums and curves
    is_plotted: bool = False  # Whether to return curves; requires slices
    drawn: int = 0  # The index in the grid of the policy whose curves of single subscriptions to return
    is_polled: bool = False  # Whether the trace was recorded by polls


def replay(
    batches: Iterable[pa.RecordBatch], *, wanted: RequestedParts, told: Callable[[], object] | None = None
) -> Iterator[pa.RecordBatch]:
    """Replay `sorted_chunks`, and yield the parts of each subscription, rows of `PART`; `told` is called per chunk."""
    yield from batches_of(_parts(batches, wanted, told or (lambda: None)))


def _parts(batches: Iterable[pa.RecordBatch], wanted: RequestedParts, told: Callable[[], object]) -> Iterator[Part]:
    for key, log, chunks in by_subscription(batches):
        subscription = _SubscriptionTotals(key, log, wanted)
        for chunk in chunks:
            yield from subscription.take(chunk)
            told()
        yield from subscription.end()


@final
class _SubscriptionTotals:
    """The totals of one subscription."""

    def __init__(self, key: tuple[str, str], log: dict[int, int], wanted: RequestedParts) -> None:
        self._key = key
        self._names = (namespace_of(key[0]), *key)
        self._wanted = wanted
        self._numbers = wanted.numbers
        self._writers = [SliceWriter(wanted.slices, SERIES if wanted.is_plotted else 1) for _ in self._numbers]
        self._died: dict[int, tuple[int, ...]] = {}
        plotted = [at for at, number in enumerate(wanted.numbers) if number == wanted.drawn and wanted.is_plotted]
        end_ms = wanted.slices.end_ms
        self._plotted = {at: ThinnedCurve(wanted.begin_ms, end_ms, slices_max=OWN_SLICES_MAX) for at in plotted}
        self._replay = SubscriptionReplay(wanted.policies, log, is_polled=wanted.is_polled)
        self._curves = self._replay.curves

    def take(self, chunk: EventChunk) -> Iterator[Part]:
        """Replay the next chunk, and yield the parts that are ready."""
        with self._named():
            found = self._replay.take(chunk)
        for policy, points in enumerate(found):
            yield from self._follow(policy, points)
            if self._curves[policy].sum.histogram.is_large:
                yield self._histogram(policy, None)
        if 0 in self._wanted.numbers:
            self._note_crashes(chunk)

    def end(self) -> Iterator[Part]:
        """Yield the remaining parts."""
        with self._named():
            found = self._replay.end(self._wanted.slices.end_ms)
        for policy, points in enumerate(found):
            yield from self._follow(policy, points)
            yield from (self._changed(policy, change) for change in self._writers[policy].end())
            yield self._histogram(policy, self._sums(policy))
        if self._died:
            numbers = [each for found in self._died.values() for each in found]
            yield self._part(0, CRASHES, np.array(list(self._died)), np.array(numbers, np.int64))
        for policy, curve in self._plotted.items():
            ts_ms, values = curve.points(SERIES)
            if len(ts_ms):
                yield self._part(policy, CURVE, ts_ms, values.ravel())

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the name of the subscription to an error."""
        try:
            yield
        except TraceError as error:
            raise TraceError(f"subscription {self._key[1]!r} of {self._key[0]}: {error}") from None

    def _follow(self, policy: int, points: Points) -> Iterator[Part]:
        if not self._wanted.slices.slice_count:
            return
        series = series_of(points, SERIES if self._wanted.is_plotted else 1)
        yield from (self._changed(policy, change) for change in self._writers[policy].changes(series))
        if policy in self._plotted:
            self._plotted[policy].add(*series)

    def _changed(self, policy: int, change: SliceChange) -> Part:
        return self._part(policy, change.number, change.ts_ms, change.delta.ravel())._replace(begin=change.begin)

    def _note_crashes(self, chunk: EventChunk) -> None:
        """Record when the process died and, as recorded, its redelivery; the last crash of a millisecond counts."""
        recorded = self._replay.curves[self._wanted.numbers.index(0)]
        at = np.flatnonzero(chunk.kind == EventKind.CRASH)
        numbers = recorded.at_crashes.tolist() if isinstance(recorded, RecordedCurve) else [()] * len(at)
        self._died.update(zip(chunk.ts_ms[at].tolist(), map(tuple, numbers), strict=True))

    def _sums(self, policy: int) -> list[int | None]:
        curve = self._curves[policy]
        return [curve.sum.peak, curve.sum.peak_ts_ms, *map(int, curve.sum.cause_sums), *curve.costs]

    def _histogram(self, policy: int, sums: Sequence[int | None] | None) -> Part:
        curve = self._curves[policy]
        part = self._part(policy, RESULT, *curve.sum.histogram.columns())._replace(sums=sums)
        curve.sum.histogram = Histogram()
        return part

    def _part(self, policy: int, number: int, first: np.ndarray, second: np.ndarray) -> Part:
        return Part(self._numbers[policy], number, SCOPES[0], *self._names, _NONE, first, second, None)
