"""Sends chosen messages to a consumer: as many as the limits allow."""

from __future__ import annotations

from inspect import isawaitable, iscoroutine
from typing import TYPE_CHECKING, final

from ackstate.dispatch.admission import AckRefusedError
from ackstate.dispatch.deliveries import Sent
from ackstate.dispatch.delivery import Delivery
from ackstate.dispatch.hole_report import HoleReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.dispatch.admission import Admission
    from ackstate.dispatch.consumers import Consumers
    from ackstate.dispatch.delivery import Batch, DeadLetterPolicy
    from ackstate.dispatch.unacked_messages import UnackedMessages
    from ackstate.message import Message
    from ackstate.position import Position

_HAND_OVER_RETRY_MS = 1_000


@final
class Sender:
    """Adds messages to the batch of a consumer, if the limits have room for them, and hands dead letters over.

    Args:
        cursor: The ack state.
        messages: The unacked messages.
        admission: Decides which messages may be sent.
        consumers: The open consumers.
        dead_letters: The policy for messages that are given back again and again; None sends them for ever.

    Attributes:
        dead_letters: That policy.
        hand_over: Hands a dead letter over, given the present, and returns whether that is done; else it is `begun`.
        begun: The dead letters that are being handed over; whoever does so removes them.
        handed_over_count: How many dead letters were handed over.
    """

    def __init__(
        self,
        cursor: ManagedCursor,
        messages: UnackedMessages,
        *,
        admission: Admission,
        consumers: Consumers,
        dead_letters: DeadLetterPolicy | None,
    ) -> None:
        self.dead_letters = dead_letters
        self.hand_over: Callable[[Delivery, int], bool] = self._call_hand_over
        self.begun: dict[Position, Delivery] = {}
        self.handed_over_count = 0
        self._cursor = cursor
        self._messages = messages
        self._waiting, self._delayed, self._reader = messages.waiting, messages.delayed, messages.reader
        self._admission = admission
        self._consumers = consumers

    def send_new(self, read: Sequence[tuple[Position, Message]], batch: Batch) -> int:
        """Send messages for the first time until one is refused or the batch is full; return how many were sent."""
        if not read or not batch.room:
            return 0
        positions, messages = zip(*read, strict=True)
        counts = [message.message_count for message in messages]
        is_plain = counts.count(1) == len(counts)
        if not is_plain:
            counts = list(map(self._messages.unacked_in, positions, messages))
        consumers = self._consumers
        keys = consumers.sticky_keys(read) if consumers.needs_keys else consumers.sticky_key(positions[0], None)
        at, end = 0, batch.fitting(counts)
        while at < end:
            count = self._admission.send_all_new(
                batch.consumer, positions[at:end], counts[at:end],
                keys=keys[at:end] if isinstance(keys, list) else keys, now_ms=batch.now_ms,
            )  # fmt: skip
            if not count:
                break
            if isinstance(keys, list):
                consumers.hold_keys(batch.consumer, keys[at : at + count])
            sent = zip(positions[at : at + count], messages[at:], strict=False)
            if is_plain:
                new = tuple.__new__
                batch.deliveries += [new(Delivery, (*each, 0, ())) for each in sent]
            else:
                batch.deliveries += [self._delivery(*each) for each in sent]
            at += count
        batch.permits -= sum(counts[:at])
        return at

    def send_queued(self, position: Position, message: Message, batch: Batch, *, fills_hole: bool = False) -> bool:
        """Send a queued message; return whether it is queued no longer."""
        waiting = self._waiting.get(position)
        assert waiting is not None
        # The tracker may round, be wrong, or go by another clock: the message's own time decides.
        is_early = waiting.delivery_count == 0 and message.deliver_at_ms > batch.now_ms
        if is_early and self._delayed.must_wait(position, message, now_ms=batch.now_ms):
            self._waiting.take(position)
            self._reader.keep([(position, message)])
            return True
        dead_letters = self.dead_letters
        if dead_letters is not None and waiting.delivery_count > dead_letters.max_redelivery_count:
            return self._hand_over(self._delivery(position, message, waiting.delivery_count), now_ms=batch.now_ms)
        key = self._consumers.sticky_key(position, message.key)
        sent = Sent(batch.consumer, key, waiting.delivery_count + 1, self._messages.unacked_in(position, message))
        is_new = waiting.reason is HoleReason.NEVER_DELIVERED and not fills_hole
        send = self._admission.send_new if is_new else self._admission.send_again
        if not send(position, sent, now_ms=batch.now_ms):
            return False
        if key is not None and self._consumers.needs_keys:
            self._consumers.hold_keys(batch.consumer, (key,))
        self._waiting.take(position)
        batch.permits -= sent.message_count
        batch.deliveries.append(self._delivery(position, message, waiting.delivery_count))
        return True

    def _delivery(self, position: Position, message: Message, redelivery_count: int = 0) -> Delivery:
        if message.message_count == 1:
            return tuple.__new__(Delivery, (position, message, redelivery_count, ()))
        words = self._cursor.view.batch.get(position)
        return Delivery(position, message, redelivery_count, tuple(words or ()))

    def _hand_over(self, delivery: Delivery, *, now_ms: int) -> bool:
        """Hand a dead letter over and ack it; if a limit has no room for the ack, or either fails, it stays queued."""
        position = delivery.position
        if position not in self.begun:
            try:
                self._admission.make_room(position, now_ms=now_ms)
            except AckRefusedError:
                self._admission.has_refused_again = True
                return False
            try:
                if self.hand_over(delivery, now_ms):
                    self.handed_over(delivery, now_ms=now_ms)
                    return True
                self.begun[position] = delivery
            except BaseException as error:
                self._wait_with(position, now_ms=now_ms)
                if isinstance(error, AckRefusedError):
                    return True
                raise
        self._wait_with(position, now_ms=now_ms)
        return True

    def handed_over(self, delivery: Delivery, *, now_ms: int) -> None:
        """Ack a dead letter that was handed over.

        Raises:
            AckRefusedError: The ack would exceed a limit; the message stays queued.
        """
        position = delivery.position
        message_count = self._messages.unacked_in(position, delivery.message)
        receipt = self._admission.ack(position, now_ms=now_ms)
        self.handed_over_count += 1
        self._messages.acked(position, receipt.newly_acked, now_ms=now_ms)
        self._messages.dead_lettered_messages += message_count

    def _wait_with(self, position: Position, *, now_ms: int) -> None:
        """Try again later: the receiver of dead letters may be out of order, and no other message is to wait for it."""
        if position in self._waiting:
            waiting = self._waiting.take(position)
            self._messages.put(position, waiting._replace(until_ms=now_ms + _HAND_OVER_RETRY_MS))

    def _call_hand_over(self, delivery: Delivery, now_ms: int) -> bool:  # noqa: ARG002 - as `hand_over`
        assert self.dead_letters is not None
        assert self.dead_letters.hand_over is not None
        outcome = self.dead_letters.hand_over(delivery)
        if isawaitable(outcome):
            if iscoroutine(outcome):
                outcome.close()
            raise TypeError("hand_over returned an awaitable, which only AsyncTopics awaits")
        return True
