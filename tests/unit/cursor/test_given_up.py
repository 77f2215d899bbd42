"""A repair keeps the properties of the record that it uses, and announces the acks and properties that it gives up."""

from contextlib import suppress
from dataclasses import asdict
from functools import partial

import pytest

from ackstate import (
    CursorConfig,
    Format,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Position,
    Repair,
    StoreError,
    UnreadableCursorError,
)
from ackstate.cursor.journal import cursor_path
from ackstate.inspect import inspect_store
from ackstate.stores.memory import Fault, FaultKind, PowerCutError
from ackstate.wire.pulsar import CursorInfo, encode_cursor_info

P = Position
LOG = LedgerMap.from_counts({10: 100})
PATH = cursor_path("t", "s")
FORMATS = pytest.mark.parametrize("form", list(Format))


def open_cursor(store, form, *, subscription="s", **options):
    return ManagedCursor.open(
        store, topic="t", subscription=subscription, ledgers=LOG, config=CursorConfig(format=form), now_ms=0, **options
    )


def copy_of(store):
    """A store with the same contents, in which a repair changes nothing of the original."""
    copy = MemoryStore()
    copy.disk.values = dict(store.disk.values)
    for ledger_id, ledger in store.disk.ledgers.items():
        copy.disk.next_ledger_id = ledger_id
        assert copy.ledgers.create(ledger.owner) == ledger_id
        copy.disk.ledgers[ledger_id].entries.extend(ledger.entries)
    copy.disk.next_ledger_id = store.disk.next_ledger_id
    return copy


def entries_of(store):
    (ledger,) = store.disk.ledgers.values()
    return ledger.entries


def marked(store, form, numbers=(1, 2, 3, 4)):
    """Write a journal in which each record has an ack and a property of its own."""
    cursor = open_cursor(store, form, properties={"owner": "billing"})
    for number in numbers:
        cursor.mark_delete(P(10, 0), properties={"horizon": number}, now_ms=number)
        cursor.ack(P(10, 10 * number), now_ms=number)
        cursor.persist(now_ms=number)


def repaired(store, form):
    """Every repair that is offered: the cursor, opened on a copy and once more; its announcements agree."""
    with pytest.raises(UnreadableCursorError) as refused:
        open_cursor(copy_of(store), form)
    (found,) = inspect_store(copy_of(store))
    outcomes = {outcome.repair: outcome for outcome in found.problems[0].repairs}
    assert tuple(outcomes) == refused.value.repairs
    cursors = {}
    for repair, outcome in outcomes.items():
        copy = copy_of(store)
        report = open_cursor(copy, form, repair=repair).recovery_report
        for name in (
            "acks_given_up_min", "properties_given_up", "has_unknown_properties", "cursor_properties_given_up",
        ):  # fmt: skip
            assert asdict(report)[name] == asdict(outcome)[name]
        cursors[repair] = open_cursor(copy, form)
        assert cursors[repair].recovery_report.properties_given_up == {}
        text = str(refused.value).partition(f"repair=Repair.{repair.name} ")[2].partition("; repair=")[0]
        for name, number in outcome.properties_given_up.items():
            assert f"'{name}': {number}" in text
        assert f"at least {outcome.acks_given_up_min:,} acked" in text
        assert ("that cannot be read" in text) == outcome.has_unknown_properties
        assert ("the cursor properties" in text) == outcome.cursor_properties_given_up
    return outcomes, cursors


def properties_of(cursors):
    return {repair: dict(cursor.view.properties) for repair, cursor in cursors.items()}


DISCARD, SNAPSHOT, ORPHAN, ANEW = (
    Repair.DISCARD_DAMAGED_RECORDS, Repair.USE_METADATA_SNAPSHOT, Repair.USE_ORPHAN_JOURNAL, Repair.START_ANEW,
)  # fmt: skip


@FORMATS
def test_a_record_of_a_broker_keeps_its_properties_if_its_ledger_is_gone(form):
    """Apache Pulsar, issue 26483: the compaction cursor lost the name of the compacted ledger."""
    store = MemoryStore()
    info = CursorInfo(77, P(10, 49), properties={"CompactedTopicLedger": 5}, cursor_properties={"owner": "billing"})
    store.metadata.put(PATH, encode_cursor_info(info), expected_version=-1)
    outcomes, cursors = repaired(store, form)
    assert properties_of(cursors) == {SNAPSHOT: {"CompactedTopicLedger": 5}, ANEW: {}}
    assert outcomes[SNAPSHOT].properties_given_up == {}
    assert outcomes[ANEW].properties_given_up == {"CompactedTopicLedger": 5}
    assert outcomes[ANEW].acks_given_up_min == 50
    assert outcomes[SNAPSHOT].has_unknown_properties  # Those in the ledger may have been others.
    assert all(cursor.cursor_properties == {"owner": "billing"} for cursor in cursors.values())


