"""The bucket that is not sealed: the messages of the latest ledgers, in memory."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.delay.buckets.bucket import BucketKey
from ackstate.delay.calendar import Calendar
from ackstate.delay.tracker import TIME_MS_MAX
from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.delay.config import DelayConfig
    from ackstate.position import Position

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
