"""A cursor's record in the metadata store keeps its compression and its limit, whichever write rewrites it."""

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import (
    CursorConfig,
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
from ackstate.wire.pulsar import Compression
from ackstate.wire.pulsar.compression import MAGIC
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


# --- the limit


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


def test_a_native_state_that_moves_to_a_ledger_opens_again():
    store, form = MemoryStore(), {"format": Format.NATIVE, "range_count_max": None}
    store.break_ledgers()
    state = closed_with(store, 300, **form)
    store.mend_ledgers()
    bytes_max = len(record(store)) - 1
    for _ in range(2):
        assert state_of(open_cursor(store, metadata_bytes_max=bytes_max, **form)) == state
        assert len(record(store)) <= bytes_max


# --- properties


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

    def is_refused(length):
        try:
            cursor.set_cursor_properties({f"{number:0{name_bytes}}": "x" * length for number in range(property_count)})
        except PayloadTooLargeError:
            return True
        return False

    cursor = opened(formats[0])
    refused_from = bisect_left(range(bytes_max + 1), True, key=is_refused)
    if refused_from:
        assert not is_refused(refused_from - 1)
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
