"""A byte-mutation loop over every decoder: whatever comes in, a sound state or our own error comes out.

`FUZZ_INPUTS` sets how many inputs each decoder gets; `make soak` gives all of them together over a million.
"""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import replace

import google_crc32c
import numpy as np
import pytest

from ackstate import AckStateError, BatchIndexes, DeletedRanges, LedgerMap, Position
from ackstate.wire import native, pulsar
from ackstate.wire.pulsar import delay_snapshot

INPUTS = int(os.environ.get("FUZZ_INPUTS", "3000"))
LEDGERS = LedgerMap.from_counts({3: 100, 5: 0, 6: 70_000, 9: 10})
TELLING_BYTES = (0x00, 0x01, 0x08, 0x0A, 0x10, 0x12, 0x1A, 0x22, 0x32, 0x7F, 0x80, 0xFF)


def sample():
    deleted, batch = DeletedRanges(), BatchIndexes()
    for ledger_id, first, end in [(3, 0, 2), (3, 40, 41), (6, 3, 300), (6, 65_530, 65_540), (9, 9, 10)]:
        deleted.add_run(ledger_id, first, end)
    batch.ack(Position(3, 50), [0b1010, -1])
    batch.ack(Position(6, 1), [1])
    return deleted, batch


def native_seeds():
    deleted, batch = sample()
    for kind in native.RecordKind:
        yield native.encode(native.Record(kind, 1, 2, 3, Position(3, -1), deleted, {"sequence": -1}, batch))
    yield native.encode(native.Record(native.RecordKind.SNAPSHOT, 0, 0, 0, Position(3, 99), DeletedRanges()))


def position_info_seeds():
    deleted, batch = sample()
    for form in pulsar.RangeForm:
        for info in (
            pulsar.PositionInfo(Position(3, -1), deleted, batch, {"sequence": -1}),
            pulsar.PositionInfo(Position(6, 4), deleted),
            pulsar.PositionInfo(Position(3, 0), DeletedRanges(), batch),
        ):
            yield pulsar.encode_position_info(info, form=form)
    # A range across ledgers, as old releases wrote it, and an unknown field.
    yield bytes.fromhex("080310011a0c0a0408031005120408091002") + b"\x7a\x03abc"


def cursor_info_seeds():
    deleted, batch = sample()
    for named in ({}, {"name": "value"}):
        info = pulsar.CursorInfo(-1, Position(3, 1), deleted, batch, {}, 1_700_000_000_000, named)
        for compression in pulsar.Compression:
            yield pulsar.encode_cursor_info(info, compression=compression, threshold_bytes=0)


def resealed(data):
    return data[:-4] + google_crc32c.value(data[:-4]).to_bytes(4, "little")


def pointer_seeds():
    yield native.encode_pointer(native.Pointer(17, 2, 9, Position(3, 41), {"owner": "billing"}))
    snapshot = native.decode(next(native_seeds()))
    yield native.encode_pointer(native.Pointer(None, snapshot.epoch, 9, None, {}, snapshot))


def delayed(*rows):
    return delay_snapshot.DelayedIndexes(*np.array(rows).T)


DELAYED = [
    delayed((300, 3, 7), (300, 5, 0), (1_700_000_000_000, 3, 70_000)),
    delayed((2**63 - 1, 2**63 - 1, 2**32 - 1)),
]
SEGMENTS = [*map(delay_snapshot.encode_segment, DELAYED)]
SEGMENT_METADATA = [*map(delay_snapshot.segment_metadata, DELAYED, SEGMENTS)]


def delay_metadata_seeds():
    yield delay_snapshot.encode_metadata([])
    for checksum in (None, 0xDEADBEEF):
        for segments in (SEGMENT_METADATA, SEGMENT_METADATA[:1]):
            yield delay_snapshot.encode_metadata([replace(segment, checksum=checksum) for segment in segments])


def decode_both_ways(data):
    without = replace(SEGMENT_METADATA[0], checksum=None)
    with contextlib.suppress(AckStateError):
        delay_snapshot.decode_segment(data, what="segment", metadata=without)
    return delay_snapshot.decode_segment(data, what="segment")


def mutated(choose, seeds):
    """One of the seeds after one to four small changes."""
    data = bytearray(choose.choice(seeds))
    for _ in range(choose.randint(1, 4)):
        at = choose.randint(0, len(data))
        length = choose.randint(1, 8)
        change = choose.randrange(7)
        if change == 0:
            data[at : at + 1] = bytes([choose.randrange(256)])
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


def never_sealed(_choose, data):
    return data


def sealed_as_a_rule(choose, data):
    """With a checksum that fits, damage reaches the code behind it."""
    return resealed(data) if len(data) >= 4 and choose.random() < 0.9 else data


def sealed_in_front(choose, data):
    has_seal = data[:3] == b"\x85\x86\x31" and choose.random() < 0.9
    return data[:3] + google_crc32c.value(data[7:]).to_bytes(4, "little") + data[7:] if has_seal else data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decode", "seeds", "finish"),
    [
        (native.decode, native_seeds, sealed_as_a_rule),
        (native.decode_pointer, pointer_seeds, sealed_as_a_rule),
        (lambda data: pulsar.decode_position_info(data, LEDGERS), position_info_seeds, never_sealed),
        (lambda data: pulsar.decode_cursor_info(data, LEDGERS), cursor_info_seeds, never_sealed),
        (lambda data: delay_snapshot.decode_metadata(data, what="snapshot"), delay_metadata_seeds, sealed_in_front),
        (decode_both_ways, lambda: SEGMENTS, never_sealed),
    ],
    ids=["native record", "cursor pointer", "PositionInfo", "ManagedCursorInfo", "delay snapshot", "delay segment"],
)
def test_mutated_bytes_give_a_sound_state_or_our_own_error(decode, seeds, finish):
    seeds = list(seeds())
    choose = random.Random(19966)
    read = 0
    for number in range(INPUTS):
        data = finish(choose, mutated(choose, seeds))
        try:
            state = decode(data)
        except AckStateError:
            continue
        except BaseException as error:
            raise AssertionError(f"input {number}, {data.hex()}: {error!r}") from error
        if hasattr(state, "deleted"):
            state.deleted._check()
            state.batch._check()
        read += 1
    # Some must get through, or the loop only ever tried the first check.
    assert 0 < read < INPUTS
