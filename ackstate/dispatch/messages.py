"""The unacked messages of a subscription by where they are: in flight, waiting to be sent, or delayed."""

from __future__ import annotations

import heapq
import logging
from bisect import bisect_left, insort
from contextlib import nullcontext
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.delay.view import TIME_MS_MAX
from ackstate.dispatch.admission import AckRefusedError
from ackstate.dispatch.consumers import ANYONE
from ackstate.dispatch.explain import HoleReason, Look
from ackstate.entry_bitmap import bitmaps_of
from ackstate.errors import AckStateError, CorruptStateError
from ackstate.position_set import PositionSet
from ackstate.stores.base import LedgerNotFoundError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pyroaring import BitMap

    from ackstate.ack_hole import AckHole
    from ackstate.cursor import ManagedCursor
    from ackstate.delay.view import AckedAndSent, DelayedDeliveryTracker
    from ackstate.dispatch.admission import Admission, Sent
    from ackstate.dispatch.consumers import Consumers
    from ackstate.dispatch.options import Delivery, TopicLog
    from ackstate.message import Message
    from ackstate.position import Position

_LOG = logging.getLogger(__name__)
_KEPT_BYTES_MAX = 4 << 20
_MESSAGE_BYTES = 250  # of a message beside its payload and key, with its entry in a dict
_UNREADABLE_RETRY_MS = 60_000
_JITTER_MS_MAX = 1_000  # The clocks of callers in several threads may differ by this.


class Waiting(NamedTuple):
    """The state of a waiting message."""

    # NACKED, OWNER_GONE, DELAYED (it is due now), NEVER_DELIVERED (read ahead of its turn), or DATA_LOST.
    reason: HoleReason
    delivery_count: int = 0  # how often it was sent
    key: bytes | None = None  # the key that assigns it to a consumer; None if any may have it
    consumer: str = ""  # the consumer that had it last
    until_ms: int = 0  # it is not sent before this time; 0 for at once


