"""Runs applications under uvicorn within limits, and the admin server until a signal stops it."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

import uvicorn

from ackstate.analysis.admin.app import create_app
from ackstate.analysis.admin.connections import ACCEPT_BATCH, BoundedConnection, ConnectionLimits, Connections
from ackstate.analysis.admin.guard import WRONG_TOKEN_SECONDS_MAX
from ackstate.analysis.admin.log_lines import LOG, log_to_stderr
from ackstate.analysis.admin.resolve import BrokerPolicies, LevelledPolicies
from ackstate.analysis.admin.tokens import OneToken
from ackstate.cursor import PolicyStore, SqliteStore
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from starlette.types import ASGIApp

    from ackstate.analysis.admin.tokens import Tokens

LOCAL_HOST = "127.0.0.1"
_GRACE_SECONDS = 5
_HANDLED = (signal.SIGINT, signal.SIGTERM)
_BACKLOG = 1024
_HEAD_BYTES_MAX = 16 * 1024
_OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the server.

    Attributes:
        store: The directory of an SQLite store; created if it is missing.
        port: The port; 0 for any free port.
        host: The address to listen on; without a token, only this machine's own.
        token: The token of requests, None for none; `Tokens` for several, or for those of a file.
        broker: Defaults if no policy is set.
        connections: Limits on the connections of clients.
        wrong_token_seconds: Delay of the answer to a wrong token, 0 to 4 s.

    Raises:
        AckStateError: There is no token although other machines could connect, or the delay is out of its
            bounds.
        ValueError: The token is not one word of 16 to 8,192 visible ASCII characters.
    """

    store: Path
    port: int = 0
    host: str = LOCAL_HOST
    token: bytes | Tokens | None = field(default=None, repr=False)
    broker: BrokerPolicies = field(default_factory=BrokerPolicies)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    wrong_token_seconds: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.token, bytes):
            OneToken(self.token)
        if self.token is None and self.host != LOCAL_HOST:
            raise AckStateError(f"without a token the host must be {LOCAL_HOST}, got {self.host}: see --token-file")
        if not 0 <= self.wrong_token_seconds <= WRONG_TOKEN_SECONDS_MAX:
            raise AckStateError(
                f"wrong_token_seconds must be from 0 to {WRONG_TOKEN_SECONDS_MAX}, got {self.wrong_token_seconds}"
            )


def serve(settings: ServerSettings, *, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in progress, within 5 s, and close the store.

    Args:
        settings: The settings of the server.
        announce: Called with one line, which has the address, as soon as requests are served.

    Raises:
        AckStateError: The store cannot be opened.
        OSError: The port cannot be opened.
    """
    log_to_stderr()
    with listening(settings.host, settings.port) as listener, closing(SqliteStore(settings.store)) as store:
        LevelledPolicies(PolicyStore(store.metadata), settings.broker).log_not_kept()
        app = create_app(
            store, broker=settings.broker, token=settings.token, wrong_token_seconds=settings.wrong_token_seconds
        )
        line = _line(settings, listener.getsockname()[1])
        bounded_server(app, settings.connections, on_ready=lambda: announce(line)).run(sockets=[listener])


def bounded_server(
    app: ASGIApp,
    limits: ConnectionLimits,
    *,
    concurrency_max: int | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    """Return a server of an application within limits. It ends on a signal, or by `should_exit` in another thread.

    Args:
        app: The application.
        limits: Limits on the connections of each client.
        concurrency_max: Most connections, or requests in progress, of all clients; one more gets 503. None for any.
        on_ready: Called when requests are served.
    """
    connections = Connections(limits)
    protocol = cast("type[asyncio.Protocol]", partial(BoundedConnection, connections=connections))
    config = uvicorn.Config(
        app, http=protocol, loop="asyncio", ws="none", lifespan="off", log_config=None, access_log=False,
        proxy_headers=False, server_header=False, backlog=ACCEPT_BATCH, timeout_graceful_shutdown=_GRACE_SECONDS,
        limit_concurrency=concurrency_max, h11_max_incomplete_event_size=_HEAD_BYTES_MAX,
    )  # fmt: skip
    return _Server(config, connections, on_ready=on_ready)


@final
class _Server(uvicorn.Server):
    """Announces when it is ready, and returns on a signal; uvicorn would raise it again before the store is closed."""

    def __init__(self, config: uvicorn.Config, connections: Connections, *, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._connections = connections
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        asyncio.get_running_loop().set_exception_handler(self._loop_failed)
        await super().startup(sockets)
        for listener in sockets or ():
            # uvicorn has set the backlog to the number accepted at once; this many more may wait.
            listener.listen(_BACKLOG)
        self._on_ready()

    def _loop_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS:
            # The loop retries in a second, and would log a traceback for each waiting connection.
            self._connections.descriptors_warning.log(f"cannot accept connections: {error.strerror}; they wait")
        else:
            LOG.error("%s", context.get("message"), exc_info=error)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on the first signal, at once on the second."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in _HANDLED}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 is any free one.

    Raises:
        AckStateError: The address cannot be used; an empty host would be every one.
    """
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
    return f"ackstate admin on http://{host}:{port} ({who}); read http://{host}:{port}/docs"
