"""What a persist writes, holds back and excludes, and when `tick` persists: by the interval, and by the rate limit."""

import pytest

from ackstate import CursorConfig, LedgerMap, ManagedCursor, MemoryStore, Position, StoreError
from ackstate.cursor import PersistTarget, ReceiptStatus
from ackstate.stores.memory import MemoryDisk

P = Position
SECOND_MS = 1_000


def open_cursor(disk, log, *, now_ms=0, **settings):
    config = CursorConfig(flush_interval_ms=0, **settings)
    store = MemoryStore(disk)
    return ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, config=config, now_ms=now_ms)


@pytest.fixture
def disk():
    return MemoryDisk()


@pytest.fixture
def log():
    return LedgerMap.from_counts({3: 1_000})


def test_the_mark_delete_position_is_never_too_young(disk, log):
    cursor = open_cursor(disk, log, become_old_ack_record_seconds=1)
    receipt = cursor.ack_entries(3, [0, 1, 2, 7], now_ms=0)
    assert cursor.persist(now_ms=0).messages_held_back == 1
    assert cursor.persisted_mark_delete_position == P(3, 2)
    assert not cursor.durable(receipt)
    cursor.mark_delete(P(3, 7), now_ms=1)
    assert not cursor.durable(receipt)
    cursor.persist(now_ms=1)
    assert cursor.durable(receipt)


def test_closing_writes_young_acks_too(disk, log):
    cursor = open_cursor(disk, log, become_old_ack_record_seconds=1)
    receipt = cursor.ack(P(3, 7), now_ms=0)
    cursor.persist(now_ms=0)
    cursor.close(now_ms=0)
    assert cursor.durable(receipt)
    assert str(open_cursor(disk, log).deleted) == "[(3:6..3:7]]"


def test_what_a_limit_cuts_is_counted_and_becomes_durable_when_there_is_room(disk, log):
    cursor = open_cursor(disk, log, range_count_max=2)
    receipts = [cursor.ack(P(3, entry), now_ms=0) for entry in (2, 4, 6, 8)]
    assert cursor.persist(now_ms=0).messages_cut == 2
    stats = cursor.stats()
    assert (stats.redelivery_cut, stats.redelivery_unwritten, stats.truncation_count) == (2, 0, 1)
    assert [cursor.durable(receipt) for receipt in receipts] == [True, True, False, False]
    cursor.ack(P(3, 10), now_ms=1)
    assert cursor.persist(now_ms=1).messages_cut == 3
    assert cursor.stats().truncation_count == 1  # It goes on cutting: that is no new event.
    cursor.ack(P(3, 3), now_ms=2)  # Two ranges become one.
    assert cursor.persist(now_ms=2).messages_cut == 2
    assert str(open_cursor(disk, log).deleted) == "[(3:1..3:4],(3:5..3:6]]"


def test_a_lower_limit_takes_nothing_back(disk, log):
    cursor = open_cursor(disk, log)
    cursor.ack_entries(3, [2, 4, 6], now_ms=0)
    cursor.close(now_ms=0)
    cursor = open_cursor(disk, log, range_count_max=1)
    cursor.ack_entries(3, [8, 5], now_ms=1)
    assert cursor.persist(now_ms=1).messages_cut == 1
    assert str(open_cursor(disk, log).deleted) == "[(3:1..3:2],(3:3..3:6]]"


def test_batches_survive_and_complete_across_a_crash(disk, log):
    cursor = open_cursor(disk, log)
    receipt = cursor.ack_batch(P(3, 5), [0b1010], now_ms=0)
    assert (receipt.newly_acked, cursor.durable(receipt)) == (0, False)
    assert cursor.stats().batches_unwritten == 1
    cursor.persist(now_ms=0)
    assert cursor.durable(receipt)
    cursor.ack_batch(P(3, 5), [0b0010], now_ms=1)
    cursor = open_cursor(disk, log)
    assert cursor.view.batch.get(P(3, 5)) == (0b1010,)
    assert cursor.ack_batch(P(3, 5), [0b0101], now_ms=2).newly_acked == 1
    assert len(cursor.view.batch) == 0
    cursor.close(now_ms=2)
    cursor = open_cursor(disk, log)
    assert (cursor.is_acked(P(3, 5)), len(cursor.view.batch)) == (True, 0)


