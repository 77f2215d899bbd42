"""An index under several views, threads and mishaps: whatever one of them does, the others keep their messages."""

from __future__ import annotations

import sys
import threading

import pytest

from ackstate import ManagedCursor, MemoryStore, Message, Position, Subscription
from ackstate.delay import (
    BucketedDelayIndex,
    BucketRegistry,
    DelayConfig,
    InMemoryDelayTracker,
    SnapshotStorage,
    TopicDelayIndex,
)
from ackstate.delay.buckets import SealedBuckets
from ackstate.topic import MessageLog
from small_buckets import KEY

FAR_MS = 10**9


def storage_of(store, **more):
    return SnapshotStorage(store.ledgers, BucketRegistry(store.metadata, "/b"), owner="delayed", **more)


def bucketed(store, **more):
    config = DelayConfig(min_index_count_per_bucket=2, max_indexes_per_segment=1, is_deliver_at_time_strict=True)
    return BucketedDelayIndex.recover(config, storage=storage_of(store, **more), now_ms=0)[0]


def nothing_acked(position):
    return False


def of_any_kind():
    return [TopicDelayIndex(tick_time_ms=10), bucketed(MemoryStore())]


def test_a_message_that_is_due_earlier_than_the_index_says_comes_to_every_view():
    for index in of_any_kind():
        late, reader = index.open_view(nothing_acked), index.open_view(nothing_acked)
        assert late.add_message(Position(3, 0), deliver_at_ms=1_000, now_ms=0)
        # The other one reads the message itself, and delivers it at once.
        assert not reader.add_message(Position(3, 0), deliver_at_ms=50, now_ms=60)
        assert late.scheduled_messages(9, now_ms=60) == [Position(3, 0)]
        assert reader.scheduled_messages(9, now_ms=60) == []


# Threads.


def ask_from_threads(rounds):
    """Views of an index with stale boundaries ask at once when to poll; return how many messages then come."""

    def ask(view, barrier):
        barrier.wait()
        return view.next_delivery_ms

    came, barrier = [], threading.Barrier(4)
    for _ in range(rounds):
        index = bucketed(MemoryStore())
        views = [index.open_view(nothing_acked) for _ in range(4)]
        for ledger_id in range(12):
            for entry_id in range(2):
                views[0].add_message(Position(ledger_id, entry_id), deliver_at_ms=1_000 + ledger_id, now_ms=0)
        for view in views:
            assert view.skip(Position(11, 1), now_ms=0)
            assert view.skip(Position(0, 0), now_ms=0)
            view.advance_mark_delete(Position(8, 0))
        threads = [threading.Thread(target=ask, args=(view, barrier)) for view in views]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        came.append(len(views[0].scheduled_messages(999, now_ms=9_999)))
    return came


@pytest.mark.slow
def test_threads_that_ask_when_to_poll_lose_nothing():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert set(ask_from_threads(60)) == {8}
    finally:
        sys.setswitchinterval(before)


def test_the_boundaries_are_looked_at_under_the_lock(monkeypatch):
    index = bucketed(MemoryStore())
    view = index.open_view(nothing_acked)
    first_boundary = SealedBuckets.first_boundary

    def guarded(sealed):
        assert index.lock.locked()
        return first_boundary(sealed)

    monkeypatch.setattr(SealedBuckets, "first_boundary", guarded)
    view.add_message(Position(1, 0), deliver_at_ms=50, now_ms=0)
    assert view.next_delivery_ms == 50
    assert view.scheduled_messages(9, now_ms=50) == [Position(1, 0)]


# A clock that had run ahead.


@pytest.mark.parametrize("kind", ["view", "view of buckets", "bucketed", "in memory"])
def test_a_clock_that_ran_ahead_once_delivers_nothing_early_after(kind):
    store = MemoryStore()
    log = MessageLog.open(store, topic="t")
    index = TopicDelayIndex(tick_time_ms=10) if kind == "view" else bucketed(store)

    def subscribe(name):
        cursor = ManagedCursor.open(store, topic="t", subscription=name, ledgers=log.ledgers, now_ms=0)
        own = {"bucketed": lambda: index, "in memory": InMemoryDelayTracker}
        return Subscription(log, cursor, delays=own.get(kind, lambda: index.open_view(cursor.is_acked))())

    first = subscribe("first")
    second = first if kind in {"bucketed", "in memory"} else subscribe("second")
    log.publish([Message(b"", deliver_at_ms=FAR_MS)] * 3)
    assert second.dispatch("c", 10, now_ms=100) == []
    # Its clock says that they are due.
    assert len(first.dispatch("c", 10, now_ms=10**12)) == 3
    log.publish([Message(b"", deliver_at_ms=FAR_MS), Message(b"", deliver_at_ms=150)])
    due = [delivery.position.entry_id for delivery in second.dispatch("d", 10, now_ms=200)]
    assert due == [4]
    assert second.next_wake_ms is not None
    rest = [delivery.position.entry_id for delivery in second.dispatch("d", 10, now_ms=FAR_MS)]
    assert rest == ([3] if second is first else [0, 1, 2, 3])


# The caller's own code, and closing.


