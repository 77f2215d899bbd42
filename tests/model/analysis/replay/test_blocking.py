"""A gate that stops dispatch, replayed: against the real subscription, and runs at once against event by event."""

from __future__ import annotations

import heapq
import logging
from contextlib import suppress
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

import montecarlo
from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.gated_replay import CONSUMER, GatedReplay, InFlightSet
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recording import Frame
from ackstate.cursor.cursor import ManagedCursor
from ackstate.dispatch.subscription import Subscription
from ackstate.limits.gate import DispatchGate, GateLimits
from ackstate.message import Message
from ackstate.position import Position
from ackstate.stores.base import StoreError
from ackstate.stores.memory import MemoryStore
from ackstate.topic.log import MessageLog
from montecarlo import chunk_of, first_difference, replayed
from strategies import few

NAMES = {"topic": "t", "subscription": "s"}
ENTRIES_PER_LEDGER = 40
MESSAGES = 120
TAIL_MS = 600
DELIVER, ACK, CRASH, RECOVER = EventKind.DELIVER, EventKind.ACK, EventKind.CRASH, EventKind.RECOVER


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch, caplog):
    monkeypatch.setattr("ackstate.limits.rules.RECORD_BYTES_LIMIT_MIN", 1)
    # So that such small traces are taken in runs where the gate stays open, and one by one elsewhere.
    monkeypatch.setattr("ackstate.analysis.replay.gated_replay._RUN_MIN", 2)
    monkeypatch.setattr("ackstate.analysis.replay.gated_replay._STEPS", 3)
    caplog.set_level(logging.ERROR)


def events_of(kind, ts_ms, entries, ledger_id=3):
    return [Event(ts_ms, kind, ledger_id, each, each) for each in entries]


class ObservedSubscription(NamedTuple):
    """The results of a real subscription: at the end of each millisecond, acked messages that a crash would
    redeliver."""

    at_end: dict[int, int]
    write_count: int
    blocked_ms: int


def new_log(store):
    log = MessageLog.open(store, entries_per_ledger_max=ENTRIES_PER_LEDGER, topic="t")
    positions = [log.publish([Message(b"")])[0] for _ in range(MESSAGES)]
    return log, positions


class _Consumer:
    """Gets messages no sooner than the trace says, and acks each as long after it got it as the trace says."""

    def __init__(self, policy, *, opened_ms):
        store = MemoryStore()
        log, self.positions = new_log(store)
        if not policy.ledger_writable:
            store.break_ledgers()
        self.cursor = ManagedCursor.open(store, ledgers=log.ledgers, config=policy.cursor, now_ms=opened_ms, **NAMES)
        limits = GateLimits(policy.max_unpersisted_ack_record_bytes, 0, max_unacked_messages_per_consumer=0)
        self.subscription = Subscription(log, self.cursor, gate=DispatchGate(limits))
        self.limit = policy.max_unpersisted_ack_record_bytes
        self.due = []  # when each message that is not sent is delivered in the trace
        self.sent = {}  # how much later than in the trace
        self.acks_due = {}
        self.moved = []
        self.blocked_ms, self.blocked_since_ms = 0, None

    def dispatch(self, now_ms):
        """Take the messages that may be sent."""
        while self.due:
            if self.blocked_since_ms is None:
                self.blocked_since_ms = now_ms
            delivered = self.subscription.dispatch("c", 1, now_ms=now_ms)
            self.check()
            if not delivered:
                return
            position = delivered[0].position
            self.sent[position] = now_ms - self.due.pop(0)
            if position in self.acks_due:
                heapq.heappush(self.moved, (self.acks_due.pop(position) + self.sent[position], position))
        if self.blocked_since_ms is not None:
            self.blocked_ms += now_ms - self.blocked_since_ms
            self.blocked_since_ms = None

    def follow(self, event):
        for entry in range(event.first_entry, event.last_entry + 1):
            position = Position(event.ledger_id, entry)
            if event.kind == DELIVER:
                self.due.append(event.ts_ms)
                self.dispatch(event.ts_ms)
            elif self.sent.get(position) == 0:
                self.ack(position, event.ts_ms)
            elif position in self.sent:
                heapq.heappush(self.moved, (event.ts_ms + self.sent[position], position))
            else:
                self.acks_due.setdefault(position, event.ts_ms)

    def ack_moved(self, until_ms):
        while self.moved and self.moved[0][0] <= until_ms:
            self.ack(heapq.heappop(self.moved)[1], until_ms)

    def ack(self, position, now_ms):
        if not self.cursor.is_acked(position):
            self.subscription.ack(position, now_ms=now_ms)
            self.check()
            self.dispatch(now_ms)

    def check(self):
        usage = self.subscription.usage()
        assert usage.unpersisted_record_bytes + usage.reserved_bytes <= self.limit


