"""`ackstate explain` lists the unacked messages that split a cursor's ranges, and the space that acking them frees.

It reads a store alone, as `ackstate inspect`, or requests the answer from the admin server of the broker that has the
store open. `docs/json-output.md` describes the JSON.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.console import new_table
from ackstate.analysis.cli.options import JsonOption, SubscriptionOption, TopicOption
from ackstate.analysis.cli.pulsar import TrustOption, opened_broker
from ackstate.analysis.cli.store import (
    CopyBytesOption,
    chosen_cursors,
    opened_store,
    problem_json,
    remarks,
    unread_json,
)
from ackstate.analysis.wording import counted
from ackstate.errors import AckStateError
from ackstate.stores.pulsar import check_topic

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from ackstate.analysis.admin.internal_stats import ExplainedHole, ExplainedSubscription
    from ackstate.dispatch.explain import HoleReport, StoredHoles
    from ackstate.inspect import CursorInspection


_TIME_MS_MAX = 2**63 - 1
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1))


def explain(
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            help="A store's directory, bookkeeper://HOST:PORT[,HOST:PORT]/ROOT, the http:// URL of a live broker, or"
            " pulsar+zk://HOST:PORT[/TENANT[/NAMESPACE[/TOPIC]]] for a live Pulsar cluster.",
        ),
    ],
    topic: TopicOption = None,
    subscription: SubscriptionOption = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Show at most N holes of each cursor.")] = 10,
    now_ms: Annotated[
        int | None,
        typer.Option(metavar="MS", min=0, max=_TIME_MS_MAX, help="Milliseconds since 1970, instead of now."),
    ] = None,
    json: JsonOption = False,
    copy_bytes_max: CopyBytesOption = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With a URL: a file that holds the server's token.")
    ] = None,
    tls_trust_cert_path: TrustOption = "",
) -> None:
    """Print the ack holes of each cursor, their causes and costs. Change nothing.

    The hole that holds back the mark-delete position comes first, then the
    holes that cost most.

    With the URL of the admin server of a broker that embeds ackstate, consumers
    and blocked limits are known, too. With that of a broker of Pulsar, the
    cluster's metadata store is read that its configuration names.

    Exit status: 0, 1 if a cursor cannot be opened or a topic cannot be read,
    2 if the store or no topic can be read.
    """
    if store.lower().startswith(("http://", "https://")):
        found = _explain_live(
            store, topic=topic, subscription=subscription, top=top, now_ms=now_ms, json=json, token_file=token_file,
            trust_cert_path=tls_trust_cert_path,
        )  # fmt: skip
        if found is None:
            return
        store, topic = found, check_topic(topic) if topic else None
    elif token_file is not None or tls_trust_cert_path:
        option = "--tls-trust-cert-path" if token_file is None else "--token-file"
        raise typer.BadParameter(f"{option} is for the http:// or https:// URL of a broker alone")
    from ackstate.dispatch.explain import explain_stored
    from ackstate.inspect import find_cursors, inspect_cursor
    from ackstate.topic.subscriptions import SCHEDULE, find_message_log

    present_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    explained: list[tuple[CursorInspection, StoredHoles | None]] = []
    with opened_store(store, copy_bytes_max=copy_bytes_max) as opened:
        names = [name for name in find_cursors(opened) if name.subscription != SCHEDULE]
        for name in chosen_cursors(names, store=store, topic=topic, subscription=subscription):
            cursor = inspect_cursor(opened, name)
            held = None
            if cursor.content is not None and not cursor.problems:
                # Read after the state, so that in a live store the log is not older than the state.
                log = find_message_log(opened, name.topic)
                held = explain_stored(cursor.content, log, top=top, now_ms=present_ms)
            explained.append((cursor, held))
        missing = unread_json(opened) if topic is None else []
    if json:
        cursors = [_cursor_json(cursor, held) for cursor, held in explained]
        console.write_json({"store": store, "now_ms": present_ms, "cursors": cursors, "missing": missing})
    else:
        for cursor, held in explained:
            console.show(*_cursor_text(cursor, held))
        console.show(*(f"{each['path']}: {each['why']}" for each in missing), counted(len(explained), "cursor"))
    if missing or any(cursor.problems for cursor, _ in explained):
        raise typer.Exit(1)


def _cursor_json(cursor: CursorInspection, held: StoredHoles | None) -> dict[str, Any]:
    return {
        "topic": cursor.name.topic,
        "subscription": cursor.name.subscription,
        "status": str(cursor.status),
        "mark_delete": held and str(held.mark_delete),
        "backlog": held and held.backlog,
        "range_count": held and held.range_count,
        "record_bytes": held and held.record_bytes,
        "hole_count": held and held.hole_count,
        "holes": [
            asdict(hole) | {"first": str(hole.first), "last": str(hole.last), "why": hole.why.name}
            for hole in (held.holes if held else ())
        ],
        "problems": [problem_json(problem) for problem in cursor.problems],
    }


def _cursor_text(cursor: CursorInspection, held: StoredHoles | None) -> Iterator[Table | str]:
    yield f"{cursor.name.topic}, {cursor.name.subscription}: {cursor.status}"
    yield from (f"  {line}" for line in remarks([cursor]))
    if held is not None:
        yield _state_text(held)
        yield from _holes_text(held, [f"{hole.why}: {hole.detail}" for hole in held.holes])
    yield ""


def _state_text(held: StoredHoles | ExplainedSubscription) -> str:
    backlog = "unknown" if held.backlog is None else f"{held.backlog:,}"
    return (
        f"mark-delete {held.mark_delete}, backlog {backlog}, {counted(held.range_count, 'range')} "
        f"in {counted(held.record_bytes, 'byte')}, {counted(held.hole_count, 'hole')}"
    )


def _holes_text(held: StoredHoles | ExplainedSubscription, whys: Sequence[str]) -> Iterator[Table | str]:
    """Yield the table of holes, each with the reason why it is there."""
    table = new_table(
        "first", "last", "entries", "age", "costs\nbytes", "frees\nbytes", "frees\nranges", "mark-delete\nmoves", "why"
    )  # fmt: skip
    holes: Sequence[HoleReport | ExplainedHole] = held.holes
    for hole, why in zip(holes, whys, strict=True):
        numbers = (hole.cost_bytes, hole.freed_bytes, hole.freed_ranges, hole.mark_delete_advance)
        age = "-" if hole.age_ms is None else _duration(hole.age_ms)
        counts = (f"{number:,}" for number in numbers)
        table.add_row(str(hole.first), str(hole.last), f"{hole.entry_count:,}", age, *counts, why)
    if holes:
        yield table
    if held.hole_count > len(holes):
        yield f"{held.hole_count - len(holes):,} more (--top)"


def _duration(duration_ms: int) -> str:
    """Return a time in its two largest units: 3 d 4 h, or 12 s."""
    parts, rest = [], duration_ms
    for name, unit_ms in _UNITS:
        number, rest = divmod(rest, unit_ms)
        parts.append((number, name))
    largest = next((at for at, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number:,} {name}" for number, name in parts[largest : largest + 2] if number) or "0 ms"


def _explain_live(
    url: str,
    *,
    topic: str | None,
    subscription: str | None,
    top: int,
    now_ms: int | None,
    json: bool,
    token_file: Path | None,
    trust_cert_path: str,
) -> str | None:
    """Print the holes of a broker's open subscriptions; of a broker of Pulsar, return its metadata store instead."""
    query = {"top": str(top)} | ({} if now_ms is None else {"nowMs": str(now_ms)})
    topics = None if topic is None else [topic]
    with opened_broker(url, token_file, trust_cert_path=trust_cert_path, topics=topics) as source:
        from ackstate.analysis.admin.internal_stats import ExplainedTopic
        from ackstate.analysis.pulsar.sources import request_all

        listed, unlisted = source.listing()
        resource = f"explain?{urlencode(query)}"
        found, missing = request_all("topic", listed, lambda each: source.ask(ExplainedTopic, each, resource))
    if missing and not found:
        if source.cursor_properties is None or any(each.reason != "gone" for each in missing):
            raise missing[0].error
        if not source.settings.metadata_url:
            raise AckStateError(
                f"{missing[0].error}; a broker of Pulsar does not explain holes: name its metadata store instead, as"
                " pulsar+zk://HOST:PORT/TENANT/NAMESPACE/TOPIC"
            )
        return source.settings.metadata_url
    missing = [*unlisted, *missing]
    opened = [(topic, each) for topic, answer in found.items() for each in answer.subscriptions]
    chosen = [(topic, each) for topic, each in opened if subscription in {None, each.subscription}]
    if not chosen and subscription is not None:
        names = ", ".join(f"{each.subscription!r} of {topic!r}" for topic, each in opened) or "none"
        raise AckStateError(f"{url} has no open subscription {subscription!r}; its subscriptions are: {names}")
    if json:
        present_ms = max((found[topic].now_ms for topic, _ in chosen), default=0) if now_ms is None else now_ms
        cursors = [{"topic": topic, "status": "ok", "problems": []} | each.model_dump() for topic, each in chosen]
        unread = [each.to_json() for each in missing]
        console.write_json({"store": url, "now_ms": present_ms, "cursors": cursors, "missing": unread})
    else:
        for name, each in chosen:
            console.show(*_open_text(name, each))
        console.show(*map(str, missing), counted(len(chosen), "cursor"))
    if missing:
        raise typer.Exit(1)
    return None


def _open_text(topic: str, held: ExplainedSubscription) -> Iterator[Table | str]:
    yield f"{topic}, {held.subscription}: {held.type}"
    lost = counted(held.redelivery_if_crashed, "acked message")
    yield f"{_state_text(held)}; {lost} redelivered if it crashed now"
    yield from (f"  blocked: {block.detail}" for block in held.blocked)
    yield from _holes_text(held, [hole.detail for hole in held.holes])
    yield ""
