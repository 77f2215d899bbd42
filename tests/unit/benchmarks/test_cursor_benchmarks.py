"""The counts of the cursor's benchmarks are those of a cursor, at a size where they are known beforehand."""

from __future__ import annotations

import numpy as np
import pytest

from ackstate import Keep, LedgerMap, Position
from ackstate.cursor import CursorConfig, ManagedCursor, MemoryStore, PersistTarget, persist_all
from benchmarks.bench_cursor import CountingStore
from benchmarks.bench_cursor_loss import loss
from benchmarks.bench_cursor_memory import KeepsNothing
from benchmarks.bench_cursor_persist import acks_above, opened, two_cycles

LOG = LedgerMap.from_counts({7: 1_000})


def open_cursor(store, subscription="s"):
    return ManagedCursor.open(store, topic="t", subscription=subscription, ledgers=LOG, now_ms=0)


def test_two_cycles_are_whole():
    cursor = opened(MemoryStore(), 100, CursorConfig(compaction_bytes_min=3_000))
    positions = acks_above(100)
    acks, delta_bytes, snapshot_bytes = two_cycles(cursor, positions)
    # It ended with a snapshot. The one before held half as many acks less, of 2 bytes each.
    assert snapshot_bytes == 2 * cursor.stats().journal_bytes - 2 * acks // 2
    cursor.ack(next(positions), now_ms=1)
    assert delta_bytes == (acks - 2) * cursor.persist(now_ms=1).bytes_written
    routes = []
    for _ in range(acks - 1):
        cursor.ack(next(positions), now_ms=1)
        routes.append(cursor.persist(now_ms=1).route)
    assert [at + 2 for at, route in enumerate(routes) if route is PersistTarget.SNAPSHOT] == [acks // 2, acks]


def test_a_counting_store_counts_syncs_and_what_is_read():
    disk = MemoryStore()
    store = CountingStore(disk)
    cursors = [open_cursor(store, name) for name in "abc"]
    assert (store.syncs, store.entries_read) == (3, 0)
    for cursor in cursors:
        cursor.ack(Position(7, 5), now_ms=0)
    persist_all(cursors, now_ms=0)
    assert store.syncs == 4
    open_cursor(store, "a")
    assert store.entries_read == 2
    assert store.bytes_read == cursors[0].stats().journal_bytes


@pytest.mark.parametrize(
    ("keep", "lost"),
    [(None, 0), (Keep.LOWEST, 100 * 3 / 6), (Keep.WIDEST, 100 * 1 / 6)],
)
def test_the_loss_is_in_percent_of_what_was_acked(keep, lost):
    config = CursorConfig() if keep is None else CursorConfig(range_count_max=2, keep=keep)
    assert loss(np.array([1, 3, 4, 6, 7, 8], np.uint32), config) == lost


def test_a_store_that_keeps_nothing_lets_cursors_work():
    store = KeepsNothing()
    first, second = open_cursor(store, "a"), open_cursor(store, "b")
    receipt = first.ack_entries(7, [5, 7], now_ms=0)
    first.persist(now_ms=0)
    assert first.durable(receipt)
    assert second.deleted.range_count == 0
    assert open_cursor(store, "a").deleted.range_count == 0
