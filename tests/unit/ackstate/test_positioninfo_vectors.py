"""States of a real cursor of Pulsar 5.0.0-M1 and the bytes that it and 5.0.1 wrote for them: ours are the same.

Two named deviations.

order: in words, Pulsar writes the ledgers in the order of a hash map, and we in theirs.

dropped late: Pulsar forgets the batch indexes at or below the mark-delete only after a write, so
the words entry, which was the first, still has some that the recorded state has no longer. They are put back into the
state before it is written here.

Fields: `state` is all of the cursor before any limit; `longArrayHex` and `messageRangeHex` its last entry in both
forms, `...Decoded` their content; `metaWhileOpenHex`, `metaClosedHex` and `metaClosedCompressedHex` the metadata
record; `lastActive` its field 6, a wall clock; `reopenedFromMeta` the cursor after reopening.
"""

import gzip
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ackstate import DeletedRanges, Position
from ackstate.batch_indexes import BatchIndexes
from ackstate.wire.pulsar import (
    Compression,
    CursorInfo,
    LimitRule,
    Limits,
    PositionInfo,
    RangeForm,
    decode_cursor_info,
    decode_position_info,
    encode_cursor_info,
    encode_position_info,
    limit_ranges,
)
from ackstate.wire.pulsar import cursor_state_pb2 as messages
from ackstate.wire.pulsar.compression import compress, decompress

VECTORS = Path(__file__).parents[2] / "vectors" / "positioninfo.jsonl.gz"
RANGE = re.compile(r"\((\d+):(-?\d+)\.\.(\d+):(\d+)\]")


def recorded():
    with gzip.open(VECTORS, "rt") as lines:
        return list(map(json.loads, lines))


def ranges_of(text):
    ranges = DeletedRanges()
    for ids in RANGE.findall(text):
        lower_ledger, lower_entry, upper_ledger, upper_entry = map(int, ids)
        ranges.add_open_closed(Position(lower_ledger, lower_entry), Position(upper_ledger, upper_entry))
    assert str(ranges) == text
    return ranges


def batch_of(held):
    batch = BatchIndexes()
    for text, words in held.items():
        batch.ack(Position.parse(text), words)
    return batch


def limits_of(case):
    config = case["config"]
    return Limits(config["maxUnackedRangesToPersist"], config["maxBatchDeletedIndexToPersist"], LimitRule.PULSAR_5_0_M1)


def position_info_of(case):
    state = case["state"]
    mark_delete = Position(*state["md"])
    return PositionInfo(mark_delete, ranges_of(state["ranges"]), batch_of(state["batch"] or {}), state["props"])


def with_dropped_late(info, written):
    """The state as it was when the words entry was written, and how many batches were forgotten since."""
    batch = info.batch.copy()
    late = [(position, words) for position, words in written.batch.items() if position <= info.position]
    for position, words in late:
        batch.ack(position, words)
    return PositionInfo(info.position, info.deleted, batch, info.properties), len(late)


def in_order_of_ledger(data):
    message = messages.PositionInfo.FromString(data)
    message.individual_deleted_message_ranges.sort(key=lambda each: each.key)
    return message.SerializeToString()


