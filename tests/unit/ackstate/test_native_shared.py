"""Snapshots that refer to delay buckets: exact whatever these hold, there and back, and hostile bytes."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from ackstate import AckStateError, BatchIndexes, CorruptStateError, DeletedRanges, Position, UnsupportedVersionError
from ackstate.range_store import Run
from ackstate.wire import native, native_pointer
from ackstate.wire.native import Record, RecordKind, record_of
from ackstate.wire.native_pointer import Pointer
from ackstate.wire.native_shared import (
    BucketHoles,
    BucketReference,
    SharedSnapshot,
    decode_shared,
    encode_shared,
    is_shared,
    resolve,
    share,
)
from strategies import ENTRY_ID_MAX, LEDGER_ID_MAX

GOLDEN = Path(__file__).parents[2] / "golden" / "native-record-v3.bin"
DOCUMENT = Path(__file__).parents[3] / "docs" / "wire-format.md"
START = Position(0, -1)


def snapshot(acked, mark_delete=START, **further):
    deleted = DeletedRanges.from_bitmaps((ledger_id, BitMap(acked[ledger_id])) for ledger_id in sorted(acked))
    return Record(RecordKind.SNAPSHOT, 2, 0, 0, mark_delete, deleted, **further)


def bucket(bucket_id, holes, first_segment=1, checksum=9):
    bitmaps = {ledger_id: BitMap(entry_ids) for ledger_id, entry_ids in holes.items()}
    return BucketHoles(BucketReference(bucket_id, first_segment, checksum), bitmaps)


def resealed(data):
    return data[:-4] + google_crc32c.value(data[:-4]).to_bytes(4, "little")


SCATTERED = sorted(random.Random(1).sample(range(4_000), 1_000))
MOST = sorted(set(range(4_000)) - set(SCATTERED))
BATCH = BatchIndexes()
BATCH.ack(Position(5, 4_100), [0b1010])
# Of the entries of ledger 5 all are acked that no bucket holds, but for 3,999, and 1 of those that one holds.
SAMPLE = snapshot(
    {3: [7, 8], 5: sorted({*MOST, SCATTERED[5]} - {3_999}), 9: range(20)},
    Position(3, 5),
    properties={"sequence": 12},
    batch=BATCH,
)
HALVES = [bucket(40, {5: SCATTERED[::2]}, 3, 0xCAFE), bucket(17, {5: SCATTERED[1::2], 70: [1]}, 1, 0xBEEF)]


def shared_sample():
    shared = share(SAMPLE, HALVES)
    assert shared is not None
    return shared


def test_what_two_buckets_hold_is_not_written_again():
    shared = shared_sample()
    last = max(MOST[-1] if MOST[-1] != 3_999 else MOST[-2], SCATTERED[5])
    assert shared.references == (BucketReference(17, 1, 0xBEEF), BucketReference(40, 3, 0xCAFE))
    assert shared.runs == (Run(5, min(MOST[0], SCATTERED[5]), last + 1),)
    assert shared.acked_count == len(SAMPLE.deleted)
    assert dict(shared.parts.bitmaps)[5] == BitMap([SCATTERED[5]])
    assert shared.bucket_ids == {17, 40}
    encoded = encode_shared(shared)
    assert len(encoded) < 300
    assert len(native.encode(SAMPLE)) > 1_900
    assert record_of(resolve(decode_shared(encoded), HALVES)) == SAMPLE


@pytest.mark.parametrize(
    "buckets",
    [
        [],
        [bucket(4, {6: SCATTERED})],
        [bucket(4, {9: [3]})],
        [bucket(4, {5: [4_100, 4_102]})],
    ],
    ids=["none", "another ledger", "a plain run", "beyond the last ack"],
)
def test_what_does_not_pay_is_not_shared(buckets):
    assert share(SAMPLE, buckets) is None


def test_a_bucket_that_serves_nothing_is_not_referred_to():
    shared = share(SAMPLE, [*HALVES, bucket(99, {9: [3], 70: [5]})])
    assert shared is not None
    assert shared.bucket_ids == {17, 40}


def test_only_the_first_snapshot_of_a_journal_refers_to_buckets():
    for change in ({"kind": RecordKind.DELTA}, {"sequence": 1}, {"chain": 1}):
        with pytest.raises(ValueError, match="first snapshot"):
            share(replace(SAMPLE, **change), HALVES)


def test_neither_reading_nor_resolving_changes_what_was_given():
    shared, before = shared_sample(), [bucket.bitmaps[5].copy() for bucket in HALVES]
    first = resolve(shared, HALVES)
    for _, bitmap in first.bitmaps:
        bitmap.clear()
    assert record_of(resolve(shared, HALVES)) == SAMPLE
    assert [bucket.bitmaps[5] for bucket in HALVES] == before


def test_only_the_very_buckets_resolve_a_snapshot():
    shared = shared_sample()
    one, other = HALVES
    for wrong in ([one], [one, other, other], [one, other._replace(reference=BucketReference(17, 2, 0xBEEF))]):
        with pytest.raises(ValueError, match="the buckets must be"):
            resolve(shared, wrong)


def test_a_bucket_that_holds_something_else_is_noticed_by_the_number_of_acks():
    one = HALVES[0]
    with pytest.raises(CorruptStateError, match=f"expected {len(SAMPLE.deleted)} acked entries"):
        resolve(shared_sample(), [one, bucket(17, {5: SCATTERED[3::2]}, 1, 0xBEEF)])


entry_ids = st.integers(0, 300)
few = st.dictionaries(st.integers(0, 3), st.frozensets(entry_ids, max_size=200), max_size=4)


@given(few, st.lists(few, max_size=3))
def test_a_snapshot_is_exact_whatever_the_buckets_hold(acked, holes):
    record = snapshot(acked)
    buckets = [bucket(7 * number, held) for number, held in enumerate(holes, 1)]
    shared = share(record, buckets)
    if shared is None:
        return
    encoded = encode_shared(shared)
    assert len(encoded) < len(native.encode(record))
    named = [each for each in buckets if each.reference.bucket_id in shared.bucket_ids]
    assert record_of(resolve(decode_shared(encoded), named)) == record


@given(
    st.dictionaries(st.integers(0, LEDGER_ID_MAX), st.frozensets(st.integers(0, ENTRY_ID_MAX), min_size=1), max_size=4),
    st.dictionaries(
        st.integers(0, LEDGER_ID_MAX), st.tuples(st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=3
    ),
    st.dictionaries(
        st.integers(0, LEDGER_ID_MAX),
        st.tuples(st.integers(0, ENTRY_ID_MAX), st.integers(0, ENTRY_ID_MAX)).map(sorted),
        max_size=3,
    ),
    st.integers(0, 2**64 - 1),
)
def test_what_a_snapshot_says_goes_there_and_back(acked, references, runs, acked_count):
    parts = native.decode_parts(native.encode(snapshot(acked, properties={"n": -1}, batch=BATCH)))
    shared = SharedSnapshot(
        parts,
        tuple(BucketReference(bucket_id, *rest) for bucket_id, rest in sorted(references.items())),
        tuple(Run(ledger_id, first, last + 1) for ledger_id, (first, last) in sorted(runs.items())),
        acked_count,
    )
    encoded = encode_shared(shared)
    assert is_shared(encoded)
    assert decode_shared(encoded) == shared


def test_who_knows_of_no_buckets_refuses_and_takes_no_difference_for_acks():
    encoded = encode_shared(shared_sample())
    for decode in (native.decode, native.decode_parts):
        with pytest.raises(UnsupportedVersionError, match="version 3"):
            decode(encoded)


def test_a_newer_version_says_so():
    newer = bytearray(encode_shared(shared_sample()))
    newer[4] = 4
    for decode in (decode_shared, native.decode):
        with pytest.raises(UnsupportedVersionError, match="version 4"):
            decode(resealed(bytes(newer)))


def test_an_older_record_is_no_shared_one():
    assert not is_shared(native.encode(SAMPLE))
    assert not is_shared(native.MAGIC)
    with pytest.raises(UnsupportedVersionError, match="native record has version 2; this release reads version 3"):
        decode_shared(native.encode(SAMPLE))


def test_every_cut_and_every_flipped_bit_is_found():
    data = encode_shared(shared_sample())
    for length in range(len(data)):
        with pytest.raises(CorruptStateError):
            decode_shared(data[:length])
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AckStateError):
            decode_shared(bytes(flipped))
    with pytest.raises(CorruptStateError):
        decode_shared(data + b"\0")


RUN_AT = len(encode_shared(shared_sample())) - 4 - 16
REFERENCE_AT = RUN_AT - 2 * 16


@pytest.mark.parametrize(
    ("offset", "damage", "expected"),
    [
        (5, b"\2", "a snapshot, sequence 0, chain 0"),
        (20, b"\1", "a snapshot, sequence 0, chain 0"),
        (28, b"\1", "a snapshot, sequence 0, chain 0"),
        (60, b"\1", "the checksum"),
        (60, b"\3", "a bucket id above 40"),
        (64, b"\2", "16 bytes of run"),
        (64, b"\xff\xff\xff\xff", "16 bytes of run"),
        (REFERENCE_AT, struct.pack("<Q", 40), "a bucket id above 40"),
        (REFERENCE_AT, struct.pack("<Q", 2**63), "a bucket id above -1"),
        (REFERENCE_AT + 8, bytes(4), "a segment from 1 on"),
        (RUN_AT, struct.pack("<Q", 2**63), "a ledger id above -1"),
        (RUN_AT + 8, struct.pack("<II", 5, 4), "entries that do not fall"),
    ],
)
def test_damage_behind_a_fitting_checksum_is_named(offset, damage, expected):
    data = bytearray(encode_shared(shared_sample()))
    data[offset : offset + len(damage)] = damage
    with pytest.raises(CorruptStateError, match=expected):
        decode_shared(resealed(bytes(data)))


@pytest.mark.slow
@pytest.mark.parametrize("count", [6_000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_mutated_bytes_give_a_snapshot_or_our_own_error(count):
    seed, choose, read = encode_shared(shared_sample()), random.Random(19966), 0
    for _ in range(count):
        data = bytearray(seed)
        for _ in range(choose.randint(1, 3)):
            at, length = choose.randrange(len(data)), choose.randint(0, 8)
            data[at : at + choose.choice((0, length))] = choose.randbytes(choose.choice((0, 1, length)))
        data[8:12] = len(data).to_bytes(4, "little")
        try:
            shared = decode_shared(resealed(bytes(data)))
        except AckStateError:
            continue
        # Whatever it says is written the same way again, and a state that does not add up is refused.
        assert decode_shared(encode_shared(shared)) == shared
        buckets = [BucketHoles(reference, {5: BitMap(SCATTERED)}) for reference in shared.references]
        try:
            record_of(resolve(shared, buckets)).deleted._check()
        except CorruptStateError:
            continue
        read += 1
    assert read > 0


def test_a_pointer_may_hold_such_a_snapshot():
    pointer = Pointer(None, 2, 9, Position(3, 5), {"owner": "billing"}, shared_sample())
    encoded = native_pointer.encode_pointer(pointer)
    assert native_pointer.decode_pointer(encoded) == pointer
    for length in range(len(encoded)):
        with pytest.raises(CorruptStateError):
            native_pointer.decode_pointer(encoded[:length])
    for bit in range(len(encoded) * 8):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AckStateError):
            native_pointer.decode_pointer(bytes(flipped))
    with pytest.raises(CorruptStateError, match="a snapshot of epoch 3"):
        native_pointer.decode_pointer(native_pointer.encode_pointer(replace(pointer, epoch=3)))


# The golden file, and the tables that draw it.

GOLDEN_HOLES = [bucket(17, {5: range(1, 200, 2)}, 2, 0xC0FFEE)]
GOLDEN_RECORD = snapshot(
    {3: [43, 44], 5: sorted({*range(0, 200, 2), 7} - {100}), 6: [0]},
    Position(3, 41),
    properties={"sequence": 12},
)


def test_the_golden_file_decodes():
    shared = decode_shared(GOLDEN.read_bytes())
    assert record_of(resolve(shared, GOLDEN_HOLES)) == GOLDEN_RECORD
    assert shared.references == (BucketReference(17, 2, 0xC0FFEE),)
    assert shared.runs == (Run(5, 0, 199),)
    assert [(ledger_id, list(bitmap)) for ledger_id, bitmap in shared.parts.bitmaps] == [
        (3, [43, 44]),
        (5, [7, 100]),
        (6, [0]),
    ]


def test_the_golden_file_is_what_is_written():
    shared = share(GOLDEN_RECORD, GOLDEN_HOLES)
    assert shared is not None
    assert encode_shared(shared) == GOLDEN.read_bytes()


def table_after(words):
    """The rows of the first table after some words of the document, without the header."""
    text = DOCUMENT.read_text(encoding="utf-8")
    begin = text.index("\n|", text.index(words)) + 1
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text[begin:].split("\n\n")[0].splitlines()
    ]
    return rows[2:]


def fields(data, words, base=0):
    """The bytes at the rows of a table."""
    kinds = {"u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q", "i64": "<q"}
    return {
        name: struct.unpack_from(kinds[kind], data, int(offset) + base)[0]
        for offset, _, kind, name, *_ in table_after(words)
    }


def test_the_golden_file_reads_as_drawn():
    data = GOLDEN.read_bytes()
    assert fields(data, "## Native record, version 3") == {
        "version": 3,
        "kind": 1,
        "sequence": 0,
        "chain": 0,
        "batch count": 0,
        "reference count": 1,
        "run count": 1,
        "acked count": 103,
    }
    end = len(data) - 4
    assert fields(data, "A **reference block**", end - 32) == {
        "bucket id": 17,
        "first segment": 2,
        "checksum": 0xC0FFEE,
    }
    assert fields(data, "A **run block**", end - 16) == {"ledger id": 5, "first entry id": 0, "last entry id": 198}
    assert struct.unpack_from("<QI", data, 76)[0] == 3  # the first ledger block