def observe(events, policy, *, end_ms):
    consumer, waiting, at_end = _Consumer(policy, opened_ms=events[0].ts_ms), list(events), {}
    has_persisted = False
    for now_ms in range(events[0].ts_ms, end_ms + 1):
        if has_persisted and consumer.due:
            consumer.dispatch(now_ms)
        consumer.ack_moved(now_ms)
        while waiting and waiting[0].ts_ms == now_ms:
            consumer.follow(waiting.pop(0))
            consumer.ack_moved(now_ms)
        before = consumer.cursor.stats().persist_count
        if now_ms % policy.tick_ms == 0:
            with suppress(StoreError):
                consumer.cursor.tick(now_ms=now_ms)
        has_persisted = consumer.cursor.stats().persist_count > before
        at_end[now_ms] = consumer.cursor.redelivery_if_crashed
    if consumer.blocked_since_ms is not None and consumer.due:
        consumer.blocked_ms += end_ms - consumer.blocked_since_ms
    return ObservedSubscription(at_end, consumer.cursor.stats().persist_count - 1, consumer.blocked_ms)


@st.composite
def gated_traces(draw):
    """Messages delivered in order and acked once, in any order; often far more than fit under a small limit."""
    chance = draw(st.randoms(use_true_random=False))
    _, positions = new_log(MemoryStore())
    ts_ms, events, sent, open_ones = 1_000, [], 0, []
    for _ in range(draw(st.integers(1, 120))):
        ts_ms += chance.choice((0, 0, 1, 1, 3, 20, 200))
        if (chance.random() < 0.6 or not open_ones) and sent < MESSAGES:
            for position in positions[sent : sent + chance.choice((1, 1, 3))]:
                events.append(Event(ts_ms, DELIVER, *position, position.entry_id, 1))
                open_ones.append(position)
                sent += 1
        elif open_ones:
            position = open_ones.pop(chance.randrange(len(open_ones)))
            events.append(Event(ts_ms, ACK, *position, position.entry_id, 1))
    return events


POLICIES = st.fixed_dictionaries(
    {
        "max_unpersisted_ack_record_bytes": st.sampled_from((40, 100, 300, 5_000)),
        "flush_interval_ms": st.sampled_from((0, 5, 30, 400)),
    },
    optional={
        "tick_ms": st.sampled_from((1, 7, 50)),
        "mark_delete_rate_limit": st.sampled_from((3, 20, 500)),
        "range_count_max": st.sampled_from((0, 2, 5)),
        "become_old_ack_record_seconds": st.sampled_from((1, 2)),
        "format": st.sampled_from(("NATIVE", "PULSAR")),
        "keep": st.sampled_from(("LOWEST", "WIDEST")),
        "ledger_writable": st.sampled_from(("true", "false")),
        "metadata_range_count_max": st.sampled_from((0, 1, 3)),
    },
)  # as settings: they are no policies before the limits may be so small
SIZES = st.lists(st.integers(0, 40), max_size=4)


