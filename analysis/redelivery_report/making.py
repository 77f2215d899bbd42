"""Makes a report: replays the trace into curves, and notes by which programs."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

from ackstate.analysis.redelivery.curve_changes import SERIES, TOTAL
from ackstate.analysis.redelivery_report.contents import Contents, shown_policies, worst_subscriptions
from ackstate.analysis.redelivery_report.curves import CrashTimes, crash_times, curve_of, curves
from ackstate.analysis.trace.check import trace_hash

if TYPE_CHECKING:
    from pathlib import Path

    from ackstate.analysis.redelivery.incremental import DailyEstimates
    from ackstate.analysis.redelivery.results import SweepResult
    from ackstate.analysis.redelivery.trace_source import TraceSource
    from ackstate.analysis.redelivery_report.inputs import ReportInputs


def make_contents(
    source: TraceSource, trace: Path, result: SweepResult, inputs: ReportInputs, *, command: str
) -> Contents:
    """Return the report of some estimates.

    Complexity: another replay of the trace under the policies that are shown, and reading its files for their hash.

    Args:
        source: What the estimates are of.
        trace: Where it is.
        result: They themselves.
        inputs: What else is shown.
        command: By which it is made, in words.

    Raises:
        TraceError: The trace cannot be read.
    """
    policies = [each.policy for each in shown_policies(result)]
    found = curves(source, policies, subscriptions=worst_subscriptions(result))
    lines = tuple(curve for curve in found if curve.is_total or curve.policy == 0)
    told = ("SHA-256 of the trace", trace_hash(trace))
    return Contents(result, lines, crash_times(source), (told, *_made_by(command, source.made_by())), inputs)


def make_daily_contents(
    found: DailyEstimates, result: SweepResult, inputs: ReportInputs, *, command: str,
    engine: tuple[tuple[str, str], ...],
) -> Contents:  # fmt: skip
    """Return the report of all days up to now, from what is kept of them.

    Args:
        found: What all days come to.
        result: The same, under the policies that it was found for.
        inputs: What else is shown.
        command: By which it is made, in words.
        engine: As `TraceSource.made_by`.
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
