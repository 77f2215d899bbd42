"""The unacked messages of a subscription, by where they are: in flight, queued for sending, or delayed."""

from __future__ import annotations

import heapq
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, final

from ackstate.dispatch.hole_report import HoleReason
from ackstate.dispatch.replay_queue import ReplayQueue, Waiting
from ackstate.entry_bitmap import bitmaps_of
from ackstate.errors import AckStateError, CorruptStateError
from ackstate.position_set import PositionSet
from ackstate.stores.base import LedgerNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pyroaring import BitMap

    from ackstate.ack_hole import AckHole
    from ackstate.cursor.managed import ManagedCursor
    from ackstate.delay.view import AckedAndSent, DelayedDeliveryTracker
    from ackstate.dispatch.admission import Admission
    from ackstate.dispatch.consumers import Consumers
    from ackstate.dispatch.deliveries import Sent
    from ackstate.dispatch.delivery import Batch
    from ackstate.position import Position
    from ackstate.topic.message_log import Message, MessageLog


@final
class DelayedMessages:
    """A dispatcher's access to its tracker, and the messages that the tracker has handed out too early.

    The log reports delayed messages to a shared index when they are published. So the reader skips them unread, and
    they are read once, to be sent.

    Args:
        tracker: The delayed messages; None delivers every message at once.
        log: The topic's messages.
        cursor: The ack state.
        subscription: Reports the acked and sent messages to the tracker.
    """

    def __init__(
        self,
        tracker: DelayedDeliveryTracker | None,
        log: MessageLog,
        cursor: ManagedCursor,
        *,
        subscription: AckedAndSent,
    ) -> None:
        self._tracker = tracker
        self._cursor = cursor
        self._due: list[Position] = []  # handed out by the tracker, and not queued yet
        self._early: list[tuple[int, Position]] = []  # a heap: the tracker would deliver them before their time
        if tracker is None:
            return
        tracker.attach(subscription)
        if tracker.shared_index is not None:
            log.feed(tracker.shared_index)

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
        """Return those of some messages that need not wait; see `must_wait`.

        Args:
            read: Messages that were read, in order.
            now_ms: The present.
        """
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
        while (early_ms := self.next_early_ms) is not None and early_ms <= now_ms:
            self._due.append(heapq.heappop(self._early)[1])
        # Some trackers do not know acks, and a stale one has messages that the log has not: they take no one's place.
        while count > 0 and (due_now := self._tracker.scheduled_messages(count, now_ms=now_ms)):
            unacked = [position for position in due_now if self._cursor.view.is_unacked(position)]
            self._due += unacked
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
        taken_out = sum(self._cursor.view.is_unacked(position) for position in self)
        return self._tracker.delayed_message_count + taken_out

    def fills(self, hole: AckHole) -> bool:
        """Return whether all messages of a hole are known to be delayed and not yet due."""
        if self._tracker is None:
            return False
        end = hole.first_position._replace(entry_id=hole.end)
        return self._tracker.count_between(hole.first_position, end) == hole.entry_count

    @property
    def next_early_ms(self) -> int | None:
        """When the next message is due that the tracker would have delivered before; None without one."""
        while self._early and not self._cursor.view.is_unacked(self._early[0][1]):
            heapq.heappop(self._early)
        return self._early[0][0] if self._early else None

    @property
    def next_due_ms(self) -> list[int]:
        """When the tracker hands out the next message, and when the next of the early ones is due."""
        times = () if self._tracker is None else (self._tracker.next_delivery_ms, self.next_early_ms)
        return [time for time in times if time is not None]

    def mark_delete_persisted(self, position: Position) -> None:
        """Report the durable mark-delete position to the tracker."""
        if self._tracker is None:
            return
        try:
            self._tracker.advance_mark_delete(position)
        except ValueError as error:
            # It was closed from outside, which the next dispatch reports; the persist itself has succeeded.
            _LOG.warning("the durable acks cannot be reported to the tracker of delayed messages: %s", error)

    def forget(self) -> None:
        """Forget all delayed messages: all are acked, or the reader comes to them again."""
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


_LOG = logging.getLogger(__name__)
_KEPT_BYTES_MAX = 4 << 20
_MESSAGE_BYTES = 250  # of a message beside its payload and key, with its entry in a dict


