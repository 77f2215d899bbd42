"""The registry of delay buckets: its owner, its bytes, and owners that come and go."""

from pathlib import Path

import pytest

from ackstate import CorruptStateError, MemoryStore, SqliteStore, StoreError, UnsupportedVersionError
from ackstate.delay import BucketRegistry
from ackstate.delay.bucket_storage import Registered, RegistryFencedError, decode_registry, encode_registry
from ackstate.stores.base import VersionMismatchError
from ackstate.stores.memory import Fault, FaultKind

GOLDEN = Path(__file__).parents[2] / "golden" / "delay-registry-v1.bin"
PATH = "/delayed-buckets/orders"
KEY = "#pulsar.internal.delayed.bucket_3_7"
OTHER_KEY = "#pulsar.internal.delayed.bucket_9_12"
REGISTERED = Registered(7, {KEY: "17", OTHER_KEY: "18"})


def registry_of(store):
    return BucketRegistry(store.metadata, PATH)


def owned(store):
    registry = registry_of(store)
    registry.take_over()
    return registry


def test_names_are_kept_with_their_texts(tmp_path):
    store = SqliteStore(tmp_path / "store.db")
    registry = owned(store)
    assert dict(registry.get_all()) == {}
    registry.put(KEY, "17")
    registry.put(OTHER_KEY, "18")
    registry.put(KEY, "19")
    store.close()
    store = SqliteStore(tmp_path / "store.db")
    registry = registry_of(store)
    assert dict(registry.take_over()) == dict(registry.get_all()) == {KEY: "19", OTHER_KEY: "18"}
    registry.remove(KEY)
    registry.remove(KEY)
    assert dict(registry.get_all()) == {OTHER_KEY: "18"}
    store.close()


def test_an_earlier_owner_changes_nothing():
    store = MemoryStore()
    earlier = owned(store)
    earlier.put(KEY, "17")
    later = owned(store)
    before = store.mutation_count
    for change in (lambda: earlier.put(OTHER_KEY, "18"), lambda: earlier.remove(KEY), earlier.get_all):
        with pytest.raises(RegistryFencedError) as caught:
            change()
        assert caught.value.texts == {KEY: "17"}
    assert store.mutation_count == before
    later.put(OTHER_KEY, "19")
    assert registry_of(store).get_all() == {KEY: "17", OTHER_KEY: "19"}


def test_an_owner_of_a_deleted_registry_does_not_own_the_next_one_of_its_name():
    store = MemoryStore()
    earlier = owned(store)
    with owned(store).emptied():
        assert registry_of(store).get_all() == {}
    assert not registry_of(store).is_stored
    with pytest.raises(RegistryFencedError):
        earlier.put(KEY, "17")
    later = owned(store)
    with pytest.raises(RegistryFencedError):
        earlier.put(KEY, "17")
    assert later.get_all() == {}


def test_a_registry_that_is_taken_over_meanwhile_is_not_deleted():
    store = MemoryStore()
    registry = owned(store)
    registry.put(KEY, "17")
    with registry.emptied():
        later = owned(store)
        later.put(OTHER_KEY, "18")
    assert later.get_all() == {OTHER_KEY: "18"}

    late = BucketRegistry(store.metadata, PATH, check=lambda: owned(store))
    with pytest.raises(VersionMismatchError), late.emptied():
        raise AssertionError("emptied another owner's registry")


def test_an_owner_that_may_not_take_over_changes_nothing():
    def refuse():
        raise StoreError("the topic has another owner")

    store = MemoryStore()
    present = owned(store)
    with pytest.raises(StoreError, match="another owner"):
        BucketRegistry(store.metadata, PATH, check=refuse).take_over()
    present.put(KEY, "17")
    # An owner that comes between the check and the change is not replaced unseen either: it is asked for again.
    checks = []
    late = BucketRegistry(store.metadata, PATH, check=lambda: checks or checks.append(owned(store)) or None)
    late.take_over()
    with pytest.raises(RegistryFencedError):
        checks[0].get_all()


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_change_of_unknown_outcome_is_tried_again(at, kind):
    store = MemoryStore(faults=[Fault(at, kind)])
    registry = registry_of(store)
    for _ in range(2):
        try:
            registry.take_over()
            registry.put(KEY, "17")
        except StoreError:
            continue
    assert registry.get_all() == {KEY: "17"}


def test_a_damaged_registry_is_replaced_by_the_next_owner_and_one_of_a_newer_release_left_alone():
    store = MemoryStore()
    owned(store).put(KEY, "17")
    found = store.metadata.get(PATH)
    store.metadata.put(PATH, found.data[:-1], expected_version=found.version)
    with pytest.raises(CorruptStateError):
        registry_of(store).get_all()
    registry = registry_of(store)
    assert registry.take_over() == registry.get_all() == {}
    found = store.metadata.get(PATH)
    newer = found.data[:4] + b"\x02" + found.data[5:]
    store.metadata.put(PATH, newer, expected_version=found.version)
    with pytest.raises(UnsupportedVersionError):
        registry_of(store).take_over()
    assert store.metadata.get(PATH).data == newer


def test_the_golden_file():
    golden = GOLDEN.read_bytes()
    assert encode_registry(REGISTERED) == golden
    assert decode_registry(golden) == REGISTERED


def test_names_and_paths_that_cannot_be_stored_are_refused():
    registry = owned(MemoryStore())
    with pytest.raises(TypeError):
        registry.put(KEY, 17)
    with pytest.raises(ValueError, match="too long"):
        registry.put("x" * 70_000, "17")
    with pytest.raises(ValueError, match="path must be a metadata path"):
        BucketRegistry(MemoryStore().metadata, "b/")
