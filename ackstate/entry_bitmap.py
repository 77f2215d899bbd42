"""One ledger's acked entries as a roaring bitmap: conversion from other types, and its runs."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap

from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, checked_positions

# A run of up to this length is added entry by entry; a longer one by a separate call.
_NARROW = 32
# More ids than this are sorted first: a bitmap adds a thousand sorted ones in a seventh of the time.
_UNSORTED_MAX = 64
_ID_BYTES = 4  # an unsigned number of this size is never out of range

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from ackstate.position import Position


def bitmap_of(entry_ids: Iterable[int]) -> BitMap:
    """Collect entry ids; refuse fractions and numbers out of range, which a bitmap would silently change."""
    if isinstance(entry_ids, BitMap):
        return entry_ids
    if isinstance(entry_ids, range):
        if not entry_ids:
            return BitMap()
        _check_ends(*sorted((entry_ids[0], entry_ids[-1])))
        return BitMap(entry_ids)
    try:
        numbers = np.asarray(memoryview(entry_ids))  # type: ignore[arg-type]
    except TypeError:
        try:
            return _bitmap_of_row(np.frombuffer(array("I", entry_ids), np.uint32))
        except OverflowError as error:
            raise ValueError(f"entry ids must be in 0..{ENTRY_ID_MAX}: {error}") from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise TypeError(
            f"entry ids must be one dimension of integers, got {numbers.ndim} dimensions of {numbers.dtype}"
        )
    if numbers.size and not (numbers.dtype.kind == "u" and numbers.itemsize <= _ID_BYTES):
        _check_ends(int(numbers.min()), int(numbers.max()))
    return _bitmap_of_row(numbers.astype(np.uint32, copy=False))


def _check_ends(lowest: int, highest: int) -> None:
    if not 0 <= lowest <= highest <= ENTRY_ID_MAX:
        raise ValueError(f"entry ids must be in 0..{ENTRY_ID_MAX}, got {lowest} to {highest}")


def _bitmap_of_row(entry_ids: npt.NDArray[np.uint32]) -> BitMap:
    # A bitmap adds sorted ids at 5 ns each and random ones at 30; sorting in numpy costs a third of the difference.
    if (entry_ids[1:] < entry_ids[:-1]).any():
        entry_ids = np.sort(entry_ids)
    return BitMap(array("I", entry_ids.tobytes()))


def bitmaps_of(positions: Collection[Position]) -> dict[int, BitMap]:
    """Return the entries of valid positions, in any order, repeated or not, by ledger."""
    if not positions:
        return {}
    ledger_ids, entry_ids = zip(*positions, strict=True)
    if len(ledger_ids) == 1:
        return {ledger_ids[0]: BitMap(entry_ids)}
    return _by_ledger(ledger_ids, entry_ids, ledger_ids)


def _by_ledger(ledger_ids: Sequence[int], entry_ids: Sequence[int], plain_ids: Sequence[int]) -> dict[int, BitMap]:
    """Return entries by ledger, given the ledger of each; `plain_ids` are the same as plain integers."""
    # Counted in the given ids: most of them are one object.
    if ledger_ids.count(ledger_ids[0]) == len(ledger_ids):
        return {plain_ids[0]: _bitmap_of_ids(entry_ids)}
    by_ledger: dict[int, list[int]] = {}
    for ledger_id, entry_id in zip(plain_ids, entry_ids, strict=True):
        by_ledger.setdefault(ledger_id, []).append(entry_id)
    return {ledger_id: _bitmap_of_ids(ids) for ledger_id, ids in by_ledger.items()}


def _bitmap_of_ids(entry_ids: Sequence[int]) -> BitMap:
    ids = array("I", entry_ids)
    if len(ids) > _UNSORTED_MAX:
        np.frombuffer(ids, np.uint32).sort()
    return BitMap(ids)


def checked_bitmaps_of(positions: Collection[Position] | npt.NDArray[np.integer]) -> dict[int, BitMap]:
    """Return the same for positions that may be invalid, or for an array of integers (ledger id, entry id)."""
    rows = positions.tolist() if isinstance(positions, np.ndarray) else positions
    try:
        ledger_ids, entry_ids = zip(*rows, strict=True)
        if (found := _of_columns(ledger_ids, entry_ids)) is not None:
            return found
    except (TypeError, ValueError):
        pass
    return bitmaps_of(checked_positions(positions))


def _of_columns(ledger_ids: Sequence[int], entry_ids: Sequence[int]) -> dict[int, BitMap] | None:
    """Return the entries by ledger, or None if an id is out of range; `TypeError` if one is no integer."""
    try:
        # Arrays refuse anything but integers, and hold plain ones.
        found = _by_ledger(ledger_ids, entry_ids, array("Q", ledger_ids))
    except OverflowError:
        return None
    return found if 0 <= min(found) <= max(found) <= LEDGER_ID_MAX else None


def union_by_ledger(maps: Iterable[Mapping[int, BitMap]]) -> dict[int, BitMap]:
    """Return the union of maps from a ledger to its entries; it may share their bitmaps and must not be changed."""
    by_ledger: dict[int, list[BitMap]] = {}
    for bitmaps in maps:
        for ledger_id, bitmap in bitmaps.items():
            by_ledger.setdefault(ledger_id, []).append(bitmap)
    return {
        ledger_id: bitmaps[0] if len(bitmaps) == 1 else BitMap.union(*bitmaps)
        for ledger_id, bitmaps in by_ledger.items()
    }


def firsts(bitmap: BitMap) -> BitMap:
    """Return the first entry of each run."""
    return bitmap - bitmap.shift(1)


def lasts(bitmap: BitMap) -> BitMap:
    """Return the last entry of each run."""
    return bitmap - bitmap.shift(-1)


def runs_of(bitmap: BitMap) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the first and the last entry of each run, both inclusive, in order."""
    return np.frombuffer(firsts(bitmap).to_array(), np.uint32), np.frombuffer(lasts(bitmap).to_array(), np.uint32)


