"""Many threads ack while others persist and reset: nothing is lost, and acks with durable receipts survive."""

from __future__ import annotations

import sys
import threading

import pytest

from ackstate import LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.cursor import persist_all
from ackstate.cursor.persist import close_all, execute_one
from waiting import wait_until

THREADS = 8
ENTRIES = 8_000


class GatedLedgers:
    """A ledger store whose appends wait for the test, so that it stands between plan and commit."""

    def __init__(self, ledgers):
        self._ledgers = ledgers
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __getattr__(self, name):
        return getattr(self._ledgers, name)

    def append(self, ledger_id, entries):
        self.begun.set()
        assert self.go_on.wait(timeout=30)
        return self._ledgers.append(ledger_id, entries)


class GatedStore:
    def __init__(self):
        self.inner = MemoryStore()
        self.ledgers, self.metadata, self.close = (
            GatedLedgers(self.inner.ledgers),
            self.inner.metadata,
            self.inner.close,
        )


def open_cursor(store, log, subscription="s"):
    return ManagedCursor.open(store, topic="t", subscription=subscription, ledgers=log, now_ms=0)


def test_acks_that_arrive_while_a_persist_writes_wait_for_the_next():
    store, log = GatedStore(), LedgerMap.from_counts({1: 10})
    cursor = open_cursor(store, log)
    early = cursor.ack(Position(1, 5), now_ms=1)
    store.ledgers.begun.clear()
    store.ledgers.go_on.clear()
    writer = threading.Thread(target=cursor.persist, kwargs={"now_ms": 1})
    writer.start()
    assert store.ledgers.begun.wait(timeout=30)
    late = cursor.ack_entries(1, [0, 7], now_ms=2)
    assert (cursor.redelivery_if_crashed, cursor.mark_delete_position) == (3, Position(1, 0))
    assert cursor.view.unpersisted_record_bytes > 0
    store.ledgers.go_on.set()
    writer.join()
    assert cursor.durable(early)
    assert not cursor.durable(late)
    assert (cursor.redelivery_if_crashed, cursor.persisted_mark_delete_position) == (2, Position(1, -1))
    crashed = open_cursor(MemoryStore(store.inner.disk), log)
    assert str(crashed.deleted) == "[(1:4..1:5]]"


def test_an_ack_that_arrives_while_the_cursor_closes_is_persisted_too():
    store, log = GatedStore(), LedgerMap.from_counts({1: 10})
    cursor = open_cursor(store, log)
    cursor.ack(Position(1, 5), now_ms=1)
    store.ledgers.begun.clear()
    store.ledgers.go_on.clear()
    closer = threading.Thread(target=cursor.close, kwargs={"now_ms": 1})
    closer.start()
    assert store.ledgers.begun.wait(timeout=30)
    late = cursor.ack(Position(1, 7), now_ms=2)
    store.ledgers.go_on.set()
    closer.join()
    assert cursor.durable(late)
    assert open_cursor(MemoryStore(store.inner.disk), log).is_acked(Position(1, 7))


def test_a_cursor_that_another_thread_closes_meanwhile_is_closed_without_an_error():
    store, log = GatedStore(), LedgerMap.from_counts({1: 10})
    cursor = open_cursor(store, log)
    cursor.ack(Position(1, 5), now_ms=1)
    store.ledgers.begun.clear()
    store.ledgers.go_on.clear()
    errors = []
    first = threading.Thread(target=cursor.close, kwargs={"now_ms": 1})
    second = threading.Thread(target=lambda: errors.extend(close_all([cursor], now_ms=1)))
    first.start()
    assert store.ledgers.begun.wait(timeout=30)
    second.start()
    # It has found the cursor open, and waits for the write of the other.
    wait_until(lambda: sys._current_frames()[second.ident].f_code is execute_one.__code__)
    store.ledgers.go_on.set()
    first.join()
    second.join()
    assert errors == [None]


def ack_by_threads(cursor, receipts):
    """Start a thread for each list of receipts, which acks each n-th entry and then some once more."""

    def ack_some(number):
        for entry in range(number, ENTRIES, THREADS):
            if entry % 3:
                receipts[number].append(([entry], cursor.ack(Position(1, entry), now_ms=0)))
            else:
                entries = [entry, (entry * 7) % ENTRIES]
                receipts[number].append((entries, cursor.ack_entries(1, entries, now_ms=0)))

    threads = [threading.Thread(target=ack_some, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def check_what_survives(store, log, cursor, receipts):
    # The disk is looked at before the receipts: one more persist could make a lie true.
    recovered = open_cursor(MemoryStore(store.disk), log)
    for entries, receipt in [given for owned in receipts for given in owned]:
        assert not cursor.durable(receipt) or all(recovered.is_acked(Position(1, entry)) for entry in entries)
    lost = [
        entry
        for entry in range(ENTRIES)
        if cursor.is_acked(Position(1, entry)) and not recovered.is_acked(Position(1, entry))
    ]
    assert cursor.redelivery_if_crashed == len(lost)
    cursor._check()
    return recovered


@pytest.mark.slow
def test_receipts_called_durable_survive_whatever_the_threads_do():
    store, log = MemoryStore(), LedgerMap.from_counts({1: ENTRIES})
    cursor, other = open_cursor(store, log), open_cursor(store, log, subscription="other")
    receipts = [[] for _ in range(THREADS)]
    threads = ack_by_threads(cursor, receipts)
    while any(thread.is_alive() for thread in threads):
        cursor.persist(now_ms=0)
        other.ack(Position(1, 2 * other.stats().persist_count), now_ms=0)
        assert not any(isinstance(result, Exception) for result in persist_all([other, cursor], now_ms=0))
    check_what_survives(store, log, cursor, receipts)
    assert cursor.backlog == 0


@pytest.mark.slow
def test_no_receipt_from_before_a_reset_counts_after_it_whatever_the_threads_do():
    store, log = MemoryStore(), LedgerMap.from_counts({1: ENTRIES})
    cursor = open_cursor(store, log)
    receipts = [[] for _ in range(THREADS)]
    threads = ack_by_threads(cursor, receipts)
    reset_count = 0
    while reset_count < 2 or any(thread.is_alive() for thread in threads):
        before = [given for owned in receipts for given in owned[-3:]]
        cursor.reset(Position(1, reset_count % 50), now_ms=0)
        assert not any(cursor.durable(receipt) for _, receipt in before)
        cursor.persist(now_ms=0)
        persist_all([cursor], now_ms=0)
        reset_count += 1
    recovered = check_what_survives(store, log, cursor, receipts)
    last = recovered.ack_entries(1, range(ENTRIES), now_ms=0)
    recovered.close(now_ms=0)
    assert recovered.durable(last)
    assert open_cursor(MemoryStore(store.disk), log).backlog == 0
