"""Draws the use of a limit over time as one SVG file: small panels, which need no script and no network."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.svg import picture

if TYPE_CHECKING:
    from collections.abc import Sequence

# Pixels: a panel's plot and its margins.
_WIDTH, _HEIGHT = 290, 130
_LEFT, _ABOVE, _BELOW = 20, 40, 34
_COLUMNS = 3
_TOP = 66

_STYLE = """\
.axis { stroke: #8a949e; fill: none; }
.limit { stroke: #c5221f; stroke-dasharray: 5 3; }
polyline { fill: none; stroke-width: 1.8; }
.estimate { stroke: #c2692a; }
.exact { stroke: #2f81c7; }
"""


class UsageCurve(NamedTuple):
    """The highest use in each second.

    Attributes:
        name: ``exact`` or ``estimate``; the line's colour follows from it.
        by_second: From the first second on.
    """

    name: str
    by_second: Sequence[int]


class LimitPanel(NamedTuple):
    """A limit and how it was used, by each kind of accounting; above it, the highest use of each."""

    title: str
    rate: str
    limit: int
    curves: Sequence[UsageCurve]


def drawn(panels: Sequence[LimitPanel]) -> str:
    """Return the text of an SVG file, three panels a row."""
    row_count = -(-len(panels) // _COLUMNS)
    width = _COLUMNS * (_LEFT + _WIDTH) + _LEFT
    height = _TOP + row_count * (_ABOVE + _HEIGHT + _BELOW)
    parts = [*_legend()]
    for at, panel in enumerate(panels):
        row, column = divmod(at, _COLUMNS)
        x = _LEFT + column * (_LEFT + _WIDTH)
        y = _TOP + _ABOVE + row * (_ABOVE + _HEIGHT + _BELOW)
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    return picture(width, height, style=_STYLE, parts=parts)


def _legend() -> list[str]:
    x, parts = _LEFT, [f'<text x="{_LEFT}" y="24">How far a limit on the ack state is passed</text>']
    for name, words in (
        ("exact", "exact: reserved before a message is sent"),
        ("estimate", "estimate: marked at each persist"),
        ("limit", "limit"),
    ):
        parts.append(f'<line class="{name}" stroke-width="2" x1="{x}" x2="{x + 24}" y1="44" y2="44"/>')
        parts.append(f'<text class="soft" x="{x + 30}" y="48">{words}</text>')
        x += 290
    return parts


def _panel(panel: LimitPanel) -> list[str]:
    most = max(panel.limit, *(max(curve.by_second) for curve in panel.curves))
    seconds = max(len(curve.by_second) for curve in panel.curves)
    limit_y = _y(panel.limit, most)
    highest = {curve.name: max(curve.by_second) for curve in panel.curves}
    said = f"exact {highest['exact']:,}, estimate {highest['estimate']:,}; limit {panel.limit:,}"
    return [
        f'<text y="-24">{escape(panel.title)}</text>',
        f'<text class="soft" y="-9">{said}</text>',
        f'<path class="axis" d="M0 0V{_HEIGHT}H{_WIDTH}"/>',
        *(_line(curve, most, seconds) for curve in panel.curves),
        f'<line class="limit" x1="0" x2="{_WIDTH}" y1="{limit_y}" y2="{limit_y}"/>',
        f'<text class="soft" y="{_HEIGHT + 16}">0</text>',
        f'<text class="soft number" x="{_WIDTH}" y="{_HEIGHT + 16}">{seconds} s at {panel.rate}</text>',
    ]


def _line(curve: UsageCurve, most: int, seconds: int) -> str:
    points = " ".join(
        f"{second * _WIDTH / max(1, seconds - 1):.1f},{_y(used, most)}" for second, used in enumerate(curve.by_second)
    )
    return f'<polyline class="{curve.name}" points="{points}"/>'


def _y(used: int, most: int) -> float:
    return round(_HEIGHT * (1 - used / most), 1)
