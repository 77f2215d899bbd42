"""`ackstate pulsar history`: what the entries of a live cursor ledger tell. `docs/json-output.md` has the JSON."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import JsonOption
from ackstate.analysis.cli.pulsar_transfer import checked_topic
from ackstate.analysis.cli.store import opened_cluster
from ackstate.analysis.cli.tables import new_table
from ackstate.analysis.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from ackstate.analysis.pulsar.history import CursorHistory, HistoryRecord

_LIMITS = (
    "Records have no times. The next owner of the topic deletes them: they begin at the last load of the topic, or at"
    " the last rollover or failed write of the cursor ledger."
)
_WHY = {
    "reset": "reset: the mark-delete position went back, as by a seek",
    "cut": "cut: the highest acks are missing, as by a limit on ranges or a seek forward",
    "load": "load: acks among others are missing, as if the owner had loaded an older state",
}


def history(
    url: Annotated[str, typer.Argument(metavar="URL", help="pulsar+zk://HOST:PORT[,HOST:PORT], a live cluster.")],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="persistent://TENANT/NAMESPACE/TOPIC.")],
    subscription: Annotated[str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription.")],
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Show N changes, and the N oldest ages of holes.")] = 10,
    json: JsonOption = False,
) -> None:
    """Show since which record of the cursor ledger each hole exists, and which records lost acks.

    Reads every record of the live ledger, each a whole state, and changes
    nothing. Records have no times, and begin at the last load of the topic, or
    at the last rollover or failed write of the cursor ledger.

    Exit status: 0, 2 if the cluster or the cursor cannot be read.
    """
    from ackstate.analysis.pulsar.history import cursor_history

    name = checked_topic(topic)
    with closing(opened_cluster(url)) as cluster:
        found = cursor_history(cluster, name, subscription, top=top)
    if json:
        console.write_json(_json(found, top))
    else:
        console.show(*_text(found, top))


def _json(found: CursorHistory, top: int) -> dict[str, Any]:
    return {
        "topic": found.topic,
        "subscription": found.subscription,
        "cursor_ledger_id": found.cursor_ledger_id,
        "record_count": found.record_count,
        "first": found.first and _record_json(found.first),
        "last": found.last and _record_json(found.last),
        "acked": found.acked,
        "lost": found.lost,
        "losses": found.losses,
        "changes": [_record_json(each) for each in found.changes],
        "hole_count": sum(each.hole_count for each in found.holes),
        "holes": [each._asdict() | {"first": str(each.first)} for each in found.holes[:top]],
    }


def _record_json(record: HistoryRecord) -> dict[str, Any]:
    return asdict(record) | {"mark_delete": str(record.mark_delete)}


def _text(found: CursorHistory, top: int) -> Iterator[Table | str]:
    yield f"{found.topic}, {found.subscription}"
    if found.last is None:
        where = "in the metadata store" if found.cursor_ledger_id is None else "not written yet"
        yield f"the state is {where}: it has no history"
        return
    shown = {each.record: each for each in (found.first, *found.changes, found.last) if each is not None}
    count = counted(found.record_count, "record")
    yield f"cursor ledger {found.cursor_ledger_id}, {count}: the first, the last, and those that lost or acked most:"
    yield _records_table(shown)
    acked, lost = counted(found.acked, "entry", "entries"), counted(found.lost, "acked entry", "acked entries")
    yield f"all records: {acked} acked, {lost} lost in {counted(found.losses, 'record')}"
    yield from (text for why, text in _WHY.items() if any(each.why == why for each in shown.values()))
    yield ""
    yield f"{counted(sum(each.hole_count for each in found.holes), 'hole')}, by the record since which they exist:"
    if found.holes:
        table = new_table("since record", "holes", "lowest")
        for each in found.holes[:top]:
            since = f"{each.since_record:,}" if each.since_record else "0 or before"
            table.add_row(since, f"{each.hole_count:,}", str(each.first))
        yield table
    if left := found.holes[top:]:
        yield f"and {sum(each.hole_count for each in left):,} more, since later records"
    yield _LIMITS


def _records_table(shown: dict[int, HistoryRecord]) -> Table:
    table = new_table("record", "bytes", "mark-delete", "ranges", "entries", "batches", "acked", "lost", "why")
    for _, each in sorted(shown.items()):
        lost = f"{each.lost:,}" + (
            f" and of {counted(each.batches_lost, 'batch', 'batches')}" * bool(each.batches_lost)
        )
        counts = (each.range_count, each.entry_count, each.batch_count, each.acked)
        table.add_row(
            f"{each.record:,}", f"{each.size_bytes:,}", str(each.mark_delete), *(f"{count:,}" for count in counts),
            lost, each.why or "",
        )  # fmt: skip
    return table
