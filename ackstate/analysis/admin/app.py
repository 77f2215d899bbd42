"""The server as an ASGI application: all its paths, on an open store; run under uvicorn until a signal stops it.

Every request is checked before it reaches a path: its token, its host and path, and its size.
"""

from __future__ import annotations

import hmac
import re
import socket
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Any, final

import uvicorn
from fastapi import Depends, FastAPI, HTTPException
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ackstate.analysis.admin.answers import LOG, REFUSAL_SCHEMA, add_refusals, log_to_stderr, refusal, refusals
from ackstate.analysis.admin.internal_stats import PersistentTopicInternalStats  # noqa: TC001 - FastAPI reads it
from ackstate.analysis.admin.live import LiveRoutes, stored_stats
from ackstate.analysis.admin.policy_routes import (
    TOPIC,
    BrokerPolicies,
    LevelledPolicies,
    NamedOwner,
    PolicyRoutes,
    topic_names,
)
from ackstate.analysis.stop_signals import until_stopped
from ackstate.errors import AckStateError
from ackstate.limits.policies import PolicyOwner, PolicyStore
from ackstate.stores.base import Store, StoreError
from ackstate.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from starlette.middleware.base import RequestResponseEndpoint
    from starlette.requests import Request
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
    requests = ServerMetrics(own, policies)
    # FastAPI's pages would load scripts from the internet; redirects would repeat any Host that the client sent.
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False)
    add_refusals(app)

    def healthz() -> dict[str, str]:
        """Check that the store answers."""
        try:
            policies.read(PolicyOwner("healthz", "healthz"))
        except AckStateError as error:
            # Requests need no token, and the error may name the store's files.
            LOG.error("%s: %s", type(error).__name__, error)
            status = 503 if isinstance(error, StoreError) else 500
            raise HTTPException(status, "the store does not answer; see the server's log") from None
        return {"status": "ok"}

    async def metrics() -> Response:
        """Return the metrics of the server in Prometheus' text format."""
        text = await run_in_threadpool(generate_latest, own)  # reads the store
        if registry is not None and topics is not None:
            text += generate_latest(registry)
        elif registry is not None:
            text += await run_in_threadpool(generate_latest, registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def internal_stats(owner: NamedOwner) -> PersistentTopicInternalStats:
        """Return the ledgers of a topic, and its cursors as a broker would recover them now."""
        return stored_stats(store, owner)

    shared: dict[str, Any] = {"tags": ["store"], "response_description": "The requested resource"}
    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}
    # The paths of policies end in a parameter, so they come last.
    if topics is not None:
        LiveRoutes(topics, store).add_to(app)
    app.add_api_route("/healthz", healthz, responses=refusals(), **shared)
    app.add_api_route("/metrics", metrics, responses=text | refusals(), response_class=Response, **shared)
    app.add_api_route("/healthz", healthz, **_HEAD)
    app.add_api_route("/metrics", metrics, **_HEAD)
    if topics is None:
        names, responses = [Depends(topic_names)], refusals(404, 412)
        app.add_api_route(f"{TOPIC}/internalStats", internal_stats, dependencies=names, responses=responses, **shared)
    PolicyRoutes(LevelledPolicies(policies, broker or BrokerPolicies())).add_to(app)
    document = _openapi(app, has_token=token is not None)
    app.openapi = lambda: document  # type: ignore[method-assign]
    app.add_middleware(Guard, token=token)
    app.middleware("http")(requests.count)
    return app


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
class ServerMetrics:
    """Counts answers, and exports the number of namespaces and of topics with policies of their own.

    The labels are bounded: paths that no route matches, and other methods, count as ``none``. A scrape reads the store:
    O(namespaces and topics with policies).
    """

    def __init__(self, registry: CollectorRegistry, policies: PolicyStore) -> None:
        labels = ("method", "route", "status")
        self._requests = Counter("ackstate_admin_requests_total", "Requests answered.", labels, registry=registry)
        text = "Namespaces and topics that have policies of their own."
        owners = Gauge("ackstate_policies", text, ("level",), registry=registry)
        owners.labels("namespace").set_function(lambda: len(policies.namespaces()))
        owners.labels("topic").set_function(lambda: len(policies.topics()))

    async def count(self, request: Request, answer: RequestResponseEndpoint) -> Response:
        """Answer one request, and count it."""
        status = 500  # of an exception, which an outer handler turns into an answer
        try:
            response = await answer(request)
            status = response.status_code
        finally:
            method = request.method if request.method in _METHODS else _UNMATCHED
            route = getattr(request.scope.get("route"), "path", _UNMATCHED)
            self._requests.labels(method, route, status).inc()
        return response


BODY_BYTES_MAX = 64 * 1024

# They reveal nothing from the store.
OPEN_PATHS = frozenset({"/healthz", "/openapi.json"})
_TOKEN_BYTES_MIN, _TOKEN_BYTES_MAX = 16, 8 * 1024
_TOKEN = re.compile(rb"[\x21-\x7e]+")
_LOCAL_HOSTS = frozenset({"", "127.0.0.1", "localhost"})
_LENGTH_DIGITS_MAX = 20
_TOO_LARGE = f"the body is larger than {BODY_BYTES_MAX} bytes"
_CLOSE = {"Connection": "close"}


