"""How messages are cut into segments and put in order, and the key under which a bucket is registered."""

from __future__ import annotations

import numpy as np
import pytest

from ackstate.delay import DelayConfig
from ackstate.delay.bucket_storage import Boundary, BucketKey
from ackstate.delay.buckets import cut_segments
from ackstate.delay.index import in_order
from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes
from small_buckets import KEY

TIME_MAX = 2**63 - 1


def arrays(*rows) -> DelayedIndexes:
    return DelayedIndexes(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"max_indexes_per_segment": None}, [4, 1, 1]),
        ({"max_indexes_per_segment": 3}, [3, 2, 1]),
        ({"max_indexes_per_segment": None, "max_time_step_per_segment_ms": 1}, [2, 1, 1, 1, 1]),
        ({"max_indexes_per_segment": None, "max_time_step_per_segment_ms": 2**63 - 1}, [6]),
    ],
)
def test_segments_are_cut_by_time_and_count(settings, sizes):
    rows = [(100, 3, 0), (100, 3, 1), (105, 3, 2), (109, 3, 3), (110, 3, 4), (TIME_MAX, 3, 5)]
    cut = cut_segments(arrays(*rows), DelayConfig(**({"max_time_step_per_segment_ms": 10} | settings)))
    assert [len(segment.entry_ids) for segment in cut] == sizes
    assert np.concatenate([segment.entry_ids for segment in cut]).tolist() == [0, 1, 2, 3, 4, 5]


def test_of_a_position_twice_in_a_segment_the_later_time_stays():
    once = cut_segments(arrays((100, 3, 0), (100, 3, 1), (105, 3, 0)), DelayConfig(max_indexes_per_segment=None))
    assert [column.tolist() for column in once[0]] == [[100, 105], [3, 3], [1, 0]]


def test_merged_messages_are_in_order_of_time_then_position():
    merged = in_order(*arrays((20, 4, 0), (30, 3, 0), (10, 9, 9), (20, 3, 5), (20, 3, 4)))
    assert [column.tolist() for column in merged] == [[10, 20, 20, 20, 30], [9, 3, 3, 4, 3], [9, 4, 5, 0, 0]]


@pytest.mark.parametrize(
    "text", ["", KEY, f"{KEY}_1", f"{KEY}_1_2_3", f"{KEY}_2_1", f"{KEY}_01_2", f"{KEY}_1_x", "a_1_2"]
)
def test_a_malformed_key_is_refused(text):
    with pytest.raises(ValueError, match=r"^(bucket key|ledger id) must "):
        BucketKey.parse(text)


@pytest.mark.parametrize(
    ("boundary", "expected"),
    [((30, 4, 5), 3), ((30, 4, 6), 4), ((30, 5, 0), 4), ((30, 3, 0), 2), ((31, 0, 0), 4), ((29, 0, 0), 2)],
)
def test_a_boundary_tells_how_many_come_before_it(boundary, expected):
    due = arrays((10, 9, 9), (20, 9, 9), (30, 3, 7), (30, 4, 5))
    assert Boundary(*boundary).count_before(due) == expected


def test_ranges_enclose_with_both_ends():
    assert BucketKey(3, 7).encloses(BucketKey(3, 7))
    assert BucketKey(3, 7).encloses(BucketKey(4, 7))
    assert not BucketKey(3, 7).encloses(BucketKey(4, 8))
    assert not BucketKey(3, 7).encloses(BucketKey(2, 7))
