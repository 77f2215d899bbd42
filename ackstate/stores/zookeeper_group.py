"""Sends many writes to a cluster at the same time, so that its servers share syncs among them.

Ledgers are created many in one transaction, because each creation counts up the same node. All other writes are
transactions of their own, in a few threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import TYPE_CHECKING

from ackstate.errors import AckStateError
from ackstate.stores.base import PayloadTooLargeError
from ackstate.stores.writes import CreateLedger, check_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.stores.writes import StoreParts, Write

_Outcome = int | AckStateError

_THREADS_MAX = 16
_CREATIONS_MAX = 100


def write_concurrently(
    store: StoreParts, writes: Sequence[Write], create_all: Callable[[Sequence[str]], list[int]]
) -> list[_Outcome]:
    """Execute writes as `GroupStore.write_all`."""
    check_writes(writes)
    creations = {number: write for number, write in enumerate(writes) if isinstance(write, CreateLedger)}
    others = {number: write for number, write in enumerate(writes) if number not in creations}
    created = _create_all(create_all, [each.owner for each in creations.values()])
    outcomes: dict[int, _Outcome] = dict(zip(creations, created, strict=True))
    if others:
        with ThreadPoolExecutor(min(_THREADS_MAX, len(others)), thread_name_prefix="ackstate-writes") as threads:
            executed = threads.map(lambda write: _outcome(store, write), others.values())
            outcomes.update(zip(others, executed, strict=True))
    return [outcomes[number] for number in range(len(writes))]


def _create_all(create_all: Callable[[Sequence[str]], list[int]], owners: Sequence[str]) -> list[_Outcome]:
    outcomes: list[_Outcome] = []
    for first in range(0, len(owners), _CREATIONS_MAX):
        some = owners[first : first + _CREATIONS_MAX]
        try:
            outcomes += create_all(some)
        except PayloadTooLargeError:
            outcomes += [_created(create_all, owner) for owner in some]
        except AckStateError as error:
            outcomes += [copy(error) for _ in some]
    return outcomes


def _created(create_all: Callable[[Sequence[str]], list[int]], owner: str) -> _Outcome:
    try:
        return create_all([owner])[0]
    except AckStateError as error:
        return error


def _outcome(store: StoreParts, write: Write) -> _Outcome:
    try:
        return write.execute(store)
    except AckStateError as error:
        return error
