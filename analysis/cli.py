"""The command `ackstate`.

Exit status: 0 all is well; 1 the answer is bad news (a prediction that did not come true, a lost or an invented ack);
2 the command could not do its work, and one line on standard error says why; 130 interrupted.
"""

from __future__ import annotations

import errno
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from analysis.demo import DemoRun

app = typer.Typer(
    name="ackstate",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="""The ack state of a subscription: what is durable, and what comes back if the broker dies now.

Begin with `ackstate demo`: it kills a live broker, recovers it, lets Spark predict what comes back, and compares.
The three steps by hand, in three commands:

    ackstate broker DIR &                 # a broker that acks and persists, and writes down all it does

    kill -9 %1; ackstate recover DIR      # a second process recovers it

    ackstate trace DIR/recording OUT; ackstate redelivery OUT
""",
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def demo(  # noqa: PLR0913 - each is an option of the command line
    out: Annotated[Path, typer.Option(help="Directory for the results.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Decides the workload and the moment of the kill.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="Kill and recover this often, with seeds one apart.")] = 1,
    seconds: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="The kill falls in the last two thirds of this time.")
    ] = 6.0,
    flush_interval_ms: Annotated[
        int, typer.Option(min=0, help="How often each cursor persists: what a crash redelivers grows with it.")
    ] = 250,
    json: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Kill a live broker, recover it in a second process, and compare what comes back with what Spark predicts.

    A broker with three subscriptions runs until SIGKILL at a seeded moment. A second process recovers the cursors from
    the same directory: what had been acked and comes back is *observed*, counted by set difference. Spark computes
    from the trace what a crash would bring back at every instant: *predicted*. They must be equal.

    Writes `summary.json` and `report.html` into the results directory.
    """
    from analysis import demo as main_job
    from analysis.crash.broker import BrokerSettings
    from analysis.redelivery.spark import local_session
    from analysis.report import render, verdict

    _make_directory(out)
    lives_ms = (int(seconds * 1_000 / 3), int(seconds * 1_000))
    runs: list[DemoRun] = []
    with _progress() as progress:
        task = progress.add_task("starting Spark", total=1.0)
        spark = local_session()
        for index in range(repeat):

            def show(what: str, share: float, number: int = index) -> None:
                progress.update(task, description=f"{number + 1}/{repeat} {what}", completed=share)

            settings = BrokerSettings(seed=seed + index, flush_interval_ms=flush_interval_ms)
            runs.append(main_job.run(spark, out, settings, lives_ms=lives_ms, progress=show))
            if repeat > 1 and not json:
                progress.console.print(_repeat_line(runs[-1]), highlight=False)
    main_job.write_whole(out / "report.html", render(runs))
    summary = main_job.dump_json(main_job.summary_json(runs))
    main_job.write_whole(out / "summary.json", summary)
    if json:
        sys.stdout.write(summary)
    else:
        console = Console()
        console.print(_outcome_table(runs[-1]))
        console.print(verdict(runs), highlight=False)
        console.print(f"{out / 'summary.json'}, {out / 'report.html'}", highlight=False, soft_wrap=True)
    if not all(run.holds for run in runs):
        raise typer.Exit(1)


@app.command()
def redelivery(
    trace: Annotated[Path, typer.Argument(help="A Parquet trace: a directory or a file.")],
    json: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Compute from a trace how many acked messages a crash would have brought back, at every instant.

    Per subscription: expected (mean over time), p50, p99, max, and the number at each crash that the trace holds.
    """
    from analysis.redelivery import estimate
    from analysis.redelivery.spark import local_session, readable_failures
    from analysis.trace.parquet import check_trace

    check_trace(trace)
    with _progress() as progress:
        progress.add_task("Spark computes every instant", total=None)
        with readable_failures(str(trace)):
            steps = estimate.curve(local_session().read.parquet(str(trace))).cache()
            summaries = sorted(estimate.summary(steps).collect())
            crashes = sorted(estimate.crashes(steps).collect())
    rows = [
        row.asDict() | {"crashes": [crash.asDict() for crash in crashes if crash[:2] == row[:2]]} for row in summaries
    ]
    if json:
        _print_json({"subscriptions": rows})
        return
    columns = ("topic", "subscription", "expected", "p50", "p99", "max", "at each crash")
    table = _table("Redelivery if crashed, over every instant of the trace", columns)
    for row in rows:
        expected = "-" if row["expected"] is None else f"{row['expected']:.1f}"
        at_crashes = ", ".join(str(crash["at_crash"]) for crash in row["crashes"]) or "-"
        numbers = (str(row[name]) for name in ("p50", "p99", "max"))
        table.add_row(row["topic"], row["subscription"], expected, *numbers, at_crashes)
    Console().print(table)


@app.command()
def trace(
    recording: Annotated[Path, typer.Argument(help="A recording: the directory that a broker wrote.")],
    out: Annotated[Path, typer.Argument(help="The Parquet trace to write; one that is there is replaced.")],
    json: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Turn a live recording into a Parquet trace."""
    from analysis.trace.parquet import write_trace
    from analysis.trace.recorder import read_recording

    events = write_trace(read_recording(recording), out)
    if json:
        _print_json({"trace": str(out), "events": events})
    else:
        Console().print(f"{out}: {events} events", highlight=False, soft_wrap=True)


@app.command()
def broker(  # noqa: PLR0913 - each is an option of the command line
    directory: Annotated[Path, typer.Argument(help="Where the store and the recording live; made if missing.")],
    seconds: Annotated[float, typer.Option(min=0.0, help="Stop by itself after this time.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Decides the workload.")] = 1,
    messages_per_second: Annotated[int, typer.Option(min=1, help="Publish rate.")] = 3_000,
    entries_per_ledger_max: Annotated[int, typer.Option(min=1, help="Roll the message log after this many.")] = 2_500,
    delayed_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of delayed messages.")] = 0.1,
    delay_ms_max: Annotated[int, typer.Option(min=1, help="Longest delay.")] = 400,
    flush_interval_ms: Annotated[int, typer.Option(min=0, help="How often each cursor persists.")] = 250,
    max_unpersisted_ack_record_bytes: Annotated[
        int, typer.Option(help="Dispatch stops before un-persisted ack records take more; below 1 is off.")
    ] = 16 * 1024,
    max_unacked_messages: Annotated[
        int, typer.Option(min=0, help="Dispatch stops before more are unacked; 0 is off.")
    ] = 1_000,
) -> None:
    """Run a small broker until it is killed: one topic, three subscriptions, a trace of all that they do.

    On a directory that a killed broker left, it recovers first and goes on.
    """
    from analysis.crash.broker import Broker, BrokerSettings, run
    from analysis.crash.kill import READY, BrokerDirectory
    from analysis.crash.recover import recover
    from analysis.trace.recorder import Recorder, read_recording, segments
    from cursor.sqlite import SqliteStore

    settings = BrokerSettings(
        seed, messages_per_second, entries_per_ledger_max, delayed_share, delay_ms_max, flush_interval_ms,
        max_unpersisted_ack_record_bytes, max_unacked_messages,
    )  # fmt: skip
    place = BrokerDirectory(directory)
    now_ms = _clock()
    store = SqliteStore(place.store)
    try:
        earlier = segments(place.recording)
        frames = list(read_recording(place.recording)) if earlier else []
        with Recorder(place.recording) as recorder:
            if earlier:
                recover(store, frames, recorder=recorder, now_ms=now_ms())
            live = Broker(store, recorder, settings, now_ms=now_ms())
            sys.stdout.write(f"{READY}\n")
            sys.stdout.flush()
            run(live, now_ms=now_ms, until_ms=now_ms() + int(seconds * 1_000))
    finally:
        store.close()


@app.command()
def recover(
    directory: Annotated[Path, typer.Argument(help="What a broker left: its store and its recording.")],
    json: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Recover every cursor that a dead broker left, and say which acked messages come back.

    Opening a cursor takes it over from whoever had it, as a restarted broker does; no ack is changed.
    """
    from analysis.crash.kill import BrokerDirectory
    from analysis.crash.recover import recover as recover_all
    from analysis.trace.recorder import Recorder, read_recording
    from cursor.sqlite import SqliteStore

    place = BrokerDirectory(directory)
    if not place.store.is_dir():
        raise AckStateError(f"{directory}: no broker was here, expected a directory {place.store.name}")
    store = SqliteStore(place.store)
    try:
        frames = list(read_recording(place.recording))
        with Recorder(place.recording) as recorder:
            results = recover_all(store, frames, recorder=recorder, now_ms=_clock()())
    finally:
        store.close()
    if json:
        _print_json({"subscriptions": [result.to_json() for result in results]})
    else:
        columns = (
            "subscription", "source", "records", "mark-delete", "ranges", "acked", "persisted", "redelivered", "lost",
            "invented",
        )  # fmt: skip
        table = _table("Recovered", columns)
        for result in results:
            report = result.report
            table.add_row(
                result.subscription, report.source.value, str(report.records_replayed), result.mark_delete,
                str(report.range_count),
                *(str(n) for n in (result.acked, result.durable, result.observed, result.lost, result.invented)),
            )  # fmt: skip
        Console().print(table)
    if any(result.lost or result.invented for result in results):
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; every failure that is not a bug is one line on standard error."""
    sys.exit(_status(lambda: app(arguments, standalone_mode=False, prog_name="ackstate")))


def _status(command: Callable[[], Any]) -> int:
    try:
        status = command()
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stdout.write(f"{error.format_message()}\n")
        return 2
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _complain("interrupted", status=130)
    except click.ClickException as error:
        return _complain(error.format_message())
    except AckStateError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(_os_error(error))
    except ValueError as error:
        return _complain(str(error))
    return status if isinstance(status, int) else 0


def _complain(message: str, *, status: int = 2) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"ackstate: {line}\n")
    return status


def _os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{where}the disk is full"
    return f"{where}{error.strerror or error}"


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise AckStateError(f"{path}: not a directory") from None


def _clock() -> Callable[[], int]:
    """Return a clock in ms since the epoch that never steps back while this process lives."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (offset_ns + time.monotonic_ns()) // 1_000_000


def _progress() -> Progress:
    """Progress goes to standard error, so that standard output holds the answer alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in ("subscription", "source") else "right")
    return table


def _outcome_table(run: DemoRun) -> Table:
    from analysis.report import predicted

    title = f"Killed after {run.kill.lived_ms / 1_000:.2f} s (seed {run.seed})"
    columns = ("subscription", "acked", "persisted", "predicted at the kill", "observed", "lost acks", "invented acks")
    table = _table(title, columns)
    for outcome in run.subscriptions:
        numbers = (outcome.observed, outcome.lost, outcome.invented)
        table.add_row(
            outcome.name, str(outcome.acked), str(outcome.durable), predicted(outcome), *map(str, numbers)
        )
    return table


def _repeat_line(run: DemoRun) -> str:
    from analysis.report import predicted

    pairs = "   ".join(f"{o.name} {predicted(o)} / {o.observed}" for o in run.subscriptions)
    return f"seed {run.seed}: {'equal' if run.holds else 'NOT EQUAL'}   predicted / observed: {pairs}"


def _print_json(value: dict[str, Any]) -> None:
    from analysis.demo import dump_json

    sys.stdout.write(dump_json(value))


if __name__ == "__main__":
    main()
