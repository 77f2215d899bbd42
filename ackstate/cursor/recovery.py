"""Reads the durable state of a cursor, without guessing, and changes nothing.

Absent and unreadable are different: a cursor without a record and without journals is new; any other is read or
refused. A refusal names the repairs that would help, and the acks that each gives up; none is made unless it is
requested.

Terms. An owner finds out by the term of the record whether the record is its own. The record of a deleted cursor is
gone, so a cursor that is created under the same name must not begin with a term that an owner of the deleted one may
still have. One value, `TERMS_PATH`, keeps the terms of new cursors of the whole store above those of deleted ones.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.formats import (
    CursorRecord,
    CursorState,
    DecodedJournal,
    NativeFormat,
    PulsarFormat,
    Repair,
    content_of,
)
from ackstate.cursor.results import RecoveryReport, RecoverySource
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.stores.base import ABSENT, DamagedValueError, LedgerNotFoundError, StoreError, VersionMismatchError
from ackstate.wire import native
from ackstate.wire.pulsar import decode_position_info
from ackstate.wire.pulsar.compression import compression_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ackstate.cursor.formats import Format, JournalFormat
    from ackstate.stores.base import MetadataStore, Store, Versioned

TERMS_PATH = "/cursor-terms"
TERM_AFTER_LOSS = 2**40
"""Above the number of times that any cursor was opened: added if the last term is lost."""

_TERM_ATTEMPTS = 10
_DIGITS_MAX = 18


def term_floor(metadata: MetadataStore) -> int:
    """Return the highest term of any deleted cursor, or more; 0 if none was deleted."""
    return _read_term(metadata)[0]


def raise_term_floor(metadata: MetadataStore, term: int) -> None:
    """Keep the terms of later cursors above one; durable when this returns."""
    for _ in range(_TERM_ATTEMPTS):
        floor, version = _read_term(metadata)
        if floor >= term:
            return
        with suppress(VersionMismatchError):
            metadata.put(TERMS_PATH, b"%d" % term, expected_version=version)
            return
    raise StoreError(f"{TERMS_PATH}: the value kept changing")


def term_after_loss(metadata: MetadataStore, version: int) -> int:
    """Return a term above that of any owner of a cursor whose record, at a version, is lost or damaged."""
    return term_floor(metadata) + TERM_AFTER_LOSS + max(version, 0)


def _read_term(metadata: MetadataStore) -> tuple[int, int]:
    """Return the floor and the version of the value; for a damaged value, a floor above any that it can have had."""
    try:
        found = metadata.get(TERMS_PATH)
    except DamagedValueError as error:
        return 2 * TERM_AFTER_LOSS + error.version, error.version
    if found is None:
        return 0, ABSENT
    if not found.data.isdigit() or len(found.data) > _DIGITS_MAX:
        return 2 * TERM_AFTER_LOSS + found.version, found.version
    return int(found.data), found.version


class UnreadableCursorError(CorruptStateError):
    """A cursor that is there and cannot be read; it was left as it is.

    Args:
        error: Why it cannot be read.
        repairs: Values of `repair` with which `ManagedCursor.open` would open it, the one that gives up least first,
            and what each gives up.
    """

    def __init__(self, error: CorruptStateError, repairs: Mapping[Repair, GivenUp]) -> None:
        ways = "; ".join(
            f"repair=Repair.{repair.name} would {repair.value}, which gives up {given_up}"
            for repair, given_up in repairs.items()
        )
        super().__init__(error.what, offset=error.offset, expected=error.expected, found=f"{error.found}; {ways}")
        self.repairs = tuple(repairs)


class GivenUp(NamedTuple):
    """What a repair gives up of the records that can be read; see `RecoveryReport`."""

    acks_min: int = 0
    properties: Mapping[str, int] = {}
    has_unknown_properties: bool = False
    cursor_properties: bool = False

    def __str__(self) -> str:
        """Return it in words, for an error."""
        acks = f"at least {self.acks_min:,} acked {'entry' if self.acks_min == 1 else 'entries'}"
        properties = f", the properties {dict(self.properties)} of the mark-delete" if self.properties else ""
        unknown = ", properties of the mark-delete that cannot be read" if self.has_unknown_properties else ""
        return acks + properties + unknown + (", the cursor properties" if self.cursor_properties else "")


@dataclass(frozen=True, slots=True)
class DecodedRecord:
    """A cursor's value in the metadata store, and the format that it has."""

    record: CursorRecord
    form: JournalFormat


