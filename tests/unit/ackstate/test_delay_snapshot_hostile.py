"""Delay snapshots that were damaged, or written by others: only our own errors come out, with the place."""

from __future__ import annotations

import contextlib
import re
import tracemalloc
from dataclasses import replace

import google_crc32c
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyroaring import BitMap

from ackstate import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.wire.pulsar.delay_snapshot import (
    DelayedIndexes,
    SegmentMetadata,
    decode_metadata,
    decode_segment,
    encode_metadata,
    encode_segment,
    segment_metadata,
)

TIME_MAX = 2**63 - 1
FIRST = [(1_700_000_000_000, 3, 7), (1_700_000_000_250, 3, 300), (1_700_000_000_250, 5, 0), (1_700_000_000_900, 3, 8)]
SECOND = [(1_700_000_300_000, 5, 70_000), (TIME_MAX, TIME_MAX, 2**32 - 1)]


def indexes_of(rows):
    return DelayedIndexes(*np.array(rows, np.int64).reshape(-1, 3).T)


def rows_of(indexes):
    return [*zip(*(column.tolist() for column in indexes), strict=True)]


SEGMENTS = [encode_segment(indexes_of(rows)) for rows in (FIRST, SECOND)]
METADATA = [segment_metadata(indexes_of(rows), data) for rows, data in zip((FIRST, SECOND), SEGMENTS, strict=True)]
PLAIN = [replace(metadata, checksum=None) for metadata in METADATA]
SEALED_BYTES, PLAIN_BYTES = encode_metadata(METADATA), encode_metadata(PLAIN)


def flips(data):
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def varint(number):
    return b"" if number < 0 else bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def framed(tag, content):
    return tag + varint(len(content)) + content


def element(*fields):
    """A DelayedIndex of numbered fields, in the order given."""
    return framed(b"\x0a", b"".join(varint(number << 3) + varint(value) for number, value in fields))


BITMAP = BitMap([7]).serialize()


def segment_message(*, ledgers=((3, BITMAP),), last=5, first=5, more=b""):
    """A SnapshotMetadata of one segment."""
    maps = b"".join(framed(b"\x0a", b"\x08" + varint(ledger) + framed(b"\x12", bitmap)) for ledger, bitmap in ledgers)
    return framed(b"\x0a", maps + b"\x10" + varint(last) + b"\x18" + varint(first) + more)


def refusal(decode, data, **arguments):
    with pytest.raises(CorruptStateError) as caught:
        decode(data, what="it", **arguments)
    assert caught.value.what == "it"
    assert 0 <= caught.value.offset <= len(data)
    return caught.value.offset, str(caught.value.expected), str(caught.value.found)


class TestWithChecksums:
    @pytest.mark.slow
    def test_every_flipped_bit_of_the_metadata_is_found(self):
        for data in (SEALED_BYTES, encode_metadata([])):
            for flipped in flips(data):
                with pytest.raises((CorruptStateError, UnsupportedVersionError)):
                    decode_metadata(flipped, what="snapshot")

    @pytest.mark.slow
    def test_every_flipped_bit_of_a_segment_is_found(self):
        for data, metadata in zip(SEGMENTS, METADATA, strict=True):
            for flipped in flips(data):
                assert "checksum" in refusal(decode_segment, flipped, metadata=metadata)[1]

    def test_every_cut_is_found(self):
        for length in range(len(SEALED_BYTES)):
            refusal(decode_metadata, SEALED_BYTES[:length])
        for data, metadata in zip(SEGMENTS, METADATA, strict=True):
            for length in range(len(data)):
                refusal(decode_segment, data[:length], metadata=metadata)

    def test_what_follows_is_found(self):
        assert "checksum" in refusal(decode_metadata, SEALED_BYTES + SEALED_BYTES[7:])[1]
        assert "checksum" in refusal(decode_segment, SEGMENTS[0] * 2, metadata=METADATA[0])[1]

    def test_another_segment_of_the_snapshot_is_not_this_one(self):
        assert "checksum" in refusal(decode_segment, SEGMENTS[1], metadata=METADATA[0])[1]

    def test_a_part_of_the_checksums_is_none(self):
        without = PLAIN_BYTES
        sealed = b"\x85\x86\x31" + google_crc32c.value(without).to_bytes(4, "little") + without
        assert refusal(decode_metadata, sealed)[1:] == ("all checksums or none", "only some of them")
        assert refusal(decode_metadata, SEALED_BYTES[7:])[1] == "all checksums or none"
        assert "must be first" in refusal(decode_metadata, PLAIN_BYTES + SEALED_BYTES[:7])[2]


