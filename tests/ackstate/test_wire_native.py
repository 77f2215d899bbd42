"""The native record: there and back, the golden file, and hostile bytes, from which only our own errors may come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import AckStateError, CorruptStateError, DeletedRanges, Position, UnsupportedVersionError
from ackstate.wire import native
from ackstate.wire.native import Pointer, Record, RecordKind
from strategies import ENTRY_ID_MAX, LEDGER_ID_MAX, positions

GOLDEN = Path(__file__).parents[1] / "golden"


def ranges_of(members):
    ranges = DeletedRanges()
    for position in members:
        ranges.add(position)
    return ranges


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
)

SAMPLE = Record(
    RecordKind.DELTA,
    epoch=2,
    sequence=7,
    chain=0xDEADBEEF,
    mark_delete=Position(3, 41),
    deleted=ranges_of([Position(3, 43), Position(3, 44), Position(5, 0), Position(5, 70_000)]),
    properties={"dedup": -1, "sequence": 12},
)


def resealed(data):
    """The bytes with a checksum that fits."""
    return data[:-4] + google_crc32c.value(data[:-4]).to_bytes(4, "little")


@given(records)
def test_a_record_goes_there_and_back(record):
    assert native.decode(native.encode(record)) == record


@given(st.builds(Pointer, unsigned, unsigned, unsigned))
def test_a_pointer_goes_there_and_back(pointer):
    assert native.decode_pointer(native.encode_pointer(pointer)) == pointer


def test_version_1_still_decodes():
    assert native.decode((GOLDEN / "native-record-v1.bin").read_bytes()) == SAMPLE
    assert native.decode_pointer((GOLDEN / "cursor-pointer-v1.bin").read_bytes()) == Pointer(17, 2, 9)


def test_version_1_is_still_what_is_written():
    assert native.encode(SAMPLE) == (GOLDEN / "native-record-v1.bin").read_bytes()
    assert native.encode_pointer(Pointer(17, 2, 9)) == (GOLDEN / "cursor-pointer-v1.bin").read_bytes()


@pytest.mark.parametrize(
    ("data", "decode"),
    [(native.encode(SAMPLE), native.decode), (native.encode_pointer(Pointer(17, 2, 9)), native.decode_pointer)],
    ids=["record", "pointer"],
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


@given(st.binary(max_size=120), st.integers(0, 5), st.integers(0, 5))
def test_an_arbitrary_body_behind_a_fitting_checksum_raises_only_our_own_errors(body, ledgers, properties):
    header = native._HEADER.pack(
        native.MAGIC, 1, 2, 0, native._SIZE_MIN + len(body), 0, 0, 0, 3, 4, ledgers, properties
    )
    try:
        native.decode(resealed(header + body + bytes(4)))
    except AckStateError:
        return
    assert ledgers + properties == 0 or body


def test_a_newer_version_says_so():
    newer = bytearray(native.encode(SAMPLE))
    newer[4] = 2
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        native.decode(resealed(bytes(newer)))


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
