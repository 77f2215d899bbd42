"""Renders a page for people as one HTML file that needs no other file and no network.

Charts are HTML with inline SVG: no script, text of its own size at any width, colours of the page's scheme.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.wording import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


# A table with more columns does not fit on a phone.
_NARROW_COLUMNS = 5

# The policy forbids every request, so the page cannot even try one. Paper is white.
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src $scripts; style-src 'unsafe-inline'; img-src data:; base-uri 'none';
  form-action 'none'">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #4d5761; --line: #d5dae0; --paper: #fff; --mark: #f3f5f7;
  --good: #1a7f37; --bad: #c5221f; --strong: #2f6fb0; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #a9b3bd; --line: #353d46; --paper: #14181d; --mark: #1d232a;
    --good: #4cc26a; --bad: #ff7b72; --strong: #79b8ff; }
}
@media print { :root { color-scheme: light; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 66rem; padding: 1rem; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.6rem; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p, figcaption { max-width: 46rem; color: var(--soft); overflow-wrap: anywhere; }
.lead { max-width: none; padding: .6rem .9rem; background: var(--mark); border-left: .35rem solid;
  font-weight: 600; color: var(--ink); }
.lead.holds { color: var(--good); }
.lead.fails { color: var(--bad); }
.lead.holds::before { content: "✓ "; }
.lead.fails::before { content: "✗ "; }
figure { margin: 1rem 0; }
figcaption { margin-top: .5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { padding-left: 0; text-align: left; max-width: 20rem; overflow-wrap: break-word; }
thead th { border-bottom: 2px solid var(--soft); vertical-align: bottom; }
tr.fails td { font-weight: 700; }
@media (max-width: 40rem) {
  .wide thead { display: none; }
  .wide :is(table, tbody, tr) { display: block; }
  .wide tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .wide td { display: flex; justify-content: space-between; gap: 1rem; max-width: none; border: 0; padding: .1rem 0; }
  .wide td::before { content: attr(data-column); color: var(--soft); font-weight: 400; text-align: left; }
  .wide td:first-child { font-weight: 600; }
}
$style</style>
</head>
<body>
$body
</body>
</html>
""")


def escape(text: str) -> str:
    """Return untrusted text for a page: without markup, and with control characters shown."""
    return html.escape(printable(text))


def document(title: str, body: str, *, scripts: str, style: str = "") -> str:
    """Return a whole page."""
    return _PAGE.substitute(title=escape(title), body=body, scripts=scripts, style=style)


def section(title: str, identity: str, content: str, *, notes: Sequence[str] = ()) -> str:
    """Return a section; content that is too wide scrolls."""
    told = "".join(f"\n<p>{escape(note)}</p>" for note in notes)
    # A scrolling element must be reachable by keyboard.
    return (
        f'<section id="{identity}">\n<h2>{escape(title)}</h2>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">{content}</div>{told}\n</section>'
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, failing: Sequence[int] = ()) -> str:
    """Return a table; the rows whose index is in `failing` stand out.

    Each cell names its column, because on a narrow page the rows of a wide table become lists.
    """
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = []
    for index, row in enumerate(rows):
        cells = "".join(
            f'<td data-column="{escape(column)}">{escape(str(cell))}</td>'
            for column, cell in zip(header, row, strict=True)
        )
        tone = ' class="fails"' if index in failing else ""
        body.append(f"<tr{tone}>{cells}</tr>")
    shape = ' class="wide"' if len(header) > _NARROW_COLUMNS else ""
    return f"<div{shape}><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"


CALENDAR_END_MS = 253_402_300_799_999
"""The last millisecond that has a date."""
_WIDTH, _HEIGHT = 2_000, 1_000
# A label this close to an end of the axis is aligned to that end.
_NEAR_END = 0.06
_SECOND, _MINUTE, _HOUR, _DAY = 1_000, 60_000, 3_600_000, 86_400_000
_TIME_STEPS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, *(_SECOND * n for n in (1, 2, 5, 10, 15, 30)),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)), *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000, 20_000, 100_000)),
)  # fmt: skip
COLOUR_COUNT = 6
"""Number of colours, each with a dash pattern; see `STYLE`."""
_DASHES = ("", "7 4", "2 3", "8 3 2 3", "12 4", "12 3 2 3")

