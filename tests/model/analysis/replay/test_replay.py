"""The replay in arrays against the real cursor, crashed at every instant; and that this comparison can fail."""

from __future__ import annotations

import logging
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import montecarlo
from ackstate.analysis.replay.acked import AckAccumulator
from ackstate.analysis.replay.cursor_replay import CursorReplay, PersistTicks
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.cursor.cursor import ManagedCursor
from ackstate.cursor.view import CursorView
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.stores.base import StoreError
from ackstate.stores.memory import MemoryStore
from chunks import chunk_of
from replay_runs import GRIDS, PLAIN, SIZES, assert_agreement, replayed
from strategies import few


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR)


test_every_instant_agrees_with_a_real_cursor = pytest.mark.slow(
    few(given(montecarlo.small_traces(), GRIDS, SIZES)(assert_agreement))
)
test_every_instant_of_a_plain_policy_agrees = pytest.mark.slow(
    few(given(montecarlo.small_traces(), PLAIN, SIZES)(assert_agreement))
)


# Acks given at once may leave a bitmap in another form: where a limit on bytes decides, a size that has none.
NO_LEDGER = {"ledger_writable": "false", "format": "PULSAR", "range_form": "LIST"}
# A record too large for the metadata store is tried in vain, often because a permit admits it.
IN_VAIN = st.lists(st.fixed_dictionaries(
    {
        "mark_delete_rate_limit": st.sampled_from((3, 20, 500)),
        "metadata_bytes_max": st.sampled_from((45, 60, 75)),
        "flush_interval_ms": st.sampled_from((30, 400)),
    },
    optional={
        "tick_ms": st.sampled_from((1, 7, 50)),
        "metadata_range_count_max": st.sampled_from((1, 3)),
        "keep": st.sampled_from(("LOWEST", "WIDEST")),
        "become_old_ack_record_seconds": st.sampled_from((1, 2)),
        "ledger_retry_ms": st.sampled_from((0, 10, 1_000)),
    },
).map(lambda found: Policy.from_mapping({**NO_LEDGER, **found})), min_size=1, max_size=2)  # fmt: skip


@st.composite
def acks_anywhere(draw):
    """Messages sent at once, of which single ones and stretches are acked, the lowest no sooner than others."""
    chance = draw(st.randoms(use_true_random=False))
    ts_ms, events = 1_000, deliveries(1_000, range(40))
    for _ in range(draw(st.integers(5, 30))):
        ts_ms += chance.choice((0, 1, 1, 3, 20, 300))
        first = chance.randrange(40)
        events.append(Event(ts_ms, EventKind.ACK, 3, first, min(first + chance.choice((0, 0, 1, 9)), 39)))
    return events, {3: 60}