@final
class MessageReader:
    """Reads messages from the log, and keeps those that were read and not sent.

    Kept messages take at most 4 MiB; beyond that the first ones are dropped, and read again.

    Args:
        log: The topic's messages.
        postpone: Called with each message that is lost or damaged, and the present.

    Attributes:
        kept: The kept messages: to be read, not changed.
    """

    def __init__(self, log: MessageLog, *, postpone: Callable[[Position, int], None]) -> None:
        self._log = log
        self._postpone = postpone
        self.kept: dict[Position, Message] = {}
        self._kept_bytes = 0

    def read(self, positions: Sequence[Position], *, now_ms: int) -> list[tuple[Position, Message]]:
        """Return the messages at positions, in their order, without the unreadable ones; none of them is kept.

        Raises:
            StoreError: The store failed; the messages are kept or not as before.
        """
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
        while self._kept_bytes > _KEPT_BYTES_MAX:
            self.forget((next(iter(self.kept)),))

    def forget(self, positions: Iterable[Position]) -> None:
        """Drop the messages at positions, such as acked ones, if they are kept."""
        kept = self.kept
        for position in positions if kept else ():
            message = kept.pop(position, None)
            if message is not None:
                self._kept_bytes -= _size(message)

    def forget_up_to(self, position: Position) -> None:
        """Drop the messages up to a position, included. Complexity: O(kept)."""
        self.forget([each for each in self.kept if each <= position])

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


_UNREADABLE_RETRY_MS = 60_000


