"""Pulsar's delay snapshots: there and back, byte for byte those of protobuf's own runtime, and the golden files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pyroaring import BitMap

from ackstate.wire.pulsar.delay_snapshot import (
    DelayedIndexes,
    SegmentMetadata,
    decode_metadata,
    decode_segment,
    encode_metadata,
    encode_segment,
    segment_metadata,
)

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
TIME_MAX = 2**63 - 1
FIRST = [(1_700_000_000_000, 3, 7), (1_700_000_000_250, 3, 8), (1_700_000_000_250, 5, 0)]
SECOND = [(1_700_000_300_000, 0, 70_000), (TIME_MAX, TIME_MAX, 2**32 - 1)]
# The contents of the golden files besides positions and times.
GOLDEN_CHECKSUMS = (0xC8FE8A53, 0x7888287C)

UINT64, BYTES, MESSAGE = 4, 12, 11
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


def indexes_of(rows):
    return DelayedIndexes(*np.array(rows, np.int64).reshape(-1, 3).T)


def rows_of(indexes):
    return [*zip(*(column.tolist() for column in indexes), strict=True)]


def metadata_of(rows):
    return segment_metadata(indexes_of(rows), encode_segment(indexes_of(rows)))


def test_the_checksums_are_skipped_by_protobuf():
    read = SnapshotMetadata.FromString(encode_metadata([metadata_of(FIRST), metadata_of(SECOND)]))
    assert [message.min_schedule_timestamp for message in read.metadata_list] == [FIRST[0][0], SECOND[0][0]]
    assert [message.max_schedule_timestamp for message in read.metadata_list] == [FIRST[-1][0], TIME_MAX]
    bitmaps = read.metadata_list[0].delayed_index_bit_map
    assert {ledger: [*BitMap.deserialize(portable)] for ledger, portable in bitmaps.items()} == {3: [7, 8], 5: [0]}


@pytest.mark.parametrize(
    ("name", "checksums"), [("delay-snapshot-v1", GOLDEN_CHECKSUMS), ("delay-snapshot-pulsar", (None, None))]
)
def test_the_golden_snapshots_read_as_their_meaning_says(name, checksums):
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


ONE = np.array([1])


@pytest.mark.parametrize(
    ("indexes", "error", "saying"),
    [
        (indexes_of([]), ValueError, "at least one"),
        (indexes_of([(-1, 3, 7)]), ValueError, r"deliver_at_ms must be in 0\.\.9223372036854775807, got -1 to -1"),
        (indexes_of([(1, -5, 7)]), ValueError, "ledger_ids .* got -5"),
        (indexes_of([(1, 3, -1)]), ValueError, "entry_ids .* got -1"),
        (indexes_of([(1, 3, 2**32)]), ValueError, "entry_ids .* got 4294967296"),
        (indexes_of([(5, 3, 7), (4, 3, 8)]), ValueError, "must not fall"),
        (DelayedIndexes(np.array([2**63], np.uint64), ONE, ONE), ValueError, "got 9223372036854775808"),
        (DelayedIndexes(np.array([1, 2]), ONE, ONE), ValueError, "equal length"),
        (DelayedIndexes(*[np.array([[1, 2]])] * 3), ValueError, "equal length"),
        (DelayedIndexes(ONE, ONE, np.array([7.5])), TypeError, "entry_ids must be integers, got float64"),
    ],
)
def test_what_no_segment_can_hold_is_refused(indexes, error, saying):
    with pytest.raises(error, match=saying):
        encode_segment(indexes)
    with pytest.raises(error, match=saying):
        segment_metadata(indexes, b"")


SOME = {3: BitMap([7])}


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (({}, 1, 2), "must have an entry"),
        (({3: BitMap()}, 1, 2), "must have an entry"),
        (({-1: BitMap([7])}, 1, 2), "got -1 to -1"),
        (({2**63: BitMap([7])}, 1, 2), "got 9223372036854775808"),
        ((SOME, 2, 1), "got 2 to 1"),
        ((SOME, -1, 1), "got -1 to 1"),
        ((SOME, 1, 2**63), "got 1 to 9223372036854775808"),
        ((SOME, 1, 2, 2**32), "got 4294967296"),
        ((SOME, 1, 2, -1), "checksum must be in .*, got -1"),
    ],
)
def test_metadata_of_no_segment_is_refused(arguments, saying):
    with pytest.raises(ValueError, match=saying):
        SegmentMetadata(*arguments)


def test_metadata_of_a_repeated_position_and_of_some_checksums_is_refused():
    with pytest.raises(ValueError, match="distinct, got a repeated one among 3"):
        metadata_of([(4, 3, 7), (5, 9, 7), (6, 3, 7)])
    with pytest.raises(ValueError, match="others do not"):
        encode_metadata([metadata_of(FIRST), replace(metadata_of(SECOND), checksum=None)])
