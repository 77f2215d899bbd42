"""A test of the check itself: the observed kills, compared with estimates for a wrong setting."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from ackstate.analysis.replay.policy import Policy
from benchmarks.calibration.prediction import TracePrediction
from benchmarks.calibration.results import MOMENT, Mistake

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.calibration.points import Point
    from benchmarks.calibration.results import PointResult

MISTAKES: tuple[Mapping[str, str], ...] = (
    {"flush_interval_ms": "333"},
    {"tick_ms": "250"},
    {"mark_delete_rate_limit": "3"},
    {"range_count_max": "3"},
    {"become_old_ack_record_seconds": "3"},
    {"ledger_writable": "false", "metadata_range_count_max": "2"},
)


def mistakes(
    points: Sequence[Point], results: Sequence[PointResult], progress: Callable[[str, float], None]
) -> tuple[Mistake, ...]:
    """Return for each of `MISTAKES` how many kills at random moments it would have predicted, and how well.

    Args:
        points: The grid.
        results: The result of each point.
        progress: Called with the current step and its completed share.
    """
    found = []
    for number, settings in enumerate(MISTAKES, start=1):
        compared = [
            each
            for point, result in zip(points, results, strict=True)
            for each in _compared(point, result, Policy.from_mapping(point.policy.to_mapping() | dict(settings)))
        ]
        equal = sum(observed == predicted for observed, predicted in compared)
        error = fmean(abs(observed - predicted) for observed, predicted in compared) if compared else 0.0
        label = " ".join(f"{key}={value}" for key, value in settings.items())
        found.append(Mistake(label, len(compared), equal, error))
        progress(f"estimated with {label}", number / len(MISTAKES))
    return tuple(found)


def _compared(point: Point, result: PointResult, policy: Policy) -> list[tuple[int, int]]:
    """Return the observation, and the prediction under a policy other than the point's."""
    if policy == point.policy:
        return []
    workload = point.workload
    deaths = [death for death in result.kills if death.when == MOMENT]
    instants = [workload.end_of(workload.begin_ms + death.at_ms - 1) for death in deaths]
    prediction = TracePrediction(workload, policy, instants)
    return [(death.observed, prediction.at(each)) for death, each in zip(deaths, instants, strict=True)]
