"""The result of a recovery, whatever the index before it left: each literal story ends in who delivers which
messages."""

from __future__ import annotations

import pytest

from ackstate import MemoryStore, Position, StoreError
from ackstate.delay import BucketedDelayIndex, BucketRecoveryReport, BucketRegistry, SnapshotStorage
from ackstate.stores.memory import Fault, FaultKind
from ackstate.wire.pulsar.delay_snapshot import decode_metadata, encode_metadata
from small_buckets import KEY, config, fill, keys_of, poll, ranges, storage_of

CONFIG, MERGING = config(), config(max_bucket_count=1)


def recover(store, *, now_ms=0, config=CONFIG, **more) -> tuple[BucketedDelayIndex, BucketRecoveryReport]:
    index, report = BucketedDelayIndex.recover(config, storage=storage_of(store), now_ms=now_ms, **more)
    index._check()
    return index, report


def sealed(config=CONFIG, **more):
    """Two buckets: snapshot 1 of ledger 3, due from 100, and snapshot 2 of ledger 4, due from 200."""
    store = MemoryStore(**more)
    index = BucketedDelayIndex(config, storage=storage_of(store))
    fill(index, 3, 100)
    fill(index, 4, 200)
    index.add_message(Position(9, 0), deliver_at_ms=900, now_ms=0)
    return store


@pytest.fixture
def store():
    return sealed()


LEDGER_3 = [(3, 0), (3, 1), (3, 2), (3, 3)]
LEDGER_4 = [(4, 0), (4, 1), (4, 2), (4, 3)]


def test_what_was_sealed_is_there_again_and_again(store):
    _, first = recover(store)
    index, report = recover(store)
    assert first == report == BucketRecoveryReport(bucket_count=2, message_count=8)
    assert ranges(index) == [(3, 3, 1, 2), (4, 4, 1, 2)]
    assert index.stats().shared_count == 4
    assert Position(9, 0) not in index
    assert not index.add_message(Position(3, 0), deliver_at_ms=100, now_ms=100)  # due now: deliver it
    assert poll(index, 300) == [*LEDGER_3[1:], *LEDGER_4]
    assert store.ledgers.owned_by("delayed") == []


# Sources of a merge that are still there, and ranges that only look like it.


def crashed_merge(*, mutation) -> MemoryStore:
    """Two mutations take the registry over, three make each bucket and the merged one, four remove the sources."""
    return MemoryStore(sealed(MERGING, faults=[Fault(mutation, FaultKind.CRASH_BEFORE)]).disk)


@pytest.mark.parametrize(
    ("mutation", "is_merged", "replaced", "orphan_count"),
    [
        (8, False, [], 0), (9, False, [], 1), (10, False, [], 1),
        (11, True, [3, 4], 0), (12, True, [4], 1), (13, True, [4], 0), (14, True, [], 1), (15, True, [], 0),
    ],
)  # fmt: skip
def test_the_sources_of_a_merge_count_until_it_is_registered_and_are_replaced_then(
    mutation, is_merged, replaced, orphan_count
):
    store = crashed_merge(mutation=mutation)
    index, report = recover(store)
    assert ranges(index) == ([(3, 4, 1, 4)] if is_merged else [(3, 3, 1, 2), (4, 4, 1, 2)])
    assert (report.message_count, report.orphan_count) == (8, orphan_count)
    assert [each.name for each in report.dropped] == [f"{KEY}_{ledger_id}_{ledger_id}" for ledger_id in replaced]
    assert all("it was merged" in each.reason for each in report.dropped)
    assert store.ledgers.owned_by("delayed") == ([3] if is_merged else [1, 2])
    assert keys_of(store) == ({f"{KEY}_3_4": "3"} if is_merged else {f"{KEY}_3_3": "1", f"{KEY}_4_4": "2"})
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


# Damage.


def with_entry(entry, change):
    """Return a function that changes an entry of snapshot 1."""

    def changed(store):
        entries = store.disk.ledgers[1].entries
        entries[entry] = change(entries[entry])

    return changed


