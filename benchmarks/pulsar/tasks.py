"""Lists the tasks of the benchmark: commands, workloads, expected results, and the rows of the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.memory import DELAYED
from benchmarks.pulsar import workloads
from benchmarks.workloads import LEDGER_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from benchmarks.pulsar.workloads import Rows

_TRACKERS = 100  # a thousand do not fit into the heap; the memory is in proportion
_STEP_MS, _END_MS = 60_000, 3_660_000
_DUE_A_CALL = 1_000
COUNTS = 20  # also in RangeSets.java
LEDGER_WEIGHT = 1_000_003  # also in Delays.java
OURS, PULSAR = "ours", "Pulsar"


class Sizes(NamedTuple):
    """The sizes of the workloads.

    Attributes:
        holes: The two numbers of ack holes.
        acks: Acks in memory of a round.
        persisted: Acks of a round that are each persisted: our journal is compacted at least once.
        persisted_as_list: The same for Pulsar's list form, for each number of holes.
        ranges: The two numbers of ranges of a cursor that is opened again, and of a set.
        lookups: Lookups in a set.
        deltas: Persists since the snapshot of our cursor that is opened again.
        delayed: Delayed messages that are added and drained.
    """

    holes: tuple[int, int]
    acks: int
    persisted: int
    persisted_as_list: tuple[int, int]
    ranges: tuple[int, int]
    lookups: int
    deltas: int
    delayed: int


FULL = Sizes((10_000, 500_000), 50_000, 6_000, (500, 10), (10_000, 1_000_000), 200_000, 1_000, 1_000_000)
SMALL = Sizes((10, 500), 1_200, 60, (5, 5), (100, 1_000), 500, 20, 3_000)


class Row(NamedTuple):
    """A figure that a task gives for each side.

    Attributes:
        what: Its name.
        unit: The unit of the figure.
        source: The field of the answers.
        each: Divides it.
        beside: The row from which the figure of a side is taken that this task does not measure.
    """

    what: str
    unit: str
    source: str = "nanos"
    each: float = 1
    beside: str = ""


@dataclass(frozen=True)
class Task:
    """A command and how it is measured.

    Attributes:
        rows: The figures.
        command: The command.
        options: For both sides.
        ours: More options for our side.
        expected: Results that every answer must have.
        only: Measure only this side.
        prepare: The options of a `store` command before the first round, or none.
        rounds: How many are measured.
        warm_ups: How many of Pulsar's are not; ours needs only one.
    """

    rows: tuple[Row, ...]
    command: str
    options: Mapping[str, object]
    expected: Mapping[str, int]
    ours: Mapping[str, object] = field(default_factory=dict)
    only: str = ""
    prepare: Mapping[str, object] | None = None
    rounds: int = 5
    warm_ups: int = 10


def all_tasks(directory: Path, sizes: Sizes = FULL) -> Iterator[Task]:
    """Write the workloads into a directory, and yield the tasks."""
    yield from acks(directory, sizes)
    yield from persists(directory, sizes)
    yield from reopenings(directory, sizes)
    yield from range_sets(directory, sizes)
    yield from delays(directory, sizes)


def acks(directory: Path, sizes: Sizes) -> Iterator[Task]:
    """Acks in memory, with nothing persisted."""
    file = workloads.written(workloads.every_other(max(sizes.holes) + sizes.acks), directory / "acks")
    for list_size, name in ((1, "ack, one a call"), (100, "ack, lists of 100"), (1_000, "ack, lists of 1,000")):
        for holes in sizes.holes:
            held = f"{short(holes)} holes"
            options = {"file": file, "holes": holes, "acks": sizes.acks, "list": list_size, "persist": 0, "words": 1}
            row = Row(f"{name}, {held}", "ns an ack", each=sizes.acks)
            yield Task((row,), "ack", options, all_acked(holes + sizes.acks))
            if list_size == 1_000:
                row = row._replace(what=f"{name} as entry ids, {held}", beside=row.what)
                yield Task((row,), "ack", options, all_acked(holes + sizes.acks), ours={"entries": 1}, only=OURS)


def persists(directory: Path, sizes: Sizes) -> Iterator[Task]:
    """Acks of which each is persisted: the time and the bytes, in both forms of Pulsar's records."""
    for holes, count in zip(sizes.holes, sizes.persisted_as_list, strict=True):
        held = f"{short(holes)} holes"
        file = workloads.written(workloads.every_other(holes + sizes.persisted), directory / f"persists-{holes}")
        options = {"file": file, "holes": holes, "acks": sizes.persisted, "list": 1, "persist": 1, "words": 1}
        time, size = f"ack and persist, {held}", f"written for an ack, {held}"
        rows = (
            Row(time, "us an ack", each=1e3 * sizes.persisted),
            Row(size, "bytes", "bytes", sizes.persisted),
        )
        yield Task(rows, "ack", options, all_persisted(holes, sizes.persisted), warm_ups=4)
        options = options | {"acks": count, "words": 0}
        rows = (
            Row(f"{time}, Pulsar's list form", "us an ack", each=1e3 * count, beside=time),
            Row(f"{size}, Pulsar's list form", "bytes", "bytes", count, beside=size),
        )
        yield Task(rows, "ack", options, all_persisted(holes, count), only=PULSAR, rounds=3, warm_ups=2)


