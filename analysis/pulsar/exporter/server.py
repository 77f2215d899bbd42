"""Serves the metrics over HTTP, and collects in the background until a signal stops it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from ackstate.analysis.stop_signals import until_stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ackstate.analysis.pulsar.exporter.collection import Collector
    from ackstate.analysis.pulsar.exporter.metrics import ExporterCollector

_CONNECTION_TIMEOUT_S = 10.0


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


class _QuietHandler(WSGIRequestHandler):
    """Logs nothing, and drops a client that does not send its request in time."""

    timeout = _CONNECTION_TIMEOUT_S

    def log_message(self, format: str, *_arguments: object) -> None:  # noqa: A002 -- as in the base class
        """Write no line for a scrape."""


def run_exporter(
    collector: Collector,
    metrics: ExporterCollector,
    settings: ExporterSettings,
    *,
    announce: Callable[[str], None],
    complain: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        collector: Collects in this thread.
        metrics: Exports the latest collection.
        settings: Where to listen, and how often to collect.
        announce: Called with a line when the server listens and has collected once.
        complain: Called with each reason why a collection failed, or is without some topics, once until it is gone.

    Raises:
        OSError: The address cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(metrics)
    with until_stopped(), _server(registry, settings) as port:
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
def _server(registry: CollectorRegistry, settings: ExporterSettings) -> Iterator[int]:
    """Serve in a thread while the block runs; yield the port."""
    application = make_wsgi_app(registry)
    with make_server(
        settings.host,
        settings.port,
        application,
        server_class=_server_class(settings.host),
        handler_class=_QuietHandler,
    ) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _server_class(host: str) -> type[ThreadingWSGIServer]:
    class Server(ThreadingWSGIServer):
        """A server of the address family of the host."""

        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return Server
