"""A trace that is fit for a replay: Spark has looked at the bounds of its chunks, and at what was acked of what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.analysis.redelivery.chunk_order import check_order
from ackstate.analysis.redelivery.published_check import check_published
from ackstate.analysis.redelivery.spark import read_unchecked
from ackstate.analysis.redelivery.trace_source import FileSource

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ackstate.analysis.trace.parquet import Span


def checked_source(spark: SparkSession, path: Path, covered: Span) -> FileSource:
    """Return a trace, a file or a directory, after a look at what would make its replay wrong.

    What stands inside of the chunks is looked at while they are replayed; entry by entry only `ackstate trace check`
    does.

    Args:
        spark: The session.
        path: Where the trace is.
        covered: What `ackstate.analysis.trace.parquet.check_trace` returned of it, before Spark was started.

    Raises:
        TraceError: Chunks do not follow one another, or an ack goes beyond what was published.
    """
    check_order(read_unchecked(spark, path), path)
    source = FileSource.of(spark, path, covered)
    check_published(source, path)
    return source
