"""The effective delivery-delay policies of a topic, and their decisions, in tables."""

from __future__ import annotations

import pytest

from ackstate.limits.policies import (
    BrokerDelayedDelivery,
    Decision,
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
BROKER = BrokerDelayedDelivery()
NOTHING = P()
LAST_MS = 2**63 - 1
TOPIC, NAMESPACE, OF_BROKER = Level.TOPIC, Level.NAMESPACE, Level.BROKER


@pytest.mark.parametrize(
    ("values", "error", "saying"),
    [
        ({"active": 1}, TypeError, "active must be true or false, got 1"),
        ({"active": "true"}, TypeError, "active must be true or false, got 'true'"),
        (
            {"tick_time_ms": True},
            TypeError,
            r"tick_time_ms \(tickTime\) must be a whole number of milliseconds, got True",
        ),
        ({"tick_time_ms": 0}, ValueError, r"tick_time_ms \(tickTime\) must be in 1\.\.9223372036854775807, got 0"),
        ({"tick_time_ms": 1.0}, TypeError, "tickTime"),
        ({"max_delivery_delay_ms": -1}, ValueError, r"\(maxDeliveryDelayInMillis\) must be in 0\.\..*, got -1"),
        ({"max_delivery_delay_ms": 2**63}, ValueError, "maxDeliveryDelayInMillis.*got 9223372036854775808"),
        ({"max_delivery_delay_ms": "5"}, TypeError, "maxDeliveryDelayInMillis.*got '5'"),
        ({"fixed_delivery_delay_ms": -5}, ValueError, r"\(fixedDeliveryDelayInMillis\) must be in 0\.\..*, got -5"),
        ({"fixed_delivery_delay_ms": 2**63}, ValueError, "fixedDeliveryDelayInMillis"),
        ({"fixed_delivery_delay_ms": 5.5}, TypeError, "fixedDeliveryDelayInMillis.*got 5.5"),
    ],
)
def test_a_wrong_value_names_its_field(values, error, saying):
    with pytest.raises(error, match=saying):
        P(**values)
    if "fixed_delivery_delay_ms" not in values:
        with pytest.raises(error, match=saying):
            BrokerDelayedDelivery(**values)


def test_the_bounds_are_taken():
    policies = P(active=False, tick_time_ms=1, max_delivery_delay_ms=0, fixed_delivery_delay_ms=LAST_MS)
    assert policies.to_json() == {
        "active": False,
        "tickTime": 1,
        "maxDeliveryDelayInMillis": 0,
        "fixedDeliveryDelayInMillis": 9223372036854775807,
    }


@pytest.mark.parametrize(
    ("document", "policies"),
    [
        ({}, P()),
        ({"active": None, "tickTime": None}, P()),
        ({"active": False}, P(active=False)),
        ({"tickTime": 1000, "maxDeliveryDelayInMillis": 0}, P(tick_time_ms=1000, max_delivery_delay_ms=0)),
        ({"fixedDeliveryDelayInMillis": 5_000}, P(fixed_delivery_delay_ms=5_000)),
    ],
)
def test_json_is_read_and_null_is_unset(document, policies):
    assert P.from_json(document) == policies
    assert policies.to_json() == {name: value for name, value in document.items() if value is not None}


@pytest.mark.parametrize(
    ("document", "error", "saying"),
    [
        ([], TypeError, r"an object, got \[\]"),
        (None, TypeError, "an object, got None"),
        (
            {"tick_time_ms": 5},
            ValueError,
            "unknown field 'tick_time_ms' of delayed delivery policies; did you mean 'tickTime'?",
        ),
        (
            {"maxDeliveryDelay": 5},
            ValueError,
            "unknown field 'maxDeliveryDelay' .*did you mean 'maxDeliveryDelayInMillis'",
        ),
        ({7: 5}, ValueError, "unknown field 7 of delayed delivery policies; known are active, tickTime, "),
        ({"tickTime": "1s"}, TypeError, "tickTime.*got '1s'"),
        ({"active": 0}, TypeError, "active must be true or false, got 0"),
        ({"fixedDeliveryDelayInMillis": -1}, ValueError, "fixedDeliveryDelayInMillis.*got -1"),
    ],
)
def test_json_that_is_wrong_is_refused_by_name(document, error, saying):
    with pytest.raises(error, match=saying):
        P.from_json(document)


def test_an_update_replaces_what_it_names_and_keeps_the_rest():
    before = P(active=True, max_delivery_delay_ms=60_000, fixed_delivery_delay_ms=5_000)
    assert before.updated(P(tick_time_ms=10)) == P(True, 10, 60_000, 5_000)
    assert before.updated(P(fixed_delivery_delay_ms=0)) == P(True, None, 60_000, 0)
    assert before.updated(P(active=False)) == P(False, None, 60_000, 5_000)
    assert before.updated(P()) == before


@pytest.mark.parametrize(
    ("properties", "broker"),
    [
        ({}, BrokerDelayedDelivery(active=True, tick_time_ms=1000, max_delivery_delay_ms=0)),
        ({"delayedDeliveryEnabled": " FALSE "}, BrokerDelayedDelivery(active=False)),
        ({"delayedDeliveryTickTimeMillis": "5"}, BrokerDelayedDelivery(tick_time_ms=5)),
        ({"delayedDeliveryMaxDelayInMillis": "+60000"}, BrokerDelayedDelivery(max_delivery_delay_ms=60_000)),
        ({"delayedDeliveryMaxDelayInMillis": "-1"}, BrokerDelayedDelivery(max_delivery_delay_ms=0)),
        ({"delayedDeliveryTickTimeMillis": "", "delayedDeliveryMaxNumBuckets": "7"}, BrokerDelayedDelivery()),
    ],
)
def test_a_brokers_properties_are_read(properties, broker):
    assert BrokerDelayedDelivery.from_pulsar_conf(properties) == broker


@pytest.mark.parametrize(
    ("properties", "error", "saying"),
    [
        ({"delayedDeliveryEnabled": "yes"}, ValueError, "delayedDeliveryEnabled must be true or false, got 'yes'"),
        ({"delayedDeliveryEnabled": True}, TypeError, "delayedDeliveryEnabled must be text, got True"),
        ({"delayedDeliveryTickTimeMillis": "0"}, ValueError, r"delayedDeliveryTickTimeMillis .* from 1 .*got '0'"),
        ({"delayedDeliveryTickTimeMillis": "1s"}, ValueError, "delayedDeliveryTickTimeMillis .*got '1s'"),
        ({"delayedDeliveryMaxDelayInMillis": "1e3"}, ValueError, "delayedDeliveryMaxDelayInMillis"),
        ({"delayedDeliveryMaxDelayInMillis": "9223372036854775808"}, ValueError, "delayedDeliveryMaxDelayInMillis"),
        ({"delayedDeliveryMaxDelayInMillis": "1" * 5_000}, ValueError, "delayedDeliveryMaxDelayInMillis"),
        (
            {"delayedDeliveryMaxDeliveryDelayInMillis": "5"},
            ValueError,
            "'delayedDeliveryMaxDeliveryDelayInMillis'; did you mean 'delayedDeliveryMaxDelayInMillis'",
        ),
    ],
)
def test_a_malformed_property_names_its_key(properties, error, saying):
    with pytest.raises(error, match=saying):
        BrokerDelayedDelivery.from_pulsar_conf(properties)


def test_each_field_comes_from_the_nearest_level_that_speaks_of_it():
    topic = P(tick_time_ms=5)
    namespace = P(active=False, tick_time_ms=50, max_delivery_delay_ms=60_000)
    applied = effective(topic, namespace, BrokerDelayedDelivery(True, 500, 9))
    assert applied == EffectiveDelayedDelivery(
        active=False,
        tick_time_ms=5,
        max_delivery_delay_ms=60_000,
        fixed_delivery_delay_ms=0,
        levels=FieldLevels(NAMESPACE, TOPIC, NAMESPACE, OF_BROKER),
    )
    assert applied.to_json() == {
        "active": False,
        "tickTime": 5,
        "maxDeliveryDelayInMillis": 60_000,
        "fixedDeliveryDelayInMillis": 0,
    }


# The values of a topic and its namespace, of which one sets something; the one that counts, if enforced and if not.
SAID = [
    (0, None, (0, TOPIC), (0, TOPIC)),
    (7, None, (7, TOPIC), (7, TOPIC)),
    (None, 0, (0, NAMESPACE), (0, NAMESPACE)),
    (0, 0, (0, TOPIC), (0, TOPIC)),
    (7, 0, (7, TOPIC), (7, TOPIC)),
    (None, 60, (60, NAMESPACE), (60, NAMESPACE)),
    (0, 60, (60, NAMESPACE), (0, TOPIC)),
    (7, 60, (7, TOPIC), (7, TOPIC)),
    (90, 60, (90, TOPIC), (90, TOPIC)),
]


@pytest.mark.parametrize(
    ("topic", "namespace", "enforcing", "lenient"),
    [
        (None, None, (0, OF_BROKER), (0, OF_BROKER)),
        *SAID,
    ],
)
def test_a_fixed_delay_in_every_combination(topic, namespace, enforcing, lenient):
    for topic_may_disable, (expected, level) in [(False, enforcing), (True, lenient)]:
        applied = effective(
            P(fixed_delivery_delay_ms=topic),
            P(fixed_delivery_delay_ms=namespace),
            BROKER,
            topic_may_disable=topic_may_disable,
        )
        assert (applied.fixed_delivery_delay_ms, applied.levels.fixed_delivery_delay_ms) == (expected, level)


@pytest.mark.parametrize(
    ("topic", "namespace", "enforcing", "lenient"),
    [
        (None, None, (30, OF_BROKER), (30, OF_BROKER)),
        *SAID,
    ],
)
def test_a_maximum_in_every_combination_over_one_of_the_broker(topic, namespace, enforcing, lenient):
    for topic_may_disable, (expected, level) in [(False, enforcing), (True, lenient)]:
        applied = effective(
            P(max_delivery_delay_ms=topic),
            P(max_delivery_delay_ms=namespace),
            BrokerDelayedDelivery(max_delivery_delay_ms=30),
            topic_may_disable=topic_may_disable,
        )
        assert (applied.max_delivery_delay_ms, applied.levels.max_delivery_delay_ms) == (expected, level)


@pytest.mark.parametrize("broker", [True, False])
@pytest.mark.parametrize(
    ("topic", "namespace", "fixed_ms", "expected"),
    [
        # Nothing is enforced: the nearest word counts.
        (False, None, 0, (False, TOPIC)),
        (False, True, 0, (False, TOPIC)),
        (False, True, None, (False, TOPIC)),
        (True, False, 0, (True, TOPIC)),
        (None, False, 0, (False, NAMESPACE)),
        # A topic does not get around its namespace's fixed delay, but may stand by it.
        (False, True, 60, (True, NAMESPACE)),
        (True, True, 60, (True, TOPIC)),
        (True, False, 60, (True, TOPIC)),
        (False, False, 60, (False, NAMESPACE)),
        (None, True, 60, (True, NAMESPACE)),
    ],
)
def test_active_in_every_combination(topic, namespace, fixed_ms, expected, broker):
    applied = effective(
        P(active=topic), P(active=namespace, fixed_delivery_delay_ms=fixed_ms), BrokerDelayedDelivery(active=broker)
    )
    assert (applied.active, applied.levels.active) == expected


@pytest.mark.parametrize("broker", [True, False])
def test_active_is_the_brokers_where_nobody_else_counts(broker):
    of_broker = BrokerDelayedDelivery(active=broker)
    for topic, namespace in [(P(), P()), (P(active=False), P(fixed_delivery_delay_ms=60))]:
        applied = effective(topic, namespace, of_broker)
        assert (applied.active, applied.levels.active) == (broker, OF_BROKER)


def test_a_topic_with_a_fixed_delay_of_its_own_is_not_active_by_its_own_word_only():
    namespace = P(active=True, fixed_delivery_delay_ms=60)
    topic = P(active=False, fixed_delivery_delay_ms=7)
    assert effective(topic, namespace, BROKER).active is True
    assert effective(topic, namespace, BROKER, topic_may_disable=True).active is False


def test_a_maximum_does_not_keep_a_topic_active():
    """A message delivered at once is not delayed for longer than allowed."""
    assert effective(P(active=False), P(active=True, max_delivery_delay_ms=60), BROKER).active is False


FIXED = EffectiveDelayedDelivery(fixed_delivery_delay_ms=5_000, max_delivery_delay_ms=60)
MAXIMUM = EffectiveDelayedDelivery(max_delivery_delay_ms=60)
FREE = EffectiveDelayedDelivery()
INACTIVE = EffectiveDelayedDelivery(active=False, max_delivery_delay_ms=60, fixed_delivery_delay_ms=5_000)


@pytest.mark.parametrize(
    ("policies", "publish_ms", "asked_ms", "stored_ms", "overrides"),
    [
        (FIXED, 1_000, -1, 6_000, False),
        (FIXED, 1_000, 0, 6_000, True),
        (FIXED, 1_000, 1_500, 6_000, True),
        (FIXED, 1_000, 6_000, 6_000, True),
        (FIXED, 1_000, 10**9, 6_000, True),
        (FIXED, LAST_MS - 10, -1, LAST_MS, False),
        (MAXIMUM, 1_000, -1, -1, False),
        (MAXIMUM, 1_000, 0, 0, False),
        (MAXIMUM, 1_000, 999, 999, False),
        (MAXIMUM, 1_000, 1_060, 1_060, False),
        (FREE, 1_000, -1, -1, False),
        (FREE, 1_000, LAST_MS, LAST_MS, False),
        (INACTIVE, 1_000, -1, -1, False),
        (INACTIVE, 1_000, 10**9, -1, False),
    ],
)
def test_what_is_decided_of_a_message(policies, publish_ms, asked_ms, stored_ms, overrides):
    assert policies.deliver_at(publish_ms, asked_ms) == Decision(stored_ms, overrides)


@pytest.mark.parametrize("asked_ms", [1_061, LAST_MS])
def test_a_delay_above_the_maximum_is_refused_in_pulsars_words(asked_ms):
    policies = effective(P(), P(max_delivery_delay_ms=60), BROKER)
    with pytest.raises(DeliveryDelayExceededError) as caught:
        policies.deliver_at(1_000, asked_ms)
    assert str(caught.value) == "Exceeds max allowed delivery delay of 60 milliseconds"
    assert (caught.value.max_delivery_delay_ms, caught.value.level) == (60, NAMESPACE)


@pytest.mark.parametrize("policies", [FIXED, MAXIMUM, FREE, INACTIVE])
@pytest.mark.parametrize(
    ("times", "error", "saying"),
    [
        ((-1, 5), ValueError, "publish_time_ms must be in 0"),
        ((2**63, 5), ValueError, "publish_time_ms"),
        ((5, 2**63), ValueError, "deliver_at_ms"),
        ((5, -(2**63) - 1), ValueError, "deliver_at_ms"),
        ((5.0, 5), TypeError, "publish_time_ms .*got 5.0"),
        ((5, None), TypeError, "deliver_at_ms .*got None"),
    ],
)
def test_a_time_that_is_none_is_refused(policies, times, error, saying):
    with pytest.raises(error, match=saying):
        policies.deliver_at(*times)


@pytest.mark.parametrize(
    ("topic", "namespace", "broker_active", "saying", "field"),
    [
        (
            P(fixed_delivery_delay_ms=0),
            P(fixed_delivery_delay_ms=60),
            True,
            "fixedDeliveryDelayInMillis 0 of the topic would switch off a policy of its namespace: "
            "fixedDeliveryDelayInMillis 60",
            "fixedDeliveryDelayInMillis",
        ),
        (
            P(active=True, tick_time_ms=5, max_delivery_delay_ms=0),
            P(max_delivery_delay_ms=70),
            True,
            "maxDeliveryDelayInMillis 0 of the topic would switch off a policy of its namespace: "
            "maxDeliveryDelayInMillis 70",
            "maxDeliveryDelayInMillis",
        ),
        (
            P(active=False),
            P(fixed_delivery_delay_ms=60),
            True,
            "active false of the topic would switch off a policy of its namespace: fixedDeliveryDelayInMillis 60",
            "active",
        ),
        (
            P(active=False, fixed_delivery_delay_ms=7),
            P(),
            True,
            "fixedDeliveryDelayInMillis 7 (of the topic) would not be kept: delayed delivery is not active "
            "(says the topic)",
            "fixedDeliveryDelayInMillis",
        ),
        (
            P(fixed_delivery_delay_ms=7),
            P(active=False),
            True,
            "fixedDeliveryDelayInMillis 7 (of the topic) would not be kept: delayed delivery is not active "
            "(says the namespace)",
            "fixedDeliveryDelayInMillis",
        ),
        (
            P(fixed_delivery_delay_ms=7),
            P(),
            False,
            "fixedDeliveryDelayInMillis 7 (of the topic) would not be kept: delayed delivery is not active "
            "(says the broker)",
            "fixedDeliveryDelayInMillis",
        ),
    ],
)
def test_what_a_topic_may_not_set(topic, namespace, broker_active, saying, field):
    with pytest.raises(DelayPolicyRefusedError) as caught:
        check_topic_settable(topic, namespace, BrokerDelayedDelivery(active=broker_active))
    assert (str(caught.value), caught.value.field) == (saying, field)


@pytest.mark.parametrize(
    ("topic", "namespace", "broker_active"),
    [
        (P(), P(), False),
        (P(fixed_delivery_delay_ms=7), P(), True),
        (P(active=True, fixed_delivery_delay_ms=7), P(active=False), False),
        (P(active=False, fixed_delivery_delay_ms=0), P(active=True), True),
        (P(active=False), P(max_delivery_delay_ms=60), True),
        (P(fixed_delivery_delay_ms=7, max_delivery_delay_ms=5), P(fixed_delivery_delay_ms=60), True),
        (P(max_delivery_delay_ms=0, fixed_delivery_delay_ms=0), P(max_delivery_delay_ms=0), True),
    ],
)
def test_what_a_topic_may_set(topic, namespace, broker_active):
    check_topic_settable(topic, namespace, BrokerDelayedDelivery(active=broker_active))


def test_a_0_that_no_longer_counts_does_not_stand_in_the_way_of_an_update():
    namespace = P(max_delivery_delay_ms=60)
    stored = P(max_delivery_delay_ms=0)
    check_topic_settable(P(tick_time_ms=5), namespace, BROKER, stored=stored)
    with pytest.raises(DelayPolicyRefusedError, match="maxDeliveryDelayInMillis 0 of the topic"):
        check_topic_settable(P(max_delivery_delay_ms=0), namespace, BROKER, stored=stored)


def test_an_update_is_judged_with_what_is_stored():
    with pytest.raises(DelayPolicyRefusedError, match=r"fixedDeliveryDelayInMillis 7 \(of the topic\) would not"):
        check_topic_settable(P(active=False), P(), BROKER, stored=P(fixed_delivery_delay_ms=7))
    check_topic_settable(P(active=False, fixed_delivery_delay_ms=0), P(), BROKER, stored=P(fixed_delivery_delay_ms=7))


def test_a_topic_that_may_disable_does_so_as_a_whole():
    enforced = P(fixed_delivery_delay_ms=60, max_delivery_delay_ms=60)
    check_topic_settable(
        P(active=False, max_delivery_delay_ms=0, fixed_delivery_delay_ms=0), enforced, BROKER, topic_may_disable=True
    )
    with pytest.raises(DelayPolicyRefusedError, match=r"fixedDeliveryDelayInMillis 60 \(of the namespace\) would not"):
        check_topic_settable(P(active=False), enforced, BROKER, topic_may_disable=True)


@pytest.mark.parametrize(
    ("namespace", "broker_active", "topics", "saying"),
    [
        (P(fixed_delivery_delay_ms=60), False, {}, r"\(of the namespace\) .*\(says the broker\)"),
        (P(active=False, fixed_delivery_delay_ms=60), True, {}, r"\(of the namespace\) .*\(says the namespace\)"),
        (
            P(active=False),
            True,
            {"a": P(tick_time_ms=5), "b": P(fixed_delivery_delay_ms=7)},
            r"7 \(of the topic\) would not be kept for topic b: .*\(says the namespace\)",
        ),
        # The remains of a removal.
        (P(), False, {"b": P(fixed_delivery_delay_ms=7)}, r"for topic b: .*\(says the broker\)"),
    ],
)
def test_what_a_namespace_may_not_set(namespace, broker_active, topics, saying):
    with pytest.raises(DelayPolicyRefusedError, match=saying):
        check_namespace_settable(namespace, BrokerDelayedDelivery(active=broker_active), topics=topics)


@pytest.mark.parametrize(
    ("namespace", "broker_active", "topics"),
    [
        (P(active=False), True, {"a": P(active=True, fixed_delivery_delay_ms=7), "b": P(fixed_delivery_delay_ms=0)}),
        (P(active=True, fixed_delivery_delay_ms=60), False, {}),
        # It begins to enforce a policy that some topic had switched off: the topic's value no longer counts.
        (P(fixed_delivery_delay_ms=60, max_delivery_delay_ms=60), True, {"a": P(False, 5, 0, 0)}),
        (P(), False, {"a": P(active=True, fixed_delivery_delay_ms=7)}),
    ],
)
def test_what_a_namespace_may_set(namespace, broker_active, topics):
    check_namespace_settable(namespace, BrokerDelayedDelivery(active=broker_active), topics=topics)


INACTIVE = BrokerDelayedDelivery(active=False)


@pytest.mark.parametrize(
    ("stored", "after", "topics"),
    [
        (
            P(fixed_delivery_delay_ms=5),
            P(fixed_delivery_delay_ms=5, tick_time_ms=1),
            {"a": P(fixed_delivery_delay_ms=7)},
        ),
        (P(fixed_delivery_delay_ms=5), P(), {"a": P(fixed_delivery_delay_ms=7)}),
        (P(), P(tick_time_ms=1), {"a": P(fixed_delivery_delay_ms=7)}),
    ],
)
def test_what_was_not_kept_before_is_no_reason_to_refuse(stored, after, topics):
    check_namespace_settable(after, INACTIVE, stored=stored, topics=topics)
    with pytest.raises(DelayPolicyRefusedError):
        check_namespace_settable(after, INACTIVE, topics=topics)


@pytest.mark.parametrize(
    ("stored", "after", "saying"),
    [
        (P(), P(fixed_delivery_delay_ms=5), r"5 \(of the namespace\)"),
        (P(fixed_delivery_delay_ms=5), P(fixed_delivery_delay_ms=6), r"6 \(of the namespace\)"),
        (P(active=True), P(tick_time_ms=1), r"7 \(of the topic\) would not be kept for topic a"),
        (P(active=True, fixed_delivery_delay_ms=5), P(fixed_delivery_delay_ms=5), r"5 \(of the namespace\)"),
    ],
)
def test_what_a_change_breaks_is(stored, after, saying):
    with pytest.raises(DelayPolicyRefusedError, match=saying):
        check_namespace_settable(after, INACTIVE, stored=stored, topics={"a": P(fixed_delivery_delay_ms=7)})


def test_a_topic_whose_delay_is_not_kept_may_change_all_else():
    stored = P(fixed_delivery_delay_ms=7)
    check_topic_settable(P(tick_time_ms=5), P(), INACTIVE, stored=stored)
    check_topic_settable(P(fixed_delivery_delay_ms=0), P(), INACTIVE, stored=stored)
    check_topic_settable(P(active=True), P(), INACTIVE, stored=stored)
    with pytest.raises(DelayPolicyRefusedError, match="8"):
        check_topic_settable(P(fixed_delivery_delay_ms=8), P(), INACTIVE, stored=stored)


def test_several_topics_that_stand_in_the_way_are_counted():
    topics = {name: P(fixed_delivery_delay_ms=7) for name in "abcd"}
    with pytest.raises(DelayPolicyRefusedError, match=r"; it would be so for 4 topics, such as a, b, c$"):
        check_namespace_settable(P(active=False), BROKER, topics=topics)


def test_a_namespace_finds_a_topic_that_was_allowed_to_switch_itself_off():
    topics = {"a": P(active=False)}
    namespace = P(fixed_delivery_delay_ms=60)
    check_namespace_settable(namespace, BROKER, topics=topics)
    with pytest.raises(DelayPolicyRefusedError, match=r"for topic a: .*\(says the topic\)"):
        check_namespace_settable(namespace, BROKER, topics=topics, topic_may_disable=True)


def test_trap_a_namespace_post_with_only_a_tick_keeps_the_brokers_maximum():
    broker = BrokerDelayedDelivery(max_delivery_delay_ms=60_000)
    namespace = P().updated(P.from_json({"tickTime": 100}))
    applied = effective(P(), namespace, broker)
    assert (applied.tick_time_ms, applied.max_delivery_delay_ms) == (100, 60_000)
    assert applied.levels.max_delivery_delay_ms is OF_BROKER
    with pytest.raises(DeliveryDelayExceededError):
        applied.deliver_at(0, 60_001)


def test_trap_a_namespace_post_with_only_a_tick_leaves_delayed_delivery_active():
    assert effective(P(), P.from_json({"tickTime": 100}), BROKER).active is True


def test_trap_a_whole_object_post_on_a_topic_does_not_switch_off_a_mandatory_delay():
    namespace = P(fixed_delivery_delay_ms=5_000, max_delivery_delay_ms=60_000)
    whole = {"active": True, "tickTime": 1000, "maxDeliveryDelayInMillis": 0, "fixedDeliveryDelayInMillis": 0}
    topic = P().updated(P.from_json(whole))
    with pytest.raises(DelayPolicyRefusedError, match="would switch off a policy of its namespace"):
        check_topic_settable(topic, namespace, BROKER)
    # Nor does one that was stored before the delay became mandatory.
    applied = effective(topic, namespace, BROKER)
    assert (applied.fixed_delivery_delay_ms, applied.max_delivery_delay_ms) == (5_000, 60_000)


def test_trap_a_post_by_a_client_that_does_not_know_the_fixed_delay_keeps_it():
    """Clients before PIP-437 send the three older fields."""
    stored = P(active=True, fixed_delivery_delay_ms=5_000)
    update = P.from_json({"active": True, "tickTime": 1000, "maxDeliveryDelayInMillis": 0})
    assert stored.updated(update).fixed_delivery_delay_ms == 5_000


def test_trap_a_tick_of_0_that_nobody_meant_is_refused():
    with pytest.raises(ValueError, match="tickTime"):
        P.from_json({"active": True, "tickTime": 0})


def test_trap_an_explicit_0_disables_what_the_broker_sets():
    broker = BrokerDelayedDelivery(max_delivery_delay_ms=60_000)
    applied = effective(P(), P.from_json({"maxDeliveryDelayInMillis": 0}), broker)
    assert applied.deliver_at(0, LAST_MS) == Decision(LAST_MS, overrides_client=False)


def test_trap_a_fixed_delay_is_not_measured_by_the_maximum():
    applied = effective(P(fixed_delivery_delay_ms=90_000), P(max_delivery_delay_ms=60_000), BROKER)
    assert applied.deliver_at(0, 70_000) == Decision(90_000, overrides_client=True)
