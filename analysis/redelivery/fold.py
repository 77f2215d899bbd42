"""Replay one subscription's trace, a chunk at a time: how many acked messages would a crash bring back, at each event?

At an instant it is *acked so far* minus *covered by the last completed persist*. Both are running counts, so a chunk is
a few array operations; only what is newly acked needs sets, and those are bitmaps.
"""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from analysis.redelivery.acked import AckedFold, Chunk, Int64s
from analysis.trace.events import EventKind

_UNKNOWN = np.iinfo(np.int64).min
_LEFT_OUT = (EventKind.HELD_BACK, EventKind.CUT_OFF, EventKind.DISPLACED)
_SETTLING = (EventKind.RECOVER, EventKind.RESET)


class Folded(NamedTuple):
    """What the events of a chunk lead to, in parallel arrays; each value holds just after its event.

    Attributes:
        redelivery: Acked messages that a crash would bring back.
        if_written: The same, had the persist that is under way been written; equals `redelivery` without one.
        persisting: True from the beginning of a persist until its end; a failed one ends with the next that does not.
        alive: False from a crash until the recovery.
    """

    redelivery: Int64s
    if_written: Int64s
    persisting: npt.NDArray[np.bool_]
    alive: npt.NDArray[np.bool_]


@final
class RedeliveryFold:
    """Carries one subscription's state from chunk to chunk.

    Memory: a bitmap of what was ever acked, and a few arrays of a chunk's length.
    """

    def __init__(self) -> None:
        self._acked = AckedFold()
        self._acked_count = 0
        # Counts of acked messages: what the last completed persist covered, and what the last begun one covers.
        self._durable_count = 0
        self._begun_count = 0
        self._persisting = False
        self._alive = True

    def fold(self, chunk: Chunk) -> Folded:
        """Replay the next chunk.

        Complexity: O(events log events + short entries), and one bitmap operation for each long run.
        """
        kind = chunk.kind
        acked = self._acked_count + np.cumsum(self._acked.take(chunk).counts(len(kind)))
        # What a persist leaves out is named after it began, and taken off what it covers from there on.
        left_out = np.cumsum(np.where(np.isin(kind, _LEFT_OUT), _length(chunk), 0))
        displaced = np.cumsum(np.where(kind == EventKind.DISPLACED, _length(chunk), 0))
        begun = _latest(np.where(kind == EventKind.PERSIST_BEGUN, acked + left_out, _UNKNOWN), self._begun_count)
        begun -= left_out
        # A recovery starts from what is durable: nothing that is acked then would be lost by another crash.
        settled = np.where(np.isin(kind, _SETTLING), acked + displaced, _UNKNOWN)
        settled = np.where(kind == EventKind.PERSIST_ENDED, begun + displaced, settled)
        durable = _latest(settled, self._durable_count) - displaced
        persisting = _latest_flag(
            kind == EventKind.PERSIST_BEGUN,
            np.isin(kind, (EventKind.PERSIST_ENDED, *_SETTLING)),
            before=self._persisting,
        )
        alive = _latest_flag(kind == EventKind.RECOVER, kind == EventKind.CRASH, before=self._alive)
        if len(kind):
            self._acked_count, self._begun_count = int(acked[-1]), int(begun[-1])
            self._durable_count = int(durable[-1])
            self._persisting, self._alive = bool(persisting[-1]), bool(alive[-1])
        return Folded(acked - durable, acked - np.where(persisting, begun, durable), persisting, alive)


def _length(chunk: Chunk) -> Int64s:
    return chunk.last_entry - chunk.first_entry + 1


def _latest(values: Int64s, before: int) -> Int64s:
    """Carry each known value forward over the unknown ones that follow, beginning with `before`."""
    known = np.where(values != _UNKNOWN, np.arange(len(values)), -1)
    at = np.maximum.accumulate(known) if len(known) else known
    return np.where(at >= 0, values[at], before)


def _latest_flag(begins: npt.NDArray[np.bool_], ends: npt.NDArray[np.bool_], *, before: bool) -> npt.NDArray[np.bool_]:
    """Return, at each event, whether the latest beginning is later than the latest end."""
    marks = np.where(begins, 1, np.where(ends, 0, _UNKNOWN))
    return _latest(marks, int(before)).astype(np.bool_)
