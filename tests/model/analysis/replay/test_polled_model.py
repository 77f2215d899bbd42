"""The bounds of a trace of polls enclose the truth: of a simulated cursor of Pulsar, and of placements of events."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

import montecarlo
from ackstate import Position
from ackstate.analysis.pulsar.cursor_look import CursorLook
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace.events import Event, EventKind, PolledEvent
from ackstate.deleted_ranges import DeletedRanges
from polled_truth import SIZES, T0_MS, at, bounds, events_of, truth
from strategies import few

ACKS = {EventKind.ACK, EventKind.MARK_DELETE}


def first_outside(low, high, instants):
    """Return the first instant (ms, least, most) that is not between two curves, with both; None without one."""
    times = [ts_ms for ts_ms, _, _ in instants]
    for (ts_ms, least, most), below, above in zip(instants, at(low, times), at(high, times), strict=True):
        if not below <= least <= most <= above:
            return ts_ms - T0_MS, below, least, most, above
    return None


def judged(seed, **settings):
    """Record a simulated life, and return the first instant outside its bounds, and the bounds."""
    polls, instants = truth(seed, **settings)
    events, rng = events_of(polls), random.Random(seed)
    ((low, high),), replay = bounds(events, sizes=[rng.randint(1, 40) for _ in range(30)])
    seen = [each for each in instants if polls[0].answered_ms <= each[0] <= events[-1].ts_ms]
    return first_outside(low, high, seen), (low, high), replay


@few
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans())
def test_the_bounds_enclose_a_simulated_cursor(seed, has_limit, has_restarts, knows_load):
    """Writes under way, limits, new ledgers, crashes and seeks; the redelivery of a crash at every millisecond."""
    outside, _, _ = judged(seed, has_limit=has_limit, has_restarts=has_restarts, knows_load=knows_load)
    assert outside is None


def test_the_bounds_are_not_trivial():
    """The high end falls when acks become durable, and the low end is above 0 while nothing is written."""
    shares = []
    for seed in range(6):
        _, (low, high), replay = judged(seed, has_restarts=False)
        acked = max(value for _, value in high)
        shares.append(high[-1][1] < acked)
        assert replay.curves[0].sum.peak >= replay.curves[0].low.sum.peak
        assert [ts_ms for ts_ms, _ in low] == sorted(ts_ms for ts_ms, _ in low)
    assert any(shares)


# --- Every placement of the events of a trace


def placed(events, rng):
    """Place each event within its interval; yield (ms, redelivered entries) after each of them, in order of time.

    Events of one poll never come before those of an earlier poll, unless they are records that cover no ack for
    certain. One cursor's records become durable one after another.
    """
    acked, durable, certain, moments = {}, set(), set(), []
    by_order = []
    poll_ms, earliest_ms = 0, 0  # the end of the latest poll's interval, and the last moment of those before it
    record_ms = 0  # the moment of the latest record
    for number, event in enumerate(events):
        if event.until_ms > poll_ms:
            poll_ms, earliest_ms = event.until_ms, max((when for when, *_ in moments), default=0)
        is_record = event.kind == EventKind.PERSIST_SEEN
        begin_ms = max(event.ts_ms, record_ms) if is_record else event.ts_ms
        if not is_record or event.number >= 0:
            begin_ms = max(begin_ms, earliest_ms)
        when = rng.choice([begin_ms, event.until_ms, rng.randint(begin_ms, event.until_ms)])
        if event.kind in ACKS:
            for entry in range(event.first_entry, event.last_entry + 1):
                acked[event.ledger_id, entry] = event.until_ms
                moments.append((when, number, "ack", (event.ledger_id, entry)))
                by_order.append((event.ledger_id, entry))
        elif is_record:
            cut = set()
            for other in events[number + 1 :]:
                if other.kind != EventKind.CUT_OFF:
                    break
                cut |= {(other.ledger_id, entry) for entry in range(other.first_entry, other.last_entry + 1)}
            sure = {each for each, until_ms in acked.items() if until_ms <= event.number} - cut
            record_ms = when
            moments.append((when, number, "persist", (sure, cut, frozenset(by_order))))
    present = set()
    for when, _, what, found in sorted(moments, key=lambda each: each[:2]):
        if what == "ack":
            present.add(found)
        else:
            sure, cut, earlier = found
            lost = {each for each in cut if rng.random() < 0.5}
            certain = (certain | sure) - cut if cut or sure else certain
            maybe = {each for each in earlier & present if rng.random() < 0.5}
            durable = ((durable - lost) | maybe | certain) & present
        yield when, len(present - durable)


@few
@given(st.integers(0, 10**6), st.booleans())
def test_the_bounds_enclose_every_placement(seed, has_limit):
    """Acks anywhere in their intervals; a persist anywhere in its own, with any of the acks that it may cover."""
    polls, _ = truth(seed, has_limit=has_limit, has_restarts=False, length_ms=4_000)
    events = events_of(polls)
    ((low, high),), _ = bounds(events)
    rng = random.Random(seed)
    for _ in range(5):
        after = dict(placed(events, rng))
        instants = [(ts_ms, count, count) for ts_ms, count in after.items() if ts_ms <= events[-1].ts_ms]
        assert first_outside(low, high, instants) is None


def test_the_records_of_one_poll_become_durable_in_the_order_of_the_trace():
    """A new cursor ledger has two entries at once: the first lacks the range, the second, which counts, has it."""
    range_ = DeletedRanges()
    range_.add(Position(6, 3))
    first = CursorLook(SIZES, Position(3, -1), range_, state="NoLedger", asked_ms=T0_MS, answered_ms=T0_MS + 10)
    events = events_of([
        first, replace(first, asked_ms=T0_MS + 50, answered_ms=T0_MS + 60, state="Open", cursor_ledger=9, last_entry=1)
    ])  # fmt: skip
    ((low, high),), _ = bounds(events, end_ms=T0_MS + 60)
    assert at(high, [T0_MS + 59, T0_MS + 60]) == [1, 0]
    for seed in range(20):
        after = dict(placed(events, random.Random(seed)))
        assert first_outside(low, high, [(ts_ms, count, count) for ts_ms, count in after.items()]) is None


# --- Policies


def polled_acks(seed):
    """Return acks with their times, the same as polls show them, and the topic's ledger."""
    rng = random.Random(seed)
    count = rng.randint(5, 40)
    entries = rng.sample(range(count), count) if rng.random() < 0.5 else list(range(count))
    times = sorted(rng.randint(10, 400) for _ in entries)
    polled, asked_ms, seen_ms = [], 0, rng.randint(0, 5)
    while seen_ms < 500:
        next_ms = seen_ms + rng.randint(10, 60)
        later = next_ms + rng.randint(0, 5), next_ms + rng.randint(5, 10)
        polled += [
            PolledEvent(asked_ms, EventKind.ACK, 3, entry, entry, until_ms=later[1])
            for ts_ms, entry in zip(times, entries, strict=True)
            if seen_ms < ts_ms <= later[0]
        ]
        asked_ms, seen_ms = next_ms, later[0]
    acks = [Event(ts_ms, EventKind.ACK, 3, entry, entry) for ts_ms, entry in zip(times, entries, strict=True)]
    return acks, polled, {3: count}


