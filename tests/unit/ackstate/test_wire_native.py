"""The native record and the pointer to it: there and back, and the golden files."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import BatchIndexes, DeletedRanges, Position
from ackstate.wire import native
from ackstate.wire.native import Pointer, Record, RecordKind
from strategies import ENTRY_ID_MAX, LEDGER_ID_MAX, few, positions

GOLDEN = Path(__file__).parents[2] / "golden"


def ranges_of(members):
    ranges = DeletedRanges()
    for position in members:
        ranges.add(position)
    return ranges


def batch_of(unacked_words):
    batch = BatchIndexes()
    for position, words in unacked_words.items():
        batch.ack(position, words)
    return batch


unsigned = st.integers(0, 2**64 - 1)
mark_deletes = st.builds(Position, st.integers(0, LEDGER_ID_MAX), st.integers(-1, ENTRY_ID_MAX))
records = st.builds(
    Record,
    st.sampled_from(RecordKind),
    unsigned,
    unsigned,
    st.integers(0, 2**32 - 1),
    mark_deletes,
    st.lists(positions, max_size=20).map(ranges_of),
    st.dictionaries(st.text(max_size=8), st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.dictionaries(positions, st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3), max_size=5).map(batch_of),
)
SAMPLE = Record(
    RecordKind.DELTA,
    epoch=2,
    sequence=7,
    chain=0xDEADBEEF,
    mark_delete=Position(3, 41),
    deleted=ranges_of([Position(3, 43), Position(3, 44), Position(5, 0), Position(5, 70_000)]),
    properties={"dedup": -1, "sequence": 12},
    batch=batch_of({Position(3, 50): [0b1010, -1], Position(5, 1): [4]}),
)
SAMPLE_POINTER = Pointer(17, 2, 9, Position(3, 41), {"owner": "billing"})
SAMPLE_STATE = Pointer(None, 2, 9, Position(3, 41), {}, replace(SAMPLE, kind=RecordKind.SNAPSHOT))


@few
@given(records)
def test_a_record_goes_there_and_back(record):
    assert native.decode(native.encode(record)) == record


@pytest.mark.parametrize(
    ("name", "sample", "encode", "decode"),
    [
        ("native-record-v2", SAMPLE, native.encode, native.decode),
        ("cursor-pointer-v2", SAMPLE_POINTER, native.encode_pointer, native.decode_pointer),
        ("cursor-pointer-v2-state", SAMPLE_STATE, native.encode_pointer, native.decode_pointer),
    ],
)
def test_the_golden_file_is_what_is_written_and_read(name, sample, encode, decode):
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    assert encode(sample) == golden
    assert decode(golden) == sample


def test_a_pointer_has_either_a_ledger_or_a_snapshot():
    for arguments in ((None, 0, 1), (3, 0, 1, None, {}, SAMPLE)):
        with pytest.raises(ValueError, match="either"):
            Pointer(*arguments)


@pytest.mark.parametrize(
    ("changes", "error", "saying"),
    [
        ({"properties": {"n": 2**63}}, ValueError, "property 'n'"),
        ({"properties": {"n": -(2**63) - 1}}, ValueError, "property 'n'"),
        ({"properties": {"x" * 65_536: 1}}, ValueError, "name of 65536 bytes"),
        ({"properties": {"n": "1"}}, TypeError, "'n': '1'"),
        ({"batch": batch_of({Position(3, 50): [1] * 65_536})}, ValueError, "batch 3:50 of 65536 words"),
    ],
)
def test_what_does_not_fit_its_field_is_refused(changes, error, saying):
    with pytest.raises(error, match=saying):
        native.encode(replace(SAMPLE, **changes))
