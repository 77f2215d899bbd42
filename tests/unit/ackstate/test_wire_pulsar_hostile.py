"""Bytes that Pulsar never wrote: only our own errors come out, with the place, and little memory goes in."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from hashlib import sha512

import cramjam
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from ackstate import AckStateError, CorruptStateError, DeletedRanges, LedgerMap, Position, UnsupportedVersionError
from ackstate.batch_indexes import BatchIndexes
from ackstate.wire.pulsar import (
    Compression,
    CursorInfo,
    PositionInfo,
    RangeForm,
    decode_cursor_info,
    decode_position_info,
    encode_cursor_info,
    encode_position_info,
)

CODECS = [compression for compression in Compression if compression is not Compression.NONE]
LEDGERS = LedgerMap.from_counts({3: 100, 4: 0, 9: 20})


def sample(record_type, *ids, **more):
    deleted, batch = DeletedRanges(), BatchIndexes()
    for ledger_id, first, end in [(3, 0, 2), (3, 5, 7), (3, 90, 200), (9, 0, 1), (2**40, 3, 4)]:
        deleted.add_run(ledger_id, first, end)
    batch.ack(Position(3, 2), [0b101, -1])
    return record_type(*ids, deleted=deleted, batch=batch, **more)


POSITION_INFO = sample(
    PositionInfo, Position(2, -1), properties={"é": -1}, idle_since_ms=2**41, unknown=bytes.fromhex("3a0161")
)
CURSOR_INFO = sample(
    CursorInfo, -1, Position(2, 7), last_active_ms=12, idle_since_ms=-1, cursor_properties={"a": "ü"},
    unknown=bytes.fromhex("4b08054c"),
)  # fmt: skip
PLAIN = sample(CursorInfo, -1, Position(2, 7))
RECORDS = {
    "list": (decode_position_info, encode_position_info(POSITION_INFO, form=RangeForm.LIST)),
    "words": (decode_position_info, encode_position_info(POSITION_INFO)),
    "cursor": (decode_cursor_info, encode_cursor_info(CURSOR_INFO)),
    **{
        codec.name: (decode_cursor_info, encode_cursor_info(PLAIN, compression=codec, threshold_bytes=0))
        for codec in CODECS
    },
}
every_record = pytest.mark.parametrize("name", RECORDS)


# The message if the search for the place finds nothing wrong.
NOWHERE = ("protobuf can read", "all required fields", "text in UTF-8")


def is_refused(decode, data):
    """Return whether bytes are refused, by no error but ours, which says where; they may be another record."""
    try:
        found = decode(data, LEDGERS)
    except AckStateError as error:
        refused = error
    else:
        encode = encode_position_info if decode is decode_position_info else encode_cursor_info
        assert decode(encode(found)) == found
        return False
    if isinstance(refused, CorruptStateError):
        assert refused.offset >= 0
        assert not any(words in str(refused) for words in NOWHERE)
    return True


@pytest.mark.slow
@every_record
def test_every_cut_is_refused_or_another_record(name):
    decode, data = RECORDS[name]
    refused = sum(is_refused(decode, data[:length]) for length in range(len(data)))
    # Fields may be missing from the end, so a cut between two of them goes unseen; within one it does not.
    assert refused >= len(data) - 20


@pytest.mark.slow
@every_record
def test_every_flipped_bit_is_refused_or_another_record(name):
    decode, data = RECORDS[name]
    refused = 0
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        refused += is_refused(decode, bytes(flipped))
    assert refused > len(data)


@every_record
def test_bytes_behind_or_twice_are_refused_or_another_record(name):
    decode, data = RECORDS[name]
    assert is_refused(decode, data + b"\0")
    assert is_refused(decode, data + b"\x07")
    assert is_refused(decode, data[:1] + data)
    for at in range(len(data)):
        is_refused(decode, data[:at] + data[at : at + 9] + data[at:])


@pytest.mark.parametrize("decode", [decode_position_info, decode_cursor_info])
@given(data=st.binary(max_size=200))
@example(data=b"")
@example(data=b"\x47\x78")
@example(data=bytes.fromhex("08031000") + b"\x3b" * 101 + b"\x3c" * 101)
@example(data=bytes.fromhex("08031000") + b"\x3b" * 100_000)
@example(data=bytes.fromhex("08031000") + b"\x1a\x02\x0b\x0c")
@example(data=bytes.fromhex("0803100012808080808080808080808001"))
@example(data=bytes.fromhex("080310001affffffff0f"))
def test_arbitrary_bytes_raise_only_our_own_errors(decode, data):
    is_refused(decode, data)


edits = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 6), st.binary(max_size=6) | st.sampled_from([b"\x1a", b"\x80\x01"])),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@every_record
@given(edits=edits)
def test_edited_records_raise_only_our_own_errors(name, edits):
    decode, data = RECORDS[name]
    for at, removed, put in edits:
        data = data[:at] + put + data[at + removed :]
    is_refused(decode, data)


HEAD = "08031000"
RANGE = "1a0c0a0408031002120408031004"


@pytest.mark.parametrize(
    ("decode", "data", "offset", "expected"),
    [
        (decode_position_info, "", 0, "field 1 (ledger_id)"),
        (decode_position_info, "0803", 2, "field 2 (entry_id)"),
        (decode_position_info, HEAD + "3206080310", 5, "at most 3 bytes"),
        (decode_position_info, HEAD + "00", 4, "a field"),
        (decode_position_info, HEAD + "3c", 4, "a field"),
        (decode_position_info, HEAD + "3b44", 5, "the end of the group"),
        (decode_position_info, HEAD + "3d010203", 5, "at most 3 bytes"),
        (decode_position_info, HEAD + "39010203", 5, "at most 3 bytes"),
        (decode_position_info, "080310" + "ff" * 11, 3, "a varint of at most 10 bytes"),
        (decode_position_info, HEAD + "1a00", 6, "field 1 (lower_endpoint) of a MessageRange"),
        (decode_position_info, HEAD + "1a020a00", 8, "field 1 (ledger_id) of a NestedPositionInfo"),
        (decode_position_info, HEAD + "22050a01ff1001", 8, "name in UTF-8"),
        (decode_position_info, HEAD + "32040803120180", 9, "at most 0 bytes"),
        (decode_position_info, HEAD + "32050803120180", 10, "a varint"),
        (decode_position_info, "08ffffffffffffffffff0110ffffffffffffffffff01", 0, "a ledger id of 0 or more"),
        (decode_position_info, "0803108080808010", 0, "an entry id"),
        (decode_position_info, HEAD + "1a0c0a0408031007120408031006", 4, "a range"),
        (decode_position_info, HEAD + "1a0c0a0408031007120408021009", 4, "a range"),
        (decode_position_info, HEAD + RANGE + "1a100a040803100212080803108080808010", 18, "a range"),
        (decode_position_info, HEAD + "2a080a04080310021000", 4, "an index that is not acked"),
        (decode_position_info, HEAD + "2a060a0408031002", 4, "an index that is not acked"),
        (decode_position_info, HEAD + "2a110a0d080310ffffffffffffffffff011001", 4, "an entry id of 0"),
        (decode_position_info, HEAD + "320408031001" + "320408031002", 10, "each once"),
        (decode_position_info, HEAD + "320d08ffffffffffffffffff011001", 4, "a ledger id of 0 or more"),
        (decode_cursor_info, "08feffffffffffffffff01", 0, "a ledger id, or -1"),
        (decode_cursor_info, "08031003", 2, "both ids"),
        (decode_cursor_info, "08031803", 2, "both ids"),
        (decode_cursor_info, "0803" + "4a0161" + "42060a01611201ff", 12, "value in UTF-8"),
        (decode_cursor_info, "0803" + "10ffffffffffffffffff0118ffffffffffffffffff01", 2, "a ledger id of 0 or more"),
        (decode_cursor_info, "4778", 2, "a header of 6 bytes"),
        (decode_cursor_info, "477800000005", 2, "the metadata's size"),
        (decode_cursor_info, "4778ffffffff0801", 2, "the metadata's size"),
        (decode_cursor_info, "4778000000020801", 8, "field 2 (uncompressed_size)"),
        (decode_cursor_info, "477800000005080110ff7f" + "00", 8, "at most 128 times"),
        (decode_cursor_info, "47780000000408001003" + "0803", 10, "a payload of 3 bytes"),
    ],
)  # fmt: skip
def test_an_error_says_where_what_was_expected_and_what_was_found(decode, data, offset, expected):
    with pytest.raises(CorruptStateError) as caught:
        decode(bytes.fromhex(data))
    assert expected in str(caught.value.expected)
    assert caught.value.offset == offset
    assert caught.value.found is not None


def test_a_compression_of_the_future_says_so():
    with pytest.raises(UnsupportedVersionError, match="compression type 5"):
        decode_cursor_info(bytes.fromhex("47780000000408051002") + b"\x08\x03")


def test_a_header_without_compression_is_read():
    assert decode_cursor_info(bytes.fromhex("47780000000408001002") + b"\x08\x03") == CursorInfo(3)


# Sizes that lie


def varint(number):
    digits = []
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def packed(codec, record, *, size=None):
    payload = {
        Compression.LZ4: lambda: bytes(cramjam.lz4.compress_block(record, store_size=False)),
        Compression.ZLIB: lambda: zlib.compress(record, 9),
        Compression.ZSTD: lambda: zstandard.ZstdCompressor(level=19).compress(record),
        Compression.SNAPPY: lambda: bytes(cramjam.snappy.compress_raw(record)),
    }[codec]()
    metadata = b"\x08" + bytes([codec.value]) + b"\x10" + varint(len(record) if size is None else size)
    return b"\x47\x78" + struct.pack(">i", len(metadata)) + metadata + payload


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("more", [-40, -1, 1, 40])
def test_a_size_that_the_payload_does_not_have_is_corrupt(codec, more):
    record = encode_cursor_info(PLAIN)
    assert decode_cursor_info(packed(codec, record)) == PLAIN
    with pytest.raises(CorruptStateError, match="a payload of"):
        decode_cursor_info(packed(codec, record, size=len(record) + more))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [2**31 - 1, 2**32, 2**63 - 1, 20_000])
def test_a_size_beyond_belief_is_refused_before_it_is_allocated(codec, size):
    with pytest.raises(CorruptStateError, match="at most 128 times"):
        decode_cursor_info(packed(codec, b"\x08\x03", size=size))


def test_a_zstd_frame_that_does_not_say_its_size_is_corrupt():
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"\x08\x03")
    with pytest.raises(CorruptStateError, match="a payload of 2 bytes"):
        decode_cursor_info(bytes.fromhex("47780000000408031002") + frame)


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_with_bytes_behind_it_is_corrupt(codec):
    record = encode_cursor_info(PLAIN)
    with pytest.raises(CorruptStateError, match="a payload of"):
        decode_cursor_info(packed(codec, record) + b"\x08\x03")


# Ranges that span more than their bytes are worth


def list_of(*ranges, tag=0x1A):
    record = b""
    for ledger_id, lower, upper in ranges:
        ends = [b"\x08" + varint(ledger_id) + b"\x10" + varint(entry_id & (2**64 - 1)) for entry_id in (lower, upper)]
        body = b"\x0a" + varint(len(ends[0])) + ends[0] + b"\x12" + varint(len(ends[1])) + ends[1]
        record += bytes([tag]) + varint(len(body)) + body
    return bytes.fromhex(HEAD if tag == 0x1A else "0803") + record


SPANNED_FREE = 1_024 * 2**16


def test_a_range_may_span_so_much_and_no_more_unless_a_ledger_vouches_for_it():
    assert len(decode_position_info(list_of((7, -1, SPANNED_FREE))).deleted) == SPANNED_FREE + 1
    whole = list_of((5, 2, 3), (7, -1, 2**32 - 1))
    with pytest.raises(CorruptStateError, match="1025 times 65536") as caught:
        decode_position_info(whole)
    assert caught.value.offset == 4 + 14
    for counts in ({7: 100}, {7: 2**32 - 2 * SPANNED_FREE}, {6: 2**32}):
        with pytest.raises(CorruptStateError):
            decode_position_info(whole, LedgerMap.from_counts(counts))
    vouched = LedgerMap.from_counts({7: 2**32 - SPANNED_FREE // 2})
    assert len(decode_position_info(whole, vouched).deleted) == 2**32 + 1


def test_what_is_spanned_counts_over_all_ranges_and_grows_with_the_record():
    halves = [(ledger_id, 0, SPANNED_FREE // 2) for ledger_id in (1, 2)]
    assert len(decode_position_info(list_of(*halves)).deleted) == SPANNED_FREE
    more = (3, 0, 3 * 2**16)
    with pytest.raises(CorruptStateError):
        decode_position_info(list_of(*halves, more))
    lone = [(4, entry, entry + 1) for entry in range(0, 20, 2)]
    assert len(decode_position_info(list_of(*halves, more, *lone)).deleted) == SPANNED_FREE + 3 * 2**16 + 10


# Memory: a hundred bytes may not take more than a megabyte

MEASURE = """
import ctypes, gc, json, sys, tracemalloc
from ackstate import AckStateError
from ackstate.wire.pulsar import decode_cursor_info, decode_position_info

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key))

