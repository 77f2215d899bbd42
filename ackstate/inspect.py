"""Inspects a store as a recovery would read it; nothing is written, fenced or taken over.

`inspect_store` inspects every cursor: the record in the metadata store, the journal that it names, leftovers of a
crash, and whether the state lies within the topic's message log, if the store holds that too. If a cursor cannot be
read, the result has the numbers that each `Repair` would lead to.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, final
from urllib.parse import unquote

from ackstate.cursor.formats import DELETED_PROPERTY, CursorState, Format, Repair
from ackstate.cursor.journal import cursor_owner
from ackstate.cursor.recovery import Recovery, UnreadableCursorError, decode_record
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.stores.base import DamagedValueError, LedgerNotFoundError, StoreError
from ackstate.stores.pulsar import PulsarLayout
from ackstate.topic.log import check_log_record, log_path
from ackstate.topic.subscriptions import SCHEDULE, assumed_log, message_log_ledgers, names_below
from ackstate.topic_name import ROOT
from ackstate.wire import native
from ackstate.wire.pulsar import decode_position_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ackstate.cursor.recovery import StoredCursor
    from ackstate.ledger_map import LedgerMap
    from ackstate.position import Position
    from ackstate.stores.base import Store, Versioned

_ENTRIES_AT_ONCE = 100  # of a journal in Pulsar's format, each of which may be large


class Status(StrEnum):
    """How a cursor was found."""

    OK = "ok"
    NOTE = "note"
    """It opens with nothing lost, and there is something to report."""

    PROBLEM = "problem"
    """It does not open, or not as it should."""


class CursorName(NamedTuple):
    """Which cursor: its path in the metadata store, and the names that the path spells."""

    path: str
    topic: str
    subscription: str


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """A cursor as it would be opened with a repair; the report of that recovery has the same numbers."""

    repair: Repair
    records_replayed: int  # how many records it would read
    record_count: int  # how many there are in the journal that it would read; 0 if it would read none
    bytes_discarded: int  # how many bytes of that journal it would discard
    mark_delete: Position | None  # None for "before the first message" of a log that is not in the store
    range_count: int  # how many individually deleted ranges it would have
    acks_given_up_min: int  # acked entries in readable records that this would forget: there may be more
    properties_given_up: Mapping[str, int] = field(default_factory=dict)  # likewise, of the latest mark-delete
    has_unknown_properties: bool = False  # whether the record with the latest of these cannot be read
    cursor_properties_given_up: bool = False  # whether there is no record to read the cursor properties from


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps a cursor from being opened, or makes that wrong."""

    what: str  # the thing that was read
    offset: int  # the first wrong byte in it
    expected: str  # the right content
    found: str  # the actual content
    repairs: tuple[RepairOutcome, ...] = ()  # possible repairs, the one that gives up least first; may be empty

    def __str__(self) -> str:
        return f"{self.what}: at byte {self.offset} expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Note:
    """Something harmless: a remainder of a crash, which the next open ignores."""

    text: str
    offset: int = -1  # where it begins in the journal, in bytes; -1 if that makes no sense
    size_bytes: int = 0  # how large it is; 0 if that makes no sense


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One entry of a journal."""

    sequence: int  # its number there, from 0
    offset: int  # where it begins, in bytes from the start of the journal
    size_bytes: int
    kind: str = ""  # SNAPSHOT, DELTA, or STATE in Pulsar's format, where each is the whole; empty if unreadable
    epoch: int = 0  # 0 in Pulsar's format
    mark_delete: Position | None = None  # None if it cannot be read
    entry_count: int = 0  # individually deleted entries in it: in a delta those that were new
    range_count: int = 0  # in how many ranges they lie
    batch_count: int = 0  # partly acked batches in it
    damage: str = ""  # why it cannot be read, or does not belong at its place; empty if all is well


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A cursor's value in the metadata store."""

    format: Format  # in which bytes the cursor is written
    format_version: int | None  # version of these bytes; None in Pulsar's format, which has no number for it
    metadata_version: int  # the version for the next `put`
    size_bytes: int
    cursor_ledger_id: int | None  # the ledger that holds the journal; None if the state is in the record
    epoch: int  # epoch of the journal
    term: int  # how often the cursor was opened
    mark_delete: Position | None  # the mark-delete position when this was written, if it has one
    cursor_properties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CursorInspection:
    """One cursor."""

    name: CursorName
    record: StoredRecord | None = None  # its value in the metadata store; None if there is none or it cannot be read
    records: tuple[JournalRecord, ...] = ()  # the journal that the record names, in order
    content: CursorState | None = None  # the state that a recovery would begin with; None if it would refuse
    records_replayed: int = 0  # how many records that takes
    log_end: Position | None = None  # the last entry of the topic's log; None if the store does not hold it
    leftovers: tuple[int, ...] = ()  # ledgers made in the cursor's name that its record does not name
    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def status(self) -> Status:
        """The worst that was found."""
        if self.problems:
            return Status.PROBLEM
        return Status.NOTE if self.notes else Status.OK


