"""Cuts the messages of a bucket into segments, and chooses the buckets to merge.

Source: ``MutableBucket`` and ``BucketDelayedDeliveryTracker`` of Apache Pulsar.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.delay.buckets.bucket import Bucket
    from ackstate.delay.config import DelayConfig

MERGED_COUNT_MAX = 4
"""The maximal number of buckets in one merge."""


def in_order(parts: Sequence[DelayedIndexes]) -> DelayedIndexes:
    """Return the messages of several segments, sorted by time, then by position."""
    deliver_at_ms, ledger_ids, entry_ids = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((entry_ids, ledger_ids, deliver_at_ms))
    return DelayedIndexes(deliver_at_ms[order], ledger_ids[order], entry_ids[order])


def cut_segments(indexes: DelayedIndexes, config: DelayConfig) -> list[DelayedIndexes]:
    """Cut sorted messages into segments of a bounded time span and count; no messages give no segments."""
    cuts = [0]
    times = indexes.deliver_at_ms
    while cuts[-1] < len(times):
        first = cuts[-1]
        # The latest due time in the segment; it may exceed the largest time, which is then never reached.
        last_ms = int(times[first]) + config.max_time_step_per_segment_ms - 1
        end = int(np.searchsorted(times, min(last_ms, np.iinfo(np.int64).max), side="right"))
        if config.max_indexes_per_segment is not None:
            end = min(end, first + config.max_indexes_per_segment)
        cuts.append(end)
    return [_each_once(DelayedIndexes(*(column[first:end] for column in indexes))) for first, end in pairwise(cuts)]


def _each_once(segment: DelayedIndexes) -> DelayedIndexes:
    """Keep only the last of a position's duplicates: the earlier time may be a former time of the message."""
    order = np.lexsort((segment.entry_ids, segment.ledger_ids))
    ledger_ids, entry_ids = segment.ledger_ids[order], segment.entry_ids[order]
    again = (ledger_ids[:-1] == ledger_ids[1:]) & (entry_ids[:-1] == entry_ids[1:])
    if not again.any():
        return segment
    kept = np.ones(len(order), dtype=bool)
    kept[order[:-1][again]] = False
    return DelayedIndexes(*(column[kept] for column in segment))


def buckets_to_merge(buckets: Sequence[Bucket]) -> Sequence[Bucket]:
    """Choose two to four neighbours to merge: each has a segment to be loaded, and they have the fewest messages.

    Args:
        buckets: All buckets, in order of their ledgers.

    Returns:
        Two to four of them; empty if no two neighbours have segments to come.
    """
    for count in range(min(MERGED_COUNT_MAX, len(buckets)), 1, -1):
        windows = [buckets[at : at + count] for at in range(len(buckets) - count + 1)]
        windows = [window for window in windows if all(bucket.has_unloaded_segment for bucket in window)]
        if windows:
            return _smallest(windows)
    return ()


def _smallest(windows: Sequence[Sequence[Bucket]]) -> Sequence[Bucket]:
    """Return the window whose next segment is due first, among those no larger than any before them, as Pulsar does."""
    chosen = windows[0]
    count_min = first_due_min = None
    for window in windows:
        count = sum(bucket.message_count for bucket in window)
        if count_min is None or count <= count_min:
            count_min = count
            first_due_ms = min(bucket.segments[bucket.current].first_due_ms for bucket in window)
            if first_due_min is None or first_due_ms < first_due_min:
                first_due_min, chosen = first_due_ms, window
    return chosen
