"""Which messages go to a consumer next?"""

from __future__ import annotations

import heapq
import logging
from itertools import chain
from typing import TYPE_CHECKING, final

from ackstate.cursor.dispatch.admission import ACK_STATE_RULES, AckRefusedError
from ackstate.cursor.dispatch.consumers import ANYONE
from ackstate.cursor.dispatch.deliveries import Sent
from ackstate.cursor.dispatch.delivery import Batch, DeadLetterPolicy, Delivery
from ackstate.cursor.dispatch.hole_queue import HoleQueues
from ackstate.cursor.dispatch.replay_queue import ReplayQueue, Waiting
from ackstate.cursor.inspect.hole_report import HoleReason
from ackstate.cursor.store import LedgerNotFoundError
from ackstate.delay.position_set import PositionSet
from ackstate.delay.tracker import DurableDelayTracker
from ackstate.delay.view import SubscriptionDelayView
from ackstate.errors import AckStateError, CorruptStateError
from ackstate.limits.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyroaring import BitMap

    from ackstate.cursor.dispatch.admission import Admission
    from ackstate.cursor.dispatch.consumers import Consumers
    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.topic.message_log import Message, MessageLog
    from ackstate.delay.tracker import DelayedDeliveryTracker
    from ackstate.position import Position

_LOG = logging.getLogger(__name__)
_READ_AHEAD_COUNT = 1_000
_HAND_OVER_RETRY_MS = 1_000
_UNREADABLE_RETRY_MS = 60_000


