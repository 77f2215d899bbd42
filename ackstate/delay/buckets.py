"""The delay index with snapshots: all messages but the next ones to fall due are on disk.

Source: PIP-195, ``MutableBucket`` and ``BucketDelayedDeliveryTracker`` of Apache Pulsar 5.0.1.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import TYPE_CHECKING, final

import numpy as np
from intervaltree import Interval, IntervalTree

from ackstate.checks import check_count, integer
from ackstate.delay.bucket_storage import (
    Boundary,
    Bucket,
    BucketKey,
    BucketRecoveryReport,
    BucketSnapshots,
    RegistryFencedError,
    find_buckets,
)
from ackstate.delay.index import NOTHING, Calendar, by_ledger, in_order
from ackstate.delay.view import (
    DUE_LOG_BYTES_MAX,
    TIME_MS_MAX,
    DelayedDeliveryTracker,
    SharedDelayIndex,
    check_message,
    check_time,
)
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.position import Position, check_position
from ackstate.position_set import PositionSet
from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ackstate.delay.bucket_storage import BucketSegment, SnapshotStorage
    from ackstate.delay.config import DelayConfig

MERGED_COUNT_MAX = 4  # buckets in one merge
_NO_LEDGER = -1
# From this many messages per ledger on, removing them from its bitmap together is faster than one by one.
_MANY_A_LEDGER = 16
_LOAD_RETRY_MS = 1_000


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
    """Choose two to four neighbours in order of ledgers that have a segment to be loaded, and the fewest messages."""
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
    """A stored segment that could not be read; its messages get their times from the log, else its last due time."""

    bucket_id: int  # the snapshot
    key: BucketKey  # the message ledgers of its bucket
    segment: int  # from 1
    reason: str  # the error


@dataclass(frozen=True, slots=True)
class BucketStats:
    """Statistics of a bucketed index, all at one instant."""

    bucket_count: int  # sealed ones
    mutable_count: int  # messages in the mutable bucket, also those handed out from it
    shared_count: int  # messages of the sealed buckets in memory, likewise
    damaged: tuple[DamagedSegment, ...]


@final
class SealedBuckets:
    """Buckets with stored snapshots; the caller holds their loaded messages in memory."""

    # Their ranges may overlap: a bucket sealed after a recovery may cover the range of a recovered bucket.

    def __init__(self, snapshots: BucketSnapshots | None, config: DelayConfig) -> None:
        self.snapshots = snapshots
        self.damaged: list[DamagedSegment] = []
        self._config = config
        # An interval for each live bucket, whose end is the ledger after its last one. All live buckets differ in
        # their first ledgers: each is one that no other bucket covered, or that of its first source.
        self._tree = IntervalTree()
        # A heap with the boundary of each live bucket, and stale boundaries of others.
        self._boundaries: list[tuple[Boundary, int, Bucket]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._tree)

    def __iter__(self) -> Iterator[Bucket]:
        """Yield the buckets in order of their ledgers."""
        return (interval.data for interval in sorted(self._tree, key=lambda interval: interval.begin))

    def covers(self, ledger_id: int) -> bool:
        return bool(self._tree.overlaps_point(ledger_id))

    def first_boundary(self) -> tuple[Boundary, Bucket] | None:
        """Return the first boundary, before which the bucket's next segment must be loaded, and the bucket."""
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
        try:
            bucket, first = self._write(key, indexes)
        except AckStateError:
            return indexes
        self.adopt(bucket)
        return first

    def merge(self) -> DelayedIndexes:
        """Merge some neighbours, and return the messages that must be in memory."""
        # The sources are in use until the merged bucket is stored and registered, so a failure changes nothing.
        sources = buckets_to_merge(list(self))
        if not sources:
            return NOTHING
        key = BucketKey(sources[0].key.first_ledger_id, max(each.key.last_ledger_id for each in sources))
        try:
            parts = [
                self._stored.read_segments(each.bucket_id, 1, [segment.metadata for segment in each.segments])
                for each in sources
            ]
            columns = zip(*(part for of_bucket in parts for part in of_bucket), strict=True)
            bucket, first = self._write(key, in_order(*map(np.concatenate, columns)))
        except AckStateError:
            return NOTHING
        if not bucket.is_registered:
            self._stored.drop(bucket.bucket_id, key)
            return NOTHING
        for source in sources:
            self._remove(source)
        self.adopt(bucket)
        return first

    def _write(self, key: BucketKey, indexes: DelayedIndexes) -> tuple[Bucket, DelayedIndexes]:
        """Store sorted messages as a bucket, which may not be registered yet; return it and its first segment."""
        segments = cut_segments(indexes, self._config)
        bucket_id, kept = self._stored.write(segments)
        bucket = Bucket(key, bucket_id, kept, segments[0])
        self._register(bucket)
        return bucket, segments[0]

    def load_next(self, bucket: Bucket) -> DelayedIndexes | None:
        """Load a bucket's next segment, or remove the bucket after the last; None if the storage failed for now."""
        # A damaged or missing segment is rebuilt: its messages are due at their times in the log, else at its last one.
        if not bucket.has_unloaded_segment:
            self._remove(bucket)
            return NOTHING
        number, segment = bucket.current + 1, bucket.segments[bucket.current]
        try:
            (indexes,) = self._stored.read_segments(bucket.bucket_id, number, [segment.metadata])
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
                with suppress(RegistryFencedError):
                    self._register(bucket)
        if self.snapshots is not None:
            self.snapshots.delete_retired()

    def clear(self) -> None:
        """Remove every bucket; the snapshots stay stored."""
        for bucket in self:
            bucket.is_live = False
        self._tree.clear()
        self._boundaries.clear()

    @property
    def has_too_many(self) -> bool:
        return self._config.max_bucket_count is not None and len(self) > self._config.max_bucket_count

    @property
    def _stored(self) -> BucketSnapshots:
        assert self.snapshots is not None
        return self.snapshots

    def _push(self, bucket: Bucket) -> None:
        heappush(self._boundaries, (bucket.boundary, next(self._numbers), bucket))

    def _register(self, bucket: Bucket) -> None:
        """Register a bucket; a failure is noted, but `RegistryFencedError` is raised: it never will be."""
        try:
            self._stored.register(bucket.key, bucket.bucket_id)
            bucket.is_registered = True
        except RegistryFencedError:
            bucket.is_registered = False
            raise
        except AckStateError:
            bucket.is_registered = False

    def _remove(self, bucket: Bucket) -> None:
        bucket.is_live = False
        self._tree.remove(Interval(bucket.key.first_ledger_id, bucket.key.last_ledger_id + 1, bucket))
        self._stored.drop(bucket.bucket_id, bucket.key)

    def _check(self) -> int:
        """Assert every invariant, and return the number of messages to come."""
        waiting = {id(entry[2]) for entry in self._boundaries if _is_current(entry)}
        for begin, end, bucket in self._tree:
            assert bucket.is_live
            assert (begin, end - 1) == bucket.key
            assert 1 <= bucket.current <= bucket.last
            assert id(bucket) in waiting
        assert len({bucket.key.first_ledger_id for bucket in self}) == len(self) == len(waiting)
        return sum(segment.message_count for bucket in self for segment in bucket.segments[bucket.current :])


