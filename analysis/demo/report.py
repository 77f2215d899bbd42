"""Renders the demo's report: one HTML file that needs no other file and no network."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from html import escape
from string import Template
from typing import TYPE_CHECKING, Any

from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from ackstate.analysis import html_page
from ackstate.analysis.html_page import section, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.demo.job import DemoRun, SubscriptionOutcome

# Each line has its own panel, so colour is only decoration; these three contrast with white and black.
_COLOURS = ("#2f81c7", "#c2692a", "#3b9150")
_KILL_COLOUR = "#d63b45"
# Pixels: a panel, the strip above each panel for its name, the strip on top for the kill's name, the axis below.
_PANEL, _NAME_STRIP, _TOP, _BOTTOM = 130, 44, 64, 62
# A longer name is cut in the plot, to fit a phone; the tables have the whole name.
_NAME_LENGTH_MAX = 24

_BODY = Template("""<h1>Redelivery if crashed</h1>
<p id="verdict" class="lead $tone">$verdict</p>
<p>At every instant of the run: the number of acked messages that would be redelivered if the broker died then. The line
rises with every ack that is not durable yet and falls when a persist completes. $killed</p>
<figure>
<div id="plot" class="plot">$plot</div>
<figcaption>Messages that a crash would redeliver, over time. At the kill, ○ is Spark's
prediction from the trace, ✕ the observation of a second process. <span class="mouse">Drag to look
closer, double-click to see all.</span></figcaption>
</figure>
$sections""")

# On a touch screen a finger must scroll the page, not the plot.
_LET_FINGERS_SCROLL = "if (matchMedia('(pointer: coarse)').matches) Plotly.relayout('{plot_id}', {dragmode: false})"


def render(runs: Sequence[DemoRun]) -> str:
    """Return the page: the last run in full, and the outcomes of all runs.

    Args:
        runs: The runs, at least one.
    """
    run = runs[-1]
    settings = {**asdict(run.settings), "kill_ts_ms": run.kill.kill_ts_ms, "lived_ms": run.kill.lived_ms}
    sections = [
        section("At the kill", "outcomes", _outcomes(run), notes=_inside_persist(run)),
        section("Every run: predicted / observed", "runs", _runs(runs)) if len(runs) > 1 else "",
        section("Over the whole run", "distribution", _distribution(run)),
        section("Recovery", "recoveries", _recoveries(run)),
        section("Settings", "settings", table(("setting", "value"), settings.items())),
    ]
    body = _BODY.substitute(
        tone="holds" if all(run.holds for run in runs) else "fails",
        verdict=escape(verdict(runs)),
        killed=f"The broker was killed after {run.kill.lived_ms / 1_000:.2f} s (seed {run.seed}).",
        plot=_plot(run),
        sections="\n".join(part for part in sections if part),
    )
    return html_page.document("ackstate demo: redelivery if crashed", body, scripts="'unsafe-inline'")


def verdict(runs: Sequence[DemoRun]) -> str:
    """Return one sentence: the number of equal predictions and observations, and of lost and invented acks."""
    outcomes = [outcome for run in runs for outcome in run.subscriptions]
    lost, invented = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("lost", "invented"))
    equal = sum(run.holds for run in runs)
    return f"{equal} of {len(runs)} predictions equal to observation, {lost} lost acks, {invented} invented acks"


def _plot(run: DemoRun) -> str:
    """Return the plot with its library: a panel for each subscription, one below the other."""
    count = max(1, len(run.subscriptions))
    height = count * _PANEL + (count - 1) * _NAME_STRIP
    figure = make_subplots(
        rows=count, shared_xaxes=True, shared_yaxes="all", vertical_spacing=_NAME_STRIP / height if count > 1 else 0
    )
    begin_ms = min((ts_ms for _, ts_ms, _, _ in run.curve), default=run.kill.kill_ts_ms)
    kill_s = (run.kill.kill_ts_ms - begin_ms) / 1_000
    curves = _curves(run, begin_ms=begin_ms)
    for row, outcome in enumerate(run.subscriptions, 1):
        _draw(figure, outcome, [*curves[outcome.name], (kill_s, outcome.predicted_if_not_written)], row=row)
    _mark_kill(figure, kill_s, height=height)
    label_length = max((len(line) for outcome in run.subscriptions for line in _label(outcome)), default=8)
    figure.update_layout(
        height=height + _TOP + _BOTTOM, showlegend=False, hovermode="x", template="none",
        margin={"l": 52, "r": 20 + 7 * label_length, "t": _TOP, "b": _BOTTOM},
        font={"family": "system-ui, sans-serif", "size": 13},
        hoverlabel={"bgcolor": "#1b1f24", "bordercolor": "#8a949e", "font_color": "#fff"},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
    )  # fmt: skip
    # The kill is at the right edge, even of a run without duration, because its labels are beyond it.
    figure.update_xaxes(range=[min(0, kill_s - 0.001), kill_s], showgrid=False, zeroline=False)
    figure.update_xaxes(title_text="seconds since the first event", ticklabelstandoff=6, row=count)
    figure.update_yaxes(range=[0, 1.05 * _highest(run)], nticks=4, ticklabelstandoff=4, fixedrange=True)
    body = figure.to_html(
        full_html=False, include_plotlyjs=False, div_id="curve", config={"displayModeBar": False},
        post_script=_LET_FINGERS_SCROLL,
    )  # fmt: skip
    return f"<script>{get_plotlyjs()}</script>{body}"


def _highest(run: DemoRun) -> int:
    """Return the maximum of all panels, at least 1."""
    at_kill = [
        value
        for outcome in run.subscriptions
        for value in (outcome.observed, outcome.predicted_if_not_written, outcome.predicted_if_written)
    ]
    return max([1, *(most for _, _, _, most in run.curve), *at_kill])


def _curves(run: DemoRun, *, begin_ms: int) -> defaultdict[str, list[tuple[float, int]]]:
    """Return each subscription's line up to the kill, in seconds and messages.

    Each slice of time has its maximum, then its end, so that a persist is visible as a fall.
    """
    curves: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for name, ts_ms, at_end, most in run.curve:
        # The trace continues with the recovery, but the run ended here.
        if ts_ms <= run.kill.kill_ts_ms:
            curves[name] += [((ts_ms - begin_ms) / 1_000, value) for value in (most, at_end)]
    return curves


def _draw(figure: Any, outcome: SubscriptionOutcome, points: list[tuple[float, int]], *, row: int) -> None:
    """Draw one subscription's panel: its line, and the prediction and the observation at the kill, its last point."""
    colour = _COLOURS[(row - 1) % len(_COLOURS)]
    name = outcome.name if len(outcome.name) <= _NAME_LENGTH_MAX else f"{outcome.name[: _NAME_LENGTH_MAX - 1]}…"
    # Plotly parses text as a subset of HTML, in which quotes are literal.
    name = escape(name, quote=False)
    kill_s = points[-1][0]
    figure.add_scatter(
        x=[x for x, _ in points], y=[y for _, y in points], name=name, mode="lines", row=row, col=1,
        line={"color": colour, "width": 1.5, "shape": "hv"}, hovertemplate="%{y} at %{x} s<extra></extra>",
    )  # fmt: skip
    answers = sorted({outcome.predicted_if_not_written, outcome.predicted_if_written})
    marks = (("predicted", answers, "circle-open", 13), ("observed", [outcome.observed], "x-thin", 9))
    for what, values, symbol, size in marks:
        figure.add_scatter(
            x=[kill_s] * len(values), y=values, name=f"{name}: {what}", mode="markers", row=row, col=1,
            marker={"color": colour, "size": size, "symbol": symbol, "line": {"color": colour, "width": 2}},
            cliponaxis=False, hovertemplate=f"%{{y}} {what}<extra></extra>",
        )  # fmt: skip
    panel = "" if row == 1 else row
    figure.add_annotation(
        text=f"<b>{name}</b>", xref=f"x{panel} domain", yref=f"y{panel} domain", x=0, y=1, yshift=2,
        xanchor="left", yanchor="bottom", showarrow=False,
    )  # fmt: skip
    figure.add_annotation(
        text="<br>".join(_label(outcome)), x=kill_s, y=outcome.observed, row=row, col=1,
        xanchor="left", xshift=14, align="left", showarrow=False,
    )  # fmt: skip


