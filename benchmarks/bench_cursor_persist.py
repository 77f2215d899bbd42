"""The bytes and CPU time to persist another ack, by the number of existing holes."""

from __future__ import annotations

import gc
import os
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from time import thread_time_ns
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ackstate import CursorConfig, Format, LedgerMap, ManagedCursor, MemoryStore, Position, SqliteStore
from benchmarks.measurement import Against, BenchmarkReport, Spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.stores import Store

ABOUT = (
    "Each ack is of an entry that stands alone above the live holes, and is persisted by itself. Bytes are those "
    "that `persist` reports, over two whole cycles of compaction: from a snapshot until the second one after it, "
    "that one included. CPU is that of the thread for `ack` and `persist` together, in parts of 200 acks; the "
    "average is over all of the parts, compaction included. A sync costs the system CPU too, which the last rows "
    "show; Python is slower after each, as its caches are cold. In Pulsar's format each persist writes the whole "
    "state through the same store, under Pulsar's limit of 10 thousand ranges. Pulsar's figures are its whole-state "
    "records with 10 thousand live holes in 20 thousand and in 1 million entries, and its CPU with 10 thousand and "
    "with 500 thousand live holes, in words and in list form; storage took 0 ms there."
)
LEDGER = 7
PART = 200
DELTA_BYTES = 94
PARTS = 20
WHOLE_STATES = 100
PULSAR_BYTES = Against("Pulsar", 3_542, 177_261)
PULSAR_CPU = {10_000: Against("Pulsar", 14.6, 714), 500_000: Against("Pulsar", 173, 26_000)}
LIMIT_BYTES = Against("limit", 120)
PULSAR_FORMAT = CursorConfig(format=Format.PULSAR)
CPU_GOALS = {"memory": Against("goal", 20), "SQLite": Against("limit", 25)}


class Cycles(NamedTuple):
    """Two whole cycles of compaction: the number of their acks, and the bytes written for them."""

    acks: int
    delta_bytes: int
    snapshot_bytes: int


def opened(store: Store, holes: int, config: CursorConfig | None = None) -> ManagedCursor:
    """Return a cursor with `holes` alternating entries acked and durable."""
    log = LedgerMap.from_counts({LEDGER: 2 * holes + 1_000_000})
    cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, config=config, now_ms=0)
    cursor.ack_entries(LEDGER, np.arange(1, 2 * holes, 2, dtype=np.uint32), now_ms=0)
    cursor.persist(now_ms=0)
    return cursor


def acks_above(holes: int) -> Iterator[Position]:
    """Return isolated positions to ack one by one."""
    entry = 2 * holes + 2
    while True:
        yield Position(LEDGER, entry)
        entry += 2


def two_cycles(cursor: ManagedCursor, positions: Iterator[Position]) -> Cycles:
    """Ack and persist from one snapshot to the second after it."""
    snapshots, acks, delta_bytes, snapshot_bytes = 0, 0, 0, 0
    before = cursor.stats().snapshot_count
    while snapshots < 3:
        cursor.ack(next(positions), now_ms=1)
        written = cursor.persist(now_ms=1).bytes_written
        count = cursor.stats().snapshot_count - before
        if count == snapshots:
            delta_bytes += written if count else 0
        elif count > 1:
            snapshot_bytes += written
        acks += snapshots > 0
        snapshots = count
    return Cycles(acks, delta_bytes, snapshot_bytes)


def measure_bytes(report: BenchmarkReport) -> None:
    """Persist after each ack, and report the target of the bytes."""
    for holes, name in ((10_000, "10 k"), (1_000_000, "1 M")):
        with closing(MemoryStore()) as store:
            acks, delta_bytes, snapshot_bytes = two_cycles(opened(store, holes), acks_above(holes))
        written = (delta_bytes + snapshot_bytes) / acks
        report.count(f"written for an ack, {name} live holes", "bytes", written, LIMIT_BYTES)
        report.count(f"the same, {name} live holes, beside Pulsar", "bytes", written, PULSAR_BYTES)
        report.count(f"of it deltas, {name} live holes", "bytes", delta_bytes / acks)
        report.count(f"of it snapshots, {name} live holes", "bytes", snapshot_bytes / acks)
        report.count(f"acks from snapshot to snapshot, {name} live holes", "", acks / 2)
        whole = whole_state_bytes(holes)
        report.count(f"the same in Pulsar's format, {name} live holes", "bytes", whole, Against("ours", written))


