from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from ackstate import DeletedRanges, Position
from ackstate.deleted_ranges import isolated_range_bytes
from strategies import ENTRY_ID_MAX, LEDGER_ID_MAX

P = Position


def ranges_of(*runs):
    ranges = DeletedRanges()
    for run in runs:
        ranges.add_run(*run)
    return ranges


def test_text_is_pulsars():
    ranges = ranges_of((0, 6, 76), (0, 98, 106), (7, 0, 3))
    assert str(ranges) == "[(0:5..0:75],(0:97..0:105],(7:-1..7:2]]"
    assert str(DeletedRanges()) == "[]"


def test_ends_are_open_below_and_closed_above():
    ranges = ranges_of((3, 5, 8), (9, 0, 2))
    assert ranges.first_range() == (P(3, 4), P(3, 7))
    assert ranges.last_range() == (P(9, -1), P(9, 1))
    assert ranges.span() == (P(3, 4), P(9, 1))
    assert DeletedRanges().first_range() is DeletedRanges().last_range() is DeletedRanges().span() is None


def test_the_range_around_an_entry_is_closed_at_both_ends():
    ranges = ranges_of((3, 5, 8))
    assert ranges.range_containing(P(3, 6)) == (P(3, 5), P(3, 7))
    assert ranges.range_containing(P(3, 8)) is None


def test_open_closed_across_ledgers_fills_up_to_what_is_known():
    ranges = ranges_of((1, 9, 11), (2, 40, 41))
    assert ranges.add_open_closed(P(1, 4), P(3, 1)) == 4 + 2
    assert str(ranges) == "[(1:4..1:10],(2:39..2:40],(3:-1..3:1]]"


def test_limits_of_the_ids_are_accepted():
    ranges = ranges_of((LEDGER_ID_MAX, ENTRY_ID_MAX, ENTRY_ID_MAX + 1), (0, 0, 1))
    assert P(LEDGER_ID_MAX, ENTRY_ID_MAX) in ranges
    assert ranges.remove_at_most(P(LEDGER_ID_MAX, ENTRY_ID_MAX)) == 2
    assert ranges.record_bytes == ranges.range_count == 0


@pytest.mark.parametrize(
    "refused",
    [
        lambda ranges: ranges.add(P(1, -1)),
        lambda ranges: ranges.add(P(1, ENTRY_ID_MAX + 1)),
        lambda ranges: ranges.add(P(-1, 0)),
        lambda ranges: ranges.add(P(LEDGER_ID_MAX + 1, 0)),
        lambda ranges: ranges.add(P(1, 1.5)),
        lambda ranges: ranges.add(P(2, 1.0)),
        lambda ranges: (ranges.add(P(1, 6)), ranges.add(P(1, 1.5))),
        lambda ranges: ranges.add(P("1", 1)),
        lambda ranges: ranges.add_run(1, 5, 4),
        lambda ranges: ranges.add_run(1, 5, ENTRY_ID_MAX + 2),
        lambda ranges: ranges.add_entries(1, [3, -1]),
        lambda ranges: ranges.add_entries(1, [3, ENTRY_ID_MAX + 1]),
        lambda ranges: ranges.add_entries(1, [3, 4.5]),
        lambda ranges: ranges.add_entries(1, array("q", [3, -1])),
        lambda ranges: ranges.add_entries(1, np.array([3, -1])),
        lambda ranges: ranges.add_entries(1, np.array([3, ENTRY_ID_MAX + 1])),
        lambda ranges: ranges.add_entries(1, np.array([3, 2**64 - 1], np.uint64)),
        lambda ranges: ranges.add_entries(1, np.array([3.0, 4.0])),
        lambda ranges: ranges.add_entries(1, np.array([True, False])),
        lambda ranges: ranges.add_entries(1, np.array([[3, 4], [6, 7]])),
        lambda ranges: ranges.add_entries(1, array("d", [3.0])),
        lambda ranges: ranges.add_entries(1, range(3, -2, -1)),
        lambda ranges: ranges.add_entries(1, range(ENTRY_ID_MAX, ENTRY_ID_MAX + 2)),
        lambda ranges: ranges.add_entries(1, "34"),
        lambda ranges: ranges.add_entries(1, None),
        lambda ranges: ranges.remove_at_most(P(1, 6.5)),
        lambda ranges: ranges.remove_at_most(P(2, -2)),
        lambda ranges: ranges.remove_at_most(P(LEDGER_ID_MAX + 1, 0)),
        lambda ranges: ranges.add_entries(-1, [3]),
        lambda ranges: ranges.add_open_closed(P(2, 0), P(1, 0)),
        lambda ranges: ranges.add_open_closed(P(1, 0), P(2, ENTRY_ID_MAX + 1)),
    ],
)
def test_a_refused_call_changes_nothing(refused):
    ranges = ranges_of((1, 5, 8))
    with pytest.raises((ValueError, TypeError)):
        refused(ranges)
    assert ranges == ranges_of((1, 5, 8))
    ranges._check()


@pytest.mark.parametrize("entry_id", [0, 1, 127, 128, 129, 2**14, 2**21 + 1, 2**28, ENTRY_ID_MAX])
def test_no_ack_adds_more_than_an_isolated_range(entry_id):
    for others in ([], [entry_id - 1], [entry_id + 1], [entry_id - 1, entry_id + 1]):
        ranges = DeletedRanges()
        ranges.add_entries(300, [other for other in others if 0 <= other <= ENTRY_ID_MAX])
        before = ranges.record_bytes
        ranges.add(P(300, entry_id))
        assert ranges.record_bytes - before <= isolated_range_bytes(300, entry_id)
        assert len(others) or ranges.record_bytes == isolated_range_bytes(300, entry_id)


@pytest.mark.parametrize("last", [0, 126, 127, 128, 129, 2**14 - 2, 2**14 - 1, 2**14, 2**14 + 1, 2**21 - 1, 2**21])
def test_a_range_that_is_cut_takes_what_its_rest_takes(last):
    for first in (0, max(last - 1, 0)):
        cut, rest = DeletedRanges(), DeletedRanges()
        cut.add_run(300, first, last + 3)
        rest.add_run(300, last + 1, last + 3)
        cut.remove_at_most(P(300, last))
        assert cut.record_bytes == rest.record_bytes
        cut._check()


@given(first=st.integers(0, 20), end=st.integers(-1, 30), step=st.sampled_from([-7, -2, -1, 1, 2, 5]))
def test_entries_of_a_range_are_the_same(first, end, step):
    ranges, one_by_one = DeletedRanges(), DeletedRanges()
    entries = range(first, end, step)
    assert ranges.add_entries(3, entries) == sum(one_by_one.add(P(3, entry)) for entry in entries)
    assert ranges == one_by_one


@pytest.mark.parametrize("ledgers", [(2, 2), (2, 1), (-1,), (LEDGER_ID_MAX + 1,), (1.0,), ("1",)])
def test_bitmaps_of_ledgers_that_do_not_rise_are_refused(ledgers):
    with pytest.raises((ValueError, TypeError)):
        DeletedRanges.from_bitmaps((ledger, BitMap([1])) for ledger in ledgers)
