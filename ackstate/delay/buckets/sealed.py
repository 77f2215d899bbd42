"""The sealed buckets of an index: their ledger ranges, loading, merging and removal."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import TYPE_CHECKING, final

import numpy as np
from intervaltree import Interval, IntervalTree

from ackstate.delay.buckets.bucket import Boundary, Bucket, BucketKey
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.position import Position
from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ackstate.delay.buckets.bucket import BucketSegment
    from ackstate.delay.buckets.snapshots import BucketSnapshots
    from ackstate.delay.config import DelayConfig


# Cuts and choices as in ``MutableBucket`` and ``BucketDelayedDeliveryTracker`` of Apache Pulsar.
MERGED_COUNT_MAX = 4
"""The maximal number of buckets in one merge."""


def in_order(parts: Sequence[DelayedIndexes]) -> DelayedIndexes:
    """Return the messages of several segments, sorted by time, then by position."""
    deliver_at_ms, ledger_ids, entry_ids = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((entry_ids, ledger_ids, deliver_at_ms))
    return DelayedIndexes(deliver_at_ms[order], ledger_ids[order], entry_ids[order])


def cut_segments(indexes: DelayedIndexes, config: DelayConfig) -> list[DelayedIndexes]:
    """Cut sorted messages into segments of a bounded time span and count; no messages give no segments."""
    cuts = [0]
    times = indexes.deliver_at_ms
    while cuts[-1] < len(times):
        first = cuts[-1]
        # The latest due time in the segment; it may exceed the largest time, which is then never reached.
        last_ms = int(times[first]) + config.max_time_step_per_segment_ms - 1
        end = int(np.searchsorted(times, min(last_ms, np.iinfo(np.int64).max), side="right"))
        if config.max_indexes_per_segment is not None:
            end = min(end, first + config.max_indexes_per_segment)
        cuts.append(end)
    return [_each_once(DelayedIndexes(*(column[first:end] for column in indexes))) for first, end in pairwise(cuts)]


def _each_once(segment: DelayedIndexes) -> DelayedIndexes:
    """Keep only the last of a position's duplicates: the earlier time may be a former time of the message."""
    order = np.lexsort((segment.entry_ids, segment.ledger_ids))
    ledger_ids, entry_ids = segment.ledger_ids[order], segment.entry_ids[order]
    again = (ledger_ids[:-1] == ledger_ids[1:]) & (entry_ids[:-1] == entry_ids[1:])
    if not again.any():
        return segment
    kept = np.ones(len(order), dtype=bool)
    kept[order[:-1][again]] = False
    return DelayedIndexes(*(column[kept] for column in segment))


def buckets_to_merge(buckets: Sequence[Bucket]) -> Sequence[Bucket]:
    """Choose two to four neighbours to merge: each has a segment to be loaded, and they have the fewest messages.

    Args:
        buckets: All buckets, in order of their ledgers.

    Returns:
        Two to four of them; empty if no two neighbours have segments to come.
    """
    for size in range(min(MERGED_COUNT_MAX, len(buckets)), 1, -1):
        windows = [buckets[at : at + size] for at in range(len(buckets) - size + 1)]
        windows = [window for window in windows if all(bucket.has_unloaded_segment for bucket in window)]
        if windows:
            return _smallest(windows)
    return ()


def _smallest(windows: Sequence[Sequence[Bucket]]) -> Sequence[Bucket]:
    """Return the window whose next segment is due first, among those no larger than any before them, as Pulsar does."""
    chosen = windows[0]
    count_min = first_due_min = None
    for window in windows:
        count = sum(bucket.message_count for bucket in window)
        if count_min is None or count <= count_min:
            count_min = count
            first_due_ms = min(bucket.segments[bucket.current].first_due_ms for bucket in window)
            if first_due_min is None or first_due_ms < first_due_min:
                first_due_min, chosen = first_due_ms, window
    return chosen


@dataclass(frozen=True, slots=True)
class DamagedSegment:
    """A stored segment that could not be read while the index was in use.

    Its messages are not lost: their due times are read from the log or, if that is impossible, they are due at the last
    due time of the segment.

    Attributes:
        bucket_id: The snapshot.
        key: The message ledgers of its bucket.
        segment: Number of the segment, from 1.
        reason: The error.
    """

    bucket_id: int
    key: BucketKey
    segment: int
    reason: str


