"""The result of a sweep over policies: estimates, costs, the policies that no other beats, and a recommendation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ackstate.analysis.estimate.recommendation import Recommendation, Target, messages_text, recommend, unbeaten
from ackstate.analysis.replay.policy import AS_RECORDED, PolicyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.analysis.replay.policy import Policy

_SECOND_MS = 1_000
RECORDED, CURRENT, RECOMMENDED = "recorded", "current policy", "recommended policy"
"""Names of the recording, and of the two policies that are compared, in headline, recommendation and plots."""
# The current policy, replayed, and the recording differ by this factor if they do not match.
_MISMATCH = 4 / 3


class Prices(NamedTuple):
    """The costs of a policy; None if they are unknown."""

    writes: float | None  # A second
    bytes: float | None  # Written a second
    blocked_s: float | None  # Seconds in which dispatch was blocked


@dataclass(frozen=True, slots=True)
class Estimate:
    """A row of `ackstate.analysis.estimate.estimates.estimates`: its numeric columns.

    Unknown numbers of a recording are None: the bytes that it wrote and kept, the time that dispatch was blocked and,
    if it has no persist at all, the number of writes.
    """

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
    write_count: int | None
    bytes_written: int | None
    bytes_kept: int | None
    bytes_kept_max: int | None
    blocked_ms: int | None
    duration_ms: int
    duplicates_per_day: float | None

    @property
    def prices(self) -> Prices:
        """What the persists cost."""
        blocked_s = None if self.blocked_ms is None else self.blocked_ms / _SECOND_MS
        return Prices(self._per_second(self.write_count), self._per_second(self.bytes_written), blocked_s)

    def _per_second(self, number: int | None) -> float | None:
        """Return a number of the whole trace per second; 0 if no time passed."""
        if number is None:
            return None
        return number * _SECOND_MS / self.duration_ms if self.duration_ms else 0.0


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy."""

    policy: Policy | None  # The policy, or `AS_RECORDED`
    estimates: tuple[Estimate, ...]  # For each scope and name, sorted
    # Whether no other policy of the grid is at least as good in every respect and better in one: redelivery after a
    # crash of the broker, bytes written, writes, time blocked. The recording is not compared.
    is_on_front: bool = False

    @property
    def label(self) -> str:
        """The name of the policy."""
        return RECORDED if self.policy is AS_RECORDED else self.policy.label

    @property
    def total(self) -> Estimate:
        """The estimate of all subscriptions at once."""
        return next(each for each in self.estimates if each.scope == "total")

    @property
    def never_flushed(self) -> bool:
        """Whether the trace is too short for the policy: it persists nothing, and its redelivery grows to the end."""
        return self.policy is not AS_RECORDED and self.total.write_count == 0 and self.total.max > 0

    @property
    def badness(self) -> tuple[float, ...]:
        """The numbers that are compared; less is better."""
        total = self.total
        prices = (total.bytes_written, total.write_count, total.blocked_ms)
        return (total.expected or 0.0, *(float(price or 0) for price in prices))


