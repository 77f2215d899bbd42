"""Replays one subscription, chunk by chunk, under all policies of a grid at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np

from ackstate.analysis.replay.ack_accumulator import RedeliveryFold, complete_until
from ackstate.analysis.replay.acked import AckAccumulator, EventChunk
from ackstate.analysis.replay.curve_sum import CAUSES, CurveSum, Points
from ackstate.analysis.replay.mark_delete import MarkDeleteFold, mark_delete_of
from ackstate.analysis.replay.plain_replay import PlainReplay
from ackstate.analysis.replay.policy import AS_RECORDED
from ackstate.analysis.replay.replay import Piece, is_restart, is_same_restart, pieces
from ackstate.analysis.replay.state_fields import is_part
from ackstate.analysis.trace.events import EventKind, TraceError
from ackstate.entry_bitmap import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.cursor_replay import CursorReplay
    from ackstate.analysis.replay.gated_replay import GatedReplay
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.replay.replay import Epochs
    from ackstate.analysis.replay.state_fields import Fields

_AnyReplay: TypeAlias = "PlainReplay | CursorReplay | GatedReplay"
NO_EVENTS = EventChunk(*(np.empty(0, np.int64) for _ in EventChunk._fields))
"""A chunk without events."""


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

    def to_record(self) -> dict[str, int]:
        """Return its fields as a state has them."""
        return {
            "write_count": self.write_count, "bytes_written": self.bytes_written, "bytes_kept": self.bytes_kept,
            "bytes_kept_max": self.bytes_kept_max, "blocked_ms": self.blocked_ms,
        }  # fmt: skip

    @classmethod
    def of(cls, fields: Fields) -> Costs:
        """Build from fields that `to_record` returned."""
        written = fields.integer("write_count"), fields.integer("bytes_written")
        kept = fields.integer("bytes_kept"), fields.integer("bytes_kept_max")
        return cls(*written, *kept, fields.integer("blocked_ms"))

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

    def complete_until(self, log: Mapping[int, int]) -> int:
        """Return the ledger of the mark-delete position."""
        return self._fold.complete_until(log)

    def forget_below(self, ledger_id: int) -> None:
        """Drop the acks of all ledgers below one."""
        self._fold.forget_below(ledger_id)

    def to_record(self) -> dict[str, Any]:
        """Return its fields as a state has them."""
        return {"kind": "recorded", **_sums_record(self), "counts": self._fold.to_record()}

    def restore(self, fields: Fields) -> None:
        """Continue from fields that `to_record` returned."""
        self._fold = fields.one("counts", RedeliveryFold.of)


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

    def to_record(self) -> dict[str, Any]:
        """Return its fields as a state has them."""
        causes = self._causes[:, 0].tolist()
        return {"kind": "policy", **_sums_record(self), "durable_count": self._durable, "causes": causes}

    def restore(self, fields: Fields) -> None:
        """Continue from fields that `to_record` returned."""
        self._durable = fields.signed("durable_count")
        self._causes = fields.array("causes", least=0, count=len(CAUSES)).reshape(-1, 1)

    def restart(self) -> None:
        """Restart with an opened cursor: all acks are durable."""
        self._durable = 0
        self._causes = np.zeros((len(CAUSES), 1), np.int64)

    def reset(self, epochs: Epochs) -> None:
        """Restart with a cursor that was reset; its last persist may have excluded acks."""
        self._durable = -int(epochs.undurable[-1])
        self._causes = np.array([getattr(epochs, name)[-1:] for name in CAUSES])

    def take(self, piece: Piece, epochs: Epochs) -> Points:
        """Add the next events and persists, and return their points."""
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


def _sums_record(curve: RecordedCurve | PolicyCurve) -> dict[str, Any]:
    return {"sums": curve.sum.to_record(), "costs": curve.costs.to_record()}


def _curve_of(fields: Fields) -> RecordedCurve | PolicyCurve:
    kind = fields.word("kind", "recorded", "policy")
    curve = RecordedCurve() if kind == "recorded" else PolicyCurve()
    fields.one("sums", curve.sum.restore)
    curve.costs = fields.one("costs", Costs.of)
    curve.restore(fields)
    return curve


@final
class SubscriptionReplay:
    """Replays one subscription chunk by chunk.

    A process that died restarts with the durable state under the policy. Messages that are redelivered then, but were
    not in the recording, are sent and acked again at once, when the cursor is opened. Messages that were redelivered in
    the recording, but are not under the policy, stay acked. A reset is that of the recording. A trace may begin with
    the state that a cursor had when it was opened: it is persisted at once, as after a reset, as far as the policy
    allows.

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
        # The acks of the recording; before the first recovery or reset all policies have the same acks.
        blocks = any(policy is not AS_RECORDED and policy.blocks for policy in policies)
        self._recorded = AckAccumulator() if blocks else None
        # The restart being described: its time, whether it is a reset, and its latest event as a chunk of one. It is
        # complete at the end of a day, so no state includes it.
        self._anew_ms: int | None = None
        self._is_reset = False
        self.latest_of_restart = NO_EVENTS
        # Whether a reset came before any ledger was known: its mark-delete position depends on ledgers of a later day.
        self._is_reset_without_ledgers = False

    def take(self, chunk: EventChunk) -> list[Points]:
        """Replay the next chunk, and return the points of each policy's curve.

        Raises:
            TraceError: Its times go back, or it resets the cursor to a dropped ledger.
        """
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
        return [_concatenated(points) for points in found]

    def end(self, end_ms: int) -> list[Points]:
        """Replay the broker's ticks without events up to a time, inclusive; return their points."""
        found: list[list[Points]] = [[] for _ in self._policies]
        self._end_restart(found)
        if self._is_alive:
            # The tick of the last millisecond is part of the trace, the time after it is not.
            self._replay(NO_EVENTS, end_ms + 1, found, blocked_until_ms=end_ms)
        for curve in self.curves:
            curve.sum.end(end_ms)
        return [_concatenated(points) for points in found]

    def grow(self, log: Mapping[int, int]) -> None:
        """Continue with a longer message log.

        Args:
            log: Ledger id -> entry count of new or longer ledgers, rising.

        Raises:
            TraceError: A ledger that was considered complete has grown.
        """
        longer = {each: max(log.get(each, 0), self._log.get(each, 0)) for each in sorted({*self._log, *log})}
        for life in self._lives:
            life.grow(longer)
        self._log = longer

    def forget_complete(self) -> None:
        """Drop the acks of ledgers below all mark-delete positions."""
        recorded = [curve for curve in self.curves if isinstance(curve, RecordedCurve)]
        floors = [curve.complete_until(self._log) for curve in recorded]
        floor = min([*floors, *(life.complete_until for life in self._lives)])
        if self._recorded is not None:
            floor = min(floor, complete_until(self._recorded, self._log))
            self._recorded.forget_below(floor)
        for curve in recorded:
            curve.forget_below(floor)
        self._log = {ledger_id: count for ledger_id, count in self._log.items() if ledger_id >= floor}
        for life in self._lives:
            life.forget_below(floor, self._log)

    def to_record(self) -> dict[str, Any]:
        """Return its fields as a state has them: at the end of a day, when no restart is being described.

        Raises:
            TraceError: It was reset before any event named a ledger.
        """
        if self._is_reset_without_ledgers:
            raise TraceError("it is reset before any ledger is named: join this day with the next one")
        assert self._anew_ms is None
        assert not self._is_reset
        return {
            "log": [list(pair) for pair in self._log.items()],
            "is_alive": self._is_alive,
            "recorded": None if self._recorded is None else self._recorded.to_record(),
            "curves": [each.to_record() for each in self.curves],
            "groups": [each.to_record() for each in self._lives],
        }

    @classmethod
    def of(cls, fields: Fields, policies: Sequence[Policy | None]) -> SubscriptionReplay:
        """Build from fields that `to_record` returned under the same policies."""
        log = fields.log("log")
        replay = cls(policies, log)
        replay._is_alive = fields.flag("is_alive")
        replay._recorded = fields.optional("recorded", AckAccumulator.of)
        replay.curves = fields.each("curves", _curve_of)
        kinds = [RecordedCurve if policy is AS_RECORDED else PolicyCurve for policy in policies]
        if [type(each) for each in replay.curves] != kinds:
            fields.refuse("curves", "one for each policy, of its kind", [type(each).__name__ for each in replay.curves])
        replay._lives = fields.each("groups", lambda each: _Life.of(each, policies, log))
        replayed = [index for index, policy in enumerate(policies) if policy is not AS_RECORDED]
        found = sorted(index for life in replay._lives for index in life.replays)
        if replay._lives and found != replayed:
            fields.refuse("groups", f"of the policies {replayed}, each once", found)
        return replay

    def _take_pieces(self, chunk: EventChunk, found: list[list[Points]]) -> None:
        if not self._lives:
            self._lives = _opened(self._policies, self._log, int(chunk.ts_ms[0]))
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
        for life in self._lives:
            life.replay(part, until_ms, self.curves, found, blocked_until_ms=blocked_until_ms)

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
            self._recorded = self._lives[0].acked_fold.copy()
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
            self._lives = [each for life in self._lives for each in life.recovered(self._log, now_ms=now_ms)]
        self._anew_ms, self._is_reset, self.latest_of_restart = None, False, NO_EVENTS
        assert self._recorded is not None
        for life in self._lives:
            life.replay(life.missing(self._recorded, now_ms=now_ms), now_ms, self.curves, found)

    def _reset(self, now_ms: int) -> None:
        assert self._recorded is not None
        replays = {index: replay for life in self._lives for index, replay in life.replays.items()}
        if reopened := self._recorded.reopened:
            raise TraceError(
                f"it is reset to ledger {min(reopened)}, whose state was dropped after an earlier day: read all days "
                "again, with another --state"
            )
        self._is_reset_without_ledgers |= not self._log
        acked = self._recorded.spelled_out(self._log)
        mark_delete = mark_delete_of(acked, self._log)
        for index, replay in replays.items():
            curve = self.curves[index]
            assert isinstance(curve, PolicyCurve)
            curve.reset(replay.reset(acked, mark_delete, now_ms=now_ms))
        self._lives = [_Life(self._log, self._recorded.copy(), each) for each in _agreeing(replays)]
        for life in self._lives:
            life.follow()


