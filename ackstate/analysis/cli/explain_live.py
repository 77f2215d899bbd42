"""`ackstate explain URL`: the ack holes of the open subscriptions of a live broker, from its admin server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

import typer

from ackstate.analysis.admin_client import AdminServer, topic_path
from ackstate.analysis.cli import console
from ackstate.analysis.cli.admin_access import check_extra, read_token
from ackstate.analysis.cli.explain import holes_table
from ackstate.analysis.wording import counted
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.table import Table

    from ackstate.analysis.live_explanation import ExplainedSubscription
    from ackstate.analysis.pulsar.snapshot.admin_rest import PulsarAdmin
    from ackstate.analysis.pulsar.snapshot.sources import Unread

_TIMEOUT_S = 60.0
_ANSWER_BYTES_MAX = 64 * 1024 * 1024


class _TopicExplanation(NamedTuple):
    topic: str
    now_ms: int
    subscription: ExplainedSubscription


def explain_live(
    url: str,
    *,
    topic: str | None,
    subscription: str | None,
    top: int,
    now_ms: int | None,
    json: bool,
    token_file: Path | None,
    trust_cert_path: str,
) -> None:
    """Print the holes of the open subscriptions of a broker.

    Args:
        url: The URL of its admin server.
        topic: Only this topic; None for all that are open.
        subscription: Only subscriptions of this name; None for all.
        top: The most holes of each.
        now_ms: Ages are counted from this time; None for the present of the broker.
        json: Print JSON instead of tables.
        token_file: A file with the token of the server.
        trust_cert_path: Certificates to trust instead of the system's; empty for the system's.

    Raises:
        AckStateError: No topic can be read, or none has such a subscription.
    """
    check_extra()
    from ackstate.analysis.pulsar.snapshot.admin_rest import PulsarAdmin
    from ackstate.analysis.pulsar.snapshot.sources import LiveBroker, Unread

    server = AdminServer(url, read_token(token_file), _TIMEOUT_S, trust_cert_path, answer_bytes_max=_ANSWER_BYTES_MAX)
    query = {"top": str(top)} | ({} if now_ms is None else {"nowMs": str(now_ms)})
    found: list[_TopicExplanation] = []
    missing: list[Unread] = []
    with PulsarAdmin(server) as admin:
        topics, unlisted = LiveBroker(admin, topics=[] if topic is None else [topic]).listing()
        for each in topics:
            try:
                found += _explained(admin, each, query)
            except AckStateError as error:
                missing.append(Unread("topic", each, error))
    if missing and len(missing) == len(topics):
        raise missing[0].error
    missing = [*unlisted, *missing]
    chosen = [each for each in found if subscription in {None, each.subscription.subscription}]
    if not chosen and subscription is not None:
        names = ", ".join(f"{each.subscription.subscription!r} of {each.topic!r}" for each in found) or "none"
        raise AckStateError(f"{url} has no open subscription {subscription!r}; its subscriptions are: {names}")
    if json:
        console.write_json(_json(url, chosen, missing, now_ms=now_ms))
    else:
        console.show(*_text(chosen, missing))
    if missing:
        raise typer.Exit(1)


def _explained(admin: PulsarAdmin, topic: str, query: dict[str, str]) -> Iterator[_TopicExplanation]:
    from ackstate.analysis.live_explanation import ExplainedTopic
    from ackstate.analysis.pulsar.snapshot.internal_stats import read_object

    answer = read_object(
        ExplainedTopic, admin.get(f"{topic_path(topic)}/explain?{urlencode(query)}"), what=f"{topic}: explain"
    )
    return (_TopicExplanation(topic, answer.now_ms, each) for each in answer.subscriptions)


def _json(
    url: str, found: Sequence[_TopicExplanation], missing: Sequence[Unread], *, now_ms: int | None
) -> dict[str, Any]:
    present_ms = max((each.now_ms for each in found), default=0) if now_ms is None else now_ms
    cursors = [{"topic": topic, "status": "ok", "problems": []} | each.model_dump() for topic, _, each in found]
    unread = [each.to_json() for each in missing]
    return {"store": url, "now_ms": present_ms, "cursors": cursors, "missing": unread}


def _text(found: Sequence[_TopicExplanation], missing: Sequence[Unread]) -> Iterator[Table | str]:
    for topic, _, each in found:
        yield f"{topic}, {each.subscription}: {each.type}"
        yield (
            f"mark-delete {each.mark_delete}, backlog {each.backlog:,}, {counted(each.range_count, 'range')} in "
            f"{counted(each.record_bytes, 'byte')}, {counted(each.hole_count, 'hole')}; "
            f"{counted(each.redelivery_if_crashed, 'acked message')} redelivered if it crashed now"
        )
        yield from (f"  blocked: {block.detail}" for block in each.blocked)
        if each.holes:
            yield holes_table((hole, hole.detail) for hole in each.holes)
        if each.hole_count > len(each.holes):
            yield f"{each.hole_count - len(each.holes):,} more (--top)"
        yield ""
    yield from map(str, missing)
    yield counted(len(found), "cursor")
