"""Opens stores for `fsck`, `inspect` and `explain`. None of them changes a byte of a store.

A store on a disk is copied, and the copy is read. From a cluster of BookKeeper or Pulsar it only reads.
Others may keep writing meanwhile. `docs/operations.md` describes the JSON.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ackstate.analysis.wording import counted
from ackstate.errors import AckStateError, CorruptStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ackstate.inspect import CursorInspection, CursorName, Note, Problem, RepairOutcome
    from ackstate.position import Position
    from ackstate.stores.base import Store
    from ackstate.stores.pulsar import PulsarLayout

_BOOKKEEPER = "bookkeeper://"
_DATABASE = "ackstate.sqlite3"

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
    """Open a store for reading.

    Args:
        store: As on the command line.
        copy_bytes_max: Most bytes of a store on a disk; None for `COPY_BYTES_MAX`.

    Raises:
        AckStateError: It cannot be read, or is not a store.
    """
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
    return opened_cluster(store) if is_pulsar_url(store) else _copied(store, copy_bytes_max)


def opened_cluster(url: str) -> PulsarLayout:
    """Open the cursors of a Pulsar cluster to read.

    Args:
        url: As on the command line.

    Raises:
        AckStateError: The cluster cannot be reached, or a package is missing.
    """
    try:
        from ackstate.stores.pulsar import open_cluster
    except ImportError as error:
        raise AckStateError(f"{error.name} is missing: install ackstate[bookkeeper]") from error
    try:
        return open_cluster(url, only_reads=True)
    except ValueError as error:
        raise typer.BadParameter(f"{url}: {error}") from error


def _copied(store: str, copy_bytes_max: int | None) -> Store:
    from ackstate.stores.sqlite import COPY_BYTES_MAX, SqliteStore

    bytes_max = COPY_BYTES_MAX if copy_bytes_max is None else copy_bytes_max
    return SqliteStore.open_copy(Path(store), copy_bytes_max=bytes_max)


def _in_cluster(store: str) -> Store:
    hosts, slash, root = store.removeprefix(_BOOKKEEPER).partition("/")
    try:
        if not hosts.strip():
            raise ValueError("no host")
        from ackstate.stores.bookkeeper import BookKeeperStore

        return BookKeeperStore(hosts, root=slash + root, only_reads=True, call_timeout_s=10)
    except ImportError as error:
        raise AckStateError(f"{error.name} is missing: install ackstate[bookkeeper]") from error
    except ValueError as error:
        raise typer.BadParameter(f"{store}: {error}; expected {_BOOKKEEPER}HOST:PORT/ROOT") from error


def chosen_cursors(
    names: Sequence[CursorName], *, store: str, topic: str | None, subscription: str | None
) -> Sequence[CursorName]:
    """Return the requested cursors.

    Raises:
        AckStateError: A topic or subscription was requested, and no cursor has that name.
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
            yield remark(f"{cursor.name.topic}, {cursor.name.subscription}", note)
        for problem in cursor.problems:
            text = str(replace(problem, what=_what(problem.what)))
            yield f"{cursor.name.topic}, {cursor.name.subscription}: problem: {text}"
            yield from (f"  {_promise(outcome)}" for outcome in problem.repairs)


def remark(what: str, note: Note) -> str:
    """Return a note about something in a line."""
    where = f" ({note.size_bytes:,} bytes at byte {note.offset:,})" if note.offset >= 0 else ""
    return f"{what}: note: {note.text}{where}"


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
