"""A replay in which dispatch stops where too much would not be durable: `max_unpersisted_ack_record_bytes`.

The model: a delivery that finds the gate shut waits until it opens, those that come after it wait behind it, and its
ack moves by as much as it waited. An ack of a message whose delivery the trace does not tell is that of a message
delivered at the same instant. Deliveries that a persist lets go do so in the millisecond after it. Each entry of a
cumulative ack is acked by itself. What waits when the process dies was never sent.

The gate, and what it does about young acks, are the library's own (`cursor.dispatch.admission`): the limit is passed
by not one byte. What the model leaves out: consumers that would have asked for less, messages that fill holes and go
out while the gate is shut (only what was given back or delayed can), and that types with a single active consumer have
no gate.

Events are taken at once as far as the gate is sure to stay open, and one by one near its limit.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
from pyroaring import BitMap

from ackstate.errors import AckStateError
from ackstate.position import Position
from analysis.redelivery.acked import Chunk
from analysis.redelivery.cursor_replay import CursorReplay
from analysis.redelivery.on_their_way import CONSUMER, OnTheirWay
from analysis.redelivery.open_run import OpenRun, delivery_costs
from analysis.redelivery.replay import Epochs
from analysis.trace.events import CHUNK_EVENTS, EventKind
from cursor.dispatch.admission import Admission
from cursor.dispatch.deliveries import Sent
from cursor.outcome import PersistResult, Route
from cursor.persister import PersistWatcher
from limits.gate import DispatchGate, GateLimits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.redelivery.acked import Int64s
    from analysis.redelivery.policy import Policy

# An enum looks up its members in Python.
_DELIVER, _ACK = int(EventKind.DELIVER), int(EventKind.ACK)
_ACKS = (_ACK, int(EventKind.MARK_DELETE))
_SENT = Sent(CONSUMER)
_NONE = BitMap()
# As many events are taken one by one before it is asked again whether more of them may be taken at once; a run that
# is shorter costs more than its steps.
_STEPS = 64
_RUN_MIN = 64


class _Blocked(NamedTuple):
    """A delivery that waits."""

    position: Position
    ts_ms: int


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

    def _begin(self) -> None:
        """Begin with nothing on its way."""
        self._cursor = self._replay.cursor
        self._sent = OnTheirWay()
        self._gate = DispatchGate(self._limits)
        self._admission = Admission(self._cursor, gate=self._gate, promotes_young=True, sent=self._sent)
        self._cursor.watch(self)
        self._blocked: deque[_Blocked] = deque()
        self._waiting: set[Position] = set()  # the same
        self._blocked_since_ms = 0
        self._let_go_ms: int | None = None  # when what a persist made room for may go
        # Of messages that waited, or do: when they are acked in the recording, and by how much that moves.
        self._acked_ms: dict[Position, int] = {}
        self._moved_by_ms: dict[Position, int] = {}
        self._moved: dict[int, BitMap] = {}  # the same, by ledger
        self._moved_acks: list[tuple[int, Position]] = []
        self._promotions: list[tuple[int, PersistResult]] = []
        # How many events to try to take at once: where that fails, fewer are tried for some time.
        self._run_max = CHUNK_EVENTS
        self._is_ticking = False
        self._now_ms = 0
        self._events: list[tuple[int, ...]] = []
        self._rows: list[tuple[int, ...]] = []
        self._admission.observe(now_ms=0)

    def take(self, events: Chunk, *, until_ms: int) -> tuple[Chunk, Epochs]:
        """Take the next events in, and return what happens before a time: events when they do, and persists.

        Args:
            events: As `Replay.take` has them in a piece.
            until_ms: The same.
        """
        costs = np.append(0, np.cumsum(delivery_costs(events)))
        parts: list[Chunk] = []
        begin, count = 0, len(events.ts_ms)
        while begin < count:
            now_ms = int(events.ts_ms[begin])
            self._pass(now_ms + 1, persists_until_ms=now_ms)
            run = self._open_run(events, begin, costs)
            if run is None:
                end = min(begin + _STEPS, count)
                self._step(events.part(begin, end))
            else:
                end = begin + len(run.events.ts_ms)
                parts += [self._noted(), run.events]
                self._take_run(run)
            begin = end
        self._pass(until_ms, persists_until_ms=until_ms)
        if self._blocked:
            self.blocked_ms += max(0, until_ms - self._blocked_since_ms)
            self._blocked_since_ms = max(until_ms, self._blocked_since_ms)
        parts.append(self._noted())
        epochs = Epochs.of(self._rows)
        self._rows = []
        return Chunk(*(np.concatenate(columns) for columns in zip(*parts, strict=True))), epochs

    def _noted(self) -> Chunk:
        """Return what happened one by one since the last call."""
        columns = np.array(self._events, np.int64).reshape(-1, len(Chunk._fields))
        self._events = []
        return Chunk(*columns.T)

    def _open_run(self, events: Chunk, begin: int, costs: Int64s) -> OpenRun | None:
        """Return the longest run found, from an event on, that the gate is sure to let pass; None for a short one.

        Args:
            events: All persists before the first of them are done.
            begin: That one.
            costs: What the deliveries before each event may add, all of them together.
        """
        waits = self._blocked or self._moved_acks or self._promotions or self._let_go_ms is not None
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
                self._run_max = max(self._run_max, 2 * (end - begin))
                return run
            end = begin + (end - begin) // 2
            self._run_max = max(end - begin, _RUN_MIN)
        return None

    def _moves_any(self, acked: Mapping[int, BitMap]) -> bool:
        """Tell whether one of some acks is of a message that had waited."""
        return any(not bitmap.isdisjoint(self._moved.get(ledger_id, _NONE)) for ledger_id, bitmap in acked.items())

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

    def _step(self, events: Chunk) -> None:
        """Take events one by one."""
        for event in zip(*(column.tolist() for column in events), strict=True):
            self._pass(event[0] + 1, persists_until_ms=event[0])
            self._follow(event)

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
        return acked

    def reset(self, acked: Mapping[int, BitMap], *, now_ms: int) -> None:
        """See `Replay.reset`; nothing is on its way after it."""
        self._replay.reset(acked, now_ms=now_ms)
        self._begin()

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

    def _pass(self, moved_until_ms: int, *, persists_until_ms: int) -> None:
        """Let happen, in order, what was moved to before a time, and the persists before another."""
        while True:
            now_ms = moved_until_ms
            if self._moved_acks:
                now_ms = min(now_ms, self._moved_acks[0][0])
            if self._let_go_ms is not None:
                now_ms = min(now_ms, self._let_go_ms)
            if self._persist_one(min(now_ms, persists_until_ms)):
                continue
            if now_ms >= moved_until_ms:
                return
            self._now_ms = now_ms
            if self._let_go_ms == now_ms:
                self._let_go_ms = None
                self._let_go()
            while self._moved_acks and self._moved_acks[0][0] <= now_ms:
                self._ack(heappop(self._moved_acks)[1])

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
        if self._blocked:
            self._let_go_ms = row[0] + 1
        return True

    def _close_promotions(self, until_ms: int) -> None:
        """Note what was persisted early, as it is at the end of its millisecond, once that is over."""
        while self._promotions and self._promotions[0][0] < until_ms:
            at_ms, result = self._promotions.pop(0)
            self._rows.append(self._replay.row(at_ms, result))

    def _follow(self, event: tuple[int, ...]) -> None:
        self._now_ms, kind, ledger_id, first, last = event
        if kind == _DELIVER:
            for entry_id in range(first, last + 1):
                self._deliver(Position(ledger_id, entry_id))
        elif kind in _ACKS:
            for entry_id in (first,) if first == last else self._replay.unacked(ledger_id, first, last + 1):
                self._ack_as_recorded(Position(ledger_id, entry_id))
        else:
            self._events.append(event)
            if kind == EventKind.CRASH:
                self._close_promotions(self._now_ms + 1)

    def _deliver(self, position: Position) -> None:
        if position in self._sent or self._cursor.is_acked(position):
            return
        if position in self._waiting:
            return
        if not self._blocked:
            self._blocked_since_ms = self._now_ms
        self._blocked.append(_Blocked(position, self._now_ms))
        self._waiting.add(position)
        self._let_go()

    def _let_go(self) -> None:
        """Send what waits as far as the gate lets it."""
        # A gate that young acks do not concern opens when its use falls, and then it is open before anything is asked.
        while self._blocked and (self._is_young or not self._gate.is_closed):
            position, ts_ms = self._blocked[0]
            self._replay.look(self._now_ms)
            if not self._admission.send_new(position, _SENT, now_ms=self._now_ms):
                return
            self._blocked.popleft()
            self._waiting.remove(position)
            if not self._blocked:
                self.blocked_ms += self._now_ms - self._blocked_since_ms
            self._note(_DELIVER, position)
            self._replay.deliver(position, now_ms=self._now_ms)
            moved_by_ms = self._now_ms - ts_ms
            acked_ms = self._acked_ms.pop(position, None)
            if acked_ms is not None:
                heappush(self._moved_acks, (acked_ms + moved_by_ms, position))
            elif moved_by_ms:
                self._moved_by_ms[position] = moved_by_ms
                self._moved.setdefault(position.ledger_id, BitMap()).add(position.entry_id)

    def _ack_as_recorded(self, position: Position) -> None:
        if self._cursor.is_acked(position):
            return
        moved_by_ms = self._moved_by_ms.pop(position, 0)
        if moved_by_ms:
            self._moved[position.ledger_id].remove(position.entry_id)
            heappush(self._moved_acks, (self._now_ms + moved_by_ms, position))
            return
        if position not in self._sent:
            self._deliver(position)
        if position in self._sent:
            self._ack(position)
        else:
            self._acked_ms.setdefault(position, self._now_ms)

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
        self._note(_ACK, position)
        self._let_go()

    def _note(self, kind: int, position: Position) -> None:
        self._events.append((self._now_ms, kind, *position, position.entry_id))
