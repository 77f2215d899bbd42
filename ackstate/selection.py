"""Selects the ranges that are kept if there are more than may be persisted."""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pyroaring import BitMap

from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import bitmap_of_runs, firsts, runs_of

if TYPE_CHECKING:
    import numpy.typing as npt


class Keep(Enum):
    """The preferred ranges."""

    LOWEST = "lowest"
    """Ranges with the lowest positions, as in Pulsar."""

    WIDEST = "widest"
    """Ranges with most entries; ties go to the lower one. No other choice of as many ranges excludes fewer messages."""


class Selection(NamedTuple):
    """The result of a selection."""

    kept: DeletedRanges  # the ranges within the limit: a copy
    excluded_count: int  # acked entries outside these ranges; a crash would redeliver them


def select(
    ranges: DeletedRanges, *, range_count_max: int, keep: Keep = Keep.LOWEST, always: DeletedRanges | None = None
) -> Selection:
    """Keep at most `range_count_max` ranges, each whole.

    >>> ranges = DeletedRanges()
    >>> ranges.add_run(3, 2, 3) + ranges.add_run(3, 5, 7) + ranges.add_run(4, 0, 9)
    12
    >>> kept, excluded_count = select(ranges, range_count_max=2, keep=Keep.WIDEST)
    >>> str(kept), excluded_count
    ('[(3:4..3:6],(4:-1..4:8]]', 1)

    Args:
        ranges: The ranges; not changed.
        range_count_max: As ``managedLedgerMaxUnackedRangesToPersist``; 0 keeps nothing.
        keep: The preferred ranges.
        always: A subset of `ranges`: each range that contains an entry of it is kept before all others, and even beyond
            the limit, because durable acks must stay durable.

    Raises:
        ValueError: The limit is negative.
        TypeError: The limit is not an integer, or `keep` is not a `Keep`.

    Complexity: O(ranges) without a sort; for LOWEST alone a few bitmap operations for each ledger that is kept.
    """
    if not isinstance(range_count_max, int) or not isinstance(keep, Keep):
        raise TypeError(f"range_count_max must be an int and keep a Keep, got {range_count_max!r} and {keep!r}")
    if range_count_max < 0:
        raise ValueError(f"range_count_max must be at least 0, got {range_count_max}")
    if ranges.range_count <= range_count_max:
        return Selection(ranges.copy(), 0)
    if keep is Keep.LOWEST and not always:
        kept = _lowest(ranges, range_count_max)
    else:
        kept = _preferred(ranges, range_count_max, keep, always or DeletedRanges())
    return Selection(kept, len(ranges) - len(kept))


def _lowest(ranges: DeletedRanges, count: int) -> DeletedRanges:
    kept = DeletedRanges()
    for ledger_id, bitmap in ranges.bitmaps():
        range_firsts = firsts(bitmap)
        room = count - kept.range_count
        if room < len(range_firsts):
            kept.add_entries(ledger_id, bitmap & BitMap(range(range_firsts[room])))
            break
        kept.add_entries(ledger_id, bitmap)
    return kept


def _preferred(ranges: DeletedRanges, count: int, keep: Keep, always: DeletedRanges) -> DeletedRanges:
    ledger_ids, firsts_of, lasts_of = zip(*((i, *runs_of(bitmap)) for i, bitmap in ranges.bitmaps()), strict=True)
    ends = np.cumsum([len(column) for column in firsts_of])
    first, last = np.concatenate(firsts_of), np.concatenate(lasts_of)
    kept = np.zeros(len(first), np.bool_)
    for ledger_id, bitmap in always.bitmaps():
        at = bisect_left(ledger_ids, ledger_id)
        # Each of these starts in a range, or at its start.
        held = np.frombuffer(firsts(bitmap).to_array(), np.uint32)
        kept[ends[at] - len(firsts_of[at]) + np.searchsorted(firsts_of[at], held, "right") - 1] = True
    others = np.flatnonzero(~kept)
    room = max(count - int(np.count_nonzero(kept)), 0)
    kept[others[:room] if keep is Keep.LOWEST else others[_widest((last - first)[others], room)]] = True
    first, last = first[kept], last[kept]
    cuts = np.concatenate(([0], np.cumsum(kept)[ends - 1])).tolist()
    parts = [part for part in zip(ledger_ids, cuts, cuts[1:], strict=False) if part[1] < part[2]]
    return DeletedRanges.from_bitmaps((i, bitmap_of_runs(first[a:b], last[a:b])) for i, a, b in parts)


def _widest(further: npt.NDArray[np.uint32], count: int) -> npt.NDArray[np.int64]:
    """Return the indexes of the `count` longest ranges, given their lengths minus one; ties go to the first."""
    if count == 0:
        return np.empty(0, np.int64)
    if count >= len(further):
        return np.arange(len(further))
    narrowest = np.partition(further, -count)[-count]
    wider = np.flatnonzero(further > narrowest)
    equal = np.flatnonzero(further == narrowest)
    return np.concatenate((wider, equal[: count - len(wider)]))