def test_every_cursor_ledger_entry_is_read_and_written_as_recorded():
    cases, counts = recorded(), Counter()
    for case in cases:
        info, limits = position_info_of(case), limits_of(case)
        assert info.deleted.range_count == case["state"]["size"]
        as_list, as_words = bytes.fromhex(case["messageRangeHex"]), bytes.fromhex(case["longArrayHex"])
        assert encode_position_info(info, form=RangeForm.LIST, limits=limits) == as_list, case["id"]
        before, late = with_dropped_late(info, decode_position_info(as_words))
        assert encode_position_info(before, limits=limits) == in_order_of_ledger(as_words), case["id"]
        counts["dropped late"] += late > 0
        counts["order"] += in_order_of_ledger(as_words) != as_words
        counts["cut list"] += limit_ranges(info.deleted, form=RangeForm.LIST, limits=limits).excluded_count > 0
        counts["cut words"] += limit_ranges(info.deleted, form=RangeForm.WORDS, limits=limits).excluded_count > 0
        for form, data, decoded in (
            (RangeForm.LIST, as_list, case["messageRangeDecoded"]),
            (RangeForm.WORDS, as_words, case["longArrayDecoded"]),
        ):
            found = decode_position_info(data)
            kept, _ = limit_ranges(info.deleted, form=form, limits=limits)
            assert (found.position, found.deleted, found.properties) == (info.position, kept, info.properties)
            assert list(found.position) == decoded["pos"]
            assert len(found.deleted) == decoded["acked"]
            assert len(found.batch) == decoded["nBatch"]
            if form is RangeForm.LIST:
                assert found.deleted.range_count == decoded["nRanges"]
            else:
                assert {ledger: max(2, bitmap.max() // 64 + 1) for ledger, bitmap in found.deleted.bitmaps()} == dict(
                    decoded["maps"]
                )
            written = encode_position_info(found, form=form)
            assert messages.PositionInfo.FromString(written) == messages.PositionInfo.FromString(
                data if form is RangeForm.LIST else in_order_of_ledger(data)
            )
    assert len(cases) == 56
    assert counts == {"dropped late": 8, "order": 16, "cut list": 12, "cut words": 15}


@pytest.mark.parametrize(
    ("form", "key", "cut_count"), [(RangeForm.LIST, "messageRangeHex", 12), (RangeForm.WORDS, "longArrayHex", 13)]
)
def test_every_entry_of_5_0_1_is_read_and_written_as_recorded(form, key, cut_count):
    cut = 0
    for case in recorded():
        info, limits = position_info_of(case), replace(limits_of(case), rule=LimitRule.PULSAR_5_0)
        written = in_order_of_ledger(bytes.fromhex(case.get("r501", case).get(key, case[key])))
        assert encode_position_info(info, form=form, limits=limits) == written, case["id"]
        found = decode_position_info(written)
        kept, excluded = limit_ranges(info.deleted, form=form, limits=limits)
        assert (found.position, found.deleted, found.properties) == (info.position, kept, info.properties)
        cut += excluded > 0
    assert cut == cut_count


def test_every_metadata_record_is_read_and_written_as_recorded():
    compressed, moved = Counter(), 0
    for case in recorded():
        state, info, limits = case["state"], position_info_of(case), limits_of(case)
        closed = CursorInfo(
            -1, info.position, info.deleted, info.batch, info.properties, case["lastActive"], state["cursorProps"]
        )
        data = bytes.fromhex(case["metaClosedHex"])
        assert encode_cursor_info(closed, limits=limits) == data, case["id"]
        found = decode_cursor_info(data)
        assert found.deleted == limit_ranges(info.deleted, form=RangeForm.LIST, limits=limits).kept
        assert encode_cursor_info(found) == data
        while_open = bytes.fromhex(case["metaWhileOpenHex"])
        found_open = decode_cursor_info(while_open)
        assert encode_cursor_info(found_open) == while_open
        assert found_open.cursors_ledger_id >= 0
        assert (len(found_open.deleted), len(found_open.batch)) == (0, 0)
        assert found_open.cursor_properties == state["cursorProps"]
        for name, packed in case.get("metaClosedCompressedHex", {}).items():
            assert decompress(bytes.fromhex(packed)) == data
            assert decode_cursor_info(bytes.fromhex(packed)) == found
            assert decompress(compress(data, Compression[name])) == data
            compressed[name] += 1
        # On reopening, a mark-delete at the end of a ledger moves to the beginning of the next.
        reopened = case["reopenedFromMeta"]
        moved += reopened["md"] != list(found.mark_delete)
        assert str(found.deleted) == reopened["ranges"]
    assert compressed == dict.fromkeys(("LZ4", "ZLIB", "ZSTD", "SNAPPY"), 51)
    assert moved == 1


@pytest.mark.parametrize("form", RangeForm)
def test_a_recorded_state_that_is_written_whole_comes_back_whole(form):
    for case in recorded():
        info = position_info_of(case)
        assert decode_position_info(encode_position_info(info, form=form)) == info
