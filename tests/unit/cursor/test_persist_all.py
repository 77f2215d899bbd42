"""Many cursors of one store are made durable with one sync, and one that fails does not stop the others."""

import threading
import time

import pytest
from serial import SerialExecutor

from ackstate import (
    CursorClosedError,
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
from ackstate.cursor import CursorOpening, PersistResult, PersistTarget, open_cursors, persist_all
from ackstate.cursor.journal import cursor_path
from ackstate.stores.memory import Fault, FaultKind, MemoryDisk
from ackstate.topic import SubscriptionRequest

P = Position


@pytest.fixture
def log():
    return LedgerMap.from_counts({3: 100})


def opened(store, log, count=5, **settings):
    return [
        ManagedCursor.open(
            store, topic="t", subscription=f"s{n}", ledgers=log, config=CursorConfig(**settings), now_ms=0
        )
        for n in range(count)
    ]


def acked(cursors):
    return [cursor.ack(P(3, 5), now_ms=1) for cursor in cursors]


def test_deltas_share_one_write(log):
    store = MemoryStore(MemoryDisk())
    cursors = opened(store, log)
    receipts = acked(cursors)
    before = store.mutation_count
    results = persist_all(cursors, now_ms=2)
    assert store.mutation_count == before + 5  # In memory, each append is a mutation of its own.
    assert [(result.route, result.messages_covered) for result in results] == [(PersistTarget.DELTA, 1)] * 5
    assert all(cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True))
    assert [result.route for result in persist_all(cursors, now_ms=3)] == [PersistTarget.NOTHING] * 5
    assert all(cursor.is_acked(P(3, 5)) for cursor in opened(MemoryStore(store.disk), log))


def test_one_that_was_fenced_or_closed_does_not_stop_the_others(log):
    store = MemoryStore(MemoryDisk())
    cursors = opened(store, log)
    receipts = acked(cursors)
    opened(store, log, 2)[1].ack(P(3, 9), now_ms=1)  # takes the first two over
    cursors[2].close(now_ms=1)
    results = persist_all(cursors, now_ms=2)
    assert [type(result) for result in results] == [
        CursorFencedError, CursorFencedError, CursorClosedError, PersistResult, PersistResult,
    ]  # fmt: skip
    assert [cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True)] == [
        False, False, True, True, True,
    ]  # fmt: skip


def test_where_the_metadata_store_fails_too_nothing_is_durable_and_all_is_tried_again(log):
    store = MemoryStore(MemoryDisk())
    cursors = opened(store, log)
    receipts = acked(cursors)
    store.break_ledgers()
    store.inject(Fault(store.mutation_count + 2, FaultKind.FAIL_BEFORE))  # Each puts its record, and deletes a ledger.
    results = persist_all(cursors, now_ms=2, executor=SerialExecutor())
    failed = [isinstance(result, StoreError) for result in results]
    assert failed == [False, True, False, False, False]
    assert [cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True)] == [
        not has_failed for has_failed in failed
    ]
    assert [cursor.redelivery_if_crashed for cursor in cursors] == failed
    store.mend_ledgers()
    assert [result.messages_covered for result in persist_all(cursors, now_ms=3)] == failed
    assert cursors[1].durable(receipts[1])
    assert all(cursor.is_acked(P(3, 5)) for cursor in opened(MemoryStore(store.disk), log))


def test_each_that_could_not_be_written_anywhere_says_why_it_could_not(log):
    """They shared one error, which reported the outcome of all for each."""
    store = MemoryStore(MemoryDisk())
    cursors = opened(store, log, 3, metadata_bytes_max=10)
    acked(cursors)
    store.break_ledgers()
    errors = persist_all(cursors, now_ms=2)
    for number, error in enumerate(errors):
        assert isinstance(error, StoreError)
        (note,) = error.__notes__
        assert f"/t/s{number}: " in note
        assert str(error.__cause__) in note


def test_a_closed_store_answers_each_cursor_with_an_error_of_its_own(log):
    store = MemoryStore(MemoryDisk())
    cursors = opened(store, log, 3)
    acked(cursors)
    store.close()
    errors = persist_all(cursors, now_ms=2)
    assert [len(error.__notes__) for error in errors] == [1] * 3


@pytest.mark.parametrize("kind", [FaultKind.SYNC_FAILED, FaultKind.CRASH_BEFORE])
def test_after_a_failed_sync_nothing_is_durable(log, kind):
    store = MemoryStore(MemoryDisk())
    cursors = opened(store, log)
    receipts = acked(cursors)
    store.inject(Fault(store.mutation_count, kind))
    for now_ms in (2, 3):
        assert all(isinstance(result, StoreError) for result in persist_all(cursors, now_ms=now_ms))
        assert not any(cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True))
        assert [cursor.redelivery_if_crashed for cursor in cursors] == [1] * 5
    assert not any(cursor.is_acked(P(3, 5)) for cursor in opened(MemoryStore(store.disk), log))


