"""Times the estimate beside DuckDB over the same events, whole commands beside a bare Spark session, and the gate.

Every figure is of the same answer: a summary that differs from DuckDB's ends the benchmark.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import TYPE_CHECKING, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.acked import EventChunk
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.spark.session import local_session
from ackstate.analysis.spark.source import SparkSource
from ackstate.analysis.trace.chunks import ROWS_AT_ONCE, events_of, packed_columns
from ackstate.analysis.trace.events import CHUNK_EVENTS, EventKind
from ackstate.analysis.trace.generate import TracePlan, make_trace
from ackstate.analysis.trace.parquet import trace_files
from benchmarks.measurement import Against, BenchmarkReport, Spread, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

    from ackstate.analysis.trace.chunks import Int64s

ABOUT = (
    "Generated traces, `key_shared`, 8 subscriptions on 4 topics, a persist each second, two cores. DuckDB gives the "
    "same answer from the same events as one row each, written beforehand, by the fastest query known: one window over "
    "the events and an ASOF join with the persists. CPU seconds include Java and the workers. Commands are whole "
    "processes, beside a session that counts ten rows. The gate: one subscription on one core, events in memory, under "
    "`max_unpersisted_ack_record_bytes`, beside the same without a limit."
)
RUNS = 3
WORKLOAD = "key_shared"
GRID = [Policy.from_mapping({"flush_interval_ms": flush_ms}) for flush_ms in (1_000, 60_000, 30_000, 10_000, 5_000)]
BARE = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").getOrCreate()
print(spark.range(10).count())
"""
_ACKSTATE = [sys.executable, "-P", "-m", "ackstate.analysis.cli"]
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36
_KEY = ("topic", "subscription", "first_seq")
_ROWS = pa.schema([
    ("topic", pa.string()), ("subscription", pa.string()), ("seq", pa.int64()), ("ts_ms", pa.int64()),
    ("kind", pa.int8()), ("ledger_id", pa.int64()), ("first_entry", pa.int64()), ("last_entry", pa.int64()),
])  # fmt: skip

# Numbers instead of names, which DuckDB would compare row by row.
_PREPARED = """
CREATE VIEW rows AS SELECT * FROM read_parquet('{rows}');
CREATE TABLE subscriptions AS
    SELECT (row_number() OVER (ORDER BY topic, subscription))::INTEGER AS id, topic, subscription
    FROM (SELECT DISTINCT topic, subscription FROM rows WHERE subscription <> '');
CREATE VIEW events AS
    SELECT id, seq::INTEGER AS seq, ts_ms, kind::UTINYINT AS kind
    FROM rows JOIN subscriptions USING (topic, subscription);
CREATE TABLE span AS SELECT min(ts_ms) AS begin_ms, max(ts_ms) AS end_ms FROM rows
"""

# The fastest query known: one window over the events, and an ASOF join with the few persists for the durable acks.
# Every entry of these traces is acked once, which spares SQL the work of looking for those that are acked again.
_SUMMARY = f"""
WITH counted AS (
    SELECT id, seq, ts_ms, kind, sum((kind = {int(EventKind.ACK)})::INT) OVER w AS acked, lead(ts_ms) OVER w AS next_ms
    FROM events WINDOW w AS (PARTITION BY id ORDER BY seq)
), persists AS (
    SELECT id, seq, kind, max(CASE WHEN kind = {int(EventKind.PERSIST_BEGUN)} THEN acked END)
        OVER (PARTITION BY id ORDER BY seq) AS begun
    FROM counted WHERE kind IN ({int(EventKind.PERSIST_BEGUN)}, {int(EventKind.PERSIST_ENDED)})
), ended AS (
    SELECT id, seq, max(begun) OVER (PARTITION BY id ORDER BY seq) AS durable
    FROM persists WHERE kind = {int(EventKind.PERSIST_ENDED)}
), steps AS (
    SELECT counted.id, counted.acked - coalesce(ended.durable, 0) AS redelivery,
        coalesce(counted.next_ms, (SELECT end_ms FROM span)) - counted.ts_ms AS duration_ms
    FROM counted ASOF LEFT JOIN ended ON counted.id = ended.id AND counted.seq >= ended.seq
    UNION ALL
    SELECT id, 0, min(ts_ms) - (SELECT begin_ms FROM span) FROM events GROUP BY id
), by_value AS (
    SELECT id, redelivery, sum(duration_ms) AS duration_ms FROM steps GROUP BY ALL
), ranked AS (
    SELECT *, sum(duration_ms) OVER (PARTITION BY id ORDER BY redelivery)
        / sum(duration_ms) OVER (PARTITION BY id) AS share
    FROM by_value
)
SELECT topic, subscription, sum(redelivery * duration_ms) / sum(duration_ms) AS expected,
    min(CASE WHEN share >= 0.50 THEN redelivery END)::BIGINT AS p50,
    min(CASE WHEN share >= 0.99 THEN redelivery END)::BIGINT AS p99, max(redelivery)::BIGINT AS max
FROM ranked JOIN subscriptions USING (id) GROUP BY topic, subscription ORDER BY topic, subscription
"""


