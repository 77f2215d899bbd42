"""The slow, obvious answer: run the real cursor event by event, crash it at every instant, recover it, and count."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from ackstate.analysis.replay.acked import EventChunk
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.cursor.cursor import ManagedCursor
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.stores.base import StoreError
from ackstate.stores.memory import MemoryStore
from traces import runs_of
from wrapped_store import copied

NAMES = {"topic": "t", "subscription": "s"}
RESTARTS = {EventKind.RECOVER, EventKind.RESET, EventKind.REDELIVER}
NOTHING = (-1, -1)


class ObservedCrashes(NamedTuple):
    """The messages that crashes at every instant redelivered."""

    at_end: dict[int, int]  # Millisecond -> acked messages that come back if the broker dies at its end; 0 while dead
    peak: int  # The most after any single event
    bytes_written: int  # By all persists but those of opening the cursor
    write_count: int  # How many those were
    bytes_kept: int | None  # What a recovery would read at the end; None if no persist came after the last reset


class _Broker:
    """One subscription on a log that grows no sooner than its entries are spoken of."""

    def __init__(self, policy, log):
        self.policy, self.log = policy, log
        self.disk_of = MemoryStore()
        if not policy.ledger_writable:
            self.disk_of.break_ledgers()
        self.ledgers = LedgerMap(min(log))
        self.acked = set()
        self.cursor = None
        self.bytes_written = self.write_count = self.writes_since_reset = 0

    def open(self, now_ms):
        self.cursor = ManagedCursor.open(
            self.disk_of, ledgers=self.ledgers, config=self.policy.cursor, now_ms=now_ms, **NAMES
        )
        self.acked = {position for position in self.acked if self.cursor.is_acked(Position(*position))}

    def recover(self, recorded, now_ms):
        """Open the cursor again; acks of the recording that the cursor lacks are repeated."""
        self._grow_to_last(recorded, now_ms)
        self.open(now_ms)
        self._ack_all(recorded - self.acked, now_ms)

    def put_where(self, recorded, now_ms):
        """Put the cursor where the recording has it, and make that durable as far as the policy can."""
        self._grow_to_last(recorded, now_ms)
        prefix = Position(min(self.log), -1)
        for ledger_id, count in self.log.items():
            held = next((entry for entry in range(count) if (ledger_id, entry) not in recorded), count)
            prefix = Position(ledger_id, held - 1)
            if held < count:
                break
        self.cursor.reset(self.ledgers.next_valid(prefix), now_ms=now_ms)
        self.acked, self.writes_since_reset = set(), 0
        self._ack_all(recorded, now_ms)
        with suppress(StoreError):
            self.cursor.persist(now_ms=now_ms)

    def _ack_all(self, positions, now_ms):
        for position in sorted(positions):
            self.cursor.ack(Position(*position), now_ms=now_ms)
            self.acked.add(position)

    def tick(self, now_ms):
        before = self.cursor.stats().persist_count
        try:
            result = self.cursor.tick(now_ms=now_ms)
        except StoreError:
            return True
        if self.cursor.stats().persist_count > before:
            self.bytes_written += result.bytes_written
            self.write_count += 1
            self.writes_since_reset += 1
        return result is not None

    def follow(self, event):
        self._grow(event)
        ledger_id, last = event.ledger_id, event.last_entry
        match event.kind:
            case EventKind.DELIVER:
                self.cursor.delivered(Position(ledger_id, last), now_ms=event.ts_ms)
            case EventKind.ACK:
                for entry in range(event.first_entry, last + 1):
                    self.cursor.ack(Position(ledger_id, entry), now_ms=event.ts_ms)
                    self.acked.add((ledger_id, entry))
            case EventKind.MARK_DELETE:
                if Position(ledger_id, last) > self.cursor.mark_delete_position:
                    self.cursor.mark_delete(Position(ledger_id, last), now_ms=event.ts_ms)
                self.acked |= {(ledger_id, entry) for entry in range(last + 1)}

    def _grow_to_last(self, positions, now_ms):
        last = max(positions, default=(min(self.log), -1))
        self._grow(Event(now_ms, EventKind.DELIVER, *last, last[1]))

    def _grow(self, event):
        while self.ledgers.current_ledger_id < event.ledger_id:
            current = self.ledgers.current_ledger_id
            self.ledgers.append(self.log[current] - self.ledgers.entry_count(current))
            self.ledgers.roll(min(each for each in self.log if each > current))
        if event.ledger_id == self.ledgers.current_ledger_id:
            self.ledgers.append(max(0, event.last_entry + 1 - self.ledgers.entry_count(event.ledger_id)))

    def lost_in_a_crash(self):
        """Drop everything but the disk, recover from a copy of it, and count the acks that are gone."""
        twin = MemoryStore(copied(self.disk_of.disk))
        recovered = ManagedCursor.open(twin, ledgers=self.ledgers, config=self.policy.cursor, now_ms=0, **NAMES)
        return sum(not recovered.is_acked(Position(*position)) for position in self.acked)


def observe(events, policy, log, *, end_ms):
    """Run a trace, and crash at every instant of it up to one, included."""
    broker, peak, at_end, alive, lost = _Broker(policy, log), 0, {}, True, 0
    broker.open(events[0].ts_ms)
    statements, recorded = _statements(events), set()
    is_first = True
    for now_ms in range(events[0].ts_ms, end_ms + 1):
        while statements and statements[0][0].ts_ms == now_ms:
            said = statements.pop(0)
            kinds = {event.kind for event in said}
            for event in said:
                _record(event, recorded)
            if kinds & {EventKind.CRASH}:
                alive, lost = False, 0
            elif kinds & RESTARTS and (alive or kinds != {EventKind.REDELIVER}):
                # The first of all events define where the trace begins.
                begin = broker.put_where if EventKind.RESET in kinds or is_first else broker.recover
                begin(recorded, now_ms)
                alive, lost = True, broker.lost_in_a_crash()
                peak = max(peak, lost)
            elif alive:
                broker.follow(said[0])
                if said[0].kind != EventKind.DELIVER:
                    lost = broker.lost_in_a_crash()
                peak = max(peak, lost)
            is_first = False
        if alive and now_ms % policy.tick_ms == 0 and broker.tick(now_ms):
            lost = broker.lost_in_a_crash()
        at_end[now_ms] = lost
    return ObservedCrashes(
        at_end, peak, broker.bytes_written, broker.write_count,
        broker.cursor.stats().journal_bytes if broker.writes_since_reset else None,
    )  # fmt: skip


def _statements(events):
    """Take events together that belong together: a recovery or reset with its entries, and its redeliveries.

    All of it is said in one millisecond. Two recoveries or resets in a row are two, unless each names entries.
    """
    found = []
    for event in events:
        before = found[-1][-1] if found else None
        goes_on = before is not None and before.ts_ms == event.ts_ms and {before.kind, event.kind} <= RESTARTS
        if goes_on and event.kind != EventKind.REDELIVER:
            goes_on = event.kind == before.kind and NOTHING not in {event[2:4], before[2:4]}
        if goes_on:
            found[-1].append(event)
        else:
            found.append([event])
    return found


def _record(event, recorded):
    run = {(event.ledger_id, entry) for entry in range(event.first_entry, event.last_entry + 1)} - {(-1, -1)}
    if event.kind in {EventKind.ACK, EventKind.MARK_DELETE, EventKind.RECOVER, EventKind.RESET}:
        recorded |= run
    elif event.kind == EventKind.REDELIVER:
        recorded -= run


def _restart(chance, acked, positions, ts_ms, *, is_open):
    """Return the events that a recording may have of a restarted cursor, and whether it is open after them."""
    choice = chance.random()
    if choice < 0.15:
        return [Event(ts_ms, EventKind.CRASH)], False
    if choice < 0.25 and acked:
        lost = {position for position in acked if chance.random() < 0.2} or acked
        return [Event(ts_ms, EventKind.REDELIVER, *run) for run in runs_of(lost)], is_open
    # A dead cursor is opened before it is reset.
    kind = EventKind.RESET if choice < 0.55 and is_open else EventKind.RECOVER
    kept = set(acked) if chance.random() < 0.3 else {each for each in acked if chance.random() < 0.8}
    if kind == EventKind.RESET and chance.random() < 0.5:
        kept = set(positions[: chance.randrange(len(positions) // 2 + 1)])
    if chance.random() < 0.3:
        kept |= {chance.choice(positions[: len(positions) // 2 + 1]) for _ in range(chance.choice((1, 6)))}
    found = [Event(ts_ms, kind, *run) for run in runs_of(kept - acked)] or [Event(ts_ms, kind)]
    return [*found, *(Event(ts_ms, EventKind.REDELIVER, *run) for run in runs_of(acked - kept))], True


@st.composite
def small_traces(draw, *, crashes=True):
    """Events of one subscription and its log: deliveries in order, acks of some, sometimes of stretches.

    Crashes, recoveries, resets and redeliveries come in any order, often several in a row, and a trace may begin so.
    """
    chance = draw(st.randoms(use_true_random=False))
    log = {
        ledger_id: chance.randrange(1, 30) for ledger_id in sorted(chance.sample(range(1, 300), chance.randint(1, 3)))
    }
    log[max(log) + 1] = 60
    positions = [(ledger_id, entry) for ledger_id, count in log.items() for entry in range(count)]
    ts_ms, events, sent, alive = chance.randrange(1_000), [], 0, True
    restart_share = crashes and chance.choice((0.03, 0.03, 0.1))
    is_restarting = crashes and chance.random() < 0.2
    for _ in range(draw(st.integers(1, 60))):
        ts_ms += chance.choice((0, 0, 0, 1, 1, 3, 20, 300))
        choice = chance.random()
        if is_restarting or not alive or choice > 1 - restart_share:
            acked = set()
            for event in events:
                _record(event, acked)
            said, alive = _restart(chance, acked, positions, ts_ms, is_open=alive)
            events += said
            is_restarting = chance.random() < 0.4
        elif choice < 0.35 and sent < len(positions):
            taken = positions[sent : sent + chance.choice((1, 1, 4))]
            events += [Event(ts_ms, EventKind.DELIVER, ledger, entry, entry, 1) for ledger, entry in taken]
            sent += len(taken)
        elif choice < 0.85 and sent:
            ledger, entry = positions[chance.randrange(max(0, sent - 12), sent)]
            last = min(entry + chance.choice((0, 0, 0, 2)), log[ledger] - 1)
            events.append(Event(ts_ms, EventKind.ACK, ledger, entry, last, 1))
        elif choice < 0.9 and sent:
            ledger, entry = positions[chance.randrange(sent)]
            events += [Event(ts_ms, EventKind.MARK_DELETE, each, 0, log[each] - 1) for each in log if each < ledger]
            events.append(Event(ts_ms, EventKind.MARK_DELETE, ledger, 0, entry))
    return events or [Event(ts_ms, EventKind.DELIVER, min(log), 0, 0)], log


POLICIES = st.fixed_dictionaries(
    {"flush_interval_ms": st.sampled_from((0, 1, 5, 30, 400))},
    optional={
        "tick_ms": st.sampled_from((1, 7, 50)),
        "mark_delete_rate_limit": st.sampled_from((1, 3, 20, 500)),
        "range_count_max": st.sampled_from((0, 1, 2, 5)),
        "keep": st.sampled_from(("LOWEST", "WIDEST")),
        "become_old_ack_record_seconds": st.sampled_from((1, 2, 3)),
        "format": st.sampled_from(("NATIVE", "PULSAR")),
        "range_form": st.sampled_from(("LIST", "WORDS")),
        "ledger_writable": st.sampled_from(("true", "false")),
        "metadata_range_count_max": st.sampled_from((0, 1, 3)),
        "metadata_bytes_max": st.sampled_from((240, 900_000)),
        "compaction_bytes_min": st.sampled_from((0, 300)),
        "ledger_entry_count_max": st.sampled_from((1, 3, 50_000)),
        "ledger_rollover_ms": st.sampled_from((0, 100)),
        "ledger_retry_ms": st.sampled_from((0, 10, 1_000)),
    },
).map(Policy.from_mapping)
PLAIN = st.fixed_dictionaries({
    "flush_interval_ms": st.sampled_from((0, 1, 5, 30, 400)), "tick_ms": st.sampled_from((1, 7, 50)),
    "mark_delete_rate_limit": st.sampled_from((0, 0, 1, 20)), "compaction_bytes_min": st.just(100),
}).map(Policy.from_mapping)  # fmt: skip
SIZES = st.lists(st.integers(0, 20), max_size=4)


def first_difference(curve, other):
    """Return the first millisecond at which two curves differ, with both values; None if none does.

    Two dictionaries that differ would be told in full, which takes minutes.
    """
    times = sorted({*curve, *other})
    return next(((now, curve.get(now), other.get(now)) for now in times if curve.get(now) != other.get(now)), None)


def chunk_of(events):
    """Return events as the arrays that a replay takes."""
    return EventChunk(*(np.array([getattr(event, name) for event in events], np.int64) for name in EventChunk._fields))


def replayed(events, policies, log, *, sizes=(), end_ms):
    """Return, for each policy, millisecond -> number at its end, and the replay itself."""
    replay, begin, found = SubscriptionReplay(policies, log), 0, [{} for _ in policies]
    chunks = []
    for size in [*sizes, len(events)]:
        chunks += [chunk_of(events[begin : begin + size])] if events[begin : begin + size] else []
        begin += size
    for part in [*map(replay.take, chunks), replay.end(end_ms)]:
        for points, last in zip(part, found, strict=True):
            last.update(zip(points.ts_ms.tolist(), points.value.tolist(), strict=True))
    return [by_millisecond(last, events[0].ts_ms, end_ms) for last in found], replay


def by_millisecond(last, begin_ms, end_ms):
    """Spell a curve out whose values hold from their times on."""
    value = 0
    return {now_ms: (value := last.get(now_ms, value)) for now_ms in range(begin_ms, end_ms + 1)}


def assert_agreement(trace, policies, sizes):
    """Compare a replay with the real cursor, at every instant."""
    events, log = trace
    is_restarted = any(event.kind in RESTARTS for event in events)
    end_ms = events[-1].ts_ms + 450
    curves, replay = replayed(events, policies, log, sizes=sizes, end_ms=end_ms)
    for policy, curve, sums in zip(policies, curves, replay.curves, strict=True):
        seen = observe(events, policy, log, end_ms=end_ms)
        assert first_difference(curve, seen.at_end) is None, policy.label
        assert sums.sum.peak == seen.peak, policy.label
        costs = sums.costs
        assert costs.write_count == seen.write_count, policy.label
        # Acks given at once, or read again, may leave a bitmap that is as large either way in the other of two forms.
        slack = 0 if policy.leaves_nothing_out and not is_restarted else 10 * seen.write_count
        assert abs(costs.bytes_written - seen.bytes_written) <= slack, policy.label
        assert seen.bytes_kept is None or abs(costs.bytes_kept - seen.bytes_kept) <= slack, policy.label
