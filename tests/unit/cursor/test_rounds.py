"""`dispatch_all`: who receives what, and which events wake the waiter. The model has the rest."""

from __future__ import annotations

import pytest

from ackstate import (
    CorruptStateError,
    CursorClosedError,
    StoreError,
    SubscriptionType,
)
from ackstate.dispatch import SubscriptionOptions
from ackstate.dispatch.admission import RoundWaiter
from ackstate.limits import GateLimits
from topics import NumberedTopic

KEY_SHARED, EXCLUSIVE, FAILOVER = SubscriptionType.KEY_SHARED, SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER
# Of the consumers a and b the first key is of a, the other of b.
A, B = "eb"


class Rounds(NumberedTopic):
    """A topic whose consumers have permits, and the calls of its waiter."""

    def __init__(
        self, permits=None, kind=SubscriptionType.SHARED, *, priorities=None, tick_time_ms=None, options=None, **limits
    ):
        options = SubscriptionOptions(**options or {})
        super().__init__(kind, tick_time_ms=tick_time_ms, options=options, **limits)
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
        self.calls = 0
        assert not self.round(now_ms=now_ms)
        assert self.calls == 0
        return sent

    def settled(self, *publish, now_ms=0, **named):
        """Publish and settle; return the topic."""
        self.publish(*publish, **named)
        self.settle(now_ms=now_ms)
        return self

    def keyed(self, keys):
        self.publish_keys(keys)
        self.settle()
        return self


def test_consumers_take_turns_that_continue_in_the_next_round():
    broker = Rounds(dict.fromkeys("abc", 100), options={"turn_entries": 2})
    broker.publish(5)
    assert broker.round() == {"a": [0, 1], "b": [2, 3], "c": [4]}
    for name, number in (("a", 5), ("b", 6)):
        broker.publish()
        assert broker.round() == {name: [number]}


def test_a_batch_takes_a_permit_for_each_message_that_is_not_acked_and_may_overdraw():
    broker = Rounds({"a": 5, "b": 0})
    broker.publish(3, message_count=3)
    assert broker.round() == {"a": [0, 1]}
    assert broker.subscription.permits("a") == -1
    broker.subscription.add_permits("a", 1)
    assert broker.calls == 0
    broker.subscription.add_permits("b", 1)
    assert (broker.calls, broker.round(), broker.subscription.permits("b")) == (1, {"b": [2]}, -2)
    broker.subscription.ack_batch(broker.positions[2], [0b100], now_ms=0)
    broker.nack(2)
    broker.subscription.add_permits("a", 3)
    assert (broker.round(), broker.subscription.permits("a")) == ({"a": [2]}, 2)


def test_a_consumer_at_its_own_limit_is_passed_over():
    broker = Rounds({"a": 9, "b": 9}, priorities={"b": 1}, max_unacked_messages_per_consumer=2)
    broker.publish(6)
    assert broker.round() == {"a": [0, 1], "b": [2, 3]}
    assert broker.calls == 0
    broker.ack(0, 1)
    assert (broker.calls, broker.round()) == (1, {"a": [4, 5]})


def test_messages_of_a_key_that_are_read_ahead_wait_with_one_that_waits_for_a_time():
    broker = Rounds({"a": 9}, KEY_SHARED).keyed(A)
    broker.nack(0, delay_ms=1_000)
    broker.publish_keys(A * 2)
    assert [broker.round(now_ms=now_ms) for now_ms in (0, 1, 999)] == [{}] * 3
    assert broker.round(now_ms=1_000) == {"a": [0, 1, 2]}


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER])
def test_redeliver_all_rewinds_in_order(kind):
    broker = Rounds({"a": 9}, kind).settled(4)
    broker.ack(1)
    assert broker.subscription.redeliver_all("a", now_ms=0) == 3
    assert broker.subscription.redeliver_all("a", now_ms=0) == 0
    broker.publish(1)
    assert broker.round() == {"a": [0, 2, 3, 4]}


def test_a_round_is_bounded_and_wakes_at_once():
    broker = Rounds({"a": 100}, options={"round_entries_max": 3})
    broker.publish(5)
    assert (broker.round(), broker.calls) == ({"a": [0, 1, 2]}, 1)
    assert (broker.round(), broker.calls) == ({"a": [3, 4]}, 1)


