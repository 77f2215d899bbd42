"""Delivery-delay policies against the obvious way to resolve them, and two administrators who set them in any order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate.limits.policies import (
    BrokerDelayedDelivery,
    DelayedDeliveryPolicies,
    DelayPolicyRefusedError,
    DeliveryDelayExceededError,
    EffectiveDelayedDelivery,
    Level,
    check_fixed_delay_kept,
    check_namespace_settable,
    check_topic_settable,
    effective,
)

LAST_MS = 2**63 - 1
FIELDS = ["active", "tick_time_ms", "max_delivery_delay_ms", "fixed_delivery_delay_ms"]

# Few values, so that levels agree and differ, and a 0 meets a number.
DELAYS = st.sampled_from([0, 1, 5, 60, LAST_MS])
TICKS = st.sampled_from([1, 1000])
POLICIES = st.builds(
    DelayedDeliveryPolicies,
    active=st.none() | st.booleans(),
    tick_time_ms=st.none() | TICKS,
    max_delivery_delay_ms=st.none() | DELAYS,
    fixed_delivery_delay_ms=st.none() | DELAYS,
)
BROKERS = st.builds(
    BrokerDelayedDelivery, active=st.booleans(), tick_time_ms=TICKS, max_delivery_delay_ms=st.sampled_from([0, 30])
)


def resolved(topic, namespace, broker, *, topic_may_disable):
    """Each field's value and level: the obvious way."""
    found = {}
    for name in FIELDS:
        words = [
            (getattr(topic, name), Level.TOPIC),
            (getattr(namespace, name), Level.NAMESPACE),
            (getattr(broker, name, 0), Level.BROKER),
        ]
        enforced = namespace.fixed_delivery_delay_ms if name == "active" else getattr(namespace, name)
        if not topic_may_disable and enforced and not words[0][0]:
            del words[0]
        found[name] = next((value, level) for value, level in words if value is not None)
    return found


@given(topic=POLICIES, namespace=POLICIES, broker=BROKERS, topic_may_disable=st.booleans())
def test_policies_are_resolved_like_the_model(topic, namespace, broker, topic_may_disable):
    applied = effective(topic, namespace, broker, topic_may_disable=topic_may_disable)
    expected = resolved(topic, namespace, broker, topic_may_disable=topic_may_disable)
    assert {name: (getattr(applied, name), getattr(applied.levels, name)) for name in FIELDS} == expected


PUBLISH_MS = st.sampled_from([0, 1, 1_000, LAST_MS - 5, LAST_MS])


def decided(policies, publish_ms, asked_ms):
    """The stored value and whether it overrides the client's, or the text of the refusal: the obvious way."""
    asks = asked_ms >= 0
    if not policies.active:
        return -1, False
    if policies.fixed_delivery_delay_ms > 0:
        return min(LAST_MS, publish_ms + policies.fixed_delivery_delay_ms), asks
    if asks and policies.max_delivery_delay_ms > 0 and asked_ms > publish_ms + policies.max_delivery_delay_ms:
        return f"Exceeds max allowed delivery delay of {policies.max_delivery_delay_ms} milliseconds"
    return asked_ms, False


@given(
    active=st.booleans(),
    limit_ms=DELAYS,
    fixed_ms=DELAYS,
    publish_ms=PUBLISH_MS,
    asked=st.tuples(st.sampled_from(["none", "absolute", "after"]), st.sampled_from([0, 1, 4, 5, 6, 59, 60, 61])),
)
def test_messages_are_decided_like_the_model(active, limit_ms, fixed_ms, publish_ms, asked):
    policies = EffectiveDelayedDelivery(active, max_delivery_delay_ms=limit_ms, fixed_delivery_delay_ms=fixed_ms)
    how, number = asked
    asked_ms = {"none": -1, "absolute": number, "after": min(publish_ms + number, LAST_MS)}[how]
    expected = decided(policies, publish_ms, asked_ms)
    if isinstance(expected, str):
        with pytest.raises(DeliveryDelayExceededError) as caught:
            policies.deliver_at(publish_ms, asked_ms)
        assert str(caught.value) == expected
    else:
        assert policies.deliver_at(publish_ms, asked_ms) == expected


