"""`ackstate redelivery` computes how many acked messages a crash would have redelivered, at every instant."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ackstate.analysis.cli import tables
from ackstate.analysis.cli.estimates import (
    EngineOption,
    MasterOption,
    bounds_text,
    count_text,
    estimated,
    mean_text,
    numbers_table,
    rate_text,
    session_of,
)
from ackstate.analysis.cli.options import NUMBER_MAX, JsonOption, TraceArgument, between, key_value_pairs
from ackstate.analysis.cli.output import (
    CalibrationOption,
    FormatOption,
    OutOption,
    Output,
    ReportOption,
    TraceSummaryOption,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ackstate.analysis.estimate.results import PolicyResult

_SCOPE_NAMES = {
    "total": "broker-wide crash", "namespace": "namespace {}", "topic": "unload of topic {}",
    "subscription": "subscription {}",
}  # fmt: skip


def _crash_rate(number: float | None) -> float | None:
    return None if number is None else between(0, NUMBER_MAX)(number)


def redelivery(
    trace: TraceArgument,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V", help="Replay with this setting; may be repeated.")
    ] = None,
    crashes_per_day: Annotated[
        float | None,
        typer.Option(metavar="N", callback=_crash_rate, help="Crashes per day, for the count of duplicates."),
    ] = None,
    form: FormatOption = None,
    out: OutOption = None,
    report: ReportOption = None,
    calibration: CalibrationOption = None,
    trace_summary: TraceSummaryOption = None,
    engine: EngineOption = None,
    master: MasterOption = None,
    json: JsonOption = False,
) -> None:
    """Compute from a trace how many acked messages a crash would have redelivered, at every instant.

    As recorded, or under a policy: over the whole trace, for subscriptions,
    topics, namespaces and all together. Without a policy, a rate or a file it
    shows the subscriptions, with the number at each crash in the trace.

    For a trace of polls (ackstate pulsar record), it shows intervals. A
    directory with a trace for each day is read as one trace.
    """
    output = Output.wanted(form, out, report, calibration=calibration, trace_summary=trace_summary)
    rate = 1.0 if crashes_per_day is None else crashes_per_day
    session = session_of(engine, master)
    from ackstate.analysis.replay.policy import Policy

    settings = Policy.from_mapping(key_value_pairs(policy)) if policy else None
    is_plain = settings is None and crashes_per_day is None and out is None and report is None
    result, found = estimated(trace, [settings], crashes_per_day=rate, session=session, report=output.report)
    answer = result.to_json()
    if is_plain:
        rows = _subscriptions(result.policies[0], found)
        shown = [each for topic in sorted({row["topic"] for row in rows}) for each in _of_topic(topic, rows)]
        output.deliver(result, *shown, answer=answer | {"subscriptions": rows} if json else None)
    else:
        output.deliver(result, _estimate_table(result.policies[0]), answer=answer if json else None)


def _subscriptions(result: PolicyResult, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each subscription its numbers, and those at its crashes."""
    crashes = {(row["topic"], row["subscription"]): _crashes(row) for row in rows if row["scope"] == "subscription"}
    return [
        {
            "topic": each.topic, "subscription": each.subscription, "expected": each.expected, "p50": each.p50,
            "p99": each.p99, "max": each.max, "crashes": crashes[each.topic, each.subscription],
        } | ({} if each.low is None else {"low": asdict(each.low)})
        for each in result.estimates if each.scope == "subscription"
    ]  # fmt: skip


def _crashes(row: dict[str, Any]) -> list[dict[str, Any]]:
    each = iter(row["crashes"] or ())
    return [
        {
            "topic": row["topic"], "subscription": row["subscription"], "ts_ms": ts_ms, "at_crash": not_written,
            "at_crash_if_written": written, "persisting_at_crash": bool(persisting),
        }
        for ts_ms, (not_written, written, persisting) in zip(
            row["crash_ms"] or (), zip(each, each, each, strict=True), strict=True
        )
    ]  # fmt: skip


def _of_topic(topic: str, rows: Sequence[dict[str, Any]]) -> tuple[str, Table]:
    mine = [row for row in rows if row["topic"] == topic]
    return f"Redelivery if crashed, over every instant of {topic}", tables.redelivery_table(mine)


def _estimate_table(result: PolicyResult) -> Table:
    columns = ("expected", "p50", "p90", "p99", "max", "duplicates\nper day", "writes/s", "bytes/s")
    table = numbers_table("what", columns)
    for each in result.estimates:
        name = " ".join(filter(None, (each.topic or each.namespace, each.subscription))) or "-"
        low = each.low or each
        counts = [
            bounds_text(getattr(low, name), getattr(each, name), count_text, is_exact=each.low is None)
            for name in ("p50", "p90", "p99", "max")
        ]
        expected, duplicates = (
            bounds_text(getattr(low, name), getattr(each, name), mean_text, is_exact=each.low is None)
            for name in ("expected", "duplicates_per_day")
        )
        rates = [rate_text(each.per_second(number)) for number in (each.write_count, each.bytes_written)]
        label = _SCOPE_NAMES[each.scope].format(name)
        table.add_row(label, expected, *counts, duplicates, *rates)
    return table
