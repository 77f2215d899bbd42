"""Messages taken at once while a gate stays open or stays shut, against each taken by itself."""

from __future__ import annotations

import logging
from itertools import pairwise

import numpy as np
import pytest
from gated_runs import POLICIES, Taken, curve_of, policy_of, traffic
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import montecarlo
from ackstate.analysis.redelivery import record_bytes, stretch
from ackstate.analysis.redelivery.gated_replay import GatedReplay
from ackstate.analysis.redelivery.policy import Policy
from ackstate.analysis.redelivery.stretch import Stretch
from ackstate.analysis.redelivery.subscription_replay import SubscriptionReplay
from ackstate.analysis.redelivery.waiting_line import NO_TIMES, Times, TimesKept, WaitingLine
from ackstate.analysis.trace.events import Event, EventKind
from chunks import chunk_of

LOG = {3: 60, 9: 50, 1_000: 200}


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch, caplog):
    monkeypatch.setattr("ackstate.limits.rules.RECORD_BYTES_LIMIT_MIN", 1)
    monkeypatch.setattr("ackstate.analysis.redelivery.gated_replay._BLOCK", 40)
    # What no message waits for is taken in runs, which have a test of their own.
    monkeypatch.setattr(GatedReplay, "_open_run", lambda *_: None)
    caplog.set_level(logging.ERROR)


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
                events.append(Event(ts_ms, EventKind.DELIVER, ledger_id, entry_id, last))
                sent += last - entry_id + 1
            case 1:
                events.append(Event(ts_ms, EventKind.ACK, ledger_id, entry_id, last))
            case 2:
                events.append(Event(ts_ms, EventKind.MARK_DELETE, ledger_id, max(0, entry_id - 5), entry_id))
            case 3:
                events.append(Event(ts_ms, EventKind.DELIVER, ledger_id, entry_id, entry_id))
            case 4:
                events += [Event(ts_ms, EventKind.CRASH), Event(ts_ms + 3, EventKind.RECOVER)]
                ts_ms += 3
                events.append(Event(ts_ms, EventKind.REDELIVER, ledger_id, entry_id, last))
            case 5:
                events.append(Event(ts_ms, EventKind.RESET, ledger_id, 0, entry_id))
            case 6:
                events.append(Event(ts_ms, EventKind.REDELIVER, ledger_id, entry_id, last))
    return events, LOG


LIMITS = st.sampled_from((24, 40, 60, 100, 150, 300, 1_000, 5_000))


def limited(found, limit):
    return {**found, "max_unpersisted_ack_record_bytes": limit}


GRIDS = st.lists(st.builds(limited, POLICIES, LIMITS), min_size=1, max_size=3)
SIZES = st.lists(st.integers(1, 60), max_size=3)


def answers(trace, grid, sizes):
    """Return what a sweep is told of each policy, without points that say what the one before says; and the sizes."""
    events, log = trace
    replay, begin = SubscriptionReplay(grid, log), 0
    parts = [[] for _ in grid]
    for size in [*sizes, len(events)]:
        if events[begin : begin + size]:
            for part, points in zip(parts, replay.take(chunk_of(events[begin : begin + size])), strict=True):
                part.append(points)
        begin += size
    for part, points in zip(parts, replay.end(events[-1].ts_ms + 450), strict=True):
        part.append(points)
    no_sizes = dict.fromkeys(("bytes_written", "bytes_kept", "bytes_kept_max"), 0)
    told = [
        (changes(part), curve.costs._replace(**no_sizes), curve.sum.peak)
        for part, curve in zip(parts, replay.curves, strict=True)
    ]
    return told, [[getattr(curve.costs, name) for name in no_sizes] for curve in replay.curves]


def changes(parts):
    values = {}
    for points in parts:
        causes = [()] * len(points.ts_ms) if points.causes is None else map(tuple, points.causes.T.tolist())
        told = zip(points.value.tolist(), (each if any(each) else () for each in causes), strict=True)
        values.update(zip(points.ts_ms.tolist(), told, strict=True))
    found = [(None, None), *sorted(values.items())]
    return [each for before, each in pairwise(found) if before[1] != each[1]]


def assert_same(taken, trace, found, sizes=()):
    """Return how much was taken at once, and how much by itself."""
    grid = [Policy.from_mapping(each) for each in found]
    taken.set(run_min=1, steps=2)
    at_once, sizes_at_once = answers(trace, grid, sizes)
    counts = taken.in_stretches, taken.steps
    taken.set(run_min=10**9, steps=2)
    by_itself, sizes_by_itself = answers(trace, grid, sizes)
    assert taken.in_stretches == 0
    # Answers that differ would be told in full, which takes minutes.
    assert [mine == other for mine, other in zip(at_once, by_itself, strict=True)] == [True] * len(grid)
    # Acks given at once may leave a bitmap in another form, of a few bytes more or less in each record.
    for (_, costs, _), mine, others in zip(at_once, sizes_at_once, sizes_by_itself, strict=True):
        assert all(abs(size - other) <= 10 * costs.write_count for size, other in zip(mine, others, strict=True))
    return counts


TRACES = st.one_of(anything(), montecarlo.small_traces())


@pytest.fixture
def taken(monkeypatch):
    return Taken(monkeypatch)


