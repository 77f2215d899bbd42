"""Does a single cursor tell the events of a subscription? Asked while they are replayed, of those that can show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from analysis.trace.events import EventKind, TraceError
from analysis.trace.order import EventOrder
from analysis.trace.rows import Events

if TYPE_CHECKING:
    from analysis.redelivery.acked import Chunk

# Of many of these between others one is as good as all.
_MANY = (
    EventKind.DELIVER, EventKind.ACK, EventKind.MARK_DELETE, EventKind.HELD_BACK, EventKind.CUT_OFF,
    EventKind.DISPLACED,
)  # fmt: skip


@final
class OneCursor:
    """Follows the chunks of a subscription: does it act after its crash, or begin a persist within another?

    `EventOrder` sees more, event by event: which persist it is that ends, and a recovery of a process that nobody saw
    die. Who records his own process alone cannot tell when it died; what was acked by then may well be replayed.

    Args:
        key: Topic and subscription.
    """

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key
        self._order = EventOrder()

    def check(self, chunk: Chunk) -> None:
        """Take the next chunk in, thinned or not.

        Complexity: a few passes over its kinds.

        Raises:
            TraceError: No single cursor can have told it.
        """
        is_one_of_many = chunk.is_any_of(_MANY)
        telling = _telling(~is_one_of_many)
        kind = np.where(is_one_of_many[telling], EventKind.DELIVER, chunk.kind[telling])
        none = np.full(len(telling), -1)
        wrong = self._order.judge_lives(Events(chunk.ts_ms[telling], kind, none, none, none, none))
        if wrong.any():
            topic, subscription = self._key
            at_ms = int(chunk.ts_ms[telling[np.argmax(wrong)]])
            raise TraceError(
                f"two cursors under one name, seen at {at_ms} ms: subscription {subscription!r} of {topic}: ackstate "
                "trace check says more; record each under a name of its own"
            )


def _telling(is_one_of_few: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the few, and of those between them the last, in order."""
    few = np.flatnonzero(is_one_of_few)
    found = np.unique(np.concatenate((few, few - 1, [len(is_one_of_few) - 1])))
    return found[found >= 0]
