"""Topics and subscriptions in asyncio: syncs hold nothing up, cancelled calls lose nothing, and the end is clean."""

import asyncio
import signal
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

import ackstate.topic.topic as topic_module
from ackstate import (
    AckStateError,
    AsyncTopics,
    BacklogQuotaExceededError,
    CursorClosedError,
    CursorConfig,
    CursorFencedError,
    MemoryStore,
    Message,
    Start,
    StoreError,
    SubscriptionType,
    SubscriptionTypeError,
    TopicClosedError,
    TopicSettings,
)
from ackstate.aio import AsyncSubscription
from ackstate.limits import BrokerDelayedDelivery, DeliveryDelayExceededError, GateLimits
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import BacklogPolicy, Retention, SubscriptionRequest

UNWRITABLE = CursorConfig(metadata_bytes_max=1, ledger_retry_ms=0)  # can be written to its ledger only


class MovedClock:
    """The present, in milliseconds; moved by the test."""

    now_ms = 1_000

    def __call__(self):
        return self.now_ms


class HeldUp:
    """Holds up calls of parts of a store until they may pass, and keeps their arguments."""

    def __init__(self, monkeypatch, *calls):
        self.passable, self.reached, self.calls = threading.Event(), threading.Event(), []
        for part, name in calls:
            monkeypatch.setattr(type(part), name, self.slow(getattr(type(part), name)))

    def slow(self, function):
        def call(*arguments, **named):
            self.reached.set()
            assert self.passable.wait(10)
            self.calls.append(arguments)
            return function(*arguments, **named)

        return call

    async def is_reached(self):
        assert await asyncio.to_thread(self.reached.wait, 10)


def appends(monkeypatch, store):
    return HeldUp(monkeypatch, (store.ledgers, "_append_many"))


def changes(monkeypatch, store):
    return HeldUp(monkeypatch, (store.ledgers, "create"), (store.ledgers, "delete"), (store.metadata, "put"))


@asynccontextmanager
async def opened(store=None, *, clock=None, tick_ms=1, **settings):
    async with AsyncTopics(
        store or MemoryStore(), clock=clock or MovedClock(), tick_ms=tick_ms, settings=TopicSettings(**settings)
    ) as topics:
        yield topics


def never_persisted(store=None, **settings):
    return opened(store, tick_ms=3_600_000, **settings)


async def subscribed(topics, topic="t", *, permits=1_000, kind=None):
    subscription = await (await topics.open(topic)).subscribe("s", start=Start.EARLIEST, kind=kind)
    await subscription.consumer_opened("ann", permits=permits - 1)
    await subscription.add_permits("ann", 1)
    return subscription


async def received(subscription):
    """The next round, as payloads."""
    sent = await asyncio.wait_for(subscription.next_round(), 10)
    return [(consumer, [each.message.payload for each in deliveries]) for consumer, deliveries in sent.deliveries]


async def acked_and_waiting(topics):
    """A subscription, its messages, the receipt of the last but one, and the tasks that wait for it and for a round."""
    subscription = await subscribed(topics)
    positions = await (await topics.open("t")).publish([Message(b"x")] * 3)
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


async def unacked_after_restart(store):
    """The messages that are received after a restart."""
    async with opened(MemoryStore(store.disk)) as topics:
        ((_, payloads),) = await received(await subscribed(topics))
        return payloads


async def test_a_message_from_publish_to_a_durable_ack():
    clock = MovedClock()
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


async def test_topics_and_subscriptions_that_are_opened_together():
    async with opened() as topics:
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
    for call in (topics.open_all(["one"]), topics.subscribe_all({}), topics.open("t"), known.publish([Message(b"x")])):
        with pytest.raises(TopicClosedError):
            await call


