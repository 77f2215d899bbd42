"""The command `ackstate`.

Exit status: 0 all is well; 1 the answer is bad news (a prediction that did not come true, a lost or an invented ack);
2 the command could not do its work, and one line on standard error says why; 130 interrupted. `namespaces` and `topics`
end as `pulsar-admin` does: 0 it is done, 1 it is not.

Whatever a command needs beyond the library is imported inside it, so that `broker` and `recover` need no Spark.
"""

from __future__ import annotations

import errno
import json as json_format
import logging
import logging.handlers
import os
import sys
import time
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ackstate.analysis import tables
from ackstate.analysis.admin.command import ServeCommand
from ackstate.analysis.admin_commands import add_admin_commands
from ackstate.analysis.calibration.command import CalibrateCommand
from ackstate.analysis.crash_command import CrashCommand
from ackstate.analysis.explain_command import ExplainCommand
from ackstate.analysis.path_argument import path_argument
from ackstate.analysis.pulsar_commands import add_pulsar_commands
from ackstate.analysis.report_command import (
    BrokerRunsOption,
    CalibrationOption,
    FormatOption,
    OriginOption,
    OutOption,
    Output,
    ReportOption,
)
from ackstate.analysis.store_commands import StoreCommands
from ackstate.analysis.sweep_command import MasterOption, SweepCommand
from ackstate.analysis.trace_commands import TraceCommands, trace_app
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from ackstate.analysis.demo.broker import BrokerSettings
    from ackstate.analysis.demo.job import DemoRun

app = typer.Typer(
    name="ackstate",
    add_completion=False,
    rich_markup_mode=None,  # Its panels cut the names of long options at 80 columns.
    pretty_exceptions_enable=False,
    help="""The ack state of a subscription: what is durable, and what comes back if the
broker dies now.

\b
Begin with the demo. It kills a live broker, recovers it in a second process,
lets Spark predict what comes back, compares, and writes a report:
  ackstate demo

\b
The same by hand. A broker acks and persists until SIGKILL; a second process
recovers it and says which acked messages come back; Spark says it for every
instant of the recording, the crash among them:
  ackstate broker DIR & sleep 5; kill -9 $!
  ackstate recover DIR
  ackstate trace DIR/recording TRACE && ackstate redelivery TRACE

\b
Our cursor, or yours, under failing writes, SIGKILL, power cuts and bad media:
  ackstate crash --budget 10s

\b
What a store holds, and whether every cursor in it would open:
  ackstate fsck DIR/store
  ackstate inspect DIR/store
  ackstate explain DIR/store

\b
Policies over REST, and what sets them. A topic may replace the delay or the
maximum of its namespace by another, not switch it off:
  ackstate serve --store DIR/policies --port 8080 &
  ackstate namespaces set-delayed-delivery public/default -e --maxDelay 1h

\b
Exit status: 0 all is well, 1 bad news (a prediction that did not come true, a
lost or invented ack), 2 it could not be done and one line says why. Of
namespaces and topics, as of pulsar-admin: 0 it is done, 1 it is not.
""",
)

# Typer brings a Click of its own in some releases and uses the installed one in others; this is the base of its errors.
_ClickError: type[Exception] = typer.BadParameter.mro()[2]
# What the extra `spark` brings.
_EXTRA = frozenset({"pyspark", "py4j", "pyarrow", "pandas", "plotly"})
_WARNINGS_MAX = 10_000
_INTERRUPTED = 130
# What clocks and counters of 64 bits hold, added up as often as need be.
_NUMBER_MAX = 10**15
_SECONDS_MAX = 10**9


def _between(lowest: float, highest: float) -> Callable[[float], float]:
    """Return a check of an option's value, both ends included; Typer's own fills the help with its bounds."""

    def check(number: float) -> float:
        # Written so that it holds for nan as well.
        if not lowest <= number <= highest:
            raise typer.BadParameter(f"{number} is not from {lowest} to {highest}")
        return number

    return check


def _rate(number: float | None) -> float | None:
    return None if number is None else _between(0, _NUMBER_MAX)(number)


