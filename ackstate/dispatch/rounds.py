"""Rounds of dispatches: to all consumers with permits, each in its turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.dispatch.consumers import ANYONE
from ackstate.dispatch.delivery import Batch
from ackstate.dispatch.limit_usage import ACK_STATE_RULES
from ackstate.limits.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.dispatch.admission import Admission
    from ackstate.dispatch.consumers import Consumers
    from ackstate.dispatch.dispatcher import Dispatcher
    from ackstate.dispatch.options import SubscriptionOptions
    from ackstate.dispatch.round_waiter import RoundWaiter
    from ackstate.dispatch.unacked_messages import UnackedMessages
    from ackstate.limits.gate import DispatchGate
    from ackstate.message import Message
    from ackstate.position import Position

_READ_COUNT_MIN = 100


@final
class Rounds:
    """Sends to all consumers with permits, and finds out when another round can send more.

    Shared sends to the consumers of the lowest priority number until they have no permits or are at their own limits,
    then to the next ones. Within a priority each receives a few entries in its turn, and the turns continue where the
    last round ended. Key_Shared divides the messages that are read among the owners of the keys, and queues only those
    whose owner can receive nothing. Exclusive and Failover send to the active consumer.

    Args:
        dispatcher: Chooses the messages.
        cursor: The ack state.
        messages: The unacked messages.
        admission: Decides which messages may be sent.
        consumers: The open consumers, and their permits.
        options: The sizes of a turn and of a round, and how far to read ahead.
        waiter: Armed after each round.

    Source: ``PersistentDispatcherMultipleConsumers.trySendMessagesToConsumers`` of Apache Pulsar.
    """

    def __init__(  # noqa: PLR0913 - its parts
        self,
        dispatcher: Dispatcher,
        cursor: ManagedCursor,
        messages: UnackedMessages,
        *,
        admission: Admission,
        consumers: Consumers,
        options: SubscriptionOptions,
        waiter: RoundWaiter,
    ) -> None:
        self._dispatcher = dispatcher
        self._sender = dispatcher.sender
        self._cursor = cursor
        self._messages, self._waiting = messages, messages.waiting
        self._admission = admission
        self._gate: DispatchGate | None = admission.gate
        self._consumers, self._permits = consumers, consumers.permits
        self._kind, self._needs_keys = consumers.kind, consumers.needs_keys
        self._turn, self._round_max = options.turn_entries, options.round_entries_max
        self._look_ahead_max = options.look_ahead_max
        self._waiter = waiter
        self._gate_waiter: Callable[[], object] = waiter.wake  # one object, so that the gate can forget it
        self._is_at_gate = False
        self._begin()

    def _begin(self) -> None:
        self._batches: dict[str, Batch] = {}
        self._permits_before: dict[str, int] = {}
        self._left = self._round_max
        # The consumers that are at their own limit, and whether a rule for all refused a message.
        self._refused: set[str] = set()
        self._is_refused = self._is_held_up = False
        self._may_send_more = False

    def send(self, *, now_ms: int) -> list[Batch]:
        """Send to the consumers with permits, and return the requests of those that receive messages.

        Raises:
            StoreError: The log could not be read. `withdraw` takes back the messages sent before.
        """
        self._begin()
        if self._gate is not None and self._is_at_gate:
            self._gate.forget_waiter(self._gate_waiter)
            self._is_at_gate = False
        self._admission.begin_round()
        before = self._sender.handed_over_count
        if self._kind.is_single_active:
            self._send_to_active(now_ms)
        elif self._permits.total > 0:
            self._send_to_all(now_ms)
        # A dead letter may have been the last one that kept its key with a consumer.
        self._may_send_more |= self._left <= 0 or self._sender.handed_over_count > before
        return [batch for batch in self._batches.values() if batch.deliveries]

    def withdraw(self) -> None:
        """Take back everything that the last round sent, and return the permits."""
        for name, batch in self._batches.items():
            self._messages.withdraw(batch)
            self._permits.add(name, self._permits_before[name] - self._permits.of(name))

    def arm(self, waiter: Callable[[], object] | None, *, now_ms: int) -> int | None:
        """Arm a waiter for every event after which another round may send more; return when the next message is due."""
        has_permits = self._has_permits()
        counts_room = self._counts_room()
        if Rule.BROKER_UNACKED_MESSAGES in self._admission.refusals:
            # A redelivery that is refused closes no rule, and the acks of other subscriptions would not wake this one.
            assert self._gate is not None
            usage = self._admission.usage
            self._gate.observe(usage.of(), next_record_bytes=usage.next_cost, now_ms=now_ms)
        self._waiter.arm(waiter, messages=has_permits, room=has_permits and counts_room)
        if not has_permits:
            return None
        if self._may_send_more:
            self._waiter.wake()
        elif waiter is not None and (self._is_refused or self._refused or counts_room):
            self._wait_at_gate(counts_room=counts_room)
        return self._dispatcher.next_wake_ms(now_ms=now_ms)

    def _counts_room(self) -> bool:
        """Return whether another round may send more after each decrease of a usage, not only after a rule opened.

        It may if this round held back a message that a closed rule would admit.
        """
        return (
            self._dispatcher.binds or self._is_held_up or self._admission.has_refused_again
            or not self._admission.refusals.isdisjoint(ACK_STATE_RULES)
        )  # fmt: skip

    def _wait_at_gate(self, *, counts_room: bool) -> None:
        """Wait for the rules that refused messages to open."""
        gate = self._gate
        if gate is None:
            return
        names = [""] if gate.is_closed_for("") else [name for name in self._refused if gate.is_closed_for(name)]
        for name in names:
            self._is_at_gate = True
            gate.when_open(self._gate_waiter, name)
        if not names and not counts_room:
            self._waiter.wake()  # It opened since: another thread acked messages of another subscription.

    def _has_permits(self) -> bool:
        if self._kind.is_single_active:
            active = self._consumers.active
            return active is not None and self._permits.of(active) > 0
        return self._permits.total > 0

    def _send_to_active(self, now_ms: int) -> None:
        active = self._consumers.active
        if active is not None and self._permits.of(active) > 0:
            batch = self._batch(active, now_ms)
            batch.begin_turn(self._left)
            self._dispatcher.dispatch(batch)
            # Until the time of the queued messages has come, or they are acked.
            self._is_held_up = self._dispatcher.holds_order()
            self._end_turn(batch)

    def _send_to_all(self, now_ms: int) -> None:
        """Send as `Dispatcher.dispatch` does to one: queued messages, then unread ones, or those that fill holes."""
        dispatcher, delayed = self._dispatcher, self._messages.delayed
        did_bind = dispatcher.binds
        if self._needs_keys:
            for name in self._permits.in_turn():
                self._batch(name, now_ms).begin_turn(self._left)
        dispatcher.begin(now_ms=now_ms)
        due_count = dispatcher.queue_due(self._missing(), now_ms=now_ms)
        if not dispatcher.admits_new(now_ms=now_ms):
            self._fill_holes(now_ms)
        else:
            send_unread = self._send_unread_by_key if self._needs_keys else self._send_unread
            if self._send_waiting(now_ms):
                send_unread(now_ms)
            if self._is_refused and self._admission.refused_by in ACK_STATE_RULES:
                self._fill_holes(now_ms)
        if due_count or (dispatcher.binds and not did_bind):
            self._may_send_more |= min(delayed.next_due_ms, default=now_ms + 1) <= now_ms

    def _missing(self) -> int:
        """Return how many due messages to queue."""
        if self._needs_keys:
            missing = sum(self._dispatcher.missing(name, batch.room) for name, batch in self._batches.items())
        else:
            missing = self._dispatcher.missing(ANYONE, self._room())
        return max(missing, _READ_COUNT_MIN) if missing else 0  # Some may be for others, or find no room.

    def _room(self) -> int:
        """Return how many entries the consumers take together at most, without those that are at their own limits."""
        refused = sum(max(0, self._permits.of(name)) for name in self._refused)
        return max(0, min(self._left, self._permits.total - refused))

    def _batch(self, name: str, now_ms: int) -> Batch:
        batch = self._batches.get(name)
        if batch is None:
            permits = self._permits_before[name] = self._permits.of(name)
            batch = self._batches[name] = Batch(name, 0, now_ms, permits=permits)
        return batch

    def _turns(self, now_ms: int, *, count: int = 0) -> Iterator[Batch]:
        """Yield the consumers that may receive messages, each with a turn; to be followed by `_end_turn`."""
        if self._needs_keys:
            for batch in self._batches.values():
                if batch.consumer not in self._refused and batch.permits > 0 and self._left > 0:
                    batch.begin_turn(self._left)
                    yield batch
            return
        while self._left > 0 and (name := self._permits.first(besides=self._refused)) is not None:
            batch = self._batch(name, now_ms)
            share = -(-count // self._permits.peer_count(name))
            batch.begin_turn(min(max(self._turn, share), self._left))
            yield batch

    def _end_turn(self, batch: Batch) -> None:
        """Take the permits of the sent messages; a consumer that received some goes to the end of its line."""
        name = batch.consumer
        taken = self._permits.of(name) - batch.permits
        if taken:
            self._left -= batch.turn_count
            self._permits.add(name, -taken)
            self._permits.turn_over(name)

    def _refuse(self, batch: Batch) -> bool:
        """Note that a message was refused; return whether other consumers may still receive it."""
        if self._admission.refused_by is Rule.CONSUMER_UNACKED_MESSAGES:
            self._refused.add(batch.consumer)
            return True
        self._is_refused = True
        return False

    def _send_waiting(self, now_ms: int) -> bool:
        """Send queued messages, the lowest first; return False if a rule for all consumers refused one."""
        for batch in self._turns(now_ms):
            if self._needs_keys and not self._waiting.ready_for(batch.consumer):
                continue
            is_sent = self._dispatcher.send_waiting(batch)
            has_room = batch.room > 0
            self._end_turn(batch)
            if not is_sent:
                if not self._refuse(batch):
                    return False
            elif has_room and not self._needs_keys:
                return True
        return True

    def _send_unread(self, now_ms: int) -> None:
        """Read messages for all consumers, and send them in turns."""
        sender = self._sender
        while room := self._room():
            before, sent_count = self._cursor.read_position, 0
            read = self._dispatcher.read_unread(room, now_ms=now_ms)
            try:
                for batch in self._turns(now_ms, count=len(read)) if read else ():
                    count = sender.send_new(read[sent_count : sent_count + batch.room], batch)
                    sent_count += count
                    is_refused = batch.room > 0 and sent_count < len(read)
                    self._end_turn(batch)
                    if sent_count == len(read) or (is_refused and not self._refuse(batch)):
                        break
            finally:
                self._dispatcher.put_back(read[sent_count:])
            if sent_count < len(read) or self._cursor.read_position == before:
                return

    def _send_unread_by_key(self, now_ms: int) -> None:
        """Read messages for all consumers, and divide them; those whose owner can receive nothing are queued."""
        while (room := self._room()) and (space := self._look_ahead_max - len(self._waiting)) > 0:
            before = self._cursor.read_position
            read = self._dispatcher.read_unread(min(max(room, _READ_COUNT_MIN), space), now_ms=now_ms)
            shares, unsent = self._divided(read)
            try:
                for name, share in shares.items():
                    batch = self._batches[name]
                    batch.begin_turn(len(share))
                    count = self._sender.send_new(share, batch)
                    self._end_turn(batch)
                    del share[:count]
                    if share and not self._refuse(batch):
                        break
            finally:
                for share in shares.values():
                    unsent += share
                self._dispatcher.queue(unsent)
            if self._is_refused or self._cursor.read_position == before:
                return
        self._is_held_up = room > 0 and self._cursor.reader.has_unread

    def _divided(
        self, read: Sequence[tuple[Position, Message]]
    ) -> tuple[dict[str, list[tuple[Position, Message]]], list[tuple[Position, Message]]]:
        """Return the messages that each consumer receives now, and those that are queued."""
        shares: dict[str, list[tuple[Position, Message]]] = {
            name: [] for name, batch in self._batches.items() if batch.permits > 0 and name not in self._refused
        }
        permits = {name: self._batches[name].permits for name in shares}
        others: list[tuple[Position, Message]] = []
        waiting_keys, unacked_in = self._waiting.keys, self._messages.unacked_in
        keys = self._consumers.sticky_keys(read)
        for each, key, owner in zip(read, keys, self._consumers.owners(keys), strict=True):
            # The messages of a key are sent in order.
            if permits.get(owner, 0) > 0 and key not in waiting_keys:
                permits[owner] -= 1 if each[1].message_count == 1 else unacked_in(*each)
                shares[owner].append(each)
            else:
                others.append(each)
        return shares, others

    def _fill_holes(self, now_ms: int) -> None:
        """Send messages that fill holes, while a limit of the ack state keeps new ones back."""
        has_sent = False
        for batch in self._turns(now_ms):
            refusals, self._admission.refusals = self._admission.refusals, set()
            self._dispatcher.fill_holes(batch)
            is_full = not batch.room
            has_sent |= batch.turn_count > 0
            self._end_turn(batch)
            is_at_limit = Rule.CONSUMER_UNACKED_MESSAGES in self._admission.refusals
            self._admission.refusals |= refusals
            if is_at_limit:
                self._refused.add(batch.consumer)
            elif not is_full and not self._needs_keys:
                break
        # The messages just sent may have stopped the search for others.
        self._may_send_more |= has_sent
