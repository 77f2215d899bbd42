"""The time of an append in the embedded store, compared with a plain file that is synced after each write."""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ackstate import SqliteStore
from benchmarks.measurement import Against, BenchmarkReport, Timing, timed, timed_in_turn

if TYPE_CHECKING:
    from ackstate.stores import Store

ABOUT = (
    "SqliteStore (synchronous=FULL) and a bare file with one write and one fdatasync an append, both in one temporary "
    "directory, in turn. Each thread appends to a ledger of its own, one entry after another; calls that come while a "
    "sync is under way share the next, in the bare file each has its own. Opening and reading are of 10,000 entries of "
    "150 bytes, in 10 ledgers by turns, appended 1,000 at once or each alone; from the kernel's cache."
)
APPENDS = {150: 512, 4_096: 512, 100_000: 64}
THREADS = (1, 8)
RUNS = 5
ENTRIES = 10_000


class Target(Protocol):
    """A target of appends, by ledger."""

    def append(self, ledger_id: int, entry: bytes) -> object: ...


class BareFile:
    """One write and one sync per append: the lower bound for one durable append."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.lock = threading.Lock()

    def append(self, _: int, entry: bytes) -> None:
        with self.lock:
            os.write(self.descriptor, entry)
            os.fdatasync(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


def append(target: Target, ledger_ids: list[int], entry: bytes, count: int) -> None:
    """Append with one thread per ledger: the timed function."""

    def append_some(ledger_id: int) -> None:
        for _ in range(count // len(ledger_ids)):
            target.append(ledger_id, entry)

    if len(ledger_ids) == 1:
        append_some(ledger_ids[0])
        return
    with ThreadPoolExecutor(len(ledger_ids)) as threads:
        for _ in threads.map(append_some, ledger_ids):
            pass


def measure_appends(report: BenchmarkReport, directory: Path) -> None:
    """Append entries of each size with each number of threads to both."""
    for size, count in APPENDS.items():
        for thread_count in THREADS:
            with ExitStack() as open_ones:
                place = Path(tempfile.mkdtemp(dir=directory))
                store = open_ones.enter_context(closing(SqliteStore(place / "sqlite")))
                bare = open_ones.enter_context(closing(BareFile(place / "bare")))
                ledger_ids = [store.ledgers.create("benchmark") for _ in range(thread_count)]
                targets = {"SqliteStore": store.ledgers, "bare file": bare}
                spreads = timed_in_turn(
                    {
                        name: Timing(
                            lambda target, size=size, ids=ledger_ids, count=count: append(
                                target, ids, os.urandom(size), count
                            ),
                            lambda target=target: target,
                            1e3 * count,
                        )
                        for name, target in targets.items()
                    },
                    runs=RUNS,
                )
            what = f"append {size:,} bytes, {thread_count} thread{'s' if thread_count > 1 else ''}"
            ours = report.time(f"{what}: SqliteStore", "us", spreads["SqliteStore"])
            report.time(f"{what}: bare file", "us", spreads["bare file"], Against("ours", ours.median))


def fill(store: Store, at_once: int) -> list[int]:
    """Append many entries to ten ledgers in turn, so many at once, and return the ledgers."""
    ids = [store.ledgers.create("benchmark") for _ in range(10)]
    for number in range(ENTRIES // at_once):
        store.ledgers.append(ids[number % 10], [os.urandom(150) for _ in range(at_once)])
    return ids


def measure_openings(report: BenchmarkReport, directory: Path) -> None:
    """Open stores of many entries, appended many at once and each alone."""
    for how, at_once in (("", 1_000), (", each appended alone", 1)):
        path = directory / f"open-{at_once}"
        with closing(SqliteStore(path)) as store:
            fill(store, at_once)
        spread = timed(lambda path: SqliteStore(path).close(), lambda path=path: path, runs=RUNS, each=1e6)
        report.time(f"open and close, {ENTRIES:,} entries{how}", "ms", spread)


def measure_reads(report: BenchmarkReport, directory: Path) -> None:
    """Read one ledger of ten in a store that was filled and opened again."""
    path = directory / "read"
    with closing(SqliteStore(path)) as store:
        ids = fill(store, 1_000)
    with closing(SqliteStore(path)) as store:
        count = ENTRIES // 10
        spread = timed(lambda ledgers: ledgers.read(ids[0], 0, count), lambda: store.ledgers, runs=RUNS, each=1e6)
        report.time(f"read 1,000 of them, {ENTRIES:,} entries", "ms", spread)


if __name__ == "__main__":
    report = BenchmarkReport("stores", ABOUT)
    with tempfile.TemporaryDirectory() as directory:
        measure_appends(report, Path(directory))
        measure_openings(report, Path(directory))
        measure_reads(report, Path(directory))
    report.publish()
