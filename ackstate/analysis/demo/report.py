"""Renders the demo's report: one HTML file that needs no other file and no network."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from string import Template
from typing import TYPE_CHECKING

from ackstate.analysis import chart, html_page
from ackstate.analysis.chart import Chart, Instants, Line, Marks, number_axis, seconds_axis
from ackstate.analysis.html_page import escape, section, table

if TYPE_CHECKING:
    from ackstate.analysis.demo.run import DemoRun, SubscriptionOutcome

# A longer name is cut in the plot, to fit a phone; the tables have the whole name.
_NAME_LENGTH_MAX = 24
_PANEL_PX = 110
_SLICES_MAX = 40
_STYLE = """
.panel h2 { margin: .8rem 0 0; font-size: .9rem; overflow-wrap: anywhere; }
.chart .area { margin-right: 9.5rem; }
.chart .x { margin-right: 9.5rem; }
.chart .killed { left: 100%; padding-left: .9rem; }
.panel p { margin: 0; font-size: .8rem; }
"""

_BODY = Template("""<main>
<h1>Redelivery if crashed</h1>
<p id="verdict" class="lead $tone">$verdict</p>
<p>At every instant of the run: the number of acked messages that would be redelivered if the broker died then. The line
rises with every ack that is not durable yet and falls when a persist completes. $killed</p>
<figure>
<div id="curve">$plot</div>
<figcaption>Messages that a crash would redeliver, over time. At the kill (the dashed line at the end), ○ is Spark's
prediction from the trace, ✕ the observation of a second process.</figcaption>
<details><summary>Numbers of this chart</summary>
<div class="scroll" tabindex="0" role="region" aria-label="Numbers of this chart">$numbers</div></details>
</figure>
$sections
</main>""")


def render(run: DemoRun) -> str:
    """Return the page."""
    settings = {**asdict(run.settings), "kill_ts_ms": run.kill.kill_ts_ms, "lived_ms": run.kill.lived_ms}
    sections = [
        section("At the kill", "outcomes", _outcomes(run), notes=_inside_persist(run)),
        section("Over the whole run", "distribution", _distribution(run)),
        section("Recovery", "recoveries", _recoveries(run)),
        section("Settings", "settings", table(("setting", "value"), settings.items())),
    ]
    body = _BODY.substitute(
        tone="holds" if run.holds else "fails",
        verdict=escape(verdict(run)),
        killed=f"The broker was killed after {run.kill.lived_ms / 1_000:.2f} s (seed {run.seed}).",
        plot=_plot(run),
        numbers=_numbers(run),
        sections="\n".join(sections),
    )
    style = chart.STYLE + _STYLE
    return html_page.document("ackstate demo: redelivery if crashed", body, scripts="'none'", style=style)


def verdict(run: DemoRun) -> str:
    """Return one sentence: the number of equal predictions and observations, and of lost and invented acks."""
    outcomes = run.subscriptions
    lost, invented = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("lost", "invented"))
    equal = sum(outcome.predicted_at_kill == outcome.observed for outcome in outcomes)
    return f"{equal} of {len(outcomes)} predictions equal to observation, {lost} lost acks, {invented} invented acks"


def _plot(run: DemoRun) -> str:
    """Return the plot: a panel for each subscription, one below the other, on one scale."""
    begin_ms = _begin_ms(run)
    kill_s = (run.kill.kill_ts_ms - begin_ms) / 1_000
    curves = _curves(run, begin_ms=begin_ms)
    # The kill is at the right end, even of a run without duration, because its labels are beyond it.
    across, up = seconds_axis(kill_s), number_axis("messages", [_highest(run)], tick_count=2)
    panels = []
    for number, outcome in enumerate(run.subscriptions):
        points = [*curves[outcome.name], (kill_s, outcome.predicted_if_not_written)]
        colour = number % chart.COLOUR_COUNT
        answers = sorted({outcome.predicted_if_not_written, outcome.predicted_if_written})
        layers: list[chart.Layer] = [
            Instants("SIGKILL", [kill_s]), Line("", points, colour),
            Marks("predicted", [(kill_s, each, f"{each} predicted") for each in answers], "○", colour),
            Marks("observed", [(kill_s, outcome.observed, f"{outcome.observed} observed")], "✕", colour),
        ]  # fmt: skip
        lines = _label(outcome)
        # The label stays inside the panel.
        place = min(max(up.share(outcome.observed), 0.2), 0.8)
        label = f'<div class="note killed" style="bottom:{place:.2%}">{"<br>".join(lines)}</div>'
        summary = f"{outcome.name}: at the kill, {', '.join(lines)}"
        drawn = Chart(across, up, layers, summary, _PANEL_PX, label).html(has_key=number == 0)
        name = outcome.name if len(outcome.name) <= _NAME_LENGTH_MAX else f"{outcome.name[: _NAME_LENGTH_MAX - 1]}…"
        panels.append(f'<div class="panel"><h2>{escape(name)}</h2>{drawn}</div>')
    return "".join(panels)


def _begin_ms(run: DemoRun) -> int:
    return min((ts_ms for _, ts_ms, _ in run.curve), default=run.kill.kill_ts_ms)


def _numbers(run: DemoRun) -> str:
    """Return points of the curves as a table, at most `_SLICES_MAX` of each subscription."""
    rows = []
    for name, points in _curves(run, begin_ms=_begin_ms(run)).items():
        step = -(-len(points) // _SLICES_MAX)
        rows += [(name, f"{at_s:g}", value) for at_s, value in points[::step]]
    return table(("subscription", "seconds", "messages"), rows)


def _highest(run: DemoRun) -> int:
    """Return the maximum of all panels, at least 1."""
    at_kill = [
        value
        for outcome in run.subscriptions
        for value in (outcome.observed, outcome.predicted_if_not_written, outcome.predicted_if_written)
    ]
    return max([1, *(value for _, _, value in run.curve), *at_kill])


def _curves(run: DemoRun, *, begin_ms: int) -> defaultdict[str, list[tuple[float, int]]]:
    """Return each subscription's line up to the kill, in seconds and messages."""
    curves: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for name, ts_ms, value in run.curve:
        # The trace continues with the recovery, but the run ended here.
        if ts_ms <= run.kill.kill_ts_ms:
            curves[name].append(((ts_ms - begin_ms) / 1_000, value))
    return curves


