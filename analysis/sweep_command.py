"""`ackstate sweep`, and `ackstate redelivery` under a policy: what would come back, and what would that cost?"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - Typer looks it up
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ackstate.analysis.report_command import (
    BrokerRunsOption,
    CalibrationOption,
    FormatOption,
    OriginOption,
    OutOption,
    Output,
    ReportFiles,
    ReportOption,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from rich.progress import Progress

    from ackstate.analysis.redelivery.policy import Policy
    from ackstate.analysis.redelivery.results import PolicyResult, SweepResult

MasterOption = Annotated[
    str | None, typer.Option(metavar="URL", help="Where Spark runs: local[2], or spark://HOST:PORT of a cluster.")
]


_SCOPE_NAMES = {
    "total": "broker-wide crash", "namespace": "namespace {}", "topic": "unload of topic {}",
    "subscription": "subscription {}",
}  # fmt: skip


def _rate(number: float) -> float:
    # Written so that it holds for nan as well.
    if not 0 <= number <= _RATE_MAX:
        raise typer.BadParameter(f"{number} is not from 0 to {_RATE_MAX}")
    return number


_RATE_MAX = 10**15


@dataclass(frozen=True, slots=True)
class SweepCommand:
    """The command.

    Attributes:
        show: Writes tables and lines to standard output.
        write_json: Writes one object there.
        progress: Shows what is under way, on standard error.
    """

    show: Callable[..., None]
    write_json: Callable[[dict[str, Any]], None]
    progress: Callable[[], AbstractContextManager[Progress]]

    def sweep(  # noqa: PLR0913, PLR0917 - one for each option
        self,
        trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A Parquet trace, directory or file.")],
        grid: Annotated[
            Path | None, typer.Option(metavar="FILE", help="JSON: an object of settings, each a value or a list.")
        ] = None,
        settings: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=V,V", help="A setting and its values; may be repeated."),
        ] = None,
        flush_interval_ms: Annotated[
            str | None, typer.Option(metavar="MS,MS", help="Short for --set flush_interval_ms=...")
        ] = None,
        baseline: Annotated[
            str, typer.Option(metavar="POLICY", help="What is in use now, as 'KEY=V KEY=V', default, or 'as recorded'.")
        ] = "",
        crashes_per_day: Annotated[
            float, typer.Option(metavar="N", callback=_rate, help="For duplicates per day.")
        ] = 1.0,
        form: FormatOption = None,
        out: OutOption = None,
        report: ReportOption = None,
        calibration: CalibrationOption = None,
        broker_runs: BrokerRunsOption = None,
        trace_json: OriginOption = None,
        master: MasterOption = None,
        json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    ) -> None:
        """Replay a trace under every combination of some settings, and say which is worth its price.

        For each policy: what a crash of the broker brings back, how much is
        written, and whether another policy is better in everything. As
        recorded comes first. What is recommended is compared with the first
        policy of the grid, or with --baseline.
        """
        from ackstate.analysis.redelivery.grid import policies_of_texts, read_grid, with_baseline
        from ackstate.analysis.redelivery.results import RECORDED_LABEL

        flags = list(settings or ())
        if flush_interval_ms is not None:
            flags.append(f"flush_interval_ms={flush_interval_ms}")
        if (grid is None) == (not flags):
            raise typer.BadParameter("a grid comes from --grid or from --set, one of them")
        output = Output.wanted(form, out, report, calibration=calibration, broker_runs=broker_runs, origin=trace_json)
        policies = policies_of_texts(_pairs(flags)) if grid is None else read_grid(grid)
        if baseline and baseline != RECORDED_LABEL:
            policies, baseline = with_baseline(policies, baseline)
        result = self.result_of(
            trace, [None, *policies], crashes_per_day=crashes_per_day, master=master, report=output.report,
            baseline=baseline,
        )  # fmt: skip
        if output.is_shown:
            refused = [f"{label}: {reason}" for label, reason in result.refused]
            table = (_policy_table(result), *refused, result.recommendation)
            self.write_json(result.to_json()) if json else self.show(*table)
        output.write(result)
        if not json and (lines := output.lines(result)):
            self.show(*lines)

    def redelivery(  # noqa: PLR0913 - one for each option
        self,
        trace: Path,
        settings: Sequence[str],
        *,
        crashes_per_day: float,
        output: Output,
        json: bool,
        master: str | None = None,
        state: Path | None = None,
    ) -> None:
        """Show, or write, the estimates under one policy; as recorded if there are no settings."""
        from ackstate.analysis.redelivery.policy import Policy

        policy = Policy.from_mapping(_pairs(settings)) if settings else None
        if state is not None:
            self._daily(trace, state, policy, crashes_per_day=crashes_per_day, output=output, json=json, master=master)
            return
        result = self.result_of(trace, [policy], crashes_per_day=crashes_per_day, master=master, report=output.report)
        if output.is_shown:
            self.write_json(result.to_json()) if json else self.show(_estimate_table(result.policies[0]))
        output.write(result)
        if not json and (lines := output.lines(result)):
            self.show(*lines)

    def _daily(  # noqa: PLR0913 - one for each option
        self, directory: Path, state: Path, policy: Policy | None, *, crashes_per_day: float, output: Output,
        json: bool, master: str | None,
    ) -> None:  # fmt: skip
        """Show, or write, the estimates over all days of a directory, of which those are read that are new."""
        from ackstate.analysis.redelivery.checkpoint import Checkpoint
        from ackstate.analysis.redelivery.daily import days_of, unread
        from ackstate.analysis.redelivery.incremental import daily_estimates
        from ackstate.analysis.redelivery.persistable import persistable
        from ackstate.analysis.redelivery.results import SweepResult
        from ackstate.analysis.redelivery.spark import open_session, readable_failures, shown_stages
        from ackstate.analysis.trace.events import TraceError

        # Before Spark, which takes seconds to start.
        persistable([policy])
        unread(directory, days_of(directory), Checkpoint.latest(state, [policy]))
        inputs = None if output.report is None else output.report.read_inputs()
        with readable_failures(directory), ExitStack() as kept:
            with self.progress() as progress:
                spark = open_session(master)
                with shown_stages(spark, progress):
                    daily = daily_estimates(spark, directory, state, [policy], crashes_per_day=crashes_per_day)
                    found = kept.enter_context(daily)
            if not found.rows:
                raise TraceError(f"{directory}: no subscription has an event")
            result = SweepResult.of_rows(str(directory), [policy], found.rows, crashes_per_day=crashes_per_day)
            if output.is_shown and json:
                self.write_json(result.to_json() | {"days": found.day_count, "days_read": list(found.days_read)})
            elif output.is_shown:
                self.show(_estimate_table(result.policies[0]), found.text)
            output.write(result)
            if output.report is not None and inputs is not None:
                output.report.write_daily(spark, found, result, inputs)
            if not json and (lines := output.lines(result)):
                self.show(*lines)

    def result_of(  # noqa: PLR0913 - what a report is made of comes along
        self,
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
        from ackstate.analysis.redelivery.checked_source import checked_source
        from ackstate.analysis.redelivery.estimates import estimates
        from ackstate.analysis.redelivery.persistable import persistable
        from ackstate.analysis.redelivery.results import SweepResult
        from ackstate.analysis.redelivery.spark import open_session, readable_failures, shown_stages
        from ackstate.analysis.trace.events import TraceError
        from ackstate.analysis.trace.parquet import check_trace

        # Before Spark, which takes seconds to start.
        covered = check_trace(trace)
        policies, refused = persistable(policies)
        inputs = None if report is None else report.read_inputs()
        with self.progress() as progress, readable_failures(trace):
            spark = open_session(master)
            with shown_stages(spark, progress):
                source = checked_source(spark, trace, covered)
                found = estimates(source, policies, crashes_per_day=crashes_per_day).collect()
                if not found:
                    raise TraceError(f"{trace}: no subscription has an event")
                rows = [row.asDict() for row in found]
                result = SweepResult.of_rows(
                    str(trace), policies, rows, crashes_per_day=crashes_per_day, refused=refused
                ).compared_with(baseline)
                if report is not None and inputs is not None:
                    report.write(source, trace, result, inputs)
        return result


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    """Split settings given as ``key=value``."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.strip() or not value.strip():
            raise typer.BadParameter(f"a setting is key=value, found {text!r}")
        if key.strip() in pairs:
            raise typer.BadParameter(f"the setting {key.strip()} is given twice")
        pairs[key.strip()] = value
    return pairs


