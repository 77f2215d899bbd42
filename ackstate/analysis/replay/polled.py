"""Bounds the redelivery of a trace of polls, whose events happened at an unknown moment between two polls.

Two curves enclose the redelivery at every instant, wherever the events were within their intervals, if those that make
acks durable are in the order of the trace:

- *low* counts an ack from the end of its interval on, and takes a persist as durable from the start of its interval on,
  with every ack before it;
- *high* counts an ack from the start of its interval on, and takes a persist as durable from the end of its interval
  on, with only those acks that it covers for certain.

Under a policy, with persists at the times of its replay: an ack is certain at the end of its interval. *Low* then is
the number of certain acks, minus the possible ones at the last persist; *high* is the number of possible acks, minus
the certain ones at the last persist.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.analysis.replay.acked import AckAccumulator, EventChunk
from ackstate.analysis.replay.curves import Costs, CurveSum, Points, PolicyCurve, RecordedCurve
from ackstate.analysis.trace.events import EventKind, TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.curves import Epochs, Piece

_NONE = np.empty(0, np.int64)
_BEFORE_ALL = -1
_OPENINGS = (EventKind.RECOVER, EventKind.RESET)
_TELLING = (*_OPENINGS, EventKind.PERSIST_SEEN, EventKind.CUT_OFF, EventKind.CRASH)


class PolledChunk(EventChunk):
    """A chunk of a trace of polls."""

    until_ms: Int64s  # The end of each event's interval, which `ts_ms` begins
    number: Int64s  # As in the trace

    @classmethod
    def of(cls, columns: Sequence[Int64s], *, until_ms: Int64s, number: Int64s) -> PolledChunk:
        """Return a chunk from the columns of an `EventChunk` and two more."""
        chunk = cls(*columns)
        chunk.until_ms, chunk.number = until_ms, number
        return chunk

    def part(self, begin: int, end: int) -> PolledChunk:
        """Return the events from `begin` (inclusive) to `end` (exclusive)."""
        until_ms, number = self.until_ms[begin:end], self.number[begin:end]
        return PolledChunk.of([column[begin:end] for column in self], until_ms=until_ms, number=number)


@final
class AckIntervals:
    """Counts acks by the start of their intervals, from which on they are possible, and by the end: they are certain.

    Queries are for any time from the last `forget` on.
    """

    def __init__(self) -> None:
        self.possible, self.certain = _StepCounts(), _StepCounts()

    def add(self, events: PolledChunk, counts: Int64s) -> None:
        """Add the next acks."""
        at = np.flatnonzero(counts)
        if not len(at):
            return
        ends = events.until_ms[at]
        if (np.diff(ends, prepend=self.certain.last_ms) < 0).any():
            raise TraceError("an ack's interval ends before that of an earlier ack: run ackstate trace check")
        self.possible.add(events.ts_ms[at], counts[at])
        self.certain.add(ends, counts[at])

    def uncertain(self, at_ms: Int64s) -> Int64s:
        """Return the number of acks of which it is unknown whether they had happened by some times."""
        return self.possible.at(at_ms) - self.certain.at(at_ms)

    def forget(self, before_ms: int) -> None:
        """Drop the counts that no query for a time at or after one needs."""
        self.possible.forget(before_ms)
        self.certain.forget(before_ms)


@final
class _StepCounts:
    """A count that rises at some times."""

    def __init__(self) -> None:
        self._ts_ms, self._count = np.array([_BEFORE_ALL]), np.zeros(1, np.int64)

    @property
    def last_ms(self) -> int:
        return int(self._ts_ms[-1])

    def add(self, ts_ms: Int64s, counts: Int64s) -> None:
        """Add rises at times that are not below earlier ones."""
        self._ts_ms = np.concatenate((self._ts_ms, ts_ms))
        self._count = np.concatenate((self._count, self._count[-1] + np.cumsum(counts)))

    def at(self, at_ms: Int64s) -> Int64s:
        return self._count[np.maximum(np.searchsorted(self._ts_ms, at_ms, "right") - 1, 0)]

    def times_between(self, after_ms: int, until_ms: int) -> Int64s:
        first, end = np.searchsorted(self._ts_ms, (after_ms, until_ms), "right")
        return self._ts_ms[first:end]

    def forget(self, before_ms: int) -> None:
        first = max(int(np.searchsorted(self._ts_ms, before_ms, "left")) - 1, 0)
        self._ts_ms, self._count = self._ts_ms[first:], self._count[first:]


@final
class LowCurve:
    """The lower of two curves; the other one is that of the policy."""

    def __init__(self) -> None:
        self.sum = CurveSum()
        self.costs = Costs()
        self.at_crashes = np.empty((0, 3), np.int64)
        self._new: list[Points] = []

    def add(self, ts_ms: Int64s, value: Int64s) -> None:
        """Add the next values, from rising times on."""
        points = Points(ts_ms, np.maximum(value, 0), np.ones(len(ts_ms), np.bool_))
        self.sum.note_peak(points.value, points.ts_ms)
        self.sum.add(points)
        self._new.append(points)

    def take_new(self) -> list[Points]:
        """Return the points added since the last call."""
        new, self._new = self._new, []
        return new


@final
class PolledRecordedCurve(RecordedCurve):
    """The higher curve as recorded; `low` is the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.low = LowCurve()
        self._fold_of_acks = AckAccumulator()
        self._acks = AckIntervals()
        self._acked_count = 0
        # The acks that may be durable; steps by the start of a persist's interval.
        self._maybe = np.zeros(1, np.int64)
        # The acks that are certainly durable, by the end of a persist's interval; the last may get more CUT_OFF events.
        self._sure_ms, self._sure = [_BEFORE_ALL], [0]
        self._is_cut_open = self._is_excluding = False
        self._last_ms: int | None = None
        self._sure_number_ms = _BEFORE_ALL

    def take(self, chunk: EventChunk) -> Points:
        assert isinstance(chunk, PolledChunk)
        counts = self._fold_of_acks.take(chunk).counts(len(chunk.kind))
        acked = self._acked_count + np.cumsum(counts)
        self._acks.add(chunk, counts)
        opens = chunk.is_any_of(_OPENINGS)
        seen = chunk.kind == int(EventKind.PERSIST_SEEN)
        at = np.flatnonzero(seen | opens)
        maybe_ms, maybe = chunk.ts_ms[at], np.concatenate((self._maybe, acked[at]))
        self._follow_sure(chunk, acked, maybe[np.searchsorted(at, np.arange(len(acked)))])
        begin_ms = int(chunk.ts_ms[0]) if self._last_ms is None else self._last_ms
        end_ms = int(chunk.ts_ms[-1])
        points = self._points(begin_ms, end_ms, np.unique(chunk.ts_ms), (maybe_ms, maybe))
        self._maybe, self._acked_count, self._last_ms = maybe[-1:], int(acked[-1]), end_ms
        self._acks.forget(min(end_ms, self._sure_number_ms))
        return points

    def finish(self, end_ms: int) -> Points:
        """Return the points up to the end of the trace."""
        if self._last_ms is None:
            return Points(_NONE, _NONE, np.empty(0, np.bool_))
        return self._points(self._last_ms, end_ms, _NONE, (_NONE, self._maybe))

    def _points(self, begin_ms: int, end_ms: int, times: Int64s, maybe: tuple[Int64s, Int64s]) -> Points:
        """Add both curves from one time, exclusive unless it has an event, to another, inclusive."""
        sure_ms, sure = np.array(self._sure_ms), np.array(self._sure)
        changes = sure_ms[(sure_ms > begin_ms) & (sure_ms <= end_ms)]
        times = np.unique(np.concatenate((times, changes, self._acks.certain.times_between(begin_ms, end_ms))))
        latest = maybe[1][np.searchsorted(maybe[0], times, "right")]
        self.low.add(times, self._acks.certain.at(times) - latest)
        high = self._acks.possible.at(times) - sure[np.searchsorted(sure_ms, times, "right") - 1]
        points = Points(times, np.maximum(high, 0), np.ones(len(times), np.bool_))
        self.sum.note_peak(points.value, times)
        self.sum.add(points)
        done = int(np.searchsorted(sure_ms, end_ms, "right")) - 1
        del self._sure_ms[:done], self._sure[:done]
        return points

    def _follow_sure(self, chunk: PolledChunk, acked: Int64s, maybe: Int64s) -> None:
        """Add the acks that each persist, recovery or reset certainly covers, and note the bounds at each crash."""
        kinds, crashes, following = chunk.kind, [], 0
        for index in np.flatnonzero(chunk.is_any_of(_TELLING)).tolist():
            kind, number = int(kinds[index]), int(chunk.number[index])
            if kind == EventKind.CUT_OFF:
                if not self._is_cut_open or index > following:
                    raise TraceError("a CUT_OFF event must follow a PERSIST_SEEN event with a number")
                count = int(chunk.last_entry[index] - chunk.first_entry[index]) + 1
                self._exclude(count, int(chunk.ts_ms[index]))
            elif kind == EventKind.CRASH:
                gone = _redelivered_after(chunk, index)
                high, low = int(acked[index]) - self._sure[-1], int(acked[index] - maybe[index])
                crashes.append((max(high, gone), max(low, gone, 0), 1))
            elif kind != EventKind.PERSIST_SEEN:
                self._settle(int(chunk.until_ms[index]), int(acked[index]))
            elif number >= 0:
                self._settle(int(chunk.until_ms[index]), self._certain_by(number))
            self._is_cut_open = kind == EventKind.CUT_OFF or (kind == EventKind.PERSIST_SEEN and number >= 0)
            following = index + 1
        self._is_cut_open &= following == len(kinds)
        self.at_crashes = self.low.at_crashes = np.array(crashes, np.int64).reshape(len(crashes), 3)

    def _certain_by(self, number_ms: int) -> int:
        if number_ms < self._sure_number_ms:
            raise TraceError("the number of a PERSIST_SEEN event falls: run ackstate trace check")
        self._sure_number_ms = number_ms
        return int(self._acks.certain.at(np.array([number_ms]))[0])

    def _exclude(self, count: int, ts_ms: int) -> None:
        """Remove acks from the last settlement; those before it lose them as soon as the persist may be durable."""
        self._sure[-1] -= count
        first = bisect_right(self._sure_ms, ts_ms, hi=len(self._sure_ms) - 1)
        if not self._is_excluding:
            self._sure_ms.insert(first, ts_ms)
            self._sure.insert(first, self._sure[first - 1])
            self._is_excluding = True
        else:
            first -= 1
        for at in range(first, len(self._sure) - 1):
            self._sure[at] = max(self._sure[at] - count, 0)

    def _settle(self, until_ms: int, count: int) -> None:
        if until_ms < self._sure_ms[-1]:
            raise TraceError("a persist's interval ends before that of an earlier one: run ackstate trace check")
        self._is_excluding = False
        self._sure_ms.append(until_ms)
        self._sure.append(count)


