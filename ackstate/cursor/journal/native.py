"""Reads and writes the native format: a snapshot, then deltas, each chained to the record before.

`docs/wire-format.md` draws every byte.
"""

from __future__ import annotations

from operator import and_
from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.journal.format import CursorRecord, CursorState, DecodedJournal, Format, JournalFormat
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import CorruptStateError
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

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.cursor.journal.format import ReadEntries
    from ackstate.ledger_map import LedgerMap

_BULK_COUNT_MIN = 24  # Fewer deltas than these are read faster one by one.


@final
class NativeFormat:
    """See the module, and `JournalFormat`."""

    name = Format.NATIVE
    has_deltas = True

    def encode_entry(self, content: CursorState, *, epoch: int, sequence: int, chain: int) -> bytes:
        # The fields as they are: a `Record` of them would take as long to make as they take to encode.
        kind = RecordKind.DELTA if sequence else RecordKind.SNAPSHOT
        mark_delete, deleted, batch, properties = content
        return native.encode_parts(
            RecordFields(
                kind, epoch, sequence, chain, mark_delete, deleted.bitmaps(), properties, batch.items() if batch else ()
            )
        )

    chain = staticmethod(native.checksum)

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
        """See `JournalFormat.recover`. Complexity: O(size of the journal)."""
        return fold(read(0, count), what=what, epoch=epoch, discard_damaged=discard_damaged)

    @staticmethod
    def epoch_of(entry: bytes) -> int | None:
        """Return the epoch of an entry, None if it is none of this format.

        Raises:
            CorruptStateError: It is one, and cannot be read.
            UnsupportedVersionError: It has another version.
        """
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
    mark_delete, deleted, batch, properties = content
    return Record(RecordKind.SNAPSHOT, epoch, 0, 0, mark_delete, deleted, properties, batch)


def content_of(record: Record) -> CursorState:
    """Return the content of a record."""
    return CursorState(record.mark_delete, record.deleted, record.batch, record.properties)


def fold(entries: Sequence[bytes], *, what: str, epoch: int, discard_damaged: bool = False) -> DecodedJournal:
    """Fold a journal's records into the state that they describe.

    An ack in any of them counts, even if the others do not have it.

    Raises:
        CorruptStateError: A record before the last cannot be read, or one is missing, repeated or a stranger. A last
            one that cannot be read is discarded and reported: its write was never reported durable.
        UnsupportedVersionError: A record has another version.

    Complexity: O(size of the journal).
    """
    if not entries:
        raise CorruptStateError(what, offset=0, expected="a snapshot", found="no record")
    state = _Folded(what, epoch)
    damage = ""
    try:
        state.add(entries[0])
        # A last record that was torn keeps those before it from being read at once.
        _ = state.add_deltas(entries[1:]) or state.add_deltas(entries[1:-1])
        for encoded in entries[state.replayed :]:
            state.add(encoded)
    except _DamagedError as error:
        is_torn = error.is_unreadable and state.replayed == len(entries) - 1
        if not state.replayed or not (is_torn or discard_damaged):
            raise
        damage = str(error)
    return DecodedJournal(
        state.content(),
        records_replayed=state.replayed,
        bytes_discarded=sum(map(len, entries[state.replayed :])),
        discarded_offset=state.offset if damage else -1,
        discarded_reason=damage,
        byte_count=state.offset,
    )


