"""Computes one subscription's parts of the estimates."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ackstate.analysis.estimate.chunks import by_subscription
from ackstate.analysis.estimate.parts import SCOPES, Part, batches_of
from ackstate.analysis.estimate.slices import (
    CRASHES,
    CURVE,
    OWN_SLICES_MAX,
    RESULT,
    SliceChange,
    Slices,
    SliceWriter,
    ThinnedCurve,
    namespace_of,
)
from ackstate.analysis.replay.curves import SERIES, Histogram, Points, RecordedCurve, series_of
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.trace.events import EventKind, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from ackstate.analysis.replay.acked import EventChunk
    from ackstate.analysis.replay.policy import Policy

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