def _redelivered_after(chunk: PolledChunk, index: int) -> int:
    """Return the number of entries that REDELIVER events of the recovery after a crash name."""
    count = 0
    for kind, first, last in zip(
        chunk.kind[index + 1 :].tolist(),
        chunk.first_entry[index + 1 :].tolist(),
        chunk.last_entry[index + 1 :].tolist(),
        strict=True,
    ):
        if kind == EventKind.REDELIVER:
            count += last - first + 1
        elif kind != EventKind.RECOVER:
            break
    return count


@final
class PolledPolicyCurve(PolicyCurve):
    """The higher curve under a policy; `low` is the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.low = LowCurve()
        self._acks = AckIntervals()
        self._value = 0
        self._last_ms: int | None = None
        # When the latest persist was, and the acks that were uncertain then.
        self._uncertain = 0

    def take(self, piece: Piece, epochs: Epochs) -> Points:
        if isinstance(piece.events, PolledChunk):
            self._acks.add(piece.events, piece.new_counts)
        points = self._exact(piece, epochs)
        if not len(points.ts_ms):
            return points
        begin_ms = int(points.ts_ms[0]) - 1 if self._last_ms is None else self._last_ms
        end_ms = int(points.ts_ms[-1])
        times = np.unique(np.concatenate((points.ts_ms, self._acks.certain.times_between(begin_ms, end_ms))))
        at = np.searchsorted(points.ts_ms, times, "right")
        values = np.concatenate(([self._value], points.value))[at]
        causes = None if points.causes is None else points.causes[:, np.maximum(at - 1, 0)]
        uncertain = np.concatenate(([self._uncertain], self._acks.uncertain(epochs.at_ms)))
        extra = uncertain[np.searchsorted(epochs.at_ms, times, "right")]
        self.low.add(times, values - self._acks.uncertain(times))
        found = Points(times, values + extra, np.ones(len(times), np.bool_), causes)
        self.sum.note_peak(found.value, times)
        self.sum.add(found)
        self._value, self._last_ms, self._uncertain = int(points.value[-1]), end_ms, int(uncertain[-1])
        self._acks.forget(end_ms)
        return found

    def finish(self, end_ms: int) -> Points:
        """Return the points up to the end of the trace: acks become certain there."""
        times = _NONE if self._last_ms is None else np.unique(self._acks.certain.times_between(self._last_ms, end_ms))
        values = np.full(len(times), self._value)
        self.low.add(times, values - self._acks.uncertain(times))
        found = Points(times, values + self._uncertain, np.ones(len(times), np.bool_))
        self.sum.add(found)
        return found

    def restart(self) -> None:
        super().restart()
        self._value = 0

    def reset(self, epochs: Epochs) -> None:
        super().reset(epochs)
        self._value = int(epochs.unpersisted[-1])
