"""The ranges that a limit keeps."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import DeletedRanges
from ackstate.selection import Keep, select

small_ledgers = st.dictionaries(st.sampled_from([0, 3, 4]), st.sets(st.integers(0, 24), max_size=14), max_size=3)
limits = st.integers(0, 14)


def held(entries_by_ledger):
    ranges = DeletedRanges()
    for ledger_id, entries in entries_by_ledger.items():
        ranges.add_entries(ledger_id, entries)
    return ranges


def width(run):
    return run.end - run.first


def check(ranges, kept_runs, selection):
    assert list(selection.kept.runs()) == kept_runs
    assert selection.excluded_count == len(ranges) - sum(map(width, kept_runs))
    selection.kept._check()


@given(small_ledgers, limits)
def test_lowest_is_the_first_so_many(ledgers, limit):
    ranges = held(ledgers)
    check(ranges, list(ranges.runs())[:limit], select(ranges, range_count_max=limit))


@given(small_ledgers, st.integers(0, 6))
def test_no_choice_of_as_many_ranges_leaves_out_fewer_than_widest(ledgers, limit):
    ranges = held(ledgers)
    selection = select(ranges, range_count_max=limit, keep=Keep.WIDEST)
    assert selection.kept.range_count == min(limit, ranges.range_count)
    choices = combinations(ranges.runs(), min(limit, ranges.range_count))
    assert len(selection.kept) == max(sum(map(width, choice)) for choice in choices)


@pytest.mark.parametrize("limit", [-1, 2.5, "10", None])
def test_a_limit_is_a_whole_number(limit):
    with pytest.raises((ValueError, TypeError), match="range_count_max"):
        select(DeletedRanges(), range_count_max=limit)
