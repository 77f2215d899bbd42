"""The contents of a report: the value from which the page is rendered, and the answers of its first screen."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from ackstate.analysis.estimate.estimates import CURVE_COUNT_MAX, SLICES_MAX, ThinnedCurve, badness
from ackstate.analysis.estimate.results import CURRENT, RECOMMENDED, RECORDED
from ackstate.analysis.html_page import CALENDAR_END_MS
from ackstate.analysis.replay.curves import SERIES
from ackstate.analysis.trace.check import trace_hash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.analysis.estimate.results import Estimate, PolicyResult, SweepResult
    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.curves import Series
    from ackstate.analysis.trace.parquet import Span

    Key = tuple[str, str]
    from ackstate.analysis.location import Location


CAUSE_NAMES = {
    "not_flushed": "not yet flushed", "young": "young", "cut_by_ranges": "cut by the range limit",
    "cut_by_bytes": "cut by the byte limit", "cut_by_route": "cut because no ledger was writable",
}  # fmt: skip
"""Causes of redelivery: fields of `Estimate` -> in words."""
_CAUSE_DETAILS = {
    "not_flushed": "acked since the last write of their cursor",
    "young": "held back because their messages were sent only recently",
    "cut_by_ranges": "in ranges beyond the limit on persisted ranges",
    "cut_by_bytes": "in records beyond the limit in bytes",
    "cut_by_route": "in the metadata store, which holds less",
}
_NAME_LENGTH_MAX, _NAME_BEGIN = 62, 38
ROLE_COLOURS = {RECORDED: 0, CURRENT: 1, RECOMMENDED: 2}
"""The colour of each role in all charts."""


@dataclass(frozen=True, slots=True)
class Contents:
    """A report."""

    result: SweepResult  # The estimates
    # The total curve of each policy in `shown`, and the worst subscriptions under the reference policy.
    curves: tuple[Curve, ...]
    crashes: CrashTimes  # When processes died
    provenance: tuple[tuple[str, str], ...]  # The sources and programs of the report: pairs of name and text


class Share(NamedTuple):
    """A part of the redelivery of a broker crash."""

    name: str  # A subscription or a cause
    detail: str  # The topic of a subscription; an explanation of a cause
    number: float  # Messages per broker crash
    share: float  # The share of all, from 0 to 1


def role_text(result: SweepResult, policy: PolicyResult) -> str:
    """Return the role of a policy, or else its label."""
    return result.role_of(policy) or policy.label


def worst_subscriptions(result: SweepResult) -> list[tuple[str, str]]:
    """Return (topic, subscription) of those with most redelivery under the reference policy, the worst first."""
    return [(each.topic, each.subscription) for each in _worst(result.reference)[:CURVE_COUNT_MAX]]


def _worst(result: PolicyResult) -> list[Estimate]:
    found = [each for each in result.estimates if each.scope == "subscription"]
    return sorted(found, key=lambda each: badness(asdict(each)))


def main_subscriptions(result: PolicyResult, *, count_max: int) -> list[Share]:
    """Return the subscriptions with most redelivery per broker crash, the worst first; none without redelivery."""
    total = result.total.expected
    if not total:
        return []
    return [
        Share(each.subscription, each.topic, each.expected, each.expected / total)
        for each in _worst(result)[:count_max]
        if each.expected
    ]


def causes(result: PolicyResult) -> list[Share]:
    """Return the causes of redelivery, the most frequent first, without those that never apply."""
    total = result.total
    if not total.expected:
        return []
    numbers = [(key, getattr(total, key) or 0.0) for key in CAUSE_NAMES]
    found = [
        Share(CAUSE_NAMES[key], _CAUSE_DETAILS[key], number, number / total.expected)
        for key, number in numbers
        if number > 0
    ]
    return sorted(found, key=lambda each: -each.number)


def headline(result: SweepResult) -> str:
    """Return one sentence about redelivery after a crash of the broker."""
    total, role = result.quoted.total, role_text(result, result.quoted)
    if not total.max:
        return f"Had the broker crashed, no acked message would have been redelivered, at any time ({role})"
    worst = "" if total.max_ts_ms is None else f", at {time_text(total.max_ts_ms)}"
    if total.expected is None:
        return (
            f"The trace has no duration: had the broker crashed{worst}, {_messages(total, 'max')} would have been "
            f"redelivered ({role})"
        )
    return (
        f"Had the broker crashed, {_messages(total, 'expected')} would have been redelivered on average ({role}); "
        f"at worst {number_text(total, 'max')}{worst}"
    )


def _messages(estimate: Estimate, name: str) -> str:
    return f"{number_text(estimate, name)} acked message{'' if getattr(estimate, name) == 1 else 's'}"


def number_text(estimate: Estimate, name: str) -> str:
    """Return a known number of an estimate."""
    return count_text(getattr(estimate, name))


def count_text(number: float) -> str:
    """Return a number for a sentence, without a fraction if it is large.

    >>> count_text(41_234.6), count_text(0.25), count_text(7), count_text(1e-6)
    ('41,235', '0.25', '7', 'less than 0.01')
    """
    if 0 < number < 0.01:
        return "less than 0.01"
    return f"{number:,.0f}" if number >= 100 else f"{number:,.3g}"


def short_name(text: str) -> str:
    """Return a name without its middle if it is long: many long names differ only at their ends.

    >>> short_name("team-1-" + "service-" * 20 + "067")
    'team-1-service-service-service-service…ice-service-service-067'
    """
    return (
        text if len(text) <= _NAME_LENGTH_MAX else f"{text[:_NAME_BEGIN]}…{text[_NAME_BEGIN - _NAME_LENGTH_MAX + 1 :]}"
    )


def time_text(ts_ms: int) -> str:
    """Return an instant in words; as a number if it is outside the calendar.

    >>> time_text(1_700_000_030_000)
    '2023-11-14 22:13:50.000 UTC'
    """
    if not 0 <= ts_ms <= CALENDAR_END_MS:
        return f"{ts_ms} ms"
    at = datetime.fromtimestamp(ts_ms // 1_000, UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}.{ts_ms % 1_000:03} UTC"


TOTAL = ("", "")
"""The key of all subscriptions together."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line: each value holds from its time to the next."""

    policy: int  # Index in the grid
    topic: str  # Empty for all subscriptions at once
    subscription: str  # Empty for all subscriptions at once
    ts_ms: tuple[int, ...]  # Rising, each once; the first and the last are those of the trace
    value: tuple[int, ...]  # Acked messages that a crash would redeliver
    # For each of `CAUSES`, the number of them due to it; the rest are not yet flushed.
    causes: tuple[tuple[int, ...], ...]

    @property
    def is_total(self) -> bool:
        """Whether it is the curve of all subscriptions at once."""
        return (self.topic, self.subscription) == TOTAL


