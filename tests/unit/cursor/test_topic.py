"""A topic opens its parts together, its subscriptions where they are stored, and closes them with one sync."""

import time

import pytest

from ackstate import (
    BrokerLimit,
    MemoryStore,
    Message,
    Position,
    Start,
    StartTime,
    StoreError,
    SubscriptionType,
    SubscriptionTypeError,
    Topic,
    Topics,
    TopicSettings,
)
from ackstate.inspect import inspect_store
from ackstate.limits import DelayedDeliveryPolicies, DeliveryDelayExceededError, GateLimits
from ackstate.limits.policies import Policies, PolicyOwner, PolicyStore
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import delete_topic

ORDERS = PolicyOwner("public", "default", "orders")
P = Position


def messages(count):
    return [Message(b"%d" % number) for number in range(count)]


def entries(deliveries):
    return [delivery.position.entry_id for delivery in deliveries]


@pytest.fixture
def topic(store):
    return Topic.open(store, "orders", now_ms=0)


def reopened(topic, **settings):
    topic.close(now_ms=100)
    return Topic.open(topic.store, topic.name, now_ms=100, settings=TopicSettings(**settings))


def test_a_subscription_continues_where_it_is_stored(topic):
    billing = topic.subscribe("billing", now_ms=0)
    positions = topic.publish(messages(5), now_ms=1)
    billing.dispatch("ann", 9, now_ms=1)
    billing.ack(positions[2], now_ms=2)
    topic = reopened(topic)
    billing = topic.subscribe("billing", start=Start.EARLIEST, now_ms=100)
    sent = billing.dispatch("ann", 9, now_ms=101)
    assert [(each.position.entry_id, each.redelivery_count) for each in sent] == [(0, 1), (1, 1), (3, 1), (4, 1)]
    assert topic.subscribe("billing", now_ms=100) is billing
    assert list(topic.subscriptions) == ["billing"]


@pytest.mark.parametrize(
    ("start", "first"),
    [
        (Start.EARLIEST, 0),
        (Start.LATEST, 6),
        (P(1, 4), 4),
        (P(99, 0), 6),
        (StartTime(0), 0),
        (StartTime(10), 0),
        (StartTime(11), 1),
        (StartTime(13), 3),
        (StartTime(14), 3),
        (StartTime(16), 5),
        (StartTime(99), 6),
    ],
)
def test_a_new_subscription_starts_anywhere(store, start, first):
    settings = TopicSettings(entries_per_ledger_max=2)
    with Topic.open(store, "t", settings=settings, now_ms=0) as topic:
        positions = [topic.publish([Message(b"")], now_ms=now_ms)[0] for now_ms in (10, 12, 12, 14, 14, 16)]
        assert len({ledger_id for ledger_id, _ in positions}) == 3
        start = positions[start.entry_id] if isinstance(start, Position) and start.ledger_id == 1 else start
        subscription = topic.subscribe("s", start=start, now_ms=20)
        sent = [each.position for each in subscription.dispatch("ann", 9, now_ms=20)]
        assert sent == positions[first:]
        subscription.seek(Start.EARLIEST, now_ms=21)
        assert len(subscription.dispatch("ann", 9, now_ms=21)) == 6
        subscription.seek(start, now_ms=21)
        assert [each.position for each in subscription.dispatch("ann", 9, now_ms=21)] == positions[first:]


def test_the_start_and_the_type_are_durable_at_once(store, topic):
    topic.publish(messages(3), now_ms=1)
    topic.subscribe("s", kind=SubscriptionType.FAILOVER, properties={"team": "a"}, now_ms=1)
    crashed = MemoryStore(store.disk)
    (stored,) = Topic.open(crashed, "orders", now_ms=1).stored_subscriptions()
    assert (stored.name, stored.kind, stored.mark_delete) == ("s", SubscriptionType.FAILOVER, P(1, 2))
    assert stored.properties["team"] == "a"


def test_another_type_is_refused_before_anything_is_taken_over(store, topic):
    billing = topic.subscribe("billing", kind=SubscriptionType.KEY_SHARED, now_ms=0)
    for kind in (SubscriptionType.SHARED, SubscriptionType.EXCLUSIVE):
        with pytest.raises(SubscriptionTypeError, match=f"is of type Key_Shared, got {kind.value}"):
            topic.subscribe("billing", kind=kind, now_ms=1)
    positions = topic.publish(messages(1), now_ms=1)
    values = dict(store.disk.values)
    other = Topic.open(MemoryStore(store.disk), "orders", now_ms=1)
    with pytest.raises(SubscriptionTypeError):
        other.subscribe("billing", kind=SubscriptionType.SHARED, now_ms=1)
    assert {**values, "/message-logs/orders": store.disk.values["/message-logs/orders"]} == store.disk.values
    billing.ack(positions[0], now_ms=2)
    assert billing.cursor.persist(now_ms=2).messages_covered == 1
    assert topic.subscribe("billing", kind=SubscriptionType.KEY_SHARED, now_ms=2) is billing


