"""Many cursors of one store are made durable with one sync, and one that fails does not stop the others."""

from __future__ import annotations

import threading

import pytest
from serial import SerialExecutor

from ackstate import (
    CursorClosedError,
    CursorConfig,
    CursorFencedError,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Position,
    StoreError,
)
from ackstate.cursor import PersistResult, PersistTarget, persist_all
from ackstate.cursor.journal import Journal
from ackstate.stores.memory import Fault, FaultKind, MemoryDisk

P = Position


@pytest.fixture
def log():
    return LedgerMap.from_counts({3: 100})


def open_cursors(store, log, count=5, **settings):
    return [
        ManagedCursor.open(
            store, topic="t", subscription=f"s{n}", ledgers=log, config=CursorConfig(**settings), now_ms=0
        )
        for n in range(count)
    ]


def acked(cursors):
    return [cursor.ack(P(3, 5), now_ms=1) for cursor in cursors]


def test_deltas_share_one_write(log):
    store = MemoryStore(MemoryDisk())
    cursors = open_cursors(store, log)
    receipts = acked(cursors)
    before = store.mutation_count
    results = persist_all(cursors, now_ms=2)
    assert store.mutation_count == before + 5  # In memory, each append is a mutation of its own.
    assert [(result.route, result.messages_covered) for result in results] == [(PersistTarget.DELTA, 1)] * 5
    assert all(cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True))
    assert [result.route for result in persist_all(cursors, now_ms=3)] == [PersistTarget.NOTHING] * 5
    assert all(cursor.is_acked(P(3, 5)) for cursor in open_cursors(MemoryStore(store.disk), log))


def test_what_becomes_a_snapshot_is_written_by_itself(log):
    store = MemoryStore(MemoryDisk())
    cursors = open_cursors(store, log, 3, ledger_entry_count_max=2)
    cursors[1].ack(P(3, 1), now_ms=0)
    cursors[1].persist(now_ms=0)
    acked(cursors)
    assert [result.route for result in persist_all(cursors, now_ms=2)] == [
        PersistTarget.DELTA,
        PersistTarget.SNAPSHOT,
        PersistTarget.DELTA,
    ]


def test_one_that_was_fenced_or_closed_does_not_stop_the_others(log):
    store = MemoryStore(MemoryDisk())
    cursors = open_cursors(store, log)
    receipts = acked(cursors)
    open_cursors(store, log, 2)[1].ack(P(3, 9), now_ms=1)  # takes the first two over
    cursors[2].close(now_ms=1)
    results = persist_all(cursors, now_ms=2)
    assert [type(result) for result in results] == [
        CursorFencedError, CursorFencedError, CursorClosedError, PersistResult, PersistResult,
    ]  # fmt: skip
    assert [cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True)] == [
        False, False, True, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER, FaultKind.FULL])
def test_failed_appends_send_their_cursors_to_the_metadata_store(log, kind):
    store = MemoryStore(MemoryDisk())
    cursors = open_cursors(store, log)
    receipts = acked(cursors)
    for failing in (1, 3):
        store.inject(Fault(store.mutation_count + failing, kind))
    results = persist_all(cursors, now_ms=2)
    assert [(result.route, result.messages_covered) for result in results] == [
        (PersistTarget.METADATA if number in {1, 3} else PersistTarget.DELTA, 1) for number in range(5)
    ]
    assert all(cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True))
    assert len(store.ledgers.owners()) == 3
    assert all(cursor.is_acked(P(3, 5)) for cursor in open_cursors(MemoryStore(store.disk), log))


def test_where_the_metadata_store_fails_too_nothing_is_durable_and_all_is_tried_again(log):
    store = MemoryStore(MemoryDisk())
    cursors = open_cursors(store, log)
    receipts = acked(cursors)
    store.break_ledgers()
    store.inject(Fault(store.mutation_count + 2, FaultKind.FAIL_BEFORE))  # Each puts its record, and deletes a ledger.
    results = persist_all(cursors, now_ms=2, executor=SerialExecutor())
    failed = [isinstance(result, StoreError) for result in results]
    assert failed == [False, True, False, False, False]
    assert [cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True)] == [
        not has_failed for has_failed in failed
    ]
    assert [cursor.redelivery_if_crashed for cursor in cursors] == failed
    store.mend_ledgers()
    assert [result.messages_covered for result in persist_all(cursors, now_ms=3)] == failed
    assert cursors[1].durable(receipts[1])
    assert all(cursor.is_acked(P(3, 5)) for cursor in open_cursors(MemoryStore(store.disk), log))


