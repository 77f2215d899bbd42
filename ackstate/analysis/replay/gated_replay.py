"""A replay in which dispatch stops at the limit of bytes that are not durable: `max_unpersisted_ack_record_bytes`.

The model: deliveries are queued (FIFO) while the gate is closed, and the ack of a message is postponed by the time that
its delivery waited. A message without a delivery in the trace is delivered at the instant of its ack. Deliveries that a
persist makes room for happen in the millisecond after it. Each entry of a cumulative ack is acked individually.
Messages that wait when the process dies were never sent.

The gate and the promotion of young acks are the library's own (`ackstate.dispatch.admission`): the limit is
never exceeded, not even by a byte. The model does not cover three things: consumers that would have requested less,
messages that fill holes and are sent while the gate is closed (only redelivered or delayed messages can), and
subscription types with a single active consumer, which have no gate.

If the gate has room for all messages of a run of events, the run is replayed at once. Otherwise the messages are taken
one by one; the library's cursor receives their acks together, before a persist and whenever one more message might not
fit or one more ack might open the gate, and only then its admission is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, final

import numpy as np
from pyroaring import BitMap

from ackstate.analysis.replay.acked import AckAccumulator, EventChunk, NewlyAckedRuns
from ackstate.analysis.replay.cursor_replay import CursorReplay
from ackstate.analysis.replay.curves import Epochs
from ackstate.analysis.trace.chunks import bitmaps_of
from ackstate.analysis.trace.events import CHUNK_EVENTS, EventKind
from ackstate.cursor.listener import CursorListener
from ackstate.cursor.results import PersistResult, PersistTarget
from ackstate.deleted_ranges import MINUS_ONE_BYTES, firsts_bytes, isolated_range_bytes, lasts_bytes, range_fixed_bytes
from ackstate.dispatch.admission import Admission, Sent
from ackstate.errors import AckStateError
from ackstate.limits.gate import DispatchGate, GateLimits, Usage
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.policy import Policy
    from ackstate.cursor.cursor import ManagedCursor


CONSUMER = "replayed"
"""The consumer of all messages."""


@final
class InFlightSet:
    """See `ackstate.dispatch.admission.Reservations`: single messages of one consumer, all fully reserved.

    Memory: a bitmap of the messages.
    """

    def __init__(self) -> None:
        self.by_ledger: dict[int, BitMap] = {}  # all messages
        # The part of them that is not counted yet, and messages that are still counted.
        self._sent: dict[int, BitMap] = {}
        self._settled: dict[int, BitMap] = {}
        self._count = self._bytes = 0

    def __contains__(self, position: tuple[int, int]) -> bool:
        ledger_id, entry_id = position
        return ledger_id in self.by_ledger and entry_id in self.by_ledger[ledger_id]

    def entries(self, ledger_id: int) -> BitMap:
        """Return the messages of a ledger; the caller must not change them."""
        return self.by_ledger.get(ledger_id, _NONE)

    def get(self, position: Position) -> Sent | None:
        if position not in self:
            return None
        return Sent(CONSUMER, record_bytes=isolated_range_bytes(*position), range_count=1, is_covered=True)

    @property
    def reserved_bytes(self) -> int:
        """The most that the acks of all messages can add."""
        self._recount()
        return self._bytes

    @property
    def reserved_ranges(self) -> int:
        """How many ranges the acks of all messages can add."""
        self._recount()
        return self._count

    unacked_messages = reserved_ranges

    def unacked_of(self, consumer: str) -> int:
        return self.unacked_messages if consumer == CONSUMER else 0

    def add(self, consumer: str, positions: Sequence[Position], sent: Sequence[Sent]) -> None:
        assert consumer == CONSUMER
        assert len(positions) == len(sent)
        for each in positions:
            self.send(*each)

    def send(self, ledger_id: int, entry_id: int) -> None:
        """Note a message that is sent now and not in flight."""
        if ledger_id not in self._sent:
            self._sent[ledger_id] = BitMap()
            self.by_ledger.setdefault(ledger_id, BitMap())
        self._sent[ledger_id].add(entry_id)
        self.by_ledger[ledger_id].add(entry_id)

    def settle(self, ledger_id: int, entry_id: int) -> None:
        """Forget a message in flight and its reservation."""
        if ledger_id not in self._settled:
            self._settled[ledger_id] = BitMap()
        self._settled[ledger_id].add(entry_id)
        self.by_ledger[ledger_id].remove(entry_id)

    def change(self, sent: Mapping[int, BitMap], settled: Mapping[int, BitMap]) -> None:
        """Add messages that were sent, then remove messages that were settled, by ledger."""
        for ledger_id in {*sent, *settled}:
            before = self.by_ledger.get(ledger_id, _NONE)
            after = before | sent.get(ledger_id, _NONE)
            after -= settled.get(ledger_id, _NONE)
            self._add(ledger_id, after, 1)
            self._add(ledger_id, before, -1)
            self.by_ledger[ledger_id] = after

    def _recount(self) -> None:
        if self._sent:
            sent, self._sent = self._sent, {}
            for ledger_id, entries in sent.items():
                self._add(ledger_id, entries, 1)
        if self._settled:
            settled, self._settled = self._settled, {}
            for ledger_id, entries in settled.items():
                self._add(ledger_id, entries, -1)

    def _add(self, ledger_id: int, entries: BitMap, sign: int) -> None:
        self._count += sign * len(entries)
        self._bytes += sign * worst_case(ledger_id, entries)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(ledgers)."""
        assert self.reserved_bytes == sum(worst_case(*each) for each in self.by_ledger.items())
        assert self.unacked_messages == self.reserved_ranges == sum(map(len, self.by_ledger.values()))


