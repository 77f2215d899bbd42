"""Renders the report: one HTML file, whose only scripts are plotly.js and its own, and which sends no request."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plotly.offline import get_plotlyjs, get_plotlyjs_version

from ackstate.analysis import html_page
from ackstate.analysis.html_page import printable, section, table
from ackstate.analysis.pulsar.policy import PolicyName
from ackstate.analysis.pulsar.replay_table import SCORE_HEADS, VERDICT_HEADS, score_cells, summary_line, verdict_cells
from ackstate.analysis.report import figures
from ackstate.analysis.report.contents import count_text, headline
from ackstate.analysis.report.figures import CAUSE_NAMES
from ackstate.analysis.report.inputs import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.estimate.results import Estimate, PolicyResult
    from ackstate.analysis.report.contents import Contents

_SCOPES = ("subscription", "topic", "namespace", "total")
_CAUSES = ("not_flushed", "young", "cut_by_ranges", "cut_by_bytes", "cut_by_route")
_ESTIMATE_COLUMNS = (
    ("subscription", "text"), ("topic", "text"), ("expected", "mean"), ("p50", "count"), ("p90", "count"),
    ("p99", "count"), ("max", "count"), ("max at (UTC)", "time"), ("duplicates a day", "mean"),
    ("writes", "count"), ("bytes written", "count"), ("bytes kept", "count"),
)  # fmt: skip
_POLICY_COLUMNS = (
    ("policy", "text"), ("expected", "mean"), ("p99", "count"), ("max", "count"), ("duplicates a day", "mean"),
    ("writes/s", "mean"), ("bytes/s", "mean"), ("blocked s", "mean"), ("not beaten", "text"),
)  # fmt: skip
_POINT_COLUMNS = (
    ("policy", "text"), ("ended by", "text"), ("predicted", "mean"), ("observed", "mean"), ("runs", "count"),
    ("came true", "text"),
)  # fmt: skip
_ZOOM = '<span class="mouse">Drag to look closer, double-click to see all.</span>'


def render(contents: Contents) -> str:
    """Return the page."""
    parts = [_over_time(contents), _subscriptions(), _causes(contents), _policies(contents), _calibration(contents)]
    parts += [_broker_runs(contents), _bad_rows(contents)]
    titles = [(identity, title) for identity, title, _ in parts]
    body = "\n".join(section(title, identity, content) for identity, title, content in parts)
    data = _embedded(contents)
    settings = _settings(contents, size=len(data))
    links = "".join(f'<li><a href="#{identity}">{title}</a></li>' for identity, title in [*titles, _SETTINGS])
    recommended = "" if len(contents.result.policies) < 2 else (
        f'<p class="lead" id="recommendation">Of {len(contents.result.policies):,} policies: '
        f"{escape(contents.result.recommendation)}.</p>"
    )  # fmt: skip
    scripts = [get_plotlyjs(), _own("page.js")]
    return html_page.document(
        f"ackstate: redelivery of {printable(Path(contents.result.trace).name)}",
        f'<h1>Redelivery if crashed</h1>\n<p class="lead" id="headline">{escape(headline(contents.result))}.</p>\n'
        f"{recommended}<noscript><p>The plots and the tables need JavaScript, which this browser does not run.</p>"
        f'</noscript>\n<nav aria-label="Sections"><ul>{links}</ul></nav>\n{body}\n'
        f'{section(_SETTINGS[1], _SETTINGS[0], settings)}\n<script type="application/json" id="data">{data}</script>\n'
        + "\n".join(f"<script>{script}</script>" for script in scripts),
        scripts=" ".join(map(_hash_source, scripts)),
        style=_own("page.css"),
    )


_SETTINGS = ("settings", "Settings and provenance")


def _embedded(contents: Contents) -> str:
    """Return the data of the page's script: JSON in which no character can end the script or start a comment."""
    text = json.dumps({"figures": _figures(contents), "grids": _grids(contents)}, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _figures(contents: Contents) -> list[dict[str, Any]]:
    found = [figures.total_figure(contents)]
    if any(not curve.is_total for curve in contents.curves):
        found.append(figures.worst_figure(contents))
    if causes := _caused(contents):
        found.append(figures.cause_figure(causes))
    if _is_sweep(contents):
        found.append(figures.price_figure(contents.result))
    if contents.inputs.calibration:
        found.append(figures.calibration_figure(contents.inputs.calibration))
    if runs := _runs(contents):
        found.append(figures.broker_figure(runs))
    return found


def _is_sweep(contents: Contents) -> bool:
    return len(contents.result.policies) > 1


def _caused(contents: Contents) -> Any:
    """Return the last total curve with more than one cause: that of the recommended policy, if any."""
    return next((curve for curve in reversed(contents.curves) if curve.is_total and any(map(any, curve.causes))), None)


def _runs(contents: Contents) -> Sequence[Any]:
    return (contents.inputs.broker_runs or {}).get(PolicyName.PULSAR_4, ())


def _grids(contents: Contents) -> list[dict[str, Any]]:
    views = [
        {"label": f"{scope}s, {result.label}" if scope != "total" else f"all at once, {result.label}",
         "rows": [_estimate_row(each) for each in result.estimates if each.scope == scope]}
        for result in contents.shown for scope in _SCOPES
    ]  # fmt: skip
    views = [view for view in views if view["rows"]]
    grids = [_grid("estimates", "Estimates", _ESTIMATE_COLUMNS, views, sort=2)]
    result = contents.result
    if _is_sweep(contents):
        rows = [_policy_row(each) for each in result.policies]
        picked = None if result.recommended is None else result.recommended.label
        grids.append(_grid("all-policies", "Policies", _POLICY_COLUMNS, [{"label": "", "rows": rows}], sort=1))
        grids[-1] |= {"descending": False, "picked": picked}
    if points := contents.inputs.calibration:
        rows = [
            [printable(each.policy), KINDS[each.kind], each.predicted, each.observed, each.runs, _yes(each.holds)]
            for each in points
        ]
        grids.append(_grid("points", "Calibration", _POINT_COLUMNS, [{"label": "", "rows": rows}], sort=2))
    if runs := _runs(contents):
        rows = [[printable(each.prediction.topic), *verdict_cells(each)] for each in runs]
        columns = [(name, "text") for name in VERDICT_HEADS]
        grids.append(_grid("each-run", "Recorded runs", columns, [{"label": "", "rows": rows}], sort=0))
        grids[-1] |= {"descending": False}
    return grids


def _grid(
    identity: str, title: str, columns: Sequence[tuple[str, str]], views: Sequence[dict[str, Any]], *, sort: int
) -> dict[str, Any]:
    named = [{"label": label, "kind": kind} for label, kind in columns]
    return {
        "id": identity, "title": title, "columns": named, "views": views, "sort": sort, "descending": True,
        "picked": None,
    }  # fmt: skip


def _estimate_row(each: Estimate) -> list[Any]:
    names = [printable(each.subscription) or "(all)", printable(each.topic or each.namespace) or "(all)"]
    return [
        *names, each.expected, each.p50, each.p90, each.p99, each.max, each.max_ts_ms, each.duplicates_per_day,
        each.write_count, each.bytes_written, each.bytes_kept,
    ]  # fmt: skip


def _policy_row(each: PolicyResult) -> list[Any]:
    total = each.total
    # A recording lacks the bytes that were written.
    prices = [total.per_second(total.bytes_written), (total.blocked_ms or 0) / 1_000] if each.policy else [None, None]
    return [
        each.label, total.expected, total.p99, total.max, total.duplicates_per_day,
        total.per_second(total.write_count), *prices, "yes" if each.is_on_front else "",
    ]  # fmt: skip


def _over_time(contents: Contents) -> tuple[str, str, str]:
    crashes = contents.crashes
    died = "No process died while the trace was recorded." if not crashes.count else (
        f"Processes died at {crashes.count:,} moment{'' if crashes.count == 1 else 's'}"
        + (f", of which the first {len(crashes.ts_ms):,} are marked." if crashes.count > len(crashes.ts_ms) else ".")
    )  # fmt: skip
    content = _figure("total", "All subscriptions at once, as if the broker died", f"{died} {_ZOOM}")
    count = sum(not curve.is_total for curve in contents.curves)
    if count:
        content += _figure("worst", f"The {count} worst subscriptions" if count > 1 else "The worst subscription", "")
    return "over-time", "Over time", content


def _subscriptions() -> tuple[str, str, str]:
    return "subscriptions", "Subscriptions, topics and all", '<div class="grid" id="estimates"></div>'


def _causes(contents: Contents) -> tuple[str, str, str]:
    rows = [
        (result.label, name, number, each) for result in contents.shown for name, number, each in _shares(result.total)
    ]
    curve = _caused(contents)
    drawn = "" if curve is None else _figure("causes", "All subscriptions at once, by cause", _ZOOM)
    if not rows:
        return "by-cause", "Causes", "<p>Nothing is redelivered, or the trace has no duration: there is no mean.</p>"
    head = "".join(f'<th scope="col">{each}</th>' for each in ("cause", "policy", "expected", "share", ""))
    body = "".join(
        f"<tr><td>{name}</td><td>{escape(label)}</td><td>{count_text(number)}</td><td>{share:.1%}</td>"
        f'<td><meter min="0" max="1" value="{share:.4f}">{share:.1%}</meter></td></tr>'
        for label, name, number, share in rows
    )
    told = "" if curve else "<p>There is a single cause: acked, but not yet flushed.</p>"
    return "by-cause", "Causes", f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{told}{drawn}"


def _shares(total: Estimate) -> list[tuple[str, float, float]]:
    if not total.expected:
        return []
    numbers = [getattr(total, cause) or 0.0 for cause in _CAUSES]
    return [(name, number, number / total.expected) for name, number in zip(CAUSE_NAMES, numbers, strict=True)]


def _policies(contents: Contents) -> tuple[str, str, str]:
    if not _is_sweep(contents):
        text = "No other policy was compared. <code>ackstate sweep</code> compares many, and recommends one."
        return "policies", "Policies", f"<p>{text}</p>"
    caption = "Each mark is a policy: the lower the better, the further left the cheaper."
    drawn = _figure("prices", "Redelivery and its price", caption)
    return "policies", "Policies", f'{drawn}<div class="grid" id="all-policies"></div>'


def _calibration(contents: Contents) -> tuple[str, str, str]:
    points = contents.inputs.calibration
    if points is None:
        return "calibration", "Calibration", "<p>No calibration was given: it compares predictions with real kills.</p>"
    if not points:
        return "calibration", "Calibration", "<p>The calibration that was given has no points.</p>"
    lines = []
    for kind, name in KINDS.items():
        mine = [point for point in points if point.kind == kind]
        if mine:
            spared = sum(point.observed < point.predicted for point in mine)
            lines.append(
                f"By {name}: {sum(point.holds for point in mine):,} of {len(mine):,} predictions came true, "
                f"{spared:,} with less observed than predicted, in {sum(point.runs for point in mine):,} runs."
            )
    drawn = _figure("calibrated", "Observed over predicted", " ".join(lines))
    return "calibration", "Calibration", f'{drawn}<div class="grid" id="points"></div>'


def _broker_runs(contents: Contents) -> tuple[str, str, str]:
    title = "Real Pulsar brokers"
    verdicts = contents.inputs.broker_runs
    if not verdicts or not _runs(contents):
        said = "No recorded runs of brokers were given" if verdicts is None else "The file of recorded runs has none"
        return "brokers", title, f"<p>{said}: they show how a prediction compares with a real Pulsar broker.</p>"
    scores = table(SCORE_HEADS, [(name.value, *score_cells(each)) for name, each in verdicts.items()])
    told = f"Predicts what a real Pulsar broker redelivers. {escape(summary_line(_runs(contents)))}."
    wrong = "<p>The same with policies that are wrong on purpose, to prove that the check can fail:</p>"
    drawn = _figure("runs-plot", "Predicted and measured", "")
    return "brokers", title, f'<p>{told}</p>{drawn}<div class="grid" id="each-run"></div>{wrong}{scores}'


def _bad_rows(contents: Contents) -> tuple[str, str, str]:
    origin, title = contents.inputs.origin, "Bad rows"
    if origin is None or origin.rows is None:
        said = "The origin of the trace was not given" if origin is None else "The trace was generated, not converted"
        return "bad-rows", title, f"<p>{said}: the number of bad rows is unknown.</p>"
    if not origin.bad_rows:
        return "bad-rows", title, f"<p>None of {origin.rows:,} rows was bad.</p>"
    rows = [(what, f"{count:,}", "; ".join(map(printable, first))) for what, count, first in origin.bad]
    told = f"<p>{origin.bad_rows:,} of {origin.rows:,} rows were bad and skipped.</p>"
    return "bad-rows", title, told + table(("error", "rows", "first rows"), rows)


def _settings(contents: Contents, *, size: int) -> str:
    made = contents.inputs.origin.plan if contents.inputs.origin else ()
    pairs = [
        ("trace", contents.result.trace),
        ("crashes a day", f"{contents.result.crashes_per_day:g}"),
        ("policies", f"{len(contents.result.policies):,}"),
        *contents.provenance,
        *((f"trace generated with {name}", text) for name, text in made),
        ("plotly.js", get_plotlyjs_version()),
        ("size of this page", f"{len(get_plotlyjs()) / 1e6:.1f} MB of plotly.js, {size / 1e6:.2f} MB of data"),
    ]
    return table(("what", "value"), [(name, printable(text)) for name, text in pairs])


def _figure(identity: str, title: str, caption: str) -> str:
    told = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure><h3>{title}</h3><div class="plot" id="{identity}"></div>{told}</figure>'


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "NO"


@cache
def _hash_source(script: str) -> str:
    """Return the source expression that allows this script and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _own(name: str) -> str:
    """Return a file of this package, which may be in an archive."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
