"""Exports the counters of the delivery-delay policies to Prometheus. Needs the extra ``ackstate[metrics]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from ackstate.topic.publisher import OVERRIDDEN, REJECTED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from ackstate.topic.publisher import CounterSample, PublishCounters

_LABELS = ("pulsar_cluster", "pulsar_namespace", "pulsar_topic")
_MEANINGS = {
    REJECTED: "Messages rejected because their delivery delay was above the maximum.",
    OVERRIDDEN: "Messages stored with the fixed delay in place of the delivery time that their client had set.",
}


@final
class PublishCollector(Collector):
    """Exports `PublishCounters`, to be registered with a `CollectorRegistry`.

    Names and labels are those that the OpenTelemetry exporter for Prometheus derives from Pulsar's.

    Complexity: O(topics) for a scrape.
    """

    def __init__(self, counters: PublishCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        """Read every counter."""
        return _families(self._counters.samples())

    def describe(self) -> Iterable[Metric]:
        """Name what `collect` returns."""
        return _families([])


def _families(samples: list[CounterSample]) -> list[CounterMetricFamily]:
    families = {
        name: CounterMetricFamily(_prometheus_name(name), meaning, labels=_LABELS)
        for name, meaning in _MEANINGS.items()
    }
    for name, attributes, value in samples:
        families[name].add_metric([attributes[label.replace("_", ".")] for label in _LABELS], value)
    return list(families.values())


def _prometheus_name(name: str) -> str:
    # A unit in braces is a remark to OpenTelemetry, and adds nothing to the name.
    return f"{name.replace('.', '_')}_total"