class TestWithout:
    @pytest.mark.slow
    def test_every_flipped_bit_of_a_segment_is_found_or_changes_a_time_in_the_middle(self):
        unseen = 0
        for data, metadata, rows in zip(SEGMENTS, PLAIN, (FIRST, SECOND), strict=True):
            for flipped in flips(data):
                try:
                    read = rows_of(decode_segment(flipped, what="segment", metadata=metadata))
                except AckStateError:
                    continue
                unseen += 1
                assert [row[1:] for row in read] == [row[1:] for row in rows]
                assert (read[0], read[-1]) == (rows[0], rows[-1])
        # This many bits change one of the two middle times so little that the order of times is still right.
        assert unseen == 10

    @pytest.mark.slow
    def test_every_flipped_bit_of_the_metadata_is_refused_or_changes_what_it_says(self):
        read = []
        for flipped in flips(PLAIN_BYTES):
            try:
                read.append(decode_metadata(flipped, what="snapshot"))
            except AckStateError:
                continue
        # The 32 bits in which each of the four bitmaps says where its only container begins are not read.
        assert read.count(tuple(PLAIN)) == 4 * 32
        assert len(read) < len(PLAIN_BYTES) * 4

    def test_every_cut_is_refused_or_ends_after_a_segment(self):
        first = len(encode_metadata(PLAIN[:1]))
        for length in range(len(PLAIN_BYTES)):
            if length == first:
                assert decode_metadata(PLAIN_BYTES[:length], what="snapshot") == (PLAIN[0],)
            else:
                refusal(decode_metadata, PLAIN_BYTES[:length])
        for data, metadata in zip(SEGMENTS, PLAIN, strict=True):
            for length in range(len(data)):
                refusal(decode_segment, data[:length], metadata=metadata)


class TestSegmentAndMetadataDisagree:
    def test_the_first_time(self):
        wrong = replace(PLAIN[0], min_deliver_at_ms=FIRST[0][0] - 1)
        assert refusal(decode_segment, SEGMENTS[0], metadata=wrong) == (
            0, "the first time 1699999999999", "1700000000000"
        )  # fmt: skip

    def test_the_last_time(self):
        wrong = replace(PLAIN[0], max_deliver_at_ms=FIRST[-1][0] + 1)
        assert refusal(decode_segment, SEGMENTS[0], metadata=wrong) == (
            40, "the last time 1700000000901", "1700000000900"
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("bitmaps", "offset", "found"),
        [
            ({3: BitMap([7, 8, 300])}, 53, "4"),
            ({3: BitMap([7, 8, 300]), 5: BitMap([0, 1])}, 53, "4"),
            ({3: BitMap([7, 8, 301]), 5: BitMap([0])}, 13, "3:300"),
            ({3: BitMap([7, 8]), 5: BitMap([0, 1])}, 13, "3:300"),
            ({3: BitMap([7, 8, 300]), 6: BitMap([0])}, 27, "5:0"),
            ({3: BitMap([7, 8]), 5: BitMap([0]), 6: BitMap([9])}, 13, "3:300"),
        ],
    )
    def test_the_positions(self, bitmaps, offset, found):
        wrong = SegmentMetadata(bitmaps, FIRST[0][0], FIRST[-1][0])
        assert refusal(decode_segment, SEGMENTS[0], metadata=wrong)[::2] == (offset, found)

    def test_a_position_that_comes_twice(self):
        data = encode_segment(indexes_of([(5, 3, 7), (6, 3, 7)]))
        wrong = SegmentMetadata({3: BitMap([7, 8])}, 5, 6)
        assert refusal(decode_segment, data, metadata=wrong) == (8, "positions of the metadata, each once", "3:7")
        assert rows_of(decode_segment(data, what="it")) == [(5, 3, 7), (6, 3, 7)]

    def test_a_bitmap_of_far_more_entries_is_not_laid_out(self):
        vast = SegmentMetadata({3: BitMap(range(2**24)), 5: BitMap([0])}, FIRST[0][0], FIRST[-1][0])
        tracemalloc.start()
        refusal(decode_segment, SEGMENTS[0], metadata=vast)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 200_000