def check_token(token: bytes) -> None:
    """Check a token that clients must send."""
    if not isinstance(token, bytes):
        raise TypeError(f"the token must be bytes, got {type(token).__name__}")
    if not _TOKEN_BYTES_MIN <= len(token) <= _TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise ValueError(
            f"the token must be one word of {_TOKEN_BYTES_MIN} to {_TOKEN_BYTES_MAX} visible ASCII characters"
        )


@final
class Guard:
    """Refuses a wrong token, an encoded slash in the path, or too large a body; passes on all other requests."""

    def __init__(self, app: ASGIApp, *, token: bytes | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        answer = self._unwelcome(scope, headers) or _unsuitable(scope, headers)
        if answer is None:
            await self._app(scope, _bounded(receive), send)
        else:
            await answer(scope, receive, send)

    def _unwelcome(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        if self._token is None and not _is_loopback(scope.get("client")):
            reason = "without a token, the server answers only connections from 127.0.0.1 or ::1"
            return refusal(403, reason, headers=_CLOSE)
        if self._token is None and not _is_local(headers.get(b"host", b"")):
            return refusal(400, "Host must be 127.0.0.1 or localhost, because the server has no token")
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        is_right = self._token is None or (
            scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token)
        )
        if scope["path"] not in OPEN_PATHS and not is_right:
            reason = "the bearer token is missing or wrong"
            return refusal(401, reason, headers={"WWW-Authenticate": "Bearer"})
        return None


def _unsuitable(scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
    # Once decoded, it would be indistinguishable from a slash that separates names.
    if b"%2f" in scope.get("raw_path", b"").lower():
        return refusal(400, "a slash in a name (%2F) is not supported")
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if scope["method"] == "POST" and media_type != b"application/json":
        # A page of another origin can make a browser send other types without a preflight, but not this one.
        return refusal(415, "Content-Type must be application/json")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or len(length) > _LENGTH_DIGITS_MAX or int(length) > BODY_BYTES_MAX:
        return refusal(413, _TOO_LARGE, headers=_CLOSE)
    return None


def _bounded(receive: Receive) -> Receive:
    """Return a `Receive` that refuses a body once it is too large: it may come without ``Content-Length``."""
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > BODY_BYTES_MAX:
            raise HTTPException(413, _TOO_LARGE, headers=_CLOSE)
        return message

    return bounded


def _is_loopback(client: tuple[str, int] | None) -> bool:
    try:
        address = ip_address(str(client[0]).partition("%")[0]) if client else None
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address is not None and (mapped or address).is_loopback


def _is_local(host: bytes) -> bool:
    name = re.sub(r":[0-9]*\Z", "", host.decode("latin-1"))
    return name.lower() in _LOCAL_HOSTS


LOCAL_HOST = "127.0.0.1"
_CONNECTIONS_MAX = 100
_GRACE_SECONDS = 5
_IDLE_SECONDS = 5
_HEAD_BYTES_MAX = 16 * 1024


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the server."""

    store: Path  # The directory of an SQLite store; created if it is missing
    port: int = 0  # The port; 0 for any free port
    host: str = LOCAL_HOST  # The address to listen on; without a token, only this machine's own
    token: bytes | None = field(default=None, repr=False)  # The token of requests, None for none
    broker: BrokerPolicies = field(default_factory=BrokerPolicies)  # Defaults if no policy is set

    def __post_init__(self) -> None:
        if self.token is not None:
            check_token(self.token)
        elif self.host != LOCAL_HOST:
            raise AckStateError(f"without a token the host must be {LOCAL_HOST}, got {self.host}: see --token-file")


def serve(settings: ServerSettings, *, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in progress, within 5 s, and close the store."""
    log_to_stderr()
    # uvicorn sends a signal again once it has ended, before the store is closed: then it ends the block here.
    with (
        until_stopped(),
        listening(settings.host, settings.port) as listener,
        closing(SqliteStore(settings.store)) as store,
    ):
        LevelledPolicies(PolicyStore(store.metadata), settings.broker).log_not_kept()
        app = create_app(store, broker=settings.broker, token=settings.token)
        config = uvicorn.Config(
            app, http="h11", loop="asyncio", ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_graceful_shutdown=_GRACE_SECONDS,
            timeout_keep_alive=_IDLE_SECONDS, limit_concurrency=_CONNECTIONS_MAX,
            h11_max_incomplete_event_size=_HEAD_BYTES_MAX,
        )  # fmt: skip
        _Server(config, partial(announce, _line(settings, listener.getsockname()[1]))).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Announces itself once its own handlers of signals are set: one that came before would stop it half way."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 is any free one."""
    if not host.strip():
        raise AckStateError("the host must not be empty; for every address use 0.0.0.0 or ::")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
        # Connections inherit this option. Without it, a body waits 40 ms for the client to acknowledge the headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = error.strerror or error
        raise AckStateError(f"cannot listen on {host} port {port}: {reason}") from error


def _line(settings: ServerSettings, port: int) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    who = "no token: only this machine can connect" if settings.token is None else "bearer token required"
    return f"ackstate admin on http://{host}:{port} ({who}); read http://{host}:{port}/openapi.json"