def _label(outcome: SubscriptionOutcome) -> list[str]:
    """Return the lines beside the mark of the kill."""
    lines = [f"predicted {outcome.predicted_if_not_written}", f"observed {outcome.observed}"]
    if outcome.kill_inside_persist:
        lines.insert(1, f"or, if written, {outcome.predicted_if_written}")
    return lines


def _outcomes(run: DemoRun) -> str:
    return table(
        ("subscription", "acked", "persisted", "predicted at the kill", "observed", "lost acks", "invented acks"),
        [(o.name, o.acked, o.durable, o.prediction, o.observed, o.lost, o.invented) for o in run.subscriptions],
        failing=[index for index, outcome in enumerate(run.subscriptions) if not outcome.holds],
    )


def _inside_persist(run: DemoRun) -> list[str]:
    """Return a sentence for each persist interrupted by the kill: which of its two answers came true."""
    return [
        f"{o.name} was killed inside a persist: {o.predicted_if_not_written} messages are redelivered if it was not "
        f"written, {o.predicted_if_written} if it was. {o.observed} were redelivered{_CAME_TRUE[_answers_true(o)]}."
        for o in run.subscriptions
        if o.kill_inside_persist
    ]


_CAME_TRUE = {
    (True, False): ", so it was not written",
    (False, True): ", so it was written",
    (True, True): ", which fits both",
    (False, False): ", which fits neither",
}


def _answers_true(outcome: SubscriptionOutcome) -> tuple[bool, bool]:
    return outcome.observed == outcome.predicted_if_not_written, outcome.observed == outcome.predicted_if_written


def _distribution(run: DemoRun) -> str:
    # A trace of a single millisecond has no duration, and so no mean and no quantiles.
    rows = [
        (o.name, *("-" if value is None else value for value in (o.expected, o.p50, o.p99, o.max)))
        for o in run.subscriptions
    ]
    return table(("subscription", "expected", "p50", "p99", "max"), rows)


def _recoveries(run: DemoRun) -> str:
    rows = []
    for recovered in run.recoveries:
        report = recovered["report"]
        discarded = str(report["bytes_discarded"])
        if report["bytes_discarded"]:
            discarded += f" from byte {report['discarded_offset']} on: {report['discarded_reason']}"
        rows.append((
            recovered["subscription"], report["source"], report["records_replayed"], discarded,
            recovered["mark_delete"], report["range_count"],
        ))  # fmt: skip
    return table(("subscription", "source", "records replayed", "bytes discarded", "mark-delete", "ranges"), rows)
