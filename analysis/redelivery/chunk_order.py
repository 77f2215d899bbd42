"""Do the chunks of each subscription follow one another? Asked of Spark before a replay, of their bounds alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.window import Window

from ackstate.analysis.trace.events import TraceError

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame


def check_order(trace: DataFrame, path: Path) -> None:
    """Make sure that no chunk is missing, there twice, or before the end of the one before it, in `seq` or in time.

    What is inside of a chunk is not looked at: `ackstate trace check` looks at every event.

    Args:
        trace: Columns as in `ackstate.analysis.trace.events`.
        path: For the message.

    Raises:
        TraceError: Some do not follow; it names the first of them.
    """
    of_one = Window.partitionBy("topic", "subscription").orderBy("chunk", "first_seq")
    bounds = trace.select(
        "topic", "subscription", "chunk", "first_seq", "first_ts_ms", "last_ts_ms",
        F.lag("chunk", 1, -1).over(of_one).alias("chunk_before"),
        F.lag(F.col("first_seq") + F.size("kind"), 1, 0).over(of_one).alias("seq_expected"),
        F.lag("last_ts_ms").over(of_one).alias("last_ts_ms_before"),
    )  # fmt: skip
    problem = (
        F.when(F.col("chunk") <= F.col("chunk_before"), "is there twice")
        .when(F.col("chunk") > F.col("chunk_before") + 1, "has none before it")
        .when(F.col("first_seq") < F.col("seq_expected"), "repeats a seq")
        .when(F.col("first_seq") > F.col("seq_expected"), "comes after a gap in seq")
        .when(F.col("first_ts_ms") < F.col("last_ts_ms_before"), "begins before the one before it ended")
    )
    wrong = bounds.withColumn("problem", problem).where("problem is not null")
    found = wrong.orderBy("topic", "subscription", "chunk").limit(1).collect()
    if found:
        chunk, problem_said = found[0]["chunk"], found[0]["problem"]
        of_whom = " of ".join(filter(None, (found[0]["subscription"], found[0]["topic"])))
        raise TraceError(
            f"{path}: chunk {chunk} of {of_whom} {problem_said}: ackstate trace check says more; convert it anew"
        )
