"""Storage of sealed buckets: their snapshots in ledgers, and the id of each snapshot in a registry of text.

Every call of the storage is tried up to four times, as in Pulsar. A snapshot is first written, then registered; and
first unregistered, then deleted. So a crash can only leave an unregistered snapshot, and a recovery or `clear` finds it
by its owner.

Source: ``ImmutableBucket`` and ``BookkeeperBucketSnapshotStorage`` of Apache Pulsar.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, final

from ackstate.delay.buckets.bucket import BUCKET_KEY_PREFIX, BucketKey, BucketSegment, parse_ledger_id
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.wire.pulsar.delay_snapshot import decode_segment, encode_metadata, encode_segment, segment_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ackstate.delay.buckets.bucket import Bucket
    from ackstate.position import Position
    from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes, SegmentMetadata

ATTEMPT_COUNT = 4
_BATCH_BYTES_MAX = 512 * 1024  # of one append

_Result = TypeVar("_Result")


class SnapshotLedgers(Protocol):
    """Logs of entries, under the contract of `ackstate.stores.base.LedgerStore`. Calls fail with `AckStateError`."""

    def create(self, owner: str) -> int:
        """Create an empty ledger and return its id."""
        ...

    def append(self, ledger_id: int, entries: Sequence[bytes]) -> int:
        """Append entries with one sync, all or nothing, and return the id of the last one."""
        ...

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """Return the entries from `first` (included) to `end` (excluded)."""
        ...

    def last(self, ledger_id: int) -> int:
        """Return the id of the last entry, -1 for an empty ledger."""
        ...

    def delete(self, ledger_id: int) -> None:
        """Delete a ledger; no-op if it does not exist."""
        ...

    def owned_by(self, owner: str) -> list[int]:
        """Return the ids of an owner's ledgers."""
        ...


class BucketRegistry(Protocol):
    """A durable map of names to texts: the internal properties of a cursor. Calls fail with `AckStateError`."""

    def get_all(self) -> Mapping[str, str]:
        """Return every name with its text; it may include names other than bucket keys."""
        ...

    def put(self, name: str, text: str) -> None:
        """Set the text of a name; it is durable when this returns."""
        ...

    def remove(self, name: str) -> None:
        """Remove a name, durably when this returns; no-op if it does not exist."""
        ...


@dataclass(frozen=True, slots=True)
class SnapshotStorage:
    """The storage of one index's buckets. Only one index at a time may use an owner's snapshots and their registry.

    Attributes:
        ledgers: The snapshots.
        registry: The snapshot of each bucket.
        owner: The owner of the ledgers; nothing else may have ledgers of this owner.
        read_deliver_at_ms: Returns the delivery times stored in messages of the log, in the given order, to rebuild a
            damaged segment. It fails with `AckStateError`. None if there is no log.
    """

    ledgers: SnapshotLedgers
    registry: BucketRegistry
    owner: str
    read_deliver_at_ms: Callable[[Sequence[Position]], Sequence[int]] | None = None


