"""The time per entry of many acks in one call, by the order of the entries and the type of the argument."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pyroaring import BitMap

from ackstate import DeletedRanges, Position
from benchmarks.acked_entries import alternating, clustered, in_order, shuffled
from benchmarks.measurement import Against, BenchmarkReport, check_equal, timed
from benchmarks.peers import IntervalTrees, Peer, RangeList, SortedRanges

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.acked_entries import EntryIds

ABOUT = (
    "`add_entries` of 1 million entries in one call: into an empty set, and into one that holds half a million others "
    "(the lowest that are not among them). Peers have no bulk call: theirs is a loop of `add` over "
    "fewer entries, 100 thousand, and 10 thousand for `intervaltree`."
)
LEDGER = 7
COUNT = 1_000_000
UNIT = "ns an entry"
LIMIT = Against("limit", 20)
PEERS: dict[type[Peer], int] = {RangeList: 100_000, SortedRanges: 100_000, IntervalTrees: 10_000}

# `array` and numpy lend their memory; a list and a range hand out a Python object an entry.
INPUTS: dict[str, Callable[[EntryIds], Any]] = {
    "BitMap": lambda entry_ids: BitMap(array("I", entry_ids.tobytes())),
    "array('I')": lambda entry_ids: array("I", entry_ids.tobytes()),
    "numpy uint32": lambda entry_ids: entry_ids,
    "numpy int64": lambda entry_ids: entry_ids.astype(np.int64),
    "list of int": lambda entry_ids: entry_ids.tolist(),
}


def patterns(count: int) -> dict[str, EntryIds]:
    """Return the entries of each pattern, in the order in which they come."""
    clusters = clustered(count // 100 + count // 1_000)[:count]
    return {
        "in order": in_order(count),
        "alternating": alternating(count),
        "random order": shuffled(alternating(count)),
        "clustered": clusters,
        "clustered, random order": shuffled(clusters),
    }


def others(entry_ids: EntryIds) -> DeletedRanges:
    """Return a set that holds half as many entries, none of them among these."""
    free = np.setdiff1d(np.arange(int(entry_ids.max()) + 1 + len(entry_ids) // 2, dtype=np.uint32), entry_ids)
    ranges = DeletedRanges()
    assert ranges.add_entries(LEDGER, free[: len(entry_ids) // 2]) == len(entry_ids) // 2
    return ranges


def measure_inputs(report: BenchmarkReport, pattern: str, entry_ids: EntryIds) -> None:
    """Measure one pattern in everything it can come in, into nothing and among others."""
    targets = {"empty": DeletedRanges(), "500 k others": others(entry_ids)}
    for target, held in targets.items():
        for name, made_of in INPUTS.items():
            given = made_of(entry_ids)
            check_added(held, given, entry_ids)
            spread = timed(lambda ranges, given=given: ranges.add_entries(LEDGER, given), held.copy, each=COUNT)
            report.time(f"{pattern}, {target}, {name}", UNIT, spread, LIMIT)


def check_added(held: DeletedRanges, given: Any, entry_ids: EntryIds) -> None:
    """Check that all entries are new and that the counters equal a full recount."""
    ranges = held.copy()
    assert ranges.add_entries(LEDGER, given) == len(entry_ids)
    merged = DeletedRanges()
    merged.add_entries(LEDGER, ranges.entries(LEDGER))
    assert (len(ranges), ranges.range_count, ranges.record_bytes) == (
        len(held) + len(entry_ids),
        merged.range_count,
        merged.record_bytes,
    )


def measure_ranges(report: BenchmarkReport) -> None:
    """Measure the calls without a list of entries: a run and a `range`."""
    spread = timed(lambda ranges: ranges.add_run(LEDGER, 0, COUNT), DeletedRanges, each=COUNT)
    report.time("in order, empty, add_run", UNIT, spread, LIMIT)
    for pattern, given in {"in order": range(COUNT), "alternating": range(0, 2 * COUNT, 2)}.items():
        spread = timed(partial(add_range, given), DeletedRanges, each=COUNT)
        report.time(f"{pattern}, empty, range", UNIT, spread, LIMIT)


def add_range(given: range, ranges: DeletedRanges) -> None:
    """The timed function."""
    ranges.add_entries(LEDGER, given)


def measure_peers(report: BenchmarkReport, pattern: str) -> None:
    """Measure loops of `add`, with ours over the same entries to hold them against."""
    for peer_type, count in PEERS.items():
        entry_ids = patterns(count)[pattern]
        ours = DeletedRanges()
        ours.add_entries(LEDGER, entry_ids)
        positions = [Position(LEDGER, entry_id) for entry_id in entry_ids.tolist()]
        peer = peer_type()
        add_all(positions, peer)
        check_equal(peer, ours)
        bulk = timed(lambda ranges, given=entry_ids: ranges.add_entries(LEDGER, given), DeletedRanges, each=count)
        looped = timed(partial(add_all, positions), peer_type, runs=3, each=count)
        against = Against("ours", bulk.median)
        report.time(f"{pattern}, empty, {count:,} one by one: {peer_type.__name__}", UNIT, looped, against)


def add_all(positions: list[Position], peer: Peer) -> None:
    """Ack them one by one: all that a peer can do."""
    for position in positions:
        peer.add(position)


if __name__ == "__main__":
    report = BenchmarkReport("bulk_add", ABOUT)
    for name, entries in patterns(COUNT).items():
        assert len(entries) == COUNT
        measure_inputs(report, name, entries)
    measure_ranges(report)
    for name in patterns(1):
        measure_peers(report, name)
    report.publish()
