"""The comparison with Pulsar as one SVG file: how many times our figure each release has, row by row."""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from benchmarks.pulsar.results import OURS
from benchmarks.svg import picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.pulsar.results import Comparison

# Pixels: the plot, the names to its left, and the height of a row.
_LEFT, _WIDTH, _RIGHT, _ABOVE, _BELOW, _ROW = 370, 470, 30, 78, 44, 19

_STYLE = """\
.grid { stroke: #8a949e; stroke-opacity: .25; }
.equal { stroke: #8a949e; stroke-width: 1.5; }
.c0 { stroke: #2f81c7; fill: #2f81c7; fill-opacity: .35; } .c1 { stroke: #c2692a; fill: none; stroke-width: 1.4; }
"""


def drawn(rows: Sequence[Comparison]) -> str:
    """Return the text of the file: first the rows whose cost grows."""
    lines: list[Comparison | str] = ["Pulsar's cost grows with the state", *(row for row in rows if row.grows)]
    lines += ["It does not grow", *(row for row in rows if not row.grows)]
    releases = [side for side in rows[0].spreads if side != OURS]
    ratios = [row.ratio(release) for row in rows for release in releases]
    low, high = floor(log10(min(ratios))), ceil(log10(max(ratios)))
    width, height = _LEFT + _WIDTH + _RIGHT, _ABOVE + len(lines) * _ROW + _BELOW
    bottom = height - _BELOW

    def x(ratio: float) -> float:
        return round(_LEFT + _WIDTH * (log10(ratio) - low) / (high - low), 1)

    parts = ['<text x="20" y="24">Figures of Pulsar divided by ours: to the right of 1, ours is lower</text>']
    for at, release in enumerate(releases):
        parts.append(f'<circle class="c{at}" cx="{26 + 140 * at}" cy="44" r="4"/>')
        parts.append(f'<text class="soft" x="{36 + 140 * at}" y="48">{escape(release)}</text>')
    for power in range(low, high + 1):
        across, kind = x(10**power), "grid" if power else "equal"
        parts.append(f'<line class="{kind}" x1="{across}" x2="{across}" y1="{_ABOVE - 8}" y2="{bottom}"/>')
        parts.append(f'<text class="soft middle" x="{across}" y="{bottom + 18}">{10**power:,}</text>')
    for number, line in enumerate(lines):
        y = _ABOVE + number * _ROW + _ROW // 2
        if isinstance(line, str):
            parts.append(f'<text x="20" y="{y + 4}">{escape(line)}</text>')
            continue
        parts.append(f'<text class="soft number" x="{_LEFT - 12}" y="{y + 4}">{escape(line.what)}</text>')
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y}" y2="{y}"/>')
        for at, release in enumerate(releases):
            parts.append(f'<circle class="c{at}" cx="{x(line.ratio(release))}" cy="{y}" r="4"/>')
    return picture(width, height, style=_STYLE, parts=parts)
