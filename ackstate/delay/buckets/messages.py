"""The messages of a bucketed index: an exact set, stored in memory and in sealed buckets, taken out by due time."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.delay.buckets.bucket import BucketKey
from ackstate.delay.buckets.recovery import BucketRecoveryReport, find_buckets
from ackstate.delay.buckets.sealed import SealedBuckets
from ackstate.delay.buckets.snapshots import BucketSnapshots
from ackstate.delay.calendar import Calendar
from ackstate.delay.position_set import PositionSet
from ackstate.delay.tracker import TIME_MS_MAX
from ackstate.errors import AckStateError
from ackstate.position import Position
from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ackstate.delay.buckets.bucket import Bucket
    from ackstate.delay.buckets.sealed import BucketStats
    from ackstate.delay.buckets.snapshots import SnapshotStorage
    from ackstate.delay.config import DelayConfig


_NO_LEDGER = -1


@final
class MutableBucket:
    """Messages of rising ledgers, until they are sealed; not safe for concurrent use.

    Attributes:
        calendar: The messages.
        first_ledger_id: The first ledger; -1 until a message is added.
        last_ledger_id: The last ledger so far; -1 until a message is added.
    """

    __slots__ = ("calendar", "first_ledger_id", "last_ledger_id")

    def __init__(self) -> None:
        self.calendar = Calendar()
        self.first_ledger_id = self.last_ledger_id = _NO_LEDGER

    def __len__(self) -> int:
        return len(self.calendar)

    def add(self, position: Position, deliver_at_ms: int) -> None:
        """Add a message of the last ledger or a later one."""
        ledger_id = position[0]
        if ledger_id != self.last_ledger_id:
            self.last_ledger_id = ledger_id
            if self.first_ledger_id == _NO_LEDGER:
                self.first_ledger_id = ledger_id
        self.calendar.add(position, deliver_at_ms)

    def is_full_before(self, ledger_id: int, config: DelayConfig) -> bool:
        """Return whether to seal the bucket before a message of another ledger is added."""
        if not len(self.calendar):
            return False
        step = config.ledger_step_per_bucket
        spans_enough = step is not None and ledger_id - self.first_ledger_id >= step
        return spans_enough or len(self.calendar) >= config.min_index_count_per_bucket

    def take_until(self, until_ms: int) -> DelayedIndexes:
        """Take out the messages due up to a time, included, in order."""
        return DelayedIndexes(*self.calendar.take_until(until_ms))

    def take_all(self) -> tuple[BucketKey, DelayedIndexes]:
        """Take out all messages, in order, with their range of ledgers; the bucket is empty afterwards."""
        key = BucketKey(self.first_ledger_id, self.last_ledger_id)
        self.first_ledger_id = self.last_ledger_id = _NO_LEDGER
        return key, self.take_until(TIME_MS_MAX)

    def clear(self) -> None:
        """Remove all messages."""
        self.calendar.clear()
        self.first_ledger_id = self.last_ledger_id = _NO_LEDGER

    def _check(self) -> None:
        assert (self.first_ledger_id == _NO_LEDGER) == (self.last_ledger_id == _NO_LEDGER)
        assert self.first_ledger_id <= self.last_ledger_id


def by_ledger(indexes: DelayedIndexes) -> Iterator[tuple[int, DelayedIndexes]]:
    """Yield the messages of each ledger, in the order they have."""
    order = np.argsort(indexes.ledger_ids, kind="stable")
    times, ledger_ids, entry_ids = (column[order] for column in indexes)
    ends = np.flatnonzero(np.diff(ledger_ids, append=_NO_LEDGER)) + 1
    for first, end in pairwise((0, *ends.tolist())):
        yield int(ledger_ids[first]), DelayedIndexes(times[first:end], ledger_ids[first:end], entry_ids[first:end])


# From this many messages per ledger on, removing them from its bitmap together is faster than one by one.
_MANY_A_LEDGER = 16
_LOAD_RETRY_MS = 1_000


@final
class BucketedMessages:
    """Messages by due time, most of them on disk; without a tick, and without a clock but the times passed in.

    Not safe for concurrent use.

    Args:
        config: The settings.
        storage: Where to seal buckets; None seals none and keeps all in memory.

    Attributes:
        held: The waiting messages; must not be changed.
        is_open: False after `close`.
    """

    def __init__(self, config: DelayConfig, *, storage: SnapshotStorage | None) -> None:
        self._config = config
        self._sealed = SealedBuckets(None if storage is None else BucketSnapshots(storage), config)
        self._seals = storage is not None
        self.is_open = True
        # Invariant: each held message is in one of the calendars, or in an unloaded segment of a sealed bucket. These
        # may contain more: messages that were handed out or dropped, and duplicates. Those are never handed out.
        self.held = PositionSet()
        self._mutable = MutableBucket()
        self._shared = Calendar()
        # Every ledger before this one is consumed; _has_consumed: some of their messages may be held.
        self._consumed_before = 0
        self._has_consumed = False
        # Invariant: no held message is due by then.
        self._taken_until_ms = -1
        self._retry_at_ms = 0  # when to retry a failed load

    def recover(self, *, cutoff_ms: int, is_late: Callable[[], bool]) -> BucketRecoveryReport:
        """Load the previously sealed buckets, without the segments that are entirely due at a time.

        A recovery that takes too long, or whose storage fails, recovers nothing, and seals nothing from then on.
        """
        assert self._sealed.snapshots is not None
        try:
            found = find_buckets(self._sealed.snapshots, cutoff_ms=cutoff_ms, is_late=is_late)
        except AckStateError as error:
            self._seals = False
            return BucketRecoveryReport(fell_back=str(error))
        for each in found.buckets:
            for ledger_id, bitmap in each.bitmaps().items():
                self.held.update_entries(ledger_id, bitmap)
            self._shared.add_all(*each.loaded)
            self._sealed.adopt(each.bucket)
        self._taken_until_ms = -1  # Some messages of a loaded segment may be due.
        return found.report(message_count=len(self.held))

    @property
    def memory_bytes(self) -> int:
        """About how much memory the messages take. Complexity: O(bitmaps + segments)."""
        calendars = self._mutable.calendar.memory_bytes + self._shared.memory_bytes
        return calendars + self.held.memory_bytes + self._sealed.memory_bytes

    @property
    def first_due_ms(self) -> int | None:
        """The due time of the first message, which may no longer be held; None if none is held."""
        if not self.held:
            return None
        head = self._sealed.first_boundary()
        firsts = (self._mutable.calendar.first_due_ms, self._shared.first_due_ms, head[0].due_ms if head else None)
        return min((each for each in firsts if each is not None), default=None)

    def next_take_ms(self, *, early_ms: int) -> int | None:
        """Return the next time to take messages; None if none is held.

        While a segment cannot be loaded, it is a second after the last attempt.
        """
        first_ms = self.first_due_ms
        return None if first_ms is None else max(first_ms - early_ms, self._retry_at_ms, 0)

    def hold(self, position: Position, deliver_at_ms: int) -> None:
        """Hold a message until it is taken; a held message keeps its time. The arguments are not validated."""
        ledger_id, entry_id = position
        if not self.held.include(ledger_id, entry_id):
            return
        if ledger_id == self._mutable.last_ledger_id:
            self._mutable.calendar.add(position, deliver_at_ms)
        elif self._is_for_mutable(ledger_id):
            self._mutable.add(position, deliver_at_ms)
        else:
            self._shared.add(position, deliver_at_ms)
        if ledger_id < self._consumed_before:
            self._has_consumed = True

    def keep_unsealed(self, until_ms: int) -> None:
        """Move messages that are due up to a time out of the mutable bucket, so that they are not sealed."""
        first_ms = self._mutable.calendar.first_due_ms
        if first_ms is not None and first_ms <= until_ms:
            self._shared.add_all(*self._mutable.take_until(until_ms))

    def take_all_due(self, now_ms: int) -> PositionSet | None:
        """Take out all messages due at a time; None, at once, if none can be due that was not at the last call."""
        self.check_open()
        if now_ms <= self._taken_until_ms:
            return None
        taken = self.take_due(now_ms, now_ms=now_ms)
        first_ms = self.first_due_ms
        # A due message that could not be loaded is taken by a later call.
        self._taken_until_ms = now_ms if first_ms is None or first_ms > now_ms else self._taken_until_ms
        return taken

    def take_due(self, until_ms: int, *, now_ms: int, max_count: int | None = None) -> PositionSet:
        """Take out the messages that are due first, up to a time, included, and at most `max_count`.

        Errors of the storage's `read_deliver_at_ms` propagate, and then nothing is taken out.
        """
        self.check_open()
        taken = PositionSet()
        try:
            self._take_into(taken, until_ms, now_ms, max_count)
        except BaseException:
            self._put_back(taken, until_ms)
            raise
        return taken

    def drop_before(self, ledger_id: int) -> None:
        """Drop the messages of all lower ledgers, now and in the future. The ledger may be lower than before."""
        self._consumed_before, self._has_consumed = ledger_id, True
        self._drop_consumed()

    def drop_consumed(self, ledger_id: int) -> None:
        """Do the same as `drop_before`, but ignore a ledger that is not above the last one."""
        if ledger_id > self._consumed_before:
            self.drop_before(ledger_id)

    def clear(self) -> None:
        """Remove every message and delete every snapshot of this owner, including those that no index references.

        Raises:
            AckStateError: A snapshot could not be deleted; no message is left, and a second call deletes the rest.
        """
        self._forget()
        if self._sealed.snapshots is not None:
            self._sealed.snapshots.delete_all()
            self._seals = True

    def close(self) -> None:
        """Release everything in memory; sealed buckets stay on disk."""
        self._forget()
        self.is_open = False

    def delete_retired(self) -> None:
        """Retry to register buckets, and to delete retired snapshots that nothing references any more."""
        self._sealed.catch_up()

    def stats(self) -> BucketStats:
        """Return the statistics of the index."""
        return self._sealed.stats(mutable_count=len(self._mutable), shared_count=len(self._shared))

    def check_open(self) -> None:
        """Raise `ValueError` after `close`.

        Raises:
            ValueError: The index is closed.
        """
        if not self.is_open:
            raise ValueError("the index is closed; open another one with `recover`")

    def _take_into(self, taken: PositionSet, until_ms: int, now_ms: int, max_count: int | None) -> None:
        self.keep_unsealed(until_ms)
        self._drop_consumed()
        while (room := None if max_count is None else max_count - len(taken)) is None or room > 0:
            head = self._sealed.first_boundary()
            if head is not None and head[0].due_ms > until_ms:
                head = None
            due = DelayedIndexes(*self._shared.take_until(until_ms if head is None else head[0].due_ms, room))
            is_all = room is None or len(due.ledger_ids) < room
            if head is not None:
                ahead = head[0].count_before(due)
                is_all = is_all or ahead < len(due.ledger_ids)
                self._shared.add_all(*(column[ahead:] for column in due))
                due = DelayedIndexes(*(column[:ahead] for column in due))
            self._release(due, taken)
            if is_all and (head is None or len(taken) == max_count or not self._load_next(head[1], now_ms=now_ms)):
                break

    def _put_back(self, taken: PositionSet, due_ms: int) -> None:
        self.held.update(taken)
        for position in taken:
            self._shared.add(position, due_ms)
        self._taken_until_ms = -1

    def _is_for_mutable(self, ledger_id: int) -> bool:
        """Return whether a message of a new ledger goes into the mutable bucket; seal a full bucket first."""
        if ledger_id < self._mutable.last_ledger_id or self._sealed.covers(ledger_id):
            return False
        if self._seals and self._mutable.is_full_before(ledger_id, self._config):
            self._seal()
        return True

    def _seal(self) -> None:
        self._shared.add_all(*self._sealed.seal(*self._mutable.take_all()))
        if self._sealed.has_too_many:
            self._drop_consumed()
            self._shared.add_all(*self._sealed.merge())
            self._taken_until_ms = -1  # A merged bucket contains messages again that were taken.
        self._sealed.catch_up()

    def _load_next(self, bucket: Bucket, *, now_ms: int) -> bool:
        loaded = self._sealed.load_next(bucket)
        if loaded is None:
            self._retry_at_ms = now_ms + _LOAD_RETRY_MS
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
            for calendar in (self._shared, self._mutable.calendar):
                calendar.keep_only(self.held)

    def _forget(self) -> None:
        self.held.clear()
        self._mutable.clear()
        self._shared.clear()
        self._consumed_before, self._has_consumed = 0, False
        self._taken_until_ms = -1
        self._sealed.clear()

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(bitmaps)."""
        self.held._check()
        self._mutable._check()
        to_come = self._sealed._check()
        assert len(self.held) <= len(self._mutable) + len(self._shared) + to_come
        assert self.first_due_ms is None or self.first_due_ms > self._taken_until_ms