class PolicyMachine(RuleBasedStateMachine):
    """A namespace's administrator and a topic's set and remove policies of one namespace with two topics."""

    @initialize(broker=BROKERS, topic_may_disable=st.booleans())
    def begin(self, broker, topic_may_disable):
        self.broker = broker
        self.may_disable = topic_may_disable
        self.namespace = DelayedDeliveryPolicies()
        self.topics = {"a": DelayedDeliveryPolicies(), "b": DelayedDeliveryPolicies()}
        # The writes, field by field, and never taken back.
        self.written = {"a": {}, "b": {}, "namespace": {}}
        # Whose fixed delays were not kept when a broker was started with other properties, and were not since.
        self.broken = set()

    @rule(broker=BROKERS)
    def restart(self, broker):
        self.broker = broker
        self.broken = self.not_kept()

    @rule(update=POLICIES)
    def set_namespace(self, update):
        after = self.namespace.updated(update)
        if self.is_accepted(check_namespace_settable, after, self.broker, stored=self.namespace, topics=self.topics):
            self.namespace = after
            self.note("namespace", update)

    @rule()
    def remove_namespace(self):
        after = DelayedDeliveryPolicies()
        if self.is_accepted(check_namespace_settable, after, self.broker, stored=self.namespace, topics=self.topics):
            self.namespace = after
            self.written["namespace"] = {}

    @rule(name=st.sampled_from("ab"), update=POLICIES)
    def set_topic(self, name, update):
        after = self.topics[name].updated(update)
        if self.is_accepted(check_topic_settable, update, self.namespace, self.broker, stored=self.topics[name]):
            self.topics[name] = after
            self.note(name, update)
            self.check_counts(name, update)

    @rule(name=st.sampled_from("ab"))
    def remove_topic(self, name):
        before, after = self.applied(name), DelayedDeliveryPolicies()
        if before.keeps_fixed_delay:
            try:
                check_fixed_delay_kept(before, self.resolve(after))
            except DelayPolicyRefusedError:
                return
        self.topics[name] = after
        self.written[name] = {}

    def is_accepted(self, check, *policies, **more):
        try:
            check(*policies, **more, topic_may_disable=self.may_disable)
        except DelayPolicyRefusedError:
            return False
        return True

    def note(self, where, update):
        self.written[where] |= {name: value for name in FIELDS if (value := getattr(update, name)) is not None}

    def applied(self, name):
        return self.resolve(self.topics[name])

    def resolve(self, topic):
        return effective(topic, self.namespace, self.broker, topic_may_disable=self.may_disable)

    def not_kept(self):
        """Topics with a fixed delay in force that is not kept; None for those without policies."""
        applied = {**{name: self.applied(name) for name in self.topics}, None: self.resolve(DelayedDeliveryPolicies())}
        return {name for name, each in applied.items() if each.fixed_delivery_delay_ms and not each.active}

    def check_counts(self, name, update):
        for field in FIELDS:
            value = getattr(update, field)
            assert value in {None, getattr(self.applied(name), field)}, (
                "a value that a topic was allowed to set does not count"
            )

    @invariant()
    def what_was_not_named_is_kept(self):
        stored = {**self.topics, "namespace": self.namespace}
        for where, written in self.written.items():
            assert stored[where] == DelayedDeliveryPolicies(**written), "an update changed a field that it did not name"

    @invariant()
    def a_fixed_delay_is_kept(self):
        not_kept = self.not_kept()
        assert not_kept <= self.broken, "a fixed delay is in force and not kept"
        # A policy that is kept again must not be broken again.
        self.broken = not_kept

    @invariant()
    def no_topic_escapes_what_its_namespace_enforces(self):
        if self.may_disable:
            return
        for name in self.topics:
            for field in ("max_delivery_delay_ms", "fixed_delivery_delay_ms"):
                if getattr(self.namespace, field):
                    assert getattr(self.applied(name), field) > 0, "a topic escaped its namespace"


TestPolicies = pytest.mark.slow(PolicyMachine.TestCase)