def test_a_reset_forgets_what_came_before(disk, log):
    cursor = open_cursor(disk, log)
    before = cursor.ack_entries(3, [0, 1, 2, 3, 50], now_ms=0)
    cursor.mark_delete(P(3, 3), now_ms=0, properties={"sequence": 7})
    cursor.ack_batch(P(3, 60), [1], now_ms=0)
    cursor.persist(now_ms=0)
    assert cursor.durable(before)
    assert cursor.reset(P(3, 2), now_ms=1).route is PersistTarget.SNAPSHOT
    assert (cursor.mark_delete_position, cursor.read_position, cursor.backlog) == (P(3, 1), P(3, 2), 998)
    assert not cursor.durable(before)
    waiting = cursor.ack(P(3, 9), now_ms=2)
    for found in (cursor, open_cursor(disk, log)):
        assert found.mark_delete_position == P(3, 1)
        assert len(found.view.batch) == 0
        assert not found.is_acked(P(3, 50))
    assert not cursor.durable(waiting)


def test_what_was_sent_before_a_reset_is_young_again_after_it(disk, log):
    """Its messages are sent again, and their holes close soon."""
    cursor = open_cursor(disk, log, become_old_ack_record_seconds=10)
    cursor.delivered(P(3, 200), now_ms=0)
    cursor.reset(P(3, 0), now_ms=60 * SECOND_MS)
    receipt = cursor.ack_entries(3, [5, 7, 9], now_ms=60 * SECOND_MS)
    assert cursor.persist(now_ms=60 * SECOND_MS).messages_held_back == 3
    assert not cursor.durable(receipt)
    cursor.delivered(P(3, 200), now_ms=61 * SECOND_MS)
    assert cursor.persist(now_ms=70 * SECOND_MS).messages_held_back == 3
    assert cursor.persist(now_ms=71 * SECOND_MS).messages_held_back == 0
    assert cursor.durable(receipt)


def test_lost_data_counts_as_acked(disk):
    log = LedgerMap.from_counts({3: 10, 5: 0, 6: 10})
    cursor = open_cursor(disk, log)
    assert cursor.mark_lost(P(3, 4), P(6, 2), now_ms=0).newly_acked == 9
    assert str(cursor.deleted) == "[(3:3..3:9],(6:-1..6:2]]"
    assert cursor.mark_lost(P(4, 0), P(5, 9), now_ms=0).newly_acked == 0
    with pytest.raises(ValueError, match="6:1 to 6:0"):
        cursor.mark_lost(P(6, 1), P(6, 0), now_ms=0)


def open_new(**config):
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


def test_a_rate_lets_an_ack_through_at_once_and_saves_up_one_second():
    cursor = open_new(flush_interval_ms=60_000, mark_delete_rate_limit=1)
    # The first on credit, then one a second; after idle seconds two: one that was saved and one on credit.
    assert written_at(cursor, [0, 10, 999, 1_000, 1_001, 5_000, 5_001, 5_002, 6_000, 6_001]) == [
        0, 1_000, 5_000, 5_001, 6_000,
    ]  # fmt: skip


def test_without_settings_a_cursor_has_the_documented_numbers():
    config = CursorConfig()
    assert (config.flush_interval_ms, config.mark_delete_rate_limit) == (1_000, 0)
    assert (config.ledger_rollover_ms, config.ledger_entry_count_max) == (4 * 3_600_000, 50_000)
    assert (config.compaction_bytes_min, config.metadata_bytes_max) == (65_536, 900_000)
    assert (config.range_count_max, config.batch_count_max, config.become_old_ack_record_seconds) == (None, 10_000, 0)


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


# A clock that goes back, by much more than any interval. Then the waiting call waits no longer than it should.

HOUR_MS = 3_600_000
EARLIER_MS, LATER_MS = 7 * HOUR_MS, 8 * HOUR_MS


def open_later(**config):
    log, store = LedgerMap.from_counts({3: 1_000}), MemoryStore()
    config = CursorConfig(**config)
    return store, ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, config=config, now_ms=LATER_MS)


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
