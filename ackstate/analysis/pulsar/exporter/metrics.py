"""The metrics of the exporter; `docs/operations.md` lists them. Needs the extra ``ackstate[metrics]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ackstate.analysis.estimate.slices import namespace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from ackstate.analysis.pulsar.exporter.collection import Collection
    from ackstate.analysis.pulsar.snapshot.judgement import Judgement
    from ackstate.analysis.pulsar.snapshot.request_rate import RequestRate

_LABELS = ("namespace", "topic", "subscription", "broker")


class _Gauge(NamedTuple):
    """A number of each subscription; None is not exported."""

    name: str
    meaning: str
    value: Callable[[Judgement], float | None]


_NUMBERS = (
    _Gauge("ackstate_pulsar_redelivery_if_crashed_low", "Acked entries that are redelivered if the broker dies now: "
            "at least.", lambda each: each.comes_back and each.comes_back.low.entries),
    _Gauge("ackstate_pulsar_redelivery_if_crashed_high", "Acked entries that are redelivered if the broker dies "
            "now: at most; if may_be_more is 1, acked messages of partly acked batches are added.",
            lambda each: each.comes_back and each.comes_back.high.entries),
    _Gauge("ackstate_pulsar_redelivery_may_be_more", "Whether acked messages of partly acked batches may be "
            "redelivered in addition.", lambda each: float(each.is_lower_bound)),
    _Gauge("ackstate_pulsar_redelivery_if_unloaded", "Acked entries that are redelivered if the topic is unloaded "
            "now, because a limit excludes them.", lambda each: None if each.comes_back is None else each.if_unloaded),
    _Gauge("ackstate_pulsar_acked_entries", "Acked entries above the mark-delete position.",
            lambda each: len(each.look.deleted)),
    _Gauge("ackstate_pulsar_ack_ranges", "Ranges of acked entries above the mark-delete position.",
            lambda each: each.look.deleted.range_count),
)  # fmt: skip


@final
class ExporterCollector(Collector):
    """Exports the latest collection. A scrape sends no request to a broker.

    Args:
        rate: Counts the requests.
    """

    def __init__(self, rate: RequestRate) -> None:
        self._rate = rate
        self._latest: Collection | None = None
        self._read_s = 0.0  # when the latest collection ended that listed the topics
        self._count = self._failure_count = 0

    def show(self, collection: Collection) -> None:
        """Export a collection from now on."""
        self._count += 1
        self._failure_count += bool(collection.failure)
        if not collection.failure:
            self._read_s = collection.ended_s
        self._latest = collection

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        yield CounterMetricFamily(
            "ackstate_pulsar_requests", "Requests sent to the cluster since the start.", self._rate.count
        )
        yield CounterMetricFamily("ackstate_pulsar_collections", "Looks at the cluster since the start.", self._count)
        yield CounterMetricFamily(
            "ackstate_pulsar_collections_failed", "Those that could not list the topics.", self._failure_count
        )
        latest = self._latest
        if latest is None:
            return
        is_up = float(not latest.failure)
        yield GaugeMetricFamily("ackstate_pulsar_up", "Whether the latest look could list the topics.", is_up)
        yield GaugeMetricFamily(
            "ackstate_pulsar_collection_duration_seconds", "How long the latest look took.", latest.duration_s
        )
        yield GaugeMetricFamily(
            "ackstate_pulsar_collection_timestamp_seconds", "When the latest look ended that listed the topics.",
            self._read_s,
        )  # fmt: skip
        yield GaugeMetricFamily("ackstate_pulsar_topics", "Topics in the latest look.", latest.topic_count)
        yield _unread(latest)
        yield from _of_subscriptions(latest)


def _unread(latest: Collection) -> GaugeMetricFamily:
    """Return the unread topics of each broker; brokers all of whose topics were read have 0."""
    family = GaugeMetricFamily(
        "ackstate_pulsar_topics_unread",
        "Topics of a broker that the latest look could not read. The empty broker has those of an unknown owner, and "
        "each tenant, namespace or partitioned topic that could not be listed.",
        labels=("broker",),
    )
    brokers = {each.owner for each in latest.judgements}
    for broker in sorted({*brokers, *latest.unread}):
        family.add_metric((broker,), latest.unread.get(broker, 0))
    return family


def _of_subscriptions(latest: Collection) -> Iterator[GaugeMetricFamily]:
    labels = [_labels(each) for each in latest.judgements]
    for number in _NUMBERS:
        family = GaugeMetricFamily(number.name, number.meaning, labels=_LABELS)
        for names, each in zip(labels, latest.judgements, strict=True):
            value = number.value(each)
            if value is not None:
                family.add_metric(names, value)
        yield family
    family = GaugeMetricFamily(
        "ackstate_pulsar_limit_used_ratio", "Used share of a limit; 1 is the limit.", labels=(*_LABELS, "setting")
    )
    for names, each in zip(labels, latest.judgements, strict=True):
        for use in each.limits:
            family.add_metric((*names, use.setting), use.percent / 100)
    yield family


def _labels(each: Judgement) -> tuple[str, str, str, str]:
    return namespace_of(each.topic), each.topic, each.subscription, each.owner
