"""Many cursors that are opened together, or begin their journals together, share syncs, and fail one by one."""

from __future__ import annotations

from collections import Counter

import pytest
from serial import SerialExecutor

from ackstate import (
    CursorConfig,
    CursorFencedError,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    SqliteStore,
    Start,
    StoreError,
    SubscriptionType,
    SubscriptionTypeError,
    Topic,
    TopicClosedError,
    Topics,
    UnreadableCursorError,
)
from ackstate.cursor import CursorOpening, PersistTarget, open_cursors, persist_all
from ackstate.cursor.journal import Journal, cursor_path
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import SubscriptionRequest

P = Position
NAMES = [f"topic {number}" for number in range(6)]
REQUESTS = [SubscriptionRequest(f"s{number}", Start.EARLIEST) for number in range(5)]


class Syncs:
    """A store on a disk, and how often it has synced."""

    def __init__(self, path):
        self.count = 0
        self.store = SqliteStore(path)
        self.store._database._connection.set_trace_callback(self._see)

    def _see(self, statement):
        self.count += statement == "COMMIT"

    def of(self, call):
        before = self.count
        return call(), self.count - before


@pytest.fixture
def syncs(tmp_path):
    syncs = Syncs(tmp_path / "store")
    yield syncs
    syncs.store.close()


def opened(topics, *, now_ms):
    assert all(isinstance(each, Topic) for each in topics.open_all(NAMES, now_ms=now_ms).values())


def subscribed(topics, *, now_ms):
    outcomes = topics.subscribe_all(dict.fromkeys(NAMES, REQUESTS), now_ms=now_ms)
    assert len(outcomes) == len(NAMES) * len(REQUESTS)
    assert all(outcomes[topic, name] is topics[topic].subscriptions[name] for topic, name in outcomes)


def ack(topics, number):
    for name in NAMES:
        for subscription in topics[name].subscriptions.values():
            subscription.ack(P(topics[name].log.ledgers.first_ledger_id, number), now_ms=0)


def test_topics_and_subscriptions_share_the_syncs_of_opening_and_of_first_persists(syncs):
    topics = Topics(syncs.store)
    _, count = syncs.of(lambda: opened(topics, now_ms=0))
    assert count < 3 * len(NAMES)  # The owner's record, the first ledger, the record that names it.
    _, count = syncs.of(lambda: subscribed(topics, now_ms=0))
    assert count < len(NAMES) * len(REQUESTS)
    topics.publish(dict.fromkeys(NAMES, [Message(b"x")] * 9), now_ms=1)
    ack(topics, 5)
    outcomes, count = syncs.of(lambda: topics.tick(now_ms=10_000))
    assert {outcome.route for outcome in outcomes.values()} == {PersistTarget.SNAPSHOT}
    assert count < 2 * len(NAMES) * len(REQUESTS)  # For each the ledger, its first entry, the record.
    ack(topics, 6)
    _, count = syncs.of(lambda: topics.tick(now_ms=20_000))
    assert count == 1
    topics.close(now_ms=20_000)

    topics = Topics(syncs.store)
    _, count = syncs.of(lambda: opened(topics, now_ms=30_000))
    assert count < 2 * len(NAMES)  # The record and the fence.
    _, count = syncs.of(lambda: subscribed(topics, now_ms=30_000))
    assert count < len(NAMES) * len(REQUESTS)
    _, count = syncs.of(lambda: topics.publish({key: [Message(b"y")] for key in NAMES}, now_ms=30_001))
    assert count < 3 * len(NAMES)  # The ledger, the record that names it, the message.
    ack(topics, 7)
    _, count = syncs.of(lambda: topics.close(now_ms=40_000))
    assert count < 3 * len(NAMES) * len(REQUESTS)  # As above, and the deletion of the ledger before.
    topics.open_all(NAMES, now_ms=50_000)
    subscribed(topics, now_ms=50_000)
    acked = {each.cursor.deleted.range_count for name in NAMES for each in topics[name].subscriptions.values()}
    assert acked == {1}
    assert len(syncs.store.ledgers.owners()) == len(NAMES) * (1 + len(REQUESTS))


