"""A cursor ledger that cannot be written: the metadata store takes the state, under its own limits, and says so."""

from __future__ import annotations

import resource
from contextlib import closing, contextmanager
from itertools import pairwise

import pytest

from ackstate import (
    CursorConfig,
    CursorFencedError,
    Format,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    PayloadTooLargeError,
    Position,
    StoreError,
)
from ackstate.cursor import PersistTarget, persist_all
from ackstate.cursor.recovery import Recovery
from ackstate.selection import Keep
from ackstate.stores.memory import Fault, FaultKind, MemoryDisk
from ackstate.stores.sqlite import SqliteStore

P = Position
SECOND_MS = 1_000


@pytest.fixture
def log():
    return LedgerMap.from_counts({3: 100_000})


@pytest.fixture
def store():
    return MemoryStore(MemoryDisk())


def open_cursor(store, log, *, subscription="s", **settings):
    config = CursorConfig(flush_interval_ms=0, **settings)
    return ManagedCursor.open(store, topic="t", subscription=subscription, ledgers=log, config=config, now_ms=0)


def on_disk(store, log):
    """The individually acked ranges that a crash now would leave; the store is not touched."""
    found = Recovery(MemoryStore(store.disk), "/managed-ledgers/t/s", log).find([])
    return str(found.recovered.content.deleted)


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER, FaultKind.FULL])
def test_a_failed_append_goes_to_the_metadata_store(store, log, form, kind):
    cursor = open_cursor(store, log, format=form)
    cursor.ack(P(3, 9), now_ms=0)
    cursor.persist(now_ms=0)
    receipt = cursor.ack(P(3, 5), now_ms=1)
    store.inject(Fault(store.mutation_count, kind))
    result = cursor.persist(now_ms=1)
    assert (result.route, result.messages_covered, result.messages_cut) == (PersistTarget.METADATA, 1, 0)
    assert cursor.durable(receipt)
    assert cursor.redelivery_if_crashed == 0
    stats = cursor.stats()
    assert (stats.ledger_error_count, stats.metadata_write_count, stats.metadata_error_count) == (
        1, 2 if form is Format.PULSAR else 1, 0,
    )  # fmt: skip
    assert stats.journal_bytes == result.bytes_written
    # The ledger that is named no more is gone, so nothing that was appended to it in spite of the error can count.
    assert store.ledgers.owners() == []
    crashed = open_cursor(MemoryStore(store.disk), log, format=form)
    assert str(crashed.deleted) == "[(3:4..3:5],(3:8..3:9]]"
    assert crashed.recovery_report.source.name == "METADATA"
    assert crashed.ack(P(3, 7), now_ms=2).newly_acked == 1
    assert crashed.persist(now_ms=2).route is PersistTarget.SNAPSHOT


def test_a_ledger_that_cannot_be_made_falls_back_as_well(store, log):
    cursor = open_cursor(store, log, ledger_entry_count_max=1)
    receipt = cursor.ack(P(3, 5), now_ms=1)
    store.break_ledgers()
    assert cursor.persist(now_ms=1).route is PersistTarget.METADATA
    assert cursor.durable(receipt)


def test_a_new_cursor_is_made_without_ledgers(store, log):
    store.break_ledgers()
    cursor = open_cursor(store, log)
    receipt = cursor.ack(P(3, 5), now_ms=1)
    assert cursor.persist(now_ms=1).route is PersistTarget.METADATA
    assert cursor.durable(receipt)
    assert on_disk(store, log) == "[(3:4..3:5]]"


@pytest.mark.parametrize(("keep", "kept", "cut"), [(Keep.LOWEST, "[(3:1..3:2]]", 3), (Keep.WIDEST, "[(3:4..3:7]]", 1)])
def test_the_limit_of_the_metadata_store_cuts_until_the_ledger_is_back(store, log, keep, kept, cut):
    cursor = open_cursor(store, log, metadata_range_count_max=1, keep=keep)
    low, wide = cursor.ack(P(3, 2), now_ms=1), cursor.ack_entries(3, [5, 6, 7], now_ms=1)
    store.break_ledgers()
    result = cursor.persist(now_ms=1)
    assert (result.route, result.messages_covered, result.messages_cut) == (PersistTarget.METADATA, 4 - cut, cut)
    assert (cursor.durable(low), cursor.durable(wide)) == (keep is Keep.LOWEST, keep is Keep.WIDEST)
    assert (cursor.stats().redelivery_cut, cursor.redelivery_if_crashed) == (cut, cut)
    assert on_disk(store, log) == kept
    store.mend_ledgers()
    # Nothing new was acked: the excluded acks are reason enough to write.
    assert cursor.view.is_persist_due(now_ms=2)
    result = cursor.tick(now_ms=2)
    assert (result.route, result.messages_covered, result.messages_cut) == (PersistTarget.SNAPSHOT, cut, 0)
    assert (cursor.durable(low), cursor.durable(wide)) == (True, True)
    assert not cursor.view.is_persist_due(now_ms=3)


