"""A mistake in a call, or in the parts of a subscription, is refused by name and changes nothing."""

import pytest

from ackstate import (
    ConsumerClosedError,
    DispatchGate,
    GateLimits,
    InvalidPositionError,
    ManagedCursor,
    Message,
    Position,
    StartTime,
    Subscription,
    SubscriptionType,
)
from ackstate.delay import TopicDelayIndex
from ackstate.dispatch import RetryPolicy, SubscriptionOptions
from topics import NumberedTopic

SHARED, EXCLUSIVE = SubscriptionType.SHARED, SubscriptionType.EXCLUSIVE
BEYOND, NOWHERE = Position(1, 999), Position(777, 0)
NO_TIMES, NO_POSITIONS = (1.5, "1", True), ("1:0", None, 5, (1, 0, 0))
NO_NAMES = ((5, TypeError), (None, TypeError), (["a"], TypeError), ("", ValueError), ("\ud800", ValueError))

TIMED = {
    "dispatch": lambda each, **now: each.dispatch("a", 1, **now),
    "dispatch all": lambda each, **now: each.dispatch_all(**now),
    "ack": lambda each, **now: each.ack(Position(1, 0), **now),
    "ack_batch": lambda each, **now: each.ack_batch(Position(1, 0), [0], **now),
    "ack_cumulative": lambda each, **now: each.ack_cumulative(Position(1, 0), **now),
    "nack": lambda each, **now: each.nack(Position(1, 0), **now),
    "redeliver": lambda each, **now: each.redeliver_all("a", **now),
    "skip": lambda each, **now: each.skip(1, **now),
    "clear": lambda each, **now: each.clear_backlog(**now),
    "seek": lambda each, **now: each.seek(Position(1, 0), **now),
    "explain": lambda each, **now: each.explain_holes(**now),
    "close": lambda each, **now: each.close(**now),
}
POSITIONED = {
    "ack": lambda each, position: each.ack(position, now_ms=1),
    "ack_cumulative": lambda each, position: each.ack_cumulative(position, now_ms=1),
    "ack_batch": lambda each, position: each.ack_batch(position, [1], now_ms=1),
    "nack": lambda each, position: each.nack(position, now_ms=1),
}
MISTAKES = [
    *((lambda each, call=call, bad=bad: call(each, now_ms=bad), TypeError, "now_ms must be an integer, got")
      for call in TIMED.values() for bad in NO_TIMES),
    *((lambda each, call=call, bad=bad: call(each, bad), TypeError, "position must be a Position, got")
      for call in POSITIONED.values() for bad in NO_POSITIONS),
    *((lambda each, name=name, bad=bad: POSITIONED[name](each, bad), InvalidPositionError, str(bad.ledger_id))
      for name in ("ack", "ack_cumulative", "ack_batch") for bad in (BEYOND, NOWHERE)),
    *((lambda each, call=call, bad=bad: call(each, bad), error, "the name of a consumer must ")
      for call in (lambda each, bad: each.dispatch(bad, 1, now_ms=1), lambda each, bad: each.consumer_opened(bad),
                   lambda each, bad: each.add_permits(bad, 1)) for bad, error in NO_NAMES),
    *((lambda each, bad=bad: each.consumer_opened("c", priority=bad), TypeError, "priority of consumer 'c' must be an")
      for bad in (None, 1.0, True, "1")),
    (lambda each: each.dispatch("a", -1, now_ms=1), ValueError, "max_messages must be at least 0, got -1"),
    (lambda each: each.dispatch("a", 1.5, now_ms=1), TypeError, "max_messages"),
    (lambda each: each.dispatch_all(now_ms=1, waiter=1), TypeError, "waiter must be callable, got 1"),
    (lambda each: each.consumer_opened("c", permits=-1), ValueError, "permits"),
    (lambda each: each.add_permits("a", 0), ValueError, "count"),
    (lambda each: each.add_permits("a", "1"), TypeError, "count"),
    (lambda each: each.nack(Position(1, 0), delay_ms=-5), ValueError, "delay_ms must be at least"),
    (lambda each: each.nack(Position(1, 0), delay_ms="x"), TypeError, "delay_ms"),
    (lambda each: each.ack(Position(1, -1), now_ms=1), ValueError, "-1"),
    (lambda each: each.ack_batch(Position(1, 0), [2**64], now_ms=1), ValueError, str(2**64)),
    (lambda each: each.skip(-1, now_ms=1), ValueError, "-1"),
    (lambda each: each.seek(Position(-1, 0), now_ms=1), ValueError, "-1"),
    *((lambda each, bad=bad: each.seek(bad, now_ms=1), TypeError, "position must be 'earliest', 'latest', a ")
      for bad in (None, 7, [1, 0], b"latest")),
    (lambda each: each.seek("earlyest", now_ms=1), ValueError, "position must be .*; did you mean 'earliest'"),
    (lambda each: each.seek(StartTime("noon"), now_ms=1), TypeError, "time_ms"),
    (lambda each: each.explain_holes(-1), ValueError, "top must be at least"),
    (lambda each: each.why_blocked(top=-1), ValueError, "top must be at least"),
    (lambda each: each.change_limits({}), TypeError, "limits must be a GateLimits, got"),
]  # fmt: skip


def snapshot(topic):
    subscription = topic.subscription
    return (
        topic.cursor.stats(), subscription.usage(), subscription.consumers, subscription.stats(),
        topic.cursor.read_position, subscription.explain_holes(now_ms=10), subscription.next_wake_ms,
    )  # fmt: skip