@final
class _Life:
    """Replays with the same acks: all of them until the first recovery, each on its own after it."""

    def __init__(self, log: Mapping[int, int], fold: AckAccumulator, replays: Mapping[int, _AnyReplay]) -> None:
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
    def of(cls, fields: Fields, policies: Sequence[Policy | None], log: Mapping[int, int]) -> _Life:
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

    def recovered(self, log: Mapping[int, int], *, now_ms: int) -> Iterator[_Life]:
        """Yield the group of each replay after a crash."""
        for index, replay in self.replays.items():
            acked = self._fold.as_forgotten(replay.restart(now_ms=now_ms), log)
            yield _Life(log, AckAccumulator(acked, complete_below=self.complete_below), {index: replay})

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


def _opened(policies: Sequence[Policy | None], log: Mapping[int, int], now_ms: int) -> list[_Life]:
    """Open a cursor for each policy."""
    replays = {
        index: _opened_replay(policy, log, now_ms) for index, policy in enumerate(policies) if policy is not AS_RECORDED
    }
    return [_Life(log, AckAccumulator(), each) for each in _agreeing(replays)]


def _opened_replay(policy: Policy, log: Mapping[int, int], now_ms: int) -> _AnyReplay:
    if policy.blocks:
        from ackstate.analysis.replay.gated_replay import GatedReplay  # noqa: PLC0415 - most grids need no cursor

        return GatedReplay(policy, log, opened_ms=now_ms)
    if policy.is_plain:
        return PlainReplay(policy, opened_ms=now_ms)
    from ackstate.analysis.replay.cursor_replay import CursorReplay  # noqa: PLC0415 - most grids need no cursor

    return CursorReplay(policy, log, opened_ms=now_ms)


