"""`ackstate fsck`, `inspect` and `pulsar history`, and what opens stores for them and `explain`. None changes a byte.

A store on a disk is copied, and the copy is read. From a cluster of BookKeeper or Pulsar it only reads.
Others may keep writing meanwhile. `docs/json-output.md` describes the JSON.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.console import new_table
from ackstate.analysis.cli.options import JsonOption, SubscriptionOption, TopicOption
from ackstate.analysis.wording import counted
from ackstate.errors import AckStateError, CorruptStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.table import Table

    from ackstate.analysis.pulsar.history import CursorHistory
    from ackstate.cursor.formats import CursorState
    from ackstate.deleted_ranges import DeletedRanges, Run
    from ackstate.inspect import CursorInspection, CursorName, JournalRecord, Problem, RepairOutcome
    from ackstate.position import Position
    from ackstate.stores.base import Store
    from ackstate.stores.pulsar import PulsarLayout


_BOOKKEEPER = "bookkeeper://"
_DATABASE = "ackstate.sqlite3"
_SHOWN = 20  # ranges and batches, without --all-ranges
_HISTORY_LIMITS = (
    "Records have no times. The next owner of the topic deletes them: they begin at the last load of the topic, or at"
    " the last rollover or failed write of the cursor ledger."
)

StoreArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="A store's directory, bookkeeper://HOST:PORT[,HOST:PORT]/ROOT, or"
        " pulsar+zk://HOST:PORT[/TENANT[/NAMESPACE[/TOPIC]]] for the cursors of a live Pulsar cluster.",
    ),
]
CopyBytesOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--copy-bytes-max",
        metavar="BYTES",
        min=0,
        help="Refuse to copy a store whose files have more bytes; 4 GiB by default.",
    ),
]


@contextmanager
def opened_store(store: str, *, copy_bytes_max: int | None = None) -> Iterator[Store]:
    """Open a store for reading."""
    if not store:
        raise typer.BadParameter("STORE is empty")
    try:
        with closing(_opened(store, copy_bytes_max)) as opened:
            yield opened
    except CorruptStateError as error:
        what = _what(error.what, f"{store.rstrip('/')}/")
        raise CorruptStateError(what, offset=error.offset, expected=error.expected, found=error.found) from error


def _opened(store: str, copy_bytes_max: int | None) -> Store:
    from ackstate.stores.pulsar import is_pulsar_url

    if store.startswith(_BOOKKEEPER):
        return _in_cluster(store)
    if is_pulsar_url(store):
        return opened_cluster(store)
    from ackstate.stores.sqlite import COPY_BYTES_MAX, SqliteStore

    bytes_max = COPY_BYTES_MAX if copy_bytes_max is None else copy_bytes_max
    return SqliteStore.open_copy(Path(store), copy_bytes_max=bytes_max)


def opened_cluster(url: str) -> PulsarLayout:
    """Open the cursors of a Pulsar cluster to read."""
    from ackstate.stores.pulsar import open_cluster

    try:
        return open_cluster(url, only_reads=True)
    except ValueError as error:
        raise typer.BadParameter(f"{url}: {error}") from error


def checked_topic(topic: str) -> str:
    """Return a topic's full name."""
    from ackstate.stores.pulsar import check_topic

    try:
        return check_topic(topic)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _in_cluster(store: str) -> Store:
    hosts, slash, root = store.removeprefix(_BOOKKEEPER).partition("/")
    try:
        if not hosts.strip():
            raise ValueError("no host")
        from ackstate.stores.bookkeeper import BookKeeperStore

        return BookKeeperStore(hosts, root=slash + root, only_reads=True, call_timeout_s=10)
    except ValueError as error:
        raise typer.BadParameter(f"{store}: {error}; expected {_BOOKKEEPER}HOST:PORT/ROOT") from error


def chosen_cursors(
    names: Sequence[CursorName], *, store: str, topic: str | None, subscription: str | None
) -> Sequence[CursorName]:
    """Return the requested cursors."""
    chosen = [
        name for name in names if topic in {None, name.topic} and subscription in {None, name.subscription}
    ]  # fmt: skip
    if chosen or (topic is None and subscription is None):
        return chosen
    asked = " of ".join(filter(None, (subscription and f"subscription {subscription!r}", topic and f"topic {topic!r}")))
    there = ", ".join(f"{name.subscription!r} of {name.topic!r}" for name in names) or "none"
    raise AckStateError(f"{store} has no {asked}; its subscriptions are: {there}")


def _what(what: str, place: str = "") -> str:
    """Return the name of the file that was read, in the store instead of the copy."""
    return f"{place}{_DATABASE}" if Path(what).name == _DATABASE else what


def checked_json(cursor: CursorInspection) -> dict[str, Any]:
    """Return the report about one cursor."""
    record, content = cursor.record, cursor.content
    return {
        "topic": cursor.name.topic,
        "subscription": cursor.name.subscription,
        "status": str(cursor.status),
        "format": record and str(record.format),
        "format_version": record and record.format_version,
        "metadata_version": record and record.metadata_version,
        "cursor_ledger_id": record and record.cursor_ledger_id,
        "record_count": len(cursor.records),
        "records_replayed": cursor.records_replayed,
        "mark_delete": text_of(content and content.mark_delete),
        "range_count": content and content.deleted.range_count,
        "log_end": text_of(cursor.log_end),
        "leftovers": list(cursor.leftovers),
        "problems": [problem_json(problem) for problem in cursor.problems],
        "notes": [asdict(note) for note in cursor.notes],
    }