def test_cursors_without_a_topic_share_syncs_too(syncs):
    ledgers = LedgerMap.from_counts({3: 100})
    openings = [CursorOpening(topic="t", subscription=f"s{number}", ledgers=ledgers) for number in range(40)]
    cursors, count = syncs.of(lambda: open_cursors(syncs.store, openings, now_ms=0))
    assert count < 60  # A cursor without a start begins with a ledger, whose entry and record follow.
    cursors[0].ack(P(3, 1), now_ms=1)
    cursors[0].persist(now_ms=1)
    cursors, count = syncs.of(lambda: open_cursors(syncs.store, openings, now_ms=2))
    assert count < 40
    assert [cursor.is_acked(P(3, 1)) for cursor in cursors] == [True] + [False] * 39


def test_a_fenced_cursor_costs_the_others_one_sync_more(syncs):
    ledgers = LedgerMap.from_counts({3: 100})
    openings = [CursorOpening(topic="t", subscription=f"s{number}", ledgers=ledgers) for number in range(20)]
    cursors = open_cursors(syncs.store, openings, now_ms=0)
    for cursor in cursors:
        cursor.ack(P(3, 1), now_ms=1)
    open_cursors(syncs.store, openings[3:4], now_ms=1)
    results, count = syncs.of(lambda: persist_all(cursors, now_ms=2))
    assert count <= 2
    assert [type(result) for result in results[:4]] == [*[type(results[0])] * 3, CursorFencedError]
    assert Counter(getattr(result, "route", None) for result in results) == {PersistTarget.DELTA: 19, None: 1}
    assert [cursor.redelivery_if_crashed for cursor in cursors] == [0, 0, 0, 1, *[0] * 16]


def test_subscriptions_that_cannot_be_opened_do_not_keep_the_others_from_it():
    store = MemoryStore()
    topic = Topic.open(store, "t", now_ms=0)
    for name, kind in (("damaged", SubscriptionType.SHARED), ("exclusive", SubscriptionType.EXCLUSIVE)):
        topic.subscribe(name, kind=kind, now_ms=0)
    topic.close(now_ms=0)
    path = cursor_path("t", "damaged")
    store.metadata.put(path, b"\xff", expected_version=store.metadata.get(path).version)
    topic = Topic.open(store, "t", now_ms=0)
    requests = [SubscriptionRequest(name, kind=SubscriptionType.SHARED) for name in ("new", "damaged", "exclusive")]
    outcomes = topic.subscribe_all(requests, now_ms=0)
    assert [type(each) for each in (outcomes["damaged"], outcomes["exclusive"])] == [
        UnreadableCursorError, SubscriptionTypeError,
    ]  # fmt: skip
    assert list(topic.subscriptions) == ["new"]
    assert topic.subscribe_all(requests[:1], now_ms=0) == {"new": topic.subscriptions["new"]}


