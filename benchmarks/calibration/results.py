"""The results of a calibration, as values and as JSON, and the verdict on the estimate."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import copysign, log1p, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOMENT, EVENT, PERSIST = "moment", "event", "persist"
"""A process dies at the end of a random millisecond, right after a random event, or while a persist is under way."""
_DEVIATION_MAX = 4.0
_NORMAL_95 = 1.96


class Death(NamedTuple):
    """One process that died.

    Attributes:
        when: `MOMENT`, `EVENT` or `PERSIST`.
        at_ms: Since the workload's begin.
        predicted: How many acked messages are redelivered; two numbers while a persist is under way, which may be over
            or not.
        observed: How many did.
        invented: The number of entries that are acked after the recovery and were never acked.
    """

    when: str
    at_ms: int
    predicted: tuple[int, ...]
    observed: int
    invented: int

    @property
    def is_equal(self) -> bool:
        """Whether it came as predicted."""
        return self.observed in self.predicted and not self.invented

    @property
    def is_within(self) -> bool:
        """Whether no more were redelivered than predicted."""
        return self.observed <= max(self.predicted) and not self.invented

    @property
    def error(self) -> int:
        """Observed less predicted: the nearer of two predictions."""
        return min((self.observed - each for each in self.predicted), key=abs)

    @property
    def slack(self) -> int:
        """How many fewer were redelivered than in the worst case."""
        return max(self.predicted) - self.observed


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean number of redelivered entries over random moments, compared with the estimate.

    Attributes:
        expected: The estimate's mean over time.
        observed: The observed mean.
        half_width: Half the width of its 95 % confidence interval.
        deviation: How many standard errors are between the two, as rare as that is for a normal distribution; None
            where all observations are the same.
    """

    expected: float
    observed: float
    half_width: float
    deviation: float | None

    @classmethod
    def of(cls, expected: float, observed: Sequence[int]) -> Mean:
        """Return it for at least two observations at moments that are all alike."""
        mean, error = fmean(observed), stdev(observed) / sqrt(len(observed))
        width = _students_95(len(observed) - 1) * error
        deviation = _normal((mean - expected) / error, len(observed) - 1) if error else None
        return cls(expected, mean, width, deviation)

    @property
    def holds(self) -> bool:
        """Whether the estimate is in the interval."""
        return abs(self.observed - self.expected) <= self.half_width


