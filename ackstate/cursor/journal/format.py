"""Defines the contents of a cursor's journal in any format, and the protocol of a format.

There are two formats: ours, a journal of deltas (`ackstate.cursor.journal.native`), and Apache Pulsar's, in which every
record is the whole state (`ackstate.cursor.journal.pulsar`). Each can be read, whichever is configured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ackstate.cursor.journal.cursor_properties import DELETED_PROPERTY
from ackstate.errors import InvalidPositionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.batch_indexes import BatchIndexes
    from ackstate.deleted_ranges import DeletedRanges
    from ackstate.ledger_map import LedgerMap
    from ackstate.position import Position

ReadEntries = Callable[[int, int], list[bytes]]
"""Returns a journal's entries from one (included) to another (excluded)."""


class Format(StrEnum):
    """The format in which a cursor is written; it is read in either."""

    NATIVE = "NATIVE"
    """A snapshot and deltas: the size of an ack's record does not grow with the holes."""

    PULSAR = "PULSAR"
    """The whole state at every persist, in bytes that Apache Pulsar reads."""


class Repair(Enum):
    """How to repair a cursor that cannot be read; each way gives up acks, whose messages are redelivered."""

    NONE = "refuse"
    DISCARD_DAMAGED_RECORDS = "use the records before the first damaged one, and discard the rest"
    USE_METADATA_SNAPSHOT = "use the mark-delete position that the metadata store has"
    USE_ORPHAN_JOURNAL = "use the newest readable journal of the cursor that no pointer names"
    START_ANEW = "begin before the first message, as a new cursor does"


class CursorState(NamedTuple):
    """The content of one record: all of the state or, in a delta, the new part.

    Attributes:
        mark_delete: The mark-delete position.
        deleted: Acked entries above it. Must not be changed.
        batch: Partly acked batches. Must not be changed.
        properties: The properties of the latest mark-delete.
    """

    mark_delete: Position
    deleted: DeletedRanges
    batch: BatchIndexes
    properties: Mapping[str, int]

    @property
    def highest(self) -> Position:
        """The highest position that it reaches."""
        highest = self.deleted.last_range()
        return self.mark_delete if highest is None else max(self.mark_delete, highest[1])


def check_within_log(content: CursorState, ledgers: LedgerMap) -> None:
    """Raise `InvalidPositionError` if a whole state reaches beyond the end of the message log."""
    if ledgers.is_beyond_end(content.highest):
        raise InvalidPositionError(
            f"the durable state reaches {content.highest}, the message log ends at {ledgers.last_confirmed}"
        )


@dataclass(frozen=True, slots=True)
class DecodedJournal:
    """The decoded state of a journal.

    Attributes:
        content: The whole state.
        records_replayed: Number of records that were read and applied.
        bytes_discarded: Size of the discarded part: a torn last record, which was never reported durable, or the
            records that a repair gave up.
        discarded_offset: Its beginning in bytes, from the start of the journal, or of the entry in Pulsar's format;
            -1 if nothing was discarded.
        discarded_reason: Why it could not be read; empty if nothing was discarded.
        byte_count: Size of the records that were read and applied, or of the record of the metadata store.
        is_idle: Whether a record says since when the cursor has been idle, as Pulsar's may: with its opening that ends.
    """

    content: CursorState
    records_replayed: int
    bytes_discarded: int = 0
    discarded_offset: int = -1
    discarded_reason: str = ""
    byte_count: int = 0
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class CursorRecord:
    """A cursor's value in the metadata store.

    Attributes:
        cursor_ledger_id: The ledger that holds the journal; None if the state is in `content`.
        epoch: Rises with every reset; always 0 in Pulsar's format, where no record adds to another.
        term: Rises whenever the cursor is opened: a record of another term belongs to another owner.
        mark_delete: The mark-delete position when this was written, if the record contains it.
        content: The whole state, if there is no ledger.
        cursor_properties: The application's properties of the cursor, name -> text.
        unknown: Fields unknown to the format, which are written back.
        properties: Those of the mark-delete, as a broker of Pulsar writes them beside the ledger's name; ours are in
            `content` or in the ledger.
    """

    cursor_ledger_id: int | None
    epoch: int
    term: int
    mark_delete: Position | None
    content: CursorState | None = None
    cursor_properties: Mapping[str, str] = field(default_factory=dict)
    unknown: bytes = b""
    properties: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_deleted(self) -> bool:
        """Whether the subscription is being deleted: there is no cursor, only leftovers of one."""
        return DELETED_PROPERTY in self.cursor_properties


class JournalFormat(Protocol):
    """Encodes states as a journal's entries and a cursor's value in the metadata store, and decodes them."""

    @property
    def name(self) -> Format:
        """The format."""
        ...

    @property
    def has_deltas(self) -> bool:
        """Whether an entry may add to the previous ones; otherwise each is the whole state."""
        ...

    def encode_entry(self, content: CursorState, *, epoch: int, sequence: int, chain: int) -> bytes:
        """Return an encoded entry of a journal."""
        ...

    def chain(self, encoded: bytes) -> int:
        """Return the `chain` argument of the next entry."""
        ...

    def recover(  # noqa: PLR0913 - named, not packed
        self, read: ReadEntries, count: int, *, what: str, epoch: int, ledgers: LedgerMap, discard_damaged: bool = False
    ) -> DecodedJournal:
        """Read a journal.

        A last entry that cannot be read is discarded and reported: its write was never reported durable.

        Args:
            read: Returns its entries.
            count: Number of its entries.
            what: Its name for error messages.
            epoch: The epoch in the metadata record.
            ledgers: The message log, for ranges that Pulsar wrote across ledgers.
            discard_damaged: Whether to use the records before the first damage instead of raising.

        Raises:
            CorruptStateError: The journal cannot be read.
            UnsupportedVersionError: An entry has another version.
        """
        ...

    def encode_record(self, record: CursorRecord) -> bytes:
        """Return an encoded value of the metadata store."""
        ...

    def decode_record(self, data: bytes, ledgers: LedgerMap | None = None) -> CursorRecord:
        """Decode a value of the metadata store.

        Raises:
            CorruptStateError: The value cannot be read.
            UnsupportedVersionError: It has another version.
        """
        ...
