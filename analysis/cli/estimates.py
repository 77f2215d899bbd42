"""What `ackstate sweep` and `ackstate redelivery` share: the estimate under some policies, and its numbers as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.table import Table

from ackstate.analysis.cli import console

if TYPE_CHECKING:
    from ackstate.analysis.cli.output import ReportFiles
    from ackstate.analysis.redelivery.policy import Policy
    from ackstate.analysis.redelivery.results import SweepResult

MasterOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="URL", help="Where Spark runs: local[2], or spark://HOST:PORT of a cluster.")
]


def estimated(
    trace: Path,
    policies: Sequence[Policy | None],
    *,
    crashes_per_day: float,
    master: str | None = None,
    report: ReportFiles | None = None,
    baseline: str = "",
) -> SweepResult:
    """Let Spark estimate a grid, and write a report if one is wanted.

    Policies that cannot be replayed are left out, and `SweepResult.refused` names them, if there are others.

    Raises:
        TraceError: The trace is none, or empty of subscriptions.
        PolicyError: None of the policies can be replayed.
        AckStateError: As `ReportFiles.read_inputs`.
    """
    from ackstate.analysis.redelivery.estimates import estimates
    from ackstate.analysis.redelivery.persistable import persistable
    from ackstate.analysis.redelivery.results import SweepResult
    from ackstate.analysis.redelivery.spark import open_session, readable_failures, shown_stages
    from ackstate.analysis.redelivery.spark_source import SparkSource
    from ackstate.analysis.trace.events import TraceError
    from ackstate.analysis.trace.parquet import check_trace

    # Before Spark, which takes seconds to start.
    covered = check_trace(trace)
    policies, refused = persistable(policies)
    inputs = None if report is None else report.read_inputs()
    with console.progress() as progress, readable_failures(trace):
        spark = open_session(master)
        with shown_stages(spark, progress):
            source = SparkSource.of(spark, trace, covered)
            rows = estimates(source, policies, crashes_per_day=crashes_per_day).collect()
            if not rows:
                raise TraceError(f"{trace}: no subscription has an event")
            result = SweepResult.of_rows(
                str(trace), policies, rows, crashes_per_day=crashes_per_day, refused=refused
            ).compared_with(baseline)
            if report is not None and inputs is not None:
                report.write(source, trace, result, inputs)
    return result


def numbers_table(first: str, others: Sequence[str]) -> Table:
    """Return an empty table whose first column is text and the others numbers."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def rate_text(number: float | None) -> str:
    """Return a rate; a dash if it is unknown."""
    from ackstate.analysis.redelivery.recommendation import short_number

    return "-" if number is None else short_number(number)


def mean_text(number: float | None) -> str:
    """Return a mean; a dash if it is unknown."""
    return "-" if number is None else f"{number:,.1f}"


def count_text(number: int | None) -> str:
    """Return a count; a dash if it is unknown."""
    return "-" if number is None else f"{number:,}"
