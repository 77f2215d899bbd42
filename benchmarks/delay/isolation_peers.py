"""The same topic and load with other designs: their memory over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, final

import numpy as np

from ackstate import Position
from ackstate.delay import InMemoryDelayTracker
from benchmarks.delay.isolation import BURDENS, DelayedTraffic, SubscriberKind, is_slow_poll, now_ms, reopens
from benchmarks.delay.pip448 import TopicDelayManager
from benchmarks.delayed_messages import TICK_MS

if TYPE_CHECKING:
    from collections.abc import Iterator

_ALL = 1 << 32
_SLOW_MAX = 100


class PeerTopic(Protocol):
    """A topic whose memory is looked at."""

    def step(self, tick: int) -> None:
        """Publish the messages of a tick, and poll with all."""
        ...

    def owned(self) -> Iterator[object]:
        """Yield the objects whose memory belongs to delayed delivery."""
        ...


@final
class TrackersTopic:
    """A tracker for each subscription, which holds the messages that were read and not polled."""

    def __init__(self, traffic: DelayedTraffic, *, healthy: int) -> None:
        self._traffic = traffic
        self._published = traffic.published()
        self._kinds = [SubscriberKind.HEALTHY] * healthy + list(BURDENS)
        self._trackers = [
            InMemoryDelayTracker(tick_time_ms=TICK_MS, is_deliver_at_time_strict=True) for _ in self._kinds
        ]

    def step(self, tick: int) -> None:
        """See `PeerTopic`."""
        for kind, tracker in zip(self._kinds, self._trackers, strict=True):
            if kind is SubscriberKind.CHURN and reopens(tick):
                # It reads unacked messages again.
                tracker.clear()
                self._read(tracker, max(0, tick - self._traffic.delay_ticks), tick)
            self._read(tracker, tick, tick)
            if kind is SubscriberKind.SLOW and is_slow_poll(tick):
                tracker.scheduled_messages(_SLOW_MAX, now_ms=now_ms(tick))
            elif kind not in {SubscriberKind.SLOW, SubscriberKind.STUCK}:
                tracker.scheduled_messages(_ALL, now_ms=now_ms(tick))

    def owned(self) -> Iterator[object]:
        """See `PeerTopic`."""
        yield from self._trackers

    def _read(self, tracker: InMemoryDelayTracker, first_tick: int, tick: int) -> None:
        for messages in self._published[first_tick : tick + 1]:
            for position, deliver_at_ms in messages.one_by_one():
                tracker.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms(tick))


@final
class ProposedTopic:
    """The design of PIP-448: due messages stay until every mark-delete has passed them.

    Each subscription reads one message at a tick, and that read prunes. Further messages would be read again and again,
    because reads do not consume; that cost is not measured here. Its mark-delete is where it would be.
    """

    def __init__(self, traffic: DelayedTraffic, *, healthy: int) -> None:
        self._traffic = traffic
        self._published = traffic.published()
        self._due_ticks = traffic.due_ticks()
        self._kinds = [SubscriberKind.HEALTHY] * healthy + list(BURDENS)
        self._manager = TopicDelayManager(tick_time_ms=TICK_MS, is_deliver_at_time_strict=True)
        self._views = [self._manager.open_view(f"subscription-{at}") for at in range(len(self._kinds))]
        self._slow_count = 0

    def step(self, tick: int) -> None:
        """See `PeerTopic`."""
        for messages in self._published[tick : tick + 1]:
            for position, deliver_at_ms in messages.one_by_one():
                self._views[0].add_message(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms(tick))
        self._slow_count += _SLOW_MAX * is_slow_poll(tick)
        for kind, view in zip(self._kinds, self._views, strict=True):
            view.update_mark_delete(self._mark_delete(kind, tick))
            view.scheduled_messages(1, now_ms=now_ms(tick))

    def owned(self) -> Iterator[object]:
        """See `PeerTopic`."""
        yield self._manager

    def _mark_delete(self, kind: SubscriberKind, tick: int) -> Position:
        """Return the last message of those acked without a gap."""
        waiting = np.flatnonzero(self._due_ticks > tick)
        acked = int(waiting[0]) if len(waiting) else len(self._due_ticks)
        if kind in {SubscriberKind.STUCK, SubscriberKind.HOLE}:
            acked = 0
        elif kind is SubscriberKind.SLOW:
            acked = min(acked, self._slow_count)
        ledger, entries = divmod(acked, self._traffic.ledger_size)
        return Position(1 + ledger, entries - 1)
