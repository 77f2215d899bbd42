"""Resolves the policies in effect from those of topic, namespace and broker, and checks which may be set."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ackstate.analysis.admin.answers import LOG
from ackstate.cursor.config import CursorConfig
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.limits import BrokerDelayedDelivery, DelayedDeliveryPolicies, GateLimits
from ackstate.limits.policies import (
    Policies,
    check_fixed_delay_kept,
    check_namespace_settable,
    check_topic_settable,
    effective,
)
from ackstate.pulsar_conf import check_spelling, keys_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ackstate.limits import EffectiveDelayedDelivery
    from ackstate.limits.policies import PolicyOwner, PolicyStore

_NOTHING = DelayedDeliveryPolicies()
# The broker's properties that `BrokerDelayedDelivery`, `GateLimits` and `BrokerLimit` read.
_KEYS = keys_of("GateLimits", "BrokerLimit", "BrokerDelayedDelivery")


class NumberPolicy(StrEnum):
    """A policy that is one whole number, by Pulsar's name."""

    BECOME_OLD_ACK_RECORD_SECONDS = "becomeOldAckRecordSeconds"
    MAX_UNPERSIST_ACK_RECORDS_BYTES = "maxUnPersistAckRecordsBytes"

    def of(self, policies: Policies | BrokerPolicies) -> int | None:
        """Return the number of this policy."""
        number: int | None = getattr(policies, _FIELDS[self])
        return number


_FIELDS = {
    NumberPolicy.BECOME_OLD_ACK_RECORD_SECONDS: "become_old_ack_record_seconds",
    NumberPolicy.MAX_UNPERSIST_ACK_RECORDS_BYTES: "max_unpersisted_ack_record_bytes",
}


@dataclass(frozen=True, slots=True)
class BrokerPolicies:
    """Policies of the broker, used if neither a topic nor its namespace sets them; the defaults are Pulsar's."""

    delayed_delivery: BrokerDelayedDelivery = field(default_factory=BrokerDelayedDelivery)  # Policies of message delays
    become_old_ack_record_seconds: int = 0  # As in `CursorConfig`
    # As in `GateLimits`.
    max_unpersisted_ack_record_bytes: int = field(default_factory=lambda: GateLimits().max_unpersisted_ack_record_bytes)
    topic_may_disable: bool = False  # Whether a topic may switch off a delay or a maximum that its namespace enforces

    @classmethod
    def from_pulsar_conf(cls, properties: Mapping[str, str], *, topic_may_disable: bool = False) -> BrokerPolicies:
        """Return the policies of the properties of a ``broker.conf``."""
        check_spelling(properties, _KEYS)
        seconds = CursorConfig.from_pulsar_conf(properties).become_old_ack_record_seconds
        return cls(
            BrokerDelayedDelivery.from_pulsar_conf(properties),
            seconds,
            GateLimits.from_pulsar_conf(properties).max_unpersisted_ack_record_bytes,
            topic_may_disable,
        )


class PolicyChange(NamedTuple):
    """The policies of an owner before and after a change, and their version now."""

    before: Policies
    after: Policies
    version: int


