"""A subscription, as a broker embeds it: a cursor, a dispatch gate and a delay view over one message log."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, final

from ackstate.cursor.dispatch.admission import AckRefusedError, Admission
from ackstate.cursor.dispatch.block_reason import BlockReason, explain_block
from ackstate.cursor.dispatch.consumers import ConsumerBusyError, ConsumerClosedError, Consumers, SubscriptionType
from ackstate.cursor.dispatch.delivery import Batch, DeadLetterPolicy, Delivery
from ackstate.cursor.dispatch.dispatcher import Dispatcher
from ackstate.cursor.dispatch.live_holes import HoleContext, explain_holes
from ackstate.cursor.dispatch.options import SubscriptionOptions, check_parts, check_same_log
from ackstate.cursor.dispatch.unacked_messages import UnackedMessages
from ackstate.cursor.inspect.hole_report import HoleReason
from ackstate.cursor.listener import CursorListener
from ackstate.cursor.results import PersistTarget
from ackstate.errors import AckStateError
from ackstate.integers import check_count, integer
from ackstate.limits.gate import DispatchGate, GateLimits
from ackstate.limits.rules import Rule
from ackstate.position import check_position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ackstate.cursor.dispatch.deliveries import Deliveries
    from ackstate.cursor.inspect.hole_report import HoleReport
    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.results import PersistResult, Receipt
    from ackstate.cursor.topic.message_log import MessageLog
    from ackstate.delay.tracker import DelayedDeliveryTracker
    from ackstate.limits.gate import Usage
    from ackstate.position import Position

__all__ = [
    "AckRefusedError",
    "BlockReason",
    "ConsumerBusyError",
    "ConsumerClosedError",
    "DeadLetterPolicy",
    "Delivery",
    "Subscription",
    "SubscriptionOptions",
    "SubscriptionType",
]


@final
class Subscription(CursorListener):
    """Dispatches a topic's messages to the consumers of one subscription and takes their acks.

    Each delivery reserves, in the gate, the most that its ack could add to the ack state, and gives it back when it is
    acked or returned: no order of acks passes a limit. While a limit of the ack state keeps new messages back, those
    that fill ack holes still go out, if their acks cannot pass it.

    Driven by calls; no threads and no clock of its own: where the present may be left out, it is that of the latest
    call. Safe for any number of threads, one call at a time, and subscriptions that share a delay index may be used by
    different threads; but no call may overlap with one that publishes to the log. It is the one watcher of its cursor.

    Args:
        log: The topic's messages.
        cursor: The subscription's ack state.
        gate: Its limits, for it alone; None for Pulsar's defaults. Exclusive and Failover are never held back, as in
            Pulsar, and have none.
        delays: Its delayed messages; None delivers every message at once, as Exclusive and Failover always do.
        kind: How messages are shared out.
        options: The rest.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The cursor is of another topic than the log, or was not opened with `log.ledgers`; the cursor or the
            gate is that of another subscription; or an Exclusive or Failover subscription is given a gate or delays.
            Nothing was changed.

    Source: ``PersistentSubscription`` and its dispatchers of Apache Pulsar.
    """

    def __init__(  # noqa: PLR0913 - what it is composed of
        self,
        log: MessageLog,
        cursor: ManagedCursor,
        *,
        gate: DispatchGate | None = None,
        delays: DelayedDeliveryTracker | None = None,
        kind: SubscriptionType = SubscriptionType.SHARED,
        options: SubscriptionOptions | None = None,
    ) -> None:
        check_same_log(log, cursor)
        options = SubscriptionOptions() if options is None else options
        check_parts(kind, gate, delays, options)
        self.cursor = cursor
        self.kind = kind
        self._log = log
        self._gate = gate if gate is not None or kind.is_single_active else DispatchGate(GateLimits())
        self._delays = delays
        self._now_ms = 0  # of the latest call that gave the present
        # Taken before any lock of the cursor.
        self._lock = threading.RLock()
        self._consumers = Consumers(kind)
        self._admission = Admission(cursor, gate=self._gate, promotes_young=options.promotes_young)
        self._messages = UnackedMessages(
            log, cursor, delays=delays, admission=self._admission, consumers=self._consumers,
            hole_tries_max=options.hole_tries_max,
        )  # fmt: skip
        self._dispatcher = Dispatcher(
            cursor, self._messages, admission=self._admission, consumers=self._consumers, options=options
        )
        cursor.add_listener(self)
        try:
            if self._gate is not None:
                self._gate.take()
        except ValueError:
            cursor.remove_listener(self)
            raise
        self._messages.delayed.mark_delete_persisted(cursor.persisted_mark_delete_position)
        self._admission.observe(now_ms=0)

    @property
    def unacked_messages(self) -> int:
        """Messages sent and neither acked nor returned, those of a batch one by one."""
        with self._lock:
            return self._admission.deliveries.unacked_messages

    @property
    def deliveries(self) -> Deliveries:
        """What is on its way, and what is reserved for its acks: to be read, not changed."""
        return self._admission.deliveries

    def usage(self, consumer: str = "") -> Usage:
        """Return what is used now of the gate's limits.

        Args:
            consumer: Whose unacked messages count as the consumer's; empty for nobody's.
        """
        with self._lock:
            return self._admission.usage(consumer)

    def check_invariants(self) -> None:
        """Recount everything that is kept incrementally, and assert that it agrees. Complexity: O(state)."""
        with self._lock:
            self.deliveries._check()
            self._messages.waiting._check()
            self.cursor._check()

    @property
    def consumers(self) -> tuple[str, ...]:
        """The open consumers, in the order they came."""
        with self._lock:
            return self._consumers.names

    @property
    def active_consumer(self) -> str | None:
        """Who gets everything, of Exclusive and Failover; None if nobody is there, and for the other types."""
        with self._lock:
            return self._consumers.active

    @property
    def next_wake_ms(self) -> int | None:
        """When to dispatch again because a message's time will have come; None if none waits for a time."""
        with self._lock:
            return self._dispatcher.next_wake_ms(now_ms=self._now_ms)

    def consumer_opened(self, consumer: str, *, priority: int = 0) -> None:
        """Let a consumer in; `dispatch` does it for one that it does not know, unless it was closed.

        One that becomes the active consumer of a Failover subscription gets what the one before had and did not ack.

        Args:
            consumer: Its name, unique among the open ones; not empty.
            priority: Of several Failover consumers the one of the lowest number is active, of equals the first by name.

        Raises:
            ConsumerBusyError: It is open already, by this method or by `dispatch`; or the subscription is exclusive and
                another has it.
            ValueError: The name is empty or not UTF-8.
            TypeError: The name is no text, or the priority no integer.
        """
        with self._lock:
            before = self.active_consumer
            self._consumers.open(consumer, priority=priority)
            if before is not None and self.active_consumer != before:
                self._messages.give_back(self._admission.deliveries.of(before), HoleReason.OWNER_GONE)
            self._messages.waiting.owners_changed()

    def consumer_closed(self, consumer: str) -> int:
        """Let a consumer go, take back what it had and did not ack, and return how many messages that is.

        Those of a batch count one by one. A consumer that is not open has none.
        """
        with self._lock:
            self._messages.holes.forget(consumer)
            self._consumers.close(consumer)
            orphaned = self._messages.give_back(self._admission.deliveries.of(consumer), HoleReason.OWNER_GONE)
            self._messages.waiting.owners_changed()
            if self._gate is not None:
                self._gate.consumer_closed(consumer)
            self._admission.usage_decreased(now_ms=self._now_ms)
            return orphaned

    def dispatch(self, consumer: str, max_messages: int, *, now_ms: int) -> list[Delivery]:
        """Send a consumer what it may have: what is to be sent again and what is due first, then unread messages.

        Args:
            consumer: Who gets them, until it acks or returns them. Of Failover only the active one gets any.
            max_messages: How many entries it wants at most, a batch being one.
            now_ms: The present.

        Raises:
            TypeError: A number is no integer, or the name no text.
            CursorClosedError: The cursor is closed.
            ConsumerBusyError: The subscription is exclusive and another consumer has it.
            ConsumerClosedError: The consumer was closed: no one would return its messages. `consumer_opened` lets it
                in again. The last 1,000 that were closed are known.
            ValueError: `max_messages` is negative, or the name is empty or not UTF-8.
            StoreError: The log could not be read; nothing was sent, the messages concerned will be dispatched later.
        """
        check_count("max_messages", max_messages, least=0)
        now_ms = integer("now_ms", now_ms)
        with self._lock:
            self.cursor.check_open()
            if not isinstance(consumer, str) or consumer not in self._consumers:
                self._consumers.check_not_closed(consumer)
                self.consumer_opened(consumer)
            self._now_ms = now_ms
            if self.kind.is_single_active and self._consumers.active != consumer:
                return []
            batch = Batch(consumer, max_messages, now_ms, [])
            try:
                self._dispatcher.dispatch(batch)
                if batch.deliveries:
                    positions = [delivery.position for delivery in batch.deliveries]
                    self.cursor.delivered(max(positions), consumer=consumer, positions=positions, now_ms=now_ms)
            except BaseException:
                self._messages.withdraw(batch)
                raise
            self._messages.sent(batch)
            return batch.deliveries

    def ack(self, position: Position, *, now_ms: int) -> Receipt:
        """Ack one entry.

        Raises:
            AckRefusedError: It had been given back, and its ack would pass a limit: it will be sent again.
            As `ManagedCursor.ack`.
        """
        with self._lock:
            position = check_position(position)
            self._now_ms = now_ms = integer("now_ms", now_ms)
            receipt = self._admission.ack(position, lambda: self.cursor.ack(position, now_ms=now_ms), now_ms=now_ms)
            self._messages.acked(position, receipt.newly_acked, now_ms=now_ms)
            return receipt

    def ack_batch(self, position: Position, unacked_words: Iterable[int], *, now_ms: int) -> Receipt:
        """Ack messages of an entry that is a batch of them; the last one acks the entry.

        Raises:
            AckRefusedError: As `ack`.
            As `ManagedCursor.ack_batch`.
        """
        with self._lock:
            position, words = check_position(position), list(unacked_words)
            self._now_ms = now_ms = integer("now_ms", now_ms)

            def ack() -> Receipt:
                return self.cursor.ack_batch(position, words, now_ms=now_ms)

            is_last = self._completes(position, words)
            receipt = self._admission.ack(position, ack, now_ms=now_ms) if is_last else ack()
            if self.cursor.is_acked(position):
                self._messages.acked(position, receipt.newly_acked, now_ms=now_ms)
            else:
                self._messages.acked_in_batch(position, now_ms=now_ms)
            return receipt

    def ack_cumulative(
        self, position: Position, *, now_ms: int, properties: Mapping[str, int] | None = None
    ) -> Receipt:
        """Ack every message up to a position, included, whoever has it.

        A broker of Pulsar takes such acks for Exclusive and Failover only; here the type does not matter.

        Raises:
            As `ManagedCursor.mark_delete`.
        """
        with self._lock:
            self._now_ms = now_ms = integer("now_ms", now_ms)
            receipt = self.cursor.mark_delete(position, now_ms=now_ms, properties=properties)
            self._messages.acked_up_to(self.cursor.mark_delete_position, receipt.newly_acked, now_ms=now_ms)
            return receipt

    def skip(self, count: int, *, now_ms: int, counts_acked: bool = False) -> Receipt:
        """Ack the next so many entries after the mark-delete position, on their way or not.

        Raises:
            As `ManagedCursor.skip`.
        """
        with self._lock:
            self._now_ms = now_ms = integer("now_ms", now_ms)
            receipt = self.cursor.skip(count, now_ms=now_ms, counts_acked=counts_acked)
            self._messages.acked_up_to(self.cursor.mark_delete_position, receipt.newly_acked, now_ms=now_ms)
            return receipt

    def clear_backlog(self, *, now_ms: int) -> Receipt:
        """Ack everything that the log has, delayed messages too.

        Raises:
            As `ManagedCursor.clear_backlog`.
        """
        with self._lock:
            self._now_ms = now_ms = integer("now_ms", now_ms)
            receipt = self.cursor.clear_backlog(now_ms=now_ms)
            self._messages.delayed.forget()
            self._messages.acked_up_to(self.cursor.mark_delete_position, receipt.newly_acked, now_ms=now_ms)
            return receipt

    def seek(self, position: Position, *, now_ms: int) -> PersistResult:
        """Begin anew at a position: nothing from there on is acked or on its way any more.

        Raises:
            As `ManagedCursor.reset`: what is acked and what is on its way is as it was then.
        """
        with self._lock:
            self._now_ms = now_ms = integer("now_ms", now_ms)
            result = self.cursor.reset(position, now_ms=now_ms)
            self._messages.clear()
            self._admission.persisted(None, now_ms=now_ms)
            return result

    def nack(self, position: Position, *, delay_ms: int = 0, now_ms: int | None = None) -> bool:
        """Give a delivered message back, to be delivered again; one that is not in flight is left alone.

        Exclusive and Failover keep the order: what was sent after it comes back with it, and nothing passes it.

        Args:
            position: The message.
            delay_ms: So long it is not sent again; meanwhile it is nobody's, and with Key_Shared later messages of its
                key wait with it.
            now_ms: The present.

        Returns:
            Whether it was in flight.

        Raises:
            TypeError: A number is no integer.
            ValueError: The delay is negative, or an id out of range.
        """
        position = check_position(position, entry_id_min=0)
        check_count("delay_ms", delay_ms, least=0)
        with self._lock:
            self._now_ms = self._now_ms if now_ms is None else integer("now_ms", now_ms)
            self._messages.waiting.follow_clock(now_ms=self._now_ms)
            until_ms = self._now_ms + delay_ms if delay_ms else 0
            was_sent = self._messages.give_back(self._nacked_with(position), HoleReason.NACKED, until_ms=until_ms)
            self._admission.usage_decreased(now_ms=self._now_ms)
            return was_sent > 0

    def close(self, *, now_ms: int) -> PersistResult | None:
        """Persist everything, close the cursor and let go of the delay view; closing twice does nothing.

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
            return result

    def change_limits(self, limits: GateLimits) -> None:
        """Put other limits in force at once; below the present use they block, and lose nothing.

        Exclusive and Failover have none, and nothing changes.

        Raises:
            TypeError: They are no `GateLimits`.
        """
        if not isinstance(limits, GateLimits):
            raise TypeError(f"limits must be a GateLimits, got {limits!r}")
        with self._lock:
            if self._gate is not None:
                self._gate.change_limits(limits)
            self._admission.observe(now_ms=self._now_ms)

    def when_open(self, waiter: Callable[[], object], consumer: str = "") -> None:
        """Call a waiter once, as soon as no rule keeps new messages from a consumer: at once if none does now.

        It is called by whatever call opens the gate, in its thread and while the subscription is busy: let it signal
        somebody to dispatch, not dispatch.
        """
        if self._gate is None:
            waiter()
        else:
            self._gate.when_open(waiter, consumer)

    def forget_waiter(self, waiter: Callable[[], None]) -> None:
        """Do not call a waiter any more; one that does not wait is left alone."""
        if self._gate is not None:
            self._gate.forget_waiter(waiter)

    def why_blocked(self, *, top: int = 3) -> tuple[BlockReason, ...]:
        """Return the rules that keep new messages back, with what would release them; empty if none does.

        Args:
            top: How many holes and consumers to name of each rule.

        Raises:
            ValueError: `top` is negative.

        Complexity: O(holes) if a limit of the ack state is closed.
        """
        check_count("top", top, least=0)
        with self._lock:
            if self._gate is None:
                return ()
            found = [("", verdict) for verdict in self._gate.why_blocked(self.usage())]
            for consumer in self._gate.closed_consumers:
                verdicts = self._gate.why_blocked(self._admission.usage(consumer), consumer)
                found += [(consumer, each) for each in verdicts if each.rule is Rule.CONSUMER_UNACKED_MESSAGES]
            explained = partial(
                explain_block, where=self._hole_context(), store_error=self._admission.store_error,
                consumers=self.consumers, top=top, now_ms=self._now_ms,
            )  # fmt: skip
            return tuple(explained(verdict, consumer) for consumer, verdict in found)

    def explain_holes(self, top: int = 10, *, now_ms: int | None = None) -> list[HoleReport]:
        """Explain the ack holes that cost most: what they are, why they are there, and what acking them frees.

        Args:
            top: How many at most: the one that holds back the mark-delete position, then the costliest first.
            now_ms: The present.

        Complexity: O(holes), and reading up to 64 messages of each that is returned.
        """
        with self._lock:
            present_ms = self._now_ms if now_ms is None else integer("now_ms", now_ms)
            return explain_holes(self._hole_context(), top=top, now_ms=present_ms)

    def record_bytes_max(self) -> int | None:
        """Tell the cursor how much may stay un-persisted beside what is reserved."""
        return self._admission.record_bytes_max()

    def persisted(self, outcome: PersistResult | AckStateError) -> None:
        """Take note of a persist of the cursor: the gate may open, or the store be the cause that it does not."""
        with self._lock:
            if isinstance(outcome, AckStateError):
                self._admission.persisted(outcome, now_ms=self._now_ms)
            else:  # One that had nothing to write says nothing about the store.
                self._messages.delayed.mark_delete_persisted(outcome.mark_delete)
                error = self._admission.store_error if outcome.route is PersistTarget.NOTHING else None
                self._admission.persisted(error, now_ms=self._now_ms)

    def _completes(self, position: Position, unacked_words: Sequence[int]) -> bool:
        """Tell whether an ack that leaves some messages of a batch unacked acks the last ones that still were."""
        known = self.cursor.view.batch.get(position)
        return not any(unacked_words) or (
            known is not None and not any(before & after for before, after in zip(known, unacked_words, strict=False))
        )

    def _nacked_with(self, position: Position) -> list[Position]:
        """Return what goes back if a message does."""
        deliveries = self._admission.deliveries
        if self.kind.is_single_active and position in deliveries:
            return list(deliveries.in_order().at_least(position))
        return [position]

    def _hole_context(self) -> HoleContext:
        return HoleContext(
            self._log, self.cursor, self._admission.deliveries, self._messages.waiting, self._delays is not None
        )
