"""A topic trims its log behind all subscriptions, and reports and limits the backlog of the slowest."""

from __future__ import annotations

from random import Random

import pytest

from ackstate import Position
from ackstate.cursor import (
    BacklogPolicy,
    BacklogQuotaExceededError,
    CursorConfig,
    ManagedCursor,
    MemoryStore,
    Message,
    Retention,
    Start,
    StoreError,
    Topics,
    TopicSettings,
)
from ackstate.cursor.stores.memory import Fault, FaultKind

SETTINGS = {"entries_per_ledger_max": 10, "cursor": CursorConfig(flush_interval_ms=0)}
LIMITED = Retention(backlog_bytes_max=1_000, backlog_policy=BacklogPolicy.REFUSE_PUBLISH)


def opened(store=None, **settings):
    return Topics(store or MemoryStore(), settings=TopicSettings(**SETTINGS | settings))


def publish(topic, count=10):
    return topic.publish([Message(bytes(84))] * count, now_ms=0)


def ack_all(topic, name, *, now_ms=0):
    topic.subscriptions[name].clear_backlog(now_ms=now_ms)
    topic.tick(now_ms=now_ms)


def test_ledgers_go_when_the_last_subscription_has_left_them_durably():
    topics = opened()
    topic = topics.open("t", now_ms=0)
    for name in "ab":
        topic.subscribe(name, start=Start.EARLIEST, now_ms=0)
    for _ in range(4):
        publish(topic)
    assert topics.trim(now_ms=0) == 0
    ack_all(topic, "a")
    assert topics.trim(now_ms=0) == 0
    topic.subscriptions["b"].clear_backlog(now_ms=0)
    assert topics.trim(now_ms=0) == 0  # in memory only
    topic.tick(now_ms=0)
    assert topics.trim(now_ms=0) == 3
    assert len(list(topic.log.ledgers)) == 1


def test_a_subscription_that_is_not_open_holds_the_log_and_no_one_looks_again_for_a_minute():
    store = MemoryStore()
    with opened(store) as topics:
        topics.open("t", now_ms=0).subscribe("abandoned", start=Start.EARLIEST, now_ms=0)
    topics = opened(MemoryStore(store.disk))
    topic = topics.open("t", now_ms=0)
    topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    for _ in range(4):
        publish(topic)
    ack_all(topic, "s")
    assert topic.may_trim(now_ms=0)
    assert topics.trim(now_ms=0) == 1  # the empty one of the first owner
    assert topics.trim(now_ms=0) == 0
    assert not topic.may_trim(now_ms=59_999)
    assert topic.may_trim(now_ms=60_000)
    topic.unsubscribe("abandoned", now_ms=0)
    assert topic.trim(now_ms=0) > 0


def test_a_cursor_that_was_opened_without_the_topic_holds_the_log_too():
    topics = opened()
    topic = topics.open("t", now_ms=0)
    topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    ManagedCursor.open(topics.store, topic="t", subscription="own", ledgers=topic.log.ledgers, now_ms=0)
    for _ in range(4):
        publish(topic)
    ack_all(topic, "s")
    assert topics.trim(now_ms=0) == 0


def test_after_a_seek_that_failed_the_messages_from_before_it_stay():
    """The store has the seek, and the subscription continues without it."""
    topics = opened()
    topic = topics.open("t", now_ms=0)
    subscription = topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    positions = [position for _ in range(4) for position in publish(topic)]
    for ahead in range(9):
        topics.store.inject(Fault(topics.store.mutation_count + ahead, FaultKind.FAIL_AFTER))
    with pytest.raises(StoreError):
        subscription.seek(positions[-1], now_ms=0)
    topics.store.forget_faults()
    assert topic.trim(now_ms=0) == 0
    assert len(subscription.dispatch("c", 100, now_ms=0)) == 40


def test_the_retention_of_the_settings_counts():
    topics = opened(retention=Retention(age_ms=5_000))
    topic = topics.open("t", now_ms=0)
    topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    for publish_time_ms in (1_000, 2_000, 3_000):
        topic.publish([Message(b"", publish_time_ms=publish_time_ms)] * 10, now_ms=0)
    ack_all(topic, "s", now_ms=3_000)
    assert topics.trim(now_ms=5_999) == 0
    assert topics.trim(now_ms=66_000) == 2


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


def test_the_sizes_of_ledgers_from_one_on_are_those_of_the_list():
    random = Random(1)
    topic = opened().open("t", now_ms=0)
    log = topic.log
    for _ in range(300):
        log.publish([Message(bytes(random.randrange(9))) for _ in range(random.randrange(3))])
        match random.randrange(6):
            case 0:
                log.end_ledger()
            case 1:
                log.sizes.forget(random.choice(list(log.ledgers)))
            case 2:
                log.trim(random.choice(list(log.ledgers)) if random.random() < 0.3 else 0)
            case _:
                first = random.choice(list(log.ledgers))
                expected = sum(16 + len(each.payload) for each in all_messages(log, first))
                assert log.sizes.from_ledger(first) == expected
                assert log.sizes.whole == sum(map(log.sizes.of, log.ledgers))


def all_messages(log, first):
    counts = log.ledgers.counts().items()
    return log.read([Position(ledger, entry) for ledger, count in counts if ledger >= first for entry in range(count)])
