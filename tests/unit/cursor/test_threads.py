"""Many threads ack while others persist and reset: nothing is lost, and acks with durable receipts survive."""

import sys
import threading

import pytest

from ackstate import LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.cursor import persist_all
from ackstate.cursor.persist import close_all, execute_one
from waiting import wait_until

THREADS = 8
ENTRIES = 8_000


def open_cursor(store, log, subscription="s"):
    return ManagedCursor.open(store, topic="t", subscription=subscription, ledgers=log, now_ms=0)


def test_a_cursor_that_another_thread_closes_meanwhile_is_closed_without_an_error(monkeypatch):
    store, log = MemoryStore(), LedgerMap.from_counts({1: 10})
    cursor = open_cursor(store, log)
    cursor.ack(Position(1, 5), now_ms=1)
    append, begun, go_on = store.ledgers.append, threading.Event(), threading.Event()

    def held_up(*args):
        begun.set()
        assert go_on.wait(timeout=30)
        return append(*args)

    monkeypatch.setattr(store.ledgers, "append", held_up)
    errors = []
    first = threading.Thread(target=cursor.close, kwargs={"now_ms": 1})
    second = threading.Thread(target=lambda: errors.extend(close_all([cursor], now_ms=1)))
    first.start()
    assert begun.wait(timeout=30)
    second.start()
    # It has found the cursor open, and waits for the write of the other.
    wait_until(lambda: sys._current_frames()[second.ident].f_code is execute_one.__code__)
    go_on.set()
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
