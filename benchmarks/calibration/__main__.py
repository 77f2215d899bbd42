"""Kills real cursors, and compares the redelivered entries with the prediction of the estimate.

python -m benchmarks.calibration [OPTIONS]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ackstate.analysis.atomic_write import write_atomically
from ackstate.analysis.cli import console
from ackstate.analysis.cli.main import run
from ackstate.analysis.cli.options import JsonOption, key_value_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from benchmarks.calibration.results import Calibration
    from benchmarks.calibration.run import CalibrationPlan

_COUNT_MAX = 10_000


def calibrate(
    points: Annotated[
        int, typer.Option(metavar="N", min=1, max=_COUNT_MAX, help="How many policies, each on some traffic.")
    ] = 60,
    kills: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=_COUNT_MAX, help="Kills at random moments; half as many at others."),
    ] = 20,
    power_cuts: Annotated[int, typer.Option(metavar="N", min=0, max=_COUNT_MAX, help="Power cuts; need root.")] = 4,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Decides the traffic and the moments.")] = 1,
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V", help="Make the estimate assume a wrong setting; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", parser=Path, help="Write the JSON there.")] = None,
    json: JsonOption = False,
) -> None:
    """Kill real cursors under many policies, and compare the redelivered messages with the estimate.

    Each process plays some seconds of traffic on SQLite and is killed with SIGKILL; as root, the power of its disk
    is cut, too. A second process recovers and counts. A kill must redeliver exactly the number predicted from the
    trace alone, a power cut at most that.

    Exit status: 0 it holds; 1 it does not; 2 it could not be done.
    """
    from benchmarks.calibration.results import json_text
    from benchmarks.calibration.run import CalibrationPlan
    from benchmarks.calibration.table import result_table

    plan = CalibrationPlan(points, kills, power_cuts, seed, key_value_pairs(assume or ()))
    result = _result(plan)
    if out is not None:
        write_atomically(out, json_text(result))
    if json:
        console.write_json(result.to_json())
    else:
        skipped = [f"no power cuts: {result.skipped}"] if result.skipped else []
        console.show(result_table(result), result.sentence, *skipped, *([f"{out}"] if out else []))
    if not result.holds:
        raise typer.Exit(1)


def _result(plan: CalibrationPlan) -> Calibration:
    from benchmarks.calibration.run import calibrate

    with console.progress(auto_refresh=False) as progress:
        task = progress.add_task("calibrating", total=1.0)

        def show(what: str, share: float) -> None:
            progress.update(task, description=what, completed=share, refresh=True)

        # First, so that minutes of kills are not lost where there is no Java.
        show("starting Spark", 0.0)
        spark = _session()
        result = calibrate(plan, show)
        show("Spark computes the predictions", 0.0)
        expected = _by_spark(spark, plan)
    points = zip(result.points, expected, strict=True)
    return replace(result, points=tuple(replace(point, expected_by_spark=each) for point, each in points))


def _session() -> SparkSession:
    from ackstate.analysis.spark.session import local_session

    return local_session()


def _by_spark(spark: SparkSession, plan: CalibrationPlan) -> list[float]:
    from benchmarks.calibration.prediction import expected_by_spark

    return expected_by_spark(spark, plan.replayed())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit, as `ackstate` does."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(calibrate)
    run(app, sys.argv[1:] if arguments is None else arguments, name="python -m benchmarks.calibration")


if __name__ == "__main__":
    main()
