"""The `Subscription` as a broker uses it: real log, cursor, gate and delay view on a store in memory."""

from __future__ import annotations

import random

import pytest

from ackstate import (
    CursorClosedError,
    CursorConfig,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    StoreError,
    Subscription,
)
from ackstate.delay import TopicDelayIndex
from ackstate.limits import DispatchGate, GateLimits, Rule
from ackstate.message import NO_DELAY
from ackstate.stores.memory import Fault, FaultKind, PowerCutError
from ackstate.topic import MessageLog


class TopicOnStore:
    """One topic with one subscription, on one store."""

    def __init__(self, *, entries_per_ledger_max=100, delayed=True, **limits):
        self.store = MemoryStore()
        self.entries_per_ledger_max = entries_per_ledger_max
        self.limits = GateLimits(**limits)
        self.delayed = delayed
        self.open()

    def open(self):
        self.log = MessageLog.open(self.store, topic="t", entries_per_ledger_max=self.entries_per_ledger_max)
        self.cursor = ManagedCursor.open(
            self.store, topic="t", subscription="s", ledgers=self.log.ledgers, config=CursorConfig(), now_ms=0
        )
        self.gate = DispatchGate(self.limits)
        delays = TopicDelayIndex(tick_time_ms=10).open_view(self.cursor.is_acked) if self.delayed else None
        self.subscription = Subscription(self.log, self.cursor, gate=self.gate, delays=delays)

    def restart(self):
        self.store = MemoryStore(self.store.disk)
        self.open()

    def publish(self, *deliver_at_ms, now_ms=0):
        return self.log.publish(
            [
                Message(b"%d" % number, deliver_at_ms=at, publish_time_ms=now_ms)
                for number, at in enumerate(deliver_at_ms)
            ]
        )

    def dispatch(self, count, *, now_ms=0, consumer="c"):
        return [sent.position for sent in self.subscription.dispatch(consumer, count, now_ms=now_ms)]


def test_messages_go_out_once_and_in_order():
    topic = TopicOnStore()
    positions = topic.publish(*[NO_DELAY] * 5)
    assert topic.dispatch(3) == positions[:3]
    assert topic.dispatch(3) == positions[3:]
    assert topic.dispatch(3) == []
    assert [sent.message.payload for sent in TopicOnStore().subscription.dispatch("c", 1, now_ms=0)] == []


def test_a_delivery_carries_its_message():
    topic = TopicOnStore()
    topic.publish(NO_DELAY, now_ms=7)
    (sent,) = topic.subscription.dispatch("c", 1, now_ms=8)
    assert sent.message == Message(b"0", publish_time_ms=7)


def test_the_log_rolls_and_is_read_over_the_end_of_a_ledger():
    topic = TopicOnStore(entries_per_ledger_max=4)
    positions = [*topic.publish(*[NO_DELAY] * 3), *topic.publish(*[NO_DELAY] * 3), *topic.publish(NO_DELAY)]
    assert len({position.ledger_id for position in positions}) == 2
    assert topic.dispatch(10) == positions


def test_a_reader_at_the_end_of_a_ledger_goes_on_in_the_next():
    topic = TopicOnStore(entries_per_ledger_max=3)
    first = topic.publish(NO_DELAY, NO_DELAY)
    assert topic.dispatch(10) == first
    second = topic.publish(NO_DELAY, NO_DELAY)
    assert topic.dispatch(10) == second


def test_nacked_messages_come_again_lowest_first():
    topic = TopicOnStore()
    positions = topic.publish(*[NO_DELAY] * 4)
    topic.dispatch(3)
    topic.subscription.nack(positions[2])
    topic.subscription.nack(positions[0])
    topic.subscription.nack(positions[0])
    topic.subscription.nack(positions[3])  # never sent: left alone
    assert topic.dispatch(9) == [positions[0], positions[2], positions[3]]


def test_a_closed_consumer_gives_back_what_it_did_not_ack():
    topic = TopicOnStore()
    positions = topic.publish(*[NO_DELAY] * 4)
    topic.dispatch(2, consumer="a")
    topic.dispatch(2, consumer="b")
    topic.subscription.ack(positions[0], now_ms=1)
    assert topic.subscription.consumer_closed("a") == 1
    assert topic.subscription.consumer_closed("a") == 0
    assert topic.dispatch(9, consumer="b") == [positions[1]]
    assert topic.subscription.unacked_messages == 3