def as_pulsar(encoded):
    metadata = decode_metadata(encoded, what="metadata")
    return encode_metadata(
        [type(each)(each.bitmaps, each.min_deliver_at_ms, each.max_deliver_at_ms) for each in metadata]
    )


def under_another_key(store):
    registry = storage_of(store).registry
    registry.remove(f"{KEY}_3_3")
    registry.put(f"{KEY}_2_2", "1")


DAMAGES = [
    (lambda store: store.ledgers.delete(1), "its snapshot is missing"),
    (lambda store: store.disk.ledgers[1].entries.clear(), "its snapshot is empty"),
    (lambda store: store.disk.ledgers[1].entries.pop(), "expected 2 segments, found 1"),
    (under_another_key, "expected ledgers 2 to 2, found 3 to 3"),
    # Field 15, a number.
    (with_entry(0, lambda data: as_pulsar(data) + b"\x78\x01"), "field 15"),
    *(
        (with_entry(entry, change), "delay snapshot 1")
        for entry in (0, 1)
        for change in (
            lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data + b"\0",
            lambda data: b"", lambda data: b"\xff" * 9,
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_snapshot_that_is_damaged_is_dropped_and_its_messages_are_read_again(store, damage, reason):
    damage(store)
    index, report = recover(store)
    (drop,) = report.dropped
    name = f"{KEY}_2_2" if damage is under_another_key else f"{KEY}_3_3"
    assert (drop.name, drop.text) == (name, "1")
    assert reason in drop.reason
    assert (report.bucket_count, report.message_count, report.fell_back) == (1, 4, "")
    assert (keys_of(store), store.ledgers.owned_by("delayed")) == ({f"{KEY}_4_4": "2"}, [2])
    assert not any(Position(*position) in index for position in LEDGER_3)
    fill(index, 3, 100)
    assert poll(index, 99) == []
    assert poll(index, 300) == [*LEDGER_3, *LEDGER_4]


@pytest.mark.slow
@pytest.mark.parametrize("entry", [0, 1, 2])
def test_any_bit_that_flips_is_found_and_nothing_is_early_or_lost(store, entry):
    whole = store.disk.ledgers[1].entries[entry]
    for bit in range(0, 8 * len(whole), 7):  # some bit of each byte
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged = sealed()
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


def test_a_snapshot_that_pulsar_wrote(store):
    with_entry(0, as_pulsar)(store)
    index, report = recover(store)
    assert report == BucketRecoveryReport(bucket_count=2, message_count=8)
    assert poll(index, 300) == [*LEDGER_3, *LEDGER_4]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{KEY}_3", "1"),
        (f"{KEY}_3_4_5", "1"),
        (f"{KEY}_x_4", "1"),
        (f"{KEY}_4_3", "1"),
        (f"{KEY}_03_4", "1"),
        (f"{KEY}_3_4", "-1"),
        (f"{KEY}_3_4", ""),
        (f"{KEY}_3_4", "9" * 5_000),
        (f"{KEY}s", "²"),
    ],
)
def test_a_malformed_entry_of_the_registry_is_reported_and_left(store, name, text):
    storage_of(store).registry.put(name, text)
    index, report = recover(store)
    (drop,) = report.dropped
    assert (drop.name, drop.text) == (name, text)
    assert "must" in drop.reason
    assert report.message_count == 8
    assert keys_of(store)[name] == text
    index.clear()
    assert keys_of(store) == {}


def test_a_snapshot_that_two_keys_name_is_kept_under_one_of_them(store):
    storage_of(store).registry.put(f"{KEY}_3_4", "1")
    for attempt in range(1, 5):  # after the registry was taken over: the key cannot be removed
        store.inject(Fault(store.mutation_count + attempt, FaultKind.FAIL_BEFORE))
    for _ in range(2):
        index, report = recover(store)
        assert (report.bucket_count, report.message_count, report.fell_back) == (2, 8, "")
        assert store.ledgers.owned_by("delayed") == [1, 2]
    assert sorted(keys_of(store).values()) == ["1", "2"]
    assert poll(index, 300) == [*LEDGER_3, *LEDGER_4]


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
