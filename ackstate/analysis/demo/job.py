"""Runs the demo end to end: kill a live broker, recover it, predict redelivery with Spark, and compare."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ackstate.analysis.demo.kill import Kill, recover_elsewhere, run_and_kill
from ackstate.analysis.demo.results import DemoDirectory
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.policy import AS_RECORDED
from ackstate.analysis.spark.source import SparkSource
from ackstate.analysis.trace.parquet import write_trace
from ackstate.analysis.trace.recorder import read_recording

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ackstate.analysis.demo.broker import DemoSettings

    Progress = Callable[[str, float], None]
    """Called with the name of the current step and the completed share."""


@dataclass(frozen=True, slots=True)
class SubscriptionOutcome:
    """One subscription after the kill: Spark's prediction and the observation of the recovery.

    Attributes:
        name: The subscription.
        acked: Acks accepted before the kill.
        durable: Accepted acks that the recovered cursor has.
        predicted_at_kill: Redelivery that Spark computed for the instant of the kill. A kill inside a persist has two
            right answers; then it is the one that came true.
        observed: Accepted acks that the recovered cursor lacks, by set difference.
        lost: Durable acks that it lacks.
        invented: Entries that are acked in the recovered cursor, but were never acked.
        expected: Mean over time of redelivery if crashed; like the next two, None if no time passed.
        p50: Median over time.
        p99: Not exceeded during 99 % of the time.
        max: The maximum at any instant.
        kill_inside_persist: Whether a persist had begun and not ended.
        predicted_if_not_written: Prediction if that persist was not written; the only one without such a persist.
        predicted_if_written: Prediction if it was written.
    """

    name: str
    acked: int
    durable: int
    predicted_at_kill: int
    observed: int
    lost: int
    invented: int
    expected: float | None
    p50: int | None
    p99: int | None
    max: int
    kill_inside_persist: bool
    predicted_if_not_written: int
    predicted_if_written: int

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
    """One kill and its outcome.

    Attributes:
        seed: Seed of the workload and of the moment.
        kill: The broker's death.
        subscriptions: The outcome of each subscription.
        recoveries: The report of the second process for each subscription.
        curve: Points (subscription, ts_ms, redelivery, redelivery_max) for the plot.
        settings: The settings of the broker.
    """

    seed: int
    kill: Kill
    subscriptions: list[SubscriptionOutcome]
    recoveries: list[dict[str, Any]]
    curve: list[tuple[str, int, int, int]]
    settings: DemoSettings

    @property
    def holds(self) -> bool:
        """Whether every subscription's prediction came true and no ack was lost or invented."""
        return all(outcome.holds for outcome in self.subscriptions)


def run(
    spark: SparkSession, out: Path, settings: DemoSettings, *, lives_ms: tuple[int, int], progress: Progress
) -> DemoRun:
    """Run the demo once, in `out`: the broker's directory and the Parquet trace stay there.

    Raises:
        AckStateError: A foreign file is in the way, or a step failed; the message names it.
        OSError: The disk is full or failed.
    """
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


def summary_json(runs: list[DemoRun]) -> dict[str, Any]:
    """Return the content of `summary.json`: the last run, and the number of equal predictions and observations."""
    last = runs[-1]
    return {
        "subscriptions": [asdict(outcome) for outcome in last.subscriptions],
        "seed": last.seed,
        "kill_ts_ms": last.kill.kill_ts_ms,
        "kill_inside_persist": any(outcome.kill_inside_persist for outcome in last.subscriptions),
        "repeat": {
            "runs": len(runs),
            "equal": sum(run.holds for run in runs),
            "lost": sum(outcome.lost for run in runs for outcome in run.subscriptions),
            "invented": sum(outcome.invented for run in runs for outcome in run.subscriptions),
            "killed_inside_persist": sum(
                any(outcome.kill_inside_persist for outcome in run.subscriptions) for run in runs
            ),
            "seeds": [run.seed for run in runs],
        },
        "settings": asdict(last.settings),
    }


def _compare(
    spark: SparkSession, trace: Path, *, kill: Kill, recoveries: list[dict[str, Any]], settings: DemoSettings
) -> DemoRun:
    rows = estimates(SparkSource.of(spark, trace), [AS_RECORDED], is_plotted=True).collect()
    found = {row["subscription"]: row for row in rows if row["scope"] == "subscription"}
    outcomes = [_outcome(recovered, found[recovered["subscription"]]) for recovered in recoveries]
    curve = sorted(
        (name, ts_ms, number, number)
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
