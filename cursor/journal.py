"""The durable side of one cursor: a journal of records in a cursor ledger, and the pointer that names the ledger.

A ledger begins with a snapshot; deltas follow. A new ledger is made complete before the pointer swings to it by
compare-and-set, and the old one is deleted after, so a crash between any two steps leaves one readable journal. What
such a crash leaves over is found by its owner's name and deleted at the next open.

Opening reads the journal and then takes the cursor over: it raises the pointer's term and fences the ledger, so that an
earlier owner can neither swing nor append.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, final
from urllib.parse import quote

from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import CorruptStateError, CursorFencedError
from ackstate.wire import native
from ackstate.wire.native import Pointer, Record, RecordKind
from cursor.store import ABSENT, LedgerFencedError, LedgerNotFoundError, StoreError, VersionMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.position import Position
    from cursor.store import Store, Versioned

ROOT = "/managed-ledgers"
_TAKEOVER_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a journal held.

    Attributes:
        mark_delete: The last durable mark-delete position.
        deleted: The durable acks above it.
        batch: The durable acks of batch indexes.
        properties: What the last mark-delete carried.
        records_replayed: Records that were read and folded.
        bytes_discarded: Size of a torn last record that was left out; it was never reported durable.
        discarded_offset: Where it begins, in bytes from the start of the journal; -1 without one.
        discarded_reason: Why it could not be read; empty without one.
    """

    mark_delete: Position
    deleted: DeletedRanges
    batch: BatchIndexes
    properties: Mapping[str, int]
    records_replayed: int
    bytes_discarded: int = 0
    discarded_offset: int = -1
    discarded_reason: str = ""


class Content(NamedTuple):
    """What one record says: in a snapshot all of it, in a delta what is new.

    Attributes:
        mark_delete: The mark-delete position.
        deleted: Acked entries above it.
        batch: Partly acked batches.
        properties: What the latest mark-delete carried.
    """

    mark_delete: Position
    deleted: DeletedRanges
    batch: BatchIndexes
    properties: Mapping[str, int]


