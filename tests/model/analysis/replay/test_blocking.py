"""A gate that stops dispatch, replayed: against the real subscription, given the same messages and acks."""

from __future__ import annotations

import heapq
import logging
from contextlib import suppress
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.cursor_replay import StoreWithoutLedgers
from ackstate.analysis.replay.gated_replay import GatedReplay
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recorder import Frame
from ackstate.cursor.cursor import ManagedCursor
from ackstate.dispatch.subscription import Subscription
from ackstate.limits.gate import DispatchGate, GateLimits
from ackstate.message import Message
from ackstate.position import Position
from ackstate.stores.base import StoreError
from ackstate.stores.memory import MemoryStore
from ackstate.topic.log import MessageLog
from chunks import chunk_of
from strategies import few

NAMES = {"topic": "t", "subscription": "s"}
ENTRIES_PER_LEDGER = 40
MESSAGES = 120
TAIL_MS = 600


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch, caplog):
    monkeypatch.setattr("ackstate.limits.rules.RECORD_BYTES_LIMIT_MIN", 1)
    # So that such small traces are taken in runs where the gate stays open, and one by one elsewhere.
    monkeypatch.setattr("ackstate.analysis.replay.gated_replay._RUN_MIN", 2)
    monkeypatch.setattr("ackstate.analysis.replay.gated_replay._STEPS", 3)
    caplog.set_level(logging.ERROR)


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
            store = StoreWithoutLedgers(store)
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
            if event.kind == EventKind.DELIVER:
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
                events.append(Event(ts_ms, EventKind.DELIVER, *position, position.entry_id, 1))
                open_ones.append(position)
                sent += 1
        elif open_ones:
            position = open_ones.pop(chance.randrange(len(open_ones)))
            events.append(Event(ts_ms, EventKind.ACK, *position, position.entry_id, 1))
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
    counts = {}
    for position in new_log(MemoryStore())[1]:
        counts[position.ledger_id] = position.entry_id + 1
    replay, begin, last = SubscriptionReplay([policy], counts), 0, {}
    parts = []
    for size in [*sizes, len(events)]:
        if events[begin : begin + size]:
            parts += replay.take(chunk_of(events[begin : begin + size]))
        begin += size
    for points in [*parts, *replay.end(end_ms)]:
        last.update(zip(points.ts_ms.tolist(), points.value.tolist(), strict=True))
    value, curve = 0, {}
    for now_ms in range(events[0].ts_ms, end_ms + 1):
        curve[now_ms] = value = last.get(now_ms, value)
    seen = observe(events, policy, end_ms=end_ms)
    # Two dictionaries that differ would be told in full, which takes minutes.
    differing = [now_ms for now_ms in curve if curve[now_ms] != seen.at_end.get(now_ms)]
    assert (differing[:1], len(curve)) == ([], len(seen.at_end)), policy.label
    costs = replay.curves[0].costs
    assert (costs.blocked_ms, costs.write_count) == (seen.blocked_ms, seen.write_count), policy.label


test_every_instant_agrees_with_a_real_subscription = pytest.mark.slow(
    few(given(gated_traces(), POLICIES, SIZES)(assert_agreement))
)


def test_young_acks_are_persisted_early_rather_than_stopping_dispatch():
    _, positions = new_log(MemoryStore())
    events = []
    for number, position in enumerate(positions[1:60:2]):
        before = positions[2 * number]
        events += [Event(1_000 + number, EventKind.DELIVER, *each, each.entry_id) for each in (before, position)]
        events.append(Event(1_000 + number, EventKind.ACK, *position, position.entry_id))
    held = {"become_old_ack_record_seconds": 1, "flush_interval_ms": 50}
    assert_agreement(events, {**held, "max_unpersisted_ack_record_bytes": 300}, [])
    replay = SubscriptionReplay([Policy.from_mapping({**held, "max_unpersisted_ack_record_bytes": 300})], {
        each.ledger_id: each.entry_id + 1 for each in positions
    })  # fmt: skip
    replay.take(chunk_of(events))
    free = SubscriptionReplay([Policy.from_mapping(held)], {each.ledger_id: each.entry_id + 1 for each in positions})
    free.take(chunk_of(events))
    # 30 acks alone take more; the young ones would all be lost.
    assert free.curves[0].sum.peak == 30
    assert replay.curves[0].sum.peak < 30


