"""`ackstate pulsar snapshot` estimates redelivery if a live broker dies now. `docs/operations.md` has the JSON."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.admin_access import check_extra
from ackstate.analysis.cli.options import JsonOption, duration_option
from ackstate.analysis.cli.pulsar_access import (
    ANSWER_MIB,
    AnswerMibOption,
    NamespaceOption,
    RequestTimeoutOption,
    TenantOption,
    TokenFileOption,
    TokenHostOption,
    TopicOption,
    TrustOption,
    admin_server,
    open_admin,
)
from ackstate.analysis.cli.tables import new_table
from ackstate.analysis.durations import Duration
from ackstate.analysis.wording import counted
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.progress import Progress
    from rich.table import Table

    from ackstate.analysis.pulsar.snapshot.admin_rest import PulsarAdmin
    from ackstate.analysis.pulsar.snapshot.judgement import Judgement
    from ackstate.analysis.pulsar.snapshot.sources import Source, TopicAnswers, Unread

_Answer = TypeVar("_Answer")
_Outcomes: TypeAlias = "dict[str, _Answer | AckStateError]"

_CHECK_S = 0.5  # a write that was in progress at the judged look is done by then
_REASONS_MAX = 20  # subscriptions shown with reasons
_CLOSE_PERCENT = 80


def snapshot(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="A broker, as http://HOST:8080.")] = None,
    recorded: Annotated[
        list[Path] | None, typer.Option("--from", metavar="PATH", help="Files or directories of recorded answers.")
    ] = None,
    tenant: TenantOption = None,
    namespace: NamespaceOption = None,
    topic: TopicOption = None,
    again: Annotated[
        Duration | None,
        duration_option(
            plain_unit="s", least="1s", most="1h", help="Look again after TIME: 4s under traffic, 65s when quiet."
        ),
    ] = None,
    token_file: TokenFileOption = None,
    token_host: TokenHostOption = None,
    tls_trust_cert_path: TrustOption = "",
    request_timeout: RequestTimeoutOption = Duration(60_000),
    answer_mib_max: AnswerMibOption = ANSWER_MIB,
    top: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Show only the N that redeliver most; totals count all.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Estimate redelivery of each subscription if its broker dies now, and how close each limit is.

    Reads internalStats, stats and settings over the admin interface; changes
    nothing. These do not show the durable state, so the answer is an interval of acked entries, with the reason for
    each end. A + marks a lower bound: acked messages of partly acked batches are added to it.

    A second look (--again) narrows the interval if three writes happen in
    between: about 4s under traffic, at one write per second. On a quiet topic
    it must be longer than a flush and two writes: 65s. A shorter one narrows
    nothing.

    Exit status: 0, 1 if a topic, namespace or tenant could not be read, 2 if
    none could.
    """
    if (url is None) == (not recorded):
        raise typer.BadParameter("give either the URL of a broker or --from")
    if recorded and (again or tenant or namespace or topic):
        raise typer.BadParameter("--from is one look at all topics: without --again, --tenant, --namespace, --topic")
    with ExitStack() as stack:
        if url is not None:
            server = admin_server(
                url,
                token_file,
                timeout=request_timeout,
                trust_cert_path=tls_trust_cert_path,
                answer_mib_max=answer_mib_max,
            )
            admin = stack.enter_context(open_admin(server, token_host))
            source = _live(admin, topic or [], namespace or [], tenant or [])
        else:
            source = _recorded(recorded or [])
        found, missing = _judged(source, again=again)
    if json:
        console.write_json(_json(found, missing, top=top))
    else:
        console.show(*_text(found, missing, top=top))
    if missing:
        raise typer.Exit(1)


def _judged(source: Source, *, again: Duration | None) -> tuple[list[Judgement], list[Unread]]:
    """Return the judged subscriptions, and what could not be read."""
    from ackstate.analysis.pulsar.snapshot.judgement import Looks, by_name, judge, most_redelivered_first
    from ackstate.analysis.pulsar.snapshot.sources import Unread

    topics, unlisted = source.listing()
    pauses_s = [0.0] if again is None else [0.0, again.seconds, _CHECK_S]
    with console.progress() as progress:
        settings = _of_all(topics, source.settings, progress, "settings of topics")
        looks = [_look(source, topics, progress, pause_s) for pause_s in pauses_s]
    # The last look shows only whether a write was in progress at the look before it.
    now, others = (looks[1], looks[::2]) if len(looks) > 1 else (looks[0], [])
    found: list[Judgement] = []
    missing: list[Unread] = []
    for topic in topics:
        try:
            around = [_usable(look[topic]) for look in others]
            found += judge(topic, Looks(_had(now[topic]), *around), _had(settings[topic]))
        except AckStateError as error:
            missing.append(Unread("topic", topic, error))
    if missing and len(missing) == len(topics):
        raise missing[0].error
    return most_redelivered_first(found), sorted([*unlisted, *missing], key=lambda each: by_name(each.name))


def _look(source: Source, topics: Sequence[str], progress: Progress, pause_s: float) -> _Outcomes[TopicAnswers]:
    if pause_s:
        waiting = progress.add_task(f"the next look is in {pause_s:g} s", total=None)
        time.sleep(pause_s)
        progress.remove_task(waiting)
    return _of_all(topics, source.read, progress, "looking at topics")


