"""The server as an ASGI application: all its paths, on an open store."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, final

from fastapi import Depends, FastAPI, HTTPException
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ackstate.analysis.admin.answers import LOG, REFUSAL_SCHEMA, add_refusals, refusals
from ackstate.analysis.admin.guard import OPEN_PATHS, Guard, check_token
from ackstate.analysis.admin.internal_stats import PersistentTopicInternalStats, internal_stats
from ackstate.analysis.admin.live import LiveRoutes
from ackstate.analysis.admin.policy_routes import NamedOwner, PolicyRoutes, topic_names
from ackstate.analysis.admin.resolve import BrokerPolicies, LevelledPolicies
from ackstate.errors import AckStateError
from ackstate.limits.policies import PolicyOwner, PolicyStore
from ackstate.stores.base import Store, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ackstate.aio import AsyncTopics
    from ackstate.topic.topics import Topics


_TITLE = "ackstate admin"
_DESCRIPTION = (
    "The delay and ack-record policies of namespaces and topics, and the store's state of a topic, "
    "under the paths and names of Apache Pulsar's admin interface."
)

# The server omits the body.
_HEAD: dict[str, Any] = {"methods": ["HEAD"], "include_in_schema": False}


def create_app(
    store: Store,
    *,
    broker: BrokerPolicies | None = None,
    token: bytes | None = None,
    registry: CollectorRegistry | None = None,
    topics: Topics | AsyncTopics | None = None,
) -> FastAPI:
    """Return the application; the caller closes the store afterwards.

    With `topics` it is part of the broker that has them open. Then it must run in the event loop whose thread publishes
    to these topics: it reads them, and `registry`, in that thread.

    Args:
        store: Stores the policies, and the topics whose internal stats can be requested. Must be thread-safe.
        broker: Defaults if no policy is set; Pulsar's defaults if not given.
        token: The bearer token of requests, of at least 16 characters. None to serve requests without a token, but
            only those whose connection comes from a loopback address of this machine.
        registry: Metrics to export besides those of the server, such as a `CursorCollector`'s.
        topics: The open topics of the broker; None for a server beside the store.

    Raises:
        TypeError: The token is not bytes.
        ValueError: The token is not one word of 16 to 8,192 visible ASCII characters.
    """
    if token is not None:
        check_token(token)
    own = CollectorRegistry()
    policies = PolicyStore(store.metadata)
    own.register(PolicyCollector(policies))
    # FastAPI's pages would load scripts from the internet; redirects would repeat any Host that the client sent.
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False)
    add_refusals(app)
    if topics is not None:
        LiveRoutes(topics, store).add_to(app)
    _StoreRoutes(store, policies, own, registry, is_live=topics is not None).add_to(app)
    PolicyRoutes(LevelledPolicies(policies, broker or BrokerPolicies())).add_to(app)
    document = _openapi(app, has_token=token is not None)
    app.openapi = lambda: document  # type: ignore[method-assign]
    app.add_middleware(Guard, token=token)
    app.add_middleware(RequestCounter, registry=own)
    return app


@final
class _StoreRoutes:
    """The read-only routes."""

    def __init__(
        self,
        store: Store,
        policies: PolicyStore,
        own: CollectorRegistry,
        registry: CollectorRegistry | None,
        *,
        is_live: bool,
    ) -> None:
        self._store = store
        self._policies = policies
        self._own = own
        self._registry = registry
        self._is_live = is_live

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application, before those of the policies, which end in a parameter."""
        text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}
        shared: dict[str, Any] = {"tags": ["store"], "response_description": "The requested resource"}
        app.add_api_route("/healthz", self.healthz, responses=refusals(), **shared)
        app.add_api_route("/metrics", self.metrics, responses=text | refusals(), response_class=Response, **shared)
        app.add_api_route("/healthz", self.healthz, **_HEAD)
        app.add_api_route("/metrics", self.metrics, **_HEAD)
        if self._is_live:
            return
        app.add_api_route(
            "/admin/v2/persistent/{tenant}/{namespace}/{topic}/internalStats",
            self.internal_stats,
            dependencies=[Depends(topic_names)],
            responses=refusals(404, 412),
            **shared,
        )

    def healthz(self) -> dict[str, str]:
        """Check that the store answers."""
        try:
            self._policies.read(PolicyOwner("healthz", "healthz"))
        except AckStateError as error:
            # Requests need no token, and the error may name the store's files.
            LOG.error("%s: %s", type(error).__name__, error)
            status = 503 if isinstance(error, StoreError) else 500
            raise HTTPException(status, "the store does not answer; see the server's log") from None
        return {"status": "ok"}

    async def metrics(self) -> Response:
        """Return the metrics of the server in Prometheus' text format."""
        text = await run_in_threadpool(generate_latest, self._own)  # reads the store
        if self._registry is not None and self._is_live:
            text += generate_latest(self._registry)
        elif self._registry is not None:
            text += await run_in_threadpool(generate_latest, self._registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def internal_stats(self, owner: NamedOwner) -> PersistentTopicInternalStats:
        """Return the ledgers of a topic, and its cursors as a broker would recover them now."""
        found = internal_stats(self._store, str(owner))
        if found is None:
            raise HTTPException(404, f"the store has neither messages nor cursors of {owner}")
        return found


def _openapi(app: FastAPI, *, has_token: bool) -> dict[str, Any]:
    document = get_openapi(title=_TITLE, version=version("ackstate"), description=_DESCRIPTION, routes=app.routes)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            # FastAPI declares its own answer to malformed requests, which `add_refusals` replaces.
            operation["responses"].pop("422", None)
            if has_token:
                operation["responses"].pop("403", None)
            if has_token and path not in OPEN_PATHS:
                operation["security"] = [{"bearer": []}]
            else:
                operation["responses"].pop("401", None)
    schemas = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Refusal"] = REFUSAL_SCHEMA
    if has_token:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return document


_UNMATCHED = "none"
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
            self._count(scope, 500)
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
