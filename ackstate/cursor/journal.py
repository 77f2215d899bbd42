"""Stores one cursor: a record in the metadata store, and mostly a journal in a ledger that the record names.

A ledger begins with the whole state. A new ledger is complete before the record swings to it by compare-and-set, and
the old one is deleted after, so a crash between any two steps leaves one readable journal. Ledgers that such a crash
leaves over are found by their owner's name and deleted at the next open. A new cursor, and one whose ledger cannot be
written, has no ledger: then the whole state is in the record.

Opening reads the state and then takes the cursor over: it raises the record's term and fences the ledger, so that an
earlier owner can neither swing nor append.

Deletion. A record that marks the deletion of the subscription takes the place of the cursor's by compare-and-set. From
then on there is no cursor: an owner that has it open can write no record any more, and an open creates a new cursor in
place of that record. Then the ledgers are deleted, which were listed before the record was put, and last the record. So
a crash between any two steps leaves the subscription as it was or no subscription, and leftovers that the next open of
that name or the next deletion deletes. The terms of later cursors are above that of the deleted one
(`ackstate.cursor.recovery`), so that its owner cannot take the record of a new cursor of the same name for its own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, final
from urllib.parse import quote

from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.formats import (
    DELETED_PROPERTY,
    OWN_PREFIX,
    CursorRecord,
    CursorState,
    NativeFormat,
    PulsarFormat,
    check_within_log,
)
from ackstate.cursor.recovery import Recovery, decode_record, raise_term_floor, term_after_loss, term_floor
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import CorruptStateError, CursorFencedError, UnsupportedVersionError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from ackstate.stores.base import (
    ABSENT,
    DamagedValueError,
    LedgerFencedError,
    LedgerNotFoundError,
    PayloadTooLargeError,
    StoreError,
    VersionMismatchError,
)
from ackstate.topic_name import ROOT, check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ackstate.cursor.cursor import CursorOpening
    from ackstate.cursor.formats import JournalFormat
    from ackstate.cursor.recovery import StoredCursor
    from ackstate.stores.base import MetadataStore, Store

_TAKEOVER_ATTEMPTS = 10
_OWN_BYTES = 64  # of a native state with no acks, or of the subscription's type among the properties
_TERM_MAX = 2**62


@final
class Journal:
    """Writes a cursor's states, and owns their bytes and the epoch; one owner, one write at a time. Made by `open`."""

    # After a failed append the ledger is not appended to again, because it is unknown whether the record is at its end:
    # the next write begins a new ledger, or goes to the metadata store.

    def __init__(self, store: Store, opening: CursorOpening) -> None:
        self.store = store
        self.topic = opening.topic
        self.path = cursor_path(opening.topic, opening.subscription)
        form = self.form = opening.config.journal_format
        self.cursor_properties: Mapping[str, str] = {}
        self.snapshot_bytes = 0
        self.delta_bytes = 0
        self._metadata_bytes_max = opening.config.metadata_bytes_max
        self._owner = cursor_owner(self.path)
        self._version = ABSENT
        self._has_record = False  # whether a record of this owner was put
        self._epoch = 0
        self._term = 1
        self._unknown = b""
        self._mark_delete: Position | None = None  # that of the record, and its properties
        self._properties: Mapping[str, int] = {}
        self._record_form = form  # that of the record, and of the ledger that it names: `form` from the next swing on
        self._pointed_at: int | None = None  # the ledger that a recovery would read; None without one
        # The same if it may be appended to; None if the next write must begin a new ledger.
        self.open_ledger_id: int | None = None
        self._made: set[int] = set()  # ledgers that a record of ours named or may come to name
        self._leftovers: set[int] = set()  # ledgers of earlier owners, to be deleted once the record is ours
        self._chain = 0
        self.entry_count = 0  # of the ledger that is appended to

    @classmethod
    def open(cls, store: Store, opening: CursorOpening) -> tuple[Journal, StoredCursor | None]:
        """Take the cursor over and read its durable state; None if there never was such a cursor."""
        # One that cannot be read, or reaches beyond the message log, is left as it is. After a repair, or in another
        # format, it is to be written again. Until then the record keeps its format and its compression, unless it has
        # more than `metadata_bytes_max` bytes: then its state moves to a ledger.
        journal, ledgers = cls(store, opening), opening.ledgers
        recovery = Recovery(store, journal.path, ledgers, opening.repair)
        for _ in range(_TAKEOVER_ATTEMPTS):
            # Listed before the record is read and deleted after it is ours: a ledger of this list that another owner
            # is about to swing to, or has, it can then no longer swing to, or its swing makes ours fail.
            journal._leftovers = set(store.ledgers.owned_by(journal._owner))
            found = recovery.look_up(journal._leftovers)
            # After the record was read, so that the check holds for the version at which it is replaced.
            opening.check()
            if isinstance(found, int):
                journal._version, journal._term = found, term_floor(store.metadata) + 1
                return journal, None
            # Pulsar's format moves such a mark-delete position to the end of the log.
            if journal.form.has_deltas or not ledgers.is_beyond_end(found.recovered.content.mark_delete):
                check_within_log(found.recovered.content, ledgers)
            if (taken := journal._take_over(found, recovery)) is not None:
                journal.snapshot_bytes = taken.recovered.byte_count
                return journal, taken
        raise StoreError(f"{journal.path}: the record kept changing while the cursor was opened")

    def has_record(self) -> bool:
        """Return whether the record in the store is this owner's; False, too, for one that cannot be read."""
        with suppress(CorruptStateError, UnsupportedVersionError):
            found = self.store.metadata.get(self.path)
            return found is not None and self._is_ours(found.data)
        return False

    @property
    def last_entry(self) -> Position | None:
        """The cursor ledger and the last entry that is known to be in it; None until this owner has written one."""
        # None, too, if the state is in the metadata store, or while a new ledger is started. Any thread may read it.
        ledger_id, entry_count = self._pointed_at, self.entry_count
        return None if ledger_id is None or not entry_count else Position(ledger_id, entry_count - 1)

    def prepare(self, content: CursorState) -> tuple[int, bytes]:
        """Return the ledger and the entry to be appended to it."""
        # To be followed by `appended`. Without it, because the append failed, the next write must begin a new ledger.
        assert self.open_ledger_id is not None
        ledger_id, self.open_ledger_id = self.open_ledger_id, None
        return ledger_id, self._encode(content)

    def appended(self, ledger_id: int, encoded: bytes) -> int:
        """Note that an entry was appended and synced, and return its size."""
        self.open_ledger_id = ledger_id
        self._chain = self.form.chain(encoded)
        self.entry_count += 1
        self.delta_bytes += len(encoded)
        return len(encoded)

    def begin_ledger(self, content: CursorState) -> int:
        """Write the whole state to a new ledger, swing the record, delete the old ledger; return the bytes written."""
        # After a `StoreError` a recovery reads the state before or the new one, and either is right.
        self._check_not_deleted()
        self.open_ledger_id, self._chain, self.entry_count = None, 0, 0
        encoded = self._encode(content)
        is_created = self._version == ABSENT
        ledger_id = self._new_ledger(encoded)
        record = self._record(ledger_id, content.mark_delete)
        self._swing(record, self.form, self.form.encode_record(record))
        if is_created:
            self._check_not_deleted_meanwhile(ledger_id)
        self.open_ledger_id = ledger_id
        self._chain = self.form.chain(encoded)
        self.entry_count += 1
        self.snapshot_bytes, self.delta_bytes = len(encoded), 0
        return len(encoded)

    def encode_record(self, content: CursorState) -> bytes:
        """Return the record that would hold the whole state."""
        return self.form.encode_record(self._record(None, content.mark_delete, content))

    def write_record(self, content: CursorState) -> int:
        """Write the whole state to the metadata store, delete the ledger, and return the bytes written."""
        # `PayloadTooLargeError`, above `metadata_bytes_max`: nothing was written. After a `StoreError` a recovery reads
        # the state before or the new one.
        self.open_ledger_id = None
        record = self._record(None, content.mark_delete, content)
        encoded = self.form.encode_record(record)
        if self._has_record and len(encoded) > self._metadata_bytes_max:
            raise self._too_large(len(encoded), "the state")
        written = self._swing(record, self.form, encoded)
        self.snapshot_bytes, self.delta_bytes = written, 0
        return written

    def write_cursor_properties(self, properties: Mapping[str, str]) -> int:
        """Replace the cursor properties, nothing else, and return the bytes written; errors as `check_room_for`."""
        # A state in the record that leaves them no room moves to a ledger.
        self.check_room_for(properties)
        record, form = self._record(self._pointed_at, self._mark_delete), self._record_form
        if self._pointed_at is None:
            # Read back rather than kept: it is the whole state.
            found = self.store.metadata.get(self.path)
            if found is None or not self._is_ours(found.data):
                raise self.fenced()
            decoded = decode_record(found.data)
            record, form = decoded.record, decoded.form
        else:
            record = replace(record, properties=self._properties)
        record = replace(record, cursor_properties=dict(properties))
        encoded = form.encode_record(record)
        if self._pointed_at is None and len(encoded) > self._metadata_bytes_max:
            record, form = self._moved(record), self.form
            encoded = form.encode_record(record)
        before, self.cursor_properties = self.cursor_properties, record.cursor_properties
        try:
            return self._swing(record, form, encoded)
        except BaseException:
            self.cursor_properties = before
            raise

    def check_room_for(self, properties: Mapping[str, str]) -> None:
        """Raise `PayloadTooLargeError` if a record with cursor properties, and no acks, would be too large."""
        # No more bytes of them than there are now are accepted under whatever limit, in either format.
        size = self._pointer_bytes_max(properties)
        if size > self._metadata_bytes_max and size > self._pointer_bytes_max(self.cursor_properties):
            raise self._too_large(size, "cursor properties")

    def begin_epoch(self) -> None:
        """Begin a new epoch with the next whole state: no record from before counts after it."""
        self._epoch += 1

    def abandon_epoch(self) -> None:
        """Go back to the epoch before: the new one could not be written."""
        self._epoch -= 1

    def _encode(self, content: CursorState) -> bytes:
        return self.form.encode_entry(content, epoch=self._epoch, sequence=self.entry_count, chain=self._chain)

    def _record(
        self, ledger_id: int | None, mark_delete: Position | None, content: CursorState | None = None
    ) -> CursorRecord:
        return CursorRecord(
            ledger_id, self._epoch, self._term, mark_delete, content, self.cursor_properties, self._unknown
        )

    def _take_over(self, found: StoredCursor, recovery: Recovery) -> StoredCursor | None:
        """Keep every earlier owner out, and return the state that it left; None if the record has changed since."""
        record, last = found.record, found.entry_count - 1
        self._epoch, self._term = record.epoch, record.term + 1
        self._mark_delete, self._properties = record.mark_delete, record.properties
        self._pointed_at, self.cursor_properties = record.cursor_ledger_id, record.cursor_properties
        self._unknown, self._record_form = record.unknown, found.form
        taken = replace(record, term=self._term)
        encoded = found.form.encode_record(taken)
        if self._pointed_at is None and len(encoded) > self._metadata_bytes_max:
            try:
                taken, self._record_form = self._moved(taken), self.form
            except CursorFencedError:
                return None
            encoded = self.form.encode_record(taken)
        ledger_id = taken.cursor_ledger_id
        try:
            self._version = self.store.metadata.put(self.path, encoded, expected_version=found.version)
        except VersionMismatchError:
            if ledger_id is not None and ledger_id != self._pointed_at:
                self._delete_unnamed(ledger_id)
            return None
        if self._pointed_at is not None:
            try:
                last = self.store.ledgers.fence(self._pointed_at)
            except LedgerNotFoundError:
                # It was missing before, and a repair does without it; or else the last owner has just left it.
                if not found.is_repaired:
                    return None
            except CorruptStateError:
                # It was damaged before, and an embedded store refuses the appends of an earlier owner, too. BookKeeper
                # takes those of one that lives and saw the ledger before the damage: a repair has given them up.
                if not found.is_repaired:
                    raise
        self._pointed_at, self._has_record = ledger_id, True
        self._delete(self._leftovers - {self._pointed_at})
        # The owner before may have appended records until it was fenced.
        return found if found.is_repaired or last + 1 == found.entry_count else recovery.read_journal(found)

    def _moved(self, record: CursorRecord) -> CursorRecord:
        """Write the state that a record holds to a new ledger, in our format, and return the record that names this."""
        # The ledger is not continued: it may hold less than the memory takes for durable, after a reset that failed.
        assert record.content is not None
        encoded = self.form.encode_entry(record.content, epoch=record.epoch, sequence=0, chain=0)
        return replace(record, cursor_ledger_id=self._new_ledger(encoded), content=None)

    def _new_ledger(self, encoded: bytes) -> int:
        """Write the first entry of a new ledger, and return the ledger."""
        try:
            ledger_id = self.store.ledgers.create(self._owner)
            self._made.add(ledger_id)
            self.store.ledgers.append(ledger_id, [encoded])
        except (LedgerFencedError, LedgerNotFoundError) as error:
            raise self.fenced() from error
        except CorruptStateError as error:
            raise self.unwritable(error) from error
        return ledger_id

    def _too_large(self, byte_count: int, what: str) -> PayloadTooLargeError:
        return PayloadTooLargeError(
            f"{self.path}: a record with {what} has {byte_count} bytes, more than the metadata store may be given"
            f" (metadata_bytes_max={self._metadata_bytes_max})"
        )

    def _pointer_bytes_max(self, properties: Mapping[str, str]) -> int:
        """Return how large a record with cursor properties may become, in whichever format, that has no acks."""
        # Our own properties are always small and not counted one by one.
        properties = {name: text for name, text in properties.items() if not name.startswith(OWN_PREFIX)}
        record = CursorRecord(
            LEDGER_ID_MAX, 0, _TERM_MAX, Position(LEDGER_ID_MAX, ENTRY_ID_MAX), None, properties, self._unknown
        )
        return _OWN_BYTES + max(len(form.encode_record(record)) for form in (NativeFormat(), PulsarFormat()))

    def _swing(self, record: CursorRecord, form: JournalFormat, encoded: bytes) -> int:
        """Put a record, encoded in its form, delete the ledgers that it does not name, and return its size."""
        ledger_id = record.cursor_ledger_id
        try:
            self._put(encoded)
        except CorruptStateError as error:
            raise StoreError(f"{self.path}: the record cannot be written: {error}") from error
        except CursorFencedError:
            if ledger_id is not None and ledger_id != self._pointed_at:
                self._delete_unnamed(ledger_id)
            raise
        if self._pointed_at is not None:
            self._made.add(self._pointed_at)
        self._pointed_at, self._mark_delete, self._properties = ledger_id, record.mark_delete, record.properties
        self._record_form, self._has_record = form, True
        self._delete((self._made | self._leftovers) - {self._pointed_at})
        return len(encoded)

    def _put(self, encoded: bytes) -> None:
        try:
            self._version = self.store.metadata.put(self.path, encoded, expected_version=self._version)
        except VersionMismatchError as error:
            # An earlier swing of ours may have happened although the store reported a failure. Then the version is
            # ours to adopt; a record of anything else means another owner.
            found = self.store.metadata.get(self.path)
            if found is None or not self._is_ours(found.data):
                raise self.fenced() from error
            self._version = self.store.metadata.put(self.path, encoded, expected_version=found.version)

    def _is_ours(self, encoded: bytes) -> bool:
        record = decode_record(encoded).record
        ledger_id = record.cursor_ledger_id
        # Until a record of this owner was put, one without a ledger of its own is that of a deletion, or of another
        # that creates the cursor: their terms may be the same.
        is_known = ledger_id in self._made or (self._has_record and ledger_id in {None, self._pointed_at})
        return record.term == self._term and is_known

    def fenced(self) -> CursorFencedError:
        """Return the error for a cursor that another owner has opened."""
        return CursorFencedError(f"{self.path}: another owner has opened this cursor since")

    def unwritable(self, error: CorruptStateError) -> StoreError:
        """Return the error for a ledger that damage keeps from being written; the metadata store may still be."""
        return StoreError(f"{self.path}: the cursor ledger cannot be written: {error}")

    def _check_not_deleted(self) -> None:
        """Refuse to begin a ledger if the subscription was deleted: a crash would leave it without a record."""
        if not self._has_record:
            return
        with suppress(CorruptStateError, UnsupportedVersionError):
            found = self.store.metadata.get(self.path)
            # A record of the version that this owner put is its own.
            if found is None or (found.version != self._version and decode_record(found.data).record.is_deleted):
                raise self.fenced()

    def _check_not_deleted_meanwhile(self, ledger_id: int) -> None:
        """Take back the record of a new cursor if its ledger is gone."""
        # No version tells a subscription that never was from one that another owner deleted meanwhile, with the ledgers
        # that it found.
        try:
            self.store.ledgers.last(ledger_id)
        except LedgerNotFoundError as error:
            with suppress(VersionMismatchError):
                self.store.metadata.delete(self.path, expected_version=self._version)
            raise self.fenced() from error

    def _delete_unnamed(self, ledger_id: int) -> None:
        """Delete a ledger of ours that no record will name, as the cursor is another owner's or was deleted."""
        # If the subscription was deleted, no later open might look for it, and one that does might take it for a
        # journal whose record was lost.
        with suppress(StoreError, CorruptStateError, UnsupportedVersionError):
            found = self.store.metadata.get(self.path)
            if found is None or decode_record(found.data).record.cursor_ledger_id != ledger_id:
                self.store.ledgers.delete(ledger_id)

    def _delete(self, ledger_ids: set[int]) -> None:
        """Delete ledgers that no record names."""
        # They are garbage, not state: where the storage refuses, the next swing or the next open tries again.
        for ledger_id in sorted(ledger_ids):
            try:
                self.store.ledgers.delete(ledger_id)
            except (StoreError, CorruptStateError):
                continue  # One that can never be deleted must not keep the others.
            self._made.discard(ledger_id)
            self._leftovers.discard(ledger_id)


