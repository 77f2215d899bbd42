"""One side of `benchmarks.bench_python_versions`: short workloads, run by the interpreter that runs this module.

For each line of its input it runs all workloads once and prints their CPU times as a line of JSON. Its argument is the
size of the workloads.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from itertools import islice
from statistics import mean
from time import process_time_ns

from ackstate import MemoryStore
from benchmarks import end_to_end_side
from benchmarks.bench_cursor import ack_each
from benchmarks.bench_cursor_persist import PART, acks_above, cpu_each, opened
from benchmarks.bench_end_to_end import PARTS
from benchmarks.delay.bench_throughput import add_timings, drain_timings
from benchmarks.measurement import timed_in_turn

HOLES = 10_000


def cpu_by_path(size: int) -> dict[str, float]:
    """Return the CPU time in us of a message or an ack, by path; `size` is the number of messages, at least 1,000."""
    drained = "scheduled_messages each tick"
    delays = {"added": add_timings(size, size)["index.add"], "returned": drain_timings(size)[drained]}
    delayed = timed_in_turn(delays, runs=1, clock=process_time_ns)
    return {
        "publish to ack, acks by lists": end_to_end("list", size),
        "publish to ack, acks one by one": end_to_end("one by one", size),
        "one ack": ack(size),
        "one ack persisted to memory": persist(size),
        "one delayed message added": delayed["added"].median / 1e3,
        "one delayed message returned": delayed["returned"].median / 1e3,
    }


def end_to_end(ack_by: str, messages: int) -> float:
    took = end_to_end_side.run("ackstate.", "Shared", ack_by, messages)
    return sum(took[part] for part in PARTS) / messages * 1e6


def ack(count: int) -> float:
    with closing(MemoryStore()) as store:
        cursor = opened(store, HOLES)
        positions = list(islice(acks_above(HOLES), count))
        started_ns = process_time_ns()
        ack_each(cursor, positions)
        return (process_time_ns() - started_ns) / count / 1e3


def persist(size: int) -> float:
    with closing(MemoryStore()) as store:
        return mean(cpu_each(opened(store, HOLES), acks_above(HOLES), max(1, size // 10 // PART)))


def main() -> None:
    for _ in sys.stdin:
        print(json.dumps(cpu_by_path(int(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