def test_cursors_of_two_stores_and_the_same_cursor_twice_are_refused(log):
    cursor, other = (opened(MemoryStore(MemoryDisk()), log, 1)[0] for _ in range(2))
    for cursors in ([cursor, other], [cursor, cursor]):
        with pytest.raises(ValueError, match="share a store"):
            persist_all(cursors, now_ms=1)
    assert persist_all([], now_ms=1) == []


def test_two_at_once_over_the_same_cursors_do_not_wait_for_each_other(log):
    store = MemoryStore(MemoryDisk())
    cursors = opened(store, log, 20)

    def persist_often(ordered):
        for entry in range(50):
            for cursor in ordered:
                cursor.ack(P(3, entry), now_ms=entry)
            persist_all(ordered, now_ms=entry)

    threads = [threading.Thread(target=persist_often, args=(order,)) for order in (cursors, cursors[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    persist_all(cursors, now_ms=99)
    assert [cursor.redelivery_if_crashed for cursor in cursors] == [0] * 20
    assert {cursor.mark_delete_position for cursor in opened(MemoryStore(store.disk), log, 20)} == {P(3, 49)}


NAMES = [f"topic {number}" for number in range(6)]
REQUESTS = [SubscriptionRequest(f"s{number}", Start.EARLIEST) for number in range(5)]


class Syncs:
    """A store on a disk, how often it has synced, and how often it would have if no call had shared a sync."""

    def __init__(self, path):
        self.count = self.shared = self.alone = 0
        self.store = SqliteStore(path)
        self.store._database._connection.set_trace_callback(self._see)

    def _see(self, statement):
        if statement == "COMMIT":
            self.count += 1
            time.sleep(0.01)  # so that other threads come and wait

    def of(self, call, alone):
        before = self.count
        result = call()
        assert self.count - before <= alone
        self.shared, self.alone = self.shared + self.count - before, self.alone + alone
        return result


@pytest.fixture
def syncs(tmp_path):
    syncs = Syncs(tmp_path / "store")
    yield syncs
    syncs.store.close()


def all_opened(topics, *, now_ms):
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
    topics, topic_count, cursor_count = Topics(syncs.store), len(NAMES), len(NAMES) * len(REQUESTS)
    # The owner's record, the first ledger, the record that names it.
    syncs.of(lambda: all_opened(topics, now_ms=0), 3 * topic_count)
    syncs.of(lambda: subscribed(topics, now_ms=0), cursor_count)
    topics.publish(dict.fromkeys(NAMES, [Message(b"x")] * 9), now_ms=1)
    ack(topics, 5)
    # For each the ledger, its first entry, the record.
    outcomes = syncs.of(lambda: topics.tick(now_ms=10_000), 3 * cursor_count)
    assert {outcome.route for outcome in outcomes.values()} == {PersistTarget.SNAPSHOT}
    ack(topics, 6)
    syncs.of(lambda: topics.tick(now_ms=20_000), 1)
    topics.close(now_ms=20_000)

    topics = Topics(syncs.store)
    syncs.of(lambda: all_opened(topics, now_ms=30_000), 2 * topic_count)  # the record and the fence
    syncs.of(lambda: subscribed(topics, now_ms=30_000), cursor_count)
    # The ledger, the record that names it, the message.
    syncs.of(lambda: topics.publish({key: [Message(b"y")] for key in NAMES}, now_ms=30_001), 3 * topic_count)
    ack(topics, 7)
    syncs.of(lambda: topics.close(now_ms=40_000), 3 * cursor_count)  # as above, and the deletion of the ledger before
    assert syncs.shared < syncs.alone
    topics.open_all(NAMES, now_ms=50_000)
    subscribed(topics, now_ms=50_000)
    acked = {each.cursor.deleted.range_count for name in NAMES for each in topics[name].subscriptions.values()}
    assert acked == {1}
    assert len(syncs.store.ledgers.owners()) == len(NAMES) * (1 + len(REQUESTS))


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
        (ValueError, SubscriptionRequest("a", properties={"#pulsar.internal.x": "y"})),
    ):
        with pytest.raises(error):
            topic.subscribe_all([good, bad], now_ms=0)
    for wrong, error in (
        ({"kind": "Shred"}, ValueError), ({"kind": 1}, TypeError), ({"start": 5}, TypeError),
        ({"repair": "all"}, ValueError),
    ):  # fmt: skip
        with pytest.raises(error, match=next(iter(wrong))):
            SubscriptionRequest("a", **wrong)
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
