"""The delivery-delay policies: their values, and which updates of a topic and a namespace are refused, in tables."""

import pytest

from ackstate.limits.policies import (
    BrokerDelayedDelivery,
    DelayedDeliveryPolicies,
    DelayPolicyRefusedError,
    DeliveryDelayExceededError,
    EffectiveDelayedDelivery,
    FieldLevels,
    Level,
    check_namespace_settable,
    check_topic_settable,
    effective,
)

P = DelayedDeliveryPolicies
ON, OFF = BrokerDelayedDelivery(), BrokerDelayedDelivery(active=False)
TICK, LONGEST, FIXED = "tickTime", "maxDeliveryDelayInMillis", "fixedDeliveryDelayInMillis"


def fixed(delay_ms, *, active=None):
    return P(active, fixed_delivery_delay_ms=delay_ms)


def longest(delay_ms):
    return P(max_delivery_delay_ms=delay_ms)


def test_an_update_replaces_what_it_names_and_keeps_the_rest():
    before = P(active=True, max_delivery_delay_ms=60_000, fixed_delivery_delay_ms=5_000)
    assert before.updated(P(tick_time_ms=10)) == P(True, 10, 60_000, 5_000)
    assert before.updated(fixed(0)) == P(True, None, 60_000, 0)
    assert before.updated(P(active=False)) == P(False, None, 60_000, 5_000)
    assert before.updated(P()) == before


def test_each_field_comes_from_the_nearest_level_that_speaks_of_it():
    namespace = P(active=False, tick_time_ms=50, max_delivery_delay_ms=60_000)
    applied = effective(P(tick_time_ms=5), namespace, BrokerDelayedDelivery(True, 500, 9))
    levels = FieldLevels(Level.NAMESPACE, Level.TOPIC, Level.NAMESPACE, Level.BROKER)
    assert applied == EffectiveDelayedDelivery(False, 5, 60_000, 0, levels)
    assert applied.to_json() == {"active": False, TICK: 5, LONGEST: 60_000, FIXED: 0}


@pytest.mark.parametrize("asked_ms", [1_061, 2**63 - 1])
def test_a_delay_above_the_maximum_is_refused_in_pulsars_words(asked_ms):
    policies = effective(P(), longest(60), ON)
    with pytest.raises(DeliveryDelayExceededError) as caught:
        policies.deliver_at(1_000, asked_ms)
    assert str(caught.value) == "Exceeds max allowed delivery delay of 60 milliseconds"
    assert (caught.value.max_delivery_delay_ms, caught.value.level) == (60, Level.NAMESPACE)


@pytest.mark.parametrize("asked_ms", [-1, -(2**63)])
def test_any_time_below_0_asks_for_no_delay(asked_ms):
    assert effective(P(), longest(60), ON).deliver_at(1_000, asked_ms) == (asked_ms, False)


SWITCHES_OFF = "of the topic would switch off a policy of its namespace: "
NOT_KEPT = "{} (of the {}) would not be kept: delayed delivery is not active (says the {})"


def not_kept(delay_ms, owner, says):
    return f"{FIXED} {NOT_KEPT.format(delay_ms, owner, says)}"


