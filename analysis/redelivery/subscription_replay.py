"""One subscription, chunk by chunk, under all policies of a grid at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from analysis.redelivery.acked import AckedFold, Chunk
from analysis.redelivery.cursor_replay import CursorReplay
from analysis.redelivery.curve_sum import CAUSES, CurveSum, Points
from analysis.redelivery.fold import RedeliveryFold
from analysis.redelivery.mark_delete import MarkDeleteFold
from analysis.redelivery.plain_replay import PlainReplay
from analysis.redelivery.policy import AS_RECORDED
from analysis.redelivery.replay import Piece, pieces
from analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from analysis.redelivery.acked import Int64s
    from analysis.redelivery.policy import Policy
    from analysis.redelivery.replay import Epochs, Replay

_NO_EVENTS = Chunk(*(np.empty(0, np.int64) for _ in Chunk._fields))


class Costs(NamedTuple):
    """What a policy took of one subscription.

    Attributes:
        write_count: Persists.
        bytes_written: Size of what they wrote.
        bytes_kept: Size of what a recovery would read at the end.
        bytes_kept_max: The most of it at any time.
        blocked_ms: For how long dispatch stood still.
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


@final
class RecordedCurve:
    """The curve as recorded: what was durable is what the persist events say."""

    def __init__(self) -> None:
        self.sum = CurveSum()
        self.costs = Costs()
        self._fold = RedeliveryFold()

    def take(self, chunk: Chunk) -> Points:
        """Take the next chunk in, and return its points."""
        folded = self._fold.fold(chunk)
        self.sum.note_peak(folded.redelivery, chunk.ts_ms)
        ends = _last_of_each(chunk.ts_ms)
        points = Points(chunk.ts_ms[ends], folded.redelivery[ends], folded.alive[ends])
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
        # After the last persist, or 0: messages acked since the cursor was opened that were durable, and why others
        # were not.
        self._durable = 0
        self._causes = np.zeros((len(CAUSES), 1), np.int64)

    def restart(self) -> None:
        """Begin again with an opened cursor: nothing is acked that is not durable."""
        self._durable = 0
        self._causes = np.zeros((len(CAUSES), 1), np.int64)

    def take(self, piece: Piece, epochs: Epochs) -> Points:
        """Take the next events and persists in, and return their points."""
        ts_ms, at_ms = piece.events.ts_ms, epochs.at_ms
        ends = piece.events_until(at_ms)
        durable = np.concatenate(([self._durable], piece.acked[ends] - epochs.undurable))
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


@final
class SubscriptionReplay:
    """Carries one subscription from chunk to chunk.

    A process that died comes back with what is durable under the policy: what the recording says about redeliveries
    is not looked at, and what comes back under the policy and not in the recording is not acked again.

    Args:
        policies: The grid; None is the recording itself.
        log: Ledger id -> entry count of the topic's message log at the end of the trace, rising.
    """

    def __init__(self, policies: Sequence[Policy | None], log: Mapping[int, int]) -> None:
        self.curves: list[RecordedCurve | PolicyCurve] = [
            RecordedCurve() if policy is AS_RECORDED else PolicyCurve() for policy in policies
        ]
        self._policies = policies
        self._log = log
        self._lives: list[_Life] = []
        self._is_alive = True

    def take(self, chunk: Chunk) -> list[Points]:
        """Take the next chunk in, and return the points of each policy's curve."""
        found: list[list[Points]] = [[] for _ in self._policies]
        for index, curve in enumerate(self.curves):
            if isinstance(curve, RecordedCurve):
                found[index].append(curve.take(chunk))
        if any(policy is not AS_RECORDED for policy in self._policies):
            self._take_pieces(chunk, found)
        return [_concatenated(points) for points in found]

    def end(self, end_ms: int) -> list[Points]:
        """Let the broker tick up to a time, included, with nothing more happening; return the points of that."""
        found: list[list[Points]] = [[] for _ in self._policies]
        if self._is_alive:
            self._replay(_NO_EVENTS, end_ms + 1, found)
        for curve in self.curves:
            curve.sum.end(end_ms)
        return [_concatenated(points) for points in found]

    def _take_pieces(self, chunk: Chunk, found: list[list[Points]]) -> None:
        if not self._lives:
            self._lives = [_Life.opened(self._policies, self._log, int(chunk.ts_ms[0]))]
        parts = pieces(chunk)
        for number, part in enumerate(parts):
            if part.kind[0] == EventKind.RECOVER:
                self._recover(int(part.ts_ms[0]))
            if self._is_alive:
                following = parts[number + 1] if number + 1 < len(parts) else part
                dies = part.kind[-1] == EventKind.CRASH
                self._replay(
                    part,
                    int(part.ts_ms[-1] if dies else following.ts_ms[0] if following is not part else part.ts_ms[-1]),
                    found,
                )
            if part.kind[-1] == EventKind.CRASH:
                self._die(found)

    def _replay(self, part: Chunk, until_ms: int, found: list[list[Points]]) -> None:
        for life in self._lives:
            piece = life.take(part)
            for index, replay in life.replays.items():
                curve = self.curves[index]
                assert isinstance(curve, PolicyCurve)
                found[index].append(curve.take(piece, replay.take(piece, until_ms=until_ms)))

    def _die(self, found: list[list[Points]]) -> None:
        self._is_alive = False
        for index, points in enumerate(found):
            if points and isinstance(self.curves[index], PolicyCurve):
                last = points[-1]
                dead = Points(last.ts_ms[-1:], np.zeros(1, np.int64), np.zeros(1, np.bool_))
                points.append(dead)
                self.curves[index].sum.add(dead)

    def _recover(self, now_ms: int) -> None:
        self._is_alive = True
        lives = []
        for life in self._lives:
            for index, replay in life.replays.items():
                curve = self.curves[index]
                assert isinstance(curve, PolicyCurve)
                curve.restart()
                fold = AckedFold(replay.restart(now_ms=now_ms), complete_below=life.complete_below)
                lives.append(_Life(self._log, fold, {index: replay}))
        self._lives = lives


