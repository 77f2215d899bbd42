"""A subscription with any tracker of delayed messages, through a crash, a seek and a stale index."""

import pytest

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
def test_what_is_acked_before_it_is_due_never_comes(make_trackers):
    topic = DelayedTopic(make_trackers())
    topic.publish(100, 110, 120, 130, 140, 150, 160)
    assert topic.dispatch(now_ms=0) == []
    topic.ack(0, 2, 6)
    assert sorted(topic.drain(now_ms=0)) == [1, 3, 4, 5]


@every_tracker
def test_what_is_acked_takes_no_ones_place(make_trackers):
    topic = DelayedTopic(make_trackers())
    topic.publish(100, 100, 100, 100, 100)
    assert topic.dispatch(now_ms=0) == []
    topic.ack(0, 1, 3)
    assert topic.dispatch(now_ms=200, count=2) == [2, 4]


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
