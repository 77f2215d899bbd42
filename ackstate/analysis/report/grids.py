"""The report's tables that can be sorted and filtered: data for the page's script, within a limit in bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ackstate.analysis.report.contents import role_text
from ackstate.analysis.report.figures import policy_names
from ackstate.analysis.wording import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.estimate.results import Estimate, PolicyResult, SweepResult
    from ackstate.analysis.report.contents import Contents

DATA_BYTES_MAX = 300_000
"""All tables together have about as many bytes at most; further rows are omitted, those with least redelivery first."""
_SCOPES = ("subscription", "topic", "namespace", "total")
_ESTIMATE_COLUMNS = (
    ("subscription", "text"), ("topic", "text"), ("mean, messages", "mean"), ("p50", "count"), ("p90", "count"),
    ("p99", "count"), ("max", "count"), ("max at (UTC)", "time"), ("duplicates a day", "mean"),
    ("writes", "count"), ("bytes written", "count"), ("bytes kept", "count"),
)  # fmt: skip
_POLICY_COLUMNS = (
    ("policy", "text"), ("role", "text"), ("mean, messages", "mean"), ("p99", "count"), ("max", "count"),
    ("duplicates a day", "mean"), ("writes/s", "mean"), ("bytes/s", "mean"), ("blocked, s", "mean"),
    ("not beaten", "text"),
)  # fmt: skip


def grids(contents: Contents) -> list[dict[str, Any]]:
    """Return the tables, as JSON objects."""
    result = contents.result
    views = [
        {"label": f"{scope}s, {role_text(result, each)}" if scope != "total" else f"all, {role_text(result, each)}",
         "rows": [_estimate_row(one) for one in _worst_first(each, scope)]}
        for each in _reference_first(contents) for scope in _SCOPES
    ]  # fmt: skip
    found = [_grid("estimates", "Estimates", _ESTIMATE_COLUMNS, [each for each in views if each["rows"]], sort=2)]
    if len(result.policies) > 1:
        found.append(_policy_grid(result))
    return _limited(found)


def _reference_first(contents: Contents) -> list[PolicyResult]:
    reference = contents.result.reference
    return [reference, *(each for each in contents.result.shown if each is not reference)]


def _worst_first(result: PolicyResult, scope: str) -> list[Estimate]:
    return sorted((each for each in result.estimates if each.scope == scope), key=lambda each: -(each.expected or 0))


def _policy_grid(result: SweepResult) -> dict[str, Any]:
    names = policy_names(result)
    rows = [_policy_row(result, each, names[each.label]) for each in result.policies]
    picked = None if result.recommended is None else names[result.recommended.label]
    grid = _grid("all-policies", "Policies", _POLICY_COLUMNS, [{"label": "", "rows": rows}], sort=2)
    return grid | {"descending": False, "picked": picked}


def _grid(
    identity: str, title: str, columns: Sequence[tuple[str, str]], views: Sequence[dict[str, Any]], *, sort: int
) -> dict[str, Any]:
    named = [{"label": label, "kind": kind} for label, kind in columns]
    return {
        "id": identity, "title": title, "columns": named, "views": views, "sort": sort, "descending": True,
        "picked": None,
    }  # fmt: skip


def _limited(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Limit the rows of each view, so that all views together keep within the limit: small views keep all rows."""
    views = [view for grid in found for view in grid["views"]]
    sizes = {id(view): [len(json_in_html(row)) + 1 for row in view["rows"]] for view in views}
    rest = DATA_BYTES_MAX
    for number, view in enumerate(sorted(views, key=lambda each: sum(sizes[id(each)]))):
        share, kept, size = rest // (len(views) - number), 0, 0
        for row_size in sizes[id(view)]:
            if size + row_size > share:
                break
            kept, size = kept + 1, size + row_size
        rest -= size
        view["omitted"] = len(view["rows"]) - kept
        view["rows"] = view["rows"][:kept]
    return found


def json_in_html(value: Any) -> str:
    """Return a value as JSON in which no character can end a script or start a comment."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _estimate_row(each: Estimate) -> list[Any]:
    names = [printable(each.subscription) or "(all)", printable(each.topic or each.namespace) or "(all)"]
    numbers = [None if number is None else round(number, 3) for number in (each.expected, each.duplicates_per_day)]
    return [
        *names, numbers[0], each.p50, each.p90, each.p99, each.max, each.max_ts_ms, numbers[1],
        each.write_count, each.bytes_written, each.bytes_kept,
    ]  # fmt: skip


def _policy_row(result: SweepResult, each: PolicyResult, name: str) -> list[Any]:
    total = each.total
    # A recording lacks the bytes that were written.
    prices = [total.prices.bytes, total.prices.blocked_s or 0] if each.policy else [None, None]
    role = "" if result.role_of(each) == name else result.role_of(each)
    note = "; ".join(filter(None, (role, "never flushed in this trace" if each.never_flushed else "")))
    return [
        name, note, total.expected, total.p99, total.max, total.duplicates_per_day,
        total.prices.writes, *prices, "yes" if each.is_on_front and not each.never_flushed else "",
    ]  # fmt: skip
