"""Bytes that no writer wrote: each decoder returns a sound state, or refuses with our own error, which says where.

The decoders, with real bytes and seals that fit damaged ones, are the targets of the fuzzer (`tests/fuzz/targets.py`).
`FUZZ_INPUTS` sets how many mutated inputs each gets; `make soak` gives all of them together over a million.
"""

import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import replace
from functools import partial
from hashlib import sha512

import cramjam
import google_crc32c
import numpy as np
import pytest
import zstandard
from pyroaring import BitMap

from ackstate import BatchIndexes, CorruptStateError, DeletedRanges, LedgerMap, Position
from ackstate.delay.bucket_storage import decode_registry
from ackstate.errors import UnsupportedVersionError
from ackstate.limits.policies import decode_policies
from ackstate.message import decode_messages
from ackstate.wire import native
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
from ackstate.wire.pulsar.codec import MessageLedger, decode_ledger_info
from ackstate.wire.pulsar.delay_snapshot import (
    DelayedIndexes,
    SegmentMetadata,
    decode_metadata,
    decode_segment,
    encode_metadata,
    encode_segment,
    segment_metadata,
)
from ackstate.wire.pulsar.fields import varint
from ackstate.wire.pulsar.message_entry import MessageTimes, decode_message_times
from fuzz import corpus
from fuzz.targets import GOLDEN, TARGETS, FuzzTarget, run, sealed_at_end

INPUTS = int(os.environ.get("FUZZ_INPUTS", "2000"))
TELLING_BYTES = (0x00, 0x01, 0x08, 0x0A, 0x10, 0x12, 0x1A, 0x22, 0x32, 0x7F, 0x80, 0xFF)
# An input of these takes milliseconds: few of them are tried.
SLOW = {"json-lines", "sqlite-store", "parquet-trace", "recording", "trace-manifest"}
CODECS = [compression for compression in Compression if compression is not Compression.NONE]
TIME_MAX = 2**63 - 1
LEDGERS = LedgerMap.from_counts({3: 100, 4: 0, 9: 20})

# Real bytes.


def state_of(record_type, *ids, **more):
    deleted, batch = DeletedRanges(), BatchIndexes()
    for ledger_id, first, end in [(3, 0, 2), (3, 5, 7), (3, 90, 200), (9, 0, 1), (2**40, 3, 4)]:
        deleted.add_run(ledger_id, first, end)
    batch.ack(Position(3, 2), [0b101, -1])
    return record_type(*ids, deleted=deleted, batch=batch, **more)


POSITION_INFO = state_of(
    PositionInfo, Position(2, -1), properties={"é": -1}, idle_since_ms=2**41, unknown=bytes.fromhex("3a0161")
)
CURSOR_INFO = state_of(
    CursorInfo, -1, Position(2, 7), last_active_ms=12, idle_since_ms=-1, cursor_properties={"a": "ü"},
    unknown=bytes.fromhex("4b08054c"),
)  # fmt: skip
PLAIN_CURSOR = state_of(CursorInfo, -1, Position(2, 7))


def indexes_of(rows):
    return DelayedIndexes(*np.array(rows, np.int64).reshape(-1, 3).T)


ROWS = [(1_700_000_000_000, 3, 7), (1_700_000_000_250, 3, 300), (1_700_000_000_250, 5, 0), (1_700_000_000_900, 3, 8)]
LAST_ROWS = [(1_700_000_300_000, 5, 70_000), (TIME_MAX, TIME_MAX, 2**32 - 1)]
SEGMENTS = [encode_segment(indexes_of(rows)) for rows in (ROWS, LAST_ROWS)]
METADATA = [segment_metadata(indexes_of(rows), data) for rows, data in zip((ROWS, LAST_ROWS), SEGMENTS, strict=True)]
PLAIN = [replace(metadata, checksum=None) for metadata in METADATA]
RECORD = (GOLDEN / "native-record-v2.bin").read_bytes()
POINTER = (GOLDEN / "cursor-pointer-v2.bin").read_bytes()
COUNTED = native.encode(replace(native.decode(RECORD), counts={Position(9, 5): (3, TIME_MAX), Position(9, 9): (2, 0)}))


