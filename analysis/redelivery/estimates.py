"""Redelivery if crashed under every policy of a grid: exact for every instant, for each subscription and their sums.

Four steps. Chunks are made small wherever they are read; every subscription is replayed under all policies at once;
the curves of a slice of time are added up for topics, namespaces and all; what was found for each is put together. On
the driver there is a row for each estimate, and nothing else.

A worker sees sorted rows and holds of them 64 chunks, one subscription's acks as bitmaps for each recovery that
policies see differently, and of each curve up to 130,000 values, whatever the length of the trace; of a slice it holds
the curves of all subscriptions.

A subscription with most of the trace is read and made small on all cores; what is left to do one chunk after another
is a small part. Policies that need the cursor itself (limits, young age, Pulsar's format, wrong route) see whole
chunks, and replay one subscription on one core.
"""

from __future__ import annotations

from functools import partial, reduce
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from analysis.redelivery.curve_sum import CAUSES, Histogram, quantile
from analysis.redelivery.slices import Slices, SliceWriter, namespace_of, sum_slices
from analysis.redelivery.sorted_chunks import by_subscription, is_counted, sorted_chunks
from analysis.redelivery.subscription_replay import Costs, SubscriptionReplay
from analysis.redelivery.trace_source import source_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from analysis.redelivery.acked import Chunk, Int64s
    from analysis.redelivery.policy import Policy
    from analysis.redelivery.trace_source import TraceSource

SCOPES = ("subscription", "topic", "namespace", "total")
_KEY = ("policy", "scope", "namespace", "topic", "subscription")
_PART = pa.schema([
    ("policy", pa.int32()), ("slice", pa.int32()), ("scope", pa.string()), ("namespace", pa.string()),
    ("topic", pa.string()), ("subscription", pa.string()), ("begin", pa.int64()),
    ("first", pa.list_(pa.int64())), ("second", pa.list_(pa.int64())), ("sums", pa.list_(pa.int64())),
])  # fmt: skip
_PART_SCHEMA = (
    "policy int, slice int, scope string, namespace string, topic string, subscription string, begin bigint, "
    "first array<bigint>, second array<bigint>, sums array<bigint>"
)
_COUNTS = ("p50", "p90", "p99", "max", "max_ts_ms")
_COSTS = Costs._fields
ESTIMATE_SCHEMA = (
    "policy int, scope string, namespace string, topic string, subscription string, expected double, "
    + "".join(f"{name} bigint, " for name in _COUNTS)
    + "not_flushed double, "
    + "".join(f"{name} double, " for name in CAUSES)
    + ", ".join(f"{name} bigint" for name in (*_COSTS, "duration_ms"))
)
_ESTIMATE = pa.schema(
    [
        (name, {"int": pa.int32(), "string": pa.string(), "double": pa.float64(), "bigint": pa.int64()}[kind])
        for name, kind in (field.split() for field in ESTIMATE_SCHEMA.split(", "))
    ]
)
_CHUNKS_PER_SLICE = 64
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
        sums: Peak, when, `CAUSES` in messages times ms, and `Costs`; None in all parts of a result but one.
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


