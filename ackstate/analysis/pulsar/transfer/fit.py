"""Fits an exported state to the message log of the topic that it is imported into, or refuses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.formats import CursorState
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from ackstate.analysis.pulsar.transfer.ack_state_file import ExportedCursor
    from ackstate.ledger_map import LedgerMap
    from ackstate.position import Position


class OtherTopicError(AckStateError):
    """The topic is not the one that was exported: to import the acks would ack other messages. Nothing was changed."""


def fitted(cursor: ExportedCursor, log: LedgerMap) -> CursorState:
    """Return the state without acks of messages that the log no longer has.

    Raises:
        OtherTopicError: The log lacks a ledger above its first one, or a ledger has fewer or more entries than when it
            was exported.
    """
    known = log.counts()
    current, exported_last = log.current_ledger_id, max(cursor.ledgers)
    for ledger_id, count in cursor.ledgers.items():
        if ledger_id < log.first_ledger_id or (ledger_id not in known and not count):
            continue
        found = known.get(ledger_id)
        may_have_grown = exported_last == ledger_id
        if found is None or (found != count and not (may_have_grown and found > count)):
            has = "no such ledger" if found is None else f"{found} entries in it"
            raise OtherTopicError(
                f"{cursor.topic}: ledger {ledger_id} had {count} entries when it was exported, and the topic has {has}"
                f" (ledgers {log.first_ledger_id} to {current}): it is another topic; nothing was changed"
            )
    mark_delete, deleted, batch, properties = cursor.content
    kept, kept_batch = DeletedRanges(), BatchIndexes()
    for run in deleted.runs():
        if run.ledger_id >= log.first_ledger_id:
            _check_end(cursor, known, run.ledger_id, run.end)
            kept.add_run(run.ledger_id, run.first, run.end)
    for position, words in batch.items():
        if position.ledger_id >= log.first_ledger_id:
            _check_end(cursor, known, position.ledger_id, position.entry_id + 1)
            kept_batch.ack(position, words)
    if mark_delete.ledger_id in known:
        _check_end(cursor, known, mark_delete.ledger_id, mark_delete.entry_id + 1)
    return CursorState(_within(mark_delete, log), kept, kept_batch, properties)


def _check_end(cursor: ExportedCursor, known: dict[int, int], ledger_id: int, end: int) -> None:
    if end > known.get(ledger_id, 0):
        raise OtherTopicError(
            f"{cursor.topic}: the file has an ack of {ledger_id}:{end - 1}, and the topic has"
            f" {known.get(ledger_id, 0)} entries in ledger {ledger_id}; nothing was changed"
        )


def _within(mark_delete: Position, log: LedgerMap) -> Position:
    """Return a mark-delete position that is in the log and acks the same messages of it."""
    if mark_delete.ledger_id < log.first_ledger_id:
        return log.first_position
    if log.has_ledger(mark_delete.ledger_id):
        return mark_delete
    following = log.find_next_ledger(mark_delete.ledger_id)
    if following is None:
        return log.last_confirmed
    return log.previous(log.next_valid(mark_delete))
