"""The result of a sweep over policies: estimates, costs, the policies that no other beats, and a recommendation.

The recommended policy is the one that buys most for its price, compared with the current policy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ackstate.analysis.estimate.settings import change_text, policy_text, runs_on_pulsar
from ackstate.analysis.replay.policy import AS_RECORDED, Policy, PolicyError
from ackstate.cursor.formats import Format

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


GAIN_MIN = 0.01
"""A setting that saves a smaller share of the current redelivery is not recommended."""
_MESSAGES_MIN = 0.5  # nor one that saves fewer messages per crash, which would be shown as 0


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A recommended change of one setting."""

    key: str  # Its name in `Policy.from_mapping`.
    before: str  # Its value in the current policy, as in `Policy.texts`.
    after: str  # Its value in the recommended policy
    # Messages per crash of the broker that would be redelivered in addition without this change; None if that was not
    # replayed.
    gain: float | None

    @property
    def text(self) -> str:
        """The change in words."""
        return change_text(self.key, self.after, self.before)


@dataclass(frozen=True, slots=True)
class Target:
    """What the recommended policy must keep to. At least one is given."""

    p99_at_most: int | None = None  # Messages redelivered by a crash of the broker, at 99 % of all instants
    writes_at_most: float | None = None  # Writes a second of all cursors together

    @property
    def text(self) -> str:
        """The target in words."""
        redelivery = None if self.p99_at_most is None else f"{self.p99_at_most:,} messages per broker crash (p99)"
        writes = None if self.writes_at_most is None else f"{short_number(self.writes_at_most)} writes/s"
        return f"at most {' and '.join(filter(None, (redelivery, writes)))}"

    def excess(self, result: PolicyResult) -> tuple[float, float]:
        """Return by how much a policy is above the writes, and above the redelivery; zeros if it keeps to both."""
        total = result.total
        writes = total.prices.writes or 0.0
        too_many = 0.0 if self.writes_at_most is None else max(writes - self.writes_at_most, 0.0)
        return too_many, 0.0 if self.p99_at_most is None else max(_p99(total) - self.p99_at_most, 0.0)

    def price(self, result: PolicyResult) -> tuple[float, ...]:
        """Return what is least for the best policy: writes, bytes, time blocked, redelivery, or that first."""
        redelivery, written, writes, blocked = result.badness
        prices = writes, written, blocked
        return (redelivery, *prices) if self.p99_at_most is None else (*prices, redelivery)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended policy."""

    current: PolicyResult  # The policy in force, with which others are compared
    recommended: PolicyResult | None  # The recommended policy; None if no policy is better
    # The settings to change, the greatest gain first; empty if the current policy is the recording.
    changes: tuple[SettingChange, ...] = ()
    # The best policy with ackstate's native journal, if the broker is Pulsar and it is better than `recommended`; else
    # None.
    native: PolicyResult | None = None
    target: Target | None = None  # That of the user
    missed_by: PolicyResult | None = None  # The policy that comes nearest to the target, if none keeps to it

    @property
    def sentence(self) -> str:
        """The recommendation in one sentence."""
        if self.target is not None and self.missed_by is not None:
            total = self.missed_by.total
            numbers = f"p99 {_p99(total):,}, {short_number(total.prices.writes or 0)} writes/s"
            return f"no policy of the grid has {self.target.text}; the nearest: {_settings(self.missed_by)} ({numbers})"
        if self.recommended is None:
            current = "the recorded one" if self.current.policy is AS_RECORDED else policy_text(self.current.policy)
            number = messages_text(self.current.total)
            better = "better" if self.target is None else f"cheaper with {self.target.text}"
            return f"no policy of the grid is {better} than the current policy ({current}): {number} {_PER_CRASH}"
        said = "; ".join(each.text for each in self.changes) or (
            f"{_settings(self.recommended)} instead of {_settings(self.current)}"
        )
        p99 = "" if self.target is None else f", p99 {_p99(self.recommended.total):,}"
        return f"{said}: {_gain(self.recommended.total, self.current.total)}{p99}"

    @property
    def rule(self) -> str:
        """How the recommended policy was chosen, as a sentence."""
        if self.target is None:
            return (
                "Chosen: the least sum of redelivery and the highest price (bytes, writes or time blocked), each as a "
                "share of the highest in the grid. --at-most and --writes-at-most set a target instead"
            )
        least = "least redelivery" if self.target.p99_at_most is None else "fewest writes"
        return f"Chosen: the {least} of all policies with {self.target.text}"


def recommend(results: Sequence[PolicyResult], current: PolicyResult, target: Target | None = None) -> Recommendation:
    """Return the policy with less redelivery than the current one that buys most for its price.

    With a target, it is the cheapest policy that keeps to it (`Target.price`).

    It minimises redelivery plus the highest of its prices, each as a share of the highest value among the policies
    that no other beats and the current one. Policies that the broker cannot run, and those that never flushed in this
    trace, are not considered. A setting is left as it is if its change saves less than `GAIN_MIN`; the grid must have
    the policy without that change.
    """
    possible = [each for each in results if each.policy is not AS_RECORDED and not each.never_flushed]
    if target is not None:
        if _is_pulsar(current):
            possible = [each for each in possible if each.policy and runs_on_pulsar(each.policy)]
        return _at_target(possible, current, target)
    if not _is_pulsar(current):
        return _with_changes(possible, current)
    found = _with_changes([each for each in possible if each.policy and runs_on_pulsar(each.policy)], current)
    native = _choose([each for each in possible if not _is_pulsar(each)], current)
    limit = (found.recommended or current).badness[0]
    if native is None or native.badness[0] >= limit:
        return found
    return Recommendation(current, found.recommended, found.changes, native)


def _at_target(possible: Sequence[PolicyResult], current: PolicyResult, target: Target) -> Recommendation:
    nearest = min(possible, key=lambda each: (target.excess(each), target.price(each)), default=None)
    if nearest is None or any(target.excess(nearest)):
        return Recommendation(current, None, target=target, missed_by=nearest)
    if current.policy is AS_RECORDED:
        return Recommendation(current, nearest, target=target)
    # Of equals the current policy stays.
    if not any(target.excess(current)) and not current.never_flushed and target.price(current) <= target.price(nearest):
        return Recommendation(current, None, target=target)
    by_texts = {_key(each.policy): each for each in [current, *possible] if each.policy is not AS_RECORDED}
    return Recommendation(current, nearest, tuple(_changes(nearest, current, by_texts)), target=target)


def _is_pulsar(result: PolicyResult) -> bool:
    return result.policy is not AS_RECORDED and result.policy.cursor.format is Format.PULSAR


def _with_changes(possible: Sequence[PolicyResult], current: PolicyResult) -> Recommendation:
    chosen = _choose(possible, current)
    if chosen is None or chosen.policy is AS_RECORDED or current.policy is AS_RECORDED:
        return Recommendation(current, chosen)
    by_texts = {_key(each.policy): each for each in [current, *possible] if each.policy is not AS_RECORDED}
    while (simpler := _without_idle_change(chosen, current, by_texts)) is not None:
        chosen = simpler
    changes = _changes(chosen, current, by_texts)
    changes.sort(key=lambda each: -(each.gain or 0))
    return Recommendation(current, chosen, tuple(changes))


def _key(policy: Policy) -> tuple[str, ...]:
    return tuple(policy.texts.values())


def _changes(
    chosen: PolicyResult, current: PolicyResult, known: dict[tuple[str, ...], PolicyResult]
) -> list[SettingChange]:
    assert chosen.policy is not None
    assert current.policy is not None
    before, after = current.policy.texts, chosen.policy.texts
    found = []
    for key in after:
        if after[key] != before[key]:
            without = _without(chosen.policy, key, before[key], known)
            gain = None if without is None else without.badness[0] - chosen.badness[0]
            found.append(SettingChange(key, before[key], after[key], gain))
    return found


def _without(policy: Policy, key: str, value: str, known: dict[tuple[str, ...], PolicyResult]) -> PolicyResult | None:
    """Return the result of a policy with one setting changed; None if it was not replayed."""
    try:
        return known.get(_key(Policy.from_mapping(policy.texts | {key: value})))
    except PolicyError:
        return None


def _without_idle_change(
    chosen: PolicyResult, current: PolicyResult, known: dict[tuple[str, ...], PolicyResult]
) -> PolicyResult | None:
    """Return the policy without the change that gains least, if that is next to nothing; else None."""
    assert chosen.policy is not None
    assert current.policy is not None
    least = _least_gain(current)
    simpler = [
        without
        for change in _changes(chosen, current, known)
        if (without := _without(chosen.policy, change.key, change.before, known)) is not None
        and without.badness[0] - chosen.badness[0] < least
    ]
    return min(simpler, key=lambda each: each.badness, default=None)


def _choose(possible: Sequence[PolicyResult], current: PolicyResult) -> PolicyResult | None:
    front = unbeaten(possible)
    better = [each for each in front if current.badness[0] - each.badness[0] > _least_gain(current)]
    compared = front if current.policy is AS_RECORDED else [*front, current]
    most = [max(values) for values in zip(*(each.badness for each in [*compared, current]), strict=True)]
    return min(better, key=lambda each: _distance(each, most), default=None)


def _least_gain(current: PolicyResult) -> float:
    """Return the messages per broker crash that a change must save."""
    return max(GAIN_MIN * current.badness[0], _MESSAGES_MIN)


def unbeaten(results: Sequence[PolicyResult]) -> list[PolicyResult]:
    """Return the policies that no other beats, in the given order."""
    ranked = sorted(((each.badness, number) for number, each in enumerate(results)))
    front: list[tuple[tuple[float, ...], int]] = []
    # A policy can only be beaten by one that ranks before it, and then also by one of the front.
    for badness, number in ranked:
        if not any(
            rival != badness and all(theirs <= mine for theirs, mine in zip(rival, badness, strict=True))
            for rival, _ in front
        ):
            front.append((badness, number))
    return [results[number] for number in sorted(number for _, number in front)]


def _distance(result: PolicyResult, most: Sequence[float]) -> float:
    redelivery, *prices = (mine / worst if worst else 0.0 for mine, worst in zip(result.badness, most, strict=True))
    return redelivery + max(prices)


def _settings(result: PolicyResult) -> str:
    return "recorded" if result.policy is AS_RECORDED else policy_text(result.policy)


def short_number(number: float, *, sign: str = "-") -> str:
    """Return a number with three digits, or more if it has more before the point: ``13,312``, ``0.0125``."""
    return f"{number:{sign},.0f}" if abs(number) >= 999.5 else f"{number:{sign},.3g}"


def _p99(total: Estimate) -> int:
    """Return the quantile or, for a trace without duration, the most."""
    return total.max if total.p99 is None else total.p99


def messages_text(total: Estimate) -> str:
    """Return the mean redelivery."""
    return f"{total.expected or 0:,.0f}"


_PER_CRASH = "messages redelivered per broker crash"


def _gain(chosen: Estimate, other: Estimate) -> str:
    before, after = messages_text(other), messages_text(chosen)
    told = [f"{before} -> {after} {_PER_CRASH}", *price_texts(chosen, other)]
    return ", ".join(told)


def price_texts(chosen: Estimate, other: Estimate) -> list[str]:
    """Return the additional cost of a policy: writes and bytes per second, and time blocked if it differs."""
    told = [
        f"{short_number(after - before, sign='+')} {unit}"
        for after, before, unit in zip(chosen.prices, other.prices, ("writes/s", "bytes/s"), strict=False)
        if after is not None and before is not None  # A recording may lack these numbers.
    ]
    if chosen.prices.blocked_s is not None and chosen.blocked_ms != (other.blocked_ms or 0):
        told.append(f"{short_number(chosen.prices.blocked_s - (other.prices.blocked_s or 0), sign='+')} s blocked")
    return told


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
