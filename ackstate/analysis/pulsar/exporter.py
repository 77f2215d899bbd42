"""Looks at all topics of some clusters again and again, and exports the latest look of each."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, final
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector as MetricsCollector

from ackstate.analysis.estimate.estimates import namespace_of
from ackstate.analysis.pulsar.judgement import Judgement, Kind, judge_topic
from ackstate.analysis.pulsar.sources import request_all
from ackstate.analysis.stop_signals import until_stopped
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from ackstate.analysis.pulsar.durable import DurableReader
    from ackstate.analysis.pulsar.sources import LiveBroker


READER_S = 3_600.0
"""A metadata store that could not be opened is tried again after this time."""


_STOPS_WITHIN_S = 5.0
_ANY = re.compile(".*", re.DOTALL)


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
    """Looks at one cluster, and keeps the latest look; calls of `collect` must not overlap.

    Args:
        source: The cluster.
        open_reader: Opens a reader of what is durable, given the metadata store that the broker names; or returns None
            and why.
        topics: Only topics whose whole names match.
        subscriptions: Only subscriptions whose whole names match.
    """

    def __init__(
        self,
        source: LiveBroker,
        open_reader: Callable[[str], tuple[DurableReader | None, str]],
        *,
        topics: re.Pattern[str] = _ANY,
        subscriptions: re.Pattern[str] = _ANY,
    ) -> None:
        self._topics, self._subscriptions = topics, subscriptions
        self._source, self._open_reader = source, open_reader
        self._tried_s = -READER_S  # when it was last opened
        self._reader: DurableReader | None = None
        self.unread = ""
        """Why what is durable is not read; empty if it is."""
        self._owners: dict[str, str] = {}
        self.latest: Collection | None = None
        self.read_s = 0.0  # when the latest look ended that listed the topics
        self.count = self.failure_count = 0

    @property
    def request_count(self) -> int:
        """The requests sent to the cluster so far."""
        return self._source.request_count

    @property
    def is_up(self) -> bool:
        """Whether the latest look could list the topics."""
        return self.latest is not None and not self.latest.failure

    def collect(self) -> Collection:
        """Look at every topic once. A failure is part of the result, and does not raise."""
        begun_s = time.monotonic()
        found = self._looked(begun_s)
        found = found._replace(ended_s=time.time(), duration_s=time.monotonic() - begun_s)
        self.count += 1
        self.failure_count += bool(found.failure)
        if not found.failure:
            self.read_s = found.ended_s
        self.latest = found
        return found

    def _looked(self, begun_s: float) -> Collection:
        try:
            listed, unlisted = self._source.listing()
            if self._reader is None and begun_s - self._tried_s >= READER_S:
                self._reader, self.unread = self._open_reader(self._source.settings.metadata_url)
                self._tried_s = begun_s
        except AckStateError as error:
            return Collection(failure=str(error))
        topics = [*filter(self._topics.fullmatch, listed)]
        found, missing = request_all("topic", topics, self._judged)
        unread = Counter({"": len(unlisted)} if unlisted else {})
        unread.update(self._owners.get(each.name, "") for each in missing)
        owners = {topic: next((each.owner for each in judged if each.owner), "") for topic, judged in found.items()}
        self._owners = {topic: owners.get(topic, self._owners.get(topic, "")) for topic in topics}
        return Collection([*chain(*found.values())], len(topics), dict(unread), [*map(str, unlisted)])

    def close(self) -> None:
        """End the connections of the reader; no-op if there is none."""
        if self._reader is not None:
            self._reader.close()

    def _judged(self, topic: str) -> list[Judgement]:
        found = judge_topic(topic, self._source, self._reader, unread=self.unread)
        return [each for each in found if self._subscriptions.fullmatch(each.subscription)]


_LABELS = ("cluster", "namespace", "topic", "subscription", "broker")


def _of_subscription(each: Judgement, value: float) -> float | None:
    """Return a value of a durable subscription, so that a sum has no cursors of the broker itself."""
    return float(value) if each.kind is Kind.SUBSCRIPTION else None


# Brokers all of whose topics were read have 0.
_UNREAD = (
    "Topics of a broker that the latest look could not read. The empty broker has those of an unknown owner, and each "
    "tenant, namespace or partitioned topic that could not be listed."
)
# Name, meaning and value of the numbers of each subscription; None is not exported.
_NUMBERS: tuple[tuple[str, str, Callable[[Judgement], float | None]], ...] = (
    ("redelivery_if_crashed", "Acked entries that are redelivered if the broker dies now; where redelivery_is_exact is "
        "0, at most.", lambda each: _of_subscription(each, each.most)),
    ("redelivery_is_exact", "Whether that is exact: what is durable was read, and nothing was acked meanwhile.",
        lambda each: each.comes_back and _of_subscription(each, each.comes_back.is_exact)),
    ("redelivery_may_be_more", "Whether acked messages of partly acked batches may be redelivered in addition.",
        lambda each: _of_subscription(each, each.may_have_batches)),
    ("redelivery_if_unloaded", "Acked entries that are redelivered if the topic is unloaded now, because a limit "
        "excludes them.", lambda each: _of_subscription(each, each.if_unloaded)),
    ("acked_entries", "Acked entries above the mark-delete position.", lambda each: len(each.acked.deleted)),
    ("ack_ranges", "Ranges of acked entries above the mark-delete position.", lambda each: each.range_count),
)  # fmt: skip
# Name, meaning and value of the numbers of a cluster; without a value before its first look.
_COUNTERS: tuple[tuple[str, str, Callable[[Collector], float]], ...] = (
    ("requests", "Requests sent to the cluster since the start.", lambda each: each.request_count),
    ("collections", "Looks at the cluster since the start.", lambda each: each.count),
    ("collections_failed", "Those that could not list the topics.", lambda each: each.failure_count),
)
_GAUGES: tuple[tuple[str, str, Callable[[Collector, Collection], float]], ...] = (
    ("up", "Whether the latest look could list the topics.", lambda each, _: each.is_up),
    ("collection_duration_seconds", "How long the latest look took.", lambda _, latest: latest.duration_s),
    ("collection_timestamp_seconds", "When the latest look ended that listed the topics.", lambda each, _: each.read_s),
    ("topics", "Topics in the latest look.", lambda _, latest: latest.topic_count),
)


@final
class ExporterCollector(MetricsCollector):
    """Exports the latest look at each cluster, given by name. A scrape sends no request to a broker."""

    def __init__(self, clusters: Mapping[str, Collector]) -> None:
        self._clusters = clusters

    @property
    def unready(self) -> list[str]:
        """The names of the clusters whose topics could not be listed, or not yet."""
        return [name for name, each in self._clusters.items() if not each.is_up]

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        for name, meaning, value in _COUNTERS:
            counter = CounterMetricFamily(f"ackstate_pulsar_{name}", meaning, labels=("cluster",))
            for cluster, each in self._clusters.items():
                counter.add_metric((cluster,), value(each))
            yield counter
        looks = {name: (each, each.latest) for name, each in self._clusters.items() if each.latest is not None}
        if not looks:
            return
        for name, meaning, of_look in _GAUGES:
            numbers = (((cluster,), of_look(each, latest)) for cluster, (each, latest) in looks.items())
            yield _gauge(name, meaning, ("cluster",), numbers)
        unread = (
            ((cluster, broker), latest.unread.get(broker, 0)) for cluster, (_, latest) in looks.items()
            for broker in sorted({*(each.owner for each in latest.judgements), *latest.unread})
        )  # fmt: skip
        yield _gauge("topics_unread", _UNREAD, ("cluster", "broker"), unread)
        found = [
            ((cluster, namespace_of(each.topic), each.topic, each.subscription, each.owner), each)
            for cluster, (_, latest) in looks.items() for each in latest.judgements
        ]  # fmt: skip
        for name, meaning, value_of in _NUMBERS:
            yield _gauge(name, meaning, _LABELS, ((labels, value_of(each)) for labels, each in found))
        used = (((*labels, use.setting), use.percent / 100) for labels, each in found for use in each.limits)
        yield _gauge("limit_used_ratio", "Used share of a limit; 1 is the limit.", (*_LABELS, "setting"), used)


def _gauge(
    name: str, meaning: str, labels: Sequence[str], numbers: Iterable[tuple[Sequence[str], float | None]]
) -> GaugeMetricFamily:
    """Return numbers, each with the values of its labels; None is not exported."""
    family = GaugeMetricFamily(f"ackstate_pulsar_{name}", meaning, labels=labels)
    for values, number in numbers:
        if number is not None:
            family.add_metric(values, float(number))
    return family


def run_exporter(
    collectors: Mapping[str, Collector],
    address: tuple[str, int],
    *,
    every_s: float,
    announce: Callable[[str], None],
    complain: Callable[[str], None],
) -> None:
    """Serve on a host and a port, 0 for any, until SIGINT or SIGTERM; each cluster is looked at in a thread of its own.

    `every_s` is the time between the starts of two looks; a longer look is followed by the next at once.
    """
    stopping, ended, looked = threading.Event(), threading.Event(), {name: threading.Event() for name in collectors}
    failed: list[BaseException] = []

    def follow(name: str, collector: Collector) -> None:
        shown: set[str] = set()
        try:
            while not stopping.is_set():
                found = collector.collect()
                reasons = [*filter(None, (found.failure, *found.unlisted, collector.unread))]
                for reason in reasons:
                    if reason not in shown:
                        complain(f"{name}: {reason}" if len(collectors) > 1 else reason)
                looked[name].set()
                shown = {*reasons}
                stopping.wait(max(every_s - found.duration_s, 0.0))
        except BaseException as error:
            failed.append(error)
        finally:
            looked[name].set()
            ended.set()

    threads = [threading.Thread(target=follow, args=each, daemon=True) for each in collectors.items()]
    with until_stopped(), _serving(ExporterCollector(collectors), *address) as place:
        for thread in threads:
            thread.start()
        for each in looked.values():
            each.wait()
        if not failed:
            announce(f"ackstate exporter on http://{place}/metrics")
        ended.wait()
    stopping.set()
    for thread in threads:
        # A request that is under way is not waited for.
        thread.join(_STOPS_WITHIN_S)
    if failed:
        raise failed[0]


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log no request."""


@contextmanager
def _serving(metrics: ExporterCollector, host: str, port: int) -> Iterator[str]:
    """Serve in a thread while the block runs; yield the host and the port."""
    if not host.strip():
        raise AckStateError("the host must not be empty; for every address use 0.0.0.0 or ::")
    registry = CollectorRegistry()
    registry.register(metrics)
    exported = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"]
        if path not in {"/health", "/ready"}:
            return exported(environ, start_response)
        unready = metrics.unready if path == "/ready" else []
        start_response("503 Service Unavailable" if unready else "200 OK", [("Content-Type", "text/plain")])
        return [f"not listed: {', '.join(unready)}\n".encode() if unready else b"ok\n"]

    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = make_server(host, port, answer, Server, _SilentHandler)
    except OSError as error:
        reason = error.strerror or error
        raise AckStateError(f"cannot listen on {host} port {port}: {reason}") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"{f'[{host}]' if ':' in host else host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
