"""The demo's report: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from analysis.demo import DemoRun, SubscriptionOutcome

# Distinct without colour too: each line has a dash of its own.
_STYLES = (("#0b6fa4", "solid"), ("#b5541c", "dot"), ("#2f7d32", "dash"))

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ackstate demo: redelivery if crashed</title>
<style>
:root {{ color-scheme: light; }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 1rem; color: #1b1f24;
  background: #fff; }}
h1 {{ font-size: 1.5rem; margin-bottom: .25rem; }}
h2 {{ font-size: 1.15rem; margin-top: 2rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .35rem .8rem; border-bottom: 1px solid #d5dae0; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
thead th {{ border-bottom: 2px solid #7a838d; }}
.verdict {{ font-weight: 600; }}
.note {{ color: #4d5761; max-width: 60rem; }}
</style>
</head>
<body>
<h1>Redelivery if crashed</h1>
<p class="verdict" id="verdict">{verdict}</p>
<p class="note">At every instant of the run: how many acked messages would have come back had the broker died then.
The line rises with every ack that is not durable yet and falls when a persist completes. The mark is the real
SIGKILL; what a second process then redelivered is the column <em>observed</em>.</p>
<div id="plot">{plot}</div>
<h2>At the kill</h2>
<div class="scroll">{outcomes}</div>
<h2>Over the whole run</h2>
<div class="scroll">{distribution}</div>
<h2>Recovery</h2>
<div class="scroll">{recoveries}</div>
<h2>Settings</h2>
<div class="scroll">{settings}</div>
</body>
</html>
"""


def render(runs: Sequence[DemoRun]) -> str:
    """Return the report of the last run, and how many of all runs came out as predicted."""
    run = runs[-1]
    return _PAGE.format(
        verdict=escape(verdict(runs)),
        plot=_plot(run),
        outcomes=_outcomes(run),
        distribution=_distribution(run),
        recoveries=_recoveries(run),
        settings=_table(("setting", "value"), [*asdict(run.settings).items(), ("kill_ts_ms", run.kill.kill_ts_ms)]),
    )


def verdict(runs: Sequence[DemoRun]) -> str:
    """Say in a sentence how often prediction and observation were equal, and whether any ack was lost or invented."""
    outcomes = [outcome for run in runs for outcome in run.subscriptions]
    lost, invented = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("lost", "invented"))
    equal = sum(run.holds for run in runs)
    return f"{equal} of {len(runs)} predictions equal to observation, {lost} lost acks, {invented} invented acks"


def predicted(outcome: SubscriptionOutcome) -> str:
    """Return the prediction at the kill; both answers where the kill fell inside a persist."""
    if not outcome.kill_inside_persist:
        return str(outcome.predicted_at_kill)
    return f"{outcome.predicted_if_not_written} or, if written, {outcome.predicted_if_written}"


def _plot(run: DemoRun) -> str:
    begin_ms = min((ts_ms for _, ts_ms, _, _ in run.curve), default=run.kill.kill_ts_ms)
    kill_s = (run.kill.kill_ts_ms - begin_ms) / 1_000
    figure = go.Figure()
    for index, outcome in enumerate(run.subscriptions):
        colour, dash = _STYLES[index % len(_STYLES)]
        # The most in a slice of time, then what is left at its end: so a persist shows as the fall that it is.
        points = [
            ((ts_ms - begin_ms) / 1_000, value)
            for name, ts_ms, at_end, most in run.curve
            if name == outcome.name
            for value in (most, at_end)
        ]
        figure.add_scatter(
            x=[x for x, _ in points], y=[y for _, y in points], name=outcome.name, mode="lines",
            line={"color": colour, "dash": dash, "width": 1.5, "shape": "hv"},
        )  # fmt: skip
        figure.add_scatter(
            x=[kill_s], y=[outcome.observed], name=f"{outcome.name}: observed", mode="markers", showlegend=False,
            marker={"color": colour, "size": 11, "symbol": "x"},
        )  # fmt: skip
    figure.add_vline(x=kill_s, line={"color": "#8b0000", "dash": "dash"}, annotation_text="SIGKILL")
    figure.update_layout(
        template="plotly_white", height=480, margin={"l": 60, "r": 20, "t": 30, "b": 50},
        xaxis_title="seconds since the first event", yaxis_title="messages redelivered if crashed",
        legend={"orientation": "h", "y": 1.12},
    )  # fmt: skip
    library = f"<script>{get_plotlyjs()}</script>"
    return library + figure.to_html(full_html=False, include_plotlyjs=False, div_id="curve")


def _outcomes(run: DemoRun) -> str:
    rows = [
        (o.name, o.acked, o.durable, predicted(o), o.observed, o.lost, o.invented) for o in run.subscriptions
    ]
    return _table(
        ("subscription", "acked", "persisted", "predicted at the kill", "observed", "lost acks", "invented acks"),
        rows,
        identity="outcomes",
    )


def _distribution(run: DemoRun) -> str:
    rows = [(o.name, f"{o.expected:.1f}", o.p50, o.p99, o.max) for o in run.subscriptions]
    return _table(("subscription", "expected", "p50", "p99", "max"), rows)


def _recoveries(run: DemoRun) -> str:
    rows = [
        (
            recovered["subscription"],
            recovered["report"]["source"],
            recovered["report"]["records_replayed"],
            recovered["report"]["bytes_discarded"],
            recovered["mark_delete"],
            recovered["report"]["range_count"],
        )
        for recovered in run.recoveries
    ]
    return _table(
        ("subscription", "source", "records replayed", "bytes discarded", "mark-delete", "ranges"), rows
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[object]], *, identity: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    named = f' id="{identity}"' if identity else ""
    return f"<table{named}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
