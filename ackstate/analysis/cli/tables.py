"""Tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from ackstate.analysis.wording import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.demo.job import DemoRun
    from ackstate.analysis.demo.recovery import RecoveredCursor

# Width of a subscription at a terminal; a longer name wraps.
_NAME_WIDTH_MAX = 17


def outcome_table(run: DemoRun) -> Table:
    """Return the demo's table of one run."""
    title = f"Killed after {run.kill.lived_ms / 1_000:.2f} s (seed {run.seed})"
    names = [outcome.name for outcome in run.subscriptions]
    table = _table(
        title, names, "acked", "persisted", "predicted\nat the kill", "observed", "lost\nacks", "invented\nacks"
    )
    for outcome in run.subscriptions:
        numbers = (outcome.observed, outcome.lost, outcome.invented)
        table.add_row(outcome.name, str(outcome.acked), str(outcome.durable), outcome.prediction, *map(str, numbers))
    return table


def repeat_line(run: DemoRun) -> str:
    """Return the demo's line for one run of many."""
    pairs = "   ".join(f"{o.name} {o.prediction} / {o.observed}" for o in run.subscriptions)
    return f"seed {run.seed}: {'equal' if run.holds else 'NOT EQUAL'}   predicted / observed: {pairs}"


def redelivery_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return redelivery if crashed, a row for each subscription of one topic.

    Args:
        rows: ``subscription, expected, p50, p99, max`` as in `Estimate`, and ``crashes``: rows as in
            `ackstate.analysis.estimate.parts.Crashes`. With a trace of polls also ``low``, with the low ends.
    """
    table = _table("", [row["subscription"] for row in rows], "expected", "p50", "p99", "max", "at each crash")
    for row in rows:
        # A trace of a single millisecond has no duration, and so no mean and no quantiles.
        low = row.get("low", row)
        expected = _interval(*("-" if each["expected"] is None else f"{each['expected']:.1f}" for each in (low, row)))
        numbers = [
            _interval(*("-" if each[name] is None else str(each[name]) for each in (low, row)))
            for name in ("p50", "p99", "max")
        ]
        at_crashes = ", ".join(_at_crash(crash, has_interval="low" in row) for crash in row["crashes"]) or "-"
        table.add_row(row["subscription"], expected, *numbers, at_crashes)
    return table


def recovery_table(results: Sequence[RecoveredCursor]) -> Table:
    """Return the source of each cursor's state."""
    table = _table(
        "Recovered",
        [result.subscription for result in results],
        "from",
        "records",
        "torn bytes",
        "mark-delete",
        "ranges",
    )
    for result in results:
        report = result.report
        numbers = (report.records_replayed, report.bytes_discarded, result.mark_delete, report.range_count)
        table.add_row(result.subscription, report.source.value, *map(str, numbers))
    return table


def redelivered_table(results: Sequence[RecoveredCursor]) -> Table:
    """Return the redelivered messages of each cursor, and lost and invented acks, which must be 0."""
    table = _table(
        "Redelivered",
        [result.subscription for result in results],
        "acked",
        "persisted",
        "redelivered",
        "lost\nacks",
        "invented\nacks",
    )
    for result in results:
        numbers = (result.acked, result.durable, result.observed, result.lost, result.invented)
        table.add_row(result.subscription, *map(str, numbers))
    return table


def _table(title: str, subscriptions: Sequence[str], *numbers: str) -> Table:
    """Return a table whose first column is the subscription and the others numbers."""
    # Without the outer frame all columns of the demo fit into 80 characters.
    table = Table(title=title or None, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    # Rich would break names before it breaks sentences.
    width = max(cell_len(printable(name)) for name in ["subscription", *subscriptions])
    width = min(width, _NAME_WIDTH_MAX) if Console().is_terminal else width
    table.add_column("subscription", width=width, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", overflow="fold")
    return table


def _interval(low: str, high: str) -> str:
    return high if low == high else f"{low} to {high}"


def _at_crash(crash: dict[str, Any], *, has_interval: bool) -> str:
    """Return the number at a crash; two numbers if it fell inside a persist, or is known from polls."""
    if has_interval:
        return _interval(str(crash["at_crash_if_written"]), str(crash["at_crash"]))
    if not crash["persisting_at_crash"]:
        return str(crash["at_crash"])
    return f"{crash['at_crash']} (if written {crash['at_crash_if_written']})"


def new_table(*columns: str) -> Table:
    """Return an empty table whose cells are never cut."""
    table = Table(show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