UPDATES_OF_A_TOPIC = [  # the update, its namespace, its broker, what is stored, and the reason if it is refused
    (fixed(0), fixed(60), ON, P(), f"{FIXED} 0 {SWITCHES_OFF}{FIXED} 60"),
    (P(True, 5, 0), longest(70), ON, P(), f"{LONGEST} 0 {SWITCHES_OFF}{LONGEST} 70"),
    (P(False), fixed(60), ON, P(), f"active false {SWITCHES_OFF}{FIXED} 60"),
    (fixed(7, active=False), P(), ON, P(), not_kept(7, "topic", "topic")),
    (fixed(7), P(active=False), ON, P(), not_kept(7, "topic", "namespace")),
    (fixed(7), P(), OFF, P(), not_kept(7, "topic", "broker")),
    (P(), P(), OFF, P(), None),
    (fixed(7), P(), ON, P(), None),
    (fixed(7, active=True), P(active=False), OFF, P(), None),
    (fixed(0, active=False), P(active=True), ON, P(), None),
    (P(active=False), longest(60), ON, P(), None),
    (P(None, None, 5, 7), fixed(60), ON, P(), None),
    (P(None, None, 0, 0), longest(0), ON, P(), None),
    # A 0 that no longer counts is no reason to refuse another update.
    (P(tick_time_ms=5), longest(60), ON, longest(0), None),
    (longest(0), longest(60), ON, longest(0), f"{LONGEST} 0 {SWITCHES_OFF}{LONGEST} 60"),
    # An update is judged with what is stored.
    (P(active=False), P(), ON, fixed(7), not_kept(7, "topic", "topic")),
    (fixed(0, active=False), P(), ON, fixed(7), None),
    # One whose delay is not kept may change all else.
    (P(tick_time_ms=5), P(), OFF, fixed(7), None),
    (fixed(0), P(), OFF, fixed(7), None),
    (P(active=True), P(), OFF, fixed(7), None),
    (fixed(8), P(), OFF, fixed(7), not_kept(8, "topic", "broker")),
]


@pytest.mark.parametrize(("update", "namespace", "broker", "stored", "reason"), UPDATES_OF_A_TOPIC)
def test_what_a_topic_may_and_may_not_set(update, namespace, broker, stored, reason):
    if reason is None:
        check_topic_settable(update, namespace, broker, stored=stored)
        return
    with pytest.raises(DelayPolicyRefusedError) as caught:
        check_topic_settable(update, namespace, broker, stored=stored)
    assert (str(caught.value), caught.value.field) == (reason, reason.split()[0])


ONE = {"a": fixed(7)}
POLICIES_OF_A_NAMESPACE = [  # afterwards, its broker, what is stored, its topics, and the reason if they are refused
    (fixed(60), OFF, None, {}, r"\(of the namespace\) .*\(says the broker\)"),
    (fixed(60, active=False), ON, None, {}, r"\(of the namespace\) .*\(says the namespace\)"),
    (P(False), ON, None, {"a": P(None, 5), "b": fixed(7)}, r"7 \(of the topic\) .* for topic b: .*\(says the namesp"),
    (P(False), ON, None, dict.fromkeys("abcd", fixed(7)), r"; it would be so for 4 topics, such as a, b, c$"),
    (P(), OFF, None, {"b": fixed(7)}, r"for topic b: .*\(says the broker\)"),  # the remains of a removal
    (P(active=False), ON, None, {"a": fixed(7, active=True), "b": fixed(0)}, None),
    (fixed(60, active=True), OFF, None, {}, None),
    # It begins to enforce a policy that some topic had switched off: the topic's value no longer counts.
    (P(None, None, 60, 60), ON, None, {"a": P(False, 5, 0, 0)}, None),
    (P(), OFF, None, {"a": fixed(7, active=True)}, None),
    # What was not kept before is no reason to refuse; what a change breaks is.
    (P(None, 1, None, 5), OFF, fixed(5), ONE, None),
    (P(), OFF, fixed(5), ONE, None),
    (P(tick_time_ms=1), OFF, P(), ONE, None),
    (P(None, 1, None, 5), OFF, None, ONE, r"5 \(of the namespace\)"),
    (P(tick_time_ms=1), OFF, None, ONE, "for topic a"),
    (fixed(5), OFF, P(), ONE, r"5 \(of the namespace\)"),
    (fixed(6), OFF, fixed(5), ONE, r"6 \(of the namespace\)"),
    (P(tick_time_ms=1), OFF, P(active=True), ONE, r"7 \(of the topic\) would not be kept for topic a"),
    (fixed(5), OFF, fixed(5, active=True), ONE, r"5 \(of the namespace\)"),
]


@pytest.mark.parametrize(("after", "broker", "stored", "topics", "reason"), POLICIES_OF_A_NAMESPACE)
def test_what_a_namespace_may_and_may_not_set(after, broker, stored, topics, reason):
    if reason is None:
        check_namespace_settable(after, broker, stored=stored, topics=topics)
        return
    with pytest.raises(DelayPolicyRefusedError, match=reason):
        check_namespace_settable(after, broker, stored=stored, topics=topics)
