"""The memory of the range store: bytes per acked entry, and bytes per ledger in addition to its bitmap.

Each figure is the growth of a separate process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from pyroaring import BitMap

from ackstate import DeletedRanges, Position, Run
from benchmarks.acked_entries import alternating
from benchmarks.measurement import Against, BenchmarkReport, check_equal
from benchmarks.peers import IntervalTrees, RangeList, SortedRanges

if TYPE_CHECKING:
    from collections.abc import Callable

ABOUT = (
    "Growth of a process of its own while it builds the thing. Allocated: memory from the C library (`mallinfo2`, with "
    "Python's own pools off). Resident: pages, with the pools on: a user's cost, but only to the nearest few hundred "
    "kilobytes. The limits hold for allocated bytes. Alternating acks over 10 million entries are 5 million acked "
    "ones; bits alone would take 0.25 byte for each. Peers hold alternating ranges too, fewer of them. The 8 bytes of "
    "a bitmap's slot in a list are not counted."
)
SPAN = 10_000_000
LEDGER_COUNT = 100_000
LEDGER = 7
LIMIT_ENTRY = Against("limit", 0.3)
LIMIT_LEDGER = Against("limit", 64)


_MALLINFO2 = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
_SLOT_BYTES = 8


class _Mallinfo2(ctypes.Structure):
    # The names of <malloc.h>, each a size_t; only `hblkhd` (mapped by itself) and `uordblks` (handed out) are read.
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO2)


def in_bulk() -> object:
    """Ack every other entry of the span in one call."""
    ranges = DeletedRanges()
    ranges.add_entries(LEDGER, array("I", range(0, SPAN, 2)))
    return ranges


def one_by_one() -> object:
    """Ack every other entry of the span by itself."""
    ranges = DeletedRanges()
    for entry_id in range(0, SPAN, 2):
        ranges.add(Position(LEDGER, entry_id))
    return ranges


def alternating_runs(count: int) -> list[Run]:
    """Return the ranges that a peer is made from."""
    return [Run(LEDGER, first, first + 1) for first in alternating(count).tolist()]


def nearly_empty_ledgers(count: int) -> DeletedRanges:
    """Ack one entry of each of many ledgers."""
    ranges = DeletedRanges()
    for ledger_id in range(count):
        ranges.add(Position(ledger_id, 5))
    return ranges


def one_entry_runs(ledger_count: int) -> list[Run]:
    """Return the ranges of as many ledgers that a peer is made from."""
    return [Run(ledger_id, 5, 6) for ledger_id in range(ledger_count)]


# The objects to build, and the number by which their bytes are divided.
CASES: dict[str, tuple[Callable[[], object], int]] = {
    "in_bulk": (in_bulk, SPAN // 2),
    "one_by_one": (one_by_one, SPAN // 2),
    "list_of_ranges": (lambda: RangeList.from_runs(alternating_runs(1_000_000)), 1_000_000),
    "sorted_dict": (lambda: SortedRanges.from_runs(alternating_runs(1_000_000)), 1_000_000),
    "interval_tree": (lambda: IntervalTrees.from_runs(alternating_runs(100_000)), 100_000),
    "bitmaps_only": (lambda: [BitMap((5,)) for _ in range(LEDGER_COUNT)], LEDGER_COUNT),
    "ledgers": (lambda: nearly_empty_ledgers(LEDGER_COUNT), LEDGER_COUNT),
    "ledgers_range_list": (lambda: RangeList.from_runs(one_entry_runs(LEDGER_COUNT)), LEDGER_COUNT),
    "ledgers_sorted_dict": (lambda: SortedRanges.from_runs(one_entry_runs(LEDGER_COUNT)), LEDGER_COUNT),
    "ledgers_interval_tree": (lambda: IntervalTrees.from_runs(one_entry_runs(LEDGER_COUNT)), LEDGER_COUNT),
}


def growth(case: str) -> tuple[int, int]:
    """Return by how many bytes this process grew, allocated and resident, when it built a case."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    build, _ = CASES[case]
    allocated_before, resident_before = _used(libc)
    built = build()
    allocated_after, resident_after = _used(libc)
    assert built is not None  # It lives until here.
    return allocated_after - allocated_before, resident_after - resident_before