def test_a_round_that_fails_after_it_sent_returns_the_permits(monkeypatch):
    broker = Rounds({"a": 9}).settled(2)
    broker.nack(0, 1)
    broker.publish(1)
    read, calls = broker.log.read, broker.calls

    def fail_at_new(positions, *more):
        if broker.positions[2] in positions:
            raise StoreError("no")
        return read(positions, *more)

    with monkeypatch.context() as patched:
        patched.setattr(broker.log, "read", fail_at_new)
        with pytest.raises(StoreError):
            broker.round()
    assert (broker.subscription.permits("a"), broker.subscription.unacked_messages, broker.calls) == (7, 0, calls)
    assert broker.round() == {"a": [0, 1, 2]}


def room_for_a_redelivery():
    """No rule is closed: there is nothing new to send."""
    broker = Rounds({"a": 9}, max_unacked_messages=3)
    broker.publish(1, message_count=2)
    broker.settled(1)
    broker.nack(0, delay_ms=10)
    broker.settled(1).settle(now_ms=20)
    assert not broker.gate.is_closed
    return broker


def acked_to_the_byte_limit():
    broker = Rounds({"a": 200}, max_unpersisted_ack_record_bytes=1_024).settled(200)
    broker.ack(*range(1, 72, 2))
    return broker


def one_key_of_another():
    broker = Rounds({"a": 9}, KEY_SHARED).keyed(B)
    broker.subscription.consumer_opened("b", permits=9)
    broker.subscription.consumer_closed("a")
    return broker


def given_back(broker, later=0):
    """The first message waits for a time, and others with it."""
    broker.nack(0, delay_ms=1_000)
    if later:
        broker.publish(later)
    else:
        broker.nack(1)
    return broker


