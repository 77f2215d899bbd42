"""Looks at all topics of a cluster again and again, and exports the latest look."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector as MetricsCollector

from ackstate.analysis.estimate.slices import namespace_of
from ackstate.analysis.pulsar.judgement import Judgement, Kind, judge_topic
from ackstate.analysis.pulsar.sources import request_all
from ackstate.analysis.stop_signals import until_stopped
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from ackstate.analysis.pulsar.durable import DurableReader
    from ackstate.analysis.pulsar.sources import LiveBroker


READER_S = 3_600.0
"""A metadata store that could not be opened is tried again after this time."""


class Collection(NamedTuple):
    """The result of one look at all topics."""

    judgements: Sequence[Judgement] = ()  # The subscriptions of the topics that were read
    topic_count: int = 0  # The topics that were listed; 0 if they could not be listed
    # For each broker, how many of its topics were not read; "" has those of an unknown owner, and tenants, namespaces
    # and partitioned topics that were not listed.
    unread: Mapping[str, int] = {}
    unlisted: Sequence[str] = ()  # Why each of these was not
    failure: str = ""  # The reason why no topic was listed; empty if they were
    ended_s: float = 0.0  # When it ended, in seconds since 1970
    duration_s: float = 0.0  # How long it took


@final
class Collector:
    """Collects from one cluster; calls of `collect` must not overlap.

    Args:
        source: The cluster.
        open_reader: Opens a reader of what is durable, given the metadata store that the broker names; or returns None
            and why.
    """

    def __init__(
        self,
        source: LiveBroker,
        open_reader: Callable[[str], tuple[DurableReader | None, str]],
    ) -> None:
        self._source, self._open_reader = source, open_reader
        self._tried_s = -READER_S  # when it was last opened
        self._reader: DurableReader | None = None
        self.unread = ""
        """Why what is durable is not read; empty if it is."""
        self._owners: dict[str, str] = {}

    def collect(self) -> Collection:
        """Look at every topic once. A failure is part of the result, and does not raise."""
        begun_s = time.monotonic()
        try:
            topics, unlisted = self._source.listing()
            if self._reader is None and begun_s - self._tried_s >= READER_S:
                self._reader, self.unread = self._open_reader(self._source.settings.metadata_url)
                self._tried_s = begun_s
        except AckStateError as error:
            return Collection(failure=str(error), ended_s=time.time(), duration_s=time.monotonic() - begun_s)
        judgements: list[Judgement] = []
        unread: Counter[str] = Counter({"": len(unlisted)} if unlisted else {})
        for topic, found in request_all(topics, self._judged).items():
            if isinstance(found, AckStateError):
                unread[self._owners.get(topic, "")] += 1
            else:
                judgements += found
                self._owners[topic] = next((each.owner for each in found if each.owner), "")
        for topic in self._owners.keys() - set(topics):
            del self._owners[topic]
        return Collection(
            judgements, len(topics), dict(unread), [*map(str, unlisted)],
            ended_s=time.time(), duration_s=time.monotonic() - begun_s,
        )  # fmt: skip

    def close(self) -> None:
        """End the connections of the reader; no-op if there is none."""
        if self._reader is not None:
            self._reader.close()

    def _judged(self, topic: str) -> list[Judgement]:
        return judge_topic(topic, self._source, self._reader, unread=self.unread)


_LABELS = ("namespace", "topic", "subscription", "broker")


class _Gauge(NamedTuple):
    """A number of each subscription; None is not exported."""

    name: str
    meaning: str
    value: Callable[[Judgement], float | None]


def _of_subscription(each: Judgement, value: float) -> float | None:
    """Return a value of a durable subscription, so that a sum has no cursors of the broker itself."""
    return float(value) if each.kind is Kind.SUBSCRIPTION else None


_NUMBERS = (
    _Gauge("ackstate_pulsar_redelivery_if_crashed", "Acked entries that are redelivered if the broker dies now; where "
            "redelivery_is_exact is 0, at most.", lambda each: _of_subscription(each, each.most)),
    _Gauge("ackstate_pulsar_redelivery_is_exact", "Whether that is exact: what is durable was read, and nothing was "
            "acked meanwhile.", lambda each: each.comes_back and _of_subscription(each, each.comes_back.is_exact)),
    _Gauge("ackstate_pulsar_redelivery_may_be_more", "Whether acked messages of partly acked batches may be "
            "redelivered in addition.", lambda each: _of_subscription(each, each.may_have_batches)),
    _Gauge("ackstate_pulsar_redelivery_if_unloaded", "Acked entries that are redelivered if the topic is unloaded "
            "now, because a limit excludes them.", lambda each: _of_subscription(each, each.if_unloaded)),
    _Gauge("ackstate_pulsar_acked_entries", "Acked entries above the mark-delete position.",
            lambda each: len(each.acked.deleted)),
    _Gauge("ackstate_pulsar_ack_ranges", "Ranges of acked entries above the mark-delete position.",
            lambda each: each.range_count),
)  # fmt: skip


@final
class ExporterCollector(MetricsCollector):
    """Exports the latest collection. A scrape sends no request to a broker."""

    def __init__(self, request_count: Callable[[], int]) -> None:
        self._request_count = request_count
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
            "ackstate_pulsar_requests", "Requests sent to the cluster since the start.", self._request_count()
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


class ExporterSettings(NamedTuple):
    """Where and how often."""

    host: str  # The address to listen on
    port: int  # The port; 0 is any free port
    every_s: float  # Seconds between the starts of two collections; a longer one is followed by the next at once


def run_exporter(
    collector: Collector,
    metrics: ExporterCollector,
    settings: ExporterSettings,
    *,
    announce: Callable[[str], None],
    complain: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM."""
    registry = CollectorRegistry()
    registry.register(metrics)
    with until_stopped(), _serving(registry, settings) as port:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        shown: set[str] = set()
        line = f"ackstate exporter on http://{host}:{port}/metrics"
        while True:
            collection = collector.collect()
            metrics.show(collection)
            reasons = [collection.failure] if collection.failure else [*collection.unlisted]
            reasons += [collector.unread] if collector.unread else []
            for reason in reasons:
                if reason not in shown:
                    complain(reason)
            if line:
                announce(line)
            shown, line = {*reasons}, ""
            time.sleep(max(settings.every_s - collection.duration_s, 0.0))


@contextmanager
def _serving(registry: CollectorRegistry, settings: ExporterSettings) -> Iterator[int]:
    """Serve in a thread while the block runs; yield the port."""
    if not settings.host.strip():
        raise AckStateError("the host must not be empty; for every address use 0.0.0.0 or ::")
    try:
        server, thread = start_http_server(settings.port, settings.host, registry)
    except OSError as error:
        reason = error.strerror or error
        raise AckStateError(f"cannot listen on {settings.host} port {settings.port}: {reason}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