def _used(libc: ctypes.CDLL) -> tuple[int, int]:
    gc.collect()
    libc.malloc_trim(0)
    info = libc.mallinfo2()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return info.uordblks + info.hblkhd, pages * os.sysconf("SC_PAGE_SIZE")


def allocated(case: str) -> float:
    """Return the bytes that a case takes from the C library, divided, in a new process."""
    return _in_new_process(case, "malloc")[0] / CASES[case][1]


def resident(case: str) -> float:
    """Return the bytes of pages that a case takes, divided, in a new process."""
    return _in_new_process(case, "pymalloc")[1] / CASES[case][1]


def _in_new_process(case: str, allocator: str) -> list[int]:
    command = [sys.executable, "-m", "benchmarks.bench_memory", case]
    environment = {**os.environ, "PYTHONMALLOC": allocator}
    finished = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [int(number) for number in finished.stdout.split()]


def report_entries(report: BenchmarkReport) -> None:
    """Report alternating acks."""
    unit = "bytes an acked entry"
    ours = report.count("10 M entries alternating: allocated", unit, allocated("in_bulk"), LIMIT_ENTRY)
    report.count("10 M entries alternating: resident", unit, resident("in_bulk"))
    report.count("the same, one by one: allocated", unit, allocated("one_by_one"), LIMIT_ENTRY)
    report.count("the same, one by one: resident", unit, resident("one_by_one"))
    for case, what in (
        ("list_of_ranges", "1 M ranges: RangeList"),
        ("sorted_dict", "1 M ranges: SortedRanges"),
        ("interval_tree", "100 k ranges: IntervalTrees"),
    ):
        report.count(f"{what}, allocated", unit, allocated(case), Against("ours", ours))
        report.count(f"{what}, resident", unit, resident(case))


def report_ledgers(report: BenchmarkReport) -> None:
    """Report many ledgers of one entry each, beside a plain list of the same bitmaps."""
    unit, what = "bytes a ledger", "100 k ledgers of one entry"
    bitmaps = report.count(f"{what}: bitmaps alone, allocated", unit, allocated("bitmaps_only") - _SLOT_BYTES)
    bitmaps_resident = report.count(f"{what}: bitmaps alone, resident", unit, resident("bitmaps_only") - _SLOT_BYTES)
    ours = report.count(f"{what}: DeletedRanges, allocated", unit, allocated("ledgers"))
    ours_resident = report.count(f"{what}: DeletedRanges, resident", unit, resident("ledgers"))
    report.count(f"{what}: beyond the bitmaps, allocated", unit, ours - bitmaps, LIMIT_LEDGER)
    report.count(f"{what}: beyond the bitmaps, resident", unit, ours_resident - bitmaps_resident)
    for case, name in (
        ("ledgers_range_list", "RangeList"),
        ("ledgers_sorted_dict", "SortedRanges"),
        ("ledgers_interval_tree", "IntervalTrees"),
    ):
        report.count(f"{what}: {name}, allocated", unit, allocated(case), Against("ours", ours))


def check_peers() -> None:
    """Check that peers made from these ranges have the same content and counts, at a small size."""
    alternate = DeletedRanges()
    alternate.add_entries(LEDGER, alternating(10_000))
    for peer_type in (RangeList, SortedRanges, IntervalTrees):
        check_equal(peer_type.from_runs(alternating_runs(10_000)), alternate)
        check_equal(peer_type.from_runs(one_entry_runs(1_000)), nearly_empty_ledgers(1_000))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(*growth(sys.argv[1]))
    else:
        check_peers()
        report = BenchmarkReport("memory", ABOUT)
        report_entries(report)
        report_ledgers(report)
        report.publish()
