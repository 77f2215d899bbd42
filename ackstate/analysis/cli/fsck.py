"""`ackstate fsck` checks a store, and shows the effect of each repair."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import JsonOption
from ackstate.analysis.cli.store import (
    CopyBytesOption,
    StoreArgument,
    checked_json,
    opened_store,
    remarks,
    unread_json,
)
from ackstate.analysis.cli.tables import new_table
from ackstate.analysis.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from ackstate.inspect import CursorInspection


def fsck(store: StoreArgument, json: JsonOption = False, copy_bytes_max: CopyBytesOption = None) -> None:
    """Check every cursor of a store, change nothing, and print the effect of each repair.

    The store may be open in a live process. Torn records and other leftovers of
    a crash are notes: the next open discards them.

    Exit status: 0 all cursors open, 1 some do not or are left out, 2 the store
    cannot be read.
    """
    from ackstate.inspect import inspect_store

    with opened_store(store, copy_bytes_max=copy_bytes_max) as opened:
        found = list(inspect_store(opened))
        missing = unread_json(opened)
    problem_count = sum(len(cursor.problems) for cursor in found)
    if json:
        cursors = [checked_json(cursor) for cursor in found]
        console.write_json({"store": store, "cursors": cursors, "problems": problem_count, "missing": missing})
    else:
        left_out = (f"{each['path']}: {each['why']}" for each in missing)
        console.show(_checked_table(found), *left_out, *remarks(found))
        console.show(f"{counted(len(found), 'cursor')}, {counted(problem_count, 'problem')}")
    if problem_count or missing:
        raise typer.Exit(1)


def _checked_table(cursors: Iterable[CursorInspection]) -> Table:
    table = new_table("topic", "subscription", "status", "format", "mark-delete", "ranges", "records")
    for cursor in cursors:
        name, record, content = cursor.name, cursor.record, cursor.content
        table.add_row(
            name.topic,
            name.subscription,
            str(cursor.status),
            str(record.format) if record else "-",
            str(content.mark_delete) if content else "-",
            f"{content.deleted.range_count:,}" if content else "-",
            f"{len(cursor.records):,}",
        )
    return table