def bitmap_of_runs(
    first: npt.NDArray[np.integer], last: npt.NDArray[np.integer], *, is_optimized: bool = True
) -> BitMap:
    """Return the entries of runs, by the first and the last of each; as if added, or optimized."""
    further = last - first
    wide = np.flatnonzero(further >= _NARROW)
    width = further + 1
    width[wide] = 0
    # Narrow runs are expanded entry by entry, all at once: a running count over all runs, minus each run's start.
    begins = np.repeat(first - np.cumsum(width) + width, width)
    narrow = array("I", (begins + np.arange(len(begins), dtype=begins.dtype)).astype(np.uint32).tobytes())
    bitmap = BitMap(narrow, optimize=is_optimized)
    for begin, end in zip(first[wide].tolist(), last[wide].tolist(), strict=True):
        bitmap.add_range(begin, end + 1)
    return bitmap


def run_around(bitmap: BitMap, entry_id: int) -> tuple[int, int]:
    """Return the begin (inclusive) and the end (exclusive) of the run that contains an entry, which must be set."""
    begin = entry_id
    if entry_id and entry_id - 1 in bitmap:
        begin -= _gallop(limit=entry_id, holds=lambda n: bitmap.contains_range(entry_id - n, entry_id))
    return begin, run_end(bitmap, entry_id)


def run_end(bitmap: BitMap, entry_id: int) -> int:
    """Return the end (exclusive) of the run that contains an entry, which must be set."""
    end = entry_id + 1
    if end > ENTRY_ID_MAX or end not in bitmap:
        return end
    return end + _gallop(limit=ENTRY_ID_MAX - entry_id, holds=lambda n: bitmap.contains_range(end, end + n))


def _gallop(*, limit: int, holds: Callable[[int], bool]) -> int:
    """Return the largest length up to `limit` for which `holds` is true; it is true up to there and false after."""
    # Doubling, then halving: a run is usually far shorter than the ledger.
    good, step = 0, 1
    while good + step <= limit and holds(good + step):
        good += step
        step *= 2
    step //= 2
    while step:
        if good + step <= limit and holds(good + step):
            good += step
        step //= 2
    return good
