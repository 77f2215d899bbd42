"""Bounds the resources that clients can hold: the number of connections, and their time without a request.

uvicorn bounds only the time between an answer and the next byte. Hypercorn bounds the headers too, but has no limit per
client and upgrades plain connections to HTTP/2. Granian never times out before the first byte and has no such limit.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Any, final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ackstate.analysis.admin.answers import refusal
from ackstate.analysis.admin.log_lines import RepeatedWarning
from ackstate.integers import check_count

if TYPE_CHECKING:
    import asyncio
    from types import TracebackType

ACCEPT_BATCH = 16
"""Connections accepted at once: each needs a descriptor before the first of them can be refused."""

# Descriptors reserved for the store and for connections about to be refused.
_SPARE_DESCRIPTORS = 8 * ACCEPT_BATCH
_IPV6_CLIENT_BITS = 64  # a host has all addresses of such a network
_TIMEOUT, _TOO_MANY, _UNAVAILABLE = 408, 429, 503
_PHRASES = {_TIMEOUT: "Request Timeout", _TOO_MANY: "Too Many Requests", _UNAVAILABLE: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the connections of clients.

    Attributes:
        header_seconds: From the connection, or the first byte of a later request, to the end of its headers.
        idle_seconds: From the end of an answer to the first byte of the next request.
        answer_seconds: From when an answer first waits for a client that does not read, until the connection is cut.
        per_client: Most connections of one address, or of one /64 network with IPv6; 0 for any number. A connection
            counts until its last request is complete, even after the client has closed it.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A time is below 1, or the number of connections below 0.
    """

    header_seconds: int = 5
    idle_seconds: int = 5
    answer_seconds: int = 60
    per_client: int = 32

    def __post_init__(self) -> None:
        for name in ("header_seconds", "idle_seconds", "answer_seconds"):
            check_count(name, getattr(self, name), least=1)
        check_count("per_client", self.per_client, least=0)


@final
class Connections:
    """Counts the open connections of each client; not thread-safe, for one event loop. Memory: O(open connections)."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.descriptors_warning = RepeatedWarning()
        self._client_warning = RepeatedWarning()
        self._count_of: dict[str, int] = {}
        self._count = 0
        self._descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = self._descriptors - min(_SPARE_DESCRIPTORS, self._descriptors // 2)

    def enter(self, client: str) -> Slot | tuple[int, str]:
        """Admit a connection, or return the status and the reason of the refusal."""
        most = self.limits.per_client
        if most and self._count_of.get(client, 0) >= most:
            self._client_warning.log(f"refused a connection of {client}: it has {most} open, the limit per client")
            return _TOO_MANY, f"too many connections: at most {most} of one client"
        if self._count >= self._most:
            self.descriptors_warning.log(
                f"out of file descriptors: {self._count} connections are open, and the process is limited to "
                f"{self._descriptors} descriptors (ulimit -n); new connections are refused"
            )
            return _UNAVAILABLE, "too many connections"
        self._count += 1
        self._count_of[client] = self._count_of.get(client, 0) + 1
        return Slot(self, client)

    def leave(self, client: str) -> None:
        """Remove a connection."""
        self._count -= 1
        self._count_of[client] -= 1
        if not self._count_of[client]:
            del self._count_of[client]


@final
class Slot:
    """A connection's share of its client's limit, until it is closed and no request is in progress."""

    def __init__(self, connections: Connections, client: str) -> None:
        self._connections = connections
        self._client = client
        self._holders = 1

    def __enter__(self) -> None:
        """Start a request."""
        self._holders += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a request."""
        self.give_up()

    def give_up(self) -> None:
        """Close the connection, or end a request."""
        self._holders -= 1
        if not self._holders:
            self._connections.leave(self._client)


@final
class BoundedConnection(H11Protocol):
    """A connection that is closed when its client is too slow or has too many.

    Requests find their `Slot` in the ``state`` of their scope.
    """

    def __init__(self, *arguments: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._connections = connections
        self._limits = connections.limits
        self.timeout_keep_alive = self._limits.idle_seconds
        self._slot: Slot | None = None
        # Deadlines: for complete headers, and for the client to read its answer.
        self._header_deadline: asyncio.TimerHandle | None = None
        self._answer_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit a connection or refuse it."""
        super().connection_made(transport)
        if self.client is None:
            transport.abort()  # The client has already disconnected.
            return
        admitted = self._connections.enter(client_of(self.client[0]))
        if isinstance(admitted, Slot):
            self._slot = admitted
            self.app_state = {**self.app_state, "slot": admitted}
            self._await_headers()
        else:
            self._refuse(*admitted)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._stop_header_timer()
        self._stop_answer_timer()
        if self._slot is not None:
            self._slot.give_up()
            self._slot = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read data; start the header timer with a new request, and stop it at the end of the headers."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()
        else:
            self._await_headers()

    def on_response_complete(self) -> None:
        """Start to wait for the next request."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not HTTP."""
        super().send_400_response(msg)
        self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._await_reader()

    def pause_writing(self) -> None:
        """Start the timer for the client to read the answer."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Stop the timer: the client reads."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_answer_timer()

    def _stop_header_timer(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _stop_answer_timer(self) -> None:
        if self._answer_deadline is not None:
            self._answer_deadline.cancel()
            self._answer_deadline = None

    def _await_headers(self) -> None:
        if self._header_deadline is None and not self.transport.is_closing():
            self._header_deadline = self.loop.call_later(self._limits.header_seconds, self._cut_off)

    def _await_reader(self) -> None:
        if self._answer_deadline is None:
            self._answer_deadline = self.loop.call_later(self._limits.answer_seconds, self.transport.abort)

    def _cut_off(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(_TIMEOUT, f"the headers did not arrive within {self._limits.header_seconds} s")
        else:
            self.transport.close()
            self._await_reader()

    def _refuse(self, status: int, reason: str) -> None:
        """Answer without a request, and close."""
        body = bytes(refusal(status, reason).body)
        head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode("ascii") + body)
        self.transport.close()
        self._await_reader()


def client_of(host: str) -> str:
    """Return the client of a connection: its address, or with IPv6 the network of one host.

    >>> client_of("192.0.2.1"), client_of("::ffff:192.0.2.1"), client_of("2001:db8::1%eth0")
    ('192.0.2.1', '192.0.2.1', '2001:db8::/64')
    """
    address = ip_address(host.partition("%")[0])
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address), _IPV6_CLIENT_BITS), strict=False))
