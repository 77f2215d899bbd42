"""Ack holes that all subscriptions of a topic have in common, written once: snapshots that refer to delay buckets.

A message that is not yet due is a hole in every subscription, and a bucket of the delay index, a ledger of the same
store that never changes, holds it durably. `SharedHoles`, one for all cursors of a topic, is what a cursor is given to
write such snapshots; to read one takes nothing but the store.

A bucket must not be deleted under a record that refers to it. Before such a record is written, the cursor puts a *pin*,
``/delay-references/<bucket id>/<cursor path>``, and only after a record without the bucket has taken its place the pin
is deleted: whenever a crash comes, what a record refers to is pinned. A pin that no record needs is deleted by the next
open of its cursor. Whoever deletes buckets asks `BucketReferences.is_needed` right before, which first closes the
bucket, ``/delay-references/<bucket id>``: a cursor that pins a bucket looks whether it is closed after that. So either
the pin is seen or the bucket is not referred to, also between processes. A cursor that nobody acks lets go of buckets
that are live no more when its journal is as old as ``ledger_rollover_ms`` says.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, final
from urllib.parse import quote

import google_crc32c
import numpy as np

from ackstate.cursor.store import ABSENT, LedgerNotFoundError, StoreError, VersionMismatchError
from ackstate.entry_bitmap import firsts, runs_of, union_by_ledger
from ackstate.errors import AckStateError, CorruptStateError
from ackstate.integers import check_within
from ackstate.position import LEDGER_ID_MAX
from ackstate.wire.native_shared import BucketHoles, BucketReference, joined, resolve
from ackstate.wire.pulsar.delay_snapshot import decode_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import numpy.typing as npt
    from pyroaring import BitMap

    from ackstate.cursor.journal.native import Resolve
    from ackstate.cursor.store import LedgerStore, MetadataStore, Store
    from ackstate.deleted_ranges import DeletedRanges
    from ackstate.wire.native import RecordFields
    from ackstate.wire.native_shared import SharedSnapshot
    from ackstate.wire.pulsar.delay_snapshot import SegmentMetadata

ROOT = "/delay-references"


class LiveBucket(NamedTuple):
    """A bucket that is stored whole and holds messages that are not yet due.

    Attributes:
        bucket_id: Its ledger.
        first_segment: The first of its segments that may hold such messages, from 1.
    """

    bucket_id: int
    first_segment: int


class _Bucket(NamedTuple):
    checksum: int
    segments: tuple[SegmentMetadata, ...]

    def holes(self, bucket_id: int, first_segment: int) -> BucketHoles:
        """Join the segments from one on. Complexity: O(bitmaps)."""
        reference = BucketReference(bucket_id, first_segment, self.checksum)
        return BucketHoles(reference, union_by_ledger(each.bitmaps for each in self.segments[first_segment - 1 :]))


@final
class SharedHoles:
    """The delay buckets that a topic's cursors may refer to: one for all of them, safe for any number of threads.

    Each bucket is read once and its bitmaps are kept here while it is live: O(delayed messages) for the topic.

    Args:
        store: Where the buckets are, and the cursors.
        live: Returns the buckets that are stored now, as `LiveBucket` has them. It is called whenever a cursor persists
            a whole state, and under a range limit at every persist: by any thread, without a cursor's lock. It must not
            wait for a cursor.
    """

    def __init__(self, store: Store, live: Callable[[], Iterable[tuple[int, int]]]) -> None:
        self._store = store
        self._live = live
        self._lock = threading.Lock()
        self.live_ids: frozenset[int] = frozenset()
        """The buckets that were live when they were last asked for."""
        self._read: dict[int, _Bucket | None] = {}  # None for one that cannot be read
        self._holes: dict[int, BucketHoles] = {}
        self.known: tuple[BucketHoles, ...] = ()
        """What `buckets` returned the last time."""

    def buckets(self) -> tuple[BucketHoles, ...]:
        """Return what the live buckets hold; one that cannot be read is left out.

        Raises:
            ValueError: A first segment is below 1.

        Complexity: O(buckets), and of those that are new or whose first segment has changed.
        """
        live = dict(self._live())
        if any(first_segment < 1 for first_segment in live.values()):
            raise ValueError(f"segments count from 1, found {live}")
        with self._lock:
            self.live_ids = frozenset(live)
            self._read = {bucket_id: bucket for bucket_id, bucket in self._read.items() if bucket_id in live}
            holes = [self._held(*item) for item in live.items()]
            self._holes = {each.reference.bucket_id: each for each in holes if each is not None}
            self.known = tuple(self._holes.values())
            return self.known

    def referred_to(self, reference: BucketReference, path: str) -> BucketHoles:
        """Return what a cursor refers to; errors as for `resolver`."""
        bucket_id, first_segment, checksum = reference
        with self._lock:
            held = self._holes.get(bucket_id)
            if held is not None and held.reference == reference:
                return held
            bucket = self._read.get(bucket_id)
            if bucket is None or bucket.checksum != checksum:
                bucket = self._read[bucket_id] = _referred_to(self._store.ledgers, reference, path)
            self._holes[bucket_id] = bucket.holes(bucket_id, first_segment)
            return self._holes[bucket_id]

    def _held(self, bucket_id: int, first_segment: int) -> BucketHoles | None:
        held = self._holes.get(bucket_id)
        if held is not None and held.reference.first_segment == first_segment:
            return held
        if bucket_id not in self._read:
            try:
                self._read[bucket_id] = _read(self._store.ledgers, bucket_id, f"delay bucket {bucket_id}")
            except StoreError:
                return None
            except AckStateError:
                self._read[bucket_id] = None
        bucket = self._read[bucket_id]
        return None if bucket is None else bucket.holes(bucket_id, first_segment)


def resolver(store: Store, path: str, shared: SharedHoles | None = None) -> Resolve:
    """Return what reads the buckets that a snapshot of a cursor refers to.

    Args:
        store: Where.
        path: The cursor's path in the metadata store.
        shared: What has read some of them already.

    It raises:
        CorruptStateError: A bucket is missing, damaged, or not the one that was referred to. The text names both.
        UnsupportedVersionError: A newer release wrote the bucket.
        StoreError: The storage failed.
    """
    buckets = shared or SharedHoles(store, tuple)

    def _resolved(snapshot: SharedSnapshot) -> RecordFields:
        holes = [buckets.referred_to(reference, path) for reference in snapshot.references]
        try:
            return resolve(snapshot, holes)
        except CorruptStateError as error:
            what = f"snapshot of {path}"
            raise CorruptStateError(what, offset=error.offset, expected=error.expected, found=error.found) from error

    return _resolved


def _referred_to(ledgers: LedgerStore, reference: BucketReference, path: str) -> _Bucket:
    bucket_id, _, checksum = reference
    what = f"delay bucket {bucket_id}, which {path} refers to"
    try:
        bucket = _read(ledgers, bucket_id, what)
    except LedgerNotFoundError as error:
        raise CorruptStateError(what, offset=0, expected="a bucket", found=str(error)) from error
    if bucket.checksum != checksum:
        expected, found = f"entry 0 of checksum {checksum:#010x}", f"{bucket.checksum:#010x}"
        raise CorruptStateError(what, offset=0, expected=expected, found=found)
    return bucket


def _read(ledgers: LedgerStore, bucket_id: int, what: str) -> _Bucket:
    metadata = ledgers.read(bucket_id, 0, 1)[0]
    return _Bucket(google_crc32c.value(metadata), decode_metadata(metadata, what=what))


@final
class BucketReferences:
    """Whether a bucket may be deleted: asked by whoever deletes buckets, for all cursors of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def is_needed(self, bucket_id: int) -> bool:
        """Let no new record refer to a bucket from now on, and tell whether one may refer to it.

        To be asked right before the bucket is deleted, and again later where it was needed. What earlier calls noted
        of buckets that are gone is forgotten.

        Raises:
            StoreError: The storage failed: the bucket must stay.

        Complexity: O(buckets that are pinned or closed).
        """
        check_within("bucket_id", bucket_id, least=0, most=LEDGER_ID_MAX)
        self._forget_deleted()
        with suppress(VersionMismatchError):
            self._store.metadata.put(_bucket_path(bucket_id), b"closed", expected_version=ABSENT)
        return bool(self._store.metadata.children(_bucket_path(bucket_id)))

    def _forget_deleted(self) -> None:
        metadata = self._store.metadata
        for bucket_id in _named_buckets(metadata):
            closed = metadata.get(_bucket_path(bucket_id))
            if closed is not None and not _exists(self._store.ledgers, bucket_id):
                with suppress(VersionMismatchError):
                    metadata.delete(_bucket_path(bucket_id), expected_version=closed.version)