@final
class Journal:
    """Appends a cursor's records and swings its pointer; one owner, one write at a time.

    Made by `open`. After a failed write the ledger is not appended to again, because nobody knows whether its end holds
    the record: the next write begins a new one.
    """

    def __init__(self, store: Store, *, topic: str, subscription: str) -> None:
        self.store = store
        self.path = cursor_path(topic, subscription)
        self._owner = f"cursor {self.path}"
        self._version = ABSENT
        self._epoch = 0
        self._term = 1
        self._pointed_at: int | None = None  # the ledger that a recovery would read
        self._open_ledger: int | None = None  # the same if it may be appended to, else None
        self._made: set[int] = set()  # ledgers that a pointer of ours named or may come to name
        self._leftovers: set[int] = set()  # ledgers of earlier owners, to be deleted once the pointer is ours
        self._chain = 0
        self._sequence = 0
        self.snapshot_bytes = 0
        self.delta_bytes = 0

    @classmethod
    def open(cls, store: Store, *, topic: str, subscription: str) -> tuple[Journal, Recovered | None]:
        """Take the cursor over and read what is durable of it; None if there never was such a cursor.

        Raises:
            CorruptStateError: There is a journal, and it cannot be read; it is left as it is.
            UnsupportedVersionError: A newer release wrote it.
            StoreError: The storage failed.
        """
        journal = cls(store, topic=topic, subscription=subscription)
        for _ in range(_TAKEOVER_ATTEMPTS):
            # Listed before the pointer is read and deleted after it is ours: a ledger of this list that another owner
            # is about to swing to, or has, it can then no longer swing to, or its swing makes ours fail.
            journal._leftovers = set(store.ledgers.owned_by(journal._owner))
            found = store.metadata.get(journal.path)
            if found is None:
                return journal, None
            recovered = journal._take_over(found)
            if recovered is not None:
                journal._delete_leftovers()
                return journal, recovered
        raise StoreError(f"{journal.path}: the pointer kept changing while the cursor was opened")

    @property
    def needs_snapshot(self) -> bool:
        """Whether the next write must be a snapshot because no ledger can be appended to."""
        return self._open_ledger is None

    @property
    def entry_count(self) -> int:
        """How many records the ledger holds that is appended to."""
        return self._sequence

    def append_delta(self, content: Content) -> int:
        """Append what is new since the record before, sync, and return the bytes written.

        Raises:
            CursorFencedError: Another owner has the cursor; nothing was written.
            StoreError: The append failed; whether it happened is unknown, and the next write must be a snapshot.
        """
        ledger_id, encoded = self.prepare_delta(content)
        try:
            self.store.ledgers.append(ledger_id, encoded)
        except (LedgerFencedError, LedgerNotFoundError) as error:
            raise self._fenced() from error
        return self.appended(ledger_id, encoded)

    def prepare_delta(self, content: Content) -> tuple[int, bytes]:
        """Return the ledger and the record to be appended to it; one of the two that follow must be told the outcome.

        Until then, and if the outcome is unknown for good, the next write must be a snapshot.
        """
        assert self._open_ledger is not None
        ledger_id, self._open_ledger = self._open_ledger, None
        return ledger_id, self._encode(RecordKind.DELTA, content)

    def appended(self, ledger_id: int, encoded: bytes) -> int:
        """Go on after a record that was appended and synced, and return its size."""
        self._open_ledger = ledger_id
        self._advance_chain(encoded)
        self.delta_bytes += len(encoded)
        return len(encoded)

    def not_appended(self, ledger_id: int) -> None:
        """Go on as before: the record is certain not to have been appended."""
        self._open_ledger = ledger_id

    def write_snapshot(self, content: Content) -> int:
        """Write the whole state to a new ledger, swing the pointer, delete the old ledger; return the bytes written.

        Raises:
            CursorFencedError: Another owner has the cursor.
            StoreError: A step failed; the journal before or the new one is what a recovery reads, and either is right.
        """
        self._open_ledger, self._chain, self._sequence = None, 0, 0
        encoded = self._encode(RecordKind.SNAPSHOT, content)
        ledger_id = self.store.ledgers.create(self._owner)
        self._made.add(ledger_id)
        try:
            self.store.ledgers.append(ledger_id, encoded)
        except (LedgerFencedError, LedgerNotFoundError) as error:
            raise self._fenced() from error
        self._swing(ledger_id)
        if self._pointed_at is not None:
            self._made.add(self._pointed_at)
        self._open_ledger = self._pointed_at = ledger_id
        self._advance_chain(encoded)
        self.snapshot_bytes, self.delta_bytes = len(encoded), 0
        self._delete(self._made - {ledger_id})
        self._delete_leftovers()
        return len(encoded)

    def write_reset(self, content: Content) -> int:
        """Write a snapshot as `write_snapshot` does, in a new epoch: no record from before counts after it.

        Raises:
            As `write_snapshot`; whether the reset is what a recovery reads is then unknown until the next write.
        """
        self._epoch += 1
        try:
            return self.write_snapshot(content)
        except BaseException:
            self._epoch -= 1
            raise

    def _encode(self, kind: RecordKind, content: Content) -> bytes:
        mark_delete, deleted, batch, properties = content
        return native.encode(
            Record(kind, self._epoch, self._sequence, self._chain, mark_delete, deleted, properties, batch)
        )

    def _advance_chain(self, encoded: bytes) -> None:
        self._chain = native.checksum(encoded)
        self._sequence += 1

    def _take_over(self, found: Versioned) -> Recovered | None:
        """Read the journal that a pointer names, then keep every earlier owner out; None if the pointer has changed.

        What cannot be read is refused before anything is written.
        """
        pointer = native.decode_pointer(found.data)
        ledgers, ledger_id = self.store.ledgers, pointer.cursor_ledger_id
        self._pointed_at, self._epoch, self._term = ledger_id, pointer.epoch, pointer.term + 1
        taken = native.encode_pointer(replace(pointer, term=self._term))
        try:
            entries = ledgers.read(ledger_id, 0, ledgers.last(ledger_id) + 1)
            recovered = fold(entries, what=f"journal of {self.path}", epoch=self._epoch)
            self._version = self.store.metadata.put(self.path, taken, expected_version=found.version)
            last = ledgers.fence(ledger_id)
        except VersionMismatchError:
            return None
        except LedgerNotFoundError as error:
            if self.store.metadata.get(self.path) != found:
                return None
            raise CorruptStateError(
                f"journal of {self.path}", offset=0, expected="the cursor ledger", found=str(error)
            ) from error
        if last + 1 == len(entries):
            return recovered
        # The owner before appended until it was fenced.
        return fold(ledgers.read(ledger_id, 0, last + 1), what=f"journal of {self.path}", epoch=self._epoch)

    def _swing(self, ledger_id: int) -> None:
        pointer = native.encode_pointer(Pointer(ledger_id, self._epoch, self._term))
        try:
            self._version = self.store.metadata.put(self.path, pointer, expected_version=self._version)
        except VersionMismatchError as error:
            # An earlier swing of ours may have happened although the store reported a failure. Then the version is
            # ours to adopt; a pointer to anything else means another owner.
            found = self.store.metadata.get(self.path)
            if found is None or not self._is_ours(found):
                raise self._fenced() from error
            self._version = self.store.metadata.put(self.path, pointer, expected_version=found.version)

    def _is_ours(self, found: Versioned) -> bool:
        pointer = native.decode_pointer(found.data)
        return pointer.term == self._term and pointer.cursor_ledger_id in self._made

    def _fenced(self) -> CursorFencedError:
        return CursorFencedError(f"{self.path}: another owner has opened this cursor since")

    def _delete_leftovers(self) -> None:
        """Delete the ledgers that a crash left without a pointer; the pointer is ours."""
        self._delete(self._leftovers - {self._pointed_at})

    def _delete(self, ledger_ids: set[int]) -> None:
        """Delete ledgers that no pointer names.

        They are garbage, not state: where the storage refuses, the next snapshot or the next open tries again.
        """
        for ledger_id in sorted(ledger_ids):
            try:
                self.store.ledgers.delete(ledger_id)
            except StoreError:
                return
            self._made.discard(ledger_id)
            self._leftovers.discard(ledger_id)


