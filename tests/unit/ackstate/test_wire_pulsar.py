"""Pulsar's records there and back: against the protobuf runtime, against a plain set, and by hand."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ackstate import DeletedRanges, LedgerMap, Position
from ackstate.batch_indexes import BatchIndexes
from ackstate.wire.pulsar import (
    Compression,
    CursorInfo,
    Limits,
    PositionInfo,
    RangeForm,
    codec,
    decode_cursor_info,
    decode_position_info,
    encode_cursor_info,
    encode_position_info,
)
from ackstate.wire.pulsar import cursor_state_pb2 as messages
from ackstate.wire.pulsar import ranges as range_codec
from ackstate.wire.pulsar.ranges import RangeRows, bitmap_of_words, encode_range_list, words_of
from strategies import ENTRY_ID_MAX, LEDGER_ID_MAX, entry_ids, ledger_ids, positions

ROOT = Path(__file__).parents[3]
CODECS = [compression for compression in Compression if compression is not Compression.NONE]
RANGES_TAG = 0x1A


def ranges_of(runs):
    ranges = DeletedRanges()
    for ledger_id, first, end in runs:
        ranges.add_run(ledger_id, first, end)
    return ranges


def run_from(ledger_id, first, length):
    return ledger_id, first, min(first + length, ENTRY_ID_MAX + 1)


def batch_of(held):
    batch = BatchIndexes()
    for position, words in held.items():
        batch.ack(position, words)
    return batch


words = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(lambda some: [*some, 5])
batches = st.dictionaries(positions, words, max_size=4).map(batch_of)
properties = st.dictionaries(st.text(max_size=6), st.integers(-(2**63), 2**63 - 1), max_size=3)
unknowns = st.sampled_from([b"", bytes.fromhex("4a0161"), bytes.fromhex("5005")])
mark_deletes = st.builds(Position, ledger_ids, entry_ids | st.just(-1))
ranges_anywhere = st.lists(st.builds(run_from, ledger_ids, entry_ids, st.integers(1, 40)), max_size=12).map(ranges_of)
ranges_low = st.lists(
    st.builds(run_from, ledger_ids, st.integers(0, 300) | st.integers(300_000, 300_200), st.integers(1, 90)), max_size=8
).map(ranges_of)
position_infos = st.builds(PositionInfo, mark_deletes, ranges_anywhere, batches, properties, unknowns)
cursor_infos = st.builds(
    CursorInfo,
    st.integers(-1, LEDGER_ID_MAX),
    st.none() | mark_deletes,
    ranges_anywhere,
    batches,
    properties,
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=3),
    unknowns,
)


# There and back


@pytest.mark.slow
@given(position_infos)
def test_a_position_info_goes_there_and_back_as_a_list(info):
    assert decode_position_info(encode_position_info(info, form=RangeForm.LIST)) == info


@pytest.mark.slow
@given(position_infos, ranges_low)
def test_a_position_info_goes_there_and_back_as_words(info, deleted):
    info = replace(info, deleted=deleted)
    assert decode_position_info(encode_position_info(info)) == info


@given(cursor_infos)
def test_a_cursor_info_goes_there_and_back(info):
    assert decode_cursor_info(encode_cursor_info(info)) == info


@pytest.mark.slow
@pytest.mark.parametrize("compression", Compression)
@given(info=cursor_infos)
def test_a_compressed_cursor_info_goes_there_and_back(info, compression):
    info = replace(info, properties={}, cursor_properties={})
    encoded = encode_cursor_info(info, compression=compression, threshold_bytes=0)
    assert (compression is not Compression.NONE) == encoded.startswith(b"\x47\x78")
    assert decode_cursor_info(encoded) == info


# Against the protobuf runtime


def message_of(runs):
    message = messages.PositionInfo(ledger_id=0, entry_id=0)
    for ledger_id, first, end in runs:
        interval = message.individual_deleted_messages.add()
        interval.lower_endpoint.ledger_id = interval.upper_endpoint.ledger_id = ledger_id
        interval.lower_endpoint.entry_id = first - 1
        interval.upper_endpoint.entry_id = end - 1
    return message


def assert_written_as_the_runtime_does(ranges):
    written = b"".join(encode_range_list(ranges, tag=RANGES_TAG))
    assert bytes.fromhex("08001000") + written == message_of(ranges.runs()).SerializeToString()
    assert len(written) == ranges.record_bytes


@pytest.mark.parametrize("few", [0, 2, 8])
@given(ranges=ranges_anywhere)
def test_a_list_is_written_as_the_runtime_does(ranges, few):
    """One by one up to a few ranges of a ledger, by columns beyond."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_codec, "_FEW", few)
        assert_written_as_the_runtime_does(ranges)


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs",
    [
        lambda: ((9, first, first + 1) for first in range(0, 20_000, 2)),
        lambda: ((ledger, first, first + 3) for ledger in (1, 2, 127, 128, 2**40) for first in range(0, 3_000, 7)),
        lambda: ((ledger, ledger, ledger + 50) for ledger in range(5_000)),
        lambda: ((3, first, first + 40) for first in range(100, 9_000_000, 1_300)),
    ],
    ids=["one ledger", "few ledgers", "a range each", "wide"],
)
def test_a_long_list_is_written_and_read_as_the_runtime_does(runs):
    ranges = ranges_of(runs())
    assert_written_as_the_runtime_does(ranges)
    info = PositionInfo(Position(0, 0), ranges)
    encoded = encode_position_info(info, form=RangeForm.LIST)
    assert decode_position_info(encoded) == info
    rows, end = codec.decode_range_list(encoded, 4, tag=RANGES_TAG)
    assert end == len(encoded)
    assert len(rows.lower_ledger) == ranges.range_count


