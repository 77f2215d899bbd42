"""Redelivery and its count: given back, delayed, a dead letter, sought, skipped, part of a batch."""

from __future__ import annotations

import pytest

from ackstate import (
    AckRefusedError,
    CursorClosedError,
    CursorConfig,
    DeadLetterPolicy,
    InvalidPositionError,
    SubscriptionType,
)
from ackstate.dispatch import SubscriptionOptions
from ackstate.limits import GateLimits, Rule
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


def test_the_count_is_kept_while_a_message_waits_and_begins_anew_after_a_seek():
    topic = NumberedTopic()
    topic.publish()
    topic.dispatch()
    topic.nack(0, delay_ms=10)
    assert topic.dispatch(now_ms=9) == []
    assert topic.deliveries(now_ms=10) == [(0, 1)]
    topic.subscription.seek(topic.positions[0], now_ms=10)
    assert topic.deliveries(now_ms=10) == [(0, 0)]


def test_a_delayed_message_counts_from_its_first_delivery():
    topic = NumberedTopic(tick_time_ms=1)
    topic.publish(deliver_at_ms=100)
    assert topic.deliveries() == []
    assert topic.deliveries(now_ms=100) == [(0, 0)]
    topic.nack(0)
    assert topic.deliveries(now_ms=100) == [(0, 1)]


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


def test_the_next_wake_is_the_first_of_what_was_given_back_and_what_is_delayed():
    topic = NumberedTopic(tick_time_ms=1)
    topic.publish(3)
    topic.publish(deliver_at_ms=70)
    topic.dispatch()
    assert topic.subscription.next_wake_ms == 70
    topic.nack(0, delay_ms=90)
    assert topic.subscription.next_wake_ms == 70
    topic.nack(1, delay_ms=50)
    assert topic.subscription.next_wake_ms == 50
    topic.ack(1)
    assert topic.subscription.next_wake_ms == 70
    assert topic.dispatch(now_ms=200) == [0, 3]
    assert topic.subscription.next_wake_ms is None


def test_the_time_of_the_latest_giving_back_counts():
    topic = NumberedTopic()
    topic.publish()
    topic.dispatch()
    topic.nack(0, delay_ms=100)
    assert topic.nack(0, delay_ms=10) == [False]
    assert topic.dispatch(now_ms=99) == []
    assert topic.dispatch(now_ms=100) == [0]
    topic.nack(0, delay_ms=30, now_ms=100)
    assert topic.dispatch(now_ms=129) == []
    assert topic.dispatch(now_ms=130) == [0]


def test_a_negative_delay_is_refused_and_nothing_given_back():
    topic = NumberedTopic()
    topic.publish()
    topic.dispatch()
    with pytest.raises(ValueError, match="delay_ms must be at least 0, got -1"):
        topic.nack(0, delay_ms=-1)
    assert topic.subscription.unacked_messages == 1


def test_what_was_not_sent_or_is_acked_cannot_be_given_back():
    topic = NumberedTopic()
    topic.publish(2)
    topic.dispatch("a", 1)
    topic.ack(0)
    assert topic.nack(0, 1) == [False, False]
    assert topic.dispatch() == [1]


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


def test_with_no_redelivery_allowed_the_first_return_is_the_last():
    dead = DeadLetters(after=0)
    dead.topic.publish(2)
    dead.topic.dispatch()
    dead.topic.nack(0, 1)
    assert dead.topic.dispatch() == []
    assert dead.taken == [(0, 1), (1, 1)]


def test_a_dead_letter_with_a_delay_is_handed_over_when_its_time_has_come():
    dead = DeadLetters(after=0)
    dead.topic.publish()
    dead.topic.dispatch()
    dead.topic.nack(0, delay_ms=10)
    assert dead.topic.dispatch(now_ms=9) == []
    assert dead.taken == []
    assert dead.topic.dispatch(now_ms=10) == []
    assert dead.taken == [(0, 1)]


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


def test_a_part_of_a_batch_needs_no_room_but_its_last_message_does():
    topic = NumberedTopic()
    topic.publish(5, message_count=2)
    topic.dispatch()
    topic.ack(2)
    topic.nack(4)
    topic.subscription.change_limits(GateLimits(max_unacked_ranges=1))
    last = topic.positions[4]
    topic.subscription.ack_batch(last, [0b01], now_ms=0)
    for words in ([0b10], [0]):
        with pytest.raises(AckRefusedError, match="would pass a limit"):
            topic.subscription.ack_batch(last, words, now_ms=0)
    assert list(topic.cursor.view.batch.get(last)) == [0b01]


