"""`ackstate inspect` shows the contents of a store's cursors."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import JsonOption, SubscriptionOption, TopicOption
from ackstate.analysis.cli.store import (
    CopyBytesOption,
    StoreArgument,
    checked_json,
    chosen_cursors,
    opened_store,
    remarks,
    text_of,
    unread_json,
)
from ackstate.analysis.cli.tables import new_table
from ackstate.analysis.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.table import Table

    from ackstate.cursor.formats import CursorState
    from ackstate.deleted_ranges import DeletedRanges, Run
    from ackstate.inspect import CursorInspection, JournalRecord

_SHOWN = 20  # ranges and batches, without --all-ranges


def inspect(
    store: StoreArgument,
    topic: TopicOption = None,
    subscription: SubscriptionOption = None,
    all_ranges: Annotated[bool, typer.Option("--all-ranges", help="All ranges and batches, not 20.")] = False,
    json: JsonOption = False,
    copy_bytes_max: CopyBytesOption = None,
) -> None:
    """Print the cursors of a store: state, ranges, journal records, sizes. Change nothing.

    Exit status: 0, 1 if a cursor cannot be opened, 2 if the store cannot be read.
    """
    from ackstate.inspect import find_cursors, inspect_cursor

    with opened_store(store, copy_bytes_max=copy_bytes_max) as opened:
        names = chosen_cursors(find_cursors(opened), store=store, topic=topic, subscription=subscription)
        found = [inspect_cursor(opened, name) for name in names]
        missing = unread_json(opened) if topic is None else []
    shown = None if all_ranges else _SHOWN
    if json:
        cursors = [_inspected_json(cursor, shown) for cursor in found]
        console.write_json({"store": store, "cursors": cursors, "missing": missing})
    else:
        for cursor in found:
            console.show(*_inspected(cursor, shown))
        console.show(*(f"{each['path']}: {each['why']}" for each in missing), counted(len(found), "cursor"))
    if missing or any(cursor.problems for cursor in found):
        raise typer.Exit(1)


def _inspected_json(cursor: CursorInspection, shown: int | None) -> dict[str, Any]:
    record, content = cursor.record, cursor.content
    return checked_json(cursor) | {
        "epoch": record and record.epoch,
        "term": record and record.term,
        "record_bytes": record and record.size_bytes,
        "record_mark_delete": text_of(record.mark_delete) if record else None,
        "cursor_properties": dict(record.cursor_properties) if record else {},
        "journal_bytes": sum(each.size_bytes for each in cursor.records),
        "state": content and _state_json(content, shown),
        "records": [asdict(each) | {"mark_delete": text_of(each.mark_delete)} for each in cursor.records],
    }


def _state_json(content: CursorState, shown: int | None) -> dict[str, Any]:
    runs = islice(content.deleted.runs(), shown)
    batches = islice(content.batch.items(), shown)
    return {
        "mark_delete": str(content.mark_delete),
        "entry_count": len(content.deleted),
        "range_count": content.deleted.range_count,
        "ranges": [{"ledger_id": run.ledger_id, "first": run.first, "last": run.end - 1} for run in runs],
        "batch_count": len(content.batch),
        "batches": [{"position": str(position), "unacked_words": list(words)} for position, words in batches],
        "properties": dict(content.properties),
    }


def _inspected(cursor: CursorInspection, shown: int | None) -> Iterator[Table | str]:
    """Yield everything about one cursor."""
    yield f"{cursor.name.topic}, {cursor.name.subscription}: {cursor.status}"
    yield from (f"  {line}" for line in remarks([cursor]))
    table = new_table("", "")
    table.show_header = False
    for name, text in _facts(cursor, shown):
        table.add_row(name, text)
    yield table
    if cursor.records:
        yield _journal_table(cursor.records)
    yield ""


def _facts(cursor: CursorInspection, shown: int | None) -> Iterator[tuple[str, str]]:
    record, content = cursor.record, cursor.content
    if content is not None:
        yield "mark-delete", str(content.mark_delete)
        yield "message log ends", text_of(cursor.log_end) or "not in this store"
        yield "ranges", f"{content.deleted.range_count:,}, {counted(len(content.deleted), 'entry', 'entries')}"
        if content.deleted:
            yield "", _ranges_text(content.deleted, shown)
        yield "batches", f"{len(content.batch):,}"
        for position, words in islice(content.batch.items(), shown):
            unacked = sum((word % 2**64).bit_count() for word in words)
            yield "", f"{position}: {unacked:,} unacked"
        for name, number in content.properties.items():
            yield "property", f"{name} = {number}"
    if record is not None:
        for name, text in record.cursor_properties.items():
            yield "cursor property", f"{name} = {text}"
        version = "" if record.format_version is None else f", version {record.format_version}"
        yield "format", f"{record.format}{version}"
        yield "record", f"{counted(record.size_bytes, 'byte')}, metadata version {record.metadata_version}"
        yield "epoch, term", f"{record.epoch}, {record.term}"
        ledger_id = record.cursor_ledger_id
        yield "cursor ledger", "none, the state is in the record" if ledger_id is None else str(ledger_id)
    journal_bytes = sum(each.size_bytes for each in cursor.records)
    yield "journal", f"{counted(len(cursor.records), 'record')}, {counted(journal_bytes, 'byte')}"


def _journal_table(records: Iterable[JournalRecord]) -> Table:
    table = new_table("offset", "kind", "sequence", "bytes", "mark-delete", "new entries", "ranges", "damage")
    for record in records:
        numbers = [f"{number:,}" for number in (record.entry_count, record.range_count)] if record.kind else ["-", "-"]
        table.add_row(
            f"{record.offset:,}",
            record.kind or "-",
            f"{record.sequence:,}",
            f"{record.size_bytes:,}",
            text_of(record.mark_delete) or "-",
            *numbers,
            record.damage,
        )
    return table


def _ranges_text(deleted: DeletedRanges, shown: int | None) -> str:
    """Return the ranges as Pulsar writes them, the lower end open and the upper one closed."""

    def text(run: Run) -> str:
        return f"({run.ledger_id}:{run.first - 1}..{run.ledger_id}:{run.end - 1}]"

    left = 0 if shown is None else deleted.range_count - shown
    more = f" and {left:,} more (--all-ranges)" if left > 0 else ""
    return f"[{','.join(map(text, islice(deleted.runs(), shown)))}]{more}"
