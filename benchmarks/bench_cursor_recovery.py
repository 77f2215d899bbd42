"""The time to open a cursor, by the number of its live ranges and the length of its history."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from ackstate import LedgerMap, ManagedCursor, MemoryStore, Position
from benchmarks.acked_entries import alternating, clustered
from benchmarks.bench_cursor import CountingStore, sqlite
from benchmarks.measurement import Against, BenchmarkReport, Spread, timed

if TYPE_CHECKING:
    import numpy.typing as npt

    from ackstate.stores import Store

ABOUT = (
    "Opening a cursor whose journal holds a snapshot of a million ranges and then deltas of one ack each: all of "
    "`ManagedCursor.open`, so taking the cursor over too, which costs two syncs on SQLite. Pulsar's figures are "
    "reopenings with storage at 0 ms, words and list form. The history: a window of 10 thousand live ranges moves over "
    "2 million entries, ten acks a persist, 1 million acks in all; at its end the cursor is opened, and another one "
    "that got the same 10 thousand ranges in one persist."
)
LEDGER = 7
LIVE = 10_000
HISTORY = 100
STEP = 10
PULSAR = {"alternating": Against("Pulsar", 2.6, 98), "runs of 100": Against("Pulsar", 81, 478)}
LIMITS_MS = {"alternating": 5, "runs of 100": 50}


def opened(store: Store, log: LedgerMap) -> ManagedCursor:
    """Open the only cursor."""
    return ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, now_ms=1)


def fill(store: Store, acked: npt.NDArray[np.uint32], deltas: int) -> LedgerMap:
    """Leave a journal of a snapshot and deltas behind, and return the log."""
    end = int(acked[-1]) + 2
    log = LedgerMap.from_counts({LEDGER: end + 2 * deltas + 2})
    opened(store, log)
    cursor = opened(store, log)
    cursor.ack_entries(LEDGER, acked + 1, now_ms=0)
    # The first persist of a cursor that was opened again is a snapshot, the others append to it.
    cursor.persist(now_ms=0)
    for number in range(deltas):
        cursor.ack(Position(LEDGER, end + 1 + 2 * number), now_ms=0)
        cursor.persist(now_ms=0)
    return log


def measure_opening(report: BenchmarkReport) -> None:
    """Open a cursor of a million ranges, by the deltas in its journal."""
    for pattern, acked in (("alternating", alternating(1_000_000)), ("runs of 100", clustered(1_000_000))):
        for deltas in (10, 1_000):
            what = f"1 M ranges, {pattern}, {deltas:,} deltas"
            with sqlite() as store:
                spread = time_opening(store, fill(store, acked, deltas))
            report.time(f"opening, {what}", "ms", spread, Against("limit", LIMITS_MS[pattern]))
            with closing(MemoryStore()) as store:
                log = fill(store, acked, deltas)
                report.time(f"opening, {what}, memory", "ms", time_opening(store, log), PULSAR[pattern])
                counting = CountingStore(store)
                opened(counting, log)
            report.count(f"journal, {what}", "bytes", counting.bytes_read)


def time_opening(store: Store, log: LedgerMap) -> Spread:
    """Time `ManagedCursor.open` on a filled store."""
    return timed(lambda _: opened(store, log), lambda: None, each=1e6)


def window_moved(store: Store, log: LedgerMap) -> None:
    """Move a window of live ranges over the log, a persist for every few acks."""
    cursor = opened(store, log)
    for first in range(0, 2 * HISTORY * LIVE, 2 * STEP):
        cursor.ack_entries(LEDGER, range(first + 1, first + 2 * STEP, 2), now_ms=0)
        left = first + 2 * STEP - 2 * LIVE - 2
        if left >= 0:
            cursor.mark_delete(Position(LEDGER, left), now_ms=0)
        cursor.persist(now_ms=0)


def measure_history(report: BenchmarkReport) -> None:
    """Open a cursor with a history a hundred times as long as its state, beside one without a history."""
    log = LedgerMap.from_counts({LEDGER: 2 * HISTORY * LIVE + 2})
    with closing(MemoryStore()) as with_history, closing(MemoryStore()) as without:
        window_moved(with_history, log)
        end = opened(with_history, log)
        other = opened(without, log)
        other.mark_delete(end.mark_delete_position, now_ms=0)
        acked = np.concatenate([np.arange(run.first, run.end, dtype=np.uint32) for run in end.deleted.runs()])
        other.ack_entries(LEDGER, acked, now_ms=0)
        other.persist(now_ms=0)
        assert str(end.deleted) == str(other.deleted)
        for name, store in (("without a history", without), ("after 100 times as many", with_history)):
            counting = CountingStore(store)
            records = opened(counting, log).recovery_report.records_replayed
            report.time(f"opening, 10 k ranges, {name}", "ms", time_opening(store, log))
            report.count(f"records replayed, 10 k ranges, {name}", "", records)
            report.count(f"bytes read, 10 k ranges, {name}", "bytes", counting.bytes_read)


if __name__ == "__main__":
    report = BenchmarkReport("cursor_recovery", ABOUT)
    measure_opening(report)
    measure_history(report)
    report.publish()
