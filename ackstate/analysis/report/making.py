"""Builds a report from estimates and their curves, with the versions of the programs that computed them."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ackstate.analysis.replay.curve_sum import SERIES
from ackstate.analysis.report.contents import Contents, reference_of, shown_policies, worst_subscriptions
from ackstate.analysis.report.curves import TOTAL, CrashTimes, curve_of, curves_of_rows
from ackstate.analysis.trace.check import trace_hash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.analysis.estimate.incremental import DailyEstimates
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

    Args:
        rows: The estimates, with curves.
        span: The span of the trace.
        trace: Location of the trace.
        result: The sweep result of the estimates.
        inputs: The other files shown.
        command: The command that makes the report.
        engine: See `Engine.made_by`.

    Raises:
        TraceError: The trace cannot be read.
    """
    shown = [result.policies.index(each) for each in shown_policies(result)]
    drawn = result.policies.index(reference_of(result))
    lines = curves_of_rows(rows, span, shown, subscriptions=worst_subscriptions(result), drawn=drawn)
    told = ("SHA-256 of the trace", trace_hash(trace))
    made_by = (told, *_made_by(command, engine))
    return Contents(result, tuple(lines), CrashTimes.of_rows(rows), made_by, inputs)


def make_daily_contents(
    found: DailyEstimates, result: SweepResult, inputs: ReportInputs, *, command: str,
    engine: tuple[tuple[str, str], ...],
) -> Contents:  # fmt: skip
    """Return the report of all days up to now, from their stored state.

    Args:
        found: The estimates over all days.
        result: The sweep result, under the same policies.
        inputs: The other files shown.
        command: The command that makes the report.
        engine: See `Engine.made_by`.
    """
    policies = [each.policy for each in result.policies]
    named = [((number, *TOTAL), curve) for number, curve in enumerate(found.broker.curves)]
    named += [((0, *key), found.curves_of(key, policies)[0]) for key in worst_subscriptions(result)]
    lines = tuple(
        curve_of(key, *curve.points(SERIES), begin_ms=found.begin_ms, end_ms=found.end_ms) for key, curve in named
    )
    crashes = CrashTimes(tuple(found.broker.died_ms), found.broker.death_count)
    told = ("SHA-256 of the days' names, sizes and footers", found.broker.days_digest)
    days = ("days", f"{found.day_count:,}")
    return Contents(result, lines, crashes, (days, told, *_made_by(command, engine)), inputs)


def _made_by(command: str, engine: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return (
        ("command", command),
        ("ackstate", version("ackstate")),
        ("Python", platform.python_version()),
        *engine,
    )
