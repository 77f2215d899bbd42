"""Finds the bookies of a cluster that do not answer, for an error that names them."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_ANSWERS_WITHIN_S = 1.0
_CONNECTIONS_AT_ONCE = 16
# Reads an entry that does not exist, in version 2 of the protocol: a length, version and operation, ledger, entry.
_REQUEST = struct.pack(">iiqq", 20, 2 << 24 | 2 << 16, 2**62, 0)


def unavailable_bookies(addresses: Sequence[str], available: set[str]) -> list[str]:
    """Return the bookies that do not accept writes or do not answer, in order.

    A killed or hanging bookie stays registered until its session ends, and the system accepts connections to a hanging
    one. Hence the request, which a bookie that works answers or refuses.
    """
    with ThreadPoolExecutor(_CONNECTIONS_AT_ONCE) as threads:
        answered = list(threads.map(_answers, addresses))
    return [
        address for address, answers in zip(addresses, answered, strict=True) if not answers or address not in available
    ]


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return True
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN_S) as connection:
            connection.sendall(_REQUEST)
            connection.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False
    return True
