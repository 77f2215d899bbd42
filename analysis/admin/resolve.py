"""Which policies are in force where topic, namespace and broker each may have their say, and what may be set?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, final

from cursor.config import CursorConfig
from limits import BrokerDelayedDelivery, DelayedDeliveryPolicies, GateLimits
from limits.policies import check_namespace_settable, check_topic_settable, effective

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cursor.policy_store import Policies, PolicyOwner, PolicyStore, VersionedPolicies


class NumberPolicy(StrEnum):
    """A policy that is one whole number, by Pulsar's name."""

    BECOME_OLD_ACK_RECORD_SECONDS = "becomeOldAckRecordSeconds"
    MAX_UNPERSIST_ACK_RECORDS_BYTES = "maxUnPersistAckRecordsBytes"

    def of(self, policies: Policies) -> int | None:
        """Return the number that policies have for it."""
        if self is NumberPolicy.BECOME_OLD_ACK_RECORD_SECONDS:
            return policies.become_old_ack_record_seconds
        return policies.max_unpersisted_ack_record_bytes

    def put_into(self, policies: Policies, number: int | None) -> Policies:
        """Return policies with another number for it, None for none.

        Raises:
            ValueError: The number is out of its bounds.
        """
        if self is NumberPolicy.BECOME_OLD_ACK_RECORD_SECONDS:
            return replace(policies, become_old_ack_record_seconds=number)
        return replace(policies, max_unpersisted_ack_record_bytes=number)


@dataclass(frozen=True, slots=True)
class BrokerPolicies:
    """What holds where neither a topic nor its namespace says anything; the defaults are Pulsar's.

    Attributes:
        delayed_delivery: Of message delays.
        become_old_ack_record_seconds: As in `CursorConfig`.
        max_unpersisted_ack_record_bytes: As in `GateLimits`.
        topic_may_disable: Whether a topic may switch off a delay or a maximum that its namespace enforces.
    """

    delayed_delivery: BrokerDelayedDelivery = field(default_factory=BrokerDelayedDelivery)
    become_old_ack_record_seconds: int = 0
    max_unpersisted_ack_record_bytes: int = field(default_factory=lambda: GateLimits().max_unpersisted_ack_record_bytes)
    topic_may_disable: bool = False

    @classmethod
    def from_pulsar_conf(cls, properties: Mapping[str, str], *, topic_may_disable: bool = False) -> BrokerPolicies:
        """Return what the properties of a ``broker.conf`` say.

        Raises:
            ValueError: A value is malformed, or a key is misspelt; the text names it.
        """
        seconds = CursorConfig.from_pulsar_conf(properties).become_old_ack_record_seconds
        assert isinstance(seconds, int)  # a file cannot say AUTO
        return cls(
            BrokerDelayedDelivery.from_pulsar_conf(properties),
            seconds,
            GateLimits.from_pulsar_conf(properties).max_unpersisted_ack_record_bytes,
            topic_may_disable,
        )

    def number(self, policy: NumberPolicy) -> int:
        """Return what the broker says of a policy."""
        if policy is NumberPolicy.BECOME_OLD_ACK_RECORD_SECONDS:
            return self.become_old_ack_record_seconds
        return self.max_unpersisted_ack_record_bytes


@final
class LevelledPolicies:
    """The stored policies of namespaces and topics beside those of the broker.

    What one level may say depends on the others, and these are other values of the store: they are looked at as they
    stand just before the write. Where two levels are changed at the same instant, each may be allowed and both together
    not; what is in force then is what `limits.policies.effective` says, a disabling topic unheard.

    All methods raise what `PolicyStore` raises.
    """

    def __init__(self, store: PolicyStore, broker: BrokerPolicies) -> None:
        self.store = store
        self._broker = broker

    def applied_delays(self, owner: PolicyOwner) -> dict[str, bool | int]:
        """Return the delays in force, by Pulsar's JSON names; every field is there."""
        topic = self._own_delays(owner) if owner.topic is not None else DelayedDeliveryPolicies()
        namespace = self._own_delays(owner.of_namespace)
        broker = self._broker
        return effective(
            topic, namespace, broker.delayed_delivery, topic_may_disable=broker.topic_may_disable
        ).to_json()

    def applied_number(self, owner: PolicyOwner, policy: NumberPolicy) -> int:
        """Return the number in force: the owner's, else that of its namespace, else the broker's."""
        for each in (owner, owner.of_namespace):
            number = policy.of(self.store.read(each).policies)
            if number is not None:
                return number
        return self._broker.number(policy)

    def update_delays(
        self, owner: PolicyOwner, update: DelayedDeliveryPolicies, *, expected_version: int | None
    ) -> VersionedPolicies:
        """Set the fields that an update names and keep the others.

        Raises:
            DelayPolicyRefusedError: They would contradict what another level says.
        """

        def change(policies: Policies) -> Policies:
            stored = policies.delayed_delivery
            if owner.topic is None:
                self._check_namespace(owner, stored.updated(update))
            else:
                self._check_topic(owner, update, stored)
            return replace(policies, delayed_delivery=stored.updated(update))

        return self.store.update(owner, change, expected_version=expected_version)

    def remove_delays(self, owner: PolicyOwner, *, expected_version: int | None) -> VersionedPolicies:
        """Let an owner say nothing of delays.

        Raises:
            DelayPolicyRefusedError: A namespace's removal would leave a topic with a fixed delay that is not kept.
        """

        def change(policies: Policies) -> Policies:
            if owner.topic is None:
                self._check_namespace(owner, DelayedDeliveryPolicies())
            return replace(policies, delayed_delivery=DelayedDeliveryPolicies())

        return self.store.update(owner, change, expected_version=expected_version)

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

    def _check_namespace(self, owner: PolicyOwner, delays: DelayedDeliveryPolicies) -> None:
        topics = {str(topic): self._own_delays(topic) for topic in self.store.topics(owner)}
        check_namespace_settable(
            delays,
            self._broker.delayed_delivery,
            topics=topics,
            topic_may_disable=self._broker.topic_may_disable,
        )

    def _own_delays(self, owner: PolicyOwner) -> DelayedDeliveryPolicies:
        return self.store.read(owner).policies.delayed_delivery
