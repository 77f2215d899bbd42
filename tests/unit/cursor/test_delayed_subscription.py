"""A subscription with any tracker of delayed messages, through a crash, a seek and a stale index."""

import pytest

from ackstate import ManagedCursor, MemoryStore, Message, Subscription
from ackstate.delay import TopicDelayIndex
from ackstate.topic import MessageLog
from delayed_topic import NONE, TRACKERS, DelayedTopic

every_tracker = pytest.mark.parametrize("make_trackers", TRACKERS.values(), ids=TRACKERS)


def rounded(trackers, deliver_at_ms):
    """The times at which a message that is read early may come, both included."""
    return deliver_at_ms - trackers.early_ms, deliver_at_ms + 9


def assert_in_time(topic, came, *, from_ms=0):
    for number, came_ms in came.items():
        first_ms, last_ms = rounded(topic.trackers, max(topic.deliver_at_ms[number], 0))
        assert max(first_ms, from_ms) <= came_ms <= max(last_ms, from_ms), f"message {number} came at {came_ms} ms"


@every_tracker
def test_each_message_comes_once_and_in_time(make_trackers):
    topic = DelayedTopic(make_trackers())
    topic.publish(NONE, 500, 205, 100, NONE, 333, 101, 0, 1_000, 90, 95, 640, 77, NONE)
    came = topic.drain(now_ms=0)
    assert sorted(came) == list(range(14))
    assert [number for number in range(14) if came[number] == 0] == [0, 4, 7, 13]
    assert_in_time(topic, came)


@every_tracker
def test_after_a_crash_what_is_not_acked_comes_and_what_is_acked_does_not(make_trackers):
    topic = DelayedTopic(make_trackers())
    topic.publish(NONE, 500, 205, 120, NONE, 333, 121, 60, 1_000, 80, 85, 640, 77, NONE)
    assert topic.dispatch(now_ms=0) == [0, 4, 13]
    topic.ack(0, 13)
    assert topic.dispatch(now_ms=100) == [7, 9, 10, 12]
    topic.ack(7, 10, 1, now_ms=100)
    topic.cursors["s"].persist(now_ms=100)
    topic.crash(now_ms=300)
    came = topic.drain(now_ms=301)
    assert sorted(came) == [2, 3, 4, 5, 6, 8, 9, 11, 12]
    assert_in_time(topic, came, from_ms=301)


@every_tracker
def test_what_was_not_persisted_comes_again_as_the_gauge_said_and_not_early(make_trackers):
    topic = DelayedTopic(make_trackers())
    topic.publish(*range(50, 650, 50), 10_000)
    topic.dispatch(now_ms=0)
    topic.ack(*topic.dispatch(now_ms=200), now_ms=200)
    topic.cursors["s"].persist(now_ms=200)
    topic.ack(*topic.dispatch(now_ms=400), now_ms=400)
    topic.ack(11, now_ms=400)
    gauge = topic.cursors["s"].redelivery_if_crashed
    assert gauge == 5
    topic.crash(now_ms=400)
    came = topic.drain(now_ms=401)
    assert sorted(came) == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert_in_time(topic, came, from_ms=401)


@every_tracker
def test_what_is_acked_before_it_is_due_never_comes(make_trackers):
    topic = DelayedTopic(make_trackers())
    topic.publish(100, 110, 120, 130, 140, 150, 160)
    assert topic.dispatch(now_ms=0) == []
    topic.ack(0, 2, 6)
    assert sorted(topic.drain(now_ms=0)) == [1, 3, 4, 5]


@every_tracker
def test_a_seek_back_delivers_all_again_and_none_early(make_trackers):
    topic = DelayedTopic(make_trackers())
    topic.publish(NONE, 100, 200, 300, 400, 500, 600)
    topic.ack(*topic.dispatch(now_ms=0))
    topic.ack(*topic.dispatch(now_ms=250), now_ms=250)
    assert topic.unacked() == [3, 4, 5, 6]
    topic.subscriptions["s"].seek(topic.positions[1], now_ms=250)
    assert topic.unacked() == [1, 2, 3, 4, 5, 6]
    came = topic.drain(now_ms=250)
    assert sorted(came) == [1, 2, 3, 4, 5, 6]
    assert_in_time(topic, came, from_ms=250)


