"""The curves of one subscription, redelivery if crashed at every instant, recorded or under a policy, and their sums.

Sums are exact, in arrays: mean over time, quantiles, maximum, causes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar, final

import numpy as np
import numpy.typing as npt

from ackstate.analysis.replay.acked import AckAccumulator, Bools, EventChunk, Int64s
from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.replay.acked import NewlyAckedRuns


CAUSES = ("young", "cut_by_ranges", "cut_by_bytes", "cut_by_route")
"""Reasons for acks excluded from a persist; all other acks are not yet flushed."""

SERIES = 1 + len(CAUSES)
"""The number of rows: the total, and its causes."""
Series = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
"""A row for each series, a column for each time."""

_DISTINCT_MAX = 65_536
_INT64_MAX = 2**63 - 1
_PART_MASK = 2**21 - 1
_PART_SHIFTS = (0, 21, 42)


class Points(NamedTuple):
    """A curve in parallel arrays: each value holds from its time on."""

    ts_ms: Int64s  # The times; never falling. The last of several points at one time counts.
    value: Int64s  # Messages that a crash would redeliver
    # Whether there is a process that could crash, from this point to the next.
    is_alive: np.ndarray[tuple[int], np.dtype[np.bool_]]
    # For each of `CAUSES`, the number of messages due to it; None if all are not yet flushed.
    causes: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None = None


class SeriesPoints(NamedTuple):
    """Points of a curve and of its causes."""

    ts_ms: Int64s  # The times; rising
    values: Series  # A row for each of `SERIES`, a column for each time


def series_of(points: Points, series_count: int = SERIES) -> SeriesPoints:
    """Return points with their causes, at most one per millisecond; 0 while no process is alive."""
    lasts = np.append(points.ts_ms[1:] != points.ts_ms[:-1], True)[: len(points.ts_ms)]
    values = np.zeros((series_count, len(points.ts_ms)), np.int64)
    values[0] = points.value
    if points.causes is not None and series_count > 1:
        values[1:] = points.causes
    return SeriesPoints(points.ts_ms[lasts], np.where(points.is_alive, values, 0)[:, lasts])


@final
class Histogram:
    """The total duration of each value."""

    def __init__(self) -> None:
        self._parts: list[tuple[Int64s, Int64s]] = []
        self._pending_count = 0

    def add(self, value: Int64s, duration_ms: Int64s) -> None:
        """Add values weighted by duration; zero durations are ignored."""
        lasting = duration_ms > 0
        if lasting.any():
            part = combined(value[lasting], duration_ms[lasting])
            self._parts.append(part)
            self._pending_count += len(part[0])
        if self._pending_count > _DISTINCT_MAX:
            self._parts = [self.columns()]
            # If most values are distinct, combining again at once would gain nothing.
            self._pending_count = 0

    @property
    def is_large(self) -> bool:
        """Whether it should be written out and restarted."""
        return bool(self._parts) and len(self._parts[0][0]) > _DISTINCT_MAX

    def columns(self) -> tuple[Int64s, Int64s]:
        """Return each value once, rising, and its duration in ms."""
        if len(self._parts) == 1:
            return self._parts[0]
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return combined(*(np.concatenate(columns) for columns in zip(*self._parts, strict=True)))


@final
class CurveSum:
    """The sums of one curve, whose points come in order."""

    def __init__(self) -> None:
        self.histogram = Histogram()
        self.peak = 0
        self.peak_ts_ms: int | None = None
        self.cause_sums = [0] * len(CAUSES)
        self._last: Points | None = None

    def add(self, points: Points) -> None:
        """Add the next points."""
        if not len(points.ts_ms):
            return
        joined = points if self._last is None else joined_points((self._last, points))
        self._weigh(joined)
        self._last = Points(
            points.ts_ms[-1:], points.value[-1:], points.is_alive[-1:],
            None if points.causes is None else points.causes[:, -1:],
        )  # fmt: skip

    def end(self, ts_ms: int) -> None:
        """Extend the last point to a time."""
        if self._last is not None:
            last = self._last
            self.add(last._replace(ts_ms=np.array([max(ts_ms, int(last.ts_ms[0]))])))

    def note_peak(self, values: Int64s, ts_ms: Int64s) -> None:
        """Update the peak from values that may hold for less than a millisecond."""
        if len(values):
            at = int(np.argmax(values))
            if self.peak_ts_ms is None or values[at] > self.peak:
                self.peak, self.peak_ts_ms = int(values[at]), int(ts_ms[at])

    def _weigh(self, points: Points) -> None:
        duration_ms = np.where(points.is_alive[:-1], np.diff(points.ts_ms), 0)
        self.histogram.add(points.value[:-1], duration_ms)
        if points.causes is not None:
            sums = [weight_of(cause, duration_ms) for cause in points.causes[:, :-1]]
            self.cause_sums = [int(before) + more for before, more in zip(self.cause_sums, sums, strict=True)]


def combined(value: Int64s, duration_ms: Int64s) -> tuple[Int64s, Int64s]:
    """Return each value once, rising, with the sum of its durations."""
    if not len(value):
        return value, duration_ms
    low, high = int(value.min()), int(value.max())
    if high - low <= 4 * len(value) + 1024:
        # Most curves stay in a narrow band, where counting is much faster than sorting; doubles hold sums of ms
        # exactly.
        sums = np.bincount(value - low, weights=duration_ms, minlength=high - low + 1).astype(np.int64)
        held = np.flatnonzero(sums)
        return held + low, sums[held]
    order = np.argsort(value, kind="stable")
    ordered = value[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    return ordered[begins], np.add.reduceat(duration_ms[order], begins)


def weight_of(value: Int64s, duration_ms: Int64s) -> int:
    """Return the sum of values, none negative, times their durations, which may exceed 64 bits."""
    if int(value.max(initial=0)) * int(duration_ms.sum()) <= _INT64_MAX:
        return int(value @ duration_ms)
    # Each part of 21 bits times a duration of up to a century takes less than 63 bits, as does the sum of them all.
    parts = (((value >> shift) & _PART_MASK) @ duration_ms for shift in _PART_SHIFTS)
    return sum(int(part) << shift for part, shift in zip(parts, _PART_SHIFTS, strict=True))


def quantile(value: Int64s, duration_ms: Int64s, share: float) -> int | None:
    """Return the least of some rising values that is not exceeded for a share of the time; None if no time passed."""
    if not len(value):
        return None
    passed = np.cumsum(duration_ms)
    # In whole numbers, because a double cannot represent a share of a long time exactly.
    needed = -(-int(passed[-1]) * round(share * 1000) // 1000)
    return int(value[int(np.searchsorted(passed, max(needed, 1)))])


def joined_points(parts: Sequence[Points]) -> Points:
    """Return the points of several parts, one after another."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part[:3] for part in parts), strict=True)
    ts_ms, value, is_alive = [np.concatenate(column) for column in columns] or [np.empty(0, np.int64)] * 3
    causes = None
    if any(part.causes is not None for part in parts):
        causes = np.concatenate(
            [
                np.zeros((len(CAUSES), len(part.ts_ms)), np.int64) if part.causes is None else part.causes
                for part in parts
            ],
            axis=1,
        )
    return Points(ts_ms, value, is_alive.astype(np.bool_), causes)


