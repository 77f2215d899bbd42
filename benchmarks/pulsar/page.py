"""Renders ``results/pulsar.json`` as `docs/pulsar-benchmark.md` with its picture: ``python -m benchmarks.pulsar.page``.

The benchmark need not run again for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ackstate.analysis.atomic_write import write_atomically
from benchmarks.pulsar.picture import drawn
from benchmarks.pulsar.results import OURS, Results
from benchmarks.pulsar.tasks import FULL
from benchmarks.table import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.pulsar.results import Comparison

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE, PICTURE = DOCS / "pulsar-benchmark.md", DOCS / "pulsar-benchmark.svg"
SINGLE_ACK = "ack, one a call"
# Nearer to each other than the rounds of one side.
_EQUAL = 1.05


def page(results: Results) -> str:
    """Return the text of the page."""
    growing = [row for row in results.rows if row.grows]
    others = [row for row in results.rows if not row.grows]
    environment = results.environment
    return _PAGE.format(
        growing=_ahead_in(growing),
        behind=_behind(growing),
        others=_ahead_in(others),
        single=_single(results.rows),
        growing_table=_table(growing),
        others_table=_table(others),
        acks=f"{FULL.acks:,}",
        persisted=f"{FULL.persisted:,}",
        list_acks=" and ".join(map(str, FULL.persisted_as_list)),
        environment=f"Python {environment['python']}, Java {results.java}, {environment['cores']} cores",
    )


def verdict(row: Comparison) -> str:
    """Return the side that is ahead, and by how much."""
    if 1 / _EQUAL < row.times < _EQUAL:
        return "equal"
    if row.times > 1:
        return f"ours, {_times(row.times)}"
    return f"{row.best_release}, {_times(1 / row.times)}"


def _ahead_in(rows: Sequence[Comparison]) -> str:
    ahead = sum(row.times >= _EQUAL for row in rows)
    behind = sum(row.times <= 1 / _EQUAL for row in rows)
    return f"{ahead} of {len(rows)} rows and higher in {behind}"


def _behind(growing: Sequence[Comparison]) -> str:
    found = [f"`{row.what}` ({_times(1 / row.times)})" for row in growing if row.times <= 1 / _EQUAL]
    if not found:
        return "Pulsar is ahead in none of them."
    *others, last = found
    before = f"{', '.join(others)} and " if others else ""
    return f"Pulsar is ahead in {before}{last}."


def _single(rows: Sequence[Comparison]) -> str:
    times = sorted(1 / row.times for row in rows if row.what.startswith(SINGLE_ACK))
    goal = "which is within the goal of 4 times" if times[-1] <= 4 else "and the goal is at most 4 times"
    return f"{number(times[0])} to {number(times[-1])} times as long as in Java, {goal}"


def _table(rows: Sequence[Comparison]) -> str:
    releases = [side for side in rows[0].spreads if side != OURS]
    lines = [("", "unit", OURS, *releases, "ahead"), ("---", "---", *["---:"] * (1 + len(releases)), "---")]
    lines += [(row.what, row.unit, *(_cell(row, side) for side in (OURS, *releases)), verdict(row)) for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(row: Comparison, side: str) -> str:
    median, low, high = (number(row.spreads[side][part]) for part in ("median", "low", "high"))
    return median if low == high else f"{median} ({low} to {high})"


def _times(ratio: float) -> str:
    return f"{number(round(ratio, 1) if ratio < 100 else round(ratio))} times"


_PAGE = """\
# Pulsar's own classes next to ours

`make bench-pulsar` runs Pulsar's `ManagedCursorImpl`, its set of individually deleted ranges and its trackers of
delayed messages in a process of Java, and ackstate in a process of Python, on the same seeded workloads in alternating
rounds. It writes `benchmarks/results/pulsar.json`, from which this page and its picture are generated.

**Where Pulsar's cost grows with the state, ours is lower in {growing}.** {behind}

Where the cost does not grow, ours is lower in {others}: a call of Python takes longer than one of Java. A single ack
takes {single}.

![Pulsar's figures divided by ours, row by row](pulsar-benchmark.svg)

Each cell is the median of the rounds, with the lowest and the highest. The last column compares our median with that of
the better release.

## Rows whose cost grows with the state in Pulsar

{growing_table}

## Rows whose cost does not grow

{others_table}

## Method

- Both sides read the same files of positions, and run in turn: a slow spell of the machine affects all of them.
  Pulsar has up to 20 warm-up rounds per row, ours one.
- Storage is in memory on both sides and takes no time: `MemoryStore`, and the BookKeeper of Pulsar's tests without its
  delays. So the figures are the work of the cursor, without disk and network.
- Results are compared in each round: ranges, acked entries, mark-delete position, messages drained. A result that
  differs from the one computed from the workload ends the benchmark. ackstate decodes Pulsar's records of a small
  workload, in both forms, and a test compares them with the state of our cursor.
- **Acks**: every other entry, out of order within windows of 1,000, in ledgers of 50,000. {acks} acks in memory above
  10 thousand or 500 thousand holes, with nothing persisted. `as entry ids` is `ack_entries` instead of `ack_many`;
  Pulsar's figure is that of the row above.
- **Ack and persist**: each ack is persisted: {persisted} acks, ours with their compactions. Up to 1,000 of Pulsar's
  calls are in flight, as in a broker, so its two threads overlap. Words are Pulsar's default form in both releases. The
  rows of the list form have the same figure of ours beside them, and {list_acks} of Pulsar's acks. No limit on the
  number of ranges is set, so both sides store all acks. A record of 500 thousand ranges in the list form is larger than
  the 5 MiB that a real bookie accepts.
- **Reopening**: a cursor is opened after a crash. Our journal has a snapshot and 1,000 deltas, Pulsar's ledger one
  record. Pulsar's time includes opening the managed ledger. The wide ranges are 100 entries each on average, in about
  4,000 ledgers.
- **Range set**: `DeletedRanges` and Pulsar's `RangeSetWrapper`, which counts its ranges again after each change.
- **Delayed messages**: due within an hour, any time as likely as another. The clock goes in steps of a minute, and each
  call takes at most 1,000 due messages. Pulsar has a tracker for each subscription, by default the one in memory; ours
  is one index for the topic with a view for each. Memory is the used heap of 100 trackers times ten, because 1,000 do
  not fit into the heap of 3 GB, and for ours the growth of a process with all 1,000 views. One subscription: the
  average of ten trackers.
- **Delay buckets**: Pulsar's `BucketDelayedDeliveryTracker` and `BucketedDelayIndex` as the tracker of a single
  subscription. Each ledger becomes a bucket. The time to add includes the seals. After a restart the buckets are
  recovered from storage in memory, and drained.

## Not measured

- Pulsar 5.0.1 and later: it needs Java 21, and some of its libraries could not be downloaded. 5.0.0-M1 is a milestone;
  its range set is that of 4.2.4.
- The time of real storage, of replication and of the network; several threads that ack at once; CPU seconds.
- Acks of single messages of a batch.

{environment}; Pulsar has a heap of 3 GB for each release.
"""


def main() -> None:
    """Write the page and the picture."""
    results = Results.read()
    write_atomically(PICTURE, drawn(results.rows))
    write_atomically(PAGE, page(results))


if __name__ == "__main__":
    main()
