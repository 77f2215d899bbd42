"""A topic trims its log behind all subscriptions, and reports and limits the backlog of the slowest."""

from collections import Counter

import pytest

from ackstate import (
    BacklogQuotaExceededError,
    CursorConfig,
    ManagedCursor,
    MemoryStore,
    Message,
    Start,
    StoreError,
    Topics,
    TopicSettings,
)
from ackstate.cursor.journal import delete_subscription
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import BacklogPolicy, Retention, publish_all
from wrapped_store import before_each_call

SETTINGS = {"entries_per_ledger_max": 10, "cursor": CursorConfig(flush_interval_ms=0)}
LIMITED = Retention(backlog_bytes_max=1_000, backlog_policy=BacklogPolicy.REFUSE_PUBLISH)


def opened(store=None, **settings):
    return Topics(store or MemoryStore(), settings=TopicSettings(**SETTINGS | settings))


def publish(topic, count=10):
    return topic.publish([Message(bytes(84))] * count, now_ms=0)


def ack_all(topic, name, *, now_ms=0):
    topic.subscriptions[name].clear_backlog(now_ms=now_ms)
    topic.tick(now_ms=now_ms)


def test_the_report_names_the_subscription_that_holds_the_log_and_costs_no_read(monkeypatch):
    store = MemoryStore()
    with opened(store) as topics:
        topics.open("t", now_ms=0).subscribe("abandoned", start=Start.EARLIEST, now_ms=0)
    topics = opened(MemoryStore(store.disk), retention=Retention(backlog_bytes_max=1_000))
    topic = topics.open("t", now_ms=0)
    subscription = topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    publish(topic)
    report = topic.backlog_report()
    assert (report.held_by, report.entry_count, report.byte_count) == ("abandoned", 10, 1_000)
    assert not report.is_exceeded
    publish(topic, 1)
    ack_all(topic, "s")
    monkeypatch.setattr(type(topics.store.ledgers), "read", None)
    report = topic.backlog_report()
    assert (report.held_by, report.entry_count, report.is_exceeded) == ("abandoned", 11, True)
    monkeypatch.undo()
    topic.unsubscribe("abandoned", now_ms=0)
    assert topic.backlog_report().held_by is None
    subscription.close(now_ms=0)
    publish(topic, 1)
    assert topic.backlog_report().entry_count == 1  # that of the closed one


def test_a_publish_above_the_limit_is_refused_and_the_next_after_acks_is_not():
    topics = opened(retention=LIMITED)
    topic = topics.open("t", now_ms=0)
    topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    publish(topic, 11)
    before = topic.log.ledgers.last_confirmed
    with pytest.raises(BacklogQuotaExceededError, match="subscription 's' needs the messages from"):
        publish(topic, 1)
    other = topics.open("other", now_ms=0)
    outcomes = topics.publish({"t": [Message(b"")], "other": [Message(b"")]}, now_ms=0)
    assert isinstance(outcomes["t"], BacklogQuotaExceededError)
    assert outcomes["other"] == [other.log.ledgers.last_confirmed]
    assert topic.log.ledgers.last_confirmed == before
    ack_all(topic, "s")
    assert len(publish(topic, 1)) == 1


def last_publish_dates(publish, *, now_ms):
    """Fill three ledgers with messages of odd times by a publish, and return how many ledgers are old in an hour."""
    topics = opened(MemoryStore(), retention=Retention(age_ms=3_600_000))
    topic = topics.open("t", now_ms=0)
    for number in range(31):
        publish(topics, topic, [Message(b"x", publish_time_ms=(1, 2**62)[number % 2])])
    assert topic.trim(now_ms=now_ms + 3_599_999) == 0
    return topic.trim(now_ms=now_ms + 3_600_000)


def test_each_way_to_publish_dates_its_ledger_by_the_time_of_the_call():
    now_ms = 10**12
    ways = [
        lambda _, topic, batch: topic.publish(batch, now_ms=now_ms),
        lambda topics, _, batch: topics.publish({"t": batch}, now_ms=now_ms),
        lambda _, topic, batch: publish_all([(topic, batch)], now_ms=now_ms),
        lambda _, topic, batch: publish_all([(topic.publisher, batch)], now_ms=now_ms),
        lambda _, topic, batch: publish_all([(topic.log, batch)], now_ms=now_ms),
    ]
    assert [last_publish_dates(way, now_ms=now_ms) for way in ways] == [3] * 5


