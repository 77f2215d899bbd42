"""A replay in which dispatch stops where too much would not be durable: `max_unpersisted_ack_record_bytes`.

The model: deliveries are queued (FIFO) while the gate is closed, and the ack of a message moves by as long as its
delivery waited. The ack of a message without a delivery in the trace is that of a message delivered at the same
instant. Deliveries that a persist makes room for happen in the millisecond after it. Each entry of a cumulative ack is
acked by itself. What waits when the process dies was never sent.

The gate, and what it does about young acks, are the library's own (`ackstate.cursor.dispatch.admission`): the limit is
never exceeded, not even by a byte. What the model leaves out: consumers that would have asked for less, messages that
fill holes and go out while the gate is closed (only what was given back or delayed can), and that types with a single
active consumer have no gate.

Where the gate has room for all messages of a run of events, the run is taken at once. Elsewhere the library's cursor is
given one ack after another, and its admission each message for which there is no room, and each ack that may open the
gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
from pyroaring import BitMap

from ackstate.analysis.replay.acked import EventChunk
from ackstate.analysis.replay.blocked_queue import NEVER_MS, BlockedQueue
from ackstate.analysis.replay.cursor_replay import CursorReplay
from ackstate.analysis.replay.in_flight_set import CONSUMER, InFlightSet
from ackstate.analysis.replay.open_run import OpenRun, delivery_costs
from ackstate.analysis.replay.replay import Epochs
from ackstate.analysis.trace.events import CHUNK_EVENTS, EventKind
from ackstate.cursor.dispatch.admission import Admission
from ackstate.cursor.dispatch.deliveries import Sent
from ackstate.cursor.persist.persister import PersistWatcher
from ackstate.cursor.results import PersistResult, PersistTarget
from ackstate.cursor.store import StoreError
from ackstate.errors import AckStateError
from ackstate.limits.gate import DispatchGate, GateLimits, Usage
from ackstate.position import Position
from ackstate.record_size import isolated_range_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.replay.state_fields import Fields

_DELIVER, _ACK = int(EventKind.DELIVER), int(EventKind.ACK)  # Cached: enum member lookup is slow.
_NAMING = (EventKind.DELIVER, EventKind.ACK, EventKind.MARK_DELETE)
_ACKS = (int(EventKind.ACK), int(EventKind.MARK_DELETE))
_SENT = Sent(CONSUMER)
_MOST_USED = Usage(2**62, 0, 0)
_FAILED_BEFORE = "the last persist of an earlier day failed"
_NO_EVENTS = EventChunk(*(np.empty(0, np.int64) for _ in EventChunk._fields))
# A shorter run costs more at once than one by one.
_RUN_MIN = 16
# This many events are taken one by one before the next try to take a run at once.
_STEPS = 128


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

    kind: ClassVar[Literal["gated"]] = "gated"
    """In a state."""

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
        self._sent = InFlightSet()
        self._gate = DispatchGate(self._limits)
        self._admission = Admission(self._cursor, gate=self._gate, promotes_young=True, sent=self._sent)
        self._cursor.watch(self)
        self._queue = BlockedQueue()
        self._blocked_since_ms = 0
        self._let_go_ms = NEVER_MS  # when what a persist made room for may go
        self._promotions: list[tuple[int, PersistResult]] = []
        # How many events to try to take at once: after a failure, fewer.
        self._run_max = CHUNK_EVENTS
        self._is_ticking = False
        self._now_ms = 0
        self._events: list[EventChunk] = []
        self._rows: list[tuple[int, ...]] = []
        self._happened: list[tuple[int, int, int, int]] = []
        # The last time before which nothing is persisted, whatever is acked.
        self._quiet_until_ms = self._replay.quiet_until_ms
        # A closed gate stays closed while the usage is above this.
        self._may_open_at = _MOST_USED.unpersisted_record_bytes

    def take(self, events: EventChunk, *, until_ms: int, blocked_until_ms: int) -> tuple[EventChunk, Epochs]:
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
                end = min(begin + _STEPS, count)
                self._take_one_by_one(events.part(begin, end))
            else:
                end = begin + len(run.events.ts_ms)
                self._take_run(run)
            begin = end
        self._pass(until_ms, persists_until_ms=until_ms)
        self._note_happened()
        if self._queue:
            self.blocked_ms += max(0, blocked_until_ms - self._blocked_since_ms)
            self._blocked_since_ms = max(blocked_until_ms, self._blocked_since_ms)
        happened, epochs = _in_order([_NO_EVENTS, *self._events]), Epochs.of(self._rows)
        self._events, self._rows = [], []
        return happened, epochs

    def _open_run(self, events: EventChunk, begin: int, costs: Int64s) -> OpenRun | None:
        """Return the longest run found, from an event on, that the gate is sure to let pass; None for a short one.

        Args:
            events: All persists before the first of them are done.
            begin: That one.
            costs: What the deliveries before each event may add, all of them together.
        """
        waits = self._queue or self._queue.moves_acks or self._promotions or self._let_go_ms != NEVER_MS
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
        return any(each.entry_id in acked.get(each.ledger_id, ()) for each in self._queue.waited())

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

    def _take_one_by_one(self, events: EventChunk) -> None:
        """Take events whose messages may have to wait."""
        for ts_ms, kind, ledger_id, first, last in zip(*(column.tolist() for column in events), strict=True):
            if kind == _DELIVER:
                take = self._deliver
            elif kind in _ACKS:
                take = self._ack_as_recorded
            else:
                continue
            if self._is_due(ts_ms):
                self._pass(ts_ms + 1, persists_until_ms=ts_ms)
            self._now_ms = ts_ms
            if first == last:
                take(Position(ledger_id, first))
            else:
                for entry_id in self._unacked(ledger_id, first, last):
                    take(Position(ledger_id, entry_id))
        last_ms = int(events.ts_ms[-1])
        self._pass(last_ms + 1, persists_until_ms=last_ms)
        self._note_happened()
        self._events.append(EventChunk(*(column[~events.is_any_of(_NAMING)] for column in events)))
        if events.kind[-1] == EventKind.CRASH:
            self._close_promotions(last_ms + 1)

    def _unacked(self, ledger_id: int, first: int, last: int) -> BitMap:
        """Return the entries of a run that the cursor does not know as acked."""
        entries = BitMap(range(first, last + 1))
        self._cursor.discard_acked(ledger_id, entries)
        return entries

    def to_record(self) -> dict[str, Any]:
        """Return its fields as a state has them, but for the message log."""
        assert not any((self._promotions, self._events, self._rows, self._happened)), "a state ends a day"
        closed = self._gate.why_blocked(_MOST_USED)
        return {
            "cursor_replay": self._replay.to_record(),
            "sent": self._sent.to_record(),
            "released_at": closed[0].released_at if closed else None,
            "has_store_error": self._admission.store_error is not None,
            "promote_again_ms": self._admission._promote_again_ms,
            **self._queue.to_record(),
            "blocked_ms": self.blocked_ms,
            "blocked_since_ms": self._blocked_since_ms,
            "let_go_ms": None if self._let_go_ms == NEVER_MS else self._let_go_ms,
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
        self._queue.restore(fields)
        self.blocked_ms = fields.integer("blocked_ms")
        self._blocked_since_ms = fields.signed("blocked_since_ms")
        let_go_ms = fields.optional_integer("let_go_ms")
        self._let_go_ms = NEVER_MS if let_go_ms is None else let_go_ms
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
        waiting: dict[int, BitMap] = {}
        for ledger_id, entry_id in self._queue.positions():
            waiting.setdefault(ledger_id, BitMap()).add(entry_id)
        for each in (self._sent.by_ledger(), waiting):
            for ledger_id, entries in each.items():
                unacked = entries.copy()
                self._cursor.discard_acked(ledger_id, unacked)
                assert unacked == entries, f"ledger {ledger_id} has acked messages that are sent or wait"
                assert not entries or Position(ledger_id, entries.max()) in self._cursor.ledgers
        for ledger_id, entries in self._sent.by_ledger().items():
            assert entries.isdisjoint(waiting.get(ledger_id, BitMap())), f"ledger {ledger_id}: sent messages wait"
        for position in self._queue.moved_acks():
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
        if not self._is_ticking and outcome.route is not PersistTarget.NOTHING:
            self._promotions.append((self._now_ms, outcome))
            self._replay.promoted(self._now_ms, outcome)
        error = self._admission.store_error if outcome.route is PersistTarget.NOTHING else None
        self._admission.persisted(error, now_ms=self._now_ms)

    def _is_due(self, now_ms: int) -> bool:
        """Tell whether `_pass` may have something to do up to a time."""
        next_ms = min(self._queue.next_ack_ms, self._let_go_ms)
        return next_ms <= now_ms or now_ms > self._quiet_until_ms or bool(self._promotions)

    def _pass(self, until_ms: int, *, persists_until_ms: int) -> None:
        """Let happen, in order, what was moved to before a time, and the persists before another."""
        while True:
            now_ms = min(until_ms, self._queue.next_ack_ms, self._let_go_ms)
            if self._persist_one(min(now_ms, persists_until_ms)):
                continue
            if now_ms >= until_ms:
                return
            self._now_ms = now_ms
            if self._let_go_ms == now_ms:
                self._let_go_ms = NEVER_MS
                self._let_go()
            else:
                self._ack(self._queue.pop_ack())

    def _persist_one(self, until_ms: int) -> bool:
        """Tick until the cursor was persisted once, before a time; tell whether it was."""
        if self._promotions:
            self._close_promotions(until_ms)
        if until_ms <= self._quiet_until_ms:
            return False
        self._is_ticking = True
        row = next(self._replay.persists(until_ms), None)
        self._is_ticking = False
        self._quiet_until_ms = self._replay.quiet_until_ms
        if row is None:
            return False
        self._rows.append(row)
        if self._queue:
            self._let_go_ms = row[0] + 1
        return True

    def _close_promotions(self, until_ms: int) -> None:
        """Note what was persisted early, as it is at the end of its millisecond, once that is over."""
        while self._promotions and self._promotions[0][0] < until_ms:
            at_ms, result = self._promotions.pop(0)
            self._rows.append(self._replay.row(at_ms, result))

    def _deliver(self, position: Position) -> None:
        """Queue a message that was not delivered before, and send it if the gate lets it."""
        if position in self._sent or position in self._queue or self._cursor.is_acked(position):
            return
        if not self._queue:
            self._blocked_since_ms = self._now_ms
        self._queue.join(position, now_ms=self._now_ms)
        self._let_go()

    def _let_go(self) -> None:
        """Send what waits as far as the gate lets it."""
        # A gate that young acks do not concern opens when its usage falls, and is open before anything is requested.
        while self._queue and (self._is_young or not self._gate.is_closed):
            position, now_ms = self._queue.first, self._now_ms
            if not self._sends_at_once(position):
                self._replay.look(now_ms)
                if not self._admission.send_new(position, _SENT, now_ms=now_ms):
                    self._note_closed()
                    return
            self._replay.deliver(position, now_ms=now_ms)
            self._queue.leave(now_ms=now_ms)
            self._happened.append((now_ms, _DELIVER, *position))
            if not self._queue:
                self.blocked_ms += now_ms - self._blocked_since_ms

    def _sends_at_once(self, position: Position) -> bool:
        """Send a message if that needs no decision: no acks are young, and an open gate has room."""
        if self._is_young:
            return False
        sent = Sent(CONSUMER, record_bytes=isolated_range_bytes(*position), range_count=1)
        used = self._cursor.unpersisted_record_bytes + self._sent.reserved_bytes
        if used + sent.record_bytes > self._limits.max_unpersisted_ack_record_bytes:
            return False
        self._sent.add(position, sent)
        return True

    def _note_closed(self) -> None:
        """Note at which usage the gate opens that a message has just closed; young acks may open it at any."""
        closed = () if self._is_young else self._gate.why_blocked(_MOST_USED)
        self._may_open_at = closed[0].released_at if closed else _MOST_USED.unpersisted_record_bytes

    def _ack_as_recorded(self, position: Position) -> None:
        """Ack a message when its delivery allows: later by as long as that waited."""
        if self._queue.ack_in_trace(position, now_ms=self._now_ms):
            return
        if position not in self._sent:
            self._deliver(position)
            if self._queue.ack_in_trace(position, now_ms=self._now_ms):
                return
        self._ack(position)

    def _ack(self, position: Position) -> None:
        """Ack a message if it is on its way, and send what that makes room for."""
        if position not in self._sent:
            return
        now_ms = self._now_ms
        self._replay.look(now_ms)
        # All that it may add is reserved for it.
        self._cursor.ack(position, now_ms=now_ms)
        self._replay.acked(now_ms)
        self._sent.settle(position)
        self._happened.append((now_ms, _ACK, *position))
        used = self._cursor.unpersisted_record_bytes + self._sent.reserved_bytes
        if self._gate.is_closed and used <= self._may_open_at:
            self._admission.use_fell(now_ms=now_ms)
            self._let_go()

    def _note_happened(self) -> None:
        """Add what happened one by one to the events."""
        if self._happened:
            self._events.append(_events_of(self._happened))
            self._happened = []


def _events_of(rows: Sequence[tuple[int, int, int, int]]) -> EventChunk:
    """Return events of single messages from rows of time, kind, ledger and entry."""
    ts_ms, kind, ledger_id, entry_id = np.array(rows, np.int64).T
    return EventChunk(ts_ms, kind, ledger_id, entry_id, entry_id)


def _in_order(events: Sequence[EventChunk]) -> EventChunk:
    """Return events in order of time."""
    together = [np.concatenate(columns) for columns in zip(*events, strict=True)]
    order = np.argsort(together[0], kind="stable")
    return EventChunk(*(column[order] for column in together))
