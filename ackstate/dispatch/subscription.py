"""A subscription of a topic: dispatch, acks, redelivery, and a block that is never stuck.

Composed of a cursor, which holds the ack state; a gate, which holds the limits; a tracker of delayed messages; and the
message log.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, final

from ackstate.checks import check_count, present
from ackstate.cursor import CursorListener, PersistTarget
from ackstate.dispatch.admission import Admission
from ackstate.dispatch.consumers import Consumers, SubscriptionType
from ackstate.dispatch.explain import (
    ConsumerUse,
    DispatchStats,
    HoleReason,
    costliest,
    explain_blocks,
    live_report,
    rule_stats,
)
from ackstate.dispatch.messages import UnackedMessages
from ackstate.dispatch.options import (
    DispatchRound,
    SubscriptionOptions,
    check_parts,
    check_same_log,
    checked_start,
    start_position,
)
from ackstate.dispatch.rounds import Dispatcher
from ackstate.entry_bitmap import bitmaps_of
from ackstate.errors import AckStateError
from ackstate.limits import DispatchGate, GateLimits
from ackstate.position import Position, check_position, checked_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ackstate.ack_hole import AckHole
    from ackstate.cursor import ManagedCursor, PersistResult, Receipt
    from ackstate.delay.view import DelayedDeliveryTracker
    from ackstate.dispatch.explain import BlockReason, HoleReport
    from ackstate.dispatch.options import DeadLetterPolicy, Delivery, Start, StartTime, TopicLog
    from ackstate.dispatch.rounds import Batch
    from ackstate.limits import Usage


@final
class Subscription:
    """Dispatches a topic's messages to the consumers of one subscription, and receives their acks.

    Each delivery reserves, in the gate, the most that its ack could add to the ack state. The reservation is returned
    when the message is acked or given back, so no order of acks exceeds a limit. While a limit of the ack state keeps
    new messages back, messages that fill ack holes are still sent, if their acks cannot exceed it.

    The subscription acts when it is called: it has no thread. Any number of threads may call it; it handles one call at
    a time. Subscriptions that share a delay index may be used by different threads. No call may overlap with one that
    publishes to the log. The subscription is the one watcher of its cursor.

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
        clock: Returns the present, in milliseconds, for calls without `now_ms`; None for the latest time that another
            call gave. `Topics` gives its own.

    Attributes:
        log: The topic's messages.
        cursor: The ack state.
        kind: How messages are distributed.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The cursor is of another topic than the log, or was not opened with `log.ledgers`; the cursor or the
            gate is that of another subscription; an Exclusive or Failover subscription is given a gate or delays; or
            dead letters are to be published and nothing publishes them. Nothing was changed.

    Source: ``PersistentSubscription`` and its dispatchers of Apache Pulsar.
    """

    def __init__(  # noqa: PLR0913 - its parts
        self,
        log: TopicLog,
        cursor: ManagedCursor,
        *,
        gate: DispatchGate | None = None,
        delays: DelayedDeliveryTracker | None = None,
        kind: SubscriptionType | str = SubscriptionType.SHARED,
        options: SubscriptionOptions | None = None,
        publish_dead_letter: Callable[[Delivery, int], bool] | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        check_same_log(log, cursor)
        options = SubscriptionOptions() if options is None else options
        kind = check_parts(kind, gate, delays, options, publishes=publish_dead_letter is not None)
        gate = gate if gate is not None or kind.is_single_active else DispatchGate(GateLimits())
        self.log = log
        self.cursor = cursor
        self.kind = kind
        self._latest_ms = cursor.opened_ms
        self._clock = clock or (lambda: self._latest_ms)
        # Taken before any lock of the cursor.
        self._lock = threading.RLock()
        self._gate = gate
        self._consumers = Consumers(kind)
        self._admission = Admission(cursor, gate=gate, promotes_young=options.promotes_young)
        self._deliveries, self._waiter = self._admission.deliveries, self._admission.waiter
        self._messages = UnackedMessages(log, self._admission, self._consumers, delays=delays)
        self._dispatcher = Dispatcher(
            self._messages, admission=self._admission, consumers=self._consumers, options=options
        )
        if publish_dead_letter is not None:
            self._dispatcher.hand_over = publish_dead_letter
        self._listener = SubscriptionListener(self)
        cursor.add_listener(self._listener)
        try:
            if gate is not None:
                gate.take()
        except ValueError:
            cursor.remove_listener(self._listener)
            raise
        self._messages.delayed.mark_delete_persisted(cursor.persisted_mark_delete_position)
        self._admission.observe(now_ms=cursor.opened_ms)
        log.add_listener(self._waiter)

    def __repr__(self) -> str:
        return f"<Subscription {self.kind.name} of {self.cursor!r}>"

    # What it is doing

    @property
    def unacked_messages(self) -> int:
        """Messages sent and neither acked nor returned, those of a batch one by one."""
        with self._lock:
            return self._deliveries.unacked_messages

    def in_flight(self, consumer: str) -> list[Position]:
        """Return the messages that a consumer was sent and that are not acked, in the order they were sent."""
        with self._lock:
            return self._deliveries.of(consumer)

    @property
    def consumers(self) -> tuple[str, ...]:
        """The open consumers, in the order they came."""
        with self._lock:
            return self._consumers.names

    @property
    def has_consumers(self) -> bool:
        """Whether a consumer is open. Takes no lock, so that a caller can look at many subscriptions."""
        return bool(self._consumers.names)

    @property
    def active_consumer(self) -> str | None:
        """The consumer that receives everything, with Exclusive and Failover; None if there is none."""
        with self._lock:
            return self._consumers.active

    @property
    def next_wake_ms(self) -> int | None:
        """When to dispatch again because a message's time will have come; None if none waits for a time."""
        with self._lock:
            return self._dispatcher.next_wake_ms(now_ms=self._latest_ms)

    def permits(self, consumer: str) -> int:
        """Return how many messages `dispatch_all` may still send to a consumer; 0 if it is not open.

        Below 0 if a batch had more messages than the consumer had permits.
        """
        with self._lock:
            return self._consumers.permits.of(consumer)

    def usage(self, consumer: str = "") -> Usage:
        """Return the present usage of the gate's limits.

        Args:
            consumer: Its unacked messages count as the consumer's; empty for none.
        """
        with self._lock:
            return self._admission.usage(consumer)

    def stats(self) -> DispatchStats:
        """Return the numbers of the subscription and its cursor, all of one instant.

        Raises:
            CursorClosedError: The subscription is closed.

        Complexity: O(log ledgers + closed consumers), and counting the delayed messages: with a view of a shared index
        O(ledgers with delayed messages), else O(1).
        """
        with self._lock:
            self.cursor.check_open()
            # May take the lock of a delay index, which comes before that of the cursor.
            delayed_entries = self._messages.delayed.message_count
            with self.cursor.lock:
                oldest = self.cursor.view.lowest_unacked(1)
                return DispatchStats(
                    cursor=self.cursor.stats(),
                    unacked_messages=self._deliveries.unacked_messages,
                    replay_entries=len(self._messages.waiting),
                    delayed_entries=delayed_entries,
                    consumer_count=len(self._consumers.names),
                    sent_messages=self._deliveries.sent_messages,
                    redelivered_messages=self._deliveries.redelivered_messages,
                    dead_lettered_messages=self._messages.dead_lettered_messages,
                    rules=rule_stats(self._admission),
                    oldest_unacked=oldest[0] if oldest else None,
                )

    def consumer_uses(self) -> list[ConsumerUse]:
        """Return the unacked messages of each open consumer, in the order they came. Complexity: O(consumers)."""
        with self._lock:
            blocked = frozenset() if self._gate is None else frozenset(self._gate.closed_consumers)
            unacked_of = self._deliveries.unacked_of
            return [ConsumerUse(name, unacked_of(name), name in blocked) for name in self._consumers.names]

    def why_blocked(self, *, top: int = 3, now_ms: int | None = None) -> tuple[BlockReason, ...]:
        """Return the rules that keep new messages back, each with the acks that would open it; empty if none does.

        Args:
            top: How many holes and consumers to name for each rule.
            now_ms: The present.

        Raises:
            ValueError: `top` is negative.

        Complexity: O(holes) if a limit of the ack state is closed.
        """
        check_count("top", top, least=0)
        with self._lock:
            report = partial(self._report_hole, now_ms=present(now_ms, self._clock))
            is_delayed = self._messages.delayed.fills
            return explain_blocks(self._admission, report, is_delayed, consumers=self._consumers.names, top=top)

    def explain_holes(self, top: int = 10, *, now_ms: int | None = None) -> list[HoleReport]:
        """Explain the costliest ack holes: their entries, their causes, and the bytes and ranges they take.

        Args:
            top: How many at most: the one that holds back the mark-delete position, then the costliest first.
            now_ms: The present.

        Complexity: O(holes), and reading up to 64 messages of each that is returned.
        """
        check_count("top", top, least=0)
        with self._lock:
            now_ms = present(now_ms, self._clock)
            return [self._report_hole(hole, now_ms=now_ms) for hole in costliest(self.cursor.view.holes(), top)]

    def check_invariants(self) -> None:
        """Recount everything that is counted incrementally, and assert that it agrees. Complexity: O(state)."""
        with self._lock:
            self._deliveries._check()
            self._messages.waiting._check()
            self._consumers.permits._check()
            self.cursor._check()

    # Sending

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
                self._messages.give_back(self._deliveries.of(before), HoleReason.OWNER_GONE)
            self._messages.waiting.owners_changed()
            self._waiter.wake()

    def consumer_closed(self, consumer: str, *, now_ms: int | None = None) -> int:
        """Close a consumer, take back its unacked messages and its permits, and return how many messages those are.

        The messages of a batch count one by one. A consumer that is not open has none.
        """
        with self._lock:
            now_ms = self._at(now_ms)
            self._dispatcher.hole_turns.pop(consumer, None)
            self._consumers.close(consumer)
            orphaned = self._messages.give_back(self._deliveries.of(consumer), HoleReason.OWNER_GONE)
            self._messages.waiting.owners_changed()
            if self._gate is not None:
                self._gate.consumer_closed(consumer)
            self._admission.usage_decreased(now_ms=now_ms)
            self._waiter.wake()
            return orphaned

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

    def dispatch(self, consumer: str, max_messages: int, *, now_ms: int | None = None) -> list[Delivery]:
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
            CursorFencedError: A persist before a redelivery found that another owner has the cursor; nothing was sent.
        """
        if type(max_messages) is not int or max_messages < 0:  # without a call for a valid number
            check_count("max_messages", max_messages, least=0)
        with self._lock:
            now_ms = now_ms if type(now_ms) is int else present(now_ms, self._clock)
            self.cursor.check_open()
            self.log.sole_use.check()
            self._open_unknown(consumer)
            self._latest_ms = now_ms
            if self._consumers.is_single_active and self._consumers.active != consumer:
                return []
            try:
                batch = self._dispatcher.send_to(consumer, max_messages, now_ms=now_ms)
                if batch.deliveries:
                    self._report(batch, now_ms=now_ms)
            except BaseException:
                self._dispatcher.withdraw()
                raise
            finally:
                self._times_changed()
            if batch.deliveries:
                self._waiter.room_made()  # The reader can read further ahead for the others.
            return batch.deliveries

    def dispatch_all(self, *, now_ms: int | None = None, waiter: Callable[[], object] | None = None) -> DispatchRound:
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
            StoreError, CursorFencedError: As `dispatch`. No permits were taken, and an earlier waiter is waiting as
                before; this one is not.

        Complexity: O(consumers with permits + sent messages).
        """
        if waiter is not None and not callable(waiter):
            raise TypeError(f"waiter must be callable, got {waiter!r}")
        with self._lock:
            now_ms = present(now_ms, self._clock)
            self.cursor.check_open()
            self.log.sole_use.check()
            self._latest_ms = now_ms
            before = self._waiter.begin_round()
            try:
                sent = self._dispatcher.send_round(now_ms=now_ms)
                for batch in sent:
                    self._report(batch, now_ms=now_ms)
            except BaseException:
                self._dispatcher.withdraw()
                self._waiter.arm(before, messages=True, room=True)
                self._times_changed()
                raise
            next_wake_ms = self._dispatcher.arm(before if waiter is None else waiter, now_ms=now_ms)
            if waiter is None:
                self._times_changed()
            else:
                self._waiter.wake_ms = next_wake_ms
            return DispatchRound([(batch.consumer, batch.deliveries) for batch in sent], next_wake_ms)

    def when_open(self, waiter: Callable[[], object], consumer: str = "") -> None:
        """Call a waiter once, as soon as no rule keeps new messages from a consumer: at once if none does now.

        The call that opens the gate calls the waiter, in its thread and while the subscription is busy. It should
        signal another thread or task to dispatch; it must not dispatch itself.
        """
        if self._gate is None:
            waiter()
        else:
            self._gate.when_open(waiter, consumer)

    # Acks

    def ack(self, position: Position, *, now_ms: int | None = None) -> Receipt:
        """Ack one entry.

        Raises:
            AckRefusedError: The message was given back before, and its ack would exceed a limit: it will be sent again.
            As `ManagedCursor.ack`.
        """
        with self._lock:
            if type(position) is not Position:
                position = check_position(position)
            self._latest_ms = now_ms = now_ms if type(now_ms) is int else self._at(now_ms)
            sent = self._deliveries.get(position)
            if self._gate is None or (sent is not None and sent.is_covered):
                receipt = self.cursor.ack(position, now_ms=now_ms)
            else:
                with self._admission.room_for((position,), now_ms=now_ms):
                    receipt = self.cursor.ack(position, now_ms=now_ms)
            self._messages.acked(position, receipt.newly_acked, now_ms=now_ms)
            return receipt

    def ack_many(self, positions: Sequence[Position], *, now_ms: int | None = None) -> Receipt:
        """Ack a list of entries, in any order, repeated or not: all of them or, if one is refused, none.

        Raises:
            AckRefusedError: As `ack`, for all of them together.
            As `ManagedCursor.ack_many`.

        Complexity: O(entries), at a fraction of the time of an `ack` for each.
        """
        with self._lock:
            positions, now_ms = checked_positions(positions), self._at(now_ms)
            entries = bitmaps_of(positions)
            with self._admission.room_for(positions, now_ms=now_ms):
                receipt = self.cursor.ack_bitmaps(entries, now_ms=now_ms)
            self._messages.acked_all(positions, entries, receipt.newly_acked, now_ms=now_ms)
            return receipt

    def ack_batch(self, position: Position, unacked_words: Iterable[int], *, now_ms: int | None = None) -> Receipt:
        """Ack messages of an entry that is a batch; the last one acks the entry.

        Raises:
            AckRefusedError: As `ack`.
            As `ManagedCursor.ack_batch`.
        """
        with self._lock:
            position, words, now_ms = check_position(position), list(unacked_words), self._at(now_ms)
            is_last = self._messages.completes_batch(position, words)
            with self._admission.room_for((position,), now_ms=now_ms) if is_last else nullcontext():
                receipt = self.cursor.ack_batch(position, words, now_ms=now_ms)
            if self.cursor.is_acked(position):
                self._messages.acked(position, receipt.newly_acked, now_ms=now_ms)
            else:
                self._messages.acked_in_batch(position, now_ms=now_ms)
            return receipt

    def ack_cumulative(
        self, position: Position, *, now_ms: int | None = None, properties: Mapping[str, int] | None = None
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

    def skip(self, count: int, *, now_ms: int | None = None) -> Receipt:
        """Ack the next `count` entries after the mark-delete position, in flight or not.

        Raises:
            As `ManagedCursor.skip`.
        """
        with self._lock:
            now_ms = self._at(now_ms)
            receipt = self.cursor.skip(count, now_ms=now_ms)
            return self._acked_up_to_mark_delete(receipt, now_ms=now_ms)

    def clear_backlog(self, *, now_ms: int | None = None) -> Receipt:
        """Ack all messages of the log, delayed ones too.

        Raises:
            As `ManagedCursor.clear_backlog`.
        """
        with self._lock:
            now_ms = self._at(now_ms)
            receipt = self.cursor.clear_backlog(now_ms=now_ms)
            self._messages.delayed.forget()
            return self._acked_up_to_mark_delete(receipt, now_ms=now_ms)

    # Redelivery

    def nack(self, position: Position, *, delay_ms: int | None = None, now_ms: int | None = None) -> bool:
        """Give a delivered message back, to be delivered again; no-op if it is not in flight.

        Exclusive and Failover keep the order: the messages sent after it are given back as well, and nothing passes it.

        Args:
            position: The message.
            delay_ms: How long it is not sent again; None for as long as the `RetryPolicy` says, if there is one.
                Meanwhile no consumer has it, and with Key_Shared later messages of its key wait with it.
            now_ms: The present.

        Returns:
            Whether it was in flight.

        Raises:
            TypeError: A number is not an integer.
            ValueError: The delay is negative, or an id is out of range.
        """
        return self.nack_many([position], delay_ms=delay_ms, now_ms=now_ms) > 0

    def nack_many(
        self, positions: Iterable[Position], *, delay_ms: int | None = None, now_ms: int | None = None
    ) -> int:
        """Give delivered messages back, as `nack` each; those that are not in flight are ignored.

        Returns:
            How many were in flight, the messages of a batch one by one.

        Raises:
            As `nack`; nothing was given back.
        """
        positions = checked_positions(positions)
        if delay_ms is not None:
            check_count("delay_ms", delay_ms, least=0)
        with self._lock:
            now_ms = self._at(now_ms)
            self._messages.waiting.follow_clock(now_ms=now_ms)
            deliveries = self._deliveries
            if self._consumers.is_single_active:
                lowest = min((position for position in positions if position in deliveries), default=None)
                sent = None if lowest is None else deliveries.get(lowest)
                positions = [] if lowest is None else list(deliveries.in_order().at_least(lowest))
                if sent is not None and delay_ms is None:  # All that follow wait for the lowest.
                    delay_ms = self._dispatcher.retry_ms(sent.delivery_count)

            def until_ms(delivery_count: int) -> int:
                wait_ms = self._dispatcher.retry_ms(delivery_count) if delay_ms is None else delay_ms
                return now_ms + wait_ms if wait_ms else 0

            return self._nacked(positions, until_ms=until_ms, now_ms=now_ms)

    def redeliver_all(self, consumer: str, *, now_ms: int | None = None) -> int:
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
            return self._nacked(self._deliveries.of(consumer), until_ms=lambda _: 0, now_ms=now_ms)

    def seek(self, position: Position | Start | StartTime | str, *, now_ms: int | None = None) -> PersistResult:
        """Restart at a position, an end of the log, or a time: from there on, nothing is acked or in flight any more.

        An end may be given by its name, ``"earliest"`` or ``"latest"``.

        The properties of the cursor stay, those of its mark-delete do not; see `ManagedCursor.reset`.

        Raises:
            As `start_position` and `ManagedCursor.reset`: acks and messages in flight are as before then.
        """
        with self._lock:
            now_ms = self._at(now_ms)
            result = self.cursor.reset(start_position(self.log, checked_start("position", position)), now_ms=now_ms)
            self._messages.clear()
            self._dispatcher.begun.clear()
            self._admission.persisted(None, now_ms=now_ms)
            self._waiter.wake()
            return result

    def close(self, *, now_ms: int | None = None) -> PersistResult | None:
        """Persist everything, close the cursor and the delay tracker, and call all waiters; closing twice does nothing.

        Raises:
            As `ManagedCursor.close`; the subscription stays open then.
        """
        with self._lock:
            now_ms = present(now_ms, self._clock)
            self._count_in_flight()
            result = self.cursor.close(now_ms=now_ms)
            self.cursor.remove_listener(self._listener)
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
            self._admission.observe(now_ms=self._at(now_ms))

    # For the package and the asyncio face

    def _has_had(self, position: Position, name: str) -> str:
        """Return in words how a message has reached the subscription of a name, or was acked; empty if it has not."""
        with self._lock:
            sent, waiting = self._deliveries.get(position), self._messages.waiting.get(position)
            if self.cursor.is_acked(position):
                return f"was acked by subscription {name!r}"
            if sent is not None:
                return f"was handed out to consumer {sent.consumer!r} of subscription {name!r}"
            counted = position in self.cursor.view.delivery_counts or (waiting is not None and waiting.delivery_count)
            return f"was handed out to subscription {name!r}" if counted else ""

    def _rescheduled(self, position: Position, *, now_ms: int) -> None:
        """Note that a message has another time, or was cancelled: then it is acked, now or where it would be sent."""
        with self._lock:
            self._messages.reader.forget((position,))
            if position in (self.log.cancelled or ()):
                self._messages.drop(position, now_ms=now_ms)
            self._times_changed()

    def _count_in_flight(self) -> None:
        """Count the messages in flight as sent, as the cursor is about to be closed."""
        with self._lock:
            self.cursor.count_deliveries(self._deliveries.counts())

    def _take_back_round(self) -> None:
        """Undo the last `dispatch_all`, whose messages no consumer received; no other call may have come since."""
        with self._lock:
            self._dispatcher.withdraw()

    def _hand_over_by(self, begin: Callable[[Delivery], object]) -> DeadLetterPolicy | None:
        """From now on only begin to hand a dead letter over, with locks held; return the policy, None without one."""
        # Whoever is called calls `_hand_over_ended` or `_hand_over_failed` later.

        def hand_over(delivery: Delivery, _: int) -> bool:
            begin(delivery)
            return False

        with self._lock:
            self._dispatcher.hand_over = hand_over
            return self._dispatcher.dead_letters

    def _hand_over_ended(self, delivery: Delivery) -> None:
        """Ack a dead letter that was handed over, unless a seek came since."""
        # `AckRefusedError`: the ack would exceed a limit, and the dead letter will be handed over once more.
        with self._lock:
            if self._dispatcher.begun.get(delivery.position) is delivery:
                del self._dispatcher.begun[delivery.position]
                self._dispatcher.handed_over(delivery, now_ms=self._at(None))

    def _hand_over_failed(self, delivery: Delivery) -> None:
        """Let a dead letter be handed over again; no-op if that has ended, or a seek came since."""
        with self._lock:
            if self._dispatcher.begun.get(delivery.position) is delivery:
                del self._dispatcher.begun[delivery.position]

    def _acked_up_to_mark_delete(self, receipt: Receipt, *, now_ms: int) -> Receipt:
        self._messages.acked_up_to(self.cursor.mark_delete_position, receipt.newly_acked, now_ms=now_ms)
        return receipt

    def _nacked(self, positions: Sequence[Position], *, until_ms: Callable[[int], int], now_ms: int) -> int:
        returned_count = self._messages.give_back(positions, HoleReason.NACKED, until_ms=until_ms)
        self._admission.usage_decreased(now_ms=now_ms)
        self._times_changed()
        return returned_count

    def _open_unknown(self, consumer: str) -> None:
        """Open a consumer that is not open, unless it was closed."""
        if not isinstance(consumer, str) or consumer not in self._consumers:
            self._consumers.check_not_closed(consumer)
            self.consumer_opened(consumer)

    def _report_hole(self, hole: AckHole, *, now_ms: int) -> HoleReport:
        return live_report(
            hole, self.log, partial(self._messages.look, now_ms=now_ms), now_ms=now_ms,
            deliveries_max=self._dispatcher.deliveries_max, store_error=self._admission.store_error,
        )  # fmt: skip

    def _report(self, batch: Batch, *, now_ms: int) -> None:
        """Report the messages of a consumer, at least one, to the cursor."""
        if batch.counts:
            self.cursor.count_deliveries(batch.counts)
        positions = [delivery.position for delivery in batch.deliveries]
        self.cursor.delivered(max(positions), consumer=batch.consumer, positions=positions, now_ms=now_ms)

    def _times_changed(self) -> None:
        """Call the waiter if the time of a message comes before it will dispatch anyway."""
        if self._waiter.wants_messages:
            self._waiter.time_comes(self._dispatcher.next_wake_ms(now_ms=self._latest_ms))

    def _at(self, now_ms: int | None) -> int:
        """Return the time that a call gave, or that of the clock, and remember it as the latest."""
        self._latest_ms = now_ms if type(now_ms) is int else present(now_ms, self._clock)
        return self._latest_ms


@final
class SubscriptionListener(CursorListener):
    """Reports the outcome of each persist to a subscription, and its room to the cursor."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def persisted(self, outcome: PersistResult | AckStateError) -> None:
        """Note the outcome of a persist: the gate may open, or the store is the reason why it does not."""
        subscription = self._subscription
        with subscription._lock:
            admission = subscription._admission
            if isinstance(outcome, AckStateError):
                error: AckStateError | None = outcome
            else:  # A persist that had nothing to write shows nothing about the store.
                subscription._messages.delayed.mark_delete_persisted(outcome.mark_delete)
                error = admission.store_error if outcome.route is PersistTarget.NOTHING else None
            admission.persisted(error, now_ms=subscription._latest_ms)

    def record_bytes_max(self) -> int | None:
        return self._subscription._admission.record_bytes_max()
