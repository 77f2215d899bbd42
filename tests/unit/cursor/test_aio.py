"""Topics and subscriptions in asyncio: syncs hold nothing up, cancelled calls lose nothing, and the end is clean."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import pytest

import ackstate.topic.topic as topic_module
from ackstate import (
    BacklogQuotaExceededError,
    CursorConfig,
    MemoryStore,
    Message,
    StoreError,
    SubscriptionType,
    SubscriptionTypeError,
)
from ackstate.aio import AsyncSubscription, AsyncTopics, Workers
from ackstate.dispatch.options import Start
from ackstate.errors import (
    AckStateError,
    CursorClosedError,
    CursorFencedError,
    InvalidPositionError,
    TopicClosedError,
)
from ackstate.limits import BrokerDelayedDelivery, DeliveryDelayExceededError
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import BacklogPolicy, Retention, SubscriptionRequest
from ackstate.topic.settings import TopicSettings


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
        append_many = ledgers._append_many

        def slow(ledgers_of_store, appends):
            self.reached.set()
            assert self.passable.wait(10)
            self.entry_counts.append(sum(len(entries) for _, entries in appends))
            return append_many(ledgers_of_store, appends)

        monkeypatch.setattr(ledgers, "_append_many", slow)


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


def test_the_age_of_a_ledger_goes_by_the_clock_whatever_the_messages_say():
    async def main():
        clock = MovedClock()
        kept = Retention(age_ms=1_000)
        async with opened(clock=clock, tick_ms=10**6, retention=kept, entries_per_ledger_max=10) as topics:
            topic = await topics.open("t")
            for number in range(31):
                await topic.publish([Message(b"x", publish_time_ms=(1, 2**62)[number % 2])])
            for waited_ms, count in ((999, 0), (1, 3)):
                clock.now_ms += waited_ms
                assert await topic.trim() == count

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


class SlowReads:
    """Holds up every read of a store while it is closed."""

    def __init__(self, monkeypatch, store):
        self.passable, self.reached = threading.Event(), threading.Event()
        ledgers = type(store.ledgers)
        read = ledgers.read

        def slow(*arguments):
            self.reached.set()
            assert self.passable.wait(10)
            return read(*arguments)

        monkeypatch.setattr(ledgers, "read", slow)


def test_a_cancelled_round_was_not_sent_and_counts_nowhere(monkeypatch):
    async def main():
        store = MemoryStore()
        async with opened(store) as topics:
            subscription = await subscribed(topics, permits=2)
            await (await topics.open("t")).publish([Message(b"x"), Message(b"y")])
            disk = SlowReads(monkeypatch, store)
            waiting = asyncio.create_task(subscription.next_round())
            await asyncio.to_thread(disk.reached.wait)
            waiting.cancel()
            await asyncio.sleep(0)
            disk.passable.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert subscription.subscription.unacked_messages == 0
            assert subscription.subscription.permits("ann") == 2
            ((_, deliveries),) = (await asyncio.wait_for(subscription.next_round(), 10)).deliveries
            assert [(each.message.payload, each.redelivery_count) for each in deliveries] == [(b"x", 0), (b"y", 0)]
            assert subscription.subscription.stats().sent_messages == 2

    asyncio.run(main())


@pytest.mark.parametrize("steps", range(5))
def test_a_round_that_is_cancelled_just_when_it_is_woken_is_cancelled(steps):
    async def main():
        async with opened() as topics:
            subscription = await subscribed(topics, permits=2)
            (position,) = await (await topics.open("t")).publish([Message(b"later")])
            await received(subscription)
            await subscription.nack(position, delay_ms=60_000)
            waiting = asyncio.create_task(subscription.next_round())
            await asyncio.sleep(0.01)
            await subscription.consumer_opened("ben")
            for _ in range(steps):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(waiting, 10)
            await (await topics.open("t")).publish([Message(b"x")])
            assert await received(subscription) == [("ann", [b"x"])]

    asyncio.run(main())


def test_who_waits_for_messages_asks_once_and_not_again_and_again(monkeypatch):
    async def main():
        async with opened() as topics:
            subscription = await subscribed(topics)
            asked = []
            round_of_all = AsyncSubscription._dispatch_all

            async def counted(self):
                asked.append(self)
                return await round_of_all(self)

            monkeypatch.setattr(AsyncSubscription, "_dispatch_all", counted)
            waiting = asyncio.create_task(received(subscription))
            await asyncio.sleep(0.05)
            assert len(asked) == 1
            await (await topics.open("t")).publish([Message(b"x")])
            assert await asyncio.wait_for(waiting, 10) == [("ann", [b"x"])]

    asyncio.run(main())


def test_an_append_that_a_loop_cancels_before_it_begins_is_answered():
    async def main():
        workers = Workers()
        asking = asyncio.create_task(workers.append(None))
        await asyncio.sleep(0)  # its task has been made, and has not begun
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        _, pending = await asyncio.wait({asking}, timeout=10)
        for _, appended in workers._waiting:
            appended.cancel()  # otherwise the end of the loop would wait for ever
        assert not pending

    asyncio.run(main())


def test_a_nack_with_a_delay_comes_again_by_itself():
    async def main():
        async with opened(clock=clock) as topics:
            subscription = await subscribed(topics)
            (position,) = await (await topics.open("t")).publish([Message(b"x")])
            await received(subscription)
            waiting = asyncio.create_task(received(subscription))
            await asyncio.sleep(0.01)
            await subscription.nack(position, delay_ms=20)
            await asyncio.sleep(0.005)
            assert not waiting.done()
            clock.now_ms += 20
            assert await waiting == [("ann", [b"x"])]

    clock = MovedClock()
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


# Whoever waits for an ack to be durable is answered


async def acked_and_waiting(topics, *, count=3):
    """A subscription, its messages, the receipt of the last but one, and the tasks that wait for it and for a round."""
    subscription = await subscribed(topics)
    positions = await (await topics.open("t")).publish([Message(b"x")] * count)
    await received(subscription)
    receipt = await subscription.ack(positions[-2])
    waiting = [asyncio.create_task(each) for each in (subscription.durable(receipt), subscription.next_round())]
    await asyncio.sleep(0.01)
    assert not any(each.done() for each in waiting)
    return subscription, positions, receipt, waiting


async def answer(waiting):
    """What someone who waits gets, soon: the result or the error."""
    (outcome,) = await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), 10)
    return outcome


def never_persisted(store=None, **settings):
    return opened(store, tick_ms=3_600_000, **settings)


def test_an_ack_from_before_a_seek_is_never_durable_and_says_so():
    async def main():
        async with never_persisted() as topics:
            subscription, positions, receipt, (durable, _) = await acked_and_waiting(topics)
            await subscription.seek(positions[0])
            for late in (durable, asyncio.create_task(subscription.durable(receipt))):
                with pytest.raises(AckStateError, match="a seek came after the ack"):
                    await asyncio.wait_for(late, 10)

    asyncio.run(main())


def test_a_seek_by_a_call_of_the_topic_answers_as_well():
    async def main():
        async with never_persisted() as topics:
            subscription, positions, _, (durable, _) = await acked_and_waiting(topics)
            topic = await topics.open("t")
            await topic.call(subscription.subscription.seek, positions[0], now_ms=1_000)
            with pytest.raises(AckStateError, match="a seek came after the ack"):
                await asyncio.wait_for(durable, 10)

    asyncio.run(main())


def test_a_seek_that_fails_leaves_the_ack_to_the_next_persist():
    async def main():
        async with opened(store, clock=clock) as topics:
            subscription, positions, _, (durable, _) = await acked_and_waiting(topics)
            for number in range(2):
                store.inject(Fault(store.mutation_count + number, FaultKind.FULL))
            with pytest.raises(StoreError):
                await subscription.seek(positions[0])
            clock.now_ms += 100_000
            assert await answer(durable) is None

    store, clock = MemoryStore(), MovedClock()
    asyncio.run(main())


def unwritable():
    """A cursor that can be written to its ledger only."""
    return CursorConfig(metadata_bytes_max=1, ledger_retry_ms=0)


def test_the_former_owner_of_a_cursor_learns_that_its_acks_are_not_stored():
    async def main():
        topics = AsyncTopics(store, clock=clock, tick_ms=1)
        await topics.__aenter__()
        subscription, _, receipt, (durable, _) = await acked_and_waiting(topics)
        async with opened(MemoryStore(store.disk)) as others:
            await subscribed(others)
            clock.now_ms += 1_000
            for late in (durable, subscription.durable(receipt), topics.close(), topics.close()):
                assert isinstance(await answer(late), CursorFencedError)

    store, clock = MemoryStore(), MovedClock()
    asyncio.run(main())


class SlowChanges:
    """Holds up every change of a store but an append until it may pass."""

    def __init__(self, monkeypatch, store):
        self.passable, self.reached = threading.Event(), threading.Event()
        for part, name in ((store.ledgers, "create"), (store.ledgers, "delete"), (store.metadata, "put")):
            self.hold_up(monkeypatch, type(part), name)

    def hold_up(self, monkeypatch, part, name):
        function = getattr(part, name)

        def slow(*arguments, **named):
            self.reached.set()
            assert self.passable.wait(10)
            return function(*arguments, **named)

        monkeypatch.setattr(part, name, slow)


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("end", ["close", "unsubscribe", "delete", "close all"])
def test_an_end_answers_all_who_wait_also_if_it_is_cancelled_and_can_be_repeated(monkeypatch, end, is_cancelled):
    async def main():
        async with never_persisted(store) as topics:
            subscription, _, receipt, (durable, next_round) = await acked_and_waiting(topics)
            topic = await topics.open("t")
            call, again = {
                "close": (subscription.close, None),
                "unsubscribe": (partial(topic.unsubscribe, "s"), False),
                "delete": (partial(topics.delete, "t"), False),
                "close all": (topics.close, None),
            }[end]
            if is_cancelled:
                disk = SlowChanges(monkeypatch, store)
            ending = asyncio.create_task(call())
            if is_cancelled:
                await asyncio.to_thread(disk.reached.wait, 10)
                ending.cancel()
                await asyncio.sleep(0)
                disk.passable.set()
            assert isinstance(await answer(ending), asyncio.CancelledError) is is_cancelled
            if end in {"unsubscribe", "delete"}:
                assert isinstance(await answer(durable), CursorClosedError)
            else:
                assert await answer(durable) is None
                assert await answer(subscription.durable(receipt)) is None
            assert isinstance(await answer(next_round), CursorClosedError)
            assert await call() is again
            if end == "delete":
                assert len(await (await topics.open("t")).publish([Message(b"new")])) == 1

    store = MemoryStore()
    asyncio.run(main())


async def backlog_after_restart(store):
    async with opened(MemoryStore(store.disk)) as topics:
        return (await subscribed(topics)).subscription.cursor.backlog


def test_a_close_that_fails_answers_all_who_wait_and_can_be_repeated():
    async def main():
        async with never_persisted(store, cursor=unwritable()) as topics:
            subscription, positions, receipt, (durable, next_round) = await acked_and_waiting(topics)
            store.break_ledgers()
            for _ in range(2):
                with pytest.raises(StoreError, match="no ledger can be written"):
                    await topics.close()
                for late in (durable, next_round, subscription.durable(receipt), subscription.next_round()):
                    assert isinstance(await answer(late), StoreError)
                with pytest.raises(TopicClosedError):
                    await topics.open("t")
            assert (await subscription.ack(positions[0])).newly_acked == 1
            store.mend_ledgers()
            await topics.close()
            assert await answer(subscription.durable(receipt)) is None
            assert isinstance(await answer(subscription.next_round()), CursorClosedError)

    store = MemoryStore()
    asyncio.run(main())
    assert asyncio.run(backlog_after_restart(store)) == 1


def test_a_cancelled_close_that_fails_says_why_and_can_be_repeated(monkeypatch):
    async def main():
        async with never_persisted(store, cursor=unwritable()) as topics:
            _, _, _, (durable, next_round) = await acked_and_waiting(topics)
            store.break_ledgers()
            disk = SlowChanges(monkeypatch, store)
            closing = asyncio.create_task(topics.close())
            await asyncio.to_thread(disk.reached.wait, 10)
            closing.cancel()
            disk.passable.set()
            with pytest.raises(asyncio.CancelledError) as raised:
                await closing
            assert isinstance(raised.value.__cause__, StoreError)
            assert isinstance(await answer(durable), StoreError)
            assert isinstance(await answer(next_round), StoreError)
            store.mend_ledgers()

    store = MemoryStore()
    asyncio.run(main())
    assert asyncio.run(backlog_after_restart(store)) == 2


def test_a_subscription_that_cannot_be_closed_goes_on_and_is_closed_later():
    async def main():
        async with never_persisted(store, cursor=unwritable()) as topics:
            subscription, positions, _, (durable, next_round) = await acked_and_waiting(topics)
            store.break_ledgers()
            with pytest.raises(StoreError):
                await subscription.close()
            await subscription.nack(positions[0])
            assert len((await answer(next_round)).deliveries) == 1
            store.mend_ledgers()
            assert (await subscription.close()).messages_covered == 1
            assert await answer(durable) is None
        assert await subscription.close() is None

    store = MemoryStore()
    asyncio.run(main())


def test_a_loop_that_ends_during_a_publish_persists_all_and_hangs_nowhere(monkeypatch):
    """The program returns while a broker runs in another task: asyncio cancels all tasks, also those of the topics."""

    async def broker():
        async with never_persisted(store) as topics:
            subscription = await subscribed(topics)
            topic = await topics.open("t")
            positions = await topic.publish([Message(b"x")] * 2)
            await subscription.ack(positions[0])
            disk = SlowDisk(monkeypatch, store)
            disk.passable.clear()
            publishing.append(disk)
            tasks = [asyncio.create_task(topic.publish([Message(b"y")])) for _ in range(3)]
            await asyncio.to_thread(disk.reached.wait, 10)
            tasks += [asyncio.create_task(topic.publish([Message(b"z")])) for _ in range(3)]
            await subscription.next_round()

    async def main():
        running.append(asyncio.create_task(broker()))
        while not publishing or not publishing[0].reached.is_set():
            await asyncio.sleep(0.001)
        threading.Timer(0.05, publishing[0].passable.set).start()

    store, running, publishing = MemoryStore(), [], []
    asyncio.run(main())
    assert running[0].cancelled()
    assert asyncio.run(first_after_restart(store)) == 1


async def first_after_restart(store):
    """How many messages are acked up to the mark-delete position."""
    async with opened(MemoryStore(store.disk)) as topics:
        return (await subscribed(topics)).subscription.cursor.mark_delete_position.entry_id + 1


@pytest.mark.parametrize("steps", range(6))
def test_a_loop_that_ends_just_after_a_publish_began_hangs_nowhere(steps):
    async def broker():
        async with opened(store) as topics:
            topic = await topics.open("t")
            begun.set()
            await asyncio.gather(*(topic.publish([Message(b"x")]) for _ in range(3)))
            await asyncio.sleep(3_600)

    async def main():
        running.append(asyncio.create_task(broker()))
        await begun.wait()
        for _ in range(steps):
            await asyncio.sleep(0)

    store, running, begun = MemoryStore(), [], asyncio.Event()
    asyncio.run(main())
    assert running[0].cancelled()


def test_a_loop_that_ends_while_all_is_closed_persists_all_the_same(monkeypatch):
    async def broker():
        topics = AsyncTopics(store, clock=MovedClock(), tick_ms=3_600_000)
        async with topics:
            await acked_and_waiting(topics)
            alone = (await topics.open("t")).alone
            await alone.acquire()  # by someone who takes long
            asyncio.get_running_loop().call_later(0.05, alone.release)
            closing.set()
            await topics.close()

    async def main():
        running.append(asyncio.create_task(broker()))
        await closing.wait()
        await asyncio.sleep(0.01)

    store, running, closing = MemoryStore(), [], asyncio.Event()
    asyncio.run(main())
    assert running[0].cancelled()
    assert asyncio.run(backlog_after_restart(store)) == 2


def test_a_tick_reads_nothing_that_another_thread_changes():
    async def main():
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            async with never_persisted(entries_per_ledger_max=1) as topics:
                topic = await topics.open("t")
                await topics.subscribe_all({"t": [SubscriptionRequest(f"s{number}") for number in range(100)]})
                for _ in range(3):
                    await topic.publish([Message(b"x")])
                subscribing = asyncio.create_task(subscribe_again_and_again(topics))
                while not subscribing.done():
                    await topics.tick()
                    assert topics.topics.next_wake_ms is None
                    await asyncio.sleep(0)
                await subscribing
        finally:
            sys.setswitchinterval(interval_s)

    async def subscribe_again_and_again(topics):
        for turn in range(30):
            await topics.subscribe_all({"t": [SubscriptionRequest(f"n{turn}-{number}") for number in range(20)]})

    asyncio.run(main())


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


def test_what_all_have_acked_leaves_the_log_by_itself():
    async def main():
        async with opened(clock=clock, entries_per_ledger_max=1) as topics:
            subscription = await subscribed(topics)
            topic = await topics.open("t")
            positions = [(await topic.publish([Message(b"x")]))[0] for _ in range(3)]
            await received(subscription)
            await subscription.ack_many(positions)
            assert len(topic.topic.log.ledgers.counts()) == 3
            clock.now_ms += 1_000
            while len(topic.topic.log.ledgers.counts()) > 1:
                await asyncio.sleep(0.001)

    clock = MovedClock()
    asyncio.run(asyncio.wait_for(main(), 10))


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


def test_a_delayed_message_comes_by_itself(delay_index):
    async def main():
        async with opened(clock=clock, delay_index=replace(delay_index, tick_time_ms=1)) as topics:
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
