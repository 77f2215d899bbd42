"""Computes the bytes that the native format takes for each persist of a chunk: exact, without writing the records.

A record is a header, then for each ledger a block: a portable roaring bitmap whose containers each take the least of
2 bytes an entry, 4 bytes a run and 2, and 8,192 bytes. The sources are `ackstate.wire.native` and the roaring format
specification; the tests compare with the encoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.analysis.replay.acked import NewlyAckedRuns
from ackstate.analysis.replay.mark_delete import cut_at_containers
from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import runs_of
from ackstate.position import Position
from ackstate.wire.native import LEDGER_BLOCK, Record, RecordKind, encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyroaring import BitMap

    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.mark_delete import PlacedRuns
    from ackstate.cursor.config import CursorConfig

_BASE_BYTES = len(encode(Record(RecordKind.SNAPSHOT, 0, 0, 0, Position(0, -1), DeletedRanges(), {}, BatchIndexes())))
_CONTAINER = 2**16
_ARRAY_MAX = 4096
_BITSET_BYTES = 8192
_COMPACTION_RATIO = 4  # As in `ackstate.cursor.persist.planner`.


@final
class JournalSize:
    """Sizes of the records of one native journal, to which every persist appends all new acks.

    Args:
        config: Decides when a new ledger with a snapshot begins.
        opened_ms: When the first ledger began.
    """

    def __init__(self, config: CursorConfig, *, opened_ms: int) -> None:
        self._config = config
        self._begun_ms = opened_ms
        self._snapshot_bytes = _BASE_BYTES
        self._delta_bytes = 0
        self._entry_count = 1
        # Acked since the last persist, in earlier chunks.
        self._pending: dict[int, BitMap] = {}

    @property
    def pending(self) -> Mapping[int, BitMap]:
        """Acks that no persist has written yet, by ledger, possibly below the mark-delete position."""
        return self._pending

    def reopened(self) -> None:
        """Record a recovery: pending acks are lost, and the next persist begins a new ledger."""
        self._pending = {}
        self._entry_count = self._config.ledger_entry_count_max

    def reset(self, acked: Mapping[int, BitMap], mark_delete: Position, *, now_ms: int) -> None:
        """Record a new ledger, with a snapshot of a mark-delete position and the acks above it."""
        self._pending = {}
        self._snapshot_bytes, self._delta_bytes, self._entry_count, self._begun_ms = _BASE_BYTES, 0, 1, now_ms
        above = DeletedRanges.from_bitmaps((each, acked[each].copy()) for each in sorted(acked) if acked[each])
        above.remove_at_most(mark_delete)
        if above and self._config.ledger_entry_count_max == 1:
            self._snapshot_bytes = record_bytes(above)
        elif above:
            self._delta_bytes, self._entry_count = record_bytes(above), 2

    def take(
        self, placed: PlacedRuns, acked: Mapping[int, BitMap], *, ends: Int64s, at_ms: Int64s
    ) -> tuple[Int64s, Int64s]:
        """Return the bytes written by each persist of a chunk, and the size of the journal after each.

        Args:
            placed: The entries that the chunk acked first.
            acked: All entries acked after it.
            ends: For each persist, the first event of the chunk after it; rising.
            at_ms: The time of each persist.

        Complexity: O(runs log runs), and O(state) for each snapshot.
        """
        written = self._delta_sizes(placed, ends)
        kept = np.empty(len(ends), np.int64)
        begin = 0
        while begin < len(ends):
            count, is_snapshot = self._until_snapshot(written[begin:], at_ms[begin:])
            sizes = self._delta_bytes + np.cumsum(written[begin : begin + count])
            kept[begin : begin + count] = self._snapshot_bytes + sizes
            if count:
                self._delta_bytes, self._entry_count = int(sizes[-1]), self._entry_count + count
            begin += count
            if is_snapshot:
                self._begin_ledger(_state_before(placed, acked, int(ends[begin])), int(at_ms[begin]))
                written[begin] = kept[begin] = self._snapshot_bytes
                begin += 1
        self._keep_pending(placed.runs, int(ends[-1]) if len(ends) else 0, is_new=len(ends) > 0)
        return written, kept

    def _until_snapshot(self, sizes: Int64s, at_ms: Int64s) -> tuple[int, bool]:
        """Return the number of persists that append to the ledger, and whether the next one begins a new ledger."""
        config = self._config
        outgrown = max(_COMPACTION_RATIO * self._snapshot_bytes, config.compaction_bytes_min)
        before = self._delta_bytes + np.cumsum(sizes) - sizes
        begins = (before > outgrown) | (np.arange(len(sizes)) >= config.ledger_entry_count_max - self._entry_count)
        if config.ledger_rollover_ms:
            begins |= at_ms - self._begun_ms >= config.ledger_rollover_ms
        first = int(np.argmax(begins)) if begins.any() else len(sizes)
        return first, first < len(sizes)

    def _begin_ledger(self, state: DeletedRanges, at_ms: int) -> None:
        self._snapshot_bytes, self._delta_bytes = record_bytes(state), 0
        self._entry_count, self._begun_ms = 1, at_ms

    def _delta_sizes(self, placed: PlacedRuns, ends: Int64s) -> Int64s:
        """Return the size of each persist's record, if it holds the acks since the previous one."""
        runs = placed.runs
        persist = np.searchsorted(ends, runs.event, "right")
        written = persist < len(ends)
        # Acks that the mark-delete position has passed by then are in no record.
        written[written] &= placed.covered_at[written] >= ends[persist[written]]
        sizes = np.full(len(ends), _BASE_BYTES)
        at = np.flatnonzero(written)
        # Numpy sorts two-byte numbers by radix.
        narrow = np.uint16 if len(ends) <= _CONTAINER else np.int64
        at = at[np.argsort(persist[at].astype(narrow), kind="stable")]
        if len(at):
            blocks, of_persist = block_bytes(persist[at], NewlyAckedRuns(*(column[at] for column in runs)))
            np.add.at(sizes, of_persist, blocks)
        if len(ends) and self._pending:
            sizes[0] = self._first_size(placed, int(ends[0]))
        return sizes

    def _first_size(self, placed: PlacedRuns, end: int) -> int:
        """Return the size of the first record, which also holds acks of earlier chunks."""
        new = DeletedRanges.from_bitmaps(
            sorted((ledger_id, bitmap.copy()) for ledger_id, bitmap in self._pending.items())
        )
        for ledger_id, bitmap in _of_events(placed.runs, 0, end).bitmaps().items():
            new.add_entries(ledger_id, bitmap)
        new.remove_at_most(placed.mark_delete_before(end))
        return record_bytes(new)

    def _keep_pending(self, runs: NewlyAckedRuns, begin: int, *, is_new: bool) -> None:
        if is_new:
            self._pending = {}
        for ledger_id, bitmap in _of_events(runs, begin, None).bitmaps().items():
            held = self._pending.get(ledger_id)
            self._pending[ledger_id] = bitmap if held is None else held | bitmap


