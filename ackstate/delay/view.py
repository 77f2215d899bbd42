"""The delayed messages of one subscription, as a view of its topic's index.

The index forgets a message when it falls due, whether or not this subscription's reader has met it. A view takes the
messages of the due log that its reader has passed, since the reader skipped them. It drops those ahead of the reader,
since the reader will meet them as messages that are due. So a view stores no message before it is due, only how far its
reader is.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.delay.due_log import batches_from
from ackstate.delay.position_set import PositionSet
from ackstate.delay.tracker import DelayedDeliveryTracker, check_message, check_time
from ackstate.entry_bitmap import bitmaps_of
from ackstate.integers import check_count, integer
from ackstate.position import Position, check_position, positions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ackstate.delay.due_log import DueBatch
    from ackstate.delay.shared_index import SharedDelayIndex
    from ackstate.delay.tracker import AckedAndSent

# Bounds of an empty window, such that the first position extends it by `min` and `max`.
_ABOVE_ALL = Position(2**63, 0)
_BEFORE_ALL = Position(0, -1)
_LOWEST = Position(0, 0)


@final
class SubscriptionDelayView(DelayedDeliveryTracker):
    """The delayed messages of one subscription: a view of its topic's index, made by `open_view` of that.

    Each message that is not acked is handed out once between two calls of `clear`, or was answered with "deliver it
    now", if the dispatcher keeps to this:

    - It offers by `add_message`, or names by `skip`, every message that it comes to, delayed or not, in reading order.
      A message may be offered again at any time. The answer is True again for a message that waits, which is still
      handed out once, and False for one that was handed out or delivered. If the index is fed, the dispatcher may
      instead offer nothing. Then it is handed all messages that fall due, or only those that it has passed if it
      reports its position by `passed`. Between two calls of `clear` it does either the one or the other.
    - It always offers a message with the same `deliver_at_ms`, and so do all subscriptions of the topic.
    - Before it restarts further back, it calls `clear`.

    A view that lags far behind the due log is cut off from it. Messages that fell due since are then collected in the
    view's own memory. If the view is attached to its subscription they are derived instead, when the view is polled:
    every message that the reader has passed, that no consumer has, and that is not in the index, is due.

    Use after `close` raises `ValueError`. One thread at a time; other views of the topic may be used by other threads.
    """

    __slots__ = (
        "_caught_up", "_due", "_first", "_is_acked", "_is_cut_off", "_last", "_open_index", "_subscription",
        "mark_delete_ledger_id", "unread",
    )  # fmt: skip

    def __init__(self, index: SharedDelayIndex, *, is_acked: Callable[[Position], bool]) -> None:
        self._open_index: SharedDelayIndex | None = index
        self._is_acked = is_acked
        self._subscription: AckedAndSent | None = None
        self._due = PositionSet()  # read from the log; for the view's own thread only
        # The lock of the index guards all that follows.
        self._caught_up: PositionSet | None = None  # read from the log on behalf of the view
        self._is_cut_off = False
        # The first and the last message that the reader has passed; at first an empty window.
        self._first, self._last = _ABOVE_ALL, _BEFORE_ALL
        self.mark_delete_ledger_id = 0
        with index.lock:
            self.unread: DueBatch = index.due_log.end
            index.due_log.readers.add(self)
            index.drop_before(0)  # The reader may start anywhere.

    def attach(self, subscription: AckedAndSent) -> None:
        """Register the subscription, which can report more than `is_acked`: faster, and O(1) memory for any lag."""
        self._subscription = subscription

    def add_message(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Return whether a message that the reader has met must wait; see `DelayedDeliveryTracker.add_message`.

        Complexity: O(1), and once for each batch of the due log the cost of reading it.
        """
        position, deliver_at_ms, now_ms = check_message(position, deliver_at_ms, now_ms)
        index = self._index
        while True:
            index.lock.acquire()  # half the time of `with`
            try:
                index.move_due(now_ms)
                if not self._is_cut_off:
                    is_held = index.hold(position, deliver_at_ms)
                    # Before the window grows: messages that fell due ahead of the reader are dropped, perhaps this one.
                    self._read_due_log()
                    self._pass(position)
                    return is_held or position in self._due
            finally:
                index.lock.release()
            self._derive()

    @property
    def shared_index(self) -> SharedDelayIndex:
        """The topic's index; see `DelayedDeliveryTracker`."""
        return self._index

    def reading(self, first: Position) -> AbstractContextManager[object]:
        """Return a context in which to read unread messages; see `DelayedDeliveryTracker.reading`."""
        return self._index.reading(first)

    def skip(self, position: Position, *, now_ms: int) -> bool:
        """Return whether a message that the reader comes to is known to wait; see `DelayedDeliveryTracker.skip`."""
        position, _, now_ms = check_message(position, -1, now_ms)
        index = self._index
        while True:
            index.lock.acquire()  # half the time of `with`
            try:
                index.move_due(now_ms)
                if not self._is_cut_off:
                    is_held = position in index.held
                    # Before the window grows, as in `add_message`.
                    self._read_due_log()
                    if is_held:
                        self._pass(position)
                    return is_held or position in self._due
            finally:
                index.lock.release()
            self._derive()

    def unknown(self, positions: Sequence[Position], *, now_ms: int) -> Sequence[Position]:
        """See `DelayedDeliveryTracker.unknown`. Complexity: bitmap operations, if none of them is known to wait."""
        entries, index, now_ms = bitmaps_of(positions), self._index, check_time(now_ms, name="now_ms")
        with index.lock:
            index.move_due(now_ms)
            if not self._is_cut_off and not index.held.has_any(entries):
                self._read_due_log()
                if not self._due.has_any(entries):
                    return positions
        return super().unknown(positions, now_ms=now_ms)

    def advance_mark_delete(self, position: Position) -> None:
        """Note that everything up to a position, included, is durably acked; see `DelayedDeliveryTracker`.

        Unless it is fed, the index drops a ledger, due or not, once all views have reported it as acked.

        Complexity: O(1), and O(views) when the lowest of them moves to another ledger.
        """
        ledger_id = check_position(position).ledger_id
        with self._index.lock:
            before, self.mark_delete_ledger_id = self.mark_delete_ledger_id, max(self.mark_delete_ledger_id, ledger_id)
            if before < ledger_id:
                self._drop_consumed(before)

    def has_message_available(self, *, now_ms: int) -> bool:
        """Return whether `scheduled_messages` would hand out anything now."""
        self._advance(now_ms)
        found = self._take_unacked(1)
        self._put_back(found)
        return bool(found)

    def scheduled_messages(self, max_messages: int, *, now_ms: int) -> list[Position]:
        """Hand out the lowest due positions that are not acked, at most `max_messages`, in order.

        An error of the subscription passes through and nothing is handed out.

        Complexity: O(ledgers + messages looked at).
        """
        max_messages = integer("max_messages", max_messages)
        check_count("max_messages", max_messages, least=0)
        self._advance(now_ms)
        found = self._take_unacked(max_messages)
        return list(chain.from_iterable(positions_of(*each) for each in found))

    @property
    def delayed_message_count(self) -> int:
        """How many unacked messages the reader has passed that wait to be due or to be handed out.

        Complexity: O(ledgers) if attached, else O(messages counted).
        """
        self._catch_up_now()
        waiting = PositionSet()
        with self._index.lock:
            first, end = self._window()
            waiting.update_between(self._index.held, first=first, end=end)
        waiting.update(self._due)
        waiting.apply(self._discard_acked)
        return len(waiting)

    @property
    def memory_bytes(self) -> int:
        """About how much memory the topic's index and this view take.

        The index is shared: for a topic's total add `TopicDelayIndex.memory_bytes` once, not this of each view.

        Complexity: O(bitmaps + views).
        """
        return self._index.memory_bytes + self.own_memory_bytes

    @property
    def own_memory_bytes(self) -> int:
        """About how much memory the due messages take that were not yet handed out. Complexity: O(bitmaps)."""
        self._catch_up_now()
        return self._due.memory_bytes

    @property
    def next_delivery_ms(self) -> int | None:
        """When to poll again; at once, by the latest time seen, if a message is due already.

        No message of this subscription is due before. The one due then may be another's: a wake-up for nothing.
        """
        self._catch_up_now()
        with self._index.lock:
            return self._index.now_ms if self._due else self._index.next_due_ms

    def clear(self) -> None:
        """Forget every message of this subscription: the reader restarts, and comes to the unacked messages again.

        Messages that are not yet due stay in the index, for other subscriptions.
        """
        with self._index.lock:
            self.unread = self._index.due_log.end
            self._first, self._last = _ABOVE_ALL, _BEFORE_ALL
            self._is_cut_off = False
            self._caught_up = None
            self.mark_delete_ledger_id = 0
            self._index.drop_before(0)
        self._due.clear()

    def close(self) -> None:
        """Leave the index, which waits for this view no longer; no-op if closed."""
        if self._open_index is not None:
            self.clear()
            with self._open_index.lock:
                self._open_index.due_log.readers.discard(self)
                self._drop_consumed(0)
            self._open_index = None

    def catch_up(self) -> None:
        """See `DueLogReader`; called with the index's lock held."""
        if self._subscription is None:
            self._caught_up = self._caught_up or PositionSet()
            self._read_into(self._caught_up)
        elif self.unread.next is not None:
            self._is_cut_off = True
            self.unread = self._index.due_log.end

    @property
    def _index(self) -> SharedDelayIndex:
        if self._open_index is None:
            raise ValueError("the view is closed; open another one from the topic's index")
        return self._open_index

    def _advance(self, now_ms: int) -> None:
        self._catch_up_now(check_time(now_ms, name="now_ms"))

    def _catch_up_now(self, now_ms: int | None = None) -> None:
        index = self._index
        with index.lock:
            if now_ms is not None:
                index.move_due(now_ms)
            self._read_due_log()
        if self._is_cut_off:
            self._derive()

    def _drop_consumed(self, before_ledger_id: int) -> None:
        """Drop ledgers that all have acked, if the lowest mark-delete position may have left a ledger."""
        if self._index.is_fed:
            return  # No one would feed a message again to a subscription that restarts.
        ledger_ids = [reader.mark_delete_ledger_id for reader in self._index.due_log.readers]
        lowest = min(ledger_ids, default=0)
        if lowest > before_ledger_id:
            self._index.drop_before(lowest)

    def _pass(self, position: Position) -> None:
        if position < self._first:  # noqa: PLR1730 - faster than `min`
            self._first = position
        if position > self._last:  # noqa: PLR1730
            self._last = position

    def _window(self) -> tuple[Position, Position]:
        """Return which due messages concern the view: first included, end excluded."""
        if self._first is _ABOVE_ALL and self._index.is_fed:
            return _LOWEST, _ABOVE_ALL
        ledger_id, last = self._last
        return self._first, Position(ledger_id, last + 1)

    def _read_due_log(self) -> None:
        """Take the messages of the due log that the reader has passed."""
        if self._caught_up is not None:
            self._due.update(self._caught_up)
            self._caught_up = None
        if self.unread.next is not None:
            self._read_into(self._due)

    def _read_into(self, due: PositionSet) -> None:
        first, end = self._window()
        log = self._index.due_log
        is_only_reader = len(log.readers) == 1
        for batch in batches_from(self.unread):
            due.update_between(batch.positions, first=first, end=end, is_given_up=is_only_reader)
        self.unread = log.end

    def _derive(self) -> None:
        """Derive the messages that fell due since the view was cut off: not in flight, and not held by the index."""
        assert self._subscription is not None
        # In this order: a message that falls due in between is then in both, the log and the result, not in neither.
        missed = self._subscription.not_sent_between(*self._window())
        with self._index.lock:
            self._is_cut_off = False
            missed.difference_update(self._index.held)
            # Now, before any of it may have been handed out.
            self._read_due_log()
        self._due.update(missed)

    def _take_unacked(self, count: int) -> list[tuple[int, BitMap]]:
        """Remove the lowest due messages, up to `count` unacked ones, and return those."""
        taken: list[tuple[int, BitMap]] = []
        discard = self._discard_acked if self._subscription is None else self._subscription.discard_acked
        try:
            while count and self._due:
                lowest = self._due.take_lowest(count)
                taken += lowest
                for ledger_id, entries in lowest:
                    discard(ledger_id, entries)
                    count -= len(entries)
        except BaseException:
            self._put_back(taken)
            raise
        return [(ledger_id, entries) for ledger_id, entries in taken if entries]

    def _put_back(self, taken: list[tuple[int, BitMap]]) -> None:
        for ledger_id, entries in taken:
            self._due.update_entries(ledger_id, entries)

    def _discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        if self._subscription is not None:
            self._subscription.discard_acked(ledger_id, entries)
        else:
            entries -= BitMap([each for each in entries if self._is_acked(Position(ledger_id, each))])
