"""The result of a recovery, whatever the index before it left: each literal story ends in who delivers which
messages."""

from __future__ import annotations

import pytest

from ackstate import MemoryStore, Position, StoreError
from ackstate.delay import BucketedDelayIndex, BucketRecoveryReport, BucketRegistry, DelayConfig, SnapshotStorage
from ackstate.delay.bucket_storage import DroppedBucket, DropReason
from ackstate.stores.memory import Fault, FaultKind
from ackstate.wire.pulsar.delay_snapshot import decode_metadata, encode_metadata
from small_buckets import KEY, config, fill, keys_of, poll, ranges, storage_of

CONFIG, MERGING = config(), config(max_bucket_count=1)


def recover(store, *, now_ms=0, config=CONFIG, **more) -> tuple[BucketedDelayIndex, BucketRecoveryReport]:
    index, report = BucketedDelayIndex.recover(config, storage=storage_of(store), now_ms=now_ms, **more)
    index._check()
    return index, report


@pytest.fixture
def store():
    """Two buckets: snapshot 1 of ledger 3, due from 100, and snapshot 2 of ledger 4, due from 200."""
    store = MemoryStore()
    index = BucketedDelayIndex(CONFIG, storage=storage_of(store))
    fill(index, 3, 100)
    fill(index, 4, 200)
    index.add_message(Position(9, 0), deliver_at_ms=900, now_ms=0)
    return store


LEDGER_3 = [(3, 0), (3, 1), (3, 2), (3, 3)]
LEDGER_4 = [(4, 0), (4, 1), (4, 2), (4, 3)]


def test_what_was_sealed_is_there_again(store):
    index, report = recover(store)
    assert report == BucketRecoveryReport(bucket_count=2, message_count=8)
    assert ranges(index) == [(3, 3, 1, 2), (4, 4, 1, 2)]
    assert index.stats().shared_count == 4
    assert Position(9, 0) not in index
    assert not index.add_message(Position(3, 0), deliver_at_ms=100, now_ms=100)  # due now: deliver it
    assert poll(index, 300) == [*LEDGER_3[1:], *LEDGER_4]
    assert store.ledgers.owned_by("delayed") == []


def test_nothing_stored_is_an_empty_index():
    index, report = recover(MemoryStore())
    assert report == BucketRecoveryReport()
    assert len(index) == 0
    fill(index, 3, 100)
    fill(index, 4, 100)
    assert ranges(index) == [(3, 3, 1, 2)]


def test_segments_that_are_due_are_skipped_and_a_bucket_of_which_all_is_goes(store):
    index, report = recover(store, now_ms=219)
    assert report == BucketRecoveryReport(
        bucket_count=1,
        message_count=2,
        segments_skipped=1,
        dropped=(DroppedBucket(f"{KEY}_3_3", "1", DropReason.DUE),),
    )
    assert ranges(index) == [(4, 4, 2, 2)]
    assert Position(4, 1) not in index
    assert Position(4, 2) in index
    assert keys_of(store) == {f"{KEY}_4_4": "2"}
    assert store.ledgers.owned_by("delayed") == [2]
    assert poll(index, 300) == [(4, 2), (4, 3)]


def test_segments_are_due_a_tick_earlier_unless_delivery_is_strict(store):
    lenient = DelayConfig(min_index_count_per_bucket=4, max_indexes_per_segment=2, tick_time_ms=10)
    _, report = recover(store, now_ms=120, config=lenient)
    assert [each.reason for each in report.dropped] == [DropReason.DUE]


def test_recovering_twice_finds_the_same(store):
    _, first = recover(store)
    _, second = recover(store)
    assert first == second
    assert store.ledgers.owned_by("delayed") == [1, 2]


# Sources of a merge that are still there, and ranges that only look like it.


