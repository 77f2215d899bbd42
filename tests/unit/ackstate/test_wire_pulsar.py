"""Pulsar's records there and back: against the protobuf runtime, a plain set and by hand; limits and compression."""

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import AckStateError, BatchIndexes, CorruptStateError, DeletedRanges, LedgerMap, Position
from ackstate.wire.pulsar import (
    Compression,
    CursorInfo,
    LimitRule,
    Limits,
    MissingCodecError,
    PositionInfo,
    RangeForm,
    codec,
    decode_cursor_info,
    decode_position_info,
    encode_cursor_info,
    encode_position_info,
    limit_ranges,
)
from ackstate.wire.pulsar.ranges import RangeRows
from strategies import ENTRY_ID_MAX, LEDGER_ID_MAX, entry_ids, ledger_ids, positions

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


# There and back, and against the protobuf runtime.


@pytest.mark.slow
@given(cursor_infos, st.sampled_from(Compression))
def test_a_compressed_cursor_info_goes_there_and_back(info, compression):
    assert decode_cursor_info(encode_cursor_info(info)) == info
    info = replace(info, properties={}, cursor_properties={})
    encoded = encode_cursor_info(info, compression=compression, threshold_bytes=0)
    assert (compression is not Compression.NONE) == encoded.startswith(b"\x47\x78")
    assert decode_cursor_info(encoded) == info


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


# By hand


@pytest.mark.parametrize(
    "form6",
    ["320408031024", "3206080310241000", "320808031024" + "10001000", "320508031201" + "24", "320608031202" + "2400"],
)
def test_words_are_read_with_any_zero_words_behind_and_packed_or_not(form6):
    deleted = decode_position_info(bytes.fromhex("08031000" + form6)).deleted
    assert deleted == ranges_of([(3, 2, 3), (3, 5, 6)])


def test_words_above_the_highest_entry_must_be_zero(monkeypatch):
    monkeypatch.setattr(codec, "WORD_COUNT_MAX", 1)
    assert decode_position_info(bytes.fromhex("08031000" + "3206080310241000")).deleted == ranges_of(
        [(3, 2, 3), (3, 5, 6)]
    )
    with pytest.raises(CorruptStateError, match="entries up to"):
        decode_position_info(bytes.fromhex("08031000" + "3206080310241001"))


def test_words_of_many_entries_go_there_and_back():
    info = PositionInfo(Position(3, 1), ranges_of([(4, 7, 9), (4, 300_000, 300_001), (4, 600_000, 900_000)]))
    assert decode_position_info(encode_position_info(info, form=RangeForm.WORDS)) == info


def test_a_list_outranks_words_and_a_ledger_whose_words_are_all_zero_is_none():
    assert not decode_position_info(bytes.fromhex("08031000" + "320408031000")).deleted
    record = bytes.fromhex("08031000") + written_range("usual", (3, 6), (3, 7)) + bytes.fromhex("3206080310241000")
    assert str(decode_position_info(record).deleted) == "[(3:6..3:7]]"


def test_unknown_fields_come_back_behind_all_others():
    known = encode_position_info(PositionInfo(Position(3, 1), properties={"p": 1}))
    unknown = bytes.fromhex("3a0161") + bytes.fromhex("d20302abcd")
    info = decode_position_info(unknown[:3] + known + unknown[3:])
    assert info.unknown == unknown
    assert encode_position_info(info) == known + unknown


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *(
            (lambda wrong=wrong, make=make: make(wrong), ValueError)
            for wrong in (
                {"properties": {"p": 2**63}}, {"properties": {"p": -(2**63) - 1}}, {"properties": {"\ud800": 1}},
                {"unknown": bytes.fromhex("0805")}, {"unknown": bytes.fromhex("4a05")}, {"unknown": b"\x07"},
            )
            for make in (
                lambda wrong: encode_position_info(PositionInfo(Position(3, 1), **wrong)),
                lambda wrong: encode_cursor_info(CursorInfo(-1, **wrong)),
            )
        ),
        (lambda: PositionInfo(Position(-1, -1)), ValueError),
        (lambda: CursorInfo(-2), ValueError),
        (lambda: CursorInfo(2**63), ValueError),
        (lambda: CursorInfo(-1, Position(3, 2**32)), ValueError),
        (lambda: Limits(range_count_max=-1), ValueError),
        (lambda: Limits(batch_index_count_max=-1), ValueError),
        (lambda: decode_position_info("text"), TypeError),
    ],
)  # fmt: skip
def test_records_that_cannot_be_are_refused(call, error):
    with pytest.raises(error):
        call()


# Limits

ACKED = ranges_of([(1, 0, 2), (1, 4, 5), (2, 0, 5), (4, 7, 8), (5, 1, 3)])


