"""One behaviour of the bucketed index at a time: seals, loads, merges and drops, and failures of its storage."""

from __future__ import annotations

import numpy as np
import pytest

from ackstate import Position, StoreError
from ackstate.delay import BucketedDelayIndex, BucketRegistry, DelayConfig, SnapshotStorage
from ackstate.delay.buckets import cut_segments
from ackstate.stores.memory import Fault, FaultKind
from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes, decode_metadata, decode_segment
from small_buckets import KEY, add, config, fill, keys_of, many_buckets, poll, ranges, storage_of


@pytest.fixture
def index(store):
    return BucketedDelayIndex(config(), storage=storage_of(store))


def fail(store, *, after=0, times=4) -> None:
    """Let mutations fail: four, and every attempt has failed."""
    for at in range(after, after + times):
        store.inject(Fault(store.mutation_count + at, FaultKind.FAIL_BEFORE))


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


def arrays(*rows) -> DelayedIndexes:
    return DelayedIndexes(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


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
    assert (unsealed.stats().mutable_count, sealed.stats().mutable_count) == (20_001, 1)


# The mark-delete position, `clear`, `close`.


def test_the_first_ledger_counts_as_any_other_and_after_a_clear_too(index):
    for now_ms in (50, 60):
        add(index, (0, 0, now_ms))
        assert poll(index, now_ms) == [(0, 0)]
        index.clear()


def test_an_owner_that_clears_what_another_left_refuses_the_other(store, index):
    many_buckets(index, count=1)
    BucketedDelayIndex(config(), storage=storage_of(store)).clear()
    assert keys_of(store) == {}
    many_buckets(index, count=3)
    assert keys_of(store) == {}


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
    index._sealed.catch_up()
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
        lambda: index.unknown([Position(3, 0)], now_ms=0),
        lambda: index.advance_mark_delete(Position(3, 0)),
        lambda: index.delayed_message_count,
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
    assert index.next_delivery_ms == 1_200
    assert ranges(index) == [(3, 3, 1, 2)]
    assert poll(index, 200) == [(3, 1), (3, 2), (3, 3)]
    assert ranges(index) == []
    assert index.next_delivery_ms == 500


def test_a_bucket_that_could_not_be_registered_is_registered_later(store, index):
    fill(index, 3, 100)
    fail(store, after=4, times=8)  # The registry is taken over in two, then the ledger and its entries.
    add(index, (4, 0, 500))
    assert (keys_of(store), len(ranges(index))) == ({}, 1)
    index._sealed.catch_up()
    assert keys_of(store) == {f"{KEY}_3_3": "1"}


def test_a_look_at_what_waits_moves_the_time_on(index):
    add(index, (3, 0, 200))
    assert not index.unknown([Position(3, 0)], now_ms=150)
    assert not index.add_message(Position(3, 1), deliver_at_ms=120, now_ms=0)


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
