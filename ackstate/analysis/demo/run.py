"""Runs the demo end to end: kill a live broker, recover it, predict redelivery with Spark, and compare."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ackstate.analysis.crash import dying
from ackstate.analysis.demo.broker import READY, SUBSCRIPTIONS, TOPIC, DemoDirectory
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.policy import AS_RECORDED
from ackstate.analysis.spark.source import SparkSource
from ackstate.analysis.trace.entry_set import histories
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.parquet import write_trace
from ackstate.analysis.trace.recorder import Recorder, read_recording
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ackstate.analysis.demo.broker import DemoSettings

    Progress = Callable[[str, float], None]
    """Called with the name of the current step and the completed share."""
    from ackstate.analysis.demo.broker import BrokerDirectory


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