def test_a_call_without_a_time_takes_that_of_the_clock(store):
    times = iter([0.5, *range(1_000, 2_000, 10)])  # each call moves it by 10 ms
    topics = Topics(store, clock=times.__next__)
    with pytest.raises(TypeError, match="the time of the clock must be an integer"):
        topics.open("orders")
    topic = topics.open("orders")
    billing = topic.subscribe("billing")
    (position,) = topic.publish(messages(1))
    (delivery,) = billing.dispatch("ann", 1)
    assert 1_000 < delivery.message.publish_time_ms < 1_100
    billing.nack(position, delay_ms=500)
    assert 1_500 < billing.next_wake_ms < 1_600
    assert not billing.dispatch("ann", 1)
    assert billing.dispatch("ann", 1, now_ms=1_700)
    billing.ack(position)
    assert not topics.tick()
    assert list(topics.tick(now_ms=9_999)) == [("orders", "billing")]
    assert topics.next_wake_ms is None
    topics.close()


def test_the_clock_is_the_wall_clock_by_default(store):
    begin_ms = time.time_ns() // 1_000_000
    with Topics(store) as topics:
        topic = topics.open("orders")
        billing = topic.subscribe("billing")
        topic.publish(messages(1))
        (delivery,) = billing.dispatch("ann", 1)
        assert begin_ms <= delivery.message.publish_time_ms <= time.time_ns() // 1_000_000
        billing.ack(delivery.position)
    with Topic.open(store, "orders") as topic:
        assert topic.subscribe("billing").cursor.backlog == 0


def test_a_start_and_a_type_may_be_given_by_name(topic):
    topic.publish(messages(3), now_ms=0)
    for number, (start, kind) in enumerate(
        (("earliest", "shared"), ("Earliest", "Key_Shared"), ("EARLIEST", "EXCLUSIVE"), (Start.EARLIEST, "failover"))
    ):
        subscription = topic.subscribe(str(number), start=start, kind=kind, now_ms=0)
        assert (subscription.kind.value.lower(), subscription.cursor.backlog) == (kind.lower(), 3)
        subscription.seek("latest", now_ms=1)
        assert subscription.cursor.backlog == 0
        subscription.seek("earliest", now_ms=1)
        assert subscription.cursor.backlog == 3


def test_delayed_messages_are_held_once_for_all_subscriptions(store, delay_index):
    topic = Topic.open(store, "orders", settings=TopicSettings(delay_index=delay_index), now_ms=0)
    billing, audit = (topic.subscribe(name, now_ms=0) for name in ("billing", "audit"))
    exclusive = topic.subscribe("one", kind=SubscriptionType.EXCLUSIVE, now_ms=0)
    topic.publish([Message(b"", deliver_at_ms=5_000)], now_ms=0)
    assert [entries(each.dispatch("ann", 9, now_ms=1)) for each in (billing, audit, exclusive)] == [[], [], [0]]
    assert (len(topic.delays), topic.next_wake_ms) == (1, 5_000)
    assert [entries(each.dispatch("ann", 9, now_ms=5_000)) for each in (billing, audit)] == [[0], [0]]
    without = Topic.open(topic.store, "other", settings=TopicSettings(delay_index=None), now_ms=0)
    undelayed = without.subscribe("s", now_ms=0)
    without.publish([Message(b"", deliver_at_ms=5_000)], now_ms=0)
    assert entries(undelayed.dispatch("ann", 9, now_ms=1)) == [0]


def test_policies_apply(store):
    policies = PolicyStore(store.metadata)
    delays = DelayedDeliveryPolicies(max_delivery_delay_ms=60_000, tick_time_ms=10)
    policies.update(ORDERS.of_namespace, lambda _: Policies(delays, 30, 2_048))
    policies.update(ORDERS, lambda _: Policies(become_old_ack_record_seconds=5))
    topic = Topic.open(store, str(ORDERS), settings=TopicSettings(policies=policies), now_ms=0)
    with pytest.raises(DeliveryDelayExceededError):
        topic.publish([Message(b"", deliver_at_ms=60_002)], now_ms=1)
    topic.publish([Message(b"", deliver_at_ms=31)], now_ms=1)
    billing = topic.subscribe("billing", start=Start.EARLIEST, now_ms=1)
    assert billing.dispatch("ann", 1, now_ms=1) == []
    assert billing.next_wake_ms == 40  # the tick of the namespace
    assert billing.cursor.ruler.age_ms == 5_000
    assert billing._gate.limits.max_unpersisted_ack_record_bytes == 2_048
    unnamed = Topic.open(store, "orders", settings=TopicSettings(policies=policies), now_ms=0)
    assert unnamed.publish([Message(b"", deliver_at_ms=60_002)], now_ms=1)


