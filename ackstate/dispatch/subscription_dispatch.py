"""The half of a subscription that sends: its consumers, their permits, and the waiters for the next dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.dispatch.delivery import Batch, DispatchRound
from ackstate.dispatch.dispatcher import Dispatcher
from ackstate.dispatch.hole_report import HoleReason
from ackstate.dispatch.reports import SubscriptionReports
from ackstate.dispatch.rounds import Rounds
from ackstate.integers import check_count, integer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.delay.view import DelayedDeliveryTracker
    from ackstate.dispatch.consumers import SubscriptionType
    from ackstate.dispatch.delivery import DeadLetterPolicy, Delivery
    from ackstate.dispatch.options import SubscriptionOptions
    from ackstate.limits.gate import DispatchGate
    from ackstate.topic.message_log import MessageLog


class SubscriptionDispatch(SubscriptionReports):
    """The part of a `Subscription` that chooses receivers and sends."""

    def __init__(  # noqa: PLR0913 - its parts
        self,
        log: MessageLog,
        cursor: ManagedCursor,
        *,
        gate: DispatchGate | None,
        delays: DelayedDeliveryTracker | None,
        kind: SubscriptionType,
        options: SubscriptionOptions,
    ) -> None:
        super().__init__(log, cursor, gate=gate, delays=delays, kind=kind, options=options)
        self._dispatcher = Dispatcher(
            cursor, self._messages, admission=self._admission, consumers=self._consumers, options=options
        )
        self._waiter = self._admission.round_waiter
        self._rounds = Rounds(
            self._dispatcher, cursor, self._messages,
            admission=self._admission, consumers=self._consumers, options=options, waiter=self._waiter,
        )  # fmt: skip

    def dispatch_all(self, *, now_ms: int, waiter: Callable[[], object] | None = None) -> DispatchRound:
        """Send messages to all consumers with permits, and call a waiter when another round may send more.

        - Shared: to the consumers of the lowest `priority` number until they have no permits or are at their own
          limits, then to those of the next. Within a priority they take turns of `turn_entries` entries, which
          continue where the last round ended.
        - Key_Shared: to the owner of each key. Messages of an owner without permits are queued, up to `look_ahead_max`.
        - Failover: to the active consumer. Exclusive: to the only one.

        A message takes a permit, an entry that is a batch one for each message that is not acked. As in Pulsar, the
        last entry may be a batch of more messages than there were permits; then their number is below 0. A round sends
        about `round_entries_max` entries at most.

        Args:
            now_ms: The present.
            waiter: Called once, as soon as another round may send something: after a publish, an ack, a nack, a
                persist, new permits, the opening or closing of a consumer, a limit that opens, a seek. At once if there
                is more to send now, and by `close`. It need not be called for the passing of time until
                `DispatchRound.next_wake_ms`, but is when a message's time will come before that, as after a nack with a
                delay. It replaces the one of an earlier round; None keeps that one. It runs inside the call that causes
                it, with locks held, so it must only signal another thread or task to call this method. Its exceptions
                are logged.

        Raises:
            TypeError: The time is not an integer, or the waiter cannot be called.
            CursorClosedError: The cursor is closed.
            RuntimeError: Another thread changes the log at this moment, by a publish or a trim.
            StoreError: The log could not be read. Nothing was sent, no permits were taken, and an earlier waiter is
                waiting as before; this one is not.

        Complexity: O(consumers with permits + sent messages).
        """
        now_ms = integer("now_ms", now_ms)
        if waiter is not None and not callable(waiter):
            raise TypeError(f"waiter must be callable, got {waiter!r}")
        with self._lock:
            self.cursor.check_open()
            self.log.sole_use.check()
            self._latest_ms = now_ms
            before = self._waiter.begin_round()
            try:
                sent = self._rounds.send(now_ms=now_ms)
                for batch in sent:
                    self._report(batch)
            except BaseException:
                self._rounds.withdraw()
                self._waiter.arm(before, messages=True, room=True)
                self._times_changed()
                raise
            next_wake_ms = self._rounds.arm(before if waiter is None else waiter, now_ms=now_ms)
            if waiter is None:
                self._times_changed()
            else:
                self._waiter.wake_ms = next_wake_ms
            return DispatchRound([(batch.consumer, batch.deliveries) for batch in sent], next_wake_ms)

    def add_permits(self, consumer: str, count: int) -> None:
        """Allow `dispatch_all` to send more messages to a consumer; opens the consumer as `dispatch` does.

        The permits add up until they are used, and are lost when the consumer closes. `dispatch` takes none.

        Args:
            consumer: The consumer.
            count: Number of additional messages, 1 or more; the messages of a batch count one by one.

        Raises:
            ValueError: The count is below 1, or the name is empty or not UTF-8.
            TypeError: The count is not an integer, or the name is not text.
            ConsumerBusyError, ConsumerClosedError: As `dispatch`.

        Source: ``Consumer.flowPermits`` of Apache Pulsar.
        """
        check_count("count", count, least=1)
        with self._lock:
            self._open_unknown(consumer)
            permits = self._consumers.permits
            had_none = permits.of(consumer) <= 0
            permits.add(consumer, count)
            if had_none and permits.of(consumer) > 0:
                self._waiter.wake()

    def permits(self, consumer: str) -> int:
        """Return how many messages `dispatch_all` may still send to a consumer; 0 if it is not open.

        Below 0 if a batch had more messages than the consumer had permits.
        """
        with self._lock:
            return self._consumers.permits.of(consumer)

    def dispatch(self, consumer: str, max_messages: int, *, now_ms: int) -> list[Delivery]:
        """Send messages to a consumer: redeliveries and due messages first, then unread ones.

        Args:
            consumer: Receives the messages, until it acks them or gives them back. With Failover, only the active
                consumer receives any.
            max_messages: The most entries to send; a batch is one entry.
            now_ms: The present.

        Raises:
            TypeError: A number is not an integer, or the name is not text.
            CursorClosedError: The cursor is closed.
            RuntimeError: Another thread changes the log at this moment, by a publish or a trim.
            ConsumerBusyError: The subscription is exclusive and another consumer has it.
            ConsumerClosedError: The consumer was closed: no one would return its messages. `consumer_opened` opens it
                again. The last 1,000 closed consumers are known.
            ValueError: `max_messages` is negative, or the name is empty or not UTF-8.
            StoreError: The log could not be read; nothing was sent, and the messages will be dispatched later.
        """
        check_count("max_messages", max_messages, least=0)
        now_ms = integer("now_ms", now_ms)
        with self._lock:
            self.cursor.check_open()
            self.log.sole_use.check()
            self._open_unknown(consumer)
            self._latest_ms = now_ms
            if self.kind.is_single_active and self._consumers.active != consumer:
                return []
            batch = Batch(consumer, max_messages, now_ms)
            try:
                self._dispatcher.dispatch(batch)
                self._report(batch)
            except BaseException:
                self._messages.withdraw(batch)
                raise
            finally:
                self._times_changed()
            if batch.deliveries:
                self._waiter.room_made()  # The reader can read further ahead for the others.
            return batch.deliveries

    def consumer_opened(self, consumer: str, *, priority: int = 0, permits: int = 0) -> None:
        """Open a consumer; `dispatch` does so for an unknown one, unless it was closed.

        A consumer that becomes the active one of a Failover subscription receives the unacked messages of the one
        before.

        Args:
            consumer: Its name, unique among the open ones; not empty.
            priority: With Failover, the consumer of the lowest number is active; ties go to the first by name. With
                Shared, `dispatch_all` sends to those of a higher number only the messages that the others do not take.
            permits: How many messages `dispatch_all` may send to it; see `add_permits`.

        Raises:
            ConsumerBusyError: It is open already, by this method or by `dispatch`; or the subscription is exclusive and
                another consumer has it.
            ValueError: The name is empty or not UTF-8, or the number of permits is negative.
            TypeError: The name is not text, or a number is not an integer.
        """
        check_count("permits", permits, least=0)
        with self._lock:
            before = self._consumers.active
            self._consumers.open(consumer, priority=priority)
            self._consumers.permits.add(consumer, permits)
            if before is not None and self._consumers.active != before:
                self._messages.give_back(self._admission.deliveries.of(before), HoleReason.OWNER_GONE)
            self._messages.waiting.owners_changed()
            self._waiter.wake()

    def consumer_closed(self, consumer: str, *, now_ms: int | None = None) -> int:
        """Close a consumer, take back its unacked messages and its permits, and return how many messages those are.

        The messages of a batch count one by one. A consumer that is not open has none.
        """
        with self._lock:
            now_ms = self._at(self._present(now_ms))
            self._dispatcher.forget_owner(consumer)
            self._consumers.close(consumer)
            orphaned = self._messages.give_back(self._admission.deliveries.of(consumer), HoleReason.OWNER_GONE)
            self._messages.waiting.owners_changed()
            if self._gate is not None:
                self._gate.consumer_closed(consumer)
            self._admission.usage_decreased(now_ms=now_ms)
            self._waiter.wake()
            return orphaned

    @property
    def next_wake_ms(self) -> int | None:
        """When to dispatch again because a message's time will have come; None if none waits for a time."""
        with self._lock:
            return self._dispatcher.next_wake_ms(now_ms=self._latest_ms)

    def _take_back_round(self) -> None:
        """Undo the last `dispatch_all`, whose messages no consumer received; no other call may have come since."""
        with self._lock:
            self._rounds.withdraw()

    def _hand_over_by(self, begin: Callable[[Delivery], object]) -> DeadLetterPolicy | None:
        """From now on only begin to hand a dead letter over, with locks held; return the policy, None without one.

        Whoever is called calls `_hand_over_ended` or `_hand_over_failed` later.
        """

        def hand_over(delivery: Delivery, _: int) -> bool:
            begin(delivery)
            return False

        with self._lock:
            self._dispatcher.sender.hand_over = hand_over
            return self._dispatcher.sender.dead_letters

    def _hand_over_ended(self, delivery: Delivery, *, now_ms: int) -> None:
        """Ack a dead letter that was handed over, unless a seek came since.

        Raises:
            AckRefusedError: The ack would exceed a limit: the dead letter will be handed over once more.
            CursorClosedError: The cursor is closed.
        """
        with self._lock:
            sender = self._dispatcher.sender
            if sender.begun.get(delivery.position) is delivery:
                del sender.begun[delivery.position]
                sender.handed_over(delivery, now_ms=self._at(now_ms))

    def _hand_over_failed(self, delivery: Delivery) -> None:
        """Let a dead letter be handed over again; no-op if that has ended, or a seek came since."""
        with self._lock:
            if self._dispatcher.sender.begun.get(delivery.position) is delivery:
                del self._dispatcher.sender.begun[delivery.position]

    def _times_changed(self) -> None:
        """Call the waiter if the time of a message comes before it will dispatch anyway."""
        if self._waiter.wants_messages:
            self._waiter.time_comes(self._dispatcher.next_wake_ms(now_ms=self._latest_ms))

    def when_open(self, waiter: Callable[[], object], consumer: str = "") -> None:
        """Call a waiter once, as soon as no rule keeps new messages from a consumer: at once if none does now.

        The call that opens the gate calls the waiter, in its thread and while the subscription is busy. It should
        signal another thread or task to dispatch; it must not dispatch itself.
        """
        if self._gate is None:
            waiter()
        else:
            self._gate.when_open(waiter, consumer)

    def forget_waiter(self, waiter: Callable[[], None]) -> None:
        """Do not call a waiter any more; no-op if it does not wait."""
        if self._gate is not None:
            self._gate.forget_waiter(waiter)

    def _open_unknown(self, consumer: str) -> None:
        """Open a consumer that is not open, unless it was closed."""
        if not isinstance(consumer, str) or consumer not in self._consumers:
            self._consumers.check_not_closed(consumer)
            self.consumer_opened(consumer)

    def _report(self, batch: Batch) -> None:
        """Report the messages of a consumer to the cursor."""
        if batch.deliveries:
            positions = [delivery.position for delivery in batch.deliveries]
            self.cursor.delivered(max(positions), consumer=batch.consumer, positions=positions, now_ms=batch.now_ms)