def reopenings(directory: Path, sizes: Sizes) -> Iterator[Task]:
    """Opening a cursor again after a crash."""
    few, many = sizes.ranges
    shapes = {
        f"{short(few)} ranges": workloads.single_entries(few),
        f"{short(many)} ranges": workloads.single_entries(many),
        f"{short(many)} wide ranges": workloads.wide_runs(many),
    }
    for name, runs in shapes.items():
        stored = {"file": workloads.written(runs, directory / name.replace(" ", "-")), "words": 1}
        expected = no_prefix_acked() | {"ranges": len(runs), "acked": int((runs[:, 2] - runs[:, 1]).sum())}
        row = Row(f"reopen, {name}", "ms", each=1e6)
        reopen = Task(
            (row,), "reopen", {}, expected, prepare=stored, ours={"deltas": sizes.deltas}, rounds=9, warm_ups=20
        )
        yield reopen
        if len(runs) > few:
            row = row._replace(what=f"{row.what}, Pulsar's list form", beside=row.what)
            yield Task((row,), "reopen", {}, expected, prepare=stored | {"words": 0}, only=PULSAR, warm_ups=5)


def range_sets(directory: Path, sizes: Sizes) -> Iterator[Task]:
    """The set of individually deleted ranges alone."""
    for count in sizes.ranges:
        name = f"{short(count)} ranges"
        rows = workloads.every_other(count)
        file = workloads.written(rows, directory / f"added-{count}")
        looked_up = workloads.lookups(sizes.lookups, 2 * count)
        options = {"file": file, "lookups": workloads.written(looked_up, directory / f"lookups-{count}")}
        found = np.isin(_keys(looked_up), _keys(rows[:-COUNTS])).sum()
        expected = {"ranges": count, "found": int(found), "counted": sum(range(count - COUNTS + 1, count + 1))}
        adds = Row(f"range set: add one entry, {name}", "ns", "add_nanos", count - COUNTS)
        finds = Row(f"range set: is an entry acked, {name}", "ns", "lookup_nanos", sizes.lookups)
        counts = Row(f"range set: add one, then count, {name}", "us", "count_nanos", 1e3 * COUNTS)
        yield Task((adds, finds, counts), "fill", options, expected, warm_ups=3)
        row = Row(f"range set: memory, {name}", "kB", "bytes", 1e3)
        yield Task((row,), "weigh", {"file": file, "copies": 20}, {"ranges": count}, rounds=1, warm_ups=0)


def delays(directory: Path, sizes: Sizes) -> Iterator[Task]:
    """Delayed messages: Pulsar has a tracker for each subscription, we have an index for the topic."""
    rows = workloads.delayed(sizes.delayed)
    file = workloads.written(rows, directory / "delayed")
    options = {"file": file, "maximum": _DUE_A_CALL, "step": _STEP_MS, "end": _END_MS}
    expected = {"drained": len(rows), "sum": checksum(rows), "left": 0}
    add = Row(f"delayed: add, {short(sizes.delayed)} messages", "ns a message", "add_nanos", sizes.delayed)
    drain = Row(f"delayed: drain, {short(sizes.delayed)} messages", "ns a message", "drain_nanos", sizes.delayed)
    yield Task((add, drain), "delay", options, expected, rounds=3, warm_ups=2)
    yield _buckets(sizes, options, expected)
    file = workloads.written(workloads.delayed(DELAYED), directory / "weighed")
    for subscriptions, name, trackers in ((1, "1 subscription", 10), (1_000, "1,000 subscriptions", _TRACKERS)):
        options = {"file": file, "subscriptions": subscriptions, "trackers": trackers}
        row = Row(f"delayed: memory, 100 k messages, {name}", "MB", "bytes", 1e6)
        yield Task((row,), "weigh_delays", options, {"held": DELAYED}, rounds=1, warm_ups=0)


def _buckets(sizes: Sizes, options: Mapping[str, object], expected: Mapping[str, int]) -> Task:
    """The trackers that store buckets of delayed messages: each ledger is one."""
    name = f"{short(sizes.delayed)} messages"
    rows = (
        Row(f"delay buckets: add, {name}", "ns a message", "add_nanos", sizes.delayed),
        Row(f"delay buckets: recover, {name}", "ms", "recover_nanos", 1e6),
        Row(f"delay buckets: drain, {name}", "ns a message", "drain_nanos", sizes.delayed),
        Row(f"delay buckets: stored, {name}", "bytes a message", "bytes", sizes.delayed),
    )
    sealed = {"sealed": min(sizes.delayed, LEDGER_SIZE)}
    expected = {"recovered": sizes.delayed, **expected}
    return Task(rows, "bucket", {**options, **sealed}, expected, rounds=3, warm_ups=1)


def short(count: int) -> str:
    """Return a number in words: ``10 k`` or ``1 M``."""
    for unit, name in ((1_000_000, " M"), (1_000, " k")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)


def all_acked(count: int) -> dict[str, int]:
    """Return the state after `count` acks of `workloads.every_other`."""
    return no_prefix_acked() | {"ranges": count, "acked": count}


def all_persisted(holes: int, acks: int) -> dict[str, int]:
    """Return the state after acks above some holes, each persisted by itself."""
    return all_acked(holes + acks) | {"persists": acks}


def no_prefix_acked() -> dict[str, int]:
    """Return the mark-delete position when the first entry is not acked."""
    return {"mark_delete_ledger": workloads.FIRST_LEDGER, "mark_delete_entry": -1}


def checksum(rows: Rows) -> int:
    """Return the sum that each side makes of the messages it hands out."""
    return int(_keys(rows).sum())


def _keys(rows: Rows) -> Rows:
    """Return a number for each position."""
    return LEDGER_WEIGHT * rows[:, 0] + rows[:, 1]
