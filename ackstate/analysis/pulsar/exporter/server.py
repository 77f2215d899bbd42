"""Serves the metrics over HTTP, and collects in the background until a signal stops it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.routing import Route

from ackstate.analysis.admin.connections import ConnectionLimits
from ackstate.analysis.admin.log_lines import log_to_stderr
from ackstate.analysis.admin.server import bounded_server, listening
from ackstate.analysis.stop_signals import until_stopped

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from starlette.requests import Request

    from ackstate.analysis.pulsar.exporter.collection import Collector
    from ackstate.analysis.pulsar.exporter.metrics import ExporterCollector

_CONCURRENCY_MAX = 100


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

    Args:
        collector: Collects in this thread.
        metrics: Exports the latest collection.
        settings: Where to listen, and how often to collect.
        announce: Called with a line when the server listens and has collected once.
        complain: Called with each reason why a collection failed, or is without some topics, once until it is gone.

    Raises:
        AckStateError: The address cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(metrics)
    log_to_stderr()
    with until_stopped(), listening(settings.host, settings.port) as listener, _serving(registry, listener):
        port = listener.getsockname()[1]
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
def _serving(registry: CollectorRegistry, listener: socket.socket) -> Iterator[None]:
    """Serve in a thread while the block runs."""

    async def metrics(_request: Request) -> Response:
        text = await run_in_threadpool(generate_latest, registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = Starlette(routes=[Route("/metrics", metrics)], middleware=[Middleware(GZipMiddleware)])
    server = bounded_server(app, ConnectionLimits(), concurrency_max=_CONCURRENCY_MAX)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
