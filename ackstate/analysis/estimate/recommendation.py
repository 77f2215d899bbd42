"""Recommends a policy of a grid: the one that buys most for its price, compared with the current policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate.analysis.estimate.settings import change_text, policy_text, runs_on_pulsar
from ackstate.analysis.replay.policy import AS_RECORDED, Policy, PolicyError
from ackstate.cursor.formats import Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.estimate.results import Estimate, PolicyResult

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
