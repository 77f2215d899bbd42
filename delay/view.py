"""Which delayed messages are due for one subscription?

The index forgets a message when it falls due, whether or not this subscription's reader has met it. Of the
due log a view therefore keeps what its reader has passed, since the reader skipped it; what lies ahead it
drops, since the reader will meet it, and then as a message that is due. So a view remembers no message before
it is due, only how far its reader is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate import Position
from delay.position_set import PositionSet
from delay.tracker import DelayedDeliveryTracker

if TYPE_CHECKING:
    from collections.abc import Callable

    from delay.index import DueBatch, TopicDelayIndex

# Bounds of a window that holds nothing and that the first position fits into by `min` and `max`.
_ABOVE_ALL = Position(2**63, 0)
_BELOW_ALL = Position(0, 0)


@final
class SubscriptionDelayView(DelayedDeliveryTracker):
    """The delayed messages of one subscription: a view of its topic's index, made by `open_view` of that.

    Each message that is not acked is handed out once between two calls of `clear`, or was answered with
    "deliver it now", if the dispatcher keeps to this:

    - It offers by `add_message` every message that it reads, delayed or not, in reading order. A message may
    be offered
      again at any time: one that waits is answered True again and still handed out once, one that was handed
      out or delivered False.
    - It offers a message with the same `deliver_at_ms` always, and all subscriptions of the topic give the
    same. - When it begins to read anew from further back it calls `clear` first.

    Use after `close` raises `ValueError`. Not safe for concurrent mutation, with the index and its other
    views.
    """

    def __init__(self, index: TopicDelayIndex, *, is_acked: Callable[[Position], bool]) -> None:
        self._open_index: TopicDelayIndex | None = index
        self._is_acked = is_acked
        # The positions passed by the reader since it began: from _first, included, to _end, excluded.
        self._first = _ABOVE_ALL
        self._end = _BELOW_ALL
        # Due, passed by the reader, not handed out.
        self._due = PositionSet()
        self._unread = index.log_end

    @property
    def unread(self) -> DueBatch:
        """The first batch of the due log that this view has yet to read."""
        return self._unread

    def add_message(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Say whether a message that the reader has met must wait; see `DelayedDeliveryTracker.add_message`.

        Complexity: O(log buckets), and once for each batch of the due log what reading it costs.
        """
        is_held = self._index.add(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)
        # Before the window grows: what fell due ahead of the reader is dropped, and this may be among it.
        self._read_due_log()
        if position < self._first:
            self._first = Position(*position)
        if position >= self._end:
            self._end = Position(position[0], position[1] + 1)
        return is_held or position in self._due

    def has_message_available(self, *, now_ms: int) -> bool:
        """Say whether `scheduled_messages` would hand out anything now."""
        self._index.advance(now_ms)
        self._read_due_log()
        for position in self._due:
            if not self._is_acked(position):
                self._due.remove_below(position)
                return True
        self._due.clear()
        return False

    def scheduled_messages(self, max_messages: int, *, now_ms: int) -> list[Position]:
        """Hand out the lowest due positions that are not acked, at most `max_messages`, in order.

        An error from `is_acked` passes through and nothing is handed out.
        """
        if max_messages < 0:
            raise ValueError(f"max_messages is {max_messages}: it cannot be negative")
        self._index.advance(now_ms)
        self._read_due_log()
        handed_out: list[Position] = []
        for position in self._due:
            if self._is_acked(position):
                continue
            if len(handed_out) == max_messages:
                self._due.remove_below(position)
                return handed_out
            handed_out.append(position)
        self._due.clear()
        return handed_out

    @property
    def delayed_message_count(self) -> int:
        """How many messages the reader has passed that wait to be due or to be handed out.

        One that was acked meanwhile counts until it is due and a poll comes by it.

        Complexity: O(ledgers).
        """
        self._read_due_log()
        return self._index.count_between(self._first, self._end) + len(self._due)

    @property
    def memory_bytes(self) -> int:
        """About how much memory the topic's index and this view take.

        The index is shared: for a topic's total add `TopicDelayIndex.memory_bytes` once, not this of each
        view.

        Complexity: O(bitmaps + views).
        """
        self._read_due_log()
        return self._index.memory_bytes + self._due.memory_bytes

    def should_pause_all_deliveries(self, *, now_ms: int) -> bool:
        """Return False always: a view does not look for a fixed delay.

        To pause is safe only while all the delays that a reader met were equal, and a view keeps no such
        history. So with a long fixed delay the reader goes through the whole backlog, where Pulsar's own
        tracker would stop it.
        """
        self._index.advance(now_ms)
        return False

    @property
    def next_delivery_ms(self) -> int | None:
        """When to ask again; at once, by the latest time seen, if something is due already.

        Nothing of this subscription is due before. What is due then may be another's: a spare wake-up.
        """
        self._read_due_log()
        return self._index.now_ms if self._due else self._index.next_due_ms

    def reset_tick_time(self, tick_time_ms: int) -> None:
        """Round the times of messages added from now on to another tick, for the whole topic."""
        self._index.reset_tick_time(tick_time_ms)

    def clear(self) -> None:
        """Forget every message of this subscription; the reader begins anew, what is not acked comes again.

        What is not yet due stays in the index, where it may stand for other subscriptions, until it is due.
        """
        self._unread = self._index.log_end
        self._first, self._end = _ABOVE_ALL, _BELOW_ALL
        self._due.clear()

    def close(self) -> None:
        """Let go of the index, which waits for this view no longer; once closed, do nothing."""
        if self._open_index is not None:
            self.clear()
            self._open_index.detach(self)
            self._open_index = None

    @property
    def _index(self) -> TopicDelayIndex:
        if self._open_index is None:
            raise ValueError("the view is closed; open another one from the topic's index")
        return self._open_index

    def _read_due_log(self) -> None:
        """Take from the due log what the reader has passed."""
        batch = self._unread
        while batch.next is not None:
            self._due.update_between(batch.positions, first=self._first, end=self._end)
            batch = batch.next
        self._unread = batch
