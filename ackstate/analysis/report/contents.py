"""The contents of a report: the value from which the page is rendered, and its charts, with tables of their numbers."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np

from ackstate.analysis.estimate.estimates import CURVE_COUNT_MAX, SLICES_MAX, ThinnedCurve, badness
from ackstate.analysis.estimate.results import CURRENT, RECOMMENDED, RECORDED
from ackstate.analysis.estimate.settings import PULSAR_KEYS, runs_on_pulsar, setting_text, varied_settings
from ackstate.analysis.html_page import (
    CALENDAR_END_MS,
    Band,
    Chart,
    Instants,
    Line,
    Marks,
    escape,
    number_axis,
    table,
    time_axis,
)
from ackstate.analysis.replay.curves import SERIES
from ackstate.analysis.trace.check import trace_hash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.analysis.estimate.results import Estimate, PolicyResult, SweepResult
    from ackstate.analysis.html_page import Layer
    from ackstate.analysis.location import Location
    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.curves import Series
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.trace.parquet import Span

    Key = tuple[str, str]


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


_Item = TypeVar("_Item")
MESSAGES = "messages redelivered per broker crash"
_OF_SUBSCRIPTION = "messages redelivered"
# A curve that falls to less than half more often than this is drawn as a band.
_TEETH_MAX = 24
_SLICES_MAX, _SAMPLES = 60, 32
# Fewer teeth in a slice of time would show as steps of the band.
_TEETH_PER_SLICE = 2
# With fewer points for each tooth, the curve between them is not known.
_POINTS_PER_TOOTH = 6
# An axis is logarithmic if its numbers differ by this factor.
_WIDE = 50
# More signs could not be distinguished, and would make the page large.
_MARKS_MAX = 200


class Slice(NamedTuple):
    """A slice of time."""

    begin_ms: float
    p50: float  # The least number that holds for half of its time
    p99: float  # The least number that holds for 99 % of its time


def figure(identity: str, title: str, drawing: str, caption: str, numbers: str) -> str:
    """Return a chart with its title, its caption, and its numbers in a table that opens on demand."""
    told = f"<figcaption>{caption}</figcaption>" if caption else ""
    return (
        f'<figure id="{identity}"><h3>{escape(title)}</h3>{drawing}{told}'
        f"<details><summary>Numbers of this chart</summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="Numbers: {escape(title)}">{numbers}</div>'
        f"</details></figure>"
    )


def is_sawtooth(curve: Curve) -> bool:
    """Return whether a curve falls too often to be drawn as a line."""
    return _teeth(curve) > _TEETH_MAX


def slices_of(curve: Curve, count: int, whole: Estimate) -> list[Slice]:
    """Return the median and the 99th percentile in equal slices of time.

    They are exact if the curve has enough points for each of its teeth. A curve that was thinned more than that has
    only peaks: then the quantiles of a slice are as far from its peak as those of the whole trace from the peaks.
    """
    edges = np.linspace(curve.ts_ms[0], curve.ts_ms[-1], count + 1)
    times, values = np.array(curve.ts_ms), np.array(curve.value)
    if is_resolved(curve):
        at = edges[0] + (edges[-1] - edges[0]) * (np.arange(count * _SAMPLES) + 0.5) / (count * _SAMPLES)
        rows = values[np.searchsorted(times, at, "right") - 1].reshape(count, _SAMPLES)
        low, high = np.quantile(rows, 0.5, axis=1), np.quantile(rows, 0.99, axis=1)
    else:
        ends = np.searchsorted(times, edges, "left")
        peaks = np.array([
            values[begin:end].max() if end > begin else values[begin - 1] for begin, end in pairwise(ends.tolist())
        ])  # fmt: skip
        low, high = (
            peaks * min(1.0, (number or 0) / max(1.0, float(np.quantile(peaks, share))))
            for number, share in ((whole.p50, 0.5), (whole.p99, 0.99))
        )
    return [Slice(*each) for each in zip(edges[:-1].tolist(), low.tolist(), high.tolist(), strict=True)]


def is_resolved(curve: Curve) -> bool:
    """Return whether a curve has enough points between its falls to compute quantiles from it."""
    return len(curve.ts_ms) >= _POINTS_PER_TOOTH * max(1, _teeth(curve))


def _teeth(curve: Curve) -> int:
    values = np.array(curve.value)
    return int(np.count_nonzero(values[1:] * 2 < values[:-1]))


def total_figure(contents: Contents) -> str:
    """Draw all subscriptions at once, under the policies that are shown."""
    totals = [curve for curve in contents.curves if curve.is_total]
    roles = [role_text(contents.result, each) for each in contents.result.shown]
    wholes = [each.total for each in contents.result.shown]
    named = zip(totals, roles, wholes, strict=True)
    layers = [_drawn(curve, role, ROLE_COLOURS.get(role, 0), whole) for curve, role, whole in named]
    chart = _over_time(contents, totals, layers, MESSAGES, height_px=240)
    told = [_death_text(contents), *_band_texts(totals)]
    whole = [
        f"{role}: p50 {number_text(each.total, 'p50')}, p99 {number_text(each.total, 'p99')}"
        for role, each in zip(roles, contents.result.shown, strict=True)
        if each.total.p50 is not None and each.total.p99 is not None
    ]
    told.append(f"Over the whole trace: {'; '.join(whole)}." if whole else "")
    return figure(
        "total", "All subscriptions together, as if the broker crashed", chart, escape(" ".join(filter(None, told))),
        _curve_table(totals, roles, wholes),
    )  # fmt: skip


def worst_figures(contents: Contents) -> str:
    """Draw the worst subscriptions, each by itself, on one scale."""
    found = [curve for curve in contents.curves if not curve.is_total]
    if not found:
        return ""
    most = number_axis(_OF_SUBSCRIPTION, [max(curve.value) for curve in found], tick_count=2)
    estimates = {
        (each.topic, each.subscription): each
        for each in contents.result.reference.estimates
        if each.scope == "subscription"
    }
    role = role_text(contents.result, contents.result.reference)
    colour = ROLE_COLOURS.get(role, 0)
    panels = []
    for curve in found:
        name = f"{curve.subscription}"
        estimate = estimates[curve.topic, curve.subscription]
        numbers = (("mean", "expected"), ("p99", "p99"), ("max", "max"))
        said = [f"{label} {number_text(estimate, key)}" for label, key in numbers if getattr(estimate, key) is not None]
        layers = [*_deaths(contents), _drawn(curve, "", colour, estimate)]
        times = time_axis(curve.ts_ms[0], curve.ts_ms[-1], tick_count=2)
        summary = f"{name}: {', '.join(said)} {_OF_SUBSCRIPTION}"
        drawing = Chart(times, most, layers, summary, 90).html(has_key=False)
        panels.append(
            f'<div class="panel"><h4><bdi>{escape(short_name(name))}</bdi></h4>'
            f'<p class="of"><bdi>{escape(short_name(curve.topic))}</bdi></p>'
            f'<p class="numbers">{", ".join(said)}</p>{drawing}</div>'
        )
    title = f"The {len(found)} worst subscriptions" if len(found) > 1 else "The worst subscription"
    names = [f"{short_name(curve.subscription)} of {short_name(curve.topic)}" for curve in found]
    scale = ", on one scale" if len(found) > 1 else ""
    caption = " ".join([f"{escape(role[:1].upper() + role[1:])}{scale}.", *_band_texts(found)])
    drawn = f'<div class="panels">{"".join(panels)}</div>'
    wholes = [estimates[curve.topic, curve.subscription] for curve in found]
    return figure("worst", title, drawn, caption, _curve_table(found, names, wholes))


def cause_figure(contents: Contents, curve: Curve) -> str:
    """Stack the causes of a total."""
    not_flushed = [value - sum(others) for value, *others in zip(curve.value, *curve.causes, strict=True)]
    names, series = [*CAUSE_NAMES.values()], (not_flushed, *curve.causes)
    drawn = [(name, values, number) for number, (name, values) in enumerate(zip(names, series, strict=True))]
    below = [0] * len(curve.ts_ms)
    layers: list[Layer] = []
    for name, values, number in drawn:
        if any(values):
            above = [low + value for low, value in zip(below, values, strict=True)]
            points = [*zip(curve.ts_ms, below, above, strict=True)]
            layers.append(Band(name, points, number))
            below = above
    chart = _over_time(contents, [curve], layers, MESSAGES, height_px=200)
    rows = [
        (time_text(ts_ms), *(f"{values[at]:,}" for _, values, _ in drawn if any(values)))
        for at, ts_ms in _thin(list(enumerate(curve.ts_ms)))
    ]
    numbers = table(("time", *(name for name, values, _ in drawn if any(values))), rows)
    return figure("causes", "All subscriptions together, by cause", chart, "", numbers)


PRICES = ("writes per second", "bytes written per second", "seconds blocked")


def price_figures(result: SweepResult) -> str:
    """Draw redelivery over each price that differs between policies."""
    tried = _most_important([each for each in result.policies if each.policy is not None], result)
    drawn = []
    names = policy_names(result)
    expected = [each.total.expected or 0 for each in tried]
    y = number_axis(MESSAGES, expected, is_log=_is_wide(expected))
    for at, price in enumerate(PRICES):
        numbers = [_prices(each)[at] for each in tried]
        if len(set(numbers)) < 2:
            continue
        x = number_axis(price, numbers, is_log=_is_wide(numbers))
        groups: dict[str, list[tuple[float, float, str]]] = {}
        for each, number in zip(tried, numbers, strict=True):
            said = (
                f"{names[each.label]}: {count_text(each.total.expected or 0)} redelivered, {count_text(number)} {price}"
            )
            groups.setdefault(_group(result, each), []).append((number, each.total.expected or 0, said))
        layers = [
            Marks(name, groups[name], sign, colour, is_large=name == RECOMMENDED)
            for name, (sign, colour) in _SIGNS.items()
            if name in groups
        ]
        drawn.append(f'<div class="panel">{Chart(x, y, layers, f"{MESSAGES} over {price}", 190).html()}</div>')
    if not drawn:
        return ""
    rows = [
        (names[each.label], _group(result, each), count_text(each.total.expected or 0), *map(count_text, _prices(each)))
        for each in _thin(tried)
    ]
    numbers_table = table(("policy", "role", MESSAGES, *PRICES), rows)
    count = sum(each.policy is not None for each in result.policies)
    some = f" Drawn are {len(tried)} of {count:,} policies." if len(tried) < count else ""
    caption = f"Each sign is a policy: the lower the better, the further left the cheaper.{some}"
    return figure(
        "prices", "Redelivery and its price", f'<div class="panels">{"".join(drawn)}</div>', caption, numbers_table
    )


_SIGNS = {
    "beaten by another policy": ("○", 5), "not beaten": ("◆", 3), "never flushed in this trace": ("△", 5),
    RECOMMENDED: ("★", ROLE_COLOURS[RECOMMENDED]), CURRENT: ("●", ROLE_COLOURS[CURRENT]),
}  # fmt: skip


def _most_important(tried: Sequence[PolicyResult], result: SweepResult) -> list[PolicyResult]:
    """Return the policies to draw: those with a role, then those that no other beats, up to a limit."""
    ranked = sorted(tried, key=lambda each: (not result.role_of(each), not each.is_on_front))
    return ranked[:_MARKS_MAX]


def _group(result: SweepResult, each: PolicyResult) -> str:
    if role := result.role_of(each):
        return role
    if each.never_flushed:
        return "never flushed in this trace"
    return "not beaten" if each.is_on_front else "beaten by another policy"


def policy_names(result: SweepResult) -> dict[str, str]:
    """Return the label of each policy -> all settings that vary in the grid, with their units, in words."""
    tried = [each.policy for each in result.policies if each.policy is not None]
    varied = varied_settings(tried) or ["flush_interval_ms"]
    names = {each.label: _name_of(each, varied) for each in tried}
    return {each.label: names.get(each.label, each.label) for each in result.policies}


def _name_of(policy: Policy, varied: Sequence[str]) -> str:
    is_pulsar = "format" in varied and runs_on_pulsar(policy)
    shown = [key for key in varied if not is_pulsar or key not in PULSAR_KEYS]
    words = ", ".join(setting_text(key, policy.texts[key]) for key in shown)
    return f"Pulsar 4.2: {words}" if is_pulsar else words


def _drawn(curve: Curve, name: str, colour: int, whole: Estimate) -> Layer:
    """Return a curve as a line, or as a band if it has too many teeth for a line."""
    if not is_sawtooth(curve):
        return Line(name, [*zip(curve.ts_ms, curve.value, strict=True)], colour)
    found = slices_of(curve, _slice_count(curve), whole)
    points = [(each.begin_ms, each.p50, each.p99) for each in found]
    return Band(name, [*points, (curve.ts_ms[-1], found[-1].p50, found[-1].p99)], colour)


def _slice_count(curve: Curve) -> int:
    return min(_SLICES_MAX, _teeth(curve) // _TEETH_PER_SLICE)


def _band_texts(curves: Sequence[Curve]) -> list[str]:
    """Return the meaning of the bands, if there are any."""
    widths_s = [
        (curve.ts_ms[-1] - curve.ts_ms[0]) / _slice_count(curve) / 1_000 for curve in curves if is_sawtooth(curve)
    ]
    if not widths_s:
        return []
    low, high = f"{min(widths_s):.3g}", f"{max(widths_s):.3g}"
    thinned = any(is_sawtooth(curve) and not is_resolved(curve) for curve in curves)
    doubt = " Where a slice has too few points, its quantiles are estimated from its peak." if thinned else ""
    return [f"A band reaches from p50 to p99 in each slice of {low if low == high else f'{low} to {high}'} s.{doubt}"]


def _over_time(
    contents: Contents, curves: Sequence[Curve], layers: Sequence[Layer], unit: str, *, height_px: int
) -> str:
    x = time_axis(curves[0].ts_ms[0], curves[0].ts_ms[-1])
    y = number_axis(unit, [max(curve.value) for curve in curves])
    return Chart(x, y, [*_deaths(contents), *layers], f"{unit}, over time", height_px).html()


def _deaths(contents: Contents) -> list[Layer]:
    times = contents.crashes.ts_ms
    return [Instants(f"crash in the trace ({len(times)})", times)] if times else []


def _death_text(contents: Contents) -> str:
    crashes = contents.crashes
    if not crashes.count:
        return ""
    drawn = f", of which the first {len(crashes.ts_ms):,} are drawn" if crashes.count > len(crashes.ts_ms) else ""
    return f"Processes died at {crashes.count:,} moment{'' if crashes.count == 1 else 's'}{drawn}."


_ROWS_MAX = 40


def _curve_table(curves: Sequence[Curve], names: Sequence[str], wholes: Sequence[Estimate]) -> str:
    slices = [slices_of(curve, _ROWS_MAX // 2, whole) for curve, whole in zip(curves, wholes, strict=True)]
    rows = [
        (time_text(round(found[0].begin_ms)), *(f"{each.p50:,.0f} / {each.p99:,.0f}" for each in found))
        for found in zip(*slices, strict=True)
    ]
    return table(("from", *(f"{name}, p50 / p99" for name in names)), rows)


def _thin(items: Sequence[_Item]) -> list[_Item]:
    step = -(-len(items) // _ROWS_MAX) or 1
    return [*items[::step]]


def _prices(result: PolicyResult) -> list[float]:
    return [each or 0 for each in result.total.prices]


def _is_wide(numbers: Sequence[float]) -> bool:
    return min(numbers) > 0 and max(numbers) > _WIDE * min(numbers)