def busy(kind):
    """Of 16 messages 0, 2, 8 and 9 are in flight, 3 to 5 and 7 wait, and 3 and 4 are delayed unless one gets all."""
    topic = NumberedTopic(kind, tick_time_ms=1)
    topic.publish(3)
    topic.publish(2, deliver_at_ms=500)
    topic.publish(11)
    topic.dispatch("a", 9)
    topic.ack(1, 6)
    topic.nack(7, delay_ms=299, now_ms=1)
    topic.dispatch("a", 0, now_ms=10)
    return topic


@pytest.mark.parametrize("kind", [SHARED, EXCLUSIVE])
def test_a_mistake_is_refused_and_changes_nothing(kind):
    topic = busy(kind)
    before = snapshot(topic)
    for call, error, saying in MISTAKES:
        with pytest.raises(error, match=saying):
            call(topic.subscription)
        assert snapshot(topic) == before


def test_to_give_back_what_is_unknown_or_not_on_its_way_does_nothing():
    topic = busy(SHARED)
    before = snapshot(topic)
    assert topic.nack(1, 7, 14) == [False, False, False]  # acked, waiting, never sent
    assert topic.subscription.nack(NOWHERE) is False
    assert topic.subscription.consumer_closed("absent") == 0
    assert topic.dispatch("a", 0, now_ms=10) == []
    assert snapshot(topic) == before


def test_closed_consumers_are_known_without_growing_for_ever():
    topic = NumberedTopic()
    for number in range(3_000):
        topic.subscription.consumer_opened(f"c{number}")
        topic.subscription.consumer_closed(f"c{number}")
        topic.subscription.consumer_closed("never there")
    assert len(topic.subscription._consumers._closed) == 1_000
    for name in ("c2000", "c2999"):
        with pytest.raises(ConsumerClosedError):
            topic.dispatch(name)
    assert topic.dispatch("never there") == topic.dispatch("c0") == []


# Parts that do not make a subscription


@pytest.fixture
def log():
    topic = NumberedTopic()
    topic.subscription.close(now_ms=0)
    return topic.log


def cursor_of(log, name="x"):
    return ManagedCursor.open(log.store, topic="t", subscription=name, ledgers=log.ledgers, now_ms=0)


def test_parts_of_another_type_are_refused_and_nothing_of_them_is_used_up(log):
    cursor, gate = cursor_of(log), DispatchGate(GateLimits())
    index = TopicDelayIndex(tick_time_ms=10).open_view(cursor.is_acked)
    wrong = [
        *(({"kind": bad}, TypeError, "kind must be a SubscriptionType, or one of ") for bad in (None, 1, b"Shared")),
        ({"kind": "exclusiv"}, ValueError, "kind must be one of .*; did you mean 'exclusive'"),
        *(({"kind": kind, name: part}, ValueError, f"{name} must be None for a subscription of type {kind.value}, got ")
          for kind in (EXCLUSIVE, SubscriptionType.FAILOVER) for name, part in (("gate", gate), ("delays", index))),
        *(({name: bad}, TypeError, f"{name} must be a ")
          for name, bad in (("gate", GateLimits()), ("delays", 1_000), ("options", {}), ("options", False))),
    ]  # fmt: skip
    for parts, error, saying in wrong:
        with pytest.raises(error, match=saying):
            Subscription(log, cursor, **parts)
    Subscription(log, cursor, gate=gate, delays=index)


def test_a_gate_and_a_cursor_are_those_of_one_subscription(log):
    gate, closed, cursor = DispatchGate(GateLimits()), DispatchGate(GateLimits()), cursor_of(log)
    closed.close()
    first, other = Subscription(log, cursor, gate=gate), cursor_of(log, "y")
    for used in (gate, gate, closed):
        with pytest.raises(ValueError, match="gate must be a new DispatchGate"):
            Subscription(log, other, gate=used)
    log.publish([Message(b"")])
    assert len(first.dispatch("a", 1, now_ms=0)) == 1
    new = DispatchGate(GateLimits())
    with pytest.raises(ValueError, match="one listener of class Subscription"):
        Subscription(log, cursor, gate=new)
    first.close(now_ms=0)
    with pytest.raises(ValueError, match="gate must be a new DispatchGate"):
        Subscription(log, other, gate=gate)
    Subscription(log, other, gate=new)


def test_options_are_checked_and_have_the_documented_defaults():
    for name in ("look_ahead_max", "turn_entries", "round_entries_max"):
        for bad, error in ((0, ValueError), (True, TypeError)):
            with pytest.raises(error, match=name):
                SubscriptionOptions(**{name: bad})
    for bad in ({"promotes_young": "no"}, {"dead_letters": 3}):
        with pytest.raises(TypeError, match=next(iter(bad))):
            SubscriptionOptions(**bad)
    for bad, error, named in (
        ((0, 5), ValueError, "min_ms"),
        ((5, 4), ValueError, "max_ms"),
        ((5, 5, 0.5), ValueError, "multiplier"),
        ((5, 5, "2"), TypeError, "multiplier"),
        ((5, 5, 2, 0), ValueError, "deliveries_max"),
    ):
        with pytest.raises(error, match=named):
            RetryPolicy(*bad)
    assert RetryPolicy(1, 7, 10.0).wait_ms(10**6) == 7
    with pytest.raises(ValueError, match="dead_letters"):
        SubscriptionOptions(retries=RetryPolicy(1, 2, 2, 3))
    options = SubscriptionOptions()
    assert (options.turn_entries, options.round_entries_max, options.look_ahead_max) == (20, 1_000, 20_000)
    assert (options.promotes_young, options.dead_letters) == (True, None)
