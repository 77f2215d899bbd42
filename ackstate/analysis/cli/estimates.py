"""`ackstate sweep` and `ackstate redelivery`: estimates under policies, for a terminal, a program or a report."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.console import numbers_table, subscription_table
from ackstate.analysis.cli.options import (
    NUMBER_MAX,
    JsonOption,
    TraceArgument,
    between,
    key_value_pairs,
    location_argument,
)
from ackstate.analysis.location import atomic_write, write_atomically
from ackstate.analysis.wording import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession
    from rich.progress import Progress
    from rich.table import Table

    from ackstate.analysis.estimate.current_policy import CurrentPolicy
    from ackstate.analysis.estimate.engine import TraceSource
    from ackstate.analysis.estimate.results import PolicyResult, SweepResult, Target
    from ackstate.analysis.location import Location
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.trace.parquet import Span


FORMATS = ("json", "parquet", "csv")
FormatOption = Annotated[str | None, typer.Option("--format", metavar="F", help="json, parquet or csv; with --out.")]
OutOption = Annotated[Any, typer.Option(metavar="FILE", parser=location_argument, help="Write it there; may be a URL.")]
ReportOption = Annotated[
    Any,
    typer.Option(metavar="FILE", parser=location_argument, help="Write a report there, one HTML file; may be a URL."),
]


@dataclass(frozen=True, slots=True)
class Output:
    """The destination of the estimates, as options name it; `typer.BadParameter` if they do not go together."""

    form: str | None  # one of `FORMATS`; None to show them
    out: Location | None  # the file in that format
    report: Location | None

    def __post_init__(self) -> None:
        if (self.form is None) != (self.out is None):
            raise typer.BadParameter("--format and --out go together")
        if self.form is not None and self.form not in FORMATS:
            raise typer.BadParameter(f"--format must be one of {', '.join(FORMATS)}, got {self.form!r}")
        for file in [each for each in (self.out, self.report) if each is not None]:
            # Before Spark starts.
            if file.is_dir() or (isinstance(file, Path) and not file.absolute().parent.is_dir()):
                raise typer.BadParameter(f"{file}: the output must be a file in an existing directory")

    def deliver(self, result: SweepResult, *parts: Table | str, answer: dict[str, Any] | None) -> None:
        """Show the estimates, or write them atomically and print the names of the files; the report is already written.

        With an answer, that is printed instead of the parts, as JSON.
        """
        if self.out is None:
            console.show(*parts) if answer is None else console.write_json(answer)
        elif self.form == "json":
            write_atomically(self.out, console.json_text(result.to_json()))
        else:
            _write_table(result, self.out, is_parquet=self.form == "parquet")
        lines = []
        if self.out is not None:
            count = sum(len(each.estimates) for each in result.policies)
            lines.append(f"{self.out}: {count:,} estimates, {', '.join(each.label for each in result.policies[:3])}")
        if self.report is not None:
            lines.append(f"{self.report}: {size_text(self.report.stat().st_size)}")
        if answer is None and lines:
            console.show(*lines)


def _write_table(result: SweepResult, out: Location, *, is_parquet: bool) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    rows = [{"policy": each.label} | asdict(estimate) for each in result.policies for estimate in each.estimates]
    if not is_parquet:
        rows = [{name: _csv_cell(value) for name, value in row.items()} for row in rows]
    with atomic_write(out) as unfinished:
        if is_parquet:
            parquet.write_table(pa.Table.from_pylist(rows), unfinished)
        else:
            csv.write_csv(pa.Table.from_pylist(rows), unfinished)


def _csv_cell(value: Any) -> Any:
    """Quote text that a spreadsheet would compute as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value


# Bytes of columns times policies. A shuffle costs Spark three seconds, in which one worker replays more than this.
_ONE_TASK_BYTES_MAX = 2**21


class EngineChoice(Enum):
    """The engine that replays a trace."""

    SPARK = "spark"
    LOCAL = "local"


MasterOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="URL", help="Where Spark runs: local[2], or spark://HOST:PORT of a cluster.")
]

EngineOption: TypeAlias = Annotated[
    EngineChoice | None, typer.Option(help="spark, or local: in this process, without Java.")
]
Session: TypeAlias = "Callable[[], SparkSession] | None"
"""Starts Spark and returns its session; None to replay a trace without Spark."""


