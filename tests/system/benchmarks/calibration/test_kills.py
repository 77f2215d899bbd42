"""Real cursors, really killed: the redelivery equals the prediction from the trace alone, and a wrong estimate is
found."""

from __future__ import annotations

import pytest

from ackstate.analysis.replay.policy import Policy
from benchmarks.calibration.points import BLOCKED, Point
from benchmarks.calibration.results import EVENT, MOMENT, PERSIST, Calibration
from benchmarks.calibration.run import CalibrationPlan, cut_points, kill_point, kill_points

HOLES = {"flush_interval_ms": 100, "range_count_max": 5}


def point(shape="key_shared", **settings):
    return Point(shape, 1, Policy.from_mapping(settings))


def calibrated(found):
    return Calibration(1, {}, tuple(found))


@pytest.mark.slow
def test_every_kill_brings_back_what_the_trace_says():
    points = list(kill_points(CalibrationPlan(points=6, kills=1, power_cuts=0), lambda what, share: None))
    assert {each.shape for each in points} >= {"in_order", "key_shared", BLOCKED}
    assert [death.when for death in points[0].kills] == [MOMENT, EVENT, PERSIST]
    assert sum(death.observed for each in points for death in each.kills) > 100
    assert calibrated(points).holds
    assert [each.unequal for each in points] == [0] * 6


WRONG = {
    "it flushes later": ({"flush_interval_ms": 100}, {"flush_interval_ms": 333}),
    "it ticks rarely": ({"flush_interval_ms": 50}, {"tick_ms": 400}),
    "no rate limit": ({"mark_delete_rate_limit": 1, "flush_interval_ms": 2_000}, {"mark_delete_rate_limit": 50}),
    "no range limit": (HOLES, {"range_count_max": "none"}),
    "the other ranges": (HOLES | {"keep": "WIDEST", "format": "PULSAR"}, {"keep": "LOWEST"}),
    "no young age": ({"become_old_ack_record_seconds": 1}, {"become_old_ack_record_seconds": 0}),
    "the other format": (HOLES | {"keep": "WIDEST", "format": "PULSAR"}, {"format": "NATIVE"}),
    "the other route": (
        {"ledger_writable": False, "metadata_range_count_max": 3, "flush_interval_ms": 100},
        {"ledger_writable": True},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("real", "wrong"), WRONG.values(), ids=WRONG)
def test_an_estimate_with_a_wrong_setting_is_found_out(tmp_path, real, wrong):
    plan = CalibrationPlan(kills=1, assumed={key: str(value) for key, value in wrong.items()})
    found = kill_point(point("many_consumers", **real), plan, tmp_path)
    assert found.unequal
    assert not calibrated([found]).holds
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.root
def test_power_cuts_bring_back_at_most_that(power_can_be_cut):
    cuts = cut_points(CalibrationPlan(points=2, power_cuts=2), lambda what, share: None)
    assert [len(each) for each in cuts] == [2, 2]
    assert all(death.is_within for each in cuts for death in each)
