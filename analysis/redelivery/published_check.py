"""Was all that was acked published? Asked of Spark before a replay, of how far each ledger was acked and published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from ackstate.analysis.trace.events import TraceError

if TYPE_CHECKING:
    from pathlib import Path

    from ackstate.analysis.redelivery.trace_source import TraceSource


def check_published(source: TraceSource, path: Path) -> None:
    """Make sure that no ack goes beyond what its topic published.

    A topic without PUBLISH events says nothing of what it published, nor does one of what came before its first.
    Entries that are missing in between are found by `ackstate trace check`.

    Args:
        source: The trace.
        path: For the message.

    Raises:
        TraceError: An ack goes beyond; it names the first.
    """
    reached = source.reached().groupBy("topic", "ledger_id").agg(
        F.max("published").alias("published"), F.max("acked").alias("acked")
    )  # fmt: skip
    first = reached.where("published > 0").groupBy("topic").agg(F.min("ledger_id").alias("first_ledger_id"))
    beyond = reached.join(first, on="topic").where("ledger_id >= first_ledger_id and acked > published")
    found = beyond.orderBy("topic", "ledger_id").limit(1).collect()
    if found:
        row = found[0]
        published = f"up to entry {row['published'] - 1}" if row["published"] else "not at all"
        raise TraceError(
            f"{path}: {row['ledger_id']}:{row['acked'] - 1} of {row['topic']} is acked, whose ledger was published "
            f"{published}: ackstate trace check says more; record it anew, or leave out its PUBLISH events"
        )
