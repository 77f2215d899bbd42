"""Builds a report from estimates and their curves, with the versions of the programs that computed them."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ackstate.analysis.report.contents import Contents, reference_of, shown_policies, worst_subscriptions
from ackstate.analysis.report.curves import CrashTimes, curves_of_rows
from ackstate.analysis.trace.check import trace_hash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.analysis.estimate.results import SweepResult
    from ackstate.analysis.location import Location
    from ackstate.analysis.report.inputs import ReportInputs
    from ackstate.analysis.trace.parquet import Span


def make_contents(  # noqa: PLR0913 - each is needed once
    rows: Sequence[Mapping[str, Any]], span: Span, trace: Location, result: SweepResult, inputs: ReportInputs, *,
    command: str, engine: tuple[tuple[str, str], ...],
) -> Contents:  # fmt: skip
    """Return the report of some estimates.

    Complexity: reading the files of the trace for their hash.

    Raises:
        TraceError: The trace cannot be read.
    """
    shown = [result.policies.index(each) for each in shown_policies(result)]
    drawn = result.policies.index(reference_of(result))
    lines = curves_of_rows(rows, span, shown, subscriptions=worst_subscriptions(result), drawn=drawn)
    told = ("SHA-256 of the trace", trace_hash(trace))
    days = (("days", f"{len(span.days):,}"),) if span.days else ()
    made_by = (told, *days, *_made_by(command, engine))
    return Contents(result, tuple(lines), CrashTimes.of_rows(rows), made_by, inputs)


def _made_by(command: str, engine: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return (
        ("command", command),
        ("ackstate", version("ackstate")),
        ("Python", platform.python_version()),
        *engine,
    )
