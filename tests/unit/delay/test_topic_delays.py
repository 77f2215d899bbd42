"""A topic whose delay index is chosen by a setting: in memory or bucketed, with the same promises."""

from dataclasses import replace

import pytest

from ackstate import GateLimits, MemoryStore, Message, Position, Start, StoreError, Topic, Topics, TopicSettings
from ackstate.delay import BucketedDelayIndex, DelayConfig, TopicDelayIndex
from ackstate.errors import LogFencedError
from ackstate.limits.rules import Rule
from ackstate.stores.memory import Fault, FaultKind

FACTORY = "org.apache.pulsar.broker.delayed."


def settings_of(delay_index, *, entries_per_ledger_max=4, **more):
    return TopicSettings(delay_index=delay_index, entries_per_ledger_max=entries_per_ledger_max, **more)


def opened(store, delay_index, *, now_ms=0, **more):
    return Topic.open(store, "t", settings=settings_of(delay_index, **more), now_ms=now_ms)


def publish(topic, *deliver_at_ms, now_ms=0):
    return [
        position
        for each in deliver_at_ms
        for position in topic.publish([Message(b"%d" % each, deliver_at_ms=each)], now_ms=now_ms)
    ]


def drained(subscription, *, now_ms):
    """Dispatch and ack until nothing is left to wait for; return when each message came."""
    came = {}
    for _ in range(200):
        sent = subscription.dispatch("ann", 3, now_ms=now_ms)
        for each in sent:
            assert each.position not in came, "twice"
            assert each.message.deliver_at_ms <= now_ms, "early"
            came[each.position] = now_ms
            subscription.ack(each.position, now_ms=now_ms)
        if not sent:
            if subscription.next_wake_ms is None:
                return came
            now_ms = max(now_ms, subscription.next_wake_ms)
    raise AssertionError("never at rest")


def left_of(store):
    """What is stored of the delay index of any topic."""
    return [each for each in (*store.disk.values, *store.ledgers.owners()) if "delayed" in each]


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        ("InMemoryDelayedDeliveryTrackerFactory", TopicDelayIndex),
        ("InMemoryTopicDelayedDeliveryTrackerFactory", TopicDelayIndex),
        ("BucketDelayedDeliveryTrackerFactory", BucketedDelayIndex),
    ],
)
def test_pulsars_factory_chooses_the_index(factory, kind):
    conf = {"delayedDeliveryTrackerFactoryClassName": FACTORY + factory, "delayedDeliveryTickTimeMillis": "100"}
    topic = Topic.open(
        MemoryStore(), "t", settings=TopicSettings(delay_index=DelayConfig.from_pulsar_conf(conf)), now_ms=0
    )
    assert type(topic.delays) is kind
    off = DelayConfig.from_pulsar_conf({**conf, "delayedDeliveryEnabled": "false"})
    assert Topic.open(MemoryStore(), "t", settings=TopicSettings(delay_index=off), now_ms=0).delays is None


def test_each_subscription_gets_each_message_once_when_it_is_due_also_after_a_crash(delay_index):
    store = MemoryStore()
    topic = opened(store, delay_index)
    for name in ("a", "b"):
        topic.subscribe(name, start=Start.EARLIEST, now_ms=0)
    positions = publish(topic, *(1_000 + 37 * number % 500 for number in range(22)))
    assert drained_early(topic) == []
    topic.subscriptions["a"].ack(positions[3], now_ms=1)  # cancelled before it is due
    topic.subscriptions["a"].cursor.persist(now_ms=2)
    topic = opened(MemoryStore(store.disk), delay_index, now_ms=10)
    if isinstance(topic.delays, BucketedDelayIndex):
        assert topic.delays.recovery_report.message_count == len(topic.delays) == 20
    for name, missing in (("a", {positions[3]}), ("b", set())):
        came = drained(topic.subscribe(name, now_ms=10), now_ms=10)
        assert set(came) == set(positions) - missing


def drained_early(topic):
    return [each for subscription in topic.subscriptions.values() for each in subscription.dispatch("x", 99, now_ms=1)]


def test_trimmed_ledgers_leave_nothing_in_the_index(delay_index):
    store = MemoryStore()
    topic = opened(store, delay_index)
    subscription = topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    publish(topic, *([60_000] * 18))
    subscription.dispatch("ann", 1, now_ms=1)
    assert len(topic.delays) == 18
    topic.unsubscribe("s", now_ms=2)
    assert topic.trim(now_ms=120_000) > 0
    first = topic.log.ledgers.first_ledger_id
    assert all(position.ledger_id >= first for position in topic.delays.held)
    assert [owner for owner in store.ledgers.owners() if "delayed" in owner] == []


def test_deleting_a_topic_leaves_nothing_of_its_index(delay_index):
    store = MemoryStore()
    topics = Topics(store, settings=settings_of(delay_index))
    topic = topics.open("t", now_ms=0)
    topic.subscribe("s", now_ms=0)
    publish(topic, *([60_000] * 18))
    assert bool(left_of(store)) is isinstance(topic.delays, BucketedDelayIndex)
    assert topics.delete("t", now_ms=1)
    assert left_of(store) == []
    topic = topics.open("t", now_ms=2)
    subscription = topic.subscribe("s", start=Start.EARLIEST, now_ms=2)
    assert drained(subscription, now_ms=99_000) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
