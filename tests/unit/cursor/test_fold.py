"""Folding a native journal: the same as taking the records one after the other, whichever way they are read."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from unittest import mock

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ackstate.cursor.formats
from ackstate import AckStateError, BatchIndexes, CorruptStateError, DeletedRanges, Position
from ackstate.cursor.formats import fold
from ackstate.wire import native
from ackstate.wire.native import Record, RecordKind
from strategies import LEDGER_ID_MAX, positions

EPOCH = 3
ONE_BY_ONE, AT_ONCE = 10**9, 1
START = Position(0, -1)


@dataclass(frozen=True)
class Said:
    """The content of one record in a test."""

    mark_delete: Position = START
    acked: frozenset[Position] = frozenset()
    batch: dict[Position, int] = field(default_factory=dict)
    properties: dict[str, int] = field(default_factory=dict)


def encoded(said, *, sequence, chain):
    deleted, batch = DeletedRanges(), BatchIndexes()
    for position in said.acked:
        deleted.add(position)
    for position, unacked in said.batch.items():
        batch.ack(position, [unacked])
    kind = RecordKind.DELTA if sequence else RecordKind.SNAPSHOT
    return native.encode(Record(kind, EPOCH, sequence, chain, said.mark_delete, deleted, said.properties, batch))


def journal_of(all_said):
    entries, chain = [], 0
    for sequence, said in enumerate(all_said):
        entries.append(encoded(said, sequence=sequence, chain=chain))
        chain = native.checksum(entries[-1])
    return entries


def folded(entries, *, bulk_count_min, discard_damaged=False):
    with mock.patch.object(ackstate.cursor.formats, "_BULK_COUNT_MIN", bulk_count_min):
        return fold(entries, what="journal", epoch=EPOCH, discard_damaged=discard_damaged)


def expected(all_said):
    """The state by its definition: everything that any record acked, above the last mark-delete."""
    mark_delete = all_said[-1].mark_delete
    acked, batch = set(), {}
    for said in all_said:
        acked |= said.acked
        for position, unacked in said.batch.items():
            batch[position] = batch.get(position, -1) & unacked
    acked |= {position for position, unacked in batch.items() if not unacked}
    left = {position: (unacked,) for position, unacked in batch.items() if position not in acked}
    return (
        mark_delete,
        {position for position in acked if position > mark_delete},
        {position: words for position, words in left.items() if position > mark_delete},
        all_said[-1].properties,
    )


def check(all_said):
    entries = journal_of(all_said)
    for bulk_count_min in (ONE_BY_ONE, AT_ONCE):
        recovered = folded(entries, bulk_count_min=bulk_count_min)
        mark_delete, deleted, batch, properties, _ = recovered.content
        deleted._check()
        batch._check()
        acked = {Position(ledger_id, entry_id) for ledger_id, bitmap in deleted.bitmaps() for entry_id in bitmap}
        assert (mark_delete, acked, dict(batch), dict(properties)) == expected(all_said)
        assert (recovered.records_replayed, recovered.bytes_discarded) == (len(entries), 0)


# Few entries, so that records speak of the same ones.
near = st.builds(Position, st.sampled_from([3, 4, LEDGER_ID_MAX]), st.integers(0, 6))
places = near | positions
unacked_masks = st.sampled_from([0b01, 0b10, 0b11, 0b110, -1])
said = st.builds(
    Said,
    st.builds(Position, st.sampled_from([3, 4]), st.integers(-1, 6)),
    st.frozensets(places, min_size=1, max_size=1) | st.frozensets(places, max_size=12),
    st.just({}) | st.dictionaries(places, unacked_masks, max_size=3),
    st.just({}) | st.dictionaries(st.text(max_size=2), st.integers(-9, 9), max_size=2),
)


def in_order(all_said):
    marks = sorted(said.mark_delete for said in all_said)
    return [replace(said, mark_delete=mark) for said, mark in zip(all_said, marks, strict=True)]


@given(st.lists(said, min_size=1, max_size=12).map(in_order))
def test_a_journal_is_the_union_of_its_records(all_said):
    check(all_said)


# Every shape that a delta may have: one ack, some, a run, two ledgers, batches, properties, nothing but a mark-delete.
STORY = [
    Said(Position(3, 0), frozenset({Position(3, 2), Position(3, 9)}), {Position(3, 6): 0b111}),
    Said(Position(3, 0), frozenset({Position(3, 4)})),
    Said(Position(3, 0), frozenset({Position(4, 70_000)})),
    Said(Position(3, 0), frozenset({Position(3, 12), Position(3, 14), Position(3, 70_000)})),
    Said(Position(3, 0), frozenset(Position(3, entry_id) for entry_id in range(20, 90))),
    Said(Position(3, 1), frozenset({Position(4, 1), Position(5, 2)})),
    Said(Position(3, 1), frozenset({Position(3, 7)}), {Position(3, 7): 0b11, Position(3, 8): 0b11}),
    Said(Position(3, 1), frozenset(), {Position(3, 6): 0b101, Position(3, 8): 0b100}),
    Said(Position(3, 1), frozenset(), {Position(3, 7): 0b1, Position(3, 10): 0b1, Position(3, 3): 0b1}),
    Said(Position(3, 3), frozenset({Position(3, 10)}), {}, {"sequence": 7}),
    Said(Position(3, 3), frozenset(), {}, {"sequence": 8}),
    Said(Position(3, 4)),
    Said(Position(3, 4), frozenset({Position(3, 91)})),
]


def test_every_shape_of_delta():
    check(STORY)
    mark_delete, deleted, batch, properties, _ = folded(journal_of(STORY), bulk_count_min=AT_ONCE).content
    assert Position(3, 8) in deleted, "two acks of one batch that leave nothing of it"
    assert dict(batch) == {Position(3, 6): (0b101,)}
    assert (mark_delete, properties) == (Position(3, 4), {})


def outcome(entries, *, bulk_count_min, discard_damaged=False):
    try:
        return folded(entries, bulk_count_min=bulk_count_min, discard_damaged=discard_damaged)
    except AckStateError as error:
        return type(error), str(error)


def outcome_of_both(entries, *, discard_damaged=False):
    """The result of a journal, whichever way it is read."""
    one_by_one = outcome(entries, bulk_count_min=ONE_BY_ONE, discard_damaged=discard_damaged)
    assert outcome(entries, bulk_count_min=AT_ONCE, discard_damaged=discard_damaged) == one_by_one
    return one_by_one


def rechained(entries):
    """The same records, each with the chain and the checksum that fit."""
    sound = entries[:1]
    for damaged in entries[1:]:
        covered = damaged[:28] + struct.pack("<I", native.checksum(sound[-1])) + damaged[32:-4]
        sound.append(covered + struct.pack("<I", google_crc32c.value(covered)))
    return sound


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(STORY)))
def test_a_damaged_byte_behind_a_fitting_checksum_is_judged_alike(number):
    entries = journal_of(STORY)
    refused = 0
    for at in range(len(entries[number]) - 4):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(entries[number])
            damaged[at] ^= mask
            found = outcome_of_both(rechained([*entries[:number], bytes(damaged), *entries[number + 1 :]]))
            refused += isinstance(found, tuple) or found.bytes_discarded > 0
    assert refused > len(entries[number])


@pytest.mark.parametrize("discard_damaged", [False, True])
@pytest.mark.parametrize("number", [1, 5, len(STORY) - 1])
def test_a_damaged_byte_is_found_where_it_is(number, discard_damaged):
    entries = journal_of(STORY)
    begin = sum(map(len, entries[:number]))
    is_kept = discard_damaged or number == len(STORY) - 1
    for at in range(len(entries[number])):
        damaged = bytearray(entries[number])
        damaged[at] ^= 0x10
        if at == 4:
            continue  # the version: refused, whatever else
        found = outcome_of_both(
            [*entries[:number], bytes(damaged), *entries[number + 1 :]], discard_damaged=discard_damaged
        )
        if is_kept:
            assert found.records_replayed == number
            assert found.discarded_offset == begin
            assert found.bytes_discarded == sum(map(len, entries[number:]))
        else:
            assert found[0].__mro__[1] is CorruptStateError
            assert f"journal: at byte {begin + expected_offset(at, len(damaged))} expected" in found[1]


def expected_offset(at, length):
    """Magic and length are checked before the checksum."""
    return 0 if at < 4 else 8 if 8 <= at < 12 else length - 4


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 93])
def test_a_torn_last_record_is_discarded_and_the_others_are_still_read_at_once(cut, monkeypatch):
    entries = journal_of([*STORY, Said(Position(3, 5), frozenset({Position(3, 100)}))])
    entries[-1] = entries[-1][:cut]
    found = outcome_of_both(entries)
    assert (found.records_replayed, found.bytes_discarded) == (len(STORY), cut)
    assert found.content == folded(entries[:-1], bulk_count_min=ONE_BY_ONE).content
    monkeypatch.setattr(ackstate.cursor.formats, "_BULK_COUNT_MIN", AT_ONCE)
    one_by_one = mock.Mock(wraps=native.decode_parts)
    monkeypatch.setattr(native, "decode_parts", one_by_one)
    fold(entries, what="journal", epoch=EPOCH)
    assert one_by_one.call_count == 2 + 9, "the snapshot, the torn one, and the deltas of other shapes"


def test_a_torn_snapshot_is_refused():
    entries = journal_of(STORY[:1])
    with pytest.raises(CorruptStateError, match="checksum"):
        folded([entries[0][:-4] + bytes(4)], bulk_count_min=ONE_BY_ONE, discard_damaged=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda entries: [*entries[:4], *entries[5:]], "(kind, epoch, sequence, chain) (2, 3, 4,"),
        (lambda entries: [*entries[:4], entries[3], *entries[4:]], "(kind, epoch, sequence, chain) (2, 3, 4,"),
        (lambda entries: [entries[0], entries[0], *entries[1:]], "(kind, epoch, sequence, chain) (2, 3, 1,"),
        (lambda entries: entries[1:], "(kind, epoch, sequence, chain) (1, 3, 0, 0)"),
        (lambda entries: [], "expected a snapshot, found no record"),
    ],
    ids=["missing", "repeated", "two snapshots", "no snapshot", "empty"],
)
def test_a_record_that_does_not_belong_is_refused(change, says):
    kind, message = outcome_of_both(change(journal_of(STORY)))
    assert issubclass(kind, CorruptStateError)
    assert says in message


def backward():
    all_said = [Said(Position(3, 5)), *(Said(Position(3, 5 + (n != 7)), frozenset({Position(4, n)})) for n in range(9))]
    all_said[1] = replace(all_said[1], mark_delete=Position(3, 5))
    return all_said


def test_a_mark_delete_that_goes_back_is_refused():
    kind, message = outcome_of_both(journal_of(backward()))
    assert issubclass(kind, CorruptStateError)
    assert "expected a mark-delete of at least 3:6, found 3:5" in message


def test_more_ledgers_than_deltas_of_one_ledger():
    check([Said(), *(Said(acked=frozenset({Position(1_000 - n, n)})) for n in range(300))])