class TestSegmentsOfOthers:
    @pytest.mark.parametrize(
        "data",
        [
            element((3, 7), (2, 3), (1, 5)) + element((1, 5), (2, 3), (3, 300)),
            element((1, 5), (2, 3), (3, 7), (4, 0)) + element((1, 5), (2, 3), (3, 300), (4, 0)),
            element((1, 9), (1, 5), (2, 3), (3, 7)) + element((1, 5), (2, 3), (3, 300)),
            bytes.fromhex("0a 07 08 8500 10 03 18 07") + element((1, 5), (2, 3), (3, 300)),
            bytes.fromhex("0a 8600 08 05 10 03 18 07") + element((1, 5), (2, 3), (3, 300)),
        ],
        ids=["another order", "operation DELAY", "a field twice", "a long varint", "a long length"],
    )
    def test_what_means_the_same_is_read(self, data):
        assert rows_of(decode_segment(data, what="segment")) == [(5, 3, 7), (5, 3, 300)]

    def test_an_operation_that_is_no_delay_is_of_a_newer_version(self):
        data = element((1, 5), (2, 3), (3, 7)) + element((1, 5), (2, 3), (3, 8), (4, 1))
        with pytest.raises(UnsupportedVersionError, match="segment 2: operation 1 at byte 8"):
            decode_segment(data, what="segment 2")

    @pytest.mark.parametrize(
        "data",
        [
            element((1, 5), (2, 3), (3, 7), (5, 0)),
            element((1, 5), (2, 3), (3, 7), (2**29 - 1, 0)),
            element((1, 5), (2, 3), (3, 7)) + bytes.fromhex("10 01"),
            element((1, 5), (2, 3), (3, 7)) + bytes.fromhex("85 86 31 00 00 00 00"),
            element((1, 5), (2, 3), (3, 7)) + bytes.fromhex("13 14"),
            bytes.fromhex("0a 07 8008 05 1003 1807"),
        ],
    )
    def test_a_field_that_is_not_known_is_of_a_newer_version(self, data):
        with pytest.raises(UnsupportedVersionError, match="is unknown"):
            decode_segment(data, what="segment")

    @pytest.mark.parametrize(
        ("data", "offset", "expected"),
        [
            (b"", 0, "a delayed message"),
            (element((1, 5), (2, 3)), 6, "entry_id"),
            (element((1, 5), (3, 3)), 6, "ledger_id"),
            (element((2, 5), (3, 3)), 6, "timestamp"),
            (element((1, 5), (2, 3), (3, 2**32)), 0, "entry_id of at most 4294967295"),
            (element((1, 5), (2, 2**63), (3, 1)), 0, "ledger_id of at most 9223372036854775807"),
            (element((1, 2**64 - 1), (2, 3), (3, 1)), 0, "timestamp of at most 9223372036854775807"),
            (element((1, 2**64), (2, 3), (3, 1)), 0, "timestamp of at most 9223372036854775807"),
            (b"\x0a\x0e\x08" + b"\x80" * 10 + b"\0\x10\3", 3, "a varint of at most 10 bytes"),
            (b"\x0a\xff\xff\xff\xff\x7f\x08", 1, "at most 1 bytes"),
            (b"\x0a\x80\x08\x08\x05\x10\x03\x18\x07", 1, "at most 6 bytes"),
            (b"\x0a\x06\x0d\1\0\0\0\0", 2, "timestamp as wire type 0"),
            (b"\x08\x01", 0, "indexes as wire type 2"),
            (b"\x0a\x02\x00\x00", 2, "a field"),
            (b"\x0a\x02\x2c\x00", 2, "a field"),
            (b"\x0a\x02\x2f\x00", 2, "a field"),
            (element((1, 5), (2, 3), (3, 7)) + element((1, 4), (2, 3), (3, 8)), 8, "a time from 5 on"),
        ],
    )
    def test_what_no_segment_can_be(self, data, offset, expected):
        assert refusal(decode_segment, data)[:2] == (offset, expected)

    @pytest.mark.slow
    def test_one_odd_message_among_many_is_found_where_it_is(self):
        rows = [(1_700_000_000_000 + number, 3, number) for number in range(20_000)]
        encoded = encode_segment(indexes_of(rows))
        data = encoded + element((1, 1_700_000_020_000), (2, 3), (3, 2**32))
        assert refusal(decode_segment, data)[0] == len(encoded)
        assert rows_of(decode_segment(encoded + element((3, 1), (2, 3), (1, TIME_MAX)), what="it")) == [
            *rows, (TIME_MAX, 3, 1)
        ]  # fmt: skip


