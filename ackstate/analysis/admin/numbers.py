"""The server's Prometheus metrics: requests by route and status, and the number of policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ackstate.limits.policies import PolicyStore

_UNMATCHED = "none"
_BROKEN = 500
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE"})


@final
class RequestCounter:
    """Counts each answer in ``ackstate_admin_requests_total`` by method, route and status.

    The label values are bounded: paths that no route matches, and other methods, count as ``none``.
    """

    def __init__(self, app: ASGIApp, *, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "ackstate_admin_requests_total",
            "Requests answered.",
            labelnames=("method", "route", "status"),
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            # An outer handler turns the exception into an answer.
            self._count(scope, _BROKEN)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        method = scope["method"] if scope["method"] in _METHODS else _UNMATCHED
        route = getattr(scope.get("route"), "path", _UNMATCHED)
        self._requests.labels(method, route, status).inc()


@final
class PolicyCollector(Collector):
    """Exports ``ackstate_policies``, the number of namespaces and of topics with policies of their own.

    Complexity: O(namespaces and topics with policies) for a scrape.
    """

    def __init__(self, policies: PolicyStore) -> None:
        self._policies = policies

    def collect(self) -> Iterable[Metric]:
        """Count them; raises as `PolicyStore.namespaces`."""
        yield self._family(namespace=len(self._policies.namespaces()), topic=len(self._policies.topics()))

    def describe(self) -> Iterable[Metric]:
        """Return the metric without values and without reading the store."""
        yield self._family()

    @staticmethod
    def _family(**counts: int) -> Metric:
        family = GaugeMetricFamily(
            "ackstate_policies", "Namespaces and topics that have policies of their own.", labels=("level",)
        )
        for level, count in counts.items():
            family.add_metric((level,), count)
        return family