def worst_case(ledger_id: int, entries: BitMap) -> int:
    """Return the most that the acks of some entries can add to the ranges' size: one range for each."""
    return len(entries) * range_fixed_bytes(ledger_id) + firsts_bytes(entries) + lasts_bytes(entries)


_NONE = BitMap()


# At each of these numbers a varint becomes one byte longer.
_LONGER_FROM = np.array([2**digits for digits in range(7, 63, 7)])
_FIXED_BUT_LEDGER_BYTES = range_fixed_bytes(0) - 2


# The usage of a gate only rises when a message is sent, by the most that its ack may add: acks and complete persists
# reduce it. So a gate with room for all messages of a run has room for each of them, in any order of acks.
class OpenRun(NamedTuple):
    """Consecutive events, and their effects if no delivery is blocked."""

    events: EventChunk  # The events
    # By ledger, the messages that they send: at the first mention, unless the message is in flight or acked.
    sent: Mapping[int, BitMap]
    acked: Mapping[int, BitMap]  # By ledger, the entries that they ack, possibly not for the first time

    @classmethod
    def of(cls, events: EventChunk, cursor: ManagedCursor, on_their_way: InFlightSet) -> OpenRun:
        """Return the effects of some events on a cursor."""
        acked, sent = (
            dict(bitmaps_of(events.ledger_id[at], events.first_entry[at], events.last_entry[at]))
            for at in (np.isin(events.kind, _ACKS), events.kind == _DELIVER)
        )
        for ledger_id, entries in acked.items():
            sent[ledger_id] = sent.get(ledger_id, _NONE) | entries
        for ledger_id, entries in sent.items():
            entries -= on_their_way.entries(ledger_id)  # noqa: PLW2901 - in place
            cursor.view.discard_acked(ledger_id, entries)
        return cls(events, sent, acked)

    @property
    def record_bytes(self) -> int:
        """The most that the acks of the sent messages can add to the ranges' size."""
        return sum(worst_case(*each) for each in self.sent.items())

    def news(self, cursor: ManagedCursor) -> NewlyAckedRuns:
        """Return the entries that each event acks first."""
        return _fold(cursor, self.acked).take(self.events)

    def one_by_one(self, cursor: ManagedCursor, on_their_way: InFlightSet) -> tuple[EventChunk, NewlyAckedRuns]:
        """Return the effective deliveries and acks as separate events, with the entries that they ack first."""
        events = self.events
        mentions = np.isin(events.kind, (*_ACKS, EventKind.DELIVER))
        fold = _fold(cursor, {**self.acked, **self.sent})
        for ledger_id, entries in fold.acked.items():
            entries |= on_their_way.entries(ledger_id)  # noqa: PLW2901 - in place
        sent = fold.take(events._replace(kind=np.where(mentions, int(EventKind.ACK), int(EventKind.PUBLISH))))
        acked = self.news(cursor)
        # A message that is acked before it is delivered is delivered at that instant.
        order = np.argsort(np.concatenate((2 * sent.event, 2 * acked.event + 1)), kind="stable")
        both = NewlyAckedRuns(*(np.concatenate(columns)[order] for columns in zip(sent, acked, strict=True)))
        is_ack = order >= len(sent.event)
        kind = np.where(is_ack, int(EventKind.ACK), int(EventKind.DELIVER))
        apart = EventChunk(events.ts_ms[both.event], kind, both.ledger_id, both.first, both.end - 1)
        return apart, acked._replace(event=np.flatnonzero(is_ack))


