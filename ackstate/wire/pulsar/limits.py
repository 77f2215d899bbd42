"""Limits the acked ranges in a record, by our rule and by the rules of each Pulsar version."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ackstate.deleted_ranges import DeletedRanges
from ackstate.selection import Selection, select

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyroaring import BitMap


class RangeForm(Enum):
    """The form of the acked entries in a `PositionInfo`."""

    LIST = "list"
    """Field 3, a list of ranges: about 20 bytes a range."""

    WORDS = "words"
    """Field 6, a bit for each entry from 0 to a ledger's last acked one."""


class LimitRule(Enum):
    """The unit that the limit on ranges counts. Versions are those of Apache Pulsar."""

    EXACT = "exact"
    """At most `range_count_max` ranges, in either form."""

    PULSAR_4_2 = "4.2"
    """List: one range more than the limit. Words: acked entries of whole ledgers; a ledger is kept if the previous ones
    do not exceed the limit, so the ledger that crosses it is kept."""

    PULSAR_5_0_M1 = "5.0.0-M1"
    """List: exact. Words: as 4.2."""

    PULSAR_5_0 = "5.0"
    """List: exact. Words: acked entries of whole ledgers, up to the first ledger that would cross the limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the contents of a record.

    Attributes:
        range_count_max: As ``managedLedgerMaxUnackedRangesToPersist``; None is no limit.
        batch_index_count_max: Most partly acked batches, lowest positions first, as
            ``managedLedgerMaxBatchDeletedIndexToPersist``; None is no limit.
        rule: The unit that `range_count_max` counts.
    """

    range_count_max: int | None = None
    batch_index_count_max: int | None = None
    rule: LimitRule = LimitRule.EXACT

    def __post_init__(self) -> None:
        for name in ("range_count_max", "batch_index_count_max"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise ValueError(f"{name} must be at least 0, got {limit}")


UNLIMITED = Limits()


def limit_ranges(deleted: DeletedRanges, *, form: RangeForm, limits: Limits) -> Selection:
    """Return the ranges that a record of this form would keep, and the number of acked entries that it excludes.

    If the words form would keep nothing, the record falls back to the list form and its rule, as in Pulsar.
    """
    (kept, excluded_count), _ = apply_limits(deleted, form=form, limits=limits)
    return Selection(kept.copy() if kept is deleted else kept, excluded_count)


def apply_limits(deleted: DeletedRanges, *, form: RangeForm, limits: Limits) -> tuple[Selection, RangeForm]:
    """Return the selection, which may be `deleted` itself, and the form in which it is written."""
    if limits.range_count_max is None:
        return Selection(deleted, 0), form if deleted else RangeForm.LIST
    if form is RangeForm.WORDS:
        kept = _limited_words(deleted, limits.range_count_max, limits.rule)
        if kept:
            return Selection(kept, len(deleted) - len(kept)), form
    one_over = limits.rule is LimitRule.PULSAR_4_2
    return select(deleted, range_count_max=limits.range_count_max + one_over), RangeForm.LIST


def _limited_words(deleted: DeletedRanges, limit: int, rule: LimitRule) -> DeletedRanges:
    if rule is LimitRule.EXACT:
        return select(deleted, range_count_max=limit).kept
    kept = DeletedRanges()
    for ledger_id, bitmap in _whole_ledgers(deleted, limit, including=rule is LimitRule.PULSAR_5_0):
        kept.add_entries(ledger_id, bitmap)
    return kept


def _whole_ledgers(deleted: DeletedRanges, limit: int, *, including: bool) -> Iterator[tuple[int, BitMap]]:
    """Yield the lowest ledgers while their acked entries, with or without the ledger's own, do not exceed the limit."""
    before = 0
    for ledger_id, bitmap in deleted.bitmaps():
        reached = before + len(bitmap)
        if (reached if including else before) > limit:
            return
        yield ledger_id, bitmap
        before = reached
