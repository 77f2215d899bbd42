"""Which index belongs to a topic?"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, final
from weakref import WeakValueDictionary

from delay.index import TopicDelayIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate import Position
    from delay.view import SubscriptionDelayView


@final
class DelayIndexRegistry:
    """One index for each topic that has an open view: made with the first, gone with the last.

    >>> registry = DelayIndexRegistry(tick_time_ms=1_000)
    >>> view = registry.open_view("orders", is_acked=set().__contains__)
    >>> "orders" in registry
    True
    >>> view.close()
    >>> len(registry)
    0

    Threads may open and close views at the same time, also of one topic. The other calls of one topic's views
    need a lock of the caller's: index and views are not safe for concurrent mutation.

    Args:
        tick_time_ms: What due times are rounded up to a multiple of, at least 1.

    Raises:
        ValueError: The tick is below 1 ms.
    """

    def __init__(self, *, tick_time_ms: int) -> None:
        self._tick_time_ms = tick_time_ms
        # Refused here, not only when the first topic comes.
        TopicDelayIndex(tick_time_ms=tick_time_ms)
        # The views own their index. If they were counted here, a new view could come between the last one's
        # closing and the index's removal, and join an index that is about to go.
        self._indexes: WeakValueDictionary[str, TopicDelayIndex] = WeakValueDictionary()
        self._lock = Lock()

    def __len__(self) -> int:
        """Return how many topics have an index."""
        return len(self._indexes)

    def __contains__(self, topic: str) -> bool:
        return topic in self._indexes

    def open_view(self, topic: str, *, is_acked: Callable[[Position], bool]) -> SubscriptionDelayView:
        """Return a view of the topic's index for a subscription that is about to read the message log.

        Args:
            topic: Its name.
            is_acked: Whether the subscription has acked a position, at the moment it is asked.
        """
        with self._lock:
            index = self._indexes.get(topic)
            if index is None:
                index = self._indexes[topic] = TopicDelayIndex(tick_time_ms=self._tick_time_ms)
            return index.open_view(is_acked)