@pytest.mark.slow
@given(position_infos, ranges_low, st.sampled_from(RangeForm))
def test_the_runtime_reads_what_is_written(info, deleted, form):
    message = messages.PositionInfo.FromString(encode_position_info(replace(info, deleted=deleted), form=form))
    assert Position(message.ledger_id, message.entry_id) == info.position
    assert {each.name: each.value for each in message.properties} == info.properties
    assert [(each.position.entry_id, tuple(each.delete_set)) for each in message.batched_entry_deletion_index_info] == [
        (position.entry_id, held) for position, held in info.batch.items()
    ]
    if form is RangeForm.LIST:
        assert message.individual_deleted_messages == message_of(deleted.runs()).individual_deleted_messages
        assert not message.individual_deleted_message_ranges
    else:
        assert not message.individual_deleted_messages
        assert [(each.key, list(each.values)) for each in message.individual_deleted_message_ranges] == [
            (ledger_id, naive_words(bitmap)) for ledger_id, bitmap in deleted.bitmaps()
        ]


def naive_words(entries):
    mask = sum(1 << entry for entry in entries)
    raw = mask.to_bytes(8 * max(2, mask.bit_length() // 64 + 1), "little")
    found = [int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, len(raw), 8)]
    while len(found) > 2 and not found[-1]:
        found.pop()
    return found


def test_words_far_from_0_go_there_and_back():
    ranges = ranges_of([(3, 5, 6), (3, 4_096 * 64 - 1, 4_096 * 64 + 1), (3, 9_000_000, 9_000_070)])
    entries = ranges.entries(3)
    assert bitmap_of_words(words_of(entries)) == entries


# Any layout, any order, any overlap: against a plain set

LEDGERS = LedgerMap.from_counts({1: 6, 2: 0, 4: 9, 5: 3})
small_positions = st.tuples(st.integers(0, 6), st.integers(-1, 11))
small_ranges = st.tuples(small_positions, small_positions).map(sorted)
layouts = st.sampled_from(["usual", "upper first", "unknown inside", "long varint", "twice"])


def varint(number, size=1):
    number &= 2**64 - 1
    digits = [number >> 7 * index & 0x7F for index in range(10)]
    while len(digits) > size and not digits[-1]:
        digits.pop()
    return bytes([*(digit | 0x80 for digit in digits[:-1]), digits[-1]])


def framed(tag, body):
    return bytes([tag]) + varint(len(body)) + body


def written_range(layout, lower, upper):
    size = 3 if layout == "long varint" else 1
    ends = [b"\x08" + varint(ledger, size) + b"\x10" + varint(entry) for ledger, entry in (lower, upper)]
    parts = [framed(0x0A, ends[0]), framed(0x12, ends[1])]
    if layout == "upper first":
        parts.reverse()
    if layout == "unknown inside":
        parts.insert(1, b"\x18\x05")
    if layout == "twice":  # The ends of one that comes in parts are one end.
        parts.insert(0, framed(0x12, b"\x10\x63"))
    return framed(RANGES_TAG, b"".join(parts))


def naive_entries(ranges, ledgers):
    counts = ledgers.counts() if ledgers else {}
    acked = set()
    for (l1, e1), (l2, e2) in ranges:
        for ledger in range(7):
            first = e1 + 1 if ledger == l1 else 0
            last = e2 if ledger == l2 else counts.get(ledger, 0) - 1
            if l1 <= ledger <= l2:
                acked |= {Position(ledger, entry) for entry in range(first, last + 1)}
    return acked


@pytest.mark.slow
@given(st.lists(st.tuples(layouts, small_ranges), max_size=40), st.sampled_from([None, LEDGERS]))
def test_ranges_of_any_layout_are_read_on_both_roads_as_the_entries_that_they_stand_for(written, ledgers):
    record = bytes.fromhex("08001000") + b"".join(written_range(layout, *ends) for layout, ends in written)
    expected = naive_entries([ends for _, ends in written], ledgers)
    for road in (nullcontext(), without_the_fast_road()):
        with road:
            deleted = decode_position_info(record, ledgers).deleted
        assert {Position(ledger, entry) for ledger, first, end in deleted.runs() for entry in range(first, end)} == (
            expected
        )
        deleted._check()


@contextmanager
def without_the_fast_road():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            codec, "decode_range_list", lambda _data, begin, *, tag: (RangeRows(*np.empty((4, 0), np.int64)), begin)
        )
        yield


