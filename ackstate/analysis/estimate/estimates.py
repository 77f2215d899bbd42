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

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ackstate.analysis.estimate.chunks import by_subscription, sorted_chunks, takes_compact
from ackstate.analysis.estimate.engine import LocalRows, joined
from ackstate.analysis.estimate.parts import (
    CRASHES,
    CURVE,
    ESTIMATE,
    OWN_SLICES_MAX,
    PART,
    RESULT,
    RESULT_KEY,
    SCOPES,
    SLICES_MAX,
    Part,
    SliceChange,
    Slices,
    SliceWriter,
    ThinnedCurve,
    add_slices,
    batches_of,
    namespace_of,
    put_together,
)
from ackstate.analysis.replay.curves import SERIES, Histogram, Points, RecordedCurve, series_of
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.trace.events import EventKind, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from ackstate.analysis.estimate.engine import Rows, TraceSource
    from ackstate.analysis.replay.acked import EventChunk
    from ackstate.analysis.replay.policy import Policy


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
            is_polled=span.poll_ms > 0, days=span.days,
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
    days: Sequence[str] = ()  # The names of the days, of a directory of daily traces


def replay(
    batches: Iterable[pa.RecordBatch], *, wanted: RequestedParts, told: Callable[[], object] | None = None
) -> Iterator[pa.RecordBatch]:
    """Replay `sorted_chunks`, and yield the parts of each subscription, rows of `PART`; `told` is called per chunk."""
    yield from batches_of(_parts(batches, wanted, told or (lambda: None)))


def _parts(batches: Iterable[pa.RecordBatch], wanted: RequestedParts, told: Callable[[], object]) -> Iterator[Part]:
    for key, log, chunks in by_subscription(batches, wanted.days):
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