def test_batches_beyond_their_limit_are_no_reason_to_try_the_ledger_again(store, log):
    """The limit is that of either store: the ledger would hold no more of them."""
    cursor = open_cursor(store, log, format=Format.PULSAR, batch_count_max=1)
    for entry_id in (5, 7):
        cursor.ack_batch(P(3, entry_id), [1], now_ms=1)
    store.break_ledgers()
    assert cursor.persist(now_ms=1).batches_cut == 1
    store.mend_ledgers()
    assert not cursor.view.is_persist_due(now_ms=5 * SECOND_MS)
    assert cursor.persist(now_ms=5 * SECOND_MS).route is PersistTarget.NOTHING


@pytest.mark.parametrize("form", Format)
def test_what_a_ledger_has_made_durable_is_not_given_up(store, log, form):
    cursor = open_cursor(store, log, format=form, metadata_range_count_max=1)
    cursor.ack_entries(3, [2, 5, 8], now_ms=0)
    cursor.persist(now_ms=0)
    before = on_disk(store, log)
    receipt = cursor.ack(P(3, 11), now_ms=1)
    store.break_ledgers()
    with pytest.raises(StoreError, match="no ledger can be written") as raised:
        cursor.persist(now_ms=1)
    assert "more than the metadata store may be given" in str(raised.value.__notes__)
    assert (cursor.redelivery_if_crashed, cursor.durable(receipt)) == (1, False)
    assert on_disk(store, log) == before
    cursor._check()
    with pytest.raises(StoreError, match="no ledger can be written"):
        cursor.persist(now_ms=1)
    # Now the ledger must not be tried, and the state is too large for the metadata store: refused before it is sent.
    mutations = store.mutation_count
    with pytest.raises(PayloadTooLargeError):
        cursor.persist(now_ms=2)
    assert store.mutation_count == mutations
    store.mend_ledgers()
    assert cursor.persist(now_ms=2 * SECOND_MS).messages_covered == 1
    assert cursor.durable(receipt)


def test_pulsars_format_makes_room_in_the_metadata_store_when_nothing_is_lost_by_it(store, log):
    cursor = open_cursor(store, log, format=Format.PULSAR, metadata_range_count_max=1)
    high = cursor.ack(P(3, 8), now_ms=0)
    cursor.persist(now_ms=0)
    low = cursor.ack(P(3, 2), now_ms=1)
    store.break_ledgers()
    result = cursor.persist(now_ms=1)
    assert (result.route, result.messages_covered, result.messages_cut) == (PersistTarget.METADATA, 0, 1)
    assert (cursor.durable(low), cursor.durable(high)) == (True, False)
    assert on_disk(store, log) == "[(3:1..3:2]]"


def test_a_state_too_large_for_the_metadata_store_is_refused_before_it_is_sent(store, log):
    cursor = open_cursor(store, log, metadata_bytes_max=500)
    cursor.ack_entries(3, range(1, 5_000, 2), now_ms=1)
    store.break_ledgers()
    mutations = store.mutation_count
    for _ in range(2):
        with pytest.raises(StoreError, match="no ledger can be written"):
            cursor.persist(now_ms=1)
    with pytest.raises(PayloadTooLargeError, match="2500 ranges"):
        cursor.persist(now_ms=2)
    assert store.mutation_count == mutations
    assert (cursor.redelivery_if_crashed, on_disk(store, log)) == (2_500, "[]")
    cursor._check()


def test_with_a_limit_as_much_goes_to_the_metadata_store_as_it_may_be_given(store, log):
    cursor = open_cursor(store, log, metadata_bytes_max=500, metadata_range_count_max=4_000)
    cursor.ack_entries(3, range(1, 5_000, 2), now_ms=1)
    store.break_ledgers()
    result = cursor.persist(now_ms=1)
    assert result.route is PersistTarget.METADATA
    assert 0 < result.bytes_written <= 500
    assert 0 < result.messages_covered == 2_500 - cursor.redelivery_if_crashed
    assert result.messages_cut == cursor.stats().redelivery_cut == cursor.redelivery_if_crashed
    crashed = open_cursor(MemoryStore(store.disk), log)
    assert len(crashed.deleted) == result.messages_covered


