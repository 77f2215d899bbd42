"""Redelivery if crashed over time, thinned out for a plot: of each slice of time its peak and its end, both exact.

Three steps, in each of which a worker holds a bounded part: subscriptions are replayed into changes of their curves;
the changes of a slice are added up; what the slices come to is strung together. The driver sees the plotted points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from analysis.redelivery.acked import Chunk
from analysis.redelivery.curve_sum import CAUSES
from analysis.redelivery.estimates import chunks_with_logs
from analysis.redelivery.slices import Slices
from analysis.redelivery.subscription_replay import SubscriptionReplay
from analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import DataFrame

    from analysis.redelivery.acked import Int64s
    from analysis.redelivery.curve_sum import Points
    from analysis.redelivery.policy import Policy

    Key = tuple[str, str]
    # The numbers' series, row by row.
    Series = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

CRASHES_MAX = 200
_SLICES = 500
# So many chunks of events in a slice are what a worker adds up at once.
_CHUNKS_PER_SLICE = 64
# The number itself, and its parts.
_SERIES = 1 + len(CAUSES)
_TOTAL = ("", "")
_CHANGES = pa.schema([
    ("policy", pa.int32()), ("slice", pa.int32()), ("topic", pa.string()), ("subscription", pa.string()),
    ("ts_ms", pa.list_(pa.int64())), ("delta", pa.list_(pa.int64())),
])  # fmt: skip
_CHANGES_SCHEMA = "policy int, slice int, topic string, subscription string, ts_ms array<bigint>, delta array<bigint>"


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
        return (self.topic, self.subscription) == _TOTAL


@dataclass(frozen=True, slots=True)
class CrashTimes:
    """When processes died.

    Attributes:
        ts_ms: The first `CRASHES_MAX` times, rising.
        count: How many there are.
    """

    ts_ms: tuple[int, ...]
    count: int


def curves(trace: DataFrame, policies: Sequence[Policy | None], *, subscriptions: Sequence[Key]) -> list[Curve]:
    """Return the curve of all subscriptions at once, and some subscriptions' own, under each policy.

    Complexity: another replay of the trace; at most two points a curve for each of about 500 slices of time.

    Args:
        trace: Columns as in `analysis.trace.events`, with at least one subscription.
        policies: The grid; None is the recording itself.
        subscriptions: (topic, subscription) of those whose curves are wanted; each once.

    Returns:
        For each policy the total, then the subscriptions in the order given.
    """
    span = trace.agg(
        F.min("first_ts_ms").alias("begin"), F.max("last_ts_ms").alias("end"), F.count("*").alias("count")
    ).collect()[0]
    # A slice that is plotted may be many that are added up.
    per_point = max(1, -(-span["count"] // (_CHUNKS_PER_SLICE * _SLICES)))
    slices = Slices.of(span["begin"], span["end"], _SLICES * per_point)
    wanted = frozenset(subscriptions)
    changes = chunks_with_logs(trace, policies).mapInArrow(
        partial(_replay, policies=tuple(policies), slices=slices), _CHANGES_SCHEMA
    )
    by_slice = changes.repartition("policy", "slice").sortWithinPartitions("policy", "slice", "topic", "subscription")
    sums = by_slice.mapInArrow(partial(_sum, wanted=wanted), _CHANGES_SCHEMA)
    in_order = sums.coalesce(1).sortWithinPartitions("policy", "topic", "subscription", "slice")
    rows = in_order.mapInArrow(partial(_string, per_point=per_point), _CHANGES_SCHEMA).collect()
    points = {key: list(of_line) for key, of_line in groupby(rows, key=lambda row: (row[0], *row[2:4]))}
    return [
        _drawn((number, *key), points.get((number, *key), []), slices)
        for number in range(len(policies))
        for key in (_TOTAL, *subscriptions)
    ]


def crash_times(trace: DataFrame) -> CrashTimes:
    """Return when processes died; subscriptions that died in the same millisecond died together."""
    died = trace.where(F.array_contains("kind", F.lit(int(EventKind.CRASH)).cast("tinyint"))).select(
        F.explode(F.arrays_zip("ts_ms", "kind")).alias("event")
    )
    times = died.where(F.col("event.kind") == int(EventKind.CRASH)).select("event.ts_ms").distinct()
    first = times.orderBy("ts_ms").limit(CRASHES_MAX).collect()
    return CrashTimes(tuple(row["ts_ms"] for row in first), times.count() if len(first) == CRASHES_MAX else len(first))


def _replay(
    batches: Iterable[pa.RecordBatch], *, policies: Sequence[Policy | None], slices: Slices
) -> Iterator[pa.RecordBatch]:
    """Replay sorted chunks into changes, cut into slices."""
    opened: _Opened | None = None
    for batch in batches:
        for index in range(batch.num_rows):
            key = (batch["topic"][index].as_py(), batch["subscription"][index].as_py())
            if opened is None or opened.key != key:
                if opened is not None:
                    yield opened.end()
                log = {each["ledger_id"]: each["entry_count"] for each in batch["log"][index].as_py() or ()}
                opened = _Opened(key, SubscriptionReplay(policies, log), slices)
            yield opened.take(Chunk(*(_array(batch[name], index) for name in Chunk._fields)))
    if opened is not None:
        yield opened.end()


@final
class _Opened:
    """A subscription under replay."""

    def __init__(self, key: Key, replay: SubscriptionReplay, slices: Slices) -> None:
        self.key = key
        self._replay = replay
        self._slices = slices
        self._before = np.zeros((len(replay.curves), _SERIES), np.int64)

    def take(self, chunk: Chunk) -> pa.RecordBatch:
        return self._batch(self._replay.take(chunk))

    def end(self) -> pa.RecordBatch:
        return self._batch(self._replay.end(self._slices.end_ms))

    def _batch(self, found: Sequence[Points]) -> pa.RecordBatch:
        rows: list[tuple[int, int, Int64s, Series]] = []
        for policy, points in enumerate(found):
            ts_ms, delta = self._changes(policy, points)
            numbers = (ts_ms - self._slices.begin_ms) // self._slices.width_ms
            bounds = [*np.flatnonzero(np.diff(numbers, prepend=-1)).tolist(), len(numbers)]
            rows += [(policy, int(numbers[low]), ts_ms[low:high], delta[:, low:high]) for low, high in pairwise(bounds)]
        return _batch_of([(policy, number, *self.key, ts_ms, delta) for policy, number, ts_ms, delta in rows])

    def _changes(self, policy: int, points: Points) -> tuple[Int64s, Series]:
        """Return when the numbers change, and each of them by how much."""
        if not len(points.ts_ms):
            return np.empty(0, np.int64), np.empty((_SERIES, 0), np.int64)
        lasts = np.append(points.ts_ms[1:] != points.ts_ms[:-1], True)
        values = np.zeros((_SERIES, len(points.ts_ms)), np.int64)
        values[0] = points.value
        if points.causes is not None:
            values[1:] = points.causes
        values = np.where(points.is_alive, values, 0)[:, lasts]
        delta = np.diff(values, prepend=self._before[policy][:, None], axis=1)
        self._before[policy] = values[:, -1]
        at = delta.any(axis=0)
        return points.ts_ms[lasts][at], delta[:, at]


def _sum(batches: Iterable[pa.RecordBatch], *, wanted: frozenset[Key]) -> Iterator[pa.RecordBatch]:
    """Add up the changes of each slice: of all, and of each wanted subscription. A row has its peak and its end."""
    for (policy, number), of_slice in groupby(_rows(batches), key=lambda row: row[:2]):
        everything: list[tuple[Int64s, Series]] = []
        for key, of_one in groupby(of_slice, key=lambda row: row[2:4]):
            changes = [(row[4], row[5].reshape(_SERIES, -1)) for row in of_one]
            everything += changes
            if key in wanted:
                yield _batch_of([(policy, number, *key, *_peak_and_end(changes))])
        yield _batch_of([(policy, number, *_TOTAL, *_peak_and_end(everything))])


def _peak_and_end(changes: Sequence[tuple[Int64s, Series]]) -> tuple[Int64s, Series]:
    """Return when the first of the numbers is highest and when the last change is, and what has changed until both."""
    ts_ms = np.concatenate([times for times, _ in changes])
    delta = np.concatenate([each for _, each in changes], axis=1)
    times, at = np.unique(ts_ms, return_inverse=True)
    sums = np.zeros((_SERIES, len(times)), np.int64)
    for series in range(_SERIES):
        np.add.at(sums[series], at, delta[series])
    level = sums.cumsum(axis=1)
    peak = int(np.argmax(level[0]))
    return times[[peak, -1]], level[:, [peak, -1]]


def _string(batches: Iterable[pa.RecordBatch], *, per_point: int) -> Iterator[pa.RecordBatch]:
    """Turn what has changed since the begin of each slice into the numbers themselves; of many slices make one."""
    for key, of_line in groupby(_rows(batches), key=lambda row: (row[0], *row[2:4])):
        level = np.zeros((_SERIES, 1), np.int64)
        for point, of_point in groupby(of_line, key=lambda row: row[1] // per_point):
            times, values = np.empty(0, np.int64), np.empty((_SERIES, 0), np.int64)
            for row in of_point:
                reached = level + row[5].reshape(_SERIES, 2)
                times, values = np.append(times, row[4]), np.concatenate((values, reached), axis=1)
                peak = int(np.argmax(values[0]))
                times, values = times[[peak, -1]], values[:, [peak, -1]]
                level = reached[:, 1:]
            yield _batch_of([(key[0], point, *key[1:], times, values)])


def _drawn(key: tuple[int, str, str], rows: Sequence[Sequence[Any]], slices: Slices) -> Curve:
    """Return the curve of some points in order, of which there are none if nothing ever comes back."""
    points = [np.array(row[5], np.int64).reshape(_SERIES, 2) for row in rows]
    begin = np.zeros((_SERIES, 1), np.int64)
    end = points[-1][:, 1:] if points else begin
    ts_ms = np.concatenate([[slices.begin_ms], *(row[4] for row in rows), [slices.end_ms]])
    values = np.concatenate([begin, *points, end], axis=1)
    # A peak may be the end of its slice, and that the end of the trace; what happened in its first millisecond counts.
    lasts = np.append(ts_ms[1:] != ts_ms[:-1], True)
    value, *causes = (tuple(each) for each in values[:, lasts].tolist())
    return Curve(*key, tuple(ts_ms[lasts].tolist()), value, tuple(causes))


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, int, str, str, Int64s, Int64s]]:
    for batch in batches:
        for index in range(batch.num_rows):
            plain = [batch[name][index].as_py() for name in ("policy", "slice", "topic", "subscription")]
            yield (*plain, _array(batch["ts_ms"], index), _array(batch["delta"], index))


def _batch_of(rows: Sequence[tuple[int, int, str, str, Int64s, Int64s]]) -> pa.RecordBatch:
    *plain, ts_ms, delta = zip(*rows, strict=True) if rows else ((),) * len(_CHANGES)
    columns = [pa.array(column, field.type) for column, field in zip(plain, _CHANGES, strict=False)]
    return pa.RecordBatch.from_arrays([*columns, _lists(ts_ms), _lists(delta)], schema=_CHANGES)


def _lists(arrays: Sequence[Int64s]) -> pa.ListArray:
    """Return a list for each array, of more dimensions row by row."""
    offsets = np.cumsum([0, *(each.size for each in arrays)], dtype=np.int32)
    flat = np.concatenate([each.ravel() for each in arrays]) if arrays else np.empty(0, np.int64)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(np.int64, copy=False)))


def _array(column: pa.Array, index: int) -> Int64s:
    values: Int64s = column[index].values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return values
