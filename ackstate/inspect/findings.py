"""Frozen result types of a store inspection."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.cursor.formats import CursorState, Format, Repair
    from ackstate.position import Position


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
    """A cursor as it would be opened with a repair; the report of that recovery has the same numbers.

    Attributes:
        repair: Which repair.
        records_replayed: How many records it would read.
        record_count: How many there are in the journal that it would read; 0 if it would read none.
        bytes_discarded: How many bytes of that journal it would discard.
        mark_delete: Where the cursor would stand; None for "before the first message" of a log that is not in the
            store.
        range_count: How many individually deleted ranges it would have.
        acks_given_up_min: Acked entries in readable records that this would forget: there may be more.
        properties_given_up: Likewise the properties of the latest mark-delete.
        has_unknown_properties: Whether the record with the latest of these cannot be read.
        cursor_properties_given_up: Whether there is no record to read the cursor properties from.
    """

    repair: Repair
    records_replayed: int
    record_count: int
    bytes_discarded: int
    mark_delete: Position | None
    range_count: int
    acks_given_up_min: int
    properties_given_up: Mapping[str, int] = field(default_factory=dict)
    has_unknown_properties: bool = False
    cursor_properties_given_up: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps a cursor from being opened, or makes that wrong.

    Attributes:
        what: The thing that was read.
        offset: The first wrong byte in it.
        expected: The right content.
        found: The actual content.
        repairs: Possible repairs, the one that gives up least first; may be empty.
    """

    what: str
    offset: int
    expected: str
    found: str
    repairs: tuple[RepairOutcome, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}: at byte {self.offset} expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Note:
    """Something harmless: a remainder of a crash, which the next open ignores.

    Attributes:
        text: A description.
        offset: Where it begins in the journal, in bytes; -1 if that makes no sense.
        size_bytes: How large it is; 0 if that makes no sense.
    """

    text: str
    offset: int = -1
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One entry of a journal.

    Attributes:
        sequence: Its number there, from 0.
        offset: Where it begins, in bytes from the start of the journal.
        size_bytes: How long it is.
        kind: SNAPSHOT or DELTA; STATE in Pulsar's format, where each is the whole state; empty if it cannot be read.
        epoch: Its epoch; 0 in Pulsar's format.
        mark_delete: Its mark-delete position; None if it cannot be read.
        entry_count: Individually deleted entries in it: in a delta those that were new.
        range_count: In how many ranges they lie.
        batch_count: Partly acked batches in it.
        damage: Why it cannot be read, or does not belong at its place; empty if all is well.
    """

    sequence: int
    offset: int
    size_bytes: int
    kind: str = ""
    epoch: int = 0
    mark_delete: Position | None = None
    entry_count: int = 0
    range_count: int = 0
    batch_count: int = 0
    damage: str = ""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A cursor's value in the metadata store.

    Attributes:
        format: In which bytes the cursor is written.
        format_version: Version of these bytes; None in Pulsar's format, which has no number for it.
        metadata_version: The version for the next `put`.
        size_bytes: How long it is.
        cursor_ledger_id: The ledger that holds the journal; None if the state is in the record.
        epoch: Epoch of the journal.
        term: How often the cursor was opened.
        mark_delete: The mark-delete position when this was written, if it has one.
        cursor_properties: The properties attached to the cursor.
    """

    format: Format
    format_version: int | None
    metadata_version: int
    size_bytes: int
    cursor_ledger_id: int | None
    epoch: int
    term: int
    mark_delete: Position | None
    cursor_properties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CursorInspection:
    """One cursor.

    Attributes:
        name: Which.
        record: Its value in the metadata store; None if there is none or it cannot be read.
        records: The journal that the record names, in order.
        content: The state that a recovery would begin with; None if it would refuse.
        records_replayed: How many records that takes.
        log_end: The last entry of the topic's message log; None if the store does not hold the log.
        leftovers: Ledgers made in the cursor's name that its record does not name.
        problems: Everything wrong.
        notes: Everything harmless.
    """

    name: CursorName
    record: StoredRecord | None = None
    records: tuple[JournalRecord, ...] = ()
    content: CursorState | None = None
    records_replayed: int = 0
    log_end: Position | None = None
    leftovers: tuple[int, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def status(self) -> Status:
        """The worst that was found."""
        if self.problems:
            return Status.PROBLEM
        return Status.NOTE if self.notes else Status.OK
