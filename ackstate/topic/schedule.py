"""The delayed messages of a topic that were cancelled or rescheduled, for all of its subscriptions at once.

They are the state of a cursor of the topic's own: what it has acked is cancelled, and its delivery counts hold the new
times. So a change is one record of a journal, which a crash leaves whole or not at all, and which a later owner fences.
The log gives each message its present time, and a subscription acks a cancelled one where it would send it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.cursor.cursor import CursorOpening, ManagedCursor
from ackstate.cursor.journal import cursor_path
from ackstate.cursor.recovery import UnreadableCursorError
from ackstate.errors import AckStateError, RescheduleRefusedError
from ackstate.position import Position, check_position
from ackstate.position_set import PositionSet
from ackstate.topic.subscriptions import SCHEDULE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.delay.view import SharedDelayIndex
    from ackstate.dispatch.subscription import Subscription
    from ackstate.topic.log import MessageLog


@final
class DelaySchedule:
    """Changes when the delayed messages of one topic are due; written when there is a first change."""

    def __init__(self, log: MessageLog, index: SharedDelayIndex, *, now_ms: int) -> None:
        self._log, self._index = log, index
        self._cursor: ManagedCursor | None = None
        if log.store.metadata.get(cursor_path(log.topic, SCHEDULE)) is not None:
            self._open(now_ms=now_ms)

    def _open(self, *, now_ms: int) -> ManagedCursor:
        """Open the cursor, and take over everything in it."""
        log, ledgers, cancelled = self._log, self._log.ledgers, PositionSet()
        opening = CursorOpening(topic=log.topic, subscription=SCHEDULE, ledgers=ledgers, check=log.check_owned)
        try:
            cursor = self._cursor = ManagedCursor._open(log.store, opening, now_ms=now_ms)
        except UnreadableCursorError as error:
            error.args = (f"cancelled and rescheduled messages of topic {log.topic!r}, cursor {SCHEDULE!r}: {error}",)
            raise
        before = ledgers.previous(ledgers.first_position)
        for ledger_id, first, last in ledgers.runs_between(before, cursor.mark_delete_position):
            cancelled.update_entries(ledger_id, BitMap(range(first, last + 1)))
        for ledger_id, bitmap in cursor.deleted.bitmaps():
            cancelled.update_entries(ledger_id, bitmap.copy())
        log.cancelled = cancelled
        log.rescheduled = {each: due_ms for each, (_, due_ms) in cursor.view.delivery_counts.items()}
        for position, deliver_at_ms in (*log.rescheduled.items(), *((each, 0) for each in cancelled)):
            self._index.reschedule(position, deliver_at_ms)
        return cursor

    def change(
        self,
        position: Position,
        deliver_at_ms: int | None,
        subscriptions: Mapping[str, Subscription],
        *,
        now_ms: int,
    ) -> None:
        """Cancel a message or, given a time, reschedule it; errors as `Topic.reschedule`."""
        position = check_position(position, entry_id_min=0)
        self._check(position, subscriptions, now_ms=now_ms)
        cursor = self._cursor or self._open(now_ms=now_ms)
        self._check(position, subscriptions, now_ms=now_ms)  # An earlier change of unknown outcome may have happened.
        try:
            if deliver_at_ms is None:
                cursor.ack(position, now_ms=now_ms)
            else:
                cursor.count_deliveries({position: (1, deliver_at_ms)})
            cursor.persist(now_ms=now_ms)
        except AckStateError:
            self._cursor = None  # Whether it happened is read back before the next change.
            raise
        if deliver_at_ms is not None:
            self._log.rescheduled[position] = deliver_at_ms
        elif self._log.cancelled is not None:
            self._log.cancelled.add(position)
        self._index.reschedule(position, deliver_at_ms or 0)
        for subscription in subscriptions.values():
            subscription._rescheduled(position, now_ms=now_ms)

    def trim(self, *, now_ms: int) -> None:
        """Forget the messages of ledgers that the log no longer has."""
        log, first = self._log, Position(self._log.ledgers.first_ledger_id, 0)
        if self._cursor is not None and log.cancelled is not None:
            log.cancelled.remove_below(first)
            log.rescheduled = {each: due_ms for each, due_ms in log.rescheduled.items() if each >= first}
            if self._cursor.mark_delete_position < (before := first._replace(entry_id=-1)):
                self._cursor.mark_delete(before, now_ms=now_ms)

    def _check(self, position: Position, subscriptions: Mapping[str, Subscription], *, now_ms: int) -> None:
        log = self._log
        log.ledgers.check_written(position)
        (message,) = log.read([position])
        why = next((why for name, each in subscriptions.items() if (why := each._has_had(position, name))), "")
        if position in (log.cancelled or ()):
            why = "was cancelled before"
        elif not why and message.deliver_at_ms <= now_ms:
            why = "is not delayed" if message.deliver_at_ms < 0 else f"is due since {message.deliver_at_ms} ms"
        if why:
            raise RescheduleRefusedError(f"message {position} of topic {log.topic!r} {why}")