@few
@given(st.integers(0, 10**6), st.integers(1, 60))
def test_a_policy_with_persists_at_fixed_times_is_enclosed(seed, tick_ms):
    """The oracle is the real cursor, ticked at every instant, with the acks at their true times."""
    policy = Policy.from_mapping({"flush_interval_ms": "1", "tick_ms": str(tick_ms)})
    acks, polled, log = polled_acks(seed)
    end_ms = acks[-1].ts_ms
    seen = montecarlo.observe(acks, policy, log, end_ms=end_ms)
    ((low, high),), _ = bounds(polled, [policy], log=log, end_ms=end_ms)
    times = list(range(acks[0].ts_ms, end_ms + 1))
    for ts_ms, below, above in zip(times, at(low, times), at(high, times), strict=True):
        assert below <= seen.at_end[ts_ms] <= above, ts_ms


def test_without_uncertainty_both_curves_are_the_exact_one():
    """Intervals of a single moment: low and high are the results of the replay of an exact trace."""
    acks, _, log = polled_acks(7)
    policy = Policy.from_mapping({"flush_interval_ms": "30"})
    exact = [PolledEvent(*event, until_ms=event.ts_ms) for event in acks]
    seen = montecarlo.observe(acks, policy, log, end_ms=500)
    ((low, high),), _ = bounds(exact, [policy], log=log, end_ms=500)
    times = list(range(acks[0].ts_ms, 501))
    expected = [seen.at_end[ts_ms] for ts_ms in times]
    assert at(low, times) == expected == at(high, times)
    assert max(expected) > 3


def test_a_chunk_border_between_a_persist_and_its_exceptions_changes_nothing():
    polls, _ = truth(2, has_limit=True)
    events = events_of(polls)
    (whole,), _ = bounds(events)
    for size in (1, 2, 3):
        (cut,), _ = bounds(events, sizes=[size] * len(events))
        times = sorted({ts_ms for curve in (*whole, *cut) for ts_ms, _ in curve})
        for mine, other in zip(cut, whole, strict=True):
            assert at(mine, times) == at(other, times)
    assert EventKind.CUT_OFF in {event.kind for event in events}
    assert set(SIZES) >= {event.ledger_id for event in events if event.kind in ACKS}
