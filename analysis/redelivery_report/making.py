"""Make a report: what of it only Spark can tell, and what it was made by."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

from analysis.redelivery.spark import read_trace
from analysis.redelivery_report.contents import Contents, shown_policies, worst_subscriptions
from analysis.redelivery_report.curves import crash_times, curves
from analysis.trace.check import trace_hash

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from analysis.redelivery.results import SweepResult
    from analysis.redelivery_report.inputs import ReportInputs


def make_contents(
    spark: SparkSession, trace: Path, result: SweepResult, inputs: ReportInputs, *, command: str
) -> Contents:
    """Return the report of some estimates.

    Complexity: another replay of the trace under the policies that are shown, and reading its files for their hash.

    Args:
        spark: The session.
        trace: What the estimates are of.
        result: They themselves.
        inputs: What else is shown.
        command: By which it is made, in words.

    Raises:
        TraceError: The trace cannot be read.
    """
    frame = read_trace(spark, trace)
    policies = [each.policy for each in shown_policies(result)]
    found = curves(frame, policies, subscriptions=worst_subscriptions(result))
    lines = tuple(curve for curve in found if curve.is_total or curve.policy == 0)
    return Contents(result, lines, crash_times(frame), _provenance(spark, trace, command), inputs)


def _provenance(spark: SparkSession, trace: Path, command: str) -> tuple[tuple[str, str], ...]:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    return (
        ("SHA-256 of the trace", trace_hash(trace)),
        ("command", command),
        ("ackstate", version("ackstate")),
        ("Spark", spark.version),
        ("Python", platform.python_version()),
        ("Java", str(jvm.java.lang.System.getProperty("java.version"))),
    )
