"""Replays one subscription, chunk by chunk, under all policies of a grid at once.

The entries that each event acks first do not depend on the policy and are computed once, for all replays with the same
acks. A policy decides when the cursor is persisted and which acks are then durable; both hold for a whole epoch.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
from pyroaring import BitMap

from ackstate.analysis.replay.acked import AckAccumulator, EventChunk, by_event
from ackstate.analysis.replay.cursor_replay import CursorReplay
from ackstate.analysis.replay.curves import Piece, Points, PolicyCurve, RecordedCurve, joined_points
from ackstate.analysis.replay.gated_replay import GatedReplay
from ackstate.analysis.replay.policy import AS_RECORDED
from ackstate.analysis.replay.pulsar_replay import PulsarReplay
from ackstate.analysis.trace.events import EventKind, TraceError
from ackstate.entry_bitmap import run_end, runs_of
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ackstate.analysis.replay.acked import Bools
    from ackstate.analysis.replay.policy import Policy


_RESTARTS = (EventKind.RECOVER, EventKind.RESET, EventKind.REDELIVER)
_OPENINGS = (EventKind.RECOVER, EventKind.RESET)


def is_restart(part: EventChunk) -> bool:
    """Whether a part from `pieces` describes a restart of a cursor, after a crash or a reset."""
    return len(part.kind) > 0 and part.kind[0] in _RESTARTS


def is_same_restart(before: EventChunk, after: EventChunk) -> Bools:
    """Return for each pair of consecutive events whether both describe one restart.

    One restart is described within one millisecond: first by its openings, events that are all RECOVER or all RESET and
    all have entries, or by one opening without entries; then by its REDELIVER events. Any other opening is another
    restart.
    """
    continues: Bools = (after.kind == EventKind.REDELIVER) & before.is_any_of(_RESTARTS)
    continues |= after.is_any_of(_OPENINGS) & (after.kind == before.kind) & (before.first_entry >= 0)
    continues &= (before.ts_ms == after.ts_ms) & ((after.first_entry >= 0) | (after.kind == EventKind.REDELIVER))
    return continues


def pieces(chunk: EventChunk) -> list[EventChunk]:
    """Cut a chunk after each crash, and before and after the events that describe one restart.

    A part may have no acks, but always has events.
    """
    cuts = {0, len(chunk.ts_ms)}
    cuts.update((np.flatnonzero(chunk.kind == EventKind.CRASH) + 1).tolist())
    restarts = chunk.is_any_of(_RESTARTS)
    if restarts.any():
        continues = is_same_restart(chunk.part(0, -1), chunk.part(1, len(restarts)))
        cuts.update((np.flatnonzero((restarts[1:] | restarts[:-1]) & ~continues) + 1).tolist())
    bounds = sorted(cuts)
    if len(bounds) == 2:
        return [chunk]
    return [chunk.part(begin, end) for begin, end in itertools.pairwise(bounds)]


AnyReplay: TypeAlias = CursorReplay | GatedReplay | PulsarReplay


@final
class ReplayGroup:
    """Replays with the same acks: all of them until the first recovery, each on its own after it."""

    def __init__(self, fold: AckAccumulator, replays: Mapping[int, AnyReplay]) -> None:
        self.replays = replays
        self._fold = fold
        self._acked_count = 0

    @property
    def acked_fold(self) -> AckAccumulator:
        """The acks; must not be changed."""
        return self._fold

    def recovered(self, *, now_ms: int) -> Iterator[ReplayGroup]:
        """Yield the group of each replay after a crash."""
        for index, replay in self.replays.items():
            yield ReplayGroup(AckAccumulator(replay.restart(now_ms=now_ms)), {index: replay})

    def missing(self, recorded: AckAccumulator, *, now_ms: int) -> EventChunk:
        """Return acks of the entries acked in the recording but not here, after one event that acks nothing."""
        runs = [(-1, -1, -1)]
        for ledger_id, bitmap in sorted(recorded.acked.items()):
            held = self._fold.acked.get(ledger_id)
            firsts, lasts = runs_of(bitmap if held is None else bitmap - held)
            runs += [(ledger_id, *run) for run in zip(firsts.tolist(), lasts.tolist(), strict=True)]
        columns = np.array(runs, np.int64)
        kind = np.full(len(runs), int(EventKind.ACK))
        kind[0] = EventKind.PUBLISH
        return EventChunk(np.full(len(runs), now_ms), kind, *columns.T)

    def replay(
        self, part: EventChunk, until_ms: int, curves: Sequence[RecordedCurve | PolicyCurve], found: list[list[Points]],
        *, blocked_until_ms: int | None = None,
    ) -> None:  # fmt: skip
        """Replay the next events, and add to the sum of each policy's curve."""
        counted_ms = until_ms if blocked_until_ms is None else blocked_until_ms
        piece = None
        for index, replay in self.replays.items():
            curve = curves[index]
            assert isinstance(curve, PolicyCurve)
            if replay.kind == "gated":
                events, epochs = replay.take(part, until_ms=until_ms, blocked_until_ms=counted_ms)
                piece = self._take(events)
                curve.costs = curve.costs._replace(blocked_ms=replay.blocked_ms)
            else:
                piece = piece or self._take(part)
                epochs = replay.take(piece, until_ms=until_ms)
            found[index].append(curve.take(piece, epochs))

    def _take(self, events: EventChunk) -> Piece:
        news = by_event(self._fold.take(events))
        acked = self._acked_count + np.concatenate(([0], np.cumsum(news.counts(len(events.ts_ms)))))
        self._acked_count = int(acked[-1])
        return Piece(events, news, acked)


