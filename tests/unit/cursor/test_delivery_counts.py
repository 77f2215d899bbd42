"""Delivery counts outlive the process, and the explanation of a hole has them; `test_redelivery` has their stories."""

import asyncio
import os
import signal
from functools import partial
from itertools import count

import pytest

from ackstate import AsyncTopics, DeadLetterPolicy, Message, SqliteStore, Start, Topic, TopicSettings
from ackstate.dispatch import RetryPolicy, SubscriptionOptions
from ackstate.stores.memory import Fault, FaultKind
from forked import in_child
from topics import NumberedTopic


def test_an_explanation_has_count_next_time_what_comes_then_and_the_error_of_a_store_that_does_not_take_the_count():
    topic = NumberedTopic(
        options=SubscriptionOptions(dead_letters=DeadLetterPolicy(9, print), retries=RetryPolicy(100, 300, 2, 4))
    )
    topic.publish(2)
    topic.dispatch()
    topic.ack(1)
    topic.nack(0, delay_ms=None)
    topic.cursor.persist(now_ms=0)
    (before,) = topic.subscription.explain_holes(now_ms=0)
    assert (before.delivery_count, before.next_delivery_ms) == (1, 100)
    assert before.detail == "given back by 'a', not to be sent before 100 ms; delivery 1 of 4, then a dead letter"
    topic.restart()
    (after,) = topic.subscription.explain_holes(now_ms=50)
    assert (after.why, after.delivery_count, after.next_delivery_ms) == (before.why, 1, 100)
    assert topic.dispatch(now_ms=100) == [0]
    topic.nack(0)
    for write in range(9):
        topic.log.store.inject(Fault(topic.log.store.mutation_count + write, FaultKind.FULL))
    assert topic.dispatch(now_ms=100) == []
    (waiting,) = topic.subscription.explain_holes(now_ms=100)
    assert (waiting.delivery_count, waiting.next_delivery_ms) == (2, 1_100)
    assert "; not sent again before its deliveries are counted durably, which failed: " in waiting.detail


def dispatch_for_ever(store, settings, sent):
    subscription = Topic.open(store, "t", settings=settings, now_ms=0).subscribe("s", start=Start.EARLIEST, now_ms=0)
    while True:
        (delivery,) = subscription.dispatch("ann", 1, now_ms=0)
        sent()
        subscription.nack(delivery.position, now_ms=0)


def await_for_ever(store, settings, sent):
    async def main():
        async with AsyncTopics(store, settings=settings) as topics:
            subscription = await (await topics.open("t")).subscribe("s", start=Start.EARLIEST)
            while True:
                await subscription.add_permits("ann", 1)
                ((_, (delivery,)),) = (await subscription.next_round()).deliveries
                sent()
                await subscription.nack(delivery.position)

    asyncio.run(main())


@pytest.mark.parametrize("receive", [dispatch_for_ever, await_for_ever])
def test_a_process_that_is_killed_forgets_one_delivery_and_no_more(tmp_path, receive):
    def note(what):
        with (tmp_path / "sent").open("a") as file:
            file.write(what)

    def life(killed_after):
        def dead(_):
            note("dead")
            os._exit(0)

        def sent():
            note("s")
            if next(numbers) == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)

        numbers, options = count(), SubscriptionOptions(dead_letters=DeadLetterPolicy(3, dead))
        receive(SqliteStore(tmp_path / "store"), TopicSettings(options=options), sent)

    def publish():
        Topic.open(SqliteStore(tmp_path / "store"), "t", now_ms=0).publish([Message(b"")], now_ms=0)

    kills = (0, 1, 0, 2, 0)
    assert [in_child(publish), *(in_child(partial(life, each)) for each in (*kills, None))] == ["None", *[""] * 6]
    assert (tmp_path / "sent").read_text() == "s" * (4 + len(kills)) + "dead"
