"""`ackstate demo`, and its parts by hand: `broker` runs until it is killed, `recover` recovers its cursors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.console import subscription_table
from ackstate.analysis.cli.options import (
    LONGEST,
    NUMBER_MAX,
    BrokerDirectoryArgument,
    FlushIntervalOption,
    JsonOption,
    between,
    duration_option,
    path_argument,
)
from ackstate.analysis.durations import Duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.table import Table

    from ackstate.analysis.demo.broker import RecoveredCursor
    from ackstate.analysis.demo.run import DemoRun


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", parser=path_argument, help="Directory of the results.")] = Path(
        "out/demo"
    ),
    seed: Annotated[int, typer.Option(metavar="N", help="Decides the workload and the moment of the kill.")] = 1,
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
    from ackstate.analysis.demo import run as main_job
    from ackstate.analysis.demo.broker import DemoDirectory, DemoSettings
    from ackstate.analysis.demo.run import render, verdict
    from ackstate.analysis.location import write_atomically
    from ackstate.analysis.spark.session import local_session, readable_failures

    results = DemoDirectory(out)
    settings = DemoSettings(seed=seed, flush_interval_ms=flush_interval.ms)
    with results.claimed():
        with console.progress() as progress, readable_failures(results.trace):
            task = progress.add_task("starting Spark", total=1.0)
            run = main_job.run(
                local_session(), out, settings, lives_ms=(seconds.ms // 3, seconds.ms),
                progress=lambda what, share: progress.update(task, description=what, completed=share),
            )  # fmt: skip
        write_atomically(results.report, render(run))
        summary = console.json_text(main_job.summary_json(run))
        write_atomically(results.summary, summary)
    if json:
        console.write(summary)
    else:
        console.show(outcome_table(run), verdict(run), f"{results.summary}, {results.report}")
    if not run.holds:
        raise typer.Exit(1)


def outcome_table(run: DemoRun) -> Table:
    """Return the demo's table of one run."""
    title = f"Killed after {run.kill.lived_ms / 1_000:.2f} s (seed {run.seed})"
    names = [outcome.name for outcome in run.subscriptions]
    table = subscription_table(
        title, names, "acked", "persisted", "predicted\nat the kill", "observed", "lost\nacks", "invented\nacks"
    )
    for outcome in run.subscriptions:
        numbers = (outcome.observed, outcome.lost, outcome.invented)
        table.add_row(outcome.name, str(outcome.acked), str(outcome.durable), outcome.prediction, *map(str, numbers))
    return table


def _recovered_tables(results: Sequence[RecoveredCursor]) -> Iterator[Table]:
    """Yield the source of each cursor's state; then its redelivered messages, and lost and invented acks: must be 0."""
    names = [result.subscription for result in results]
    first = subscription_table("Recovered", names, "from", "records", "torn bytes", "mark-delete", "ranges")
    second = subscription_table(
        "Redelivered", names, "acked", "persisted", "redelivered", "lost\nacks", "invented\nacks"
    )
    for name, result in zip(names, results, strict=True):
        report = result.report
        replayed = (report.records_replayed, report.bytes_discarded, result.mark_delete, report.range_count)
        first.add_row(name, report.source.value, *map(str, replayed))
        numbers = (result.acked, result.durable, result.observed, result.lost, result.invented)
        second.add_row(name, *map(str, numbers))
    yield from (first, second)


def broker(
    directory: BrokerDirectoryArgument,
    seconds: Annotated[
        Duration, duration_option(plain_unit="s", most=LONGEST, help="Stop after this time.")
    ] = Duration(60_000),
    seed: Annotated[int, typer.Option(metavar="N", help="Decides the workload.")] = 1,
    messages_per_second: Annotated[
        int, typer.Option(metavar="N", callback=between(1, NUMBER_MAX), help="Publish rate.")
    ] = 3_000,
    flush_interval: FlushIntervalOption = Duration(250),
) -> None:
    """Run a small broker until it is killed: one topic, three subscriptions, all recorded.

    It prints "ready" when it has started. In a directory that a killed broker
    left, it recovers first and continues.
    """
    from ackstate.analysis.demo.broker import READY, BrokerDirectory, DemoBroker, DemoSettings, run
    from ackstate.analysis.trace.recording import Recording

    settings = DemoSettings(seed, messages_per_second, flush_interval_ms=flush_interval.ms)
    place = BrokerDirectory(directory)
    now_ms = _clock()
    with place.begun_or_new() as store, Recording(place.recording) as recording:
        live = DemoBroker(store, recording, settings, now_ms=now_ms())
        console.write(f"{READY}\n")
        run(live, now_ms=now_ms, until_ms=now_ms() + seconds.ms)


def _clock() -> Callable[[], int]:
    """Return a clock in ms since the epoch that never goes backwards."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (offset_ns + time.monotonic_ns()) // 1_000_000


def recover(directory: BrokerDirectoryArgument, json: JsonOption = False) -> None:
    """Recover every cursor of a dead broker, and report which acked messages are redelivered.

    Opening a cursor takes it over from its earlier owner, as a restarted broker
    does; no ack is changed. Redeliveries are added to the recording, so that
    a second recovery reports no more of them.
    """
    from ackstate.analysis.demo.broker import BrokerDirectory
    from ackstate.analysis.demo.broker import recover as recover_all
    from ackstate.analysis.trace.recording import Recording

    place = BrokerDirectory(directory)
    with place.begun() as (store, frames), Recording(place.recording) as recording:
        results = recover_all(store, frames, recording=recording, now_ms=time.time_ns() // 1_000_000)
    if json:
        console.write_json({"subscriptions": [result.to_json() for result in results]})
    else:
        console.show(*_recovered_tables(results))
    if any(result.lost or result.invented for result in results):
        raise typer.Exit(1)