def test_each_that_could_not_be_written_anywhere_says_why_it_could_not(log):
    """They shared one error, which reported the outcome of all for each."""
    store = MemoryStore(MemoryDisk())
    cursors = open_cursors(store, log, 3, metadata_bytes_max=10)
    acked(cursors)
    store.break_ledgers()
    errors = persist_all(cursors, now_ms=2)
    for number, error in enumerate(errors):
        assert isinstance(error, StoreError)
        (note,) = error.__notes__
        assert f"/t/s{number}: " in note
        assert str(error.__cause__) in note


def test_a_closed_store_answers_each_cursor_with_an_error_of_its_own(log):
    store = MemoryStore(MemoryDisk())
    cursors = open_cursors(store, log, 3)
    acked(cursors)
    store.close()
    errors = persist_all(cursors, now_ms=2)
    assert [len(error.__notes__) for error in errors] == [1] * 3


@pytest.mark.parametrize("kind", [FaultKind.SYNC_FAILED, FaultKind.CRASH_BEFORE])
def test_after_a_failed_sync_nothing_is_durable(log, kind):
    store = MemoryStore(MemoryDisk())
    cursors = open_cursors(store, log)
    receipts = acked(cursors)
    store.inject(Fault(store.mutation_count, kind))
    for now_ms in (2, 3):
        assert all(isinstance(result, StoreError) for result in persist_all(cursors, now_ms=now_ms))
        assert not any(cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True))
        assert [cursor.redelivery_if_crashed for cursor in cursors] == [1] * 5
    assert not any(cursor.is_acked(P(3, 5)) for cursor in open_cursors(MemoryStore(store.disk), log))


@pytest.mark.parametrize("bad", [0, 4])
def test_what_breaks_off_before_it_is_written_leaves_every_ack_waiting(log, bad, monkeypatch):
    store = MemoryStore(MemoryDisk())
    cursors = open_cursors(store, log)
    receipts = acked(cursors)
    prepare = Journal.prepare

    def interrupted(self, content):
        if self is cursors[bad]._persister.journal:
            raise KeyboardInterrupt
        return prepare(self, content)

    monkeypatch.setattr(Journal, "prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        persist_all(cursors, now_ms=2)
    monkeypatch.undo()
    assert not any(cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True))
    assert [result.messages_covered for result in persist_all(cursors, now_ms=4)] == [1] * 5
    assert all(cursor.is_acked(P(3, 5)) for cursor in open_cursors(MemoryStore(store.disk), log))


def test_cursors_of_two_stores_and_the_same_cursor_twice_are_refused(log):
    cursor, other = (open_cursors(MemoryStore(MemoryDisk()), log, 1)[0] for _ in range(2))
    for cursors in ([cursor, other], [cursor, cursor]):
        with pytest.raises(ValueError, match="share a store"):
            persist_all(cursors, now_ms=1)
    assert persist_all([], now_ms=1) == []


def test_two_at_once_over_the_same_cursors_do_not_wait_for_each_other(log):
    store = MemoryStore(MemoryDisk())
    cursors = open_cursors(store, log, 20)

    def persist_often(ordered):
        for entry in range(50):
            for cursor in ordered:
                cursor.ack(P(3, entry), now_ms=entry)
            persist_all(ordered, now_ms=entry)

    threads = [threading.Thread(target=persist_often, args=(order,)) for order in (cursors, cursors[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    persist_all(cursors, now_ms=99)
    assert [cursor.redelivery_if_crashed for cursor in cursors] == [0] * 20
    assert {cursor.mark_delete_position for cursor in open_cursors(MemoryStore(store.disk), log, 20)} == {P(3, 49)}