def delivery_costs(events: EventChunk) -> Int64s:
    """Return for each event an upper bound of `OpenRun.record_bytes` of its deliveries."""
    last = events.last_entry
    of_one = _FIXED_BUT_LEDGER_BYTES + 2 * (_varint_bytes(events.ledger_id) + _varint_bytes(last))
    # The lower end of a range that starts at entry 0 is -1.
    costs = (last - events.first_entry + 1) * of_one + (MINUS_ONE_BYTES - 1) * (events.first_entry == 0)
    return np.where(events.kind == EventKind.DELIVER, costs, 0)


def _varint_bytes(numbers: Int64s) -> Int64s:
    """Return `ackstate.deleted_ranges.varint_bytes` of some numbers."""
    return np.searchsorted(_LONGER_FROM, numbers, "right") + 1


def _fold(cursor: ManagedCursor, ledgers: Mapping[int, BitMap]) -> AckAccumulator:
    """Return the acks of a cursor in some ledgers."""
    marked_ledger_id, marked_entry_id = cursor.mark_delete_position
    acked = {each: cursor.deleted.entries(each).copy() for each in ledgers if each >= marked_ledger_id}
    if marked_ledger_id in acked:
        acked[marked_ledger_id].add_range(0, marked_entry_id + 1)
    if len(acked) < len(ledgers):
        counts = cursor.ledgers.counts()
        acked |= {each: BitMap(range(counts[each])) for each in ledgers if each < marked_ledger_id}
    return AckAccumulator(acked)


NEVER_MS = 2**62
"""Later than any time of a trace."""


