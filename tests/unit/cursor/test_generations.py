"""Young acks wait, because their holes are about to close; old ones are written, because theirs stay open."""

from __future__ import annotations

import pytest

from ackstate import CursorConfig, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.cursor import PersistTarget
from ackstate.selection import Keep
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


def test_the_heavy_traffic_of_pulsar_issue_19966(disk, log):
    """Acked are 1, 3, 5, sent long ago, and 101, 103, ..., 199, sent just now; then 102, 104, ... are acked too."""
    cursor = open_cursor(disk, log, become_old_ack_record_seconds=3)
    cursor.delivered(P(3, 6), now_ms=0)
    cursor.delivered(P(3, 200), now_ms=10 * SECOND_MS)
    cursor.ack_entries(3, [1, 3, 5, *range(101, 201, 2)], now_ms=10 * SECOND_MS)
    first = cursor.persist(now_ms=10 * SECOND_MS)
    assert (first.messages_covered, first.messages_held_back) == (3, 50)
    assert str(open_cursor(disk, log).deleted) == "[(3:0..3:1],(3:2..3:3],(3:4..3:5]]"

    cursor = open_cursor(disk, log, become_old_ack_record_seconds=3)
    cursor.delivered(P(3, 200), now_ms=10 * SECOND_MS)
    cursor.ack_entries(3, range(101, 201, 2), now_ms=11 * SECOND_MS)
    cursor.ack_entries(3, range(102, 201, 2), now_ms=12 * SECOND_MS)
    assert cursor.persist(now_ms=12 * SECOND_MS).messages_held_back == 100
    assert cursor.stats().redelivery_young == cursor.redelivery_if_crashed == 100
    assert not cursor.view.is_persist_due(now_ms=12_999)
    promoted = cursor.tick(now_ms=13 * SECOND_MS)
    # One record of one range, where a hundred would have been written one by one.
    assert (promoted.route, promoted.messages_covered) == (PersistTarget.DELTA, 100)
    assert cursor.redelivery_if_crashed == 0
    assert str(open_cursor(disk, log).deleted) == "[(3:0..3:1],(3:2..3:3],(3:4..3:5],(3:100..3:200]]"


def test_a_receipt_of_a_young_ack_is_durable_when_it_was_promoted(disk, log):
    cursor = open_cursor(disk, log, become_old_ack_record_seconds=1)
    cursor.delivered(P(3, 9), now_ms=0)
    cursor.delivered(P(3, 20), now_ms=900)
    old, young = cursor.ack(P(3, 5), now_ms=900), cursor.ack(P(3, 15), now_ms=900)
    cursor.persist(now_ms=1_000)
    assert (cursor.durable(old), cursor.durable(young)) == (True, False)
    cursor.tick(now_ms=1_900)
    assert cursor.durable(young)


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


def test_a_limit_that_cuts_again_after_a_reset_is_another_event(disk, log):
    cursor = open_cursor(disk, log, range_count_max=1)
    for truncation_count in (1, 2):
        cursor.ack_entries(3, [2, 4], now_ms=0)
        assert cursor.persist(now_ms=0).messages_cut == 1
        assert cursor.stats().truncation_count == truncation_count
        cursor.reset(P(3, 0), now_ms=0)


def test_a_limit_that_keeps_the_widest(disk, log):
    cursor = open_cursor(disk, log, range_count_max=1, keep=Keep.WIDEST)
    cursor.ack_entries(3, [2, 5, 6, 7, 9], now_ms=0)
    assert cursor.persist(now_ms=0).messages_cut == 2
    assert str(open_cursor(disk, log).deleted) == "[(3:4..3:7]]"


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


@pytest.mark.parametrize(
    ("position", "read_position"), [(P(1, 5), P(3, 0)), (P(3, -1), P(3, 0)), (P(9, 0), P(3, 1_000))]
)
def test_a_reset_to_what_the_log_has_not_goes_to_the_next_that_it_has(disk, log, position, read_position):
    cursor = open_cursor(disk, log)
    cursor.reset(position, now_ms=0)
    assert cursor.read_position == read_position


def test_lost_data_counts_as_acked(disk):
    log = LedgerMap.from_counts({3: 10, 5: 0, 6: 10})
    cursor = open_cursor(disk, log)
    assert cursor.mark_lost(P(3, 4), P(6, 2), now_ms=0).newly_acked == 9
    assert str(cursor.deleted) == "[(3:3..3:9],(6:-1..6:2]]"
    assert cursor.mark_lost(P(4, 0), P(5, 9), now_ms=0).newly_acked == 0
    with pytest.raises(ValueError, match="6:1 to 6:0"):
        cursor.mark_lost(P(6, 1), P(6, 0), now_ms=0)
