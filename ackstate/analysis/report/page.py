"""Renders the report: one HTML file that sends no request; its only script sorts and filters its tables.

Its first screen has the amount, the subscriptions, the causes, the change and its price.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ackstate.analysis import html_page
from ackstate.analysis.estimate.results import GAIN_MIN, short_number
from ackstate.analysis.estimate.settings import (
    PAUSE_KEY,
    PULSAR_KEYS,
    admin_commands,
    broker_settings_of,
    policy_text,
    runs_on_pulsar,
    setting_text,
)
from ackstate.analysis.html_page import escape, section, table
from ackstate.analysis.report.contents import (
    CAUSE_NAMES,
    Share,
    cause_figure,
    causes,
    count_text,
    headline,
    main_subscriptions,
    number_text,
    policy_names,
    price_figures,
    role_text,
    short_name,
    time_text,
    total_figure,
    worst_figures,
)
from ackstate.analysis.wording import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.estimate.results import Estimate, PolicyResult, Recommendation, SweepResult
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.report.contents import Contents, Curve


_MAIN_MAX = 3
_NAMESPACES_MAX = 3


def answer(contents: Contents) -> str:
    """Return the first screen."""
    result = contents.result
    cards = "".join(_card(contents, each) for each in contents.result.shown)
    warnings = "".join(f'<p class="warning">{escape(each)}.</p>' for each in result.warnings)
    parts = [
        _part("who", "Most affected", _who(contents)), _part("why", "Why", _why(contents)),
        _part("change", "What to change", _change(contents)), _part("price", "What it costs", _price(contents)),
    ]  # fmt: skip
    return (
        f'<section id="answer" aria-label="Answer">\n<p class="lead" id="headline">{escape(headline(result))}.</p>\n'
        f'<div class="cards">{cards}</div>\n{warnings}<div class="answers">{"".join(parts)}</div>\n</section>'
    )


def _part(identity: str, title: str, content: str) -> str:
    return f'<section id="{identity}"><h2>{title}</h2>{content}</section>' if content else ""


def _card(contents: Contents, policy: PolicyResult) -> str:
    total, role = policy.total, role_text(contents.result, policy)
    average = "no duration" if total.expected is None else number_text(total, "expected")
    spread = [("p99", "p99"), ("at worst", "max")]
    said = ", ".join(f"{name} {number_text(total, key)}" for name, key in spread if getattr(total, key) is not None)
    return (
        f'<div class="card"><h2>{escape(role)}</h2><p class="big">{average}</p>'
        f"<p>messages per broker crash; {said}</p><p>{escape(_settings_text(contents, policy))}</p></div>"
    )


def _settings_text(contents: Contents, policy: PolicyResult) -> str:
    if policy.policy is None:
        return "as the persists of the trace made acks durable"
    if policy.never_flushed:
        return "never flushed in this trace: the trace is too short for this policy"
    words = _policy_text(policy.policy)
    source = contents.result.current_source if policy is contents.result.current else ""
    return f"{words} ({source})" if source else words


def _policy_text(policy: Policy) -> str:
    if not runs_on_pulsar(policy):
        return policy_text(policy)
    shown = [key for key in policy.to_mapping() if key not in PULSAR_KEYS]
    return f"Pulsar 4.2: {', '.join(setting_text(key, policy.texts[key]) for key in shown)}"


def _who(contents: Contents) -> str:
    reference = contents.result.reference
    found = main_subscriptions(reference, count_max=_MAIN_MAX)
    count = sum(each.scope == "subscription" for each in reference.estimates)
    if not found:
        return ""
    rest = count - len(found)
    share = 1 - sum(each.share for each in found)
    more = f"<p>{rest:,} other{'s' if rest != 1 else ''}: {share:.0%}</p>" if rest and share >= 0.005 else ""
    return _shares(found, "of ") + more


def _why(contents: Contents) -> str:
    found = causes(contents.result.reference)
    return _shares(found) if found else ""


def _shares(found: Sequence[Share], before_detail: str = "") -> str:
    rows = "".join(
        f'<li><span class="name"><bdi>{escape(short_name(each.name))}</bdi> '
        f"<small>{before_detail}<bdi>{escape(_detail(each))}</bdi></small></span>"
        f'<span class="amount">{count_text(each.number)} <small>{escape(_percent(each.share))}</small></span>'
        f'<span class="share" aria-hidden="true"><span style="width:{each.share:.1%}"></span></span></li>'
        for each in found
    )
    return f'<ul class="shares">{rows}</ul>'


def _detail(each: Share) -> str:
    """Return a topic, perhaps shortened, or the explanation of a cause."""
    return each.detail if each.name in CAUSE_NAMES.values() else short_name(each.detail)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "< 1%"


def _change(contents: Contents) -> str:
    result, advice = contents.result, contents.result.advice
    if len(result.policies) < 2 or advice is None:
        command = f"ackstate sweep {shlex.quote(result.trace)} --report report.html"
        return f"<p>No other policy was compared. This command compares some:</p>{_code([command])}"
    if advice.recommended is None:
        return f'<p>Nothing: {escape(advice.sentence)}.</p><p class="aside">{escape(advice.rule)}.</p>{_native(advice)}'
    items = "".join(
        f"<li>{escape(each.text)}"
        + ("" if each.gain is None else f": saves {count_text(each.gain)} messages per crash")
        + "</li>"
        for each in advice.changes
    )
    said = f"<ul>{items}</ul>" if items else f"<p>{escape(advice.sentence)}.</p>"
    return (
        f'{said}<p class="aside">{escape(advice.rule)}.</p>'
        + _changed_settings(contents, advice)
        + _pause(contents)
        + _native(advice)
    )


def _changed_settings(contents: Contents, advice: Recommendation) -> str:
    """Return the changed settings in the form in which they are set."""
    policy = None if advice.recommended is None else advice.recommended.policy
    if policy is None:
        return ""
    if not runs_on_pulsar(policy):
        lines = [f"{each.key}={each.after}" for each in advice.changes]
        if not lines:
            return ""
        return (
            f"<p>Settings of ackstate's cursor (<code>CursorConfig</code>):</p>{_code(lines)}"
            '<p class="aside">Is this a Pulsar broker? Then compare its own settings: '
            "<code>ackstate sweep --broker-conf broker.conf</code>.</p>"
        )
    settings = broker_settings_of(policy, [each.key for each in advice.changes])
    commands = admin_commands(settings, _namespaces(contents))
    conf = f"<p><code>broker.conf</code>, on every broker, then restart:</p>{_code([each.line for each in settings])}"
    if not commands:
        return conf
    return (
        f"{conf}<details><summary>Without a restart</summary><p>The rate of writes is a policy of a namespace, too. "
        f"The command replaces all of its persistence policy: see "
        f"<code>pulsar-admin namespaces get-persistence</code> first.</p>{_code(commands)}</details>"
    )


def _namespaces(contents: Contents) -> list[str]:
    """Return the namespaces of the worst subscriptions."""
    found = main_subscriptions(contents.result.reference, count_max=100)
    names = [each.detail.partition("://")[2].rpartition("/")[0] for each in found]
    return [*dict.fromkeys(name for name in names if name.count("/") == 1)][:_NAMESPACES_MAX]


def _pause(contents: Contents) -> str:
    """Return Pulsar's own remedy for acks beyond the range limit, which is not replayed."""
    policy, total = contents.result.reference.policy, contents.result.reference.total
    is_cut = (total.cut_by_ranges or 0) > GAIN_MIN * (total.expected or 0)
    if policy is None or not runs_on_pulsar(policy) or not is_cut:
        return ""
    command = f"pulsar-admin brokers update-dynamic-config --config {PAUSE_KEY} --value true"
    return (
        "<details><summary>Against acks beyond the range limit</summary><p>Pulsar can stop dispatch to a subscription "
        f"whose acks cannot all be persisted. This report does not replay that.</p>{_code([command])}</details>"
    )


