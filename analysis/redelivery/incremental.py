"""Estimates over a growing directory of daily traces, of which a run reads only the days that are new.

The state of every subscription at the end of the last day, and what was found until then, is in a checkpoint. The
answer is the one that all days at once would give, if each day begins after the last event of the one before; only of
bytes written it is not known before a day ends how long a ledger without PUBLISH events will be, which is refused.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type
from pyspark.sql.types import LongType, StringType, StructField, StructType

from ackstate.analysis.redelivery.checkpoint import DAYS_KEPT, RESTART, Checkpoint, claimed, keep, settings_of
from ackstate.analysis.redelivery.chunk_steps import (
    LEDGERS,
    LOG,
    PACKED,
    chunk_columns,
    ledger_columns,
    ledgers,
    packed_chunks,
)
from ackstate.analysis.redelivery.curve_changes import (
    CHANGES,
    CRASHES_MAX,
    SERIES,
    SLICES_MAX,
    string_together,
    sum_changes,
)
from ackstate.analysis.redelivery.daily import days_of, files_of, fingerprint, unread
from ackstate.analysis.redelivery.daily_state import BrokerState, decoded, decoded_broker, encoded_broker
from ackstate.analysis.redelivery.daily_subscription import CRASHES, CURVE, RUN, DailySubscription, Days
from ackstate.analysis.redelivery.parts import ESTIMATE, PART, RESULT_KEY, add_slices, merge, put_together
from ackstate.analysis.redelivery.slices import Slices
from ackstate.analysis.redelivery.sorted_chunks import check_chunks
from ackstate.analysis.redelivery.spark import parquet_frame, readable_failures
from ackstate.analysis.redelivery.spark_source import SparkSource
from ackstate.analysis.redelivery.state_fields import CheckpointError
from ackstate.analysis.redelivery.thinned_curve import ThinnedCurve
from ackstate.analysis.redelivery.thinning import unpacked
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.times import RULE, WALL_CLOCK_MS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, Row, SparkSession

    from ackstate.analysis.redelivery.policy import Policy
    from ackstate.analysis.trace.parquet import Span

_KEY = ("topic", "subscription")
_CHUNKS_PER_SLICE = 64
_RUN, _PART, _CHANGES, _ESTIMATE = map(from_arrow_schema, (RUN, PART, CHANGES, ESTIMATE))
_LOG = from_arrow_type(LOG)
_STATES = StructType([StructField(name, StringType()) for name in (*_KEY, "state")])
_LEDGERS = StructType([
    StructField("topic", StringType()), StructField("ledger_id", LongType()), StructField("entry_count", LongType()),
])  # fmt: skip
# `seq` of a day is less than this, so that days can be put one after the other.
_DAY_SEQ = 2**44


@dataclass(frozen=True, slots=True)
class DailyEstimates:
    """What all days up to now come to.

    Attributes:
        rows: As those of `ackstate.analysis.redelivery.estimates.estimates`.
        days_read: The names of the days that this run has read.
        day_count: How many days there have been.
        begin_ms: Their first event.
        end_ms: Their last one.
        broker: What is known of all subscriptions together.
        states: ``topic, subscription, state`` of each subscription, while the state is at hand.
    """

    rows: list[dict[str, Any]]
    days_read: tuple[str, ...]
    day_count: int
    begin_ms: int
    end_ms: int
    broker: BrokerState
    states: DataFrame

    @property
    def text(self) -> str:
        """What was read, in a line."""
        read = f"read now: {', '.join(self.days_read)}" if self.days_read else "none of them is new"
        return f"{self.day_count} {'day' if self.day_count == 1 else 'days'}; {read}"

    def curves_of(self, key: tuple[str, str], policies: Sequence[Policy | None]) -> list[ThinnedCurve]:
        """Return a subscription's own curves, one for each policy of the grid."""
        (row,) = self.states.where((F.col("topic") == key[0]) & (F.col("subscription") == key[1])).collect()
        return decoded(row["state"], policies).curves


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
        policies: The same grid in every run; those that `persistable` finds, and the recording.
        crashes_per_day: As of `estimates`.

    Raises:
        TraceError: A day is missing, is no trace, or begins before the one before it has ended.
        CheckpointError: The state is damaged, of other policies, or in use; a day has changed since it was read.
        UnsupportedVersionError: A newer release wrote one of them.
        OSError: The disk is full or failed; the state is as it was.
    """
    days = days_of(directory)
    with claimed(state) as unfinished:
        before = Checkpoint.latest(state, policies)
        new = unread(directory, days, before)
        # Taken before they are read: what changes meanwhile is noticed the next time.
        prints = {day.name: fingerprint(day) for day in new}
        after = _read(spark, directory, new, before, unfinished, policies, prints) if new else before
        assert after is not None
        source = unfinished if new else after.path
        yield DailyEstimates(
            _rows(spark, source, after.end_ms - after.begin_ms, crashes_per_day), tuple(prints), after.day_count,
            after.begin_ms, after.end_ms, _broker(after), _states(spark, source),
        )  # fmt: skip
        if new:
            keep(unfinished, after)


def _read(  # noqa: PLR0913, PLR0917 - each is needed once
    spark: SparkSession, directory: Path, new: Sequence[Path], before: Checkpoint | None, unfinished: Path,
    policies: Sequence[Policy | None], prints: Mapping[str, str],
) -> Checkpoint:  # fmt: skip
    """Read new days, write what they lead to, and return the checkpoint that is to be kept."""
    spans: dict[str, Span] = {}
    traces = []
    for day in new:
        if files_of(day):
            source = SparkSource.of(spark, day)
            with readable_failures(day):
                check_chunks(source)
            spans[day.name] = source.span()
            traces.append(source)
    begin_ms, slices, chunks = _span(spans, before) if spans else _no_span(before, directory)
    broker = BrokerState([ThinnedCurve(begin_ms, slices_max=SLICES_MAX) for _ in policies], [], 0, "")
    if before is not None:
        broker = _broker(before)
    for curve in broker.curves:
        curve.widen_until(slices.end_ms)
    days = Days(begin_ms, slices, _plotted(begin_ms, slices, broker.curves[0].width_ms, chunks))
    named = reduce(_union, map(_ledgers, traces)) if traces else None
    _go_on(spark, _in_order(traces), named, before, unfinished, policies, days, broker)
    for each in prints.values():
        broker.days_digest = hashlib.sha256((broker.days_digest + each).encode()).hexdigest()
    day_count = (before.day_count if before else 0) + len(new)
    kept = dict(list({**(before.days if before else {}), **prints}.items())[-DAYS_KEPT:])
    return Checkpoint(
        unfinished.with_name(f"{day_count:06}"), tuple(settings_of(policies)), day_count, kept, begin_ms,
        slices.end_ms, encoded_broker(broker), {},
    )  # fmt: skip


def _broker(checkpoint: Checkpoint) -> BrokerState:
    try:
        return decoded_broker(checkpoint.broker, len(checkpoint.policies))
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: broker: {error}; {RESTART}") from None


def _union(some: DataFrame, others: DataFrame) -> DataFrame:
    return some.unionByName(others)


def _span(spans: Mapping[str, Span], before: Checkpoint | None) -> tuple[int, Slices, int]:
    """Return when all days begin, the new ones in slices, which begin where the old ones ended, and their chunks."""
    last, last_ms = (before.last_day, before.end_ms) if before else ("", None)
    for name, covered in spans.items():
        if last_ms is not None and covered.begin_ms <= last_ms:
            raise TraceError(
                f"{name}: it begins at {covered.begin_ms} ms, and {last} ends at {last_ms} ms: a day begins after "
                "the one before it; cut them where no event is"
            )
        if last_ms is not None and (covered.begin_ms in WALL_CLOCK_MS) != (last_ms in WALL_CLOCK_MS):
            raise TraceError(
                f"{name}: all days must have times of the same clock, got {covered.begin_ms} ms after {last} ended at "
                f"{last_ms} ms: write {RULE}"
            )
        last, last_ms = name, covered.end_ms
    every = list(spans.values())
    begin_ms, end_ms = before.begin_ms if before else every[0].begin_ms, every[-1].end_ms
    chunks = sum(each.chunk_count for each in every)
    slices = Slices.of(before.end_ms if before else begin_ms, end_ms, -(-chunks // _CHUNKS_PER_SLICE))
    return begin_ms, slices, chunks


def _no_span(before: Checkpoint | None, directory: Path) -> tuple[int, Slices, int]:
    if before is None:
        raise TraceError(f"{directory}: no day has an event")
    return before.begin_ms, Slices.of(before.end_ms, before.end_ms, 1), 0


def _plotted(begin_ms: int, slices: Slices, width_ms: int, chunks: int) -> Slices:
    """Return slices of which some make up one of a curve, each small enough for a worker to add up."""
    first_ms = begin_ms + (slices.begin_ms - begin_ms) // width_ms * width_ms
    span_ms = slices.end_ms - first_ms + 1
    while width_ms > 1 and chunks * width_ms > _CHUNKS_PER_SLICE * span_ms:
        width_ms //= 2
    return Slices(first_ms, slices.end_ms, width_ms, -(-span_ms // width_ms))


def _in_order(traces: Sequence[SparkSource]) -> DataFrame | None:
    """Put the chunks of days one after the other: the numbers of later events are higher."""
    numbered = [
        _packed(trace).withColumn("first_seq", F.col("first_seq") + F.lit(number * _DAY_SEQ))
        for number, trace in enumerate(traces)
    ]
    return reduce(_union, numbered) if numbered else None


def _packed(trace: SparkSource) -> DataFrame:
    pack = partial(packed_chunks, is_counted=False)
    return trace.read(chunk_columns(is_packed=trace.is_packed), pack, PACKED).frame


def _go_on(  # noqa: PLR0913, PLR0917 - each is needed once
    spark: SparkSession, trace: DataFrame | None, named: DataFrame | None, before: Checkpoint | None, unfinished: Path,
    policies: Sequence[Policy | None], days: Days, broker: BrokerState,
) -> None:  # fmt: skip
    """Replay new days from the states that there are, and write the states and results that follow."""
    staged = unfinished / "staged"
    new = None if named is None else _highest(named).cache()
    known = [] if new is None else [new]
    if before is not None:
        known.append(_kept_ledgers(spark, before.path))
    _highest(reduce(_union, known)).write.parquet(_url(unfinished / "logs"))
    replayed = _with_states(spark, trace, before, new, _kept_ledgers(spark, unfinished)).mapInArrow(
        partial(_replay, policies=policies, days=days, states="" if before is None else f"{before.path}/states"), _RUN
    )
    kind = F.when(F.col("state").isNotNull(), "state").when(F.col("scope").isin(CURVE, CRASHES), F.col("scope"))
    replayed.withColumn("row", kind.otherwise("part")).write.partitionBy("row").parquet(_url(staged))
    if new is not None:
        new.unpersist()
    rows = parquet_frame(spark, StructType([*_RUN, StructField("row", StringType())]), staged)
    states = rows.where("row = 'state'").select(*_KEY, "state")
    states.write.option("compression", "zstd").parquet(_url(unfinished / "states"))
    parts = rows.where("row = 'part'").drop("state", "row")
    by_slice = parts.repartition("policy", "slice").sortWithinPartitions("policy", "slice", "namespace", "topic")
    found = by_slice.mapInArrow(partial(add_slices, slices=days.slices), _PART)
    if before is not None:
        found = found.unionByName(parquet_frame(spark, _PART, before.path / "results"))
    by_key = found.repartition(*RESULT_KEY).sortWithinPartitions(*RESULT_KEY)
    merged = by_key.mapInArrow(merge, _PART)
    merged.write.option("compression", "zstd").parquet(_url(unfinished / "results"))
    _follow_curves(rows.where(F.col("row") == CURVE), days.plotted, broker)
    _follow_deaths(rows.where(F.col("row") == CRASHES), broker)
    for each in sorted(staged.rglob("*"), reverse=True):
        each.rmdir() if each.is_dir() else each.unlink()
    staged.rmdir()


def _follow_curves(changes: DataFrame, plotted: Slices, broker: BrokerState) -> None:
    """Add up how the curves of all subscriptions changed, and go on with those of all together."""
    named = changes.select("policy", "slice", *_KEY, F.col("first").alias("ts_ms"), F.col("second").alias("delta"))
    by_slice = named.repartition("policy", "slice").sortWithinPartitions("policy", "slice", *_KEY)
    sums = by_slice.mapInArrow(partial(sum_changes, wanted=frozenset()), _CHANGES)
    per_point = broker.curves[0].width_ms // plotted.width_ms
    in_order = sums.coalesce(1).sortWithinPartitions("policy", "slice")
    strung = in_order.mapInArrow(partial(string_together, per_point=per_point), _CHANGES)
    _go_on_with(broker, strung.collect())


def _go_on_with(broker: BrokerState, rows: Iterable[Mapping[str, Any] | Row]) -> None:
    """Go on with the curves of all subscriptions together, given how far each point is from what stands."""
    before = [curve.standing(SERIES) for curve in broker.curves]
    for row in rows:
        values = before[row["policy"]] + np.array(row["delta"], np.int64).reshape(SERIES, -1)
        broker.curves[row["policy"]].add_thinned(np.array(row["ts_ms"], np.int64), values)


def _follow_deaths(deaths: DataFrame, broker: BrokerState) -> None:
    """Take in when processes died; subscriptions that died in the same millisecond died together."""
    times = deaths.select(F.explode("first").alias("ts_ms")).distinct()
    missing = CRASHES_MAX - len(broker.died_ms)
    broker.died_ms += [row["ts_ms"] for row in times.orderBy("ts_ms").limit(missing).collect()]
    broker.death_count += times.count()


def _ledgers(trace: SparkSource) -> DataFrame:
    return trace.read(ledger_columns(is_packed=trace.is_packed), ledgers, LEDGERS).frame.where("ledger_id >= 0")


def _highest(ledgers: DataFrame) -> DataFrame:
    """Return ``topic, ledger_id, entry_count``: how far each ledger goes, whoever told."""
    return ledgers.groupBy("topic", "ledger_id").agg(F.max("entry_count").alias("entry_count"))


def _kept_ledgers(spark: SparkSession, checkpoint: Path) -> DataFrame:
    return parquet_frame(spark, _LEDGERS, checkpoint / "logs")


def _states(spark: SparkSession, checkpoint: Path) -> DataFrame:
    return parquet_frame(spark, _STATES, checkpoint / "states")


def _with_states(
    spark: SparkSession, trace: DataFrame | None, before: Checkpoint | None, new: DataFrame | None, ledgers: DataFrame
) -> DataFrame:
    """Return the chunks of each subscription, sorted, its state before them, and with each the log of its topic.

    That is what the ``new`` days tell of it, for who knows the rest, and the ``whole_log``, for who is new: what all
    days up to now tell.
    """
    rows: list[DataFrame] = []
    if trace is not None:
        chunks = trace.where(F.col("subscription") != "").select(*_KEY, "first_seq", "events")
        rows.append(chunks.withColumn("state", F.lit(None).cast("string")))
    if before is not None:
        rows.append(_states(spark, before.path).withColumn("first_seq", F.lit(-1).cast("bigint")))
    together = reduce(lambda some, others: some.unionByName(others, allowMissingColumns=True), rows)
    if "events" not in together.columns:
        together = together.withColumn("events", F.lit(None).cast("binary"))
    if trace is None or new is None:
        together = together.withColumn("log", F.lit(None).cast(_LOG)).withColumn("is_published", F.lit(False))
    else:
        published = trace.where(F.col("subscription") == "").select("topic").distinct()
        together = together.join(published.withColumn("is_published", F.lit(True)), on="topic", how="left")
        together = together.join(_logs(new, "log"), on="topic", how="left")
    together = together.join(_logs(ledgers, "whole_log"), on="topic", how="left")
    return together.repartition(*_KEY).sortWithinPartitions(*_KEY, "first_seq")


def _logs(ledgers: DataFrame, name: str) -> DataFrame:
    """Return ``topic`` and under a name its message log: (``ledger_id, entry_count``), rising."""
    log = F.sort_array(F.collect_list(F.struct("ledger_id", "entry_count")))
    return ledgers.groupBy("topic").agg(log.alias(name))


def _replay(
    batches: Iterable[pa.RecordBatch], *, policies: Sequence[Policy | None], days: Days, states: str = "states"
) -> Iterator[pa.RecordBatch]:
    """Replay the rows of `_with_states`; ``states`` is the place of the states, for errors."""
    open_one: DailySubscription | None = None
    for batch in batches:
        for index in range(batch.num_rows):
            key = (batch["topic"][index].as_py(), batch["subscription"][index].as_py())
            if open_one is None or open_one.key != key:
                if open_one is not None:
                    yield from open_one.end()
                is_published = bool(batch["is_published"][index].as_py())
                state = batch["state"][index].as_py()
                known = batch["log" if state is not None else "whole_log"][index].as_py() or ()
                log = {each["ledger_id"]: each["entry_count"] for each in known}
                try:
                    open_one = DailySubscription(key, policies, log, state, days, is_published=is_published)
                except CheckpointError as error:
                    raise CheckpointError(f"{states}: {error}; {RESTART}") from None
                if state is not None:
                    continue
            elif batch["state"][index].is_valid:
                raise CheckpointError(f"{states}: subscription {key[1]!r} of {key[0]} is there twice; {RESTART}")
            yield from open_one.take(unpacked(memoryview(batch["events"][index].as_buffer())))
    if open_one is not None:
        yield from open_one.end()


def _rows(spark: SparkSession, checkpoint: Path, duration_ms: int, crashes_per_day: float) -> list[dict[str, Any]]:
    results = parquet_frame(spark, _PART, checkpoint / "results")
    by_key = results.repartition(*RESULT_KEY).sortWithinPartitions(*RESULT_KEY)
    make = partial(put_together, duration_ms=duration_ms, crashes_per_day=crashes_per_day)
    return [row.asDict() for row in by_key.mapInArrow(make, _ESTIMATE).collect()]


def _url(path: Path) -> str:
    return f"file://{path.absolute()}"
