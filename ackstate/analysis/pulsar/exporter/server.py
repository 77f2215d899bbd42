"""Serves the metrics over HTTP, and collects in the background until a signal stops it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, start_http_server

from ackstate.analysis.stop_signals import until_stopped
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ackstate.analysis.pulsar.exporter.collection import Collector
    from ackstate.analysis.pulsar.exporter.metrics import ExporterCollector


class ExporterSettings(NamedTuple):
    """Where and how often.

    Attributes:
        host: The address to listen on.
        port: The port; 0 is any free port.
        every_s: Seconds between the starts of two collections; a longer one is followed by the next at once.
    """

    host: str
    port: int
    every_s: float


def run_exporter(
    collector: Collector,
    metrics: ExporterCollector,
    settings: ExporterSettings,
    *,
    announce: Callable[[str], None],
    complain: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        AckStateError: The address cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(metrics)
    with until_stopped(), _serving(registry, settings) as port:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        shown: set[str] = set()
        line = f"ackstate exporter on http://{host}:{port}/metrics"
        while True:
            collection = collector.collect()
            metrics.show(collection)
            reasons = [collection.failure] if collection.failure else collection.unlisted
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
