"""How long an event loop is held up by the syncs of many topics: called in the loop itself, and awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from ackstate import Message, SqliteStore
from ackstate.aio import AsyncTopics
from ackstate.topic.topics import Topics
from benchmarks.measurement import Against, BenchmarkReport, Spread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

TOPICS = 20
SECONDS = 2.0
ROUNDS = 5
BATCH = 10
PAUSE_S = 0.001
ABOUT = (
    f"{TOPICS} topics on an SQLite store, each with a producer, which publishes {BATCH} messages of 100 bytes, and a "
    "consumer that receives and acks them, one after the other and without a pause; all subscriptions are persisted "
    "twice a second. Meanwhile a task sleeps for a millisecond again and again: if it sleeps longer, the loop was held "
    "up that long, for all connections of a broker. In the loop: `Topics`, whose calls sync in the loop's thread. "
    f"Awaited: `AsyncTopics`. {ROUNDS} rounds of {SECONDS:.0f} s each, in turn."
)


Step = Callable[[], Awaitable[object]]


class HoldUp(NamedTuple):
    """The result of one round."""

    median_ms: float
    p99_ms: float
    max_ms: float
    messages_per_second: float


def now_ms() -> int:
    """Return the present."""
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def in_the_loop(store: SqliteStore) -> AsyncIterator[list[Step]]:
    """Yield, for each topic, a function that publishes, receives and acks; every call syncs in the loop."""
    with Topics(store) as topics:

        async def step(name: str) -> None:
            topic = topics[name]
            topic.publish([Message(bytes(100))] * BATCH, now_ms=now_ms())
            for delivery in topic.subscriptions["s"].dispatch("ann", BATCH, now_ms=now_ms()):
                topic.subscriptions["s"].ack(delivery.position, now_ms=now_ms())
            await asyncio.sleep(0)

        async def persist() -> None:
            while True:
                await asyncio.sleep(0.5)
                topics.tick(now_ms=now_ms())

        names = [f"t{number}" for number in range(TOPICS)]
        for name in names:
            topics.open(name, now_ms=now_ms()).subscribe("s", now_ms=now_ms())
        persisting = asyncio.create_task(persist())
        yield [partial(step, name) for name in names]
        persisting.cancel()


@asynccontextmanager
async def awaited(store: SqliteStore) -> AsyncIterator[list[Step]]:
    """Yield the same functions, which wait for the syncs of a thread."""
    async with AsyncTopics(store, clock=now_ms, tick_ms=500) as topics:

        async def step(name: str) -> None:
            topic = await topics.open(name)
            subscription = await topic.subscribe("s")
            await topic.publish([Message(bytes(100))] * BATCH)
            await subscription.add_permits("ann", BATCH)
            for _, deliveries in (await subscription.next_round()).deliveries:
                for delivery in deliveries:
                    await subscription.ack(delivery.position)

        names = [f"t{number}" for number in range(TOPICS)]
        for name in names:
            await (await (await topics.open(name)).subscribe("s")).consumer_opened("ann")
        yield [partial(step, name) for name in names]


async def measure(
    opened: Callable[[SqliteStore], AbstractAsyncContextManager[list[Step]]], store: SqliteStore
) -> HoldUp:
    """Run all topics for a while, and return how long the loop was held up."""
    async with opened(store) as steps:
        begin, count, late = time.perf_counter(), 0, []

        async def work(step: Step) -> None:
            nonlocal count
            while time.perf_counter() < begin + SECONDS:
                await step()
                count += BATCH

        async def listen() -> None:
            while time.perf_counter() < begin + SECONDS:
                before = time.perf_counter()
                await asyncio.sleep(PAUSE_S)
                late.append((time.perf_counter() - before - PAUSE_S) * 1_000)

        await asyncio.gather(listen(), *map(work, steps))
        late.sort()
        took = time.perf_counter() - begin
    return HoldUp(late[len(late) // 2], late[len(late) * 99 // 100], late[-1], count / took)


def compare() -> BenchmarkReport:
    """Run both in turn."""
    found: dict[str, list[HoldUp]] = {"in the loop": [], "awaited": []}
    for _ in range(ROUNDS):
        for name, opened in (("in the loop", in_the_loop), ("awaited", awaited)):
            with TemporaryDirectory() as directory, closing(SqliteStore(Path(directory) / "store")) as store:
                found[name].append(asyncio.run(measure(opened, store)))
    report = BenchmarkReport("asyncio", ABOUT)
    for field, unit, what in (
        ("median_ms", "ms", "held up, median"),
        ("p99_ms", "ms", "held up, 99 of 100 times at most"),
        ("max_ms", "ms", "held up, worst"),
        ("messages_per_second", "messages/s", "messages from publish to ack"),
    ):
        in_loop, awaits = (Spread.of(getattr(each, field) for each in found[name]) for name in found)
        report.time(what, unit, awaits, Against("in the loop", in_loop.median, in_loop.high))
    return report


if __name__ == "__main__":
    compare().publish()
