"""A small broker that runs until it is killed: one topic, three subscriptions, and a trace of all their events.

It uses the real library: messages in a durable log of several ledgers, acks through `Subscription` and `ManagedCursor`
on a real store, dispatch through the gate, delayed messages through the topic's shared index. `Recording` has every
accepted ack in the trace before the next one is sent. A store and a recording, its directory, are owned by one process
at a time. The recovery compares each cursor with its recording: sets, without counters.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import shutil
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, final
from urllib.parse import unquote

from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recording import EntrySet, SubscriptionHistory, histories, read_recording, segments
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.cursor import ManagedCursor
from ackstate.delay import TopicDelayIndex
from ackstate.dispatch.subscription import Subscription
from ackstate.errors import AckStateError
from ackstate.limits import DispatchGate, GateLimits
from ackstate.message import NO_DELAY, Message
from ackstate.stores.sqlite import SqliteStore
from ackstate.topic.log import MessageLog
from ackstate.topic_name import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from ackstate.analysis.trace.recording import Frame, Recording
    from ackstate.cursor.results import RecoveryReport
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


class DirectoryInUseError(AckStateError):
    """A directory has foreign contents, or is in use; it was not changed."""


@dataclass(frozen=True, slots=True)
class BrokerDirectory:
    """The directory of a broker: its store and its recording."""

    path: Path  # The directory

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self.path / "store"

    @property
    def recording(self) -> Path:
        """The recording's directory."""
        return self.path / "recording"

    def check_closed(self) -> None:
        """Check that no broker is running here."""
        if self.store.exists():
            SqliteStore(self.store).close()

    def clear(self) -> None:
        """Remove the leftovers of an earlier broker, after `check_closed`."""
        self.check_closed()
        if self.path.exists():
            shutil.rmtree(self.path)

    @contextmanager
    def begun(self) -> Iterator[tuple[SqliteStore, list[Frame]]]:
        """Open the store of a dead broker, with its recording.

        A recording that cannot be read is refused before the store is touched.
        """
        if not self.store.is_dir() or not any(self.store.iterdir()):
            raise DirectoryInUseError(f"{self.path}: not a broker's directory, expected a store in {self.store}")
        size = _size(self.recording)
        frames = list(read_recording(self.recording))
        store = SqliteStore(self.store)
        try:
            # A broker that was alive until now may have written meanwhile.
            if _size(self.recording) != size:
                frames = list(read_recording(self.recording))
            yield store, frames
        finally:
            store.close()

    @contextmanager
    def begun_or_new(self) -> Iterator[SqliteStore]:
        """Open the store of a new or a continuing broker; a new one has no recording."""
        if segments(self.recording):
            with self.begun() as (store, _):
                yield store
            return
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise DirectoryInUseError(f"{self.path}: not a directory")
        if self.path.is_dir() and not self.store.exists():
            for entry in sorted(self.path.iterdir()):
                raise DirectoryInUseError(f"{self.path}: not a broker's directory, it contains {entry.name!r}")
        store = SqliteStore(self.store)
        try:
            if store.metadata.children("/"):
                raise DirectoryInUseError(f"{self.path}: there is a store without its recording")
            yield store
        finally:
            store.close()


def _size(recording: Path) -> int:
    return sum(segment.stat().st_size for segment in segments(recording))


MARKER = ".ackstate-demo"
"""A file that tells a directory of a demo from one of somebody else's."""


@dataclass(frozen=True, slots=True)
class DemoDirectory:
    """The demo's results."""

    path: Path  # The directory

    @property
    def broker(self) -> BrokerDirectory:
        """The directory of the broker."""
        return BrokerDirectory(self.path / "broker")

    @property
    def trace(self) -> Path:
        """The Parquet trace."""
        return self.path / "trace.parquet"

    @property
    def summary(self) -> Path:
        """The outcome, for programs."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The outcome, for people."""
        return self.path / "report.html"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the directory, which must be empty, missing or that of an earlier demo, and mark it.

        The kernel releases the lock when the process ends, in any way.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise DirectoryInUseError(f"{self.path}: not a directory") from None
        # The directory itself is locked, because a lock file would stay behind, even in a foreign directory.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DirectoryInUseError(f"{self.path}: another demo is running here") from None
            marker = self.path / MARKER
            if not marker.exists() and any(self.path.iterdir()):
                raise DirectoryInUseError(f"{self.path}: not empty, and not the directory of a demo: choose another")
            marker.touch()
            self.broker.check_closed()
            yield
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class RecoveredCursor:
    """One recovered cursor, compared with its recording."""

    topic: str
    subscription: str
    report: RecoveryReport  # The recovery report
    mark_delete: str
    ranges: str  # Its individually deleted ranges, as Pulsar writes them
    acked: int  # Acks that had been accepted
    durable: int  # Entries that are acked in the recovered cursor
    observed: int  # Accepted acks that it lacks: these messages are redelivered
    lost: int  # Acks that it lacks although their persist had completed. Must be 0
    invented: int  # Entries that are acked in it, but were never acked. Must be 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = asdict(self)
        plain["report"] |= {
            "source": self.report.source.value,
            "mark_delete": str(self.report.mark_delete),
            "repair": self.report.repair.value,
        }
        return plain


def recover(
    store: Store, frames: Iterable[Frame], *, recording: Recording | None = None, now_ms: int
) -> list[RecoveredCursor]:
    """Recover every cursor of a store and compare each with its recording, to which the recovery may be added."""
    recorded = histories(frames)
    results = []
    for topic, subscription in _cursors(store):
        ledgers = MessageLog.open(store, topic=topic).ledgers
        cursor = ManagedCursor.open(store, topic=topic, subscription=subscription, ledgers=ledgers, now_ms=now_ms)
        history = recorded.get((topic, subscription), SubscriptionHistory())
        durable = EntrySet.of((ledger_id, first, last + 1) for ledger_id, first, last in cursor.view.acked_runs())
        results.append(
            RecoveredCursor(
                topic,
                subscription,
                cursor.recovery_report,
                mark_delete=str(cursor.mark_delete_position),
                ranges=str(cursor.deleted),
                acked=len(history.accepted),
                durable=len(durable),
                observed=len(history.accepted - durable),
                lost=len(history.promised - durable),
                invented=len(durable - history.accepted),
            )
        )
        if recording is not None:
            recording.follow(cursor, topic=topic, subscription=subscription, now_ms=now_ms)
        cursor.close(now_ms=now_ms)
    return results


def _cursors(store: Store) -> Iterator[tuple[str, str]]:
    for topic in store.metadata.children(ROOT):
        for subscription in store.metadata.children(f"{ROOT}/{topic}"):
            yield unquote(topic), unquote(subscription)
