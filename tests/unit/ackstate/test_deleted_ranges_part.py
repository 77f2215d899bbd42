"""A set and a part of it, changed together, against the same changes to each by itself."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyroaring import BitMap

from ackstate import DeletedRanges, Position
from ackstate.position import ENTRY_ID_MAX

P = Position

ENTRIES = st.sampled_from([0, 1, 2, 3, 126, 127, 128, 129, 16_383, 16_384, ENTRY_ID_MAX - 1, ENTRY_ID_MAX])
POSITIONS = st.lists(st.builds(P, st.sampled_from([3, 200]), ENTRIES))


def ranges_of(positions):
    ranges = DeletedRanges()
    for position in positions:
        ranges.add(position)
    return ranges


def assert_same(ranges, expected):
    ranges._check()
    assert ranges == expected
    assert (len(ranges), ranges.range_count, ranges.record_bytes) == (
        len(expected),
        expected.range_count,
        expected.record_bytes,
    )


@given(durable=POSITIONS, fresh=POSITIONS)
def test_add_with_adds_what_is_new_to_both(durable, fresh):
    whole, part = ranges_of(durable), DeletedRanges()
    new = []
    for position in fresh:
        assert whole.add_with(part, position) == (position not in durable and position not in new)
        if position not in durable and position not in new:
            new.append(position)
    assert_same(whole, ranges_of(durable + new))
    assert_same(part, ranges_of(new))


@given(durable=POSITIONS, fresh=POSITIONS, entries=st.sets(ENTRIES), ledger_id=st.sampled_from([3, 200]))
def test_add_entries_with_adds_what_is_new_to_both(durable, fresh, entries, ledger_id):
    fresh = [position for position in fresh if position not in durable]
    whole, part = ranges_of(durable + fresh), ranges_of(fresh)
    new = BitMap(entries) - whole.entries(ledger_id)
    before = new.copy()
    whole.add_entries_with(part, ledger_id, new)
    added = [P(ledger_id, entry) for entry in new]
    assert new == before
    assert_same(whole, ranges_of(durable + fresh + added))
    assert_same(part, ranges_of(fresh + added))


@example(durable=[P(3, ENTRY_ID_MAX)], fresh=[P(3, ENTRY_ID_MAX - 1)], ledger_id=3, first=ENTRY_ID_MAX - 1)
@given(durable=POSITIONS, fresh=POSITIONS, ledger_id=st.sampled_from([3, 200]), first=ENTRIES)
def test_remove_lowest_with_removes_a_run_from_both(durable, fresh, ledger_id, first):
    durable = [position for position in durable if position >= (ledger_id, first)]
    fresh = [position for position in fresh if position >= (ledger_id, first) and position not in durable]
    whole, part = ranges_of(durable + fresh), ranges_of(fresh)
    run = whole.run_containing(P(ledger_id, first))
    end = whole.remove_lowest_with(part, ledger_id, first)
    assert end == (run.end if run else first)
    assert_same(whole, ranges_of(p for p in durable + fresh if p >= (ledger_id, end)))
    assert_same(part, ranges_of(p for p in fresh if p >= (ledger_id, end)))


def test_remove_lowest_with_goes_no_further_than_entry_ids_do():
    whole, part = ranges_of([P(4, 0)]), DeletedRanges()
    assert whole.remove_lowest_with(part, 3, ENTRY_ID_MAX + 1) == ENTRY_ID_MAX + 1
    assert len(whole) == 1


@pytest.mark.parametrize("entry_id", [7.5, "7"])
def test_a_run_is_not_looked_up_by_a_fraction(entry_id):
    with pytest.raises(TypeError):
        ranges_of([P(3, 7)]).run_containing(P(3, entry_id))
