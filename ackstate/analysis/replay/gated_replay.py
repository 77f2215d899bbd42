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

from bisect import bisect_left
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, final

import numpy as np
from pyroaring import BitMap

from ackstate.analysis.replay.acked import AckAccumulator, EventChunk, NewlyAckedRuns
from ackstate.analysis.replay.cursor_replay import CursorReplay
from ackstate.analysis.replay.curves import Epochs
from ackstate.analysis.trace.chunks import bitmaps_of
from ackstate.analysis.trace.events import CHUNK_EVENTS, EventKind
from ackstate.cursor.results import CursorListener, PersistResult, PersistTarget
from ackstate.deleted_ranges import MINUS_ONE_BYTES, firsts_bytes, isolated_range_bytes, lasts_bytes, range_fixed_bytes
from ackstate.dispatch.admission import Admission, Sent
from ackstate.entry_bitmap import bitmaps_of as entries_by_ledger
from ackstate.errors import AckStateError
from ackstate.limits.gate import DispatchGate, GateLimits, Usage
from ackstate.position import ENTRY_ID_MAX, Position

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

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
        self.by_ledger: dict[int, BitMap] = {}
        # The most that the acks of all messages can add: bytes, and ranges.
        self.reserved_bytes = self.reserved_ranges = 0

    @property
    def unacked_messages(self) -> int:
        return self.reserved_ranges

    def entries(self, ledger_id: int) -> BitMap:
        """Return the messages of a ledger; the caller must not change them."""
        return self.by_ledger.get(ledger_id, _NONE)

    def get(self, position: Position) -> Sent | None:
        if position.entry_id not in self.entries(position.ledger_id):
            return None
        return Sent(CONSUMER, record_bytes=isolated_range_bytes(*position), range_count=1, is_covered=True)

    def unacked_of(self, consumer: str) -> int:
        return self.unacked_messages if consumer == CONSUMER else 0

    def add(self, consumer: str, positions: Sequence[Position], sent: Sequence[Sent]) -> None:
        assert consumer == CONSUMER
        assert len(positions) == len(sent)
        self.change(entries_by_ledger(positions), {})

    def change(self, sent: Mapping[int, BitMap], settled: Mapping[int, BitMap]) -> None:
        """Add messages that were sent and were not in flight, then remove those that were settled, by ledger."""
        for ledger_id in {*sent, *settled}:
            held, new = self.by_ledger.setdefault(ledger_id, BitMap()), sent.get(ledger_id, _NONE)
            held |= new
            gone = held & settled.get(ledger_id, _NONE)
            held -= gone
            self.reserved_ranges += len(new) - len(gone)
            self.reserved_bytes += worst_case(ledger_id, new) - worst_case(ledger_id, gone)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(ledgers)."""
        assert self.reserved_bytes == sum(worst_case(*each) for each in self.by_ledger.items())
        assert self.reserved_ranges == sum(map(len, self.by_ledger.values()))


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


# A position is one number: the index of its ledger in the log and, in the low bits, the entry. Numbers rise with
# positions, and cost less time than pairs, which the garbage collector would also visit.
_ENTRY_BITS = 33
_ENTRY_MASK = (1 << _ENTRY_BITS) - 1
_TIME_SHIFT = 64  # of the time of a postponed ack, above its position
_POSITION_MASK = (1 << _TIME_SHIFT) - 1


@final
class GatedReplay(CursorListener):
    """One subscription under a policy whose gate may stop dispatch.

    It receives events as recorded, and returns them at the times at which they happen under the policy. Deliveries that
    are blocked wait in a queue (FIFO).

    Memory: a bitmap of the messages in flight, O(messages that wait, and delayed messages that are not acked).
    """

    kind: ClassVar[Literal["gated"]] = "gated"

    def __init__(self, policy: Policy, log: Mapping[int, int], *, opened_ms: int) -> None:
        self._policy, self._ledger_ids, self._counts = policy, list(log), list(log.values())
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
        self._in_flight = InFlightSet()
        self._gate = ReplayGate(self._policy, self._cursor, self._in_flight)
        self._cursor.add_listener(self)
        # Messages that were sent, and acks, of which the two do not know yet, and a lower bound of the gate's `slack`
        # after these.
        self._sent: set[int] = set()
        self._acked: set[int] = set()
        self._slack = 0
        self._acked_ms = -1  # the time of the last of them, if the replay knows it
        # The highest message that was sent, waits or is acked.
        self._highest = max(map(self._number, (self._cursor.mark_delete_position, *self._last_range())))
        self._durable_until = self._highest  # all that is durable is below it
        self._first_hole = -1  # while the gate is closed
        self._given_index, self._given = -1, _NONE  # a ledger, and its acks that the cursor has
        # The messages that wait, in order, and since when; when the trace acks some of them.
        self._queue: deque[int] = deque()
        self._since_ms: dict[int, int] = {}
        self._acked_waiting_ms: dict[int, int] = {}
        self._waited_ms: dict[int, int] = {}  # of sent messages that the trace has not acked yet
        self._moved_acks: list[int] = []  # a heap of postponed acks; ties go to the lowest position
        self._blocked_since_ms = 0
        self._let_go_ms = NEVER_MS  # when messages may be sent after a persist made room
        self._promotions: list[tuple[int, PersistResult]] = []
        # Events to attempt at once: fewer after a failure.
        self._run_max = CHUNK_EVENTS
        self._is_ticking = False
        self._now_ms = 0
        self._events: list[EventChunk] = []
        self._rows: list[tuple[int, ...]] = []
        self._happened: list[int] = []  # of each event the time, and twice its position, plus 1 for an ack
        # The last time before which nothing is persisted, for any acks.
        self._quiet_until_ms = self._replay.quiet_until_ms

    def _last_range(self) -> Sequence[Position]:
        return self._cursor.deleted.last_range() or ()

    def _number(self, position: tuple[int, int]) -> int:
        ledger_id, entry_id = position
        return (bisect_left(self._ledger_ids, ledger_id) << _ENTRY_BITS) + entry_id

    def _position(self, number: int) -> Position:
        return Position(self._ledger_ids[number >> _ENTRY_BITS], number & _ENTRY_MASK)

    def _bitmaps(self, numbers: Collection[int]) -> dict[int, BitMap]:
        """Return positions as entries by ledger."""
        return {
            self._ledger_ids[index]: BitMap([each & _ENTRY_MASK for each in numbers if each >> _ENTRY_BITS == index])
            for index in {each >> _ENTRY_BITS for each in numbers}
        }

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
        self._settle()
        self._note_happened()
        if self._queue:
            self.blocked_ms += max(0, blocked_until_ms - self._blocked_since_ms)
            self._blocked_since_ms = max(blocked_until_ms, self._blocked_since_ms)
        happened, epochs = EventChunk.in_order([_NO_EVENTS, *self._events]), Epochs.of(self._rows)
        self._events, self._rows = [], []
        return happened, epochs

    def _open_run(self, events: EventChunk, begin: int, costs: Int64s) -> OpenRun | None:
        """Return a run of events, as long as possible, that is sure to pass the gate; None if it would be short."""
        waits = self._queue or self._moved_acks or self._promotions or self._let_go_ms != NEVER_MS
        if waits or self._gate.gate.is_closed:
            return None
        self._settle()
        room = self._gate.room
        end = int(np.searchsorted(costs, costs[begin] + room, "right")) - 1
        if not self._outlasts_persists:
            end = min(end, int(np.searchsorted(events.ts_ms, self._replay.quiet_until_ms, "right")))
        end = min(end, begin + self._run_max)
        while end - begin >= _RUN_MIN:
            run = OpenRun.of(events.part(begin, end), self._cursor, self._in_flight)
            if run.record_bytes <= room and not self._moves_any(run.acked):
                self._run_max = min(max(self._run_max, 2 * (end - begin)), CHUNK_EVENTS)
                return run
            end = begin + (end - begin) // 2
            self._run_max = max(end - begin, _RUN_MIN)
        return None

    def _moves_any(self, acked: Mapping[int, BitMap]) -> bool:
        """Return whether an acked message had waited."""
        return any(entry_id in acked.get(ledger_id, ()) for ledger_id, entry_id in map(self._position, self._waited_ms))

    def _take_run(self, run: OpenRun) -> None:
        """Replay a run that is sure to pass the gate."""
        self._now_ms = int(run.events.ts_ms[-1])
        highest = (self._number((each, entries.max())) for each, entries in run.sent.items() if entries)
        self._highest = max(self._highest, *highest, -1)
        if self._is_young:
            events, news = run.one_by_one(self._cursor, self._in_flight)
        else:
            events, news = run.events, run.news(self._cursor)
        self._is_ticking = True
        self._rows += self._replay.take_events(events, news, until_ms=self._now_ms)
        self._is_ticking = False
        self._in_flight.change(run.sent, run.acked)
        self._durable_until, self._given_index, self._slack = self._highest, -1, 0
        self._events.append(run.events)

    def _take_one_by_one(self, events: EventChunk) -> None:
        """Replay events whose messages may have to wait."""
        named = events.is_any_of(_NAMING)
        ts_ms, kind, ledger_id, first, last = (column[named] for column in events)
        ledger = np.searchsorted(self._ledger_ids, ledger_id) << _ENTRY_BITS
        moved_acks = self._moved_acks
        columns = (ts_ms, kind, ledger + first, last - first)
        for now_ms, each_kind, number, further in zip(*(column.tolist() for column in columns), strict=True):
            if (
                now_ms > self._quiet_until_ms
                or now_ms >= self._let_go_ms
                or (moved_acks and moved_acks[0] >> _TIME_SHIFT <= now_ms)
                or self._promotions
            ):
                self._pass(now_ms + 1, persists_until_ms=now_ms)
            self._now_ms = now_ms
            take = self._deliver if each_kind == _DELIVER else self._ack_as_recorded
            if not further:
                take(number)
            else:
                for each in self._unacked(number, further):
                    take(each)
        last_ms = int(events.ts_ms[-1])
        self._pass(last_ms + 1, persists_until_ms=last_ms)
        self._note_happened()
        self._events.append(EventChunk(*(column[~named] for column in events)))
        if events.kind[-1] == EventKind.CRASH:
            self._close_promotions(last_ms + 1)

    def _unacked(self, number: int, further: int) -> Iterator[int]:
        """Return the messages of a run that are not acked in the cursor."""
        ledger_id, first = self._position(number)
        entries = BitMap(range(first, first + further + 1))
        self._cursor.view.discard_acked(ledger_id, entries)
        return (number - first + entry_id for entry_id in entries)

    def _check(self) -> None:
        """Assert that every message has exactly one state. Complexity: O(ledgers) bitmap operations, O(moved acks)."""
        self._in_flight._check()
        assert list(self._queue) == list(self._since_ms)
        waiting = self._bitmaps(self._queue)
        for each in (self._in_flight.by_ledger, waiting):
            for ledger_id, entries in each.items():
                unacked = entries.copy()
                self._cursor.view.discard_acked(ledger_id, unacked)
                assert unacked == entries, f"ledger {ledger_id} has acked messages that are in flight or waiting"
                assert not entries or Position(ledger_id, entries.max()) in self._cursor.ledgers
        for ledger_id, entries in self._in_flight.by_ledger.items():
            assert entries.isdisjoint(waiting.get(ledger_id, BitMap())), (
                f"ledger {ledger_id}: messages in flight are waiting"
            )
        for position in (self._position(each & _POSITION_MASK) for each in self._moved_acks):
            assert self._in_flight.get(position) or self._cursor.is_acked(position), (
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
        moved_acks = self._moved_acks
        while True:
            now_ms = min(until_ms, self._let_go_ms)
            if moved_acks:
                now_ms = min(now_ms, moved_acks[0] >> _TIME_SHIFT)
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
                self._ack(heappop(moved_acks) & _POSITION_MASK)

    def _persist_one(self, until_ms: int) -> bool:
        """Tick until the cursor is persisted once, before a time; return whether it was."""
        if self._promotions:
            self._close_promotions(until_ms)
        if until_ms <= self._quiet_until_ms:
            return False
        self._settle()
        self._slack = 0
        self._is_ticking = True
        row = next(self._replay.persists(until_ms), None)
        self._is_ticking = False
        self._quiet_until_ms = self._replay.quiet_until_ms
        self._acked_ms = -1
        if row is None:
            return False
        self._rows.append(row)
        self._durable_until = self._highest
        if self._queue:
            self._let_go_ms = row[0] + 1
        return True

    def _close_promotions(self, until_ms: int) -> None:
        """Add the rows of promotions, in the state at the end of their millisecond, once that is over."""
        while self._promotions and self._promotions[0][0] < until_ms:
            at_ms, result = self._promotions.pop(0)
            self._rows.append(self._replay.row(at_ms, result))

    def _is_in_flight(self, number: int) -> bool:
        if number in self._acked:
            return False
        return number in self._sent or (
            number & _ENTRY_MASK in self._in_flight.entries(self._ledger_ids[number >> _ENTRY_BITS])
        )

    def _deliver(self, number: int) -> None:
        """Queue a message that was not delivered before, and send it if the gate admits it."""
        if number <= self._highest:
            if number in self._since_ms or number in self._acked or self._is_in_flight(number):
                return
            if self._cursor.is_acked(self._position(number)):
                return
        self._highest = max(self._highest, number)
        if not self._queue:
            self._blocked_since_ms = self._now_ms
        self._queue.append(number)
        self._since_ms[number] = self._now_ms
        if not self._gate.gate.is_closed or self._is_young:
            self._release_blocked()

    def _release_blocked(self) -> None:
        """Send waiting messages as far as the gate admits them."""
        queue, now_ms, is_young, cost_max = self._queue, self._now_ms, self._is_young, self._cost_max
        # Without young acks the gate opens when its usage falls, so it is open before anything is requested.
        while queue and (is_young or not self._gate.gate.is_closed):
            if self._slack < cost_max and not is_young:
                self._settle()
                self._slack = self._gate.room
            number = queue[0]
            if not is_young and (
                self._slack >= cost_max or self._slack >= isolated_range_bytes(*self._position(number))
            ):
                self._sent.add(number)
                self._slack -= cost_max
            else:
                self._settle()
                self._replay.look(now_ms)
                self._slack = 0
                if not self._gate.sends(self._position(number), now_ms=now_ms):
                    return
                self._replay.deliver(self._position(number), now_ms=now_ms)
            queue.popleft()
            self._postpone_ack(number, now_ms - self._since_ms.pop(number))
            self._happened += (now_ms, 2 * number)
            if not queue:
                self.blocked_ms += now_ms - self._blocked_since_ms

    def _postpone_ack(self, number: int, waited_ms: int) -> None:
        """Postpone the ack of a message that is sent by the time that it waited."""
        acked_ms = self._acked_waiting_ms.pop(number, None)
        if acked_ms is not None:
            heappush(self._moved_acks, (acked_ms + waited_ms << _TIME_SHIFT) + number)
        elif waited_ms:
            self._waited_ms[number] = waited_ms

    def _ack_as_recorded(self, number: int) -> None:
        """Ack a message now, or later by the time that its delivery waited."""
        if self._is_postponed(number):
            return
        if not self._is_in_flight(number):
            self._deliver(number)
            if self._is_postponed(number):
                return
        self._ack(number)

    def _is_postponed(self, number: int) -> bool:
        """Record an ack of the trace, and return whether it is postponed.

        A message that is acked twice is acked by the second ack if that is earlier.
        """
        waited_ms = self._waited_ms.pop(number, None)
        if waited_ms is not None:
            heappush(self._moved_acks, (self._now_ms + waited_ms << _TIME_SHIFT) + number)
            return True
        if number in self._since_ms:
            self._acked_waiting_ms.setdefault(number, self._now_ms)
            return True
        return False

    def _ack(self, number: int) -> None:
        """Ack a message if it is in flight, and send the messages that then fit."""
        if not self._is_in_flight(number):
            return
        now_ms = self._now_ms
        self._acked.add(number)
        if now_ms != self._acked_ms:
            self._acked_ms = now_ms
            self._replay.acked(now_ms)
        self._happened += (now_ms, 2 * number + 1)
        if self._is_young:
            self._replay.look(now_ms)
            self._settle()
            self._acked_ms = -1  # a promotion may take it in
        if not self._gate.gate.is_closed:
            return
        if number == self._first_hole:
            self._pass_first_hole()
        else:
            self._slack -= self._cost_max * self._joined_by(number)
        # The first entry of a ledger may follow a mark-delete position at the end of the ledger before.
        if self._slack <= 0 or not number & _ENTRY_MASK:
            self._settle()
            self._first_hole = self._number(self._cursor.mark_delete_position) + 1
            self._slack = self._gate.slack
            if self._slack <= 0:
                self._gate.refresh(now_ms=now_ms)
                self._slack = 0
                self._release_blocked()

    def _joined_by(self, number: int) -> int:
        """Return how many ranges an ack joins: alone it takes what was reserved for it, and each of them saves that."""
        index, entry_id = number >> _ENTRY_BITS, number & _ENTRY_MASK
        if index != self._given_index:
            self._given_index, self._given = index, self._cursor.deleted.entries(self._ledger_ids[index])
        given, acked = self._given, self._acked
        follows = entry_id > 0 and (entry_id - 1 in given or number - 1 in acked)
        return follows + (entry_id < ENTRY_ID_MAX and (entry_id + 1 in given or number + 1 in acked))

    def _pass_first_hole(self) -> None:
        """Find the next hole: the mark-delete position passes one range, or more where entries are durable already."""
        self._slack -= 2 * self._cost_max
        given = self._cursor.deleted.entries(self._position(self._first_hole).ledger_id)
        hole = self._first_hole + 1
        while self._slack > 0 and (hole in self._acked or hole & _ENTRY_MASK in given):
            self._slack -= self._cost_max * (hole <= self._durable_until)
            hole += 1
        if hole & _ENTRY_MASK >= self._counts[hole >> _ENTRY_BITS]:  # the position goes on in another ledger
            self._slack = 0
        self._first_hole = hole

    def _settle(self) -> None:
        """Give the cursor all acks, and note which messages are in flight."""
        if self._sent or self._acked:
            sent, acked = self._bitmaps(self._sent), self._bitmaps(self._acked)
            self._sent.clear()
            self._acked.clear()
            self._given_index = -1
            self._in_flight.change(sent, acked)
            # The gate has reserved all bytes that they may add.
            self._cursor.ack_bitmaps(acked, now_ms=self._now_ms)

    def _note_happened(self) -> None:
        """Append the events that happened one by one."""
        if self._happened:
            ts_ms, told = np.array(self._happened, np.int64).reshape(-1, 2).T
            number, kind = told >> 1, np.where(told & 1, _ACK, _DELIVER)
            entry_id = number & _ENTRY_MASK
            ledger_id = np.array(self._ledger_ids)[number >> _ENTRY_BITS]
            self._events.append(EventChunk(ts_ms, kind, ledger_id, entry_id, entry_id))
            self._happened = []