@final
class _Life:
    """Replays that agree in what is acked: all of them until the first recovery, each by itself after it."""

    def __init__(self, log: Mapping[int, int], fold: AckedFold, replays: Mapping[int, Replay]) -> None:
        self.replays = replays
        self._fold = fold
        self._mark_delete = MarkDeleteFold(log)
        self._acked_count = 0

    @classmethod
    def opened(cls, policies: Sequence[Policy | None], log: Mapping[int, int], now_ms: int) -> _Life:
        """Open a cursor for each policy."""
        replays: dict[int, Replay] = {}
        for index, policy in enumerate(policies):
            if policy is not AS_RECORDED:
                plain = policy.is_plain
                replays[index] = (
                    PlainReplay(policy, opened_ms=now_ms) if plain else CursorReplay(policy, log, opened_ms=now_ms)
                )
        return cls(log, AckedFold(), replays)

    def take(self, part: Chunk) -> Piece:
        """Take the next events in."""
        # What the recording redelivered says nothing about another policy.
        is_redelivery = part.kind == EventKind.REDELIVER
        events = part._replace(kind=np.where(is_redelivery, EventKind.DELIVER, part.kind))
        news = self._fold.take(events)
        new_counts = news.counts(len(part.ts_ms))
        acked = self._acked_count + np.concatenate(([0], np.cumsum(new_counts)))
        self._acked_count = int(acked[-1])
        placed = self._mark_delete.take(news, self._fold.acked)
        return Piece(events, news, new_counts, acked, placed, self._fold.acked)


def _last_of_each(ts_ms: Int64s) -> Int64s:
    """Return the last event of each millisecond."""
    return np.flatnonzero(np.append(ts_ms[1:] != ts_ms[:-1], np.ones(min(len(ts_ms), 1), np.bool_)))


def _merged(ts_ms: Int64s, value: Int64s, epoch: Int64s, epochs: Epochs) -> Points:
    """Put the persists between the milliseconds with events; a persist comes after its own."""
    count = len(ts_ms) + len(epochs.at_ms)
    times, values = np.empty(count, np.int64), np.empty(count, np.int64)
    of_event = np.arange(len(ts_ms)) + epoch
    of_persist = np.arange(len(epochs.at_ms)) + np.searchsorted(ts_ms, epochs.at_ms, "right")
    times[of_event], values[of_event] = ts_ms, value
    times[of_persist], values[of_persist] = epochs.at_ms, epochs.undurable
    return Points(times, values, np.ones(count, np.bool_))


def _epoch_of_points(ts_ms: Int64s, epoch: Int64s, at_ms: Int64s) -> Int64s:
    """Return, for each of the points that `_merged` makes, how many persists there were up to it."""
    found = np.empty(len(ts_ms) + len(at_ms), np.int64)
    found[np.arange(len(ts_ms)) + epoch] = epoch
    found[np.arange(len(at_ms)) + np.searchsorted(ts_ms, at_ms, "right")] = np.arange(1, len(at_ms) + 1)
    return found


def _concatenated(parts: Sequence[Points]) -> Points:
    if len(parts) == 1:
        return parts[0]
    columns: Iterator[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]] = zip(
        *((part.ts_ms, part.value, part.is_alive) for part in parts), strict=True
    )
    joined = [np.concatenate(column) for column in columns] or [np.empty(0, np.int64)] * 3
    causes = None
    if any(part.causes is not None for part in parts):
        none = [np.zeros((len(CAUSES), len(part.ts_ms)), np.int64) for part in parts]
        each = [zeros if part.causes is None else part.causes for part, zeros in zip(parts, none, strict=True)]
        causes = np.concatenate(each, axis=1)
    return Points(joined[0], joined[1], joined[2].astype(np.bool_), causes)
