"""The memory of acked ranges and of delayed messages: the growth of a process that builds them, and nothing else."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from intervaltree import Interval, IntervalTree
from pyroaring import BitMap
from sortedcontainers import SortedDict

from ackstate import DeletedRanges, MemoryStore, Position, Run
from ackstate.delay import (
    BucketedDelayIndex,
    BucketRegistry,
    DelayConfig,
    InMemoryDelayTracker,
    SnapshotStorage,
    TopicDelayIndex,
)
from benchmarks import workloads
from benchmarks.measurement import Against, BenchmarkReport, run
from benchmarks.workloads import mixed_delays

if TYPE_CHECKING:
    from collections.abc import Callable

ABOUT = (
    "Growth of a process of its own. Ranges: bytes from the C library (`mallinfo2`, without Python's own pools), every "
    "other entry acked; bits alone would take 0.25 byte for each acked one. Delayed messages: resident pages; 100 "
    "thousand messages that fall due within an hour, in ledgers of 50 thousand; the first is a sealed bucket. "
    "Pulsar: heap of 4.2.4 with a tracker for each of 1,000 subscriptions."
)
LEDGER = 7
DELAYED = 100_000
PULSAR_MB = {1: 7.4}
_MALLINFO2 = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    # The names of <malloc.h>, each a size_t; only `hblkhd` (mapped by itself) and `uordblks` (handed out) are read.
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO2)


def in_bulk(count: int) -> object:
    """Ack every other entry in one call."""
    ranges = DeletedRanges()
    ranges.add_entries(LEDGER, array("I", range(0, 2 * count, 2)))
    return ranges


def one_by_one(count: int) -> object:
    """Ack every other entry by itself."""
    ranges = DeletedRanges()
    for entry_id in range(0, 2 * count, 2):
        ranges.add(Position(LEDGER, entry_id))
    return ranges


def nearly_empty_ledgers(count: int) -> object:
    """Ack one entry of each of many ledgers."""
    ranges = DeletedRanges()
    for ledger_id in range(count):
        ranges.add(Position(ledger_id, 5))
    return ranges


RANGES: dict[str, tuple[Callable[[int], object], int]] = {
    "DeletedRanges, in one call": (in_bulk, 5_000_000),
    "DeletedRanges, one by one": (one_by_one, 5_000_000),
    "a list of ranges": (lambda count: [Run(LEDGER, first, first + 1) for first in range(0, 2 * count, 2)], 1_000_000),
    "sortedcontainers": (lambda count: SortedDict({first: first + 1 for first in range(0, 2 * count, 2)}), 1_000_000),
    "intervaltree": (lambda count: IntervalTree(Interval(at, at + 1) for at in range(0, 2 * count, 2)), 100_000),
}
"""What builds a number of acked entries, each a range of its own."""
LEDGERS: dict[str, tuple[Callable[[int], object], int]] = {
    "DeletedRanges": (nearly_empty_ledgers, 100_000),
    "a list of ranges": (lambda count: [Run(ledger_id, 5, 6) for ledger_id in range(count)], 100_000),
    "bitmaps alone": (lambda count: [BitMap((5,)) for _ in range(count)], 100_000),
}
"""What builds a number of ledgers of one acked entry."""


def trackers(count: int) -> object:
    """Return a tracker for each subscription, as Pulsar has."""
    made = [InMemoryDelayTracker(tick_time_ms=workloads.TICK_MS) for _ in range(count)]
    for tracker in made:
        _fill(tracker)
    return made


def shared(count: int) -> object:
    """Return an index of a topic, and a view for each subscription."""
    return _views_of(TopicDelayIndex(tick_time_ms=workloads.TICK_MS), count)


def bucketed(count: int) -> object:
    """Return the same for an index in buckets, whose storage is not counted."""
    storage = SnapshotStorage(STORE.ledgers, BucketRegistry(STORE.metadata, "/delayed/t"), "delayed/t")
    return _views_of(BucketedDelayIndex(DelayConfig(tick_time_ms=workloads.TICK_MS), storage=storage), count)


STORE = MemoryStore()
DELAYS: dict[str, Callable[[int], object]] = {
    "a tracker for each subscription": trackers,
    "TopicDelayIndex": shared,
    "BucketedDelayIndex": bucketed,
}


def _fill(tracker: object) -> None:
    for ledger in mixed_delays(DELAYED):
        for position, deliver_at_ms in ledger.messages():
            tracker.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=0)


def _views_of(index: object, count: int) -> object:
    views = [index.open_view(lambda _position: False) for _ in range(count)]
    _fill(views[0])
    last = DELAYED - 1
    for view in views[1:]:
        ends = [Position(1 + at // workloads.LEDGER_SIZE, at % workloads.LEDGER_SIZE) for at in (0, last)]
        assert view.unknown(ends, now_ms=0) == []
    assert views[-1].delayed_message_count == DELAYED
    return views


CASES = {"ranges": RANGES, "ledgers": LEDGERS}


def grown(table: str, case: str, count: int) -> int:
    """Return by how many bytes this process grows when it builds a case: allocated, of delays resident."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2

    def used() -> int:
        gc.collect()
        libc.malloc_trim(0)
        if table == "delays":
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        info = libc.mallinfo2()
        return info.uordblks + info.hblkhd

    build = DELAYS[case] if table == "delays" else CASES[table][case][0]
    # A warm-up: the allocations of the first use are not part of it, nor the pages that the first ones fill in part.
    kept = [build(1) for _ in range(8)]
    before = used()
    kept.append(build(count))
    return used() - before


def in_new_process(table: str, case: str, count: int) -> int:
    """Return the same for a process of its own."""
    command = [sys.executable, "-c", f"from benchmarks.memory import grown; print(grown({table!r}, {case!r}, {count}))"]
    environment = {**os.environ, "PYTHONMALLOC": "pymalloc" if table == "delays" else "malloc"}
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def ranges(report: BenchmarkReport, small: int) -> None:
    """Every other entry, and many ledgers of one entry, beside usual structures."""
    for table, unit in (("ranges", "bytes an acked entry"), ("ledgers", "bytes a ledger")):
        ours = None
        for case, (_, count) in CASES[table].items():
            taken = in_new_process(table, case, count // small) / (count // small)
            report.count(case, unit, taken, ours and Against("ours", ours))
            ours = ours or taken


def delays(report: BenchmarkReport, small: int) -> None:
    """Delayed messages, by the subscriptions of their topic."""
    for count in (1, max(100 // small, 1)):
        pulsar = Against("Pulsar", PULSAR_MB[count]) if count in PULSAR_MB else None
        for case in DELAYS:
            taken = in_new_process("delays", case, count)
            report.count(f"{case}, subscriptions: {count:,}", "MB", taken / 1e6, pulsar)


if __name__ == "__main__":
    run("memory", ABOUT, {"ranges": ranges, "delays": delays})
