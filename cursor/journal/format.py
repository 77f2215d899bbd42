"""Defines what a cursor writes in any format, and what a format must be able to do.

There are two formats: ours, a journal of deltas (`ackstate.cursor.journal.native`), and Apache Pulsar's, in which every
record is the whole state (`ackstate.cursor.journal.pulsar`). Either can be read, whichever is configured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.batch_indexes import BatchIndexes
    from ackstate.deleted_ranges import DeletedRanges
    from ackstate.ledger_map import LedgerMap
    from ackstate.position import Position

ReadEntries = Callable[[int, int], list[bytes]]
"""Returns a journal's entries from one (included) to another (excluded)."""


class Format(StrEnum):
    """In which bytes a cursor is written; it is read in either."""

    NATIVE = "NATIVE"
    """A snapshot and deltas: what is written for an ack does not grow with the holes."""

    PULSAR = "PULSAR"
    """The whole state at every persist, in bytes that Apache Pulsar reads."""


class Repair(Enum):
    """What to do about a cursor that cannot be read; each gives up acks, so those messages are redelivered."""

    NONE = "refuse"
    DISCARD_DAMAGED_RECORDS = "use the records before the first damaged one, and discard the rest"
    USE_METADATA_SNAPSHOT = "use the mark-delete position that the metadata store has"
    USE_ORPHAN_JOURNAL = "use the newest readable journal of the cursor that no pointer names"
    START_ANEW = "begin before the first message, as a new cursor does"


class CursorState(NamedTuple):
    """The content of one record: all of the state or, in a delta, what is new.

    Attributes:
        mark_delete: The mark-delete position.
        deleted: Acked entries above it. Not to be changed.
        batch: Partly acked batches. Not to be changed.
        properties: The properties of the latest mark-delete.
    """

    mark_delete: Position
    deleted: DeletedRanges
    batch: BatchIndexes
    properties: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DecodedJournal:
    """A journal that was read.

    Attributes:
        content: The whole state.
        records_replayed: Records that were read and folded.
        bytes_discarded: Size of what was discarded: a torn last record, which was never reported durable, or what a
            repair gave up.
        discarded_offset: Where it begins, in bytes from the start of the journal, or of the entry in Pulsar's format;
            -1 without one.
        discarded_reason: Why it could not be read; empty without one.
        byte_count: Size of the records that were read and folded, or of the record of the metadata store.
    """

    content: CursorState
    records_replayed: int
    bytes_discarded: int = 0
    discarded_offset: int = -1
    discarded_reason: str = ""
    byte_count: int = 0


@dataclass(frozen=True, slots=True)
class CursorRecord:
    """A cursor's value in the metadata store.

    Attributes:
        cursor_ledger_id: The ledger that holds the journal; None if the state is in `content`.
        epoch: Rises with every reset; always 0 in Pulsar's format, where no record adds to another.
        term: Rises whenever the cursor is opened: a record of another term is another owner's.
        mark_delete: Where the cursor stood when this was written, if the record says so.
        content: The whole state, if there is no ledger.
        cursor_properties: What the application attached to the cursor, name -> text.
        unknown: Fields that the format does not know, to be written back.
    """

    cursor_ledger_id: int | None
    epoch: int
    term: int
    mark_delete: Position | None
    content: CursorState | None = None
    cursor_properties: Mapping[str, str] = field(default_factory=dict)
    unknown: bytes = b""


class JournalFormat(Protocol):
    """Turns states into a journal's entries and a cursor's value in the metadata store, and back."""

    @property
    def name(self) -> Format:
        """Which format it is."""
        ...

    @property
    def has_deltas(self) -> bool:
        """Whether an entry may add to those before it; else each is the whole state."""
        ...

    def encode_entry(self, content: CursorState, *, epoch: int, sequence: int, chain: int) -> bytes:
        """Write an entry of a journal.

        Args:
            content: The whole state if `sequence` is 0 or there are no deltas, else what is new.
            epoch: Of the journal.
            sequence: Number of the entry in its ledger.
            chain: `chain` of the entry before; 0 for the first.
        """
        ...

    def chain(self, encoded: bytes) -> int:
        """Return what the next entry is to be given."""
        ...

    def recover(  # noqa: PLR0913 - named, not packed
        self, read: ReadEntries, count: int, *, what: str, epoch: int, ledgers: LedgerMap, discard_damaged: bool = False
    ) -> DecodedJournal:
        """Read a journal.

        A last entry that cannot be read is discarded and reported: its write was never reported durable.

        Args:
            read: Gets its entries.
            count: How many it has.
            what: Its name for error messages.
            epoch: What the metadata record says.
            ledgers: The message log, for ranges that Pulsar wrote across ledgers.
            discard_damaged: Take what is before the first damage, instead of refusing.

        Raises:
            CorruptStateError: It cannot be read.
            UnsupportedVersionError: A newer release wrote an entry.
        """
        ...

    def encode_record(self, record: CursorRecord) -> bytes:
        """Write a value of the metadata store."""
        ...

    def decode_record(self, data: bytes, ledgers: LedgerMap | None = None) -> CursorRecord:
        """Read one back.

        Raises:
            CorruptStateError: It cannot be read.
            UnsupportedVersionError: A newer release wrote it.
        """
        ...
