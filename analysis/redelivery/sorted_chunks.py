"""Brings the chunks of each subscription together, in order, and beside them what a replay needs of their topic."""

from __future__ import annotations

from itertools import chain, groupby
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from ackstate.analysis.redelivery.one_cursor import OneCursor
from ackstate.analysis.redelivery.thinning import unpacked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from ackstate.analysis.redelivery.acked import Chunk
    from ackstate.analysis.redelivery.policy import Policy
    from ackstate.analysis.redelivery.trace_source import TraceSource

    Key = tuple[str, str]
    _Row = tuple[pa.RecordBatch, int]

_KEY = ("topic", "subscription")
LOG_SCHEMA = "array<struct<ledger_id:bigint,entry_count:bigint>>"


def sorted_chunks(source: TraceSource, policies: Sequence[Policy | None]) -> DataFrame:
    """Return the chunks of subscriptions as bytes, sorted and made small if the policies allow.

    That happens before the chunks of a subscription are brought together, on all cores whatever its share of the trace.

    Returns:
        ``topic, subscription, first_seq, events, log``, for `by_subscription`. If a replay needs the message log of
        the topic, a row without events comes before those of each subscription and has it; all others have none.
    """
    packed = source.packed(is_counted=all(map(is_counted, policies)))
    packed = packed.withColumn("log", F.lit(None).cast(LOG_SCHEMA))
    if any(policy is not None for policy in policies):
        heads = _logs(source.ledgers()).select("topic", F.explode("subscriptions").alias("subscription"), "log")
        # Nothing comes before the first chunk.
        before = (F.lit(-1).cast("bigint").alias("first_seq"), F.lit(None).cast("binary").alias("events"))
        packed = packed.unionByName(heads.select(*_KEY, *before, "log"))
    return packed.repartition(*_KEY).sortWithinPartitions(*_KEY, "first_seq")


def by_subscription(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Key, dict[int, int], Iterator[Chunk]]]:
    """Yield each subscription of some `sorted_chunks`: its key, its topic's message log, and its chunks in order.

    The log, ledger id -> entry count, rising, is empty if no policy needs it. The chunks are to be taken before the
    next subscription is.

    Raises:
        TraceError: Several cursors tell the chunks of a subscription.
    """
    rows = ((batch, index) for batch in batches for index in range(batch.num_rows))
    for key, mine in groupby(rows, key=_key):
        first = next(mine)
        batch, index = first
        log = {each["ledger_id"]: each["entry_count"] for each in batch["log"][index].as_py() or ()}
        yield key, log, _chunks(key, chain((first,), mine))  # noqa: B031 - what was taken of it is put back


def is_counted(policy: Policy | None) -> bool:
    """Say whether counting replaces the cursor, so that chunks may be made small."""
    return policy is None or policy.is_plain


def _logs(ledgers: DataFrame) -> DataFrame:
    """Return ``topic``, its ``log`` and its ``subscriptions``, of what `TraceSource.ledgers` returns."""
    is_ledger = F.col("ledger_id") >= 0
    names = F.collect_set(F.when(~is_ledger & (F.col("subscription") != ""), F.col("subscription")))
    # Both steps need all of a topic in one place: one shuffle does.
    by_topic = ledgers.repartition("topic").groupBy("topic", "ledger_id")
    counts = by_topic.agg(F.max("entry_count").alias("entry_count"), names.alias("names"))
    log = F.sort_array(F.collect_list(F.when(is_ledger, F.struct("ledger_id", "entry_count"))))
    return counts.groupBy("topic").agg(log.alias("log"), F.flatten(F.collect_list("names")).alias("subscriptions"))


def _key(row: _Row) -> Key:
    batch, index = row
    return batch["topic"][index].as_py(), batch["subscription"][index].as_py()


def _chunks(key: Key, rows: Iterable[_Row]) -> Iterator[Chunk]:
    one_cursor = OneCursor(key)
    for batch, index in rows:
        events = batch["events"][index]
        if events.is_valid:
            chunk = unpacked(memoryview(events.as_buffer()))
            one_cursor.check(chunk)
            yield chunk
