"""The result of a calibration: every way in which it can fail to hold, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ackstate.analysis.report.inputs import read_calibration
from benchmarks.calibration.results import (
    EVENT,
    MOMENT,
    PERSIST,
    Calibration,
    Death,
    Mean,
    Mistake,
    PointResult,
    json_text,
)

ROOT = Path(__file__).parents[4]
RESULT = ROOT / "benchmarks" / "calibration.json"
KILLS = (
    Death(MOMENT, 10, (4,), 4, 0), Death(MOMENT, 20, (6,), 6, 0), Death(MOMENT, 30, (8,), 8, 0),
    Death(EVENT, 40, (0,), 0, 0), Death(PERSIST, 50, (9, 2), 2, 0),
)  # fmt: skip
CUTS = (Death(EVENT, 15, (7,), 7, 0), Death(PERSIST, 50, (9, 2), 3, 0))
POINT = PointResult("key_shared", "sqlite", {"flush_interval_ms": "100"}, KILLS, CUTS, 5.5, 5.5)
GOOD = Calibration(1, {}, (POINT,), mistakes=(Mistake("tick_ms=250", 3, 1, 2.5),))


def with_point(**changes):
    return replace(GOOD, points=(replace(POINT, **changes),))


def test_what_comes_as_predicted_holds():
    assert GOOD.holds
    assert GOOD.sentence == (
        "5 of 5 kills at 1 grid points redelivered exactly the predicted number; "
        "2 of 2 power cuts at most that number, 1 of them fewer; "
        "the expected number is within the 95 % interval at 1 of 1 points"
    )
    assert GOOD.to_json()["totals"]["slack_messages"] == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"kills": (*KILLS, Death(EVENT, 60, (4,), 5, 0))},
        {"kills": (*KILLS, Death(EVENT, 60, (4,), 3, 0))},
        {"kills": (*KILLS, Death(PERSIST, 60, (9, 2), 5, 0))},
        {"kills": (*KILLS, Death(EVENT, 60, (4,), 4, 1))},
        {"power_cuts": (*CUTS, Death(EVENT, 60, (4,), 5, 0))},
        {"power_cuts": (*CUTS, Death(EVENT, 60, (4,), 0, 1))},
        {"expected_by_spark": 5.6},
        {"expected": 60.0, "expected_by_spark": 60.0, "kills": tuple(Death(MOMENT, n, (n,), n, 0) for n in range(20))},
    ],
    ids=["more", "fewer", "neither of two", "invented", "cut: more", "cut: invented", "spark", "mean"],
)
def test_whatever_does_not_is_told(changes):
    found = with_point(**changes)
    assert not found.holds
    assert not Calibration.from_json(json.loads(json_text(found))).holds


def test_the_mean_has_the_interval_of_students_t():
    # Of the quantiles that every table has: 2.093 for 19 degrees of freedom, 2.262 for 9.
    twenty, ten = [0, 2] * 10, [0, 2] * 5
    assert Mean.of(1.0, twenty).half_width == pytest.approx(2.093 * (20 / 19) ** 0.5 / 20**0.5, rel=1e-3)
    assert Mean.of(1.0, ten).half_width == pytest.approx(2.262 * (10 / 9) ** 0.5 / 10**0.5, rel=2e-3)
    assert Mean.of(1.0, twenty).deviation == 0
    # Student's t of 19 degrees is beyond 3.883 in one case of 1,000, a normal number beyond 3.291.
    error = (20 / 19) ** 0.5 / 20**0.5
    assert Mean.of(1 - 3.883 * error, twenty).deviation == pytest.approx(3.291, rel=1e-2)
    assert Mean.of(3.0, [1] * 20) == Mean(3.0, 1, 0, None)


def test_json_is_read_back():
    assert Calibration.from_json(json.loads(json_text(GOOD))) == GOOD


def test_the_report_reads_it(tmp_path):
    (tmp_path / "calibration.json").write_text(json_text(GOOD))
    kill, cut = read_calibration(tmp_path / "calibration.json")
    assert (kill.policy, kill.kind, kill.runs) == ("key_shared on sqlite: flush_interval_ms=100", "kill", 5)
    assert (kill.predicted, kill.observed, kill.holds) == (4, 4, True)
    assert (cut.predicted, cut.observed, cut.kind, cut.holds) == (8, 5, "power_cut", True)


def test_what_was_measured_holds():
    found = Calibration.from_json(json.loads(RESULT.read_text()))
    assert found.holds
    assert all(each.equal < each.kills / 2 for each in found.mistakes)
    assert not found.assumed
    assert len(found.points) >= 50
    assert all(len(point.kills) >= 20 for point in found.points)
    assert all(point.power_cuts for point in found.points)
    assert all(point.expected_by_spark is not None for point in found.points)
