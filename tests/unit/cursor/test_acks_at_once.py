"""`ack_many` and `nack_many` of a subscription: a list has the effect of single calls, all of it or nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ackstate import (
    AckRefusedError,
    CursorConfig,
    InvalidPositionError,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    StoreError,
    Subscription,
    SubscriptionType,
)
from ackstate.limits import DispatchGate, GateLimits
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import MessageLog


class TopicWithSmallLimits:
    """A topic with one subscription, whose limits are small."""

    def __init__(self, kind=SubscriptionType.SHARED, *, message_counts=(1,) * 60, **limits):
        self.store = MemoryStore()
        self.log = MessageLog.open(self.store, topic="t", entries_per_ledger_max=25)
        self.cursor = ManagedCursor.open(
            self.store, topic="t", subscription="s", ledgers=self.log.ledgers, config=CursorConfig(), now_ms=0
        )
        gate = None if kind.is_single_active else DispatchGate(GateLimits(**limits))
        self.subscription = Subscription(self.log, self.cursor, gate=gate, kind=kind)
        for count in message_counts:
            self.log.publish([Message(b"x", message_count=count)])

    def dispatch(self, count, consumer="c"):
        return [sent.position for sent in self.subscription.dispatch(consumer, count, now_ms=0)]

    def state(self):
        """Return everything that acks change."""
        subscription = self.subscription
        subscription.check_invariants()
        return (
            str(self.cursor.deleted), self.cursor.mark_delete_position, subscription.usage(),
            [subscription.in_flight(each) for each in subscription.consumers],
            self.cursor.view.acked_count, self.dispatch(10, "another"),
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_a_list_leaves_what_single_acks_leave(seed):
    draw = random.Random(seed)
    counts = [draw.choice((1, 1, 3)) for _ in range(60)]
    one, many = TopicWithSmallLimits(message_counts=counts), TopicWithSmallLimits(message_counts=counts)
    for topic in (one, many):
        topic.dispatch(30, "a")
        topic.dispatch(20, "b")
        topic.subscription.nack_many([Position(1, entry) for entry in range(3, 9)], now_ms=0)
    positions = [*one.subscription.in_flight("a"), *one.subscription.in_flight("b")]
    chosen = [*draw.sample(positions, 25), Position(1, 4), Position(1, 7)]
    chosen += draw.sample(chosen, 3)
    for position in chosen:
        one.subscription.ack(position, now_ms=0)
    receipt = many.subscription.ack_many(chosen, now_ms=0)
    assert receipt.newly_acked == len(set(chosen))
    assert not many.cursor.durable(receipt)
    many.cursor.persist(now_ms=0)
    one.cursor.persist(now_ms=0)
    assert many.cursor.durable(receipt)
    assert many.state() == one.state()


def test_an_array_of_positions_is_a_list():
    topic = TopicWithSmallLimits()
    positions = topic.dispatch(30)
    topic.subscription.ack_many(np.array(positions[::2], np.uint64), now_ms=0)
    assert topic.subscription.in_flight("c") == positions[1::2]
    topic.cursor.ack_many(np.array(positions), now_ms=0)
    assert topic.cursor.mark_delete_position == positions[-1]


@pytest.mark.parametrize(
    ("positions", "error"),
    [
        (Position(1, 3), "positions must be a list of Position, got Position"),
        ("13", "positions must be a list of Position, got '13'"),
        ([Position(1, 3), (1, 4, 5)], "position must be a Position, got "),
        ([Position(1, 3), Position(1, 4.0)], "ids of a position must be integers"),
        ([Position(1, 3), None], "position must be a Position, got None"),
        (np.array([1.0, 3.0]), "position|integers"),
        (np.array([[1.0, 3.0]]), "must be integers"),
    ],
)
def test_what_is_no_list_of_positions_is_refused_and_nothing_is_acked(positions, error):
    topic = TopicWithSmallLimits()
    topic.dispatch(30)
    for call in (topic.subscription.ack_many, topic.subscription.nack_many):
        with pytest.raises(TypeError, match=error):
            call(positions, now_ms=0)
    assert topic.subscription.unacked_messages == 30
    assert topic.cursor.view.acked_count == 0


@pytest.mark.parametrize(
    "array", [np.array([1, 3]), np.array([[1, 3, 4]]), np.array([["1", "3"]]), np.zeros((1, 2, 2))]
)
def test_the_cursor_refuses_other_arrays(array):
    topic = TopicWithSmallLimits()
    with pytest.raises(TypeError, match=r"array of integers of shape \(entries, 2\), got"):
        topic.cursor.ack_many(array, now_ms=0)
    for rows in ([[-1, 3]], [[1, -3]], [[1, 2**32]]):
        with pytest.raises(ValueError, match=r"must be in 0\.\."):
            topic.cursor.ack_many(np.array(rows), now_ms=0)
    assert topic.cursor.ack_many(np.zeros((0, 2), np.int64), now_ms=0).newly_acked == 0
    assert topic.cursor.ack_many(np.array([[3, 3], [1, 4], [3, 3]]), now_ms=0).newly_acked == 2
    assert topic.cursor.is_acked(Position(3, 3))


def test_a_position_that_the_log_does_not_have_refuses_the_list():
    topic = TopicWithSmallLimits()
    positions = topic.dispatch(30)
    for beyond in (Position(1, 25), Position(9, 0)):
        with pytest.raises(InvalidPositionError):
            topic.subscription.ack_many([*positions, beyond], now_ms=0)
    assert topic.subscription.unacked_messages == 30
    assert topic.cursor.view.acked_count == 0


def test_late_acks_that_pass_a_limit_are_refused_together():
    topic = TopicWithSmallLimits(max_unacked_ranges=4)
    early = topic.dispatch(3)
    topic.subscription.nack_many(early, delay_ms=1_000, now_ms=0)
    held = topic.dispatch(10)
    assert len(held) == 4
    before = topic.subscription.usage()
    with pytest.raises(AckRefusedError, match=r"the ack of 1:5 and 1 others, and it would pass .*Ranges"):
        topic.subscription.ack_many([held[2], early[1]], now_ms=0)
    assert topic.subscription.usage() == before
    assert topic.cursor.view.acked_count == 0
    # The same two entries and those between fill no range of their own.
    assert topic.subscription.ack_many([*early, *held], now_ms=0).newly_acked == 7
    assert topic.cursor.mark_delete_position == held[-1]
    topic.subscription.check_invariants()


def test_acks_that_fill_holes_are_accepted_at_a_full_limit():
    """One after the other or together: else the gate would never open again."""
    topic = TopicWithSmallLimits(max_unacked_ranges=4)
    positions = topic.dispatch(30)
    while positions:
        topic.subscription.ack_many(positions[1::2], now_ms=0)
        kept = positions[::2]
        topic.subscription.nack_many(kept, now_ms=0)
        again = topic.dispatch(30)
        assert set(kept) & set(again)
        topic.subscription.ack_many(again, now_ms=0)
        positions = topic.dispatch(30)
    assert topic.cursor.mark_delete_position == topic.log.ledgers.last_confirmed


def test_a_failing_store_is_the_cause_of_a_refusal():
    topic = TopicWithSmallLimits(message_counts=(1,) * 200, max_unpersisted_ack_record_bytes=1_024)
    early = topic.dispatch(20)
    topic.subscription.nack_many(early, delay_ms=1_000, now_ms=0)
    while held := topic.dispatch(20):
        topic.subscription.ack_many(held[:1], now_ms=0)
    for mutation in range(topic.store.mutation_count, topic.store.mutation_count + 8):
        topic.store.inject(Fault(mutation, FaultKind.FULL))
    before = topic.subscription.usage()
    with pytest.raises(AckRefusedError, match="maxUnPersistAckRecordsBytes") as refused:
        topic.subscription.ack_many(early[1::2], now_ms=0)
    assert isinstance(refused.value.__cause__, StoreError)
    assert topic.subscription.usage() == before


def test_a_list_is_given_back_and_sent_again():
    topic = TopicWithSmallLimits(message_counts=(1, 3, 1, 2))
    positions = topic.dispatch(10)
    assert topic.subscription.nack_many([positions[1], positions[3], Position(7, 7)], now_ms=0) == 5
    assert topic.subscription.in_flight("c") == [positions[0], positions[2]]
    assert topic.dispatch(10) == [positions[1], positions[3]]
    assert topic.subscription.nack_many([], now_ms=0) == 0


def test_failover_gives_back_all_that_follow_the_lowest():
    topic = TopicWithSmallLimits(SubscriptionType.FAILOVER)
    positions = topic.dispatch(10)
    topic.subscription.ack(positions[2], now_ms=0)
    assert topic.subscription.nack_many([positions[8], positions[5], Position(9, 9)], now_ms=0) == 5
    assert topic.dispatch(10)[:5] == positions[5:]
