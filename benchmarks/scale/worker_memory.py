"""The maximum memory of Spark's Python workers, measured in the workers."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import SparkSession

# Enough slow tasks for each worker, which Spark keeps for the next job, to receive one.
_TASKS = 8
_TASK_S = 0.1


def forget(spark: SparkSession) -> None:
    """Reset every worker's peak to its current memory."""
    _asked(spark, forgets=True)


def peak_mb(spark: SparkSession) -> float:
    """Return the peak of the worker that took most since the last `forget`, in MB (10^6 bytes)."""
    return max(_asked(spark, forgets=False))


def _asked(spark: SparkSession, *, forgets: bool) -> list[float]:
    def ask(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            time.sleep(_TASK_S)
        if forgets:
            # See proc_pid_clear_refs(5): 5 resets VmHWM.
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found
        yield pa.RecordBatch.from_pydict({"pid": [os.getpid()], "mb": [int(found[1]) * 1024 / 1e6]})

    ids = spark.range(0, _TASKS, numPartitions=_TASKS)
    return [row["mb"] for row in ids.mapInArrow(ask, "pid bigint, mb double").collect()]
