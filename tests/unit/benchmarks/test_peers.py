"""The peers of the range store hold and count the same; else the comparison would show nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import DeletedRanges, Position
from benchmarks.measurement import check_equal
from benchmarks.peers import IntervalTrees, RangeList, SortedRanges

acks = st.lists(st.builds(Position, st.integers(0, 2), st.integers(0, 20)), max_size=40)


@pytest.mark.parametrize("peer_type", [RangeList, SortedRanges, IntervalTrees])
@given(held=acks, acked=acks)
def test_a_peer_agrees(peer_type, held, acked):
    ranges = DeletedRanges()
    for position in held:
        ranges.add(position)
    peer = peer_type.from_runs(ranges.runs())
    for position in acked:
        assert peer.add(position) == ranges.add(position)
    check_equal(peer, ranges)
