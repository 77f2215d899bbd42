"""One behaviour of the bucketed index at a time: seals, loads, merges and drops, and failures of its storage."""

from __future__ import annotations

import numpy as np
import pytest

from ackstate import CorruptStateError, MemoryStore, Position, StoreError
from ackstate.delay import BucketedDelayIndex, BucketRegistry, DelayConfig, SnapshotStorage
from ackstate.delay.buckets import cut_segments
from ackstate.stores.memory import Fault, FaultKind
from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes, decode_metadata, decode_segment
from small_buckets import KEY, add, config, fill, keys_of, many_buckets, poll, ranges, storage_of

TIME_MAX = 2**63 - 1


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def index(store):
    return BucketedDelayIndex(config(), storage=storage_of(store))


def fail(store, *, after=0, times=4) -> None:
    """Let mutations fail: four, and every attempt has failed."""
    for at in range(after, after + times):
        store.inject(Fault(store.mutation_count + at, FaultKind.FAIL_BEFORE))


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
    with pytest.raises(ValueError, match="max_messages must be at least 0, got -1"):
        poll(index, 0, max_messages=-1)
    add(index, (3, 0, 40), (3, 1, 20), (3, 2, 30), (3, 3, 20))
    assert poll(index, 100, max_messages=0) == []
    assert poll(index, 100, max_messages=3) == [(3, 1), (3, 2), (3, 3)]
    assert index.delayed_message_count == 1
    assert poll(index, 100) == [(3, 0)]


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


@pytest.mark.parametrize(
    ("settings", "messages", "sealed"),
    [
        ({}, [(3, 0, 100), (4, 0, 100), (6, 0, 100)], []),
        ({}, [(3, 0, 100), (4, 0, 100), (6, 0, 100), (6, 1, 100), (7, 0, 100)], [(3, 6)]),
        ({"ledger_step_per_bucket": 3}, [(3, 0, 100), (5, 0, 100)], []),
        ({"ledger_step_per_bucket": 3}, [(3, 0, 100), (5, 0, 100), (6, 0, 100)], [(3, 5)]),
    ],
)
def test_a_bucket_goes_on_over_ledgers_until_it_is_full_or_spans_the_ledger_step(store, settings, messages, sealed):
    index = BucketedDelayIndex(config(**settings), storage=storage_of(store))
    add(index, *messages)
    assert [each[:2] for each in ranges(index)] == sealed


def test_without_storage_all_stays_in_memory():
    index = BucketedDelayIndex(DelayConfig(min_index_count_per_bucket=1))
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


def arrays(*rows) -> DelayedIndexes:
    return DelayedIndexes(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"max_indexes_per_segment": None}, [4, 1, 1]),
        ({"max_indexes_per_segment": 3}, [3, 2, 1]),
        ({"max_indexes_per_segment": None, "max_time_step_per_segment_ms": 1}, [2, 1, 1, 1, 1]),
        ({"max_indexes_per_segment": None, "max_time_step_per_segment_ms": 2**63 - 1}, [6]),
    ],
)
def test_segments_are_cut_by_time_and_count(settings, sizes):
    rows = [(100, 3, 0), (100, 3, 1), (105, 3, 2), (109, 3, 3), (110, 3, 4), (TIME_MAX, 3, 5)]
    cut = cut_segments(arrays(*rows), DelayConfig(**({"max_time_step_per_segment_ms": 10} | settings)))
    assert [len(segment.entry_ids) for segment in cut] == sizes
    assert np.concatenate([segment.entry_ids for segment in cut]).tolist() == [0, 1, 2, 3, 4, 5]


def test_of_a_position_twice_in_a_segment_the_later_time_stays():
    once = cut_segments(arrays((100, 3, 0), (100, 3, 1), (105, 3, 0)), DelayConfig(max_indexes_per_segment=None))
    assert [column.tolist() for column in once[0]] == [[100, 105], [3, 3], [1, 0]]


def test_memory_is_that_of_a_segment_a_bucket_not_of_what_is_sealed(store):
    sealed = BucketedDelayIndex(config(max_indexes_per_segment=1000), storage=storage_of(store))
    unsealed = BucketedDelayIndex(config())
    for index in (sealed, unsealed):
        for entry_id in range(20_000):
            index._keep(Position(3, entry_id), 1_000_000 + 7919 * entry_id % 1_000_000)
        index._keep(Position(4, 0), 9_000_000)
        assert len(index) == 20_001
    assert sealed.stats().shared_count == 1000
    assert sealed.memory_bytes < unsealed.memory_bytes / 2


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