class Piece(NamedTuple):
    """Consecutive events of one subscription; only the last may be the death or the start of a process."""

    events: EventChunk  # The events
    news: NewlyAckedRuns  # The entries that they ack first
    # The number of entries acked before each event and after the last one, since the cursor was opened: one more number
    # than events.
    acked: Int64s


class Epochs(NamedTuple):
    """Persists of one subscription in order, as parallel arrays: each starts an epoch."""

    at_ms: Int64s  # The time of the persist; it comes after all events of this millisecond
    unpersisted: Int64s  # The number of acked messages that are not durable after it
    young: Int64s  # Those of them that it held back as young
    cut_by_ranges: Int64s  # Those that the range limit cut off
    cut_by_bytes: Int64s  # Those that a byte limit cut off
    cut_by_route: Int64s  # Those that only the narrower limit of the metadata store cut off
    bytes_written: Int64s  # The bytes that it wrote
    bytes_kept: Int64s  # The bytes that a recovery would read after it

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> Epochs:
        """Return the epochs of a row for each persist."""
        columns = np.array(rows, np.int64).reshape(len(rows), len(cls._fields))
        return cls(*columns.T)


_Scalar = TypeVar("_Scalar", np.int64, np.bool_)
_LEFT_OUT = (EventKind.HELD_BACK, EventKind.CUT_OFF, EventKind.DISPLACED)
_SETTLING = (EventKind.RECOVER, EventKind.RESET)


class Folded(NamedTuple):
    """The results of a chunk's events, in parallel arrays; each value holds just after its event."""

    redelivery: Int64s  # Acked messages that a crash would redeliver
    if_written: Int64s  # The same number if the persist in progress had been written; equals `redelivery` without one
    persisting: Bools  # True from the start of a persist to its end; a failed one ends with the next successful one
    alive: Bools  # False from a crash until the recovery
    # The part of `redelivery` that the last completed persist excluded, by `CAUSES`: young acks, and acks
    # beyond a limit. The latter all count under the range limit, because an event does not name the limit. None if no
    # ack was excluded.
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
        """Replay the next chunk."""
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
    """The costs of a policy for one subscription."""

    write_count: int = 0  # The number of persists
    bytes_written: int = 0  # The bytes that they wrote
    bytes_kept: int = 0  # The bytes that a recovery would read at the end
    bytes_kept_max: int = 0  # The maximum of `bytes_kept` at any time
    blocked_ms: int = 0  # The time that dispatch was blocked

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


@final
class RecordedCurve:
    """The curve as recorded: durability comes from the persist events."""

    def __init__(self, *, is_polled: bool = False) -> None:
        self.sum = CurveSum()
        self.costs = Costs()
        self._is_polled = is_polled
        # For each crash of the last chunk: redelivery, redelivery if the persist in progress had been written, and
        # whether a persist was in progress.
        self.at_crashes = np.empty((0, 3), np.int64)
        self._fold = RedeliveryFold()

    def take(self, chunk: EventChunk) -> Points:
        """Replay the next chunk, and return its points."""
        folded = self._fold.fold(chunk)
        died = chunk.kind == EventKind.CRASH
        self.at_crashes = np.column_stack([folded.redelivery[died], folded.if_written[died], folded.persisting[died]])
        ends = _last_of_each(chunk.ts_ms)
        # The events of a poll are in another order than they happened.
        seen = ends if self._is_polled else slice(None)
        self.sum.note_peak(folded.redelivery[seen], chunk.ts_ms[seen])
        causes = None if folded.causes is None else folded.causes[:, ends]
        points = Points(chunk.ts_ms[ends], folded.redelivery[ends], folded.alive[ends], causes)
        self.sum.add(points)
        ended = int(np.count_nonzero(chunk.kind == EventKind.PERSIST_ENDED))
        self.costs = self.costs._replace(write_count=self.costs.write_count + ended)
        return points


@final
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
        ts_ms, at_ms = piece.events.ts_ms, epochs.at_ms
        ends = np.searchsorted(ts_ms, at_ms, "right")
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
        self.sum.add(points)
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
