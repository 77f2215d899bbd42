"""The topic-wide tracker that PIP-448 of Apache Pulsar proposes, small and with its faults: a peer to measure against.

The proposal's are: the index (time, ledger, bitmap), times rounded down to the tick whether delivery is strict or not,
reads that filter by a pushed mark-delete and consume nothing, the pruning up to the lowest mark-delete and how often,
counts and memory of the whole topic for each subscription, ``clear`` without effect, the detection of a fixed delay,
the messages that the timer examines, and the factory's cache.

Ours are: the time comes in with each call, locks are left out, and messages are refused as `DelayedDeliveryTracker`
has it. `bucket_probe_count` counts the buckets that were examined, by any call.

Source: PIP-448 and apache/pulsar PR #24927, both open in August 2026.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, final

from pyroaring import BitMap
from sortedcontainers import SortedDict

from ackstate import Position
from ackstate.delay.view import DelayedDeliveryTracker, check_deliver_at, check_time
from ackstate.position import check_position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BEFORE_ALL = Position(0, -1)
# The tick is how often to prune, but within these bounds.
_PRUNE_INTERVAL_MS_MIN, _PRUNE_INTERVAL_MS_MAX = 5, 50


@final
class TopicDelayManager:
    """The delayed messages of a topic, and the mark-delete of each of its subscriptions.

    Args:
        tick_time_ms: Times are rounded down to a multiple of this, at least 1.
        is_deliver_at_time_strict: Whether a message must not be delivered before its time; that it is, is fault (e).
        fixed_delay_detection_lookahead: How many messages of one fixed delay must wait for deliveries to pause.
        prune_eligible_ratio: Which part of the subscriptions must have something due for the timer to prune.
        on_empty: Called when the last subscription has gone.
    """

    def __init__(
        self,
        *,
        tick_time_ms: int,
        is_deliver_at_time_strict: bool = False,
        fixed_delay_detection_lookahead: int = 50_000,
        prune_eligible_ratio: float = 0.5,
        on_empty: Callable[[], None] = lambda: None,
    ) -> None:
        self.tick_time_ms = tick_time_ms
        self._is_strict = is_deliver_at_time_strict
        self._lookahead = fixed_delay_detection_lookahead
        self._prune_eligible_ratio = prune_eligible_ratio
        self._on_empty = on_empty
        self._buckets: SortedDict[int, SortedDict[int, BitMap]] = SortedDict()
        # None as long as the dispatcher has not pushed one.
        self._mark_deletes: dict[str, Position | None] = {}
        self._count = 0
        self._last_prune_ms = 0
        self._highest_ms = 0
        self._has_fixed_delay = True
        self.bucket_probe_count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def bucket_count(self) -> int:
        return len(self._buckets)

    @property
    def memory_bytes(self) -> int:
        """The serialised size of the bitmaps, as the proposal counts. Complexity: O(bitmaps)."""
        return sum(len(bitmap.serialize()) for ledgers in self._buckets.values() for bitmap in ledgers.values())

    @property
    def next_delivery_ms(self) -> int | None:
        return self._buckets.peekitem(0)[0] if self._buckets else None

    def open_view(self, subscription: str) -> TopicDelayView:
        """Return a view; a subscription that is there already keeps its mark-delete."""
        self._mark_deletes.setdefault(subscription, None)
        return TopicDelayView(self, subscription)

    def unregister(self, subscription: str) -> None:
        """Forget a subscription and, with the last, every message."""
        self._mark_deletes.pop(subscription, None)
        if not self._mark_deletes:
            self._buckets.clear()
            self._count = 0
            self._on_empty()

    def update_mark_delete(self, subscription: str, mark_delete: Position) -> None:
        self._mark_deletes[subscription] = mark_delete

    def add(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Hold a message unless it is due; one that is held with another time as well is held twice."""
        if deliver_at_ms <= self._cutoff(now_ms):
            return False
        bucket = self._buckets.setdefault(deliver_at_ms - deliver_at_ms % self.tick_time_ms, SortedDict())
        entries = bucket.setdefault(position.ledger_id, BitMap())
        if position.entry_id not in entries:
            entries.add(position.entry_id)
            self._count += 1
        # Neither a message that is refused nor an index that has become empty changes the flag: fault (f).
        self._has_fixed_delay &= deliver_at_ms >= self._highest_ms - self.tick_time_ms
        self._highest_ms = max(self._highest_ms, deliver_at_ms)
        return True

    def has_message_available(self, now_ms: int) -> bool:
        """Return whether the first bucket is due, even if its messages were acked."""
        first_ms = self.next_delivery_ms
        return first_ms is not None and first_ms <= self._cutoff(now_ms)

    def scheduled_messages(self, subscription: str, max_messages: int, now_ms: int) -> list[Position]:
        """Return the messages due above the mark-delete, bucket by bucket, and keep them: faults (a) and (b)."""
        mark_delete = self._mark_deletes[subscription] or _BEFORE_ALL
        found: list[Position] = []
        for due_ms in self._due(now_ms):
            found += islice(self._above(due_ms, mark_delete), max_messages - len(found))
            if len(found) >= max_messages:
                break
        if found:
            self._prune_at_times(now_ms)
        return sorted(found)

    def should_pause_all_deliveries(self, now_ms: int) -> bool:
        is_long = self._count >= self._lookahead > 0
        return is_long and self._has_fixed_delay and not self.has_message_available(now_ms)

    def run_timer(self, now_ms: int) -> list[str]:
        """Return the subscriptions whose dispatchers are to read; for each it looks at the due buckets: fault (c)."""
        eligible = [name for name, mark_delete in self._mark_deletes.items() if self._has_due(now_ms, mark_delete)]
        if len(eligible) >= max(1, len(self._mark_deletes) * self._prune_eligible_ratio):
            self._prune_at_times(now_ms)
        return eligible

    def _has_due(self, now_ms: int, mark_delete: Position | None) -> bool:
        above = mark_delete or _BEFORE_ALL
        return any(next(self._above(due_ms, above), None) is not None for due_ms in self._due(now_ms))

    def _cutoff(self, now_ms: int) -> int:
        return now_ms if self._is_strict else now_ms + self.tick_time_ms

    def _due(self, now_ms: int) -> list[int]:
        return list(self._buckets.irange(maximum=self._cutoff(now_ms)))

    def _above(self, due_ms: int, mark_delete: Position) -> Iterator[Position]:
        self.bucket_probe_count += 1
        for ledger_id, entries in self._buckets[due_ms].items():
            if ledger_id >= mark_delete.ledger_id:
                first = mark_delete.entry_id + 1 if ledger_id == mark_delete.ledger_id else 0
                for entry_id in entries.iter_equal_or_larger(first):
                    yield Position(ledger_id, entry_id)

    def _prune_at_times(self, now_ms: int) -> None:
        interval_ms = max(_PRUNE_INTERVAL_MS_MIN, min(_PRUNE_INTERVAL_MS_MAX, self.tick_time_ms))
        if now_ms - self._last_prune_ms >= interval_ms:
            self._last_prune_ms = now_ms
            self._prune()

    def _prune(self) -> None:
        """Drop the messages that every subscription has passed, after examining every bucket: fault (h)."""
        mark_deletes = list(self._mark_deletes.values())
        known = [mark_delete for mark_delete in mark_deletes if mark_delete is not None]
        if not known or len(known) < len(mark_deletes):
            return
        end = Position(min(known).ledger_id, min(known).entry_id + 1)
        for due_ms, ledgers in list(self._buckets.items()):
            self.bucket_probe_count += 1
            for ledger_id in list(ledgers.irange(maximum=end.ledger_id)):
                before = len(ledgers[ledger_id])
                ledgers[ledger_id].remove_range(0, end.entry_id if ledger_id == end.ledger_id else 2**32)
                self._count -= before - len(ledgers[ledger_id])
                if not ledgers[ledger_id]:
                    del ledgers[ledger_id]
            if not ledgers:
                del self._buckets[due_ms]


