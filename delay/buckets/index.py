"""Which messages are not yet due, with all but the next ones to come on disk?

Source: PIP-195 and ``BucketDelayedDeliveryTracker`` of Apache Pulsar 5.0.1.
"""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.delay.buckets.mutable import MutableBucket, by_ledger
from ackstate.delay.buckets.recovery import BucketRecoveryReport, find_buckets
from ackstate.delay.buckets.sealed import SealedBuckets
from ackstate.delay.buckets.shared import SharedBuckets
from ackstate.delay.buckets.snapshots import BucketSnapshots, SnapshotStorage
from ackstate.delay.calendar import Calendar
from ackstate.delay.config import DelayConfig
from ackstate.delay.due_log import DUE_LOG_BYTES_MAX, DueLog
from ackstate.delay.position_set import PositionSet
from ackstate.delay.tracker import TIME_MS_MAX, DurableDelayTracker, check_message, check_time
from ackstate.delay.view import SubscriptionDelayView
from ackstate.errors import AckStateError
from ackstate.integers import check_count, check_within, integer
from ackstate.position import ENTRY_ID_MAX, Position, check_position
from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ackstate.delay.buckets.bucket import Bucket
    from ackstate.delay.buckets.sealed import BucketStats

# From so many messages a ledger on, taking them out of its bitmap together is faster than one by one.
_MANY_A_LEDGER = 16
_LOAD_RETRY_MS = 1_000