async def test_publishes_that_come_during_a_sync_share_the_next_one(monkeypatch):
    store = MemoryStore()
    async with opened(store) as topics:
        parts = [await topics.open(f"t{number}") for number in range(5)]
        disk = appends(monkeypatch, store)
        calls = [asyncio.create_task(parts[number % 5].publish([Message(b"%d" % number)])) for number in range(50)]
        await disk.is_reached()
        await asyncio.sleep(0.01)
        disk.passable.set()
        positions = await asyncio.gather(*calls)
        assert sum(len(entries) for _, batch in disk.calls for _, entries in batch) == 50
        assert len(disk.calls) <= 4
        for part in parts:  # in the order of the calls
            own = [position for number, (position,) in enumerate(positions) if parts[number % 5] is part]
            assert own == sorted(own)


async def test_no_sync_of_a_topic_holds_up_a_call(monkeypatch):
    store = MemoryStore()
    async with opened(store) as topics:
        both = [await subscribed(topics, name) for name in ("slow", "quick")]
        slow, quick = [await topics.open(name) for name in ("slow", "quick")]
        positions = [(await topic.publish([Message(b"x"), Message(b"y")]))[0] for topic in (slow, quick)]
        for subscription in both:
            await received(subscription)
        disk = appends(monkeypatch, store)
        publishing = asyncio.create_task(slow.publish([Message(b"z")]))
        await disk.is_reached()
        for subscription, position in zip(both, positions, strict=True):
            assert (await subscription.ack(position)).newly_acked == 1
            assert await subscription.redeliver_all("ann") == 1
            assert await received(subscription) == [("ann", [b"y"])]
        assert not publishing.done()
        disk.passable.set()
        assert len(await publishing) == 1


async def test_one_refused_publish_takes_no_other_with_it():
    async with opened(delayed_delivery=BrokerDelayedDelivery(max_delivery_delay_ms=1_000)) as topics:
        topic = await topics.open("t")
        batches = [Message(b"a")], [Message(b"bad", deliver_at_ms=10**15)], b"bad", [Message(b"b")]
        outcomes = await asyncio.gather(*map(topic.publish, batches), return_exceptions=True)
        assert [type(each) for each in outcomes] == [list, DeliveryDelayExceededError, TypeError, list]
        stored = [message.payload for message in topic.topic.log.read([outcomes[0][0], outcomes[3][0]])]
        assert stored == [b"a", b"b"]


async def test_a_backlog_above_its_limit_refuses_publishes_and_is_computed_by_no_loop(monkeypatch):
    threads, exceeded = [], topic_module.is_backlog_exceeded
    monkeypatch.setattr(
        topic_module, "is_backlog_exceeded", lambda *args: threads.append(threading.current_thread()) or exceeded(*args)
    )
    limited = Retention(backlog_bytes_max=100, backlog_policy=BacklogPolicy.REFUSE_PUBLISH)
    async with opened(retention=limited, cursor=CursorConfig(flush_interval_ms=0)) as topics:
        subscription = await subscribed(topics)
        topic = await topics.open("t")
        await topic.publish([Message(bytes(100))])
        refused = await asyncio.gather(*map(topic.publish, ([Message(b"")], [])), return_exceptions=True)
        assert [type(each) for each in refused] == [BacklogQuotaExceededError] * 2
        ((_, (delivery,)),) = (await subscription.next_round()).deliveries
        await subscription.durable(await subscription.ack(delivery.position))
        assert len(await topic.publish([Message(b"")])) == 1
    assert threads
    assert threading.main_thread() not in threads


async def test_a_store_that_fails_answers_every_publish_and_works_again():
    store = MemoryStore()
    async with opened(store) as topics:
        topic = await topics.open("t")
        store.inject(Fault(store.mutation_count, FaultKind.FULL))
        outcomes = await asyncio.gather(*(topic.publish([Message(b"x")]) for _ in range(3)), return_exceptions=True)
        assert {isinstance(each, StoreError) for each in outcomes} == {True}
        assert len({id(each) for each in outcomes}) == 3
        assert len(await topic.publish([Message(b"y")])) == 1


async def test_a_cancelled_round_was_not_sent_and_counts_nowhere(monkeypatch):
    store = MemoryStore()
    async with opened(store) as topics:
        subscription = await subscribed(topics, permits=2)
        await (await topics.open("t")).publish([Message(b"x"), Message(b"y")])
        disk = HeldUp(monkeypatch, (store.ledgers, "read"))
        waiting = asyncio.create_task(subscription.next_round())
        await disk.is_reached()
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


