"""Appends through three bookies: our client, store and cursors beside BookKeeper's own client in a Java loop."""

from __future__ import annotations

import subprocess
import sys
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
from benchmarks.measurement import Against, BenchmarkReport, Spread, TimedPart, Timing, timed_in_turn
from crash.bookkeeper_cluster import JARS, LEDGERS_ROOT, bookkeeper_options, running_cluster
from crash.zookeeper_server import java_program

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
RUNS = 7
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


def append_with_client(client: BookKeeperClient, handle: int) -> None:
    """Append to one ledger with 100 requests in flight."""
    waiting = deque(client.append([(handle, ENTRY)]) for _ in range(IN_FLIGHT))
    for _ in range(APPENDS - IN_FLIGHT):
        _check(waiting.popleft().wait())
        waiting.append(client.append([(handle, ENTRY)]))
    while waiting:
        _check(waiting.popleft().wait())


def _check(outcomes: list[object]) -> None:
    if not all(isinstance(outcome, int) for outcome in outcomes):
        raise RuntimeError(f"an append failed: {outcomes}")


def append_with_store(store: BookKeeperStore, ledger_ids: list[int]) -> None:
    """Append with 100 threads, each to its own ledger."""

    def append_some(ledger_id: int) -> None:
        for _ in range(APPENDS // IN_FLIGHT):
            store.ledgers.append(ledger_id, [ENTRY])

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(append_some, ledger_ids))


def persist_in_threads(cursors: list[ManagedCursor], entry_ids: Iterator[int]) -> None:
    """Ack and persist with 100 threads, each with its own cursor."""
    first = next(entry_ids) * APPENDS

    def ack_some(cursor: ManagedCursor) -> None:
        for number in range(APPENDS // IN_FLIGHT):
            entry_id = first + 2 * number
            cursor.ack(Position(1, entry_id), now_ms=entry_id)
            cursor.persist(now_ms=entry_id)

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(ack_some, cursors))


def persist_together(cursors: list[ManagedCursor], entry_ids: Iterator[int]) -> None:
    """Ack with each cursor, and persist them together, until there are as many appends."""
    for _ in range(APPENDS // len(cursors)):
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


def resident_mb(process_id: int) -> float:
    """Return the resident memory of a process in MB."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6


def measure(report: BenchmarkReport, hosts: str) -> None:
    """Time all in turn."""
    options = bookkeeper_options()
    with (
        closing(BookKeeperStore(hosts, root="/benchmark", bookkeeper=options)) as store,
        java_loop(hosts, 1) as java_one,
        java_loop(hosts, IN_FLIGHT) as java_many,
    ):
        client = store._client
        handle = client.create(Replication(), ledger_id=None, custom_metadata={}).wait().handle
        ledger_ids = [store.ledgers.create("benchmark") for _ in range(IN_FLIGHT)]
        apart, together, thousand = (
            opened(store, name, number)
            for name, number in (("apart", IN_FLIGHT), ("together", IN_FLIGHT), ("thousand", CURSORS))
        )
        apart_ids, together_ids, thousand_ids = count(1), count(1), count(1)
        per_append = 1e9 * APPENDS
        timings = {
            "java one": Timing(java_one, lambda: APPENDS, per_append),
            "java many": Timing(java_many, lambda: APPENDS, per_append),
            "client": Timing(lambda _: append_with_client(client, handle), lambda: None, per_append),
            "store": Timing(lambda _: append_with_store(store, ledger_ids), lambda: None, per_append),
            "apart": Timing(lambda _: persist_in_threads(apart, apart_ids), lambda: None, per_append),
            "together": Timing(lambda _: persist_together(together, together_ids), lambda: None, per_append),
            "thousand": Timing(lambda _: persist_together(thousand, thousand_ids), lambda: None, per_append),
        }
        seconds = timed_in_turn(timings, runs=RUNS)
        rates = {name: rate(spread) for name, spread in seconds.items()}
        one = Against("Java", rates["java one"].median)
        many = Against("Java", rates["java many"].median)
        report.time("Java, one ledger, 100 in flight", "appends/s", rates["java one"])
        report.time("our client, one ledger, 100 in flight", "appends/s", rates["client"], one)
        report.time("Java, 100 ledgers, 100 in flight", "appends/s", rates["java many"])
        report.time("append, 100 threads", "appends/s", rates["store"], many)
        report.time("ack and persist, 100 threads", "appends/s", rates["apart"], many)
        report.time("ack and persist_all, 100 cursors", "appends/s", rates["together"], many)
        report.time("ack and persist_all, 1,000 cursors", "appends/s", rates["thousand"], many)
        milliseconds = [1e3 * CURSORS * each for each in seconds["thousand"][:3]]
        report.time("ack and persist_all, 1,000 cursors", "ms a call", Spread(*milliseconds, RUNS))
        report.count("memory of the Java client", "MB", resident_mb(client.process_id))


if __name__ == "__main__":
    report = BenchmarkReport("bookkeeper", ABOUT)
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory)) as cluster:
        measure(report, cluster.hosts)
    sys.stdout.flush()
    report.publish()
