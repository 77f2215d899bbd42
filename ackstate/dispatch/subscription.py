"""A subscription, as a broker embeds it: a cursor, a dispatch gate and a delay view over one message log."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.cursor.listener import CursorListener
from ackstate.cursor.results import PersistTarget
from ackstate.dispatch.admission import AckRefusedError
from ackstate.dispatch.block_reason import BlockReason
from ackstate.dispatch.consumers import ConsumerBusyError, ConsumerClosedError, SubscriptionType
from ackstate.dispatch.delivery import DeadLetterPolicy, Delivery, DispatchRound
from ackstate.dispatch.hole_report import HoleReason
from ackstate.dispatch.options import SubscriptionOptions, check_parts, check_same_log
from ackstate.dispatch.start import Start, StartTime, start_position
from ackstate.dispatch.subscription_dispatch import SubscriptionDispatch
from ackstate.entry_bitmap import bitmaps_of
from ackstate.errors import AckStateError
from ackstate.integers import check_count, integer
from ackstate.limits.gate import DispatchGate, GateLimits
from ackstate.position import Position, check_position, checked_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.results import PersistResult, Receipt
    from ackstate.delay.view import DelayedDeliveryTracker
    from ackstate.topic.message_log import MessageLog

__all__ = [
    "AckRefusedError",
    "BlockReason",
    "ConsumerBusyError",
    "ConsumerClosedError",
    "DeadLetterPolicy",
    "Delivery",
    "DispatchRound",
    "Subscription",
    "SubscriptionOptions",
    "SubscriptionType",
]


@final
class Subscription(SubscriptionDispatch, CursorListener):
    """Dispatches a topic's messages to the consumers of one subscription, and receives their acks.

    Each delivery reserves, in the gate, the most that its ack could add to the ack state. The reservation is returned
    when the message is acked or given back, so no order of acks exceeds a limit. While a limit of the ack state keeps
    new messages back, messages that fill ack holes are still sent, if their acks cannot exceed it.

    The subscription acts when it is called: it has no thread and no clock. A call without `now_ms` takes place at the
    latest time that another call gave. Any number of threads may call it; it handles one call at a time. Subscriptions
    that share a delay index may be used by different threads. No call may overlap with one that publishes to the log.
    The subscription is the one watcher of its cursor.

    Args:
        log: The topic's messages.
        cursor: The subscription's ack state.
        gate: Its limits, for it alone; None for Pulsar's defaults. Exclusive and Failover are never held back, as in
            Pulsar, and have none.
        delays: Its delayed messages; None delivers every message at once, as Exclusive and Failover always do. If it is
            a view of a shared index, the log feeds that index from now on.
        kind: How messages are distributed.
        options: The other settings.
        publish_dead_letter: Publishes a dead letter at a time to the topic that the options name, and returns True;
            `Topics` gives it.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The cursor is of another topic than the log, or was not opened with `log.ledgers`; the cursor or the
            gate is that of another subscription; an Exclusive or Failover subscription is given a gate or delays; or
            dead letters are to be published and nothing publishes them. Nothing was changed.

    Source: ``PersistentSubscription`` and its dispatchers of Apache Pulsar.
    """

    def __init__(  # noqa: PLR0913 - its parts
        self,
        log: MessageLog,
        cursor: ManagedCursor,
        *,
        gate: DispatchGate | None = None,
        delays: DelayedDeliveryTracker | None = None,
        kind: SubscriptionType = SubscriptionType.SHARED,
        options: SubscriptionOptions | None = None,
        publish_dead_letter: Callable[[Delivery, int], bool] | None = None,
    ) -> None:
        check_same_log(log, cursor)
        options = SubscriptionOptions() if options is None else options
        check_parts(kind, gate, delays, options, publishes=publish_dead_letter is not None)
        gate = gate if gate is not None or kind.is_single_active else DispatchGate(GateLimits())
        super().__init__(log, cursor, gate=gate, delays=delays, kind=kind, options=options)
        if publish_dead_letter is not None:
            self._dispatcher.sender.hand_over = publish_dead_letter
        cursor.add_listener(self)
        try:
            if self._gate is not None:
                self._gate.take()
        except ValueError:
            cursor.remove_listener(self)
            raise
        self._messages.delayed.mark_delete_persisted(cursor.persisted_mark_delete_position)
        self._admission.observe(now_ms=cursor.opened_ms)
        log.add_listener(self._waiter)

    def ack(self, position: Position, *, now_ms: int) -> Receipt:
        """Ack one entry.

        Raises:
            AckRefusedError: The message was given back before, and its ack would exceed a limit: it will be sent again.
            As `ManagedCursor.ack`.
        """
        with self._lock:
            if type(position) is not Position:
                position = check_position(position)
            self._latest_ms = now_ms if type(now_ms) is int else integer("now_ms", now_ms)
            receipt = self._admission.ack(position, now_ms=now_ms)
            self._messages.acked(position, receipt.newly_acked, now_ms=now_ms)
            return receipt

    def ack_many(self, positions: Sequence[Position], *, now_ms: int) -> Receipt:
        """Ack a list of entries, in any order, repeated or not: all of them or, if one is refused, none.

        Raises:
            AckRefusedError: As `ack`, for all of them together.
            As `ManagedCursor.ack_many`.

        Complexity: O(entries), at a fraction of the time of an `ack` for each.
        """
        with self._lock:
            positions, now_ms = checked_positions(positions), self._at(now_ms)
            entries = bitmaps_of(positions)
            receipt = self._admission.ack_all(positions, entries, now_ms=now_ms)
            self._messages.acked_all(positions, entries, receipt.newly_acked, now_ms=now_ms)
            return receipt

    def ack_batch(self, position: Position, unacked_words: Iterable[int], *, now_ms: int) -> Receipt:
        """Ack messages of an entry that is a batch; the last one acks the entry.

        Raises:
            AckRefusedError: As `ack`.
            As `ManagedCursor.ack_batch`.
        """
        with self._lock:
            position, words, now_ms = check_position(position), list(unacked_words), self._at(now_ms)
            is_last = self._messages.completes_batch(position, words)
            ack = (self._admission if is_last else self.cursor).ack_batch
            receipt = ack(position, words, now_ms=now_ms)
            if self.cursor.is_acked(position):
                self._messages.acked(position, receipt.newly_acked, now_ms=now_ms)
            else:
                self._messages.acked_in_batch(position, now_ms=now_ms)
            return receipt

    def ack_cumulative(
        self, position: Position, *, now_ms: int, properties: Mapping[str, int] | None = None
    ) -> Receipt:
        """Ack every message up to a position, included, whichever consumer has it.

        A broker of Pulsar accepts such acks for Exclusive and Failover only; here the type does not matter.

        Raises:
            As `ManagedCursor.mark_delete`.
        """
        with self._lock:
            now_ms = self._at(now_ms)
            receipt = self.cursor.mark_delete(position, now_ms=now_ms, properties=properties)
            return self._acked_up_to_mark_delete(receipt, now_ms=now_ms)

    def nack(self, position: Position, *, delay_ms: int = 0, now_ms: int | None = None) -> bool:
        """Give a delivered message back, to be delivered again; no-op if it is not in flight.

        Exclusive and Failover keep the order: the messages sent after it are given back as well, and nothing passes it.

        Args:
            position: The message.
            delay_ms: How long it is not sent again. Meanwhile no consumer has it, and with Key_Shared later messages of
                its key wait with it.
            now_ms: The present.

        Returns:
            Whether it was in flight.

        Raises:
            TypeError: A number is not an integer.
            ValueError: The delay is negative, or an id is out of range.
        """
        return self.nack_many([position], delay_ms=delay_ms, now_ms=now_ms) > 0

    def nack_many(self, positions: Iterable[Position], *, delay_ms: int = 0, now_ms: int | None = None) -> int:
        """Give delivered messages back, as `nack` each; those that are not in flight are ignored.

        Returns:
            How many were in flight, the messages of a batch one by one.

        Raises:
            As `nack`; nothing was given back.
        """
        positions = checked_positions(positions)
        check_count("delay_ms", delay_ms, least=0)
        with self._lock:
            now_ms = self._at(self._present(now_ms))
            self._messages.waiting.follow_clock(now_ms=now_ms)
            deliveries = self._admission.deliveries
            if self.kind.is_single_active:
                lowest = min((position for position in positions if position in deliveries), default=None)
                positions = [] if lowest is None else list(deliveries.in_order().at_least(lowest))
            until_ms = now_ms + delay_ms if delay_ms else 0
            returned_count = self._messages.give_back(positions, HoleReason.NACKED, until_ms=until_ms)
            self._admission.usage_decreased(now_ms=now_ms)
            self._times_changed()
            return returned_count

    def redeliver_all(self, consumer: str, *, now_ms: int) -> int:
        """Give back all unacked messages of a consumer, to be delivered again at once.

        With Exclusive and Failover they are sent in order, before all others. The consumer stays open, and its permits
        are as before. One that is not open has no messages.

        Returns:
            How many were in flight, the messages of a batch one by one.

        Raises:
            TypeError: The time is not an integer.

        Source: ``Consumer.redeliverUnacknowledgedMessages`` of Apache Pulsar.
        """
        with self._lock:
            now_ms = self._at(now_ms)
            self._messages.waiting.follow_clock(now_ms=now_ms)
            returned_count = self._messages.give_back(self._admission.deliveries.of(consumer), HoleReason.NACKED)
            self._admission.usage_decreased(now_ms=now_ms)
            self._times_changed()
            return returned_count

    def skip(self, count: int, *, now_ms: int, counts_acked: bool = False) -> Receipt:
        """Ack the next `count` entries after the mark-delete position, in flight or not.

        Raises:
            As `ManagedCursor.skip`.
        """
        with self._lock:
            now_ms = self._at(now_ms)
            receipt = self.cursor.skip(count, now_ms=now_ms, counts_acked=counts_acked)
            return self._acked_up_to_mark_delete(receipt, now_ms=now_ms)

    def clear_backlog(self, *, now_ms: int) -> Receipt:
        """Ack all messages of the log, delayed ones too.

        Raises:
            As `ManagedCursor.clear_backlog`.
        """
        with self._lock:
            now_ms = self._at(now_ms)
            receipt = self.cursor.clear_backlog(now_ms=now_ms)
            self._messages.delayed.forget()
            return self._acked_up_to_mark_delete(receipt, now_ms=now_ms)

    def seek(self, position: Position | Start | StartTime, *, now_ms: int) -> PersistResult:
        """Restart at a position, an end of the log, or a time: from there on, nothing is acked or in flight any more.

        The properties of the cursor stay, those of its mark-delete do not; see `ManagedCursor.reset`.

        Raises:
            As `start_position` and `ManagedCursor.reset`: acks and messages in flight are as before then.
        """
        with self._lock:
            now_ms = self._at(now_ms)
            result = self.cursor.reset(start_position(self.log, position), now_ms=now_ms)
            self._messages.clear()
            self._dispatcher.sender.begun.clear()
            self._admission.persisted(None, now_ms=now_ms)
            self._waiter.wake()
            return result

    def close(self, *, now_ms: int) -> PersistResult | None:
        """Persist everything, close the cursor and the delay tracker, and call all waiters; closing twice does nothing.

        Raises:
            As `ManagedCursor.close`; the subscription stays open then.
        """
        now_ms = integer("now_ms", now_ms)
        with self._lock:
            result = self.cursor.close(now_ms=now_ms)
            self.cursor.remove_listener(self)
            if self._gate is not None:
                self._gate.close()
            self._messages.delayed.close()
            self._waiter.wake()
            return result

    def change_limits(self, limits: GateLimits, *, now_ms: int | None = None) -> None:
        """Put other limits in force at once; below the present usage they block, and no message is lost.

        Exclusive and Failover have none, and nothing changes.

        Raises:
            TypeError: They are not `GateLimits`.
        """
        if not isinstance(limits, GateLimits):
            raise TypeError(f"limits must be a GateLimits, got {limits!r}")
        with self._lock:
            if self._gate is not None:
                self._gate.change_limits(limits)
            self._admission.observe(now_ms=self._at(self._present(now_ms)))

    def record_bytes_max(self) -> int | None:
        """Return how much may stay un-persisted beside the reservations."""
        return self._admission.record_bytes_max()

    def persisted(self, outcome: PersistResult | AckStateError) -> None:
        """Note the outcome of a persist: the gate may open, or the store is the reason why it does not."""
        with self._lock:
            if isinstance(outcome, AckStateError):
                self._admission.persisted(outcome, now_ms=self._latest_ms)
            else:  # A persist that had nothing to write shows nothing about the store.
                self._messages.delayed.mark_delete_persisted(outcome.mark_delete)
                error = self._admission.store_error if outcome.route is PersistTarget.NOTHING else None
                self._admission.persisted(error, now_ms=self._latest_ms)

    def _acked_up_to_mark_delete(self, receipt: Receipt, *, now_ms: int) -> Receipt:
        self._messages.acked_up_to(self.cursor.mark_delete_position, receipt.newly_acked, now_ms=now_ms)
        return receipt
