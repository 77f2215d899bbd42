"""What a broker embeds: a cursor, a dispatch gate and a delay view over one message log."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.record_size import isolated_range_bytes
from limits.gate import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ackstate.position import Position
    from cursor.managed import ManagedCursor
    from cursor.message_log import Message, MessageLog
    from cursor.outcome import PersistResult, Receipt
    from delay.tracker import DelayedDeliveryTracker
    from limits.gate import DispatchGate, Verdict


class Delivery(NamedTuple):
    """One message on its way to a consumer."""

    position: Position
    message: Message


@final
class Subscription:
    """Dispatches a topic's messages to the consumers of one subscription and takes their acks.

    Each delivery reserves, in the gate, the most bytes that its ack could add to the un-persisted ack records, and
    gives them back when it is acked or returned. Driven by calls; no threads and no clock of its own; not safe for
    concurrent use.

    Args:
        log: The topic's messages.
        cursor: The subscription's ack state.
        gate: Its limits.
        delays: Its delayed messages; None delivers every message at once, as Pulsar does for Exclusive and Failover.
    """

    def __init__(
        self,
        log: MessageLog,
        cursor: ManagedCursor,
        *,
        gate: DispatchGate,
        delays: DelayedDeliveryTracker | None = None,
    ) -> None:
        self.cursor = cursor
        self._log = log
        self._gate = gate
        self._delays = delays
        self._in_flight: dict[Position, str] = {}
        # Invariant: the sum of isolated_range_bytes over _in_flight.
        self._reserved_bytes = 0
        self._replay: list[Position] = []  # a heap: lowest first, as they hold the mark-delete back
        self._replay_members: set[Position] = set()

    @property
    def unacked_messages(self) -> int:
        """Deliveries neither acked nor returned."""
        return len(self._in_flight)

    def dispatch(self, consumer: str, max_messages: int, *, now_ms: int) -> list[Delivery]:
        """Send a consumer what it may have: redeliveries and due delayed messages first, then unread messages.

        Args:
            consumer: Who gets them, until it acks or returns them.
            max_messages: How many it wants at most.
            now_ms: The present.

        Raises:
            CursorClosedError: The cursor is closed.
            StoreError: The log could not be read; the messages concerned will be dispatched later.
        """
        self.cursor.check_open()
        positions = self._take_replay(max_messages, now_ms=now_ms)
        for position in positions:
            self._send(position, consumer)
        try:
            deliveries = [*map(Delivery, positions, self._log.read(positions))]
        except BaseException:
            self._return(positions)
            raise
        while len(deliveries) < max_messages:
            unread = self._dispatch_unread(consumer, max_messages - len(deliveries), now_ms=now_ms)
            if unread is None:
                break
            deliveries += unread
        if deliveries:
            self.cursor.delivered(max(delivery.position for delivery in deliveries), now_ms=now_ms)
        return deliveries

    def ack(self, position: Position, *, now_ms: int) -> Receipt:
        """Ack one message.

        Raises:
            As `ManagedCursor.ack`.
        """
        receipt = self.cursor.ack(position, now_ms=now_ms)
        self._settle(position)
        return receipt

    def ack_cumulative(self, position: Position, *, now_ms: int) -> Receipt:
        """Ack every message up to a position, included.

        Raises:
            As `ManagedCursor.mark_delete`.
        """
        receipt = self.cursor.mark_delete(position, now_ms=now_ms)
        for settled in [delivered for delivered in self._in_flight if delivered <= position]:
            self._settle(settled)
        return receipt

    def nack(self, position: Position) -> None:
        """Give a delivered message back, to be delivered again; one that is not in flight is left alone."""
        if position in self._in_flight:
            self._return([position])

    def consumer_closed(self, consumer: str) -> int:
        """Take back what a consumer had and did not ack, and return how many messages that is."""
        orphaned = [position for position, owner in self._in_flight.items() if owner == consumer]
        self._return(orphaned)
        return len(orphaned)

    def close(self, *, now_ms: int) -> PersistResult | None:
        """Persist everything, close the cursor and let go of the delay view; closing twice does nothing.

        Raises:
            As `ManagedCursor.close`; the subscription stays open then.
        """
        result = self.cursor.close(now_ms=now_ms)
        if self._delays is not None:
            self._delays.close()
        return result

    def why_blocked(self) -> tuple[Verdict, ...]:
        """Return the rules that keep unread messages back, with their numbers; empty if none does."""
        return self._gate.why_blocked(self._usage())

    def _take_replay(self, max_messages: int, *, now_ms: int) -> list[Position]:
        """Take the lowest messages to be sent again, as many as the gate lets through."""
        if self._delays is not None and len(self._replay) < max_messages:
            due = self._delays.scheduled_messages(max_messages - len(self._replay), now_ms=now_ms)
            self._put_back(due)
        wanted: list[Position] = []
        while self._replay and len(wanted) < max_messages:
            position = heapq.heappop(self._replay)
            self._replay_members.discard(position)
            if not self.cursor.is_acked(position):
                wanted.append(position)
        costs = [isolated_range_bytes(*position) for position in wanted]
        granted = self._gate.request_redelivery(costs, usage=self._usage()).granted if wanted else 0
        self._put_back(wanted[granted:])
        return wanted[:granted]

    def _dispatch_unread(self, consumer: str, count: int, *, now_ms: int) -> list[Delivery] | None:
        """Read on and send what is due; None at the end of the log or when the gate lets nothing through."""
        before = self.cursor.read_position
        positions = self.cursor.read(count)
        if not positions:
            return None
        deliveries: list[Delivery] = []
        try:
            messages = list(self._log.read(positions))
        except BaseException:
            self.cursor.rewind(before)
            raise
        for position, message in zip(positions, messages, strict=True):
            if self._is_delayed(position, message, now_ms=now_ms):
                continue
            cost = isolated_range_bytes(*position)
            if not self._gate.request((cost,), usage=self._usage()).granted:
                self.cursor.rewind(position)
                return deliveries or None
            self._send(position, consumer)
            deliveries.append(Delivery(position, message))
        return deliveries

    def _is_delayed(self, position: Position, message: Message, *, now_ms: int) -> bool:
        # The view is told of messages without a delay too: it must know how far the reader is.
        if self._delays is None:
            return False
        return self._delays.add_message(position, deliver_at_ms=message.deliver_at_ms, now_ms=now_ms)

    def _usage(self) -> Usage:
        return Usage(self.cursor.unpersisted_record_bytes, self._reserved_bytes, len(self._in_flight))

    def _send(self, position: Position, consumer: str) -> None:
        self._in_flight[position] = consumer
        self._reserved_bytes += isolated_range_bytes(*position)

    def _settle(self, position: Position) -> bool:
        """Forget a delivery and give its reservation back; False if the message was not in flight."""
        if self._in_flight.pop(position, None) is None:
            return False
        self._reserved_bytes -= isolated_range_bytes(*position)
        return True

    def _return(self, positions: Iterable[Position]) -> None:
        self._put_back([position for position in positions if self._settle(position)])

    def _put_back(self, positions: Iterable[Position]) -> None:
        for position in positions:
            if position not in self._replay_members and position not in self._in_flight:
                self._replay_members.add(position)
                heapq.heappush(self._replay, position)