@final
class BucketSnapshots:
    """The stored buckets of one index; not safe for concurrent use.

    Attributes:
        succeeded: Number of successful operations by kind (create, load, delete, merge).
        failed: Number of failed operations by kind; all attempts of one operation count once.
    """

    def __init__(self, storage: SnapshotStorage) -> None:
        self._storage = storage
        self.succeeded: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        # Retired snapshots that are still stored, since a call failed, and the key under which each may still be
        # registered.
        self._retired: dict[int, BucketKey | None] = {}

    @property
    def retired(self) -> frozenset[int]:
        """The retired snapshots that could not be deleted yet."""
        return frozenset(self._retired)

    def write(self, segments: Sequence[DelayedIndexes]) -> tuple[int, list[BucketSegment]]:
        """Store a bucket in a new ledger, and return its id and the in-memory parts of the segments.

        The bucket counts only once it is registered, so a large one may be written by several calls.

        Raises:
            AckStateError: Every attempt failed.
        """
        encoded = [encode_segment(segment) for segment in segments]
        metadata = [segment_metadata(*pair) for pair in zip(segments, encoded, strict=True)]
        entries = [encode_metadata(metadata), *encoded]
        bucket_id = self._counted("create", lambda: self._write_once(entries))
        return bucket_id, [BucketSegment.of(each) for each in metadata]

    def _write_once(self, entries: Sequence[bytes]) -> int:
        # A new ledger for each attempt: a failed attempt may have written entries.
        bucket_id = self._storage.ledgers.create(self._storage.owner)
        try:
            for batch in _batches(entries):
                self._storage.ledgers.append(bucket_id, batch)
        except AckStateError:
            self._retired[bucket_id] = None
            raise
        return bucket_id

    def register(self, key: BucketKey, bucket_id: int) -> None:
        """Register a snapshot as that of its bucket.

        Raises:
            AckStateError: Every attempt failed; the snapshot may be registered nevertheless.
        """
        attempt(lambda: self._storage.registry.put(str(key), str(bucket_id)))

    def read_metadata(self, bucket_id: int) -> tuple[bytes, int] | None:
        """Return the encoded metadata of a snapshot and its number of segments, None if it is empty.

        Raises:
            AckStateError: Every attempt failed.
        """
        ledgers = self._storage.ledgers
        last = attempt(lambda: ledgers.last(bucket_id))
        return None if last < 0 else (attempt(lambda: ledgers.read(bucket_id, 0, 1))[0], last)

    def read_segment(self, bucket_id: int, number: int, metadata: SegmentMetadata) -> DelayedIndexes:
        """Return a segment, the first has number 1.

        Raises:
            CorruptStateError: It does not match its metadata.
            UnsupportedVersionError: A newer release wrote it.
            AckStateError: Every attempt failed.
        """
        entry = self._counted("load", lambda: self._storage.ledgers.read(bucket_id, number, number + 1)[0])
        return decode_segment(entry, what=f"delay snapshot {bucket_id}, segment {number}", metadata=metadata)

    def read_all(self, bucket: Bucket) -> list[DelayedIndexes]:
        """Return all segments of a bucket; errors as for `read_segment`."""
        bucket_id, last = bucket.bucket_id, bucket.last
        entries = self._counted("load", lambda: self._storage.ledgers.read(bucket_id, 1, last + 1))
        return [
            decode_segment(entry, what=f"delay snapshot {bucket_id}, segment {number}", metadata=segment.metadata)
            for number, (entry, segment) in enumerate(zip(entries, bucket.segments, strict=True), 1)
        ]

    def read_deliver_at_ms(self, positions: Sequence[Position]) -> Sequence[int] | None:
        """Return the delivery times stored in messages, None if they cannot be read."""
        read = self._storage.read_deliver_at_ms
        if read is None:
            return None
        try:
            times = attempt(lambda: read(positions))
        except AckStateError:
            return None
        if len(times) != len(positions):
            raise ValueError(f"read_deliver_at_ms must return {len(positions)} times, got {len(times)}")
        return times

    def is_gone(self, bucket_id: int, number: int) -> bool:
        """Return whether a segment is certainly no longer stored: its snapshot was deleted, or cut."""
        try:
            return bucket_id not in self.stored() or attempt(lambda: self._storage.ledgers.last(bucket_id)) < number
        except AckStateError:
            return False

    def stored(self) -> set[int]:
        """Return every snapshot that is stored, registered or not.

        Raises:
            AckStateError: Every attempt failed.
        """
        return set(attempt(lambda: self._storage.ledgers.owned_by(self._storage.owner)))

    def registered(self) -> dict[str, str]:
        """Return the registered texts whose keys begin as a bucket's.

        Raises:
            AckStateError: Every attempt failed.
        """
        texts = attempt(self._storage.registry.get_all)
        return {name: text for name, text in texts.items() if name.startswith(BUCKET_KEY_PREFIX)}

    def drop(self, bucket_id: int, key: BucketKey | None = None) -> None:
        """Retire a snapshot: unregister it, and delete it.

        After a failure, `delete_retired` retries.
        """
        self._retired[bucket_id] = key
        self._try_to_drop(bucket_id)

    def unregister(self, key: BucketKey) -> None:
        """Remove a key whose snapshot also belongs to another bucket.

        Raises:
            AckStateError: Every attempt failed; it may be registered nevertheless.
        """
        attempt(lambda: self._storage.registry.remove(str(key)))

    def delete_retired(self) -> None:
        """Delete every retired snapshot; after a failure the next call retries."""
        for bucket_id in tuple(self._retired):
            self._try_to_drop(bucket_id)

    def delete_all(self) -> None:
        """Unregister and delete every snapshot that is registered or stored.

        All are tried, even after a failure. A snapshot that cannot be unregistered is not deleted. `delete_retired`
        retries the rest.

        Raises:
            AckStateError: Every attempt of a call failed: the first such error.
        """
        errors: list[AckStateError] = []
        self._retired = dict.fromkeys(self.stored())
        for name, text in self.registered().items():
            try:
                attempt(lambda name=name: self._storage.registry.remove(name))  # type: ignore[misc]
            except AckStateError as error:
                errors.append(error)
                self._retire_registered(name, text)
        for bucket_id in [bucket_id for bucket_id, key in self._retired.items() if key is None]:
            try:
                self._delete(bucket_id)
            except AckStateError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _retire_registered(self, name: str, text: str) -> None:
        """Record the key under which a stored snapshot is still registered, if key and text are well-formed."""
        with suppress(ValueError):
            key, bucket_id = BucketKey.parse(name), parse_ledger_id(text)
            if bucket_id in self._retired:
                self._retired[bucket_id] = key

    def count(self, kind: str, *, is_done: bool) -> None:
        """Count a successful or failed operation."""
        (self.succeeded if is_done else self.failed)[kind] += 1

    def _try_to_drop(self, bucket_id: int) -> None:
        try:
            key = self._retired[bucket_id]
            if key is not None:
                if self.registered().get(str(key)) == str(bucket_id):
                    attempt(lambda: self._storage.registry.remove(str(key)))
                self._retired[bucket_id] = None
            self._delete(bucket_id)
        except AckStateError:
            return

    def _delete(self, bucket_id: int) -> None:
        self._counted("delete", lambda: self._storage.ledgers.delete(bucket_id))
        del self._retired[bucket_id]

    def _counted(self, kind: str, call: Callable[[], _Result]) -> _Result:
        try:
            result = attempt(call)
        except AckStateError:
            self.count(kind, is_done=False)
            raise
        self.count(kind, is_done=True)
        return result


def _batches(entries: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the entries in order, in batches that fit into one request, of at least one entry each."""
    first = size = 0
    for at, entry in enumerate(entries):
        if at > first and size + len(entry) > _BATCH_BYTES_MAX:
            yield entries[first:at]
            first, size = at, 0
        size += len(entry)
    yield entries[first:]


def attempt(call: Callable[[], _Result]) -> _Result:
    """Call up to four times until it succeeds; damage is not retried, since a second read would not help."""
    for _ in range(ATTEMPT_COUNT - 1):
        try:
            return call()
        except (CorruptStateError, UnsupportedVersionError):
            raise
        except AckStateError:
            continue
    return call()
