"""Key_Shared: a key has one consumer at a time and its messages their order; test_rounds.py has the model."""

from __future__ import annotations

from collections import Counter

import pytest

from ackstate import DeadLetterPolicy, SubscriptionType
from ackstate.dispatch import SubscriptionOptions
from ackstate.dispatch.consumers import Consumers
from ackstate.limits import GateLimits
from topics import NumberedTopic

KEY_SHARED = SubscriptionType.KEY_SHARED
# Of the consumers a and b the first two keys are of a, the other two of b.
A1, A2, B1, B2 = "ehbd"


def key_shared(*consumers, **settings):
    topic = NumberedTopic(KEY_SHARED, **settings)
    for name in consumers:
        topic.subscription.consumer_opened(name)
    return topic


def owners(names, keys):
    consumers = Consumers(KEY_SHARED)
    for name in names:
        consumers.open(name, priority=0)
    return [consumers.owner(key) for key in keys]


def test_the_keys_of_these_tests_are_whose_they_say():
    assert owners("ab", [key.encode() for key in (A1, A2, B1, B2)]) == ["a", "a", "b", "b"]


def test_what_was_acked_past_the_subscription_does_not_hold_its_key_up():
    """A message that waits and is acked with the cursor itself: those of its key never filled a hole again."""
    topic = key_shared("a", max_unacked_ranges=3)
    topic.publish_keys((A1 + A2) * 4)
    assert topic.dispatch("a", 3) == [0, 1, 2]
    topic.nack(1)
    topic.cursor.ack_many([topic.positions[number] for number in (1, 4, 6)], now_ms=0)
    assert topic.dispatch("a", 3) == [3, 5]


def test_no_more_than_it_may_is_read_ahead():
    topic = key_shared("a", "b", options=SubscriptionOptions(look_ahead_max=5))
    topic.publish_keys(A1 * 300)
    assert topic.dispatch("b") == []
    assert len(topic.subscription._messages.waiting) == 5
    received = []
    while got := topic.dispatch("a", 7):
        received += got
    assert received == list(range(300))


@pytest.mark.parametrize("consumer_count", [2, 3, 5, 10])
def test_keys_are_shared_out_evenly_and_few_move_when_a_consumer_comes(consumer_count):
    names = [f"consumer-{number}" for number in range(consumer_count)]
    keys = [b"key-%d" % number for number in range(4_000)]
    before, after = owners(names, keys), owners([*names, "another"], keys)
    assert all(0.8 < count * consumer_count / 4_000 < 1.2 for count in Counter(before).values())
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"another"}
    assert 0.8 < len(moved) * (consumer_count + 1) / 4_000 < 1.2


def test_a_consumer_at_its_limit_does_not_hold_others_up():
    topic = key_shared("a", "b", max_unacked_messages_per_consumer=2)
    topic.publish_keys((A1 + B1) * 3)
    assert topic.dispatch("a") == [0, 2]
    assert topic.dispatch("b") == [1, 3]
    topic.ack(1, 3)
    assert topic.dispatch("b") == [5]
    topic.ack(0, 2)
    assert topic.dispatch("a") == [4]


@pytest.mark.parametrize("way", ["nack", "close"])
def test_given_back_the_messages_of_a_key_go_in_order_to_whose_it_is_now(way):
    topic = key_shared("a")
    topic.publish_keys(B1 * 3)
    topic.dispatch("a", 2)
    topic.subscription.consumer_opened("b")
    if way == "nack":
        topic.nack(1, 0)
        assert topic.dispatch("a") == []
    else:
        topic.subscription.consumer_closed("a")
    assert topic.deliveries("b") == [(0, 1), (1, 1), (2, 0)]


def test_later_messages_of_a_key_wait_with_one_given_back_with_a_delay():
    topic = key_shared("a", "b")
    topic.publish_keys(A1 + A1 + A2 + A1)
    assert topic.dispatch("a", 2) == [0, 1]
    topic.nack(0, delay_ms=100)
    assert topic.dispatch("a") == [2]
    topic.nack(1)
    assert topic.dispatch("a", now_ms=99) == []
    assert topic.dispatch("a", now_ms=100) == [0, 1, 3]


def test_when_the_delay_of_a_message_is_over_the_next_one_that_waits_for_a_time_holds_the_rest():
    topic = key_shared("a")
    topic.publish_keys(A1 * 5)
    topic.dispatch("a", 4)
    topic.nack(3, 1)
    topic.nack(0, delay_ms=20)
    topic.nack(2, delay_ms=100)
    assert topic.dispatch("a", now_ms=19) == []
    assert topic.dispatch("a", now_ms=20) == [0, 1]
    assert topic.dispatch("a", now_ms=100) == [2, 3, 4]


def test_while_a_limit_binds_holes_are_filled_in_the_order_of_the_key():
    """Each hole is filled from its ends, and of the two messages of a key the earlier one goes first."""
    topic = key_shared("a")
    for key, count in ((None, 1), (b"k", 1), (None, 3), (b"k", 1), (None, 4)):
        topic.publish(count, key=key)
    topic.dispatch("a", 10)
    topic.nack(1, 2, 3, 5, 8)
    topic.ack(0, 4, 6, 7, 9)
    topic.subscription.change_limits(GateLimits(max_unacked_ranges=2))
    assert topic.cursor.deleted.range_count == 3
    assert topic.dispatch("a") == [1, 3, 5, 8]


def test_a_dead_letter_lets_the_rest_of_its_key_go():
    dead = []
    policy = DeadLetterPolicy(0, lambda delivery: dead.append(delivery.position))
    topic = key_shared("a", options=SubscriptionOptions(dead_letters=policy))
    topic.publish_keys(A1 * 3)
    topic.dispatch("a", 2)
    topic.nack(0)
    assert topic.dispatch("a") == [2]
    assert dead == [topic.positions[0]]
