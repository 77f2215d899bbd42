"""The replay in arrays against the real cursor, crashed at every instant; and that this comparison can fail."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from analysis.redelivery.acked import AckedFold, Chunk
from analysis.redelivery.cursor_replay import CursorReplay
from analysis.redelivery.journal_size import JournalSize
from analysis.redelivery.mark_delete import MarkDeleteFold
from analysis.redelivery.policy import Policy
from analysis.redelivery.schedule import Schedule
from analysis.redelivery.subscription_replay import SubscriptionReplay, _Life
from analysis.trace.events import Event, EventKind

_SPEC = importlib.util.spec_from_file_location("montecarlo", Path(__file__).with_name("montecarlo.py"))
montecarlo = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(montecarlo)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR)


def chunk_of(events):
    return Chunk(*(np.array([getattr(event, name) for event in events], np.int64) for name in Chunk._fields))


def replayed(events, policies, log, *, sizes, end_ms):
    """Return, for each policy, millisecond -> number at its end, and the replay itself."""
    replay, begin = SubscriptionReplay(policies, log), 0
    found = [[] for _ in policies]
    parts = []
    for size in [*sizes, len(events)]:
        if events[begin : begin + size]:
            parts.append(replay.take(chunk_of(events[begin : begin + size])))
        begin += size
    parts.append(replay.end(end_ms))
    for part in parts:
        for points, mine in zip(part, found, strict=True):
            mine.extend(zip(points.ts_ms.tolist(), points.value.tolist(), strict=True))
    curves = []
    for mine in found:
        last, value = dict(mine), 0
        curves.append({now: (value := last.get(now, value)) for now in range(events[0].ts_ms, end_ms + 1)})
    return curves, replay


def assert_agreement(trace, policies, sizes):
    events, log = trace
    end_ms = events[-1].ts_ms + 450
    curves, replay = replayed(events, policies, log, sizes=sizes, end_ms=end_ms)
    for policy, curve, sums in zip(policies, curves, replay.curves, strict=True):
        seen = montecarlo.observe(events, policy, log, end_ms=end_ms)
        assert montecarlo.first_difference(curve, seen.at_end) is None, policy.label
        assert sums.sum.peak == seen.peak, policy.label
        costs = sums.costs
        assert costs.write_count == seen.write_count, policy.label
        # Acks given at once may leave a bitmap that takes as many bytes either way in the other of two forms.
        slack = 0 if policy.is_plain else 10 * seen.write_count
        assert abs(costs.bytes_written - seen.bytes_written) <= slack, policy.label
        assert seen.bytes_kept is None or abs(costs.bytes_kept - seen.bytes_kept) <= slack, policy.label


SIZES = st.lists(st.integers(0, 20), max_size=4)
GRIDS = st.lists(montecarlo.POLICIES, min_size=1, max_size=2)
PLAIN = st.builds(
    lambda flush, tick, rate: [Policy.from_mapping(
        {"flush_interval_ms": flush, "tick_ms": tick, "mark_delete_rate_limit": rate, "compaction_bytes_min": 100}
    )],
    st.sampled_from((0, 1, 5, 30, 400)), st.sampled_from((1, 7, 50)), st.sampled_from((0, 0, 1, 20)),
)  # fmt: skip
test_every_instant_agrees_with_a_real_cursor = pytest.mark.slow(
    given(montecarlo.small_traces(), GRIDS, SIZES)(assert_agreement)
)
test_every_instant_of_a_plain_policy_agrees = pytest.mark.slow(
    given(montecarlo.small_traces(), PLAIN, SIZES)(assert_agreement)
)


def assert_agreement_fails(grids):
    search = settings(max_examples=1_000, database=None, derandomize=True, deadline=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        search(given(montecarlo.small_traces(), grids, SIZES)(assert_agreement))()


def test_it_catches_a_flush_interval_counted_from_the_ack(monkeypatch):
    taken = Schedule.acked

    def acked(self, ts_ms):
        if len(ts_ms):
            self._flush_at = int(ts_ms[0]) + self._flush_ms
        taken(self, ts_ms)

    monkeypatch.setattr(Schedule, "acked", acked)
    assert_agreement_fails(PLAIN)


def test_it_catches_a_limiter_that_saves_nothing_up(monkeypatch):
    monkeypatch.setattr(Schedule, "_take_permit", lambda self, at_ms: setattr(self, "_permit_at", at_ms + 2_000))
    assert_agreement_fails(st.just([Policy.from_mapping({"flush_interval_ms": 400, "mark_delete_rate_limit": 20})]))


def test_it_catches_a_persist_that_covers_the_acks_of_its_chunk_only(monkeypatch):
    monkeypatch.setattr(JournalSize, "_first_size", lambda self, placed, end: 64)
    assert_agreement_fails(PLAIN)


def test_it_catches_young_acks_that_are_never_looked_at_again(monkeypatch):
    monkeypatch.setattr(CursorReplay, "_more_due", lambda self, until_ms, due: due)
    assert_agreement_fails(st.just([Policy.from_mapping({"flush_interval_ms": 1, "become_old_ack_record_seconds": 1})]))


def test_it_catches_a_recovery_that_forgets_nothing(monkeypatch):
    monkeypatch.setattr(JournalSize, "pending", property(lambda self: {}))
    assert_agreement_fails(PLAIN)


def test_it_catches_a_mark_delete_that_stands_still(monkeypatch):
    monkeypatch.setattr(MarkDeleteFold, "_move", lambda self, acked: None)
    assert_agreement_fails(PLAIN)


def test_it_catches_a_reset_after_which_the_old_flush_interval_goes_on(monkeypatch):
    monkeypatch.setattr(Schedule, "settled", lambda self, at_ms: None)
    assert_agreement_fails(PLAIN)


def test_it_catches_that_what_came_back_under_the_policy_alone_is_not_acked_again(monkeypatch):
    missing = _Life.missing
    monkeypatch.setattr(_Life, "missing", lambda self, recorded, *, now_ms: missing(self, AckedFold(), now_ms=now_ms))
    assert_agreement_fails(PLAIN)


def test_a_trace_begins_with_what_its_cursor_found():
    events = [
        Event(5, EventKind.RECOVER, 3, 0, 4),
        Event(5, EventKind.RECOVER, 3, 7, 7),
        Event(9, EventKind.ACK, 3, 5, 5),
    ]
    policies = [Policy(), Policy.from_mapping({"range_count_max": 0})]
    curves, _ = replayed(events, policies, {3: 9}, sizes=[1], end_ms=20)
    assert curves == [dict.fromkeys(range(5, 9), 0) | dict.fromkeys(range(9, 21), 1)] * 2
