"""How do the subscriptions of a topic share one bucketed index? As its views: what falls due is theirs to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.delay.position_set import PositionSet

if TYPE_CHECKING:
    from ackstate.delay.buckets.index import BucketedDelayIndex
    from ackstate.position import Position


@final
class SharedBuckets:
    """A bucketed index as a view needs it; see `DelayIndex`. All that it knows is the index's."""

    def __init__(self, index: BucketedDelayIndex) -> None:
        self.lock = index.lock
        self.due_log = index.due_log
        self.held = index.held
        self._index = index

    @property
    def is_fed(self) -> bool:
        """See `DelayIndex`."""
        return self._index.is_fed

    @property
    def outlives_restarts(self) -> bool:
        """See `DelayIndex`."""
        return self._index.outlives_restarts

    @property
    def now_ms(self) -> int:
        """See `DelayIndex`."""
        return self._index.now_ms

    @property
    def next_due_ms(self) -> int | None:
        """See `DelayIndex`."""
        return self._index.next_delivery_ms

    @property
    def memory_bytes(self) -> int:
        """See `DelayIndex`."""
        with self.lock:
            return self._index.memory_bytes + self.due_log.memory_bytes

    def hold(self, position: Position, deliver_at_ms: int) -> bool:
        """See `DelayIndex`."""
        if deliver_at_ms > self._index.cutoff_ms:
            self._index.hold(position, deliver_at_ms)
            return True
        if position not in self._index.held:
            return False
        # It is held for too late a time, or lies in a segment that cannot be read now. Who meets it only now is to
        # deliver it now, the others read of it.
        due = PositionSet()
        due.add(position)
        self._index.held.discard(position)
        self.due_log.append(due)
        return False

    def move_due(self, now_ms: int) -> None:
        """See `DelayIndex`."""
        due = self._index.take_all_due(now_ms)
        if due is not None and len(due):
            self.due_log.append(due)

    def drop_before(self, ledger_id: int) -> None:
        """See `DelayIndex`."""
        self._index.drop_before(ledger_id)

    def reset_tick_time(self, tick_time_ms: int) -> None:
        """See `DelayIndex`."""
        with self.lock:
            self._index.reset_tick_time(tick_time_ms)