@dataclass(frozen=True, slots=True)
class PointResult:
    """The result of one point.

    Attributes:
        shape: The shape of its traffic.
        store: Where the cursor was kept.
        policy: Its settings, as `Policy.from_mapping` takes them.
        kills: Processes that were killed.
        power_cuts: Processes under which the power was cut.
        expected: The estimate's mean over time.
        expected_by_spark: The same from the Spark job; None without Spark.
    """

    shape: str
    store: str
    policy: Mapping[str, str]
    kills: tuple[Death, ...]
    power_cuts: tuple[Death, ...]
    expected: float
    expected_by_spark: float | None = None

    @property
    def mean(self) -> Mean | None:
        """Observed and expected; None for less than two random moments."""
        observed = [death.observed for death in self.kills if death.when == MOMENT]
        return Mean.of(self.expected, observed) if len(observed) > 1 else None

    @property
    def unequal(self) -> int:
        """How many kills did not come as predicted."""
        return sum(not death.is_equal for death in self.kills)

    @property
    def beyond(self) -> int:
        """How many power cuts brought back more than predicted."""
        return sum(not death.is_within for death in self.power_cuts)

    @property
    def spark_agrees(self) -> bool:
        """Whether Spark computed the same, but for the last bits."""
        theirs = self.expected_by_spark
        return theirs is None or abs(theirs - self.expected) <= 1e-9 * max(1.0, self.expected)

    @property
    def label(self) -> str:
        """The key of the point."""
        policy = " ".join(f"{key}={value}" for key, value in self.policy.items()) or "default"
        return f"{self.shape} on {self.store}: {policy}"

    def summaries(self) -> list[dict[str, Any]]:
        """Return the means of the predictions and observations for each kind of death that occurred."""
        found = []
        worst = [death.observed + death.slack for death in self.power_cuts]
        nearest = [death.observed - death.error for death in self.kills]
        for kind, deaths, predicted in (("kill", self.kills, nearest), ("power_cut", self.power_cuts, worst)):
            if deaths:
                observed = [death.observed for death in deaths]
                means = {"predicted": fmean(predicted), "observed": fmean(observed)}
                found.append({"policy": self.label, "kind": kind, "runs": len(deaths), **means})
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; a death is a list of its fields."""
        lists = {name: [list(death) for death in getattr(self, name)] for name in ("kills", "power_cuts")}
        return asdict(self) | {"policy": dict(self.policy)} | lists

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PointResult:
        """Parse the result of `to_json`."""
        lists = {
            name: tuple(Death(each[0], each[1], tuple(each[2]), *each[3:]) for each in value[name])
            for name in ("kills", "power_cuts")
        }
        return cls(**{**value, **lists})


class Mistake(NamedTuple):
    """How an estimate with a wrong setting would have done.

    Attributes:
        setting: Which, instead of the points' own.
        kills: At random moments, at the points whose policy it changes.
        equal: The number of kills with exactly the predicted redelivery.
        error: How many messages it is off in the mean, in either direction.
    """

    setting: str
    kills: int
    equal: int
    error: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The results of all points.

    Attributes:
        seed: The seed of the traffic and of the moments of death.
        assumed: Settings that the estimate was given instead of the real ones; wrong on purpose.
        points: One by one.
        skipped: Why there are no power cuts; empty if there are.
        mistakes: The results of wrong settings, for comparison.
    """

    seed: int
    assumed: Mapping[str, str]
    points: tuple[PointResult, ...]
    skipped: str = ""
    mistakes: tuple[Mistake, ...] = ()

    @property
    def kills(self) -> list[Death]:
        """Of all points."""
        return [death for point in self.points for death in point.kills]

    @property
    def power_cuts(self) -> list[Death]:
        """Of all points."""
        return [death for point in self.points for death in point.power_cuts]

    @property
    def means(self) -> list[Mean]:
        """Value of all points that have one."""
        return [mean for point in self.points if (mean := point.mean) is not None]

    @property
    def deviation(self) -> float:
        """The deviation of all means from the expected ones, in standard errors."""
        each = [mean.deviation for mean in self.means if mean.deviation is not None]
        return sum(each) / sqrt(len(each)) if each else 0.0

    @property
    def holds(self) -> bool:
        """Whether all kills match, no power cut exceeds its prediction, and the means are near the expected ones.

        The means of a right estimate are beyond four standard errors once in 16,000 calibrations.
        """
        points_hold = all(not point.unequal and not point.beyond and point.spark_agrees for point in self.points)
        return points_hold and abs(self.deviation) <= _DEVIATION_MAX

    @property
    def sentence(self) -> str:
        """The result in words."""
        kills, cuts, means = self.kills, self.power_cuts, self.means
        equal, within = sum(death.is_equal for death in kills), sum(death.is_within for death in cuts)
        points = f"{len(self.points)} grid points"
        said = f"{equal:,} of {len(kills):,} kills at {points} redelivered exactly the predicted number"
        if cuts:
            said += f"; {within:,} of {len(cuts):,} power cuts at most that number, {_fewer(cuts):,} of them fewer"
        held = sum(mean.holds for mean in means)
        return f"{said}; the expected number is within the 95 % interval at {held} of {len(means)} points"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values: the totals, the reported values of each point, and all details."""
        kills, cuts = self.kills, self.power_cuts
        persists = [death for death in kills if death.when == PERSIST]
        undecided = [death for death in persists if len(set(death.predicted)) > 1]
        return {
            "holds": self.holds,
            "seed": self.seed,
            "estimate_with": dict(self.assumed),
            "totals": {
                "points": len(self.points),
                "kills": len(kills),
                "kills_equal": sum(death.is_equal for death in kills),
                "kills_while_persisting": len(persists),
                "of_them_undecided": len(undecided),
                "undecided_not_written": sum(death.observed == death.predicted[0] for death in undecided),
                "power_cuts": len(cuts),
                "power_cuts_within": sum(death.is_within for death in cuts),
                "power_cuts_below": _fewer(cuts),
                "slack_messages": sum(death.slack for death in cuts),
                "invented": sum(death.invented for death in (*kills, *cuts)),
                "messages_predicted": sum(max(death.predicted) for death in kills),
                "messages_observed": sum(death.observed for death in kills),
                "means": len(self.means),
                "means_within": sum(mean.holds for mean in self.means),
                "deviation": round(self.deviation, 3),
                "by_spark": sum(point.expected_by_spark is not None for point in self.points),
            },
            "power_cuts_skipped": self.skipped,
            "mistakes": [each._asdict() for each in self.mistakes],
            "points": [summary for point in self.points for summary in point.summaries()],
            "grid": [point.to_json() for point in self.points],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Calibration:
        """Parse the result of `to_json`."""
        points = tuple(map(PointResult.from_json, value["grid"]))
        mistakes = tuple(Mistake(**each) for each in value["mistakes"])
        return cls(value["seed"], value["estimate_with"], points, value["power_cuts_skipped"], mistakes)


def json_text(calibration: Calibration) -> str:
    """Return the result of `Calibration.to_json` as text, one line per point."""
    head = calibration.to_json()
    lists = {name: ",\n".join(map(json.dumps, head.pop(name))) for name in ("points", "grid")}
    parts = [json.dumps(head, indent=2)[:-2], *(f'  "{name}": [\n{lines}\n  ]' for name, lines in lists.items())]
    return ",\n".join(parts) + "\n}\n"


def _fewer(cuts: Sequence[Death]) -> int:
    return sum(death.slack > 0 for death in cuts)


def _students_95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, to 1 % for 5 or more degrees of freedom.

    Source: Abramowitz and Stegun, 26.7.5, the first two terms.
    """
    z = _NORMAL_95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def _normal(deviation: float, freedom: int) -> float:
    """Return the deviation of a normal distribution that is as rare as one of Student's t.

    Source: D. L. Wallace, Bounds on normal approximations to Student's and the chi-square distributions, 1959.
    """
    size = sqrt(freedom * log1p(deviation**2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return copysign(size, deviation)
