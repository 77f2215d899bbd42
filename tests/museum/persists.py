"""Mistakes between an ack and its receipt: what is staged, written and called durable."""

from __future__ import annotations

from ackstate.cursor.persist.persister import Persister
from ackstate.cursor.results import PersistTarget
from ackstate.cursor.state.unpersisted_acks import UnpersistedAcks
from ackstate.cursor.store import StoreError
from ackstate.deleted_ranges import DeletedRanges
from museum.exhibit import Exhibit, Replacement


def _forget_acks_that_came_meanwhile():
    end_write = UnpersistedAcks.end_write

    def end_and_forget(self, mark_delete):
        end_write(self, mark_delete)
        if self._as_one is not None:
            self._as_one.difference_update(self.fresh)
        self.fresh = DeletedRanges()

    return (Replacement(UnpersistedAcks, "end_write", end_and_forget),)


def _commit_whatever_became_of_the_write():
    carry_out = Persister.carry_out

    def commit_anyway(self, plan, frontier, *, now_ms):
        if plan is None:
            return carry_out(self, plan, frontier, now_ms=now_ms)
        try:
            written = self._write(plan)
        except StoreError:
            written = 0
        return self.commit(plan, written, now_ms=now_ms)

    return (Replacement(Persister, "carry_out", commit_anyway),)


def _confirm_what_the_limiter_refused():
    tick = Persister.tick

    def tick_and_confirm(self, *, now_ms):
        with self._lock:
            is_refused = self._limiter is not None and self._is_new() and not self._limiter.can_acquire(now_ms)
            is_due = tick(self, now_ms=now_ms)
            if is_refused and not is_due:
                self.durable_number = self.accepted_number
            return is_due

    return (Replacement(Persister, "tick", tick_and_confirm),)


def _read_the_ranges_when_they_are_written():
    write = Persister._write

    def write_later(self, plan):
        if plan.route is PersistTarget.SNAPSHOT:
            # A ledger more than is needed: making one takes as long as a sync, and others ack meanwhile.
            self.journal._made.add(self.journal.store.ledgers.create(self.journal._owner))
            with self._lock:
                deleted, batch = self.state.whole()
            plan = plan._replace(content=plan.content._replace(deleted=deleted, batch=batch))
        return write(self, plan)

    return (Replacement(Persister, "_write", write_later),)


PERSISTS = (
    Exhibit(
        "M5",
        "an ack that arrives during the promotion of older ones is lost",
        "RocketMQ 5, apache/rocketmq#10736: an ack that arrives while `PopConsumerCache.cleanupRecords` writes the "
        "records it has staged finds its record in neither map; the write then restores what was acked.",
        "`UnpersistedAcks.end_write` ends a write by forgetting what is fresh with what was in flight: an ack that "
        "came between the two is in memory, in no record, and the next persist calls it durable.",
        _forget_acks_that_came_meanwhile,
    ),
    Exhibit(
        "M6",
        "staged acks are cleared even if the write failed",
        "RocketMQ 5, apache/rocketmq#10667: `PopConsumerCache` clears its staged checkpoints regardless of the "
        "result of the revive, and the next offset is committed although there is no durable record.",
        "`Persister.carry_out` swallows the store's error and commits the plan.",
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
        "`Persister._write` reads the ranges of a snapshot again once its ledger is made, and keeps the mark-delete "
        "position of the plan: acks between the two moved it, and are in neither. Our ranges are absolute, so the "
        "payload is read too late, not the base: the other way round nothing would be lost here.",
        _read_the_ranges_when_they_are_written,
    ),
)
