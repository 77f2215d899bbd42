"""A seek whose write failed: the disk holds the cursor as it was or restarted, and each report is true of either."""

import pytest

from ackstate import CursorConfig, DeletedRanges, Format, LedgerMap, ManagedCursor, MemoryStore, Position, StoreError
from ackstate.stores.memory import Fault, FaultKind

P = Position
MODES = [CursorConfig(), CursorConfig(format=Format.PULSAR)]
OUTCOMES = [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER]

pytestmark = pytest.mark.parametrize("config", MODES, ids=lambda config: config.format.name)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def log():
    return LedgerMap.from_counts({3: 10, 5: 10})


def open_cursor(store, log, config):
    return ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, config=config, now_ms=0)


def recovered(store, log, config):
    return open_cursor(MemoryStore(store.disk), log, config)


def seek_in_vain(cursor, store, position, outcome):
    """Seek while every write fails, or happens and is reported as failed."""
    for mutation in range(store.mutation_count, store.mutation_count + 6):
        store.inject(Fault(mutation, outcome))
    with pytest.raises(StoreError):
        cursor.reset(position, now_ms=1)
    store.forget_faults()


def test_of_two_that_failed_the_one_counts_that_leaves_more_bytes(store, config):
    """That is the upper one here: the begin of a range takes a byte more, and the limit is one of bytes."""
    log = LedgerMap.from_counts({3: 300})
    cursor = open_cursor(store, log, config)
    cursor.ack_entries(3, range(11, 201), now_ms=0)
    cursor.persist(now_ms=0)
    seek_in_vain(cursor, store, P(3, 10), FaultKind.FAIL_BEFORE)
    of_lower = cursor.view.unpersisted_record_bytes
    seek_in_vain(cursor, store, P(3, 150), FaultKind.FAIL_AFTER)
    of_upper = DeletedRanges()
    of_upper.add_run(3, 150, 201)
    assert cursor.view.unpersisted_record_bytes == of_upper.record_bytes == of_lower + 1
    assert cursor.redelivery_if_crashed == 190
    assert recovered(store, log, config).backlog == 150


@pytest.mark.parametrize("outcome", [*OUTCOMES, FaultKind.SYNC_FAILED])
def test_nor_does_a_receipt_count_after_a_persist_that_fails_too(store, log, config, outcome):
    cursor = open_cursor(store, log, config)
    receipt = cursor.mark_delete(P(3, 4), now_ms=0)
    cursor.persist(now_ms=0)
    seek_in_vain(cursor, store, P(3, 2), FaultKind.FAIL_AFTER)
    store.break_ledgers()
    store.inject(Fault(store.mutation_count, outcome))
    with pytest.raises(StoreError):
        cursor.persist(now_ms=2)
    assert (cursor.durable(receipt), cursor.redelivery_if_crashed) == (False, 3)
