"""A seek whose write failed: the disk holds the cursor as it was or restarted, and each report is true of either."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_the_gauge_counts_all_that_may_come_back(store, log, config, outcome):
    cursor = open_cursor(store, log, config)
    cursor.mark_delete(P(3, 4), now_ms=0)
    cursor.ack_many([P(3, 7), P(5, 1)], now_ms=0)
    cursor.persist(now_ms=0)
    cursor.mark_delete(P(3, 5), now_ms=0)
    seek_in_vain(cursor, store, P(3, 2), outcome)
    # 3:2 to 3:5, 3:7 and 5:1; in the first state, a range of its own would take nothing.
    assert (cursor.redelivery_if_crashed, cursor.persisted_mark_delete_position) == (6, P(3, 1))
    assert cursor.view.unpersisted_record_bytes == cursor.stats().record_bytes
    cursor.ack(P(3, 8), now_ms=1)
    assert cursor.redelivery_if_crashed == 7
    cursor._check()
    crashed = recovered(store, log, config)
    back = [p for p in (*(P(3, n) for n in range(10)), P(5, 1)) if cursor.is_acked(p) and not crashed.is_acked(p)]
    assert len(back) == (7 if outcome is FaultKind.FAIL_AFTER else 2)


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


def test_an_ack_that_changes_nothing_is_no_more_durable_than_what_it_found(store, log, config):
    cursor = open_cursor(store, log, config)
    cursor.mark_delete(P(3, 4), now_ms=0)
    cursor.persist(now_ms=0)
    restarted = MemoryStore(store.disk)
    cursor = open_cursor(restarted, log, config)
    assert cursor.durable(again := cursor.ack(P(3, 4), now_ms=0))
    seek_in_vain(cursor, restarted, P(3, 2), FaultKind.FAIL_AFTER)
    assert not any(map(cursor.durable, [again, cursor.ack(P(3, 4), now_ms=1)]))
    assert cursor.redelivery_if_crashed == 3
    cursor.persist(now_ms=2)
    assert cursor.durable(again)


def test_the_next_persist_waits_for_the_rate_limit_alone(store, log, config):
    config = replace(config, mark_delete_rate_limit=1, flush_interval_ms=60_000)
    cursor = open_cursor(store, log, config)
    cursor.ack(P(3, 2), now_ms=0)
    assert cursor.tick(now_ms=2_000)
    seek_in_vain(cursor, store, P(3, 2), FaultKind.FAIL_BEFORE)
    assert cursor.view.is_persist_due(now_ms=4_000)


@pytest.fixture
def parted(store, log, config):
    """Where a seek began that may have happened, a range is parted: it is one range if it has not."""
    cursor = open_cursor(store, log, config)
    cursor.ack_many([P(5, 1), P(5, 3)], now_ms=0)
    cursor.persist(now_ms=0)
    cursor.ack_many([P(3, 5), P(3, 8)], now_ms=1)
    seek_in_vain(cursor, store, P(3, 6), FaultKind.FAIL_AFTER)
    return cursor


def test_the_next_ack_adds_no_more_than_is_said(parted):
    before, said = parted.view.unpersisted_record_bytes, parted.view.unpersisted_bytes_added(P(3, 6))
    parted.ack(P(3, 6), now_ms=2)
    assert 0 < parted.view.unpersisted_record_bytes - before <= said


def test_a_hole_that_is_filled_frees_no_less_than_is_said(parted):
    before, hole = parted.view.unpersisted_record_bytes, parted.view.hole_at(P(3, 6))
    said = parted.view.unpersisted_bytes_freed(hole)
    parted.ack_entries(hole.ledger_id, range(hole.first, hole.end), now_ms=2)
    assert said <= before - parted.view.unpersisted_record_bytes