@pytest.mark.slow
def test_what_is_taken_at_once_is_as_taken_by_itself(taken):
    counts = []

    @settings(max_examples=30)
    @given(TRACES, GRIDS, SIZES)
    def agree(trace, grid, sizes):
        counts.append(assert_same(taken, trace, grid, sizes))

    agree()
    assert sum(at_once for at_once, _ in counts) > 0


def assert_difference(taken, monkeypatch, name, bug, of=GatedReplay):
    monkeypatch.setattr(of, name, bug)

    @settings(
        max_examples=300, database=None, derandomize=True, deadline=None, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    @given(TRACES, GRIDS, SIZES)
    def agree(trace, grid, sizes):
        assert_same(taken, trace, grid, sizes)

    with pytest.raises(AssertionError):
        agree()


def nowhere(_replay, stretch):
    return np.zeros(len(stretch.used_bytes), np.bool_)


def one_late(turns):
    def found(replay, stretch):
        return np.append(False, turns(replay, stretch)[:-1])[: len(stretch.used_bytes)]

    return found


def test_it_catches_a_gate_that_never_turns(taken, monkeypatch):
    assert_difference(taken, monkeypatch, "_turns", nowhere)


def test_it_catches_a_gate_that_turns_a_message_late(taken, monkeypatch):
    assert_difference(taken, monkeypatch, "_turns", one_late(GatedReplay._turns))


@pytest.mark.soak
def test_it_catches_a_stretch_that_goes_on_beyond_a_persist(taken, monkeypatch):
    def beyond(_replay, mentions, at, until_ms):
        return len(mentions.ts_ms), until_ms - 1

    assert_difference(taken, monkeypatch, "_sure_end", beyond)


@pytest.mark.soak
def test_it_catches_acks_that_do_not_move(taken, monkeypatch):
    def none(_replay, _mentions, acks, _at):
        return np.full(len(acks), -1)

    assert_difference(taken, monkeypatch, "_moved_by", none)


@pytest.mark.soak
def test_it_catches_an_ack_that_takes_place_while_its_message_waits(taken, monkeypatch):
    def none(_replay, _mentions, acks, _at):
        return np.zeros(len(acks), np.bool_)

    assert_difference(taken, monkeypatch, "_wait", none)


@pytest.mark.soak
def test_it_catches_moved_acks_that_are_forgotten_too_early(taken, monkeypatch):
    def all_of_that_millisecond(stretch, at, acks, _under_way):
        return acks.ts_ms <= stretch.steps.ts_ms[at]

    assert_difference(taken, monkeypatch, "come_after", all_of_that_millisecond, of=Stretch)


@pytest.mark.soak
def test_it_catches_young_acks_that_nobody_promotes(taken, monkeypatch):
    def never(_replay, _reserved, used):
        return np.zeros(len(used), np.bool_)

    assert_difference(taken, monkeypatch, "_may_promote", never)


def test_it_catches_sizes_that_are_those_of_ranges_apart(taken, monkeypatch):
    def apart(_cursor, ledger_ids, entry_ids):
        return record_bytes.isolated_bytes(ledger_ids, entry_ids)

    assert_difference(taken, monkeypatch, "record_growth", apart, of=stretch)


@pytest.mark.parametrize("found", [{}, {"range_count_max": 2}])
def test_behind_a_shut_gate_few_messages_are_taken_by_themselves(taken, found):
    trace, policy = traffic(4_000, lag=200), policy_of(3_000, flush_interval_ms=400, **found)
    taken.set(run_min=16, steps=32)
    _, (_, blocked_ms, _) = curve_of(*trace[:1], policy, trace[1], [3_000])
    assert blocked_ms > 1_000
    assert taken.in_stretches > 1_000
    assert taken.steps < taken.in_stretches // 4


NEWS = st.lists(st.tuples(st.sampled_from((3, 9)), st.integers(0, 60)), max_size=6)


@given(st.lists(st.one_of(st.integers(-9, -1), NEWS), max_size=9))
def test_who_waits_goes_in_order(found):
    line, plain = WaitingLine(), []
    for number, each in enumerate(found):
        if isinstance(each, int):
            count = min(-each, len(plain))
            left = list(zip(*(column.tolist() for column in line.leave(count)), strict=True))
            assert left == plain[:count]
            del plain[:count]
        else:
            news = [(number, *place) for place in dict.fromkeys(each) if place not in {it[1:] for it in plain}]
            line.join(Times(*np.array(news, np.int64).reshape(-1, 3).T))
            plain += news
        line._check()
        assert len(line) == len(plain)
        assert list(zip(*(column.tolist() for column in line.first(3)), strict=True)) == plain[:3]


def test_a_time_that_is_kept_stays_until_it_is_taken():
    kept = TimesKept()
    kept.put(Times(*np.array([(5, 3, 1), (6, 9, 1), (7, 3, 1)]).T))
    asked = np.array([3, 9, 3]), np.array([1, 1, 2])
    assert kept.get(*asked).tolist() == [5, 6, -1]
    assert kept.pop(*asked).tolist() == [5, 6, -1]
    assert not kept
    kept.put(NO_TIMES)
    assert kept.get(*asked).tolist() == [-1, -1, -1]
