"""What a persist writes, holds back and excludes, and when `tick` persists: by the interval, and by the rate limit."""

import pytest

from ackstate import CursorConfig, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.cursor import ReceiptStatus
from cursors import StoryCursor

P = Position
SECOND_MS = 1_000


STORIES = {
    "the mark delete position is never too young": (
        "begin become_old_ack_record_seconds=1; entries 0 1 2 7; persist -> DELTA 3 held 1; persisted -> 2; "
        "durable -> -; at 1; upto 7; durable -> -; persist; durable -> 0 7"
    ),
    "closing writes young acks too": (
        "begin become_old_ack_record_seconds=1; ack 7; persist; close; durable -> 7; crash; ranges -> 7"
    ),
    "what a limit cuts is counted and becomes durable when there is room": (
        "begin range_count_max=2; ack 2 4 6 8; persist -> DELTA 2 cut 2; "
        "stat redelivery_cut redelivery_unwritten truncation_count -> 2 0 1; durable -> 2 4; at 1; ack 10; "
        "persist -> DELTA 0 cut 3; stat truncation_count -> 1; at 2; ack 3; persist -> DELTA 2 cut 2; "
        "crash range_count_max=none; ranges -> 2-4 6"
    ),
    "a lower limit takes nothing back": (
        "entries 2 4 6; close; crash range_count_max=1; at 1; entries 8 5; persist -> SNAPSHOT 1 cut 1; "
        "crash range_count_max=none; ranges -> 2 4-6"
    ),
    "batches survive and complete across a crash": (
        "batch 5 0b1010 -> 0; durable -> -; stat batches_unwritten -> 1; persist; durable -> 5; at 1; "
        "batch 5 0b0010; crash; batches -> 5=0b1010; at 2; batch 5 0b0101 -> 1; batches -> -; close; crash; "
        "acked 5 -> 5; batches -> -"
    ),
    "a reset forgets what came before": (
        "entries 0..3 50; upto 3 sequence=7; batch 60 0b1; persist; durable -> 0 3 60; at 1; reset 2 -> SNAPSHOT 0; "
        "marked -> 1; reads -> 2; backlog -> 998; durable -> -; ack 1 -> 0; durable -> 1; at 2; ack 9; marked -> 1; "
        "batches -> -; acked 50 -> -; durable -> 1; crash; marked -> 1; batches -> -; acked 50 -> -"
    ),
    "what was sent before a reset is young again after it": (
        "begin become_old_ack_record_seconds=10; delivered 200; at 60000; reset 0; entries 5 7 9; "
        "persist -> DELTA 0 held 3; durable -> -; at 61000; delivered 200; at 70000; persist -> NOTHING 0 held 3; "
        "at 71000; persist -> DELTA 3; durable -> 5"
    ),
    "lost data counts as acked": (
        "begin 3*10 5*0 6*10; lost 3:4 6:2 -> 9; ranges -> 4-9 6:0-2; lost 4:0 5:9 -> 0; "
        "lost 6:1 6:0 ! ValueError 6:1 to 6:0"
    ),
    "a persist that failed is not tried again at once with an interval of 0": (
        "begin flush_interval_ms=0 metadata_bytes_max=1 ledger_retry_ms=0; broken; at 5; ack 5; tick ! StoreError; "
        "ticks -> 15; at 15; tick ! StoreError; ticks -> 25; at 25; tick ! StoreError; ticks -> 35; mended; at 35; "
        "tick -> SNAPSHOT 1; ticks -> None"
    ),
    "a persist that failed is not tried again at once with an interval of 5": (
        "begin flush_interval_ms=5 metadata_bytes_max=1 ledger_retry_ms=0; broken; at 5; ack 5; tick ! StoreError; "
        "ticks -> 15; at 15; tick ! StoreError; ticks -> 25; at 25; tick ! StoreError; ticks -> 35; mended; at 35; "
        "tick -> SNAPSHOT 1; ticks -> None"
    ),
    "young acks become old within their age after a clock went back": (
        "at 28800000; begin become_old_ack_record_seconds=2; at 28800000; delivered 500; ack 5; at 25200000; "
        "persist -> DELTA 0 held 1; at 25201000; delivered 600; ack 600; at 25201999; persist -> DELTA 0 held 2; "
        "at 25202000; persist; durable -> 5; at 25202999; persist; durable -> 5; at 25203000; persist; "
        "durable -> 5 600"
    ),
    "young acks become old within their age after a clock, which was an hour ahead, went back": (
        "at 28800000; begin become_old_ack_record_seconds=2; at 32400000; delivered 500; ack 5; at 25200000; "
        "persist -> DELTA 0 held 1; at 25201000; delivered 600; ack 600; at 25201999; persist -> DELTA 0 held 2; "
        "at 25202000; persist; durable -> 5; at 25202999; persist; durable -> 5; at 25203000; persist; "
        "durable -> 5 600"
    ),
    "a ledger that failed is tried again after a clock went back, but not by 0 s": (
        "at 28800000; begin ledger_retry_ms=1000; broken; ack 1; persist -> METADATA 1; ack 3; "
        "persist -> METADATA 1; ack 5; persist -> METADATA 1; mended; at 28800000; ack 9; persist -> METADATA 1"
    ),
    "a ledger that failed is tried again after a clock went back, but not by 1 s": (
        "at 28800000; begin ledger_retry_ms=1000; broken; ack 1; persist -> METADATA 1; ack 3; "
        "persist -> METADATA 1; ack 5; persist -> METADATA 1; mended; at 28799000; ack 9; persist -> METADATA 1"
    ),
    "a ledger that failed is tried again after a clock went back by 120 s": (
        "at 28800000; begin ledger_retry_ms=1000; broken; ack 1; persist -> METADATA 1; ack 3; "
        "persist -> METADATA 1; ack 5; persist -> METADATA 1; mended; at 28680000; ack 9; persist -> SNAPSHOT 1"
    ),
    "a ledger that failed is tried again after a clock went back by 3600 s": (
        "at 28800000; begin ledger_retry_ms=1000; broken; ack 1; persist -> METADATA 1; ack 3; "
        "persist -> METADATA 1; ack 5; persist -> METADATA 1; mended; at 25200000; ack 9; persist -> SNAPSHOT 1"
    ),
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_story_of_persists(story):
    StoryCursor({3: 1_000}, flush_interval_ms=0).tell(story)


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


# A clock that goes back, by much more than any interval. Then the waiting call waits no longer than it should.

HOUR_MS = 3_600_000
EARLIER_MS, LATER_MS = 7 * HOUR_MS, 8 * HOUR_MS


def open_later(**config):
    log, store = LedgerMap.from_counts({3: 1_000}), MemoryStore()
    config = CursorConfig(**config)
    return store, ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, config=config, now_ms=LATER_MS)


def test_a_ledger_is_rolled_over_within_its_time_after_a_clock_went_back():
    _, cursor = open_later(ledger_rollover_ms=60_000)
    found = []
    for number, now_ms in enumerate(range(EARLIER_MS, EARLIER_MS + 121_000, 30_000)):
        cursor.ack(Position(3, 2 * number + 1), now_ms=now_ms)
        cursor.persist(now_ms=now_ms)
        found.append(cursor.stats().snapshot_count)
    assert found == [2, 2, 3, 3, 4]