def session_of(engine: EngineChoice | None, master: str | None) -> Session:
    """Check that the engine can start, and return what starts it."""
    if engine is EngineChoice.LOCAL:
        if master is not None:
            raise typer.BadParameter("--master is for --engine spark")
        return None
    from ackstate.analysis.spark.session import check_startable, open_session

    check_startable(master)
    return partial(open_session, master)


def estimated(
    trace: Location,
    policies: Sequence[Policy | None],
    *,
    crashes_per_day: float,
    session: Session,
    output: Output,
    current: CurrentPolicy | None = None,
    days: Sequence[Span] | None = None,
    target: Target | None = None,
) -> tuple[SweepResult, list[dict[str, Any]]]:
    """Estimate a grid, and write a report if one is requested; return the rows of `estimates` too.

    Policies that cannot be replayed are excluded and listed in `SweepResult.refused`, unless none is left.
    """
    from ackstate.analysis.estimate.engine import trace_of
    from ackstate.analysis.estimate.estimates import estimates
    from ackstate.analysis.estimate.results import SweepResult
    from ackstate.analysis.replay.grid import replayable
    from ackstate.analysis.replay.policy import PolicyError
    from ackstate.analysis.spark.session import readable_failures
    from ackstate.analysis.trace.events import TraceError
    from ackstate.analysis.trace.parquet import check_days, span_of

    days = check_days(trace) if days is None else days
    covered = span_of(days)
    policies, refused = replayable(policies, poll_ms=covered.poll_ms)
    if current is not None and current.policy not in policies:
        raise PolicyError(f"current policy: {dict(refused)[current.label]}")
    size = covered.size_bytes * len(policies)
    progress = console.progress()
    with progress, readable_failures(trace), started(session, progress, size, covered.chunk_count) as (where, told):
        source = trace_of(where, days)
        found = estimates(
            source, policies, crashes_per_day=crashes_per_day, is_plotted=output.report is not None, told=told,
            drawn=_drawn(policies, current),
        )  # fmt: skip
        rows = found.collect()
        if not rows:
            raise TraceError(f"{trace}: no subscription has an event")
        result = SweepResult.of_rows(str(trace), policies, rows, crashes_per_day=crashes_per_day, refused=refused)
        result = _compared(replace(result, poll_ms=covered.poll_ms), current, target)
        if output.report is not None:
            from ackstate.analysis.report.contents import make_contents
            from ackstate.analysis.report.page import render

            made_by = (("command", shlex.join(["ackstate", *sys.argv[1:]])), *source.made_by())
            contents = make_contents(rows, covered, trace, result, made_by=made_by)
            write_atomically(output.report, render(contents))
        return result, rows


def _drawn(policies: Sequence[Policy | None], current: CurrentPolicy | None) -> int:
    """Return the index of the policy in force, as `SweepResult.current` chooses it."""
    if current is not None and current.policy in policies:
        return policies.index(current.policy)
    return next((number for number, each in enumerate(policies) if each is not None), 0)


def _compared(result: SweepResult, current: CurrentPolicy | None, target: Target | None) -> SweepResult:
    if current is not None:
        return result.compared_with(
            current.label, current.source, current.warnings, is_inferred=current.is_inferred, target=target
        )
    if len(result.policies) < 2:
        return result
    doubt = (
        "The trace has too few persists to infer the policy in force: the first policy of the grid is taken for it. "
        "Name it with --current-policy or --broker-conf"
    )
    return result.compared_with("", "the first policy of the grid", [doubt], is_inferred=True, target=target)


@contextmanager
def started(
    session: Session, progress: Progress, size_bytes: int, chunk_count: int
) -> Iterator[tuple[Callable[[Span], TraceSource], Callable[[], object] | None]]:
    """Wait for the engine, and show its progress while the block runs.

    Yields the engine, and what to call for each replayed chunk; None if the engine counts by itself.
    """
    from ackstate.analysis.estimate.engine import LocalSource

    if session is None:
        # A replayed cursor logs warnings that concern no live cursor; in Spark they stay in the workers.
        logging.getLogger("ackstate.cursor").addHandler(logging.NullHandler())
        task = progress.add_task("computing every instant", total=chunk_count)
        yield LocalSource, partial(progress.advance, task)
        return
    from ackstate.analysis.spark.session import is_local, shown_stages
    from ackstate.analysis.spark.source import SparkSource, one_task_source

    task = progress.add_task("starting Spark", total=None)
    spark = session()
    progress.update(task, description="Spark computes every instant")
    is_small = size_bytes <= _ONE_TASK_BYTES_MAX and is_local(spark.sparkContext.master or "")
    with shown_stages(spark, progress, task, "Spark"):
        if is_small:
            yield partial(one_task_source, spark), None
        else:
            yield partial(SparkSource.checked, spark), None


