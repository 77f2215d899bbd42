"""`dispatch_all`: who receives what, and which events wake the waiter."""

from __future__ import annotations

import gc
import logging
from weakref import ref

import pytest

from ackstate import (
    ConsumerClosedError,
    CorruptStateError,
    CursorClosedError,
    DeadLetterPolicy,
    Message,
    Position,
    StoreError,
    SubscriptionType,
)
from ackstate.dispatch import SubscriptionOptions
from ackstate.dispatch.admission import RoundWaiter
from ackstate.limits import GateLimits
from topics import NumberedTopic

SHARED, KEY_SHARED = SubscriptionType.SHARED, SubscriptionType.KEY_SHARED
EXCLUSIVE, FAILOVER = SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER
# Of the consumers a and b the first key is of a, the other of b.
A, B = "eb"


class TopicWithPermits(NumberedTopic):
    """A topic whose consumers have permits, and the calls of its waiter."""

    def __init__(self, kind=SHARED, *, permits=None, priorities=None, turn=20, tick_time_ms=None, **settings):
        options = {name: settings.pop(name) for name in ("look_ahead_max", "round_entries_max", "dead_letters")
                   if name in settings}  # fmt: skip
        super().__init__(
            kind, tick_time_ms=tick_time_ms, options=SubscriptionOptions(turn_entries=turn, **options), **settings
        )
        self.calls = 0
        for name, count in (permits or {}).items():
            self.subscription.consumer_opened(name, priority=(priorities or {}).get(name, 0), permits=count)

    def wake(self):
        self.calls += 1

    def round(self, *, now_ms=0):
        """Return the numbers that each consumer receives."""
        deliveries, self.wake_ms = self.subscription.dispatch_all(now_ms=now_ms, waiter=self.wake)
        self.check()
        return {name: [self.positions.index(each.position) for each in mine] for name, mine in deliveries}

    def settle(self, *, now_ms=0):
        """Dispatch until nothing is sent any more; return everything."""
        sent = {}
        while got := self.round(now_ms=now_ms):
            for name, mine in got.items():
                sent.setdefault(name, []).extend(mine)
        assert self.calls == 0 or not self.round(now_ms=now_ms)
        self.calls = 0
        self.round(now_ms=now_ms)
        assert self.calls == 0
        return sent


def test_consumers_take_turns_that_continue_in_the_next_round():
    broker = TopicWithPermits(permits=dict.fromkeys("abc", 100), turn=2)
    broker.publish(5)
    assert broker.round() == {"a": [0, 1], "b": [2, 3], "c": [4]}
    broker.publish(1)
    assert broker.round() == {"a": [5]}
    broker.publish(1)
    assert broker.round() == {"b": [6]}


def test_a_batch_takes_a_permit_for_each_message_and_may_overdraw():
    broker = TopicWithPermits(permits={"a": 5})
    broker.publish(3, message_count=3)
    assert broker.round() == {"a": [0, 1]}
    assert broker.subscription.permits("a") == -1
    broker.subscription.add_permits("a", 1)
    assert broker.calls == 0
    broker.subscription.add_permits("a", 1)
    assert broker.calls == 1
    assert broker.round() == {"a": [2]}


def test_a_consumer_that_a_batch_overdrew_stops_no_other():
    broker = TopicWithPermits(permits={"a": 1, "b": 0})
    broker.publish(1, message_count=5)
    assert broker.round() == {"a": [0]}
    broker.publish(2)
    broker.subscription.add_permits("b", 2)
    assert broker.round() == {"b": [1, 2]}


def test_a_batch_that_is_partly_acked_takes_permits_for_the_rest():
    broker = TopicWithPermits(permits={"a": 3})
    broker.publish(1, message_count=3)
    broker.round()
    broker.subscription.ack_batch(broker.positions[0], [0b100], now_ms=0)
    broker.nack(0)
    broker.subscription.add_permits("a", 3)
    assert broker.round() == {"a": [0]}
    assert broker.subscription.permits("a") == 2


def test_permits_are_lost_when_the_consumer_closes():
    broker = TopicWithPermits(permits={"a": 3})
    broker.subscription.consumer_closed("a")
    assert broker.subscription.permits("a") == 0
    with pytest.raises(ConsumerClosedError):
        broker.subscription.add_permits("a", 1)
    broker.subscription.consumer_opened("a")
    broker.publish(1)
    assert broker.round() == {}


