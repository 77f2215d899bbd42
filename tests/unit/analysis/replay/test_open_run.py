"""Runs of events taken at once, where the gate is sure to stay open, against each event taken by itself."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

import montecarlo
from ackstate.analysis.replay.gated_replay import (
    CONSUMER,
    GatedReplay,
    InFlightSet,
    OpenRun,
    delivery_costs,
    worst_case,
)
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.position import Position
from gated_runs import POLICIES, TakenEvents, anything, curve_of, policy_of, traffic
from strategies import few


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch, caplog):
    monkeypatch.setattr("ackstate.limits.rules.RECORD_BYTES_LIMIT_MIN", 1)
    caplog.set_level(logging.ERROR)


@pytest.fixture
def taken(monkeypatch):
    return TakenEvents(monkeypatch)


def assert_same(taken, trace, policy, sizes=()):
    """Return how many events were taken at once."""
    events, log = trace
    taken.set(run_min=1, steps=2)
    at_once = curve_of(events, policy, log, sizes)
    count = taken.at_once
    taken.set(run_min=10**9, steps=2)
    stepped = curve_of(events, policy, log, sizes)
    assert taken.at_once == 0
    assert montecarlo.first_difference(at_once[0], stepped[0]) is None, policy
    assert at_once[1] == stepped[1], policy
    return count


SIZES = st.lists(st.integers(0, 30), max_size=3)


@pytest.mark.slow
def test_runs_taken_at_once_are_as_each_event(taken):
    """With promotions, crashes, restarts and resets."""
    counts = []

    @settings(max_examples=few.max_examples // 2)
    @given(st.one_of(anything(), montecarlo.small_traces()), POLICIES, SIZES)
    def agree(trace, found, sizes):
        counts.append(assert_same(taken, trace, Policy.from_mapping(found), sizes))

    agree()
    assert sum(counts) > 0


@pytest.mark.parametrize("found", [{}, {"become_old_ack_record_seconds": 1}, {"range_count_max": 2}])
def test_far_below_the_limit_no_event_is_taken_by_itself(taken, found):
    events, log = traffic(600)
    taken.set(run_min=1, steps=64)
    curve_of(events, policy_of(1_000_000, **found), log, [100])
    assert (taken.one_by_one, taken.at_once) == (0, len(events))


def test_near_the_limit_most_are_taken_at_once_and_at_it_none(taken):
    trace = traffic(600)
    assert assert_same(taken, trace, policy_of(2_500)) > len(trace[0]) // 2
    assert 0 < assert_same(taken, trace, policy_of(900)) < len(trace[0]) // 2


def test_it_catches_a_bound_that_leaves_out_what_is_acked_only(taken, monkeypatch):
    events = [Event(1_000 + number, EventKind.ACK, 3, 2 * number, 2 * number) for number in range(40)]
    trace = events, {3: 80}
    assert assert_same(taken, trace, policy_of(100)) > 0

    def bound(run):
        return sum(worst_case(ledger_id, bitmap - run.acked[ledger_id]) for ledger_id, bitmap in run.sent.items())

    monkeypatch.setattr(OpenRun, "record_bytes", property(bound))
    with pytest.raises(AssertionError):
        assert_same(taken, trace, policy_of(100))


def test_it_catches_a_bound_without_what_is_on_its_way(taken, monkeypatch):
    monkeypatch.setattr(OpenRun, "record_bytes", property(lambda run: 0))
    monkeypatch.setattr(
        "ackstate.analysis.replay.gated_replay.delivery_costs", lambda events: delivery_costs(events) // 2
    )
    with pytest.raises(AssertionError):
        assert_same(taken, traffic(600), policy_of(900))


def test_it_catches_a_run_that_goes_on_beyond_a_persist_that_displaces(taken, monkeypatch):
    """Ten ranges of 14 bytes take the place of ten of 18, which are not durable then: there is no room for 12 more."""
    high, low, later = range(20_000, 20_020, 2), range(2, 22, 2), range(31, 43)
    events = []
    for ts_ms, entries in ((1_000, high), (1_100, low)):
        events += [Event(ts_ms, EventKind.DELIVER, 3, entry, entry) for entry in entries]
        events += [Event(ts_ms, EventKind.ACK, 3, entry, entry) for entry in entries]
    events += [Event(1_120, EventKind.DELIVER, 3, entry, entry) for entry in later]
    trace, policy = (events, {3: 30_000}), policy_of(320, range_count_max=10, format="PULSAR")
    assert assert_same(taken, trace, policy, [20]) > 0
    begin = GatedReplay._begin

    def outlasting(self):
        begin(self)
        self._outlasts_persists = True

    monkeypatch.setattr(GatedReplay, "_begin", outlasting)
    with pytest.raises(AssertionError):
        assert_same(taken, trace, policy, [20])


def test_it_catches_an_ack_at_once_of_a_message_that_had_waited(taken, monkeypatch):
    events = [Event(1_000, EventKind.DELIVER, 3, number, number) for number in range(10)]
    events += [Event(1_010 if number < 7 else 2_000, EventKind.ACK, 3, number, number) for number in range(10)]
    trace, policy = (events, {3: 10}), policy_of(100, flush_interval_ms=5_000)
    assert_same(taken, trace, policy, [17])
    monkeypatch.setattr(GatedReplay, "_moves_any", lambda self, acked: False)
    with pytest.raises(AssertionError):
        assert_same(taken, trace, policy, [17])


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
            position = Position(ledger_id, entry)
            one.add_one(position, worst_case(ledger_id, BitMap([entry])))
    for ledger_id, entries in told[1].items():
        for entry in entries & told[0].get(ledger_id, BitMap()):
            one.complete(Position(ledger_id, entry))
    for each in (one, many):
        each._check()
    assert all(one.entries(ledger_id) == many.entries(ledger_id) for ledger_id in range(3))
    assert (one.reserved_bytes, one.unacked_of(CONSUMER)) == (many.reserved_bytes, many.unacked_messages)
