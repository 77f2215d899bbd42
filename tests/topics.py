"""A topic with one subscription on a store in memory, in few words."""

from __future__ import annotations

from ackstate import CursorConfig, ManagedCursor, MemoryStore, Message, Subscription
from ackstate.delay import TopicDelayIndex
from ackstate.dispatch import SubscriptionOptions, SubscriptionType
from ackstate.limits import DispatchGate, GateLimits
from ackstate.message import NO_DELAY
from ackstate.topic import MessageLog


class NumberedTopic:
    """Messages are known by their number, in order of publishing."""

    def __init__(self, kind=SubscriptionType.SHARED, *, tick_time_ms=None, options=None, config=None, **limits):
        self.kind, self.options, self.config = kind, options or SubscriptionOptions(), config or CursorConfig()
        self.tick_time_ms = None if kind.is_single_active else tick_time_ms
        self.positions = []
        self.open(MemoryStore(), **limits)

    def open(self, store, **limits):
        self.log = MessageLog.open(store, topic="t", entries_per_ledger_max=50)
        self.cursor = ManagedCursor.open(
            store, topic="t", subscription="s", ledgers=self.log.ledgers, config=self.config, now_ms=0
        )
        tick_ms, is_acked = self.tick_time_ms, self.cursor.is_acked
        delays = None if tick_ms is None else TopicDelayIndex(tick_time_ms=tick_ms).open_view(is_acked)
        self.gate = None if self.kind.is_single_active else DispatchGate(GateLimits(**limits))
        self.subscription = Subscription(
            self.log, self.cursor, gate=self.gate, delays=delays,
            kind=self.kind, options=self.options,
        )  # fmt: skip

    def restart(self, **limits):
        self.open(MemoryStore(self.log.store.disk), **limits)

    def publish(self, count=1, *, key=None, deliver_at_ms=NO_DELAY, message_count=1):
        self.positions += self.log.publish(
            [Message(b"", key=key, deliver_at_ms=deliver_at_ms, message_count=message_count)] * count
        )

    def publish_keys(self, keys):
        """A message for each letter, which is its key."""
        self.positions += self.log.publish([Message(b"", key=key.encode()) for key in keys])

    def dispatch(self, consumer="a", count=100, *, now_ms=0):
        """Return the numbers of a consumer's messages."""
        return [number for number, _ in self.deliveries(consumer, count, now_ms=now_ms)]

    def deliveries(self, consumer="a", count=100, *, now_ms=0):
        """Return the same with how often each was sent before."""
        sent = self.subscription.dispatch(consumer, count, now_ms=now_ms)
        self.check()
        return [(self.positions.index(each.position), each.redelivery_count) for each in sent]

    def ack(self, *numbers, now_ms=0):
        for number in numbers:
            self.subscription.ack(self.positions[number], now_ms=now_ms)
        self.check()

    def ack_up_to(self, number, *, now_ms=0):
        self.subscription.ack_cumulative(self.positions[number], now_ms=now_ms)
        self.check()

    def nack(self, *numbers, delay_ms=0, now_ms=0):
        given_back = [
            self.subscription.nack(self.positions[number], delay_ms=delay_ms, now_ms=now_ms) for number in numbers
        ]
        self.check()
        return given_back

    def unacked(self):
        return [number for number, position in enumerate(self.positions) if not self.cursor.is_acked(position)]

    def check(self):
        """Assert the invariants of all parts."""
        self.subscription.check_invariants()
