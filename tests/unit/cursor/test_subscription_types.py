"""Who gets which messages: Exclusive, Failover, Shared; Key_Shared has a file of its own."""

from __future__ import annotations

import pytest

from ackstate import ConsumerBusyError, ConsumerClosedError, ManagedCursor, Message, Subscription, SubscriptionType
from ackstate.delay import TopicDelayIndex
from ackstate.dispatch import SubscriptionOptions
from ackstate.limits import DispatchGate, GateLimits
from ackstate.position_set import PositionSet
from topics import NumberedTopic

EXCLUSIVE, FAILOVER, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER, SubscriptionType.SHARED
SINGLE_ACTIVE = pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER])


def test_an_exclusive_subscription_refuses_a_second_consumer():
    topic = NumberedTopic(EXCLUSIVE)
    topic.publish(3)
    assert topic.dispatch("a", 2) == [0, 1]
    with pytest.raises(ConsumerBusyError, match="'b': 'a' has"):
        topic.subscription.consumer_opened("b")
    with pytest.raises(ConsumerBusyError, match="'b': 'a' has"):
        topic.dispatch("b")
    assert topic.subscription.consumers == ("a",)
    assert topic.subscription.active_consumer == "a"
    assert topic.subscription.unacked_messages == 2
    assert topic.dispatch("a") == [2]


@pytest.mark.parametrize("kind", SubscriptionType)
@pytest.mark.parametrize("opened_by", ["consumer_opened", "dispatch"])
def test_to_open_a_consumer_twice_is_refused_and_changes_nothing(kind, opened_by):
    topic = NumberedTopic(kind)
    topic.publish(2)
    if opened_by == "dispatch":
        topic.dispatch("a", 1)
    else:
        topic.subscription.consumer_opened("a")
    with pytest.raises(ConsumerBusyError, match="consumer 'a' is open: close it first, or choose another name"):
        topic.subscription.consumer_opened("a", priority=7)
    assert topic.subscription.consumers == ("a",)
    assert topic.dispatch("a") == ([1] if opened_by == "dispatch" else [0, 1])


@pytest.mark.parametrize("kind", SubscriptionType)
def test_a_consumer_that_was_closed_gets_nothing_before_it_is_opened_again(kind):
    """No one would give its messages back: a dispatch that comes late, after the connection has gone."""
    topic = NumberedTopic(kind)
    topic.publish(3)
    assert topic.dispatch("a", 2) == [0, 1]
    assert topic.subscription.consumer_closed("a") == 2
    for _ in range(2):
        with pytest.raises(ConsumerClosedError, match="consumer 'a' was closed: open it again first"):
            topic.dispatch("a")
    assert topic.subscription.consumers == ()
    assert topic.subscription.unacked_messages == 0
    assert topic.dispatch("b", 1) == [0]
    topic.subscription.consumer_closed("b")
    topic.subscription.consumer_opened("a")
    assert topic.dispatch("a") == [0, 1, 2]


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


@pytest.mark.parametrize(
    ("name", "error"), [(5, TypeError), (None, TypeError), (["a"], TypeError), ("", ValueError), ("\ud800", ValueError)]
)
def test_what_is_no_name_of_a_consumer_is_refused(name, error):
    topic = NumberedTopic()
    for call in (topic.dispatch, topic.subscription.consumer_opened):
        with pytest.raises(error, match="the name of a consumer must "):
            call(name)
    assert topic.subscription.consumers == ()


