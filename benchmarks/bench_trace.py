"""The sizes of a trace, by workload: on storage, and shuffled by Spark; and the memory of a replay without Spark."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq

from ackstate.analysis.estimate.chunks import chunk_columns, packed_chunks
from ackstate.analysis.spark.session import local_session
from ackstate.analysis.trace.generate import TracePlan, make_trace
from ackstate.analysis.workloads.traffic import WORKLOADS
from benchmarks.bench_command import made
from benchmarks.measurement import BenchmarkReport
from benchmarks.whole_process import cost_of

EVENTS = 1_000_000
REPLAYED_EVENTS = 10_000_000
ABOUT = (
    f"Generated traces, 8 subscriptions on 4 topics, {EVENTS:,} events. The bytes are those of the trace's files, of "
    "the compact chunks that Spark shuffles for policies that ignore deliveries, and of the whole chunks that it "
    "shuffles for the others, before it compresses them. The memory is the peak of `ackstate redelivery TRACE "
    "--engine local`."
)


def shuffled_bytes(trace: Path, *, is_compact: bool) -> int:
    """Return the bytes of the chunks of a trace as Spark's shuffle gets them."""
    total = 0
    for file in trace.glob("*.parquet"):
        batches = pq.ParquetFile(file).iter_batches(64, columns=list(chunk_columns()))
        for batch in packed_chunks(batches, is_compact=is_compact):
            total += sum(map(len, batch["events"].drop_null().to_pylist()))
    return total


def peak_mb(directory: Path) -> float:
    """Return the peak memory of a replay as recorded in one process."""
    command = ["redelivery", str(made(directory, REPLAYED_EVENTS)), "--engine", "local"]
    return cost_of([sys.executable, "-P", "-m", "ackstate.analysis.cli", *command]).peak_mb


def main() -> None:
    report = BenchmarkReport("trace", ABOUT)
    with TemporaryDirectory() as directory:
        # Before this process has a child of its own: Java.
        report.count(f"{REPLAYED_EVENTS:,} events, local engine: peak memory", "MB", peak_mb(Path(directory)))
        spark = local_session()
        for name in WORKLOADS:
            trace = Path(directory, name)
            make_trace(spark, TracePlan(name, EVENTS), trace)
            stored = sum(file.stat().st_size for file in trace.glob("*.parquet"))
            report.count(f"{name}: trace", "bytes an event", stored / EVENTS)
            for what, is_compact in (("compact chunks", True), ("whole chunks", False)):
                shuffled = shuffled_bytes(trace, is_compact=is_compact)
                report.count(f"{name}: {what}", "bytes an event", shuffled / EVENTS)
    report.publish()


if __name__ == "__main__":
    main()