@final
class HolePins:
    """The pins of one cursor, with those of earlier owners, none of whom can write a record any more.

    One owner, one call at a time.

    Args:
        store: Where.
        path: The cursor's path in the metadata store.
        term: The owner's: above that of any earlier one.
        needed: The buckets that the cursor's record refers to.
    """

    def __init__(self, store: Store, path: str, *, term: int, needed: Collection[int] = ()) -> None:
        self._store = store
        self._path = path
        self._term = str(term).encode()
        # Pins that are there or may be, by bucket, and the version of each: None if it is unknown whether it is.
        self._versions: dict[int, int | None] = {}
        # Those of them that a record of ours may need, now or after the next swing: their buckets cannot go.
        self._usable = set(needed)
        # What cannot be listed now is left to the next open; a pin that the record needs is there in any case.
        with suppress(StoreError, CorruptStateError):
            self._find()

    @property
    def bucket_ids(self) -> frozenset[int]:
        """The buckets that are or may be pinned."""
        return frozenset(self._versions)

    def pin(self, bucket_id: int) -> bool:
        """Keep a bucket from being deleted; False if it is about to be, or is gone.

        Raises:
            StoreError: The storage failed; whether it is pinned is unknown.
        """
        if bucket_id in self._usable:
            return True
        version = self._versions.get(bucket_id)
        self._versions[bucket_id] = None
        self._versions[bucket_id] = self._put(self._pin_path(bucket_id), ABSENT if version is None else version)
        is_closed = self._store.metadata.get(_bucket_path(bucket_id)) is not None
        if is_closed or not _exists(self._store.ledgers, bucket_id):
            return False
        self._usable.add(bucket_id)
        return True

    def keep_only(self, needed: Collection[int]) -> None:
        """Let go of the other buckets: the record that the store holds refers to these at most.

        A pin is garbage, not state: where the storage refuses, the next call or the next open tries again.
        """
        self._usable.intersection_update(needed)
        for bucket_id in self._versions.keys() - set(needed):
            with suppress(StoreError, CorruptStateError):
                self._unpin(bucket_id)
                del self._versions[bucket_id]

    def _find(self) -> None:
        for bucket_id in _named_buckets(self._store.metadata):
            found = self._store.metadata.get(self._pin_path(bucket_id))
            if found is not None:
                self._versions[bucket_id] = found.version

    def _put(self, path: str, version: int) -> int:
        # The version becomes ours, so that an earlier owner who still thinks of deleting the pin cannot.
        metadata = self._store.metadata
        try:
            return metadata.put(path, self._term, expected_version=version)
        except VersionMismatchError:
            found = metadata.get(path)
            return metadata.put(path, self._term, expected_version=ABSENT if found is None else found.version)

    def _unpin(self, bucket_id: int) -> None:
        metadata, path, version = self._store.metadata, self._pin_path(bucket_id), self._versions[bucket_id]
        if version is None:
            found = metadata.get(path)
            if found is None or found.data != self._term:
                return
            version = found.version
        # Another version is that of another owner.
        with suppress(VersionMismatchError):
            metadata.delete(path, expected_version=version)

    def _pin_path(self, bucket_id: int) -> str:
        return f"{_bucket_path(bucket_id)}/{quote(self._path, safe='')}"