def test_one_tick_persists_all_that_are_due_with_one_sync(store, topic):
    subscriptions = [topic.subscribe(f"s{number}", now_ms=0) for number in range(4)]
    positions = topic.publish(messages(3), now_ms=1)

    def ack(number):
        for each in subscriptions[:3]:
            each.ack(positions[number], now_ms=1)

    ack(0)
    assert topic.tick(now_ms=999) == {}
    assert topic.next_wake_ms == 1_999  # and not at once again, for a caller that does nothing else
    assert set(topic.tick(now_ms=1_000)) == {"s0", "s1", "s2"}
    ack(1)
    assert topic.next_wake_ms == 2_000
    before = store.mutation_count
    assert [outcome.messages_covered for outcome in topic.tick(now_ms=2_000).values()] == [1, 1, 1]
    assert store.mutation_count == before + 3  # In memory, each append is a mutation of its own.
    assert topic.tick(now_ms=9_000) == {}
    assert topic.next_wake_ms is None


def test_unsubscribing_leaves_nothing_and_wakes_waiters(store, topic):
    empty = set(store.disk.values)
    billing = topic.subscribe("billing", limits=GateLimits(max_unacked_messages=1), now_ms=0)
    positions = topic.publish(messages(3), now_ms=1)
    billing.dispatch("ann", 9, now_ms=1)
    billing.dispatch("ann", 9, now_ms=1)
    billing.ack(positions[2], now_ms=1)
    topic.tick(now_ms=2_000)
    woken = []
    billing.when_open(lambda: woken.append(1), "ann")
    assert topic.unsubscribe("billing", now_ms=3_000)
    assert (woken, dict(topic.subscriptions), topic.stored_subscriptions()) == ([1], {}, [])
    assert set(store.disk.values) == {*empty, "/cursor-terms"}
    assert not topic.unsubscribe("billing", now_ms=3_000)
    fresh = topic.subscribe("billing", kind=SubscriptionType.FAILOVER, start=Start.EARLIEST, now_ms=3_000)
    assert entries(fresh.dispatch("ann", 9, now_ms=3_000)) == [0, 1, 2]


def test_topics_share_a_tick_a_publish_and_a_close():
    store = MemoryStore()
    with Topics(store) as topics:
        names = ["a", "b", "c"]
        subscriptions = [topics.open(name, now_ms=0).subscribe("s", now_ms=0) for name in names]
        assert topics.open("a", now_ms=0) is topics["a"]
        assert (list(topics), len(topics), "a" in topics, "z" in topics) == (names, 3, True, False)
        before = store.mutation_count
        published = topics.publish({name: messages(2) for name in names}, now_ms=1)
        assert store.mutation_count == before + 3
        assert [len(positions) for positions in published.values()] == [2, 2, 2]
        for each, positions in zip(subscriptions, published.values(), strict=True):
            each.ack(positions[0], now_ms=1)
        assert list(topics.tick(now_ms=1_000)) == [(name, "s") for name in names]
        for each, positions in zip(subscriptions, published.values(), strict=True):
            each.ack(positions[1], now_ms=1_001)
        assert topics.next_wake_ms == 2_000
        before = store.mutation_count
    assert store.mutation_count == before + 3
    assert (len(topics), topics.stored()) == (0, names)


def test_a_closed_topic_leaves_the_limit_of_its_broker(store):
    broker = BrokerLimit(10)
    with Topic.open(store, "t", settings=TopicSettings(broker_limit=broker), now_ms=0) as topic:
        subscription = topic.subscribe("s", now_ms=0)
        topic.publish(messages(3), now_ms=1)
        subscription.dispatch("ann", 9, now_ms=1)
        assert broker.unacked_messages == 3
    assert broker.unacked_messages == 0


def test_deleting_a_topic_leaves_nothing():
    store = MemoryStore()
    policies = PolicyStore(store.metadata)
    topics = Topics(store, settings=TopicSettings(policies=policies, entries_per_ledger_max=2))
    for name in (str(ORDERS), "other"):
        subscription = topics.open(name, now_ms=0).subscribe("s", now_ms=0)
        positions = [position for _ in range(3) for position in topics[name].publish(messages(2), now_ms=1)]
        subscription.ack(positions[1], now_ms=1)
    policies.update(ORDERS, lambda _: Policies(become_old_ack_record_seconds=5))
    topics.tick(now_ms=2_000)
    old = topics[str(ORDERS)]
    assert topics.delete(str(ORDERS), now_ms=3_000)
    assert (topics.stored(), list(topics), old.is_closed) == (["other"], ["other"], True)
    assert not any("orders" in path for path in store.disk.values)
    assert not any("orders" in owner for owner in store.ledgers.owners())
    assert not topics.delete(str(ORDERS), now_ms=3_000)
    fresh = topics.open(str(ORDERS), now_ms=4_000)
    assert fresh.subscribe("s", start=Start.EARLIEST, now_ms=4_000).dispatch("ann", 9, now_ms=4_000) == []
    with pytest.raises(Exception, match="has been opened by another owner"):
        old.log.publish(messages(1))


