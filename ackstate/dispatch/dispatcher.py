"""Chooses the messages that a consumer receives next."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, final

from ackstate.dispatch.consumers import ANYONE
from ackstate.dispatch.hole_report import HoleReason
from ackstate.dispatch.limit_usage import ACK_STATE_RULES
from ackstate.dispatch.replay_queue import Waiting
from ackstate.dispatch.sender import Sender
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.dispatch.admission import Admission
    from ackstate.dispatch.consumers import Consumers
    from ackstate.dispatch.delivery import Batch
    from ackstate.dispatch.options import SubscriptionOptions
    from ackstate.dispatch.unacked_messages import UnackedMessages
    from ackstate.position_set import PositionSet
    from ackstate.topic.message_log import Message

_READ_AHEAD_COUNT = 1_000
# A dispatch that sent something stops after this many holes of which nothing could be sent; the next continues there.
_REFUSED_HOLES_MAX = 256
_LOWEST, _END = Position(0, 0), Position(LEDGER_ID_MAX, ENTRY_ID_MAX + 1)


@final
class Dispatcher:
    """Sends to one consumer at a time: queued messages first, the lowest first, then messages that were never read.

    While a limit of the ack state keeps new messages back, messages that fill ack holes are still sent, the lowest hole
    first: queued messages, and unread ones below the highest acked. The next dispatch goes on above the last of them,
    and from the lowest again after the highest: a message that nobody can ack does not starve the others.

    Args:
        cursor: The ack state.
        messages: The unacked messages.
        admission: Decides which messages may be sent.
        consumers: The open consumers.
        options: How far to read ahead, and where dead letters go.

    Attributes:
        sender: Sends the chosen messages.
        binds: Whether a limit of the ack state kept new messages back the last time.
    """

    def __init__(
        self,
        cursor: ManagedCursor,
        messages: UnackedMessages,
        *,
        admission: Admission,
        consumers: Consumers,
        options: SubscriptionOptions,
    ) -> None:
        self._cursor = cursor
        self._messages = messages
        self._admission = admission
        self._consumers = consumers
        self._look_ahead_max = options.look_ahead_max
        self.sender = Sender(
            cursor, messages, admission=admission, consumers=consumers, dead_letters=options.dead_letters
        )
        self._waiting, self._delayed = messages.waiting, messages.delayed
        self._reader = messages.reader
        self.binds = False
        self._hole_turns: dict[str, Position] = {}  # by owner: where to go on filling holes

    def dispatch(self, batch: Batch) -> None:
        """Send messages to a consumer, up to its room and the limits.

        Raises:
            StoreError: The log could not be read; the batch has the messages that were sent before.
        """
        self.begin(now_ms=batch.now_ms)
        self.queue_due(self.missing(batch.consumer, batch.room), now_ms=batch.now_ms)
        if self.admits_new(batch.consumer, now_ms=batch.now_ms):
            if self.send_waiting(batch) and batch.room and not self.holds_order():
                self._send_unread(batch)
            if self._admission.refused_by not in ACK_STATE_RULES:
                return
        if batch.room:
            self.fill_holes(batch)

    def admits_new(self, consumer: str = "", *, now_ms: int) -> bool:
        """Return whether no limit of the ack state keeps new messages back, after a persist of young acks if one does.

        If one does, the gate learns of the waiting message. It reports since when it waits, and wakes its waiters once
        it has room.
        """
        has_unread = self._cursor.reader.has_unread
        if has_unread:
            self._admission.promote_young(now_ms=now_ms)
        if not self._admission.usage.binding(consumer):
            self.binds = False
            self._admission.refused_by = None
            return True
        if has_unread:
            self._admission.request_new(consumer, now_ms=now_ms)
        return False

    def next_wake_ms(self, *, now_ms: int) -> int | None:
        """Return when to dispatch again because some time will have come; None if no message waits for a time."""
        times = [self._waiting.next_until_ms, self._admission.promote_again_ms]
        # A due message that a limit keeps back waits for that limit, not for a time.
        is_refused = self._admission.refused_by is not None
        times += [time for time in self._delayed.next_due_ms if not is_refused or time > now_ms]
        return min((time for time in times if time is not None), default=None)

    def begin(self, *, now_ms: int) -> None:
        """Update the queue: some of its messages may be acked, and the time of others may have come."""
        self._messages.notice_acks_elsewhere()
        self._waiting.release(now_ms=now_ms)

    def missing(self, consumer: str, room: int) -> int:
        """Return how many of `room` messages for a consumer are not queued."""
        if self.binds:  # The queued messages may have to wait, and a due message may fill a hole.
            return room
        return max(0, room - len(self._waiting.ready_for(self._owner(consumer))))

    def queue_due(self, room: int, *, now_ms: int) -> int:
        """Queue messages that are due now, about `room` of them, and return how many."""
        due = self._delayed.take_due(room, now_ms=now_ms)
        keys: list[tuple[Position, bytes | None]] = [(position, None) for position in due]
        if self._consumers.needs_keys:
            read = self._reader.read(due, now_ms=now_ms)
            self._reader.keep(read)
            keys = [(position, self._consumers.sticky_key(position, message.key)) for position, message in read]
        for position, key in keys:
            self._messages.put(position, Waiting(HoleReason.DELAYED, key=key))
        self._delayed.queued()
        return len(due)

    def send_waiting(self, batch: Batch) -> bool:
        """Send queued messages, the lowest first; return whether none of them was refused."""
        while batch.room:
            positions = self._lowest_waiting(batch)
            if not positions:
                return True
            read, at = self._reader.read(positions, now_ms=batch.now_ms), 0
            while at < len(read) and batch.room:
                count = self._send_unsent(read, batch, at=at)
                # The receiver of dead letters may have acked others.
                if not count and (read[at][0] not in self._waiting or self.sender.send_queued(*read[at], batch)):
                    count = 1
                if not count:
                    self._reader.keep(read[at:])
                    return False
                at += count
            self._reader.keep(read[at:])  # Batches took the permits that were meant for these.
        return True

    def _send_unsent(self, read: Sequence[tuple[Position, Message]], batch: Batch, *, at: int) -> int:
        """Send queued messages from an index on that were never sent, all at once; return how many were sent."""
        waiting, now_ms = self._waiting, batch.now_ms
        end = at
        for position, message in islice(read, at, None):
            state = waiting.get(position)
            if state is None or state.reason is not HoleReason.NEVER_DELIVERED or message.deliver_at_ms > now_ms:
                break
            end += 1
        sent_count = self.sender.send_new(read[at:end], batch) if end - at > 1 else 0
        waiting.take_all(self._owner(batch.consumer), [position for position, _ in read[at : at + sent_count]])
        return sent_count

    def _lowest_waiting(self, batch: Batch) -> list[Position]:
        while positions := list(islice(self._waiting.ready_for(self._owner(batch.consumer)), batch.room)):
            acked = self._cursor.view.acked_among(positions)
            if not acked:
                break
            for position in acked:
                self._waiting.take(position)
        return positions

    def _send_unread(self, batch: Batch) -> None:
        if self._consumers.needs_keys:
            self._look_ahead(batch)
            return
        while batch.room:
            before = self._cursor.read_position
            read = self.read_unread(batch.room, now_ms=batch.now_ms)
            if not self._send_read(read, batch) or self._cursor.read_position == before:
                return

    def read_unread(self, count: int, *, now_ms: int, last: Position | None = None) -> list[tuple[Position, Message]]:
        """Move the reader by up to `count` entries, not past `last`, and return those of them that need not wait.

        After an error the reader is where it was.
        """
        before = self._cursor.read_position
        with self._delayed.reading(before):
            try:
                positions = self._cursor.reader.read(count)
                if last is not None and positions and positions[-1] > last:
                    self._cursor.reader.rewind(next(position for position in positions if position > last))
                    positions = [position for position in positions if position <= last]
                # A hole may have been filled with some before their turn.
                for passed in (self._admission.deliveries.in_order(), self._waiting.in_order()):
                    if positions and passed.has_between(positions[0], positions[-1]):
                        positions = [position for position in positions if position not in passed]
                read = self._reader.read(self._delayed.to_read(positions, now_ms=now_ms), now_ms=now_ms)
                return self._delayed.without_early(read, now_ms=now_ms)
            except BaseException:
                self._cursor.reader.rewind(before)
                raise

    def _send_read(self, read: Sequence[tuple[Position, Message]], batch: Batch) -> bool:
        """Send messages that were just read; return False if one was refused: the reader comes to it again."""
        at = 0
        try:
            at = self.sender.send_new(read, batch)
        finally:
            self.put_back(read[at:])
        return at == len(read)

    def put_back(self, unsent: Sequence[tuple[Position, Message]]) -> None:
        """Move the reader back, so that it reads these messages again, and all above them."""
        if unsent:
            self._cursor.reader.rewind(unsent[0][0])
            self._reader.keep(unsent)

    def _look_ahead(self, batch: Batch) -> None:
        """Read on for all consumers: the messages of a slow one are queued, and hold up no other."""
        look_ahead_max = self._look_ahead_max
        while batch.room and len(self._waiting) < look_ahead_max:
            before = self._cursor.read_position
            room = look_ahead_max - len(self._waiting)
            read = self.read_unread(min(max(batch.room, 100), room), now_ms=batch.now_ms)
            mine, others = self._divided(read, batch)
            sent_count = 0
            try:
                sent_count = self.sender.send_new(mine, batch)
            finally:
                self.queue((*mine[sent_count:], *others))
            if sent_count < len(mine) or self._cursor.read_position == before:
                return

    def _divided(
        self, read: Sequence[tuple[Position, Message]], batch: Batch
    ) -> tuple[list[tuple[Position, Message]], list[tuple[Position, Message]]]:
        """Return the messages that the consumer of a batch receives now, and those that are queued."""
        mine: list[tuple[Position, Message]] = []
        others: list[tuple[Position, Message]] = []
        consumers, waiting_keys, consumer, room = self._consumers, self._waiting.keys, batch.consumer, batch.room
        for each in read:
            key = consumers.sticky_key(each[0], each[1].key)
            # The messages of a key are sent in order.
            is_mine = len(mine) < room and consumers.owner(key) == consumer and key not in waiting_keys
            (mine if is_mine else others).append(each)
        return mine, others

    def queue(self, read: Sequence[tuple[Position, Message]]) -> None:
        """Queue messages that were just read."""
        self._reader.keep(read)
        new, reason, key_of = tuple.__new__, HoleReason.NEVER_DELIVERED, self._consumers.sticky_key
        waiting = [new(Waiting, (reason, 0, key_of(position, message.key), "", 0)) for position, message in read]
        self._waiting.put_all([position for position, _ in read], waiting)

    def fill_holes(self, batch: Batch) -> None:
        """Send messages that fill holes, the lowest hole first, from where the last dispatch stopped."""
        self.binds = True
        owner, view = self._owner(batch.consumer), self._cursor.view
        turn = self._hole_turns.get(owner, _LOWEST)
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
            unread, highest = self._cursor.read_position, self._cursor.deleted.last_range()
            if highest is None or not self._read_ahead(batch.now_ms, count=_READ_AHEAD_COUNT, last=highest[1]):
                return
            parts = [(unread, _END)]

    def forget_owner(self, consumer: str) -> None:
        """Forget where to go on filling holes for a consumer that is gone."""
        self._hole_turns.pop(consumer, None)

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
                self._hole_turns[owner] = Position(ledger_id, position.entry_id + 1)
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
        for read in self._reader.read([position], now_ms=batch.now_ms):
            if not self.sender.send_queued(*read, batch, fills_hole=fills_hole):
                self._reader.keep([read])

    def _read_ahead(self, now_ms: int, *, count: int, last: Position | None = None) -> bool:
        """Queue unread messages, up to a position, unless they are delayed; return whether there was one."""
        before = self._cursor.read_position
        if last is not None and before > last:
            return False
        self.queue(self.read_unread(count, now_ms=now_ms, last=last))
        return self._cursor.read_position != before

    def holds_order(self) -> bool:
        """Return whether queued messages must go before unread ones, though their time has not come."""
        return self._consumers.active is not None and len(self._waiting) > 0

    def _owner(self, consumer: str) -> str:
        return consumer if self._consumers.needs_keys else ANYONE
