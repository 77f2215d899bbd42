"""`ackstate trace generate`: make a big trace of a given shape."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path  # noqa: TC003 - Typer reads it when the command is made
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ackstate.analysis.path_argument import path_argument

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rich.progress import Progress

_COUNT_MAX = 10**18


def _count(text: str) -> int:
    """Return a whole number, which may be written as 1e8."""
    try:
        number = Decimal(str(text))
    except InvalidOperation:
        raise typer.BadParameter(f"{text!r} is not a number") from None
    if not number.is_finite() or not -_COUNT_MAX <= number <= _COUNT_MAX or number % 1:
        raise typer.BadParameter(f"{text} is not a whole number of at most 18 digits")
    return int(number)


@dataclass(frozen=True, slots=True)
class GenerateCommand:
    """The command.

    Attributes:
        show: Writes tables and lines to standard output.
        write_json: Writes one object there.
        progress: Begins a progress bar on standard error.
    """

    show: Callable[..., None]
    write_json: Callable[[dict[str, Any]], None]
    progress: Callable[[], AbstractContextManager[Progress]]

    def generate(  # noqa: PLR0913, PLR0917 - one for each option
        self,
        out: Annotated[
            Path,
            typer.Argument(metavar="TRACE", parser=path_argument, help="The trace; one that is there is replaced."),
        ],
        workload: Annotated[str, typer.Option(metavar="NAME", help="The shape; an unknown name lists them.")],
        events: Annotated[
            int,
            typer.Option(metavar="N", parser=_count, help="Of all subscriptions, such as 1e8; publishes come on top."),
        ],
        seed: Annotated[int, typer.Option(metavar="N", help="The same seed makes the same trace.")] = 1,
        subscriptions: Annotated[int, typer.Option(metavar="N", help="How many.")] = 8,
        topics: Annotated[int, typer.Option(metavar="N", help="How many they are spread over.")] = 4,
        hot_share: Annotated[
            float | None, typer.Option(metavar="X", help="One subscription has this share of the events.")
        ] = None,
        messages_per_second: Annotated[float, typer.Option(metavar="X", help="Mean rate of a topic.")] = 5_000.0,
        flush_interval_ms: Annotated[int, typer.Option(metavar="MS", help="Cursors persist this often.")] = 1_000,
        crashes: Annotated[int, typer.Option(metavar="N", help="The broker dies, and recovers, this often.")] = 0,
        json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    ) -> None:
        """Make a big trace of a given shape, in parallel, through Spark.

        Shapes: in_order, key_shared, one_stuck_consumer, client_holes,
        many_consumers, mixed_delays, heavy_traffic. The same options make the
        same events on any number of cores.
        """
        from ackstate.analysis.redelivery.spark import local_session, readable_failures  # noqa: PLC0415 - needs `spark`
        from ackstate.analysis.spark_progress import tasks_shown  # noqa: PLC0415
        from ackstate.analysis.trace.generate.job import make_trace  # noqa: PLC0415
        from ackstate.analysis.trace.generate.plan import TracePlan  # noqa: PLC0415
        from ackstate.analysis.trace.parquet import check_replaceable  # noqa: PLC0415

        plan = TracePlan(
            workload, events, seed, subscriptions, topics, hot_share, messages_per_second, flush_interval_ms, crashes
        )
        # Before Spark, which takes seconds to start.
        plan.outages()
        check_replaceable(out)
        with self.progress() as progress, readable_failures(out, work="write"):
            task = progress.add_task("starting Spark", total=None)
            spark = local_session()

            def show(done: int, total: int) -> None:
                progress.update(task, description="Spark makes the trace", completed=done, total=total)

            with tasks_shown(spark, show):
                made = make_trace(spark, plan, out)
        if json:
            self.write_json({"trace": str(out), "plan": asdict(plan), **made._asdict()})
        else:
            self.show(
                f"{out}: {made.events:,} events of {subscriptions} subscriptions and {made.published:,} of "
                f"{topics} topics, {made.size_bytes / 1e6:,.1f} MB in {made.files} files"
            )