def crashed_merge(*, mutation) -> MemoryStore:
    """Two mutations take the registry over, three make each bucket and the merged one, four remove the sources."""
    store = MemoryStore(faults=[Fault(mutation, FaultKind.CRASH_BEFORE)])
    index = BucketedDelayIndex(MERGING, storage=storage_of(store))
    fill(index, 3, 100)
    fill(index, 4, 200)
    index.add_message(Position(9, 0), deliver_at_ms=900, now_ms=0)
    return MemoryStore(store.disk)


@pytest.mark.parametrize("mutation", [8, 9, 10])
def test_before_a_merged_bucket_is_registered_its_sources_count(mutation):
    store = crashed_merge(mutation=mutation)
    index, report = recover(store)
    assert ranges(index) == [(3, 3, 1, 2), (4, 4, 1, 2)]
    assert (report.message_count, report.dropped, report.orphan_count) == (8, (), int(mutation > 8))
    assert store.ledgers.owned_by("delayed") == [1, 2]
    assert poll(index, 300) == [*LEDGER_3, *LEDGER_4]


@pytest.mark.parametrize(
    ("mutation", "replaced", "orphan_count"), [(11, [3, 4], 0), (12, [4], 1), (13, [4], 0), (14, [], 1), (15, [], 0)]
)
def test_a_merged_bucket_replaces_the_sources_that_are_left(mutation, replaced, orphan_count):
    store = crashed_merge(mutation=mutation)
    index, report = recover(store)
    assert ranges(index) == [(3, 4, 1, 4)]
    assert (report.message_count, report.orphan_count) == (8, orphan_count)
    assert [(each.name, each.reason) for each in report.dropped] == [
        (f"{KEY}_{ledger_id}_{ledger_id}", DropReason.REPLACED) for ledger_id in replaced
    ]
    assert store.ledgers.owned_by("delayed") == [3]
    assert keys_of(store) == {f"{KEY}_3_4": "3"}
    assert poll(index, 300) == [*LEDGER_3, *LEDGER_4]


def test_a_bucket_sealed_after_a_recovery_may_cover_a_recovered_one_and_both_deliver(store):
    index, _ = recover(store)
    # Ledgers on both sides of the recovered ones: the sealed bucket covers 2 to 6, and with it 3 and 4.
    for position, deliver_at_ms in [((2, 0), 150), ((2, 1), 400), ((6, 0), 250), ((6, 1), 500)]:
        index.add_message(Position(*position), deliver_at_ms=deliver_at_ms, now_ms=0)
    index.add_message(Position(7, 0), deliver_at_ms=900, now_ms=0)
    assert ranges(index) == [(2, 6, 1, 2), (3, 3, 1, 2), (4, 4, 1, 2)]
    again, report = recover(store)
    assert ranges(again) == ranges(index)
    assert report.dropped == ()
    for each in (index, again):
        assert poll(each, 160) == [(2, 0), *LEDGER_3]
        assert poll(each, 500) == [(2, 1), *LEDGER_4, (6, 0), (6, 1)]
    assert poll(index, 900) == [(7, 0)]
    assert store.ledgers.owned_by("delayed") == []
    assert keys_of(store) == {}


def test_merging_what_overlaps_may_replace_the_snapshot_under_the_key_of_a_source(store):
    index, _ = recover(store, config=MERGING)
    for position, deliver_at_ms in [((2, 0), 150), ((2, 1), 400), ((6, 0), 250), ((6, 1), 500)]:
        index.add_message(Position(*position), deliver_at_ms=deliver_at_ms, now_ms=0)
    index.add_message(Position(7, 0), deliver_at_ms=900, now_ms=0)
    assert ranges(index) == [(2, 6, 1, 6)]
    assert keys_of(store) == {f"{KEY}_2_6": "4"}
    assert store.ledgers.owned_by("delayed") == [4]
    again, report = recover(store)
    assert (report.message_count, report.dropped) == (12, ())
    assert poll(again, 900) == [(2, 0), (2, 1), *LEDGER_3, *LEDGER_4, (6, 0), (6, 1)]


# Damage.