def assert_agreement(events, found, sizes):
    policy, end_ms = Policy.from_mapping(found), events[-1].ts_ms + TAIL_MS
    counts = {position.ledger_id: position.entry_id + 1 for position in new_log(MemoryStore())[1]}
    (curve,), replay = replayed(events, [policy], counts, sizes=sizes, end_ms=end_ms)
    seen = observe(events, policy, end_ms=end_ms)
    assert first_difference(curve, seen.at_end) is None, policy.label
    costs = replay.curves[0].costs
    assert (costs.blocked_ms, costs.write_count) == (seen.blocked_ms, seen.write_count), policy.label


test_every_instant_agrees_with_a_real_subscription = pytest.mark.slow(
    few(given(gated_traces(), POLICIES, SIZES)(assert_agreement))
)


def young_acks():
    """30 acks that would all be lost are persisted early rather than that they stop dispatch."""
    _, positions = new_log(MemoryStore())
    events = []
    for number in range(30):
        before, position = positions[2 * number : 2 * number + 2]
        events += [Event(1_000 + number, DELIVER, *each, each.entry_id) for each in (before, position)]
        events.append(Event(1_000 + number, ACK, *position, position.entry_id))
    return events


def old_in_turn():
    """What was delivered at 1,500 ms becomes old half a second after what was delivered at 1,000 ms."""
    events = []
    for now_ms, entries, acked in ((1_000, range(5), 1), (1_500, range(5, 10), 6), (2_600, [10], 10)):
        events += [
            *events_of(DELIVER, now_ms, entries, ledger_id=1),
            *events_of(ACK, now_ms + 10, [acked], ledger_id=1),
        ]
    return events


def acked_while_it_waits():
    """An ack makes room for a message that was acked before it could be sent: both acks are of one millisecond."""
    acks = [*events_of(ACK, 1_000, [2], ledger_id=1), *events_of(ACK, 1_002, [1], ledger_id=1)]
    return [*events_of(DELIVER, 1_000, range(3), ledger_id=1), *acks]


def passed_by_the_mark_delete():
    """The ack of the first message takes no bytes, and makes room long before the flush."""
    return [*events_of(DELIVER, 1_000, range(3), ledger_id=1), *events_of(ACK, 1_200, [0], ledger_id=1)]


def cut_by_a_promotion():
    """For want of room an ack is persisted early, but no ledger can be written and no range may be elsewhere."""
    delivered_ms = (1_000, 1_000, 1_000, 1_001, 1_401)
    events = [Event(now_ms, DELIVER, 1, each, each) for each, now_ms in enumerate(delivered_ms)]
    return [*events[:4], Event(1_400, ACK, 1, 2, 2), *events[4:]]


def tried_in_vain():
    """Where a ledger cannot be written there is room for one range; the lowest must not take the place of a wider."""
    acks = {3_000: range(10, 20), 3_001: [2], 3_050: [4], 3_450: [0, 1, 3, *range(5, 10)]}
    events = events_of(DELIVER, 1_000, range(20), ledger_id=1)
    return [*events, *(each for ts_ms, entries in acks.items() for each in events_of(ACK, ts_ms, entries, ledger_id=1))]


def the_end_of_a_ledger():
    """Four young ranges of 14 bytes and five messages on their way leave 4 of 130; the next ledger's first takes 23."""
    _, positions = new_log(MemoryStore())
    events = []
    for now_ms, position in enumerate(positions[: ENTRIES_PER_LEDGER + 1], start=1_000):
        events.append(Event(now_ms, DELIVER, *position, position.entry_id))
        if position.entry_id % 8 != 7 and position.ledger_id == positions[0].ledger_id:
            events.append(Event(now_ms, ACK, *position, position.entry_id))
    return events


