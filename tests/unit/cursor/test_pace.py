"""When does `tick` persist? By the flush interval, and by the rate limit as a Pulsar cursor's writes are limited."""

from __future__ import annotations

import pytest

from ackstate import CursorConfig, LedgerMap, ManagedCursor, MemoryStore, Position, StoreError
from ackstate.cursor import PersistTarget, ReceiptStatus


def open_cursor(**config):
    log = LedgerMap.from_counts({3: 1_000})
    return ManagedCursor.open(
        MemoryStore(), topic="t", subscription="s", ledgers=log, config=CursorConfig(**config), now_ms=0
    )


def written_at(cursor, instants):
    """Ack an entry at each instant and tick at once; return the instants at which that persisted."""
    written = []
    for number, now_ms in enumerate(instants):
        receipt = cursor.ack(Position(3, 2 * number + 1), now_ms=now_ms)
        assert receipt.status is ReceiptStatus.ACCEPTED
        is_due = cursor.view.is_persist_due(now_ms=now_ms)
        if cursor.tick(now_ms=now_ms) is not None:
            written.append(now_ms)
        assert is_due == cursor.durable(receipt) == (written[-1:] == [now_ms])
    return written


def test_without_a_rate_only_the_interval_persists():
    assert written_at(open_cursor(flush_interval_ms=1_000), [0, 400, 999, 1_000, 1_500, 2_000]) == [1_000, 2_000]


def test_a_rate_lets_an_ack_through_at_once_and_saves_up_one_second():
    cursor = open_cursor(flush_interval_ms=60_000, mark_delete_rate_limit=1)
    # The first on credit, then one a second; after idle seconds two: one that was saved and one on credit.
    assert written_at(cursor, [0, 10, 999, 1_000, 1_001, 5_000, 5_001, 5_002, 6_000, 6_001]) == [
        0, 1_000, 5_000, 5_001, 6_000,
    ]  # fmt: skip


def test_what_the_rate_refused_waits_for_another_ack_or_for_the_interval():
    cursor = open_cursor(flush_interval_ms=60_000, mark_delete_rate_limit=1)
    assert written_at(cursor, [0, 100]) == [0]
    # As in Pulsar: silence flushes nothing, though the rate would allow it long since.
    assert [cursor.tick(now_ms=now_ms) for now_ms in (1_000, 30_000, 59_999)] == [None] * 3
    assert cursor.redelivery_if_crashed == 1
    assert cursor.tick(now_ms=60_000).messages_covered == 1
    assert cursor.tick(now_ms=200_000) is None


def test_without_settings_a_cursor_has_the_documented_numbers():
    config = CursorConfig()
    assert (config.flush_interval_ms, config.mark_delete_rate_limit) == (1_000, 0)
    assert (config.ledger_rollover_ms, config.ledger_entry_count_max) == (4 * 3_600_000, 50_000)
    assert (config.compaction_bytes_min, config.metadata_bytes_max) == (65_536, 900_000)
    assert (config.range_count_max, config.batch_count_max, config.become_old_ack_record_seconds) == (None, 10_000, 0)


def test_an_explicit_persist_asks_no_rate():
    cursor = open_cursor(flush_interval_ms=60_000, mark_delete_rate_limit=0.001)
    assert written_at(cursor, [0, 1]) == [0]
    assert cursor.persist(now_ms=2).messages_covered == 1


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), "1"])
def test_a_rate_is_a_finite_number(rate):
    with pytest.raises(TypeError, match="mark_delete_rate_limit"):
        CursorConfig(mark_delete_rate_limit=rate)


@pytest.mark.parametrize("flush_interval_ms", [0, 5])
def test_a_persist_that_failed_is_not_tried_again_at_once(flush_interval_ms):
    """A broker that sleeps until the next tick would not sleep at all."""
    store, log = MemoryStore(), LedgerMap.from_counts({3: 10})
    config = CursorConfig(flush_interval_ms=flush_interval_ms, metadata_bytes_max=1, ledger_retry_ms=0)
    cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, config=config, now_ms=0)
    store.break_ledgers()
    cursor.ack(Position(3, 5), now_ms=5)
    for now_ms in (5, 15, 25):
        with pytest.raises(StoreError):
            cursor.tick(now_ms=now_ms)
        assert cursor.view.next_tick_ms == now_ms + 10
    store.mend_ledgers()
    assert cursor.tick(now_ms=35).messages_covered == 1
    assert cursor.view.next_tick_ms is None