def find_cursors(store: Store) -> list[CursorName]:
    """Return every cursor of a store, by path: those that have a record, and those that have ledgers only.

    Raises `CorruptStateError` if the names cannot be read, `StoreError` if the storage failed.
    """
    paths: set[str] = set()
    for topic in names_below(store, ROOT):
        paths.update(f"{ROOT}/{topic}/{name}" for name in names_below(store, f"{ROOT}/{topic}"))
    paths = {path for path in paths if _has_record(store, path)}
    prefix = cursor_owner("")
    for owner in store.ledgers.owners():
        path = owner.removeprefix(prefix)
        if owner.startswith(f"{prefix}{ROOT}/") and len(names := path.split("/")) == len(ROOT.split("/")) + 2:
            paths.update([path] if all(names[1:]) else [])
    return [CursorName(path, *map(unquote, path.split("/")[-2:])) for path in sorted(paths)]


def inspect_store(store: Store) -> Iterator[CursorInspection]:
    """Inspect every cursor of a store, by path; a problem with one is in its result, other errors as `find_cursors`."""
    read_log = cache(lambda topic: message_log_ledgers(store, topic))
    for name in find_cursors(store):
        yield inspect_cursor(store, name, read_log=read_log)


def inspect_cursor(
    store: Store, name: CursorName, *, read_log: Callable[[str], LedgerMap | None] | None = None
) -> CursorInspection:
    """Inspect one cursor; `StoreError` if the storage failed."""
    log, problems = None, []
    try:
        log = read_log(name.topic) if read_log else message_log_ledgers(store, name.topic)
    except CorruptStateError as error:
        problems.append(_problem(error))
    inspection = CursorInspection(name)
    try:
        inspection = _CursorReader(store, name, log).inspection()
    except CorruptStateError as error:
        problems.append(_problem(error))
    notes = []
    try:
        check_log_record(store.metadata, name.topic)
    except CorruptStateError as error:
        notes.append(
            Note(f"the next open of the message log replaces its damaged record {log_path(name.topic)}: {error}")
        )
    except UnsupportedVersionError as error:
        problems.append(_unread(log_path(name.topic), error))
    return replace(inspection, problems=(*inspection.problems, *problems), notes=(*inspection.notes, *notes))


@final
class _CursorReader:
    """Reads one cursor; the log is None if the store does not hold it."""

    def __init__(self, store: Store, name: CursorName, log: LedgerMap | None) -> None:
        self._store = store
        self._ledgers = store.ledgers
        self._name = name
        self._log = log
        # Before the record, as at an open: a ledger of this list is not one that the record names only later.
        self._owned = store.ledgers.owned_by(cursor_owner(name.path))
        self._recovery = Recovery(store, name.path, log or assumed_log(store.ledgers, self._owned))
        self._record = None
        with suppress(DamagedValueError):
            self._record = _stored_record(store.metadata.get(name.path), self._recovery.ledgers)

    def inspection(self) -> CursorInspection:
        found, problems = self._found()
        named = None if self._record is None else self._record.cursor_ledger_id
        leftovers = tuple(ledger_id for ledger_id in self._owned if ledger_id != named)
        records = tuple(self._records())
        content = None
        if found is not None:
            content = found.recovered.content
            problems += self._beyond_the_log(content)
            problems += self._not_its_own(found)
        notes = [*_notes(found, records, leftovers, is_sound=not problems)]
        if self._record is not None and DELETED_PROPERTY in self._record.cursor_properties:
            # Someone is deleting it, or a crash has interrupted that.
            notes.insert(0, Note("the subscription was deleted; the next open or deletion removes the rest of it"))
        if self._name.subscription == SCHEDULE:
            notes.insert(0, Note("no subscription: the cancelled and rescheduled messages of the topic"))
        return CursorInspection(
            self._name,
            self._record,
            tuple(_marked(record, self._name.path, problems) for record in records),
            content,
            0 if found is None else found.recovered.records_replayed,
            None if self._log is None else self._log.last_confirmed,
            leftovers,
            tuple(problems),
            tuple(notes),
        )

    def _found(self) -> tuple[StoredCursor | None, list[Problem]]:
        try:
            return self._recovery.find(self._owned), []
        except UnreadableCursorError as error:
            cause = error.__cause__
            assert isinstance(cause, CorruptStateError)
            return None, [_problem(cause, self._outcomes(error.repairs))]
        except StoreError:
            raise
        except AckStateError as error:
            return None, [_unread(f"cursor {self._name.path}", error)]

    def _outcomes(self, repairs: Sequence[Repair]) -> tuple[RepairOutcome, ...]:
        offers = [found for repair in repairs if (found := replace(self._recovery, repair=repair).find(self._owned))]
        # An open with a repair whose state the log does not have is refused like one without.
        return tuple(self._outcome(found) for found in offers if not self._beyond_the_log(found.recovered.content))

    def _outcome(self, found: StoredCursor) -> RepairOutcome:
        content = found.recovered.content
        is_unknown = found.repair is Repair.START_ANEW and self._log is None
        return RepairOutcome(
            found.repair,
            found.recovered.records_replayed,
            found.entry_count,
            found.recovered.bytes_discarded,
            None if is_unknown else content.mark_delete,
            content.deleted.range_count,
            *found.given_up,
        )

    def _beyond_the_log(self, content: CursorState) -> list[Problem]:
        highest = content.highest
        if self._log is None or not self._log.is_beyond_end(highest):
            return []
        # In a live store the log may have grown since it was read.
        log = message_log_ledgers(self._store, self._name.topic)
        if log is None or not log.is_beyond_end(highest):
            return []
        expected = f"a state up to the end of the message log, {log.last_confirmed}"
        return [Problem(f"cursor {self._name.path}", 0, expected, f"one that reaches {highest}")]

    def _not_its_own(self, found: StoredCursor) -> list[Problem]:
        ledger_id = found.record.cursor_ledger_id
        # In a live store the cursor's owner may have begun a ledger since these were listed.
        if ledger_id is None or ledger_id in {*self._owned, *self._ledgers.owned_by(cursor_owner(self._name.path))}:
            return []
        expected = "a ledger made in the cursor's name"
        return [Problem(f"record of {self._name.path}", 0, expected, f"ledger {ledger_id}, another's")]

    def _records(self) -> Iterator[JournalRecord]:
        offset = 0
        for sequence, entry in self._entries():
            record = JournalRecord(sequence, offset, len(entry))
            try:
                yield _described(record, entry, self._recovery)
            except AckStateError as error:
                yield replace(record, damage=str(error))
            offset += len(entry)

    def _entries(self) -> Iterator[tuple[int, bytes]]:
        """Yield the journal that the record names, as far as the store can read it, with the numbers of its entries."""
        ledger_id = None if self._record is None else self._record.cursor_ledger_id
        try:
            count = 0 if ledger_id is None else self._ledgers.last(ledger_id) + 1
            store = self._store
            begin = max(0, count - store.journal_records_max) if isinstance(store, PulsarLayout) else 0
            for first in range(begin, count, _ENTRIES_AT_ONCE):
                assert ledger_id is not None
                yield from enumerate(self._ledgers.read(ledger_id, first, min(first + _ENTRIES_AT_ONCE, count)), first)
        except (LedgerNotFoundError, CorruptStateError):
            # That is the problem which a recovery has with it.
            return