def cut_by_a_promotion():
    """For want of room an ack is persisted early, but no ledger can be written and no range may be elsewhere."""
    delivered_ms = (1_000, 1_000, 1_000, 1_001, 1_401)
    events = [Event(now_ms, EventKind.DELIVER, 1, each, each) for each, now_ms in enumerate(delivered_ms)]
    events.insert(4, Event(1_400, EventKind.ACK, 1, 2, 2))
    policy = {"become_old_ack_record_seconds": 1, "flush_interval_ms": 0, "max_unpersisted_ack_record_bytes": 60}
    return events, {**policy, "format": "PULSAR", "range_count_max": 0, "ledger_writable": "false"}


def test_what_a_promotion_cut_off_is_tried_again_at_the_tick_of_its_millisecond():
    assert_agreement(*cut_by_a_promotion(), [])


def tried_in_vain():
    """Where a ledger cannot be written there is room for one range; the lowest must not take the place of a wider."""
    acks = {3_000: range(10, 20), 3_001: [2], 3_050: [4], 3_450: [0, 1, 3, *range(5, 10)]}
    events = [Event(1_000, EventKind.DELIVER, 1, each, each) for each in range(20)]
    events += [Event(now_ms, EventKind.ACK, 1, each, each) for now_ms, entries in acks.items() for each in entries]
    policy = {"ledger_writable": "false", "format": "PULSAR", "metadata_bytes_max": 50, "flush_interval_ms": 400}
    return events, {**policy, "max_unpersisted_ack_record_bytes": 400}


@pytest.mark.parametrize("rate", [1, 20])
def test_what_a_permit_let_through_in_vain_waits_for_the_flush(rate):
    events, policy = tried_in_vain()
    assert_agreement(events, {**policy, "mark_delete_rate_limit": rate}, [])


def the_end_of_a_ledger():
    """Four young ranges of 14 bytes and five messages on their way leave 4 of 130; the next ledger's first takes 23."""
    _, positions = new_log(MemoryStore())
    events = []
    for now_ms, position in enumerate(positions[: ENTRIES_PER_LEDGER + 1], start=1_000):
        events.append(Event(now_ms, EventKind.DELIVER, *position, position.entry_id))
        if position.entry_id % 8 != 7 and position.ledger_id == positions[0].ledger_id:
            events.append(Event(now_ms, EventKind.ACK, *position, position.entry_id))
    policy = {"become_old_ack_record_seconds": 1, "flush_interval_ms": 5_000, "max_unpersisted_ack_record_bytes": 130}
    return events, policy


def test_at_the_end_of_a_ledger_young_acks_make_room_for_the_first_message_of_the_next():
    assert_agreement(*the_end_of_a_ledger(), [])


def test_what_waits_when_the_process_dies_is_acked_when_it_is_back():
    policy = Policy.from_mapping({"max_unpersisted_ack_record_bytes": 40, "flush_interval_ms": 10_000})
    events = [Event(1_000 + each, EventKind.DELIVER, 3, each, each) for each in range(9)]
    events += [Event(1_100, EventKind.ACK, 3, each, each) for each in (0, 2, 4, 6, 8)]
    events += [Event(1_200, EventKind.CRASH), Event(1_300, EventKind.RECOVER)]
    replay = SubscriptionReplay([policy], {3: 9})
    points = [*replay.take(chunk_of(events)), *replay.end(1_400)]
    # Two reservations fill 40 bytes: no others were sent, and only entry 0 was acked before the crash.
    at_crash = [value for each in points for ts_ms, value in zip(each.ts_ms, each.value, strict=True) if ts_ms == 1_100]
    assert at_crash[-1] <= 2
    assert replay.curves[0].costs.blocked_ms >= 190


