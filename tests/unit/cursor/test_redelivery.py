"""Redelivery and its count: given back, delayed, a dead letter, sought, skipped, part of a batch."""

from __future__ import annotations

import pytest

from ackstate import (
    AckRefusedError,
    CursorConfig,
    DeadLetterPolicy,
    SubscriptionType,
)
from ackstate.dispatch import SubscriptionOptions
from ackstate.limits import GateLimits
from topics import NumberedTopic

SHARED_TYPES = pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])


class DeadLetters:
    """Takes them, or fails as often as it is told to."""

    def __init__(self, topic_kind=SubscriptionType.SHARED, *, after=2, **settings):
        self.taken, self.failures, self.was_acked = [], 0, []
        options = SubscriptionOptions(dead_letters=DeadLetterPolicy(after, self.take))
        self.topic = NumberedTopic(topic_kind, options=options, **settings)

    def take(self, delivery):
        self.was_acked.append(self.topic.cursor.is_acked(delivery.position))
        if self.failures:
            self.failures -= 1
            raise OSError("the topic of dead letters is away")
        self.taken.append((self.topic.positions.index(delivery.position), delivery.redelivery_count))


# Redelivery counts


@SHARED_TYPES
def test_each_delivery_says_how_often_the_message_was_sent_before(kind):
    topic = NumberedTopic(kind)
    topic.publish(2)
    assert topic.deliveries() == [(0, 0), (1, 0)]
    for count in (1, 2, 3):
        topic.nack(1)
        assert topic.deliveries() == [(1, count)]
    topic.subscription.consumer_closed("a")
    assert topic.deliveries("b") == [(0, 1), (1, 4)]


# Given back with a delay


@SHARED_TYPES
def test_a_message_given_back_with_a_delay_is_nobodys_and_comes_not_early(kind):
    topic = NumberedTopic(kind, max_unacked_messages=1)
    topic.publish(2)
    assert topic.dispatch() == [0]
    assert topic.nack(0, delay_ms=100, now_ms=1_000) == [True]
    assert topic.subscription.unacked_messages == 0
    assert topic.subscription.next_wake_ms == 1_100
    assert topic.dispatch(now_ms=1_099) == [1]
    topic.ack(1, now_ms=1_099)
    assert topic.dispatch(now_ms=1_099) == []
    assert topic.dispatch(now_ms=1_100) == [0]
    assert topic.subscription.next_wake_ms is None


# Dead letters


@SHARED_TYPES
def test_after_the_last_redelivery_a_message_is_handed_over_and_acked(kind):
    dead = DeadLetters(kind)
    dead.topic.publish(2)
    for count in (0, 1, 2):
        assert (0, count) in dead.topic.deliveries()
        dead.topic.nack(0)
    assert dead.topic.deliveries() == []
    assert dead.taken == [(0, 3)]
    assert dead.was_acked == [False]
    assert dead.topic.unacked() == [1]
    assert dead.topic.subscription.unacked_messages == 1


@SHARED_TYPES
def test_a_hand_over_that_fails_loses_and_acks_nothing_and_holds_nobody_up(kind):
    dead = DeadLetters(kind, after=0)
    dead.topic.publish(4)
    dead.topic.dispatch("a", 3)
    dead.topic.nack(1)
    dead.failures = 2
    for now_ms in (0, 1_000):
        with pytest.raises(OSError, match="away"):
            dead.topic.dispatch(now_ms=now_ms)
        dead.topic.check()
        assert dead.topic.unacked() == [0, 1, 2, 3]
        assert dead.topic.subscription.next_wake_ms == now_ms + 1_000
        assert dead.topic.deliveries(now_ms=now_ms + 999) == ([(3, 0)] if not now_ms else [])
    assert dead.topic.deliveries(now_ms=2_000) == []
    assert dead.taken == [(1, 1)]
    assert dead.topic.unacked() == [0, 2, 3]


def test_a_batch_that_is_sent_again_says_what_of_it_is_not_acked():
    topic = NumberedTopic()
    topic.publish(message_count=3)
    (first,) = topic.subscription.dispatch("a", 1, now_ms=0)
    topic.subscription.ack_batch(first.position, [0b101], now_ms=0)
    topic.nack(0)
    (again,) = topic.subscription.dispatch("a", 1, now_ms=0)
    assert (first.unacked_words, again.unacked_words) == ((), (0b101,))


@SHARED_TYPES
def test_a_dead_letter_whose_ack_would_pass_a_limit_waits_and_holds_nobody_up(kind):
    """Its ack would be one range more than there may be; then the messages around it are acked."""
    dead = DeadLetters(kind, after=0, max_unacked_ranges=1)
    topic = dead.topic
    topic.publish(5)
    assert topic.dispatch("a", 1) == [0]
    topic.subscription.change_limits(GateLimits())
    assert topic.dispatch("a") == [1, 2, 3, 4]
    topic.ack(4)
    topic.nack(2)
    topic.subscription.change_limits(GateLimits(max_unacked_ranges=1))
    assert topic.dispatch("a") == []
    assert dead.taken == []
    topic.ack(3)
    assert topic.dispatch("a") == []
    assert dead.taken == [(2, 1)]
    assert topic.cursor.deleted.range_count == 1


