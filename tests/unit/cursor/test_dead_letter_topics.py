"""Dead letters: published to a topic, or handed over in asyncio, durably before the ack, and never in anybody's way."""

import asyncio
import time
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest

from ackstate import (
    DeadLetterPolicy,
    ManagedCursor,
    MemoryStore,
    Message,
    Start,
    StoreError,
    Subscription,
    SubscriptionType,
    Topics,
    TopicSettings,
)
from ackstate.aio import AsyncTopics
from ackstate.dispatch import SubscriptionOptions
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import MessageLog
from ackstate.topic.topic import Topic

KINDS = pytest.mark.parametrize("kind", SubscriptionType)


def options(policy):
    return SubscriptionOptions(dead_letters=policy)


def to_topic(after=0, topic="dead"):
    return TopicSettings(options=options(DeadLetterPolicy(after, topic=topic)))


def letters(topics, *, topic="dead", now_ms=0):
    """All messages of a topic of dead letters."""
    subscription = topics.open(topic, now_ms=now_ms).subscribe("all", start=Start.EARLIEST, now_ms=now_ms)
    return [each.message for each in subscription.dispatch("undertaker", 1_000, now_ms=now_ms)]


def given_back(subscription, *, count=100, now_ms=0, consumer="ann"):
    """Send messages to a consumer that gives them back, and return their positions."""
    positions = [each.position for each in subscription.dispatch(consumer, count, now_ms=now_ms)]
    subscription.nack_many(positions, now_ms=now_ms)
    return positions


# The policy


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "either hand_over or topic"),
        ({"hand_over": print, "topic": "dead"}, ValueError, "either hand_over or topic"),
        ({"topic": ""}, ValueError, "must not be empty"),
        ({"topic": 7}, TypeError, "topic must be a str"),
        ({"hand_over": 7}, TypeError, "hand_over must take a delivery"),
    ],
)
def test_a_policy_names_one_receiver(arguments, error, message):
    with pytest.raises(error, match=message):
        DeadLetterPolicy(2, **arguments)


def test_only_topics_can_publish_dead_letters():
    store = MemoryStore()
    topic = Topic.open(store, "orders", settings=to_topic(), now_ms=0)
    before = store.mutation_count
    with pytest.raises(ValueError, match="published by Topics or AsyncTopics"):
        topic.subscribe("s", now_ms=0)
    assert store.mutation_count == before
    log = MessageLog.open(store, topic="t")
    cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
    with pytest.raises(ValueError, match="published by Topics or AsyncTopics"):
        Subscription(log, cursor, options=options(DeadLetterPolicy(0, topic="dead")))


def test_a_topic_does_not_get_its_own_dead_letters():
    """The settings of all topics do not apply to the topic that they name; to ask for it is a mistake."""
    topics = Topics(MemoryStore(), settings=to_topic())
    dead = topics.open("dead", now_ms=0)
    positions = dead.publish([Message(b"x")], now_ms=0)
    subscription = dead.subscribe("s", start=Start.EARLIEST, now_ms=0)
    for _ in range(3):
        assert given_back(subscription) == positions
    with pytest.raises(ValueError, match="must go to another topic"):
        dead.subscribe("t", options=options(DeadLetterPolicy(0, topic="dead")), now_ms=0)
    assert [each.name for each in dead.stored_subscriptions()] == ["s"]


# Published by Topics


@KINDS
def test_a_dead_letter_is_published_as_pulsar_s_clients_do(kind):
    topics = Topics(MemoryStore(), settings=to_topic(after=1))
    topic = topics.open("persistent://public/default/orders", now_ms=0)
    subscription = topic.subscribe("billing", kind=kind, now_ms=0)
    message = Message(b"poison", key=b"k", message_count=3, properties={"trace": "7"}, publish_time_ms=5)
    (position,) = topic.publish([message], now_ms=10)
    for now_ms in (20, 30):
        assert given_back(subscription, now_ms=now_ms) == [position]
    assert subscription.dispatch("ann", 10, now_ms=40) == []
    assert subscription.cursor.is_acked(position)
    (letter,) = letters(topics, now_ms=50)
    assert letter == Message(
        b"poison", key=b"k", message_count=3, publish_time_ms=40,
        properties={
            "trace": "7", "REAL_TOPIC": topic.name, "REAL_SUBSCRIPTION": "billing",
            "ORIGIN_MESSAGE_ID": str(position),
        },
    )  # fmt: skip
    assert subscription.stats().dead_lettered_messages == 3


def test_a_dead_letter_that_dies_again_keeps_its_first_origin():
    topics = Topics(MemoryStore())
    for name, after, topic in (("orders", 0, "dead"), ("dead", 0, "grave")):
        policy = DeadLetterPolicy(after, topic=topic)
        topics.open(name, now_ms=0).subscribe("s", start=Start.EARLIEST, options=options(policy), now_ms=0)
    topics["orders"].publish([Message(b"x")], now_ms=0)
    for name in ("orders", "dead"):
        subscription = topics[name].subscriptions["s"]
        given_back(subscription)
        subscription.dispatch("ann", 1, now_ms=0)
    (letter,) = letters(topics, topic="grave")
    assert letter.properties["REAL_TOPIC"] == "orders"


