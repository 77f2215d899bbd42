"""A subscription is deleted whole, in every form that it is stored in, and after a crash at any step."""

import pytest

from ackstate import (
    CursorConfig,
    CursorFencedError,
    Format,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Position,
    StoreError,
    UnsupportedVersionError,
)
from ackstate.cursor import delete_subscription
from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.cursor.recovery import TERMS_PATH as TERMS
from ackstate.cursor.recovery import raise_term_floor, term_floor
from ackstate.cursor.results import RecoverySource
from ackstate.inspect import inspect_store
from ackstate.stores.memory import Fault, FaultKind

P = Position
CURSOR = cursor_path("t", "s")
NAMES = {"topic": "t", "subscription": "s"}


def opened(store, *, format_=Format.NATIVE, start=None, properties=None):
    return ManagedCursor.open(
        store, **NAMES, ledgers=LedgerMap.from_counts({3: 100}), config=CursorConfig(format=format_), start=start,
        properties=properties, now_ms=0,
    )  # fmt: skip


def with_acks(store, format_=Format.NATIVE):
    cursor = opened(store, format_=format_, start=P(3, 10), properties={"team": "a"})
    for entry in (20, 30):
        cursor.ack(P(3, entry), now_ms=1)
        cursor.persist(now_ms=1)
    return cursor


def left_in(store):
    return set(store.disk.values) - {TERMS}, store.ledgers.owners()


@pytest.mark.parametrize("format_", Format)
def test_nothing_is_left_and_the_next_is_new(format_):
    store = MemoryStore()
    owner = with_acks(store, format_)
    assert delete_subscription(store, **NAMES)
    assert left_in(store) == (set(), [])
    assert not delete_subscription(store, **NAMES)
    fresh = opened(store, format_=format_)
    assert fresh.recovery_report.source is RecoverySource.NEW
    assert (fresh.mark_delete_position, len(fresh.deleted), fresh.cursor_properties) == (P(3, -1), 0, {})
    owner.ack(P(3, 50), now_ms=2)
    for write in (
        lambda: owner.persist(now_ms=2), lambda: owner.set_cursor_properties({}), lambda: owner.reset(P(3, 0), now_ms=2)
    ):  # fmt: skip
        with pytest.raises(CursorFencedError):
            write()
    assert opened(MemoryStore(store.disk), format_=format_).mark_delete_position == P(3, -1)


@pytest.mark.parametrize("format_", Format)
@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
def test_a_crash_at_any_step_leaves_the_subscription_or_none(format_, kind):
    for mutation in range(20):
        store = MemoryStore()
        with_acks(store, format_)
        dying = MemoryStore(store.disk, faults=[Fault(mutation, kind)])
        try:
            delete_subscription(dying, **NAMES)
        except StoreError:
            pass
        else:
            assert mutation >= 3
            return
        found = [inspection.status.value for inspection in inspect_store(MemoryStore(store.disk))]
        assert "problem" not in found
        again = MemoryStore(store.disk)
        is_whole = mutation == 0 or (mutation == 1 and kind is FaultKind.CRASH_BEFORE)
        if mutation % 2:
            cursor = opened(again, format_=format_)
            assert (len(cursor.deleted), cursor.cursor_properties) == ((2, {"team": "a"}) if is_whole else (0, {}))
            cursor.ack(P(3, 7), now_ms=1)
            cursor.persist(now_ms=1)
            assert len(again.ledgers.owned_by(cursor_owner(CURSOR))) == 1
        else:
            delete_subscription(again, **NAMES)
            assert left_in(again) == (set(), [])
    pytest.fail("the deletion never ended")


def test_an_interrupted_deletion_is_reported():
    store = MemoryStore()
    with_acks(store)
    with pytest.raises(StoreError):
        delete_subscription(MemoryStore(store.disk, faults=[Fault(2, FaultKind.CRASH_BEFORE)]), **NAMES)
    (inspection,) = inspect_store(MemoryStore(store.disk))
    assert [note.text for note in inspection.notes] == [
        "the subscription was deleted; the next open or deletion removes the rest of it",
        f"cursor ledgers {inspection.leftovers[0]}: left over by a crash; the next open deletes them",
    ]


def test_an_unreadable_subscription_is_deleted_too():
    store = MemoryStore()
    owner = with_acks(store)
    store.disk.values[CURSOR] = store.disk.values[CURSOR]._replace(data=b"ACKP damaged")
    assert delete_subscription(store, **NAMES)
    assert left_in(store) == (set(), [])
    opened(store)
    with pytest.raises(CursorFencedError):
        owner.set_cursor_properties({})


def test_journals_without_a_record_are_deleted():
    store = MemoryStore()
    with_acks(store)
    del store.disk.values[CURSOR]
    assert delete_subscription(store, **NAMES)
    assert left_in(store) == (set(), [])
    assert opened(store).recovery_report.source is RecoverySource.NEW


def test_the_record_of_a_newer_release_is_left_alone():
    store = MemoryStore()
    with_acks(store)
    data = store.disk.values[CURSOR].data
    store.disk.values[CURSOR] = store.disk.values[CURSOR]._replace(data=data[:4] + b"\x63" + data[5:])
    before = dict(store.disk.values)
    with pytest.raises(UnsupportedVersionError):
        delete_subscription(store, **NAMES)
    assert store.disk.values == before


def test_a_ledger_that_its_owner_begins_meanwhile_is_deleted():
    """The deletion comes between the creation of a ledger and the swing of the record."""
    store = MemoryStore()
    owner = with_acks(store)
    owner.ack(P(3, 40), now_ms=2)
    create = store.ledgers.create

    def create_late(name):
        ledger_id = create(name)
        if name == cursor_owner(CURSOR):
            delete_subscription(MemoryStore(store.disk), **NAMES)
        return ledger_id

    store.ledgers.create = create_late
    with pytest.raises((CursorFencedError, StoreError)):
        owner.reset(P(3, 0), now_ms=2)
    assert left_in(store) == (set(), [])


def test_a_subscription_that_is_created_meanwhile_stays():
    """Another owner creates the cursor again as soon as it is marked as deleted."""
    store = MemoryStore()
    with_acks(store)
    put, created = store.metadata.put, []

    def put_then_create(path, data, *, expected_version):
        version = put(path, data, expected_version=expected_version)
        if path == CURSOR and not created:
            created.append(opened(MemoryStore(store.disk)))
            created[0].ack(P(3, 0), now_ms=1)
            created[0].persist(now_ms=1)
        return version

    store.metadata.put = put_then_create
    assert delete_subscription(store, **NAMES)
    created[0].ack(P(3, 1), now_ms=2)
    assert created[0].persist(now_ms=2).messages_covered == 1
    assert opened(MemoryStore(store.disk)).mark_delete_position == P(3, 1)


def test_terms_rise_over_every_deletion_and_a_damaged_floor_is_above_all():
    store = MemoryStore()
    for _ in range(3):
        before = term_floor(store.metadata)
        opened(store)
        delete_subscription(store, **NAMES)
        assert term_floor(store.metadata) > before
    for damage in (b"", b"x", b"-1", b"9" * 30):
        store.disk.values[TERMS] = store.disk.values[TERMS]._replace(data=damage)
        assert term_floor(store.metadata) >= 2**40
        opened(store)
        delete_subscription(store, **NAMES)
    raise_term_floor(store.metadata, 7)
    assert term_floor(store.metadata) > 2**40