@dataclass(frozen=True, slots=True)
class CrashTimes:
    """When processes died."""

    ts_ms: tuple[int, ...]  # The first `CRASHES_MAX` times, rising
    count: int  # The number of times

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        """Return the times in the rows of `estimates`."""
        total = next(row for row in rows if (row["policy"], row["scope"]) == (0, "total"))
        return cls(tuple(total["crash_ms"] or ()), total["crash_count"])


def curves_of_rows(
    rows: Sequence[Mapping[str, Any]], span: Span, policies: Sequence[int], *, subscriptions: Sequence[Key],
    drawn: int = 0,
) -> list[Curve]:  # fmt: skip
    """Return the curve of all subscriptions at once under some policies, and some subscriptions' under one."""
    points = {(row["policy"], row["topic"], row["subscription"]): row for row in rows if row["curve_ms"] is not None}
    wanted = [(number, TOTAL) for number in policies] + [(drawn, key) for key in subscriptions]
    found = []
    for number, key in wanted:
        curve = ThinnedCurve(span.begin_ms, span.end_ms, slices_max=SLICES_MAX)
        if row := points.get((number, *key)):
            ts_ms = np.array(row["curve_ms"], np.int64)
            curve.add(ts_ms, np.array(row["curve"], np.int64).reshape(SERIES, -1))
        found.append(
            curve_of((policies.index(number), *key), *curve.points(SERIES), begin_ms=span.begin_ms, end_ms=span.end_ms)
        )
    return found


def curve_of(key: tuple[int, str, str], ts_ms: Int64s, values: Series, *, begin_ms: int, end_ms: int) -> Curve:
    """Return the curve of some points in order; no points if nothing is ever redelivered."""
    begin = np.zeros((SERIES, 1), np.int64)
    ts_ms = np.concatenate([[begin_ms], ts_ms, [end_ms]])
    values = np.concatenate([begin, values, values[:, -1:] if values.size else begin], axis=1)
    # Points may share a time: a peak at the end of a slice, or that at the end of the trace. The last one counts.
    lasts = np.append(ts_ms[1:] != ts_ms[:-1], True)
    value, *causes = (tuple(each) for each in values[:, lasts].tolist())
    return Curve(*key, tuple(ts_ms[lasts].tolist()), value, tuple(causes))


def make_contents(
    rows: Sequence[Mapping[str, Any]], span: Span, trace: Location, result: SweepResult, *,
    made_by: Sequence[tuple[str, str]],
) -> Contents:  # fmt: skip
    """Return the report of some estimates; `made_by` names the command and the engine.

    Complexity: reading the files of the trace for their hash.
    """
    shown = [result.policies.index(each) for each in result.shown]
    drawn = result.policies.index(result.reference)
    lines = curves_of_rows(rows, span, shown, subscriptions=worst_subscriptions(result), drawn=drawn)
    days = (("days", f"{len(span.days):,}"),) if span.days else ()
    programs = (("ackstate", version("ackstate")), ("Python", platform.python_version()))
    provenance = (("SHA-256 of the trace", trace_hash(trace)), *days, *programs, *made_by)
    return Contents(result, tuple(lines), CrashTimes.of_rows(rows), provenance)
