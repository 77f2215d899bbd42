"""The ranges that a limit keeps."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import DeletedRanges, Run
from ackstate.selection import Keep, select
from strategies import ENTRY_ID_MAX, ledger_ids

small_ledgers = st.dictionaries(st.sampled_from([0, 3, 4]), st.sets(st.integers(0, 24), max_size=14), max_size=3)
wide_runs = st.lists(
    st.tuples(ledger_ids, st.sampled_from([0, 60, 65_530, 2**31, ENTRY_ID_MAX - 200_000]), st.integers(1, 200_000)),
    max_size=12,
)
limits = st.integers(0, 14)


def ranges_of(runs):
    ranges = DeletedRanges()
    for ledger_id, first, end in runs:
        ranges.add_run(ledger_id, first, end)
    return ranges


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


@given(
    st.one_of(small_ledgers.map(held), wide_runs.map(lambda runs: ranges_of((i, a, a + n) for i, a, n in runs))), limits
)
def test_widest_takes_the_lower_of_two_equals(ranges, limit):
    by_width = sorted(ranges.runs(), key=lambda run: (-width(run), run))
    check(ranges, sorted(by_width[:limit]), select(ranges, range_count_max=limit, keep=Keep.WIDEST))


@given(small_ledgers, small_ledgers, limits, st.sampled_from(Keep))
def test_what_is_to_be_kept_always_goes_before_the_limit(ledgers, always, limit, keep):
    ranges, durable = held(ledgers), held(always)
    ranges.update(durable)
    kept_always = [
        run for run in ranges.runs() if any(run.first <= e < run.end for e in durable.entries(run.ledger_id))
    ]
    others = [run for run in ranges.runs() if run not in kept_always]
    if keep is Keep.WIDEST:
        others.sort(key=lambda run: (-width(run), run))
    kept = kept_always + others[: max(limit - len(kept_always), 0)]
    check(ranges, sorted(kept), select(ranges, range_count_max=limit, keep=keep, always=durable))


@pytest.mark.slow
@pytest.mark.parametrize("keep", Keep)
def test_a_whole_ledger_of_the_largest_size_is_one_range(keep):
    ranges = ranges_of([(1, 0, ENTRY_ID_MAX + 1), (2, 0, ENTRY_ID_MAX), (3, 1, ENTRY_ID_MAX + 1)])
    kept, excluded_count = select(ranges, range_count_max=1, keep=keep)
    assert list(kept.runs()) == [Run(1, 0, ENTRY_ID_MAX + 1)]
    assert excluded_count == 2 * ENTRY_ID_MAX


@pytest.mark.parametrize("keep", Keep)
def test_what_is_kept_is_a_copy(keep):
    ranges = ranges_of([(1, 0, 3), (1, 5, 6)])
    for limit in (1, 2):
        select(ranges, range_count_max=limit, keep=keep).kept.add_run(1, 0, 100)
    assert ranges == ranges_of([(1, 0, 3), (1, 5, 6)])


@pytest.mark.parametrize("limit", [-1, 2.5, "10", None])
def test_a_limit_is_a_whole_number(limit):
    with pytest.raises((ValueError, TypeError), match="range_count_max"):
        select(DeletedRanges(), range_count_max=limit)