def _policy_table(result: SweepResult) -> Table:
    columns = ("expected", "p99", "max", "duplicates\nper day", "writes/s", "bytes/s", "blocked s", "best")
    table = _table("policy", columns)
    for each in result.policies:
        total = each.total
        table.add_row(
            each.label, _mean(total.expected), _count(total.p99), f"{total.max:,}", _mean(total.duplicates_per_day),
            _rate_text(total.per_second(total.write_count)), _rate_text(total.per_second(total.bytes_written)),
            _mean(None if total.blocked_ms is None else total.blocked_ms / 1_000),
            "yes" if each.is_on_front else "",
        )  # fmt: skip
    return table


def _estimate_table(result: PolicyResult) -> Table:
    columns = ("expected", "p50", "p90", "p99", "max", "duplicates\nper day", "writes/s", "bytes/s")
    table = _table("what", columns)
    for each in result.estimates:
        name = " ".join(filter(None, (each.topic or each.namespace, each.subscription))) or "-"
        counts = [_count(number) for number in (each.p50, each.p90, each.p99, each.max)]
        rates = [_rate_text(each.per_second(number)) for number in (each.write_count, each.bytes_written)]
        label = _SCOPE_NAMES[each.scope].format(name)
        table.add_row(label, _mean(each.expected), *counts, _mean(each.duplicates_per_day), *rates)
    return table


def _table(first: str, others: Sequence[str]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _rate_text(number: float | None) -> str:
    from ackstate.analysis.redelivery.recommendation import short_number

    return "-" if number is None else short_number(number)


def _mean(number: float | None) -> str:
    return "-" if number is None else f"{number:,.1f}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
