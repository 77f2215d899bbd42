"""Renders the report: one HTML file, whose only script sorts its tables, and which sends no request."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate.analysis import chart, html_page
from ackstate.analysis.html_page import escape, section, table
from ackstate.analysis.report import figures
from ackstate.analysis.report.answer import answer
from ackstate.analysis.report.contents import causes, time_text
from ackstate.analysis.report.grids import grids, json_in_html

if TYPE_CHECKING:
    from ackstate.analysis.report.contents import Contents, Curve


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