def test_an_ack_of_a_returned_message_keeps_it_from_coming_again():
    topic = TopicOnStore()
    positions = topic.publish(*[NO_DELAY] * 2)
    topic.dispatch(2)
    topic.subscription.nack(positions[0])
    topic.subscription.ack(positions[0], now_ms=1)
    assert topic.dispatch(9) == []


def test_a_cumulative_ack_settles_everything_below():
    topic = TopicOnStore()
    positions = topic.publish(*[NO_DELAY] * 4)
    topic.dispatch(4)
    topic.subscription.ack_cumulative(positions[2], now_ms=1)
    assert topic.subscription.unacked_messages == 1
    assert topic.cursor.mark_delete_position == positions[2]


def test_a_delayed_message_waits_and_holds_nothing_up():
    topic = TopicOnStore()
    positions = topic.publish(NO_DELAY, 100, NO_DELAY)
    assert topic.dispatch(9, now_ms=0) == [positions[0], positions[2]]
    assert topic.dispatch(9, now_ms=99) == []
    assert topic.dispatch(9, now_ms=100) == [positions[1]]
    assert topic.dispatch(9, now_ms=500) == []


def test_a_delayed_message_takes_no_reservation():
    topic = TopicOnStore(max_unacked_messages=2)
    topic.publish(100, 100, 100, NO_DELAY)
    assert len(topic.dispatch(9, now_ms=0)) == 1
    assert topic.subscription.unacked_messages == 1


def test_without_a_delay_view_every_message_goes_at_once():
    topic = TopicOnStore(delayed=False)
    positions = topic.publish(NO_DELAY, 100)
    assert topic.dispatch(9, now_ms=0) == positions


def test_a_delayed_message_survives_a_restart():
    topic = TopicOnStore()
    positions = topic.publish(NO_DELAY, 100)
    topic.dispatch(9, now_ms=0)
    topic.subscription.ack(positions[0], now_ms=1)
    topic.cursor.persist(now_ms=1)
    topic.restart()
    assert topic.dispatch(9, now_ms=50) == []
    assert topic.dispatch(9, now_ms=100) == [positions[1]]


def test_a_restart_redelivers_what_was_acked_and_not_durable():
    topic = TopicOnStore()
    positions = topic.publish(*[NO_DELAY] * 4)
    topic.dispatch(4)
    topic.subscription.ack(positions[1], now_ms=1)
    topic.cursor.persist(now_ms=1)
    topic.subscription.ack(positions[2], now_ms=2)
    assert topic.cursor.redelivery_if_crashed == 1
    topic.restart()
    assert topic.dispatch(9) == [positions[0], positions[2], positions[3]]


def test_unacked_messages_block_and_release_at_half():
    topic = TopicOnStore(max_unacked_messages=4)
    positions = topic.publish(*[NO_DELAY] * 9)
    assert topic.dispatch(9) == positions[:4]
    assert topic.dispatch(9) == []
    (verdict,) = topic.subscription.why_blocked()
    assert (verdict.rule, verdict.used, verdict.limit) == (Rule.UNACKED_MESSAGES, 4, 4)
    topic.subscription.ack(positions[0], now_ms=1)
    assert topic.dispatch(9) == []
    for position in positions[1:4]:
        topic.subscription.ack(position, now_ms=1)
    assert topic.subscription.why_blocked() == ()
    assert topic.dispatch(4) == positions[4:8]
    assert topic.subscription.why_blocked() == ()


def test_unpersisted_acks_block_until_they_are_durable():
    topic = TopicOnStore(max_unpersisted_ack_record_bytes=1_024)
    topic.publish(*[NO_DELAY] * 400)
    sent = 0
    while batch := topic.dispatch(16):
        for position in batch[::2]:
            topic.subscription.ack(position, now_ms=1)
        sent += len(batch)
    assert sent < 400
    (verdict,) = topic.subscription.why_blocked()
    assert verdict.rule is Rule.UNPERSISTED_ACK_RECORD_BYTES
    topic.cursor.persist(now_ms=2)
    topic.subscription.consumer_closed("c")
    topic.subscription.consumer_opened("c")
    assert topic.dispatch(400)


