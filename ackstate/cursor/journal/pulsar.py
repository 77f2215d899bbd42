"""Reads and writes Apache Pulsar's format: every entry of a cursor ledger is the whole state, a `PositionInfo`.

The last entry counts. The cursor's value in the metadata store is a `ManagedCursorInfo`. Pulsar can read everything
that is written here. It skips and drops one field of ours, the owner's term.

No time since which a cursor has been idle is ever written: without one a broker takes the moment at which it opens the
cursor, and with an old one it deletes the subscription.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.journal.format import CursorRecord, CursorState, DecodedJournal, Format, JournalFormat
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import CorruptStateError
from ackstate.position import Position
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
    from ackstate.cursor.journal.format import ReadEntries
    from ackstate.ledger_map import LedgerMap


@final
@dataclass(frozen=True, slots=True)
class PulsarFormat:
    """See the module, and `JournalFormat`.

    Attributes:
        range_form: How the entries of a cursor ledger hold the acked entries.
        compression: How a record of the metadata store is compressed.
        compression_bytes_min: A record of this size or less is not.
    """

    range_form: RangeForm = RangeForm.WORDS
    compression: Compression = Compression.NONE
    compression_bytes_min: int = COMPRESSION_THRESHOLD_BYTES

    @property
    def name(self) -> Format:
        return Format.PULSAR

    @property
    def has_deltas(self) -> bool:
        return False

    def encode_entry(self, content: CursorState, *, epoch: int, sequence: int, chain: int) -> bytes:  # noqa: ARG002
        """See `JournalFormat.encode_entry`. Complexity: O(size of the state)."""
        return encode_position_info(PositionInfo(*content), form=self.range_form)

    def chain(self, encoded: bytes) -> int:  # noqa: ARG002
        """See `JournalFormat.chain`: there is none."""
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
        """See `JournalFormat.recover`: the last entry or, if it cannot be read, the one before."""
        if not count:
            raise CorruptStateError(what, offset=0, expected="an entry", found="none")
        discarded, damage = 0, None
        for number in range(count - 1, -1 if discard_damaged else max(count - 3, -1), -1):
            encoded = read(number, number + 1)[0]
            try:
                info = decode_position_info(encoded, ledgers)
            except CorruptStateError as error:
                damage = damage or CorruptStateError(
                    f"{what}, entry {number}", offset=error.offset, expected=error.expected, found=error.found
                )
                discarded += len(encoded)
                continue
            content, is_idle = _content(info.position, info), bool(info.idle_since_ms)
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
            mark_delete, deleted, batch, properties = record.content
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
            content=None if in_ledger or info.mark_delete is None else _content(info.mark_delete, info),
            cursor_properties=info.cursor_properties,
            unknown=info.unknown,
            properties=info.properties if in_ledger else {},
        )


def reopened(content: CursorState, ledgers: LedgerMap) -> CursorState:
    """Return the state that Pulsar's cursor begins with when it reads one, as the message log may have changed since.

    A mark-delete position before the first entry of a ledger that is gone stands before the next one's; beyond the end
    of the log, at its last entry, and then nothing is acked above it. One at the last entry of a ledger that another
    follows stands before the first entry of that.

    Source: ``ManagedCursorImpl.recoveredCursor`` of Apache Pulsar, and, for the last rule,
    ``ManagedLedgerImpl.maybeUpdateCursorBeforeTrimmingConsumedLedger``.
    """
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


def _content(mark_delete: Position, info: PositionInfo | CursorInfo) -> CursorState:
    # Pulsar may write acks at or below the mark-delete position.
    info.deleted.remove_at_most(mark_delete)
    info.batch.remove_at_most(mark_delete)
    for ledger_id, bitmap in info.deleted.bitmaps():
        info.batch.discard_entries(ledger_id, bitmap)
    return CursorState(mark_delete, info.deleted, info.batch, info.properties)


_: type[JournalFormat] = PulsarFormat
