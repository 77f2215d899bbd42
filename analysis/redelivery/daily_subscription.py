"""One subscription, from the state at the end of one day to that at the end of a later one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import pyarrow as pa

from ackstate.analysis.redelivery.curve_changes import SERIES, ChangeWriter, series_of
from ackstate.analysis.redelivery.curve_sum import Histogram, Points
from ackstate.analysis.redelivery.daily_state import OWN_SLICES_MAX, DailyState, decoded, encoded
from ackstate.analysis.redelivery.one_cursor import OneCursor
from ackstate.analysis.redelivery.parts import PART, SCOPES, Part, batches_of, narrow_sums
from ackstate.analysis.redelivery.slices import Slices, SliceWriter, namespace_of
from ackstate.analysis.redelivery.state_fields import CheckpointError
from ackstate.analysis.redelivery.subscription_replay import SubscriptionReplay
from ackstate.analysis.redelivery.thinned_curve import ThinnedCurve
from ackstate.analysis.trace.events import EventKind, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ackstate.analysis.redelivery.acked import Chunk
    from ackstate.analysis.redelivery.policy import Policy

RUN = pa.schema([*PART, ("state", pa.string())])
"""What comes out: a part of the estimates, of a curve or of the crashes, or a state."""
CURVE, CRASHES = "curve", "crashes"
"""Scopes of parts that are none of an estimate: changes as in `curve_changes`, and times in `first`."""


class Days(NamedTuple):
    """The days that a run reads.

    Attributes:
        begin_ms: Of the first of all days.
        slices: For sums, from the end of the days before.
        plotted: For curves, from the begin of all days or later.
    """

    begin_ms: int
    slices: Slices
    plotted: Slices


@final
class DailySubscription:
    """One subscription, from its state at the end of the day before, if it was there.

    It passes on by how much sums have grown, so that all runs add up to what one run would have found.

    Args:
        key: Topic and subscription.
        policies: The grid.
        log: What is new of the topic's message log, or known again.
        state: What `end` made the day before.
        days: What is read.
        is_published: Whether the log says where ledgers end.
    """

    def __init__(  # noqa: PLR0913 - what a row has
        self, key: tuple[str, str], policies: Sequence[Policy | None], log: dict[int, int], state: str | None,
        days: Days, *, is_published: bool,
    ) -> None:  # fmt: skip
        self.key = key
        self._names = (namespace_of(key[0]), *key)
        self._one_cursor = OneCursor(key)
        self._policies = policies
        self._days = days
        self._is_published = is_published
        self._writers = [SliceWriter(days.slices) for _ in policies]
        if state is None:
            curves = [ThinnedCurve(days.begin_ms, slices_max=OWN_SLICES_MAX) for _ in policies]
            self._state = DailyState(SubscriptionReplay(policies, log), curves)
        else:
            with self._named():
                self._state = decoded(state, policies)
            self._go_on(log)
        for curve in self._state.curves:
            curve.widen_until(days.slices.end_ms)
        self._replay = self._state.replay
        self._changes = [ChangeWriter(days.plotted, curve.standing(SERIES)) for curve in self._state.curves]
        self._before = [self._sums(policy) for policy in range(len(policies))]

    def _go_on(self, log: dict[int, int]) -> None:
        replay = self._state.replay
        with self._named():
            replay.grow(log)
        for writer, curve in zip(self._writers, replay.curves, strict=True):
            writer.go_on(curve.sum.standing)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say of whom it is what is refused."""
        try:
            yield
        except (TraceError, CheckpointError) as error:
            raise type(error)(f"subscription {self.key[1]!r} of {self.key[0]}: {error}") from None

    def take(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        """Take the next chunk in, and return what is ready to be passed on."""
        self._one_cursor.check(chunk)
        with self._named():
            found = self._replay.take(chunk)
        for policy, points in enumerate(found):
            yield from self._follow(policy, points)
            if self._replay.curves[policy].sum.histogram.is_large:
                yield from self._histogram(policy, None)
        died_ms = np.unique(chunk.ts_ms[chunk.kind == EventKind.CRASH])
        if len(died_ms):
            yield from _passed_on(Part(-1, -1, CRASHES, *self._names, 0, died_ms, died_ms, None))

    def end(self) -> Iterator[pa.RecordBatch]:
        """Return the rest, and the state to go on with."""
        with self._named():
            found = self._replay.end(self._days.slices.end_ms)
        for policy, points in enumerate(found):
            yield from self._follow(policy, points)
            for change in self._writers[policy].end():
                yield from _passed_on(Part(policy, change.number, SCOPES[0], *self._names, *change[1:], None))
            peak, peak_ts_ms, *sums = self._sums(policy)
            before = self._before[policy][2:]
            grown = [(now or 0) - (then or 0) for now, then in zip(sums, before, strict=True)]
            # Of `Costs.blocked_ms` results have the most, not the sum.
            grown[-1] = sums[-1] or 0
            yield from self._histogram(policy, narrow_sums([peak, peak_ts_ms, *grown]))
        if self._is_published:
            self._replay.forget_complete()
        values = dict.fromkeys(RUN.names) | {"topic": self.key[0], "subscription": self.key[1]}
        values["state"] = encoded(self._state)
        yield pa.RecordBatch.from_pylist([values], RUN)

    def _follow(self, policy: int, points: Points) -> Iterator[pa.RecordBatch]:
        for change in self._writers[policy].changes(points):
            yield from _passed_on(Part(policy, change.number, SCOPES[0], *self._names, *change[1:], None))
        series = series_of(points)
        self._state.curves[policy].add(*series)
        for number, ts_ms, delta in self._changes[policy].changes(series):
            yield from _passed_on(Part(policy, number, CURVE, *self._names, 0, ts_ms, delta.ravel(), None))

    def _sums(self, policy: int) -> list[int | None]:
        curve = self._replay.curves[policy]
        return [curve.sum.peak, curve.sum.peak_ts_ms, *map(int, curve.sum.cause_sums), *curve.costs]

    def _histogram(self, policy: int, sums: Sequence[int | None] | None) -> Iterator[pa.RecordBatch]:
        curve = self._replay.curves[policy]
        part = Part(policy, -1, SCOPES[0], *self._names, 0, *curve.sum.histogram.columns(), sums)
        curve.sum.histogram = Histogram()
        yield from _passed_on(part)


def _passed_on(part: Part) -> Iterator[pa.RecordBatch]:
    for batch in batches_of([part]):
        yield pa.RecordBatch.from_arrays([*batch.columns, pa.nulls(batch.num_rows, pa.string())], schema=RUN)
