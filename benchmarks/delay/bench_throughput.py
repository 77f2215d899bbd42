"""The time to add a delayed message and to get it when it is due, by the number of waiting messages."""

from __future__ import annotations

from functools import partial
from itertools import count
from time import thread_time_ns
from typing import TYPE_CHECKING

from ackstate.analysis.workloads.traffic import HOUR_MS
from ackstate.delay import InMemoryDelayTracker, SubscriptionDelayView, TopicDelayIndex
from ackstate.entry_bitmap import bitmaps_of
from benchmarks.acked_entries import SEED
from benchmarks.delay.nothing_acked import NothingAcked, pass_all
from benchmarks.delayed_messages import (
    LEDGER_COUNT_MAX,
    TICK_MS,
    LedgerOfMessages,
    mixed_delays,
)
from benchmarks.measurement import Against, BenchmarkReport, TimedPart, Timing, timed_in_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ackstate import Position
    from ackstate.delay import DelayedDeliveryTracker

    Messages = Sequence[tuple[Position, int]]
    Adding = tuple[Callable[[Position, int], object], Messages]

ABOUT = (
    "CPU time. Messages due within an hour, any time as likely as another, tick 1 s, in ledgers of 50 thousand. Add: "
    "10 thousand more, one by one, to the messages held at the beginning. Drain: the clock goes through the hour in "
    "steps of a minute or of a tick, with a poll without a maximum after each, until all is handed out, each message "
    "once; only the polls are timed, with the 1 us that each takes to read the clock. A view's subscription has acked "
    "nothing and keeps track of the messages that it has sent. Each 278: in steps that hand out as many as a tick of a "
    "million does, in 20 ledgers, for each number held. The peer is `InMemoryDelayTracker`, at most a million. Pulsar: "
    "its in-memory tracker, uniform delays; increasing ones it adds in 72 ns."
)
HELD = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
HELD_BY_PEER_MAX = 1_000_000
ONE_BY_ONE = 10_000
STEPS = {"minute": 60_000, "tick": TICK_MS}
POLLED, POLLED_LEDGERS = 278, 20
UNIT = "ns a message"
PULSAR_ADD, PULSAR_DRAIN = Against("Pulsar", 1_800), Against("Pulsar", 250)
LIMIT_ADD, LIMIT_DRAIN = Against("limit", 1_000), Against("limit", 100)
DRAINS = (*STEPS, f"{POLLED}")
AGAINST = {
    "index.add": LIMIT_ADD,
    "view.add_message": LIMIT_ADD,
    "tracker.add_message": PULSAR_ADD,
    **{f"scheduled_messages each {step}": LIMIT_DRAIN for step in DRAINS},
    **{f"tracker drained each {step}": PULSAR_DRAIN for step in DRAINS},
}


def filled_index(held: int, ledger_size: int = LEDGER_COUNT_MAX) -> TopicDelayIndex:
    index = TopicDelayIndex(tick_time_ms=TICK_MS)
    for ledger in mixed_delays(held, ledger_size=ledger_size):
        index.learn(ledger.one_by_one())
    return index


def filled_view(held: int) -> SubscriptionDelayView:
    return view_to_drain(held)[0]


def filled_tracker(held: int) -> InMemoryDelayTracker:
    return tracker_to_drain(held)[0]


def view_to_drain(held: int, ledger_size: int = LEDGER_COUNT_MAX) -> tuple[SubscriptionDelayView, NothingAcked]:
    view = filled_index(held, ledger_size).open_view(lambda _position: False)
    ledgers = list(mixed_delays(held, ledger_size=ledger_size))
    subscription = NothingAcked((ledger.ledger_id, ledger.as_bitmap()) for ledger in ledgers)
    view.attach(subscription)
    pass_all(view, ledgers)
    return view, subscription


def tracker_to_drain(held: int, ledger_size: int = LEDGER_COUNT_MAX) -> tuple[InMemoryDelayTracker, NothingAcked]:
    tracker = InMemoryDelayTracker(tick_time_ms=TICK_MS)
    # The tracker does not keep the few messages that are due within the first tick.
    kept = [
        position
        for ledger in mixed_delays(held, ledger_size=ledger_size)
        for position, deliver_at_ms in ledger.one_by_one()
        if tracker.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=0)
    ]
    return tracker, NothingAcked(bitmaps_of(kept).items())