def cursor_path(topic: str, subscription: str) -> str:
    """Return the metadata path of a cursor's pointer."""
    return f"{ROOT}/{quote(topic, safe='')}/{quote(subscription, safe='')}"


def fold(entries: list[bytes], *, what: str, epoch: int) -> Recovered:
    """Fold a journal's records into the state that they describe.

    Args:
        entries: Encoded records, a snapshot first.
        what: The journal's name for error messages.
        epoch: The epoch that the pointer names.

    Raises:
        CorruptStateError: A record before the last cannot be read, or one is missing, repeated or a stranger. A last
            one that cannot be read is discarded and reported: its write was never reported durable.
        UnsupportedVersionError: A newer release wrote a record.
    """
    if not entries:
        raise CorruptStateError(what, offset=0, expected="a snapshot", found="no record")
    deleted, batch, offset, chain, torn = DeletedRanges(), BatchIndexes(), 0, 0, ""
    record = None
    for sequence, encoded in enumerate(entries):
        try:
            found = native.decode(encoded)
        except CorruptStateError as error:
            if record is None or sequence < len(entries) - 1:
                raise CorruptStateError(
                    what, offset=offset + error.offset, expected=error.expected, found=error.found
                ) from error
            torn = str(error)
            break
        expected = (RecordKind.DELTA if sequence else RecordKind.SNAPSHOT, epoch, sequence, chain)
        if (found.kind, found.epoch, found.sequence, found.chain) != expected:
            raise CorruptStateError(
                what,
                offset=offset,
                expected=f"(kind, epoch, sequence, chain) {tuple(map(int, expected))}",
                found=(int(found.kind), found.epoch, found.sequence, found.chain),
            )
        record = found
        deleted.update(record.deleted)
        deleted.remove_at_most(record.mark_delete)
        for position, unacked_words in record.batch.items():
            batch.ack(position, unacked_words)
        batch.remove_at_most(record.mark_delete)
        for ledger_id, bitmap in record.deleted.bitmaps():
            batch.discard_entries(ledger_id, bitmap)
        chain = native.checksum(encoded)
        offset += len(encoded)
    assert record is not None
    return Recovered(
        record.mark_delete, deleted, batch, record.properties,
        records_replayed=len(entries) - bool(torn),
        bytes_discarded=len(entries[-1]) if torn else 0,
        discarded_offset=offset if torn else -1,
        discarded_reason=torn,
    )  # fmt: skip
