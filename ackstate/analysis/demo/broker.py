"""A small broker that runs until it is killed: one topic, three subscriptions, and a trace of all their events.

It uses the real library: messages in a durable log of several ledgers, acks through `Subscription` and `ManagedCursor`
on a real store, dispatch through the gate, delayed messages through the topic's shared index. `Recording` has every
accepted ack in the trace before the next one is sent.
"""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.trace.events import Event, EventKind
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.cursor import ManagedCursor
from ackstate.delay import TopicDelayIndex
from ackstate.dispatch.subscription import Subscription
from ackstate.limits import DispatchGate, GateLimits
from ackstate.message import NO_DELAY, Message
from ackstate.topic.log import MessageLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.analysis.trace.recording import Recording
    from ackstate.ledger_map import LedgerMap
    from ackstate.position import Position
    from ackstate.stores.base import Store

TOPIC = "persistent://public/default/orders"
READY = "ready"
"""What a broker prints before its first step."""
_PUBLISH_BATCH_MAX = 64
_STUCK_SHARE = 0.01
_DELAY_TICK_MS = 10


class AckPattern(Enum):
    """How the consumers of a subscription ack."""

    IN_ORDER = "one consumer acks cumulatively, in order"
    ONE_PERCENT_STUCK = "one consumer never acks one message in a hundred"
    EIGHT_CONSUMERS = "eight consumers ack at random, each at its own speed"


SUBSCRIPTIONS = {
    "in-order": AckPattern.IN_ORDER,
    "one-percent-stuck": AckPattern.ONE_PERCENT_STUCK,
    "eight-consumers": AckPattern.EIGHT_CONSUMERS,
}
_THINK_MS = {
    AckPattern.IN_ORDER: (4.0,),
    AckPattern.ONE_PERCENT_STUCK: (10.0,),
    AckPattern.EIGHT_CONSUMERS: (10.0, 14.0, 20.0, 28.0, 40.0, 57.0, 80.0, 113.0),
}


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The settings of the demo's broker."""

    seed: int = 0  # Seed of all random choices
    messages_per_second: int = 3_000  # Publish rate
    entries_per_ledger_max: int = 2_500  # The message log rolls to a new ledger after this many
    delayed_share: float = 0.1  # Share of the messages that have a delivery delay
    delay_ms_max: int = 400  # Longest delay
    flush_interval_ms: int = 250  # Flush interval of every cursor
    max_unpersisted_ack_record_bytes: int = 16 * 1024  # Limit of every dispatch gate
    max_unacked_messages: int = 1_000  # Limit of every dispatch gate


class _DueAck(NamedTuple):
    """An ack that a consumer will send; ordered by time, then randomly."""

    due_ms: float
    tie: float
    position: Position