def test_a_consumer_at_its_own_limit_is_passed_over():
    broker = TopicWithPermits(permits={"a": 9, "b": 9}, priorities={"b": 1}, max_unacked_messages_per_consumer=2)
    broker.publish(6)
    assert broker.round() == {"a": [0, 1], "b": [2, 3]}
    assert broker.calls == 0
    broker.ack(0)
    broker.ack(1)
    assert broker.calls == 1
    assert broker.round() == {"a": [4, 5]}


def test_key_shared_sends_each_key_to_its_owner_and_queues_only_for_those_without_permits():
    broker = TopicWithPermits(KEY_SHARED, permits={"a": 9, "b": 0})
    broker.publish_keys((A + B) * 3)
    assert broker.round() == {"a": [0, 2, 4]}
    assert len(broker.subscription._messages.waiting) == 3
    broker.subscription.add_permits("b", 2)
    assert broker.round() == {"b": [1, 3]}


def test_messages_of_a_key_that_are_read_ahead_wait_with_one_that_waits_for_a_time():
    broker = TopicWithPermits(KEY_SHARED, permits={"a": 9})
    broker.publish_keys(A)
    broker.round()
    broker.nack(0, delay_ms=1_000)
    broker.publish_keys(A * 2)
    assert [broker.round(now_ms=now_ms) for now_ms in (0, 1, 999)] == [{}] * 3
    assert broker.round(now_ms=1_000) == {"a": [0, 1, 2]}


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER])
def test_redeliver_all_rewinds_in_order(kind):
    broker = TopicWithPermits(kind, permits={"a": 9})
    broker.publish(4)
    broker.round()
    broker.ack(1)
    assert broker.subscription.redeliver_all("a", now_ms=0) == 3
    assert broker.subscription.redeliver_all("a", now_ms=0) == 0
    broker.publish(1)
    assert broker.round() == {"a": [0, 2, 3, 4]}


def test_a_round_is_bounded_and_wakes_at_once():
    broker = TopicWithPermits(permits={"a": 100}, round_entries_max=3)
    broker.publish(5)
    assert broker.round() == {"a": [0, 1, 2]}
    assert broker.calls == 1
    assert broker.round() == {"a": [3, 4]}
    assert broker.calls == 1


def test_a_round_that_fails_after_it_sent_returns_the_permits(monkeypatch):
    broker = TopicWithPermits(permits={"a": 9})
    broker.publish(2)
    broker.round()
    broker.nack(0, 1)
    broker.publish(1)
    read = broker.log.read

    def fail_at_new(positions, *more):
        if broker.positions[2] in positions:
            raise StoreError("no")
        return read(positions, *more)

    with monkeypatch.context() as patched:
        patched.setattr(broker.log, "read", fail_at_new)
        with pytest.raises(StoreError):
            broker.round()
    assert (broker.subscription.permits("a"), broker.subscription.unacked_messages) == (7, 0)
    assert broker.round() == {"a": [0, 1, 2]}


# Each of these settles, and returns an event and the numbers that are sent after it.


def publish():
    broker = TopicWithPermits(permits={"a": 9})
    return broker, lambda: broker.publish(1), {"a": [0]}


def publish_for_later():
    broker = TopicWithPermits(permits={"a": 9}, tick_time_ms=1)
    return broker, lambda: broker.publish(1, deliver_at_ms=50), {}


def nack():
    broker = TopicWithPermits(permits={"a": 9})
    broker.publish(2)
    broker.settle()
    return broker, lambda: broker.nack(1), {"a": [1]}


def redeliver():
    broker = TopicWithPermits(permits={"a": 9})
    broker.publish(2)
    broker.settle()
    return broker, lambda: broker.subscription.redeliver_all("a", now_ms=0), {"a": [0, 1]}


def permits_come():
    broker = TopicWithPermits(permits={"a": 1})
    broker.publish(2)
    return broker, lambda: broker.subscription.add_permits("a", 1), {"a": [1]}


def consumer_opens():
    broker = TopicWithPermits()
    broker.publish(1)
    return broker, lambda: broker.subscription.consumer_opened("a", permits=1), {"a": [0]}