AHEAD = {"options": {"look_ahead_max": 2}}
# Each settles; an event, and the numbers that are sent after it.
EVENTS = {
    "publish": (lambda: Rounds({"a": 9}), lambda each: each.publish(), {"a": [0]}),
    "publish for later": (
        lambda: Rounds({"a": 9}, tick_time_ms=1), lambda each: each.publish(deliver_at_ms=50), {},
    ),
    "nack": (lambda: Rounds({"a": 9}).settled(2), lambda each: each.nack(1), {"a": [1]}),
    "redeliver": (
        lambda: Rounds({"a": 9}).settled(2), lambda each: each.subscription.redeliver_all("a", now_ms=0), {"a": [0, 1]},
    ),
    "permits come": (
        lambda: Rounds({"a": 1}).settled(2), lambda each: each.subscription.add_permits("a", 1), {"a": [1]},
    ),
    "consumer opens": (
        lambda: Rounds().settled(1), lambda each: each.subscription.consumer_opened("a", permits=1), {"a": [0]},
    ),
    "consumer closes": (
        lambda: Rounds({"a": 1, "b": 9}).settled(1), lambda each: each.subscription.consumer_closed("a"), {"b": [0]},
    ),
    "active consumer without messages closes": (
        lambda: Rounds({"a": 0, "b": 9}, FAILOVER).settled(1), lambda each: each.subscription.consumer_closed("a"),
        {"b": [0]},
    ),
    "rule opens": (lambda: Rounds({"a": 9}, max_unacked_messages=1).settled(2), lambda each: each.ack(0), {"a": [1]}),
    "room for a redelivery": (room_for_a_redelivery, lambda each: each.ack(1, now_ms=20), {"a": [0]}),
    "limits are raised": (
        lambda: Rounds({"a": 9}, max_unacked_messages=1).settled(2),
        lambda each: each.subscription.change_limits(GateLimits()), {"a": [1]},
    ),
    "ack makes a hole that an unread message fills": (
        lambda: Rounds({"a": 9}, max_unacked_ranges=1).settled(4), lambda each: each.ack(0), {"a": [1]},
    ),
    "persist makes room": (
        acked_to_the_byte_limit, lambda each: each.cursor.persist(now_ms=0), {"a": [*range(72, 108)]},
    ),
    "key is released": (one_key_of_another, lambda each: each.publish_keys(B), {"b": [1]}),
    "reader may look further ahead": (
        lambda: Rounds({"b": 9, "a": 0}, KEY_SHARED, **AHEAD).keyed(A * 3 + B), lambda each: each.dispatch("a", 2),
        {"b": [3]},
    ),
    "waiting message is acked": (
        lambda: Rounds({"b": 9, "a": 0}, KEY_SHARED, **AHEAD).keyed(A * 2 + B), lambda each: each.ack(0), {"b": [2]},
    ),
    "earlier message of a key is acked": (
        lambda: given_back(Rounds({"a": 9}, KEY_SHARED).keyed(A * 2)), lambda each: each.ack(0), {"a": [1]},
    ),
    "message that holds the order is acked": (
        lambda: given_back(Rounds({"a": 9}, EXCLUSIVE).settled(1), later=1), lambda each: each.ack(0), {"a": [1]},
    ),
    "seek": (
        lambda: Rounds({"a": 9}).settled(2), lambda each: each.subscription.seek(each.positions[1], now_ms=0),
        {"a": [1]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_that_lets_a_round_send_more_wakes_the_waiter_once(event):
    make, happen, sent = EVENTS[event]
    broker = make()
    broker.settle(now_ms=broker.subscription._latest_ms)
    happen(broker)
    assert broker.calls == 1
    assert broker.round(now_ms=broker.subscription._latest_ms) == sent


def test_events_that_change_nothing_do_not_wake():
    broker = Rounds({"a": 2}).settled(2)
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


# Times


@pytest.mark.parametrize("kind", SubscriptionType)
def test_a_nack_with_a_delay_wakes_if_its_time_comes_before_what_the_round_said(kind):
    broker = Rounds({"a": 9}, kind).settled(3)
    broker.nack(2, delay_ms=100)
    assert (broker.calls, broker.round(), broker.wake_ms) == (1, {}, 100)
    broker.nack(0, delay_ms=40)
    assert (broker.calls, broker.round(), broker.wake_ms) == (2, {}, 40)
    if not kind.is_single_active:
        broker.nack(1, delay_ms=50)
        assert broker.calls == 2
    assert broker.settle(now_ms=40) == {"a": [0, 1] if kind.is_single_active else [0]}
    assert broker.wake_ms == (100 if kind.is_single_active else 50)


def test_a_clock_that_was_set_back_brings_the_times_of_waiting_messages_nearer():
    broker = Rounds({"a": 9}).settled(2, now_ms=3_600_000)
    broker.nack(0, delay_ms=500, now_ms=3_600_000)
    broker.settle(now_ms=3_600_000)
    assert broker.wake_ms == 3_600_500
    broker.subscription.redeliver_all("b", now_ms=0)
    assert (broker.calls, broker.round(), broker.wake_ms) == (1, {}, 500)


def test_a_dispatch_that_cannot_read_a_message_wakes_when_it_is_to_be_read_again(monkeypatch):
    def unreadable(_):
        raise CorruptStateError("message", offset=0, expected="its entry", found="nothing")

    broker = Rounds({"a": 3}, max_unacked_messages_per_consumer=2)
    broker.publish(4)
    assert broker.settle() == {"a": [0, 1]}
    monkeypatch.setattr(broker.log, "read", unreadable)
    assert broker.dispatch("b") == [2]  # It was read before.
    assert (broker.calls, broker.round(), broker.wake_ms) == (1, {}, 60_000)


# The waiter


def test_a_new_waiter_replaces_the_old_one_and_none_keeps_it():
    broker, calls = Rounds({"a": 9}), []
    for name in ("old", "new"):
        broker.subscription.dispatch_all(now_ms=0, waiter=lambda name=name: calls.append(name))
    broker.subscription.dispatch_all(now_ms=0)
    broker.publish(2)
    broker.publish(2)
    assert calls == ["new"]


def test_close_calls_the_waiter_and_a_later_round_is_refused():
    broker = Rounds({"a": 9})
    broker.round()
    broker.subscription.close(now_ms=0)
    assert broker.calls == 1
    with pytest.raises(CursorClosedError):
        broker.round()


def test_dispatch_takes_no_permits():
    broker = Rounds({"a": 1})
    broker.publish(3)
    assert broker.dispatch("a", 2) == [0, 1]
    assert broker.round() == {"a": [2]}


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