@final
class DemoBroker:
    """Runs the topic step by step on the caller's clock."""

    def __init__(self, store: Store, recording: Recording, settings: DemoSettings, *, now_ms: int) -> None:
        self._settings = settings
        self._recording = recording
        self._random = random.Random(settings.seed)  # noqa: S311 - a workload, not a secret
        self._log = MessageLog.open(store, topic=TOPIC, entries_per_ledger_max=settings.entries_per_ledger_max)
        self._begun_ms = now_ms
        self._published = 0
        delays = TopicDelayIndex(tick_time_ms=_DELAY_TICK_MS)
        self._workers = [
            _Worker(name, habit, self._open(store, name, delays, now_ms=now_ms), self)
            for name, habit in SUBSCRIPTIONS.items()
        ]

    def step(self, *, now_ms: int) -> None:
        """Run the publishes, dispatches, acks and persists that are due."""
        self._publish(now_ms=now_ms)
        for worker in self._workers:
            worker.dispatch(now_ms=now_ms)
            worker.ack(now_ms=now_ms)
            worker.persist(now_ms=now_ms)
        self.check_recording()

    def check_recording(self) -> None:
        """Raise the error that has ended the recording: no later ack may become durable without being in it."""
        if self._recording.failure is not None:
            raise self._recording.failure

    def close(self, *, now_ms: int) -> None:
        """Persist everything, including young acks."""
        for worker in self._workers:
            worker.close(now_ms=now_ms)

    @property
    def ledgers(self) -> LedgerMap:
        """The ledgers of the message log."""
        return self._log.ledgers

    @property
    def random(self) -> random.Random:
        """The only source of randomness."""
        return self._random

    def _open(self, store: Store, name: str, delays: TopicDelayIndex, *, now_ms: int) -> Subscription:
        settings = self._settings
        cursor = ManagedCursor.open(
            store,
            topic=TOPIC,
            subscription=name,
            ledgers=self._log.ledgers,
            config=CursorConfig(flush_interval_ms=settings.flush_interval_ms),
            now_ms=now_ms,
        )
        self._recording.follow(cursor, topic=TOPIC, subscription=name, now_ms=now_ms)
        limits = GateLimits(
            max_unpersisted_ack_record_bytes=settings.max_unpersisted_ack_record_bytes,
            max_unacked_messages=settings.max_unacked_messages,
        )
        # A consumer that reads in order receives delayed messages at once, as with Pulsar's Exclusive subscriptions.
        in_order = SUBSCRIPTIONS[name] is AckPattern.IN_ORDER
        view = None if in_order else delays.open_view(cursor.is_acked)
        return Subscription(self._log, cursor, gate=DispatchGate(limits), delays=view)

    def _publish(self, *, now_ms: int) -> None:
        wanted = (now_ms - self._begun_ms) * self._settings.messages_per_second // 1_000
        count = min(wanted - self._published, _PUBLISH_BATCH_MAX)
        if count <= 0:
            return
        messages = [self._message(now_ms) for _ in range(count)]
        positions = self._log.publish(messages)
        self._published += count
        self._recording.record(TOPIC, "", [
            Event(now_ms, EventKind.PUBLISH, position.ledger_id, position.entry_id, position.entry_id,
                  message.deliver_at_ms)
            for position, message in zip(positions, messages, strict=True)
        ])  # fmt: skip

    def _message(self, now_ms: int) -> Message:
        delayed = self._random.random() < self._settings.delayed_share
        deliver_at_ms = now_ms + self._random.randint(1, self._settings.delay_ms_max) if delayed else NO_DELAY
        return Message(b"order", deliver_at_ms=deliver_at_ms, publish_time_ms=now_ms)


@final
class _Worker:
    """One subscription with its consumers."""

    def __init__(self, name: str, habit: AckPattern, subscription: Subscription, broker: DemoBroker) -> None:
        self._name = name
        self._habit = habit
        self._subscription = subscription
        self._broker = broker
        self._due: list[_DueAck] = []
        self._cursor = subscription.cursor

    def dispatch(self, *, now_ms: int) -> None:
        """Send messages to each consumer, in random order, as far as it has room."""
        thinks_ms = _THINK_MS[self._habit]
        permits = _PUBLISH_BATCH_MAX // len(thinks_ms)
        for consumer in self._broker.random.sample(range(len(thinks_ms)), len(thinks_ms)):
            deliveries = self._subscription.dispatch(f"{self._name}-{consumer}", permits, now_ms=now_ms)
            for delivery in deliveries:
                self._plan_ack(delivery.position, now_ms=now_ms, think_ms=thinks_ms[consumer])

    def ack(self, *, now_ms: int) -> None:
        """Send the acks that are due, one by one or, in order, the last of them as a cumulative one."""
        before = reached = self._cursor.mark_delete_position
        while self._due and self._due[0].due_ms <= now_ms:
            position = heapq.heappop(self._due).position
            if self._habit is AckPattern.IN_ORDER:
                reached = max(reached, position)
            else:
                self._subscription.ack(position, now_ms=now_ms)
                self._broker.check_recording()
        if reached > before:
            self._subscription.ack_cumulative(reached, now_ms=now_ms)
        self._broker.check_recording()

    def persist(self, *, now_ms: int) -> None:
        """Persist if it is due."""
        if self._cursor.view.is_persist_due(now_ms=now_ms):
            self._cursor.persist(now_ms=now_ms)

    def close(self, *, now_ms: int) -> None:
        """Persist everything and close the subscription."""
        self._subscription.close(now_ms=now_ms)

    def _plan_ack(self, position: Position, *, now_ms: int, think_ms: float) -> None:
        chance = self._broker.random
        if self._habit is AckPattern.ONE_PERCENT_STUCK and chance.random() < _STUCK_SHARE:
            return
        takes_ms = think_ms if self._habit is AckPattern.IN_ORDER else chance.expovariate(1 / think_ms)
        heapq.heappush(self._due, _DueAck(now_ms + takes_ms, chance.random(), position))


def run(broker: DemoBroker, *, now_ms: Callable[[], int], until_ms: int) -> None:
    """Step a broker until a time, then close it."""
    while (present := now_ms()) < until_ms:
        broker.step(now_ms=present)
        time.sleep(0.001)
    broker.close(now_ms=now_ms())
