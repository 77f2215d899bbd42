"""Defines the contents of a cursor's journal, and reads and writes them in two formats.

Ours is a snapshot, then deltas, each chained to the record before; `docs/wire-format.md` draws every byte. In Apache
Pulsar's every entry of a cursor ledger is the whole state, a `PositionInfo`, of which the last counts, and the cursor's
value in the metadata store is a `ManagedCursorInfo`. Each can be read, whichever is configured. Pulsar can read
everything that is written in its format: it skips and drops one field of ours, the owner's term.

In Pulsar's format no time since which a cursor has been idle is ever written: without one a broker takes the moment at
which it opens the cursor, and with an old one it deletes the subscription.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from operator import and_
from typing import TYPE_CHECKING, NamedTuple, final

from pyroaring import BitMap

from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import CorruptStateError, InvalidPositionError
from ackstate.position import Position
from ackstate.wire import native
from ackstate.wire.native import (
    JournalOffset,
    Pointer,
    Record,
    RecordFields,
    RecordKind,
    decode_deltas,
    decode_pointer,
    encode_pointer,
    join,
)
from ackstate.wire.pulsar import (
    COMPRESSION_THRESHOLD_BYTES,
    Compression,
    CursorInfo,
    PositionInfo,
    RangeForm,
    decode_cursor_info,
    decode_position_info,
    encode_cursor_info,
    encode_position_info,
)
from ackstate.wire.pulsar.codec import NO_LEDGER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ackstate.ledger_map import LedgerMap

INTERNAL_PREFIX = "#pulsar.internal."
"""The prefix of the names that belong to the broker, not to the application."""

OWN_PREFIX = f"{INTERNAL_PREFIX}ackstate."
"""The prefix of the names of our own properties."""

DELETED_PROPERTY = f"{OWN_PREFIX}deleted"
"""Marks the record of a subscription that is being deleted; see `ackstate.cursor.journal`."""

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
    """The content of one record: all of the state or, in a delta, the new part."""

    mark_delete: Position
    deleted: DeletedRanges  # acked entries above it; must not be changed
    batch: BatchIndexes  # partly acked batches; must not be changed
    properties: Mapping[str, int]  # the properties of the latest mark-delete
    counts: native.DeliveryCounts = native.NO_COUNTS  # of unacked messages; in Pulsar's format none are kept

    @property
    def highest(self) -> Position:
        """The highest position that it reaches."""
        span = self.deleted.span()
        return self.mark_delete if span is None else max(self.mark_delete, span[1])


def check_within_log(content: CursorState, ledgers: LedgerMap) -> None:
    """Raise `InvalidPositionError` if a whole state reaches beyond the end of the message log."""
    if ledgers.is_beyond_end(content.highest):
        raise InvalidPositionError(
            f"the durable state reaches {content.highest}, the message log ends at {ledgers.last_confirmed}"
        )


@dataclass(frozen=True, slots=True)
class DecodedJournal:
    """The decoded state of a journal."""

    content: CursorState
    records_replayed: int  # number of records that were read and applied
    # Size of the discarded part: a torn last record, which was never reported durable, or the records that a repair
    # gave up.
    bytes_discarded: int = 0
    # Its beginning in bytes, from the start of the journal, or of the entry in Pulsar's format; -1 if nothing was
    # discarded.
    discarded_offset: int = -1
    discarded_reason: str = ""  # why it could not be read; empty if nothing was discarded
    byte_count: int = 0  # size of the records that were read and applied, or of the record of the metadata store
    # Whether a record says since when the cursor has been idle, as Pulsar's may: with its opening that ends.
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class CursorRecord:
    """A cursor's value in the metadata store."""

    cursor_ledger_id: int | None  # the ledger that holds the journal; None if the state is in `content`
    epoch: int  # rises with every reset; always 0 in Pulsar's format, where no record adds to another
    term: int  # rises whenever the cursor is opened: a record of another term belongs to another owner
    mark_delete: Position | None  # the mark-delete position when this was written, if the record contains it
    content: CursorState | None = None  # the whole state, if there is no ledger
    # The application's properties of the cursor, name -> text.
    cursor_properties: Mapping[str, str] = field(default_factory=dict)
    unknown: bytes = b""  # fields unknown to the format, which are written back
    # Those of the mark-delete, as a broker of Pulsar writes them beside the ledger's name; ours are in `content` or in
    # the ledger.
    properties: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_deleted(self) -> bool:
        """Whether the subscription is being deleted: there is no cursor, only leftovers of one."""
        return DELETED_PROPERTY in self.cursor_properties


_BULK_COUNT_MIN = 24  # Fewer deltas than these are read faster one by one.


