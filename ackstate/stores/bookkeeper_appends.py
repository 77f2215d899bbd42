"""Appends many entries at once, within the memory of a small Java heap."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ackstate.stores.base import StoreError
    from ackstate.stores.bookkeeper_client import BookKeeperClient, Reply

_REQUEST_BYTES_MAX = 4 << 20
# Bookies are at work on one request while the child reads the next.
_REQUEST_ENTRIES_MAX = 250
_REQUESTS_AT_ONCE = 4


def append_all(client: BookKeeperClient, entries: Sequence[tuple[int, bytes]]) -> list[int | StoreError]:
    """Append entries, several requests at once, and return the outcome of each: its entry id, or an error.

    Raises:
        StoreError: It is unknown which entries were appended.
    """
    outcomes: list[int | StoreError] = []
    under_way: deque[Reply[list[int | StoreError]]] = deque()
    for request in _requests(entries):
        if len(under_way) == _REQUESTS_AT_ONCE:
            outcomes += under_way.popleft().wait()
        under_way.append(client.append(request))
    for reply in under_way:
        outcomes += reply.wait()
    return outcomes


def _requests(entries: Sequence[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Yield entries in order, in requests that are not too large."""
    request: list[tuple[int, bytes]] = []
    size_bytes = 0
    for handle, entry in entries:
        if request and (size_bytes + len(entry) > _REQUEST_BYTES_MAX or len(request) == _REQUEST_ENTRIES_MAX):
            yield request
            request, size_bytes = [], 0
        request.append((handle, entry))
        size_bytes += len(entry)
    if request:
        yield request
