"""Chooses the messages that consumers receive next, and sends them: one loop for all types of subscriptions."""

from __future__ import annotations

from inspect import isawaitable, iscoroutine
from itertools import islice, repeat
from typing import TYPE_CHECKING, final

from ackstate.dispatch.admission import ACK_STATE_RULES, AckRefusedError, Sent
from ackstate.dispatch.consumers import ANYONE
from ackstate.dispatch.explain import HoleReason
from ackstate.dispatch.messages import Waiting
from ackstate.dispatch.options import Delivery
from ackstate.limits import Rule
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from ackstate.stores.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ackstate.dispatch.admission import Admission
    from ackstate.dispatch.consumers import Consumers
    from ackstate.dispatch.messages import UnackedMessages
    from ackstate.dispatch.options import SubscriptionOptions
    from ackstate.message import Message
    from ackstate.position_set import PositionSet

    Read = Sequence[tuple[Position, Message]]

_UNLIMITED = 2**63
_READ_COUNT_MIN = 100
_READ_AHEAD_COUNT = 1_000
# A dispatch that sent something stops after this many holes of which nothing could be sent; the next continues there.
_REFUSED_HOLES_MAX = 256
_RETRY_MS = 1_000
_LOWEST, _END = Position(0, 0), Position(LEDGER_ID_MAX, ENTRY_ID_MAX + 1)


@final
class Batch:
    """The messages that one consumer receives in a round."""

    __slots__ = ("_begin", "_end", "consumer", "counts", "deliveries", "owner", "permits", "permits_before")

    def __init__(self, consumer: str, permits: int, *, owner: str) -> None:
        self.consumer, self.owner = consumer, owner  # the consumer, and the owner of the messages that it may receive
        # How many more messages it may receive: below 0 after a batch of more messages than it had permits.
        self.permits = self.permits_before = permits
        self.deliveries: list[Delivery] = []
        self.counts: dict[Position, tuple[int, int]] = {}  # how often each was sent that is sent again
        self._begin = self._end = 0

    @property
    def room(self) -> int:
        """How many more entries it takes at most in this turn."""
        return max(0, min(self._end - len(self.deliveries), self.permits))

    @property
    def turn_count(self) -> int:
        """Number of entries that it has received since the last `begin_turn`."""
        return len(self.deliveries) - self._begin

    def begin_turn(self, count: int) -> None:
        """Begin another turn, in which it takes this many more entries at most."""
        self._begin = len(self.deliveries)
        self._end = self._begin + count

    def fitting(self, message_counts: Sequence[int]) -> int:
        """Return how many of the first entries it takes, given the numbers of their messages."""
        room = min(len(message_counts), self.room)
        if sum(message_counts[:room]) == room:
            return room
        left = self.permits
        for count, messages in enumerate(message_counts[:room]):
            if left <= 0:
                return count
            left -= messages
        return room