class TestMetadataOfOthers:
    def test_fields_in_another_order_are_read(self):
        data = framed(b"\x0a", b"\x18\x04\x10\x05" + framed(b"\x0a", framed(b"\x12", BITMAP) + b"\x08\x03"))
        assert decode_metadata(data, what="snapshot") == (SegmentMetadata({3: BitMap([7])}, 4, 5),)

    @pytest.mark.parametrize(
        ("data", "offset", "expected"),
        [
            (b"", 0, "a segment"),
            (b"\x0a\x00", 2, "max_schedule_timestamp"),
            (framed(b"\x0a", b"\x10\x05"), 4, "min_schedule_timestamp"),
            (segment_message(ledgers=()), 0, "metadata of a segment"),
            (segment_message(first=6), 0, "metadata of a segment"),
            (segment_message(last=2**63), 0, "metadata of a segment"),
            (segment_message(ledgers=((2**63, BITMAP),)), 0, "metadata of a segment"),
            (segment_message(ledgers=((3, BITMAP), (3, BITMAP))), 26, "each ledger once"),
            (segment_message(ledgers=((3, b""),)), 8, "a roaring bitmap"),
            (segment_message(ledgers=((3, BITMAP[:-1]),)), 8, "a roaring bitmap"),
            (segment_message(ledgers=((3, BITMAP + b"\0"),)), 8, "a non-empty roaring bitmap and nothing after it"),
            (
                segment_message(ledgers=((3, BitMap().serialize()),)),
                8,
                "a non-empty roaring bitmap and nothing after it",
            ),
            (framed(b"\x0a", framed(b"\x0a", b"\x08\x03") + b"\x10\x05\x18\x05"), 6, "value"),
            (framed(b"\x0a", framed(b"\x0a", framed(b"\x12", BITMAP)) + b"\x10\x05\x18\x05"), 24, "key"),
            (framed(b"\x0a", b"\x08\x03"), 2, "delayed_index_bit_map as wire type 2"),
            (b"\x85\x86\x31\x00\x00\x00", 3, "at most 3 bytes"),
        ],
    )
    def test_what_no_metadata_can_be(self, data, offset, expected):
        assert refusal(decode_metadata, data)[:2] == (offset, expected)

    @pytest.mark.parametrize(
        "data",
        [
            segment_message(more=b"\x20\x00"),
            segment_message() + b"\x10\x00",
            segment_message(ledgers=((3, BITMAP + b"\x18\x00"),)).replace(b"\x14" + BITMAP, b"\x12" + BITMAP),
        ],
        ids=["of a segment", "of the snapshot", "of a ledger"],
    )
    def test_a_field_that_is_not_known_is_of_a_newer_version(self, data):
        with pytest.raises(UnsupportedVersionError, match=re.escape("snapshot 17: field")):
            decode_metadata(data, what="snapshot 17")


@given(data=st.binary(max_size=200))
@example(data=b"\x0a" * 200)
@example(data=b"\x0a\x06\x08\x00\x10\x00\x18\x00" * 20)
def test_arbitrary_bytes_raise_only_our_own_errors(data):
    for decode, arguments in ((decode_metadata, {}), (decode_segment, {}), (decode_segment, {"metadata": PLAIN[0]})):
        with contextlib.suppress(AckStateError):
            decode(data, what="it", **arguments)
