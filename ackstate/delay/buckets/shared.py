"""Shares a bucketed index among the subscriptions of a topic, each with its own view."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.delay.due_log import DUE_LOG_BYTES_MAX
from ackstate.delay.position_set import PositionSet
from ackstate.delay.shared_index import SharedDelayIndex

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ackstate.delay.buckets.messages import BucketedMessages
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
