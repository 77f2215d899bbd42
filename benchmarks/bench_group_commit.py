"""Appends of many threads to one SQLite store: syncs and time, compared with one sync per append."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate import SqliteStore
from benchmarks.measurement import Against, BenchmarkReport, Timing, timed_in_turn

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

ABOUT = (
    "SQLite with synchronous=FULL in a temporary directory. Each thread appends entries of 100 bytes to a ledger of "
    "its own, one after another. Calls that come while a commit is under way share the next; beside that the same "
    "with a lock around each call, so that each is committed by itself."
)
APPENDS = 2_048
THREADS = (1, 2, 8, 32)
RUNS = 5
ENTRY = bytes(100)


def append(store: SqliteStore, ledger_ids: list[int], turn: AbstractContextManager[object]) -> None:
    """Append with one thread per ledger, in turns: the timed function."""

    def append_some(ledger_id: int) -> None:
        for _ in range(APPENDS // len(ledger_ids)):
            with turn:
                store.ledgers.append(ledger_id, [ENTRY])

    with ThreadPoolExecutor(len(ledger_ids)) as threads:
        for _ in threads.map(append_some, ledger_ids):
            pass


def commits_of(store: SqliteStore, call: Callable[[], object]) -> int:
    """Count the commits while something is called; each is one sync."""
    commits: list[str] = []
    connection = store._database._connection
    connection.set_trace_callback(lambda statement: commits.append(statement) if statement == "COMMIT" else None)
    call()
    connection.set_trace_callback(None)
    return len(commits)


def measure(report: BenchmarkReport, store: SqliteStore) -> None:
    """Append with different numbers of threads, in groups and each call by itself."""
    ledger_ids = [store.ledgers.create("benchmark") for _ in range(max(THREADS))]
    together, apart = nullcontext(), threading.Lock()
    for count in THREADS:
        used = ledger_ids[:count]
        commits = commits_of(store, lambda used=used: append(store, used, together))
        timings = {
            name: Timing(lambda used, turn=turn: append(store, used, turn), lambda used=used: used, 1e3 * APPENDS)
            for name, turn in (("together", together), ("apart", apart))
        }
        spreads = timed_in_turn(timings, runs=RUNS)
        what = f"{count} threads" if count > 1 else "1 thread"
        report.count(f"{what}: syncs for {APPENDS:,} appends", "syncs", commits, Against("appends", APPENDS))
        ours = report.time(f"{what}, in groups", "us an append", spreads["together"])
        report.time(f"{what}, each by itself", "us an append", spreads["apart"], Against("ours", ours.median))


if __name__ == "__main__":
    report = BenchmarkReport("group_commit", ABOUT)
    with tempfile.TemporaryDirectory() as directory, closing(SqliteStore(Path(directory) / "store")) as store:
        measure(report, store)
    report.publish()