def problem_json(problem: Problem) -> dict[str, Any]:
    """Return a problem with the repairs offered."""
    repairs = [
        asdict(outcome) | {"repair": outcome.repair.name, "mark_delete": text_of(outcome.mark_delete)}
        for outcome in problem.repairs
    ]
    return {
        "what": _what(problem.what),
        "offset": problem.offset,
        "expected": problem.expected,
        "found": problem.found,
        "repairs": repairs,
    }


def text_of(position: Position | None) -> str | None:
    """Return a position as text; None if there is none."""
    return None if position is None else str(position)


def unread_json(store: Store) -> list[dict[str, str]]:
    """Return the parts of a Pulsar cluster that were left out of a listing, and why."""
    from ackstate.stores.pulsar import PulsarLayout

    unread = store.metadata.unread if isinstance(store, PulsarLayout) else {}
    return [{"path": path, "why": unread[path]} for path in sorted(unread)]


def remarks(cursors: Iterable[CursorInspection]) -> Iterator[str]:
    """Yield a line for each problem, for each of its repairs, and for each note."""
    for cursor in cursors:
        for note in cursor.notes:
            where = f" ({note.size_bytes:,} bytes at byte {note.offset:,})" if note.offset >= 0 else ""
            yield f"{cursor.name.topic}, {cursor.name.subscription}: note: {note.text}{where}"
        for problem in cursor.problems:
            text = str(replace(problem, what=_what(problem.what)))
            yield f"{cursor.name.topic}, {cursor.name.subscription}: problem: {text}"
            yield from (f"  {_promise(outcome)}" for outcome in problem.repairs)


def _promise(outcome: RepairOutcome) -> str:
    """Return the effect of a repair, in numbers."""
    where = "before the first message" if outcome.mark_delete is None else f"mark-delete {outcome.mark_delete}"
    read = (
        f"{outcome.records_replayed:,} of {counted(outcome.record_count, 'record')}, " if outcome.record_count else ""
    )
    left = f" and {counted(outcome.bytes_discarded, 'byte')}" if outcome.bytes_discarded else ""
    ranges = counted(outcome.range_count, "range")
    given_up = f"gives up at least {counted(outcome.acks_given_up_min, 'acked entry', 'acked entries')}{left}"
    given_up += "".join(f", property {name} = {number}" for name, number in outcome.properties_given_up.items())
    given_up += ", properties that cannot be read" if outcome.has_unknown_properties else ""
    given_up += ", the cursor properties" if outcome.cursor_properties_given_up else ""
    return f"repair=Repair.{outcome.repair.name}: {read}{where}, {ranges}, {given_up}"


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
        hole_count = sum(each.hole_count for each in found.holes)
        found.holes = found.holes[:top]
        console.write_json(asdict(found) | {"hole_count": hole_count})
    else:
        console.show(*_history(found, top))


def _history(found: CursorHistory, top: int) -> Iterator[Table | str]:
    from ackstate.analysis.pulsar.history import LOSSES

    yield f"{found.topic}, {found.subscription}"
    if found.last is None:
        where = "in the metadata store" if found.cursor_ledger_id is None else "not written yet"
        yield f"the state is {where}: it has no history"
        return
    count = counted(found.record_count, "record")
    yield f"cursor ledger {found.cursor_ledger_id}, {count}: the first, the last, and those that lost or acked most:"
    table = new_table("record", "bytes", "mark-delete", "ranges", "entries", "batches", "acked", "lost", "why")
    shown = {each.record: each for each in (found.first, *found.changes, found.last) if each is not None}
    for _, each in sorted(shown.items()):
        size, *counts = (
            f"{n:,}" for n in (each.size_bytes, each.range_count, each.entry_count, each.batch_count, each.acked)
        )
        batches = f" and of {counted(each.batches_lost, 'batch', 'batches')}" * bool(each.batches_lost)
        table.add_row(f"{each.record:,}", size, each.mark_delete, *counts, f"{each.lost:,}{batches}", each.why)
    yield table
    acked, lost = counted(found.acked, "entry", "entries"), counted(found.lost, "acked entry", "acked entries")
    yield f"all records: {acked} acked, {lost} lost in {counted(found.losses, 'record')}"
    yield from (f"{why}: {LOSSES[why]}" for why in sorted({each.why for each in shown.values()} - {""}))
    yield ""
    yield f"{counted(sum(each.hole_count for each in found.holes), 'hole')}, by the record since which they exist:"
    table = new_table("since record", "holes", "lowest")
    for age in found.holes[:top]:
        table.add_row(f"{age.since_record:,}" if age.since_record else "0 or before", f"{age.hole_count:,}", age.first)
    yield table
    if left := sum(age.hole_count for age in found.holes[top:]):
        yield f"and {left:,} more, since later records"
    yield _HISTORY_LIMITS
