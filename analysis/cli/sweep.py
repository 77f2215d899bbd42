"""`ackstate sweep` replays a trace under many policies, and shows the cost and the benefit of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ackstate.analysis.cli.estimates import (
    EngineOption,
    MasterOption,
    VerboseOption,
    bounds_text,
    count_text,
    estimated,
    mean_text,
    numbers_table,
    rate_text,
    starting,
)
from ackstate.analysis.cli.options import NUMBER_MAX, JsonOption, TraceArgument, between, key_value_pairs
from ackstate.analysis.cli.output import (
    CalibrationOption,
    FormatOption,
    OutOption,
    Output,
    RecordedRunsOption,
    ReportOption,
    TraceSummaryOption,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ackstate.analysis.estimate.results import SweepResult


def sweep(
    trace: TraceArgument,
    grid: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON: an object of settings, each a value or a list.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V,V", help="A setting and its values; may be repeated."),
    ] = None,
    flush_interval_ms: Annotated[
        str | None, typer.Option(metavar="TIME,TIME", help="Short for --set flush_interval_ms=...")
    ] = None,
    baseline: Annotated[
        str, typer.Option(metavar="POLICY", help="The policy in use: 'KEY=V KEY=V', default, or 'as recorded'.")
    ] = "",
    crashes_per_day: Annotated[
        float, typer.Option(metavar="N", callback=between(0, NUMBER_MAX), help="For duplicates per day.")
    ] = 1.0,
    form: FormatOption = None,
    out: OutOption = None,
    report: ReportOption = None,
    calibration: CalibrationOption = None,
    recorded_runs: RecordedRunsOption = None,
    trace_summary: TraceSummaryOption = None,
    engine: EngineOption = None,
    master: MasterOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,  # noqa: ARG001
) -> None:
    """Replay a trace under every combination of some settings, and recommend one that is worth its price.

    For each policy: redelivery after a crash of the broker, the bytes
    written, and whether another policy is better in every respect. As
    recorded comes first. The recommendation is compared with the first
    policy of the grid, or with --baseline.
    """
    flags = list(settings or ())
    if flush_interval_ms is not None:
        flags.append(f"flush_interval_ms={flush_interval_ms}")
    if (grid is None) == (not flags):
        raise typer.BadParameter("give the grid by either --grid or --set")
    output = Output.wanted(
        form, out, report, calibration=calibration, recorded_runs=recorded_runs, trace_summary=trace_summary
    )
    with starting(engine, master) as session:
        from ackstate.analysis.estimate.results import RECORDED_LABEL
        from ackstate.analysis.replay.grid import policies_of_texts, read_grid, with_baseline

        policies = policies_of_texts(key_value_pairs(flags)) if grid is None else read_grid(grid)
        if baseline and baseline != RECORDED_LABEL:
            policies, baseline = with_baseline(policies, baseline)
        result, _ = estimated(
            trace, [None, *policies], crashes_per_day=crashes_per_day, session=session, report=output.report,
            baseline=baseline,
        )  # fmt: skip
    refused = [f"{label}: {reason}" for label, reason in result.refused]
    output.deliver(
        result, _policy_table(result), *refused, result.recommendation, answer=result.to_json() if json else None
    )  # fmt: skip


def _policy_table(result: SweepResult) -> Table:
    columns = ("expected", "p99", "max", "duplicates\nper day", "writes/s", "bytes/s", "blocked s", "best")
    table = numbers_table("policy", columns)
    for each in result.policies:
        total = each.total
        low = total.low or total
        is_exact = total.low is None
        expected, duplicates = (
            bounds_text(getattr(low, name), getattr(total, name), mean_text, is_exact=is_exact)
            for name in ("expected", "duplicates_per_day")
        )
        p99, peak = (
            bounds_text(getattr(low, name), getattr(total, name), count_text, is_exact=is_exact)
            for name in ("p99", "max")
        )
        table.add_row(
            each.label, expected, p99, peak, duplicates,
            rate_text(total.per_second(total.write_count)), rate_text(total.per_second(total.bytes_written)),
            mean_text(None if total.blocked_ms is None else total.blocked_ms / 1_000),
            "yes" if each.is_on_front else "",
        )  # fmt: skip
    return table
