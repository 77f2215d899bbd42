"""`ackstate trace` converts recordings and logs of other brokers into traces, checks and generates them.

``ackstate trace RECORDING TRACE`` is short for ``ackstate trace convert RECORDING TRACE``.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import (
    CommandGroup,
    FlushIntervalOption,
    JsonOption,
    TraceArgument,
    location_argument,
    path_argument,
)
from ackstate.analysis.durations import Duration
from ackstate.analysis.wording import size_text
from ackstate.checks import closest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COUNT_MAX = 10**18


class ConvertByDefault(CommandGroup):
    """A group whose default command is `convert`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `convert`, unless the first word is a misspelled command."""
        if args and args[0] not in {*self.commands, "--help"}:
            if closest(args[0], self.commands) and not Path(args[0]).exists() and not ctx.resilient_parsing:
                self.refuse(ctx, args[0])
            args = ["convert", *args]
        return super().parse_args(ctx, args or ["--help"])


def _bad_rows_max(text: str) -> Any:
    from ackstate.analysis.trace.check import BadRowsMax

    try:
        return BadRowsMax.parse(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def convert(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            parser=path_argument,
            help="Recordings of cursors or of brokers, JSON lines, or Parquet with one row an event; - reads standard "
            "input.",
        ),
    ],
    out: Annotated[
        Any,
        typer.Argument(
            metavar="TRACE", parser=location_argument, help="The trace, maybe a URL; an existing one is replaced."
        ),
    ],
    bad_rows_max: Annotated[
        Any,
        typer.Option(
            metavar="N|X%", parser=_bad_rows_max, help="Refuse if more rows are bad than this, or this share."
        ),
    ] = "0",
    text_bytes_max: Annotated[
        int, typer.Option(metavar="N", min=1, help="Refuse a file with more bytes of text, decompressed.")
    ] = 16 << 30,
    json: JsonOption = False,
) -> None:
    """Convert recordings, or logs of other brokers, into one Parquet trace.

    Text may be compressed with gzip. docs/traces.md describes the formats.
    Bad rows are skipped and counted; too many refuse the conversion.
    """
    from ackstate.analysis.trace.convert import convert as convert_all

    with _reading() as show:
        done = convert_all(sources, out, bad_rows_max=bad_rows_max, text_bytes_max=text_bytes_max, progress=show)
    if json:
        console.write_json({"trace": str(out), **done.to_json()})
    else:
        console.show(f"{out}: {done.events} events", *done.lines())


def check(
    trace: TraceArgument,
    json: JsonOption = False,
) -> None:
    """Check every event of a trace, and summarise it.

    Exit status: 0, or 2 if the trace is invalid.
    """
    from ackstate.analysis.trace.check import check_events

    with _reading() as show:
        found = check_events(trace, progress=show)
    if json:
        console.write_json(found.to_json())
    else:
        console.show(*found.lines())


def _count(text: str) -> int:
    """Return a whole number, which may be written as 1e8."""
    try:
        number = Decimal(str(text))
    except InvalidOperation:
        raise typer.BadParameter(f"must be a number, got {text!r}") from None
    if not number.is_finite() or not -_COUNT_MAX <= number <= _COUNT_MAX or number % 1:
        raise typer.BadParameter(f"must be a whole number of at most 18 digits, got {text}")
    return int(number)


def generate(
    out: Annotated[
        Any,
        typer.Argument(
            metavar="TRACE", parser=location_argument, help="The trace, maybe a URL; an existing one is replaced."
        ),
    ],
    workload: Annotated[str, typer.Option(metavar="NAME", help="The shape; an unknown name lists them.")],
    events: Annotated[
        int,
        typer.Option(metavar="N", parser=_count, help="Events of all subscriptions, such as 1e8; publishes are extra."),
    ],
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed generates the same trace.")] = 1,
    subscriptions: Annotated[int, typer.Option(metavar="N", help="Number of subscriptions.")] = 8,
    topics: Annotated[
        int, typer.Option(metavar="N", help="Number of topics, over which the subscriptions are spread.")
    ] = 4,
    messages_per_second: Annotated[float, typer.Option(metavar="X", help="Mean rate of a topic.")] = 5_000.0,
    flush_interval: FlushIntervalOption = Duration(1_000),
    json: JsonOption = False,
) -> None:
    """Generate a big trace of a given shape, in parallel, with Spark.

    Shapes: in_order, key_shared, one_stuck_consumer, client_holes,
    many_consumers, mixed_delays, heavy_traffic. The same options generate the
    same events on any number of cores.
    """
    from ackstate.analysis.spark.session import local_session, readable_failures, shown_stages
    from ackstate.analysis.trace.generate import TracePlan, make_trace
    from ackstate.analysis.trace.parquet import check_replaceable

    plan = TracePlan(workload, events, seed, subscriptions, topics, messages_per_second, flush_interval.ms)
    check_replaceable(out)
    with console.progress() as progress, readable_failures(out, work="write"):
        task = progress.add_task("starting Spark", total=None)
        spark = local_session()
        with shown_stages(spark, progress, task, "Spark generates the trace"):
            made = make_trace(spark, plan, out)
    if json:
        console.write_json({"trace": str(out), "plan": asdict(plan), **made._asdict()})
    else:
        console.show(
            f"{out}: {made.events:,} events of {subscriptions} subscriptions and {made.published:,} of "
            f"{topics} topics, {size_text(made.size_bytes)} in {made.files} files"
        )


@contextmanager
def _reading() -> Iterator[Callable[[int, int | None], None]]:
    """Show read progress: yield a function of the amount done, and of the total if known."""
    with console.progress() as progress:
        task = progress.add_task("reading", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
