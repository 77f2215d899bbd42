"""The process dies at each mutation of the storage in turn, before or after it, and the deliveries are checked.

Each message that is not acked, none before its time, none twice; and a `clear` leaves nothing behind.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest

from ackstate import MemoryStore, Position
from ackstate.delay import BucketedDelayIndex, BucketRecoveryReport, BucketRegistry, DelayConfig, SnapshotStorage
from ackstate.delay.bucket_storage import DropReason
from ackstate.stores.memory import Fault, FaultKind, PowerCutError

CONFIG = DelayConfig(
    min_index_count_per_bucket=3, max_indexes_per_segment=2, max_bucket_count=2, is_deliver_at_time_strict=True
)
LEDGER_COUNT = 14
LEDGER_ENTRIES = 4
# A ledger's first message waits long, so that old buckets stay, the next ones less; the last is due at once.
DELAYS_MS = (900, 330, 190, 0)
FAR = 1_000_000


class SurvivingLog:
    """A log, its durable acks, and a clock: all that survives a crash beside the storage."""

    def __init__(self) -> None:
        self.log: list[Position] = []
        self.deliver_at_ms: dict[Position, int] = {}
        self.acked: set[Position] = set()
        self.now_ms = 1000


class Process:
    """One life of a subscription: an index, and its deliveries."""

    def __init__(self, broker, index) -> None:
        self.broker, self.index = broker, index
        self.delivered: list[Position] = []

    def publish(self, ledger_id) -> None:
        broker = self.broker
        for entry_id, delay_ms in enumerate(DELAYS_MS):
            position = Position(ledger_id, entry_id)
            broker.log.append(position)
            broker.deliver_at_ms[position] = broker.now_ms + delay_ms
            self.read(position)

    def read(self, position) -> None:
        broker = self.broker
        if position not in broker.acked and position not in self.index:
            deliver_at_ms = broker.deliver_at_ms[position]
            if not self.index.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=broker.now_ms):
                self.deliver(position)

    def poll(self) -> None:
        for position in self.index.scheduled_messages(3, now_ms=self.broker.now_ms):
            self.deliver(position)

    def deliver(self, position) -> None:
        """Every other message is acked as it is delivered."""
        broker = self.broker
        assert broker.deliver_at_ms[position] <= broker.now_ms, "early"
        assert position not in self.delivered, "twice"
        self.delivered.append(position)
        if position.entry_id % 2 or position.ledger_id < 8:
            broker.acked.add(position)

    def advance_mark_delete(self) -> None:
        broker = self.broker
        end = next(at for at, each in enumerate(broker.log) if each not in broker.acked)
        if end:
            self.index.advance_mark_delete(broker.log[end - 1])

    def read_all(self) -> None:
        for position in self.broker.log:
            self.read(position)


def storage_of(store) -> SnapshotStorage:
    return SnapshotStorage(store.ledgers, BucketRegistry(store.metadata, "/b"), "delayed")


def recovered(broker, store) -> tuple[Process, BucketRecoveryReport]:
    index, report = BucketedDelayIndex.recover(CONFIG, storage=storage_of(store), now_ms=broker.now_ms)
    process = Process(broker, index)
    process.advance_mark_delete()
    process.read_all()
    return process, report


def workload(store, broker):
    """Seal, load, drain, merge, trim, restart and clear; yields the process after each step, where it may stop."""
    process = Process(broker, BucketedDelayIndex(CONFIG, storage=storage_of(store)))
    for number in range(LEDGER_COUNT):
        process.publish(3 + number)
        yield process
        broker.now_ms += 45
        process.poll()
        yield process
        process.advance_mark_delete()
        yield process
        if number == 8:
            process, _ = recovered(broker, store)
            yield process
        if number == 11:
            process.index.clear()
            process = Process(broker, process.index)
            process.read_all()
            yield process


def all_of_it() -> tuple[int, Counter[str]]:
    """Return how often the whole workload changes the storage, and the counts of its indexes."""
    store = MemoryStore()
    indexes = {id(process.index): process.index for process in workload(store, SurvivingLog())}
    done: Counter[str] = Counter()
    for index in indexes.values():
        done.update(index.stats().succeeded)
    return store.mutation_count, done


MUTATION_COUNT, DONE = all_of_it()


def test_the_workload_does_everything():
    assert DONE == {"create": 27, "load": 43, "delete": 25, "merge": 8}
    assert MUTATION_COUNT == 134


def crash_and_recover(mutation, kind) -> None:
    store, broker = MemoryStore(faults=[Fault(mutation, kind)]), SurvivingLog()
    with suppress(PowerCutError):  # only `clear` lets it out
        for _ in workload(store, broker):
            if store.mutation_count > mutation:
                break
    assert store.mutation_count == mutation + 1
    store = MemoryStore(store.disk)
    acked = set(broker.acked)
    process, report = recovered(broker, store)
    assert report.fell_back == ""
    assert {each.reason for each in report.dropped} <= {DropReason.DUE, DropReason.REPLACED}
    for now_ms in (broker.now_ms, FAR):
        broker.now_ms = now_ms
        while process.index.has_message_available(now_ms=now_ms):
            process.poll()
    assert {*process.delivered, *acked} == set(broker.log)
    assert len(process.index) == 0
    assert process.index.stats().damaged == ()
    process.index.clear()
    assert store.ledgers.owned_by("delayed") == []
    assert storage_of(store).registry.get_all() == {}


def crash_everywhere(kind) -> None:
    for mutation in range(MUTATION_COUNT):
        crash_and_recover(mutation, kind)


@pytest.mark.slow
# Before a mutation, the disk is as after the one before.
@pytest.mark.parametrize("kind", [pytest.param(FaultKind.CRASH_BEFORE, marks=pytest.mark.soak), FaultKind.CRASH_AFTER])
def test_what_is_not_acked_is_delivered_after_a_crash_at_any_mutation(kind):
    crash_everywhere(kind)