def test_a_mark_delete_position_before_the_first_entry_is_no_end_of_a_hole():
    """A skip of nothing while holes are filled: the next dispatch failed with an `OverflowError`."""
    topic = TopicOnStore(max_unpersisted_ack_record_bytes=1_024)
    topic.publish(*[NO_DELAY] * 200)
    sent = topic.dispatch(200)
    for position in sent[1::2]:
        topic.subscription.ack(position, now_ms=1)
    assert topic.cursor.mark_delete_position.entry_id == -1
    assert topic.subscription.why_blocked()
    for position in sent[:8:2]:
        topic.subscription.nack(position, now_ms=2)
    assert topic.dispatch(2, now_ms=3) == [sent[0], sent[2]]
    assert topic.subscription.skip(0, now_ms=4).newly_acked == 0
    assert topic.dispatch(2, now_ms=5) == [sent[4], sent[6]]


def test_what_was_acked_past_the_subscription_keeps_no_delayed_message_back():
    """Waiting messages go before those that fall due: messages without a receiver took the place of these."""
    topic = TopicOnStore()
    sent = topic.publish(*[NO_DELAY] * 5)
    due = topic.publish(*[100] * 5)
    assert topic.dispatch(5) == sent
    assert topic.dispatch(5) == []
    for position in sent:
        topic.subscription.nack(position, now_ms=1)
    topic.cursor.ack_many(sent[1:4], now_ms=2)
    assert topic.dispatch(5, now_ms=200) == [sent[0], sent[4], *due[:3]]


def test_a_hole_that_was_divided_past_the_subscription_is_filled_on_both_sides():
    """Its upper part was looked for no more, and a gate shut by the number of ranges stayed shut for good."""
    topic = TopicOnStore(max_unacked_ranges=3)
    positions = topic.publish(*[NO_DELAY] * 12)
    topic.cursor.ack_many(positions[7:12:2], now_ms=0)
    assert topic.dispatch(1) == [positions[0]]
    topic.cursor.ack_many(positions[2:4], now_ms=0)
    sent = [position for _ in range(3) for position in topic.dispatch(12)]
    assert sorted(sent) == [positions[number] for number in (1, 4, 6, 8, 10)]  # 5 would divide it again.


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 20))])
def test_the_byte_limit_is_never_passed_whatever_the_order(seed):
    chance = random.Random(seed)
    limit = 2_048
    topic = TopicOnStore(max_unpersisted_ack_record_bytes=limit, entries_per_ledger_max=150)
    in_flight, acked, blocked = [], set(), 0
    for now_ms in range(600):
        topic.publish(*[chance.choice((NO_DELAY, NO_DELAY, now_ms + 30)) for _ in range(4)], now_ms=now_ms)
        in_flight += topic.dispatch(chance.randrange(12), now_ms=now_ms)
        blocked += bool(topic.subscription.why_blocked())
        chance.shuffle(in_flight)
        for _ in range(min(len(in_flight), chance.randrange(8))):
            position = in_flight.pop()
            if chance.random() < 0.1:
                topic.subscription.nack(position)
            else:
                topic.subscription.ack(position, now_ms=now_ms)
                acked.add(position)
            assert topic.cursor.view.unpersisted_record_bytes <= limit
        if chance.random() < 0.03:
            topic.cursor.persist(now_ms=now_ms)
        if chance.random() < 0.01:
            topic.restart()
            in_flight, acked = [], {position for position in acked if topic.cursor.is_acked(position)}
        usage = topic.subscription.usage()
        assert usage.unpersisted_record_bytes + usage.reserved_bytes <= limit
        assert len(set(in_flight)) == len(in_flight) == topic.subscription.unacked_messages
    assert blocked, "the limit was never reached, so nothing was tested"
    for now_ms in range(10_000, 40_000, 5):
        for position in in_flight:
            topic.subscription.ack(position, now_ms=now_ms)
        topic.cursor.persist(now_ms=now_ms)
        in_flight = topic.dispatch(20, now_ms=now_ms)
        if not in_flight:
            break
    assert topic.cursor.backlog == 0, "dispatch got stuck"


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FULL])
def test_a_failed_publish_leaves_the_log_as_it_was(kind):
    topic = TopicOnStore()
    first = topic.publish(NO_DELAY)
    topic.store.inject(Fault(topic.store.mutation_count, kind))
    with pytest.raises(StoreError):
        topic.publish(NO_DELAY)
    assert topic.log.ledgers.last_confirmed == first[0]
    second = topic.publish(NO_DELAY)
    assert topic.dispatch(9) == [*first, *second]