def cursor_path(topic: str, subscription: str) -> str:
    """Return the metadata path of a cursor's record; TypeError or ValueError if a name is no text, or empty."""
    check_name("topic", topic)
    check_name("subscription", subscription)
    return f"{ROOT}/{quote(topic, safe='')}/{quote(subscription, safe='')}"


def cursor_owner(path: str) -> str:
    """Return in whose name a cursor's ledgers are made."""
    return f"cursor {path}"


_ATTEMPTS = 10


def delete_subscription(store: Store, *, topic: str, subscription: str) -> bool:
    """Delete a subscription, also one that cannot be read, or the leftovers of one after a crash.

    If it is open, its owner is fenced: every later persist of it raises `CursorFencedError`. A subscription that is
    opened under this name afterwards is new.

    Args:
        store: Where.
        topic: The name of the topic.
        subscription: The name of the subscription.

    Returns:
        Whether there was anything to delete.

    Raises:
        TypeError, ValueError: A name is no text, or is empty.
        UnsupportedVersionError: Its record has another version; nothing was deleted.
        StoreError, CorruptStateError: The storage failed. The subscription is as it was, or there is none and some of
            its bytes are left: call again, or open a new subscription of that name.

    Complexity: O(its ledgers); in some stores O(ledgers of the store).
    """
    return delete_cursor(store, cursor_path(topic, subscription))