@final
class NativeFormat:
    """A snapshot and deltas, each chained to the record before."""

    name = Format.NATIVE
    has_deltas = True
    """Whether an entry may add to the previous ones; otherwise each is the whole state."""

    def encode_entry(self, content: CursorState, *, epoch: int, sequence: int, chain: int) -> bytes:
        # The fields as they are: a `Record` of them would take as long to make as they take to encode.
        kind = RecordKind.DELTA if sequence else RecordKind.SNAPSHOT
        mark_delete, deleted, batch, properties, counts = content
        batches = batch.items() if batch.by_ledger else ()
        return native.encode_parts(
            RecordFields(kind, epoch, sequence, chain, mark_delete, deleted.bitmaps(), properties, batches, counts)
        )

    chain = staticmethod(native.checksum)
    """Returns the `chain` argument of the next entry."""

    def recover(  # noqa: PLR0913 - named, not packed
        self,
        read: ReadEntries,
        count: int,
        *,
        what: str,
        epoch: int,
        ledgers: LedgerMap,  # noqa: ARG002
        discard_damaged: bool = False,
    ) -> DecodedJournal:
        """Read a journal of `count` entries; with `discard_damaged`, use the records before the first damage."""
        # A last entry that cannot be read is discarded and reported, because its write was never reported durable. Any
        # other raises `CorruptStateError`.
        return fold(read(0, count), what=what, epoch=epoch, discard_damaged=discard_damaged)

    @staticmethod
    def epoch_of(entry: bytes) -> int | None:
        """Return the epoch of an entry, None if it is none of this format; one that cannot be read raises."""
        return native.decode_parts(entry).epoch if entry.startswith(native.MAGIC) else None

    def encode_record(self, record: CursorRecord) -> bytes:
        content, epoch = record.content, record.epoch
        snapshot = None if content is None else _snapshot_of(content, epoch=epoch)
        pointer = Pointer(
            record.cursor_ledger_id, epoch, record.term, record.mark_delete, record.cursor_properties, snapshot
        )
        return encode_pointer(pointer)

    def decode_record(self, data: bytes, ledgers: LedgerMap | None = None) -> CursorRecord:  # noqa: ARG002
        pointer = decode_pointer(data)
        content = None if pointer.snapshot is None else content_of(pointer.snapshot)
        return CursorRecord(
            pointer.cursor_ledger_id, pointer.epoch, pointer.term, pointer.mark_delete, content,
            pointer.cursor_properties,
        )  # fmt: skip


def _snapshot_of(content: CursorState, *, epoch: int) -> Record:
    mark_delete, deleted, batch, properties, counts = content
    return Record(RecordKind.SNAPSHOT, epoch, 0, 0, mark_delete, deleted, properties, batch, counts)


def content_of(record: Record) -> CursorState:
    """Return the content of a record."""
    return CursorState(record.mark_delete, record.deleted, record.batch, record.properties, record.counts)


def fold(entries: Sequence[bytes], *, what: str, epoch: int, discard_damaged: bool = False) -> DecodedJournal:
    """Fold a journal's records into the state that they describe; O(size of the journal)."""
    # An ack in any of them counts, even if the others do not have it. A last record that cannot be read is discarded
    # and reported, because its write was never reported durable; any other raises, as does one that is missing,
    # repeated or a stranger.
    if not entries:
        raise CorruptStateError(what, offset=0, expected="a snapshot", found="no record")
    state = _Folded(epoch)
    damage = ""
    try:
        state.add(entries[0], what=what)
        # A last record that was torn keeps those before it from being read at once.
        _ = state.add_deltas(entries[1:]) or state.add_deltas(entries[1:-1])
        for encoded in entries[state.place.sequence :]:
            state.add(encoded, what=what)
    except _DamagedError as error:
        is_torn = error.is_unreadable and state.place.sequence == len(entries) - 1
        if not state.place.sequence or not (is_torn or discard_damaged):
            raise
        damage = str(error)
    return DecodedJournal(
        state.content(),
        records_replayed=state.place.sequence,
        bytes_discarded=sum(map(len, entries[state.place.sequence :])),
        discarded_offset=state.offset if damage else -1,
        discarded_reason=damage,
        byte_count=state.offset,
    )


