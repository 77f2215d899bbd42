"""A topic with delayed messages, its subscriptions, and four of these that could be a burden to the others."""

from __future__ import annotations

from enum import Enum
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ackstate import Position
from ackstate.delay import TopicDelayIndex
from ackstate.entry_bitmap import bitmaps_of
from ackstate.position_set import PositionSet
from benchmarks.acked_entries import SEED
from benchmarks.delay.nothing_acked import pass_all
from benchmarks.delayed_messages import TICK_MS, LedgerOfMessages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from pyroaring import BitMap

_ALL = 1 << 32
_FIRST_LEDGER_ID = 1
_SLOW_EVERY_TICKS, _SLOW_MAX = 20, 100
_REOPENED_EVERY_TICKS, _SEEKS_EVERY_TICKS = 10, 30


class DelayedTraffic(NamedTuple):
    """Messages at a fixed rate, each delayed by up to a number of ticks; tick 0 is the first with messages.

    Attributes:
        rate: Messages published in a tick.
        publish_ticks: For how many ticks.
        delay_ticks: The longest delay.
        ledger_size: The number of messages per ledger of the log; a multiple of the rate.
    """

    rate: int = 1_000
    publish_ticks: int = 100
    delay_ticks: int = 50
    ledger_size: int = 50_000

    @property
    def ticks(self) -> int:
        """From the first publish to when all is due, and a little longer."""
        return self.publish_ticks + self.delay_ticks + 10

    def published(self) -> list[LedgerOfMessages]:
        """Return the messages published in each tick."""
        random = np.random.default_rng(SEED)
        messages = []
        for tick in range(self.publish_ticks):
            ledger, first = divmod(tick * self.rate, self.ledger_size)
            entry_ids = np.arange(first, first + self.rate, dtype=np.int64)
            times = now_ms(tick) + random.integers(1, self.delay_ticks * TICK_MS + 1, self.rate)
            messages.append(LedgerOfMessages(_FIRST_LEDGER_ID + ledger, entry_ids, times))
        return messages

    def due_ticks(self) -> NDArray[np.int64]:
        """Return of each message, in order, in which tick it is due, by times rounded up."""
        times = np.concatenate([messages.deliver_at_ms for messages in self.published()])
        return -(-times // TICK_MS) - now_ms(0) // TICK_MS


def now_ms(tick: int) -> int:
    """Return the time at a tick."""
    return 1_000_000 * TICK_MS + tick * TICK_MS


class SubscriberKind(Enum):
    """The actions of a subscription at each tick."""

    HEALTHY = "polls, and acks all it gets"
    STUCK = "never polls"
    SLOW = "polls at every 20th tick, for 100 messages"
    HOLE = "acks all it gets but the lowest"
    CHURN = "is closed and opened every 10 ticks, and seeks to the beginning every 30"


BURDENS = (SubscriberKind.STUCK, SubscriberKind.SLOW, SubscriberKind.HOLE, SubscriberKind.CHURN)


def is_slow_poll(tick: int) -> bool:
    """Return whether the slow one polls at a tick."""
    return tick % _SLOW_EVERY_TICKS == 0


def reopens(tick: int) -> bool:
    """Return whether the one that churns is closed and opened at a tick."""
    return tick % _REOPENED_EVERY_TICKS == _REOPENED_EVERY_TICKS - 1


@final
class Subscriber:
    """A subscription of a topic with a shared index, whose reader has met all that is published."""

    def __init__(self, index: TopicDelayIndex, log: PositionSet, kind: SubscriberKind) -> None:
        self.kind = kind
        self._index = index
        self._log = log
        self._acked = PositionSet()
        self._in_flight = PositionSet()
        self._open()

    def begin_tick(self, tick: int) -> None:
        """Do the actions other than reading and polling."""
        if self.kind is SubscriberKind.CHURN and reopens(tick):
            if tick % _SEEKS_EVERY_TICKS == _SEEKS_EVERY_TICKS - 1:
                self._acked.clear()
            self._read_from_start(tick)

    def poll(self, tick: int) -> list[Position]:
        """Return the messages handed out, none if this subscription does not poll."""
        if self.kind is SubscriberKind.STUCK or (self.kind is SubscriberKind.SLOW and not is_slow_poll(tick)):
            return []
        return self.view.scheduled_messages(
            _SLOW_MAX if self.kind is SubscriberKind.SLOW else _ALL, now_ms=now_ms(tick)
        )

    def ack(self, found: list[Position]) -> None:
        """Ack the messages handed out, except a hole."""
        for ledger_id, entries in bitmaps_of(found).items():
            if self.kind is SubscriberKind.HOLE and not self._in_flight:
                self._in_flight.add(Position(ledger_id, entries.min()))
                entries.discard(entries.min())
            self._acked.update_entries(ledger_id, entries)

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        """See `AckedAndSent`."""
        acked = self._acked.entries_of(ledger_id)
        if acked is not None:
            entries -= acked

    def not_sent_between(self, first: Position, end: Position) -> PositionSet:
        """See `AckedAndSent`."""
        found = PositionSet()
        found.update_between(self._log, first=first, end=end)
        found.difference_update(self._acked)
        found.difference_update(self._in_flight)
        return found

    def _open(self) -> None:
        self.view = self._index.open_view(self._acked.__contains__)
        self.view.attach(self)

    def _read_from_start(self, tick: int) -> None:
        self.view.close()
        self._open()
        unacked = list(self.not_sent_between(Position(0, 0), Position(_ALL, 0)))
        due = [position for position in unacked if not self.view.skip(position, now_ms=now_ms(tick))]
        for position in due:
            self._acked.include(*position)


@final
class IsolatedTopic:
    """A topic with a shared index and its subscriptions, the burdens in the midst of the others."""

    def __init__(self, traffic: DelayedTraffic, *, healthy: int, burdens: tuple[SubscriberKind, ...]) -> None:
        self._traffic = traffic
        self._published = traffic.published()
        self._due_counts = np.bincount(traffic.due_ticks(), minlength=traffic.ticks).tolist()
        self.index = TopicDelayIndex(tick_time_ms=TICK_MS)
        kinds = [SubscriberKind.HEALTHY] * healthy
        for at, kind in enumerate(burdens, 1):
            kinds.insert(at * len(kinds) // (len(burdens) + 1), kind)
        self._log = PositionSet()
        self.subscribers = [Subscriber(self.index, self._log, kind) for kind in kinds]

    def publish(self, tick: int) -> None:
        """Publish the messages of a tick, read them with all readers, and do the other actions before the polls."""
        if tick < self._traffic.publish_ticks:
            messages = self._published[tick]
            self.index.learn(messages.one_by_one())
            self._log.update_entries(messages.ledger_id, messages.as_bitmap())
            for each in self.subscribers:
                pass_all(each.view, [messages], now_ms=now_ms(tick))
        for each in self.subscribers:
            each.begin_tick(tick)

    def step(self, tick: int) -> None:
        """Publish and poll."""
        self.publish(tick)
        self.lags_ns(tick)

    def lags_ns(self, tick: int) -> list[int]:
        """Poll with all in turn; return the time until each healthy one has the messages due in this tick.

        Each gets exactly that: none is a tick late.
        """
        taken = []
        begin = perf_counter_ns()
        for each in self.subscribers:
            found = each.poll(tick)
            taken.append((each, found, perf_counter_ns() - begin))
        for each, found, _ in taken:
            assert each.kind is not SubscriberKind.HEALTHY or len(found) == self._due_counts[tick]
            each.ack(found)
        return [lag for each, _, lag in taken if each.kind is SubscriberKind.HEALTHY]

    def owned(self) -> Iterator[object]:
        """Yield the objects whose memory belongs to delayed delivery."""
        yield self.index
        for each in self.subscribers:
            yield each.view
