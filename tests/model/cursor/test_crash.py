"""A crash can come between any two writes: count the writes of a workload, then cut at each, before and after it."""

from __future__ import annotations

import pytest

from ackstate import CursorConfig, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.stores.memory import Fault, FaultKind, PowerCutError

ENTRIES = 60
CONFIG = CursorConfig(compaction_bytes_min=150)


def open_cursor(store):
    return ManagedCursor.open(
        store, topic="t", subscription="s", ledgers=LedgerMap.from_counts({1: 30, 2: 0, 4: 30}), config=CONFIG, now_ms=0
    )


def acked(cursor):
    positions = [Position(ledger, entry) for ledger in (1, 4) for entry in range(30)]
    return {position for position in positions if cursor.is_acked(position)}


def workload(store, steps):
    """Ack every third entry, then every second, then all; persist often, and note the state before each persist."""
    cursor = open_cursor(store)
    for stride in (3, 2, 1):
        for ledger in (1, 4):
            for first in range(0, 30, 10):
                cursor.ack_entries(ledger, range(first, first + 10, stride), now_ms=0)
                steps.append(acked(cursor))
                cursor.persist(now_ms=0)


@pytest.mark.slow
def test_recovery_shows_the_state_before_or_after_the_write_that_was_cut():
    whole = MemoryStore()
    workload(whole, [])
    assert whole.mutation_count > 20
    for mutation in range(whole.mutation_count):
        for kind in (FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER):
            store, steps = MemoryStore(faults=[Fault(mutation, kind)]), [set()]
            with pytest.raises(PowerCutError):
                workload(store, steps)
            # The last two noted are the state that was durable and the one that was being written.
            recovered = acked(open_cursor(MemoryStore(store.disk)))
            assert recovered in steps[-2:], f"{kind.name} at mutation {mutation}"
            # Recovering again gives the same, and the journal can be written on.
            again = open_cursor(MemoryStore(store.disk))
            assert acked(again) == recovered
            again.mark_delete(Position(4, 29), now_ms=0)
            again.close(now_ms=0)
            assert len(acked(open_cursor(MemoryStore(store.disk)))) == ENTRIES


@pytest.mark.slow
def test_no_crash_leaves_a_ledger_behind_for_good():
    whole = MemoryStore()
    workload(whole, [])
    for mutation in range(whole.mutation_count):
        store = MemoryStore(faults=[Fault(mutation, FaultKind.CRASH_AFTER)])
        with pytest.raises(PowerCutError):
            workload(store, [])
        after = MemoryStore(store.disk)
        open_cursor(after).close(now_ms=0)
        assert len(after.ledgers.owned_by("cursor /managed-ledgers/t/s")) == 1