def test_what_was_to_be_sent_with_a_failed_dead_letter_keeps_its_count():
    dead = DeadLetters(after=1)
    dead.topic.publish(2)
    for _ in range(2):
        dead.topic.dispatch("a", 2)
        dead.topic.nack(1)
    dead.topic.nack(0)
    dead.failures = 1
    with pytest.raises(OSError, match="away"):
        dead.topic.dispatch()
    assert dead.topic.subscription.unacked_messages == 0
    assert dead.topic.deliveries() == [(0, 1)]


def test_a_dead_letter_takes_no_room_of_a_limit_on_messages():
    dead = DeadLetters(after=0, max_unacked_messages=1)
    dead.topic.publish(3)
    dead.topic.dispatch()
    dead.topic.nack(0)
    assert dead.topic.dispatch() == [1]
    assert dead.taken == [(0, 1)]


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


def test_a_refused_dead_letter_lets_later_messages_fill_holes():
    dead = DeadLetters(after=1)
    topic = dead.topic
    topic.publish(8)
    topic.dispatch("a", 8)
    topic.ack(7)
    topic.nack(2)
    topic.dispatch("a")
    topic.nack(2)  # sent twice: a dead letter
    topic.nack(6)
    topic.subscription.change_limits(GateLimits(max_unacked_ranges=1))
    assert topic.dispatch("b") == [6]
    assert dead.taken == []
    assert topic.unacked() == [0, 1, 2, 3, 4, 5, 6]


def test_what_fills_a_hole_passes_a_dead_letter_that_is_refused_in_the_same_dispatch():
    """The first one waiting takes the last range, so the dead letter must wait; the third needs none."""
    dead = DeadLetters(after=1)
    topic = dead.topic
    topic.publish(8)
    topic.dispatch("a", 8)
    topic.ack(0, 1, 7)
    topic.nack(4)
    topic.dispatch("a")
    topic.nack(2, 4, 6)
    topic.subscription.change_limits(GateLimits(max_unacked_ranges=4))
    assert topic.deliveries("b") == [(2, 1), (6, 1)]
    assert dead.taken == []


# Batches


def acked_but(*indexes):
    return [sum(1 << index for index in indexes)]


def test_the_messages_of_a_batch_count_one_by_one():
    topic = NumberedTopic(max_unacked_messages=10)
    topic.publish(4, message_count=4)
    assert topic.dispatch() == [0, 1]
    assert topic.subscription.unacked_messages == 8
    (reason,) = topic.subscription.why_blocked()
    assert (reason.rule, reason.used) == (Rule.UNACKED_MESSAGES, 8)
    assert reason.holders == (("a", 8),)


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


def test_acks_of_parts_open_the_gate():
    topic = NumberedTopic(max_unacked_messages=8)
    topic.publish(3, message_count=4)
    assert topic.dispatch() == [0, 1]
    topic.subscription.ack_batch(topic.positions[0], acked_but(3), now_ms=0)
    assert topic.dispatch() == []
    topic.subscription.ack_batch(topic.positions[1], acked_but(0, 1), now_ms=0)
    assert topic.subscription.why_blocked() == ()
    assert topic.subscription.unacked_messages == 3
    assert topic.dispatch() == [2]


def test_given_back_a_batch_comes_again_with_what_is_left_of_it():
    topic = NumberedTopic()
    topic.publish(message_count=4)
    topic.dispatch()
    topic.subscription.ack_batch(topic.positions[0], acked_but(2), now_ms=0)
    topic.nack(0)
    assert topic.subscription.unacked_messages == 0
    assert topic.deliveries() == [(0, 1)]
    assert topic.subscription.unacked_messages == 1


def test_an_ack_of_the_whole_entry_settles_a_batch():
    topic = NumberedTopic()
    topic.publish(message_count=4)
    topic.dispatch()
    topic.subscription.ack_batch(topic.positions[0], acked_but(2), now_ms=0)
    topic.ack(0)
    assert topic.subscription.unacked_messages == 0


