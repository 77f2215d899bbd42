"""Replays of one subscription under policies with the same acks, opened and restarted together."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np

from ackstate.analysis.replay.acked import AckAccumulator, EventChunk, by_event
from ackstate.analysis.replay.curves import PolicyCurve
from ackstate.analysis.replay.policy import AS_RECORDED
from ackstate.analysis.replay.replay import Piece
from ackstate.analysis.trace.events import EventKind
from ackstate.entry_bitmap import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ackstate.analysis.replay.cursor_replay import CursorReplay
    from ackstate.analysis.replay.curve_sum import Points
    from ackstate.analysis.replay.curves import RecordedCurve
    from ackstate.analysis.replay.gated_replay import GatedReplay
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.replay.pulsar_replay import PulsarReplay

AnyReplay: TypeAlias = "CursorReplay | GatedReplay | PulsarReplay"


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
        """Replay the next events, and add to the sum of each policy's curve.

        Args:
            part: The events.
            until_ms: See `Replay.take`.
            curves: The curves of all policies.
            found: Receives their points.
            blocked_until_ms: End of the time that counts as blocked; None for `until_ms`.
        """
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
        new_counts = news.counts(len(events.ts_ms))
        acked = self._acked_count + np.concatenate(([0], np.cumsum(new_counts)))
        self._acked_count = int(acked[-1])
        return Piece(events, news, new_counts, acked)


def opened(policies: Sequence[Policy | None], log: Mapping[int, int], now_ms: int) -> list[ReplayGroup]:
    """Open a cursor for each policy."""
    replays = {
        index: _opened_replay(policy, log, now_ms) for index, policy in enumerate(policies) if policy is not AS_RECORDED
    }
    return [ReplayGroup(AckAccumulator(), each) for each in agreeing(replays)]


def _opened_replay(policy: Policy, log: Mapping[int, int], now_ms: int) -> AnyReplay:
    if policy.blocks:
        from ackstate.analysis.replay.gated_replay import GatedReplay  # noqa: PLC0415 - most grids need no cursor

        return GatedReplay(policy, log, opened_ms=now_ms)
    if policy.is_paced_by_pulsar:
        from ackstate.analysis.replay.pulsar_replay import PulsarReplay  # noqa: PLC0415 - most grids need no cursor

        return PulsarReplay(policy, log, opened_ms=now_ms)
    from ackstate.analysis.replay.cursor_replay import CursorReplay  # noqa: PLC0415 - most grids need no cursor

    return CursorReplay(policy, log, opened_ms=now_ms)


def agreeing(replays: Mapping[int, AnyReplay]) -> list[dict[int, AnyReplay]]:
    """Group the replays that have the same acks at all times: all except those that may postpone acks."""
    together: dict[int, AnyReplay] = {index: replay for index, replay in replays.items() if replay.kind != "gated"}
    alone: list[dict[int, AnyReplay]] = [{index: replay} for index, replay in replays.items() if index not in together]
    return [together, *alone] if together else alone
