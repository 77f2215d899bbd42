"""One behaviour of the bucketed index at a time: held messages, seals, loads, merges and drops."""

from __future__ import annotations

import pytest

from ackstate import MemoryStore, Position, StoreError
from ackstate.delay import BucketedDelayIndex, BucketRegistry, DelayConfig
from ackstate.stores.memory import Fault, FaultKind
from ackstate.wire.pulsar.delay_snapshot import decode_metadata, decode_segment
from small_buckets import KEY, add, config, fill, keys_of, many_buckets, poll, ranges, storage_of

TIME_MAX = 2**63 - 1


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def index(store):
    return BucketedDelayIndex(config(), storage=storage_of(store))


# Due messages and their times.


@pytest.mark.parametrize(
    ("is_strict", "deliver_at_ms", "is_held"),
    [(True, 1000, False), (True, 1001, True), (False, 1100, False), (False, 1101, True), (True, -1, False)],
)
def test_a_message_is_held_if_it_is_due_later_than_a_tick_from_now_or_than_now(is_strict, deliver_at_ms, is_held):
    index = BucketedDelayIndex(config(is_deliver_at_time_strict=is_strict, tick_time_ms=100))
    assert index.add_message(Position(3, 0), deliver_at_ms=deliver_at_ms, now_ms=1000) == is_held
    assert len(index) == is_held


def test_a_message_is_handed_out_a_tick_before_its_time_unless_delivery_is_strict():
    index = BucketedDelayIndex(config(is_deliver_at_time_strict=False, tick_time_ms=100))
    add(index, (3, 0, 1500))
    assert index.next_delivery_ms == 1400
    assert not index.has_message_available(now_ms=1399)
    assert poll(index, 1399) == []
    assert index.has_message_available(now_ms=1400)
    assert poll(index, 1400) == [(3, 0)]
    assert index.next_delivery_ms is None


def test_a_poll_takes_those_due_first_and_returns_them_by_position(index):
    add(index, (3, 0, 40), (3, 1, 20), (3, 2, 30), (3, 3, 20))
    assert poll(index, 100, max_messages=0) == []
    assert poll(index, 100, max_messages=3) == [(3, 1), (3, 2), (3, 3)]
    assert index.delayed_message_count == 1
    assert poll(index, 100) == [(3, 0)]


def test_of_two_times_of_a_position_the_first_counts(index):
    add(index, (3, 0, 50), (3, 0, 20))
    assert len(index) == 1
    assert poll(index, 49) == []
    assert poll(index, 50) == [(3, 0)]
    assert poll(index, 60) == []


def test_one_offered_again_when_its_time_has_come_is_delivered_once(index):
    add(index, (3, 0, 50))
    assert not index.add_message(Position(3, 0), deliver_at_ms=50, now_ms=50)
    assert len(index) == 0
    assert poll(index, 60) == []


def test_a_clock_that_runs_back_counts_as_the_latest_time(index):
    add(index, (3, 0, 50), (3, 1, 90))
    assert poll(index, 60) == [(3, 0)]
    assert not index.add_message(Position(3, 2), deliver_at_ms=55, now_ms=10)
    assert poll(index, 10) == []


def test_times_and_ids_reach_their_bounds(index):
    add(index, (2**63 - 1, 2**32 - 1, TIME_MAX), (2**63 - 1, 0, TIME_MAX - 1))
    assert poll(index, TIME_MAX - 2) == []
    assert poll(index, TIME_MAX) == [(2**63 - 1, 0), (2**63 - 1, 2**32 - 1)]


