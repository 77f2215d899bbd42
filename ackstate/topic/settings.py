"""The settings of a topic, which its policies may override."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields, replace

from ackstate.checks import check_count
from ackstate.cursor.config import CursorConfig
from ackstate.delay.config import DelayConfig
from ackstate.dispatch.options import SubscriptionOptions
from ackstate.limits.broker import BrokerLimit
from ackstate.limits.gate import GateLimits
from ackstate.limits.policies import BrokerDelayedDelivery, Level, PolicyStore
from ackstate.topic.log import BYTES_PER_LEDGER_MAX
from ackstate.topic.publish import PublishCounters, delay_policies, policy_owner
from ackstate.topic.retention import Retention


def wall_clock() -> int:
    """Return the present, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """The settings of a topic and its subscriptions; the defaults are Pulsar's.

    Attributes:
        entries_per_ledger_max: As for `MessageLog.open`.
        bytes_per_ledger_max: Likewise.
        ledger_rollover_ms: A publish begins a new ledger if the open one was begun this long ago, so that trimming can
            delete it; Pulsar's ``managedLedgerMaxLedgerRolloverTimeMinutes``. 0 for never.
        delay_index: The delay index, as Pulsar's ``delayedDeliveryTrackerFactoryClassName`` chooses it
            (`DelayConfig.tracker`): in memory (`TopicDelayIndex`), or bucketed (`BucketedDelayIndex`), with snapshots
            in the topic's store. No message is early, whatever `is_deliver_at_time_strict` says. None, or one that is
            not `enabled`, for no index: every message is delivered at once, and its time is ignored.
        cursor: How the subscriptions persist.
        limits: The limits of each Shared and Key_Shared subscription.
        options: The other settings of each subscription.
        retention: How much of the log is kept although every subscription has acked it, and the limit of the backlog.
        broker_limit: The limit that all subscriptions share; None for none.
        policies: Where the policies of topics and namespaces are; None for none. They are read at each publish, and
            those on ack records when a subscription is opened. They apply to topics that are named as in Pulsar, like
            ``persistent://public/default/orders``.
        delayed_delivery: The policies of the broker, for fields that neither topic nor namespace sets.
        counters: Counts the effects of the policies; shared by all topics with these settings.

    Raises:
        TypeError: A field is of another type.
        ValueError: A number is below 1, or `ledger_rollover_ms` below 0.
    """

    entries_per_ledger_max: int = 50_000
    bytes_per_ledger_max: int = BYTES_PER_LEDGER_MAX
    ledger_rollover_ms: int = 240 * 60_000
    delay_index: DelayConfig | None = field(default_factory=DelayConfig)
    cursor: CursorConfig = field(default_factory=CursorConfig)
    limits: GateLimits = field(default_factory=GateLimits)
    options: SubscriptionOptions = field(default_factory=SubscriptionOptions)
    retention: Retention = field(default_factory=Retention)
    broker_limit: BrokerLimit | None = None
    policies: PolicyStore | None = None
    delayed_delivery: BrokerDelayedDelivery = field(default_factory=BrokerDelayedDelivery)
    counters: PublishCounters = field(default_factory=lambda: PublishCounters(cluster="standalone"))

    def __post_init__(self) -> None:
        check_count("entries_per_ledger_max", self.entries_per_ledger_max, least=1)
        check_count("bytes_per_ledger_max", self.bytes_per_ledger_max, least=1)
        check_count("ledger_rollover_ms", self.ledger_rollover_ms, least=0)
        for each in fields(self):
            kind, value = _TYPES.get(each.name), getattr(self, each.name)
            if kind is not None and not isinstance(value, kind) and (value is not None or each.name not in _OPTIONAL):
                raise TypeError(f"{each.name} must be a {kind.__name__}, got {value!r}")


_TYPES = {
    "delay_index": DelayConfig,
    "cursor": CursorConfig,
    "limits": GateLimits,
    "options": SubscriptionOptions,
    "retention": Retention,
    "broker_limit": BrokerLimit,
    "policies": PolicyStore,
    "delayed_delivery": BrokerDelayedDelivery,
    "counters": PublishCounters,
}
_OPTIONAL = frozenset({"delay_index", "broker_limit", "policies"})


def delay_config(settings: TopicSettings, topic: str) -> DelayConfig | None:
    """Return the settings of a topic's delay index, with the tick of its policies; None for no index."""
    config = settings.delay_index
    if config is None or not config.enabled:
        return None
    if settings.policies is None:
        return config
    in_force = delay_policies(topic, settings.policies, settings.delayed_delivery)()
    is_brokers = in_force.levels.tick_time_ms is Level.BROKER
    return config if is_brokers else replace(config, tick_time_ms=in_force.tick_time_ms)


def subscription_settings(settings: TopicSettings, topic: str) -> tuple[CursorConfig, GateLimits]:
    """Return how a subscription persists and its limits, with the policies in force for its topic."""
    store, owner = settings.policies, policy_owner(topic)
    cursor, limits = settings.cursor, settings.limits
    if store is None or owner is None:
        return cursor, limits
    for policies in (store.read(owner.of_namespace).policies, store.read(owner).policies):
        if (seconds := policies.become_old_ack_record_seconds) is not None:
            cursor = replace(cursor, become_old_ack_record_seconds=seconds)
        if (byte_count := policies.max_unpersisted_ack_record_bytes) is not None:
            limits = replace(limits, max_unpersisted_ack_record_bytes=byte_count)
    return cursor, limits
