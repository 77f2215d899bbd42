"""A calibration as one SVG file, which needs no script and no network."""

from __future__ import annotations

from collections import Counter
from html import escape
from math import log2, log10
from typing import TYPE_CHECKING

from benchmarks.calibration.results import errors
from benchmarks.svg import picture

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.calibration.results import Calibration, Death, Mean

# Pixels: a panel's plot and its margins.
_SIDE, _LEFT, _ABOVE, _BELOW = 320, 64, 52, 56
_TOP = 44
_DECADES = ("0", "1", "10", "100", "1,000", "10,000")
_BARS_MAX = 10

_STYLE = """\
.axis { stroke: #8a949e; fill: none; }
.grid { stroke: #8a949e; stroke-opacity: .25; }
.equal { stroke: #8a949e; stroke-dasharray: 4 3; }
.kill { stroke: #2f81c7; fill: #2f81c7; fill-opacity: .3; }
.cut { stroke: #c2692a; fill: none; stroke-width: 1.4; }
.mean { stroke: #3b8f5a; fill: #3b8f5a; }
.miss { stroke: #b8860b; fill: #b8860b; }
.wrong { stroke-width: 4; stroke: #c5221f; fill: #c5221f; }
"""


def drawn(calibration: Calibration) -> str:
    """Return the text of the file: each death, the means, and how errors are distributed."""
    panels = [_deaths(calibration), _means(calibration.means), _errors(calibration)]
    width = len(panels) * (_LEFT + _SIDE) + 24
    height = _TOP + _ABOVE + _SIDE + _BELOW
    parts = ['<text x="20" y="24">Predicted and observed redelivery</text>']
    for at, panel in enumerate(panels):
        parts += [f'<g transform="translate({_LEFT + at * (_LEFT + _SIDE)} {_TOP + _ABOVE})">', *panel, "</g>"]
    return picture(width, height, style=_STYLE, parts=parts)


def _deaths(calibration: Calibration) -> list[str]:
    kills, cuts = calibration.kills, calibration.power_cuts
    title = f"Each death: {len(kills):,} kills (filled), {len(cuts):,} power cuts (squares)"
    parts = _frame(title, "predicted, messages", "observed, messages")
    for (predicted, observed, holds), count in sorted(Counter(_dot(death) for death in kills).items()):
        radius = 2.2 + 0.8 * log2(count)
        kind = "kill" if holds else "wrong"
        parts.append(f'<circle class="{kind}" cx="{_at(predicted)}" cy="{_up(observed)}" r="{radius:.1f}"/>')
    for predicted, observed, holds in sorted({_dot(death, is_cut=True) for death in cuts}):
        kind = "cut" if holds else "wrong"
        x, y = _at(predicted) - 3, _up(observed) - 3
        parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="6" height="6"/>')
    return parts


def _dot(death: Death, *, is_cut: bool = False) -> tuple[int, int, bool]:
    if is_cut:
        return max(death.predicted), death.observed, death.is_within
    return death.observed - death.error, death.observed, death.is_equal


def _means(means: Sequence[Mean]) -> list[str]:
    within = sum(mean.holds for mean in means)
    title = f"Each point, mean and 95 % interval: {within} of {len(means)} hold"
    parts = _frame(title, "expected, messages", "mean observed, messages")
    for mean in means:
        low, high = max(mean.observed - mean.half_width, 0), mean.observed + mean.half_width
        x = _at(mean.expected)
        kind = "mean" if mean.holds else "miss"
        parts.append(f'<line class="{kind}" x1="{x}" x2="{x}" y1="{_up(low)}" y2="{_up(high)}"/>')
        parts.append(f'<circle class="{kind}" cx="{x}" cy="{_up(mean.observed)}" r="2.5"/>')
    return parts


def _errors(calibration: Calibration) -> list[str]:
    """Bars for the errors, those of kills to the left of those of power cuts; far ones are put together."""
    found = {"kill": errors(calibration.kills), "cut": _slack(calibration.power_cuts)}
    bars = _bars(error for each in found.values() for error in each)
    most = max([1, *(count for each in found.values() for count in each.values())])
    parts = [
        '<text y="-26">Observed minus predicted</text>',
        '<text class="soft" x="-40" y="-8">deaths, on a logarithmic scale; kills filled, power cuts not</text>',
        f'<path class="axis" d="M0 0V{_SIDE}H{_SIDE}"/>',
        f'<text class="soft middle" x="{_SIDE / 2}" y="{_SIDE + 34}">messages</text>',
    ]
    step = _SIDE / max(len(bars), 3)
    for at, (name, within) in enumerate(bars.items()):
        for side, (kind, counts) in enumerate(found.items()):
            count = sum(counts.get(error, 0) for error in within)
            height = (_SIDE - 20) * log10(1 + count) / log10(1 + most)
            parts += _bar(kind, count, x=step * (at + 0.15 + 0.35 * side), width=step * 0.3, height=height)
        parts.append(f'<text class="soft middle" x="{(at + 0.5) * step:.1f}" y="{_SIDE + 16}">{escape(name)}</text>')
    return parts


def _bar(kind: str, count: int, *, x: float, width: float, height: float) -> list[str]:
    if not count:
        return []
    y = _SIDE - height
    return [
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>',
        f'<text class="soft middle" x="{x + width / 2:.1f}" y="{y - 4:.1f}">{count:,}</text>',
    ]


def _slack(cuts: Sequence[Death]) -> dict[int, int]:
    return dict(sorted(Counter(-death.slack for death in cuts).items()))


def _bars(found: Iterable[int]) -> dict[str, set[int]]:
    """Return a name for each bar, in order, and the errors in it: 0 by itself, others by powers of ten."""
    bars: dict[tuple[int, int], set[int]] = {}
    for error in {0, *found}:
        sign, size = (error > 0) - (error < 0), len(str(abs(error))) if error else 0
        bars.setdefault((sign * size, sign), set()).add(error)
    return {_name(key): errors_of_bar for key, errors_of_bar in sorted(bars.items())[:_BARS_MAX]}


def _name(key: tuple[int, int]) -> str:
    size, sign = key
    if not sign:
        return "0"
    low, high = 10 ** (abs(size) - 1), 10 ** abs(size) - 1
    return f"{sign * low:+} to {sign * high:+}"


def _frame(title: str, x_name: str, y_name: str) -> list[str]:
    parts = [
        f'<text y="-26">{escape(title)}</text>',
        f'<text class="soft" x="-40" y="-8">{escape(y_name)}</text>',
        f'<path class="axis" d="M0 0V{_SIDE}H{_SIDE}"/>',
        f'<line class="equal" x1="0" y1="{_SIDE}" x2="{_SIDE}" y2="0"/>',
        f'<text class="soft middle" x="{_SIDE / 2}" y="{_SIDE + 34}">{escape(x_name)}</text>',
    ]
    for text in _DECADES:
        value = int(text.replace(",", ""))
        x, y = _at(value), _up(value)
        parts.append(f'<line class="grid" x1="0" x2="{_SIDE}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="soft number" x="-6" y="{y + 4:.1f}">{text}</text>')
        parts.append(f'<text class="soft middle" x="{x}" y="{_SIDE + 16}">{text}</text>')
    return parts


def _at(value: float) -> float:
    """Where a number is along an axis: by its logarithm, with room for 0."""
    high = int(_DECADES[-1].replace(",", ""))
    return round(_SIDE * log10(1 + min(value, high)) / log10(1 + high), 1)


def _up(value: float) -> float:
    return round(_SIDE - _at(value), 1)
