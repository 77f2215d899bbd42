"""The time and memory of the estimate, by the size of the trace and its skew.

``--events N,N`` runs beside the others at other sizes, ``--sizes N,N`` the curve; those results are not stored.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from importlib.metadata import version
from os import sched_getaffinity
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.spark.session import local_session
from ackstate.analysis.spark.source import SparkSource
from ackstate.analysis.trace.generate import TracePlan, make_trace
from benchmarks.measurement import Against, BenchmarkReport, Screen, Spread
from benchmarks.scale import identity, limit, worker_memory
from benchmarks.scale.cpu import cpu_s
from benchmarks.scale.rows import Summary, summaries, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import Row, SparkSession

EVENTS = (10_000_000, 100_000_000)
FIXED_EVENTS = 10_000
SIZES = (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000)
RUNS = 3
HOT_SHARE = 0.95
SPREAD = 1_000
GRID = [Policy.from_mapping({"flush_interval_ms": flush_ms}) for flush_ms in (1_000, 60_000, 30_000, 10_000, 5_000)]
KIND_EVENTS = 5_000_000
KINDS: Mapping[str, Mapping[str, object]] = {
    "range limit": {"range_count_max": 1_000},
    "young, 5 s": {"become_old_ack_record_seconds": 5},
    "blocking that never stops": {"max_unpersisted_ack_record_bytes": 10_000_000},
    "metadata store": {"ledger_writable": False},
}
"""Policies that a replay cannot count its way through, each of another kind."""
STEPPED: Mapping[str, Mapping[str, object]] = {
    "blocking that stops most of the time": {"max_unpersisted_ack_record_bytes": 20_000}
}
WORKLOAD = "key_shared"
RATE = "million events/s"
# A size with a longer expected time than this, by the previous size, is left out.
_PATIENCE_S = 600

ABOUT = (
    f"Made traces, `{WORKLOAD}`, 8 subscriptions on 4 topics, a persist each second, as recorded, in one Spark session "
    f"on two cores; time includes reading, CPU seconds include Java and the workers. DuckDB gives the same answer from "
    f"the same events as one row each, the rows written beforehand, by the fastest query known: one window over the "
    f"events and an ASOF join with the persists. The limit is pyarrow and numpy on one thread over the trace itself: "
    f"the least work of any engine. Spark's fixed cost is the same job over {FIXED_EVENTS:,} events. `identity` "
    f"is Spark's `mapInArrow` that returns the rows as they came, written nowhere, in a session of its own as Spark "
    f"has it. Even and hot: {SPREAD:,} subscriptions; in hot one has {HOT_SHARE:.0%} of the events. Policies that need "
    f"the cursor: over fewer events, of which the fixed cost is a larger part. PySpark {version('pyspark')}, DuckDB "
    f"{version('duckdb')}."
)


def plan_of(events: int) -> TracePlan:
    return TracePlan(WORKLOAD, events)


def estimated(spark: SparkSession, trace: Path) -> list[Summary]:
    """Return every subscription's summary, computed by the estimate."""
    found = replayed(spark, trace, [None])
    return sorted(Summary(*(row[name] for name in Summary._fields)) for row in found)


def replayed(spark: SparkSession, trace: Path, policies: Sequence[Policy | None]) -> list[Row]:
    """Return every subscription's estimates."""
    return estimates(SparkSource.of(spark, trace), policies, scopes=("subscription",)).collect()


def check_equal(ours: Sequence[Summary], theirs: Sequence[Summary]) -> None:
    """Refuse to time a method with a different result."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine._replace(expected=0) == other._replace(expected=0), (mine, other)
        assert math.isclose(mine.expected, other.expected, rel_tol=1e-9), (mine, other)


class Taken(NamedTuple):
    """The measurements of several runs: seconds, and CPU seconds of all processes."""

    wall: Spread
    cpu: Spread


def in_turn(things: dict[str, Callable[[], object]], *, runs: int = RUNS) -> dict[str, Taken]:
    """Time things in rounds, after each once to warm up: a slow spell of the machine hits all of them."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in things}
    for thing in things.values():
        thing()
    for _ in range(runs):
        for name, thing in things.items():
            begun = perf_counter(), cpu_s()
            thing()
            seconds[name].append((perf_counter() - begun[0], cpu_s() - begun[1]))
    return {name: Taken(*(Spread.of(each) for each in zip(*taken, strict=True))) for name, taken in seconds.items()}


def rate(spread: Spread, events: int) -> Spread:
    """Turn seconds into million events a second."""
    return Spread(*(events / seconds / 1e6 for seconds in (spread.median, spread.high, spread.low)), spread.runs)


def measure_fixed(report: BenchmarkReport, spark: SparkSession, directory: Path) -> None:
    """Measure the time of Spark that does not depend on the size of the trace."""
    trace = directory / "fixed"
    make_trace(spark, plan_of(FIXED_EVENTS), trace)
    taken = in_turn({"": lambda: estimated(spark, trace)})[""]
    report.time(f"Spark's fixed cost, {FIXED_EVENTS:,} events", "s", taken.wall)
    report.time(f"Spark's fixed cost, {FIXED_EVENTS:,} events", "CPU s", taken.cpu)


