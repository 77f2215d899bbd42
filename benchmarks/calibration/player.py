"""A small broker that executes a workload, by the workload's clock, with the real cursor on a real store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from ackstate import ManagedCursor, Subscription
from ackstate.analysis.replay.cursor_replay import StoreWithoutLedgers
from ackstate.analysis.trace.events import EventKind
from ackstate.dispatch import SubscriptionOptions
from ackstate.ledger_map import LedgerMap
from ackstate.limits.gate import DispatchGate, GateLimits
from ackstate.message import Message
from ackstate.position import Position
from ackstate.stores.base import StoreError
from ackstate.stores.memory import MemoryStore
from ackstate.stores.sqlite import SqliteStore
from ackstate.topic.log import MessageLog
from benchmarks.calibration.workload import ENTRIES_PER_LEDGER, SUBSCRIPTION, CalibrationError

if TYPE_CHECKING:
    from pathlib import Path

    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.trace.events import Event
    from ackstate.stores.base import Store
    from benchmarks.calibration.workload import CalibrationWorkload, Instant


def open_store(directory: Path, policy: Policy) -> Store:
    """Open the store in a directory; under a policy without cursor ledgers it makes none."""
    return over_store(SqliteStore(directory), policy)


def over_store(store: Store, policy: Policy) -> Store:
    """Return a store as it is under a policy: without cursor ledgers, maybe."""
    return store if policy.ledger_writable else StoreWithoutLedgers(store)


class Dispatch(Protocol):
    """The interface between the workload and the cursor."""

    cursor: ManagedCursor

    def open(self, now_ms: int) -> None:
        """Open the cursor, once."""
        ...

    def publish(self, event: Event) -> None:
        """Append entries to the log."""
        ...

    def deliver(self, event: Event) -> None:
        """Send entries."""
        ...

    def ack(self, event: Event) -> None:
        """Ack entries."""
        ...


@final
class Player:
    """Plays a workload once, up to an instant.

    Args:
        workload: The workload.
        policy: How the cursor persists, and when the broker ticks.
        store: Where.
    """

    def __init__(self, workload: CalibrationWorkload, policy: Policy, store: Store) -> None:
        self._workload = workload
        self._policy = policy
        self._dispatch: Dispatch = (
            OverSubscription(workload.topic, policy, store) if policy.blocks else _OverCursor(workload, policy, store)
        )
        self._next_tick_ms = -1
        self.persisted_ms: list[int] = []
        """At which ticks something was persisted."""

    def play(self, instant: Instant) -> None:
        """Play everything until then."""
        for event in self._workload.events[: instant.played]:
            self._tick_until(event.ts_ms)
            match event.kind:
                case EventKind.PUBLISH:
                    self._dispatch.publish(event)
                case EventKind.DELIVER:
                    self._open(event.ts_ms)
                    self._dispatch.deliver(event)
                case _:
                    self._open(event.ts_ms)
                    self._dispatch.ack(event)
        self._tick_until(instant.until_ms)

    def tick(self, now_ms: int) -> bool:
        """Tick the broker, and return whether that persisted something."""
        try:
            result = self._dispatch.cursor.tick(now_ms=now_ms)
        except StoreError:
            # A state that the metadata store refuses as too large is retried at the next tick.
            return False
        if result is not None:
            self.persisted_ms.append(now_ms)
        return result is not None

    def _open(self, now_ms: int) -> None:
        """The cursor is opened by the first event of its subscription, and ticks from then on."""
        if self._next_tick_ms < 0:
            self._dispatch.open(now_ms)
            self._next_tick_ms = -(-now_ms // self._policy.tick_ms) * self._policy.tick_ms

    def _tick_until(self, end_ms: int) -> None:
        if self._next_tick_ms < 0:
            return
        while self._next_tick_ms < end_ms:
            self.tick(self._next_tick_ms)
            self._next_tick_ms += self._policy.tick_ms


class RecoveryResult(NamedTuple):
    """The result of a recovery.

    Attributes:
        lost: Acked entries that are not acked after the recovery.
        invented: Entries that are acked after the recovery and were never acked.
    """

    lost: int
    invented: int


def recover(workload: CalibrationWorkload, policy: Policy, store: Store, instant: Instant) -> RecoveryResult:
    """Open the cursor of a killed process, and compare it with the acked entries."""
    log = workload.log_at(instant)
    cursor = ManagedCursor.open(
        store, topic=workload.topic, subscription=SUBSCRIPTION, ledgers=LedgerMap.from_counts(log),
        config=policy.cursor, now_ms=instant.until_ms,
    )  # fmt: skip
    acked = workload.acked_at(instant)
    lost = sum(not cursor.is_acked(Position(*entry)) for entry in acked)
    others = [Position(ledger, entry) for ledger, count in log.items() for entry in range(count)]
    return RecoveryResult(lost, sum(cursor.is_acked(each) for each in others if tuple(each) not in acked))


@final
class _OverCursor:
    """The cursor alone, as for applications with their own dispatcher."""

    cursor: ManagedCursor

    def __init__(self, workload: CalibrationWorkload, policy: Policy, store: Store) -> None:
        self._workload, self._policy, self._store = workload, policy, store
        self._ledgers = LedgerMap(workload.events[0].ledger_id)

    def open(self, now_ms: int) -> None:
        self.cursor = ManagedCursor.open(
            self._store, topic=self._workload.topic, subscription=SUBSCRIPTION, ledgers=self._ledgers,
            config=self._policy.cursor, now_ms=now_ms,
        )  # fmt: skip

    def publish(self, event: Event) -> None:
        if event.ledger_id > self._ledgers.current_ledger_id:
            self._ledgers.roll(event.ledger_id)
        self._ledgers.append(event.last_entry + 1 - event.first_entry)

    def deliver(self, event: Event) -> None:
        self.cursor.delivered(Position(event.ledger_id, event.last_entry), now_ms=event.ts_ms)

    def ack(self, event: Event) -> None:
        entries = range(event.first_entry, event.last_entry + 1)
        if len(entries) == 1:
            self.cursor.ack(Position(event.ledger_id, event.first_entry), now_ms=event.ts_ms)
        else:
            self.cursor.ack_entries(event.ledger_id, entries, now_ms=event.ts_ms)


@final
class OverSubscription:
    """A subscription whose gate stops dispatch at a limit on bytes of acks that are not durable.

    Its messages are kept in memory: only the cursor has to survive.
    """

    cursor: ManagedCursor

    def __init__(self, topic: str, policy: Policy, store: Store) -> None:
        self._topic, self._policy, self._store = topic, policy, store
        self._log = MessageLog.open(MemoryStore(), topic=topic, entries_per_ledger_max=ENTRIES_PER_LEDGER)

    def open(self, now_ms: int) -> None:
        """See `Dispatch.open`."""
        self.cursor = ManagedCursor.open(
            self._store, topic=self._topic, subscription=SUBSCRIPTION, ledgers=self._log.ledgers,
            config=self._policy.cursor, now_ms=now_ms,
        )  # fmt: skip
        limits = GateLimits(max_unpersisted_ack_record_bytes=self._policy.max_unpersisted_ack_record_bytes)
        self.subscription = Subscription(
            self._log, self.cursor, gate=DispatchGate(limits), options=SubscriptionOptions(promotes_young=False)
        )

    def append(self, now_ms: int) -> Position:
        """Publish a message."""
        return self._log.publish([Message(b"", publish_time_ms=now_ms)])[0]

    def send_one(self, consumer: int, now_ms: int) -> Position | None:
        """Send a consumer one message, if there is one and the limit allows."""
        sent = self.subscription.dispatch(f"consumer-{consumer}", 1, now_ms=now_ms)
        return sent[0].position if sent else None

    def publish(self, event: Event) -> None:
        """See `Dispatch.publish`."""
        self._expect(Position(event.ledger_id, event.last_entry), self.append(event.ts_ms))

    def deliver(self, event: Event) -> None:
        """See `Dispatch.deliver`."""
        expected = Position(event.ledger_id, event.last_entry) if event.ledger_id >= 0 else None
        self._expect(expected, self.send_one(event.number, event.ts_ms))

    def ack(self, event: Event) -> None:
        """See `Dispatch.ack`."""
        self.subscription.ack(Position(event.ledger_id, event.first_entry), now_ms=event.ts_ms)

    def _expect(self, expected: Position | None, found: Position | None) -> None:
        if expected != found:
            raise CalibrationError(f"{self._topic}: expected {expected} to be next, found {found}")
