import numpy as np
import pytest
from pyroaring import BitMap

from ackstate import (
    CorruptStateError,
    CursorConfig,
    InvalidPositionError,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Position,
)
from ackstate.cursor import PersistTarget
from ackstate.cursor.journal import cursor_path
from ackstate.wire import native
from cursors import StoryCursor

P = Position


@pytest.fixture
def log():
    return LedgerMap.from_counts({3: 10, 5: 0, 6: 10})


def open_cursor(store, log, **config):
    return ManagedCursor.open(
        store, topic="orders", subscription="billing", ledgers=log, config=CursorConfig(**config), now_ms=0
    )


def journal_ledger(store):
    found = store.metadata.get(cursor_path("orders", "billing"))
    return native.decode_pointer(found.data).cursor_ledger_id


def rewrite_journal(store, change):
    """Replace the journal by a changed copy in a ledger of its own, as damage on a disk would."""
    ledger_id = journal_ledger(store)
    entries = store.ledgers.read(ledger_id, 0, store.ledgers.last(ledger_id) + 1)
    copy = store.ledgers.create("damage")
    store.ledgers.append(copy, change(entries))
    path = cursor_path("orders", "billing")
    found = store.metadata.get(path)
    pointer = native.encode_pointer(native.Pointer(copy, 0, 1))
    store.metadata.put(path, pointer, expected_version=found.version)