@FORMATS
def test_a_repair_that_crashes_or_fails_keeps_the_properties_of_the_record(form):
    info = CursorInfo(77, P(10, 49), properties={"CompactedTopicLedger": 5})
    for mutation in range(4):
        for kind in (FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER, FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER):
            store = MemoryStore()
            store.metadata.put(PATH, encode_cursor_info(info), expected_version=-1)
            store.inject(Fault(store.mutation_count + mutation, kind))
            with suppress(StoreError, PowerCutError):
                open_cursor(store, form, repair=SNAPSHOT)
            cursor = open_cursor(MemoryStore(store.disk), form, repair=SNAPSHOT)
            assert dict(cursor.view.properties) == {"CompactedTopicLedger": 5}
            assert cursor.mark_delete_position == P(10, 49)


def test_a_journal_that_is_damaged_in_its_middle_gives_up_the_later_properties():
    store = MemoryStore()
    marked(store, Format.NATIVE)
    entries = entries_of(store)
    entries[-2] = b"\xff" * 9
    kept = len(entries) - 2
    outcomes, cursors = repaired(store, Format.NATIVE)
    assert outcomes[DISCARD].records_replayed == kept
    assert properties_of(cursors) == {DISCARD: {"horizon": 2}, SNAPSHOT: {}, ANEW: {}}
    assert [outcome.properties_given_up for outcome in outcomes.values()] == [{"horizon": 4}] * 3
    assert [outcome.acks_given_up_min for outcome in outcomes.values()] == [1, 4, 4]
    assert not any(outcome.has_unknown_properties for outcome in outcomes.values())


@FORMATS
@pytest.mark.parametrize("loss", ["missing", "damaged"])
def test_a_record_that_is_lost_takes_the_cursor_properties_along(form, loss):
    store = MemoryStore()
    marked(store, form)
    value = store.disk.values[PATH]
    if loss == "missing":
        del store.disk.values[PATH]
    else:
        store.disk.values[PATH] = value._replace(data=b"\xff" * 20)
    outcomes, cursors = repaired(store, form)
    assert properties_of(cursors) == {ORPHAN: {"horizon": 4}, ANEW: {}}
    assert [dict(cursor.cursor_properties) for cursor in cursors.values()] == [{}, {}]
    assert all(outcome.cursor_properties_given_up for outcome in outcomes.values())
    assert not outcomes[ORPHAN].has_unknown_properties
    assert (outcomes[ORPHAN].properties_given_up, outcomes[ANEW].properties_given_up) == ({}, {"horizon": 4})
    assert outcomes[ANEW].acks_given_up_min == 5


def test_what_a_repair_keeps_below_a_lost_mark_delete_is_not_given_up():
    store = MemoryStore()
    cursor = open_cursor(store, Format.NATIVE)
    for ack in (
        partial(cursor.ack_entries, 10, [1, 3]),
        partial(cursor.ack, P(10, 5)),
        partial(cursor.mark_delete, P(10, 9)),
    ):
        ack(now_ms=1)
        cursor.persist(now_ms=1)
    entries = entries_of(store)
    entries[2] = entries[2][:-1] + b"?"
    outcomes, cursors = repaired(store, Format.NATIVE)
    assert outcomes[DISCARD].acks_given_up_min == 8
    assert str(cursors[DISCARD].deleted) == "[(10:0..10:1],(10:2..10:3]]"


# --- a seek


@FORMATS
@pytest.mark.parametrize("subscription", ["s", "__compaction"])
def test_a_reset_clears_the_properties_of_the_mark_delete_and_keeps_the_cursors(form, subscription):
    """As in Pulsar, where only the compaction cursor keeps them."""
    store = MemoryStore()
    cursor = open_cursor(store, form, subscription=subscription, properties={"owner": "billing"})
    cursor.mark_delete(P(10, 20), properties={"horizon": 7}, now_ms=1)
    cursor.persist(now_ms=1)
    cursor.reset(P(10, 5), now_ms=2)
    left = {"horizon": 7} if subscription == "__compaction" else {}
    for _ in range(2):
        assert dict(cursor.view.properties) == left
        assert dict(cursor.cursor_properties) == {"owner": "billing"}
        assert cursor.mark_delete_position == P(10, 4)
        cursor = open_cursor(MemoryStore(store.disk), form, subscription=subscription)
    store.break_ledgers()
    cursor = open_cursor(store, form, subscription=subscription)
    cursor.mark_delete(P(10, 20), properties={"horizon": 8}, now_ms=3)
    cursor.reset(P(10, 5), now_ms=3)  # to the metadata store
    left = {"horizon": 8} if subscription == "__compaction" else {}
    assert dict(cursor.view.properties) == left
    assert dict(open_cursor(store, form, subscription=subscription).view.properties) == left
