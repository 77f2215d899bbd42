"""The bucketed index and its storage: failures, damage, merges, snapshots that others refer to."""

from __future__ import annotations

import pytest

from ackstate import CorruptStateError, MemoryStore, Position, SqliteStore, StoreError
from ackstate.delay import BucketedDelayIndex, BucketRegistry, SnapshotStorage
from ackstate.stores.memory import Fault, FaultKind
from small_buckets import KEY, add, config, fill, keys_of, many_buckets, poll, ranges, storage_of


def corrupt(store, bucket_id, entry, data) -> None:
    store.disk.ledgers[bucket_id].entries[entry] = data


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def index(store):
    return BucketedDelayIndex(config(), storage=storage_of(store))


# Failures of the storage.


def fail(store, kind, *, times) -> None:
    """Let the next mutations fail."""
    for at in range(times):
        store.inject(Fault(store.mutation_count + at, kind))


def test_a_bucket_that_cannot_be_written_stays_in_memory(store, index):
    fill(index, 3, 100)
    fail(store, FaultKind.FAIL_BEFORE, times=4)
    add(index, (4, 0, 500))
    assert ranges(index) == []
    assert len(index) == 5
    assert index.stats().failed == {"create": 1}
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
    for at in (4, 5, 6, 7):
        store.inject(Fault(store.mutation_count + at, FaultKind.FAIL_BEFORE))
    add(index, (4, 0, 500))
    # Sealing tries a failed call once more before it returns.
    assert keys_of(store) == {f"{KEY}_3_3": "1"}


class Ledgers:
    """Ledgers of which reads can be made to fail."""

    def __init__(self, ledgers):
        self.ledgers, self.failures = ledgers, 0
        self.create, self.append, self.delete = ledgers.create, ledgers.append, ledgers.delete
        self.last, self.owned_by = ledgers.last, ledgers.owned_by

    def read(self, ledger_id, first, end):
        if self.failures:
            self.failures -= 1
            raise StoreError("cannot read, as scripted")
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
    assert index.stats().failed == {"load": 1}


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
    assert index.stats().succeeded["merge"] == 1


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


def test_a_bucket_in_its_last_segment_is_not_merged(store):
    index = BucketedDelayIndex(config(max_bucket_count=1, max_indexes_per_segment=None), storage=storage_of(store))
    many_buckets(index, count=3)
    assert len(ranges(index)) == 3


@pytest.mark.parametrize("what", ["read", "write", "register"])
def test_a_merge_that_fails_leaves_everything_as_it_was(store, failing, what):
    index = index_on(failing, store, max_bucket_count=1)
    fill(index, 3, 1000)
    fill(index, 4, 1100)
    if what == "read":
        failing.failures = 4
    elif what == "write":  # behind the ledger, the entries and the key of the second bucket
        for at in range(3, 7):
            store.inject(Fault(store.mutation_count + at, FaultKind.FAIL_BEFORE))
    else:
        for at in range(5, 9):
            store.inject(Fault(store.mutation_count + at, FaultKind.FAIL_BEFORE))
    add(index, (5, 0, 9000))
    assert ranges(index) == [(3, 3, 1, 2), (4, 4, 1, 2)]
    assert keys_of(store) == {f"{KEY}_3_3": "1", f"{KEY}_4_4": "2"}
    assert index.stats().failed["merge"] == 1
    recovered, report = BucketedDelayIndex.recover(config(), storage=storage_of(store), now_ms=0)
    assert (report.bucket_count, report.message_count, report.dropped) == (2, 8, ())
    assert poll(index, 8000) == poll(recovered, 8000) == all_of(2)


def test_a_damaged_source_is_not_merged_away(store):
    index = BucketedDelayIndex(config(max_bucket_count=1), storage=storage_of(store))
    fill(index, 3, 1000)
    fill(index, 4, 1100)
    corrupt(store, 1, 2, b"\xff")
    add(index, (5, 0, 9000))
    assert len(ranges(index)) == 2
    assert poll(index, 8000) == all_of(2)


@pytest.mark.slow
def test_merging_again_and_again_loses_nothing(store):
    index = BucketedDelayIndex(config(max_bucket_count=2), storage=storage_of(store))
    many_buckets(index, count=25)
    assert len(ranges(index)) <= 2
    assert len(store.ledgers.owned_by("delayed")) == len(ranges(index))
    taken = []
    for now_ms in range(1000, 4000, 35):
        due = poll(index, now_ms)
        assert due == [each for each in all_of(25) if now_ms - 35 < 1000 + 100 * (each[0] - 3) + 10 * each[1] <= now_ms]
        taken += due
    assert sorted(taken) == all_of(25)


# On real storage.


def test_on_a_disk(tmp_path):
    def opened():
        store = SqliteStore(tmp_path / "store.db")
        registry = BucketRegistry(store.metadata, "/delayed-buckets/t")
        return store, registry, SnapshotStorage(store.ledgers, registry, "delayed/t/s")

    store, registry, storage = opened()
    index = BucketedDelayIndex(config(), storage=storage)
    many_buckets(index, count=2)
    bucket_ids = store.ledgers.owned_by("delayed/t/s")
    expected = {f"{KEY}_3_3": str(bucket_ids[0]), f"{KEY}_4_4": str(bucket_ids[1])}
    assert registry.get_all() == expected
    store.close()
    store, registry, storage = opened()
    index, report = BucketedDelayIndex.recover(config(), storage=storage, now_ms=0)
    assert (report.bucket_count, report.message_count) == (2, 8)
    assert registry.get_all() == expected
    assert poll(index, 1105) == [(3, 0), (3, 1), (3, 2), (3, 3), (4, 0)]
    index.clear()
    assert registry.get_all() == {}
    assert store.ledgers.owned_by("delayed/t/s") == []
    store.close()


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


def test_a_corrupt_error_of_the_store_is_not_tried_again(store, index):
    calls = []

    class Broken(Ledgers):
        def read(self, ledger_id, first, end):
            calls.append(first)
            raise CorruptStateError("page", offset=0, expected="a page", found="noise")

    broken = index_on(Broken(store.ledgers), store)
    fill(broken, 3, 100)
    add(broken, (4, 0, 500))
    assert poll(broken, 120) == [(3, 0), (3, 1)]
    assert calls == [2]
    assert poll(broken, 130) == [(3, 2), (3, 3)]


@pytest.mark.slow
def test_a_large_bucket_is_written_by_requests_of_half_a_megabyte():
    store, sizes = MemoryStore(), []

    class Counting:
        def __getattr__(self, name):
            return getattr(store.ledgers, name)

        def append(self, ledger_id, entries):
            sizes.append(sum(map(len, entries)))
            return store.ledgers.append(ledger_id, entries)

    storage = SnapshotStorage(Counting(), BucketRegistry(store.metadata, "/buckets"), "delayed")
    settings = config(min_index_count_per_bucket=100_000, max_indexes_per_segment=5_000)
    index = BucketedDelayIndex(settings, storage=storage)
    for entry_id in range(100_000):
        index.add_message(Position(3, entry_id), deliver_at_ms=10**12 + 7919 * entry_id % 10**6, now_ms=0)
    index.add_message(Position(4, 0), deliver_at_ms=10**12, now_ms=0)
    assert len(sizes) >= 3
    assert max(sizes) <= 512 * 1024
    recovered, report = BucketedDelayIndex.recover(settings, storage=storage, now_ms=0)
    assert (report.bucket_count, len(recovered), report.dropped) == (1, 100_000, ())
