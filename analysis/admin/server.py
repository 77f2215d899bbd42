"""Runs the application in this process until it is told to stop: the port, the signals, the log."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import uvicorn

from ackstate.errors import AckStateError
from analysis.admin.app import create_app
from analysis.admin.resolve import BrokerPolicies, LevelledPolicies
from cursor import PolicyStore, SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOCAL_HOST = "127.0.0.1"
_GRACE_SECONDS = 5
_HANDLED = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What is served, and to whom.

    Attributes:
        store: The directory of an SQLite store; made if it is missing.
        port: 0 for any that is free.
        host: The address to listen at; without a token, only this machine's own.
        token: What requests must bear, None for nothing.
        broker: What holds where no policy says anything.

    Raises:
        AckStateError: There is no token, and others than this machine could connect; or the host is empty.
    """

    store: Path
    port: int = 0
    host: str = LOCAL_HOST
    token: bytes | None = field(default=None, repr=False)
    broker: BrokerPolicies = field(default_factory=BrokerPolicies)

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise AckStateError("the host to listen at is empty: for every address say 0.0.0.0 or ::")
        if self.token is None and self.host != LOCAL_HOST:
            raise AckStateError(f"without a token only {LOCAL_HOST} is listened at, not {self.host}: see --token-file")


def serve(settings: ServerSettings, *, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests under way, at most 5 s, and close the store.

    Args:
        settings: What, and to whom.
        announce: Gets one line with the address as soon as requests are answered.

    Raises:
        AckStateError: The store cannot be opened.
        OSError: The port cannot be had.
    """
    _log_to_stderr()
    with _listening(settings) as listener, closing(SqliteStore(settings.store)) as store:
        LevelledPolicies(PolicyStore(store.metadata), settings.broker).log_not_kept()
        app = create_app(store, broker=settings.broker, token=settings.token)
        config = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
            server_header=False, timeout_graceful_shutdown=_GRACE_SECONDS,
        )  # fmt: skip
        line = _line(settings, listener.getsockname()[1])
        _Server(config, on_ready=lambda: announce(line)).run(sockets=[listener])


@final
class _Server(uvicorn.Server):
    """Says when it is ready, and returns on a signal, which uvicorn would raise again before the store is closed."""

    def __init__(self, config: uvicorn.Config, *, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        self._on_ready()

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


def _listening(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family)
        # Connections inherit it. Without, a body waits 40 ms for the client to acknowledge the headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = error.strerror or error
        raise AckStateError(f"cannot listen at {settings.host} port {settings.port}: {reason}") from error


def _line(settings: ServerSettings, port: int) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    who = "no token: only this machine can connect" if settings.token is None else "bearer token required"
    return f"ackstate admin on http://{host}:{port} ({who}); read http://{host}:{port}/docs"


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for name in ("uvicorn.error", "ackstate.admin"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.WARNING)
