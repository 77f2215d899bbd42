"""A cursor ledger that cannot be written: the metadata store takes the state, under its own limits, and says so."""

from itertools import pairwise

import pytest

from ackstate import (
    CursorConfig,
    LedgerMap,
    ManagedCursor,
    Position,
    StoreError,
)
from ackstate.cursor import PersistTarget
from cursors import StoryCursor

P = Position
SECOND_MS = 1_000


@pytest.fixture
def log():
    return LedgerMap.from_counts({3: 100_000})


def open_cursor(store, log, **settings):
    config = CursorConfig(flush_interval_ms=0, **settings)
    return ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, config=config, now_ms=0)


STORIES = {
    "the limit of the metadata store cuts the higher until the ledger is back": (
        "begin metadata_range_count_max=1; at 1; ack 2; entries 5..7; broken; persist -> METADATA 1 cut 3; "
        "durable -> 2; stat redelivery_cut -> 3; gauge -> 3; disk -> 2; mended; at 2; due -> yes; "
        "tick -> SNAPSHOT 3; durable -> 2 5; at 3; due -> no"
    ),
    "the limit of the metadata store cuts the narrower until the ledger is back": (
        "begin metadata_range_count_max=1 keep=WIDEST; at 1; ack 2; entries 5..7; broken; "
        "persist -> METADATA 3 cut 1; durable -> 5; stat redelivery_cut -> 1; gauge -> 1; disk -> 5-7; mended; at 2; "
        "due -> yes; tick -> SNAPSHOT 1; durable -> 2 5; at 3; due -> no"
    ),
    "what a ledger has made durable is not given up in the format NATIVE": (
        "begin format=NATIVE metadata_range_count_max=1; entries 2 5 8; persist; disk -> 2 5 8; at 1; ack 11; "
        "broken; persist ! StoreError no ledger can be written / more than the metadata store may be given; "
        "gauge -> 1; durable -> 2; disk -> 2 5 8; persist ! StoreError no ledger can be written; at 2; writes; "
        "persist ! PayloadTooLargeError; writes -> 0; mended; at 2000; persist -> SNAPSHOT 1; durable -> 2 11"
    ),
    "what a ledger has made durable is not given up in the format PULSAR": (
        "begin format=PULSAR metadata_range_count_max=1; entries 2 5 8; persist; disk -> 2 5 8; at 1; ack 11; "
        "broken; persist ! StoreError no ledger can be written / more than the metadata store may be given; "
        "gauge -> 1; durable -> 2; disk -> 2 5 8; persist ! StoreError no ledger can be written; at 2; writes; "
        "persist ! PayloadTooLargeError; writes -> 0; mended; at 2000; persist -> SNAPSHOT 1; durable -> 2 11"
    ),
    "where the metadata store fails before a write, too, nothing is durable and all is tried again": (
        "at 1; ack 5; broken; fault FAIL_BEFORE; persist ! StoreError no ledger can be written / mutation; "
        "stat ledger_error_count metadata_error_count metadata_write_count -> 1 1 0; durable -> -; gauge -> 1; "
        "dirty -> yes; persist -> METADATA 1; durable -> 5; mended; at 5000; ack 7; persist -> SNAPSHOT 1; "
        "durable -> 5 7; disk -> 5 7"
    ),
    "where the metadata store fails after a write, too, nothing is durable and all is tried again": (
        "at 1; ack 5; broken; fault FAIL_AFTER; persist ! StoreError no ledger can be written / mutation; "
        "stat ledger_error_count metadata_error_count metadata_write_count -> 1 1 0; durable -> -; gauge -> 1; "
        "dirty -> yes; persist -> METADATA 1; durable -> 5; mended; at 5000; ack 7; persist -> SNAPSHOT 1; "
        "durable -> 5 7; disk -> 5 7"
    ),
    "a reset that neither store takes leaves all as it was": (
        "ack 50; persist; broken; fault FAIL_BEFORE; at 1; reset 7 ! StoreError no ledger can be written; "
        "durable -> -; ranges -> 50; at 2; persist -> METADATA 0; durable -> 50; disk -> 50"
    ),
    "a persist that is given up before it writes makes a durable one no less durable": (
        "begin format=PULSAR batch_count_max=1 metadata_bytes_max=20 ledger_retry_ms=10000; batch 5 0b10; persist; "
        "broken; at 1; ack 7; persist ! StoreError; at 2; ack 8; persist ! StoreError; at 3; batch 3 0b10; writes; "
        "durable -> 5; persist ! PayloadTooLargeError; writes -> 0; durable -> 5"
    ),
    "an owner that was fenced does not fall back": (
        "rival; at 1; ack 5; persist; at 2; older ack 9; record; older persist ! CursorFencedError; "
        "older close ! CursorFencedError; older reset 0 ! CursorFencedError; record -> same; disk -> 5; "
        "older gauge -> 1"
    ),
    "an owner that was fenced does not fall back where no ledger can be written": (
        "rival; at 1; ack 5; persist; at 2; older ack 9; broken; record; older persist ! CursorFencedError; "
        "older close ! CursorFencedError; older reset 0 ! CursorFencedError; record -> same; disk -> 5; "
        "older gauge -> 1"
    ),
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_story_of_a_ledger_that_cannot_be_written(story):
    StoryCursor({3: 100_000}, flush_interval_ms=0).tell(story)


@pytest.mark.parametrize(("form", "put_count", "size"), [("NATIVE", 1, 156), ("PULSAR", 2, 56)])
@pytest.mark.parametrize("kind", ["FAIL_BEFORE", "FAIL_AFTER", "FULL"])
def test_a_failed_append_goes_to_the_metadata_store(form, put_count, size, kind):
    """The ledger that is named no more is gone, so nothing that was appended to it in spite of the error can count."""
    StoryCursor({3: 100_000}, flush_interval_ms=0).tell(
        f"begin format={form}; ack 9; persist; at 1; ack 5; fault {kind}; persist -> METADATA 1; durable -> 9 5; "
        f"gauge -> 0; stat ledger_error_count metadata_write_count metadata_error_count -> 1 {put_count} 0; "
        f"wrote -> {size}; stat journal_bytes -> {size}; owners -> -; crash; ranges -> 5 9; "
        "report -> METADATA -1 of 0 records, 2 ranges, less 0; at 2; ack 7 -> 1; persist -> SNAPSHOT 1"
    )


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
