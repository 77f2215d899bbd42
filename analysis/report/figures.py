"""The report's plots, as data for plotly.js: the names state the content, and more than colour distinguishes them."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from ackstate.analysis.html_page import printable
from ackstate.analysis.replay.curve_sum import CAUSES
from ackstate.analysis.report.contents import CALENDAR_END_MS
from ackstate.analysis.report.inputs import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.estimate.results import PolicyResult, SweepResult
    from ackstate.analysis.pulsar.replay_table import JudgedPrediction
    from ackstate.analysis.report.contents import Contents
    from ackstate.analysis.report.curves import Curve
    from ackstate.analysis.report.inputs import CalibrationPoint

    Figure = dict[str, Any]

# The contrast to white and to black is at least three to one.
COLOURS = ("#2f81c7", "#c2692a", "#3b9150", "#9a62c9", "#cc4a6e", "#7a828b", "#2a8c97")
_ALARM = "#d63b45"
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_PATTERNS = ("", "/", "x", ".", "|")
CAUSE_NAMES = ("not yet flushed", "young", "cut by the range limit", "cut by the byte limit", "wrong route")
# Further runs are in the table only.
_RUNS_MAX = 40
PRICES = ("bytes written per second", "writes per second", "seconds blocked")
# An axis is logarithmic if its numbers differ by this factor.
_WIDE = 50
_NAME_LENGTH_MAX = 40


def total_figure(contents: Contents) -> Figure:
    """Draw all subscriptions at once, under the policies that are shown."""
    totals = [curve for curve in contents.curves if curve.is_total]
    lines = [
        _line(curve, name=result.label, number=number)
        for number, (curve, result) in enumerate(zip(totals, contents.shown, strict=True))
    ]
    return _over_time("total", lines + _crash_marks(contents, totals), totals[0])


def worst_figure(contents: Contents) -> Figure:
    """Draw the worst subscriptions, each by itself."""
    found = [curve for curve in contents.curves if not curve.is_total]
    lines = [
        _line(curve, name=f"{curve.subscription} of {curve.topic}", number=number) for number, curve in enumerate(found)
    ]
    return _over_time("worst", lines + _crash_marks(contents, found), found[0])


def cause_figure(curve: Curve) -> Figure:
    """Stack the causes of a total."""
    not_flushed = [value - sum(others) for value, *others in zip(curve.value, *curve.causes, strict=True)]
    areas = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "one", "name": name, "x": curve.ts_ms, "y": values,
            "line": {"shape": "hv", "width": 1, "color": colour},
            "fillpattern": {"shape": pattern, "fgcolor": colour, "size": 8, "solidity": 0.35},
            "hovertemplate": "%{y:,}",
        }
        for name, values, colour, pattern in zip(
            CAUSE_NAMES, (not_flushed, *curve.causes), COLOURS, _PATTERNS, strict=False
        )
        if any(values)
    ]  # fmt: skip
    return _over_time("causes", areas, curve) | {"hovermode": "x unified"}


def price_figure(result: SweepResult) -> Figure:
    """Draw redelivery over each price; the policies that no other beats have their own marks."""
    tried = [each for each in result.policies if each.policy is not None]
    recommended = [] if result.recommended is None else [result.recommended]
    others = [each for each in tried if each not in recommended]
    groups = (
        ("beaten by another policy", [each for each in others if not each.is_on_front], "circle-open", 8, COLOURS[5]),
        ("not beaten", [each for each in others if each.is_on_front], "diamond", 10, COLOURS[0]),
        ("recommended", recommended, "star", 17, COLOURS[1]),
    )
    traces = [
        {
            "type": "scatter", "mode": "markers", "name": name, "text": [_label(each.label) for each in members],
            "y": [each.total.expected or 0 for each in members],
            "prices": list(zip(*(_prices(each) for each in members), strict=True)),
            "marker": {"symbol": symbol, "size": size, "color": colour, "line": {"color": colour, "width": 1.5}},
            "hovertemplate": "%{text}<br>%{y:,.1f} redelivered, price %{x:,.4~g}<extra></extra>",
        }
        for name, members, symbol, size, colour in groups
        if members
    ]  # fmt: skip
    axes = [_kind([_prices(each)[at] for each in tried]) for at in range(len(PRICES))]
    expected = [each.total.expected or 0 for each in tried]
    return {
        "id": "prices", "traces": traces, "prices": PRICES, "priceAxes": axes, "time": False,
        "x": {"title": PRICES[0], "type": axes[0]}, "y": {"title": "expected duplicates", "type": _kind(expected)},
    }  # fmt: skip


def calibration_figure(points: Sequence[CalibrationPoint]) -> Figure:
    """Draw observed over predicted numbers."""
    most = max((number for point in points for number in (point.predicted, point.observed)), default=1) or 1
    equal = {
        "type": "scatter", "mode": "lines", "name": "observed as predicted", "x": [0, most], "y": [0, most],
        "line": {"color": COLOURS[5], "dash": "dash", "width": 1.5}, "hoverinfo": "skip",
    }  # fmt: skip
    marks = [
        {
            "type": "scatter", "mode": "markers", "name": KINDS[kind], "hovertemplate": _CALIBRATED,
            "x": [point.predicted for point in points if point.kind == kind],
            "y": [point.observed for point in points if point.kind == kind],
            "text": [_label(point.policy) for point in points if point.kind == kind],
            "marker": {"symbol": symbol, "size": 9, "color": colour, "line": {"color": colour, "width": 1.5}},
        }
        for kind, symbol, colour in zip(KINDS, ("circle-open", "triangle-down-open"), COLOURS, strict=False)
        if any(point.kind == kind for point in points)
    ]  # fmt: skip
    return {
        "id": "calibrated", "traces": [equal, *marks], "time": False,
        "x": {"title": "predicted", "type": "linear"}, "y": {"title": "observed", "type": "linear"},
    }  # fmt: skip


def broker_figure(verdicts: Sequence[JudgedPrediction]) -> Figure:
    """Draw the predicted interval and the measured number of each recorded run."""
    shown = verdicts[:_RUNS_MAX]
    rows = list(range(len(shown)))
    low = [each.prediction.low for each in shown]
    width = [each.prediction.high - each.prediction.low for each in shown]
    measured = [(row, len(each.measured)) for row, each in enumerate(shown) if each.measured is not None]
    traces = [
        {
            "type": "scatter", "mode": "markers", "name": "predicted: one number, or the interval of a bar", "y": rows,
            "x": low, "hovertemplate": "%{x:,} at least<extra></extra>",
            "error_x": {"type": "data", "symmetric": False, "array": width, "arrayminus": [0] * len(rows),
                        "thickness": 3, "width": 6, "color": COLOURS[0]},
            "marker": {"symbol": "circle-open", "size": 13, "color": COLOURS[0], "line": {"width": 2}},
        },
        {
            "type": "scatter", "mode": "markers", "name": "measured", "y": [row for row, _ in measured],
            "x": [count for _, count in measured], "hovertemplate": "%{x:,} measured<extra></extra>",
            "marker": {"symbol": "x-thin", "size": 8, "color": COLOURS[1], "line": {"color": COLOURS[1], "width": 2}},
        },
    ]  # fmt: skip
    return {
        "id": "runs-plot", "traces": traces, "time": False, "height": 110 + 24 * len(rows),
        "x": {"title": "messages", "type": "linear"},
        "y": {"title": "", "type": "linear", "tickvals": rows, "ticktext": [_label(each.prediction.topic, 24)
              for each in shown], "range": [len(rows) - 0.5, -0.5]},
    }  # fmt: skip


def _line(curve: Curve, *, name: str, number: int) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "name": _label(name), "label": printable(name), "x": curve.ts_ms,
        "y": curve.value,
        "line": {"shape": "hv", "width": 1.75, "color": COLOURS[number % len(COLOURS)],
                 "dash": _DASHES[number % len(_DASHES)]},
        "hovertemplate": "%{y:,}",
    }  # fmt: skip


def _crash_marks(contents: Contents, curves: Sequence[Curve]) -> list[dict[str, Any]]:
    times = contents.crashes.ts_ms
    if not times:
        return []
    top = max([1, *(max(curve.value) for curve in curves)])
    return [{
        "type": "scatter", "mode": "lines", "name": f"crash ({len(times)})", "connectgaps": False,
        "x": [x for ts_ms in times for x in (ts_ms, ts_ms, None)], "y": [0, top, None] * len(times),
        "line": {"color": _ALARM, "dash": "dot", "width": 1.5}, "hovertemplate": "a process died<extra></extra>",
    }]  # fmt: skip


def _over_time(identity: str, traces: list[dict[str, Any]], curve: Curve) -> Figure:
    begin_ms, end_ms = curve.ts_ms[0], curve.ts_ms[-1]
    is_dated = begin_ms >= 0 and end_ms <= CALENDAR_END_MS
    # An axis needs a width, even if the trace has no duration.
    span = [begin_ms, end_ms] if end_ms > begin_ms else [begin_ms - 1, end_ms + 1]
    return {
        "id": identity, "traces": traces, "time": True,
        "x": {"title": "time (UTC)" if is_dated else "time in ms", "type": "date" if is_dated else "linear",
              "range": span},
        "y": {"title": "messages", "type": "linear", "rangemode": "tozero"},
    }  # fmt: skip


def _prices(result: PolicyResult) -> tuple[float, float, float]:
    total = result.total
    written, writes = (total.per_second(number or 0) for number in (total.bytes_written, total.write_count))
    return written, writes, (total.blocked_ms or 0) / 1_000


def _kind(numbers: Sequence[float]) -> str:
    return "log" if min(numbers) > 0 and max(numbers) > _WIDE * min(numbers) else "linear"


def _label(text: str, length_max: int = _NAME_LENGTH_MAX) -> str:
    """Return a text escaped for a plot, whose HTML subset leaves quotes alone."""
    shown = printable(text)
    return escape(shown if len(shown) <= length_max else f"{shown[: length_max - 1]}…", quote=False)


_CALIBRATED = "%{text}<br>%{y:,} observed, %{x:,} predicted<extra></extra>"
assert len(CAUSE_NAMES) == 1 + len(CAUSES)