def consumer_closes():
    broker = TopicWithPermits(permits={"a": 1, "b": 9})
    broker.publish(1)
    return broker, lambda: broker.subscription.consumer_closed("a"), {"b": [0]}


def active_consumer_without_messages_closes():
    broker = TopicWithPermits(FAILOVER, permits={"a": 0, "b": 9})
    broker.publish(1)
    return broker, lambda: broker.subscription.consumer_closed("a"), {"b": [0]}


def rule_opens():
    broker = TopicWithPermits(permits={"a": 9}, max_unacked_messages=1)
    broker.publish(2)
    broker.settle()
    return broker, lambda: broker.ack(0), {"a": [1]}


def room_for_a_redelivery():
    """No rule is closed: there is nothing new to send."""
    broker = TopicWithPermits(permits={"a": 9}, max_unacked_messages=3)
    broker.publish(1, message_count=2)
    broker.publish(1)
    broker.settle()
    broker.nack(0, delay_ms=10)
    broker.publish(1)
    broker.settle()
    broker.settle(now_ms=20)
    assert not broker.gate.is_closed
    return broker, lambda: broker.ack(1, now_ms=20), {"a": [0]}


def limits_are_raised():
    broker = TopicWithPermits(permits={"a": 9}, max_unacked_messages=1)
    broker.publish(2)
    broker.settle()
    return broker, lambda: broker.subscription.change_limits(GateLimits()), {"a": [1]}


def ack_makes_a_hole_that_an_unread_message_fills():
    broker = TopicWithPermits(permits={"a": 9}, max_unacked_ranges=1)
    broker.publish(4)
    broker.settle()
    return broker, lambda: broker.ack(0), {"a": [1]}


def persist_makes_room():
    broker = TopicWithPermits(permits={"a": 200}, max_unpersisted_ack_record_bytes=1_024)
    broker.publish(200)
    broker.settle()
    broker.ack(*range(1, 72, 2))
    broker.settle()
    return broker, lambda: broker.cursor.persist(now_ms=0), {"a": list(range(72, 108))}


def key_is_released():
    broker = TopicWithPermits(KEY_SHARED, permits={"a": 9})
    broker.publish_keys(B)
    broker.settle()
    broker.subscription.consumer_opened("b", permits=9)
    broker.subscription.consumer_closed("a")
    return broker, lambda: broker.publish_keys(B), {"b": [1]}


def reader_may_look_further_ahead():
    broker = TopicWithPermits(KEY_SHARED, permits={"b": 9, "a": 0}, look_ahead_max=2)
    broker.publish_keys(A * 3 + B)
    broker.settle()
    return broker, lambda: broker.dispatch("a", 2), {"b": [3]}


def waiting_message_is_acked():
    broker = TopicWithPermits(KEY_SHARED, permits={"b": 9, "a": 0}, look_ahead_max=2)
    broker.publish_keys(A * 2 + B)
    broker.settle()
    return broker, lambda: broker.ack(0), {"b": [2]}


def earlier_message_of_a_key_is_acked():
    broker = TopicWithPermits(KEY_SHARED, permits={"a": 9})
    broker.publish_keys(A * 2)
    broker.settle()
    broker.nack(0, delay_ms=1_000)
    broker.nack(1)
    return broker, lambda: broker.ack(0), {"a": [1]}


def message_that_holds_the_order_is_acked():
    broker = TopicWithPermits(EXCLUSIVE, permits={"a": 9})
    broker.publish(1)
    broker.settle()
    broker.nack(0, delay_ms=1_000)
    broker.publish(1)
    return broker, lambda: broker.ack(0), {"a": [1]}


def seek():
    broker = TopicWithPermits(permits={"a": 9})
    broker.publish(2)
    broker.settle()
    broker.ack(0, 1)
    return broker, lambda: broker.subscription.seek(Position(1, 1), now_ms=0), {"a": [1]}


