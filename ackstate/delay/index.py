"""The delay index in memory: the messages of a topic that are not yet due, in the order in which they fall due.

A message is delayed for all subscriptions of a topic alike, so it is held once: in a calendar by its due time, rounded
up to the tick, and in one bitmap for each ledger, the set of held messages. When a message falls due it leaves the
index for the *due log*, which every view reads at its own pace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.delay.calendar import Calendar
from ackstate.delay.config import DelayConfig
from ackstate.delay.due_log import DUE_LOG_BYTES_MAX
from ackstate.delay.position_set import PositionSet
from ackstate.delay.shared_index import SharedDelayIndex
from ackstate.delay.tracker import TIME_MS_MAX, check_message, check_time
from ackstate.delay.view import SubscriptionDelayView
from ackstate.integers import check_within
from ackstate.position import ENTRY_ID_MAX, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@final
class TopicDelayIndex(SharedDelayIndex):
    """The messages of one topic that are not yet due.

    >>> index = TopicDelayIndex(tick_time_ms=100)
    >>> view = index.open_view(is_acked=set().__contains__)
    >>> view.add_message(Position(3, 7), deliver_at_ms=1_050, now_ms=1_000)
    True
    >>> index.next_due_ms, view.scheduled_messages(10, now_ms=1_099)
    (1100, [])
    >>> view.scheduled_messages(10, now_ms=1_100)
    [Position(ledger_id=3, entry_id=7)]

    Or one reader of the topic feeds the index for all subscriptions, and no dispatcher has to add:

    >>> fed = TopicDelayIndex(tick_time_ms=100)
    >>> view = fed.open_view(is_acked=set().__contains__)
    >>> fed.feed(Position(3, 8), deliver_at_ms=1_200, now_ms=1_150)
    True
    >>> view.scheduled_messages(10, now_ms=1_200)
    [Position(ledger_id=3, entry_id=8)]

    A message is never due early, and late by less than a tick. It takes 8 to 11 bytes while it waits, however many
    subscriptions there are. Safe for any number of threads, and so are its views, each used by one thread at a time.

    Args:
        tick_time_ms: Due times are rounded up to a multiple of this; at least 1.
        due_log_bytes_max: About how much memory the due log may take before subscriptions that lag are cut off from it.

    Raises:
        ValueError: The tick is below 1 ms, or the bound negative.
        TypeError: One of them is not an integer.
    """

    def __init__(self, *, tick_time_ms: int, due_log_bytes_max: int = DUE_LOG_BYTES_MAX) -> None:
        check_within("due_log_bytes_max", due_log_bytes_max, least=0, most=TIME_MS_MAX, unit="bytes")
        super().__init__(due_log_bytes_max=due_log_bytes_max)
        # Invariant: each held message is in the calendar, which may also have messages that were overdue and are not
        # held.
        self._calendar = Calendar()
        self._now_ms = 0
        self._tick_time_ms = check_time(tick_time_ms, name="tick_time_ms")
        if self._tick_time_ms < 1:
            raise ValueError(f"tick_time_ms must be at least 1, got {tick_time_ms}")

    @classmethod
    def from_config(cls, config: DelayConfig) -> TopicDelayIndex:
        """Return an index with the tick of some settings; it is always strict, and never pauses deliveries."""
        return cls(tick_time_ms=config.tick_time_ms)

    @classmethod
    def from_pulsar_conf(cls, source: Mapping[str, object] | str | Path) -> TopicDelayIndex:
        """Return an index with the tick of a broker; see `DelayConfig.from_pulsar_conf`."""
        return cls.from_config(DelayConfig.from_pulsar_conf(source))

    def __len__(self) -> int:
        """Return how many messages are not yet due, each counted once. Complexity: O(1)."""
        return len(self.held)

    def __contains__(self, position: Position) -> bool:
        return 0 <= position[1] <= ENTRY_ID_MAX and position in self.held

    @property
    def now_ms(self) -> int:
        """The latest time seen."""
        return self._now_ms

    @property
    def next_due_ms(self) -> int | None:
        """When the next message falls due, or None. Complexity: O(1)."""
        return self._calendar.first_due_ms

    @property
    def memory_bytes(self) -> int:
        """About how much memory the messages take that are not yet due or that some view has yet to read.

        Complexity: O(bitmaps + views).
        """
        with self.lock:
            return self.held.memory_bytes + self._calendar.memory_bytes + self.due_log.memory_bytes

    def open_view(self, is_acked: Callable[[Position], bool]) -> SubscriptionDelayView:
        """Return a view for a subscription that is about to read the message log.

        Args:
            is_acked: Returns whether the subscription has acked a position.
        """
        return SubscriptionDelayView(self, is_acked=is_acked)

    def add(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Hold a message until it is due and return True, or return False if it is due already.

        A held message keeps its time, even if another time is given now. A message whose time has come but whose tick
        has not stays held, else it would be delivered twice. If even its tick is over, the index had a wrong time for
        it: it falls due at once for all subscriptions that have passed it, and the answer is False.

        Raises:
            ValueError: An id or a time is out of range.
            TypeError: An id or a time is not an integer.
        """
        position, deliver_at_ms, now_ms = check_message(position, deliver_at_ms, now_ms)
        self.lock.acquire()  # half the time of `with`, which counts here
        try:
            if now_ms > self._now_ms:
                self.move_due(now_ms)
            return self.hold(position, deliver_at_ms)
        finally:
            self.lock.release()

    def feed(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Do as `add`, for all subscriptions: from now on none of them has to add.

        A view whose dispatcher neither offers messages nor reports its position is handed everything that falls due.

        Raises:
            As `add`.
        """
        is_held = self.add(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)
        self.is_fed = True
        return is_held

    def advance(self, now_ms: int) -> None:
        """Move messages that have fallen due to the due log; a time below an earlier one changes nothing.

        Raises:
            ValueError: The time is out of range.
            TypeError: The time is not an integer.
        """
        now_ms = check_time(now_ms, name="now_ms")
        with self.lock:
            self.move_due(now_ms)

    def count_between(self, first: Position, end: Position) -> int:
        """Count the messages not yet due from `first` (included) to `end` (excluded).

        Complexity: O(ledgers).
        """
        with self.lock:
            return self.held.count_between(first, end)

    def hold(self, position: Position, deliver_at_ms: int) -> bool:
        if deliver_at_ms > self._now_ms:
            ledger_id, entry_id = position
            if self.held.include(ledger_id, entry_id):
                due_ms = deliver_at_ms + -deliver_at_ms % self._tick_time_ms
                # Not past the end of time, where it would never fall due.
                self._calendar.add(position, due_ms if due_ms < TIME_MS_MAX else TIME_MS_MAX)
            return True
        if position not in self.held:
            return False
        if deliver_at_ms + self._tick_time_ms > self._now_ms:
            return True
        # It falls due for the views that have passed it. The one that meets it only now delivers it now.
        due = PositionSet()
        due.add(position)
        self._fall_due(due)
        return False

    def move_due(self, now_ms: int) -> None:
        if now_ms <= self._now_ms:
            return
        self._now_ms = now_ms
        first_due_ms = self._calendar.first_due_ms
        if first_due_ms is None or first_due_ms > now_ms:
            return
        due = PositionSet()
        self._calendar.take_into(due, now_ms)
        if len(self._calendar) + len(due) != len(self.held):
            due.intersection_update(self.held)
        self._fall_due(due)

    def drop_before(self, ledger_id: int) -> None:
        self.held.remove_below(Position(ledger_id, 0))
        self._calendar.keep_only(self.held)

    def _fall_due(self, due: PositionSet) -> None:
        if len(due):
            self.held.difference_update(due)
            self.due_log.append(due)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(messages)."""
        self._calendar._check()
        self.held._check()
        assert len(self._calendar) >= len(self.held)
        assert self.next_due_ms is None or self.next_due_ms > self._now_ms
        assert self.due_log.end.next is None
        assert len(self.due_log.end.positions) == 0