def _native(advice: Recommendation) -> str:
    if advice.native is None or advice.native.policy is None:
        return ""
    total = advice.native.total
    return (
        f'<p class="aside">Not a setting of Pulsar: ackstate\'s native journal '
        f"({escape(policy_text(advice.native.policy))}) would redeliver {number_text(total, 'expected')} messages "
        f"per broker crash, with {short_number(total.prices.bytes or 0)} bytes/s.</p>"
    )


def _price(contents: Contents) -> str:
    result = contents.result
    current, recommended = contents.result.reference, result.recommended
    shown = [current] if recommended is None else [current, recommended]
    head = "".join(f'<th scope="col">{escape(role_text(result, each))}</th>' for each in shown)
    columns = zip(*(each.total.prices for each in shown), strict=True)
    rows = list(zip(("writes/s", "bytes/s", "blocked, s"), columns, strict=True))
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{_number(each)}</td>" for each in numbers)}</tr>'
        for name, numbers in rows
        if any(numbers)
    )
    if not body:
        return ""
    return f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table>"


def _number(number: float | None) -> str:
    return "-" if number is None else short_number(number)


def _code(lines: Sequence[str]) -> str:
    return f'<pre tabindex="0">{chr(10).join(map(escape, lines))}</pre>'


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
        style=html_page.STYLE + _own("page.css"),
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
    return "over-time", "Over time", total_figure(contents) + worst_figures(contents)


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
    drawn = "" if curve is None else cause_figure(contents, curve)
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
    drawn = price_figures(contents.result) if is_any else ""
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