@dataclass(frozen=True, slots=True)
class SweepResult:
    """A grid of policies over one trace."""

    trace: str  # Its path
    crashes_per_day: float  # The rate for which duplicates are counted
    policies: tuple[PolicyResult, ...]  # In the order of the grid
    # Label and reason of each policy of the grid under which no cursor can be opened.
    refused: tuple[tuple[str, str], ...] = ()
    baseline: str = ""  # Label of the policy in force, with which others are compared; empty for the first of the grid
    current_source: str = ""  # Where that policy is known from, in words
    current: PolicyResult | None = None  # That policy; None if no policy was tried
    doubts: tuple[str, ...] = ()  # Reasons to doubt it, as sentences
    # The recommended policy, compared with the policy in force; None if no policy was tried.
    advice: Recommendation | None = None
    poll_ms: int = 0  # Time between two polls, if the trace was recorded by polls; else 0
    is_inferred: bool = False  # Whether no one named the policy in force

    @classmethod
    def of_rows(
        cls, trace: str, policies: Sequence[Policy | None], rows: Sequence[Mapping[str, Any]], *,
        crashes_per_day: float, refused: Sequence[tuple[str, str]] = (),
    ) -> Self:  # fmt: skip
        """Build from the rows of `ackstate.analysis.estimate.estimates.estimates`."""
        found: list[list[Estimate]] = [[] for _ in policies]
        for row in rows:
            found[row["policy"]].append(Estimate(**{name: row[name] for name in Estimate.__dataclass_fields__}))
        results = [
            PolicyResult(policy, tuple(sorted(mine, key=_place))) for policy, mine in zip(policies, found, strict=True)
        ]
        known = [_unknown_taken_out(each) for each in results]
        front = unbeaten([each for each in known if each.policy is not AS_RECORDED and each.estimates])
        ranked = [replace(each, is_on_front=any(each is other for other in front)) for each in known]
        return cls(trace, crashes_per_day, tuple(ranked), tuple(refused)).compared_with("")

    def compared_with(
        self, baseline: str, source: str = "", doubts: Sequence[str] = (), *,
        is_inferred: bool = False, target: Target | None = None,
    ) -> Self:  # fmt: skip
        """Return the result with another policy in force, and a recommendation that keeps to a target."""
        labels = [each.label for each in self.policies]
        if baseline and baseline not in labels:
            raise PolicyError(f"current policy must be one of {', '.join(map(repr, labels))}, got {baseline!r}")
        first = next((each for each in self.policies if each.policy is not AS_RECORDED), None)
        current = self.policies[labels.index(baseline)] if first is not None and baseline else first
        advice = None if current is None else recommend(self.policies, current, target)
        return replace(
            self, baseline=baseline, current_source=source, current=current, doubts=tuple(doubts), advice=advice,
            is_inferred=is_inferred,
        )  # fmt: skip

    @property
    def recorded(self) -> PolicyResult | None:
        """The recording itself; None if it was not replayed, or has no persist, so that no ack ever became durable."""
        found = next((each for each in self.policies if each.policy is AS_RECORDED), None)
        return None if found is None or found.total.write_count is None else found

    @property
    def quoted(self) -> PolicyResult:
        """What the headline is about: the policy in force or, if that is not known for sure, the recording."""
        if self.current is None:
            return self.policies[0]
        return self.recorded if self.is_inferred and self.recorded is not None else self.current

    @property
    def reference(self) -> PolicyResult:
        """The current policy, or the recording if no policy was tried: what the first screen is about."""
        return self.current or self.policies[0]

    @property
    def shown(self) -> list[PolicyResult]:
        """The recording, the current and the recommended policy, as far as they are known: they are drawn."""
        found = [each for each in (self.recorded, self.current, self.recommended) if each is not None]
        return [each for number, each in enumerate(found) if each not in found[:number]] or [self.policies[0]]

    @property
    def recommended(self) -> PolicyResult | None:
        """The recommended policy; None if no policy is better than the current one."""
        return None if self.advice is None else self.advice.recommended

    def role_of(self, result: PolicyResult) -> str:
        """Return `RECORDED`, `CURRENT` or `RECOMMENDED`; empty for other policies."""
        if result.policy is AS_RECORDED:
            return RECORDED
        if result is self.current and len(self.policies) > 1:
            return CURRENT
        return RECOMMENDED if result is self.recommended else ""

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the numbers or the comparison, as sentences."""
        found = [polls_text(self.poll_ms)] if self.poll_ms else []
        found += self.doubts
        recorded, current = self.recorded, self.current
        if current is None or len(self.policies) < 2:
            return found
        if current.never_flushed:
            found.append(
                "The current policy never flushed in this trace: the trace is too short for it, and its redelivery is "
                "higher than shown"
            )
        if recorded is None or recorded is current:
            return found
        if self.quoted is recorded and _differ(recorded, current, 1.05) and not _differ(recorded, current):
            found.append(
                f"The headline quotes the recording: {messages_text(recorded.total)} messages per broker crash. The "
                f"inferred policy, replayed, has {messages_text(current.total)}: it persists at its own times"
            )
        if _differ(recorded, current):
            found.append(
                f"The recording does not match the current policy: {messages_text(recorded.total)} messages per "
                f"broker crash were recorded, and {messages_text(current.total)} are replayed"
            )
        return found

    @property
    def recommendation(self) -> str:
        """One sentence: the recommended policy compared with the current one, or the reason why there is none."""
        return "no policy was compared" if self.advice is None or len(self.policies) < 2 else self.advice.sentence

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object, which `docs/json-output.md` describes."""
        return {
            "trace": self.trace,
            "crashes_per_day": self.crashes_per_day,
            "baseline": None if self.current is None else self.current.label,
            "baseline_source": self.current_source,
            "recommendation": self.recommendation,
            "rule": "" if self.advice is None else self.advice.rule,
            "recommended": None if self.recommended is None else self.recommended.label,
            "warnings": self.warnings,
            "refused": [{"label": label, "reason": reason} for label, reason in self.refused],
            "policies": [
                {
                    "policy": None if each.policy is AS_RECORDED else each.policy.to_mapping(),
                    "label": each.label,
                    "is_on_front": each.is_on_front,
                    "never_flushed": each.never_flushed,
                    "estimates": [asdict(estimate) for estimate in each.estimates],
                }
                for each in self.policies
            ],
        }


def polls_text(poll_ms: int) -> str:
    """Return how exact the times of a trace are that was recorded by polls, as a sentence."""
    return (
        f"Recorded by polls: times are known to one poll of {poll_ms / 1_000:g} s, and redelivery between two polls is "
        "that of the first"
    )


def _differ(recorded: PolicyResult, current: PolicyResult, factor: float = _MISMATCH) -> bool:
    """Return whether the means differ by more than a factor."""
    means = [each.total.expected or 0.0 for each in (recorded, current)]
    return max(means) > factor * min(means) + 1


def _place(estimate: Estimate) -> tuple[int, str, str, str]:
    order = ("total", "namespace", "topic", "subscription")
    return order.index(estimate.scope), estimate.namespace, estimate.topic, estimate.subscription


def _unknown_taken_out(result: PolicyResult) -> PolicyResult:
    """Return a recording with its unknown numbers as None."""
    if result.policy is not AS_RECORDED or not result.estimates:
        return result
    unknown: dict[str, Any] = dict.fromkeys(("bytes_written", "bytes_kept", "bytes_kept_max", "blocked_ms"))
    if not any(each.write_count for each in result.estimates):
        unknown["write_count"] = None
    return replace(result, estimates=tuple(replace(each, **unknown) for each in result.estimates))
