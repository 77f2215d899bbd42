"""Computes when the mark-delete position passes each acked entry: for whole chunks, and the same for all policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ackstate.analysis.replay.acked import NewlyAckedRuns, by_position
from ackstate.entry_bitmap import run_end
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyroaring import BitMap

    from ackstate.analysis.replay.acked import Int64s

NEVER = np.iinfo(np.int64).max
_CONTAINER = 2**16


class PlacedRuns(NamedTuple):
    """Newly acked runs in order of position, cut where a container of a roaring bitmap ends.

    Attributes:
        runs: The runs; their events do not rise.
        covered_at: The event that moves the mark-delete position beyond each run; `NEVER` if the chunk does not.
        mark_delete: The mark-delete position after the chunk.
    """

    runs: NewlyAckedRuns
    covered_at: Int64s
    mark_delete: Position

    def mark_delete_before(self, event: int) -> Position:
        """Return the mark-delete position just before an event: right below the entries that the event acks."""
        passed = np.flatnonzero((self.covered_at != NEVER) & (self.covered_at >= event))
        if not len(passed):
            return self.mark_delete
        first = int(passed[0])
        return Position(int(self.runs.ledger_id[first]), int(self.runs.first[first]) - 1)


@final
class MarkDeleteFold:
    """Computes the mark-delete position of one subscription, chunk by chunk.

    Args:
        log: Ledger id -> entry count of the message log, rising.
    """

    def __init__(self, log: Mapping[int, int]) -> None:
        self._ledger_ids = list(log)
        self._counts = list(log.values())
        self._at = 0  # index of the ledger of the mark-delete position
        self._next_entry = 0  # the first entry above the mark-delete position

    def take(self, news: NewlyAckedRuns, acked: Mapping[int, BitMap]) -> PlacedRuns:
        """Advance over the acks of a chunk.

        Args:
            news: The entries that the chunk acked first.
            acked: All entries acked after it.

        Complexity: O(runs log runs), and range queries for each ledger that is passed.
        """
        self._move(acked)
        mark_delete = self._mark_delete()
        runs = cut_at_containers(by_position(news))
        passed = runs.ledger_id < mark_delete.ledger_id
        passed |= (runs.ledger_id == mark_delete.ledger_id) & (runs.first <= mark_delete.entry_id)
        covered_at = np.full(len(passed), NEVER)
        covered_at[passed] = np.maximum.accumulate(runs.event[passed])
        return PlacedRuns(runs, covered_at, mark_delete)

    @property
    def mark_delete(self) -> Position:
        """The mark-delete position."""
        return self._mark_delete()

    def _mark_delete(self) -> Position:
        return Position(self._ledger_ids[self._at] if self._ledger_ids else 0, self._next_entry - 1)

    def _move(self, acked: Mapping[int, BitMap]) -> None:
        while self._at < len(self._ledger_ids):
            held = acked.get(self._ledger_ids[self._at])
            if held is not None and self._next_entry in held:
                self._next_entry = run_end(held, self._next_entry)
            if self._next_entry < self._counts[self._at] or self._at == len(self._ledger_ids) - 1:
                return
            self._at, self._next_entry = self._at + 1, 0


def mark_delete_of(acked: Mapping[int, BitMap], log: Mapping[int, int]) -> Position:
    """Return the mark-delete position of a message log, given its acked entries."""
    none = NewlyAckedRuns(*(np.empty(0, np.int64) for _ in NewlyAckedRuns._fields))
    return MarkDeleteFold(log).take(none, acked).mark_delete


def cut_at_containers(runs: NewlyAckedRuns) -> NewlyAckedRuns:
    """Split runs at multiples of 65,536; each part keeps its event."""
    pieces = (runs.end - 1) // _CONTAINER - runs.first // _CONTAINER + 1
    if not len(pieces) or pieces.max() == 1:
        return runs
    event, ledger_id, first, end = (np.repeat(column, pieces) for column in runs)
    number = np.arange(len(first)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins = (first // _CONTAINER + number) * _CONTAINER
    return NewlyAckedRuns(event, ledger_id, np.maximum(first, begins), np.minimum(end, begins + _CONTAINER))
