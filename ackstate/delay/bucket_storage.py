"""Storage of sealed buckets: snapshots in ledgers, the registry that names them, and their recovery.

A snapshot is one ledger: entry 0 is the metadata of the segments, entries 1 to N are the segments. It is first written,
then registered; and first unregistered, then deleted. So a crash can only leave an unregistered snapshot, which a
recovery or `clear` finds by its owner. An owner takes the registry over before it changes anything: from then on no
earlier owner can register or unregister a snapshot, nor, therefore, delete one that the present owner has.

Source: ``ImmutableBucket`` and ``BookkeeperBucketSnapshotStorage`` of Apache Pulsar, PIP-195.
"""

from __future__ import annotations

import re
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar, final
from urllib.parse import quote

import numpy as np

from ackstate.entry_bitmap import union_by_ledger
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError, corrupt
from ackstate.position import LEDGER_ID_MAX
from ackstate.sealed import seal, unseal
from ackstate.stores.base import ABSENT, DamagedValueError, StoreError, VersionMismatchError, check_path
from ackstate.wire.native import check_text_properties, decode_text_properties, encode_text_properties
from ackstate.wire.pulsar.delay_snapshot import (
    SegmentMetadata,
    decode_metadata,
    decode_part,
    decode_segment,
    encode_metadata,
    encode_segment,
    segment_metadata,
    split_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyroaring import BitMap

    from ackstate.position import Position
    from ackstate.stores.base import LedgerStore, MetadataStore, Store
    from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes

BUCKET_KEY_PREFIX = "#pulsar.internal.delayed.bucket"  # of the registry's keys of buckets
ROOT = "/delayed-buckets"  # the path above the registries of topics
_OWNER_PREFIX = "delayed "  # of the ledgers of a topic's snapshots
ATTEMPT_COUNT = 4
_BATCH_BYTES_MAX = 512 * 1024  # of one append
_TAKEOVER_ATTEMPTS = 10
_LEDGER_ID = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)

_Result = TypeVar("_Result")


class BucketKey(NamedTuple):
    """The message ledgers that a bucket covers, both ends included, and its key in the registry."""

    first_ledger_id: int
    last_ledger_id: int

    def __str__(self) -> str:
        return f"{BUCKET_KEY_PREFIX}_{self.first_ledger_id}_{self.last_ledger_id}"

    @classmethod
    def parse(cls, text: str) -> BucketKey:
        """Parse the text that `str` returns; `ValueError` if it is not the key of a bucket."""
        parts = text.split("_")
        if len(parts) != 3 or parts[0] != BUCKET_KEY_PREFIX:
            raise ValueError(f"bucket key must be {BUCKET_KEY_PREFIX}_FIRST_LAST, got {text!r}")
        key = cls(parse_ledger_id(parts[1]), parse_ledger_id(parts[2]))
        if key.first_ledger_id > key.last_ledger_id:
            raise ValueError(f"bucket key must end at or after its first ledger, got {text!r}")
        return key

    def encloses(self, other: BucketKey) -> bool:
        return self.first_ledger_id <= other.first_ledger_id and other.last_ledger_id <= self.last_ledger_id


def parse_ledger_id(text: str) -> int:
    """Parse a decimal ledger id; `ValueError` if it is none."""
    if not _LEDGER_ID.fullmatch(text) or int(text) > LEDGER_ID_MAX:
        raise ValueError(f"ledger id must be a decimal number, got {text!r}")
    return int(text)


class Boundary(NamedTuple):
    """The last message of a segment, in the order in which messages are due."""

    due_ms: int
    ledger_id: int
    entry_id: int

    @classmethod
    def of(cls, segment: DelayedIndexes) -> Boundary:
        return cls(*(int(column[-1]) for column in segment))

    def count_before(self, due: DelayedIndexes) -> int:
        """Count those of sorted messages that are before this one; none may be due later than this one."""
        at = int(np.searchsorted(due.deliver_at_ms, self.due_ms))
        positions = zip(due.ledger_ids[at:].tolist(), due.entry_ids[at:].tolist(), strict=True)
        return at + sum(position < (self.ledger_id, self.entry_id) for position in positions)