@pytest.mark.parametrize(
    ("position", "deliver_at_ms", "now_ms", "error"),
    [
        (Position(3, -1), 10, 0, ValueError),
        (Position(3, 2**32), 10, 0, ValueError),
        (Position(2**63, 0), 10, 0, ValueError),
        (Position(3, "0"), 10, 0, TypeError),
        (Position(3, 0), 2**63, 0, ValueError),
        (Position(3, 0), 10, -1, ValueError),
        (Position(3, 0), "10", 0, TypeError),
        (Position(3, 0), 10, 0.5, TypeError),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(index, position, deliver_at_ms, now_ms, error):
    with pytest.raises(error):
        index.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)
    assert len(index) == 0
    index._check()


def test_other_calls_refuse_too(index):
    with pytest.raises(ValueError, match="max_messages must be at least 0, got -1"):
        poll(index, 0, max_messages=-1)
    assert Position(3, -1) not in index
    assert Position(3, 2**32) not in index


def test_contains_is_exact(index):
    fill(index, 3, 100)
    fill(index, 5, 100)
    assert Position(3, 3) in index
    assert Position(4, 3) not in index


# Sealing.


def test_a_bucket_is_sealed_when_the_log_goes_on_to_another_ledger(store, index):
    fill(index, 3, 100, count=5)
    assert ranges(index) == []
    add(index, (4, 0, 30))
    assert ranges(index) == [(3, 3, 1, 3)]
    assert keys_of(store) == {f"{KEY}_3_3": "1"}
    assert index.stats().mutable_count == 1
    assert index.stats().shared_count == 2
    assert len(index) == 6


def test_a_snapshot_is_metadata_then_segments_in_one_sync(store, index):
    add(index, (3, 0, 40), (3, 1, 10), (4, 0, 20), (4, 7, 30), (6, 0, 99))
    entries = store.ledgers.read(1, 0, 3)
    metadata = decode_metadata(entries[0], what="metadata")
    assert [(each.min_deliver_at_ms, each.max_deliver_at_ms) for each in metadata] == [(10, 20), (30, 40)]
    assert [{ledger_id: list(bitmap) for ledger_id, bitmap in each.bitmaps.items()} for each in metadata] == [
        {3: [1], 4: [0]},
        {3: [0], 4: [7]},
    ]
    columns = decode_segment(entries[2], what="segment", metadata=metadata[1])
    assert [column.tolist() for column in columns] == [[30, 40], [4, 3], [7, 0]]
    assert store.mutation_count == 5  # the registry is taken over in two, then the ledger, its entries, the key


def test_a_bucket_that_is_not_full_goes_on_over_ledgers(index):
    for ledger_id in (3, 4, 6):
        add(index, (ledger_id, 0, 100))
    assert ranges(index) == []
    add(index, (6, 1, 100), (7, 0, 100))
    assert [each[:2] for each in ranges(index)] == [(3, 6)]


def test_a_bucket_is_sealed_once_it_spans_the_ledger_step(store):
    index = BucketedDelayIndex(config(ledger_step_per_bucket=3), storage=storage_of(store))
    add(index, (3, 0, 100), (5, 0, 100))
    assert ranges(index) == []
    add(index, (6, 0, 100))
    assert [each[:2] for each in ranges(index)] == [(3, 5)]


def test_without_storage_all_stays_in_memory():
    index = BucketedDelayIndex(DelayConfig.from_pulsar_conf({"delayedDeliveryMinIndexCountPerBucket": 1}))
    add(index, (3, 0, 5000), (4, 0, 6000), (5, 0, 7000), (3, 1, 5500))
    assert ranges(index) == []
    assert index.stats().mutable_count == 3
    index.delete_retired()
    assert poll(index, 10_000) == [(3, 0), (3, 1), (4, 0), (5, 0)]
    index.clear()


def test_what_comes_late_for_a_sealed_ledger_stays_in_memory(store, index):
    fill(index, 3, 100)
    add(index, (4, 0, 500), (3, 9, 400), (2, 0, 300))
    assert index.stats().mutable_count == 1
    assert index.stats().shared_count == 2 + 2
    recovered, report = BucketedDelayIndex.recover(config(), storage=storage_of(store), now_ms=0)
    assert report.message_count == len(recovered) == 4
    assert Position(3, 9) not in recovered  # the dispatcher reads it again
    assert poll(index, 1000) == [(2, 0), (3, 0), (3, 1), (3, 2), (3, 3), (3, 9), (4, 0)]


def test_what_is_due_is_not_sealed(index):
    add(index, (3, 0, 10), (3, 1, 100), (3, 2, 100), (3, 3, 100))
    assert poll(index, 10) == [(3, 0)]
    add(index, (4, 0, 100), now_ms=10)
    assert ranges(index) == []


# From segment to segment.


def test_the_next_segment_is_loaded_when_the_last_message_of_the_one_before_is_taken(store, index):
    fill(index, 3, 100)
    add(index, (4, 0, 500))
    assert poll(index, 100) == [(3, 0)]
    assert ranges(index) == [(3, 3, 1, 2)]
    assert poll(index, 110) == [(3, 1)]
    assert ranges(index) == [(3, 3, 2, 2)]
    assert poll(index, 120) == [(3, 2)]
    assert store.ledgers.owned_by("delayed") == [1]
    assert poll(index, 130) == [(3, 3)]
    assert ranges(index) == []
    assert store.ledgers.owned_by("delayed") == []
    assert keys_of(store) == {}


def test_messages_due_at_the_same_time_as_the_last_of_a_segment_come_in_order(index):
    add(index, (3, 0, 100), (3, 2, 100), (3, 4, 100), (3, 6, 100), (4, 0, 100), (3, 1, 100), (3, 3, 100), (3, 5, 100))
    taken = [poll(index, 100, max_messages=1) for _ in range(9)]
    assert taken == [[(3, entry_id)] for entry_id in range(7)] + [[(4, 0)], []]


def test_a_poll_with_a_maximum_loads_no_more_than_it_needs(index):
    fill(index, 3, 100)
    add(index, (4, 0, 500))
    assert poll(index, 200, max_messages=1) == [(3, 0)]
    assert ranges(index) == [(3, 3, 1, 2)]
    assert poll(index, 200, max_messages=2) == [(3, 1), (3, 2)]
    assert ranges(index) == [(3, 3, 2, 2)]


# The mark-delete position, `clear`, `close`.


def test_what_the_mark_delete_has_passed_counts_no_longer_and_leaves_nothing(store, index):
    many_buckets(index, count=2)
    index.advance_mark_delete(Position(4, 3))
    assert ranges(index) == [(4, 4, 1, 2)]
    assert len(index) == 5
    index.advance_mark_delete(Position(3, 0))
    index.advance_mark_delete(Position(6, -1))
    assert len(index) == 0
    assert ranges(index) == []
    assert store.ledgers.owned_by("delayed") == []
    assert keys_of(store) == {}
    assert index.next_delivery_ms is None
    assert poll(index, 9999) == []


def test_what_is_added_below_the_mark_delete_is_dropped_at_the_next_poll(index):
    index.advance_mark_delete(Position(5, 0))
    add(index, (3, 0, 100), (5, 0, 100))
    assert len(index) == 2
    assert poll(index, 50) == []
    assert len(index) == 1
    assert poll(index, 100) == [(5, 0)]


def test_a_bucket_that_reaches_over_the_mark_delete_is_kept(index):
    add(index, (3, 0, 10), (3, 1, 20), (4, 0, 30), (4, 1, 40), (5, 0, 50))
    index.advance_mark_delete(Position(4, 0))
    assert ranges(index) == [(3, 4, 1, 2)]
    assert poll(index, 60) == [(4, 0), (4, 1), (5, 0)]


def test_clear_leaves_nothing_that_only_the_ledgers_or_only_the_registry_know(store, index):
    many_buckets(index, count=2)
    store.ledgers.create("delayed")
    registry = BucketRegistry(store.metadata, "/buckets")
    registry.put(f"{KEY}_90_91", "4711")
    registry.put("#pulsar.internal.other", "x")
    store.ledgers.create("another owner")
    index.clear()
    assert store.ledgers.owned_by("delayed") == []
    assert keys_of(store) == {"#pulsar.internal.other": "x"}
    assert len(store.ledgers.owned_by("another owner")) == 1
    assert (len(index), index.next_delivery_ms, ranges(index)) == (0, None, [])
    many_buckets(index, count=2)
    assert len(index) == 9


@pytest.mark.parametrize("call_again", [BucketedDelayIndex.clear, BucketedDelayIndex.delete_retired])
@pytest.mark.parametrize(
    ("first_fault", "left"),
    [(0, ({f"{KEY}_3_3": "1"}, [1])), (2, ({f"{KEY}_5_5": "3"}, [3])), (3, ({}, [1])), (5, ({}, [3]))],
)
def test_a_clear_deletes_all_that_it_can_and_a_second_call_the_rest(store, index, first_fault, left, call_again):
    many_buckets(index, count=3)
    for attempt in range(4):
        store.inject(Fault(store.mutation_count + first_fault + attempt, FaultKind.FAIL_BEFORE))
    with pytest.raises(StoreError):
        index.clear()
    assert len(index) == 0
    assert (keys_of(store), store.ledgers.owned_by("delayed")) == left
    call_again(index)
    assert store.ledgers.owned_by("delayed") == []
    assert keys_of(store) == {}


def test_a_mark_delete_drops_every_bucket_that_it_passes_though_one_cannot_be_deleted(store, index):
    many_buckets(index, count=3)
    for attempt in range(4):
        store.inject(Fault(store.mutation_count + attempt, FaultKind.FAIL_BEFORE))
    index.advance_mark_delete(Position(6, 0))
    assert ranges(index) == []
    assert keys_of(store) == {f"{KEY}_3_3": "1"}
    assert store.ledgers.owned_by("delayed") == [1]
    index.delete_retired()
    assert keys_of(store) == {}
    assert store.ledgers.owned_by("delayed") == []


def test_close_keeps_what_is_sealed_and_refuses_use(store, index):
    many_buckets(index, count=2)
    index.close()
    index.close()
    assert len(index) == 0
    uses = [
        lambda: index.add_message(Position(3, 0), deliver_at_ms=1, now_ms=0),
        lambda: index.scheduled_messages(1, now_ms=0),
        lambda: index.has_message_available(now_ms=0),
        lambda: index.advance_mark_delete(Position(3, 0)),
        lambda: index.delayed_message_count,
        lambda: index.memory_bytes,
        lambda: index.next_delivery_ms,
        index.clear,
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()
    recovered, _ = BucketedDelayIndex.recover(config(), storage=storage_of(store), now_ms=0)
    assert len(recovered) == 8
