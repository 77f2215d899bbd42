"""The time to send a message through a `Subscription` and process its ack, in different states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ackstate import LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.dispatch import Subscription, SubscriptionType
from ackstate.limits import DispatchGate, GateLimits
from ackstate.message import Message
from ackstate.topic.log import SoleUse
from benchmarks.acked_entries import SEED
from benchmarks.measurement import Against, BenchmarkReport, Spread, Timing, timed_in_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ABOUT = (
    "Everything in memory, nothing persisted; the log gives the same message for every position, so that the times are "
    "the Subscription's own. A gate with every limit on, and none in reach, decides on each message. Dispatch is of "
    "100 messages, an ack of one entry, in the order sent or in one that has nothing to do with it, above the holes. "
    "The closed gate is that of a range limit, reached with every other message acked and the others with one "
    "consumer."
)
LEDGER = 7
SENT = 2_000
BATCH = 100
BARE = "ack by a bare cursor"
# How many holes there are, and how many messages above them.
STATES = {
    "no holes": (0, 1_000_000),
    "10 k holes": (10_000, 1_000_000),
    "1 M holes": (1_000_000, 1_000_000),
    "no holes, backlog of a billion": (0, 1_000_000_000),
}
MANY = 100_000
MANY_RUNS = 3
NO_LIMITS = GateLimits(
    max_unpersisted_ack_record_bytes=0, max_unacked_messages=0, max_unacked_messages_per_consumer=0
)  # fmt: skip
# Closed while there are as many holes as in `with_holes_in_flight`.
FULL = replace(NO_LIMITS, max_unacked_ranges=MANY)
# Large enough never to close here, but checked each time.
OPEN_LIMITS = GateLimits(
    max_unpersisted_ack_record_bytes=2**40, max_unacked_messages=2**40, max_unacked_messages_per_consumer=2**40,
    max_unacked_ranges=2**40,
)  # fmt: skip


class SameMessageLog:
    """A log that has the same message everywhere, each of a key of its own choosing if there are several."""

    def __init__(self, entry_count: int, *, keys: Sequence[bytes | None] = (None,)) -> None:
        self.topic = "t"
        self.ledgers = LedgerMap.from_counts({LEDGER: entry_count})
        self.sole_use = SoleUse("this log")
        self._messages = [Message(b"", key=key) for key in keys]

    def add_listener(self, listener: object) -> None:
        """See `MessageLog.add_listener`: nothing is published here."""

    def read(self, positions: Sequence[Position]) -> Iterator[Message]:
        """See `MessageLog.read`."""
        messages = self._messages
        return iter([messages[entry_id % len(messages)] for _, entry_id in positions])


class Subscribed(NamedTuple):
    """A subscription and its cursor."""

    cursor: ManagedCursor
    subscription: Subscription


def subscribed(
    log: SameMessageLog, *, limits: GateLimits = OPEN_LIMITS, kind: SubscriptionType = SubscriptionType.SHARED
) -> Subscribed:
    """Open a subscription in a store of its own."""
    cursor = ManagedCursor.open(MemoryStore(), topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
    return Subscribed(cursor, Subscription(log, cursor, gate=DispatchGate(limits), kind=kind))


def above_holes(holes: int, *, backlog: int) -> Subscribed:
    """Open one that has holes of one entry, and has read past them."""
    opened = subscribed(SameMessageLog(2 * holes + 1 + backlog))
    if holes:
        opened.cursor.ack_entries(LEDGER, np.arange(1, 2 * holes, 2, dtype=np.uint32), now_ms=0)
    # The first is left unacked, so that the acked ranges stay.
    opened.cursor.reader.rewind(Position(LEDGER, 2 * holes + 1))
    return opened


def send(subscription: Subscription, number: int = SENT, *, consumer: str = "c") -> list[Position]:
    """Dispatch messages, a hundred per call."""
    positions: list[Position] = []
    while len(positions) < number:
        sent = subscription.dispatch(consumer, BATCH, now_ms=1)
        assert sent
        positions += [delivery.position for delivery in sent]
    return positions


def send_and_ack(subscription: Subscription) -> None:
    """Dispatch and ack, in order: the timed function."""
    for _ in range(SENT // BATCH):
        for delivery in subscription.dispatch("c", BATCH, now_ms=1):
            subscription.ack(delivery.position, now_ms=1)


def ack_each(acks: Callable[..., object], positions: Sequence[Position]) -> None:
    """Ack one by one, through a subscription or a bare cursor: the timed function."""
    for position in positions:
        acks(position, now_ms=1)


def send_shuffled(subscription: Subscription) -> list[Position]:
    """Dispatch, and return the positions in an order that has nothing to do with theirs."""
    positions = send(subscription)
    return [positions[at] for at in np.random.default_rng(SEED).permutation(SENT)]


def measure_messages(report: BenchmarkReport) -> None:
    """One message there and back, by ack holes and by backlog, beside the ack of a bare cursor."""
    timings = {}
    for name, (holes, backlog) in STATES.items():
        timings |= message_timings(name, holes=holes, backlog=backlog)
    spreads = timed_in_turn(timings)
    for what, spread in spreads.items():
        _, name = what.split(": ")
        bare = spreads[f"{BARE}: {name}"]
        report.time(what, "us", spread, None if spread is bare else Against("ours, bare", bare.median))


def message_timings(name: str, *, holes: int, backlog: int) -> dict[str, Timing]:
    """Return the timed functions for one state; each has its own subscription."""
    there_and_back, dispatched, acked, shuffled, bare = (above_holes(holes, backlog=backlog) for _ in range(5))
    unacked: list[Position] = []

    def ack_the_last() -> None:
        ack_each(dispatched.subscription.ack, unacked)
        unacked.clear()

    each = 1e3 * SENT
    return {
        f"dispatch and ack: {name}": Timing(lambda _: send_and_ack(there_and_back.subscription), lambda: None, each),
        f"dispatch: {name}": Timing(lambda _: unacked.extend(send(dispatched.subscription)), ack_the_last, each),
        f"ack in order: {name}": Timing(
            partial(ack_each, acked.subscription.ack), partial(send, acked.subscription), each
        ),
        f"ack out of order: {name}": Timing(
            partial(ack_each, shuffled.subscription.ack), partial(send_shuffled, shuffled.subscription), each
        ),
        f"{BARE}: {name}": Timing(partial(ack_each, bare.cursor.ack), partial(bare.cursor.reader.read, SENT), each),
    }


def with_holes_in_flight(*, limits: GateLimits = NO_LIMITS) -> Subscribed:
    """Open one with every other message acked and the others in flight with one consumer, then set its limits."""
    opened = subscribed(SameMessageLog(2 * MANY + SENT), limits=NO_LIMITS)
    subscription = opened.subscription
    while opened.cursor.deleted.range_count < MANY:
        for position in send(subscription, BATCH, consumer="stuck")[1::2]:
            subscription.ack(position, now_ms=1)
    subscription.change_limits(limits)
    return opened


def measure_many(report: BenchmarkReport) -> None:
    """An operation on all holes at once, or on everything in flight."""
    lives = [timed_life() for _ in range(MANY_RUNS)]
    for what, (_, unit) in lives[0].items():
        taken = [life[what][0] for life in lives]
        report.time(what, unit, Spread.of(taken))


def timed_life() -> dict[str, tuple[float, str]]:
    """Time, one after the other, the operations on a subscription with a stuck consumer until its holes are filled."""
    closed = with_holes_in_flight(limits=FULL).subscription
    opened = with_holes_in_flight().subscription
    holes, waiting = f"{MANY:,} holes in flight", f"{MANY:,} holes to be filled"
    return {
        f"{holes}, gate closed: dispatch of nothing": (_ns(lambda: dispatch_nothing(closed)) / SENT / 1e3, "us"),
        f"{holes}, gate closed: why_blocked": (_ns(closed.why_blocked) / 1e6, "ms"),
        f"{holes}, gate closed: explain_holes": (_ns(closed.explain_holes) / 1e6, "ms"),
        f"{holes}, gate closed: the consumer closes": (_ns(lambda: closed.consumer_closed("stuck")) / 1e6, "ms"),
        f"{holes}, gate open: the consumer closes": (_ns(lambda: opened.consumer_closed("stuck")) / 1e6, "ms"),
        f"{waiting}: the first dispatch after the gate closed": (_ns(lambda: dispatch_first(opened)) / 1e6, "ms"),
        f"{waiting}: dispatch and ack from then on": (_ns(lambda: send_and_ack(opened)) / SENT / 1e3, "us"),
    }


def dispatch_nothing(subscription: Subscription) -> None:
    """Request from a closed gate repeatedly: the timed function."""
    for _ in range(SENT):
        assert not subscription.dispatch("c", 1, now_ms=1)


def dispatch_first(subscription: Subscription) -> None:
    """Close the gate and get a message that fills a hole: the timed function."""
    subscription.change_limits(FULL)
    assert len(subscription.dispatch("c", 1, now_ms=1)) == 1


def _ns(thing: Callable[[], object]) -> float:
    start = perf_counter_ns()
    thing()
    return perf_counter_ns() - start


if __name__ == "__main__":
    report = BenchmarkReport("subscription", ABOUT)
    measure_messages(report)
    measure_many(report)
    report.publish()
