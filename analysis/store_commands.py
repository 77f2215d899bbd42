"""`ackstate fsck` and `ackstate inspect`: is a store sound, and what is in it? Neither changes a byte of it.

A store on a disk, in SQLite or in files, is copied while nobody has it open, and the copy is looked at. In a ZooKeeper
cluster, where others may go on writing, only reads are sent. `docs/operations.md` describes the JSON.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ackstate.errors import AckStateError, CorruptStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ackstate.cursor.findings import CursorInspection, CursorName, JournalRecord, Note, Problem, RepairOutcome
    from ackstate.cursor.journal_format import Content
    from ackstate.cursor.store import Store
    from ackstate.deleted_ranges import DeletedRanges, Run
    from ackstate.position import Position

_ZOOKEEPER = "zookeeper://"
_DATABASE = "ackstate.sqlite3"
_SHOWN = 20  # ranges and batches, unless all are asked for

STORE = typer.Argument(metavar="STORE", help="A store's directory, or zookeeper://HOST:PORT[,HOST:PORT]/ROOT.")
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
CopyBytesOption = Annotated[
    int | None,
    typer.Option(
        "--copy-bytes-max",
        metavar="BYTES",
        min=0,
        help="Refuse to copy a store whose files have more bytes; 4 GiB by default.",
    ),
]


@dataclass(frozen=True, slots=True)
class StoreCommands:
    """The two commands.

    Attributes:
        show: Writes tables and lines to standard output.
        write_json: Writes one object there.
    """

    show: Callable[..., None]
    write_json: Callable[[dict[str, Any]], None]

    def fsck(
        self, store: Annotated[str, STORE], json: JsonOption = False, copy_bytes_max: CopyBytesOption = None
    ) -> None:
        """Check every cursor of a store, change nothing, and say what each repair would do.

        A store that is open in a live process is refused. Torn tails and what a
        crash left over are notes: the next open does without them.

        Exit status: 0 all cursors open, 1 some do not, 2 could not look.
        """
        from ackstate.cursor.inspection import inspect_store

        with opened_store(store, copy_bytes_max=copy_bytes_max) as opened:
            notes = _store_notes(opened)
            found = list(inspect_store(opened))
        problem_count = sum(len(cursor.problems) for cursor in found)
        if json:
            answer = {"store": store, "notes": [asdict(note) for note in notes]}
            cursors = [_checked_json(cursor) for cursor in found]
            self.write_json(answer | {"cursors": cursors, "problems": problem_count})
        else:
            self.show(_checked_table(found), *(_remark(store, note) for note in notes), *remarks(found))
            self.show(f"{counted(len(found), 'cursor')}, {counted(problem_count, 'problem')}")
        if problem_count:
            raise typer.Exit(1)

    def inspect(  # noqa: PLR0913, PLR0917 - one for each option
        self,
        store: Annotated[str, STORE],
        topic: Annotated[str | None, typer.Option(metavar="T", help="Only cursors of this topic.")] = None,
        subscription: Annotated[str | None, typer.Option(metavar="S", help="Only cursors of this name.")] = None,
        all_ranges: Annotated[bool, typer.Option("--all-ranges", help="All ranges and batches, not 20.")] = False,
        json: JsonOption = False,
        copy_bytes_max: CopyBytesOption = None,
    ) -> None:
        """Print what a store holds of its cursors: state, ranges, journal records, sizes. Change nothing.

        Exit status: 0, 1 if a cursor cannot be opened, 2 could not look.
        """
        from ackstate.cursor.inspection import find_cursors, inspect_cursor

        with opened_store(store, copy_bytes_max=copy_bytes_max) as opened:
            names = chosen_cursors(find_cursors(opened), store=store, topic=topic, subscription=subscription)
            found = [inspect_cursor(opened, name) for name in names]
        shown = None if all_ranges else _SHOWN
        if json:
            self.write_json({"store": store, "cursors": [_inspected_json(cursor, shown) for cursor in found]})
        else:
            for cursor in found:
                self.show(*_inspected(cursor, shown))
            self.show(counted(len(found), "cursor"))
        if any(cursor.problems for cursor in found):
            raise typer.Exit(1)


@contextmanager
def opened_store(store: str, *, copy_bytes_max: int | None = None) -> Iterator[Store]:
    """Open a store for reading.

    Args:
        store: As on the command line.
        copy_bytes_max: How many bytes a store on a disk may have; None for `COPY_BYTES_MAX`.

    Raises:
        AckStateError: It cannot be read, is no store, or is open.
    """
    if not store:
        raise typer.BadParameter("STORE is empty")
    try:
        with closing(
            _in_zookeeper(store) if store.startswith(_ZOOKEEPER) else _copied(store, copy_bytes_max)
        ) as opened:
            yield opened
    except CorruptStateError as error:
        what = _what(error.what, f"{store.rstrip('/')}/")
        raise CorruptStateError(what, offset=error.offset, expected=error.expected, found=error.found) from error


def _copied(store: str, copy_bytes_max: int | None) -> Store:
    from ackstate.cursor.stores.file import FileStore
    from ackstate.cursor.stores.file_generation import holds_store
    from ackstate.cursor.stores.sqlite import SqliteStore
    from ackstate.cursor.stores.sqlite_mark import MADE, bears_our_mark
    from ackstate.cursor.stores.temporary_copy import COPY_BYTES_MAX

    try:
        names = [path.name for path in Path(store).iterdir()]
    except OSError as error:
        raise AckStateError(f"{store} is not an ackstate store: {error.strerror}") from error
    # Both kinds mark that they were made, by one name and with other bytes; of a lost store the mark alone is left.
    is_ours = bears_our_mark(Path(store))
    holds_database = _DATABASE in names or is_ours
    holds_log = holds_store([name for name in names if name != MADE or (_DATABASE not in names and not is_ours)])
    if holds_database and holds_log:
        raise AckStateError(f"{store} holds two stores, {_DATABASE} and a log: look at each in a directory of its own")
    bytes_max = COPY_BYTES_MAX if copy_bytes_max is None else copy_bytes_max
    if holds_database:
        return SqliteStore.open_copy(Path(store), copy_bytes_max=bytes_max)
    if holds_log:
        return FileStore.open_copy(Path(store), copy_bytes_max=bytes_max)
    raise AckStateError(f"{store} is not an ackstate store: it holds neither {_DATABASE} nor a log")


def _store_notes(store: Store) -> list[Note]:
    """Return what there is to know of a store as a whole."""
    from ackstate.cursor.findings import Note
    from ackstate.cursor.stores.file import FileStore

    tail = store.discarded if isinstance(store, FileStore) else None
    if tail is None:
        return []
    return [Note(f"torn end of the log, which the next open discards: {tail.reason}", tail.offset, tail.byte_count)]


def _in_zookeeper(store: str) -> Store:
    try:
        from ackstate.cursor.stores.zookeeper import ZooKeeperStore
    except ImportError as error:
        raise AckStateError(f"{error.name} is missing: install ackstate[zookeeper]") from error
    hosts, slash, root = store.removeprefix(_ZOOKEEPER).partition("/")
    try:
        if not hosts.strip():
            raise ValueError("no host")
        return ZooKeeperStore.open_to_read(hosts, root=slash + root, call_timeout_s=10)
    except ValueError as error:
        raise typer.BadParameter(f"{store}: {error}; expected {_ZOOKEEPER}HOST:PORT/ROOT") from error


def chosen_cursors(
    names: Sequence[CursorName], *, store: str, topic: str | None, subscription: str | None
) -> Sequence[CursorName]:
    """Return the cursors asked for.

    Raises:
        AckStateError: Some were asked for by name and there is none.
    """
    chosen = [
        name for name in names if topic in {None, name.topic} and subscription in {None, name.subscription}
    ]  # fmt: skip
    if chosen or (topic is None and subscription is None):
        return chosen
    asked = " of ".join(filter(None, (subscription and f"subscription {subscription!r}", topic and f"topic {topic!r}")))
    there = ", ".join(f"{name.subscription!r} of {name.topic!r}" for name in names) or "none"
    raise AckStateError(f"{store} has no {asked}; its subscriptions are: {there}")


def _what(what: str, place: str = "") -> str:
    """Return what was read: not where the copy lies, but where the store does."""
    return f"{place}{_DATABASE}" if Path(what).name == _DATABASE else what


# --- JSON


def _checked_json(cursor: CursorInspection) -> dict[str, Any]:
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
        "mark_delete": _text(content and content.mark_delete),
        "range_count": content and content.deleted.range_count,
        "log_end": _text(cursor.log_end),
        "leftovers": list(cursor.leftovers),
        "problems": [problem_json(problem) for problem in cursor.problems],
        "notes": [asdict(note) for note in cursor.notes],
    }


def problem_json(problem: Problem) -> dict[str, Any]:
    """Return a problem with the repairs offered."""
    repairs = [
        asdict(outcome) | {"repair": outcome.repair.name, "mark_delete": _text(outcome.mark_delete)}
        for outcome in problem.repairs
    ]
    return {
        "what": _what(problem.what),
        "offset": problem.offset,
        "expected": problem.expected,
        "found": problem.found,
        "repairs": repairs,
    }


def _inspected_json(cursor: CursorInspection, shown: int | None) -> dict[str, Any]:
    record, content = cursor.record, cursor.content
    return _checked_json(cursor) | {
        "epoch": record and record.epoch,
        "term": record and record.term,
        "record_bytes": record and record.size_bytes,
        "record_mark_delete": _text(record.mark_delete) if record else None,
        "cursor_properties": dict(record.cursor_properties) if record else {},
        "journal_bytes": sum(each.size_bytes for each in cursor.records),
        "state": content and _state_json(content, shown),
        "records": [asdict(each) | {"mark_delete": _text(each.mark_delete)} for each in cursor.records],
    }


def _state_json(content: Content, shown: int | None) -> dict[str, Any]:
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


def _text(position: Position | None) -> str | None:
    return None if position is None else str(position)


# --- For people


def _checked_table(cursors: Iterable[CursorInspection]) -> Table:
    table = new_table("topic", "subscription", "status", "format", "mark-delete", "ranges", "records")
    for cursor in cursors:
        name, record, content = cursor.name, cursor.record, cursor.content
        table.add_row(
            printable(name.topic),
            printable(name.subscription),
            str(cursor.status),
            str(record.format) if record else "-",
            str(content.mark_delete) if content else "-",
            f"{content.deleted.range_count:,}" if content else "-",
            f"{len(cursor.records):,}",
        )
    return table


def remarks(cursors: Iterable[CursorInspection]) -> Iterator[str]:
    """Yield a line for each problem, for each of its repairs, and for each note."""
    for cursor in cursors:
        for note in cursor.notes:
            yield _remark(f"{cursor.name.topic}, {cursor.name.subscription}", note)
        for problem in cursor.problems:
            text = str(replace(problem, what=_what(problem.what)))
            yield printable(f"{cursor.name.topic}, {cursor.name.subscription}: problem: {text}")
            yield from (f"  {_promise(outcome)}" for outcome in problem.repairs)


def _remark(what: str, note: Note) -> str:
    """Return a note about something in a line."""
    where = f" ({note.size_bytes:,} bytes at byte {note.offset:,})" if note.offset >= 0 else ""
    return printable(f"{what}: note: {note.text}{where}")


def _promise(outcome: RepairOutcome) -> str:
    """Return what a repair would do, in numbers."""
    where = "before the first message" if outcome.mark_delete is None else f"mark-delete {outcome.mark_delete}"
    read = (
        f"{outcome.records_replayed:,} of {counted(outcome.record_count, 'record')}, " if outcome.record_count else ""
    )
    left = f" and {counted(outcome.bytes_discarded, 'byte')}" if outcome.bytes_discarded else ""
    ranges = counted(outcome.range_count, "range")
    given_up = f"gives up at least {counted(outcome.acks_given_up_min, 'acked entry', 'acked entries')}{left}"
    return f"repair=Repair.{outcome.repair.name}: {read}{where}, {ranges}, {given_up}"


def _inspected(cursor: CursorInspection, shown: int | None) -> Iterator[Table | str]:
    """Yield everything about one cursor."""
    yield printable(f"{cursor.name.topic}, {cursor.name.subscription}: {cursor.status}")
    yield from (f"  {line}" for line in remarks([cursor]))
    table = new_table("", "")
    table.show_header = False
    for name, text in _facts(cursor, shown):
        table.add_row(name, printable(text))
    yield table
    if cursor.records:
        yield _journal_table(cursor.records)
    yield ""


def _facts(cursor: CursorInspection, shown: int | None) -> Iterator[tuple[str, str]]:
    record, content = cursor.record, cursor.content
    if content is not None:
        yield "mark-delete", str(content.mark_delete)
        yield "message log ends", _text(cursor.log_end) or "not in this store"
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
            _text(record.mark_delete) or "-",
            *numbers,
            printable(record.damage),
        )
    return table


def _ranges_text(deleted: DeletedRanges, shown: int | None) -> str:
    """Return the ranges as Pulsar writes them, the lower end open and the upper one closed."""

    def text(run: Run) -> str:
        return f"({run.ledger_id}:{run.first - 1}..{run.ledger_id}:{run.end - 1}]"

    left = 0 if shown is None else deleted.range_count - shown
    more = f" and {left:,} more (--all-ranges)" if left > 0 else ""
    return f"[{','.join(map(text, islice(deleted.runs(), shown)))}]{more}"


def new_table(*columns: str) -> Table:
    """Return an empty table whose cells are never cut."""
    table = Table(show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number of things in words, the plural with an s unless it is given."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def printable(text: str) -> str:
    """Return text in which a name cannot steer a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
