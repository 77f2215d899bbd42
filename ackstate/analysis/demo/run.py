"""Runs the demo end to end: kill a live broker, recover it, predict redelivery with Spark, and compare.

Its report is one HTML file that needs no other file and no network.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from string import Template
from typing import TYPE_CHECKING, Any

from ackstate.analysis import html_page
from ackstate.analysis.crash import dying
from ackstate.analysis.demo.broker import READY, SUBSCRIPTIONS, TOPIC, DemoDirectory
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.html_page import Chart, Instants, Line, Marks, escape, number_axis, seconds_axis, section, table
from ackstate.analysis.replay.policy import AS_RECORDED
from ackstate.analysis.spark.source import SparkSource
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.parquet import write_trace
from ackstate.analysis.trace.recording import Recorder, histories, read_recording
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ackstate.analysis.demo.broker import BrokerDirectory, DemoSettings

    Progress = Callable[[str, float], None]
    """Called with the name of the current step and the completed share."""


@dataclass(frozen=True, slots=True)
class SubscriptionOutcome:
    """One subscription after the kill: Spark's prediction and the observation of the recovery."""

    name: str
    acked: int  # Acks accepted before the kill
    durable: int  # Accepted acks that the recovered cursor has
    # Redelivery that Spark computed for the instant of the kill. A kill inside a persist has two right answers; then it
    # is the one that came true.
    predicted_at_kill: int
    observed: int  # Accepted acks that the recovered cursor lacks, by set difference
    lost: int  # Durable acks that it lacks
    invented: int  # Entries that are acked in the recovered cursor, but were never acked
    expected: float | None  # Mean over time of redelivery if crashed; like the next two, None if no time passed
    p50: int | None  # Median over time
    p99: int | None  # Not exceeded during 99 % of the time
    max: int  # The maximum at any instant
    kill_inside_persist: bool  # Whether a persist had begun and not ended
    predicted_if_not_written: int  # Prediction if that persist was not written; the only one without such a persist
    predicted_if_written: int  # Prediction if it was written

    @property
    def prediction(self) -> str:
        """The prediction at the kill in words: both answers if the kill fell inside a persist."""
        if not self.kill_inside_persist:
            return str(self.predicted_at_kill)
        return f"{self.predicted_if_not_written} or, if written, {self.predicted_if_written}"

    @property
    def holds(self) -> bool:
        """Whether prediction equals observation and no ack was lost or invented."""
        return self.predicted_at_kill == self.observed and self.lost == self.invented == 0


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One kill and its outcome."""

    seed: int  # Seed of the workload and of the moment
    kill: Kill  # The broker's death
    subscriptions: list[SubscriptionOutcome]  # The outcome of each subscription
    recoveries: list[dict[str, Any]]  # The report of the second process for each subscription
    curve: list[tuple[str, int, int]]  # Points (subscription, ts_ms, redelivery) for the plot
    settings: DemoSettings  # The settings of the broker

    @property
    def holds(self) -> bool:
        """Whether every subscription's prediction came true and no ack was lost or invented."""
        return all(outcome.holds for outcome in self.subscriptions)


def run(
    spark: SparkSession, out: Path, settings: DemoSettings, *, lives_ms: tuple[int, int], progress: Progress
) -> DemoRun:
    """Run the demo once, in `out`: the broker's directory and the Parquet trace stay there."""
    results = DemoDirectory(out)
    directory = results.broker
    directory.clear()
    progress("broker runs, then SIGKILL", 0.0)
    kill = run_and_kill(
        directory, settings, lives_ms=lives_ms, waiting=lambda share: progress("broker runs, then SIGKILL", share)
    )
    progress("a second process recovers", 0.0)
    recoveries = recover_elsewhere(directory)
    progress("recording to Parquet", 0.0)
    write_trace(read_recording(directory.recording), results.trace)
    progress("Spark computes every instant", 0.0)
    return _compare(spark, results.trace, kill=kill, recoveries=recoveries, settings=settings)


def summary_json(run: DemoRun) -> dict[str, Any]:
    """Return the content of `summary.json`."""
    return {
        "subscriptions": [asdict(outcome) for outcome in run.subscriptions],
        "seed": run.seed,
        "kill_ts_ms": run.kill.kill_ts_ms,
        "kill_inside_persist": any(outcome.kill_inside_persist for outcome in run.subscriptions),
        "settings": asdict(run.settings),
    }


def _compare(
    spark: SparkSession, trace: Path, *, kill: Kill, recoveries: list[dict[str, Any]], settings: DemoSettings
) -> DemoRun:
    rows = estimates(SparkSource.of(spark, trace), [AS_RECORDED], is_plotted=True).collect()
    found = {row["subscription"]: row for row in rows if row["scope"] == "subscription"}
    outcomes = [_outcome(recovered, found[recovered["subscription"]]) for recovered in recoveries]
    curve = sorted(
        (name, ts_ms, number)
        for name, row in found.items()
        for ts_ms, number in zip(row["curve_ms"] or (), row["curve"] or (), strict=False)
    )
    return DemoRun(settings.seed, kill, outcomes, recoveries, curve, settings)