def _is_current(entry: tuple[Boundary, int, Bucket]) -> bool:
    boundary, _, bucket = entry
    return bucket.is_live and boundary is bucket.boundary


@final
class BucketedDelayIndex(SharedDelayIndex, DelayedDeliveryTracker):
    """The messages of one topic or one subscription that are not yet due; most of them are on disk.

    Messages that are added in order of ledgers fill the mutable bucket. When the log moves to another ledger and the
    bucket is full, it is sealed: stored as a snapshot, in segments by time. Only the first segment stays in memory; the
    next one is loaded when the last message of the one before is handed out. Messages that come later for a ledger of a
    sealed bucket stay in memory. The set of waiting messages is exact, one bitmap a ledger.

    >>> from ackstate.delay import DelayConfig
    >>> index = BucketedDelayIndex(DelayConfig(is_deliver_at_time_strict=True))
    >>> index.add_message(Position(3, 7), deliver_at_ms=1_050, now_ms=1_000)
    True
    >>> index.scheduled_messages(10, now_ms=1_049), index.scheduled_messages(10, now_ms=1_050)
    ([], [Position(ledger_id=3, entry_id=7)])

    A message whose time has come, or is at most a tick away unless delivery is strict, is not held. The others are
    handed out at their time, or up to a tick before it unless delivery is strict. Views hand out at the message's time,
    never before. Nothing is rounded.

    Every call is synchronous: when it returns, its work on the storage has happened or has failed. Failures of the
    storage do not reach the caller unless stated. A snapshot that cannot be written leaves its messages in memory. A
    merge that fails changes nothing. A segment that cannot be loaded waits for the next poll, and with it the messages
    that are due later. A segment that is damaged or gone is rebuilt from the times in the message log; without a log,
    its messages are late by less than the time step of a segment. `stats` reports it.

    As in Pulsar, a poll selects by time and returns by position, and a message offered twice with different times keeps
    the first. Unlike in Pulsar 5.0.1, buckets may overlap and both deliver, messages at or below the mark-delete
    position no longer count, and a snapshot is unregistered before it is deleted.

    Views may be used by different threads. Work on the storage, such as sealing a bucket, is done within the call that
    causes it, while other threads wait. From the first view on, poll the index through views only, and report the
    mark-delete positions to them: messages that all have passed are dropped. The other methods are not safe for
    concurrent use; use after `close` raises `ValueError`.

    Args:
        config: The settings.
        storage: Where to seal buckets; None seals none and keeps all in memory. Only `recover` reads buckets that are
            stored there already.

    Attributes:
        recovery_report: What `recover` has found.
    """

    def __init__(self, config: DelayConfig, *, storage: SnapshotStorage | None = None) -> None:
        super().__init__(due_log_bytes_max=DUE_LOG_BYTES_MAX)
        self._config = config
        # How long before its time a message is handed out, unless by a view.
        self._early_ms = 0 if config.is_deliver_at_time_strict else config.tick_time_ms
        self._sealed = SealedBuckets(None if storage is None else BucketSnapshots(storage), config)
        self._seals = storage is not None
        self.recovery_report = BucketRecoveryReport()
        # Invariant: each held message is in one of the calendars, or in an unloaded segment of a sealed bucket. These
        # may contain more: messages that were handed out or dropped, and duplicates. Those are never handed out.
        self._mutable = Calendar()  # of rising ledgers, until they are sealed; the first and the last, -1 for none
        self._mutable_first = self._mutable_last = _NO_LEDGER
        self._shared = Calendar()
        # Every ledger before this one is consumed; _has_consumed: some of their messages may be held.
        self._consumed_before = 0
        self._has_consumed = False
        # Invariant: no held message is due by then.
        self._taken_until_ms = -1
        self._retry_at_ms = 0  # when to retry a failed load

    @classmethod
    def recover(
        cls, config: DelayConfig, *, storage: SnapshotStorage, now_ms: int
    ) -> tuple[BucketedDelayIndex, BucketRecoveryReport]:
        """Return an index with the previously sealed buckets, and a report.

        The index lacks messages that were not sealed or cannot be read, and those of segments that are entirely due:
        the dispatcher reads the log from the mark-delete position and offers them again. It contains messages that were
        acked since, until they are due or the mark-delete position reaches their ledger.

        If the storage fails, the index is in memory: nothing is recovered, sealed or deleted, and the stored buckets
        are left for the next recovery.

        Raises:
            ValueError: The time is out of range.
            TypeError: The time is not an integer.
        """
        index = cls(config, storage=storage)
        cutoff_ms, snapshots = index._cutoff(now_ms), index._sealed.snapshots
        assert snapshots is not None
        try:
            found, report = find_buckets(snapshots, cutoff_ms=cutoff_ms)
        except AckStateError as error:
            index._seals = False
            index.recovery_report = BucketRecoveryReport(fell_back=str(error))
            return index, index.recovery_report
        for each in found:
            for ledger_id, bitmap in each.bitmaps().items():
                index.held.update_entries(ledger_id, bitmap)
            index._shared.add_all(*each.loaded)
            index._sealed.adopt(each.bucket)
        index.recovery_report = replace(report, message_count=len(index.held))
        return index, index.recovery_report

    def add_message(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Return whether a message must wait; see `DelayedDeliveryTracker.add_message`.

        A waiting message that is offered when it is due is delivered at once and removed.

        Complexity: O(log messages in memory); occasionally a bucket is sealed, and some are merged.
        """
        self._check_open()
        position, deliver_at_ms, now_ms = check_message(position, deliver_at_ms, now_ms)
        if deliver_at_ms <= self._cutoff(now_ms):
            self.held.discard(position)
            return False
        self._keep(position, deliver_at_ms)
        return True

    def scheduled_messages(self, max_messages: int, *, now_ms: int) -> list[Position]:
        """Hand out the messages due first, at most `max_messages`, in order of position.

        Messages at or below the mark-delete position are dropped; individual acks are unknown here.
        """
        max_messages = integer("max_messages", max_messages)
        check_count("max_messages", max_messages, least=0)
        self._check_open()
        cutoff_ms = self._cutoff(now_ms)
        return list(self._take_due(cutoff_ms, max_count=max_messages))

    @property
    def delayed_message_count(self) -> int:
        """The number of waiting messages, including due ones that were not yet handed out. Complexity: O(1)."""
        self._check_open()
        return len(self.held)

    @property
    def next_delivery_ms(self) -> int | None:
        """When to poll again: at the first message's time, or a tick before it unless delivery is strict.

        While a segment cannot be loaded it is a second after the last attempt; a poll tries at once.
        """
        self._check_open()
        return self._next_take_ms(early_ms=self._early_ms)

    def clear(self) -> None:
        """Remove every message and delete every snapshot of this owner, including those that no index references.

        Raises:
            AckStateError: A snapshot could not be deleted; no message is left, and a second call deletes the rest.
        """
        self._check_open()
        with self.lock:
            self._forget()
            if self._sealed.snapshots is not None:
                self._sealed.snapshots.delete_all()
                self._seals = True

    def close(self) -> None:
        """Release everything in memory; sealed buckets stay on disk for `recover`. No-op if closed."""
        with self.lock:
            self._forget()
            self.is_open = False

    def advance_mark_delete(self, position: Position) -> None:
        """Drop the messages of ledgers that are acked as a whole, given the mark-delete position.

        Messages in the ledgers before that of the position are dropped, and the snapshots of buckets that end there are
        deleted. Acked messages in the ledger itself wait until they are due, as in Pulsar. A position in a lower ledger
        than before changes nothing.
        """
        self._check_open()
        ledger_id = check_position(position).ledger_id
        with self.lock:
            if ledger_id > self._consumed_before:
                self.drop_before(ledger_id)

    # The index as its views and the message log use it, with the lock held: messages are due at their own time.

    @property
    def next_due_ms(self) -> int | None:
        """When the next message falls due; a second after the last attempt while a segment cannot be loaded."""
        self._check_open()
        return self._next_take_ms(early_ms=0)

    def hold(self, position: Position, deliver_at_ms: int) -> bool:
        if deliver_at_ms > self.now_ms:
            self._keep(position, deliver_at_ms)
            return True
        if position not in self.held:
            return False
        # The message is held for too late a time, or is in a segment that cannot be read now. The subscription
        # that offers it delivers it now; the others receive it from the due log.
        due = PositionSet()
        due.add(position)
        self.held.discard(position)
        self.due_log.append(due)
        return False

    def hold_again(self, position: Position, deliver_at_ms: int) -> None:
        self.held.add(position)
        self._shared.add(position, deliver_at_ms)  # Not in the mutable bucket: a segment has each message once.

    def move_due(self, now_ms: int) -> None:
        self._check_open()
        self.now_ms = max(self.now_ms, now_ms)
        if self.now_ms <= self._taken_until_ms:
            return
        taken = self._take_due(self.now_ms)
        first_ms = self._first_due_ms
        # A due message that could not be loaded is taken by a later call.
        if first_ms is None or first_ms > self.now_ms:
            self._taken_until_ms = self.now_ms
        if len(taken):
            self.due_log.append(taken)

    def drop_before(self, ledger_id: int) -> None:
        self._consumed_before, self._has_consumed = ledger_id, True
        self._drop_consumed()

    def unknown(self, positions: Sequence[Position], *, now_ms: int) -> Sequence[Position]:
        """Return the messages that do not wait yet; see `DelayedDeliveryTracker.unknown`."""
        self._check_open()
        self._cutoff(now_ms)
        return [position for position in positions if position not in self.held]

    def stats(self) -> BucketStats:
        """Return the statistics of the index."""
        with self.lock:
            return BucketStats(
                bucket_count=len(self._sealed),
                mutable_count=len(self._mutable),
                shared_count=len(self._shared),
                damaged=tuple(self._sealed.damaged),
            )

    def _cutoff(self, now_ms: int) -> int:
        """Return the latest due time of the messages that are due now; a time before an earlier one counts as that."""
        if type(now_ms) is not int or not 0 <= now_ms <= self.now_ms:
            self.now_ms = max(self.now_ms, check_time(now_ms, name="now_ms"))
        return self.now_ms + self._early_ms

    @property
    def _first_due_ms(self) -> int | None:
        """The due time of the first message, which may no longer be held; None if none is held."""
        if not self.held:
            return None
        head = self._sealed.first_boundary()
        firsts = (self._mutable.first_due_ms, self._shared.first_due_ms, head[0].due_ms if head else None)
        return min((each for each in firsts if each is not None), default=None)

    def _next_take_ms(self, *, early_ms: int) -> int | None:
        """Return when to take messages next: a second after the last attempt while a segment cannot be loaded."""
        first_ms = self._first_due_ms
        return None if first_ms is None else max(first_ms - early_ms, self._retry_at_ms, 0)

    def _keep(self, position: Position, deliver_at_ms: int) -> None:
        """Hold a message until it is taken; a held message keeps its time. The arguments are not validated."""
        ledger_id, entry_id = position
        if not self.held.include(ledger_id, entry_id):
            return
        if ledger_id == self._mutable_last:
            self._mutable.add(position, deliver_at_ms)
        elif self._is_for_mutable(ledger_id):
            self._mutable_last = ledger_id
            if self._mutable_first == _NO_LEDGER:
                self._mutable_first = ledger_id
            self._mutable.add(position, deliver_at_ms)
        else:
            self._shared.add(position, deliver_at_ms)
        if ledger_id < self._consumed_before:
            self._has_consumed = True

    def _take_due(self, until_ms: int, *, max_count: int | None = None) -> PositionSet:
        """Take out at most `max_count` of the messages due first, up to a time, included."""
        # An error of the storage's `read_deliver_at_ms` propagates, and then nothing is taken out.
        taken = PositionSet()
        try:
            self._take_into(taken, until_ms, max_count)
            self.held.update(self.keep_moved(taken, until_ms))
        except BaseException:
            self._put_back(taken, until_ms)
            raise
        return taken

    def _take_into(self, taken: PositionSet, until_ms: int, max_count: int | None) -> None:
        first_ms = self._mutable.first_due_ms
        if first_ms is not None and first_ms <= until_ms:
            # Out of the mutable bucket, so that they are not sealed.
            self._shared.add_all(*self._mutable.take_until(until_ms))
        self._drop_consumed()
        while (room := None if max_count is None else max_count - len(taken)) is None or room > 0:
            head = self._sealed.first_boundary()
            if head is not None and head[0].due_ms > until_ms:
                head = None
            due = self._shared.take_until(until_ms if head is None else head[0].due_ms, room)
            is_all = room is None or len(due.ledger_ids) < room
            if head is not None:
                ahead = head[0].count_before(due)
                is_all = is_all or ahead < len(due.ledger_ids)
                self._shared.add_all(*(column[ahead:] for column in due))
                due = DelayedIndexes(*(column[:ahead] for column in due))
            self._release(due, taken)
            if is_all and (head is None or len(taken) == max_count or not self._load_next(head[1])):
                break

    def _put_back(self, taken: PositionSet, due_ms: int) -> None:
        self.held.update(taken)
        for position in taken:
            self._shared.add(position, due_ms)
        self._taken_until_ms = -1

    def _is_for_mutable(self, ledger_id: int) -> bool:
        """Return whether a message of a new ledger goes into the mutable bucket; seal a full bucket first."""
        if ledger_id < self._mutable_last or self._sealed.covers(ledger_id):
            return False
        count, step = len(self._mutable), self._config.ledger_step_per_bucket
        if self._seals and count:
            spans_enough = step is not None and ledger_id - self._mutable_first >= step
            if spans_enough or count >= self._config.min_index_count_per_bucket:
                self._seal()
        return True

    def _seal(self) -> None:
        key = BucketKey(self._mutable_first, self._mutable_last)
        self._mutable_first = self._mutable_last = _NO_LEDGER
        self._shared.add_all(*self._sealed.seal(key, self._mutable.take_until(TIME_MS_MAX)))
        if self._sealed.has_too_many:
            self._drop_consumed()
            self._shared.add_all(*self._sealed.merge())
            self._taken_until_ms = -1  # A merged bucket contains messages again that were taken.
        self._sealed.catch_up()

    def _load_next(self, bucket: Bucket) -> bool:
        loaded = self._sealed.load_next(bucket)
        if loaded is None:
            self._retry_at_ms = self.now_ms + _LOAD_RETRY_MS
            return False
        self._retry_at_ms = 0
        self._shared.add_all(*loaded)
        return True

    def _release(self, due: DelayedIndexes, taken: PositionSet) -> None:
        """Move the held messages among some from `held` to `taken`."""
        if len(due.ledger_ids) < _MANY_A_LEDGER * len(np.unique(due.ledger_ids)):
            for ledger_id, entry_id in zip(due.ledger_ids.tolist(), due.entry_ids.tolist(), strict=True):
                position = Position(ledger_id, entry_id)
                if position in self.held:
                    self.held.discard(position)
                    taken.add(position)
            return
        released = PositionSet()
        for ledger_id, part in by_ledger(due):
            released.update_entries(ledger_id, array("I", part.entry_ids.astype(np.uint32).tobytes()))
        released.intersection_update(self.held)
        self.held.difference_update(released)
        taken.update(released)

    def _drop_consumed(self) -> None:
        if self._has_consumed:
            self.held.remove_below(Position(self._consumed_before, 0))
            self._sealed.trim(self._consumed_before)
            self._has_consumed = False
            for calendar in (self._shared, self._mutable):
                calendar.keep_only(self.held)

    def _forget(self) -> None:
        self.held.clear()
        self._mutable.clear()
        self._mutable_first = self._mutable_last = _NO_LEDGER
        self._shared.clear()
        self._consumed_before, self._has_consumed = 0, False
        self._taken_until_ms = -1
        self._sealed.clear()

    def _check(self) -> None:
        """Assert every invariant."""
        self.held._check()
        assert (self._mutable_first == _NO_LEDGER) == (self._mutable_last == _NO_LEDGER)
        assert self._mutable_first <= self._mutable_last
        to_come = self._sealed._check()
        assert len(self.held) <= len(self._mutable) + len(self._shared) + to_come
        assert self._first_due_ms is None or self._first_due_ms > self._taken_until_ms
