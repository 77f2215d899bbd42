"""The frame of all pictures of results: one SVG file that needs no script and no network, in light and in dark."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_TEXT_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1b1f24; }
.soft { fill: #4d5761; font-size: 11px; }
.number { text-anchor: end; }
.middle { text-anchor: middle; }
.paper { fill: #fff; }
"""
_DARK_STYLE = """@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ed; } .soft { fill: #a9b3bd; } .paper { fill: #14181d; }
}
"""


def picture(width: float, height: float, *, style: str, parts: Iterable[str]) -> str:
    """Return the text of a file.

    Args:
        width: In pixels.
        height: In pixels.
        style: The picture's own CSS, lines that end in a newline; the classes `soft`, `number` and `middle` exist.
        parts: Its elements, in order.
    """
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{_TEXT_STYLE}{style}{_DARK_STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
    )
    return "\n".join([*opening, *parts, "</svg>", ""])
