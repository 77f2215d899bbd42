"""The estimate under some policies for `ackstate sweep` and `ackstate redelivery`, and its numbers as text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.table import Table

from ackstate.analysis.cli import console
from ackstate.analysis.cli.output import command

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.progress import Progress

    from ackstate.analysis.cli.output import ReportFiles
    from ackstate.analysis.estimate.current_policy import CurrentPolicy
    from ackstate.analysis.estimate.engine import TraceSource
    from ackstate.analysis.estimate.results import SweepResult
    from ackstate.analysis.location import Location
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.trace.parquet import Span


# Bytes of columns times policies. A shuffle costs Spark three seconds, in which one worker replays more than this.
_ONE_TASK_BYTES_MAX = 2**21


class EngineChoice(Enum):
    """The engine that replays a trace."""

    SPARK = "spark"
    LOCAL = "local"


MasterOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="URL", help="Where Spark runs: local[2], or spark://HOST:PORT of a cluster.")
]

EngineOption: TypeAlias = Annotated[
    EngineChoice | None, typer.Option(help="spark, or local: in this process, without Java.")
]
Session: TypeAlias = "Callable[[], SparkSession] | None"
"""Starts Spark and returns its session; None to replay a trace without Spark."""


def session_of(engine: EngineChoice | None, master: str | None) -> Session:
    """Check that the engine can start, and return what starts it.

    Raises:
        typer.BadParameter: A master is given, but the engine is not Spark.
        AckStateError: As `ackstate.analysis.spark.session.check_startable`.
    """
    if engine is EngineChoice.LOCAL:
        if master is not None:
            raise typer.BadParameter("--master is for --engine spark")
        return None
    from ackstate.analysis.spark.session import check_startable, open_session

    check_startable(master)
    return partial(open_session, master)


def estimated(
    trace: Location,
    policies: Sequence[Policy | None],
    *,
    crashes_per_day: float,
    session: Session,
    report: ReportFiles | None = None,
    current: CurrentPolicy | None = None,
    is_recorded_current: bool = False,
    days: Sequence[Span] | None = None,
) -> tuple[SweepResult, list[dict[str, Any]]]:
    """Estimate a grid, and write a report if one is requested; return the rows of `estimates` too.

    Policies that cannot be replayed are excluded and listed in `SweepResult.refused`, unless none is left.

    Args:
        trace: The trace.
        policies: The grid.
        crashes_per_day: The rate for which duplicates are counted.
        session: See `session_of`.
        report: The report to write; None for no report.
        current: The policy in force, which is in the grid; None if it is unknown.
        is_recorded_current: Whether the recording is compared with, instead of a policy.
        days: The result of `check_days`; None to call it here.

    Raises:
        TraceError: The trace is invalid, or has no subscriptions.
        PolicyError: None of the policies, or not the current one, can be replayed.
        AckStateError: As `ReportFiles.read_inputs`.
    """
    from ackstate.analysis.estimate.engine import trace_of
    from ackstate.analysis.estimate.estimates import estimates
    from ackstate.analysis.estimate.results import SweepResult
    from ackstate.analysis.replay.grid import persistable
    from ackstate.analysis.replay.policy import PolicyError
    from ackstate.analysis.spark.session import readable_failures
    from ackstate.analysis.trace.events import TraceError
    from ackstate.analysis.trace.parquet import check_days, span_of

    days = check_days(trace) if days is None else days
    covered = span_of(days)
    policies, refused = persistable(policies)
    if current is not None and current.policy not in policies:
        raise PolicyError(f"current policy: {dict(refused)[current.policy.label]}")
    inputs = None if report is None else report.read_inputs()
    size = covered.size_bytes * len(policies)
    with console.progress() as progress, readable_failures(trace), started(session, progress, size) as where:
        source = trace_of(where, days)
        found = estimates(
            source, policies, crashes_per_day=crashes_per_day, is_plotted=report is not None,
            drawn=_drawn(policies, current, is_recorded_current=is_recorded_current),
        )  # fmt: skip
        rows = found.collect()
        highs = [row for row in rows if row["policy"] < len(policies)]
        if not rows:
            raise TraceError(f"{trace}: no subscription has an event")
        result = SweepResult.of_rows(str(trace), policies, rows, crashes_per_day=crashes_per_day, refused=refused)
        result = _compared(result, current, is_recorded_current=is_recorded_current)
        if report is not None and inputs is not None:
            from ackstate.analysis.report.making import make_contents

            made_by = source.made_by()
            report.write(make_contents(highs, covered, trace, result, inputs, command=command(), engine=made_by))
        return result, highs


def _drawn(policies: Sequence[Policy | None], current: CurrentPolicy | None, *, is_recorded_current: bool) -> int:
    """Return the index of the policy in force, as `SweepResult.current` chooses it."""
    if is_recorded_current:
        return 0
    if current is not None and current.policy in policies:
        return policies.index(current.policy)
    return next((number for number, each in enumerate(policies) if each is not None), 0)


def _compared(result: SweepResult, current: CurrentPolicy | None, *, is_recorded_current: bool) -> SweepResult:
    from ackstate.analysis.estimate.results import RECORDED

    if is_recorded_current:
        return result.compared_with(RECORDED, "the recording itself")
    if current is not None:
        return result.compared_with(current.policy.label, current.source, current.warnings)
    if len(result.policies) < 2:
        return result
    doubt = (
        "The trace has too few persists to infer the policy in force: the first policy of the grid is taken for it. "
        "Name it with --current-policy or --broker-conf"
    )
    return result.compared_with("", "the first policy of the grid", [doubt])


@contextmanager
def started(session: Session, progress: Progress, size_bytes: int) -> Iterator[Callable[[Span], TraceSource]]:
    """Wait for the engine, and show its progress while the block runs.

    Args:
        session: See `session_of`.
        progress: The display.
        size_bytes: Bytes of the trace times the number of policies.
    """
    from ackstate.analysis.estimate.engine import LocalSource

    if session is None:
        # A replayed cursor logs warnings that concern no live cursor; in Spark they stay in the workers.
        logging.getLogger("ackstate.cursor").addHandler(logging.NullHandler())
        progress.add_task("computing every instant", total=None)
        yield LocalSource
        return
    from ackstate.analysis.spark.cluster import is_local
    from ackstate.analysis.spark.one_task import OneTaskSource
    from ackstate.analysis.spark.session import shown_stages
    from ackstate.analysis.spark.source import SparkSource

    spark = session()
    is_small = size_bytes <= _ONE_TASK_BYTES_MAX and is_local(spark.sparkContext.master or "")
    task = progress.add_task("Spark computes every instant", total=None)
    with shown_stages(spark, progress, task, "Spark"):
        if is_small:
            yield lambda span: OneTaskSource(spark, LocalSource(span))
        else:
            yield partial(SparkSource.checked, spark)


def numbers_table(first: str, others: Sequence[str]) -> Table:
    """Return an empty table whose first column is text and the others numbers."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def rate_text(number: float | None) -> str:
    """Return a rate; a dash if it is unknown."""
    from ackstate.analysis.estimate.recommendation import short_number

    return "-" if number is None else short_number(number)


def bounds_text(low: float | None, high: float | None, text: Callable[[Any], str], *, is_exact: bool) -> str:
    """Return a number, or ``LOW to HIGH`` if it is known from polls only."""
    return text(high) if is_exact or low == high else f"{text(low)} to {text(high)}"


def mean_text(number: float | None) -> str:
    """Return a mean; a dash if it is unknown."""
    return "-" if number is None else f"{number:,.1f}"


def count_text(number: int | None) -> str:
    """Return a count; a dash if it is unknown."""
    return "-" if number is None else f"{number:,}"