def filled(ranges: DeletedRanges, buckets: Sequence[BucketHoles]) -> npt.NDArray[np.int64]:
    """Return how many of some ranges lie in each range that they become once the holes in buckets are filled in.

    So there are as many filled ranges, in order of position; one of shared holes alone is none.

    Complexity: O(ranges), and of the buckets.
    """
    holes = joined(buckets)
    counts = [_filled(acked, holes.get(ledger_id)) for ledger_id, acked in ranges.bitmaps()]
    return np.concatenate([*counts, np.empty(0, np.int64)])


def _filled(acked: BitMap, holes: BitMap | None) -> npt.NDArray[np.int64]:
    begins = np.frombuffer(firsts(acked).to_array(), np.uint32)
    if holes is None:
        return np.ones(len(begins), np.int64)
    first, last = runs_of(acked | holes)
    counts = np.searchsorted(begins, last, "right") - np.searchsorted(begins, first, "left")
    return counts[counts > 0]


@final
class FilledCount:
    """Whether the ranges of a state are within a limit once shared holes are filled in, seldom by counting them."""

    __slots__ = ("_acked_count", "_count_max", "_references")

    def __init__(self) -> None:
        self._references: tuple[BucketReference, ...] = ()
        # Invariant: while these are the buckets and so many acks were accepted, there are at most so many ranges.
        self._acked_count = 0
        self._count_max = -1

    def fits(
        self, deleted: DeletedRanges, buckets: Sequence[BucketHoles], *, range_count_max: int, acked_count: int
    ) -> bool:
        """Tell whether at most so many ranges are left.

        Args:
            deleted: The state: to be the same one at each call, or one that was begun anew.
            buckets: What holds the holes.
            range_count_max: The limit.
            acked_count: How many acks there were ever; each has made at most one range more.

        Complexity: O(buckets), and O(ranges) after as many acks as there was room for, or when the buckets change.
        """
        if deleted.range_count <= range_count_max:
            return True
        if not self._knows(buckets) or self._at_most(acked_count) > range_count_max:
            self._count(deleted, buckets, acked_count)
        return self._at_most(acked_count) <= range_count_max

    def at_most(
        self, deleted: DeletedRanges, buckets: Sequence[BucketHoles], *, range_count_max: int, acked_count: int
    ) -> int:
        """Return how many ranges are left at most, given as for `fits`.

        It is the very number when it was last counted, and too high by as many as were acked since: by less than a 64th
        of the limit where it is above that.

        Complexity: O(buckets), and O(ranges) for each 64th of the limit that was acked above it.
        """
        too_high_max = range_count_max // 64
        is_near = self._at_most(acked_count) >= range_count_max and acked_count - self._acked_count > too_high_max
        if not self._knows(buckets) or is_near:
            self._count(deleted, buckets, acked_count)
        return min(self._at_most(acked_count), deleted.range_count)

    def _knows(self, buckets: Sequence[BucketHoles]) -> bool:
        return self._count_max >= 0 and self._references == tuple(bucket.reference for bucket in buckets)

    def _at_most(self, acked_count: int) -> int:
        return self._count_max + acked_count - self._acked_count

    def _count(self, deleted: DeletedRanges, buckets: Sequence[BucketHoles], acked_count: int) -> None:
        self._references = tuple(bucket.reference for bucket in buckets)
        self._acked_count = acked_count
        self._count_max = len(filled(deleted, buckets))


def _bucket_path(bucket_id: int) -> str:
    return f"{ROOT}/{bucket_id}"


def _named_buckets(metadata: MetadataStore) -> Iterator[int]:
    """Yield the buckets that are pinned or closed; other names are nobody's."""
    return (int(name) for name in metadata.children(ROOT) if name.isdecimal())


def _exists(ledgers: LedgerStore, bucket_id: int) -> bool:
    try:
        return ledgers.last(bucket_id) >= 0
    except LedgerNotFoundError:
        return False
