"""The parts of a subscription, one by one: its consumers, waiting messages, and messages in flight."""

from __future__ import annotations

import pytest

from ackstate import Position, StoreError, SubscriptionType
from ackstate.dispatch.admission import Deliveries, Sent
from ackstate.dispatch.consumers import Consumers
from ackstate.dispatch.explain import HoleReason
from ackstate.dispatch.messages import ReplayQueue, Waiting
from topics import NumberedTopic

KEY_SHARED = SubscriptionType.KEY_SHARED
NACKED = HoleReason.NACKED


def waiting_messages(owners=None):
    """Each key is of the owner that a dict names."""
    owners = {} if owners is None else owners
    return ReplayQueue(lambda keys: [owners.get(key, "") for key in keys], became_ready=lambda: None)


# Waiting messages


def test_consumers_that_come_and_go_leave_nothing_behind():
    topic = NumberedTopic(KEY_SHARED)
    topic.publish_keys("abcdefghij")
    for number in range(50):
        topic.subscription.dispatch(f"c{number}", 5, now_ms=0)
        topic.subscription.consumer_closed(f"c{number}")
    assert len(topic.subscription._messages.waiting._ready) <= 1
    assert topic.dispatch("last") == [*range(10)]


def test_a_failed_round_holds_no_key(monkeypatch):
    topic = NumberedTopic(KEY_SHARED)
    subscription = topic.subscription
    topic.publish_keys("abcdefghij" * 60)
    for consumer in "ab":
        subscription.consumer_opened(consumer, permits=150)
    read, sizes = topic.log.read, []

    def fails_the_second_time(positions):
        sizes.append(len(positions))
        if len(sizes) > 1:
            raise StoreError("no")
        return read(positions)

    with monkeypatch.context() as patched:
        patched.setattr(topic.log, "read", fails_the_second_time)
        with pytest.raises(StoreError):
            subscription.dispatch_all(now_ms=0)
    assert sizes[0] == 300  # which were sent, and are withdrawn
    assert subscription.unacked_messages == 0
    assert not subscription._consumers._held
    subscription._messages.waiting._check()
    subscription.consumer_closed("a")
    assert topic.dispatch("b", 600) == [*range(600)]
    topic.ack(*range(600))
    assert not subscription._consumers._held


@pytest.mark.parametrize(
    ("key", "ready"),
    [(None, {10_049: [], 10_050: [2], 10_060: [0, 2], 18_959: [0, 2], 18_960: [0, 1, 2]}),
     (b"k", {10_050: [], 10_059: [], 10_060: [0], 18_959: [0], 18_960: [0, 1, 2]})],
)  # fmt: skip
def test_what_waits_for_a_time_waits_no_longer_after_the_clock_was_set_back(key, ready):
    waiting = waiting_messages()
    waiting.release(now_ms=10_000_000)
    waiting.put(Position(1, 0), Waiting(NACKED, key=key, until_ms=10_000_100))
    waiting.put(Position(1, 1), Waiting(NACKED, key=key, until_ms=10_009_000))
    waiting.release(now_ms=10_000_040)
    waiting.follow_clock(now_ms=10_000)
    assert waiting.next_until_ms == 10_060
    waiting.put(Position(1, 2), Waiting(NACKED, key=key, until_ms=10_050))
    for now_ms, entry_ids in ready.items():
        waiting.release(now_ms=now_ms)
        assert [position.entry_id for position in waiting.ready_for("")] == entry_ids
        waiting._check()


def test_a_clock_that_creeps_back_shortens_a_wait_as_one_that_jumps():
    topic = NumberedTopic()
    topic.publish()
    topic.dispatch(now_ms=10_000)
    topic.nack(0, delay_ms=5_000, now_ms=10_000)
    for now_ms in range(10_000, 8_900, -100):
        assert topic.dispatch(now_ms=now_ms) == []
        assert topic.subscription.next_wake_ms == 15_000
    assert topic.dispatch(now_ms=8_900) == []
    assert topic.subscription.next_wake_ms == 13_900
    assert topic.dispatch(now_ms=13_900) == [0]


# Messages in flight


# Consumers


def consumers(kind=KEY_SHARED):
    return Consumers(kind)


@pytest.mark.parametrize("priority", [None, 1.0, True, "1", float("nan")])
def test_a_priority_that_is_no_integer_is_refused_and_the_others_go_on(priority):
    open_now = consumers(SubscriptionType.FAILOVER)
    open_now.open("a", priority=0)
    for name in ("a", "b"):
        with pytest.raises(TypeError, match=f"priority of consumer '{name}' must be an integer, got "):
            open_now.open(name, priority=priority)
    assert open_now.names == ("a",)
    open_now.open("b", priority=-1)
    assert "b" in open_now
    assert open_now.active == "b"