@final
class _Folded:
    """The records so far, ORed; acks that the mark-delete position covers are removed once, at the end."""

    # The result is the same as removing them at each record, since the position never goes back, and costs less.

    def __init__(self, epoch: int) -> None:
        self.offset = 0
        # Where the next record belongs; its sequence is the number of records so far.
        self.place = JournalOffset(epoch, 0, 0, Position(0, -1))
        self._snapshot: dict[int, BitMap] = {}
        # The acks of deltas stay apart until the end: ORing one takes as long as the other bitmap has containers.
        self._added: dict[int, BitMap] = {}
        self._batch: dict[Position, tuple[int, ...]] = {}
        self._properties: Mapping[str, int] = {}
        self._counts: dict[Position, tuple[int, int]] = {}

    def add(self, encoded: bytes, *, what: str) -> None:
        """Add the next record; `_DamagedError` if it cannot be read, or does not belong at its place."""
        offset, place = self.offset, self.place
        try:
            parts = native.decode_parts(encoded)
        except CorruptStateError as error:
            damaged = _DamagedError(what, offset=offset + error.offset, expected=error.expected, found=error.found)
            damaged.is_unreadable = True
            raise damaged from error
        kind = RecordKind.DELTA if place.sequence else RecordKind.SNAPSHOT
        if parts[:4] != (kind, *place[:3]):
            expected = f"(kind, epoch, sequence, chain) {(int(kind), *place[:3])}"
            raise _DamagedError(what, offset=offset, expected=expected, found=(int(parts.kind), *parts[1:4]))
        if parts.mark_delete < place.mark_delete:
            expected = f"a mark-delete of at least {place.mark_delete}"
            raise _DamagedError(what, offset=offset, expected=expected, found=parts.mark_delete)
        self._join([encoded], [parts], parts.properties, parts.mark_delete)

    def add_deltas(self, entries: Sequence[bytes]) -> bool:
        """Add the next records and return True, or return False if they must be read one by one."""
        deltas = decode_deltas(entries, self.place) if len(entries) >= _BULK_COUNT_MIN else None
        if deltas is None:
            return False
        for ledger_id, acked in deltas.bitmaps.items():
            join(self._added, ledger_id, acked)
        self._join(entries, deltas.others, deltas.properties, deltas.mark_delete)
        return True

    def content(self) -> CursorState:
        """Return the content of all of them; nothing may be added after."""
        bitmaps = self._snapshot
        for ledger_id, acked in self._added.items():
            join(bitmaps, ledger_id, acked)
        for (ledger_id, entry_id), unacked_words in self._batch.items():
            if not any(unacked_words):
                join(bitmaps, ledger_id, BitMap((entry_id,)))
        mark_delete = self.place.mark_delete
        if mark_delete.ledger_id in bitmaps:
            bitmaps[mark_delete.ledger_id].remove_range(0, mark_delete.entry_id + 1)
        # No two are of one ledger, so that no bitmaps are compared.
        deleted = DeletedRanges.from_bitmaps(sorted(each for each in bitmaps.items() if each[0] >= mark_delete[0]))
        batch = BatchIndexes()
        for position, unacked_words in self._batch.items():
            if position > mark_delete and position not in deleted:
                batch.ack(position, unacked_words)
        counts = self._counts and {
            each: count for each, count in self._counts.items() if each > mark_delete and each not in deleted
        }
        return CursorState(mark_delete, deleted, batch, self._properties, counts)

    def _join(
        self,
        entries: Sequence[bytes],
        contents: Iterable[RecordFields],
        properties: Mapping[str, int],
        mark_delete: Position,
    ) -> None:
        """Add the next records, whose content is decoded and belongs here."""
        epoch, sequence, _, _ = self.place
        bitmaps = self._added if sequence else self._snapshot
        for parts in contents:
            for ledger_id, acked in parts.bitmaps:
                join(bitmaps, ledger_id, acked)
            for position, unacked_words in parts.batch:
                held = self._batch.get(position, unacked_words)
                # Words that one of them lacks are 0: all of those messages are acked.
                self._batch[position] = tuple(map(and_, held, unacked_words))
            self._counts |= parts.counts
        self._properties = properties
        self.place = JournalOffset(epoch, sequence + len(entries), native.checksum(entries[-1]), mark_delete)
        self.offset += sum(map(len, entries))


class _DamagedError(CorruptStateError):
    """A record that cannot be read, or that does not belong at its place."""

    is_unreadable = False