@final
class ReplayQueue:
    """Messages to be sent as soon as their owner may have them, the lowest first, those of a key in order."""

    def __init__(
        self,
        owners: Callable[[Sequence[bytes | None]], list[str]],
        *,
        became_ready: Callable[[], object],
    ) -> None:
        self._owners_of = owners
        self._became_ready = became_ready
        self._all: dict[Position, Waiting] = {}
        self.get: Callable[[Position], Waiting | None] = self._all.get
        """Returns the state of a waiting message; None if it does not wait."""
        self.in_order = PositionSet()  # the same positions: to be read, not changed
        # The messages that may be sent now, by owner, and the owner of each. Invariant: both agree.
        self._ready: dict[str, PositionSet] = {}
        self._owners: dict[Position, str] = {}
        self._not_before: list[tuple[int, Position]] = []  # a heap; may have messages that were taken or put back since
        self._latest_ms: int | None = None  # the latest time since the clock was last set back
        # In order; a list, since most keys have a few messages at most.
        self._of_key: dict[bytes, list[Position]] = {}
        # The messages, in any order, their keys, and those that may be sent now: to be read. All follow the queue.
        self.positions, self.keys, self.ready = self._all.keys(), self._of_key.keys(), self._owners.keys()
        # The messages of a key that wait for a time. Invariant: exactly those below the lowest of them may be sent.
        self._timed_of_key: dict[bytes, PositionSet] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def next_until_ms(self) -> int | None:
        """When the next message that waits for a time may be sent; None if none does."""
        while self._not_before:
            until_ms, position = self._not_before[0]
            waiting = self._all.get(position)
            if waiting is not None and waiting.until_ms == until_ms:
                return until_ms
            heapq.heappop(self._not_before)
        return None

    def ready_for(self, owner: str) -> PositionSet:
        """Return the messages that an owner may have now: to be read, not changed."""
        # A set that is not empty follows each put and take until consumers are opened or closed; call again after that.
        return self._ready.get(owner, _NONE)

    def put(self, position: Position, waiting: Waiting) -> None:
        """Add a message; it does not wait yet."""
        assert position not in self._all
        self._all[position] = waiting
        self.in_order.add(position)
        if waiting.key is not None:
            self._link(position, waiting.key)
        if not waiting.until_ms:
            self._arrange(position, waiting.key)
            return
        heapq.heappush(self._not_before, (waiting.until_ms, position))
        if waiting.key is not None:
            self._hold_back(position, waiting.key)

    def put_all(self, positions: Sequence[Position], waiting: Sequence[Waiting]) -> None:
        """Add messages that wait for no time, as `put` does each; at a fraction of the time."""
        assert self._all.keys().isdisjoint(positions)
        self._all.update(zip(positions, waiting, strict=True))
        for ledger_id, entries in bitmaps_of(positions).items():
            self.in_order.update_entries(ledger_id, entries)
        ready: dict[str, list[Position]] = {}
        keys = [each.key for each in waiting]
        for position, key, owner in zip(positions, keys, self._owners_of(keys), strict=True):
            if key is not None:
                self._link(position, key)
                if key in self._timed_of_key:
                    self._arrange(position, key)
                    continue
            self._owners[position] = owner
            ready.setdefault(owner, []).append(position)
        for owner, mine in ready.items():
            of_owner = self._ready.setdefault(owner, PositionSet())
            for ledger_id, entries in bitmaps_of(mine).items():
                of_owner.update_entries(ledger_id, entries)
        if ready:
            self._became_ready()

    def take_all(self, owner: str, positions: Sequence[Position]) -> None:
        """Remove messages that are ready for an owner, as `take` does each; at a fraction of the time."""
        ready = self._ready[owner]
        for ledger_id, entries in bitmaps_of(positions).items():
            self.in_order.discard_entries(ledger_id, entries)
            ready.discard_entries(ledger_id, entries)
        for position in positions:
            del self._owners[position]
            key = self._all.pop(position).key
            if key is not None:
                self._unlink(position, key)

    def take(self, position: Position) -> Waiting:
        """Remove a message that waits."""
        waiting = self._all.pop(position)
        self.in_order.discard(position)
        self._unready(position)
        if waiting.key is not None:
            self._unlink(position, waiting.key)
            if waiting.until_ms:
                self._time_over(position, waiting.key)
        return waiting

    def follow_clock(self, *, now_ms: int) -> None:
        """Note the time. If the clock was set back, so are the times that messages wait for: no wait becomes longer."""
        # A step back of at most a second is ignored: it may be the difference between two callers.
        back_ms = 0 if self._latest_ms is None else self._latest_ms - now_ms
        if back_ms <= 0 or back_ms > _JITTER_MS_MAX:
            self._latest_ms = now_ms
        if back_ms <= _JITTER_MS_MAX:
            return
        timed = [
            (waiting.until_ms - back_ms or -1, position) for position, waiting in self._all.items() if waiting.until_ms
        ]
        for until_ms, position in timed:
            self._all[position] = self._all[position]._replace(until_ms=until_ms)
        heapq.heapify(timed)
        self._not_before = timed

    def release(self, *, now_ms: int) -> None:
        """Make the messages ready whose time has come."""
        self.follow_clock(now_ms=now_ms)
        while self._not_before and (until_ms := self.next_until_ms) is not None and until_ms <= now_ms:
            _, position = heapq.heappop(self._not_before)
            waiting = self._all[position] = self._all[position]._replace(until_ms=0)
            if waiting.key is None:
                self._arrange(position, None)
            else:
                self._time_over(position, waiting.key)

    def is_next_of_key(self, position: Position) -> bool:
        """Return whether no earlier message of its key waits."""
        key = self._all[position].key
        return key is None or self._of_key[key][0] == position

    def key_moved(self, key: bytes) -> None:
        """Give the waiting messages of a key to its present owner. Complexity: O(1) if it is the same as before."""
        of_key = self._of_key.get(key)
        if of_key is None:
            return
        owner = self._owners.get(of_key[0])
        if owner is not None and owner != self._owner(key):
            for position in of_key:
                if position in self._owners:
                    self._unready(position)
                    self._arrange(position, key)

    def owners_changed(self) -> None:
        """Give all waiting messages to their present owners. Complexity: O(keys + owners + moved messages)."""
        for key in self._of_key:
            self.key_moved(key)
        # Here, not as soon as one is empty: the set that `ready_for` returned stays valid until consumers come or go.
        self._ready = {owner: ready for owner, ready in self._ready.items() if ready}

    def clear(self) -> None:
        """Forget everything."""
        self._all.clear()
        self.in_order.clear()
        self._ready.clear()
        self._owners.clear()
        self._timed_of_key.clear()
        self._not_before.clear()
        self._of_key.clear()

    def _link(self, position: Position, key: bytes) -> None:
        of_key = self._of_key.get(key)
        if of_key is None:
            self._of_key[key] = [position]
        else:
            insort(of_key, position)

    def _unlink(self, position: Position, key: bytes) -> None:
        of_key = self._of_key[key]
        if len(of_key) > 1:
            del of_key[bisect_left(of_key, position)]
        else:
            del self._of_key[key]

    def _arrange(self, position: Position, key: bytes | None) -> None:
        """Make a message ready that waits for no time, unless an earlier one of its key waits for one."""
        lowest_timed = None if key is None else self._lowest_timed(key)
        if lowest_timed is None or position < lowest_timed:
            owner = self._owners[position] = ANYONE if key is None else self._owner(key)
            ready = self._ready.get(owner)
            if ready is None:
                ready = self._ready[owner] = PositionSet()
            ready.add(position)
            self._became_ready()

    def _hold_back(self, position: Position, key: bytes) -> None:
        """Hold a message of a key back until its time, and those after it with it."""
        lowest_timed = self._lowest_timed(key)
        self._timed_of_key.setdefault(key, PositionSet()).add(position)
        if lowest_timed is None or position < lowest_timed:
            of_key = self._of_key[key]
            for later in of_key[bisect_left(of_key, position) :]:
                if later == lowest_timed:
                    return
                self._unready(later)

    def _time_over(self, position: Position, key: bytes) -> None:
        """Make a message of a key ready that waited for a time, and those after it, up to the next that does."""
        timed = self._timed_of_key[key]
        was_lowest = next(iter(timed)) == position
        timed.discard(position)
        if not timed:
            del self._timed_of_key[key]
        if was_lowest and key in self._of_key:
            lowest_timed = self._lowest_timed(key)
            of_key = self._of_key[key]
            for later in of_key[bisect_left(of_key, position) :]:
                if later == lowest_timed:
                    return
                self._arrange(later, key)

    def _owner(self, key: bytes) -> str:
        (owner,) = self._owners_of((key,))
        return owner

    def _lowest_timed(self, key: bytes) -> Position | None:
        timed = self._timed_of_key.get(key)
        return None if timed is None else next(iter(timed))

    def _unready(self, position: Position) -> None:
        owner = self._owners.pop(position, None)
        if owner is not None:
            self._ready[owner].discard(position)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(waiting)."""
        assert {position: owner for owner, ready in self._ready.items() for position in ready} == self._owners
        assert self._owners.keys() <= self._all.keys()
        assert list(self.in_order) == sorted(self._all)
        assert all(not self._all[position].until_ms for position in self._owners)
        assert {position for of_key in self._of_key.values() for position in of_key} == {
            position for position, waiting in self._all.items() if waiting.key is not None
        }
        timed = {position for position, waiting in self._all.items() if waiting.until_ms and waiting.key is not None}
        assert timed == {position for of_key in self._timed_of_key.values() for position in of_key}
        for key, of_key in self._of_key.items():
            lowest_timed = self._lowest_timed(key)
            may_go = {position for position in of_key if lowest_timed is None or position < lowest_timed}
            assert may_go == {position for position in of_key if position in self._owners}
            assert {self._owners[position] for position in may_go} <= {self._owner(key)}
        free = {position for position, waiting in self._all.items() if not waiting.until_ms and waiting.key is None}
        assert free <= self._owners.keys()


_NONE = PositionSet()


@final
class DelayedMessages:
    """A dispatcher's access to its tracker, and the messages that the tracker has handed out too early."""

    # The log reports delayed messages to a shared index when they are published. So the reader skips them unread, and
    # they are read once, to be sent.

    def __init__(
        self,
        tracker: DelayedDeliveryTracker | None,
        log: TopicLog,
        cursor: ManagedCursor,
        *,
        subscription: AckedAndSent,
    ) -> None:
        self._tracker = tracker
        self._cursor = cursor
        self._due: list[Position] = []  # handed out by the tracker, and not queued yet
        self._early: list[tuple[int, Position]] = []  # a heap: the tracker would deliver them before their time
        self._reported_ledger_id = -1  # of the durable mark-delete position
        if tracker is None:
            return
        tracker.attach(subscription)
        if tracker.shared_index is not None:
            log.feed(tracker.shared_index)

    @property
    def is_on(self) -> bool:
        """Whether messages are delayed at all."""
        return self._tracker is not None

    def fills(self, hole: AckHole) -> bool:
        """Return whether all messages of a hole are known to be delayed and not yet due."""
        if self._tracker is None:
            return False
        end = hole.first_position._replace(entry_id=hole.end)
        return self._tracker.count_between(hole.first_position, end) == hole.entry_count

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
        """Return those of some messages that need not wait; see `must_wait`."""
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
        while self._early and (early_ms := self.next_early_ms) is not None and early_ms <= now_ms:
            self._due.append(heapq.heappop(self._early)[1])
        # Some trackers do not know acks, and a stale one has messages that the log has not: they take no one's place.
        while count > 0:
            due_now = self._tracker.scheduled_messages(count, now_ms=now_ms)
            unacked = self._cursor.view.unacked_among(due_now)
            self._due += unacked
            if len(due_now) < count:  # There are no more.
                break
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
        return self._tracker.delayed_message_count + len(self._cursor.view.unacked_among(list(self)))

    @property
    def next_early_ms(self) -> int | None:
        """When the next message is due that the tracker would have delivered before; None without one."""
        while self._early and not self._cursor.view.unacked_among([self._early[0][1]]):
            heapq.heappop(self._early)
        return self._early[0][0] if self._early else None

    @property
    def next_due_ms(self) -> list[int]:
        """When the tracker hands out the next message, and when the next of the early ones is due."""
        times = () if self._tracker is None else (self._tracker.next_delivery_ms, self.next_early_ms)
        return [time for time in times if time is not None]

    def mark_delete_persisted(self, position: Position) -> None:
        """Report the durable mark-delete position to the tracker, which drops whole ledgers."""
        if self._tracker is None or position.ledger_id <= self._reported_ledger_id:
            return
        try:
            self._tracker.advance_mark_delete(position)
            self._reported_ledger_id = position.ledger_id
        except ValueError as error:
            # It was closed from outside, which the next dispatch reports; the persist itself has succeeded.
            _LOG.warning("the durable acks cannot be reported to the tracker of delayed messages: %s", error)

    def forget(self) -> None:
        """Forget all delayed messages: all are acked, or the reader comes to them again."""
        self._reported_ledger_id = -1
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