class BucketSegment(NamedTuple):
    """The part of a segment that stays in memory; its metadata as bytes, a tenth of the size of the bitmaps."""

    first_due_ms: int
    last_due_ms: int
    message_count: int
    encoded: bytes

    @classmethod
    def all_of(cls, metadata: Sequence[SegmentMetadata], encoded: bytes) -> list[BucketSegment]:
        return [
            cls(each.min_deliver_at_ms, each.max_deliver_at_ms, sum(map(len, each.bitmaps.values())), part)
            for each, part in zip(metadata, split_metadata(encoded), strict=True)
        ]

    @property
    def metadata(self) -> SegmentMetadata:
        return decode_part(self.encoded, what="segment metadata in memory")


@final
class Bucket:
    """A bucket with a stored snapshot, `bucket_id`, and one segment in memory, `current`, counted from 1."""

    __slots__ = ("boundary", "bucket_id", "current", "is_live", "is_registered", "key", "message_count", "segments")

    def __init__(
        self,
        key: BucketKey,
        bucket_id: int,
        segments: Sequence[BucketSegment],
        loaded: DelayedIndexes,
        current: int = 1,
    ) -> None:
        self.key = key
        self.bucket_id = bucket_id
        self.segments = tuple(segments)  # by time; not empty
        self.current = current
        self.boundary = Boundary.of(loaded)
        # As in Pulsar: the messages to come when the bucket was sealed or recovered; it does not fall with deliveries.
        self.message_count = sum(segment.message_count for segment in self.segments[current - 1 :])
        self.is_live = True
        self.is_registered = True

    @property
    def last(self) -> int:
        return len(self.segments)

    @property
    def has_unloaded_segment(self) -> bool:
        return self.current < self.last


class RegistryFencedError(StoreError):
    """Another owner, which registered `texts`, has taken over the registry of delay buckets; nothing was changed."""

    def __init__(self, path: str, texts: Mapping[str, str]) -> None:
        super().__init__(f"{path}: another owner has taken over the registry of delay buckets")
        self.texts = texts


_REGISTRY = struct.Struct("<4sB3xQI")  # magic, version, reserved, owner, names
_REGISTRY_MAGIC, _REGISTRY_VERSION = b"ACKD", 1
_NO_OWNER = 2**64 - 1


class Registered(NamedTuple):
    """The contents of a registry: the number of its owner, and the text of each name."""

    owner: int
    texts: Mapping[str, str]


def encode_registry(registered: Registered) -> bytes:
    """Encode a registry."""
    header = _REGISTRY.pack(_REGISTRY_MAGIC, _REGISTRY_VERSION, registered.owner, len(registered.texts))
    return seal(header, *encode_text_properties(registered.texts))


def decode_registry(data: bytes) -> Registered:
    """Decode a registry; `UnsupportedVersionError` for another version, `CorruptStateError` for anything else."""
    (owner, count), reader = unseal(data, _REGISTRY, _REGISTRY_MAGIC, _REGISTRY_VERSION, what="delay registry")
    texts = dict(decode_text_properties(reader, count))
    reader.finish()
    return Registered(owner, texts)


