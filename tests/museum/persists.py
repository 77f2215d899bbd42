"""Mistakes between an ack and its receipt: in staging, in writing, and in calling acks durable."""

from __future__ import annotations

from ackstate.cursor.persist import Persister, Round
from ackstate.cursor.results import PersistTarget
from ackstate.cursor.state import UnpersistedAcks
from ackstate.deleted_ranges import DeletedRanges
from ackstate.stores.base import StoreError
from museum.exhibit import Exhibit, Replacement


def _forget_acks_that_came_meanwhile():
    end_write = UnpersistedAcks.end_write

    def end_and_forget(self, mark_delete):
        end_write(self, mark_delete)
        if self._as_one is not None:
            self._as_one.difference_update(self.fresh)
        self.new.clear()
        self._fresh = DeletedRanges()

    return (Replacement(UnpersistedAcks, "end_write", end_and_forget),)


def _commit_whatever_became_of_the_write():
    def commit_anyway(self):
        journal, plan = self._persister.journal, self._plan
        write = journal.write_record if plan.target is PersistTarget.METADATA else journal.begin_ledger
        try:
            byte_count = write(plan.content)
        except StoreError:
            byte_count = 0
        return self.commit(byte_count)

    def commit_instead(self, error):
        return self.commit(0)

    return (Replacement(Round, "write", commit_anyway), Replacement(Round, "fall_back", commit_instead))


def _confirm_what_the_limiter_refused():
    tick = Persister.tick

    def tick_and_confirm(self, *, now_ms):
        with self.lock:
            limiter = self.limiter
            is_refused = limiter is not None and self._is_new() and not limiter.can_acquire(now_ms)
            is_due = tick(self, now_ms=now_ms)
            if is_refused and not is_due:
                self.state.durable_number = self.state.accepted_number
            return is_due

    return (Replacement(Persister, "tick", tick_and_confirm),)


def _read_the_ranges_when_they_are_written():
    write = Round.write

    def write_later(self):
        persister, plan = self._persister, self._plan
        if plan.target is PersistTarget.SNAPSHOT:
            # A ledger more than is needed: making one takes as long as a sync, and others ack meanwhile.
            journal = persister.journal
            journal._made.add(journal.store.ledgers.create(journal._owner))
            with persister.lock:
                deleted, batch = persister.state.whole()
            self._plan = plan._replace(content=plan.content._replace(deleted=deleted, batch=batch))
        return write(self)

    return (Replacement(Round, "write", write_later),)


PERSISTS = (
    Exhibit(
        "M5",
        "an ack that arrives during the promotion of older ones is lost",
        "RocketMQ 5, apache/rocketmq#10736: an ack that arrives while `PopConsumerCache.cleanupRecords` writes the "
        "records it has staged finds its record in neither map; the write then restores the acked record.",
        "`UnpersistedAcks.end_write` ends a write by forgetting fresh acks with those in flight: an ack that "
        "came between the two is in memory, in no record, and the next persist calls it durable.",
        _forget_acks_that_came_meanwhile,
    ),
    Exhibit(
        "M6",
        "staged acks are cleared even if the write failed",
        "RocketMQ 5, apache/rocketmq#10667: `PopConsumerCache` clears its staged checkpoints regardless of the "
        "result of the revive, and the next offset is committed although there is no durable record.",
        "`Round.write` and `Round.fall_back` swallow the store's error and commit the plan.",
        _commit_whatever_became_of_the_write,
    ),
    Exhibit(
        "M7",
        "under the rate limit a receipt is durable before the persist",
        "Apache Pulsar, apache/pulsar#26484: where the mark-delete rate limiter refuses, "
        "`ManagedCursorImpl.asyncMarkDelete` completes the callback of a persisted ack with nothing persisted.",
        "`Persister.tick` counts everything accepted as durable whenever the limiter refuses.",
        _confirm_what_the_limiter_refused,
    ),
    Exhibit(
        "M10",
        "a base and the data relative to it are of two instants",
        "Confluent Parallel Consumer, confluentinc/parallel-consumer#894: the payload was encoded against one offset, "
        "then another was read and committed with it.",
        "`Round.write` reads the ranges of a snapshot again once its ledger is made, and keeps the mark-delete "
        "position of the plan: acks between the two moved it, and are in neither. Our ranges are absolute, so the "
        "payload is read too late, not the base: the other way round nothing would be lost here.",
        _read_the_ranges_when_they_are_written,
    ),
)