@pytest.mark.parametrize(("first_fault", "left_count"), [(0, 3), (2, 3), (3, 3), (5, 1)])
def test_a_second_clear_deletes_what_the_first_could_not(store, index, first_fault, left_count):
    many_buckets(index, count=3)
    fail(store, after=first_fault)
    with pytest.raises(StoreError):
        index.clear()
    assert len(index) == 0
    assert len(store.ledgers.owned_by("delayed")) == left_count
    assert set(keys_of(store).values()) <= set(map(str, store.ledgers.owned_by("delayed")))
    index.clear()
    assert store.ledgers.owned_by("delayed") == []
    assert keys_of(store) == {}


def test_a_mark_delete_drops_every_bucket_that_it_passes_though_one_cannot_be_deleted(store, index):
    many_buckets(index, count=3)
    fail(store)
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


# Failures of the storage.


def test_a_bucket_that_cannot_be_written_stays_in_memory(store, index):
    fill(index, 3, 100)
    fail(store)
    add(index, (4, 0, 500))
    assert ranges(index) == []
    assert len(index) == 5
    assert poll(index, 1000) == [(3, 0), (3, 1), (3, 2), (3, 3), (4, 0)]


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_write_is_tried_four_times_and_its_leftovers_are_deleted(store, index, kind, skipped):
    fill(index, 3, 100)
    # Every other mutation, so that it is once the ledger that cannot be made and once its entries.
    for attempt in range(3):
        store.inject(Fault(store.mutation_count + (1 + skipped) * attempt + skipped, kind))
    add(index, (4, 0, 500))
    assert ranges(index) == [(3, 3, 1, 2)]
    index.clear()
    assert store.ledgers.owned_by("delayed") == []
    assert keys_of(store) == {}


def test_a_bucket_that_cannot_be_registered_is_used_and_registered_with_the_next(store, index):
    fill(index, 3, 100)
    fail(store, after=4)
    add(index, (4, 0, 500))
    # Sealing tries a failed call once more before it returns.
    assert keys_of(store) == {f"{KEY}_3_3": "1"}


class Ledgers:
    """Ledgers of which reads fail a number of times, with an error; the sizes of appends are noted."""

    def __init__(self, ledgers):
        self.ledgers, self.failures, self.error, self.sizes, self.reads = ledgers, 0, StoreError("not now"), [], []

    def __getattr__(self, name):
        return getattr(self.ledgers, name)

    def append(self, ledger_id, entries):
        self.sizes.append(sum(map(len, entries)))
        return self.ledgers.append(ledger_id, entries)

    def read(self, ledger_id, first, end):
        self.reads.append(first)
        if self.failures:
            self.failures -= 1
            raise self.error
        return self.ledgers.read(ledger_id, first, end)


@pytest.fixture
def failing(store):
    return Ledgers(store.ledgers)


def index_on(failing, store, **settings) -> BucketedDelayIndex:
    registry = BucketRegistry(store.metadata, "/buckets")
    return BucketedDelayIndex(config(**settings), storage=SnapshotStorage(failing, registry, "delayed"))


def test_a_load_is_tried_four_times_then_again_at_the_next_poll(store, failing):
    index = index_on(failing, store)
    fill(index, 3, 100)
    add(index, (4, 0, 500))
    failing.failures = 5
    assert poll(index, 200) == [(3, 0)]
    assert len(index) == 4
    assert index.has_message_available(now_ms=200)
    assert index.next_delivery_ms == 1_200
    assert ranges(index) == [(3, 3, 1, 2)]
    assert poll(index, 200) == [(3, 1), (3, 2), (3, 3)]
    assert ranges(index) == []


def test_a_corrupt_error_of_the_store_is_not_tried_again(store, failing):
    failing.failures, failing.error = 9, CorruptStateError("page", offset=0, expected="a page", found="noise")
    index = index_on(failing, store)
    fill(index, 3, 100)
    add(index, (4, 0, 500))
    assert poll(index, 120) == [(3, 0), (3, 1)]
    assert failing.reads == [2]
    assert poll(index, 130) == [(3, 2), (3, 3)]


@pytest.mark.parametrize("answer", [KeyError("once"), [9_000]])
def test_a_poll_that_raises_takes_nothing(store, answer):
    """What the caller's own code raises, or a wrong number of times from it."""
    answers = [answer]

    def read_deliver_at_ms(positions):
        given = answers.pop() if answers else [1_000 * (1 + entry_id) for _, entry_id in positions]
        if isinstance(given, Exception):
            raise given
        return given

    index = BucketedDelayIndex(config(), storage=storage_of(store, read_deliver_at_ms=read_deliver_at_ms))
    fill(index, 1, 1_000)
    add(index, (2, 0, 9_000))
    store.ledgers.delete(store.ledgers.owned_by("delayed")[0])
    with pytest.raises((KeyError, ValueError)):
        poll(index, 8_000)
    assert len(index) == 5
    index._check()
    assert poll(index, 8_000) == [(1, entry_id) for entry_id in range(4)]


