"""Records that real 4.2.4 brokers wrote before they were killed: read as the restarted broker read them, and written
the same.

Without deviation: each words entry of the sample has its ledgers in order, as ours have.
"""

import gzip
import json
from collections import Counter
from pathlib import Path

from ackstate.wire.pulsar import (
    RangeForm,
    decode_cursor_info,
    decode_position_info,
    encode_cursor_info,
    encode_position_info,
)
from ackstate.wire.pulsar import cursor_state_pb2 as messages

VECTORS = Path(__file__).parents[2] / "vectors" / "broker-positioninfo.jsonl.gz"


def recorded(source):
    with gzip.open(VECTORS, "rt") as lines:
        return [case for case in map(json.loads, lines) if case["source"] == source]


def test_every_cursor_ledger_entry_is_read_as_the_broker_did_and_written_the_same():
    counts = Counter()
    for case in recorded("cursor ledger entry"):
        data = bytes.fromhex(case["hex"])
        info = decode_position_info(data)
        if "recovered" in case:
            counts["recovered"] += 1
            assert str(info.position) == case["recovered"]["markDelete"]
            assert str(info.deleted) == case["recovered"]["individuallyDeleted"]
        message = messages.PositionInfo.FromString(data)
        form = RangeForm.LIST if message.individual_deleted_messages else RangeForm.WORDS
        counts[form] += 1
        assert encode_position_info(info, form=form) == data
    assert counts == {"recovered": 18, RangeForm.LIST: 2, RangeForm.WORDS: 17}


def test_every_metadata_record_is_read_as_the_broker_did_and_written_the_same():
    counts = Counter()
    for case in recorded("metadata store record"):
        data = bytes.fromhex(case["hex"])
        info = decode_cursor_info(data)
        assert encode_cursor_info(info) == data
        counts["in the record" if info.cursors_ledger_id < 0 else "in a ledger"] += 1
        if "recovered" in case:
            counts["recovered"] += 1
            assert str(info.mark_delete) == case["recovered"]["markDelete"]
            assert str(info.deleted) == case["recovered"]["individuallyDeleted"]
    assert counts == {"in a ledger": 35, "in the record": 2, "recovered": 2}
