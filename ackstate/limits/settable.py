"""Checks that an update of delivery-delay policies counts and can be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.limits.policies import (
    JSON_NAMES,
    DelayedDeliveryPolicies,
    DelayPolicyRefusedError,
    EffectiveDelayedDelivery,
    Level,
    effective,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.limits.policies import BrokerDelayedDelivery


def check_topic_settable(
    update: DelayedDeliveryPolicies,
    namespace: DelayedDeliveryPolicies,
    broker: BrokerDelayedDelivery,
    *,
    stored: DelayedDeliveryPolicies | None = None,
    topic_may_disable: bool = False,
) -> None:
    """Refuse an update of a topic's policies that would not count or could not be kept.

    Args:
        update: The new values.
        namespace: As in `effective`.
        broker: As in `effective`.
        stored: The topic's policies so far, if it has any. A 0 among them that no longer counts is no reason to refuse.
        topic_may_disable: As in `effective`.

    Raises:
        DelayPolicyRefusedError: It would switch off a policy that the namespace enforces, or as
            `check_fixed_delay_kept`.
    """
    stored = stored or DelayedDeliveryPolicies()
    before = effective(stored, namespace, broker, topic_may_disable=topic_may_disable)
    applied = effective(stored.updated(update), namespace, broker, topic_may_disable=topic_may_disable)
    for name, value in update.named().items():
        if getattr(applied.levels, name) is not Level.TOPIC:
            enforced = "max_delivery_delay_ms" if name == "max_delivery_delay_ms" else "fixed_delivery_delay_ms"
            raise DelayPolicyRefusedError(
                f"{JSON_NAMES[name]} {str(value).lower()} of the topic would switch off a policy of its namespace: "
                f"{JSON_NAMES[enforced]} {getattr(namespace, enforced)}",
                field=JSON_NAMES[name],
            )
    check_fixed_delay_kept(before, applied)


def check_namespace_settable(
    namespace: DelayedDeliveryPolicies,
    broker: BrokerDelayedDelivery,
    *,
    stored: DelayedDeliveryPolicies | None = None,
    topics: Mapping[str, DelayedDeliveryPolicies] | None = None,
    topic_may_disable: bool = False,
) -> None:
    """Refuse policies of a namespace with which a fixed delay could not be kept, of itself or of one of its topics.

    A topic's 0 does not prevent the namespace from enforcing a value: it no longer counts.

    Args:
        namespace: Its policies as they would be after the update, as a whole.
        broker: The settings of its broker.
        stored: Its policies so far. A fixed delay that they already break is no reason to refuse; None if there are
            none.
        topics: The policies of its topics by name, of those that have any.
        topic_may_disable: As in `effective`.

    Raises:
        DelayPolicyRefusedError: As `check_fixed_delay_kept`; it names up to three topics, and their number.

    Complexity: O(topics).
    """

    def change_of(topic: DelayedDeliveryPolicies) -> tuple[EffectiveDelayedDelivery, EffectiveDelayedDelivery]:
        after = effective(topic, namespace, broker, topic_may_disable=topic_may_disable)
        before = stored and effective(topic, stored, broker, topic_may_disable=topic_may_disable)
        return before or EffectiveDelayedDelivery(), after

    check_fixed_delay_kept(*change_of(DelayedDeliveryPolicies()))
    broken = [name for name, topic in (topics or {}).items() if _breaks(*change_of(topic))]
    if topics and broken:
        raise _not_kept(change_of(topics[broken[0]])[1], topics=broken)


def check_fixed_delay_kept(before: EffectiveDelayedDelivery, after: EffectiveDelayedDelivery) -> None:
    """Refuse a change that leaves a fixed delay in force while delayed delivery is not active.

    One that was not kept before the change either, and is as long, is no reason: to refuse would keep out every repair.

    Raises:
        DelayPolicyRefusedError: A fixed delay would not be kept.
    """
    if _breaks(before, after):
        raise _not_kept(after)


def _breaks(before: EffectiveDelayedDelivery, after: EffectiveDelayedDelivery) -> bool:
    is_as_before = not before.keeps_fixed_delay and before.fixed_delivery_delay_ms == after.fixed_delivery_delay_ms
    return not after.keeps_fixed_delay and not is_as_before


def _not_kept(applied: EffectiveDelayedDelivery, *, topics: Sequence[str] = ()) -> DelayPolicyRefusedError:
    where = f" for topic {topics[0]}" if topics else ""
    others = f"; it would be so for {len(topics)} topics, such as {', '.join(topics[:3])}" if len(topics) > 1 else ""
    return DelayPolicyRefusedError(
        f"fixedDeliveryDelayInMillis {applied.fixed_delivery_delay_ms} (of the "
        f"{applied.levels.fixed_delivery_delay_ms.value}) would not be kept{where}: delayed delivery is not active "
        f"(says the {applied.levels.active.value}){others}",
        field="fixedDeliveryDelayInMillis",
    )
