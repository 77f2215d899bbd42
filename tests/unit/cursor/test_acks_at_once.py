"""`ack_many` and `nack_many` of a subscription: a list has the effect of single calls, all of it or nothing."""

import random

import numpy as np
import pytest

from ackstate import InvalidPositionError, Position
from topics import NumberedTopic


def dispatched(seed=None):
    """A topic of 60 entries, some of them batches, of which 50 were sent, and 6 of these given back."""
    topic, draw = NumberedTopic(), random.Random(seed)
    for _ in range(60):
        topic.publish(message_count=draw.choice((1, 1, 3)) if seed is not None else 1)
    topic.dispatch("a", 30)
    topic.dispatch("b", 20)
    topic.subscription.nack_many(topic.positions[3:9], now_ms=0)
    return topic


def state(topic):
    """Return everything that acks change."""
    subscription, cursor = topic.subscription, topic.cursor
    subscription.check_invariants()
    held = [subscription.in_flight(each) for each in subscription.consumers]
    usage, sent = subscription.usage(), topic.dispatch("another", 10)
    return str(cursor.deleted), cursor.mark_delete_position, usage, held, cursor.view.acked_count, sent


@pytest.mark.parametrize("seed", range(20))
def test_a_list_leaves_what_single_acks_leave(seed):
    draw, one, many = random.Random(seed), dispatched(seed), dispatched(seed)
    sent = [*one.subscription.in_flight("a"), *one.subscription.in_flight("b")]
    chosen = [*draw.sample(sent, 25), one.positions[4], one.positions[7]]
    chosen += draw.sample(chosen, 3)
    for position in chosen:
        one.subscription.ack(position, now_ms=0)
    receipt = many.subscription.ack_many(chosen, now_ms=0)
    assert receipt.newly_acked == len(set(chosen))
    assert not many.cursor.durable(receipt)
    many.cursor.persist(now_ms=0)
    one.cursor.persist(now_ms=0)
    assert many.cursor.durable(receipt)
    assert state(many) == state(one)


@pytest.mark.parametrize(
    ("positions", "error", "saying"),
    [
        (Position(1, 13), TypeError, "positions must be a list of Position, got Position"),
        ("13", TypeError, "positions must be a list of Position, got '13'"),
        ([Position(1, 13), (1, 4, 5)], TypeError, "position must be a Position, got "),
        ([Position(1, 13), Position(1, 4.0)], TypeError, "ids of a position must be integers"),
        ([Position(1, 13), None], TypeError, "position must be a Position, got None"),
        (np.array([1.0, 3.0]), TypeError, "position|integers"),
        (np.array([[1.0, 3.0]]), TypeError, "must be integers"),
        ([Position(1, 13), Position(9, 0)], InvalidPositionError, "9:0"),
    ],
)
def test_what_is_no_list_of_positions_is_refused_and_nothing_is_acked(positions, error, saying):
    topic = dispatched()
    for call in (topic.subscription.ack_many, topic.subscription.nack_many):
        if call == topic.subscription.ack_many or error is TypeError:
            with pytest.raises(error, match=saying):
                call(positions, now_ms=0)
    assert (topic.subscription.unacked_messages, topic.cursor.view.acked_count) == (44, 0)


def test_neighbours_of_which_none_was_sent_take_the_room_of_one_range():
    topic = NumberedTopic(max_unacked_ranges=2)
    topic.publish(9)
    assert topic.subscription.ack_many(topic.positions[1:6], now_ms=0).newly_acked == 5


@pytest.mark.parametrize(
    "array", [np.array([1, 3]), np.array([[1, 3, 4]]), np.array([["1", "3"]]), np.zeros((1, 2, 2))]
)
def test_the_cursor_refuses_other_arrays(array):
    topic = dispatched()
    with pytest.raises(TypeError, match=r"position|integers"):
        topic.cursor.ack_many(array, now_ms=0)
    for rows in ([[-1, 3]], [[1, -3]], [[1, 2**32]]):
        with pytest.raises(ValueError, match=r"must be in 0\.\."):
            topic.cursor.ack_many(np.array(rows), now_ms=0)
    assert topic.cursor.ack_many(np.zeros((0, 2), np.int64), now_ms=0).newly_acked == 0
    assert topic.cursor.ack_many(np.array([[1, 3], [1, 4], [1, 3]]), now_ms=0).newly_acked == 2
    assert topic.cursor.is_acked(Position(1, 3))