@final
class LevelledPolicies:
    """The stored policies of namespaces and topics, together with those of the broker.

    Delay policies of one level restrict the others, which are separate values of the store. So changes of delays are
    checked and written one at a time, and never contradict each other. Topics whose policies cannot be read are ignored
    in these checks.

    All methods raise as `PolicyStore`. Thread-safe.
    """

    def __init__(self, store: PolicyStore, broker: BrokerPolicies) -> None:
        self.store = store
        self._broker = broker
        # Held from reading the other levels until the write is done.
        self._changes = threading.Lock()

    def applied_delays(self, owner: PolicyOwner) -> dict[str, bool | int]:
        """Return the delays in effect, by Pulsar's JSON names; every field is present."""
        return self._effective(owner).to_json()

    def log_not_kept(self) -> None:
        """Warn of each owner whose fixed delay has no effect because delayed delivery is not active.

        A change that would lead there is refused, but a broker that is started with other properties can.

        Complexity: O(owners of policies).
        """
        try:
            owners = [*self.store.namespaces(), *self.store.topics()]
        except AckStateError as error:
            LOG.error("the policies cannot be listed: %s", error)
            return
        for owner in owners:
            try:
                applied = self._effective(owner)
            except AckStateError as error:
                LOG.error("%s", error)
                continue
            if not applied.keeps_fixed_delay:
                LOG.warning(
                    "the fixed delay of %s, %d ms, has no effect: delayed delivery is not active (set by the %s)",
                    owner, applied.fixed_delivery_delay_ms, applied.levels.active.value,
                )  # fmt: skip

    def applied_number(self, owner: PolicyOwner, policy: NumberPolicy) -> int | None:
        """Return the number in effect: the owner's, else that of its namespace, else the broker's."""
        for each in (owner, owner.of_namespace):
            number = policy.of(self.store.read(each).policies)
            if number is not None:
                return number
        return policy.of(self._broker)

    def update_delays(
        self, owner: PolicyOwner, update: DelayedDeliveryPolicies, *, expected_version: int | None
    ) -> PolicyChange:
        """Set the fields of an update and keep the others."""

        def _changed(policies: Policies) -> Policies:
            stored = policies.delayed_delivery
            if owner.topic is None:
                self._check_namespace(owner, stored.updated(update), stored)
            else:
                self._check_topic(owner, update, stored)
            return replace(policies, delayed_delivery=stored.updated(update))

        with self._changes:
            return self._update(owner, _changed, expected_version=expected_version)

    def remove_delays(self, owner: PolicyOwner, *, expected_version: int | None) -> PolicyChange:
        """Remove the delay policies of an owner."""

        def _changed(policies: Policies) -> Policies:
            stored = policies.delayed_delivery
            if owner.topic is None:
                self._check_namespace(owner, _NOTHING, stored)
            else:
                self._check_removal(owner, stored)
            return replace(policies, delayed_delivery=_NOTHING)

        with self._changes:
            return self._update(owner, _changed, expected_version=expected_version)

    def put_number(
        self, owner: PolicyOwner, policy: NumberPolicy, number: int | None, *, expected_version: int | None
    ) -> PolicyChange:
        """Set a number, or remove it with None."""
        changed: dict[str, Any] = {_FIELDS[policy]: number}
        return self._update(owner, lambda policies: replace(policies, **changed), expected_version=expected_version)

    def _update(
        self, owner: PolicyOwner, change: Callable[[Policies], Policies], *, expected_version: int | None
    ) -> PolicyChange:
        before = Policies()

        def noted(policies: Policies) -> Policies:
            nonlocal before
            before = policies
            return change(policies)

        policies, version = self.store.update(owner, noted, expected_version=expected_version)
        return PolicyChange(before, policies, version)

    def _check_topic(
        self, owner: PolicyOwner, update: DelayedDeliveryPolicies, stored: DelayedDeliveryPolicies
    ) -> None:
        check_topic_settable(
            update,
            self._own_delays(owner.of_namespace),
            self._broker.delayed_delivery,
            stored=stored,
            topic_may_disable=self._broker.topic_may_disable,
        )

    def _check_removal(self, topic: PolicyOwner, stored: DelayedDeliveryPolicies) -> None:
        namespace = self._known_delays(topic.of_namespace)
        if namespace is None or not (before := self._resolve(stored, namespace)).keeps_fixed_delay:
            return
        check_fixed_delay_kept(before, self._resolve(_NOTHING, namespace))

    def _check_namespace(
        self, owner: PolicyOwner, delays: DelayedDeliveryPolicies, stored: DelayedDeliveryPolicies
    ) -> None:
        known = ((str(topic), self._known_delays(topic)) for topic in self.store.topics(owner))
        check_namespace_settable(
            delays,
            self._broker.delayed_delivery,
            stored=stored,
            topics={name: topic for name, topic in known if topic is not None},
            topic_may_disable=self._broker.topic_may_disable,
        )

    def _effective(self, owner: PolicyOwner) -> EffectiveDelayedDelivery:
        topic = self._own_delays(owner) if owner.topic is not None else _NOTHING
        return self._resolve(topic, self._own_delays(owner.of_namespace))

    def _resolve(self, topic: DelayedDeliveryPolicies, namespace: DelayedDeliveryPolicies) -> EffectiveDelayedDelivery:
        broker = self._broker
        return effective(topic, namespace, broker.delayed_delivery, topic_may_disable=broker.topic_may_disable)

    def _known_delays(self, owner: PolicyOwner) -> DelayedDeliveryPolicies | None:
        """Return the delay policies of an owner, None if they cannot be read."""
        try:
            return self._own_delays(owner)
        except (CorruptStateError, UnsupportedVersionError) as error:
            LOG.error("excluded from the check: %s", error)
            return None

    def _own_delays(self, owner: PolicyOwner) -> DelayedDeliveryPolicies:
        return self.store.read(owner).policies.delayed_delivery