def measure_peers(report: BenchmarkReport, spark: SparkSession, directory: Path, events: int) -> None:
    """Measure the estimate beside DuckDB, beside the limit, and beside Spark doing nothing."""
    trace, rows = directory / f"trace-{events}", directory / f"rows-{events}.parquet"
    make_trace(spark, plan_of(events), trace)
    write_rows(trace, rows)
    cores = len(sched_getaffinity(0))
    ours = estimated(spark, trace)
    check_equal(ours, summaries(rows, threads=cores))
    check_equal(ours, limit.summaries(trace))
    taken = in_turn({
        "as recorded": lambda: estimated(spark, trace),
        "DuckDB": lambda: summaries(rows, threads=cores),
        "limit": lambda: limit.summaries(trace),
        "one policy": lambda: replayed(spark, trace, GRID[:1]),
        "grid": lambda: replayed(spark, trace, GRID),
    })  # fmt: skip
    duckdb, least = taken["DuckDB"], taken["limit"]
    shown = {"as recorded": "as recorded", "DuckDB": "DuckDB over rows", "limit": "limit, one thread"}
    for name, what in shown.items():
        against = Against("DuckDB", duckdb.wall.median) if name == "as recorded" else None
        report.time(f"{what}, {events:,} events", "s", taken[name].wall, against)
    for name, what in shown.items():
        against = None if name == "limit" else Against("limit", least.cpu.median)
        report.time(f"{what}, {events:,} events", "CPU s", taken[name].cpu, against)
    identical = identity.measured(rows, runs=RUNS)
    report.time(f"identity over rows, {events:,} events", "s", identical, Against("DuckDB", duckdb.wall.median))
    first = taken["one policy"].wall
    report.time(f"one policy, {events:,} events", "s", first, Against("identity", identical.median))
    further = Spread(
        *((seconds - first.median) / (len(GRID) - 1) for seconds in taken["grid"].wall[:3]), taken["grid"].wall.runs
    )
    report.time(f"each further policy, {events:,} events", "s", further, Against("the first", first.median))


def measure_skew(report: BenchmarkReport, spark: SparkSession, directory: Path, events: int) -> None:
    """Measure a trace of which one subscription has most beside one of as many events and as long, spread evenly."""
    for name, hot_share in (("even", None), ("hot", HOT_SHARE)):
        # The hot subscription gets 5,000 messages a second.
        rate = 5_000 / (HOT_SHARE * SPREAD)
        plan = TracePlan(
            WORKLOAD, events, subscriptions=SPREAD, topics=SPREAD // 2, hot_share=hot_share, messages_per_second=rate
        )
        make_trace(spark, plan, directory / name)
    for what, policies in {"as recorded": [None], "one policy": GRID[:1]}.items():
        taken = in_turn({
            name: partial(replayed, spark, directory / name, policies) for name in ("even", "hot")
        })  # fmt: skip
        report.time(f"even, {what}, {events:,} events", "s", taken["even"].wall)
        report.time(
            f"hot, {what}, {events:,} events", "s", taken["hot"].wall, Against("even", taken["even"].wall.median)
        )


def measure_kinds(report: BenchmarkReport, spark: SparkSession, directory: Path, events: int) -> None:
    """Measure one policy of each kind, and one that has to be followed step by step over a tenth of the events."""
    for number, (kinds, count) in enumerate(((KINDS, events), (STEPPED, events // 10))):
        trace = directory / f"kinds-{number}"
        make_trace(spark, plan_of(count), trace)
        taken = in_turn({
            name: partial(replayed, spark, trace, [Policy.from_mapping(settings)]) for name, settings in kinds.items()
        })  # fmt: skip
        for name, each in taken.items():
            report.time(f"{name}, {count:,} events", RATE, rate(each.wall, count))


def row_of(events: int, what: str) -> str:
    """Name a figure."""
    return f"{what}, curve, {events:,} events"


def measure_curve(report: BenchmarkReport, spark: SparkSession, directory: Path, sizes: Sequence[int]) -> None:
    """Measure time and the largest worker by the size of the trace, as long as it takes no more than patience has."""
    expected_s = 0.0
    for events in sizes:
        if expected_s * events > _PATIENCE_S:
            report.count(f"left out: more than {_PATIENCE_S} s expected", "events", events)
            continue
        begun = perf_counter()
        trace = directory / str(events)
        make_trace(spark, plan_of(events), trace)
        worker_memory.forget(spark)
        taken = in_turn({"": lambda trace=trace: estimated(spark, trace)})[""]
        report.time(row_of(events, "time"), "s", taken.wall)
        report.time(row_of(events, "CPU"), "CPU s", taken.cpu)
        report.count(row_of(events, "largest worker"), "MB", worker_memory.peak_mb(spark))
        expected_s = (perf_counter() - begun) / events


def sizes_of(text: str) -> tuple[int, ...]:
    return tuple(int(float(size)) for size in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=sizes_of, default=EVENTS)
    parser.add_argument("--sizes", type=sizes_of, default=SIZES)
    chosen = parser.parse_args()
    is_kept = (chosen.events, chosen.sizes) == (EVENTS, SIZES)
    report = (BenchmarkReport if is_kept else Screen)("scale", ABOUT)
    spark = local_session()
    with TemporaryDirectory() as directory:
        place = Path(directory)
        measure_fixed(report, spark, place)
        for events in chosen.events:
            measure_peers(report, spark, place, events)
        measure_skew(report, spark, place, chosen.events[0])
        measure_kinds(report, spark, place, min(chosen.events[0], KIND_EVENTS))
        measure_curve(report, spark, place, chosen.sizes)
    report.publish()


if __name__ == "__main__":
    main()
