"""Topics and subscriptions in asyncio: syncs hold nothing up, cancelled calls lose nothing, and the end is clean."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, suppress

import pytest

import ackstate.cursor.topic.topic as topic_module
from ackstate.cursor import (
    BacklogPolicy,
    BacklogQuotaExceededError,
    CursorConfig,
    MemoryStore,
    Message,
    Retention,
    StoreError,
    SubscriptionRequest,
    SubscriptionType,
    SubscriptionTypeError,
)
from ackstate.cursor.aio import AsyncTopics
from ackstate.cursor.stores.memory import Fault, FaultKind
from ackstate.cursor.topic.settings import TopicSettings
from ackstate.cursor.topic.start import Start
from ackstate.errors import CursorClosedError, InvalidPositionError, TopicClosedError
from ackstate.limits import BrokerDelayedDelivery, DeliveryDelayExceededError


class MovedClock:
    """The present, in milliseconds; moved by the test."""

    def __init__(self):
        self.now_ms = 1_000

    def __call__(self):
        return self.now_ms


class SlowDisk:
    """Holds up every append of a store while it is closed, and counts them."""

    def __init__(self, monkeypatch, store):
        self.passable = threading.Event()
        self.passable.set()
        self.reached = threading.Event()
        self.entry_counts = []
        ledgers = type(store.ledgers)
        append_all = ledgers.append_all

        def slow(ledgers_of_store, entries):
            self.reached.set()
            assert self.passable.wait(10)
            self.entry_counts.append(len(entries))
            return append_all(ledgers_of_store, entries)

        monkeypatch.setattr(ledgers, "append_all", slow)


@asynccontextmanager
async def opened(store=None, *, clock=None, tick_ms=1, **settings):
    async with AsyncTopics(
        store or MemoryStore(), clock=clock or MovedClock(), tick_ms=tick_ms, settings=TopicSettings(**settings)
    ) as topics:
        yield topics


async def subscribed(topics, topic="t", *, permits=1_000, kind=None):
    subscription = await (await topics.open(topic)).subscribe("s", start=Start.EARLIEST, kind=kind)
    await subscription.consumer_opened("ann", permits=permits - 1)
    await subscription.add_permits("ann", 1)
    return subscription


async def received(subscription):
    """The next round, as payloads."""
    sent = await asyncio.wait_for(subscription.next_round(), 10)
    return [(consumer, [each.message.payload for each in deliveries]) for consumer, deliveries in sent.deliveries]


def test_a_message_from_publish_to_a_durable_ack():
    async def main():
        async with opened(clock=clock) as topics:
            topic = await topics.open("t")
            assert await topics.open("t") is topic
            subscription = await subscribed(topics)
            assert await topic.subscribe("s") is subscription
            (position,) = await topic.publish([Message(b"apples")])
            assert await received(subscription) == [("ann", [b"apples"])]
            receipt = await subscription.ack(position)
            clock.now_ms += 1_000
            await asyncio.wait_for(subscription.durable(receipt), 10)
            assert subscription.subscription.cursor.redelivery_if_crashed == 0

    clock = MovedClock()
    asyncio.run(main())


def test_topics_and_subscriptions_that_are_opened_together():
    async def main():
        async with opened(store) as topics:
            known = await topics.open("one")
            found = await topics.open_all(["one", "two"])
            assert (list(found), found["one"] is known) == (["one", "two"], True)
            requests = [SubscriptionRequest(name) for name in "ab"]
            subscriptions = await topics.subscribe_all({"one": requests, "two": requests[:1]})
            assert list(subscriptions) == [("one", "a"), ("one", "b"), ("two", "a")]
            assert await known.subscribe("a") is subscriptions["one", "a"]
            exclusive = SubscriptionRequest("a", kind=SubscriptionType.EXCLUSIVE)
            refused = await topics.subscribe_all({"two": [exclusive]})
            assert isinstance(refused["two", "a"], SubscriptionTypeError)
            with pytest.raises(KeyError):
                await topics.subscribe_all({"three": requests})
        for call in (topics.open_all(["one"]), topics.subscribe_all({})):
            with pytest.raises(TopicClosedError):
                await call

    store = MemoryStore()
    asyncio.run(main())


def test_a_round_waits_until_something_is_published():
    async def main():
        async with opened() as topics:
            subscription = await subscribed(topics)
            waiting = asyncio.create_task(received(subscription))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not waiting.done()
            await (await topics.open("t")).publish([Message(b"late")])
            assert await waiting == [("ann", [b"late"])]

    asyncio.run(main())


def test_publishes_that_come_during_a_sync_share_the_next_one(monkeypatch):
    async def main():
        store = MemoryStore()
        async with opened(store) as topics:
            parts = [await topics.open(f"t{number}") for number in range(5)]
            disk = SlowDisk(monkeypatch, store)
            disk.passable.clear()
            calls = [asyncio.create_task(parts[number % 5].publish([Message(b"%d" % number)])) for number in range(50)]
            await asyncio.to_thread(disk.reached.wait)
            await asyncio.sleep(0.01)
            disk.passable.set()
            positions = await asyncio.gather(*calls)
            assert sum(disk.entry_counts) == 50
            assert len(disk.entry_counts) <= 4
            for part in parts:  # in the order of the calls
                own = [position for number, (position,) in enumerate(positions) if parts[number % 5] is part]
                assert own == sorted(own)

    asyncio.run(main())


def test_no_sync_of_a_topic_holds_up_a_call(monkeypatch):
    async def main():
        store = MemoryStore()
        async with opened(store) as topics:
            both = [await subscribed(topics, name) for name in ("slow", "quick")]
            slow, quick = [await topics.open(name) for name in ("slow", "quick")]
            positions = [(await topic.publish([Message(b"x"), Message(b"y")]))[0] for topic in (slow, quick)]
            for subscription in both:
                await received(subscription)
            disk = SlowDisk(monkeypatch, store)
            disk.passable.clear()
            publishing = asyncio.create_task(slow.publish([Message(b"z")]))
            await asyncio.to_thread(disk.reached.wait)
            for subscription, position in zip(both, positions, strict=True):
                assert (await subscription.ack(position)).newly_acked == 1
                assert await subscription.redeliver_all("ann") == 1
                assert await received(subscription) == [("ann", [b"y"])]
            assert not publishing.done()
            disk.passable.set()
            assert len(await publishing) == 1

    asyncio.run(main())


def test_one_refused_publish_takes_no_other_with_it():
    async def main():
        limited = BrokerDelayedDelivery(max_delivery_delay_ms=1_000)
        async with opened(delayed_delivery=limited) as topics:
            topic = await topics.open("t")
            batches = [Message(b"a")], [Message(b"bad", deliver_at_ms=10**15)], [Message(b"b")]
            outcomes = await asyncio.gather(*map(topic.publish, batches), return_exceptions=True)
            assert [type(each) for each in outcomes] == [list, DeliveryDelayExceededError, list]
            stored = [message.payload for message in topic.topic.log.read([outcomes[0][0], outcomes[2][0]])]
            assert stored == [b"a", b"b"]

    asyncio.run(main())


def test_a_backlog_above_its_limit_refuses_publishes_and_is_computed_by_no_loop(monkeypatch):
    async def main():
        threads = []
        exceeded = topic_module.is_backlog_exceeded

        def noted(*args):
            threads.append(threading.current_thread())
            return exceeded(*args)

        monkeypatch.setattr(topic_module, "is_backlog_exceeded", noted)
        limited = Retention(backlog_bytes_max=100, backlog_policy=BacklogPolicy.REFUSE_PUBLISH)
        async with opened(retention=limited, cursor=CursorConfig(flush_interval_ms=0)) as topics:
            subscription = await subscribed(topics)
            topic = await topics.open("t")
            await topic.publish([Message(bytes(100))])
            refused = await asyncio.gather(
                *[topic.publish(batch) for batch in ([Message(b"")], [])], return_exceptions=True
            )
            assert [type(each) for each in refused] == [BacklogQuotaExceededError] * 2
            ((_, (delivery,)),) = (await subscription.next_round()).deliveries
            await subscription.durable(await subscription.ack(delivery.position))
            assert len(await topic.publish([Message(b"")])) == 1
        assert threading.main_thread() not in threads

    asyncio.run(main())


def test_a_store_that_fails_answers_every_publish_and_works_again():
    async def main():
        store = MemoryStore()
        async with opened(store) as topics:
            topic = await topics.open("t")
            store.inject(Fault(store.mutation_count, FaultKind.FULL))
            outcomes = await asyncio.gather(*(topic.publish([Message(b"x")]) for _ in range(3)), return_exceptions=True)
            assert {isinstance(each, StoreError) for each in outcomes} == {True}
            assert len({id(each) for each in outcomes}) == 3
            assert len(await topic.publish([Message(b"y")])) == 1

    asyncio.run(main())


def test_a_caller_s_mistake_is_raised_at_once():
    async def main():
        async with opened() as topics:
            topic = await topics.open("t")
            with pytest.raises(TypeError, match="messages must be a list of Message"):
                await topic.publish(b"x")
            subscription = await subscribed(topics)
            with pytest.raises(InvalidPositionError):
                await subscription.ack((99, 0))

    asyncio.run(main())


def test_a_cancelled_publish_is_over_and_the_next_one_works(monkeypatch):
    async def main():
        store = MemoryStore()
        async with opened(store) as topics:
            topic = await topics.open("t")
            disk = SlowDisk(monkeypatch, store)
            disk.passable.clear()
            publishing = asyncio.create_task(topic.publish([Message(b"x")]))
            await asyncio.to_thread(disk.reached.wait)
            publishing.cancel()
            disk.passable.set()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            (position,) = await topic.publish([Message(b"y")])
            assert position.entry_id == 1

    asyncio.run(main())


def test_a_cancelled_round_gives_its_messages_back(monkeypatch):
    async def main():
        store = MemoryStore()
        async with opened(store) as topics:
            subscription = await subscribed(topics)
            await (await topics.open("t")).publish([Message(b"x")])
            ledgers, reached, passable = type(store.ledgers), threading.Event(), threading.Event()
            read = ledgers.read

            def slow(*arguments):
                reached.set()
                assert passable.wait(10)
                return read(*arguments)

            monkeypatch.setattr(ledgers, "read", slow)
            waiting = asyncio.create_task(subscription.next_round())
            await asyncio.to_thread(reached.wait)
            waiting.cancel()
            await asyncio.sleep(0)
            passable.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert subscription.subscription.unacked_messages == 0
            assert await received(subscription) == [("ann", [b"x"])]

    asyncio.run(main())


def test_the_end_persists_all_and_wakes_those_who_wait():
    async def main():
        async with opened(store, tick_ms=10_000) as topics:
            subscription = await subscribed(topics)
            topic = await topics.open("t")
            positions = await topic.publish([Message(b"%d" % number) for number in range(10)])
            await received(subscription)
            for position in positions[::2]:
                await subscription.ack(position)
            waiting = asyncio.create_task(subscription.next_round())
            await asyncio.sleep(0.01)
        with pytest.raises(CursorClosedError):
            await waiting
        with pytest.raises(TopicClosedError):
            await topic.publish([Message(b"x")])
        with pytest.raises(TopicClosedError):
            await topics.open("t")

    async def again():
        async with opened(MemoryStore(store.disk)) as topics:
            return await received(await subscribed(topics))

    store = MemoryStore()
    asyncio.run(main())
    assert asyncio.run(again()) == [("ann", [b"%d" % number for number in range(1, 10, 2)])]


def test_a_cancelled_program_persists_all():
    async def main():
        async with opened(store, tick_ms=10_000) as topics:
            subscription = await subscribed(topics)
            positions = await (await topics.open("t")).publish([Message(b"x")] * 3)
            await received(subscription)
            await subscription.ack(positions[0])
            acked.set()
            await asyncio.sleep(60)

    async def cancelled():
        task = asyncio.create_task(main())
        await acked.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def again():
        async with opened(MemoryStore(store.disk)) as topics:
            return await received(await subscribed(topics))

    store, acked = MemoryStore(), asyncio.Event()
    asyncio.run(cancelled())
    assert asyncio.run(again()) == [("ann", [b"x", b"x"])]


def test_a_deleted_subscription_ends_the_wait_and_a_deleted_topic_too():
    async def main():
        async with opened() as topics:
            subscription = await subscribed(topics)
            waiting = asyncio.create_task(subscription.next_round())
            await asyncio.sleep(0.01)
            topic = await topics.open("t")
            assert await topic.unsubscribe("s")
            with pytest.raises(CursorClosedError):
                await waiting
            subscription = await subscribed(topics)
            waiting = asyncio.create_task(subscription.next_round())
            await asyncio.sleep(0.01)
            assert await topics.delete("t")
            with pytest.raises(CursorClosedError):
                await waiting
            with pytest.raises(TopicClosedError):
                await topic.publish([Message(b"x")])
            assert not await topics.delete("t")

    asyncio.run(main())


@pytest.mark.parametrize("whole", [False, True], ids=["subscription", "topic"])
def test_a_deletion_waits_for_the_persist_under_way(monkeypatch, caplog, whole):
    async def main():
        store = MemoryStore()
        async with opened(store, tick_ms=3_600_000, cursor=CursorConfig(flush_interval_ms=0)) as topics:
            subscription, topic = await subscribed(topics), await topics.open("t")
            positions = await topic.publish([Message(b"")] * 2)
            await received(subscription)
            await subscription.ack(positions[0])
            await topics.tick()
            await subscription.ack(positions[1])
            disk = SlowDisk(monkeypatch, store)
            disk.passable.clear()
            persisting = asyncio.create_task(topics.tick())
            await asyncio.to_thread(disk.reached.wait)
            deleting = asyncio.create_task(topics.delete("t") if whole else topic.unsubscribe("s"))
            await asyncio.wait({deleting}, timeout=0.05)
            disk.passable.set()
            await persisting
            assert await deleting
        assert not caplog.records

    asyncio.run(main())


def test_a_persist_that_fails_is_logged_and_tried_again(caplog):
    async def main():
        async with opened(store, clock=clock, cursor=CursorConfig(metadata_bytes_max=1, ledger_retry_ms=0)) as topics:
            subscription = await subscribed(topics)
            (position,) = await (await topics.open("t")).publish([Message(b"x")])
            await received(subscription)
            store.break_ledgers()
            receipt = await subscription.ack(position)
            clock.now_ms += 1_000
            while not caplog.records:
                await asyncio.sleep(0.001)
            assert not subscription.subscription.cursor.durable(receipt)
            store.mend_ledgers()
            clock.now_ms += 100_000
            await asyncio.wait_for(subscription.durable(receipt), 10)

    store, clock = MemoryStore(), MovedClock()
    asyncio.run(main())
    assert "subscription 's' of topic 't' could not be persisted" in caplog.text


def test_a_delayed_message_comes_by_itself():
    async def main():
        async with opened(clock=clock, delay_tick_ms=1) as topics:
            subscription = await subscribed(topics, kind=SubscriptionType.SHARED)
            topic = await topics.open("t")
            await topic.publish([Message(b"x", deliver_at_ms=clock.now_ms + 20)])
            waiting = asyncio.create_task(received(subscription))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            clock.now_ms += 20
            assert await waiting == [("ann", [b"x"])]

    clock = MovedClock()
    asyncio.run(main())
