"""What a sweep over policies found: estimates, costs, which policies no other beats, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from analysis.redelivery.policy import AS_RECORDED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from analysis.redelivery.policy import Policy

_SECOND_MS = 1_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A row of `analysis.redelivery.estimates.estimates`, whose columns its fields are."""

    scope: str
    namespace: str
    topic: str
    subscription: str
    expected: float | None
    p50: int | None
    p90: int | None
    p99: int | None
    max: int
    max_ts_ms: int | None
    not_flushed: float | None
    young: float | None
    cut_by_ranges: float | None
    cut_by_bytes: float | None
    cut_by_route: float | None
    write_count: int
    bytes_written: int
    bytes_kept: int
    bytes_kept_max: int
    blocked_ms: int
    duration_ms: int
    duplicates_per_day: float | None

    def per_second(self, number: int) -> float:
        """Return a number of the whole trace per second; 0 if no time passed."""
        return number * _SECOND_MS / self.duration_ms if self.duration_ms else 0.0


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy.

    Attributes:
        policy: It, or `AS_RECORDED`.
        estimates: For each scope and name, sorted.
        is_on_front: Whether no other policy of the grid is as good in everything and better in something, of what a
            crash of the broker brings back, bytes written, writes, and time blocked. The recording is not compared.
    """

    policy: Policy | None
    estimates: tuple[Estimate, ...]
    is_on_front: bool = False

    @property
    def label(self) -> str:
        """What to call it."""
        return "as recorded" if self.policy is AS_RECORDED else self.policy.label

    @property
    def total(self) -> Estimate:
        """All subscriptions at once."""
        return next(each for each in self.estimates if each.scope == "total")

    @property
    def badness(self) -> tuple[float, float, float, float]:
        """What is compared, less being better."""
        total = self.total
        return (total.expected or 0.0, float(total.bytes_written), float(total.write_count), float(total.blocked_ms))


@dataclass(frozen=True, slots=True)
class SweepResult:
    """A grid of policies over one trace.

    Attributes:
        trace: Its path.
        crashes_per_day: The rate for which duplicates are counted.
        policies: In the order of the grid.
    """

    trace: str
    crashes_per_day: float
    policies: tuple[PolicyResult, ...]

    @classmethod
    def of_rows(
        cls, trace: str, policies: Sequence[Policy | None], rows: Sequence[Mapping[str, Any]], *, crashes_per_day: float
    ) -> Self:
        """Build from the rows of `analysis.redelivery.estimates.estimates`."""
        found: list[list[Estimate]] = [[] for _ in policies]
        for row in rows:
            found[row["policy"]].append(Estimate(**{key: value for key, value in row.items() if key != "policy"}))
        results = [
            PolicyResult(policy, tuple(sorted(mine, key=_place))) for policy, mine in zip(policies, found, strict=True)
        ]
        return cls(trace, crashes_per_day, tuple(_with_front(results)))

    @property
    def front(self) -> list[PolicyResult]:
        """The policies that no other beats, the one of which least comes back first."""
        return sorted((each for each in self.policies if each.is_on_front), key=lambda each: each.badness)

    @property
    def recommended(self) -> PolicyResult | None:
        """What of the front buys most for its price beside the cheapest; the one there is; or None."""
        front = self.front
        return min(front[:-1], key=lambda each: _distance(each, front), default=front[0]) if front else None

    @property
    def recommendation(self) -> str:
        """One sentence: what of the front buys most for its price, beside the cheapest; or why there is none."""
        chosen = self.recommended
        if chosen is None or len(self.front) < 2:
            return "no policy was compared" if chosen is None else "no choice: one policy is best in everything"
        cheapest = self.front[-1]
        return f"{_difference(chosen, cheapest)}: {_gain(chosen.total, cheapest.total)}"

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object: `docs/operations.md` describes it."""
        return {
            "trace": self.trace,
            "crashes_per_day": self.crashes_per_day,
            "recommendation": self.recommendation,
            "policies": [
                {
                    "policy": None if each.policy is AS_RECORDED else each.policy.to_mapping(),
                    "label": each.label,
                    "is_on_front": each.is_on_front,
                    "estimates": [asdict(estimate) for estimate in each.estimates],
                }
                for each in self.policies
            ],
        }


def _place(estimate: Estimate) -> tuple[int, str, str, str]:
    order = ("total", "namespace", "topic", "subscription")
    return order.index(estimate.scope), estimate.namespace, estimate.topic, estimate.subscription


def _with_front(results: Sequence[PolicyResult]) -> list[PolicyResult]:
    rivals = [each.badness for each in results if each.policy is not AS_RECORDED and each.estimates]
    return [PolicyResult(each.policy, each.estimates, is_on_front=_is_unbeaten(each, rivals)) for each in results]


def _is_unbeaten(result: PolicyResult, rivals: Sequence[tuple[float, ...]]) -> bool:
    if result.policy is AS_RECORDED or not result.estimates:
        return False
    mine = result.badness
    return not any(
        rival != mine and all(theirs <= ours for theirs, ours in zip(rival, mine, strict=True)) for rival in rivals
    )


def _distance(result: PolicyResult, front: Sequence[PolicyResult]) -> float:
    """Return the redelivery and the price of a policy, each as a share of the most, added up."""
    worst = [max(values) for values in zip(*(each.badness for each in front), strict=True)]
    redelivery, *prices = (mine / most if most else 0.0 for mine, most in zip(result.badness, worst, strict=True))
    return redelivery + max(prices)


def _difference(chosen: PolicyResult, other: PolicyResult) -> str:
    assert chosen.policy is not AS_RECORDED
    assert other.policy is not AS_RECORDED
    before, after = other.policy.texts, chosen.policy.texts
    changed = {key: (after[key], before[key]) for key in after if after[key] != before[key]}
    if set(changed) == {"flush_interval_ms"}:
        new, old = (f"{int(text) / _SECOND_MS:g} s" for text in changed["flush_interval_ms"])
        return f"flush every {new} instead of {old}"
    return ", ".join(f"{key} {new} instead of {old}" for key, (new, old) in changed.items())


def _gain(chosen: Estimate, other: Estimate) -> str:
    writes = chosen.per_second(chosen.write_count) - other.per_second(other.write_count)
    size = chosen.per_second(chosen.bytes_written) - other.per_second(other.bytes_written)
    duplicates = f"expected duplicates {other.expected or 0:,.0f} -> {chosen.expected or 0:,.0f}"
    return f"{duplicates}, {writes:+,.3g} writes/s, {size:+,.3g} bytes/s"
