"""Finds the bookies of a cluster that cannot be reached, for an error that names them."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONNECTS_WITHIN_S = 1.0
_CONNECTIONS_AT_ONCE = 16


def unavailable_bookies(addresses: Sequence[str], available: set[str]) -> list[str]:
    """Return the bookies that do not accept writes or connections, in order.

    A killed bookie stays registered until its session ends, hence the connection.

    Args:
        addresses: All bookies, as ``host:port``.
        available: Those that are registered as accepting writes.
    """
    with ThreadPoolExecutor(_CONNECTIONS_AT_ONCE) as threads:
        connected = list(threads.map(_accepts_connections, addresses))
    return [
        address
        for address, answers in zip(addresses, connected, strict=True)
        if not answers or address not in available
    ]


def _accepts_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return True
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECTS_WITHIN_S).close()
    except OSError:
        return False
    return True