STORIES = {
    "a new cursor stands before the first entry and is durable": (
        "marked -> -1; persisted -> -1; reads -> 0; backlog -> 20; report -> NEW -1 of 0 records, 0 ranges, less 0; "
        "stat journal_bytes -> 64; crash; report -> JOURNAL -1 of 1 records, 0 ranges, less 0; stat journal_bytes -> 64"
    ),
    "an ack is accepted first and durable after a persist": (
        "ack 4; durable -> -; gauge -> 1; persist -> DELTA 1; durable -> 4; gauge -> 0"
    ),
    "acking again changes nothing and is as durable as the first": (
        "ack 4 -> 1; ack 4 -> 0; durable -> -; persist; durable -> 4 4; ack 4; durable -> 4 4 4"
    ),
    "the mark delete chains over ledgers that were trimmed": (
        "begin 3*2 5*2 6*0 8*3 9*0 11*1; upto 0; ack 5:1; entries 8:1; backlog -> 5; trim 8; backlog -> 3; ack 8:0; "
        "marked -> 8:1; ranges -> -; ack 8:2; marked -> 8:2; backlog -> 1; ack 11:0; marked -> 11:0; backlog -> 0"
    ),
    "an ack below the mark delete changes nothing": "upto 5; ack 2 -> 0; entries 0 5 6 -> 1; trim 6; ack 3:2 -> 0",
    "the mark delete never goes back": "upto 5; upto 4 ! InvalidPositionError 3:4 would go back from 3:5",
    "tick persists when the flush interval is over": (
        "begin flush_interval_ms=100; at 500; tick -> -; ack 4; tick -> DELTA 1; at 550; ack 5; at 599; tick -> -; "
        "at 600; tick -> DELTA 1"
    ),
    "persisting nothing writes nothing": "persist -> NOTHING 0; writes -> 0",
    "closing persists and ends the cursor": (
        "ack 4; close -> DELTA 1; close -> -; persist ! CursorClosedError; ack 5 ! CursorClosedError; "
        "read 1 ! CursorClosedError; crash; acked 4 -> 4"
    ),
    "a close that fails leaves the cursor open": (
        "ack 4; fault FULL 2; close ! StoreFullError; durable -> -; close; durable -> 4"
    ),
    "the older of two owners is fenced and does no harm": (
        "ack 4; rival; ack 6; persist; older persist ! CursorFencedError; older persist ! CursorFencedError; ack 7; "
        "persist; crash; ranges -> 6-7"
    ),
    "recovery reports what it read": (
        "ack 4; persist; ack 6; persist; ack 8; persist; upto 2; persist; crash; "
        "report -> JOURNAL 2 of 5 records, 3 ranges, less 0"
    ),
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_story_of_a_cursor(story):
    StoryCursor({3: 10, 5: 0, 6: 10}).tell(story)


@pytest.mark.parametrize("position", [(3, 0), P(np.int64(3), np.uint32(0)), P(3, False)])
def test_other_integers_become_a_plain_position(store, log, position):
    cursor = open_cursor(store, log)
    cursor.ack(position, now_ms=1)
    marked = cursor.mark_delete_position
    assert (type(marked), *map(type, marked)) == (P, int, int)


@pytest.mark.parametrize("entries", [{4}, range(4, 6), (4, 5), np.array([4, 5]), BitMap([4, 5])], ids=repr)
def test_entries_may_come_in_any_collection(store, log, entries):
    cursor = open_cursor(store, log)
    assert cursor.ack_entries(3, entries, now_ms=1).newly_acked == len(entries)
    assert list(cursor.deleted.entries(3)) == list(entries)


def test_entries_of_many_ledgers_are_acked_together_or_not_at_all(log):
    one, many = (open_cursor(MemoryStore(), log, become_old_ack_record_seconds=1) for _ in range(2))
    for cursor in (one, many):
        cursor.delivered(P(6, 4), now_ms=0)
    entries = {3: BitMap([0, 1, 3]), 6: BitMap([2])}
    with pytest.raises(InvalidPositionError, match="6:10"):
        many.ack_bitmaps({**entries, 6: BitMap([10])}, now_ms=1)
    assert many.redelivery_if_crashed == 0
    receipt = many.ack_bitmaps(entries, now_ms=1)
    for ledger_id, bitmap in entries.items():
        one.ack_entries(ledger_id, bitmap, now_ms=1)
    assert (receipt.newly_acked, receipt.entries) == (4, entries)
    assert (many.mark_delete_position, many.deleted) == (one.mark_delete_position, one.deleted)
    assert many.ack_bitmaps(entries, now_ms=1).newly_acked == 0


@pytest.mark.parametrize("position", [P(3, 10), P(5, 0), P(6, 10), P(4, 0), P(7, 0)])
def test_a_position_that_the_log_never_had_is_refused(store, log, position):
    cursor = open_cursor(store, log)
    for refused in (
        lambda: cursor.ack(position, now_ms=1),
        lambda: cursor.ack_many([P(3, 1), position], now_ms=1),
        lambda: cursor.ack_entries(position[0], [0, position[1]], now_ms=1),
        lambda: cursor.mark_delete(position, now_ms=1),
    ):
        with pytest.raises(InvalidPositionError, match=str(position)):
            refused()
    assert cursor.backlog == 20
    assert not cursor.view.is_dirty


@pytest.mark.parametrize(
    "refused",
    [
        lambda cursor: cursor.ack(P(3, -1), now_ms=1),
        lambda cursor: cursor.ack(P(3, 2**32), now_ms=1),
        lambda cursor: cursor.ack(P(-1, 0), now_ms=1),
        lambda cursor: cursor.ack(P(3, 1.0), now_ms=1),
        lambda cursor: cursor.ack_many([P(3, 1), P(3, "2")], now_ms=1),
        lambda cursor: cursor.ack_entries(3, [1, -1], now_ms=1),
        lambda cursor: cursor.ack_entries(3, [1, 2.5], now_ms=1),
        lambda cursor: cursor.ack(P("3", 0), now_ms=1),
        lambda cursor: cursor.ack(P(2**63, 0), now_ms=1),
        lambda cursor: cursor.mark_delete(P(3, -2), now_ms=1),
        lambda cursor: cursor.mark_delete(P(3, 5), properties={"a": "1"}, now_ms=1),
        lambda cursor: cursor.reset(P(3, -2), now_ms=1),
        lambda cursor: cursor.promote(-1, now_ms=1),
    ],
)
@pytest.mark.parametrize("marked", [P(3, -1), P(3, 2)])
def test_a_callers_mistake_is_refused_and_changes_nothing(store, log, refused, marked):
    cursor = open_cursor(store, log)
    cursor.mark_delete(marked, now_ms=0)
    cursor.persist(now_ms=0)
    with pytest.raises((ValueError, TypeError)):
        refused(cursor)
    assert cursor.backlog == 20 - (marked.entry_id + 1)
    assert not cursor.view.is_dirty


def test_properties_travel_with_the_mark_delete(store, log):
    cursor = open_cursor(store, log)
    cursor.mark_delete(P(3, 1), now_ms=1, properties={"sequence": 7})
    cursor.mark_delete(P(3, 2), now_ms=1)
    cursor.close(now_ms=1)
    ledger_id = journal_ledger(store)
    last = store.ledgers.read(ledger_id, store.ledgers.last(ledger_id), store.ledgers.last(ledger_id) + 1)[0]
    assert native.decode(last).properties == {"sequence": 7}


def test_a_ledger_that_is_lost_while_a_cursor_is_opened_is_damage(store, log, monkeypatch):
    open_cursor(store, log)
    fence = store.ledgers.fence

    def lost(ledger_id):
        store.ledgers.delete(ledger_id)
        return fence(ledger_id)

    monkeypatch.setattr(store.ledgers, "fence", lost)
    with pytest.raises(CorruptStateError):
        open_cursor(store, log)


def test_a_receipt_belongs_to_the_cursor_that_gave_it(store, log):
    receipt = open_cursor(store, log).ack(P(3, 4), now_ms=1)
    with pytest.raises(ValueError, match="not given by this open cursor"):
        open_cursor(store, log).durable(receipt)


def test_a_torn_last_record_is_left_out_and_reported(store, log):
    cursor = open_cursor(store, log)
    for entry in (4, 6):
        cursor.ack(P(3, entry), now_ms=1)
        cursor.persist(now_ms=1)
    rewrite_journal(store, lambda entries: [*entries[:-1], entries[-1][:-9]])
    report = (recovered := open_cursor(store, log)).recovery_report
    assert str(recovered.deleted) == "[(3:3..3:4]]"
    assert report.records_replayed == 2
    assert report.bytes_discarded > 0
    assert report.discarded_offset > 0
    assert "expected length" in report.discarded_reason


@pytest.mark.parametrize(
    "damage",
    [
        lambda entries: [entries[0], entries[1][:-9], entries[2]],
        lambda entries: [entries[0], entries[2]],
        lambda entries: [entries[0], entries[1], entries[1], entries[2]],
        lambda entries: [entries[0], entries[2], entries[1]],
        lambda entries: entries[1:],
        lambda entries: [entries[0][:-9]],
        lambda entries: [b""],
        lambda _entries: [],
    ],
    ids=["cut", "missing", "repeated", "swapped", "no snapshot", "snapshot cut", "empty record", "no record"],
)
def test_damage_before_a_valid_record_is_refused(store, log, damage):
    cursor = open_cursor(store, log)
    for entry in (4, 6):
        cursor.ack(P(3, entry), now_ms=1)
        cursor.persist(now_ms=1)
    rewrite_journal(store, damage)
    before = store.mutation_count
    with pytest.raises(CorruptStateError, match="journal of /managed-ledgers/orders/billing"):
        open_cursor(store, log)
    assert store.mutation_count == before, "an unreadable store was written to"


def test_a_missing_journal_is_not_a_new_cursor(store, log):
    open_cursor(store, log)
    store.ledgers.delete(journal_ledger(store))
    with pytest.raises(CorruptStateError, match="cursor ledger"):
        open_cursor(store, log)


def test_a_damaged_pointer_is_not_a_new_cursor(store, log):
    open_cursor(store, log)
    path = cursor_path("orders", "billing")
    store.metadata.put(path, b"", expected_version=store.metadata.get(path).version)
    with pytest.raises(CorruptStateError, match="cursor info"):
        open_cursor(store, log)


def test_topics_and_subscriptions_with_slashes_do_not_meet(store, log):
    names = [("a/b", "c"), ("a", "b/c"), ("a%2Fb", "c")]
    for number, (topic, subscription) in enumerate(names):
        cursor = ManagedCursor.open(store, topic=topic, subscription=subscription, ledgers=log, now_ms=0)
        cursor.ack(P(3, number + 1), now_ms=0)
        cursor.close(now_ms=0)
    for number, (topic, subscription) in enumerate(names):
        cursor = ManagedCursor.open(store, topic=topic, subscription=subscription, ledgers=log, now_ms=0)
        assert str(cursor.deleted) == f"[(3:{number}..3:{number + 1}]]"


def test_the_journal_is_bounded_by_the_state_and_not_by_the_history(store):
    log = LedgerMap.from_counts({1: 4_000})
    cursor = open_cursor(store, log, compaction_bytes_min=1_000)
    largest = 0
    for entry in range(4_000):
        cursor.ack(P(1, entry), now_ms=entry)
        cursor.persist(now_ms=entry)
        largest = max(largest, cursor.stats().journal_bytes)
    stats = cursor.stats()
    assert largest < 2_000
    assert stats.bytes_persisted > 100 * largest
    assert len(store.ledgers.owned_by(f"cursor {cursor_path('orders', 'billing')}")) == 1


def test_an_old_ledger_is_replaced_once_an_interval_and_not_at_every_persist_after_it():
    cursor = open_cursor(MemoryStore(), LedgerMap.from_counts({1: 300}), ledger_rollover_ms=1_000)
    for entry in range(100):
        cursor.ack(P(1, 2 * entry + 1), now_ms=1_000 + entry)
        cursor.persist(now_ms=1_000 + entry)
    stats = cursor.stats()
    assert (stats.snapshot_count, stats.persist_count, stats.metadata_write_count) == (2, 101, 0)
    cursor.ack(P(1, 250), now_ms=2_000)
    assert cursor.persist(now_ms=2_000).route is PersistTarget.SNAPSHOT


def test_each_compaction_is_paid_for_by_the_deltas_before_it():
    compaction_bytes_min = 500
    cursor = open_cursor(MemoryStore(), LedgerMap.from_counts({1: 2_000}), compaction_bytes_min=compaction_bytes_min)
    delta_bytes = snapshot_bytes = 0
    for entry in range(1_000):
        cursor.ack(P(1, 2 * entry + 1), now_ms=0)
        result = cursor.persist(now_ms=0)
        if result.route is PersistTarget.DELTA:
            delta_bytes += result.bytes_written
        else:
            snapshot_bytes = result.bytes_written
    stats = cursor.stats()
    # The first ledger is that of the new cursor.
    assert 2 < stats.snapshot_count <= 1 + delta_bytes / compaction_bytes_min
    # Deltas have outweighed four times every snapshot but the last one.
    assert stats.bytes_persisted <= delta_bytes * (1 + 1 / 4) + snapshot_bytes
    assert stats.metadata_write_count == 0


def test_an_orphan_journal_of_batch_acks_alone_is_not_absent(store, log):
    cursor = open_cursor(store, log)
    cursor.ack_batch(P(3, 2), [0b110], now_ms=0)
    cursor.close(now_ms=0)
    # A compaction leaves one record: the snapshot that has the batch and no acked entry.
    cursor = open_cursor(store, log, ledger_entry_count_max=1)
    cursor.ack_batch(P(3, 2), [0b100], now_ms=0)
    cursor.persist(now_ms=0)
    path = cursor_path("orders", "billing")
    store.metadata.delete(path, expected_version=store.metadata.get(path).version)
    with pytest.raises(CorruptStateError, match="none, but journals in ledgers"):
        open_cursor(store, log)


def test_bytes_per_persist_do_not_grow_with_the_live_holes():
    written = {}
    for holes in (1_000, 100_000):
        log = LedgerMap.from_counts({1: 2 * holes + 2_000})
        cursor = open_cursor(MemoryStore(), log, compaction_bytes_min=0)
        cursor.ack_entries(1, range(1, 2 * holes, 2), now_ms=0)
        cursor.persist(now_ms=0)
        # The bulk outweighs the empty first snapshot, so the next record is a snapshot of all of it.
        cursor.ack(P(1, 2 * holes), now_ms=0)
        assert cursor.persist(now_ms=0).route is PersistTarget.SNAPSHOT
        before = cursor.stats().bytes_persisted
        for entry in range(2 * holes + 2, 2 * holes + 1_002, 2):
            cursor.ack(P(1, entry), now_ms=0)
            cursor.persist(now_ms=0)
        written[holes] = (cursor.stats().bytes_persisted - before) / 500
    assert written[100_000] < 1.5 * written[1_000]


@pytest.mark.parametrize(
    ("named", "error", "saying"),
    [
        ({"topic": b"t"}, TypeError, "topic must be a str, got b't'"),
        ({"topic": ""}, ValueError, "topic must not be empty"),
        ({"topic": "a\ud800"}, ValueError, r"topic must be text that UTF-8 can encode, got .* U\+D800 at index 1"),
        ({"subscription": 7}, TypeError, "subscription must be a str, got 7"),
        ({"subscription": ""}, ValueError, "subscription must not be empty"),
        (
            {"subscription": "\udcff"},
            ValueError,
            r"subscription must be text that UTF-8 can encode, .* U\+DCFF at index 0",
        ),
        ({"ledgers": {3: 9}}, TypeError, r"ledgers must be a LedgerMap, such as log\.ledgers, got a dict"),
    ],
)
def test_an_open_that_is_refused_takes_nothing_over(store, log, named, error, saying):
    cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, now_ms=0)
    with pytest.raises(error, match=saying):
        ManagedCursor.open(store, **({"topic": "t", "subscription": "s", "ledgers": log, "now_ms": 1} | named))
    cursor.ack(P(3, 4), now_ms=2)
    assert cursor.persist(now_ms=2).messages_covered == 1
