"""Does a single cursor tell the events of a subscription? Asked while they are replayed, of those that can show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.analysis.trace.events import EventKind, TraceError
from ackstate.analysis.trace.order import ALIVE, LIVES, PERSIST_ENDS, PERSISTS

if TYPE_CHECKING:
    from ackstate.analysis.replay.acked import EventChunk

# Of many of these between others one is as good as all.
_MANY = tuple(kind for kind in ALIVE if kind not in (*PERSISTS, EventKind.RESET))


@final
class InterleavingCheck:
    """Follows the chunks of a subscription: does it act after its crash, or begin a persist within another?

    `ackstate.analysis.trace.order.EventOrder` sees more, event by event: which persist it is that ends, and a recovery
    of a process that nobody saw die. Who records his own process alone cannot tell when it died.

    Args:
        key: Topic and subscription.
    """

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key
        self._is_dead = False
        self._is_persisting = False

    def check(self, chunk: EventChunk) -> None:
        """Take the next chunk in, thinned or not.

        Complexity: a pass over its kinds, and a step for each persist, crash and recovery.

        Raises:
            TraceError: No single cursor can have told it.
        """
        few = np.flatnonzero(~chunk.is_any_of(_MANY))
        following = 0
        for at, kind in zip(few.tolist(), chunk.kind[few].tolist(), strict=True):
            self._refuse_if(self._is_dead and at > following, chunk, following)
            self._refuse_if(self._is_dead and kind in ALIVE, chunk, at)
            self._refuse_if(self._is_persisting and kind == EventKind.PERSIST_BEGUN, chunk, at)
            if kind in LIVES:
                self._is_dead = kind == EventKind.CRASH
            if kind in LIVES or kind in PERSIST_ENDS:
                self._is_persisting = False
            elif kind == EventKind.PERSIST_BEGUN:
                self._is_persisting = True
            following = at + 1
        self._refuse_if(self._is_dead and following < len(chunk.kind), chunk, following)

    def _refuse_if(self, is_wrong: bool, chunk: EventChunk, at: int) -> None:
        if is_wrong:
            topic, subscription = self._key
            raise TraceError(
                f"two cursors under one name, seen at {chunk.ts_ms[at]} ms: subscription {subscription!r} of {topic}: "
                "ackstate trace check says more; record each under a name of its own"
            )
