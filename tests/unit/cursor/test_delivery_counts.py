"""Delivery counts and waits survive a restart: in the journal, within its limits, until the message is acked."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from itertools import count

import pytest

from ackstate import (
    AsyncTopics,
    CursorConfig,
    DeadLetterPolicy,
    Format,
    MemoryStore,
    Message,
    Position,
    SqliteStore,
    Start,
    SubscriptionType,
    Topic,
    TopicSettings,
)
from ackstate.cursor import journal
from ackstate.cursor.recovery import Recovery
from ackstate.dispatch import RetryPolicy, SubscriptionOptions
from ackstate.stores.memory import Fault, FaultKind
from forked import in_child


class Restarted:
    """A subscription `s` that can crash or be closed; every message that it sends is given back."""

    def __init__(self, *, kind=SubscriptionType.SHARED, retries=None, dead_after=None, **config):
        self.dead = []
        dead_letters = None if dead_after is None else DeadLetterPolicy(dead_after - 1, self.dead.append)
        options = SubscriptionOptions(dead_letters=dead_letters, retries=retries)
        self.settings = TopicSettings(cursor=CursorConfig(**config), options=options)
        self.kind, self.store = kind, MemoryStore()
        self.open()

    def open(self):
        self.topic = Topic.open(self.store, "t", settings=self.settings, now_ms=0)
        self.subscription = self.topic.subscribe("s", kind=self.kind, start=Start.EARLIEST, now_ms=0)

    def publish(self, count, **fields):
        return self.topic.publish([Message(b"", **fields)] * count, now_ms=0)

    def sent(self, now_ms=0, *, count=100):
        """Return the redelivery counts of what is sent now, by entry, in the order of sending."""
        sent = self.subscription.dispatch("ann", count, now_ms=now_ms)
        return {each.position.entry_id: each.redelivery_count for each in sent}

    def nack(self, positions, now_ms=0, **delay):
        return self.subscription.nack_many(positions, now_ms=now_ms, **delay)

    def persist(self):
        return self.subscription.cursor.persist(now_ms=0)

    def crash(self):
        self.store = MemoryStore(self.store.disk)
        self.open()

    def stored(self):
        path = journal.cursor_path("t", "s")
        found = Recovery(self.store, path, self.topic.log.ledgers).find(())
        return {position.entry_id: count for position, count in found.recovered.content.counts.items()}


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED, SubscriptionType.FAILOVER])
def test_a_crash_forgets_the_last_delivery_alone_and_a_close_none(kind):
    broker = Restarted(kind=kind, dead_after=4)
    positions = broker.publish(1, key=b"k")
    for expected in (0, 1, 2):
        assert broker.sent() == {0: expected}
        broker.nack(positions)
    broker.crash()
    assert broker.sent() == {0: 2}
    broker.subscription.consumer_closed("ann", now_ms=0)
    broker.subscription.consumer_opened("ann")
    assert broker.sent() == {0: 3}
    broker.crash()
    assert broker.sent() == {0: 3}
    broker.topic.close(now_ms=0)  # in flight for the fourth time
    broker.open()
    assert (broker.sent(), len(broker.dead), broker.stored()) == ({}, 1, {0: (4, 0)})
    broker.persist()
    assert broker.stored() == {}


@pytest.mark.parametrize(("dead_after", "writes"), [(None, 0), (9, 1)])
def test_the_redeliveries_of_a_round_share_one_write_and_first_deliveries_need_none(dead_after, writes):
    broker, positions = given_back(count=50, dead_after=dead_after)
    broker.publish(50)
    assert broker.sent() == dict.fromkeys(range(50), 1) | dict.fromkeys(range(50, 100), 0)
    broker.nack(positions[:9], delay_ms=5)
    assert (broker.sent(), broker.subscription.cursor.stats().persist_count) == ({}, 1 + writes)


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.FAILOVER])
def test_messages_wait_for_a_store_that_does_not_take_their_counts_and_others_do_not(kind):
    broker, positions = given_back(count=2, kind=kind, dead_after=3)
    broker.persist()
    assert broker.sent(count=1) == {0: 1}
    broker.nack(positions[:1])
    broker.subscription.ack(broker.publish(2)[1], now_ms=0)
    for number in range(6):
        broker.store.inject(Fault(broker.store.mutation_count + number, FaultKind.FULL))
    others = {1: 1, 2: 0}
    assert broker.sent() == ({} if kind.is_single_active else others)
    assert "not sent again before its deliveries are counted" in broker.subscription.explain_holes(now_ms=0)[0].detail
    assert broker.sent(999) == {}
    assert broker.subscription.next_wake_ms == 1_000
    broker.store.forget_faults()
    assert broker.sent(1_000) == {0: 2} | (others if kind.is_single_active else {})


def test_a_close_counts_first_deliveries_in_flight():
    broker = Restarted(dead_after=2)
    broker.publish(1)
    for expected in (0, 1):
        assert broker.sent() == {0: expected}
        broker.subscription.close(now_ms=0)
        broker.open()
    assert (broker.sent(), len(broker.dead)) == ({}, 1)


def test_a_wait_is_neither_forgotten_nor_repeated_by_a_restart():
    broker = Restarted(retries=RetryPolicy(100, 300, 2, 4), dead_after=9)
    positions = broker.publish(2)[:1]
    broker.subscription.ack(Position(1, 1), now_ms=0)
    now_ms = 0
    for number, wait_ms in enumerate((100, 200, 300)):
        assert broker.sent(now_ms) == {0: number}
        broker.nack(positions, now_ms=now_ms)
        (hole,) = broker.subscription.explain_holes(now_ms=now_ms)
        assert (hole.delivery_count, hole.next_delivery_ms) == (number + 1, now_ms + wait_ms)
        broker.persist()
        broker.crash()
        now_ms += wait_ms
        (again,) = broker.subscription.explain_holes(now_ms=now_ms - 1)
        assert (again.delivery_count, again.next_delivery_ms, again.why) == (number + 1, now_ms, hole.why)
        assert again.detail.endswith(f"; delivery {number + 1} of 4, then a dead letter")
        assert broker.sent(now_ms - 1) == {}
        assert broker.subscription.next_wake_ms == now_ms
    assert broker.sent(now_ms) == {0: 3}
    broker.nack(positions, now_ms=now_ms)  # The last delivery: nothing to wait for.
    assert (broker.sent(now_ms), len(broker.dead)) == ({}, 1)


def test_a_delay_of_its_own_takes_the_place_of_the_policy():
    broker = Restarted(retries=RetryPolicy(100, 300))
    positions = broker.publish(1)
    broker.sent()
    broker.nack(positions, delay_ms=0)
    assert broker.sent() == {0: 1}
    broker.nack(positions, delay_ms=5)
    assert broker.sent(5) == {0: 2}


def test_a_failover_consumer_receives_them_in_order_after_a_restart_and_nothing_passes_one_that_waits():
    broker = Restarted(kind=SubscriptionType.FAILOVER, retries=RetryPolicy(100, 100))
    positions = broker.publish(5)
    broker.sent(count=4)
    broker.nack(positions[2:], now_ms=0)
    broker.persist()
    broker.crash()
    assert broker.sent() == {0: 0, 1: 0}
    assert broker.sent(99) == {}
    sent = broker.sent(100)
    assert (list(sent), sent) == ([2, 3, 4], {2: 1, 3: 1, 4: 0})


def test_messages_of_a_key_stay_in_order_after_a_restart():
    broker = Restarted(kind=SubscriptionType.KEY_SHARED)
    positions = broker.publish(4, key=b"k")
    broker.sent(count=3)
    broker.nack(positions[1:2], delay_ms=50)
    broker.persist()
    broker.crash()
    assert list(broker.sent(49)) == [0]
    assert list(broker.sent(50)) == [1, 2, 3]


def given_back(*, times=1, count=3, **settings):
    broker = Restarted(**settings)
    positions = broker.publish(count)
    for _ in range(times):
        broker.sent()
        broker.nack(positions)
    return broker, positions


def test_acks_skips_resets_and_deletions_end_a_count():
    for ends in (
        lambda broker: broker.subscription.ack_many([Position(1, number) for number in range(3)], now_ms=0),
        lambda broker: broker.subscription.skip(3, now_ms=0),
        lambda broker: broker.subscription.clear_backlog(now_ms=0),
        lambda broker: broker.subscription.seek(Start.EARLIEST, now_ms=0),
        lambda broker: broker.topic.unsubscribe("s", now_ms=0) and broker.open(),
    ):
        broker, _ = given_back()
        broker.persist()
        assert broker.stored() == dict.fromkeys(range(3), (1, 0))
        ends(broker)
        broker.persist()
        assert broker.stored() == {}
        assert not broker.subscription.cursor.view.delivery_counts
        broker.subscription.seek(Start.EARLIEST, now_ms=0)
        assert broker.sent() == dict.fromkeys(range(3), 0)


@pytest.mark.parametrize("entry_count_max", [1, 1_000])
def test_the_counts_are_those_of_all_records_in_however_many_ledgers(entry_count_max):
    broker, positions = given_back(count=50, ledger_entry_count_max=entry_count_max)
    for number, position in enumerate(positions[:48]):
        broker.sent()
        broker.nack(positions[48:49], delay_ms=0)
        if number % 2:
            broker.subscription.ack(position, now_ms=0)
        broker.persist()
    assert broker.stored()[48] == (49, 0)
    assert broker.stored().keys() == {*range(0, 48, 2), 48, 49}


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


def test_what_a_limit_has_no_room_for_is_left_out_the_least_delivered_first_and_announced(caplog):
    broker, positions = given_back(count=6, range_count_max=3, dead_after=9)
    assert broker.sent() == dict.fromkeys(range(6), 1)  # Those that are left out do not wait.
    broker.nack(positions[2:4])
    result = broker.persist()
    assert (result.counts_cut, broker.stored()) == (3, {0: (2, 0), 1: (2, 0), 2: (2, 0)})
    assert "3 delivery counts out of the durable state" in caplog.text
    broker.subscription.ack_many([positions[3], positions[5]], now_ms=0)  # Two ranges leave room for one count.
    assert (broker.persist().counts_cut, broker.stored()) == (3, {0: (2, 0)})
    assert broker.sent() == {2: 2}  # The broker itself knows them.


def test_a_metadata_record_keeps_the_counts_that_it_has_room_for():
    broker, _ = given_back(count=64, metadata_bytes_max=250)
    broker.store.break_ledgers()
    result = broker.persist()
    assert result.bytes_written <= 250
    assert (result.counts_cut, len(broker.stored())) == (56, 8)


def test_in_pulsars_format_counts_are_not_kept_and_nothing_waits_for_them():
    broker, _ = given_back(times=2, format=Format.PULSAR, dead_after=3)
    assert broker.persist().bytes_written == 0
    broker.crash()
    assert broker.sent() == dict.fromkeys(range(3), 0)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ((0, 5), ValueError, "min_ms"),
        ((5, 4), ValueError, "max_ms"),
        ((5, 5, 0.5), ValueError, "multiplier"),
        ((5, 5, "2"), TypeError, "multiplier"),
        ((5, 5, 2, 0), ValueError, "deliveries_max"),
    ],
)
def test_a_policy_refuses_numbers_out_of_range(arguments, error, named):
    with pytest.raises(error, match=named):
        RetryPolicy(*arguments)
    with pytest.raises(ValueError, match="dead_letters"):
        SubscriptionOptions(retries=RetryPolicy(1, 2, 2, 3))
    assert RetryPolicy(1, 7, 10.0).wait_ms(10**6) == 7