def of_pulsar(decode, encode, records):
    """A decoder of records whose state, if any, is encoded and decoded again as it is."""

    def there_and_back(data):
        found = decode(data, LEDGERS)
        assert decode(encode(found)) == found
        found.batch._check()
        return found

    return FuzzTarget(there_and_back, lambda: records)


DECODERS = {
    **TARGETS,
    "position info, there and back": of_pulsar(
        decode_position_info, encode_position_info,
        [encode_position_info(POSITION_INFO), encode_position_info(POSITION_INFO, form=RangeForm.LIST)],
    ),
    "cursor info, there and back": of_pulsar(
        decode_cursor_info, encode_cursor_info,
        [
            encode_cursor_info(CURSOR_INFO),
            *(encode_cursor_info(PLAIN_CURSOR, compression=codec, threshold_bytes=0) for codec in CODECS),
        ],
    ),
    "delay segment of its metadata": FuzzTarget(
        lambda data: decode_segment(data, what="segment", metadata=PLAIN[0]), lambda: SEGMENTS[:1]
    ),
}  # fmt: skip
# Those whose every byte a checksum covers, and of each the bytes.
SEALED = {
    "native record": (native.decode, [RECORD, COUNTED]),
    "cursor pointer": (native.decode_pointer, TARGETS["cursor-pointer"].seeds()),
    "log record": (TARGETS["log-record"].decode, TARGETS["log-record"].seeds()),
    "delay registry": (decode_registry, [(GOLDEN / "delay-registry-v1.bin").read_bytes()]),
    "delay metadata": (partial(decode_metadata, what="it"), [encode_metadata(METADATA), encode_metadata([])]),
    "delay segment": (partial(decode_segment, what="it", metadata=METADATA[0]), SEGMENTS[:1]),
}

# Damages.


def flips(data):
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def cuts(data):
    return (data[:length] for length in range(len(data)))


def additions(data):
    yield from (data + b"\0", data + b"\x07", data[:1] + data, data * 2)
    yield from (data[:at] + data[at : at + 9] + data[at:] for at in range(len(data)))


@pytest.mark.parametrize("name", SEALED)
def test_every_flipped_bit_every_cut_and_what_follows_is_found_behind_a_checksum(name):
    decode, seeds = SEALED[name]
    for data in seeds:
        decode(data)
        for damaged in (*flips(data), *cuts(data), data + b"\0", data * 2):
            with pytest.raises((CorruptStateError, UnsupportedVersionError)):
                decode(damaged)


def accepts(target, data):
    """Return whether a target accepts bytes; an error says where."""
    try:
        return run(target._replace(refuses=()), data)
    except target.refuses as error:
        refused = error
    except BaseException as error:
        raise AssertionError(f"{data.hex()}: {error!r}") from error
    assert not isinstance(refused, CorruptStateError) or refused.offset >= 0
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in SLOW])
def test_damaged_bytes_give_a_sound_state_or_our_own_error(name):
    target = DECODERS[name]
    short = [data for data in target.seeds() if len(data) <= 400][:5]
    for data in short:
        accepted = [accepts(target, each) for each in (*flips(data), *cuts(data), *additions(data))]
        assert not all(accepted) or name == "native-deltas"  # It says None of what it leaves to another decoder.


def mutated(choose, seeds):
    """One of the seeds after one to four small changes."""
    data = bytearray(choose.choice(seeds))
    for _ in range(choose.randint(1, 4)):
        at, length = choose.randint(0, len(data)), choose.randint(1, 8)
        change = choose.randrange(7)
        if change == 0:
            data[at : at + 1] = choose.randbytes(1)
        elif change == 1:
            data[at : at + 1] = bytes([choose.choice(TELLING_BYTES)])
        elif change == 2 and at < len(data):
            data[at] ^= 1 << choose.randrange(8)
        elif change == 3:
            del data[at : at + length]
        elif change == 4:
            data[at:at] = data[at : at + 4 * length]
        elif change == 5:
            data[at:at] = choose.randbytes(length)
        else:
            other = choose.choice(seeds)
            data[at:] = other[choose.randint(0, len(other)) :]
    return bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in SLOW])