def test_a_dead_letter_is_durable_before_its_message_is_acked():
    """A crash at any change of the store leaves the message unacked, or its letter in the topic."""
    crash, is_lost = 0, False
    while not is_lost:
        store = MemoryStore()
        topics = Topics(store, settings=to_topic())
        subscription = topics.open("orders", now_ms=0).subscribe("s", now_ms=0)
        (position,) = topics["orders"].publish([Message(b"x")], now_ms=0)
        given_back(subscription)
        store.inject(Fault(store.mutation_count + crash, FaultKind.CRASH_BEFORE))
        try:
            subscription.dispatch("ann", 1, now_ms=0)
            topics.tick(now_ms=10_000)
            is_lost = store.fired_fault_count == 0
        except StoreError:
            assert not subscription.cursor.is_acked(position) or letters(Topics(MemoryStore(store.disk)))
        again = Topics(MemoryStore(store.disk))
        left = again.open("orders", now_ms=0).subscribe("s", now_ms=0).dispatch("ann", 1, now_ms=0)
        assert len(left) == 1 or letters(again)
        crash += 1
    assert crash > 4


@KINDS
def test_a_topic_of_dead_letters_that_fails_is_tried_again_and_holds_up_no_other_subscription(kind):
    store = MemoryStore()
    topics = Topics(store, settings=to_topic())
    topic = topics.open("orders", now_ms=0)
    topics.open("dead", now_ms=0)
    subscription, other = (topic.subscribe(name, kind=kind, now_ms=0) for name in "so")
    (position,) = topic.publish([Message(b"x")], now_ms=0)
    given_back(subscription)
    store.inject(Fault(store.mutation_count, FaultKind.FULL))
    with pytest.raises(StoreError):
        subscription.dispatch("ann", 1, now_ms=100)
    assert not subscription.cursor.is_acked(position)
    assert subscription.next_wake_ms == 1_100
    assert subscription.dispatch("ann", 1, now_ms=1_099) == []
    assert letters(topics) == []
    assert len(other.dispatch("ann", 1, now_ms=1_099)) == 1
    assert subscription.dispatch("ann", 1, now_ms=1_100) == []
    assert len(letters(topics)) == 1
    assert subscription.cursor.is_acked(position)


def test_without_a_loop_an_awaitable_is_refused_and_the_message_stays():
    async def hand_over(_):
        raise AssertionError("it was awaited")

    topics = Topics(MemoryStore(), settings=TopicSettings(options=options(DeadLetterPolicy(0, hand_over))))
    topic = topics.open("orders", now_ms=0)
    subscription = topic.subscribe("s", now_ms=0)
    (position,) = topic.publish([Message(b"x")], now_ms=0)
    given_back(subscription)
    with pytest.raises(TypeError, match="only AsyncTopics awaits"):
        subscription.dispatch("ann", 1, now_ms=0)
    assert not subscription.cursor.is_acked(position)
    assert subscription.next_wake_ms == 1_000


# In asyncio


def now_ms():
    return time.time_ns() // 1_000_000


class Broker(AsyncExitStack):
    """Topics in asyncio with one policy for dead letters."""

    def __init__(self, policy, *, store=None):
        super().__init__()
        settings = TopicSettings(options=options(policy))
        self.topics = AsyncTopics(store or MemoryStore(), clock=now_ms, settings=settings)

    async def __aenter__(self):
        await self.enter_async_context(self.topics)
        return self

    async def given_back(self, name="orders", *, kind=None, count=1):
        """A subscription with a consumer that has given each message back, their positions, and who awaits a round."""
        topic = await self.topics.open(name)
        subscription = await topic.subscribe("s", start=Start.EARLIEST, kind=kind)
        await subscription.consumer_opened("ann", permits=100)
        positions = await topic.publish([Message(b"%d" % number) for number in range(count)])
        await subscription.next_round()
        await subscription.nack_many(positions)
        return subscription, positions, asyncio.create_task(subscription.next_round())

    async def publish_next(self):
        await (await self.topics.open("orders")).publish([Message(b"next")])

    async def letters(self):
        topic = await self.topics.open("dead")
        subscription = await topic.subscribe("all", start=Start.EARLIEST)
        found = await topic.call(subscription.subscription.dispatch, "undertaker", 1_000, now_ms=now_ms())
        return [each.message for each in found]


async def until_acked(subscription, positions, sending):
    """Wait until all are acked, while no round is received."""
    while not all(map(subscription.subscription.cursor.is_acked, positions)):
        await asyncio.sleep(0.001)
    assert not sending.done()


@KINDS
async def test_asyncio_publishes_dead_letters_and_acks_them(kind):
    async with Broker(DeadLetterPolicy(0, topic="dead")) as broker:
        subscription, positions, sending = await broker.given_back(kind=kind, count=3)
        await until_acked(subscription, positions, sending)
        found = await broker.letters()
        assert [each.payload for each in found] == [b"0", b"1", b"2"]
        assert found[1].properties["ORIGIN_MESSAGE_ID"] == str(positions[1])
        stats = await subscription.stats()
        assert (stats.dead_lettered_messages, stats.replay_entries) == (3, 0)
        await broker.publish_next()
        ((_, (delivery,)),) = (await sending).deliveries
        assert delivery.message.payload == b"next"


