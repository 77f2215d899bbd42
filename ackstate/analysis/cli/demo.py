"""`ackstate demo` kills a live broker, recovers it, and compares the redelivered messages with the prediction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ackstate.analysis.cli import console, tables
from ackstate.analysis.cli.options import FlushIntervalOption, JsonOption, between, duration_option, path_argument
from ackstate.analysis.durations import Duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.demo.broker import DemoSettings
    from ackstate.analysis.demo.job import DemoRun


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", parser=path_argument, help="Directory of the results.")] = Path(
        "out/demo"
    ),
    seed: Annotated[int, typer.Option(metavar="N", help="Decides the workload and the moment of the kill.")] = 1,
    repeat: Annotated[
        int, typer.Option(metavar="N", callback=between(1, 1_000_000), help="Kill this often, with seeds one apart.")
    ] = 1,
    seconds: Annotated[
        Duration,
        duration_option(plain_unit="s", least="1s", most="1h", help="Kill in the last two thirds of this; 1s to 1h."),
    ] = Duration(6_000),
    flush_interval: FlushIntervalOption = Duration(250),
    json: JsonOption = False,
) -> None:
    """Kill a live broker, recover it in a second process, and compare the redelivered messages with Spark's prediction.

    A broker with three subscriptions runs until SIGKILL at a seeded moment. A
    second process recovers the cursors from the same directory. The observed
    number is the set difference: acked messages that are redelivered. The
    predicted number is computed by Spark from the trace, for a crash at that
    instant. Both must be equal.

    Writes summary.json and report.html, and leaves the broker's directory and
    the trace beside them. The directory must be empty, or that of a demo.
    """
    from ackstate.analysis.atomic_write import write_atomically
    from ackstate.analysis.demo import job as main_job
    from ackstate.analysis.demo.broker import DemoSettings
    from ackstate.analysis.demo.report import render, verdict
    from ackstate.analysis.demo.results import DemoDirectory

    results = DemoDirectory(out)
    lives_ms = (seconds.ms // 3, seconds.ms)
    settings = [DemoSettings(seed=seed + index, flush_interval_ms=flush_interval.ms) for index in range(repeat)]
    with results.claimed():
        runs = _kill_and_compare(results.path, settings, lives_ms=lives_ms)
        write_atomically(results.report, render(runs))
        summary = console.json_text(main_job.summary_json(runs))
        write_atomically(results.summary, summary)
    if json:
        console.write(summary)
    else:
        console.show(tables.outcome_table(runs[-1]), verdict(runs), f"{results.summary}, {results.report}")
    if not all(run.holds for run in runs):
        raise typer.Exit(1)


def _kill_and_compare(out: Path, settings: Sequence[DemoSettings], *, lives_ms: tuple[int, int]) -> list[DemoRun]:
    """Run the main job once for each of the settings, with progress shown."""
    from ackstate.analysis.demo import job as main_job
    from ackstate.analysis.demo.results import DemoDirectory
    from ackstate.analysis.spark.session import local_session, readable_failures

    runs: list[DemoRun] = []
    with console.progress() as progress, readable_failures(DemoDirectory(out).trace):
        task = progress.add_task("starting Spark", total=1.0)
        spark = local_session()
        for number, each in enumerate(settings, start=1):

            def show(what: str, share: float, number: int = number) -> None:
                progress.update(task, description=f"{number}/{len(settings)} {what}", completed=share)

            runs.append(main_job.run(spark, out, each, lives_ms=lives_ms, progress=show))
            if len(settings) > 1:
                # Printed above the bar; without a bar its console is quiet.
                lines = Console(stderr=True) if progress.disable else progress.console
                lines.print(tables.repeat_line(runs[-1]), highlight=False, soft_wrap=True)
    return runs
