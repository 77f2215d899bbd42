"""The time of one `add` with all accounting, by the number of existing holes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ackstate import DeletedRanges, Position, Run
from benchmarks.acked_entries import SEED
from benchmarks.measurement import Against, BenchmarkReport, Spread, Timing, check_equal, timed, timed_in_turn
from benchmarks.peers import IntervalTrees, Peer, RangeList, SortedRanges

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.acked_entries import EntryIds

ABOUT = (
    "A batch of adds on a copy; a batch is at most a tenth of the live holes, so that their number hardly changes. "
    "The loop around `add` is included, the making of the `Position` is not, except where it is said. A peer has only "
    "its ranges to keep: none counts record bytes while it adds. Peers stop at 1 million ranges, `intervaltree` at 100 "
    "thousand: a million take it half a minute to set up."
)
LEDGER = 7
BATCH = 20_000
UNIT = "ns an add"
LIMIT = Against("limit", 1_000)
SIZES = {1_000: "1 k", 10_000: "10 k", 100_000: "100 k", 1_000_000: "1 M", 10_000_000: "10 M"}
PEERS: dict[type[Peer], int] = {RangeList: 1_000_000, SortedRanges: 1_000_000, IntervalTrees: 100_000}


def ranges_of(entry_ids: EntryIds) -> DeletedRanges:
    """Return the range set that holds these entries of one ledger."""
    ranges = DeletedRanges()
    ranges.add_entries(LEDGER, entry_ids)
    return ranges


def isolated(holes: int) -> tuple[DeletedRanges, EntryIds]:
    """Every fourth entry acked, and those that would stand alone between two of them."""
    held = np.arange(0, 4 * holes, 4, dtype=np.uint32)
    return ranges_of(held), held + 2


def filling(holes: int) -> tuple[DeletedRanges, EntryIds]:
    """Every other entry acked, and those between: each fills a hole and makes one range of two."""
    held = np.arange(0, 2 * holes, 2, dtype=np.uint32)
    return ranges_of(held), held[:-1] + 1


def sparse(holes: int) -> tuple[DeletedRanges, EntryIds]:
    """Every 64th entry acked: the bitmap keeps them as sorted lists, not as bits."""
    held = np.arange(0, 64 * holes, 64, dtype=np.uint32)
    return ranges_of(held), held + 32


def many_ledgers() -> tuple[DeletedRanges, list[Position]]:
    """Return a thousand ledgers of a thousand holes, and positions of which each is in another than the one before."""
    held = DeletedRanges()
    for ledger_id in range(1_000):
        held.add_entries(ledger_id, np.arange(0, 4_000, 4, dtype=np.uint32))
    return held, [Position(at % 1_000, 4 * (at // 1_000) + 2) for at in range(BATCH)]


SITUATIONS = {"stands alone": isolated, "fills a hole": filling}


def picked(entry_ids: EntryIds, count: int) -> list[Position]:
    """Choose positions to ack, none twice, in no order."""
    chosen = np.random.default_rng(SEED).choice(entry_ids, count, replace=False)
    return [Position(LEDGER, entry_id) for entry_id in chosen.tolist()]


def add_all(positions: Iterable[Position], ranges: Peer | DeletedRanges) -> None:
    """Ack them one by one: the timed function."""
    add = ranges.add
    for position in positions:
        add(position)


def add_to_each(positions: list[Position], copies: list[DeletedRanges]) -> None:
    """The same, to several copies in turn."""
    for ranges in copies:
        add_all(positions, ranges)


def add_new_positions(positions: list[Position], ranges: DeletedRanges) -> None:
    """The same with each `Position` made in the loop."""
    add = ranges.add
    for ledger_id, entry_id in positions:
        add(Position(ledger_id, entry_id))


def timing(held: DeletedRanges, positions: list[Position]) -> Timing:
    """Return a timing of adds to copies, several where they are small; the counters are right after one."""
    after = held.copy()
    add_all(positions, after)
    assert len(after) == len(held) + len(positions)
    if held.range_count <= 1_000_000:
        after._check()
    copies = BATCH // len(positions)
    return Timing(
        partial(add_to_each, positions),
        lambda: [held.copy() for _ in range(copies)],
        copies * len(positions),
    )


def our_timings() -> dict[str, Timing]:
    """Return all that we do: by size, then at a million holes in other situations."""
    timings = {}
    for holes, size in SIZES.items():
        for kind, situation in SITUATIONS.items():
            held, entry_ids = situation(holes)
            timings[f"{size} holes, {kind}"] = timing(held, picked(entry_ids, min(BATCH, holes // 10)))
    held, entry_ids = sparse(1_000_000)
    timings["1 M holes of 63 entries, stands alone"] = timing(held, picked(entry_ids, BATCH))
    held, jumping = many_ledgers()
    timings["1 M holes in 1,000 ledgers, each add in another"] = timing(held, jumping)
    held, entry_ids = isolated(1_000_000)
    timings["1 M holes, Position made in the loop"] = Timing(
        partial(add_new_positions, picked(entry_ids, BATCH)), held.copy, BATCH
    )
    return timings


def measure_peers(report: BenchmarkReport, size: int, ours: dict[str, Spread]) -> None:
    """Measure those that can do a size."""
    for kind, situation in SITUATIONS.items():
        held, entry_ids = situation(size)
        runs_held = list(held.runs())
        what = f"{SIZES[size]} holes, {kind}"
        for peer_type, holes_max in PEERS.items():
            if size <= holes_max:
                spread = measure_peer(peer_type, held, runs_held, entry_ids)
                report.time(f"{what}: {peer_type.__name__}", UNIT, spread, Against("ours", ours[what].median))


def measure_peer(peer_type: type[Peer], held: DeletedRanges, runs_held: list[Run], entry_ids: EntryIds) -> Spread:
    """Time batches of new entries, each a hundredth of the existing ones; the first one is compared, not timed."""
    runs, batch = 5, min(1_000, held.range_count // 100)
    positions = picked(entry_ids, (runs + 2) * batch)
    peer, ours = peer_type.from_runs(runs_held), held.copy()
    add_all(positions[:batch], peer)
    add_all(positions[:batch], ours)
    check_equal(peer, ours)
    batches = iter([positions[at : at + batch] for at in range(batch, len(positions), batch)])
    return timed(lambda chosen: add_all(chosen, peer), lambda: next(batches), runs=runs, each=batch)


def measure_record_bytes(report: BenchmarkReport) -> None:
    """Measure the purpose of the accounting: the size at any moment."""
    held, _ = isolated(1_000_000)
    ours = timed(read_record_bytes, held.copy, each=BATCH)
    report.time("1 M holes, record_bytes", "ns a read", ours)
    listed = RangeList.from_runs(held.runs())
    assert listed.record_bytes == held.record_bytes
    walked = timed(lambda ranges: ranges.record_bytes, lambda: listed, runs=3)
    report.time("1 M holes, record_bytes: RangeList, which walks", "ns a read", walked, Against("ours", ours.median))


def read_record_bytes(ranges: DeletedRanges) -> None:
    """Read the size repeatedly: one call is too short for the clock."""
    for _ in range(BATCH):
        ranges.record_bytes  # noqa: B018


class DoesNothing:
    """The time of the loop without the add."""

    def add(self, _: Position) -> int:
        return 1


def measure_loop(report: BenchmarkReport) -> None:
    """Measure the overhead that all figures include."""
    positions = [Position(LEDGER, entry_id) for entry_id in range(BATCH)]
    report.time(
        "the loop and an add that does nothing", UNIT, timed(partial(add_all, positions), DoesNothing, each=BATCH)
    )


if __name__ == "__main__":
    report = BenchmarkReport("single_add", ABOUT)
    ours = {what: report.time(what, UNIT, spread, LIMIT) for what, spread in timed_in_turn(our_timings()).items()}
    measure_loop(report)
    for size in SIZES:
        if size <= max(PEERS.values()):
            measure_peers(report, size, ours)
    measure_record_bytes(report)
    report.publish()