@final
class Dispatcher:
    """Sends queued messages, the lowest first, then never read ones, to consumers in their turns."""

    # The type of the subscription decides whose turn it is (`_turns`). Shared: the consumers of the lowest priority
    # number, a few entries each, until they have no permits or are at their own limits, then the next ones; the turns
    # continue where the last round ended. Key_Shared: the owner of each message's key; the messages that are read are
    # divided among the owners, and those whose owner can receive nothing are queued. Exclusive and Failover: the active
    # consumer. A dispatch to one consumer by its name is a round in which only that one has a turn.
    # While a limit of the ack state keeps new messages back, messages that fill holes are still sent, the lowest hole
    # first: queued messages, and unread ones below the highest acked. The next round continues above the last of them,
    # and from the lowest again after the highest: a message that nobody can ack does not starve the others.
    # Source: ``PersistentDispatcherMultipleConsumers.trySendMessagesToConsumers`` of Apache Pulsar.

    def __init__(
        self, messages: UnackedMessages, *, admission: Admission, consumers: Consumers, options: SubscriptionOptions
    ) -> None:
        self._cursor = admission.cursor
        self._messages = messages
        self._waiting, self._delayed, self._reader = messages.waiting, messages.delayed, messages.reader
        self._admission, self._gate, self._waiter = admission, admission.gate, admission.waiter
        self._consumers, self._permits = consumers, consumers.permits
        self._needs_keys = consumers.needs_keys
        self._turn, self._round_max = options.turn_entries, options.round_entries_max
        self._look_ahead_max = options.look_ahead_max
        self.binds = False  # whether a limit of the ack state kept new messages back the last time
        self.dead_letters, self.retries, self.deliveries_max = (
            options.dead_letters, options.retries, options.deliveries_max
        )  # fmt: skip
        self._log = messages.log
        self._has_met_counted = False  # whether a message that was sent before the last restart was queued
        # Hands a dead letter over, given the present, and returns whether that is done. If not, it is in `begun` until
        # whoever hands it over removes it.
        self.hand_over: Callable[[Delivery, int], bool] = self._call_hand_over
        self.begun: dict[Position, Delivery] = {}
        self.hole_turns: dict[str, Position] = {}  # by owner: where to continue filling holes
        self._gate_waiter: Callable[[], object] = self._waiter.wake  # one object, so that the gate can forget it
        self._is_at_gate = False
        self._begin(0, now_ms=0)

    def _begin(self, left: int, *, only: str | None = None, now_ms: int) -> None:
        self._now_ms = now_ms
        self._batches: dict[str, Batch] = {}
        self._only, self._left = only, left  # the consumer that alone has turns, and how many more entries are sent
        self._takes_permits = True
        # The consumers that are at their own limit, and whether a rule for all refused a message.
        self._refused: set[str] = set()
        self._is_refused = self._is_held_up = self._may_send_more = False
        self._has_persisted: bool | None = None  # whether the counts were made durable in this round; None: not tried
        self._admission.refusals.clear()
        self._admission.has_refused_again = False

    # Rounds

    def send_to(self, consumer: str, max_entries: int, *, now_ms: int) -> Batch:
        """Send to one consumer, whatever its permits."""
        self._begin(max_entries, only=consumer, now_ms=now_ms)
        self._takes_permits = False
        batch = self._batch(consumer)
        self._send()
        return batch

    def send_round(self, *, now_ms: int) -> list[Batch]:
        """Send to the consumers with permits, and return the batches of those that receive messages."""
        self._begin(self._round_max, only=self._consumers.active, now_ms=now_ms)
        if self._gate is not None and self._is_at_gate:
            self._gate.forget_waiter(self._gate_waiter)
            self._is_at_gate = False
        if self._has_permits():
            names = [self._only] if self._only is not None else self._permits.in_turn() if self._needs_keys else []
            for name in names:
                self._batch(name)
            self._send()
            if self._only is not None:  # until the time of the queued messages has come, or they are acked
                self._is_held_up = self._holds_order()
        self._may_send_more |= self._left <= 0
        return [batch for batch in self._batches.values() if batch.deliveries]

    def withdraw(self) -> None:
        """Take back everything that the last round sent, and return the permits."""
        for name, batch in self._batches.items():
            self._messages.withdraw(batch.deliveries)
            if self._takes_permits:
                self._permits.add(name, batch.permits_before - self._permits.of(name))

    def arm(self, waiter: Callable[[], object] | None, *, now_ms: int) -> int | None:
        """Arm a waiter for every event after which another round may send more; return when the next message is due."""
        has_permits = self._has_permits()
        # Whether another round may send more after each decrease of a usage, not only after a rule opened: it may if
        # this round held back a message that a closed rule would admit.
        counts_room = (
            self.binds or self._is_held_up or self._admission.has_refused_again
            or not self._admission.refusals.isdisjoint(ACK_STATE_RULES)
        )  # fmt: skip
        if Rule.BROKER_UNACKED_MESSAGES in self._admission.refusals:
            # A redelivery that is refused closes no rule, and the acks of other subscriptions would not wake this one.
            self._admission.show_usage(now_ms=now_ms)
        self._waiter.arm(waiter, messages=has_permits, room=has_permits and counts_room)
        if not has_permits:
            return None
        if self._may_send_more:
            self._waiter.wake()
        elif waiter is not None and (self._is_refused or self._refused or counts_room):
            self._wait_at_gate(counts_room=counts_room)
        return self.next_wake_ms(now_ms=now_ms)

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
        if self._consumers.is_single_active:
            active = self._consumers.active
            return active is not None and self._permits.of(active) > 0
        return self._permits.total > 0

    def next_wake_ms(self, *, now_ms: int) -> int | None:
        """Return when to dispatch again because some time will have come; None if no message waits for a time."""
        times = [self._waiting.next_until_ms, self._admission.promote_again_ms]
        # A due message that a limit keeps back waits for that limit, not for a time.
        is_refused = self._admission.refused_by is not None
        times += [time for time in self._delayed.next_due_ms if not is_refused or time > now_ms]
        return min((time for time in times if time is not None), default=None)

    def _send(self) -> None:
        """Send queued messages, then unread ones; and those that fill holes, if a limit of the ack state binds."""
        did_bind, now_ms = self.binds, self._now_ms
        self._messages.notice_acks_elsewhere()
        self._waiting.release(now_ms=now_ms)
        due_count = self._queue_due()
        if not self._admission.admits_new(self._only or "", now_ms=now_ms):
            self._fill_holes()
        else:
            self.binds = False
            self._admission.refused_by = None
            passes_left = 1
            while passes_left:
                self._has_met_counted = False
                if self._send_waiting() and not self._holds_order():
                    (self._send_unread_by_key if self._needs_keys else self._send_unread)()
                # Then the queued one is sent or, if it waits, those of its key before it: they are queued by the next.
                passes_left = 2 if self._has_met_counted else passes_left - 1
            if self._needs_keys and self._cursor.view.delivery_counts and not self._is_refused:
                self._may_send_more |= any(
                    each.permits > 0 and each.consumer not in self._refused and self._waiting.ready_for(each.consumer)
                    for each in self._batches.values()
                )
            if self._is_refused and self._admission.refused_by in ACK_STATE_RULES:
                self._fill_holes()
        if self._takes_permits and (due_count or (self.binds and not did_bind)):
            self._may_send_more |= min(self._delayed.next_due_ms, default=now_ms + 1) <= now_ms

    def _holds_order(self) -> bool:
        """Return whether queued messages must go before unread ones, though their time has not come."""
        return self._consumers.is_single_active and len(self._waiting) > 0

    def _queue_due(self) -> int:
        """Queue messages that are due now, about as many as the consumers take, and return how many."""
        if self._needs_keys:
            missing = sum(self._missing(each.owner, min(self._left, each.permits)) for each in self._batches.values())
        else:
            missing = self._missing(ANYONE, self._room())
        if missing and self._only is None:
            missing = max(missing, _READ_COUNT_MIN)  # Some may be for others, or find no room.
        due = self._delayed.take_due(missing, now_ms=self._now_ms)
        keys: Iterable[tuple[Position, bytes | None]] = zip(due, repeat(None))
        if self._needs_keys:
            read = self._reader.read(due, now_ms=self._now_ms)
            self._reader.keep(read)
            keys = [(position, self._consumers.sticky_key(position, message.key)) for position, message in read]
        for position, key in keys:
            self._messages.put(position, Waiting(HoleReason.DELAYED, key=key))
        self._delayed.queued()
        return len(due)

    def _missing(self, owner: str, room: int) -> int:
        """Return how many of `room` messages for an owner are not queued."""
        if self.binds:  # The queued messages may have to wait, and a due message may fill a hole.
            return room
        return max(0, room - len(self._waiting.ready_for(owner)))

    # Whose turn it is

    def _room(self) -> int:
        """Return how many entries the consumers take together at most, without those that are at their own limits."""
        if self._only is not None:
            permits = 0 if self._only in self._refused else self._batches[self._only].permits
        else:
            permits = self._permits.total - sum(max(0, self._permits.of(name)) for name in self._refused)
        return max(0, min(self._left, permits))

    def _batch(self, name: str) -> Batch:
        batch = self._batches.get(name)
        if batch is None:
            permits = self._permits.of(name) if self._takes_permits else _UNLIMITED
            batch = self._batches[name] = Batch(name, permits, owner=name if self._needs_keys else ANYONE)
        return batch

    def _turns(self, *, count: int = 0) -> Iterator[Batch]:
        """Yield the consumers that may receive messages, each with a turn; to be followed by `_end_turn`."""
        if self._needs_keys or self._only is not None:
            for batch in self._batches.values():
                if batch.consumer not in self._refused and batch.permits > 0 and self._left > 0:
                    batch.begin_turn(self._left)
                    yield batch
            return
        while self._left > 0 and (name := self._permits.first(besides=self._refused)) is not None:
            batch = self._batch(name)
            share = -(-count // self._permits.peer_count(name))
            batch.begin_turn(min(max(self._turn, share), self._left))
            yield batch

    def _end_turn(self, batch: Batch) -> None:
        """Take the permits of the sent messages; a consumer that received some goes to the end of its line."""
        self._left -= batch.turn_count
        taken = self._permits.of(batch.consumer) - batch.permits if self._takes_permits else 0
        if taken:
            self._permits.add(batch.consumer, -taken)
            self._permits.turn_over(batch.consumer)

    def _refuse(self, batch: Batch) -> bool:
        """Note that a message was refused; return whether other consumers may still receive it."""
        if self._admission.refused_by is Rule.CONSUMER_UNACKED_MESSAGES:
            self._refused.add(batch.consumer)
            return True
        self._is_refused = True
        return False

    # Queued messages

    def _send_waiting(self) -> bool:
        """Send queued messages, the lowest first; return False if a rule for all consumers refused one."""
        for batch in self._turns() if self._waiting.ready else ():
            if self._needs_keys and not self._waiting.ready_for(batch.consumer):
                continue
            is_sent = self._send_waiting_to(batch)
            has_room = batch.room > 0
            self._end_turn(batch)
            if not is_sent:
                if not self._refuse(batch):
                    return False
            elif has_room and not self._needs_keys:
                return True
        return True

    def _send_waiting_to(self, batch: Batch) -> bool:
        """Send queued messages to a consumer; return whether none of them was refused."""
        while positions := self._lowest_waiting(batch):
            read, at = self._reader.read(positions, now_ms=self._now_ms), 0
            while at < len(read) and batch.room:
                count = self._send_unsent(read, batch, at=at)
                # The receiver of dead letters may have acked others, and those of a key wait with the first of them.
                if not count and (read[at][0] not in self._waiting.ready or self._send_queued(*read[at], batch)):
                    count = 1
                if not count:
                    self._reader.keep(read[at:])
                    return False
                at += count
            self._reader.keep(read[at:])  # Batches took the permits that were meant for these.
        return True

    def _send_unsent(self, read: Read, batch: Batch, *, at: int) -> int:
        """Send queued messages from an index on that were never sent, all at once; return how many were sent."""
        waiting, end = self._waiting, at
        for position, message in islice(read, at, None):
            state = waiting.get(position)
            may_go = message.deliver_at_ms <= self._now_ms and position in waiting.ready
            if state is None or state.reason is not HoleReason.NEVER_DELIVERED or not may_go:
                break
            end += 1
        sent_count = self._send_new(read[at:end], batch) if end - at > 1 else 0
        if sent_count:
            waiting.take_all(batch.owner, [position for position, _ in read[at : at + sent_count]])
        return sent_count

    def _lowest_waiting(self, batch: Batch) -> list[Position]:
        while positions := list(islice(self._waiting.ready_for(batch.owner), batch.room)):
            acked = self._cursor.view.acked_among(positions)
            if not acked:
                break
            for position in acked:
                self._waiting.take(position)
        return positions

    # Unread messages

    def _send_unread(self) -> None:
        """Read messages for all consumers, and send them in turns."""
        reader = self._cursor.reader
        while reader.has_unread and (room := self._room()):
            before, sent_count = reader.position, 0
            read = self._read_unread(before, room)
            try:
                for batch in self._turns(count=len(read)) if read else ():
                    sent_count += self._send_new(read[sent_count : sent_count + batch.room], batch)
                    is_refused = batch.room > 0 and sent_count < len(read)
                    self._end_turn(batch)
                    if sent_count == len(read) or (is_refused and not self._refuse(batch)):
                        break
            finally:
                if unsent := read[sent_count:]:  # The reader reads these again, and all above them.
                    reader.rewind(unsent[0][0])
                    self._reader.keep(unsent)
            if sent_count < len(read) or self._has_met_counted or reader.position == before:
                return

    def _send_unread_by_key(self) -> None:
        """Read messages for all consumers, and divide them: those of a slow one are queued, and hold up no other."""
        reader, room = self._cursor.reader, 0
        while reader.has_unread and (room := self._room()) and (space := self._look_ahead_max - len(self._waiting)) > 0:
            before = reader.position
            read = self._read_unread(before, min(max(room, _READ_COUNT_MIN), space))
            shares, unsent = self._divided(read)
            try:
                for name, share in shares.items():
                    batch = self._batches[name]
                    batch.begin_turn(len(share))
                    count = self._send_new(share, batch)
                    self._end_turn(batch)
                    del share[:count]
                    if share and not self._refuse(batch):
                        break
            finally:
                for share in shares.values():
                    unsent += share
                self._queue(unsent)
            if self._is_refused or self._has_met_counted or reader.position == before:
                return
        self._is_held_up = room > 0 and reader.has_unread

    def _divided(self, read: Read) -> tuple[dict[str, list[tuple[Position, Message]]], list[tuple[Position, Message]]]:
        """Return the messages that each consumer receives now, and those that are queued."""
        permits = {
            name: batch.permits
            for name, batch in self._batches.items()
            if batch.permits > 0 and name not in self._refused
        }
        shares: dict[str, list[tuple[Position, Message]]] = {name: [] for name in permits}
        others: list[tuple[Position, Message]] = []
        waiting_keys, unacked_in, left = self._waiting.keys, self._messages.unacked_in, self._left
        keys = self._consumers.sticky_keys(read)
        for each, key, owner in zip(read, keys, self._consumers.owners(keys), strict=True):
            # The messages of a key are sent in order.
            if permits.get(owner, 0) > 0 and key not in waiting_keys and len(shares[owner]) < left:
                permits[owner] -= 1 if each[1].message_count == 1 else unacked_in(*each)
                shares[owner].append(each)
            else:
                others.append(each)
        return shares, others

    def _read_unread(
        self, before: Position, count: int, *, last: Position | None = None
    ) -> list[tuple[Position, Message]]:
        """Move the reader by up to `count` entries, not past `last`, and return those of them that need not wait."""
        # It is at `before` now, and after an error.
        reader, now_ms = self._cursor.reader, self._now_ms
        with self._delayed.reading(before):
            try:
                positions = reader.read(count)
                if last is not None and positions and positions[-1] > last:
                    reader.rewind(next(position for position in positions if position > last))
                    positions = [position for position in positions if position <= last]
                # A hole may have been filled with some before their turn.
                if positions:
                    first, end = positions[0], Position(positions[-1].ledger_id, positions[-1].entry_id + 1)
                    for passed in (self._admission.deliveries.in_order(), self._waiting.in_order):
                        if passed.count_between(first, end):
                            positions = [position for position in positions if position not in passed]
                if (cancelled := self._log.cancelled) is not None:
                    positions = [each for each in positions if each not in cancelled or not self._drop(each)]
                read = self._reader.read(self._delayed.to_read(positions, now_ms=now_ms), now_ms=now_ms)
                read = self._delayed.without_early(read, now_ms=now_ms)
                if not self._cursor.view.delivery_counts:
                    return read
                left = self._messages.queue_counted(read, now_ms=now_ms)
                self._has_met_counted |= left is not read
                return left
            except BaseException:
                reader.rewind(before)
                raise

    def _queue(self, read: Read) -> None:
        """Queue messages that were just read."""
        self._reader.keep(read)
        new, reason, key_of = tuple.__new__, HoleReason.NEVER_DELIVERED, self._consumers.sticky_key
        waiting = [new(Waiting, (reason, 0, key_of(position, message.key), "", 0)) for position, message in read]
        self._waiting.put_all([position for position, _ in read], waiting)

    # Messages that fill holes

    def _fill_holes(self) -> None:
        """Send messages that fill holes, while a limit of the ack state keeps new ones back."""
        has_sent = False
        for batch in self._turns():
            refusals, self._admission.refusals = self._admission.refusals, set()
            self._fill_holes_for(batch)
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

    def _fill_holes_for(self, batch: Batch) -> None:
        """Send messages that fill holes, the lowest hole first, from where the last round stopped."""
        self.binds = True
        owner, view = batch.owner, self._cursor.view
        turn = self.hole_turns.get(owner, _LOWEST)
        parts = [(turn, _END), (_LOWEST, turn)]
        refused_left = _REFUSED_HOLES_MAX
        while batch.room:
            acked_count = view.acked_count
            for first, end in parts:
                for is_filled in self._fill_between(first, end, owner, batch):
                    refused_left -= not is_filled
                    # To stop before anything was sent could mean to be stuck, if nothing changes before the next call.
                    if not batch.room or (refused_left <= 0 and batch.deliveries):
                        return
            if view.acked_count != acked_count:
                parts = [(_LOWEST, _END)]  # The receiver of dead letters has made room, or divided a hole.
                continue
            unread, highest = self._cursor.reader.position, self._cursor.deleted.last_range()
            if highest is None or unread > highest[1]:
                return
            self._queue(self._read_unread(unread, _READ_AHEAD_COUNT, last=highest[1]))
            if self._cursor.reader.position == unread and not self._has_met_counted:
                return
            self._has_met_counted = False
            parts = [(unread, _END)]

    def _fill_between(self, first: Position, end: Position, owner: str, batch: Batch) -> Iterator[bool]:
        """Fill each hole of which messages from `first` to `end` (excluded) wait, and yield whether any was sent."""
        ready = self._waiting.ready_for(owner)
        for ledger_id in ready.ledger_ids():
            if first.ledger_id <= ledger_id <= end.ledger_id:
                low = first.entry_id if ledger_id == first.ledger_id else 0
                high = end.entry_id if ledger_id == end.ledger_id else ENTRY_ID_MAX + 1
                while (lowest := ready.lowest_in(ledger_id, low, high)) is not None:
                    hole = self._cursor.view.hole_at(lowest)
                    low = lowest.entry_id + 1 if hole is None else min(hole.end, high)
                    yield self._fill(ready, lowest, low, owner, batch)

    def _fill(self, ready: PositionSet, lowest: Position, end: int, owner: str, batch: Batch) -> bool:
        """Send messages of a hole from below, then from above: one between others would divide it."""
        ledger_id, first = lowest
        is_filled, refused = False, None
        for nearest in (ready.lowest_in, ready.highest_in):
            while batch.room and (position := nearest(ledger_id, first, end)) is not None and position != refused:
                self.hole_turns[owner] = Position(ledger_id, position.entry_id + 1)
                self._send_into_hole(position, batch)
                if position in ready:
                    refused = position
                    break
                is_filled = True
        return is_filled

    def _send_into_hole(self, position: Position, batch: Batch) -> None:
        if self._cursor.is_acked(position):
            self._waiting.take(position)
            return
        if not self._waiting.is_next_of_key(position):
            return  # The messages of a key are sent in order.
        fills_hole = self._cursor.view.hole_at(position) is not None
        for read in self._reader.read([position], now_ms=self._now_ms):
            if not self._send_queued(*read, batch, fills_hole=fills_hole):
                self._reader.keep([read])

    # Sending

    def _send_new(self, read: Read, batch: Batch) -> int:
        """Send messages for the first time until one is refused or the batch is full; return how many were sent."""
        if not read or not batch.room:
            return 0
        positions, messages = zip(*read, strict=True)
        counts = [message.message_count for message in messages]
        is_plain = counts.count(1) == len(counts)
        if not is_plain:
            counts = list(map(self._messages.unacked_in, positions, messages))
        consumers = self._consumers
        keys = consumers.sticky_keys(read) if self._needs_keys else consumers.sticky_key(positions[0], None)
        at, end = 0, batch.fitting(counts)
        while at < end:
            count = self._admission.send_new(
                batch.consumer, positions[at:end], counts[at:end],
                keys=keys[at:end] if isinstance(keys, list) else keys, now_ms=self._now_ms,
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

    def _send_queued(self, position: Position, message: Message, batch: Batch, *, fills_hole: bool = False) -> bool:
        """Send a queued message; return whether it is queued no longer."""
        waiting = self._waiting.get(position)
        assert waiting is not None
        # The tracker may round, be wrong, or go by another clock: the message's own time decides.
        is_early = waiting.delivery_count == 0 and message.deliver_at_ms > self._now_ms
        if is_early and self._delayed.must_wait(position, message, now_ms=self._now_ms):
            self._waiting.take(position)
            self._reader.keep([(position, message)])
            return True
        if (cancelled := self._log.cancelled) is not None and position in cancelled:
            self._drop(position)
            return True
        delivery = self._delivery(position, message, waiting.delivery_count)
        if self.deliveries_max is not None and waiting.delivery_count >= self.deliveries_max:
            return self._hand_over(delivery)
        if waiting.delivery_count and not self._is_counted(position):
            self._try_again_later(position)
            return True
        consumer, key = batch.consumer, self._consumers.sticky_key(position, message.key)
        message_count = self._messages.unacked_in(position, message)
        if waiting.reason is HoleReason.NEVER_DELIVERED and not fills_hole:
            is_sent = self._admission.send_new(
                consumer, (position,), (message_count,), keys=key, now_ms=self._now_ms
            ) > 0  # fmt: skip
        else:
            sent = Sent(consumer, key, waiting.delivery_count + 1, message_count)
            is_sent = self._admission.send_again(position, sent, now_ms=self._now_ms)
        if not is_sent:
            return False
        if waiting.delivery_count:
            batch.counts[position] = waiting.delivery_count + 1, 0
        if key is not None and self._needs_keys:
            self._consumers.hold_keys(consumer, (key,))
        self._waiting.take(position)
        batch.permits -= message_count
        batch.deliveries.append(delivery)
        return True

    def _delivery(self, position: Position, message: Message, redelivery_count: int = 0) -> Delivery:
        if message.message_count == 1:
            return tuple.__new__(Delivery, (position, message, redelivery_count, ()))
        words = self._cursor.view.batch.get(position)
        return Delivery(position, message, redelivery_count, tuple(words or ()))

    # Retries and dead letters

    def _is_counted(self, position: Position) -> bool:
        """Return whether a message may be sent again: a crash must forget one delivery of it at most."""
        if self.deliveries_max is None or self._cursor.is_count_durable(position):
            return True
        # One write a round, which has the counts of all messages, unless a limit leaves out some: those need not wait.
        if self._has_persisted is None:
            try:
                self._cursor.persist(now_ms=self._now_ms)
                self._has_persisted = True
            except StoreError:  # The listener notes it, for `explain_holes`.
                self._has_persisted = False
        return self._has_persisted

    def retry_ms(self, delivery_count: int) -> int:
        """Return how long a message waits after its n-th delivery; a dead letter does not."""
        is_last = self.deliveries_max is not None and delivery_count >= self.deliveries_max
        return 0 if is_last or self.retries is None else self.retries.wait_ms(delivery_count)

    def _drop(self, position: Position) -> bool:
        """Ack a cancelled message; queue it for a later attempt if a limit has no room for the ack. Returns True."""
        if not self._messages.drop(position, now_ms=self._now_ms):
            self._admission.has_refused_again = True
            self._messages.put(position, Waiting(HoleReason.DELAYED, key=self._consumers.sticky_key(position, None)))
            self._try_again_later(position)
        return True

    def handed_over(self, delivery: Delivery, *, now_ms: int) -> None:
        """Ack a dead letter that was handed over."""
        position = delivery.position
        message_count = self._messages.unacked_in(position, delivery.message)
        with self._admission.room_for((position,), now_ms=now_ms):
            receipt = self._cursor.ack(position, now_ms=now_ms)
        self._messages.acked(position, receipt.newly_acked, now_ms=now_ms)
        self._messages.dead_lettered_messages += message_count

    def _hand_over(self, delivery: Delivery) -> bool:
        """Hand a dead letter over and ack it; if a limit has no room for the ack, or either fails, it stays queued."""
        position, now_ms = delivery.position, self._now_ms
        if position not in self.begun:
            try:
                with self._admission.room_for((position,), now_ms=now_ms):
                    pass
            except AckRefusedError:
                self._admission.has_refused_again = True
                return False
            try:
                if self.hand_over(delivery, now_ms):
                    self.handed_over(delivery, now_ms=now_ms)
                    return True
                self.begun[position] = delivery
            except BaseException as error:
                self._try_again_later(position)
                if isinstance(error, AckRefusedError):
                    return True
                raise
        self._try_again_later(position)
        return True

    def _try_again_later(self, position: Position) -> None:
        """Postpone a message that a receiver or a store did not take, so that no other has to wait for it."""
        if position in self._waiting.positions:
            waiting = self._waiting.take(position)
            self._messages.put(position, waiting._replace(until_ms=self._now_ms + _RETRY_MS))

    def _call_hand_over(self, delivery: Delivery, now_ms: int) -> bool:  # noqa: ARG002 - as `hand_over`
        assert self.dead_letters is not None
        assert self.dead_letters.hand_over is not None
        outcome = self.dead_letters.hand_over(delivery)
        if isawaitable(outcome):
            if iscoroutine(outcome):
                outcome.close()
            raise TypeError("hand_over returned an awaitable, which only AsyncTopics awaits")
        return True
