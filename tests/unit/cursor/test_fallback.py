"""A cursor ledger that cannot be written: the metadata store takes the state, under its own limits, and says so."""

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
from ackstate.cursor import PersistTarget
from ackstate.cursor.recovery import Recovery
from ackstate.selection import Keep
from ackstate.stores.memory import Fault, FaultKind, MemoryDisk

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


def test_a_persist_that_is_given_up_before_it_writes_makes_a_durable_one_no_less_durable(store, log):
    """The lowest batch goes first, but the metadata store is not given even that."""
    cursor = open_cursor(
        store, log, format=Format.PULSAR, batch_count_max=1, metadata_bytes_max=20, ledger_retry_ms=10_000
    )
    receipt = cursor.ack_batch(P(3, 5), [0b10], now_ms=0)
    cursor.persist(now_ms=0)
    store.break_ledgers()
    for now_ms in (1, 2):  # The second failure in a row begins the pause.
        cursor.ack(P(3, 6 + now_ms), now_ms=now_ms)
        with pytest.raises(StoreError):
            cursor.persist(now_ms=now_ms)
    cursor.ack_batch(P(3, 3), [0b10], now_ms=3)
    cursor._check()
    before, is_durable = store.mutation_count, cursor.durable(receipt)
    with pytest.raises(PayloadTooLargeError):
        cursor.persist(now_ms=3)
    assert store.mutation_count == before
    assert is_durable
    assert cursor.durable(receipt)
