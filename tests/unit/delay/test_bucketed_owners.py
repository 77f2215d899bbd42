"""A stale owner of bucketed delays writes on, and neither loses a message of the new owner's nor makes one early.

The log has every message, and messages that a snapshot lacks are read there: so an index needs no fence.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from ackstate import AckStateError, MemoryStore, Position
from ackstate.delay import BucketedDelayIndex
from small_buckets import config, storage_of

SETTINGS = config(max_bucket_count=3)
END_MS = 10_000


class TopicOfTwoOwners:
    """A log of delayed messages, with the indexes of two owners of it."""

    def __init__(self, seed):
        self.random = Random(seed)
        self.store = MemoryStore()
        self.due_ms = {}
        self.now_ms = 0
        self.delivered = {}
        self.ledger_id = 3
        self.stale = BucketedDelayIndex(SETTINGS, storage=self.storage(self.store))
        self.publish(self.random.randint(5, 40), [self.stale])
        self.open()

    def storage(self, store):
        return storage_of(store, read_deliver_at_ms=lambda positions: [self.due_ms[each] for each in positions])

    def open(self):
        """Take over: recover the stored buckets, and read the log from its beginning."""
        storage = self.storage(MemoryStore(self.store.disk))
        self.index, _ = BucketedDelayIndex.recover(SETTINGS, storage=storage, now_ms=self.now_ms)
        for position in self.due_ms:
            self.read(position, self.index)

    def read(self, position, index):
        if position in self.delivered and index is self.index:
            return
        due_ms = self.due_ms[position]
        if not index.skip(position, now_ms=self.now_ms):
            is_held = index.add_message(position, deliver_at_ms=due_ms, now_ms=self.now_ms)
            if not is_held and index is self.index:
                self.deliver(position)

    def deliver(self, position):
        assert self.due_ms[position] <= self.now_ms, "early"
        self.delivered[position] = self.now_ms

    def publish(self, count, indexes):
        for _ in range(count):
            self.ledger_id += self.random.random() < 0.2
            position = Position(self.ledger_id, len(self.due_ms))
            self.due_ms[position] = self.now_ms + self.random.randint(1, 400)
            for index in indexes:
                self.read(position, index)

    def step(self):
        act = self.random.choice((self.publish_to_both, self.poll, self.poll, self.clear_stale, self.trim_stale))
        act()
        self.now_ms += self.random.randint(0, 60)

    def publish_to_both(self):
        self.publish(self.random.randint(1, 12), self.random.choice(([self.index, self.stale], [self.index])))

    def poll(self):
        for position in self.index.scheduled_messages(self.random.randint(1, 50), now_ms=self.now_ms):
            if position not in self.delivered:
                self.deliver(position)
        self.stale.scheduled_messages(20, now_ms=self.now_ms)

    def clear_stale(self):
        if self.random.random() < 0.3:
            with suppress(AckStateError):
                self.stale.clear()

    def trim_stale(self):
        self.stale.advance_mark_delete(Position(self.random.randint(3, self.ledger_id), 0))

    def end(self):
        self.now_ms = END_MS
        while due := self.index.scheduled_messages(100, now_ms=self.now_ms):
            for position in due:
                if position not in self.delivered:
                    self.deliver(position)
        missing = [position for position in self.due_ms if position not in self.delivered]
        assert not missing, "lost"


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_a_stale_owner_of_buckets_loses_no_message_and_makes_none_early(seed, restarts):
    topic = TopicOfTwoOwners(seed)
    for _ in range(40):
        topic.step()
        if restarts and topic.random.random() < 0.1:
            topic.open()
    topic.end()