def test_young_acks_wait():
    cursor = open_cursor(become_old_ack_record_seconds=1)
    cursor.delivered(Position(3, 5), now_ms=0)
    cursor.delivered(Position(3, 9), now_ms=1_500)
    cursor.ack_many([Position(3, 4), Position(3, 8)], now_ms=1_600)
    result = cursor.persist(now_ms=1_700)
    assert (result.messages_covered, result.messages_held_back) == (1, 1)
    assert cursor.stats().redelivery_young == 1


# A clock that goes back, by much more than any interval. Then the waiting call waits no longer than it should.

HOUR_MS = 3_600_000
EARLIER_MS, LATER_MS = 7 * HOUR_MS, 8 * HOUR_MS


def open_later(**config):
    log, store = LedgerMap.from_counts({3: 1_000}), MemoryStore()
    config = CursorConfig(**config)
    return store, ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, config=config, now_ms=LATER_MS)


def test_the_rate_is_that_of_before_after_a_clock_went_back():
    _, cursor = open_later(flush_interval_ms=10 * HOUR_MS, mark_delete_rate_limit=1)
    instants = [
        LATER_MS,
        LATER_MS + 500,
        EARLIER_MS,
        EARLIER_MS + 500,
        *range(EARLIER_MS + 1_000, EARLIER_MS + 5_001, 500),
    ]
    assert written_at(cursor, [instant for instant in instants if instant >= LATER_MS]) == [LATER_MS]
    cursor.persist(now_ms=EARLIER_MS)
    granted = []
    for number, now_ms in enumerate(instant for instant in instants if instant < LATER_MS):
        cursor.ack(Position(3, 101 + 2 * number), now_ms=now_ms)
        if cursor.tick(now_ms=now_ms) is not None:
            granted.append(now_ms - EARLIER_MS)
    assert granted == [0, 1_000, 2_000, 3_000, 4_000, 5_000]


@pytest.mark.parametrize("delivered_ms", [LATER_MS, LATER_MS + HOUR_MS])
def test_young_acks_become_old_within_their_age_after_a_clock_went_back(delivered_ms):
    """Also if the clock was an hour ahead when they were sent."""
    _, cursor = open_later(become_old_ack_record_seconds=2)
    cursor.delivered(Position(3, 500), now_ms=delivered_ms)
    before = cursor.ack(Position(3, 5), now_ms=delivered_ms)
    assert cursor.persist(now_ms=EARLIER_MS).messages_held_back == 1
    cursor.delivered(Position(3, 600), now_ms=EARLIER_MS + 1_000)
    after = cursor.ack(Position(3, 600), now_ms=EARLIER_MS + 1_000)
    assert cursor.persist(now_ms=EARLIER_MS + 1_999).messages_held_back == 2
    cursor.persist(now_ms=EARLIER_MS + 2_000)
    assert (cursor.durable(before), cursor.durable(after)) == (True, False)
    cursor.persist(now_ms=EARLIER_MS + 2_999)
    assert not cursor.durable(after)
    cursor.persist(now_ms=EARLIER_MS + 3_000)
    assert cursor.durable(after)


def test_a_ledger_is_rolled_over_within_its_time_after_a_clock_went_back():
    _, cursor = open_later(ledger_rollover_ms=60_000)
    found = []
    for number, now_ms in enumerate(range(EARLIER_MS, EARLIER_MS + 121_000, 30_000)):
        cursor.ack(Position(3, 2 * number + 1), now_ms=now_ms)
        cursor.persist(now_ms=now_ms)
        found.append(cursor.stats().snapshot_count)
    assert found == [2, 2, 3, 3, 4]


@pytest.mark.parametrize(("back_ms", "is_tried"), [(0, False), (1_000, False), (120_000, True), (HOUR_MS, True)])
def test_a_ledger_that_failed_is_tried_again_after_a_clock_went_back(back_ms, is_tried):
    """A step back that is shorter than the longest pause may be waited for."""
    store, cursor = open_later(ledger_retry_ms=1_000)
    store.break_ledgers()
    for number in range(3):
        cursor.ack(Position(3, 2 * number + 1), now_ms=LATER_MS)
        assert cursor.persist(now_ms=LATER_MS).route is PersistTarget.METADATA
    store.mend_ledgers()
    cursor.ack(Position(3, 9), now_ms=LATER_MS - back_ms)
    route = cursor.persist(now_ms=LATER_MS - back_ms).route
    assert route is (PersistTarget.SNAPSHOT if is_tried else PersistTarget.METADATA)