NO_LEDGER = {"ledger_writable": "false", "format": "PULSAR"}
STORIES = [
    (young_acks, 300, {"become_old_ack_record_seconds": 1, "flush_interval_ms": 50}),
    (old_in_turn, 5_000, {"become_old_ack_record_seconds": 1, "flush_interval_ms": 50}),
    (acked_while_it_waits, 40, {"become_old_ack_record_seconds": 1, "flush_interval_ms": 5}),
    (passed_by_the_mark_delete, 40, {"flush_interval_ms": 5_000}),
    (cut_by_a_promotion, 60,
     {"become_old_ack_record_seconds": 1, "flush_interval_ms": 0, "range_count_max": 0, **NO_LEDGER}),
    *((tried_in_vain, 400,
       {"metadata_bytes_max": 50, "flush_interval_ms": 400, "mark_delete_rate_limit": rate, **NO_LEDGER})
      for rate in (1, 20)),
    (the_end_of_a_ledger, 130, {"become_old_ack_record_seconds": 1, "flush_interval_ms": 5_000}),
]  # fmt: skip


@pytest.mark.parametrize(("story", "limit", "setting"), STORIES)
def test_each_story_agrees_with_a_real_subscription(story, limit, setting):
    events = story()
    for sizes in ([], [1] * len(events)):
        assert_agreement(events, {"max_unpersisted_ack_record_bytes": limit, **setting}, sizes)


def policy_of(limit, **found):
    return Policy.from_mapping({"max_unpersisted_ack_record_bytes": limit, "flush_interval_ms": 10_000, **found})


@pytest.mark.parametrize("last_ms", [1_000, 1_001, 3_000])
def test_dispatch_is_not_blocked_for_longer_than_the_trace(last_ms):
    """Two messages fill the limit in the first millisecond, and nothing is ever acked."""
    events = [*events_of(DELIVER, 1_000, range(9)), *events_of(DELIVER, last_ms, [8])]
    _, replay = replayed(events, [policy_of(40)], {3: 9}, end_ms=last_ms)
    assert replay.curves[0].costs.blocked_ms == last_ms - 1_000
    # Another day goes on where it was left.
    replay.end(last_ms + 500)
    assert replay.curves[0].costs.blocked_ms == last_ms - 500


def test_no_result_is_blocked_for_longer_than_the_trace(tmp_path):
    """Two subscriptions wait at the same time, one of them for half of it."""
    frames = [
        Frame("persistent://a/b/t", name, events_of(DELIVER, begin_ms, range(count)))
        for name, begin_ms, count in (("s", 1_000, 9), ("r", 2_000, 9), ("idle", 3_000, 1))
    ]
    parquet.write_trace(frames, tmp_path / "trace")
    rows = estimates(LocalSource.of(tmp_path / "trace"), [policy_of(40)]).collect()
    found = {row["subscription"] or row["scope"]: row["blocked_ms"] for row in rows}
    assert found == {"s": 2_000, "r": 1_000, "idle": 0, "topic": 2_000, "namespace": 2_000, "total": 2_000}


def test_what_waits_when_the_process_dies_is_acked_when_it_is_back():
    events = [each for number in range(9) for each in events_of(DELIVER, 1_000 + number, [number])]
    events += [*events_of(ACK, 1_100, (0, 2, 4, 6, 8)), Event(1_200, CRASH), Event(1_300, RECOVER)]
    (curve,), replay = replayed(events, [policy_of(40)], {3: 9}, end_ms=1_400)
    # Two reservations fill 40 bytes: no others were sent, and only entry 0 was acked before the crash.
    assert curve[1_100] <= 2
    assert replay.curves[0].costs.blocked_ms >= 190


def test_an_ack_without_a_delivery_is_delivered_when_it_is_acked():
    events = events_of(ACK, 1_000, range(0, 40, 2))
    _, replay = replayed(events, [policy_of(100, flush_interval_ms=50)], {3: 40}, end_ms=2_000)
    # A range of its own takes 14 bytes; that of entry 0 is the mark-delete position, and takes none.
    assert replay.curves[0].sum.peak == 1 + 100 // 14
    assert replay.curves[0].costs.blocked_ms >= 100


def acks_under(events):
    """Return when which entries are acked under a policy that blocks, by ledger 3."""
    replay = GatedReplay(policy_of(40, flush_interval_ms=100), {3: 40}, opened_ms=1_000)
    happened, _ = replay.take(chunk_of(events), until_ms=9_000, blocked_until_ms=9_000)
    acks = happened.kind == ACK
    return dict(zip(happened.first_entry[acks].tolist(), happened.ts_ms[acks].tolist(), strict=True))


