"""Many threads ack while one persists: nothing is lost, and what a receipt calls durable survives."""

from __future__ import annotations

import threading

import pytest

from ackstate import LedgerMap, Position
from cursor import ManagedCursor, MemoryStore

THREADS = 4
ENTRIES = 4_000


class GatedLedgers:
    """A ledger store whose appends wait for the test, so that it stands between plan and commit."""

    def __init__(self, ledgers):
        self._ledgers = ledgers
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __getattr__(self, name):
        return getattr(self._ledgers, name)

    def append(self, ledger_id, entry):
        self.begun.set()
        assert self.go_on.wait(timeout=30)
        return self._ledgers.append(ledger_id, entry)


class GatedStore:
    def __init__(self):
        self.inner = MemoryStore()
        self.ledgers, self.metadata, self.close = (
            GatedLedgers(self.inner.ledgers),
            self.inner.metadata,
            self.inner.close,
        )


def open_cursor(store, log):
    return ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, now_ms=0)


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
    assert cursor.unpersisted_record_bytes > 0
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


@pytest.mark.slow
def test_receipts_called_durable_survive_whatever_the_threads_do():
    store, log = MemoryStore(), LedgerMap.from_counts({1: ENTRIES})
    cursor = open_cursor(store, log)
    receipts = [[] for _ in range(THREADS)]

    def ack_every_fourth(number):
        for entry in range(number, ENTRIES, THREADS):
            receipts[number].append((entry, cursor.ack(Position(1, entry), now_ms=0)))

    threads = [threading.Thread(target=ack_every_fourth, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        cursor.persist(now_ms=0)
    # The disk is looked at before the receipts: one more persist could make a lie true.
    recovered = open_cursor(MemoryStore(store.disk), log)
    durable = [entry for owned in receipts for entry, receipt in owned if cursor.durable(receipt)]
    assert all(recovered.is_acked(Position(1, entry)) for entry in durable)
    assert cursor.redelivery_if_crashed == recovered.backlog
    assert cursor.backlog == 0
    cursor._check()
