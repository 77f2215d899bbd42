"""The time to choose the ten thousand of a million ranges that fit a limit."""

from __future__ import annotations

from functools import partial
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ackstate import DeletedRanges, Run
from ackstate.selection import Keep, Selection, select
from benchmarks.acked_entries import heavy_tailed_widths, random_widths
from benchmarks.measurement import Against, BenchmarkReport, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.acked_entries import EntryIds

ABOUT = (
    "`select` of 10,000 among 1 million ranges. Naive is `heapq.nlargest` (WIDEST) or `islice` (LOWEST) over `runs()` "
    "and an `add_run` for each that is kept; it must choose the same."
)
RANGE_COUNT_MAX = 10_000
LIMIT = Against("limit", 150)


def spread_over(ledger_count: int, run_count: int, widths: Callable[[int], EntryIds]) -> DeletedRanges:
    """Return ranges of `run_count` runs, split evenly, a ledger holding entries from 0 on."""
    entry_ids = widths(run_count)
    starts = np.flatnonzero(np.diff(entry_ids, prepend=np.uint32(0)) != 1)
    assert len(starts) == run_count
    ranges = DeletedRanges()
    for ledger_id, piece in enumerate(np.split(entry_ids, starts[:: run_count // ledger_count][1:])):
        ranges.add_entries(ledger_id, piece - piece[0])
    assert ranges.range_count == run_count
    return ranges


def naive_widest(ranges: DeletedRanges) -> Selection:
    """Choose by the number of entries, the lower of two equals, with a heap over all runs."""
    return _rebuilt(ranges, nlargest(RANGE_COUNT_MAX, ranges.runs(), key=lambda run: run.end - run.first))


def naive_lowest(ranges: DeletedRanges) -> Selection:
    """Choose the first ones."""
    return _rebuilt(ranges, islice(ranges.runs(), RANGE_COUNT_MAX))


def _rebuilt(ranges: DeletedRanges, runs: Iterable[Run]) -> Selection:
    kept = DeletedRanges()
    for run in runs:
        kept.add_run(*run)
    return Selection(kept, len(ranges) - len(kept))


def measure(report: BenchmarkReport, shape: str, ranges: DeletedRanges) -> None:
    """Measure both choices, ours and naive."""
    for keep, naive in {Keep.WIDEST: naive_widest, Keep.LOWEST: naive_lowest}.items():
        chosen = select(ranges, range_count_max=RANGE_COUNT_MAX, keep=keep)
        assert chosen == naive(ranges)
        assert chosen.kept.range_count == RANGE_COUNT_MAX
        choosing = partial(select, range_count_max=RANGE_COUNT_MAX, keep=keep)
        ours = timed(choosing, lambda: ranges, runs=5, each=1e6)
        report.time(f"{shape}: {keep.name}", "ms", ours, LIMIT)
        walked = timed(naive, lambda: ranges, runs=1, each=1e6)
        report.time(f"{shape}: {keep.name}, naive", "ms", walked, Against("ours", ours.median))


if __name__ == "__main__":
    report = BenchmarkReport("select", ABOUT)
    measure(report, "1 ledger, widths 1 to 100", spread_over(1, 1_000_000, random_widths))
    measure(report, "1 ledger, widths with a heavy tail", spread_over(1, 1_000_000, heavy_tailed_widths))
    measure(report, "100 ledgers of 10,000, widths 1 to 100", spread_over(100, 1_000_000, random_widths))
    measure(report, "100,000 ledgers of 10, widths 1 to 100", spread_over(100_000, 1_000_000, random_widths))
    report.publish()