def test_invalid_requests_change_nothing():
    store = MemoryStore()
    topics = Topics(store)
    topic = topics.open("t", now_ms=0)
    before = dict(store.disk.values)
    good = SubscriptionRequest("good")
    for error, bad in (
        (ValueError, good),
        (ValueError, SubscriptionRequest("")),
        (TypeError, SubscriptionRequest("a", start=5)),
        (ValueError, SubscriptionRequest("a", properties={"#pulsar.internal.x": "y"})),
    ):
        with pytest.raises(error):
            topic.subscribe_all([good, bad], now_ms=0)
    with pytest.raises(TypeError, match="kind"):
        SubscriptionRequest("a", kind="Shared")
    with pytest.raises(KeyError):
        topics.subscribe_all({"t": [good], "closed": [good]}, now_ms=0)
    with pytest.raises(ValueError, match="topic"):
        topics.open_all(["other", ""], now_ms=0)
    ledgers = LedgerMap.from_counts({3: 100})
    opening = CursorOpening(topic="t", subscription="s", ledgers=ledgers)
    with pytest.raises(ValueError, match="different"):
        open_cursors(store, [opening, opening], now_ms=0)
    assert (topic.subscriptions, store.disk.values) == ({}, before)
    assert open_cursors(store, [], now_ms=0) == []
    assert topic.subscribe_all([], now_ms=0) == {}
    topic.close(now_ms=0)
    with pytest.raises(TopicClosedError):
        topic.subscribe_all([good], now_ms=0)


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
@pytest.mark.parametrize("number", range(12))
def test_a_write_that_fails_is_the_outcome_of_its_own_cursor(kind, number):
    """Three cursors of a store begin their journals, each with four writes."""
    store, ledgers = MemoryStore(), LedgerMap.from_counts({3: 100})
    openings = [CursorOpening(topic="t", subscription=name, ledgers=ledgers) for name in "abc"]
    open_cursors(store, openings, now_ms=0)
    cursors = open_cursors(store, openings, now_ms=0)
    receipts = [cursor.ack(P(3, 5), now_ms=1) for cursor in cursors]
    store.inject(Fault(store.mutation_count + number, kind))
    outcomes = persist_all(cursors, now_ms=2, executor=SerialExecutor())
    fails = number % 4 == 2 and kind is FaultKind.FAIL_BEFORE  # A ledger falls back; a record has no way back.
    assert [cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True)] == [
        not isinstance(outcome, StoreError) for outcome in outcomes
    ]
    assert sum(isinstance(outcome, StoreError) for outcome in outcomes) <= 1
    if fails:
        assert isinstance(outcomes[number // 4], StoreError) or outcomes[number // 4].route is PersistTarget.METADATA
    persist_all(cursors, now_ms=3)
    store.forget_faults()
    assert all(cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True))
    assert all(each.is_acked(P(3, 5)) for each in open_cursors(MemoryStore(store.disk), openings, now_ms=4))


@pytest.mark.parametrize("write", ["create", "append", "put", "delete"])
def test_an_interrupt_leaves_the_acks_waiting_that_it_met(write, monkeypatch):
    store, ledgers = MemoryStore(), LedgerMap.from_counts({3: 100})
    openings = [CursorOpening(topic="t", subscription=name, ledgers=ledgers) for name in "abc"]
    open_cursors(store, openings, now_ms=0)
    cursors = open_cursors(store, openings, now_ms=0)
    receipts = [cursor.ack(P(3, 5), now_ms=1) for cursor in cursors]
    part = type(store.metadata if write == "put" else store.ledgers)
    method, calls = getattr(part, write), []

    def interrupted(*args, **named):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return method(*args, **named)

    monkeypatch.setattr(part, write, interrupted)
    with pytest.raises(KeyboardInterrupt):
        persist_all(cursors, now_ms=2, executor=SerialExecutor())
    monkeypatch.undo()
    assert [cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True)] == [True, False, True]
    assert [cursor.redelivery_if_crashed for cursor in cursors] == [0, 1, 0]
    assert not any(cursor._persister.writing.locked() for cursor in cursors)
    cursors[0].ack(P(3, 6), now_ms=3)
    assert [each.messages_covered for each in persist_all(cursors, now_ms=3)] == [1, 1, 0]
    assert all(cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True))
    assert all(each.is_acked(P(3, 5)) for each in open_cursors(MemoryStore(store.disk), openings, now_ms=4))


def test_a_cursor_whose_record_changes_meanwhile_is_opened_again(monkeypatch):
    store, ledgers = MemoryStore(), LedgerMap.from_counts({3: 100})
    openings = [CursorOpening(topic="t", subscription=name, ledgers=ledgers) for name in "abc"]
    rivals = open_cursors(store, openings, now_ms=0)
    rivals[1].ack(P(3, 7), now_ms=0)
    take_over, taken = Journal._take_over, []

    def after_a_rival(journal, found):
        if not taken:
            rivals[1].set_cursor_properties({"by": "rival"})
        taken.append(journal.path)
        return take_over(journal, found)

    monkeypatch.setattr(Journal, "_take_over", after_a_rival)
    cursors = open_cursors(store, openings, now_ms=1)
    assert all(isinstance(cursor, ManagedCursor) for cursor in cursors)
    assert dict(cursors[1].cursor_properties) == {"by": "rival"}
    assert isinstance(persist_all(rivals, now_ms=2)[1], CursorFencedError)


def test_a_cursor_in_pulsars_format_is_opened_with_the_others():
    store, ledgers = MemoryStore(), LedgerMap.from_counts({3: 100})
    openings = [
        CursorOpening(topic="t", subscription=each, ledgers=ledgers, config=CursorConfig(format=each))
        for each in ("NATIVE", "PULSAR")
    ]
    for cursor in open_cursors(store, openings, now_ms=0):
        cursor.ack(P(3, 5), now_ms=0)
        cursor.close(now_ms=0)
    assert all(each.is_acked(P(3, 5)) for each in open_cursors(store, openings, now_ms=1))
