"""Exports the backlog of topics to Prometheus. Needs the extra ``ackstate[metrics]``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ackstate.topic_name import parse_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import Metric

    from ackstate.topic.retention import BacklogReport

_NO_LIMIT = -1  # as in Pulsar
_TOPIC = ("namespace", "topic")
_NUMBERS: tuple[tuple[str, str, Callable[[BacklogReport], int]], ...] = (
    ("pulsar_storage_size", "Bytes of the messages that the topic stores.", lambda report: report.log_byte_count),
    (
        "pulsar_storage_backlog_size",
        "Bytes of the messages from the first one on that the slowest subscription has not acked durably.",
        lambda report: report.byte_count,
    ),
    (
        "pulsar_storage_backlog_quota_limit",
        "The limit of the backlog in bytes; -1 for no limit.",
        lambda report: _NO_LIMIT if report.bytes_max is None else report.bytes_max,
    ),
    (
        "ackstate_topic_backlog_exceeded",
        "1 if the backlog is above its limit, else 0.",
        lambda report: int(report.is_exceeded),
    ),
    (
        "ackstate_topic_unreadable_subscriptions",
        "Stored subscriptions that cannot be read; while there is one, the topic keeps every message.",
        lambda report: len(report.unreadable),
    ),
)


@final
class BacklogCollector(Collector):
    """Exports the backlog reports of the topics that were added; to be registered with a `CollectorRegistry`.

    Safe for any number of threads. A topic whose report cannot be read is left out.

    Complexity: O(topics) for a scrape, and the cost of the reports.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[str, Callable[[], BacklogReport]] = {}

    def add(self, topic: str, report: Callable[[], BacklogReport]) -> None:
        """Export a topic from now on, in place of one that was added with the same name before.

        Args:
            topic: Its name; the namespace of one that is not like ``persistent://public/default/orders`` is empty.
            report: Returns the present report. It is called in the thread that scrapes: as the log of a topic is not
                safe for several threads, return the last report that the thread of the topic made.
        """
        with self._lock:
            self._reports[topic] = report

    def remove(self, topic: str) -> None:
        """Export a topic no longer; no-op if it was not added."""
        with self._lock:
            self._reports.pop(topic, None)

    def collect(self) -> Iterable[Metric]:
        """Read each report once."""
        with self._lock:
            reports = list(self._reports.items())
        read = []
        for topic, report in reports:
            try:
                read.append((topic, report()))
            except Exception:  # noqa: S112 - one damaged topic must not hide the others.
                continue
        return backlog_families(read)

    def describe(self) -> Iterable[Metric]:
        """Name the metrics that `collect` returns."""
        return backlog_families([])


def backlog_families(reports: Iterable[tuple[str, BacklogReport]]) -> list[GaugeMetricFamily]:
    """Return the metrics of topics, by name; also for a collector that has its own list of topics.

    ``ackstate_topic_backlog_entries`` has the subscription that holds the messages as a label, and no value for a topic
    without a backlog. ``ackstate_topic_retained_ledger`` has none if the retention keeps no ledger. Names and labels of
    Pulsar mean the same here.
    """
    families = [GaugeMetricFamily(name, meaning, labels=_TOPIC) for name, meaning, _ in _NUMBERS]
    held = GaugeMetricFamily(
        "ackstate_topic_backlog_entries",
        "Entries from the first one on that this subscription, the slowest of the topic, has not acked durably.",
        labels=(*_TOPIC, "subscription"),
    )
    retained = GaugeMetricFamily(
        "ackstate_topic_retained_ledger",
        "The first ledger that the retention keeps although no subscription needs it, nor one before it.",
        labels=_TOPIC,
    )
    for topic, report in reports:
        parts = parse_topic(topic)
        labels = (parts.namespace if parts else "", topic)
        for family, (_, _, number) in zip(families, _NUMBERS, strict=True):
            family.add_metric(labels, number(report))
        if report.held_by is not None:
            held.add_metric((*labels, report.held_by), report.entry_count)
        if report.retained_ledger_id is not None:
            retained.add_metric(labels, report.retained_ledger_id)
    return [*families, held, retained]
