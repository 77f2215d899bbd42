"""The page with all metrics, from the descriptions of their collectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry

from ackstate import MemoryStore
from ackstate.analysis.admin.app import PolicyCollector, RequestCounter
from ackstate.limits import PolicyStore
from ackstate.metrics import BacklogCollector, CursorCollector, PublishCollector
from ackstate.topic import PublishCounters
from website.markdown import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import Metric

_INTRODUCTION = """# Metrics

The collectors need the extra `[metrics]`, and those of the admin server the extra `[admin]`. Names that begin with
`pulsar_` mean the same as in Pulsar and have its labels. [Operations](../operations.md#metrics-of-a-broker) has
queries, and [embedding](../embedding.md#metrics) shows how to register a collector. The descriptions below are the
`# HELP` lines of a scrape.
"""


class MetricRow(NamedTuple):
    """One metric: its name in a scrape, its type, and its description."""

    name: str
    kind: str
    description: str


@dataclass(frozen=True, slots=True)
class Exporter:
    """A class that exports metrics, and a function that describes them without values."""

    path: str
    purpose: str
    describe: Callable[[], Iterable[Metric]]

    def metrics(self) -> list[MetricRow]:
        """Return its metrics in the order in which they are exported."""
        return [MetricRow(_name_in_a_scrape(each), each.type, each.documentation) for each in self.describe()]


def exporters() -> tuple[Exporter, ...]:
    """Return all classes that export metrics."""
    metrics, admin = "ackstate.metrics", "ackstate.analysis.admin.app"
    return (
        Exporter(f"{metrics}.CursorCollector", "Subscriptions and cursors.", CursorCollector().describe),
        Exporter(f"{metrics}.BacklogCollector", "The backlog of topics.", BacklogCollector().describe),
        Exporter(
            f"{metrics}.PublishCollector",
            "The effects of delivery-delay policies.",
            PublishCollector(PublishCounters(cluster="here")).describe,
        ),
        Exporter(
            f"{admin}.PolicyCollector",
            "The policies of an admin server.",
            PolicyCollector(PolicyStore(MemoryStore().metadata)).describe,
        ),
        Exporter(f"{admin}.RequestCounter", "The requests to an admin server.", _of_the_requests),
    )


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join([_INTRODUCTION, *(_section(each) for each in exporters())])


def _section(exporter: Exporter) -> str:
    rows = [(f"`{each.name}`", each.kind, each.description) for each in exporter.metrics()]
    heading = f"## {exporter.path.rpartition('.')[2]}\n\n{exporter.purpose} Class: `{exporter.path}`.\n\n"
    return heading + table(("metric", "type", "description"), rows)


def _of_the_requests() -> Iterable[Metric]:
    async def no_application(scope: Any, receive: Any, send: Any) -> None:
        """Answer nothing: only the description is read."""

    registry = CollectorRegistry()
    RequestCounter(no_application, registry=registry)
    return registry.collect()


def _name_in_a_scrape(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name
