"""Runs the admin server under uvicorn until a signal stops it."""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from ackstate.analysis.admin.answers import log_to_stderr
from ackstate.analysis.admin.app import create_app
from ackstate.analysis.admin.guard import check_token
from ackstate.analysis.admin.resolve import BrokerPolicies, LevelledPolicies
from ackstate.analysis.stop_signals import until_stopped
from ackstate.errors import AckStateError
from ackstate.limits.policies import PolicyStore
from ackstate.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
