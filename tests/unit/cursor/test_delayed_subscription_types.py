"""Delays with keys, with dead letters, in the hands of a broker's registry, and of several threads."""

import pytest

from ackstate.dispatch import SubscriptionType
from delayed_topic import NONE, TRACKERS, DelayedTopic

every_tracker = pytest.mark.parametrize("make_trackers", TRACKERS.values(), ids=TRACKERS)


@every_tracker
def test_a_key_stays_with_one_consumer_while_its_delayed_messages_fall_due(make_trackers):
    topic = DelayedTopic(make_trackers(), kind=SubscriptionType.KEY_SHARED)
    for number in range(24):
        topic.publish((NONE, 100, 200, 300)[number % 4], key=b"%d" % (number // 4))
    for consumer in "ab":
        topic.subscriptions["s"].consumer_opened(consumer)
    owner = {}
    came = []
    for now_ms in (0, 120, 220, 320):
        for consumer in "ab":
            numbers = topic.dispatch(now_ms=now_ms, consumer=consumer)
            for number in numbers:
                assert owner.setdefault(number // 4, consumer) == consumer, f"key {number // 4} has two consumers"
            came += numbers
        assert sorted(came) == [number for number in range(24) if number % 4 <= now_ms // 100]
    assert sorted(set(owner.values())) == ["a", "b"]
    topic.ack(*came, now_ms=320)
    assert topic.unacked() == []


@every_tracker
@pytest.mark.parametrize("kind", [SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER])
def test_types_that_keep_the_order_do_not_delay(make_trackers, kind):
    topic = DelayedTopic(make_trackers(), kind=kind)
    topic.publish(100, NONE)
    topic.deliver_at_ms = [0, 0]
    assert topic.dispatch(now_ms=0) == [0, 1]