@pytest.mark.slow
@given(position_infos)
def test_both_roads_read_the_same(info):
    encoded = encode_position_info(info, form=RangeForm.LIST)
    with without_the_fast_road():
        assert decode_position_info(encoded) == info


@pytest.mark.parametrize("cut", range(12))
def test_a_list_that_turns_unusual_is_read_to_its_end(cut):
    ranges = [((3, entry - 1), (3, entry)) for entry in range(0, 120, 2)]
    layouts_by_turn = ["usual"] * (5 * cut) + ["upper first"] * (60 - 5 * cut)
    record = bytes.fromhex("08001000") + b"".join(
        written_range(layout, *ends) for layout, ends in zip(layouts_by_turn, ranges, strict=True)
    )
    assert list(decode_position_info(record).deleted.entries(3)) == list(range(0, 120, 2))


@given(runs=st.lists(st.builds(run_from, st.integers(0, 2), st.integers(0, 60), st.integers(1, 30)), max_size=12))
@example(runs=[(1, 0, 30), (1, 3, 5), (1, 10, 12)])
def test_overlapping_runs_are_merged_before_they_are_added(runs):
    columns = np.array([(ledger, first, end - 1) for ledger, first, end in runs], np.int64).reshape(-1, 3).T
    merged = list(zip(*(column.tolist() for column in range_codec._merged(range_codec._Runs(*columns))), strict=True))
    for (ledger, _, last), (next_ledger, first, _) in pairwise(merged):
        assert (ledger, last) < (next_ledger, first)
    assert ranges_of((ledger, first, last + 1) for ledger, first, last in merged) == ranges_of(runs)


@pytest.mark.slow
def test_overlapping_ranges_across_many_ledgers_cost_no_more_than_their_ledgers():
    counts = dict.fromkeys(range(1, 20_001), 1)
    ledgers = LedgerMap.from_counts(counts)
    asked = []
    known = LedgerMap.ledgers_between
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LedgerMap, "ledgers_between", lambda *ids: asked.append(known(*ids)) or asked[-1])
        record = bytes.fromhex("08001000") + b"".join(
            written_range("usual", (1 + index, -1), (20_000 - index, 0)) for index in range(2_000)
        )
        deleted = decode_position_info(record, ledgers).deleted
    assert len(deleted) == 20_000
    assert sum(map(len, asked)) <= 20_000


# By hand


def test_the_words_of_a_low_ledger_are_two():
    info = PositionInfo(Position(3, 0), ranges_of([(3, 2, 3), (3, 5, 6)]))
    assert encode_position_info(info).hex() == "080310003206080310241000"


@pytest.mark.parametrize(
    "form6",
    ["320408031024", "3206080310241000", "320808031024" + "10001000", "320508031201" + "24", "320608031202" + "2400"],
)
def test_words_are_read_with_any_zero_words_behind_and_packed_or_not(form6):
    deleted = decode_position_info(bytes.fromhex("08031000" + form6)).deleted
    assert deleted == ranges_of([(3, 2, 3), (3, 5, 6)])


def test_a_list_outranks_words():
    record = bytes.fromhex("08031000") + written_range("usual", (3, 6), (3, 7)) + bytes.fromhex("3206080310241000")
    assert str(decode_position_info(record).deleted) == "[(3:6..3:7]]"


def test_a_ledger_whose_words_are_all_zero_is_none():
    assert not decode_position_info(bytes.fromhex("08031000" + "320408031000")).deleted


def test_of_what_comes_twice_the_last_counts():
    twice = bytes.fromhex("0801" + "08031000" + "22050a01701001" + "22050a01701002" + "2a080a0408031008" + "1009")
    record = twice + bytes.fromhex("2a080a04080310081006")
    info = decode_position_info(record)
    assert info.position == Position(3, 0)
    assert info.properties == {"p": 2}
    assert dict(info.batch.items()) == {Position(3, 8): (6,)}