def test_mutated_bytes_give_a_sound_state_or_our_own_error(name):
    """With a seal that fits as a rule, so that damage reaches the code behind it."""
    target, choose = DECODERS[name], random.Random(19966)
    seeds = [data for data in target.seeds() if len(data) <= 2_000]
    accepted = 0
    for _ in range(INPUTS if seeds else 0):
        data = mutated(choose, seeds)
        accepted += accepts(target, target.seal(data) if target.seal and choose.random() < 0.9 else data)
    # Some must get through, or the loop only ever tried the first check.
    assert accepted or not seeds


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_kept_inputs_are_decoded_or_refused(name):
    target = TARGETS[name]
    seeds = target.seeds()
    assert seeds
    inputs = [*seeds, *corpus.kept(name)]
    accepted = [run(target, data) for data in (inputs[:: max(1, len(inputs) // 5)] if name in SLOW else inputs)]
    assert any(accepted)


# Parts that the tables are made of.


def framed(tag, content):
    return tag + varint(len(content)) + content


def element(*fields):
    """A DelayedIndex of numbered fields, in the order given."""
    return framed(b"\x0a", b"".join(varint(number << 3) + varint(value) for number, value in fields))


BITMAP = BitMap([7]).serialize()


def snapshot_of(*, ledgers=((3, BITMAP),), last=5, first=5, more=b""):
    """A SnapshotMetadata of one segment."""
    maps = b"".join(framed(b"\x0a", b"\x08" + varint(ledger) + framed(b"\x12", bitmap)) for ledger, bitmap in ledgers)
    return framed(b"\x0a", maps + b"\x10" + varint(last) + b"\x18" + varint(first) + more)


def with_bytes(data, at, put):
    """A sealed record with other bytes at a place, from its end if it is below 0."""
    at %= len(data)
    return sealed_at_end(data[:at] + put + data[at + len(put) :])


def record_of(body, ledgers=0, properties=0, batches=0):
    """A native record that claims to have so many blocks."""
    body = struct.pack("<I", batches) + body
    header = native._HEADER.pack(
        native.MAGIC, 2, 1, 0, native._SIZE_MIN + len(body), 0, 0, 0, 3, 4, ledgers, properties
    )
    return sealed_at_end(header + body + bytes(4))


def packed(codec, record, *, size=None):
    payload = {
        Compression.LZ4: lambda: bytes(cramjam.lz4.compress_block(record, store_size=False)),
        Compression.ZLIB: lambda: zlib.compress(record, 9),
        Compression.ZSTD: lambda: zstandard.ZstdCompressor(level=19).compress(record),
        Compression.SNAPPY: lambda: bytes(cramjam.snappy.compress_raw(record)),
    }[codec]()
    metadata = b"\x08" + bytes([codec.value]) + b"\x10" + varint(len(record) if size is None else size)
    return b"\x47\x78" + struct.pack(">i", len(metadata)) + metadata + payload


def list_of(*ranges):
    record = b""
    for ledger_id, lower, upper in ranges:
        ends = [b"\x08" + varint(ledger_id) + b"\x10" + varint(entry_id & (2**64 - 1)) for entry_id in (lower, upper)]
        record += framed(b"\x1a", framed(b"\x0a", ends[0]) + framed(b"\x12", ends[1]))
    return bytes.fromhex("08031000") + record


def of(decode, **arguments):
    return partial(decode, what="it", **arguments)


HEAD = "08031000"
RANGE = "1a0c0a0408031002120408031004"
LAST_BATCH = len(RECORD) - 4 - 22  # where the last batch block of the golden record begins
ANY_BATCH = element((1, 5), (2, 3), (3, 7))
WITHOUT = encode_metadata(PLAIN)
PART_SEALED = b"\x85\x86\x31" + google_crc32c.value(WITHOUT).to_bytes(4, "little") + WITHOUT
SPANNED_FREE = 1_024 * 2**16
WHOLE_LEDGER = list_of((5, 2, 3), (7, -1, 2**32 - 1))


def disagreeing(**changes):
    return of(decode_segment, metadata=replace(PLAIN[0], **changes))


def disagreeing_in(bitmaps):
    return disagreeing(bitmaps={ledger_id: BitMap(entries) for ledger_id, entries in bitmaps.items()})


def decode_message(data):
    return next(decode_messages([(3, [data])]))


TWICE = element((1, 5), (2, 3), (3, 7)) + element((1, 6), (2, 3), (3, 7))

# A decoder, bytes or their hexadecimal digits, the offset of the error, and a part of what it says was expected.
REFUSED = [
    # The protobuf runtime does not say where it fails: these errors name the record, and which part of it is wrong.
    (decode_position_info, "", 0, "all required fields"),
    (decode_position_info, "0803", 0, "all required fields"),
    (decode_position_info, HEAD + "3206080310", 0, "protobuf can read"),
    (decode_position_info, HEAD + "00", 0, "protobuf can read"),
    (decode_position_info, HEAD + "3b44", 0, "protobuf can read"),
    (decode_position_info, HEAD + "1a020a00", 0, "all required fields"),
    (decode_position_info, HEAD + "22050a01ff1001", 0, "text in UTF-8"),
    (decode_position_info, "08ffffffffffffffffff0110ffffffffffffffffff01", 0, "a ledger id of 0 or more"),
    (decode_position_info, "0803108080808010", 0, "an entry id"),
    (decode_position_info, HEAD + "1a0c0a0408031007120408031006", 0, "range 0"),
    (decode_position_info, HEAD + "1a0c0a0408031007120408021009", 0, "range 0"),
    (decode_position_info, list_of((3, -2, 1)), 0, "range 0"),
    (decode_position_info, HEAD + RANGE + "1a100a040803100212080803108080808010", 0, "range 1"),
    (decode_position_info, HEAD + "2a080a04080310021000", 0, "an index that is not acked"),
    (decode_position_info, HEAD + "2a060a0408031002", 0, "an index that is not acked"),
    (decode_position_info, HEAD + "2a110a0d080310ffffffffffffffffff011001", 0, "an entry id of 0"),
    (decode_position_info, HEAD + "320408031001" + "320408031002", 0, "each once, as key 1"),
    (decode_position_info, HEAD + "320d08ffffffffffffffffff011001", 0, "a ledger id of 0 or more"),
    (decode_position_info, WHOLE_LEDGER, 0, "1025 times 65536"),
    (decode_cursor_info, "08feffffffffffffffff01", 0, "a ledger id, or -1"),
    (decode_cursor_info, "08031003", 0, "both ids"),
    (decode_cursor_info, "08031803", 0, "both ids"),
    (decode_cursor_info, "0803" + "4a0161" + "42060a01611201ff", 0, "text in UTF-8"),
    (decode_cursor_info, "0803" + "10ffffffffffffffffff0118ffffffffffffffffff01", 0, "a ledger id of 0 or more"),
    (decode_cursor_info, "4778", 2, "a header of 6 bytes"),
    (decode_cursor_info, "477800000005", 2, "the metadata's size"),
    (decode_cursor_info, "4778ffffffff0801", 2, "the metadata's size"),
    (decode_cursor_info, "4778000000020801", 8, "field 2 (uncompressed_size)"),
    (decode_cursor_info, "477800000005080110ff7f" + "00", 8, "at most 128 times"),
    (decode_cursor_info, "47780000000408001003" + "0803", 10, "a payload of 3 bytes"),
    # A frame of zstd that does not say its size.
    (
        decode_cursor_info,
        bytes.fromhex("47780000000408031002")
        + zstandard.ZstdCompressor(write_content_size=False).compress(b"\x08\x03"),
        10,
        "a payload of 2 bytes",
    ),
    (decode_ledger_info, "0a020803" * 2, 0, "a ledger above 3"),
    (of(decode_segment), b"", 0, "a delayed message"),
    (of(decode_segment), element((1, 5), (2, 3)), 6, "entry_id"),
    (of(decode_segment), element((1, 5), (3, 3)), 6, "ledger_id"),
    (of(decode_segment), element((2, 5), (3, 3)), 6, "timestamp"),
    (of(decode_segment), element((1, 5), (2, 3), (3, 2**32)), 0, "entry_id of at most 4294967295"),
    (of(decode_segment), element((1, 5), (2, 2**63), (3, 1)), 0, "ledger_id of at most 9223372036854775807"),
    (of(decode_segment), element((1, 2**64 - 1), (2, 3), (3, 1)), 0, "timestamp of at most 9223372036854775807"),
    (of(decode_segment), b"\x0a\x0e\x08" + b"\x80" * 10 + b"\0\x10\3", 3, "a varint of at most 10 bytes"),
    (of(decode_segment), b"\x0a\xff\xff\xff\xff\x7f\x08", 1, "at most 1 bytes"),
    (of(decode_segment), b"\x0a\x80\x08\x08\x05\x10\x03\x18\x07", 1, "at most 6 bytes"),
    (of(decode_segment), b"\x0a\x06\x0d\1\0\0\0\0", 2, "timestamp as wire type 0"),
    (of(decode_segment), b"\x08\x01", 0, "indexes as wire type 2"),
    (of(decode_segment), b"\x0a\x02\x00\x00", 2, "a field"),
    (of(decode_segment), b"\x0a\x02\x2c\x00", 2, "a field"),
    (of(decode_segment), ANY_BATCH + b"\x13\x14", 8, "a field"),
    (of(decode_segment), ANY_BATCH + element((1, 4), (2, 3), (3, 8)), 8, "a time from 5 on"),
    # A segment and metadata that disagree: in the first time, the last time, the number of messages, and a position.
    (disagreeing(min_deliver_at_ms=ROWS[0][0] - 1), SEGMENTS[0], 0, "the first time 1699999999999"),
    (disagreeing(max_deliver_at_ms=ROWS[-1][0] + 1), SEGMENTS[0], 40, "the last time 1700000000901"),
    *(
        (disagreeing_in(bitmaps), SEGMENTS[0], 0, "the positions of the metadata")
        for bitmaps in ({3: [7, 8, 300]}, {3: [7, 8, 301], 5: [0]}, {3: [7, 8], 5: [0, 1]}, {3: [7, 8, 300], 6: [0]})
    ),
    (of(decode_segment, metadata=SegmentMetadata({3: BitMap([7, 8])}, 5, 6)), TWICE, 0, "each once"),
    (of(decode_segment, metadata=METADATA[0]), SEGMENTS[1], 0, "checksum"),
    (of(decode_metadata), b"", 0, "a segment"),
    (of(decode_metadata), b"\x0a\x00", 2, "max_schedule_timestamp"),
    (of(decode_metadata), framed(b"\x0a", b"\x10\x05"), 4, "min_schedule_timestamp"),
    (of(decode_metadata), snapshot_of(ledgers=()), 0, "metadata of a segment"),
    (of(decode_metadata), snapshot_of(first=6), 0, "metadata of a segment"),
    (of(decode_metadata), snapshot_of(last=2**63), 0, "metadata of a segment"),
    (of(decode_metadata), snapshot_of(ledgers=((2**63, BITMAP),)), 0, "metadata of a segment"),
    (of(decode_metadata), snapshot_of(ledgers=((3, BITMAP), (3, BITMAP))), 26, "each ledger once"),
    (of(decode_metadata), snapshot_of(ledgers=((3, b""),)), 8, "a roaring bitmap"),
    (of(decode_metadata), snapshot_of(ledgers=((3, BITMAP[:-1]),)), 8, "a roaring bitmap"),
    (of(decode_metadata), snapshot_of(ledgers=((3, BITMAP + b"\0"),)), 8, "and nothing after it"),
    (of(decode_metadata), snapshot_of(ledgers=((3, BitMap().serialize()),)), 8, "a non-empty roaring bitmap"),
    (of(decode_metadata), framed(b"\x0a", framed(b"\x0a", b"\x08\x03") + b"\x10\x05\x18\x05"), 6, "value"),
    (of(decode_metadata), framed(b"\x0a", framed(b"\x0a", framed(b"\x12", BITMAP)) + b"\x10\x05\x18\x05"), 24, "key"),
    (of(decode_metadata), framed(b"\x0a", b"\x08\x03"), 2, "delayed_index_bit_map as wire type 2"),
    (of(decode_metadata), b"\x85\x86\x31\x00\x00\x00", 3, "at most 3 bytes"),
    (of(decode_metadata), PART_SEALED, 7, "all checksums or none"),
    (of(decode_metadata), encode_metadata(METADATA)[7:], 0, "all checksums or none"),
    (of(decode_metadata), WITHOUT + encode_metadata(METADATA)[:7], len(WITHOUT), "a segment"),
    (native.decode, RECORD[:-1] + bytes([RECORD[-1] ^ 1]), len(RECORD) - 4, "checksum 0x"),
    (native.decode, with_bytes(RECORD, LAST_BATCH, struct.pack("<QI", 3, 50)), LAST_BATCH, "a position above 3:50"),
    (native.decode, with_bytes(RECORD, LAST_BATCH, struct.pack("<Q", 2**63)), LAST_BATCH, "a position above 3:50"),
    (native.decode, with_bytes(RECORD, 6, b"\3"), 4, "counts 0 to 2"),
    (native.decode, with_bytes(RECORD, 6, b"\1"), len(RECORD) - 4, "4 bytes of count of ledgers"),
    (native.decode, with_bytes(COUNTED, 6, b"\1"), len(COUNTED) - 20, "the checksum"),
    (native.decode, with_bytes(COUNTED, len(RECORD) - 4, b"\0"), len(RECORD), "delivery counts"),
    (native.decode, with_bytes(COUNTED, len(COUNTED) - 13, b"\x80"), len(COUNTED) - 20, "times from 0 on"),
    (native.decode, with_bytes(RECORD, LAST_BATCH + 12, b"\0"), LAST_BATCH + 14, "the last of them not 0"),
    (native.decode, with_bytes(RECORD, LAST_BATCH + 12, b"\3"), LAST_BATCH + 14, "24 bytes of batch words"),
    (native.decode, with_bytes(RECORD, LAST_BATCH + 14, b"\0"), LAST_BATCH + 14, "the last of them not 0"),
    (decode_message, b"ackmsg2\xff" + bytes(24), 24, "a number of messages above 0"),
    (decode_message, b"ackmsg3\xff" + bytes(16) + b"\1\0\0\0" + b"\xfe\xff\xff\xff", 24, "bytes of the key"),
    (decode_policies, b"[]", 0, "a document of policies"),
    (decode_policies, b'{"version":}', 11, "a document of policies"),
    (native.decode_pointer, with_bytes(POINTER, 32, struct.pack("<qq", 3, -2)), 32, "a mark-delete position"),
    (native.decode_pointer, sealed_at_end(POINTER + b"\0"), len(POINTER) - 4, "the checksum"),
]


@pytest.mark.parametrize(("decode", "data", "offset", "expected"), REFUSED)
def test_an_error_says_where_what_was_expected_and_what_was_found(decode, data, offset, expected):
    with pytest.raises(CorruptStateError) as caught:
        decode(bytes.fromhex(data) if isinstance(data, str) else data)
    assert expected in str(caught.value.expected)
    assert caught.value.offset == offset
    assert caught.value.found is not None
    assert not isinstance(decode, partial) or caught.value.what == "it"


@pytest.mark.parametrize(
    ("decode", "data", "saying"),
    [
        (decode_cursor_info, bytes.fromhex("47780000000408051002") + b"\x08\x03", "compression type 5"),
        (of(decode_segment), ANY_BATCH + element((1, 5), (2, 3), (3, 8), (4, 1)), "it: operation 1 at byte 8"),
        (of(decode_segment), element((1, 5), (2, 3), (3, 7), (5, 0)), "it: field 5 of DelayedIndex"),
        (of(decode_segment), element((1, 5), (2, 3), (3, 7), (2**29 - 1, 0)), "is unknown"),
        (of(decode_segment), ANY_BATCH + bytes.fromhex("10 01"), "field 2 of SnapshotSegment"),
        (of(decode_segment), ANY_BATCH + bytes.fromhex("85 86 31 00 00 00 00"), "is unknown"),
        (of(decode_segment), bytes.fromhex("0a 07 8008 05 1003 1807"), "is unknown"),
        (of(decode_metadata), snapshot_of(more=b"\x20\x00"), "it: field 4 of SnapshotSegmentMetadata"),
        (of(decode_metadata), snapshot_of() + b"\x10\x00", "it: field 2 of SnapshotMetadata"),
        (
            of(decode_metadata),
            snapshot_of(ledgers=((3, BITMAP + b"\x18\x00"),)).replace(b"\x14" + BITMAP, b"\x12" + BITMAP),
            "it: field 3 of delayed_index_bit_map",
        ),
    ],
)
def test_what_a_newer_release_may_have_written_says_so(decode, data, saying):
    with pytest.raises(UnsupportedVersionError, match=saying):
        decode(data)


SAME = element((1, 5), (2, 3), (3, 300))


@pytest.mark.parametrize(
    "data",
    [
        element((3, 7), (2, 3), (1, 5)) + SAME,
        element((1, 5), (2, 3), (3, 7), (4, 0)) + element((1, 5), (2, 3), (3, 300), (4, 0)),
        element((1, 9), (1, 5), (2, 3), (3, 7)) + SAME,
        bytes.fromhex("0a 07 08 8500 10 03 18 07") + SAME,
        bytes.fromhex("0a 8600 08 05 10 03 18 07") + SAME,
    ],
    ids=["another order", "operation DELAY", "a field twice", "a long varint", "a long length"],
)
def test_a_segment_that_means_the_same_is_read(data):
    assert [column.tolist() for column in decode_segment(data, what="it")] == [[5, 5], [3, 3], [7, 300]]


def test_metadata_and_headers_that_mean_the_same_are_read():
    swapped = framed(b"\x0a", b"\x18\x00\x10\x05" + framed(b"\x0a", framed(b"\x12", BITMAP) + b"\x08\x03"))
    assert decode_metadata(swapped, what="it") == (SegmentMetadata({3: BitMap([7])}, 0, 5),)
    assert decode_cursor_info(bytes.fromhex("47780000000408001002") + b"\x08\x03") == CursorInfo(3)


def test_an_empty_ledger_an_entry_without_a_payload_and_any_ledger_id_are_read():
    assert decode_ledger_info(bytes.fromhex("0a020800")) == (MessageLedger(0, 0),)
    assert decode_message_times(struct.pack(">I", 2) + b"\x18\x05") == MessageTimes(5, 0, 1)  # without a payload
    (segment,) = decode_metadata(snapshot_of(ledgers=[(ledger, BITMAP) for ledger in range(128)]), what="it")
    assert segment.bitmaps == dict.fromkeys(range(128), BitMap([7]))


def test_one_odd_message_behind_many_is_found_where_it_is():
    rows = [(1_700_000_000_000 + number, 3, number) for number in range(20_000)]
    encoded = encode_segment(indexes_of(rows))
    with pytest.raises(CorruptStateError) as caught:
        decode_segment(encoded + element((1, 1_700_000_020_000), (2, 3), (3, 2**32)), what="it")
    assert caught.value.offset == len(encoded)
    read = decode_segment(encoded + element((3, 1), (2, 3), (1, TIME_MAX)), what="it")
    assert [int(column[-1]) for column in read] == [TIME_MAX, 3, 1]


# Sizes that lie, and memory: a hundred bytes may not take more than a megabyte.


@pytest.mark.parametrize("codec", CODECS)
def test_a_size_that_the_payload_does_not_have_is_corrupt(codec):
    record = encode_cursor_info(PLAIN_CURSOR)
    assert decode_cursor_info(packed(codec, record)) == PLAIN_CURSOR
    for more in (-40, -1, 1, 40):
        with pytest.raises(CorruptStateError, match="a payload of"):
            decode_cursor_info(packed(codec, record, size=len(record) + more))
    with pytest.raises(CorruptStateError, match="a payload of"):
        decode_cursor_info(packed(codec, record) + b"\x08\x03")


@pytest.mark.parametrize("codec", CODECS)
def test_a_size_beyond_belief_is_refused_before_it_is_allocated(codec):
    for size in (2**31 - 1, 2**32, 2**63 - 1, 20_000):
        with pytest.raises(CorruptStateError, match="at most 128 times"):
            decode_cursor_info(packed(codec, b"\x08\x03", size=size))


def test_ranges_may_span_so_much_and_no_more_unless_a_ledger_vouches_for_them_or_the_record_is_long():
    assert len(decode_position_info(list_of((7, -1, SPANNED_FREE))).deleted) == SPANNED_FREE + 1
    for counts in ({7: 100}, {7: 2**32 - 2 * SPANNED_FREE}, {6: 2**32}):
        with pytest.raises(CorruptStateError):
            decode_position_info(WHOLE_LEDGER, LedgerMap.from_counts(counts))
    vouched = LedgerMap.from_counts({7: 2**32 - SPANNED_FREE // 2})
    assert len(decode_position_info(WHOLE_LEDGER, vouched).deleted) == 2**32 + 1
    halves = [(ledger_id, 0, SPANNED_FREE // 2) for ledger_id in (1, 2)]
    assert len(decode_position_info(list_of(*halves)).deleted) == SPANNED_FREE
    more = (3, 0, 3 * 2**16)
    with pytest.raises(CorruptStateError):
        decode_position_info(list_of(*halves, more))
    lone = [(4, entry, entry + 1) for entry in range(0, 20, 2)]
    assert len(decode_position_info(list_of(*halves, more, *lone)).deleted) == SPANNED_FREE + 3 * 2**16 + 10


def test_a_bitmap_of_far_more_entries_than_its_segment_is_not_laid_out():
    vast = SegmentMetadata({3: BitMap(range(2**24)), 5: BitMap([0])}, ROWS[0][0], ROWS[-1][0])
    tracemalloc.start()
    with pytest.raises(CorruptStateError):
        decode_segment(SEGMENTS[0], what="it", metadata=vast)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


MEASURE = """
import ctypes, gc, json, sys, tracemalloc
from ackstate import AckStateError
from ackstate.wire.native import decode as decode_record
from ackstate.wire.pulsar import decode_cursor_info, decode_position_info

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key))

def decode(data):
    is_position_info = data[:3] == b"\\x08\\x03\\x10"
    chosen = decode_record if data[:4] == b"ACKR" else decode_position_info if is_position_info else decode_cursor_info
    try:
        chosen(data)
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
        words = b"\x12" + varint(size) + word * (size - 1) + b"\x01"
        return framed(b"\x3a", bytes.fromhex("0a0408001000") + words)

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
    # Of all bitmaps of whole containers, run containers stand for the most entries.
    whole = BitMap(range(65_536))
    whole.run_optimize()
    most = 2**32 - 1
    inputs |= {
        "ledgers": record_of(b"", ledgers=most),
        "properties": record_of(b"", properties=most),
        "batches": record_of(b"", batches=most),
        "a ledger": record_of(struct.pack("<QI", 3, most), ledgers=1),
        "a property": record_of(struct.pack("<Hq", 0xFFFF, 1), properties=1),
        "a batch": record_of(struct.pack("<QIH", 3, 5, 0xFFFF), batches=1),
        "a whole container": record_of(struct.pack("<QI", 3, len(whole.serialize())) + whole.serialize(), ledgers=1),
        "containers": record_of(struct.pack("<QI", 3, 24) + struct.pack("<II", 12346, 2**16) + bytes(16), ledgers=1),
    }
    return {name: data for name, data in inputs.items() if data is not None}


@pytest.mark.slow
def test_a_hundred_bytes_take_less_than_a_megabyte():
    inputs = hostile_inputs()
    assert len(inputs) > 33
    assert all(len(data) <= 100 for data in inputs.values())
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE], input=json.dumps([data.hex() for data in inputs.values()]),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    # The second time round, so that imports and the set-up of a first call do not count.
    found = dict(zip(inputs, json.loads(ran.stdout)[len(inputs) :], strict=True))
    assert {outcome for outcome, _, _ in found.values()} == {"read", "refused"}
    assert max(grown for _, grown, _ in found.values()) > 0
    for name, (outcome, grown, traced) in found.items():
        assert max(grown, traced) < 1_000_000, (name, outcome, grown, traced)