@pytest.mark.slow
def test_every_instant_agrees_where_persists_fail(monkeypatch):
    before_flush = []
    failed = PersistTicks.failed

    def counted(self, at_ms):
        before_flush.append(at_ms < self.flush_at)
        failed(self, at_ms)

    monkeypatch.setattr(PersistTicks, "failed", counted)
    acks = [(1_020, 33, 33), (1_021, 31, 31), (1_021, 30, 39), (1_021, 16, 16), (1_022, 12, 12)]
    events = deliveries(1_000, range(40)) + [Event(ts_ms, EventKind.ACK, 3, *entries) for ts_ms, *entries in acks]
    found = {"mark_delete_rate_limit": 500, "metadata_bytes_max": 60, "flush_interval_ms": 400}
    policy = Policy.from_mapping({**NO_LEDGER, **found, "ledger_retry_ms": 1_000})
    assert_agreement((events, {3: 60}), [policy], [])
    assert any(before_flush)
    assert not all(before_flush)
    third = settings(max_examples=few.max_examples // 3, derandomize=few.max_examples < 300)
    third(given(acks_anywhere(), IN_VAIN, SIZES)(assert_agreement))()


def sent(ledger_id, count, at_ms=0):
    return [Event(at_ms, EventKind.DELIVER, ledger_id, entry, entry) for entry in range(count)]


# Events and the setting of a policy, each with the name of the bug that it would tell of.
STORIES = {
    "flushes_so_long_after_the_ack": (
        [*sent(1, 1), Event(0, EventKind.ACK, 1, 0, 0), *sent(2, 4)],
        {"flush_interval_ms": 1, "tick_ms": 7},
    ),
    "looks_at_young_acks_once": (
        [*sent(2, 3), Event(0, EventKind.ACK, 2, 1, 1), *sent(2, 5, 1_500)[4:], *sent(2, 6, 3_000)[5:]],
        {"flush_interval_ms": 1, "become_old_ack_record_seconds": 1},
    ),
    "goes_on_with_the_flush_interval_after_a_reset": (
        [
            *sent(2, 3), Event(0, EventKind.ACK, 2, 1, 1), Event(10, EventKind.RESET, 2, 0, 0),
            Event(20, EventKind.ACK, 2, 1, 1),
        ],
        {"flush_interval_ms": 30},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("events", "setting"), STORIES.values(), ids=STORIES)
def test_each_story_agrees(events, setting):
    policies = [Policy.from_mapping({"compaction_bytes_min": 100, **setting})]
    assert_agreement((events, {event.ledger_id: 1 for event in events} | {2: 60}), policies, [])


def test_a_trace_begins_with_what_its_cursor_found():
    events = [
        Event(5, EventKind.RECOVER, 3, 0, 4),
        Event(5, EventKind.RECOVER, 3, 7, 7),
        Event(9, EventKind.ACK, 3, 5, 5),
    ]
    policies = [Policy(), Policy.from_mapping({"range_count_max": 0})]
    curves, _ = replayed(events, policies, {3: 9}, sizes=[1], end_ms=20)
    # Without room for ranges, entry 7 comes back from the start.
    assert curves == [dict.fromkeys(range(5, 9), lost) | dict.fromkeys(range(9, 21), lost + 1) for lost in (0, 1)]


def deliveries(ts_ms, entries):
    return [Event(ts_ms, EventKind.DELIVER, 3, entry, entry) for entry in entries]


def too_large_for_the_metadata_store():
    """There is room for one range; the lowest would take the place of a wider one that is durable, and so none may.

    Where there is a permit, the acks at 3001 and 3050 are tried in vain at once, and not again before 3400, when the
    flush interval is over; from then on at every tick.
    """
    acks = {3_000: (10, 19), 3_001: (2, 2), 3_050: (4, 4), 3_450: (0, 9)}
    events = deliveries(1_000, range(20)) + [Event(ts_ms, EventKind.ACK, 3, *run) for ts_ms, run in acks.items()]
    return (events, {3: 30}), {**NO_LEDGER, "metadata_bytes_max": 50, "flush_interval_ms": 400}


@pytest.fixture
def failed_ms(monkeypatch):
    """When ticks failed, of replays and of real cursors, one after another."""
    found = []
    tick = ManagedCursor.tick

    def told(cursor, *, now_ms):
        try:
            return tick(cursor, now_ms=now_ms)
        except StoreError:
            found.append(now_ms)
            raise

    monkeypatch.setattr(ManagedCursor, "tick", told)
    return found


@pytest.mark.parametrize(("rate", "tried_ms"), [(0, []), (1, [3_001]), (20, [3_001, 3_050])])
def test_what_a_permit_let_through_in_vain_waits_for_the_flush(rate, tried_ms, failed_ms):
    trace, found = too_large_for_the_metadata_store()
    assert_agreement(trace, [Policy.from_mapping({**found, "mark_delete_rate_limit": rate})], [])
    assert failed_ms == 2 * [*tried_ms, *range(3_400, 3_450)]


def refused_when_they_become_old():
    """60 ranges fill the metadata store; when wider numbers become old, as many as are tried are fewer than those.

    A ledger is tried then in vain for the second time, and so both are tried again a second later.
    """
    low, high = range(1, 120, 2), range(16_400, 16_520, 2)
    events = [*deliveries(1_000, [120]), *deliveries(2_500, [16_520])]
    events += [Event(2_600, EventKind.ACK, 3, entry, entry) for entry in (*low, *high)]
    events += [Event(4_600, EventKind.ACK, 3, 0, 119)]
    found = {"metadata_bytes_max": 870, "become_old_ack_record_seconds": 1, "flush_interval_ms": 30}
    return (events, {3: 17_000}), Policy.from_mapping({**NO_LEDGER, **found})


def test_what_became_old_in_vain_is_tried_again_with_the_ledger(failed_ms):
    trace, policy = refused_when_they_become_old()
    assert_agreement(trace, [policy], [])
    assert failed_ms == 2 * [3_500, 4_500]


def held_until(events, age):
    """Return until when acks are not durable that are young at first, as a real cursor has it, too."""
    policy = Policy.from_mapping({"flush_interval_ms": 50, "become_old_ack_record_seconds": age})
    assert_agreement((events, {3: 40}), [policy], [])
    (curve,), _ = replayed(events, [policy], {3: 40}, sizes=[], end_ms=events[-1].ts_ms + 3_000)
    return max(now_ms for now_ms, count in curve.items() if count)


def test_what_is_delivered_again_after_a_reset_becomes_old_again():
    events = [
        *deliveries(1_000, range(6)),
        Event(1_100, EventKind.RESET),
        *deliveries(1_200, range(4)),
        Event(1_201, EventKind.ACK, 3, 2, 2),
        Event(2_100, EventKind.PUBLISH),
    ]
    assert held_until(events, 1) == 2_199


def assert_same_ruler(chance, age, *, ack_share, count=658):
    """Compare with a cursor that is ticked each millisecond, with far more deliveries than its ruler has marks."""
    events, now_ms = [], 1_000
    for entry in range(count):
        now_ms += chance.choice((0, 1, 2, 9))
        events += deliveries(now_ms, [entry])
        if chance.random() < ack_share:
            acked = max(0, entry - chance.choice((1, 30, 200)))
            events.append(Event(now_ms, EventKind.ACK, 3, acked, acked))
    policy = Policy.from_mapping({"flush_interval_ms": 20, "become_old_ack_record_seconds": age})
    assert_agreement((events, {3: 700}), [policy], [200])
    replay = CursorReplay(policy, {3: 700}, opened_ms=1_000)
    chunk = chunk_of(events)
    replay.take_events(chunk, AckAccumulator().take(chunk), until_ms=now_ms + 1)
    real = ManagedCursor.open(
        MemoryStore(), topic="t", subscription="s", ledgers=LedgerMap.from_counts({3: 700}), config=policy.cursor,
        now_ms=1_000,
    )  # fmt: skip
    waiting = list(events)
    for each_ms in range(1_000, now_ms + 1):
        while waiting and waiting[0].ts_ms == each_ms:
            event = waiting.pop(0)
            position = Position(3, event.first_entry)
            if event.kind == EventKind.DELIVER:
                real.delivered(position, now_ms=each_ms)
            else:
                real.ack(position, now_ms=each_ms)
        real.tick(now_ms=each_ms)
    young, other = real.young_age, replay.cursor.young_age
    assert young.ruler.marks() == other.ruler.marks()
    ages = [young.ruler.old_up_to(young.age_ms, now_ms + later) for later in range(1, 1_500, 7)]
    assert ages == [other.ruler.old_up_to(other.age_ms, now_ms + later) for later in range(1, 1_500, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("ack_share", [0, 0.005, 0.5])
def test_a_ruler_that_was_thinned_says_the_same(ack_share):
    assert_same_ruler(Random(7), 1, ack_share=ack_share)


def test_where_nothing_is_acked_the_ruler_is_hardly_asked(monkeypatch):
    asked = []
    is_due = CursorView.is_persist_due
    monkeypatch.setattr(
        CursorView, "is_persist_due", lambda self, *, now_ms: asked.append(now_ms) or is_due(self, now_ms=now_ms)
    )
    policy = Policy.from_mapping({"flush_interval_ms": 20, "become_old_ack_record_seconds": 1})
    chunk = chunk_of([each for entry in range(4_000) for each in deliveries(1_000 + entry, [entry])])
    CursorReplay(policy, {3: 4_000}, opened_ms=1_000).take_events(chunk, AckAccumulator().take(chunk), until_ms=5_000)
    assert len(asked) < 60