@every_tracker
def test_a_cleared_backlog_stays_clear(make_trackers):
    topic = DelayedTopic(make_trackers())
    topic.publish(100, 100, NONE, 100, 100, 100, 100)
    assert topic.dispatch(now_ms=0) == [2]
    topic.subscriptions["s"].clear_backlog(now_ms=0)
    assert topic.subscriptions["s"].stats().delayed_entries == 0
    topic.publish(300)
    assert topic.drain(now_ms=0).keys() == {7}
    assert topic.tracker["s"].delayed_message_count == 0


@every_tracker
def test_when_the_clock_runs_back_nothing_comes_twice_and_nothing_is_lost(make_trackers):
    topic = DelayedTopic(make_trackers())
    topic.publish(100, 200, 300)
    assert topic.dispatch(now_ms=0) == []
    assert topic.dispatch(now_ms=260, count=1) == [0]
    # By the clock of now message 1 is early, but its time has been.
    early = topic.dispatch(now_ms=50)
    assert early in ([], [1])
    topic.ack(0, *early, now_ms=50)
    came = topic.drain(now_ms=270)
    assert sorted(came) == sorted({1, 2} - set(early))
    assert came[2] >= 300 - topic.trackers.early_ms


@every_tracker
def test_a_new_subscription_gets_what_waits_and_what_is_over(make_trackers):
    topic = DelayedTopic(make_trackers())
    topic.publish(NONE, 100, 200, 300, 400, 500, 600)
    topic.ack(*topic.dispatch(now_ms=0))
    topic.ack(*topic.dispatch(now_ms=350), now_ms=350)
    topic.names = ("s", "late")
    topic.open("late", now_ms=350)
    came = topic.drain(now_ms=350, name="late")
    assert [number for number in came if came[number] == 350] == [0, 1, 2, 3]
    assert sorted(came) == [0, 1, 2, 3, 4, 5, 6]
    assert_in_time(topic, came, from_ms=350)
    assert sorted(topic.drain(now_ms=350)) == [4, 5, 6]


@every_tracker
def test_a_subscription_that_was_closed_goes_on_where_it_was(make_trackers):
    topic = DelayedTopic(make_trackers())
    topic.publish(*range(100, 800, 50))
    topic.ack(*topic.dispatch(now_ms=0))
    topic.ack(*topic.dispatch(now_ms=200), now_ms=200)
    topic.subscriptions["s"].close(now_ms=200)
    with pytest.raises(ValueError, match="closed"):
        topic.tracker["s"].add_message(topic.positions[0], deliver_at_ms=1, now_ms=0)
    topic.open("s", now_ms=500)
    came = topic.drain(now_ms=500)
    assert sorted(came) == [*range(3, 14)]
    assert_in_time(topic, came, from_ms=500)


def two_ledgers_of_delayed_messages(store):
    """A log of two ledgers with four messages each, all of them due in ten seconds."""
    log = MessageLog.open(store, topic="t", entries_per_ledger_max=4)
    for _ in range(2):
        positions = log.publish([Message(b"", deliver_at_ms=10_000)] * 4)
    return log, positions[0]


def opened(store, log, name):
    return ManagedCursor.open(store, topic="t", subscription=name, ledgers=log.ledgers, now_ms=0)


def test_the_index_drops_a_ledger_once_a_persist_covers_it():
    store, index = MemoryStore(), TopicDelayIndex(tick_time_ms=1)
    log, in_second_ledger = two_ledgers_of_delayed_messages(store)
    cursor = opened(store, log, "a")
    subscription = Subscription(log, cursor, delays=index.open_view(cursor.is_acked))
    assert subscription.dispatch("c", 10, now_ms=0) == []
    cursor.mark_delete(in_second_ledger, now_ms=1)
    assert len(index) == 8  # A crash may forget the ack.
    cursor.persist(now_ms=1)
    assert len(index) == 4