@final
class UnackedMessages:
    """Follows each message that the reader has passed until it is acked.

    Args:
        log: The topic's messages.
        cursor: The ack state.
        delays: Its delayed messages; None delivers every message at once.
        admission: Holds the messages in flight.
        consumers: The open consumers.

    Attributes:
        waiting: The messages that wait to be sent.
        delayed: The messages that are not yet due.
        reader: Reads the messages.
        dead_lettered_messages: How many messages were ever handed over as dead letters, those of a batch one by one.
    """

    def __init__(
        self,
        log: MessageLog,
        cursor: ManagedCursor,
        *,
        delays: DelayedDeliveryTracker | None,
        admission: Admission,
        consumers: Consumers,
    ) -> None:
        self._admission = admission
        self._gate = admission.gate
        self._round_waiter = admission.round_waiter
        self.waiting = ReplayQueue(consumers.owners, became_ready=self._round_waiter.messages_came)
        self.delayed = DelayedMessages(delays, log, cursor, subscription=self)
        self.reader = MessageReader(log, postpone=self._postpone)
        self._cursor = cursor
        self._consumers = consumers
        self._acked_count = cursor.view.acked_count  # as far as it was reported here
        self._queued = self.waiting.positions  # follows the queue
        self.dead_lettered_messages = 0

    def withdraw(self, batch: Batch) -> None:
        """Queue the messages of a batch that never reached its consumer."""
        for position, sent in self._complete([delivery.position for delivery in batch.deliveries]):
            self._admission.deliveries.uncount(sent)
            count = sent.delivery_count - 1
            reason = HoleReason.OWNER_GONE if count else HoleReason.NEVER_DELIVERED
            self.put(position, Waiting(reason, count, sent.key))
        self._admission.refresh()

    def give_back(self, positions: Sequence[Position], reason: HoleReason, *, until_ms: int = 0) -> int:
        """Queue messages that were in flight, and return how many those were, the messages of a batch one by one."""
        completed = self._complete(positions)
        for position, sent in completed:
            if not self._cursor.is_acked(position):
                self.put(position, Waiting(reason, sent.delivery_count, sent.key, sent.consumer, until_ms))
        return sum(sent.message_count for _, sent in completed)

    def put(self, position: Position, waiting: Waiting) -> None:
        """Queue a message, unless it is queued or in flight."""
        if position not in self.waiting and position not in self._admission.deliveries:
            self.waiting.put(position, waiting)

    def acked(self, position: Position, newly_acked: int, *, now_ms: int) -> None:
        """Note an ack: the message is neither in flight nor queued."""
        sent = self._admission.complete(position)
        if sent is not None and sent.key is not None:
            self._release((sent.key,))
        self._acked_count += newly_acked
        if position in self._queued:
            self.waiting.take(position)
        # Each ack comes here, so nothing is called that has no work.
        if self.reader.kept:
            self.reader.forget((position,))
        if self._round_waiter.wants_room or (self._gate is not None and self._gate.is_closed):
            self._admission.usage_decreased(now_ms=now_ms, of=sent.consumer if sent is not None else None)

    def acked_all(
        self, positions: Sequence[Position], entries: Mapping[int, BitMap], newly_acked: int, *, now_ms: int
    ) -> None:
        """Note acks, as `acked` for each; `entries` are the same positions by ledger."""
        self._complete(positions, entries)
        self._acked_count += newly_acked
        if self.waiting.in_order().has_any(entries):
            for position in self._queued & set(positions):
                self.waiting.take(position)
        self.reader.forget(positions)
        self._admission.usage_decreased(now_ms=now_ms)

    def acked_in_batch(self, position: Position, *, now_ms: int) -> None:
        """Note that messages of a batch in flight were acked, and that others of it were not."""
        sent = self._admission.deliveries.get(position)
        words = self._cursor.view.batch.get(position)
        if sent is not None and words is not None:
            self._admission.reduce(position, max(1, _unacked_count(words)))
        self._admission.usage_decreased(now_ms=now_ms)

    def completes_batch(self, position: Position, unacked_words: Sequence[int]) -> bool:
        """Return whether an ack that leaves these messages of a batch unacked acks the last unacked ones."""
        known = self._cursor.view.batch.get(position)
        return not any(unacked_words) or (
            known is not None and not any(before & after for before, after in zip(known, unacked_words, strict=False))
        )

    def acked_up_to(self, position: Position, newly_acked: int, *, now_ms: int) -> None:
        """Note that everything up to a position was acked."""
        self._complete(self._admission.deliveries.at_most(position))
        self._acked_count += newly_acked
        for each in self.waiting.up_to(position):
            self.waiting.take(each)
        self.reader.forget_up_to(position)
        self._admission.usage_decreased(now_ms=now_ms)

    def clear(self) -> None:
        """Forget everything: the reader restarts elsewhere, and nothing is in flight."""
        self._admission.clear()
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

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        self._cursor.view.discard_acked(ledger_id, entries)

    def not_sent_between(self, first: Position, end: Position) -> PositionSet:
        unsent = PositionSet()
        for ledger_id, entries in self._cursor.view.unacked_between(first, min(end, self._cursor.read_position)):
            unsent.update_entries(ledger_id, entries)
        unsent.difference_update(self._admission.deliveries.in_order())
        unsent.difference_update(self.waiting.in_order())
        for position in self.delayed:
            unsent.discard(position)
        return unsent

    def _complete(
        self, positions: Sequence[Position], entries: Mapping[int, BitMap] | None = None
    ) -> list[tuple[Position, Sent]]:
        """Take messages out of flight, release their keys, and return those that were in flight."""
        completed = self._admission.complete_all(positions, bitmaps_of(positions) if entries is None else entries)
        if completed and self._consumers.needs_keys:
            self._release([sent.key for _, sent in completed])
        return completed

    def _release(self, keys: Sequence[bytes | None]) -> None:
        for key in self._consumers.release(keys):
            self.waiting.key_moved(key)

    def notice_acks_elsewhere(self) -> None:
        """Remove queued messages that were acked with the cursor itself, past the subscription.

        Complexity: O(1) if there was none, else O(containers of the queue + queued messages that were acked).
        """
        acked_count = self._cursor.view.acked_count
        if self._acked_count == acked_count:
            return
        self._acked_count = acked_count
        acked, unacked = PositionSet(), PositionSet()
        for each in (acked, unacked):
            each.update(self.waiting.in_order())
        unacked.apply(self._cursor.view.discard_acked)
        acked.difference_update(unacked)
        for position in acked:
            self.waiting.take(position)

    def _postpone(self, position: Position, now_ms: int) -> None:
        """Postpone a message that cannot be read, so that it delays no other."""
        lost = Waiting(HoleReason.DATA_LOST, key=self._consumers.sticky_key(position, None))
        waiting = self.waiting.take(position) if position in self.waiting else lost
        self.put(position, waiting._replace(until_ms=now_ms + _UNREADABLE_RETRY_MS))


def _unacked_count(words: Sequence[int]) -> int:
    """Count the unacked messages of a batch, given Pulsar's words: signed, a bit for each."""
    return sum((word & (2**64 - 1)).bit_count() for word in words)