def _of_all(topics: Sequence[str], ask: Callable[[str], _Answer], progress: Progress, what: str) -> _Outcomes[_Answer]:
    from ackstate.analysis.pulsar.snapshot.requests import request_all

    task = progress.add_task(what, total=len(topics))
    return request_all(topics, ask, done=lambda: progress.advance(task))


def _had(outcome: _Answer | AckStateError) -> _Answer:
    if isinstance(outcome, AckStateError):
        raise outcome
    return outcome


def _usable(answers: TopicAnswers | AckStateError) -> TopicAnswers | None:
    return None if isinstance(answers, AckStateError) else answers


def _live(admin: PulsarAdmin, topics: Sequence[str], namespaces: Sequence[str], tenants: Sequence[str]) -> Source:
    from ackstate.analysis.pulsar.snapshot.sources import LiveBroker

    return LiveBroker(admin, topics=topics, namespaces=namespaces, tenants=tenants)


def _recorded(paths: Sequence[Path]) -> Source:
    check_extra()
    from ackstate.analysis.pulsar.snapshot.sources import RecordedAnswers

    return RecordedAnswers(paths)


def _json(found: Sequence[Judgement], missing: Sequence[Unread], *, top: int | None = None) -> dict[str, Any]:
    from ackstate.analysis.pulsar.snapshot.judgement import totals

    return {
        "subscriptions": [each.to_json() for each in found[:top]],
        "subscriptions_not_shown": len(found) - len(found[:top]),
        "brokers": totals(found),
        "missing": [each.to_json() for each in missing],
    }


def _text(found: Sequence[Judgement], missing: Sequence[Unread], *, top: int | None) -> Iterator[Table | str]:
    if not found and not missing:
        yield "there are no topics"
        return
    shown = found[:top]
    yield _table(shown, missing)
    if len(found) > len(shown):
        yield f"not shown: {counted(len(found) - len(shown), 'cursor')}, none of which redelivers more"
    explained = [each for each in shown if each.messages[1] or each.comes_back is None][:_REASONS_MAX]
    for each in shown:
        yield from _reasons(each, is_explained=each in explained)
    yield from map(str, missing)
    yield from _totals(found)
    for assumed in sorted({each.assumed for each in found if each.assumed}):
        yield f"settings: {assumed}"


def _totals(found: Sequence[Judgement]) -> Iterator[str]:
    from ackstate.analysis.pulsar.snapshot.judgement import totals

    for total in totals(found):
        broker = f"broker {total['owner']}" if total["owner"] else "the broker"
        entries = _interval(total["low"], total["high"], is_lower_bound=total["is_lower_bound"])
        cursors = counted(total["subscriptions"], "cursor")
        partly = total["partly_acked_messages"]
        more = f", and up to about {partly:,} messages of partly acked batches" if partly else ""
        yield f"if {broker} dies now: {entries} acked entries of {cursors}{more}"


def _table(found: Sequence[Judgement], missing: Sequence[Unread]) -> Table:
    from ackstate.pulsar_conf import METADATA_RANGES

    table = new_table("topic", "subscription", "acked", "ranges", "comes back", "closest limit", "used", "holes left")
    for each in found:
        back = each.comes_back
        entries = _interval(back.low.entries, back.high.entries, is_lower_bound=each.is_lower_bound) if back else "-"
        closest = each.limits[0] if each.limits else None
        # More ranges than the metadata store accepts lose nothing: that limit does not bound holes.
        holes = next(
            (
                f"{use.holes_left:,}"
                for use in each.limits
                if use.holes_left is not None and use.setting != METADATA_RANGES
            ),
            "-",
        )
        limit = (closest.setting, f"{closest.percent:.1f} %") if closest else ("-", "-")
        numbers = (f"{len(each.look.deleted):,}", f"{each.look.deleted.range_count:,}")
        table.add_row(each.topic, each.subscription, *numbers, entries, *limit, holes)
    for unread in missing:
        table.add_row(unread.name, *["-"] * 3, "not read", *["-"] * 3)
    return table


def _reasons(each: Judgement, *, is_explained: bool) -> Iterator[str]:
    """Yield the reasons for both ends of an interval if requested, then the remarks."""
    lines = [*(_explanation(each) if is_explained else ()), *each.remarks]
    if lines:
        yield f"{each.topic}, {each.subscription}:"
    yield from (f"  {line}" for line in lines)


def _explanation(each: Judgement) -> Iterator[str]:
    if each.comes_back is not None:
        yield f"at least {each.comes_back.low.entries:,}: {each.comes_back.low.why}"
        yield f"at most {each.comes_back.high.entries:,}: {each.comes_back.high.why}"
    if each.cut:
        yield f"cut off by the limit if written now: {each.cut:,}"
    if each.comes_back is not None:
        yield f"if the topic is unloaded instead: {each.if_unloaded:,}"
    for use in each.limits:
        if use.percent >= _CLOSE_PERCENT:
            yield f"{use.setting}: {use.used:,} of {use.limit:,} {use.unit}: {use.advice}"


def _interval(low: int, high: int, *, is_lower_bound: bool) -> str:
    """Return an interval as text; with a + if it is a lower bound."""
    return (f"{low:,}" if low == high else f"{low:,} to {high:,}") + "+" * is_lower_bound