@final
class BlockedQueue:
    """A queue (FIFO) of blocked deliveries. The ack of a message is postponed by the time that its delivery waited.

    Memory: O(messages that wait, and delayed messages that are not acked).
    """

    def __init__(self) -> None:
        self.since_ms: OrderedDict[tuple[int, int], int] = OrderedDict()  # of the waiting messages, in order
        # Times at which the trace acks messages that are still waiting.
        self._acked_ms: dict[tuple[int, int], int] = {}
        self.waited_ms: dict[tuple[int, int], int] = {}  # of sent messages that the trace has not acked yet
        self.moved_acks: list[tuple[int, tuple[int, int]]] = []  # a heap of postponed acks

    def __len__(self) -> int:
        return len(self.since_ms)

    def sent(self, position: tuple[int, int], since_ms: int, *, now_ms: int) -> None:
        """Postpone the ack of a message by its waiting time."""
        acked_ms = self._acked_ms.pop(position, None) if self._acked_ms else None
        if acked_ms is not None:
            heappush(self.moved_acks, (acked_ms + now_ms - since_ms, position))
        elif now_ms > since_ms:
            self.waited_ms[position] = now_ms - since_ms

    def ack_in_trace(self, position: tuple[int, int], *, now_ms: int) -> bool:
        """Record an ack of the trace; return whether it is postponed.

        A message that is acked twice is acked by the second ack if that is earlier.
        """
        waited_ms = self.waited_ms.pop(position, None)
        if waited_ms is not None:
            heappush(self.moved_acks, (now_ms + waited_ms, position))
            return True
        if position in self.since_ms:
            self._acked_ms.setdefault(position, now_ms)
            return True
        return False

    @property
    def next_ack_ms(self) -> int:
        """The time of the next postponed ack; far in the future if there is none."""
        return self.moved_acks[0][0] if self.moved_acks else NEVER_MS

    def pop_ack(self) -> tuple[int, int]:
        """Remove and return the earliest postponed ack; ties go to the lowest position."""
        return heappop(self.moved_acks)[1]


_MOST_USED = Usage(2**62, 0, 0)


@final
class ReplayGate:
    """Decides which messages are sent under a policy that `blocks`."""

    def __init__(self, policy: Policy, cursor: ManagedCursor, sent: InFlightSet) -> None:
        self._limit = policy.max_unpersisted_ack_record_bytes
        # Without young acks the gate opens when its usage falls; with them it may open at any usage.
        self._is_young = policy.cursor.become_old_ack_record_seconds != 0
        self._cursor = cursor
        self._sent = sent
        limits = GateLimits(
            max_unpersisted_ack_record_bytes=self._limit, max_unacked_messages=0, max_unacked_messages_per_consumer=0
        )
        self.gate = DispatchGate(limits)
        self._admission = Admission(cursor, gate=self.gate, promotes_young=True, sent=sent)
        # A closed gate stays closed while the usage is above this.
        self._may_open_at = _MOST_USED.unpersisted_record_bytes

    @property
    def room(self) -> int:
        """The bytes that are neither used nor reserved; below 0 above the limit."""
        return self._limit - self._cursor.view.unpersisted_record_bytes - self._sent.reserved_bytes

    def observe(self) -> None:
        """Close the gate if a cursor that was just opened is above the limit."""
        self._admission.observe(now_ms=0)

    def sends(self, position: Position, *, now_ms: int) -> bool:
        """Send a message if the admission admits it; otherwise note the usage at which the closed gate opens."""
        if self._admission.send_new(CONSUMER, (position,), (1,), keys=None, now_ms=now_ms):
            return True
        closed = () if self._is_young else self.gate.why_blocked(_MOST_USED)
        self._may_open_at = closed[0].released_at if closed else _MOST_USED.unpersisted_record_bytes
        return False

    @property
    def slack(self) -> int:
        """While it is closed, what the usage must fall before it may open; below 1 it may. Else the room."""
        return self._limit - self.room - self._may_open_at if self.gate.is_closed else self.room

    def refresh(self, *, now_ms: int) -> None:
        """Open if the usage has fallen enough."""
        self._admission.usage_decreased(now_ms=now_ms)

    def record_bytes_max(self) -> int | None:
        return self._admission.record_bytes_max()

    def persisted(self, outcome: PersistResult | AckStateError, *, now_ms: int) -> None:
        """Receive the outcome of a persist; one that had nothing to write shows nothing about the store."""
        if isinstance(outcome, AckStateError):
            self._admission.persisted(outcome, now_ms=now_ms)
            return
        error = self._admission.store_error if outcome.route is PersistTarget.NOTHING else None
        self._admission.persisted(error, now_ms=now_ms)