def corrupt(store, bucket_id, entry, data) -> None:
    store.disk.ledgers[bucket_id].entries[entry] = data


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "foreign"])
def test_a_segment_that_is_damaged_or_gone_is_made_up_late_not_lost(store, index, damage):
    add(index, (3, 0, 10), (3, 1, 20), (3, 2, 30), (3, 3, 40), (4, 0, 99))
    segment = store.ledgers.read(1, 2, 3)[0]
    if damage == "gone":
        store.ledgers.delete(1)
    else:
        corrupt(store, 1, 2, {"cut": segment[:-1], "flipped": segment[:-1] + b"\x07", "foreign": b""}[damage])
    assert poll(index, 25) == [(3, 0), (3, 1)]
    assert len(index) == 3
    assert poll(index, 39) == []  # 3:2 is late, since only the metadata tells of it
    assert poll(index, 40) == [(3, 2), (3, 3)]
    (damaged,) = index.stats().damaged
    assert (damaged.bucket_id, damaged.key, damaged.segment) == (1, (3, 3), 2)
    assert damaged.reason
    assert poll(index, 99) == [(4, 0)]


# Merging.


def all_of(count) -> list[tuple[int, int]]:
    return [(3 + number, entry_id) for number in range(count) for entry_id in range(4)]


def test_too_many_buckets_are_merged_with_all_of_their_messages(store):
    index = BucketedDelayIndex(config(max_bucket_count=3), storage=storage_of(store))
    many_buckets(index, count=4)
    assert ranges(index) == [(3, 6, 1, 8)]
    assert list(keys_of(store)) == [f"{KEY}_3_6"]
    assert store.ledgers.owned_by("delayed") == [5]
    assert len(index) == 17
    assert poll(index, 1000) == [(3, 0)]
    assert poll(index, 8000) == all_of(4)[1:]


@pytest.mark.parametrize(
    ("large_first_ms", "expected"),
    [
        # The fewest messages; of as many, those due first.
        (5000, [(3, 3), (4, 4), (5, 8)]),
        # As Pulsar: fewer are not chosen if they are due later than more that come before them.
        (100, [(3, 6), (7, 7), (8, 8)]),
    ],
)
def test_the_smallest_neighbours_are_merged(store, large_first_ms, expected):
    index = BucketedDelayIndex(config(max_bucket_count=5), storage=storage_of(store))
    fill(index, 3, large_first_ms, count=9)
    for ledger_id in (4, 5, 6, 7, 8):
        fill(index, ledger_id, 2000 - 100 * ledger_id)
    add(index, (9, 0, 9000))
    assert [each[:2] for each in ranges(index)] == expected


@pytest.mark.parametrize("what", ["read", "write", "register", "damage"])
def test_a_merge_that_fails_leaves_everything_as_it_was(store, failing, what):
    index = index_on(failing, store, max_bucket_count=1)
    fill(index, 3, 1000)
    fill(index, 4, 1100)
    if what == "read":
        failing.failures = 4
    elif what == "damage":
        corrupt(store, 1, 2, b"\xff")
    else:  # behind the ledger, the entries and the key of the second bucket
        fail(store, after=3 if what == "write" else 5)
    add(index, (5, 0, 9000))
    assert ranges(index) == [(3, 3, 1, 2), (4, 4, 1, 2)]
    assert keys_of(store) == {f"{KEY}_3_3": "1", f"{KEY}_4_4": "2"}
    recovered, report = BucketedDelayIndex.recover(config(), storage=storage_of(store), now_ms=0)
    assert (report.bucket_count, report.message_count, report.dropped) == (2, 8, ())
    assert poll(index, 8000) == poll(recovered, 8000) == all_of(2)


# On real storage.


@pytest.mark.slow
def test_a_large_bucket_is_written_by_requests_of_half_a_megabyte(store, failing):
    settings = {"min_index_count_per_bucket": 100_000, "max_indexes_per_segment": 5_000}
    index = index_on(failing, store, **settings)
    add(index, *((3, entry_id, 10**12 + 7919 * entry_id % 10**6) for entry_id in range(100_000)), (4, 0, 10**12))
    assert len(failing.sizes) >= 3
    assert max(failing.sizes) <= 512 * 1024
    recovered, report = BucketedDelayIndex.recover(config(**settings), storage=storage_of(store), now_ms=0)
    assert (report.bucket_count, len(recovered), report.dropped) == (1, 100_000, ())