def test_the_ledger_is_tried_again_at_once_and_then_ever_later(store, log):
    cursor = open_cursor(store, log)
    store.break_ledgers()
    tried_ms, now_ms = [], 0
    for now_ms in range(0, 400 * SECOND_MS, SECOND_MS // 2):
        errors = cursor.stats().ledger_error_count
        cursor.ack(P(3, 2 + now_ms // 250), now_ms=now_ms)
        assert cursor.persist(now_ms=now_ms).route is PersistTarget.METADATA
        if cursor.stats().ledger_error_count > errors:
            tried_ms.append(now_ms)
    waits = [after - before for before, after in pairwise(tried_ms)]
    assert waits[0] == SECOND_MS // 2
    assert [wait // SECOND_MS for wait in waits[1:]] == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    # One write that succeeds forgets the failures.
    store.mend_ledgers()
    now_ms += 60 * SECOND_MS
    cursor.ack(P(3, 0), now_ms=now_ms)
    assert cursor.persist(now_ms=now_ms).route is PersistTarget.SNAPSHOT
    store.break_ledgers()
    for attempt in (1, 2):
        cursor.ack(P(3, 90_000 + attempt), now_ms=now_ms)
        cursor.persist(now_ms=now_ms)
    assert cursor.stats().ledger_error_count == len(tried_ms) + 2


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
def test_where_the_metadata_store_fails_too_nothing_is_durable_and_all_is_tried_again(store, log, kind):
    cursor = open_cursor(store, log)
    receipt = cursor.ack(P(3, 5), now_ms=1)
    store.break_ledgers()
    store.inject(Fault(store.mutation_count, kind))
    with pytest.raises(StoreError, match="no ledger can be written") as raised:
        cursor.persist(now_ms=1)
    assert "mutation" in str(raised.value.__cause__)
    stats = cursor.stats()
    assert (stats.ledger_error_count, stats.metadata_error_count, stats.metadata_write_count) == (1, 1, 0)
    assert (cursor.durable(receipt), cursor.redelivery_if_crashed, cursor.view.is_dirty) == (False, 1, True)
    # The metadata store works again, and then the ledgers do.
    assert cursor.persist(now_ms=1).route is PersistTarget.METADATA
    assert cursor.durable(receipt)
    store.mend_ledgers()
    later = cursor.ack(P(3, 7), now_ms=5 * SECOND_MS)
    assert cursor.persist(now_ms=5 * SECOND_MS).route is PersistTarget.SNAPSHOT
    assert cursor.durable(later)
    assert on_disk(store, log) == "[(3:4..3:5],(3:6..3:7]]"


def test_what_the_mark_delete_passes_during_a_write_that_fails_is_not_durable(store, log, monkeypatch):
    cursor = open_cursor(store, log, become_old_ack_record_seconds=1)
    receipt = cursor.ack_entries(3, [1, 2, 3], now_ms=0)
    assert cursor.persist(now_ms=0).messages_held_back == 3

    def fail(*_):
        cursor.ack(P(3, 0), now_ms=0)
        raise StoreError("no")

    with monkeypatch.context() as failing:
        failing.setattr(store.ledgers, "append", fail)
        failing.setattr(store.metadata, "put", lambda *_, **__: fail())
        with pytest.raises(StoreError):
            cursor.promote(0, now_ms=0)
    assert cursor.mark_delete_position == P(3, 3)
    assert not cursor.durable(receipt)
    cursor.persist(now_ms=0)
    assert cursor.durable(receipt)


def test_after_a_failed_sync_nothing_is_durable_until_the_store_is_opened_anew(store, log):
    cursor = open_cursor(store, log)
    receipt = cursor.ack(P(3, 5), now_ms=1)
    store.inject(Fault(store.mutation_count, FaultKind.SYNC_FAILED))
    for now_ms in (1, 2, 3_000):
        with pytest.raises(StoreError):
            cursor.persist(now_ms=now_ms)
        with pytest.raises(StoreError):
            cursor.close(now_ms=now_ms)
        assert not cursor.durable(receipt)
    assert cursor.redelivery_if_crashed == 1
    again = open_cursor(MemoryStore(store.disk), log)
    assert again.backlog == 100_000
    receipt = again.ack(P(3, 5), now_ms=4_000)
    again.persist(now_ms=4_000)
    assert again.durable(receipt)


@contextmanager
def files_that_cannot_grow(file):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_after_a_failed_commit_of_sqlite_nothing_is_durable_until_it_is_opened_anew(tmp_path, log):
    with closing(SqliteStore(tmp_path / "store")) as store:
        cursor = open_cursor(store, log)
        receipt = cursor.ack_entries(3, range(1, 100_000, 2), now_ms=1)
        with files_that_cannot_grow(tmp_path / "store" / "ackstate.sqlite3-wal"), pytest.raises(StoreError):
            cursor.persist(now_ms=1)
        # The files could grow again, but the state in memory may differ from that on the disk.
        for now_ms in (2, 3_000):
            with pytest.raises(StoreError, match="close the store and open it again"):
                cursor.persist(now_ms=now_ms)
            assert (cursor.durable(receipt), cursor.redelivery_if_crashed) == (False, 50_000)
    with closing(SqliteStore(tmp_path / "store")) as store:
        again = open_cursor(store, log)
        assert again.backlog == 100_000
        receipt = again.ack(P(3, 5), now_ms=9_000)
        again.persist(now_ms=9_000)
        assert again.durable(receipt)


def test_one_of_many_cursors_that_fails_falls_back_alone(store, log):
    cursors = [open_cursor(store, log, subscription=f"s{n}", ledger_entry_count_max=2) for n in range(3)]
    cursors[1].ack(P(3, 1), now_ms=0)
    cursors[1].persist(now_ms=0)
    receipts = [cursor.ack(P(3, 5), now_ms=1) for cursor in cursors]
    # The second one begins a new ledger, after the two others have appended.
    store.inject(Fault(store.mutation_count + 2, FaultKind.FAIL_BEFORE))
    results = persist_all(cursors, now_ms=1)
    assert [result.route for result in results] == [PersistTarget.DELTA, PersistTarget.METADATA, PersistTarget.DELTA]
    assert all(cursor.durable(receipt) for cursor, receipt in zip(cursors, receipts, strict=True))
    assert [cursor.stats().ledger_error_count for cursor in cursors] == [0, 1, 0]


def test_a_reset_falls_back(store, log):
    cursor = open_cursor(store, log)
    before = cursor.ack(P(3, 50), now_ms=0)
    cursor.persist(now_ms=0)
    store.break_ledgers()
    assert cursor.reset(P(3, 7), now_ms=1).route is PersistTarget.METADATA
    assert not cursor.durable(before)
    assert cursor.stats().metadata_write_count == 1
    crashed = open_cursor(MemoryStore(store.disk), log)
    assert (crashed.mark_delete_position, str(crashed.deleted)) == (P(3, 6), "[]")


def test_a_reset_that_neither_store_takes_leaves_all_as_it_was(store, log):
    cursor = open_cursor(store, log)
    kept = cursor.ack(P(3, 50), now_ms=0)
    cursor.persist(now_ms=0)
    store.break_ledgers()
    store.inject(Fault(store.mutation_count, FaultKind.FAIL_BEFORE))
    with pytest.raises(StoreError, match="no ledger can be written"):
        cursor.reset(P(3, 7), now_ms=1)
    # Whether a crash would find it reset is unknown to the cursor, so the next persist writes its state.
    assert (cursor.durable(kept), str(cursor.deleted)) == (False, "[(3:49..3:50]]")
    assert cursor.persist(now_ms=2).route is PersistTarget.METADATA
    assert (cursor.durable(kept), on_disk(store, log)) == (True, "[(3:49..3:50]]")


@pytest.mark.parametrize("is_broken", [False, True])
def test_an_owner_that_was_fenced_does_not_fall_back(store, log, is_broken):
    older = open_cursor(store, log)
    other = MemoryStore(store.disk)
    newer = open_cursor(other, log)
    newer.ack(P(3, 5), now_ms=1)
    newer.persist(now_ms=1)
    older.ack(P(3, 9), now_ms=2)
    if is_broken:
        store.break_ledgers()
    value = other.metadata.get("/managed-ledgers/t/s")
    for call in (older.persist, older.close):
        with pytest.raises(CursorFencedError):
            call(now_ms=2)
    with pytest.raises(CursorFencedError):
        older.reset(P(3, 0), now_ms=2)
    assert other.metadata.get("/managed-ledgers/t/s") == value
    assert on_disk(other, log) == "[(3:4..3:5]]"
    assert older.redelivery_if_crashed == 1


def test_a_reset_that_can_be_written_nowhere_is_counted_and_changes_nothing(store, log):
    cursor = open_cursor(store, log)
    cursor.ack(P(3, 5), now_ms=1)
    store.break_ledgers()
    store.inject(Fault(store.mutation_count, FaultKind.FAIL_BEFORE))
    with pytest.raises(StoreError, match="no ledger can be written"):
        cursor.reset(P(3, 0), now_ms=1)
    stats = cursor.stats()
    assert (stats.ledger_error_count, stats.metadata_error_count, stats.metadata_write_count) == (1, 1, 0)
    assert cursor.is_acked(P(3, 5))
