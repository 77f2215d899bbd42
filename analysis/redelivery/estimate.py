"""Redelivery if crashed: at every instant of a trace, how many acked messages would come back?

Spark moves whole chunks: they are brought together by subscription, sorted, and replayed by `RedeliveryFold` inside a
Python worker that sees arrays. Nothing on the driver grows with the trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from ackstate.analysis.redelivery.fold import Folded, RedeliveryFold
from ackstate.analysis.redelivery.policy import AS_RECORDED
from ackstate.analysis.redelivery.sorted_chunks import by_subscription, sorted_chunks
from ackstate.analysis.redelivery.spark_rows import SparkRows
from ackstate.analysis.redelivery.spark_source import SparkSource
from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ackstate.analysis.redelivery.acked import Chunk
    from ackstate.analysis.redelivery.trace_source import TraceSource

CURVE_SCHEMA = (
    "topic string, subscription string, ts_ms bigint, until_ms bigint, redelivery bigint, redelivery_max bigint, "
    "at_crash bigint, at_crash_if_written bigint, persisting_at_crash boolean"
)
_SUBSCRIPTION = ("topic", "subscription")


def curve(trace: DataFrame | TraceSource) -> DataFrame:
    """Replay a trace into steps: one row for each millisecond in which something happened to a subscription.

    Args:
        trace: Columns as in `ackstate.analysis.trace.events`, or better the files themselves, which is much faster.

    Returns:
        ``topic, subscription, ts_ms``; ``until_ms``: the step holds from `ts_ms` (included) to here (excluded), which
        is `ts_ms` itself at the end of the trace and while the process is dead; ``redelivery``: messages that a crash
        in this step would bring back; ``redelivery_max``: the most at any event within the millisecond; ``at_crash``,
        ``at_crash_if_written``, ``persisting_at_crash``: if the process died here, what the crash brings back, what it
        would had the persist under way been written, and whether there was one; else null.
    """
    rows = sorted_chunks(SparkSource(trace) if isinstance(trace, DataFrame) else trace, [AS_RECORDED])
    assert isinstance(rows, SparkRows)
    return rows.frame.mapInArrow(_replay, CURVE_SCHEMA)


def summary(steps: DataFrame) -> DataFrame:
    """Sum a curve up, one row for each subscription.

    Args:
        steps: What `curve` returns.

    Returns:
        ``topic, subscription``; ``expected``: mean over time; ``p50, p99``: the least number that holds for that share
        of the time; ``max``: the most at any event.
    """
    weighted = steps.withColumn("duration_ms", F.col("until_ms") - F.col("ts_ms"))
    every = Window.partitionBy(*_SUBSCRIPTION)
    upwards = every.orderBy("redelivery").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    by_value = weighted.groupBy(*_SUBSCRIPTION, "redelivery").agg(
        F.sum("duration_ms").alias("duration_ms"), F.max("redelivery_max").alias("redelivery_max")
    )
    # A trace of a single millisecond has no duration: every share is null, and so are the mean and the quantiles.
    ranked = by_value.withColumn(
        "share", F.try_divide(F.sum("duration_ms").over(upwards), F.sum("duration_ms").over(every))
    )
    # A century of millions of messages takes more than 64 bits.
    weight = F.col("redelivery").cast("decimal(19,0)") * F.col("duration_ms").cast("decimal(19,0)")
    return ranked.groupBy(*_SUBSCRIPTION).agg(
        F.try_divide(F.sum(weight).cast("double"), F.sum("duration_ms")).alias("expected"),
        F.min(F.when(F.col("share") >= 0.50, F.col("redelivery"))).alias("p50"),
        F.min(F.when(F.col("share") >= 0.99, F.col("redelivery"))).alias("p99"),
        F.max("redelivery_max").alias("max"),
    )


def crashes(steps: DataFrame) -> DataFrame:
    """Pick the crashes out of a curve.

    Returns:
        ``topic, subscription, ts_ms, at_crash, at_crash_if_written, persisting_at_crash`` as `curve` has them.
    """
    return steps.where(F.col("at_crash").isNotNull()).select(
        *_SUBSCRIPTION, "ts_ms", "at_crash", "at_crash_if_written", "persisting_at_crash"
    )


def timeline(steps: DataFrame, *, points: int) -> DataFrame:
    """Thin a curve out for a plot: equal slices of the whole trace's time, the highest step of each kept.

    Returns:
        ``topic, subscription, ts_ms`` of the slice's begin; ``redelivery``: the number at the end of the slice;
        ``redelivery_max``: the most in it. Slices in which nothing happened are left out.
    """
    span = steps.agg(F.min("ts_ms").alias("begin_ms"), F.max("until_ms").alias("end_ms"))
    width = F.ceil((F.col("end_ms") - F.col("begin_ms") + 1) / points)
    slice_begin = F.col("begin_ms") + F.floor((F.col("ts_ms") - F.col("begin_ms")) / width) * width
    return (
        steps.crossJoin(F.broadcast(span))
        .withColumn("slice_ts_ms", slice_begin)
        .groupBy(*_SUBSCRIPTION, "slice_ts_ms")
        .agg(
            F.max_by("redelivery", F.struct("ts_ms", "until_ms")).alias("redelivery"),
            F.max("redelivery_max").alias("redelivery_max"),
        )
        .select(*_SUBSCRIPTION, F.col("slice_ts_ms").alias("ts_ms"), "redelivery", "redelivery_max")
    )


def _replay(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Replay sorted chunks; a subscription's last step waits for the next chunk to learn when it ends."""
    for key, _, chunks in by_subscription(batches):
        fold = RedeliveryFold()
        waiting: _Steps | None = None
        for chunk in chunks:
            steps = _Steps(chunk, fold.fold(chunk))
            if waiting is not None:
                yield waiting.batch(key, followed_by=steps)
            waiting = steps
        if waiting is not None:
            yield waiting.batch(key)