def _record_bytes_limit(number: int) -> int:
    from ackstate.limits import GateLimits

    try:
        return GateLimits(max_unpersisted_ack_record_bytes=number).max_unpersisted_ack_record_bytes
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_DIRECTORY = typer.Argument(
    metavar="DIR", parser=path_argument, help="The broker's directory: its store and its recording."
)
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
SeedOption = Annotated[int, typer.Option(metavar="N", help="Decides the workload and the moment of the kill.")]
RepeatOption = Annotated[
    int, typer.Option(metavar="N", callback=_between(1, 1_000_000), help="Kill this often, with seeds one apart.")
]
LifeOption = Annotated[
    float,
    typer.Option(metavar="S", callback=_between(1, 3_600), help="Kill in the last two thirds of this; 1 to 3600."),
]
FlushOption = Annotated[
    int,
    typer.Option(metavar="MS", callback=_between(0, _NUMBER_MAX), help="Each cursor persists this often."),
]


@app.command(short_help="Kill a live broker, recover it, predict, compare.")
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", parser=path_argument, help="Where the results go.")] = Path(
        "out/demo"
    ),
    seed: SeedOption = 1,
    repeat: RepeatOption = 1,
    seconds: LifeOption = 6.0,
    flush_interval_ms: FlushOption = 250,
    json: JsonOption = False,
) -> None:
    """Kill a live broker, recover it in a second process, and compare what comes back with what Spark predicts.

    A broker with three subscriptions runs until SIGKILL at a seeded moment. A
    second process recovers the cursors from the same directory: what had been
    acked and comes back is observed, counted by set difference. Spark computes
    from the trace what a crash would bring back at every instant: predicted.
    They must be equal.

    Writes summary.json and report.html, and leaves the broker's directory and
    the trace beside them.
    """
    from ackstate.analysis.atomic_write import write_atomically
    from ackstate.analysis.demo import job as main_job
    from ackstate.analysis.demo.broker import BrokerSettings
    from ackstate.analysis.demo.results import DemoDirectory
    from ackstate.analysis.report import render, verdict

    results = DemoDirectory(out)
    lives_ms = (int(seconds * 1_000 / 3), int(seconds * 1_000))
    settings = [BrokerSettings(seed=seed + index, flush_interval_ms=flush_interval_ms) for index in range(repeat)]
    with results.claimed():
        runs = _kill_and_compare(results.path, settings, lives_ms=lives_ms)
        write_atomically(results.report, render(runs))
        summary = _json_text(main_job.summary_json(runs))
        write_atomically(results.summary, summary)
    if json:
        _write(summary)
    else:
        _show(tables.outcome_table(runs[-1]), verdict(runs), f"{results.summary}, {results.report}")
    if not all(run.holds for run in runs):
        raise typer.Exit(1)


@app.command(short_help="What a crash would have brought back, at every instant.")
def redelivery(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", parser=path_argument, help="A Parquet trace, directory or file.")
    ],
    policy: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V", help="Replay with this setting; may be repeated.")
    ] = None,
    crashes_per_day: Annotated[
        float | None, typer.Option(metavar="N", callback=_rate, help="Count the duplicates of so many crashes.")
    ] = None,
    form: FormatOption = None,
    out: OutOption = None,
    report: ReportOption = None,
    calibration: CalibrationOption = None,
    broker_runs: BrokerRunsOption = None,
    trace_json: OriginOption = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", parser=path_argument, help="TRACE has a trace a day: read new ones, keep the rest here."
        ),
    ] = None,
    master: MasterOption = None,
    json: JsonOption = False,
) -> None:
    """Compute from a trace how many acked messages a crash would have brought back, at every instant.

    Per subscription: expected (mean over the time in which its process lived),
    p50, p99, max, and the number at each crash that the trace holds. With a
    policy, a crash rate, a format or a report: over the whole trace, under
    that policy or as recorded, also for topics, namespaces and all, with what
    it cost.
    """
    output = Output.wanted(form, out, report, calibration=calibration, broker_runs=broker_runs, origin=trace_json)
    if policy or crashes_per_day is not None or out is not None or report is not None or state:
        rate = 1.0 if crashes_per_day is None else crashes_per_day
        _sweep_command.redelivery(
            trace, policy or [], crashes_per_day=rate, output=output, json=json, master=master, state=state
        )
        return
    from ackstate.analysis.redelivery import estimate
    from ackstate.analysis.redelivery.checked_source import checked_source
    from ackstate.analysis.redelivery.spark import open_session, readable_failures
    from ackstate.analysis.trace.events import TraceError
    from ackstate.analysis.trace.parquet import check_trace

    # Before Spark, which takes seconds to start.
    covered = check_trace(trace)
    with _progress() as progress, readable_failures(trace):
        progress.add_task("Spark computes every instant", total=None)
        steps = estimate.curve(checked_source(open_session(master), trace, covered)).cache()
        summaries = sorted(estimate.summary(steps).collect())
        crashes = sorted(estimate.crashes(steps).collect())
    if not summaries:
        raise TraceError(f"{trace}: no subscription has an event")
    rows = [
        row.asDict() | {"crashes": [crash.asDict() for crash in crashes if crash[:2] == row[:2]]} for row in summaries
    ]
    if json:
        _write_json({"subscriptions": rows})
    else:
        topics = sorted({row["topic"] for row in rows})
        for topic in topics:
            _show(f"Redelivery if crashed, over every instant of {topic}")
            _show(tables.redelivery_table([row for row in rows if row["topic"] == topic]))