@final
class MessageReader:
    """Reads messages from the log, and keeps those that were read and not sent, 4 MiB of them at most."""

    def __init__(self, log: TopicLog, *, postpone: Callable[[Position, int], None]) -> None:
        self._log = log
        self._postpone = postpone
        self.kept: dict[Position, Message] = {}
        self._kept_bytes = 0

    def read(self, positions: Sequence[Position], *, now_ms: int) -> list[tuple[Position, Message]]:
        """Return the messages at positions, in their order, without the unreadable ones; none of them is kept."""
        if self.kept.keys().isdisjoint(positions):
            return self._load(positions, now_ms=now_ms)
        kept = list(map(self.kept.get, positions))
        missing = [position for position, message in zip(positions, kept, strict=True) if message is None]
        loaded = dict(self._load(missing, now_ms=now_ms))
        self.forget(positions)
        return [
            (position, found)
            for position, message in zip(positions, kept, strict=True)
            if (found := loaded.get(position) if message is None else message) is not None
        ]

    def keep(self, unsent: Iterable[tuple[Position, Message]]) -> None:
        """Keep messages that were read and not sent, for the next `read`."""
        kept = self.kept
        for position, message in unsent:
            before = kept.pop(position, None)
            if before is None:
                self._kept_bytes += _size(message)
            kept[position] = message
        while self._kept_bytes > _KEPT_BYTES_MAX:  # The first ones are read again.
            self.forget((next(iter(self.kept)),))

    def forget(self, positions: Iterable[Position]) -> None:
        """Drop the messages at positions, such as acked ones, if they are kept."""
        kept = self.kept
        for position in positions if kept else ():
            message = kept.pop(position, None)
            if message is not None:
                self._kept_bytes -= _size(message)

    def clear(self) -> None:
        """Drop everything."""
        self.kept.clear()
        self._kept_bytes = 0

    def _load(self, positions: Sequence[Position], *, now_ms: int) -> list[tuple[Position, Message]]:
        if not positions:
            return []
        try:
            return list(zip(positions, self._log.read(positions), strict=True))
        except (LedgerNotFoundError, CorruptStateError):
            pass
        readable = []
        for position in positions:
            try:
                (message,) = self._log.read([position])
            except (LedgerNotFoundError, CorruptStateError) as error:
                _LOG.warning("message %s cannot be read, and waits: %s", position, error)
                self._postpone(position, now_ms)
            else:
                readable.append((position, message))
        return readable