def record_bytes(acked: DeletedRanges) -> int:
    """Return the size of a record of acks that were made one by one."""
    parts = [(ledger_id, *runs_of(bitmap)) for ledger_id, bitmap in acked.bitmaps()]
    if not parts:
        return _BASE_BYTES
    firsts, lasts = (np.concatenate([part[side] for part in parts]).astype(np.int64) for side in (1, 2))
    ledger_ids = np.repeat([part[0] for part in parts], [len(part[1]) for part in parts])
    none = np.zeros(len(firsts), np.int64)
    runs = cut_at_containers(NewlyAckedRuns(none, ledger_ids, firsts, lasts + 1))
    sizes, _ = block_bytes(runs.event, runs)
    return _BASE_BYTES + int(sizes.sum())


def block_bytes(record: Int64s, runs: NewlyAckedRuns) -> tuple[Int64s, Int64s]:
    """Return the size and the record of each ledger's block.

    Args:
        record: The record of each run; rising.
        runs: In each record in order of position, cut at the ends of containers.
    """
    container = runs.first >> 16
    new_ledger = _changes(record) | _changes(runs.ledger_id)
    new_container = new_ledger | _changes(container)
    new_run = new_container | np.append(True, runs.first[1:] != runs.end[:-1])
    at = np.flatnonzero(new_container)
    entries = np.add.reduceat(runs.end - runs.first, at)
    run_bytes = 2 + 4 * np.add.reduceat(new_run.astype(np.int64), at)
    plain_bytes = np.where(entries <= _ARRAY_MAX, 2 * entries, _BITSET_BYTES)
    # If both sizes are equal, a container that was filled one by one is not converted.
    as_runs = run_bytes < plain_bytes
    ledgers = np.flatnonzero(new_ledger[at])
    count = np.diff(np.append(ledgers, len(at)))
    has_runs = np.logical_or.reduceat(as_runs, ledgers)
    with_runs = 4 + (count + 7) // 8 + 4 * count + np.where(count >= 4, 4 * count, 0)
    sizes = LEDGER_BLOCK.size + np.where(has_runs, with_runs, 8 + 8 * count)
    sizes += np.add.reduceat(np.where(as_runs, run_bytes, plain_bytes), ledgers)
    return sizes, record[at][ledgers]


def _state_before(placed: PlacedRuns, acked: Mapping[int, BitMap], event: int) -> DeletedRanges:
    """Return the acks above the mark-delete position just before an event."""
    state = DeletedRanges.from_bitmaps((ledger_id, acked[ledger_id].copy()) for ledger_id in sorted(acked))
    for ledger_id, bitmap in _of_events(placed.runs, event, None).bitmaps().items():
        state.difference_update(DeletedRanges.from_bitmaps([(ledger_id, bitmap)]))
    state.remove_at_most(placed.mark_delete_before(event))
    return state


def _of_events(runs: NewlyAckedRuns, begin: int, end: int | None) -> NewlyAckedRuns:
    mine = runs.event >= begin
    if end is not None:
        mine &= runs.event < end
    return NewlyAckedRuns(*(column[mine] for column in runs))


def _changes(column: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.append(True, column[1:] != column[:-1])