def test_a_publish_of_unknown_outcome_is_not_taken_for_another_message():
    topic = TopicOnStore()
    topic.publish(NO_DELAY)
    topic.store.inject(Fault(topic.store.mutation_count, FaultKind.FAIL_AFTER))
    with pytest.raises(StoreError):
        topic.log.publish([Message(b"unknown")])
    (position,) = topic.log.publish([Message(b"known")])
    assert next(topic.log.read([position])).payload == b"known"


def test_a_read_that_fails_loses_no_message():
    topic = TopicOnStore()
    positions = topic.publish(*[NO_DELAY] * 3)
    topic.dispatch(1)
    topic.subscription.nack(positions[0])
    dead = topic.store
    dead.inject(Fault(dead.mutation_count, FaultKind.CRASH_BEFORE))
    with pytest.raises(PowerCutError):
        topic.publish(NO_DELAY)
    for _ in range(2):
        with pytest.raises(PowerCutError):
            topic.dispatch(9)
    assert topic.subscription.unacked_messages == 0
    assert topic.cursor.read_position == positions[1]


def test_a_reopened_log_begins_a_new_ledger():
    topic = TopicOnStore()
    before = topic.publish(NO_DELAY)
    topic.restart()
    after = topic.publish(NO_DELAY)
    assert after[0] == Position(after[0].ledger_id, 0)
    assert after[0].ledger_id > before[0].ledger_id
    assert topic.dispatch(9) == [*before, *after]


def test_closing_persists_and_lets_go_of_the_delay_view():
    topic = TopicOnStore()
    (position,) = topic.publish(NO_DELAY)
    topic.dispatch(1)
    topic.subscription.ack(position, now_ms=1)
    assert topic.subscription.close(now_ms=1).messages_covered == 1
    assert topic.subscription.close(now_ms=1) is None
    with pytest.raises(CursorClosedError):
        topic.dispatch(1)
    with pytest.raises(ValueError, match="closed"):
        topic.subscription._messages.delayed._tracker.scheduled_messages(1, now_ms=2)


def test_positions_that_the_log_has_not_are_not_read():
    topic = TopicOnStore()
    (position,) = topic.publish(NO_DELAY)
    with pytest.raises(StoreError):
        list(topic.log.read([Position(position.ledger_id, 1)]))


def test_a_cursor_that_does_not_belong_to_the_log_is_refused():
    store = MemoryStore()
    log, other = (MessageLog.open(store, topic=topic) for topic in ("orders", "refunds"))

    def cursor_of(topic, ledgers):
        return ManagedCursor.open(store, topic=topic, subscription="s", ledgers=ledgers, now_ms=0)

    with pytest.raises(ValueError, match="cursor must be of the log's topic 'orders', got one of topic 'refunds'"):
        Subscription(log, cursor_of("refunds", log.ledgers))
    with pytest.raises(ValueError, match="cursor must be of the log's topic 'orders', got one of topic 'refunds'"):
        Subscription(log, cursor_of("refunds", other.ledgers))
    for ledgers in (LedgerMap.from_counts(log.ledgers.counts()), other.ledgers):
        with pytest.raises(ValueError, match=r"opened with the ledgers of this log of topic 'orders'.*=log\.ledgers"):
            Subscription(log, cursor_of("orders", ledgers))
    cursor = cursor_of("orders", log.ledgers)
    with pytest.raises(TypeError, match="cursor must be a ManagedCursor, got a MessageLog"):
        Subscription(cursor, log)
    Subscription(log, cursor)  # Nothing watches it yet.


def test_a_cursor_is_opened_again_with_its_log():
    store = MemoryStore()
    log = MessageLog.open(store, topic="t")
    cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
    with pytest.raises(ValueError, match="open the cursor again whenever the log is"):
        Subscription(MessageLog.open(store, topic="t"), cursor)