@final
class BucketRegistry:
    """The names of one index's buckets with their texts: one value of the metadata store, changed by compare-and-set.

    Args:
        metadata: The store.
        path: Where, such as ``/delayed-buckets/orders``; nothing else uses it. `ValueError` if it is not a path.
        check: Raises `AckStateError` if the topic has another owner, who may take the registry over.
    """

    def __init__(self, metadata: MetadataStore, path: str, *, check: Callable[[], object] = lambda: None) -> None:
        check_path(path)
        self._metadata = metadata
        self._path = path
        self._check = check
        self._owner: int | None = None  # the number of this owner; None before `take_over`

    def take_over(self) -> Mapping[str, str]:
        """Become the owner, and return every name with its text: no earlier owner can change the registry any more.

        A registry that cannot be read is replaced by an empty one: its snapshots hold nothing that the log lacks.

        Raises:
            UnsupportedVersionError: A newer release wrote it; nothing was changed.
            StoreError: The store failed; whether it happened is unknown.
        """
        for _ in range(_TAKEOVER_ATTEMPTS):
            texts, version = self._find_any()
            # After the version was read: an owner that takes the topic over since changes it, and this one fails.
            self._check()
            with suppress(VersionMismatchError):
                if version == ABSENT:
                    version = self._put(Registered(_NO_OWNER, {}), ABSENT)
                # Versions never repeat, even after a deletion, and each is replaced once: so no other owner has this.
                self._put(Registered(version, texts), version)
                self._owner = version
                return texts
        raise StoreError(f"{self._path}: the registry kept changing while it was taken over")

    @property
    def is_stored(self) -> bool:
        """Whether there is a registry, readable or not."""
        return self._find_any()[1] != ABSENT

    @property
    def is_owned(self) -> bool:
        """Whether `take_over` has succeeded; another owner may have taken it over since."""
        return self._owner is not None

    def get_all(self) -> Mapping[str, str]:
        """Return every name with its text.

        Raises:
            CorruptStateError, UnsupportedVersionError: It cannot be read.
            RegistryFencedError: Another owner has taken over the registry that this handle owned.
            StoreError: The store failed.
        """
        return self._find()[0].texts

    def put(self, name: str, text: str) -> None:
        """Set the text of a name; errors as for `get_all`, and after `StoreError` it is unknown whether it happened."""
        check_text_properties({name: text}, called="name in a delay registry")
        self._change(lambda texts: {**texts, name: text})

    def remove(self, name: str) -> None:
        """Remove a name, if it is there; errors as for `put`."""
        self._change(lambda texts: {each: text for each, text in texts.items() if each != name})

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Remove the registry after a context in which it is empty and has no owner, to delete the snapshots.

        Raises:
            VersionMismatchError: Another owner has taken it over meanwhile; nothing was changed.
            StoreError: The store failed.
        """
        _, version = self._find_any()
        self._check()
        version = self._put(Registered(_NO_OWNER, {}), version)
        yield
        with suppress(VersionMismatchError):
            self._metadata.delete(self._path, expected_version=version)

    def _change(self, change: Callable[[Mapping[str, str]], Mapping[str, str]]) -> None:
        for _ in range(_TAKEOVER_ATTEMPTS):
            found, version = self._find()
            changed = change(found.texts)
            if changed == found.texts:
                return
            with suppress(VersionMismatchError):
                # At the version at which this owner was in it: an owner since then would have changed it.
                self._put(found._replace(texts=changed), version)
                return
        raise StoreError(f"{self._path}: the registry kept changing")

    def _find(self) -> tuple[Registered, int]:
        """Return the contents, and the version that a `put` must expect; refuse another owner's."""
        value = self._metadata.get(self._path)
        found = Registered(_NO_OWNER, {}) if value is None else decode_registry(value.data)
        if self._owner is not None and found.owner != self._owner:
            raise RegistryFencedError(self._path, found.texts)
        return found, ABSENT if value is None else value.version

    def _find_any(self) -> tuple[Mapping[str, str], int]:
        """Return the texts of any owner, none if they cannot be read, and the version."""
        try:
            value = self._metadata.get(self._path)
        except DamagedValueError as error:
            return {}, error.version
        if value is None:
            return {}, ABSENT
        try:
            return decode_registry(value.data).texts, value.version
        except CorruptStateError:
            return {}, value.version

    def _put(self, registered: Registered, version: int) -> int:
        return self._metadata.put(self._path, encode_registry(registered), expected_version=version)