_DELIVER, _ACK = int(EventKind.DELIVER), int(EventKind.ACK)  # Cached: enum member lookup is slow.
_NAMING = (EventKind.DELIVER, EventKind.ACK, EventKind.MARK_DELETE)
_ACKS = (int(EventKind.ACK), int(EventKind.MARK_DELETE))
_NO_EVENTS = EventChunk(*(np.empty(0, np.int64) for _ in EventChunk._fields))
# A shorter run is faster one by one.
_RUN_MIN = 16
# This many events are replayed one by one before the next attempt at a run.
_STEPS = 128


@final
class GatedReplay(CursorListener):
    """One subscription under a policy whose gate may stop dispatch.

    It receives events as recorded, and returns them at the times at which they happen under the policy.
    """

    kind: ClassVar[Literal["gated"]] = "gated"

    def __init__(self, policy: Policy, log: Mapping[int, int], *, opened_ms: int) -> None:
        self._policy, self._log = policy, log
        # The most that one ack can add to the ranges' size.
        self._cost_max = max(
            (isolated_range_bytes(*each) for item in log.items() for each in (item, (item[0], 0))), default=0
        )
        self._replay = CursorReplay(policy, log, opened_ms=opened_ms)
        # A persist that excludes acks may enlarge the ranges that are not durable.
        self._outlasts_persists = policy.leaves_nothing_out
        self._is_young = policy.cursor.become_old_ack_record_seconds != 0
        self.blocked_ms = 0
        self._begin()
        self._gate.observe()

    def _begin(self) -> None:
        """Start with no messages in flight."""
        self._cursor = self._replay.cursor
        self._sent = InFlightSet()
        self._gate = ReplayGate(self._policy, self._cursor, self._sent)
        self._cursor.add_listener(self)
        # Acks that the cursor has not been given yet, and a lower bound of the gate's `slack` after them.
        self._acked: dict[int, BitMap] = {}
        self._slack = 0
        self._acked_ms = -1  # the time of the last of them, if the replay knows it
        # By ledger, the highest entry that was sent, waits or is acked; NEVER_MS where the cursor was opened with acks.
        self._highest: dict[int, int] = {}
        self._first_hole = (-1, -1)  # while the gate is closed
        self._queue = BlockedQueue()
        self._blocked_since_ms = 0
        self._let_go_ms = NEVER_MS  # when messages may be sent after a persist made room
        self._promotions: list[tuple[int, PersistResult]] = []
        # Events to attempt at once: fewer after a failure.
        self._run_max = CHUNK_EVENTS
        self._is_ticking = False
        self._now_ms = 0
        self._events: list[EventChunk] = []
        self._rows: list[tuple[int, ...]] = []
        self._happened: list[int] = []  # time, kind, ledger and entry of each event, one after another
        # The last time before which nothing is persisted, for any acks.
        self._quiet_until_ms = self._replay.quiet_until_ms

    def take(self, events: EventChunk, *, until_ms: int, blocked_until_ms: int) -> tuple[EventChunk, Epochs]:
        """Replay events, and return all that happens before `until_ms`: events at their new times, and persists.

        Time until `blocked_until_ms`, not after `until_ms`, counts as blocked.
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
        self._give_acks()
        self._note_happened()
        if self._queue:
            self.blocked_ms += max(0, blocked_until_ms - self._blocked_since_ms)
            self._blocked_since_ms = max(blocked_until_ms, self._blocked_since_ms)
        happened, epochs = EventChunk.in_order([_NO_EVENTS, *self._events]), Epochs.of(self._rows)
        self._events, self._rows = [], []
        return happened, epochs

    def _open_run(self, events: EventChunk, begin: int, costs: Int64s) -> OpenRun | None:
        """Return a run of events, as long as possible, that is sure to pass the gate; None if it would be short."""
        waits = self._queue or self._queue.moved_acks or self._promotions or self._let_go_ms != NEVER_MS
        if waits or self._gate.gate.is_closed:
            return None
        self._give_acks()
        room = self._gate.room
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
        """Return whether an acked message had waited."""
        return any(entry_id in acked.get(ledger_id, ()) for ledger_id, entry_id in self._queue.waited_ms)

    def _take_run(self, run: OpenRun) -> None:
        """Replay a run that is sure to pass the gate."""
        self._now_ms = int(run.events.ts_ms[-1])
        for ledger_id, entries in run.sent.items():
            if entries:
                self._note_highest(ledger_id, entries.max())
        if self._is_young:
            events, news = run.one_by_one(self._cursor, self._sent)
        else:
            events, news = run.events, run.news(self._cursor)
        self._is_ticking = True
        self._rows += self._replay.take_events(events, news, until_ms=self._now_ms)
        self._is_ticking = False
        self._sent.change(run.sent, run.acked)
        self._slack = 0
        self._events.append(run.events)

    def _take_one_by_one(self, events: EventChunk) -> None:
        """Replay events whose messages may have to wait."""
        named = events.is_any_of(_NAMING)
        moved_acks = self._queue.moved_acks
        for ts_ms, kind, ledger_id, first, last in zip(*(column[named].tolist() for column in events), strict=True):
            if (
                ts_ms > self._quiet_until_ms
                or ts_ms >= self._let_go_ms
                or (moved_acks and moved_acks[0][0] <= ts_ms)
                or self._promotions
            ):
                self._pass(ts_ms + 1, persists_until_ms=ts_ms)
            self._now_ms = ts_ms
            take = self._deliver if kind == _DELIVER else self._ack_as_recorded
            if first == last:
                take((ledger_id, first))
            else:
                for entry_id in self._unacked(ledger_id, first, last):
                    take((ledger_id, entry_id))
        last_ms = int(events.ts_ms[-1])
        self._pass(last_ms + 1, persists_until_ms=last_ms)
        self._note_happened()
        self._events.append(EventChunk(*(column[~named] for column in events)))
        if events.kind[-1] == EventKind.CRASH:
            self._close_promotions(last_ms + 1)

    def _unacked(self, ledger_id: int, first: int, last: int) -> BitMap:
        """Return the entries of a run that are not acked in the cursor."""
        entries = BitMap(range(first, last + 1)) - self._acked.get(ledger_id, _NONE)
        self._cursor.view.discard_acked(ledger_id, entries)
        return entries

    def _check(self) -> None:
        """Assert that every message has exactly one state. Complexity: O(ledgers) bitmap operations, O(moved acks)."""
        self._sent._check()
        waiting: dict[int, BitMap] = {}
        for ledger_id, entry_id in self._queue.since_ms:
            waiting.setdefault(ledger_id, BitMap()).add(entry_id)
        for each in (self._sent.by_ledger, waiting):
            for ledger_id, entries in each.items():
                unacked = entries.copy()
                self._cursor.view.discard_acked(ledger_id, unacked)
                assert unacked == entries, f"ledger {ledger_id} has acked messages that are in flight or waiting"
                assert not entries or Position(ledger_id, entries.max()) in self._cursor.ledgers
        for ledger_id, entries in self._sent.by_ledger.items():
            assert entries.isdisjoint(waiting.get(ledger_id, BitMap())), (
                f"ledger {ledger_id}: messages in flight are waiting"
            )
        for _, position in self._queue.moved_acks:
            assert position in self._sent or self._cursor.is_acked(Position(*position)), (
                f"{position} has a postponed ack but was not sent"
            )

    def restart(self, *, now_ms: int) -> dict[int, BitMap]:
        acked = self._replay.restart(now_ms=now_ms)
        self._begin()
        self._gate.observe()
        return acked

    def reset(self, acked: Mapping[int, BitMap], mark_delete: Position, *, now_ms: int) -> Epochs:
        """See `CursorReplay.reset`; no message is in flight after it."""
        # Its persist is not a promotion.
        self._is_ticking = True
        epochs = self._replay.reset(acked, mark_delete, now_ms=now_ms)
        self._begin()
        self._gate.observe()
        return epochs

    def record_bytes_max(self) -> int | None:
        return self._gate.record_bytes_max()

    def persisted(self, outcome: PersistResult | AckStateError) -> None:
        if isinstance(outcome, PersistResult) and not self._is_ticking and outcome.route is not PersistTarget.NOTHING:
            self._promotions.append((self._now_ms, outcome))
            self._replay.promoted(self._now_ms, outcome)
        self._gate.persisted(outcome, now_ms=self._now_ms)

    def _pass(self, until_ms: int, *, persists_until_ms: int) -> None:
        """Execute, in order, the postponed events before one time, and the persists before another."""
        queue = self._queue
        while True:
            now_ms = min(until_ms, queue.next_ack_ms, self._let_go_ms)
            persist_until_ms = min(now_ms, persists_until_ms)
            if (self._promotions or persist_until_ms > self._quiet_until_ms) and self._persist_one(persist_until_ms):
                continue
            if now_ms >= until_ms:
                return
            self._now_ms = now_ms
            if self._let_go_ms == now_ms:
                self._let_go_ms = NEVER_MS
                self._release_blocked()
            else:
                self._ack(queue.pop_ack())

    def _persist_one(self, until_ms: int) -> bool:
        """Tick until the cursor is persisted once, before a time; return whether it was."""
        if self._promotions:
            self._close_promotions(until_ms)
        if until_ms <= self._quiet_until_ms:
            return False
        self._give_acks()
        self._slack = 0
        self._is_ticking = True
        row = next(self._replay.persists(until_ms), None)
        self._is_ticking = False
        self._quiet_until_ms = self._replay.quiet_until_ms
        self._acked_ms = -1
        if row is None:
            return False
        self._rows.append(row)
        if self._queue:
            self._let_go_ms = row[0] + 1
        return True

    def _close_promotions(self, until_ms: int) -> None:
        """Add the rows of promotions, in the state at the end of their millisecond, once that is over."""
        while self._promotions and self._promotions[0][0] < until_ms:
            at_ms, result = self._promotions.pop(0)
            self._rows.append(self._replay.row(at_ms, result))

    def _deliver(self, position: tuple[int, int]) -> None:
        """Queue a message that was not delivered before, and send it if the gate admits it."""
        ledger_id, entry_id = position
        if entry_id <= self._highest.get(ledger_id, NEVER_MS):
            if position in self._sent or position in self._queue.since_ms:
                return
            if entry_id in self._acked.get(ledger_id, _NONE) or self._cursor.is_acked(Position(*position)):
                return
            self._note_highest(ledger_id, entry_id)
        else:
            self._highest[ledger_id] = entry_id
        if not self._queue.since_ms:
            self._blocked_since_ms = self._now_ms
        self._queue.since_ms[position] = self._now_ms
        if not self._gate.gate.is_closed or self._is_young:
            self._release_blocked()

    def _note_highest(self, ledger_id: int, entry_id: int) -> None:
        """Note that an entry is sent or waits."""
        if ledger_id not in self._highest:
            marked = self._cursor.mark_delete_position
            is_new = marked < (ledger_id, 0) and not self._cursor.deleted.entries(ledger_id)
            self._highest[ledger_id] = -1 if is_new else NEVER_MS
        self._highest[ledger_id] = max(self._highest[ledger_id], entry_id)

    def _release_blocked(self) -> None:
        """Send waiting messages as far as the gate admits them."""
        queue, sent, now_ms, is_young = self._queue, self._sent, self._now_ms, self._is_young
        since_ms = queue.since_ms
        # Without young acks the gate opens when its usage falls, so it is open before anything is requested.
        while since_ms and (is_young or not self._gate.gate.is_closed):
            if self._slack < self._cost_max and not is_young:
                self._give_acks()
                self._slack = self._gate.room
            position, waits_since_ms = since_ms.popitem(last=False)
            ledger_id, entry_id = position
            if not is_young and (
                self._slack >= self._cost_max or self._slack >= isolated_range_bytes(ledger_id, entry_id)
            ):
                sent.send(ledger_id, entry_id)
                self._slack -= self._cost_max
            else:
                self._give_acks()
                self._replay.look(now_ms)
                self._slack = 0
                if not self._gate.sends(Position(*position), now_ms=now_ms):
                    since_ms[position] = waits_since_ms
                    since_ms.move_to_end(position, last=False)
                    return
                self._replay.deliver(Position(*position), now_ms=now_ms)
            queue.sent(position, waits_since_ms, now_ms=now_ms)
            self._happened += (now_ms, _DELIVER, ledger_id, entry_id)
            if not since_ms:
                self.blocked_ms += now_ms - self._blocked_since_ms

    def _ack_as_recorded(self, position: tuple[int, int]) -> None:
        """Ack a message now, or later by the time that its delivery waited."""
        if self._queue.ack_in_trace(position, now_ms=self._now_ms):
            return
        if position not in self._sent:
            self._deliver(position)
            if self._queue.ack_in_trace(position, now_ms=self._now_ms):
                return
        self._ack(position)

    def _ack(self, position: tuple[int, int]) -> None:
        """Ack a message if it is in flight, and send the messages that then fit."""
        if position not in self._sent:
            return
        ledger_id, entry_id = position
        now_ms = self._now_ms
        self._sent.settle(ledger_id, entry_id)
        if ledger_id not in self._acked:
            self._acked[ledger_id] = BitMap()
        self._acked[ledger_id].add(entry_id)
        if now_ms != self._acked_ms:
            self._acked_ms = now_ms
            self._replay.acked(now_ms)
        self._happened += (now_ms, _ACK, ledger_id, entry_id)
        if self._is_young:
            self._replay.look(now_ms)
            self._give_acks()
            self._acked_ms = -1  # a promotion may take it in
        if not self._gate.gate.is_closed:
            return
        # An ack frees at most the bytes reserved for it, and as many where it joins two ranges.
        self._slack -= 2 * self._cost_max
        if position == self._first_hole:
            self._pass_first_hole(ledger_id, entry_id)
        if self._slack <= 0 or not entry_id:
            self._give_acks()
            marked_ledger_id, marked_entry_id = self._cursor.mark_delete_position
            self._first_hole = marked_ledger_id, marked_entry_id + 1
            self._slack = self._gate.slack
            if self._slack <= 0:
                self._gate.refresh(now_ms=now_ms)
                self._slack = 0
                self._release_blocked()

    def _pass_first_hole(self, ledger_id: int, entry_id: int) -> None:
        """Find the next hole: each ack that the mark-delete position passes may free a range."""
        given, acked = self._cursor.deleted.entries(ledger_id), self._acked.get(ledger_id, _NONE)
        end = entry_id + 1
        while self._slack > 0 and (end in acked or end in given):
            self._slack -= self._cost_max
            end += 1
        if end >= self._log[ledger_id]:  # the position goes on in another ledger
            self._slack = 0
        self._first_hole = ledger_id, end

    def _give_acks(self) -> None:
        """Give the cursor all acks."""
        if self._acked:
            acked, self._acked = self._acked, {}
            # The gate has reserved all bytes that they may add.
            self._cursor.ack_bitmaps(acked, now_ms=self._now_ms)

    def _note_happened(self) -> None:
        """Append the events that happened one by one."""
        if self._happened:
            ts_ms, kind, ledger_id, entry_id = np.array(self._happened, np.int64).reshape(-1, 4).T
            self._events.append(EventChunk(ts_ms, kind, ledger_id, entry_id, entry_id))
            self._happened = []