class TestParts:
    """Parts that do not make a subscription are refused, and nothing of them is used up."""

    def parts(self):
        topic = NumberedTopic()
        topic.subscription.close(now_ms=0)
        cursor = ManagedCursor.open(topic.log.store, topic="t", subscription="x", ledgers=topic.log.ledgers, now_ms=0)
        return topic.log, cursor

    @pytest.mark.parametrize("kind", SubscriptionType)
    def test_a_type_is_no_text(self, kind):
        log, cursor = self.parts()
        for text in (kind.value, kind.name.lower()):
            with pytest.raises(TypeError, match=rf"kind must be a SubscriptionType, got '{text}': use {kind}$"):
                Subscription(log, cursor, kind=text)
        Subscription(log, cursor, kind=kind)

    @pytest.mark.parametrize("kind", ["exclusiv", None, 1, b"Shared"])
    def test_what_is_no_type_is_told_which_there_are(self, kind):
        log, cursor = self.parts()
        with pytest.raises(TypeError, match=r"kind must be .*: use one of SubscriptionType\.EXCLUSIVE, .*KEY_SHARED"):
            Subscription(log, cursor, kind=kind)

    @SINGLE_ACTIVE
    @pytest.mark.parametrize("name", ["gate", "delays"])
    def test_a_single_active_consumer_takes_no_gate_and_no_delays(self, kind, name):
        log, cursor = self.parts()
        index = TopicDelayIndex(tick_time_ms=10)
        part = DispatchGate(GateLimits()) if name == "gate" else index.open_view(cursor.is_acked)
        with pytest.raises(ValueError, match=f"{name} must be None for a subscription of type {kind.value}, got a "):
            Subscription(log, cursor, kind=kind, **{name: part})
        # It may be given to another one, and the cursor too.
        Subscription(log, cursor, kind=SHARED, **{name: part})

    def test_a_gate_is_that_of_one_subscription(self):
        log, cursor = self.parts()
        gate = DispatchGate(GateLimits())
        first = Subscription(log, cursor, gate=gate)
        other = ManagedCursor.open(log.store, topic="t", subscription="y", ledgers=log.ledgers, now_ms=0)
        for _ in range(2):
            with pytest.raises(ValueError, match="gate must be a new DispatchGate, got one of another subscription"):
                Subscription(log, other, gate=gate)
        log.publish([Message(b"")])
        assert len(first.dispatch("a", 1, now_ms=0)) == 1
        first.close(now_ms=0)
        with pytest.raises(ValueError, match="gate must be a new DispatchGate"):
            Subscription(log, other, gate=gate)
        Subscription(log, other, gate=DispatchGate(GateLimits()))

    def test_a_gate_that_was_closed_is_refused(self):
        log, cursor = self.parts()
        gate = DispatchGate(GateLimits())
        gate.close()
        with pytest.raises(ValueError, match="gate must be a new DispatchGate"):
            Subscription(log, cursor, gate=gate)

    def test_a_gate_is_not_taken_by_a_subscription_that_cannot_be(self):
        log, cursor = self.parts()
        gate = DispatchGate(GateLimits())
        Subscription(log, cursor)
        with pytest.raises(ValueError, match="one listener of class Subscription"):
            Subscription(log, cursor, gate=gate)
        other = ManagedCursor.open(log.store, topic="t", subscription="y", ledgers=log.ledgers, now_ms=0)
        Subscription(log, other, gate=gate)

    @pytest.mark.parametrize(
        ("name", "value"), [("gate", GateLimits()), ("delays", 1_000), ("options", {}), ("options", False)]
    )
    def test_a_part_of_another_type_is_refused(self, name, value):
        log, cursor = self.parts()
        with pytest.raises(TypeError, match=f"{name} must be a "):
            Subscription(log, cursor, **{name: value})
        Subscription(log, cursor)

    @pytest.mark.parametrize("values", [{"promotes_young": "no"}, {"dead_letters": 3}, {"look_ahead_max": True}])
    def test_an_option_of_another_type_is_refused(self, values):
        with pytest.raises(TypeError, match=next(iter(values))):
            SubscriptionOptions(**values)


@pytest.mark.parametrize("now_ms", [1.5, "1", None, True])
@pytest.mark.parametrize("kind", [SHARED, EXCLUSIVE])
def test_a_time_that_is_no_integer_is_refused_and_changes_nothing(kind, now_ms):
    topic = NumberedTopic(kind)
    topic.publish(3)
    topic.dispatch("a", 2)
    first = topic.positions[0]
    calls = [
        lambda **now: topic.subscription.dispatch("a", 1, **now),
        lambda **now: topic.subscription.ack(first, **now),
        lambda **now: topic.subscription.ack_batch(first, [0], **now),
        lambda **now: topic.subscription.ack_cumulative(first, **now),
        lambda **now: topic.subscription.skip(1, **now),
        topic.subscription.clear_backlog,
        lambda **now: topic.subscription.seek(first, **now),
        topic.subscription.close,
    ]
    if now_ms is not None:
        calls += [lambda **now: topic.subscription.nack(first, **now), topic.subscription.explain_holes]
    for call in calls:
        with pytest.raises(TypeError, match="now_ms must be an integer, got"):
            call(now_ms=now_ms)
    assert topic.subscription.unacked_messages == 2
    assert topic.unacked() == [0, 1, 2]
    assert topic.dispatch("a", now_ms=1) == [2]


@pytest.mark.parametrize("position", ["1:0", None, 5, (1, 0, 0)])
def test_what_is_no_position_is_refused_and_changes_nothing(position):
    topic = NumberedTopic()
    topic.publish(2)
    topic.dispatch("a", 2)
    subscription = topic.subscription
    for call in (subscription.ack, subscription.ack_cumulative, subscription.seek, subscription.nack):
        with pytest.raises(TypeError, match="position must be a Position, got"):
            call(position, now_ms=1)
    with pytest.raises(TypeError, match="position must be a Position, got"):
        subscription.ack_batch(position, [1], now_ms=1)
    assert (subscription.unacked_messages, topic.unacked()) == (2, [0, 1])