def _label(outcome: SubscriptionOutcome) -> list[str]:
    """Return the lines beside the mark of the kill."""
    lines = [f"predicted {outcome.predicted_if_not_written}", f"observed {outcome.observed}"]
    if outcome.kill_inside_persist:
        lines.insert(1, f"or, if written, {outcome.predicted_if_written}")
    return lines


def _mark_kill(figure: Any, kill_s: float, *, height: int) -> None:
    """Draw the kill through all panels, and its name in the strip above them."""
    top = 1 + (_TOP - 18) / height
    figure.add_shape(
        type="line", x0=kill_s, x1=kill_s, xref="x", y0=0, y1=top, yref="paper", layer="below", name="SIGKILL",
        line={"color": _KILL_COLOUR, "dash": "dash", "width": 2},
    )  # fmt: skip
    figure.add_annotation(
        text="SIGKILL", x=kill_s, xref="x", y=top, yref="paper", xanchor="left", yanchor="top", xshift=4,
        showarrow=False,
    )  # fmt: skip


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


def _runs(runs: Sequence[DemoRun]) -> str:
    names = list(dict.fromkeys(outcome.name for run in runs for outcome in run.subscriptions))
    rows = []
    for run in runs:
        pairs = {outcome.name: f"{outcome.prediction} / {outcome.observed}" for outcome in run.subscriptions}
        lived = f"{run.kill.lived_ms / 1_000:.2f} s"
        rows.append((run.seed, lived, *(pairs.get(name, "-") for name in names), _run_verdict(run)))
    header = ("seed", "killed after", *names, "verdict")
    return table(header, rows, failing=[index for index, run in enumerate(runs) if not run.holds])


def _run_verdict(run: DemoRun) -> str:
    found = []
    if any(outcome.predicted_at_kill != outcome.observed for outcome in run.subscriptions):
        found.append("NOT EQUAL")
    for what in ("lost", "invented"):
        count = sum(getattr(outcome, what) for outcome in run.subscriptions)
        if count:
            found.append(f"{count} {what}")
    return ", ".join(found) or "equal"


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