FILLED: dict[str, Callable[[int], TopicDelayIndex | DelayedDeliveryTracker]] = {
    "index.add": filled_index,
    "view.add_message": filled_view,
    "tracker.add_message": filled_tracker,
}


def more(size: int) -> Iterator[LedgerOfMessages]:
    """Yield messages of one new ledger after the other."""
    for ledger_id in count(1_000_000):
        (ledger,) = mixed_delays(size, first_ledger_id=ledger_id, ledger_size=size, seed=SEED + ledger_id)
        yield ledger


def add_timings(held: int, size: int) -> dict[str, Timing]:
    """Return the timed functions for adding one by one to `held` messages."""
    timings = {}
    for name, fill in FILLED.items():
        if held > HELD_BY_PEER_MAX and fill is filled_tracker:
            continue
        messages = more(size)
        make = _recreated_or_kept(held, fill)

        def fresh(make: Callable[[], object] = make, messages: Iterator[LedgerOfMessages] = messages) -> object:
            return make(), list(next(messages).one_by_one())

        timings[name] = Timing(_add_to_index if fill is filled_index else _add_to_tracker, fresh, size)
    return timings


def drain_timings(held: int) -> dict[str, Timing]:
    """Return the timed functions for getting `held` messages back."""
    timings = {}
    drains = {step: (step_ms, LEDGER_COUNT_MAX) for step, step_ms in STEPS.items()}
    if held <= HELD_BY_PEER_MAX:
        drains[f"{POLLED}"] = HOUR_MS * POLLED // held // TICK_MS * TICK_MS, max(1, held // POLLED_LEDGERS)
    for step, (step_ms, ledger_size) in drains.items():
        timings[f"scheduled_messages each {step}"] = Timing(
            partial(_drain, step_ms=step_ms), partial(view_to_drain, held, ledger_size), held
        )
        if held <= HELD_BY_PEER_MAX:
            timings[f"tracker drained each {step}"] = Timing(
                partial(_drain, step_ms=step_ms), partial(tracker_to_drain, held, ledger_size), held
            )
    return timings


def _recreated_or_kept(held: int, fill: Callable[[int], object]) -> Callable[[], object]:
    """Return a factory of filled objects: it reuses one object if a run adds little to it."""
    if held < HELD_BY_PEER_MAX:
        return partial(fill, held)
    kept = fill(held)
    return lambda: kept


def _add_to_index(adding: tuple[TopicDelayIndex, Messages]) -> None:
    index, messages = adding
    index.learn(messages)


def _add_to_tracker(adding: tuple[DelayedDeliveryTracker, Messages]) -> None:
    tracker, messages = adding
    for position, deliver_at_ms in messages:
        tracker.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=0)


def _drain(draining: tuple[DelayedDeliveryTracker, NothingAcked], *, step_ms: int) -> TimedPart:
    """Poll until the hour is over, and a little longer for times that were rounded up; only the polls are timed."""
    tracker, subscription = draining
    waiting = subscription.unsent_count
    nanos = drained = 0
    for now_ms in range(step_ms, HOUR_MS + step_ms + 1, step_ms):
        begun = thread_time_ns()
        due = tracker.scheduled_messages(HOUR_MS * TICK_MS, now_ms=now_ms)
        nanos += thread_time_ns() - begun
        drained += subscription.send(bitmaps_of(due).items())
    # Each message once: the number is right and none is left.
    assert (drained, subscription.unsent_count, tracker.delayed_message_count) == (waiting, 0, 0)
    return TimedPart(nanos)


def row(held: int, what: str) -> str:
    """Name a figure."""
    return f"{what}, {held:,} held"


def measure(report: BenchmarkReport, sizes: Sequence[int] = HELD, *, one_by_one: int = ONE_BY_ONE) -> None:
    """Report every way to add and to drain, by how many are held."""
    for held in sizes:
        runs = 7 if held < HELD_BY_PEER_MAX else 3
        for timings in (add_timings(held, one_by_one), drain_timings(held)):
            for what, spread in timed_in_turn(timings, runs=runs, clock=thread_time_ns).items():
                report.time(row(held, what), UNIT, spread, AGAINST[what])


if __name__ == "__main__":
    report = BenchmarkReport("delay_throughput", ABOUT)
    measure(report)
    report.publish()