@final
class TopicDelayView(DelayedDeliveryTracker):
    """The tracker of one subscription's dispatcher: it forwards every call to the manager."""

    def __init__(self, manager: TopicDelayManager, subscription: str) -> None:
        self._open_manager: TopicDelayManager | None = manager
        self._subscription = subscription

    def update_mark_delete(self, position: Position) -> None:
        """Note how far the subscription has acked, as its dispatcher does whenever that moves."""
        self._manager.update_mark_delete(self._subscription, position)

    def add_message(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        position = check_position(position, entry_id_min=0)
        deliver_at_ms, now_ms = check_deliver_at(deliver_at_ms), check_time(now_ms, name="now_ms")
        return self._manager.add(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)

    def has_message_available(self, *, now_ms: int) -> bool:
        return self._manager.has_message_available(now_ms)

    def scheduled_messages(self, max_messages: int, *, now_ms: int) -> list[Position]:
        return self._manager.scheduled_messages(self._subscription, max_messages, now_ms)

    @property
    def delayed_message_count(self) -> int:
        """The whole topic's: fault (d)."""
        return len(self._manager)

    @property
    def memory_bytes(self) -> int:
        """The whole topic's."""
        return self._manager.memory_bytes

    def should_pause_all_deliveries(self, *, now_ms: int) -> bool:
        return self._manager.should_pause_all_deliveries(now_ms)

    @property
    def next_delivery_ms(self) -> int | None:
        return self._manager.next_delivery_ms

    def reset_tick_time(self, tick_time_ms: int) -> None:
        self._manager.tick_time_ms = tick_time_ms

    def clear(self) -> None:
        """Do nothing, as proposed."""
        assert self._manager

    def close(self) -> None:
        if self._open_manager is not None:
            self._open_manager.unregister(self._subscription)
            self._open_manager = None

    @property
    def _manager(self) -> TopicDelayManager:
        if self._open_manager is None:
            raise ValueError("the view is closed")
        return self._open_manager


@final
class TopicDelayManagers:
    """The factory's cache of managers: a topic's goes when its last subscription does."""

    def __init__(self, *, tick_time_ms: int) -> None:
        self._tick_time_ms = tick_time_ms
        self._managers: dict[str, TopicDelayManager] = {}

    def __contains__(self, topic: str) -> bool:
        return topic in self._managers

    def manager_of(self, topic: str) -> TopicDelayManager:
        """Return the topic's manager: a new one if it has none."""
        if topic not in self._managers:
            self._managers[topic] = TopicDelayManager(
                tick_time_ms=self._tick_time_ms, on_empty=lambda: self._forget(topic, manager)
            )
        manager = self._managers[topic]
        return manager

    def open_view(self, topic: str, subscription: str) -> TopicDelayView:
        """Look the manager up, then register with it: two steps, between which it may be given up, fault (g)."""
        return self.manager_of(topic).open_view(subscription)

    def _forget(self, topic: str, manager: TopicDelayManager) -> None:
        if self._managers.get(topic) is manager:
            del self._managers[topic]