@dataclass(frozen=True, slots=True)
class StoredCursor:
    """A cursor as a recovery finds it."""

    record: CursorRecord  # the value in the metadata store, or a repair's value instead
    version: int
    form: JournalFormat  # the format that it is written in
    recovered: DecodedJournal
    entry_count: int = 0  # how many entries the journal has
    repair: Repair = Repair.NONE  # the repair that was needed to read it
    given_up: GivenUp = field(default_factory=GivenUp)  # what the repair gives up
    # The newest ledger of the cursor if no record can be read that names one; else None.
    unnamed_ledger_id: int | None = None

    @property
    def is_repaired(self) -> bool:
        """Whether acks were given up."""
        return self.repair is not Repair.NONE


def report_of(found: StoredCursor | None, form: Format, mark_delete: Position) -> RecoveryReport:
    """Return the report of a cursor that was found, or of a new one, which begins at a position in a format."""
    if found is None:
        return RecoveryReport(RecoverySource.NEW, 0, 0, -1, "", mark_delete, 0, form)
    recovered = found.recovered
    source = RecoverySource.JOURNAL if found.entry_count else RecoverySource.METADATA
    return RecoveryReport(
        RecoverySource.NEW if found.repair is Repair.START_ANEW else source,
        recovered.records_replayed,
        recovered.bytes_discarded,
        recovered.discarded_offset,
        recovered.discarded_reason,
        recovered.content.mark_delete,
        recovered.content.deleted.range_count,
        found.form.name,
        found.repair,
        *found.given_up,
    )