# Batches


def acked_but(*indexes):
    return [sum(1 << index for index in indexes)]


def test_an_ack_of_a_part_takes_it_off_and_the_last_settles():
    topic = NumberedTopic()
    topic.publish(2, message_count=4)
    topic.dispatch("a", 1)
    topic.subscription.ack_batch(topic.positions[0], acked_but(1, 3), now_ms=0)
    topic.check()
    assert topic.subscription.unacked_messages == 2
    topic.subscription.ack_batch(topic.positions[0], acked_but(0, 3), now_ms=0)
    assert topic.subscription.unacked_messages == 1
    assert topic.unacked() == [0, 1]
    topic.subscription.ack_batch(topic.positions[0], acked_but(0, 1, 2), now_ms=0)
    assert topic.subscription.unacked_messages == 0
    assert topic.unacked() == [1]
    topic.check()


def test_given_back_a_batch_comes_again_with_what_is_left_of_it():
    topic = NumberedTopic()
    topic.publish(message_count=4)
    topic.dispatch()
    topic.subscription.ack_batch(topic.positions[0], acked_but(2), now_ms=0)
    topic.nack(0)
    assert topic.subscription.unacked_messages == 0
    assert topic.deliveries() == [(0, 1)]
    assert topic.subscription.unacked_messages == 1


def test_without_batch_index_acks_only_the_last_counts():
    topic = NumberedTopic(config=CursorConfig(batch_index_acks=False))
    topic.publish(message_count=4)
    topic.dispatch()
    topic.subscription.ack_batch(topic.positions[0], acked_but(2), now_ms=0)
    assert topic.subscription.unacked_messages == 4
    topic.subscription.ack_batch(topic.positions[0], acked_but(), now_ms=0)
    assert topic.subscription.unacked_messages == 0


# Seek, skip, clear


@SHARED_TYPES
def test_a_seek_back_brings_acked_messages_again_and_forgets_who_had_what(kind):
    topic = NumberedTopic(kind)
    topic.publish(5)
    topic.dispatch("a", 4)
    topic.ack(0, 1, 3)
    topic.nack(2, delay_ms=1_000)
    topic.subscription.seek(topic.positions[1], now_ms=0)
    topic.check()
    assert topic.subscription.unacked_messages == 0
    assert topic.subscription.next_wake_ms is None
    assert topic.subscription.consumers == ("a",)
    assert topic.deliveries() == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_a_seek_forward_acks_what_it_passes():
    topic = NumberedTopic(tick_time_ms=1)
    topic.publish(2)
    topic.publish(deliver_at_ms=50)
    topic.publish(2)
    topic.dispatch("a", 3)
    topic.subscription.seek(topic.positions[4], now_ms=0)
    assert topic.unacked() == [4]
    assert topic.dispatch(now_ms=100) == [4]
    assert topic.dispatch(now_ms=100) == []


def test_an_ack_of_what_was_sent_before_a_seek_counts_as_an_ack_of_what_is_sent_after():
    topic = NumberedTopic()
    topic.publish(3)
    topic.dispatch()
    topic.ack(1)
    topic.subscription.seek(topic.positions[0], now_ms=0)
    topic.ack(1)
    assert topic.dispatch() == [0, 2]
    topic.ack(2)
    assert topic.unacked() == [0]


@SHARED_TYPES
def test_skip_acks_the_next_entries_whoever_has_them(kind):
    topic = NumberedTopic(kind)
    topic.publish(6)
    topic.dispatch("a", 3)
    topic.ack(1)
    topic.nack(2, delay_ms=50)
    topic.subscription.skip(3, now_ms=0)
    topic.check()
    assert topic.unacked() == [4, 5]
    assert topic.subscription.unacked_messages == 0
    assert topic.subscription.next_wake_ms is None
    assert topic.dispatch("a", now_ms=100) == [4, 5]


@SHARED_TYPES
def test_clear_backlog_clears_what_is_sent_given_back_delayed_and_unread(kind):
    topic = NumberedTopic(kind, tick_time_ms=1)
    topic.publish(3)
    topic.publish(deliver_at_ms=50)
    topic.publish()
    topic.dispatch("a", 3)
    topic.nack(1, delay_ms=10)
    topic.nack(2)
    topic.subscription.clear_backlog(now_ms=0)
    topic.check()
    assert topic.cursor.backlog == 0
    assert topic.subscription.unacked_messages == 0
    assert topic.dispatch(now_ms=1_000) == []
    topic.publish()
    assert topic.dispatch(now_ms=1_000) == [5]


# Consumers that close


def test_the_refused_ack_of_a_message_given_back_changes_nothing():
    topic = NumberedTopic(max_unacked_ranges=1)
    topic.publish(4)
    topic.dispatch("a", 1)
    topic.subscription.change_limits(GateLimits())
    topic.dispatch("a")
    topic.ack(3)
    topic.nack(1)
    topic.subscription.change_limits(GateLimits(max_unacked_ranges=1))
    with pytest.raises(AckRefusedError, match="too little is reserved"):
        topic.ack(1)
    assert topic.unacked() == [0, 1, 2]
    assert topic.subscription.unacked_messages == 2
