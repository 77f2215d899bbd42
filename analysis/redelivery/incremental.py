"""Estimates over a growing directory of daily traces, of which a run reads only the days that are new.

The state of every subscription at the end of the last day, and what was found until then, is in a checkpoint. The
answer is the one that all days at once would give, if each day begins after the last event of the one before; only of
bytes written it is not known before a day ends how long a ledger without PUBLISH events will be, which is refused.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from analysis.redelivery.acked import Chunk
from analysis.redelivery.checkpoint import DAYS_KEPT, Checkpoint, claimed, keep, settings_of
from analysis.redelivery.checkpoint_codec import CheckpointError, decoded, encoded
from analysis.redelivery.curve_sum import Histogram
from analysis.redelivery.daily import days_of, files_of, fingerprint, unread
from analysis.redelivery.estimates import (
    _PART,
    _PART_SCHEMA,
    ESTIMATE_SCHEMA,
    SCOPES,
    Part,
    _array,
    _batches,
    _parts,
    _put_together,
    _Result,
    _sum,
    message_logs,
)
from analysis.redelivery.policy import PolicyError
from analysis.redelivery.slices import Slices, SliceWriter, namespace_of
from analysis.redelivery.spark import read_trace
from analysis.redelivery.subscription_replay import SubscriptionReplay
from analysis.trace.events import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from analysis.redelivery.policy import Policy

_KEY = ("topic", "subscription")
_RESULT_KEY = ("policy", "scope", "namespace", "topic", "subscription")
_RUN = pa.schema([*_PART, ("state", pa.string())])
_RUN_SCHEMA = f"{_PART_SCHEMA}, state string"
_CHUNKS_PER_SLICE = 64
# `seq` of a day is less than this, so that days can be put one after the other.
_DAY_SEQ = 2**44
_LOG = "array<struct<ledger_id:bigint,entry_count:bigint>>"


@dataclass(frozen=True, slots=True)
class DailyEstimates:
    """What all days up to now come to.

    Attributes:
        rows: As those of `analysis.redelivery.estimates.estimates`.
        days_read: The names of the days that this run has read.
        day_count: How many days there have been.
    """

    rows: list[dict[str, Any]]
    days_read: tuple[str, ...]
    day_count: int

    @property
    def text(self) -> str:
        """What was read, in a line."""
        read = f"read now: {', '.join(self.days_read)}" if self.days_read else "none of them is new"
        return f"{self.day_count} {'day' if self.day_count == 1 else 'days'}; {read}"


@contextmanager
def daily_estimates(
    spark: SparkSession, directory: Path, state: Path, policies: Sequence[Policy | None], *, crashes_per_day: float = 1
) -> Iterator[DailyEstimates]:
    """Estimate over all days of a directory, reading those that the state has not seen.

    The state is written when the block ends without an error: after the report, so that a run that fails can be
    repeated.

    Args:
        spark: The session, whose workers see both directories.
        directory: As `days_of` has it.
        state: A directory that is made if it is not there.
        policies: The same grid in every run; policies that `is_plain`, and the recording.
        crashes_per_day: As of `estimates`.

    Raises:
        PolicyError: A policy is not plain.
        TraceError: A day is missing, is no trace, or begins before the one before it has ended.
        CheckpointError: The state is damaged, of other policies, or in use; a day has changed since it was read.
        UnsupportedVersionError: A newer release wrote one of them.
        OSError: The disk is full or failed; the state is as it was.
    """
    check_policies(policies)
    days = days_of(directory)
    with claimed(state) as unfinished:
        before = Checkpoint.latest(state, policies)
        new = unread(directory, days, before)
        # Taken before they are read: what changes meanwhile is noticed the next time.
        seen = {**(before.days if before else {}), **{day.name: fingerprint(day) for day in new}}
        traces = [read_trace(spark, day).withColumn("day", F.lit(day.name)) for day in new if files_of(day)]
        after = before
        if new:
            begin_ms, end_ms, slices = _span(reduce(_union, traces), before) if traces else _no_span(before, directory)
            day_count = (before.day_count if before else 0) + len(new)
            days_kept = dict(list(seen.items())[-DAYS_KEPT:])
            place = state / f"{day_count:06}"
            after = Checkpoint(place, tuple(settings_of(policies)), day_count, days_kept, begin_ms, end_ms, {})
            _go_on(spark, _in_order(traces), before, unfinished, policies, slices)
        assert after is not None
        source = unfinished if new else after.path
        rows = _rows(spark, source, after.end_ms - after.begin_ms, crashes_per_day)
        yield DailyEstimates(rows, tuple(day.name for day in new), after.day_count)
        if new:
            keep(unfinished, after)


def check_policies(policies: Sequence[Policy | None]) -> None:
    """Make sure that policies can be gone on with from day to day.

    Raises:
        PolicyError: One is not plain: what the cursor then holds is not kept.
    """
    for policy in policies:
        if policy is not None and not policy.is_plain:
            raise PolicyError(
                f"policy: {policy.label} cannot be gone on with from day to day, for what it holds back or cuts off "
                "is not kept; replay it over all days at once, without --state"
            )


def _union(some: DataFrame, others: DataFrame) -> DataFrame:
    return some.unionByName(others)


def _span(trace: DataFrame, before: Checkpoint | None) -> tuple[int, int, Slices]:
    """Return when all days begin and end, and the new ones in slices, which begin where the old ones ended."""
    ends = (
        trace.groupBy("day")
        .agg(F.min("first_ts_ms").alias("begin"), F.max("last_ts_ms").alias("end"), F.count("*").alias("chunks"))
        .orderBy("day")
        .collect()
    )
    last, last_ms = (before.last_day, before.end_ms) if before else ("", None)
    for each in ends:
        if last_ms is not None and each["begin"] <= last_ms:
            raise TraceError(
                f"{each['day']}: it begins at {each['begin']} ms, and {last} ends at {last_ms} ms: a day begins after "
                "the one before it; cut them where no event is"
            )
        last, last_ms = each["day"], each["end"]
    begin_ms, end_ms = before.begin_ms if before else ends[0]["begin"], ends[-1]["end"]
    chunks = sum(each["chunks"] for each in ends)
    return begin_ms, end_ms, Slices.of(before.end_ms if before else begin_ms, end_ms, -(-chunks // _CHUNKS_PER_SLICE))


def _no_span(before: Checkpoint | None, directory: Path) -> tuple[int, int, Slices]:
    if before is None:
        raise TraceError(f"{directory}: no day has an event")
    return before.begin_ms, before.end_ms, Slices.of(before.end_ms, before.end_ms, 1)


def _in_order(traces: Sequence[DataFrame]) -> DataFrame | None:
    """Put days one after the other: the numbers of later events are higher."""
    numbered = [
        trace.withColumn("first_seq", F.col("first_seq") + F.lit(number * _DAY_SEQ))
        for number, trace in enumerate(traces)
    ]
    return reduce(_union, numbered) if numbered else None


def _go_on(  # noqa: PLR0913, PLR0917 - each is needed once
    spark: SparkSession, trace: DataFrame | None, before: Checkpoint | None, unfinished: Path,
    policies: Sequence[Policy | None], slices: Slices,
) -> None:  # fmt: skip
    """Replay new days from the states that there are, and write the states and results that follow."""
    staged = unfinished / "staged"
    replayed = _with_states(spark, trace, before).mapInArrow(
        partial(_replay, policies=policies, slices=slices), _RUN_SCHEMA
    )
    is_state = F.when(F.col("state").isNull(), "part").otherwise("state")
    replayed.withColumn("row", is_state).write.partitionBy("row").parquet(_url(staged))
    rows = spark.read.schema(f"{_RUN_SCHEMA}, row string").parquet(_url(staged))
    states = rows.where("row = 'state'").select(*_KEY, "state")
    states.write.option("compression", "zstd").parquet(_url(unfinished / "states"))
    parts = rows.where("row = 'part'").drop("state", "row")
    by_slice = parts.repartition("policy", "slice").sortWithinPartitions("policy", "slice", "namespace", "topic")
    found = by_slice.mapInArrow(partial(_sum, slices=slices), _PART_SCHEMA)
    if before is not None:
        found = found.unionByName(spark.read.schema(_PART_SCHEMA).parquet(_url(before.path / "results")))
    by_key = found.repartition(*_RESULT_KEY).sortWithinPartitions(*_RESULT_KEY)
    merged = by_key.mapInArrow(_merge, _PART_SCHEMA)
    merged.write.option("compression", "zstd").parquet(_url(unfinished / "results"))
    for each in sorted(staged.rglob("*"), reverse=True):
        each.rmdir() if each.is_dir() else each.unlink()
    staged.rmdir()


def _with_states(spark: SparkSession, trace: DataFrame | None, before: Checkpoint | None) -> DataFrame:
    """Return the chunks of each subscription, sorted, its state before them, and with each the log of its topic."""
    rows: list[DataFrame] = []
    if trace is not None:
        chunks = trace.where(F.col("subscription") != "").select(*_KEY, "first_seq", *Chunk._fields)
        rows.append(chunks.withColumn("state", F.lit(None).cast("string")))
    if before is not None:
        states = spark.read.schema("topic string, subscription string, state string").parquet(
            _url(before.path / "states")
        )
        rows.append(states.withColumn("first_seq", F.lit(-1).cast("bigint")))
    together = reduce(lambda some, others: some.unionByName(others, allowMissingColumns=True), rows)
    for name in Chunk._fields:
        if name not in together.columns:
            together = together.withColumn(name, F.lit(None).cast("array<bigint>"))
    if trace is None:
        together = together.withColumn("log", F.lit(None).cast(_LOG)).withColumn("is_published", F.lit(False))
    else:
        published = trace.where(F.col("subscription") == "").select("topic").distinct()
        logs = message_logs(trace).join(published.withColumn("is_published", F.lit(True)), on="topic", how="left")
        together = together.join(logs, on="topic", how="left")
    return together.repartition(*_KEY).sortWithinPartitions(*_KEY, "first_seq")


def _replay(
    batches: Iterable[pa.RecordBatch], *, policies: Sequence[Policy | None], slices: Slices
) -> Iterator[pa.RecordBatch]:
    open_one: _ContinuedSubscription | None = None
    for batch in batches:
        for index in range(batch.num_rows):
            key = (batch["topic"][index].as_py(), batch["subscription"][index].as_py())
            if open_one is None or open_one.key != key:
                if open_one is not None:
                    yield from open_one.end()
                log = {each["ledger_id"]: each["entry_count"] for each in batch["log"][index].as_py() or ()}
                is_published = bool(batch["is_published"][index].as_py())
                state = batch["state"][index].as_py()
                open_one = _ContinuedSubscription(key, policies, log, state, slices, is_published=is_published)
                if state is not None:
                    continue
            elif batch["state"][index].is_valid:
                raise CheckpointError(f"the state of subscription {key[1]!r} of {key[0]} is there twice")
            yield from open_one.take(Chunk(*(_array(batch[name], index) for name in Chunk._fields)))
    if open_one is not None:
        yield from open_one.end()


class _ContinuedSubscription:
    """One subscription, from its state at the end of the day before, if it was there.

    What it passes on of sums is what they have grown by, so that all runs add up to what one would have found.
    """

    def __init__(  # noqa: PLR0913 - what a row has
        self, key: tuple[str, str], policies: Sequence[Policy | None], log: dict[int, int], state: str | None,
        slices: Slices, *, is_published: bool,
    ) -> None:  # fmt: skip
        self.key = key
        self._names = (namespace_of(key[0]), *key)
        self._policies = policies
        self._slices = slices
        self._is_published = is_published
        self._writers = [SliceWriter(slices) for _ in policies]
        if state is None:
            self._replay = SubscriptionReplay(policies, log)
        else:
            self._replay = decoded(state, policies)
            try:
                self._replay.grow(log)
            except TraceError as error:
                raise TraceError(f"subscription {key[1]!r} of {key[0]}: {error}") from None
            for writer, curve in zip(self._writers, self._replay.curves, strict=True):
                writer.go_on(curve.sum.standing)
        self._before = [self._sums(policy) for policy in range(len(policies))]

    def take(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        """Take the next chunk in, and return what is ready to be passed on."""
        for policy, points in enumerate(self._replay.take(chunk)):
            for change in self._writers[policy].changes(points):
                yield from self._passed_on(Part(policy, change.number, SCOPES[0], *self._names, *change[1:], None))
            if self._replay.curves[policy].sum.histogram.is_large:
                yield from self._histogram(policy, None)

    def end(self) -> Iterator[pa.RecordBatch]:
        """Return the rest, and the state to go on with."""
        for policy, points in enumerate(self._replay.end(self._slices.end_ms)):
            writer = self._writers[policy]
            for change in (*writer.changes(points), *writer.end()):
                yield from self._passed_on(Part(policy, change.number, SCOPES[0], *self._names, *change[1:], None))
            peak, peak_ts_ms, *sums = self._sums(policy)
            grown = np.array(sums) - np.array(self._before[policy][2:])
            yield from self._histogram(policy, [peak, peak_ts_ms, *grown.tolist()])
        if self._is_published:
            self._replay.forget_complete()
        values = dict.fromkeys(_RUN.names) | {"topic": self.key[0], "subscription": self.key[1]}
        values["state"] = encoded(self._replay, self._policies)
        yield pa.RecordBatch.from_pylist([values], _RUN)

    def _sums(self, policy: int) -> list[int | None]:
        curve = self._replay.curves[policy]
        return [curve.sum.peak, curve.sum.peak_ts_ms, *curve.sum.cause_sums.tolist(), *curve.costs]

    def _histogram(self, policy: int, sums: Sequence[int | None] | None) -> Iterator[pa.RecordBatch]:
        curve = self._replay.curves[policy]
        part = Part(policy, -1, SCOPES[0], *self._names, 0, *curve.sum.histogram.columns(), sums)
        curve.sum.histogram = Histogram()
        yield from self._passed_on(part)

    @staticmethod
    def _passed_on(part: Part) -> Iterator[pa.RecordBatch]:
        for batch in _batches([part]):
            yield pa.RecordBatch.from_arrays([*batch.columns, pa.nulls(batch.num_rows, pa.string())], schema=_RUN)


def _merge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Put the parts of each estimate together."""
    result: _Result | None = None
    for part in _parts(batches):
        if result is None or not result.is_of(part):
            if result is not None:
                yield from _batches([result.part()])
            result = _Result(part)
        result.add(part)
    if result is not None:
        yield from _batches([result.part()])


def _rows(spark: SparkSession, checkpoint: Path, duration_ms: int, crashes_per_day: float) -> list[dict[str, Any]]:
    results = spark.read.schema(_PART_SCHEMA).parquet(_url(checkpoint / "results"))
    by_key = results.repartition(*_RESULT_KEY).sortWithinPartitions(*_RESULT_KEY)
    found = by_key.mapInArrow(partial(_put_together, duration_ms=duration_ms), ESTIMATE_SCHEMA)
    rate = F.col("expected") * F.lit(float(crashes_per_day))
    return [row.asDict() for row in found.withColumn("duplicates_per_day", rate).collect()]


def _url(path: Path) -> str:
    return f"file://{path.absolute()}"
