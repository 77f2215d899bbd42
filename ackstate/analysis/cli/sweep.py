"""`ackstate sweep` replays a trace under many policies, and shows the cost and the benefit of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    from rich.table import Table

    from ackstate.analysis.estimate.current_policy import CurrentPolicy
    from ackstate.analysis.estimate.results import SweepResult
    from ackstate.analysis.location import Location
    from ackstate.analysis.replay.policy import Policy

_RECORDED = "recorded"


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
    current_policy: Annotated[
        str, typer.Option(metavar="POLICY", help="The policy in force: 'KEY=V KEY=V', default, or recorded.")
    ] = "",
    broker_conf: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A Pulsar broker's broker.conf, or its runtime configuration in JSON."),
    ] = None,
    crashes_per_day: Annotated[
        float, typer.Option(metavar="N", callback=between(0, NUMBER_MAX), help="For duplicates per day.")
    ] = 1.0,
    form: FormatOption = None,
    out: OutOption = None,
    report: ReportOption = None,
    calibration: CalibrationOption = None,
    trace_summary: TraceSummaryOption = None,
    engine: EngineOption = None,
    master: MasterOption = None,
    json: JsonOption = False,
) -> None:
    """Replay a trace under every combination of some settings, and recommend one that is worth its price.

    For each policy: redelivery after a crash of the broker, the bytes
    written, and whether another policy is better in every respect. The
    recording comes first. The recommendation is compared with the policy
    in force: as named, read from a broker's configuration, or inferred
    from the recording. A trace of ackstate pulsar record has the settings of
    its broker. With those, or with --broker-conf, settings that do not vary
    are those of the broker. Without a grid, a few usual policies are compared.
    """
    flags = list(settings or ())
    if flush_interval_ms is not None:
        flags.append(f"flush_interval_ms={flush_interval_ms}")
    if grid is not None and flags:
        raise typer.BadParameter("give the grid by either --grid or --set")
    if broker_conf is not None and current_policy:
        raise typer.BadParameter("give the policy in force by either --current-policy or --broker-conf")
    output = Output.wanted(form, out, report, calibration=calibration, trace_summary=trace_summary)
    session = session_of(engine, master)
    from ackstate.analysis.estimate.current_policy import CurrentPolicy, read_broker_policy
    from ackstate.analysis.replay.grid import candidates, policies_of_texts, policy_of_text, read_grid
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.trace.parquet import check_days

    # Mistakes in options and files are reported before the trace is read.
    is_named = current_policy not in ("", _RECORDED)
    named = policy_of_text(current_policy) if is_named else None
    broker = None if broker_conf is None else read_broker_policy(broker_conf)
    texts = key_value_pairs(flags)
    policies_of_texts(texts)
    days = check_days(trace)
    recorded = None if broker_conf is not None or is_named else CurrentPolicy.of_recorded_broker(trace)
    if recorded is not None:
        broker = recorded.policy
    base = None if broker is None else broker.to_mapping()
    policies = read_grid(grid, base) if grid is not None else policies_of_texts(texts, base) if texts else []
    current = None
    if current_policy != _RECORDED:
        current = recorded or _current(trace, named, broker, broker_conf)
    if not policies:
        policies = candidates(current.policy if current is not None else broker or Policy())
    elif current is not None and current.policy not in policies:
        policies = [current.policy, *policies]
    result, _ = estimated(
        trace, [None, *policies], crashes_per_day=crashes_per_day, session=session, report=output.report,
        current=current, is_recorded_current=current_policy == _RECORDED, days=days,
    )  # fmt: skip
    lines = [*(f"{label}: {reason}" for label, reason in result.refused), *result.warnings, result.recommendation]
    output.deliver(result, _policy_table(result), *lines, answer=result.to_json() if json else None)


def _current(
    trace: Location, named: Policy | None, broker: Policy | None, broker_conf: Path | None
) -> CurrentPolicy | None:
    """Return the policy in force, as named, of a file, or inferred; None if it is unknown."""
    from ackstate.analysis.estimate.current_policy import CurrentPolicy, recorded_rhythm

    rhythm = recorded_rhythm(trace)
    if broker is not None and broker_conf is not None:
        return CurrentPolicy.given(broker, f"read from {broker_conf.name}", rhythm)
    if named is not None:
        return CurrentPolicy.given(named, "named with --current-policy", rhythm)
    return None if rhythm is None else CurrentPolicy.inferred(rhythm)


def _policy_table(result: SweepResult) -> Table:
    columns = ("expected", "p99", "max", "duplicates\nper day", "writes/s", "bytes/s", "blocked s", "best")
    table = numbers_table("policy", columns)
    for each in result.policies:
        total = each.total
        role = result.role_of(each)
        label = f"{each.label} ({role})" if role and role != each.label else each.label
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
            label, expected, p99, peak, duplicates,
            rate_text(total.per_second(total.write_count)), rate_text(total.per_second(total.bytes_written)),
            mean_text(None if total.blocked_ms is None else total.blocked_ms / 1_000),
            "never flushed in this trace" if each.never_flushed else "yes" if each.is_on_front else "",
        )  # fmt: skip
    return table
