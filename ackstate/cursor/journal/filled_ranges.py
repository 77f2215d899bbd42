"""Counts the ranges of a state once the holes that delay buckets hold are filled in."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.entry_bitmap import firsts, runs_of
from ackstate.wire.native_shared import joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from pyroaring import BitMap

    from ackstate.deleted_ranges import DeletedRanges
    from ackstate.wire.native_shared import BucketHoles, BucketReference


def filled(ranges: DeletedRanges, buckets: Sequence[BucketHoles]) -> npt.NDArray[np.int64]:
    """Return how many of some ranges lie in each range that they become once the holes in buckets are filled in.

    So there are as many filled ranges, in order of position; one of shared holes alone is none.

    Complexity: O(ranges), and of the buckets.
    """
    holes = joined(buckets)
    counts = [_filled(acked, holes.get(ledger_id)) for ledger_id, acked in ranges.bitmaps()]
    return np.concatenate([*counts, np.empty(0, np.int64)])


def _filled(acked: BitMap, holes: BitMap | None) -> npt.NDArray[np.int64]:
    begins = np.frombuffer(firsts(acked).to_array(), np.uint32)
    if holes is None:
        return np.ones(len(begins), np.int64)
    first, last = runs_of(acked | holes)
    counts = np.searchsorted(begins, last, "right") - np.searchsorted(begins, first, "left")
    return counts[counts > 0]


@final
class FilledCount:
    """Compares the ranges of a state, with shared holes filled in, with a limit; seldom has to count them."""

    __slots__ = ("_acked_count", "_count_max", "_references")

    def __init__(self) -> None:
        self._references: tuple[BucketReference, ...] = ()
        # Invariant: with these buckets, and up to the acks counted here, there are at most _count_max ranges.
        self._acked_count = 0
        self._count_max = -1

    def fits(
        self, deleted: DeletedRanges, buckets: Sequence[BucketHoles], *, range_count_max: int, acked_count: int
    ) -> bool:
        """Return whether at most `range_count_max` ranges are left.

        Args:
            deleted: The state: the same one at each call, or one that was restarted.
            buckets: The delay buckets that hold the holes.
            range_count_max: The limit.
            acked_count: How many acks there were ever; each has added at most one range.

        Complexity: O(buckets), and O(ranges) after as many acks as there was room for, or when the buckets change.
        """
        if deleted.range_count <= range_count_max:
            return True
        if not self._is_counted(buckets) or self._at_most(acked_count) > range_count_max:
            self._count(deleted, buckets, acked_count)
        return self._at_most(acked_count) <= range_count_max

    def at_most(
        self, deleted: DeletedRanges, buckets: Sequence[BucketHoles], *, range_count_max: int, acked_count: int
    ) -> int:
        """Return an upper bound of the ranges that are left; arguments as for `fits`.

        Exact when it was last counted, and too high by as many acks as came since: by less than a 64th of the limit
        where it is above the limit.

        Complexity: O(buckets), and O(ranges) for each 64th of the limit that was acked above it.
        """
        too_high_max = range_count_max // 64
        is_near = self._at_most(acked_count) >= range_count_max and acked_count - self._acked_count > too_high_max
        if not self._is_counted(buckets) or is_near:
            self._count(deleted, buckets, acked_count)
        return min(self._at_most(acked_count), deleted.range_count)

    def _is_counted(self, buckets: Sequence[BucketHoles]) -> bool:
        return self._count_max >= 0 and self._references == tuple(bucket.reference for bucket in buckets)

    def _at_most(self, acked_count: int) -> int:
        return self._count_max + acked_count - self._acked_count

    def _count(self, deleted: DeletedRanges, buckets: Sequence[BucketHoles], acked_count: int) -> None:
        self._references = tuple(bucket.reference for bucket in buckets)
        self._acked_count = acked_count
        self._count_max = len(filled(deleted, buckets))
