"""A cursor on SQLite: the time of an ack in memory, and of persisting many cursors together."""

from __future__ import annotations

import random
import tempfile
import threading
from array import array
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from time import thread_time_ns
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap

from ackstate import LedgerMap, ManagedCursor, MemoryStore, Position, SqliteStore
from ackstate.cursor import persist_all
from ackstate.cursor.results import Receipt, ReceiptStatus
from benchmarks.acked_entries import SEED
from benchmarks.measurement import Against, BenchmarkReport, Timing, timed_in_turn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ackstate.errors import AckStateError
    from ackstate.stores import MetadataStore, Store

ABOUT = (
    "SQLite with synchronous=FULL in a temporary directory. An ack is of an entry that stands alone above the live "
    "holes, and is accepted, not persisted. Pulsar's figures are those of acks of every other entry with nothing "
    "persisted, one a call and 1,000 a call. CPU: every other entry, out of order within windows of 1,000, in memory; "
    "beside the acks is the least that they need in plain Python: a lock, two bitmaps and a receipt for one, the "
    "reading of each position and a sorted bitmap for a list."
)
LEDGER = 7
ACKS = 5_000
ACK_RUNS = 7
CURSORS = 1_000
FLUSH_RUNS = 7
LISTED = 50_000
LIST_GOALS = {"ack_entries of one entry in numpy": 1_900, "ack_many of 100": 60, "ack_many of 1,000": 60}


class CountingStore:
    """A store that counts the calls of its ledgers; each append is one sync."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.syncs = self.entries_read = self.bytes_read = 0

    @property
    def ledgers(self) -> CountingStore:
        """The logs: this, which counts, and the store's for all else."""
        return self

    @property
    def metadata(self) -> MetadataStore:
        """The small values, uncounted."""
        return self._store.metadata

    def append_many(self, appends: Sequence[tuple[int, Sequence[bytes]]]) -> list[int | AckStateError]:
        """See `LedgerStore.append_many`."""
        self.syncs += 1
        return self._store.ledgers.append_many(appends)

    def append(self, ledger_id: int, entries: Sequence[bytes]) -> int:
        """See `LedgerStore.append`."""
        self.syncs += 1
        return self._store.ledgers.append(ledger_id, entries)

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """See `LedgerStore.read`."""
        entries = self._store.ledgers.read(ledger_id, first, end)
        self.entries_read += len(entries)
        self.bytes_read += sum(map(len, entries))
        return entries

    def __getattr__(self, name: str) -> object:
        return getattr(self._store.ledgers, name)


@contextmanager
def sqlite() -> Iterator[SqliteStore]:
    """A store of its own."""
    with tempfile.TemporaryDirectory() as directory, closing(SqliteStore(Path(directory) / "store")) as store:
        yield store


def measure_acks(report: BenchmarkReport) -> None:
    """One ack at a time, by live holes; each run acks entries of its own."""
    timings = {}
    with sqlite() as store:
        for holes, name in ((0, "no"), (10_000, "10 k"), (1_000_000, "1 M")):
            log = LedgerMap.from_counts({LEDGER: 2 * holes + 2 * (ACK_RUNS + 1) * ACKS + 2})
            cursor = ManagedCursor.open(store, topic="t", subscription=name, ledgers=log, now_ms=0)
            cursor.ack_entries(LEDGER, np.arange(1, 2 * holes, 2, dtype=np.uint32), now_ms=0)
            cursor.persist(now_ms=0)
            fresh = iter(np.arange(2 * holes + 1, log.entry_count(LEDGER) - 1, 2).reshape(ACK_RUNS + 1, -1).tolist())
            timings[name] = Timing(partial(ack_each, cursor), partial(positions_of, fresh), 1e3 * ACKS)
        for name, spread in timed_in_turn(timings, runs=ACK_RUNS).items():
            report.time(f"ack of one entry, {name} live holes", "us", spread, Against("limit", 2))
            report.time(f"the same, {name} live holes, beside Pulsar", "us", spread, Against("Pulsar", 0.236, 0.314))


def positions_of(batches: Iterator[list[int]]) -> list[Position]:
    """Return the positions of the next batch of entries."""
    return [Position(LEDGER, entry) for entry in next(batches)]


def ack_each(cursor: ManagedCursor, positions: list[Position]) -> None:
    """Ack one by one: the timed function."""
    for position in positions:
        cursor.ack(position, now_ms=1)


def measure_bulk(report: BenchmarkReport) -> None:
    """A million alternating entries: in one call, and a thousand in each."""
    entries = np.arange(1, 2_000_000, 2, dtype=np.uint32)
    calls = {"one call": [entries], "1,000 a call": np.split(entries, 1_000)}
    with sqlite() as store:
        log = LedgerMap.from_counts({LEDGER: 2_000_000})
        names = count()

        def new() -> ManagedCursor:
            return ManagedCursor.open(store, topic="t", subscription=f"s{next(names)}", ledgers=log, now_ms=0)

        timings = {name: Timing(partial(ack_parts, parts), new, len(entries)) for name, parts in calls.items()}
        for name, spread in timed_in_turn(timings).items():
            what = f"ack_entries of 1 M alternating entries, {name}"
            report.time(what, "ns an entry", spread, Against("limit", 25))
            report.time(f"{what}, beside Pulsar", "ns an entry", spread, Against("Pulsar", 52, 63))