@dataclass(frozen=True, slots=True)
class SnapshotStorage:
    """The storage of one index's buckets. The index that takes over the registry last owns it.

    Attributes:
        ledgers: The snapshots.
        registry: The snapshot of each bucket.
        owner: The owner of the ledgers; nothing else may have ledgers of this owner.
        read_deliver_at_ms: Returns the delivery times stored in messages of the log, in the given order, to rebuild a
            damaged segment. It fails with `AckStateError`. None if there is no log.
    """

    ledgers: LedgerStore
    registry: BucketRegistry
    owner: str
    read_deliver_at_ms: Callable[[Sequence[Position]], Sequence[int]] | None = None

    @classmethod
    def of_topic(
        cls,
        store: Store,
        topic: str,
        *,
        check: Callable[[], object] = lambda: None,
        read_deliver_at_ms: Callable[[Sequence[Position]], Sequence[int]] | None = None,
    ) -> SnapshotStorage:
        """Return the storage of a topic's index in the topic's store; `check` as for `BucketRegistry`."""
        name = quote(topic, safe="")
        registry = BucketRegistry(store.metadata, f"{ROOT}/{name}", check=check)
        return cls(store.ledgers, registry, f"{_OWNER_PREFIX}{name}", read_deliver_at_ms)

    @property
    def is_stored(self) -> bool:
        """Whether there is a registry or a snapshot."""
        return self.registry.is_stored or bool(self.ledgers.owned_by(self.owner))

    def delete(self) -> None:
        """Delete all snapshots and the registry; no-op without them. An owner that has an index open is fenced.

        Raises:
            StoreError: The storage failed, or another owner has taken the registry over; call again.
        """
        if self.is_stored:
            # Before the registry is emptied, as in `BucketSnapshots.take_over`.
            owned = self.ledgers.owned_by(self.owner)
            with self.registry.emptied():
                for ledger_id in owned:
                    self.ledgers.delete(ledger_id)