def delete_cursor(store: Store, path: str, *, check: Callable[[], object] = lambda: None) -> bool:
    """Delete the cursor of a path as `delete_subscription`."""
    is_marked = False
    for _ in range(_ATTEMPTS):
        # Listed before the record is put. If another owner creates the cursor again and these include a ledger of it,
        # then its record cannot be put after this one, or this one fails.
        leftovers = store.ledgers.owned_by(cursor_owner(path))
        found = _find(store.metadata, path)
        if found is None and not leftovers:
            return is_marked
        check()
        if is_marked and found is not None and not found[2]:
            return True  # A new subscription was created meanwhile.
        version = _mark_deleted(store, path, found)
        if version is None:
            continue
        is_marked = True
        for ledger_id in leftovers:
            store.ledgers.delete(ledger_id)
        if not store.ledgers.owned_by(cursor_owner(path)):
            with suppress(VersionMismatchError):  # Else a new subscription was created meanwhile.
                store.metadata.delete(path, expected_version=version)
            return True
    raise StoreError(f"{path}: the record kept changing while the subscription was deleted")


def _find(metadata: MetadataStore, path: str) -> tuple[int, int, bool] | None:
    """Return the record's term, its version, and whether it marks a deletion; None without one."""
    # A record that cannot be read is replaced like any other.
    try:
        value = metadata.get(path)
    except DamagedValueError as error:
        return term_after_loss(metadata, error.version), error.version, False
    if value is None:
        return None
    try:
        record = decode_record(value.data).record
    except CorruptStateError:
        return term_after_loss(metadata, value.version), value.version, False
    return record.term, value.version, record.is_deleted


def _mark_deleted(store: Store, path: str, found: tuple[int, int, bool] | None) -> int | None:
    """Put the record of a deleted subscription, and return its version; None if the record was changed meanwhile."""
    metadata = store.metadata
    term, version = (term_after_loss(metadata, ABSENT), ABSENT) if found is None else found[:2]
    raise_term_floor(metadata, term + 1)
    nothing = CursorState(Position(0, -1), DeletedRanges(), BatchIndexes(), {})
    record = CursorRecord(None, 0, term + 1, nothing.mark_delete, nothing, {DELETED_PROPERTY: ""})
    try:
        return metadata.put(path, NativeFormat().encode_record(record), expected_version=version)
    except VersionMismatchError:
        return None