async def test_who_waits_for_messages_asks_once_and_not_again_and_again(monkeypatch):
    asked, dispatch_all = [], AsyncSubscription._dispatch_all
    monkeypatch.setattr(AsyncSubscription, "_dispatch_all", lambda self: asked.append(self) or dispatch_all(self))
    async with opened() as topics:
        subscription = await subscribed(topics)
        waiting = asyncio.create_task(received(subscription))
        await asyncio.sleep(0.05)
        assert (len(asked), waiting.done()) == (1, False)
        await (await topics.open("t")).publish([Message(b"x")])
        assert await waiting == [("ann", [b"x"])]


@pytest.mark.parametrize("is_nacked", [False, True])
async def test_what_waits_for_a_time_comes_by_itself(delay_index, is_nacked):
    clock = MovedClock()
    async with opened(clock=clock, delay_index=replace(delay_index, tick_time_ms=1)) as topics:
        subscription = await subscribed(topics, kind=SubscriptionType.SHARED)
        due_ms = -1 if is_nacked else clock.now_ms + 20
        (position,) = await (await topics.open("t")).publish([Message(b"x", deliver_at_ms=due_ms)])
        if is_nacked:
            await received(subscription)
        waiting = asyncio.create_task(received(subscription))
        await asyncio.sleep(0.01)
        if is_nacked:
            await subscription.nack(position, delay_ms=20)
            await asyncio.sleep(0.005)
        assert not waiting.done()
        clock.now_ms += 20
        assert await waiting == [("ann", [b"x"])]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_the_end_of_a_program_also_of_a_cancelled_one_persists_all(is_cancelled):
    async def main():
        async with never_persisted(store) as topics:
            waiting.extend((await acked_and_waiting(topics))[-1])
            acked.set()
            await asyncio.sleep(60 * is_cancelled)

    store, acked, waiting = MemoryStore(), asyncio.Event(), []
    program = asyncio.create_task(main())
    await acked.wait()
    if is_cancelled:
        program.cancel()
    assert isinstance(await answer(program), asyncio.CancelledError) is is_cancelled
    assert isinstance(await answer(waiting[1]), CursorClosedError)
    assert await unacked_after_restart(store) == [b"x"] * 2


# What it is doing


async def test_a_subscription_tells_what_that_of_the_topic_tells():
    async with never_persisted(limits=GateLimits(max_unacked_messages=2)) as topics:
        topic = await topics.open("t")
        billing = await topic.subscribe("s")
        await topic.publish([Message(b"x")] * 6)
        await billing.consumer_opened("ann")
        await billing.add_permits("ann", 9)
        sent = await billing.next_round()
        await billing.ack(sent.deliveries[0][1][1].position)
        inner = billing.subscription
        assert await billing.stats() == inner.stats()
        assert (await billing.stats()).unacked_messages == 1
        assert await billing.explain_holes(1) == inner.explain_holes(1)
        assert billing.redelivery_if_crashed == 1
        await billing.change_limits(GateLimits(max_unacked_messages=1))
        (reason,) = await billing.why_blocked(top=1)
        assert ((reason,), reason.limit) == (inner.why_blocked(top=1), 1)
        assert (await billing.skip(2)).newly_acked == 2
        assert (await billing.clear_backlog()).newly_acked == 3
        assert (inner.cursor.backlog, await billing.why_blocked()) == (0, ())


# A signal ends the program as its own end does


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("waits", [True, False])
async def test_a_signal_ends_the_body_persists_and_the_program_goes_on(number, waits):
    store, before = MemoryStore(), signal.getsignal(signal.SIGTERM)
    async with AsyncTopics(store, settings=TopicSettings(cursor=UNWRITABLE)).stop_on_signals() as topics:
        await acked_and_waiting(topics)
        signal.raise_signal(number)
        signal.raise_signal(number)
        if waits:
            await asyncio.sleep(60)
            pytest.fail("the body went on")
    await asyncio.sleep(0)  # the program is not cancelled
    assert signal.getsignal(signal.SIGTERM) == before
    assert await unacked_after_restart(store) == [b"x"] * 2


