"""When a cursor persists, asked in pieces as at the ends of chunks and of days."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.replay.cursor_replay import PersistTicks
from ackstate.analysis.replay.policy import Policy


def test_two_acks_that_wait_out_the_first_interval_are_one_persist():
    schedule = PersistTicks(Policy.from_mapping({"flush_interval_ms": 5, "tick_ms": 7}), opened_ms=1_000)
    schedule.acked(np.array([1_000, 1_002]))
    assert schedule.next_due() == 1_008
    schedule.persisted(1_008)
    assert schedule.next_due() is None


SETTINGS = st.fixed_dictionaries({
    "flush_interval_ms": st.sampled_from((0, 5, 40)),
    "tick_ms": st.sampled_from((1, 7)),
    "mark_delete_rate_limit": st.sampled_from((0, 20, 300)),
})  # fmt: skip
OUTCOMES = (None, PersistTicks.persisted, PersistTicks.failed)
STEPS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(OUTCOMES)), max_size=30)


@given(SETTINGS, STEPS)
def test_nothing_is_due_before_it_is_quiet_no_more_and_one_ack_is_as_many(found, steps):
    one, many = (PersistTicks(Policy.from_mapping(found), opened_ms=1_000) for _ in range(2))
    now_ms = 1_000
    for wait_ms, take_note in steps:
        now_ms += wait_ms
        quiet_until = one.quiet_until
        one.acked_at(now_ms)
        many.acked(np.array([now_ms]))
        due = one.next_due()
        assert due == many.next_due()
        assert due >= quiet_until
        if take_note is not None and due <= now_ms + 30:
            now_ms = due + 1
            for each in (one, many):
                take_note(each, due)
                assert each.next_due() is None or each.next_due() > due


@pytest.mark.parametrize("rate_limit", [0, 300])
@pytest.mark.parametrize("tick_ms", [1, 7])
def test_without_an_interval_a_tick_is_over_once_it_has_persisted(tick_ms, rate_limit):
    found = {"flush_interval_ms": 0, "tick_ms": tick_ms, "mark_delete_rate_limit": rate_limit}
    schedule = PersistTicks(Policy.from_mapping(found), opened_ms=1_000)
    schedule.acked(np.array([1_000, 1_020]))
    while (due := schedule.next_due()) is not None:
        schedule.persisted(due)
        last = due
    assert schedule.flush_at > last >= 1_020
    schedule.acked_at(1_100)
    due = schedule.next_due()
    for take_note in (PersistTicks.failed, PersistTicks.persisted):
        take_note(schedule, due)
        assert schedule.flush_at > due


def test_the_flush_interval_starts_again_after_a_reset():
    ticks = PersistTicks(Policy.from_mapping({"flush_interval_ms": 1_000, "mark_delete_rate_limit": 0}), opened_ms=0)
    ticks.acked_at(100)
    ticks.settled(900)
    assert ticks.next_due() is None
    ticks.acked_at(950)
    assert ticks.next_due() == 1_900
