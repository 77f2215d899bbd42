"""A cursor's record in the metadata store keeps its compression and its limit, whichever write rewrites it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import (
    CursorConfig,
    DeletedRanges,
    Format,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Position,
    Repair,
    StoreError,
    Topics,
    TopicSettings,
)
from ackstate.cursor import PersistTarget, RecoverySource
from ackstate.cursor.journal import cursor_path
from ackstate.stores.base import PayloadTooLargeError
from ackstate.stores.memory import Fault, FaultKind, PowerCutError
from ackstate.wire.pulsar import Compression, CursorInfo, decode_cursor_info, encode_cursor_info
from ackstate.wire.pulsar.compression import MAGIC, compress
from strategies import few

PATH = cursor_path("t", "s")
LOG = LedgerMap.from_counts({10: 200_000})
CODECS = [codec for codec in Compression if codec is not Compression.NONE]
ZOOKEEPER_BYTES_MAX = 1_040_000
P = Position


def open_cursor(store, *, properties=None, repair=Repair.NONE, **config):
    config = {"format": Format.PULSAR, "range_count_max": 200_000, "metadata_range_count_max": 200_000} | config
    return ManagedCursor.open(
        store, topic="t", subscription="s", ledgers=LOG, config=CursorConfig(**config), properties=properties,
        repair=repair, now_ms=0,
    )  # fmt: skip


def record(store):
    return store.metadata.get(PATH).data


def state_of(cursor):
    return cursor.mark_delete_position, cursor.deleted, dict(cursor.view.properties), dict(cursor.cursor_properties)


def closed_with(store, range_count, **config):
    """Close a cursor into the metadata store."""
    cursor = open_cursor(store, **config)
    cursor.ack_entries(10, range(1, 2 * range_count, 2), now_ms=1)
    assert cursor.close(now_ms=2).route is PersistTarget.METADATA
    return state_of(cursor)


# --- compression


@pytest.mark.parametrize("reopened", [*Compression, None], ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_an_open_leaves_a_compressed_record_compressed_whatever_is_configured_now(codec, reopened):
    store = MemoryStore(metadata_value_bytes_max=ZOOKEEPER_BYTES_MAX)
    state = closed_with(store, 60_000, compression=codec)
    before = record(store)
    assert len(before) < 900_000
    again = {"format": Format.NATIVE, "range_count_max": None} if reopened is None else {"compression": reopened}
    for _ in range(2):
        cursor = open_cursor(store, **again)
        assert state_of(cursor) == state
        assert cursor.recovery_report.source is RecoverySource.METADATA
        assert record(store)[:2] == MAGIC
        assert len(record(store)) <= len(before) + 8  # The term is larger.


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("config", [{}, {"format": Format.NATIVE, "range_count_max": None}], ids=["PULSAR", "NATIVE"])
def test_a_compressed_record_with_properties_that_another_wrote_moves_to_a_ledger(codec, config):
    store, deleted = MemoryStore(metadata_value_bytes_max=ZOOKEEPER_BYTES_MAX), DeletedRanges()
    deleted.add_entries(10, range(1, 120_000, 2))
    info = CursorInfo(-1, P(10, -1), deleted, properties={"horizon": 7}, cursor_properties={"owner": "billing"})
    store.metadata.put(PATH, compress(encode_cursor_info(info), codec), expected_version=-1)
    for _ in range(2):
        cursor = open_cursor(store, **config)
        assert state_of(cursor) == (P(10, -1), deleted, {"horizon": 7}, {"owner": "billing"})
        assert len(record(store)) < 200


# --- the limit


@pytest.mark.parametrize("format_", Format)
def test_a_state_above_a_lowered_limit_moves_to_a_ledger_when_it_is_opened(format_):
    store = MemoryStore()
    cursor = open_cursor(store, format=format_)
    cursor.mark_delete(P(10, 4), properties={"horizon": 7}, now_ms=1)
    cursor.ack_entries(10, range(11, 400, 2), now_ms=1)
    cursor.ack_batch(P(10, 8), [0b101], now_ms=1)
    cursor.set_cursor_properties({"owner": "billing"})
    store.break_ledgers()
    assert cursor.persist(now_ms=1).route is PersistTarget.METADATA
    state, batches = state_of(cursor), dict(cursor.view.batch)
    before = store.metadata.get(PATH)
    with pytest.raises(StoreError):
        open_cursor(store, format=format_, metadata_bytes_max=200)
    assert store.metadata.get(PATH) == before
    store.mend_ledgers()
    for reopened in (format_, *Format):
        cursor = open_cursor(store, format=reopened, metadata_bytes_max=200)
        assert (state_of(cursor), dict(cursor.view.batch)) == (state, batches)
        assert len(record(store)) <= 200
    cursor.ack(P(10, 9), now_ms=2)
    cursor.persist(now_ms=2)
    assert open_cursor(store, metadata_bytes_max=200).is_acked(P(10, 9))
    assert len(store.ledgers.owned_by(f"cursor {PATH}")) == 1


@pytest.mark.parametrize(
    "kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER, FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER]
)
@pytest.mark.parametrize("change", ["open", "put a property"])
def test_a_state_survives_every_fault_on_its_way_to_a_ledger(kind, change):
    for mutation in range(4):
        store = MemoryStore()
        state = closed_with(store, 300)
        opened = open_cursor(store)
        limits = {"metadata_bytes_max": 900} if change == "open" else {"metadata_bytes_max": len(record(store)) + 10}
        if change == "put a property":
            opened = open_cursor(store, **limits)
        store.inject(Fault(store.mutation_count + mutation, kind))
        try:
            if change == "open":
                open_cursor(store, **limits)
            else:
                opened.set_cursor_properties({"owner": "billing"})
        except (StoreError, PowerCutError):
            pass
        again = MemoryStore(store.disk)
        for _ in range(2):
            assert state_of(open_cursor(again, **limits))[:3] == state[:3]
        assert len(record(again)) <= limits["metadata_bytes_max"]
        assert len(again.ledgers.owned_by(f"cursor {PATH}")) <= 1


# --- properties


@pytest.mark.parametrize("format_", Format)
@pytest.mark.parametrize("put", ["set", "internal", "new cursor"])
def test_a_cursor_property_that_leaves_no_room_is_refused_when_it_is_put(format_, put):
    text, store = "x" * 2_000, MemoryStore()
    if put == "new cursor":
        with pytest.raises(PayloadTooLargeError, match=r"metadata_bytes_max=2000\b"):
            open_cursor(store, format=format_, metadata_bytes_max=2_000, properties={"p": text})
        assert (store.disk.values, store.disk.ledgers) == ({}, {})
        return
    cursor = open_cursor(store, format=format_, metadata_bytes_max=2_000, properties={"old": "1"})
    cursor.ack(P(10, 3), now_ms=1)
    cursor.persist(now_ms=1)
    values, ledgers = dict(store.disk.values), set(store.disk.ledgers)
    puts = {
        "set": lambda: cursor.set_cursor_properties({"p": text}),
        "internal": lambda: cursor.put_internal_property("#pulsar.internal.p", text),
    }
    with pytest.raises(PayloadTooLargeError, match=r"metadata_bytes_max=2000\b"):
        puts[put]()
    assert (store.disk.values, set(store.disk.ledgers)) == (values, ledgers)
    assert dict(cursor.cursor_properties) == {"old": "1"}
    cursor.set_cursor_properties({"p": text[:1_000]})
    cursor.close(now_ms=2)
    assert dict(open_cursor(store, format=format_, metadata_bytes_max=2_000).cursor_properties) == {"p": text[:1_000]}


@few
@given(
    st.tuples(st.sampled_from(Format), st.sampled_from(Format)),
    st.integers(200, 1_500),
    st.integers(0, 40),
    st.integers(1, 60),
    st.integers(0, 100),
)
def test_the_largest_property_that_is_accepted_fits_every_record_from_then_on(
    formats, bytes_max, property_count, name_bytes, range_count
):
    """Whatever is written afterwards, in whichever format: no record is above the limit, and all of it opens again."""
    store = MemoryStore()

    def opened(form):
        return open_cursor(store, format=form, metadata_bytes_max=bytes_max)

    def put(length):
        try:
            cursor.set_cursor_properties({f"{number:0{name_bytes}}": "x" * length for number in range(property_count)})
        except PayloadTooLargeError:
            return False
        return True

    cursor = opened(formats[0])
    next((length for length in range(bytes_max, -1, -1) if put(length)), None)
    for form in (*formats, formats[0]):
        cursor.ack_entries(10, range(1, 2 * range_count, 2), now_ms=1)
        cursor.mark_delete(P(10, 0), properties={"horizon": 2**62}, now_ms=1)
        cursor.persist(now_ms=1)
        assert len(record(store)) <= bytes_max
        cursor.reset(P(10, 0), now_ms=1)
        assert len(record(store)) <= bytes_max
        store.break_ledgers()
        cursor.reset(P(10, 0), now_ms=1)  # There is room for a state without acks.
        assert len(record(store)) <= bytes_max
        store.mend_ledgers()
        cursor.ack_entries(10, range(1, 2 * range_count, 2), now_ms=1)
        cursor.close(now_ms=2)
        assert len(record(store)) <= bytes_max
        expected = state_of(cursor)
        cursor = opened(form)
        assert state_of(cursor) == expected
        assert len(record(store)) <= bytes_max


def test_properties_from_before_a_limit_was_lowered_stay_and_may_only_become_fewer():
    store = MemoryStore()
    open_cursor(store, properties={"a": "x" * 3_000, "b": "x" * 3_000}).close(now_ms=1)
    cursor = open_cursor(store, metadata_bytes_max=2_000)
    cursor.ack(P(10, 3), now_ms=1)
    cursor.persist(now_ms=1)
    with pytest.raises(PayloadTooLargeError):
        cursor.set_cursor_properties({"a": "x" * 3_000, "b": "x" * 3_001})
    cursor.set_cursor_properties({"a": "x" * 3_000})
    with pytest.raises(PayloadTooLargeError):
        cursor.set_cursor_properties({"a": "x" * 3_001})
    cursor.set_cursor_properties({})
    cursor.close(now_ms=2)
    again = open_cursor(store, metadata_bytes_max=2_000)
    assert (dict(again.cursor_properties), again.is_acked(P(10, 3))) == ({}, True)


@pytest.mark.parametrize("format_", Format)
def test_mark_delete_properties_that_the_record_has_no_room_for_are_in_a_ledger(format_):
    store, properties = MemoryStore(), {f"{number:0500}": number for number in range(10)}
    cursor = open_cursor(store, format=format_, metadata_bytes_max=2_000)
    receipt = cursor.mark_delete(P(10, 4), properties=properties, now_ms=1)
    store.break_ledgers()
    with pytest.raises(StoreError) as caught:
        cursor.close(now_ms=1)
    assert "more than the metadata store may be given" in str(caught.value.__notes__)
    assert not cursor.durable(receipt)
    store.mend_ledgers()
    cursor.close(now_ms=2)
    again = open_cursor(store, format=format_, metadata_bytes_max=2_000)
    assert dict(again.view.properties) == properties
    assert len(record(store)) <= 2_000


def test_the_type_of_a_subscription_fits_beside_the_largest_properties():
    """A cursor without a type gets one when a topic opens it; that is no reason to refuse it."""
    settings = TopicSettings(cursor=CursorConfig(metadata_bytes_max=500))
    for length in range(500):
        store = MemoryStore()
        with Topics(store, settings=settings) as topics:
            topic = topics.open("t", now_ms=0)
            try:
                ManagedCursor.open(
                    store, topic="t", subscription="s", ledgers=topic.log.ledgers, config=settings.cursor,
                    properties={"p": "x" * (400 - length)}, now_ms=0,
                ).close(now_ms=0)  # fmt: skip
            except PayloadTooLargeError:
                continue
            topic.subscribe("s", now_ms=0)
            assert len(record(store)) <= 500
            return


# --- what a broker of Pulsar wrote beside the ledger's name


def test_properties_beside_the_name_of_a_ledger_stay_until_another_ledger_is_named():
    store = MemoryStore()
    cursor = open_cursor(store)
    cursor.mark_delete(P(10, 4), properties={"horizon": 7}, now_ms=1)
    cursor.persist(now_ms=1)
    info = decode_cursor_info(record(store))
    theirs = CursorInfo(info.cursors_ledger_id, P(10, 2), properties={"horizon": 5})
    store.metadata.put(PATH, encode_cursor_info(theirs), expected_version=store.metadata.get(PATH).version)
    cursor = open_cursor(store)
    cursor.set_cursor_properties({"owner": "billing"})
    found = decode_cursor_info(record(store))
    assert (dict(found.properties), found.mark_delete) == ({"horizon": 5}, P(10, 2))
    assert dict(cursor.view.properties) == {"horizon": 7}
    cursor.mark_delete(P(10, 6), now_ms=2)
    cursor.persist(now_ms=2)
    found = decode_cursor_info(record(store))
    assert (dict(found.properties), found.mark_delete) == ({}, P(10, 6))
