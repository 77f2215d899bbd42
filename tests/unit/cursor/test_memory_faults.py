"""The effect of a scripted fault on the disk, on the call, and on the calls after it."""

import pytest

from ackstate.stores.base import (
    ABSENT,
    LedgerFencedError,
    LedgerNotFoundError,
    StoreError,
    StoreFullError,
    VersionMismatchError,
)
from ackstate.stores.memory import Fault, FaultKind, MemoryDisk, MemoryStore, PowerCutError
from store_directories import check_disk

MUTATIONS = {
    "create": lambda store: store.ledgers.create("new"),
    "append": lambda store: store.ledgers.append(1, [b"x"]),
    "append of two": lambda store: store.ledgers.append(1, [b"x", b"y"]),
    "fence": lambda store: store.ledgers.fence(1),
    "delete a ledger": lambda store: store.ledgers.delete(1),
    "put": lambda store: store.metadata.put("/a", b"new", expected_version=0),
    "delete a value": lambda store: store.metadata.delete("/b", expected_version=0),
}


def prepared_store(fault: FaultKind | None = None, number: int = 0) -> MemoryStore:
    """A store with ledgers and values, of which a later mutation has a fault."""
    store = MemoryStore()
    assert [store.ledgers.create("old"), store.ledgers.create("old")] == [1, 2]
    store.ledgers.append(1, [b"old"])
    store.metadata.put("/a", b"old", expected_version=ABSENT)
    store.metadata.put("/b", b"old", expected_version=ABSENT)
    if fault is not None:
        store.inject(Fault(store.mutation_count + number, fault))
    return store


def contents(disk: MemoryDisk):
    """All that a new store on the disk shows."""
    check_disk(disk)
    return repr((disk.ledgers, disk.values, disk.next_ledger_id, disk.first_version))


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS)
@pytest.mark.parametrize(
    ("kind", "error", "happened", "goes_on"),
    [
        (FaultKind.FAIL_BEFORE, StoreError, False, True),
        (FaultKind.FAIL_AFTER, StoreError, True, True),
        (FaultKind.FULL, StoreFullError, False, True),
        (FaultKind.CRASH_BEFORE, PowerCutError, False, False),
        (FaultKind.CRASH_AFTER, PowerCutError, True, False),
        (FaultKind.SYNC_FAILED, StoreError, False, False),
    ],
)
def test_a_fault_hits_the_call_the_disk_and_the_later_calls(mutate, kind, error, happened, goes_on):
    store, wanted = prepared_store(kind), prepared_store()
    with pytest.raises(StoreError, match="mutation 5") as caught:
        mutate(store)
    assert type(caught.value) is error
    if happened:
        mutate(wanted)
    assert contents(store.disk) == contents(wanted.disk)
    for is_closed in (False, True):
        for call in (
            lambda: store.ledgers.owned_by("old"),
            store.ledgers.owners,
            lambda: store.metadata.get("/a"),
            lambda: store.ledgers.create("later"),
            lambda: store.ledgers.append_many([]),
        ):
            if goes_on and not is_closed:
                call()
            else:
                with pytest.raises(error if not goes_on else StoreError, match="closed" if goes_on else "mutation 5"):
                    call()
        store.close()
    MemoryStore(store.disk).ledgers.create("reopened")


def test_refused_calls_and_reads_are_no_mutations():
    store = prepared_store(FaultKind.FAIL_BEFORE, 1)
    store.ledgers.fence(1)
    for error, call in (
        (LedgerFencedError, lambda: store.ledgers.append(1, [b"x"])),
        (LedgerNotFoundError, lambda: store.ledgers.append(7, [b"x"])),
        (VersionMismatchError, lambda: store.metadata.put("/a", b"x", expected_version=5)),
        (VersionMismatchError, lambda: store.metadata.delete("/c", expected_version=ABSENT)),
        (ValueError, lambda: store.metadata.put("a", b"x", expected_version=ABSENT)),
        (ValueError, lambda: store.inject(Fault(0, FaultKind.FULL))),
        (ValueError, lambda: Fault(-1, FaultKind.FULL)),
        (ValueError, lambda: MemoryStore(faults=[Fault(3, FaultKind.FULL), Fault(3, FaultKind.CRASH_AFTER)])),
    ):
        with pytest.raises(error):
            call()
    store.ledgers.append(2, [])
    store.ledgers.read(1, 0, 1)
    store.metadata.children("/")
    assert store.mutation_count == 6
    with pytest.raises(StoreError, match="mutation 6"):
        store.ledgers.append(2, [b"x"])
    assert store.fired_fault_count == 1


def test_a_workload_cut_at_each_mutation_leaves_the_mutations_before_the_cut():
    def workload(store):
        for mutate in MUTATIONS.values():
            mutate(store)
            yield contents(store.disk)

    uncut = prepared_store()
    states = [contents(uncut.disk), *workload(uncut)]
    assert len(MUTATIONS) == len(set(states)) - 1
    for number in range(len(MUTATIONS)):
        for kind, happened in ((FaultKind.CRASH_BEFORE, 0), (FaultKind.CRASH_AFTER, 1)):
            store = prepared_store(kind, number)
            with pytest.raises(PowerCutError):
                list(workload(store))
            assert contents(store.disk) == states[number + happened]


def test_two_stores_on_one_disk_see_each_other_and_fail_apart():
    first = MemoryStore(faults=[Fault(1, FaultKind.CRASH_BEFORE)])
    second = MemoryStore(first.disk)
    ledger_id = first.ledgers.create("billing")
    assert second.ledgers.fence(ledger_id) == -1
    with pytest.raises(LedgerFencedError):
        first.ledgers.append(ledger_id, [b"late"])
    with pytest.raises(PowerCutError):
        first.ledgers.create("billing")
    assert second.ledgers.owned_by("billing") == [ledger_id]
    assert (first.mutation_count, second.mutation_count) == (2, 1)
