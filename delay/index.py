"""Which messages of a topic are not yet due, and in what order do they fall due?

However many subscriptions a topic has, a message is delayed for all of them alike, so it is held once: in a
bucket for its due time, rounded up to the tick. When a bucket falls due its positions leave the index for the
*due log*, a linked list of batches that never change, which every view reads at its own pace. The index keeps
only the log's end: a batch lives as long as some view has yet to read it.

A subscription that neither reads messages nor polls keeps the batches since its last call alive.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, final

from ackstate.position import ENTRY_ID_MAX, Position, check_position
from delay.position_set import PositionSet
from delay.tracker import TIME_MS_MAX
from delay.view import SubscriptionDelayView

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class DueBatch:
    """A link of the due log: what fell due at one moment. The last link is empty and waits to be filled.

    Attributes:
        number: Rises by one from link to link.
        positions: What fell due; not changed once `next` is there.
        next: The link behind; None for the last.
    """

    __slots__ = ("next", "number", "positions")

    def __init__(self, number: int) -> None:
        self.number = number
        self.positions = PositionSet()
        self.next: DueBatch | None = None


@final
class TopicDelayIndex:
    """The messages of one topic that are not yet due.

    >>> index = TopicDelayIndex(tick_time_ms=100)
    >>> view = index.open_view(is_acked=set().__contains__)
    >>> view.add_message(Position(3, 7), deliver_at_ms=1_050, now_ms=1_000)
    True
    >>> index.next_due_ms, view.scheduled_messages(10, now_ms=1_099)
    (1100, [])
    >>> view.scheduled_messages(10, now_ms=1_100)
    [Position(ledger_id=3, entry_id=7)]

    A message is never due early, and late by less than a tick. Subscriptions use it through their views. The
    index and its views are one whole, not safe for concurrent mutation.

    Args:
        tick_time_ms: What due times are rounded up to a multiple of, at least 1.
    """

    def __init__(self, *, tick_time_ms: int) -> None:
        self.reset_tick_time(tick_time_ms)
        # Invariant: _due_times is a heap of the keys of _buckets, all above _now_ms; the buckets are disjoint
        # and not empty, and _not_due is their union: a position is found there without knowing its bucket.
        self._buckets: dict[int, PositionSet] = {}
        self._due_times: list[int] = []
        self._not_due = PositionSet()
        self._now_ms = 0
        self._log_end = DueBatch(0)
        self._views: set[SubscriptionDelayView] = set()

    def __len__(self) -> int:
        """Return how many messages are not yet due, each counted once. Complexity: O(1)."""
        return len(self._not_due)

    def __contains__(self, position: Position) -> bool:
        return 0 <= position[1] <= ENTRY_ID_MAX and position in self._not_due

    @property
    def now_ms(self) -> int:
        """The latest time seen."""
        return self._now_ms

    @property
    def next_due_ms(self) -> int | None:
        """When the next bucket falls due, or None. Complexity: O(1)."""
        return self._due_times[0] if self._due_times else None

    @property
    def log_end(self) -> DueBatch:
        """The batch that will be filled next: where a view that starts now begins to read."""
        return self._log_end

    @property
    def unread_batch_count(self) -> int:
        """How many batches of the due log some view has yet to read. Complexity: O(views)."""
        return self._log_end.number - self._first_unread().number

    @property
    def memory_bytes(self) -> int:
        """About how much memory the messages take that are not yet due or that some view has yet to read.

        Complexity: O(bitmaps + views).
        """
        total = self._not_due.memory_bytes + sum(bucket.memory_bytes for bucket in self._buckets.values())
        batch = self._first_unread()
        while batch.next is not None:
            total += batch.positions.memory_bytes
            batch = batch.next
        return total

    def open_view(self, is_acked: Callable[[Position], bool]) -> SubscriptionDelayView:
        """Return a view for a subscription that is about to read the message log.

        Args:
            is_acked: Whether the subscription has acked a position, at the moment it is asked.
        """
        view = SubscriptionDelayView(self, is_acked=is_acked)
        self._views.add(view)
        return view

    def detach(self, view: SubscriptionDelayView) -> None:
        """Wait for a view no longer; `SubscriptionDelayView.close` calls it."""
        self._views.discard(view)

    def reset_tick_time(self, tick_time_ms: int) -> None:
        """Round the times of messages added from now on to another tick; those held keep theirs.

        Raises:
            ValueError: The tick is below 1 ms.
            TypeError: The tick is not an integer.
        """
        check_time(tick_time_ms, name="tick_time_ms")
        if tick_time_ms < 1:
            raise ValueError(f"tick_time_ms is {tick_time_ms}: it must be at least 1")
        self._tick_time_ms = tick_time_ms

    def add(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Hold a message until it is due and return True, or return False if it is due already.

        A message that is held stays where it is, whatever time is given this time. One whose time has come
        but whose bucket has not is held too, else it would be delivered both now and with its bucket.

        Raises:
            ValueError: An id or a time is out of range.
            TypeError: An id or a time is not an integer.
        """
        check_position(position, entry_id_min=0)
        check_time(max(deliver_at_ms, 0), name="deliver_at_ms")
        self.advance(now_ms)
        if position in self._not_due:
            return True
        if deliver_at_ms <= self._now_ms:
            return False
        due_ms = self._bucket_time(deliver_at_ms)
        bucket = self._buckets.get(due_ms)
        if bucket is None:
            bucket = self._buckets[due_ms] = PositionSet()
            heappush(self._due_times, due_ms)
        bucket.add(position)
        self._not_due.add(position)
        return True

    def advance(self, now_ms: int) -> None:
        """Move what has fallen due to the due log; a time below one seen before changes nothing.

        Raises:
            ValueError: The time is out of range.
            TypeError: The time is not an integer.
        """
        check_time(now_ms, name="now_ms")
        if now_ms <= self._now_ms:
            return
        self._now_ms = now_ms
        if not self._due_times or self._due_times[0] > now_ms:
            return
        batch = self._log_end
        while self._due_times and self._due_times[0] <= now_ms:
            batch.positions.update(self._buckets.pop(heappop(self._due_times)))
        self._not_due.difference_update(batch.positions)
        self._log_end = batch.next = DueBatch(batch.number + 1)

    def count_between(self, first: Position, end: Position) -> int:
        """Count the messages not yet due from `first` (included) to `end` (excluded).

        Complexity: O(ledgers).
        """
        return self._not_due.count_between(first, end)

    def _bucket_time(self, deliver_at_ms: int) -> int:
        """Round up, but not past the end of time, where it would never fall due."""
        ticks = -(-deliver_at_ms // self._tick_time_ms)
        return min(ticks * self._tick_time_ms, TIME_MS_MAX)

    def _first_unread(self) -> DueBatch:
        # A copy, since a registry may open a view of this topic meanwhile.
        unread = (view.unread for view in tuple(self._views))
        return min(unread, key=lambda batch: batch.number, default=self._log_end)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(bitmaps)."""
        assert sorted(self._due_times) == sorted(self._buckets)
        assert self.next_due_ms == min(self._buckets, default=None)
        assert self.next_due_ms is None or self.next_due_ms > self._now_ms
        union = PositionSet()
        for bucket in self._buckets.values():
            bucket._check()
            assert len(bucket) > 0
            union.update(bucket)
        # Equal sums mean that no position stands in two buckets.
        assert len(union) == sum(map(len, self._buckets.values()))
        assert list(union) == list(self._not_due)
        self._not_due._check()
        assert self._log_end.next is None
        assert len(self._log_end.positions) == 0


def check_time(time_ms: int, *, name: str) -> None:
    """Refuse a time that is not an integer from 0 to 2**63 - 1.

    Raises:
        ValueError: The time is out of range.
        TypeError: The time is not an integer.
    """
    if not isinstance(time_ms, int):
        raise TypeError(f"{name} is {time_ms!r}: times are integers, in milliseconds")
    if not 0 <= time_ms <= TIME_MS_MAX:
        raise ValueError(f"{name} is {time_ms}: it must be in 0..{TIME_MS_MAX}")
