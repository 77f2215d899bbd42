"""Replays of one subscription under policies with the same acks, opened, restarted and stored together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

from ackstate.analysis.replay.acked import AckAccumulator, EventChunk
from ackstate.analysis.replay.curves import PolicyCurve
from ackstate.analysis.replay.mark_delete import MarkDeleteFold
from ackstate.analysis.replay.plain_replay import PlainReplay
from ackstate.analysis.replay.policy import AS_RECORDED
from ackstate.analysis.replay.replay import Piece
from ackstate.analysis.replay.state_fields import is_part
from ackstate.analysis.trace.events import EventKind
from ackstate.entry_bitmap import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ackstate.analysis.replay.cursor_replay import CursorReplay
    from ackstate.analysis.replay.curve_sum import Points
    from ackstate.analysis.replay.curves import RecordedCurve
    from ackstate.analysis.replay.gated_replay import GatedReplay
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.replay.state_fields import Fields

AnyReplay: TypeAlias = "PlainReplay | CursorReplay | GatedReplay"


@final
class ReplayGroup:
    """Replays with the same acks: all of them until the first recovery, each on its own after it."""

    def __init__(self, log: Mapping[int, int], fold: AckAccumulator, replays: Mapping[int, AnyReplay]) -> None:
        self.replays = replays
        self._fold = fold
        self._mark_delete = MarkDeleteFold(fold.known(log))
        self._acked_count = 0

    def to_record(self) -> dict[str, Any]:
        """Return its fields as a state has them, but for the message log."""
        return {
            "acked": self._fold.to_record(), "acked_count": self._acked_count,
            "mark_delete": self._mark_delete.to_record(),
            "replays": [{"policy": index, "kind": each.kind, **each.to_record()}
                        for index, each in self.replays.items()],
        }  # fmt: skip

    @classmethod
    def of(cls, fields: Fields, policies: Sequence[Policy | None], log: Mapping[int, int]) -> ReplayGroup:
        """Build from fields that `to_record` returned under the same policies."""
        life = cls(log, fields.one("acked", AckAccumulator.of), {})
        life._acked_count = fields.integer("acked_count")
        life._mark_delete = fields.one("mark_delete", MarkDeleteFold.of)
        if log and life._mark_delete.mark_delete.ledger_id not in log:
            fields.refuse("mark_delete", "in a ledger of the log", life._mark_delete.mark_delete)
        life.replays = dict(fields.each("replays", lambda each: _replay_of(each, policies, log)))
        for replay in life.replays.values():
            if isinstance(replay, PlainReplay) and not is_part(replay.pending, life._fold.acked):
                fields.refuse("replays", "without unwritten entries that are not acked", "some")
        life.follow()
        return life

    @property
    def complete_below(self) -> int:
        """The first ledger that may have unacked entries."""
        return self._fold.complete_below

    @property
    def complete_until(self) -> int:
        """The first relevant ledger: that of the mark-delete position, or of the first ack not yet written."""
        waiting: list[int] = []
        for replay in self.replays.values():
            waiting += replay.pending if isinstance(replay, PlainReplay) else (replay.first_undurable_ledger,)
        return min([self._mark_delete.mark_delete.ledger_id, *waiting])

    def grow(self, log: Mapping[int, int]) -> None:
        """Continue with a longer message log."""
        self._mark_delete.grow(log, complete_below=self.complete_below)
        self._follow_log(log)

    def forget_below(self, ledger_id: int, log: Mapping[int, int]) -> None:
        """Drop the ledgers below one; the log no longer has them."""
        self._fold.forget_below(ledger_id)
        self._follow_log(log)
        self.follow()

    def _follow_log(self, log: Mapping[int, int]) -> None:
        for replay in self.replays.values():
            if not isinstance(replay, PlainReplay):
                replay.follow_log(log)

    def follow(self) -> None:
        """Pass the acks to the replays."""
        for replay in self.replays.values():
            if isinstance(replay, PlainReplay):
                replay.follow(self._fold.acked)

    @property
    def acked_fold(self) -> AckAccumulator:
        """The acks; must not be changed."""
        return self._fold

    def recovered(self, log: Mapping[int, int], *, now_ms: int) -> Iterator[ReplayGroup]:
        """Yield the group of each replay after a crash."""
        for index, replay in self.replays.items():
            acked = self._fold.as_forgotten(replay.restart(now_ms=now_ms), log)
            yield ReplayGroup(log, AckAccumulator(acked, complete_below=self.complete_below), {index: replay})

    def missing(self, recorded: AckAccumulator, *, now_ms: int) -> EventChunk:
        """Return acks of the entries acked in the recording but not here, after one event that acks nothing."""
        runs = [(-1, -1, -1)]
        for ledger_id, bitmap in sorted(recorded.acked.items()):
            held = self._fold.acked.get(ledger_id)
            if held is not None or ledger_id >= self.complete_below:
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
        news = self._fold.take(events)
        new_counts = news.counts(len(events.ts_ms))
        acked = self._acked_count + np.concatenate(([0], np.cumsum(new_counts)))
        self._acked_count = int(acked[-1])
        placed = self._mark_delete.take(news, self._fold.acked)
        return Piece(events, news, new_counts, acked, placed, self._fold.acked)


def opened(policies: Sequence[Policy | None], log: Mapping[int, int], now_ms: int) -> list[ReplayGroup]:
    """Open a cursor for each policy."""
    replays = {
        index: _opened_replay(policy, log, now_ms) for index, policy in enumerate(policies) if policy is not AS_RECORDED
    }
    return [ReplayGroup(log, AckAccumulator(), each) for each in agreeing(replays)]


def _opened_replay(policy: Policy, log: Mapping[int, int], now_ms: int) -> AnyReplay:
    if policy.blocks:
        from ackstate.analysis.replay.gated_replay import GatedReplay  # noqa: PLC0415 - most grids need no cursor

        return GatedReplay(policy, log, opened_ms=now_ms)
    if policy.persists_everything:
        return PlainReplay(policy, opened_ms=now_ms)
    from ackstate.analysis.replay.cursor_replay import CursorReplay  # noqa: PLC0415 - most grids need no cursor

    return CursorReplay(policy, log, opened_ms=now_ms)


def _replay_of(fields: Fields, policies: Sequence[Policy | None], log: Mapping[int, int]) -> tuple[int, AnyReplay]:
    """Return a replay with the number of its policy."""
    index = fields.integer("policy", most=len(policies) - 1)
    policy = policies[index]
    if policy is AS_RECORDED:
        fields.refuse("policy", "one that is replayed", index)
    replay = _opened_replay(policy, log, 0)
    fields.word("kind", replay.kind)
    replay.restore(fields)
    return index, replay


def agreeing(replays: Mapping[int, AnyReplay]) -> list[dict[int, AnyReplay]]:
    """Group the replays that have the same acks at all times: all except those that may postpone acks."""
    together: dict[int, AnyReplay] = {index: replay for index, replay in replays.items() if replay.kind != "gated"}
    alone: list[dict[int, AnyReplay]] = [{index: replay} for index, replay in replays.items() if index not in together]
    return [together, *alone] if together else alone