def dropped(store, **more) -> tuple[BucketedDelayIndex, DroppedBucket]:
    """Recover, expect ledger 4 to be there and one other bucket dropped and gone, and return which."""
    index, report = recover(store, **more)
    (drop,) = report.dropped
    assert (report.bucket_count, report.message_count, report.fell_back) == (1, 4, "")
    assert not any(Position(*position) in index for position in LEDGER_3)
    # The dispatcher reads the messages again.
    for entry_id in range(4):
        assert index.add_message(Position(3, entry_id), deliver_at_ms=100 + 10 * entry_id, now_ms=0)
    assert poll(index, 99) == []
    assert poll(index, 300) == [*LEDGER_3, *LEDGER_4]
    return index, drop


def test_a_snapshot_that_is_missing(store):
    store.ledgers.delete(1)
    _, drop = dropped(store)
    assert drop == DroppedBucket(f"{KEY}_3_3", "1", DropReason.MISSING)
    assert keys_of(store) == {}


def test_a_snapshot_that_is_empty(store):
    store.disk.ledgers[1].entries.clear()
    _, drop = dropped(store)
    assert drop == DroppedBucket(f"{KEY}_3_3", "1", DropReason.EMPTY)
    assert store.ledgers.owned_by("delayed") == []


@pytest.mark.parametrize("entry", [0, 1])
def test_a_snapshot_that_is_damaged_anywhere_it_is_read(store, entry):
    whole = store.disk.ledgers[1].entries[entry]
    for data in [whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"\x00", b"", b"\xff" * 9]:
        disk = MemoryStore()
        index = BucketedDelayIndex(CONFIG, storage=storage_of(disk))
        fill(index, 3, 100)
        fill(index, 4, 200)
        index.add_message(Position(9, 0), deliver_at_ms=900, now_ms=0)
        disk.disk.ledgers[1].entries[entry] = data
        _, drop = dropped(disk)
        assert (drop.name, drop.reason) == (f"{KEY}_3_3", DropReason.DAMAGED)
        assert drop.detail


@pytest.mark.slow
@pytest.mark.parametrize("entry", [0, 1, 2])
def test_any_bit_that_flips_is_found_and_nothing_is_early_or_lost(store, entry):
    whole = store.disk.ledgers[1].entries[entry]
    for bit in range(0, 8 * len(whole), 7):  # some bit of each byte
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged = MemoryStore()
        index = BucketedDelayIndex(CONFIG, storage=storage_of(damaged))
        fill(index, 3, 100)
        fill(index, 4, 200)
        index.add_message(Position(9, 0), deliver_at_ms=900, now_ms=0)
        damaged.disk.ledgers[1].entries[entry] = bytes(flipped)
        index, report = recover(damaged)
        fill(index, 3, 100)
        assert poll(index, 99) == []
        # A segment that is found damaged when it is loaded is late.
        assert poll(index, 119) == [(3, 0), (3, 1)]
        assert poll(index, 129) == ([(3, 2)] if entry < 2 else [])
        assert poll(index, 300) == [*LEDGER_3[2 + (entry < 2) :], *LEDGER_4]
        assert len(report.dropped) == (entry < 2)
        assert len(index.stats().damaged) == (entry == 2)


def test_a_snapshot_that_is_cut(store):
    del store.disk.ledgers[1].entries[2]
    _, drop = dropped(store)
    assert drop == DroppedBucket(f"{KEY}_3_3", "1", DropReason.DAMAGED, "expected 2 segments, found 1")


def test_a_snapshot_of_another_bucket(store):
    registry = storage_of(store).registry
    registry.remove(f"{KEY}_3_3")
    registry.put(f"{KEY}_2_2", "1")
    _, drop = dropped(store)
    assert drop == DroppedBucket(f"{KEY}_2_2", "1", DropReason.DAMAGED, "expected ledgers 2 to 2, found 3 to 3")


