"""Redelivery if crashed over time, thinned out for a plot: of each slice of time its peak and its end, both exact.

Three steps, in each of which a worker holds a bounded part: subscriptions are replayed into changes of their curves;
the changes of a slice are added up; what the slices come to is strung together. The driver sees the plotted points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pyarrow as pa

from ackstate.analysis.redelivery.chunk_steps import DEATHS, death_columns, deaths
from ackstate.analysis.redelivery.curve_changes import (
    CHANGES,
    CRASHES_MAX,
    SERIES,
    SLICES_MAX,
    TOTAL,
    ChangeWriter,
    batch_of,
    series_of,
    string_together,
    sum_changes,
)
from ackstate.analysis.redelivery.slices import Slices
from ackstate.analysis.redelivery.sorted_chunks import by_subscription, sorted_chunks
from ackstate.analysis.redelivery.subscription_replay import SubscriptionReplay

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ackstate.analysis.redelivery.acked import Chunk, Int64s
    from ackstate.analysis.redelivery.curve_changes import Series
    from ackstate.analysis.redelivery.curve_sum import Points
    from ackstate.analysis.redelivery.policy import Policy
    from ackstate.analysis.redelivery.trace_source import TraceSource

    Key = tuple[str, str]

_CRASH_TIMES = pa.schema([("ts_ms", pa.list_(pa.int64())), ("count", pa.int64())])
# So many chunks of events in a slice are what a worker adds up at once.
_CHUNKS_PER_SLICE = 64


@dataclass(frozen=True, slots=True)
class Curve:
    """A line: the number holds from each time to the next.

    Attributes:
        policy: Index in the grid.
        topic: Empty for all subscriptions at once, as the next.
        subscription: Whose.
        ts_ms: Rising, each once; the first and the last are those of the trace.
        value: Acked messages that a crash would bring back.
        causes: For each of `CAUSES`, how many of them there are for it; the others are not yet flushed.
    """

    policy: int
    topic: str
    subscription: str
    ts_ms: tuple[int, ...]
    value: tuple[int, ...]
    causes: tuple[tuple[int, ...], ...]

    @property
    def is_total(self) -> bool:
        """Whether it is that of all subscriptions at once."""
        return (self.topic, self.subscription) == TOTAL


@dataclass(frozen=True, slots=True)
class CrashTimes:
    """When processes died.

    Attributes:
        ts_ms: The first `CRASHES_MAX` times, rising.
        count: How many there are.
    """

    ts_ms: tuple[int, ...]
    count: int


def curves(trace: TraceSource, policies: Sequence[Policy | None], *, subscriptions: Sequence[Key]) -> list[Curve]:
    """Return the curve of all subscriptions at once, and some subscriptions' own, under each policy.

    Complexity: another replay of the trace; at most two points a curve for each of about 500 slices of time.

    Args:
        trace: With at least one subscription.
        policies: The grid; None is the recording itself.
        subscriptions: (topic, subscription) of those whose curves are wanted; each once.

    Returns:
        For each policy the total, then the subscriptions in the order given.
    """
    span = trace.span()
    # A slice that is plotted may be many that are added up.
    per_point = max(1, -(-span.chunk_count // (_CHUNKS_PER_SLICE * SLICES_MAX)))
    slices = Slices.of(span.begin_ms, span.end_ms, SLICES_MAX * per_point)
    wanted = frozenset(subscriptions)
    replay = partial(_replay, policies=tuple(policies), slices=slices)
    changes = sorted_chunks(trace, policies).through(replay, CHANGES)
    by_slice = changes.together(("policy", "slice"), ("topic", "subscription"))
    sums = by_slice.through(partial(sum_changes, wanted=wanted), CHANGES)
    in_order = sums.together((), ("policy", "topic", "subscription", "slice"))
    rows = in_order.through(partial(string_together, per_point=per_point), CHANGES).collect()
    points = {
        key: [tuple(row.values()) for row in of_line]
        for key, of_line in groupby(rows, key=lambda row: (row["policy"], row["topic"], row["subscription"]))
    }
    return [
        _drawn((number, *key), points.get((number, *key), []), slices)
        for number in range(len(policies))
        for key in (TOTAL, *subscriptions)
    ]


def crash_times(trace: TraceSource) -> CrashTimes:
    """Return when processes died; subscriptions that died in the same millisecond died together."""
    times = trace.read(death_columns(is_packed=trace.is_packed), deaths, DEATHS).together(())
    found = times.through(_crash_times, _CRASH_TIMES).collect()
    return CrashTimes(tuple(found[0]["ts_ms"]), found[0]["count"]) if found else CrashTimes((), 0)


def _crash_times(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    times = np.unique(np.concatenate([np.empty(0, np.int64), *(batch["ts_ms"].to_numpy() for batch in batches)]))
    yield pa.RecordBatch.from_pylist([{"ts_ms": times[:CRASHES_MAX].tolist(), "count": len(times)}], _CRASH_TIMES)


def _replay(
    batches: Iterable[pa.RecordBatch], *, policies: Sequence[Policy | None], slices: Slices
) -> Iterator[pa.RecordBatch]:
    """Replay sorted chunks into changes, cut into slices."""
    for key, log, chunks in by_subscription(batches):
        opened = _Opened(key, SubscriptionReplay(policies, log), slices)
        for chunk in chunks:
            yield opened.take(chunk)
        yield opened.end()


@final
class _Opened:
    """A subscription under replay."""

    def __init__(self, key: Key, replay: SubscriptionReplay, slices: Slices) -> None:
        self.key = key
        self._replay = replay
        self._slices = slices
        self._writers = [ChangeWriter(slices, np.zeros((SERIES, 1), np.int64)) for _ in replay.curves]

    def take(self, chunk: Chunk) -> pa.RecordBatch:
        return self._batch(self._replay.take(chunk))

    def end(self) -> pa.RecordBatch:
        return self._batch(self._replay.end(self._slices.end_ms))

    def _batch(self, found: Sequence[Points]) -> pa.RecordBatch:
        return batch_of([
            (policy, number, *self.key, ts_ms, delta)
            for policy, points in enumerate(found)
            for number, ts_ms, delta in self._writers[policy].changes(series_of(points))
        ])  # fmt: skip


def curve_of(key: tuple[int, str, str], ts_ms: Int64s, values: Series, *, begin_ms: int, end_ms: int) -> Curve:
    """Return the curve of some points in order, of which there are none if nothing ever comes back.

    Args:
        key: Policy, topic and subscription.
        ts_ms: When; never falls.
        values: A row for each of `SERIES`, a column for each time.
        begin_ms: Of the trace.
        end_ms: Of the trace.
    """
    begin = np.zeros((SERIES, 1), np.int64)
    ts_ms = np.concatenate([[begin_ms], ts_ms, [end_ms]])
    values = np.concatenate([begin, values, values[:, -1:] if values.size else begin], axis=1)
    # A peak may be the end of its slice, and that the end of the trace; what happened in its first millisecond counts.
    lasts = np.append(ts_ms[1:] != ts_ms[:-1], True)
    value, *causes = (tuple(each) for each in values[:, lasts].tolist())
    return Curve(*key, tuple(ts_ms[lasts].tolist()), value, tuple(causes))


def _drawn(key: tuple[int, str, str], rows: Sequence[Sequence[Any]], slices: Slices) -> Curve:
    ts_ms = np.array([each for row in rows for each in row[4]], np.int64)
    points = [np.array(row[5], np.int64).reshape(SERIES, 2) for row in rows]
    values = np.concatenate([np.empty((SERIES, 0), np.int64), *points], axis=1)
    return curve_of(key, ts_ms, values, begin_ms=slices.begin_ms, end_ms=slices.end_ms)
