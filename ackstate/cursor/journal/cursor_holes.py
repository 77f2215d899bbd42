"""Gives one cursor the delay buckets of its topic: those to refer to, the pinned ones, the count of ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.cursor.journal.filled_ranges import FilledCount, filled
from ackstate.cursor.journal.hole_pins import HolePins
from ackstate.wire.native_shared import share

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ackstate.cursor.journal.shared_holes import SharedHoles
    from ackstate.cursor.steps import Steps
    from ackstate.cursor.store import Store
    from ackstate.deleted_ranges import DeletedRanges
    from ackstate.wire.native import Record
    from ackstate.wire.native_shared import BucketHoles, SharedSnapshot


@final
class CursorHoles:
    """The shared holes of one cursor's journal, which owns it; one owner, one call at a time.

    Args:
        store: Where the cursor is.
        path: The cursor's path in the metadata store.
        shared: The topic's delay buckets; None if the cursor refers to none from now on.
    """

    def __init__(self, store: Store, path: str, shared: SharedHoles | None) -> None:
        self._store = store
        self._path = path
        self._shared = shared
        self.pins: HolePins | None = None
        """The pins of the cursor; None for a cursor that has none and is given no buckets."""
        self._filled_count = FilledCount()

    def find_pins(self, needed: Collection[int], *, term: int, is_new: bool) -> None:
        """Find the pins of earlier owners.

        Args:
            needed: The buckets that the cursor's record refers to.
            term: The owner's.
            is_new: Whether the cursor never was; then only shared holes, if it is given some, need pins.
        """
        if not is_new or self._shared is not None:
            pins = HolePins(self._store, self._path, term=term, needed=needed)
            self.pins = pins if pins.bucket_ids or self._shared is not None else None

    def keep_only(self, needed: Collection[int]) -> Steps[None]:
        """Release the other buckets: the record in the store refers to these at most."""
        if self.pins is not None:
            yield from self.pins.keep_only(needed)

    @property
    def may_share(self) -> bool:
        """Whether a whole state may refer to delay buckets."""
        return self._shared is not None

    def buckets(self) -> Sequence[BucketHoles]:
        """Return the delay buckets that a whole state may refer to now. Storage may work here."""
        return () if self._shared is None else self._shared.buckets()

    @property
    def refers_to_retired(self) -> bool:
        """Whether a bucket is pinned that was no longer live when any cursor of the topic last looked."""
        if self.pins is None:
            return False
        live = frozenset() if self._shared is None else self._shared.live_ids
        return not self.pins.bucket_ids <= live

    def share(self, snapshot: Record, buckets: Sequence[BucketHoles]) -> Steps[SharedSnapshot | None]:
        """Express a whole state by references to buckets, all of which are pinned then; None if that does not pay.

        Raises:
            StoreError: The storage failed.
        """
        pins = self.pins
        while pins is not None and buckets and (shared := share(snapshot, buckets)) is not None:
            refused = set()
            for bucket_id in sorted(shared.bucket_ids):
                if not (yield from pins.pin(bucket_id)):
                    refused.add(bucket_id)
            if not refused:
                return shared
            buckets = [bucket for bucket in buckets if bucket.reference.bucket_id not in refused]
        return None

    def range_count(self, deleted: DeletedRanges, buckets: Sequence[BucketHoles]) -> int:
        """Return how many ranges there are with the holes of buckets filled in. Complexity: O(ranges), O(1) without."""
        return len(filled(deleted, buckets)) if buckets else deleted.range_count

    def range_count_at_most(self, deleted: DeletedRanges, *, range_count_max: int, acked_count: int) -> int:
        """Return at most how many ranges there are with all known holes filled in; see `FilledCount.at_most`."""
        buckets = () if self._shared is None else self._shared.known
        if not buckets:
            return deleted.range_count
        return self._filled_count.at_most(deleted, buckets, range_count_max=range_count_max, acked_count=acked_count)

    def fits(
        self, deleted: DeletedRanges, buckets: Sequence[BucketHoles], *, range_count_max: int, acked_count: int
    ) -> bool:
        """Return whether at most `range_count_max` ranges are left with holes filled in; see `FilledCount.fits`."""
        return self._filled_count.fits(deleted, buckets, range_count_max=range_count_max, acked_count=acked_count)

    def ranges_in_lowest(self, deleted: DeletedRanges, buckets: Sequence[BucketHoles], *, filled_count: int) -> int:
        """Return how many ranges make up the lowest `filled_count` filled ones. Complexity: O(ranges)."""
        return int(filled(deleted, buckets)[:filled_count].sum())