@final
@dataclass(frozen=True, slots=True)
class PulsarFormat:
    """Apache Pulsar's records and journals."""

    name = Format.PULSAR
    has_deltas = False

    range_form: RangeForm = RangeForm.WORDS  # how the entries of a cursor ledger hold the acked entries
    compression: Compression = Compression.NONE  # how a record of the metadata store is compressed
    compression_bytes_min: int = COMPRESSION_THRESHOLD_BYTES  # a record of this size or less is not

    def encode_entry(self, content: CursorState, *, epoch: int, sequence: int, chain: int) -> bytes:  # noqa: ARG002
        return encode_position_info(PositionInfo(*content[:4]), form=self.range_form)

    def chain(self, encoded: bytes) -> int:  # noqa: ARG002
        return 0

    def recover(  # noqa: PLR0913 - named, not packed
        self,
        read: ReadEntries,
        count: int,
        *,
        what: str,
        epoch: int,  # noqa: ARG002
        ledgers: LedgerMap,
        discard_damaged: bool = False,
    ) -> DecodedJournal:
        """Read the last entry or, if it cannot be read, the one before."""
        if not count:
            raise CorruptStateError(what, offset=0, expected="an entry", found="none")
        discarded, damage = 0, None
        for number in range(count - 1, -1 if discard_damaged else max(count - 3, -1), -1):
            encoded = read(number, number + 1)[0]
            try:
                info = decode_position_info(encoded, ledgers, what=f"{what}, entry {number}")
            except CorruptStateError as error:
                damage = damage or error
                discarded += len(encoded)
                continue
            content, is_idle = state_in(info.position, info), bool(info.idle_since_ms)
            if damage is None:
                return DecodedJournal(content, records_replayed=1, byte_count=len(encoded), is_idle=is_idle)
            return DecodedJournal(content, 1, discarded, damage.offset, str(damage), len(encoded), is_idle)
        assert damage is not None
        raise damage

    def encode_record(self, record: CursorRecord) -> bytes:
        info = CursorInfo(
            NO_LEDGER if record.cursor_ledger_id is None else record.cursor_ledger_id,
            record.mark_delete,
            properties=record.properties,
            cursor_properties=record.cursor_properties,
            unknown=record.unknown,
            term=record.term,
        )
        if record.content is not None:
            mark_delete, deleted, batch, properties, _ = record.content
            info = replace(info, mark_delete=mark_delete, deleted=deleted, batch=batch, properties=properties)
        return encode_cursor_info(info, compression=self.compression, threshold_bytes=self.compression_bytes_min)

    def decode_record(self, data: bytes, ledgers: LedgerMap | None = None) -> CursorRecord:
        info = decode_cursor_info(data, ledgers)
        in_ledger = info.cursors_ledger_id != NO_LEDGER
        if not in_ledger and info.mark_delete is None:
            raise CorruptStateError(
                "cursor info", offset=0, expected="a cursor ledger or a mark-delete position", found="neither"
            )
        return CursorRecord(
            info.cursors_ledger_id if in_ledger else None,
            epoch=0,
            term=max(info.term or 0, 0),
            mark_delete=info.mark_delete,
            content=None if in_ledger or info.mark_delete is None else state_in(info.mark_delete, info),
            cursor_properties=info.cursor_properties,
            unknown=info.unknown,
            properties=info.properties if in_ledger else {},
        )


JournalFormat = NativeFormat | PulsarFormat


def reopened(content: CursorState, ledgers: LedgerMap) -> CursorState:
    """Return the state that Pulsar's cursor begins with when it reads one, as the log may have changed since."""
    # A mark-delete position before the first entry of a ledger that is gone stands before the next one's; beyond the
    # end of the log, at its last entry, and then nothing is acked above it. One at the last entry of a ledger that
    # another follows stands before the first entry of that.
    # Source: ``ManagedCursorImpl.recoveredCursor`` and
    # ``ManagedLedgerImpl.maybeUpdateCursorBeforeTrimmingConsumedLedger``.
    mark_delete, last = content.mark_delete, ledgers.last_confirmed
    following = ledgers.find_next_ledger(mark_delete.ledger_id)
    if mark_delete.entry_id < 0 and following is not None and not ledgers.has_ledger(mark_delete.ledger_id):
        mark_delete = Position(following, -1)
    if mark_delete > last and (mark_delete.entry_id >= 0 or not ledgers.has_ledger(mark_delete.ledger_id)):
        mark_delete = last
        content = CursorState(last, DeletedRanges(), BatchIndexes(), content.properties)
    following = ledgers.find_next_ledger(mark_delete.ledger_id)
    is_at_end = 0 < ledgers.entry_count(mark_delete.ledger_id) <= mark_delete.entry_id + 1
    if following is not None and is_at_end:
        mark_delete = Position(following, -1)
    content.deleted.remove_at_most(mark_delete)
    content.batch.remove_at_most(mark_delete)
    return content._replace(mark_delete=mark_delete)


def state_in(mark_delete: Position, info: PositionInfo | CursorInfo) -> CursorState:
    """Return the state in a decoded record of Pulsar's."""
    # Pulsar may write acks at or below the mark-delete position.
    info.deleted.remove_at_most(mark_delete)
    info.batch.remove_at_most(mark_delete)
    for ledger_id, bitmap in info.deleted.bitmaps():
        info.batch.discard_entries(ledger_id, bitmap)
    return CursorState(mark_delete, info.deleted, info.batch, info.properties)
