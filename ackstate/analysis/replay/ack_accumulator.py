"""Replays a recorded subscription chunk by chunk, counting the acked messages that a crash would redeliver.

This is the number *acked so far* minus the number *covered by the last completed persist*. Both are running counts, so
a chunk takes a few array operations; only newly acked entries need sets, which are bitmaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar, final

import numpy as np
import numpy.typing as npt

from ackstate.analysis.replay.acked import AckAccumulator, Bools, EventChunk, Int64s
from ackstate.analysis.replay.curve_sum import CAUSES
from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Sequence


_Scalar = TypeVar("_Scalar", np.int64, np.bool_)
_LEFT_OUT = (EventKind.HELD_BACK, EventKind.CUT_OFF, EventKind.DISPLACED)
_SETTLING = (EventKind.RECOVER, EventKind.RESET)


class Folded(NamedTuple):
    """The results of a chunk's events, in parallel arrays; each value holds just after its event.

    Attributes:
        redelivery: Acked messages that a crash would redeliver.
        if_written: The same number if the persist in progress had been written; equals `redelivery` without one.
        persisting: True from the start of a persist to its end; a failed one ends with the next successful one.
        alive: False from a crash until the recovery.
        causes: The part of `redelivery` that the last completed persist excluded, by `curve_sum.CAUSES`: young acks,
            and acks beyond a limit. The latter all count under the range limit, because an event does not name the
            limit. None if no ack was excluded.
    """

    redelivery: Int64s
    if_written: Int64s
    persisting: Bools
    alive: Bools
    causes: npt.NDArray[np.int64] | None


@final
class RedeliveryFold:
    """Carries one subscription's state from chunk to chunk.

    Memory: a bitmap of all acks ever made, and a few arrays of a chunk's length.
    """

    def __init__(self) -> None:
        self._acked = AckAccumulator()
        self._acked_count = 0
        # Counts of acked messages covered by the last completed persist, and by the last one that was started.
        self._durable_count = 0
        self._begun_count = 0
        self._persisting = False
        self._alive = True
        self._young, self._cut = LeftOut(), LeftOut()

    def fold(self, chunk: EventChunk) -> Folded:
        """Replay the next chunk.

        Complexity: O(events log events + short entries), and one bitmap operation for each long run.
        """
        kind = chunk.kind
        acked = self._acked_count + np.cumsum(self._acked.take(chunk).counts(len(kind)))
        # Acks excluded from a persist are recorded after its start, and reduce its coverage from there on.
        left_out = _named_so_far(chunk, _LEFT_OUT)
        displaced = _named_so_far(chunk, (EventKind.DISPLACED,))
        begins, ends = kind == EventKind.PERSIST_BEGUN, kind == EventKind.PERSIST_ENDED
        begun = _latest(begins, acked + left_out, self._begun_count) - left_out
        # A recovery starts from the durable state: another crash at that point would lose no ack.
        settles = ends | chunk.is_any_of(_SETTLING)
        durable = _latest(settles, np.where(ends, begun, acked) + displaced, self._durable_count) - displaced
        persisting = _latest(begins | settles, begins, self._persisting)
        recovers = kind == EventKind.RECOVER
        alive = _latest(recovers | (kind == EventKind.CRASH), recovers, self._alive)
        if len(kind):
            self._acked_count, self._begun_count = int(acked[-1]), int(begun[-1])
            self._durable_count = int(durable[-1])
            self._persisting, self._alive = bool(persisting[-1]), bool(alive[-1])
        if_written = acked - np.where(persisting, begun, durable)
        return Folded(acked - durable, if_written, persisting, alive, self._causes(chunk))

    def _causes(self, chunk: EventChunk) -> Int64s | None:
        if not (chunk.is_any_of(_LEFT_OUT).any() or self._young.is_some or self._cut.is_some):
            return None
        causes = np.zeros((len(CAUSES), len(chunk.kind)), np.int64)
        causes[CAUSES.index("young")] = self._young.take(chunk, named=(EventKind.HELD_BACK,))
        causes[CAUSES.index("cut_by_ranges")] = self._cut.take(chunk, named=(EventKind.CUT_OFF, EventKind.DISPLACED))
        return causes


@final
class LeftOut:
    """Counts messages excluded from the last completed persist for one reason, or displaced by any persist."""

    def __init__(self) -> None:
        self._count = 0
        self._begun_count = 0

    @property
    def is_some(self) -> bool:
        """Whether there are, or may be, such messages."""
        return bool(self._count or self._begun_count)

    def take(self, chunk: EventChunk, *, named: tuple[EventKind, ...]) -> Int64s:
        """Return the count after each event of the next chunk."""
        kind = chunk.kind
        total = _named_so_far(chunk, named)
        # Displaced acks cease to be durable at once, even if the persist fails.
        displaced = _named_so_far(chunk, tuple({EventKind.DISPLACED} & set(named)))
        begun = total - _latest(kind == EventKind.PERSIST_BEGUN, total, -self._begun_count)
        ends = kind == EventKind.PERSIST_ENDED
        settles = ends | chunk.is_any_of((*_SETTLING, EventKind.CRASH))
        count = _latest(settles, np.where(ends, begun, 0) - displaced, self._count) + displaced
        if len(kind):
            self._count, self._begun_count = int(count[-1]), int(begun[-1])
        return count


def _named_so_far(chunk: EventChunk, kinds: Sequence[EventKind]) -> Int64s:
    """Return the number of messages named by events of some kinds, up to each event."""
    is_named = chunk.is_any_of(kinds)
    if not is_named.any():
        return np.zeros(len(is_named), np.int64)
    return np.cumsum(np.where(is_named, chunk.last_entry - chunk.first_entry + 1, 0))


def _latest(is_known: Bools, values: npt.NDArray[_Scalar], before: int) -> npt.NDArray[_Scalar]:
    """Fill unknown values with the last known one, starting from `before`."""
    at = np.flatnonzero(is_known)
    lengths = np.diff(at, prepend=0, append=len(values))
    return np.repeat(np.append(np.array([before], values.dtype), values[at]), lengths)