@final
class BucketedDelayIndex(DurableDelayTracker):
    """The messages of one topic or one subscription that are not yet due; most of them are on disk.

    What is added in order of ledgers fills the mutable bucket. When the log goes on to another ledger and the bucket is
    full it is sealed: stored as a snapshot, in segments by time, of which only the first stays in memory. The next one
    is loaded when the last message of the one before is handed out. What comes later for a ledger that a sealed bucket
    covers stays in memory. Which messages wait is held exactly, one bitmap a ledger.

    >>> index = BucketedDelayIndex(DelayConfig(is_deliver_at_time_strict=True))
    >>> index.add_message(Position(3, 7), deliver_at_ms=1_050, now_ms=1_000)
    True
    >>> index.scheduled_messages(10, now_ms=1_049), index.scheduled_messages(10, now_ms=1_050)
    ([], [Position(ledger_id=3, entry_id=7)])

    A message whose time has come, or is at most a tick away unless delivery is strict, is not held; the others are
    handed out at their time, or up to a tick before it. Nothing is rounded.

    Every call is synchronous: when one returns, what it began on the storage has happened or has failed. No failure of
    the storage reaches the caller except where that is said. A snapshot that cannot be written leaves its messages in
    memory. A merge that fails changes nothing. A segment that cannot be loaded, and with it what is due later, waits
    for the next poll. One that is damaged or gone is rebuilt by asking the log when each message is due; without
    a log to ask, they are late by less than the time step of a segment. `stats` reports it.

    As in Pulsar, a poll hands out by time and returns by position, and what was offered twice with different times has
    the first one. Not as in Pulsar 5.0.1: buckets may overlap and both deliver, what the mark-delete has passed counts
    no longer, and a snapshot is unregistered before it is deleted.

    Not safe for concurrent use; use after `close` raises `ValueError`.

    Attributes:
        held: Which messages wait; to be read, not changed.
        lock: What the views take.
        due_log: What has fallen due, for the views.
        is_fed: Whether one reader puts in the messages, for all views.

    Args:
        config: The settings.
        storage: Where to seal buckets; None seals none and keeps all in memory. What is stored there already is not
            looked at: that is what `recover` does.
    """

    def __init__(self, config: DelayConfig, *, storage: SnapshotStorage | None = None) -> None:
        self._config = config
        # How long before its time a message is due.
        self._early_ms = 0 if config.is_deliver_at_time_strict else config.tick_time_ms
        self._sealed = SealedBuckets(None if storage is None else BucketSnapshots(storage), config)
        self._seals = storage is not None
        self._is_open = True
        self._now_ms = 0
        # Invariant: what is held is in one of the calendars, or in a segment to come of a sealed bucket. They may hold
        # more: what was handed out or dropped, and what stands in two buckets. No such message is handed out.
        self.held = PositionSet()
        self._mutable = MutableBucket()
        self._shared = Calendar()
        # All of the ledgers before this one is consumed; _has_consumed: some may be held.
        self._consumed_before = 0
        self._has_consumed = False
        # Invariant: nothing that is held is due by then, but what `take_all_due` could not load.
        self._taken_until_ms = -1
        self._retry_at_ms = 0  # when to try again to load what could not be loaded
        # For the views.
        self.lock = threading.Lock()
        self.due_log = DueLog(bytes_max=DUE_LOG_BYTES_MAX)
        self.is_fed = False

    @classmethod
    def from_pulsar_conf(
        cls, source: Mapping[str, object] | str | Path, *, storage: SnapshotStorage | None = None
    ) -> BucketedDelayIndex:
        """Return an index with the settings of a broker; errors as for `DelayConfig.from_pulsar_conf`."""
        return cls(DelayConfig.from_pulsar_conf(source), storage=storage)

    @classmethod
    def recover(
        cls, config: DelayConfig, *, storage: SnapshotStorage, now_ms: int, is_late: Callable[[], bool] = lambda: False
    ) -> tuple[BucketedDelayIndex, BucketRecoveryReport]:
        """Return an index with what was sealed before, and what was found.

        What is due, what was not sealed and what cannot be read is not in the index: the dispatcher reads the log from
        the mark-delete position and offers it again. What was acked since is in it until it is due or passed by the
        mark-delete position.

        A recovery that takes too long or finds the storage failing falls back to an index in memory: nothing is
        recovered, sealed or deleted, and what is stored waits for the next one.

        Args:
            config: The settings.
            storage: Where the buckets are.
            now_ms: The time now.
            is_late: Asked before each bucket is read, whether to fall back.

        Raises:
            ValueError: The time is out of range.
            TypeError: The time is not an integer.
        """
        index = cls(config, storage=storage)
        cutoff_ms = index._cutoff(now_ms)
        snapshots = index._sealed.snapshots
        assert snapshots is not None
        try:
            found = find_buckets(snapshots, cutoff_ms=cutoff_ms, is_late=is_late)
        except AckStateError as error:
            index._seals = False
            return index, BucketRecoveryReport(fell_back=str(error))
        for each in found.buckets:
            for ledger_id, bitmap in each.bitmaps().items():
                index.held.update_entries(ledger_id, bitmap)
            index._shared.add_all(*each.loaded)
            index._sealed.adopt(each.bucket)
        return index, found.report(message_count=len(index))

    def __len__(self) -> int:
        """Return how many messages wait, each counted once. Complexity: O(1)."""
        return len(self.held)

    def __contains__(self, position: Position) -> bool:
        return 0 <= position[1] <= ENTRY_ID_MAX and position in self.held

    def add_message(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Say whether a message must wait; see `DelayedDeliveryTracker.add_message`.

        One that waits and is offered when its time has come is delivered now and waits no longer.

        Complexity: O(log messages in memory); every so often a bucket is sealed, and some are merged.
        """
        if not self._is_open:
            self._check_open()
        position, deliver_at_ms, now_ms = check_message(position, deliver_at_ms, now_ms)
        if deliver_at_ms <= self._cutoff(now_ms):
            self.held.discard(position)
            return False
        self.hold(position, deliver_at_ms)
        return True

    def has_message_available(self, *, now_ms: int) -> bool:
        """Say whether `scheduled_messages` would hand out anything now.

        It may say so of a message that is not to be handed out any more; the poll then forgets it.
        """
        self._check_open()
        cutoff_ms = self._cutoff(now_ms)
        first_ms = self._first_due_ms()
        return first_ms is not None and first_ms <= cutoff_ms

    def scheduled_messages(self, max_messages: int, *, now_ms: int) -> list[Position]:
        """Hand out the messages due first, at most so many, in order of position.

        Messages that the mark-delete has passed are dropped; whether one was acked by itself is not known here.
        """
        max_messages = integer("max_messages", max_messages)
        check_count("max_messages", max_messages, least=0)
        return list(self.take_due_at(now_ms, max_messages))

    @property
    def delayed_message_count(self) -> int:
        """How many messages wait, due ones that were not yet handed out among them. Complexity: O(1)."""
        self._check_open()
        return len(self.held)

    @property
    def memory_bytes(self) -> int:
        """About how much memory the index takes. Complexity: O(bitmaps + segments)."""
        self._check_open()
        calendars = self._mutable.calendar.memory_bytes + self._shared.memory_bytes
        return calendars + self.held.memory_bytes + self._sealed.memory_bytes

    def should_pause_all_deliveries(self, *, now_ms: int) -> bool:
        """Return False always, as Pulsar's."""
        self._check_open()
        self._cutoff(now_ms)
        return False

    @property
    def next_delivery_ms(self) -> int | None:
        """When to ask again: at the first message's time, or a tick before it unless delivery is strict.

        While a segment cannot be loaded it is a second after the last time that this was tried; a poll tries at once.
        """
        self._check_open()
        first_ms = self._first_due_ms()
        return None if first_ms is None else max(first_ms - self._early_ms, self._retry_at_ms, 0)

    def reset_tick_time(self, tick_time_ms: int) -> None:
        """From now on take another tick; see `DelayedDeliveryTracker.reset_tick_time`."""
        self._check_open()
        check_within("tick_time_ms", tick_time_ms, least=1, most=TIME_MS_MAX)
        if not self._config.is_deliver_at_time_strict:
            self._early_ms = tick_time_ms
            self._taken_until_ms = -1  # With a shorter one, what comes now may be due before that.

    def clear(self) -> None:
        """Forget every message and delete every snapshot of this owner, those too that no index knows.

        Raises:
            AckStateError: A snapshot could not be deleted; all is forgotten, and a second call deletes the rest.
        """
        self._check_open()
        with self.lock:
            self._forget()
            if self._sealed.snapshots is not None:
                self._sealed.snapshots.delete_all()
                self._seals = True

    def close(self) -> None:
        """Let go of everything in memory; what is sealed stays on disk for `recover`. Once closed, do nothing."""
        with self.lock:
            self._forget()
        self._is_open = False

    def advance_mark_delete(self, position: Position) -> None:
        """Say that everything up to a position, included, is acked.

        What waits in the ledgers before that of the position is dropped, and the snapshots of buckets that end there
        are deleted. What is acked in the ledger itself waits until it is due, as in Pulsar. A position in a ledger
        before an earlier one changes nothing.
        """
        self._check_open()
        ledger_id = check_position(position).ledger_id
        with self.lock:
            if ledger_id > self._consumed_before:
                self.drop_before(ledger_id)

    def open_view(self, is_acked: Callable[[Position], bool]) -> SubscriptionDelayView:
        """Return a view for one of several subscriptions that share the index.

        Views may be used by different threads. What the index does on the storage, such as sealing a bucket, is done by
        whoever's call brings it about, while the others wait. From the first view on, poll the index through views
        only, and tell them the mark-delete positions: what all have passed is dropped.

        Args:
            is_acked: Whether the subscription has acked a position, at the moment it is asked.
        """
        self._check_open()
        return SubscriptionDelayView(SharedBuckets(self), is_acked=is_acked)

    def feed(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Put in a message for all views; see `TopicDelayIndex.feed`."""
        position, deliver_at_ms, now_ms = check_message(position, deliver_at_ms, now_ms)
        self._check_open()
        shared = SharedBuckets(self)
        with self.lock:
            self.is_fed = True
            shared.move_due(now_ms)
            return shared.hold(position, deliver_at_ms)

    @property
    def outlives_restarts(self) -> bool:
        """Whether the index may know messages that the dispatcher has not read; see `DurableDelayTracker`."""
        return self._sealed.snapshots is not None

    def skip(self, position: Position, *, now_ms: int) -> bool:
        """Say whether a message that the reader comes to is known to wait; see `DurableDelayTracker.skip`."""
        self._check_open()
        position = check_position(position, entry_id_min=0)
        self._cutoff(now_ms)
        return position in self.held

    @property
    def live_buckets(self) -> tuple[tuple[int, int], ...]:
        """The ids of durable snapshots in use, each with the number of the segment in memory, for `SharedHoles`.

        May be read by any thread.
        """
        return self._sealed.durable

    def delete_retired(self) -> None:
        """Delete the snapshots out of use that nothing references any more; a failure leaves one to the next call."""
        self._check_open()
        with self.lock:
            self._sealed.catch_up()

    def stats(self) -> BucketStats:
        """Return the index's numbers."""
        with self.lock:
            return self._sealed.stats(mutable_count=len(self._mutable), shared_count=len(self._shared))

    # What an index that several subscriptions share is made of: no tick, no clock, no polls.

    @property
    def now_ms(self) -> int:
        """The latest time seen."""
        return self._now_ms

    @property
    def cutoff_ms(self) -> int:
        """Up to when, included, messages are due at the latest time seen."""
        return self._now_ms + self._early_ms

    def hold(self, position: Position, deliver_at_ms: int) -> None:
        """Hold a message until it is taken; one that is held keeps its time. Neither is checked."""
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

    def advance(self, until_ms: int) -> None:
        """Move what is due up to a time out of the mutable bucket, so that it is not sealed."""
        first_ms = self._mutable.calendar.first_due_ms
        if first_ms is not None and first_ms <= until_ms:
            self._shared.add_all(*self._mutable.take_until(until_ms))

    def take_due_at(self, now_ms: int, max_count: int | None = None) -> PositionSet:
        """Take out the messages that are due first at a time, at most so many; see `take_due`."""
        self._check_open()
        return self.take_due(self._cutoff(now_ms), max_count)

    def take_all_due(self, now_ms: int) -> PositionSet | None:
        """Take out all that is due at a time; None, at once, if nothing can be that was not when last asked."""
        self._check_open()
        until_ms = self._cutoff(now_ms)
        if until_ms <= self._taken_until_ms:
            return None
        taken = self.take_due(until_ms)
        first_ms = self._first_due_ms()
        # What is due and could not be loaded is asked for again.
        self._taken_until_ms = until_ms if first_ms is None or first_ms > until_ms else self._taken_until_ms
        return taken

    def drop_before(self, ledger_id: int) -> None:
        """Drop what waits in the ledgers before one, and from now on what comes; it may be a lower one than before."""
        self._consumed_before, self._has_consumed = ledger_id, True
        self._drop_consumed()

    def take_due(self, until_ms: int, max_count: int | None = None) -> PositionSet:
        """Take out the messages that are due first, up to a time, included, and at most so many.

        What the storage's `read_deliver_at_ms` raises passes through, and nothing is taken out.
        """
        taken = PositionSet()
        try:
            self._take_into(taken, until_ms, max_count)
        except BaseException:
            self._put_back(taken, until_ms)
            raise
        return taken

    def _put_back(self, taken: PositionSet, due_ms: int) -> None:
        self.held.update(taken)
        for position in taken:
            self._shared.add(position, due_ms)
        self._taken_until_ms = -1

    def _take_into(self, taken: PositionSet, until_ms: int, max_count: int | None) -> None:
        self.advance(until_ms)
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
            if is_all and (head is None or len(taken) == max_count or not self._load_next(head[1])):
                break

    # Sealing.

    def _is_for_mutable(self, ledger_id: int) -> bool:
        """Tell whether a message of another ledger than the last goes into the mutable bucket; seal what is full."""
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
            self._taken_until_ms = -1  # What was merged has messages again that have been taken.
        self._sealed.catch_up()

    def _load_next(self, bucket: Bucket) -> bool:
        loaded = self._sealed.load_next(bucket)
        if loaded is None:
            self._retry_at_ms = self._now_ms + _LOAD_RETRY_MS
            return False
        self._retry_at_ms = 0
        self._shared.add_all(*loaded)
        return True

    def _release(self, due: DelayedIndexes, taken: PositionSet) -> None:
        """Move messages out of what is held, those that are in, to those that are taken."""
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

    # Time.

    def _cutoff(self, now_ms: int) -> int:
        """Return up to when messages are due; a time before one seen earlier counts as that."""
        if type(now_ms) is not int or not 0 <= now_ms <= self._now_ms:
            self._now_ms = max(self._now_ms, check_time(now_ms, name="now_ms"))
        return self.cutoff_ms

    def _first_due_ms(self) -> int | None:
        if not self.held:
            return None
        head = self._sealed.first_boundary()
        firsts = (self._mutable.calendar.first_due_ms, self._shared.first_due_ms, head[0].due_ms if head else None)
        return min((each for each in firsts if each is not None), default=None)

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("the index is closed; open another one with `recover`")

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(bitmaps)."""
        self.held._check()
        self._mutable._check()
        to_come = self._sealed._check()
        assert len(self.held) <= len(self._mutable) + len(self._shared) + to_come