def estimates(
    trace: DataFrame | TraceSource,
    policies: Sequence[Policy | None],
    *,
    scopes: Sequence[str] = SCOPES,
    crashes_per_day: float = 1,
) -> DataFrame:
    """Estimate what a crash at any instant of a trace brings back, under each policy of a grid.

    All numbers are over the whole trace, from its first event to its last, so that those of subscriptions add up to
    those of their topic. Before its first event, and while its process is dead, nothing of a subscription comes back;
    after its last one the broker goes on to tick.

    Args:
        trace: Columns as in `analysis.trace.events`, or better the files themselves, which is much faster.
        policies: The grid; `AS_RECORDED` is the recording itself.
        scopes: Of `SCOPES`, for which: a topic is what its unload redelivers, ``total`` a crash of the broker.
        crashes_per_day: The rate for which duplicates are counted.

    Returns:
        ``policy``: index in the grid; ``scope, namespace, topic, subscription``: what it is for, empty beyond the
        scope; ``expected``: mean over time, null if no time passed, as the next three; ``p50, p90, p99``: the least
        number that holds for that share of the time; ``max, max_ts_ms``: the most, and when first, null if it is 0: of
        a subscription at any event, of others at the end of any millisecond; ``not_flushed, young, cut_by_ranges,
        cut_by_bytes, cut_by_route``: expected by cause; they add up to it, and as recorded are told by the trace;
        ``write_count, bytes_written, bytes_kept, bytes_kept_max, blocked_ms``: as `Costs`, summed up; ``duration_ms``:
        of the trace; ``duplicates_per_day``.
    """
    source = source_of(trace)
    span = source.span()
    if not span.chunk_count:
        spark = SparkSession.getActiveSession()
        assert spark is not None
        return spark.createDataFrame([], f"{ESTIMATE_SCHEMA}, duplicates_per_day double")
    slice_count = -(-span.chunk_count // _CHUNKS_PER_SLICE) if set(scopes) != {"subscription"} else 0
    slices = Slices.of(span.begin_ms, span.end_ms, slice_count)
    parts = reduce(DataFrame.union, [
        sorted_chunks(source, [policies[number] for number in numbers]).mapInArrow(
            partial(_replay, policies=policies, slices=slices, numbers=numbers), _PART_SCHEMA
        )
        for numbers in _alike(policies)
    ])  # fmt: skip
    if slice_count:
        by_slice = parts.repartition("policy", "slice").sortWithinPartitions("policy", "slice", "namespace", "topic")
        parts = by_slice.mapInArrow(partial(_sum, slices=slices), _PART_SCHEMA)
    by_key = parts.where(F.col("scope").isin(*scopes)).repartition(*_KEY).sortWithinPartitions(*_KEY)
    found = by_key.mapInArrow(partial(_put_together, duration_ms=slices.end_ms - slices.begin_ms), ESTIMATE_SCHEMA)
    return found.withColumn("duplicates_per_day", F.col("expected") * F.lit(float(crashes_per_day)))


def _alike(policies: Sequence[Policy | None]) -> list[list[int]]:
    """Return which policies are counted and which need the cursor, without those of which there are none."""
    found: dict[bool, list[int]] = {True: [], False: []}
    for number, policy in enumerate(policies):
        found[is_counted(policy)].append(number)
    return [numbers for numbers in found.values() if numbers]


def _replay(
    batches: Iterable[pa.RecordBatch],
    *,
    policies: Sequence[Policy | None],
    slices: Slices,
    numbers: Sequence[int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Replay sorted chunks under some policies, and write down what each subscription's curves come to."""
    mine = range(len(policies)) if numbers is None else numbers
    yield from _batches(_parts_of_chunks(batches, [policies[number] for number in mine], slices, mine))


def _parts_of_chunks(
    batches: Iterable[pa.RecordBatch], policies: Sequence[Policy | None], slices: Slices, numbers: Sequence[int]
) -> Iterator[Part]:
    for key, log, chunks in by_subscription(batches):
        subscription = _Subscription(key, policies, log, slices)
        for chunk in chunks:
            yield from _numbered(subscription.take(chunk), numbers)
        yield from _numbered(subscription.end(), numbers)


def _numbered(parts: Iterable[Part], numbers: Sequence[int]) -> Iterator[Part]:
    return (part._replace(policy=numbers[part.policy]) for part in parts)


class _Subscription:
    def __init__(
        self, key: tuple[str, str], policies: Sequence[Policy | None], log: dict[int, int], slices: Slices
    ) -> None:
        self._names = (namespace_of(key[0]), *key)
        self._slices = slices
        self._replay = SubscriptionReplay(policies, log)
        self._writers = [SliceWriter(slices) for _ in policies]

    def take(self, chunk: Chunk) -> Iterator[Part]:
        """Take the next chunk in, and return what is ready to be passed on."""
        for policy, points in enumerate(self._replay.take(chunk)):
            for change in self._writers[policy].changes(points):
                yield Part(policy, change.number, SCOPES[0], *self._names, *change[1:], None)
            yield from self._large_histogram(policy)

    def end(self) -> Iterator[Part]:
        """Return the rest."""
        for policy, points in enumerate(self._replay.end(self._slices.end_ms)):
            changes = self._writers[policy]
            for change in (*changes.changes(points), *changes.end()):
                yield Part(policy, change.number, SCOPES[0], *self._names, *change[1:], None)
            curve = self._replay.curves[policy]
            sums = [curve.sum.peak, curve.sum.peak_ts_ms, *curve.sum.cause_sums.tolist(), *curve.costs]
            yield Part(policy, -1, SCOPES[0], *self._names, 0, *curve.sum.histogram.columns(), sums)

    def _large_histogram(self, policy: int) -> Iterator[Part]:
        curve = self._replay.curves[policy]
        if curve.sum.histogram.is_large:
            yield Part(policy, -1, SCOPES[0], *self._names, 0, *curve.sum.histogram.columns(), None)
            curve.sum.histogram = Histogram()


def _sum(batches: Iterable[pa.RecordBatch], *, slices: Slices) -> Iterator[pa.RecordBatch]:
    """Add up the curves of each slice; what is a result already passes, and its costs count for all scopes."""
    yield from _batches(sum_slices(_parts(batches), slices))


def _put_together(batches: Iterable[pa.RecordBatch], *, duration_ms: int) -> Iterator[pa.RecordBatch]:
    rows: list[dict[str, object]] = []
    result: _Result | None = None
    for part in _parts(batches):
        if result is None or not result.is_of(part):
            if result is not None:
                rows.append(result.row(duration_ms))
            result = _Result(part)
        result.add(part)
    if result is not None:
        rows.append(result.row(duration_ms))
    if rows:
        yield pa.RecordBatch.from_pylist(rows, _ESTIMATE)


class _Result:
    """One estimate, from its parts."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._histogram = Histogram()
        self._peak: tuple[int, int] | None = None
        self._sums = np.zeros(len(CAUSES) + len(_COSTS), np.int64)

    def is_of(self, part: Part) -> bool:
        """Whether a part belongs to it."""
        mine, theirs = self._part, part
        return all(getattr(mine, name) == getattr(theirs, name) for name in _KEY)

    def add(self, part: Part) -> None:
        """Take a part in."""
        self._histogram.add(part.first, part.second)
        if part.sums is not None:
            peak, peak_ts_ms, *sums = part.sums
            self._sums += np.array(sums, np.int64)
            # Where nothing ever comes back there is no time at which most does.
            if peak and peak_ts_ms is not None and (self._peak is None or (-(peak or 0), peak_ts_ms) < self._peak):
                self._peak = (-(peak or 0), peak_ts_ms)

    def part(self) -> Part:
        """Return what was found so far as one part, to which more can be added."""
        peak, peak_ts_ms = self._peak or (0, None)
        first, second = self._histogram.columns()
        return self._part._replace(begin=0, first=first, second=second, sums=[-peak, peak_ts_ms, *self._sums.tolist()])

    def row(self, duration_ms: int) -> dict[str, object]:
        """Return it."""
        values, durations = self._histogram.columns()
        # When nothing of it was there, nothing could come back.
        self._histogram.add(np.zeros(1, np.int64), np.array([duration_ms - int(durations.sum())]))
        values, durations = self._histogram.columns()
        weight = int(values @ durations)
        causes = self._sums[: len(CAUSES)].tolist()
        by_cause = dict(zip(("not_flushed", *CAUSES), (weight - sum(causes), *causes), strict=True))
        means = {name: number / duration_ms if duration_ms else None for name, number in by_cause.items()}
        shares = {name: quantile(values, durations, int(name[1:]) / 100) for name in ("p50", "p90", "p99")}
        peak, peak_ts_ms = self._peak or (0, None)
        names = {name: getattr(self._part, name) for name in _KEY}
        costs = dict(zip(_COSTS, self._sums[len(CAUSES) :].tolist(), strict=True))
        expected = weight / duration_ms if duration_ms else None
        return {
            **names, "expected": expected, **shares, "max": -peak, "max_ts_ms": peak_ts_ms,
            **means, **costs, "duration_ms": duration_ms,
        }  # fmt: skip


def _parts(batches: Iterable[pa.RecordBatch]) -> Iterator[Part]:
    for batch in batches:
        columns = [
            _slices(batch[name]) if name in {"first", "second"} else batch[name].to_pylist() for name in Part._fields
        ]
        yield from map(Part._make, zip(*columns, strict=True))


def _slices(column: pa.Array) -> Iterator[Int64s]:
    """Return the rows of a list column, which share its memory."""
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return (values[begin:end] for begin, end in pairwise(offsets.tolist()))


def _batches(parts: Iterable[Part]) -> Iterator[pa.RecordBatch]:
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
        _lists(values) if field.name in {"first", "second"} else pa.array(values, field.type)
        for field, values in zip(_PART, zip(*parts, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_PART)


def _lists(rows: Sequence[Int64s]) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, rows)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(_flat(rows)))


def _flat(arrays: Sequence[Int64s]) -> Int64s:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
