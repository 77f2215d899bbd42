"""Which ranges are kept when there are more than may be persisted?

All of it is bitmap algebra, a ledger at a time: no run becomes a Python object, nothing is sorted. The entries at
which `length` acked ones begin, ``starts(length)``, shrink from one length to a longer one by one shift and one AND,
and their runs are the runs that are at least that long. So the length that the limit cuts at is found by bisection.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import firsts, lasts

if TYPE_CHECKING:
    from pyroaring import BitMap


class Keep(Enum):
    """Which ranges are worth more than others."""

    LOWEST = "lowest"
    """Those of the lowest positions: what Pulsar keeps."""

    WIDEST = "widest"
    """Those of most entries, the lower of two equals: no other choice of as many ranges leaves out fewer messages."""


class Selection(NamedTuple):
    """What a limit leaves.

    Attributes:
        kept: The ranges within the limit: a copy.
        left_out: How many acked entries are not in them; a crash would redeliver these.
    """

    kept: DeletedRanges
    left_out: int


def select(ranges: DeletedRanges, *, range_count_max: int, keep: Keep = Keep.LOWEST) -> Selection:
    """Keep at most so many ranges, each whole.

    >>> ranges = DeletedRanges()
    >>> ranges.add_run(3, 2, 3) + ranges.add_run(3, 5, 7) + ranges.add_run(4, 0, 9)
    12
    >>> kept, left_out = select(ranges, range_count_max=2, keep=Keep.WIDEST)
    >>> str(kept), left_out
    ('[(3:4..3:6],(4:-1..4:8]]', 1)

    Args:
        ranges: What there is; not changed.
        range_count_max: As ``managedLedgerMaxUnackedRangesToPersist``; 0 keeps nothing.
        keep: Which to prefer.

    Raises:
        ValueError: The limit is negative.
        TypeError: The limit is not an integer, or `keep` is no `Keep`.

    Complexity: a few bitmap operations a ledger for LOWEST; for WIDEST as many as the widest run has binary digits.
    """
    if not isinstance(range_count_max, int) or not isinstance(keep, Keep):
        raise TypeError(f"range_count_max is an int and keep a Keep, found {range_count_max!r} and {keep!r}")
    if range_count_max < 0:
        raise ValueError(f"range_count_max is {range_count_max}, and a limit is 0 or more")
    if ranges.range_count <= range_count_max:
        return Selection(ranges.copy(), 0)
    chosen = _lowest if keep is Keep.LOWEST else _widest
    kept = chosen(ranges, range_count_max) if range_count_max else DeletedRanges()
    return Selection(kept, len(ranges) - len(kept))


def _lowest(ranges: DeletedRanges, count: int) -> DeletedRanges:
    kept = DeletedRanges()
    for ledger_id, bitmap in ranges.bitmaps():
        range_firsts = firsts(bitmap)
        room = count - kept.range_count
        if room < len(range_firsts):
            kept.add_entries(ledger_id, _below(bitmap, range_firsts[room]))
            break
        kept.add_entries(ledger_id, bitmap)
    return kept


def _widest(ranges: DeletedRanges, count: int) -> DeletedRanges:
    length, starts = _longest_with_more_than(count, dict(ranges.bitmaps()))
    # Where exactly `length` entries stand alone is one isolated start; longer runs have several and are all kept.
    isolated = {ledger_id: firsts(bitmap) & lasts(bitmap) for ledger_id, bitmap in starts.items()}
    room = count - (_run_count(starts) - sum(map(len, isolated.values())))
    kept = DeletedRanges()
    for ledger_id, bitmap in starts.items():
        equals = isolated[ledger_id]
        taken = equals if len(equals) <= room else _below(equals, equals[room])
        room -= len(taken)
        kept.add_entries(ledger_id, _grown((bitmap - equals) | taken, length))
    return kept


def _longest_with_more_than(count: int, bitmaps: dict[int, BitMap]) -> tuple[int, dict[int, BitMap]]:
    """Return the greatest length that more than `count` runs have or pass, and where so many acked entries begin."""
    length, starts = 1, bitmaps
    step = 1
    while True:
        longer = _shrunk(starts, step)
        if _run_count(longer) <= count:
            break
        length, starts = length + step, longer
        step = length
    # From here on `length` has more than `count` runs and `length + step` has not.
    while step > 1:
        half = step // 2
        longer = _shrunk(starts, half)
        if _run_count(longer) > count:
            length, starts = length + half, longer
            step -= half
        else:
            step = half
    return length, starts


def _shrunk(starts: dict[int, BitMap], step: int) -> dict[int, BitMap]:
    """Return where runs longer by `step` begin, given where runs of a length not below `step` do."""
    longer = ((ledger_id, bitmap & bitmap.shift(-step)) for ledger_id, bitmap in starts.items())
    return {ledger_id: bitmap for ledger_id, bitmap in longer if bitmap}


def _grown(starts: BitMap, length: int) -> BitMap:
    """Return all entries of the stretches of `length` that begin at `starts`."""
    grown, reached = starts, 1
    while reached < length:
        step = min(reached, length - reached)
        grown = grown | grown.shift(step)
        reached += step
    return grown


def _run_count(bitmaps: dict[int, BitMap]) -> int:
    return sum(bitmap.difference_cardinality(bitmap.shift(1)) for bitmap in bitmaps.values())


def _below(bitmap: BitMap, entry_id: int) -> BitMap:
    part = bitmap.copy()
    part.remove_range(entry_id, 2**32)
    return part