class Summary(NamedTuple):
    """The redelivery of one subscription, as `ackstate.analysis.estimate.estimates.estimates` has it."""

    topic: str
    subscription: str
    expected: float
    p50: int
    p99: int
    max: int


def write_rows(trace: Path, out: Path) -> None:
    """Write a trace in chunks as one row an event."""
    names = _ROWS.names[3:]
    with pq.ParquetWriter(out, _ROWS, compression="zstd") as writer:
        for batch, offsets, columns in unpacked(trace, names):
            counts = np.diff(offsets)
            seq = np.repeat(batch["first_seq"].to_numpy() - offsets[:-1], counts) + np.arange(offsets[-1])
            names_of = [batch[name].take(np.repeat(np.arange(len(counts)), counts)) for name in _KEY[:2]]
            arrays = [*names_of, seq, *columns]
            cast = [pa.array(each).cast(field.type) for each, field in zip(arrays, _ROWS, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(cast, schema=_ROWS))


def unpacked(trace: Path, names: Sequence[str]) -> Iterator[tuple[pa.RecordBatch, Int64s, list[Int64s]]]:
    """Yield a few chunks of a trace at a time, in any order: their keys, and the results of `events_of`."""
    for file in trace_files(trace):
        parquet = pq.ParquetFile(file, memory_map=True)
        columns = [*_KEY, "chunk", *packed_columns(names)]
        for batch in parquet.iter_batches(ROWS_AT_ONCE, columns=columns, use_threads=False):
            yield (batch, *events_of(batch, names))


def summaries(rows: Path, *, threads: int) -> list[Summary]:
    """Return every subscription's summary, computed by DuckDB from one row an event."""
    with duckdb.connect(config={"threads": threads}) as connection:
        connection.execute(_PREPARED.format(rows=rows))
        found = connection.execute(_SUMMARY).fetchall()
    return [Summary(*row) for row in found]


def cpu_s() -> float:
    """Return the CPU seconds so far, in steps of 10 ms; those of an ended process count for its parent.

    Source: proc_pid_stat(5).
    """
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name before may have spaces and brackets.
            words = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(status.parent.name)
        children[int(words[1])].append(pid)
        ticks[pid] = sum(map(int, words[11:15]))
    found, pids = 0, [os.getpid()]
    while pids:
        pid = pids.pop()
        found += ticks.get(pid, 0)
        pids += children[pid]
    return found * _TICK_S


def summaries_of(spark: SparkSession, trace: Path, policies: Sequence[Policy | None]) -> list[Summary]:
    """Return every subscription's summary under each policy, computed by the estimate."""
    found = estimates(SparkSource.of(spark, trace), policies, scopes=("subscription",)).collect()
    return sorted(Summary(*(row[name] for name in Summary._fields)) for row in found)


def check_equal(ours: Sequence[Summary], theirs: Sequence[Summary]) -> None:
    """Refuse to time a method with a different result."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine._replace(expected=0) == other._replace(expected=0), (mine, other)
        assert math.isclose(mine.expected, other.expected, rel_tol=1e-9), (mine, other)


def estimate(report: BenchmarkReport, small: int) -> None:
    """Compare the estimate with DuckDB, and one policy with a grid of five."""
    spark, cores = local_session(), len(os.sched_getaffinity(0))
    for events in (10_000_000 // small, 100_000_000 // small):
        with TemporaryDirectory() as directory:
            trace, rows = Path(directory) / "trace", Path(directory) / "rows.parquet"
            make_trace(spark, TracePlan(WORKLOAD, events), trace)
            write_rows(trace, rows)
            check_equal(summaries_of(spark, trace, [None]), summaries(rows, threads=cores))
            things = {
                "DuckDB": lambda rows=rows: summaries(rows, threads=cores),
                "as recorded": lambda trace=trace: summaries_of(spark, trace, [None]),
                "one policy": lambda trace=trace: summaries_of(spark, trace, GRID[:1]),
                "a grid of five": lambda trace=trace: summaries_of(spark, trace, GRID),
            }
            wall, cpu = in_turn(things)
        for name in things:
            for unit, taken in (("s", wall), ("CPU s", cpu)):
                against = None if name == "DuckDB" else Against("DuckDB", taken["DuckDB"].median)
                report.time(f"{name}, {events:,} events", unit, taken[name], against)


def in_turn(things: Mapping[str, Callable[[], object]]) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """Time things in rounds, after each once to warm up; return seconds, and CPU seconds of all processes."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in things}
    for thing in things.values():
        thing()
    for _ in range(RUNS):
        for name, thing in things.items():
            begun = perf_counter(), cpu_s()
            thing()
            taken[name].append((perf_counter() - begun[0], cpu_s() - begun[1]))
    wall, cpu = ({name: Spread.of(each[at] for each in runs) for name, runs in taken.items()} for at in (0, 1))
    return wall, cpu


class Cost(NamedTuple):
    """The seconds of a command as a user waits for them, and the CPU seconds of it and its children to their end."""

    wall_s: float
    cpu_s: float


def cost_of(command: Sequence[str]) -> Cost:
    """Run a command to its end, and the processes that outlive it, such as Java's: this one must have no others."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    begun = perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall_s = cpu_s = 0.0
    while True:
        try:
            ended, status, used = os.wait4(-1, 0)
        except ChildProcessError:
            return Cost(wall_s, cpu_s)
        cpu_s += used.ru_utime + used.ru_stime
        if ended == process.pid:
            wall_s = perf_counter() - begun
            process.returncode = os.waitstatus_to_exitcode(status)
            assert not process.returncode, command


def command(report: BenchmarkReport, small: int) -> None:
    """Compare `ackstate redelivery`, with Spark and with the local engine, with a bare session."""
    run, bare = {"bare session": [sys.executable, "-c", BARE]}, "bare session"
    with TemporaryDirectory() as directory:
        for events in (10_000 // small, 10_000_000 // small):
            trace = str(Path(directory) / str(events))
            cost_of([*_ACKSTATE, "trace", "generate", trace, "--workload", WORKLOAD, "--events", str(events)])
            for engine in ("spark", "local"):
                run[f"{events:,} events, {engine}"] = [*_ACKSTATE, "redelivery", trace, "--engine", engine]
        taken: dict[str, list[Cost]] = {name: [] for name in run}
        for _ in range(5):
            for name, arguments in run.items():
                taken[name].append(cost_of(arguments))
    for unit, of in (("s", lambda cost: cost.wall_s), ("CPU s", lambda cost: cost.cpu_s)):
        spreads = {name: Spread.of(map(of, costs)) for name, costs in taken.items()}
        for name, spread in spreads.items():
            report.time(name, unit, spread, None if name == bare else Against(bare, spreads[bare].median))


def gate(report: BenchmarkReport, small: int) -> None:
    """Replay under limits of which some keep the gate closed most of the time."""
    events = 16 * CHUNK_EVENTS // small
    for workload in ("key_shared", "one_stuck_consumer", "many_consumers"):
        plan = TracePlan(workload, events, subscriptions=1, topics=1)
        chunks = [
            EventChunk(*(np.asarray(column, np.int64) for column in each[:5]))
            for each, _ in plan.series_of(0).parts(events)
        ]
        log: dict[int, int] = {}
        for chunk in chunks:
            for ledger_id in np.unique(chunk.ledger_id[chunk.ledger_id >= 0]).tolist():
                highest = int(chunk.last_entry[chunk.ledger_id == ledger_id].max())
                log[ledger_id] = max(log.get(ledger_id, 0), highest + 1)
        rates: dict[tuple[int, float], list[float]] = defaultdict(list)
        for _ in range(RUNS):
            for limit in (10_000_000, 100_000, 20_000, 5_000):
                begun = process_time()
                share = blocked_share(chunks, log, limit)
                rates[limit, share].append(events / (process_time() - begun) / 1e6)
        (open_limit, *_), *_ = rates
        for (limit, share), found in rates.items():
            free = next(Spread.of(each).median for (each_limit, _), each in rates.items() if each_limit == open_limit)
            report.time(
                f"{workload}, limit {limit:,}, blocked {share:.0%}", "million events/CPU s", Spread.of(found),
                None if limit == open_limit else Against("never blocked", free),
            )  # fmt: skip


def blocked_share(chunks: Sequence[EventChunk], log: dict[int, int], limit: int) -> float:
    """Replay the chunks, and return for which share of the time dispatch was blocked."""
    replay = SubscriptionReplay([Policy.from_mapping({"max_unpersisted_ack_record_bytes": limit})], log)
    for chunk in chunks:
        replay.take(chunk)
    begin_ms, end_ms = int(chunks[0].ts_ms[0]), int(chunks[-1].ts_ms[-1])
    replay.end(end_ms)
    return replay.curves[0].costs.blocked_ms / (end_ms - begin_ms)


if __name__ == "__main__":
    # The estimate leaves Spark's Java, for whose end the commands would wait.
    run("beside_duckdb", ABOUT, {"command": command, "estimate": estimate, "gate": gate})