@pytest.mark.parametrize("answer", [KeyError("once"), [9_000]])
def test_a_poll_that_raises_takes_nothing(answer):
    store, answers = MemoryStore(), [answer]

    def read_deliver_at_ms(positions):
        given = answers.pop() if answers else [1_000 * (1 + entry_id) for _, entry_id in positions]
        if isinstance(given, Exception):
            raise given
        return given if len(given) == len(positions) - 1 else given * 2 if answers else given

    config = DelayConfig(min_index_count_per_bucket=2, max_indexes_per_segment=2, is_deliver_at_time_strict=True)
    storage = storage_of(store, read_deliver_at_ms=read_deliver_at_ms)
    index, _ = BucketedDelayIndex.recover(config, storage=storage, now_ms=0)
    for entry_id in range(4):
        index.add_message(Position(1, entry_id), deliver_at_ms=1_000 * (1 + entry_id), now_ms=0)
    index.add_message(Position(2, 0), deliver_at_ms=9_000, now_ms=0)
    store.ledgers.delete(store.ledgers.owned_by("delayed")[0])
    with pytest.raises((KeyError, ValueError)):
        index.scheduled_messages(99, now_ms=8_000)
    assert len(index) == 5
    index._check()
    assert index.scheduled_messages(99, now_ms=8_000) == [Position(1, entry_id) for entry_id in range(4)]


def test_a_view_that_somebody_closed_does_not_make_a_persist_fail():
    store = MemoryStore()
    log = MessageLog.open(store, topic="t")
    cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
    view = TopicDelayIndex(tick_time_ms=10).open_view(cursor.is_acked)
    subscription = Subscription(log, cursor, delays=view)
    log.publish([Message(b"")] * 2)
    (first, _) = subscription.dispatch("c", 2, now_ms=0)
    view.close()
    receipt = subscription.ack(first.position, now_ms=0)
    cursor.persist(now_ms=1)
    assert cursor.durable(receipt)


def test_views_of_a_closed_index_are_closed():
    store = MemoryStore()
    index = bucketed(store)
    view = index.open_view(nothing_acked)
    index.close()
    for call in (
        lambda: view.add_message(Position(1, 0), deliver_at_ms=50, now_ms=0),
        lambda: view.scheduled_messages(9, now_ms=5),
        lambda: index.open_view(nothing_acked),
        index.delete_retired,
    ):
        with pytest.raises(ValueError, match="the index is closed"):
            call()
    assert store.ledgers.owned_by("delayed") == []


# Readers that restart.


@pytest.mark.parametrize("index", of_any_kind(), ids=["topic", "buckets"])
def test_what_is_offered_is_dropped_once_all_have_acked_it_and_may_come_again(index):
    views = [index.open_view(nothing_acked) for _ in range(2)]
    for view in views:
        for entry_id in range(6_000):
            assert view.add_message(Position(1, entry_id), deliver_at_ms=FAR_MS + entry_id, now_ms=0)
    views[0].advance_mark_delete(Position(2, -1))
    assert len(index) == 6_000
    memory_bytes = index.memory_bytes
    for _ in range(3):
        views[1].advance_mark_delete(Position(2, -1))
        assert len(index) == 0
        assert index.memory_bytes < memory_bytes / 2
        views[1].clear()
        for entry_id in range(6_000):
            assert views[1].add_message(Position(1, entry_id), deliver_at_ms=FAR_MS + entry_id, now_ms=0)
        assert index.memory_bytes < 1.2 * memory_bytes
    assert len(views[1].scheduled_messages(10_000, now_ms=2 * FAR_MS)) == 6_000


# Strange words in the registry.


def test_words_that_are_no_bucket_are_reported_and_hold_nothing_up():
    store = MemoryStore()
    registry = BucketRegistry(store.metadata, "/b")
    registry.put(f"{KEY}_1_2", "9" * 5_000)
    registry.put(f"{KEY}_3_4", "7²")
    _, report = BucketedDelayIndex.recover(DelayConfig(), storage=storage_of(store), now_ms=0)
    assert report.fell_back == ""
    assert [dropped.reason.name for dropped in report.dropped] == ["MALFORMED", "MALFORMED"]


def test_a_snapshot_that_two_keys_name_is_not_deleted_under_the_one_that_is_kept():
    store = MemoryStore()
    index = bucketed(store)
    for ledger_id, entry_id in ((1, 0), (1, 1), (5, 0)):
        index.add_message(Position(ledger_id, entry_id), deliver_at_ms=100 + entry_id, now_ms=0)
    (bucket_id,) = store.ledgers.owned_by("delayed")
    registry = BucketRegistry(store.metadata, "/b")
    registry.put(f"{KEY}_1_4", str(bucket_id))
    recovered = bucketed(store)
    assert recovered.stats().bucket_count == 1
    assert store.ledgers.owned_by("delayed") == [bucket_id]
    assert list(registry.get_all().values()) == [str(bucket_id)]
    assert recovered.scheduled_messages(9, now_ms=500) == [Position(1, 0), Position(1, 1)]


def test_a_refused_skip_leaves_the_clock_alone():
    index = bucketed(MemoryStore())
    index.add_message(Position(1, 0), deliver_at_ms=1_000, now_ms=0)
    with pytest.raises(ValueError, match="got -7"):
        index.skip(Position(1, -7), now_ms=2**63 - 1)
    assert index.scheduled_messages(9, now_ms=1) == []