STYLE = """
:root { --c0: #1b66a8; --c1: #a84a12; --c2: #2a7440; --c3: #7443a6; --c4: #a93154; --c5: #59626b; --alarm: #b3261e; }
@media screen and (prefers-color-scheme: dark) { :root { --c0: #6cb2f2; --c1: #f0955a; --c2: #6cc784; --c3: #c49bf0;
  --c4: #f28aa8; --c5: #a9b3bd; --alarm: #ff8a80; } }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .alarm { color: var(--alarm); }
.chart { display: grid; grid-template: auto 1fr auto auto / auto 1fr; column-gap: .5rem; font-size: .8rem;
  color: var(--soft); font-variant-numeric: tabular-nums; max-width: 78rem; }
.chart .unit { grid-area: 1 / 1 / 2 / 3; margin-bottom: .5rem; }
.chart .y { grid-area: 2 / 1; position: relative; text-align: right; }
.chart .y span { position: absolute; right: 0; transform: translateY(50%); line-height: 1; }
.chart .y .widest { position: static; visibility: hidden; display: block; height: 0; overflow: hidden; }
.chart .area { grid-area: 2 / 2; position: relative; height: var(--tall);
  border-left: 1px solid var(--soft); border-bottom: 1px solid var(--soft); }
.chart svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.chart path { fill: none; stroke: currentColor; stroke-width: 1.75; vector-effect: non-scaling-stroke; }
.chart .grid-line { stroke: var(--line); stroke-width: 1; }
.chart .band { fill: currentColor; fill-opacity: .28; stroke-width: 1; }
.chart .span { stroke-width: 3; }
.chart .x { grid-area: 3 / 2; position: relative; height: 1.4em; margin-top: .25rem; }
.chart .x span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.chart .x .first { transform: none; } .chart .x .last { transform: translateX(-100%); }
.chart .x-name { grid-area: 4 / 2; }
.chart .mark { position: absolute; transform: translate(-50%, 50%); line-height: 1; font-size: 1rem;
  font-style: normal; }
.chart .large { font-size: 1.6rem; }
.chart .note { position: absolute; white-space: nowrap; color: var(--ink); transform: translateY(50%);
  line-height: 1.2; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .2rem 0 .4rem; padding: 0; list-style: none;
  font-size: .9rem; }
.key li { display: flex; gap: .4rem; align-items: center; min-width: 0; color: var(--ink); overflow-wrap: anywhere; }
.key svg { flex: none; width: 30px; height: 14px; }
.key path { fill: none; stroke: currentColor; stroke-width: 2.5; }
.key .band { fill: currentColor; fill-opacity: .28; stroke-width: 1; }
figure > h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; overflow-wrap: anywhere; }
figure details { margin: .4rem 0; }
summary { cursor: pointer; color: var(--strong); width: fit-content; }
"""


class Tick(NamedTuple):
    """A labelled value of an axis."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis."""

    name: str  # Its quantity and unit, in words
    low: float  # The value at its begin
    high: float  # The value at its end; above `low`
    ticks: tuple[Tick, ...]  # Labelled values, rising, none outside
    is_log: bool = False  # Whether it is logarithmic; `low` is above 0 then

    def share(self, value: float) -> float:
        """Return the place of a value, from 0 at the begin to 1 at the end; values outside are clipped."""
        if self.is_log:
            place = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            place = (value - self.low) / (self.high - self.low)
        return min(max(place, 0.0), 1.0)


