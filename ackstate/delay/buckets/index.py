"""The delay index with snapshots: all messages but the next ones to fall due are on disk.

Source: PIP-195 and ``BucketDelayedDeliveryTracker`` of Apache Pulsar 5.0.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.delay.buckets.messages import BucketedMessages
from ackstate.delay.config import DelayConfig
from ackstate.delay.due_log import DUE_LOG_BYTES_MAX
from ackstate.delay.position_set import PositionSet
from ackstate.delay.shared_index import SharedDelayIndex
from ackstate.delay.tracker import DelayedDeliveryTracker, check_message, check_time
from ackstate.delay.view import SubscriptionDelayView
from ackstate.integers import check_count, integer
from ackstate.position import ENTRY_ID_MAX, Position, check_position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ackstate.delay.buckets.recovery import BucketRecoveryReport
    from ackstate.delay.buckets.sealed import BucketStats
    from ackstate.delay.buckets.snapshots import SnapshotStorage
    from ackstate.position import Position


@final
class SharedBuckets(SharedDelayIndex):
    """The messages of a bucketed index, which are due for its views at their own time: never early, not rounded."""

    def __init__(self, messages: BucketedMessages) -> None:
        super().__init__(due_log_bytes_max=DUE_LOG_BYTES_MAX)
        self.held = messages.held
        self._messages = messages
        self._now_ms = 0

    @property
    def now_ms(self) -> int:
        return self._now_ms

    @property
    def next_due_ms(self) -> int | None:
        """See `SharedDelayIndex`; a second after the last attempt while a segment cannot be loaded."""
        self._messages.check_open()
        return self._messages.next_take_ms(early_ms=0)

    @property
    def memory_bytes(self) -> int:
        with self.lock:
            self._messages.check_open()
            return self._messages.memory_bytes + self.due_log.memory_bytes

    def learn(self, delayed: Iterable[tuple[Position, int]]) -> None:
        """See `SharedDelayIndex`; no-op if the index is closed."""
        if self._messages.is_open:
            super().learn(delayed)

    def hold(self, position: Position, deliver_at_ms: int) -> bool:
        if deliver_at_ms > self._now_ms:
            self._messages.hold(position, deliver_at_ms)
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

    def move_due(self, now_ms: int) -> None:
        self._now_ms = max(self._now_ms, now_ms)
        due = self._messages.take_all_due(self._now_ms)
        if due is not None and len(due):
            self.due_log.append(due)

    def drop_before(self, ledger_id: int) -> None:
        self._messages.drop_before(ledger_id)


@final
class BucketedDelayIndex(DelayedDeliveryTracker):
    """The messages of one topic or one subscription that are not yet due; most of them are on disk.

    Messages that are added in order of ledgers fill the mutable bucket. When the log moves to another ledger and the
    bucket is full, it is sealed: stored as a snapshot, in segments by time. Only the first segment stays in memory; the
    next one is loaded when the last message of the one before is handed out. Messages that come later for a ledger of a
    sealed bucket stay in memory. The set of waiting messages is exact, one bitmap a ledger.

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

    Not safe for concurrent use; use after `close` raises `ValueError`.

    Args:
        config: The settings.
        storage: Where to seal buckets; None seals none and keeps all in memory. Only `recover` reads buckets that are
            stored there already.
    """

    def __init__(self, config: DelayConfig, *, storage: SnapshotStorage | None = None) -> None:
        self._config = config
        # How long before its time a message is handed out, unless by a view.
        self._early_ms = 0 if config.is_deliver_at_time_strict else config.tick_time_ms
        self._messages = BucketedMessages(config, storage=storage)
        self._shared = SharedBuckets(self._messages)
        self.lock = self._shared.lock
        self._now_ms = 0

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
        """Return an index with the previously sealed buckets, and a report.

        The index lacks messages that were not sealed or cannot be read, and those of segments that are entirely due:
        the dispatcher reads the log from the mark-delete position and offers them again. It contains messages that were
        acked since, until they are due or the mark-delete position reaches their ledger.

        A recovery that takes too long, or whose storage fails, falls back to an index in memory: nothing is recovered,
        sealed or deleted, and the stored buckets are left for the next recovery.

        Args:
            config: The settings.
            storage: Where the buckets are.
            now_ms: The time now.
            is_late: Called before each bucket is read; returns whether to fall back.

        Raises:
            ValueError: The time is out of range.
            TypeError: The time is not an integer.
        """
        index = cls(config, storage=storage)
        cutoff_ms = index._cutoff(now_ms)
        index._shared.move_due(now_ms)
        return index, index._messages.recover(cutoff_ms=cutoff_ms, is_late=is_late)

    @property
    def held(self) -> PositionSet:
        """The waiting messages; must not be changed."""
        return self._messages.held

    def __len__(self) -> int:
        """Return the number of waiting messages, each counted once. Complexity: O(1)."""
        return len(self.held)

    def __contains__(self, position: Position) -> bool:
        return 0 <= position[1] <= ENTRY_ID_MAX and position in self.held

    def add_message(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Return whether a message must wait; see `DelayedDeliveryTracker.add_message`.

        A waiting message that is offered when it is due is delivered at once and removed.

        Complexity: O(log messages in memory); occasionally a bucket is sealed, and some are merged.
        """
        self._messages.check_open()
        position, deliver_at_ms, now_ms = check_message(position, deliver_at_ms, now_ms)
        if deliver_at_ms <= self._cutoff(now_ms):
            self.held.discard(position)
            return False
        self._messages.hold(position, deliver_at_ms)
        return True

    def has_message_available(self, *, now_ms: int) -> bool:
        """Return whether `scheduled_messages` would hand out anything now.

        It may return True for a message that must no longer be handed out; the poll then removes it.
        """
        self._messages.check_open()
        cutoff_ms = self._cutoff(now_ms)
        first_ms = self._messages.first_due_ms
        return first_ms is not None and first_ms <= cutoff_ms

    def scheduled_messages(self, max_messages: int, *, now_ms: int) -> list[Position]:
        """Hand out the messages due first, at most `max_messages`, in order of position.

        Messages at or below the mark-delete position are dropped; individual acks are unknown here.
        """
        max_messages = integer("max_messages", max_messages)
        check_count("max_messages", max_messages, least=0)
        self._messages.check_open()
        cutoff_ms = self._cutoff(now_ms)
        return list(self._messages.take_due(cutoff_ms, now_ms=self._now_ms, max_count=max_messages))

    @property
    def delayed_message_count(self) -> int:
        """The number of waiting messages, including due ones that were not yet handed out. Complexity: O(1)."""
        self._messages.check_open()
        return len(self.held)

    @property
    def memory_bytes(self) -> int:
        """About how much memory the index takes. Complexity: O(bitmaps + segments)."""
        self._messages.check_open()
        return self._messages.memory_bytes

    @property
    def next_delivery_ms(self) -> int | None:
        """When to poll again: at the first message's time, or a tick before it unless delivery is strict.

        While a segment cannot be loaded it is a second after the last attempt; a poll tries at once.
        """
        self._messages.check_open()
        return self._messages.next_take_ms(early_ms=self._early_ms)

    def clear(self) -> None:
        """Remove every message and delete every snapshot of this owner, including those that no index references.

        Raises:
            AckStateError: A snapshot could not be deleted; no message is left, and a second call deletes the rest.
        """
        self._messages.check_open()
        with self.lock:
            self._messages.clear()

    def close(self) -> None:
        """Release everything in memory; sealed buckets stay on disk for `recover`. No-op if closed."""
        with self.lock:
            self._messages.close()

    def advance_mark_delete(self, position: Position) -> None:
        """Drop the messages of ledgers that are acked as a whole, given the mark-delete position.

        Messages in the ledgers before that of the position are dropped, and the snapshots of buckets that end there are
        deleted. Acked messages in the ledger itself wait until they are due, as in Pulsar. A position in a lower ledger
        than before changes nothing.
        """
        self._messages.check_open()
        ledger_id = check_position(position).ledger_id
        with self.lock:
            self._messages.drop_consumed(ledger_id)

    def open_view(self, is_acked: Callable[[Position], bool]) -> SubscriptionDelayView:
        """Return a view for one of several subscriptions that share the index.

        Views may be used by different threads. Work on the storage, such as sealing a bucket, is done within the call
        that causes it, while other threads wait. From the first view on, poll the index through views only, and report
        the mark-delete positions to them: messages that all have passed are dropped.

        Args:
            is_acked: Returns whether the subscription has acked a position.
        """
        self._messages.check_open()
        return SubscriptionDelayView(self._shared, is_acked=is_acked)

    def feed(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Add a message for all views; see `TopicDelayIndex.feed`."""
        position, deliver_at_ms, now_ms = check_message(position, deliver_at_ms, now_ms)
        self._messages.check_open()
        with self.lock:
            self._shared.is_fed = True
            self._shared.move_due(now_ms)
            return self._shared.hold(position, deliver_at_ms)

    def skip(self, position: Position, *, now_ms: int) -> bool:
        """Return whether the reader may skip a message that already waits; see `DelayedDeliveryTracker.skip`."""
        self._messages.check_open()
        position = check_position(position, entry_id_min=0)
        self._cutoff(now_ms)
        return position in self.held

    def delete_retired(self) -> None:
        """Delete the retired snapshots that are still stored; after a failure the next call retries."""
        self._messages.check_open()
        with self.lock:
            self._messages.delete_retired()

    def stats(self) -> BucketStats:
        """Return the statistics of the index."""
        with self.lock:
            return self._messages.stats()

    @property
    def cutoff_ms(self) -> int:
        """The latest due time, included, of the messages that are due at the latest time seen."""
        return self._now_ms + self._early_ms

    def _cutoff(self, now_ms: int) -> int:
        """Return the latest due time of the messages that are due now; a time before an earlier one counts as that."""
        if type(now_ms) is not int or not 0 <= now_ms <= self._now_ms:
            self._now_ms = max(self._now_ms, check_time(now_ms, name="now_ms"))
        return self.cutoff_ms

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(bitmaps)."""
        self._messages._check()