EVENTS = [
    publish, publish_for_later, nack, redeliver, permits_come, consumer_opens, consumer_closes,
    active_consumer_without_messages_closes, rule_opens, room_for_a_redelivery, limits_are_raised,
    ack_makes_a_hole_that_an_unread_message_fills, persist_makes_room, key_is_released, reader_may_look_further_ahead,
    waiting_message_is_acked, earlier_message_of_a_key_is_acked,
    message_that_holds_the_order_is_acked, seek,
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_an_event_that_lets_a_round_send_more_wakes_the_waiter_once(event):
    broker, happen, sent = event()
    broker.settle(now_ms=broker.subscription._latest_ms)
    happen()
    assert broker.calls == 1
    assert broker.round(now_ms=broker.subscription._latest_ms) == sent


def test_events_that_change_nothing_do_not_wake():
    broker = TopicWithPermits(permits={"a": 2})
    broker.publish(2)
    broker.settle()
    broker.publish(1)  # no one has permits
    broker.ack(0)
    broker.cursor.persist(now_ms=0)
    assert broker.calls == 0
    broker.subscription.add_permits("a", 9)
    broker.settle()
    broker.subscription.add_permits("a", 9)  # it had some
    broker.ack(1)
    broker.cursor.persist(now_ms=0)
    assert broker.calls == 0


def test_while_a_rule_on_messages_is_closed_an_ack_below_its_mark_does_not_wake():
    broker = TopicWithPermits(permits={"a": 99}, max_unacked_messages=10)
    broker.publish(20)
    broker.settle()
    broker.ack(*range(5))
    assert broker.calls == 0
    broker.ack(5)
    assert broker.calls == 1


def test_time_is_reported_and_not_waited_for():
    broker = TopicWithPermits(permits={"a": 9}, tick_time_ms=1)
    broker.publish(1, deliver_at_ms=50)
    broker.settle()
    assert broker.wake_ms == 50
    assert broker.round(now_ms=49) == {}
    assert broker.round(now_ms=50) == {"a": [0]}
    broker.nack(0, delay_ms=100, now_ms=50)
    broker.round(now_ms=50)
    assert broker.wake_ms == 150


def test_no_time_is_reported_while_no_one_has_permits():
    broker = TopicWithPermits(permits={"a": 0}, tick_time_ms=1)
    broker.publish(1, deliver_at_ms=50)
    broker.round()
    assert broker.wake_ms is None
    broker.subscription.add_permits("a", 1)
    broker.round()
    assert broker.wake_ms == 50


@pytest.mark.parametrize("kind", SubscriptionType)
def test_a_nack_with_a_delay_wakes_if_its_time_comes_before_what_the_round_said(kind):
    broker = TopicWithPermits(kind, permits={"a": 9})
    broker.publish(3)
    broker.settle()
    broker.nack(2, delay_ms=100)
    assert (broker.calls, broker.round(), broker.wake_ms) == (1, {}, 100)
    broker.nack(0, delay_ms=40)
    assert (broker.calls, broker.round(), broker.wake_ms) == (2, {}, 40)
    assert broker.settle(now_ms=40) == {"a": [0, 1] if kind.is_single_active else [0]}
    assert broker.wake_ms == 100


def test_a_nack_with_a_delay_wakes_no_one_while_nobody_could_receive_it():
    broker = TopicWithPermits(permits={"a": 1})
    broker.publish(1)
    broker.settle()
    broker.nack(0, delay_ms=100)
    assert broker.calls == 0
    broker.subscription.add_permits("a", 1)
    assert (broker.calls, broker.round(), broker.wake_ms) == (1, {}, 100)


def test_a_round_without_a_waiter_wakes_the_one_who_knows_only_a_later_time():
    broker = TopicWithPermits(permits={"a": 9}, tick_time_ms=1)
    broker.publish(1)
    broker.publish(deliver_at_ms=500)
    broker.settle()
    assert broker.wake_ms == 500
    broker.nack(0, delay_ms=100)
    assert broker.subscription.dispatch_all(now_ms=0).next_wake_ms == 100
    assert broker.calls == 1


def test_a_clock_that_was_set_back_brings_the_times_of_waiting_messages_nearer():
    broker = TopicWithPermits(permits={"a": 9})
    broker.publish(2)
    broker.settle(now_ms=3_600_000)
    broker.nack(0, delay_ms=500, now_ms=3_600_000)
    broker.settle(now_ms=3_600_000)
    assert broker.wake_ms == 3_600_500
    broker.subscription.redeliver_all("b", now_ms=0)
    assert (broker.calls, broker.round(), broker.wake_ms) == (1, {}, 500)


def test_a_dispatch_that_cannot_read_a_message_wakes_when_it_is_to_be_read_again(monkeypatch):
    broker = TopicWithPermits(permits={"a": 3}, max_unacked_messages_per_consumer=2)
    broker.publish(4)
    assert broker.settle() == {"a": [0, 1]}
    monkeypatch.setattr(broker.log, "read", unreadable)
    assert broker.dispatch("b") == [2]  # It was read before.
    assert (broker.calls, broker.round(), broker.wake_ms) == (1, {}, 60_000)


def unreadable(_):
    raise CorruptStateError("message", offset=0, expected="its entry", found="nothing")


def test_more_due_messages_than_a_round_queues_wake_at_once():
    """Only the last one fills a hole; the others find no room."""
    broker = TopicWithPermits(permits={"a": 9}, tick_time_ms=1, max_unacked_ranges=1)
    broker.positions = broker.log.publish([Message(b"", deliver_at_ms=50)] * 250 + [Message(b"")])
    assert broker.settle() == {"a": [250]}
    broker.ack(250)
    broker.calls, received = 1, []
    while broker.calls:
        broker.calls = 0
        received += broker.round(now_ms=50).get("a", [])
    assert 249 in received


def test_a_new_waiter_replaces_the_old_one_and_none_keeps_it():
    broker = TopicWithPermits(permits={"a": 9})
    calls = []
    broker.subscription.dispatch_all(now_ms=0, waiter=lambda: calls.append("old"))
    broker.subscription.dispatch_all(now_ms=0, waiter=lambda: calls.append("new"))
    broker.subscription.dispatch_all(now_ms=0)
    broker.publish(2)
    broker.publish(2)
    assert calls == ["new"]


def test_close_calls_the_waiter_and_a_later_round_is_refused():
    broker = TopicWithPermits(permits={"a": 9})
    broker.round()
    broker.subscription.close(now_ms=0)
    assert broker.calls == 1
    with pytest.raises(CursorClosedError):
        broker.round()


def test_the_log_does_not_keep_a_subscription_alive():
    broker = TopicWithPermits(permits={"a": 9})
    broker.round()
    log, subscription = broker.log, ref(broker.subscription)
    del broker
    gc.collect()
    assert subscription() is None
    log.publish([])


def test_a_dead_letter_lets_another_round_send_the_rest_of_its_key():
    dead = []
    broker = TopicWithPermits(KEY_SHARED, permits={"a": 2}, dead_letters=DeadLetterPolicy(0, dead.append))
    broker.publish_keys(A * 2)
    broker.settle()
    broker.nack(0)
    broker.subscription.add_permits("a", 1)
    broker.round()
    assert len(dead) == 1
    assert broker.calls > 0


def test_dispatch_takes_no_permits():
    broker = TopicWithPermits(permits={"a": 1})
    broker.publish(3)
    assert broker.dispatch("a", 2) == [0, 1]
    assert broker.round() == {"a": [2]}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda each: each.add_permits("a", 0), ValueError, "count"),
        (lambda each: each.add_permits("a", "1"), TypeError, "count"),
        (lambda each: each.add_permits("", 1), ValueError, "name of a consumer"),
        (lambda each: each.consumer_opened("a", permits=-1), ValueError, "permits"),
        (lambda each: each.dispatch_all(now_ms="1"), TypeError, "now_ms"),
        (lambda each: each.dispatch_all(now_ms=0, waiter=1), TypeError, "waiter must be callable, got 1"),
        (lambda each: each.redeliver_all("a", now_ms=None), TypeError, "now_ms"),
    ],
)
def test_mistakes_are_refused(call, error, message):
    broker = TopicWithPermits()
    with pytest.raises(error, match=message):
        call(broker.subscription)
    assert broker.subscription.consumers == ()


@pytest.mark.parametrize("event", [RoundWaiter.room_made, RoundWaiter.wake])
def test_an_event_during_a_round_wakes_when_it_ends(event):
    waiter, calls = RoundWaiter(), []
    assert waiter.begin_round() is None
    event(waiter)
    waiter.messages_came()  # by the round itself
    waiter.arm(lambda: calls.append("called"), messages=True, room=True)
    assert calls == ["called"]
    waiter.wake()
    assert calls == ["called"]
