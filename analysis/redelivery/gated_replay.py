"""A replay in which dispatch stops where too much would not be durable: `max_unpersisted_ack_record_bytes`.

The model: a delivery that finds the gate shut waits until it opens, those that come after it wait behind it, and its
ack moves by as much as it waited. An ack of a message whose delivery the trace does not tell is that of a message
delivered at the same instant. Deliveries that a persist lets go do so in the millisecond after it. Each entry of a
cumulative ack is acked by itself. What waits when the process dies was never sent.

The gate, and what it does about young acks, are the library's own (`ackstate.cursor.dispatch.admission`): the limit is
passed by not one byte. What the model leaves out: consumers that would have asked for less, messages that fill holes
and go out while the gate is shut (only what was given back or delayed can), and that types with a single active
consumer have no gate.

Events are taken at once as far as the gate stays open, or stays shut. What it counts after each of them tells which
message turns it, and that one is taken by itself, as the library takes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from ackstate.analysis.redelivery.acked import Chunk
from ackstate.analysis.redelivery.cursor_replay import CursorReplay
from ackstate.analysis.redelivery.mentions import NAMING, Mentions, are_among, name_counts
from ackstate.analysis.redelivery.on_their_way import CONSUMER, OnTheirWay
from ackstate.analysis.redelivery.open_run import OpenRun, delivery_costs
from ackstate.analysis.redelivery.record_bytes import isolated_bytes
from ackstate.analysis.redelivery.replay import Epochs
from ackstate.analysis.redelivery.stretch import Steps, Stretch
from ackstate.analysis.redelivery.waiting_line import NO_TIMES, Times, TimesKept, WaitingLine, entries_by_ledger
from ackstate.analysis.trace.events import CHUNK_EVENTS, EventKind
from ackstate.cursor.dispatch.admission import Admission
from ackstate.cursor.dispatch.deliveries import Sent
from ackstate.cursor.outcome import PersistResult, Route
from ackstate.cursor.persister import PersistWatcher
from ackstate.cursor.store import StoreError
from ackstate.errors import AckStateError
from ackstate.limits.gate import DispatchGate, GateLimits, Usage
from ackstate.position import Position
from ackstate.record_size import range_fixed_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyroaring import BitMap

    from ackstate.analysis.redelivery.acked import Bools, Int64s
    from ackstate.analysis.redelivery.policy import Policy
    from ackstate.analysis.redelivery.state_fields import Fields

_DELIVER, _ACK = int(EventKind.DELIVER), int(EventKind.ACK)  # An enum looks up its members in Python.
_SENT = Sent(CONSUMER)
_RANGE_BYTES_MIN = range_fixed_bytes(0) + 2
_NEVER_MS = 2**62
_MOST_USED = Usage(2**62, 0, 0)
_FAILED_BEFORE = "the last persist of an earlier day failed"
_NOTHING = np.empty(0, np.int64)
_NO_EVENTS = Chunk(*(_NOTHING for _ in Chunk._fields))
_NO_MENTIONS = Mentions(
    event=_NOTHING, ts_ms=_NOTHING, ledger_id=_NOTHING, entry_id=_NOTHING, is_ack=_NOTHING.astype(np.bool_),
    new_at=_NOTHING, acked_at=_NOTHING,
)  # fmt: skip
# What is shorter costs more to take at once than message by message, and so many are then taken so before it is asked
# again whether there is more.
_RUN_MIN = 16
_STEPS = 32
# So many events, or messages that they name, are looked at together.
_BLOCK = 4_096


@final
class GatedReplay(PersistWatcher):
    """One subscription under a policy whose gate may stop dispatch.

    It takes events as recorded, and says when they happen instead.

    Complexity: bitmap operations over what is on its way and acked for every run of events that the gate is sure to
    let pass; elsewhere a few steps for each delivered and acked entry. Memory: what is on its way, and what waits.

    Args:
        policy: One that `blocks`.
        log: As `CursorReplay` has it.
        opened_ms: The same.
    """

    def __init__(self, policy: Policy, log: Mapping[int, int], *, opened_ms: int) -> None:
        self._limits = GateLimits(
            max_unpersisted_ack_record_bytes=policy.max_unpersisted_ack_record_bytes,
            max_unacked_messages=0, max_unacked_messages_per_consumer=0,
        )  # fmt: skip
        self._replay = CursorReplay(policy, log, opened_ms=opened_ms)
        # A persist that leaves something out may make the ranges larger that are not durable.
        self._outlasts_persists = policy.leaves_nothing_out
        self._is_young = policy.cursor.become_old_ack_record_seconds != 0
        self.blocked_ms = 0
        self._begin()
        self._admission.observe(now_ms=0)

    def _begin(self) -> None:
        """Begin with nothing on its way."""
        self._cursor = self._replay.cursor
        self._sent = OnTheirWay()
        self._gate = DispatchGate(self._limits)
        self._admission = Admission(self._cursor, gate=self._gate, promotes_young=True, sent=self._sent)
        self._cursor.watch(self)
        self._waiting = WaitingLine()
        self._blocked_since_ms = 0
        self._let_go_ms: int | None = None  # when what a persist made room for may go
        # By how much the acks move of messages that had waited; when those happen that the recording has had.
        self._moved_by_ms = TimesKept()
        self._moved_acks = NO_TIMES
        self._promotions: list[tuple[int, PersistResult]] = []
        # How many events to try to take at once: where that fails, fewer are tried for some time.
        self._run_max = CHUNK_EVENTS
        self._is_ticking = False
        self._now_ms = 0
        self._events: list[Chunk] = []
        self._rows: list[tuple[int, ...]] = []

    def take(self, events: Chunk, *, until_ms: int, blocked_until_ms: int) -> tuple[Chunk, Epochs]:
        """Take the next events in, and return what happens before a time: events when they do, and persists.

        Args:
            events: As `Replay.take` has them in a piece.
            until_ms: The same.
            blocked_until_ms: Up to when time counts as blocked; not after `until_ms`.
        """
        costs = np.append(0, np.cumsum(delivery_costs(events)))
        begin, count = 0, len(events.ts_ms)
        while begin < count:
            now_ms = int(events.ts_ms[begin])
            self._pass(now_ms + 1, persists_until_ms=now_ms)
            run = self._open_run(events, begin, costs)
            if run is None:
                end = self._block_end(events, begin)
                self._take_block(events.part(begin, end))
            else:
                end = begin + len(run.events.ts_ms)
                self._take_run(run)
            begin = end
        self._pass(until_ms, persists_until_ms=until_ms)
        if self._waiting:
            self.blocked_ms += max(0, blocked_until_ms - self._blocked_since_ms)
            self._blocked_since_ms = max(blocked_until_ms, self._blocked_since_ms)
        happened, epochs = _in_order([_NO_EVENTS, *self._events]), Epochs.of(self._rows)
        self._events, self._rows = [], []
        return happened, epochs

    def _open_run(self, events: Chunk, begin: int, costs: Int64s) -> OpenRun | None:
        """Return the longest run found, from an event on, that the gate is sure to let pass; None for a short one.

        Args:
            events: All persists before the first of them are done.
            begin: That one.
            costs: What the deliveries before each event may add, all of them together.
        """
        waits = self._waiting or len(self._moved_acks.ts_ms) or self._promotions or self._let_go_ms is not None
        if waits or self._gate.is_closed:
            return None
        limit = self._limits.max_unpersisted_ack_record_bytes
        room = limit - self._cursor.unpersisted_record_bytes - self._sent.reserved_bytes
        end = int(np.searchsorted(costs, costs[begin] + room, "right")) - 1
        if not self._outlasts_persists:
            end = min(end, int(np.searchsorted(events.ts_ms, self._replay.quiet_until_ms, "right")))
        end = min(end, begin + self._run_max)
        while end - begin >= _RUN_MIN:
            run = OpenRun.of(events.part(begin, end), self._cursor, self._sent)
            if run.record_bytes <= room and not self._moves_any(run.acked):
                self._run_max = min(max(self._run_max, 2 * (end - begin)), CHUNK_EVENTS)
                return run
            end = begin + (end - begin) // 2
            self._run_max = max(end - begin, _RUN_MIN)
        return None

    def _moves_any(self, acked: Mapping[int, BitMap]) -> bool:
        """Tell whether one of some acks is of a message that had waited."""
        return any(self._moved_by_ms.has_any(*each) for each in acked.items())

    def _take_run(self, run: OpenRun) -> None:
        """Take at once what the gate lets pass."""
        self._now_ms = int(run.events.ts_ms[-1])
        if self._is_young:
            events, news = run.one_by_one(self._cursor, self._sent)
        else:
            events, news = run.events, run.news(self._cursor)
        self._is_ticking = True
        self._rows += self._replay.take_events(events, news, until_ms=self._now_ms)
        self._is_ticking = False
        self._sent.change(run.sent, run.acked)
        self._events.append(run.events)

    def _block_end(self, events: Chunk, begin: int) -> int:
        """Return up to which event to look at single messages: at least one."""
        counts = name_counts(events.part(begin, begin + _BLOCK), self._cursor)
        return begin + max(1, int(np.searchsorted(np.cumsum(counts), _BLOCK, "right")))

    def _take_block(self, events: Chunk) -> None:
        """Take events whose messages may have to wait."""
        last_ms = int(events.ts_ms[-1])
        mentions = Mentions.of(events, self._cursor, self._sent, self._waiting)
        self._pass(last_ms + 1, persists_until_ms=last_ms, mentions=mentions)
        self._events.append(Chunk(*(column[~events.is_any_of(NAMING)] for column in events)))
        if events.kind[-1] == EventKind.CRASH:
            self._close_promotions(last_ms + 1)

    def to_record(self) -> dict[str, Any]:
        """Return its fields as a state has them, but for the message log."""
        assert not any((self._promotions, self._events, self._rows)), "a state ends a day"
        closed = self._gate.why_blocked(_MOST_USED)
        return {
            "cursor_replay": self._replay.to_record(),
            "sent": self._sent.to_record(),
            "released_at": closed[0].released_at if closed else None,
            "has_store_error": self._admission.store_error is not None,
            "promote_again_ms": self._admission._promote_again_ms,
            "waiting": self._waiting.first(len(self._waiting)).to_record(),
            "waiting_acked": self._waiting.acked_ms.times().to_record(),
            "moved_by": self._moved_by_ms.times().to_record(),
            "moved_acks": self._moved_acks.to_record(),
            "blocked_ms": self.blocked_ms,
            "blocked_since_ms": self._blocked_since_ms,
            "let_go_ms": self._let_go_ms,
            "now_ms": self._now_ms,
        }

    def restore(self, fields: Fields) -> None:
        """Continue from fields that `to_record` returned under the same policy and with the same log."""
        fields.one("cursor_replay", self._replay.restore)
        self._begin()
        self._sent.change(fields.entries("sent"), {})
        self._restore_gate(fields)
        self._admission.store_error = StoreError(_FAILED_BEFORE) if fields.flag("has_store_error") else None
        self._admission._promote_again_ms = fields.signed("promote_again_ms")
        self._waiting.join(fields.one("waiting", Times.of))
        self._waiting.acked_ms.put(fields.one("waiting_acked", Times.of))
        self._moved_by_ms.put(fields.one("moved_by", Times.of))
        self._moved_acks = NO_TIMES.and_those(fields.one("moved_acks", Times.of))
        self.blocked_ms = fields.integer("blocked_ms")
        self._blocked_since_ms = fields.signed("blocked_since_ms")
        self._let_go_ms = fields.optional_integer("let_go_ms")
        self._now_ms = fields.signed("now_ms")
        fields.check(self._check)

    def _restore_gate(self, fields: Fields) -> None:
        """Close the gate if it was: as a message does that has no room, and leaves as much."""
        limit = self._limits.max_unpersisted_ack_record_bytes
        released_at = fields.optional_integer("released_at", least=0, most=limit)
        if released_at is not None:
            used = Usage(released_at + 1, 0, 0)
            self._gate.observe(used, next_record_bytes=limit - released_at)

    def _check(self) -> None:
        """Assert that every message is in one place. Complexity: O(ledgers) bitmap operations, O(moved acks)."""
        self._sent._check()
        self._waiting._check()
        waiting = self._waiting.first(len(self._waiting))
        for each in (self._sent.by_ledger(), entries_by_ledger(waiting.ledger_id, waiting.entry_id)):
            for ledger_id, entries in each.items():
                unacked = entries.copy()
                self._cursor.discard_acked(ledger_id, unacked)
                assert unacked == entries, f"ledger {ledger_id} has acked messages that are sent or wait"
                assert not entries or Position(ledger_id, entries.max()) in self._cursor.ledgers
        for ledger_id, entries in self._sent.by_ledger().items():
            assert entries.isdisjoint(self._waiting.entries(ledger_id)), f"ledger {ledger_id}: sent messages wait"
        for position in map(Position, self._moved_acks.ledger_id.tolist(), self._moved_acks.entry_id.tolist()):
            assert position in self._sent or self._cursor.is_acked(position), f"{position} is acked later, and not sent"

    @property
    def first_undurable_ledger(self) -> int:
        """See `CursorReplay`."""
        return self._replay.first_undurable_ledger

    def follow_log(self, log: Mapping[int, int]) -> None:
        """See `CursorReplay`."""
        self._replay.follow_log(log)

    def restart(self, *, now_ms: int) -> dict[int, BitMap]:
        """See `Replay.restart`."""
        acked = self._replay.restart(now_ms=now_ms)
        self._begin()
        self._admission.observe(now_ms=0)
        return acked

    def reset(self, acked: Mapping[int, BitMap], mark_delete: Position, *, now_ms: int) -> Epochs:
        """See `Replay.reset`; nothing is on its way after it."""
        # Its persist is no promotion.
        self._is_ticking = True
        epochs = self._replay.reset(acked, mark_delete, now_ms=now_ms)
        self._begin()
        self._admission.observe(now_ms=0)
        return epochs

    def record_bytes_max(self) -> int | None:
        """See `PersistWatcher`."""
        return self._admission.record_bytes_max()

    def persisted(self, outcome: PersistResult | AckStateError) -> None:
        """See `PersistWatcher`."""
        if isinstance(outcome, AckStateError):
            self._admission.persisted(outcome, now_ms=self._now_ms)
            return
        if not self._is_ticking and outcome.route is not Route.NOTHING:
            self._promotions.append((self._now_ms, outcome))
            self._replay.promoted(self._now_ms, outcome)
        error = self._admission.store_error if outcome.route is Route.NOTHING else None
        self._admission.persisted(error, now_ms=self._now_ms)

    def _pass(self, until_ms: int, *, persists_until_ms: int, mentions: Mentions = _NO_MENTIONS) -> None:
        """Let happen, in order, what is mentioned, what was moved to before a time, and the persists before another."""
        at = steps = 0
        while True:
            now_ms = until_ms if at == len(mentions.ts_ms) else int(mentions.ts_ms[at])
            if len(self._moved_acks.ts_ms):
                now_ms = min(now_ms, int(self._moved_acks.ts_ms[0]))
            if self._let_go_ms is not None:
                now_ms = min(now_ms, self._let_go_ms)
            if self._persist_one(min(now_ms, persists_until_ms)):
                continue
            if now_ms >= until_ms:
                return
            self._now_ms = now_ms
            if self._let_go_ms == now_ms:
                self._let_go_ms = None
                self._let_go()
            elif steps:
                at, steps = self._step(mentions, at), steps - 1
            else:
                at, steps = self._take_stretch(mentions, at, until_ms)

    def _step(self, mentions: Mentions, at: int) -> int:
        """Let the next thing happen by itself, and return the next mention."""
        moved = self._moved_acks
        if len(moved.ts_ms) and moved.ts_ms[0] <= self._now_ms and at == mentions.end_of_event(at):
            self._moved_acks = moved.those(slice(1, None))
            self._ack(Position(int(moved.ledger_id[0]), int(moved.entry_id[0])))
            return at
        position = Position(int(mentions.ledger_id[at]), int(mentions.entry_id[at]))
        if mentions.is_ack[at]:
            self._ack_as_recorded(position)
        else:
            self._deliver(position)
        return at + 1

    def _take_stretch(self, mentions: Mentions, at: int, until_ms: int) -> tuple[int, int]:
        """Take at once what happens before a time, as long as the gate does not turn.

        Args:
            mentions: All persists before the first that follows are done.
            at: That one.
            until_ms: That time.

        Returns:
            The next mention, and how much of what follows is to be taken by itself.
        """
        end, end_ms = self._sure_end(mentions, at, until_ms)
        due = self._moved_acks.until(end_ms)
        is_shut, under_way = self._gate.is_closed, mentions.end_of_event(at)
        if end - at + len(due.ts_ms) < _RUN_MIN or (is_shut and self._may_turn_at_once()):
            return at, _STEPS
        acks = at + np.flatnonzero(mentions.is_ack[at:end])
        moved_by_ms, waits = self._moved_by(mentions, acks, at), self._wait(mentions, acks, at)
        if self._persists_for_acks_alone:
            acks_ms = (mentions.ts_ms[acks] + np.maximum(moved_by_ms, 0))[~waits]
            end_ms = min(end_ms, self._quiet_until(np.concatenate((due.ts_ms[:1], acks_ms))))
            end = max(under_way, int(np.searchsorted(mentions.ts_ms[:end], end_ms, "right")))
            due, kept = due.until(end_ms), acks < end
            acks, moved_by_ms, waits = acks[kept], moved_by_ms[kept], waits[kept]
        moves = moved_by_ms > 0
        late = mentions.times(acks[moves]).later(moved_by_ms[moves])
        direct = acks[~(waits | moves)]
        steps = Steps.of(
            mentions, sent=direct[:0] if is_shut else mentions.new(at, end), acked=direct,
            moved=due.and_those(late.those(late.ts_ms <= end_ms)), under_way=under_way,
        )  # fmt: skip
        stretch = Stretch.of(steps, self._cursor, self._sent)
        turning = np.flatnonzero(self._turns(stretch))
        if len(turning):
            end = stretch.mentioned_before(int(turning[0]), mentions, under_way)
        is_told = acks < end
        moved = self._moved_acks.and_those(late.those(is_told[moves]))
        if len(turning):
            is_over = stretch.come_after(int(turning[0]), moved, under_way)
            stretch = stretch.until(int(turning[0]))
        else:
            is_over = moved.ts_ms <= end_ms
        self._run_max = min(max(4 * max(end - at, len(stretch.used_bytes)), _RUN_MIN), CHUNK_EVENTS)
        self._moved_acks = moved.those(~is_over)
        told = mentions.times(acks[is_told & moves])
        self._moved_by_ms.pop(told.ledger_id, told.entry_id)
        if is_shut:
            self._waiting.join(mentions.times(mentions.new(at, end)))
            self._waiting.acked_ms.put(mentions.times(acks[is_told & waits]))
        self._let_happen(stretch)
        return end, min(len(turning), 1)

    def _sure_end(self, mentions: Mentions, at: int, until_ms: int) -> tuple[int, int]:
        """Return up to which mention, and up to which time, to look."""
        under_way = mentions.end_of_event(at)
        end_ms = until_ms - 1 if self._persists_for_acks_alone else min(until_ms - 1, self._replay.quiet_until_ms)
        if len(self._moved_acks.ts_ms) > self._run_max:
            end_ms = min(end_ms, int(self._moved_acks.ts_ms[self._run_max]))
        # What was promoted is noted as it is at the end of its millisecond.
        end_ms = self._now_ms if self._promotions else max(self._now_ms, end_ms)
        end = max(under_way, int(np.searchsorted(mentions.ts_ms, end_ms, "right")))
        if end - at <= self._run_max:
            return end, end_ms
        end = max(under_way, at + self._run_max)
        return end, int(mentions.ts_ms[end - 1])

    @property
    def _persists_for_acks_alone(self) -> bool:
        """Whether nothing is persisted before another message is acked, and then after its millisecond."""
        return self._outlasts_persists and not self._cursor.is_dirty()

    def _quiet_until(self, acks_ms: Int64s) -> int:
        """Return up to when nothing is persisted that was not acked before some times, the first of which counts."""
        first_ms = int(acks_ms.min(initial=_NEVER_MS))
        return max(first_ms, self._now_ms, self._replay.quiet_until_ms)

    def _moved_by(self, mentions: Mentions, acks: Int64s, at: int) -> Int64s:
        """Return by how much acks move that are mentioned from a mention on; -1 for those of what had not waited."""
        moved_by_ms = self._moved_by_ms.get(mentions.ledger_id[acks], mentions.entry_id[acks])
        # What is acked twice is acked with the second if that comes first.
        moved_by_ms[mentions.acked_at[acks] >= at] = -1
        return moved_by_ms

    def _wait(self, mentions: Mentions, acks: Int64s, at: int) -> Bools:
        """Return whether the messages of acks that are mentioned from a mention on wait for their delivery."""
        if not self._gate.is_closed:
            return np.zeros(len(acks), np.bool_)
        waits = are_among(self._waiting, mentions.ledger_id[acks], mentions.entry_id[acks])
        return waits | (mentions.new_at[acks] >= at)

    def _may_turn_at_once(self) -> bool:
        """Tell whether a shut gate may turn for what does not bring its use down."""
        if not self._is_young or not self._waiting:
            return not self._waiting
        reserved = np.array([self._sent.reserved_bytes])
        return bool(self._may_promote(reserved, reserved + self._cursor.unpersisted_record_bytes)[0])

    def _turns(self, stretch: Stretch) -> Bools:
        """Return of each step whether it may do more than it says: the gate turns, or acks are promoted."""
        limit, used = self._limits.max_unpersisted_ack_record_bytes, stretch.used_bytes
        if not self._gate.is_closed:
            return np.where(stretch.steps.is_ack, used < 0, used > limit)
        if self._is_young:
            return (used < 0) | self._may_promote(stretch.reserved_bytes, used)
        standing = self._gate.why_blocked(self._admission.usage())
        return used <= (standing[0].released_at if standing else limit)

    def _may_promote(self, reserved: Int64s, used: Int64s) -> Bools:
        """Return whether young acks may be promoted for what waits at a shut gate: not if that makes no room."""
        limit, first = self._limits.max_unpersisted_ack_record_bytes, self._waiting.first(1)
        cost = isolated_bytes(first.ledger_id, first.entry_id)
        has_no_room = (used + cost > limit) & (reserved + cost <= limit)
        return has_no_room | (reserved <= int(limit * self._limits.unpersisted_release_ratio))

    def _let_happen(self, stretch: Stretch) -> None:
        """Take at once what the gate has no say in."""
        if not len(stretch.used_bytes):
            return
        self._now_ms = int(stretch.steps.ts_ms[-1])
        events, acked = stretch.events(), stretch.acked()
        self._is_ticking = True
        self._rows += self._replay.take_events(events, acked, until_ms=self._now_ms)
        self._is_ticking = False
        self._sent.change(stretch.sent(), acked.bitmaps())
        self._events.append(events)
        assert self._sent.reserved_bytes == stretch.reserved_bytes[-1]
        assert self._sent.reserved_bytes + self._cursor.unpersisted_record_bytes == stretch.used_bytes[-1]

    def _persist_one(self, until_ms: int) -> bool:
        """Tick until the cursor was persisted once, before a time; tell whether it was."""
        if self._promotions:
            self._close_promotions(until_ms)
        if until_ms <= self._replay.quiet_until_ms:
            return False
        self._is_ticking = True
        row = next(self._replay.persists(until_ms), None)
        self._is_ticking = False
        if row is None:
            return False
        self._rows.append(row)
        if self._waiting:
            self._let_go_ms = row[0] + 1
        return True

    def _close_promotions(self, until_ms: int) -> None:
        """Note what was persisted early, as it is at the end of its millisecond, once that is over."""
        while self._promotions and self._promotions[0][0] < until_ms:
            at_ms, result = self._promotions.pop(0)
            self._rows.append(self._replay.row(at_ms, result))

    def _deliver(self, position: Position) -> None:
        if position in self._sent or self._cursor.is_acked(position) or position in self._waiting:
            return
        if not self._waiting:
            self._blocked_since_ms = self._now_ms
        self._waiting.join(self._at_present(position))
        self._let_go()

    def _let_go(self) -> None:
        """Send what waits as far as the gate lets it."""
        # A gate that young acks do not concern opens when its use falls, and then it is open before anything is asked.
        while self._waiting and (self._is_young or not self._gate.is_closed):
            self._replay.look(self._now_ms)
            if not self._gate.is_closed:
                self._send_fitting()
            if not self._waiting:
                return
            first = self._waiting.first(1)
            position = Position(int(first.ledger_id[0]), int(first.entry_id[0]))
            if not self._admission.send_new(position, _SENT, now_ms=self._now_ms):
                return
            self._went(1)

    def _send_fitting(self) -> None:
        """Send of what waits what an open gate has room for."""
        used = self._cursor.unpersisted_record_bytes + self._sent.reserved_bytes
        room = self._limits.max_unpersisted_ack_record_bytes - used
        first = self._waiting.first(room // _RANGE_BYTES_MIN)
        count = int(np.searchsorted(np.cumsum(isolated_bytes(first.ledger_id, first.entry_id)), room, "right"))
        if count:
            self._sent.change(entries_by_ledger(first.ledger_id[:count], first.entry_id[:count]), {})
            self._went(count)

    def _went(self, count: int) -> None:
        """Note that the first of those that waited were sent."""
        now_ms, went = self._now_ms, self._waiting.leave(count)
        if not self._waiting:
            self.blocked_ms += now_ms - self._blocked_since_ms
        if self._is_young:
            # The ruler keeps the highest of a millisecond.
            highest = max(zip(went.ledger_id.tolist(), went.entry_id.tolist(), strict=True))
            self._replay.deliver(Position(*highest), now_ms=now_ms)
        self._note(_DELIVER, went._replace(ts_ms=np.full(count, now_ms)))
        acked_ms = self._waiting.acked_ms.pop(went.ledger_id, went.entry_id)
        moved_by_ms, is_acked = now_ms - went.ts_ms, acked_ms >= 0
        acked = went._replace(ts_ms=acked_ms + moved_by_ms).those(is_acked)
        self._moved_acks = self._moved_acks.and_those(acked)
        self._moved_by_ms.put(went._replace(ts_ms=moved_by_ms).those(~is_acked & (moved_by_ms > 0)))

    def _ack_as_recorded(self, position: Position) -> None:
        if self._cursor.is_acked(position):
            return
        now = self._at_present(position)
        (moved_by_ms,) = self._moved_by_ms.pop(now.ledger_id, now.entry_id)
        if moved_by_ms > 0:
            self._moved_acks = self._moved_acks.and_those(now.later(moved_by_ms))
            return
        if position not in self._sent:
            self._deliver(position)
        if position in self._sent:
            self._ack(position)
        else:
            self._waiting.acked_ms.put(now)

    def _ack(self, position: Position) -> None:
        if self._cursor.is_acked(position):
            return
        now_ms = self._now_ms
        self._replay.look(now_ms)
        self._admission.ack(position, lambda: self._cursor.ack(position, now_ms=now_ms), now_ms=now_ms)
        self._replay.acked(now_ms)
        settled = self._admission.settle([position])
        assert settled, f"{position} was not on its way"
        self._admission.use_fell(now_ms=now_ms)
        self._note(_ACK, self._at_present(position))
        self._let_go()

    def _at_present(self, position: Position) -> Times:
        return Times(*(np.array([each]) for each in (self._now_ms, *position)))

    def _note(self, kind: int, times: Times) -> None:
        entry_id = times.entry_id
        self._events.append(Chunk(times.ts_ms, np.full(len(entry_id), kind), times.ledger_id, entry_id, entry_id))


def _in_order(events: Sequence[Chunk]) -> Chunk:
    """Return events in order of time."""
    together = [np.concatenate(columns) for columns in zip(*events, strict=True)]
    order = np.argsort(together[0], kind="stable")
    return Chunk(*(column[order] for column in together))
