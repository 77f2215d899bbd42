"""The command `ackstate`: its subcommands, common options and exit statuses.

Exit status: 0 success; 1 bad news (a prediction that did not come true, a lost or an invented ack); 2 the command
failed, with the reason in one line on standard error; 130 interrupted. `namespaces` and `topics` exit as `pulsar-admin`
does: 0 success, 1 failure.

Each command imports its dependencies beyond the library when it runs, so that `broker` and `recover` need no Spark.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, final

import typer

from ackstate.analysis.admin_client import DEFAULT_ADMIN_URL, server_of
from ackstate.analysis.cli import policies, trace
from ackstate.analysis.cli.console import complain, os_error_text, show, write
from ackstate.analysis.cli.crash import crash, replay
from ackstate.analysis.cli.demo import broker, demo, recover
from ackstate.analysis.cli.estimates import redelivery, sweep
from ackstate.analysis.cli.explain import explain
from ackstate.analysis.cli.options import CommandGroup, duration_option, path_argument, usage_error_text
from ackstate.analysis.cli.pulsar import TrustOption, export, exporter, import_, record, snapshot
from ackstate.analysis.cli.serve import serve
from ackstate.analysis.cli.store import fsck, history, inspect
from ackstate.analysis.durations import Duration
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

app = typer.Typer(
    name="ackstate",
    cls=CommandGroup,
    rich_markup_mode=None,  # Its panels cut the names of long options at 80 columns.
    pretty_exceptions_enable=False,
    help="""The ack state of a subscription: its durable acks, and the messages redelivered if the broker died now.

\b
Start with the demo. It kills a live broker, recovers it in a second process,
compares redelivered messages with Spark's prediction, and writes a report:
ackstate demo

\b
The same by hand. A broker acks and persists until SIGKILL; a second process
recovers it and lists the acked messages that are redelivered; Spark computes
their number for every instant of the recording, including the crash:
  ackstate broker DIR & sleep 5; kill -9 $!
  ackstate recover DIR
  ackstate trace DIR/recording TRACE && ackstate redelivery TRACE

\b
Your cursor, or ours, under SIGKILL at any system call and under power cuts:
  ackstate crash --subject my_cursor:MyCursor --budget 10s

\b
Show the contents of a store, and check that every cursor in it opens:
  ackstate fsck DIR/store
  ackstate inspect DIR/store
  ackstate explain DIR/store

\b
Policies over REST, and the commands that set them. A topic may replace the
delay or the maximum of its namespace by another, but not switch it off:
  ackstate serve --store DIR/policies --port 8080 &
  ackstate namespaces set-delayed-delivery public/default -e --maxDelay 1h

\b
Exit status: 0 success, 1 bad news (a prediction that did not come true, a
lost or invented ack), 2 failure, with the reason in one line. For
namespaces and topics as for pulsar-admin: 0 success, 1 failure.
""",
)

# Some releases of Typer bundle Click, others use the installed one; this is the base class of its errors.
_ClickError: type[Exception] = typer.BadParameter.mro()[2]
# The packages that commands import when they run, and the extra of each.
_EXTRAS = {
    **dict.fromkeys(("pyspark", "py4j", "pyarrow", "pandas"), "spark"),
    **dict.fromkeys(("fastapi", "h11", "httpx", "prometheus_client", "pydantic", "starlette", "uvicorn"), "admin"),
    **dict.fromkeys(("jpype", "kazoo"), "bookkeeper"),
}
_INTERRUPTED = 130


def _print_version(is_wanted: bool) -> None:
    if not is_wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        write(f"ackstate {version('ackstate')}\n")
    except PackageNotFoundError:
        raise AckStateError("ackstate is not installed, so its version is unknown") from None
    raise typer.Exit


@app.callback()
def _common_options(
    context: typer.Context,
    admin_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help=f"The server for namespaces and topics; default {DEFAULT_ADMIN_URL}."),
    ] = None,
    auth_plugin: Annotated[
        str | None, typer.Option(metavar="CLASS", help="Only the plugin for tokens is supported.")
    ] = None,
    auth_params: Annotated[str | None, typer.Option(metavar="TEXT", help="token:TOKEN or file:///PATH.")] = None,
    request_timeout: Annotated[
        Duration, duration_option(plain_unit="s", least="1s", most="1h", help="How long a request may take.")
    ] = Duration(60_000),
    tls_trust_cert_path: TrustOption = "",
    tls_enable_hostname_verification: Annotated[  # noqa: ARG001
        bool, typer.Option("--tls-enable-hostname-verification", help="Always on.")
    ] = False,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Store what names the server of `namespaces` and `topics`."""
    context.obj = partial(server_of, admin_url, auth_plugin, auth_params, request_timeout.seconds, tls_trust_cert_path)


