"""Appends through three bookies: our client, store and cursors beside BookKeeper's own client in a Java loop."""

from __future__ import annotations

import subprocess
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate import LedgerMap, ManagedCursor, Position
from ackstate.cursor import persist_all
from ackstate.stores.bookkeeper import BookKeeperStore
from ackstate.stores.bookkeeper_client import Replication
from benchmarks.measurement import Against, BenchmarkReport, Spread, TimedPart, Timing, run, timed_in_turn
from crash.bookkeeper_cluster import JARS, LEDGERS_ROOT, bookkeeper_options, running_cluster
from java_server import java_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ackstate.stores.bookkeeper_client import BookKeeperClient

ABOUT = (
    "Three bookies with synced journals and ZooKeeper on one machine, each in its own process; ensemble, write and ack "
    "quorum 2, CRC-32C, entries of 100 bytes. BookKeeper's own client is a Java loop with the same settings. "
    "All share the cores, so a rate is that of client and bookies together."
)
IN_FLIGHT = 100
APPENDS = 10_000
CURSORS = 1_000
ENTRY = bytes(100)
MESSAGES = {1: 10_000_000}


@contextmanager
def java_loop(hosts: str, ledger_count: int) -> Iterator[Callable[[int], TimedPart]]:
    """Start the loop, and yield a function that times a number of appends with it.

    Raises:
        RuntimeError: It does not start: Java without a compiler, for example.
    """
    command = [
        *(java_program(), "-Xmx256m", "-Dlog4j2.level=OFF", "-Dlog4j2.StatusLogger.level=OFF"),
        *("-cp", f"{JARS}/*", str(Path(__file__).with_name("BookKeeperLoop.java"))),
        *(f"zk+null://{hosts}{LEDGERS_ROOT}", str(len(ENTRY)), str(IN_FLIGHT), str(ledger_count)),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answer() -> str:
            # Java's loggers write there too.
            for line in process.stdout:
                if line.strip() == "ready" or line.strip().isdecimal():
                    return line.strip()
            raise RuntimeError("the Java loop has ended; it needs a JDK")

        def append(appends: int) -> TimedPart:
            process.stdin.write(f"{appends}\n")
            process.stdin.flush()
            return TimedPart(int(answer()))

        try:
            assert answer() == "ready"
            yield append
        finally:
            process.stdin.close()


def append_with_client(client: BookKeeperClient, handle: int, number: int) -> None:
    """Append to one ledger with 100 requests in flight."""
    waiting = deque(client.append([(handle, ENTRY)]) for _ in range(IN_FLIGHT))
    for _ in range(number - IN_FLIGHT):
        _check(waiting.popleft().wait())
        waiting.append(client.append([(handle, ENTRY)]))
    while waiting:
        _check(waiting.popleft().wait())


def _check(outcomes: list[object]) -> None:
    if not all(isinstance(outcome, int) for outcome in outcomes):
        raise RuntimeError(f"an append failed: {outcomes}")


def append_with_store(store: BookKeeperStore, ledger_ids: list[int], number: int) -> None:
    """Append with 100 threads, each to its own ledger."""

    def append_some(ledger_id: int) -> None:
        for _ in range(number // IN_FLIGHT):
            store.ledgers.append(ledger_id, [ENTRY])

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(append_some, ledger_ids))


def persist_together(cursors: list[ManagedCursor], entry_ids: Iterator[int]) -> None:
    """Ack with each cursor, and persist them together."""
    entry_id = 2 * next(entry_ids)
    for cursor in cursors:
        cursor.ack(Position(1, entry_id), now_ms=entry_id)
    persist_all(cursors, now_ms=entry_id)


def opened(store: BookKeeperStore, name: str, number: int) -> list[ManagedCursor]:
    """Open cursors that have persisted once."""
    cursors = [
        ManagedCursor.open(store, topic=name, subscription=str(each), ledgers=LedgerMap.from_counts(MESSAGES), now_ms=0)
        for each in range(number)
    ]
    for cursor in cursors:
        cursor.ack(Position(1, MESSAGES[1] - 1), now_ms=0)
    persist_all(cursors, now_ms=0)
    return cursors


def rate(spread: Spread) -> Spread:
    """Turn seconds per append into appends per second."""
    return Spread(1 / spread.median, 1 / spread.high, 1 / spread.low, spread.runs)


def appends(report: BenchmarkReport, small: int) -> None:
    """Time all in turn."""
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory)) as cluster:
        measure(report, cluster.hosts, APPENDS // small)


def measure(report: BenchmarkReport, hosts: str, number: int) -> None:
    """Time a number of appends."""
    with (
        closing(BookKeeperStore(hosts, root="/benchmark", bookkeeper=bookkeeper_options())) as store,
        java_loop(hosts, 1) as java_one,
        java_loop(hosts, IN_FLIGHT) as java_many,
    ):
        client = store._client
        handle = client.create(Replication(), ledger_id=None, custom_metadata={}).wait().handle
        ledger_ids = [store.ledgers.create("benchmark") for _ in range(IN_FLIGHT)]
        cursors, entry_ids = opened(store, "thousand", CURSORS), count(1)
        java, many = "Java, one ledger, 100 in flight", "Java, 100 ledgers, 100 in flight"
        timings = {
            java: Timing(java_one, lambda: number, 1e9 * number),
            "our client, one ledger, 100 in flight": Timing(
                lambda _: append_with_client(client, handle, number), each=1e9 * number
            ),
            many: Timing(java_many, lambda: number, 1e9 * number),
            "append, 100 threads": Timing(lambda _: append_with_store(store, ledger_ids, number), each=1e9 * number),
            "ack and persist_all, 1,000 cursors": Timing(
                lambda _: persist_together(cursors, entry_ids), each=1e9 * CURSORS
            ),
        }
        rates = {name: rate(spread) for name, spread in timed_in_turn(timings).items()}
        for name, spread in rates.items():
            beside = java if "one ledger" in name else many
            report.time(name, "appends/s", spread, None if name == beside else Against("Java", rates[beside].median))


if __name__ == "__main__":
    run("beside_bookkeeper", ABOUT, {"appends": appends})
