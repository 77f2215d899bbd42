"""The pictures of the benchmarks: from the text of ``results/<name>.json`` only, to an SVG file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.delay import bench_index_memory, bench_isolation, bench_subscriptions, bench_throughput
from benchmarks.delay.chart import Mark, Panel, PanelAxis, PanelLine, drawn
from benchmarks.delay.footprint import Ruler
from benchmarks.table import number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Written = dict[str, Any]

_HELD = PanelAxis(
    "messages that wait",
    [(10_000, "10 thousand"), (100_000, "100 thousand"), (1_000_000, "1 million"), (10_000_000, "10 million")],
    is_log=True,
)
_SUBSCRIPTIONS = PanelAxis(
    "subscriptions of the topic", [(1, "1"), (10, "10"), (100, "100"), (1_000, "1,000")], is_log=True
)


def subscriptions(written: Written) -> str:
    """Draw memory by the number of subscriptions."""
    rows = _rows(written)
    lines = []
    for design in bench_subscriptions.DESIGNS:
        points = [
            (count, rows[what]["median"])
            for count in bench_subscriptions.SUBSCRIPTIONS
            if (what := bench_subscriptions.row(count, design, Ruler.RESIDENT)) in rows
        ]
        if points:
            lines.append(PanelLine(f"{design}: {number(points[-1][1])} MB", points))
    low, high = (figure / 1e6 for figure in bench_subscriptions.PULSAR_BYTES)
    y = PanelAxis(
        "",
        [(0.1, "100 kB"), (1, "1 MB"), (10, "10 MB"), (100, "100 MB"), (1_000, "1 GB"), (10_000, "10 GB")],
        is_log=True,
    )
    panel = Panel(
        "Growth of the process for 100 thousand messages due within an hour",
        _SUBSCRIPTIONS, y, lines, [Mark("Pulsar 4.2.4, 5.0.1: 7.4 to 7.8 GB of heap", 1_000, low, high)],
    )  # fmt: skip
    return drawn("Memory of delayed messages, by subscriptions", [panel])


def index_memory(written: Written) -> str:
    """Draw bytes a message of one index."""
    rows = _rows(written)
    lines = [
        _by_held(rows, f"{way}, {kind}", lambda held, way=way, kind=kind: bench_index_memory.row(held, way, kind))
        for way, kind in (("one by one", "resident"), ("in bulk", "resident"), ("in bulk", "traced"))
    ]
    said = f"{bench_index_memory.OWN}, beside traced"
    lines.append(_by_held(rows, "in bulk, its own figure", lambda held: bench_index_memory.row(held, "in bulk", said)))
    marks = [
        Mark("Pulsar: 74 to 78", 100_000, 74, 78),
        Mark("Pulsar: 45 to 49", 1_000_000, 45, 49),
        *(
            Mark(f"limit {limit.figure:.0f}", held, limit.figure, limit.figure)
            for held, limit in bench_index_memory.LIMITS.items()
        ),
    ]
    panel = Panel("One index, messages due within an hour", _HELD, _linear("bytes a message", 20, 80), lines, marks)
    return drawn("Memory of a delayed message", [panel])


def throughput(written: Written) -> str:
    """Draw the times to add and to drain."""
    rows = _rows(written)
    ticks = [(10, "10"), (100, "100"), (1_000, "1,000"), (10_000, "10,000")]
    adds = ["tracker.add_message", "view.add_message", "index.add"]
    drains = [
        f"{method} each {step}"
        for step in reversed(bench_throughput.STEPS)
        for method in ("tracker drained", "scheduled_messages")
    ]
    pulsar = {"Add": bench_throughput.PULSAR_ADD, "Drain": bench_throughput.PULSAR_DRAIN}
    panels = []
    for title, names in (("Add", adds), ("Drain", drains)):
        lines = [_by_held(rows, name, lambda held, name=name: bench_throughput.row(held, name)) for name in names]
        y = PanelAxis("ns a message", ticks, is_log=True)
        figure = pulsar[title].figure
        panels.append(Panel(title, _HELD, y, lines, [Mark(f"Pulsar: {number(figure)}", 1_000_000, figure, figure)]))
    return drawn("How long it takes to add a delayed message and to get it back", panels)


def isolation(written: Written) -> str:
    """Draw the lag of the healthy subscriptions with and without the four, and memory over time."""
    rows = _rows(written)
    quantiles = list(bench_isolation.QUANTILES)
    lines = []
    for name in (bench_isolation.WITH, bench_isolation.WITHOUT):
        spreads = [rows[bench_isolation.lag_row(quantile, name)] for quantile in quantiles]
        points = [(at, each["median"]) for at, each in enumerate(spreads)]
        said = ", ".join(number(y) for _, y in points)
        lines.append(PanelLine(f"{name}: {said} ms", points, [(each["low"], each["high"]) for each in spreads]))
    x = PanelAxis("the median of the runs, and from the lowest to the highest", list(enumerate(quantiles)))
    highest = max(high for line in lines for _, high in line.spreads)
    lag = Panel("Lag of the other 996 subscriptions", x, _linear("ms", *_steps(highest)), lines)
    curves = {name: [(tick, size / 1e3) for tick, size in curve] for name, curve in written["curves"].items()}
    last_tick = max(tick for curve in curves.values() for tick, _ in curve)
    y = PanelAxis("", [(10, "10 kB"), (100, "100 kB"), (1_000, "1 MB"), (10_000, "10 MB")], is_log=True)
    x = PanelAxis("seconds; in the last 60 nothing is published", [(0, "0"), (last_tick, f"{last_tick:.0f}")])
    memory = Panel(
        "Memory of delayed delivery, 10 subscriptions", x, y, [PanelLine(name, curve) for name, curve in curves.items()]
    )
    return drawn("One subscription is stuck, one slow, one has a hole, one churns", [lag, memory])


PICTURES: dict[str, Callable[[Written], str]] = {
    "delay_subscriptions": subscriptions,
    "delay_index_memory": index_memory,
    "delay_throughput": throughput,
    "delay_isolation": isolation,
}


def _rows(written: Written) -> dict[str, dict[str, float]]:
    return {figure["what"]: figure["spread"] for figure in written["figures"]}


def _by_held(rows: dict[str, dict[str, float]], name: str, what: Callable[[int], str]) -> PanelLine:
    """Return a line of the measurements, with its last figure."""
    points = [(held, rows[what(held)]["median"]) for held, _ in _HELD.ticks if what(held) in rows]
    return PanelLine(f"{name}: {number(points[-1][1])}", points)


def _linear(name: str, step: float, high: float) -> PanelAxis:
    values = [step * at for at in range(int(high / step) + 1)]
    return PanelAxis(name, [(value, number(value)) for value in values])


def _steps(highest: float) -> Sequence[float]:
    """Return a round step, and the lowest multiple of it at or above a figure, at most five of them."""
    step = next(digit * 10**power for power in range(-3, 9) for digit in (1, 2, 5) if 5 * digit * 10**power >= highest)
    return step, step * -(-highest // step)
