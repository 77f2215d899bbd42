"""Pulsar's delay snapshots: there and back, byte for byte those of protobuf's own runtime, and the golden files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import example, given
from hypothesis import strategies as st
from pyroaring import BitMap

from ackstate.wire.pulsar.delay_snapshot import (
    DelayedIndexes,
    SegmentMetadata,
    decode_metadata,
    decode_segment,
    encode_metadata,
    encode_segment,
    segment_metadata,
    split_metadata,
)
from strategies import positions

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
TIME_MAX = 2**63 - 1
FIRST = [(1_700_000_000_000, 3, 7), (1_700_000_000_250, 3, 8), (1_700_000_000_250, 5, 0)]
SECOND = [(1_700_000_300_000, 0, 70_000), (TIME_MAX, TIME_MAX, 2**32 - 1)]
# The contents of the golden files besides positions and times.
GOLDEN_CHECKSUMS = (0xC8FE8A53, 0x7888287C)

UINT64, BYTES, MESSAGE, ENUM = 4, 12, 11, 14
OPTIONAL, REQUIRED, REPEATED = 1, 2, 3
MAP = ".pulsar.delay.SnapshotSegmentMetadata.DelayedIndexBitMapEntry"
FIELDS = [
    ("SnapshotMetadata", 1, "metadata_list", REPEATED, MESSAGE, ".pulsar.delay.SnapshotSegmentMetadata"),
    ("SnapshotSegmentMetadata", 1, "delayed_index_bit_map", REPEATED, MESSAGE, MAP),
    ("SnapshotSegmentMetadata", 2, "max_schedule_timestamp", REQUIRED, UINT64, None),
    ("SnapshotSegmentMetadata", 3, "min_schedule_timestamp", REQUIRED, UINT64, None),
    ("SnapshotSegment", 1, "indexes", REPEATED, MESSAGE, ".pulsar.delay.DelayedIndex"),
    ("DelayedIndex", 1, "timestamp", REQUIRED, UINT64, None),
    ("DelayedIndex", 2, "ledger_id", REQUIRED, UINT64, None),
    ("DelayedIndex", 3, "entry_id", REQUIRED, UINT64, None),
]
TYPES = {UINT64: "uint64", BYTES: "bytes", MESSAGE: "message"}


def runtime_classes(*, map_entry):
    """Protobuf's own classes for the messages, which know nothing of ours.

    A map is, on the wire, a repeated message of a key and a value. As such it is written in a given order.
    """
    file = descriptor_pb2.FileDescriptorProto(name="delay.proto", package="pulsar.delay", syntax="proto2")
    messages = {name: file.message_type.add(name=name) for name in dict.fromkeys(row[0] for row in FIELDS)}
    for message, number, name, label, kind, type_name in FIELDS:
        messages[message].field.add(name=name, number=number, label=label, type=kind, type_name=type_name)
    entry = messages["SnapshotSegmentMetadata"].nested_type.add(name="DelayedIndexBitMapEntry")
    entry.options.map_entry = map_entry
    entry.field.add(name="key", number=1, label=OPTIONAL, type=UINT64)
    entry.field.add(name="value", number=2, label=OPTIONAL, type=BYTES)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"pulsar.delay.{name}"))
        for name in ("SnapshotMetadata", "SnapshotSegment")
    ]


SnapshotMetadata, SnapshotSegment = runtime_classes(map_entry=True)
OrderedMetadata, _ = runtime_classes(map_entry=False)


def indexes_of(rows):
    return DelayedIndexes(*np.array(rows, np.int64).reshape(-1, 3).T)


def rows_of(indexes):
    return [*zip(*(column.tolist() for column in indexes), strict=True)]


def metadata_of(rows):
    return segment_metadata(indexes_of(rows), encode_segment(indexes_of(rows)))


def as_pulsar_writes(rows):
    return SnapshotSegment(
        indexes=[{"timestamp": time, "ledger_id": ledger, "entry_id": entry} for time, ledger, entry in rows]
    ).SerializeToString()


times = st.one_of(st.integers(0, 300), st.integers(1_700_000_000_000, 1_700_000_300_000), st.integers(0, TIME_MAX))
segments = st.dictionaries(positions, times, min_size=1, max_size=40).map(
    lambda delayed: sorted((time, *position) for position, time in delayed.items())
)


class TestThereAndBack:
    @given(rows=segments)
    @example(rows=[(0, 0, 0)])
    @example(rows=[(TIME_MAX, TIME_MAX, 2**32 - 1)])
    @example(rows=[(127, 127, 127), (128, 128, 128), (2**56 - 1, 2**49, 2**28), (2**56, 2**56, 2**28 - 1)])
    def test_a_segment(self, rows):
        encoded = encode_segment(indexes_of(rows))
        assert rows_of(decode_segment(encoded, what="segment")) == rows
        assert rows_of(decode_segment(encoded, what="segment", metadata=metadata_of(rows))) == rows

    @given(many=st.lists(segments, max_size=4))
    @example(many=[])
    def test_the_metadata(self, many):
        written = tuple(map(metadata_of, many))
        assert decode_metadata(encode_metadata(written), what="snapshot") == written
        for rows, metadata in zip(many, written, strict=True):
            assert metadata.min_deliver_at_ms == rows[0][0]
            assert metadata.max_deliver_at_ms == rows[-1][0]
            held = {(ledger, entry) for ledger, bitmap in metadata.bitmaps.items() for entry in bitmap}
            assert held == {(ledger, entry) for _, ledger, entry in rows}

    @given(many=st.lists(segments, min_size=1, max_size=4), has_checksums=st.booleans())
    def test_the_metadata_split_by_segment(self, many, has_checksums):
        written = [metadata_of(rows) if has_checksums else replace(metadata_of(rows), checksum=None) for rows in many]
        split = split_metadata(encode_metadata(written), what="snapshot")
        assert split == tuple(encode_metadata((segment,)) for segment in written)

    def test_a_segment_longer_than_a_stretch_whose_numbers_grow(self):
        rows = [(1_700_000_000_000 + number, number % 300, 50 * number) for number in range(20_000)]
        encoded = encode_segment(indexes_of(rows))
        assert encoded == as_pulsar_writes(rows)
        assert rows_of(decode_segment(encoded, what="segment", metadata=metadata_of(rows))) == rows

    def test_arrays_of_other_integers_are_taken_as_they_are(self):
        indexes = DelayedIndexes(np.array([1, 300], np.uint16), np.array([3, 3], np.uint64), np.array([2**32 - 1, 0]))
        assert rows_of(decode_segment(encode_segment(indexes), what="segment")) == [(1, 3, 2**32 - 1), (300, 3, 0)]

    def test_runs_of_entries_take_few_bytes(self):
        metadata = metadata_of([(1_000, 3, entry) for entry in range(5_000)])
        assert len(encode_metadata([metadata])) < 60


class TestAsProtobufItself:
    @given(rows=segments)
    @example(rows=[(0, 0, 0)])
    def test_a_segment(self, rows):
        assert encode_segment(indexes_of(rows)) == as_pulsar_writes(rows)

    @given(many=st.lists(segments, min_size=1, max_size=4))
    @example(many=[[(0, 0, 0)]])
    def test_the_metadata_without_our_checksums(self, many):
        written = tuple(replace(metadata_of(rows), checksum=None) for rows in many)
        ordered, as_map = OrderedMetadata(), SnapshotMetadata()
        for metadata in written:
            times = {
                "max_schedule_timestamp": metadata.max_deliver_at_ms,
                "min_schedule_timestamp": metadata.min_deliver_at_ms,
            }
            bitmaps = {ledger: metadata.bitmaps[ledger].serialize() for ledger in sorted(metadata.bitmaps)}
            pairs = [{"key": ledger, "value": portable} for ledger, portable in bitmaps.items()]
            ordered.metadata_list.add(delayed_index_bit_map=pairs, **times)
            as_map.metadata_list.add(delayed_index_bit_map=bitmaps, **times)
        assert encode_metadata(written) == ordered.SerializeToString()
        assert decode_metadata(as_map.SerializeToString(), what="snapshot") == written

    def test_the_checksums_are_skipped(self):
        read = SnapshotMetadata.FromString(encode_metadata([metadata_of(FIRST), metadata_of(SECOND)]))
        assert [message.min_schedule_timestamp for message in read.metadata_list] == [FIRST[0][0], SECOND[0][0]]
        assert [message.max_schedule_timestamp for message in read.metadata_list] == [FIRST[-1][0], TIME_MAX]
        bitmaps = read.metadata_list[0].delayed_index_bit_map
        assert {ledger: [*BitMap.deserialize(portable)] for ledger, portable in bitmaps.items()} == {3: [7, 8], 5: [0]}

    def test_bitmaps_without_runs_are_read_and_written_back_as_they_were(self):
        bitmaps = {4: BitMap([1, 2, 3, 4]), 9: BitMap(range(5_000)) - BitMap([17])}
        message = OrderedMetadata()
        pairs = [{"key": ledger, "value": bitmap.serialize()} for ledger, bitmap in bitmaps.items()]
        message.metadata_list.add(delayed_index_bit_map=pairs, max_schedule_timestamp=8, min_schedule_timestamp=8)
        data = message.SerializeToString()
        read = decode_metadata(data, what="snapshot")
        assert read == (SegmentMetadata(bitmaps, 8, 8),)
        assert encode_metadata(read) == data


class TestGolden:
    @pytest.mark.parametrize(
        ("name", "checksums"), [("delay-snapshot-v1", GOLDEN_CHECKSUMS), ("delay-snapshot-pulsar", (None, None))]
    )
    def test_the_snapshots_read_as_their_meaning_says(self, name, checksums):
        data = (GOLDEN / f"{name}.bin").read_bytes()
        entries = [(GOLDEN / f"delay-snapshot-segment-{number}.bin").read_bytes() for number in (1, 2)]
        read = decode_metadata(data, what=name)
        assert read == (
            SegmentMetadata({3: BitMap([7, 8]), 5: BitMap([0])}, FIRST[0][0], FIRST[-1][0], checksums[0]),
            SegmentMetadata({0: BitMap([70_000]), TIME_MAX: BitMap([2**32 - 1])}, SECOND[0][0], TIME_MAX, checksums[1]),
        )
        for entry, metadata, rows in zip(entries, read, (FIRST, SECOND), strict=True):
            assert rows_of(decode_segment(entry, what=name, metadata=metadata)) == rows
            assert encode_segment(indexes_of(rows)) == entry
        assert encode_metadata(read) == data

    def test_the_checksums_stand_where_the_document_says(self):
        data = (GOLDEN / "delay-snapshot-v1.bin").read_bytes()
        assert data[:3] == bytes.fromhex("858631")
        assert int.from_bytes(data[3:7], "little") == google_crc32c.value(data[7:])
        of_segments = [data[7:][found.end() :][:4] for found in re.finditer(b"\x85\x86\x31", data[7:])]
        assert [int.from_bytes(each, "little") for each in of_segments] == [*GOLDEN_CHECKSUMS]
        entries = [(GOLDEN / f"delay-snapshot-segment-{number}.bin").read_bytes() for number in (1, 2)]
        assert [*map(google_crc32c.value, entries)] == [*GOLDEN_CHECKSUMS]

    def test_the_document_has_the_fields(self):
        text = (ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8")
        table = text[text.index("\n|", text.index("## Delay snapshot, version 1")) :].split("\n\n")[0]
        rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
        expected = [[message, str(number), name, TYPES[kind]] for message, number, name, _, kind, _ in FIELDS]
        ours = [["SnapshotMetadata", "100448", "ackstate_checksum", "fixed32"]]
        ours += [["SnapshotSegmentMetadata", "100448", "ackstate_checksum", "fixed32"]]
        map_entry = [["delayed_index_bit_map", "1", "key", "uint64"], ["delayed_index_bit_map", "2", "value", "bytes"]]
        assert sorted(row[:4] for row in rows) == sorted(expected + ours + map_entry)


class TestCallersMistakes:
    @pytest.mark.parametrize(
        ("rows", "saying"),
        [
            ([], "at least one"),
            ([(-1, 3, 7)], r"deliver_at_ms must be in 0\.\.9223372036854775807, got -1 to -1"),
            ([(1, -5, 7)], "ledger_ids .* got -5"),
            ([(1, 3, -1)], "entry_ids .* got -1"),
            ([(1, 3, 2**32)], "entry_ids .* got 4294967296"),
            ([(5, 3, 7), (4, 3, 8)], "must not fall"),
        ],
    )
    def test_what_no_segment_can_hold(self, rows, saying):
        with pytest.raises(ValueError, match=saying):
            encode_segment(indexes_of(rows))
        with pytest.raises(ValueError, match=saying):
            segment_metadata(indexes_of(rows), b"")

    def test_times_beyond_63_bits(self):
        one = np.array([1])
        with pytest.raises(ValueError, match="got 9223372036854775808"):
            encode_segment(DelayedIndexes(np.array([2**63], np.uint64), one, one))

    def test_arrays_that_do_not_belong_together(self):
        with pytest.raises(ValueError, match="equal length"):
            encode_segment(DelayedIndexes(np.array([1, 2]), np.array([3]), np.array([7])))
        with pytest.raises(ValueError, match="equal length"):
            encode_segment(DelayedIndexes(*[np.array([[1, 2]])] * 3))
        with pytest.raises(TypeError, match="entry_ids must be integers, got float64"):
            encode_segment(DelayedIndexes(np.array([1]), np.array([3]), np.array([7.5])))

    def test_a_position_that_comes_twice(self):
        rows = [(4, 3, 7), (5, 9, 7), (6, 3, 7)]
        with pytest.raises(ValueError, match="distinct, got a repeated one among 3"):
            segment_metadata(indexes_of(rows), encode_segment(indexes_of(rows)))

    def test_metadata_of_no_segment(self):
        some = {3: BitMap([7])}
        for arguments, saying in [
            (({}, 1, 2), "must have an entry"),
            (({3: BitMap()}, 1, 2), "must have an entry"),
            (({-1: BitMap([7])}, 1, 2), "got -1 to -1"),
            (({2**63: BitMap([7])}, 1, 2), "got 9223372036854775808"),
            ((some, 2, 1), "got 2 to 1"),
            ((some, -1, 1), "got -1 to 1"),
            ((some, 1, 2**63), "got 1 to 9223372036854775808"),
            ((some, 1, 2, 2**32), "got 4294967296"),
            ((some, 1, 2, -1), "checksum must be in .*, got -1"),
        ]:
            with pytest.raises(ValueError, match=saying):
                SegmentMetadata(*arguments)

    def test_some_checksums_and_others_not(self):
        with pytest.raises(ValueError, match="others do not"):
            encode_metadata([metadata_of(FIRST), replace(metadata_of(SECOND), checksum=None)])