async def test_an_error_of_the_body_and_a_cancellation_are_not_hidden_by_a_signal():
    async def program():
        async with AsyncTopics(MemoryStore()).stop_on_signals():
            signal.raise_signal(signal.SIGTERM)
            asyncio.current_task().cancel()
            await asyncio.sleep(60)

    async def failing_program():
        async with AsyncTopics(MemoryStore()).stop_on_signals():
            signal.raise_signal(signal.SIGTERM)
            raise KeyError("of the body")

    with pytest.raises(KeyError, match="of the body"):
        await failing_program()
    task = asyncio.create_task(program())
    assert isinstance(await answer(task), asyncio.CancelledError)


# Whoever waits for an ack to be durable is answered


@pytest.mark.parametrize("is_by_topic", [False, True])
async def test_an_ack_from_before_a_seek_is_never_durable_and_says_so(is_by_topic):
    async with never_persisted() as topics:
        subscription, positions, receipt, (durable, _) = await acked_and_waiting(topics)
        if is_by_topic:
            await (await topics.open("t")).call(subscription.subscription.seek, positions[0], now_ms=1_000)
        else:
            await subscription.seek(positions[0])
        for late in (durable, subscription.durable(receipt)):
            with pytest.raises(AckStateError, match="a seek came after the ack"):
                await asyncio.wait_for(late, 10)


async def test_a_seek_that_fails_leaves_the_ack_to_the_next_persist():
    store, clock = MemoryStore(), MovedClock()
    async with opened(store, clock=clock) as topics:
        subscription, positions, _, (durable, _) = await acked_and_waiting(topics)
        for number in range(2):
            store.inject(Fault(store.mutation_count + number, FaultKind.FULL))
        with pytest.raises(StoreError):
            await subscription.seek(positions[0])
        clock.now_ms += 100_000
        assert await answer(durable) is None


async def test_the_former_owner_of_a_cursor_learns_that_its_acks_are_not_stored():
    store, clock = MemoryStore(), MovedClock()
    topics = AsyncTopics(store, clock=clock, tick_ms=1)
    await topics.__aenter__()
    subscription, _, receipt, (durable, _) = await acked_and_waiting(topics)
    async with opened(MemoryStore(store.disk)) as others:
        await subscribed(others)
        clock.now_ms += 1_000
        for late in (durable, subscription.durable(receipt), topics.close(), topics.close()):
            assert isinstance(await answer(late), CursorFencedError)


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("end", ["close", "unsubscribe", "delete", "close all"])
async def test_an_end_answers_all_who_wait_also_if_it_is_cancelled_and_can_be_repeated(monkeypatch, end, is_cancelled):
    store = MemoryStore()
    async with never_persisted(store) as topics:
        subscription, _, receipt, (durable, next_round) = await acked_and_waiting(topics)
        topic = await topics.open("t")
        call, again = {
            "close": (subscription.close, None),
            "unsubscribe": (partial(topic.unsubscribe, "s"), False),
            "delete": (partial(topics.delete, "t"), False),
            "close all": (topics.close, None),
        }[end]
        disk = changes(monkeypatch, store) if is_cancelled else None
        ending = asyncio.create_task(call())
        if disk is not None:
            await disk.is_reached()
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
            with pytest.raises(TopicClosedError):
                await topic.publish([Message(b"x")])
            assert len(await (await topics.open("t")).publish([Message(b"new")])) == 1


async def test_a_close_that_fails_answers_all_who_wait_and_can_be_repeated():
    store = MemoryStore()
    async with never_persisted(store, cursor=UNWRITABLE) as topics:
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
    assert await unacked_after_restart(store) == [b"x"]


async def test_a_subscription_that_cannot_be_closed_goes_on_and_is_closed_later():
    store = MemoryStore()
    async with never_persisted(store, cursor=UNWRITABLE) as topics:
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


# The program returns while a broker runs in another task: asyncio cancels all tasks, also those of the topics.