def _text(number: float | None, form: str = ",") -> str:
    """Return a number; a dash if it is unknown."""
    return "-" if number is None else format(number, form)


def _rate_text(number: float | None) -> str:
    from ackstate.analysis.estimate.results import short_number

    return "-" if number is None else short_number(number)


def _subscriptions_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return redelivery if crashed, a row for each subscription of one topic."""
    table = subscription_table(
        "", [row["subscription"] for row in rows], "expected", "p50", "p99", "max", "at each crash"
    )
    for row in rows:
        # A trace of a single millisecond has no duration, and so no mean and no quantiles.
        numbers = [_text(row[name]) for name in ("p50", "p99", "max")]
        at_crashes = ", ".join(map(_at_crash, row["crashes"])) or "-"
        table.add_row(row["subscription"], _text(row["expected"], _MEAN), *numbers, at_crashes)
    return table


def _at_crash(crash: dict[str, Any]) -> str:
    """Return the number at a crash; two numbers if it fell inside a persist."""
    if not crash["persisting_at_crash"]:
        return str(crash["at_crash"])
    return f"{crash['at_crash']} (if written {crash['at_crash_if_written']})"


_RECORDED = "recorded"
_MEAN = ",.1f"
_UNBEATEN = "Unbeaten: no other policy is as good in redelivery, writes, bytes and time blocked, and better in one"


def _optional_number(number: float | None) -> float | None:
    return None if number is None else between(0, NUMBER_MAX)(number)


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
    engine: EngineOption = None,
    master: MasterOption = None,
    json: JsonOption = False,
    at_most: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Recommend the cheapest policy with at most N messages per crash (p99)."),
    ] = None,
    writes_at_most: Annotated[
        float | None,
        typer.Option(metavar="N", callback=_optional_number, help="And, or only, with at most N writes a second."),
    ] = None,
) -> None:
    """Replay a trace under every combination of some settings, and recommend one that is worth its price.

    For each policy: redelivery after a crash of the broker, the bytes
    written, and whether another policy is better in every respect. The
    recording comes first. The recommendation is compared with the policy
    in force: as named, read from a broker's configuration, or inferred
    from the recording. A trace of ackstate pulsar record has the settings of
    its broker. With those, or with --broker-conf, settings that do not vary
    are those of the broker. Without a grid, a few usual policies are compared,
    and more of them if there is a target.
    """
    flags = list(settings or ())
    if flush_interval_ms is not None:
        flags.append(f"flush_interval_ms={flush_interval_ms}")
    if grid is not None and flags:
        raise typer.BadParameter("give the grid by either --grid or --set")
    if broker_conf is not None and current_policy:
        raise typer.BadParameter("give the policy in force by either --current-policy or --broker-conf")
    output = Output(form, out, report)
    session = session_of(engine, master)
    from ackstate.analysis.estimate.current_policy import CurrentPolicy, read_broker_policy
    from ackstate.analysis.estimate.results import Target
    from ackstate.analysis.replay.grid import candidates, policies_of_texts, policy_of_text, read_grid
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.report.contents import headline
    from ackstate.analysis.trace.parquet import check_days

    target = None if at_most is None and writes_at_most is None else Target(at_most, writes_at_most)
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
    if current_policy == _RECORDED:
        current: CurrentPolicy | None = CurrentPolicy(None, "the recording itself")
    else:
        current = recorded or _current(trace, named, broker, broker_conf)
    in_force = None if current is None else current.policy
    if not policies:
        policies = candidates(in_force or broker or Policy(), many=target is not None)
    elif in_force is not None and in_force not in policies:
        policies = [in_force, *policies]
    result, _ = estimated(
        trace, [None, *policies], crashes_per_day=crashes_per_day, session=session, output=output,
        current=current, days=days, target=target,
    )  # fmt: skip
    lines = [*(f"{label}: {reason}" for label, reason in result.refused), *result.warnings, result.recommendation]
    if result.advice is not None:
        lines += [result.advice.rule, _UNBEATEN]
    answer = result.to_json() if json else None
    output.deliver(result, *console.lines(headline(result)), _policy_table(result), *lines, answer=answer)


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
    columns = ("expected", "p99", "max", "duplicates\nper day", "writes/s", "bytes/s", "blocked s", "unbeaten")
    table = numbers_table("policy", columns)
    for each in result.policies:
        total = each.total
        role = result.role_of(each)
        label = f"{each.label} ({role})" if role and role != each.label else each.label
        table.add_row(
            label, _text(total.expected, _MEAN), _text(total.p99), _text(total.max),
            _text(total.duplicates_per_day, _MEAN),
            _rate_text(total.prices.writes), _rate_text(total.prices.bytes), _text(total.prices.blocked_s, _MEAN),
            "never flushed in this trace" if each.never_flushed else "yes" if each.is_on_front else "",
        )  # fmt: skip
    return table


_SCOPE_NAMES = {
    "total": "broker-wide crash", "namespace": "namespace {}", "topic": "unload of topic {}",
    "subscription": "subscription {}",
}  # fmt: skip


def redelivery(
    trace: TraceArgument,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V", help="Replay with this setting; may be repeated.")
    ] = None,
    crashes_per_day: Annotated[
        float | None,
        typer.Option(metavar="N", callback=_optional_number, help="Crashes per day, for the count of duplicates."),
    ] = None,
    form: FormatOption = None,
    out: OutOption = None,
    report: ReportOption = None,
    engine: EngineOption = None,
    master: MasterOption = None,
    json: JsonOption = False,
) -> None:
    """Compute from a trace how many acked messages a crash would have redelivered, at every instant.

    As recorded, or under a policy: over the whole trace, for subscriptions,
    topics, namespaces and all together. Without a policy, a rate or a file it
    shows the subscriptions, with the number at each crash in the trace.

    In a trace of ackstate pulsar record, redelivery is exact at each poll. A
    directory with a trace for each day is read as one trace.
    """
    output = Output(form, out, report)
    rate = 1.0 if crashes_per_day is None else crashes_per_day
    session = session_of(engine, master)
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.report.contents import headline

    settings = Policy.from_mapping(key_value_pairs(policy)) if policy else None
    is_plain = settings is None and crashes_per_day is None and out is None and report is None
    result, found = estimated(trace, [settings], crashes_per_day=rate, session=session, output=output)
    answer = result.to_json()
    if is_plain:
        rows = _subscriptions(result.policies[0], found)
        shown: list[Table | str] = []
        for topic in sorted({row["topic"] for row in rows}):
            shown.append(f"Redelivery if crashed, over every instant of {topic}")
            shown.append(_subscriptions_table([row for row in rows if row["topic"] == topic]))
        answer |= {"subscriptions": rows}
    else:
        shown = [_estimate_table(result.policies[0])]
    output.deliver(result, *console.lines(headline(result)), *shown, *result.warnings, answer=answer if json else None)


def _subscriptions(result: PolicyResult, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each subscription its numbers, and those at its crashes."""
    crashes = {(row["topic"], row["subscription"]): _crashes(row) for row in rows if row["scope"] == "subscription"}
    return [
        {
            "topic": each.topic, "subscription": each.subscription, "expected": each.expected, "p50": each.p50,
            "p99": each.p99, "max": each.max, "crashes": crashes[each.topic, each.subscription],
        }
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


def _estimate_table(result: PolicyResult) -> Table:
    columns = ("expected", "p50", "p90", "p99", "max", "duplicates\nper day", "writes/s", "bytes/s")
    table = numbers_table("what", columns)
    for each in result.estimates:
        name = " ".join(filter(None, (each.topic or each.namespace, each.subscription))) or "-"
        counts = [_text(getattr(each, name)) for name in ("p50", "p90", "p99", "max")]
        rates = [_rate_text(number) for number in each.prices[:2]]
        label = _SCOPE_NAMES[each.scope].format(name)
        per_day = _text(each.duplicates_per_day, _MEAN)
        table.add_row(label, _text(each.expected, _MEAN), *counts, per_day, *rates)
    return table
