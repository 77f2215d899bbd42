"""The acks that a record of Pulsar keeps under a limit, by each version's rule, and when it is compressed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import AckStateError, BatchIndexes, DeletedRanges, Position
from ackstate.wire.pulsar import (
    Compression,
    CursorInfo,
    LimitRule,
    Limits,
    MissingCodecError,
    PositionInfo,
    RangeForm,
    decode_cursor_info,
    decode_position_info,
    encode_cursor_info,
    encode_position_info,
    limit_ranges,
)
from ackstate.wire.pulsar import cursor_state_pb2 as messages
from strategies import ledger_ids

ROOT = Path(__file__).parents[3]
CODECS = [compression for compression in Compression if compression is not Compression.NONE]


def ranges_of(runs):
    ranges = DeletedRanges()
    for ledger_id, first, end in runs:
        ranges.add_run(ledger_id, first, end)
    return ranges


def batch_of(held):
    batch = BatchIndexes()
    for position, words in held.items():
        batch.ack(position, words)
    return batch


runs = st.tuples(ledger_ids, st.integers(0, 300), st.integers(1, 40))
some_ranges = st.lists(runs.map(lambda run: (run[0], run[1], run[1] + run[2])), max_size=8).map(ranges_of)


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


@pytest.mark.parametrize(("limit", "is_list"), [(2, True), (3, False)])
def test_words_that_would_be_none_become_a_list(limit, is_list):
    limits = Limits(range_count_max=limit, rule=LimitRule.PULSAR_5_0)
    message = messages.PositionInfo.FromString(encode_position_info(PositionInfo(Position(0, 0), ACKED), limits=limits))
    assert bool(message.individual_deleted_messages) == is_list
    assert bool(message.individual_deleted_message_ranges) == (not is_list)


@given(some_ranges, st.none() | st.integers(0, 40), st.sampled_from(LimitRule), st.sampled_from(RangeForm))
def test_what_is_kept_is_a_copy_of_lowest_ranges(deleted, limit, rule, form):
    kept, excluded_count = limit_ranges(deleted, form=form, limits=Limits(range_count_max=limit, rule=rule))
    assert list(kept.runs()) == list(deleted.runs())[: kept.range_count]
    assert excluded_count == len(deleted) - len(kept)
    if limit is not None and rule is LimitRule.EXACT:
        assert kept.range_count == min(limit, deleted.range_count)
    before = deleted.copy()
    kept.add_run(0, 0, 1_000)
    assert deleted == before


def test_batch_indexes_are_limited_from_below():
    batch = batch_of({Position(3, entry): [7] for entry in (9, 2, 5)})
    encoded = encode_position_info(PositionInfo(Position(3, 0), batch=batch), limits=Limits(batch_index_count_max=2))
    assert [position.entry_id for position, _ in decode_position_info(encoded).batch.items()] == [2, 5]


# Compression

MANY = CursorInfo(-1, Position(3, 0), ranges_of((3, first, first + 1) for first in range(2, 4_000, 2)))


@pytest.mark.parametrize("compression", CODECS)
def test_a_record_is_compressed_above_the_threshold_only(compression):
    plain = encode_cursor_info(MANY)
    assert encode_cursor_info(MANY, compression=compression, threshold_bytes=len(plain)) == plain
    packed = encode_cursor_info(MANY, compression=compression, threshold_bytes=len(plain) - 1)
    assert len(packed) < 0.6 * len(plain)
    assert decode_cursor_info(packed) == MANY


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
    for refused in (
        lambda: encode_cursor_info(MANY, compression=compression),
        lambda: decode_cursor_info(packed),
    ):
        with pytest.raises(MissingCodecError, match=r"ackstate\[compression\]"):
            refused()
    assert issubclass(MissingCodecError, AckStateError)


@pytest.mark.slow
def test_importing_the_codec_imports_no_compression():
    program = "import ackstate.wire.pulsar, sys; print('cramjam' in sys.modules or 'zstandard' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.strip() == "False"
