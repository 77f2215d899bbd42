"""The time of Spark to send every row through a Python worker that returns it, in a default session.

``python -m benchmarks.scale.identity ROWS RUNS`` prints the seconds of RUNS runs after a warm-up, as JSON. It
is a process of its own because our sessions compile Java less well, which rows would pay for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from time import perf_counter
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from benchmarks.measurement import Spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa

_ROW_SCHEMA = (
    "topic string, subscription string, seq bigint, ts_ms bigint, kind tinyint, ledger_id bigint, first_entry bigint, "
    "last_entry bigint"
)


def measured(rows: Path, *, runs: int) -> Spread:
    """Return how long it takes over a file of rows, in seconds."""
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale.identity", str(rows), str(runs)],
        check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    seconds = json.loads(told)
    return Spread.of(seconds)


def _same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _taken(spark: SparkSession, rows: str) -> float:
    begun = perf_counter()
    spark.read.parquet(rows).mapInArrow(_same, _ROW_SCHEMA).write.format("noop").mode("overwrite").save()
    return perf_counter() - begun


def main(rows: str, runs: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    cores = len(os.sched_getaffinity(0))
    spark = (
        SparkSession.builder.master(f"local[{cores}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    print(json.dumps([_taken(spark, rows) for _ in range(int(runs) + 1)][1:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