def decode_record(data: bytes, ledgers: LedgerMap | None = None) -> DecodedRecord:
    """Read a cursor's value in the metadata store, in whichever format it is."""
    form: JournalFormat = NativeFormat()
    if not data.startswith(native.POINTER_MAGIC):
        form = PulsarFormat(compression=compression_of(data), compression_bytes_min=0)
    return DecodedRecord(form.decode_record(data, ledgers), form)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Reads one cursor."""

    store: Store
    path: str  # the cursor's path in the metadata store
    ledgers: LedgerMap
    repair: Repair = Repair.NONE  # the repair to make if the cursor cannot be read

    def find(self, orphans: Collection[int]) -> StoredCursor | None:
        """Read the durable state of the cursor; None if there never was one, or it is being deleted."""
        found = self.look_up(orphans)
        return found if isinstance(found, StoredCursor) else None

    def look_up(self, orphans: Collection[int]) -> StoredCursor | int:
        """Read as `find`; without a cursor, return the version expected for a new one's record."""
        # That of no value, or of the mark of a deletion.
        # `orphans` are the ledgers made in its name; those that its record does not name are leftovers of a crash.
        # `UnreadableCursorError`: it cannot be read, and the requested repair would not help.
        try:
            value = self.store.metadata.get(self.path)
        except DamagedValueError as error:
            return self._repaired_record(error.version, error, orphans)
        if value is not None:
            return self._find_with_record(value, orphans)
        if not any(map(self._may_have_acks, orphans)):
            return ABSENT
        journals = f"none, but journals in ledgers {', '.join(map(str, sorted(orphans)))}"
        expected = "a record in the metadata store"
        lost = CorruptStateError(f"cursor {self.path}", offset=0, expected=expected, found=journals)
        return self._repaired_record(ABSENT, lost, orphans)

    def _find_with_record(self, value: Versioned, orphans: Collection[int]) -> StoredCursor | int:
        try:
            decoded = decode_record(value.data, self.ledgers)
        except CorruptStateError as error:
            return self._repaired_record(value.version, error, orphans)
        if decoded.record.is_deleted:
            return value.version
        found = StoredCursor(decoded.record, value.version, decoded.form, _NOTHING)
        try:
            if found.record.cursor_ledger_id is None:
                assert found.record.content is not None
                return replace(found, recovered=DecodedJournal(found.record.content, 0, byte_count=len(value.data)))
            return self.read_journal(found)
        except (CorruptStateError, LedgerNotFoundError) as error:
            if self.store.metadata.get(self.path) != value:
                # Its owner has continued in another ledger meanwhile.
                return self.look_up(orphans)
            return self._repaired_journal(found, error)

    def read_journal(self, found: StoredCursor, *, discard_damaged: bool = False) -> StoredCursor:
        """Return the stored cursor with the journal as it is now."""
        ledger_id, ledgers = found.record.cursor_ledger_id, self.store.ledgers
        assert ledger_id is not None
        count = ledgers.last(ledger_id) + 1
        if discard_damaged:
            count = self._readable_count(ledger_id, count)
        recovered = found.form.recover(
            partial(ledgers.read, ledger_id),
            count,
            what=f"journal of {self.path}",
            epoch=found.record.epoch,
            ledgers=self.ledgers,
            discard_damaged=discard_damaged,
        )
        return replace(found, recovered=recovered, entry_count=count)

    def _readable_count(self, ledger_id: int, count: int) -> int:
        """Return how many entries of a ledger the store can read before the first that it finds damaged."""
        for entry_id in range(count):
            try:
                self.store.ledgers.read(ledger_id, entry_id, entry_id + 1)
            except CorruptStateError:
                return entry_id
        return count

    def _repaired_journal(self, found: StoredCursor, error: CorruptStateError | LedgerNotFoundError) -> StoredCursor:
        """Repair a cursor whose journal is missing or damaged."""
        offered: dict[Repair, StoredCursor] = {}
        if isinstance(error, CorruptStateError):
            with suppress(CorruptStateError, LedgerNotFoundError):
                offered[Repair.DISCARD_DAMAGED_RECORDS] = self.read_journal(found, discard_damaged=True)
        else:
            what, expected = f"journal of {self.path}", f"cursor ledger {found.record.cursor_ledger_id}"
            error = CorruptStateError(what, offset=0, expected=expected, found=str(error))
        record = found.record
        if record.mark_delete is not None:
            offered[Repair.USE_METADATA_SNAPSHOT] = _state_at(record.mark_delete, found, error, record.properties)
        return self._chosen(offered, found, error)

    def _may_have_acks(self, ledger_id: int) -> bool:
        """Return whether a ledger has more than a crash during the creation of a cursor can leave."""
        ledgers = self.store.ledgers
        try:
            count = ledgers.last(ledger_id) + 1
            if count == 0:
                return False
            snapshot = native.decode(ledgers.read(ledger_id, 0, 1)[0])
        except LedgerNotFoundError:
            return False
        except AckStateError:
            return True
        return count > 1 or snapshot.mark_delete > self._start or bool(snapshot.deleted) or bool(snapshot.batch)

    @property
    def _start(self) -> Position:
        return self.ledgers.previous(Position(self.ledgers.first_ledger_id, 0))

    def _repaired_record(self, version: int, error: CorruptStateError, orphans: Collection[int]) -> StoredCursor:
        """Repair a cursor whose record is missing or damaged."""
        record = CursorRecord(None, 0, term_after_loss(self.store.metadata, version), None)
        nothing = StoredCursor(record, version, NativeFormat(), _NOTHING, unnamed_ledger_id=max(orphans, default=None))
        offered: dict[Repair, StoredCursor] = {}
        for ledger_id in sorted(orphans, reverse=True):
            with suppress(CorruptStateError, LedgerNotFoundError):
                offered[Repair.USE_ORPHAN_JOURNAL] = self._read_orphan(ledger_id, nothing)
                break
        return self._chosen(offered, nothing, error)

    def _read_orphan(self, ledger_id: int, nothing: StoredCursor) -> StoredCursor:
        """Read a journal whose format and epoch are not recorded."""
        epoch = NativeFormat.epoch_of(self.store.ledgers.read(ledger_id, 0, 1)[0])
        form: JournalFormat = PulsarFormat() if epoch is None else NativeFormat()
        record = replace(nothing.record, cursor_ledger_id=ledger_id, epoch=epoch or 0)
        return self.read_journal(replace(nothing, record=record, form=form))

    def _chosen(
        self, offered: dict[Repair, StoredCursor], found: StoredCursor, error: CorruptStateError
    ) -> StoredCursor:
        """Return the offer of the requested repair."""
        record = found.record
        has_record = record.cursor_ledger_id is not None or record.mark_delete is not None
        readable: list[CursorState] = []
        ends_readable = has_record
        if (ledger_id := record.cursor_ledger_id if has_record else found.unnamed_ledger_id) is not None:
            readable, ends_readable = self._readable(ledger_id, record.epoch if has_record else None)
        known = self._known(offered, found, readable)
        offered[Repair.START_ANEW] = _state_at(self._start, found, error)
        given_up = {
            repair: GivenUp(*self._given_up(known, offer.recovered.content), not ends_readable, not has_record)
            for repair, offer in offered.items()
        }
        if self.repair not in offered:
            raise UnreadableCursorError(error, given_up) from error
        return replace(offered[self.repair], repair=self.repair, given_up=given_up[self.repair])

    def _known(
        self, offered: dict[Repair, StoredCursor], found: StoredCursor, readable: list[CursorState]
    ) -> CursorState:
        """Join all that can be read: the record, the states offered, and what a ledger has behind a damaged record."""
        contents = [CursorState(self._start, DeletedRanges(), BatchIndexes(), found.record.properties)]
        contents += [offer.recovered.content for offer in reversed(offered.values())]
        contents += readable
        deleted = DeletedRanges()
        for content in contents:
            deleted.update(content.deleted)
        return CursorState(
            max(content.mark_delete for content in contents), deleted, BatchIndexes(), contents[-1].properties
        )

    def _readable(self, ledger_id: int, epoch: int | None) -> tuple[list[CursorState], bool]:
        """Return the records of a ledger that can be read, and count, in order: of Pulsar's whole states the last."""
        # And whether the ledger's last one is among them.
        contents: list[CursorState] = []
        ends_readable = False
        try:
            count = self.store.ledgers.last(ledger_id) + 1
        except (CorruptStateError, LedgerNotFoundError):
            return contents, False
        for number in reversed(range(count)):
            with suppress(CorruptStateError, UnsupportedVersionError, LedgerNotFoundError):
                entry = self.store.ledgers.read(ledger_id, number, number + 1)[0]
                if not entry.startswith(native.MAGIC):
                    info = decode_position_info(entry, self.ledgers)
                    whole = CursorState(info.position, info.deleted, info.batch, info.properties)
                    return [whole], number == count - 1
                record = native.decode(entry)
                epoch = record.epoch if epoch is None else epoch
                if record.epoch == epoch:
                    contents.append(content_of(record))
                    ends_readable |= number == count - 1
        return contents[::-1], ends_readable

    def _given_up(self, known: CursorState, kept: CursorState) -> tuple[int, Mapping[str, int]]:
        """Return how many acked entries and which properties one state has and another lacks."""
        # Entries that the message log has lost do not count. Without the log, of those at or below the mark-delete
        # position the ones in its own ledger count.
        log, (ledger_id, entry_id) = self.ledgers, known.mark_delete
        if known.mark_delete > log.last_confirmed:
            log = LedgerMap.from_counts({ledger_id: entry_id + 1})
        passed = log.count_between(kept.mark_delete, known.mark_delete)
        kept_of_those = kept.deleted.copy().take_at_most(known.mark_delete)
        above = known.deleted.copy()
        above.remove_at_most(max(kept.mark_delete, known.mark_delete))
        above.difference_update(kept.deleted)
        if not self.ledgers.is_beyond_end(known.highest):
            kept_of_those.discard_missing(log)
            above.discard_missing(log)
        missing = {name: number for name, number in known.properties.items() if kept.properties.get(name) != number}
        return max(0, passed - len(kept_of_those)) + len(above), missing


_NOTHING = DecodedJournal(CursorState(Position(0, -1), DeletedRanges(), BatchIndexes(), {}), 0)


def _state_at(
    mark_delete: Position,
    found: StoredCursor,
    error: CorruptStateError,
    properties: Mapping[str, int] | None = None,
) -> StoredCursor:
    """Return a state with nothing acked above a position."""
    content = CursorState(mark_delete, DeletedRanges(), BatchIndexes(), properties or {})
    record = found.record
    if record.cursor_ledger_id is None:
        record = replace(record, mark_delete=mark_delete, content=content)
    return replace(found, record=record, recovered=DecodedJournal(content, 0, discarded_reason=str(error)))