async def coroutine_function(taken, delivery):
    await asyncio.sleep(0.001)
    taken.append(delivery.message.payload)


class CoroutineCall:
    def __init__(self, taken):
        self.taken = taken

    async def __call__(self, delivery):
        await coroutine_function(self.taken, delivery)


@pytest.mark.parametrize(
    "hand_over",
    [
        lambda taken: lambda delivery: taken.append(delivery.message.payload),
        lambda taken: lambda delivery: coroutine_function(taken, delivery),
        CoroutineCall,
    ],
    ids=["function", "function that returns an awaitable", "object with a coroutine"],
)
async def test_asyncio_hands_over_by_a_function_or_a_coroutine(hand_over):
    taken = []
    async with Broker(DeadLetterPolicy(0, hand_over(taken))) as broker:
        await until_acked(*await broker.given_back())
        assert taken == [b"0"]


async def test_a_hand_over_that_is_awaited_ends_before_the_ack_and_holds_up_nobody():
    async def hand_over(delivery):
        begun.append(delivery.message.payload)
        await may_end.wait()

    begun, may_end = [], asyncio.Event()
    async with Broker(DeadLetterPolicy(0, hand_over)) as broker:
        subscription, positions, sending = await broker.given_back(count=2)
        while begun != [b"0", b"1"]:
            await asyncio.sleep(0.001)
        await broker.publish_next()
        assert len((await sending).deliveries) == 1
        await broker.given_back("other")
        sending = asyncio.create_task(subscription.next_round())
        await asyncio.sleep(1.2)  # It is not begun again, although that is when one that failed is.
        assert not sending.done()
        assert not subscription.subscription.cursor.is_acked(positions[0])
        assert begun == [b"0", b"1", b"0"]  # the last one of the other topic
        may_end.set()
        await until_acked(subscription, positions, sending)


async def test_functions_that_wait_for_the_loop_do_not_exhaust_the_threads():
    """Each of many topics publishes its dead letter with a call that blocks its thread until the loop has done it."""

    def hand_over(delivery):
        message = Message(delivery.message.payload)
        asyncio.run_coroutine_threadsafe(dead[0].publish([message]), loop).result()

    loop, dead = asyncio.get_running_loop(), []
    async with Broker(DeadLetterPolicy(0, hand_over)) as broker:
        dead.append(await broker.topics.open("dead"))
        for given_back in [await broker.given_back(f"t{number}") for number in range(40)]:
            await until_acked(*given_back)
        assert len(await broker.letters()) == 40


async def test_a_hand_over_that_fails_is_tried_again_in_a_second(caplog):
    async def hand_over(_):
        tried_ms.append(now_ms())
        if len(tried_ms) < 3:
            raise OSError("the topic of dead letters is away")

    tried_ms = []
    async with Broker(DeadLetterPolicy(0, hand_over)) as broker:
        await until_acked(*await broker.given_back())
    assert [later - earlier >= 990 for earlier, later in pairwise(tried_ms)] == [True, True]
    assert caplog.text.count("the topic of dead letters is away") == 2


async def test_the_end_waits_for_the_ack_of_a_letter_that_was_handed_over():
    async def hand_over(_):
        await topic.alone.acquire()  # for a call that takes long
        asyncio.get_running_loop().call_later(0.05, topic.alone.release)
        handed_over.set()

    handed_over = asyncio.Event()
    async with Broker(DeadLetterPolicy(0, hand_over)) as broker:
        topic = await broker.topics.open("orders")
        subscription, _, sending = await broker.given_back()
        await handed_over.wait()
    assert sending.exception() is not None
    assert subscription.subscription.cursor.backlog == 0


async def test_the_end_waits_for_letters_that_are_about_to_be_published(monkeypatch):
    async def opening(topics, name, opened=AsyncTopics.open):
        if name == "dead":
            begun.set()
            await asyncio.sleep(0)
        return await opened(topics, name)

    begun = asyncio.Event()
    monkeypatch.setattr(AsyncTopics, "open", opening)
    async with Broker(DeadLetterPolicy(0, topic="dead")) as broker:
        subscription, _, sending = await broker.given_back()
        await begun.wait()
    assert sending.exception() is not None
    assert subscription.subscription.cursor.backlog == 0


@pytest.mark.parametrize("whole", [False, True], ids=["subscription", "topic"])
async def test_a_deleted_subscription_calls_its_hand_overs_off(whole):
    async def hand_over(_):
        begun.set()
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            called_off.set()
            raise

    begun, called_off = asyncio.Event(), asyncio.Event()
    async with Broker(DeadLetterPolicy(0, hand_over)) as broker:
        _, _, sending = await broker.given_back()
        await begun.wait()
        await (broker.topics.delete("orders") if whole else (await broker.topics.open("orders")).unsubscribe("s"))
        await asyncio.wait_for(called_off.wait(), 10)
    assert sending.exception() is not None
