"""Make a report: what of it only Spark can tell, and what it was made by."""

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

    from pyspark.sql import SparkSession

    from ackstate.analysis.redelivery.incremental import DailyEstimates
    from ackstate.analysis.redelivery.results import SweepResult
    from ackstate.analysis.redelivery.spark_source import SparkSource
    from ackstate.analysis.redelivery_report.inputs import ReportInputs


def make_contents(
    source: SparkSource, trace: Path, result: SweepResult, inputs: ReportInputs, *, command: str
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
    return Contents(result, lines, crash_times(source), _provenance(source.spark, trace, command), inputs)


def make_daily_contents(
    spark: SparkSession, found: DailyEstimates, result: SweepResult, inputs: ReportInputs, *, command: str
) -> Contents:
    """Return the report of all days up to now, from what is kept of them.

    Args:
        spark: The session.
        found: What all days come to.
        result: The same, under the policies that it was found for.
        inputs: What else is shown.
        command: By which it is made, in words.
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
    return Contents(result, lines, crashes, (days, told, *_made_by(spark, command)), inputs)


def _provenance(spark: SparkSession, trace: Path, command: str) -> tuple[tuple[str, str], ...]:
    return (("SHA-256 of the trace", trace_hash(trace)), *_made_by(spark, command))


def _made_by(spark: SparkSession, command: str) -> tuple[tuple[str, str], ...]:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    return (
        ("command", command),
        ("ackstate", version("ackstate")),
        ("Spark", spark.version),
        ("Python", platform.python_version()),
        ("Java", str(jvm.java.lang.System.getProperty("java.version"))),
    )