@app.command(short_help="Pack what the workers of a Spark cluster need of us.")
def package(
    out: Annotated[Path, typer.Argument(metavar="DIR", parser=path_argument, help="Where both files go.")],
) -> None:
    """Write ackstate.zip, for spark-submit's --py-files, and ackstate_job.py, for it to run.

    What the package imports must be in the workers' Python, which is named by
    spark.pyspark.python. After the job come the words of a command, such as
    redelivery TRACE; docs/cluster.md has the whole line.
    """
    from ackstate.analysis.atomic_write import write_atomically
    from ackstate.analysis.redelivery.package import SCRIPT, write_package

    out.mkdir(parents=True, exist_ok=True)
    count = write_package(out / "ackstate.zip")
    write_atomically(out / "ackstate_job.py", SCRIPT)
    _show(f"{out / 'ackstate.zip'}: {count} files", f"{out / 'ackstate_job.py'}")


@app.command(short_help="Run a small broker until it is killed.")
def broker(
    directory: Annotated[Path, _DIRECTORY],
    seconds: Annotated[
        float, typer.Option(metavar="S", callback=_between(0, _SECONDS_MAX), help="End by itself after this.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Decides the workload.")] = 1,
    messages_per_second: Annotated[
        int, typer.Option(metavar="N", callback=_between(1, _NUMBER_MAX), help="Publish rate.")
    ] = 3_000,
    entries_per_ledger_max: Annotated[
        int, typer.Option(metavar="N", callback=_between(1, _NUMBER_MAX), help="Then the log rolls to a new ledger.")
    ] = 2_500,
    delayed_share: Annotated[
        float, typer.Option(metavar="X", callback=_between(0, 1), help="Share of delayed messages, 0 to 1.")
    ] = 0.1,
    delay_ms_max: Annotated[
        int, typer.Option(metavar="MS", callback=_between(1, _NUMBER_MAX), help="Longest delay.")
    ] = 400,
    flush_interval_ms: FlushOption = 250,
    max_unpersisted_ack_record_bytes: Annotated[
        int,
        typer.Option(metavar="N", callback=_record_bytes_limit, help="Stop sending at this many bytes; 0 is off."),
    ] = 16 * 1024,
    max_unacked_messages: Annotated[
        int, typer.Option(metavar="N", callback=_between(0, _NUMBER_MAX), help="Stop sending at this many; 0 is off.")
    ] = 1_000,
) -> None:
    """Run a small broker until it is killed: one topic, three subscriptions, a recording of all that they do.

    It says "ready" when it has begun. On a directory that a killed broker
    left, it recovers first and goes on.
    """
    from ackstate.analysis.demo.broker import BrokerSettings

    settings = BrokerSettings(
        seed, messages_per_second, entries_per_ledger_max, delayed_share, delay_ms_max, flush_interval_ms,
        max_unpersisted_ack_record_bytes, max_unacked_messages,
    )  # fmt: skip
    _run_broker(directory, settings, lives_ms=int(seconds * 1_000))


