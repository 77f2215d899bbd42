"""Opens, persists and closes many topics of one store: time and memory."""

from __future__ import annotations

import gc
import os
import tempfile
from contextlib import closing
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

from ackstate import Message, SqliteStore, Start, Subscription, Topics
from ackstate.topic import SubscriptionRequest
from benchmarks.measurement import BenchmarkReport, Spread

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.position import Position
    from ackstate.stores import Store

ABOUT = (
    "Topics with ten Shared subscriptions each in a store in a temporary directory; one thread. "
    "Each topic has 20 messages. Time passes between two ticks, so that everything acked is due. Before a tick with "
    "acks, every subscription acked one message out of order. All topics are opened together, and all subscriptions. "
    "Memory is that of the process, with everything open."
)
TOPICS = 1_000
SUBSCRIPTIONS = 10
MESSAGES = 20
RUNS = 3
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Clock:
    """Times calls, by name, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[[], object]) -> object:
        gc.collect()
        gc.disable()
        start_ns = perf_counter_ns()
        try:
            return call()
        finally:
            self.seconds.setdefault(name, []).append((perf_counter_ns() - start_ns) / 1e9)
            gc.enable()


def open_all(store: Store, topic_count: int, *, now_ms: int) -> Topics:
    """Open every topic with its subscriptions; a new subscription starts at the first message."""
    topics = Topics(store)
    opened = topics.open_all([f"topic {number}" for number in range(topic_count)], now_ms=now_ms)
    requests = [SubscriptionRequest(f"s{number}", Start.EARLIEST) for number in range(SUBSCRIPTIONS)]
    outcomes = topics.subscribe_all(dict.fromkeys(opened, requests), now_ms=now_ms)
    assert all(isinstance(outcome, Subscription) for outcome in outcomes.values())
    return topics


def publish(topics: Topics, *, now_ms: int) -> dict[str, list[Position]]:
    """Publish the messages of every topic with one sync."""
    published = topics.publish({name: [Message(bytes(100))] * MESSAGES for name in topics}, now_ms=now_ms)
    assert all(isinstance(positions, list) for positions in published.values())
    return published


def ack(topics: Topics, published: dict[str, list[Position]], number: int, *, now_ms: int) -> None:
    """Ack one message of every subscription."""
    for name, positions in published.items():
        for subscription in topics[name].subscriptions.values():
            subscription.ack(positions[number], now_ms=now_ms)


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def measure(report: BenchmarkReport, *, topic_count: int, runs: int) -> None:
    """Open, persist and close many topics in one store."""
    clock = _Clock()
    cursor_count = topic_count * SUBSCRIPTIONS
    with tempfile.TemporaryDirectory() as directory:
        path, now_ms = Path(directory) / "store", 0
        with closing(SqliteStore(path)) as store:
            gc.collect()
            before = resident_bytes()
            topics = clock.time("open", lambda: open_all(store, topic_count, now_ms=0))
            assert isinstance(topics, Topics)
            published = publish(topics, now_ms=1)
            gc.collect()
            report.count("memory of an open subscription", "bytes", (resident_bytes() - before) / cursor_count)
            for run in range(runs):
                now_ms += 10_000
                ack(topics, published, 2 * run + 1, now_ms=now_ms)
                name = "first tick" if run == 0 else "tick with acks"
                outcomes = clock.time(name, lambda now_ms=now_ms: topics.tick(now_ms=now_ms))
                assert len(outcomes) == cursor_count
                clock.time("idle tick", lambda now_ms=now_ms: topics.tick(now_ms=now_ms + 5_000))
                clock.time("next wake", lambda: topics.next_wake_ms)
            for run in range(runs):
                now_ms += 10_000
                ack(topics, published, 2 * run, now_ms=now_ms)
                clock.time("close", lambda now_ms=now_ms, topics=topics: topics.close(now_ms=now_ms))
                topics = clock.time("reopen", lambda now_ms=now_ms: open_all(store, topic_count, now_ms=now_ms))
                assert isinstance(topics, Topics)
            topics.close(now_ms=now_ms)
    texts = {
        "open": ("open new topics and subscriptions", "s", 1),
        "first tick": ("first tick with acks, which begins the journals", "s", 1),
        "tick with acks": ("tick, one ack in each subscription", "ms", 1e3),
        "idle tick": ("tick, nothing to persist", "ms", 1e3),
        "next wake": ("next_wake_ms, nothing to persist", "ms", 1e3),
        "close": ("close, one ack in each subscription", "s", 1),
        "reopen": ("open again", "s", 1),
    }
    for name, (what, unit, factor) in texts.items():
        measured = [seconds * factor for seconds in clock.seconds[name]]
        report.time(f"{what}, {topic_count:,} topics, {cursor_count:,} subscriptions", unit, Spread.of(measured))


if __name__ == "__main__":
    report = BenchmarkReport("topics", ABOUT)
    measure(report, topic_count=TOPICS, runs=RUNS)
    report.publish()