def decode(data):
    try:
        (decode_cursor_info if data[:2] != b"\\x08\\x03" or data[2:3] != b"\\x10" else decode_position_info)(data)
    except AckStateError:
        return "refused"
    return "read"

inputs = [bytes.fromhex(line) for line in json.load(sys.stdin)]
trim = ctypes.CDLL(None).malloc_trim
found = []
for data in inputs * 2:
    gc.collect()
    trim(0)
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = status("VmRSS")
    outcome = decode(data)
    grown = status("VmHWM") - before
    tracemalloc.start()
    decode(data)
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found.append((outcome, grown * 1024, traced))
json.dump(found, sys.stdout)
"""


def bomb(codec, elements):
    """The largest compressed record, elements behind some noise, that a hundred bytes can be believed to hold."""
    noise = sha512(b"").digest()
    for size in range(11_300, 500, -200):
        for kept in range(0, 60, 4):
            record = b"\x08\x01\x7a" + varint(kept) + noise[:kept] + elements(size)
            data = packed(codec, record)
            if len(data) <= 100 and len(record) <= 128 * (len(data) - 11):
                return data
    return None


def many(element):
    return lambda size: bytes.fromhex(element) * (2 * size // len(element))


def packed_words(word):
    def elements(size):
        body = bytes.fromhex("0a0408001000") + b"\x12" + varint(size) + word * (size - 1) + b"\x01"
        return b"\x3a" + varint(len(body)) + body

    return elements


def hostile_inputs():
    elements = {
        "empty ranges": many("2200"), "empty properties": many("2a00"), "empty batches": many("3a00"),
        "empty cursor properties": many("4200"), "groups": many("7b7c"), "unknown": many("7a00"),
        "ranges": many("220c0a0408001001120408001001"), "upper first": many("220c1204080010020a0408001001"),
        "batches": many("3a080a04080010011002"), "properties": many("2a050a01611001"),
        "words": packed_words(b"\x01"), "zero words": packed_words(b"\0"),
    }  # fmt: skip
    inputs = {f"{name} {codec.name}": bomb(codec, of_size) for name, of_size in elements.items() for codec in CODECS}
    inputs["whole ledger"] = list_of((7, -1, 2**32 - 1))
    inputs["spanned"] = list_of((7, -1, SPANNED_FREE))
    inputs["spanned in two"] = list_of((7, -1, SPANNED_FREE // 2), (7, SPANNED_FREE // 2 + 5, SPANNED_FREE))
    inputs["spanned in pieces"] = list_of(*[(ledger, 0, SPANNED_FREE // 4) for ledger in range(1, 5)])
    inputs["spanned again"] = list_of(*[(1, first, SPANNED_FREE // 4 + first) for first in range(4)])
    inputs["packed words"] = bytes.fromhex("08031000" + "325c080312" + "58" + "01" * 88)
    return {name: data for name, data in inputs.items() if data is not None}


@pytest.mark.slow
def test_a_hundred_bytes_take_less_than_a_megabyte():
    inputs = hostile_inputs()
    assert len(inputs) > 25
    assert all(len(data) <= 100 for data in inputs.values())
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps([data.hex() for data in inputs.values()]),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    # The second time round, so that imports and the set-up of a first call do not count.
    found = dict(zip(inputs, json.loads(ran.stdout)[len(inputs) :], strict=True))
    assert {outcome for outcome, _, _ in found.values()} == {"read", "refused"}
    assert max(grown for _, grown, _ in found.values()) > 0
    for name, (outcome, grown, traced) in found.items():
        assert max(grown, traced) < 1_000_000, (name, outcome, grown, traced)