def ack_parts(parts: list[np.ndarray], cursor: ManagedCursor) -> None:
    """Ack entries in batches: the timed function."""
    for part in parts:
        cursor.ack_entries(LEDGER, part, now_ms=1)


def measure_lists(report: BenchmarkReport) -> None:
    """Every other entry, out of order within windows of 1,000, by lists, next to the least that plain Python needs."""
    chance = random.Random(SEED)
    windows = [[Position(LEDGER, first + 2 * at) for at in range(1_000)] for first in range(1, 2 * LISTED, 2_000)]
    for window in windows:
        chance.shuffle(window)
    positions = [position for window in windows for position in window]
    lists = {size: [positions[at : at + size] for at in range(0, LISTED, size)] for size in (100, 1_000)}
    log, names = LedgerMap.from_counts({LEDGER: 2 * LISTED + 2}), count()
    store = MemoryStore()

    def new() -> ManagedCursor:
        return ManagedCursor.open(store, topic="t", subscription=f"s{next(names)}", ledgers=log, now_ms=0)

    def ack_many(parts: list[list[Position]], cursor: ManagedCursor) -> None:
        for part in parts:
            cursor.ack_many(part, now_ms=1)

    def ack_alone(parts: list[np.ndarray], cursor: ManagedCursor) -> None:
        for part in parts:
            cursor.ack_entries(LEDGER, part, now_ms=1)

    alone = [np.array([entry_id]) for _, entry_id in positions]
    timings: dict[str, Timing] = {"an ack": Timing(lambda cursor: ack_each(cursor, positions), new, LISTED)}
    timings["a lock, two bitmaps and a receipt"] = Timing(partial(into_two_bitmaps, positions), BitMap, LISTED)
    timings["ack_entries of one entry in numpy"] = Timing(partial(ack_alone, alone), new, LISTED)
    for size, parts in lists.items():
        timings[f"ack_many of {size:,}"] = Timing(partial(ack_many, parts), new, LISTED)
        timings[f"the bitmaps of {size:,} positions"] = Timing(partial(into_bitmaps, parts), BitMap, LISTED)
    spreads = timed_in_turn(timings, runs=ACK_RUNS, clock=thread_time_ns)
    for name, spread in spreads.items():
        goal = LIST_GOALS.get(name)
        report.time(f"{name}, CPU", "ns an entry", spread, None if goal is None else Against("goal", goal))


def into_two_bitmaps(positions: list[Position], whole: BitMap) -> None:
    """Do the least that an ack needs: add to the acked and to the unpersisted entries, and return a receipt."""
    lock, part, opened, new = threading.RLock(), BitMap(), object(), tuple.__new__

    def ack(position: Position, *, now_ms: int) -> Receipt:  # noqa: ARG001 - as `ManagedCursor.ack`
        with lock:
            _, entry_id = position
            if entry_id not in whole and entry_id - 1 not in whole and entry_id + 1 not in whole:
                whole.add(entry_id)
                part.add(entry_id)
        return new(Receipt, (1, 1, opened, {}, ReceiptStatus.ACCEPTED, None))

    for position in positions:
        ack(position, now_ms=1)


def into_bitmaps(parts: list[list[Position]], whole: BitMap) -> None:
    """Do the least that a list of acks needs: read each position, and add the entries to the acked ones."""
    for part in parts:
        _, entry_ids = zip(*part, strict=True)
        ids = array("I", entry_ids)
        np.frombuffer(ids, np.uint32).sort()
        whole |= BitMap(ids)


def measure_together(report: BenchmarkReport) -> None:
    """Flush a thousand cursors of ten acks, with one sync and with a sync each."""
    with sqlite() as sqlite_store:
        store = CountingStore(sqlite_store)
        log = LedgerMap.from_counts({LEDGER: 40_000})
        cursors = [
            ManagedCursor.open(store, topic="t", subscription=f"s{number}", ledgers=log, now_ms=0)
            for number in range(CURSORS)
        ]
        firsts = iter(range(0, 40_000, 20))

        def acked() -> list[ManagedCursor]:
            first = next(firsts)
            for cursor in cursors:
                cursor.ack_entries(LEDGER, range(first, first + 20, 2), now_ms=1)
            return cursors

        syncs = {}
        for name, flush in FLUSHES.items():
            before = store.syncs
            flush(acked())
            syncs[name] = store.syncs - before
        timings = {name: Timing(flush, acked, 1e6) for name, flush in FLUSHES.items()}
        spreads = timed_in_turn(timings, runs=FLUSH_RUNS)
    what = f"{CURSORS:,} cursors, 10 acks each"
    together = report.time(f"{what}, persist_all", "ms", spreads["together"], Against("limit", 50))
    report.count(f"{what}, persist_all", "syncs", syncs["together"], Against("limit", 1))
    ours = Against("ours", together.median)
    report.time(f"{what}, each by itself", "ms", spreads["each by itself"], ours)
    report.count(f"{what}, each by itself", "syncs", syncs["each by itself"])


def flush_each(cursors: list[ManagedCursor]) -> None:
    """Persist one after the other."""
    for cursor in cursors:
        cursor.persist(now_ms=2)


FLUSHES = {"together": partial(persist_all, now_ms=2), "each by itself": flush_each}


if __name__ == "__main__":
    report = BenchmarkReport("cursor", ABOUT)
    measure_acks(report)
    measure_bulk(report)
    measure_lists(report)
    measure_together(report)
    report.publish()
