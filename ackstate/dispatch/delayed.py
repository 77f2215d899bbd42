"""The delayed messages of a subscription: its reader leaves them out, and they are sent when they are due."""

from __future__ import annotations

import heapq
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, final

from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.delay.tracker import AckedAndSent, DelayedDeliveryTracker
    from ackstate.position import Position
    from ackstate.topic.message_log import Message, MessageLog

_LOG = logging.getLogger(__name__)


@final
class DelayedMessages:
    """A dispatcher's access to its tracker, and the messages that the tracker has handed out too early.

    The log reports delayed messages to a shared index when they are published. So the reader skips them unread, and
    they are read once, to be sent.

    Args:
        tracker: The delayed messages; None delivers every message at once.
        log: The topic's messages.
        cursor: The ack state.
        subscription: Reports the acked and sent messages to the tracker.
    """

    def __init__(
        self,
        tracker: DelayedDeliveryTracker | None,
        log: MessageLog,
        cursor: ManagedCursor,
        *,
        subscription: AckedAndSent,
    ) -> None:
        self._tracker = tracker
        self._cursor = cursor
        self._due: list[Position] = []  # handed out by the tracker, and not queued yet
        self._early: list[tuple[int, Position]] = []  # a heap: the tracker would deliver them before their time
        if tracker is None:
            return
        tracker.attach(subscription)
        if tracker.shared_index is not None:
            log.feed(tracker.shared_index)

    def __iter__(self) -> Iterator[Position]:
        """Yield the messages that the tracker has handed out and that are not queued yet."""
        yield from self._due
        yield from (position for _, position in self._early)

    def reading(self, first: Position) -> AbstractContextManager[object]:
        """Return a context in which to read unread messages; see `DelayedDeliveryTracker.reading`."""
        return nullcontext() if self._tracker is None else self._tracker.reading(first)

    def to_read(self, positions: Sequence[Position], *, now_ms: int) -> Sequence[Position]:
        """Return those of the next messages that must be read: the others are known to wait."""
        return positions if self._tracker is None else self._tracker.unknown(positions, now_ms=now_ms)

    def without_early(self, read: list[tuple[Position, Message]], *, now_ms: int) -> list[tuple[Position, Message]]:
        """Return those of some messages that need not wait; see `must_wait`.

        Args:
            read: Messages that were read, in order.
            now_ms: The present.
        """
        if self._tracker is None or not read:
            return read
        # One of those without a delay is offered, for a tracker must learn the reader's place, and that there is such a
        # message.
        plain = None
        for each in reversed(read):
            if each[1].deliver_at_ms <= 0:
                plain = each
                break
        offered = [each for each in read if each[1].deliver_at_ms > 0 or each is plain]
        early = {each[0] for each in offered if self.must_wait(*each, now_ms=now_ms)}
        return [each for each in read if each[0] not in early] if early else read

    def must_wait(self, position: Position, message: Message, *, now_ms: int) -> bool:
        """Return whether a message that was read must wait; if so, it is handed out when it is due."""
        if self._tracker is None:
            return False
        if self._tracker.add_message(position, deliver_at_ms=message.deliver_at_ms, now_ms=now_ms):
            return True
        if message.deliver_at_ms <= now_ms:
            return False
        # The tracker rounds, or goes by a clock that ran ahead. The message's own time decides.
        heapq.heappush(self._early, (message.deliver_at_ms, position))
        return True

    def take_due(self, count: int, *, now_ms: int) -> list[Position]:
        """Return unacked messages that are due, about `count`; the same again until they are `queued`."""
        if self._tracker is None or count <= 0:
            return []
        while (early_ms := self.next_early_ms) is not None and early_ms <= now_ms:
            self._due.append(heapq.heappop(self._early)[1])
        # Some trackers do not know acks, and a stale one has messages that the log has not: they take no one's place.
        while count > 0 and (due_now := self._tracker.scheduled_messages(count, now_ms=now_ms)):
            unacked = [position for position in due_now if self._cursor.view.is_unacked(position)]
            self._due += unacked
            count -= len(unacked)
        return list(self._due)

    def queued(self) -> None:
        """Note that the due messages wait to be sent: the tracker has forgotten them, and so may this object."""
        self._due.clear()

    @property
    def message_count(self) -> int:
        """How many messages wait until they are due, or are due and not queued. Complexity: the tracker's."""
        if self._tracker is None:
            return 0
        taken_out = sum(self._cursor.view.is_unacked(position) for position in self)
        return self._tracker.delayed_message_count + taken_out

    @property
    def next_early_ms(self) -> int | None:
        """When the next message is due that the tracker would have delivered before; None without one."""
        while self._early and not self._cursor.view.is_unacked(self._early[0][1]):
            heapq.heappop(self._early)
        return self._early[0][0] if self._early else None

    @property
    def next_due_ms(self) -> list[int]:
        """When the tracker hands out the next message, and when the next of the early ones is due."""
        times = () if self._tracker is None else (self._tracker.next_delivery_ms, self.next_early_ms)
        return [time for time in times if time is not None]

    def mark_delete_persisted(self, position: Position) -> None:
        """Report the durable mark-delete position to the tracker."""
        if self._tracker is None:
            return
        try:
            self._tracker.advance_mark_delete(position)
        except ValueError as error:
            # It was closed from outside, which the next dispatch reports; the persist itself has succeeded.
            _LOG.warning("the durable acks cannot be reported to the tracker of delayed messages: %s", error)

    def forget(self) -> None:
        """Forget all delayed messages: all are acked, or the reader comes to them again."""
        if self._tracker is None:
            return
        try:
            self._tracker.clear()
        except AckStateError as error:
            # A snapshot that is left is useless, not wrong: the next recovery deletes it.
            _LOG.warning("snapshots of delayed messages could not be deleted: %s", error)

    def clear(self) -> None:
        """Forget everything: the reader restarts elsewhere."""
        self._due.clear()
        self._early.clear()
        self.forget()

    def close(self) -> None:
        """Close the tracker."""
        if self._tracker is not None:
            self._tracker.close()