def number_axis(name: str, numbers: Iterable[float], *, tick_count: int = 4, is_log: bool = False) -> Axis:
    """Return an axis from 0, or a power of ten, to a round number not below the highest of some numbers."""
    found = [*numbers]
    if is_log:
        first, last = math.floor(math.log10(min(found))), math.ceil(math.log10(max(found)))
        last = max(last, first + 1)
        step = max(1, -(-(last - first) // tick_count))
        ticks = tuple(Tick(10.0**power, tick_label(10.0**power)) for power in range(first, last + 1, step))
        return Axis(name, 10.0**first, 10.0**last, ticks, is_log=True)
    high = max([0.0, *found]) or 1.0
    round_step = _round_step(high / tick_count)
    count = math.ceil(high / round_step - 1e-9)
    ticks = tuple(Tick(round_step * n, tick_label(round_step * n)) for n in range(count + 1))
    return Axis(name, 0.0, count * round_step, ticks)


def time_axis(begin_ms: int, end_ms: int, *, tick_count: int = 4) -> Axis:
    """Return an axis of instants in UTC, or of plain milliseconds outside the calendar."""
    # An axis needs a width, even if no time passed.
    end_ms = max(end_ms, begin_ms + 1)
    wanted = (end_ms - begin_ms) / tick_count
    step = next((each for each in _TIME_STEPS if each >= wanted), int(wanted) + 1)
    values = range(-(-begin_ms // step) * step, end_ms + 1, step)
    is_dated = begin_ms >= 0 and end_ms <= CALENDAR_END_MS
    if not is_dated:
        return Axis("time, ms", begin_ms, end_ms, tuple(Tick(each, f"{each:,}") for each in values))
    day = datetime.fromtimestamp(begin_ms // _SECOND, UTC)
    last_day = datetime.fromtimestamp(end_ms // _SECOND, UTC)
    is_one_day = day.date() == last_day.date()
    name = f"time on {day:%Y-%m-%d}, UTC" if is_one_day else f"time from {day:%Y-%m-%d} to {last_day:%Y-%m-%d}, UTC"
    return Axis(name, begin_ms, end_ms, tuple(Tick(each, _clock(each, step)) for each in values))


def seconds_axis(end_s: float) -> Axis:
    """Return an axis of seconds from 0 to an end, which need not be round."""
    end_s = max(end_s, 0.001)
    step = _round_step(end_s / 4)
    ticks = tuple(Tick(step * n, tick_label(step * n)) for n in range(math.floor(end_s / step + 1e-9) + 1))
    return Axis("seconds since the first event", 0.0, end_s, ticks)


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    step: float = next(power * each for each in (1, 2, 5, 10) if power * each >= least * (1 - 1e-9))
    return step


def tick_label(value: float) -> str:
    """Return a short label of a number.

    >>> [tick_label(each) for each in (0, 0.25, 1_500, 20_000, 3_000_000)]
    ['0', '0.25', '1,500', '20 k', '3 M']
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= (size if unit != "k" else 1e4):
            return f"{value / size:g} {unit}"
    return f"{round(value, 9):,.10g}"


def _clock(ts_ms: int, step_ms: int) -> str:
    at = datetime.fromtimestamp(ts_ms // _SECOND, UTC)
    if step_ms >= _DAY:
        return f"{at:%b} {at.day}"
    if step_ms >= _MINUTE:
        return f"{at:%H:%M}"
    return f"{at:%H:%M:%S}" if step_ms >= _SECOND else f"{at:%M:%S}.{ts_ms % _SECOND:03}"


@dataclass(frozen=True, slots=True)
class Line:
    """A line whose value holds from each point to the next."""

    name: str  # For the key of the chart; empty for none
    points: Sequence[tuple[float, float]]  # Pairs of x and y
    colour: int = 0  # A number below `COLOUR_COUNT`


@dataclass(frozen=True, slots=True)
class Band:
    """The area between two curves whose values hold from each point to the next."""

    name: str  # For the key of the chart; empty for none
    points: Sequence[tuple[float, float, float]]  # x, lower y and upper y of each point
    colour: int = 0  # A number below `COLOUR_COUNT`


@dataclass(frozen=True, slots=True)
class Marks:
    """Points, each with a sign."""

    name: str  # For the key of the chart; empty for none
    points: Sequence[tuple[float, float, str]]  # x, y and the text that a pointer shows
    sign: str  # A single character
    colour: int = 0  # A number below `COLOUR_COUNT`
    is_large: bool = False  # Whether the sign stands out among others at the same place


@dataclass(frozen=True, slots=True)
class Instants:
    """Vertical lines."""

    name: str  # For the key of the chart
    values: Sequence[float]  # Their places


Layer = Line | Band | Marks | Instants


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart."""

    x: Axis  # The horizontal axis
    y: Axis  # The vertical axis
    layers: Sequence[Layer]  # From the back to the front
    summary: str  # Its content in a sentence, for readers who cannot see it
    height_px: int = 240  # Height of the area inside the axes
    extra: str = ""  # HTML placed inside that area

    def html(self, *, has_key: bool = True) -> str:
        """Return the chart, with a key of its named layers."""
        x_labels = "".join(
            f'<span{_end_class(self.x.share(tick.value))} style="left:{self.x.share(tick.value):.2%}">'
            f"{escape(tick.label)}</span>"
            for tick in self.x.ticks
        )
        y_labels = "".join(
            f'<span style="bottom:{self.y.share(tick.value):.2%}">{escape(tick.label)}</span>' for tick in self.y.ticks
        )
        widest = max((tick.label for tick in self.y.ticks), key=len, default="")
        grid = "".join(
            f'<path class="grid-line" d="M0 {self._down(tick.value)}H{_WIDTH}"/>' for tick in self.y.ticks[1:]
        )
        return (
            f'{self._key() if has_key else ""}<div class="chart" role="img" aria-label="{escape(self.summary)}">'
            f'<div class="unit">{escape(self.y.name)}</div>'
            f'<div class="y"><div class="widest">{escape(widest)}</div>{y_labels}</div>'
            f'<div class="area" style="--tall:{self.height_px}px">'
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
            f"{grid}{''.join(map(self._paths, self.layers))}</svg>{''.join(map(self._marks, self.layers))}"
            f'{self.extra}</div><div class="x">{x_labels}</div><div class="x-name">{escape(self.x.name)}</div></div>'
        )

    def _across(self, value: float) -> str:
        return f"{self.x.share(value) * _WIDTH:.0f}"

    def _down(self, value: float) -> str:
        return f"{(1 - self.y.share(value)) * _HEIGHT:.0f}"

    def _paths(self, layer: Layer) -> str:
        match layer:
            case Line(points=points) if points:
                return f'<path {_stroke(layer.colour)} d="{self._steps(points)}"/>'
            case Band(points=points) if points:
                return f'<path class="band c{layer.colour}" d="{self._outline(layer)}"/>'
            case Instants():
                drawn = "".join(f"M{self._across(each)} 0V{_HEIGHT}" for each in layer.values)
                return f'<path class="alarm" stroke-dasharray="3 3" d="{drawn}"/>'
        return ""

    def _steps(self, points: Sequence[tuple[float, float]]) -> str:
        (first_x, first_y), *others = ((self._across(x), self._down(y)) for x, y in points)
        drawn, last_x, last_y = [f"M{first_x} {first_y}"], first_x, first_y
        for x, y in others:
            if x != last_x:
                drawn.append(f"H{x}")
            if y != last_y:
                drawn.append(f"V{y}")
            last_x, last_y = x, y
        return "".join(drawn)

    def _outline(self, band: Band) -> str:
        upper = _corners([(x, high) for x, _, high in band.points])
        lower = _corners([(x, low) for x, low, _ in band.points])
        places = [f"{self._across(x)} {self._down(y)}" for x, y in [*upper, *reversed(lower)]]
        return f"M{'L'.join(places)}Z"

    def _marks(self, layer: Layer) -> str:
        if not isinstance(layer, Marks):
            return ""
        size = " large" if layer.is_large else ""
        return "".join(
            f'<i class="mark c{layer.colour}{size}" title="{escape(text)}" '
            f'style="left:{self.x.share(x):.2%};bottom:{self.y.share(y):.2%}">{layer.sign}</i>'
            for x, y, text in layer.points
        )

    def _key(self) -> str:
        named = [layer for layer in self.layers if layer.name]
        items = "".join(f"<li>{_sample(layer)}<bdi>{escape(layer.name)}</bdi></li>" for layer in named)
        return f'<ul class="key">{items}</ul>' if named else ""


def _corners(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    found = [points[0]]
    for (x, y), (_, before) in zip(points[1:], points, strict=False):
        found += [(x, before), (x, y)]
    return found


def _stroke(colour: int) -> str:
    dash = _DASHES[colour % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'class="c{colour}"{dashed}'


def _sample(layer: Layer) -> str:
    match layer:
        case Marks():
            return f'<span class="c{layer.colour}" aria-hidden="true">{layer.sign}</span>'
        case Line():
            inside = f'<path {_stroke(layer.colour)} d="M1 7H29"/>'
        case Band():
            inside = f'<path class="band c{layer.colour}" d="M1 1H29V13H1Z"/>'
        case Instants():
            inside = '<path class="alarm" stroke-dasharray="3 3" d="M15 0V14"/>'
    return f'<svg viewBox="0 0 30 14" aria-hidden="true">{inside}</svg>'


def _end_class(share: float) -> str:
    if share < _NEAR_END:
        return ' class="first"'
    return ' class="last"' if share > 1 - _NEAR_END else ""