def test_a_snapshot_of_a_newer_release(store):
    metadata = decode_metadata(store.disk.ledgers[1].entries[0], what="metadata")
    as_pulsar = encode_metadata(
        [type(each)(each.bitmaps, each.min_deliver_at_ms, each.max_deliver_at_ms) for each in metadata]
    )
    store.disk.ledgers[1].entries[0] = as_pulsar + b"\x78\x01"  # field 15, a number
    _, drop = dropped(store)
    assert (drop.name, drop.reason) == (f"{KEY}_3_3", DropReason.NEWER)


def test_a_snapshot_that_pulsar_wrote(store):
    metadata = decode_metadata(store.disk.ledgers[1].entries[0], what="metadata")
    store.disk.ledgers[1].entries[0] = encode_metadata(
        [type(each)(each.bitmaps, each.min_deliver_at_ms, each.max_deliver_at_ms) for each in metadata]
    )
    index, report = recover(store)
    assert report == BucketRecoveryReport(bucket_count=2, message_count=8)
    assert poll(index, 300) == [*LEDGER_3, *LEDGER_4]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{KEY}_3", "1"),
        (f"{KEY}_3_4_5", "1"),
        (f"{KEY}_x_4", "1"),
        (f"{KEY}_3_4", "-1"),
        (f"{KEY}_3_4", ""),
        (f"{KEY}s", "²"),
    ],
)
def test_a_malformed_entry_of_the_registry_is_reported_and_left(store, name, text):
    storage_of(store).registry.put(name, text)
    index, report = recover(store)
    (drop,) = report.dropped
    assert (drop.name, drop.text, drop.reason) == (name, text, DropReason.MALFORMED)
    assert drop.detail
    assert report.message_count == 8
    assert keys_of(store)[name] == text
    index.clear()
    assert keys_of(store) == {}


def test_a_second_key_of_a_snapshot_that_cannot_be_removed_does_not_end_the_recovery(store):
    storage_of(store).registry.put(f"{KEY}_3_4", "1")
    for attempt in range(1, 5):  # after the registry was taken over
        store.inject(Fault(store.mutation_count + attempt, FaultKind.FAIL_BEFORE))
    _, report = recover(store)
    assert (report.bucket_count, report.message_count, report.fell_back) == (2, 8, "")
    assert f"{KEY}_3_3" in keys_of(store)
    recover(store)
    assert f"{KEY}_3_3" not in keys_of(store)


def test_a_snapshot_that_nothing_names_is_deleted(store):
    storage_of(store).registry.remove(f"{KEY}_3_3")
    foreign = store.ledgers.create("another owner")
    _, report = recover(store)
    assert (report.bucket_count, report.orphan_count) == (1, 1)
    assert store.ledgers.owned_by("delayed") == [2]
    assert store.ledgers.owned_by("another owner") == [foreign]


# When the storage fails.


def test_storage_that_fails_is_not_damage(store):
    class Broken:
        def __init__(self):
            self.calls = 0

        def __getattr__(self, name):
            return getattr(store.ledgers, name)

        def read(self, ledger_id, first, end):
            self.calls += 1
            raise StoreError("not now")

    broken = Broken()
    registry = BucketRegistry(store.metadata, "/buckets")
    index, report = BucketedDelayIndex.recover(CONFIG, storage=SnapshotStorage(broken, registry, "delayed"), now_ms=0)
    assert report == BucketRecoveryReport(fell_back="not now")
    assert broken.calls == 4
    assert len(keys_of(store)) == 2
    assert store.ledgers.owned_by("delayed") == [1, 2]
    # The bucket that it fell back from is deleted by `clear`, after which it seals again.
    index.clear()
    assert keys_of(store) == {}
    assert store.ledgers.owned_by("delayed") == []
    fill(index, 5, 100)
    fill(index, 6, 100)
    assert ranges(index) == [(5, 5, 1, 2)]


def test_a_recovery_refuses_a_time_that_cannot_be(store):
    with pytest.raises(ValueError, match="now_ms"):
        recover(store, now_ms=-1)