def run_until(is_ready, broker):
    """Run a broker in a task of its own until something has happened, and return that task."""

    async def main():
        running.append(asyncio.create_task(broker()))
        while not is_ready():
            await asyncio.sleep(0)

    running = []
    asyncio.run(main())
    assert running[0].cancelled()


def test_a_loop_that_ends_during_a_publish_persists_all_and_hangs_nowhere(monkeypatch):
    async def broker():
        async with never_persisted(store) as topics:
            await acked_and_waiting(topics)
            topic = await topics.open("t")
            disks.append(appends(monkeypatch, store))
            tasks = [asyncio.create_task(topic.publish([Message(b"y")])) for _ in range(3)]
            await disks[0].is_reached()
            tasks += [asyncio.create_task(topic.publish([Message(b"z")])) for _ in range(3)]
            threading.Timer(0.05, disks[0].passable.set).start()
            is_begun.set()
            await asyncio.sleep(3_600)

    store, disks, is_begun = MemoryStore(), [], threading.Event()
    run_until(is_begun.is_set, broker)
    assert asyncio.run(unacked_after_restart(store))[:2] == [b"x"] * 2


@pytest.mark.parametrize("steps", range(6))
def test_a_loop_that_ends_just_after_a_publish_began_hangs_nowhere(steps):
    async def broker():
        async with opened() as topics:
            topic = await topics.open("t")
            left.append(steps)
            await asyncio.gather(*(topic.publish([Message(b"x")]) for _ in range(3)))
            await asyncio.sleep(3_600)

    def is_over():
        if left:
            left[0] -= 1
        return left and left[0] < 0

    left = []
    run_until(is_over, broker)


def test_a_loop_that_ends_while_all_is_closed_persists_all_the_same():
    async def broker():
        async with never_persisted(store) as topics:
            await acked_and_waiting(topics)
            alone = (await topics.open("t")).alone
            await alone.acquire()  # by someone who takes long
            asyncio.get_running_loop().call_later(0.05, alone.release)
            asyncio.get_running_loop().call_later(0.01, is_closing.set)
            await topics.close()

    store, is_closing = MemoryStore(), threading.Event()
    run_until(is_closing.is_set, broker)
    assert asyncio.run(unacked_after_restart(store)) == [b"x"] * 2


# In the background


async def test_a_tick_reads_nothing_that_another_thread_changes():
    async def subscribe_again_and_again(topics):
        for turn in range(30):
            await topics.subscribe_all({"t": [SubscriptionRequest(f"n{turn}-{number}") for number in range(20)]})

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


@pytest.mark.parametrize("whole", [False, True], ids=["subscription", "topic"])
async def test_a_deletion_waits_for_the_persist_under_way(monkeypatch, caplog, whole):
    store = MemoryStore()
    async with never_persisted(store, cursor=CursorConfig(flush_interval_ms=0)) as topics:
        subscription, positions, *_ = await acked_and_waiting(topics)
        topic = await topics.open("t")
        await topics.tick()
        await subscription.ack(positions[2])
        disk = appends(monkeypatch, store)
        persisting = asyncio.create_task(topics.tick())
        await disk.is_reached()
        deleting = asyncio.create_task(topics.delete("t") if whole else topic.unsubscribe("s"))
        await asyncio.wait({deleting}, timeout=0.05)
        disk.passable.set()
        await persisting
        assert await deleting
    assert not caplog.records


async def test_what_all_have_acked_leaves_the_log_by_itself():
    clock = MovedClock()
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


async def test_a_persist_that_fails_is_logged_and_tried_again(caplog):
    store, clock = MemoryStore(), MovedClock()
    async with opened(store, clock=clock, cursor=UNWRITABLE) as topics:
        subscription, _, receipt, _ = await acked_and_waiting(topics)
        store.break_ledgers()
        clock.now_ms += 1_000
        while not caplog.records:
            await asyncio.sleep(0.001)
        assert not subscription.subscription.cursor.durable(receipt)
        store.mend_ledgers()
        clock.now_ms += 100_000
        await asyncio.wait_for(subscription.durable(receipt), 10)
    assert "subscription 's' of topic 't' could not be persisted" in caplog.text