def test_state_at_or_below_the_mark_delete_is_kept_as_read():
    info = PositionInfo(Position(3, 9), ranges_of([(2, 0, 4), (3, 5, 7)]), batch_of({Position(3, 2): [1]}))
    for form in RangeForm:
        assert decode_position_info(encode_position_info(info, form=form)) == info


@pytest.mark.parametrize("idle_since_ms", [0, 1, 1_795_191_315_442, -1, 2**63 - 1, -(2**63)])
def test_since_when_a_subscription_has_been_idle_is_read_and_written_where_pulsar_5_0_1_has_it(idle_since_ms):
    number = encode_position_info(PositionInfo(Position(3, 1), idle_since_ms=idle_since_ms))[5:]
    for encode, decode, tag, info in (
        (encode_position_info, decode_position_info, "38", PositionInfo(Position(3, 1), properties={"p": 1})),
        (encode_cursor_info, decode_cursor_info, "48", CursorInfo(4, cursor_properties={"a": "b"}, term=3)),
    ):
        before, found = encode(info), decode(encode(info) + bytes.fromhex(tag) + number)
        assert (decode(before).idle_since_ms, found) == (None, replace(info, idle_since_ms=idle_since_ms))
        assert decode(encode(found)) == found
        assert len(encode(found)) == len(before) + 1 + len(number)
        assert messages.PositionInfo.FromString(b"\x08\x03\x10\x01\x38" + number).idle_since == idle_since_ms


@pytest.mark.parametrize("other_type", ["023130", "0000000000000000"])
def test_a_field_in_the_place_of_the_idle_time_that_is_no_number_is_unknown(other_type):
    wire_type = 2 if other_type == "023130" else 1
    for encode, decode, number, info in (
        (encode_position_info, decode_position_info, 7, PositionInfo(Position(3, 1))),
        (encode_cursor_info, decode_cursor_info, 9, CursorInfo(4)),
    ):
        record = encode(info) + bytes([number << 3 | wire_type]) + bytes.fromhex(other_type)
        found = decode(record)
        assert (found.idle_since_ms, replace(found, unknown=b"")) == (None, info)
        assert encode(found) == record


def test_unknown_fields_come_back_behind_all_others():
    known = encode_position_info(PositionInfo(Position(3, 1), properties={"p": 1}))
    unknown = bytes.fromhex("3a0161") + bytes.fromhex("d20302abcd")
    info = decode_position_info(unknown[:3] + known + unknown[3:])
    assert info.unknown == unknown
    assert encode_position_info(info) == known + unknown


@pytest.mark.parametrize("unknown", [bytes.fromhex("0805"), bytes.fromhex("4a05"), b"\x07"])
def test_unknown_fields_that_are_known_or_none_are_refused(unknown):
    for encode in (
        lambda: encode_position_info(PositionInfo(Position(3, 1), unknown=unknown)),
        lambda: encode_cursor_info(CursorInfo(-1, unknown=unknown)),
    ):
        with pytest.raises(ValueError, match="unknown fields"):
            encode()


@pytest.mark.parametrize("wrong", [{"p": 2**63}, {"p": -(2**63) - 1}, {"\ud800": 1}])
def test_properties_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError):
        encode_position_info(PositionInfo(Position(3, 1), properties=wrong))
    with pytest.raises(ValueError):
        encode_cursor_info(CursorInfo(-1, properties=wrong))


def test_records_that_cannot_be_are_refused():
    for wrong in (
        lambda: PositionInfo(Position(-1, -1)),
        lambda: CursorInfo(-2),
        lambda: CursorInfo(2**63),
        lambda: CursorInfo(-1, Position(3, 2**32)),
        lambda: Limits(range_count_max=-1),
        lambda: Limits(batch_index_count_max=-1),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(TypeError):
        decode_position_info("text")


# The generated classes


@pytest.mark.slow
def test_the_generated_classes_are_what_the_command_in_the_schema_makes(tmp_path):
    schema = Path("ackstate/wire/pulsar/cursor_state.proto")
    (command,) = [line for line in (ROOT / schema).read_text().splitlines() if "grpc_tools.protoc" in line]
    arguments = command.removeprefix("//").replace("_out=.", f"_out={tmp_path}").split()
    subprocess.run([sys.executable, *arguments[1:]], cwd=ROOT, check=True)
    for name in ("cursor_state_pb2.py", "cursor_state_pb2.pyi"):
        assert (tmp_path / schema.with_name(name)).read_text() == (ROOT / schema.with_name(name)).read_text()
