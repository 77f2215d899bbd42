"""Naive implementations of the same ranges, with the usual libraries.

None maintains the size of the record: each iterates over everything on request, as Pulsar's range set does. So `add`
has less to do here than in `DeletedRanges`.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Protocol, Self

from intervaltree import Interval, IntervalTree
from sortedcontainers import SortedDict

from ackstate import Run
from ackstate.deleted_ranges import range_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ackstate import Position

_ENTRY_ID_END = 2**32


class Peer(Protocol):
    """The interface of all peers."""

    @classmethod
    def from_runs(cls, runs: Iterable[Run]) -> Self:
        """Make one from runs in order that do not touch."""

    def add(self, position: Position) -> int:
        """Ack one entry and return 1, or 0 if it was acked already."""

    def runs(self) -> Iterator[Run]:
        """Yield every run, in order."""

    @property
    def range_count(self) -> int:
        """How many ranges there are."""

    @property
    def record_bytes(self) -> int:
        """The size of the ranges as Pulsar writes them; walks over all of them."""


class RangeList:
    """A sorted list of ranges, as Pulsar's ``MessageRange`` list has them."""

    def __init__(self) -> None:
        self._ranges: list[Run] = []

    @classmethod
    def from_runs(cls, runs: Iterable[Run]) -> Self:
        peer = cls()
        peer._ranges = list(runs)
        return peer

    def add(self, position: Position) -> int:
        ledger_id, entry_id = position
        ranges = self._ranges
        at = bisect_right(ranges, (ledger_id, entry_id, _ENTRY_ID_END))
        first, end, low, high = entry_id, entry_id + 1, at, at
        if at and ranges[at - 1].ledger_id == ledger_id:
            before = ranges[at - 1]
            if entry_id < before.end:
                return 0
            if entry_id == before.end:
                first, low = before.first, at - 1
        if at < len(ranges) and ranges[at].first == end and ranges[at].ledger_id == ledger_id:
            end, high = ranges[at].end, at + 1
        ranges[low:high] = [Run(ledger_id, first, end)]
        return 1

    def runs(self) -> Iterator[Run]:
        return iter(self._ranges)

    @property
    def range_count(self) -> int:
        return len(self._ranges)

    @property
    def record_bytes(self) -> int:
        return _record_bytes(self.runs())


class SortedRanges:
    """A `sortedcontainers.SortedDict` a ledger: first entry -> end of its range."""

    def __init__(self) -> None:
        self._ledgers: dict[int, SortedDict] = {}

    @classmethod
    def from_runs(cls, runs: Iterable[Run]) -> Self:
        peer = cls()
        ends: dict[int, dict[int, int]] = {}
        for ledger_id, first, end in runs:
            ends.setdefault(ledger_id, {})[first] = end
        peer._ledgers = {ledger_id: SortedDict(held) for ledger_id, held in ends.items()}
        return peer

    def add(self, position: Position) -> int:
        ledger_id, entry_id = position
        ends = self._ledgers.get(ledger_id)
        if ends is None:
            ends = self._ledgers[ledger_id] = SortedDict()
        first = entry_id
        at = ends.bisect_right(entry_id)
        if at:
            before_first, before_end = ends.peekitem(at - 1)
            if entry_id < before_end:
                return 0
            if entry_id == before_end:
                first = before_first
        ends[first] = ends.pop(entry_id + 1, entry_id + 1)
        return 1

    def runs(self) -> Iterator[Run]:
        for ledger_id in sorted(self._ledgers):
            for first, end in self._ledgers[ledger_id].items():
                yield Run(ledger_id, first, end)

    @property
    def range_count(self) -> int:
        return sum(map(len, self._ledgers.values()))

    @property
    def record_bytes(self) -> int:
        return _record_bytes(self.runs())


class IntervalTrees:
    """An `intervaltree.IntervalTree` a ledger."""

    def __init__(self) -> None:
        self._ledgers: dict[int, IntervalTree] = {}

    @classmethod
    def from_runs(cls, runs: Iterable[Run]) -> Self:
        peer = cls()
        intervals: dict[int, list[Interval]] = {}
        for ledger_id, first, end in runs:
            intervals.setdefault(ledger_id, []).append(Interval(first, end))
        peer._ledgers = {ledger_id: IntervalTree(held) for ledger_id, held in intervals.items()}
        return peer

    def add(self, position: Position) -> int:
        ledger_id, entry_id = position
        tree = self._ledgers.get(ledger_id)
        if tree is None:
            tree = self._ledgers[ledger_id] = IntervalTree()
        first, end = entry_id, entry_id + 1
        for interval in tree.overlap(entry_id - 1, entry_id + 2):
            if interval.begin <= entry_id < interval.end:
                return 0
            first, end = min(first, interval.begin), max(end, interval.end)
            tree.remove(interval)
        tree.addi(first, end)
        return 1

    def runs(self) -> Iterator[Run]:
        for ledger_id in sorted(self._ledgers):
            for first, end, _ in sorted(self._ledgers[ledger_id]):
                yield Run(ledger_id, first, end)

    @property
    def range_count(self) -> int:
        return sum(map(len, self._ledgers.values()))

    @property
    def record_bytes(self) -> int:
        return _record_bytes(self.runs())


def _record_bytes(runs: Iterable[Run]) -> int:
    return sum(range_bytes(ledger_id, first, end - 1) for ledger_id, first, end in runs)