class _Steps:
    """A chunk's events gathered by millisecond."""

    def __init__(self, chunk: Chunk, folded: Folded) -> None:
        self.ts_ms, begins = np.unique(chunk.ts_ms, return_index=True)
        ends = np.append(begins[1:], len(chunk.ts_ms))
        self._redelivery = folded.redelivery[ends - 1]
        self._redelivery_max = np.maximum.reduceat(folded.redelivery, begins)
        self._alive = folded.alive[ends - 1]
        crashed = np.flatnonzero(chunk.kind == EventKind.CRASH)
        # The last crash of a millisecond stands for it.
        self._crash_of_step = np.full(len(self.ts_ms), -1)
        self._crash_of_step[np.searchsorted(self.ts_ms, chunk.ts_ms[crashed])] = crashed
        self._folded = folded

    def batch(self, key: tuple[str, str], *, followed_by: _Steps | None = None) -> pa.RecordBatch:
        """Return the steps as rows of `CURVE_SCHEMA`; the last one lasts until the next chunk's first."""
        last_until = self.ts_ms[-1] if followed_by is None else followed_by.ts_ms[0]
        until_ms = np.where(self._alive, np.append(self.ts_ms[1:], last_until), self.ts_ms)
        crash = self._crash_of_step
        none = crash < 0
        count = len(self.ts_ms)
        return pa.RecordBatch.from_arrays(
            [
                pa.array([key[0]] * count),
                pa.array([key[1]] * count),
                pa.array(self.ts_ms),
                pa.array(until_ms),
                pa.array(self._redelivery),
                pa.array(self._redelivery_max),
                pa.array(self._folded.redelivery[crash], mask=none),
                pa.array(self._folded.if_written[crash], mask=none),
                pa.array(self._folded.persisting[crash], mask=none),
            ],
            names=[field.split()[0] for field in CURVE_SCHEMA.split(", ")],
        )