@app.command(short_help="Recover what a dead broker left.")
def recover(
    directory: Annotated[Path, _DIRECTORY],
    json: JsonOption = False,
) -> None:
    """Recover every cursor that a dead broker left, and say which acked messages come back.

    Opening a cursor takes it over from whoever had it, as a restarted broker
    does; no ack is changed. What comes back is noted in the recording, so that
    recovering again finds nothing more.
    """
    from ackstate.analysis.demo.directory import BrokerDirectory
    from ackstate.analysis.demo.recovery import recover as recover_all
    from ackstate.analysis.trace.recorder import Recorder

    place = BrokerDirectory(directory)
    with place.begun() as (store, frames), Recorder(place.recording) as recorder:
        results = recover_all(store, frames, recorder=recorder, now_ms=_clock()())
    if json:
        _write_json({"subscriptions": [result.to_json() for result in results]})
    else:
        _show(tables.recovery_table(results), tables.redelivered_table(results))
    if any(result.lost or result.invented for result in results):
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; every failure that is not a bug is one line on standard error."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A path may have bytes that are no text, and a terminal may have no lines for tables.
        sys.stdout.reconfigure(errors="replace")
    # Py4J logs Ctrl-C with a traceback, which reaches the terminal unless somebody handles it.
    logging.basicConfig(handlers=[logging.NullHandler()])
    warnings = logging.handlers.BufferingHandler(_WARNINGS_MAX)
    logging.getLogger("ackstate.analysis.trace.manifest").handlers[:] = [warnings]
    logging.getLogger("ackstate.analysis.token_file").handlers[:] = [_WarningLines()]
    words = sys.argv[1:] if arguments is None else list(arguments)
    status = _status(lambda: app(words or ["--help"], standalone_mode=False, prog_name="ackstate"))
    # After a failure, one line says what it is.
    for text in dict.fromkeys(record.getMessage() for record in warnings.buffer if status == 0):
        _complain(f"warning: {text}")
    sys.exit(status)


@final
class _WarningLines(logging.Handler):
    """Writes each warning to standard error at once: a server may run for months before it ends."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        _complain(f"warning: {record.getMessage()}")


def _status(command: Callable[[], Any]) -> int:
    try:
        status = command()
    except typer.Exit as error:
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return _complain("interrupted", status=_INTERRUPTED)
    except Exception as error:
        explanation = _explanation(error)
        if not explanation:
            raise
        return _complain(explanation)
    # Typer turns Ctrl-C into this status and says nothing.
    return _complain("interrupted", status=_INTERRUPTED) if status == _INTERRUPTED else status or 0


def _explanation(error: Exception) -> str:
    """Say what is wrong with what the user gave or has; nothing for a bug, which may show its traceback."""
    match error:
        case _ClickError():
            return _usage_error(error)
        case OSError():
            return _os_error(error)
        case ImportError(name=str(name)) if name.partition(".")[0] in _EXTRA:
            return f"{name} is missing: install ackstate[spark]"
        case AckStateError() | ValueError():
            return str(error)
    return ""


def _complain(message: str, *, status: int = 2) -> int:
    line = " ".join(message.split())
    if sys.stderr is not None:
        sys.stderr.write(f"ackstate: {line}\n")
    return status


def _usage_error(error: Any) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context else ""
    return f"{error.format_message().rstrip('.')}{hint}"


def _os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{where}the disk is full"
    return f"{where}{error.strerror or error}"


def _kill_and_compare(out: Path, settings: Sequence[BrokerSettings], *, lives_ms: tuple[int, int]) -> list[DemoRun]:
    """Run the main job once for each of the settings, with progress shown."""
    from ackstate.analysis.demo import job as main_job
    from ackstate.analysis.demo.results import DemoDirectory
    from ackstate.analysis.redelivery.spark import local_session, readable_failures

    runs: list[DemoRun] = []
    with _progress() as progress, readable_failures(DemoDirectory(out).trace):
        task = progress.add_task("starting Spark", total=1.0)
        spark = local_session()
        for number, each in enumerate(settings, start=1):

            def show(what: str, share: float, number: int = number) -> None:
                progress.update(task, description=f"{number}/{len(settings)} {what}", completed=share)

            runs.append(main_job.run(spark, out, each, lives_ms=lives_ms, progress=show))
            if len(settings) > 1:
                # Above the bar; where there is none, its console is quiet.
                lines = Console(stderr=True) if progress.disable else progress.console
                lines.print(tables.repeat_line(runs[-1]), highlight=False, soft_wrap=True)
    return runs


def _run_broker(directory: Path, settings: BrokerSettings, *, lives_ms: int) -> None:
    from ackstate.analysis.demo.broker import Broker, run
    from ackstate.analysis.demo.directory import BrokerDirectory
    from ackstate.analysis.demo.kill import READY
    from ackstate.analysis.demo.recovery import recover as recover_all
    from ackstate.analysis.trace.recorder import Recorder

    place = BrokerDirectory(directory)
    now_ms = _clock()
    with place.begun_or_new() as (store, frames), Recorder(place.recording) as recorder:
        if frames:
            recover_all(store, frames, recorder=recorder, now_ms=now_ms())
        live = Broker(store, recorder, settings, now_ms=now_ms())
        _write(f"{READY}\n")
        run(live, now_ms=now_ms, until_ms=now_ms() + lives_ms)


def _clock() -> Callable[[], int]:
    """Return a clock in ms since the epoch that never steps back while this process lives."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (offset_ns + time.monotonic_ns()) // 1_000_000