@final
class _Folded:
    """The records so far, ORed; acks that the mark-delete position covers are removed once, at the end.

    The result is the same as removing them at each record, since the position never goes back, and costs less.
    """

    def __init__(self, what: str, epoch: int) -> None:
        self.offset = 0
        self._what = what
        self._place = JournalOffset(epoch, 0, 0, Position(0, -1))
        self._snapshot: dict[int, BitMap] = {}
        # The acks of deltas stay apart until the end: ORing one takes as long as the other bitmap has containers.
        self._added: dict[int, BitMap] = {}
        self._batch: dict[Position, tuple[int, ...]] = {}
        self._properties: Mapping[str, int] = {}

    @property
    def replayed(self) -> int:
        """How many records there were."""
        return self._place.sequence

    def add(self, encoded: bytes) -> None:
        """Add the next record."""
        parts = _decoded(encoded, what=self._what, offset=self.offset, place=self._place)
        self._join(parts, self._added if self.replayed else self._snapshot)
        self._properties = parts.properties
        self._advance([encoded], parts.mark_delete)

    def add_deltas(self, entries: Sequence[bytes]) -> bool:
        """Add the next records and return True, or return False if they must be read one by one."""
        deltas = decode_deltas(entries, self._place) if len(entries) >= _BULK_COUNT_MIN else None
        if deltas is None:
            return False
        for ledger_id, acked in deltas.bitmaps.items():
            join(self._added, ledger_id, acked)
        for parts in deltas.others:
            self._join(parts, self._added)
        self._properties = deltas.properties
        self._advance(entries, deltas.mark_delete)
        return True

    def content(self) -> CursorState:
        """Return the content of all of them; nothing may be added after."""
        bitmaps = self._snapshot
        for ledger_id, acked in self._added.items():
            join(bitmaps, ledger_id, acked)
        for (ledger_id, entry_id), unacked_words in self._batch.items():
            if not any(unacked_words):
                join(bitmaps, ledger_id, BitMap((entry_id,)))
        mark_delete = self._place.mark_delete
        if mark_delete.ledger_id in bitmaps:
            bitmaps[mark_delete.ledger_id].remove_range(0, mark_delete.entry_id + 1)
        remaining = sorted(ledger_id for ledger_id in bitmaps if ledger_id >= mark_delete.ledger_id)
        deleted = DeletedRanges.from_bitmaps((ledger_id, bitmaps[ledger_id]) for ledger_id in remaining)
        batch = BatchIndexes()
        for position, unacked_words in self._batch.items():
            if position > mark_delete and position not in deleted:
                batch.ack(position, unacked_words)
        return CursorState(mark_delete, deleted, batch, self._properties)

    def _join(self, parts: RecordFields, bitmaps: dict[int, BitMap]) -> None:
        for ledger_id, acked in parts.bitmaps:
            join(bitmaps, ledger_id, acked)
        for position, unacked_words in parts.batch:
            held = self._batch.get(position, unacked_words)
            # Words that one of them lacks are 0: all of those messages are acked.
            self._batch[position] = tuple(map(and_, held, unacked_words))

    def _advance(self, entries: Sequence[bytes], mark_delete: Position) -> None:
        epoch, sequence, _, _ = self._place
        self._place = JournalOffset(epoch, sequence + len(entries), native.checksum(entries[-1]), mark_delete)
        self.offset += sum(map(len, entries))


class _DamagedError(CorruptStateError):
    """A record that cannot be read, or that does not belong at its place."""

    is_unreadable = False


def _decoded(encoded: bytes, *, what: str, offset: int, place: JournalOffset) -> RecordFields:
    """Read one record and check that it belongs at its place."""
    try:
        parts = native.decode_parts(encoded)
    except CorruptStateError as error:
        damaged = _DamagedError(what, offset=offset + error.offset, expected=error.expected, found=error.found)
        damaged.is_unreadable = True
        raise damaged from error
    expected = (RecordKind.DELTA if place.sequence else RecordKind.SNAPSHOT, *place[:3])
    if parts[:4] != expected:
        raise _DamagedError(
            what,
            offset=offset,
            expected=f"(kind, epoch, sequence, chain) {(int(expected[0]), *place[:3])}",
            found=(int(parts.kind), *parts[1:4]),
        )
    if parts.mark_delete < place.mark_delete:
        raise _DamagedError(
            what, offset=offset, expected=f"a mark-delete of at least {place.mark_delete}", found=parts.mark_delete
        )
    return parts


_: type[JournalFormat] = NativeFormat
