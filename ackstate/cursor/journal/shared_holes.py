"""Shares the ack holes that all subscriptions of a topic have in common: snapshots may refer to delay buckets.

A message that is not yet due is a hole in every subscription, and a bucket of the delay index, a ledger of the same
store that never changes, holds it durably. With `SharedHoles`, one for all cursors of a topic, the snapshots of cursors
refer to buckets. Reading such a snapshot takes nothing but the store.

`ackstate.cursor.journal.hole_pins` keeps a bucket from being deleted while a record refers to it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, final

import google_crc32c

from ackstate.cursor.store import LedgerNotFoundError, StoreError
from ackstate.entry_bitmap import union_by_ledger
from ackstate.errors import AckStateError, CorruptStateError
from ackstate.wire.native_shared import BucketHoles, BucketReference, resolve
from ackstate.wire.pulsar.delay_snapshot import decode_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ackstate.cursor.journal.native import Resolve
    from ackstate.cursor.store import LedgerStore, Store
    from ackstate.wire.native import RecordFields
    from ackstate.wire.native_shared import SharedSnapshot
    from ackstate.wire.pulsar.delay_snapshot import SegmentMetadata


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
        """The buckets that were live at the last look."""
        self._read: dict[int, _Bucket | None] = {}  # None for one that cannot be read
        self._holes: dict[int, BucketHoles] = {}
        self.known: tuple[BucketHoles, ...] = ()
        """The last result of `buckets`."""

    def buckets(self) -> tuple[BucketHoles, ...]:
        """Return the holes of the live buckets; buckets that cannot be read are skipped.

        Raises:
            ValueError: A first segment is below 1.

        Complexity: O(buckets), and of those that are new or whose first segment has changed.
        """
        live = dict(self._live())
        if any(first_segment < 1 for first_segment in live.values()):
            raise ValueError(f"first segments must be at least 1, got {live}")
        with self._lock:
            self.live_ids = frozenset(live)
            self._read = {bucket_id: bucket for bucket_id, bucket in self._read.items() if bucket_id in live}
            holes = [self._held(*item) for item in live.items()]
            self._holes = {each.reference.bucket_id: each for each in holes if each is not None}
            self.known = tuple(self._holes.values())
            return self.known

    def referred_to(self, reference: BucketReference, path: str) -> BucketHoles:
        """Return the holes that a cursor refers to; errors as for `resolver`."""
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
    """Return a function that reads the buckets that a snapshot of a cursor refers to.

    Args:
        store: Where.
        path: The cursor's path in the metadata store.
        shared: A cache of buckets; None for none.

    The function raises:
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