def _replay_of(fields: Fields, policies: Sequence[Policy | None], log: Mapping[int, int]) -> tuple[int, _AnyReplay]:
    """Return a replay with the number of its policy."""
    index = fields.integer("policy", most=len(policies) - 1)
    policy = policies[index]
    if policy is AS_RECORDED:
        fields.refuse("policy", "one that is replayed", index)
    replay = _opened_replay(policy, log, 0)
    fields.word("kind", replay.kind)
    replay.restore(fields)
    return index, replay


def _agreeing(replays: Mapping[int, _AnyReplay]) -> list[dict[int, _AnyReplay]]:
    """Group the replays that have the same acks at all times: all except those that may postpone acks."""
    together: dict[int, _AnyReplay] = {index: replay for index, replay in replays.items() if replay.kind != "gated"}
    alone: list[dict[int, _AnyReplay]] = [{index: replay} for index, replay in replays.items() if index not in together]
    return [together, *alone] if together else alone


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
    times[of_persist], values[of_persist] = epochs.at_ms, epochs.undurable
    return Points(times, values, np.ones(count, np.bool_))


def _epoch_of_points(ts_ms: Int64s, epoch: Int64s, at_ms: Int64s) -> Int64s:
    """Return the number of persists up to each point of `_merged`."""
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