def test_limits_of_another_type_are_refused_by_every_type():
    for kind in SubscriptionType:
        with pytest.raises(TypeError, match="limits must be a GateLimits, got"):
            NumberedTopic(kind).subscription.change_limits({})


@pytest.mark.parametrize("kind", SubscriptionType)
def test_a_negative_number_of_messages_is_refused_and_none_is_none(kind):
    topic = NumberedTopic(kind)
    topic.publish(2)
    with pytest.raises(ValueError, match="max_messages must be at least 0, got -1"):
        topic.dispatch("a", -1)
    assert topic.subscription.consumers == ()
    assert topic.dispatch("a", 0) == []
    assert topic.dispatch("a") == [0, 1]


def test_priority_goes_before_the_name():
    topic = NumberedTopic(FAILOVER)
    topic.subscription.consumer_opened("a", priority=1)
    topic.subscription.consumer_opened("z", priority=0)
    topic.subscription.consumer_opened("y", priority=0)
    assert topic.subscription.active_consumer == "y"


def test_a_better_consumer_takes_over_all_that_is_not_acked_as_in_pulsar():
    topic = NumberedTopic(FAILOVER)
    topic.publish(4)
    assert topic.dispatch("b", 3) == [0, 1, 2]
    topic.ack(0)
    topic.subscription.consumer_opened("a")
    assert topic.subscription.unacked_messages == 0
    assert topic.dispatch("b") == []
    assert topic.deliveries("a") == [(1, 1), (2, 1), (3, 0)]
    topic.ack(1)  # from whichever of the two
    assert topic.unacked() == [2, 3]


@SINGLE_ACTIVE
def test_a_message_given_back_brings_all_that_was_sent_after_it_so_that_the_order_stays(kind):
    topic = NumberedTopic(kind)
    topic.publish(6)
    topic.dispatch("a", 5)
    assert topic.nack(2) == [True]
    assert topic.subscription.unacked_messages == 2
    assert topic.nack(3) == [False]
    assert topic.deliveries("a") == [(2, 1), (3, 1), (4, 1), (5, 0)]


@SINGLE_ACTIVE
def test_nothing_passes_a_message_given_back_with_a_delay(kind):
    topic = NumberedTopic(kind)
    topic.publish(4)
    topic.dispatch("a", 3)
    topic.nack(1, delay_ms=100, now_ms=1_000)
    assert topic.subscription.next_wake_ms == 1_100
    assert topic.dispatch("a", now_ms=1_099) == []
    assert topic.dispatch("a", now_ms=1_100) == [1, 2, 3]


@SINGLE_ACTIVE
def test_an_ack_of_what_holds_the_others_lets_them_go(kind):
    topic = NumberedTopic(kind)
    topic.publish(3)
    topic.dispatch("a", 2)
    topic.nack(1)
    topic.nack(0, delay_ms=50)
    assert topic.dispatch("a") == []
    topic.ack(0)
    assert topic.dispatch("a") == [1, 2]


@SINGLE_ACTIVE
def test_no_limit_holds_a_single_active_consumer_back(kind):
    topic = NumberedTopic(kind, max_unacked_messages=2, max_unacked_ranges=1, max_unpersisted_ack_record_bytes=1_024)
    topic.publish(1_000)
    assert topic.dispatch("a", 1_000) == list(range(1_000))
    topic.ack(*range(1, 1_000, 2))
    assert topic.cursor.view.unpersisted_record_bytes > 1_024
    assert topic.subscription.why_blocked() == ()
    topic.publish()
    assert topic.dispatch("a") == [1_000]
    calls = []
    topic.subscription.when_open(lambda: calls.append(1), "a")
    assert calls == [1]


@SINGLE_ACTIVE
def test_a_single_active_consumer_gets_delayed_messages_at_once_as_in_pulsar(kind):
    topic = NumberedTopic(kind, tick_time_ms=10)
    topic.publish(2, deliver_at_ms=1_000)
    assert topic.dispatch("a") == [0, 1]
    assert topic.subscription.next_wake_ms is None


@pytest.mark.parametrize("kind", [FAILOVER, SubscriptionType.KEY_SHARED])
def test_to_give_back_many_of_one_key_with_a_delay_costs_each_the_same(monkeypatch, kind):
    topic = NumberedTopic(kind)
    topic.publish(200, key=b"k")
    topic.dispatch("a", 200)
    moves = []
    for name in ("add", "discard"):
        monkeypatch.setattr(PositionSet, name, counted(getattr(PositionSet, name), moves))
    for number in range(199, -1, -1):
        topic.subscription.nack(topic.positions[number], delay_ms=10)
    sent = topic.subscription.dispatch("a", 200, now_ms=10)
    assert [each.position for each in sent] == topic.positions
    assert len(moves) < 200 * 25


def counted(method, calls):
    def call(self, position):
        calls.append(position)
        return method(self, position)

    return call