def test_a_crash_at_any_change_loses_nothing_and_leaves_nothing_behind(bucketed, kind):
    merging = replace(bucketed, max_bucket_count=2)
    for mutation in range(200):
        store = MemoryStore(faults=[Fault(mutation, kind)])
        published = []
        try:
            topic = opened(store, merging)
            subscription = topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
            for number in range(26):
                published += publish(topic, 1_000 + 100 * (7 * number % 11), now_ms=number)
            for now_ms in (1_300, 1_700, 2_500):
                for each in subscription.dispatch("ann", 99, now_ms=now_ms):
                    subscription.ack(each.position, now_ms=now_ms)
                topic.tick(now_ms=now_ms + 5_000)
                topic.trim(now_ms=now_ms + 5_000)
            is_over = True
        except StoreError:
            is_over = False
        after = MemoryStore(store.disk)
        topic = opened(after, merging, now_ms=20_000)
        subscription = topic.subscribe("s", start=Start.EARLIEST, now_ms=20_000)
        drained(subscription, now_ms=20_000)
        assert subscription.cursor.backlog == 0
        assert not len(topic.delays), "still held"
        topic.close(now_ms=30_000)
        opened(after, merging, now_ms=40_000)
        assert len(after.ledgers.owned_by("delayed t")) == 0
        if is_over:
            assert mutation > 40
            return
    raise AssertionError("the story never ended")


def test_a_former_owner_changes_nothing_of_the_present_ones_index(bucketed):
    store = MemoryStore()
    former = opened(store, bucketed)
    former.subscribe("s", start=Start.EARLIEST, now_ms=0)
    positions = publish(former, *([1_000] * 14))
    present = opened(MemoryStore(store.disk), bucketed, now_ms=1)
    subscription = present.subscribe("s", now_ms=1)
    positions += publish(present, *([1_500] * 6), now_ms=1)
    snapshots = present.store.ledgers.owned_by("delayed t")
    registered = store.metadata.get("/delayed-buckets/t")
    with pytest.raises(LogFencedError):
        publish(former, 2_000)
    # It seals, loads, drops and clears, as if it had not noticed.
    former.delays.learn([(Position(50 + number, 0), 3_000) for number in range(20)])
    former.delays.forget_before(10**6)
    with pytest.raises(StoreError):
        former.delays.clear()
    former.delays._sealed.catch_up()
    assert present.store.ledgers.owned_by("delayed t") == snapshots
    assert store.metadata.get("/delayed-buckets/t") == registered
    assert set(drained(subscription, now_ms=2)) == set(positions)


def test_snapshots_of_a_bucketed_index_go_when_the_topic_has_another_one(bucketed):
    store = MemoryStore()
    topic = opened(store, bucketed)
    topic.subscribe("s", now_ms=0)
    positions = publish(topic, *([1_000] * 18))
    assert left_of(store)
    topic.close(now_ms=1)
    topic = opened(store, DelayConfig(), now_ms=2)
    assert left_of(store) == []
    assert set(drained(topic.subscribe("s", now_ms=2), now_ms=2)) == set(positions)


def test_a_damaged_segment_is_rebuilt_from_the_log(bucketed):
    store = MemoryStore()
    topic = opened(store, bucketed)
    topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    positions = publish(topic, *(1_000 + 100 * number for number in range(17)))
    for ledger_id in store.ledgers.owned_by("delayed t"):
        store.disk.ledgers[ledger_id].entries[-1] = b"\xff"
    came = drained(topic.subscriptions["s"], now_ms=0)
    assert [came[position] for position in positions] == [1_000 + 100 * number for number in range(17)]
    assert topic.delays.stats().damaged


# Delayed messages part the ranges of every subscription of their topic.


def test_a_gate_that_delayed_messages_alone_have_closed_opens_when_they_are_due(delay_index):
    topic = opened(MemoryStore(), delay_index, limits=GateLimits(max_unacked_ranges=4), entries_per_ledger_max=10)
    subscriptions = [topic.subscribe(name, now_ms=0) for name in ("s", "other")]
    # Each second message is delayed: each ack of another is a range by itself.
    positions = publish(topic, *(0 if number % 2 else 1_000 for number in range(30)))
    for subscription in subscriptions:
        sent = True
        while sent:
            sent = subscription.dispatch("ann", 99, now_ms=1)
            subscription.ack_many([each.position for each in sent], now_ms=1)
        (reason,) = subscription.why_blocked(now_ms=1)
        assert (reason.rule, reason.used, reason.delayed_ranges) == (Rule.UNACKED_RANGES, 4, 4)
        assert "Delayed messages part 4 of the ranges" in reason.detail
        assert subscription.next_wake_ms == 1_000
    for subscription in subscriptions:
        came = drained(subscription, now_ms=1)
        assert len(came) == 26
        assert not subscription.why_blocked(now_ms=2_000)
        assert subscription.cursor.mark_delete_position == positions[-1]
