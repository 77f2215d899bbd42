"""Random schedules in asyncio on a slow store: a call that is cancelled, at whatever await, has happened or has not."""

import asyncio
import time
from collections import Counter
from contextlib import suppress
from random import Random

import pytest

from ackstate import (
    CursorConfig,
    DeadLetterPolicy,
    MemoryStore,
    Message,
    Start,
    StoreError,
    SubscriptionType,
    TopicSettings,
)
from ackstate.aio import AsyncTopics
from ackstate.delay import DelayConfig
from ackstate.dispatch import SubscriptionOptions
from ackstate.errors import AckStateError, CursorClosedError
from wrapped_store import before_each_call

PERMITS = 5
REDELIVERIES_MAX = 2
STEPS = 80


def now_ms():
    return time.time_ns() // 1_000_000


class Schedule:
    """A subscription with a consumer; the model knows its permits, its messages, and how often each was received."""

    def __init__(self, seed):
        self.random = Random(seed)
        self.disk = MemoryStore()
        self.kind = self.random.choice(list(SubscriptionType))
        has_dead_letters = self.random.random() < 0.5
        options = SubscriptionOptions(
            dead_letters=DeadLetterPolicy(REDELIVERIES_MAX, topic="dead") if has_dead_letters else None
        )
        self.settings = TopicSettings(
            options=options,
            cursor=CursorConfig(
                flush_interval_ms=self.random.choice((0, 5, 60_000)),
                metadata_bytes_max=self.random.choice((1, 900_000)),
                ledger_retry_ms=0,
            ),
            delay_index=DelayConfig(tick_time_ms=1),
            entries_per_ledger_max=self.random.choice((3, 1_000)),
        )
        self.published, self.received, self.has, self.acked = set(), Counter(), set(), set()
        self.permits = PERMITS
        self.receipts, self.waiting = [], []

    async def run(self):
        # Each call takes up to two milliseconds, in whatever thread it is made.
        store = before_each_call(self.disk, lambda _: time.sleep(self.random.choice((0, 0, 0.0005, 0.002))))
        topics = AsyncTopics(store, settings=self.settings, clock=now_ms, tick_ms=1)
        try:
            async with topics:
                self.topic = await topics.open("t")
                self.subscription = await self.topic.subscribe("s", start=Start.EARLIEST, kind=self.kind)
                await self.subscription.consumer_opened("ann", permits=PERMITS)
                for _ in range(self.random.randrange(STEPS)):
                    await self.step()
                await self.random.choice((self.end_in_vain, self.end_subscription, self.end_at_once))(topics)
                raise asyncio.CancelledError
        except asyncio.CancelledError:
            pass
        for receipt, waiting in self.waiting:
            await self.check_answer(receipt, waiting)

    async def end_at_once(self, topics):
        """Leave everything to the end of the block."""

    async def end_subscription(self, topics):
        await self.cancelled_now_and_then(self.subscription.close)

    async def end_in_vain(self, topics):
        """Close while the store fails, again and again; whoever waits is answered, and may ask once more."""
        self.disk.break_ledgers()
        next_round = asyncio.ensure_future(self.subscription.next_round())
        for _ in range(3):
            with suppress(StoreError):
                await self.cancelled_now_and_then(topics.close)
        with suppress(StoreError):
            await topics.close()
        waiting = [each for _, each in self.waiting]
        outcomes = await asyncio.wait_for(asyncio.gather(next_round, *waiting, return_exceptions=True), 10)
        if any(isinstance(each, StoreError) for each in outcomes):
            assert not self.subscription.subscription.cursor.view.is_closed
        self.waiting = [(receipt, self.subscription.durable(receipt[0])) for receipt, _ in self.waiting]
        self.disk.mend_ledgers()

    async def cancelled_now_and_then(self, function, *args, **named):
        """Call, and return whether the call returned, and what."""
        task = asyncio.ensure_future(function(*args, **named))
        if self.random.random() < 0.5:
            if self.random.random() < 0.5:
                for _ in range(self.random.randrange(6)):
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(self.random.random() * 0.006)
            task.cancel()
        (outcome,) = await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 10)
        if isinstance(outcome, asyncio.CancelledError):
            return False, None
        if isinstance(outcome, BaseException):
            raise outcome
        return True, outcome

    async def step(self):
        draw, subscription = self.random.choice, self.subscription
        call = self.cancelled_now_and_then
        event = draw(("publish", "round", "round", "round", "ack", "ack", "nack", "nack", "permits", "durable", "seek"))
        if event == "publish":
            is_done, positions = await call(self.topic.publish, [Message(b"", key=draw((b"k", b"l")))] * draw((1, 3)))
            self.published.update(positions or ())
        elif event == "round":
            await self.round()
        elif event == "ack" and self.has:
            position = draw(sorted(self.has))
            is_done, receipt = await call(subscription.ack, position)
            if is_done:
                self.has.remove(position)
                self.acked.add(position)
                self.receipts.append((receipt, position))
        elif event == "nack" and self.has:
            position = draw(sorted(self.has))
            is_done, _ = await call(subscription.nack, position, delay_ms=draw((0, 1, 5)))
            if is_done:
                gone = {each for each in self.has if each >= position} if self.kind.is_single_active else {position}
                self.has -= gone
        elif event == "permits":
            is_done, _ = await call(subscription.add_permits, "ann", PERMITS)
            self.permits += PERMITS * is_done
        elif event == "durable" and self.receipts:
            receipt = draw(self.receipts)
            self.waiting.append((receipt, asyncio.ensure_future(subscription.durable(receipt[0]))))
        elif event == "seek" and self.acked and self.random.random() < 0.2:
            await self.seek()
        assert subscription.subscription.permits("ann") == self.permits
        assert subscription.subscription.unacked_messages == len(self.has)

    async def round(self):
        """Receive a round, if one comes soon."""
        waiting = asyncio.ensure_future(self.subscription.next_round())
        await asyncio.wait({waiting}, timeout=self.random.choice((0, 0.001, 0.01)))
        waiting.cancel()
        (sent,) = await asyncio.gather(waiting, return_exceptions=True)
        if isinstance(sent, asyncio.CancelledError):
            return
        for _, deliveries in sent.deliveries:
            for position, _, redelivery_count, _ in deliveries:
                assert position not in self.has | self.acked
                assert redelivery_count == self.received[position]
                self.received[position] += 1
                self.has.add(position)
                self.published.add(position)  # by a publish that was cancelled
                self.permits -= 1

    async def seek(self):
        first = min(self.acked)
        before = await self.subscription.ack(first)
        await self.cancelled_now_and_then(self.subscription.seek, first)
        if self.subscription.subscription.cursor.view.is_void(before):
            self.has.clear()
            self.received.clear()
            first = max(first, self.topic.topic.log.ledgers.first_position)  # Others may have been trimmed.
            self.acked = {each for each in self.published if each < first}

    async def check_answer(self, receipt, waiting):
        """Whoever waited for an ack is answered: it is durable, or a seek came."""
        try:
            await asyncio.wait_for(waiting, 10)
        except CursorClosedError:
            raise AssertionError("a clean end left an ack behind") from None
        except AckStateError:
            assert self.subscription.subscription.cursor.view.is_void(receipt[0])

    async def after_a_restart(self):
        """Every ack counts, and every other message comes, or is a dead letter."""
        async with AsyncTopics(MemoryStore(self.disk.disk), clock=now_ms) as topics:
            subscription = await (await topics.open("t")).subscribe("s")
            is_acked = subscription.subscription.cursor.is_acked
            assert all(map(is_acked, self.acked))
            dead = await (await topics.open("dead")).subscribe("all", start=Start.EARLIEST)
            letters = dead.subscription.dispatch("bob", 1_000, now_ms=now_ms())
            dead_positions = {each.message.properties["ORIGIN_MESSAGE_ID"] for each in letters}
            left = {each for each in self.published - self.acked if not is_acked(each)}
            assert {str(each) for each in self.published - self.acked - left} <= dead_positions
            got = subscription.subscription.dispatch("ann", 1_000, now_ms=now_ms())
            assert left <= {each.position for each in got}


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_a_cancelled_call_has_happened_or_not(first):
    for seed in range(first, first + 10):
        schedule = Schedule(seed)
        asyncio.run(asyncio.wait_for(schedule.run(), 60))
        asyncio.run(schedule.after_a_restart())
