"""The delayed messages of one subscription: the tracker that a dispatcher uses, and the view of its topic's index.

Each subscription of a topic has a view of one index. The message log reports each delayed message when it is published;
a view whose reader comes to a message that the index does not know, as after a restart, offers it, for all views. The
index forgets a message when it falls due, and puts it into the due log, which every view reads at its own pace.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import nullcontext
from itertools import chain, starmap
from typing import TYPE_CHECKING, Protocol, final

from pyroaring import BitMap

from ackstate.checks import check_count, integer
from ackstate.entry_bitmap import bitmaps_of
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position, check_position, positions_of
from ackstate.position_set import PositionSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

# The latest time there is: Pulsar stores a time in signed 64 bits.
TIME_MS_MAX = 2**63 - 1
DUE_LOG_BYTES_MAX = 1 << 20
# Bounds of an empty window, such that the first position extends it by `min` and `max`.
_ABOVE_ALL = Position(2**63, 0)
_BEFORE_ALL = Position(0, -1)
_AT_ONCE: AbstractContextManager[object] = nullcontext()


def check_time(time_ms: int, *, name: str) -> int:
    """Return a time as a plain integer; `ValueError` or `TypeError` unless it is one of 0 to 2**63 - 1."""
    if type(time_ms) is not int:
        time_ms = integer(name, time_ms)
    if not 0 <= time_ms <= TIME_MS_MAX:
        raise ValueError(f"{name} must be in 0..{TIME_MS_MAX}, got {time_ms}")
    return time_ms


def check_message(position: Position, deliver_at_ms: int, now_ms: int) -> tuple[Position, int, int]:
    """Return a message that is added, its time (-1 is no delay) and the time now, of plain integers, or refuse them."""
    ledger_id, entry_id = position
    # Called for each message that is read: it calls no function for a valid message.
    if (
        type(position) is Position
        and type(ledger_id) is type(entry_id) is type(deliver_at_ms) is type(now_ms) is int
        and 0 <= ledger_id <= LEDGER_ID_MAX
        and 0 <= entry_id <= ENTRY_ID_MAX
        and -1 <= deliver_at_ms <= TIME_MS_MAX
        and 0 <= now_ms <= TIME_MS_MAX
    ):
        return position, deliver_at_ms, now_ms
    position = check_position(position, entry_id_min=0)
    return position, check_deliver_at(deliver_at_ms), check_time(now_ms, name="now_ms")


def check_deliver_at(deliver_at_ms: int) -> int:
    """Return when a message is to be delivered as a plain integer, -1 for one without a delay, or refuse it."""
    if type(deliver_at_ms) is not int:
        deliver_at_ms = integer("deliver_at_ms", deliver_at_ms)
    return check_time(deliver_at_ms, name="deliver_at_ms") if deliver_at_ms >= 0 else -1


class AckedAndSent(Protocol):
    """The reports of a subscription to its tracker."""

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        """Remove the acked entries from a bitmap of entries of one ledger."""

    def not_sent_between(self, first: Position, end: Position) -> PositionSet:
        """Return what the reader has passed from `first` to `end` (excluded) that is not acked, in flight or queued."""


class DelayedDeliveryTracker(Protocol):
    """The delayed messages of one subscription, from when the dispatcher meets them until it takes them.

    Derive your own tracker from this class: the methods that only some trackers need have defaults.

    All times are milliseconds since the epoch, 0 to 2**63 - 1. A clock may jump back: a tracker either keeps the latest
    time seen, or takes each time as it is given, and documents which. A message that was handed out is forgotten. The
    dispatcher checks that its own time has come, sends it, and follows it until it is acked.

    Source: ``DelayedDeliveryTracker`` of Apache Pulsar.
    """

    __slots__ = ()

    def add_message(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Return whether a message that the dispatcher has met must wait.

        Args:
            position: The message.
            deliver_at_ms: The time at which to deliver it, which the tracker may round; negative means no delay.
            now_ms: The time now.

        Returns:
            True if it must wait: skip it, `scheduled_messages` will hand it out. False if it is to be delivered now.

        Raises:
            ValueError: An id or a time is out of range.
            TypeError: An id or a time is not an integer.
        """

    def scheduled_messages(self, max_messages: int, *, now_ms: int) -> list[Position]:
        """Hand out, and forget, positions that are due, at most `max_messages`, in position order.

        The tracker decides which ones if there are more, whether acked ones are omitted, and the meaning of a negative
        maximum. If it hands out fewer, it is asked again by the next dispatch.

        Raises:
            As `add_message`.
        """

    @property
    def delayed_message_count(self) -> int:
        """How many messages wait, including due ones that were not yet handed out."""

    @property
    def next_delivery_ms(self) -> int | None:
        """When to poll again: no message that waits is due before; None if none waits."""

    def clear(self) -> None:
        """Forget every message; the dispatcher restarts and will offer the unacked messages again."""

    def close(self) -> None:
        """Release everything. Any later call but `close` raises `ValueError`."""

    # The rest has a default, which suits a tracker of one subscription that starts empty.

    @property
    def shared_index(self) -> SharedDelayIndex | None:
        """The index that all subscriptions of the topic share, for the message log to feed; None if there is none."""
        return None

    def attach(self, subscription: AckedAndSent) -> None:  # noqa: ARG002
        """Register the subscription, which can report more than `is_acked` does."""
        return

    def unknown(self, positions: Sequence[Position], *, now_ms: int) -> Sequence[Position]:  # noqa: ARG002
        """Return those of the next messages that must be read and offered: the others are known to wait.

        Raises:
            As `add_message`, for the time.
        """
        return positions

    def count_between(self, first: Position, end: Position) -> int:  # noqa: ARG002
        """Return how many messages from `first` (included) to `end` (excluded) are not yet due; 0 if unknown."""
        return 0

    def reading(self, first: Position) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return a context in which to read and offer unread messages, the first of which is at a position.

        With a shared index, one subscription at a time reads messages that the index may lack, so that the
        subscriptions after it can skip them.
        """
        return nullcontext()

    def advance_mark_delete(self, position: Position) -> None:  # noqa: ARG002
        """Note that everything up to a position, included, is durably acked, until `clear`.

        Raises:
            As `add_message`.
        """
        return


@final
class DueBatch:
    """A link of the log: the messages that fell due at one moment. The last link is empty and waits to be filled."""

    __slots__ = ("next", "positions")

    def __init__(self) -> None:
        self.positions = PositionSet()  # not changed once `next` is set
        self.next: DueBatch | None = None


@final
class DueLog:
    """Batches in a linked list, of which the log itself holds only the end: batches that all have read are gone."""

    # A reader that lags would keep all later batches alive. So once they take more than about `bytes_max`, all readers
    # must catch up: from then on the messages that such a reader has not handed out are in its own memory.

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0  # of the batches since all were made to catch up, also of those that are gone since
        self.end = DueBatch()
        self.readers: set[SubscriptionDelayView] = set()

    def append(self, positions: PositionSet) -> None:
        """Append messages that have fallen due; the set belongs to the log from now on."""
        batch = self.end
        batch.positions = positions
        self.end = batch.next = DueBatch()
        self._bytes += positions.memory_bytes_max
        if self._bytes > self._bytes_max:
            for reader in tuple(self.readers):
                reader.catch_up()
            self._bytes = 0


class SharedDelayIndex(ABC):
    """The messages of a topic that are not yet due, as its views and its message log use them."""

    # All methods but `learn` are called with the lock held.

    def __init__(self, *, due_log_bytes_max: int) -> None:
        self.held = PositionSet()  # not yet due; to be read, not changed
        # Guards the index and the calls of its views; no callback of a view runs under it.
        self.lock = threading.Lock()
        self.due_log = DueLog(bytes_max=due_log_bytes_max)
        self.complete_from = _ABOVE_ALL  # from here on, the log reports each delayed message when it is published
        self.now_ms = 0  # the latest time seen
        self.is_open = True
        self.being_read = threading.Lock()  # held by a subscription that reads messages before `complete_from`
        # When held messages are due that were rescheduled: what else the index has of them, in memory or in a sealed
        # bucket, is void.
        self.moved: dict[Position, int] = {}

    def __len__(self) -> int:
        """Return how many messages are not yet due, each counted once. Complexity: O(1)."""
        return len(self.held)

    def __contains__(self, position: Position) -> bool:
        return 0 <= position[1] <= ENTRY_ID_MAX and position in self.held

    @property
    @abstractmethod
    def next_due_ms(self) -> int | None:
        """When the next message falls due, at the earliest; None if none is held."""

    @abstractmethod
    def hold(self, position: Position, deliver_at_ms: int) -> bool:
        """Hold a message until it is due, after `move_due`; False if it is due already. Neither is checked.

        A held message keeps its time, even if another time is given now. If the index had too late a time for it, it
        falls due at once for all subscriptions that have passed it, and the answer is False.
        """

    @abstractmethod
    def move_due(self, now_ms: int) -> None:
        """Move the messages that have fallen due to the due log."""

    @abstractmethod
    def drop_before(self, ledger_id: int) -> None:
        """Drop the messages of the ledgers before one: every subscription has acked them."""
        # A later call may name a lower ledger. A subscription that restarts there offers the messages once more.

    def reschedule(self, position: Position, deliver_at_ms: int) -> None:
        """Change when a message is due, at once if the time has come; no-op if it is not held."""
        with self.lock:
            if position not in self.held:
                return
            self.held.discard(position)
            if deliver_at_ms > self.now_ms:
                self.hold_again(position, deliver_at_ms)
                self.moved[position] = deliver_at_ms
                return
            self.moved.pop(position, None)
            due = PositionSet()
            due.add(position)
            self.due_log.append(due)

    def keep_moved(self, due: PositionSet, until_ms: int) -> PositionSet:
        """Remove the messages from due ones that are due later by now, and return them."""
        later = PositionSet()
        for position in [each for each in self.moved if each in due] if self.moved else ():
            if self.moved[position] > until_ms:
                later.add(position)
                due.discard(position)
            else:
                del self.moved[position]
        return later

    def hold_again(self, position: Position, deliver_at_ms: int) -> None:
        """Hold a message that was held until another time."""
        self.hold(position, deliver_at_ms)

    def forget_before(self, ledger_id: int) -> None:
        """Drop the messages of the ledgers before one, which the log no longer has."""
        with self.lock:
            self.drop_before(ledger_id)
            self.moved = {position: due_ms for position, due_ms in self.moved.items() if position in self.held}

    def open_view(self, is_acked: Callable[[Position], bool]) -> SubscriptionDelayView:
        """Return a view for a subscription that is about to read the log; `is_acked` is asked for its positions."""
        self._check_open()
        return SubscriptionDelayView(self, is_acked=is_acked)

    def close(self) -> None:
        """Release everything, once the views are closed. No-op if closed."""
        self.is_open = False

    def learn(self, delayed: Iterable[tuple[Position, int]]) -> None:
        """Hold messages just published, which no reader has met, with their times, unchecked; no-op if closed."""
        with self.lock:
            for position, deliver_at_ms in delayed if self.is_open else ():
                self.hold(position, deliver_at_ms)

    def _check_open(self) -> None:
        if not self.is_open:
            raise ValueError("the index is closed; open another one")


@final
class SubscriptionDelayView(DelayedDeliveryTracker):
    """The delayed messages of one subscription: a view of its topic's index, made by `open_view` of that.

    Each message that is not acked is handed out once between two calls of `clear`, or was answered with "deliver it
    now", if the dispatcher keeps to this:

    - It names by `unknown`, or offers by `add_message`, every message that it comes to, delayed or not, in order. A
      message may be offered again at any time. The answer is True again for a message that waits, which is still
      handed out once, and False for one that was handed out or delivered.
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
                    if position < self._first:  # noqa: PLR1730 - faster than `min`
                        self._first = position
                    if position > self._last:  # noqa: PLR1730
                        self._last = position
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
        return self._index.being_read if first < self._index.complete_from else _AT_ONCE

    def unknown(self, positions: Sequence[Position], *, now_ms: int) -> Sequence[Position]:
        """See `DelayedDeliveryTracker.unknown`. Complexity: bitmap operations, if none of them is known to wait."""
        entries, index, now_ms = bitmaps_of(positions), self._index, check_time(now_ms, name="now_ms")
        while True:
            with index.lock:
                index.move_due(now_ms)
                if not self._is_cut_off:
                    held = index.held
                    known = [each for each in positions if each in held] if held.has_any(entries) else []
                    self._read_due_log()  # before the window grows, as in `add_message`
                    if known:
                        self._first, self._last = min(self._first, *known), max(self._last, *known)
                    elif not self._due.has_any(entries):
                        return positions
                    return [each for each in positions if each not in held and each not in self._due]
            self._derive()

    def count_between(self, first: Position, end: Position) -> int:
        """Return how many messages of the index from `first` (included) to `end` (excluded) are not yet due."""
        index = self._index
        with index.lock:
            return index.held.count_between(first, end)

    def advance_mark_delete(self, position: Position) -> None:
        """Note that everything up to a position, included, is durably acked; see `DelayedDeliveryTracker`.

        The index drops a ledger, due or not, once all views have reported it as acked.

        Complexity: O(1), and O(views) when the lowest of them moves to another ledger.
        """
        ledger_id = check_position(position).ledger_id
        with self._index.lock:
            before, self.mark_delete_ledger_id = self.mark_delete_ledger_id, max(self.mark_delete_ledger_id, ledger_id)
            if before < ledger_id:
                self._drop_consumed(before)

    def scheduled_messages(self, max_messages: int, *, now_ms: int) -> list[Position]:
        """Hand out the lowest due positions that are not acked, at most `max_messages`, in order.

        An error of the subscription passes through and nothing is handed out.

        Complexity: O(ledgers + messages looked at).
        """
        if type(max_messages) is not int or max_messages < 0:  # without a call for a valid number
            check_count("max_messages", max_messages := integer("max_messages", max_messages), least=0)
        self._catch_up_now(check_time(now_ms, name="now_ms"))
        return list(chain.from_iterable(starmap(positions_of, self._take_unacked(max_messages))))

    @property
    def delayed_message_count(self) -> int:
        """How many unacked messages the reader has passed that wait to be due or to be handed out.

        Complexity: O(ledgers) if attached, else O(messages counted).
        """
        index = self._catch_up_now()
        waiting = PositionSet()
        with index.lock:
            first, end = self._window()
            waiting.update_between(index.held, first=first, end=end)
        waiting.update(self._due)
        waiting.apply(self._discard_acked)
        return len(waiting)

    @property
    def next_delivery_ms(self) -> int | None:
        """When to poll again; at once, by the latest time seen, if a message is due already.

        No message of this subscription is due before. The one due then may be another's: a wake-up for nothing.
        """
        index = self._catch_up_now()
        with index.lock:
            return index.now_ms if self._due else index.next_due_ms

    def clear(self) -> None:
        """Forget every message of this subscription: the reader restarts, and comes to the unacked messages again.

        Messages that are not yet due stay in the index, for other subscriptions.
        """
        index = self._index
        with index.lock:
            self.unread = index.due_log.end
            self._first, self._last = _ABOVE_ALL, _BEFORE_ALL
            self._is_cut_off = False
            self._caught_up = None
            self.mark_delete_ledger_id = 0
            index.drop_before(0)
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
        """Move to the end of the log now, even while the reader is busy; called with the index's lock held."""
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

    def _catch_up_now(self, now_ms: int | None = None) -> SharedDelayIndex:
        index = self._index
        with index.lock:
            if now_ms is not None:
                index.move_due(now_ms)
            self._read_due_log()
        if self._is_cut_off:
            self._derive()
        return index

    def _drop_consumed(self, before_ledger_id: int) -> None:
        """Drop ledgers that all have acked, if the lowest mark-delete position may have left a ledger."""
        ledger_ids = [reader.mark_delete_ledger_id for reader in self._index.due_log.readers]
        lowest = min(ledger_ids, default=0)
        if lowest > before_ledger_id:
            self._index.drop_before(lowest)

    def _window(self) -> tuple[Position, Position]:
        """Return which due messages concern the view: first included, end excluded."""
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
        is_only_reader = len(self._index.due_log.readers) == 1
        while self.unread.next is not None:
            due.update_between(self.unread.positions, first=first, end=end, is_given_up=is_only_reader)
            self.unread = self.unread.next

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
        """Remove the lowest due messages, up to `count` unacked ones, and return those by ledger, maybe none of one."""
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
        return taken

    def _put_back(self, taken: list[tuple[int, BitMap]]) -> None:
        for ledger_id, entries in taken:
            self._due.update_entries(ledger_id, entries)

    def _discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        if self._subscription is not None:
            self._subscription.discard_acked(ledger_id, entries)
        else:
            entries -= BitMap([each for each in entries if self._is_acked(Position(ledger_id, each))])