def test_an_ack_of_part_of_a_batch_that_waits_changes_what_comes_again():
    topic = NumberedTopic()
    topic.publish(message_count=4)
    topic.dispatch()
    topic.nack(0, delay_ms=10)
    topic.subscription.ack_batch(topic.positions[0], acked_but(0, 1), now_ms=0)
    assert topic.dispatch(now_ms=10) == [0]
    assert topic.subscription.unacked_messages == 2


def test_without_batch_index_acks_only_the_last_counts():
    topic = NumberedTopic(config=CursorConfig(batch_index_acks=False))
    topic.publish(message_count=4)
    topic.dispatch()
    topic.subscription.ack_batch(topic.positions[0], acked_but(2), now_ms=0)
    assert topic.subscription.unacked_messages == 4
    topic.subscription.ack_batch(topic.positions[0], acked_but(), now_ms=0)
    assert topic.subscription.unacked_messages == 0


def test_a_batch_that_is_larger_than_the_limit_goes_alone():
    topic = NumberedTopic(max_unacked_messages=3, max_unacked_messages_per_consumer=2)
    topic.publish(2, message_count=5)
    assert topic.dispatch() == [0]
    assert topic.dispatch() == []
    topic.ack(0)
    assert topic.dispatch() == [1]


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


def test_a_seek_brings_delayed_messages_to_wait_again():
    topic = NumberedTopic(tick_time_ms=1)
    topic.publish(deliver_at_ms=50)
    topic.publish()
    assert topic.dispatch() == [1]
    topic.subscription.seek(topic.positions[0], now_ms=0)
    assert topic.dispatch(now_ms=10) == [1]
    assert topic.dispatch(now_ms=50) == [0]
    assert topic.dispatch(now_ms=60) == []


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


def test_a_seek_opens_the_gate_and_frees_the_keys():
    topic = NumberedTopic(SubscriptionType.KEY_SHARED, max_unacked_messages=2)
    topic.publish(3, key=b"b")  # of the two consumers that is b's
    assert topic.dispatch("a") == [0, 1]
    topic.subscription.consumer_opened("b")
    woken = []
    topic.subscription.when_open(lambda: woken.append(1))
    assert topic.dispatch("b") == []
    topic.subscription.seek(topic.positions[1], now_ms=0)
    assert topic.subscription.why_blocked() == ()
    assert woken == [1]
    assert topic.dispatch("a") == []
    assert topic.dispatch("b") == [1, 2]


def test_a_refused_seek_changes_nothing():
    topic = NumberedTopic()
    topic.publish(2)
    topic.dispatch("a", 1)
    topic.subscription.close(now_ms=0)
    with pytest.raises(CursorClosedError):
        topic.subscription.seek(topic.positions[0], now_ms=0)
    assert topic.subscription.unacked_messages == 1


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


@SHARED_TYPES
def test_a_consumer_that_closes_gives_back_the_messages_of_batches_one_by_one(kind):
    topic = NumberedTopic(kind)
    topic.publish(3, message_count=5)
    topic.dispatch("a", 2)
    assert topic.subscription.unacked_messages == 10
    assert topic.subscription.consumer_closed("a") == 10
    assert topic.subscription.unacked_messages == 0
    assert topic.subscription.consumers == ()
    assert topic.dispatch("b") == [0, 1, 2]


def test_a_consumer_closes_twice_or_was_never_there():
    topic = NumberedTopic()
    topic.publish()
    topic.dispatch()
    assert [topic.subscription.consumer_closed(name) for name in ("x", "a", "a")] == [0, 1, 0]


def test_a_consumer_that_comes_back_is_not_blocked_by_what_it_had():
    topic = NumberedTopic(max_unacked_messages_per_consumer=1)
    topic.publish(2)
    topic.dispatch("a")
    assert topic.dispatch("a") == []
    topic.subscription.consumer_closed("a")
    topic.subscription.consumer_opened("a")
    assert topic.dispatch("a") == [0]


def test_an_ack_of_what_the_log_has_not_changes_nothing():
    topic = NumberedTopic()
    topic.publish(1)
    topic.dispatch()
    beyond = topic.positions[0]._replace(entry_id=7)
    with pytest.raises(InvalidPositionError):
        topic.subscription.ack(beyond, now_ms=0)
    assert topic.subscription.unacked_messages == 1


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