@dataclass(frozen=True, slots=True)
class BucketStats:
    """Statistics of a bucketed index, all at one instant.

    Attributes:
        bucket_count: Number of sealed buckets.
        mutable_count: Messages in the mutable bucket, including those that have been handed out from it.
        shared_count: Messages of the sealed buckets in memory, likewise.
        retired_count: Retired snapshots that are still stored, since a call failed.
        succeeded: Number of successful operations on snapshots, by kind: create, load, delete, merge.
        failed: Number of failed operations, likewise.
        damaged: Segments that could not be read.
    """

    bucket_count: int
    mutable_count: int
    shared_count: int
    retired_count: int
    succeeded: Mapping[str, int]
    failed: Mapping[str, int]
    damaged: tuple[DamagedSegment, ...]


@final
class SealedBuckets:
    """Buckets with stored snapshots; the caller holds their loaded messages in memory.

    The ranges of buckets may overlap: a bucket sealed after a recovery may cover the range of a recovered bucket. Not
    safe for concurrent use.

    Args:
        snapshots: The stored snapshots; None if no bucket is ever sealed.
        config: The settings.

    Attributes:
        snapshots: The stored snapshots.
        damaged: Every segment that could not be read, oldest first.
    """

    def __init__(self, snapshots: BucketSnapshots | None, config: DelayConfig) -> None:
        self.snapshots = snapshots
        self.damaged: list[DamagedSegment] = []
        self._config = config
        # Invariant: an interval for each live bucket; its end is the ledger after the bucket's last one. All live
        # buckets differ in their first ledgers: each is one that no other bucket covered, or that of its first source.
        self._tree = IntervalTree()
        # A heap with the boundary of each live bucket, and stale boundaries of others.
        self._boundaries: list[tuple[Boundary, int, Bucket]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._tree)

    def __iter__(self) -> Iterator[Bucket]:
        """Yield the buckets in order of their ledgers."""
        return (interval.data for interval in sorted(self._tree, key=lambda interval: interval.begin))

    @property
    def memory_bytes(self) -> int:
        """About how much memory the buckets take, without their messages. Complexity: O(segments)."""
        return sum(bucket.memory_bytes for bucket in self)

    def covers(self, ledger_id: int) -> bool:
        """Return whether a message ledger is in the range of a bucket. Complexity: O(log buckets)."""
        return bool(self._tree.overlaps_point(ledger_id))

    def first_boundary(self) -> tuple[Boundary, Bucket] | None:
        """Return the first boundary, before which the next segment must be loaded, and its bucket, if any."""
        boundaries = self._boundaries
        while boundaries and not _is_current(boundaries[0]):
            heappop(boundaries)
        if not boundaries:
            return None
        boundary, _, bucket = boundaries[0]
        return boundary, bucket

    def adopt(self, bucket: Bucket) -> None:
        """Add a bucket whose current segment the caller holds in memory."""
        self._tree.add(Interval(bucket.key.first_ledger_id, bucket.key.last_ledger_id + 1, bucket))
        self._push(bucket)

    def seal(self, key: BucketKey, indexes: DelayedIndexes) -> DelayedIndexes:
        """Store sorted messages as a bucket, and return those that must be in memory: all, if that failed."""
        segments = cut_segments(indexes, self._config)
        try:
            bucket_id, kept = self._stored.write(segments)
        except AckStateError:
            return indexes
        bucket = Bucket(key, bucket_id, kept, current=1, boundary=Boundary.of(segments[0]))
        self._register(bucket)
        self.adopt(bucket)
        return segments[0]

    def merge(self) -> DelayedIndexes:
        """Merge some neighbours if there are too many buckets; a failure changes nothing.

        The sources are in use until the merged bucket is stored and registered.

        Returns:
            The messages that must be in memory, some of which are already; none if nothing was merged.
        """
        sources = buckets_to_merge(list(self)) if self.has_too_many else ()
        if not sources:
            return _NOTHING
        merged = self._merged(sources)
        self._stored.count("merge", is_done=merged is not None)
        if merged is None:
            return _NOTHING
        bucket, first = merged
        for source in sources:
            self._remove(source)
        self.adopt(bucket)
        return first

    def _merged(self, sources: Sequence[Bucket]) -> tuple[Bucket, DelayedIndexes] | None:
        try:
            segments = cut_segments(
                in_order([part for each in sources for part in self._stored.read_all(each)]), self._config
            )
            bucket_id, kept = self._stored.write(segments)
        except AckStateError:
            return None
        key = BucketKey(sources[0].key.first_ledger_id, max(each.key.last_ledger_id for each in sources))
        bucket = Bucket(key, bucket_id, kept, current=1, boundary=Boundary.of(segments[0]))
        self._register(bucket)
        if bucket.is_registered:
            return bucket, segments[0]
        self._stored.drop(bucket_id, key)
        return None

    def load_next(self, bucket: Bucket) -> DelayedIndexes | None:
        """Load a bucket's next segment, whose messages must then be in memory; remove the bucket after the last one.

        A damaged or missing segment is rebuilt from its metadata: its messages are due at their times in the log, or
        all at the last due time of the segment.
        """
        if not bucket.has_unloaded_segment:
            self._remove(bucket)
            return _NOTHING
        number, segment = bucket.current + 1, bucket.segments[bucket.current]
        try:
            indexes = self._stored.read_segment(bucket.bucket_id, number, segment.metadata)
        except AckStateError as error:
            is_damage = isinstance(error, CorruptStateError | UnsupportedVersionError)
            if not is_damage and not self._stored.is_gone(bucket.bucket_id, number):
                return None
            indexes = self._rebuilt(segment)
            self.damaged.append(DamagedSegment(bucket.bucket_id, bucket.key, number, str(error)))
        bucket.current, bucket.boundary = number, Boundary.of(indexes)
        self._push(bucket)
        return indexes

    def _rebuilt(self, segment: BucketSegment) -> DelayedIndexes:
        bitmaps = sorted(segment.metadata.bitmaps.items())
        positions = [Position(ledger_id, entry_id) for ledger_id, bitmap in bitmaps for entry_id in bitmap]
        times = self._stored.read_deliver_at_ms(positions)
        if times is None:
            times = [segment.last_due_ms] * len(positions)
        # At most the segment's last due time, when the next segment is loaded.
        due = sorted((min(time, segment.last_due_ms), *each) for time, each in zip(times, positions, strict=True))
        return DelayedIndexes(*(np.array(column, dtype=np.int64) for column in zip(*due, strict=True)))

    def trim(self, before_ledger_id: int) -> None:
        """Drop the buckets that end before a message ledger; failed deletions are retried by `catch_up`."""
        for bucket in list(self):
            if bucket.key.last_ledger_id < before_ledger_id:
                self._remove(bucket)

    def catch_up(self) -> None:
        """Retry failed operations: register buckets, delete retired snapshots."""
        for bucket in self:
            if not bucket.is_registered:
                self._register(bucket)
        if self.snapshots is not None:
            self.snapshots.delete_retired()

    def clear(self) -> None:
        """Remove every bucket; the snapshots stay stored."""
        for bucket in self:
            bucket.is_live = False
        self._tree.clear()
        self._boundaries.clear()

    def stats(self, *, mutable_count: int, shared_count: int) -> BucketStats:
        """Return the statistics of an index, given the numbers of its messages in memory."""
        stored = self.snapshots
        return BucketStats(
            bucket_count=len(self),
            mutable_count=mutable_count,
            shared_count=shared_count,
            retired_count=0 if stored is None else len(stored.retired),
            succeeded={} if stored is None else dict(stored.succeeded),
            failed={} if stored is None else dict(stored.failed),
            damaged=tuple(self.damaged),
        )

    @property
    def has_too_many(self) -> bool:
        """Whether there are more buckets than the configuration allows."""
        return self._config.max_bucket_count is not None and len(self) > self._config.max_bucket_count

    @property
    def _stored(self) -> BucketSnapshots:
        assert self.snapshots is not None
        return self.snapshots

    def _push(self, bucket: Bucket) -> None:
        heappush(self._boundaries, (bucket.boundary, next(self._numbers), bucket))

    def _register(self, bucket: Bucket) -> None:
        try:
            self._stored.register(bucket.key, bucket.bucket_id)
            bucket.is_registered = True
        except AckStateError:
            bucket.is_registered = False

    def _remove(self, bucket: Bucket) -> None:
        bucket.is_live = False
        self._tree.remove(Interval(bucket.key.first_ledger_id, bucket.key.last_ledger_id + 1, bucket))
        self._stored.drop(bucket.bucket_id, bucket.key)

    def _check(self) -> int:
        """Assert every invariant, and return the number of messages to come. Complexity: O(segments)."""
        waiting = {id(entry[2]) for entry in self._boundaries if _is_current(entry)}
        firsts = set()
        for interval in self._tree:
            bucket = interval.data
            assert bucket.is_live
            assert (interval.begin, interval.end - 1) == bucket.key
            assert 1 <= bucket.current <= bucket.last
            assert id(bucket) in waiting
            firsts.add(interval.begin)
        assert len(firsts) == len(self._tree) == len(waiting)
        return sum(segment.message_count for bucket in self for segment in bucket.segments[bucket.current :])


_NOTHING = DelayedIndexes(*(np.zeros(0, dtype=np.int64) for _ in range(3)))


def _is_current(entry: tuple[Boundary, int, Bucket]) -> bool:
    boundary, _, bucket = entry
    return bucket.is_live and boundary is bucket.boundary