def spark_package(
    out: Annotated[Path, typer.Argument(metavar="DIR", parser=path_argument, help="Directory of both files.")],
) -> None:
    """Write ackstate.zip, for spark-submit's --py-files, and ackstate_job.py, for it to run.

    The dependencies of the package must be in the workers' Python, which
    spark.pyspark.python names. The arguments of the job are the words of a
    command, such as redelivery TRACE; docs/guides/estimate-from-a-trace.md has the
    whole line.
    """
    from ackstate.analysis.location import write_atomically
    from ackstate.analysis.spark.session import SCRIPT, write_package

    out.mkdir(parents=True, exist_ok=True)
    count = write_package(out / "ackstate.zip")
    write_atomically(out / "ackstate_job.py", SCRIPT)
    show(f"{out / 'ackstate.zip'}: {count} files", f"{out / 'ackstate_job.py'}")


app.command("demo", short_help="Kill a live broker, recover it, predict, compare.")(demo)
app.command("redelivery", short_help="Redelivery of a crash at every instant.")(redelivery)
app.command("spark-package", short_help="Build the zip and job script for spark-submit.")(spark_package)
app.command("broker", short_help="Run a small broker until it is killed.")(broker)
app.command("recover", short_help="Recover the cursors of a dead broker.")(recover)
_crash = typer.Typer(cls=CommandGroup, rich_markup_mode=None, invoke_without_command=True)
_crash.callback()(crash)
_crash.command("replay", short_help="Repeat a failed run from the file that it left.")(replay)
app.add_typer(_crash, name="crash", short_help="Crash a cursor, yours or ours, and judge each recovery.")
app.command("sweep", short_help="Compare settings: redelivery against its price.")(sweep)
app.command("fsck", short_help="Check a store, and show the effect of each repair.")(fsck)
app.command("inspect", short_help="Show the cursors of a store.")(inspect)
app.command("explain", short_help="Show which unacked messages cost most.")(explain)
app.command("serve", short_help="Serve policies over REST, as a Pulsar broker does.")(serve)

_pulsar = typer.Typer(cls=CommandGroup, help="Redelivery and ack states of real Pulsar brokers.")
_pulsar.command("snapshot", short_help="Redelivery of live subscriptions if their broker died now.")(snapshot)
_pulsar.command("history", short_help="Ages of holes, and lost acks, in a live cursor ledger.")(history)
_pulsar.command("export", short_help="Write the ack states of a topic to a file.")(export)
_pulsar.command("import", short_help="Apply the acks of such a file.")(import_)
_pulsar.command("record", short_help="Record a running cluster as a trace, poll by poll.")(record)
_pulsar.command("exporter", short_help="Serve the redelivery of live subscriptions to Prometheus.")(exporter)
app.add_typer(_pulsar, name="pulsar", short_help="Redelivery and ack states of Pulsar brokers.")

_trace = typer.Typer(cls=trace.ConvertByDefault, rich_markup_mode=None)
_trace.command("convert", short_help="Convert recordings, or logs of other brokers, into a trace.")(trace.convert)
_trace.command("check", short_help="Check every event of a trace, and summarise it.")(trace.check)
_trace.command("generate", short_help="Generate a big trace of a given shape, in parallel.")(trace.generate)
app.add_typer(_trace, name="trace", short_help="Convert recordings of brokers into traces, and check them.")

app.add_typer(policies.namespaces(), name="namespaces", short_help="Delayed-delivery policies of namespaces.")
app.add_typer(policies.topics(), name="topics", short_help="Delayed-delivery policies of topics.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `ackstate` and exit; every failure that is not a bug is one line on standard error."""
    run(app, (sys.argv[1:] if arguments is None else arguments) or ["--help"], name="ackstate")


def run(commands: typer.Typer, words: Sequence[str], *, name: str) -> NoReturn:
    """Run a command line and exit."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A path may contain bytes that are not text, and a terminal may lack box-drawing characters.
        sys.stdout.reconfigure(errors="replace")
    # Py4J logs Ctrl-C with a traceback, which reaches the terminal unless a handler is installed.
    logging.basicConfig(handlers=[logging.NullHandler()])
    logging.getLogger("ackstate.analysis.admin_client").handlers[:] = [_WarningLines()]
    sys.exit(_status(lambda: commands(list(words), standalone_mode=False, prog_name=name)))


@final
class _WarningLines(logging.Handler):
    """Writes each warning to standard error at once: a server may run for months before it ends."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        complain(f"warning: {record.getMessage()}")


def _status(command: Callable[[], Any]) -> int:
    try:
        status = command()
    except typer.Exit as error:
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        complain("interrupted")
        return _INTERRUPTED
    except Exception as error:
        explanation = _explanation(error)
        if not explanation:
            raise
        complain(explanation)
        return 2
    # Typer turns Ctrl-C into this status and prints nothing.
    if status == _INTERRUPTED:
        complain("interrupted")
    return status or 0


def _explanation(error: Exception) -> str:
    """Return the text of an error that the user can fix; re-raise a bug, with its traceback."""
    match error:
        case _ClickError():
            return _usage_error(error)
        case OSError():
            return os_error_text(error)
        case ImportError(name=str(name)) if (package := name.partition(".")[0]) in _EXTRAS:
            return f"{package} is missing: install ackstate[{_EXTRAS[package]}]"
        case AckStateError() | ValueError():
            return str(error)
    return ""


def _usage_error(error: Any) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context else ""
    return f"{usage_error_text(error)}{hint}"