@pytest.mark.parametrize("last_ms", [1_000, 1_001, 3_000])
def test_dispatch_is_not_blocked_for_longer_than_the_trace(last_ms):
    """Two messages fill the limit in the first millisecond, and nothing is ever acked."""
    policy = Policy.from_mapping({"max_unpersisted_ack_record_bytes": 40, "flush_interval_ms": 10_000})
    events = [Event(1_000, EventKind.DELIVER, 3, each, each) for each in range(9)]
    replay = SubscriptionReplay([policy], {3: 9})
    replay.take(chunk_of([*events, Event(last_ms, EventKind.DELIVER, 3, 8, 8)]))
    replay.end(last_ms)
    assert replay.curves[0].costs.blocked_ms == last_ms - 1_000
    # Another day goes on where it was left.
    replay.end(last_ms + 500)
    assert replay.curves[0].costs.blocked_ms == last_ms - 500


def test_no_result_is_blocked_for_longer_than_the_trace(tmp_path):
    """Two subscriptions wait at the same time, one of them for half of it."""
    policy = Policy.from_mapping({"max_unpersisted_ack_record_bytes": 40, "flush_interval_ms": 10_000})
    frames = [
        Frame("persistent://a/b/t", name, [Event(begin_ms, EventKind.DELIVER, 3, each, each) for each in range(9)])
        for name, begin_ms in (("s", 1_000), ("r", 2_000))
    ]
    frames.append(Frame("persistent://a/b/t", "idle", [Event(3_000, EventKind.DELIVER, 3, 0, 0)]))
    parquet.write_trace(frames, tmp_path / "trace")
    rows = estimates(LocalSource.of(tmp_path / "trace"), [policy]).collect()
    found = {row["subscription"] or row["scope"]: row["blocked_ms"] for row in rows}
    assert found == {"s": 2_000, "r": 1_000, "idle": 0, "topic": 2_000, "namespace": 2_000, "total": 2_000}


def test_an_ack_without_a_delivery_is_delivered_when_it_is_acked():
    policy = Policy.from_mapping({"max_unpersisted_ack_record_bytes": 100, "flush_interval_ms": 50})
    events = [Event(1_000, EventKind.ACK, 3, each, each) for each in range(0, 40, 2)]
    replay = SubscriptionReplay([policy], {3: 40})
    points = [*replay.take(chunk_of(events)), *replay.end(2_000)]
    lost = max(value for each in points for value in each.value.tolist())
    # A range of its own takes 14 bytes; that of entry 0 is the mark-delete position, and takes none.
    assert lost == 1 + 100 // 14
    assert replay.curves[0].costs.blocked_ms >= 100


def acks_under(policy, events):
    """Return when which entries are acked under a policy that blocks, by ledger 3."""
    replay = GatedReplay(Policy.from_mapping(policy), {3: 40}, opened_ms=1_000)
    happened, _ = replay.take(chunk_of(events), until_ms=9_000, blocked_until_ms=9_000)
    acks = happened.kind == EventKind.ACK
    return dict(zip(happened.first_entry[acks].tolist(), happened.ts_ms[acks].tolist(), strict=True))


def test_a_message_that_waited_is_acked_by_its_second_ack_if_that_comes_first():
    """Two messages fill the limit until a persist at 1,100 ms lets the third go, 101 ms late."""
    policy = {"max_unpersisted_ack_record_bytes": 40, "flush_interval_ms": 100}
    events = [Event(1_000, EventKind.DELIVER, 3, each, each) for each in (5, 7, 9)]
    events += [Event(1_010, EventKind.ACK, 3, each, each) for each in (5, 7)]
    once = [*events, Event(1_190, EventKind.ACK, 3, 9, 9)]
    assert acks_under(policy, once) == {5: 1_010, 7: 1_010, 9: 1_291}
    assert acks_under(policy, [*once, Event(1_200, EventKind.ACK, 3, 9, 9)])[9] == 1_200
    assert acks_under(policy, [*once, Event(1_300, EventKind.ACK, 3, 9, 9)])[9] == 1_291