def _size(message: Message) -> int:
    return _MESSAGE_BYTES + len(message.payload) + len(message.key or b"")


@final
class UnackedMessages:
    """Follows each message that the reader has passed until it is acked."""

    def __init__(
        self, log: TopicLog, admission: Admission, consumers: Consumers, *, delays: DelayedDeliveryTracker | None
    ) -> None:
        cursor = admission.cursor
        self._admission, self._deliveries, self._gate = admission, admission.deliveries, admission.gate
        self.log, self._cursor, self._consumers = log, cursor, consumers
        self._waiter = admission.waiter
        self.waiting = ReplayQueue(consumers.owners, became_ready=self._waiter.messages_came)
        self.delayed = DelayedMessages(delays, log, cursor, subscription=self)
        self.reader = MessageReader(log, postpone=self._postpone)
        self._acked_count = cursor.view.acked_count  # as far as it was reported here
        self.dead_lettered_messages = 0
        self.discard_acked = cursor.view.discard_acked

    def drop(self, position: Position, *, now_ms: int) -> bool:
        """Ack a cancelled message; return False if a limit has no room for the ack."""
        try:
            with self._admission.room_for((position,), now_ms=now_ms):
                receipt = self._cursor.ack(position, now_ms=now_ms)
        except AckRefusedError:
            return False
        self.acked(position, receipt.newly_acked, now_ms=now_ms)
        return True

    def withdraw(self, deliveries: Iterable[Delivery]) -> None:
        """Queue messages that never reached their consumer."""
        for position, sent in self._complete([delivery.position for delivery in deliveries]):
            self._deliveries.uncount(sent)
            count = sent.delivery_count - 1
            reason = HoleReason.OWNER_GONE if count else HoleReason.NEVER_DELIVERED
            if count:
                self._cursor.count_deliveries({position: (count, 0)})
            self.put(position, Waiting(reason, count, sent.key))
        self._admission.refresh()

    def give_back(
        self, positions: Sequence[Position], reason: HoleReason, *, until_ms: Callable[[int], int] = lambda _: 0
    ) -> int:
        """Queue messages that were in flight, and return how many those were, the messages of a batch one by one."""
        # `until_ms`: the time before which none is sent again that was sent so many times.
        completed, counts = self._complete(positions), {}
        for position, sent in completed:
            if not self._cursor.is_acked(position):
                time_ms = until_ms(sent.delivery_count)
                self.put(position, Waiting(reason, sent.delivery_count, sent.key, sent.consumer, time_ms))
                counts[position] = sent.delivery_count, min(max(time_ms, 0), TIME_MS_MAX)
        self._cursor.count_deliveries(counts)
        return sum(sent.message_count for _, sent in completed)

    def queue_counted(self, read: list[tuple[Position, Message]], *, now_ms: int) -> list[tuple[Position, Message]]:
        """Queue those of the messages just read that were sent before the last restart, as they are to be sent first.

        Returns the messages that may be sent now: all, or those before the first one; the reader goes back to the rest.
        """
        counts = self._cursor.view.delivery_counts
        counted = [each for each in read if each[0] in counts]
        if not counted:
            return read
        if self._consumers.is_single_active:  # They are sent in order, so it is the turn of those before it.
            if counted[0] is not read[0]:
                return self._unread(read, read.index(counted[0]))
            counted = counted[:1]
        for position, message in counted:
            delivery_count, until_ms = counts[position]
            key, until_ms = self._consumers.sticky_key(position, message.key), until_ms if until_ms > now_ms else 0
            self.put(position, Waiting(HoleReason.NACKED, delivery_count, key, until_ms=until_ms))
        return self._unread(read, 0)

    def _unread(self, read: list[tuple[Position, Message]], count: int) -> list[tuple[Position, Message]]:
        """Make the reader go back to all but the first `count` of some messages, and return these."""
        self._cursor.reader.rewind(read[count][0])
        self.reader.keep(read[count:])
        return read[:count]

    def put(self, position: Position, waiting: Waiting) -> None:
        """Queue a message, unless it is queued or in flight."""
        if position not in self.waiting.positions and self._deliveries.get(position) is None:
            self.waiting.put(position, waiting)

    def acked(self, position: Position, newly_acked: int, *, now_ms: int) -> None:
        """Note an ack: the message is neither in flight nor queued."""
        sent = self._deliveries.complete(position)
        if sent is not None and sent.key is not None:
            self._release((sent.key,))
        self._acked_count += newly_acked
        if position in self.waiting.positions:
            self.waiting.take(position)
        # Each ack comes here, so nothing is called that has no work.
        if self.reader.kept:
            self.reader.forget((position,))
        if self._waiter.wants_room or (self._gate is not None and self._gate.is_closed):
            self._admission.usage_decreased(now_ms=now_ms, of=sent.consumer if sent is not None else None)

    def acked_all(
        self, positions: Sequence[Position], entries: Mapping[int, BitMap], newly_acked: int, *, now_ms: int
    ) -> None:
        """Note acks, as `acked` for each; `entries` are the same positions by ledger."""
        self._complete(positions, entries)
        self._acked_count += newly_acked
        if self.waiting.in_order.has_any(entries):
            for position in self.waiting.positions & set(positions):
                self.waiting.take(position)
        self.reader.forget(positions)
        self._admission.usage_decreased(now_ms=now_ms)

    def acked_in_batch(self, position: Position, *, now_ms: int) -> None:
        """Note that messages of a batch in flight were acked, and that others of it were not."""
        words = self._cursor.view.batch.get(position)
        if words is not None:
            self._deliveries.reduce(position, max(1, _unacked_count(words)))
        self._admission.usage_decreased(now_ms=now_ms)

    def completes_batch(self, position: Position, unacked_words: Sequence[int]) -> bool:
        """Return whether an ack that leaves these messages of a batch unacked acks the last unacked ones."""
        known = self._cursor.view.batch.get(position)
        return not any(unacked_words) or (
            known is not None and not any(before & after for before, after in zip(known, unacked_words, strict=False))
        )

    def acked_up_to(self, position: Position, newly_acked: int, *, now_ms: int) -> None:
        """Note that everything up to a position was acked."""
        self._complete(_up_to(position, self._deliveries.in_order()))
        self._acked_count += newly_acked
        for each in _up_to(position, self.waiting.in_order):
            self.waiting.take(each)
        self.reader.forget([each for each in self.reader.kept if each <= position])
        self._admission.usage_decreased(now_ms=now_ms)

    def clear(self) -> None:
        """Forget everything: the reader restarts elsewhere, and nothing is in flight."""
        self._deliveries.clear()
        self._consumers.release_keys()
        self.waiting.clear()
        self.reader.clear()
        self._acked_count = self._cursor.view.acked_count
        self.delayed.clear()

    def unacked_in(self, position: Position, message: Message) -> int:
        """Return how many messages of an entry are not acked."""
        words = self._cursor.view.batch.get(position) if message.message_count > 1 else None
        if words is None:
            return message.message_count
        return max(1, min(_unacked_count(words), message.message_count))

    def look(self, position: Position, *, now_ms: int) -> Look:
        """Return where an unacked message is."""
        sent = self._deliveries.get(position)
        if sent is not None:
            return Look(HoleReason.IN_FLIGHT, sent.consumer, None, sent.delivery_count)
        waiting = self.waiting.get(position)
        try:
            (message,) = self.log.read([position])
        except (LedgerNotFoundError, CorruptStateError):
            return Look(HoleReason.DATA_LOST)
        except StoreError:  # A store that fails now has not necessarily lost anything.
            reason = HoleReason.UNKNOWN if waiting is None else waiting.reason
            return Look(reason, delivery_count=0 if waiting is None else waiting.delivery_count)
        if waiting is not None:
            is_due = waiting.reason is HoleReason.DELAYED
            reason = HoleReason.NEVER_DELIVERED if is_due else waiting.reason
            is_counted = self._cursor.is_count_durable(position)
            return Look(reason, waiting.consumer, waiting.until_ms or None, waiting.delivery_count, is_counted)
        if self.delayed.is_on and message.deliver_at_ms > now_ms:
            return Look(HoleReason.DELAYED, "", message.deliver_at_ms)
        delivery_count, until_ms = self._cursor.view.delivery_counts.get(position, (0, 0))  # before the last restart
        reason = HoleReason.NACKED if delivery_count else HoleReason.NEVER_DELIVERED
        return Look(reason, "", until_ms or None, delivery_count)

    def not_sent_between(self, first: Position, end: Position) -> PositionSet:
        unsent = PositionSet()
        for ledger_id, entries in self._cursor.view.unacked_between(first, min(end, self._cursor.reader.position)):
            unsent.update_entries(ledger_id, entries)
        unsent.difference_update(self._deliveries.in_order())
        unsent.difference_update(self.waiting.in_order)
        for position in self.delayed:
            unsent.discard(position)
        return unsent

    def notice_acks_elsewhere(self) -> None:
        """Remove queued messages that were acked with the cursor itself, past the subscription."""
        acked_count = self._cursor.view.acked_count
        if self._acked_count == acked_count:
            return
        self._acked_count = acked_count
        acked, unacked = PositionSet(), PositionSet()
        for each in (acked, unacked):
            each.update(self.waiting.in_order)
        unacked.apply(self._cursor.view.discard_acked)
        acked.difference_update(unacked)
        for position in acked:
            self.waiting.take(position)

    def _complete(
        self, positions: Sequence[Position], entries: Mapping[int, BitMap] | None = None
    ) -> list[tuple[Position, Sent]]:
        """Take messages out of flight, release their keys, and return those that were in flight."""
        completed = self._deliveries.complete_all(positions, bitmaps_of(positions) if entries is None else entries)
        if completed and self._consumers.needs_keys:
            self._release([sent.key for _, sent in completed])
        return completed

    def _release(self, keys: Sequence[bytes | None]) -> None:
        for key in self._consumers.release(keys):
            self.waiting.key_moved(key)

    def _postpone(self, position: Position, now_ms: int) -> None:
        """Postpone a message that cannot be read, so that it delays no other."""
        lost = Waiting(HoleReason.DATA_LOST, key=self._consumers.sticky_key(position, None))
        waiting = self.waiting.take(position) if position in self.waiting.positions else lost
        self.put(position, waiting._replace(until_ms=now_ms + _UNREADABLE_RETRY_MS))


def _up_to(position: Position, positions: PositionSet) -> list[Position]:
    """Return those up to a position, included, in order. Complexity: O(them)."""
    return list(takewhile(lambda each: each <= position, positions))


def _unacked_count(words: Sequence[int]) -> int:
    """Count the unacked messages of a batch, given Pulsar's words: signed, a bit for each."""
    return sum((word & (2**64 - 1)).bit_count() for word in words)
