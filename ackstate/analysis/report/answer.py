"""Renders the first screen of the report: the amount, the subscriptions, the causes, the change and its price."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

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
from ackstate.analysis.html_page import escape
from ackstate.analysis.report.contents import (
    CAUSE_NAMES,
    Share,
    causes,
    count_text,
    headline,
    main_subscriptions,
    number_text,
    role_text,
    short_name,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.estimate.results import PolicyResult, Recommendation
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.report.contents import Contents

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
        + _settings(contents, advice)
        + _pause(contents)
        + _native(advice)
    )


def _settings(contents: Contents, advice: Recommendation) -> str:
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
