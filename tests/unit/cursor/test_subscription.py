"""What was once wrong with a subscription and its log, on a store in memory; the models have the rest."""

import pytest

from ackstate import LedgerMap, ManagedCursor, MemoryStore, Message, Subscription
from ackstate.stores.memory import Fault, FaultKind, PowerCutError
from ackstate.topic import MessageLog
from topics import NumberedTopic, StoryTopic


def test_a_delivery_carries_its_message():
    topic = NumberedTopic()
    topic.log.publish([Message(b"apples", key=b"k", publish_time_ms=7)])
    (sent,) = topic.subscription.dispatch("c", 1, now_ms=8)
    assert sent.message == Message(b"apples", key=b"k", publish_time_ms=7)


def test_the_log_rolls_and_is_read_over_the_end_of_a_ledger():
    topic = StoryTopic().tell("publish 49; send a -> 0..48; publish 2; publish 1; send a -> 49 50 51")
    assert len({position.ledger_id for position in topic.positions}) == 2  # of 50 entries each


def test_a_restart_redelivers_what_was_acked_and_not_durable():
    topic = NumberedTopic()
    topic.publish(4)
    topic.dispatch()
    topic.ack(1)
    topic.cursor.persist(now_ms=1)
    topic.ack(2)
    assert topic.cursor.redelivery_if_crashed == 1
    store = MemoryStore(topic.log.store.disk)
    log = MessageLog.open(store, topic="t")
    cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
    (after,) = log.publish([Message(b"")])
    assert (after.ledger_id > topic.positions[0].ledger_id, after.entry_id) == (True, 0)
    again = [each.position for each in Subscription(log, cursor).dispatch("a", 9, now_ms=0)]
    assert again == [topic.positions[0], topic.positions[2], topic.positions[3], after]


def test_a_read_that_fails_loses_no_message():
    topic = NumberedTopic()
    topic.publish(3)
    topic.dispatch("a", 1)
    topic.nack(0)
    dead = topic.log.store
    dead.inject(Fault(dead.mutation_count, FaultKind.CRASH_BEFORE))
    with pytest.raises(PowerCutError):
        topic.publish()
    for _ in range(2):
        with pytest.raises(PowerCutError):
            topic.dispatch()
    assert topic.subscription.unacked_messages == 0
    assert topic.cursor.read_position == topic.positions[1]


def test_a_cursor_that_does_not_belong_to_the_log_is_refused():
    store = MemoryStore()
    log, other = (MessageLog.open(store, topic=topic) for topic in ("orders", "refunds"))

    def cursor_of(topic, ledgers):
        return ManagedCursor.open(store, topic=topic, subscription="s", ledgers=ledgers, now_ms=0)

    for ledgers in (log.ledgers, other.ledgers):
        with pytest.raises(ValueError, match="cursor must be of the log's topic 'orders', got one of topic 'refunds'"):
            Subscription(log, cursor_of("refunds", ledgers))
    for ledgers in (LedgerMap.from_counts(log.ledgers.counts()), other.ledgers):
        with pytest.raises(ValueError, match=r"the ledgers of this log of topic 'orders'.*whenever"):
            Subscription(log, cursor_of("orders", ledgers))
    cursor = cursor_of("orders", log.ledgers)
    with pytest.raises(ValueError, match="whenever the log"):
        Subscription(MessageLog.open(store, topic="orders"), cursor)
    with pytest.raises(TypeError, match="cursor must be a ManagedCursor, got a MessageLog"):
        Subscription(cursor, log)
    Subscription(log, cursor)  # Nothing watches it yet.
