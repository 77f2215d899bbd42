"""Renders the report: one HTML file that sends no request; its only script sorts and filters its tables."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ackstate.analysis import chart, html_page
from ackstate.analysis.html_page import escape, section, table
from ackstate.analysis.report import figures
from ackstate.analysis.report.answer import answer
from ackstate.analysis.report.contents import causes, role_text, time_text
from ackstate.analysis.report.figures import policy_names
from ackstate.analysis.wording import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.estimate.results import Estimate, PolicyResult, SweepResult
    from ackstate.analysis.report.contents import Contents, Curve


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


# Further policies that cannot be replayed are only counted.
_REFUSED_MAX = 10


def render(contents: Contents) -> str:
    """Return the page."""
    data = json_in_html({"grids": grids(contents)})
    parts = [
        _over_time(contents), _causes(contents), _policies(contents), _subscriptions(), _settings(contents),
    ]  # fmt: skip
    known = [part for part in parts if part is not None]
    body = "\n".join(section(title, identity, content) for identity, title, content in known)
    links = "".join(f'<li><a href="#{identity}">{title}</a></li>' for identity, title, _ in known)
    script = _own("page.js")
    return html_page.document(
        f"ackstate: redelivery of {Path(contents.result.trace).name}",
        f'<header><h1>Redelivery after a broker crash</h1>\n<p class="scope">{_scope(contents)}</p></header>\n<main>\n'
        f'{answer(contents)}\n<nav aria-label="Sections"><ul>{links}</ul></nav>\n{body}\n</main>\n'
        f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>',
        scripts=_hash_source(script),
        style=chart.STYLE + _own("page.css"),
    )


def _scope(contents: Contents) -> str:
    """Return the trace, its time and its size in a line."""
    begin_ms, end_ms = contents.curves[0].ts_ms[0], contents.curves[0].ts_ms[-1]
    count = sum(each.scope == "subscription" for each in contents.result.reference.estimates)
    size = f"{count:,} subscription{'' if count == 1 else 's'}"
    length = f"{(end_ms - begin_ms) / 1_000:,.0f} s" if end_ms - begin_ms >= 1_000 else f"{end_ms - begin_ms} ms"
    name = escape(Path(contents.result.trace).name)
    return f"Trace <b><bdi>{name}</bdi></b>: {size}, {length} from {time_text(begin_ms)}"


Part = tuple[str, str, str]


def _over_time(contents: Contents) -> Part | None:
    if not any(any(curve.value) for curve in contents.curves):
        return None
    return "over-time", "Over time", figures.total_figure(contents) + figures.worst_figures(contents)


def _causes(contents: Contents) -> Part | None:
    """Return the causes of each policy; None if there is only one, which the first screen states."""
    if all(len(causes(each)) < 2 for each in contents.result.shown):
        return None
    rows = [
        (each.name, contents.result.role_of(result) or result.label, f"{each.number:,.1f}", f"{each.share:.1%}")
        for result in contents.result.shown
        for each in causes(result)
    ]
    curve = _caused(contents)
    drawn = "" if curve is None else figures.cause_figure(contents, curve)
    return "by-cause", "Causes", table(("cause", "policy", "messages per broker crash", "share"), rows) + drawn


def _caused(contents: Contents) -> Curve | None:
    """Return the first total curve with more than one cause."""
    return next((curve for curve in contents.curves if curve.is_total and any(map(any, curve.causes))), None)


def _policies(contents: Contents) -> Part | None:
    if len(contents.result.policies) < 2:
        return None
    said = escape(contents.result.recommendation)
    refused = "".join(
        f"<p>{escape(label)}: {escape(reason)}.</p>" for label, reason in contents.result.refused[:_REFUSED_MAX]
    )
    if (more := len(contents.result.refused) - _REFUSED_MAX) > 0:
        refused += f"<p>{more:,} more policies cannot be replayed.</p>"
    is_any = any(each.total.expected for each in contents.result.policies)
    drawn = figures.price_figures(contents.result) if is_any else ""
    recommendation = f'<p id="recommendation">{said[:1].upper()}{said[1:]}.</p>'
    return "policies", "Policies", f'{recommendation}{refused}{drawn}<div class="grid" id="all-policies"></div>'


def _subscriptions() -> Part:
    return "subscriptions", "Subscriptions, topics and all", (
        '<noscript><p>This table needs JavaScript; so do the other tables that can be sorted.</p></noscript>'
        '<div class="grid" id="estimates"></div>'
    )  # fmt: skip


def _settings(contents: Contents) -> Part:
    pairs = [
        ("trace", contents.result.trace),
        ("crashes a day", f"{contents.result.crashes_per_day:g}"),
        ("policies", f"{len(contents.result.policies):,}"),
        *contents.provenance,
    ]
    return "settings", "Settings and provenance", table(("setting", "value"), pairs)


@cache
def _hash_source(script: str) -> str:
    """Return the source expression that allows this script and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _own(name: str) -> str:
    """Return a file of this package, which may be in an archive."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
