"""The metrics of subscriptions for Prometheus, under Pulsar's names where it has them.

Two of Pulsar's would need a clock. In place of ``pulsar_subscription_msg_rate_redeliver`` there is a counter, for
``rate``, and in place of ``pulsar_storage_backlog_age_seconds`` a timestamp, to be subtracted from ``time()``.

Source: ``TopicStats`` of ``org.apache.pulsar.broker.stats.prometheus``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client.core import Metric

    from ackstate.dispatch.explain import DispatchStats


class SubscriptionReading(NamedTuple):
    """The numbers of a subscription, and when its oldest unacked message was published; None without one."""

    stats: DispatchStats
    oldest_published_ms: int | None


class _DispatchNumber(NamedTuple):
    """One exported number of each subscription."""

    name: str
    value: Callable[[DispatchStats], int]
    meaning: str


_GAUGES = (
    _DispatchNumber("pulsar_subscription_back_log_no_delayed",
            lambda stats: stats.backlog_not_delayed,
            "Entries of the log that are neither acked nor known to be delayed."),
    _DispatchNumber("pulsar_subscription_delayed", lambda stats: stats.delayed_entries,
            "Entries that the subscription has read and that are not due yet, or not queued yet."),
    _DispatchNumber("pulsar_subscription_in_replay", lambda stats: stats.replay_entries,
            "Entries that were read and wait to be sent, most of them again."),
    _DispatchNumber("pulsar_subscription_unacked_messages", lambda stats: stats.unacked_messages,
            "Messages in flight: sent, and neither acked nor given back."),
    _DispatchNumber("pulsar_subscription_blocked_on_unacked_messages",
            lambda stats: stats.is_blocked_on_unacked_messages,
            "Is 1 if the limit on unacked messages of the subscription or of the broker keeps new messages back."),
    _DispatchNumber("pulsar_subscription_consumers_count", lambda stats: stats.consumer_count, "Open consumers."),
)  # fmt: skip
_COUNTERS = (
    _DispatchNumber("pulsar_out_messages_total", lambda stats: stats.sent_messages,
            "Messages sent since the subscription was opened, each time that they were."),
    _DispatchNumber("ackstate_subscription_redelivered_messages_total", lambda stats: stats.redelivered_messages,
            "Messages sent again since the subscription was opened, each time that they were."),
    _DispatchNumber("ackstate_subscription_dead_lettered_messages_total", lambda stats: stats.dead_lettered_messages,
            "Messages handed over as dead letters since the subscription was opened."),
)  # fmt: skip


def subscription_families(
    read: Iterable[tuple[Sequence[str], SubscriptionReading]], *, labels: Sequence[str]
) -> list[Metric]:
    """Return the metrics of subscriptions."""
    numbers: list[tuple[_DispatchNumber, GaugeMetricFamily | CounterMetricFamily]] = [
        *((number, GaugeMetricFamily(number.name, number.meaning, labels=labels)) for number in _GAUGES),
        *((number, CounterMetricFamily(number.name, number.meaning, labels=labels)) for number in _COUNTERS),
    ]
    oldest = GaugeMetricFamily(
        "ackstate_subscription_oldest_unacked_timestamp_seconds",
        "When the oldest unacked message was published, in Unix time; absent if there is none, or if it is unknown.",
        labels=labels,
    )
    rules = _RuleFamilies(labels)
    for values, (stats, oldest_published_ms) in read:
        for number, family in numbers:
            family.add_metric(values, number.value(stats))
        if oldest_published_ms is not None:
            oldest.add_metric(values, oldest_published_ms / 1_000)
        rules.add(values, stats)
    return [*(family for _, family in numbers), oldest, *rules.families]


class _RuleFamilies:
    """The metrics that have a value for each rule."""

    def __init__(self, labels: Sequence[str]) -> None:
        labels = (*labels, "rule")
        self._blocked = GaugeMetricFamily(
            "ackstate_subscription_blocked",
            "Is 1 while a limit keeps new messages back, from all consumers or from at least one; the rule is the "
            "limit's setting in Pulsar.",
            labels=labels,
        )
        self._since = GaugeMetricFamily(
            "ackstate_subscription_blocked_since_timestamp_seconds",
            "When the rule closed, in Unix time; absent while it is open, and if it is closed since the subscription "
            "was opened.",
            labels=labels,
        )
        self._count = CounterMetricFamily(
            "ackstate_subscription_blocks_total",
            "How often the rule has closed since the subscription was opened, for any consumer.",
            labels=labels,
        )

    @property
    def families(self) -> tuple[Metric, ...]:
        """The metrics."""
        return self._blocked, self._since, self._count

    def add(self, values: Sequence[str], stats: DispatchStats) -> None:
        """Add the rules of a subscription."""
        for each in stats.rules:
            labels = (*values, each.rule.value)
            self._blocked.add_metric(labels, each.is_closed)
            self._count.add_metric(labels, each.closed_count)
            if each.since_ms:
                self._since.add_metric(labels, each.since_ms / 1_000)
