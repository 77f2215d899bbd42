"""Checks, during a replay, that the events of a subscription come from a single cursor."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.analysis.trace.events import EventKind, TraceError
from ackstate.analysis.trace.order import ALIVE, LIVES, PERSIST_ENDS, PERSISTS

if TYPE_CHECKING:
    from ackstate.analysis.replay.acked import EventChunk

# A sequence of these events is reduced to one.
_MANY = tuple(kind for kind in ALIVE if kind not in (*PERSISTS, EventKind.RESET))


@final
class InterleavingCheck:
    """Follows the chunks of a subscription, and refuses an action after its crash or a persist begun within another.

    `ackstate.analysis.trace.order.EventOrder` checks more, event by event: which persist ends, and recoveries of a
    process whose death was not recorded. A recorder within the process alone cannot record when it died.

    Args:
        key: Topic and subscription.
    """

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key
        self._is_dead = False
        self._is_persisting = False

    def check(self, chunk: EventChunk) -> None:
        """Check the next chunk, compact or not.

        Complexity: a pass over its kinds, and a step for each persist, crash and recovery.

        Raises:
            TraceError: The events cannot come from a single cursor.
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
                "run ackstate trace check for details; record each cursor under a name of its own"
            )
