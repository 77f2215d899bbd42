"""`ackstate sweep`, and `ackstate redelivery` under a policy: what would come back, and what would that cost?"""

from __future__ import annotations

import json as json_format
from dataclasses import asdict, dataclass
from pathlib import Path  # noqa: TC003 - Typer looks it up
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from analysis.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from rich.progress import Progress

    from analysis.redelivery.policy import Policy
    from analysis.redelivery.results import PolicyResult, SweepResult

FORMATS = ("json", "parquet", "csv")
MasterOption = Annotated[
    str | None, typer.Option(metavar="URL", help="Where Spark runs: local[2], or spark://HOST:PORT of a cluster.")
]


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
        crashes_per_day: Annotated[float, typer.Option(metavar="N", min=0, help="For duplicates per day.")] = 1.0,
        master: MasterOption = None,
        json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    ) -> None:
        """Replay a trace under every combination of some settings, and say which is worth its price.

        For each policy: what a crash of the broker brings back, how much is
        written, and whether another policy is better in everything. As
        recorded comes first.
        """
        from analysis.redelivery.grid import policies_of_texts, read_grid

        flags = list(settings or ())
        if flush_interval_ms is not None:
            flags.append(f"flush_interval_ms={flush_interval_ms}")
        if (grid is None) == (not flags):
            raise typer.BadParameter("a grid comes from --grid or from --set, one of them")
        policies = policies_of_texts(_pairs(flags)) if grid is None else read_grid(grid)
        result = self.result_of(trace, [None, *policies], crashes_per_day=crashes_per_day, master=master)
        if json:
            self.write_json(result.to_json())
        else:
            self.show(_policy_table(result), result.recommendation)

    def redelivery(  # noqa: PLR0913 - one for each option
        self,
        trace: Path,
        settings: Sequence[str],
        *,
        crashes_per_day: float,
        form: str | None,
        out: Path | None,
        json: bool,
        master: str | None = None,
    ) -> None:
        """Show, or write, the estimates under one policy; as recorded if there are no settings."""
        from analysis.redelivery.policy import Policy

        if (form is None) != (out is None):
            raise typer.BadParameter("--format and --out go together")
        if form is not None and form not in FORMATS:
            raise typer.BadParameter(f"--format is one of {', '.join(FORMATS)}, found {form!r}")
        policy = Policy.from_mapping(_pairs(settings)) if settings else None
        result = self.result_of(trace, [policy], crashes_per_day=crashes_per_day, master=master)
        if out is None or form is None:
            self.write_json(result.to_json()) if json else self.show(_estimate_table(result.policies[0]))
        else:
            _write(result, form, out)
            self.show(f"{out}: {len(result.policies[0].estimates)} estimates, {result.policies[0].label}")

    def result_of(
        self, trace: Path, policies: Sequence[Policy | None], *, crashes_per_day: float, master: str | None = None
    ) -> SweepResult:
        """Let Spark estimate a grid.

        Raises:
            TraceError: The trace is none, or empty of subscriptions.
        """
        from analysis.redelivery.estimates import estimates
        from analysis.redelivery.results import SweepResult
        from analysis.redelivery.spark import open_session, read_trace, readable_failures, shown_stages
        from analysis.trace.events import TraceError
        from analysis.trace.parquet import check_trace

        # Before Spark, which takes seconds to start.
        check_trace(trace)
        with self.progress() as progress, readable_failures(trace):
            spark = open_session(master)
            with shown_stages(spark, progress):
                found = estimates(read_trace(spark, trace), policies, crashes_per_day=crashes_per_day).collect()
        if not found:
            raise TraceError(f"{trace}: no subscription has an event")
        rows = [row.asDict() for row in found]
        return SweepResult.of_rows(str(trace), policies, rows, crashes_per_day=crashes_per_day)


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


def _write(result: SweepResult, form: str, out: Path) -> None:
    rows = [asdict(each) for each in result.policies[0].estimates]
    if form == "json":
        write_whole(out, json_format.dumps(result.to_json(), indent=2) + "\n")
        return
    import pyarrow as pa
    from pyarrow import csv, parquet

    table = pa.Table.from_pylist(rows)
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        if form == "csv":
            csv.write_csv(table, unfinished)
        else:
            parquet.write_table(table, unfinished)
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)


def _policy_table(result: SweepResult) -> Table:
    columns = ("expected", "p99", "max", "duplicates\nper day", "writes/s", "bytes/s", "blocked s", "best")
    table = _table("policy", columns)
    for each in result.policies:
        total = each.total
        # What a recording wrote is not in it.
        is_recorded = each.policy is None
        table.add_row(
            each.label, _mean(total.expected), _count(total.p99), f"{total.max:,}", _mean(total.duplicates_per_day),
            f"{total.per_second(total.write_count):,.3g}",
            "-" if is_recorded else f"{total.per_second(total.bytes_written):,.3g}",
            "-" if is_recorded else f"{total.blocked_ms / 1_000:,.1f}",
            "yes" if each.is_on_front else "",
        )  # fmt: skip
    return table


def _estimate_table(result: PolicyResult) -> Table:
    columns = ("expected", "p50", "p90", "p99", "max", "duplicates\nper day", "writes/s", "bytes/s")
    table = _table("what", columns)
    for each in result.estimates:
        name = " ".join(filter(None, (each.topic or each.namespace, each.subscription))) or "-"
        counts = [_count(number) for number in (each.p50, each.p90, each.p99, each.max)]
        rates = [f"{each.per_second(number):,.3g}" for number in (each.write_count, each.bytes_written)]
        label = "all, as if the broker died" if each.scope == "total" else f"{each.scope} {name}"
        table.add_row(label, _mean(each.expected), *counts, _mean(each.duplicates_per_day), *rates)
    return table


def _table(first: str, others: Sequence[str]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _mean(number: float | None) -> str:
    return "-" if number is None else f"{number:,.1f}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