def _outcome(recovered: dict[str, Any], found: dict[str, Any]) -> SubscriptionOutcome:
    observed = recovered["observed"]
    # The kill is the last crash.
    not_written, written, is_persisting = found["crashes"][-3:]
    return SubscriptionOutcome(
        name=recovered["subscription"],
        acked=recovered["acked"],
        durable=recovered["durable"],
        predicted_at_kill=written if observed == written else not_written,
        observed=observed,
        lost=recovered["lost"],
        invented=recovered["invented"],
        expected=None if found["expected"] is None else round(found["expected"], 3),
        p50=found["p50"],
        p99=found["p99"],
        max=found["max"],
        kill_inside_persist=bool(is_persisting),
        predicted_if_not_written=not_written,
        predicted_if_written=written,
    )


_POLL_S = 0.05


class ChildFailedError(AckStateError):
    """A child process ended by itself; the message is its output."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A broker's death."""

    kill_ts_ms: int  # Time by which it was dead: when it was reaped, or its last event if that is later
    lived_ms: int  # Time from its first step to the signal


def run_and_kill(
    directory: BrokerDirectory,
    settings: DemoSettings,
    *,
    lives_ms: tuple[int, int],
    waiting: Callable[[float], None] = lambda _share: None,
) -> Kill:
    """Start a broker, kill it with SIGKILL at a moment drawn from its seed, and add the crash to its recording."""
    moment_ms = random.Random(f"kill {settings.seed}").randint(*lives_ms)  # noqa: S311 - a moment, not a secret
    # If its parent dies first, and the kernel does not kill it, it ends by itself soon after.
    options = ["--seconds", str(lives_ms[1] / 1_000 + 30)]
    options += [f"--seed={settings.seed}", f"--flush-interval-ms={settings.flush_interval_ms}"]
    with _start("broker", *options, "--", str(directory.path)) as child:
        try:
            assert child.stdout is not None
            if child.stdout.readline().strip() != READY:
                raise _failed(child)
            begun = time.monotonic()
            while (lived_ms := (time.monotonic() - begun) * 1_000) < moment_ms:
                waiting(lived_ms / moment_ms)
                if child.poll() is not None:
                    raise _failed(child)
                time.sleep(min(_POLL_S, (moment_ms - lived_ms) / 1_000))
        finally:
            child.kill()
            child.wait()
    waiting(1.0)
    return Kill(_note_crash(directory), int(lived_ms))


def recover_elsewhere(directory: BrokerDirectory) -> list[dict[str, Any]]:
    """Recover every cursor in a second process; return its reports, as `RecoveredCursor.to_json`."""
    with _start("recover", "--json", "--", str(directory.path)) as child:
        try:
            told, complaint = child.communicate()
        finally:
            child.kill()
    # Status 1 also has a report, of lost or invented acks.
    if child.returncode not in {0, 1} or not told:
        raise ChildFailedError(f"the recovery failed: {_last_line(complaint) or child.returncode}")
    report: list[dict[str, Any]] = json.loads(told)["subscriptions"]
    return report


def _start(command: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - our own command
        # Without -P, a directory in the current one could shadow our packages.
        dying.command_of([sys.executable, "-P", "-m", "ackstate.analysis.cli", command, *arguments]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"},
    )


def _failed(child: subprocess.Popen[str]) -> ChildFailedError:
    _, complaint = child.communicate()
    return ChildFailedError(f"the broker ended by itself: {_last_line(complaint) or child.returncode}")


def _last_line(complaint: str) -> str:
    """Return the last line of a command on standard error, without its name."""
    return next(iter(complaint.strip().splitlines()[-1:]), "").removeprefix("ackstate: ")


def _note_crash(directory: BrokerDirectory) -> int:
    """Write the crash of every subscription into the recording and return its time."""
    # Read the clock first: reading the recording takes a while, during which no broker lived.
    now_ms = time.time_ns() // 1_000_000
    recorded = histories(read_recording(directory.recording))
    ts_ms = max([now_ms, *(history.last_ts_ms for history in recorded.values())])
    with Recorder(directory.recording) as recorder:
        for subscription in SUBSCRIPTIONS:
            recorder.record(TOPIC, subscription, [Event(ts_ms, EventKind.CRASH)])
    return ts_ms


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
    style = html_page.STYLE + _STYLE
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
        colour = number % html_page.COLOUR_COUNT
        answers = sorted({outcome.predicted_if_not_written, outcome.predicted_if_written})
        layers: list[html_page.Layer] = [
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
