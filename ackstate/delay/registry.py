"""The delay index of each topic that has an open view."""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Protocol, final
from weakref import WeakValueDictionary

from ackstate.delay.index import TopicDelayIndex
from ackstate.delay.view import SubscriptionDelayView

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate import Position
    from ackstate.delay.shared_index import SharedDelayIndex


class ViewedIndex(Protocol):
    """An index of a topic, whose views keep its messages alive."""

    def open_view(self, is_acked: Callable[[Position], bool]) -> SubscriptionDelayView:
        """Return a view for a subscription that is about to read the message log."""
        ...


@final
class DelayIndexRegistry:
    """One index for each topic that has an open view: created with the first view, dropped with the last.

    >>> registry = DelayIndexRegistry(tick_time_ms=1_000)
    >>> view = registry.open_view("orders", is_acked=set().__contains__)
    >>> "orders" in registry
    True
    >>> view.close()
    >>> len(registry)
    0

    Safe for any number of threads: those that open a topic's views at the same time, while others close theirs, get
    the same index, and never one that was given up.

    Args:
        tick_time_ms: Due times are rounded up to a multiple of this; at least 1.
        make_index: Creates a topic's index instead, with other settings. The registry is locked meanwhile, so it must
            be quick and must not use the registry.

    Raises:
        ValueError: The tick is below 1 ms.
        TypeError: The tick is not an integer, or not exactly one of the two is given.
    """

    def __init__(
        self, *, tick_time_ms: int | None = None, make_index: Callable[[str], ViewedIndex] | None = None
    ) -> None:
        if make_index is None and tick_time_ms is not None:
            # Refused here, not only when the first topic comes.
            TopicDelayIndex(tick_time_ms=tick_time_ms)
            make_index = partial(_index, tick_time_ms=tick_time_ms)
        elif make_index is None or tick_time_ms is not None:
            raise TypeError(
                f"exactly one of tick_time_ms and make_index must be given, got {tick_time_ms!r} and {make_index!r}"
            )
        self._make_index = make_index
        # The views own their index. If they were counted here, a new view could come between the last one's
        # closing and the index's removal, and join an index that is about to go.
        self._indexes: WeakValueDictionary[str, SharedDelayIndex] = WeakValueDictionary()
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
            is_acked: Returns whether the subscription has acked a position.
        """
        with self._lock:
            index = self._indexes.get(topic)
            if index is not None:
                return SubscriptionDelayView(index, is_acked=is_acked)
            view = self._make_index(topic).open_view(is_acked)
            self._indexes[topic] = view.shared_index
            return view


def _index(topic: str, *, tick_time_ms: int) -> TopicDelayIndex:  # noqa: ARG001 - as any `make_index`
    return TopicDelayIndex(tick_time_ms=tick_time_ms)