def _has_record(store: Store, path: str) -> bool:
    try:
        return store.metadata.get(path) is not None
    except CorruptStateError:
        return True


def _stored_record(value: Versioned | None, ledgers: LedgerMap) -> StoredRecord | None:
    if value is None:
        return None
    try:
        decoded = decode_record(value.data, ledgers)
    except AckStateError:
        return None
    record, form = decoded.record, decoded.form.name
    version = value.data[len(native.POINTER_MAGIC)] if form is Format.NATIVE else None
    return StoredRecord(
        form, version, value.version, len(value.data), record.cursor_ledger_id,
        record.epoch, record.term, record.mark_delete, record.cursor_properties,
    )  # fmt: skip


def _described(record: JournalRecord, entry: bytes, recovery: Recovery) -> JournalRecord:
    """Return a journal's record with the content of its bytes."""
    if entry.startswith(native.MAGIC):
        read = native.decode(entry)
        record = replace(record, kind=read.kind.name, epoch=read.epoch, mark_delete=read.mark_delete)
        deleted, batch = read.deleted, read.batch
    else:
        info = decode_position_info(entry, recovery.ledgers)
        record = replace(record, kind="STATE", mark_delete=info.position)
        deleted, batch = info.deleted, info.batch
    return replace(record, entry_count=len(deleted), range_count=deleted.range_count, batch_count=len(batch))


def _marked(record: JournalRecord, path: str, problems: Sequence[Problem]) -> JournalRecord:
    """Return a journal's record with its problem, if it can be read but does not belong there."""
    for problem in problems:
        if not record.damage and (problem.what, problem.offset) == (f"journal of {path}", record.offset):
            return replace(record, damage=str(problem))
    return record


def _notes(
    found: StoredCursor | None, records: Sequence[JournalRecord], leftovers: Sequence[int], *, is_sound: bool
) -> Iterator[Note]:
    for record in records if found else ():
        if record.damage and record is records[-1]:
            text = f"the last record is torn, and was never reported durable: {record.damage}"
            yield Note(text, record.offset, record.size_bytes)
        elif record.damage:
            text = f"record {record.sequence} is not needed, and cannot be read: {record.damage}"
            yield Note(text, record.offset, record.size_bytes)
    if leftovers:
        names = ", ".join(map(str, leftovers))
        what_then = "left over by a crash; the next open deletes them" if is_sound else "not named by a record"
        yield Note(f"cursor ledgers {names}: {what_then}")


def _problem(error: CorruptStateError, repairs: tuple[RepairOutcome, ...] = ()) -> Problem:
    return Problem(error.what, error.offset, str(error.expected), str(error.found), repairs)


def _unread(what: str, error: AckStateError) -> Problem:
    return Problem(what, 0, "data of a version that this release reads", str(error))
