"""The memory of 100 thousand delayed messages, by the number of subscriptions of their topic."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ackstate.delay import BucketedDelayIndex, InMemoryDelayTracker, TopicDelayIndex
from benchmarks.delay.bench_bucketed import CONFIG, storage
from benchmarks.delay.footprint import growth, in_new_process
from benchmarks.delayed_messages import TICK_MS, mixed_delays
from benchmarks.measurement import Against, BenchmarkReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate import Position
    from ackstate.delay import DelayedDeliveryTracker

    Messages = Sequence[tuple[Position, int]]

ABOUT = (
    "Growth of a process of its own. Messages fall due within an hour, any time as likely as another, tick 1 s, in "
    "ledgers of 50 thousand. A tracker for each subscription is filled one by one. A shared index is filled so by the "
    "first subscription; the others have passed the same messages. Bytes of pages; for shared indexes, those of four "
    "topics at once. Bucketed: the first of the two ledgers is sealed, on disk. "
    "Pulsar: heap of 4.2.4 and 5.0.1 with a tracker for each of 1,000 subscriptions, 7.4 to 7.8 GB; it is exactly "
    "linear."
)
MESSAGES = 100_000
SUBSCRIPTIONS = (1, 10, 100, 1_000)
TOPICS = 4
PER_SUBSCRIPTION = "tracker a subscription"
SHARED = "shared index"
BUCKETED = "shared index, bucketed"
PULSAR_BYTES = 7.4e9, 7.8e9


def nothing_acked(_position: Position) -> bool:
    return False


def fill(tracker: DelayedDeliveryTracker, messages: Messages) -> None:
    for position, deliver_at_ms in messages:
        tracker.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=0)


def per_subscription(messages: Messages, count: int, _stores: ExitStack) -> object:
    trackers = [InMemoryDelayTracker.from_config(CONFIG) for _ in range(count)]
    for tracker in trackers:
        fill(tracker, messages)
    return trackers


def shared(messages: Messages, count: int, _stores: ExitStack) -> object:
    return _views_of(TopicDelayIndex(tick_time_ms=TICK_MS), messages, count)


def bucketed(messages: Messages, count: int, stores: ExitStack) -> object:
    stored = stores.enter_context(storage())
    return _views_of(BucketedDelayIndex(CONFIG, storage=stored), messages, count)


def _views_of(index: TopicDelayIndex | BucketedDelayIndex, messages: Messages, count: int) -> object:
    views = [index.open_view(nothing_acked) for _ in range(count)]
    fill(views[0], messages)
    for view in views[1:]:
        assert all(view.skip(messages[at][0], now_ms=0) for at in (0, -1))
    assert views[-1].delayed_message_count == len(messages)
    return views


DESIGNS: dict[str, Callable[[Messages, int, ExitStack], object]] = {
    PER_SUBSCRIPTION: per_subscription,
    SHARED: shared,
    BUCKETED: bucketed,
}


def grown(design: str, count: int) -> float:
    """Return the growth of this process in bytes for a topic with subscriptions that all have the same messages."""
    made = [message for ledger in mixed_delays(MESSAGES) for message in ledger.one_by_one()]
    copies = 1 if design == PER_SUBSCRIPTION else TOPICS
    with ExitStack() as stores:
        # A warm-up: the allocations of the first use do not belong to the messages.
        DESIGNS[design](made[:100], 1, stores)
        return growth(lambda: [DESIGNS[design](made, count, stores) for _ in range(copies)]) / copies


def measure(report: BenchmarkReport) -> None:
    """Report the memory of each design, and how the shared ones compare."""
    taken = {
        (design, count): in_new_process("benchmarks.delay.bench_subscriptions", design, count)[0]
        for design in DESIGNS
        for count in SUBSCRIPTIONS
    }
    for (design, count), number in taken.items():
        against = Against("trackers", taken[PER_SUBSCRIPTION, count] / 1e6) if design != PER_SUBSCRIPTION else None
        report.count(f"{design}, {count:,} subscription{'s' if count > 1 else ''}", "MB", number / 1e6, against)
    one, most = min(SUBSCRIPTIONS), max(SUBSCRIPTIONS)
    for design in (SHARED, BUCKETED):
        # Not asserted of the bucketed one, which has so little in memory that a thousand views weigh as much.
        against = Against("limit" if design == SHARED else "goal", 1.5)
        report.count(
            f"{design}: {most:,} subscriptions by one", "times", taken[design, most] / taken[design, one], against
        )
        times = taken[PER_SUBSCRIPTION, most] / taken[design, most]
        report.count(f"{most:,} trackers by one {design}", "times", times, Against("at least", 500))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(grown(sys.argv[1], int(sys.argv[2])))
    else:
        report = BenchmarkReport("delay_subscriptions", ABOUT)
        measure(report)
        report.publish()
