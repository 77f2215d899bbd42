"""Resolves decoded ranges into the entries that they contain.

It fills in ranges across ledgers, merges overlapping ranges, and refuses impossible ones before it builds anything.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import bitmap_of_runs
from ackstate.position import ENTRY_ID_MAX
from ackstate.wire.pulsar.scan import InvalidRecordError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ackstate.ledger_map import LedgerMap
    from ackstate.wire.pulsar.range_list import Int64s, RangeRows

RANGES = "individual_deleted_messages"

# A range costs nothing to write, but its bitmap takes a container of about 70 bytes, in up to five copies while it is
# counted, for each 65,536 entries. Ranges over unknown ledgers may span this many containers in a record of any size:
# 67 million entries, where a real ledger has 50,000. Each byte of the record allows more.
_SPANNED_FREE = 1_024
_BYTES_PER_SPANNED = 32
_CONTAINER_BITS = 16


class _Runs(NamedTuple):
    """Runs as columns, both ends inclusive; a run whose last is below its first is empty."""

    ledger: Int64s
    first: Int64s
    last: Int64s

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> _Runs:
        return _Runs(*(column[chosen] for column in self))


def resolve(rows: RangeRows, ledgers: LedgerMap | None, *, record_bytes: int) -> DeletedRanges:
    """Return the entries of ranges ``(lower .. upper]``.

    A range across ledgers contains, in the upper ledger, every entry up to its upper end; in the lower ledger, every
    entry above its lower end, if that ledger is known; and every entry of each known ledger in between.

    Args:
        rows: The ranges, in any order, overlapping or not.
        ledgers: The known ledgers. With None only the upper ledger counts: fewer acks, never more.
        record_bytes: Size of their record; bounds the span of ranges over unknown ledgers.

    Raises:
        InvalidRecordError: An id is impossible, a range ends before it begins, or the span is too large.

    Source: ``ManagedCursorImpl.recoverIndividualDeletedMessages`` of Apache Pulsar.
    """
    _check_ids(rows)
    crossing = rows.lower_ledger != rows.upper_ledger
    runs = _Runs(rows.upper_ledger, np.where(crossing, 0, rows.lower_entry + 1), rows.upper_entry)
    _check_spanned(runs, ledgers, _SPANNED_FREE + record_bytes // _BYTES_PER_SPANNED)
    if ledgers is not None and crossing.any():
        filled = np.array([*_filled(rows, np.flatnonzero(crossing), ledgers)], np.int64).reshape(-1, 3)
        runs = _Runs(*(np.concatenate(pair) for pair in zip(runs, filled.T, strict=True)))
    some = runs.first <= runs.last
    return _collect(_merged(runs if some.all() else runs.where(some)))


def _check_ids(rows: RangeRows) -> None:
    bad = (rows.lower_ledger < 0) | (rows.upper_ledger < rows.lower_ledger)
    bad |= (rows.upper_ledger == rows.lower_ledger) & (rows.upper_entry < rows.lower_entry)
    for entries in (rows.lower_entry, rows.upper_entry):
        bad |= (entries < -1) | (entries > ENTRY_ID_MAX)
    if bad.any():
        index = int(bad.argmax())
        text = "({}:{}..{}:{}]".format(*(int(column[index]) for column in rows))
        raise InvalidRecordError(RANGES, index, expected="a range (ledger:entry..ledger:entry] that rises", found=text)


def _check_spanned(runs: _Runs, ledgers: LedgerMap | None, spanned_max: int) -> None:
    spanned = _spanned(runs.first, runs.last)
    if int(spanned.sum()) <= spanned_max:
        return
    if ledgers is not None:
        ids, which = np.unique(runs.ledger, return_inverse=True)
        known = np.array([ledgers.entry_count(ledger_id) for ledger_id in ids.tolist()], np.int64)
        spanned = _spanned(np.maximum(runs.first, known[which]), runs.last)
    over = np.cumsum(spanned) > spanned_max
    if over.any():
        index = int(over.argmax())
        expected = f"ranges over at most {spanned_max} times 65536 entries of no known ledger"
        raise InvalidRecordError(RANGES, index, expected=expected, found=f"{int(spanned.sum())} times")


def _spanned(first: Int64s, last: Int64s) -> Int64s:
    """Return the number of containers that each run needs besides its first."""
    return np.maximum((last >> _CONTAINER_BITS) - (first >> _CONTAINER_BITS), 0)


def _filled(rows: RangeRows, crossing: NDArray[np.int64], ledgers: LedgerMap) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of ranges that cross ledgers, except those in the upper ledger."""
    gaps = []
    for index in crossing.tolist():
        lower, upper = int(rows.lower_ledger[index]), int(rows.upper_ledger[index])
        yield lower, int(rows.lower_entry[index]) + 1, ledgers.entry_count(lower) - 1
        gaps.append((lower, upper))
    # Overlapping ranges share most of their ledgers: each ledger is visited once.
    reached = -1
    for lower, upper in sorted(gaps):
        for ledger_id in ledgers.ledgers_between(max(lower, reached), upper):
            yield ledger_id, 0, ledgers.entry_count(ledger_id) - 1
        # The upper end itself was skipped, and may be inside the next range.
        reached = max(reached, upper - 1)


def _merged(runs: _Runs) -> _Runs:
    """Return disjoint runs in order of position."""
    if _rise(runs):
        return runs
    runs = runs.where(np.lexsort((runs.first, runs.ledger)))
    borders = _borders(runs.ledger)
    reached = np.concatenate([np.maximum.accumulate(runs.last[part]) for part in borders])
    begins = np.ones(len(reached), np.bool_)
    begins[1:] = (runs.ledger[1:] != runs.ledger[:-1]) | (runs.first[1:] > reached[:-1])
    ends = np.append(np.flatnonzero(begins)[1:], len(reached)) - 1
    return _Runs(runs.ledger[begins], runs.first[begins], reached[ends])


def _rise(runs: _Runs) -> bool:
    above = (runs.ledger[1:] == runs.ledger[:-1]) & (runs.first[1:] > runs.last[:-1])
    return bool((above | (runs.ledger[1:] > runs.ledger[:-1])).all())


def _borders(ledger: Int64s) -> list[slice]:
    """Return each ledger's slice of a sorted column."""
    changes = np.flatnonzero(ledger[1:] != ledger[:-1]) + 1
    cuts = [0, *changes.tolist(), len(ledger)]
    return [slice(begin, end) for begin, end in pairwise(cuts) if begin < end]


def _collect(runs: _Runs) -> DeletedRanges:
    deleted = DeletedRanges()
    for part in _borders(runs.ledger):
        ledger_id = int(runs.ledger[part.start])
        if part.stop - part.start == 1:
            deleted.add_run(ledger_id, int(runs.first[part.start]), int(runs.last[part.start]) + 1)
        else:
            deleted.add_entries(ledger_id, bitmap_of_runs(runs.first[part], runs.last[part]))
    return deleted
