"""A receipt for acks in a batch that a limit on batches left out: durable once a record holds them, not before."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

from ackstate import CursorConfig, Format, LedgerMap, ManagedCursor, MemoryStore, Position, StoreError
from ackstate.cursor.config import PersistLimits
from ackstate.cursor.state import CursorAckState
from ackstate.stores.base import PayloadTooLargeError
from ackstate.stores.memory import Fault, FaultKind

ONE_BATCH = CursorConfig(format=Format.PULSAR, batch_count_max=1)


@pytest.fixture
def store():
    return MemoryStore()


def open_cursor(store, config=ONE_BATCH):
    ledgers = LedgerMap.from_counts({1: 9})
    return ManagedCursor.open(store, topic="t", subscription="s", ledgers=ledgers, config=config, now_ms=0)


@pytest.fixture
def cursor(store):
    cursor = open_cursor(store)
    cursor.ack_batch(Position(1, 0), [0b10], now_ms=0)
    return cursor


@pytest.fixture
def left_out(cursor):
    receipt = cursor.ack_batch(Position(1, 1), [0b10], now_ms=0)
    cursor.persist(now_ms=0)
    assert not cursor.durable(receipt)
    return receipt


def test_a_mark_delete_that_is_not_durable_makes_it_no_more_durable(cursor, left_out):
    cursor.mark_delete(Position(1, 3), now_ms=0)
    assert not cursor.durable(left_out)
    cursor.persist(now_ms=0)
    assert cursor.durable(left_out)


def test_a_write_that_fails_makes_it_no_more_durable(store, cursor, left_out):
    cursor.ack(Position(1, 0), now_ms=0)
    for mutation in range(store.mutation_count, store.mutation_count + 8):
        store.inject(Fault(mutation, FaultKind.FULL))
    with pytest.raises(StoreError):
        cursor.persist(now_ms=0)
    assert not cursor.durable(left_out)
    store.forget_faults()
    cursor.persist(now_ms=0)
    assert cursor.durable(left_out)


def test_nor_does_a_mark_delete_over_a_batch_whose_last_ack_was_too_young(store):
    """The last ack is held back, and the limit on batches excludes the acks before it, twice."""
    cursor = open_cursor(store, replace(ONE_BATCH, become_old_ack_record_seconds=1))
    cursor.ack_batch(Position(1, 0), [0b10], now_ms=0)
    receipt = cursor.ack_batch(Position(1, 1), [0b10], now_ms=0)
    cursor.ack_batch(Position(1, 1), [0], now_ms=0)
    for entry_id in (5, 7):
        cursor.ack(Position(1, entry_id), now_ms=0)
        cursor.persist(now_ms=0)
        assert not cursor.durable(receipt)
    cursor.mark_delete(Position(1, 3), now_ms=0)
    assert not cursor.durable(receipt)
    cursor.persist(now_ms=0)
    assert cursor.durable(receipt)


@pytest.mark.parametrize("config", [replace(ONE_BATCH, range_count_max=0),
                                    replace(ONE_BATCH, become_old_ack_record_seconds=1)])  # fmt: skip
def test_acks_before_the_last_one_of_an_excluded_batch_are_persisted_once_there_is_room(store, config):
    """The last ack stays excluded, by the limit on ranges or as young; those before it need no room for a range."""
    cursor = open_cursor(store, config)
    cursor.ack_batch(Position(1, 0), [0b10], now_ms=0)
    receipt = cursor.ack_batch(Position(1, 8), [0b10], now_ms=0)
    cursor.ack(Position(1, 8), now_ms=0)
    for entry_id in (4, 6):
        cursor.persist(now_ms=0)
        assert not cursor.durable(receipt)
        cursor.ack(Position(1, entry_id), now_ms=0)
    cursor.mark_delete(Position(1, 0), now_ms=0)
    cursor.persist(now_ms=0)
    assert cursor.durable(receipt)
    recovered = open_cursor(MemoryStore(store.disk), config)
    assert dict(recovered.view.batch.items()) == {Position(1, 8): (0b10,)}


def test_a_persist_that_is_given_up_before_it_writes_makes_a_durable_one_no_less_durable(store):
    """The lowest batch goes first, but the metadata store is not given even that."""
    cursor = open_cursor(store, replace(ONE_BATCH, metadata_bytes_max=20, ledger_retry_ms=10_000))
    receipt = cursor.ack_batch(Position(1, 5), [0b10], now_ms=0)
    cursor.persist(now_ms=0)
    store.break_ledgers()
    for now_ms in (1, 2):  # The second failure in a row begins the pause.
        cursor.ack(Position(1, 6 + now_ms), now_ms=now_ms)
        with pytest.raises(StoreError):
            cursor.persist(now_ms=now_ms)
    cursor.ack_batch(Position(1, 3), [0b10], now_ms=3)
    cursor._state._check()
    before, is_durable = store.mutation_count, cursor.durable(receipt)
    with pytest.raises(PayloadTooLargeError):
        cursor.persist(now_ms=3)
    assert store.mutation_count == before
    assert is_durable
    assert cursor.durable(receipt)


def test_what_is_withdrawn_leaves_batches_as_they_were():
    state = CursorAckState(LedgerMap.from_counts({1: 9}))
    for entry_id in (3, 5, 7):
        state.ack_batch(Position(1, entry_id), [0b10])
    limits = PersistLimits(batch_count_max=1)
    state.end_persist(state.begin_persist(limits=limits))
    state.ack_batch(Position(1, 5), [0])
    state.ack_batch(Position(1, 1), [0b10])
    names, batches = ("_changed", "_cut", "_unwritten", "_completed"), state.unpersisted_batches
    before = {name: deepcopy(getattr(batches, name)) for name in names}
    assert all(before.values())
    state.begin_persist(limits=limits)
    assert {name: getattr(batches, name) for name in names} != before
    state.withdraw_persist()
    assert {name: getattr(batches, name) for name in names} == before
    state._check()