@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
def test_a_crash_while_a_topic_is_deleted_leaves_one_that_opens_or_none(kind):
    for mutation in range(30):
        store = MemoryStore()
        topic = Topic.open(store, "t", settings=TopicSettings(entries_per_ledger_max=2), now_ms=0)
        positions = [position for _ in range(3) for position in topic.publish(messages(2), now_ms=1)]
        for name in ("a", "b"):
            topic.subscribe(name, start=Start.EARLIEST, now_ms=1).ack(positions[1], now_ms=1)
        topic.tick(now_ms=2_000)
        try:
            delete_topic(MemoryStore(store.disk, faults=[Fault(mutation, kind)]), "t")
        except StoreError:
            pass
        else:
            return
        crashed = MemoryStore(store.disk)
        assert not [each for each in inspect_store(crashed) if each.problems]
        again = Topic.open(crashed, "t", now_ms=3_000)
        left = [each.name for each in again.stored_subscriptions()]
        assert left in (["a", "b"], ["b"], [])
        for name in left:
            assert again.subscribe(name, now_ms=3_000).cursor.is_acked(positions[1])
        kept = [
            message.payload for message in again.log.read([each for each in positions if each in again.log.ledgers])
        ]
        assert kept == [b"0", b"1"] * (len(kept) // 2)
        assert len(kept) == 6 or not left
        assert delete_topic(crashed, "t") or not kept
        assert (set(crashed.disk.values), crashed.ledgers.owners()) == (
            {"/cursor-terms"} & set(crashed.disk.values),
            [],
        )
    pytest.fail("the deletion never ended")


def test_wrong_settings_are_refused():
    for wrong in (
        {"entries_per_ledger_max": 0}, {"bytes_per_ledger_max": 0}, {"ledger_rollover_ms": -1},
        {"delay_index": 1_000}, {"cursor": None}, {"limits": 3}, {"broker_limit": 3}, {"policies": {}},
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            TopicSettings(**wrong)
    for call in (
        lambda: Topic.open(MemoryStore(), "t", settings=3, now_ms=0),
        lambda: Topics(MemoryStore(), settings=3),
    ):
        with pytest.raises(TypeError):
            call()


def test_a_ledger_ends_after_a_number_of_bytes():
    store = MemoryStore()
    topic = Topic.open(store, "t", settings=TopicSettings(bytes_per_ledger_max=1_000), now_ms=0)
    for _ in range(5):
        topic.publish([Message(bytes(400))] * 2, now_ms=0)
    assert [*topic.log.ledgers.counts().values()] == [4, 4, 2]
    sizes = [topic.log.sizes.of(ledger_id) for ledger_id in topic.log.ledgers]
    assert all(1_000 <= size < 2_000 for size in sizes[:2])
    assert Topic.open(store, "t", now_ms=0).log.ledgers.counts() == topic.log.ledgers.counts()


def test_a_ledger_ends_with_the_first_publish_after_a_time():
    store = MemoryStore()
    topic = Topic.open(store, "t", settings=TopicSettings(ledger_rollover_ms=1_000), now_ms=0)
    subscription = topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    for now_ms, count in ((999, 1), (1_000, 2), (1_001, 2), (2_000, 2), (2_001, 3), (2_002, 3)):
        topic.publish([Message(b"x")], now_ms=now_ms)
        assert len(topic.log.ledgers.counts()) == count, now_ms
    topic.publish([Message(b"x")], now_ms=1_002)  # The clock went back by as much.
    assert len(topic.log.ledgers.counts()) == 4
    topic.publish([], now_ms=10_000)
    assert len(topic.log.ledgers.counts()) == 4
    subscription.clear_backlog(now_ms=10_000)
    subscription.cursor.persist(now_ms=10_000)
    assert topic.trim(now_ms=10_000) == 3
    idle = Topic.open(store, "idle", settings=TopicSettings(ledger_rollover_ms=1_000), now_ms=0)
    idle.publish([Message(b"x")], now_ms=5_000)  # An empty ledger does not end.
    assert len(idle.log.ledgers.counts()) == 1
    never = Topic.open(store, "never", settings=TopicSettings(ledger_rollover_ms=0), now_ms=0)
    for now_ms in (0, 10**15):
        never.publish([Message(b"x")], now_ms=now_ms)
    assert len(never.log.ledgers.counts()) == 1
