"""The native format: a snapshot, then deltas, each chained to the record before. `docs/wire-format.md` draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import CorruptStateError
from ackstate.wire import native
from ackstate.wire.native import Record, RecordKind
from ackstate.wire.native_pointer import Pointer, decode_pointer, encode_pointer
from cursor.journal_format import Content, CursorRecord, Format, JournalFormat, Recovered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.ledger_map import LedgerMap
    from cursor.journal_format import ReadEntries


@final
class NativeFormat:
    """See the module, and `JournalFormat`."""

    name = Format.NATIVE
    has_deltas = True

    def encode_entry(self, content: Content, *, epoch: int, sequence: int, chain: int) -> bytes:
        """See `JournalFormat.encode_entry`."""
        return native.encode(_record(content, epoch=epoch, sequence=sequence, chain=chain))

    def chain(self, encoded: bytes) -> int:
        """See `JournalFormat.chain`."""
        return native.checksum(encoded)

    def recover(  # noqa: PLR0913 - named, not packed
        self,
        read: ReadEntries,
        count: int,
        *,
        what: str,
        epoch: int,
        ledgers: LedgerMap,  # noqa: ARG002
        discard_damaged: bool = False,
    ) -> Recovered:
        """See `JournalFormat.recover`. Complexity: O(size of the journal)."""
        return fold(read(0, count), what=what, epoch=epoch, discard_damaged=discard_damaged)

    @staticmethod
    def epoch_of(entry: bytes) -> int | None:
        """Return the epoch of an entry, None if it is none of this format.

        Raises:
            CorruptStateError: It is one, and cannot be read.
            UnsupportedVersionError: A newer release wrote it.
        """
        return native.decode(entry).epoch if entry.startswith(native.MAGIC) else None

    def encode_record(self, record: CursorRecord) -> bytes:
        """See `JournalFormat.encode_record`."""
        content, epoch = record.content, record.epoch
        snapshot = None if content is None else _record(content, epoch=epoch, sequence=0, chain=0)
        pointer = Pointer(
            record.cursor_ledger_id, epoch, record.term, record.mark_delete, record.cursor_properties, snapshot
        )
        return encode_pointer(pointer)

    def decode_record(self, data: bytes, ledgers: LedgerMap | None = None) -> CursorRecord:  # noqa: ARG002
        """See `JournalFormat.decode_record`."""
        pointer = decode_pointer(data)
        snapshot = pointer.snapshot
        return CursorRecord(
            pointer.cursor_ledger_id,
            pointer.epoch,
            pointer.term,
            pointer.mark_delete,
            None if snapshot is None else _content(snapshot),
            pointer.cursor_properties,
        )


def _record(content: Content, *, epoch: int, sequence: int, chain: int) -> Record:
    kind = RecordKind.DELTA if sequence else RecordKind.SNAPSHOT
    mark_delete, deleted, batch, properties = content
    return Record(kind, epoch, sequence, chain, mark_delete, deleted, properties, batch)


def _content(record: Record) -> Content:
    return Content(record.mark_delete, record.deleted, record.batch, record.properties)


def fold(entries: Sequence[bytes], *, what: str, epoch: int, discard_damaged: bool = False) -> Recovered:
    """Fold a journal's records into the state that they describe.

    Args:
        entries: Encoded records, a snapshot first.
        what: The journal's name for error messages.
        epoch: The epoch that the pointer names.
        discard_damaged: Stop at the first damaged record, wherever it is, unless it is the snapshot.

    Raises:
        CorruptStateError: A record before the last cannot be read, or one is missing, repeated or a stranger. A last
            one that cannot be read is discarded and reported: its write was never reported durable.
        UnsupportedVersionError: A newer release wrote a record.
    """
    if not entries:
        raise CorruptStateError(what, offset=0, expected="a snapshot", found="no record")
    deleted, batch, offset, chain, damage = DeletedRanges(), BatchIndexes(), 0, 0, ""
    last = None
    replayed = 0
    for sequence, encoded in enumerate(entries):
        try:
            record = _decoded(encoded, what=what, offset=offset, expected=(epoch, sequence, chain))
        except _DamagedError as error:
            is_torn = error.is_unreadable and sequence == len(entries) - 1
            if last is None or not (is_torn or discard_damaged):
                raise
            damage = str(error)
            break
        last, replayed = record, sequence + 1
        deleted.update(record.deleted)
        deleted.remove_at_most(record.mark_delete)
        for position, unacked_words in record.batch.items():
            batch.ack(position, unacked_words)
        batch.remove_at_most(record.mark_delete)
        for ledger_id, bitmap in record.deleted.bitmaps():
            batch.discard_entries(ledger_id, bitmap)
        chain = native.checksum(encoded)
        offset += len(encoded)
    assert last is not None
    return Recovered(
        Content(last.mark_delete, deleted, batch, last.properties),
        records_replayed=replayed,
        bytes_discarded=sum(map(len, entries[replayed:])),
        discarded_offset=offset if damage else -1,
        discarded_reason=damage,
    )


class _DamagedError(CorruptStateError):
    """A record that cannot be read, or one that does not belong where it stands."""

    is_unreadable = False


def _decoded(encoded: bytes, *, what: str, offset: int, expected: tuple[int, int, int]) -> Record:
    """Read one record and see that it belongs where it stands: epoch, sequence and chain are as expected."""
    try:
        record = native.decode(encoded)
    except CorruptStateError as error:
        damaged = _DamagedError(what, offset=offset + error.offset, expected=error.expected, found=error.found)
        damaged.is_unreadable = True
        raise damaged from error
    kind = RecordKind.DELTA if expected[1] else RecordKind.SNAPSHOT
    if (record.kind, record.epoch, record.sequence, record.chain) != (kind, *expected):
        raise _DamagedError(
            what,
            offset=offset,
            expected=f"(kind, epoch, sequence, chain) {(int(kind), *expected)}",
            found=(int(record.kind), record.epoch, record.sequence, record.chain),
        )
    return record


_: type[JournalFormat] = NativeFormat
