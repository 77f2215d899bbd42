"""Defines how much of a cursor's acks the durable state may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ackstate.selection import Keep, select
from ackstate.wire.pulsar.ranges import LimitRule, Limits, RangeForm, limit_ranges

if TYPE_CHECKING:
    from ackstate.deleted_ranges import DeletedRanges


class PersistLimits(NamedTuple):
    """How much the durable state may hold.

    Attributes:
        range_count_max: How many ranges; None for any number.
        batch_count_max: How many partly acked batches, the lowest first; None for any number.
        displaces: Whether ranges that `keep` prefers may take the place of durable ones. Otherwise durable ranges stay,
            even beyond a limit that was lowered.
        rule: The unit of `range_count_max`: ranges, or the unit of a Pulsar release in the words form.
        keep: Which ranges are persisted first.
    """

    range_count_max: int | None = None
    batch_count_max: int | None = None
    displaces: bool = False
    rule: LimitRule = LimitRule.EXACT
    keep: Keep = Keep.LOWEST

    @property
    def counts_entries(self) -> bool:
        """Whether `range_count_max` counts acked entries, as Pulsar's words form does."""
        return self.rule is not LimitRule.EXACT

    def has_room_for(self, ranges: DeletedRanges) -> bool:
        """Return whether all of them are within the limit. Complexity: O(1), or O(ledgers) by a rule of Pulsar's."""
        return self.range_count_max is None or self.usage(ranges) <= self.range_count_max

    def usage(self, ranges: DeletedRanges) -> int:
        """Return how much of `range_count_max` the ranges take. Complexity: as above."""
        if self.rule is LimitRule.EXACT:
            return ranges.range_count
        counts = [len(bitmap) for _, bitmap in ranges.bitmaps()]
        if self.rule is not LimitRule.PULSAR_5_0:
            return sum(counts[:-1])
        is_list = bool(counts) and self.range_count_max is not None and counts[0] > self.range_count_max
        return ranges.range_count if is_list else sum(counts)

    def select(self, ranges: DeletedRanges, *, always: DeletedRanges | None) -> DeletedRanges:
        """Return a copy of the ranges that are within the limit, with those of `always` even if they are not.

        If those of `always` leave a rule of Pulsar's no room for all ranges that it keeps, no other range is kept.
        """
        assert self.range_count_max is not None
        if self.rule is LimitRule.EXACT:
            return select(ranges, range_count_max=self.range_count_max, keep=self.keep, always=always).kept
        limits = Limits(self.range_count_max, rule=self.rule)
        kept = limit_ranges(ranges, form=RangeForm.WORDS, limits=limits).kept
        if always is None:
            return kept
        kept.update(always)
        return kept if self.has_room_for(kept) else always.copy()


UNLIMITED = PersistLimits()