@final
class Dispatcher:
    """Chooses, for one consumer at a time: what waits first, the lowest first, then what was never read.

    While a limit of the ack state keeps new messages back, those that fill ack holes still go, as `HoleQueue` orders
    them: messages that wait, and unread ones below the highest acked.

    Args:
        log: The topic's messages.
        cursor: The ack state.
        delays: Its delayed messages; None delivers every message at once.
        admission: What may go out.
        consumers: Who is there.
        hole_tries_max: How often a message is sent to fill a hole before others that were sent less often.
        look_ahead_max: With keys, how many messages may be read ahead for other consumers.
        dead_letters: What to do with messages that are given back again and again; None sends them for ever.
    """

    def __init__(  # noqa: PLR0913 - what it is made of
        self,
        log: MessageLog,
        cursor: ManagedCursor,
        *,
        delays: DelayedDeliveryTracker | None,
        admission: Admission,
        consumers: Consumers,
        hole_tries_max: int,
        look_ahead_max: int,
        dead_letters: DeadLetterPolicy | None,
    ) -> None:
        self._holes = HoleQueues(cursor, tries_max=hole_tries_max, waiting_count=lambda: len(self.waiting))
        self.waiting = ReplayQueue(consumers.owner, became_ready=self._holes.note)
        self._log = log
        self._cursor = cursor
        self._delays = delays
        self._admission = admission
        self._consumers = consumers
        self._look_ahead_max = look_ahead_max
        self._dead_letters = dead_letters
        self._due: list[Position] = []
        self._early: list[tuple[int, Position]] = []  # a heap: what the tracker would deliver before its time
        # Looked at once: to compare with a protocol asks for all that it has.
        self._remembering = delays if isinstance(delays, DurableDelayTracker) else None
        self._skip = None
        if self._remembering is not None and self._remembering.outlives_restarts:
            self._skip = self._remembering.skip
        if isinstance(delays, SubscriptionDelayView):
            delays.attach(self)
        self._binds = False  # whether a limit of the ack state kept new messages back the last time
        self._acked_count = cursor.acked_count  # as far as this was told

    def dispatch(self, batch: Batch) -> None:
        """Send what a consumer may have, up to what it wants.

        Raises:
            StoreError: The log could not be read; what was sent so far is in the batch.
        """
        self._notice_acks_elsewhere()
        self._collect_due(batch)
        if self._cursor.has_unread:
            self._admission.promote_young(now_ms=batch.now_ms)
        if not self._admission.binding(batch.consumer):
            self._binds = False
            self._admission.refused_by = None
            if self._send_waiting(batch) and batch.room and not self._holds_order():
                self._send_unread(batch)
            if self._admission.refused_by not in ACK_STATE_RULES:
                return
        else:
            self._ask_for_unread(batch)
        if batch.room:
            self._fill_holes(batch)

    def expect(self, count: int) -> None:
        """Make ready for so many messages to wait at once: beyond some it is as well to look at the holes anew."""
        self._holes.expect(count)

    def put(self, position: Position, waiting: Waiting) -> None:
        """Let a message wait that may be sent again."""
        if position not in self.waiting and position not in self._admission.deliveries:
            self.waiting.put(position, waiting)

    def acked(self, position: Position, newly_acked: int) -> None:
        """Note an ack: the message waits no longer, and the holes beside it are other ones."""
        self._acked_count += newly_acked
        if position in self.waiting:
            self.waiting.take(position)
        self._holes.note(position)

    def recount(self, position: Position) -> None:
        """Note that messages of a batch on its way were acked."""
        sent = self._admission.deliveries.get(position)
        words = self._cursor.batch.get(position)
        if sent is not None and words is not None:
            self._admission.reduce(position, max(1, _unacked_count(words)))

    def acked_up_to(self, position: Position, newly_acked: int) -> None:
        """Note that everything up to a position was acked."""
        self._acked_count += newly_acked
        for each in self.waiting.up_to(position):
            self.waiting.take(each)
        if position.entry_id >= 0:  # Else no hole begins anew: none goes over the border of a ledger.
            self._holes.note(position)  # The hole above it may have begun below it.

    def forget_owner(self, consumer: str) -> None:
        """Forget the holes of a consumer that is gone."""
        self._holes.forget(consumer)

    def clear(self) -> None:
        """Forget what waits: the reader begins anew."""
        self.waiting.clear()
        self._due.clear()
        self._early.clear()
        self._holes.clear()
        self._acked_count = self._cursor.acked_count
        self.forget_delays()

    @property
    def next_early_ms(self) -> int | None:
        """When the next message's own time comes that the tracker would have delivered before; None without one."""
        while self._early and not self._cursor.is_unacked(self._early[0][1]):
            heapq.heappop(self._early)
        return self._early[0][0] if self._early else None

    def mark_delete_persisted(self, position: Position) -> None:
        """Let the delayed messages know what is durably acked."""
        if self._remembering is None:
            return
        try:
            self._remembering.advance_mark_delete(position)
        except ValueError as error:
            # Somebody has closed it. The next dispatch says so; what was persisted is persisted.
            _LOG.warning("the delayed messages cannot be told what is acked: %s", error)

    def forget_delays(self) -> None:
        """Forget what is delayed, since all of it is acked or comes again."""
        if self._delays is None:
            return
        try:
            self._delays.clear()
        except AckStateError as error:
            # What is left is stored to no use, not state: the next recovery finds it, and what it says is still true.
            _LOG.warning("snapshots of delayed messages could not be deleted: %s", error)

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        """See `AckedAndSent`."""
        self._cursor.discard_acked(ledger_id, entries)

    def not_sent_between(self, first: Position, end: Position) -> PositionSet:
        """See `AckedAndSent`."""
        found = PositionSet()
        for ledger_id, entries in self._cursor.unacked_between(first, min(end, self._cursor.read_position)):
            found.update_entries(ledger_id, entries)
        found.difference_update(self._admission.deliveries.in_order())
        found.difference_update(self.waiting.in_order())
        for position in chain(self._due, (position for _, position in self._early)):
            found.discard(position)
        return found

    def _notice_acks_elsewhere(self) -> None:
        """Let nothing wait that was acked with the cursor itself, past the subscription; and look at the holes anew.

        Complexity: O(1) if there was none, else O(containers of what waits + what was acked of it).
        """
        acked_count = self._cursor.acked_count
        if self._acked_count == acked_count:
            return
        self._acked_count = acked_count
        self._holes.clear()
        acked, unacked = PositionSet(), PositionSet()
        for each in (acked, unacked):
            each.update(self.waiting.in_order())
        unacked.apply(self._cursor.discard_acked)
        acked.difference_update(unacked)
        for position in acked:
            self.waiting.take(position)

    def _collect_due(self, batch: Batch) -> None:
        """Let those wait to be sent whose time has come."""
        self.waiting.release(now_ms=batch.now_ms)
        missing = batch.room
        if not self._binds:  # Else what waits may have to, and what falls due may fill a hole.
            missing -= len(self.waiting.ready_for(self._owner(batch.consumer)))
        if self._delays is None or missing <= 0:
            return
        while (early_ms := self.next_early_ms) is not None and early_ms <= batch.now_ms:
            self._due.append(heapq.heappop(self._early)[1])
        # Some trackers know no acks, and a stale one has what the log has not: neither is to take another's place.
        while missing > 0 and (due_now := self._delays.scheduled_messages(missing, now_ms=batch.now_ms)):
            unacked = [position for position in due_now if self._cursor.is_unacked(position)]
            # The tracker has forgotten them: they are kept until their keys could be read.
            self._due += unacked
            missing -= len(unacked)
        due: list[tuple[Position, bytes | None]]
        if not self._consumers.needs_keys:
            due = [(position, None) for position in self._due]
        else:
            read = self._readable(self._due, now_ms=batch.now_ms)
            due = [(position, self._consumers.sticky_key(position, message.key)) for position, message in read]
        self._due = []
        for position, key in due:
            self.put(position, Waiting(HoleReason.DELAYED, key=key))

    def _send_waiting(self, batch: Batch) -> bool:
        """Send what waits, the lowest first; tell whether nothing that waits was refused."""
        while batch.room:
            positions = self._lowest_waiting(batch)
            if not positions:
                return True
            for position, message in self._readable(positions, now_ms=batch.now_ms):
                # Whoever takes dead letters may have acked others.
                if position in self.waiting and not self._send(position, message, batch):
                    return False
        return True

    def _lowest_waiting(self, batch: Batch) -> list[Position]:
        positions: list[Position] = []
        acked: list[Position] = []
        for position in self.waiting.ready_for(self._owner(batch.consumer)):
            if self._cursor.is_acked(position):
                acked.append(position)
                continue
            positions.append(position)
            if len(positions) == batch.room:
                break
        for position in acked:
            self.waiting.take(position)
        return positions

    def _send_unread(self, batch: Batch) -> None:
        if self._consumers.needs_keys:
            self._look_ahead(batch)
            return
        while batch.room:
            before = self._cursor.read_position
            positions = [*self._not_sent(self._cursor.read(batch.room), now_ms=batch.now_ms)]
            if not positions:
                if self._cursor.read_position == before:
                    return
                continue
            if not self._send_read(self._read(positions, before, now_ms=batch.now_ms), batch):
                return

    def _send_read(self, read: Sequence[tuple[Position, Message]], batch: Batch) -> bool:
        """Send messages that were just read; False if one was refused, which will be read again."""
        for position, message in read:
            is_sent = False
            try:
                if self._is_delayed(position, message, now_ms=batch.now_ms):
                    is_sent = True  # by and by
                    continue
                key = self._consumers.sticky_key(position, message.key)
                sent = Sent(batch.consumer, key, message_count=self._unacked_in(position, message))
                is_sent = self._admission.send_new(position, sent, now_ms=batch.now_ms)
            finally:
                if not is_sent:
                    self._cursor.rewind(position)
            if not is_sent:
                return False
            batch.deliveries.append(self._delivery(position, message, 0))
        return True

    def _look_ahead(self, batch: Batch) -> None:
        """Read on for all consumers: the messages of one who is slow wait, and hold nobody else up."""
        while batch.room and len(self.waiting) < self._look_ahead_max:
            room = self._look_ahead_max - len(self.waiting)
            if not self._read_ahead(batch.now_ms, count=min(max(batch.room, 100), room)):
                return
            if not self._send_waiting(batch):
                return

    def _fill_holes(self, batch: Batch) -> None:
        """Send what fills holes, that which frees most first."""
        self._binds = True
        owner = self._owner(batch.consumer)
        binding = self._admission.binding(batch.consumer) | {self._admission.refused_by}
        counts_unpersisted = Rule.UNPERSISTED_ACK_RECORD_BYTES in binding
        while batch.room:
            ready = self.waiting.ready_for(owner)
            holes = self._holes.of(owner, ready, counts_unpersisted=counts_unpersisted)
            for position in holes.offered(ready):
                if self._cursor.is_acked(position):
                    self.waiting.take(position)
                    continue
                if not self.waiting.is_next_of_key(position):
                    continue  # Those of a key go out in order, whatever they would free.
                fills_hole = self._cursor.hole_at(position) is not None
                for _, message in self._readable([position], now_ms=batch.now_ms):
                    self._send(position, message, batch, fills_hole=fills_hole)
                if not batch.room:
                    return
            if not self._holes.is_told(owner):
                continue  # Whoever takes dead letters may have divided a hole.
            highest = self._cursor.deleted.last_range()
            if highest is None or not self._read_ahead(batch.now_ms, count=_READ_AHEAD_COUNT, last=highest[1]):
                return

    def _read_ahead(self, now_ms: int, *, count: int, last: Position | None = None) -> bool:
        """Let unread messages wait, or be delayed, up to a position; tell whether there was one."""
        before = self._cursor.read_position
        if last is not None and before > last:
            return False
        read = self._cursor.read(count)
        if last is not None and read and read[-1] > last:
            self._cursor.rewind(next(position for position in read if position > last))
            read = [position for position in read if position <= last]
        positions = [*self._not_sent(read, now_ms=now_ms)]
        for position, message in self._read(positions, before, now_ms=now_ms):
            try:
                is_delayed = self._is_delayed(position, message, now_ms=now_ms)
            except BaseException:
                self._cursor.rewind(position)
                raise
            if not is_delayed:
                key = self._consumers.sticky_key(position, message.key)
                self.put(position, Waiting(HoleReason.NEVER_DELIVERED, key=key))
        return self._cursor.read_position != before

    def _ask_for_unread(self, batch: Batch) -> None:
        """Let the gate see that it holds back what could be read now: it says so, and tells when that is over."""
        if self._cursor.has_unread:
            self._admission.ask_for_new(batch.consumer, now_ms=batch.now_ms)

    def _send(
        self,
        position: Position,
        message: Message,
        batch: Batch,
        *,
        fills_hole: bool = False,
    ) -> bool:
        """Send a message that waits; tell whether it waits no longer."""
        waiting = self.waiting.get(position)
        assert waiting is not None
        # Who handed it out early rounds, or was wrong, or read it by another clock: the message itself is what counts.
        is_early = waiting.delivery_count == 0 and message.deliver_at_ms > batch.now_ms
        if is_early and self._is_delayed(position, message, now_ms=batch.now_ms):
            self.waiting.take(position)
            return True
        dead_letters = self._dead_letters
        if dead_letters is not None and waiting.delivery_count > dead_letters.max_redelivery_count:
            delivery = self._delivery(position, message, waiting.delivery_count)
            return self._hand_over(delivery, dead_letters, now_ms=batch.now_ms)
        key = self._consumers.sticky_key(position, message.key)
        sent = Sent(batch.consumer, key, waiting.delivery_count + 1, self._unacked_in(position, message))
        is_new = waiting.reason is HoleReason.NEVER_DELIVERED and not fills_hole
        send = self._admission.send_new if is_new else self._admission.send_again
        if not send(position, sent, now_ms=batch.now_ms):
            return False
        self.waiting.take(position)
        batch.deliveries.append(self._delivery(position, message, waiting.delivery_count))
        return True

    def _delivery(self, position: Position, message: Message, redelivery_count: int) -> Delivery:
        words = self._cursor.batch.get(position) if message.message_count > 1 else None
        return Delivery(position, message, redelivery_count, tuple(words or ()))

    def _hand_over(self, delivery: Delivery, dead_letters: DeadLetterPolicy, *, now_ms: int) -> bool:
        """Give a message away and ack it; if a limit has no room for the ack, or either fails, it waits on."""
        position = delivery.position
        try:
            self._admission.make_room(position, now_ms=now_ms)
        except AckRefusedError:
            return False
        try:
            dead_letters.hand_over(delivery)
            receipt = self._admission.ack(position, lambda: self._cursor.ack(position, now_ms=now_ms), now_ms=now_ms)
        except BaseException as error:
            # For a while: whoever takes dead letters may be out of order, and the others are not to wait for that.
            if position in self.waiting:
                waiting = self.waiting.take(position)
                self.put(position, waiting._replace(until_ms=now_ms + _HAND_OVER_RETRY_MS))
            if isinstance(error, AckRefusedError):
                return True
            raise
        self.acked(position, receipt.newly_acked)
        return True

    def _is_delayed(self, position: Position, message: Message, *, now_ms: int) -> bool:
        # The view is told of messages without a delay too: it must know how far the reader is.
        if self._delays is None:
            return False
        if self._delays.add_message(position, deliver_at_ms=message.deliver_at_ms, now_ms=now_ms):
            return True
        if message.deliver_at_ms <= now_ms:
            return False
        # The tracker rounds, or holds on to a clock that had run ahead: what the message itself says is what counts.
        heapq.heappush(self._early, (message.deliver_at_ms, position))
        return True

    def _read(self, positions: Sequence[Position], before: Position, *, now_ms: int) -> list[tuple[Position, Message]]:
        try:
            return self._readable(positions, now_ms=now_ms)
        except BaseException:
            self._cursor.rewind(before)
            raise

    def _readable(self, positions: Sequence[Position], *, now_ms: int) -> list[tuple[Position, Message]]:
        """Return the messages that can be read; the others, lost or damaged, wait for a while and hold nobody up."""
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
                lost = Waiting(HoleReason.DATA_LOST, key=self._consumers.sticky_key(position, None))
                waiting = self.waiting.take(position) if position in self.waiting else lost
                self.put(position, waiting._replace(until_ms=now_ms + _UNREADABLE_RETRY_MS))
            else:
                readable.append((position, message))
        return readable

    def _not_sent(self, positions: Iterable[Position], *, now_ms: int) -> Iterable[Position]:
        """Leave out what a hole was filled with before its turn, and what is known to be delayed without a look."""
        deliveries = self._admission.deliveries
        unsent = (each for each in positions if each not in deliveries and each not in self.waiting)
        skip = self._skip
        return unsent if skip is None else (each for each in unsent if not skip(each, now_ms=now_ms))

    def _unacked_in(self, position: Position, message: Message) -> int:
        """Return how many messages of an entry are not acked."""
        words = self._cursor.batch.get(position) if message.message_count > 1 else None
        if words is None:
            return message.message_count
        return max(1, min(_unacked_count(words), message.message_count))

    def _holds_order(self) -> bool:
        """Tell whether what waits must go before anything unread, though its time has not come."""
        return self._consumers.active is not None and len(self.waiting) > 0

    def _owner(self, consumer: str) -> str:
        return consumer if self._consumers.needs_keys else ANYONE


def _unacked_count(words: Sequence[int]) -> int:
    """Count the unacked messages of a batch, given Pulsar's words: signed, a bit for each."""
    return sum((word & (2**64 - 1)).bit_count() for word in words)