@final
class BucketSnapshots:
    """The stored buckets of one index; a call raises `AckStateError` once every attempt has failed, and counts once."""

    def __init__(self, storage: SnapshotStorage) -> None:
        self._storage = storage
        # Retired snapshots that are still stored, since a call failed, and the key under which each may still be
        # registered.
        self._retired: dict[int, BucketKey | None] = {}

    def take_over(self) -> tuple[dict[str, str], set[int]]:
        """Become the owner; return the registered texts whose keys begin as a bucket's, and all stored snapshots."""
        texts = attempt(self._storage.registry.take_over)
        stored = self.stored()
        # Still the owner after they were listed: so none of them is a later owner's.
        attempt(self._storage.registry.get_all)
        return _bucket_keys(texts), stored

    def write(self, segments: Sequence[DelayedIndexes]) -> tuple[int, list[BucketSegment]]:
        """Store a bucket in a new ledger, and return its id and the in-memory parts of the segments."""
        # The bucket counts only once it is registered, so a large one may be written by several calls.
        encoded = [encode_segment(segment) for segment in segments]
        metadata = [segment_metadata(*pair) for pair in zip(segments, encoded, strict=True)]
        entries = [encode_metadata(metadata), *encoded]
        bucket_id = attempt(lambda: self._write_once(entries))
        return bucket_id, BucketSegment.all_of(metadata, entries[0])

    def _write_once(self, entries: Sequence[bytes]) -> int:
        self._check_owner()  # A former owner would leave behind the ledger that it creates.
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
        """Register a snapshot as that of its bucket; after a failure it may be registered nevertheless."""
        # `RegistryFencedError`: another owner has taken over; the snapshot is deleted unless that owner has it.
        try:
            attempt(lambda: self._storage.registry.put(str(key), str(bucket_id)))
        except RegistryFencedError as error:
            if str(bucket_id) not in error.texts.values():
                with suppress(AckStateError):
                    self._storage.ledgers.delete(bucket_id)
            raise

    def read_metadata(self, bucket_id: int) -> tuple[bytes, int] | None:
        """Return the encoded metadata of a snapshot and its number of segments, None if it is empty."""
        ledgers = self._storage.ledgers
        last = attempt(lambda: ledgers.last(bucket_id))
        return None if last < 0 else (attempt(lambda: ledgers.read(bucket_id, 0, 1))[0], last)

    def read_segments(self, bucket_id: int, first: int, metadata: Sequence[SegmentMetadata]) -> list[DelayedIndexes]:
        """Return the segments that match the metadata, from number `first` on, which counts from 1."""
        end = first + len(metadata)
        entries = attempt(lambda: self._storage.ledgers.read(bucket_id, first, end))
        return [
            decode_segment(entry, what=f"delay snapshot {bucket_id}, segment {number}", metadata=each)
            for number, (entry, each) in enumerate(zip(entries, metadata, strict=True), first)
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
        return set(attempt(lambda: self._storage.ledgers.owned_by(self._storage.owner)))

    def drop(self, bucket_id: int, key: BucketKey | None = None) -> None:
        """Retire a snapshot: unregister it, and delete it; after a failure, `delete_retired` retries."""
        self._retired[bucket_id] = key
        self._try_to_drop(bucket_id)

    def unregister(self, key: BucketKey) -> None:
        """Remove a key whose snapshot also belongs to another bucket; `AckStateError` if every attempt failed."""
        attempt(lambda: self._storage.registry.remove(str(key)))

    def delete_retired(self) -> None:
        for bucket_id in tuple(self._retired):
            self._try_to_drop(bucket_id)

    def delete_all(self) -> None:
        """Unregister and delete every snapshot registered or stored; after an error, a second call does the rest."""
        stored = self.stored()
        attempt(self._check_owner)  # after they were listed, as in `take_over`
        for name in self._registered():
            attempt(lambda name=name: self._storage.registry.remove(name))  # type: ignore[misc]
        self._retired = dict.fromkeys(stored)
        for bucket_id in stored:
            self._delete(bucket_id)

    def _check_owner(self) -> None:
        """Take the registry over before the first change, and refuse changes once another owner has it."""
        registry = self._storage.registry
        if registry.is_owned:
            registry.get_all()
        else:
            registry.take_over()

    def _registered(self) -> dict[str, str]:
        return _bucket_keys(attempt(self._storage.registry.get_all))

    def _try_to_drop(self, bucket_id: int) -> None:
        try:
            key = self._retired[bucket_id]
            if key is not None:
                if self._registered().get(str(key)) == str(bucket_id):
                    attempt(lambda: self._storage.registry.remove(str(key)))
                self._retired[bucket_id] = None
            self._delete(bucket_id)
        except AckStateError:
            return

    def _delete(self, bucket_id: int) -> None:
        attempt(lambda: self._storage.ledgers.delete(bucket_id))
        del self._retired[bucket_id]


def _bucket_keys(texts: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if name.startswith(BUCKET_KEY_PREFIX)}


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
    """Call up to four times until it succeeds; what a second call would not change is not retried."""
    for _ in range(ATTEMPT_COUNT - 1):
        try:
            return call()
        except (CorruptStateError, UnsupportedVersionError, RegistryFencedError):
            raise
        except AckStateError:
            continue
    return call()


@dataclass(frozen=True, slots=True)
class DroppedBucket:
    """A registered bucket that was not recovered: the dispatcher offers its messages again as it reads the log."""

    name: str  # its key in the registry
    text: str  # the registered text, the decimal id of its snapshot
    reason: str  # a name or a text that is malformed is left there; any other bucket was unregistered and deleted


@dataclass(frozen=True, slots=True)
class BucketRecoveryReport:
    """The result of a recovery.

    Attributes:
        bucket_count: Number of recovered buckets.
        message_count: Number of their messages, each counted once, without segments that were entirely due.
        dropped: The registered buckets that were not recovered.
        orphan_count: Number of unregistered snapshots, all deleted.
        fell_back: Why nothing was recovered and all messages stay in memory; empty if the recovery succeeded.
    """

    bucket_count: int = 0
    message_count: int = 0
    dropped: tuple[DroppedBucket, ...] = ()
    orphan_count: int = 0
    fell_back: str = ""


class FoundBucket(NamedTuple):
    """A recovered bucket, its first segment that is not entirely due, and the metadata of all, skipped ones too."""

    bucket: Bucket
    loaded: DelayedIndexes
    metadata: tuple[SegmentMetadata, ...]

    def bitmaps(self) -> dict[int, BitMap]:
        """Return the messages of its segments, from the loaded one on."""
        return _union(self.metadata[self.bucket.current - 1 :])


def find_buckets(snapshots: BucketSnapshots, *, cutoff_ms: int) -> tuple[list[FoundBucket], BucketRecoveryReport]:
    """Take over the stored buckets, read them, and delete the useless ones; an error changes no bucket."""
    names, stored = snapshots.take_over()
    found: dict[str, FoundBucket] = {}
    reasons: dict[str, str] = {}
    useless: list[tuple[BucketKey, int]] = []
    for name, text in sorted(names.items()):
        try:
            key, bucket_id = BucketKey.parse(name), parse_ledger_id(text)
        except ValueError as error:
            reasons[name] = str(error)
            continue
        read = _read(snapshots, key, bucket_id, stored=stored, cutoff_ms=cutoff_ms)
        if isinstance(read, FoundBucket):
            found[name] = read
        else:
            reasons[name] = read
            useless.append((key, bucket_id))
    for name in _replaced(found):
        reasons[name] = "a bucket that encloses it has all of its messages: it was merged"
        replaced = found.pop(name).bucket
        useless.append((replaced.key, replaced.bucket_id))
    in_use = {each.bucket.bucket_id for each in found.values()}
    orphans = stored - in_use
    for key, bucket_id in useless:
        if bucket_id in in_use:
            with suppress(AckStateError):  # The next recovery finds the key again.
                snapshots.unregister(key)
        else:
            snapshots.drop(bucket_id, key)
            orphans.discard(bucket_id)
    for bucket_id in sorted(orphans):
        snapshots.drop(bucket_id)
    report = BucketRecoveryReport(
        bucket_count=len(found),
        dropped=tuple(DroppedBucket(name, names[name], reason) for name, reason in reasons.items()),
        orphan_count=len(orphans),
    )
    return list(found.values()), report


def _read(
    snapshots: BucketSnapshots, key: BucketKey, bucket_id: int, *, stored: set[int], cutoff_ms: int
) -> FoundBucket | str:
    """Read a bucket, or return why it is useless."""
    if bucket_id not in stored:
        return "its snapshot is missing"
    what = f"delay snapshot {bucket_id}"
    try:
        entry = snapshots.read_metadata(bucket_id)
        if entry is None:
            return "its snapshot is empty"
        encoded, segment_count = entry
        metadata = decode_metadata(encoded, what=f"{what}, metadata")
        if segment_count != len(metadata):
            corrupt(what, 0, f"{len(metadata)} segments", segment_count)
        ledger_ids = {ledger_id for segment in metadata for ledger_id in segment.bitmaps}
        if ledger_ids and not key.encloses(BucketKey(min(ledger_ids), max(ledger_ids))):
            # The messages of ledgers outside the bucket's range would outlive it.
            corrupt(what, 0, f"ledgers {key[0]} to {key[1]}", f"{min(ledger_ids)} to {max(ledger_ids)}")
        # The segments at the beginning that are entirely due.
        due_count = next((at for at, each in enumerate(metadata) if each.max_deliver_at_ms > cutoff_ms), len(metadata))
        if due_count == len(metadata):
            return "all of its messages are due"
        (loaded,) = snapshots.read_segments(bucket_id, due_count + 1, metadata[due_count : due_count + 1])
    except (UnsupportedVersionError, CorruptStateError) as error:
        return str(error)
    segments = BucketSegment.all_of(metadata, encoded)
    return FoundBucket(Bucket(key, bucket_id, segments, loaded, due_count + 1), loaded, metadata)


def _replaced(found: Mapping[str, FoundBucket]) -> list[str]:
    """Return the buckets whose messages are all in a merged bucket: a crash prevented their deletion."""
    # Pulsar drops every bucket that another encloses. But a bucket sealed after a recovery may enclose a recovered
    # bucket without having its messages, and then both stay.
    replaced: list[str] = []
    for name, each in found.items():
        for other_name, other in found.items():
            if name != other_name and other.bucket.key.encloses(each.bucket.key):
                enclosing = _union(other.metadata)
                if all(at in enclosing and bits.issubset(enclosing[at]) for at, bits in _union(each.metadata).items()):
                    replaced.append(name)
                    break
    return replaced


def _union(metadata: tuple[SegmentMetadata, ...]) -> dict[int, BitMap]:
    return union_by_ledger(segment.bitmaps for segment in metadata)
