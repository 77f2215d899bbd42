"""The curves of one subscription: redelivery if crashed at every instant, as recorded or under a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar, final

import numpy as np
import numpy.typing as npt

from ackstate.analysis.replay.acked import AckAccumulator, Bools, EventChunk, Int64s
from ackstate.analysis.replay.curve_sum import CAUSES, CurveSum, Points
from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.replay.acked import EventChunk, Int64s
    from ackstate.analysis.replay.replay import Epochs, Piece


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


# Acked so far minus covered by the last completed persist: both are running counts, so a chunk takes a few array
# operations; only newly acked entries need sets.
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


class Costs(NamedTuple):
    """The costs of a policy for one subscription.

    Attributes:
        write_count: The number of persists.
        bytes_written: The bytes that they wrote.
        bytes_kept: The bytes that a recovery would read at the end.
        bytes_kept_max: The maximum of `bytes_kept` at any time.
        blocked_ms: The time that dispatch was blocked.
    """

    write_count: int = 0
    bytes_written: int = 0
    bytes_kept: int = 0
    bytes_kept_max: int = 0
    blocked_ms: int = 0

    def and_then(self, epochs: Epochs) -> Costs:
        """Return the costs with some more persists."""
        if not len(epochs.at_ms):
            return self
        return Costs(
            self.write_count + int(np.count_nonzero(epochs.bytes_written)),
            self.bytes_written + int(epochs.bytes_written.sum()),
            int(epochs.bytes_kept[-1]),
            max(self.bytes_kept_max, int(epochs.bytes_kept.max())),
            self.blocked_ms,
        )


class RecordedCurve:
    """The curve as recorded: durability comes from the persist events."""

    def __init__(self) -> None:
        self.sum = CurveSum()
        self.costs = Costs()
        # For each crash of the last chunk: redelivery, redelivery if the persist in progress had been written, and
        # whether a persist was in progress.
        self.at_crashes = np.empty((0, 3), np.int64)
        self._fold = RedeliveryFold()

    def take(self, chunk: EventChunk) -> Points:
        """Replay the next chunk, and return its points."""
        folded = self._fold.fold(chunk)
        died = chunk.kind == EventKind.CRASH
        self.at_crashes = np.column_stack([folded.redelivery[died], folded.if_written[died], folded.persisting[died]])
        self.sum.note_peak(folded.redelivery, chunk.ts_ms)
        ends = _last_of_each(chunk.ts_ms)
        causes = None if folded.causes is None else folded.causes[:, ends]
        points = Points(chunk.ts_ms[ends], folded.redelivery[ends], folded.alive[ends], causes)
        self.sum.add(points)
        ended = int(np.count_nonzero(chunk.kind == EventKind.PERSIST_ENDED))
        self.costs = self.costs._replace(write_count=self.costs.write_count + ended)
        return points


class PolicyCurve:
    """The curve under a policy, from the persists of its replay."""

    def __init__(self) -> None:
        self.sum = CurveSum()
        self.costs = Costs()
        # After the last persist, or 0: the number of messages acked since the cursor was opened that are durable, and
        # the causes of the others.
        self._durable = 0
        self._causes = np.zeros((len(CAUSES), 1), np.int64)

    def restart(self) -> None:
        """Restart with an opened cursor: all acks are durable."""
        self._durable = 0
        self._causes = np.zeros((len(CAUSES), 1), np.int64)

    def reset(self, epochs: Epochs) -> None:
        """Restart with a cursor that was reset; its last persist may have excluded acks."""
        self._durable = -int(epochs.unpersisted[-1])
        self._causes = np.array([getattr(epochs, name)[-1:] for name in CAUSES])

    def take(self, piece: Piece, epochs: Epochs) -> Points:
        """Add the next events and persists, and return their points."""
        points = self._exact(piece, epochs)
        self.sum.add(points)
        return points

    def _exact(self, piece: Piece, epochs: Epochs) -> Points:
        """Return the points of the next events and persists, as if the times of the acks were exact."""
        ts_ms, at_ms = piece.events.ts_ms, epochs.at_ms
        ends = piece.events_until(at_ms)
        durable = np.concatenate(([self._durable], piece.acked[ends] - epochs.unpersisted))
        causes = np.concatenate((self._causes, np.array([getattr(epochs, name) for name in CAUSES])), axis=1)
        epoch = np.searchsorted(at_ms, ts_ms, "left")
        after_event = piece.acked[1:] - durable[epoch]
        self.sum.note_peak(after_event, ts_ms)
        lasts = _last_of_each(ts_ms)
        points = _merged(ts_ms[lasts], after_event[lasts], epoch[lasts], epochs)
        if causes.any():
            points = points._replace(causes=causes[:, _epoch_of_points(ts_ms[lasts], epoch[lasts], at_ms)])
        self.costs = self.costs.and_then(epochs)
        self._durable, self._causes = int(durable[-1]), causes[:, -1:]
        return points


def _last_of_each(ts_ms: Int64s) -> Int64s:
    """Return the index of the last event of each millisecond."""
    return np.flatnonzero(np.append(ts_ms[1:] != ts_ms[:-1], np.ones(min(len(ts_ms), 1), np.bool_)))


def _merged(ts_ms: Int64s, value: Int64s, epoch: Int64s, epochs: Epochs) -> Points:
    """Insert the persists between the milliseconds with events; a persist comes after those of its own."""
    count = len(ts_ms) + len(epochs.at_ms)
    times, values = np.empty(count, np.int64), np.empty(count, np.int64)
    of_event = np.arange(len(ts_ms)) + epoch
    of_persist = np.arange(len(epochs.at_ms)) + np.searchsorted(ts_ms, epochs.at_ms, "right")
    times[of_event], values[of_event] = ts_ms, value
    times[of_persist], values[of_persist] = epochs.at_ms, epochs.unpersisted
    return Points(times, values, np.ones(count, np.bool_))


def _epoch_of_points(ts_ms: Int64s, epoch: Int64s, at_ms: Int64s) -> Int64s:
    """Return the number of persists up to each point of `_merged`."""
    found = np.empty(len(ts_ms) + len(at_ms), np.int64)
    found[np.arange(len(ts_ms)) + epoch] = epoch
    found[np.arange(len(at_ms)) + np.searchsorted(ts_ms, at_ms, "right")] = np.arange(1, len(at_ms) + 1)
    return found
