"""Reports the ack holes of a stored cursor, and their causes as far as a store has them without its broker.

The cursor is read as an open would read it; nothing is written. `ackstate.inspect.store` reports why a cursor
does not open.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from ackstate.ack_hole import holes
from ackstate.cursor.state.ack_state import CursorAckState
from ackstate.cursor.state.view import AckView
from ackstate.dispatch.hole_report import SAMPLE_COUNT_MAX, HoleReason, HoleReport, costliest, sample
from ackstate.errors import CorruptStateError
from ackstate.ledger_map import LedgerMap
from ackstate.stores.base import LedgerNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.ack_hole import AckHole
    from ackstate.cursor.journal.format import CursorState
    from ackstate.inspect.message_logs import ReadableLog
    from ackstate.position import Position
    from ackstate.topic.message_log import Message

_BROKER_REST = "only the running broker knows"
_BROKER_ONLY = f"who has it {_BROKER_REST}"


@dataclass(frozen=True, slots=True)
class StoredHoles:
    """A cursor as an open would find it, and the holes in it.

    Attributes:
        mark_delete: Every entry up to it, included, is acked.
        backlog: Entries of the log that are not acked; None if the store does not hold the topic's message log.
        range_count: Individually deleted ranges.
        record_bytes: Their size as Pulsar would write them.
        hole_count: How many holes there are.
        holes: First the one that holds back the mark-delete position, then the costliest; among equals, the lower one
            first.
    """

    mark_delete: Position
    backlog: int | None
    range_count: int
    record_bytes: int
    hole_count: int
    holes: tuple[HoleReport, ...]


def explain_holes(content: CursorState, log: ReadableLog | None, *, top: int, now_ms: int) -> StoredHoles:
    """Explain the holes of a stored cursor.

    A ledger that has acks but is not in the log counts as one that ends with its last acked entry; its unacked entries
    are lost. Without a log all ledgers count like that, and nothing is known to be lost.

    Args:
        content: The state that a recovery begins with, as `CursorInspection.content` has it. Not changed.
        log: The messages of the cursor's topic, if the store holds them.
        top: The most holes to return; 1 or more.
        now_ms: The present.

    Raises:
        ValueError: `top` is below 1.
        InvalidPositionError: The state reaches beyond the end of the log.
        StoreError: The storage failed.

    Complexity: O(holes), and reading some messages of each that is returned.
    """
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    known = {} if log is None else log.ledgers.counts()
    assumed = {ledger_id: entries for ledger_id, entries in _least_counts(content).items() if ledger_id not in known}
    ledgers = LedgerMap.from_counts(dict(sorted((known | assumed).items())))
    state = _state(content, ledgers if log is None else log.ledgers)
    found = holes(state.deleted, ledgers if log is None else log.ledgers, state.mark_delete)
    if log is not None and assumed:
        found = heapq.merge(_lost(content, ledgers, log), found)
    numbers = count()
    numbered = (hole for hole, _ in zip(found, numbers, strict=False))
    shown = costliest(numbered, top)
    return StoredHoles(
        state.mark_delete,
        None if log is None else AckView(state).backlog,
        state.deleted.range_count,
        state.deleted.record_bytes,
        next(numbers),
        tuple(_report(hole, log, now_ms=now_ms) for hole in shown),
    )


def _least_counts(content: CursorState) -> dict[int, int]:
    """Return the least entry count of each ledger with acks, or of the mark-delete position's if there are none."""
    counts = {ledger_id: bitmap.max() + 1 for ledger_id, bitmap in content.deleted.bitmaps()}
    ledger_id, entry_id = content.mark_delete
    return counts or {ledger_id: entry_id + 1}


def _state(content: CursorState, ledgers: LedgerMap) -> CursorAckState:
    state = CursorAckState(ledgers)
    state.restore(
        content.mark_delete, content.deleted.copy(), batch=content.batch.copy(), properties=content.properties
    )  # fmt: skip
    return state


def _lost(content: CursorState, ledgers: LedgerMap, log: ReadableLog) -> Iterator[AckHole]:
    """Yield the holes in ledgers that the log does not have.

    A broker cannot ack there: its mark-delete position moves past such a ledger once everything below is acked.
    """
    state = _state(content, ledgers)
    for hole in holes(state.deleted, ledgers, state.mark_delete):
        if not log.ledgers.has_ledger(hole.ledger_id):
            yield hole


def _report(hole: AckHole, log: ReadableLog | None, *, now_ms: int) -> HoleReport:
    is_readable = log is not None and log.can_read(hole.ledger_id)
    sampled = [_read(log, position) for position in sample(hole)] if log and is_readable else []
    messages = [message for message in sampled if message is not None]
    due_ms = [message.deliver_at_ms for message in messages if message.deliver_at_ms > now_ms]
    why, detail = HoleReason.UNKNOWN, _BROKER_ONLY
    if log is None:
        detail = f"the store does not hold the topic's message log; {_BROKER_ONLY}"
    elif not log.ledgers.has_ledger(hole.ledger_id):
        why, detail = HoleReason.DATA_LOST, f"the message log has no ledger {hole.ledger_id}"
    elif len(messages) < len(sampled):
        why = HoleReason.DATA_LOST
        detail = f"{_part(len(sampled) - len(messages), hole)} cannot be read"
    elif due_ms:
        why, detail = HoleReason.DELAYED, _delay(due_ms, hole, now_ms=now_ms)
    return HoleReport(
        hole.first_position,
        hole.last_position,
        hole.entry_count,
        max(0, now_ms - sampled[0].publish_time_ms) if sampled and sampled[0] else None,
        why,
        detail,
        consumers=(),
        deliver_at_ms=max(due_ms, default=None),
        delivery_count=None,
        cost_bytes=hole.cost_bytes,
        freed_bytes=hole.freed_bytes,
        freed_ranges=hole.freed_ranges,
        mark_delete_advance=hole.mark_delete_advance,
    )


def _read(log: ReadableLog, position: Position) -> Message | None:
    """Return a message, or None if it can be read no more."""
    try:
        return next(log.read([position]), None)
    except (LedgerNotFoundError, CorruptStateError):
        return None


def _delay(due_ms: list[int], hole: AckHole, *, now_ms: int) -> str:
    wait_s = (max(due_ms) - now_ms) / 1_000
    if len(due_ms) == hole.entry_count:
        return f"the last message is due in {wait_s:,.1f} s"
    return f"{_part(len(due_ms), hole)} are delayed, the last is due in {wait_s:,.1f} s; of the rest {_BROKER_REST}"


def _part(number: int, hole: AckHole) -> str:
    if hole.entry_count > SAMPLE_COUNT_MAX:
        return f"{number} of {SAMPLE_COUNT_MAX} messages sampled"
    return f"{number} of {hole.entry_count} messages"
