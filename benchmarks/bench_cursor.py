"""A cursor on SQLite: what does an ack cost, what is written for it, and what do many cursors cost together?"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ackstate import LedgerMap, Position
from benchmarks.measurement import Against, Report, Spread, Timing, timed, timed_in_turn
from cursor import CursorConfig, ManagedCursor, SqliteStore, persist_all

if TYPE_CHECKING:
    from collections.abc import Iterator

ABOUT = (
    "SQLite with synchronous=FULL in a temporary directory. An ack is of an entry that stands alone above the live "
    "holes. Bytes are those of the records that `persist` wrote for one ack each, by the number of acks, snapshots of "
    "the compaction included. Pulsar's figures are its whole-state records with 10 thousand live holes in 20 thousand "
    "and in 1 million entries, list form, and its reopening of 1 million alternating ranges, words form."
)
LEDGER = 7
ACKS = 20_000
CURSORS = 1_000


@contextmanager
def sqlite() -> Iterator[SqliteStore]:
    """A store of its own."""
    with tempfile.TemporaryDirectory() as directory:
        store = SqliteStore(Path(directory) / "store")
        try:
            yield store
        finally:
            store.close()


def opened(
    store: SqliteStore, holes: int, *, subscription: str = "s", config: CursorConfig | None = None
) -> ManagedCursor:
    """Return a cursor with every other entry acked and durable, so many."""
    log = LedgerMap.from_counts({LEDGER: 2 * holes + 4 * ACKS})
    cursor = ManagedCursor.open(store, topic="t", subscription=subscription, ledgers=log, config=config, now_ms=0)
    cursor.ack_entries(LEDGER, np.arange(1, 2 * holes, 2, dtype=np.uint32), now_ms=0)
    cursor.persist(now_ms=0)
    return cursor


def measure_acks(report: Report) -> None:
    """One ack at a time, and in bulk; each run acks entries of its own."""
    with sqlite() as store:
        for holes, name in ((10_000, "10 k"), (1_000_000, "1 M")):
            cursor = opened(store, holes, subscription=name)
            fresh = iter(np.arange(2 * holes, 2 * holes + 4 * ACKS, 2).reshape(8, -1).tolist())
            spread = timed(
                partial(ack_each, cursor),
                partial(positions_of, fresh),
                runs=7,
                each=ACKS // 4,
            )
            report.time(f"ack of one entry, {name} live holes", "us", per_thousand(spread))
    entries = np.arange(1, 2_000_000, 2, dtype=np.uint32)
    with sqlite() as store:
        log = LedgerMap.from_counts({LEDGER: 2_000_000})
        names = iter(range(10))
        spread = timed(
            lambda cursor: cursor.ack_entries(LEDGER, entries, now_ms=1),
            lambda: ManagedCursor.open(store, topic="t", subscription=f"b{next(names)}", ledgers=log, now_ms=0),
            runs=5,
            each=len(entries),
        )
    report.time("ack_entries of 1 M alternating entries", "ns an entry", spread, Against("limit", 25))


def positions_of(batches: Iterator[list[int]]) -> list[Position]:
    """Return the positions of the next batch of entries."""
    return [Position(LEDGER, entry) for entry in next(batches)]


def per_thousand(spread: Spread) -> Spread:
    """Return nanoseconds as microseconds."""
    return spread._replace(median=spread.median / 1e3, low=spread.low / 1e3, high=spread.high / 1e3)


def ack_each(cursor: ManagedCursor, positions: list[Position]) -> None:
    """Ack one by one: what is timed."""
    for position in positions:
        cursor.ack(position, now_ms=1)


def measure_bytes(report: Report) -> None:
    """Persist after each ack, for long enough that compaction has its share."""
    for holes, name in ((10_000, "10 k"), (1_000_000, "1 M")):
        with sqlite() as store:
            cursor = opened(store, holes)
            before = cursor.stats()
            for number in range(5_000):
                cursor.ack(Position(LEDGER, 2 * holes + 2 * number), now_ms=number)
                cursor.persist(now_ms=number)
            after = cursor.stats()
        written = (after.bytes_persisted - before.bytes_persisted) / 5_000
        pulsar = Against("Pulsar", 177_261) if holes == 1_000_000 else Against("Pulsar", 168_010)
        report.count(f"written for an ack, {name} live holes", "bytes", written, pulsar)
        report.count(
            f"snapshots in 5,000 persists, {name} live holes", "", after.snapshot_count - before.snapshot_count
        )


def measure_together(report: Report) -> None:
    """Flush a thousand cursors of ten acks, with one sync and with a sync each."""
    with sqlite() as store:
        log = LedgerMap.from_counts({LEDGER: 10_000})
        cursors = [
            ManagedCursor.open(store, topic="t", subscription=f"s{number}", ledgers=log, now_ms=0)
            for number in range(CURSORS)
        ]
        firsts = iter(range(0, 10_000, 20))

        def acked() -> list[ManagedCursor]:
            first = next(firsts)
            for cursor in cursors:
                cursor.ack_entries(LEDGER, range(first, first + 20, 2), now_ms=1)
            return cursors

        spreads = timed_in_turn(
            {
                "together": Timing(partial(persist_all, now_ms=2), acked, 1e6),
                "each by itself": Timing(lambda all_of_them: [c.persist(now_ms=2) for c in all_of_them], acked, 1e6),
            },
            runs=7,
        )
    together = report.time(
        f"{CURSORS:,} cursors, 10 acks each, persist_all", "ms", spreads["together"], Against("limit", 50)
    )
    report.time(
        f"{CURSORS:,} cursors, 10 acks each, each by itself",
        "ms",
        spreads["each by itself"],
        Against("ours", together.median),
    )


def measure_recovery(report: Report) -> None:
    """Open a cursor of a million ranges."""
    with sqlite() as store:
        cursor = opened(store, 1_000_000)
        log = cursor._ledgers
        cursor.close(now_ms=1)
        spread = timed(
            lambda _: ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, now_ms=1),
            lambda: None,
            each=1e6,
        )
    report.time("opening with 1 M alternating ranges", "ms", spread, Against("Pulsar, words", 2.6))


if __name__ == "__main__":
    report = Report("cursor", ABOUT)
    measure_acks(report)
    measure_bytes(report)
    measure_together(report)
    measure_recovery(report)
    report.publish()