def test_a_message_that_waited_is_acked_by_its_second_ack_if_that_comes_first():
    """Two messages fill the limit until a persist at 1,100 ms lets the third go, 101 ms late."""
    once = [*events_of(DELIVER, 1_000, (5, 7, 9)), *events_of(ACK, 1_010, (5, 7)), *events_of(ACK, 1_190, [9])]
    assert acks_under(once) == {5: 1_010, 7: 1_010, 9: 1_291}
    for again_ms, acked_ms in ((1_200, 1_200), (1_300, 1_291)):
        assert acks_under([*once, *events_of(ACK, again_ms, [9])])[9] == acked_ms


# --- Runs taken at once, against each event taken by itself


@pytest.fixture
def taken_at_once(monkeypatch):
    """Return a function that compares both, and returns how many events were taken at once."""
    counts = []
    take_run = GatedReplay._take_run

    def counted(replay, run):
        counts.append(len(run.events.ts_ms))
        take_run(replay, run)
        replay._check()

    monkeypatch.setattr(GatedReplay, "_take_run", counted)

    def compare(trace, policy, sizes=()):
        found = []
        for run_min in (1, 10**9):
            monkeypatch.setattr("ackstate.analysis.replay.gated_replay._RUN_MIN", run_min)
            events, log = trace
            curves, replay = replayed(events, [policy], log, sizes=sizes, end_ms=events[-1].ts_ms + 450)
            sums = replay.curves[0]
            costs = sums.costs
            found.append((*curves, costs.write_count, costs.blocked_ms, sums.sum.peak, sum(counts)))
            counts.clear()
        (one, *sums, count), (other, *other_sums, nothing) = found
        assert (first_difference(one, other), sums, nothing) == (None, other_sums, 0), policy
        return count

    return compare


LOG = {3: 60, 9: 50, 1_000: 200}


@st.composite
def anything(draw):
    """Runs and single messages, acked out of order, twice, never, undelivered or up to one; deaths and resets."""
    chance = draw(st.randoms(use_true_random=False))
    every = [(ledger_id, entry_id) for ledger_id, count in LOG.items() for entry_id in range(count)]
    ts_ms, sent, events = 1_000, 0, [Event(1_000, EventKind.PUBLISH, 3, 0, 0)]
    for _ in range(draw(st.integers(1, 120))):
        ts_ms += chance.choice((0, 0, 0, 1, 1, 2, 7, 60))
        kind = chance.choices(range(7), (45, 45, 3, 3, 2, 1, 1))[0]
        ledger_id, entry_id = every[min(sent, len(every) - 1) if kind == 0 else chance.randrange(max(sent, 1))]
        if kind == 1:
            ledger_id, entry_id = every[max(0, sent - chance.choice((0, 1, 1, 2, 3, 5, 8, 13, 21, 34)) - 1)]
        last = min(entry_id + chance.choice((0, 0, 0, 2, 9)), LOG[ledger_id] - 1)
        match kind:
            case 0 if sent < len(every):
                events.append(Event(ts_ms, DELIVER, ledger_id, entry_id, last))
                sent += last - entry_id + 1
            case 1:
                events.append(Event(ts_ms, ACK, ledger_id, entry_id, last))
            case 2:
                events.append(Event(ts_ms, EventKind.MARK_DELETE, ledger_id, max(0, entry_id - 5), entry_id))
            case 3:
                events.append(Event(ts_ms, DELIVER, ledger_id, entry_id, entry_id))
            case 4:
                events += [Event(ts_ms, CRASH), Event(ts_ms + 3, RECOVER)]
                ts_ms += 3
                events.append(Event(ts_ms, EventKind.REDELIVER, ledger_id, entry_id, last))
            case 5:
                events.append(Event(ts_ms, EventKind.RESET, ledger_id, 0, entry_id))
            case 6:
                events.append(Event(ts_ms, EventKind.REDELIVER, ledger_id, entry_id, last))
    return events, LOG


