"""Real cursors, really killed: the redelivery equals the prediction from the trace alone, and a wrong estimate is
found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ackstate import ManagedCursor
from ackstate.analysis.crash.loop_disk import LoopDisk
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace.events import EventKind
from ackstate.stores import sqlite_database
from ackstate.stores.base import StoreError
from benchmarks.calibration.player import Player
from benchmarks.calibration.points import BLOCKED, Point, grid
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
def test_a_cursor_that_stops_persisting_half_way_is_found_out(tmp_path, monkeypatch):
    honest, traffic = Player.tick, point().workload
    middle_ms = (traffic.begin_ms + traffic.end_ms) // 2

    def planted(self, now_ms):
        return now_ms < middle_ms and honest(self, now_ms)

    monkeypatch.setattr(Player, "tick", planted)
    found = kill_point(point(flush_interval_ms=100), CalibrationPlan(kills=4), tmp_path)
    late = [death for death in found.kills if traffic.begin_ms + death.at_ms > middle_ms + 200]
    assert late
    assert all(death.observed > max(death.predicted) for death in late)
    assert found.unequal


@pytest.mark.slow
def test_a_recovery_that_invents_an_ack_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(ManagedCursor, "is_acked", lambda self, position: True)
    found = kill_point(point(), CalibrationPlan(kills=1), tmp_path)
    assert all(death.invented for death in found.kills)
    assert not calibrated([found]).holds


@pytest.mark.slow
@pytest.mark.root
def test_power_cuts_bring_back_at_most_that(power_can_be_cut):
    cuts = cut_points(CalibrationPlan(points=2, power_cuts=2), lambda what, share: None)
    assert [len(each) for each in cuts] == [2, 2]
    assert all(death.is_within for each in cuts for death in each)


@pytest.mark.slow
@pytest.mark.root
def test_a_store_that_syncs_nothing_is_found_out_by_power_cuts(power_can_be_cut, monkeypatch):
    """Writes go to the files and are never synced: killed processes lose nothing by that, but a power cut does."""
    pragmas = [each for each in sqlite_database._PRAGMAS if "synchronous" not in each]
    monkeypatch.setattr(sqlite_database, "_PRAGMAS", [*pragmas, "synchronous = OFF"])
    monkeypatch.setattr("benchmarks.calibration.run.grid", lambda count, seed: [point()])
    (cuts,) = cut_points(CalibrationPlan(points=1, power_cuts=6), lambda what, share: None)
    assert any(not death.is_within for death in cuts)


@pytest.mark.slow
def test_without_a_disk_of_our_own_the_power_is_not_cut(monkeypatch):
    from ackstate.analysis.crash.layer import LayerSkippedError
    from benchmarks.calibration.run import calibrate

    def refuse(self, options=""):
        raise LayerSkippedError("power cuts need a planted disk")

    monkeypatch.setattr(LoopDisk, "__init__", refuse)
    monkeypatch.setattr("benchmarks.calibration.run.with_private_mounts", lambda make: make())
    found = calibrate(CalibrationPlan(points=1, kills=1, power_cuts=1), lambda what, share: None)
    assert (found.skipped, found.power_cuts, found.holds) == ("power cuts need a planted disk", [], True)


@pytest.mark.slow
def test_a_limit_on_bytes_really_stops_dispatch_and_lets_it_go_on():
    traffic = point(BLOCKED, max_unpersisted_ack_record_bytes=1_024, flush_interval_ms=500).workload
    refused = [number for number, event in enumerate(traffic.events) if event.ledger_id < 0]
    halves = (traffic.begin_ms + traffic.end_ms) // 2
    assert len([number for number in refused if traffic.events[number].ts_ms < halves]) > 100
    assert any(event.kind is EventKind.DELIVER and event.ts_ms > halves for event in traffic.own)
    assert all(event.ledger_id >= 0 for event in traffic.own)


@pytest.mark.slow
def test_a_process_that_is_sent_something_else_than_its_trace_says_ends_the_calibration(tmp_path, monkeypatch):
    from benchmarks.calibration.workload import CalibrationError

    blocking = point(BLOCKED, max_unpersisted_ack_record_bytes=1_024, flush_interval_ms=500)
    assert blocking.workload
    planted = replace(blocking, policy=Policy.from_mapping({"max_unpersisted_ack_record_bytes": 4_096}))
    planted.__dict__["workload"] = blocking.workload
    with pytest.raises(CalibrationError, match="expected None to be next"):
        kill_point(planted, CalibrationPlan(kills=1), tmp_path)


def test_a_store_that_cannot_be_written_at_all_is_no_calibration(tmp_path, monkeypatch):
    def refuse(directory, policy):
        raise StoreError("planted")

    monkeypatch.setattr("benchmarks.calibration.run.open_store", refuse)
    with pytest.raises(Exception, match=r"ended before it was killed: .*planted"):
        kill_point(point(), CalibrationPlan(kills=1), tmp_path)


def test_the_grid_has_fifty_points_of_every_kind():
    points = grid(60, 1)
    assert len({each.label for each in points}) == 60
    assert len({each.shape for each in points}) == 8
    settings = {key for each in points for key in each.policy.to_mapping()}
    assert settings >= {
        "flush_interval_ms", "mark_delete_rate_limit", "range_count_max", "keep", "become_old_ack_record_seconds",
        "max_unpersisted_ack_record_bytes", "format", "range_form", "ledger_writable", "metadata_range_count_max",
        "metadata_bytes_max", "tick_ms",
    }  # fmt: skip
    assert grid(7, 1) == points[:7]
    assert len({each.label + str(each.seed) for each in grid(300, 1)}) == 300


@pytest.mark.parametrize("count", [0, 10_001])
def test_a_grid_without_points_or_with_too_many_is_refused(count):
    with pytest.raises(ValueError, match=f"{count} points"):
        grid(count, 1)