def _progress(*, auto_refresh: bool = True) -> Progress:
    """Progress goes to standard error, so that standard output holds the answer alone; only a terminal shows it.

    Args:
        auto_refresh: As Rich's: whether a thread keeps it moving. Whoever forks must have none.
    """
    is_terminal = Console(stderr=True).is_terminal
    # Quiet, because some releases of Rich end a progress that was never shown with an empty line.
    console = Console(stderr=True, quiet=not is_terminal)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not is_terminal, auto_refresh=auto_refresh)


def _show(*parts: Table | str) -> None:
    """Write tables and lines to standard output; no cell is ever cut, and where no terminal reads, none is wrapped."""
    screen = Console()
    width = screen.width
    if not screen.is_terminal:
        unlimited = screen.options.update(max_width=_NUMBER_MAX)
        width = max(width, *(screen.measure(part, options=unlimited).maximum for part in parts))
    text = StringIO()
    console = Console(file=text, width=width, force_terminal=screen.is_terminal)
    for part in parts:
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))
    _write(text.getvalue())


def _json_text(value: dict[str, Any]) -> str:
    return json_format.dumps(value, indent=2) + "\n"


def _write_json(value: dict[str, Any]) -> None:
    _write(_json_text(value))


def _write(text: str) -> None:
    """Write to standard output now, so that a failure is noticed while it can be told."""
    if sys.stdout is None:
        raise AckStateError("standard output is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is still in the buffer would fail once more, with a traceback, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise AckStateError(f"standard output: {_os_error(error)}") from error


app.command("crash", short_help="Crash a cursor in every way, and judge each recovery.")(
    CrashCommand(_show, _write_json, lambda: _progress(auto_refresh=False)).crash
)
_sweep_command = SweepCommand(_show, _write_json, _progress)
app.command("sweep", short_help="Which settings buy down what comes back, at what price.")(_sweep_command.sweep)
app.command("calibrate", short_help="Kill real cursors, and see whether the estimate is true.")(
    CalibrateCommand(_show, _write_json, lambda: _progress(auto_refresh=False)).calibrate
)
_store_commands = StoreCommands(_show, _write_json)
app.command("fsck", short_help="Check a store, and say what a repair would do.")(_store_commands.fsck)
app.command("inspect", short_help="Show what a store holds of its cursors.")(_store_commands.inspect)
_explain_command = ExplainCommand(_show, _write_json)
app.command("explain", short_help="Show which unacked messages cost most.")(_explain_command.explain)
add_pulsar_commands(app, _show, _write, _progress)
app.add_typer(
    trace_app(TraceCommands(_show, _write_json, _progress)),
    name="trace",
    short_help="Make traces from what brokers recorded, and check them.",
)
add_admin_commands(app, _write)
app.command("serve", short_help="Serve policies over REST, as a Pulsar broker does.")(ServeCommand(_write).serve)


if __name__ == "__main__":
    main()