def whole_state_bytes(holes: int) -> float:
    """Return the bytes that a persist of another ack takes when it writes the whole state."""
    with closing(MemoryStore()) as store:
        cursor, positions = opened(store, holes, PULSAR_FORMAT), acks_above(holes)
        before = cursor.stats().bytes_persisted
        for _ in range(WHOLE_STATES):
            cursor.ack(next(positions), now_ms=1)
            cursor.persist(now_ms=1)
        return (cursor.stats().bytes_persisted - before) / WHOLE_STATES


@contextmanager
def stores(name: str) -> Iterator[Store]:
    """A store of its own."""
    if name == "memory":
        with closing(MemoryStore()) as memory:
            yield memory
    else:
        with tempfile.TemporaryDirectory() as directory, closing(SqliteStore(Path(directory) / "store")) as store:
            yield store


def cpu_each(cursor: ManagedCursor, positions: Iterator[Position], parts: int, *, acks: int = PART) -> list[float]:
    """Return the CPU in us that an ack and its persist took, by parts."""
    taken = []
    gc.collect()
    gc.disable()
    for _ in range(parts):
        acked = [next(positions) for _ in range(acks)]
        start = thread_time_ns()
        for position in acked:
            cursor.ack(position, now_ms=1)
            cursor.persist(now_ms=1)
        taken.append((thread_time_ns() - start) / acks / 1e3)
    gc.enable()
    return taken


def measure_cpu(report: BenchmarkReport) -> None:
    """Persist after each ack, in each store, for long enough that compaction has its share."""
    for store_name, goal in CPU_GOALS.items():
        for holes, name in ((10_000, "10 k"), (500_000, "500 k")):
            with stores(store_name) as store:
                cursor, positions = opened(store, holes), acks_above(holes)
                cpu_each(cursor, positions, 2)
                taken = cpu_each(cursor, positions, PARTS)
            what = f"one ack persisted, {store_name}, {name} live holes"
            spread = Spread.of(taken)
            report.time(what, "us CPU", spread, goal)
            average = sum(taken) / len(taken)
            report.count(f"{what}, on the average", "us CPU", average, PULSAR_CPU[holes])
            with stores(store_name) as store:
                cursor, positions = opened(store, holes, PULSAR_FORMAT), acks_above(holes)
                whole = cpu_each(cursor, positions, PARTS, acks=WHOLE_STATES // PARTS)
            spread = Spread.of(whole)
            report.time(f"{what}, Pulsar's format", "us CPU", spread, Against("ours", average))
    for where, written_before in (("", 0), (" over zeros", PARTS * PART * DELTA_BYTES)):
        spread = Spread.of(bare_syncs(PARTS, written_before))
        report.time(f"for comparison: write{where} and fdatasync of {DELTA_BYTES} bytes", "us CPU", spread)


def bare_syncs(parts: int, written_before: int) -> list[float]:
    """Return the CPU in us that the operating system takes to sync a record to a file, by parts.

    The file grows with each record, unless zeros were written to it before.
    """
    taken = []
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(bytes(written_before))
        file.seek(0)
        os.fsync(file.fileno())
        for _ in range(parts):
            start = thread_time_ns()
            for _ in range(PART):
                file.write(bytes(DELTA_BYTES))
                os.fdatasync(file.fileno())
            taken.append((thread_time_ns() - start) / PART / 1e3)
    return taken


if __name__ == "__main__":
    report = BenchmarkReport("cursor_persist", ABOUT)
    measure_bytes(report)
    measure_cpu(report)
    report.publish()
