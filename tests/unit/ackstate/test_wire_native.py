"""The native record: there and back, the golden file, and hostile bytes, from which only our own errors may come."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from ackstate import (
    AckStateError,
    BatchIndexes,
    CorruptStateError,
    DeletedRanges,
    Position,
)
from ackstate.wire import native
from ackstate.wire.native import Pointer, Record, RecordKind
from strategies import ENTRY_ID_MAX, LEDGER_ID_MAX, few, positions

GOLDEN = Path(__file__).parents[2] / "golden"


def ranges_of(members):
    ranges = DeletedRanges()
    for position in members:
        ranges.add(position)
    return ranges


def batch_of(unacked_words):
    batch = BatchIndexes()
    for position, words in unacked_words.items():
        batch.ack(position, words)
    return batch


unsigned = st.integers(0, 2**64 - 1)
records = st.builds(
    Record,
    st.sampled_from(RecordKind),
    unsigned,
    unsigned,
    st.integers(0, 2**32 - 1),
    st.builds(Position, st.integers(0, LEDGER_ID_MAX), st.integers(-1, ENTRY_ID_MAX)),
    st.lists(positions, max_size=20).map(ranges_of),
    st.dictionaries(st.text(max_size=8), st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.dictionaries(positions, st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3), max_size=5).map(batch_of),
)

SAMPLE = Record(
    RecordKind.DELTA,
    epoch=2,
    sequence=7,
    chain=0xDEADBEEF,
    mark_delete=Position(3, 41),
    deleted=ranges_of([Position(3, 43), Position(3, 44), Position(5, 0), Position(5, 70_000)]),
    properties={"dedup": -1, "sequence": 12},
    batch=batch_of({Position(3, 50): [0b1010, -1], Position(5, 1): [4]}),
)


def resealed(data):
    """The bytes with a checksum that fits."""
    return data[:-4] + google_crc32c.value(data[:-4]).to_bytes(4, "little")


@few
@given(records)
def test_a_record_goes_there_and_back(record):
    assert native.decode(native.encode(record)) == record


@given(records)
def test_the_parts_say_what_the_record_says(record):
    parts = native.decode_parts(native.encode(record))
    assert parts[:5] == (record.kind, record.epoch, record.sequence, record.chain, record.mark_delete)
    assert parts.bitmaps == list(record.deleted.bitmaps())
    assert (parts.properties, dict(parts.batch)) == (record.properties, dict(record.batch))


texts = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)
places = st.none() | st.builds(Position, st.integers(0, LEDGER_ID_MAX), st.integers(-1, ENTRY_ID_MAX))
pointers = st.builds(Pointer, st.integers(0, 2**64 - 2), unsigned, unsigned, places, texts) | records.map(
    lambda record: Pointer(None, record.epoch, 1, record.mark_delete, {}, replace(record, kind=RecordKind.SNAPSHOT))
)
SAMPLE_POINTER = Pointer(17, 2, 9, Position(3, 41), {"owner": "billing"})
SAMPLE_STATE = Pointer(None, 2, 9, Position(3, 41), {}, replace(SAMPLE, kind=RecordKind.SNAPSHOT))


@given(pointers)
def test_a_pointer_goes_there_and_back(pointer):
    assert native.decode_pointer(native.encode_pointer(pointer)) == pointer


def test_the_golden_record_is_what_is_written_and_read():
    golden = (GOLDEN / "native-record-v2.bin").read_bytes()
    assert native.encode(SAMPLE) == golden
    assert native.decode(golden) == SAMPLE


@pytest.mark.parametrize(("name", "pointer"), [("v2", SAMPLE_POINTER), ("v2-state", SAMPLE_STATE)])
def test_the_golden_pointer_is_what_is_written_and_read(name, pointer):
    golden = (GOLDEN / f"cursor-pointer-{name}.bin").read_bytes()
    assert native.encode_pointer(pointer) == golden
    assert native.decode_pointer(golden) == pointer


def test_a_pointer_has_either_a_ledger_or_a_snapshot():
    with pytest.raises(ValueError, match="either"):
        Pointer(None, 0, 1)
    with pytest.raises(ValueError, match="either"):
        Pointer(3, 0, 1, snapshot=SAMPLE)


@pytest.mark.parametrize(
    ("data", "decode"),
    [
        (native.encode(SAMPLE), native.decode),
        (native.encode_pointer(SAMPLE_POINTER), native.decode_pointer),
        (native.encode_pointer(SAMPLE_STATE), native.decode_pointer),
    ],
    ids=["record", "pointer", "pointer with a snapshot"],
)
def test_every_cut_and_every_flipped_bit_is_found(data, decode):
    for length in range(len(data)):
        with pytest.raises(CorruptStateError):
            decode(data[:length])
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AckStateError):
            decode(bytes(flipped))
    with pytest.raises(CorruptStateError):
        decode(data + b"\0")


def test_damage_behind_a_fitting_checksum_is_found_or_is_another_valid_record():
    data = native.encode(SAMPLE)
    refused = 0
    for bit in range((len(data) - 4) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            native.decode(resealed(bytes(flipped)))
        except AckStateError:
            refused += 1
    assert refused > len(data)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_our_own_errors(data):
    for decode in (native.decode, native.decode_pointer):
        with pytest.raises(AckStateError):
            decode(data)


@given(st.binary(max_size=120), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_an_arbitrary_body_behind_a_fitting_checksum_raises_only_our_own_errors(body, ledgers, properties, batches):
    body = batches.to_bytes(4, "little") + body
    header = native._HEADER.pack(
        native.MAGIC, 2, 2, 0, native._SIZE_MIN + len(body), 0, 0, 0, 3, 4, ledgers, properties
    )
    try:
        native.decode(resealed(header + body + bytes(4)))
    except AckStateError:
        return
    assert ledgers + properties + batches == 0 or len(body) > 4


def test_an_error_names_offset_expected_and_found():
    data = bytearray(native.encode(SAMPLE))
    data[-1] ^= 1
    with pytest.raises(CorruptStateError) as caught:
        native.decode(bytes(data))
    assert caught.value.offset == len(data) - 4
    assert "expected checksum 0x" in str(caught.value)


@pytest.mark.parametrize("properties", [{"n": 2**63}, {"n": -(2**63) - 1}, {"x" * 65_536: 1}])
def test_properties_that_do_not_fit_are_refused(properties):
    with pytest.raises(ValueError):
        native.encode(replace(SAMPLE, properties=properties))


def test_a_batch_of_more_words_than_the_field_counts_is_refused():
    with pytest.raises(ValueError, match="batch 3:50 of 65536 words"):
        native.encode(replace(SAMPLE, batch=batch_of({Position(3, 50): [1] * 65_536})))


LAST_BATCH = len(native.encode(SAMPLE)) - 4 - 22


@pytest.mark.parametrize(
    ("offset", "damage", "expected"),
    [
        (0, struct.pack("<QI", 3, 50), "a position above 3:50"),
        (0, struct.pack("<QI", 2, 60), "a position above 3:50"),
        (0, struct.pack("<QI", LEDGER_ID_MAX + 1, 1), "a position above 3:50"),
        (12, bytes([0]), "the last of them not 0"),
        (12, bytes([3]), "24 bytes of batch words"),
        (14, bytes([0]), "the last of them not 0"),
    ],
)
def test_damage_in_a_batch_block_is_named(offset, damage, expected):
    data = bytearray(native.encode(SAMPLE))
    begin = LAST_BATCH + offset
    data[begin : begin + len(damage)] = damage
    with pytest.raises(CorruptStateError, match=expected) as caught:
        native.decode(resealed(bytes(data)))
    assert LAST_BATCH <= caught.value.offset <= LAST_BATCH + 14


def full_containers(count):
    """A bitmap of whole containers, as run containers: nothing smaller stands for more entries."""
    bitmap = BitMap(range(count * 65_536))
    bitmap.run_optimize()
    return bitmap.serialize()


@pytest.mark.parametrize(
    ("counts", "body"),
    [
        ((2**32 - 1, 0, 0), b""),
        ((0, 2**32 - 1, 0), b""),
        ((0, 0, 2**32 - 1), b""),
        ((1, 0, 0), struct.pack("<QI", 3, 2**32 - 1)),
        ((0, 1, 0), struct.pack("<Hq", 0xFFFF, 1)),
        ((0, 0, 1), struct.pack("<QIH", 3, 5, 0xFFFF)),
        ((1, 0, 0), struct.pack("<QI", 3, len(full_containers(1))) + full_containers(1)),
        ((1, 0, 0), struct.pack("<QI", 3, 24) + struct.pack("<II", 12346, 2**16) + bytes(16)),
    ],
)
def test_a_hundred_bytes_take_less_than_a_megabyte(counts, body):
    ledgers, properties, batches = counts
    body = struct.pack("<I", batches) + body
    header = native._HEADER.pack(
        native.MAGIC, 2, 1, 0, native._SIZE_MIN + len(body), 0, 0, 0, 3, 4, ledgers, properties
    )
    data = resealed(header + body + bytes(4))
    assert len(data) <= 100
    tracemalloc.start()
    with contextlib.suppress(AckStateError):
        native.decode(data)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 2**20
