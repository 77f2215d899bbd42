"""Draws lines over linear or logarithmic axes as one SVG file, which needs no script and no network."""

from __future__ import annotations

from html import escape
from math import log10
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.svg import picture

if TYPE_CHECKING:
    from collections.abc import Sequence

# Pixels: a panel's plot and its margins. Names stand to its right.
_WIDTH, _HEIGHT = 400, 230
_LEFT, _RIGHT, _ABOVE, _BELOW = 76, 284, 44, 54
_TOP = 34
_LABEL_GAP = 15
_COLOURS = 6

_STYLE = """\
.axis { stroke: #8a949e; fill: none; }
.grid { stroke: #8a949e; stroke-opacity: .25; }
.mark { stroke: #c5221f; stroke-width: 5; }
.spread { stroke-opacity: .4; stroke-width: 5; }
polyline { fill: none; stroke-width: 1.8; }
.c0 { stroke: #2f81c7; } .c1 { stroke: #c2692a; } .c2 { stroke: #3b8f5a; }
.c3 { stroke: #8a5fb8; } .c4 { stroke: #a8851c; } .c5 { stroke: #4a9aa5; }
"""


class PanelAxis(NamedTuple):
    """The scale of a side, from the first tick to the last.

    Attributes:
        name: Below or above it.
        ticks: Values, rising, and their texts; an empty text has no line either.
        is_log: Whether equal factors have equal distances.
    """

    name: str
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return how far along the axis a value lies, 0 to 1; beyond its ends, at its ends."""
        low, high = self.ticks[0][0], self.ticks[-1][0]
        value = min(max(value, low), high)
        if self.is_log:
            return log10(value / low) / log10(high / low)
        return (value - low) / (high - low)


class PanelLine(NamedTuple):
    """A line through points, and the text at its end.

    Attributes:
        name: The text.
        points: From left to right.
        spreads: The lowest and highest value of each point, if it has them.
    """

    name: str
    points: Sequence[tuple[float, float]]
    spreads: Sequence[tuple[float, float]] = ()


class Mark(NamedTuple):
    """A figure of another system, or a limit, optionally from `low` to `high`; it is left of its text."""

    name: str
    x: float
    low: float
    high: float


class Panel(NamedTuple):
    """A plot."""

    title: str
    x: PanelAxis
    y: PanelAxis
    lines: Sequence[PanelLine]
    marks: Sequence[Mark] = ()


def drawn(title: str, panels: Sequence[Panel]) -> str:
    """Return the text of an SVG file, a panel below the other."""
    width = _LEFT + _WIDTH + _RIGHT
    height = _TOP + len(panels) * (_ABOVE + _HEIGHT + _BELOW)
    parts = [f'<text x="20" y="24">{escape(title)}</text>']
    for at, panel in enumerate(panels):
        y = _TOP + _ABOVE + at * (_ABOVE + _HEIGHT + _BELOW)
        parts += [f'<g transform="translate({_LEFT} {y})">', *_panel(panel), "</g>"]
    return picture(width, height, style=_STYLE, parts=parts)


def _panel(panel: Panel) -> list[str]:
    parts = [f'<text x="{20 - _LEFT}" y="-22">{escape(panel.title)}</text>', *_axes(panel)]
    for mark in panel.marks:
        parts += _mark(panel, mark)
    for at, line in enumerate(panel.lines):
        parts += _line(panel, line, f"c{at % _COLOURS}")
    return [*parts, *_names(panel)]


def _axes(panel: Panel) -> list[str]:
    parts = [f'<path class="axis" d="M0 0V{_HEIGHT}H{_WIDTH}"/>']
    for value, text in panel.y.ticks:
        if text:
            y = _y(panel, value)
            parts.append(f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="soft number" x="-6" y="{y + 4:.1f}">{escape(text)}</text>')
    for value, text in panel.x.ticks:
        parts.append(f'<text class="soft middle" x="{_x(panel, value)}" y="{_HEIGHT + 16}">{escape(text)}</text>')
    parts.append(f'<text class="soft middle" x="{_WIDTH / 2}" y="{_HEIGHT + 32}">{escape(panel.x.name)}</text>')
    parts.append(f'<text class="soft" x="{20 - _LEFT}" y="-7">{escape(panel.y.name)}</text>')
    return parts


def _mark(panel: Panel, mark: Mark) -> list[str]:
    x, high, low = _x(panel, mark.x), _y(panel, mark.high), _y(panel, mark.low)
    # A single figure is shown as a short bar as well.
    high, low = (high, low) if low - high >= 3 else (high - 1.5, low + 1.5)
    return [
        f'<line class="mark" x1="{x}" x2="{x}" y1="{high:.1f}" y2="{low:.1f}"/>',
        f'<text class="soft number" x="{x - 6:.1f}" y="{(high + low) / 2 + 4:.1f}">{escape(mark.name)}</text>',
    ]


def _line(panel: Panel, line: PanelLine, colour: str) -> list[str]:
    points = " ".join(f"{_x(panel, x)},{_y(panel, y)}" for x, y in line.points)
    parts = [f'<polyline class="{colour}" points="{points}"/>']
    for (x, _), (low, high) in zip(line.points, line.spreads, strict=False):
        at = _x(panel, x)
        parts.append(
            f'<line class="{colour} spread" x1="{at}" x2="{at}" y1="{_y(panel, high)}" y2="{_y(panel, low)}"/>'
        )
    return parts


def _names(panel: Panel) -> list[str]:
    """Say each line's name at its end, one below the other where ends are close."""
    ends = sorted((_y(panel, line.points[-1][1]), at, line) for at, line in enumerate(panel.lines))
    parts, lowest = [], -_LABEL_GAP + 0.0
    # From the bottom none may be pushed out of the plot.
    room = _HEIGHT - 4 - _LABEL_GAP * (len(ends) - 1)
    for at, (y, colour, line) in enumerate(ends):
        lowest = max(min(y, room + _LABEL_GAP * at), lowest + _LABEL_GAP)
        x = _x(panel, line.points[-1][0])
        parts.append(f'<path class="axis c{colour % _COLOURS}" d="M{x} {y}L{_WIDTH + 16} {lowest:.1f}"/>')
        parts.append(f'<text class="soft" x="{_WIDTH + 20}" y="{lowest + 4:.1f}">{escape(line.name)}</text>')
    return parts


def _x(panel: Panel, value: float) -> float:
    return round(_WIDTH * panel.x.share(value), 1)


def _y(panel: Panel, value: float) -> float:
    return round(_HEIGHT * (1 - panel.y.share(value)), 1)