@pytest.mark.slow
def test_runs_taken_at_once_are_as_each_event(taken_at_once):
    """With promotions, crashes, restarts and resets."""
    counts = []

    @settings(max_examples=few.max_examples // 2)
    @given(st.one_of(anything(), montecarlo.small_traces()), POLICIES, SIZES)
    def agree(trace, found, sizes):
        counts.append(taken_at_once(trace, Policy.from_mapping(found), sizes))

    agree()
    assert sum(counts) > 0


def traffic(count, *, lag=20, per_ms=3):
    """Deliveries in order, of which each second is acked `count` later, and the others thrice as late."""
    events = []
    for number in range(count):
        ts_ms = 1_000 + number // per_ms
        acked = number - lag if (number - lag) % 2 == 0 else number - 3 * lag
        events += [*events_of(DELIVER, ts_ms, [number]), *events_of(ACK, ts_ms, [acked] if acked >= 0 else [])]
    return events, {3: count}


def displaced():
    """Ten ranges of 14 bytes take the place of ten of 18, which are not durable then: there is no room for 12 more."""
    events = []
    for ts_ms, entries in ((1_000, range(20_000, 20_020, 2)), (1_100, range(2, 22, 2))):
        events += [*events_of(DELIVER, ts_ms, entries), *events_of(ACK, ts_ms, entries)]
    return [*events, *events_of(DELIVER, 1_120, range(31, 43))], {3: 30_000}


def acked_alone():
    return [each for number in range(40) for each in events_of(ACK, 1_000 + number, [2 * number])], {3: 80}


def waited():
    acks = [*events_of(ACK, 1_010, range(7)), *events_of(ACK, 2_000, range(7, 10))]
    return [*events_of(DELIVER, 1_000, range(10)), *acks], {3: 10}


# A trace, the limit and other settings of its policy, and the least and the largest share of its events taken at once.
RUNS = [
    *((traffic(600), 1_000_000, found, 1, 1)
      for found in ({}, {"become_old_ack_record_seconds": 1}, {"range_count_max": 2})),
    (traffic(600), 2_500, {}, 0.5, 1),
    (traffic(600), 900, {}, 0.001, 0.5),
    (acked_alone(), 100, {}, 0.01, 1),
    (displaced(), 320, {"range_count_max": 10, "format": "PULSAR"}, 0.01, 1),
    (waited(), 100, {"flush_interval_ms": 5_000}, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize(("trace", "limit", "found", "shares"), [(*row[:3], row[3:]) for row in RUNS])
def test_far_below_the_limit_all_are_taken_at_once_and_at_it_none(taken_at_once, trace, limit, found, shares):
    policy = policy_of(limit, **{"flush_interval_ms": 50, **found})
    share = taken_at_once(trace, policy, [17]) / len(trace[0])
    assert shares[0] <= share <= shares[1]


runs = st.lists(st.tuples(st.integers(0, 2), st.sampled_from((0, 1, 127, 128, 16_383, 70_000)), st.integers(0, 3)))


@given(runs, runs)
def test_what_is_on_its_way_is_the_same_told_at_once_or_one_by_one(sent, settled):
    one, many = InFlightSet(), InFlightSet()
    told = [{}, {}]
    for which, found in enumerate((sent, settled)):
        for ledger_id, first, more in found:
            told[which].setdefault(ledger_id, BitMap()).update(range(first, first + more))
    many.change(*told)
    for ledger_id, entries in told[0].items():
        for entry in entries:
            one.change({ledger_id: BitMap([entry])}, {})
    for ledger_id, entries in told[1].items():
        for entry in entries:
            one.change({}, {ledger_id: BitMap([entry])})
    for each in (one, many):
        each._check()
    assert all(one.entries(ledger_id) == many.entries(ledger_id) for ledger_id in range(3))
    assert (one.reserved_bytes, one.unacked_of(CONSUMER)) == (many.reserved_bytes, many.unacked_messages)