@pytest.mark.parametrize(
    ("rule", "form", "limit", "kept"),
    [
        (LimitRule.EXACT, RangeForm.LIST, 2, "[(1:-1..1:1],(1:3..1:4]]"),
        (LimitRule.EXACT, RangeForm.WORDS, 3, "[(1:-1..1:1],(1:3..1:4],(2:-1..2:4]]"),
        (LimitRule.EXACT, RangeForm.WORDS, 0, "[]"),
        (LimitRule.PULSAR_4_2, RangeForm.LIST, 1, "[(1:-1..1:1],(1:3..1:4]]"),
        (LimitRule.PULSAR_4_2, RangeForm.LIST, 0, "[(1:-1..1:1]]"),
        (LimitRule.PULSAR_5_0_M1, RangeForm.LIST, 1, "[(1:-1..1:1]]"),
        (LimitRule.PULSAR_5_0, RangeForm.LIST, 1, "[(1:-1..1:1]]"),
        (LimitRule.PULSAR_4_2, RangeForm.WORDS, 0, "[(1:-1..1:1],(1:3..1:4]]"),
        (LimitRule.PULSAR_4_2, RangeForm.WORDS, 2, "[(1:-1..1:1],(1:3..1:4]]"),
        (LimitRule.PULSAR_4_2, RangeForm.WORDS, 3, "[(1:-1..1:1],(1:3..1:4],(2:-1..2:4]]"),
        (LimitRule.PULSAR_5_0_M1, RangeForm.WORDS, 7, "[(1:-1..1:1],(1:3..1:4],(2:-1..2:4]]"),
        (LimitRule.PULSAR_5_0, RangeForm.WORDS, 3, "[(1:-1..1:1],(1:3..1:4]]"),
        (LimitRule.PULSAR_5_0, RangeForm.WORDS, 8, "[(1:-1..1:1],(1:3..1:4],(2:-1..2:4]]"),
        (LimitRule.PULSAR_5_0, RangeForm.WORDS, 9, "[(1:-1..1:1],(1:3..1:4],(2:-1..2:4],(4:6..4:7]]"),
        # Nothing fits as words, so it is a list, and that has a limit of its own.
        (LimitRule.PULSAR_5_0, RangeForm.WORDS, 1, "[(1:-1..1:1]]"),
        (LimitRule.PULSAR_5_0, RangeForm.WORDS, 2, "[(1:-1..1:1],(1:3..1:4]]"),
    ],
)
def test_each_rule_keeps_what_it_says(rule, form, limit, kept):
    limits = Limits(range_count_max=limit, rule=rule)
    selection = limit_ranges(ACKED, form=form, limits=limits)
    assert str(selection.kept) == kept
    assert selection.excluded_count == len(ACKED) - len(selection.kept)
    encoded = encode_position_info(PositionInfo(Position(0, 0), ACKED), form=form, limits=limits)
    assert str(decode_position_info(encoded).deleted) == kept
    if form is RangeForm.LIST:
        record = encode_cursor_info(CursorInfo(-1, deleted=ACKED), limits=limits)
        assert str(decode_cursor_info(record).deleted) == kept


def test_what_a_record_would_keep_does_not_change_what_is_acked():
    acked = ACKED.copy()
    limit_ranges(acked, form=RangeForm.LIST, limits=Limits()).kept.add(Position(9, 9))
    assert acked == ACKED


# Compression

MANY = CursorInfo(-1, Position(3, 0), ranges_of((3, first, first + 1) for first in range(2, 4_000, 2)))


@pytest.mark.parametrize("having", [{"properties": {"p": 1}}, {"cursor_properties": {"p": "q"}}])
def test_a_record_with_properties_is_never_compressed(having):
    info = replace(MANY, **having)
    assert encode_cursor_info(info, compression=Compression.LZ4, threshold_bytes=0) == encode_cursor_info(info)


@pytest.mark.parametrize("compression", CODECS)
def test_a_record_that_would_shrink_too_far_to_be_believed_stays_as_it_is(compression):
    info = CursorInfo(-1, unknown=bytes.fromhex("4aa09c01") + bytes(20_000))
    encoded = encode_cursor_info(info, compression=compression)
    assert decode_cursor_info(encoded) == info
    assert len(encoded) * 128 >= 20_000


@pytest.mark.parametrize(
    ("package", "compression"),
    [("cramjam", Compression.LZ4), ("cramjam", Compression.SNAPPY), ("zstandard", Compression.ZSTD)],
)
def test_a_missing_package_says_what_to_install(monkeypatch, package, compression):
    packed = encode_cursor_info(MANY, compression=compression)
    monkeypatch.setitem(sys.modules, package, None)
    for refused in (lambda: encode_cursor_info(MANY, compression=compression), lambda: decode_cursor_info(packed)):
        with pytest.raises(MissingCodecError, match=r"ackstate\[compression\]"):
            refused()
    assert issubclass(MissingCodecError, AckStateError)