READS = frozenset({"get", "children", "read", "last", "owned_by", "owners"})
"""The calls of a store that read: names, records and entries."""


def limited(store=None, **settings):
    return opened(store, retention=LIMITED, entries_per_ledger_max=10**6, **settings).open("t", now_ms=0)


def test_a_publish_reads_subscriptions_only_while_the_log_is_above_the_limit_and_once_a_minute():
    reads = Counter()
    store = before_each_call(MemoryStore(), lambda name: reads.update({name} & READS))
    topic = limited(store)
    for number in range(50):
        topic.subscribe(f"closed {number}", now_ms=0).close(now_ms=0)
    subscription = topic.subscribe("s", now_ms=0)
    publish(topic)  # ten messages: the limit
    before = reads.total()
    for _ in range(100):
        topic.publish([], now_ms=0)
    assert reads.total() == before
    for number in range(50):
        topic.unsubscribe(f"closed {number}", now_ms=0)
    for _ in range(50):
        publish(topic, 1)
        subscription.clear_backlog(now_ms=0)
        subscription.cursor.persist(now_ms=0)
    before = reads.total()
    for _ in range(100):
        topic.publish([], now_ms=59_999)
    assert reads.total() == before
    topic.publish([], now_ms=60_000)
    once = reads.total() - before
    assert 0 < once < 10
    topic.publish([], now_ms=60_001)
    assert reads.total() == before + once


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("by", ["deletion", "unsubscribe", "acks elsewhere"])
def test_a_subscription_that_is_gone_or_has_acked_elsewhere_refuses_no_publish(is_open, by):
    store = MemoryStore()
    topic = limited(store)
    subscription = topic.subscribe("old", start=Start.EARLIEST, now_ms=0)
    publish(topic, 11)
    if not is_open:
        subscription.close(now_ms=0)
    with pytest.raises(BacklogQuotaExceededError, match="'old'"):
        publish(topic, 1)
    assert topic.backlog_report().held_by == "old"
    if by == "deletion":
        delete_subscription(store, topic="t", subscription="old")
    elif by == "unsubscribe":
        topic.unsubscribe("old", now_ms=0)
    else:
        elsewhere = ManagedCursor.open(store, topic="t", subscription="old", ledgers=topic.log.ledgers, now_ms=0)
        elsewhere.mark_delete(topic.log.ledgers.last_confirmed, now_ms=0)
        elsewhere.persist(now_ms=0)
    assert topic.backlog_report().held_by is None
    assert publish(topic, 1)


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
def test_a_subscription_whose_creation_had_an_unknown_outcome_counts_if_the_store_has_it(kind):
    store = MemoryStore()
    topic = limited(store)
    publish(topic, 11)  # no subscription: no backlog
    assert topic.backlog_report().held_by is None
    for ahead in range(9):
        store.inject(Fault(store.mutation_count + ahead, kind))
    with pytest.raises(StoreError):
        topic.subscribe("new", start=Start.EARLIEST, now_ms=0)
    store.forget_faults()
    topic.log.end_ledger()
    if kind is FaultKind.FAIL_BEFORE:
        publish(topic, 1)
        assert topic.trim(now_ms=0) == 1
        return
    with pytest.raises(BacklogQuotaExceededError, match="'new'"):
        publish(topic, 1)
    topic.log.publish([Message(b"")])
    assert topic.backlog_report().held_by == "new"
    assert topic.trim(now_ms=0) == 0
    assert len(topic.subscribe("new", now_ms=0).dispatch("c", 100, now_ms=0)) == 12


def test_a_trim_keeps_what_another_owner_of_an_open_subscription_needs():
    store = MemoryStore()
    topic = opened(store).open("t", now_ms=0)
    topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    positions = [position for _ in range(4) for position in publish(topic)]
    ack_all(topic, "s")
    ManagedCursor.open(store, topic="t", subscription="s", ledgers=topic.log.ledgers, now_ms=0).reset(
        positions[15], now_ms=0
    )
    assert topic.backlog_report().held_from == positions[15]
    assert topic.trim(now_ms=0) == 1
    assert next(iter(topic.log.ledgers)) == positions[15].ledger_id
