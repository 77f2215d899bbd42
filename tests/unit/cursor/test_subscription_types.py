"""Who gets which messages: Exclusive, Failover, Shared; Key_Shared has a file of its own."""

from __future__ import annotations

import pytest

from ackstate import ConsumerBusyError, ConsumerClosedError, SubscriptionType
from ackstate.position_set import PositionSet
from topics import NumberedTopic

EXCLUSIVE, FAILOVER, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER, SubscriptionType.SHARED
SINGLE_ACTIVE = pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER])


def test_an_exclusive_subscription_refuses_a_second_consumer():
    topic = NumberedTopic(EXCLUSIVE)
    topic.publish(3)
    assert topic.dispatch("a", 2) == [0, 1]
    with pytest.raises(ConsumerBusyError, match="'b': 'a' has"):
        topic.subscription.consumer_opened("b")
    with pytest.raises(ConsumerBusyError, match="'b': 'a' has"):
        topic.dispatch("b")
    assert topic.subscription.consumers == ("a",)
    assert topic.subscription.active_consumer == "a"
    assert topic.subscription.unacked_messages == 2
    assert topic.dispatch("a") == [2]


@pytest.mark.parametrize("kind", SubscriptionType)
@pytest.mark.parametrize("opened_by", ["consumer_opened", "dispatch"])
def test_to_open_a_consumer_twice_is_refused_and_changes_nothing(kind, opened_by):
    topic = NumberedTopic(kind)
    topic.publish(2)
    if opened_by == "dispatch":
        topic.dispatch("a", 1)
    else:
        topic.subscription.consumer_opened("a")
    with pytest.raises(ConsumerBusyError, match="consumer 'a' is open: close it first, or choose another name"):
        topic.subscription.consumer_opened("a", priority=7)
    assert topic.subscription.consumers == ("a",)
    assert topic.dispatch("a") == ([1] if opened_by == "dispatch" else [0, 1])


@pytest.mark.parametrize("kind", SubscriptionType)
def test_a_consumer_that_was_closed_gets_nothing_before_it_is_opened_again(kind):
    """No one would give its messages back: a dispatch that comes late, after the connection has gone."""
    topic = NumberedTopic(kind)
    topic.publish(3)
    assert topic.dispatch("a", 2) == [0, 1]
    assert topic.subscription.consumer_closed("a") == 2
    for _ in range(2):
        with pytest.raises(ConsumerClosedError, match="consumer 'a' was closed: open it again first"):
            topic.dispatch("a")
    assert topic.subscription.consumers == ()
    assert topic.subscription.unacked_messages == 0
    assert topic.dispatch("b", 1) == [0]
    topic.subscription.consumer_closed("b")
    topic.subscription.consumer_opened("a")
    assert topic.dispatch("a") == [0, 1, 2]


def test_priority_goes_before_the_name():
    topic = NumberedTopic(FAILOVER)
    topic.subscription.consumer_opened("a", priority=1)
    topic.subscription.consumer_opened("z", priority=0)
    topic.subscription.consumer_opened("y", priority=0)
    assert topic.subscription.active_consumer == "y"


def test_a_better_consumer_takes_over_all_that_is_not_acked_as_in_pulsar():
    topic = NumberedTopic(FAILOVER)
    topic.publish(4)
    assert topic.dispatch("b", 3) == [0, 1, 2]
    topic.ack(0)
    topic.subscription.consumer_opened("a")
    assert topic.subscription.unacked_messages == 0
    assert topic.dispatch("b") == []
    assert topic.deliveries("a") == [(1, 1), (2, 1), (3, 0)]
    topic.ack(1)  # from whichever of the two
    assert topic.unacked() == [2, 3]


@SINGLE_ACTIVE
def test_a_message_given_back_brings_all_that_was_sent_after_it_so_that_the_order_stays(kind):
    topic = NumberedTopic(kind)
    topic.publish(6)
    topic.dispatch("a", 5)
    assert topic.nack(2) == [True]
    assert topic.subscription.unacked_messages == 2
    assert topic.nack(3) == [False]
    assert topic.deliveries("a") == [(2, 1), (3, 1), (4, 1), (5, 0)]


@SINGLE_ACTIVE
def test_nothing_passes_a_message_given_back_with_a_delay(kind):
    topic = NumberedTopic(kind)
    topic.publish(4)
    topic.dispatch("a", 3)
    topic.nack(1, delay_ms=100, now_ms=1_000)
    assert topic.subscription.next_wake_ms == 1_100
    assert topic.dispatch("a", now_ms=1_099) == []
    assert topic.dispatch("a", now_ms=1_100) == [1, 2, 3]


@SINGLE_ACTIVE
def test_no_limit_holds_a_single_active_consumer_back(kind):
    topic = NumberedTopic(kind, max_unacked_messages=2, max_unacked_ranges=1, max_unpersisted_ack_record_bytes=1_024)
    topic.publish(1_000)
    assert topic.dispatch("a", 1_000) == list(range(1_000))
    topic.ack(*range(1, 1_000, 2))
    assert topic.cursor.view.unpersisted_record_bytes > 1_024
    assert topic.subscription.why_blocked() == ()
    topic.publish()
    assert topic.dispatch("a") == [1_000]
    calls = []
    topic.subscription.when_open(lambda: calls.append(1), "a")
    assert calls == [1]


@SINGLE_ACTIVE
def test_a_single_active_consumer_gets_delayed_messages_at_once_as_in_pulsar(kind):
    topic = NumberedTopic(kind, tick_time_ms=10)
    topic.publish(2, deliver_at_ms=1_000)
    assert topic.dispatch("a") == [0, 1]
    assert topic.subscription.next_wake_ms is None


@pytest.mark.parametrize("kind", [FAILOVER, SubscriptionType.KEY_SHARED])
def test_to_give_back_many_of_one_key_with_a_delay_costs_each_the_same(monkeypatch, kind):
    topic = NumberedTopic(kind)
    topic.publish(200, key=b"k")
    topic.dispatch("a", 200)
    moves = []
    for name in ("add", "discard"):
        monkeypatch.setattr(PositionSet, name, counted(getattr(PositionSet, name), moves))
    for number in range(199, -1, -1):
        topic.subscription.nack(topic.positions[number], delay_ms=10)
    sent = topic.subscription.dispatch("a", 200, now_ms=10)
    assert [each.position for each in sent] == topic.positions
    assert len(moves) < 200 * 25


def counted(method, calls):
    def call(self, position):
        calls.append(position)
        return method(self, position)

    return call
