"""Moves a cursor to another position, in a new epoch: no ack from before counts after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.journal.format import CursorState
from ackstate.cursor.listener import Change, covered_runs
from ackstate.cursor.results import PersistResult, PersistTarget
from ackstate.deleted_ranges import DeletedRanges
from ackstate.position import Position
from ackstate.stores.base import StoreError

if TYPE_CHECKING:
    from ackstate.cursor.persist.persister import Persister
    from ackstate.cursor.state.ack_state import CursorAckState
    from ackstate.cursor.state.reader import EntryReader

_COMPACTION = "/__compaction"  # Pulsar's cursor whose properties name the ledger with the compacted topic


def reset(persister: Persister, reader: EntryReader, position: Position, *, now_ms: int) -> PersistResult:
    """Make a position the next to be read, with nothing acked from there on; errors as `ManagedCursor.reset`."""
    state = persister.state
    with persister.writing:
        with persister.lock:
            persister.check_open()
            position = state.ledgers.next_valid(Position(position[0], position[1] - 1))
            mark_delete = state.ledgers.previous(position)
            properties = state.properties if persister.journal.path.endswith(_COMPACTION) else {}
            state.begin_reset(mark_delete)
        content = CursorState(mark_delete, DeletedRanges(), BatchIndexes(), properties)
        target, byte_count = _write(persister, content, now_ms=now_ms)
        with persister.lock:
            reader.reset(position)
            runs = _changed_runs(state, mark_delete) if persister.listeners.of_changes else {}
            state.apply_reset(mark_delete)
            state.properties = properties
            persister.young_age.clear()
            persister.is_truncated = False
            persister.wrote(target, byte_count, now_ms=now_ms)
            for change, entries in runs.items():
                persister.listeners.changed(change, entries, now_ms=now_ms)
            return PersistResult(target, byte_count, 0, mark_delete)


def _write(persister: Persister, content: CursorState, *, now_ms: int) -> tuple[PersistTarget, int]:
    """Write a state without acks in a new epoch, and return where it went and its bytes."""
    journal = persister.journal
    journal.begin_epoch()
    try:
        try:
            return PersistTarget.SNAPSHOT, journal.begin_ledger(content)
        except StoreError as error:
            persister.planner.ledger_failed(now_ms=now_ms)
            persister.counters.ledger_error_count += 1
            try:
                return PersistTarget.METADATA, journal.write_record(content)
            except StoreError as second:
                persister.counters.metadata_error_count += 1
                raise error from second
    except BaseException:
        journal.abandon_epoch()
        raise


def _changed_runs(state: CursorAckState, mark_delete: Position) -> dict[Change, list[tuple[int, int, int]]]:
    """Return the entries that the reset acks, and those that it gives back."""
    deleted = state.deleted.copy()
    deleted.remove_at_most(mark_delete)
    above = [(ledger_id, first, end - 1) for ledger_id, first, end in deleted.runs()]
    return {
        Change.RESET: covered_runs(state.ledgers, state.mark_delete, mark_delete),
        Change.UNACKED: [*covered_runs(state.ledgers, mark_delete, state.mark_delete), *above],
    }