def opened(policies: Sequence[Policy | None], log: Mapping[int, int], now_ms: int) -> list[ReplayGroup]:
    """Open a cursor for each policy."""
    replays: dict[int, AnyReplay] = {}
    for index, policy in enumerate(policies):
        if policy is not AS_RECORDED:
            kind = GatedReplay if policy.blocks else PulsarReplay if policy.is_paced_by_pulsar else CursorReplay
            replays[index] = kind(policy, log, opened_ms=now_ms)
    return [ReplayGroup(AckAccumulator(), each) for each in agreeing(replays)]


def agreeing(replays: Mapping[int, AnyReplay]) -> list[dict[int, AnyReplay]]:
    """Group the replays that have the same acks at all times: all except those that may postpone acks."""
    together: dict[int, AnyReplay] = {index: replay for index, replay in replays.items() if replay.kind != "gated"}
    alone: list[dict[int, AnyReplay]] = [{index: replay} for index, replay in replays.items() if index not in together]
    return [together, *alone] if together else alone


NO_EVENTS = EventChunk(*(np.empty(0, np.int64) for _ in EventChunk._fields))
"""A chunk without events."""


@final
class SubscriptionReplay:
    """Replays one subscription chunk by chunk.

    A process that died restarts with the durable state under the policy. Messages that are redelivered then, but were
    not in the recording, are sent and acked again at once, when the cursor is opened. Messages that were redelivered in
    the recording, but are not under the policy, stay acked. A reset is that of the recording. A trace may begin with
    the state that a cursor had when it was opened: it is persisted at once, as after a reset, as far as the policy
    allows.
    """

    def __init__(self, policies: Sequence[Policy | None], log: Mapping[int, int], *, is_polled: bool = False) -> None:
        self.curves: list[RecordedCurve | PolicyCurve] = [
            RecordedCurve(is_polled=is_polled) if policy is AS_RECORDED else PolicyCurve() for policy in policies
        ]
        self._policies = policies
        self._log = log
        self._groups: list[ReplayGroup] = []
        self._is_alive = True
        # The acks of the recording; before the first recovery or reset all policies have the same acks.
        blocks = any(policy is not AS_RECORDED and policy.blocks for policy in policies)
        self._recorded = AckAccumulator() if blocks else None
        # The restart being described: its time, whether it is a reset, and its latest event as a chunk of one.
        self._anew_ms: int | None = None
        self._is_reset = False
        self.latest_of_restart = NO_EVENTS

    def take(self, chunk: EventChunk) -> list[Points]:
        """Replay the next chunk, and return the points of each policy's curve."""
        if (chunk.ts_ms[1:] < chunk.ts_ms[:-1]).any():
            raise TraceError(
                "times go back within a chunk: run ackstate trace check for details; convert the trace again"
            )
        found: list[list[Points]] = [[] for _ in self._policies]
        for index, curve in enumerate(self.curves):
            if isinstance(curve, RecordedCurve):
                found[index].append(curve.take(chunk))
        if any(policy is not AS_RECORDED for policy in self._policies):
            self._take_pieces(chunk, found)
        return list(map(joined_points, found))

    def end(self, end_ms: int) -> list[Points]:
        """Replay the broker's ticks without events up to a time, inclusive; return their points."""
        found: list[list[Points]] = [[] for _ in self._policies]
        self._end_restart(found)
        if self._is_alive:
            # The tick of the last millisecond is part of the trace, the time after it is not.
            self._replay(NO_EVENTS, end_ms + 1, found, blocked_until_ms=end_ms)
        for each in self.curves:
            each.sum.end(end_ms)
        return list(map(joined_points, found))

    def _take_pieces(self, chunk: EventChunk, found: list[list[Points]]) -> None:
        if not self._groups:
            self._groups = opened(self._policies, self._log, int(chunk.ts_ms[0]))
            self._is_reset = is_restart(chunk)
        parts = pieces(chunk)
        for number, part in enumerate(parts):
            if is_restart(part):
                self._follow_restart(part, found)
                continue
            self._end_restart(found)
            if self._recorded is not None:
                self._recorded.take(part)
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

    def _replay(
        self, part: EventChunk, until_ms: int, found: list[list[Points]], *, blocked_until_ms: int | None = None
    ) -> None:
        for group in self._groups:
            group.replay(part, until_ms, self.curves, found, blocked_until_ms=blocked_until_ms)

    def _die(self, found: list[list[Points]]) -> None:
        self._is_alive = False
        for index, points in enumerate(found):
            if points and isinstance(self.curves[index], PolicyCurve):
                last = points[-1]
                dead = Points(last.ts_ms[-1:], np.zeros(1, np.int64), np.zeros(1, np.bool_))
                points.append(dead)
                self.curves[index].sum.add(dead)

    def _follow_restart(self, part: EventChunk, found: list[list[Points]]) -> None:
        """Add events that describe one restart; the next chunk may continue the description."""
        if not is_same_restart(self.latest_of_restart, part.part(0, len(self.latest_of_restart.kind))).any():
            self._end_restart(found)
        if self._recorded is None:
            self._recorded = self._groups[0].acked_fold.copy()
        self._recorded.take(part)
        if self._anew_ms is None and not self._is_alive and part.kind[0] == EventKind.REDELIVER:
            # The cursor stays closed until it is recovered.
            return
        self._is_reset |= EventKind.RESET in part.kind
        self._anew_ms, self.latest_of_restart = int(part.ts_ms[0]), part.part(-1, len(part.kind))

    def _end_restart(self, found: list[list[Points]]) -> None:
        """Restart all cursors, if the recording describes a restart."""
        now_ms = self._anew_ms
        if now_ms is None:
            return
        if self._is_alive:
            self._replay(NO_EVENTS, now_ms, found)
        self._is_alive = True
        for curve in self.curves:
            if isinstance(curve, PolicyCurve):
                curve.restart()
        if self._is_reset:
            self._reset(now_ms)
        else:
            self._groups = [each for group in self._groups for each in group.recovered(now_ms=now_ms)]
        self._anew_ms, self._is_reset, self.latest_of_restart = None, False, NO_EVENTS
        assert self._recorded is not None
        for group in self._groups:
            group.replay(group.missing(self._recorded, now_ms=now_ms), now_ms, self.curves, found)

    def _reset(self, now_ms: int) -> None:
        assert self._recorded is not None
        replays = {index: replay for group in self._groups for index, replay in group.replays.items()}
        acked = dict(sorted(self._recorded.acked.items()))
        mark_delete = _mark_delete_of(acked, self._log)
        for index, replay in replays.items():
            curve = self.curves[index]
            assert isinstance(curve, PolicyCurve)
            curve.reset(replay.reset(acked, mark_delete, now_ms=now_ms))
        self._groups = [ReplayGroup(self._recorded.copy(), each) for each in agreeing(replays)]


def _mark_delete_of(acked: Mapping[int, BitMap], log: Mapping[int, int]) -> Position:
    """Return the mark-delete position of a message log, given its acked entries."""
    mark_delete = Position(0, -1)
    for ledger_id, count in log.items():
        held = acked.get(ledger_id, BitMap())
        next_entry = run_end(held, 0) if 0 in held else 0
        mark_delete = Position(ledger_id, next_entry - 1)
        if next_entry < count:
            break
    return mark_delete
